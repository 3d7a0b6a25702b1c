"""eval.py beyond Pass@1 (pass@k, majorities, an evaluation that was stopped), and the sets of the benchmarks."""
import contextlib
import io
import json
from pathlib import Path
from statistics import fmean

from plumbing import flags, grade, judge

import pytest

import data
import eval as evaluation
import sample
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


def test_a_majority_counts_answers_not_spellings():
    """0.5 and 1/2 are one candidate with two votes; of candidates with as many votes the first wins; no answer is no vote."""
    r = evaluation.summary([row("0.5", "3", "\\frac{1}{2}", "3", "1/2", gold="0.5")], [1, 3, 5])
    assert [r[f"maj@{k}"][0] for k in (1, 3, 5)] == [pytest.approx(r["pass@1"][0]), 1.0, 1.0]  # of 5, 1 and 1 times k samples
    assert evaluation.summary([row("7", "7", "8", "7", "8", "8", "7")], [3])["maj@3"][0] == 0.5  # the seventh is in no block
    assert evaluation.summary([row("3", "7", "3", "7")], [4])["maj@4"][0] == 0
    assert evaluation.summary([row("7", "3", "3", "7")], [4])["maj@4"][0] == 1
    assert evaluation.summary([row(None, None, "7")], [2, 3])["maj@2"][0] == 0
    assert evaluation.summary([row(None, None, "7")], [3])["maj@3"][0] == 1


def test_where_right_samples_name_no_answer_there_is_no_majority():
    """A reward of one's own may return a number alone: a majority of 0% beside a pass@k of 100% would be said of no vote."""
    rows = [row("7", "3", "7"), row("7", "7", "7")]
    for s in rows[0]["samples"]:
        s["given"] = None
    r = evaluation.summary(rows, [2])
    assert r["pass@2"][0] == 1 and "maj@2" not in r


def cli(*argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = evaluation.main([*argv, "--json"])
    return code, out.getvalue().splitlines()


def results(lines):
    return json.loads(lines[-1])["results"]


@pytest.fixture
def sets(tmp_path):
    for name, n in (("a", 7), ("b", 3)):
        rows = ({"question": f"What is {i}+{n}?", "answer": i + n} for i in range(n))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}"


def test_an_evaluation_goes_on_where_it_was_stopped_and_ends_the_same(sets, tmp_path, monkeypatch):
    """Stopped after any part: what is done is not sampled again, and the numbers are those of an undisturbed one, which writes no
    parts at all."""
    argv = ["--data", sets, "--n", "2", "--max-new-tokens", "4", "--k", "1,2", "--max-rows", "1", "--quant", "none"]
    code, lines = cli(*argv)
    want, generate, calls = results(lines), sample.generate, []
    assert code == 0 and [r["questions"] for r in want] == [7, 3] and "pass@2" in want[0] and "maj@2" in want[0]

    def stopped(*args, **kw):
        calls.append(len(args[1]))
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return generate(*args, **kw)

    monkeypatch.setattr(sample, "generate", stopped)
    out, codes = tmp_path / "out.jsonl", []
    while not codes or codes[-1] == 130:
        code, lines = cli(*argv, "--out", str(out))
        codes.append(code)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert len({(r["data"], r["question"]) for r in rows}) == len(rows)
    assert codes[-1] == 0 and len(codes) >= 4 and results(lines) == want
    assert calls[0] == 2 and sum(calls[::2]) == 10  # parts of two questions
    with monkeypatch.context() as m:
        m.setattr(sample, "generate", generate)
        assert cli(*argv, "--max-rows", "99", "--out", str(tmp_path / "once.jsonl"))[0] == 0
    assert out.read_bytes() == (tmp_path / "once.jsonl").read_bytes()
    before, n = out.read_bytes(), len(calls)
    assert cli(*argv, "--out", str(out))[0] == 0 and len(calls) == n and out.read_bytes() == before


@pytest.mark.parametrize("kept", [(0, 2, 3), (1, 0), (*range(10), 6)], ids=["a hole", "shuffled", "twice"])
def test_rows_are_known_by_their_questions_not_by_their_place(sets, tmp_path, capsys, kept):
    """With a line deleted its question was never asked, the next one twice, and the mean was of those."""
    out = tmp_path / "out.jsonl"
    argv = ["--data", sets, "--n", "1", "--max-new-tokens", "4", "--quant", "none", "--out", str(out)]
    assert cli(*argv)[0] == 0
    rows = out.read_text().splitlines(keepends=True)
    before = "".join(rows[i] for i in kept)
    out.write_text(before)
    assert cli(*argv)[0] == 2 and "--out: its rows are not of the first questions" in capsys.readouterr().err
    assert out.read_text() == before


