"""
config.json: what a checkpoint says of itself, and which of it this project supports. The rest is an
error that names it: a model that ignored its sliding windows would still talk.

    fields = read_config("Qwen2.5-0.5B-Instruct/")
"""
import math
from pathlib import Path

from plumbing.files import read_json, require

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
POSITIONS = {"llama": 2048, "mistral": 131072}  # where config.json does not say; else 32,768
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(folder):
    """The fields of model.Config for a checkpoint folder, in their order; ValueError for what the
    model cannot honour."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    if raw.get("model_type") == "mistral":
        raw.setdefault("sliding_window", 4096)
    raw = {k: v for k, v in raw.items() if v is not None}
    if "model_type" not in raw:
        raise ValueError(f"{path}: is no checkpoint's, it has no model_type; the folder of a run "
                         "goes to eval.py --run")
    # the newer field, and the older one, which people add to files that have the newer
    rope = {k: v for name in ("rope_parameters", "rope_scaling")
            for k, v in raw.get(name, {}).items() if v is not None}
    kinds = [rope[k] for k in ("rope_type", "type") if k in rope]
    kinds = kinds or ["without a type"] * ("factor" in rope)
    scaling = " and ".join(sorted({*kinds} - {"default"})) or None
    for what, bad in unsupported(raw, rope, scaling).items():
        if bad:
            raise ValueError(f"{path}: {what} is not supported (Qwen2.5, Qwen3, Llama and Mistral "
                             "models are)")
    require(raw, path, SIZES)
    heads = raw["num_attention_heads"]
    family = raw["model_type"]
    room = raw.get("max_position_embeddings", POSITIONS.get(family, 32768))
    head_dim = raw.get("head_dim", 128 if family == "qwen3" else raw["hidden_size"] // heads)
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    return {
        **{k: raw[k] for k in SIZES},
        "num_key_value_heads": raw.get("num_key_value_heads", heads), "head_dim": head_dim,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6), "rope_theta": theta,
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3",
        "max_position_embeddings": room, "quantization": raw.get("quantization_config"),
        "rope_scaling": llama3(rope, path) if scaling else None}


def llama3(rope, path):
    """The fields of rope scaling llama3 -> (factor, slow, fast): pairs of a head that turn by less
    than `slow` a token turn `factor` times slower, those that turn by more than `fast` as before,
    those between are mixed."""
    require(rope, path, LLAMA3)
    turn = 2 * math.pi / rope["original_max_position_embeddings"]  # once in the shorter context
    return float(rope["factor"]), turn * rope["low_freq_factor"], turn * rope["high_freq_factor"]


def unsupported(raw, rope, scaling):
    """{what: whether config.json asks for it}, for everything that would make it another model."""
    family = raw.get("model_type")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    layers = raw.get("layer_types") or []
    return {
        f"model_type {family!r}": family not in FAMILIES,
        "use_sliding_window": raw.get("use_sliding_window", False),
        f"sliding_window {raw.get('sliding_window')}":
            family == "mistral" and raw.get("sliding_window"),
        "a sliding layer in layer_types": any(t != "full_attention" for t in layers),
        f"rope scaling {scaling!r}": scaling not in (None, "llama3"),
        "rope_parameters for each type of layer": any(isinstance(v, dict) for v in rope.values()),
        "partial_rotary_factor": partial != 1.0,
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
    }


# ---- four bits


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
