"""
Four-bit weights: the format, rounding to it, the quantized linear, and AWQ's better scales.

NVFP4, the format of the paper, bit by bit. A weight becomes an E2M1 code: sign, two exponent bits,
one mantissa bit:

    code    0    1    2    3    4    5    6    7        (8..15: the same, negative)
    value   0   0.5   1   1.5   2    3    4    6

16 neighbours along the input dimension K share one E4M3 scale (8 bits, largest value 448), and the
whole tensor has one float32 scale on top, so a weight costs 4 + 8/16 = 4.5 bits:

    global  = max|w| / (6 * 448)                  the largest block scale is then exactly 448
    scale_b = e4m3(max|w_b| / 6 / global)         per block b
    code    = e2m1(w / (scale_b * global))        round to nearest, ties to even, saturating at 6
    w_hat   = value[code] * scale_b * global

A worked example: in a tensor with max|w| = 1.344, global = 1.344/2688 = 5e-4. A block with
max|w| = 0.09 gets 0.09/6/5e-4 = 30, which E4M3 holds exactly. Its weight 0.04 is 0.04/(30 * 5e-4) =
2.67 on the grid, nearest value 3, code 5; it comes back as 3 * 30 * 5e-4 = 0.045.

MXFP4 has the same values, blocks of 32 and a power-of-two scale (E8M0: a bare exponent byte): 4.25
bits. NF4 (QLoRA) looks codes up in 16 quantiles of a normal distribution, in blocks of 64 with a
float32 absmax, without double quantization: 4.5 bits. Embeddings, lm_head, norms, biases and
activations stay in 16 bits.

In memory, and in checkpoints, two codes share a byte: the even column in the low four bits.

    byte      0      1      2
    column   1 0    3 2    5 4        (high four bits, low four bits)

AWQ (Lin et al., arXiv 2306.00978), at the end of this file, chooses better scales with calibration
text. Your own format is one more row of FORMATS: 16 ascending values, and a float32 scale for each
16, 32, 64 or 128 weights, as in lab/ideas/int4.py.

    q = quantize(w, "nvfp4"); w_hat = dequantize(q)
    python nvfp4.py --model Qwen/Qwen2.5-3B-Instruct --fmt nvfp4 --out qwen-3b-nvfp4/

Shapes: N rows (outputs), K columns (inputs), K/block scales a row. AWQ: B sequences, T tokens, C
hidden, H query heads, Hkv kv heads, D head size, G = H / Hkv.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

from plumbing import command

import torch
import torch.nn as nn
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
    others they are E2M1's. ValueError for a block or values that the kernels cannot decode."""

    block: int
    scale_dtype: torch.dtype
    values: tuple

    def __post_init__(self):
        want = tuple(sorted({*self.codebook})) if self.codebook else E2M1
        good = self.values == want and len(want) == 16 and all(map(math.isfinite, want))
        if self.block not in (16, 32, 64, 128) or not good or max(want) <= 0:
            raise ValueError(f"{self}: a block has 16, 32, 64 or 128 columns, a codebook float32 "
                             "scales and 16 ascending values, all finite, the last above 0")

    @property
    def codebook(self):
        """The values if codes are looked up, the last one being a block's absmax; None for E2M1."""
        return self.values if self.scale_dtype == torch.float32 else None


FORMATS = {
    "nvfp4": Format(16, torch.float8_e4m3fn, E2M1),
    "mxfp4": Format(32, torch.uint8, E2M1),
    "nf4": Format(64, torch.float32, NF4),
}
PORTION = 1 << 25  # weights rounded at a time: temporaries take several times a projection's memory


@dataclass
class Quantized:
    """One quantized weight (N, K): codes (N, K/2) uint8, two a byte; scale (N, K/block) in its
    stored type; global_scale (N,) float32: the same number in every row of a tensor, but the parts
    of a fused projection may differ."""

    fmt: str
    shape: tuple
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor

    @property
    def format(self):
        return FORMATS[self.fmt]

    def dequantize(self):
        """w_hat (N, K) float32: value[code] * block scale (exact for E2M1) * global scale."""
        values = torch.tensor(self.format.values, device=self.codes.device)
        w = values[unpack(self.codes).int()]  # (N, K)
        w = w.unflatten(1, (-1, self.format.block)) * scale_value(self.scale, self.fmt)[..., None]
        return w.flatten(1) * self.global_scale[:, None]


# ---- rounding


def quantize(w, fmt="nvfp4", name="weight"):
    """Round w (N, K), any float dtype, to `fmt` -> Quantized. ValueError if K is not a multiple of
    the block, or w is not finite."""
    return encode(w, fmt, *block_scales(w, fmt, name))


def dequantize(q):
    """The inverse of quantize: w_hat (N, K) float32."""
    return q.dequantize()


