"""Data sets, prompts and rewards. CPU, no network, no model."""
import json
import re
import subprocess
import sys
from pathlib import Path

from plumbing import arithmetic, grade
from plumbing.files import lines
from plumbing.reward import own_reward
from plumbing.tokenizer import SUFFIX, Tokenizer

import jinja2
import pytest

import data

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets" / "tiny"
SHARED = ROOT.parent / "shared" / "data"


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


# ---- reward

def tagged(answer):
    return f"<think>so</think><answer>{answer}</answer>"


def test_the_last_answer_counts():
    reward = data.reward(f"{tagged(1)} no: {tagged(2)}", "2")
    assert reward["correct"] and reward["format"]
    assert not data.reward(f"{tagged(2)} no: <answer>1</answer>", "2")["correct"]


def test_an_answer_cut_off_is_no_answer():
    """A completion that ends inside <answer> must not be graded by its first digits, nor by an
    answer it took back."""
    assert data.reward("<think>a</think><answer>4", "4")["reward"] == 0
    assert data.reward("<think>a</think><answer>4</answer> wait <answer>7", "4")["reward"] == 0


@pytest.mark.parametrize("text", [
    "42", "<answer>42</answer>", "<think>42", "<answer>42</answer><think>a</think>",
    "</think><answer>42</answer>", "<think><answer>42</answer></think>",
    "<think>a<answer>42</answer>", "<think>a</think> so <answer>42</answer>"])
def test_format_needs_thought_then_answer(text):
    assert not data.reward(text, "42")["format"]


@pytest.mark.parametrize("text", [
    "<think>is it <answer>42</answer>", "<think>is it <answer>42</answer>?</think>", "is it <answer>42</answer>?</think> no",
    "<think>a</think> <think><answer>42</answer></think>"])
def test_an_answer_inside_a_thought_is_no_answer(text):
    """A model that wrote all its guesses there was paid for the last one. The prompt may have opened the thought."""
    assert data.reward(text, "42") == {"reward": 0, "correct": False, "format": False, "given": None}
    assert data.reward(f"{text}</think><answer>42</answer>", "42")["correct"]


def test_format_and_correctness_add_up():
    def value(text, style="tags"):
        return data.reward(text, "42", style)["reward"]

    assert value("<think>a</think>\n<answer> 42 </answer>") == pytest.approx(1.2)
    assert value("<think>a</think><answer>41</answer>") == pytest.approx(0.2)
    assert value("<answer>42</answer>") == pytest.approx(1.0)
    assert value("42") == 0
    assert value("it is \\boxed{42}", "boxed") == pytest.approx(1.2)
    assert value("it is 42.", "boxed") == pytest.approx(1.0)
    assert value("\\boxed{41}, then 42", "boxed") == pytest.approx(0.2)
    with pytest.raises(KeyError, match="poem"):
        value("42", "poem")


