"""
An answer as people and LaTeX write it: text -> clean text -> tokens -> value.

`clean` drops what changes nothing, `tokenize` cuts what is left, and `Value` evaluates an
expression, exactly where it is rational, with numbers for its letters. Two expressions that agree
at a few such points are the same; that takes microseconds and cannot hang, whatever is in them.

Left out: sums, integrals, factorials, binomials, |x|, inequalities.
"""

import cmath
import functools
import math
import random
import re
from fractions import Fraction

OVER, TIMES = ("/", ":", "\\div"), ("*", "\\cdot", "\\times")
DEEPEST = 12  # brackets within brackets
BITS = 5_000  # of the largest number worked out

FUNCTIONS = {"\\sin": cmath.sin, "\\cos": cmath.cos, "\\tan": cmath.tan, "\\ln": cmath.log,
             "\\log": cmath.log, "\\exp": cmath.exp, "\\cot": lambda z: 1 / cmath.tan(z),
             "\\sec": lambda z: 1 / cmath.cos(z), "\\csc": lambda z: 1 / cmath.sin(z)}
LETTERS = set("\\alpha \\beta \\gamma \\delta \\epsilon \\theta \\lambda \\mu \\rho \\sigma \\tau "
              "\\phi \\varphi \\omega \\infty".split())
BARE = "|".join(name[1:] for name in ("\\pi", "\\sqrt", *FUNCTIONS))

UNICODE = str.maketrans({
    "\u2212": "-", "\u00a0": " ", "\u202f": "\\,", "\u00d7": "\\times ", "\u00b7": "\\cdot ",
    "\u00f7": "/", "\u03c0": "\\pi ", "\u221a": "\\sqrt ", "\u221e": "\\infty ",
    "\u222a": "\\cup ", "\u2248": "\\approx ", "\u00b1": "\\pm ", "\u2264": "\\le ",
    "\u2265": "\\ge ", "\u00b0": "\\circ ", "\u00b2": "^2 ", "\u00b3": "^3 ", '"': " "})
LOOKS = ("left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad|mathbf|boldsymbol|bm|bf"
         "|mathit|mathsf|vec")
