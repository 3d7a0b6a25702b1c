"""
The part of the benchmarks that needs no GPU: their shapes, others' figures, tables and pictures of
what lab/bench.py left in results/, and a step on many cards, on paper.

    python lab/bench_report.py tables      # Markdown, and a picture beside each JSON list
    python lab/bench_report.py cards runs/one runs/two    # completions/s by number of cards
    python lab/bench_report.py scale       # a step of the 7B on 1 to 512 cards, on paper

results/peers.json has others' figures, and how they were measured.
"""
import argparse
import json
import math
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command
from plumbing.command import cell
from plumbing.curves import Figure, dress, look, read
from plumbing.files import saved

import numpy as np
import torch

import model as qwen
from fast import memory
from lab import archive, plot

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
SHAPES = [f"{size}.{layer}" for size in ("7b", "32b") for layer in LAYERS]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)


def config(size):
    C, F, L, H, kv, V, tied = SIZES[size]
    return qwen.Config(V, C, F, L, H, kv, C // H, rope_theta=1e6, tie_word_embeddings=tied)


def card(name=None):
    """A card's name in the names of its results, this machine's by default: "NVIDIA H100 80GB HBM3"
    -> h100."""
    name = name or torch.cuda.get_device_name()
    words = [w for w in re.split(r"[ -]", name) if not re.fullmatch(r"NVIDIA|\d+GB|HBM.*|SXM.*", w)]
    return "-".join(words).lower()


def peers(where):
    """Others' figures (results/peers.json) for the same card: the ratio of another
    card's to ours would say nothing."""
    return {name: p for name, p in PEERS.items() if card(p["card"]) == where}


def marlins(where):
    """{shape: {M: Marlin's speed-up}} on this card; {} where none was measured."""
    p = peers(where).get("marlin", {"rows": [], "speedup": {}})
    return {s: dict(zip(p["rows"], of, strict=True)) for s, of in p["speedup"].items()}


def vllms(where):
    """{size:format:LoRA rank: {rows, as text: vLLM's tokens/s}}, likewise."""
    return peers(where).get("vllm", {"tok_s": {}})["tok_s"]


def show(columns, row=None):
    """Print the values of a row in `columns` ({key: format}), or, without a row, their keys."""
    cells = columns if row is None else [cell(row.get(key), columns[key]) for key in columns]
    widths = [max(9, len(key) + 2) for key in columns]
    print("".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)), flush=True)


def tables(args):
    """Tables in Markdown and pictures of what kernels and rollout left."""
    for path in sorted(RESULTS.glob("kernels_*.json")) + sorted(RESULTS.glob("rollout_*.json")):
        what, _, where = path.stem.partition("_")
        curves = kernel_curves if what == "kernels" else rollout_curves
        ours, theirs, spec, ylabel, panels = curves(json.loads(path.read_text()), where)
        ticks = sorted({m for points in ours.values() for m in points})
        print(f"| rows | {' | '.join(map(str, ticks))} |\n|{'---|' * (len(ticks) + 1)}")
        for label, points in ours.items():
            pairs = ((points.get(m), theirs.get(label, {}).get(m)) for m in ticks)
            cells = (f"{cell(own, spec)} ({cell(other, spec)})" for own, other in pairs)
            print(f"| {label} | {' | '.join(cells)} |")
        if any(panels.values()):  # of rollouts, the 7B alone is drawn
            picture(path.with_suffix(".png"), ticks, ylabel, panels)


def picture(path, ticks, ylabel, panels):
    """panels {title: {label: {rows: y}}}: curves over rows, both axes in log2."""
    fig = Figure(figsize=(9, 3.6), layout="constrained")
    for n, (title, curves) in enumerate(panels.items()):
        ax = fig.add_subplot(1, len(panels), n + 1, sharey=fig.axes[0] if n else None)
        for i, (label, points) in enumerate(curves.items()):
            ax.plot(list(points), list(points.values()), label=label, lw=1.5, **look(i))
        dress(ax, title, "rows")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(ticks, map(str, ticks), rotation=45)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_ylabel(ylabel, fontsize=8, color="#555555")
        ax.legend(frameon=False, fontsize=8, handlelength=3.5)
    fig.savefig(path, dpi=160)


