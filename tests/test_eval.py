"""Evaluation: what is counted, that the adapter is applied, and what the command line refuses. Embedded model, CPU."""
import contextlib
import inspect
import io
import json
import math
import shutil
from pathlib import Path

from plumbing.tokenizer import Tokenizer

import pytest
import torch

import aqn
import data
import eval as evaluation
import lora
import model as qwen
import sample
from lab import chat
from tests.conftest import exit_code

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets" / "tiny"


@pytest.fixture(scope="module")
def tok():
    return Tokenizer(TINY)


@pytest.fixture
def model(tok):
    m = qwen.load(TINY, dtype=torch.float32)
    m.valid_vocab = len(tok)
    return m


def adapter(folder, scale):
    """An adapter of the embedded model whose B is `scale` times a random matrix."""
    m = qwen.load(TINY, dtype=torch.float32)
    lora.add_lora(m, 4, 4.0)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, layer in lora.lora_layers(m):
            layer.B.copy_(scale * torch.randn(layer.B.shape, generator=g))
    lora.save_adapter(m, folder)
    return str(folder)


def cli(*argv):
    """stdout lines of `python eval.py ...`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        evaluation.main([*argv])
    return out.getvalue().splitlines()


def scripted(monkeypatch, tok, texts):
    """sample.generate says these: texts[p][j], a trailing ... meaning cut at the limit."""

    def generate(model, prompts, n=1, *_, **__):
        return [[sample.Sample(tok.encode(t.removesuffix("...")), [], not t.endswith("...")) for t in group[:n]]
                for group in texts[: len(prompts)]]

    monkeypatch.setattr(sample, "generate", generate)


def test_a_file_that_was_trained_on_is_warned_of(tmp_path, capsys):
    """All its rows are asked, and nine tenths of them are the training set: without a word that was called pass@1."""
    path, home = tmp_path / "mine.jsonl", adapter(tmp_path / "a", 0.1)
    path.write_text('{"question": "What is 1+1?", "answer": "2"}\n')
    few = ["--adapter", home, "--quant", "none", "--n", "1", "--max-new-tokens", "1"]
    for own, warned in (({}, False), ({"data": "arithmetic"}, False), ({"data": str(path)}, True)):
        (tmp_path / "a" / "policy.json").write_text(json.dumps(own))
        assert evaluation.main([*few, "--data", str(path)]) == 0
        assert (f"--data {path}: most of its questions were trained on" in capsys.readouterr().err) == warned


def test_who_evaluates_by_another_reward_than_was_trained_by_is_warned(tmp_path, capsys):
    """The run's accuracy is of its own reward, eval.py's of the style's: 80% there and 3% here are no change of the policy."""
    home, own = adapter(tmp_path / "a", 0.1), tmp_path / "own.py"
    own.write_text("def score(text, row):\n    return 1.25\n")
    (tmp_path / "a" / "policy.json").write_text(json.dumps({"reward": f"{own}:score"}))
    few = ["--adapter", home, "--quant", "none", "--data", "arithmetic", "--limit", "1", "--n", "1", "--max-new-tokens", "1"]
    for more, warned in (([], True), (["--reward", f"{own}:score"], False)):
        assert evaluation.main([*few, *more]) == 0
        said = capsys.readouterr()
        assert ("warning: trained by --reward" in said.err) == warned == ("adapter: mean reward 1.250" not in said.out)


def test_what_is_counted(monkeypatch, tok, model):
    """Accuracy, format, length and truncation over all samples; the error over questions, since samples of one are not
    independent: 2, 1 and 0 right of 2 have mean 1/2 and a standard error of 1/2/sqrt(3)."""
    right, wrong, cut = "<think>.</think><answer>7</answer>", "7", "<think>1+1..."
    scripted(monkeypatch, tok, [[right, right], [right, wrong], [wrong, cut]])
    r = evaluation.evaluate(model, tok, [{"question": q, "answer": "7"} for q in "abc"], n=2)
    assert r["accuracy"] == 0.5 and r["stderr"] == pytest.approx(0.5 / math.sqrt(3))
    assert r["format"] == 0.5 and r["truncated"] == pytest.approx(1 / 6) and r["questions"] == 3 and r["skipped"] == 0
    lengths = [len(tok.encode(t.removesuffix("..."))) for t in (right, right, right, wrong, wrong, cut)]
    assert r["length"] == pytest.approx(sum(lengths) / 6)
    assert [row["accuracy"] for row in r["rows"]] == [1.0, 0.5, 0.0]
    assert evaluation.evaluate(model, tok, [{"question": "a", "answer": "7"}], n=1)["stderr"] is None
    base, better = ([{"accuracy": a} for a in values] for values in ([0.0, 0.5], [1.0, 0.5]))
    assert evaluation.gain(base, better) == (0.5, 0.5)