def block_scales(w, fmt, name="weight"):
    """(scale (N, K/block) in its stored type, global_scale (N,) float32) of w (N, K), as
    round-to-nearest uses them."""
    # the kernels know the formats with small scales by these names
    assert fmt in ("nvfp4", "mxfp4") or FORMATS[fmt].codebook, f"{fmt}: needs a codebook"
    (N, K), block = w.shape, FORMATS[fmt].block
    if K % block:
        raise ValueError(f"{name}: K = {K} is not divisible by {fmt}'s block of {block}; "
                         "choose another --quant")
    # NaN and inf come through; the abs is for blocks of zeros, whose maximum may be -0
    low, high = w.detach().reshape(N, K // block, block).aminmax(dim=-1)
    amax = torch.maximum(-low, high).abs().float()  # (N, K/block)
    if not torch.isfinite(amax).all():
        raise ValueError(f"{name}: the weight holds NaN or inf; check the checkpoint")
    one = torch.ones(N, device=w.device)
    if book := FORMATS[fmt].codebook:
        return amax / book[-1], one
    if fmt == "mxfp4":  # OCP: 2^(floor(log2 amax) - 2), 2 the exponent of E2M1's largest value
        _, exponent = torch.frexp(amax)  # amax = m * 2^exponent with m in [0.5, 1)
        return torch.where(amax > 0, exponent - 3 + 127, 1).clamp(min=1).to(torch.uint8), one
    # The floor keeps 1/global finite when a whole tensor is (almost) zero. Checkpoints store the
    # reciprocal; taking it twice makes global a number whose reciprocal leads back to it, so that
    # saving and loading changes no bit.
    g = 1 / (1 / (amax.max() / (6 * 448)).clamp(min=torch.finfo(torch.float32).tiny))
    return (amax / 6 / g).to(torch.float8_e4m3fn), one * g  # the cast rounds to nearest even


def encode(w, fmt, scale, global_scale):
    """w (N, K) rounded to the grid of given scales (as from block_scales) -> Quantized."""
    step = max(1, PORTION // w.shape[1])
    portions = zip(w.split(step), scale.split(step), global_scale.split(step), strict=True)
    codes = [pack(nearest(rows, fmt, s, g)) for rows, s, g in portions]
    return Quantized(fmt, tuple(w.shape), torch.cat(codes), scale, global_scale)


def nearest(w, fmt, scale, global_scale):
    """uint8 codes (N, K) of the values nearest to w (N, K) on the grid of these scales."""
    block = FORMATS[fmt].block
    w = w.detach().float().reshape(len(w), -1, block)  # (N, K/block, block)
    step = (scale_value(scale, fmt) * global_scale[:, None])[..., None]  # (N, K/block, 1)
    # a scale of 0 (zeros, or too small for its type): the block becomes zeros, not w / 0
    x = torch.where(step > 0, w / step, 0).flatten(1)  # (N, K)
    if not (book := FORMATS[fmt].codebook):
        return round_e2m1(x)
    table = torch.tensor(book, device=x.device)  # ascending
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8)


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
    for midpoint, up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5, 0)):
        code += (a >= midpoint) if up else (a > midpoint)
    return code + ((x < 0) & (code > 0)).to(torch.uint8) * 8


def pack(codes):
    """Codes (N, K), one uint8 each in 0..15 -> (N, K/2), the even column in the low four bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed):
    """The inverse of pack: (N, K/2) -> codes (N, K) uint8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)  # (N, K/2, 2) -> (N, K)


# ---- the quantized linear


class QuantLinear(nn.Module):
    """model.Linear with its weight in four bits: y = x w_hat^T + b; see there for the interface.

    On the GPU codes are decoded in marlin_triton.py's kernel; on the CPU one dequantized copy is
    cached, because decoding costs more there than memory does."""

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
        return self.q.dequantize()

    def weight_in(self, dtype):
        # what it is a copy of: a noise of your own may be written to the scales
        source = dtype, [(t.data_ptr(), t._version) for t in self._buffers.values()]
        if self.copy is None or self.copy[0] != source:
            self.copy = source, self.dense().to(dtype)
        return self.copy[1]

    def forward(self, x):
        if not x.is_cuda:
            return F.linear(x, self.weight_in(x.dtype), self.bias)
        import marlin_triton  # needs Triton, which the CPU does without

        y = marlin_triton.matmul(x, self.q)
        return y if self.bias is None else y + self.bias


