"""train.py: the loop as a user runs it, on the embedded model's first block, and the traps that small RL codebases fall into."""
import gc
import inspect
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from plumbing import arithmetic, console, curves, flags
from plumbing.command import IDLE, MINOR
from plumbing.console import step_line, warnings_for
from plumbing.files import TINY, lock
from plumbing.run import Run, resolve_flags
from plumbing.tokenizer import Tokenizer

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import aqn
import data
import eval as evaluation
import grpo
import lora
import model as qwen
import sample
import train
from lab import chat
from tests import conftest
from tests.conftest import adapted, drawn, exit_code, first_blocks, parameters_of, rows_of

SMALL = ["--steps", "4", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "24", "--lora-rank", "4", "--eval-n", "0",
         "--save-every", "2", "--device", "cpu", "--no-dynamic-sampling", "--overlong", "none",
         "--updates-per-rollout", "2", "--data", "arithmetic"]


def run(out, *extra):
    return train.main([*SMALL, "--out", str(out), *extra])


def a_run(out, *extra, argv=(), save_weights=lambda folder: None):
    """The Run of train.py's flags `extra`, before it is opened."""
    args = flags.parse(train.COMMAND, ["--out", str(out), *extra])
    return Run(train.COMMAND, args, [*argv], save_weights)


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    """Few problems, one block, a reward that it sometimes earns, and no pictures; returns the model's folder."""
    rows = {split: arithmetic.problems(split, 64) for split in ("train", "test")}
    home = tmp_path_factory.mktemp("small")
    model, mine = first_blocks(1, home / "model"), home / "mine.py"
    mine.write_text("def third(text, row):\n    return {'reward': len(text) % 3, 'correct': len(text) % 2 == 0}\n")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data, "problems", lambda split, n, *rest: [dict(row) for row in rows[split][:n]])
        m.setattr(curves, "draw", lambda lines, out: out.touch())
        m.setattr(sys.modules[__name__], "SMALL", [*SMALL, "--model", str(model), "--reward", f"{mine}:third"])
        yield model


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run of four steps."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert run(out) == 0
    return out


@pytest.fixture(scope="module")
def policy():
    """(model with an adapter that does something, tokenizer, completions, optimizer)."""
    model, tok, optimizer = adapted(0.02)
    completions = drawn(model, tok, 4)
    for i, c in enumerate(completions):
        c.advantage = i % 4 - 1.4
    return model, tok, completions, optimizer


def test_a_run_leaves_every_file_it_promises(straight):
    names = {"config.json", "metrics.jsonl", "rollouts.jsonl", "adapter", "checkpoint", "metrics.png", "summary.json"}
    assert names <= {p.name for p in straight.iterdir()}
    summary = json.loads((straight / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "steps", "seconds", "command"} <= set(summary)
    assert torch.cuda.is_available() or 0.1 < summary["peak_gib"] < 100  # without a GPU the process's, in GiB
    assert not [p for p in straight.rglob("*") if p.name.startswith(".")]
    wanted = {"reward", "accuracy", "format", "reward_std", "zero_var_frac", "entropy", "length_mean", "truncated_frac",
              "grad_norm", "lr", "sigma", "clip_low_frac", "clip_high_frac", "kl", "logp_gap_mean", "logp_gap_max",
              "ratio_outside_frac", "rollout_tok_s", "update_tok_s", "seconds_rollout", "seconds_reward", "seconds_update",
              "peak_gib"}
    for line in (straight / "metrics.jsonl").read_text().splitlines():
        assert wanted <= set(json.loads(line))
    samples = [json.loads(line) for line in (straight / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows_of(straight)] == sorted({s["step"] for s in samples}) == [0, 1, 2, 3]


def test_what_a_run_needs_at_its_end_is_imported_then():
    """matplotlib alone took a third of the seconds before the first line; sympy, which grades some answers, takes a second too, and
    torch wanted it for the zeros of a tensor on the meta device."""
    late = {"matplotlib", "pyarrow", "lab", "fast", "triton", "sympy", "math_verify", "latex2sympy2_extended"}
    code = f"import sys, train, model; model.load('tiny'); print({late} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], cwd=Path(train.__file__).parent, capture_output=True, text=True)
    assert found.stdout == "set()\n", found


def test_curves_are_drawn_without_pytorch():
    """Two constants of plumbing/run.py made `lab/plot.py --help` take 3.4 seconds instead of 1."""
    code = "import sys, lab.plot; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=Path(train.__file__).parent, capture_output=True, text=True)
    assert found.stdout == "False\n", found


def test_a_run_goes_on_where_its_questions_have_moved(tmp_path, capsys):
    """Their new place was refused, although a resume compares what they are."""
    out, here, there = tmp_path / "run", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    here.write_text("".join(json.dumps({"question": f"What is {i}+1?", "answer": i + 1}) + "\n" for i in range(20)))
    assert run(out, "--steps", "1", "--data", str(here)) == 0
    there.write_text(here.read_text().replace("3+1", "4+0"))
    assert run(out, "--resume", "--steps", "2", "--data", str(there)) == 2
    here.rename(there)
    assert run(out, "--resume", "--steps", "2", "--data", str(here)) == 2
    assert "needs the same questions" in capsys.readouterr().err
    assert run(out, "--resume", "--steps", "2", "--data", str(there)) == 0 and len(rows_of(out)) == 2


@pytest.mark.parametrize(("where", "name", "at", "kept", "error"), [
    (sample, "generate", 4, 3, KeyboardInterrupt), (sample, "generate", 4, 3, ValueError), (grpo, "update", 8, 2, ValueError)])
def test_resume_is_exact(straight, tmp_path, monkeypatch, capsys, where, name, at, kept, error):
    """k + (n - k) steps == n steps: weights, optimizer, samples, data order, noise stage, after a ctrl-C while the fourth rollout is
    drawn and after an error, which threw the third step away and did not say how to go on. Within an update weights are on their way:
    there the last checkpoint stands."""
    out, works, calls = tmp_path / "run", getattr(where, name), []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise error("no room")
        return works(*args, **kwargs)

    monkeypatch.setattr(where, name, fails)
    assert run(out) == (130 if error is KeyboardInterrupt else 2)
    if error is ValueError:
        told = capsys.readouterr().err.splitlines()[-2:]
        assert told[0].endswith(" --resume") and told[1] == "train.py: error: no room"
    assert torch.load(out / "checkpoint" / "state.pt")["step"] == kept
    monkeypatch.setattr(where, name, works)
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "reward": 1}\n{"step": 4, "rew')  # rows that the checkpoint knows nothing of
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert rows_of(out) == rows_of(straight)
    for a, b in zip(parameters_of(out), parameters_of(straight), strict=True):
        assert torch.equal(a, b)


def test_a_resume_reads_every_flag_as_it_was_written(tmp_path):
    """A flag that comes back as its default, or not at all, is another run in the old one's folder."""
    argv = ["--model", "m", "--quant", "mxfp4", "--awq", "--calib", "t.txt", "--no-aqn", "--levels", "3,4", "--eps-high", "0.1", "--seed",
            "7", "--dynamic-sampling", "--lr", "3e-5", "--steps", "9", "--out", str(tmp_path)]
    args = flags.parse(train.COMMAND, argv)
    for name in ("lock", "config.json"):
        (tmp_path / name).write_text(json.dumps(vars(args)))
    (tmp_path / "checkpoint").mkdir()
    again = ["--resume", "--save-every", "3", "--out", str(tmp_path)]
    assert vars(resolve_flags(train.COMMAND, flags.parse(train.COMMAND, again), again)) == vars(args) | {"save_every": 3, "resume": True}


def test_a_resume_changes_no_flag_that_what_is_learned_follows_from(tmp_path):
    """Half a run with another seed, prompt or rate would stand under the first half's flags."""
    old = flags.parse(train.COMMAND, ["--model", "m", "--out", str(tmp_path)])
    (tmp_path / "lock").touch()
    (tmp_path / "checkpoint").mkdir()
    free = {"steps", "resume", "out", "save_every", "card_share", "eval_every", "model", "data", "calib"}  # compared by what they hold
    free |= {"micro_batch_tokens", "checkpointing", "max_rows", "engine"}  # for a card with less memory
    lower = ["--micro-batch-tokens", "9", "--max-rows", "5", "--checkpointing", "on", "--engine", "plain"]
    kinds = {f.dest: f.kind for f in train.COMMAND.flags}
    for name in kinds.keys() - free:
        value, flag = getattr(old, name), f"--{name.replace('_', '-')}"
        if kinds[name] is bool:
            argv = [f"--no-{flag[2:]}" if value else flag]
        else:
            argv = [flag, str(next(x for x in kinds[name] if x != value) if isinstance(kinds[name], tuple | dict) else 2 if value != 2 else 3)]
            argv = [flag, "0.7"] if name == "lr" else argv
        (tmp_path / "config.json").write_text(json.dumps(vars(old)))
        again = ["--resume", "--out", str(tmp_path), *argv]
        with pytest.raises(ValueError, match=f"{flag}: the run in .* used"):
            resolve_flags(train.COMMAND, SimpleNamespace(resume=True, out=str(tmp_path)), again)
    new = resolve_flags(train.COMMAND, SimpleNamespace(resume=True, out=str(tmp_path)), ["--resume", "--out", str(tmp_path), *lower])
    assert (new.micro_batch_tokens, new.max_rows, new.checkpointing, new.engine) == (9, 5, "on", "plain")
    assert {"steps", "model", "data", "calib", *IDLE, *MINOR} == free


def test_a_run_of_an_older_version_is_refused_in_one_line(straight, tmp_path, capsys):
    """Its config.json has flags that are constants now, perhaps other ones than it was trained with: a traceback, or half a run of
    another kind. Its adapter is used all the same."""
    out = copy_of(straight, tmp_path)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"weight_decay": 0.0, "aqn_stages": 10, "timeout": 1800}))
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert train.main(["--resume", "--out", str(out), "--steps", "9"]) == 2
    assert capsys.readouterr().err == (
        f"train.py: error: {out / 'config.json'}: the run was begun by another version of train.py, or by a script of yours, with other flags "
        "(aqn_stages); continue it with that, or start anew in another --out\n")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    sample.load_policy(flags.parse(evaluation.COMMAND, ["--run", str(out)]))

    (out / "config.json").write_text(json.dumps(config | {"quant": "int4"}))  # lab/ideas/int4.py's
    assert train.main(["--resume", "--out", str(out), "--steps", "9"]) == 2
    assert "config.json: --quant int4: not one of none, nvfp4, " in capsys.readouterr().err


