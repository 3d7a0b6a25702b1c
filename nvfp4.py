"""
Four-bit weights: NVFP4, MXFP4 and NF4, the quantized linear, reading one in while a checkpoint loads, and the command that
writes a quantized checkpoint.

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
Embeddings, lm_head, norms and biases stay in 16 bits. In memory codes lie in the order the GEMM wants (marlin_triton.pack), in
a checkpoint two a byte, low nibble first (checkpoint.py). Choosing better scales with calibration text is awq.py.

Left out: quantized activations, and NF4's double quantization.

    python nvfp4.py --model Qwen/Qwen2.5-3B-Instruct --fmt nvfp4 --out qwen-3b-nvfp4/
    python nvfp4.py --plan Qwen/Qwen2.5-32B-Instruct

Shapes: N rows (outputs), K columns (inputs), K/block scales a row.
"""
import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import checkpoint
import marlin_triton
from marlin_triton import BLOCK, scale_value
from model import Checkpoint, Config, Linear, Qwen2, fetch, fill, finish, place, prefix, read_bias, read_linear

FORMATS = tuple(BLOCK)
CHUNK = 1 << 25  # weights that encode rounds at a time


@dataclass
class Quantized:
    """One quantized weight (N, K): packed codes, block scales in their stored type, one float32 global scale a row.

    codes (N, K/2) uint8, K rounded up to what the kernel's order needs; scale (N, K/block): float8_e4m3fn | uint8 exponent,
    value 2^(s-127) | float32 absmax;
    global_scale (N,) float32: the same number in every row of a tensor, but the parts of a fused group may differ."""

    fmt: str
    shape: tuple
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor


def quantize(w, fmt="nvfp4", name="weight"):
    """Round w (N, K), any float dtype, to `fmt`. ValueError if K is no multiple of the block, or w is not finite."""
    return encode(w, fmt, *block_scales(w, fmt, name))


