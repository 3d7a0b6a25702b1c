"""
Four-bit weights: NVFP4, MXFP4 and NF4 explained, and the quantized linear.

NVFP4, the format of the paper, bit by bit. A weight becomes an E2M1 code: sign, two exponent bits,
one mantissa bit,

    code    0    1    2    3    4    5    6    7        (8..15: the same, negative)
    value   0   0.5   1   1.5   2    3    4    6

16 neighbours along the input dimension K share one E4M3 scale (8 bits, largest value 448), and the
whole tensor has one float32 scale on top, so a weight costs 4 + 8/16 = 4.5 bits:

    global  = max|w| / (6 * 448)                  the largest block scale is then exactly 448
    scale_b = e4m3(max|w_b| / 6 / global)         per block b
    code    = e2m1(w / (scale_b * global))        round to nearest, ties to even, saturating at 6
    w_hat   = value[code] * scale_b * global

One number worked out: in a tensor with max|w| = 1.344, global = 1.344/2688 = 5e-4. A block with
max|w| = 0.09 gets 0.09/6/5e-4 = 30, which E4M3 holds exactly. Its weight 0.04 is 0.04/(30 * 5e-4) =
2.67 on the grid, nearest value 3, code 5; it comes back as 3 * 30 * 5e-4 = 0.045.

MXFP4 has the same values, blocks of 32 and a power-of-two scale (E8M0: a bare exponent byte): 4.25
bits. NF4 (QLoRA) looks codes up in 16 quantiles of a normal, blocks of 64 with a float32 absmax,
without double quantization: 4.5 bits. Embeddings, lm_head, norms and biases stay in 16 bits.

The arithmetic is in plumbing/formats.py, which also describes how codes lie in memory; a checkpoint
has them two to a byte (plumbing/checkpoint.py). lab/awq.py chooses better scales with
calibration text, and lab/convert.py has the commands below.

Left out: quantized activations, and NF4's double quantization.

    python nvfp4.py --model Qwen/Qwen2.5-3B-Instruct --fmt nvfp4 --out qwen-3b-nvfp4/
    python nvfp4.py --plan Qwen/Qwen2.5-32B-Instruct

Shapes: N rows (outputs), K columns (inputs), K/block scales a row.
"""
from plumbing.formats import FORMATS, Quantized, dequantize, quantize

import torch.nn as nn
import torch.nn.functional as F

__all__ = ["FORMATS", "QuantLinear", "Quantized", "dequantize", "quantize"]


class QuantLinear(nn.Module):
    """model.Linear with its weight in four bits: y = x w_hat^T + b; see there for the interface.

    On the GPU codes are decoded inside the GEMM; on the CPU one dequantized copy is cached,
    because decoding costs more there than memory does."""

    adapter = None

    def __init__(self, q, parts, bias=None):
        super().__init__()
        self.fmt, self.shape, self.parts = q.fmt, q.shape, dict(parts)
        for name in ("codes", "scale", "global_scale"):
            self.register_buffer(name, getattr(q, name))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.copy = None

    @property
    def base(self):
        return self

    @property
    def q(self):
        return Quantized(self.fmt, self.shape, self.codes, self.scale, self.global_scale)

    def dense(self):
        return dequantize(self.q)

    def weight_in(self, dtype):
        if self.copy is None or self.copy.dtype != dtype:
            self.copy = self.dense().to(dtype)
        return self.copy

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.copy = None

    def forward(self, x):
        if not x.is_cuda:
            return F.linear(x, self.weight_in(x.dtype), self.bias)
        import marlin_triton  # needs Triton, which the CPU does without

        y = marlin_triton.matmul(x, self.q)
        return y if self.bias is None else y + self.bias


if __name__ == "__main__":
    from lab.convert import quantize_command

    quantize_command()
