"""
The curves of a training run from its metrics.jsonl, as one PNG: reward, accuracy, entropy,
completion length, gradient norm, sampler-trainer gap, noise level and speed.

A run draws its own at its end (plumbing/run.py), lab/plot.py those of several in one picture.

    curves.draw("runs/x", "runs/x/metrics.png")
"""
import math
from pathlib import Path

from plumbing.files import read_log, saved, whole

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

PANELS = [  # title, columns (the second drawn thin), how the y axis reads
    ("reward", ["reward"], "linear"),
    ("held-out accuracy", ["eval_accuracy"], "percent"),
    ("accuracy of the samples", ["accuracy"], "percent"),
    ("entropy (nats a token)", ["entropy"], "linear"),
    ("completion length (tokens)", ["length_mean"], "count"),
    ("gradient norm", ["grad_norm"], "linear"),
    ("|log-prob gap|, sampler to trainer", ["logp_gap_mean"], "log"),
    ("noise $\\sigma$", ["sigma"], "log"),
    ("tokens/s of rollout (thin: update)", ["rollout_tok_s", "update_tok_s"], "count"),
]


def read(run):
    """A run folder -> the rows of its metrics.jsonl, step by step. FileNotFoundError without the
    file; ValueError for a broken line before the last, or no row at all."""
    path = Path(run) / "metrics.jsonl"
    rows = [*read_log(path)]
    if not rows:
        raise ValueError(f"{path}: no complete row yet; wait for the first step")
    return rows


def with_summary(run, rows):
    """`rows`, and what only summary.json has: the held-out accuracy after the last of them."""
    summary = saved(run, "summary.json")
    after, steps = summary.get("accuracy_after"), rows[-1]["step"] + 1
    if after is None or summary.get("steps", steps) != steps:  # the run has gone on since
        return rows
    return [*rows, {"step": steps, "eval_accuracy": after,
                    "eval_stderr": summary.get("stderr_after")}]


def column(rows, name):
    """The values of one column as floats; nan where it is missing or null."""
    return [math.nan if row.get(name) is None else float(row[name]) for row in rows]


def curve(ax, rows, name, **style):
    xs, ys = column(rows, "step"), column(rows, name)
    if name == "eval_accuracy":  # measured at some steps only, with an error
        at = [i for i, y in enumerate(ys) if math.isfinite(y)]
        if len(at) < 3:  # before and after: nothing between them was measured
            style["ls"] = "none"
        errors = column(rows, "eval_stderr")
        ax.errorbar([xs[i] for i in at], [ys[i] for i in at], [errors[i] for i in at],
                    elinewidth=0.8, capsize=2, **style)
        return
    # a line of one step would be invisible without its marker; the noise is constant in a stage
    ax.plot(xs, ys, markevery=[] if len(ys) > 2 else None,
            drawstyle="steps-post" if name == "sigma" else "default", **style)
    if any(f"{name}_low" in row for row in rows):  # a mean over seeds, in its band (lab/plot.py)
        ax.fill_between(xs, column(rows, f"{name}_low"), column(rows, f"{name}_high"),
                        color=style["color"], alpha=0.18, lw=0)


def set_scale(ax, scale):
    if scale == "log":
        ax.set_yscale("log", nonpositive="mask")
        if ax.get_ylim()[1] < 10 * ax.get_ylim()[0]:  # else ticks in a decade have no numbers
            ax.yaxis.set_minor_formatter("{x:g}")
    if scale == "percent":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
    if scale == "count":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))


def figure(lines):
    """A panel for each column that has something to show, with all `lines` in it: [(rows, style)],
    a style being options of matplotlib's lines, its color among them."""
    panels = []
    for title, columns, scale in PANELS:
        least = 0.0 if scale == "log" else -math.inf  # where zeros, of a run without noise, miss
        if any(v > least for rows, _ in lines for name in columns for v in column(rows, name)):
            panels.append((title, columns, scale))
    if not panels:
        raise ValueError("metrics.jsonl: no column has a number to draw")
    wide = min(3, len(panels))
    tall = math.ceil(len(panels) / wide)
    fig = Figure(figsize=(3 * wide, 2.2 * tall + 0.4), layout="constrained")
    for n, (title, columns, scale) in enumerate(panels):
        ax = fig.add_subplot(tall, wide, n + 1, sharex=fig.axes[0] if n else None)
        for rows, style in lines:
            for c, name in enumerate(columns):
                thin = {"lw": 0.7, "label": None} if c else {"lw": 1.5}
                curve(ax, rows, name, **{"marker": "o", "ms": 4, **style, **thin})
        ax.set_title(title, fontsize=9.5, loc="left")
        ax.set_xlabel("step", fontsize=8)
        ax.grid(True, color="#e6e6e6", lw=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8, which="both")
        set_scale(ax, scale)
    return fig


def save(fig, out):
    with whole(out) as part:
        fig.savefig(part, dpi=160, format=Path(out).suffix[1:] or "png")


def draw(run, out):
    """Draw the curves of the folder `run` into the file `out`. Errors are those of `read`."""
    fig = figure([(with_summary(run, read(run)), {"color": "#0072B2"})])
    fig.suptitle(Path(run).resolve().name, parse_math=False, fontsize=9)
    save(fig, out)
