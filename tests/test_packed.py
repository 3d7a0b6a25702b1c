"""Training's forward and backward over tokens laid end to end, against model.py's modules and autograd.

On the CPU the kernels run in Triton's interpreter, in float32; -m gpu runs them, on four-bit weights too, on the device."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from plumbing import ranks

import grpo
import lora
import model as M
from fast import attention, batches, decode, engine, fused, packed
from tests.test_decode import CPU, GPU, build, little_beside_much, with_head_norms

gpu = pytest.mark.gpu
ROWS = [[5], [1, 2, 3, 4], list(range(20, 26)), [1, 2]]
QWEN3 = dataclasses.replace(CPU, num_attention_heads=6, num_key_value_heads=3, qk_norm=True)  # as many key heads as SmolLM's
ONE = dataclasses.replace(CPU, num_hidden_layers=1)  # one block: the interpreter is slow


def made(config):
    return with_head_norms(config) if config.qk_norm else build(config)


def padded(m, rows):
    """Final-normed states of each row alone, by the modules."""
    return torch.cat([m.hidden(torch.tensor([row], device=m.embed.weight.device))[0] for row in rows])


def gradients(m, loss):
    """Of all that is trained but the head, which comes behind the states."""
    return torch.autograd.grad(loss, [p for name, p in m.named_parameters() if p.requires_grad and name != "lm_head.weight"])


def everything(rows):
    return list(range(sum(map(len, rows))))


@pytest.mark.parametrize(("config", "checkpointing"), [(CPU, True), (QWEN3, False)], ids=["qwen2", "qwen3"])
def test_packed_equals_the_modules_in_value_and_gradient(monkeypatch, config, checkpointing):
    """Noise, biases, LoRA, grouped heads and rows of odd lengths: each kernel's backward is written by hand."""
    m, blocks, block = made(config), [], packed.block
    m.checkpointing = checkpointing
    monkeypatch.setattr(packed, "block", lambda *args: blocks.append(args) or block(*args))
    got, want = packed.hidden(m, ROWS, everything(ROWS)), padded(m, ROWS)
    assert torch.allclose(got, want, rtol=0, atol=2e-5)
    seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    for g, w in zip(gradients(m, (got * seed).sum()), gradients(m, (want * seed).sum()), strict=True):
        assert torch.allclose(g, w, rtol=0, atol=1e-5 * w.abs().max().item())
    assert len(blocks) == len(m.layers) * (2 if checkpointing else 1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_parameters_are_trained(checkpointing):
    """Weights, biases, norms under their noise, embedding: what gets no gradient stays as it was, and nothing says so."""
    m = build(CPU, rank=0).requires_grad_(True)
    m.checkpointing = checkpointing
    got, want = packed.hidden(m, ROWS, everything(ROWS)), padded(m, ROWS)
    seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (gradients(m, (h * seed).sum()) for h in (got, want))
    assert len(ours) == 2 + len(m.layers) * (4 + 1 + 2)  # embedding and last norm; linears, qkv's bias, norms
    for g, w in zip(ours, theirs, strict=True):
        assert w.abs().max() > 0 and torch.allclose(g, w, rtol=0, atol=1e-5 * w.abs().max().item())


def test_norms_of_rows_that_are_no_power_of_two_long():
    """Qwen's 896 and 3584: behind a row lies the next one, and behind h what a GEMM takes for x A^T. An eps that counts."""
    norm, g = M.RMSNorm(80, 1e-2), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(norm.weight, generator=g)
    norm.noise.normal_(generator=g)
    x, dy = (0.1 * torch.randn(3, 80, generator=g) for _ in range(2))
    want = norm(x.requires_grad_())
    (dx, dw), x = torch.autograd.grad(want, (x, norm.weight), dy), x.detach()
    wide, d = (torch.full((5, 88), torch.nan)[:3] for _ in range(2))  # what is written behind the last row is nobody's
    packed.Norm(norm).launch(packed.norm_kernel, x, wide, PDL=False)
    d[:, :80] = dy
    torch.testing.assert_close(packed.Norm(norm).backward(x, (), d)[0], dx)
    for h in (wide, d):
        torch.testing.assert_close(h[:, :80], want)
        assert h[:, 80:].isnan().all()
    given = dy.clone()
    y = packed.FinalNorm.apply(packed.Norm(norm), x.requires_grad_(), norm.weight)
    got, own = torch.autograd.grad(y, (x, norm.weight), given)
    torch.testing.assert_close(got, dx)
    torch.testing.assert_close(own, dw)
    assert torch.equal(given, dy)  # others may hold it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_silu_of_more_columns_than_a_program_takes(dtype):
    """In training and in the decode step, each forward; in 16 bits silu(gate) is rounded before the product, as the module's is."""
    x, d = (torch.randn(3, n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (2200, 1108))
    gate, up = x.requires_grad_().chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    (dx,), x = torch.autograd.grad(want, x, d[:, :1100]), x.detach()
    wide, _ = packed.SwiGLU().forward(x, 8)
    step = decode.Step.silu(SimpleNamespace(launch={"PDL": False}), x)
    torch.testing.assert_close(packed.SwiGLU().backward(x, (), d)[0], dx, atol=1e-2 if dtype == torch.float16 else 1e-5, rtol=1e-3)
    for h in (wide[:, :1100], step, d[:, :1100]):
        torch.testing.assert_close(h, want)
        assert (h != want).float().mean() < (0.01 if dtype == torch.float16 else 1)


def test_heads_are_rounded_between_their_norm_and_the_rotation():
    """As the module rounds them, in the pass over prompts and in the decode step, which read each other's keys."""
    m, g = with_head_norms(dataclasses.replace(QWEN3, num_hidden_layers=1), rank=0, dtype=torch.float16), torch.Generator().manual_seed(0)
    attn, qkv, places, cache = m.layers[0].attn, torch.randn(5, 12 * 32, generator=g).half(), torch.arange(5), M.KVCache(m, 5, 8)
    cos, sin = packed.tables(m.config, 5, places.device)
    want = M.apply_rope(attn.k_norm(qkv.view(5, 12, 32)[:, 6:9]), cos[:, None], sin[:, None])
    rows = packed.Rows(places, attention.blocks(torch.tensor([0, 5]), 5), cos, sin)
    _, (prompt, *_) = packed.Attend(attn, rows).forward(qkv, 0)
    cache.length.copy_(places)
    decode.Step(m, cache).attention(0, qkv)
    for got in (prompt.view(5, 12, 32)[:, 6:9], cache.k[0, places, :, places]):
        assert (got != want).float().mean() < 0.02


def test_an_adapters_gradients_are_products_in_float32():
    a, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in ((3, 700), (700, 5)))
    torch.testing.assert_close(packed.product32(a, b), (a.double() @ b.double()).float())


def check_a_small_adapter(quant, device):
    m = build(quant=quant, device=device, dtype=torch.bfloat16)

    def linear(i, x, residual):
        linears = packed.linears_of(m)
        packed.refresh(linears)
        p = linears[1][i]
        return p.forward(torch.cat([x, x @ p.A.T], 1), residual)

    assert little_beside_much(m, linear) == pytest.approx([0.002] * 2, rel=0.5)


@torch.no_grad()
def test_a_small_adapter_counts_beside_a_large_residual_or_bias():
    """As where completions are sampled: otherwise the two are different policies, and the more so the more an adapter has learned."""
    check_a_small_adapter("none", "cpu")


def test_another_adapter_or_weight_is_what_the_next_pass_takes():
    """What is kept between passes: 16-bit copies of an adapter, off and on, trained and replaced; the four-bit weight."""
    m = build(ONE, "nvfp4", dtype=torch.float32)

    def check():
        assert torch.allclose(packed.hidden(m, ROWS, everything(ROWS)), padded(m, ROWS), rtol=0, atol=2e-5)

    check()
    kept = packed.linears_of(m)[0][0]
    with lora.disabled(m):
        check()
    with torch.no_grad():
        for _, layer in lora.lora_layers(m):
            layer.B.mul_(-1)
    check()
    assert packed.linears_of(m)[0][0] is kept
    for _, layer in lora.lora_layers(m):
        layer.B = torch.nn.Parameter(layer.B.detach() * 2)
    check()
    for path, layer in lora.lora_layers(m):
        m.set_submodule(path, layer.base)
    for p in lora.add_lora(m, 5, 10, seed=1):
        torch.nn.init.normal_(p, std=0.3)
    check()
    down = m.layers[0].mlp.down_proj.base
    down.codes = down.codes.flip(0)
    check()
    assert packed.linears_of(m)[0][3].q.codes is down.codes  # what the GPU multiplies with


def completions(n=4):
    g = torch.Generator().manual_seed(2)
    drawn = [torch.randint(0, 290, (k,), generator=g).tolist() for k in (3, 1, 9, 5, 2, 7, 4, 6, 8, 1)]
    return [grpo.Completion({}, drawn[2 * i], drawn[2 * i + 1], [-5.0] * len(drawn[2 * i + 1]), True, advantage=i - 1.5)
            for i in range(n)]


@pytest.mark.parametrize("budget", [1, 20])
def test_an_update_is_the_same_packed_padded_and_in_any_micro_batches(monkeypatch, budget):
    """What the loss reads: log-probs of the completions alone, of a row's own tokens, in the rows' order."""
    m, settings = build(ONE), grpo.Settings(micro_batch_tokens=1000)
    want = grpo.backward(m, completions(), settings)
    expected = [p.grad.clone() for p in m.parameters() if p.requires_grad]
    m.zero_grad()
    monkeypatch.setattr(batches, "packed", lambda model: packed)
    got = grpo.backward(m, completions(), dataclasses.replace(settings, micro_batch_tokens=budget))
    assert set(want) - set(got) == {"places", "padding"}  # end to end there is none
    for name, value in got.items():
        assert torch.allclose(value.double(), want[name].double(), rtol=1e-4, atol=1e-6), name
    for g, w in zip((p.grad for p in m.parameters() if p.requires_grad), expected, strict=True):
        assert torch.allclose(g, w, rtol=0, atol=2e-5 * w.abs().max().item())


@pytest.mark.parametrize("budget", [6, 1000])
def test_completions_of_a_prompt_share_its_states(monkeypatch, budget):
    """Ten completions of one prompt, of one token and of several, and one of another: the padded loss and gradient, while a prompt is
    computed once for eight."""
    m, ids = build(ONE), [[6], [7], [8, 9], *([i, i + 1] for i in range(7))]
    cs = [grpo.Completion({}, [5, 6, 7], i, [-5.0] * len(i), True, advantage=len(i) - 1.5) for i in ids]
    cs.append(grpo.Completion({}, [1, 2, 3, 4, 5], [6, 7], [-5.0] * 2, True, advantage=1.0))
    want = grpo.backward(m, cs, grpo.Settings(micro_batch_tokens=1000))
    expected = [p.grad.clone() for p in m.parameters() if p.requires_grad]
    m.zero_grad()
    seen, states = [], packed.states
    monkeypatch.setattr(batches, "packed", lambda model: packed)
    monkeypatch.setattr(packed, "states", lambda model, linears, ids, *rest: seen.append(len(ids)) or states(model, linears, ids, *rest))
    got = grpo.backward(m, cs, grpo.Settings(micro_batch_tokens=budget))
    assert set(want) - set(got) == {"places", "padding"}  # end to end there is none
    for name, value in got.items():
        assert torch.allclose(value.double(), want[name].double(), rtol=1e-4, atol=1e-6), name
    for g, w in zip((p.grad for p in m.parameters() if p.requires_grad), expected, strict=True):
        assert torch.allclose(g, w, rtol=0, atol=2e-5 * w.abs().max().item())
    alone = sum(len(c.prompt) + len(c.ids) - 1 for c in cs)
    assert max(seen) <= budget and (budget == 6 or sum(seen) == alone - (7 + 1) * len(cs[0].prompt))


@pytest.mark.parametrize("way", [None, packed])
def test_gradients_do_not_vanish_in_float16(monkeypatch, way):
    """A token's gradient is its advantage by the number of tokens: here 2e-8, of which float16 keeps nothing. (This model is a harsh one:
    5% are float16's rounding at any advantage.)"""
    batch = completions()
    for c in batch:
        c.advantage *= 1e-6
    found = {}
    monkeypatch.setattr(batches, "packed", lambda model: way)
    for dtype in (torch.float32, torch.float16):
        m = build(ONE, "nvfp4", dtype=dtype)
        metrics = grpo.backward(m, batch, grpo.Settings(micro_batch_tokens=20))
        found[dtype] = metrics["loss"].item(), torch.cat([p.grad.flatten() for p in m.parameters() if p.requires_grad])
    (loss, want), (half_loss, got) = found.values()
    assert got.dtype == torch.float32 and (got - want).norm() < 0.1 * want.norm() and abs(half_loss - loss) < 0.02 * abs(loss)


def test_a_short_completion_does_not_overflow_float16(monkeypatch):
    """GRPO weighs completions alike: the one token of a short one as much as the 200 of another. 16 times its gradient still fits."""
    m, loss = build(ONE, dtype=torch.float16), grpo.batch_loss
    monkeypatch.setattr(grpo, "batch_loss", lambda *args: (16 * loss(*args)[0], loss(*args)[1]))
    cs = [grpo.Completion({}, [1, 2, 3], [7] * n, [-5.0] * n, True, advantage=1.0) for n in (1, 200, 200)]
    grpo.backward(m, cs, grpo.Settings(micro_batch_tokens=1000))
    assert all(p.grad.isfinite().all() for p in m.parameters() if p.requires_grad)


@pytest.mark.parametrize(("prompts", "group", "world"), [(4, 8, 8), (3, 16, 2), (1, 4, 3)])
def test_families_leave_no_rank_idle(monkeypatch, prompts, group, world):
    """Completions of few prompts go to many cards: none has nothing, and none more than twice its share."""
    m = build(rank=0)
    monkeypatch.setattr(batches, "packed", lambda model: packed)
    monkeypatch.setattr(ranks, "world", world)
    cs = [grpo.Completion({}, [p] * 4, [5] * (20 + i), [0.0] * (20 + i), True) for p in range(prompts) for i in range(group)]
    shares = [sum(map(batches.size, share)) for share in batches.dealt(m, cs, 1000)]
    assert len(shares) == world and min(shares) > 0 and max(shares) < 2 * sum(shares) / world


def test_micro_batches_count_padding_only_where_there_is_padding(monkeypatch):
    m, cs = build(rank=0), completions()
    sizes = [[len(c.prompt) + len(c.ids) - 1 for c in batch] for batch in batches.micro_batches(m, batches.families(m, cs), 12)]
    assert sorted(sum(sizes, [])) == sorted(len(c.prompt) + len(c.ids) - 1 for c in cs)
    assert all(len(b) * max(b) <= 12 or len(b) == 1 for b in sizes)
    monkeypatch.setattr(batches, "packed", lambda model: packed)
    dense = [[len(c.prompt) + len(c.ids) - 1 for c in batch] for batch in batches.micro_batches(m, batches.families(m, cs), 20)]
    assert all(sum(b) <= 20 or len(b) == 1 for b in dense)
    assert any(len(b) * max(b) > 20 for b in dense)


def test_what_the_kernels_cannot_train_takes_the_modules():
    """The weights of Qwen3's head norms get no gradient here: they would stay as they are, and nothing would say so."""

    def way(dtype=torch.bfloat16, cuda=True, trains=False, head_dim=64, qk_norm=False):
        w = SimpleNamespace(is_cuda=cuda, dtype=dtype, requires_grad=trains)
        return batches.packed(SimpleNamespace(embed=SimpleNamespace(weight=w), config=SimpleNamespace(head_dim=head_dim, qk_norm=qk_norm)))

    assert way() is way(torch.float16) is way(trains=True) is way(qk_norm=True) is packed
    with torch.no_grad():
        assert way(trains=True, qk_norm=True) is packed
    assert not any((way(trains=True, qk_norm=True), way(torch.float32), way(cuda=False), way(head_dim=80)))


def filled(m, prompts, slots, capture, calls=1):
    """The cache that Prefill fills, and the one of the modules."""
    room = max(6, len(prompts))
    ours, theirs = M.KVCache(m, room, 64), engine.Eager(m, room, 64)
    prefill = packed.Prefill(m, decode.Step(m, ours))
    prefill.refresh()
    for _ in range(calls):
        prefill.run(m, [p[:-1] for p in prompts], slots, capture)
    with torch.no_grad():
        engine.prefill(m, theirs, prompts, slots)
    return ours, theirs.cache


@pytest.mark.parametrize(("config", "capture"), [
    (CPU, None), (QWEN3, None), (ONE, lambda launch: launch)], ids=["qwen2", "qwen3", "padded"])
def test_prefill_fills_the_cache_as_the_modules_do(config, capture):
    """Slots in any order; padding up to a graph's size, and no other slot, must be left alone."""
    m, prompts, slots = made(config), ROWS[1:], [0, 3, 5]
    ours, theirs = filled(m, prompts, slots, capture)
    for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
        for prompt, slot in zip(prompts, slots, strict=True):
            n = len(prompt) - 1
            assert torch.allclose(a[:, slot, :, :n], b[:, slot, :, :n], rtol=0, atol=1e-5)
            assert (a[:, slot, :, n:] == 0).all()
        assert (a[:, [1, 2, 4]] == 0).all()


def test_a_short_prefill_takes_the_linears_of_a_step(monkeypatch):
    """One kernel each, LoRA and silu included; of the last block only keys and values are computed."""
    m, calls, linear = build(CPU, "nvfp4"), [], decode.Step.linear
    monkeypatch.setattr(packed.WideLinear, "few", lambda p, rows: True)
    monkeypatch.setattr(decode.Step, "linear", lambda step, p, x, *args, **kw: calls.append(p.N) or linear(step, p, x, *args, **kw))
    ours, theirs = filled(m, ROWS[1:], [0, 3, 5], None)
    assert len(calls) == 4 * (CPU.num_hidden_layers - 1)
    for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
        assert torch.allclose(a, b, rtol=0, atol=1e-4)


def test_a_graph_is_replayed_for_the_prompts_of_its_call():
    """Captured once for a size: what it reads must be this call's prompts, places and slots, and fewer rows than before."""
    m = build(ONE)
    ours, theirs = M.KVCache(m, 6, 64), engine.Eager(m, 6, 64)
    prefill, captured = packed.Prefill(m, decode.Step(m, ours)), []
    prefill.refresh()
    for prompts, slots in ((ROWS[1:], [0, 3, 5]), ([[9, 8, 7], [30] * 5], [4, 1])):
        prefill.run(m, [p[:-1] for p in prompts], slots, lambda launch: captured.append(launch) or launch)
        with torch.no_grad():
            engine.prefill(m, theirs, prompts, slots)
    assert len(captured) == 1
    for a, b in ((ours.k, theirs.cache.k), (ours.v, theirs.cache.v)):
        assert torch.allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("prompts", "sizes"), [([[i, i + 1] for i in range(9)], (64,)), ([[*range(9)]], (4,))], ids=["rows", "tokens"])
