"""
The part of the benchmarks that needs no GPU: their shapes, the bytes that a step must read, and the
rows that lab/bench.py leaves in results/. results/peers.json has others' figures, and how they were
measured.
"""
import json
import re
from pathlib import Path

from plumbing.files import whole

import model as qwen
from fast import memory
from lab import archive

RESULTS = Path(__file__).resolve().parents[1] / "results"
# hidden, intermediate, layers, heads, kv heads, vocabulary, tied head of Qwen2.5
SIZES = {"0.5b": (896, 4864, 24, 14, 2, 151936, True),
         "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
         "3b": (2048, 11008, 36, 16, 2, 151936, True),
         "7b": (3584, 18944, 28, 28, 4, 152064, False),
         "14b": (5120, 13824, 48, 40, 8, 152064, False),
         "32b": (5120, 27648, 64, 40, 8, 152064, False),
         "72b": (8192, 29568, 80, 64, 8, 152064, False)}
LAYERS = ("qkv", "o", "gate_up", "down")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)


def config(size):
    C, F, L, H, kv, V, tied = SIZES[size]
    return qwen.Config(V, C, F, L, H, kv, C // H, rope_theta=1e6, tie_word_embeddings=tied)


def linear(name):
    """(N, K) of a layer, named as in "0.5b.down"."""
    size, layer = name.rsplit(".", 1)
    return memory.linears(config(size))[f"{layer}_proj"][:2]


def floor_bytes(c, quant, rank, rows, length):
    """Bytes that one decode step must read, by part: weights, LM head, adapter in 16 bits, keys and
    values of `length` tokens."""
    w = memory.weights(c, quant)
    return {"linear": w["attention"] + w["mlp"], "head": w["lm_head"] or w["embeddings"],
            "lora": 2 * memory.lora_parameters(c, rank),
            "kv": rows * length * memory.kv_per_token(c)}


def card(name):
    """A card's name in the names of its results: "NVIDIA H100 80GB HBM3" -> h100."""
    words = [w for w in re.split(r"[ -]", name) if not re.fullmatch(r"NVIDIA|\d+GB|HBM.*|SXM.*", w)]
    return "-".join(words).lower()


def record(path, row, key):
    """Print a row and write it into the JSON list at `path`, where it replaces one with the same
    values of `key`. A row of what did not fit lacks some of them."""
    row = archive.short(row, 4)
    print(*(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
          flush=True)
    old = json.loads(path.read_text()) if path.is_file() else []
    kept = [r for r in old if any(r.get(k) != row.get(k) for k in key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as part:
        part.write_text("[\n" + ",\n".join(map(json.dumps, [*kept, row])) + "\n]\n")
