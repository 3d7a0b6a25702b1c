"""
LoRA beside a frozen linear, in float32, saved and loaded in PEFT's layout.

    y = base(x) + (alpha / r) * (x A^T) B^T          A (r, K) random, B (N, r) zero: the first step starts at the base model

q,k,v and gate,up are fused in the base model, but each original projection keeps its own A and B, as in the checkpoints that
PEFT reads and writes: A is stacked to (parts * r, K), one GEMM for all, and B (N, r) is stacked by rows, so that part i uses
columns i*r .. (i+1)*r of x A^T. The adapter is never merged into four-bit weights: rounding would erase it. `--merge` writes a
16-bit checkpoint instead, w_hat + (alpha / r) B A.

    add_lora(model, rank=32, alpha=32); train; save_adapter(model, "runs/x/adapter")
    load_adapter(model, "runs/x/adapter"); with disabled(model): ...     # the KL reference is the same model, adapter off
    python lora.py --merge --model Qwen/Qwen2.5-3B-Instruct --quant nvfp4 --adapter runs/x/adapter --out merged/

Shapes: N outputs, K inputs, R rank, P parts of a fused projection.
"""
import argparse
import json
import math
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import checkpoint
from model import Checkpoint, Config, Linear, Qwen2, fetch, fill, finish, load, place, prefix, rope_tables
from nvfp4 import dequantize

# Fields of adapter_config.json with the values that leave plain LoRA plain. Which layers are adapted is read off the tensors,
# so the fields that choose layers are free. A field that is in neither list, and set, is something PEFT learned later.
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
         "fan_in_fan_out": (), "lora_bias": (), "use_dora": (), "modules_to_save": (), "rank_pattern": (), "alpha_pattern": (),
         "layer_replication": (), "trainable_token_indices": (), "target_parameters": (), "alora_invocation_tokens": (),
         "use_qalora": (), "use_bdlora": (), "loftq_config": (), "corda_config": (), "arrow_config": ()}
FREE = {"r", "lora_alpha", "use_rslora", "lora_dropout", "task_type", "base_model_name_or_path", "revision", "inference_mode",
        "auto_mapping", "peft_version", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "megatron_config", "megatron_core", "qalora_group_size", "eva_config", "runtime_config", "ensure_weight_tying"}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def in_features(base):
    """K of a model.Linear or an nvfp4.QuantLinear."""
    return base.shape[1] if hasattr(base, "shape") else base.weight.shape[1]


class LoRALinear(nn.Module):
    """`base` (model.Linear or nvfp4.QuantLinear) plus a low-rank term. A (P*R, K) and B (N, R) are float32 parameters."""

    def __init__(self, base, rank, scaling, generator):
        super().__init__()
        self.base, self.parts, self.rank, self.scaling, self.enabled = base, base.parts, rank, scaling, True
        device = base.bias.device if base.bias is not None else next(iter([*base.parameters(), *base.buffers()])).device
        K = in_features(base)
        bound = 1 / math.sqrt(K)  # what PEFT's kaiming_uniform_(a=sqrt(5)) comes to
        A = (torch.rand(len(self.parts) * rank, K, generator=generator) * 2 - 1) * bound
        self.A = nn.Parameter(A.to(device))
        self.B = nn.Parameter(torch.zeros(sum(self.parts.values()), rank, device=device))

    def forward(self, x):
        y = self.base(x)
        if not self.enabled:
            return y
        xa = x @ self.A.to(x.dtype).T  # (..., K) -> (..., P*R)
        # B of the parts on a block diagonal: one GEMM that adds to y, instead of one a part, a concatenation and a sum
        B = torch.block_diag(*self.B.split(list(self.parts.values()))).to(x.dtype)  # (N, P*R)
        delta = torch.addmm(y.reshape(-1, y.shape[-1]), xa.reshape(-1, xa.shape[-1]), B.T, alpha=self.scaling)
        return delta.view_as(y)  # (..., N)


