"""
Adapters as files, in PEFT's layout: adapter_config.json and adapter_model.safetensors.

Norms of blocks that were trained as a whole (modules_to_save) come along. What lora.py cannot
honour (DoRA, biases, other targets, ranks or alphas that differ between projections, a rank or
shape that does not fit) is a ValueError that names the file and the tensor or field.
"""
import math
from contextlib import contextmanager
from pathlib import Path

from plumbing import hub
from plumbing.files import read_json, whole, write_json

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

# Fields of adapter_config.json that may be set: those of PLAIN to these values, those of FREE to
# any (which layers are adapted is read off the tensors). With any other it is not plain LoRA.
PLAIN = {"peft_type": ("LORA",), "bias": ("none",),
         "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}
FREE = {"r", "lora_alpha", "use_rslora", "lora_dropout", "task_type", "base_model_name_or_path",
        "revision", "inference_mode", "auto_mapping", "peft_version", "target_modules",
        "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config",
        "megatron_core", "qalora_group_size", "eva_config", "runtime_config",
        "ensure_weight_tying"}
NORMS = ("input_layernorm", "post_attention_layernorm")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# ---- norms of blocks that an adapter has of its own


def norms_of(model, path=""):
    """[(PEFT's name, norm)] of the two norms of each block of `model`, the module at `path`: an
    adapter may have its own."""
    return [(f"base_model.model.model.{at}.weight", m) for at, m in model.named_modules(prefix=path)
            if at.rpartition(".")[2] in NORMS]


def own_norm(norm, weight=None):
    """Give a norm a weight (C,) of the adapter's, in float32, by default a copy of the base's; that
    one is kept for `disabled`, in a tuple, so that it is no parameter. Returns the new one."""
    if not hasattr(norm, "of_base"):
        norm.of_base = (norm.weight,)
    weight = norm.of_base[0] if weight is None else weight
    device = norm.weight.device
    norm.weight = nn.Parameter(weight.detach().to(device, torch.float32, copy=True),
                               norm.weight.requires_grad)
    return norm.weight


def own_norms(model):
    """{PEFT's name: norm} of the norms that are the adapter's."""
    return {name: m for name, m in norms_of(model) if hasattr(m, "of_base")}


@contextmanager
def base_norms(model):
    """The base's norms inside the `with`, instead of the adapter's."""
    own = [(m, m.weight) for m in own_norms(model).values()]
    for m, _ in own:
        m.weight = m.of_base[0]
    try:
        yield
    finally:
        for m, weight in own:
            m.weight = weight


# ---- files


def save(folder, state, rank, scaling, base_model=""):
    """Write `state`, {PEFT's name: tensor}, and its config to `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    alpha = round(scaling * rank, 9)  # as it was given: 7 / 25 * 25 is 7.000000000000001
    alpha = int(alpha) if alpha == int(alpha) else scaling * rank
    base, commit = str(base_model), hub.COMMITS.get(str(base_model))
    if commit:
        base = base.partition("@")[0]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": base, "revision": commit, "r": rank, "lora_alpha": alpha,
              "lora_dropout": 0.0, "bias": "none",
              "target_modules": [t for t in TARGETS if any(f".{t}." in name for name in state)],
              "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
              "inference_mode": True}
    if norms := [n for n in NORMS if any(name.endswith(f".{n}.weight") for name in state)]:
        config["modules_to_save"] = norms
    state = {k: v.cpu().contiguous() for k, v in state.items()}
    with whole(folder / "adapter_model.safetensors") as part:
        save_file(state, part, metadata={"format": "pt"})
    write_json(folder / "adapter_config.json", config)


def read(folder):
    """(rank, scaling, {PEFT's name: tensor}) of an adapter folder; ValueError for anything but
    LoRA, whose scaling may be rank-stabilised, and norms of blocks."""
    folder = Path(folder)
    path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (path, weights):
        if not file.is_file():
            raise FileNotFoundError(f"--adapter {folder}: {file.name} is missing; give the folder "
                                    "that train.py calls adapter/ (adapter_model.bin is a pickle: "
                                    "PEFT's save_pretrained saves it anew as safetensors)")
    config = read_json(path, ["r", "lora_alpha"])
    saved = config.get("modules_to_save") or []
    known = {*FREE, "modules_to_save"} if {*saved} <= {*NORMS} else FREE
    refused = [f"{k} = {v!r:.80}" for k, v in config.items()
               if k not in known and v and v not in PLAIN.get(k, ())]
    if refused:
        raise ValueError(f"{path}: only plain LoRA is supported, this adapter has "
                         f"{', '.join(refused)}; merge it into its base with PEFT")
    try:
        state = load_file(weights)
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{weights}: not a readable safetensors file ({e})") from None
    for norm in saved:
        if not any(name.endswith(f".{norm}.weight") for name in state):
            raise ValueError(f"{weights}: holds no {norm}, which {path.name} says was trained")
    rank, alpha = config["r"], config["lora_alpha"]
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ValueError(f"{path}: r is {rank!r}, lora_alpha {alpha!r}; copy the adapter again")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), state


def check(folder, state, shapes):
    """ValueError unless the tensors of `state` are finite, fit the model, and come in pairs, but
    for norms. shapes: {name: shape} of what the model has room for."""
    weights = Path(folder) / "adapter_model.safetensors"
    if not state:
        raise ValueError(f"{weights}: is empty; copy the adapter again")
    if strangers := sorted(set(state) - set(shapes)):
        raise ValueError(f"{weights}: {strangers[0]} fits this model nowhere; LoRA of the blocks' "
                         "projections, and norms, can be read: merge others into their base with "
                         "PEFT")
    for name, t in state.items():
        a, b = name.replace(".lora_B.", ".lora_A."), name.replace(".lora_A.", ".lora_B.")
        if missing := {a, b} - {*state}:
            raise ValueError(f"{weights}: {name} is there, but {missing.pop()} is missing")
        if tuple(t.shape) != shapes[name]:
            raise ValueError(f"{weights}: {name} is {tuple(t.shape)}, the model's is "
                             f"{shapes[name]}")
        if not t.is_floating_point() or t.dtype.itemsize < 2 or not torch.isfinite(t).all():
            raise ValueError(f"{weights}: {name} holds NaN or inf, or no floats of 16 bits or more "
                             f"({t.dtype})")
