"""
Checkpoints out: sharded safetensors in Hugging Face layout, and how four-bit weights lie in them (reading included).

NVFP4 and MXFP4 are written as compressed-tensors does it (formats `nvfp4-pack-quantized` and `mxfp4-pack-quantized`, weights
only, "W4A16"), so that other engines can serve them. Each original projection, q, k and v apart, becomes

    weight_packed        uint8 (N, K/2)      two E2M1 codes a byte, the even column in the low nibble
    weight_scale         NVFP4: float8_e4m3fn (N, K/16); MXFP4: uint8 (N, K/32), the exponent + 127
    weight_global_scale  NVFP4 only: float32 (1,), the *reciprocal*: w_hat = value[code] * weight_scale / weight_global_scale

and config.json gets a `quantization_config`; lm_head and embeddings stay in 16 bits. compressed-tensors has no NF4, so that
layout is our own (quant_method `qerl`, which makes other tools refuse rather than misread): weight_packed as above with codebook
indices, weight_scale float32 (N, K/64), the absmax of a block.

Left out: quantized activations (W4A4) and KV caches; asymmetric zero points; bitsandbytes' NF4 layout.

    with Writer("out/", folder, fmt="nvfp4") as w:
        for name, tensor in module_tensors(path, module): w.add(name, tensor)

Shapes: N rows of one projection, K columns.
"""
import json
import shutil
from pathlib import Path

import torch
import torch.nn as nn
from safetensors.torch import save_file

import marlin_triton
from model import RMSNorm, prefix

PACKED = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "nf4": "nf4-pack-quantized"}
SCALE = {"nvfp4": (16, torch.float8_e4m3fn), "mxfp4": (32, torch.uint8), "nf4": (64, torch.float32)}  # block, stored type
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt")


# ---- what config.json says


def quantization_config(fmt):
    """The `quantization_config` of a checkpoint whose projections are in `fmt`."""
    block, dtype = SCALE[fmt]
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": block, "dynamic": False,
               "strategy": "tensor_group" if fmt == "nvfp4" else "group", "scale_dtype": str(dtype)}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "qerl" if fmt == "nf4" else "compressed-tensors", "format": PACKED[fmt], "ignore": ["lm_head"],
            "quantization_status": "compressed", "kv_cache_scheme": None, "config_groups": {"group_0": group}}


def packed_format(raw, where):
    """The format, nvfp4 | mxfp4 | nf4, that a `quantization_config` declares; ValueError for what cannot be honoured."""

    def refuse(what):
        raise ValueError(f"{where}/config.json: quantization_config has {what}; checkpoints with {', '.join(PACKED.values())} "
                         "and weights only (W4A16) can be read")

    groups = list((raw.get("config_groups") or {}).values())
    formats = {raw.get("format"), *(g.get("format") for g in groups)} - {None}
    if raw.get("quant_method") not in ("compressed-tensors", "qerl"):
        refuse(f"quant_method {raw.get('quant_method')!r}")
    if len(formats) != 1 or not formats <= set(PACKED.values()):
        refuse(f"format {' and '.join(sorted(formats)) or None}")
    fmt = next(f for f, name in PACKED.items() if name in formats)
    if len(groups) != 1:
        refuse(f"{len(groups)} config_groups")
    weights, block = groups[0].get("weights") or {}, SCALE[fmt][0]
    for field, want in (("num_bits", 4), ("type", "float"), ("group_size", block), ("symmetric", True)):
        if weights.get(field, want) != want:
            refuse(f"{field} {weights[field]!r}")
    for what in ("input_activations", "output_activations"):
        if groups[0].get(what):
            refuse(what)
    if raw.get("kv_cache_scheme"):
        refuse("kv_cache_scheme")
    return fmt


# ---- one projection


def packed_tensors(q, parts, where):
    """Yields (name, tensor) for each projection stacked in the quantized weight q: its rows as they lie in a checkpoint."""
    codes, at = marlin_triton.unpack(q.codes, q.shape[1]), 0  # (N, K)
    codes = codes[:, 0::2] | codes[:, 1::2] << 4  # (N, K/2)
    for part, n in parts.items():
        rows, name = slice(at, at + n), f"{where}.{part}.weight"
        at += n
        yield f"{name}_packed", codes[rows]
        yield f"{name}_scale", q.scale[rows]
        if q.fmt == "nvfp4":
            yield f"{name}_global_scale", 1 / q.global_scale[rows][:1]


