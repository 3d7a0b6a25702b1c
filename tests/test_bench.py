"""lab/bench.py and lab/tables.py: what they do without a GPU; the measurements themselves need one."""
import json
import statistics
import subprocess

import pytest
import torch

from fast import memory
from lab import bench, tables


def test_rows_measured_again_replace_the_old_ones(tmp_path, monkeypatch, capsys):
    """A table is made in parts: what is not measured this time stays, what is replaces, nothing is
    there twice."""
    monkeypatch.setattr(bench, "revision", lambda: "1a2b")
    out, key = tmp_path / "new" / "r.json", ("shape", "M")
    for M, us in ((1, 3.0), (2, 4.0), (2, 50000.49)):
        bench.record(out, {"shape": "a", "M": M, "us": us}, key)
    assert json.loads(out.read_text()) == [{"shape": "a", "M": 1, "us": 3.0, "revision": "1a2b"},
                                           {"shape": "a", "M": 2, "us": 50000.0, "revision": "1a2b"}]
    assert list(out.parent.iterdir()) == [out]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"shape=a M={M} us={us} revision=1a2b" for M, us in ((1, 3), (2, 4), (2, 50000))]


def test_what_does_not_fit_is_a_row_among_the_others(tmp_path, monkeypatch):
    """It has no micro-batch, which tells other rows apart: their figures must not be lost with it."""
    monkeypatch.setattr(bench, "revision", lambda: "1a2b")
    out, key = tmp_path / "r.json", ("size", "micro_batch")
    rows = [{"size": "7b", "micro_batch": 2048, "update_s": 1.5}, {"size": "72b", "out_of_memory": True}]
    for row in rows + rows:
        bench.record(out, row, key)
    assert json.loads(out.read_text()) == [row | {"revision": "1a2b"} for row in rows]


def test_floor_of_a_7b_step():
    """The arithmetic behind every floor: 3.67 GB of four-bit weights, 1.09 GB of head, 80 MB of
    adapter, 56 KiB a token."""
    c, tied = bench.config("7b"), bench.config("0.5b")
    weights = bench.floor_bytes(c, "nvfp4", 0, 0, 512)
    assert weights == pytest.approx(3.67e9 + 152064 * 3584 * 2, rel=0.003)
    assert bench.floor_bytes(c, "nvfp4", 16, 0, 512) - weights == pytest.approx(8.07e7, rel=0.01)
    assert bench.floor_bytes(c, "nvfp4", 0, 8, 512) - weights == 8 * 512 * 57344
    # a tied head is the embedding, and is read all the same
    assert tied.tie_word_embeddings and bench.floor_bytes(tied, "nvfp4", 0, 0, 1) > 151936 * 896 * 2 + 1.9e8


def test_shapes_are_found_by_name():
    assert (bench.linear("0.5b.down"), bench.linear("7b.qkv")) == ((896, 4864), (4608, 3584))


@pytest.mark.parametrize("argv, told", [
    (["rollout", "7b:fp3:16:1"], "size:format:rank:rows"),
    (["rollout", "7b:nvfp4:16:x"], "7b:nvfp4"), (["rollout", "7b:nvfp4:16:0"], "7b:nvfp4:16:0"),
    (["rollout", "7b:nvfp4:16:1,"], "7b:nvfp4:16:1,"),
    (["rollout"], "CONFIG"), (["step", "--sizes", "8b"], "0.5b")])
def test_bad_arguments_are_told(argv, told):
    with pytest.raises(ValueError, match=told):
        bench.parse_args(argv)


@pytest.mark.parametrize("name, short", [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
                                         ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090")])
def test_results_are_named_after_the_card(name, short):
    """Rows of an H200 once went among those of the H100."""
    assert bench.card(name) == short


def test_every_peer_says_what_was_measured_and_how():
    """A figure without its version, card and method, or one that belongs to no number of rows."""
    for peer in tables.PEERS.values():
        assert all(peer[k] for k in ("what", "version", "card", "method"))
        for values in [*peer.get("speedup", {}).values(), peer.get("geometric_mean")]:
            assert values is None or len(values) == len(peer["rows"])
        if "speedup" in peer:
            assert peer["geometric_mean"] == [round(statistics.geometric_mean(of), 2) for of in zip(*peer["speedup"].values(), strict=True)]


def test_the_documents_tables_are_those_of_the_rows():
    """Tables that were edited by hand, or rows that were measured again without `python lab/tables.py`."""
    for path, text in tables.texts().items():
        assert text == path.read_text(), path


def test_what_did_not_fit_or_drew_nothing_is_no_whole_step(monkeypatch):
    """lab/bench.py leaves such rows: one that ran out of memory in its update, one of --no-rollout."""
    row = tables.PAPER_STEP | {"size": "7b", "quant": "nvfp4", "completions": 2, "rollout_s": 5.0, "update_s": 1.0}
    others = [{k: v for k, v in row.items() if k != lacks} | {"completions": n} for lacks, n in (("update_s", 4), ("rollout_s", 8))]
    capped = [row | {"card_gib": 24.0}, others[0] | {"card_gib": 16.0}]
    monkeypatch.setattr(tables, "results", lambda what, where: [row, *others, *capped])
    assert tables.paper_steps() == {("7b", "nvfp4", 2): 6.0}
    assert tables.other_steps() == capped[:1]


def test_a_table_takes_the_place_of_the_one_with_its_first_cell():
    text = "a\n\n| a | 1 |\n|---|---|\n| x | 2 |\n| y | 3 |\n\n| b | a |\n|---|---|\n"
    assert tables.filled(text, [["a", "2"], ["x", (1520.0, 2.0)], ["y", None]]) == (
        "a\n\n| a | 2 |\n|---|---|\n| x | 1,520 (2.00) |\n| y |  |\n\n| b | a |\n|---|---|\n")
    with pytest.raises(ValueError, match="0 tables begin with c"):
        tables.filled(text, [["c"]])
    with pytest.raises(ValueError, match="2 tables begin with a"):
        tables.filled(text + text, [["a"]])


def test_a_row_names_the_commit_that_was_measured(tmp_path, monkeypatch):
    """And says if files differ from it: a figure of a working tree once stood under the commit before."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    monkeypatch.setattr(bench, "HOME", tmp_path)
    assert bench.revision() == ""
    (tmp_path / "results").mkdir()
    for name in ("a.py", "results/r.json"):
        (tmp_path / name).write_text("1")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run(git + command, check=True)
    commit = bench.revision()
    assert len(commit) >= 8 and int(commit, 16) >= 0
    (tmp_path / "results/r.json").write_text("2")  # rows that were just written
    assert bench.revision() == commit
    (tmp_path / "a.py").write_text("2")
    assert bench.revision() == commit + "+"


@pytest.mark.gpu
def test_the_plan_is_within_five_percent_of_what_a_model_takes():
    c = bench.config("7b")
    torch.cuda.reset_peak_memory_stats()
    _, gib = bench.build(c, "nvfp4")
    assert abs(gib * 2**30 / sum(memory.weights(c, "nvfp4").values()) - 1) < 0.05 and gib < 5.6
    assert bench.peak_gib() < gib + 4
