"""Reading metrics.jsonl and drawing it."""
import json
import math
import struct
from types import SimpleNamespace

from plumbing import curves
from plumbing.run import Run

import pytest

from lab import plot

ROWS = [{"step": i, "reward": 0.1 * i, "accuracy": 0.05 * i, "entropy": 1 / (i + 1),
         "length_mean": 40 + i, "grad_norm": 0.2, "logp_gap_mean": 0.01 * i,
         "sigma": 0.0 if i < 2 else 0.01, "rollout_tok_s": 900.0, "update_tok_s": 800.0,
         "seconds": 2.0 * i} for i in range(8)]
for measured in ROWS[::3]:
    measured.update(eval_accuracy=0.1 * measured["step"], eval_stderr=0.02)


def folder(path, rows=ROWS, tail="", config=None, summary=None):
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    for name, content in (("config", config), ("summary", summary)):
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def draw(runs, out):
    """As lab/plot.py does."""
    plot.draw(plot.lines(runs), out)


def size(png):
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.fixture
def axes(monkeypatch):
    """The panels of the pictures, as matplotlib objects; writing them would take seconds each."""
    seen = []
    monkeypatch.setattr(curves.Figure, "savefig", lambda fig, *a, **k: seen.append(fig))
    return lambda: {ax.get_title(loc="left"): ax for ax in seen[-1].axes}


def test_ticks_of_accuracy_are_not_rounded(tmp_path, axes):
    """Ticks every 2.5 points read 43%, 45%, 48%."""
    draw([folder(tmp_path / "a")], tmp_path / "p.png")
    say = axes()["held-out accuracy"].yaxis.get_major_formatter()
    assert [say(y, 0) for y in (0.29, 0.425, 0.45, 1.0)] == ["29%", "42.5%", "45%", "100%"]


def legend(panels):
    return [text.get_text() for text in panels["reward"].figure.legends[0].get_texts()]


def test_all_panels_and_runs_are_drawn(tmp_path, axes):
    """A column renamed in train.py, or the last run drawn over the others."""
    runs = [folder(tmp_path / "a"), folder(tmp_path / "b", ROWS[:5])]
    draw(runs, tmp_path / "p.png")
    panels = axes()
    assert list(panels) == [p[0] for p in curves.PANELS]
    a, b = panels["reward"].lines
    assert list(a.get_xdata()) == [*range(8)] and len(b.get_xdata()) == 5
    assert list(a.get_ydata()) == [0.1 * i for i in range(8)]  # as logged
    assert legend(panels) == [f"{tmp_path.name}/a", f"{tmp_path.name}/b"]  # two runs may have one name in two folders
    assert len(panels["tokens/s of rollout (thin: update)"].lines) == 4


def test_each_axis_reads_as_its_panel_says(tmp_path, axes):
    """A noise of 1e-4 beside 1e-2 on a linear axis is none; steps drawn as slopes were never there."""
    draw([folder(tmp_path / "a")], tmp_path / "p.png")
    panels = axes()
    scales = {title: panels[title].get_yscale() for title, _, _ in curves.PANELS}
    assert [title for title, scale in scales.items() if scale == "log"] == ["|log-prob gap|, sampler to trainer", "noise $\\sigma$"]
    assert panels["noise $\\sigma$"].lines[0].get_drawstyle() == "steps-post"
    assert panels["reward"].lines[0].get_drawstyle() == "default"
    assert panels["accuracy of the samples"].yaxis.get_major_formatter()(0.25) == "25%"
    assert panels["completion length (tokens)"].get_ylim()[0] == 0 and panels["completion length (tokens)"].yaxis.get_major_formatter()(2e4) == "20k"
    shared = panels["reward"].get_shared_x_axes()
    assert all(shared.joined(panels["reward"], ax) for ax in panels.values())


