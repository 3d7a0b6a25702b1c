"""The grader: what an answer is, when two are the same, and what no completion can do to a run. CPU."""
import csv
import itertools
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from plumbing import grade, judge

import hypothesis
import hypothesis.strategies as st
import pytest

import data

ROOT = Path(__file__).resolve().parents[1]

with open(ROOT / "tests" / "fixtures" / "grading.tsv", encoding="utf-8", newline="") as f:
    TABLE = list(csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE))
SETS = ("gsm8k", "math500", "aime24", "aime25", "amc23", "math_train")
KINDS = sorted({row["set"] for row in TABLE} - {*SETS, "-"})


def same(given, gold):
    return grade.same_all([(given, gold)])[0]


SAID = {}


def remembered(pairs, ask=judge.ask):
    """judge.ask, of what it has not been asked yet."""
    new = [*dict.fromkeys(pair for pair in map(tuple, pairs) if pair not in SAID)]
    if new:
        SAID.update(zip(new, ask(new), strict=True))
    return [SAID[tuple(pair)] for pair in pairs]


@pytest.fixture
def patient(monkeypatch):
    """No batch is cut short, however busy the machine is, and nothing is asked twice."""
    monkeypatch.setattr(judge, "WALL", 600.0)
    monkeypatch.setattr(judge, "ask", remembered)


@pytest.fixture
def alone(monkeypatch):
    """Nothing may be asked of math-verify."""
    monkeypatch.setattr(judge, "ask", lambda pairs: pytest.fail(f"asked {pairs}"))


# ---- answers

def wrong_verdicts(rows):
    verdicts = grade.same_all([(row["answer"], row["gold"]) for row in rows])
    return [(row["gold"], row["answer"], row["verdict"]) for row, said in zip(rows, verdicts, strict=True)
            if said != (row["verdict"] == "same")]


def test_the_table_of_answers(patient):
    """Real golds of the six sets, each in five spellings and beside what it is not: matrices whose row separators were
    eaten, digits glued together, units, times of day, right answers in brackets or behind "x =" (see the file)."""
    assert not wrong_verdicts([row for row in TABLE if row["set"] not in KINDS])


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_answer_is_read_as_people_mean_it(kind, patient):
    """Of some 230 such pairs half had the wrong verdict: golds that could not be read never reached math-verify, an inverse
    function was a reciprocal, marks and units made another number, 2x3 was 2*x*3."""
    assert not wrong_verdicts([row for row in TABLE if row["set"] == kind])


@pytest.mark.parametrize("name", ["gsm8k", "aime24", "aime25", "amc23"])
def test_golds_that_are_numbers_need_no_math_verify(alone, name):
    """A step on GSM8K waited for processes; nor may a busy machine change a verdict there."""
    assert not wrong_verdicts([row for row in TABLE if row["set"] == name])


@pytest.mark.parametrize(("style", "text"), [("tags", "<think>so</think><answer>{}</answer>"), ("boxed", "so \\boxed{{{}}}.")])
def test_the_table_as_completions(style, text, patient):
    """The same answers where a model writes them, graded as a batch and one by one."""
    rows = [row for row in TABLE if "boxed" not in row["answer"]][::6]
    completions = [(text.format(row["answer"]), row["gold"]) for row in rows]
    rewards = data.rewards(completions, style)
    assert [r["correct"] for r in rewards] == [row["verdict"] == "same" for row in rows]
    assert all(r["format"] for r in rewards)
    assert rewards[::12] == [data.reward(*c, style) for c in completions[::12]]


def test_the_table_is_whole():
    """Every set, five spellings of every gold, both verdicts of every kind, and why each verdict that differs from math-verify's does."""
    assert len(TABLE) >= 1000 and len(KINDS) >= 14
    assert {row["set"] for row in TABLE} >= {*SETS}
    for gold, rows in itertools.groupby(sorted((r for r in TABLE if r["set"] in SETS), key=lambda r: r["gold"]), lambda r: r["gold"]):
        verdicts = [row["verdict"] for row in rows]
        assert verdicts.count("same") >= 5 and verdicts.count("different") >= 2, gold
    for kind in KINDS:
        assert {row["verdict"] for row in TABLE if row["set"] == kind} == {"same", "different"}, kind
    for row in TABLE:
        assert bool(row["math-verify"]) == bool(row["why they differ"]), row
        assert row["verdict"] in ("same", "different") and row["verdict"] != row["math-verify"], row


