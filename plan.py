"""
Size arithmetic: what a model costs in each number format, and which cards it trains on. Counts bytes from the configuration
alone; nothing is loaded. `python nvfp4.py --plan` prints it.

Weights are exact. The training peak is an estimate for train.py with gradient checkpointing: frozen weights, the adapter with
its gradient and AdamW's two moments, the input that each block keeps for recomputation, and the largest of what is alive for a
moment only (one block's activations and the decoded copy of its largest projection, or the LM head's chunk of logits). The
rollout, which comes before and frees its buffers, may fill what is left with keys and values: see the tokens column.

    python nvfp4.py --plan Qwen/Qwen2.5-32B-Instruct
    python nvfp4.py --plan config.json --rank 16 --tokens 8192

Shapes: C hidden, F intermediate, L layers, N rows, K columns.
"""
from pathlib import Path

from model import fetch

GIB = 2**30
BITS = {"none": 16, "nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}
# GiB that the driver reports of a card sold as such (RTX 4090, A100, L40S, H100, H200)
CARDS = {"24 GB": 23.5, "40 GB": 39.4, "48 GB": 44.4, "80 GB": 79.1, "141 GB": 139.8}
RESERVE = 1.5 * GIB  # CUDA context, kernels, what the allocator cannot fill


def config_of(name):
    """What Config.read takes for `name`: a config.json or a folder as it is, a hub id fetched (its config.json alone)."""
    if Path(name).suffix == ".json" or Path(name).exists():
        return name
    return fetch(name, weights=False)


def linears(c):
    """{projection: (N, K, parts fused in it)} of one block."""
    q, kv, C, F = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.hidden_size, c.intermediate_size
    return {"qkv_proj": (q + 2 * kv, C, 3), "o_proj": (C, q, 1), "gate_up_proj": (2 * F, C, 2), "down_proj": (C, F, 1)}


def weights(c, fmt):
    """Bytes of the frozen model by part; 16-bit embeddings, head, norms and biases in every format."""
    shapes, L = linears(c), c.num_hidden_layers
    rows = sum(n for n, _, _ in shapes.values())
    out = {"embeddings": c.vocab_size * c.hidden_size * 2,
           "lm_head": 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size * 2,
           "attention": L * sum(n * k for n, k, _ in list(shapes.values())[:2]) * BITS[fmt] / 8,
           "mlp": L * sum(n * k for n, k, _ in list(shapes.values())[2:]) * BITS[fmt] / 8,
           "norms, biases": (2 * L + 1) * c.hidden_size * (2 + 4) + L * shapes["qkv_proj"][0] * 2 * c.qkv_bias}
    if fmt != "none":
        out["norms, biases"] += L * rows * 4  # one float32 global scale a row
    return out


def kv_per_token(c):
    """Bytes of one token's keys and values in 16 bits."""
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 2


def lora_parameters(c, rank):
    return c.num_hidden_layers * sum(rank * (parts * k + n) for n, k, parts in linears(c).values())


def training_peak(c, fmt, rank, tokens):
    """Bytes at the peak of an update with `tokens` in a micro-batch: (frozen, adapter, kept activations, momentary)."""
    frozen = sum(weights(c, fmt).values())
    adapter = lora_parameters(c, rank) * 4 * 4  # value, gradient, two moments, in float32
    C, F, q = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
    kept = c.num_hidden_layers * tokens * C * 2
    qkv = q + 2 * c.num_key_value_heads * c.head_dim
    # one block recomputed with its graph: norms' float32 copies; q, k, v and their rotations; gate, up, their product; gradients
    block = tokens * (2 * (4 * C + 2 * C + 2 * C) + 2 * 3 * qkv + 2 * 2 * q + 2 * 6 * F)
    scratch = max(n * k for n, k, _ in linears(c).values()) * 2 * (fmt != "none")
    head = 3 * (1 << 29)
    return frozen, adapter, kept, max(block + scratch, head)


def table(c, rank=32, tokens=16384):
    """The lines that --plan prints."""
    formats = list(BITS)
    shown = {"none": "bf16"}

    def line(name, values):
        return f"{name:<28}" + "".join(f"{v:>12}" for v in values)

    parts = {f: weights(c, f) for f in formats}
    peaks = {f: training_peak(c, f, rank, tokens) for f in formats}
    lines = [line("GiB", [shown.get(f, f) for f in formats])]
    for name in parts["none"]:
        lines.append(line(name, [f"{parts[f][name] / GIB:.2f}" for f in formats]))
    lines.append(line("weights", [f"{sum(parts[f].values()) / GIB:.2f}" for f in formats]))
    for i, name in ((1, f"LoRA r={rank} with AdamW"), (2, f"kept for {tokens} tokens"), (3, "alive for a moment")):
        lines.append(line(name, [f"{peaks[f][i] / GIB:.2f}" for f in formats]))
    lines.append(line("training peak, estimate", [f"{sum(peaks[f]) / GIB:.2f}" for f in formats]))
    lines.append("")
    lines.append(f"keys and values: {kv_per_token(c) / 1024:.1f} KiB a token; adapter: {lora_parameters(c, rank) / 1e6:.1f} M")
    lines.append("")
    lines.append("does it train on this card? if so, the tokens a rollout's keys and values have room for (activations aside)")
    for card, gib in CARDS.items():
        cells = []
        for f in formats:
            room = gib * GIB - RESERVE
            fits = sum(peaks[f]) <= room
            cells.append(f"{(room - sum(peaks[f][:2])) / kv_per_token(c) / 1e3:.0f}k" if fits else "no")
        lines.append(line(card, cells))
    return "\n".join(lines)