@pytest.mark.parametrize(("top", "words"), [(0.0035, {"0.002", "0.003"}), (0.35, set())])
def test_a_log_axis_of_less_than_a_decade_has_numbers_to_read(tmp_path, axes, top, words):
    """Ten to the minus third, times 2.25, took a third of the panel."""
    draw([folder(tmp_path / "a", [{**r, "logp_gap_mean": (0.0021, top)[r["step"] % 2]} for r in ROWS])], tmp_path / "p.png")
    axis = axes()["|log-prob gap|, sampler to trainer"].yaxis
    axis.axes.figure.canvas.draw()
    told = {t.get_text() for t in axis.get_minorticklabels()} - {""}
    assert words <= told and (words or not any("0.00" in t for t in told)) and not any("times" in t for t in told)


def test_held_out_accuracy_is_drawn_where_it_was_measured(tmp_path, axes):
    """The one number that matters in no picture, or a line through steps without a measurement."""
    rows = [{"step": 0, "reward": 0.1, "eval_accuracy": 0.25}, {"step": 1, "reward": 0.2, "eval_accuracy": None}]
    end = {"accuracy_before": 0.25, "accuracy_after": 0.75}
    after = {"accuracy_after": 0.9, "stderr_after": 0.01, "steps": 8}
    runs = [folder(tmp_path / "a", summary=after), folder(tmp_path / "b", rows, summary=end),
            folder(tmp_path / "none", rows[1:], summary=dict.fromkeys(end))]
    draw(runs, tmp_path / "p.png")
    a, b, none = axes()["held-out accuracy"].containers
    assert list(a.lines[0].get_xdata()) == [0, 3, 6, 8] and a.lines[0].get_linestyle() == "-"
    assert a.lines[0].get_ydata() == pytest.approx([0, 0.3, 0.6, 0.9])
    ends = [segment[:, 1].tolist() for segment in a.lines[2][0].get_segments()]
    assert ends[1] == pytest.approx([0.28, 0.32])  # the standard error, both ways
    assert ends[3] == pytest.approx([0.89, 0.91])
    assert list(b.lines[0].get_xdata()) == [0, 2] and list(b.lines[0].get_ydata()) == [0.25, 0.75]
    assert b.lines[0].get_linestyle() == "None" and len(none.lines[0].get_xdata()) == 0
    draw([folder(tmp_path / "gone on", summary=after | {"steps": 6})], tmp_path / "p.png")
    assert list(axes()["held-out accuracy"].containers[0].lines[0].get_xdata()) == [0, 3, 6]


def test_runs_of_several_seeds_are_one_line_in_a_band(tmp_path, axes):
    """Three seeds drawn as three arms, a repeated seed counted as another, or seeds of different
    settings averaged."""
    def run(name, seed, quant, rows):
        rows = [{"step": i, "reward": r, "eval_accuracy": r} for i, r in enumerate(rows)]
        return folder(tmp_path / name, rows, config={"quant": quant, "seed": seed, "out": name})

    runs = [run("a0", 0, "nvfp4", [1.0, 2, 3, 9]), run("b0", 0, "none", [5.0, 5, 5]),
            run("a1", 1, "nvfp4", [3.0, 2, 7])]
    draw(runs, tmp_path / "p.png")
    panels = axes()
    assert legend(panels) == ["quant=nvfp4 (2 seeds)", "quant=none"]
    assert list(panels["reward"].lines[0].get_ydata()) == [2.0, 2.0, 5.0]  # steps that both have
    band = panels["reward"].collections[0].get_datalim(panels["reward"].transData)
    assert (band.y0, band.y1) == (1.0, 7.0)
    bars = panels["held-out accuracy"].containers[0].lines[2][0].get_segments()
    assert [s[:, 1].tolist() for s in bars] == [[1.0, 3.0], [2.0, 2.0], [3.0, 7.0]]
    three = [[{"step": 0, "reward": r}] for r in (1.0, 2.0, 6.0)]
    three[0].append({"step": 1, "reward": 4.0}), three[1].append({"step": 1, "reward": None}), three[2].append({"step": 1})
    first, second = plot.over_seeds(three)
    bounds = pytest.approx([3.0, 3 - 7**0.5 / 3**0.5, 3 + 7**0.5 / 3**0.5])
    assert [first[k] for k in ("reward", "reward_low", "reward_high")] == bounds
    assert second == {"step": 1}  # not the first seed's alone
    again = run("a2", 1, "nvfp4", [0.0])
    assert plot.lines([*runs[::2], again]) == [(f"{tmp_path.name}/a* (2 seeds)", runs[::2]), (f"{tmp_path.name}/a2", [again])]