def copy_of(straight, tmp_path):
    return Path(shutil.copytree(straight, tmp_path / "copy"))


def test_a_resume_with_more_steps_extends_the_run(straight, tmp_path, monkeypatch):
    """A run that ended can go on: its rows stay, new ones follow, its flags are kept but for --steps."""
    out = copy_of(straight, tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", "--out", str(out), "--steps", "6"])
    assert train.main() == 0
    assert rows_of(out)[:4] == rows_of(straight) and [r["step"] for r in rows_of(out)] == [0, 1, 2, 3, 4, 5]
    for name, field in (("summary.json", "command"), ("config.json", "command"), ("config.json", "script")):  # as they were when it began
        assert len({json.loads((folder / name).read_text())[field] for folder in (straight, out)}) == 1
    assert json.loads((out / "config.json").read_text())["steps"] == 6
    assert json.loads((out / "summary.json").read_text())["steps"] == 6


def test_an_idea_may_follow_what_was_measured_also_in_a_resumed_run(straight, tmp_path, monkeypatch):
    """A closed loop: sigma is what the entropy of the step before says. It forgot that in a resumed run."""
    learn, seen = train.learn, []

    def following(run, *rest):
        monkeypatch.setattr(aqn, "set_noise", lambda model, sigma, seed=0: seen.append(run.state.last.get("entropy")))
        learn(run, *rest)

    monkeypatch.setattr(train, "learn", following)
    assert train.main(["--resume", "--out", str(copy_of(straight, tmp_path)), "--steps", "6"]) == 0
    logged = [row["entropy"] for row in rows_of(tmp_path / "copy")]
    assert seen == logged[3:5] and run(tmp_path / "new") == 0 and seen[2] is None


def test_a_schedule_in_numpy_can_be_resumed(tmp_path, monkeypatch):
    """Its numbers print and log as others do; the checkpoint that held one was refused as none."""
    monkeypatch.setitem(aqn.SCHEDULES, "mine", lambda start, end, x, n: start * np.cos(x) + end)
    rate = grpo.learning_rate
    monkeypatch.setattr(grpo, "learning_rate", lambda *a: np.float64(rate(*a)))
    out = tmp_path / "run"
    assert run(out, "--aqn-schedule", "mine") == 0
    assert train.main(["--resume", "--out", str(out), "--steps", "5"]) == 0 and len(rows_of(out)) == 5


def test_what_a_resume_repeats_is_checked_beside_the_runs_own_flags(tmp_path):
    """It was compared with the demo's defaults, which the run does not have."""
    argv = ["--out", str(tmp_path / "run"), "--updates-per-rollout", "15", "--eval-n", "0", "--group-size", "2", "--max-new-tokens", "2"]
    assert train.main([*argv, "--prompts-per-step", "20", "--steps", "1"]) == 0
    assert train.main([*argv, "--resume", "--steps", "2"]) == 0


def test_what_is_done_is_done(straight, tmp_path):
    """Resumed with fewer steps than it had, a run ended as one of two flags: it could not be compared, and no resume mended it."""
    out = copy_of(straight, tmp_path)
    (out / "summary.json").unlink()  # stopped before its end
    assert train.main(["--resume", "--out", str(out), "--steps", "2"]) == 0
    assert [json.loads((out / name).read_text())["steps"] for name in ("config.json", "summary.json")] == [4, 4]


def test_seconds_count_on_after_a_resume(straight, tmp_path, monkeypatch):
    """A curve over seconds would go back to where it began. (A step that takes a tenth shows in one digit.)"""
    out = copy_of(straight, tmp_path)
    path = out / "checkpoint" / "state.pt"
    state = torch.load(path, weights_only=True)
    assert state["seconds"] > 0
    torch.save(state | {"seconds": 1000.0}, path)
    update = grpo.update
    monkeypatch.setattr(grpo, "update", lambda *a: time.sleep(0.1) or update(*a))
    assert train.main(["--resume", "--out", str(out), "--steps", "5"]) == 0
    assert 1000 < json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["seconds"] < 1600
    assert 1000 < json.loads((out / "summary.json").read_text())["seconds"] < 1600


def test_a_run_that_was_stopped_in_its_last_evaluation_ends_when_it_is_resumed(tmp_path, monkeypatch):
    """All steps are done, but there is no summary and no accuracy yet; and without --eval-every no adapter is called the best."""
    calls = []

    def scripted(*a, **kw):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"accuracy": 0.5, "stderr": None, "reward": 0.5, "rows": [{"question": "?", "answer": "1", "accuracy": 0.5, "samples": []}]}

    monkeypatch.setattr(evaluation, "evaluate", scripted)
    out = tmp_path / "run"
    assert run(out, "--steps", "1", "--eval-n", "1", "--eval-limit", "1") == 130 and not (out / "summary.json").exists()
    assert train.main(["--resume", "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["accuracy_after"], summary["best"], summary["steps"]) == (0.5, None, 1) and len(calls) == 3
    assert not (out / "adapter_best").exists()


def test_an_extended_run_that_was_stopped_in_its_last_evaluation_ends_when_it_is_resumed(straight, tmp_path, monkeypatch):
    """The summary that is there is of before it went on: with it alone the new steps were never evaluated."""
    out = copy_of(straight, tmp_path)
    with monkeypatch.context() as m:
        m.setattr(Run, "finish", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        assert train.main(["--resume", "--out", str(out), "--steps", "5"]) == 130
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 5


def test_a_run_that_was_stopped_while_its_curves_were_drawn_ends_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    """Its summary was there: resume said that it had ended, and the picture never came."""
    out = tmp_path / "run"
    for steps in ("1", "2"):
        with monkeypatch.context() as m:
            m.setattr(curves, "draw", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            assert run(out, "--steps", steps, *["--resume"] * (steps == "2")) == 130
        (out / "metrics.png").unlink(missing_ok=True)
        assert train.main(["--resume", "--out", str(out)]) == 0
        assert (out / "metrics.png").exists() and f"{out}: adapter/, metrics.jsonl" in capsys.readouterr().out


def test_resuming_a_finished_run_keeps_its_summary(straight, tmp_path, capsys):
    out = copy_of(straight, tmp_path)
    before = (out / "summary.json").read_bytes()
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert (out / "summary.json").read_bytes() == before and "--steps" in capsys.readouterr().out


@pytest.mark.parametrize(("where", "again"), [((sample, "generate"), ["--resume"]), ((Run, "write_state"), [])], ids=["after", "before"])
def test_a_start_that_came_to_nothing_does_not_block_the_next(straight, tmp_path, monkeypatch, where, again):
    """A kill before the first step goes on by --resume, one before the first checkpoint by the same command; both give what an
    undisturbed start gives."""

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as m:
        m.setattr(*where, killed)
        m.setattr(Run, "save", killed)  # nothing is saved on the way out
        with pytest.raises(KeyboardInterrupt):
            train.train(flags.parse(train.COMMAND, [*SMALL, "--out", str(out)]), [])
    assert (out / "config.json").exists() and (out / "checkpoint" / "state.pt").exists() == bool(again)
    if again:
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            (out / name).write_text('{"step": 0}\n')  # of a step that no checkpoint knows
        assert run(out) == 2
    assert run(out, *again) == 0
    assert rows_of(out) == rows_of(straight)
    assert (out / "rollouts.jsonl").read_text() == (straight / "rollouts.jsonl").read_text()


def test_held_out_accuracy_by_step_and_the_best_adapter(tmp_path, monkeypatch):
    """--eval-every: the row of a step has the held-out accuracy of the policy that drew its samples; adapter_best/ is the one
    with the highest, not the last."""
    answers = iter([0.1, 0.6, 0.3, 0.2])
    adapters = []

    def scripted(model, tok, rows, *a, **kw):
        lora.save_adapter(model, tmp_path / "now")
        adapters.append(load_file(tmp_path / "now" / "adapter_model.safetensors"))
        mean, apart = next(answers), -0.1 if len(adapters) == 1 else 0.1
        rows = [{"question": "?", "answer": "1", "accuracy": a, "samples": []} for a in (mean + apart, mean - apart)]
        return {"accuracy": mean, "stderr": mean / 10, "reward": 0.5, "rows": rows}

    monkeypatch.setattr(evaluation, "evaluate", scripted)
    out = tmp_path / "run"
    assert run(out, "--steps", "3", "--eval-n", "1", "--eval-every", "1", "--eval-limit", "2") == 0
    assert [(r["eval_accuracy"], r["eval_stderr"]) for r in rows_of(out)] == [(a, a / 10) for a in (0.1, 0.6, 0.3)]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.1, 0.2)
    assert (summary["stderr_before"], summary["stderr_after"]) == (0.01, 0.02)
    assert (summary["gain"], summary["stderr_gain"]) == pytest.approx((0.1, 0.2))  # 0.0 -> 0.3 and 0.2 -> 0.1
    assert summary["best"] == {"step": 1, "accuracy": 0.6, "stderr": 0.06}
    best, last = (load_file(out / name / "adapter_model.safetensors") for name in ("adapter_best", "adapter"))
    assert all(torch.equal(best[k], adapters[1][k]) for k in best) and any(not torch.equal(best[k], last[k]) for k in best)


def test_held_out_questions_that_are_too_long_are_counted(tmp_path, capsys):
    """An accuracy of fewer questions than the set has, and nobody is told."""
    r = a_run(tmp_path)
    for skipped in (0, 3):
        r.evaluated({"accuracy": 0.5, "stderr": None, "skipped": skipped, "rows": []})
    a, b = capsys.readouterr().out.splitlines()
    assert a.endswith("50.0%") and b.endswith("50.0% (3 questions longer than --max-prompt)")


def test_of_adapters_that_are_as_good_the_first_is_the_best(tmp_path, monkeypatch):
    """A resume evaluates the step it begins with again: what is there must not become another step's."""
    saved = []
    monkeypatch.setattr(Run, "write_weights", lambda self, name: saved.append((name, self.state.step)))
    r = a_run(tmp_path, "--eval-every", "1")
    for r.state.step, accuracy in ((1, 0.5), (2, 0.5), (3, 0.4)):
        r.evaluated({"accuracy": accuracy, "stderr": None})
    assert r.state.best["step"] == 1 and saved == [("adapter_best", 1)]


def test_an_extended_run_knows_its_best_adapter(tmp_path, monkeypatch):
    """The evaluation at a run's end may have been the best of all: adapter_best/ is not written over by a worse one."""
    answers = iter([0.1, 0.5, 0.8, 0.6, 0.55])

    def scripted(*a, **kw):
        mean = next(answers)
        return {"accuracy": mean, "stderr": 0.01, "reward": 0.5, "rows": [{"question": "?", "answer": "1", "accuracy": mean, "samples": []}]}

    monkeypatch.setattr(evaluation, "evaluate", scripted)
    out, want = tmp_path / "run", {"step": 3, "accuracy": 0.8, "stderr": 0.01}
    assert run(out, "--steps", "3", "--eval-n", "1", "--eval-every", "2", "--eval-limit", "1") == 0
    assert json.loads((out / "summary.json").read_text())["best"] == want
    assert [r["eval_accuracy"] for r in rows_of(out)] == [0.1, None, 0.5]
    best = (out / "adapter_best" / "adapter_model.safetensors").read_bytes()
    assert train.main(["--resume", "--steps", "5", "--out", str(out)]) == 0
    assert json.loads((out / "summary.json").read_text())["best"] == want
    assert (out / "adapter_best" / "adapter_model.safetensors").read_bytes() == best


def test_held_out_questions_are_asked_as_the_flags_say(tmp_path, monkeypatch):
    """Before and after are compared with eval.py's numbers: the same temperature, nucleus, limits and reward."""
    names, seen = inspect.signature(evaluation.evaluate), {}
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **kw: seen.update(names.bind(*a, **kw).arguments))
    monkeypatch.setattr(Run, "evaluated", lambda *a: None)
    args = flags.parse(train.COMMAND, ["--eval-n", "3", "--eval-temperature", "0.4", "--max-new-tokens", "20",
                                       "--max-prompt", "50", "--max-rows", "5", "--prompt-style", "boxed", "--out", str(tmp_path)])
    train.evaluate(Run(train.COMMAND, args, [], None), "model", "tok", "score", "rows")
    assert (names.parameters["top_p"].default, names.parameters["seed"].default) == (0.95, 0)  # the paper's, which train.py leaves as it is
    want = {"model": "model", "tok": "tok", "rows": "rows", "style": "boxed", "n": 3, "temperature": 0.4,
            "max_new_tokens": 20, "max_prompt": 50, "max_rows": 5, "score": "score"}
    assert {name: seen.get(name) for name in want} == want and seen.get("top_p", 0.95) == 0.95


def test_an_adapter_remembers_what_it_was_trained_with(small, straight, tmp_path, capsys):
    """Evaluated on another format, or with another prompt, than it was trained with, an adapter looks worse than it is; on
    another base it is noise. eval.py and sample.py take them from policy.json; another base is refused."""
    args = flags.parse(evaluation.COMMAND, ["--run", str(straight)])
    assert (args.model, args.quant, args.prompt_style, args.data) == (str(small), "nvfp4", "tags", "arithmetic")
    assert flags.parse(chat.COMMAND, ["--adapter", str(straight / "adapter"), "--quant", "none"]).quant == "none"
    out = copy_of(straight, tmp_path)
    policy = json.loads((out / "adapter" / "policy.json").read_text())
    assert {"base", "norms", "weights", "reward"} <= policy.keys()
    (out / "adapter" / "policy.json").write_text(json.dumps(policy | {"quant": "mxfp4", "prompt_style": "boxed"}))
    args = flags.parse(evaluation.COMMAND, ["--run", str(out)])
    assert (args.quant, args.prompt_style) == ("mxfp4", "boxed")
    sample.load_policy(flags.parse(evaluation.COMMAND, ["--run", str(out), "--quant", "nvfp4"]))
    assert "warning: --quant nvfp4" in capsys.readouterr().err
    (out / "adapter" / "policy.json").write_text(json.dumps(policy | {"weights": "none:another"}))
    with pytest.raises(ValueError, match="--model .*another base"):
        sample.load_policy(flags.parse(evaluation.COMMAND, ["--run", str(out)]))


def test_the_collector_passes_over_what_a_run_began_with(tmp_path, monkeypatch):
    """Torch's and Triton's own objects: looked through in the middle of a step, they hold up all ranks. Not after the run, whose model must go."""
    gc.unfreeze()
    frozen = []
    monkeypatch.setattr(train, "learn", lambda *a: frozen.append(gc.get_freeze_count()))
    assert run(tmp_path / "run") == 0 and frozen[0] > 10_000
    assert not gc.get_freeze_count()


def test_the_fast_path_plans_the_update_and_then_the_longest_row_of_the_run(tmp_path, monkeypatch):
    """Planned for the prompts that come in its first step, the sampler would be made anew in the middle of the run."""
    calls = []
    fast = SimpleNamespace(plan_update=lambda model, args, params: calls.append(("update", sum(p.numel() for p in params))),
                           plan_rollouts=lambda model, args, longest: calls.append(("rollouts", args, longest)))
    monkeypatch.setattr(sample, "set_engine", lambda model, engine: setattr(model, "fast", fast))
    monkeypatch.setattr(train, "learn", lambda *a: None)
    assert run(tmp_path / "run", "--steps", "1") == 0
    (first, trained), (second, args, longest) = calls
    assert (first, second) == ("update", "rollouts") and trained == sum(p.numel() for p in parameters_of(tmp_path / "run"))
    rows, _ = data.prompts(Tokenizer(args.model), data.questions(args)[0], args.prompt_style, args.max_prompt)
    assert longest == max(len(row["ids"]) for row in rows) + args.max_new_tokens


@pytest.mark.parametrize(("given", "tokens", "recompute"), [([], 16384, True), (["--micro-batch-tokens", "99", "--checkpointing", "off"], 99, False),
                                                            (["--checkpointing", "on"], 16384, True)])
def test_the_plain_path_recomputes_blocks_unless_told(tmp_path, monkeypatch, given, tokens, recompute):
    """Without a plan of the memory, a long micro-batch that keeps all activations ends the first update."""
    seen = []
    monkeypatch.setattr(train, "learn", lambda run, model, *a: seen.extend([run.args, model]))
    assert run(tmp_path / "run", "--engine", "plain", "--micro-batch-tokens", "0", "--checkpointing", "auto", *given) == 0
    args, model = seen
    assert (args.micro_batch_tokens, args.checkpointing == "on", model.checkpointing, model.fast) == (tokens, recompute, recompute, None)


def test_a_signal_in_an_update_waits_for_the_step_and_its_row(straight, tmp_path, monkeypatch):
    """Saved as it stands in the middle of a step, the step's first update would be done twice after --resume."""
    out, update, calls = tmp_path / "run", grpo.update, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return update(*args)

    monkeypatch.setattr(grpo, "update", interrupted)
    assert run(out) == 130
    state = torch.load(out / "checkpoint" / "state.pt", weights_only=True)
    assert state["step"] == 1 and rows_of(out) == rows_of(straight)[:1]
    assert {s["step"].item() for s in state["optimizer"]["state"].values()} == {len(calls)}


def test_a_checkpoint_every_so_many_steps(tmp_path, monkeypatch):
    """A killed run loses no more than --save-every steps."""
    saved = []
    monkeypatch.setattr(Run, "save", lambda self, *_: saved.append(self.state.step))
    r = a_run(tmp_path, "--save-every", "3")
    for step in range(1, 8):
        r.advance(step, 0, None)
    assert saved == [3, 6]


def test_a_model_that_is_not_there_is_told_before_the_data_are_read(tmp_path, capsys):
    """A mistyped name was met after minutes of reading; of a run's folder, without a network, one read that the hub gave no data."""
    (tmp_path / "config.json").write_text('{"steps": 3}')
    for command in (lambda *argv: run(tmp_path / "run", *argv), lambda *argv: evaluation.main(argv)):
        for model, said in (("nobody", "--model nobody"), (str(tmp_path), "goes to eval.py --run")):
            assert command("--model", model, "--data", "nothing.jsonl") == 2
            assert said in capsys.readouterr().err


def test_a_prompt_that_leaves_no_room_is_refused_before_the_run(tmp_path, capsys, monkeypatch):
    """Its length was met hours later, in the step that drew it. The last position may be used."""
    argv = ["--steps", "1", "--eval-n", "0", "--out", str(tmp_path / "r"), "--max-new-tokens"]
    assert exit_code(train.main, [*argv, "450"]) == 2
    assert "a prompt's 64 tokens and 450 new ones pass the model's 512 positions" in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr(train, "learn", lambda *args: None)
    assert exit_code(train.main, [*argv, "448"]) == 0


def test_sampler_and_trainer_agree_on_every_token(policy):
    """The log-probs recorded while sampling are the trainer's, temperature and masked ids included."""
    model, tok, completions, _ = policy
    for temperature in (1.0, 0.7):
        cs = completions if temperature == 1.0 else drawn(model, tok, 4, temperature=0.7, seed=3)
        with torch.no_grad():
            logp, _, mask = grpo.completion_logprobs(model, cs, temperature)
        for c, values, m in zip(cs, logp, mask, strict=True):
            assert torch.allclose(values[m], torch.tensor(c.logprobs), atol=1e-4)


def test_any_micro_batching_gives_the_same_gradient_and_loss(policy, monkeypatch):
    """Token mean over the global batch, and the logged loss is not the last micro-batch's."""
    model, _, completions, optimizer = policy
    seen, losses = [], []

    def keep(params, clip):
        seen.append([p.grad.clone() for p in params])
        return torch.tensor(1.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    for budget in (1, 300, 10**6):
        metrics, _ = grpo.update(model, optimizer, completions, conftest.settings(loss="dapo", micro_batch_tokens=budget))
        losses.append(metrics["loss"].item())
    assert len(grpo.micro_batches(model, completions, 1)) == len(completions)
    assert len(grpo.micro_batches(model, completions, 10**6)) == 1
    for grads in seen[1:]:
        for a, b in zip(grads, seen[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert max(losses) - min(losses) < 1e-5


def test_training_moves_the_adapter_and_leaves_one_untouched_base(small, straight):
    """The quantized base is shared by rollout and update and never changes; B has moved; adapter/ is the adapter of the last
    save, not of the first."""
    model = lora.load_adapter(qwen.load(small, "cpu", torch.float32, "nvfp4"), straight / "adapter")
    assert all(m.B.abs().sum() > 0 for _, m in lora.lora_layers(model))
    saved = [p for _, m in lora.lora_layers(model) for p in (m.A, m.B)]
    assert all(torch.equal(p, q) for p, q in zip(saved, parameters_of(straight), strict=True))
    assert not [n for n, p in model.named_parameters() if p.requires_grad and not n.endswith((".A", ".B"))]


def test_all_parameters_are_trained_in_float32(tmp_path, capsys):
    """In bfloat16 a step of 1e-5 on a weight of 1 rounds to nothing."""
    words = ["--lora-rank", "0", "--quant", "none"]
    assert flags.parse(train.COMMAND, words).dtype == "float32"
    assert run(tmp_path / "run", *words, "--dtype", "bfloat16") == 2
    assert "--lora-rank 0 trains all parameters in float32" in capsys.readouterr().err


def test_data_order_is_a_function_of_seed_and_cursor():
    rows = [{"i": i} for i in range(7)]
    a, b = train.Prompts(rows, 0), train.Prompts(rows, 0)
    first = a.take(5) + a.take(4) + a.take(5)
    assert first == b.take(14) and sorted(r["i"] for r in first[:7]) == list(range(7)) and first[:7] != first[7:]
    b.cursor = 5
    assert b.take(9) == first[5:]


def test_the_warm_up_is_the_nearest_number_of_updates():
    """Cut, a tenth of 19 is one update, and the first is taken at the peak."""
    assert [grpo.learning_rate(i, 19, 1.0) for i in range(3)] == [0.5, 1.0, 1.0]
    assert grpo.learning_rate(0, 4, 1.0) == 1.0  # less than one update is one, at the peak


@pytest.mark.parametrize("change, told", [
    ({"reward": 0.0}, "--prompt-style"), ({"format": 0.0}, "--prompt-style boxed"), ({"format": 0.0, "style": "boxed"}, "--prompt-style tags"),
    ({"truncated_frac": 1.0}, "--max-new-tokens"),
    ({"zero_var_frac": 1.0}, "--group-size"), ({"logp_gap_mean": 0.2, "sigma": 0.0}, "--old-logp current"),
    ({"clip_first_frac": 0.03}, "the noise alone"), ({"clip_first_frac": 0.03}, "--old-logp trainer, or lower --aqn-start"),
    ({"clip_first_frac": 0.03, "sigma": 0.0}, "rounding in sampler and trainer alone"),
    ({"accuracy": 0.0, "reward_std": 0.1, "own": "r.py:f"}, 'beside its "reward", as "correct"'),
])
def test_a_run_that_cannot_learn_is_told_what_to_do(change, told):
    """A prompt without the instruction that the reward wants trains on zeros, silently."""
    args = flags.parse(train.COMMAND, [])
    args.reward, args.prompt_style = change.get("own"), change.get("style", "tags")
    fine = {"reward": 0.5, "accuracy": 0.5, "format": 0.5, "truncated_frac": 0.1, "zero_var_frac": 0.5, "logp_gap_mean": 0.2, "sigma": 0.01,
            "clip_first_frac": 0.0, "skipped": 0, "reward_std": 0.0, "groups": 0}
    assert not list(warnings_for(fine, args))
    assert any(told in text for text in warnings_for({**fine, **change}, args))
    args.aqn_scope = "both"  # sampler and trainer are as noisy, so that noise is no reason for a gap
    assert any("--old-logp current" in text for text in warnings_for(fine, args))
    args.old_logp = "current"  # what is done already is no advice
    assert any("use --dtype float32" in text for text in warnings_for(fine, args))


FINE = {"reward": 0.5, "accuracy": 0.0, "format": 0.5, "truncated_frac": 0.99, "zero_var_frac": 0.99, "logp_gap_mean": 0.04, "sigma": 0.0,
        "clip_first_frac": 0.0, "skipped": 0, "reward_std": 0.0, "groups": 0}


def test_warnings_say_no_more_than_the_row():
    """A gap within its bound, "every completion" where it is most of them, or two reasons for one reward of 0."""
    args = flags.parse(train.COMMAND, [])
    assert not list(warnings_for(FINE, args)) and not list(warnings_for({**FINE, "logp_gap_mean": 0.05}, args))
    assert not list(warnings_for({**FINE, "reward": 0.0, "reward_std": 1.0}, args))  # right is 1, wrong is -1
    for change in ({"zero_var_frac": 1.0}, {"reward": 0.0}):
        assert not list(warnings_for({**FINE, **change, "groups": 3}, args))  # --dynamic-sampling drew others
    for change, told in (({"logp_gap_mean": 0.051}, "more than 0.05 nats"), ({"skipped": 1}, "an update was skipped"),
                         ({"reward": 0, "format": 0}, "every reward is 0")):
        [text] = warnings_for({**FINE, **change}, args)
        assert told in text


def test_a_step_is_told_as_it_was(tmp_path, monkeypatch, capsys):
    """A line of other columns, right answers called wrong, or a warning at each step: what a user goes by while it runs."""
    monkeypatch.setattr("plumbing.run.peak_gib", lambda: 22.0)
    r, groups = a_run(tmp_path, "--steps", "30"), []
    for i in range(3):
        groups.append([grpo.Completion({"question": f"q{i}", "answer": "7"}, [1], [2], [-1.0], True, f"a{i}{j}", i + j / 2, i == 0)
                       for j in range(2)])
    columns = ("reward_se", "accuracy", "reward_std", "length_mean", "length_max", "entropy", "sampler_entropy", "grad_norm", "logp_gap_max")
    row = {**FINE, **{name: 11.0 + i for i, name in enumerate(columns)}, "truncated_frac": 1.0, "sigma": 0.02, "trained_tokens": 50.0}
    for step, result in ((10, None), (11, {"accuracy": 0.25, "stderr": 0.1})):
        r.clock, r.drawn = {"rollout": 5.0, "reward": 1.0, "update": 4.0, "evaluate": 99.0}, 100
        r.log({**row, "step": step}, groups, result)
    same = ("reward 0.500 | acc 12.000 | len 14 | trunc 100% | ent 16.000 | grad 18.000 | dlogp 0.0400 | sigma 2.0e-02 | 20 tok/s | "
            "22.0 GiB | 10.0 s")
    assert capsys.readouterr().out.splitlines() == [
        f"   10 | {same} | eta 3 min", "      Q: q0", "      A: a00 (right)", "      Q: q1", "      A: a10 (wrong, it is 7)",
        f"warning: every completion was cut at {r.args.max_new_tokens} tokens: raise --max-new-tokens",
        f"   11 | {same} | eta 3 min".replace("| len", "| held-out 25.0% | len")]
    want = [{"step": step, "question": f"q{i}", "answer": "7", "text": f"a{i}0", "reward": i, "correct": i == 0}
            for step in (10, 11) for i in range(2)]
    assert [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()] == want
    a, b = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (a["eval_accuracy"], a["eval_stderr"], b["eval_accuracy"], b["eval_stderr"]) == (None, None, 0.25, 0.1)
    assert a["update_tok_s"] == 12.5 and "trained_tokens" not in a


def test_a_steps_line_fits_the_terminal(monkeypatch, capsys):
    """At 80 columns each of its 170 characters long lines broke within a word. What matters comes first; a log has all."""
    args = flags.parse(train.COMMAND, ["--steps", "300"])
    row = {**FINE, "step": 11, "accuracy": 0.5, "length_mean": 1000.0, "entropy": 1.0, "grad_norm": 1.0, "rollout_tok_s": 5000.0, "peak_gib": 20.0,
           "seconds_step": 100.0, "eval_accuracy": 0.5}
    whole = step_line(row, args)
    assert whole.startswith("   11 | reward 0.500 | acc 0.500 | held-out 50.0% | ") and len(whole) > 160
    for wide in (None, 80):
        monkeypatch.setattr(console, "width", lambda wide=wide: wide)
        console.show_step(row, [], args, set())
        assert capsys.readouterr().out.splitlines()[0] == whole[:wide]


def test_a_relative_out_is_the_folder_it_was_at_the_start(tmp_path, monkeypatch):
    """A reward that changes the working directory moved the rest of the run there."""
    monkeypatch.chdir(tmp_path)
    r = a_run("here")
    monkeypatch.chdir("/")
    assert r.out == tmp_path / "here"


def test_the_end_of_a_run_tells_what_was_learned(tmp_path, capsys, monkeypatch):
    """Before told as after, an error as the gain, rows of before in eval_after.jsonl."""
    def rows(when, accuracies):
        return [{"question": f"q{i}", "answer": "7", "accuracy": a, "samples": [{"text": f"{when}{i}"}]} for i, a in enumerate(accuracies)]

    monkeypatch.setattr(sys, "argv", ["ideas/mine.py", "--tau", "1", "--lr", "1"])
    r = a_run(tmp_path, "--eval-every", "0", argv=["--lr", "1"])
    assert r.state.script == "mine.py --tau 1"
    after = {"accuracy": 2 / 3, "stderr": 0.2, "rows": rows("after", (0.0, 1.0, 1.0))}
    r.evaluated({"accuracy": 1 / 3, "stderr": 0.1, "rows": rows("before", (1.0, 0.0, 0.0))})
    r.state.step = 7
    r.evaluated(after)
    r.finish(None, after)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["held-out accuracy after 0 steps: 33.3%", "held-out accuracy after 7 steps: 66.7%"]
    assert lines[3:] == ["held-out accuracy: 33.3% before, 66.7% after 7 steps (+33.3 +- 66.7 points)"]
    assert [json.loads(line) for line in (tmp_path / "eval_after.jsonl").read_text().splitlines()] == after["rows"]
    assert json.loads((tmp_path / "summary.json").read_text())["command"] == "python ideas/mine.py --tau 1 --lr 1"


def test_a_single_file_keeps_a_tenth_out_of_training(tmp_path):
    """Otherwise the accuracy called held-out is measured on the training questions. Another seed holds others out."""
    tenths = []
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(50)))
    for limit, seed in ((5, 0), (3, 0), (5, 1)):
        argv = ["--data", str(tmp_path / "d.jsonl"), "--eval-limit", str(limit), "--seed", str(seed)]
        rows, held = data.questions(flags.parse(train.COMMAND, argv))
        assert (len(rows), len(held)) == (45, limit) and not {r["question"] for r in rows} & {r["question"] for r in held}
        tenths.append({r["question"] for r in held})
    assert tenths[1] < tenths[0] != tenths[2]


@pytest.mark.parametrize("where", ["", "train.jsonl"])
def test_only_rows_of_the_levels_asked_for_are_trained_on(tmp_path, where):
    """--levels that is parsed and forgotten; and a folder without a test split is enough where nothing is held out."""
    rows = [json.dumps({"question": f"{i}+1?", "answer": i + 1, "level": 1 + i % 5}) + "\n" for i in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    rows, held = data.questions(flags.parse(train.COMMAND, ["--data", str(tmp_path / where), "--levels", "4,5", "--eval-n", "0"]))
    assert len(rows) == 8 and {row["level"] for row in rows} == {4, 5} and held == []


def test_a_question_that_is_there_twice_is_not_on_both_sides(tmp_path):
    """Files put together from several sources repeat questions: trained on and asked, they would be called held-out."""
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i % 20}+1?", "answer": i % 20 + 1}) + "\n" for i in range(60)))
    rows, held = data.questions(flags.parse(train.COMMAND, ["--data", str(path)]))
    assert len(held) == 2 and not {r["question"] for r in rows} & {r["question"] for r in held}
    assert len(rows) == 54 and len({r["question"] for r in [*rows, *held]}) == 20  # it held out six rows, and trained on 14 questions


def test_splits_that_share_questions_are_told_of(tmp_path, capsys):
    """train.jsonl copied to test.jsonl: accuracy on what was trained on, called held-out."""
    for split, numbers in (("train", range(6)), ("test", range(4, 9))):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in numbers))
    for more, told in (([], 1), (["--eval-n", "0"], 0)):
        data.questions(flags.parse(train.COMMAND, ["--data", str(tmp_path), *more]))
        assert capsys.readouterr().err.count("warning: --data " + str(tmp_path) + ": 2 of 5 held-out questions are trained on") == told


def test_the_only_question_is_not_held_out(tmp_path):
    """Trained on and asked, it would be called held-out. Of two, one is."""
    (tmp_path / "d.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    with pytest.raises(ValueError, match="--data .*--eval-n 0"):
        data.questions(flags.parse(train.COMMAND, ["--data", str(tmp_path / "d.jsonl")]))
    rows, held = data.questions(flags.parse(train.COMMAND, ["--data", str(tmp_path / "d.jsonl"), "--eval-n", "0"]))
    assert len(rows) == 1 and not held
    with open(tmp_path / "d.jsonl", "a") as f:
        f.write('{"question": "1+2?", "answer": "3"}\n')
    rows, held = data.questions(flags.parse(train.COMMAND, ["--data", str(tmp_path / "d.jsonl")]))
    assert len(rows) == len(held) == 1 and rows != held


def test_two_runs_never_write_to_one_folder(tmp_path, capsys):
    """Both would append to one metrics.jsonl and save over each other; a run that was killed must not block the next."""
    out = tmp_path / "run"
    out.mkdir()
    held = lock(out / "lock", "held")
    assert run(out) == 2 and "another run is at work" in capsys.readouterr().err
    assert not (out / "config.json").exists()
    held.close()
    assert run(out, "--steps", "1") == 0


def test_a_run_that_stops_while_another_is_loaded_is_kept(tmp_path, capsys, monkeypatch):
    """The other had looked into the folder before the first checkpoint, found its lock free, and began over it."""
    out, load = tmp_path / "run", sample.load_policy

    def meanwhile(args):
        monkeypatch.setattr(sample, "load_policy", load)
        assert run(out, "--steps", "2") == 0
        return load(args)

    monkeypatch.setattr(sample, "load_policy", meanwhile)
    assert run(out, "--steps", "1") == 2 and "another run is at work" in capsys.readouterr().err
    assert len(rows_of(out)) == 2


def test_resume_needs_the_questions_it_began_with(tmp_path, capsys):
    """An edited file under the same name: another data order, other held-out questions, other answers."""
    file, out = tmp_path / "d.jsonl", tmp_path / "run"
    rows = [json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(30)]
    file.write_text("".join(rows))
    assert run(out, "--steps", "1", "--data", str(file)) == 0
    for edited in (rows[:-1], rows[::-1], [*rows[:-1], rows[-1].replace("30", "31")]):
        file.write_text("".join(edited))
        assert edited != rows and train.main(["--resume", "--out", str(out), "--steps", "2"]) == 2
        assert "--data" in capsys.readouterr().err and len(rows_of(out)) == 1


def test_resume_needs_the_base_it_began_with(small, tmp_path, capsys):
    """An adapter went on beside other weights: a checkpoint that was made anew, or scales by another text."""
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "run"
    shutil.copytree(small, model)
    text.write_text("Take 1+2. " * 400)
    argv = ["--model", str(model), "--awq", "--calib", str(text), "--steps", "2"]
    assert run(out, *argv) == 0
    text.write_text("Add 4 to 5. " * 400)
    assert run(out, *argv, "--resume", "--steps", "3") == 2
    assert "the text of --calib" in capsys.readouterr().err
    text.write_text("Take 1+2. " * 400)
    argv[4] = str(text.rename(tmp_path / "moved.txt"))
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"model.norm.weight": 2 * weights["model.norm.weight"]}, model / "model.safetensors", metadata={"format": "pt"})
    assert run(out, *argv, "--resume", "--steps", "3") == 2
    assert f"--model {model}: its weights" in capsys.readouterr().err
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert run(out, *argv[:2], *argv[3:], "--resume", "--steps", "3") == 0  # --awq is the run's own
    argv, out, changed = [*argv[:2], *argv[5:]], tmp_path / "plain", "model.layers.0.mlp.down_proj.weight"  # plainly rounded
    assert run(out, *argv) == 0
    save_file(weights | {changed: -weights[changed]}, model / "model.safetensors", metadata={"format": "pt"})
    assert run(out, *argv, "--resume", "--steps", "3") == 2
    assert f"--model {model}: its weights" in capsys.readouterr().err


