"""
Causal attention over rows laid end to end, forward and backward: flash attention in Triton.

A program takes one block of a row and one head and loops over what its row has before it (forward,
dQ) or after it (dK, dV); scores stay in registers. A row may continue an earlier one, as
completions do their prompt, whose states are then computed once. It sees all of that row and its
own tokens so far. Exponentials are base 2: scale and log2(e) are one factor of the scores, and lse,
kept for backward, is log2 of the softmax's sum.

    S = scale log2(e) Q K^T   P = 2^(S - lse)      Y = P V
    dV = P^T dY               dP = dY V^T          dS = P * (dP - rowsum(Y * dY))
    dQ = scale dS K           dK = scale dS^T Q

No sum is shared between programs: dQ has its own kernel, which recomputes S and dP, and the one for
dK and dV loops over all query heads of its key head, or leaves their sums apart. So nothing is
atomic, and each run gives the same bits. dK and dV come from S^T = K Q^T, whose registers hold P^T
and dS^T as the next products read them.

Rows differ in length, so the grid is a list of blocks, forward's longest loops first. It is built
on the device, and its own length depends on shapes alone, so the host never waits. The last block
of a row reads beyond its end; what it finds there, the next row, gets weight 0. Therefore every
token must belong to a row: 0 times NaN is NaN.

On an H200 forward is 1.5 to 2.9 times as fast as torch's FlashAttention-2, and backward 1.4 to 2.5
times; most on short rows with D = 64. What lost is in results/LOG.md. Cards before Hopper run the
same kernels without TMA and wgmma, which has never been timed.

Shapes: S tokens of all rows, n blocks of up to B tokens, H query heads, Hkv kv heads, G = H / Hkv,
D head size.
"""
from math import e, log2

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

B = 64