def test_a_flag_that_came_later_does_not_part_new_runs_from_old_ones(tmp_path):
    """Off, it changes nothing; the seeds of an arm would be two lines, before and after."""
    def run(name, **config):
        return folder(tmp_path / name, config={"quant": "nvfp4", "aqn": False} | config)

    old, new, used = run("old", seed=0), run("new", seed=1, beta=0.0), run("used", seed=1, beta=0.1)
    assert [runs for _, runs in plot.lines([old, new, used])] == [[old, new], [used]]


def test_a_run_draws_its_own_curves(tmp_path, axes, capsys):
    """Under its folder's name, wherever it was started; lab/ is not asked."""
    out = folder(tmp_path / "_mine", summary={"seconds": 3.0, "accuracy_before": 0.4, "accuracy_after": 0.5, "steps": 8, "gain": 0.1,
                                              "stderr_gain": 0.02})
    Run.report(SimpleNamespace(out=out, args=SimpleNamespace(lora_rank=4)))
    panels = axes()
    assert list(panels) == [p[0] for p in curves.PANELS] and panels["reward"].figure.get_suptitle() == "_mine"
    assert list(panels["held-out accuracy"].containers[0].lines[0].get_xdata()) == [0, 3, 6, 8]
    assert capsys.readouterr().out == (f"{out}: adapter/, metrics.jsonl, metrics.png, summary.json (3 s)\n"
                                       "held-out accuracy: 40.0% before, 50.0% after 8 steps (+10.0 +- 2.0 points)\n")


def test_labels_are_the_flags_that_differ(tmp_path):
    """Folder names that say nothing of what was compared, or a legend with every flag in it."""
    def label(*configs):
        at = tmp_path / str(len(list(tmp_path.iterdir())))
        at.mkdir()
        return [name.removeprefix(f"{at.name}/") for name, _ in
                plot.lines([folder(at / f"r{i}", config=c) for i, c in enumerate(configs)])]

    same = {"model": "some/where/base", "lr": 1e-5, "lora_rank": 32}
    assert label({**same, "quant": "none", "aqn": False}, {**same, "quant": "nvfp4", "aqn": True}) \
        == ["quant=none aqn=off", "quant=nvfp4 aqn=on"]
    assert label(same, {**same, "lr": 2.5e-5, "lora_rank": 16, "model": "x/tiny/"}) \
        == ["model=base lr=1e-05 lora-rank=32", "model=tiny lr=2.5e-05 lora-rank=16"]
    assert label(same, same) == ["r0", "r1"] and label(same) == ["r0"]
    assert label(same, {**same, "new_flag": 3}) == ["r0", "r1"]  # what the other did is not known
    assert label(same, None, {**same, "lr": 1.0}) == ["r0", "r1", "r2"]
    assert label({**same, "quant": "a"}, {**same, "quant": "b"}, {**same, "quant": "b"}) \
        == ["r0", "r1", "r2"]
    assert label(dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 1)) == ["r0", "r1"]
    assert label(same | {"micro_batch_tokens": 1, "seed": 0}, same | {"micro_batch_tokens": 2, "seed": 1}) == ["r* (2 seeds)"]
    idle = [same | {"seed": i} | dict.fromkeys(plot.IDLE, i) for i in (0, 1)]  # say of nothing that was compared
    assert label(same | {"seed": 0, "commit": "a"}, same | {"seed": 1, "script": "train.py"}) == ["r* (2 seeds)"]  # an older run did not say
    assert "save_every" in plot.IDLE and "out" in plot.IDLE and label(*idle) == ["r* (2 seeds)"]
    runs = [folder(tmp_path / name, config=same | {"seed": i, "script": name}) for i, name in enumerate(("train.py", "mine.py"))]
    assert [name for name, _ in plot.lines(runs)] == ["script=train.py", "script=mine.py"]
    taus = [folder(tmp_path / f"tau{i}", config=same | {"seed": i, "script": f"mine.py --tau a/{i}"}) for i in (0, 1)]
    assert [name for name, _ in plot.lines(taus)] == ["script=mine.py --tau a/0", "script=mine.py --tau a/1"]  # not seeds of one idea


