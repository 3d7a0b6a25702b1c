"""
Four-bit weights as files, in the layout of compressed-tensors, so that other engines can serve what
is written here.

Each original projection, q, k and v apart, is stored as codes (N, K/2), two a byte, scales of
blocks (N, K/block) and, in NVFP4, the reciprocal of one scale of the whole tensor. Formats with a
codebook (NF4), for which compressed-tensors has none, are stored in the same way under the
quant_method qerl. lm_head and embeddings stay in 16 bits; so do activations and KV caches that a
checkpoint wants in fewer.

Shapes: N rows of one projection, K columns.
"""
import torch

# what a checkpoint may hold beside its weights, to quantize activations and the KV cache
OF_ACTIVATIONS = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale",
                  "v_scale")


# ---- config.json


def format_of(raw, where, formats=None):
    """The format, of nvfp4.FORMATS, that a `quantization_config` declares. ValueError for what
    cannot be read, and for a format that is not in `formats`."""
    method, groups = raw.get("quant_method"), (raw.get("config_groups") or {}).values()
    found = {raw.get("format"), *(g.get("format") for g in groups)} - {None}
    kind = " and ".join(sorted(found))
    fmt = kind.removesuffix("-pack-quantized")
    known = {"compressed-tensors": ("nvfp4", "mxfp4"), "qerl": formats or (fmt,)}
    if fmt not in known.get(method, ()):
        quant = "nf4" if method == "bitsandbytes" else "nvfp4"
        raise ValueError(f"{where}/config.json: quantization_config has quant_method {method!r} "
                         f"with {kind!r}, which cannot be read; docs/guide.md lists what can. Give "
                         f"the 16-bit checkpoint and --quant {quant}: it is rounded while it "
                         "loads, in seconds")
    return fmt


def quantization_config(fmt, format, dense=()):
    """The `quantization_config` of a checkpoint whose projections are in `fmt`, of nvfp4.Format
    `format`, but for those named in `dense`."""
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


def read(source, fmt, format, name, n, K, device):
    """(codes (n, K/2), scale (n, K/block), global scale (n,)) of the projection `name` in `source`,
    a Checkpoint; format: the nvfp4.Format of `fmt`, in whose type the scales come."""
    codes = source.take(f"{name}.weight_packed", (n, K // 2), [torch.uint8])
    scale = source.take(f"{name}.weight_scale", (n, K // format.block), [format.scale_dtype])
    top = torch.ones((), device=device)
    if fmt == "nvfp4":
        name = f"{name}.weight_global_scale"
        shape = () if name in source and source.read(name).dim() == 0 else (1,)
        top = 1 / source.take(name, shape, [torch.float32]).to(device).squeeze()
    return codes.to(device), scale.to(device), top.expand(n)


def tensors(name, q, rows):
    """Yields (name, tensor) of one projection as this project stores it: `rows` of the quantized
    weight q in which it is stacked."""
    yield f"{name}.weight_packed", q.codes[rows]
    yield f"{name}.weight_scale", q.scale[rows]
    if q.fmt == "nvfp4":
        yield f"{name}.weight_global_scale", 1 / q.global_scale[rows][:1]