def kernel_curves(rows, where):
    """What `tables` shows: {shape: {M: speed-up}}, ours and Marlin's, and their geometric means."""
    ours, mean = {}, "geometric mean"
    for r in rows:
        if r["fmt"] == "nvfp4" and r["pass"] == "forward":
            ours.setdefault(r["shape"], {})[r["M"]] = r["speedup"]
    marlin = {s: points for s, points in marlins(where).items() if s in ours}
    panels = {f"NVFP4 GEMM, one {where.upper()}": {s: ours[s] for s in ours if s.startswith("7b")}}
    for of in filter(None, (ours, marlin)):
        of[mean] = {m: statistics.geometric_mean(points[m] for points in of.values()) for m in ROWS
                    if all(m in points for points in of.values())}
    means = {"this project": ours[mean]} | ({"Marlin": marlin[mean]} if marlin else {})
    if len(ours) > len(SHAPES):  # of the other peers, means over all shapes are known
        means |= {name: dict(zip(p["rows"], p["geometric_mean"], strict=True))
                  for name, p in peers(where).items() if "geometric_mean" in p}
    panels[f"{mean} of {len(ours) - 1} shapes"] = means
    return ours, marlin, ".2f", "speed-up over cuBLAS on bfloat16 weights", panels


def rollout_curves(rows, where):
    """What `tables` shows: {size:format:LoRA rank: {rows: tokens/s}}, ours and vLLM's."""
    ours, shown = {}, {}
    for r in rows:
        if r["kind"] == "rows" and r["dtype"] == "bfloat16":
            config = f"{r['size']}:{r['quant']}:{r['lora_rank']}"
            ours.setdefault(config, {})[r["rows"]] = r["decode_tok_s"]
    vllm = {k: {int(n): v for n, v in of.items()} for k, of in vllms(where).items()}
    for config in (c for c in ("7b:nvfp4:16", "7b:none:16") if c in ours):
        shown[config] = ours[config]
        if config in vllm:
            shown[f"{config}, vLLM 0.24"] = vllm[config]
    title = f"Decoding, size:format:LoRA rank, one {where.upper()}"
    return ours, vllm, ".0f", "tokens/s", {title: shown}


def cards(args):
    """Completions/s of runs of train.py, and how many times the first one's. A step is what the
    clock shows between its row and the one before."""
    with archive.folders(args.runs) as runs:
        speeds(runs, args)


def speeds(runs, args):
    """What `cards` shows, of folders."""
    columns = {"run": "", "completions": ".0f", "rollout": ".2f", "update": ".2f", "step": ".2f",
               "per_second": ".1f", "times": ".2f"}
    show(columns)
    alone = None
    for run, name in zip(runs, plot.names(runs), strict=True):
        group = saved(run, "config.json").get("group_size")
        if not group:
            raise ValueError(f"{run}: has no config.json; give folders that train.py wrote")
        before, *rows = read(run)[args.skip - 1 :] or [None]
        if not rows:
            raise ValueError(f"--skip {args.skip}: leaves no step of {run}")
        columns_of = ("prompts_sampled", "seconds_rollout", "seconds_update", "seconds")
        if missing := [k for k in columns_of if not all(k in r for r in (before, *rows))]:
            raise ValueError(f"{run}: its rows have no {missing[0]}; they are of another revision")
        mean = {k: statistics.fmean(r[k] for r in rows) for k in columns_of[:3]}
        completions = group * mean["prompts_sampled"]
        step = (rows[-1]["seconds"] - before["seconds"]) / len(rows)
        alone = alone or completions / step
        values = (name, completions, mean["seconds_rollout"], mean["seconds_update"], step,
                  completions / step, completions / step / alone)
        show(columns, dict(zip(columns, values, strict=True)))


