"""
Qwen2.5 in plain PyTorch: the model that everything else swaps modules into.

The forward pass is Qwen2.5's (RMSNorm, RoPE, grouped-query attention with QKV bias, SwiGLU; also Llama-shaped configs, which
only drop the bias). Two things differ from the textbook, and both are for speed: q,k,v are one matrix and gate,up are one
matrix, and each RMSNorm carries a `noise` vector that is zero unless aqn.py writes to it. Quantization (nvfp4.py) and LoRA
(lora.py) replace Linear modules; this file knows nothing of them but the one import inside `build`.

Left out: sliding windows, rope scaling, mixture of experts. A config that asks for them is an error, not ignored.

    model = load("Qwen/Qwen2.5-0.5B-Instruct", device="cuda", quant="nvfp4")
    logits = model(torch.tensor([[1, 2, 3]], device="cuda"))

Shapes: B rows, T tokens, C hidden, H query heads, Hkv kv heads, D head size, S cache slots, V vocabulary.
"""
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch.utils.checkpoint import checkpoint

# ---- configuration


@dataclass
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    qkv_bias: bool = True
    max_position_embeddings: int = 32768
    quantization: dict | None = None

    @classmethod
    def read(cls, folder):
        """The Config of a checkpoint folder (or of a config.json itself); ValueError for what this model cannot honour."""
        path = Path(folder)
        path = path if path.suffix == ".json" else path / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; --model takes a Hugging Face checkpoint folder or a hub id")
        try:
            raw = json.loads(path.read_text())
        except ValueError as e:
            raise ValueError(f"{path}: not valid JSON ({e})") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: not a model's configuration (a JSON object)")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        refused = {
            f"model_type {raw.get('model_type')!r}": raw.get("model_type") not in ("qwen2", "llama"),
            "use_sliding_window": raw.get("use_sliding_window", False),
            "a sliding layer in layer_types": any(t != "full_attention" for t in raw.get("layer_types") or []),
            f"rope scaling {rope_type!r}": rope_type != "default",
            f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
            "attention_bias": raw.get("model_type") == "llama" and raw.get("attention_bias", False),
            "mlp_bias": raw.get("mlp_bias", False),
            "partial_rotary_factor": rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0,
        }
        for what, bad in refused.items():
            if bad:
                raise ValueError(f"{path}: {what} is not supported (Qwen2.5 and Llama-shaped models are)")
        try:
            needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            sizes = {k: raw[k] for k in needed}
            for k, v in sizes.items():
                if type(v) is not int or v < 1:
                    raise ValueError(f"{path}: {k} {v!r} must be a whole number of at least 1")
            heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
            kv_heads = raw.get("num_key_value_heads") or heads
            if heads % kv_heads:
                raise ValueError(f"{path}: {heads} attention heads do not divide among {kv_heads} key-value heads")
            return cls(
                raw["vocab_size"], hidden, raw["intermediate_size"], raw["num_hidden_layers"], heads,
                kv_heads, raw.get("head_dim") or hidden // heads,
                raw.get("rms_norm_eps", 1e-6), float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
                raw.get("tie_word_embeddings", False), raw["model_type"] == "qwen2",
                raw.get("max_position_embeddings", 32768), raw.get("quantization_config"),
            )
        except KeyError as e:
            raise ValueError(f"{path}: the field {e} is missing") from None


# ---- modules


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (weight + noise), in float32, cast once. `noise` (C,) is AQN's state: zeros = clean."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps
        self.register_buffer("noise", torch.zeros(dim, dtype=torch.float32), persistent=False)

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * (self.weight.float() + self.noise)).to(x.dtype)


