"""
Triton kernels for what comes between two GEMMs of an update: norm, SwiGLU and RoPE with their
gradients (packed.py calls them), and log-probs with theirs (logprobs.py). model.py's modules are
the plain form. A matrix called wide has rows of `stride` numbers, E more than h needs: x A^T is
stored behind h.

    TRITON_INTERPRET=1 pytest tests/test_packed.py

Shapes: S tokens of all rows, C hidden, F intermediate, H query heads, Hkv kv heads, D head size,
c tokens of a chunk, V vocabulary.
"""
import torch
import triton
import triton.language as tl
from triton import next_power_of_2 as power

from fast.decode import norm_weight


@triton.jit
def norm_back_kernel(x, weight, noise, d, dx, C, stride, eps, BLOCK: tl.constexpr):
    """d (wide): the gradient of norm(x), from which dx gets x's (S, C); then d gets norm(x)."""
    r, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + r * C + c, mask=c < C, other=0).to(tl.float32)
    g = tl.load(d + r * stride + c, mask=c < C, other=0).to(tl.float32)
    w = norm_weight(weight, noise, c, C)
    rms = tl.rsqrt(tl.sum(v * v) / C + eps)
    v *= rms
    g *= w
    grad = rms * (g - v * (tl.sum(g * v) / C))
    tl.store(dx + r * C + c, grad.to(dx.dtype.element_ty), mask=c < C)
    tl.store(d + r * stride + c, (v * w).to(d.dtype.element_ty), mask=c < C)


