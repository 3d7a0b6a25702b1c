"""The quantization bench on the embedded model: what it writes, resuming, and its statistics."""
import json
import math

from plumbing import checkpoint, datasets
from plumbing.tokenizer import Tokenizer

import pytest
import torch

import model as qwen
import sample
from lab import bench_quantization
from lab import bench_quantization as bench


@pytest.fixture
def folder(tmp_path):
    for split, n in (("train", 80), ("test", 4)):
        rows = [{"question": f"What is {i}+{i}*2?", "answer": f"{i}+{i}={2 * i} #### {4 * i}"}
                for i in range(1, n)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_the_table_is_measured_row_by_row_and_resumes(folder, shallow, monkeypatch, capsys):
    """A row that is in the file is kept as it is; each row carries its gap to the 16-bit model,
    paired by document."""
    out = folder / "r" / "q.json"
    argv = ["--model", str(shallow), "--data", str(folder), "--formats", "nvfp4", "--methods", "rtn",
            "awq", "--questions", "2", "--samples", "2", "--max-new-tokens", "4",
            "--sequences", "4", "--length", "32", "--device", "cpu", "--out", str(out)]
    bench.main(argv)
    rows = json.loads(out.read_text())["table"]
    measured = [(r["format"], r["method"]) for r in rows]
    assert measured == [("none", "-"), ("nvfp4", "rtn"), ("nvfp4", "awq")]
    log_ratio = math.log(rows[1]["perplexity"] / rows[0]["perplexity"])
    assert rows[0]["gap"] == 0 and rows[1]["gap"] == pytest.approx(log_ratio, abs=1e-3)
    assert rows[2]["gap_removed"] == 1 - rows[2]["gap"] / rows[1]["gap"]
    assert rows[2]["error_kept"] < 0.8
    keys = {"perplexity", "gap_se", "kl_se", "accuracy", "accuracy_se", "entropy", "entropy_se"}
    assert all(keys <= set(r) for r in rows)
    assert abs(rows[0]["kl"]) < 1e-6 < 1e-4 < rows[2]["kl"] < rows[1]["kl"]
    nll = json.loads((folder / "r" / "q.nll.json").read_text())
    assert [len(v) for v in nll.values()] == [3, 3, 3]
    assert sorted(p.name for p in out.parent.iterdir()) == ["q.json", "q.nll.json"]
    last = capsys.readouterr().out.splitlines()
    assert json.loads(last[-1])["table"] == rows
    [line] = [line for line in last if line.startswith("nvfp4   awq")]
    assert f"{100 * rows[2]['gap_removed']:.0f}%" in line.split() and f"{rows[2]['perplexity']:.4f}" in line.split()
    monkeypatch.setattr(bench, "row", lambda *a: pytest.fail("measured again"))
    bench.main(argv)
    assert json.loads(out.read_text())["table"] == rows


def test_a_table_goes_on_with_the_likelihoods_of_before(folder, shallow, monkeypatch):
    """Gaps are paired by document with rows that another process measured."""
    nats = {"-": [[4.0, 4], [4.0, 4]], "rtn": [[5.0, 4], [5.0, 4]], "awq": [[4.5, 4], [4.5, 4]]}
    monkeypatch.setattr(bench, "row", lambda args, fmt, method, *_: (
        {"format": fmt, "method": method, "perplexity": 2.0}, nats[method]))
    out = folder / "q.json"
    argv = ["--model", str(shallow), "--data", str(folder), "--formats", "nf4", "--device", "cpu", "--out", str(out), "--methods"]
    for methods in (["rtn"], ["rtn", "awq"]):
        bench.main([*argv, *methods])
    rows = json.loads(out.read_text())["table"]
    assert [(r["method"], r["gap"], r.get("gap_removed")) for r in rows] == [("-", 0, None), ("rtn", 0.25, None), ("awq", 0.125, 0.5)]


def test_rows_of_other_settings_are_not_mixed_with_new_ones(folder, shallow, monkeypatch, capsys):
    """They stood in one table under the new settings, or `zip` was told to be shorter; without likelihoods it was a KeyError."""
    monkeypatch.setattr(bench, "row", lambda args, fmt, method, docs, *_: (
        {"format": fmt, "method": method, "perplexity": 2.0}, [[4.0, 4] for _ in docs]))
    out = folder / "q.json"
    argv = ["--model", str(shallow), "--data", str(folder), "--formats", "nf4", "--device", "cpu", "--out", str(out), "--methods"]
    bench.main([*argv, "rtn"])
    before = out.read_bytes()
    for change, says in ((["--documents", "2"], "--documents 2: the rows in"), (["--max-new-tokens", "9"], "measured with 400; choose another"),
                         (None, "q.nll.json: the likelihoods of none - are missing")):
        if change is None:
            (folder / "q.nll.json").unlink()
        assert bench.main([*argv, "awq", *(change or [])]) == 2
        assert says in capsys.readouterr().err and out.read_bytes() == before


def test_each_method_is_called_as_it_is_named_and_asked_as_the_columns_say(folder, shallow, monkeypatch):
    """Calibrated on the text that it is tested on, AWQ's halves with the other half in them, sampled answers called greedy."""
    loads, asked, tok, plain = [], [], Tokenizer(shallow), qwen.load

    def load(model, device, dtype, fmt="none", *text, **options):
        if text:
            loads.append((fmt, *text, options))
        m = plain(model, device, dtype)
        m.awq = [{"awq": 1.0, "rtn": 4.0, "channels": 2.0, "exponent": 0.5},
                 {"awq": 1.0, "rtn": 1.0, "channels": 1.0, "exponent": 0.0}]
        return m

    def evaluate(model, *args, **kw):
        asked.append((model.valid_vocab, [q["question"] for q in args[1]], kw))
        return {"accuracy": 0.5, "stderr": 0.25, "format": 1.0, "questions": 2}

    def counted(name, result):
        monkeypatch.setattr(bench, name, lambda *a: counts.append((name, len(a[2]))) or result)

    counts, engines = [], []
    counted("divergence", [[0.5, 4]])
    counted("own_entropy", (1.5, None))
    monkeypatch.setattr(qwen, "load", load)
    monkeypatch.setattr(sample, "set_engine", lambda model, engine: engines.append(engine))
    monkeypatch.setattr(bench, "evaluate", evaluate)
    out = folder / "q.json"
    bench.main(["--model", str(shallow), "--data", str(folder), "--formats", "nf4", "--methods", "channels", "blocks",
                "--documents", "2", "--questions", "2", "--samples", "1", "--divergence", "1", "--max-new-tokens", "4", "--sequences", "4",
                "--length", "32", "--device", "cpu", "--out", str(out)])
    assert [(fmt, options) for fmt, _, options in loads] == [("nf4", {"finalists": None}), ("nf4", {"grid": 0})]
    calibration = datasets.calibration(folder / "train.jsonl", checkpoint.fetch(shallow), 4, 32)
    assert all(torch.equal(ids, calibration) for _, ids, _ in loads)
    how = {"style": "boxed", "n": 1, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 4}
    assert engines == 3 * ["auto"] and counts == 3 * [("divergence", 1), ("own_entropy", 1)]
    assert asked == 3 * [(len(tok), ["What is 1+1*2?", "What is 2+2*2?"], how)]
    model = plain(shallow, dtype=torch.float32)
    model.valid_vocab = len(tok)
    _, entropy, tokens = map(sum, zip(*bench_quantization.perplexity(model, [tok.encode(t) for t in datasets.texts(folder / "test.jsonl")[:2]]), strict=True))
    first, second, *_ = json.loads(out.read_text())["table"]
    assert first["entropy_on_text"] == pytest.approx(entropy / tokens) and first["tokens"] == tokens
    assert (second["error_kept"], second["exponents_above_0"], second["accuracy_se"]) == (pytest.approx(0.5), 0.5, 0.25)


def test_the_entropy_is_along_what_the_model_itself_wrote(shallow):
    """By definition, token by token: not of the prompt, not over ids that are never drawn; its error over prompts."""
    model, tok = qwen.load(shallow, dtype=torch.float32), Tokenizer(shallow)
    model.valid_vocab = 90
    prompts, each = [[1, 5, 9, 30], [3, 4], [7, 7, 7]], []
    for prompt, (s,) in zip(prompts, sample.generate(model, prompts, 1, 5, eos_ids=tok.eos_ids), strict=True):
        of = []
        for i in range(len(s.ids)):
            p = model(torch.tensor([prompt + s.ids[:i]]))[0, -1, :90].double().softmax(0)
            of.append(-(p * p.log()).sum().item())
        each.append(sum(of) / len(of))
    mean, error = bench.own_entropy(model, tok, prompts, 5)
    assert mean == pytest.approx(sum(each) / 3, rel=1e-4) and error == pytest.approx(bench.stderr(each), rel=1e-3)


def test_the_gap_and_its_error_are_of_paired_documents():
    """By hand: gaps of 1 and 3 nats over 10 and 10 tokens are 0.2 a token, and 0.0707 its standard
    error."""
    rows = [{"format": f, "method": m, "tokens": 20}
            for f, m in (("none", "-"), ("nf4", "rtn"), ("nf4", "awq"))]
    bench.compare(rows, {"none -": [[5, 10], [7, 10]], "nf4 rtn": [[6, 10], [10, 10]],
                         "nf4 awq": [[5.5, 10], [8.5, 10]]})
    assert rows[1]["gap"] == 0.2 and rows[1]["gap_se"] == pytest.approx(math.sqrt(2) / 20)
    assert rows[2]["gap_removed"] == 0.5


def test_the_divergence_is_of_the_first_model_to_the_second(shallow):
    """By definition, over each token's distribution of what follows; the other way round it is another number."""
    a, b = (qwen.load(shallow, dtype=torch.float32, quant=fmt) for fmt in ("none", "mxfp4"))
    a.valid_vocab = b.valid_vocab = 90
    b.norm.weight.mul_(2)  # far from each other, where it is not symmetric
    docs = [[1, 5, 9], [3, 4]]
    got = bench.divergence(a, b, docs)
    want = [[0.0, 2], [0.0, 1]]
    for row, doc in zip(want, docs, strict=True):
        for i in range(1, len(doc)):
            p, q = (m.lm_head(m.hidden(torch.tensor([doc[:i]]))[0, -1])[:90].double().softmax(0) for m in (a, b))
            row[0] += (p * (p / q).log()).sum().item()
    for (x, n), (y, m) in zip(got, want, strict=True):
        assert n == m and x == pytest.approx(y, rel=1e-3) and x > 0
    assert bench.divergence(b, a, docs)[0][0] != pytest.approx(got[0][0], rel=1e-1)


@pytest.mark.parametrize("argv,message", [
    (["--formats", "fp3"], "--formats: invalid choice: 'fp3'"),
    (["--methods", "gptq"], "--methods: invalid choice: 'gptq'"),
    ([], "required: --model, --data"),
    (["--model", "nowhere", "--data", "."], "--model nowhere: no such folder"),
])
def test_bad_flags_exit_with_2(tmp_path, argv, message, capsys):
    assert bench.main([*argv, "--out", str(tmp_path / "o.json")]) == 2
    assert message in capsys.readouterr().err