class Linear(nn.Module):
    """y = x W^T + b for W (N, K). `parts` names the checkpoint projections stacked in W's rows, in order: {name: rows}."""

    def __init__(self, in_features, parts, bias=False):
        super().__init__()
        self.parts = dict(parts)
        self.weight = nn.Parameter(torch.empty(sum(self.parts.values()), in_features))
        self.bias = nn.Parameter(torch.zeros(self.weight.shape[0])) if bias else None
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def rope_tables(pos, dim, theta):
    """cos, sin of the rotary angles at pos (any shape), float32, shape (*pos, D/2)."""
    freq = theta ** (-torch.arange(0, dim, 2, device=pos.device, dtype=torch.float32) / dim)
    angle = pos[..., None].float() * freq
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding of x (B, H, T, D), halves paired as in Hugging Face checkpoints; cos, sin broadcast to (B, 1, T, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def logits(hidden, weight):
    """hidden (B, C) times an LM head (V, C): logits (B, V) in float32 (float64 of float64). Sampler and trainer both call this:
    rounded to bfloat16 on the way out of the GEMM, a logit of 20 would move by up to 0.06."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # (B, C) @ (C, V)
    x = hidden @ weight.t()  # (B, C) @ (C, V)
    return x.to(torch.promote_types(x.dtype, torch.float32))


class KVCache:
    """Keys and values of B rows of up to `max_len` tokens: k, v (L, B, Hkv, S, D). `length` (B,) long counts the live tokens of
    each row; whoever runs the model advances it. `used` bounds the lengths on the host, so that nothing synchronises."""

    def __init__(self, model, batch, max_len):
        c, w = model.config, model.embed.weight
        shape = (c.num_hidden_layers, batch, c.num_key_value_heads, max_len, c.head_dim)
        self.k, self.v = (torch.zeros(shape, device=w.device, dtype=w.dtype) for _ in "kv")
        self.length = torch.zeros(batch, dtype=torch.long, device=w.device)
        self.used = 0

    def write(self, layer, k, v, pos):
        """Store k, v (B, Hkv, T, D) at positions pos (B, T); returns views of the keys and values up to `used`."""
        rows = torch.arange(pos.shape[0], device=pos.device)[:, None]
        self.k[layer].transpose(1, 2)[rows, pos] = k.transpose(1, 2)  # (B, T, Hkv, D)
        self.v[layer].transpose(1, 2)[rows, pos] = v.transpose(1, 2)
        return self.k[layer, :, :, : self.used], self.v[layer, :, :, : self.used]


class Attention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.layer = c.num_attention_heads, c.num_key_value_heads, c.head_dim, layer
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv_proj = Linear(c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=c.qkv_bias)
        self.o_proj = Linear(q, {"o_proj": c.hidden_size})

    def forward(self, x, cos, sin, cache=None, pos=None, mask=None):
        B, T, _ = x.shape
        qkv = self.qkv_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H + 2 Hkv, T, D)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.write(self.layer, k, v, pos)  # (B, Hkv, S, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))  # (B, H, T, D) -> (B, T, H*D) -> (B, T, C)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_up_proj = Linear(c.hidden_size, {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size})
        self.down_proj = Linear(c.intermediate_size, {"down_proj": c.hidden_size})

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, 2F) -> 2 x (B, T, F)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, cache=None, pos=None, mask=None):
        x = x + self.attn(self.input_layernorm(x), cos, sin, cache, pos, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    """`checkpointing`: recompute each block in backward. `valid_vocab`: ids at or past it belong to no token and are never
    sampled nor scored (Qwen's embedding has more rows than its tokenizer has ids)."""

    def __init__(self, config):
        super().__init__()
        self.config, self.checkpointing, self.valid_vocab = config, False, config.vocab_size
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size})
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def hidden(self, ids, cache=None):
        """ids (B, T) -> final-normed hidden states (B, T, C).

        Without a cache: causal attention over each row from position 0; rows may be padded on the right. With one: the T tokens
        of row b stand at positions cache.length[b] .. +T-1 and see all before them; the caller advances cache.length."""
        B, T = ids.shape
        x, mask = self.embed(ids), None
        if cache is None:
            pos = torch.arange(T, device=ids.device)[None]  # (1, T)
        else:
            pos = cache.length[:, None] + torch.arange(T, device=ids.device)  # (B, T)
            empty = cache.used == 0  # then the causal mask will do, for which SDPA has its fast kernels
            cache.used = min(cache.used + T, cache.k.shape[3])
            mask = None if empty else (torch.arange(cache.used, device=ids.device) <= pos[..., None])[:, None]  # (B, 1, T, S)
        cos, sin = (t[:, None] for t in rope_tables(pos, self.config.head_dim, self.config.rope_theta))  # (B, 1, T, D/2)
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, cache, pos, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, cache, pos, mask)
        return self.norm(x)

    def forward(self, ids, cache=None):
        """ids (B, T) -> logits (B, T, V) in the model's dtype. For log-probs prefer grpo.token_logprobs: no (B, T, V) tensor."""
        return self.lm_head(self.hidden(ids, cache))


