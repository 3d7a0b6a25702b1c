"""
How four-bit codes lie in memory for the tensor core: what the GEMM (fast/gemm.py) reads.

128 columns of a row, a chunk, are 64 bytes: 16 words of 32 bits, 8 codes each. A tensor-core
instruction (MMA) takes 16 columns, a step, from 4 lanes, and wants two pairs of neighbours from
lane t: columns 2t, 2t+1 (h = 0) and 2t+8, 2t+9 (h = 1). So word w of lane t holds just that for two
steps at once: step w of the chunk's first 64 columns (the low plane) and step w of its last 64 (the
high plane).

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
time, since DRAM dislikes strides, and so do their scales: a memory access brings 32 bytes, of which
a chunk would use the row's 8, and L1, most of it given to the tiles, would lose the rest before the
next chunk. So N must be a multiple of 8 and K of 128, as in all Qwens. Nothing is lost: `untile`
gives the weight back in order.

    t = tile(quantize(w)); q = untile(t)

Shapes: N rows (outputs), K columns (inputs).
"""
import torch

import nvfp4
from nvfp4 import FORMATS, Quantized

CHUNK = 128  # columns of K that a row's 64 packed bytes hold
SLICE = 1 << 24  # codes that pack and unpack take at a time: their int32 temporaries are 64 MB each


class Tiled(Quantized):
    """A Quantized whose codes (N, K/2) uint8 and scales (N, K/block) have this file's layout; those
    of NVFP4 are wide_scales."""

    def dequantize(self):
        return untile(self).dequantize()


def tile(q):
    """A Quantized -> the same weight, Tiled. A block whose scale is 0 gets codes 0: the kernel
    reads such a scale as 2^-15."""
    codes, scale = nvfp4.unpack(q.codes), q.scale
    if q.fmt == "nvfp4":
        if (zero := nvfp4.scale_bits(scale) == 0).any():
            codes.masked_fill_(zero.repeat_interleave(q.format.block, 1), 0)
        scale = wide_scales(scale)
    scale = transposed(scale, 8, q.shape[1] // CHUNK)
    return Tiled(q.fmt, q.shape, pack(codes, q.fmt), scale, q.global_scale)


def untile(q):
    """The inverse of `tile`."""
    codes = nvfp4.pack(unpack(q.codes, q.fmt))
    scale = transposed(q.scale, q.shape[1] // CHUNK, 8)
    if q.fmt == "nvfp4":
        scale = e4m3_scales(scale)
    return Quantized(q.fmt, q.shape, codes, scale, q.global_scale)


def transposed(scale, a, b):
    """Scales (N, K/block) whose groups of 8 rows are (a, b, blocks of a chunk), as (b, a, ..): from
    row by row to chunk by chunk, a = 8 rows and b = K/128 chunks, and with a and b changed back."""
    return scale.view(len(scale) // 8, a, b, -1).transpose(1, 2).reshape(scale.shape)


def wide_scales(scale):
    """Scales (N, K/16) in E4M3, none negative, as the kernel reads them: e, e, e, e, e, m, m, m as
    float16 has them, which knows E4M3's subnormals as normal numbers. The four bytes of 64 columns
    lie as a word rotated left by 4."""
    byte = (scale.half().view(torch.int16) >> 7).to(torch.uint8)
    return rotr(byte.view(torch.int32), 28).view(torch.uint8)


def e4m3_scales(scale):
    """The inverse of wide_scales."""
    byte = rotr(scale.view(torch.int32), 4).view(torch.uint8)
    return (byte.to(torch.int16) << 7).view(torch.float16).to(torch.float8_e4m3fn)


def pack(codes, fmt):
    """Codes (N, K), one uint8 each in 0..15, in the kernel's order: (N, K/2) uint8. Groups of 8
    rows are interleaved: pack a matrix whole, or in slices of rows that start at multiples of 8."""
    N, K = codes.shape
    out = codes.new_empty(N, K // 2)
    for rows in slices(N, K):
        v = codes[rows].int()
        v = v.view(-1, 8, K // CHUNK, 2, 4, 2, 4, 2)  # (group, row, chunk, plane, w, h, t, p)
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
        out[rows] = word.reshape(-1, K // 8).view(torch.uint8)
    return out


def unpack(packed, fmt):
    """The inverse of pack: (N, K/2) uint8 -> codes (N, K) uint8."""
    N, K = len(packed), 2 * packed.shape[1]
    out = packed.new_empty(N, K)
    for rows in slices(N, K):
        w = packed[rows].view(torch.int32)
        w = w.view(-1, K // CHUNK, 8, 4, 4)  # (group, chunk, row, t, w)
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
        out[rows] = v.reshape(-1, K)
    return out


def slices(N, K):
    """Slices of rows: about SLICE codes each, in whole groups of 8."""
    step = max(1, SLICE // (8 * K)) * 8
    return [slice(i, i + step) for i in range(0, N, step)]


def shift(w, s):
    """Logical right shift of int32."""
    return (w >> s) & ((1 << (32 - s)) - 1)


def rotr(w, s):
    """Rotate int32 right by s bits."""
    return shift(w, s) | (w << (32 - s))
