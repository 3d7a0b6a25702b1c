"""
Markdown tables of what lab/bench.py left in results/, others' figures in brackets: those, and how
they were measured, are in results/peers.json.

    python lab/tables.py
"""
import json
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command
from plumbing.command import cell

import torch

RESULTS = Path(__file__).resolve().parents[1] / "results"
PEERS = json.loads((RESULTS / "peers.json").read_text())
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)


def card(name=None):
    """A card's name in the names of its results, this machine's by default: "NVIDIA H100 80GB HBM3"
    -> h100."""
    name = name or torch.cuda.get_device_name()
    words = [w for w in re.split(r"[ -]", name) if not re.fullmatch(r"NVIDIA|\d+GB|HBM.*|SXM.*", w)]
    return "-".join(words).lower()


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
            across = "completions" if what == "step" else "rows"
            print(f"| {across} | {' | '.join(map(str, ticks))} |\n|{'---|' * (len(ticks) + 1)}")
            for name, points in ours.items():
                other = theirs.get(name, {})
                cells = [f"{cell(points.get(n), spec)} ({cell(other.get(n), spec)})" for n in ticks]
                print(f"| {name} | {' | '.join(cells)} |")


def main():
    command.Parser(description=tables.__doc__).parse_args()
    tables()


if __name__ == "__main__":
    sys.exit(command.run("lab/tables.py", main))
