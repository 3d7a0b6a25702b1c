"""What holds for any input at all: formats, packing, masks, micro-batches, slots, the JSON reader, the grader (tests/test_grade.py
has more of it). Hypothesis looks for an input that it does not hold for."""
import json
from functools import cache
from types import SimpleNamespace

from plumbing import checkpoint
from plumbing.files import parse_json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

import grpo
import model as M
import sample
from fast import batches
from nvfp4 import FORMATS, quantize, scale_value

FEW, MANY = settings(max_examples=15, deadline=None), settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**31)


def random_weights(seed, N, K, spread):
    """Weights whose blocks differ by powers of ten, some of them all zero."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, generator=g) * 10 ** (spread * torch.randn(N, K // 16, generator=g)).repeat_interleave(16, 1)
    return w * (torch.rand(N, K // 16, generator=g) > 0.1).repeat_interleave(16, 1)


@MANY
@given(st.sampled_from(list(FORMATS)), SEEDS, st.integers(1, 20), st.integers(1, 5), st.floats(0, 3))
def test_rounding_is_to_the_grid_and_once_is_enough(fmt, seed, N, blocks, spread):
    """A value moves by at most half the widest gap of its block; what lies on the grid of its own scales stays there; signs stay."""
    f = FORMATS[fmt]
    w = random_weights(seed, N, blocks * 64, spread)
    q = quantize(w, fmt)
    back = q.dequantize()
    step = (scale_value(q.scale, fmt) * q.global_scale[:, None]).repeat_interleave(f.block, 1)  # (N, K)
    values = torch.tensor(sorted({*f.values}))
    # NVFP4's block scales are rounded themselves (to 1/16), and the smallest of them are subnormal
    gap, top = (values[1:] - values[:-1]).max(), values.abs().max()
    over = (w.abs() - top * step).clamp(min=0)
    assert ((w - back).abs() <= gap / 2 * step * 1.0001 + over * 1.0001 + 1e-30).all()
    assert (back * w >= 0).all() or f.codebook
    if fmt != "nvfp4":  # whose block scales are rounded, and may be rounded again
        assert torch.equal(quantize(back, fmt).dequantize(), back)


@MANY
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 90)), min_size=1, max_size=40), st.integers(1, 2000), st.booleans())
@example([(1, 10), (1, 30)], 45, False)  # 40 tokens, 60 with padding
def test_micro_batches_hold_each_completion_once_within_the_budget(sizes, budget, end_to_end):
    """Padded rows count with their padding; rows that lie end to end by their tokens, a prompt of neighbours once."""
    completions = [grpo.Completion({}, [0] * p, [0] * n, [0.0] * n, True) for p, n in sizes]
    found = (batches if end_to_end else grpo).micro_batches(SimpleNamespace(fast=None), completions, budget)
    assert sorted(id(c) for b in found for c in b) == sorted(id(c) for c in completions)
    for b in found:
        tokens = [len(c.prompt) + len(c.ids) - 1 for c in b]
        computed = sum(map(batches.size, batches.by_prompt(b))) if end_to_end else len(b) * max(tokens)
        assert len(b) == 1 or computed <= budget


@cache
def tiny():
    m = M.build(M.Config(61, 16, 32, 1, 2, 1, 8, max_position_embeddings=64), checkpoint.RandomCheckpoint(1),
                         dtype=torch.float32)
    m.lm_head.weight.mul_(6)
    m.valid_vocab = 57
    return m


@FEW
@given(st.lists(st.tuples(st.lists(st.integers(0, 56), min_size=1, max_size=9), st.integers(1, 9)), min_size=1, max_size=6),
       st.integers(1, 3), st.integers(1, 5), st.integers(0, 30), SEEDS)
def test_whoever_shares_the_slots_a_row_draws_the_same(prompts, n, rows, eos, seed):
    """Any prompts, limits, group sizes and numbers of slots: refilled, moved and shrunk, or all rows at once."""
    prompts, limits = zip(*prompts, strict=True)
    kw = dict(n=n, max_new_tokens=list(limits), eos_ids=range(eos), seed=seed)
    whole = sample.generate(tiny(), list(prompts), **kw)
    narrow = sample.generate(tiny(), list(prompts), max_rows=rows, **kw)
    alone = [sample.generate(tiny(), [p], **kw | {"max_new_tokens": [m]}, indices=[i])[0]
             for i, (p, m) in enumerate(zip(prompts, limits, strict=True))]
    for other in (narrow, alone):
        for a, b, limit in zip(whole, other, limits, strict=True):
            assert [s.ids for s in a] == [s.ids for s in b]
            for s in a:
                ended = s.ids[-1] < eos
                assert s.finished == ended and 1 <= len(s.ids) <= limit and (ended or len(s.ids) == limit)
                assert all(t >= eos for t in s.ids[:-1])


@MANY
@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.floats(1e-7, 1 - 1e-7), st.floats(0.01, 1))
def test_what_is_drawn_lies_in_the_nucleus(logits, u, top_p):
    logits = torch.tensor([logits])
    ids, logp = sample.sample_ids(logits, torch.tensor([u]), top_p=top_p)
    p = logits.softmax(-1)[0].double()
    assert p[p > p[ids[0]] * (1 + 1e-5)].sum() < top_p + 1e-5  # beside float32's ties
    assert logp[0] == pytest.approx(logits.log_softmax(-1)[0, ids[0]].item(), abs=1e-4)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=5), x, max_size=4), max_leaves=6)


@FEW
@given(JSON, st.booleans())
def test_the_reader_gives_an_object_or_a_line(value, ascii_only):
    """Whatever is in a file: an object equal to what was written, or a ValueError that names it."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    try:
        got = parse_json(text, "x.json", ["a"])
    except ValueError as e:
        assert str(e).startswith("x.json: ") and "\n" not in str(e)
        return
    assert got == value and isinstance(value, dict) and got["a"] is not None