def test_an_object_that_resume_cannot_read_ends_the_run_before_it_replaces_a_checkpoint(tmp_path, monkeypatch):
    """A replay of grpo.Completions: all 200 steps were trained, and `--resume` called the checkpoint damaged."""
    def update(model, optimizer, completions, settings, real=grpo.update):
        optimizer.param_groups[0]["mine"] = completions[:1]
        return real(model, optimizer, completions, settings)

    monkeypatch.setattr(grpo, "update", update)
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global: GLOBAL grpo.Completion"):
        run(tmp_path / "run", "--save-every", "1")
    assert torch.load(tmp_path / "run" / "checkpoint" / "state.pt")["step"] == 0 and len(rows_of(tmp_path / "run")) == 1


@pytest.mark.parametrize("what", ["fewer", "longer", "optimizer"])
def test_a_resume_that_trains_other_parameters_names_the_script(straight, tmp_path, monkeypatch, capsys, what):
    """Begun by lab/ideas/norms.py, resumed by train.py: "zip() argument 2 is longer than argument 1". By an optimizer of one's own: a
    KeyError in torch."""
    real, out = lora.add_lora, copy_of(straight, tmp_path)
    if what == "optimizer":
        state = torch.load(out / "checkpoint" / "state.pt")
        for moments in state["optimizer"]["state"].values():
            moments.pop("step")
        torch.save(state, out / "checkpoint" / "state.pt")
    else:
        monkeypatch.setattr(lora, "add_lora", (lambda *args: real(*args)[1:]) if what == "fewer" else
                            lambda model, rank, *rest: real(model, rank + 1, *rest))
    begun = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    monkeypatch.setattr(sys, "argv", ["elsewhere/other.py"])
    assert run(out, "--resume", "--steps", "5") == 2
    told = capsys.readouterr().err
    assert f"warning: --resume: the run was begun by {begun}, and goes on by other.py\n" in told
    assert f"than are trained here; the run was begun by {begun}\n" in told


