"""
The model's forward and backward over tokens laid end to end: training and prefill on the GPU.

An update moves more bytes between its GEMMs than in them, and launches more kernels than a host can
keep up with, unless all that comes between two GEMMs is one kernel that keeps nothing that is cheap
to recompute. So a block of model.py is four steps of one kind, `Project`: a prologue and a linear.

    Norm(x)       RMSNorm with AQN's noise         -> h   qkv = h Wqkv^T + bias
    Attend(qkv)   RoPE, causal attention           -> y   x   = x + y Wo^T
    Norm(x)                                        -> h   gu  = h Wgu^T
    SwiGLU(gu)    silu(gate) * up                  -> m   x   = x + m Wdown^T

Kept for backward are the right column's outputs (x, qkv, x, gu), attention's y, and x A^T (Qwen3:
also qkv after its head norms). h and m are recomputed by the kernel that differentiates the
prologue: it reads the gradient of h and leaves h in its place, for dA = (dxa)^T h.

LoRA is part of the GEMM. A weight is decoded, or copied if it has 16 bits, into a scratch; there
B's columns stand behind it, as x A^T stands behind h, so that one GEMM (with --engine exact the
decode step's, in forward) adds up

    [h | x A^T] [w_hat | s B]^T    and, in backward,    dy [w_hat | s B] = [dh | d(x A^T)]

and rounds once, as the decode step does (decode.py): the residual and the bias are in it too. An
adapter begins small, and what is below half a step of an output that is rounded already, 2^-9 of
it in bfloat16, would be lost. Rows of different completions lie end to end and attention keeps them
apart (attention.py), so no padding is computed.

    python lab/bench.py step --sizes 7b

Shapes: S tokens of all rows, C hidden, F intermediate, H query heads, Hkv kv heads, D head size,
V vocabulary; a linear has N outputs, K inputs, P parts; R rank, E = P*R rounded up to 8.
"""
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint
from triton import next_power_of_2 as power

from fast import attention
from fast.adapter import product32
from fast.compiling import compiling
from fast.decode import norm_weight, normed, norms_of_heads, rotate, swiglu
from fast.linears import linears_of, refresh
from model import rope_tables, to_device

# ---- prologues: forward(x, E) -> (wide (S, K + E), whose first K columns are h, the others left
# ---- for x A^T; what backward needs beside x). backward(x, kept, d) -> (the gradient of x; h, for
# ---- which it may take d's first K columns)


class Norm:
    def __init__(self, m):
        self.m, self.weight = m, m.weight

    def forward(self, x, E):
        return normed(x, self.m, E, PDL=False), ()

    def backward(self, x, kept, d):
        (S, C), m, dx = x.shape, self.m, torch.empty_like(x)
        norm_back_kernel[(S,)](x, m.weight, m.noise, d, dx, C, d.stride(0), m.eps, BLOCK=power(C),
                               num_warps=4 if C <= 4096 else 8)
        return dx, d[:, :C]

    def own_gradient(self, x, d):
        """The gradient of the norm's weight (C,); call it before `backward`, which overwrites d."""
        scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + self.m.eps)  # (S, 1)
        return (d[:, : x.shape[1]] * (x * scale)).sum(0).to(self.weight.dtype)


class SwiGLU:
    weight = None

    def forward(self, x, E):
        return swiglu(x, 1024, E, PDL=False), ()

    def backward(self, x, kept, d):
        S, width = x.shape[0], x.shape[1] // 2
        dx = torch.empty_like(x)
        swiglu_back_kernel[S, triton.cdiv(width, 1024)](x, d, dx, width, d.stride(0), BLOCK=1024)
        return dx, d[:, :width]


