"""
Curves of one or several training runs from their metrics.jsonl, as one PNG: reward, accuracy, entropy, completion length,
gradient norm, the gap between sampler and trainer, the noise level and the speed.

Each panel shows the steps as logged (faint) and their trailing mean (bold). Columns that no run has are left out, so old files
and files of other programs with the same names work. Left out: anything interactive; load metrics.jsonl with pandas for that.

    python plot.py runs/demo
    python plot.py runs/bf16 runs/nvfp4 runs/nvfp4_aqn --x seconds --out compare.png
"""
import argparse
import json
import math
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, PercentFormatter

PANELS = [  # title, columns (the first solid, the second dashed), how the y axis reads
    ("reward", ["reward"], "linear"),
    ("accuracy of the samples", ["accuracy"], "percent"),
    ("entropy (nats a token)", ["entropy"], "linear"),
    ("completion length (tokens)", ["length_mean"], "count"),
    ("gradient norm", ["grad_norm"], "linear"),
    ("|log-prob gap|, sampler to trainer", ["logp_gap_mean"], "log"),
    ("noise $\\sigma$", ["sigma"], "log"),
    ("tokens/s", ["rollout_tok_s", "update_tok_s"], "count"),
]
COLORS = ["#0b6e99", "#d9541e", "#2a9d5c", "#8e4fa8", "#c9a100", "#5a5a5a", "#d1478c", "#3fb0c9"]


def read(run):
    """A run folder (or a metrics.jsonl itself) -> its rows, list of dicts in the order of their steps.

    A last line that is not complete is dropped: the run may be writing it. A step logged twice (killed, resumed) counts once,
    as logged last. FileNotFoundError without the file; ValueError for a broken line before the last, or no row at all."""
    run = Path(run)
    path = run if run.is_file() else run / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; RUN is a folder that train.py --out wrote (it holds metrics.jsonl)")
    lines, rows = path.read_text(errors="replace").splitlines(), {}
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, TypeError, KeyError) as e:
            if n < len(lines):
                raise ValueError(f"{path}, line {n}: not a metrics row ({type(e).__name__}: {e}); remove the line") from None
    if not rows:
        raise ValueError(f"{path}: no complete row yet; wait for the first step")
    return [rows[step] for step in sorted(rows)]


def column(rows, name):
    """The values of one column as floats; nan where it is missing, null or no number."""
    return [float(v) if isinstance(v := row.get(name), (int, float)) else math.nan for row in rows]


def trailing_mean(values, width):
    """Mean of the last `width` values at each place; nan values are skipped."""
    out = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - width + 1) : i + 1] if math.isfinite(v)]
        out.append(sum(window) / len(window) if window else math.nan)
    return out


def labels(runs):
    """A short name for each run: the folder's, or the whole path where two would be the same."""
    paths = [Path(r) for r in runs]
    names = [p.resolve().parent.name if p.name == "metrics.jsonl" else p.resolve().stem if p.is_file() else p.resolve().name
             for p in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def plot(runs, out, x="step", smooth=5):
    """Draw the curves of `runs` (folders) over x ("step" or "seconds") into the file `out`; returns its Path.

    Errors: those of `read`; ValueError if x is in none of the rows, or for a file type that matplotlib cannot write."""
    data, names, out = [read(run) for run in runs], labels(runs), Path(out)
    if not out.resolve().parent.is_dir():
        raise FileNotFoundError(f"--out {out}: the folder {out.resolve().parent} does not exist; make it first")
    for run, rows in zip(runs, data, strict=True):
        if not any(math.isfinite(v) for v in column(rows, x)):
            raise ValueError(f"--x {x}: {run} logged no such column; choose another")

    def drawable(name, scale):  # a log axis has no place for the zeros of a run without noise
        return any(math.isfinite(v) and (v > 0 or scale != "log") for rows in data for v in column(rows, name))

    panels = [p for p in PANELS if any(drawable(c, p[2]) for c in p[1])]
    if not panels:
        raise ValueError(f"{runs[0]}: metrics.jsonl has none of the columns {', '.join(c for p in PANELS for c in p[1])}")
    wide = min(4, len(panels))
    tall = math.ceil(len(panels) / wide)
    fig = Figure(figsize=(3.7 * wide, 2.7 * tall + 0.6), layout="constrained")
    for n, (title, columns, scale) in enumerate(panels):
        ax = fig.add_subplot(tall, wide, n + 1, sharex=fig.axes[0] if n else None)
        for r, rows in enumerate(data):
            color, xs = COLORS[r % len(COLORS)], column(rows, x)
            for style, name in zip(("-", (0, (3, 1.5))), columns, strict=False):
                ys = column(rows, name)
                if name == "sigma":
                    ax.plot(xs, [y if y > 0 else math.nan for y in ys], color=color, lw=1.8, drawstyle="steps-post")
                    continue
                dots = {"marker": "o", "ms": 3} if len(ys) < 3 else {}  # one step alone is a point, not a line
                ax.plot(xs, ys, color=color, lw=0.8, alpha=0.3, ls=style)
                ax.plot(xs, trailing_mean(ys, smooth), color=color, lw=1.8, ls=style, **dots)
        ax.set_title(title, fontsize=10, loc="left", color="#222222")
        ax.set_xlabel(x, fontsize=8, color="#666666")
        ax.set_xmargin(0.02)
        if scale == "log":
            ax.set_yscale("log", nonpositive="mask")
        if scale == "percent":
            ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if scale == "count":
            ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter(EngFormatter(sep=""))
        if len(columns) > 1:
            ax.legend([Line2D([], [], color="#666666", ls=s) for s in ("-", (0, (3, 1.5)))],
                      [c.split("_")[0] for c in columns], fontsize=8, frameon=False)
        ax.grid(True, color="#e6e6e6", lw=0.7)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#999999")
        ax.tick_params(labelsize=8, color="#999999", labelcolor="#444444", which="both")
    handles = [Line2D([], [], color=COLORS[r % len(COLORS)], lw=2.5) for r in range(len(runs))]
    fig.legend(handles, names, loc="outside upper left", ncols=min(4, len(runs)), frameon=False, fontsize=10)
    fig.savefig(out, dpi=130)
    return out


def main(argv=None):
    parser = argparse.ArgumentParser(description="Plot the curves of training runs from their metrics.jsonl.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder of train.py, or a metrics.jsonl; several are overlaid")
    parser.add_argument("--out", help="picture to write; by default RUN/metrics.png, or compare.png for several runs")
    parser.add_argument("--x", choices=["step", "seconds"], default="step", help="horizontal axis")
    parser.add_argument("--smooth", type=int, default=5, help="steps in the trailing mean; 1 turns it off")
    a = parser.parse_args(argv)
    if a.smooth < 1:
        parser.error(f"--smooth {a.smooth}: must be at least 1")
    first = Path(a.runs[0])
    default = "compare.png" if len(a.runs) > 1 else (first.parent if first.is_file() else first) / "metrics.png"
    try:
        print(f"wrote {plot(a.runs, a.out or default, a.x, a.smooth)}")
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
