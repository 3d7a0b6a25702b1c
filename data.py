"""
Data sets and rewards: a name in, a list of {"question", "answer"} rows out, and a number for each
completion.

Where a task comes from (`load`), which of its prompts fit (`prompts`), and how an answer is graded
(`reward`: 0.2 for the format, 1.0 for the right answer; `own_reward`: by your own function).
Numbers are compared as exact fractions, see plumbing/grade.py; the chat template is rendered in
plumbing/tokenizer.py.

Left out: learned reward models, and streaming sets that do not fit in memory.

    python data.py --data arithmetic --split test --n 3
    python data.py --data gsm8k --split train --n 2 --model assets/tiny
"""
import argparse
import copy
import hashlib
import importlib.util
import json
import numbers
import os
import random
import re
import sys
import traceback
from pathlib import Path

from plumbing import command
from plumbing.files import TINY, cause, decode, read_jsonl, shown, text_file
from plumbing.grade import last_boxed, last_term, same_all
from plumbing.tokenizer import SUFFIX, Tokenizer, unknown_style

import torch

HUB = {  # a repository, followed by the folder if it holds several sets
    "gsm8k": "openai/gsm8k/main", "math500": "HuggingFaceH4/MATH-500",
    "aime24": "math-ai/aime24", "aime25": "math-ai/aime25", "amc23": "math-ai/amc23",
    "bigmath": "open-r1/Big-Math-RL-Verified-Processed",
}
TEST_ROWS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30, "amc23": 40}
WORKED = re.compile(r"\S\s*\n\s*\S|(?:\b[A-Za-z]{2,}[,.]? ){5}")  # lines or a sentence: no answer
MOST = 100_000  # arithmetic problems drawn at a time: distinct ones run out


def prompts(tok, rows, style="tags", max_prompt=None):
    """rows -> (the rows that fit, each with its "ids", number skipped).

    ValueError if none fits max_prompt tokens."""
    made = [{**row, "ids": tok.prompt_ids(row["question"], style, max_prompt)} for row in rows]
    kept = [row for row in made if row["ids"] is not None]
    if not kept:
        raise ValueError(f"--max-prompt {max_prompt}: all {len(rows)} prompts are longer; raise it")
    return kept, len(made) - len(kept)


# ---- data sets


def load(name, split="train", n=None, seed=0, levels=None):
    """Rows of a data set: a list of {"question": str, "answer": str, ...other columns}.

    name: arithmetic, a name of HUB, a .jsonl or .parquet file, a folder with {split}.jsonl or
    .parquet, or the id of a hub data set. A single file gives the same rows for each split.
    n: that many rows, drawn without replacement by `seed` and left in order.
    levels: keep rows whose "level" is in it, 5 the hardest (see _set_levels); bigmath comes in two
    configurations, 3, 4, 5 and 4, 5.
    Raises ValueError / FileNotFoundError naming the file and the row; ConnectionError when a
    download fails.
    """
    name = str(name)
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: unknown, choose train or test")
    if n is not None and n < 1:
        raise ValueError(f"--data {name}: asked for {n} rows; ask for at least 1")
    if name == "arithmetic":
        rows, where = arithmetic(split, n or {"train": 2048, "test": 512}[split], seed), name
    else:
        files = _files(name, split, levels)
        rows, where = _graded(files), files[0]
        if split == "test" and len(rows) != TEST_ROWS.get(name, len(rows)):
            raise ValueError(f"{where}: {len(rows)} rows, {name} has {TEST_ROWS[name]}; delete it "
                             "and try again")
    _set_levels(rows)
    if levels is not None and name != "bigmath":  # whose configuration the levels have chosen
        if any(row.get("level") is None for row in rows):
            raise ValueError(f"{where}: --levels needs a column level or llama8b_solve_rate in "
                             "each row")
        rows = [row for row in rows if row["level"] in levels]
        if not rows:
            raise ValueError(f"{where}: no row has a level in {sorted(levels)}")
    if n is not None and n < len(rows):
        rows = [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), n))]
    return rows


