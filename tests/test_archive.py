"""results/runs.tar.xz by lab/archive.py: what it keeps prints what its runs did."""
import json
import os
import random
import re
import shutil
import tarfile
from pathlib import Path

from plumbing import curves
from plumbing.files import saved

import pytest

from lab import archive, experiments, plot

ROOT = Path(__file__).resolve().parents[1]

@pytest.fixture
def table(monkeypatch, tmp_path):
    """An archive without a run."""
    monkeypatch.setattr(archive, "RUNS", tmp_path / "runs.tar.xz")
    tarfile.open(tmp_path / "runs.tar.xz", "w:xz").close()
    return tmp_path / "runs.tar.xz"


def trained(out, quant, seed, steps=8, questions=40, **flags):
    """A folder as train.py leaves it: 12 x 8 samples a step, held-out questions asked once."""
    rng = random.Random(f"{quant} {seed}")
    out.mkdir(parents=True)
    right = {when: [int(rng.random() < share) for _ in range(questions)] for when, share in (("before", 0.3), ("after", 0.7))}
    right["before"] = [0, 0, 0, 1] * (questions // 4)  # all runs begin alike, and with zeros
    command = flags.pop("command", f"python train.py --quant {quant} --out {out}")
    had = {"quant": quant, "seed": seed, "steps": steps, "out": str(out), "card_share": 0.3, "command": command, "commits": {"a/b": "c"}}
    (out / "config.json").write_text(json.dumps(had | flags))
    (out / "summary.json").write_text(json.dumps({
        **{f"accuracy_{when}": sum(of) / questions for when, of in right.items()}, "steps": steps, "seconds": 12.3456, "peak_gib": 1.04,
        "best": {"step": steps, "accuracy": 0.7}, "command": command}))
    rows = [{"step": i, "accuracy": rng.randrange(97) / 96, "loss": 0.1, "entropy": 0.2 / (i + 1), "length_mean": 30.123 + i, "seconds": 1.5 * i,
             "sampler_kl": 1.234e-5 * (i + 1), "clip_first_frac": i / 1000,
             "seconds_update": 1.0, "eval_accuracy": 0.25 if i % 4 == 0 else None, "eval_stderr": 0.1 if i == 0 else None} for i in range(steps)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for when, of in right.items():
        (out / f"eval_{when}.jsonl").write_text("".join(json.dumps({"question": i, "accuracy": a}) + "\n" for i, a in enumerate(of)))
    return str(out)


def printed(capsys, *argv):
    assert experiments.main(["compare", *argv]) == 0
    return capsys.readouterr().out


def test_kept_runs_print_what_their_folders_print(table, tmp_path, capsys):
    """Accuracies so short that another digit was printed, a script or flag left out: the archive's figures were others than the
    documents', and nobody had the folders any more."""
    runs = [trained(tmp_path / "runs" / f"{name}-s{seed}", quant, seed, script=script) for seed in range(3)
            for name, quant, script in (("none", "none", "train.py"), ("nvfp4", "nvfp4", "train.py"), ("fork", "nvfp4", "mine.py --tau 2"))]
    said = [printed(capsys, *sorted(runs), *more) for more in ((), ("--growth",), ("--entropy", "--interval"), ("--arms", "--pairs"))]
    assert archive.main([*runs, "--group", "mine", "--commit", "abc1234"]) == 0
    capsys.readouterr()
    assert [printed(capsys, "mine/*", *more) for more in ((), ("--growth",), ("--entropy", "--interval"), ("--arms", "--pairs"))] == said
    assert printed(capsys, "mine/fork-s?", runs[0], "mine/n*-s[12]", "mine/nvfp4-s0") == said[0]  # folders and kept runs together
    assert "over 40 questions" in said[0] and "mine.py --tau 2" in said[0]
    with archive.folders(["mine/nvfp4-s1"]) as [run]:
        assert plot.flags_of(run) == plot.flags_of(runs[4])
        had = saved(run, "config.json")
        assert had["commit"] == "abc1234" and had["card_share"] == 0.3 and not {"out", "commits"} & {*had}  # another machine's path
        assert curves.read(runs[4])[0].keys() - curves.read(run)[0].keys() == {"loss", "eval_stderr"}
        assert [row["sampler_kl"] for row in curves.read(run)] == pytest.approx([1.234e-5 * i for i in range(1, 9)], rel=1e-5)
        for when in ("before", "after"):
            name = f"eval_{when}.jsonl"
            assert archive.answers(run, name) == archive.answers(runs[4], name)
    assert not Path(run).exists()


def test_the_same_runs_are_the_same_bytes(table, tmp_path):
    """Each time that a run was added every byte of the archive was another."""
    empty = table.read_bytes()
    run = trained(tmp_path / "s0", "none", 0)
    made = []
    for _ in range(2):
        table.write_bytes(empty)
        os.utime(run)
        assert archive.main([run, "--group", "mine"]) == 0
        made.append(table.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(table) as tar:
        assert {(file.mtime, file.uid, file.uname) for file in tar} == {(0, 0, "")}


def test_what_is_no_run_is_named(table, tmp_path, capsys):
    run = trained(tmp_path / "s0", "none", 0)
    assert archive.main([run, "--group", "mine"]) == 0 and "1 runs more" in capsys.readouterr().out
    size = table.stat().st_size
    twice = shutil.copytree(run, tmp_path / "again" / "s0")
    assert archive.main([run, str(twice), "--group", "other"]) == 2 and "other/s0 is in" in capsys.readouterr().err
    for argv, why in (([run, "--group", "mine"], "--group mine: mine/s0 is in"), ([str(tmp_path), "--group", "other"], "metrics.jsonl"), ([run, "--group", "../mine"], "--group ../mine: is no name"), ([run], "--group")):
        assert archive.main(argv) == 2 and why in capsys.readouterr().err
    rows = (tmp_path / "again" / "s0" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "again" / "s0" / "metrics.jsonl").write_text("".join(rows[:3] + rows[4:]))
    assert archive.main([str(twice), "--group", "other"]) == 2 and "metrics.jsonl lacks a step" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as m, pytest.raises(ZeroDivisionError):
        m.setattr(tarfile.TarFile, "add", lambda *a, **kw: 1 / 0)
        archive.main([run, "--group", "other"])
    (tmp_path / "s0" / "config.json").unlink()
    assert archive.main([run, "--group", "other"]) == 2 and "has no config.json" in capsys.readouterr().err
    assert table.stat().st_size == size
    assert experiments.main(["compare", "mine/s"]) == 2 and "mine/s: no such folder" in capsys.readouterr().err


def test_curves_are_of_kept_runs_too(table, tmp_path):
    """The documents' commands took folders that the repository no longer has."""
    run = trained(tmp_path / "s0", "none", 0, group_size=8)
    assert archive.main([run, "--group", "mine"]) == 0
    assert plot.main(["mine/*", "--out", str(tmp_path / "curves.png")]) == 0 and (tmp_path / "curves.png").stat().st_size > 1000


def test_intervals_are_students(table, tmp_path, capsys):
    """With three seeds twice the standard error is an interval of 82%, not of 95."""
    known = {(0.975, 1): 12.706, (0.975, 2): 4.303, (0.975, 4): 2.776, (0.975, 39): 2.023, (0.8, 2): 1.061, (0.975, 1318): 1.962}
    assert {of: round(experiments.student(*of), 3) for of in known} == known
    for i, (quant, after) in enumerate(zip(["none", "nvfp4"] * 3, (0.5, 0.51, 0.5, 0.53, 0.5, 0.52), strict=True)):
        out = tmp_path / f"{quant}-s{i // 2}"
        out.mkdir()
        (out / "config.json").write_text(json.dumps({"quant": quant, "seed": i // 2}))
        (out / "summary.json").write_text(json.dumps({"accuracy_after": after}))
    runs = [str(path.parent) for path in tmp_path.glob("*/config.json")]
    # 1, 3 and 2 points: a standard error of 1 / sqrt(3), times 4.303, and times 4.303 + 1.061
    assert printed(capsys, *runs, "--interval") == ("quant none -> nvfp4: +2.0 points, +- 0.6 over 3 seeds; 95%: -0.5 to +4.5, "
                                                    "seen from 3.1 on\n")
    assert "+- 0.6 over 3 pairs\n" in printed(capsys, *runs, "--pairs")


def test_the_wider_error_makes_the_interval(tmp_path, capsys):
    """Three seeds that agree by luck, on four questions, gave an interval of nothing."""
    for i, quant in enumerate(["none", "nvfp4"] * 3):
        out = Path(trained(tmp_path / str(i), quant, i // 2))
        (out / "eval_after.jsonl").write_text("".join(f'{{"accuracy": {a}}}\n' for a in ((0, 0, 1, 0), (1, 1, 1, 0))[i % 2]))
    # 50 points by two questions of four: 28.9 over questions, times 3.182 of Student's t
    assert "+- 28.9 over 4 questions; 95%: -41.9 to +141.9, seen from 120.1 on" in printed(capsys, *map(str, tmp_path.iterdir()), "--interval")


def test_late_entropy_is_of_the_second_half(tmp_path, capsys):
    """What noise does to exploration late in training, not the entropy that all runs begin with."""
    runs = [trained(tmp_path / quant, quant, 0) for quant in ("none", "nvfp4")]
    for run, late in zip(runs, (0.1, 0.12), strict=True):
        rows = [{"step": i, "accuracy": 0.5, "entropy": 0.9 if i < 3 else late} for i in range(6)]
        Path(run, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = printed(capsys, *runs, "--entropy", "--arms").splitlines()
    assert out[0].endswith("entropy 0.900 -> 0.100") and out[-1] == "quant none -> nvfp4: +2.0 hundredths of a nat"
    Path(runs[1], "metrics.jsonl").write_text("".join(json.dumps(row | {"entropy": None}) + "\n" for row in rows))
    assert experiments.main(["compare", *runs, "--entropy"]) == 2 and "not all of these runs have logged it" in capsys.readouterr().err


def test_arms_of_a_method_that_logs_no_entropy_are_shown(capsys):
    """Evolution strategies draw no samples whose entropy could be logged: a traceback."""
    assert printed(capsys, "tiny_es/s?", "--arms").startswith("tiny_es/s* (5 seeds): 33.2 -> ")
    assert experiments.main(["compare", "tiny_es/s?", "--entropy"]) == 2 and "--entropy" in capsys.readouterr().err


def test_a_seed_of_two_models_is_two_draws(tmp_path, capsys):
    """Seed 0 of a small model was averaged with seed 0 of a large one, and the error was that of two seeds, not of four pairs."""
    for i, after in enumerate((0.50, 0.51, 0.50, 0.53, 0.70, 0.72, 0.70, 0.70)):
        out = tmp_path / str(i)
        out.mkdir()
        (out / "config.json").write_text(json.dumps({"model": "ab"[i // 4], "lr": 1 + i // 4, "quant": "none", "aqn": i % 2 > 0, "seed": i // 2 % 2}))
        (out / "summary.json").write_text(json.dumps({"accuracy_after": after}))
    runs = [str(tmp_path / str(i)) for i in range(8)]
    assert "aqn off -> on: +1.5 points, +- 0.0 over 2 seeds (4 pairs)\n" in printed(capsys, *runs)
    assert "aqn off -> on: +1.5 points, +- 0.6 over 4 pairs\n" in printed(capsys, *runs, "--pairs")


@pytest.mark.parametrize("name", ["README.md", "docs/claims.md", "docs/measured.md", "docs/noise.md", "results/LOG.md"])
def test_runs_that_documents_name_are_there(name):
    """A command that compares nothing."""
    with tarfile.open(archive.RUNS) as tar:
        runs = {str(Path(file).parent) for file in tar.getnames()}
    groups = {run.split("/")[0] for run in runs}
    patterns = re.findall(rf"'((?:{'|'.join(map(re.escape, groups))})/[^']+)'", (ROOT / name).read_text())
    assert not [p for p in patterns if not any(archive.fnmatchcase(run, p) for run in runs)]


def test_the_kept_runs_print_the_documents_figures(capsys):
    """The paper's central ablation on the 1.5B, from the archive that the repository has."""
    assert printed(capsys, "2x2_1.5b/*").splitlines() == [
        "aqn off -> on: +0.5 points, +- 0.3 over 4 seeds (8 pairs), +- 0.4 over 1319 questions",
        "quant none -> nvfp4: -2.1 points, +- 0.5 over 5 seeds (9 pairs), +- 0.5 over 1319 questions"]
    assert printed(capsys, "2x2_1.5b/*", "--growth").splitlines() == [
        "aqn off -> on: -0.5 points, +- 0.3 over 4 seeds (8 pairs)", "quant none -> nvfp4: -0.2 points, +- 0.9 over 5 seeds (9 pairs)"]
