"""The arithmetic of bytes: against what loading, an adapter and a cache take, and published sizes; what frees the engine."""
import json
from pathlib import Path
from types import SimpleNamespace

from plumbing import checkpoint

import pytest
import torch

pytest.importorskip("triton")

import fast
import grpo
import lora
import model as M
from fast import engine, memory
from lab import convert
from lab.bench import SIZES, config
from nvfp4 import FORMATS
from tests import conftest


def build(family="qwen2", fmt="none", device="cpu", **changes):
    shape = dict(vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64, tie_word_embeddings=True) | changes
    config = M.Config(**shape, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    return M.build(config, checkpoint.RandomCheckpoint(), device, torch.bfloat16, fmt)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("fmt", ["none", *FORMATS])
def test_the_plan_counts_the_bytes_that_a_model_takes(fmt, family):
    model = build(family, fmt)
    fast.tile(model)
    tensors = {t.data_ptr(): t for t in [*model.parameters(), *model.buffers()]}
    assert sum(memory.weights(model.config, fmt).values()) == sum(t.nbytes for t in tensors.values())


def test_the_plan_of_the_published_shapes(tmp_path, capsys):
    """Weights on the card against published sizes; the adapter against the number PEFT prints (r = 16: 40.4 M for the 7B)."""
    gib = {size: sum(memory.weights(config(size), "nvfp4").values()) / 2**30 for size in SIZES}
    assert gib["7b"] < 5.6 and gib["14b"] < 9.9 and gib["32b"] < 19.7 and gib["7b"] > 5.3
    c = config("7b")
    assert memory.lora_parameters(c, 16) == 40_370_176 and memory.kv_per_token(c) == 57344
    assert abs(sum(memory.weights(c, "none").values()) / 2 - 7_615_616_512) < 5e5  # the model card's 7.62 B
    C, F, L, H, kv, V, tied = SIZES["7b"]
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="qwen2", vocab_size=V, hidden_size=C, intermediate_size=F, num_hidden_layers=L, num_attention_heads=H,
        num_key_value_heads=kv, tie_word_embeddings=tied)))
    convert.main("quantize", ["--plan", str(tmp_path), "--rank", "16", "--tokens", "4096"])
    out = capsys.readouterr().out
    assert all(word in out for word in ("nvfp4", "LoRA r=16", "kept for 4096 tokens", "training peak", "24 GB", "141 GB", "40.4 M", "56.0 KiB a token"))


def test_a_plan_of_a_hub_id_fetches_its_config_alone(monkeypatch, capsys):
    """Sixty gigabytes, to be told that they do not fit."""
    asked = []

    def fetch(name, weights=True):
        asked.append((name, weights))
        return Path(__file__).parent / "fixtures" / "qwen2_tied"

    monkeypatch.setattr(checkpoint, "fetch", fetch)
    assert convert.main("quantize", ["--plan", "Qwen/Qwen2.5-32B-Instruct"]) == 0
    assert asked == [("Qwen/Qwen2.5-32B-Instruct", False)] and "training peak" in capsys.readouterr().out


def test_rollouts_plan_float32_logits_and_the_sort_of_top_p():
    """Rows are made as many as the rest of the memory holds: too few bytes a row, and the first step runs out of it."""
    c = config("7b")
    logits = 2 * 4 * c.vocab_size
    assert memory.row_bytes(c, 100) == 100 * memory.kv_per_token(c) + 6 * logits
    assert memory.prefill_bytes(c, 8192) > 8192 * 3 * c.intermediate_size * 4 + memory.gemm_scratch(c)  # a prefill's MLP


def test_the_table_says_what_fits_a_card_and_how_much_is_left():
    """A card that holds the weights and not the update, called large enough."""
    c = config("7b")
    lines = {line[:28].strip(): line[28:].split() for line in memory.table(c, 16, 65536).splitlines()}
    formats, said = ["none", *FORMATS], set()
    for card, gib in (("24 GB", 23.5), ("40 GB", 39.4), ("80 GB", 79.1)):
        for fmt, cell in zip(formats, lines[card], strict=True):
            frozen = sum(memory.weights(c, fmt).values())
            adapter, update = 16 * 40_370_176, sum(memory.update_bytes(c, 65536))
            left = (gib - 1.5) * 2**30 - frozen - adapter
            assert cell == (f"{left / 57344e3:.0f}k" if left >= update else "no"), (card, fmt)
            said.add((left >= update, left >= 0))
    assert said == {(True, True), (False, True)}
    peaks = [[part / 2**30 for part in (sum(memory.weights(c, fmt).values()), adapter, *memory.update_bytes(c, 65536))] for fmt in formats]
    assert lines["training peak, estimate"] == [f"{sum(p):.2f}" for p in peaks]
    for i, name in enumerate(("weights", "LoRA r=16 with AdamW", "kept for 65536 tokens", "alive for a moment")):
        assert lines[name] == [f"{p[i]:.2f}" for p in peaks]


