"""
How a decode step draws, as sample.py does: from logits to the token, its log-prob and the row's new
state, by a number in (0, 1) from the row's key and the position, and the first id at which the
cumulative distribution exceeds it.

Two kernels. `stats` reads the vocabulary once, in blocks, many side by side; `pick` chooses the
block, then the id within it. `record` is the second half of pick for what torch drew (top_p < 1).

Shapes: B rows, S cache slots, V vocabulary, NB blocks of it.
"""
import triton
import triton.language as tl

from fast.adapter import signal, wait

EOS = tl.constexpr(128)  # stop tokens that a step can compare with
# of splitmix64, as in sample.py
GOLDEN, MIX1, MIX2 = map(tl.constexpr, (-0x61C8864680B583EB, -0x40A7B892E31B1A47,
                                        -0x6B2FB644ECCEEE15))


@triton.jit
def stats_kernel(logits, inverse_temperature, top, total, best, V, stride, NB, BLOCK: tl.constexpr,
                 PDL: tl.constexpr):
    """Per row and block of the vocabulary: the largest tempered logit m, the sum of exp(x - m), and
    the index of m."""
    b, j = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    signal(PDL)
    v = j * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b.to(tl.int64) * stride + v,
                mask=v < V, other=-float("inf")) * tl.load(inverse_temperature)
    m = tl.max(x, 0)
    tl.store(top + b * NB + j, m)
    tl.store(total + b * NB + j, tl.sum(tl.exp(x - m), 0))
    # ties: the lowest id, as torch on the CPU
    tl.store(best + b * NB + j, tl.min(tl.where(x == m, v, 1 << 30), 0))


@triton.jit
def mix(z):
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * MIX1
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * MIX2
    return z ^ (z >> 31 & (1 << 33) - 1)


@triton.jit
def finish_row(b, ids, logp, token, length, stop, alive, count, out_ids, out_logp, eos, S):
    """Record the drawn id and move the row on; a row that has ended stays where it is."""
    at = tl.load(count + b)
    tl.store(out_ids + at * S + b, ids)
    tl.store(out_logp + at * S + b, logp)
    tl.store(count + b, at + 1)
    ended = tl.max((tl.load(eos + tl.arange(0, EOS)) == ids).to(tl.int32), 0)
    n = tl.load(length + b) + 1
    go = (tl.load(alive + b) != 0) & (ended == 0) & (n < tl.load(stop + b))
    tl.store(alive + b, go.to(tl.int32))
    if go:
        tl.store(token + b, ids)
        tl.store(length + b, n)


@triton.jit
def pick_kernel(logits, inverse_temperature, top, total, best, key, token, length, stop, alive,
                count, out_ids, out_logp, eos, V, stride, NB, S, NBP: tl.constexpr,
                BLOCK: tl.constexpr, GREEDY: tl.constexpr, PDL: tl.constexpr):
    """One row: the first id at which the cumulative distribution exceeds u (or the likeliest id),
    and its log-prob."""
    b = tl.program_id(0)
    wait(PDL)
    signal(PDL)
    i, w = tl.arange(0, NBP), tl.arange(0, BLOCK)
    m = tl.load(top + b * NB + i, mask=i < NB, other=-float("inf"))
    best_of = tl.load(best + b * NB + i, mask=i < NB, other=1 << 30)
    peak = tl.max(m, 0)
    mass = tl.load(total + b * NB + i, mask=i < NB, other=0) * tl.exp(m - peak)
    whole = tl.sum(mass, 0)
    if GREEDY:
        ids = tl.min(tl.where(m == peak, best_of, 1 << 30), 0)
        ids = tl.minimum(ids, V - 1)  # with NaN, no id is the largest
        x = peak
    else:
        z = tl.load(key + b) + (tl.load(length + b) + 2) * GOLDEN  # sample.uniform(key, length + 1)
        u = ((mix(z) >> 41 & 8388607).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        cdf = tl.cumsum(mass, 0)
        target = u * whole
        j = tl.min(tl.where((cdf > target) & (mass > 0), i, NBP), 0)
        # rounding may leave u past the last block
        j = tl.minimum(j, tl.max(tl.where(mass > 0, i, 0), 0))
        before = tl.sum(tl.where(i == j - 1, cdf, 0), 0)
        v = j * BLOCK + w
        xs = tl.load(logits + b.to(tl.int64) * stride + v,
                     mask=v < V, other=-float("inf")) * tl.load(inverse_temperature)
        p = tl.exp(xs - peak)
        inside = tl.cumsum(p, 0) + before
        at = tl.min(tl.where((inside > target) & (p > 0), w, BLOCK), 0)
        at = tl.minimum(at, tl.max(tl.where(p > 0, w, 0), 0))
        x = tl.max(tl.where(w == at, xs, -float("inf")), 0)
        ids = j * BLOCK + at
    finish_row(b, ids.to(tl.int64), x - peak - tl.log(whole), token, length, stop, alive, count,
               out_ids, out_logp, eos, S)


@triton.jit
def record_kernel(ids, logp, token, length, stop, alive, count, out_ids, out_logp, eos, S):
    """pick's second half, for ids (B,) and logp (B,) that torch drew."""
    b = tl.program_id(0)
    finish_row(b, tl.load(ids + b), tl.load(logp + b), token, length, stop, alive, count, out_ids,
               out_logp, eos, S)
