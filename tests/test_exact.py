"""--engine exact: the sampler's log-probs are the trainer's to the last bit.

On the CPU the order of the sums; -m gpu compares the bits on the device."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from test_decode import CPU, GPU, ONE, build, filled, first_rows, random_model

import fast
import grpo
import model as M
import sample
from fast import batches, decode, engine, gemm, linears, logprobs, packed
from fast.adapter import adapter_work
from fast.layout import tile
from fast.linears import linears_of
from fast.plan import TILES, plan
from nvfp4 import quantize

gpu = pytest.mark.gpu
EXACT = SimpleNamespace(exact=True)


@torch.no_grad()
def test_step_equals_the_modules():
    """Rows that are in their prompt, at its last token, and blocks behind it."""
    m = build(dataclasses.replace(CPU, num_hidden_layers=2), "nvfp4", 16)
    m.fast = EXACT
    lengths, prompts = [0, 5, 64, 90, 94, 33], [1, 6, 65, 70, 3, 34]
    fused, plain = filled(m, lengths), filled(m, lengths)
    tokens = torch.tensor([3, 77, 200, 0, 300, 8])
    step = decode.Step(m, fused)
    step.token[:6], step.prompt[:6] = tokens, torch.tensor(prompts)
    m.fast = None
    want = m.hidden(tokens[:, None], first_rows(plain, 6))[:, 0]
    torch.testing.assert_close(step.hidden(6), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(fused.k, plain.k, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(fused.v, plain.v, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("greedy", [False, True])
def test_the_recorded_log_prob_is_the_update_kernels(greedy):
    """At each place of out_logp, and at the temperature of the call. The sampler's own sum, by blocks of 4,096 ids, has other last bits."""
    m = build(dataclasses.replace(ONE, vocab_size=9001), "nvfp4", 3)
    m.fast = EXACT
    step = decode.Step(m, filled(m, [3, 9, 1]))
    step.inverse_temperature.fill_(1 / 0.7)
    for i in range(2):
        logits = torch.randn(3, 9001, generator=torch.Generator().manual_seed(i)) * 5
        step.sample(logits, greedy)
        want, _, none = logprobs.score(logits, step.out_ids[i, :3], torch.full((1,), 1 / 0.7), m.valid_vocab)
        assert step.out_logp[i, :3].equal(want) and none is None
    assert not step.out_logp[2:].any() and not step.out_logp[:, 3:].any()


