"""
LoRA in a decode step. The FP4 GEMM (fast/gemm.py) computes x A^T in the kernel that adds
x A^T B^T. Beside 16-bit weights one GEMM of cuBLAS gives both x W^T and x A^T (linears.py), and
`lora_kernel` adds the rest. Either way all that makes an output is added in float32 and rounded
once, as in training (packed.py).

In the FP4 GEMM a separate kernel for x A^T would cost a decode step 4 to 7 us per linear. So the
first programs of the grid compute it, in slices of K, while the others stream their weights; those
need it only in their epilogue, and wait there for a flag. Sums are taken in order, whichever
program finishes last: each run gives the same bits.

Shapes: M rows of x (in lora_kernel B), N outputs, K inputs, R LoRA rank, P parts of a fused
projection, PR = P * R rows of A.
"""
import torch
import triton
import triton.language as tl

from fast.layout import CHUNK
from fast.plan import COUNTERS, FLAGS, space

LOAD_ACQUIRE = tl.constexpr("ld.acquire.gpu.global.s32 $0, [$1];")
# by one thread; as a reduction (red) it returns nothing to wait for
COUNT_ROUND = tl.constexpr("{ .reg .pred one; .reg .u32 t; mov.u32 t, %tid.x; "
                           "setp.eq.u32 one, t, 0; mov.u32 $0, 0; "
                           "@one red.relaxed.gpu.global.inc.u32 [$1], $2; }")


@triton.jit
def wait(PDL: tl.constexpr):
    """From here on, what earlier kernels of the step wrote may be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def signal(PDL: tl.constexpr):
    """Once all programs have signalled or ended, the next kernel's begin wherever an SM has room,
    and run up to their own wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def added(p, keep, Z: tl.constexpr, SOME: tl.constexpr):
    """For each pointer in p (.., ..) the sum of the Z floats there, in order, with SOME in flight;
    0 where `keep` is false."""
    total, z = tl.zeros(p.shape, tl.float32), tl.arange(0, SOME)[None, None, :]
    for n in tl.static_range(0, Z, SOME):
        total += tl.sum(tl.load(p[:, :, None] + (n + z), mask=keep[:, :, None], other=0.0,
                                cache_modifier=".cg"), 2)
    return total


