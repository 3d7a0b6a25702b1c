"""
Four bits to sixteen, in the registers of a tensor core's lane: the decoder of fast/gemm.py.

The top of fast/layout.py shows how codes lie in memory: a word holds four pairs of neighbours, a
and b of the low plane of 64 columns, c and d of the high plane.

The bit trick. bfloat16 is s eeeeeeee mmmmmmm, E2M1 is s ee m. Put s in bit 15 and e, e, m in bits
8, 7, 6, the low end of the exponent and the top of the mantissa, with zeros elsewhere: the number
reads as the value times 2^-126, since E2M1's exponent bias is 1 and bfloat16's 127. E2M1's one
subnormal works too, as a bfloat16 subnormal:

    code 5 = 0 10 1 -> 0 00000010 1000000 = 0x0140 = 1.5 * 2^(2-127) = 3 * 2^-126     code 5 is 3
    code 1 = 0 00 1 -> 0 00000000 1000000 = 0x0040 = 0.5 * 2^-126, subnormal          code 1 is 0.5

So one AND with 0x81C081C0 turns a word into two bfloat16, pair a; b takes a shift and an AND; c a
rotation and an AND; d, whose m does not fit beside its s, e, e, four: 9 instructions for 8 codes.
(One AND each is impossible: the bits 15, 8, 7, 6 would have to tile 16 bits by rotation, and they
do not.)

Where the scales go. E4M3 would need a multiplication more: its subnormals read right only at the
low end of bfloat16's exponents, where the codes are. So scales are stored with float16's exponent
(layout.wide_scales): such a byte << 4, with the bits 111 before it, reads as the scale times 2^112.
One packed multiplication by the value's 2^-126 gives value * scale * 2^-14: 2 + 4 significant bits,
which bfloat16 holds exactly. `unscaled` takes the 2^-14 out of the sum. MXFP4's exponent is a
bfloat16 exponent already, carried at 2^100. A codebook's values, NF4's, come from byte permutes
(PRMT is an 8-entry table, with four adjacent codes as its selector), 21 instructions for 8 codes,
and their products are rounded.

The decoders are PTX, to get exactly these instructions; `extract` without ASM does the same in
plain Triton, which the interpreter can run. A test emulates the PTX on the CPU, word by word.

Shapes: BN rows of the weight, chunks of 128 columns in two planes of 64, 16 words a chunk and row.
"""
import functools

import torch
import triton
import triton.language as tl

TOUCH = tl.constexpr("// $0")  # no instruction
MASK = tl.constexpr(0x81C081C0 - (1 << 32))  # s and e, e, m of two codes, where bfloat16 wants them


# PTX. $4 is a word, $5 and $6 the scales of its planes, twice each; $0..$3 are the pairs a..d. A
# product is an FMA that adds -0 (z), that is, nothing: bfloat16 multiplication came with Hopper,
# where ptxas compiles both to the same instruction.
EXTRACT = """{ .reg .b32 a, b, c, d, e, z;
mov.b32 z, 0x80008000;
and.b32 a, $4, 0x81c081c0;
shl.b32 b, $4, 4;              and.b32 b, b, 0x81c081c0;
shf.r.wrap.b32 c, $4, $4, 6;   and.b32 c, c, 0x81c081c0;
shf.r.wrap.b32 d, $4, $4, 2;   and.b32 d, d, 0x81808180;
shl.b32 e, $4, 6;              lop3.b32 d, e, 0x00400040, d, 0xea;
"""


def lookup(codebook):
    """PTX that turns a word of codes into values of a codebook, as pairs a to d: byte permutes as
    8-entry tables.

    s gets the 3-bit indices, four of which are a permute's selector; m gets each code's sign as a
    byte; l and h get the values' low and high bytes, the sign choosing the half of the table."""
    table = torch.tensor(codebook).to(torch.bfloat16).view(16, 1).view(torch.uint8)
    low, high = table.T.contiguous().view(torch.int32).tolist()  # 4 bytes a word

    def four(signs, x, y):
        return f"""prmt.b32 m, x, $4, {signs};
prmt.b32 l, {low[0]}, {low[1]}, s;     prmt.b32 t, {low[2]}, {low[3]}, s;
lop3.b32 l, m, t, l, 0xca;
prmt.b32 h, {high[0]}, {high[1]}, s;   prmt.b32 t, {high[2]}, {high[3]}, s;
lop3.b32 h, m, t, h, 0xca;
prmt.b32 {x}, l, h, 0x5140;   prmt.b32 {y}, l, h, 0x7362;
"""

    # x has the signs of even codes in the top bits of its bytes, as the word has those of odd ones
    return f"""{{ .reg .b32 a, b, c, d, s, x, m, l, h, t, z;
mov.b32 z, 0x80008000;
and.b32 s, $4, 0x77777777;   shl.b32 x, $4, 4;
{four("0xd9c8", "a", "b")}shr.b32 s, s, 16;
{four("0xfbea", "c", "d")}"""


