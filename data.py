"""Data sets, prompts and rewards: text in, a list of {"question", "answer"} rows and a number per completion out.

Where a task comes from (`load`), how it is put to the model (`Tokenizer.prompt_ids`: the checkpoint's own chat template, in
jinja2's sandbox) and how an answer is graded (`reward`: 0.2 for the format, 1.0 for the right answer). Numbers are compared
as exact fractions, see grade.py.

Left out: tool calls, chat histories, learned reward models, and streaming sets that do not fit in memory.

    python data.py --data arithmetic --split test --n 3
    python data.py --data gsm8k --split train --n 2 --model assets/tiny
"""

import argparse
import hashlib
import http.client
import json
import os
import random
import re
import sys
import tempfile
import urllib.request
from datetime import datetime
from pathlib import Path

from grade import last_boxed, same

SUFFIX = {
    "tags": "Reason step by step in <think></think>, then give the final answer in <answer></answer>.",
    "boxed": r"Please reason step by step, and put your final answer within \boxed{}.",
}
GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{}.jsonl"
GSM8K_ROWS = {"train": 7473, "test": 1319}
HUB = {
    "math500": "HuggingFaceH4/MATH-500", "aime24": "math-ai/aime24", "aime25": "math-ai/aime25", "amc23": "math-ai/amc23",
    "bigmath": "SynthLabsAI/Big-Math-RL-Verified",
}


# ---- prompts


class Tokenizer:
    """tokenizer.json and the chat template of a checkpoint folder.

    `eos_ids`: every id that ends a turn, from generation_config.json, config.json and tokenizer_config.json together
    (Qwen's instruct models stop at <|im_end|>, and at <|endoftext|> too). `len(tok)` is the last id + 1: a checkpoint's
    embedding may have more rows than that, which no sampler may ever pick.
    Raises FileNotFoundError or ValueError with a line that names the file.
    """

    def __init__(self, folder):
        import jinja2.sandbox
        import tokenizers

        self.folder = folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not found; --model must be a folder with tokenizer.json beside config.json")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # tokenizers raises plain Exception
            raise ValueError(f"{path}: not a tokenizer file ({e})") from None
        config = _read_json(folder / "tokenizer_config.json")
        self.size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        model_config = _read_json(folder / "config.json", optional=True)
        if self.size > model_config.get("vocab_size", self.size):
            raise ValueError(
                f"{path} has {self.size} ids but {folder / 'config.json'} says vocab_size "
                f"{model_config['vocab_size']}: the tokenizer is another model's"
            )

        ids = set()
        for source in (_read_json(folder / "generation_config.json", optional=True), model_config):
            found = source.get("eos_token_id")
            ids.update([found] if isinstance(found, int) else found or [])
        self.special = {k: _content(config.get(k)) for k in ("bos_token", "eos_token", "pad_token", "unk_token")}
        ids.add(self.tokenizer.token_to_id(self.special["eos_token"] or ""))
        self.eos_ids = sorted(ids - {None})
        if not self.eos_ids:
            raise ValueError(f"{folder}: no eos_token in tokenizer_config.json and no eos_token_id in generation_config.json")

        template = config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not template and (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text()
        if not template:
            raise ValueError(f"{folder / 'tokenizer_config.json'}: no chat_template; use an instruct checkpoint, or add one")
        # The settings checkpoints are written against, and a sandbox, because a template is code from a download.
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                           extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        env.globals["raise_exception"] = _template_error
        env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        try:
            self.template = env.from_string(template)
        except jinja2.TemplateError as e:
            raise ValueError(f"{folder}: chat_template does not compile: {e}") from None

    def __len__(self):
        return self.size

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Text of a completion; special tokens (<|im_end|>, padding) are dropped, <think> and the like are not special."""
        return self.tokenizer.decode([i for i in ids if i < self.size], skip_special_tokens=True)

    def chat(self, messages):
        """messages [{"role", "content"}] -> the text the checkpoint was trained to continue."""
        special = {k: v for k, v in self.special.items() if v is not None}
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, **special)
        except Exception as e:  # a template may fail in any way
            raise ValueError(f"{self.folder}: chat_template failed: {e}") from None

    def prompt_ids(self, question, style="tags", max_prompt=None):
        """Token ids of a question with the style's instruction; None if there are more than max_prompt of them."""
        ids = self.encode(self.chat([{"role": "user", "content": styled(question, style)}]))
        return None if max_prompt is not None and len(ids) > max_prompt else ids


def styled(question, style):
    """The question with what its style asks for below it."""
    if style not in (*SUFFIX, "plain"):
        raise ValueError(f"--prompt-style {style}: unknown, choose from {', '.join(SUFFIX)}, plain")
    return question if style == "plain" else f"{question}\n{SUFFIX[style]}"


def prompts(tok, rows, style="tags", max_prompt=None):
    """rows -> (the rows that fit, each with its "ids", number skipped). ValueError if none fits max_prompt tokens."""
    made = [{**row, "ids": tok.prompt_ids(row["question"], style, max_prompt)} for row in rows]
    kept = [row for row in made if row["ids"] is not None]
    if not kept:
        raise ValueError(f"--max-prompt {max_prompt}: all {len(rows)} prompts are longer; raise it")
    return kept, len(made) - len(kept)


def _template_error(message):
    raise ValueError(message)


def _content(token):  # a token in tokenizer_config.json is a string or an AddedToken's dict
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path, optional=False):
    if not path.is_file():
        if optional:
            return {}
        raise FileNotFoundError(f"{path}: not found; --model must be a folder of a chat checkpoint")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not JSON ({e})") from None