def test_boxed_braces_balance_and_the_last_box_counts():
    assert grade.last_boxed("\\boxed{\\frac{1}{2}} and \\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert grade.last_boxed("\\boxed{7} then \\boxed{8") == "7"
    assert grade.last_boxed("\\boxed{\\boxed{5}}") == "5"
    assert grade.last_boxed("no box {5}") is None
    assert data.reward("= 10-3 = 7", "7", "boxed")["correct"]
    assert data.reward("it fell by -3 in all", "-3", "boxed")["correct"]
    assert data.reward("costs $1,234.50.", "1234.5", "boxed")["correct"]
    assert data.reward("so 1/2 of them", "0.5", "boxed")["correct"]
    assert data.reward("so 50% of them", "1/2", "boxed")["correct"]


@pytest.mark.parametrize(("text", "term"), [
    ("it is .5.", ".5"), ("x=-.25", "-.25"), ("costs $.50", "$.50"), ("a .5% rise", ".5%"), ("wait...5", "5"), ("see Sec.3", "3"), ("12.", "12"),
    ("12!", "12"), ("so 3/4 of it", "3/4"), ("3 / 4 of it", "3 / 4"), ("it is 10^5.", "10^5"), ("10 ^ 5", "10 ^ 5"), ("12 500 in all", "12 500"), ("12'500", "12'500"),
    ("2 1/3 cups", "2 1/3"), ("so x^2", "x^2"), ("2x+1", "2x+1"), ("2x + 1.", "2x + 1"), ("3 * 4", "3 * 4"), ("3 \\times 4 is 12", "12"),
    ("\\frac{3}{4}.", "\\frac{3}{4}"), ("3\\sqrt{2} cm", "3\\sqrt{2}"), ("at 5:30", "5:30"), ("3 million people", "3 million"), ("9π", "9π"),
    ("apples - 5", "5"), ("Items-5", "5"), ("(-5)", "(-5)"), ("x_1 = 7 apples", "7"), ("none", None), ("", None),
    ("The answer is \u22125", "\u22125"), ("it lost \u2212$5.", "\u2212$5"), ("10\u22123 = 7", "7"), ("10\u22127", "10\u22127")])
def test_without_a_box_the_last_term_is_the_answer_and_it_is_whole(text, term):
    """The last number was torn out of its term, and right where that was asked for: 3/4 was 4, 10^5 5, 12 500 500, x^2 2, and .5 5."""
    assert data.reward(text, "0", "boxed")["given"] == term


def test_a_number_torn_out_of_its_term_is_no_answer():
    for text, torn, right in (("3/4", "4", "0.75"), ("10^5", "5", "100000"), ("12 500", "500", "12500"), ("x^2", "2", "x^2"),
                              ("2 1/3", "1/3", "7/3"), ("(3, 4)", "4", None), ("2x+1", "1", "2x+1"), ("3*4", "4", None)):
        assert not data.reward(f"so it is {text}", torn, "boxed")["correct"], text
        assert right is None or data.reward(f"so it is {text}", right, "boxed")["correct"], text


# ---- a reward of one's own

def own(tmp_path, body, name="score"):
    (tmp_path / "own.py").write_text(body)
    return own_reward(f"{tmp_path / 'own.py'}:{name}")


def test_own_reward_sees_the_whole_row_and_may_return_a_number(tmp_path):
    """A number is the reward; 1 and above counts as right, and there is no format to miss."""
    grade = own(tmp_path, "def score(text, row):\n    return len(text) / row['length']\n")
    row = {"question": "q", "answer": "2", "length": 4}
    assert grade("abcd", row) == {"reward": 1.0, "correct": True, "format": True, "given": None}
    half = grade("ab", row)
    assert half == {"reward": 0.5, "correct": False, "format": True, "given": None}
    assert set(half) == set(data.reward("2", "2"))


def test_own_reward_may_return_a_dict(tmp_path):
    """"correct" and "format" are what it says, and by default what they are for a number."""
    grade = own(tmp_path, "def score(text, row):\n    return row['score']\n")
    full = {"reward": -1, "correct": True, "format": False, "given": "7"}
    assert grade("", {"score": full}) == full
    assert grade("", {"score": {"reward": 2}})["correct"] is True
    assert grade("", {"score": True})["reward"] == 1.0


def test_the_levels_of_math_are_read(tmp_path):
    """"Level 5" was none in [5], and "10" none in [10]."""
    levels = ["Level 5", "Level 1", 5, "Level ?", "10"]
    path = write(tmp_path / "a.jsonl", [{"problem": str(i), "solution": "\\boxed{1}", "level": level} for i, level in enumerate(levels)])
    assert [row["question"] for row in data.load(path, levels=[5])] == ["0", "2"]
    assert [row["question"] for row in data.load(path, levels=[10])] == ["4"]


@pytest.mark.parametrize("value", ["numpy.float64(1) > 0", "numpy.float32(1)", "torch.tensor(True)", "torch.tensor(1.0)"])
def test_own_reward_may_be_a_number_of_numpy_or_torch(tmp_path, value):
    """abs(given - gold) < 1e-6 of numpy's numbers is a bool of numpy's."""
    grade = own(tmp_path, f"import numpy, torch\ndef score(text, row):\n    return {value}\n")
    assert grade("", {}) == {"reward": 1.0, "correct": True, "format": True, "given": None}


def test_own_reward_may_use_dataclasses_and_the_project(tmp_path):
    """A module outside sys.modules breaks dataclasses with postponed annotations."""
    grade = own(tmp_path, """from __future__ import annotations
from dataclasses import dataclass
import data
import sample
@dataclass
class Score:
    r: float
def score(text, row):
    return Score(data.reward(text, row["answer"], "boxed")["reward"]).r / 2
""")
    assert grade("\\boxed{2}", {"answer": "2"})["reward"] == pytest.approx(0.6)


def test_own_reward_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    """`python own.py` could, and so the error told to run what ran."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("TWO = 2\n")
    grade = own(tmp_path, "from beside_it import TWO\ndef score(text, row):\n    return TWO\n")
    assert grade("", {})["reward"] == 2


def test_a_reward_beside_what_a_script_replaces_is_that_scripts(tmp_path):
    """Loaded a second time, the file replaced its own replacement: a penalty was taken twice."""
    (tmp_path / "mine.py").write_text(f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from plumbing.reward import own_reward
import data
data.reward = lambda had=data.reward.__name__: "once" if had == "reward" else "twice"
def score(text, row):
    return float(data.reward() == "once")
if __name__ == "__main__":
    print(own_reward(sys.argv[1])("", dict())["reward"])
""")
    for spec in (f"{tmp_path / 'mine.py'}:score", "mine.py:score"):
        done = subprocess.run([sys.executable, "mine.py", spec], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == "1.0\n", done.stderr


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "__import__('numpy').float64('nan')", "-1e30", "None", "'one'", "{}", "[1]",
                                   "{'reward': None}", "{'correct': True}", "1j"])