# ends a decoder: a to d, times their scales
SCALED = """fma.rn.bf16x2 $0, a, $5, z;   fma.rn.bf16x2 $1, b, $5, z;
fma.rn.bf16x2 $2, c, $6, z;   fma.rn.bf16x2 $3, d, $6, z; }"""
# the four scales in $4, as layout.wide_scales leaves them, each twice in a word, times 2^112
SCALES_ASM = tl.constexpr("""{ .reg .b32 a, b;   .reg .b16 u, v, x, y;
                               lop3.b32 a, $4, 0x0ff00ff0, 0x70007000, 0xea;   mov.b32 {u, v}, a;
shf.r.wrap.b32 b, $4, $4, 8;   lop3.b32 b, b, 0x0ff00ff0, 0x70007000, 0xea;   mov.b32 {x, y}, b;
mov.b32 $0, {u, u};   mov.b32 $1, {x, x};   mov.b32 $2, {v, v};   mov.b32 $3, {y, y}; }""")
# codes read as 2^-126 times their value, NVFP4's scales as 2^112 times, E8M0 as 2^100 times, so
# that products with tiny scales are not subnormal
UNSCALE4, UNSCALE8 = tl.constexpr(2.0**14), tl.constexpr(2.0**26)


@functools.cache
def decoder(f, asm):
    """The constants with which a kernel decodes a Format. BLOCK: columns per scale; DECODE: PTX, or
    without ASM the codebook, None for E2M1."""
    decode = f.codebook
    if asm:
        decode = (lookup(decode) if decode else EXTRACT) + SCALED
    return {"BLOCK": f.block, "DECODE": decode, "ASM": asm}