def _files(name, split, levels):
    """The files that hold a split of the set called `name`: one, or its parts."""
    if not name.strip():
        raise ValueError("--data: is empty; name a set, a file or a folder")
    if name == "bigmath":
        if split == "test":
            raise FileNotFoundError("bigmath has no test split")
        if (chosen := sorted(levels or ())) not in ([3, 4, 5], [4, 5]):
            raise ValueError("--levels: --data bigmath comes as 3,4,5 or 4,5; choose one")
        return _hub(f"{HUB[name]}/level_{'_'.join(map(str, chosen))}", split)
    if name in HUB:
        return _hub(HUB[name], split)
    if Path(name).is_dir():
        return _find_split(Path(name), split)
    if Path(name).is_file():
        return [Path(name)]
    if re.fullmatch(r"[\w-]+/[\w.-]+", name) and not name.endswith((".jsonl", ".parquet")):
        return _hub(name, split)
    raise FileNotFoundError(f"--data {name}: no such file or folder, nor one of arithmetic, "
                            f"{', '.join(HUB)}")


def _find_split(folder, split):
    for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet"):
        if path.is_file():
            return [path]
    parts = sorted(folder.glob(f"**/{split}-*.parquet"))
    if not parts:
        raise FileNotFoundError(f"{folder / split}.jsonl: not found (nor a parquet); this set may "
                                f"have no {split} split")
    homes = sorted({str(p.parent) for p in parts})
    if len(homes) > 1:
        raise ValueError(f"{folder}: {split} is in several folders; choose one: {', '.join(homes)}")
    count = re.search(r"-of-([0-9]+)", parts[0].name)
    if count and int(count[1]) != len(parts):
        raise ValueError(f"{parts[0]}: {len(parts)} of {int(count[1])} parts are here; get the "
                         "others")
    return parts


def _graded(paths):
    """The rows of the files; those without an answer are left out, and counted on stderr."""
    rows = [_row(raw, where) for path in paths for where, raw in _read_rows(path)]
    graded = [row for row in rows if row["answer"]]
    if not graded:
        raise ValueError(f"{paths[0]}: no rows with an answer")
    if len(graded) < len(rows):
        print(f"{paths[0]}: {len(rows) - len(graded)} of {len(rows)} rows have an empty answer, or "
              "a solution without \\boxed{}, and are left out", file=sys.stderr)
    return graded


def _row(raw, where):
    def first(*columns):
        return next((raw[k] for k in columns if raw.get(k) is not None), None)

    question, answer = first("question", "problem", "prompt"), first("answer", "solution")
    asked = isinstance(question, str) and question.strip()
    if not asked or type(answer) not in (str, int, float):
        raise ValueError(f"{where}: needs question and answer (or problem and answer, or prompt "
                         "and solution) as text")
    if "ids" in raw:
        raise ValueError(f"{where}: a column is called ids, as a prompt's tokens are here; rename "
                         "it")
    if type(rate := raw.get("llama8b_solve_rate")) not in (int, float, type(None)):
        raise ValueError(f"{where}: llama8b_solve_rate {shown(rate)} must be a number")
    answer = str(answer)
    if "####" in answer:  # GSM8K: the worked solution, then "#### 72"
        answer = answer.rsplit("####", 1)[1]
    elif raw.get("answer") is None and (box := last_boxed(answer)) is not None:
        answer = box
    elif raw.get("answer") is None and (raw.get("prompt") != question or WORKED.search(answer)):
        answer = ""  # a worked solution without its answer; beside a prompt it may be the answer
    return {**raw, "question": question, "answer": answer.strip()}


def _read_rows(path):
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


