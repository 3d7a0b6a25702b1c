"""
The FP4 GEMM: y = x w_hat^T for activations x (M, K) in bfloat16 and a four-bit weight (N, K) as
fast/layout.py lays it out, in Triton. marlin_triton.py is the same product, to be read first.

A rollout decodes a handful of rows at a time, so a linear layer costs what reading its weight
costs: `gemm` streams the codes at up to 86% (H100) or 83% (H200) of the read bandwidth, and
fast/bits.py turns them into 16 bits in registers. With many rows (prefill, log-probs, update) it is
unpacking the codes that costs, so `to_16bit_kernel` writes the weight once to a scratch that all
layers share, and cuBLAS multiplies. `matmul` picks; its gradient in x uses the scratch too.

The tensor core sums in float32; the power of two that bits.py leaves there, the row's global scale
(float32), the bias and the LoRA term are applied in the epilogue. So only the sum and the output
are rounded: relative error at most 1.7e-3 in bfloat16 against a float64 product, 3.2e-3 for NF4,
whose values times scales round too.

Few rows. The weight is the MMA's long side, so that one row of x pads to 8, not to 64. Where tiles
are few, K is split (SPLIT): each split leaves a float32 partial sum, and the program that finishes
last adds them in order, so that each run gives the same bits. The GEMM takes in what would be a
kernel of its own: bias, residual, silu(gate) * up, and LoRA (fast/adapter.py). fast/plan.py chooses
tile and splits for an H100 or H200; other cards from Ampere on run the same kernel. What was tried
without success is in results/LOG.md.

    y = matmul(x, tile(quantize(w)))        # any M, differentiable in x; on a CPU interpreted
    python lab/bench.py kernels

Shapes: M rows of x, N outputs, K inputs, R LoRA rank, P parts of a fused projection.
"""
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fast.adapter import NONE, adapter_awaited, adapter_in, adapter_out, adapter_work, signal, wait
from fast.bits import TOUCH, decoder, in_16_bits, load_scales, scales_at, unscaled, words
from fast.layout import CHUNK, Tiled
from fast.plan import FEW, plan, sms, space
from nvfp4 import FORMATS, QuantLinear, scale_bits

SLAB = tl.constexpr(16)  # tiles of 128 rows of x: of more, programs side by side overflow L2


