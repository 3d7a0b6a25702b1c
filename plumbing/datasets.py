"""
Data sets as files: a folder, a .jsonl, a .parquet or a set of the hub in, rows of {"question",
"answer", ...} out. What is asked of a row, and how its answer is graded, is in data.py.
"""
import re
import sys
from pathlib import Path

from plumbing import hub
from plumbing.arithmetic import problems, solution
from plumbing.files import decode, read_jsonl
from plumbing.grade import last_boxed
from plumbing.tokenizer import Tokenizer

import torch

HUB = {  # a repository, followed by the folder if it holds several sets
    "gsm8k": "openai/gsm8k/main", "math500": "HuggingFaceH4/MATH-500",
    "aime24": "math-ai/aime24", "aime25": "math-ai/aime25", "amc23": "math-ai/amc23",
    "bigmath": "open-r1/Big-Math-RL-Verified-Processed",
}
WORKED = re.compile(r"\S\s*\n\s*\S|(?:\b[A-Za-z]{2,}[,.]? ){5}")  # lines or a sentence: no answer


def read(name, split, levels=None):
    """Rows of the set called `name`: a name of HUB, a .jsonl or .parquet file, a folder with
    {split}.jsonl or .parquet, or the id of a set on the hub. Rows without an answer are left out,
    and counted on stderr. levels: keep rows whose "level" is in it; bigmath comes in two
    configurations, 3, 4, 5 and 4, 5."""
    files = files_of(name, split, levels)
    found = [row_of(raw, where) for path in files for where, raw in read_rows(path)]
    rows = [row for row in found if row["answer"]]
    if not rows:
        raise ValueError(f"{files[0]}: no rows with an answer")
    if len(rows) < len(found):
        print(f"{files[0]}: {len(found) - len(rows)} of {len(found)} rows have an empty answer, or "
              "a solution without \\boxed{}, and are left out", file=sys.stderr)
    chosen = name.partition("@")[0] == "bigmath"  # by its configuration
    if levels is not None and not chosen:
        if any(row.get("level") is None for row in rows):
            raise ValueError(f"{files[0]}: --levels needs a column level in each row")
        rows = [row for row in rows if row["level"] in levels]
        if not rows:
            raise ValueError(f"{files[0]}: no row has a level in {sorted(levels)}")
    return rows


def files_of(name, split, levels):
    """The files that hold a split of the set called `name`: one, or its parts."""
    place, at, revision = name.partition("@")  # the hub's; a file's name may have an @ as well
    if place not in HUB:
        if Path(name).is_dir():
            return find_split(Path(name), split)
        if Path(name).is_file():
            return [Path(name)]
        if name.endswith((".jsonl", ".parquet")) or not hub.ID.fullmatch(name):
            raise FileNotFoundError(f"--data {name}: no such file or folder, nor one of "
                                    f"arithmetic, {', '.join(HUB)}")
    owner, repo, *folders = HUB.get(place, place).split("/")
    if place == "bigmath":
        if split == "test":
            raise FileNotFoundError("bigmath has no test split")
        if (chosen := sorted(levels or ())) not in ([3, 4, 5], [4, 5]):
            raise ValueError("--levels: --data bigmath comes as 3,4,5 or 4,5; choose one")
        folders = [f"level_{'_'.join(map(str, chosen))}"]
    under = "".join(f"{folder}/" for folder in folders)
    home = hub.download(f"{owner}/{repo}{at}{revision}", "dataset", tuple(
        f"{under}*{split}{end}" for end in (".jsonl", ".parquet", "-*.parquet")))
    return find_split(home / under, split)


