"""
Qwen2.5 in plain PyTorch: the model that everything else swaps modules into.

The forward pass is Qwen2.5's (RMSNorm, RoPE, grouped-query attention with QKV bias, SwiGLU). Other
families differ by a flag: Llama and Mistral drop the bias; Qwen3 drops it and normalises each
head of q and k. Two things differ from the textbook: q,k,v are one matrix and gate,up are one
matrix, for speed; and each RMSNorm carries a `noise` vector that is zero unless aqn.py writes to
it. Quantization (nvfp4.py) and LoRA (lora.py) replace Linear modules.

`model.fast` is None, or what fast.install has put there: faster functions with the same results.

Left out: sliding windows, mixture of experts. A config that asks for them is an error, not ignored.

    model = load("Qwen/Qwen2.5-0.5B-Instruct", device="cuda", quant="nvfp4")
    logits = model(torch.tensor([[1, 2, 3]], device="cuda"))

Shapes: B rows, T tokens, C hidden, F intermediate, L layers, H query heads, Hkv kv heads, D head
size, S cached positions, V vocabulary, N and K outputs and inputs of a linear.
"""
import copy
from dataclasses import dataclass

from plumbing import checkpoint

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import nvfp4


@dataclass
class Config:
    """What the model needs of config.json; `quantization` is its quantization_config, as it is."""

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
    qk_norm: bool = False
    max_position_embeddings: int = 32768
    quantization: dict | None = None
    rope_scaling: tuple | None = None  # (factor, slow, fast), see rope_tables


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (weight + noise), in float32, cast once. `noise` (C,) is
    AQN's state: zeros = clean."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.register_buffer("noise", torch.zeros(dim, dtype=torch.float32), persistent=False)

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return (h * (self.weight.float() + self.noise)).to(x.dtype)


class Linear(nn.Module):
    """y = x W^T + b for W (N, K), not quantized.

    nvfp4.QuantLinear and lora.LoRALinear take its place. All three have this interface:

        shape       (N, K)
        parts       {name: rows} of the checkpoint's projections, stacked in this order in W
        dense()     (N, K) float32: the weight that forward multiplies by, adapter included
        base        the frozen linear: itself, or the one that an adapter wraps
        base.bias   (N,) or None
        base.q      the nvfp4.Quantized weight, or None if `base.weight` is in 16 bits
        base.weight_in(dtype)   the weight (N, K); for q, a cached copy, meant for the CPU
    """

    q = None

    def __init__(self, in_features, parts, bias=False):
        super().__init__()
        self.parts = dict(parts)
        self.shape = sum(self.parts.values()), in_features
        self.weight = nn.Parameter(torch.empty(self.shape))
        self.bias = nn.Parameter(torch.zeros(self.shape[0])) if bias else None

    @property
    def base(self):
        return self

    def dense(self):
        return self.weight.float()

    def weight_in(self, dtype):
        return self.weight.to(dtype)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


