"""
Adapters as files, in PEFT's layout: adapter_config.json and adapter_model.safetensors.

What lora.py cannot honour (DoRA, biases, other targets, a rank or shape that does not fit) is a
ValueError that names the file and the tensor or field.
"""
import math
from pathlib import Path

from plumbing.files import read_json, whole, write_json

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

# Fields of adapter_config.json that may be set: those of PLAIN to these values, those of FREE to
# any (which layers are adapted is read off the tensors). If any other is set (use_dora,
# rank_pattern, whatever PEFT adds later), the adapter is not plain LoRA.
PLAIN = {"peft_type": ("LORA",), "bias": ("none",),
         "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}
FREE = {"r", "lora_alpha", "use_rslora", "lora_dropout", "task_type", "base_model_name_or_path",
        "revision", "inference_mode", "auto_mapping", "peft_version", "target_modules",
        "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config",
        "megatron_core", "qalora_group_size", "eva_config", "runtime_config",
        "ensure_weight_tying"}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save(folder, state, rank, scaling, targets, base_model=""):
    """Write `state`, {PEFT's name: tensor}, and its config to `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    alpha = round(scaling * rank, 9)  # as it was given: 7 / 25 * 25 is 7.000000000000001
    alpha = int(alpha) if alpha == int(alpha) else scaling * rank
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": str(base_model), "r": rank, "lora_alpha": alpha,
              "lora_dropout": 0.0, "bias": "none",
              "target_modules": [t for t in TARGETS if t in targets],
              "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
              "inference_mode": True}
    state = {k: v.cpu().contiguous() for k, v in state.items()}
    with whole(folder / "adapter_model.safetensors") as part:
        save_file(state, part, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", config)


def read_config(path):
    """(rank, scaling) of an adapter_config.json; ValueError for anything but plain LoRA, whose
    scaling may be rank-stabilised."""
    config = read_json(path, {"r": (int, 1, 4096), "lora_alpha": (float, 1e-6, 1e6),
                              "use_rslora": bool}, ["r", "lora_alpha"])
    rank, alpha = config["r"], config["lora_alpha"]
    refused = [f"{k} = {v!r:.80}" for k, v in config.items()
               if k not in FREE and v and v not in PLAIN.get(k, ())]
    if refused:
        raise ValueError(f"{path}: only plain LoRA is supported, this adapter has "
                         f"{', '.join(refused)}")
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def read(folder):
    """(rank, scaling, {PEFT's name: tensor}) of an adapter folder."""
    folder = Path(folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (config, weights):
        if not file.is_file():
            raise FileNotFoundError(f"--adapter {folder}: {file.name} is missing; give the folder "
                                    "that train.py calls adapter/")
    rank, scaling = read_config(config)
    try:
        return rank, scaling, load_file(weights)
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{weights}: not a readable safetensors file ({e})") from None


def check(folder, state, shapes):
    """ValueError unless the tensors of `state` come in pairs, are finite, and fit the model.
    shapes: {(A's name, B's name): (A's shape, B's shape)} of what the model has room for."""
    weights, partner, fits = Path(folder) / "adapter_model.safetensors", {}, {}
    for (a, b), (shape_a, shape_b) in shapes.items():
        partner |= {a: b, b: a}
        fits |= {a: shape_a, b: shape_b}
    strangers = sorted(set(state) - set(fits)) or ([] if state else ["nothing in it"])
    if strangers:
        raise ValueError(f"{weights}: {strangers[0]} fits this model nowhere")
    for name, t in state.items():
        if partner[name] not in state:
            raise ValueError(f"{weights}: {name} is there, but {partner[name]} is missing")
        if tuple(t.shape) != fits[name]:
            raise ValueError(f"{weights}: {name} is {tuple(t.shape)}, the model's is {fits[name]}")
        if not t.is_floating_point() or t.dtype.itemsize < 2 or not torch.isfinite(t).all():
            raise ValueError(f"{weights}: {name} holds NaN or inf, or no floats of 16 bits or more "
                             f"({t.dtype})")