@triton.jit
def swiglu_back_kernel(gate_up, d, dgate_up, F, stride, BLOCK: tl.constexpr):
    """d (wide): the gradient of silu(gate) * up, from which dgate_up gets that of gate_up (S, 2F);
    then d gets silu(gate) * up."""
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = r * 2 * F + c
    gate = tl.load(gate_up + at, mask=c < F, other=0).to(tl.float32)
    up = tl.load(gate_up + at + F, mask=c < F, other=0).to(tl.float32)
    g = tl.load(d + r * stride + c, mask=c < F, other=0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = gate * sigmoid
    dgate = g * up * sigmoid * (1 + gate - silu)
    T = d.dtype.element_ty
    tl.store(dgate_up + at, dgate.to(T), mask=c < F)
    tl.store(dgate_up + at + F, (g * silu).to(T), mask=c < F)
    tl.store(d + r * stride + c, (silu.to(T).to(tl.float32) * up).to(T), mask=c < F)


@triton.jit
def head_weights(q_weight, q_noise, k_weight, k_noise, h, d, H, D):
    """Qwen3's norm weights (heads, D/2) of the columns d: q's for the first H heads, then k's."""
    q, k = norm_weight(q_weight, q_noise, d, D), norm_weight(k_weight, k_noise, d, D)
    return tl.where(h[:, None] < H, q[None, :], k[None, :])


@triton.jit
def rope_kernel(qkv, out, place, cos, sin, q_weight, q_noise, k_weight, k_noise, eps, slot, k_cache,
                v_cache, stride_b, stride_h, H, HKV, HP: tl.constexpr, HKVP: tl.constexpr,
                D: tl.constexpr, NORM: tl.constexpr, CACHE: tl.constexpr):
    """RoPE of the q and k heads of one token of qkv (S, (H + 2 Hkv) D) -> out, which may be qkv.
    NORM: each head is normed first. CACHE: k and v also go to their row's slot in the cache."""
    t = tl.program_id(0).to(tl.int64)
    h, d, HALF = tl.arange(0, HP), tl.arange(0, D // 2), D // 2
    live = h[:, None] < H + HKV
    at = t * (H + 2 * HKV) * D + h[:, None] * D + d[None, :]
    x1 = tl.load(qkv + at, mask=live, other=0).to(tl.float32)  # (HP, D/2)
    x2 = tl.load(qkv + at + HALF, mask=live, other=0).to(tl.float32)
    T = out.dtype.element_ty
    if NORM:
        rms = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        w1 = head_weights(q_weight, q_noise, k_weight, k_noise, h, d, H, D)
        w2 = head_weights(q_weight, q_noise, k_weight, k_noise, h, d + HALF, H, D)
        x1 = (x1 * rms * w1).to(T).to(tl.float32)
        x2 = (x2 * rms * w2).to(T).to(tl.float32)
    place_t = tl.load(place + t)
    n = tl.maximum(place_t, 0)
    co = tl.load(cos + n * HALF + d)[None, :]
    si = tl.load(sin + n * HALF + d)[None, :]
    y1, y2 = (x1 * co - x2 * si).to(T), (x2 * co + x1 * si).to(T)
    tl.store(out + at, y1, mask=live)
    tl.store(out + at + HALF, y2, mask=live)
    if NORM or CACHE:
        e, g = tl.arange(0, D), tl.arange(0, HKVP)
        kv = g[:, None] < HKV
        values = t * (H + 2 * HKV) * D + (H + HKV + g[:, None]) * D + e[None, :]
        v = tl.load(qkv + values, mask=kv, other=0)
        if NORM:  # out is not qkv
            tl.store(out + values, v, mask=kv)
        if CACHE:
            if place_t >= 0:  # else padding
                row = tl.load(slot + t) * stride_b + n * D
                tl.store(v_cache + row + g[:, None] * stride_h + e[None, :], v, mask=kv)
                key = row + (h[:, None] - H) * stride_h + d[None, :]
                tl.store(k_cache + key, y1, mask=live & (h[:, None] >= H))
                tl.store(k_cache + key + HALF, y2, mask=live & (h[:, None] >= H))


@triton.jit
def rope_back_kernel(dq, dk, dv, qkv, out, place, cos, sin, q_weight, q_noise, k_weight, k_noise,
                     eps, H, HKV, HP: tl.constexpr, HKVP: tl.constexpr, D: tl.constexpr,
                     NORM: tl.constexpr):
    """The gradients of attention's q (S, H, D), k and v (S, Hkv, D) -> that of qkv in out, by the
    opposite rotation; NORM: also through the norms of qkv's heads."""
    t = tl.program_id(0).to(tl.int64)
    h, d, HALF = tl.arange(0, HP)[:, None], tl.arange(0, D // 2)[None, :], D // 2
    q, k = h < H, (h >= H) & (h < H + HKV)
    at, ak = (t * H + h) * D + d, (t * HKV + h - H) * D + d
    g1 = tl.load(dq + at, mask=q, other=0).to(tl.float32)
    g1 += tl.load(dk + ak, mask=k, other=0).to(tl.float32)
    g2 = tl.load(dq + at + HALF, mask=q, other=0).to(tl.float32)
    g2 += tl.load(dk + ak + HALF, mask=k, other=0).to(tl.float32)
    n = tl.load(place + t)
    co = tl.load(cos + n * HALF + tl.arange(0, D // 2))[None, :]
    si = tl.load(sin + n * HALF + tl.arange(0, D // 2))[None, :]
    y1, y2 = g1 * co + g2 * si, g2 * co - g1 * si
    row = t * (H + 2 * HKV) * D
    if NORM:
        x1 = tl.load(qkv + row + h * D + d, mask=q | k, other=0).to(tl.float32)
        x2 = tl.load(qkv + row + h * D + d + HALF, mask=q | k, other=0).to(tl.float32)
        rms = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        heads, cols = tl.arange(0, HP), tl.arange(0, D // 2)
        y1 *= head_weights(q_weight, q_noise, k_weight, k_noise, heads, cols, H, D)
        y2 *= head_weights(q_weight, q_noise, k_weight, k_noise, heads, cols + HALF, H, D)
        x1 *= rms
        x2 *= rms
        mean = ((tl.sum(y1 * x1, 1) + tl.sum(y2 * x2, 1)) / D)[:, None]
        y1, y2 = rms * (y1 - x1 * mean), rms * (y2 - x2 * mean)
    T = out.dtype.element_ty
    tl.store(out + row + h * D + d, y1.to(T), mask=q | k)
    tl.store(out + row + h * D + d + HALF, y2.to(T), mask=q | k)
    g, e = tl.arange(0, HKVP)[:, None], tl.arange(0, D)[None, :]
    v = tl.load(dv + (t * HKV + g) * D + e, mask=g < HKV, other=0)
    tl.store(out + row + (H + HKV + g) * D + e, v, mask=g < HKV)


@triton.jit
def score_kernel(logits, targets, logp, entropy, grad, valid, rows, inverse_temperature,
                 BLOCK: tl.constexpr):
    """A row of logits (c, V): log p(target), the entropy, and p - onehot(target), 0 for ids from
    `valid` on. Each lane carries its own maximum m, the sum of exponentials of y - m, and the sum
    of those times y - m; one reduction at the end."""
    r, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = logits + r * rows
    m, total, mean = tl.full((BLOCK,), -1e30, tl.float32), lane * 0.0, lane * 0.0
    for v in range(0, valid, BLOCK):
        y = tl.load(x + v + lane, mask=v + lane < valid, other=-1e30) * inverse_temperature
        new = tl.maximum(m, y)
        fade, e = tl.exp(m - new), tl.exp(y - new)
        mean = fade * (mean + total * (m - new)) + e * (y - new)
        total, m = total * fade + e, new
    peak = tl.max(m, 0)
    weight = tl.exp(m - peak)
    mean = tl.sum(weight * (mean + total * (m - peak)), 0)
    total = tl.sum(weight * total, 0)
    log_total = tl.log(total)  # not added to the peak, which may be large: that would round it
    target = tl.load(targets + r)
    tl.store(logp + r, tl.load(x + target) * inverse_temperature - peak - log_total)
    tl.store(entropy + r, log_total - mean / total)
    for v in range(0, rows, BLOCK):
        ids = v + lane
        y = tl.load(x + ids, mask=ids < valid, other=-float("inf")) * inverse_temperature
        p = tl.exp(y - peak - log_total) - tl.where(ids == target, 1.0, 0.0)
        tl.store(grad + r * rows + ids, p.to(grad.dtype.element_ty), mask=ids < rows)


def score(logits, targets, temperature, valid_vocab, dtype):
    """model.score from logits (c, V) float32, and p - onehot (c, V) in `dtype`."""
    c, V = logits.shape
    logp, entropy = logits.new_empty(c), logits.new_empty(c)
    grad = torch.empty(c, V, dtype=dtype, device=logits.device)
    score_kernel[(c,)](logits, targets, logp, entropy, grad, valid_vocab, V, 1 / temperature,
                       BLOCK=min(4096, power(V)), num_warps=8)
    return logp, entropy, grad