def test_no_gold_is_another_gold(patient):
    """Golds of the table against others: only those that say the same are the same."""
    golds = sorted({row["gold"] for row in TABLE if row["set"] in SETS})
    alike = [("[-2,7]", "x \\in [-2,7]"), ("204_5", "204")]
    pairs = [pair for pair in itertools.combinations(golds, 2) if {*pair} not in ({*a} for a in alike)]
    some = random.Random(0).sample(pairs, 100) + alike
    assert [pair for pair, said in zip(some, grade.same_all(some), strict=True) if said] == alike[:1]
    assert same("204", "204_5")  # the question says which base it wants, so the answer need not


SAME = [
    ("5\\ ", "5"), ("x+1\\\\", "x+1"), ("(1,2)\\ ", "(1,2)"), ("\\begin{pmatrix}1\\\\2\\end{pmatrix}\\\\", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("1,000", "1000"), ("$1000.00", "1000"), ("1000 dollars", "1,000"), ("1000.", "1000"), ("-5", "−5"), ("x = 5", "5"),
    ("0.5", "1/2"), ("\\frac{1}{2}", "0.5"), ("\\dfrac12", "1/2"), ("3\\frac{1}{2}", "3.5"), ("-\\frac{33}{2}", "-16.5"),
    ("1e3", "1000"), ("3 million", "3000000"), ("18 per day", "$18"), ("5 cm", "5"), ("5cm", "5"), ("90", "90^\\circ"),
    ("50%", "50"), ("50%", "1/2"), ("50\\%", "50%"), ("\\boxed{42}", "42"), ("$42$", "42"), ("\\(42\\)", "42"), ("**42**", "42"),
    ("5 a day", "5"), ("$5/hour", "5"), ("50 percent", "1/2"), ("3 millions", "3000000"), ("3 PM", "3:00 p.m."), ("3 p.m.", "3"),
    ("8:00", "8"), ("No", "\\text{No}"), ("NO.", "no"), ("X = 2", "x=2"), ("y = 2x + 1", "2x - y + 1 = 0"),
    ("5 \\text{ m}", "5"), ("5\\,\\mathrm{m}", "5"), ("5 \\text{ m/s}", "5"), ("5~\\text{L}", "5"), ("\\frac{5}{2} \\text{ h}", "2.5"), ("m\\angle A = 30^\\circ", "30"),
    ("٤٢", "42"), ("\u200b42\ufeff", "42"), ("\\theta = 3", "3"), ("3+4 = 7", "7"), ("11,\\! 111", "11111"), ("1{,}000", "1000"), ("42409", "\\$42409"), ("6 \\text{ units}", "6"), ("evelyn", "\\text{Evelyn}"),
    ("x ≥ 2", "x \\ge 2"), ("\\bigl(1,2\\bigr)", "(1,2)"), ("0.\\bar{6}", "2/3"), ("2/3 \\approx 0.67", "2/3"), ("5 \\times 10^{-3}", "0.005"), ("1e-3", "0.001"),
    ("f'(2) = 3", "3"), ("{\\bf \\boxed{5}}", "5"), ("Anne; Paul", "Anne, Paul"), ("x \\pm y \\mp z", "x+y-z, x-y+z"), ("Eve", "\\boxed{Eve}"), ("they walked 5m", "5"), ("1,234, 5", "1234, 5"),
]
DIFFERENT = [
    ("50", "0.5"), ("42 pi", "42"), ("2x", "2"), ("3+4", "7"), ("7 or 8", "7"), ("12,34", "1234"), ("3 million", "3"), ("", "5"),
    ("3 millions", "3"), ("11 pm", "11 am"), ("3 sevenths", "3"), ("on", "no"), ("y=2", "x=2"), ("x=2, y=1", "x=1, y=2"),
    ("8:30 am", "8"), ("20:00", "8 am"), ("1/0", "5"), ("nan", "0"), ("inf", "1e9"), ("3\u200b1", "42"), ("0.33", "1/3"), ("4", "42"), ("42", "4"), ("2", "2x"), ("-5", "5"),
    ("5 or x", "5"), ("3 x y", "3"), ("1, 2", "1, 1"), ("3 5/2", "11/2"), ("", ""), ("x" * 2000 + " " * 1700 + "42", "42"),
    ("up to 5", "5"), ("3 root", "3"), ("3 eleven", "3"), ("5 unknown", "5"), ("dog bites man", "man bites dog"), ("1A_{16}", "1a_{16}"),
]


@pytest.mark.parametrize(("given", "gold"), SAME)
def test_numbers_are_compared_as_numbers(given, gold):
    """A right answer written another way is right, in both prompt styles."""
    assert same(given, gold)
    assert data.reward(f"<think>so</think><answer>{given}</answer>", gold)["reward"] == pytest.approx(1.2)
    assert data.reward(f"so \\boxed{{{given}}}", gold, "boxed")["correct"]


@pytest.mark.parametrize(("given", "gold"), DIFFERENT)
def test_what_is_another_number_is_wrong(given, gold):
    """Neither digits alone, nor an unevaluated expression, nor a prefix of the number passes."""
    assert not same(given, gold)
    assert data.reward(f"<think>so</think><answer>{given}</answer>", gold)["reward"] == pytest.approx(0.2)


def test_plain_answer_passes_the_latex_grader():
    """A plain <answer>42</answer> used to fail a grader that only reads LaTeX."""
    for answer, gold in [("42", "42"), ("p-q", "p - q"), ("14/3", "\\frac{14}{3}"), ("0.5x", "\\frac{1}{2}x"),
                        ("(3, pi/2)", "\\left( 3, \\frac{\\pi}{2} \\right)"), ("3sqrt(13)", "$3\\sqrt{13}$"),
                        ("(x+1)^2", "x^2+2x+1")]:
        assert data.reward(f"<think>.</think><answer>{answer}</answer>", gold)["correct"], (answer, gold)
    for answer, gold in [("q-p", "p - q"), ("(0,3)", "[0,3)"), ("x^2", "x^3")]:
        assert not data.reward(f"<think>.</think><answer>{answer}</answer>", gold)["correct"], (answer, gold)


def test_a_wrong_digit_or_sign_is_seen_wherever_it_stands(patient):
    """266 of 515 matrices with one wrong entry once passed, and later each with a minus before it: any digit of any gold of
    the table, changed, is another answer."""
    golds = sorted({row["gold"] for row in TABLE if row["set"] in SETS and not re.search(r"0\.67|0\.56|tan", row["gold"])})  # said twice; never ends
    rng, pairs = random.Random(0), []
    for gold in golds:
        at = [m.start() for m in re.finditer(r"[0-9]|(?<!\\)(?<!phantom )-", gold)]
        for i in rng.sample(at, min(1, len(at))):
            new = "+" if gold[i] == "-" else rng.choice("0123456789".replace(gold[i], ""))
            pairs.append((gold[:i] + new + gold[i + 1:], gold))
        if gold[0] == "\\":
            pairs.append((f"-{gold}", gold))
    assert [pair for pair, said in zip(pairs, grade.same_all(pairs), strict=True) if said and pair[1][:9] != "15\\mbox{ c"] == []


NUMBERS = st.fractions(min_value=-10**6, max_value=10**6, max_denominator=10**4)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(NUMBERS, NUMBERS, st.sampled_from(["{}", "({})", "x = {}", "${}$", "\\boxed{{{}}}", "{} apples", "= {}", "\\mathbf{{{}}}"]))
def test_a_number_is_the_same_in_any_spelling_and_no_other(x, y, around):
    sign, over, under = "-" * (x < 0), abs(x.numerator), x.denominator
    spelled = [f"{sign}{over}/{under}", f"{sign}\\frac{{{over}}}{{{under}}}", f"\\dfrac{{{x.numerator}}}{{{under}}}"]
    if over > under > 1:
        spelled += [f"{sign}{over // under}\\frac{{{over % under}}}{{{under}}}", f"{sign}{over // under} {over % under}/{under}"]
    if under == 1:
        spelled += [f"{x.numerator}.0", f"{x.numerator}"] + [f"{x.numerator:,}"] * (around != "({})")  # (1,100) is a pair
    for s in spelled:
        assert same(around.format(s), str(x))
        assert same(around.format(s), str(y)) == (x == y)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(st.sampled_from([
    "\\frac", "\\sqrt", "{", "}", "(", ")", "[", "]", "^", "_", "x", "2", "10", "1,000", ".", "!", "=", "<", ",", "\\cup", "\\pm", "/", "-",
    "+", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", " ", "\\text{a}", " cm", " and ", "\\approx", "%", "\\circ", ":", "\\sin", "\\log_",
    "\\infty", "\\in", "e", "e5", '"', "\\", "\u221a", "\u0664", "\x00", "\ud800", "$", "**", "'", "|", "3 1/2", "\\phantom", "\\boxed{", "\\foo"]),
    max_size=40), st.sampled_from(["5", "x^2", "\\sqrt{2}", "(1,2)", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "x+y=1"]))