def block_scales(w, fmt, name="weight"):
    """(scale (N, K/block) in its stored type, global_scale (N,) float32) of w (N, K), as round-to-nearest takes them."""
    if fmt not in BLOCK:
        raise ValueError(f"--quant {fmt}: unknown format, choose from none, {', '.join(FORMATS)}")
    N, K = w.shape
    if K % BLOCK[fmt]:
        raise ValueError(f"{name}: K = {K} is not divisible by {fmt}'s block of {BLOCK[fmt]}; choose another --quant")
    low, high = w.detach().reshape(N, K // BLOCK[fmt], BLOCK[fmt]).aminmax(dim=-1)  # NaN and inf come through
    amax = torch.maximum(-low, high).abs().float()  # (N, K/block); the abs is for blocks of zeros, whose maximum may be -0
    if not torch.isfinite(amax).all():
        raise ValueError(f"{name}: the weight holds NaN or inf, it cannot be quantized; check the checkpoint")
    one = torch.ones(N, device=w.device)
    if fmt == "nf4":
        return amax, one
    if fmt == "mxfp4":  # the OCP rule: 2^(floor(log2 amax) - 2), 2 being the exponent of the largest E2M1 value
        _, exponent = torch.frexp(amax)  # amax = m * 2^exponent with m in [0.5, 1)
        return torch.where(amax > 0, exponent - 3 + 127, 1).clamp(1, 254).to(torch.uint8), one
    # the floor keeps 1/global finite when a whole tensor is (almost) zero. Checkpoints store the reciprocal; taking it twice
    # makes global a number whose reciprocal leads back to it, so that saving and loading changes no bit
    top = (amax.max() / (6 * 448)).clamp(min=torch.finfo(torch.float32).tiny)
    top = 1 / (1 / top)
    return (amax / 6 / top).clamp(max=448).to(torch.float8_e4m3fn), one * top  # the cast rounds to nearest even


def encode(w, fmt, scale, global_scale):
    """w (N, K) rounded to the grid of given scales (as from block_scales) -> Quantized. A few rows at a time: the
    temporaries are several times a chunk, and a 72B model's projection has 5e8 weights."""
    N, K = w.shape
    codes, rows = [], max(8, CHUNK // K // 8 * 8)  # packing interleaves 8 rows
    for i in range(0, N, rows):
        blocks = w[i : i + rows].detach().float().reshape(-1, K // BLOCK[fmt], BLOCK[fmt])  # (n, K/block, block)
        step = (scale_value(scale[i : i + rows], fmt) * global_scale[i : i + rows, None])[..., None]  # (n, K/block, 1)
        # a block whose scale is zero holds nothing that the scale's format can hold: its codes are 0, not 0/0
        x = torch.where(step > 0, blocks / step, 0).view(-1, K)
        codes.append(marlin_triton.pack(round_nf4(x) if fmt == "nf4" else round_e2m1(x)))
    return Quantized(fmt, (N, K), torch.cat(codes), scale, global_scale)


def snap(w, fmt, scale, global_scale):
    """w (N, K) rounded to the grid of given scales and back: dequantize(encode(...)) without the packing, float32."""
    N, K = w.shape
    out = torch.empty(N, K, device=w.device)
    table = torch.tensor(marlin_triton.NF4 if fmt == "nf4" else marlin_triton.E2M1, device=w.device)
    rows = max(1, CHUNK // K)
    for i in range(0, N, rows):
        step = scale_value(scale[i : i + rows], fmt)[..., None]  # (n, K/block, 1)
        g = global_scale[i : i + rows, None]
        blocks = w[i : i + rows].float().view(-1, K // BLOCK[fmt], BLOCK[fmt])  # (n, K/block, block)
        x = torch.where(step * g[..., None] > 0, blocks / (step * g[..., None]), 0)
        codes = round_nf4(x) if fmt == "nf4" else round_e2m1(x)
        out[i : i + rows] = (table[codes.int()] * step).view(-1, K) * g
    return out


def round_e2m1(x):
    """Codes (uint8) of the E2M1 values nearest to x, ties to the even mantissa, saturating at 6."""
    a, code = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    # each line is a midpoint of the grid; >= where the upper neighbour has the even mantissa (codes 2, 4, 6)
    for midpoint, ties_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (a >= midpoint) if ties_up else (a > midpoint)
    return code + ((x < 0) & (code > 0)).to(torch.uint8) * 8


def round_nf4(x):
    """Codes (uint8) of the NF4 codebook entries nearest to x, which lies in [-1, 1]."""
    table = torch.tensor(marlin_triton.NF4, device=x.device)
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def dequantize(q):
    """w_hat (N, K) float32 of a Quantized: value[code] * block scale, which is exact, * global scale."""
    return marlin_triton.plain(q)


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
    """The linear for the fused projection at `path` (a meta model.Linear `m` tells its shape), read from `source`: 16-bit weights
    are rounded to `quant`; in a checkpoint that is quantized already they are taken as they are. A projection that such a
    checkpoint left in 16 bits stays a model.Linear."""
    if not config.quantization:
        weight, bias = read_linear(source, path, m, dtype, device)
        return QuantLinear(quantize(weight, quant, path), m.parts, bias)
    fmt = checkpoint.packed_format(config.quantization, source.folder)
    if quant not in ("none", fmt):
        raise ValueError(f"--quant {quant}: {source.folder} is quantized to {fmt} already; use --quant {fmt}")
    if all(f"{prefix(path)}.{p}.weight" in source for p in m.parts):
        weight, bias = read_linear(source, path, m, dtype, device)
        with torch.device("meta"):
            plain = Linear(m.weight.shape[1], m.parts, bias is not None)
        plain.weight, plain.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
        return plain
    q = Quantized(fmt, tuple(m.weight.shape), *checkpoint.read_packed(source, path, m, fmt, device))
    return QuantLinear(q, m.parts, read_bias(source, path, m, dtype, device))


# ---- writing a quantized checkpoint


@torch.no_grad()
def rounded_blocks(model, source, device, fmt):
    """Fill the blocks of a meta `model` one after the other, rounded to nearest; yields (layer, rows of the report)."""
    for i in range(model.config.num_hidden_layers):
        fill(model, f"layers.{i}.", source, device, None, "none")
        rows = []
        for name, m in list(model.layers[i].named_modules()):
            if isinstance(m, Linear):
                q = quantize(m.weight, fmt, f"layers.{i}.{name}")
                error = (dequantize(q) - m.weight).norm() / m.weight.float().norm()
                rows.append({"linear": name.rsplit(".", 1)[-1], "weight_error": error.item()})
                model.layers[i].set_submodule(name, QuantLinear(q, m.parts, m.bias))
        yield i, rows


def convert(path_or_hub_id, out, fmt="nvfp4", device="cpu", use_awq=False, calib=None, sequences=128, length=512,
            shard_bytes=2 << 30):
    """Quantize a 16-bit checkpoint into the folder `out` (checkpoint.Writer); returns the report that is written with it.

    One block is on the device at a time, in the dtype it is stored in, and one shard of the output in host memory. ValueError
    for an `out` that exists, a checkpoint that is quantized already, and whatever `quantize` and `awq.calibration` refuse."""
    begin, folder = time.time(), fetch(path_or_hub_id)
    config, source = Config.read(folder), Checkpoint(folder)
    if config.quantization:
        raise ValueError(f"--model {folder}: quantized already; give the 16-bit checkpoint")
    with torch.device("meta"):
        model = Qwen2(config)
    with checkpoint.Writer(out, folder, fmt, shard_bytes) as writer:
        for part in ("embed", "norm", "lm_head"):
            fill(model, part, source, "cpu", None, "none")
            m = model.get_submodule(part)
            for name, t in checkpoint.module_tensors(part, m):
                if not (part == "lm_head" and config.tie_word_embeddings):
                    writer.add(name, t)
            if not use_awq:
                m.to("meta")  # written, and not needed again
        held_out, steps = None, rounded_blocks(model, source, device, fmt)
        if use_awq:
            import awq

            ids = awq.calibration(calib, folder, sequences + 16, length)
            kept = min(sequences, len(ids) * 7 // 8)
            if kept < 1:
                raise ValueError(f"--calib {calib}: gives one sequence of {length} tokens; one more is needed to test on")
            held_out = awq.HeldOut(model, ids[kept:], device)
            steps = awq.blocks(model, source, device, None, fmt, ids[:kept], held_out)
        report = {"format": fmt, "method": "AWQ" if use_awq else "round to nearest", "calibration": calib, "layers": []}
        for i, rows in tqdm(steps, fmt, config.num_hidden_layers, unit="layer"):
            report["layers"] += [{"layer": i, **row} for row in rows]
            for path, m in model.named_modules():
                if path.startswith(f"layers.{i}."):
                    for name, t in checkpoint.module_tensors(path, m):
                        writer.add(name, t)
            del m
            model.layers[i] = None  # the block is in the shard
        if held_out:
            report["calibration_tokens"] = ids[:kept].numel()
            report["perplexity"] = held_out.perplexity(model) | {"tokens": ids[kept:, 1:].numel()}
        finish(model, source)
        report["seconds"] = round(time.time() - begin, 1)
        report["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30 if str(device) != "cpu" else None
        writer.report = report
    return report


def parse_args(argv):
    p = argparse.ArgumentParser(description="Quantize a checkpoint to four bits, or count what each format would cost.",
                                allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", help="16-bit checkpoint folder or hub id")
    p.add_argument("--out", help="folder to write; must not exist")
    p.add_argument("--fmt", choices=FORMATS, default="nvfp4", help="number format")
    p.add_argument("--awq", action="store_true", help="choose scales by activations (awq.py) instead of plain rounding")
    p.add_argument("--calib", help="text for --awq: a .jsonl (question and answer, or text) or a text file "
                                   "(worked arithmetic problems)")
    p.add_argument("--sequences", type=int, default=128, help="calibration sequences, 16 more are held out")
    p.add_argument("--length", type=int, default=512, help="tokens in each")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="cuda where there is one")
    p.add_argument("--plan", metavar="MODEL", help="only print what a checkpoint, hub id or config.json costs in each format")
    p.add_argument("--rank", type=int, default=32, help="LoRA rank that --plan counts with")
    p.add_argument("--tokens", type=int, default=16384, help="micro-batch tokens that --plan counts with")
    args = p.parse_args(argv)
    if args.plan and (args.model or args.out):
        p.error("--plan: prints only; leave --model and --out out")
    if not args.plan and not (args.model and args.out):
        p.error("--model and --out are needed (or --plan)")
    if args.calib and not args.awq:
        p.error("--calib: plain rounding uses no text; add --awq")
    for name in ("sequences", "length", "rank", "tokens"):
        if getattr(args, name) < 1:
            p.error(f"--{name} {getattr(args, name)}: must be at least 1")
    return p, args


def main(argv=None):
    parser, args = parse_args(argv)
    try:
        if args.plan:
            import plan

            print(plan.table(Config.read(plan.config_of(args.plan)), args.rank, args.tokens))
            return
        device, _ = place(args.device)
        report = convert(args.model, args.out, args.fmt, device, args.awq, args.calib, args.sequences, args.length)
    except (ValueError, OSError) as e:
        parser.error(str(e))
    if "perplexity" in report:
        p = report["perplexity"]
        print(f"perplexity of {p['tokens']} held-out tokens: {p['before']:.4f} before, {p['after']:.4f} after")
    size = sum(f.stat().st_size for f in Path(args.out).glob("*.safetensors")) / 2**30
    peak = "" if report["peak_gpu_gib"] is None else f", {report['peak_gpu_gib']:.2f} GiB of GPU memory at most"
    print(f"{args.out}: {size:.2f} GiB in {report['seconds']} s{peak}; details in quantization.json")


if __name__ == "__main__":
    import nvfp4  # the module that awq.py imports too: one Quantized, one CHUNK

    nvfp4.main()
