"""experiments.py: the arms of the ablation, and what its table counts."""
import json
import subprocess
from pathlib import Path

import pytest
import torch

import experiments
import grpo
import train
from runtime import flags


@pytest.fixture
def trained(monkeypatch):
    """train.main writes a run whose accuracy is 0.5, + 0.1 with NVFP4, + 0.02 with noise, + 0.01 a seed; the arguments of each."""
    calls = []

    def main(argv):
        if "--resume" in argv:
            argv = [*argv, "--quant", "none", "--no-aqn"]
        args = flags.parse("train", argv)
        calls.append(args)
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        after = 0.5 + 0.1 * (args.quant == "nvfp4") + 0.02 * args.aqn + 0.01 * args.seed
        rows = [{"step": 0, "eval_accuracy": 0.25}, {"step": 1, "eval_accuracy": None}]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (out / "summary.json").write_text(json.dumps({"accuracy_after": after}))
        return 0

    monkeypatch.setattr(train, "main", main)
    return calls


def test_arms_differ_by_format_noise_and_seed_alone(trained, tmp_path):
    """An arm at another learning rate, or on other questions, measures those."""
    assert experiments.main(["2x2", "--out", str(tmp_path), "--lr", "0.02"]) == 0
    assert len({(a.quant, a.aqn, a.seed, a.out) for a in trained}) == 20
    rest = [{k: v for k, v in vars(a).items() if k not in ("quant", "aqn", "seed", "out")} for a in trained]
    assert all(r == rest[0] and r["lr"] == 0.02 for r in rest)


def test_a_run_that_is_there_is_not_repeated_and_a_stopped_one_goes_on(trained, tmp_path):
    stopped = tmp_path / "none--no-aqn-s3"
    stopped.mkdir()
    (stopped / "config.json").write_text("{}")
    assert experiments.main(["2x2", "--out", str(tmp_path)]) == 0 and len(trained) == 20
    assert [Path(a.out) for a in trained if a.resume] == [stopped]
    assert experiments.main(["2x2", "--out", str(tmp_path)]) == 0 and len(trained) == 20


def test_the_table_has_means_and_errors_over_seeds_and_effects_within_a_seed(trained, tmp_path, capsys):
    """Seeds 0 to 4 add 0 to 4 points: mean 2, standard error sqrt(2.5 / 5); within a seed they cancel."""
    experiments.main(["2x2", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "| none, no-aqn | 25.0 +- 0.0 | 52.0 +- 0.7 |" in out and "| nvfp4, aqn | 25.0 +- 0.0 | 64.0 +- 0.7 |" in out
    assert "NVFP4 adds 10.0 +- 0.0 points" in out and "AQN adds 2.0 +- 0.0 points" in out


def test_an_experiment_has_to_be_named(capsys):
    assert experiments.main([]) == 2 and "gradient, two-copies, 2x2" in capsys.readouterr().err


def test_a_table_of_held_out_accuracy_needs_questions(trained, tmp_path, capsys):
    """It was a traceback after the last training."""
    assert experiments.main(["2x2", "--eval-n", "0", "--out", str(tmp_path)]) == 2 and not trained
    assert "--eval-n 0" in capsys.readouterr().err


@pytest.mark.parametrize(("jobs", "share"), [("3", None), ("5", "0.5")])
def test_runs_side_by_side_are_processes_of_their_own(monkeypatch, tmp_path, jobs, share):
    """Two trainings in one process would share its seeds and signals; on one card, each has its part of the memory."""
    ran, cards = [], []

    def run(command, stdout, stderr, env):
        cards.append(env["CUDA_VISIBLE_DEVICES"])
        assert share == (command[command.index("--card-share") + 1] if "--card-share" in command else None)
        out = Path(command[-1])
        ran.append((out.name, command[command.index("--loss") + 1], command[command.index("--seed") + 1]))
        out.mkdir()
        (out / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval_accuracy": 0.25}) + "\n")
        (out / "summary.json").write_text(json.dumps({"accuracy_after": 0.5}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert experiments.main(["objective", "--out", str(tmp_path), "--jobs", jobs, "--seeds", "0,7"]) == 0
    assert sorted(ran) == sorted((f"{loss}-s{seed}", loss, seed) for loss in grpo.OBJECTIVES for seed in "07")
    assert set(cards) == {"0", "1", "2"}


def test_two_copies_sample_in_four_bits_and_train_in_sixteen(tmp_path):
    """Rounding stands between sampler and trainer, and what the trainer learns reaches the sampler: the adapter is one."""
    few = ["--steps", "2", "--prompts-per-step", "2", "--group-size", "4", "--max-new-tokens", "8", "--eval-n", "0", "--overlong",
           "none", "--no-dynamic-sampling", "--no-aqn", "--lr", "0.1", "--reward", f"{tmp_path / 'mine.py'}:odd"]
    (tmp_path / "mine.py").write_text("def odd(text, row):\n    return len(text) % 2\n")
    gaps, entropies = {}, {}
    for name, main in (("one", train.main), ("two", experiments.apart)):
        assert main([*few, "--out", str(tmp_path / name)]) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        gaps[name], entropies[name] = rows[0]["logp_gap_mean"], [row["sampler_entropy"] for row in rows]
    assert gaps["one"] < 1e-5 and gaps["two"] > 1e-3
    assert entropies["one"][0] == entropies["two"][0] and abs(entropies["two"][1] - entropies["two"][0]) > 0.01