def scale(args):
    """A step of the 7B on many cards, on paper, from decode steps and updates of one H100, and
    lengths drawn from a log-normal cut at --new."""
    decode = [r for r in json.loads((RESULTS / "rollout_h100.json").read_text())
              if (r["size"], r["quant"], r["lora_rank"], r["kind"]) == ("7b", "nvfp4", 16, "rows")]
    if args.rows > (most := max(r["rows"] for r in decode)):
        raise ValueError(f"--rows {args.rows}: a decode step is measured up to {most} rows")
    ms = np.interp(np.arange(args.rows + 1), *zip(*sorted(
        (r["rows"], r["replay_ms"]) for r in decode), strict=True))  # of a step, by live rows
    adapter = 4 * memory.lora_parameters(config("7b"), 16)  # bytes of its gradient
    rng = np.random.default_rng(0)
    columns = {"cards": "d", "rollout": ".1f", "wait": ".1f", "exchange": ".2f", "update": ".1f",
               "by_rows": ".1f", "reduce": ".3f", "step": ".1f", "linear": ".0%"}
    show(columns)
    alone = None
    for cards in args.cards:
        steps = []
        for _ in range(max(4, 64 // cards)):
            lengths = np.exp(rng.normal(math.log(args.median), args.spread, (cards, args.rows)))
            lengths = np.sort(lengths.clip(1, args.new))  # (cards, rows): the shortest end first
            spans = np.diff(lengths, prepend=0.0) * ms[:0:-1]  # live rows: all, all but one, ...
            rollouts = spans.sum(1) / 1e3  # (cards,) seconds
            tokens = lengths.sum(1) + args.prompt * args.rows
            exchange = lengths.sum() * (cards > 1) * (args.pickle_ns + 12 / args.gather_gb) / 1e9
            reduce = 2 * (cards - 1) / cards * adapter * args.updates / args.reduce_gb / 1e9
            update, by_rows = tokens.mean() / args.update_tok_s, tokens.max() / args.update_tok_s
            steps.append((rollouts.mean(), rollouts.max() - rollouts.mean(), exchange, update,
                          by_rows - update, reduce, rollouts.max() + exchange + update + reduce))
        row = dict(zip(columns, (cards, *np.mean(steps, 0)), strict=False))
        alone = alone or row["step"]
        show(columns, row | {"linear": alone / row["step"]})
    print(f"seconds; the adapter's gradient is {adapter / 1e6:.0f} MB")


def parse_args(argv=None):
    p = argparse.ArgumentParser(description="Benchmarks without a GPU.", allow_abbrev=False)
    sub, count, adds = p.add_subparsers(dest="what", required=True), command.number(1, 1e9), {}
    for f in (tables, cards, scale):
        c = sub.add_parser(f.__name__, help=f.__doc__, description=f.__doc__, allow_abbrev=False,
                           formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        c.set_defaults(run=f)
        adds[f] = c.add_argument
    adds[cards]("runs", nargs="+", metavar="RUN", help="folder that train.py wrote, or a "
                "quoted pattern of rows in results/runs.jsonl")
    adds[cards]("--skip", type=count, default=8, help="steps at the start that do not count: they "
                "compile kernels and capture batch sizes")
    add, positive = adds[scale], command.number(1e-9, 1e18, float)
    add("--cards", nargs="+", type=count, default=[1, 2, 8, 64, 512], help="the first: alone")
    add("--rows", type=count, default=128, help="completions a card, all decoding at once")
    add("--prompt", type=count, default=128, help="tokens of a prompt")
    add("--median", type=positive, default=1000, help="tokens of a completion")
    add("--spread", type=command.number(0, 100, float), default=0.7,
        help="standard deviation of their logarithm")
    add("--new", type=count, default=4096, help="tokens a completion is cut at")
    add("--updates", type=count, default=4, help="of a rollout")
    add("--update-tok-s", type=positive, default=18400, help="of one card (step_h100.json)")
    add("--reduce-gb", type=positive, default=25, help="GB/s of an all-reduce, each way")
    add("--gather-gb", type=positive, default=1, help="GB/s at which a rank takes objects in")
    add("--pickle-ns", type=positive, default=150, help="to unpickle a token, measured")
    return p.parse_args(argv)


def main():
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    sys.exit(command.run("lab/bench_report.py", main))