@triton.jit
def words(codes, r, k, sc):
    """Pointers (BN, 16) to the int32 words of rows r in the chunk at column k: groups of 8 rows lie
    chunk by chunk."""
    p = codes.to(tl.pointer_type(tl.int32)) + (
        (r // 8).to(tl.int64) * (sc * 2) + (r % 8) * 16 + k)
    return p[:, None] + tl.arange(0, 16)[None, :]


@triton.jit
def scales_at(scale, r, k, ss, BLOCK: tl.constexpr):
    """Pointers (BN,) to the first scales of rows r in the chunk at column k: they lie as words."""
    return scale + (r // 8).to(tl.int64) * (ss * 8) + (r % 8) * (128 // BLOCK) + 8 * k // BLOCK


@triton.jit
def load_scales(p, FMT: tl.constexpr, BLOCK: tl.constexpr):
    """The block scales of a chunk as stored: bytes, four to an int32, (BN, 2 planes), or float32,
    all that a plane has, (BN, 2 planes * 1, 2 or 4); p (BN,) points at the rows' first."""
    if p.dtype.element_ty == tl.float32:
        at = tl.arange(0, max(2, 128 // BLOCK)) // max(1, BLOCK // 64)
        return tl.load(p[:, None] + at[None, :])
    else:
        at = tl.arange(0, 2) * (1 if FMT == "nvfp4" else 0)
        return tl.load(p.to(tl.pointer_type(tl.int32))[:, None] + at[None, :])


@triton.jit
def quarters(v, BN: tl.constexpr):
    """Scales of words w = 0..3, v (BN, plane, w) with its last dimensions split in any way, ->
    those of all 16 words, (BN, 16) for each plane: every lane takes the same four."""
    lo, hi = tl.split(tl.permute(tl.reshape(v, (BN, 2, 4)), (0, 2, 1)))
    lo = tl.reshape(tl.broadcast_to(lo[:, None, :], (BN, 4, 4)), (BN, 16))
    hi = tl.reshape(tl.broadcast_to(hi[:, None, :], (BN, 4, 4)), (BN, 16))
    return lo, hi


@triton.jit
def extract(w, s, FMT: tl.constexpr, DECODE: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr):
    """Words (BN, 16) and scales of one chunk -> the pairs a, b, c, d (BN, 16, p), value * scale, in
    bfloat16, or without ASM in float32."""
    if FMT == "nvfp4":
        if ASM:
            s0, s1, s2, s3 = tl.inline_asm_elementwise(
                SCALES_ASM, "=r,=r,=r,=r,r", [s],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
        else:  # the same bits at the same place of a float32
            s0, s1, s2 = wide(s << 16), wide(s << 8), wide(s)
            s3 = wide(((s >> 8) & 0xFFFFFF) | (s << 24))
        lo, hi = quarters(tl.join(tl.join(s0, s2), tl.join(s1, s3)), BN)
    elif FMT == "mxfp4":  # word w of a plane: block 2 * plane + w // 2
        even = exponent(s >> (tl.arange(0, 2) * 16)[None, :], ASM)
        odd = exponent(s >> (tl.arange(0, 2) * 16 + 8)[None, :], ASM)
        s = tl.join(even, odd)
        lo, hi = quarters(tl.join(s, s), BN)
    else:
        if ASM:
            s = s.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
            s = (s << 16) | (s & 0xFFFF)
        for _ in tl.static_range(4 // s.shape[1]):  # until each word of a plane has one
            s = tl.reshape(tl.join(s, s), (BN, 2 * s.shape[1]))
        lo, hi = quarters(s, BN)
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            DECODE, "=r,=r,=r,=r,r,r,r", [w, lo, hi],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
        a, b, c, d = halves(a), halves(b), halves(c), halves(d)
    elif DECODE is not None:
        a, b = found(w, lo, DECODE), found(w >> 8, lo, DECODE)
        c, d = found(w >> 16, hi, DECODE), found(w >> 24, hi, DECODE)
    else:
        a = value(w & MASK, lo)
        b = value((w << 4) & MASK, lo)
        c = value(((w >> 6) & 0x3FFFFFF | w << 26) & MASK, hi)
        d = ((w >> 2) & 0x3FFFFFFF | w << 30) & MASK & ~0x00400040
        d = value(d | (w << 6) & 0x00400040, hi)
    return a, b, c, d


@triton.jit
def wide(s):
    """The byte in bits 27..20 of s, a wide scale, times 2^112, in float32."""
    return ((s & 0xFF00000) | 0x70000000).to(tl.float32, bitcast=True)


@triton.jit
def exponent(s, ASM: tl.constexpr):
    """E8M0 bytes to 2^100 times the scale: bfloat16 twice in a word, or float32."""
    s = tl.minimum((s & 255) + 100, 254) << 7
    if ASM:
        return s << 16 | s
    else:
        return (s << 16).to(tl.float32, bitcast=True)


@triton.jit
def unscaled(x, FMT: tl.constexpr):
    """x, converted from the units of `extract`'s value * scale to those of w_hat / global scale."""
    if FMT == "nvfp4":
        x *= UNSCALE4
    elif FMT == "mxfp4":
        x *= UNSCALE8
    return x


@triton.jit
def halves(a):
    """Words (..) to the two bfloat16 numbers in each, (.., 2)."""
    return tl.join(a.to(tl.int16), (a >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def value(v, s):
    """What the PTX does to one pair, in float32: masked words (BN, 16), scales -> (BN, 16, p)."""
    return tl.join(v << 16, v & -65536).to(tl.float32, bitcast=True) * s[:, :, None]


@triton.jit
def found(v, s, BOOK: tl.constexpr):
    """`value` for a codebook: the pair in the low byte of words (BN, 16), looked up."""
    i = tl.join(v, v >> 4) & 15
    x = (i * 0).to(tl.float32)
    for j in tl.static_range(16):
        x = tl.where(i == j, BOOK[j], x)
    return x * s[:, :, None]


@triton.jit
def arrange(a, b, BN: tl.constexpr, W: tl.constexpr):
    """Two (BN, 16, p) tensors, one plane, to (BN, 64): k in order, rows in the order in which an
    MMA's registers already hold them. W: warps; 0: no MMA, rows stay in place."""
    v = tl.join(a, b)  # (BN, 16, p, h)
    if W == 0:
        v = tl.permute(tl.reshape(v, (BN, 4, 4, 2, 2)), (0, 2, 4, 1, 3))
    else:
        v = tl.permute(tl.reshape(v, (BN // (16 * W), 2, W, 8, 4, 4, 2, 2)),
                       (0, 2, 1, 3, 5, 7, 4, 6))
    return tl.reshape(v, (BN, 64))


@triton.jit
def in_16_bits(w, s, FMT: tl.constexpr, DECODE: tl.constexpr, ASM: tl.constexpr,
               BN: tl.constexpr, W: tl.constexpr):
    """value * scale of a chunk's words (BN, 16) and scales: (BN, 128), rows as `arrange`d."""
    a, b, c, d = extract(w, s, FMT, DECODE, ASM, BN)
    v = tl.join(arrange(a, b, BN, W), arrange(c, d, BN, W))  # (BN, 64, plane)
    v = tl.reshape(tl.permute(v, (0, 2, 1)), (BN, 128))
    if ASM and W:  # Triton looks from the MMA back to the loads, and if there is a join on the
        # way, takes operands twice as wide, for which x must be moved: a tenth of the loop's time
        v = tl.inline_asm_elementwise(TOUCH, "=h,0", [v], dtype=v.dtype, is_pure=False, pack=1)
    return v