def read_packed(source, path, m, fmt, device):
    """(codes, scale, global_scale) of the fused projection at `path` (a meta model.Linear `m` tells its shape), checked."""
    where, K, (block, dtype) = prefix(path), m.weight.shape[1], SCALE[fmt]
    if K % block:
        raise ValueError(f"{source.folder}: {path} has K = {K}, not divisible by {fmt}'s block of {block}")
    parts = []
    for part, n in m.parts.items():
        name = f"{where}.{part}.weight"
        codes = stored(source, f"{name}_packed", (n, K // 2), torch.uint8, device)
        scale = stored(source, f"{name}_scale", (n, K // block), dtype, device)
        raw = scale.view(torch.uint8) if fmt != "nf4" else scale
        if not ((raw < 127).all() if fmt == "nvfp4" else (raw < 255).all() if fmt == "mxfp4" else (raw >= 0).all()):
            raise ValueError(f"{source.folder}: {name}_scale holds negative numbers or NaN; the checkpoint is damaged")
        top = torch.ones((), device=device)
        if fmt == "nvfp4":
            name = f"{name}_global_scale"
            shape = () if name in source and source.get(name).dim() == 0 else (1,)
            top = 1 / stored(source, name, shape, torch.float32, device).squeeze()
            if not (torch.isfinite(top) and top > 0):
                raise ValueError(f"{source.folder}: {name} is not a positive number; the checkpoint is damaged")
        codes = torch.stack([codes & 15, codes >> 4], -1).view(n, K)  # (n, K/2, 2) -> (n, K)
        parts.append((codes, raw, top.expand(n)))
    codes, raw, top = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return marlin_triton.pack(codes), raw.view(dtype), top


def stored(source, name, shape, dtype, device):
    """source.get that also insists on the stored type: casting codes or scales would change them."""
    t = source.get(name, shape, device=device)
    if t.dtype != dtype:
        raise ValueError(f"{source.folder}: {name} is stored as {t.dtype}, config.json asks for {dtype}")
    return t


def module_tensors(path, m):
    """Yields (name, tensor) of one module of the model as they lie in a checkpoint; containers yield nothing."""
    if isinstance(m, RMSNorm):
        yield f"model.{path}.weight", m.weight
    elif isinstance(m, nn.Embedding):
        yield "model.embed_tokens.weight", m.weight
    elif path == "lm_head":
        yield "lm_head.weight", m.weight
    elif hasattr(m, "parts"):
        rows = list(m.parts.values())
        if hasattr(m, "q"):
            yield from packed_tensors(m.q, m.parts, prefix(path))
        else:
            for part, w in zip(m.parts, m.weight.split(rows), strict=True):
                yield f"{prefix(path)}.{part}.weight", w
        if m.bias is not None:
            for part, b in zip(m.parts, m.bias.split(rows), strict=True):
                yield f"{prefix(path)}.{part}.bias", b


# ---- files


class Writer:
    """A checkpoint folder that appears whole or not at all: everything goes to OUT.partial, config.json last, then the folder is
    renamed; an exception removes it. `add` holds one shard in host memory. Tokenizer and generation files are copied from
    `folder`; fmt (or None for 16 bits) goes into config.json; `self.report`, if set, becomes quantization.json."""

    def __init__(self, out, folder, fmt=None, shard_bytes=2 << 30):
        self.out, self.folder, self.fmt, self.shard_bytes = Path(out), Path(folder), fmt, shard_bytes
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.shard, self.size, self.total, self.shards, self.report = {}, 0, 0, [], None

    def __enter__(self):
        if self.out.exists():
            raise ValueError(f"--out {self.out}: exists already; remove it or choose another name")
        shutil.rmtree(self.partial, ignore_errors=True)  # what an earlier run that was killed had left
        self.partial.mkdir(parents=True)
        return self

    def add(self, name, tensor):
        t = tensor.detach().to("cpu").contiguous()
        t = t.clone() if t.untyped_storage().nbytes() > t.nbytes else t  # a view would keep the whole fused weight in memory
        if self.size and self.size + t.nbytes > self.shard_bytes:
            self.flush()
        self.shard[name] = t
        self.size += t.nbytes

    def flush(self):
        save_file(self.shard, self.partial / f"shard-{len(self.shards)}", metadata={"format": "pt"})
        self.shards.append(list(self.shard))
        self.total, self.shard, self.size = self.total + self.size, {}, 0

    def __exit__(self, kind, error, trace):
        if kind is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        if self.shard:
            self.flush()
        where, n = {}, len(self.shards)
        for i, names in enumerate(self.shards):
            file = "model.safetensors" if n == 1 else f"model-{i + 1:05d}-of-{n:05d}.safetensors"
            (self.partial / f"shard-{i}").rename(self.partial / file)
            where |= dict.fromkeys(names, file)
        if n > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
            (self.partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        for name in BESIDE:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, self.partial / name)
        if self.report is not None:
            (self.partial / "quantization.json").write_text(json.dumps(self.report, indent=1) + "\n")
        raw = json.loads((self.folder / "config.json").read_text())
        raw.pop("quantization_config", None)
        if self.fmt:
            raw["quantization_config"] = quantization_config(self.fmt)
        config = self.partial / "config.json"
        config.write_text(json.dumps(raw, indent=2) + "\n")
        for file in self.partial.glob("*.safetensors"):
            file.chmod(config.stat().st_mode)  # safetensors writes for the owner alone; a server may be another user
        self.partial.rename(self.out)