def test_what_ended_without_a_checkpoint_is_kept(straight, tmp_path, capsys):
    """Deleted to make room: the same command trained over the adapter, or called its old summary the new run's."""
    out = copy_of(straight, tmp_path)
    shutil.rmtree(out / "checkpoint")
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    for more, told in (([], "; choose a new or an empty folder"), (["--resume"], "state.pt: not there, the run was stopped before its first step; start it without --resume")):
        assert run(out, *more) == 2 and told in capsys.readouterr().err
        assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before


def test_what_a_kill_has_left_half_written_is_removed(tmp_path):
    """Hidden files of the size of a model, for ever."""
    out = tmp_path / "run"
    (out / ".model.0123.part" / ".shard-0.0123.part").mkdir(parents=True)
    for more in ([], ["--resume"]):  # the second run has ended already
        assert run(out, "--steps", "1", *more) == 0 and not [*out.rglob(".*")]
        for name in (".metrics.png.0123.part", "adapter/.adapter_model.safetensors.0123.part"):
            (out / name).touch()


def test_resume_needs_the_held_out_questions_it_began_with(tmp_path, capsys):
    """Before and after are paired by question: with others the run trained to its end, and fell there."""
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        rows = [json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(6)]
        (tmp_path / "set" / f"{split}.jsonl").write_text("".join(rows))
    argv = ["--data", str(tmp_path / "set"), "--steps", "1", "--eval-n", "1"]
    assert run(tmp_path / "run", *argv) == 0
    (tmp_path / "set" / "test.jsonl").write_text("".join(rows[:-1]))
    assert train.main(["--resume", "--out", str(tmp_path / "run"), "--steps", "2"]) == 2
    assert "--data" in capsys.readouterr().err and len(rows_of(tmp_path / "run")) == 1


