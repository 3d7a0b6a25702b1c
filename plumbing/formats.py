"""
Number formats of four bits: one table, rounding to them and back, and how codes lie in memory.

A weight (N, K) is a grid of 4-bit codes, a scale for each `block` of neighbours along K, and one
float32 global scale a row: w_hat = values[code] * scale * global_scale. FORMATS defines each
format; NVFP4 is worked through, number by number, at the top of nvfp4.py. Plain torch, on any
device: the kernel that multiplies by such weights (marlin_triton.py) builds on this file.

The layout of codes in memory is what that kernel wants. 128 columns of a row, a chunk, are 64
bytes: 16 words of 32 bits, 8 codes each. A tensor-core instruction (MMA) takes 16 columns, a step,
from 4 lanes, and wants two pairs of neighbours from lane t: columns 2t, 2t+1 (h = 0) and 2t+8,
2t+9 (h = 1). So word w of lane t holds just that for two steps at once: step w of the chunk's
first 64 columns (the low plane) and step w of its last 64 (the high plane).

    chunk   | lane 0: w0 w1 w2 w3 | lane 1: w0 w1 w2 w3 | lane 2: w0 ... | lane 3: w0 ... |
    column  = 64 plane + 16 w + 8 h + 2t + p; p = 0, 1 in a pair
    pair      a is (low, h=0), b (low, h=1), c (high, h=0), d (high, h=1)

    bit     31 30 29 28 27 26 25 24 23 22 21 20 19 18 17 16 |
    code    a1 c1 c1 c1 b1 d1 d1 a1 a1 a1 c0 b1 b1 b1 d0 d1 |
    field    s  e  e  m  s  e  e  e  e  m  s  e  e  m  s  m |

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code    a0 c0 c0 c0 b0 d0 d0 a0 a0 a0 c1 b0 b0 b0 d1 d0
    field    s  e  e  m  s  e  e  e  e  m  s  e  e  m  s  m

(s, e, e, m: a code's bits from the highest to the lowest, as E2M1 names them.) A format that is
looked up, as NF4, has the eight of a word in turn, a0 in bits 3..0, a1, b0, b1, c0, c1, d0, and d1
in 31..28. A lane reads its w0..w3, 16 bytes, and has its share of 8 steps: no shuffles, and
activations stay in their natural order. Groups of 8 rows lie chunk by chunk, 8 x 64 bytes at a
time, since DRAM dislikes strides. Nothing is lost: `unpack` gives the codes back in order.

    q = quantize(w, "nvfp4")
    dequantize(q), unpack(q.codes, K, "nvfp4")

Your own codebook is one more row of FORMATS, which all flags, files and kernels follow: 16
ascending values, and a float32 scale for each 16, 32, 64 or 128 weights. INT4, say, is

    "int4": Format(32, torch.float32, tuple(range(-8, 8))),

Shapes: N rows (outputs), K columns (inputs), K/block scales a row.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)


@dataclass(frozen=True)
class Format:
    """block: columns that share a scale. scale_dtype: its stored type (uint8: an E8M0 exponent
    byte, 2^(s-127)). values: those of the 16 codes; with float32 scales they are looked up, with
    others they are E2M1's. bits: a weight's, its share of the scale included. ValueError for what
    the kernels cannot decode."""

    block: int
    scale_dtype: torch.dtype
    values: tuple

    def __post_init__(self):
        want = tuple(sorted({*self.codebook})) if self.codebook else E2M1
        if self.block not in (16, 32, 64, 128) or len(want) != 16 or self.values != want:
            raise ValueError(f"{self}: a block has 16, 32, 64 or 128 columns, a codebook 16 "
                             "ascending values and float32 scales")
        if self.codebook and not (all(map(math.isfinite, want)) and want[-1] > 0):
            raise ValueError(f"{self}: the last value stands for a block's largest |weight|: it "
                             "must be above 0, and all of them finite")

    @property
    def codebook(self):
        """The values if codes are looked up, the last one a block's absmax; None for E2M1."""
        return self.values if self.scale_dtype == torch.float32 else None

    @property
    def bits(self):
        return 4 + 8 * self.scale_dtype.itemsize / self.block


FORMATS = {
    "nvfp4": Format(16, torch.float8_e4m3fn, E2M1),
    "mxfp4": Format(32, torch.uint8, E2M1),
    "nf4": Format(64, torch.float32, NF4),
}
OURS = tuple(FORMATS)  # a script may add others
PORTION = 1 << 25  # weights that are rounded at a time: the temporaries are several times that
CHUNK = 128  # columns of K that a row's 64 packed bytes hold
SLICE = 1 << 24  # codes that pack and unpack take at a time: their int32 temporaries are 64 MB each


@dataclass
class Quantized:
    """One quantized weight (N, K): packed codes, block scales in their stored type, one float32
    global scale a row.

    codes (N, K/2) uint8, K rounded up to whole chunks; scale (N, K/block);
    global_scale (N,) float32: the same number in every row of a tensor, but the parts of a fused
    group may differ."""

    fmt: str
    shape: tuple
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor


