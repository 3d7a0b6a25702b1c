"""
Does this answer match the gold one? An answer is read as what it is: a number, an expression,
words, a time of day, a list, a tuple or interval, a union, a matrix, an equation (see
plumbing/latex.py). Numbers are compared as exact fractions, expressions by their values, all else
part by part. What cannot be read this way goes to math-verify (see plumbing/judge.py), except
towers of powers and the like. No completion can crash or hang a run.

Left out: units are dropped, not converted ("3 cents" is "3"), no rounding is forgiven (0.33 is not
1/3), and an unevaluated expression is no answer where a number is asked for ("3+4" is not 7).

    python -m plumbing.grade '1,000 dollars' 1000
    python -m plumbing.grade '\\frac{1}{2}x' '0.5x'
"""

import cmath
import functools
import math
import re
import sys
from fractions import Fraction
from itertools import takewhile

from plumbing.judge import judge
from plumbing.latex import CLOSE, FUNCTIONS, LETTERS, OPEN, Value, clean, split, tokenize

LONGEST = 400  # characters of an answer that are still read as mathematics

SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
          "trillion": 10**12}
SCALES |= {f"{name}s": scale for name, scale in SCALES.items()}
UNITS = "cm mm km kg mg ml lb lbs oz ft in mi mph hr hrs am pm sq of day".replace(" ", "|")
NOT_UNITS = set(  # what makes "5 ..." another number, or none
    "is are was were be not no isn wrong false incorrect but if then than or and to plus minus "
    "times over divided multiplied squared cubed doubled tripled halved factorial choose power "
    "root mod modulo base half halves third thirds quarter quarters fourth fourths fifth fifths "
    "sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths "
    "thousandth thousandths zero one two three four five six seven eight nine ten eleven twelve "
    "twenty thirty forty fifty sixty seventy eighty ninety negative point unknown".split())
BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\[\\{}]|[{}]")
UNIT = rf'(?:"[A-Za-z]+"|[A-Za-z]{{4,}}|(?:{UNITS})(?![A-Za-z]))(?: \^ [23])?'
# the unit after a number, of tokens: 5 cm ^ 2, 9.8 "m" / s ^ 2, 5 "apples" a "day"; not in 3 x
TAIL = re.compile(rf" (?:(?:/|an?) )?{UNIT}(?: (?:[-/.] )?(?:{UNIT}|[amghs]\b(?: \^ [23])?)| \.)*$")
CLOCK = re.compile(r'([0-9]{1,2})(?: : ([0-9]{2}))?(?: : ([0-9]{2}))?'
                   r'(?: "?([ap])(?: \. )?m"?)?', re.I)
# what an answer is given for, of tokens: x, x _ 1, f ' ( 2 ), \angle "ABC", "total" "cost", x + y,
# ( x , y ), but no 2 x, x y or \sin x
NAME = re.compile(r"(?:(?:\"[A-Za-z]+\"|m(?= \\angle)|\\angle) )*"
                  r"(?:[A-Za-z](?: \+ [A-Za-z])*|\\[A-Za-z]+|\"[A-Za-z]+\"|[A-Z]{2,4}"
                  r"|[A-Za-z]{4,}|(?=\())(?: _ \w+)?(?: ')?(?: ?\( [^()]* \))?")
SEPARATORS = (",", ";", "and", "or", '"and"', '"or"')

JUDGED = {*LETTERS, *FUNCTIONS, *(  # the commands that math-verify is asked about
    "\\frac \\sqrt \\pi \\cdot \\times \\div \\le \\leq \\ge \\geq \\lt \\gt \\ne \\neq \\in \\cup "
    "\\cap \\setminus \\mathbb \\emptyset \\pm \\mp \\circ \\{ \\} \\\\ \\begin \\end").split()}
# Words, factorials, powers in powers or of five digits, powers of sums but small ones, of tokens:
# x !, 2 ^ 3 ^ 4, 2 ^ { x ^ 2 }, 2 ^ 10000, ( x + 1 ) ^ 20; not ( x + 1 ) ^ 9
HARD = re.compile(r'["!:;\'_#@?`]|(?<![\\A-Za-z])[A-Za-z]{4,}|\^ (?:\{[^}]*[{^]|[-0-9.]*e|'
                  r'[-{ ]*[0-9]{5}|\S+ \^)|[)}] \^ (?:\{|[2-9][0-9]|[0-9]{3})')


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


# ---- what an answer is: (kind, content)


