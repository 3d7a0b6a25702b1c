"""
What an experiment, a loop over train.py, has shown: its runs, or some of results/runs.tar.xz, and
what each flag in which they differ adds (`compare`).

    python lab/experiments.py compare '2x2_1.5b/*' runs/2x2/*/ [--growth] [--interval]
"""
import argparse
import math
import sys
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command, curves, flags
from plumbing.files import saved
from plumbing.metrics import stderr

import numpy as np

import train
from lab import archive, plot

UNUSED = "-"  # the value of a flag that did nothing in a run


def percent(values):
    """Their mean, and its standard error."""
    mean = f"{100 * fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} +- {100 * stderr(values):.1f}"


def arms(runs):
    """A line for runs that differ in their seed alone: held-out accuracy before, on the way and
    after training, and the entropy of the first samples and of those in the second half, nats a
    token."""
    for label, members in plot.lines([*runs]):
        curve = [{row["step"]: row["eval_accuracy"] for row in curves.read(run)
                  if row.get("eval_accuracy") is not None} for run in members]
        # of all seeds: means of some beside those of others would compare the seeds
        steps = sorted(set.intersection(*map(set, curve)) - {0})
        way = "".join(f"{percent([of[s] for of in curve])} after {s}, " for s in steps)
        after = percent([*map(accuracy_after, members)])
        before = fmean(saved(run, "summary.json")["accuracy_before"] for run in members)
        first = fmean(curves.column(curves.read(run), "entropy")[0] for run in members)
        late = fmean(map(late_entropy, members))
        yield f"{label}: {100 * before:.1f} -> {way}{after}, entropy {first:.3f} -> {late:.3f}"


def accuracy_after(run):
    """Of a run that has ended, and has not gone on since."""
    found, steps = saved(run, "summary.json"), saved(run, "config.json").get("steps")
    if found.get("accuracy_after") is None or found.get("steps", steps) != steps:
        raise ValueError(f"{run}: has no accuracy_after of its last step in summary.json; let it "
                         "end, without --eval-n 0")
    return found["accuracy_after"]


