"""
Causal attention over rows laid end to end, forward and backward: flash attention in Triton.

A program takes one block of a row and one head and passes over what its row has before it (forward,
dQ) or behind it (dK, dV); scores stay in registers. Exponentials are base 2: scale and log2(e) are
one factor of the scores, and lse, kept for backward, is log2 of the softmax's sum.

    S = scale log2(e) Q K^T   P = 2^(S - lse)      Y = P V
    dV = P^T dY               dP = dY V^T          dS = P * (dP - rowsum(Y * dY))
    dQ = scale dS K           dK = scale dS^T Q

No sum is shared between programs: dQ has a kernel of its own, which makes S and dP again, and the
one for dK and dV passes over all query heads of its key head. So nothing is atomic, and each run
gives the same bits. dK and dV come from S^T = K Q^T, whose registers are P^T and dS^T as the next
products read them.

While numbers are exponentiated the tensor cores should multiply, but a product whose result is
needed at once is waited for. So forward and dQ take their last product, with V or K, one step late:
it is launched behind this step's scores, and runs while those become weights.

Rows differ in length, so the grid is a list of blocks, the longest passes first. It is made on the
device, for its own length depends on shapes alone: the host waits for nothing. A block at the end
of its row reads beyond it, and what it finds there, the next row, gets weight 0. Therefore every
token must belong to a row: a NaN would stay one.

Tiles are for Hopper, where a load is one instruction (TMA) and products are wgmma's; Ampere runs
the same kernels, and so does Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/test_attention.py

Shapes: S tokens of all rows, H query heads, Hkv kv heads, G = H / Hkv, D head size (16, 32, 64 or
128); M tokens of queries and N of keys in a block; W numbers of lse a head.
"""
from math import e, log2

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# D up to -> of each kernel: tokens of a program, tokens of a step, warps, stages
TILES = {64: dict(forward=(128, 128, 8, 2), dq=(128, 64, 8, 2), dkdv=(128, 64, 8, 2)),
         128: dict(forward=(128, 128, 8, 2), dq=(128, 64, 8, 2), dkdv=(128, 64, 8, 2))}