def test_an_update_is_planned_once():
    """The plan once said 8.3 GiB for the 7B where making room said 14.8: one of them let an update run out of memory."""
    c = config("7b")
    kept, momentary = memory.update_bytes(c, 16384)
    assert kept == 2 * 16384 * 28 * 3584 and 4 * memory.GIB < momentary < 6 * memory.GIB
    assert memory.update_bytes(c, 16384, checkpointing=False)[0] > 10 * kept
    assert memory.update_bytes(c, 8192)[0] * 2 == kept
    few = memory.update_bytes(c, 64)
    assert few[1] - memory.gemm_scratch(c) > 3 << 27 > 30 * few[0]  # a chunk of logits, of however few


@pytest.mark.parametrize(("gib", "given", "settled"), [
    (1000, {}, (32768, False)), (60, {}, (9216, False)), (16, {}, (2048, False)), (12, {}, (13312, True)),
    (1, {}, (2048, True)), (1000, {"checkpointing": "on"}, (32768, True)), (1, {"checkpointing": "off"}, (2048, False)),
    (1000, {"tokens": 700}, (700, False)), (6, {"tokens": 700}, (700, True))])
def test_an_update_takes_the_largest_micro_batches_that_fit(gib, given, settled):
    """Recomputing costs a third of the arithmetic: only where nothing fits without."""
    assert memory.fit_update(config("7b"), gib * memory.GIB, 1000, **given) == settled


def test_a_run_plans_its_micro_batches_by_what_is_free_and_says_so(monkeypatch, capsys):
    """Gradients and Adam's moments come later, and rows may be longer than a micro-batch: both must be counted before."""
    model, params = M.skeleton(config("7b")), [torch.empty(2**30, device="meta")]
    settings = dict(max_prompt=256, max_new_tokens=4096, micro_batch_tokens=0, checkpointing="auto")
    monkeypatch.setattr(engine.ranks, "gather", lambda free: [free, free - 40 * memory.GIB])  # another rank has less
    for gib, tokens, checkpointing in ((72, 9216, "off"), (32, 22528, "on")):  # a row of 4,352 does not fit 10 GiB without recomputing
        args = SimpleNamespace(**settings)
        monkeypatch.setattr(engine, "free_bytes", lambda gib=gib: (gib + 40) * memory.GIB)
        engine.plan_update(model, args, params)
        assert (args.micro_batch_tokens, args.checkpointing) == (tokens, checkpointing)
        # the first update of all makes them while keys and values stand by, each later one the gradients
        assert engine.UPDATES[model] == 12 * memory.GIB + sum(memory.update_bytes(model.config, tokens, checkpointing == "on"))
        assert "12.0 gradients and moments" in capsys.readouterr().out
    engine.plan_update(model, args := SimpleNamespace(**settings), params, share=2.0)  # all that is free, as lab/bench.py may ask
    assert args.checkpointing == "off"
    args = SimpleNamespace(**settings | {"micro_batch_tokens": 100})
    engine.plan_update(model, args, params)
    assert engine.UPDATES[model] == 12 * memory.GIB + sum(memory.update_bytes(model.config, 4352, args.checkpointing == "on"))


def test_making_room_frees_the_engine_only_if_the_update_needs_it(monkeypatch):
    """Freed at each step, the engine is captured anew each time; never freed, the update runs out of memory."""
    model = build()
    monkeypatch.setattr(engine, "free_bytes", lambda: 1000)
    engine.UPDATES[model] = 2000
    engine.make_room(model)  # nothing there to free
    engine.ENGINES[model] = ("mark", "engine", 8)
    engine.UPDATES[model] = 1000
    engine.make_room(model)
    assert model in engine.ENGINES
    engine.UPDATES[model] = 1001
    engine.make_room(model)
    assert model not in engine.ENGINES


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gpu_an_update_takes_what_is_planned(checkpointing):
    """Peak memory of forward and backward of one micro-batch, the chunked LM head included: no more, and not a small part."""
    c = dict(vocab_size=50000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    model = build("qwen2", "nvfp4", "cuda", **c)
    model.checkpointing = checkpointing
    lora.add_lora(model, 32, 32)
    assert fast.install(model) is None
    for _ in range(2):  # the first run also compiles
        rows = torch.randint(0, 50000, (16, 1024)).tolist()
        completions = [grpo.Completion({}, row[:100], row[100:], [-9.0] * 924, True, advantage=1.0) for row in rows]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grpo.backward(model, completions, conftest.settings(micro_batch_tokens=1 << 20))
        took = torch.cuda.max_memory_allocated() - before
        model.zero_grad()
    planned = sum(memory.update_bytes(model.config, 16384, checkpointing))
    assert 0.7 * planned < took < 1.05 * planned, f"{took / memory.GIB:.2f} of {planned / memory.GIB:.2f} GiB"


@pytest.mark.gpu
def test_gpu_what_is_free_is_of_the_share_that_a_run_may_take():
    total = torch.cuda.get_device_properties().total_memory
    whole = engine.free_bytes()
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        assert 0 < engine.free_bytes() <= 0.1 * total < whole
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
