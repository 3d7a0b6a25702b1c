"""
Does this answer match the gold one? Numbers are read here, as people write them, and compared as
exact fractions; words, times (am, pm or :00), lists and tuples are compared here too, part by part.
All else is asked of math-verify (see plumbing/judge.py). No completion can crash or hang a run.

Left out: units are dropped, not converted ("3 cents" is "3"), no rounding is forgiven (0.33 is not
1/3), and an unevaluated expression is no answer where a number is asked for ("3+4" is not 7).

    python -c 'from plumbing.grade import same_all; print(same_all([("1,000 dollars", "1000")]))'
"""
import functools
import re
import unicodedata
from collections import namedtuple
from fractions import Fraction
from itertools import takewhile
from math import prod

from plumbing import judge

LONGEST = 400  # characters of an answer that are still read as mathematics
DEEPEST = 12  # brackets within brackets
BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\[\\{}]|[{}]")
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
          "trillion": 10**12}
# what stands together: -5, but not of 10-5; 1,000; 2 1/3; 2x + 1; 3 * 4; \frac{1}{2}; 5:30; 3 dozen
TERM = re.compile(
    r"(?:(?<![0-9A-Za-z.)}])[-−])?(?:[1-9][0-9]{0,2}(?:[ ,'’][0-9]{3})+(?![0-9])|[0-9]+ (?=[0-9]+/)"
    r"|(?:(?<=[0-9)}(])|(?<![A-Za-z]{2})(?<=[A-Za-z])) ?[-+−] ?(?=[0-9A-Za-z\\(.])"
    r"| ?(?:[*/^×·]|\\times|\\cdot) ?|\\[A-Za-z]+|\{(?:[^{}]|\{[^{}]*\})*\}|(?<=[0-9])[:,](?=[0-9])"
    rf"|(?<![A-Za-z.])\.(?=[0-9])| (?=(?:{'|'.join(SCALES)})s?\b)|[^\s.,;:=<>!?+−{{}}-])+")

SIGNS = {"×": "times", "·": "cdot", "⋅": "cdot", "π": "pi", "√": "sqrt", "°": "circ", "∞": "infty",
         "∪": "cup", "≈": "approx", "±": "pm", "≤": "le", "≥": "ge", "≠": "ne"}