@triton.jit
def weight_row(tile, r, N, BN: tl.constexpr, GLU: tl.constexpr):
    """(the weight's row for row r of a tile, whether there is one). GLU: eight rows of gate and
    eight of up alternate, so that one thread holds both of a pair."""
    if GLU:
        n = tile * (BN // 2) + r // 16 * 8 + r % 8
        return n + (r // 8) % 2 * (N // 2), n < N // 2
    else:
        return tile * BN + r, tile * BN + r < N


@triton.jit(do_not_specialize=["M", "b0", "b1"])
def gemm(x, xd, codes, scale, g, bias, A, B, res, out, part, count, sums, flags, M, N, K, sx, sc,
         ss, sb, scaling, b0, b1, FMT: tl.constexpr, BLOCK: tl.constexpr, DECODE: tl.constexpr,
         ASM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
         EXACT: tl.constexpr, RANGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
         W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, RA: tl.constexpr,
         AT: tl.constexpr, Z: tl.constexpr, ZR: tl.constexpr, BA: tl.constexpr, ONE: tl.constexpr,
         GLU: tl.constexpr, BIAS: tl.constexpr, RES: tl.constexpr, PDL: tl.constexpr,
         TMA: tl.constexpr, EARLY: tl.constexpr):
    """out (M, N) = x w_hat^T + bias + scaling * (x A_part^T) B^T + res. A program does BN rows of
    the weight, BM rows of x and one of SPLIT splits of K, or all of K in the first WHOLE rows of
    tiles; with an adapter, the first programs compute x A^T (adapter_in). EXACT: the sums of all of
    K are those of a fixed number of ranges, added up in order, whether each is a split or a program
    computes RANGES of them one after another.

    GLU: the weight is gate stacked on up, and out (M, N / 2) is silu(gate) * up; of 16 rows of a
    tile, 8 are gate's, 8 up's. g: global scales (N,); part, count: the splits' partial sums and
    arrivals; sums, flags, Z, ZR: see adapter_in; sx, sc, ss, sb: row strides of x, codes, scale, B;
    b0, b1: the rows at which LoRA parts 1 and 2 begin; BLOCK, DECODE, ASM: see decoder; W: warps;
    RP: how much of R a product takes, 16, 32 or 64; AT: how many tiles of RA rows A has; TMA: the
    TMA unit copies x, from descriptor xd of tiles (BM, 128); EARLY: the next kernel may begin once
    all programs of this one have."""
    # Triton's interpreter cannot multiply bfloat16
    T: tl.constexpr = x.dtype.element_ty if ASM else tl.float32
    sc, ss = tl.multiple_of(sc, 64), tl.multiple_of(ss, 128 // BLOCK)
    MT, pid = tl.cdiv(M, BM), tl.program_id(0)
    if R > 0:
        makers = MT * (BM // BA) * AT * Z
        if pid < makers:
            adapter_in(x, A, sums, flags, M, K, sx, pid, MT, AT, P * R, Z, ZR, BM, BA, RA, T, PDL)
            return
        pid -= makers
    KB = K // 128  # chunks
    mt, tile, split, cut = pid % MT, pid // (MT * SPLIT), pid // MT % SPLIT, True
    per = tl.cdiv(KB, SPLIT * RANGES)
    if SPLIT == 1 and BM == 128:
        top = pid // (tl.cdiv(N, BN) * SLAB) * SLAB
        height, at = tl.minimum(MT - top, SLAB), pid - top * tl.cdiv(N, BN)
        mt, tile = top + at % height, at // height
    if WHOLE > 0:
        at = pid - WHOLE * MT
        cut = at >= 0
        tile = tl.where(cut, WHOLE + at // (MT * SPLIT), pid // MT)
        split = tl.where(cut, at // MT % SPLIT, 0)
        per = tl.where(cut, per, KB)
    m = mt * BM + tl.arange(0, BM)
    inside = (m < M)[None, :]
    r = tl.arange(0, BN)
    row, ok = weight_row(tile, r, N, BN, GLU)
    # a load's row in the tile -> the row that the MMA takes from the same registers: (block, half,
    # warp, lane / 4) -> (block, warp, half, lane / 4)
    rl = r // (16 * W) * (16 * W) + (r // 8) % W * 16 + (r // (8 * W)) % 2 * 8 + r % 8
    rl = tl.minimum(weight_row(tile, rl, N, BN, GLU)[0], N - 1)
    k, j = split * per * 128, tl.arange(0, 128)
    wp = words(codes, rl, k, sc)
    sp = scales_at(scale, rl, k, ss, BLOCK)
    # rows past the last are never stored. Tiles of 8 leave them out; larger ones, slow about zeros,
    # repeat the first rows: if all were the same row, every SM would read it at once
    live = inside if BM == 8 else None
    xp = x + (m % M).to(tl.int64)[None, :] * sx + (k + j)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    # the epilogue's operands are loaded now, to arrive while the weight streams: loaded at the end,
    # they would have to be waited for
    rr, gs = tl.arange(0, RP), tl.load(g + row, mask=ok, other=0.0)
    if BIAS:
        bs = tl.load(bias + row, mask=ok, other=0.0)
    if R > 0:
        bt = tl.load(B + row[:, None] * sb + rr[None, :], mask=ok[:, None] & (rr < R)[None, :],
                     other=0.0)
    wait(PDL)  # the kernel before may still be running: nothing is written before this either
    if EARLY:
        signal(PDL)
    if RES and BM <= 16:  # more would not fit the registers
        rs = tl.load(res + m.to(tl.int64)[None, :] * N + row[:, None], mask=inside & ok[:, None],
                     other=0.0)
    for turn in range(RANGES):
        one, skip = tl.zeros((BN, BM), tl.float32), turn * per * 128
        wr, sr, xr, first = wp + skip, sp + 8 * skip // BLOCK, xp + skip, k + skip
        end = tl.minimum(first + per * 128, K)
        for at in tl.range(first, end, 128, num_stages=STAGES):
            if ASM:  # touch the sum, so that the tensor core is done with the last iteration's
                # codes: Triton 3.6 decodes the next into registers that it may still be reading
                one = tl.inline_asm_elementwise(TOUCH, "=f,0", [one], dtype=tl.float32,
                                                is_pure=False, pack=1)
            if TMA:
                xs = xd.load([mt * BM, at]).T
            else:
                xs = tl.load(xr, mask=live)
            w = in_16_bits(tl.load(wr), load_scales(sr, FMT, BLOCK), FMT, DECODE, ASM, BN, W)
            one = tl.dot(w, xs.to(T), one, input_precision="ieee")  # (BN, 128) @ (128, BM)
            wr += 128  # words of 8 rows' chunk
            sr += 8 * 128 // BLOCK
            xr += 128
        acc = acc + one if RANGES > 1 else one
    if not EARLY:
        # from here on, the next kernel fills SMs as programs end; signalled at the start, its
        # programs would pile up on some of the SMs
        signal(PDL)
    if SPLIT == 1 or not EXACT:  # exact sums come first: a product could be fused with an addition
        acc = unscaled(acc, FMT) * gs[:, None]
    done = split == 0
    if SPLIT > 1:  # each split stores its sum; the last to arrive adds them in order of split
        slot = (tile - WHOLE) * MT + mt
        spot = part + slot.to(tl.int64) * (SPLIT * BN * BM) + (
            r[:, None] * BM + tl.arange(0, BM)[None, :])
        if cut:
            tl.store(spot + split * (BN * BM), acc)
            tl.debug_barrier()
            done = tl.atomic_add(count + slot, 1, sem="acq_rel") == SPLIT - 1
    if done:  # no other program stores this tile or reads res there, so out may be res
        if R > 0:
            adapter_awaited(flags + mt, BM // BA * AT * ZR, tl.cdiv(N, BN), ASM)
        if SPLIT > 1:
            if cut:  # these loads and the adapter's are in flight together
                tl.store(count + slot, 0)
                acc = tl.load(spot, cache_modifier=".cg")
                for other in tl.static_range(1, SPLIT):
                    acc += tl.load(spot + other * (BN * BM), cache_modifier=".cg")
                if EXACT:
                    acc = unscaled(acc, FMT) * gs[:, None]
        if R > 0:
            n = tile * BN if ONE else row  # ONE: all rows of the tile belong to one part
            own = (n >= b0).to(tl.int32) + (n >= b1).to(tl.int32)
            acc *= 1 / scaling  # a second accumulator would not fit the registers
            for p in tl.static_range(1 if ONE else P):
                for r0 in tl.static_range(0, R, RP):
                    h = adapter_out(sums, mt, MT, own if ONE else p, r0, R, RP, P * R, Z, ZR, BM, T)
                    b = bt
                    if r0 > 0:
                        b = tl.load(B + row[:, None] * sb + (r0 + rr)[None, :],
                                    mask=ok[:, None] & (r0 + rr < R)[None, :], other=0.0)
                    part_b = b if ONE else tl.where((own == p)[:, None], b, 0.0)
                    # (BN, RP) @ (RP, BM)
                    acc = tl.dot(part_b.to(T), h, acc, input_precision="ieee")
            acc *= scaling
        if BIAS:
            acc += bs.to(tl.float32)[:, None]
        if GLU:
            both = tl.reshape(acc, (BN // 16, 2, 8, BM)).to(out.dtype.element_ty).to(tl.float32)
            gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))  # (BN / 16, 8, BM)
            y = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32) * up
            o = tile * (BN // 2) + tl.arange(0, BN // 2)
            tl.store(out + m.to(tl.int64)[None, :] * (N // 2) + o[:, None],
                     tl.reshape(y, (BN // 2, BM)).to(out.dtype.element_ty),
                     mask=inside & (o < N // 2)[:, None])
        else:
            o = m.to(tl.int64)[None, :] * N + row[:, None]
            keep = inside & ok[:, None]
            if RES and BM <= 16:
                acc += rs.to(tl.float32)
            elif RES:
                acc += tl.load(res + o, mask=keep, other=0.0).to(tl.float32)
            tl.store(out + o, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def to_16bit_kernel(codes, scale, g, tail, out, N, K, sc, ss, so, FMT: tl.constexpr,
                    BLOCK: tl.constexpr, DECODE: tl.constexpr, ASM: tl.constexpr,
                    BN: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, FOLD: tl.constexpr):
    """out (N, K + E), rows `so` apart: value * block scale and, if FOLD, times the global scale;
    then tail (N, E). A program does BN rows of one chunk, or of the tail."""
    sc, ss = tl.multiple_of(sc, 64), tl.multiple_of(ss, 128 // BLOCK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * 128
    row = tl.minimum(n, N - 1).to(tl.int64)
    at = n[:, None].to(tl.int64) * so
    if k < K:
        w = words(codes, row, k, sc)
        s = load_scales(scales_at(scale, row, k, ss, BLOCK), FMT, BLOCK)
        v = in_16_bits(tl.load(w), s, FMT, DECODE, ASM, BN, 0)
        v = unscaled(v.to(tl.float32), FMT)
        if FOLD:
            v *= tl.load(g + row)[:, None]
        j = k + tl.arange(0, 128)
        tl.store(out + at + j[None, :], v.to(out.dtype.element_ty), mask=(n < N)[:, None])
    elif E:
        e = tl.arange(0, EP)
        inside = (n < N)[:, None] & (e < E)[None, :]
        t = tl.load(tail + row[:, None] * E + e[None, :], mask=inside)
        tl.store(out + at + K + e[None, :], t, mask=inside)


def gemm_few(x, q, bias=None, A=None, B=None, bounds=(), scaling=1.0, residual=None, out=None,
             glu=False, early=False, exact=False, **override):
    """The decoding kernel itself, for any M; the arguments are linear_decode's, but for the result,
    which is `out`, if given. exact: each sum is taken in an order that M does not change. Further
    keywords, those of TILES, `split` and `ranges`, replace what `plan` chose."""
    (M, K), N, cuda = x.shape, q.shape[0], x.is_cuda
    out = x.new_empty(M, N // 2 if glu else N) if out is None else out
    if M == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    t = plan(M, N, K, sms(x.device), exact)
    if override:
        t = t | {"whole": 0, "maxnreg": None, "ranges": 1} | override
    hopper = not cuda or torch.cuda.get_device_capability(x.device)[0] >= 9
    pdl = cuda and hopper
    part, count, _ = space(x.device)
    P = len(bounds) + 1
    sb, work, adapter, makers = 0, (None, None), NONE, 0  # without an adapter
    if A is not None:
        sb = B.stride(0)
        work, adapter, makers = adapter_work(x, A, P, t["BM"], exact)
    # the copy unit gains nothing for smaller tiles, and is slow about rows that are not there
    tma = t["BM"] >= 32 and hopper and -M % t["BM"] <= 8
    xd = TensorDescriptor(x, [M, K], [x.stride(0), 1], [t["BM"], 128]) if tma else None
    MT, rows = -(-M // t["BM"]), -(-N // t["BN"])
    programs = makers + MT * (t["whole"] + (rows - t["whole"]) * t["split"])
    gemm[(programs,)](
        x, xd, q.codes, scale_bits(q.scale), q.global_scale, bias, A, B, residual, out, part, count,
        *work, M, N, K, x.stride(0), q.codes.stride(0), q.scale.stride(0), sb, float(scaling),
        *(*bounds, N, N)[:2], FMT=q.fmt,
        **decoder(FORMATS[q.fmt], cuda), BM=t["BM"], BN=t["BN"], SPLIT=t["split"], EXACT=exact,
        RANGES=t["ranges"], WHOLE=t["whole"], STAGES=t["stages"], W=t["warps"], P=P, **adapter,
        ONE=not glu and all(b % t["BN"] == 0 for b in bounds), GLU=glu, BIAS=bias is not None,
        RES=residual is not None, PDL=pdl, TMA=tma,
        EARLY=early and programs <= t["fit"] * sms(x.device), num_warps=t["warps"],
        maxnreg=t.get("maxnreg"), launch_pdl=pdl)
    return out


def common_scale(q):
    """The global scale, a float, if all rows of q share one in whose units an adapter is finite;
    else None. Read from the device once for each weight."""
    g = q.global_scale
    if getattr(g, "common", (None,))[0] != g._version:
        low, high = (v.item() for v in torch.aminmax(g))
        g.common = g._version, low if 2**-20 < low == high else None
    return g.common[1]


def decoded(q, tail=None):
    """(w (N, K + E) in bfloat16, alpha): alpha * w[:, :K] is w_hat, and w[:, K:] is tail (N, E).

    Exact, unless the format is a codebook or there is no common_scale: then w_hat is rounded
    once. w is in the scratch, so it lasts until the next weight is decoded."""
    (N, K), E = q.shape, 0 if tail is None else tail.shape[1]
    alpha = common_scale(q)
    w = scratch(q.codes.device, N, K + E)
    to_16bit_kernel[(-(-N // 64), K // CHUNK + (E > 0))](
        q.codes, scale_bits(q.scale), q.global_scale, tail, w, N, K,
        q.codes.stride(0), q.scale.stride(0), K + E, FMT=q.fmt,
        **decoder(FORMATS[q.fmt], q.codes.is_cuda), BN=64, E=E,
        EP=max(16, triton.next_power_of_2(E)), FOLD=alpha is None, num_warps=4)
    return w, alpha or 1.0


def beside(w, tail):
    """[w | tail] (N, K + E), in the scratch, of a bfloat16 weight w (N, K) and tail (N, E)."""
    if not w.is_cuda:
        return torch.cat([w, tail], 1)
    (N, K), E = w.shape, tail.shape[1]
    out = scratch(w.device, N, K + E)
    out[:, :K] = w
    out[:, K:] = tail
    return out


def scratch(device, rows, columns):
    """The first rows * columns numbers of the scratch, as a matrix in bfloat16."""
    buffers, n = space(device), rows * columns
    if buffers[2].numel() < n:
        buffers[2] = buffers[2].new_empty(0)  # let go of the smaller one first
        buffers[2] = buffers[2].new_empty(n)
    return buffers[2][:n].view(rows, columns)


def scaled(x, w, alpha, start=None):
    """alpha * x w for x (M, K), w (K, N). start, (N,) or of the result's shape, is added before
    rounding: cuBLAS multiplies its float32 sums by alpha, so the global scale costs no rounding."""
    if start is not None:
        return torch.addmm(start, x, w, alpha=alpha)
    y = x.new_empty(x.shape[0], w.shape[1])
    return torch.addmm(y, x, w, beta=0, alpha=alpha, out=y)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q):
        """x (M, K) @ w_hat^T -> (M, N) in x.dtype."""
        ctx.q = q
        return linear_decode(x.to(torch.bfloat16), q).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        dx = scaled(dy.to(torch.bfloat16).contiguous(), *decoded(ctx.q))  # (M, N) @ (N, K)
        return dx.to(dy.dtype), None


def matmul(x, q):
    """x (..., K) times a quantized weight q (N, K), layout.Tiled: (..., N) in x.dtype,
    differentiable in x.

    bfloat16 in, float32 sums; other float dtypes are cast to bfloat16."""
    # the kernels would read other weights, or behind a row
    assert isinstance(q, Tiled) and x.shape[-1] == q.shape[1]
    return Matmul.apply(x.reshape(-1, x.shape[-1]), q).view(*x.shape[:-1], q.shape[0])


def linear_decode(x, q, bias=None, A=None, B=None, bounds=(), scaling=1.0, residual=None, glu=False,
                  early=False, exact=False):
    """A whole linear layer of a decode step, one kernel if rows are few or there is an adapter: y =
    x w_hat^T + bias + scaling * (x A_part^T) B^T + residual, or silu(gate) * up of that. No
    gradient.

    x (M, K) bfloat16; q a Tiled (N, K); bias (N,); A (P*R, K); B (N, R). bounds: the rows at which
    parts 1 and 2 begin: () for one part, (3584, 4096) for q, k, v; a row of part p takes rows p*R..
    of A. residual (M, N) is contiguous, and becomes the result; a linear has it or a bias. glu: q
    is gate stacked on up, and the result is (M, N / 2). early: the next kernel has much to fetch
    before it needs the result, and may begin as soon as all programs of this one run. exact: as in
    gemm_few. The first call compiles kernels and makes buffers, which no CUDA graph can."""
    if A is not None or exact or len(x) <= FEW:
        return gemm_few(x, q, bias, A, B, bounds, scaling, residual, residual, glu, early, exact)
    w, alpha = decoded(q)
    y = scaled(x, w.T, alpha, bias if residual is None else residual)
    if glu:
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else residual.copy_(y)


class TiledLinear(QuantLinear):
    """nvfp4.QuantLinear with its codes laid out for the tensor core (fast/layout.py); fast.tile and
    fast.uninstall turn one into the other."""

    @property
    def q(self):
        return Tiled(self.fmt, self.shape, self.codes, self.scale, self.global_scale)

    def forward(self, x):
        y = matmul(x, self.q) if x.is_cuda else x @ self.weight_in(x.dtype).T
        return y if self.bias is None else y + self.bias