def find_split(folder, split):
    for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet"):
        if path.is_file():
            return [path]
    parts = sorted(folder.glob(f"**/{split}-*.parquet"))
    if not parts:
        raise FileNotFoundError(f"{folder / split}.jsonl: not found (nor a parquet); this set may "
                                f"have no {split} split")
    homes = sorted({str(part.parent) for part in parts})
    if len(homes) > 1:
        raise ValueError(f"{folder}: {split} is in several folders; choose one: {', '.join(homes)}")
    count = re.search(r"-of-([0-9]+)", parts[0].name)
    if count and int(count[1]) != len(parts):
        raise ValueError(f"{parts[0]}: {len(parts)} of {int(count[1])} parts are here; get the "
                         "others")
    return parts


def asked(raw, where):
    """(question, answer) of a row, as the file has them."""
    def first(*columns):
        return next((raw[k] for k in columns if raw.get(k) is not None), None)

    question, answer = first("question", "problem", "prompt"), first("answer", "solution")
    if (not isinstance(question, str) or not question.strip()
            or type(answer) not in (str, int, float)):
        raise ValueError(f"{where}: needs question and answer (or problem and answer, or prompt "
                         "and solution) as text")
    return question, str(answer)


def row_of(raw, where):
    question, answer = asked(raw, where)
    if "ids" in raw:
        raise ValueError(f"{where}: a column is called ids, as a prompt's tokens are here; rename "
                         "it")
    if level := re.fullmatch("(?:Level )?([1-9][0-9]{0,3})", str(raw.get("level"))):
        raw["level"] = int(level[1])  # MATH's read "Level 5"
    if "####" in answer:  # GSM8K: the worked solution, then "#### 72"
        answer = answer.rsplit("####", 1)[1]
    elif raw.get("answer") is None and (box := last_boxed(answer)) is not None:
        answer = box
    elif raw.get("answer") is None and (raw.get("prompt") != question or WORKED.search(answer)):
        answer = ""  # a worked solution without its answer; beside a prompt it may be the answer
    return {**raw, "question": question, "answer": answer.strip()}


def read_rows(path):
    """("file, row n", its columns) of each row."""
    if path.suffix.lower() != ".parquet":
        return read_jsonl(path)
    import numpy
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: not a parquet file ({e})") from None
    for name in [field.name for field in table.schema if field.type == pyarrow.float32()]:
        for raw in rows:  # 0.1, not the 0.10000000149 that float32 holds
            raw[name] = raw[name] and float(str(numpy.float32(raw[name])))
    # pandas writes NaN where there is nothing
    return [(f"{path}, row {i}", {k: None if v != v else v for k, v in raw.items()})
            for i, raw in enumerate(rows, 1)]


def texts(path):
    """The texts of a file: "text", or question and answer, of each row of a .jsonl or .parquet,
    else the file as one text."""
    path = Path(path)
    if path.suffix.lower() not in (".jsonl", ".parquet"):
        return [decode(path.read_bytes(), path)]
    out = []
    for where, row in read_rows(path):
        text = row.get("text")
        if not isinstance(text, str):
            text = "\n".join(asked(row, f'{where}: has no "text"'))
        out.append(text)
    return out


def calibration(path, folder, sequences=128, length=512):
    """ids (at most sequences, length) of calibration text in the checkpoint's own tokens; documents
    follow one another, each ended by EOS. Without a file: worked arithmetic problems in the
    checkpoint's chat template, as in the embedded task."""
    tok = Tokenizer(folder)
    if path is None:
        rows = problems("train", 4096)
        docs = (tok.prompt_ids(r["question"]) + tok.encode(solution(r)) for r in rows)
    else:
        docs = (tok.encode(t) for t in texts(path))
    ids, want = [], sequences * length
    for doc in docs:
        ids += doc + tok.eos_ids[-1:]
        if len(ids) >= want:
            break
    rows = min(sequences, len(ids) // length)
    if rows < 1:
        raise ValueError(f"--calib {path or 'by default'}: {len(ids)} tokens, fewer than one "
                         f"sequence of {length}; give more text")
    return torch.tensor(ids[: rows * length]).view(rows, length)
