"""bench.py: what it does without a GPU; the measurements themselves need one."""
import json

import pytest
import torch

import bench
import lora
import model as qwen
from weights import checkpoint


def test_rows_measured_again_replace_the_old_ones(tmp_path):
    """A table is made in parts: what is not measured this time stays, what is replaces, nothing is there twice."""
    out, key = tmp_path / "new" / "r.json", ("shape", "M")
    bench.merge(out, [{"shape": "a", "M": 1, "us": 3.0}, {"shape": "a", "M": 2, "us": 4.0}], key)
    bench.merge(out, [{"shape": "a", "M": 2, "us": 5.0}], key)
    assert json.loads(out.read_text()) == [{"shape": "a", "M": 1, "us": 3.0}, {"shape": "a", "M": 2, "us": 5.0}]
    assert list(out.parent.iterdir()) == [out]


def test_floor_of_a_7b_step():
    """The arithmetic behind every "x floor": 3.67 GB of four-bit weights, 1.09 GB of head, 80 MB of adapter, 56 KiB a token."""
    floor = bench.floor_bytes(bench.config("7b"), "nvfp4", 16, 8, 512)
    assert floor == {"linear": pytest.approx(3.67e9, rel=0.01), "head": 152064 * 3584 * 2,
                     "lora": pytest.approx(8.07e7, rel=0.01), "kv": 8 * 512 * 57344}


def test_adapters_replace_each_other():
    """Rank 16, then 64, then none, around the same weights: an adapter around an adapter would be measured twice."""
    c = qwen.Config(301, 64, 96, 2, 4, 2, 16)
    m = checkpoint.build(c, checkpoint.RandomCheckpoint(), dtype=torch.float32)
    base = m.layers[0].mlp.down_proj
    for rank in (4, 8):
        bench.adapt(m, rank)
        assert m.layers[0].mlp.down_proj.base is base and {layer.rank for _, layer in lora.lora_layers(m)} == {rank}
    bench.adapt(m, 0)
    assert m.layers[0].mlp.down_proj is base and not lora.lora_layers(m)


@pytest.mark.parametrize("argv, told", [
    (["rollout", "7b:fp3:16:1"], "size:format:rank:rows"), (["rollout", "7b:nvfp4:16:x"], "7b:nvfp4"),
    (["kernels", "--shapes", "7b.up"], "7b.gate_up"), (["step", "--sizes", "8b"], "0.5b")])
def test_bad_arguments_are_told(argv, told, capsys):
    with pytest.raises(SystemExit) as e:
        bench.parse_args(argv)
    assert e.value.code == 2 and told in capsys.readouterr().err


def test_report_makes_tables_and_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    rows = [{"fmt": "nvfp4", "shape": s, "pass": "forward", "M": m, "speedup": 2.0} for s in bench.MARLIN for m in bench.ROWS]
    (tmp_path / "kernels_h100.json").write_text(json.dumps(rows))
    rows = [{"size": "7b", "quant": q, "lora_rank": 16, "rows": n, "kind": "rows", "decode_tok_s": 380.0 * n, "step_ms": 2.0,
             "floor_ms": 1.5, "peak_gib": 9.0} for q in ("none", "nvfp4") for n in (1, 8)]
    (tmp_path / "rollout_h100.json").write_text(json.dumps(rows))
    bench.report(None)
    out = capsys.readouterr().out
    assert "| geometric mean | 2.00 (1.82)" in out and "| 7b NVFP4 + LoRA 16, 1 | 380 | 190 | 2.00 | 2.00 | 1.50 | 9.0 |" in out
    assert (tmp_path / "kernels_h100.png").stat().st_size > 1000 < (tmp_path / "rollout_h100.png").stat().st_size