def test_a_cut_sample_counts_by_its_answer(monkeypatch, tok, model):
    """It may have answered before it went on: counted as wrong for its length, accuracy would fall with the limit alone. What it
    says is kept as it was said, without the prompt, whose instruction has tags as well."""
    right = "<think>.</think><answer>7</answer>"
    scripted(monkeypatch, tok, [[f"{right} and so on...", "<think>.</think><answer>7..."], [right, right.replace("7", "8")]])
    row, other = evaluation.evaluate(model, tok, [{"question": "a", "answer": "7"}, {"question": "b", "answer": "8"}], n=2)["rows"]
    assert [(s["text"], s["correct"], s["finished"]) for s in row["samples"]] == [
        (f"{right} and so on", True, False), ("<think>.</think><answer>7", False, False)]
    assert row["accuracy"] == 0.5 and [s["correct"] for s in other["samples"]] == [False, True]  # each by its own answer


def test_arguments_reach_the_sampler(monkeypatch, tok, model):
    """Without top-p or at another temperature, a number is not the paper's Pass@1; without the seed, a repetition repeats."""
    names = ["n", "max_new_tokens", "temperature", "top_p", "eos_ids", "seed", "max_rows"]
    seen = {}

    def generate(model, prompts, *args, **kw):
        seen.update(zip(names, args, strict=False), **kw)
        return [[sample.Sample([1], [-1.0], True)] * 3 for _ in prompts]

    monkeypatch.setattr(sample, "generate", generate)
    evaluation.evaluate(model, tok, [{"question": "q", "answer": "7"}], n=3, temperature=0.4, top_p=0.8,
                        max_new_tokens=20, max_rows=5, seed=6)
    want = [3, 20, 0.4, 0.8, tok.eos_ids, 6, 5]
    assert {name: seen[name] for name in names} == dict(zip(names, want, strict=True))


def test_flags_reach_the_evaluation(monkeypatch, tmp_path):
    """The command's table at another temperature, from another split or in another style than asked for; a loss told as a gain."""
    names, seen = inspect.signature(evaluation.evaluate), []

    def scripted(*a, **kw):
        seen.append(names.bind(*a, **kw).arguments)
        told = dict.fromkeys(("stderr", "format", "length", "truncated", "questions"), 1.0) | {"skipped": 0}
        return {**told, "accuracy": len(seen) / 4, "rows": [{"accuracy": len(seen) / 4}]}

    monkeypatch.setattr(evaluation, "evaluate", scripted)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": split, "answer": "2"}) + "\n")
    lines = cli("--data", str(tmp_path), "--adapter", adapter(tmp_path / "adapter", 0.5), "--n", "3", "--temperature", "0.4", "--top-p",
                "0.8", "--max-new-tokens", "20", "--max-prompt", "90", "--max-rows", "5", "--prompt-style", "boxed", "--seed", "6", "--k",
                "1,2")
    want = {"style": "boxed", "n": 3, "temperature": 0.4, "top_p": 0.8, "max_new_tokens": 20, "max_prompt": 90, "max_rows": 5, "seed": 6,
            "ks": [1, 2]}
    for call in seen:
        assert {name: call[name] for name in want} == want and [row["question"] for row in call["rows"]] == ["test"]
        assert call["score"]([("\\boxed{2}", {"answer": "2"})])[0]["reward"] == 1.2
    assert len(seen) == 2 and any("the adapter adds +25.0 points" in line for line in lines)
    cli("--data", str(tmp_path))
    cli("--data", str(tmp_path), "--temperature", "0")
    assert [(call["n"], call["temperature"], call["top_p"]) for call in seen[2:]] == [(4, 0.6, 0.95), (1, 0.0, 0.95)]


def test_rows_are_those_of_the_levels_and_the_seed(monkeypatch, tmp_path):
    """--levels that is parsed and forgotten; --limit that draws the same rows whatever the seed."""
    file, seen = tmp_path / "d.jsonl", []
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "1", "level": 1 + i % 5}) + "\n" for i in range(50)))
    told = dict.fromkeys(("accuracy", "stderr", "format", "length", "truncated", "questions"), 1.0) | {"skipped": 0, "rows": []}
    monkeypatch.setattr(evaluation, "evaluate", lambda model, tok, rows, **_: seen.append(rows) or told)
    cli("--data", str(file), "--levels", "2,3", "--limit", "5", "--seed", "4")
    assert seen == [data.load(file, "test", 5, 4, [2, 3])] != [data.load(file, "test", 5, 0, [2, 3])]