# ---- loading


def place(device="auto", dtype="auto"):
    """(device, torch.dtype) that the flags --device and --dtype stand for: auto is cuda where there is one, with bfloat16, else
    the CPU, with float32. ValueError for cuda on a machine without it."""
    device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine has no CUDA device; use --device cpu")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return device, getattr(torch, dtype)


def fetch(path_or_hub_id, weights=True):
    """A local checkpoint folder as a Path; a hub id is downloaded first (only the files this project reads, resumed; without
    `weights` only config.json)."""
    name = str(path_or_hub_id)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise FileNotFoundError(f"--model {name}: no such folder; give a checkpoint folder or a hub id")
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
              "model*.safetensors", "model.safetensors.index.json"] if weights else ["config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as e:  # the hub client raises many kinds: no network, no such repository, no access
        raise FileNotFoundError(f"--model {name}: not a local folder, and the hub did not give it "
                                f"({type(e).__name__}: {str(e).partition(chr(10))[0]}); check id, network and login") from None


class Checkpoint:
    """The tensors of a safetensors folder by name, one or many shards; remembers which names nobody asked for."""

    def __init__(self, folder):
        self.folder = Path(folder)
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if index.is_file():
            try:
                self.where = dict(json.loads(index.read_text())["weight_map"].items())
            except (ValueError, KeyError, TypeError, AttributeError):
                self.where = {}
            if not self.where:
                raise ValueError(f"{index}: not an index of tensors to shards (a JSON object with weight_map); download it again")
        elif single.is_file():
            self.where = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise FileNotFoundError(f"{self.folder}: neither {single.name} nor {index.name} is there; is the download complete?")
        for shard in sorted(set(self.where.values())):
            if not (self.folder / shard).is_file():
                raise FileNotFoundError(f"{self.folder / shard}: the shard named in {index.name} is missing; download it again")
        self.unused, self.files = set(self.where), {}

    def _open(self, shard):
        try:
            return safe_open(self.folder / shard, framework="pt")
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{self.folder / shard}: not a readable safetensors file ({e}); download it again") from None

    def __contains__(self, name):
        return name in self.where

    def get(self, name, shape=None, dtype=None, device="cpu"):
        """The tensor `name`, checked against `shape`, cast to `dtype` on the CPU side if that makes it smaller to move."""
        if name not in self.where:
            raise ValueError(f"{self.folder}: the tensor {name} is missing")
        shard = self.where[name]
        if shard not in self.files:
            self.files = {shard: self._open(shard)}  # one open shard: host memory stays below one shard
        try:
            t = self.files[shard].get_tensor(name)
        except SafetensorError as e:
            raise ValueError(f"{self.folder / shard}: cannot read {name} ({e})") from None
        if shape is not None and tuple(t.shape) != tuple(shape):
            raise ValueError(f"{self.folder / shard}: {name} has shape {tuple(t.shape)}, config.json asks for {tuple(shape)}")
        self.unused.discard(name)
        return t.to(device=device, dtype=dtype or t.dtype)


class RandomCheckpoint:
    """Stands in for a Checkpoint: seeded random weights of the true shapes, made where they are needed. For speed and memory."""

    def __init__(self, seed=0):
        self.seed, self.unused = seed, set()

    def __contains__(self, name):
        return True

    def get(self, name, shape, dtype, device="cpu"):
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        self.seed += 1
        g = torch.Generator(device).manual_seed(self.seed)
        return torch.randn(shape, dtype=dtype, device=device, generator=g).mul_(0.02)


def prefix(path):
    """Checkpoint name of the module at `path`, without the projection: layers.3.attn.qkv_proj -> model.layers.3.self_attn."""
    return "model." + path.rsplit(".", 1)[0].replace(".attn", ".self_attn")


def build(config, source, device="cpu", dtype=torch.bfloat16, quant="none"):
    """A Qwen2 of `config` with the tensors of `source` (Checkpoint or RandomCheckpoint), one at a time to the device: no more
    than the model so far and one projection in 16 bits is ever held. quant != none turns each block's projections into
    nvfp4.QuantLinear at once (a checkpoint that is quantized already says so in its config.json)."""
    with torch.device("meta"):
        model = Qwen2(config)
    fill(model, "", source, device, dtype, quant)
    return finish(model, source)


def fill(model, within, source, device, dtype, quant):
    """Load the modules of a meta `model` whose path begins with `within` ("" is all, "layers.3." is one block)."""
    config = model.config
    for path, m in list(model.named_modules()):
        if not path.startswith(within):
            continue
        if isinstance(m, RMSNorm):
            m.weight = nn.Parameter(source.get(f"model.{path}.weight", m.weight.shape, dtype, device))
            m.noise = torch.zeros_like(m.weight, dtype=torch.float32)
        elif isinstance(m, nn.Embedding):
            m.weight = nn.Parameter(source.get("model.embed_tokens.weight", m.weight.shape, dtype, device))
        elif m is model.lm_head:
            if not config.tie_word_embeddings:
                m.weight = nn.Parameter(source.get("lm_head.weight", m.weight.shape, dtype, device))
        elif isinstance(m, Linear):
            if quant == "none" and not config.quantization:
                weight, bias = read_linear(source, path, m, dtype, device)
                m.weight, m.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
            else:
                import nvfp4

                model.set_submodule(path, nvfp4.load_linear(source, path, m, config, quant, dtype, device))


def finish(model, source):
    """Tie the head, check that every tensor found its place, freeze."""
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed.weight
        source.unused.discard("lm_head.weight")  # some exports store the tied head a second time
    unused = sorted(n for n in source.unused if not n.endswith("rotary_emb.inv_freq"))
    if unused:
        raise ValueError(f"{source.folder}: {len(unused)} tensors fit nowhere in this model, the first is {unused[0]}")
    return model.requires_grad_(False).eval()


def read_linear(source, path, m, dtype, device):
    """(weight (N, K), bias (N,) or None) of the fused projection at `path`, its parts read in row order."""
    K, where = m.weight.shape[1], prefix(path)
    weight = torch.cat([source.get(f"{where}.{p}.weight", (n, K), dtype, device) for p, n in m.parts.items()])
    return weight, read_bias(source, path, m, dtype, device)


def read_bias(source, path, m, dtype, device):
    """The bias (N,) of the fused projection at `path`, or None where the model has none."""
    if m.bias is None:
        return None
    return torch.cat([source.get(f"{prefix(path)}.{p}.bias", (n,), dtype, device) for p, n in m.parts.items()])


def load(path_or_hub_id, device="cpu", dtype=torch.bfloat16, quant="none"):
    """A Qwen2 from a Hugging Face folder or hub id, frozen, in eval mode.

    dtype: of embeddings, norms, biases and (unquantized) weights. quant: none | nvfp4 | mxfp4 | nf4.
    Raises FileNotFoundError / ValueError with one line that names the file or tensor."""
    folder = fetch(path_or_hub_id)
    return build(Config.read(folder), Checkpoint(folder), device, dtype, quant)