UNICODE = str.maketrans("−–⁄÷’\"", "--//' ") | {ord(c): f"\\{name} " for c, name in SIGNS.items()}
FUNCTION = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp"
TEXT = "text(?:normal|rm|bf|it)?|mbox|operatorname|math(?:rm|bf|it|sf)|boldsymbol|bm|vec"
# What changes no answer's meaning: (pattern, what takes its place), in this order, with examples.
CLEANED = [(re.compile(pattern), by) for pattern, by in [
    ("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad]", ""), (r"(?![0-9])\d", lambda m: str(int(m[0]))),
    ("([²³¹⁰-ⁿ]+)", r"^{\1}"), ("(?=[¼-¾⅐-⅞])", " "),  # x² -> x^{2}, 2½ -> 2 1/2
    ("(?s).+", lambda m: unicodedata.normalize("NFKC", m[0])[: 4 * LONGEST].translate(UNICODE)),
    (".*#### ?", ""),  # 3+4=7 #### 7 -> 7
    (r"(?<![\w)])(\*{1,3}|`{1,3})([^*`]+)\1(?![\w(])", r"\2"),  # **7** -> 7
    (r"(?<!\\)\\+$", ""),  # 5\\ -> 5, and 5\ of a blank that was stripped
    # 5\text{ cm} -> 5 cm, \mathbf{v} -> v, \phantom{0}7 -> 7, \left(5\right) -> (5)
    (rf"\\(?:{TEXT}) ?\{{([^{{}}]*)\}}", r" \1 "),
    (rf"\\phantom ?(?:\{{[^{{}}]*\}}|.)|\\(?:left|right|[bB]igg?[lr]?|[a-z]+style|limits|{TEXT})"
     r"(?![A-Za-z])\.?", " "),
    (r"\\langle", "("), (r"\\rangle", ")"), (r"\\(begin|end) ?\{[pb]?matrix\}", r"\\\1 "),
    # 1,000 and 1{,}000 and 12 500 and 12'500 -> 1000, 12500; but (1,100) and 1, 100 are two
    (r"(?<![0-9.,(\[])(?<!\\\{)(?<![(\[][-+])(?<![0-9] )[1-9][0-9]{0,2}"
     r"(?:(?:\{ ?, ?\}|,? ?\\[,!;:]|,|\\? (?![0-9]+ ?/)|[~'])(?: (?<=[!}] ))?[0-9]{3})+(?![0-9])",
     lambda m: re.sub("[^0-9]", "", m[0])),
    # "\\" comes first, for it ends a row of a matrix: the "\ " in "\\ " is no space
    (r"(\\\\)|\\[!,;: ()\[\]$]|\\q?quad(?![A-Za-z])|[$~€£]", lambda m: (m[1] or "") + " "),
    # \dfrac 12 -> \frac{1}{2}, 50\% -> 50%, 2**3 -> 2^3, 2pi -> 2\pi, √13 -> \sqrt{13}
    (r"\\[dtc]?frac ?(?:\{([^{}]*)\}|([0-9A-Za-z]|\\pi)) ?(?:\{([^{}]*)\}|([0-9A-Za-z]))",
     lambda m: f"\\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}"),
    (r"\\%", "%"), (r"\*\*", "^"), (r"(?<![\\A-Za-z])infinity", r"\\infty"),
    (rf"(?<![\\A-Za-z])(pi|sqrt|{FUNCTION})(?![A-Za-z])", r"\\\1 "),
    (r"\\sqrt ?(?:\(([^()]*)\)|([0-9]+))", lambda m: f"\\sqrt{{{m[1] or m[2]}}}"),
    # 30^{\circ} C -> 30 \circ, 0.\overline{6} and 0.\dot 6 -> 0.(6)
    (r"(?:\^ ?(?:\{ ?\\circ ?\}|\\circ)|\\degree|\\circ)(?: ?[CF])?(?![A-Za-z])", r" \\circ "),
    (r"(\.[0-9]*) ?\\(?:overline|bar|dot) ?\{?([0-9]+?)(?:\}|(?<=\\dot [0-9])|$)"
     r"(?:([0-9]*) ?\\dot ?\{?([0-9])\}?)?",
     lambda m: f"{m[1]}({''.join(d or '' for d in m.groups()[1:])})"),
    # So the total cost is: 7 -> 7, Option (A) -> A, x \approx 8.2 -> 8.2, \pi \approx 3.1 -> \pi
    (r"(?i)^(?:[a-z][^=<>]* )?(?:is|are|was|were|has|have|had|equals|costs|gets|makes|answer)\b"
     r"(?: ?:| equal to)? *(?=\.?[^ .])", ""),
    (r"(?i)^(?:the )?(?:option|choice|answer)? ?:? ?\(?([A-Z])[).]*$", r"\1"),
    (r"^[= ]*(?:[A-Za-z]+ )?\\approx|\\approx.*", "")]]

NOT_A_UNIT = "|".join(  # what makes "5 ..." another number, or none
    "is are was were be not no isn wrong false incorrect but if then than or and to plus minus "
    "times over divided multiplied squared cubed doubled tripled halved factorial choose power "
    "root mod modulo base half halves (?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|"
    "tenth|hundredth|thousandth)s? zero one two three four five six seven eight nine ten eleven "
    "twelve twenty thirty forty fifty sixty seventy eighty ninety negative point unknown least"
    .split())
UNITS = "cm|mm|km|kg|mg|ml|lbs?|oz|ft|in|mi|mph|hrs?|am|pm|sq|of|an|kj|kw|kn|hz|pa"
LETTERS = "mgshlaAJKLNVW"  # units after a blank or a slash: 5x is no length
UNIT = (rf"(?:(?: ?[-/.])? ?(?!(?i:{NOT_A_UNIT})\b)(?:(?i:[a-z]{{4,}}|{UNITS})\b|%|\\circ"
        rf"|(?<=[ /-])(?:[A-Za-z]{{3}}|[{LETTERS}])\b)(?: ?\^ ?\{{?-?[1-3]\}}?)?)")
UNIT_AFTER = re.compile(
    rf"(?<=[0-9}}i])(?= (?i:[a-z]{{4,}}|{UNITS})\b)(?! (?:{'|'.join(SCALES)})){UNIT}+$")
DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
TEN = r"10 ?\^ ?\{? ?(-?[0-9]{1,3}) ?\}?"
FRACTION = re.compile(rf"\\frac\{{ ?([-+]? ?{DECIMAL}) ?\}}\{{ ?([-+]? ?{DECIMAL}) ?\}}")
# She sold -, 3 of 3 1/2, digits, those that repeat, two powers of ten, what divides, the unit
NUMBER = re.compile(
    rf"(?:(?:(?!(?i:{NOT_A_UNIT})\b)[A-Za-z']+,? ){{2,}})?((?:[-+] ?)*)(?:([0-9]+) (?=[0-9]+ ?/))?"
    rf"(?:({DECIMAL})(?:(?<=[0-9.])\(([0-9]+)\))?"
    rf"(?:[eE]([-+]?[0-9]{{1,3}})| ?(?:\*|\\times|\\cdot) ?{TEN})?|{TEN})"
    rf"(?: ?/ ?([-+]? ?{DECIMAL}))?({UNIT}*)")
CLOCK = re.compile(r"(?i)([0-9]{1,2})(?: ?: ?([0-9]{2}))? ?(?:([ap])\.? ?m\.?)?")
# what an answer is given for: x, x_1, f'(2), \angle ABC, total cost, x+y, (x,y), but not 2x or xy
NAME = re.compile(
    r"((?:(?:m ?)?\\angle ?[A-Z]*|[A-Za-z]{4,}(?: [A-Za-z]{2,})*|[A-Z]{2,4}"
    rf"|[A-Za-z](?: ?\+ ?[A-Za-z])*|\\(?!(?:sqrt|{FUNCTION})[^a-z])[a-z]+)?"
    r"(?: ?_ ?(?:\w|\{\w+\}))?'?(?: ?\([^()]*\))?) ?(?:=|\\in(?![a-z]))")
VARIABLE = re.compile(
    rf"(?<![\\A-Za-z])[A-Za-z]|\\(?!(?:frac|sqrt|pi|cdot|times|circ|{FUNCTION})(?![a-z]))[a-z]")
WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{4,}|[A-Z]{2,})|:.*:|^[A-Za-z]{2,3}(?: [a-z]{2,3})*$")
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[A-Za-z]+|.", re.S)
OPEN, CLOSE = ("(", "[", "{", "\\{", "\\begin"), (")", "]", "}", "\\}", "\\end")
# what math-verify would read as people do not mean it: two numbers side by side, 2x3
MISREAD = re.compile(r"(?<![_0-9])[0-9]+ [0-9]|(?<![\\A-Za-z])[A-Za-z]+[0-9]")
# Towers of powers, factorials of factorials or of large numbers, sums: what a given answer is not
# asked about, unless the gold one has it
COSTLY = re.compile(
    r"\^ ?(?:\{[^}]*[\^e]|\S ?\^|[-{ ]*[0-9]{5})|[)}] ?\^ ?\{? ?[0-9]{2}|[0-9]{4} ?!|! ?!"
    r"|\\(?:sum|prod|int|lim)|binom ?\{ ?[0-9]{4}")
LATEX = [(re.compile(pattern), by) for pattern, by in [  # for math-verify
    (r"^([^\\]*?) ?\\circ ?$", r"\1"), (r"([0-9.]+) ?\\circ", r"(\\frac{\1\\pi}{180})"),
    (r"\\[A-Za-z]+|i", lambda m: "I" if m[0] == "i" else m[0]),  # the imaginary unit
    (r"\\(begin|end)(?![A-Za-z{])", r"\\\1{pmatrix}"), ("^([A-Za-z])$", r"1 \1"),
    (r"(?<![0-9.}^_])([0-9]+)/([0-9]+|[A-Za-z](?![A-Za-z]))", r"\\frac{\1}{\2}"),  # 15/2\pi
    # \sin x \cdot \cos x would be \sin(x\cos x), \log{2} x the logarithm of 2x, and \ln 3/\ln 2 too
    (rf"\\cdot ?(?=\\(?:{FUNCTION}))", ""), (rf"\\({FUNCTION}) ?\{{([^{{}}]*)\}}", r"\\\1(\2)"),
    (rf"\\({FUNCTION}) ?([0-9]+)(?= ?/)", r"\\\1(\2)"),
    # \sqrt[3]{-2}, for odd roots of negative numbers are real; \sqrt{1/n}, for n may be negative
    (r"\\sqrt ?\[ ?([0-9]*[13579]) ?\] ?\{ ?-([^{}+-]*)\}", r"(-\\sqrt[\1]{\2})"),
    (r"\\sqrt ?\{ ?\\frac\{([^{}]*)\}\{([^{}]*)\} ?\}", r"\\frac{\\sqrt{\1}}{\\sqrt{\2}}")]]

