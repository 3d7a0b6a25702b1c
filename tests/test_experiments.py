"""lab/experiments.py: what runs are compared by."""
import json
import shutil
from pathlib import Path

from plumbing import flags

import train
from lab import experiments


def trained(folder, seeds):
    """Runs whose accuracy is 0.5, + 0.1 with NVFP4, + 0.02 with noise, + 0.01 a seed: their folders."""
    runs = [folder / f"{quant}{noise}-s{seed}" for seed in range(seeds) for quant in ("none", "nvfp4") for noise in ("--no-aqn", "--aqn")]
    for out in runs:
        args = flags.parse(train.COMMAND, ["--quant", out.name.partition("--")[0], "--aqn" if "--aqn" in out.name else "--no-aqn",
                                           "--seed", out.name[-1]])
        out.mkdir()
        after = 0.5 + 0.1 * (args.quant == "nvfp4") + 0.02 * args.aqn + 0.01 * args.seed
        rows = [{"step": 0, "eval_accuracy": 0.25, "entropy": 0.5}, {"step": 1, "eval_accuracy": 0.4 + 0.01 * args.seed, "entropy": 0.25 + 0.01 * args.seed}]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (out / "summary.json").write_text(json.dumps({"accuracy_before": 0.25 + 0.01 * args.seed, "accuracy_after": after}))
        (out / "config.json").write_text(json.dumps(vars(args)))
    return [*map(str, runs)]


def test_arms_have_means_and_errors_over_seeds_and_effects_within_a_seed(tmp_path, capsys):
    """Seeds 0 to 4 add 0 to 4 points: mean 2, standard error sqrt(2.5 / 5); within a seed they cancel."""
    assert experiments.main(["compare", "--arms", *trained(tmp_path, 5)]) == 0
    out = capsys.readouterr().out
    assert "quant=none aqn=off (5 seeds): 27.0 -> 42.0 +- 0.7 after 1, 52.0 +- 0.7, entropy 0.500 -> 0.270\n" in out
    assert "quant=nvfp4 aqn=on (5 seeds): 27.0 -> 42.0 +- 0.7 after 1, 64.0 +- 0.7, entropy 0.500 -> 0.270\n" in out
    assert out.endswith("aqn off -> on: +2.0 points, +- 0.0 over 5 seeds (10 pairs)\n"
                        "quant none -> nvfp4: +10.0 points, +- 0.0 over 5 seeds (10 pairs)\n")


def test_no_means_of_some_seeds_stand_beside_those_of_others(tmp_path, capsys):
    """One seed was evaluated more often: its accuracy alone stood in a row of means over all."""
    runs = trained(tmp_path, 2)
    for run in runs[4:]:
        with open(Path(run) / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"step": 2, "eval_accuracy": 0.3, "entropy": 0.25}) + "\n")
    experiments.main(["compare", "--arms", *runs])
    out = capsys.readouterr().out
    assert "after 1, " in out and "after 2" not in out


def kept(tmp_path, **runs):
    """Runs of four questions, answered as the digits say; a name is quant_lr_seed. Their folders."""
    for name, digits in runs.items():
        out = tmp_path / name
        out.mkdir()
        quant, lr, seed = name.split("_")
        (out / "config.json").write_text(json.dumps({"quant": quant, "lr": float(lr), "seed": int(seed), "eval_every": int(seed)}))
        (out / "summary.json").write_text(json.dumps({"accuracy_after": digits.count("1") / len(digits)}))
        (out / "eval_after.jsonl").write_text("".join(f'{{"accuracy": {digit}}}\n' for digit in digits))
    return [str(tmp_path / name) for name in runs]


def test_runs_are_compared_where_they_differ_in_one_flag_alone(tmp_path, capsys):
    """A run of another rate and format says nothing of either; a mean over pairs is not one over seeds."""
    runs = kept(tmp_path, none_16_0="1100", nvfp4_2_0="1100", none_2_0="1000", none_2_1="1111", nvfp4_2_1="0000", mxfp4_3_0="1111")
    assert experiments.main(["compare", *runs]) == 0
    # by seed +25 and -100 points; by question -50, 0, -50, -50
    assert capsys.readouterr().out.splitlines() == ["lr 2 -> 16: +25.0 points, +- 25.0 over 4 questions",
        "quant none -> nvfp4: -37.5 points, +- 62.5 over 2 seeds, +- 12.5 over 4 questions"]
    (Path(runs[0]) / "eval_after.jsonl").unlink()
    assert experiments.main(["compare", *runs]) == 0
    assert "nvfp4: -37.5 points, +- 62.5 over 2 seeds\n" in capsys.readouterr().out
    (tmp_path / "none_2_0" / "eval_after.jsonl").write_text('{"accuracy": 0.5}\n' * 4)
    (tmp_path / "nvfp4_2_0" / "eval_after.jsonl").write_text('{"accuracy": 0.75}\n{"accuracy": 0.25}\n' * 2)
    assert experiments.main(["compare", *runs[1:3]]) == 0
    assert capsys.readouterr().out == "quant none -> nvfp4: +0.0 points, +- 14.4 over 4 questions\n"
    assert experiments.main(["compare", runs[0], runs[3]]) == 0 and "no two of these runs" in capsys.readouterr().out
    # flags that change together, as rank and alpha may, are one
    assert experiments.main(["compare", runs[1], runs[5]]) == 0
    assert capsys.readouterr().out.startswith("lr 2 -> 3, quant nvfp4 -> mxfp4: +50.0 points")