def test_any_text_has_a_verdict(parts, gold):
    """Nothing that can be written makes the reading raise, as answer or as gold."""
    text = "".join(parts)
    for said in (False, True):
        assert isinstance(grade.verdict(text, gold, lambda a, b, said=said: said), bool)
        assert isinstance(grade.verdict(gold, text, lambda a, b, said=said: said), bool)


def test_no_rounding_makes_two_numbers_one():
    """2^100 - 2 is 2^100 to sixteen digits, and 2^-98 is 0."""
    assert same("2(2^{99}-1)", "2^{100}-2") and same("2^{-98}", "\\frac{1}{2^{98}}")
    assert not same("2^{100}", "2^{100}-2") and not same("2^{-97}", "\\frac{1}{2^{98}}")


VALUES = [  # given, gold and another answer
    ("\\sqrt[3]{x}", "x^{1/3}", "\\sqrt{x}"), ("\\log_2 x", "\\frac{\\ln x}{\\ln 2}", "\\log_3 x"),
    ("\\sin 30^\\circ", "\\cos 60^\\circ", "\\sin 30"), ("e^2", "\\exp(2)", "\\exp(3)"), ("(1+i)^2", "2i", "2+2i"), ("x³", "x^3", "x^2"),
    ("\\sin 5x \\cos x", "\\cos x \\sin 5x", "\\sin(5x \\cos x)"), ("\\sec x", "\\frac{1}{\\cos x}", "\\csc x"),
    ("12:00 p.m.", "12:00", "0:00"), ("2x+2y=2", "x+y=1", "x+y=1.0001"),
    ("y^2x", "xy^2", "x^2y^2"), ("2 a b^2", "2ab^2", "2a^2b^2"), ("t e^{2t}", "te^{2t}", "t^{2t}e^{2t}"), ("x^{2n}", "x^{2 n}", "x^2 n"),
    ("\\ln(2)/3", "\\frac{\\ln 2}{3}", "\\ln(2/3)"), ("\\ln 3/\\ln 2", "\\log_2 3", "\\ln(3/2)"), ("\\sin(x)^2", "(\\sin x)^2", "\\sin(x^2)"),
    ("\\sin x \\cdot \\cos x", "\\sin x \\cos x", "\\sin(x \\cos x)"), ("5 \\log{2} x", "5x\\log 2", "5\\log 2x"),
    ("\\ln 2x", "\\ln(2x)", "\\ln(2) x")]


