"""
The FP4 GEMM: y = x w_hat^T for activations x (M, K) in bfloat16 and a packed four-bit weight (N, K), in Triton.

A rollout decodes a handful of rows at a time, so a linear layer costs what reading its weight costs: the kernel below
streams codes at up to 82% of the read bandwidth and turns them into bfloat16 in registers. With many rows (prefill,
log-probs, update) decoding is what costs, and the weight is dequantized once into a scratch that all layers share,
for cuBLAS. `matmul` picks; its gradient in x goes through the same scratch. No 16-bit copy of a weight is kept, and
no gradient of a weight exists.

The layout. A chunk of 128 columns of one row is 64 bytes: 4 lanes (t) of 4 words (w), and a word holds 8 codes. The
words w = 0..3 of a lane feed the tensor core's steps w (low plane, columns 0..63 of the chunk) and 4 + w (high plane,
columns 64..127). In a step, 16 columns, an MMA wants columns 2t, 2t+1 (h = 0) and 2t+8, 2t+9 (h = 1) in lane t, so
that is what the word holds:

    row     | lane 0: w0 w1 w2 w3 | lane 1: w0 w1 w2 w3 | lane 2 ... | lane 3 ... |     64 bytes = 128 columns
    word w  | a: low plane, h=0 | b: low, h=1 | c: high, h=0 | d: high, h=1 |           pairs p = 0, 1 of neighbours
    bit     31 30 29 28 27 26 25 24 23 22 21 20 19 18 17 16 | 15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    pair    a1 c1 c1 c1 b1 d1 d1 a1 a1 a1 c0 b1 b1 b1 d0 d1 | a0 c0 c0 c0 b0 d0 d0 a0 a0 a0 c1 b0 b0 b0 d1 d0
    field    s  e  e  m  s  e  e  e  e  m  s  e  e  m  s  m |  s  e  e  m  s  e  e  e  e  m  s  e  e  m  s  m

A warp's 16-byte loads are then its MMA fragments, activations stay in their natural order, and nothing is shuffled.
Groups of 8 rows lie chunk by chunk, 512 bytes a time, since DRAM dislikes strides: the same kernel on plain rows ran
5-10% slower.

The bit trick. bfloat16 is s eeeeeeee mmmmmmm. Put E2M1's s in bit 15 and its e, e, m in bits 8, 7, 6, zeros
elsewhere, and the number reads as the value times 2^-126, subnormals included. Code 5 (0 101) becomes 0x0140:
exponent field 2, mantissa 1.5, so 1.5 * 2^-125, which is 3 * 2^-126, and code 5 is 3. Code 1 (0 001) becomes 0x0040,
the subnormal 2^-127 = 0.5 * 2^-126. One AND with 0x81C081C0 makes a pair out of field a; b is a shift and an AND, c a
rotation and an AND, d one more of each: 9 instructions for 8 codes. (No arrangement of four codes in 16 bits needs
one AND each: the four positions would have to tile Z/16 by shifts, and they do not.)

Where the scales go. e4m3 bits << 4 read as bfloat16 are the scale times 2^-120, its subnormals included; times 2^127
that is 2^7 of it. One packed multiply by value * 2^-126 gives value * scale * 2^-119, with 2 + 4 significant bits, so
bfloat16 holds it exactly. The tensor core sums in float32; the 2^119, the float32 global scale of the row, the bias
and the LoRA term enter there, in the epilogue. What is rounded is the sum and the output, and nothing else: relative
error 1.65e-3 against a float64 product. MXFP4's exponent is already a bfloat16 exponent. NF4's value comes from byte
permutes (PRMT is an 8-entry table) and its products do round: 2.8e-3.

Few rows: weights are the M side of the MMA, so one row of x pads to 8. Where tiles are few, K is cut (SPLIT); each
split leaves a float32 partial sum and whichever program comes last adds them in order: no atomics on values, the same
bits on each run. Programmatic dependent launch lets a kernel start while the one before finishes.

Tried on one H100 (7B gate_up, 37888 x 3584, microseconds at M = 8 unless said) and lost:
- stream-K, equal ranges of (tile, K block) for each program: 40.4 against 37.1; registers 92 instead of 56, pipelines
  restart
- rows stored plainly instead of in groups of 8: 37.1 against 35.6; reading alone reaches 2.57 TB/s so, 3.05 in order
- a unit of 32 columns to a lane (scales decoded by one lane, not four; 2.84 instructions a code instead of 2.9):
  36.2, but   activations then come in 4-byte pieces, M = 64: 267 against 49
- one dot over 128 columns instead of two over 64: Triton waits for each wgmma
- 3 or 4 stages instead of 2 (38.4, 40.8), 128 rows a program (39.5), two accumulators (36.2: no change)
- dependent launch signalled at the start of the kernel (40.0), L2 prefetch of codes before the wait (35.8) against
  34.4
- 16 warps or 256 rows of weights a program at M = 64: 90.5 against 56.7
- dequantizing a slice of the weight at a time to keep it in L2, then cuBLAS on the slice: 1.40 of cuBLAS at M = 1024,
  as without

    y = matmul(x, quantize(w))                                         # any M, differentiable in x
    python bench.py kernels

Shapes: M rows of x, N outputs, K inputs, R LoRA rank, P parts of a fused projection.
"""
import struct

import torch
import triton
import triton.language as tl

BLOCK = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
CHUNK = 128  # columns of K that a row's 64 packed bytes hold
MASK = tl.constexpr(0x81C081C0 - (1 << 32))  # sign and e, e, m of two codes, as bfloat16 wants them