# ---- data sets


def load(name, split="train", n=None, seed=0, levels=None):
    """Rows of a data set: a list of {"question": str, "answer": str, ...other columns}.

    name: arithmetic | gsm8k | math500 | aime24 | aime25 | amc23 | bigmath, a .jsonl or .parquet file, a folder with
    {split}.jsonl or .parquet, or the id of a hub data set. A single file is the same rows for each split.
    n: that many rows, drawn without replacement by `seed` and left in order. levels: keep rows whose "level" is in it
    (where the set has llama8b_solve_rate instead, level = 5 - quintile, 5 the hardest).
    Raises ValueError / FileNotFoundError naming the file and the row; ConnectionError when a download fails.
    """
    name = str(name)
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: unknown, choose train or test")
    if n is not None and n < 1:
        raise ValueError(f"--data {name}: asked for {n} rows; ask for at least 1")
    if name == "arithmetic":
        return arithmetic(split, n or {"train": 8192, "test": 512}[split], seed)
    if name == "gsm8k":
        path = _gsm8k(split)
    elif name in HUB:
        path = _find_split(_hub(HUB[name], split), split)
    elif Path(name).is_dir():
        path = _find_split(Path(name), split)
    elif Path(name).is_file():
        path = Path(name)
    elif re.fullmatch(r"[\w-]+/[\w.-]+", name) and not name.endswith((".jsonl", ".parquet")):
        path = _find_split(_hub(name, split), split)
    else:
        raise FileNotFoundError(f"--data {name}: no such file or folder, nor one of arithmetic, gsm8k, {', '.join(HUB)}")
    rows = [_row(raw, f"{path}, row {i}") for i, raw in enumerate(_read_rows(path), 1)]
    graded = [row for row in rows if row["answer"]]
    if not graded:
        raise ValueError(f"{path}: no rows with an answer")
    if len(graded) < len(rows):
        print(f"{path}: {len(rows) - len(graded)} of {len(rows)} rows have an empty answer and are left out", file=sys.stderr)
    rows = graded
    _set_levels(rows)
    if levels is not None:
        if any(row.get("level") is None for row in rows):
            raise ValueError(f"{path}: --levels needs a column level or llama8b_solve_rate in each row")
        rows = [row for row in rows if row["level"] in levels]
        if not rows:
            raise ValueError(f"{path}: no row has a level in {sorted(levels)}")
    if n is not None and n < len(rows):
        rows = [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), n))]
    return rows


