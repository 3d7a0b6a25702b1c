"""
Add runs to the table of kept runs (lab/archive.py): flags, summary, evaluations, grades, and of
metrics.jsonl the columns that are named.

    python lab/collect.py runs/2x2/* --group 2x2_3b --commit $(git rev-parse --short HEAD)
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command, curves, flags
from plumbing.files import read_jsonl, saved, writing

import train
from lab import archive, plot

COLUMNS = "accuracy,entropy,length_mean,format,zero_var_frac,logp_gap_mean"
# flags that change no number of a run; on --card-share its last digits may depend
LEFT_OUT = {*plot.IDLE, "command", "seed"} - {"card_share"}
# decimal places, of accuracies at the end enough for a difference to be printed as from the folder
PLACES = {"accuracy_before": 8, "accuracy_after": 8, "seconds": 1, "peak_gib": 1}
STEP_PLACES = {"accuracy": 4, "entropy": 3, "seconds": 2, "seconds_rollout": 2, "seconds_update": 2}


def rounded(value, name):
    if isinstance(value, dict):
        return {k: rounded(v, k) for k, v in value.items()}
    return round(value, PLACES.get(name, 4)) if isinstance(value, float) else value


def shortened(value, column):
    """A number of metrics.jsonl, three digits of it unless STEP_PLACES says otherwise."""
    if not isinstance(value, float):
        return value
    places = STEP_PLACES.get(column)
    return float(f"{value:.3g}") if places is None else round(value, places)


def counted(accuracies, samples):
    """Right samples instead of their share, if that is what the shares are of."""
    right = [round(a * samples) for a in accuracies]
    near = all(abs(a * samples - n) < 0.01 for a, n in zip(accuracies, right, strict=True))
    return right if near else accuracies


def grades(path):
    """The bits of an eval_before.jsonl or eval_after.jsonl, as text; None where it is missing, or
    questions were asked more than once."""
    if not path.is_file():
        return None
    fields = {"accuracy": (float, 0, 1)}
    accuracies = [row["accuracy"] for _, row in read_jsonl(path, fields, fields)]
    return archive.packed(map(int, accuracies)) if {*accuracies} <= {0, 1} else None


def row_of(run, defaults, columns):
    """The row of a run's folder, without its group."""
    had, steps = saved(run, "config.json"), curves.read(run)
    if not had:
        raise ValueError(f"{run}: has no config.json; give folders that train.py wrote")
    if [s["step"] for s in steps] != [*range(len(steps))]:
        raise ValueError(f"{run}: metrics.jsonl lacks a step; give runs that are whole")
    row = {"name": Path(run).resolve().name, "seed": had.get("seed"),
           "flags": {k: v for k, v in had.items() if k not in LEFT_OUT and v != defaults.get(k)}}
    if (script := plot.told(run)["script"]) != "train.py":
        row["script"] = script
    summary = saved(run, "summary.json")
    last = (summary.get("best") or {}).get("step") == summary.get("steps")
    summary = {k: v for k, v in summary.items() if k != "command" and not (k == "best" and last)}
    if summary:
        row["summary"] = rounded(summary, "")
    row["evals"] = [[s["step"], round(s["eval_accuracy"], 4)] for s in steps
                    if s.get("eval_accuracy") is not None]
    row["metrics"] = {c: [shortened(s.get(c), c) for s in steps] for c in columns
                      if any(s.get(c) is not None for s in steps)}
    shares = [s["accuracy"] for s in steps]
    row["metrics"]["accuracy"] = counted(shares, archive.samples_of(defaults | had))
    right = {when: grades(Path(run) / f"eval_{when}.jsonl") for when in ("before", "after")}
    if right := {when: text for when, text in right.items() if text}:
        row["right"] = right
    return row


def collect(folders, group, columns, commit, table):
    """Append the rows of `folders` to the table, which is begun if it is not there."""
    known, text = {}, ""
    if Path(table).is_file():
        defaults, known = archive.read(table)
    else:
        defaults = vars(flags.parse(train.COMMAND, []))
        defaults = {k: v for k, v in defaults.items() if k not in LEFT_OUT}
        text = archive.line({"defaults": defaults})
    # runs of one model and format answer alike before training: the first row keeps it for all
    before = {row["right"]["before"]: name for name, row in reversed(known.items())
              if "before" in row.get("right", {})}
    for folder in folders:
        row = {"group": group, **row_of(folder, defaults, columns), "commit": commit}
        name = f"{group}/{row['name']}"
        if name in known:
            raise ValueError(f"{folder}: {name} is in {table} already; choose another --group, or "
                             "delete its row")
        if same := before.get(row.get("right", {}).get("before")):
            row["right"]["before"] = same
        elif "before" in row.get("right", {}):
            before[row["right"]["before"]] = name
        known[name] = row
        text += archive.line(row)
    with writing(table), open(table, "a", encoding="utf-8") as f:
        f.write(text)
    print(f"{table}: {len(folders)} rows more, {len(known)} runs")


def main(argv=None):
    p = command.Parser(prog="lab/collect.py", description=__doc__.split("\n\n")[0],
                       formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("folders", nargs="+", metavar="RUN", help="folder that train.py wrote")
    p.add_argument("--group", required=True, help="the first half of the rows' names")
    p.add_argument("--columns", default=COLUMNS, type=lambda text: text.split(","),
                   help="columns of metrics.jsonl to keep")
    p.add_argument("--commit", help="the revision that trained")
    p.add_argument("--table", default=archive.TABLE, help="file to append to")
    return command.run("lab/collect.py", lambda: collect(**vars(p.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
