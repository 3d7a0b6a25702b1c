"""
Arithmetic: procedural problems for a model of a million parameters.
"""
import hashlib
import random
import re

MOST = 100_000  # problems drawn at a time: of a billion, as fast as it goes, it would take hours
NUMBER_WORDS = "zero one two three four five six seven eight nine".split()
TIMES = {2: "double", 3: "triple"}
STORY = {"+": ["finds {} more", "wins {} more", "buys {} more"],
         "-": ["loses {}", "sells {}", "eats {}"]}
NAMES, THINGS = ["Mia", "Tom", "Ana", "Sam"], ["apples", "eggs", "nuts", "figs"]
FORMS = ("symbols", "steps", "mixed", "story")


def problems(split, n, seed=0):
    """n problems of 3 to 5 operations on numbers below 200; besides "question" and "answer",
    rows have "chain" and "form".

    A chain such as "7+15*3-8" is worked from left to right. A hash of the chain decides its split,
    whatever the form of the question and whatever the seed, so that no test problem can appear in
    training. ValueError for more than MOST."""
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
        tested = hashlib.sha256(chain.encode()).digest()[0] < 26  # a tenth of all chains
        if len(ops) < 3 or chain in seen or tested != (split == "test"):
            continue
        seen.add(chain)
        kind = rng.choice(FORMS)
        rows.append({"question": ask(rng, kind, start, ops), "answer": str(value), "chain": chain,
                     "form": kind})
    return rows


def apply(value, op, k):
    return value + k if op == "+" else value - k if op == "-" else value * k


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


def ask(rng, form, start, ops):
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
    events = ", ".join(f"{TIMES[k]}s them" if op == "*" else rng.choice(STORY[op]).format(num(k))
                     for op, k in ops)
    return f"{rng.choice(NAMES)} has {num(start)} {thing}, {events}. How many {thing}?"