# ---- rounding


def quantize(w, fmt="nvfp4", name="weight"):
    """Round w (N, K), any float dtype, to `fmt`. ValueError if K is not a multiple of the block, or
    w is not finite."""
    return encode(w, fmt, *block_scales(w, fmt, name))


def block_scales(w, fmt, name="weight"):
    """(scale (N, K/block) in its stored type, global_scale (N,) float32) of w (N, K), as
    round-to-nearest uses them."""
    if fmt not in FORMATS:
        raise ValueError(f"--quant {fmt}: unknown format, choose from none, {', '.join(FORMATS)}")
    if fmt not in ("nvfp4", "mxfp4") and not FORMATS[fmt].codebook:
        raise ValueError(f"--quant {fmt}: a format of one's own has a codebook and float32 scales; "
                         "E4M3's are nvfp4's alone, E8M0's mxfp4's")
    (N, K), block = w.shape, FORMATS[fmt].block
    if K % block:
        raise ValueError(f"{name}: K = {K} is not divisible by {fmt}'s block of {block}; "
                         "choose another --quant")
    # NaN and inf come through; the abs is for blocks of zeros, whose maximum may be -0
    low, high = w.detach().reshape(N, K // block, block).aminmax(dim=-1)
    amax = torch.maximum(-low, high).abs().float()  # (N, K/block)
    if not torch.isfinite(amax).all():
        raise ValueError(f"{name}: the weight holds NaN or inf, it cannot be quantized; "
                         "check the checkpoint")
    one = torch.ones(N, device=w.device)
    if book := FORMATS[fmt].codebook:
        return amax / book[-1], one
    if fmt == "mxfp4":  # OCP: 2^(floor(log2 amax) - 2), 2 the exponent of E2M1's largest value
        _, exponent = torch.frexp(amax)  # amax = m * 2^exponent with m in [0.5, 1)
        return torch.where(amax > 0, exponent - 3 + 127, 1).clamp(min=1).to(torch.uint8), one
    # The floor keeps 1/global finite when a whole tensor is (almost) zero. Checkpoints store the
    # reciprocal; taking it twice makes global a number whose reciprocal leads back to it, so that
    # saving and loading changes no bit.
    top = (amax.max() / (6 * 448)).clamp(min=torch.finfo(torch.float32).tiny)
    top = 1 / (1 / top)
    # the cast rounds to nearest even
    return (amax / 6 / top).to(torch.float8_e4m3fn), one * top


def encode(w, fmt, scale, global_scale):
    """w (N, K) rounded to the grid of given scales (as from block_scales) -> Quantized."""
    codes = [pack(nearest(w[rows], fmt, scale[rows], global_scale[rows]), fmt)
             for rows in portions(w)]
    return Quantized(fmt, tuple(w.shape), torch.cat(codes), scale, global_scale)


def snap(w, fmt, scale, global_scale):
    """w (N, K) rounded to the grid of given scales and back, float32: dequantize(encode(...))
    without the packing."""
    out = torch.empty(w.shape, device=w.device)
    for rows in portions(w):
        grid = fmt, scale[rows], global_scale[rows]
        out[rows] = to_values(nearest(w[rows], *grid), *grid)
    return out


def dequantize(q):
    """w_hat (N, K) float32 of a Quantized."""
    return to_values(unpack(q.codes, q.shape[1], q.fmt), q.fmt, q.scale, q.global_scale)


def portions(w):
    """Slices of the rows of w, about PORTION weights each: a 72B model's projection has 5e8."""
    step = max(8, PORTION // w.shape[1] // 8 * 8)  # packing interleaves 8 rows
    return [slice(i, i + step) for i in range(0, len(w), step)]


def nearest(w, fmt, scale, global_scale):
    """uint8 codes (N, K) of the values nearest to w (N, K) on the grid of these scales."""
    block = FORMATS[fmt].block
    w = w.detach().float().reshape(len(w), -1, block)  # (N, K/block, block)
    step = (scale_value(scale, fmt) * global_scale[:, None])[..., None]  # (N, K/block, 1)
    # a scale of 0 (zeros, or too small for its type): the block rounds as zeros, not as w / 0
    x = torch.where(step > 0, w / step, 0).flatten(1)  # (N, K)
    book = FORMATS[fmt].codebook
    return round_to(book, x) if book else round_e2m1(x)


def to_values(codes, fmt, scale, global_scale):
    """w_hat (N, K) float32: value[code] * block scale, which is exact, * global scale."""
    N, K = codes.shape
    values = torch.tensor(FORMATS[fmt].values, device=codes.device)[codes.int()]  # (N, K)
    values = values.view(N, -1, FORMATS[fmt].block) * scale_value(scale, fmt)[..., None]
    return values.view(N, K) * global_scale[:, None]


def scale_value(scale, fmt):
    """Stored block scales (N, K/block) as float32."""
    if fmt == "mxfp4":  # the byte is a float32's exponent field; 0 is 2^-127, a float32 subnormal
        return torch.where(scale > 0, scale.int() << 23, 1 << 22).view(torch.float32)
    return scale.float()


def scale_bits(scale):
    """Stored block scales in a type that all operations take: bytes, or float32 as it is."""
    return scale.view(torch.uint8) if scale.itemsize == 1 else scale


def round_e2m1(x):
    """Codes (uint8) of the E2M1 values nearest to x, ties to the even mantissa, saturating at 6."""
    a, code = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    # a midpoint of the grid and whether its upper neighbour has the even mantissa (codes 2, 4, 6)
    for midpoint, ties_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1),
                              (5.0, 0)):
        code += (a >= midpoint) if ties_up else (a > midpoint)
    return code + ((x < 0) & (code > 0)).to(torch.uint8) * 8