def rise(run):
    """How far a finished run's samples got in the first half of its steps: their mean accuracy
    behind its first sixteenth, above that in it."""
    accuracy = [row["accuracy"] for row in curves.read(run)]
    steps = saved(run, "config.json").get("steps") or len(accuracy)
    if len(accuracy) != steps or steps < 6:
        raise ValueError(f"{run}: has {len(accuracy)} steps of {steps}; --growth needs all, and 6 "
                         "or more")
    begun, half = max(2, steps // 16), steps // 2
    return fmean(accuracy[begun:half]) - fmean(accuracy[:begun])


def late_entropy(run):
    """Mean entropy, nats a token, of a run's samples in its second half; nan if none trained."""
    entropies = curves.column(curves.read(run), "entropy")
    late = [e for e in entropies[len(entropies) // 2 :] if math.isfinite(e)]
    return fmean(late) if late else math.nan


def measured(runs, growth, entropy, pairs):
    """{run: what is compared, in a list: by question where all runs' answers are kept}."""
    measure = late_entropy if entropy else rise if growth else accuracy_after
    after = {run: [measure(run)] for run in runs}
    if entropy and any(math.isnan(nats) for [nats] in after.values()):
        raise ValueError("--entropy: not all of these runs have logged it")
    if not (growth or entropy or pairs):
        by_question = {run: archive.answers(run) for run in runs}
        after = after if None in by_question.values() else by_question
    if len({len(each) for each in after.values()}) > 1:
        raise ValueError("RUN: they were asked different numbers of questions; compare others")
    return after


def compare(runs, growth=False, entropy=False, interval=False, pairs=False):
    """A line for each flag in which runs differ, or flags that change together, and each two of its
    values: what that adds to the accuracy after training, or with `growth` to the `rise` of the
    samples', over pairs of runs that are alike in all else, the seed included. What a flag switches
    on changes with it: noise of 5e-2 is one change from none. In points, with the standard error
    over seeds and, where their answers are kept, over questions. pairs: each pair is a draw."""
    used = flags_used(runs)
    after = measured(runs, growth, entropy, pairs)
    values = {flag: [used[run][flag] for run in runs] for flag in used[runs[0]]}
    # How a flag groups the runs. Flags that group them alike are one change: quant and lr, of runs
    # none 5e-4 and nvfp4 1e-3. With a third, nvfp4 5e-4, they are two, and those runs are no pair.
    grouping = {flag: tuple(map(column.index, column)) for flag, column in values.items()}
    found = {}  # {the change as text: {seed: [gains by question]}}
    for pair in combinations(runs, 2):
        one, other = (used[run] for run in pair)
        if one == other:
            raise ValueError("{} and {} have the same flags; leave one out".format(*pair))
        # what differs and was on in both; what was on in one alone follows from these
        causes = [f for f in values if one[f] != other[f] and UNUSED not in (one[f], other[f])]
        if "seed" in causes or len({grouping[f] for f in causes}) > 1:
            continue
        flag = causes[0]
        base, changed = sorted(pair, key=lambda run: sort_key(used[run][flag], values[flag]))
        change = change_text(used[base], used[changed], causes, values)
        gains = [100 * (b - a) for a, b in zip(after[base], after[changed], strict=True)]
        draw = pair if pairs else used[base].get("seed")
        found.setdefault(change, {}).setdefault(draw, []).append(gains)
    unit = "hundredths of a nat" if entropy else "points"
    return [f"{change}: {effect([*seeds.values()], unit, interval, pairs)}"
            for change, seeds in sorted(found.items())]


def change_text(base, changed, causes, values):
    """The causes as text, "aqn off -> on", and of a flag that was on in one of the two alone its
    value, "aqn-start 0.05", if all runs together have several `values` of it."""
    text = [f"{f} {plot.shown(f, base[f])} -> {plot.shown(f, changed[f])}" for f in causes]
    for flag, column in values.items():
        on = [used[flag] for used in (base, changed) if used[flag] != UNUSED]
        if len(on) == 1 and len({str(v) for v in column if v != UNUSED}) > 1:
            text.append(f"{flag} {plot.shown(flag, on[0])}")
    return ", ".join(text)


def flags_used(runs):
    """{run: {flag: value}}, the same flags for each, by name: an older run that was not asked for
    one has its default, and one that did nothing is UNUSED."""
    logged = {}
    for run in runs:
        archive.config(run)  # ValueError without one, which flags_of passes over
        logged[run] = plot.flags_of(run)
    every = sorted({*chain(*logged.values())})
    used = {}
    for run, given in logged.items():
        now = flags.defaults(train.COMMAND, given.get("model", "tiny")) | given
        args = argparse.Namespace(**now)
        off = [k for _, on, names in train.NEEDS if not on(args) for k in names]
        used[run] = {k.replace("_", "-"): UNUSED if k in off else now.get(k) for k in every}
    return used


def sort_key(value, values):
    """A key to sort a flag's values by: without it first, then numbers, then as they came."""
    with_it = value not in (None, False, "none")
    return with_it, value if isinstance(value, int | float) else float("inf"), values.index(value)


def effect(seeds, unit="points", interval=False, pairs=False):
    """What a change adds, as text. seeds: of each the gains of its pairs, points by question.
    interval: also what that says at 95%, by the wider of the errors, and the least effect that four
    of five such experiments would tell from 0."""
    means = [[*map(fmean, zip(*pairs, strict=True))] for pairs in seeds]  # [seed][question]
    questions = [*map(fmean, zip(*means, strict=True))]
    n = sum(map(len, seeds))
    text = f"{fmean(questions):+.1f} {unit}"
    of = f" ({n} pairs)" if n > len(seeds) else ""
    draws = ("pairs" if pairs else "seeds") + of
    margins = []
    for what, values in ((draws, [*map(fmean, means)]), ("questions", questions)):
        if len(values) > 1:
            text += f", +- {stderr(values):.1f} over {len(values)} {what}"
            t95, t80 = (student(p, len(values) - 1) for p in (0.975, 0.8))
            margins.append((t95 * stderr(values), (t95 + t80) * stderr(values)))
    if interval and margins:
        margin, least = max(margins)
        low, high = (fmean(questions) + sign * margin for sign in (-1, 1))
        text += f"; 95%: {low:+.1f} to {high:+.1f}, seen from {least:.1f} on"
    return text


def student(p, freedom, cells=100_000):
    """The quantile p of Student's t. With t = sqrt(freedom) tan(angle) its density is a power of a
    cosine, which is summed over narrow cells."""
    edges = np.linspace(-np.pi / 2, np.pi / 2, cells + 1)
    area = np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1))
    return freedom ** 0.5 * np.tan(np.interp(p * area[-1], area, edges[1:]))


def body(argv):
    p = command.Parser(prog="lab/experiments.py", description=compare.__doc__)
    p.add_argument("what", choices=["compare"], help="what to do with the runs")
    p.add_argument("runs", **archive.ARGUMENT)
    add = partial(p.add_argument, action="store_true")
    add("--growth", help="of the samples' accuracy, in the first half of training")
    add("--entropy", help="of the samples' entropy, in the second half of training")
    add("--interval", help="with the 95%% interval (Student's t), and the least effect to be seen")
    add("--pairs", help="errors over pairs, not over seeds: for runs of several models")
    add("--arms", help="first each arm's accuracy before, in and after training, and its entropy")
    given = vars(p.parse_args(argv))
    del given["what"]
    with archive.folders(given.pop("runs")) as runs:
        if given.pop("arms"):
            print("\n".join(arms(runs)))
        lines = compare(runs, **given)
    print("\n".join(lines) or "no two of these runs have the same seed, and differ in one flag")


def main(argv=None):
    return command.run("lab/experiments.py", partial(body, argv))


if __name__ == "__main__":
    sys.exit(main())