def test_eight_runs_look_different_in_grey_print(tmp_path, axes):
    """Told apart by colour alone, or two runs of one look."""
    runs = [folder(tmp_path / str(i)) for i in range(8)]
    draw(runs, tmp_path / "p.png")
    looks = [(str(line.get_color()), line.get_linestyle(), line.get_marker())
             for line in axes()["reward"].lines]
    assert len({*looks}) == 8 and len({look[1:] for look in looks[:4]}) == 4


def test_missing_columns_and_values_are_tolerated(tmp_path, axes):
    """KeyError on a run without noise, a null from a step with nothing to train on, or an older
    file."""
    rows = [{"step": 0, "reward": None}, {"step": 1, "reward": 1.0, "sigma": 0.0},
            {"step": 2, "reward": math.nan}]
    assert curves.column(rows, "reward")[1] == 1.0 and math.isnan(curves.column(rows, "reward")[0])
    draw([folder(tmp_path / "a", rows), folder(tmp_path / "b")], tmp_path / "p.png")
    assert len(axes()) == 9
    draw([tmp_path / "a"], tmp_path / "p.png")
    assert list(axes()) == ["reward"]  # a sigma that is always 0 has nothing to show on a log axis
    draw([folder(tmp_path / "one", [{"step": 0, "reward": 1.0}])], tmp_path / "p.png")
    point = axes()["reward"].lines[-1]  # a line of one step would be invisible
    assert point.get_marker() == "o" and point.get_markevery() is None
    with pytest.raises(ValueError, match="no column has a number to draw"):
        draw([folder(tmp_path / "none", [{"step": 0, "reward": None}])], tmp_path / "p.png")


def test_a_norm_that_float32_holds_is_drawn(tmp_path, axes):
    """A gradient of 3e15 before it is clipped ended a run that was done with an error, and without its picture."""
    draw([folder(tmp_path / "a", [row | {"grad_norm": 3e38} for row in ROWS])], tmp_path / "p.png")
    assert list(axes()["gradient norm"].lines[0].get_ydata()) == [3e38] * len(ROWS)


@pytest.mark.parametrize("tail", ['{"step": 8, "rew', '{"step"', '"x"\n', "\n\n"])
def test_half_written_last_line_is_dropped(tmp_path, tail):
    """Plotting while the run writes, or after it was killed."""
    assert curves.read(folder(tmp_path / "a", tail=tail)) == ROWS


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    """Rows dropped in silence: the curve would look complete."""
    run = folder(tmp_path / "a")
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    cut = SimpleNamespace(state=SimpleNamespace(step=9))
    for blank in ("", "\n" * 20):  # behind blank lines a resume took it for the last one, and cut all from there on
        (run / "metrics.jsonl").write_text("".join(text[:3]) + blank + '{"ste\n' + "".join(text[3:]))
        for read in (lambda: curves.read(run), lambda: Run.cut(cut, run / "metrics.jsonl")):
            with pytest.raises(ValueError, match=f"metrics.jsonl, row {4 + len(blank)}:"):
                read()


def test_command_writes_where_it_says(tmp_path, monkeypatch, capsys):
    """A picture in another folder than the one printed."""
    b = folder(tmp_path / "b", [{"step": 0, "reward": 1.0}])
    monkeypatch.chdir(tmp_path)
    plot.main([str(b)])
    assert "wrote compare.png" in capsys.readouterr().out and min(size(tmp_path / "compare.png")) > 400
    plot.main([str(b), "--out", "c.png"])
    assert size(tmp_path / "c.png")
    plot.main([str(b), "--out", "c.svg"])
    assert b"<svg" in (tmp_path / "c.svg").read_bytes()
    plot.main([str(b), "--out", "c"])
    assert size(tmp_path / "c")