def round_to(codebook, x):
    """Codes (uint8) of the entries of an ascending codebook nearest to x."""
    table = torch.tensor(codebook, device=x.device)
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8)


# ---- the layout in memory


def pack(codes, fmt):
    """Codes (N, K), one uint8 each in 0..15, in the kernel's order: (N, ceil(K/128)*64) uint8;
    columns past K are code 0.

    Groups of 8 rows are interleaved: pack a matrix whole, or in slices of rows that start at
    multiples of 8. ValueError if codes is not a uint8 matrix."""
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(f"pack: codes must be a (N, K) uint8 tensor, got {tuple(codes.shape)} "
                         f"{codes.dtype}")
    N, K = codes.shape
    chunks = -(-K // CHUNK)
    out = codes.new_empty(N, chunks * CHUNK // 2)
    for i, j, rows in slices(N, K):
        v = F.pad(codes[i:j], (0, -K % CHUNK)).int()
        v = v.view(-1, rows, chunks, 2, 4, 2, 4, 2)  # (group, row, chunk, plane, w, h, t, p)
        v = v.permute(0, 2, 1, 6, 4, 3, 5, 7)  # (group, chunk, row, t, w, plane, h, p)
        if FORMATS[fmt].codebook:
            places = torch.arange(0, 32, 4, device=v.device, dtype=torch.int32)
            word = (v.flatten(5) << places).sum(-1, dtype=torch.int32)
        else:
            v = ((v & 8) << 12) | ((v & 7) << 6)  # s in bit 15, e, e, m in 8..6
            # four pairs (group, chunk, row, t, w), two codes each
            a, b, c, d = (v[..., 0] | v[..., 1] << 16).flatten(5).unbind(-1)
            low = rotr(d & ~0x00400040, 30) | shift(d & 0x00400040, 6)
            word = a | shift(b, 4) | rotr(c, 26) | low
        out[i:j] = word.reshape(j - i, -1).view(torch.uint8)
    return out


def unpack(packed, K, fmt):
    """The inverse of pack: (N, ceil(K/128)*64) uint8 -> codes (N, K) uint8."""
    N, width = packed.shape
    out = packed.new_empty(N, K)
    for i, j, rows in slices(N, K):
        w = packed[i:j].contiguous().view(torch.int32)
        w = w.view(-1, width * 2 // CHUNK, rows, 4, 4)  # (group, chunk, row, t, w)
        if FORMATS[fmt].codebook:
            v = w[..., None] >> torch.arange(0, 32, 4, device=w.device, dtype=torch.int32) & 15
            v = v.unflatten(-1, (2, 2, 2))  # (.., plane, h, p)
        else:
            d = (rotr(w, 2) & (0x81808180 - (1 << 32))) | ((w << 6) & 0x00400040)
            v = torch.stack([w, w << 4, rotr(w, 6), d], -1).unflatten(-1, (2, 2))  # (.., plane, h)
            v = torch.stack([v, v >> 16], -1)  # (.., p)
            v = ((v >> 12) & 8) | ((v >> 6) & 7)
        # (group, chunk, row, t, w, plane, h, p) -> (group, row, chunk, plane, w, h, t, p)
        v = v.to(torch.uint8).permute(0, 2, 1, 5, 4, 6, 3, 7)
        out[i:j] = v.reshape(j - i, -1)[:, :K]
    return out


def slices(N, K):
    """(first, end, rows of a group): about SLICE codes each, in whole groups of 8 rows, then the
    N % 8 rows left over."""
    whole, step = N // 8 * 8, max(1, SLICE // (8 * max(K, 1))) * 8
    yield from ((i, min(i + step, whole), 8) for i in range(0, whole, step))
    if whole < N:
        yield whole, N, N - whole


def shift(w, s):
    """Logical right shift of int32."""
    return (w >> s) & ((1 << (32 - s)) - 1)


def rotr(w, s):
    """Rotate int32 right by s bits."""
    return shift(w, s) | (w << (32 - s))