def pack(codes):
    """Codes (N, K), one uint8 each in 0..15, to the kernel's order: (N, ceil(K/128)*64) uint8; columns past K are code 0.
    Groups of 8 rows are interleaved: pack a matrix whole, or in slices of rows that start at multiples of 8."""
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(f"pack: codes must be a (N, K) uint8 tensor, got {tuple(codes.shape)} {codes.dtype}")
    N, K = codes.shape
    c = torch.nn.functional.pad(codes, (0, -K % CHUNK)).int()
    c = ((c & 8) << 12) | ((c & 7) << 6)  # sign in bit 15, the others in 8..6
    c = c.view(N, -1, 2, 4, 2, 4, 2).permute(0, 1, 5, 3, 2, 4, 6)  # (N, chunk, plane, w, h, t, p) -> (.., t, w, plane, h, p)
    a, b, c, d = (c[..., 0] | c[..., 1] << 16).flatten(4).unbind(-1)  # 4 x (N, chunk, t, w), two codes each
    word = a | shift(b, 4) | rotate(c, 26) | rotate(d & ~0x00400040, 30) | shift(d & 0x00400040, 6)
    return groups(word.reshape(N, -1, 16), to=True).view(torch.uint8)


def groups(w, to):
    """(N, chunk, 16 words) to groups of 8 rows that lie chunk by chunk, or back."""
    N, chunks, _ = w.shape
    out = torch.empty_like(w, memory_format=torch.contiguous_format)
    for n0, n1, rows in ((0, N // 8 * 8, 8), (N // 8 * 8, N, N % 8)):
        if n1 > n0:
            near, far = (rows, chunks), (chunks, rows)
            src, dst = (near, far) if to else (far, near)
            out[n0:n1].view(-1, *dst, 16).copy_(w[n0:n1].reshape(-1, *src, 16).transpose(1, 2))
    return out.view(N, -1)


def unpack(packed, K):
    """The inverse of pack: (N, K) uint8 codes."""
    N = packed.shape[0]
    w = groups(packed.contiguous().view(torch.int32).view(N, -1, 16), to=False).view(N, -1, 4, 4)  # (N, chunk, t, w)
    d = (rotate(w, 2) & (0x81808180 - (1 << 32))) | ((w << 6) & 0x00400040)
    v = torch.stack([w, w << 4, rotate(w, 6), d], -1).view(N, -1, 4, 4, 2, 2)  # (N, chunk, t, w, plane, h)
    v = torch.stack([v & 0xFFFF, shift(v, 16)], -1).permute(0, 1, 4, 3, 5, 2, 6)  # -> (N, chunk, plane, w, h, t, p)
    return (((v >> 12) & 8) | ((v >> 6) & 7)).to(torch.uint8).reshape(N, -1)[:, :K].contiguous()


def shift(w, s):
    """Logical right shift of int32."""
    return (w >> s) & ((1 << (32 - s)) - 1)


def rotate(w, s):
    """Rotate int32 right by s bits."""
    return shift(w, s) | (w << (32 - s))


def bf16_bits(x):
    bits = struct.unpack("I", struct.pack("f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


EXTRACT = """{
.reg .b32 a, b, c, d, e;
and.b32 a, $4, 0x81c081c0;
shl.b32 b, $4, 4;
and.b32 b, b, 0x81c081c0;
shf.r.wrap.b32 c, $4, $4, 6;
and.b32 c, c, 0x81c081c0;
shf.r.wrap.b32 d, $4, $4, 2;
and.b32 d, d, 0x81808180;
shl.b32 e, $4, 6;
lop3.b32 d, e, 0x00400040, d, 0xea;
"""
SCALE = """mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $6;
mul.rn.bf16x2 $3, d, $6;
}"""
# the codebook's low bytes, then its high bytes, four to a word
HEX = [f"0x{sum((bf16_bits(v) >> s & 255) << 8 * i for i, v in enumerate(NF4[j : j + 4])):08x}"
       for s in (0, 8) for j in (0, 4, 8, 12)]


def lookup(x, y):
    """PTX that turns the index pairs in x and y into bfloat16 codebook values: byte permutes as an 8-entry table."""
    return f"""{{
.reg .b32 i, j, m, l, h, t;
shr.b32 i, {x}, 6;
and.b32 i, i, 0x00070007;
shr.b32 j, {y}, 2;
and.b32 j, j, 0x00700070;
or.b32 i, i, j;
shr.b32 j, i, 8;
or.b32 i, i, j;
prmt.b32 m, {x}, {y}, 0xfbd9;
prmt.b32 l, {HEX[0]}, {HEX[1]}, i;
prmt.b32 t, {HEX[2]}, {HEX[3]}, i;
lop3.b32 l, m, t, l, 0xca;
prmt.b32 h, {HEX[4]}, {HEX[5]}, i;
prmt.b32 t, {HEX[6]}, {HEX[7]}, i;
lop3.b32 h, m, t, h, 0xca;
prmt.b32 {x}, l, h, 0x6240;
prmt.b32 {y}, l, h, 0x7351;
}}
"""


E2M1_ASM = tl.constexpr(EXTRACT + SCALE)
NF4_ASM = tl.constexpr(EXTRACT + lookup("a", "b") + lookup("c", "d") + SCALE)
E4M3_ASM = tl.constexpr("""{
.reg .b32 a, b, p;
.reg .b16 u, v, x, y;
mov.b32 p, 0x7f007f00;
shl.b32 a, $4, 4;
and.b32 a, a, 0x07f007f0;
shr.b32 b, $4, 4;
and.b32 b, b, 0x07f007f0;
mul.rn.bf16x2 a, a, p;
mul.rn.bf16x2 b, b, p;
mov.b32 {u, v}, a;
mov.b32 {x, y}, b;
mov.b32 $0, {u, u};
mov.b32 $1, {x, x};
mov.b32 $2, {v, v};
mov.b32 $3, {y, y};
}""")
TABLE = tl.constexpr(NF4)
UNSCALE = tl.constexpr(2.0**119)  # codes are read at 2^-126 and scales at 2^7 of their value


@triton.jit
def words(codes, r, k, N, sc, FAST: tl.constexpr):
    """Pointers (BN, 16) to the int32 words of rows r in the chunk at column k: groups of 8 rows lie chunk by chunk."""
    n = 8 if FAST else tl.minimum(8, N - r // 8 * 8)
    p = codes.to(tl.pointer_type(tl.int32)) + ((r // 8).to(tl.int64) * (sc * 2) + (r % 8) * 16 + k // 8 * n)
    return p[:, None] + tl.arange(0, 16)[None, :]


@triton.jit
def load_scales(p, k, K, keep, FMT: tl.constexpr, FAST: tl.constexpr, BN: tl.constexpr):
    """The block scales of one chunk as stored, nvfp4's four to an int32; p (BN,) points at rows, k is the first column."""
    SB: tl.constexpr = 16 if FMT == "nvfp4" else (32 if FMT == "mxfp4" else 64)
    two = tl.arange(0, 2)
    if FMT == "nf4":
        at = k // SB + two
        s = tl.load(p[:, None] + at[None, :], mask=keep & (at < K // SB)[None, :], other=0)
    elif FAST and FMT == "nvfp4":
        s = tl.load(p.to(tl.pointer_type(tl.int32))[:, None] + (k // 64 + two)[None, :])
    elif FAST:
        s = tl.load(p.to(tl.pointer_type(tl.int32))[:, None] + (k // 128 + two * 0)[None, :])
    else:
        s = tl.zeros((BN, 2), tl.int32)
        for i in tl.static_range(4):
            at = k // SB + (two * 4 if FMT == "nvfp4" else two * 0) + i
            s |= tl.load(p[:, None] + at[None, :], mask=keep & (at < K // SB)[None, :], other=0).to(tl.int32) << 8 * i
    return s


@triton.jit
def quarters(a, b, c, d, BN: tl.constexpr):
    """Four (BN, 2 planes) tensors, one for each word w, to two (BN, 16 words) tensors, one for each plane."""
    v = tl.join(tl.join(a, c), tl.join(b, d))  # (BN, plane, w // 2, w % 2)
    lo, hi = tl.split(tl.permute(tl.reshape(v, (BN, 2, 4)), (0, 2, 1)))
    lo = tl.reshape(tl.broadcast_to(lo[:, None, :], (BN, 4, 4)), (BN, 16))
    hi = tl.reshape(tl.broadcast_to(hi[:, None, :], (BN, 4, 4)), (BN, 16))
    return lo, hi


@triton.jit
def decode(w, s, FMT: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr):
    """Words (BN, 16) and scales of one chunk -> four (BN, 16, 2) tensors, value * scale: a, b low plane, c, d high plane."""
    if FMT == "nvfp4":
        if ASM:
            s0, s1, s2, s3 = tl.inline_asm_elementwise(
                E4M3_ASM, "=r,=r,=r,=r,r", [s], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
        else:  # e4m3 bits << 20 are a float32 of 2^-120 times the value, subnormals included; 2^127 makes it 2^7
            s0 = ((s << 20) & 0x7F00000).to(tl.float32, bitcast=True) * 1.7014118346046923e38
            s1 = ((s << 12) & 0x7F00000).to(tl.float32, bitcast=True) * 1.7014118346046923e38
            s2 = ((s << 4) & 0x7F00000).to(tl.float32, bitcast=True) * 1.7014118346046923e38
            s3 = ((s >> 4) & 0x7F00000).to(tl.float32, bitcast=True) * 1.7014118346046923e38
        lo, hi = quarters(s0, s1, s2, s3, BN)
    elif FMT == "mxfp4":  # word w of a plane: block 2 * plane + w // 2
        even, odd = exponent(s >> (tl.arange(0, 2) * 16)[None, :], ASM), exponent(s >> (tl.arange(0, 2) * 16 + 8)[None, :], ASM)
        lo, hi = quarters(even, even, odd, odd, BN)
    else:
        if ASM:
            s = s.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
            s = (s << 16) | (s & 0xFFFF)
        lo, hi = quarters(s, s, s, s, BN)
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(NF4_ASM if FMT == "nf4" else E2M1_ASM, "=r,=r,=r,=r,r,r,r", [w, lo, hi],
                                               dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
        a, b, c, d = halves(a), halves(b), halves(c), halves(d)
    else:
        a = value(w & MASK, lo, FMT)
        b = value((w << 4) & MASK, lo, FMT)
        c = value(((w >> 6) & 0x3FFFFFF | w << 26) & MASK, hi, FMT)
        d = value(((w >> 2) & 0x3FFFFFFF | w << 30) & MASK & ~0x00400040 | (w << 6) & 0x00400040, hi, FMT)
    return a, b, c, d


@triton.jit
def exponent(s, ASM: tl.constexpr):
    """E8M0 bytes to 2^7 times the scale: bfloat16 twice in a word, or float32."""
    s = tl.minimum((s & 255) + 7, 254) << 7
    if ASM:
        s = s << 16 | s
    else:
        s = (s << 16).to(tl.float32, bitcast=True)
    return s


@triton.jit
def halves(a):
    return tl.join(a.to(tl.int16), (a >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def value(v, s, FMT: tl.constexpr):
    t = tl.join(v << 16, v & -65536)
    if FMT == "nf4":
        i = ((t >> 28) & 8) | ((t >> 22) & 7)
        x = (t * 0).to(tl.float32)
        for j in tl.static_range(16):
            x = tl.where(i == j, TABLE[j], x)
    else:
        x = t.to(tl.float32, bitcast=True)
    return x * s[:, :, None]


@triton.jit
def arrange(a, b, BN: tl.constexpr, W: tl.constexpr, KW: tl.constexpr):
    """Two (BN, 16, 2) tensors, one plane, to (BN, 64): rows and k in the order in which an MMA's registers already hold them."""
    v = tl.join(a, b)  # (BN, 16, p, h)
    if W == 0:  # dequantization: rows stay
        v = tl.permute(tl.reshape(v, (BN, 4, 4, 2, 2)), (0, 2, 4, 1, 3))
    elif KW == 2:
        v = tl.permute(tl.reshape(v, (BN // (16 * W), 2, W, 8, 4, 4, 2, 2)), (0, 2, 1, 3, 5, 7, 4, 6))
    else:
        v = tl.permute(tl.reshape(v, (BN // (16 * W), 2, W, 8, 4, 2, 2, 2, 2)), (0, 2, 1, 3, 5, 8, 4, 6, 7))
    return tl.reshape(v, (BN, 64))


@triton.jit
def dot(a, b, acc, ASM: tl.constexpr):
    if ASM:
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:  # the interpreter has no bfloat16 arithmetic
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def natural(x, BM: tl.constexpr, KW: tl.constexpr):
    """Activations (64 k, BM) to the order of k that `arrange` gives the weights; only registers are renamed."""
    if KW == 4:
        x = tl.reshape(tl.permute(tl.reshape(x, (2, 2, 2, 4, 2, BM)), (0, 2, 3, 1, 4, 5)), (64, BM))
    return x


@triton.jit(do_not_specialize=["M", "b0", "b1"])
def gemm(x, codes, scale, g, bias, xa, lb, res, out, part, count, M, N, K, sx, sc, ss, sxa, slb, sz, scaling, b0, b1,
         FMT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
         KW: tl.constexpr, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, Z: tl.constexpr, BIAS: tl.constexpr,
         RES: tl.constexpr, SILU: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr):
    HALF: tl.constexpr = BN // 2
    if FAST:
        sc = tl.multiple_of(sc, 64)
        ss = tl.multiple_of(ss, 8 if FMT == "nvfp4" else (4 if FMT == "mxfp4" else 2))
    MT = tl.cdiv(M, BM)
    tile = tl.program_id(0) // (MT * SPLIT)
    split = tl.program_id(0) // MT % SPLIT
    m = tl.program_id(0) % MT * BM + tl.arange(0, BM)
    inside = (m < M)[None, :]
    r = tl.arange(0, BN)
    # a load's row in the tile -> the row that the MMA takes from the same registers: (block, half, warp, lane / 4) ->
    # (block, warp, half, lane / 4)
    rl = r // (16 * W) * (16 * W) + (r // 8) % W * 16 + (r // (8 * W)) % 2 * 8 + r % 8
    if SILU:  # a tile is HALF rows of gate and the same rows of up
        row = tile * HALF + r % HALF + r // HALF * (N // 2)
        ok = tile * HALF + r % HALF < N // 2
        rl = tl.minimum(tile * HALF + rl % HALF, N // 2 - 1) + rl // HALF * (N // 2)
    else:
        row = tile * BN + r
        ok = row < N
        rl = tl.minimum(tile * BN + rl, N - 1)
    KB = tl.cdiv(K, 128 * C)
    per = tl.cdiv(KB, SPLIT)
    k = split * per * (C * 128)
    j = tl.arange(0, 64)
    wp = words(codes, rl, k, N, sc, FAST)
    step = 128 if FAST else (16 * tl.minimum(8, N - rl // 8 * 8))[:, None]  # int32 from a row's chunk to its next
    sp = scale + rl.to(tl.int64) * ss
    xp = x + m.to(tl.int64)[None, :] * sx + (k + j)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if PDL:  # the kernel before may still be running: wait before reading what it wrote or writing anything
        tl.extra.cuda.gdc_wait()
    for i in tl.range(0, tl.minimum(per, KB - split * per), num_stages=STAGES):
        for c in tl.static_range(C):
            at = k + (i * C + c) * 128
            if FAST:
                w = tl.load(wp + c * step)
                xl = tl.load(xp + c * 128, mask=inside, other=0.0)
                xh = tl.load(xp + c * 128 + 64, mask=inside, other=0.0)
            else:
                w = tl.load(wp + c * step, mask=(rl * 0 + at < K)[:, None], other=0)
                xl = tl.load(xp + c * 128, mask=inside & (at + j < K)[:, None], other=0.0)
                xh = tl.load(xp + c * 128 + 64, mask=inside & (at + 64 + j < K)[:, None], other=0.0)
            s = load_scales(sp, at, K, (rl >= 0)[:, None], FMT, FAST, BN)
            a, b, cc, d = decode(w, s, FMT, ASM, BN)
            acc = dot(arrange(a, b, BN, W, KW), natural(xl, BM, KW), acc, ASM)
            acc = dot(arrange(cc, d, BN, W, KW), natural(xh, BM, KW), acc, ASM)
        wp += C * step
        xp += C * 128
    if PDL:  # from here the next kernel fills SMs as programs leave; signalled at the start, its programs pile up on some
        tl.extra.cuda.gdc_launch_dependents()
    acc = acc * (1.0 if FMT == "nf4" else UNSCALE) * tl.load(g + row, mask=ok, other=0.0)[:, None]
    if split == 0:
        if BIAS:
            acc += tl.load(bias + row, mask=ok, other=0.0).to(tl.float32)[:, None]
    if R > 0:  # the splits share the Z partial sums of x A^T
        if split < Z:
            rr = tl.arange(0, RP)
            lora = tl.zeros((BN, BM), tl.float32)
            for p in tl.static_range(P):
                lo = 0 if p == 0 else (b0 if p == 1 else b1)
                hi = N if p == P - 1 else (b0 if p == 0 else b1)
                mine = (ok & (row >= lo) & (row < hi))[:, None] & (rr < R)[None, :]
                lt = tl.load(lb + row[:, None] * slb + rr[None, :], mask=mine, other=0.0)
                at = tl.zeros((RP, BM), tl.float32)
                for z in tl.static_range((Z + SPLIT - 1) // SPLIT):
                    some = inside & (rr < R)[:, None] & (rr * 0 + z * SPLIT + split < Z)[:, None]
                    at += tl.load(xa + (z * SPLIT + split) * sz + m[None, :] * sxa + (p * R + rr)[:, None], mask=some, other=0.0).to(tl.float32)
                lora = dot(lt, at, lora, ASM)
            acc += lora * scaling
    done = split == 0
    if SPLIT > 1:  # each split leaves its sum; the one that comes last adds them up in order of split: the same bits on every run
        slot = tile * MT + tl.program_id(0) % MT
        spot = r[:, None] * BM + tl.arange(0, BM)[None, :]
        sums = part + slot.to(tl.int64) * (SPLIT * BN * BM)
        tl.store(sums + split * (BN * BM) + spot, acc)
        tl.debug_barrier()
        done = tl.atomic_add(count + slot, 1, sem="acq_rel") == SPLIT - 1
    if done:
        if SPLIT > 1:
            tl.store(count + slot, 0)
            acc = tl.load(sums + spot, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                acc += tl.load(sums + other * (BN * BM) + spot, cache_modifier=".cg")
        if SILU:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BM)), (1, 2, 0)))
            y = gate / (1 + tl.exp(tl.minimum(-gate, 80.0))) * up
            n = tile * HALF + tl.arange(0, HALF)
            o = m.to(tl.int64)[None, :] * (N // 2) + n[:, None]
            keep = inside & (n < N // 2)[:, None]
        else:
            y = acc
            o = m.to(tl.int64)[None, :] * N + row[:, None]
            keep = inside & ok[:, None]
        if RES:
            y += tl.load(res + o, mask=keep, other=0.0).to(tl.float32)
        tl.store(out + o, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def dequant(codes, scale, g, out, N, K, sc, ss, FMT: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr, FOLD: tl.constexpr,
            ASM: tl.constexpr):
    """out (N, K) = value * block scale, times global scale if FOLD."""
    if FAST:
        sc = tl.multiple_of(sc, 64)
        ss = tl.multiple_of(ss, 8 if FMT == "nvfp4" else (4 if FMT == "mxfp4" else 2))
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * 128
    row = tl.minimum(n, N - 1).to(tl.int64)
    w = tl.load(words(codes, row, k, N, sc, FAST))
    s = load_scales(scale + row * ss, k, K, (row >= 0)[:, None], FMT, FAST, BN)
    a, b, cc, d = decode(w, s, FMT, ASM, BN)
    v = tl.join(arrange(a, b, BN, 0, 2), arrange(cc, d, BN, 0, 2))  # (BN, 64, plane)
    v = tl.reshape(tl.permute(v, (0, 2, 1)), (BN, 128))
    v = v.to(tl.float32) * (1.0 if FMT == "nf4" else UNSCALE)
    if FOLD:
        v *= tl.load(g + row)[:, None]
    j = tl.arange(0, 128)
    keep = (n < N)[:, None] & (k + j < K)[None, :]
    tl.store(out + n[:, None].to(tl.int64) * K + (k + j)[None, :], v.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["M"])
def down(x, A, out, part, count, M, K, sx, PR, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, S: tl.constexpr,
         PDL: tl.constexpr, ASM: tl.constexpr):
    """out (M, PR) = x A^T: program (row block, split) sums one slice of K, the last one of a row block adds the slices up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rb = tl.program_id(0) // S
    sp = tl.program_id(0) % S
    n = rb * BR + tl.arange(0, BR)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    kk = tl.arange(0, BK)
    steps = tl.cdiv(tl.cdiv(K, BK), S)
    acc = tl.zeros((BR, BM), tl.float32)
    for i in range(sp * steps, sp * steps + steps):
        k = i * BK + kk
        a = tl.load(A + n[:, None] * K + k[None, :], mask=(n < PR)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(x + m[None, :].to(tl.int64) * sx + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
        acc = dot(a, b, acc, ASM)
    slot = tl.program_id(1) * (tl.num_programs(0) // S) + rb
    spot = tl.arange(0, BR)[:, None] * BM + tl.arange(0, BM)[None, :]
    mine = part + slot * (S * BR * BM)
    tl.store(mine + sp * (BR * BM) + spot, acc)
    tl.debug_barrier()
    if tl.atomic_add(count + slot, 1, sem="acq_rel") == S - 1:
        tl.store(count + slot, 0)
        acc = tl.zeros((BR, BM), tl.float32)
        for i in tl.static_range(S):
            acc += tl.load(mine + i * (BR * BM) + spot, cache_modifier=".cg")
        tl.store(out + m[None, :] * PR + n[:, None], acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < PR)[:, None])


# largest M -> rows of x and of w a program takes, chunks an iteration, stages, kWidth of the dot, warps, programs an SM; measured
# on an H100. `wide` replaces the stages where there are 3 tiles or more for each SM
TILES = {8: dict(BM=8, BN=64, C=2, stages=2, kw=4, warps=4, fill=5.2), 16: dict(BM=16, BN=64, C=1, stages=3, kw=2, warps=4, fill=4),
         32: dict(BM=32, BN=64, C=1, stages=4, kw=2, warps=4, fill=4),
         64: dict(BM=64, BN=64, C=1, stages=4, kw=2, warps=4, fill=1.7, wide=3),
         256: dict(BM=128, BN=64, C=1, stages=3, kw=2, warps=4, fill=1.7),
         1 << 31: dict(BM=128, BN=128, C=1, stages=3, kw=2, warps=8, fill=1, wide=2, maxnreg=128)}
PARTIALS = 1 << 22  # float32 of partial sums a launch may leave
FEW = 256  # up to here the kernel always wins
SPACE = {}  # device -> [partial sums, arrival counters, dequantized weight]


def sms(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def space(device):
    """The device's buffers, shared by all layers (two streams at once would collide), made on the first call: 17 MB. The counters
    are zero between kernels. The third, the scratch for a dequantized weight, grows to the largest weight that needed it."""
    if device not in SPACE:
        SPACE[device] = [torch.empty(PARTIALS, device=device), torch.zeros(1 << 17, dtype=torch.int32, device=device),
                         torch.empty(0, dtype=torch.bfloat16, device=device)]
    return SPACE[device]


def workspace_bytes(shapes):
    """Device memory that this file takes beside weights (N, K) of the given shapes: the scratch for the largest, and 17 MB."""
    return max((2 * N * K for N, K in shapes), default=0) + 4 * PARTIALS + (4 << 17)


def plan(M, N, K, cores):
    """The tile of TILES for this shape, its chunks, stages and split of K settled."""
    t = dict(next(t for top, t in TILES.items() if M <= top))
    t["C"] = t["C"] if K % (CHUNK * t["C"]) == 0 else 1
    tiles, blocks = -(-N // t["BN"]) * -(-M // t["BM"]), -(-K // (CHUNK * t["C"]))
    wide = t.pop("wide", t["stages"])
    t["pdl"] = M <= 32 or M > 64 or tiles >= 3 * cores
    if tiles >= (3 if M <= FEW else 1.5) * cores:
        t["stages"] = wide
    fill = t.pop("fill")
    # a split of s gives each program `per` blocks; only the s that leave no program idle
    able = {-(-blocks // per) for per in range(1, blocks + 1)}
    able = [s for s in sorted(able) if s <= 16 and tiles * s * t["BM"] * t["BN"] <= PARTIALS] or [1]
    if M > FEW:  # bound by the tensor cores: fill whole waves
        t["split"] = min(able[:4], key=lambda s: -(-tiles * s // cores) / s + 0.05 * s)
    else:  # bound by memory: about `fill` programs an SM
        want = max(1.0, fill * cores / tiles)
        t["split"] = min(able, key=lambda s: max(s / want, want / s))
    return t


def check(q):
    """ValueError for a weight that the kernels would decode wrongly: it costs a device synchronization, once for each weight."""
    if getattr(q.scale, "checked", None) == q.scale._version:
        return
    if q.fmt not in BLOCK:
        raise ValueError(f"marlin_triton: unknown format {q.fmt}, choose from {', '.join(BLOCK)}")
    N, K = q.shape
    if K % BLOCK[q.fmt] or q.codes.shape != (N, -(-K // CHUNK) * CHUNK // 2) or q.scale.shape != (N, K // BLOCK[q.fmt]):
        raise ValueError(f"marlin_triton: codes {tuple(q.codes.shape)}, scale {tuple(q.scale.shape)} do not fit {q.fmt} {N} x {K}")
    bits = q.scale if q.fmt == "nf4" else q.scale.view(torch.uint8)
    # e4m3 0x7F and 0xFF are NaN, E8M0 255 is; an E8M0 scale over 2^113 would not fit the 2^7 that bfloat16 carries it at
    bad = {"nvfp4": lambda: bits & 127 == 127, "mxfp4": lambda: bits > 240, "nf4": lambda: ~bits.isfinite()}[q.fmt]()
    if bad.any() or not q.global_scale.isfinite().all():
        raise ValueError(f"marlin_triton: the {q.fmt} weight {N} x {K} has a NaN, infinite or too large scale; quantize it again")
    if q.fmt == "nvfp4" and (bits > 128).any():
        raise ValueError(f"marlin_triton: the nvfp4 weight {N} x {K} has a negative block scale; quantize it again")
    q.scale.checked = q.scale._version


def gemm_few(x, q, bias=None, xa=None, B=None, bounds=(), scaling=1.0, residual=None, silu=False, out=None, asm=None, **override):
    """The decoding kernel itself, whatever M; arguments as linear_decode's. On CPU tensors it needs TRITON_INTERPRET=1. `asm`
    False takes the decoder in plain Triton, and keywords of TILES (and `split`, `pdl`) replace the planned ones."""
    (M, K), (N, _) = x.shape, q.shape
    out = x.new_empty(M, N // 2 if silu else N) if out is None else out
    if M == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    cuda = x.is_cuda
    t = plan(M, N // 2 * 2 if silu else N, K, sms(x.device)) | override
    hopper = cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    pdl = hopper and t["pdl"]
    kw = t["kw"] if hopper or not cuda else 4  # before Hopper every dot takes its operands in the wider order
    extra = ({"launch_pdl": True} if pdl else {}) | ({"maxnreg": t["maxnreg"]} if cuda and "maxnreg" in t else {})
    part, count, _ = space(x.device)
    b0, b1, R = *(*bounds, N, N)[:2], 0 if B is None else B.shape[1]
    fast = K % (CHUNK * t["C"]) == 0 and N % 8 == 0 and q.scale.data_ptr() % 16 == 0
    grid = -(-(N // 2 if silu else N) // (t["BN"] // 2 if silu else t["BN"])) * -(-M // t["BM"]) * t["split"]
    gemm[(grid,)](
        x, q.codes, raw(q), q.global_scale, bias, xa, B, residual, out, part, count, M, N, K, x.stride(0), q.codes.stride(0),
        q.scale.stride(0), 0 if xa is None else xa.stride(-2), 0 if B is None else B.stride(0), 0 if xa is None else xa.stride(0), float(scaling),
        b0, b1, FMT=q.fmt,
        BM=t["BM"], BN=t["BN"], C=t["C"], SPLIT=t["split"], STAGES=t["stages"], KW=kw, W=t["warps"], R=R,
        RP=max(16, triton.next_power_of_2(R)), P=len(bounds) + 1, Z=xa.shape[0] if R and xa.dim() == 3 else 1, BIAS=bias is not None, RES=residual is not None, SILU=silu, FAST=fast, PDL=pdl,
        ASM=cuda if asm is None else asm, num_warps=t["warps"], **extra)
    return out


def raw(q):
    return q.scale.view(torch.uint8) if q.fmt == "nvfp4" else q.scale


def dequantize(q, fold=False, out=None, asm=None):
    """w_hat / global_scale (N, K) in bfloat16, which holds it exactly except for nf4; with `fold`, w_hat, rounded once. On CPU
    tensors it needs TRITON_INTERPRET=1. out: a flat bfloat16 buffer to use."""
    N, K = q.shape
    w = torch.empty(N, K, dtype=torch.bfloat16, device=q.codes.device) if out is None else out[: N * K].view(N, K)
    dequant[(-(-N // 64), -(-K // CHUNK))](
        q.codes, raw(q), q.global_scale, w, N, K, q.codes.stride(0), q.scale.stride(0), FMT=q.fmt, BN=64,
        FAST=K % CHUNK == 0 and N % 8 == 0, FOLD=fold, ASM=q.codes.is_cuda if asm is None else asm, num_warps=4)
    return w


def common_scale(q):
    """q's global scale as a float if all its rows share one, else None; read from the device once for each weight."""
    g = q.global_scale
    if getattr(g, "common", (None,))[0] != g._version:
        low, high = torch.aminmax(g)
        low, high = low.item(), high.item()
        g.common = g._version, low if low == high else None
    return g.common[1]


def many(x, q, transposed):
    """x (M, K) @ w_hat^T, or x (M, N) @ w_hat if `transposed`, by the scratch and cuBLAS."""
    N, K = q.shape
    buffers = space(x.device)
    if buffers[2].numel() < N * K:
        buffers[2] = None  # let go of the smaller one first
        buffers[2] = torch.empty(N * K, dtype=torch.bfloat16, device=x.device)
    alpha = common_scale(q)
    w = dequantize(q, fold=alpha is None, out=buffers[2])
    y = x.new_empty(x.shape[0], K if transposed else N)
    # cuBLAS multiplies its float32 sums by alpha: the global scale costs no rounding
    return torch.addmm(y, x, w if transposed else w.T, beta=0, alpha=1.0 if alpha is None else alpha, out=y)  # (M, N) @ (N, K)


def few(M, N, K, cores):
    """Whether M rows go through the decoding kernel. Times in ns: 7.3 for a column of K of a 128 x 128 tile on one SM; dequantizing
    at 2.4 TB/s and cuBLAS at 700 TFLOP/s. All three were measured on an H100; other cards shift them together."""
    if M <= FEW:
        return True
    t = plan(M, N, K, cores)
    tiles = -(-N // t["BN"]) * -(-M // t["BM"])
    kernel = 7.3 * K * -(-tiles * t["split"] // cores) / t["split"]
    return kernel * cores / 132 < N * K * (2.56 / 2400 + 2 * M / 700e3)


def plain(q):
    """w_hat (N, K) float32 by plain torch."""
    N, K = q.shape
    table = torch.tensor(NF4 if q.fmt == "nf4" else E2M1, device=q.codes.device)
    scale = q.scale.float()
    if q.fmt == "mxfp4":
        scale = torch.ldexp(torch.ones_like(scale), q.scale.int() - 127)
    w = table[unpack(q.codes, K).int()].view(N, K // BLOCK[q.fmt], BLOCK[q.fmt])
    return (w * (scale * q.global_scale[:, None])[..., None]).view(N, K)


def product(x, q):
    """x (M, K) @ w_hat^T -> (M, N) in x.dtype."""
    if not x.is_cuda:
        return (x.float() @ plain(q).T).to(x.dtype)
    b = x.to(torch.bfloat16)
    y = gemm_few(b, q) if few(b.shape[0], *q.shape, sms(x.device)) else many(b, q, transposed=False)
    return y.to(x.dtype)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q):
        ctx.q = q
        return product(x, q)

    @staticmethod
    def backward(ctx, dy):
        if not dy.is_cuda:
            return (dy.float() @ plain(ctx.q)).to(dy.dtype), None  # (M, N) @ (N, K)
        if not dy.shape[0]:
            return dy.new_empty(0, ctx.q.shape[1]), None
        return many(dy.to(torch.bfloat16).contiguous(), ctx.q, transposed=True).to(dy.dtype), None


def matmul(x, q):
    """x (..., K) times a quantized weight q (N, K), nvfp4.Quantized: (..., N) in x.dtype, differentiable in x.

    bfloat16 in, float32 sums; other float dtypes are cast on the GPU. On the CPU plain torch in float32. ValueError if dtype,
    shape or device do not fit, or a scale of q is NaN."""
    inspect(x, q)
    return Matmul.apply(x.reshape(-1, x.shape[-1]), q).view(*x.shape[:-1], q.shape[0])


def inspect(x, q):
    if not x.is_floating_point():
        raise ValueError(f"marlin_triton: x is {x.dtype}; pass bfloat16, float16 or float32")
    if x.shape[-1] != q.shape[1]:
        raise ValueError(f"marlin_triton: x has {x.shape[-1]} columns, the weight {q.shape[1]}; they must agree")
    if x.device != q.codes.device:
        raise ValueError(f"marlin_triton: x is on {x.device}, the weight on {q.codes.device}; move one of them")
    check(q)


def linear_decode(x, q, bias=None, xa=None, B=None, bounds=(), scaling=1.0, residual=None, silu=False, out=None):
    """A whole linear layer of a decode step in one kernel: y = x w_hat^T + bias + scaling * xa_part B^T, then SiLU(gate) * up if
    `silu` (w_hat is [gate; up]), then + residual. No gradient.

    x (M, K) bfloat16; q a Quantized (N, K); bias (N,); B (N, R); xa (M, P*R) = x A^T, as from lora_xa, or float32 sums over slices of
    K whose total it is, (Z, M, P*R); bounds: the rows at which parts 1 and 2 begin: () for one part, (18944,) for gate and up, (3584,
    4096) for q, k, v; a row of part p takes columns p*R.. of xa. residual and the result are (M, N), or (M, N/2) if silu, contiguous;
    `out` is written if given, and may be `residual`. Deterministic, and safe in a CUDA graph after one call outside (kernels compile,
    and buffers and checks happen, on the first call). On the CPU plain torch. ValueError if shapes or dtypes do not fit."""
    inspect(x, q)
    M, (N, K) = x.shape[0], q.shape
    if B is not None and (len(bounds) > 2 or xa.shape[-2:] != (M, (len(bounds) + 1) * B.shape[1]) or B.shape[0] != N):
        raise ValueError(f"linear_decode: B {tuple(B.shape)} and xa {tuple(xa.shape)} do not fit {M} x {N} in {len(bounds) + 1} parts")
    if x.is_cuda and x.dtype != torch.bfloat16:
        raise ValueError(f"linear_decode: x is {x.dtype}; decode in bfloat16")
    if x.is_cuda and few(M, N, K, sms(x.device)):
        return gemm_few(x, q, bias, xa, B, bounds, scaling, residual, silu, out)
    y = product(x, q).float()  # (M, N)
    if bias is not None:
        y += bias
    if B is not None:
        edges, R = (0, *bounds, N), B.shape[1]
        xa = xa.float() if xa.dim() == 2 else xa.float().sum(0)  # (M, P*R)
        for p in range(len(bounds) + 1):
            rows = slice(edges[p], edges[p + 1])
            y[:, rows] += scaling * (xa[:, p * R : (p + 1) * R] @ B[rows].float().T)  # (M, R) @ (R, N_p)
    if silu:
        gate, up = y.split(N // 2, dim=1)
        y = torch.nn.functional.silu(gate) * up
    y = (y if residual is None else y + residual).to(x.dtype)
    return y if out is None else out.copy_(y)


def lora_xa(x, A, out=None, asm=None):
    """x (M, K) @ A^T for a stacked LoRA A (P*R, K), both bfloat16 with unit stride along K: (M, P*R) bfloat16. K is cut so that
    few rows of A still use the whole card; deterministic; safe in a CUDA graph after a first call."""
    M, K = x.shape
    PR = A.shape[0]
    out = x.new_empty(M, PR) if out is None else out
    if M == 0 or not x.is_cuda and asm is None:
        return out.copy_(x @ A.T)
    if M > 64:
        return torch.mm(x, A.T, out=out)  # (M, K) @ (K, P*R)
    BM, BR, BK = max(8, triton.next_power_of_2(M)), 16, 256
    blocks, steps = -(-PR // BR), -(-K // BK)
    per = max(1, steps * blocks // (2 * sms(x.device)))
    S = -(-steps // per)
    S = -(-steps // -(-steps // min(S, 32)))
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    part, count, _ = space(x.device)
    down[(blocks * S,)](x, A, out, part, count, M, K, x.stride(0), PR, BM=BM, BR=BR, BK=BK, S=S, PDL=hopper,
                        ASM=x.is_cuda if asm is None else asm, num_warps=2, **({"launch_pdl": True} if hopper else {}))
    return out