class Attend:
    """One block's attention. `cache` (KVCache or None): keys and values are written there too."""

    weight = None  # Qwen3's head norms are trained by model.py's modules

    def __init__(self, attn, rows, cache=None):
        self.attn, self.rows, self.cache = attn, rows, cache
        H, HKV = attn.heads, attn.kv_heads
        self.heads = H, HKV, HKV
        self.normed = attn.q_norm is not None
        self.args = rows.place, rows.cos, rows.sin, *norms_of_heads(attn)
        self.shape = dict(H=H, HKV=HKV, HP=power(H + HKV), HKVP=power(HKV), D=attn.head_dim,
                          NORM=self.normed)

    def split(self, qkv):
        """q (S, H, D), k and v (S, Hkv, D), views."""
        return qkv.view(len(qkv), -1, self.attn.head_dim).split(self.heads, 1)

    def forward(self, x, E):
        # in place, as nothing else needs qkv, unless the backward of its norms will
        out = torch.empty_like(x) if self.normed else x
        cache = [None] * 5
        if self.cache is not None:
            k, v = (t[self.attn.layer] for t in (self.cache.k, self.cache.v))
            cache = [self.rows.slot, k, v, k.stride(0), k.stride(1)]
        rope_kernel[(len(x),)](x, out, *self.args, *cache, **self.shape,
                               CACHE=self.cache is not None)
        q, k, v = self.split(out)
        wide = x.new_empty(len(x), q[0].numel() + E)
        y = wide[:, : q[0].numel()].unflatten(1, q.shape[1:])
        return wide, (out, y, attention.forward(q, k, v, y, self.rows.blocks))

    def __call__(self, qkv):
        """Attention's output (S, H D) of qkv, which may be overwritten."""
        return self.forward(qkv, 0)[0]

    def backward(self, x, kept, d):
        qkv, y, lse = kept
        dy = d[:, : y[0].numel()].unflatten(1, y.shape[1:])
        grads = attention.backward(dy, *self.split(qkv), y, lse, self.rows.blocks,
                                   self.rows.shared)
        dx = torch.empty_like(x)
        rope_back_kernel[(len(x),)](*grads, x, dx, *self.args, **self.shape)
        return dx, y.flatten(1)


# ---- a linear behind a prologue


class Project(torch.autograd.Function):
    """y (S, N) = residual + linear(prologue(x)). What is trained (A and B; a norm's weight or None)
    is passed for its gradient alone: `p` holds what is multiplied."""

    @staticmethod
    def forward(ctx, prologue, p, x, residual, A, B, norm):
        wide, kept = prologue.forward(x, p.E)
        xa = None
        if p.E:
            xa = wide[:, : p.K] @ p.padded_A.T  # (S, K) @ (K, E)
            wide[:, p.K :] = xa
        ctx.prologue, ctx.p, ctx.residual = prologue, p, residual is not None
        ctx.save_for_backward(x, xa, *kept)
        return p.forward(wide, residual)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, xa, *kept = ctx.saved_tensors
        p, dA, dB = ctx.p, None, None
        dy = dy.contiguous()
        d = p.backward(dy)
        dxa = d[:, p.K :]
        if p.E:
            d[:, : p.K].addmm_(dxa, p.padded_A)
        dnorm = ctx.prologue.own_gradient(x, d) if ctx.needs_input_grad[-1] else None
        dx, h = ctx.prologue.backward(x, kept, d)
        if p.E:
            dA = product32(dxa.T, h)[: p.PR]
            dB = torch.cat(p.blocks(product32(dy.T, xa))).mul_(p.scaling)
        return None, None, dx, dy if ctx.residual else None, dA, dB, dnorm


class FinalNorm(torch.autograd.Function):
    """norm(x); its weight is passed for its gradient alone."""

    @staticmethod
    def forward(ctx, norm, x, weight):
        ctx.norm = norm
        ctx.save_for_backward(x)
        return norm.forward(x, 0)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        [x] = ctx.saved_tensors
        own = ctx.norm.own_gradient(x, dy) if ctx.needs_input_grad[2] else None
        return None, ctx.norm.backward(x, (), dy.clone())[0], own


# ---- the model


class Rows:
    """The layout of S tokens. place (S,): a token's position, below `longest`, behind what its row
    continues; -1 for padding, which is a row of its own. borders, of: as in attention.blocks. slot
    (S,): of the cache, if one is filled."""

    def __init__(self, config, place, borders, longest, slot=None, of=None):
        self.place, self.slot, self.shared = place, slot, of is not None
        self.blocks = attention.blocks(borders, len(place), of)  # (n, 6)
        places = torch.arange(longest, device=place.device)
        self.cos, self.sin = rope_tables(places, config)  # (longest, D/2)


