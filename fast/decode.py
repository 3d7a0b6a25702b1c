"""
The decode step on the GPU: one token for each of B rows, in seven kernels a layer, none of which
waits for the host.

A decode step moves bytes: the weights once, the live keys and values once. The rest is overhead,
mostly kernels that do almost nothing. So four of a layer's kernels are the FP4 GEMM
(gemm.linear_decode), which takes in bias, residual, LoRA, and silu(gate) * up. The others:

    attend   (Qwen3: norms of q and k's heads,) RoPE, k and v into the cache, attention over the
             live tokens, split over the sequence when rows are few
    norm     RMSNorm with AQN's noise
    stats, pick   (draw.py) the token, its log-prob, the row's new state

Beside 16-bit weights cuBLAS multiplies, and LoRA's kernel after it does the rest (adapter.py).

What earlier kernels of the step wrote is read only after gdc_wait(): on Hopper a kernel may start
while its predecessor still runs (programmatic dependent launch), and meanwhile fetches what the
step does not write. When it may, the predecessor signals: programs that come too early pile up on
the SMs that have room first, and the others stand empty.

    python lab/bench.py rollout 7b:nvfp4:16:1,8

Shapes: B rows, C hidden, F intermediate, H query heads, Hkv kv heads, G = H / Hkv, D head size,
S cache slots, V vocabulary, R rank, P parts of a fused projection, W splits of a sequence.
"""
import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton import next_power_of_2 as power

from fast import attention, gemm
from fast.adapter import lora_kernel, product32, signal, wait
from fast.draw import EOS, pick_kernel, record_kernel, stats_kernel
from fast.linears import exact, linears_of, refresh
from fast.logprobs import head, score
from fast.plan import sms
from model import rope_tables

STEPS = 8  # steps between the host's reads of the tokens


@triton.jit
def norm_weight(weight, noise, c, C):
    w = tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    return w + tl.load(noise + c, mask=c < C, other=0)


@triton.jit
def norm_kernel(x, weight, noise, out, C, stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr,
                EARLY: tl.constexpr = False):
    """RMSNorm of a row of x (B, C) -> a row of out, whose rows are `stride` apart. EARLY: as in
    normed."""
    r, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    w = norm_weight(weight, noise, c, C)  # no kernel of this step writes these
    if EARLY:
        signal(PDL)
    wait(PDL)
    if not EARLY:
        signal(PDL)
    v = tl.load(x + r * C + c, mask=c < C, other=0).to(tl.float32)
    h = v * tl.rsqrt(tl.sum(v * v) / C + eps) * w
    tl.store(out + r * stride + c, h.to(out.dtype.element_ty), mask=c < C)


def normed(x, m, E=0, early=False, **launch):
    """RMSNorm m of x (S, C) -> (S, C + E), whose last E columns are left as they are. early: the
    next kernel may begin while the one before this still runs."""
    (S, C), out = x.shape, x.new_empty(x.shape[0], x.shape[1] + E)
    norm_kernel[(S,)](x, m.weight, m.noise, out, C, C + E, m.eps, BLOCK=power(C), num_warps=8,
                      EARLY=early, **launch)
    return out


