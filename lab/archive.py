"""
The training runs that README.md and docs/ quote, in one table: results/runs.jsonl, a row a run.

    group, name    2x2_1.5b, nvfp4--aqn-s3; commands find rows by patterns of "group/name"
    seed, flags    the flags of train.py that are not as in the first row, which holds defaults
    script         what trained, where that was not train.py, with its own flags
    commit         the commit that added the run: its code is that one's, or a little older
    summary        summary.json: held-out accuracy before and after, seconds, peak memory
    evals          [steps, accuracy] of each evaluation on the way
    metrics        COLUMNS of metrics.jsonl, a number for each step; accuracy as right samples,
                   whole numbers, of prompts_per_step x group_size
    right          after training (and before) a bit for each held-out question, 1 if right; before
                   may be the name of an earlier row that has the same

lab/experiments.py compare, lab/plot.py and lab/bench_report.py cards take patterns beside folders:
`folders` writes each row that matches as the folder it came from. To add runs:

    python lab/archive.py runs/2x2/* --group 2x2_3b --commit $(git rev-parse --short HEAD)
    python lab/plot.py '2x2_3b/*' --out 2x2.png
"""
import base64
import json
import sys
import tempfile
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command, curves
from plumbing.files import append, read_jsonl, saved

TABLE = Path(__file__).resolve().parents[1] / "results" / "runs.jsonl"
COLUMNS = ("accuracy", "entropy", "length_mean", "format", "zero_var_frac", "logp_gap_mean",
           "sampler_kl", "clip_first_frac", "prompts_sampled", "seconds", "seconds_rollout",
           "seconds_update")
# what older runs were told by flags and newer ones have as constants
CONSTANTS = {"aqn_stages": 10, "tis_cap": 2.0, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1,
             "warmup": 0.1, "eps_low": None, "eval_top_p": 0.95, "spare_prompts": 0,
             "max_resample": 2}
# flags that change no number of a run; on --card-share its last digits may depend
LEFT_OUT = {*command.IDLE, "command", "script", "commits", "seed"} - {"card_share"}
# the argument of commands that compare runs
RUNS = {"nargs": "+", "metavar": "RUN", "help": "folder that train.py wrote, or a quoted pattern "
        "of rows in results/runs.jsonl, as '2x2_1.5b/nvfp4*'"}


def config(run):
    """The flags in config.json of a run's folder."""
    if had := saved(run, "config.json"):
        return had
    raise ValueError(f"{run}: has no config.json; give folders that train.py wrote")


def read():
    """(defaults of train.py's flags, {"group/name": row}) of the table."""
    (_, first), *rest = read_jsonl(TABLE)
    return first["defaults"], {f"{row['group']}/{row['name']}": row for _, row in rest}