def end_to_end(rows, of=None):
    """(ids, places, borders) of rows (lists of ids), as lists; row i continues row of[i], itself if
    none."""
    ids, places = [], []
    for i, row in enumerate(rows):
        ids += row
        at = len(rows[of[i]]) if of and of[i] != i else 0
        places += range(at, at + len(row))
    return ids, places, [0, *accumulate(map(len, rows))]


def project(prologue, p, x, residual=None):
    A, B = (None, None) if p.adapter is None else (p.adapter.A, p.adapter.B)
    return Project.apply(prologue, p, x, residual, A, B, prologue.weight)


def block(layer, linears, attend, x):
    """One block on x (S, C); attend: its Attend."""
    qkv_proj, o_proj, gate_up_proj, down_proj = linears
    qkv = project(Norm(layer.input_layernorm), qkv_proj, x)  # (S, C) -> (S, (H + 2 Hkv) D)
    x = project(attend, o_proj, qkv, x)
    gate_up = project(Norm(layer.post_attention_layernorm), gate_up_proj, x)  # (S, C) -> (S, 2F)
    return project(SwiGLU(), down_proj, gate_up, x)


def hidden(model, rows, take, of=None, blocks=None):
    """Final-normed states (len(take), C) at the places `take` among the tokens of `rows` (lists of
    ids) laid end to end; differentiable in what is trained. of: the row that each row continues,
    itself if none; rows that continue another follow it directly (attention.blocks). blocks: only
    the first so many, which launch the kernels of all."""
    device = model.embed.weight.device
    linears = linears_of(model)
    refresh(linears)
    ids, places, borders = end_to_end(rows, of)
    alone = of is None or of == [*range(len(rows))]
    layout = Rows(model.config, to_device(places, device), to_device(borders, device),
                  max(places) + 1, of=None if alone else to_device(of, device))
    x = F.embedding(to_device(ids, device), model.embed.weight)  # (S, C)
    for layer, four in [*zip(model.layers, linears, strict=True)][:blocks]:
        run = partial(block, layer, four, Attend(layer.attn, layout))
        keep = not (model.checkpointing and torch.is_grad_enabled())
        x = run(x) if keep else checkpoint(run, x, use_reentrant=False)
    # a place may be taken more than once: index_select would add its gradients in no fixed order
    norm = Norm(model.norm)
    return FinalNorm.apply(norm, x[to_device(take, device)], norm.weight)