# kind: number (content: value, percent?), clock, base, words, equation (sides), latex, unread, and
# of parts list, {}, (), [], (], [); name: what it is the value of
Answer = namedtuple("Answer", "kind content name text")


def last_boxed(text):
    """Content of the \\boxed{} that opens last among those that close, or None."""
    opened, boxes = [], []
    for m in BRACES.finditer(text):
        if m[1] or m[0] == "{":
            opened.append(m)
        elif m[0] == "}" and opened:
            begin = opened.pop()
            if begin[1]:
                boxes.append((begin.end(), m.start()))
    return text[slice(*max(boxes))] if boxes else None


def last_term(text):
    """The last term of the text that has a digit, whole: 3/4, 10^5, 12 500, 2 1/3, x^2; or None."""
    last = max(map(text.rfind, "0123456789"))  # the terms round it: a text may be of any length
    terms = [m[0] for m in TERM.finditer(text[max(0, last - 200) : last + 100])]
    return next((term for term in terms[::-1] if re.search("[0-9]", term)), None)


def rewrite(text, table):
    for pattern, by in table:
        text = pattern.sub(by, text)
    return text


@functools.lru_cache(maxsize=1 << 14)
def clean(text):
    return " ".join(rewrite(text, CLEANED).split()).lstrip("= ").rstrip(".,; ")


def split(text, *separators):
    """The parts between separators that stand in no bracket; none where brackets do not match."""
    parts, depth = [""], 0
    for t in TOKEN.findall(text):
        depth += (t in OPEN) - (t in CLOSE)
        if not 0 <= depth <= DEEPEST:
            return []
        if t in separators and not depth:
            parts.append("")
        else:
            parts[-1] += t
    return [part.strip() for part in parts if part.strip()] if not depth else []


@functools.lru_cache(maxsize=1 << 14)
def read(text):
    """Clean text -> Answer."""
    parts = []
    for part in split(text, ",", ";", "and", "or"):
        if "," not in part and re.search(r"\\(?:pm|mp)", part):  # 1 \pm 2 is two answers
            parts += [part.replace("\\pm", a).replace("\\mp", b) for a, b in ("+-", "-+")]
        else:
            parts.append(part)
    if len(parts) != 1:
        return Answer("list" if parts else "unread", tuple(map(read, parts)), "", text)
    m = NAME.match(parts[0])
    name, body = (m[1].strip(), parts[0][m.end():].strip()) if m else ("", parts[0])
    if m := re.fullmatch(r"\\?([({[])(.*?)\\?([)}\]])", body):
        inner, brackets = read(m[2].strip()), m[1] + m[3]
        if inner.kind == "list":
            return Answer(brackets, inner.content, name, body)
        if brackets in ("()", "{}", "[]") and inner.kind != "unread":
            return inner._replace(name=name)
    if (m := CLOCK.fullmatch(body)) and (m[3] or m[2] == "00"):
        hour = int(m[1]) % 12 + 12 * (m[3] in "pP") if m[3] else int(m[1])
        return Answer("clock", (hour, int(m[2] or 0)), name, body)
    if m := re.fullmatch(r"(-?[0-9A-F]+) ?_ ?\{?([0-9]+)\}?", body):
        return Answer("base", m.groups(), name, body)
    if value := number(body):
        return Answer("number", value, name, str(value[0]))
    body = UNIT_AFTER.sub("", body)
    if WORD.search(body):
        return Answer("words", re.findall(r"[^\s.]+", body.casefold()), name, body)
    sides = split(body, "=")
    if len(sides) > 1 and not VARIABLE.search(body):  # 3 + 4 = 7
        return read(sides[-1])._replace(name=name)
    return Answer("equation" if len(sides) > 1 else "latex", sides, name, body)


