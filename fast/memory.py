"""
The one place for arithmetic of bytes: what a model costs in each number format, which cards it
trains on, what an update and a rollout need in addition. `python nvfp4.py --plan` prints it; the
engine plans its rows by it, and by it frees them when the update would not fit (engine.make_room).

Counted from the configuration alone; nothing is loaded. Weights, adapter, keys and values are
exact. Temporary tensors are an estimate; the table's is for 16-bit activations.

    python nvfp4.py --plan Qwen/Qwen2.5-7B-Instruct --rank 16 --tokens 8192

Shapes: C hidden, F intermediate, L layers, N rows, K columns, V vocabulary.
"""
from fast.plan import COUNTERS, FLAGS, PARTIALS
from nvfp4 import FORMATS

GIB = 2**30
# of a weight, its share of the scale included
BITS = {"none": 16} | {name: 4 + 8 * f.scale_dtype.itemsize / f.block
                       for name, f in FORMATS.items()}
# GiB that the driver reports of a card sold as such (RTX 4090, A100, L40S, H100, H200)
CARDS = {"24 GB": 23.5, "40 GB": 39.4, "48 GB": 44.4, "80 GB": 79.1, "141 GB": 139.8}
RESERVE = 1.5 * GIB  # CUDA context, kernels, what the allocator cannot fill
# tokens that a prefill may hold: the first of these that leaves room for eight rows, or one prompt
PREFILL_TOKENS = 8192, 4096, 2048, 1024


# ---- what lasts


def linears(c):
    """{projection: (N, K, parts fused in it)} of one block."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    C, F = c.hidden_size, c.intermediate_size
    return {"qkv_proj": (q + 2 * kv, C, 3), "o_proj": (C, q, 1), "gate_up_proj": (2 * F, C, 2),
            "down_proj": (C, F, 1)}


def weights(c, fmt):
    """Bytes of the frozen model by part; 16-bit embeddings, head, norms and biases in every
    format. A norm also has its float32 noise, a quantized row a float32 global scale."""
    shapes, L = linears(c), c.num_hidden_layers
    size = {name: L * n * k * BITS[fmt] / 8 for name, (n, k, _) in shapes.items()}
    norms = (2 * L + 1) * c.hidden_size + 2 * L * c.head_dim * c.qk_norm
    small = norms * (2 + 4) + L * shapes["qkv_proj"][0] * 2 * c.qkv_bias
    if fmt != "none":
        small += L * sum(n for n, _, _ in shapes.values()) * 4
    return {"embeddings": c.vocab_size * c.hidden_size * 2,
            "lm_head": 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size * 2,
            "attention": size["qkv_proj"] + size["o_proj"],
            "mlp": size["gate_up_proj"] + size["down_proj"], "norms, biases": small}


def kv_per_token(c, itemsize=2):
    """Bytes of one token's keys and values, in 16 bits by default."""
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * itemsize


def lora_parameters(c, rank):
    return c.num_hidden_layers * sum(rank * (p * k + n) for n, k, p in linears(c).values())


def gemm_scratch(c):
    """Bytes that fast/gemm.py takes: the largest weight in 16 bits, decoded or, if it has 16 bits
    already, copied to be beside its adapter (without one it is not), and its buffers. It never
    takes more, except an adapter's columns behind that weight (1% of the 7B's at rank 16): a
    process holds all of it once it has multiplied each weight once."""
    return max(2 * n * k for n, k, _ in linears(c).values()) + 4 * (PARTIALS + COUNTERS + FLAGS)


# ---- training


def update_bytes(c, tokens, checkpointing=True):
    """(kept, momentary): bytes that an update with `tokens` in a micro-batch needs beside weights
    and adapter, to 5% of what was measured.

    Kept for the backward: each block's input with checkpointing, else all that each block keeps.
    Momentary: the GEMM's scratch, and the larger of two: what the LM head makes of a chunk of
    tokens, or the gradients on their way through an MLP (with checkpointing, beside all that this
    block keeps)."""
    C, F, L = c.hidden_size, c.intermediate_size, c.num_hidden_layers
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    block = 2 * C + 2 * q + 2 * kv + 2 * F  # numbers a token that one block keeps
    block += (q + 2 * kv) * c.qk_norm  # q, k and v before the norms of their heads
    kept = C if checkpointing else block
    head, moment = 3 << 27, 4 * C + 3 * F + (block if checkpointing else 0)
    moment = max(2 * tokens * moment, head + 2 * tokens * 6 * C)
    return 2 * tokens * L * kept, moment + gemm_scratch(c)


def fit_update(c, free, longest, tokens=0, checkpointing="auto"):
    """(tokens, checkpointing) for an update's micro-batches in `free` bytes: the most tokens that
    leave half of these to keys and values, without recomputing if possible. What is given stays.
    Rows have up to `longest` tokens."""
    modes = {"auto": (False, True), "on": (True,), "off": (False,)}[checkpointing]
    sizes = (tokens,) if tokens else range(32768, 1024, -1024)
    fits = [(t, mode) for mode in modes for t in sizes
            if sum(update_bytes(c, max(t, longest), mode)) <= free / 2]
    return fits[0] if fits else (sizes[-1], modes[-1])


# ---- rollouts


def prefill_bytes(c, tokens):
    """Bytes of a rollout beside weights, adapter and what each row takes: the activations of a
    prefill of `tokens`, and the FP4 GEMM's scratch."""
    activations = tokens * (4 * c.hidden_size + 3 * c.intermediate_size) * 4
    return activations + gemm_scratch(c) + (1 << 29)


def row_bytes(c, max_len, itemsize=2):
    """Bytes of a row of a rollout: keys and values of max_len tokens, logits, the sort of top_p."""
    # float32 logits, twice because the allocator keeps the rehearsal's apart from the graph's; for
    # top_p also log-probs, values and indices twice
    return max_len * kv_per_token(c, itemsize) + c.vocab_size * (8 + 40)


# ---- the table


def table(c, rank=32, tokens=16384):
    """The lines that --plan prints."""
    def line(name, values):
        return f"{name:<28}" + "".join(f"{v:>12}" for v in values)

    parts = {f: weights(c, f) for f in BITS}
    adapter = lora_parameters(c, rank) * 4 * 4  # value, gradient, two moments, in float32
    peaks = {f: (sum(parts[f].values()), adapter, *update_bytes(c, tokens)) for f in BITS}
    lines = [line("GiB", ["bf16" if f == "none" else f for f in BITS])]
    rows = {name: [parts[f][name] for f in BITS] for name in parts["none"]}
    for i, name in enumerate(("weights", f"LoRA r={rank} with AdamW", f"kept for {tokens} tokens",
                              "alive for a moment")):
        rows[name] = [peaks[f][i] for f in BITS]
    rows["training peak, estimate"] = [sum(peaks[f]) for f in BITS]
    lines += [line(name, [f"{v / GIB:.2f}" for v in values]) for name, values in rows.items()]
    lines += ["", f"keys and values: {kv_per_token(c) / 1024:.1f} KiB a token; adapter: "
                  f"{lora_parameters(c, rank) / 1e6:.1f} M", "",
              "does it train on this card? if so, the tokens a rollout's keys and values have room "
              "for (activations aside)"]
    for card, gib in CARDS.items():
        room = gib * GIB - RESERVE
        tokens_left = [(room - sum(peaks[f][:2])) / kv_per_token(c) for f in BITS]
        lines.append(line(card, [f"{n / 1e3:.0f}k" if sum(peaks[f]) <= room else "no"
                                 for f, n in zip(BITS, tokens_left, strict=True)]))
    return "\n".join(lines)
