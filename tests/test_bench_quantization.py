"""The quantization bench on the embedded model: what it writes, resuming, and its statistics."""
import json
import math

from plumbing import checkpoint, datasets
from plumbing.tokenizer import Tokenizer

import pytest
import torch

import model as qwen
import sample
from lab import bench_quantization as bench


@pytest.fixture
def folder(tmp_path):
    for split, n in (("train", 80), ("test", 4)):
        rows = [{"question": f"What is {i}+{i}*2?", "answer": f"{i}+{i}={2 * i} #### {4 * i}"}
                for i in range(1, n)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.fixture(autouse=True)
def short(few, monkeypatch):
    """A small text to calibrate on, and short answers."""
    monkeypatch.setattr(bench, "NEW", 4)


def test_the_table_is_measured_row_by_row(folder, shallow, monkeypatch, capsys):
    """Each row carries its gap to the 16-bit model, paired by document; what was measured is in the file if the next row fails, and
    no other table's place is taken."""
    out = folder / "q.json"
    argv = ["--model", str(shallow), "--data", str(folder), "--formats", "nvfp4", "--questions", "2", "--samples", "2", "--device", "cpu",
            "--out", str(out)]
    assert bench.main(argv) == 0
    rows = json.loads(out.read_text())["table"]
    assert [(r["format"], r["method"]) for r in rows] == [("none", "-"), ("nvfp4", "rtn"), ("nvfp4", "awq")]
    log_ratio = math.log(rows[1]["perplexity"] / rows[0]["perplexity"])
    assert rows[0]["gap"] == 0 and rows[1]["gap"] == pytest.approx(log_ratio, abs=1e-3)
    assert rows[2]["gap_removed"] == 1 - rows[2]["gap"] / rows[1]["gap"]
    keys = {"perplexity", "gap_se", "kl_se", "accuracy", "accuracy_se", "entropy", "entropy_se"}
    assert all(keys <= set(r) for r in rows)
    assert abs(rows[0]["kl"]) < 1e-6 < 1e-4 < rows[2]["kl"] < rows[1]["kl"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == rows[2]
    assert bench.main(argv) == 2 and "q.json: exists already" in capsys.readouterr().err
    row = bench.row
    monkeypatch.setattr(bench, "row", lambda *args: row(*args) if args[1] == "none" else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main([*argv[:-1], str(folder / "cut.json")])
    assert [r["format"] for r in json.loads((folder / "cut.json").read_text())["table"]] == ["none"]


def test_each_method_is_called_as_it_is_named_and_asked_as_the_columns_say(folder, shallow, monkeypatch):
    """Calibrated on the text that it is tested on, or sampled answers called greedy."""
    loads, asked, tok, plain = [], [], Tokenizer(shallow), qwen.load

    def load(model, device, dtype, fmt="none", *text):
        loads.append((fmt, *text))
        return plain(model, device, dtype)

    def evaluate(model, *args, **kw):
        asked.append((model.valid_vocab, [q["question"] for q in args[1]], kw))
        return {"accuracy": 0.5, "stderr": 0.25, "questions": 2}

    def counted(name, result):
        monkeypatch.setattr(bench, name, lambda *a: counts.append((name, len(a[2]))) or result)

    counts, engines = [], []
    counted("divergence", [[0.5, 4]])
    counted("own_entropy", (1.5, None))
    monkeypatch.setattr(qwen, "load", load)
    monkeypatch.setattr(sample, "set_engine", lambda model, engine: engines.append(engine))
    monkeypatch.setattr(bench, "evaluate", evaluate)
    out = folder / "q.json"
    bench.main(["--model", str(shallow), "--data", str(folder), "--formats", "nf4", "--methods", "awq", "--documents", "2", "--questions", "2",
                "--samples", "1", "--divergence", "1", "--device", "cpu", "--out", str(out)])
    # of each row, and the 16 bits beside it
    assert [fmt for fmt, *_ in loads] == ["none", "nf4", "none"]
    assert [len(text) for _, *text in loads if text] == [1]
    calibration = datasets.calibration(folder / "train.jsonl", checkpoint.fetch(shallow))
    assert all(torch.equal(text[0], calibration) for _, *text in loads if text)
    how = {"style": "boxed", "n": 1, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 4}
    assert engines == 2 * ["auto"] and counts == 2 * [("divergence", 1), ("own_entropy", 1)]
    assert asked == 2 * [(len(tok), ["What is 1+1*2?", "What is 2+2*2?"], how)]
    model = plain(shallow, dtype=torch.float32)
    model.valid_vocab = len(tok)
    nats, tokens = map(sum, zip(*bench.likelihoods(model, [tok.encode(t) for t in datasets.texts(folder / "test.jsonl")[:2]]), strict=True))
    first, second = json.loads(out.read_text())["table"]
    assert math.log(first["perplexity"]) == pytest.approx(nats / tokens) and first["tokens"] == tokens and second["accuracy_se"] == 0.25


def test_the_likelihood_is_of_each_token_after_the_first(shallow):
    """By definition: a first token that is scored, or ids past the tokenizer's that take their share."""
    model = qwen.load(shallow, dtype=torch.float32)
    model.valid_vocab = 90
    for doc, (nats, n) in zip(docs := [[1, 5, 9, 30], [3, 4]], bench.likelihoods(model, docs), strict=True):
        logp = model(torch.tensor([doc]))[0, :-1, :90].log_softmax(-1)
        assert n == len(doc) - 1 and nats == pytest.approx(-logp.gather(1, torch.tensor(doc[1:])[:, None]).sum().item(), rel=1e-4)


def test_the_entropy_is_along_what_the_model_itself_wrote(shallow):
    """By definition, token by token: not of the prompt, not over ids that are never drawn; its error over prompts."""
    model, tok = qwen.load(shallow, dtype=torch.float32), Tokenizer(shallow)
    model.valid_vocab = 90
    prompts, each = [[1, 5, 9, 30], [3, 4], [7, 7, 7]], []
    for prompt, (s,) in zip(prompts, sample.generate(model, prompts, 1, 4, eos_ids=tok.eos_ids), strict=True):
        of = []
        for i in range(len(s.ids)):
            p = model(torch.tensor([prompt + s.ids[:i]]))[0, -1, :90].double().softmax(0)
            of.append(-(p * p.log()).sum().item())
        each.append(sum(of) / len(of))
    mean, error = bench.own_entropy(model, tok, prompts)
    assert mean == pytest.approx(sum(each) / 3, rel=1e-4) and error == pytest.approx(bench.stderr(each), rel=1e-3)


def test_the_gap_and_its_error_are_of_paired_documents():
    """By hand: gaps of 1 and 3 nats over 10 and 10 tokens are 0.2 a token, and 0.0707 its standard
    error."""
    rows = [{"format": f, "method": m, "tokens": 20}
            for f, m in (("none", "-"), ("nf4", "rtn"), ("nf4", "awq"))]
    bench.compare(rows, [[[5, 10], [7, 10]], [[6, 10], [10, 10]], [[5.5, 10], [8.5, 10]]])
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