def test_the_table_tells_each_number_under_its_name(monkeypatch, tmp_path):
    """A column of another's numbers, an error that is the value, questions that were left out in silence."""
    arms = iter([(0.25, 0.03125, 0.0, 12.25, 0.5, 3, 2, [0.0, 0.5, 0.25]), (0.5, 0.0625, 0.75, 9.5, 0.125, 3, 0, [0.5, 0.5, 0.5])])

    def scripted(*_, **__):
        *numbers, accuracies = next(arms)
        names = ("accuracy", "stderr", "format", "length", "truncated", "questions", "skipped")
        return {**dict(zip(names, numbers, strict=True)), "pass@2": (0.625, 0.25),
                "rows": [{"accuracy": a} for a in accuracies]}

    monkeypatch.setattr(evaluation, "evaluate", scripted)
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    lines = cli("--data", "d.jsonl", "--adapter", adapter(tmp_path / "adapter", 0.5))
    many = "pass@2 62.5% (s.e. 25.0)"
    assert [" ".join(line.split()) for line in lines] == [
        "data model pass@1 s.e. format length cut questions", "d.jsonl base 25.0% 3.1 0.0% 12.2 50.0% 3",
        "d.jsonl adapter 50.0% 6.2 75.0% 9.5 12.5% 3", f"d.jsonl, base: {many}", "d.jsonl, base: 2 questions skipped, longer than --max-prompt",
        "warning: d.jsonl, base: no completion follows the format; does --prompt-style fit the model?",
        f"d.jsonl, adapter: {many}", "d.jsonl: the adapter adds +25.0 points (s.e. 14.4)"]
    shutil.copy("d.jsonl", "a-set-of-a-long-name.jsonl")
    arms = iter((*[0.5] * 5, 2, 0, [right, right]) for right in (0.0, 1.0, 0.25, 0.5))
    lines = cli("--data", "d.jsonl,a-set-of-a-long-name.jsonl", "--adapter", str(tmp_path / "adapter"))
    assert {line.index("%") + 1 for line in lines[1:5]} == {lines[0].index("pass@1") + 6}, lines  # one column, whatever the names
    assert [line.split()[-4] for line in lines if "adds" in line] == ["+100.0", "+25.0"]  # each set's own


def test_files_of_one_name_are_two_sets(tmp_path):
    """Two folders' test.jsonl: the second's rows were taken for the first's. A set that is named twice is asked once."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.jsonl").write_text(json.dumps({"question": f"{name}?", "answer": "2"}) + "\n")
    both = [str(tmp_path / name / "d.jsonl") for name in "ab"]
    lines = cli("--data", ",".join([*both, both[0]]), "--n", "1", "--max-new-tokens", "1", "--quant", "none", "--out", str(tmp_path / "o.jsonl"))
    assert [line.split()[:2] for line in lines[1:3]] == [[path, "base"] for path in both]
    assert [json.loads(line)["data"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == both


def test_rows_are_kept_set_by_set_and_no_file_is_overwritten(tmp_path, monkeypatch, capsys):
    """Stopped in its second set, an evaluation lost the first as well; repeated, it replaced the rows of another."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": f"{name}?", "answer": "2"}) + "\n")
    out, real, calls = tmp_path / "o.jsonl", sample.generate, []

    def stopped(*args, **kw):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kw)

    monkeypatch.setattr(sample, "generate", stopped)
    argv = ["--data", f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", "--n", "1", "--max-new-tokens", "1", "--quant", "none", "--out", str(out)]
    assert evaluation.main(argv) == 130
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(f"{tmp_path}/")] == ["base"]
    before = out.read_bytes()
    assert [json.loads(line)["question"] for line in before.splitlines()] == ["a?"]
    assert exit_code(evaluation.main, argv) == 2 and f"--out {out}: exists already" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_answers_are_graded_in_the_style_they_were_asked_in(monkeypatch, tok, model):
    scripted(monkeypatch, tok, [["so \\boxed{7}"]])
    r = evaluation.evaluate(model, tok, [{"question": "q", "answer": "7"}], style="boxed", n=1)
    assert (r["format"], r["accuracy"]) == (1.0, 1.0)


