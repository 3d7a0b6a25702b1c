"""Pass@k, and the sets of the benchmarks."""
from pathlib import Path
from statistics import fmean

from plumbing import datasets, flags, grade, judge

import pytest

import data
import eval as evaluation
import train

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def row(*given, gold="7"):
    samples = [{"text": "", "given": g, "correct": g is not None and g.strip("$") == gold, "format": True, "reward": 1.0, "length": 1,
                "finished": True} for g in given]
    return {"question": "q", "answer": gold, "accuracy": fmean(s["correct"] for s in samples), "samples": samples}


def test_pass_at_k_is_unbiased_and_not_the_share_of_questions_with_a_right_sample():
    """2 right of 4: any two samples hold a right one with chance 1 - 1/6; min(1, k * 1/2) would say 1."""
    r = evaluation.summary([row("7", "7", "8", "9"), row("1", "2", "3", "4")], [1, 2, 4])
    assert r["pass@1"][0] == r["accuracy"] == 0.25
    assert r["pass@2"][0] == pytest.approx((1 - 1 / 6) / 2) and r["pass@4"][0] == 0.5
    assert r["pass@2"][1] == pytest.approx((1 - 1 / 6) / 2)  # of two values, half their difference


# ---- sets


def hub(monkeypatch, folder):
    """The hub as a folder; returns what was asked of it."""
    asked = []
    monkeypatch.setattr(datasets.hub, "download", lambda place, kind, patterns: asked.append((place, [*patterns])) or folder)
    return asked


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sets are not beside the repository")
@pytest.mark.parametrize(("name", "rows"), [("gsm8k", 1319), ("math500", 500), ("aime24", 30), ("aime25", 30), ("amc23", 40)])
def test_the_real_sets_have_these_counts(name, rows):
    assert len(data.load(SHARED / name, "test")) == rows


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sets are not beside the repository")
@pytest.mark.parametrize("name", ["gsm8k", "aime24", "aime25", "amc23"])
def test_each_gold_number_is_itself_in_its_usual_spellings_and_no_other(monkeypatch, name):
    """All of GSM8K, AIME and AMC is graded without math-verify, which no machine may be too busy for."""
    monkeypatch.setattr(judge, "ask", lambda pairs: pytest.fail(f"asked {pairs}"))
    spellings = ("{0}", "${0}", "${0:,}", "{0}.0", "{0:,}", "{0} dollars", "{0} km/h", "x = {0}", "The answer is {0}.", "**{0}**", "\\boxed{{{0}}}",
                 "\\$ {0}", "({0})", "{0}\\text{{ apples}}", "#### {0}", "So they need {0} apples", "\\frac{{{1}}}{{2}}", "{1}/2", "${0}$", "\\( {0} \\)")
    others = ("{0}1", "{1}", "-{0}", "{0}.5", "1/{0}", "{0}x", "{0} or {1}", "{0}+0", "not {0}", "{0}^2", "\\sqrt{{{0}}}", "{0} million", "{0}, {1}")
    for gold in sorted({row["answer"] for row in data.load(SHARED / name, "test")}):
        n = int(float(gold.replace(",", "")))
        right = [gold, *(s.format(n, 2 * n) for s in spellings)] if "." not in gold else [gold]
        wrong = [s.format(n, 2 * n + 7919) for s in others if n not in (-1, 0, 1)]
        said = grade.same_all([(text, gold) for text in right + wrong])
        assert [t for t, ok in zip(right, said, strict=False) if not ok] == [], gold
        assert [t for t, ok in zip(wrong, said[len(right):], strict=True) if ok] == [], gold


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sets are not beside the repository")
@pytest.mark.parametrize(("name", "split"), [("math500", "test"), ("math_train", "train"), ("gsm8k", "train")])
def test_each_gold_answer_is_itself(name, split):
    golds = sorted({row["answer"] for row in data.load(SHARED / name, split)})
    assert len(golds) > 300 and not [g for g, ok in zip(golds, grade.same_all([(g, g) for g in golds]), strict=True) if not ok]


@pytest.mark.parametrize("levels", ["3,4,5", "4,5"])
def test_big_math_comes_by_configuration_in_several_parts(monkeypatch, tmp_path, capsys, levels):
    """The set it was made from asks for a login. Its rows have no level of their own: the configuration is the choice."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = "level_" + levels.replace(",", "_")
    for other in {"level_3_4_5", "level_4_5"}:
        (tmp_path / other).mkdir()
        for i in range(2):
            table = pa.table({"prompt": [f"{other} {i}"], "solution": ["\\frac{1}{2}"]})
            pq.write_table(table, tmp_path / other / f"train-0000{i}-of-00002.parquet")
    asked = hub(monkeypatch, tmp_path)
    args = flags.parse(train.COMMAND, ["--model", "m", "--data", "bigmath@v2", "--levels", levels, "--eval-n", "0", "--out", str(tmp_path / "run")])
    rows, held = data.questions(args)
    assert [r["question"] for r in rows] == [f"{folder} 0", f"{folder} 1"] and rows[0]["answer"] == "\\frac{1}{2}" and held == []
    assert asked == [("open-r1/Big-Math-RL-Verified-Processed@v2", [f"{folder}/*train{end}" for end in (".jsonl", ".parquet", "-*.parquet")])]
    assert [datasets.HUB[name] for name in ("math500", "aime24", "aime25", "amc23")] == [
        "HuggingFaceH4/MATH-500", "math-ai/aime24", "math-ai/aime25", "math-ai/amc23"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sets are not beside the repository")
def test_math_train_is_read_by_its_columns():
    """prompt, solution and a level from 1 to 5."""
    rows = data.load(SHARED / "math_train", "train", levels=[4, 5])
    assert len(rows) > 1000 and {r["level"] for r in rows} == {4, 5}
    assert all(r["question"] == r["prompt"] and r["answer"] for r in rows)
