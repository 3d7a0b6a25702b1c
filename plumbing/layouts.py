"""
Four-bit weights as files: how each tool stores them, a row of LAYOUTS for each.

Each original projection, q, k and v apart, is stored as codes (N, K/2), two a byte, scales of
blocks (N, K/block) and, in NVFP4, one scale of the whole tensor. The layouts differ in names, and

    compressed-tensors  the tensor's scale is stored as its reciprocal
    modelopt            it is stored as it is (NVIDIA's own checkpoints)
    bitsandbytes        NF4: blocks of the flattened matrix, the even column in the high nibble, and
                        absmax perhaps in 8 bits itself (double quantization)
    qerl                formats with a codebook of one's own: nobody else has a layout for them

This project writes compressed-tensors' layout, "W4A16", so that other engines can serve it, NF4 in
bitsandbytes', and qerl's for the rest. lm_head and embeddings stay in 16 bits. Reading is of
weights alone: activations and KV caches that a checkpoint wants in four or eight bits stay in 16.

Shapes: N rows of one projection, K columns.
"""
import json
from typing import NamedTuple

from plumbing.files import check, decode, parse_json

import torch


class Layout(NamedTuple):
    """What follows a projection's name: its codes, its block scales, its tensor's scale, if any.
    flat: bitsandbytes' blocks."""

    fmt: str
    codes: str = "weight_packed"
    scale: str = "weight_scale"
    top: str = ""
    reciprocal: bool = False
    flat: bool = False


# (quant_method, what the checkpoint calls its format) -> Layout
MODELOPT = Layout("nvfp4", "weight", "weight_scale", "weight_scale_2")
LAYOUTS = {
    ("compressed-tensors", "nvfp4-pack-quantized"):
        Layout("nvfp4", top="weight_global_scale", reciprocal=True),
    ("compressed-tensors", "mxfp4-pack-quantized"): Layout("mxfp4"),
    ("modelopt", "NVFP4"): MODELOPT,
    ("modelopt", "W4A16_NVFP4"): MODELOPT,
    ("bitsandbytes", "nf4"): Layout("nf4", "weight", "weight.absmax", flat=True),
}
OF_ACTIVATIONS = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale",
                  "v_scale")


# ---- config.json


def layout_of(raw, where, formats=None):
    """The Layout that a `quantization_config` declares. ValueError for what cannot be read, and
    for a format that is not in `formats`, nvfp4.FORMATS."""
    path = f"{where}/config.json: quantization_config"
    check(raw, path, {"config_groups": dict, "format": str, "quant_method": str, "quant_algo": str,
                      "bnb_4bit_quant_type": str})
    groups = [check(g, path, {"format": str, "weights": dict})
              for g in (raw.get("config_groups") or {}).values()]
    method = raw.get("quant_method")

    def refuse(what):
        raise ValueError(f"{path} has {what}, which cannot be read; NVFP4, MXFP4 and NF4 can, as "
                         "docs/guide.md lists them. Give the 16-bit checkpoint and --quant nvfp4: "
                         "it is rounded while it loads, in seconds")

    if method == "modelopt":
        kind = raw.get("quant_algo")
    elif method == "bitsandbytes":
        four = raw.get("load_in_4bit") or raw.get("_load_in_4bit")
        kind = raw.get("bnb_4bit_quant_type", "fp4") if four else "int8"
    else:
        found = {raw.get("format"), *(g.get("format") for g in groups)} - {None}
        kind = " and ".join(sorted(found)) or None
    fmt = (kind or "").removesuffix("-pack-quantized")
    foreign = fmt == kind or ("compressed-tensors", kind) in LAYOUTS
    own = Layout(fmt) if method == "qerl" and not foreign else None
    layout = LAYOUTS.get((method, kind), own)
    if layout is None or formats and layout.fmt not in formats:
        refuse(f"quant_method {method!r} with {kind!r}")
    if len(groups) != 1 and method in ("compressed-tensors", "qerl"):
        refuse(f"{len(groups)} config_groups")
    block = formats and formats[layout.fmt].block
    for weights in [g.get("weights") or {} for g in groups] + [raw]:
        for field, want in (("num_bits", 4), ("type", "float"), ("group_size", block),
                            ("symmetric", True)):
            if weights.get(field, want) != (want or weights.get(field)):
                refuse(f"{field} {weights[field]!r}")
    return layout


def quantizes_activations(raw):
    """Whether a `quantization_config` asks for more than weights."""
    groups = (raw.get("config_groups") or {}).values()
    asked = ("input_activations", "output_activations")
    caches = raw.get("kv_cache_scheme") or raw.get("kv_cache_quant_algo")
    return bool(caches or raw.get("quant_algo") == "NVFP4"
                or any(g.get(k) for g in groups for k in asked))