def test_an_own_reward_that_is_no_finite_number_is_an_error(tmp_path, value):
    """One NaN among a group's rewards would make NaN of every advantage in it."""
    grade = own(tmp_path, f"def score(text, row):\n    return {value}\n")
    with pytest.raises(ValueError, match=r"--reward .*own\.py:score: returned .*number within"):
        grade("text", {})


def test_an_own_reward_that_raises_shows_its_traceback(tmp_path):
    """As a ValueError it would end in one line, which does not say where."""
    grade = own(tmp_path, "import json\n\ndef f(text, row):\n    return json.loads(text)\n", "f")
    with pytest.raises(RuntimeError, match=r"--reward .*own\.py:f: raised JSONDecodeError") as e:
        grade("{", {})
    assert any(entry.path.name == "own.py" for entry in pytest.ExceptionInfo.from_exception(e.value.__cause__).traceback)


def test_an_own_reward_changes_no_row_and_cannot_end_the_run(tmp_path):
    """The answer it appended to was the gold of the next sample; exit() in a completion that it ran ended a run with success."""
    grade, row = own(tmp_path, "def f(text, row):\n    row['answer'] += '0'\n    return 1\n", "f"), {"answer": "7"}
    assert grade("", row)["correct"] and row == {"answer": "7"}
    with pytest.raises(RuntimeError, match="raised SystemExit: 0"):
        own(tmp_path, "def f(text, row):\n    exit(0)\n", "f")("", {})
    with pytest.raises(KeyboardInterrupt):  # ctrl-C is no error of the reward's
        own(tmp_path, "def f(text, row):\n    raise KeyboardInterrupt\n", "f")("", {})