class Blocks(dict):
    """B -> the blocks of B tokens or fewer of all rows, (n, 4) int32: where the row begins, where
    it ends, where the block begins, and where the row's lse does; those far from their row's
    beginning first. n = S // B + rows: those too many are empty. borders (rows + 1,) int32: where
    rows begin, and S. lse has W numbers a head: TMA wants rows to begin at multiples of 4."""

    def __init__(self, borders, S):
        self.borders, self.S = borders, S
        self.W = triton.cdiv(4 * (S // 4 + len(borders) - 1), 16) * 16  # by 16: one compilation

    def __missing__(self, B):
        begin, end = self.borders[:-1], self.borders[1:]
        count = (end - begin + B - 1) // B
        last = count.cumsum(0)
        n = torch.arange(self.S // B + len(begin), device=begin.device)
        row = torch.searchsorted(last, n, right=True).clamp_(max=len(begin) - 1)
        offset = (n - (last - count)[row]) * B  # in the row; beyond its end: no block
        first = begin[row]
        blocks = torch.stack([first, end[row], first + offset, 4 * (first // 4 + row)], 1)
        self[B] = blocks[offset.argsort(descending=True)].int()
        return self[B]


@triton.jit
def causal(x, queries, keys, other):
    return tl.where(queries >= keys, x, other)


@triton.jit
def softmax_step(s, top, total, queries, j, at, scale, N: tl.constexpr):
    """Scores s (M, N) of the keys from j on -> their weights relative to the new maximum `top`, the
    factor that older sums fade by, top, and the sum of weights so far."""
    if j + N > at:
        s = causal(s, queries[:, None], j + tl.arange(0, N)[None, :], -float("inf"))
    new = tl.maximum(top, tl.max(s, 1) * scale)
    p, fade = tl.exp2(s * scale - new[:, None]), tl.exp2(top - new)
    return p, fade, new, total * fade + tl.sum(p, 1)


@triton.jit
def forward_kernel(q, k, v, y, lse, blocks, scale, W, H, G: tl.constexpr, D: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr):
    h, block = tl.program_id(0), blocks + 4 * tl.program_id(1)
    begin, end, at = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    line = h * W + tl.load(block + 3) - begin  # + a token: its lse
    if at >= end:
        return
    queries, col = at + tl.arange(0, M), h // G * D
    stop = tl.minimum(at + M, end)
    Q = q.load([at, h * D])  # (M, D)
    top = tl.full((M,), -float("inf"), tl.float32)
    total, acc = tl.zeros((M,), tl.float32), tl.zeros((M, D), tl.float32)
    s = tl.dot(Q, k.load([begin, col]).T)  # (M, N)
    p, fade, top, total = softmax_step(s, top, total, queries, begin, at, scale, N)
    for j in range(begin + N, stop, N):
        s = tl.dot(Q, k.load([j, col]).T)
        V = v.load([j - N, col])  # (N, D)
        acc = tl.dot(p.to(V.dtype), V, acc * fade[:, None])
        p, fade, top, total = softmax_step(s, top, total, queries, j, at, scale, N)
    V = v.load([begin + (stop - 1 - begin) // N * N, col])
    acc = tl.dot(p.to(V.dtype), V, acc * fade[:, None])
    out = y + (queries.to(tl.int64) * H + h)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, (acc / total[:, None]).to(y.dtype.element_ty), mask=queries[:, None] < end)
    tl.store(lse + line + queries, top + tl.log2(total), mask=queries < end)


@triton.jit
def dq_kernel(q, k, v, y, dy, lse, delta, dq, blocks, scale, unit, W, H, G: tl.constexpr,
              D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Leaves rowsum(Y * dY) in delta."""
    h, block = tl.program_id(0), blocks + 4 * tl.program_id(1)
    begin, end, at = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    line = h * W + tl.load(block + 3) - begin  # + a token: its lse
    if at >= end:
        return
    queries, col = at + tl.arange(0, M), h // G * D
    stop = tl.minimum(at + M, end)
    Q, dY = q.load([at, h * D]), dy.load([at, h * D])  # (M, D)
    L = tl.load(lse + line + queries, mask=queries < end, other=0.0)
    mean = tl.sum(y.load([at, h * D]).to(tl.float32) * dY.to(tl.float32), 1)
    tl.store(delta + line + queries, mean, mask=queries < end)
    ds, acc = tl.zeros((M, N), tl.float32), tl.zeros((M, D), tl.float32)
    for j in range(begin, stop, N):
        K, V, late = k.load([j, col]), v.load([j, col]), k.load([j - N, col])  # (N, D)
        s = tl.dot(Q, K.T)  # (M, N)
        acc = tl.dot(ds.to(K.dtype), late, acc)
        p = tl.exp2(s * scale - L[:, None])
        if j + N > at:
            p = causal(p, queries[:, None], j + tl.arange(0, N)[None, :], 0.0)
        ds = p * (tl.dot(dY, V.T) - mean[:, None])
    late = k.load([begin + (stop - 1 - begin) // N * N, col])
    acc = tl.dot(ds.to(late.dtype), late, acc)
    out = dq + (queries.to(tl.int64) * H + h)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out, (acc * unit).to(dq.dtype.element_ty), mask=queries[:, None] < end)


@triton.jit
def dkdv_kernel(q, k, v, dy, lse, delta, dk, dv, blocks, scale, unit, W, H, G: tl.constexpr,
                D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    head, block = tl.program_id(0), blocks + 4 * (tl.num_programs(1) - 1 - tl.program_id(1))
    begin, end, at = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    line = tl.load(block + 3) - begin
    if at >= end:
        return
    keys = at + tl.arange(0, N)
    K, V = k.load([at, head * D]), v.load([at, head * D])  # (N, D)
    dK, dV = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    steps = tl.cdiv(end - at, M)
    for n in range(G * steps):  # one loop, so that loads of the next head are not waited for
        h, i = head * G + n // steps, at + n % steps * M
        queries = i + tl.arange(0, M)
        Q, dY = q.load([i, h * D]), dy.load([i, h * D])  # (M, D)
        p = tl.exp2(tl.dot(K, Q.T) * scale - lse.load([h * W + line + i])[None, :])  # (N, M)
        if (i < at + N) | (i + M > end):
            p = causal(p, tl.where(queries < end, queries, -1)[None, :], keys[:, None], 0.0)
        dV = tl.dot(p.to(V.dtype), dY, dV)
        ds = p * (tl.dot(V, dY.T) - delta.load([h * W + line + i])[None, :])
        dK = tl.dot(ds.to(K.dtype), Q, dK)
    out = (keys.to(tl.int64) * (H // G) + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk + out, (dK * unit).to(dk.dtype.element_ty), mask=keys[:, None] < end)
    tl.store(dv + out, dV.to(dv.dtype.element_ty), mask=keys[:, None] < end)


def tiles(kernel, D):
    """(tokens of a program, tokens of a step, launch options)."""
    program, step, warps, stages = TILES[64 if D <= 64 else 128][kernel]
    return program, step, dict(num_warps=warps, num_stages=stages)


def tensor(t, B):
    """t (S, heads, D) for loads of B tokens of one head; its heads lie side by side."""
    return TensorDescriptor(t, [len(t), t[0].numel()], [t.stride(0), 1], [B, t.shape[2]])


def vector(t, B):
    """t (H, W) for loads of B tokens of one head."""
    return TensorDescriptor(t, [t.numel()], [1], [B])


def forward(q, k, v, blocks):
    """y (S, H, D), attention of q (S, H, D) to k and v (S, Hkv, D), and lse (H, W) float32."""
    (S, H, D), G = q.shape, q.shape[1] // k.shape[1]
    y, lse = q.new_empty(S, H, D), q.new_empty(H, blocks.W, dtype=torch.float32)
    M, N, options = tiles("forward", D)
    forward_kernel[H, len(blocks[M])](
        tensor(q, M), tensor(k, N), tensor(v, N), y, lse, blocks[M], D**-0.5 * log2(e), blocks.W, H,
        G=G, D=D, M=M, N=N, **options)
    return y, lse


def backward(dy, q, k, v, y, lse, blocks):
    """Gradients of q, k and v for dy (S, H, D)."""
    (_, H, D), G, unit = q.shape, q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    delta = torch.zeros_like(lse)  # no NaN between rows
    M, N, options = tiles("dq", D)
    dq_kernel[H, len(blocks[M])](
        tensor(q, M), tensor(k, N), tensor(v, N), tensor(y, M), tensor(dy, M), lse, delta, dq,
        blocks[M], unit * log2(e), unit, blocks.W, H, G=G, D=D, M=M, N=N, **options)
    N, M, options = tiles("dkdv", D)
    dkdv_kernel[H // G, len(blocks[N])](
        tensor(q, M), tensor(k, N), tensor(v, N), tensor(dy, M), vector(lse, M), vector(delta, M),
        dk, dv, blocks[N], unit * log2(e), unit, blocks.W, H, G=G, D=D, M=M, N=N, **options)
    return dq, dk, dv