def test_what_no_graph_takes_is_launched(monkeypatch, prompts, sizes):
    """More rows than a graph of few tokens has room for, and more tokens than the largest."""
    monkeypatch.setattr(packed.Prefill, "SIZES", sizes)
    captured, m = [], build(ONE)
    ours, theirs = filled(m, prompts, [*range(len(prompts))], lambda launch: captured.append(launch) or launch)
    assert torch.allclose(ours.k, theirs.k, rtol=0, atol=1e-5) and not captured


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("V, valid, spread", [(301, 297, 9), (5000, 5000, 9), (9001, 8200, 9), (9001, 8200, 0.5)])
def test_score_is_one_kernel_for_log_prob_entropy_and_slope(V, valid, spread, temperature):
    """A vocabulary within one block and over several, with spare rows; large logits must not overflow, and small ones all count."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = spread * torch.randn(6, 8, generator=g), torch.randn(V, 8, generator=g)
    targets = torch.tensor([0, 1, valid - 1, valid // 2, 5, 7])
    want = M.score(hidden, weight, targets, temperature, valid)
    got = fused.score(M.logits(hidden, weight), targets, temperature, valid, torch.float32)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_large_logits_round_no_log_prob():
    """Logits that are larger by one number have the same probabilities, to the last bit."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randint(-999, 999, (4, 50), generator=g) / 128  # exact beside 8192 as well
    targets = torch.tensor([0, 11, 12, 49])
    plain, far = (fused.score(logits + by, targets, 1.0, 50, torch.float32) for by in (0, 8192))
    assert all(torch.equal(a, b) for a, b in zip(plain, far, strict=True))


