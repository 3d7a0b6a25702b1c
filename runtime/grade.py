"""
Is this answer the gold one? Numbers as people and LaTeX write them are compared as exact fractions;
what is no number is compared as text, then by math-verify in a process of its own that is killed
when it takes too long. So no completion can crash or hang a run, from whatever thread it is graded.

Left out: units are dropped, not converted ("3 cents" is "3"), and no rounding is forgiven (0.33 is
not 1/3).

    python -m runtime.grade '1,000 dollars' 1000
    python -m runtime.grade '\\frac{1}{2}x' '0.5x'
"""

import atexit
import functools
import json
import os
import re
import select
import subprocess
import sys
import threading
from fractions import Fraction

LONGEST = 400  # characters of an answer that are still read as mathematics
UNITS = set("cm mm m km kg g mg l ml lb lbs oz ft in mi mph h hr hrs min s sec am pm c f usd"
            .split())
NOT_UNITS = set("pi sqrt sin cos tan log ln exp mod and or dozen percent hundred half".split())
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?:(?P<whole>[0-9]{1,60})\s+)?(?P<over>[0-9]{1,60})\s*/\s*(?P<under>[0-9]{1,60})"
    r"|(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3}){1,60}|[0-9]{1,200})(?:\.[0-9]{0,200})?|\.[0-9]{1,200})"
    r"(?:[eE](?P<exp>[-+]?[0-9]{1,3}))?)"
    r"(?P<space>\s*)(?P<percent>%|percent\b)?(?P<unit>[A-Za-z /.'-]{0,60})"
)
BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\[\\{}]|[{}]")


def last_boxed(text):
    """Content of the \\boxed{} that opens last among those that close, or None."""
    open_braces, best = [], (-1, None)
    for m in BRACES.finditer(text):
        if m[1] or m[0] == "{":
            open_braces.append((m.start() if m[1] else -1, m.end()))
        elif m[0] == "}" and open_braces:
            at, begin = open_braces.pop()
            if at > best[0]:
                best = (at, (begin, m.start()))
    return None if best[1] is None else text[slice(*best[1])]


def same(given, gold):
    """Is the given answer the gold one? Where gold is a number the answer must be one too: "3+4" is
    not an answer of 7."""
    if len(given) > 4 * LONGEST or len(given := _plain(given)) > LONGEST:
        return False
    gold = _plain(gold)
    a, b = number(given), number(gold)
    if b is not None:
        return a is not None and _equal(a, b)
    if given == gold or (gold.isalpha() and len(gold) > 1 and given.casefold() == gold.casefold()):
        return True
    if not given:
        return False
    # a plain "pi/2" or "sqrt(3)" is as good as the LaTeX for it, which alone math-verify reads
    given = re.sub(r"(?<![\\A-Za-z])(pi|sqrt)(?![A-Za-z])", r"\\\1", given)
    return _latex_same(re.sub(r"\\sqrt\(([^()]*)\)", r"\\sqrt{\1}", given), gold)


def _equal(a, b):
    (x, x_percent), (y, y_percent) = a, b
    if x == y or x_percent == y_percent:
        return x == y
    # 50% is 50 to one data set and 1/2 to the next
    return x / 100 == y if x_percent else x == y / 100


def number(text):
    """A number as written by people or in LaTeX -> (Fraction, whether it is a percentage), or None.

    "1,000", "$1000.00", "1000 dollars", "1/2", "3\\frac{1}{2}", "1e3", "90^\\circ", "x = 5". ASCII
    digits only.
    """
    s = _plain(text) if len(text) <= 4 * LONGEST else ""
    s = re.sub(r"^[A-Za-z]{1,12}\s*=\s*", "", s)
    s = re.sub(r"\\frac\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}", r" \1/\2", s)
    s = re.sub(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r" \1/\2", s)
    m = NUMBER.fullmatch(s.strip())
    if not m:
        return None
    if m["over"]:
        if not int(m["under"]):
            return None
        value = int(m["whole"] or 0) + Fraction(int(m["over"]), int(m["under"]))
    else:
        digits = m["digits"].replace(",", "").rstrip(".")
        value = Fraction(digits) * Fraction(10) ** int(m["exp"] or 0)
    words = [w for w in re.split(r"[ /.'-]+", m["unit"].lower()) if w]
    if words and words[0] in SCALES:
        value *= SCALES[words.pop(0)]
    if any(w in NOT_UNITS for w in words):
        return None
    attached = not m["space"] and not m["percent"] and m["unit"][:1].isalpha()
    if words and not (words[0] in UNITS or not attached and any(len(w) > 2 for w in words)):
        return None  # "2x" and "5 i" are algebra, "5cm" and "5 a day" are not
    return (-value if m["sign"] == "-" else value), bool(m["percent"])


def _plain(s):
    """Drops what does not change an answer's meaning: maths delimiters, spacing commands, currency,
    \\text, degrees."""
    s = s.replace("\u2212", "-").replace("\u00a0", " ").replace("\u202f", " ")
    s = s.replace("\\$", "").replace("\\%", "%")
    if (box := last_boxed(s)) is not None:
        s = box
    s = re.sub(r"\\!\s*", "", s)
    s = re.sub(r"\\[()\[\]!,;: ]|\\(left|right|degree)(?![a-z])|\^\s*(\\circ|\{\\circ\})"
               r"|[$\u20ac\u00a3\u00b0*]", "", s)
    s = re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", r" \1", s).replace("{,}", ",")
    s = re.sub(r"\\[dt]frac", r"\\frac", s)
    return re.sub(r"\s+", " ", s).strip().rstrip(".").strip()


class _Grader:
    """math-verify in a child process. Its own time limits are signals, which only work in the main
    thread and cannot stop a bignum power; a child can be killed from any thread, and one that eats
    memory takes nothing down with it."""

    def __init__(self, seconds=3.0):
        self.seconds, self.lock, self.child = seconds, threading.Lock(), None

    def ask(self, given, gold):
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self._start()
            try:
                self.child.stdin.write((json.dumps([given, gold]) + "\n").encode())
                self.child.stdin.flush()
                return self._read(self.seconds) == b"1"
            except BrokenPipeError:
                self.stop()
                return False

    def _start(self):
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--grader"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True)  # ctrl-C is for the run, which saves first
        if self._read(120.0) != b"r":
            raise ValueError("math-verify does not start; pip install -r requirements.txt")

    def _read(self, seconds):
        ready = select.select([self.child.stdout], [], [], seconds)[0]
        got = os.read(self.child.stdout.fileno(), 1) if ready else b""
        if not got:
            self.stop()
        return got

    def stop(self):
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child.stdin.close()
            self.child.stdout.close()
            self.child = None


_grader = _Grader()
atexit.register(_grader.stop)


@functools.lru_cache(maxsize=4096)
def _latex_same(given, gold):
    return _grader.ask(given, gold)


def _grader_main():
    import logging
    import resource

    import math_verify

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing a library prints may land among the verdicts
    out.write(b"r")
    for line in sys.stdin:
        try:
            given, gold = (math_verify.parse(f"${s}$", parsing_timeout=None)
                           for s in json.loads(line))
            out.write(b"1" if math_verify.verify(gold, given, timeout_seconds=None) else b"0")
        except Exception:  # sympy raises anything on what it cannot read; that is a wrong answer
            out.write(b"0")


if __name__ == "__main__":
    if sys.argv[1:] == ["--grader"]:
        _grader_main()
    elif len(sys.argv) == 3:
        print("same" if same(*sys.argv[1:]) else "different")
    else:
        sys.exit("usage: python -m runtime.grade ANSWER GOLD")
