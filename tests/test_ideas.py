"""lab/ideas: each fork idea trains two steps, and does what it says it does."""
import json
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import aqn
import grpo
import lora
import model
import nvfp4
import sample
import train
from lab import convert
from tests.conftest import rows_of, tiny

IDEAS = Path(__file__).resolve().parents[1] / "lab" / "ideas"
SMALL = ["--steps", "2", "--eval-n", "0", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "8", "--overlong", "none",
         "--no-dynamic-sampling", "--updates-per-rollout", "1", "--device", "cpu"]


@pytest.fixture
def small(tmp_path):
    """SMALL, and a reward that differs within a group whatever is drawn."""
    (tmp_path / "any.py").write_text("import zlib\n\ndef f(text, row):\n    return zlib.crc32(text.encode()) % 100 / 100\n")
    return [*SMALL, "--reward", f"{tmp_path / 'any.py'}:f"]


@pytest.fixture
def restored():
    """What an idea replaces is put back."""
    homes = [aqn, grpo, lora, model, nvfp4, sample, train, model.RMSNorm]
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


@pytest.mark.parametrize(("name", "flags"), [
    ("input_noise", ["--aqn-schedule", "eq8"]), ("learned_noise", ["--aqn-scope", "both", "--aqn-schedule", "eq8"]), ("rloo", []),
    ("fixed_noise", []), ("own_noise", ["--aqn-start", "5e-2"]), ("relative_noise", []), ("norms", []),
    ("evolution", ["--no-aqn"])])
def test_an_idea_trains_two_steps(restored, monkeypatch, tmp_path, small, name, flags):
    """Its names had moved, and nobody had run it since."""
    assert started(monkeypatch, name, *small, *flags, "--out", str(tmp_path / "run")) == 0
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and all(row["skipped"] == 0 and (row["updates"] or name == "evolution") for row in rows)


def test_a_target_is_met_whatever_the_norms_weigh(restored, monkeypatch, shallow, tmp_path, capsys):
    """lab/ideas/target_noise.py: the KL of the sigma that it finds is the target, on the policy without its adapter; the schedule keeps
    its shape; and there must be noise to be sized."""
    from lab.ideas import noise_size, target_noise

    net, pairs = model.load(shallow, dtype=torch.float32), [(list(range(5, 25)), list(range(20, 40)))] * 2
    (tmp_path / "d.jsonl").write_text("".join(f'{{"question": "What is {i}+1?", "answer": "{i + 1}"}}\n' for i in range(4)))
    argv = [*SMALL, "--model", str(shallow), "--data", str(tmp_path / "d.jsonl")]
    for target in (1e-3, 2e-2):
        sigma = target_noise.found(net, pairs, target)
        assert noise_size.sizes(net, pairs, (0.0, sigma))[sigma][0] == pytest.approx(target, rel=0.1)
    assert started(monkeypatch, "target_noise", *argv, "--target-kl", "0.01", "--aqn-scope", "both", "--out", str(tmp_path / "run")) == 0
    largest = float(capsys.readouterr().out.split("sigma from ")[1].split(",")[0])
    assert [row["sigma"] for row in rows_of(tmp_path / "run")] == pytest.approx([0, largest * target_noise.sigma(1, 2, 1e-2, 5e-4) / 1e-2], rel=0.01)
    assert started(monkeypatch, "target_noise", *argv, "--no-aqn", "--out", str(tmp_path / "other")) == 2
    assert "--no-aqn: there is no noise" in capsys.readouterr().err


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
    noisy = [name for name, b in net.named_buffers() if name.endswith(("o_proj.noise", "down_proj.noise")) and b.any()]
    assert len(noisy) == 2 * len(net.layers)
    assert not torch.equal(noisy_logits(net, ids), clean)
    down = next(linear for path, linear in model.projections(net) if path.endswith("down_proj"))
    x = torch.randn(1, down.shape[1])
    noisy, times = down(x), 1 + down.noise
    aqn.clear(net)
    assert (times != 1).all()
    torch.testing.assert_close(noisy, down(x * times))
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