# ---- AWQ: activation-aware scales
#
# Rounding errors of a weight column are multiplied by that input channel's activations, which are
# large in few channels. AWQ scales the columns up where activations are large, W diag(s), and the
# activations down, diag(s)^-1 x, before rounding. The second factor is folded into whatever makes
# x, so that the model stays the same function and gets no new operation:
#
#     q,k,v   <- input_layernorm's weight
#     o       <- the v rows of qkv (one s for all heads that share a kv head)
#     gate,up <- post_attention_layernorm's weight
#     down    <- the up rows of gate_up
#
# s = mean|x|^a, normalised; a is the value on a grid in [0, 1] with the least output error
# || X (Q(W s) / s - W)^T ||^2 on calibration text. a = 0 is s = 1, plain rounding. Then each
# block's scale is searched for among its neighbours (AWQ calls its form of this weight clipping):
# the largest weight need not sit on the grid's end, if the other 15 gain by it. The error needs no
# stored activations: with H = X^T X it is sum((D H) * D), D = Q(W s) / s - W.
#
# AQN's noise is added to the folded norm weights, w / s: it is then relative to those.

GRID = 20  # exponents tried: 0, 1/20, ..., 1
FINALISTS = 3  # exponents whose block scales are searched, besides 0
BATCH = 8  # calibration sequences that go through a block together


class Stats:
    """H = X^T X / n (K, K) and mean|x| (K,) of a linear's inputs: `gather`'s forward pre-hook."""

    def __init__(self, K, device):
        self.H, self.mean = torch.zeros(K, K, device=device), torch.zeros(K, device=device)

    def __call__(self, module, args):
        x = args[0].reshape(-1, self.mean.numel()).float()  # (B*T, K)
        self.H += x.T @ x  # (K, B*T) @ (B*T, K)
        self.mean += x.abs().sum(0)


def output_error(D, H):
    """sum over rows of d H d^T: the squared output error of a weight error D (N, K), for inputs
    with X^T X = H (K, K)."""
    return ((D @ H) * D).sum().item()  # (N, K) @ (K, K)


def neighbours(scale, fmt):
    """Block scales near `scale`, in the stored type: what `search_blocks` tries."""
    if FORMATS[fmt].codebook:
        return [scale * f for f in (0.75, 0.8, 0.84, 0.88, 0.91, 0.94, 0.97, 1.03, 1.06, 1.1)]
    # neighbouring bytes are neighbouring values: E4M3 has eight to an octave
    byte = scale_bits(scale).int()
    top, low, high = (254, -1, 1) if fmt == "mxfp4" else (126, -6, 8)
    return [(byte + d).clamp(1, top).to(torch.uint8).view(scale.dtype)
            for d in range(low, high + 1) if d]