def blocks(borders, S, of=None):
    """The blocks of all rows, (n, 6) int32: begin and end of the block's row, begin of the block,
    begin and end of the row that this row continues (empty if none), end of the last row that sees
    this one. Those with the most tokens before them come first. borders (rows + 1,): where rows
    begin, then S; of (rows,): the row that each continues, itself if none; those that continue a
    row follow it directly. n = S // B + rows: surplus blocks begin past their row's end."""
    begin, end = borders[:-1], borders[1:]
    rows = torch.arange(len(begin), device=begin.device)
    of = rows if of is None else of
    first, stop = begin[of], torch.where(of == rows, begin, end[of])
    seen = end.scatter_reduce(0, of, end, "amax")
    count = (end - begin + B - 1) // B
    last = count.cumsum(0)
    n = torch.arange(S // B + len(begin), device=begin.device)
    row = torch.searchsorted(last, n, right=True).clamp_(max=len(begin) - 1)
    at = begin[row] + (n - (last - count)[row]) * B
    found = torch.stack([begin[row], end[row], at, first[row], stop[row], seen[row]], 1)
    return found[(at - begin[row] + (stop - first)[row]).argsort(descending=True)].int()


@triton.jit
def entry(blocks, i):
    """The six numbers of block i, as blocks() gives them."""
    b = blocks + 6 * i
    return (tl.load(b), tl.load(b + 1), tl.load(b + 2), tl.load(b + 3), tl.load(b + 4),
            tl.load(b + 5))


@triton.jit
def keys_of(step, begin, first, stop, B: tl.constexpr):
    """For a step of a block's loop: (where its keys begin, whether they are in the row that the
    block's row continues). The keys of that row come first, then those of the block's own."""
    before = tl.cdiv(stop - first, B)
    return tl.where(step < before, first + step * B, begin + (step - before) * B), step < before


@triton.jit
def seen_keys(x, j, at, stop, earlier, other, B: tl.constexpr):
    """Scores or weights x (B, B) of queries from `at` on and keys from j on, with `other` where the
    key comes after the query or, if `earlier`, after the end of the continued row."""
    place = tl.arange(0, B)
    if (j == at) | (earlier & (j + B > stop)):
        x = tl.where(tl.where(earlier, (j + place)[None, :] < stop,
                              place[:, None] >= place[None, :]), x, other)
    return x


@triton.jit(do_not_specialize=["S"])
def forward_kernel(q, k, v, y, lse, blocks, S, sy, scale, G: tl.constexpr, D: tl.constexpr,
                   B: tl.constexpr):
    h = tl.program_id(0)
    begin, end, at, first, stop, _ = entry(blocks, tl.program_id(1))
    if at >= end:
        return
    col = h // G * D
    Q = q.load([at, h * D])  # (B, D)
    top = tl.full((B,), -float("inf"), tl.float32)
    total, acc = tl.zeros((B,), tl.float32), tl.zeros((B, D), tl.float32)
    for step in range(tl.cdiv(stop - first, B) + (at - begin) // B + 1):
        j, earlier = keys_of(step, begin, first, stop, B)
        s = tl.dot(Q, k.load([j, col]).T)  # (B, B)
        s = seen_keys(s, j, at, stop, earlier, -float("inf"), B)
        new = tl.maximum(top, tl.max(s, 1) * scale)
        p, fade = tl.exp2(s * scale - new[:, None]), tl.exp2(top - new)
        top, total = new, total * fade + tl.sum(p, 1)
        V = v.load([j, col])  # (B, D)
        acc = tl.dot(p.to(V.dtype), V, acc * fade[:, None])
    queries = at + tl.arange(0, B)
    out = y + (queries.to(tl.int64) * tl.multiple_of(sy, 8) + h * D)[:, None]
    tl.store(out + tl.arange(0, D)[None, :], (acc / total[:, None]).to(y.dtype.element_ty),
             mask=queries[:, None] < end)
    tl.store(lse + h * S + queries, top + tl.log2(total), mask=queries < end)


@triton.jit(do_not_specialize=["S"])
def dq_kernel(q, k, v, y, dy, lse, delta, dq, blocks, S, scale, unit, G: tl.constexpr,
              D: tl.constexpr, B: tl.constexpr):
    """Leaves rowsum(Y * dY) in delta."""
    h, H = tl.program_id(0), tl.num_programs(0)
    begin, end, at, first, stop, _ = entry(blocks, tl.program_id(1))
    if at >= end:
        return
    queries, col = at + tl.arange(0, B), h // G * D
    Q, dY = q.load([at, h * D]), dy.load([at, h * D])  # (B, D)
    L = tl.load(lse + h * S + queries, mask=queries < end, other=0.0)
    mean = tl.sum(y.load([at, h * D]).to(tl.float32) * dY.to(tl.float32), 1)
    tl.store(delta + h * S + queries, mean, mask=queries < end)
    acc = tl.zeros((B, D), tl.float32)
    for step in range(tl.cdiv(stop - first, B) + (at - begin) // B + 1):
        j, earlier = keys_of(step, begin, first, stop, B)
        K, V = k.load([j, col]), v.load([j, col])  # (B, D)
        p = tl.exp2(tl.dot(Q, K.T) * scale - L[:, None])  # (B, B)
        p = seen_keys(p, j, at, stop, earlier, 0.0, B)
        ds = p * (tl.dot(dY, V.T) - mean[:, None])
        acc = tl.dot(ds.to(K.dtype), K, acc)
    out = dq + (queries.to(tl.int64) * H + h)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, (acc * unit).to(dq.dtype.element_ty), mask=queries[:, None] < end)


@triton.jit(do_not_specialize=["S"])
def dkdv_kernel(q, k, v, dy, lse, delta, dk, dv, blocks, S, scale, unit, G: tl.constexpr,
                D: tl.constexpr, B: tl.constexpr, HEADS: tl.constexpr):
    """What HEADS query heads contribute to dK and dV (S, H / HEADS, D)."""
    part, parts, n = tl.program_id(0), tl.num_programs(0), tl.num_programs(1)
    _, end, at, _, _, seen = entry(blocks, n - 1 - tl.program_id(1))
    if at >= end:
        return
    keys, col = at + tl.arange(0, B), part * HEADS // G * D
    K, V = k.load([at, col]), v.load([at, col])  # (B, D)
    dK, dV = tl.zeros((B, D), tl.float32), tl.zeros((B, D), tl.float32)
    steps = tl.cdiv(seen - at, B)  # the queries that see these keys: at..seen - 1
    for step in range(HEADS * steps):  # one loop for all heads: no wait for the next head's loads
        h, j = part * HEADS + step // steps, step % steps * B
        queries = at + j + tl.arange(0, B)
        L = tl.load(lse + h * S + queries, mask=queries < seen, other=0.0)
        mean = tl.load(delta + h * S + queries, mask=queries < seen, other=0.0)
        Q, dY = q.load([at + j, h * D]), dy.load([at + j, h * D])  # (B, D)
        p = tl.exp2(tl.dot(K, Q.T) * scale - L[None, :])  # (B, B)
        if (j == 0) | (at + j + B > seen):
            queries = tl.where(queries < seen, queries, -1)
            p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
        dV = tl.dot(p.to(V.dtype), dY, dV)
        ds = p * (tl.dot(V, dY.T) - mean[None, :])
        dK = tl.dot(ds.to(K.dtype), Q, dK)
    out = (keys.to(tl.int64) * parts + part)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk + out, (dK * unit).to(dk.dtype.element_ty), mask=keys[:, None] < end)
    tl.store(dv + out, dV.to(dv.dtype.element_ty), mask=keys[:, None] < end)


def tile(t):
    """Descriptor of t (S, heads, D), heads side by side, to load B tokens of one head."""
    return TensorDescriptor(t, [len(t), t[0].numel()], [t.stride(0), 1], [B, t.shape[2]])


def options(q, stages):
    """Stages and warps of a kernel on q's card. Before Hopper 4 warps would spill registers."""
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] < 9:
        return {"num_stages": 2, "num_warps": 8}
    return {"num_stages": stages, "num_warps": 4}