@contextmanager
def folders(runs):
    """Within the block: the runs that are given, folders as they are and patterns of "group/name"
    as temporary folders of the table's rows. ValueError for what is neither."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for run in runs:
            if Path(run).exists():
                found.append(run)
                continue
            defaults, rows = read()
            matching = [name for name in rows if fnmatchcase(name, run)]
            if not matching:
                raise ValueError(f"{run}: no such folder, and no group/name in {TABLE.name} is "
                                 "like it; a pattern is quoted, as in '2x2_1.5b/nvfp4*'")
            for name in matching:
                if (out := f"{temporary}/{name}") not in found:
                    unpack(rows[name], defaults, Path(out))
                    found.append(out)
        try:
            yield found
        except ValueError as e:  # a row is called by its name
            raise ValueError(str(e).replace(f"{temporary}/", "")) from None


def unpack(row, defaults, out):
    """Write a row as the folder `out`."""
    out.mkdir(parents=True)
    flags = defaults | row["flags"] | {"seed": row["seed"]}
    script = row.get("script", "train.py").removeprefix("lab/ideas/")
    (out / "config.json").write_text(json.dumps(flags | {"script": script}))
    (out / "summary.json").write_text(json.dumps(row.get("summary", {})))
    evals, samples = dict(row["evals"]), samples_of(flags)
    steps = [dict(zip(row["metrics"], values, strict=True))
             for values in zip(*row["metrics"].values(), strict=True)]
    for i, step in enumerate(steps):
        step |= {"step": i, "eval_accuracy": evals.get(i)}
        if isinstance(step["accuracy"], int):
            step["accuracy"] /= samples
    append(out / "metrics.jsonl", steps)
    if after := row.get("right", {}).get("after"):
        append(out / "eval_after.jsonl", [{"accuracy": bit} for bit in unpacked(after)])


def samples_of(flags):
    """Completions a step."""
    return flags["prompts_per_step"] * flags["group_size"]


def packed(bits):
    """Zeros and ones -> text. A 1 before them keeps the zeros they begin with."""
    number = int("1" + "".join(map(str, bits)), 2)
    return base64.b64encode(number.to_bytes(-(-number.bit_length() // 8))).decode()


def unpacked(text):
    """The zeros and ones in a text that `packed` made."""
    return [*map(int, bin(int.from_bytes(base64.b64decode(text)))[3:])]


def answers(run):
    """Accuracy on each held-out question after training, in the set's order; None where it was not
    kept."""
    path, fields = Path(run) / "eval_after.jsonl", {"accuracy": (float, 0, 1)}
    if path.is_file():
        return [row["accuracy"] for _, row in read_jsonl(path, fields, fields)]


def short(value, digits):
    """A JSON value, its floats to so many significant digits."""
    return json.loads(json.dumps(value),
                      parse_float=lambda text: float(f"{float(text):.{digits}g}"))


def row_of(run, group, commit, defaults):
    """The row of a run's folder."""
    steps, had = curves.read(run), config(run)
    if [s["step"] for s in steps] != [*range(len(steps))]:
        raise ValueError(f"{run}: metrics.jsonl lacks a step; give runs that are whole")
    flags = {k: v for k, v in (CONSTANTS | had).items() if k not in LEFT_OUT}
    row = {"group": group, "name": Path(run).resolve().name, "seed": had.get("seed"),
           "flags": {k: v for k, v in flags.items() if v != defaults.get(k)}}
    if had.get("script", "train.py") != "train.py":
        row["script"] = had["script"]
    summary = {k: v for k, v in saved(run, "summary.json").items() if k != "command"}
    row["summary"] = short(summary, 8)  # a difference is printed as from the folder
    row["evals"] = [[s["step"], round(s["eval_accuracy"], 4)] for s in steps
                    if s.get("eval_accuracy") is not None]
    row["metrics"] = {c: short([s.get(c) for s in steps], 3) for c in COLUMNS
                      if any(s.get(c) is not None for s in steps)}
    # right samples instead of their share, if that is what the shares are of
    shares = [s["accuracy"] for s in steps]
    right = [share * samples_of(defaults | had) for share in shares]
    whole = all(abs(n - round(n)) < 0.01 for n in right)
    row["metrics"]["accuracy"] = [*map(round, right)] if whole else shares
    grades = answers(run)
    if grades and {*grades} <= {0, 1}:  # each question was asked once
        row["right"] = {"after": packed(map(int, grades))}
    return row | {"commit": commit}


def add(runs, group, commit):
    """Append the rows of folders to the table."""
    defaults, known = read()
    rows = [row_of(run, group, commit, defaults) for run in runs]
    names = [f"{group}/{row['name']}" for row in rows]
    if there := {name for name in names if name in known or names.count(name) > 1}:
        raise ValueError(f"--group {group}: {min(there)} is in {TABLE} already, or given twice; "
                         "choose another, or delete its row")
    append(TABLE, rows, separators=(",", ":"))
    print(f"{TABLE}: {len(rows)} rows more, {len(known) + len(rows)} runs")


def main(argv=None):
    p = command.Parser(description="Add runs to the table of kept runs, results/runs.jsonl.")
    p.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py wrote")
    p.add_argument("--group", required=True, help="the first half of the rows' names")
    p.add_argument("--commit", help="the revision that trained")
    return command.run("lab/archive.py", lambda: add(**vars(p.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
