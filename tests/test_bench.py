"""lab/bench.py and lab/tables.py: what they do without a GPU; the measurements themselves need one."""
import json

import pytest
import torch

from fast import memory
from lab import bench, tables


def test_rows_measured_again_replace_the_old_ones(tmp_path, capsys):
    """A table is made in parts: what is not measured this time stays, what is replaces, nothing is
    there twice."""
    out, key = tmp_path / "new" / "r.json", ("shape", "M")
    for M, us in ((1, 3.0), (2, 4.0), (2, 50000.49)):
        bench.record(out, {"shape": "a", "M": M, "us": us}, key)
    assert json.loads(out.read_text()) == [{"shape": "a", "M": 1, "us": 3.0},
                                           {"shape": "a", "M": 2, "us": 50000.0}]
    assert list(out.parent.iterdir()) == [out]
    assert capsys.readouterr().out == "shape=a M=1 us=3\nshape=a M=2 us=4\nshape=a M=2 us=50000\n"


def test_what_does_not_fit_is_a_row_among_the_others(tmp_path):
    """It has no micro-batch, which tells other rows apart: their figures must not be lost with it."""
    out, key = tmp_path / "r.json", ("size", "micro_batch")
    rows = [{"size": "7b", "micro_batch": 2048, "update_s": 1.5}, {"size": "72b", "out_of_memory": True}]
    for row in rows + rows:
        bench.record(out, row, key)
    assert json.loads(out.read_text()) == rows


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


def test_tables_are_made(tmp_path, monkeypatch, capsys):
    """Marlin's and vLLM's figures beside another shape or number of rows than they belong to. And a traceback, at a file in results/
    whose name was taken for a card's."""
    tables.tables()
    assert "| 7b:nvfp4:16 | 404 (190) |" in capsys.readouterr().out
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    rows = [{"fmt": "nvfp4", "shape": s, "pass": "forward", "M": m, "speedup": 1.0 if s == "3b.o" else 2.0}
            for s in [*tables.PEERS["marlin"]["speedup"], "3b.o"] for m in bench.ROWS]
    rows += [rows[0] | other | {"speedup": 9.0} for other in ({"fmt": "mxfp4"}, {"pass": "backward"})]  # no forward pass of NVFP4
    (tmp_path / "kernels_l40s.json").write_text(json.dumps([r for r in rows if r["shape"] == "3b.o"]))  # none of Marlin's shapes
    for card in ("h100", "h200"):  # the others' ratios were measured on an H100
        (tmp_path / f"kernels_{card}.json").write_text(json.dumps(rows))
    rows = [{"size": "7b", "quant": q, "lora_rank": 16, "rows": n, "kind": "rows",
             "decode_tok_s": 380.0 * n} for q in ("none", "nvfp4") for n in (1, 8, 16)[: 2 + (q != "none")]]
    (tmp_path / "rollout_h100.json").write_text(json.dumps([*rows, rows[2] | {"kind": "length", "decode_tok_s": 9.0}]))
    (tmp_path / "rollout_h200.json").write_text(json.dumps([rows[0] | {"size": "3b"}]))
    row = {"size": "7b", "quant": "nvfp4", "completions": 2, "group": 1, "new": 2048, "card_gib": 0, "rollout_s": 5.0, "update_s": 1.0}
    other = [row | {"quant": "none", "rollout_s": 8.0}, row | {"card_gib": 24.0, "update_s": 9.0}, row | {"size": "3b", "new": 512}]
    (tmp_path / "step_h100.json").write_text(json.dumps([row, *other, {k: v for k, v in row.items() if k != "rollout_s"} | {"completions": 8}]))
    tables.tables()
    out = capsys.readouterr().out
    assert "| completions | 2 |\n|---|---|\n| 7b:nvfp4 | 6.00 (1.50) |\n| 7b:none | 9.00 (1.00) |\n" in out
    assert "| 3b:none:16 | 380 (-) |" in out
    assert "| 7b.o | 2.00 (1.19) | 2.00 (1.20)" in out and "| geometric mean | 2.00 (1.82)" in out
    assert "| 7b.o | 2.00 (-) | 2.00 (-)" in out
    assert "| rows | 1 | 8 | 16 |" in out
    assert "| 7b:nvfp4:16 | 380 (190) | 3040 (1552) | 6080 (-) |" in out


@pytest.mark.gpu
def test_the_plan_is_within_five_percent_of_what_a_model_takes():
    c = bench.config("7b")
    torch.cuda.reset_peak_memory_stats()
    _, gib = bench.build(c, "nvfp4")
    assert abs(gib * 2**30 / sum(memory.weights(c, "nvfp4").values()) - 1) < 0.05 and gib < 5.6
    assert bench.peak_gib() < gib + 4