@pytest.mark.parametrize("mark", ["'False'", "float('nan')", "0.5", "None"])
def test_an_own_reward_says_right_or_wrong(tmp_path, mark):
    """The text "False" is true: every sample was right."""
    grade = own(tmp_path, f"def f(text, row):\n    return {{'reward': 1, 'format': {mark}}}\n", "f")
    with pytest.raises(ValueError, match='as "format"; it is True or False, or left out'):
        grade("", {})


# ---- data sets

def test_jsonl_columns_of_the_usual_sets(tmp_path, capsys):
    """question/answer, problem/answer (with a worked solution beside it), prompt/solution, and
    GSM8K's ####."""
    rows = [{"question": "q", "answer": "a #### in the work <<1+1=2>>\n#### 1,234"},
            {"problem": "q", "solution": "long", "answer": 0},
            {"prompt": "q", "solution": "0"},
            {"problem": "q", "solution": "so \\boxed{\\frac{1}{2}}."}]
    got = data.load(write(tmp_path / "a.jsonl", rows))
    assert [r["answer"] for r in got] == ["1,234", "0", "0", "\\frac{1}{2}"]
    assert {r["question"] for r in got} == {"q"} and not capsys.readouterr().err  # none is left out


def test_files_of_other_editors_are_read(tmp_path):
    """A mark at the beginning, lines that end as on Windows, blank lines: none is part of a row."""
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"question": q, "answer": "1"}).encode() for q in "ab"]
    path.write_bytes(b"\xef\xbb\xbf" + rows[0] + b"\r\n\r\n" + rows[1] + b"\r\n")
    assert [r["question"] for r in data.load(path)] == ["a", "b"]
    assert [*lines(path)] == [(1, rows[0].decode()), (3, rows[1].decode())]
    path.write_bytes(rows[0] + b"\n\n{}\n")
    with pytest.raises(ValueError, match="a.jsonl, row 3: needs question"):  # it said row 2
        data.load(path)


def test_folder_and_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path / "train.jsonl", [{"question": "a", "answer": "1"}])
    pq.write_table(pa.table({"question": ["b"], "answer": ["2"]}), tmp_path / "test.parquet")
    assert data.load(tmp_path, "train")[0]["question"] == "a"
    assert data.load(str(tmp_path), "test")[0] == {"question": "b", "answer": "2"}
    assert data.load(tmp_path / "test.parquet")[0]["answer"] == "2"
    levels = pa.table({"question": ["a", "b"], "answer": ["1", "2"], "level": [5.0, float("nan")]})
    pq.write_table(levels, tmp_path / "pandas.parquet")  # which writes NaN for nothing
    assert [row["level"] for row in data.load(tmp_path / "pandas.parquet")] == [5, None]
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl"):
        data.load(tmp_path, "train")