class Prefill:
    """Fills the cache of a decode.Step with rows' keys and values, from position 0 on.

    A few hundred tokens are less work for the GPU than for the host that launches their kernels,
    and all other rows wait meanwhile. So up to the last of SIZES tokens run as one CUDA graph,
    padded to the next size; more are launched. Where the GEMM that decodes as it multiplies is
    faster, a block is the decode step's, whose GEMM takes in LoRA and silu."""

    SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)

    def __init__(self, step):
        self.step, self.graphs = step, {}  # size -> (graph, its input)
        self.compiled = set()  # sizes, and None for what is launched without a graph

    @torch.no_grad()
    def run(self, model, rows, slots, capture=None):
        """Prefill rows (lists of ids) into `slots`. capture(launch) returns the replay of launch()
        as a graph; None: launch directly."""
        device = self.step.cache.k.device
        ids, places, borders = end_to_end(rows)
        slot_of = [slot for row, slot in zip(rows, slots, strict=True) for _ in row]
        size = next((s for s in self.SIZES if s >= len(ids)), None)
        most = size and max(8, size // 32)  # rows that a graph of this size takes
        if capture is None or size is None or len(rows) > most:
            x = [to_device(t, device) for t in (ids, places, slot_of, borders)]
            launch = partial(self.launch, model, *x, max(map(len, rows)))
            self.compile(None, launch)
            launch()
            return
        pad = size - len(ids)
        padded = (ids + [0] * pad + places + [-1] * pad + slot_of + [0] * pad
                  + borders + borders[-1:] * (most + 1 - len(borders)) + [size])
        if size not in self.graphs:
            static = to_device(padded, device)
            split = static.split([size, size, size, most + 2])
            launch = partial(self.launch, model, *split, size)
            self.compile(size, launch)
            self.graphs[size] = capture(launch), static
        replay, static = self.graphs[size]
        static.copy_(to_device(padded, device))
        replay()

    def compile(self, size, launch):
        """Compile the kernels of launch(), of prompts of `size` tokens or, None, of those without a
        graph, of which others may need more."""
        if size not in self.compiled and self.step.cache.k.is_cuda:
            self.compiled.add(size)
            with compiling():
                launch()

    def launch(self, model, ids, places, slots, borders, longest):
        rows = Rows(model.config, places, borders, longest, slots)
        x = F.embedding(ids, model.embed.weight)  # (S, C)
        linears = self.step.layers
        few = self.step.exact or all(p.few(len(ids)) for p in linears[0])
        for i, layer in enumerate(model.layers):
            attend = Attend(layer.attn, rows, self.step.cache)
            if i == len(model.layers) - 1:  # only its keys and values are needed
                attend(project(Norm(layer.input_layernorm), linears[i][0], x))
            elif few:
                x = self.step.block(i, x, attend)
            else:
                x = block(layer, linears[i], attend, x)


# ---- kernels of the prologues. A matrix called wide has rows of `stride` numbers, E more than h
# ---- needs: x A^T is stored behind h


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
    """Qwen3's norm weights (heads, D/2) of heads h (heads, 1) and columns d (1, D/2): q's for the
    first H heads, then k's."""
    q, k = norm_weight(q_weight, q_noise, d, D), norm_weight(k_weight, k_noise, d, D)
    return tl.where(h < H, q, k)


@triton.jit
def rope_kernel(qkv, out, place, cos, sin, q_weight, q_noise, k_weight, k_noise, eps, slot, k_cache,
                v_cache, stride_b, stride_h, H, HKV, HP: tl.constexpr, HKVP: tl.constexpr,
                D: tl.constexpr, NORM: tl.constexpr, CACHE: tl.constexpr):
    """RoPE of the q and k heads of one token of qkv (S, (H + 2 Hkv) D) -> out, which may be qkv.
    NORM: each head is normed first. CACHE: k and v also go to their row's slot in the cache."""
    t = tl.program_id(0).to(tl.int64)
    h, d, HALF = tl.arange(0, HP)[:, None], tl.arange(0, D // 2)[None, :], D // 2
    live = h < H + HKV
    at = t * (H + 2 * HKV) * D + h * D + d
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
    co, si = tl.load(cos + n * HALF + d), tl.load(sin + n * HALF + d)
    y1, y2 = rotate(x1, x2, co, si)
    y1, y2 = y1.to(T), y2.to(T)
    tl.store(out + at, y1, mask=live)
    tl.store(out + at + HALF, y2, mask=live)
    if NORM or CACHE:
        g, e = tl.arange(0, HKVP)[:, None], tl.arange(0, D)[None, :]
        kv = g < HKV
        values = t * (H + 2 * HKV) * D + (H + HKV + g) * D + e
        v = tl.load(qkv + values, mask=kv, other=0)
        if NORM:  # out is not qkv
            tl.store(out + values, v, mask=kv)
        if CACHE:
            if place_t >= 0:  # else padding
                row = tl.load(slot + t) * stride_b + n * D
                tl.store(v_cache + row + g * stride_h + e, v, mask=kv)
                key = row + (h - H) * stride_h + d
                tl.store(k_cache + key, y1, mask=live & (h >= H))
                tl.store(k_cache + key + HALF, y2, mask=live & (h >= H))


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
    co, si = tl.load(cos + n * HALF + d), tl.load(sin + n * HALF + d)
    y1, y2 = g1 * co + g2 * si, g2 * co - g1 * si
    row = t * (H + 2 * HKV) * D
    if NORM:
        x1 = tl.load(qkv + row + h * D + d, mask=q | k, other=0).to(tl.float32)
        x2 = tl.load(qkv + row + h * D + d + HALF, mask=q | k, other=0).to(tl.float32)
        rms = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        y1 *= head_weights(q_weight, q_noise, k_weight, k_noise, h, d, H, D)
        y2 *= head_weights(q_weight, q_noise, k_weight, k_noise, h, d + HALF, H, D)
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