def search_blocks(w, fmt, scale, global_scale, H):
    """The block scales (N, K/block), for each block the one with the least output error among
    `scale` and its neighbours."""
    (N, K), b = w.shape, FORMATS[fmt].block
    diagonal = torch.stack([H[i : i + b, i : i + b] for i in range(0, K, b)])  # (K/b, b, b)

    def errors(s):
        d = encode(w, fmt, s, global_scale).dequantize() - w
        d = d.view(N, K // b, b).transpose(0, 1)  # (K/b, N, b)
        return ((d @ diagonal) * d).sum(-1).T  # (N, K/b)

    best, least = scale.clone(), errors(scale)
    for s in neighbours(scale, fmt):
        e = errors(s)
        better = e < least
        least = torch.where(better, e, least)
        scale_bits(best)[better] = scale_bits(s)[better]
    return best


class Rounded(NamedTuple):
    """A linear rounded with scales s = mean|x|^exponent (K,) of its input channels. Output errors
    are relative to || X W^T ||^2: `awq` this one's, `rtn` plain rounding's."""

    awq: float
    rtn: float
    exponent: float
    s: torch.Tensor
    q: Quantized


def search(w, H, magnitude, fmt, exact=lambda s: s, divide=None, scaled=True):
    """The Rounded of a linear with the least error, among exponents and block scales.

    w (N, K) float32, H (K, K), magnitude (K,) = mean|x| (already shared over tied channels), exact:
    s -> the s that folding realises exactly, divide (N,): what w's rows will be divided by, because
    they feed a scaled consumer. scaled False: block scales alone are searched."""
    divide = torch.ones(len(w), 1, device=w.device) if divide is None else divide[:, None]
    power = output_error(w, H) or 1.0
    rtn = output_error(quantize(w, fmt).dequantize() - w, H) / power

    def attempt(exponent, s, blocks=False):
        wanted = w * s / divide
        scale, g = block_scales(wanted, fmt)
        if blocks:
            scale = search_blocks(wanted, fmt, scale, g, H / s / s[:, None])
        q = encode(wanted, fmt, scale, g)
        error = output_error(q.dequantize() * divide / s - w, H)
        return Rounded(error / power, rtn, exponent, s, q)

    trials = []
    for i in range(1, GRID + 1) if scaled else ():
        s = magnitude.clamp(min=1e-8) ** (i / GRID)
        trials.append(attempt(i / GRID, exact(s / (s.max() * s.min()).sqrt())))
        trials = sorted(trials, key=lambda t: t.awq)[:FINALISTS]  # each holds a whole weight
    # a search of blocks rounds up to 15 times, and evens out much of the difference between
    # exponents: it is done only for the best of them, and 0
    trials = [attempt(0.0, torch.ones_like(magnitude)), *trials]
    trials += [attempt(t.exponent, t.s, blocks=True) for t in trials]
    return min(trials, key=lambda t: t.awq)


def quantize_block(block, stats, config, fmt):
    """Replace the four linears of `block` (model.Block, 16 bits) by QuantLinears; fold its norms.

    stats: {name: Stats} of its linears. Returns a row of the report for each linear: {"linear",
    "exponent", "rtn", "awq"}."""
    H, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # v's rows feed o: D rows of a kv head D inputs of each of its G heads. A row of up feeds one
    # input of down
    return [*quantize_pair(block.attn, ("qkv_proj", "o_proj"), block.input_layernorm,
                           (H + Hkv) * D, H // Hkv, D, stats, fmt),
            *quantize_pair(block.mlp, ("gate_up_proj", "down_proj"), block.post_attention_layernorm,
                           config.intermediate_size, 1, 1, stats, fmt)]


def quantize_pair(owner, names, norm, first_row, G, D, stats, fmt):
    """Quantize two linears of `owner`: a producer behind `norm`, and the consumer that its rows
    from first_row on feed, D rows D inputs of each of G heads."""
    producer, consumer = (getattr(owner, name) for name in names)
    inputs, between = (stats[name] for name in names)
    # the consumer's scales divide the producer's rows: heads that read the same rows share a scale
    mean = between.mean.view(-1, G, D).mean(1, keepdim=True).expand(-1, G, D).flatten()  # (H*D,)
    for scaled in True, False:  # False if those scales make the producer worse than plain
        consumed = search(consumer.dense(), between.H, mean, fmt, scaled=scaled)
        divide = torch.ones(producer.shape[0], device=mean.device)
        divide[first_row:] = consumed.s.view(-1, G, D).mean(1).flatten()  # the G heads' are equal
        produced = search(producer.dense(), inputs.H, inputs.mean, fmt,
                          lambda s: fold(norm.weight, s)[1], divide)
        if produced.awq <= produced.rtn:
            break

    norm.weight.data, _ = fold(norm.weight, produced.s)
    if (bias := producer.bias) is not None:
        bias = (bias.float() / divide).to(bias.dtype)
    setattr(owner, names[0], QuantLinear(produced.q, producer.parts, bias))
    setattr(owner, names[1], QuantLinear(consumed.q, consumer.parts, consumer.bias))
    return [{"linear": name, "exponent": r.exponent, "rtn": r.rtn, "awq": r.awq}
            for name, r in zip(names, (produced, consumed), strict=True)]


def fold(weight, s):
    """A norm's weight (C,) / s in its dtype, unchanged where that is 0 or infinite; and the s that
    it was divided by, rounding included."""
    w = (weight / s).to(weight.dtype)
    w = torch.where((w != 0) & torch.isfinite(w), w, weight)
    return w, torch.where(weight == 0, 1.0, weight.float() / w.float())


@torch.no_grad()
def calibrated(model, pieces, fmt, ids, device, report=None):
    """Quantize the blocks of a model as they arrive in `pieces` (model.stream), and yield these;
    the rows of quantize_block's report go to the list `report`.

    ids (B, T): calibration text. Its hidden states go through the original blocks, so a layer is
    calibrated on what the 16-bit model feeds it, and one pass a layer is enough."""
    rope = model.rope(torch.arange(ids.shape[1], device=device)[None])
    for path in pieces:
        if path == "embed":
            x = model.embed(ids.to(device))  # (B, T, C)
        if path.startswith("layers."):
            block = model.get_submodule(path)
            x = x.to(block.attn.qkv_proj.weight.dtype)  # the embedding may be stored in another
            stats = gather(block, x, rope)
            rows = quantize_block(block, stats, model.config, fmt)
            if report is not None:
                report += rows
            del block, stats  # so that the caller can free it
        yield path


def gather(block, x, rope):
    """{linear: Stats} of a block's inputs; x (B, T, C) goes through it, in place."""
    stats, hooks = {}, []
    for path, linear in block.named_modules():
        if path.endswith("_proj"):
            name = path.rpartition(".")[2]
            stats[name] = Stats(linear.shape[1], x.device)
            hooks.append(linear.register_forward_pre_hook(stats[name]))
    for sequences in x.split(BATCH):
        sequences.copy_(block(sequences, *rope))
    for hook in hooks:
        hook.remove()
    for s in stats.values():
        s.H /= x.shape[0] * x.shape[1]
        s.mean /= x.shape[0] * x.shape[1]
    return stats


if __name__ == "__main__":
    command.become("lab/convert.py", "quantize")
