"""Training's forward and backward over tokens laid end to end, against model.py's modules and autograd.

On the CPU the kernels run in Triton's interpreter, in float32; -m gpu runs them, on four-bit weights too, on the device."""
import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from plumbing import ranks

import grpo
import lora
import model as M
import sample
from fast import batches, decode, engine, linears, memory, packed
from tests import conftest
from tests.test_decode import CPU, GPU, ONE, build, installed, little_beside_much, with_head_norms

gpu = pytest.mark.gpu
ROWS = [[5], [1, 2, 3, 4], list(range(20, 26)), [1, 2]]
QWEN3 = dataclasses.replace(ONE, num_attention_heads=6, num_key_value_heads=3, qk_norm=True)  # as many key heads as SmolLM's


def made(config):
    return with_head_norms(config) if config.qk_norm else build(config)


def padded(m, rows):
    """Final-normed states of each row alone, by the modules."""
    return torch.cat([m.hidden(torch.tensor([row], device=m.embed.weight.device))[0] for row in rows])


def gradients(m, loss):
    """Of all that is trained but the head, which comes behind the states."""
    return torch.autograd.grad(loss, [p for name, p in m.named_parameters() if p.requires_grad and name != "lm_head.weight"])


@pytest.mark.parametrize("config", [ONE, QWEN3], ids=["Qwen2", "Qwen3"])
def test_what_an_update_keeps_is_what_was_planned(config):
    """What Qwen3's head norms make of qkv had been left out: 14% of an 8B's."""
    def numbers(layers, tokens=32):
        make, storages = with_head_norms if config.qk_norm else build, {}
        m = make(dataclasses.replace(config, num_hidden_layers=layers), rank=1)

        def keep(t):
            if t.shape and len(t) == tokens:  # of the tokens: no weight
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() / 4 / tokens
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            states = packed.hidden(m, [[*range(tokens)]], [tokens - 1])
        assert states.requires_grad
        return sum(storages.values())

    planned = memory.update_bytes(dataclasses.replace(config, num_hidden_layers=1), 1, checkpointing=False)[0] / 2
    assert numbers(3) - numbers(2) == pytest.approx(planned, rel=0.12)


def everything(rows):
    return list(range(sum(map(len, rows))))


@pytest.mark.parametrize(("config", "checkpointing"), [(CPU, False), (QWEN3, True)], ids=["qwen2", "qwen3"])
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