def lora_layers(model):
    """[(path, LoRALinear)] in module order."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, LoRALinear)]


def add_lora(model, rank, alpha, seed=0):
    """Put a LoRALinear around every projection of every block, in place; returns the trainable parameters.

    rank >= 1; scaling is alpha / rank. Everything else in the model is frozen."""
    if rank < 1:
        raise ValueError(f"--lora-rank {rank}: must be at least 1 (0 with --quant none trains all parameters)")
    if lora_layers(model):
        raise ValueError("the model has an adapter already")
    model.requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    for block in model.layers:
        attn, mlp = block.attn, block.mlp
        for owner, name in ((attn, "qkv_proj"), (attn, "o_proj"), (mlp, "gate_up_proj"), (mlp, "down_proj")):
            setattr(owner, name, LoRALinear(getattr(owner, name), rank, alpha / rank, g))
    return [p for _, m in lora_layers(model) for p in (m.A, m.B)]


@contextmanager
def disabled(model):
    """The base model inside the `with`: every adapter off, restored on the way out."""
    layers = [m for _, m in lora_layers(model)]
    before = [m.enabled for m in layers]
    for m in layers:
        m.enabled = False
    try:
        yield
    finally:
        for m, on in zip(layers, before, strict=True):
            m.enabled = on


def adapter_state(model):
    """PEFT's names -> the A (R, K) and B (N_p, R) of each original projection, as views of the parameters."""
    state = {}
    for path, m in lora_layers(model):
        A, B = m.A.detach().split(m.rank), m.B.detach().split(list(m.parts.values()))
        for i, part in enumerate(m.parts):
            state[f"base_model.model.{prefix(path)}.{part}.lora_A.weight"] = A[i]
            state[f"base_model.model.{prefix(path)}.{part}.lora_B.weight"] = B[i]
    return state


