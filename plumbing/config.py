"""
config.json: what a checkpoint says of itself, and which of it this project supports. The rest is an
error that names it: a model that ignored its sliding windows would still talk.

`quantization_config` is as compressed-tensors writes it; the tensors that it describes are in
checkpoint.py.

    fields = read_config("Qwen2.5-0.5B-Instruct/")
"""
from pathlib import Path

from plumbing.files import check, read_json

FAMILIES = {"qwen2": {"qkv_bias": True, "qk_norm": False},
            "llama": {"qkv_bias": False, "qk_norm": False},
            "qwen3": {"qkv_bias": False, "qk_norm": True}}
# config.json's fields and their types
SIZE = (int, 1, 1 << 23)
SIZES = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                       "num_attention_heads"), SIZE)
FIELDS = {**SIZES, "num_key_value_heads": SIZE, "head_dim": SIZE, "max_position_embeddings": SIZE,
          "rms_norm_eps": (float, 0, 1), "rope_theta": (float, 1e-3, 1e12),
          "tie_word_embeddings": bool, "rope_parameters": dict, "rope_scaling": dict,
          "layer_types": list, "quantization_config": dict, "model_type": str, "hidden_act": str}


def read_config(folder):
    """The fields of model.Config for a checkpoint folder (or for a config.json itself), in their
    order; ValueError for what the model cannot honour."""
    path = Path(folder)
    path = path if path.suffix == ".json" else path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --model takes a Hugging Face checkpoint "
                                "folder or a hub id")
    raw = {k: v for k, v in read_json(path, FIELDS).items() if v is not None}
    # the newer field, and the older one, which people add to files that have the newer
    rope = {k: v for name in ("rope_parameters", "rope_scaling")
            for k, v in check(raw.get(name) or {}, path, FIELDS).items() if v is not None}
    for what, bad in unsupported(raw, rope).items():
        if bad:
            raise ValueError(f"{path}: {what} is not supported (Qwen2.5, Qwen3 and Llama-shaped "
                             "models are)")
    check(raw, path, {}, SIZES)
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{path}: {heads} attention heads do not divide among {kv_heads} "
                         "key-value heads")
    family, room = raw["model_type"], 2048 if raw["model_type"] == "llama" else 32768
    head_dim = raw.get("head_dim", 128 if family == "qwen3" else raw["hidden_size"] // heads)
    if head_dim % 2 or not head_dim:
        raise ValueError(f"{path}: a head_dim of {head_dim} must be even, for rotary positions")
    return {
        **{k: raw[k] for k in SIZES}, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False), **FAMILIES[family],
        "max_position_embeddings": raw.get("max_position_embeddings", room),
        "quantization": raw.get("quantization_config")}


def unsupported(raw, rope):
    """{what: whether config.json asks for it}, for everything that would make it another model."""
    family = raw.get("model_type")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    kinds = [rope[k] for k in ("rope_type", "type") if k in rope]
    scaling = next((k for k in kinds or ["without a type"] * ("factor" in rope) if k != "default"),
                   None)
    layers = raw.get("layer_types") or []
    return {
        f"model_type {family!r}": family not in FAMILIES,
        "use_sliding_window": raw.get("use_sliding_window", False),
        "a sliding layer in layer_types": any(t != "full_attention" for t in layers),
        f"rope scaling {scaling!r}": scaling is not None,
        "rope_parameters for each type of layer": any(isinstance(v, dict) for v in rope.values()),
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": family != "qwen2" and raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "partial_rotary_factor": partial != 1.0,
    }


def quantization_config(fmt, format):
    """The `quantization_config` of a checkpoint whose projections are in `fmt`, an nvfp4.Format."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": format.block,
               "dynamic": False, "strategy": "tensor_group" if fmt == "nvfp4" else "group",
               "scale_dtype": str(format.scale_dtype)}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None,
             "output_activations": None}
    return {"quant_method": "qerl" if format.codebook else "compressed-tensors",
            "format": f"{fmt}-pack-quantized", "ignore": ["lm_head"],
            "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group}}


def packed_format(raw, where, formats=None):
    """The name of the format that a `quantization_config` declares, as in nvfp4-pack-quantized;
    ValueError for what cannot be honoured, and for what is not in `formats`, nvfp4.FORMATS."""
    known = [f"{fmt}-pack-quantized" for fmt in formats or ("nvfp4", "mxfp4", "nf4")]
    path = f"{where}/config.json: quantization_config"
    check(raw, path, {"config_groups": dict, "format": str, "quant_method": str})
    groups = [check(g, path, {"format": str, "weights": dict})
              for g in (raw.get("config_groups") or {}).values()]
    layout = " and ".join(sorted({raw.get("format"), *(g.get("format") for g in groups)} - {None}))
    fmt = layout.removesuffix("-pack-quantized")
    group = groups[0] if groups else {}
    weights = group.get("weights") or {}
    wanted = {"num_bits": 4, "type": "float", "symmetric": True}
    if formats and fmt in formats:
        wanted["group_size"] = formats[fmt].block
    refused = {
        f"quant_method {raw.get('quant_method')!r}":
            raw.get("quant_method") not in ("compressed-tensors", "qerl"),
        f"format {layout or None}": fmt == layout or formats and fmt not in formats,
        f"{len(groups)} config_groups": len(groups) != 1,
        **{f"{field} {weights.get(field)!r}": weights.get(field, want) != want
           for field, want in wanted.items()},
        "input_activations": group.get("input_activations"),
        "output_activations": group.get("output_activations"),
        "kv_cache_scheme": raw.get("kv_cache_scheme"),
    }
    for what, bad in refused.items():
        if bad:
            raise ValueError(f"{path} has {what}; checkpoints with {', '.join(known)} and weights "
                             "only (W4A16) can be read")
    return fmt