def test_a_run_in_a_format_of_ones_own_can_be_evaluated_asked_and_continued(restored, monkeypatch, tmp_path, small, capsys):
    """eval.py knew nothing of the format that the run was trained in; `sample` was a traceback; the line to continue with lacked its
    first word."""
    import lab.chat
    import lab.ideas.noise_size

    monkeypatch.setattr(lab, "chat", lab.chat)  # put back with sys.modules
    monkeypatch.setattr(lab.ideas, "noise_size", lab.ideas.noise_size)
    for name in ("train", "eval", "sample", "lab.chat", "lab.ideas.noise_size"):  # they read FORMATS when they are imported
        monkeypatch.delitem(sys.modules, name)
    out = str(tmp_path / "run")
    assert started(monkeypatch, "int4", "train", *small, "--quant", "int4", "--out", out) == 0
    assert started(monkeypatch, "int4", "eval", "--run", out, "--limit", "2", "--n", "1", "--device", "cpu", "--max-new-tokens", "4") == 0
    assert json.loads((tmp_path / "run" / "adapter" / "policy.json").read_text())["quant"] == "int4"
    assert "adapter" in capsys.readouterr().out
    assert started(monkeypatch, "int4", "sample", "--run", out, "--prompt", "What is 1+1?", "--device", "cpu", "--max-new-tokens", "4") == 0
    assert capsys.readouterr().out.strip()
    argv = ["noise_size", "--quant", "int4", "--prompts-per-step", "2", "--max-new-tokens", "4", "--device", "cpu"]
    assert started(monkeypatch, "int4", *argv) == 0 and "int4: KL to 16 bits 0.0" in capsys.readouterr().out
    command = json.loads((tmp_path / "run" / "summary.json").read_text())["command"]
    assert command.startswith(f"python {IDEAS / 'int4.py'} train ")
    assert started(monkeypatch, "int4", *shlex.split(command)[2:], "--resume", "--steps", "3") == 0
    assert len(rows_of(tmp_path / "run")) == 3


def test_countdown_grades_the_rows_own_numbers(tmp_path, monkeypatch):
    """A sum of other numbers, or one used twice, is no answer."""
    idea = runpy.run_path(str(IDEAS / "countdown.py"))
    row = {"numbers": [3, 4, 5], "answer": "17"}
    graded = {text: idea["score"](f"<answer>{text}</answer>", row)["reward"]
              for text in ("3*4+5", "(3*4) + 5", "4*3+5", "17", "3*4+5+0", "3+4+5", "__import__('os')", "3**4", "", "4*5-3", "3*")}
    assert [graded[t] for t in ("3*4+5", "(3*4) + 5", "4*3+5", "4*5-3")] == [1, 1, 1, 1]
    assert [graded[t] for t in ("17", "3*4+5+0", "3+4+5")] == [0.1] * 3 and [graded[t] for t in ("__import__('os')", "3**4", "", "3*")] == [0] * 4
    assert not idea["score"]("17", row)["format"]
    idea["make"](tmp_path / "c.jsonl", rows=40)
    for made in map(json.loads, (tmp_path / "c.jsonl").read_text().splitlines()):
        a, b, c = made["numbers"]
        assert int(made["answer"]) in (a + b - c, a + b + c, a * b - c, a * b + c)
    out = tmp_path / "run"
    assert train.main([*SMALL, "--data", str(tmp_path / "c.jsonl"), "--reward", f"{IDEAS / 'countdown.py'}:score", "--out", str(out)]) == 0
    assert len(rows_of(out)) == 2


def test_the_documented_idea_is_one_noise_for_all_steps(monkeypatch):
    """lab/ideas/fixed_noise.py: what a newcomer copies first has to do what it says, and to leave the clean model clean."""
    monkeypatch.setattr(aqn, "set_noise", aqn.set_noise)  # put back afterwards
    runpy.run_path(str(IDEAS / "fixed_noise.py"))
    m, draws = tiny(), []
    for sigma, seed in ((0.1, 1), (0.1, 2), (0.2, 3), (0.0, 4)):
        aqn.set_noise(m, sigma, seed)
        draws.append(torch.cat(aqn.buffers(m)))
    assert draws[0].any() and draws[0].equal(draws[1]) and torch.allclose(2 * draws[0], draws[2]) and not draws[3].any()


def test_the_documented_idea_is_a_share_of_each_weight(monkeypatch):
    """lab/ideas/relative_noise.py: the same draw, times the weight it is added to, clean after clean."""
    m = tiny()
    pairs = [norm for pair in aqn.norms(m) for norm in pair]
    with torch.no_grad():
        for i, norm in enumerate(pairs):
            norm.weight.copy_(torch.linspace(-2, 1 + i, len(norm.weight)))
    aqn.set_noise(m, 0.1, 5)
    absolute = [norm.noise.clone() for norm in pairs]
    monkeypatch.setattr(aqn, "set_noise", aqn.set_noise)  # put back afterwards
    runpy.run_path(str(IDEAS / "relative_noise.py"))
    aqn.set_noise(m, 0.1, 5)
    assert all(torch.allclose(norm.noise, a * norm.weight.abs()) for norm, a in zip(pairs, absolute, strict=True))
    aqn.set_noise(m, 0.0)
    assert not any(b.any() for b in aqn.buffers(m))