def test_noise_never_reaches_an_evaluation(tok, model):
    """AQN's noise is off while accuracy is measured, and is what it was afterwards."""
    rows = data.load("arithmetic", "test", 6)
    clean = evaluation.evaluate(model, tok, rows, n=1, max_new_tokens=24)
    aqn.set_noise(model, 0.5, seed=1)
    before = model.layers[0].input_layernorm.noise.clone()
    assert evaluation.evaluate(model, tok, rows, n=1, max_new_tokens=24) == clean
    assert torch.equal(model.layers[0].input_layernorm.noise, before) and before.any()


def test_long_prompts_are_skipped_and_counted(tok, model):
    rows = [{"question": "What is 1+1?", "answer": "2"}, {"question": "1" * 90, "answer": "2"}]
    r = evaluation.evaluate(model, tok, rows, n=1, max_prompt=60, max_new_tokens=8)
    assert (r["questions"], r["skipped"]) == (1, 1)
    with pytest.raises(ValueError, match="--max-prompt"):
        evaluation.evaluate(model, tok, rows, n=1, max_prompt=3)


def test_the_adapter_is_applied_and_the_base_is_the_base(tmp_path):
    """The evaluation this project replaces never applied its adapter. Here the base's rows are those of a run without one,
    the adapter's are others, and both stand in one table."""
    common = ["--limit", "6", "--n", "2", "--max-new-tokens", "24"]
    folder = adapter(tmp_path / "adapter", 0.5)
    alone = cli(*common, "--out", str(tmp_path / "alone.jsonl"))
    both = cli(*common, "--adapter", folder, "--out", str(tmp_path / "both.jsonl"))
    alone_rows = [json.loads(line) for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    both_rows = [json.loads(line) for line in (tmp_path / "both.jsonl").read_text().splitlines()]
    assert len(alone_rows) == 6 and both_rows[:6] == alone_rows
    assert {r["model"] for r in both_rows[6:]} == {"adapter"}
    assert [r["samples"] for r in both_rows[6:]] != [r["samples"] for r in alone_rows]
    assert [line.split()[1] for line in both[1:3]] == ["base", "adapter"] and both[1] == alone[1]
    gained, error = (100 * x for x in evaluation.gain(both_rows[:6], both_rows[6:]))
    assert [line for line in both if "adds" in line] == [f"arithmetic: the adapter adds {gained:+.1f} points (s.e. {error:.1f})"]


@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_an_adapter_that_changes_nothing_is_an_error(tmp_path, capsys, scale):
    folder = adapter(tmp_path / "adapter", scale)
    assert exit_code(evaluation.main, ["--limit", "2", "--adapter", folder]) == 2
    err = capsys.readouterr().err
    assert "--adapter" in err and "changes nothing" in err


@pytest.mark.parametrize(("argv", "says"), [
    (["--max-prompt", "3"], "--max-prompt 3"),
    (["--max-new-tokens", "9999"], "9999"), (["--max-new-tokens", "480"], "and 480 new ones pass the model's 512 positions"),
    (["--data", "arithmetic,long.jsonl"], "a prompt's"),
])
def test_bad_input_is_one_line_and_exit_code_2(argv, says, capsys, monkeypatch, tmp_path):
    """Before anything is answered: of two sets the first was, for nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "1+1 " * 300, "answer": "2"}) + "\n")
    monkeypatch.setattr(sample, "generate", None)
    assert exit_code(evaluation.main, ["--limit", "2", *argv]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and says in last


def test_the_embedded_model_is_half_trained(tok):
    """In NVFP4 and sampled as an evaluation samples, it is right on some held-out problems and wrong on others: the demo has
    something to learn, and something to learn from."""
    m = qwen.load(TINY, dtype=torch.float32, quant="nvfp4")
    m.valid_vocab = len(tok)
    r = evaluation.evaluate(m, tok, data.load("arithmetic", "test", 80), n=1, max_new_tokens=96)
    assert 0.2 < r["accuracy"] < 0.5
    assert r["format"] > 0.6


def test_a_run_of_the_whole_model_takes_no_other(tmp_path, capsys):
    """--model beside such a --run was passed over, whatever it was."""
    (tmp_path / "model").mkdir()
    for main in (evaluation.main, chat.main):
        assert main(["--run", str(tmp_path), "--model", "tiny"]) == 2
        assert f"--model tiny: --run {tmp_path} holds a whole model" in capsys.readouterr().err