def test_a_noise_within_the_adapter_is_not_saved(tmp_path, monkeypatch):
    """Added to a parameter, and taken out by `clear`, it was in the checkpoint of a run that was stopped in a rollout."""
    put, works, calls = {}, sample.generate, []

    def clear(model):
        for p, value in put.items():
            p.data.copy_(value)
        put.clear()

    def set_noise(model, sigma, seed):
        clear(model)
        for _, layer in lora.lora_layers(model):
            put[layer.A] = layer.A.detach().clone()
            layer.A.data += 0.01

    monkeypatch.setattr(aqn, "clear", clear)
    monkeypatch.setattr(aqn, "set_noise", set_noise)
    assert run(tmp_path / "straight") == 0

    def stopped(*args, **kwargs):
        calls.append(1)
        return works(*args, **kwargs) if len(calls) != 3 else (_ for _ in ()).throw(KeyboardInterrupt)

    monkeypatch.setattr(sample, "generate", stopped)
    assert run(tmp_path / "cut") == 130
    assert train.main(["--resume", "--out", str(tmp_path / "cut")]) == 0
    for a, b in zip(*(parameters_of(tmp_path / name) for name in ("straight", "cut")), strict=True):
        assert torch.equal(a, b)


def test_each_group_of_an_optimizer_of_ones_own_has_its_rate(tmp_path, monkeypatch):
    """LoRA+ trains B at several times A's rate: the second group stayed at its first one, without warm-up or decay."""
    rates = []

    class Two(grpo.AdamW):
        def __init__(self, params, lr):
            super().__init__(params, lr)
            self.add_param_group({"params": self.param_groups[0]["params"][1::2], "times": 16.0})

        def add_param_group(self, group):
            if self.param_groups:
                del self.param_groups[0]["params"][1::2]
            super().add_param_group(group)

        def step(self):
            rates.append([group["lr"] for group in self.param_groups])
            super().step()

    monkeypatch.setattr(grpo, "AdamW", Two)
    assert run(tmp_path / "run") == 0
    assert len({a for a, _ in rates}) > 2 and all(b == 16 * a for a, b in rates)