def _row(raw, where):
    question = next((raw[k] for k in ("question", "problem", "prompt") if raw.get(k) is not None), None)
    answer = next((raw[k] for k in ("answer", "solution") if raw.get(k) is not None), None)
    if not isinstance(question, str) or not question.strip() or not isinstance(answer, str | int | float):
        raise ValueError(f"{where}: needs question and answer (or problem and answer, or prompt and solution) as text")
    answer = str(answer)
    if "####" in answer:  # GSM8K: the worked solution, then "#### 72"
        answer = answer.rsplit("####", 1)[1]
    elif raw.get("answer") is None and (box := last_boxed(answer)) is not None:
        answer = box
    return {**raw, "question": question, "answer": answer.strip()}


def _read_rows(path):
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            yield from pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as e:
            raise ValueError(f"{path}: not a parquet file ({e})") from None
        return
    with open(path, encoding="utf-8") as f:
        for i, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
            except ValueError as e:
                raise ValueError(f"{path}, row {i}: not JSON ({e}); --data takes one object a line") from None
            if not isinstance(raw, dict):
                raise ValueError(f"{path}, row {i}: not an object with question and answer")
            yield raw


def _find_split(folder, split):
    names = [folder / f"{split}.jsonl", folder / f"{split}.parquet", *sorted(folder.glob(f"**/{split}-*.parquet"))]
    found = [p for p in names if p.is_file()]
    if not found:
        raise FileNotFoundError(f"{folder / split}.jsonl: not found (nor a parquet); this set may have no {split} split")
    if len([p for p in found if "-of-" in p.name]) > 1:
        raise ValueError(f"{folder}: {split} is in several parquet files; join them into {split}.parquet")
    return found[0]


def _set_levels(rows):
    """Big-Math has no level, but the rate at which an 8B model solves the row: level 5 is the lowest fifth of the rates."""
    rates = [row.get("llama8b_solve_rate") for row in rows]
    known = sorted(r for r in rates if r is not None)
    if not known:
        return
    edges = [known[min(len(known) - 1, -(-len(known) * k // 5) - 1)] for k in range(1, 5)]
    for row, rate in zip(rows, rates, strict=True):
        if "level" not in row:
            row["level"] = None if rate is None else 5 - sum(rate > edge for edge in edges)


def _cache():
    return Path(os.environ.get("QERL_CACHE") or Path.home() / ".cache" / "qerl")


def _gsm8k(split):
    path = _cache() / "gsm8k" / f"{split}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        url = GSM8K_URL.format(split)
        # Under a temporary name until it is checked, so that half a download is never taken for the whole set.
        fd, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(fd, "wb") as f:
                try:
                    with urllib.request.urlopen(url, timeout=60) as r:
                        f.write(r.read())
                except (OSError, http.client.HTTPException) as e:
                    raise ConnectionError(
                        f"--data gsm8k: cannot download {url} ({e}); pass a local folder with train.jsonl and test.jsonl"
                    ) from None
            _check_gsm8k(Path(part), split, url)
            os.replace(part, path)
        finally:
            Path(part).unlink(missing_ok=True)
    _check_gsm8k(path, split, path)
    return path


def _check_gsm8k(path, split, source):
    rows = list(_read_rows(path))
    if len(rows) != GSM8K_ROWS[split]:
        raise ValueError(f"{source}: {len(rows)} rows, GSM8K's {split} split has {GSM8K_ROWS[split]}; delete it and try again")
    for i, raw in enumerate(rows, 1):
        if "####" not in str(raw.get("answer", "")):
            raise ValueError(f"{source}, row {i}: no '####' before the answer, this is not GSM8K")


def _hub(repo, split):
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(
            repo, repo_type="dataset", allow_patterns=[f"*{split}.jsonl", f"*{split}.parquet", f"*{split}-*.parquet"]))
    except Exception as e:  # the hub's errors share no base class
        raise ConnectionError(
            f"--data {repo}: not here, and the hub did not give it ({type(e).__name__}: {str(e).split(chr(10))[0]}); "
            f"pass a local folder with {split}.jsonl"
        ) from None


# ---- arithmetic: procedural problems for a model of a million parameters

NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TIMES = {2: "double", 3: "triple"}
STORY = {"+": ["finds {} more", "wins {} more", "buys {} more"], "-": ["loses {}", "sells {}", "eats {}"]}
NAMES, THINGS = ["Mia", "Tom", "Ana", "Sam"], ["apples", "eggs", "nuts", "figs"]
FORMS = ("symbols", "steps", "mixed", "story")


def arithmetic(split, n, seed=0, form=None):
    """n problems of 2 to 4 operations on numbers below 100; rows have "question", "answer", "chain", "form" too.

    A chain such as "7+5*3-8" is worked from left to right. A hash of the chain says which split it is in, whatever the
    form it is put in and whatever the seed, so that no test problem can be met in training.
    """
    rng = random.Random(f"{split} {seed}")
    rows, seen = [], set()
    while len(rows) < n:
        start = value = rng.randint(2, 20)
        ops = []
        for _ in range(rng.randint(2, 4)):
            op, k = rng.choice("++--*"), rng.randint(1, 9)
            if op == "*":
                k = rng.choice([k for k in (2, 3) if value * k < 100] or [0])
            if k == 0 or not 0 <= (after := apply(value, op, k)) < 100:
                break
            ops.append((op, k))
            value = after
        chain = f"{start}" + "".join(f"{op}{k}" for op, k in ops)
        if len(ops) < 2 or chain in seen or in_test(chain) != (split == "test"):
            continue
        seen.add(chain)
        kind = form or rng.choice(FORMS)
        rows.append({"question": _ask(rng, kind, start, ops), "answer": str(value), "chain": chain, "form": kind})
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
    told = [f"{TIMES[k]}s them" if op == "*" else rng.choice(STORY[op]).format(num(k)) for op, k in ops]
    return f"{rng.choice(NAMES)} has {num(start)} {thing}, " + ", ".join(told) + f". How many {thing}?"


# ---- rewards

LAST_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)])-)?\$?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?(?:/[0-9]+)?%?"  # the minus of "10-3" is no sign
)


