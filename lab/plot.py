"""
Training runs compared: their curves in one picture (plumbing/curves.py draws the panels).

Runs that differ in their seed alone are one line: their mean, in a band of its standard error, over
the steps that all of them have. The legend names the flags that differ.

    python lab/plot.py runs/bf16 runs/nvfp4 runs/nvfp4_aqn --out compare.png
"""
import math
import sys
from os.path import commonprefix
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command, curves
from plumbing.command import IDLE, MINOR
from plumbing.files import check_out, saved

from lab import archive

# Okabe and Ito's colours without the yellow, which is lost on white; in grey print line styles and
# markers tell runs apart. Seven and four have no common divisor, so 28 looks before one returns.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000"]
STYLES = ["-", (0, (4, 1.2)), (0, (1, 1)), (0, (5, 1.2, 1, 1.2))]
MARKERS = "os^D"


def shown(flag, value):
    """A flag's value, short enough for a legend."""
    if flag == "script":
        return value
    if value is None or isinstance(value, bool):
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rstrip("/").split("/")[-1]


def flags_of(run):
    """{flag: value} of the flags that a run's numbers depend on, and its script as "script"; {}
    without config.json."""
    idle = (*IDLE, *MINOR, "command", "commit", "commits")
    config = saved(run, "config.json")
    if config:
        config = {"script": "train.py"} | config  # older runs do not say
    return {k: v for k, v in config.items() if k not in idle}


def lines(runs):
    """[(label, runs)] of the lines to draw: runs whose flags differ in their seed alone are one.

    Labels are the flags that differ between lines ("quant=none aqn=off"), and the script if it
    differs; they are the last two folder names if none differs, if more than four do, if those do
    not tell all lines apart, or if a run has no config.json."""
    def on(flags):  # runs from before a flag was there do not have it at all
        return {k: v for k, v in flags.items() if v}

    found = []  # (flags, {seed: run})
    for run in runs:
        flags = flags_of(run)
        seed = flags.pop("seed", None)
        alike = [seeds for other, seeds in found if flags and on(other) == on(flags) and
                 seed not in seeds]
        if alike:
            alike[0][seed] = run
        else:
            found.append((flags, {seed: run}))
    every, many = [flags for flags, _ in found], [[*seeds.values()] for _, seeds in found]
    differ = [k for k in every[0] if all(k in f for f in every) and
              any(f[k] != every[0][k] for f in every)]
    labels = [" ".join(f"{k.replace('_', '-')}={shown(k, f[k])}" for k in differ) for f in every]
    if not 1 <= len(differ) <= 4 or len({*labels}) < len(labels):
        paths = [["/".join(Path(run).resolve().parts[-2:]) for run in m] for m in many]
        labels = [commonprefix(names) + "*" * (len(names) > 1) for names in paths]
    return [(label + (f" ({len(m)} seeds)" if len(m) > 1 else ""), m)
            for label, m in zip(labels, many, strict=True)]


def over_seeds(seeds):
    """The rows of several runs -> rows of their means, at the steps that all have, with the bounds
    of each mean's standard error as NAME_low and NAME_high. A column is left out where one run has
    no value: a mean over other seeds than at the steps beside it would show a jump that no run
    made."""
    runs = [{row["step"]: row for row in rows} for rows in seeds]
    means = []
    for step in sorted(set.intersection(*map(set, runs))):
        mean = {"step": step}
        for _, columns, _ in curves.PANELS:
            for name in columns:
                values = curves.column([run[step] for run in runs], name)
                if not all(map(math.isfinite, values)):
                    continue
                y, error = fmean(values), stdev(values) / len(values) ** 0.5
                mean |= {name: y, f"{name}_low": y - error, f"{name}_high": y + error}
                if name == "eval_accuracy":
                    mean["eval_stderr"] = error
        means.append(mean)
    return means


def draw(lines, out):
    """Draw `lines`, [(label, folders of runs)], into the file `out`. Several runs of a line are its
    seeds."""
    check_out(out)
    drawn = []
    for i, (label, runs) in enumerate(lines):
        seeds = [curves.with_summary(run, curves.read(run)) for run in runs]
        rows = over_seeds(seeds) if len(seeds) > 1 else seeds[0]
        drawn.append((rows, {"label": label, "color": COLORS[i % 7], "ls": STYLES[i % 4],
                             "marker": MARKERS[i % 4]}))
    fig = curves.figure(drawn)
    handles, texts = fig.axes[0].get_legend_handles_labels()
    columns = max(1, min(len(texts), 110 // (max(map(len, texts)) + 10)))  # as many as fit abreast
    fig.legend(handles, texts, loc="outside upper left", frameon=False, ncols=columns, fontsize=9,
               handlelength=3.5)
    curves.save(fig, out)


def main(argv=None):
    parser = command.Parser(
        description="Plot the curves of training runs from their metrics.jsonl.")
    parser.add_argument("runs", **archive.ARGUMENT)
    parser.add_argument("--out", default="compare.png", help="picture (default: %(default)s)")

    def body():
        args = parser.parse_args(argv)
        with archive.folders(args.runs) as runs:
            draw(lines(runs), args.out)
        print(f"wrote {args.out}")

    return command.run("lab/plot.py", body)


if __name__ == "__main__":
    sys.exit(main())