@functools.lru_cache(maxsize=1 << 14)
def read(text):
    """Clean text -> (kind, content): number (Fraction, percent?), expression (tokens), clock, base
    (digits, base), words, equation (sides), list, () [] (] [) union matrix row (parts), unread."""
    try:
        return _part(tokenize(text))
    except (ValueError, IndexError):
        return "unread", text


def _part(tokens):
    try:
        return _read(tokens)
    except (ValueError, IndexError):
        return "unread", " ".join(tokens)


def _read(tokens):
    text = " ".join(tokens)
    if (m := CLOCK.fullmatch(text)) and (m[4] or m[3] or m[2] == "00"):
        hour = int(m[1]) % 12 + 12 * (m[4] in "pP") if m[4] else int(m[1])
        return "clock", (hour, int(m[2] or 0), int(m[3] or 0))
    if m := re.fullmatch(r"([0-9A-F ]+) _ ([0-9]+)", text):
        return "base", m.groups()
    if tokens.count(":") > 1:  # 1:2:3 is not 1/6
        return "unread", text
    items = [item for part in split(tokens, SEPARATORS) for item in _both_signs(part)]
    if len(items) != 1:
        return "list", tuple(map(_part, items))
    exact, *rounded = split(items[0], ("\\approx",))
    tokens = rounded[0] if rounded and _is_name(exact) else exact
    if len(sides := split(tokens, ("=", "\\in"))) > 1:
        return "equation", tuple(map(tuple, sides))
    if len(parts := split(tokens, ("\\cup",))) > 1:
        return "union", tuple(map(_part, parts))
    left, inner, right = tokens[0], tokens[1:-1], tokens[-1]
    if left not in OPEN or right not in CLOSE or len(split(tokens, CLOSE)) > 1:
        return _read_scalar(tokens)
    if left == "\\begin":
        return "matrix", tuple(("row", tuple(map(_part, split(row, ("&",)))))
                               for row in split(inner, ("\\\\",)))
    kind, parts = _part(inner) if inner else ("list", ())
    pair = kind == "list" and left in ("(", "[")  # otherwise a set, or brackets round one answer
    return left + right if pair else kind, parts


def _both_signs(tokens):
    """1 \\pm 2 is two answers."""
    if "," in tokens or not {"\\pm", "\\mp"} & set(tokens):
        return [tokens]
    return [[{"\\pm": a, "\\mp": b}.get(t, t) for t in tokens] for a, b in ("+-", "-+")]


def _is_name(tokens):
    """x, x_1, f(3), AB, \\angle ABC, (x,y)."""
    return NAME.fullmatch(" ".join(t for t in tokens if t not in ("{", "}")))


def _read_scalar(tokens):
    """A number or an expression, with its unit; or words."""
    text, scale, percent = " ".join(tokens), 1, False
    tail = TAIL.search(text)
    if tail and re.search(r"[0-9]|\\pi", text[: tail.start()]):
        words = re.findall("[a-z]+", tail[0].lower())
        if not NOT_UNITS & set(words):
            tokens, percent = text[: tail.start()].split(" "), words[0] == "percent"
            scale = math.prod(map(SCALES.get, takewhile(SCALES.__contains__, words)))
    if tokens[-1] in ("%", "\\circ") and not FUNCTIONS.keys() & set(tokens):
        percent, tokens = percent or tokens[-1] == "%", tokens[:-1]
    try:
        v = Value(tokens)
    except ArithmeticError:  # 1/0, or a tower of powers
        return "words", text
    except ValueError:
        word = any(t[0] == '"' or t.isalpha() and (len(t) > 3 or t[1:].isupper()) for t in tokens)
        if not word:
            raise
        return "words", text.replace('"', "").casefold()
    if v.plain:
        return "number", (v.value * scale, percent)
    return "expression", (str(scale), "(", *tokens, ")")


# ---- are two answers the same