def test_parquet_in_parts_is_read_whole_and_in_order(tmp_path):
    """Sets of the hub come in parts; two of three would be a smaller set, two folders two sets."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def part(path, question):
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"question": [question], "answer": ["1"]}), path)

    for i in (2, 0, 1):
        part(tmp_path / "data" / f"train-0000{i}-of-00003.parquet", f"q{i}")
    assert [r["question"] for r in data.load(tmp_path, "train")] == ["q0", "q1", "q2"]
    part(tmp_path / "other" / "train-00000-of-00001.parquet", "q")
    with pytest.raises(ValueError, match="in several folders; choose one: .*data, .*other"):
        data.load(tmp_path, "train")
    (tmp_path / "data" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(ValueError, match="2 of 3 parts"):
        data.load(tmp_path / "data", "train")
    (tmp_path / "data" / "train-00000-of-00003.parquet").write_text("no parquet")
    part(tmp_path / "data" / "train-00001-of-00003.parquet", "q")
    with pytest.raises(ValueError, match=r"train-00000-of-00003\.parquet: not a parquet file"):
        data.load(tmp_path / "data", "train")


@pytest.mark.parametrize(("lines", "says"), [
    (["{}"], r"a\.jsonl, row 1"), ([], "no rows"),
    (['{"question": "q", "answer": "1"}', '{"question": "q"}'], "row 2: needs question and answer"),
    (['{"question": " ", "answer": "1"}'], "row 1: needs question"), (['{"question": "q", "answer"'], "row 1: not JSON"), (['{"question": "q", "answer": NaN}'], "row 1: needs question and answer"), (["[1]"], "row 1: not a JSON object"),
    (['{"question": ["q"], "answer": "1"}'], "row 1: needs")])
def test_a_bad_row_is_named(tmp_path, lines, says):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=says):
        data.load(path)


def test_a_solution_without_its_answer_is_no_gold(tmp_path, capsys):
    """The whole worked solution was the gold, which no answer matched: such a row taught nothing, at full cost. Beside a
    prompt, as Big-Math has it, a solution is the answer itself, unless it is worked out too."""
    rows = [{"problem": "a", "solution": "We add and get 7."}, {"question": "b", "solution": "7"}, {"problem": "c", "solution": "so \\boxed{7}"},
            {"prompt": "d", "solution": "7"}, {"prompt": "e", "solution": "We add the two and get 7."}, {"prompt": "f", "solution": "3+4\n= 7"},
            {"prompt": "g", "solution": "We add the two and get \\boxed{7}."}, {"problem": "h", "answer": "7", "solution": "We add."},
            {"problem": "i", "solution": "We add.\n#### 7"}]
    got = data.load(write(tmp_path / "a.jsonl", rows))
    assert [r["question"] for r in got] == [*"cdghi"] and {r["answer"] for r in got} == {"7"}
    assert "4 of 9 rows have an empty answer, or a solution without \\boxed{}" in capsys.readouterr().err


def test_a_tenth_in_float32_is_a_tenth(tmp_path):
    """Its answer was 0.10000000149011612, and so 0.1 was wrong."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"question": ["a", "b"], "answer": pa.array([0.1, 1e-7], pa.float32()), "rate": pa.array([None, 0.3], pa.float32())}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = data.load(tmp_path / "a.parquet")
    assert [row["answer"] for row in rows] == ["0.1", "1e-07"] and [row["rate"] for row in rows] == [None, 0.3]
    assert data.reward("<answer>0.1</answer>", rows[0]["answer"])["correct"]
    assert data.reward("<answer>10^{-7}</answer>", rows[1]["answer"])["correct"]


def test_levels_are_those_of_the_rows(tmp_path):
    """A row without one is neither kept nor passed over in silence."""
    rows = [{"prompt": p, "solution": "1", "level": l} for p, l in [("a", 2), ("b", 5)]]
    given = write(tmp_path / "b.jsonl", rows)
    assert [r["question"] for r in data.load(given, levels=[5])] == ["b"]
    with pytest.raises(ValueError, match="level"):
        data.load(given, levels=[1])
    some = write(tmp_path / "c.jsonl", [{**rows[0], "level": level} for level in (1, None)])
    with pytest.raises(ValueError, match=r"c\.jsonl: --levels needs .* in each row"):
        data.load(some, levels=[1])


def test_the_question_comes_before_a_prompt(tmp_path):
    """Sets that have both keep in "prompt" what another program made of the question."""
    row = {"prompt": "made of it", "problem": "p", "answer": "1"}
    path = write(tmp_path / "a.jsonl", [{**row, "question": "q"}, row])
    assert [r["question"] for r in data.load(path)] == ["q", "p"]