def _set_levels(rows):
    """Big-Math has no level, only the rate at which an 8B model solves the row: level 5 is the
    lowest fifth of the rates. MATH's levels read "Level 5"; numbers may be text."""
    for row in rows:
        if m := re.fullmatch("(?:Level )?([1-9][0-9]{0,3})", str(row.get("level"))):
            row["level"] = int(m[1])
    rates = [row.get("llama8b_solve_rate") for row in rows]
    known = sorted(r for r in rates if r is not None)
    if not known:
        return
    edges = [known[-(-len(known) * k // 5) - 1] for k in range(1, 5)]
    for row, rate in zip(rows, rates, strict=True):
        if row.get("level") is None:
            row["level"] = None if rate is None else 5 - sum(rate > edge for edge in edges)


def _hub(place, split):
    """The files of a split of owner/name on the hub, or of owner/name/folder, downloaded once."""
    import huggingface_hub

    owner, name, *folders = place.split("/")
    under = "".join(f"{folder}/" for folder in folders)
    wanted = [f"{under}*{split}{end}" for end in (".jsonl", ".parquet", "-*.parquet")]
    try:
        home = huggingface_hub.snapshot_download(f"{owner}/{name}", repo_type="dataset",
                                                 allow_patterns=wanted)
    except Exception as e:  # the hub's errors share no base class
        raise ConnectionError(
            f"--data {place}: not here, and the hub did not give it ({cause(e)}); pass a local "
            f"folder with {split}.jsonl, as ./{name}") from None
    return _find_split(Path(home) / under, split)


# ---- arithmetic: procedural problems for a model of a million parameters

NUMBER_WORDS = "zero one two three four five six seven eight nine".split()
TIMES = {2: "double", 3: "triple"}
STORY = {"+": ["finds {} more", "wins {} more", "buys {} more"],
         "-": ["loses {}", "sells {}", "eats {}"]}
NAMES, THINGS = ["Mia", "Tom", "Ana", "Sam"], ["apples", "eggs", "nuts", "figs"]
FORMS = ("symbols", "steps", "mixed", "story")


def arithmetic(split, n, seed=0):
    """n problems of 3 to 5 operations on numbers below 200; besides "question" and "answer",
    rows have "chain" and "form".

    A chain such as "7+15*3-8" is worked from left to right. A hash of the chain decides its split,
    whatever the form of the question and whatever the seed, so that no test problem can appear in
    training. ValueError for more than MOST.
    """
    if n > MOST:
        raise ValueError(f"--data arithmetic: asked for {n} rows; at most {MOST} distinct ones are "
                         "drawn")
    rng = random.Random(f"{split} {seed}")
    rows, seen = [], set()
    while len(rows) < n:
        start = value = rng.randint(2, 50)
        ops = []
        for _ in range(rng.randint(3, 5)):
            op, k = rng.choice("++--*"), rng.choice((rng.randint(1, 9), rng.randint(10, 49)))
            if op == "*":
                k = rng.choice([k for k in (2, 3) if value * k < 200] or [0])
            if k == 0 or not 0 <= (after := apply(value, op, k)) < 200:
                break
            ops.append((op, k))
            value = after
        chain = f"{start}" + "".join(f"{op}{k}" for op, k in ops)
        if len(ops) < 3 or chain in seen or in_test(chain) != (split == "test"):
            continue
        seen.add(chain)
        kind = rng.choice(FORMS)
        rows.append({"question": _ask(rng, kind, start, ops), "answer": str(value), "chain": chain,
                     "form": kind})
    return rows


def apply(value, op, k):
    return value + k if op == "+" else value - k if op == "-" else value * k


def in_test(chain):
    return hashlib.sha256(chain.encode()).digest()[0] < 26  # a tenth of all chains


def steps(chain):
    """"7+5*3" -> [(7, "+", 5, 12), (12, "*", 3, 36)]."""
    value, out = int(re.match("[0-9]+", chain)[0]), []
    for op, k in re.findall(r"([-+*])([0-9]+)", chain):
        out.append((value, op, int(k), apply(value, op, int(k))))
        value = out[-1][-1]
    return out


def solution(row):
    """The worked answer to an arithmetic row, in the `tags` format."""
    work = "\n".join(f"{a}{op}{k}={b}" for a, op, k, b in steps(row["chain"]))
    return f"<think>{work}</think><answer>{row['answer']}</answer>"


def _ask(rng, form, start, ops):
    def num(k):
        return NUMBER_WORDS[k] if k < 10 and rng.random() < 0.5 else str(k)

    def order(op, k):
        if op == "*":
            return f"{TIMES[k]} it"
        return f"add {num(k)}" if op == "+" else f"subtract {num(k)}"

    if form == "symbols":
        text = str(start)
        for i, (op, k) in enumerate(ops):
            text = f"({text})" if op == "*" and i and ops[i - 1][0] != "*" else text
            text += f"{op}{k}"
        return f"What is {text}?"
    if form == "steps":
        return f"Start with {num(start)}, " + ", ".join(order(*o) for o in ops) + "."
    if form == "mixed":
        (op, k), rest = ops[0], ops[1:]
        return f"Take {start}{op}{k}, " + ", ".join(order(*o) for o in rest) + "."
    thing = rng.choice(THINGS)
    told = ", ".join(f"{TIMES[k]}s them" if op == "*" else rng.choice(STORY[op]).format(num(k))
                     for op, k in ops)
    return f"{rng.choice(NAMES)} has {num(start)} {thing}, {told}. How many {thing}?"


# ---- calibration text for AWQ


def texts(path):
    """The texts of a file: question and answer of each row of a .jsonl (or its "text"), else the
    file as one text."""
    path = text_file(path)
    if path.suffix.lower() != ".jsonl":
        return [decode(path.read_bytes(), path)]
    out = []
    for where, row in read_jsonl(path, {"text": str}):
        text, question, answer = map(row.get, ("text", "question", "answer"))
        if text is None and not (isinstance(question, str) and isinstance(answer, str | int)):
            raise ValueError(f'{where}: needs "text", or "question" and "answer"')
        out.append(f"{question}\n{answer}" if text is None else text)
    return out


def calibration(path, folder, sequences=128, length=512):
    """ids (sequences, length) long of calibration text in the checkpoint's own tokens; documents
    follow one another, each ended by EOS. Without a file: worked arithmetic problems in the
    checkpoint's chat template, as in the embedded task."""
    tok = Tokenizer(folder)
    if path is None:
        rows = arithmetic("train", 4096)
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
                         f"sequence of {length}; give more text, or lower --length")
    return torch.tensor(ids[: rows * length]).view(rows, length)


# ---- rewards


def reward(text, answer, style="tags"):
    """Grade a completion: {"reward": 0.2 * format + 1.0 * correct, "correct": bool, "format": bool,
    "given": str or None}.

    tags: the format is <think>..</think><answer>..</answer>; the answer is the last <answer>'s
    content, unless it is inside <think>. boxed: the format is a closed \\boxed{}; the answer is the
    last one's content, or the last term with a digit if no box was closed, whole (3/4, not 4).
    Takes any text, in time linear in its length.
    """
    return rewards([(text, answer)], style)[0]


def rewards(completions, style="tags"):
    """reward of each (text, answer), the answers graded side by side."""
    found = [_given(text, style) for text, _ in completions]
    verdicts = same_all([(given or "", str(answer))
                         for (given, _), (_, answer) in zip(found, completions, strict=True)])
    return [{"reward": 0.2 * well_formed + 1.0 * correct, "correct": correct, "format": well_formed,
             "given": given} for (given, well_formed), correct in zip(found, verdicts, strict=True)]


def _given(text, style):
    """(the answer that a completion gives or None, whether it is in the format)."""
    if style == "tags":
        return _tagged(text)
    if style != "boxed":
        raise unknown_style(style)
    if (given := last_boxed(text)) is not None:
        return given, True
    return last_term(text), False


def _tagged(text):
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0 or "<answer>" in text[end:]:  # one cut off by the length limit is no answer
        return None, False
    before = text[:start].rstrip()
    thinks = before.rfind("<think>") > before.rfind("</think>")
    if "think>" not in before:  # the prompt may have opened it
        thinks = text.count("</think>", end) > text.count("<think>", end)
    if thinks:
        return None, False
    well_formed = before.endswith("</think>") and "<think>" in before
    return text[start + len("<answer>") : end], well_formed


def scorer(style="tags", own=None):
    """The function [(text, row), ...] -> [a dict like `reward`'s for each] of a style, or of
    --reward file.py:function."""
    if own:
        grade = own_reward(own)
        return lambda completions: [grade(text, row) for text, row in completions]
    return lambda completions: rewards([(t, row["answer"]) for t, row in completions], style)


def own_reward(spec):
    """The grader of --reward file.py:function: a function (text, row) -> a dict like `reward`'s.

    Yours is called with a completion's text and the whole row of the data set, every column. It
    returns a number r, which counts as correct if r >= 1 and always as well formed, or a dict with
    "reward" and, optionally, "correct", "format" and "given". It runs in this process.
    FileNotFoundError / ValueError name the file and the function when they cannot be loaded;
    ValueError when the function raises, or returns no number within +-1e9.
    """
    function, flag = _function(spec), f"--reward {spec}"
    file = str(Path(spec.rpartition(":")[0]).resolve())

    def grade(text, row):
        folder, gradients = os.getcwd(), torch.is_grad_enabled()
        try:
            value = function(text, copy.deepcopy(row))
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # the user's own code, or a completion that it ran
            frames = traceback.extract_tb(e.__traceback__)
            place = [f for f in frames if f.filename == file][-1:] or frames[-1:]
            raise ValueError(f"{flag}: raised {cause(e)} ({place[0].filename}, line "
                             f"{place[0].lineno})") from e
        finally:  # what it may have changed for all
            os.chdir(folder)
            torch.set_grad_enabled(gradients)
        score = value if isinstance(value, dict) else {"reward": value}
        r = _plain(score.get("reward"))
        if not isinstance(r, numbers.Real) or not abs(r) <= 1e9:  # its square must fit float32
            raise ValueError(f'{flag}: returned {value!r:.80}; return a number within +-1e9, or a '
                             'dict with one as "reward"')
        said = {"correct": score.get("correct", r >= 1), "format": score.get("format", True)}
        for name, mark in said.items():
            if not isinstance(mark := _plain(mark), numbers.Real) or mark not in (0, 1):
                raise ValueError(f'{flag}: returned {mark!r:.40} as "{name}"; it is True or False, '
                                 "or left out")
            said[name] = bool(mark)
        return {"reward": float(r), **said,
                "given": None if score.get("given") is None else str(score["given"])}

    return grade


def _plain(value):
    """A numpy or torch number as a Python number: a numpy bool is no numbers.Real."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _function(spec):
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f"--reward {spec}: want file.py:function")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--reward {path}: not found; name a Python file that defines "
                                f"{name}(text, row)")
    sys.path.append(str(Path(path).resolve().parent))  # its folder, as `python path` does
    loader = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}",
                                                    Path(path).resolve())
    module = sys.modules[loader.name] = importlib.util.module_from_spec(loader)
    try:
        loader.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # the user's own code
        raise ValueError(f"--reward {path}: import fails with {cause(e)}; `python {path}` shows "
                         "where") from e
    if not callable(function := getattr(module, name, None)):
        state = "is not a function" if hasattr(module, name) else "is not in it"
        raise ValueError(f"--reward {path}: {name} {state}; define {name}(text, row) there")
    return function


def main(argv=None):
    parser = command.Parser(description="Show rows of a data set.",
                            formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="arithmetic", help="name, file, folder or hub id of a data set")
    add("--split", default="test", choices=["train", "test"], help="which part of it")
    add("--n", type=command.number(1, 10**6), default=3, help="how many rows to show")
    add("--seed", type=command.number(0, 1 << 63), default=0, help="which rows")
    add("--levels", type=command.numbers(1, 1e4), help="as in 3,4,5")
    add("--model", help="show the prompt as this checkpoint folder's template writes it")
    add("--prompt-style", default="tags", choices=list(SUFFIX), help="what the user turn asks for")

    def body():
        args = parser.parse_args(argv)
        tok = Tokenizer(TINY if args.model == "tiny" else args.model) if args.model else None
        for row in load(args.data, args.split, args.n, args.seed, args.levels):
            print(json.dumps(row, ensure_ascii=False, default=str))  # parquet may hold dates
            if tok:
                ids = tok.prompt_ids(row["question"], args.prompt_style)
                text = tok.tokenizer.decode(ids, skip_special_tokens=False)
                print(f"{text}[{len(ids)} tokens]")

    return command.run("data.py", body)


if __name__ == "__main__":
    sys.exit(main())