def equal(given, gold):
    """True, False, or None: this file cannot tell."""
    (kind, a), (gold_kind, b) = given, gold
    if given == gold:
        return True
    if kind == gold_kind == "equation":
        if _same_line(a, b):
            return True
        names = [side[0].lower() for side in (a[0], b[0]) if len(side) == 1 and side[0].isalpha()]
        if len({*names}) == 2:  # y = 2 is not x = 2
            return False
    if kind == "equation":
        return equal(_says(a), gold)
    if gold_kind == "equation":
        return equal(given, _says(b))
    if gold_kind == "number" and kind == "clock":  # 3 pm, where 3 is asked for
        return a[1:] == (0, 0) and b[0] == (a[0] - 1) % 12 + 1
    if gold_kind == "number":
        return kind == "number" and _same_number(a, b)
    if gold_kind == "base":  # which base is for the question to say
        return kind == "number" and b[0] == str(a[0])
    if gold_kind in ("words", "clock") or kind in ("words", "clock", "base"):
        return False
    if kind == "unread":
        return None
    if gold_kind == "unread":
        return False
    if gold_kind == "expression":
        return kind in ("number", "expression") and _same_value(given, gold)
    if kind in ("number", "expression") or len(a) != len(b):
        return False
    ranking = any(part[0] == "words" for part in b)
    listed = gold_kind == "list" and kind in ("list", "()", "[]") and not ranking
    if listed or kind == gold_kind == "union":
        return _same_set(a, b)
    if kind != gold_kind and (kind, gold_kind) != ("list", "()"):
        return False
    parts = {equal(x, y) for x, y in zip(a, b, strict=True)}
    return False if False in parts else None if None in parts else True


def _says(sides):
    """What an equation says: the last side of those that are equal, a name in front left out."""
    sides = sides[1:] if _is_name(sides[0]) else sides
    *others, last = (_part(list(side)) for side in sides)
    nested = any(kind == "equation" for kind, _ in (*others, last))
    holds = not nested and all(equal(last, other) for other in others)
    return last if holds else ("words", sides)


def _same_line(a, b):
    """x + y = 1 is 2x + 2y = 2: left minus right is the same, but for a factor."""
    try:
        ratios = [[_value(("expression", left), point) - _value(("expression", right), point)
                   for left, right in (a, b)] for point in range(3)]
        first, *others = (x / y for x, y in ratios)
    except (ValueError, ArithmeticError):
        return False
    # 0 = 0 is true, and no line
    return first != 0 and all(cmath.isclose(first, other, rel_tol=1e-11) for other in others)


def _same_number(a, b):
    (x, x_percent), (y, y_percent) = a, b
    if x == y or x_percent == y_percent:
        return x == y
    # 50% is 50 to one data set and 1/2 to the next
    return x / 100 == y if x_percent else x == y / 100


def _same_value(given, gold):
    """At two points where the letters are positive, and at one where they are negative."""
    try:
        for point in range(3):
            x, y = _value(given, point), _value(gold, point)
            exact = isinstance(x, Fraction) and isinstance(y, Fraction)
            if not (x == y if exact else cmath.isclose(x, y, rel_tol=1e-11)):
                return False if point < 2 else None
    except (ValueError, ArithmeticError):  # beyond floating point
        return False
    return True


@functools.lru_cache(maxsize=1 << 14)
def _value(answer, point):
    kind, content = answer
    return content[0] if kind == "number" else Value(content, point).value


def _same_set(a, b):
    left = list(a)
    for gold in b:
        verdicts = [equal(given, gold) for given in left]
        if True not in verdicts:
            return None if None in verdicts else False
        del left[verdicts.index(True)]
    return True


def same(given, gold):
    """Is the given answer the gold one? Where gold is a number the answer must be one too."""
    return same_all([(given, gold)])[0]


def same_all(pairs):
    """`same` of each (given, gold), those for math-verify side by side: a step's at once."""
    verdicts = [_verdict(*pair) for pair in pairs]
    asked = [v for v in verdicts if isinstance(v, tuple)]
    told = dict(zip(asked, judge.ask(asked), strict=True))
    return [told.get(v, v) for v in verdicts]


def _verdict(given, gold):
    """True, False, or what to ask math-verify."""
    if len(given) > 4 * LONGEST:
        return False
    given, gold = (clean(text if (box := last_boxed(text)) is None else box)
                   for text in (given, gold))
    if not given or max(len(given), len(gold)) > LONGEST:
        return given == gold != ""
    if read(gold)[0] == "list" and read(given)[0] == "number":  # "81,256" is two numbers here
        given = re.sub(",(?=[1-9])", ", ", given)
    verdict = equal(read(given), read(gold))
    if verdict is None:
        verdict = _is_cheap(given) and _is_cheap(gold) and (given, gold)
    return verdict


def _is_cheap(text):
    """Mathematics, and nothing that sympy could work on for long, as far as one can see."""
    try:
        tokens = tokenize(text)
    except (ValueError, IndexError):
        return False
    known = JUDGED.issuperset(t for t in tokens if t[0] == "\\")
    return known and not HARD.search(" ".join(tokens))


def main(argv):
    if len(argv) != 2:
        sys.exit("usage: python -m plumbing.grade ANSWER GOLD")
    print("same" if same(*argv) else "different")


if __name__ == "__main__":
    main(sys.argv[1:])
