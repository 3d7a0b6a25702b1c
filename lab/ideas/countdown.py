"""A task of your own with a reward of your own: countdown, where numbers must make a target.

`make` writes a data file; the reward reads the columns it needs from the row.

    python lab/ideas/countdown.py countdown.jsonl
    python train.py --data countdown.jsonl --reward lab/ideas/countdown.py:score
"""
import ast
import json
import operator
import random
import re
import sys
from pathlib import Path

OPS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def make(path, rows=500, seed=0):
    rng, lines = random.Random(seed), []
    for _ in range(rows):
        a, b, c = numbers = [rng.randint(1, 30) for _ in range(3)]
        target = rng.choice([a + b - c, a + b + c, a * b - c, a * b + c])
        question = f"Use {a}, {b} and {c} once each, with + - *, to make {target}."
        lines.append(json.dumps({"question": question, "answer": str(target), "numbers": numbers}))
    Path(path).write_text("\n".join(lines) + "\n")


def value(node):
    """The value of a parsed expression; KeyError for anything but + - * on whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if not isinstance(node, ast.BinOp):
        raise KeyError(type(node))
    return OPS[type(node.op)](value(node.left), value(node.right))


def score(text, row):
    """1 for an expression of the row's numbers, each used once, that makes the answer; 0.1 for
    another expression."""
    found = re.search(r"<answer>([-+*() 0-9]{1,80})</answer>", text)
    try:
        result = value(ast.parse(found[1].strip(), mode="eval").body) if found else None
    except (SyntaxError, KeyError, RecursionError):
        result = None
    if result is None:
        return {"reward": 0.0, "correct": False, "format": False}
    used = sorted(map(int, re.findall("[0-9]+", found[1])))
    right = used == sorted(row["numbers"]) and result == int(row["answer"])
    return {"reward": 1.0 if right else 0.1, "correct": right, "format": True, "given": found[1]}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"countdown.py: error: name the file to write\n\n{__doc__}")
    make(sys.argv[1])
