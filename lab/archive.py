"""
The training runs that README.md and docs/ quote: results/runs.tar.xz holds the folder of each, less
the texts of its answers, as GROUP/NAME/ with config.json, summary.json, metrics.jsonl (the COLUMNS
below) and, where they were kept, the grades in eval_before.jsonl and eval_after.jsonl.

lab/experiments.py compare and lab/plot.py take patterns of "GROUP/NAME" beside folders; to read
the files themselves, `tar xf results/runs.tar.xz`. To add runs:

    python lab/archive.py runs/2x2/* --group 2x2_3b --commit $(git rev-parse --short HEAD)
    python lab/plot.py '2x2_3b/*' --out 2x2.png
"""
import json
import re
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command, curves
from plumbing.files import read_jsonl, saved, whole, write_json, write_jsonl

RUNS = Path(__file__).resolve().parents[1] / "results" / "runs.tar.xz"
COLUMNS = ("step", "accuracy", "eval_accuracy", "entropy", "length_mean", "format", "zero_var_frac",
           "logp_gap_mean", "sampler_kl", "clip_first_frac", "prompts_sampled", "seconds",
           "seconds_rollout", "seconds_update")  # what is kept of metrics.jsonl
LEFT_OUT = (*command.IDLE, "command", "commits")  # of config.json
# the argument of commands that compare runs
ARGUMENT = {"nargs": "+", "metavar": "RUN", "help": "folder that train.py wrote, or a quoted "
            "pattern of runs in results/runs.tar.xz, as '2x2_1.5b/nvfp4*'"}


def config(run):
    """The flags in config.json of a run's folder."""
    if had := saved(run, "config.json"):
        return had
    raise ValueError(f"{run}: has no config.json; give folders that train.py wrote")


def answers(run, name="eval_after.jsonl"):
    """Accuracy on each held-out question, by default after training, in the set's order; None where
    it was not kept."""
    path = Path(run) / name
    if path.is_file():
        return [row["accuracy"] for _, row in read_jsonl(path, ["accuracy"])]


@contextmanager
def folders(runs):
    """Within the block: the runs that are given, each once, folders as they are and patterns of
    "GROUP/NAME" unpacked into temporary folders. ValueError for what is neither."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for run in runs:
            if Path(run).exists():
                found.append(run)
                continue
            with tarfile.open(RUNS) as tar:
                files = [file for file in tar if fnmatchcase(str(Path(file.name).parent), run)]
                tar.extractall(temporary, files, filter="data")
            if not files:
                raise ValueError(f"{run}: no such folder, and no GROUP/NAME in {RUNS.name} is like "
                                 "it; a pattern is quoted, as in '2x2_1.5b/nvfp4*'")
            found += [f"{temporary}/{Path(file.name).parent}" for file in files]
        yield [*{Path(run).resolve(): run for run in found}.values()]


def short(value, digits=6):
    """A JSON value, its floats to so many significant digits."""
    return json.loads(json.dumps(value),
                      parse_float=lambda text: float(f"{float(text):.{digits}g}"))


def keep(run, out, commit):
    """Copy what is kept of a run's folder to the folder `out`, which is new."""
    steps, flags = curves.read(run), config(run)
    if [step["step"] for step in steps] != [*range(len(steps))]:
        raise ValueError(f"{run}: metrics.jsonl lacks a step; give runs that are whole")
    out.mkdir(parents=True)
    flags = {flag: value for flag, value in flags.items() if flag not in LEFT_OUT}
    write_json(out / "config.json", flags | {"commit": commit}, indent=None)
    write_json(out / "summary.json", saved(run, "summary.json"), indent=None)
    rows = [{c: short(step[c]) for c in COLUMNS if c in step} for step in steps]
    write_jsonl(out / "metrics.jsonl", rows)
    for name in ("eval_before.jsonl", "eval_after.jsonl"):
        if (grades := answers(run, name)) is not None:
            write_jsonl(out / name, [{"accuracy": grade} for grade in grades])


def add(runs, group, commit):
    """Add folders to the archive."""
    def pack(file):  # the same bytes on every machine
        return file.replace(mtime=0, mode=0o644, uid=0, gid=0, uname="", gname="", deep=False)

    if not re.fullmatch(r"\w[\w.-]*", group):
        raise ValueError(f"--group {group}: is no name of letters, digits, _, - and .")
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(RUNS) as tar:
            tar.extractall(temporary, filter="data")
        for run in runs:
            out = Path(temporary) / group / Path(run).resolve().name
            if out.exists():
                raise ValueError(f"--group {group}: {group}/{out.name} is in {RUNS} already, or "
                                 "given twice; choose another")
            keep(run, out, commit)
        with whole(RUNS) as part, tarfile.open(part, "w:xz") as tar:
            for path in sorted(Path(temporary).glob("*/*/*")):
                tar.add(path, path.relative_to(temporary), filter=pack)
    print(f"{RUNS}: {len(runs)} runs more")


def main(argv=None):
    p = command.Parser(description="Add runs to those that are kept, results/runs.tar.xz.")
    p.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py wrote")
    p.add_argument("--group", required=True, help="the first half of their names")
    p.add_argument("--commit", help="the revision that trained")
    return command.run("lab/archive.py", lambda: add(**vars(p.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
