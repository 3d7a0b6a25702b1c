"""
The part of the benchmarks that needs no GPU: their shapes, others' figures, and tables of what
lab/bench.py left in results/.

    python lab/bench_report.py tables      # Markdown, others' figures in brackets

results/peers.json has others' figures, and how they were measured.
"""
import json
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command
from plumbing.command import cell
from plumbing.files import whole

import torch

import model as qwen
from fast import memory
from lab import archive

RESULTS = Path(__file__).resolve().parents[1] / "results"
PEERS = json.loads((RESULTS / "peers.json").read_text())
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


def card(name=None):
    """A card's name in the names of its results, this machine's by default: "NVIDIA H100 80GB HBM3"
    -> h100."""
    name = name or torch.cuda.get_device_name()
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


def peer(name, where):
    """Another's figures (results/peers.json), {} unless they are of the same card: the ratio of
    another card's to ours would say nothing."""
    return PEERS[name] if card(PEERS[name]["card"]) == where else {}


def grouped(rows, name, tick, value):
    """{name: {tick: value}} of rows: a line of a table for each name, as "{size}:{quant}"."""
    lines = {}
    for row in rows:
        lines.setdefault(name.format(**row), {})[row[tick]] = row[value]
    return lines


def speedups(rows, where):
    """({shape: {M: speed-up of the NVFP4 GEMM}}, Marlin's), with their geometric means."""
    rows = [r for r in rows if r["fmt"] == "nvfp4" and r["pass"] == "forward"]
    ours, marlin = grouped(rows, "{shape}", "M", "speedup"), peer("marlin", where)
    theirs = {shape: dict(zip(marlin["rows"], values, strict=True))
              for shape, values in marlin.get("speedup", {}).items() if shape in ours}
    for table in (ours, theirs):
        if eight := [table[shape] for shape in PEERS["marlin"]["speedup"] if shape in table]:
            shared = [M for M in ROWS if all(M in points for points in eight)]
            table["geometric mean"] = {M: statistics.geometric_mean(p[M] for p in eight)
                                       for M in shared}
    return ours, theirs


def throughputs(rows, where):
    """({size:format:LoRA rank: {rows: tokens/s}}, vLLM's)."""
    rows = [r for r in rows if r["kind"] == "rows"]
    ours = grouped(rows, "{size}:{quant}:{lora_rank}", "rows", "decode_tok_s")
    vllm = peer("vllm", where).get("tok_s", {})
    return ours, {name: {int(n): v for n, v in points.items()} for name, points in vllm.items()}


def whole_steps(rows, where):
    """({size:format: {completions: seconds of rollout and update}} of the paper's shape, on the
    whole card; how many times as long 16 bits take)."""
    steps = [r | {"seconds": r["rollout_s"] + r["update_s"]} for r in rows
             if (r["group"], r["new"], r["card_gib"]) == (1, 2048, 0)
             and "rollout_s" in r and "update_s" in r]
    ours, times = grouped(steps, "{size}:{quant}", "completions", "seconds"), {}
    for name, points in ours.items():
        base = ours.get(f"{name.partition(':')[0]}:none", {})
        times[name] = {n: base[n] / s for n, s in points.items() if n in base}
    return ours, times


def tables():
    """Markdown tables of what kernels, rollout and step left, in brackets others' figures or, for
    steps, how many times as long 16 bits take."""
    for what, figures, spec in (("kernels", speedups, ".2f"), ("rollout", throughputs, ".0f"),
                                ("step", whole_steps, ".2f")):
        for path in sorted(RESULTS.glob(f"{what}_*.json")):
            ours, theirs = figures(json.loads(path.read_text()), path.stem.partition("_")[2])
            ticks = sorted({n for points in ours.values() for n in points})
            name = "completions" if what == "step" else "rows"
            print(f"| {name} | {' | '.join(map(str, ticks))} |\n|{'---|' * (len(ticks) + 1)}")
            for name, points in ours.items():
                other = theirs.get(name, {})
                cells = [f"{cell(points.get(n), spec)} ({cell(other.get(n), spec)})" for n in ticks]
                print(f"| {name} | {' | '.join(cells)} |")


def main():
    parser = command.Parser(description=tables.__doc__)
    parser.add_argument("what", choices=["tables"], help="what to print")
    parser.parse_args()
    tables()


if __name__ == "__main__":
    sys.exit(command.run("lab/bench_report.py", main))