def forward(q, k, v, y, blocks):
    """Attention of q (S, H, D) to k and v (S, Hkv, D) into y (S, H, D), whose row stride is a
    multiple of 8; returns lse (H, S) float32."""
    (S, H, D), n = q.shape, len(blocks)
    lse = q.new_empty(H, S, dtype=torch.float32)
    forward_kernel[H, n](tile(q), tile(k), tile(v), y, lse, blocks, S, y.stride(0),
                         D**-0.5 * log2(e), G=H // k.shape[1], D=D, B=B, **options(q, 3))
    return lse


def backward(dy, q, k, v, y, lse, blocks, shared=False):
    """Gradients of q, k and v for dy (S, H, D). shared: rows continue others. Many rows see a
    prompt's keys, so one program for all query heads of these would outlast the others: each does
    one head instead, and the heads are summed at the end."""
    (S, H, D), Hkv, n = q.shape, k.shape[1], len(blocks)
    G = H // Hkv
    heads = 1 if shared else G
    dq, dkv = q.new_empty(q.shape), q.new_empty(2, S, H // heads, D)
    delta, Q, K, V, dY = torch.empty_like(lse), *map(tile, (q, k, v, dy))
    stages = 3 if D <= 64 else 2  # so that an SM holds two programs or more
    shape = dict(G=G, D=D, B=B, **options(q, stages))
    rest = blocks, S, D**-0.5 * log2(e), D**-0.5
    dq_kernel[H, n](Q, K, V, tile(y), dY, lse, delta, dq, *rest, **shape)
    dkdv_kernel[H // heads, n](Q, K, V, dY, lse, delta, *dkv, *rest, HEADS=heads, **shape)
    return dq, *(dkv.view(2, S, Hkv, G, D).sum(3) if shared else dkv)