def test_n_rows_are_drawn_by_the_seed(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": str(i), "answer": "1"} for i in range(50)])

    def questions(seed):
        return [r["question"] for r in data.load(path, n=9, seed=seed)]

    assert questions(1) == questions(1) != questions(2)
    assert len(data.load(path, n=49)) == 49
    assert len(set(questions(1))) == 9 and questions(1) == sorted(questions(1), key=int)


# ---- arithmetic

def test_arithmetic_train_and_test_are_disjoint():
    """By construction: a chain's hash says which split it is in, in every form, for every seed."""
    train = {r["chain"] for seed in range(3) for r in arithmetic.problems("train", 3000, seed)}
    test = {r["chain"] for seed in range(3) for r in arithmetic.problems("test", 300, seed)}
    assert not train & test
    assert len(train) > 6000 and len(test) > 600


def test_arithmetic_answers_are_right_and_the_worked_solution_earns_full_reward():
    rows = data.load("arithmetic", "test", 400)
    assert {r["form"] for r in rows} == set(arithmetic.FORMS)
    for row in rows:
        assert 3 <= len(arithmetic.steps(row["chain"])) <= 5
        assert all(0 <= after < 200 for *_, after in arithmetic.steps(row["chain"]))
        assert data.reward(arithmetic.solution(row), row["answer"])["reward"] == pytest.approx(1.2)
        if row["form"] == "symbols":  # an answer worked out another way
            expression = re.fullmatch(r"What is ([0-9+*()-]+)\?", row["question"])[1]
            assert eval(expression) == int(row["answer"])


def test_every_form_asks_for_the_steps_of_its_chain():
    """Words for another number, a verb for the other sign, a step left out: the right answer to what is asked is called wrong."""
    words = {w: str(i) for i, w in enumerate("zero one two three four five six seven eight nine".split())}
    sign = {"add": "+", "finds": "+", "wins": "+", "buys": "+", "subtract": "-", "loses": "-", "sells": "-", "eats": "-"}
    times = {"double": "*2", "doubles": "*2", "triple": "*3", "triples": "*3"}
    told = set()
    for row in data.load("arithmetic", "train"):
        if row["form"] == "symbols":
            continue
        text = re.sub(r"[a-z]+", lambda m: words.get(m[0], m[0]), row["question"].partition(". How many")[0].rstrip("."))
        begin, *orders = text.split(", ")
        chain = re.search(r"[0-9][0-9+*-]*", begin)[0]
        for verb, k, *_ in (order.split() for order in orders):
            told.add(verb)
            chain += times.get(verb) or sign[verb] + k
        assert chain == row["chain"], row
    assert told == {*sign, *times}


def test_the_embedded_task_has_the_rows_that_the_readme_says():
    assert len(data.load("arithmetic", "train")) == 2048 and len(data.load("arithmetic", "test")) == 512
    assert data.load("arithmetic", "test", 9, 3) == arithmetic.problems("test", 9, 3)  # not training's, and by the seed


# ---- tokenizer and prompts

TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the embedded model's text files, to spoil."""
    for name in TEXT_FILES:
        (tmp_path / name).write_text((TINY / name).read_text())
    return tmp_path


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_prompt_is_the_checkpoints_own_template():
    tok = Tokenizer(TINY)
    ids = tok.prompt_ids("What is 1+1?", "boxed")
    assert tok.tokenizer.decode(ids, skip_special_tokens=False) == (
        f"<|im_start|>user\nWhat is 1+1?\n{SUFFIX['boxed']}<|im_end|>\n"
        "<|im_start|>assistant\n")
    assert tok.encode("1234") == [tok.encode(d)[0] for d in "1234"]
    text = "<think>1+1=2</think><answer>2</answer>"
    assert tok.decode([*tok.encode(text), tok.eos_ids[-1]]) == text
    assert len(tok) <= json.loads((TINY / "config.json").read_text())["vocab_size"]


def test_the_embedded_tokenizer_is_what_its_script_writes(tmp_path, monkeypatch):
    """The embedded model was trained on these tokens and these prompts; a change to either must
    come with a new model."""
    monkeypatch.syspath_prepend(str(TINY))
    import make

    make.write_tokenizer(tmp_path, seed=0)
    for name in TEXT_FILES:
        made, shipped = (json.loads((folder / name).read_text()) for folder in (tmp_path, TINY))
        assert made == shipped, name


def test_every_way_to_end_a_turn_is_an_eos(checkpoint):
    tok = Tokenizer(checkpoint)
    ends = [tok.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert tok.eos_ids == sorted(ends)
    (checkpoint / "generation_config.json").unlink()
    edit(checkpoint / "config.json", eos_token_id=ends[1])
    assert Tokenizer(checkpoint).eos_ids == sorted(ends)
    (checkpoint / "config.json").unlink()
    assert Tokenizer(checkpoint).eos_ids == [tok.tokenizer.token_to_id("<|im_end|>")]


def test_template_functions_of_hub_checkpoints(checkpoint):
    template = ("{% for m in messages %}\n  {% if loop.last %}\n{{ m | tojson }}\n  {% break %}\n"
                "{% endif %}{% endfor %}{{ strftime_now('%Y')[:2] }} {{ 3 * 2 ** 3 }}")
    edit(checkpoint / "tokenizer_config.json", chat_template=template)
    tok = Tokenizer(checkpoint)
    turn = tok.chat([{"role": "user", "content": "<é>"}])
    assert turn == '{"role": "user", "content": "<é>"}\n20 24'
    edit(checkpoint / "tokenizer_config.json", chat_template="{{ raise_exception('no tools') }}")
    with pytest.raises(ValueError, match="no tools"):
        Tokenizer(checkpoint).chat([])
    edit(checkpoint / "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(jinja2.exceptions.SecurityError, match="unsafe"):  # it is code that was downloaded
        Tokenizer(checkpoint).chat([])


def test_special_tokens_are_the_templates_own(checkpoint):
    """Llama's templates write bos_token, and its tokenizer adds another where it is let; a template
    that is handed none begins without it."""
    edit(checkpoint / "tokenizer_config.json", bos_token="<|endoftext|>", eos_token="<|im_end|>",
         chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    bos, end = (Tokenizer(TINY).tokenizer.token_to_id(t)
                for t in ("<|endoftext|>", "<|im_end|>"))
    special = {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
              {"Sequence": {"id": "A", "type_id": 0}}]
    edit(checkpoint / "tokenizer.json", post_processor={
        "type": "TemplateProcessing", "single": single, "pair": single,
        "special_tokens": {"<|endoftext|>": special}})
    tok = Tokenizer(checkpoint)
    assert tok.tokenizer.encode("7").ids == [bos, *tok.encode("7")]
    assert tok.encode(tok.chat([{"role": "user", "content": "7"}])) == [bos, *tok.encode("7"), end]


def test_ids_end_with_the_last_one_also_where_some_are_missing(checkpoint):
    """Counted, they would end before it: a token that may be drawn would never be."""
    before = len(Tokenizer(checkpoint))
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    name = max(model["vocab"], key=model["vocab"].get)
    model["vocab"][name] += 30
    edit(checkpoint / "tokenizer.json", model=model)
    tok = Tokenizer(checkpoint)
    ids = tok.tokenizer.get_vocab()
    assert len(tok) == max(ids.values()) + 1 > len(ids) == before


def test_settings_may_name_tokens_in_full(checkpoint):
    """An added token is an object."""
    edit(checkpoint / "tokenizer_config.json", chat_template="7{{ eos_token }}", eos_token={"content": "<|im_end|>", "lstrip": False})
    (checkpoint / "generation_config.json").unlink()
    (checkpoint / "config.json").unlink()
    tok = Tokenizer(checkpoint)
    assert tok.eos_ids == [tok.tokenizer.token_to_id("<|im_end|>")]
    assert tok.chat([{"role": "user", "content": "7"}]) == "7<|im_end|>"


def test_a_template_may_lie_in_a_file_of_its_own(checkpoint):
    """As newer checkpoints have it; it comes before the one in tokenizer_config.json, as in transformers."""
    turn = [{"role": "user", "content": "7"}]
    assert "own" not in Tokenizer(checkpoint).chat(turn)
    (checkpoint / "chat_template.jinja").write_text("own: {{ messages[0].content }}")
    assert Tokenizer(checkpoint).chat(turn) == "own: 7"
    edit(checkpoint / "tokenizer_config.json", chat_template=None)
    assert Tokenizer(checkpoint).chat(turn) == "own: 7"


def test_a_template_is_told_that_there_are_no_tools(checkpoint):
    """It asked for them: an undefined variable is not none."""
    edit(checkpoint / "tokenizer_config.json", chat_template="{{ messages[0].content }}{% if tools is not none %}TOOLS{% endif %}")
    assert Tokenizer(checkpoint).chat([{"role": "user", "content": "7"}]) == "7"


def test_a_prompt_is_neither_cut_nor_padded_by_what_a_tokenizer_was_saved_with(checkpoint):
    """The end of the question and the assistant's turn were gone, without a word."""
    want = Tokenizer(checkpoint).prompt_ids("What is 1+1?")
    edit(checkpoint / "tokenizer.json", truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
         padding={"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                  "pad_token": "<|endoftext|>"})
    assert Tokenizer(checkpoint).prompt_ids("What is 1+1?") == want


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: not a tokenizer file"),
    (lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer\.json: not a tokenizer"),
    (lambda d: (d / "tokenizer_config.json").unlink(), r"tokenizer_config\.json"),
    (lambda d: (d / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json: not JSON"),
    (lambda d: edit(d / "tokenizer_config.json", chat_template=None), "no chat_template"),
    (lambda d: edit(d / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m.content }}"), "its chat template is broken .*end of template"),
    (lambda d: edit(d / "config.json", vocab_size=100),
     r"tokenizer\.json has [0-9]+ ids but .*config\.json says vocab_size 100"),
])
def test_a_bad_tokenizer_folder_is_named(checkpoint, spoil, says):
    spoil(checkpoint)
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        Tokenizer(checkpoint)


def test_long_prompts_are_skipped_and_counted():
    tok = Tokenizer(TINY)
    rows = [{"question": "What is 1+1?", "answer": "2", "level": 1}, {"question": "1" * 500, "answer": "2"}]
    kept, skipped = data.prompts(tok, rows, "tags", 200)
    assert skipped == 1 and kept == [{**rows[0], "ids": tok.prompt_ids("What is 1+1?")}]  # --reward sees all its columns
    assert data.prompts(tok, rows, "tags", len(kept[0]["ids"])) == (kept, 1)
    with pytest.raises(ValueError, match="--max-prompt 5"):
        data.prompts(tok, rows, "tags", 5)
    with pytest.raises(KeyError, match="poem"):
        data.prompts(tok, rows, "poem", 200)


@pytest.mark.skipif(not SHARED.is_dir(), reason="Qwen2.5's tokenizer is not beside the repository")
def test_qwen_tokenizer_and_template():
    """Qwen2.5: 151,665 ids, its default system prompt, both end tokens, one token a digit."""
    tok = Tokenizer(SHARED / "qwen2.5-tokenizer")
    assert len(tok) == 151665 and tok.eos_ids == [151645]
    text = tok.tokenizer.decode(tok.prompt_ids("Hi", "boxed"), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert text.endswith(f"<|im_start|>user\nHi\n{SUFFIX['boxed']}<|im_end|>\n"
                         "<|im_start|>assistant\n")
    assert len(tok.encode("1234")) == 4


def test_ids_is_no_column(tmp_path):
    """It was a prompt's tokens when --reward saw it."""
    path = write(tmp_path / "D.jsonl", [{"question": "q", "answer": "1", "ids": [1]}])
    with pytest.raises(ValueError, match="row 1: a column is called ids"):
        data.load(path)


def test_half_a_character_is_refused():
    """A byte of another encoding at a terminal ended a chat with a traceback."""
    with pytest.raises(ValueError, match=r"a\\udcff.*: is not UTF-8; write it in that"):
        Tokenizer(TINY).prompt_ids("a\udcff", "plain")