def test_no_sum_depends_on_the_number_of_rows():
    """Neither the ranges of K, split or one after another in a program, nor those of x A^T."""
    for K, ranges in ((896, 1), (3072, 2), (8960, 5)):
        x, A = torch.empty(1, 1), torch.empty(96, K)
        made = [adapter_work(x.expand(M, K), A, 3, t["BM"], exact=True)[1] for M in (1, 64, 9000) for t in TILES]
        assert {w["Z"] for w in made} == {min(16, 1 << (-(-K // 256) - 1).bit_length())} and {w["ZR"] for w in made} == {1}
        for rows in (1, 8, 64, 100, 5000):
            t = plan(rows, 4096, K, 132, exact=True)
            assert t["split"] * t["ranges"] == ranges and t["whole"] == 0
            assert t["split"] == (1 if rows == 5000 or (rows, K) == (100, 3072) else ranges)  # of few programs, the plan splits them
            assert plan(rows, 4096, K, 132)["ranges"] == 1


@pytest.mark.parametrize(("fmt", "chunks", "ranges"), [("nvfp4", 26, 2), ("nf4", 8, 3)])
def test_ranges_of_k_are_added_up_alike_by_splits_and_by_one_program(fmt, chunks, ranges):
    """To the last bit, with all that is added behind them. In tiles of as many rows: on the CPU the order within a product depends on
    that. The last of three ranges is shorter."""
    g = torch.Generator().manual_seed(0)
    q = tile(quantize(torch.randn(72, 128 * chunks, generator=g), fmt))
    x, A = (torch.randn(n, 128 * chunks, generator=g).to(torch.bfloat16) for n in (20, 3))
    B, residual = (torch.randn(n, k, generator=g).to(torch.bfloat16) for n, k in ((72, 3), (20, 72)))
    splits, program, once = (
        gemm.gemm_few(x, q, A=A, B=B, residual=residual, out=torch.empty(20, 72), exact=True, BM=16, split=split, ranges=n)
        for split, n in ((ranges, 1), (1, ranges), (1, 1)))
    assert torch.equal(splits, program) and not torch.equal(splits, once)
    torch.testing.assert_close(splits, once, rtol=1e-4, atol=1e-3)


def test_the_head_always_multiplies_as_many_rows(monkeypatch):
    g = torch.Generator().manual_seed(0)
    hidden, weight, taken, scored = torch.randn(600, 8, generator=g), torch.randn(40, 8, generator=g), [], []
    plain, one = M.logits, logprobs.score
    monkeypatch.setattr(logprobs, "score", lambda x, *rest: scored.append(len(x)) or one(x, *rest))
    monkeypatch.setattr(logprobs, "logits", lambda h, w: taken.append(len(h)) or plain(h, w))
    for rows in (1, 256, 257, 600):
        torch.testing.assert_close(logprobs.head(hidden[:rows], weight, True), plain(hidden[:rows], weight))
    want = logprobs.token_logprobs(hidden, weight, torch.arange(600) % 40)
    assert taken == [256] * 7 + [600]
    got = logprobs.token_logprobs(hidden, weight, torch.arange(600) % 40, exact=True)
    torch.testing.assert_close(got, want)
    assert taken == [256] * 7 + [600] + [256] * 3 and scored == [600, 256, 256, 88]


def test_a_completion_is_always_a_row_of_its_own(monkeypatch):
    """As it is in the sampler, whose blocks begin anew with it."""
    m, c, seen = build(ONE, "nvfp4", 3), grpo.Completion({}, [1, 2, 3], [4, 5, 6], [], True), []
    hidden = packed.hidden
    monkeypatch.setattr(packed, "hidden", lambda model, *rows, **kw: seen.append(rows) or hidden(model, *rows, **kw))
    want = batches.completion_logprobs(m, [c], 1.0)
    m.fast = EXACT
    linears.LINEARS.pop(m)  # made before
    torch.testing.assert_close(batches.completion_logprobs(m, [c], 1.0), want, rtol=1e-3, atol=1e-3)
    assert seen == [([[1, 2, 3, 4, 5]], [2, 3, 4], [0]), ([[1, 2, 3], [4, 5]], [2, 3, 4], [0, 0])]


@torch.no_grad()
def test_sampler_and_trainer_launch_the_same_exact_kernel(monkeypatch):
    """Each projection, with few rows and with as many as cuBLAS would get, an adapter or none."""
    told = []
    for where, name in ((gemm, "plan"), (gemm, "adapter_work")):
        one = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, one=one, name=name: told.append((name, a[-1])) or one(*a))
    for rank in (0, 3):
        m = build(ONE, "nvfp4", rank, dtype=torch.bfloat16)
        m.fast = EXACT
        step, each = decode.Step(m, M.KVCache(m, 2, 8)), [("plan", True), ("adapter_work", True)][: 1 + (rank > 0)]
        for p in step.layers[0]:
            x = torch.randn(600, p.K + p.E, dtype=torch.bfloat16)
            residual = None if p.base.bias is not None else torch.randn(600, p.N, dtype=torch.bfloat16)
            monkeypatch.setattr(gemm, "FEW", 1)
            y = p.forward(x, residual)
            assert told == each, (p.N, told)
            told.clear()
            again = step.linear(p, x[:2, : p.K], None if residual is None else residual[:2].clone())
            assert told == each and torch.equal(again, y[:2])
            told.clear()


def test_a_row_that_moves_takes_its_prompts_length_along():
    """Else its blocks begin elsewhere from there on."""
    m = build(ONE, "nvfp4", 3)
    m.fast = EXACT
    ours = engine.Graphs(m, 3, 64)
    ours.start([0, 2], [sample.Row(0, 0, [1] * n, 9, 1, sample.Sample()) for n in (4, 9)])
    ours.move(2, 1, 8)
    assert ours.step.exact and ours.step.prompt.tolist() == [4, 9, 9]


@pytest.mark.parametrize(("exact", "tokens"), [(True, 4096), (False, 16)])
def test_an_update_of_many_tokens_is_compiled_before_the_first(exact, tokens, monkeypatch):
    """Its GEMMs have other tiles than those of few tokens; the ordinary update has none of them."""
    m, seen = random_model(ONE, "nvfp4"), []
    monkeypatch.setattr(engine, "own_code", lambda model: None)
    monkeypatch.setattr(batches, "rehearse_update", lambda *a: seen.append(a))
    monkeypatch.setattr(engine, "engine_for", lambda *a: SimpleNamespace(rehearse=lambda: seen.append(a)))
    monkeypatch.setattr(engine, "make_room", lambda model: seen.append("room"))  # the sampler may have taken all
    m.fast = fast.Fast(exact)
    m.fast.plan_rollouts(m, SimpleNamespace(group_size=2, prompts_per_step=3, max_rows=9, max_new_tokens=60, micro_batch_tokens=8192), 96)
    assert seen == [(m, 6, 96, 36), "room", (m, tokens)]


def test_what_cannot_be_exact_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="--engine exact: .*not on a CUDA device; take"):
        sample.set_engine(random_model(ONE), "exact")
    monkeypatch.setattr(fast, "refusal", lambda model: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ValueError, match="--engine exact: .*on Hopper cards alone"):
        sample.set_engine(random_model(ONE, "nvfp4"), "exact")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match="--engine exact: cuBLAS"):
        sample.set_engine(random_model(ONE), "exact")
    with pytest.raises(ValueError, match="--engine exact: .*Qwen3"):
        sample.set_engine(random_model(dataclasses.replace(ONE, qk_norm=True), "nvfp4"), "exact")
    m = random_model(ONE, "nvfp4")
    sample.set_engine(m, "exact")
    assert m.fast.exact and linears_of(m)[0][0].exact
    monkeypatch.setattr(engine, "own_code", lambda model: "norm has a hook of your own")
    with pytest.raises(ValueError, match="--engine exact: norm has a hook of your own; take"):
        m.fast.knows(m)
    assert m.fast.exact
    monkeypatch.undo()
    monkeypatch.setattr(fast, "refusal", lambda model: None)
    sample.set_engine(m, "fast")
    assert not m.fast.exact and not linears_of(m)[0][0].exact


# ---- on the device

WIDE = M.Config(2003, 512, 3328, 2, 8, 2, 128, max_position_embeddings=2048)  # down: in two ranges of K


@gpu
@pytest.mark.parametrize(("config", "quant", "rank", "temperature"), [(GPU, "nvfp4", 16, 1.0), (WIDE, "nvfp4", 32, 0.7), (WIDE, "mxfp4", 3, 1.0),
                                                                      (GPU, "nf4", 0, 1.3), (WIDE, "nvfp4", 70, 1.0)])
def test_gpu_sampler_and_trainer_agree_to_the_last_bit(config, quant, rank, temperature):
    """Whatever decodes together, and whatever is computed together in the update, with gradient and without."""
    m = random_model(config, quant, rank, "cuda", torch.bfloat16, noise=False)
    assert fast.install(m, exact=True) is None
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 2000, (n,), generator=g).tolist() for n in (1, 2, 63, 64, 65, 130, 200, 300)]
    kw = dict(n=6, max_new_tokens=150, temperature=temperature, eos_ids=(7, 11, 13), seed=5)
    groups = sample.generate(m, prompts, **kw)
    few = sample.generate(m, prompts[4:6], max_rows=3, indices=[4, 5], **kw)
    assert [[(s.ids, s.logprobs) for s in group] for group in few] == [[(s.ids, s.logprobs) for s in group] for group in groups[4:6]]
    completions = [grpo.Completion({}, p, s.ids, s.logprobs, s.finished) for p, group in zip(prompts, groups, strict=True) for s in group]
    assert sum(len(c.ids) for c in completions) > 1000
    alone = completions[::5]
    for batch in (completions, completions[3:20], alone, *([c] for c in alone)):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                logp, _, mask = grpo.completion_logprobs(m, batch, temperature)
            for c, row, live in zip(batch, logp.detach().cpu(), mask.cpu(), strict=True):
                assert row[live].equal(torch.tensor(c.logprobs))