def test_roots_logarithms_and_degrees_have_their_values(patient):
    right = [pair for given, gold, _ in VALUES for pair in ((given, gold), (gold, given))]
    wrong = [(given, other) for given, _, other in VALUES]
    said = {pair for pair, ok in zip(right + wrong, grade.same_all(right + wrong), strict=True) if ok}
    assert said == {*right}


def test_a_clock_has_seconds_an_interval_brackets_and_a_billion_nine_noughts(alone):
    """Read without them, 1:02:03 is any time in its minute, and two numbers the interval between them."""
    assert same("1:02:03", "1:02:03 ") and not same("1:02:04", "1:02:03")
    assert same("[1, 2]", "[1,2]") and same("1, 2", "(1,2)") and not same("1, 2", "[1,2]") and not same("\\{1, 2\\}", "(1,2)")
    for word, value in (("thousand", 10**3), ("million", 10**6), ("billion", 10**9), ("trillion", 10**12), ("hundred", 100), ("dozen", 12)):
        assert same(f"3 {word}", str(3 * value)) and not same(f"3 {word}", str(30 * value))
    assert same("7:00", "7") and same("7 pm", "7") and not same("19:00", "7") and not same("7:30 pm", "7")


def test_an_equation_is_what_it_says():
    """Its right side was the answer, whatever stood on the left; what is always true is no line."""
    assert same("2(x+1) = 2x+2", "2x+2") and same("3+4 = 7", "7") and same("0.5 = 50\\%", "1/2")
    assert not same("\\tan x = 2x", "2x") and not same("2x + z = k", "k") and not same("x = 3", "y = 3")
    assert not same("0=0", "x+2y=3") and not same("x=x", "y=2x+3")