def quantization_config(fmt, format, dense=()):
    """The `quantization_config` of a checkpoint whose projections are in `fmt`, an nvfp4.Format,
    but for those named in `dense`."""
    dense = ["lm_head", *dense]
    if fmt == "nf4":
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
                "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
                "llm_int8_skip_modules": dense}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": format.block,
               "dynamic": False, "strategy": "tensor_group" if fmt == "nvfp4" else "group",
               "scale_dtype": str(format.scale_dtype)}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None,
             "output_activations": None}
    return {"quant_method": "qerl" if format.codebook else "compressed-tensors",
            "format": f"{fmt}-pack-quantized", "ignore": dense,
            "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group}}


# ---- tensors


def read(source, layout, format, name, n, K, device):
    """(codes (n, K/2), scale (n, K/block), global scale (n,)) of the projection `name` in `source`,
    a Checkpoint, checked; format: the layout's nvfp4.Format, in whose type the scales come."""
    if K % format.block:
        raise ValueError(f"{source.folder}: {name} has K = {K}, not divisible by {layout.fmt}'s "
                         f"block of {format.block}")
    if layout.flat:
        codes, scale = (t.to(device) for t in read_flat(source, format, f"{name}.weight", n, K))
    else:
        codes = source.stored(f"{name}.{layout.codes}", (n, K // 2), torch.uint8, device)
        scale = source.stored(f"{name}.{layout.scale}", (n, K // format.block), format.scale_dtype,
                              device)
    bits = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    if layout.flat:
        bits = bits.abs()  # double quantization may leave a block of zeros a scale just below 0
    valid = {"nvfp4": bits < 127, "mxfp4": bits < 253}.get(layout.fmt, (bits >= 0) & (bits < 1e38))
    if not valid.all():
        raise ValueError(f"{source.folder}: {name}.{layout.scale} holds negative numbers, NaN or "
                         "inf; the checkpoint is damaged")
    top = torch.ones((), device=device)
    if layout.top:
        name = f"{name}.{layout.top}"
        shape = () if name in source and source.read(name).dim() == 0 else (1,)
        top = source.stored(name, shape, torch.float32, device).squeeze()
        top = 1 / top if layout.reciprocal else top
        if not 0 < top < 1e34:  # 6 * 448 times that is still finite
            raise ValueError(f"{source.folder}: {name} is not a positive number; the checkpoint is "
                             "damaged")
    return codes, scale, top.expand(n)


def read_flat(source, format, name, n, K):
    """(codes (n, K/2), scale (n, K/block) float32) of a weight as bitsandbytes stores it."""
    state = source.take(f"{name}.quant_state.bitsandbytes__nf4").numpy().tobytes()
    where = f"{source.folder}: {name}.quant_state"
    number = {"blocksize": (int, 1, 1 << 20), "nested_blocksize": (int, 1, 1 << 20)}
    state = parse_json(decode(state, where), where, number | {"nested_offset": (float, -1e9, 1e9)})
    if state.get("blocksize") != format.block or state.get("shape") != [n, K]:
        raise ValueError(f"{where} says blocks of {state.get('blocksize')} in a matrix of "
                         f"{state.get('shape')!r:.40}; blocks of {format.block} in ({n}, {K}) can "
                         "be read")
    values = torch.tensor(format.values)
    if not torch.allclose(source.stored(f"{name}.quant_map", (16,), torch.float32), values):
        raise ValueError(f"{source.folder}: {name}.quant_map is not NF4's; give the 16-bit "
                         "checkpoint and --quant nf4")
    codes = source.take(name)  # a column; trainers that shard a model store it as another type
    if codes.nbytes != n * K // 2:
        raise ValueError(f"{source.folder}: {name} has shape {tuple(codes.shape)}, {codes.dtype}; "
                         f"config.json asks for {n * K // 2} bytes")
    codes = codes.contiguous().view(torch.uint8).view(n, K // 2)
    shape, offset = (n * K // format.block,), state.get("nested_offset")
    if offset is None:
        scale = source.stored(f"{name}.absmax", shape, torch.float32)
    else:  # bytes that stand for 256 values, times a scale for each nested block, plus their mean
        size = state["nested_blocksize"]
        value = source.stored(f"{name}.nested_quant_map", (256,), torch.float32)
        factor = source.stored(f"{name}.nested_absmax", (-(-shape[0] // size),), torch.float32)
        scale = value[source.stored(f"{name}.absmax", shape, torch.uint8).int()]
        scale = scale * factor.repeat_interleave(size)[: shape[0]] + offset
    return swapped(codes), scale.view(n, -1)


def swapped(codes):
    """Bytes with their low and high four bits exchanged."""
    return codes << 4 | codes >> 4


def tensors(name, q, rows):
    """Yields (name, tensor) of one projection as this project stores it: `rows` of the quantized
    weight q in which it is stacked."""
    if q.fmt == "nf4":
        state = {"quant_type": "nf4", "blocksize": q.format.block, "dtype": "bfloat16",
                 "shape": [rows.stop - rows.start, q.shape[1]]}
        name = f"{name}.weight"
        yield name, swapped(q.codes[rows]).view(-1, 1)
        yield f"{name}.absmax", q.scale[rows].flatten()
        yield f"{name}.quant_map", torch.tensor(q.format.values)
        yield (f"{name}.quant_state.bitsandbytes__nf4",
               torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8))
        return
    yield f"{name}.weight_packed", q.codes[rows]
    yield f"{name}.weight_scale", q.scale[rows]
    if q.fmt == "nvfp4":
        yield f"{name}.weight_global_scale", 1 / q.global_scale[rows][:1]