def test_growth_is_compared_from_where_each_run_began(tmp_path, capsys):
    """Of a policy that starts lower, as four bits do, and ends lower, the samples may still improve faster."""
    runs = kept(tmp_path, none_1_0="1111", nvfp4_1_0="1110")
    for run, start, later in zip(runs, (0.5, 0.25), (0.625, 0.5), strict=True):
        rows = [start] * 2 + [later] * 2 + [1.0] * 4
        (Path(run) / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "accuracy": a}) + "\n" for i, a in enumerate(rows)))
    assert experiments.main(["compare", *runs]) == 0 and "nvfp4: -25.0 points" in capsys.readouterr().out
    assert experiments.main(["compare", *runs, "--growth"]) == 0 and capsys.readouterr().out == "quant none -> nvfp4: +12.5 points\n"
    (Path(runs[1]) / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "accuracy": 0}) + "\n" for i in range(5)))
    assert experiments.main(["compare", *runs, "--growth"]) == 2 and "has 5 steps of 5; --growth needs all, and 6 or more" in capsys.readouterr().err
    config = Path(runs[0]) / "config.json"  # the half of what it has so far is not the half of another's
    config.write_text(json.dumps(json.loads(config.read_text()) | {"steps": 16}))
    assert experiments.main(["compare", *runs, "--growth"]) == 2 and "none_1_0: has 8 steps of 16" in capsys.readouterr().err


def test_flags_are_compared_as_they_are(tmp_path, capsys):
    """By the last part of a path, two models were one; a run that did not know a flag yet never had its default; a pair of two
    formats was dropped where a third had come first; a run given twice counted twice."""
    runs = kept(tmp_path, none_1_0="1100", nvfp4_1_0="1110", nf4_1_0="1111")
    for run, more in zip(runs, ({"model": "a/base", "levels": [3, 4]}, {"model": "b/base", "levels": [3, 4]},
                                {"model": "b/base", "levels": [3, 4], "beta": 0.0}), strict=True):
        path = Path(run) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    assert experiments.main(["compare", *runs, runs[1]]) == 0
    assert capsys.readouterr().out.startswith("quant nvfp4 -> nf4: +25.0 points") and len(runs) == 3


def test_what_cannot_be_compared_is_named(tmp_path, capsys):
    runs = kept(tmp_path, none_1_0="1000", nvfp4_1_0="110")
    for argv, why in (([], "RUN"), ([str(tmp_path)], "config.json"), (runs, "different numbers of questions"),
                      ([runs[0], shutil.copytree(runs[0], tmp_path / "twin")], "have the same flags; leave one out")):
        assert experiments.main(["compare", *map(str, argv)]) == 2 and why in capsys.readouterr().err
    (tmp_path / "none_1_0" / "eval_after.jsonl").write_text('{"other": 1}\n')
    assert experiments.main(["compare", *runs]) == 2 and "eval_after.jsonl, row 1: the field 'accuracy' is missing" in capsys.readouterr().err
    (tmp_path / "none_1_0" / "eval_after.jsonl").unlink()
    config = json.loads((tmp_path / "none_1_0" / "config.json").read_text())
    (tmp_path / "none_1_0" / "config.json").write_text(json.dumps(config | {"steps": 400}))
    (tmp_path / "none_1_0" / "summary.json").write_text('{"accuracy_after": 0.5, "steps": 2}')  # it has gone on since
    assert experiments.main(["compare", *runs]) == 2 and "none_1_0: has no accuracy_after of its last step" in capsys.readouterr().err
    (tmp_path / "none_1_0" / "summary.json").unlink()
    assert experiments.main(["compare", *runs]) == 2 and "none_1_0: has no accuracy_after" in capsys.readouterr().err


def test_an_older_run_had_the_defaults_of_its_own_model(tmp_path, capsys):
    """Those of the demo's made flags differ in which the two runs agree."""
    for out in (runs := trained(tmp_path, 1)[::2]):
        config = json.loads((tmp_path / out / "config.json").read_text()) | {"model": "Qwen/x", "loss": "grpo", "overlong": "none", "lr": 1e-5}
        older = {k: v for k, v in config.items() if k not in ("loss", "overlong", "lr")} if "none" in str(out) else config
        (tmp_path / out / "config.json").write_text(json.dumps(older))
    assert experiments.main(["compare", *map(str, runs)]) == 0 and capsys.readouterr().out.startswith("quant none -> nvfp4: +10.0")


def test_what_is_switched_on_is_one_change_whatever_its_size(tmp_path, capsys):
    """No noise and noise of 5e-2 were two flags apart where noise of 1e-2 was there too, and not compared."""
    runs = kept(tmp_path, none_1_0="1000", none_1_1="1100", none_1_2="1111", none_1_3="0000")
    noises = [{"aqn": False}, {"aqn_start": 1e-2}, {"aqn_start": 5e-2}, {"aqn_start": 5e-2, "old_logp": "current"}]
    for run, noise in zip(runs, noises, strict=True):
        path = Path(run) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"aqn": True, "seed": 0} | noise))
    assert experiments.main(["compare", *runs]) == 0
    assert [line.split(" points")[0] for line in capsys.readouterr().out.splitlines()] == [
        "aqn off -> on, aqn-start 0.01: +25.0", "aqn off -> on, aqn-start 0.05: +75.0", "aqn-start 0.01 -> 0.05: +50.0",
        "old-logp sampler -> current: -100.0"]