@pytest.mark.parametrize("text", ["1, 2", "\\{2, 1\\}", "2 and 1", "(1, 2)", "x = 1 or x = 2"])
def test_a_list_is_in_any_order_and_has_no_answer_twice(text):
    assert same(text, "1, 2") and not same(text, "1, 1") and not same(text, "1, 2, 3") and not same("1, 1, 2", text)


def test_two_words_in_another_order_are_another_ranking(alone):
    assert same("Ann, then Bob".replace("then ", ""), "\\text{Ann, Bob}") and not same("Bob, Ann", "\\text{Ann, Bob}")


def test_a_gold_answer_too_long_to_read_is_compared_as_text():
    """A row of a data set may hold anything; it must not cost more than an answer may."""
    proof = "because " + "(" * 10**5
    assert same("y = x+" * 60, "y = x+" * 60) and not same("5", proof)


# ---- math-verify's processes

def test_latex_is_graded_off_the_main_thread(patient):
    """math-verify's time limits are signals, which raise in any thread but the main one. The thread that starts the
    process may end long before the run does."""
    out = []
    for pair in [("1 < y", "y > 1"), ("2 < y", "y > 2")]:
        t = threading.Thread(target=lambda pair=pair: out.append(same(*pair)))
        t.start()
        t.join()
    assert out == [True, True]


def test_neither_side_of_a_pair_is_read_more_freely_than_the_other(patient):
    """math-verify takes the right side of an equation that was given, and compares a set with an inequality one way round."""
    assert judge.ask([("2x+z=1", "1"), ("1", "2x+z=1"), ("3t", "3"), ("(3,5)", "3<x<5"), ("3<x<5", "(3,5)")]) == [False] * 3 + [True] * 2


TOWERS = ROOT / "tests" / "fixtures" / "towers"  # a math_verify.py that is imported at once


@pytest.fixture
def quick(monkeypatch):
    """A process of its own that starts at once."""
    monkeypatch.setenv("PYTHONPATH", str(TOWERS))
    monkeypatch.setattr(judge, "server", None)
    yield
    judge.server.kill()
    judge.server.wait()


def test_what_sympy_cannot_finish_is_different_and_the_rest_is_graded(patient):
    """A bignum power returns to no handler and no thread: the kernel ends it."""
    judge.ask([("x<1", "x<2")])
    begin = time.time()
    assert judge.ask([("10^{10^{10}}", "x"), ("x<3", "3>x")]) == [False, True]
    assert time.time() - begin < 60


def test_a_batch_ends_with_its_time_and_what_was_not_reached_may_be_asked_again(quick, monkeypatch):
    pairs = [(f"10^{{10^{{{n}}}}}", "x") for n in range(10, 200)] + [("x<4", "x<4")]
    judge.ask(pairs[-1:])
    monkeypatch.setattr(judge, "WALL", 0.5)
    begin = time.time()
    assert not any(judge.ask(pairs))
    assert time.time() - begin < 5 and judge.server.poll() is None  # it need not be killed
    monkeypatch.setattr(judge, "WALL", 60.0)
    assert judge.ask(pairs[-1:]) == [True]