def save_adapter(model, folder, base_model=""):
    """Write adapter_config.json and adapter_model.safetensors (PEFT's layout, float32) to `folder`."""
    layers = lora_layers(model)
    if not layers:
        raise ValueError("the model has no adapter to save; call add_lora first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    m = layers[0][1]
    alpha = round(m.scaling * m.rank, 9)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base_model), "r": m.rank,
              "lora_alpha": int(alpha) if alpha == int(alpha) else m.scaling * m.rank, "lora_dropout": 0.0, "bias": "none",
              "target_modules": list(TARGETS), "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
              "inference_mode": True}
    state = {k: v.cpu().contiguous() for k, v in adapter_state(model).items()}
    save_file(state, folder / "adapter_model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors.tmp").replace(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json.tmp").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "adapter_config.json.tmp").replace(folder / "adapter_config.json")
    # safetensors writes for the owner alone
    (folder / "adapter_model.safetensors").chmod((folder / "adapter_config.json").stat().st_mode)


def read_config(path):
    """(rank, scaling) of an adapter_config.json; ValueError for anything but plain LoRA (rank-stabilised scaling included)."""
    try:
        config = json.loads(path.read_text())
        rank, alpha = config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: not a PEFT adapter's configuration ({type(e).__name__}: {e})") from None
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ValueError(f"{path}: r = {rank!r}, lora_alpha = {alpha!r}; a rank of at least 1 and a number are needed")
    refused = [f"{k} = {v!r}" for k, v in config.items() if k not in FREE and v and v not in PLAIN.get(k, ())]
    if refused:
        raise ValueError(f"{path}: only plain LoRA is supported, this adapter has {', '.join(refused)}")
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def load_adapter(model, folder):
    """Load a PEFT-layout adapter into `model`, adding LoRA if it has none. A subset of the targets leaves the others' B at
    zero; what cannot be honoured (DoRA, biases, other targets, a rank or shape that does not fit) is a ValueError, and the
    model is then as it was."""
    folder = Path(folder)
    config_file, weights_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise FileNotFoundError(f"--adapter {folder}: {file.name} is missing; give the folder that train.py calls adapter/")
    rank, scaling = read_config(config_file)
    has = lora_layers(model)
    if has and has[0][1].rank != rank:
        raise ValueError(f"{config_file}: r = {rank}, but the model's adapter has rank {has[0][1].rank}; set --lora-rank {rank}")
    try:
        new = load_file(weights_file)
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{weights_file}: not a readable safetensors file ({e})") from None
    shapes = {}
    for path, m in model.named_modules():
        if hasattr(m, "parts") and not isinstance(m, LoRALinear) and path != "lm_head":
            for part, n in m.parts.items():
                name = f"base_model.model.{prefix(path.removesuffix('.base'))}.{part}"
                shapes |= {f"{name}.lora_A.weight": (rank, in_features(m)), f"{name}.lora_B.weight": (n, rank)}
    strangers = sorted(set(new) - set(shapes))
    if strangers or not new:
        raise ValueError(f"{weights_file}: {strangers[0] if strangers else 'nothing in it'} fits this model nowhere")
    for name, t in new.items():
        partner = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
        if partner not in new:
            raise ValueError(f"{weights_file}: {name} is there, but {partner} is missing")
        if tuple(t.shape) != shapes[name]:
            raise ValueError(f"{weights_file}: {name} is {tuple(t.shape)}, the model's is {shapes[name]}")
        if not torch.isfinite(t).all():
            raise ValueError(f"{weights_file}: {name} holds NaN or inf")
    if not has:
        add_lora(model, rank, scaling * rank)
    for _, m in lora_layers(model):
        m.scaling = scaling
    with torch.no_grad():
        for name, parameter in adapter_state(model).items():
            if name in new:
                parameter.copy_(new[name])
            elif "lora_B" in name:  # not a target: no contribution
                parameter.zero_()
    return model


# ---- merging


@torch.no_grad()
def merged(m):
    """A model.Linear with the 16-bit weight w_hat + scaling * B A of a LoRALinear, the sum taken in float32."""
    dtype = m.base.weight.dtype if hasattr(m.base, "weight") else torch.bfloat16
    w = dequantize(m.base.q) if hasattr(m.base, "q") else m.base.weight.float()
    A, rows = m.A.split(m.rank), list(m.parts.values())
    delta = [b @ a for a, b in zip(A, m.B.split(rows), strict=True)]  # P x (N_p, R) @ (R, K)
    with torch.device("meta"):
        out = Linear(w.shape[1], m.parts, m.base.bias is not None)
    out.weight, out.bias = nn.Parameter((w + m.scaling * torch.cat(delta)).to(dtype)), m.base.bias
    return out


@torch.no_grad()
def streamed_logits(folder, ids, device, dtype=torch.bfloat16):
    """model.load(folder)(ids), with one block on the device at a time."""
    config, source = Config.read(folder), Checkpoint(folder)
    with torch.device("meta"):
        model = Qwen2(config)
    fill(model, "embed", source, device, dtype, "none")
    x = model.embed(ids)  # (B, T, C)
    cos, sin = (t[None, None] for t in rope_tables(torch.arange(ids.shape[1], device=device), config.head_dim, config.rope_theta))
    for i in range(config.num_hidden_layers):
        fill(model, f"layers.{i}.", source, device, dtype, "none")
        x = model.layers[i](x, cos, sin)
        model.layers[i] = None
    for part in ("norm", "lm_head"):
        fill(model, part, source, device, dtype, "none")
    return finish(model, source).lm_head(model.norm(x))


@torch.no_grad()
def merge(path_or_hub_id, adapter, out, device="cpu", quant="none"):
    """Write base + adapter as a 16-bit checkpoint in Hugging Face layout; returns how far its logits are from base + adapter.

    quant: what the adapter was trained on, if the checkpoint is not quantized itself: w_hat, not w, is what it was fitted to.
    The numbers are over 4 x 64 random ids: {"max", "mean"} of |difference|, "same_top" (share of positions with the same best
    id), "adapter_max" (what the adapter itself changes at most)."""
    folder = fetch(path_or_hub_id)
    model = load_adapter(load(folder, device, quant=quant), adapter)
    ids = torch.randint(0, model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    want = model(ids).float()
    with disabled(model):
        change = (want - model(ids).float()).abs().max().item()
    with checkpoint.Writer(out, folder) as writer:
        for path, m in model.named_modules():
            if path.endswith(".base") or (path == "lm_head" and model.config.tie_word_embeddings):
                continue
            for name, t in checkpoint.module_tensors(path, merged(m) if isinstance(m, LoRALinear) else m):
                writer.add(name, t)
    del model, m
    d = streamed_logits(Path(out), ids, device).float()
    same = (d.argmax(-1) == want.argmax(-1)).float().mean().item()
    d = (d - want).abs()
    return {"max": d.max().item(), "mean": d.mean().item(), "same_top": same, "adapter_max": change}


def main(argv=None):
    p = argparse.ArgumentParser(description="Merge an adapter into a 16-bit checkpoint.", allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--merge", action="store_true", required=True, help="what to do")
    p.add_argument("--model", required=True, help="checkpoint folder or hub id, 16-bit or quantized")
    p.add_argument("--adapter", required=True, help="adapter folder, ours or PEFT's")
    p.add_argument("--out", required=True, help="folder to write; must not exist")
    p.add_argument("--quant", default="none", choices=["none", "nvfp4", "mxfp4", "nf4"], help="format the adapter was trained on")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="cuda where there is one")
    args = p.parse_args(argv)
    try:
        r = merge(args.model, args.adapter, args.out, place(args.device)[0], args.quant)
    except (ValueError, OSError) as e:
        p.error(str(e))
    print(f"{args.out}: logits differ from base + adapter by {r['mean']:.2e} on average, {r['max']:.2e} at most (the adapter "
          f"itself moves them by up to {r['adapter_max']:.2e}); same best id at {100 * r['same_top']:.1f}% of the positions")


if __name__ == "__main__":
    main()
