"""Attention over rows laid end to end against the softmax written out, in value and gradient.

On the CPU the kernels run in Triton's interpreter, in float32; -m gpu runs them in bfloat16 on the device."""
from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from fast import attention

gpu = pytest.mark.gpu
LENGTHS = [130, 1, 17, 63, 64, 65]  # the longest has a row behind it, which it must not see
PROMPTS, OF = [70, 5, 130, 66, 9, 64, 3, 65], [0, 0, 0, 0, 4, 5, 5, 5]  # completions of two prompts, and a row of its own


def drawn(lengths, G, D, dtype=torch.float32, device="cpu", kv=2):
    """(borders, q, k, v, dy): q, k and v as they lie in one projection's output."""
    g = torch.Generator().manual_seed(sum(lengths) + G)
    S, H = sum(lengths), G * kv
    qkv, dy = torch.randn(S, H + 2 * kv, D, generator=g), torch.randn(S, H + 1, D, generator=g)
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return borders, *qkv.to(device, dtype).split([H, kv, kv], 1), dy.to(device, dtype)[:, :H]


def plain(q, k, v):
    """(T, H, D) of one row."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    weights = scores.masked_fill(torch.ones(scores.shape[1:], device=q.device).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def expected(lengths, q, k, v, dy, of=None):
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    rows = [*zip(*(t.split(lengths) for t in inputs), strict=True)]
    of = of or range(len(rows))
    y = torch.cat([plain(*row) if p == i else plain(*map(torch.cat, zip(rows[p], row, strict=True)))[lengths[p] :]
                   for i, (row, p) in enumerate(zip(rows, of, strict=True))])
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def computed(lengths, borders, q, k, v, dy, of=None):
    blocks = attention.blocks(borders, sum(lengths), None if of is None else torch.tensor(of, device=q.device))
    y = torch.full((len(q), q.shape[1] + 1, q.shape[2]), torch.nan, dtype=q.dtype, device=q.device)[:, :-1]
    lse = attention.forward(q, k, v, y, blocks)
    return y, *attention.backward(dy, q, k, v, y, lse, blocks, shared=of is not None)


@pytest.mark.parametrize(("G", "D", "kv"), [(2, 32, 2), (7, 64, 1), (2, 128, 1), (1, 16, 1)])
def test_attention_equals_the_softmax_in_value_and_gradient(G, D, kv):
    """Rows that end within a block, at its border and one behind it; the numbers of the next row must have no weight."""
    borders, *tensors = drawn(LENGTHS, G, D, kv=kv)
    for got, want in zip(computed(LENGTHS, borders, *tensors), expected(LENGTHS, *tensors), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize(("G", "D", "kv"), [(2, 32, 2), (1, 64, 2)])
def test_rows_that_continue_another_see_it_and_give_it_their_gradients(G, D, kv):
    """A prompt computed once, its completions one behind the other: none sees the others, all see the prompt."""
    borders, *tensors = drawn(PROMPTS, G, D, kv=kv)
    for got, want in zip(computed(PROMPTS, borders, *tensors, OF), expected(PROMPTS, *tensors, OF), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=2e-6 * want.abs().max().item())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of keys that the mask takes away
@pytest.mark.parametrize("scale", [30.0, -30.0])
def test_large_scores_neither_overflow_nor_vanish(scale):
    """Scores of some hundreds: the exponentials of all but a few keys are 0, and of none infinite."""
    borders, q, k, v, dy = drawn([40, 9], 1, 32)
    for got, want in zip(computed([40, 9], borders, q * scale, k, v, dy), expected([40, 9], q * scale, k, v, dy), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("lengths", [[5], [0, 3, 0, 0, 65, 64, 0], [1] * 40, [128, 0]])
def test_blocks_cover_each_token_once_and_are_as_many_as_shapes_say(lengths):
    """Empty rows too: a prefill's graph has them."""
    S, ends = sum(lengths), [*accumulate(lengths)]
    blocks = attention.blocks(torch.tensor([0, *ends]), S).tolist()
    assert len(blocks) == S // 64 + len(lengths)
    live = [(begin, end, at) for begin, end, at, *_ in blocks if at < end]
    assert sorted(t for _, end, at in live for t in range(at, min(at + 64, end))) == [*range(S)]
    assert all((begin, end) in zip([0, *ends], ends, strict=False) for begin, end, _ in live)
    work = [at - begin for begin, _, at in live]
    assert work == sorted(work, reverse=True)


def test_blocks_know_what_is_seen():
    """Of each block the row that it continues, and how far it is seen itself."""
    ends = [*accumulate(PROMPTS)]
    found = attention.blocks(torch.tensor([0, *ends]), ends[-1], torch.tensor(OF)).tolist()
    for begin, end, at, first, stop, seen in found:
        i = [0, *ends].index(begin)
        assert (first, stop) == ([0, *ends][OF[i]], ends[OF[i]] if OF[i] != i else begin) and end == ends[i]
        assert at >= end or seen == max(ends[j] for j in range(len(OF)) if OF[j] == i or j == i)


# ---- on the device


@gpu
@pytest.mark.parametrize(("G", "D"), [(1, 32), (7, 64), (7, 128), (2, 16)])
def test_gpu_attention_errs_no_more_than_torchs(G, D):
    """Against float64, both in bfloat16; twice, to the bit."""
    lengths = [*LENGTHS, 700, 1, 259]
    borders, *tensors = drawn(lengths, G, D, torch.bfloat16, "cuda")
    first, again = computed(lengths, borders, *tensors), computed(lengths, borders, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    of = [*range(7), 6, 8]  # also one that continues the row of 700
    again = computed(lengths, borders, *tensors, of)
    for got, want, theirs in zip(again, expected(lengths, *(t.double() for t in tensors), of), expected(lengths, *tensors, of),
                                 strict=True):
        assert (got - want).norm() < 1.3 * (theirs - want).norm()
    exact = expected(lengths, *(t.double() for t in tensors))
    for got, want, theirs in zip(first, exact, expected(lengths, *tensors), strict=True):
        assert (got - want).norm() < 1.3 * (theirs - want).norm()