def test_a_verdict_does_not_depend_on_how_busy_the_machine_is(monkeypatch):
    """A batch shared five seconds of the clock: of a machine at work on other things right answers were wrong. A pair has
    its own processor time, waits are not counted, and the pairs after one that used it up are graded."""
    def compare(given, gold):
        if given == "waits":
            time.sleep(0.4)
        while given == "works":
            pass
        return True

    monkeypatch.setattr(judge, "CPU", 0.1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    pairs = [(given, "") for given in ("works", "a", "waits", "works", "b")]
    assert judge._verdicts(compare, pairs, 60.0, os.getppid()) == [False, True, True, False, True]


def test_what_raises_is_different_and_the_pairs_after_it_are_graded(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    pairs = [(0, 1), (1, 1), (0, 1), (2, 1)]
    assert judge._verdicts(lambda a, b: b / a, pairs, 60.0, os.getppid()) == [False, True, False, True]


def test_a_grader_has_a_limit_of_memory_and_ends_when_its_input_closes(quick):
    judge.ask([("x<1", "x<2")])
    if hasattr(resource, "prlimit"):
        assert resource.prlimit(judge.server.pid, resource.RLIMIT_AS) == (judge.MEMORY, judge.MEMORY)
    judge.server.stdin.close()
    assert judge.server.wait(10) == 0


def test_a_hanging_grader_is_killed_and_the_next_answer_graded(quick, monkeypatch):
    """A process that answers nothing costs neither the run nor the answers after it."""
    judge.ask([("x<5", "x<6")])
    os.kill(judge.server.pid, signal.SIGSTOP)  # what never returns
    monkeypatch.setattr(judge, "WALL", 0.3)
    assert judge.ask([("x<1", "x<1")]) == [False]
    monkeypatch.setattr(judge, "WALL", 60.0)
    assert judge.ask([("x<1", "x<1")]) == [True]


def test_a_grader_that_can_answer_no_more_is_replaced(quick, monkeypatch):
    """It lived, and every answer after that was wrong."""
    mute = [sys.executable, "-c", "import os, time; os.close(1); time.sleep(99)"]
    monkeypatch.setattr(judge, "server", subprocess.Popen(mute, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert judge.ask([("x<1", "x<1")]) == [False]
    assert judge.ask([("x<1", "x<1")]) == [True]


def test_the_first_answer_after_a_graders_death_is_graded(quick):
    """It was the run's to lose: the next one only began a new grader."""
    judge.ask([("x<1", "x<2")])
    judge.server.kill()
    judge.server.wait()
    assert judge.ask([("x<1", "x<1")]) == [True]


def test_a_grader_that_cannot_start_is_an_error(monkeypatch, tmp_path):
    """Without math-verify every answer that needs it would be wrong, and the run go on."""
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(judge, "server", None)
    with pytest.raises(ValueError, match="math-verify does not start; pip install"):
        judge.ask([("x<1", "x<2")])


def test_a_larger_batch_has_more_time(quick, monkeypatch):
    """Or of a step of thousands of completions most answers were not reached, and wrong."""
    judge.ask([("x<1", "x<2")])
    waited = []
    monkeypatch.setattr(judge.threading, "Timer", lambda seconds, _: waited.append(seconds) or SimpleNamespace(start=int, cancel=int))
    for n in (512, 513):
        judge.ask([(f"x<{i}", "x") for i in range(n)])
    assert waited == [62.0, 122.0]


def members(group):
    """Processes of a group that run."""
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state not in "ZX":
            out.append(int(stat.parent.name))
    return out


def wait_for(condition, seconds=20):
    end = time.time() + seconds
    while not condition() and time.time() < end:
        time.sleep(0.02)
    return condition()


BUSY = """
from plumbing import judge
judge.ask([("x<1", "x<2")])
print(judge.server.pid, flush=True)
judge.ask([(f"10^{{10^{{{n}}}}}", "x") for n in range(10, 500)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_busy_graders_die_with_their_parent():
    """A kill -9 of the run once left a grader at work on a bignum for hours."""
    run = subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                           env={**os.environ, "PYTHONPATH": f"{ROOT}:{TOWERS}"})
    group = int(run.stdout.readline())
    try:
        assert wait_for(lambda: len(members(group)) > 1)
        os.kill(run.pid, signal.SIGKILL)
        assert wait_for(lambda: not members(group), 30)  # the pair at work has its time
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


# ---- hostile completions

HOSTILE = [lambda n: f"10^{{10^{{{n}}}}}", lambda n: f"9^{{9^{{9^{{{n}}}}}}}", lambda n: f"{n}000!", lambda n: "(" * 150 + f"x+{n}" + ")" * 150,
           lambda n: f"\\binom{{{n}000000}}{{{n}00000}}", lambda n: f"\\int_0^{{{n}}} e^{{-x^{{99}}}} dx", lambda n: "\\frac{" * 60 + str(n),
           lambda n: f"\\sum_{{k=1}}^{{{n}00000}} \\frac{{1}}{{k^5}}", lambda n: f"(x+y+z)^{{9{n}}}", lambda n: "\\sqrt{" * 40 + f"{n}" + "}" * 40,
           lambda n: f"\\prod_{{k=1}}^{{{n}}} k!", lambda n: "x^" * 120 + str(n), lambda n: f"\\lim_{{x\\to {n}}} x^x",
           lambda n: f"2^{{99999{n}}}", lambda n: f"1e99999{n}", lambda n: f"{n}!!", lambda n: "{" * 300 + str(n)]
# these look like any answer and keep sympy at work
SLOW = [lambda n: "\\sqrt" * 50 + str(n), lambda n: "9" * 390 + str(n), lambda n: "x > " + "\\cdot".join(f"(x+{n + k})^{{19}}" for k in range(12)),
        lambda n: "\\sqrt{x} \\le " + "+".join(f"\\sqrt[{k + 9}]{{{n + k}}}" for k in range(20)),
        lambda n: f"{n} > " + "+".join(f"x^{{{n + k}}}" for k in range(40))]
GOLDS = ["5", "y^2", "\\sqrt{3}", "(2,3)", "x^2+y^2 \\le 1", "2x+3y=7", "\\{1,2\\}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", "x<3"]


def test_towers_factorials_and_deep_nesting_never_reach_sympy(alone):
    for make, gold in itertools.product(HOSTILE, GOLDS):
        assert not same(make(7), gold), (make(7), gold)


def test_512_hostile_completions_cost_seconds(monkeypatch):
    """They once took three or four seconds each, one after the other: a step stalled for minutes."""
    monkeypatch.setattr(judge, "WALL", 0.5)  # a minute in a run
    same("x<1", "x<2")  # the process starts once a run
    makers = HOSTILE + 7 * SLOW
    completions = [(f"\\boxed{{{makers[n % len(makers)](n)}}}", GOLDS[n % len(GOLDS)]) for n in range(512)]
    begin = time.time()
    assert not any(r["correct"] for r in data.rewards(completions, "boxed"))
    assert time.time() - begin < 7


def test_no_completion_can_crash_or_hang_the_reward():
    """Anything a model may emit is graded, in linear time: deep braces, huge numbers and exponents, odd bytes, half tags."""
    begin = time.process_time()
    assert grade.last_term("word " * 10**6 + "5") == "5"
    assert time.process_time() - begin < 0.3  # of a long text the end is read
    rng = random.Random(0)
    parts = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "\\frac", "1", "9", "/", "e", ",", ".", "$",
             "%", "\\", "^", "x", "\u221a", "\u0664", "\x00", "\ud800", " ", "\n", "-"]
    texts = ["".join(rng.choice(parts) for _ in range(rng.randint(0, 40))) for _ in range(500)]
    texts += [p * 40000 for p in (*parts, "<think></think><answer>", "1,000", "1/", "\\boxed{1}", "- ")]
    for inside in ("9" * 100000, "1e999999", "1e-999999", "9" * 4301, "9^{9^{9^{9}}}", "{" * 5000, "1/" + "0" * 50, "nan", "inf"):
        texts += [f"<think>a</think><answer>{inside}</answer>", f"\\boxed{{{inside}}}", inside]
    texts += [bytes(rng.randrange(256) for _ in range(200)).decode("utf-8", "replace") for _ in range(50)]
    for text in texts:
        for style in ("tags", "boxed"):
            score = data.reward(text, "5", style)
            assert score["reward"] in (0, 0.2, 1.0, 1.2)
    begin = time.time()
    for inside in ("9^{9^{9^{9}}}", "x^" * 150, "(" * 300, "\\frac{" * 60, "x" * 100000, "\\sqrt" * 50, "\x00", "\ud800"):
        assert not data.reward(f"<think>a</think><answer>{inside}</answer>", "y^2")["correct"]
    assert time.time() - begin < 60  # a hang, not a speed
