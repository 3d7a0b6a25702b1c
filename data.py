"""
Data and rewards: questions in, and a number for each completion.

`load` gives rows of {"question", "answer"}: the embedded arithmetic (plumbing/arithmetic.py), or a
data set's files (plumbing/datasets.py); `questions` splits them for a run. `prompts` puts them in
the chat template (plumbing/tokenizer.py). `reward` is 0.2 for the format and 1.0 for the right
answer, numbers compared as exact fractions (plumbing/grade.py).

Left out: learned reward models, and the streaming of sets that do not fit in memory.

    rows = load("gsm8k", "train")
    reward("<think>5 + 2</think><answer>7</answer>", rows[0]["answer"])
"""
import random
import sys
from pathlib import Path

from plumbing import datasets
from plumbing.arithmetic import problems
from plumbing.grade import last_boxed, last_term, same_all
from plumbing.reward import own_reward

# ---- rows


def load(name, split="train", n=None, seed=0, levels=None):
    """Rows of a data set: a list of {"question": str, "answer": str, ...other columns}.

    name: arithmetic, or a name, file, folder or hub id as datasets.read takes it. A single file
    gives the same rows for each split. n: that many rows, drawn without replacement by `seed` and
    left in order. levels: keep rows whose "level" is in it, 5 the hardest. Raises ValueError /
    FileNotFoundError naming the file and the row; OSError when a download fails."""
    if str(name) == "arithmetic":
        if levels is not None:
            raise ValueError("--levels: the problems of --data arithmetic have none")
        return problems(split, n or {"train": 2048, "test": 512}[split], seed)
    rows = datasets.read(str(name), split, levels)
    if n is not None and n < len(rows):
        rows = [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), n))]
    return rows


def questions(args):
    """(training rows, held-out rows): the data set's own splits. From a single file, a tenth of the
    questions is held out, each once, and no row that asks one of these is trained on. --levels
    chooses from what is trained on and from a single file; a test split is asked whole."""
    if Path(args.data).is_file():
        rows = load(args.data, levels=args.levels)
        random.Random(f"{args.seed}/held out").shuffle(rows)
        once = {}  # the first row of each question
        for row in rows:
            once.setdefault(row["question"], row)
        tenth = max(1, len(once) // 10) if args.eval_n else 0
        held = [*once.values()][:tenth]
        asked = {row["question"] for row in held}
        rows = [row for row in rows if row["question"] not in asked]
        if not rows:
            raise ValueError(f"--data {args.data}: one question is too few to hold one out; "
                             "--eval-n 0 trains without")
        return rows, held[: args.eval_limit]
    rows = load(args.data, "train", seed=args.seed, levels=args.levels)
    try:
        held = load(args.data, "test", n=args.eval_limit) if args.eval_n else []
    except FileNotFoundError as e:
        raise ValueError(f"--data {args.data}: {e}; --eval-n 0 trains without held-out questions"
                         ) from None
    trained = {row["question"] for row in rows}
    if n := sum(row["question"] in trained for row in held):
        print(f"warning: --data {args.data}: {n} of {len(held)} held-out questions are trained on",
              file=sys.stderr)
    return rows, held


def prompts(tok, rows, style="tags", max_prompt=None):
    """rows -> (the rows that fit, each with its "ids", number skipped).

    ValueError if none fits max_prompt tokens."""
    made = [{**row, "ids": tok.prompt_ids(row["question"], style, max_prompt)} for row in rows]
    kept = [row for row in made if row["ids"] is not None]
    if not kept:
        raise ValueError(f"--max-prompt {max_prompt}: all {len(rows)} prompts are longer; raise it")
    return kept, len(made) - len(kept)


# ---- rewards


def reward(text, answer, style="tags"):
    """Grade a completion: {"reward": 0.2 * format + 1.0 * correct, "correct": bool, "format": bool,
    "given": str or None}.

    tags: the format is <think>..</think><answer>..</answer>; the answer is the last <answer>'s
    content, unless it is inside <think> or another is left open. boxed: the format is a closed
    \\boxed{}; the answer is the last one's content, or, if no box was closed, the last term with a
    digit, whole (3/4, not 4).
    Takes any text, in time linear in its length. Runs call `rewards`: a script replaces that."""
    return rewards([(text, answer)], style)[0]


def rewards(completions, style="tags"):
    """reward of each (text, answer), the answers graded side by side."""
    find = {"tags": tagged, "boxed": boxed}[style]
    found = [find(text) for text, _ in completions]
    verdicts = same_all([(given or "", str(answer))
                         for (given, _), (_, answer) in zip(found, completions, strict=True)])
    return [{"reward": 0.2 * well_formed + 1.0 * correct, "correct": correct, "format": well_formed,
             "given": given} for (given, well_formed), correct in zip(found, verdicts, strict=True)]


def boxed(text):
    """(the answer that a completion gives or None, whether it is in the format)."""
    given = last_boxed(text)
    return (last_term(text), False) if given is None else (given, True)


def tagged(text):
    """As `boxed`, for the style tags."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0 or "<answer>" in text[end:]:  # one cut off by the length limit is no answer
        return None, False
    before = text[:start].rstrip()
    thinks = before.rfind("<think>") > before.rfind("</think>")
    if "think>" not in before:  # the prompt may have opened <think>: is it closed only afterwards?
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