# (pattern, what takes its place), in this order; beside each what `clean` makes of an example
CLEANED = [(re.compile(pattern), by) for pattern, by in [
    (r"^(\*{1,3})([^*]+)\1$", r"\2"),  # **7** -> 7
    (r"(?<!\\)\\+$", ""),  # 5\\ -> 5, and 5\ of a blank that was stripped
    # So the answer is: 7 -> 7
    (r"(?i)^(?:(?:so|thus|hence|the|final|correct),? )*answer ?(?:is\b|:) ?:?", " "),
    (r"(?<=[0-9])(?:\{ ?, ?\}|,\\!|\\,) ?(?=[0-9]{3}(?![0-9]))", ""),  # 1{,}000 -> 1000
    # 5\text{ cm} -> 5 "cm", \text{(A)} -> (A)
    (r"\\(?:text|mbox|textnormal|textrm|mathrm|textbf|textit|operatorname) ?\{([^{}]*)\}",
     lambda m: " " + re.sub(r"([A-Za-z]{2,})", r'"\1"', m[1]) + " "),
    # 30^{\circ} -> 30 \circ
    (r"\^ ?(?:\\circ(?![A-Za-z])|\{ ?\\circ ?\})|\\degree(?![A-Za-z])", r" \\circ "),
    (r"\\circ *[CF](?![A-Za-z])", r"\\circ "),  # 20^\circ C -> 20 \circ
    (r"\\phantom ?(?:\{[^{}]*\}|.)", " "),  # \phantom{0}7 -> 7
    (r"\\langle(?![A-Za-z])", "("), (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\(begin|end) ?\{[pb]?matrix\}", r"\\\1 "),  # \begin{pmatrix}1 -> \begin 1
    # \left(\$5\right) -> ( 5 ), 1\\[2pt]2 -> 1\\ 2
    # "\\" comes first, for it ends a row of a matrix: the "\ " in "\\ " is no space
    (rf"(\\\\)(?:\[[0-9.]+[a-z]{{2}}\])?|\\(?:{LOOKS})(?![A-Za-z])\.?|\\[!,;: ()\[\]$]"
     r"|[$~\u20ac\u00a3]", lambda m: (m[1] or "") + " "),
    # \dfrac 12 -> \frac{1}{2}, then \frac1x -> \frac{1}x
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac "), (r"\\frac +([0-9])", r"\\frac\1"),
    (r"\\frac([0-9]) ?([0-9])", r"\\frac{\1}{\2}"), (r"\\frac([0-9])", r"\\frac{\1}"),
    # 50\% -> 50%, 2**3 -> 2^3, 2pi -> 2\pi
    (r"\\%", "%"), (r"\*\*", "^"), (rf"(?<![\\A-Za-z\"])({BARE})(?![A-Za-z\"])", r"\\\1 "),
    # a word of its own, no product of letters: no solution -> "no" "solution"
    (r"(?<!\S)([A-Za-z]{3,}|[Nn][Oo])(?=[\s.,)]|$)", r'"\1"'),
    (r"(?<=[0-9}]) +([mgshlLcf])(?=[\s/^.,]|$)", r' "\1"')]]  # a length: 5 m -> 5 "m"; algebra: 5m

TEN = r"10\s*\^\s*(?:\{\s*-?[0-9]{1,3}\s*\}|[0-9]{1,3}(?![0-9]))"
TOKEN = re.compile(
    rf"{TEN}|(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?"
    rf"(?:[eE][-+]?[0-9]{{1,3}}(?![0-9A-Za-z])|\s*(?:\\times|\\cdot|\*)\s*{TEN})?"
    r"|\.[0-9]+|\\\\|\\[A-Za-z]+|\\.|\"[A-Za-z]+\"|[A-Za-z]+|\S")
SCIENTIFIC = re.compile(r"([0-9.,]*?)\s*(?:\\times|\\cdot|\*)?\s*10\s*\^\W*?(-?[0-9]+)\W*")
MIXED = re.compile(r"(?<![_^] )\b([0-9]+) (?:\\frac \{ ([0-9]+) \} \{ ([0-9]+) \}"
                   r"|([0-9]+) / ([0-9]+))(?! [/^])(?!\S)")  # 3 1/2
OPEN, CLOSE = ("(", "[", "{", "\\{", "\\begin"), (")", "]", "}", "\\}", "\\end")


def clean(text):
    """Drops what changes no answer's meaning: maths delimiters, spacing and fonts, currency.
    A space stays where something stood, so no two numbers become one. Words get quotation marks;
    letters left bare are algebra."""
    text = " ".join(text.translate(UNICODE).split())
    for pattern, by in CLEANED:
        text = pattern.sub(by, text)
    return " ".join(text.split()).lstrip("= ").rstrip(".,; ")


def tokenize(text):
    """Clean text -> tokens, a number as Fraction reads it. ValueError or IndexError where brackets
    do not match or stand too deep."""
    tokens, inside = [], []
    for t in TOKEN.findall(text):
        if t in OPEN:
            inside.append(t)
        elif t in CLOSE:
            inside.pop()
        if len(inside) > DEEPEST:
            raise ValueError("too deep")
        if "," in t and inside and inside[-1] != "{":  # (1,100) is a pair, \frac{1,100}{3} is not
            tokens += re.findall("[^,]+|,", t)
        elif m := SCIENTIFIC.fullmatch(t):
            tokens.append(f"{m[1].replace(',', '') or 1}e{m[2]}")
        else:
            tokens.append(t if t == "," else t.replace(",", ""))
        if t == "}" and tokens[-4:-2] in (["^", "{"], ["_", "{"]):  # x^{2} is x^2
            tokens[-3:] = tokens[-2:-1]
    if inside or not tokens:
        raise ValueError("not closed, or empty")
    return MIXED.sub(_mixed, " ".join(tokens)).split(" ")


def _mixed(m):
    whole, over, under = (int(d) for d in m.groups() if d)
    return f"{whole * under + over}/{under}" if over < under else m[0]


def split(tokens, separators):
    """The tokens between separators that stand in no bracket, empty parts left out."""
    parts, depth = [[]], 0
    for t in tokens:
        depth += (t in OPEN) - (t in CLOSE)
        if t in separators and not depth:
            parts.append([])
        else:
            parts[-1].append(t)
    return [part for part in parts if part]


class Value:
    """The value of an expression; a letter stands for a number drawn for it at this point. `plain`:
    a number as people write one, no work left to do.

    ValueError where it is no expression, ArithmeticError where it has no value or a huge one."""

    def __init__(self, tokens, point=0):
        self.tokens, self.at, self.point, self.plain = [*tokens, ""], 0, point, True
        self.value = self.sum("")

    def next(self, *wanted):
        """The next token and past it, if it is one of those wanted; else None."""
        t = self.tokens[self.at]
        self.at += t in wanted
        return t if t in wanted else None

    def signed(self, factor):
        return -factor() if self.next("+", "-") == "-" else factor()

    def sum(self, end):
        total = self.signed(self.product)
        while sign := self.next("+", "-"):
            self.plain, right = False, self.product()
            total = _bounded(total + right if sign == "+" else total - right)
        if self.next(end) is None:
            raise ValueError("not an expression")
        return total

    def product(self, *stops):
        """Factors with or without a sign between them."""
        value = self.power()
        while (t := self.tokens[self.at]) not in ("", "+", "-", ")", "]", "}", *stops):
            if t in OVER + TIMES and self.tokens[self.at + 1] in stops:  # ln 3 / ln 2
                break
            if self.next(*OVER):
                self.plain &= t != ":"
                value = _bounded(value / self.signed(self.power))
                continue
            if not self.next(*TIMES) and t[0].isdigit() and (
                    self.tokens[self.at - 1][-1].isdigit()):
                raise ValueError("two numbers side by side")
            self.plain, value = False, _bounded(value * self.power())
        return value

    def power(self):
        front, t = 1, self.tokens[self.at]
        if re.fullmatch("[a-z]{2,3}", t):  # xy^2 is x y^2
            front, self.tokens[self.at] = math.prod(_letter(c, self.point) for c in t[:-1]), t[-1]
        base = self.atom()
        if self.next("^"):
            self.plain, base = False, _power(base, self.signed(self.atom))
        if self.next("\\circ"):
            self.plain, base = False, base * complex(math.pi / 180)
        return front * base

    def atom(self):
        t = self.tokens[self.at]
        self.at += 1
        if t in ("(", "[", "{"):
            return self.sum({"(": ")", "[": "]", "{": "}"}[t])
        if re.fullmatch(r"[0-9.].*", t):
            return Fraction(t)
        if t == "\\frac":
            return self.signed(self.atom) / self.signed(self.atom)
        self.plain = False
        if t == "\\sqrt":
            order = self.sum("]") if self.next("[") else 2
            return _power(self.signed(self.atom), Fraction(1) / order)
        if t == "\\pi":
            return complex(math.pi)
        if t in FUNCTIONS:
            base = complex(self.atom()) if self.next("_") else cmath.e
            exponent = self.signed(self.atom) if self.next("^") else Fraction(1)
            closed = self.tokens[self.at] in ("(", "{")  # ln(2)/3 is not ln(2/3)
            argument = complex(self.atom() if closed else self.product(*FUNCTIONS))  # sin 5x cos x
            return _power(FUNCTIONS[t](argument) / cmath.log(base), exponent)
        if t not in LETTERS and not re.fullmatch(r'[A-Za-z]|[a-z]{2,3}|"[A-Za-z]"', t):
            raise ValueError("not an expression")
        names = [t] if t in LETTERS else list(t.strip('"'))
        if self.next("_"):
            names[-1] += str(self.atom())
        return math.prod(_letter(name, self.point) for name in names)


@functools.lru_cache(maxsize=1 << 12)
def _letter(name, point):
    drawn = Fraction(random.Random(f"{name} {point}").randint(17, 199), 8)
    return {"i": 1j, "e": complex(cmath.e)}.get(name, drawn if point < 2 else -drawn)


def _power(base, exponent):
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if (_bits(base) - 1) * abs(exponent) > BITS:
            raise OverflowError("too large")
        return base ** int(exponent)
    return complex(base) ** complex(exponent)


def _bounded(x):
    if isinstance(x, Fraction) and _bits(x) > BITS or abs(x) == math.inf:
        raise OverflowError("too large")
    return x


def _bits(x):
    return max(abs(x.numerator), x.denominator).bit_length()