def test_results_of_another_evaluation_are_not_taken_for_this_one(sets, tmp_path, capsys):
    """Another temperature, other questions, or a file that is something else: kept, and refused."""
    out = tmp_path / "out.jsonl"
    argv = ["--data", sets, "--n", "1", "--max-new-tokens", "4", "--quant", "none", "--out", str(out)]
    assert cli(*argv)[0] == 0
    before = out.read_bytes()
    for change in (["--temperature", "1"], ["--seed", "1"], ["--limit", "2"], ["--prompt-style", "boxed"], ["--data", sets.split(",")[0]]):
        assert cli(*argv, *change)[0] == 2
        assert f"--out {out}: holds something else" in capsys.readouterr().err and out.read_bytes() == before
    assert cli(*argv, "--max-rows", "2", "--k", "1", "--card-share", "0.5", "--engine", "plain")[0] == 0  # none changes what is drawn


def test_a_reward_of_ones_own_is_asked_once_a_sample(tmp_path, sets):
    (tmp_path / "r.py").write_text("def f(text, row):\n    return {'reward': 1, 'given': 5}\n")
    code, lines = cli("--data", sets, "--n", "2", "--max-new-tokens", "2", "--k", "2", "--reward", f"{tmp_path / 'r.py'}:f", "--quant", "none")
    assert code == 0 and results(lines)[0]["maj@2"][0] == results(lines)[0]["pass@2"][0] == 1


# ---- sets


def hub(monkeypatch, folder):
    """huggingface_hub as a folder; returns what was asked of it."""
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download",
                        lambda repo, repo_type, allow_patterns: asked.append((repo, allow_patterns)) or str(folder))
    return asked


@pytest.mark.parametrize(("name", "rows"), [("gsm8k", 1319), ("math500", 500), ("aime24", 30), ("aime25", 30), ("amc23", 40)])
def test_each_benchmark_is_counted(monkeypatch, tmp_path, name, rows):
    """A download that ends early is a smaller, easier or harder benchmark under the same name."""
    hub(monkeypatch, tmp_path)
    monkeypatch.setitem(data.HUB, "gsm8k", "openai/gsm8k")  # whatever folder it is in
    for n in (rows, rows - 1, rows + 1):
        (tmp_path / "test.jsonl").write_text('{"problem": "q", "answer": "1"}\n' * n)
        if n == rows:
            assert len(data.load(name, "test")) == rows and len(data.load(name, "test", n=5)) == 5
        else:
            with pytest.raises(ValueError, match=rf"test\.jsonl: {n} rows, {name} has {rows}"):
                data.load(name, "test", n=5)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sets are not beside the repository")
@pytest.mark.parametrize(("name", "rows"), [("gsm8k", 1319), ("math500", 500), ("aime24", 30), ("aime25", 30), ("amc23", 40)])
def test_the_real_sets_have_these_counts(name, rows):
    assert len(data.load(SHARED / name, "test")) == rows == data.TEST_ROWS[name]


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
            table = pa.table({"prompt": [f"{other} {i}"], "solution": ["\\frac{1}{2}"], "llama8b_solve_rate": [i / 2]})
            pq.write_table(table, tmp_path / other / f"train-0000{i}-of-00002.parquet")
    asked = hub(monkeypatch, tmp_path)
    args = flags.parse(train.COMMAND, ["--model", "m", "--data", "bigmath", "--levels", levels, "--eval-n", "0", "--out", str(tmp_path / "run")])
    rows, held = train.questions(args)
    assert [r["question"] for r in rows] == [f"{folder} 0", f"{folder} 1"] and rows[0]["answer"] == "\\frac{1}{2}" and held == []
    assert asked == [("open-r1/Big-Math-RL-Verified-Processed", [f"{folder}/*train{end}" for end in (".jsonl", ".parquet", "-*.parquet")])]
    assert data.main(["--data", "bigmath", "--split", "train", "--levels", levels]) == 0  # which it could not be told
    assert capsys.readouterr().out.count(f'"prompt": "{folder}') == 2


@pytest.mark.skipif(not SHARED.is_dir(), reason="the sets are not beside the repository")
def test_math_train_is_read_by_its_columns():
    """prompt, solution and a level from 1 to 5."""
    rows = data.load(SHARED / "math_train", "train", levels=[4, 5])
    assert len(rows) > 1000 and {r["level"] for r in rows} == {4, 5}
    assert all(r["question"] == r["prompt"] and r["answer"] for r in rows)
