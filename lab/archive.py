"""
The training runs that README.md and docs/ quote, in one table: results/runs.jsonl, a row a run.

    group, name    2x2_1.5b, nvfp4--aqn-s3; commands find rows by patterns of "group/name"
    seed, flags    the flags of train.py that were not at their defaults, which the first row holds
    script         what trained, where that was not train.py, with its own flags
    commit         the commit that added the run: its code is that one's, or a little older
    summary        summary.json: held-out accuracy before and after, seconds, peak memory; the best
                   evaluation where it was not the last
    evals          [steps, accuracy] of each evaluation on the way
    metrics        columns of metrics.jsonl, a number for each step; accuracy as right samples,
                   whole numbers, of prompts_per_step x group_size
    right          after training (and before) a bit for each held-out question, 1 if right

lab/collect.py adds rows. lab/experiments.py compare, lab/plot.py and lab/bench_report.py cards
take patterns beside folders: `folders` writes each row that matches as the folder it came from.

    python lab/experiments.py compare '2x2_1.5b/*' 'formats_1.5b/nvfp4-awq*'
    python lab/plot.py '2x2_1.5b/*' --out 2x2.png
"""
import base64
import json
import tempfile
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from plumbing.files import read_jsonl

TABLE = Path(__file__).resolve().parents[1] / "results" / "runs.jsonl"


def read(path=None):
    """(defaults of train.py's flags, {"group/name": row}) of a table."""
    (_, first), *rest = read_jsonl(path or TABLE)
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
                    unpack(name, rows, defaults, Path(out))
                    found.append(out)
        try:
            yield found
        except ValueError as e:  # a row is called by its name
            raise ValueError(str(e).replace(f"{temporary}/", "")) from None


def unpack(name, rows, defaults, out):
    """Write the row `name` as the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    row = rows[name]
    command = f"python {row.get('script', 'train.py')}"
    config = defaults | row["flags"] | {"seed": row["seed"], "command": command}
    (out / "config.json").write_text(json.dumps(config))
    if "summary" in row:
        (out / "summary.json").write_text(json.dumps(row["summary"]))
    evals, columns = dict(row["evals"]), {**row["metrics"]}
    samples = samples_of(defaults | row["flags"])
    columns["accuracy"] = [a / samples if isinstance(a, int) else a for a in columns["accuracy"]]
    (out / "metrics.jsonl").write_text("".join(
        line({"step": step, **dict(zip(columns, values, strict=True)),
              "eval_accuracy": evals.get(step)})
        for step, values in enumerate(zip(*columns.values(), strict=True))))
    for when, grades in row.get("right", {}).items():
        grades = rows[grades]["right"][when] if grades in rows else grades
        (out / f"eval_{when}.jsonl").write_text(
            "".join(line({"accuracy": bit}) for bit in unpacked(grades)))


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


def line(row):
    return json.dumps(row, separators=(",", ":")) + "\n"
