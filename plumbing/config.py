"""
config.json: what a checkpoint says of itself, and which of it this project supports. The rest is an
error that names it: a model that ignored its sliding windows would still talk. layouts.py reads the
`quantization_config`.

    fields = read_config("Qwen2.5-0.5B-Instruct/")
"""
import math
from pathlib import Path

from plumbing.files import check, read_json

FAMILIES = {"qwen2": {"qkv_bias": True, "qk_norm": False},
            "llama": {"qkv_bias": False, "qk_norm": False},
            "mistral": {"qkv_bias": False, "qk_norm": False},
            "qwen3": {"qkv_bias": False, "qk_norm": True}}
POSITIONS = {"llama": 2048, "mistral": 131072}  # where config.json does not say; else 32,768
# config.json's fields and their types
SIZE = (int, 1, 1 << 23)
SIZES = {"vocab_size": SIZE, "hidden_size": SIZE, "intermediate_size": SIZE,
         "num_hidden_layers": (int, 1, 1024),  # a module each, before a tensor is missed
         "num_attention_heads": SIZE}
FIELDS = {**SIZES, "num_key_value_heads": SIZE, "head_dim": SIZE, "max_position_embeddings": SIZE,
          "rms_norm_eps": (float, 0, 1), "rope_theta": (float, 1.1, 1e12),
          "tie_word_embeddings": bool, "rope_parameters": dict, "rope_scaling": dict,
          "layer_types": list, "quantization_config": dict, "model_type": str, "hidden_act": str}
# those of rope scaling llama3
LLAMA3 = {"factor": (float, 1, 1e4), "low_freq_factor": (float, 1e-3, 1e3),
          "high_freq_factor": (float, 1e-3, 1e3),
          "original_max_position_embeddings": (int, 1, 1 << 30)}


def read_config(folder):
    """The fields of model.Config for a checkpoint folder (or for a config.json itself), in their
    order; ValueError for what the model cannot honour."""
    path = Path(folder)
    path = path if path.suffix == ".json" else path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --model takes a Hugging Face checkpoint "
                                "folder or a hub id")
    raw = read_json(path, FIELDS)
    if raw.get("model_type") == "mistral":
        raw.setdefault("sliding_window", 4096)
    raw = {k: v for k, v in raw.items() if v is not None}
    # the newer field, and the older one, which people add to files that have the newer
    rope = {k: v for name in ("rope_parameters", "rope_scaling")
            for k, v in check(raw.get(name) or {}, path, FIELDS).items() if v is not None}
    for what, bad in unsupported(raw, rope).items():
        if bad:
            raise ValueError(f"{path}: {what} is not supported (Qwen2.5, Qwen3, Llama and Mistral "
                             "models are)")
    check(raw, path, {}, SIZES)
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{path}: {heads} attention heads do not divide among {kv_heads} "
                         "key-value heads")
    family = raw["model_type"]
    room = raw.get("max_position_embeddings", POSITIONS.get(family, 32768))
    head_dim = raw.get("head_dim", 128 if family == "qwen3" else raw["hidden_size"] // heads)
    if head_dim % 2 or not head_dim:
        raise ValueError(f"{path}: a head_dim of {head_dim} must be even, for rotary positions")
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    return {
        **{k: raw[k] for k in SIZES}, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6), "rope_theta": theta,
        "tie_word_embeddings": raw.get("tie_word_embeddings", False), **FAMILIES[family],
        "max_position_embeddings": room, "quantization": raw.get("quantization_config"),
        "rope_scaling": rope_scaling(rope, path)}


def rope_scaling(rope, path):
    """model.Config's rope_scaling for the rope fields of config.json: None, or (factor, slow, fast)
    of llama3.

    Pairs of a head that turn by less than `slow` a token turn `factor` times slower, those that
    turn by more than `fast` as before, and those between are mixed."""
    if scaling_of(rope) is None:
        return None
    check(rope, path, LLAMA3, LLAMA3)
    turn = 2 * math.pi / rope["original_max_position_embeddings"]  # once in the shorter context
    slow, fast = turn * rope["low_freq_factor"], turn * rope["high_freq_factor"]
    if slow == fast:
        raise ValueError(f"{path}: low_freq_factor and high_freq_factor are the same")
    return float(rope["factor"]), slow, fast


def scaling_of(rope):
    """The kind of rope scaling that the rope fields name, None if there is none."""
    kinds = [rope[k] for k in ("rope_type", "type") if k in rope]
    return next((k for k in kinds or ["without a type"] * ("factor" in rope) if k != "default"),
                None)


def unsupported(raw, rope):
    """{what: whether config.json asks for it}, for everything that would make it another model."""
    family = raw.get("model_type")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    scaling = scaling_of(rope)
    layers = raw.get("layer_types") or []
    return {
        f"model_type {family!r}": family not in FAMILIES,
        "use_sliding_window": raw.get("use_sliding_window", False),
        f"sliding_window {raw.get('sliding_window')}":
            family == "mistral" and raw.get("sliding_window"),
        "a sliding layer in layer_types": any(t != "full_attention" for t in layers),
        f"rope scaling {scaling!r:.40}": scaling not in (None, "llama3"),
        "rope_parameters for each type of layer": any(isinstance(v, dict) for v in rope.values()),
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": family != "qwen2" and raw.get("attention_bias", False),
        "mlp_bias": raw.get("mlp_bias", False),
        "partial_rotary_factor": partial != 1.0,
    }
