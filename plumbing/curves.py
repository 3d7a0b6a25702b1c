"""
The curves of a training run from its metrics.jsonl, as one PNG: reward, accuracy, entropy,
completion length, gradient norm, sampler-trainer gap, noise level and speed.

A run draws its own at its end (plumbing/run.py); lab/plot.py draws those of several in one picture.
What is drawn is what was logged. Columns that no run has are left out, so files of other programs
work too.

    curves.draw([("my run", ["runs/x"])], "runs/x/metrics.png")
"""
import math
from pathlib import Path
from statistics import fmean, stdev

from plumbing import files
from plumbing.files import check_out, saved, whole

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
# their bounds are what a float32, a gradient norm for example, may hold
COLUMNS = {c: (float, -1e39, 1e39) for p in PANELS for c in (*p[1], "seconds", "eval_stderr")}
# Okabe and Ito's colours without the yellow, which is lost on white; in grey print line styles and
# markers tell runs apart. Seven and four have no common divisor, so 28 looks before one returns.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000"]
STYLES = ["-", (0, (4, 1.2)), (0, (1, 1)), (0, (5, 1.2, 1, 1.2))]
MARKERS = "os^D"


def look(i):
    """Colour, line style and marker of line `i`."""
    return {"color": COLORS[i % 7], "ls": STYLES[i % 4], "marker": MARKERS[i % 4], "ms": 4}


def dress(ax, title, xlabel):
    """The style that all pictures share, the benchmarks' too."""
    ax.set_title(title, fontsize=9.5, loc="left")
    ax.set_xlabel(xlabel, fontsize=8, color="#555555")
    ax.set_xmargin(0.02)
    ax.grid(True, color="#e6e6e6", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#999999")
    ax.tick_params(labelsize=8, color="#999999", labelcolor="#444444", which="both")


def read(run):
    """A run folder (or a metrics.jsonl itself) -> its rows, dicts in the order of their steps.

    An incomplete last line is dropped. A step logged twice (killed, resumed) counts once, as it was
    logged last. FileNotFoundError without the file; ValueError for a broken line before the last,
    or no row at all."""
    path = Path(run) if Path(run).is_file() else Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; RUN is a folder that train.py --out wrote "
                                "(it holds metrics.jsonl)")
    rows = {row["step"]: row for _, row in files.read_log(path, COLUMNS)}
    if not rows:
        raise ValueError(f"{path}: no complete row yet; wait for the first step")
    return [rows[step] for step in sorted(rows)]


def with_summary(run, rows):
    """`rows`, and the held-out accuracy after the last of them, which only summary.json has; also
    the accuracy before the first, if no row has any."""
    summary = saved(run, "summary.json")
    if not any("eval_accuracy" in row for row in rows):
        rows = [{**rows[0], "eval_accuracy": summary.get("accuracy_before")}, *rows[1:]]
    after, steps = summary.get("accuracy_after"), rows[-1]["step"] + 1
    if after is None or summary.get("steps", steps) != steps:  # the run has gone on since
        return rows
    return [*rows, {"step": steps, "seconds": summary.get("seconds"), "eval_accuracy": after,
                    "eval_stderr": summary.get("stderr_after")}]


def column(rows, name):
    """The values of one column as floats; nan where it is missing, null or no number."""
    return [float(v) if isinstance(v := row.get(name), (int, float)) else math.nan for row in rows]


def trailing_mean(values, width):
    """Mean of the last `width` values at each place; nan values are skipped."""
    out = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - width + 1) : i + 1] if math.isfinite(v)]
        out.append(fmean(window) if window else math.nan)
    return out