@pytest.mark.parametrize("damage", ["truncated", "text"])
def test_a_damaged_checkpoint_is_one_line_and_never_a_resume(straight, tmp_path, capsys, damage):
    out = copy_of(straight, tmp_path)
    path = out / "checkpoint" / "state.pt"
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.write_text("not a checkpoint")
    assert train.main(["--resume", "--out", str(out), "--steps", "6"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and "state.pt: is no checkpoint, or not whole (" in err[0] and rows_of(out) == rows_of(straight)


def test_a_broken_parameter_is_not_saved_over_a_good_one(straight, tmp_path, monkeypatch, capsys):
    """With nothing to train on, no gradient norm shows a NaN: it must be seen before the save."""
    out = copy_of(straight, tmp_path)
    before = (out / "checkpoint" / "state.pt").read_bytes(), (out / "adapter" / "adapter_model.safetensors").read_bytes()

    def break_it(model, optimizer, completions, settings):
        optimizer.params[0].data[0, 0] = float("nan")

    monkeypatch.setattr(grpo, "update", break_it)
    steps = len((out / "metrics.jsonl").read_text().splitlines()) + 1  # no rollout comes after it
    assert train.main(["--resume", "--out", str(out), "--steps", str(steps)]) == 2
    assert "holds NaN" in capsys.readouterr().err
    assert before == ((out / "checkpoint" / "state.pt").read_bytes(), (out / "adapter" / "adapter_model.safetensors").read_bytes())


def test_skipped_updates_are_counted_and_ten_in_a_row_end_the_run(tmp_path, monkeypatch, capsys):
    """One bad batch is survived; a policy that only makes NaN is not trained on for hours."""
    real, calls = grpo.policy_loss, []

    def overflowing(*args, **kw):
        calls.append(1)
        loss, metrics = real(*args, **kw)
        return loss * float("nan"), metrics

    with monkeypatch.context() as m:
        m.setattr(grpo, "policy_loss", overflowing)
        assert run(tmp_path / "run", "--steps", "9", "--updates-per-rollout", "2", "--micro-batch-tokens", "100000") == 2
    assert "10 updates in a row" in capsys.readouterr().err and len(calls) == 10
    assert [r["skipped"] for r in rows_of(tmp_path / "run")] == [2, 2, 2, 2]
    for p in parameters_of(tmp_path / "run"):
        assert p.isfinite().all()


def test_scattered_skips_do_not_end_a_run(tmp_path):
    """Ten in a row are a policy that is lost; ten in a thousand are not."""
    r = a_run(tmp_path)
    for norm in [*[math.nan] * 9, 1.0] * 3:
        r.check([({}, norm), None])
    with pytest.raises(ValueError, match="10 updates in a row"):  # whatever the last ones of a step are
        a_run(tmp_path / "other").check([*[({}, math.nan)] * 11, ({}, 1.0)])
    with pytest.raises(ValueError, match="10 updates in a row"):
        r.check([({}, math.nan)] * 10)


def test_the_line_to_continue_with_continues(tmp_path, monkeypatch, capsys):
    """Without --resume it is refused, since the folder holds a run; in another folder than the project's there is no train.py."""
    monkeypatch.setattr(Run, "save", lambda *a: None)
    for line, argv in (("../qerl/train.py --out x", ["--out", "x"]), ("mine.py --lr 0.1 --tau 5", ["--lr", "0.1"]),
                       ("train.py --resume --lr 0.1", ["--resume", "--lr", "0.1"])):
        monkeypatch.setattr(sys, "argv", line.split())
        assert a_run(tmp_path, argv=argv).stop(None) == 130
        again = f"python {line}" + " --resume" * ("--resume" not in line)
        assert capsys.readouterr().out.splitlines()[-1] == f"stopped after 0 steps; continue with: {again}"


@pytest.mark.parametrize("name", ["model", "adapter"])
def test_what_no_run_has_written_is_not_cleared_away(tmp_path, capsys, name):
    """A base model in a folder called model or checkpoint was deleted by the run that was to train it."""
    shutil.copytree(TINY, tmp_path / name, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    assert run(tmp_path, "--steps", "1", "--model", str(tmp_path / name)) == 2
    assert f"holds {name}; choose a new or an empty folder" in capsys.readouterr().err and (tmp_path / name / "model.safetensors").is_file()


def test_held_out_questions_that_are_too_long_are_refused_before_the_run_begins(tmp_path, capsys):
    """They were first looked at by the evaluation before the first step, when the folder was there."""
    for split, question in (("train", "What is 1+1?"), ("test", "What is 1+1" + "+1" * 50 + "?")):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": question, "answer": "2"}) + "\n")
    assert run(tmp_path / "run", "--steps", "1", "--data", str(tmp_path), "--eval-n", "1", "--max-prompt", "60") == 2
    assert "--max-prompt 60: all 1 prompts are longer" in capsys.readouterr().err and not (tmp_path / "run").exists()
    argv = ["--steps", "1", "--data", str(tmp_path), "--eval-n", "1", "--max-prompt", "400", "--max-new-tokens", "400"]
    assert run(tmp_path / "run", *argv) == 2 and not (tmp_path / "run").exists()
    assert "400 new ones pass the model's 512 positions" in capsys.readouterr().err


def test_a_full_parameter_run_leaves_a_checkpoint_that_the_commands_load(small, tmp_path, capsys, monkeypatch):
    """--lora-rank 0 wrote nothing but resume's own file."""
    out = tmp_path / "run"
    assert run(out, "--lora-rank", "0", "--quant", "none", "--steps", "1", "--lr", "1e-3") == 0
    assert f"{out}: model/, metrics.jsonl" in capsys.readouterr().out
    args = flags.parse(chat.COMMAND, ["--run", str(out), "--prompt", "What is 1+1?"])
    assert (args.model, args.quant, args.adapter) == (str(out / "model"), "none", None)
    for p, q in zip(qwen.load(small, dtype=torch.float32).parameters(), parameters_of(out), strict=True):
        assert p.dim() != 2 or not torch.equal(p, q)  # every matrix has moved
    model, _ = sample.load_policy(args)
    for p, q in zip(model.parameters(), parameters_of(out), strict=True):
        assert torch.equal(p, q)
    assert json.loads((out / "model" / "policy.json").read_text())["prompt_style"] == "tags"
    # as other programs would read the tensors: the base's bfloat16 would round what was trained
    assert json.loads((out / "model" / "config.json").read_text())["torch_dtype"] == "float32"
    # the model/ of a run that has gone on takes its place, also of one that was stopped: eval.py asked the weights of before
    works, calls, last = sample.generate, [], model.embed.weight

    def stopped(*args, **kwargs):
        calls.append(1)
        return works(*args, **kwargs) if len(calls) == 1 else (_ for _ in ()).throw(KeyboardInterrupt)

    for code, generate in ((130, stopped), (0, works)):
        monkeypatch.setattr(sample, "generate", generate)
        assert train.main(["--resume", "--out", str(out), "--steps", "3"]) == code
        model, _ = sample.load_policy(args)
        for p, q in zip(model.parameters(), parameters_of(out), strict=True):
            assert torch.equal(p, q)
        assert not torch.equal(model.embed.weight, last)
        last = model.embed.weight
    assert {p.name for p in out.iterdir() if p.is_dir()} == {"model", "checkpoint"}
    assert evaluation.main(["--run", str(out), "--limit", "1", "--n", "1"]) == 0
    assert ["arithmetic", "trained"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


def test_no_step_of_a_full_parameter_run_is_called_the_best(tmp_path):
    """Its weights are not kept, but for the last."""
    r = a_run(tmp_path, "--eval-every", "1", "--lora-rank", "0", "--quant", "none")
    r.state.step = 1
    r.evaluated({"accuracy": 0.5, "stderr": None})
    assert r.state.best is None
