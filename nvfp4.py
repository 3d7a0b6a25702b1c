"""
Four-bit weights: NVFP4, MXFP4 and NF4, the quantized linear, and reading one in while a checkpoint loads.

NVFP4, the format of the paper, bit by bit. A weight becomes an E2M1 code: sign, two exponent bits, one mantissa bit,

    code    0    1    2    3    4    5    6    7        (8..15: the same, negative)
    value   0   0.5   1   1.5   2    3    4    6

16 neighbours along the input dimension K share one E4M3 scale (8 bits, largest value 448), and the whole tensor has one
float32 scale on top, so a weight costs 4 + 8/16 = 4.5 bits:

    global  = max|w| / (6 * 448)                  the largest block scale is then exactly 448
    scale_b = e4m3(max|w_b| / 6 / global)         per block b
    code    = e2m1(w / (scale_b * global))        round to nearest, ties to even, saturating at 6
    w_hat   = value[code] * scale_b * global

One number worked out: in a tensor with max|w| = 1.344, global = 1.344/2688 = 5e-4. A block with max|w| = 0.09 gets
0.09/6/5e-4 = 30, which E4M3 holds exactly. Its weight 0.04 is 0.04/(30 * 5e-4) = 2.67 on the grid, nearest value 3, code 5;
it comes back as 3 * 30 * 5e-4 = 0.045.

MXFP4 has the same values, blocks of 32 and a power-of-two scale (E8M0: a bare exponent byte): 4.25 bits. NF4 (QLoRA) looks
codes up in 16 quantiles of a normal, blocks of 64 with a float32 absmax, without double quantization: 4.5 bits.
Embeddings, lm_head, norms and biases stay in 16 bits. Codes lie in the order the GEMM wants (marlin_triton.pack).

    q = quantize(w); w_hat = dequantize(q)
    model = model.load("Qwen/Qwen2.5-3B-Instruct", device="cuda", quant="nvfp4")

Shapes: N rows (outputs), K columns (inputs), K/block scales a row.
"""
from dataclasses import dataclass

import marlin_triton
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import read_linear

BLOCK = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}
FORMATS = tuple(BLOCK)


@dataclass
class Quantized:
    """One quantized weight (N, K): packed codes, block scales in their stored type, one float32 global scale a row.

    codes (N, ceil(K/32)*16) uint8; scale (N, K/block): float8_e4m3fn | uint8 exponent, value 2^(s-127) | float32 absmax;
    global_scale (N,) float32: the same number in every row of a tensor, but the parts of a fused group may differ."""

    fmt: str
    shape: tuple
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor


def quantize(w, fmt="nvfp4", name="weight"):
    """Round w (N, K), any float dtype, to `fmt`. ValueError if K is no multiple of the block, or w is not finite."""
    if fmt not in BLOCK:
        raise ValueError(f"--quant {fmt}: unknown format, choose from none, {', '.join(FORMATS)}")
    N, K = w.shape
    if K % BLOCK[fmt]:
        raise ValueError(f"{name}: K = {K} is not divisible by {fmt}'s block of {BLOCK[fmt]}; choose another --quant")
    w = w.detach().float()
    if not torch.isfinite(w).all():
        raise ValueError(f"{name}: the weight holds NaN or inf, it cannot be quantized; check the checkpoint")
    blocks = w.view(N, K // BLOCK[fmt], BLOCK[fmt])  # (N, K/block, block)
    amax = blocks.abs().amax(-1)  # (N, K/block)
    one = torch.ones(N, device=w.device)
    if fmt == "nf4":
        table = torch.tensor(marlin_triton.NF4, device=w.device)
        x = blocks / torch.where(amax > 0, amax, 1)[..., None]
        codes = torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        return Quantized(fmt, (N, K), marlin_triton.pack(codes.view(N, K)), amax, one)
    if fmt == "mxfp4":  # the OCP rule: 2^(floor(log2 amax) - 2), 2 being the exponent of the largest E2M1 value
        _, exponent = torch.frexp(amax)  # amax = m * 2^exponent with m in [0.5, 1)
        scale = torch.where(amax > 0, exponent - 3 + 127, 1).clamp(1, 254).to(torch.uint8)
        step, global_scale = scale_value(scale, fmt), one
    else:
        # the floor keeps 1/global finite when a whole tensor is (almost) zero
        top = (w.abs().amax() / (6 * 448) if w.numel() else w.new_zeros(())).clamp(min=torch.finfo(torch.float32).tiny)
        scale = (amax / 6 / top).clamp(max=448).to(torch.float8_e4m3fn)  # the cast rounds to nearest even
        step, global_scale = scale.float() * top, one * top
    # a block whose scale is zero holds nothing that E4M3 can scale: its codes are 0, not 0/0
    x = torch.where(step[..., None] > 0, blocks / step[..., None], 0)
    return Quantized(fmt, (N, K), marlin_triton.pack(round_e2m1(x).view(N, K)), scale, global_scale)


def round_e2m1(x):
    """Codes (uint8) of the E2M1 values nearest to x, ties to the even mantissa, saturating at 6."""
    a, code = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    # each line is a midpoint of the grid; >= where the upper neighbour has the even mantissa (codes 2, 4, 6)
    for midpoint, ties_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (a >= midpoint) if ties_up else (a > midpoint)
    return code + ((x < 0) & (code > 0)).to(torch.uint8) * 8


def scale_value(scale, fmt):
    """Stored block scales (N, K/block) as float32."""
    if fmt == "mxfp4":
        return torch.ldexp(torch.ones((), device=scale.device), scale.int() - 127)
    return scale.float()


def dequantize(q):
    """w_hat (N, K) float32 of a Quantized: value[code] * block scale * global scale."""
    N, K = q.shape
    table = torch.tensor(marlin_triton.NF4 if q.fmt == "nf4" else marlin_triton.E2M1, device=q.codes.device)
    w = table[marlin_triton.unpack(q.codes, K).int()].view(N, K // BLOCK[q.fmt], BLOCK[q.fmt])
    return (w * (scale_value(q.scale, q.fmt) * q.global_scale[:, None])[..., None]).view(N, K)


class QuantLinear(nn.Module):
    """model.Linear with its weight in four bits: y = x w_hat^T + b. On the GPU codes are decoded inside the GEMM; on the CPU
    one dequantized copy is cached, because there decoding costs more than memory."""

    def __init__(self, q, parts, bias=None):
        super().__init__()
        self.fmt, self.shape, self.parts = q.fmt, q.shape, dict(parts)
        for name in ("codes", "scale", "global_scale"):
            self.register_buffer(name, getattr(q, name))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.cpu_weight = None

    @property
    def q(self):
        return Quantized(self.fmt, self.shape, self.codes, self.scale, self.global_scale)

    def forward(self, x):
        if x.is_cuda:
            y = marlin_triton.matmul(x, self.q)
            return y if self.bias is None else y + self.bias
        if self.cpu_weight is None or self.cpu_weight.dtype != x.dtype:
            self.cpu_weight = dequantize(self.q).to(x.dtype)
        return F.linear(x, self.cpu_weight, self.bias)


def load_linear(source, path, m, config, quant, dtype, device):
    """The QuantLinear of the fused projection at `path` (a meta model.Linear `m` tells its shape), read from `source`."""
    weight, bias = read_linear(source, path, m, dtype, device)
    return QuantLinear(quantize(weight, quant, path), m.parts, bias)