# ---- on the device


@gpu
@pytest.mark.parametrize("quant", ["none", "nvfp4"])
@torch.no_grad()
def test_gpu_a_small_adapter_counts_beside_a_large_residual_or_bias(quant):
    check_a_small_adapter(quant, "cuda")


@gpu
@pytest.mark.parametrize(("quant", "dtype", "rank"), [*((q, torch.bfloat16, 8) for q in ("none", "nvfp4", "mxfp4", "nf4")),
                                                      ("none", torch.float16, 8), ("nvfp4", torch.float16, 8), ("none", torch.bfloat16, 0)])
@pytest.mark.parametrize("rows", [5, 60], ids=["few", "many"])
def test_gpu_packed_equals_the_float32_modules(quant, dtype, rank, rows):
    """16 bits on both routes of the GEMM (below and above 256 tokens): errors no larger than those of the modules in 16 bits, in value
    and gradient. Of one draw of weights and prompts the ratio of the two is luck, 0.7 to 1.4 for few rows in every format; pooled it is 1."""
    lengths, squares = [1 + 7 * i % 23 for i in range(rows)], 0
    for draw in range(8 if rows == 5 else 1):
        g = torch.Generator().manual_seed(1 + draw)
        batch = [torch.randint(0, 5000, (n,), generator=g).tolist() for n in lengths]
        m = build(GPU, quant, rank, "cuda", dtype, draw=draw)
        exact = build(GPU, quant, rank, "cuda", torch.float32, draw=draw)
        if rank == 0:  # all parameters
            m, exact = m.requires_grad_(True), exact.requires_grad_(True)
        seed = torch.randn(sum(lengths), GPU.hidden_size, generator=g).cuda() * (torch.rand(sum(lengths), 1, generator=g) < 0.5).cuda()
        results = []
        for model, f in ((exact, padded), (m, padded), (m, lambda m, rows: packed.hidden(m, rows, everything(rows)))):
            h = f(model, batch)
            results.append([h.float().detach(), *(t.float() for t in gradients(model, (h.float() * seed).sum()))])
        want, *both = results
        squares += torch.tensor([[((t - w).norm() / w.norm()).item() ** 2 for t, w in zip(of, want, strict=True)] for of in both])
    theirs, ours = (squares / (draw + 1)).sqrt()
    assert (ours < 1.3 * theirs + 1e-3).all(), (theirs, ours)