def test_the_documented_idea_gives_each_completion_of_a_group_its_noise(monkeypatch):
    """lab/ideas/own_noise.py: the j-th completions of all prompts have the j-th noise, by which they were sampled, and other dice."""
    monkeypatch.setattr(aqn, "set_noise", aqn.set_noise)  # put back afterwards
    m, drawn = tiny(), []

    def complete(model, tok, rows, args, seed, indices=None):
        drawn.append((torch.cat(aqn.buffers(model)), seed, args.group_size, indices))
        return [[(row, seed)] for row in rows]

    monkeypatch.setattr(train, "complete", complete)
    runpy.run_path(str(IDEAS / "own_noise.py"))
    aqn.set_noise(m, 0.3, 5)
    groups = train.complete(m, None, ["a", "b"], SimpleNamespace(group_size=3), 7, indices=[4, 5])
    noises, seeds, sizes, indices = zip(*drawn, strict=True)
    assert groups == [[(row, seed) for seed in seeds] for row in "ab"] and len({*seeds}) == 3
    assert sizes == (1, 1, 1) and indices == ([4, 5],) * 3
    assert all(0.2 < z.std() < 0.4 for z in noises) and not noises[0].equal(noises[1]) and not noises[1].equal(noises[2])
    aqn.set_noise(m, 0.0)
    train.complete(m, None, ["a"], SimpleNamespace(group_size=1), 7)
    assert not drawn[-1][0].any()


def test_the_documented_size_of_a_noise_is_its_divergence():
    """lab/ideas/noise_size.py: KL(noisy || clean) and entropy over the completions' tokens, not the prompts', long ones counting for more."""
    found = runpy.run_path(str(IDEAS / "noise_size.py"))
    m, pairs = tiny(), [([1, 2, 3], [4, 5]), ([6], [7, 8, 9, 10, 11])]
    m.valid_vocab = 17
    got = found["sizes"](m, pairs)
    assert not any(b.any() for b in aqn.buffers(m)) and got[0.0][0] == 0
    for sigma in (0.05, 0.1):
        kl = entropy = 0.0
        for i, (prompt, ids) in enumerate(pairs):
            policies = []
            for s in (0.0, sigma):
                aqn.set_noise(m, s, aqn.noise_seed(i))
                with torch.no_grad():
                    policies.append(m(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1, :17].double().softmax(1))
            clean, noisy = policies
            kl += (noisy * (noisy / clean).log()).sum().item()
            entropy -= (noisy * noisy.log()).sum().item()
        assert got[sigma] == pytest.approx([kl / 7, entropy / 7], rel=1e-3) and kl > 0
    aqn.clear(m)


def test_the_rounding_of_a_format_is_measured_along_samples_of_16_bits(monkeypatch, shallow, tmp_path, capsys):
    """lab/ideas/noise_size.py: KL(16 bits || format), by definition; along the format's own samples, or beside another checkpoint's
    scales, two formats would be measured on two texts."""
    from lab.ideas import noise_size

    nets = {quant: model.load(shallow, dtype=torch.float32, quant=quant) for quant in ("none", "mxfp4")}
    pairs, kl, same = [([1, 5, 9], [30, 3]), ([6], [7, 8, 9])], 0.0, 0
    for net in nets.values():
        net.valid_vocab = 90
    nets["mxfp4"].norm.weight.mul_(2)  # far from each other, where it is not symmetric
    for prompt, ids in pairs:
        for i in range(len(ids)):
            p, q = (noisy_logits(net, torch.tensor([prompt + ids[:i]]))[0, -1, :90].double().softmax(0) for net in nets.values())
            kl, same = kl + (p * (p / q).log()).sum().item(), same + (p.argmax() == q.argmax()).item()
    assert noise_size.rounding(nets["mxfp4"], nets["none"], pairs) == pytest.approx([kl / 5, same / 5], rel=1e-3)

    loaded, drawn, tok = [], [], sample.Tokenizer(shallow)
    monkeypatch.setattr(sample, "load_policy", lambda args: loaded.append((args.quant, args.awq)) or (nets[args.quant], tok))
    monkeypatch.setattr(noise_size, "draw", lambda net, *rest: drawn.append(net) or pairs)
    argv = ["--model", str(shallow), "--data", "arithmetic", "--device", "cpu"]
    assert noise_size.main([*argv, "--quant", "mxfp4", "--awq"]) == 0
    assert loaded == [("mxfp4", True), ("none", False)] and drawn == [nets["none"], nets["mxfp4"]]
    assert f"mxfp4: KL to 16 bits {kl / 5:.2g}, the same most likely token in {same / 5:.1%}\n" in capsys.readouterr().out
    convert.convert(shallow, tmp_path / "q", "mxfp4")  # of what lies in four bits there is nothing to compare with
    for more in (["--quant", "none"], ["--model", str(tmp_path / "q"), "--quant", "mxfp4"]):
        assert noise_size.main([*argv, *more]) == 0 and "16 bits" not in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "flags"), [("input_noise", []), ("learned_noise", ["--aqn-scope", "both"])])
def test_a_noise_of_ones_own_runs_on_the_gpu(restored, monkeypatch, tmp_path, capsys, name, flags):
    """It was refused there. The plain functions take over, and one line says so."""
    argv = [*SMALL[:-2], *flags, "--aqn-schedule", "eq8", "--device", "cuda", "--out", str(tmp_path / "run")]
    assert started(monkeypatch, name, *argv) == 0
    rows, said = rows_of(tmp_path / "run"), capsys.readouterr().err
    assert len(rows) == 2 and all(row["skipped"] == 0 for row in rows)
    assert said.count("engine: plain") == 1 and "of your own" in said