@triton.jit
def swiglu_kernel(gate_up, out, F, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """silu(gate) * up of gate_up (B, 2F) -> out, rows `stride` apart; a program does BLOCK columns
    of a row. silu is rounded, as in the module."""
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    signal(PDL)
    gate = tl.load(gate_up + r * 2 * F + c, mask=c < F, other=0).to(tl.float32)
    up = tl.load(gate_up + r * 2 * F + F + c, mask=c < F, other=0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + r * stride + c, (silu * up).to(out.dtype.element_ty), mask=c < F)


def swiglu(gate_up, BLOCK, E=0, **launch):
    """silu(gate) * up of gate_up (S, 2F) -> (S, F + E), whose last E columns are left as they
    are."""
    S, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(S, width + E)
    swiglu_kernel[S, triton.cdiv(width, BLOCK)](gate_up, out, width, width + E, BLOCK=BLOCK,
                                                **launch)
    return out


@triton.jit
def attend_block(m, l, acc, r1, r2, k1, k2, v, ok, scale, IEEE: tl.constexpr):
    """Online softmax over one block, as attention.forward_kernel does it: k1, k2 (BLOCK, D/2), v
    (BLOCK, D), ok (BLOCK,) marks the live tokens."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    score = tl.dot(r1, tl.trans(k1), input_precision=precision)
    score = tl.dot(r2, tl.trans(k2), acc=score, input_precision=precision)  # (GP, BLOCK)
    score = tl.where(ok[None, :], score, -float("inf"))
    new = tl.maximum(m, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - new[:, None])
    fade = tl.exp2(m - new)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=precision)  # (GP, D)
    return new, l * fade + tl.sum(p, 1), acc


@triton.jit
def head_norm(x1, x2, weight, noise, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Qwen3's RMSNorm over heads given by their halves (.., D/2), rounded as the module rounds."""
    d = tl.arange(0, D // 2)
    square = tl.sum(x1 * x1 + x2 * x2, len(x1.shape) - 1, keep_dims=True)
    rms = tl.rsqrt(square / D + eps)
    w1, w2 = norm_weight(weight, noise, d, D), norm_weight(weight, noise, d + D // 2, D)
    y1, y2 = (x1 * rms * w1).to(dtype), (x2 * rms * w2).to(dtype)
    return y1.to(tl.float32), y2.to(tl.float32)


def norms_of_heads(attn):
    """A kernel's arguments for the norms of q and k's heads; nothing, but for Qwen3."""
    q, k = attn.q_norm, attn.k_norm
    return [None] * 5 if q is None else [q.weight, q.noise, k.weight, k.noise, q.eps]


@triton.jit
def rotate(x1, x2, co, si):
    """RoPE of heads given by their halves, in float32. The compiler is not left to choose which of
    two products it fuses with their sum: sampler and trainer must round alike."""
    return tl.fma(x1, co, -(x2 * si)), tl.fma(x2, co, x1 * si)


@triton.jit
def load_block(keys, values, t, ok, D: tl.constexpr):
    """The halves of the keys, (BLOCK, D/2) each, and the values (BLOCK, D) of the tokens t; 0 where
    not ok."""
    HALF: tl.constexpr = D // 2
    d, e = tl.arange(0, HALF), tl.arange(0, D)
    k1 = tl.load(keys + t[:, None] * D + d[None, :], mask=ok[:, None], other=0)
    k2 = tl.load(keys + t[:, None] * D + HALF + d[None, :], mask=ok[:, None], other=0)
    return k1, k2, tl.load(values + t[:, None] * D + e[None, :], mask=ok[:, None], other=0)


@triton.jit
def merge_splits(parts, ms, ls, splits, stride, head, g, G: tl.constexpr, GP: tl.constexpr,
                 D: tl.constexpr, W: tl.constexpr):
    """All splits' sums merged for the heads (GP,), in a fixed order: (l (GP,), acc (GP, D)). Each
    split's numbers lie `stride` heads after the previous split's. g >= G is no head: l is 1."""
    SOME: tl.constexpr = min(W, 8)
    e = tl.arange(0, D)
    m, l = tl.where(g < G, -float("inf"), 0.0), tl.where(g < G, 0.0, 1.0)
    acc = tl.zeros((GP, D), tl.float32)
    for i in range(0, splits, SOME):
        for j in tl.static_range(SOME):  # loads in flight; a tensor of them would cross warps
            # not `live & (..)`: the interpreter's mask would not be a bool
            at, there = (i + j) * stride + head, g < tl.where(i + j < splits, G, 0)
            own = tl.load(ms + at, mask=there, other=-float("inf"), cache_modifier=".cg")
            some = tl.load(parts + at[:, None] * D + e[None, :], mask=there[:, None], other=0.0,
                           cache_modifier=".cg")  # (GP, D)
            new = tl.maximum(m, own)
            fade, f = tl.exp2(m - new), tl.exp2(own - new)
            l = l * fade + f * tl.load(ls + at, mask=there, other=0.0, cache_modifier=".cg")
            acc = acc * fade[:, None] + f[:, None] * some
            m = new
    return l, acc


@triton.jit(do_not_specialize=["B"])
def attend_kernel(qkv, k_cache, v_cache, length, prompt, cos, sin, out, parts, ms, ls, arrived, B,
                  stride_b, stride_h, scale, q_weight, q_noise, k_weight, k_noise, eps,
                  HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
                  W: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
                  IEEE: tl.constexpr, EXACT: tl.constexpr):
    """One split of one kv head of one row: RoPE, the new k and v into the cache, online softmax
    over the split's live tokens. NORM: the heads of q and k are normed first.

    qkv (B, (H + 2 Hkv) D); caches of one layer, (S rows, Hkv, tokens, D) with strides; -> out (B,
    H*D). Split 0 also takes the new token, which it has in registers. Each of several splits leaves
    its sums in parts (W, B, H*D), ms, ls (W, B, H) float32, ms in units of log2, and the last to
    arrive (arrived (B * Hkv,), zero between kernels) adds them up, always in the same order.

    EXACT (with W = 1, BLOCK = attention.B and one warp): sums in the update's order. There a
    completion continues its prompt, of prompt (B,) tokens, and blocks begin anew with it."""
    b, h, s = tl.program_id(0) // HKV, tl.program_id(0) % HKV, tl.program_id(1)
    HALF: tl.constexpr = D // 2
    g, d, e, o = tl.arange(0, GP), tl.arange(0, HALF), tl.arange(0, D), tl.arange(0, BLOCK)
    mine = b.to(tl.int64) * stride_b + h * stride_h
    keys, values = k_cache + mine, v_cache + mine
    # lengths and earlier tokens were in memory before this step: the first block is fetched before
    # the wait
    n = tl.load(length + b)  # tokens in the cache; the new one goes to position n
    # with fewer tokens than a block a split is not worth what it adds to the merge
    chunk = tl.maximum(tl.cdiv(n, W), BLOCK)
    splits = tl.maximum(1, tl.cdiv(n, chunk))
    if s >= splits:
        return
    t = s * chunk + o
    end = tl.minimum(n, (s + 1) * chunk)
    ok = t < end
    k1, k2, v = load_block(keys, values, t, ok, D)
    co, si = tl.load(cos + n * HALF + d), tl.load(sin + n * HALF + d)
    wait(PDL)
    if W == 1:
        signal(PDL)
    base = qkv + b.to(tl.int64) * ((HKV * G + 2 * HKV) * D)
    q1 = tl.load(base + (h * G + g[:, None]) * D + d[None, :],
                 mask=g[:, None] < G, other=0).to(tl.float32)
    q2 = tl.load(base + (h * G + g[:, None]) * D + HALF + d[None, :],
                 mask=g[:, None] < G, other=0).to(tl.float32)
    dtype = k_cache.dtype.element_ty
    if NORM:
        q1, q2 = head_norm(q1, q2, q_weight, q_noise, eps, D, dtype)
    r1, r2 = rotate(q1, q2, co[None, :], si[None, :])  # (GP, HALF)
    r1, r2 = r1.to(dtype), r2.to(dtype)
    m, l = tl.full((GP,), -float("inf"), tl.float32), tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, D), tl.float32)
    if s == 0:
        x1 = tl.load(base + (HKV * G + h) * D + d).to(tl.float32)
        x2 = tl.load(base + (HKV * G + h) * D + HALF + d).to(tl.float32)
        if NORM:
            x1, x2 = head_norm(x1, x2, k_weight, k_noise, eps, D, dtype)
        n1, n2 = rotate(x1, x2, co, si)
        n1, n2 = n1.to(dtype), n2.to(dtype)
        nv = tl.load(base + (HKV * G + HKV + h) * D + e)
        tl.store(keys + n * D + d, n1)
        tl.store(keys + n * D + HALF + d, n2)
        tl.store(values + n * D + e, nv)
        if not EXACT:
            m = tl.sum(r1.to(tl.float32) * n1.to(tl.float32)[None, :]
                       + r2.to(tl.float32) * n2.to(tl.float32)[None, :], 1) * scale
            l += 1
            acc += nv.to(tl.float32)[None, :]
    if EXACT:
        tl.debug_barrier()  # the new token is read from the cache like the others
        first = tl.minimum(tl.load(prompt + b), n + 1)  # tokens of the prompt that are there
        before = tl.cdiv(first, BLOCK)  # their blocks
        for i in range(before + tl.cdiv(n + 1 - first, BLOCK)):
            t = tl.where(i < before, i * BLOCK, first + (i - before) * BLOCK) + o
            ok = t < tl.where(i < before, first, n + 1)
            k1, k2, v = load_block(keys, values, t, ok, D)
            m, l, acc = attend_block(m, l, acc, r1, r2, k1, k2, v, ok, scale, IEEE)
    else:
        if s * chunk < end:
            m, l, acc = attend_block(m, l, acc, r1, r2, k1, k2, v, ok, scale, IEEE)
        for t0 in range(s * chunk + BLOCK, end, BLOCK):
            t = t0 + o
            ok = t < end
            k1, k2, v = load_block(keys, values, t, ok, D)
            m, l, acc = attend_block(m, l, acc, r1, r2, k1, k2, v, ok, scale, IEEE)
    head = b * (HKV * G) + h * G + g
    live = g < G
    if W > 1:
        signal(PDL)  # earlier, o_proj's programs would pile up on the SMs that are done first
        stride = B * (HKV * G)  # from a split's heads to the next one's
        tl.store(parts + (s * stride + head)[:, None] * D + e[None, :], acc, mask=live[:, None])
        tl.store(ms + s * stride + head, m, mask=live)
        tl.store(ls + s * stride + head, l, mask=live)
        tl.debug_barrier()
        if tl.atomic_add(arrived + b * HKV + h, 1, sem="acq_rel") != splits - 1:
            return
        tl.store(arrived + b * HKV + h, 0)
        l, acc = merge_splits(parts, ms, ls, splits, stride, head, g, G, GP, D, W)
    tl.store(out + head[:, None] * D + e[None, :], (acc / l[:, None]).to(dtype),
             mask=live[:, None])


class Step:
    """One decode step of a model; `step(rows)` launches it for the first `rows` slots. It owns the
    state, so that a CUDA graph of it stays valid while LoRA, noise, temperature and rows change.

    cache: model.KVCache of S slots. State, by slot: token (the last one, not yet in the cache),
    cache.length, prompt (its length), key (of the random numbers), stop (length at which the row
    ends), alive, count (where the next result goes in out_ids, out_logp)."""

    def __init__(self, model, cache):
        self.cache, S, dev = cache, cache.k.shape[1], cache.k.device
        self.config, self.valid_vocab = model.config, model.valid_vocab
        self.token, self.prompt, self.key, self.stop = (
            torch.zeros(S, dtype=torch.long, device=dev) for _ in range(4))
        self.alive, self.count = (torch.zeros(S, dtype=torch.int32, device=dev) for _ in range(2))
        self.arrived = torch.zeros(S * model.config.num_key_value_heads, dtype=torch.int32,
                                   device=dev)  # attend's counters
        self.out_ids = torch.zeros(STEPS, S, dtype=torch.long, device=dev)
        self.out_logp = torch.zeros(STEPS, S, device=dev)
        self.eos = torch.full((EOS.value,), -1, dtype=torch.long, device=dev)
        self.inverse_temperature = torch.ones(1, device=dev)
        places = torch.arange(cache.k.shape[3], device=dev)
        self.cos, self.sin = rope_tables(places, model.config)  # (tokens, D/2)
        self.embed, self.head = model.embed.weight, model.lm_head.weight
        self.layers = linears_of(model)
        # not the model itself: an engine lasts as long as its model, and must not keep it alive
        self.blocks, self.norm = [*model.layers], model.norm
        hopper = cache.k.is_cuda and torch.cuda.get_device_capability(dev)[0] >= 9
        self.launch = {"PDL": hopper, "launch_pdl": hopper}
        self.sms, self.exact = sms(dev), exact(model)
        self.refresh = partial(refresh, self.layers)
        self.refresh()

    def linear(self, p, x, residual=None, glu=False, early=False):
        """base(x) + LoRA (+ residual, which is overwritten, where there is no bias) for x (B, K);
        glu: silu(gate) * up of that; early: as in linear_decode."""
        if p.q is not None:
            return gemm.linear_decode(
                x, p.q, p.base.bias, p.A, p.B, p.bounds, p.scaling, residual, glu, early,
                self.exact)
        if p.A is None:
            if residual is not None:
                return residual.addmm_(x, p.base.weight_in(x.dtype).T)  # (B, K) @ (K, N)
            return swiglu(p.base(x), 512, **self.launch) if glu else p.base(x)
        bias, y = p.base.bias, product32(x, p.both.T)  # (B, K) @ (K, N + E)
        B, R, width = len(x), p.B.shape[1], p.N // (1 + glu)
        RB, BN = 8 if B <= 8 else 16, 128  # rows and columns of the result that a program does
        out = x.new_empty(B, width) if residual is None else residual
        if B > 32 and triton.cdiv(B, 64) * triton.cdiv(width, 64) >= 56:  # enough programs
            RB = BN = 64
        lora_kernel[(triton.cdiv(width, BN) * triton.cdiv(B, RB),)](
            y, bias, out, out, p.B, B, p.N, y.stride(0), *(*p.bounds, p.N, p.N)[:2], p.scaling,
            R=R, RP=min(64, max(16, power(R))), RB=RB, BN=BN, GLU=glu, BIAS=bias is not None,
            ADD=residual is not None, num_warps=4, num_stages=1,
            IEEE=x.dtype == torch.float32 or not x.is_cuda, **self.launch)
        return out

    def attention(self, layer, qkv):
        """qkv (B, (H + 2 Hkv) D) -> attention output (B, H*D); writes the cache."""
        c, B, attn = self.config, qkv.shape[0], self.blocks[layer].attn
        # a script may have left blocks out, or given them norms of heads
        k_cache, v_cache = self.cache.k[attn.layer], self.cache.v[attn.layer]
        H, HKV, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        # programs to fill the card twice, at most 32 splits
        fill = max(1, 2 * self.sms // (B * HKV))
        W = 1 if self.exact else 1 << min(5, fill.bit_length() - 1)
        # two programs of long blocks fit an SM, three of short ones
        BLOCK, warps, stages = (128, 4, 2) if B * HKV <= 2 * self.sms else (32, 4, 3)
        if self.exact:
            BLOCK, warps, stages = attention.B, 1, 3
        out, several = qkv.new_empty(B, H * D), W if W > 1 else 0
        parts = qkv.new_empty(several, B, H * D, dtype=torch.float32)
        ms, ls = (qkv.new_empty(several, B, H, dtype=torch.float32) for _ in range(2))
        attend_kernel[B * HKV, W](
            qkv, k_cache, v_cache, self.cache.length, self.prompt, self.cos, self.sin, out, parts,
            ms, ls, self.arrived, B, k_cache.stride(0), k_cache.stride(1),
            D**-0.5 * math.log2(math.e), *norms_of_heads(attn), HKV=HKV,
            G=H // HKV, GP=max(16, power(H // HKV)), D=D, W=W, BLOCK=BLOCK,
            NORM=attn.q_norm is not None, IEEE=qkv.dtype == torch.float32, EXACT=self.exact,
            num_warps=warps, num_stages=stages, **self.launch)
        return out

    def hidden(self, rows, blocks=None):
        """Final-normed hidden states (B, C) of the rows' current tokens; their keys and values are
        in the cache after it. blocks: only the first so many."""
        x = F.embedding(self.token[:rows], self.embed)  # (B, C)
        for i in range(len(self.blocks))[:blocks]:
            x = self.block(i, x, partial(self.attention, i))
        return normed(x, self.norm, **self.launch)

    def block(self, i, x, attend):
        """Block i on x (B, C), which is overwritten. attend: qkv (B, (H + 2 Hkv) D) -> (B, H*D)."""
        qkv_proj, o_proj, gate_up_proj, down_proj = self.layers[i]
        before, between = self.blocks[i].input_layernorm, self.blocks[i].post_attention_layernorm
        h = normed(x, before, early=True, **self.launch)
        y = attend(self.linear(qkv_proj, h, early=True))
        x = self.linear(o_proj, y, x)  # (B, H*D) -> (B, C)
        # with more outputs, or that many rows, gate_up's programs would pile up
        early = gate_up_proj.N <= 192 * self.sms and not 8 < len(x) < 48
        h = normed(x, between, early=early, **self.launch)
        y = self.linear(gate_up_proj, h, glu=True)  # (B, C) -> (B, F)
        return self.linear(down_proj, y, x)  # (B, F) -> (B, C)

    def step(self, rows, greedy=False, nucleus=None, blocks=None):
        """Decode the first `rows` slots once. nucleus: (temperature, top_p), with which torch draws
        in place of the fused sampler. blocks: as in `hidden`."""
        scores = head(self.hidden(rows, blocks), self.head, self.exact)  # (B, C) @ (C, V)
        self.sample(scores, greedy, nucleus)

    def sample(self, logits, greedy=False, nucleus=None):
        """Draw a token for each row of logits (B, V) float32 and move the rows on."""
        rows, S = logits.shape[0], self.token.shape[0]
        state = (self.token, self.cache.length, self.stop, self.alive, self.count, self.out_ids,
                 self.out_logp, self.eos)
        if nucleus:
            ids, logp = self.draw(logits[:, : self.valid_vocab], self.key[:rows],
                                  self.cache.length[:rows] + 1, *nucleus)
            record_kernel[(rows,)](ids, logp, *state, S)
            return
        BLOCK = min(4096, power(self.valid_vocab))
        NB = triton.cdiv(self.valid_vocab, BLOCK)
        top, total = logits.new_empty(rows, NB), logits.new_empty(rows, NB)
        best = logits.new_empty(rows, NB, dtype=torch.int32)
        common = {"BLOCK": BLOCK, "num_warps": 8} | self.launch
        blocks = (logits, self.inverse_temperature, top, total, best)
        stats_kernel[rows, NB](*blocks, self.valid_vocab, logits.stride(0), NB, **common)
        pick_kernel[(rows,)](
            *blocks, self.key, *state, self.valid_vocab, logits.stride(0), NB, S, NBP=power(NB),
            GREEDY=greedy, **common)
        if self.exact:  # the log-prob as the update's kernel sums it
            at = (self.count[None, :rows].long() - 1).clamp_(min=0)  # 0 while kernels are compiled
            ids = self.out_ids[:, :rows].gather(0, at)[0]
            logp, _, _ = score(logits, ids, self.inverse_temperature, self.valid_vocab)
            self.out_logp[:, :rows].scatter_(0, at, logp[None])