def over_seeds(seeds, name, smooth=1):
    """A column of several runs (their rows) -> lists (mean, mean minus its standard error, mean
    plus it), a value for each step that all runs have; nan where one has no value, since a mean
    over other seeds than at the steps beside it would show a jump that no run made."""
    runs = [dict(zip((row["step"] for row in rows), trailing_mean(column(rows, name), smooth),
                     strict=True)) for rows in seeds]
    steps = sorted(set.intersection(*map(set, runs)))
    values = [[run[s] for run in runs] for s in steps]
    means = [fmean(v) for v in values]
    errors = [stdev(v) / len(v) ** 0.5 if len(v) > 1 and math.isfinite(m) else 0.0
              for m, v in zip(means, values, strict=True)]
    return [[m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (0, -1, 1)]


def curve(ax, seeds, name, x, smooth, log, **options):
    """Draw one column of the runs `seeds` (their rows); log: the axis will be logarithmic."""
    [xs, _, _], [ys, low, high] = over_seeds(seeds, x), over_seeds(seeds, name, smooth)
    if name == "eval_accuracy":  # measured at some steps only, with an error
        if len(seeds) == 1:
            error = column(seeds[0], "eval_stderr")
            low, high = ([y + sign * e for y, e in zip(ys, error, strict=True)] for sign in (-1, 1))
        at = [i for i, y in enumerate(ys) if math.isfinite(y)]
        bars = [[max(0, ys[i] - low[i]) for i in at], [max(0, high[i] - ys[i]) for i in at]]
        if len(at) < 3:  # before and after: nothing between them was measured
            options["ls"] = "none"
        ax.errorbar([xs[i] for i in at], [ys[i] for i in at], bars, elinewidth=0.8, capsize=2,
                    **options)
        return
    # a line of one step would be invisible without its marker; the noise is constant in a stage
    ax.plot(xs, ys, markevery=[] if len(ys) > 2 else None,
            drawstyle="steps-post" if name == "sigma" else "default", **options)
    if len(seeds) > 1:
        if log:  # the same factor below as above: values under 0 have no place
            low = [y * y / h if h else h for y, h in zip(ys, high, strict=True)]
        ax.fill_between(xs, low, high, color=options["color"], alpha=0.18, lw=0)


def text_of(label):
    """A label that matplotlib shows as it is: it hides what begins with _, and reads TeX between
    two $."""
    return " " * label.startswith("_") + label.replace("$", r"\$")


def set_scale(ax, scale):
    """How the y axis of a panel reads."""
    if scale == "log":
        ax.set_yscale("log", nonpositive="mask")
        if ax.get_ylim()[1] < 10 * ax.get_ylim()[0]:  # else ticks in a decade have no numbers
            ax.yaxis.set_minor_formatter("{x:g}")
    if scale == "percent":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
    if scale == "count":
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))


def draw(lines, out, x="step", smooth=1):
    """Draw `lines`, [(label, folders of runs)], over x ("step" or "seconds") into the file `out`;
    returns its Path. Several runs of a line are its seeds: their mean, in a band of its standard
    error. smooth: steps averaged into the value drawn for each step, 1 for none.

    Errors: those of `read`; ValueError if x is in none of the rows of a run, for a broken JSON file
    beside them, or for a file type that matplotlib cannot write."""
    runs = [run for _, seeds in lines for run in seeds]
    data, out = {run: with_summary(run, read(run)) for run in runs}, Path(out)
    check_out(out)
    if out.suffix[1:] not in (*Figure().canvas.get_supported_filetypes(), ""):
        raise ValueError(f"--out {out}: no picture is called {out.suffix}; choose .png or .svg")
    for run, rows in data.items():
        if not any(math.isfinite(v) for v in column(rows, x)):
            raise ValueError(f"--x {x}: {run} logged no such column; choose another")
    drawn = [(text_of(label), [data[run] for run in seeds]) for label, seeds in lines]
    panels = []
    for title, columns, scale in PANELS:
        least = 0.0 if scale == "log" else -math.inf  # where zeros, of a run without noise, miss
        if any(v > least for _, seeds in drawn for name in columns
               for v in over_seeds(seeds, name)[0]):
            panels.append((title, columns, scale))
    if not panels:
        known = ", ".join(c for p in PANELS for c in p[1])
        raise ValueError(f"{runs[0]}: metrics.jsonl has none of the columns {known}")
    wide = min(3, len(panels))
    tall = math.ceil(len(panels) / wide)
    fig = Figure(figsize=(3 * wide, 2.2 * tall + 0.4), layout="constrained")
    for n, (title, columns, scale) in enumerate(panels):
        ax = fig.add_subplot(tall, wide, n + 1, sharex=fig.axes[0] if n else None)
        mean = 1 if columns[0] in ("eval_accuracy", "sigma") else smooth
        for i, (label, seeds) in enumerate(drawn):
            for c, name in enumerate(columns):
                curve(ax, seeds, name, x, mean, scale == "log", **look(i), lw=0.7 if c else 1.5,
                      label=None if c else label)
        dress(ax, title, x + (f", mean of the last {mean}" if mean > 1 else ""))
        set_scale(ax, scale)
    handles, texts = fig.axes[0].get_legend_handles_labels()
    columns = max(1, min(len(texts), 110 // (max(map(len, texts)) + 10)))  # as many as fit abreast
    fig.legend(handles, texts, loc="outside upper left", frameon=False, ncols=columns, fontsize=9,
               handlelength=3.5)
    with whole(out) as part:
        fig.savefig(part, dpi=160, format=out.suffix[1:] or "png")
    return out