@gpu
def test_gpu_update_does_not_wait_for_the_device():
    """A synchronisation per micro-batch leaves the card idle while Python launches the next."""
    m = build(GPU, "nvfp4", 8, "cuda", torch.bfloat16)
    settings = grpo.Settings(micro_batch_tokens=20)
    grpo.backward(m, completions(), settings)  # compiles, checks weights
    torch.cuda.set_sync_debug_mode("error")
    try:
        grpo.backward(m, completions(), settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_gpu_score_equals_the_plain_one():
    hidden = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5003, 256, device="cuda", dtype=torch.bfloat16) / 4
    targets = torch.randint(0, 4999, (300,), device="cuda")
    logp, entropy, slope = M.score(hidden, weight, targets, 0.9, 4999)
    want = M.score(hidden.double(), weight.double(), targets, 0.9, 4999)
    for a, b, bound in zip((logp, entropy, slope), want, (1e-4, 1e-4, 4e-3), strict=True):
        assert torch.allclose(a.double(), b, rtol=bound, atol=bound)


@gpu
@pytest.mark.parametrize("quant", ["none", "nvfp4"])
@pytest.mark.parametrize("rank", [3, 8, 40])
def test_gpu_prefill_by_graph_equals_the_modules(quant, rank):
    """Replayed for other prompts and another adapter than it was captured with; too many rows or tokens for a graph."""
    m = build(GPU, quant, rank, "cuda", torch.bfloat16)
    g = torch.Generator().manual_seed(1)
    graphs = engine.Graphs(m, 20, 1024)
    for n, most in ((3, 30), (5, 50), (2, 120), (20, 3), (20, 200)):
        prompts = [torch.randint(0, 5000, (int(k),), generator=g).tolist() for k in torch.randint(2, most, (n,), generator=g)]
        for _, layer in lora.lora_layers(m):
            torch.nn.init.normal_(layer.B, std=0.1)
        eager, slots = engine.Eager(m, 20, 1024), torch.randperm(20, generator=g)[:n].tolist()
        graphs.begin(1.0, 1.0, [])
        with torch.no_grad():
            engine.prefill(m, graphs, prompts, slots)
            engine.prefill(m, eager, prompts, slots)
        for prompt, slot in zip(prompts, slots, strict=True):
            for a, b in ((graphs.cache.k, eager.cache.k), (graphs.cache.v, eager.cache.v)):
                a, b = (t[:, slot, :, : len(prompt) - 1].float() for t in (a, b))
                assert (a - b).norm() < 3e-2 * b.norm()
    assert set(graphs.prompts.graphs) >= {64, 128}