PROJECTIONS = ("attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def projections(model):
    """[(path, linear)] of the four projections of each block: what is quantized and adapted."""
    return [(f"layers.{i}.{name}", block.get_submodule(name))
            for i, block in enumerate(model.layers) for name in PROJECTIONS]


def stored_name(path, part=None):
    """The checkpoint's name of the module at `path`, or of a part of the fused projection there:
    layers.3.attn.qkv_proj and k_proj -> model.layers.3.self_attn.k_proj."""
    path = f"{path.rpartition('.')[0]}.{part}" if part else path
    name = {"embed": "model.embed_tokens", "lm_head": "lm_head"}.get(path, f"model.{path}")
    return name.replace(".attn", ".self_attn")


def to_device(values, device, dtype=torch.long):
    """A list as a tensor on the device; the host does not wait for the device."""
    t = torch.tensor(values, dtype=dtype)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


def padded(rows, device, dtype=torch.long):
    """Lists of different lengths, one a row -> (B, longest), with zeros on the right."""
    longest = max(len(row) for row in rows)
    return to_device([row + [0] * (longest - len(row)) for row in rows], device, dtype)


def rope_tables(pos, c):
    """cos, sin of the rotary angles at pos (any shape), float32, shape (*pos, D/2); c: a Config."""
    pair = torch.arange(c.head_dim // 2, device=pos.device, dtype=torch.float32)
    freq = c.rope_theta ** (-2 * pair / c.head_dim)  # (D/2,)
    if c.rope_scaling:  # Llama 3's: slow pairs turn `factor` times slower, fast ones do not
        factor, slow, fast = c.rope_scaling
        keep = ((freq - slow) / (fast - slow)).clamp(0, 1)
        freq = freq * (keep + (1 - keep) / factor)
    angle = pos[..., None].float() * freq
    return angle.cos(), angle.sin()


def apply_rope(x, cos, sin):
    """Rotary embedding of x (B, H, T, D), halves paired as in Hugging Face checkpoints; cos, sin
    broadcast to (B, 1, T, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class KVCache:
    """Keys and values of B rows of up to `max_len` tokens: k, v (L, B, Hkv, S, D).

    `length` (B,) long counts the live tokens of each row; the model's caller advances it. `used`
    is an upper bound on the lengths, kept on the host so that nothing synchronises."""

    def __init__(self, model, batch, max_len):
        c, w = model.config, model.embed.weight
        shape = (c.num_hidden_layers, batch, c.num_key_value_heads, max_len, c.head_dim)
        self.k = torch.zeros(shape, device=w.device, dtype=w.dtype)
        self.v = torch.zeros_like(self.k)
        self.length = torch.zeros(batch, dtype=torch.long, device=w.device)
        self.used = 0

    def write(self, layer, k, v, pos):
        """Store k, v (B, Hkv, T, D) at positions pos (B, T) -> views of all up to `used`."""
        rows = torch.arange(pos.shape[0], device=pos.device)[:, None]
        self.k[layer].transpose(1, 2)[rows, pos] = k.transpose(1, 2)  # (B, T, Hkv, D)
        self.v[layer].transpose(1, 2)[rows, pos] = v.transpose(1, 2)
        return self.k[layer, :, :, : self.used], self.v[layer, :, :, : self.used]

    def rows(self, first, end):
        """A view of the rows first..end - 1: k, v and length are shared, `used` is not."""
        part = copy.copy(self)
        part.k, part.v = self.k[:, first:end], self.v[:, first:end]
        part.length = self.length[first:end]
        return part


class Attention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.head_dim, self.layer = c.head_dim, layer
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv_proj = Linear(c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, c.qkv_bias)
        self.o_proj = Linear(q, {"o_proj": c.hidden_size})
        # Qwen3 normalises the D values of each head; AQN leaves these two norms alone
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def forward(self, x, cos, sin, cache=None, pos=None, mask=None):
        B, T, _ = x.shape
        qkv = self.qkv_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H + 2 Hkv, T, D)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if cache is not None:
            k, v = cache.write(self.layer, k, v, pos)  # (B, Hkv, S, D)
        if T == 1 and mask is not None:
            # one token a row: the query heads of a kv head take the place of tokens
            q = q.view(B, self.kv_heads, -1, self.head_dim)  # (B, H, 1, D) -> (B, Hkv, H / Hkv, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           enable_gqa=q.shape[1] != self.kv_heads)
        y = y.reshape(B, self.heads, T, self.head_dim)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))  # (B, H, T, D) -> (B, T, C)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        C, width = c.hidden_size, c.intermediate_size
        self.gate_up_proj = Linear(C, {"gate_proj": width, "up_proj": width})
        self.down_proj = Linear(width, {"down_proj": C})

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


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        V, C = config.vocab_size, config.hidden_size
        self.config = config
        self.valid_vocab = V  # ids from here on are never sampled or scored (sample.load_policy)
        self.checkpointing = False  # recompute each block in backward
        self.fast = None
        self.embed = nn.Embedding.from_pretrained(torch.empty(V, C), freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(C, config.rms_norm_eps)
        self.lm_head = Linear(C, {"lm_head": V})
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def rope(self, pos):
        """cos, sin (B, 1, T, D/2) for tokens at positions pos (B, T)."""
        return [t[:, None] for t in rope_tables(pos, self.config)]

    def hidden(self, ids, cache=None):
        """ids (B, T) -> final-normed hidden states (B, T, C).

        Without a cache: causal attention over each row from position 0; rows may be padded on the
        right. With one: the T tokens of row b take positions cache.length[b] .. +T-1 and attend
        to all before them; the caller advances cache.length."""
        T = ids.shape[1]
        pos = torch.arange(T, device=ids.device)[None]  # (1, T)
        mask = None  # causal
        if cache is not None:
            pos = cache.length[:, None] + pos  # (B, T)
            filled = cache.used > 0
            cache.used = min(cache.used + T, cache.k.shape[3])
            if filled:  # else the causal mask suffices, for which SDPA has fast kernels
                seen = torch.arange(cache.used, device=ids.device) <= pos[..., None]  # (B, T, S)
                mask = seen[:, None]  # (B, 1, T, S)
        x = self.embed(ids)  # (B, T, C)
        cos, sin = self.rope(pos)
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = recomputed(block, x, cos, sin, cache, pos, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, cache, pos, mask)
        return self.norm(x)

    def forward(self, ids, cache=None):
        """ids (B, T) -> logits (B, T, V) in the model's dtype. For log-probs prefer token_logprobs,
        which makes no (B, T, V) tensor."""
        return self.lm_head(self.hidden(ids, cache))


# ---- log-probs of tokens


class HeadLogits(torch.autograd.Function):
    """hidden (S, C) @ weight (V, C)^T -> (S, V) float32, for 16-bit factors on the GPU: a GEMM that
    returns bfloat16 would move a logit of 20 by up to 0.06."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # (S, C) @ (C, V)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        need_hidden, need_weight = ctx.needs_input_grad
        return (grad @ weight if need_hidden else None,  # (S, V) @ (V, C)
                grad.t() @ hidden if need_weight else None)  # (V, S) @ (S, C)


def logits(hidden, weight):
    """hidden (S, C) times an LM head (V, C): logits (S, V) in float32 (float64 for float64), which
    sampler and trainer both use."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return HeadLogits.apply(hidden, weight)
    x = hidden @ weight.t()  # (S, C) @ (C, V)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def score(hidden, weight, targets, temperature, valid_vocab):
    """(log p(target) (c,), entropy (c,)) of a chunk's hidden (c, C) and targets (c,)."""
    # Qwen's embedding has rows past the tokenizer's last id: they have probability 0. Tokens were
    # sampled from the tempered distribution.
    x = logits(hidden, weight)[:, :valid_vocab]  # (c, V)
    if temperature != 1:
        x = x / temperature
    entropy = torch.special.entr(x.detach().softmax(-1)).sum(1)  # -p log p, and 0 at p = 0
    return -F.cross_entropy(x, targets, reduction="none"), entropy


def token_logprobs(hidden, weight, targets, temperature=1.0, valid_vocab=None, chunk=None):
    """log p(target) and entropy (nats) of softmax(hidden @ weight.T / temperature): (S,), (S,),
    float32.

    hidden (S, C): final-normed states of the positions that *predict* the targets; weight (V, C):
    the LM head; targets (S,) long in [0, valid_vocab). logp is differentiable in hidden, and in
    weight if it requires grad; the entropy is a detached metric. `chunk`: tokens at a time
    (default: 0.5 GiB of float32 logits); a chunk's logits are recomputed in backward, so that no
    (S, V) tensor ever exists."""
    chunk = chunk or max(1, 2**27 // weight.shape[0])
    parts = [recomputed(score, h, weight, t, temperature, valid_vocab, use_reentrant=False)
             for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


# ---- checkpoints


def load(path_or_hub_id, device="cpu", dtype=torch.bfloat16, quant="none", calibration=None):
    """A Transformer from a Hugging Face folder or hub id, frozen, in eval mode.

    dtype: of embeddings, norms, biases and (unquantized) weights; None: as stored. quant: none, or
    one of nvfp4.FORMATS. calibration: ids (B, T), with which AWQ chooses the scales of `quant`.
    OSError / ValueError with one line that names the file, tensor or hub id."""
    folder = checkpoint.fetch(path_or_hub_id)
    config, source = read_config(folder), checkpoint.Checkpoint(folder)
    if calibration is not None and config.quantization:
        raise ValueError(f"--awq: {folder} is quantized already; give the 16-bit checkpoint")
    return build(config, source, device, dtype, quant, calibration)


def read_config(folder):
    """The Config of a checkpoint folder."""
    return Config(**checkpoint.read_config(folder))


def build(config, source, device="cpu", dtype=torch.bfloat16, quant="none", calibration=None):
    """A Transformer of `config` with the tensors of `source`, a checkpoint.Checkpoint."""
    model = skeleton(config)
    for _ in stream(model, source, device, dtype, quant, calibration):
        pass  # a piece is in the model when it is yielded
    return model.eval()


def skeleton(config):
    """A Transformer without memory, on the meta device."""
    with torch.device("meta"):
        return Transformer(config)


@torch.no_grad()
def stream(model, source, device="cpu", dtype=None, quant="none", calibration=None, report=None):
    """Fill a skeleton from `source`, in pieces, and yield the path of each when it is done: embed,
    norm, lm_head (unless it is the embedding), layers.0, layers.1, ... Each projection is rounded
    to `quant` as it is read, and one tensor at a time moves to the device: memory holds the pieces
    that the caller has not dropped (model.layers[i] = None) and one projection as stored. dtype
    None: as stored. calibration, report: as in nvfp4.calibrated, which then does the rounding.
    ValueError at the end if tensors are left that fit nowhere."""
    if calibration is not None:
        unrounded = stream(model, source, device, dtype)
        yield from nvfp4.calibrated(model, unrounded, quant, calibration, device, report)
        return
    fmt = source.check_format(quant, nvfp4.FORMATS)
    tied = model.config.tie_word_embeddings
    pieces = ["embed", "norm"] if tied else ["embed", "norm", "lm_head"]
    pieces += [f"layers.{i}" for i in range(len(model.layers))]
    for piece in pieces:
        for path, m in list(model.get_submodule(piece).named_modules(prefix=piece)):
            if (noise := getattr(m, "noise", None)) is not None:  # a norm's, or the user's own
                m.noise = torch.zeros(noise.shape, dtype=noise.dtype, device=device)
            if path.endswith("_proj"):
                model.set_submodule(path, read_linear(m, path, source, quant, fmt, dtype, device))
            elif hasattr(m, "weight"):
                w = source.get(f"{stored_name(path)}.weight", m.weight.shape, dtype, device)
                m.weight = nn.Parameter(w, requires_grad=False)
        if piece == "embed" and tied:
            model.lm_head.weight = model.embed.weight
            source.check_tied_head(model.embed.weight)
        yield piece
    source.check_all_used()


def read_linear(m, path, source, quant, fmt, dtype, device):
    """The linear that takes the place of the meta Linear `m` at `path`, its parts read in row
    order. fmt: the format that the checkpoint is stored in, or None.

    Weights are rounded to `quant` from what is stored, whatever `dtype` is: so an adapter meets the
    same four bits on all devices, in a converted checkpoint and in a merge. From a checkpoint that
    is quantized already they are taken unchanged, and a fused projection that it left in 16 bits
    stays a Linear."""
    K, bias = m.shape[1], None
    names = {stored_name(path, part): n for part, n in m.parts.items()}
    if m.bias is not None:
        bias = torch.cat([source.get(f"{name}.bias", (n,), dtype, device)
                          for name, n in names.items()])
    if all(map(source.is_packed, names)):
        q = nvfp4.Quantized(fmt, m.shape, *source.packed(names, K, device))
        return nvfp4.QuantLinear(q, m.parts, bias)
    rounds = quant != "none" and not fmt
    weight = torch.cat([source.get(f"{name}.weight", (n, K), None if rounds else dtype, device)
                        for name, n in names.items()])
    if rounds:
        return nvfp4.QuantLinear(nvfp4.quantize(weight, quant, path), m.parts, bias)
    m.weight = nn.Parameter(weight, requires_grad=False)
    m.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return m


def tensors(piece, path=""):
    """Yields (name, tensor) for everything below `piece`, the module at `path` of a model, as a
    checkpoint stores it. Neither a tied head nor LoRA is stored, but an adapter's norms are.
    ValueError for codes that the fast functions have rearranged."""
    embedding = None
    for at, m in piece.named_modules(prefix=path):
        if at.endswith("_proj"):
            row = 0
            for part, n in m.parts.items():
                name, rows = stored_name(at, part), slice(row, row + n)
                row += n
                if m.base.q is None:
                    yield f"{name}.weight", m.base.weight[rows]
                elif type(m.base.q) is not nvfp4.Quantized:
                    raise ValueError(f"{name}: its codes lie as the kernels read them; call "
                                     "fast.uninstall(model) first")
                else:
                    yield from checkpoint.packed_tensors(name, m.base.q, rows)
                if m.base.bias is not None:
                    yield f"{name}.bias", m.base.bias[rows]
        elif isinstance(m, nn.Embedding):
            embedding = m.weight
            yield f"{stored_name(at)}.weight", m.weight
        elif isinstance(m, RMSNorm) or (at == "lm_head" and m.weight is not embedding):
            yield f"{stored_name(at)}.weight", m.weight
