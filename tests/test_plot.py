"""Reading metrics.jsonl and drawing it."""
import json
import math
import struct

import pytest

import plot

ROWS = [{"step": i, "reward": 0.1 * i, "accuracy": 0.05 * i, "entropy": 1 / (i + 1), "length_mean": 40 + i, "grad_norm": 0.2,
         "logp_gap_mean": 0.01 * i, "sigma": 0.0 if i < 2 else 0.01, "rollout_tok_s": 900.0, "update_tok_s": 800.0,
         "seconds": 2.0 * i} for i in range(8)]


def folder(path, rows=ROWS, tail=""):
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return path


def size(png):
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.fixture
def axes(monkeypatch):
    """The panels of the pictures drawn, as matplotlib objects."""
    seen = []
    real = plot.Figure.savefig
    monkeypatch.setattr(plot.Figure, "savefig", lambda fig, *a, **k: (seen.append(fig), real(fig, *a, **k))[1])
    return lambda: {ax.get_title(loc="left"): ax for ax in seen[-1].axes}


def test_all_panels_and_runs_are_drawn(tmp_path, axes):
    """A column renamed in train.py, or the last run drawn over the others."""
    runs = [folder(tmp_path / "a"), folder(tmp_path / "b", ROWS[:5])]
    out = plot.plot(runs, tmp_path / "p.png", x="seconds", smooth=3)
    assert out == tmp_path / "p.png" and min(size(out)) > 400
    panels = axes()
    assert list(panels) == [p[0] for p in plot.PANELS]
    raw_a, mean_a, raw_b, _ = panels["reward"].lines
    assert list(raw_a.get_xdata()) == [2.0 * i for i in range(8)] and len(raw_b.get_xdata()) == 5
    assert list(raw_a.get_ydata()) == [0.1 * i for i in range(8)]
    assert mean_a.get_ydata()[7] == pytest.approx(0.6)
    assert [t.get_text() for t in panels["reward"].figure.legends[0].get_texts()] == ["a", "b"]
    assert len(panels["tokens/s"].lines) == 8


def test_missing_columns_and_values_are_tolerated(tmp_path, axes):
    """KeyError on a run without noise, a null from a step with nothing to train on, or an older file."""
    rows = [{"step": 0, "reward": None}, {"step": 1, "reward": 1.0, "sigma": 0.0}, {"step": 2, "reward": math.nan}]
    assert plot.column(rows, "reward")[1] == 1.0 and math.isnan(plot.column(rows, "reward")[0])
    plot.plot([folder(tmp_path / "a", rows), folder(tmp_path / "b")], tmp_path / "p.png")
    assert len(axes()) == 8
    plot.plot([tmp_path / "a"], tmp_path / "p.png")
    assert list(axes()) == ["reward"]  # a sigma that is always 0 has nothing to show on a log axis
    plot.plot([folder(tmp_path / "one", [{"step": 0, "reward": 1.0}])], tmp_path / "p.png")
    assert axes()["reward"].lines[-1].get_marker() == "o"  # a line of one step would be invisible


def test_trailing_mean_skips_nan():
    """One nan blanking `smooth` steps of the curve, or the future leaking into the present."""
    got = plot.trailing_mean([1.0, math.nan, 3.0, 5.0, 100.0], 3)
    assert got == [1.0, 1.0, 2.0, 4.0, 36.0]
    assert math.isnan(plot.trailing_mean([math.nan, 1.0], 2)[0])


@pytest.mark.parametrize("tail", ['{"step": 8, "rew', '{"step"', '"x"\n', "\n\n"])
def test_half_written_last_line_is_dropped(tmp_path, tail):
    """Plotting while the run writes, or after it was killed."""
    assert plot.read(folder(tmp_path / "a", tail=tail)) == ROWS


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    """Rows dropped in silence: the curve would look complete."""
    run = folder(tmp_path / "a")
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(text[:3]) + '{"ste\n' + "".join(text[3:]))
    with pytest.raises(ValueError, match="metrics.jsonl, line 4"):
        plot.read(run)


def test_a_resumed_step_counts_once(tmp_path):
    """A run killed between its row and its checkpoint logs that step again: the curve would go back in time."""
    again = {**ROWS[5], "reward": 9.0}
    rows = plot.read(folder(tmp_path / "a", [*ROWS[:7], again]))
    assert [r["step"] for r in rows] == list(range(7)) and rows[5]["reward"] == 9.0


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    """Two legends that read `run`."""
    for d in ("x", "y"):
        (tmp_path / d).mkdir()
    runs = [folder(tmp_path / "x" / "run"), folder(tmp_path / "y" / "run"), folder(tmp_path / "z")]
    assert plot.labels(runs) == [str(runs[0]), str(runs[1]), "z"]
    assert plot.labels([runs[2] / "metrics.jsonl"]) == ["z"]


def test_command_writes_where_it_says(tmp_path, monkeypatch, capsys):
    """A picture in another folder than the one printed."""
    a, b = folder(tmp_path / "a"), folder(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    plot.main([str(a)])
    assert size(a / "metrics.png") and f"wrote {a / 'metrics.png'}" in capsys.readouterr().out
    plot.main([str(a), str(b)])
    assert size(tmp_path / "compare.png")
    plot.main([str(a / "metrics.jsonl"), "--out", "c.png", "--smooth", "1"])
    assert size(tmp_path / "c.png")


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    """A traceback, or a picture of nothing."""
    monkeypatch.chdir(tmp_path)
    good = str(folder(tmp_path / "good"))
    (tmp_path / "nothing").mkdir()
    empty = str(folder(tmp_path / "empty", []))
    bare = str(folder(tmp_path / "bare", [{"step": 0, "other": 1}]))
    for argv, word in (([], "RUN"), (["nothing"], "nothing/metrics.jsonl: no such file"), (["absent"], "absent"),
                       ([empty], "no complete row"), ([bare], "none of the columns"), ([bare, "--x", "seconds"], "--x seconds"),
                       ([good, "--smooth", "0"], "--smooth"), ([good, "--x", "epoch"], "--x"),
                       ([good, "--out", "no/where.png"], "--out"), ([good, "--out", "p.docx"], "docx"),
                       ([good, "--what"], "--what")):
        with pytest.raises(SystemExit) as e:
            plot.main(argv)
        err = capsys.readouterr().err
        assert e.value.code == 2 and word in err.splitlines()[-1] and "Traceback" not in err
    assert not list(tmp_path.glob("*.*"))
