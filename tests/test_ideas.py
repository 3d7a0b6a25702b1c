"""lab/ideas: each fork idea trains two steps, and does what it says it does."""
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import aqn
import grpo
import lora
import model
import nvfp4
import sample
import train

IDEAS = Path(__file__).resolve().parents[1] / "lab" / "ideas"
SMALL = ["--steps", "2", "--eval-n", "0", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "16", "--device", "cpu"]


@pytest.fixture
def restored():
    """What an idea replaces is put back."""
    homes = [aqn, grpo, lora, model, nvfp4, sample, train, model.RMSNorm, model.Block, lora.LoRALinear]
    before, formats = [dict(vars(home)) for home in homes], dict(nvfp4.FORMATS)
    yield
    for home, names in zip(homes, before, strict=True):
        for name, value in names.items():
            if vars(home).get(name) is not value:
                setattr(home, name, value)
    nvfp4.FORMATS.clear()
    nvfp4.FORMATS.update(formats)


def started(monkeypatch, name, *argv):
    """The exit code of `python lab/ideas/NAME.py ARGV`."""
    monkeypatch.setattr(sys, "argv", [str(IDEAS / f"{name}.py"), *argv])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(IDEAS / f"{name}.py"), run_name="__main__")
    return e.value.code


def rows_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("name", "flags"), [
    ("input_noise", ["--aqn-schedule", "eq8"]), ("learned_noise", ["--aqn-scope", "both", "--aqn-schedule", "eq8"]), ("rloo", []),
    ("fixed_noise", []), ("own_noise", ["--aqn-start", "5e-2"]), ("relative_noise", []), ("norms", []), ("four_over_six", [])])
def test_an_idea_trains_two_steps(restored, monkeypatch, tmp_path, name, flags):
    """Its names had moved, and nobody had run it since."""
    assert started(monkeypatch, name, *SMALL, *flags, "--out", str(tmp_path / "run")) == 0
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and all(row["skipped"] == 0 for row in rows)


def noisy_logits(net, ids):
    with torch.no_grad():
        return net(ids)


def test_noise_on_inputs_reaches_o_and_down_and_leaves_no_trace(restored, monkeypatch):
    """A hook that stays on after the noise is cleared evaluates another model."""
    net, ids = model.load("tiny", dtype=torch.float32, quant="nvfp4"), torch.arange(12)[None]
    lora.add_lora(net, 2, 2)
    clean = noisy_logits(net, ids)
    runpy.run_path(str(IDEAS / "input_noise.py"))
    aqn.set_noise(net, 0.3, seed=1)
    noisy = {name for name, b in aqn.buffers(net).items() if b.any()}
    assert sum(name.endswith(("o_proj.noise", "down_proj.noise")) for name in noisy) == 2 * len(net.layers)
    assert not torch.equal(noisy_logits(net, ids), clean)
    aqn.clear(net)
    assert torch.equal(noisy_logits(net, ids), clean)


def test_a_learned_scale_has_a_gradient_and_scales_the_noise(restored):
    """A parameter beside the norm that no forward reads is never trained."""
    net, ids = model.load("tiny", dtype=torch.float32), torch.arange(12)[None]
    runpy.run_path(str(IDEAS / "learned_noise.py"))
    params = lora.add_lora(net, 2, 2, 0)
    norm = net.layers[0].input_layernorm
    assert any(p is norm.s for p in params) and len(params) == 2 * len(lora.lora_layers(net)) + 2 * len(net.layers)
    aqn.set_noise(net, 0.1, seed=1)
    net(ids).sum().backward()
    assert norm.s.grad.abs() > 0
    x, before = torch.randn(3, len(norm.weight)), norm.noise.clone()
    with torch.no_grad():
        norm.s.fill_(1.0)
        scaled = norm(x)
        norm.s.zero_()
        norm.noise.copy_(before * torch.e)
        assert torch.allclose(scaled, norm(x), atol=1e-6)


def test_rloo_compares_with_the_others(restored):
    runpy.run_path(str(IDEAS / "rloo.py"))
    found = grpo.advantages(torch.tensor([[1.0, 0.0, 0.0, 0.5]]))
    assert torch.allclose(found, torch.tensor([[1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3]]))


def test_a_run_in_a_format_of_ones_own_can_be_evaluated(restored, monkeypatch, tmp_path, capsys):
    """eval.py knew nothing of the format that the run was trained in."""
    for name in ("train", "eval"):  # they read FORMATS when they are imported
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "sample")
    out = str(tmp_path / "run")
    assert started(monkeypatch, "int4", "train", *SMALL, "--quant", "int4", "--out", out) == 0
    assert started(monkeypatch, "int4", "eval", "--run", out, "--limit", "2", "--n", "1", "--device", "cpu", "--max-new-tokens", "4") == 0
    assert json.loads((tmp_path / "run" / "adapter" / "policy.json").read_text())["quant"] == "int4"
    assert "adapter" in capsys.readouterr().out


def test_countdown_grades_the_rows_own_numbers(tmp_path, monkeypatch):
    """A sum of other numbers, or one used twice, is no answer."""
    idea = runpy.run_path(str(IDEAS / "countdown.py"))
    row = {"numbers": [3, 4, 5], "answer": "17"}
    graded = {text: idea["score"](f"<answer>{text}</answer>", row)["reward"]
              for text in ("3*4+5", "(3*4) + 5", "4*3+5", "17", "3*4+5+0", "3+4+5", "__import__('os')", "3**4", "")}
    assert [graded[t] for t in ("3*4+5", "(3*4) + 5", "4*3+5")] == [1, 1, 1]
    assert [graded[t] for t in ("17", "3*4+5+0", "3+4+5")] == [0.1] * 3 and [graded[t] for t in ("__import__('os')", "3**4", "")] == [0] * 3
    idea["make"](tmp_path / "c.jsonl", rows=40)
    out = tmp_path / "run"
    assert train.main([*SMALL, "--data", str(tmp_path / "c.jsonl"), "--reward", f"{IDEAS / 'countdown.py'}:score", "--out", str(out)]) == 0
    assert len(rows_of(out)) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "flags"), [("input_noise", []), ("learned_noise", ["--aqn-scope", "both"])])
def test_a_noise_of_ones_own_runs_on_the_gpu(restored, monkeypatch, tmp_path, capsys, name, flags):
    """It was refused there. The plain functions take over, and one line says so."""
    argv = [*SMALL[:-2], *flags, "--aqn-schedule", "eq8", "--device", "cuda", "--out", str(tmp_path / "run")]
    assert started(monkeypatch, name, *argv) == 0
    rows, said = rows_of(tmp_path / "run"), capsys.readouterr().err
    assert len(rows) == 2 and all(row["skipped"] == 0 for row in rows)
    assert said.count("engine: plain") == 1 and "of your own" in said
