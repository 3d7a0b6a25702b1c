"""
Four-bit weights as files: how each tool stores them, a row of LAYOUTS for each.

Each original projection, q, k and v apart, is stored as codes (N, K/2), two a byte, scales of
blocks (N, K/block) and, in NVFP4, one scale of the whole tensor: its reciprocal in the layout of
compressed-tensors, itself in that of modelopt (NVIDIA's own checkpoints). This project writes the
former, so that other engines can serve it; under the quant_method qerl also formats with a codebook
(NF4), for which compressed-tensors has none. lm_head and embeddings stay in 16 bits; so do
activations and KV caches that a checkpoint wants in fewer.

Shapes: N rows of one projection, K columns.
"""
from typing import NamedTuple

from plumbing.files import check

import torch


class Layout(NamedTuple):
    """What follows a projection's name: its codes and its tensor's scale, if any. Block scales are
    weight_scale everywhere."""

    fmt: str
    codes: str = "weight_packed"
    top: str = ""
    reciprocal: bool = False


# (quant_method, what the checkpoint calls its format) -> Layout
MODELOPT = Layout("nvfp4", "weight", "weight_scale_2")
LAYOUTS = {
    ("compressed-tensors", "nvfp4-pack-quantized"):
        Layout("nvfp4", top="weight_global_scale", reciprocal=True),
    ("compressed-tensors", "mxfp4-pack-quantized"): Layout("mxfp4"),
    ("modelopt", "NVFP4"): MODELOPT,
    ("modelopt", "W4A16_NVFP4"): MODELOPT,
}
OF_ACTIVATIONS = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale",
                  "v_scale")


# ---- config.json


def layout_of(raw, where, formats=None):
    """The Layout that a `quantization_config` declares. ValueError for what cannot be read, and
    for a format that is not in `formats`, nvfp4.FORMATS."""
    path = f"{where}/config.json: quantization_config"
    check(raw, path, {"config_groups": dict, "format": str, "quant_method": str,
                      "quant_algo": str})
    groups = [check(g, path, {"format": str, "weights": dict})
              for g in (raw.get("config_groups") or {}).values()]
    method = raw.get("quant_method")

    def refuse(what):
        quant = "nf4" if method == "bitsandbytes" else "nvfp4"
        raise ValueError(f"{path} has {what}, which cannot be read; docs/guide.md lists what can. "
                         f"Give the 16-bit checkpoint and --quant {quant}: it is rounded while it "
                         "loads, in seconds")

    if method == "modelopt":
        kind = raw.get("quant_algo")
    else:
        found = {raw.get("format"), *(g.get("format") for g in groups)} - {None}
        kind = " and ".join(sorted(found)) or None
    layout = LAYOUTS.get((method, kind))
    if method == "qerl" and kind and ("compressed-tensors", kind) not in LAYOUTS:
        layout = Layout(kind.removesuffix("-pack-quantized"))
    if layout is None or formats and layout.fmt not in formats:
        refuse(f"quant_method {method!r} with {kind!r}")
    if len(groups) != 1 and method in ("compressed-tensors", "qerl"):
        refuse(f"{len(groups)} config_groups")
    block = formats and formats[layout.fmt].block
    for weights in [g.get("weights") or {} for g in groups] + [raw]:
        for field, want in (("num_bits", 4), ("type", "float"), ("group_size", block),
                            ("symmetric", True)):
            if want and weights.get(field, want) != want:
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
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": format.block,
               "dynamic": False, "strategy": "tensor_group" if fmt == "nvfp4" else "group",
               "scale_dtype": str(format.scale_dtype)}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None,
             "output_activations": None}
    return {"quant_method": "qerl" if format.codebook else "compressed-tensors",
            "format": f"{fmt}-pack-quantized", "ignore": ["lm_head", *dense],
            "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group}}


# ---- tensors


def read(source, layout, format, name, n, K, device):
    """(codes (n, K/2), scale (n, K/block), global scale (n,)) of the projection `name` in `source`,
    a Checkpoint, checked; format: the layout's nvfp4.Format, in whose type the scales come."""
    if K % format.block:
        raise ValueError(f"{source.folder}: {name} has K = {K}, not divisible by {layout.fmt}'s "
                         f"block of {format.block}")
    codes = source.take(f"{name}.{layout.codes}", (n, K // 2), [torch.uint8]).to(device)
    scale = source.take(f"{name}.weight_scale", (n, K // format.block), [format.scale_dtype])
    scale = scale.to(device)
    bits = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    valid = {"nvfp4": bits < 127, "mxfp4": bits < 253}.get(layout.fmt, (bits >= 0) & (bits < 1e38))
    if not valid.all():
        raise ValueError(f"{source.folder}: {name}.weight_scale holds negative numbers, NaN or "
                         "inf; the checkpoint is damaged")
    top = torch.ones((), device=device)
    if layout.top:
        name = f"{name}.{layout.top}"
        shape = () if name in source and source.read(name).dim() == 0 else (1,)
        top = source.take(name, shape, [torch.float32]).to(device).squeeze()
        top = 1 / top if layout.reciprocal else top
        if not 0 < top < 1e34:  # 6 * 448 times that is still finite
            raise ValueError(f"{source.folder}: {name} is not a positive number; the checkpoint is "
                             "damaged")
    return codes, scale, top.expand(n)


def tensors(name, q, rows):
    """Yields (name, tensor) of one projection as this project stores it: `rows` of the quantized
    weight q in which it is stacked."""
    yield f"{name}.weight_packed", q.codes[rows]
    yield f"{name}.weight_scale", q.scale[rows]
    if q.fmt == "nvfp4":
        yield f"{name}.weight_global_scale", 1 / q.global_scale[rows][:1]