def reward(text, answer, style="tags"):
    """Grade a completion: {"reward": 0.2 * format + 1.0 * correct, "correct": bool, "format": bool, "given": str or None}.

    tags: format is <think>..</think><answer>..</answer>, the answer what the last <answer> holds. boxed: format is that
    there is a \\boxed{}, the answer the last one's content, or the last number of the text where no box was closed.
    Takes any text, in time linear in its length.
    """
    if style == "tags":
        given, well_formed = _tagged(text)
    elif style == "boxed":
        given = last_boxed(text)
        well_formed = given is not None
        if given is None:
            numbers = [m.group() for m in LAST_NUMBER.finditer(text)]
            given = numbers[-1] if numbers else None
    else:
        raise ValueError(f"--prompt-style {style}: unknown, choose from {', '.join(SUFFIX)}")
    correct = given is not None and same(given, str(answer))
    return {"reward": 0.2 * well_formed + 1.0 * correct, "correct": correct, "format": well_formed, "given": given}


def scorer(style="tags", own=None):
    """(text, row) -> dict as `reward` gives it: that of `style`, or of one's own, file.py:function."""
    if own:
        return own_reward(own)
    return lambda text, row: reward(text, row["answer"], style)


def _tagged(text):
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0 or "<answer>" in text[end:]:  # a last <answer> cut off by the length limit is no answer
        return None, False
    before = text[:start].rstrip()
    well_formed = before.endswith("</think>") and 0 <= before.find("<think>") < len(before) - len("</think>")
    return text[start + len("<answer>") : end], well_formed


def main():
    parser = argparse.ArgumentParser(description="Show rows of a data set.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="arithmetic", help="name, file, folder or hub id of a data set")
    parser.add_argument("--split", default="test", choices=["train", "test"], help="which part of it")
    parser.add_argument("--n", type=int, default=3, help="how many rows to show")
    parser.add_argument("--seed", type=int, default=0, help="which rows")
    parser.add_argument("--model", help="show the prompt as this checkpoint folder's template writes it")
    parser.add_argument("--prompt-style", default="tags", choices=list(SUFFIX), help="what the user turn asks for")
    args = parser.parse_args()
    try:
        tok = Tokenizer(args.model) if args.model else None
        for row in load(args.data, args.split, args.n, args.seed):
            print(json.dumps(row, ensure_ascii=False))
            if tok:
                ids = tok.prompt_ids(row["question"], args.prompt_style)
                print(f"{tok.tokenizer.decode(ids, skip_special_tokens=False)}[{len(ids)} tokens]")
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