def number(text):
    """(exact value, whether it is a percentage) of a number as people write one, None where
    anything is left to work out."""
    text = re.sub(r"^([-+]) ?\((.*)\)$", r"\1\2", FRACTION.sub(r" \1/\2", text).strip())
    if not (m := NUMBER.fullmatch(text)):
        return None
    signs, whole, digits, repeat, *powers, under, unit = (g or "" for g in m.groups())
    value, under = Fraction(digits or 1), Fraction(under.replace(" ", "") or 1)
    if repeat:
        places = len(digits.partition(".")[2])
        value += Fraction(int(repeat), 10**places * (10 ** len(repeat) - 1))
    if under == 0 or whole and value >= under:  # 1/0, 3 5/2
        return None
    value = int(whole or 0) + value * Fraction(10) ** int("".join(powers) or 0) / under
    words = re.findall("[a-z]+", unit.lower())
    scales = takewhile(bool, (SCALES.get(word.removesuffix("s")) for word in words))
    return value * prod(scales) * (-1) ** signs.count("-"), "%" in unit or words[:1] == ["percent"]


def equal(a, b, ask):
    """Is answer a the gold one, b? ask(a, b): math-verify's verdict on two texts."""
    kinds = {a.kind, b.kind}
    if len({x.name.lower() for x in (a, b) if len(x.name) == 1}) == 2:  # y = 2 is not x = 2
        return False
    if a.text == b.text:
        return True
    if "equation" in kinds:
        if all(x.kind == "equation" or x.name and x.kind in ("latex", "number") for x in (a, b)):
            return ask(*(f"{x.name}={x.text}".lstrip("=") for x in (a, b)))  # 2x-y+1=0 is y=2x+1
        first, second = ([*map(read, x.content)] if x.kind == "equation" else [x] for x in (a, b))
        return all([equal(x, y, ask) for x in first for y in second])  # x(x+1) = x^2+x is x^2+x
    if kinds == {"number"}:
        (x, percent), (y, gold_percent) = a.content, b.content
        # 50% is 50 to one data set and 1/2 to the next
        return x == y or percent != gold_percent and (x / 100 == y if percent else x == y / 100)
    if b.kind == "number":  # 3 pm, where 3 is asked for, but not 15:00
        hour = re.match("[0-9]+", a.text)
        return a.kind == "clock" and (int(hour[0]), a.content[1]) == (b.content[0], 0)
    if b.kind == "base" and a.kind == "number":  # which base is for the question to say
        return b.content[0] == a.text
    if kinds & {"words", "clock", "base"}:
        return a.kind == b.kind and a.content == b.content
    if "unread" in kinds or len(a.text) == len(b.text) == 1:  # c is not C, as to math-verify
        return False
    if all(kind == "list" or kind[0] in "([{" for kind in kinds):
        return equal_parts(a, b, ask)
    return ask(a.text, b.text)


def equal_parts(a, b, ask):
    if len(a.content) != len(b.content):
        return False
    table = [[equal(x, y, ask) for y in b.content] for x in a.content]
    if b.kind[0] in "([" or any(part.kind == "words" for part in b.content):  # in this order
        same_kind = a.kind == b.kind or (a.kind, b.kind) == ("list", "()")
        return same_kind and all(table[i][i] for i in range(len(table)))
    left = set(range(len(table)))
    for row in table:
        left -= {*[i for i in left if row[i]][:1]}
    return not left and a.kind in ("list", "{}", "()", "[]")


def same_all(pairs):
    """Whether each (given, gold) is the same answer; where gold is a number, given must be one."""
    asked = {}

    def ask(given, gold):
        given, gold = rewrite(given, LATEX), rewrite(gold, LATEX)
        if MISREAD.search(given) or COSTLY.search(given) and not COSTLY.search(gold):
            return False
        return asked.setdefault((given, gold), False)

    verdicts = [verdict(*pair, ask) for pair in pairs]
    if asked:  # now answers are known
        asked.update(zip(asked, judge.ask([*asked]), strict=True))
        verdicts = [verdict(*pair, ask) for pair in pairs]
    return verdicts


def verdict(given, gold, ask):
    if len(given) > 4 * LONGEST:
        return False
    given, gold = (text if (box := last_boxed(text)) is None else box for text in (given, gold))
    a, b = clean(given), clean(gold)
    if not a or max(len(a), len(b)) > LONGEST:
        return a == b != ""
    a, b = read(a), read(b)
    if b.kind == "number" and a.kind != "number":  # 5m is algebra, but not where 5 is asked for
        a = read(re.sub(rf"(?<=[0-9])(?=[{LETTERS}](?![A-Za-z]))", " ", clean(given)))
    if b.kind == "list" and a.kind == "number":  # "81,256" is two numbers here
        a = read(clean(re.sub(",(?=[1-9])", ", ", given)))
    return equal(a, b, ask)