def test_norms_are_trained_beside_an_adapter():
    """Under their noise, as the paper's release does: what gets no gradient stays as it was, and nothing says so."""
    m = build(ONE)
    for norm in m.modules():
        if isinstance(norm, M.RMSNorm):
            norm.weight.requires_grad_()
    m.checkpointing = True
    got, want = packed.hidden(m, ROWS, everything(ROWS)), padded(m, ROWS)
    seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (gradients(m, (h * seed).sum()) for h in (got, want))
    assert len(ours) == 1 + len(m.layers) * (4 * 2 + 2)  # the last norm; A and B of each linear, norms
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
    decode.norm_kernel[(3,)](x, norm.weight, norm.noise, wide, 80, 88, norm.eps, BLOCK=128, PDL=False)
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
    x = x.detach().bfloat16()  # its squares are float32's
    torch.testing.assert_close(packed.Norm(norm).own_gradient(x, x), packed.Norm(norm).own_gradient(x.float(), x.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_silu_of_more_columns_than_a_program_takes(dtype):
    """In training and in the decode step, each forward; in 16 bits silu(gate) is rounded before the product, as the module's is."""
    x, d = (torch.randn(3, n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (2200, 1108))
    gate, up = x.requires_grad_().chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    (dx,), x = torch.autograd.grad(want, x, d[:, :1100]), x.detach()
    wide, _ = packed.SwiGLU().forward(x, 8)
    step = decode.swiglu(x, 512, PDL=False)
    torch.testing.assert_close(packed.SwiGLU().backward(x, (), d)[0], dx, atol=1e-2 if dtype == torch.float16 else 1e-5, rtol=1e-3)
    for h in (wide[:, :1100], step, d[:, :1100]):
        torch.testing.assert_close(h, want)
        assert (h != want).float().mean() < (0.01 if dtype == torch.float16 else 1)


def test_heads_are_rounded_between_their_norm_and_the_rotation():
    """As the module rounds them, in the pass over prompts and in the decode step, which read each other's keys."""
    m, g = with_head_norms(QWEN3, rank=0, dtype=torch.float16), torch.Generator().manual_seed(0)
    attn, qkv, places, cache = m.layers[0].attn, torch.randn(5, 12 * 32, generator=g).half(), torch.arange(5), M.KVCache(m, 5, 8)
    rows = packed.Rows(m.config, places, torch.tensor([0, 5]), 5)
    want = M.apply_rope(attn.k_norm(qkv.view(5, 12, 32)[:, 6:9]), rows.cos[:, None], rows.sin[:, None])
    _, (prompt, *_) = packed.Attend(attn, rows).forward(qkv, 0)
    cache.length.copy_(places)
    decode.Step(m, cache).attention(0, qkv)
    for got in (prompt.view(5, 12, 32)[:, 6:9], cache.k[0, places, :, places]):
        assert (got != want).float().mean() < 0.02


def test_an_adapters_gradients_are_products_in_float32():
    a, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in ((3, 700), (700, 5)))
    torch.testing.assert_close(packed.product32(a, b), (a.double() @ b.double()).float())


@pytest.mark.parametrize(("quant", "device"), [
    ("none", "cpu"), pytest.param("none", "cuda", marks=gpu), pytest.param("nvfp4", "cuda", marks=gpu)])
@torch.no_grad()
def test_a_small_adapter_counts_beside_a_large_residual_or_bias(quant, device):
    """As where completions are sampled: otherwise the two are different policies, and the more so the more an adapter has learned."""
    m = build(quant=quant, device=device, dtype=torch.bfloat16)

    def linear(i, x, residual):
        layers = linears.linears_of(m)
        linears.refresh(layers)
        p = layers[1][i]
        return p.forward(torch.cat([x, x @ p.padded_A.T], 1), residual)

    assert little_beside_much(m, linear) == pytest.approx([0.002] * 2, rel=0.5)


def test_another_adapter_or_weight_is_what_the_next_pass_takes():
    """What is kept between passes: 16-bit copies of an adapter, off and on, trained and replaced; the four-bit weight."""
    m = build(ONE, "nvfp4", dtype=torch.float32)

    def check():
        assert torch.allclose(packed.hidden(m, ROWS, everything(ROWS)), padded(m, ROWS), rtol=0, atol=2e-5)

    check()
    kept = linears.linears_of(m)[0][0]
    with lora.disabled(m):
        check()
    with torch.no_grad():
        for _, layer in lora.lora_layers(m):
            layer.B.mul_(-1)
    check()
    assert linears.linears_of(m)[0][0] is kept
    for _, layer in lora.lora_layers(m):
        layer.B = torch.nn.Parameter(layer.B.detach() * 2)
    check()
    for _, layer in lora.lora_layers(m):
        layer.scaling *= 0.5
    check()
    for path, layer in lora.lora_layers(m):
        m.set_submodule(path, layer.base)
    for p in lora.add_lora(m, 5, 10, seed=1):
        torch.nn.init.normal_(p, std=0.3)
    check()
    down = m.layers[0].mlp.down_proj.base
    down.codes = down.codes.flip(0)
    check()
    assert linears.linears_of(m)[0][3].q.codes is down.codes  # what the GPU multiplies with
    down.scale = down.scale.clone()
    assert linears.linears_of(m)[0][3].q.scale is down.scale
    kept = linears.linears_of(m)[0][3]
    down.global_scale.mul_(2)  # in its units B is kept
    check()
    assert linears.linears_of(m)[0][3] is not kept


def completions(n=4):
    g = torch.Generator().manual_seed(2)
    drawn = [torch.randint(0, 290, (k,), generator=g).tolist() for k in (3, 1, 9, 5, 2, 7, 4, 6, 8, 1)]
    return [grpo.Completion({}, drawn[2 * i], drawn[2 * i + 1], [-5.0] * len(drawn[2 * i + 1]), True, advantage=i - 1.5)
            for i in range(n)]


def update_of(m, batch, budget):
    """(summed metrics, gradients) of a batch."""
    m.zero_grad()
    metrics = grpo.backward(m, batch, conftest.settings(micro_batch_tokens=budget))
    return metrics, [p.grad.clone() for p in m.parameters() if p.requires_grad]


def check_update(got, want):
    (metrics, gradients), (plain, expected) = got, want
    assert metrics.keys() == plain.keys()
    for name, value in metrics.items():
        assert torch.allclose(value.double(), plain[name].double(), rtol=1e-4, atol=1e-6), name
    for g, w in zip(gradients, expected, strict=True):
        assert torch.allclose(g, w, rtol=0, atol=2e-5 * w.abs().max().item())


@pytest.mark.parametrize("budget", [6, 1000])
def test_completions_of_a_prompt_share_its_states(monkeypatch, on_fast_path, budget):
    """Ten completions of one prompt, of one token and of several, and one of another: the padded loss and gradient, while a prompt is
    computed once for eight."""
    m, ids = build(ONE), [[6], [7], [8, 9], *([i, i + 1] for i in range(7))]
    cs = [grpo.Completion({}, [5, 6, 7], i, [-5.0] * len(i), True, advantage=len(i) - 1.5) for i in ids]
    cs.append(grpo.Completion({}, [1, 2, 3, 4, 5], [6, 7], [-5.0] * 2, True, advantage=1.0))
    want = update_of(m, cs, 1000)
    seen, end_to_end = [], packed.end_to_end
    monkeypatch.setattr(packed, "end_to_end", lambda rows, of: seen.append(sum(map(len, rows))) or end_to_end(rows, of))
    check_update(update_of(on_fast_path(m), cs, budget), want)
    alone = sum(len(c.prompt) + len(c.ids) - 1 for c in cs)
    assert max(seen) <= budget and (budget == 6 or sum(seen) == alone - (7 + 1) * len(cs[0].prompt))


def test_completion_logprobs_equal_the_plain_ones(on_fast_path):
    """grpo.completion_logprobs, value by value: tempered, of the valid ids, 0 in the padding."""
    m, batch = build(ONE), completions()
    with torch.no_grad():
        want = grpo.completion_logprobs(m, batch, 0.7)
        got = grpo.completion_logprobs(on_fast_path(m), batch, 0.7)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert m.fast and got[2].sum(1).tolist() == [len(c.ids) for c in batch]


@pytest.mark.parametrize(("prompts", "group", "world"), [(4, 8, 8), (3, 16, 2), (1, 4, 3)])
def test_prompts_leave_no_rank_idle(monkeypatch, prompts, group, world):
    """Completions of few prompts go to many cards: none has nothing, none more than twice its share, and each completion one card."""
    monkeypatch.setattr(ranks, "world", world)
    cs = [grpo.Completion({}, [p] * 4, [5] * (20 + i), [0.0] * (20 + i), True) for p in range(prompts) for i in range(group)]
    shares, seen = [], []
    for rank in range(world):
        monkeypatch.setattr(ranks, "rank", rank)
        lists = batches.micro_batches("model", cs, 1000)
        seen += [id(c) for batch in lists for c in batch]
        shares.append(sum(batches.size(group) for batch in lists for group in batches.by_prompt(batch)))
    assert sorted(seen) == sorted(map(id, cs))
    assert min(shares) > 0 and max(shares) < 2 * sum(shares) / world


def test_micro_batches_keep_completions_of_a_prompt_together_and_count_no_padding():
    """The smallest first, each list within the budget in tokens, where padded rows would not be; what is larger is a list of its own."""
    cs = [grpo.Completion({}, [p] * 6, [5] * n, [0.0] * n, True) for p in range(3) for n in (1, 2, 9)]
    cs.append(grpo.Completion({}, [9] * 30, [5] * 20, [0.0] * 20, True))
    lists = batches.micro_batches("model", cs, 32)
    sizes = [[len(c.prompt) + len(c.ids) - 1 for c in batch] for batch in lists]
    tokens = [sum(map(batches.size, batches.by_prompt(batch))) for batch in lists]
    assert sorted(id(c) for batch in lists for c in batch) == sorted(map(id, cs))
    assert tokens == [30, 15, 49] and len(lists[0]) * max(sizes[0]) > 32 and len(lists[2]) == 1
    for p in range(3):
        assert sum(any(c.prompt[0] == p for c in batch) for batch in lists) == 1
    assert batches.micro_batches("model", [], 32) == []
    assert engine.together([3, 1, 1, 2, 2, 9, 1], int, 4) == [[3, 1], [1, 2], [2], [9], [1]]


def test_an_update_makes_room_for_itself(monkeypatch):
    """The sampler's keys and values are still on the card when the update begins, which may not fit beside them."""
    asked = []
    monkeypatch.setattr(engine, "make_room", asked.append)
    batches.micro_batches("model", completions(), 20)
    assert asked == ["model"]


@torch.no_grad()
def by_the_modules(m, cache, prompts, slots):
    """Fill the cache of slots[i] with all of prompts[i] but its last token, one after the other."""
    for prompt, slot in zip(prompts, slots, strict=True):
        row = cache.rows(slot, slot + 1)
        row.length, row.used = torch.zeros_like(row.length), 0
        m.hidden(torch.tensor([prompt[:-1]], device=cache.k.device), row)


def filled(m, prompts, slots, capture):
    """The cache that Prefill fills, and the one of the modules."""
    room = max(6, len(prompts))
    ours, theirs = M.KVCache(m, room, 64), M.KVCache(m, room, 64)
    prefill = packed.Prefill(decode.Step(m, ours))
    prefill.run(m, [p[:-1] for p in prompts], slots, capture)
    by_the_modules(m, theirs, prompts, slots)
    return ours, theirs


@pytest.mark.parametrize(("config", "capture"), [
    (QWEN3, None), (ONE, lambda launch: launch)], ids=["qwen3", "padded"])
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
    monkeypatch.setattr(linears.FastLinear, "few", lambda p, rows: True)
    monkeypatch.setattr(decode.Step, "linear", lambda step, p, x, *args, **kw: calls.append(p.N) or linear(step, p, x, *args, **kw))
    ours, theirs = filled(m, ROWS[1:], [0, 3, 5], None)
    assert len(calls) == 4 * (CPU.num_hidden_layers - 1)
    for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
        assert torch.allclose(a, b, rtol=0, atol=1e-4)


def test_a_graph_is_replayed_for_the_prompts_of_its_call():
    """Captured once for a size: what it reads must be this call's prompts, places and slots, and fewer rows than before."""
    m = build(ONE)
    ours, theirs = M.KVCache(m, 6, 64), M.KVCache(m, 6, 64)
    prefill, captured = packed.Prefill(decode.Step(m, ours)), []
    for prompts, slots in ((ROWS[1:], [0, 3, 5]), ([[9, 8, 7], [30] * 5], [4, 1])):
        prefill.run(m, [p[:-1] for p in prompts], slots, lambda launch: captured.append(launch) or launch)
        by_the_modules(m, theirs, prompts, slots)
    assert len(captured) == 1
    for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
        assert torch.allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("prompts", "sizes"), [([[i, i + 1] for i in range(9)], (64,)), ([[*range(9)]], (4,))], ids=["rows", "tokens"])
def test_what_no_graph_takes_is_launched(monkeypatch, prompts, sizes):
    """More rows than a graph of few tokens has room for, and more tokens than the largest."""
    monkeypatch.setattr(packed.Prefill, "SIZES", sizes)
    captured, m = [], build(ONE)
    ours, theirs = filled(m, prompts, [*range(len(prompts))], lambda launch: captured.append(launch) or launch)
    assert torch.allclose(ours.k, theirs.k, rtol=0, atol=1e-5) and not captured


# ---- on the device


@gpu
@pytest.mark.parametrize("quant", ["none", "nvfp4", "mxfp4", "nf4"])
@pytest.mark.parametrize("rows", [5, 60], ids=["few", "many"])
def test_gpu_packed_equals_the_float32_modules(quant, rows):
    """16 bits on both routes of the GEMM (below and above 256 tokens): errors no larger than those of the modules in 16 bits, in value
    and gradient. Of one draw of weights and prompts the ratio of the two is luck, 0.7 to 1.4 for few rows in every format; pooled it is 1."""
    lengths, squares = [1 + 7 * i % 23 for i in range(rows)], 0
    for draw in range(8 if rows == 5 else 1):
        g = torch.Generator().manual_seed(1 + draw)
        batch = [torch.randint(0, 5000, (n,), generator=g).tolist() for n in lengths]
        m = build(GPU, quant, 8, "cuda", torch.bfloat16, draw=draw)
        exact = build(GPU, quant, 8, "cuda", torch.float32, draw=draw)
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
    m = installed(rank=8)
    settings = conftest.settings(micro_batch_tokens=20)
    grpo.backward(m, completions(), settings)  # compiles, checks weights
    torch.cuda.set_sync_debug_mode("error")
    try:
        grpo.backward(m, completions(), settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
        modules, slots = M.KVCache(m, 20, 1024), torch.randperm(20, generator=g)[:n].tolist()
        graphs.begin(1.0, 1.0, [], sample.draw)
        with torch.no_grad():
            engine.prefill(m, graphs, prompts, slots)
        by_the_modules(m, modules, prompts, slots)
        for prompt, slot in zip(prompts, slots, strict=True):
            for a, b in ((graphs.cache.k, modules.k), (graphs.cache.v, modules.v)):
                a, b = (t[:, slot, :, : len(prompt) - 1].float() for t in (a, b))
                assert (a - b).norm() < 3e-2 * b.norm()
    assert set(graphs.prompts.graphs) >= {64, 128}