@triton.jit
def adapter_in(x, a, sums, flags, M, K, sx, pid, MT, AT, PR: tl.constexpr, Z: tl.constexpr,
               ZR: tl.constexpr, BM: tl.constexpr, BA: tl.constexpr, RA: tl.constexpr,
               T: tl.constexpr, PDL: tl.constexpr):
    """x a^T for x (M, K) and an adapter's a (PR, K), in Z slices of K, by the first MT * BM / BA *
    AT * Z programs of a kernel whose other programs read BM rows of it (adapter_out). Program `pid`
    does RA rows of a, BA rows of x and one slice. sums holds the slices as (MT, BM, PR, Z); if ZR
    is 1, the program with the last slice adds them up, in order, into (MT, BM, PR) behind them.
    flags: for each of MT blocks of rows, how many of BM / BA * AT * ZR programs have stored what is
    read; then, zero between kernels, counters (MT * BM / BA, AT) of slices."""
    pieces = MT * (BM // BA)
    piece, at, z = pid % pieces, pid // pieces % AT, pid // pieces // AT
    i, j = piece * BA + tl.arange(0, BA), tl.arange(0, 128)
    r = at * RA + tl.arange(0, RA)
    ap = a + r.to(tl.int64)[:, None] * K + j[None, :]
    xp = x + i.to(tl.int64)[None, :] * sx + j[:, None]
    here, rows = (r < PR)[:, None], (i < M)[None, :]
    per = tl.cdiv(tl.cdiv(K, 128), Z) * 128
    end = tl.minimum(K, z * per + per)
    acc = tl.zeros((RA, BA), tl.float32)
    left = tl.load(ap + z * per, mask=here & (z * per + j < end)[None, :], other=0.0)
    wait(PDL)
    signal(PDL)  # the others decide when the next kernel begins
    for k in tl.range(z * per, end, 128):
        right = tl.load(xp + k, mask=rows & (k + j < end)[:, None], other=0.0)
        # (RA, 128) @ (128, BA)
        acc = tl.dot(left.to(T), right.to(T), acc, input_precision="ieee")
        left = tl.load(ap + k + 128, mask=here & (k + 128 + j < end)[None, :], other=0.0)
    spot = i[None, :] * PR + r[:, None]
    tl.store(sums + spot * Z + z, acc, mask=here)
    tl.debug_barrier()
    done = True
    if ZR < Z:
        count = flags + MT + piece * AT + at
        done = tl.atomic_add(count, 1, sem="acq_rel") == Z - 1
        if done:
            tl.store(count, 0)
            total = added(sums + spot * Z, here, Z, min(Z, 4))
            tl.store(sums + MT * BM * PR * Z + spot, total, mask=here)
            tl.debug_barrier()
    if done:
        tl.atomic_add(flags + piece // (BM // BA), 1, sem="release")


@triton.jit
def adapter_out(sums, mt, MT, part, R0: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
                PR: tl.constexpr, Z: tl.constexpr, ZR: tl.constexpr, BM: tl.constexpr,
                T: tl.constexpr):
    """x A^T as (RP, BM), rounded: block `mt` of x's rows, and a part's rows of A from R0 on."""
    i, r = tl.arange(0, BM)[None, :], R0 + tl.arange(0, RP)[:, None]
    if ZR < Z:
        sums += MT * BM * PR * Z
    return added(sums + ((mt * BM + i) * PR + part * R + r) * ZR, r < R, ZR, ZR).to(T)


@triton.jit
def adapter_awaited(flag, makers, readers, ASM: tl.constexpr):
    """Wait until the makers of a program's rows of x A^T, earlier programs of the grid, which
    therefore run or have run, have counted the flag up; what they stored before is visible then.
    The flag's last reader resets it to zero for the next kernel."""
    if ASM:
        seen = makers * 0
        while seen < makers:  # relaxed loads followed by one fence take 0.5 us longer
            seen = tl.inline_asm_elementwise(LOAD_ACQUIRE, "=r,l", [flag.to(tl.int64)],
                                             dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    if ASM:
        tl.inline_asm_elementwise(COUNT_ROUND, "=r,l,r", [flag.to(tl.int64), makers + readers - 1],
                                  dtype=tl.int32, is_pure=False, pack=1)
    elif tl.atomic_add(flag, 1) == makers + readers - 1:
        tl.store(flag, 0)


@triton.jit
def adapter_term(b, n, N, h, live, part, first, R: tl.constexpr, RP: tl.constexpr,
                 T: tl.constexpr):
    """h_part B^T as (BN, RB), for rows n of B and rows of x whose h = x A^T begins at h (RB,), and
    is rounded here; first: the first RP columns of those rows of B, already loaded."""
    k = tl.arange(0, RP)
    term = tl.zeros((first.shape[0], h.shape[0]), tl.float32)
    for r in tl.static_range(0, R, RP):
        there = (r + k < R)[:, None]
        xa = tl.load(h[None, :] + part * R + (r + k)[:, None], mask=there & live[None, :], other=0)
        piece = first
        if r > 0:
            piece = tl.load(b + n[:, None] * R + (r + k)[None, :],
                            mask=(n[:, None] < N) & (r + k < R)[None, :], other=0)
        term = tl.dot(piece.to(T), xa.to(T), term, input_precision="ieee")
    return term


@triton.jit(do_not_specialize=["B"])
def lora_kernel(y, bias, residual, out, b, B, N, stride, split1, split2, scaling, R: tl.constexpr,
                RP: tl.constexpr, RB: tl.constexpr, BN: tl.constexpr, GLU: tl.constexpr,
                BIAS: tl.constexpr, ADD: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):
    """out (B, N) = y + scaling * h b^T, for y (B, N) and h = x A^T (B, P * R), side by side in
    float32 in rows `stride` apart, and b (N, R); rows of b from split1 (split2) on belong to part 1
    (2). BIAS: + bias (N,); ADD: + residual (B, N), which may be out. GLU: y is gate beside up, and
    out (B, N / 2) is silu(gate) * up of that sum; sum and silu are rounded, as in the modules."""
    dtype: tl.constexpr = out.dtype.element_ty
    T: tl.constexpr = tl.float32 if IEEE else dtype
    MT, pid, k = tl.cdiv(B, RB), tl.program_id(0), tl.arange(0, RP)
    rows, n = pid % MT * RB + tl.arange(0, RB), pid // MT * BN + tl.arange(0, BN)
    width = N // 2 if GLU else N
    live, here = rows < B, (n[:, None] < width) & (k[None, :] < R)
    ok = live[None, :] & (n[:, None] < width)
    bt = tl.load(b + n[:, None] * R + k[None, :], mask=here, other=0)
    if GLU:
        bt_up = tl.load(b + (width + n)[:, None] * R + k[None, :], mask=here, other=0)
    if BIAS:
        bs = tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    wait(PDL)
    signal(PDL)
    row = y + rows.to(tl.int64) * stride
    h, at = row + N, rows[None, :].to(tl.int64) * width + n[:, None]
    acc = tl.load(row[None, :] + n[:, None], mask=ok, other=0)  # (BN, RB)
    if GLU:
        up = tl.load(row[None, :] + width + n[:, None], mask=ok, other=0)
        acc += adapter_term(b, n, width, h, live, 0, bt, R, RP, T) * scaling
        up += adapter_term(b + width * R, n, width, h, live, 1, bt_up, R, RP, T) * scaling
        gate = acc.to(dtype).to(tl.float32)
        silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
        acc = silu * up.to(dtype).to(tl.float32)
    else:
        part = (n >= split1).to(tl.int32) + (n >= split2).to(tl.int32)
        # a block that straddles two parts takes both
        for i in range(tl.min(part, 0), tl.max(tl.where(n < N, part, 0), 0) + 1):
            term = adapter_term(b, n, N, h, live, i, bt, R, RP, T)
            acc += tl.where((part == i)[:, None], term * scaling, 0)
        if BIAS:
            acc += bs[:, None]
        if ADD:
            acc += tl.load(residual + at, mask=ok, other=0).to(tl.float32)
    tl.store(out + at, acc.to(dtype), mask=ok)


def product32(a, b):
    """a b in float32, for bfloat16 a and b without rounding."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


NONE = {"R": 0, "RP": 16, "RA": 16, "AT": 1, "Z": 1, "ZR": 1, "BA": 8}  # for kernels without one


def adapter_work(x, A, parts, BM, exact=False):
    """For a kernel that begins with adapter_in, x (M, K), A (parts * R, K) and BM rows a program:
    its arguments (sums, flags), its constants, and how many programs it adds. exact: how K is cut,
    and how the slices are added up, depends on K alone."""
    (M, K), PR = x.shape, A.shape[0]
    R, RA, MT = PR // parts, 16 if PR <= 16 else 32, -(-M // BM)
    wide, AT = max(16, triton.next_power_of_2(R)), -(-PR // RA)
    # up to 16 slices, of two chunks or more, to be done before the weight has streamed through; few
    # for large tiles, so that their programs do not crowd out the weight's
    most = 16 if exact else max(1, min(16, 2048 // (MT * AT * BM)))
    Z = min(1 << most.bit_length() - 1, triton.next_power_of_2(-(-K // (2 * CHUNK))))
    # if there is little, each reader adds it up: this saves a step, which counts in short kernels
    ZR = Z if wide * BM * Z <= 4096 and not exact else 1
    # x's rows a program; with many rows a whole block, so as not to crowd out the weight's programs
    BA = min(BM, 16) if M <= 64 else BM
    if MT * (1 + BM // BA * AT) > FLAGS:
        raise ValueError(f"LoRA: an adapter of rank {R} on {M} rows of x needs more than {FLAGS} "
                         "flags; lower --micro-batch-tokens or --lora-rank")
    sums, flags = x.new_empty(MT * BM * PR * (Z + 1), dtype=torch.float32), space(x.device)[1]
    # a wide adapter is taken in pieces: all of it would not fit the registers, and for two of the
    # tiles 64 columns would not fit the shared memory of as many programs as an SM should hold
    RP = min(32 if BM in (16, 128) else 64, wide)
    constants = {"R": R, "RP": RP, "RA": RA, "AT": AT, "Z": Z, "ZR": ZR, "BA": BA}
    return (sums, flags[COUNTERS:]), constants, MT * (BM // BA) * AT * Z
