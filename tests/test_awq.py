"""AWQ: folding keeps the function, the search never loses to plain rounding and wins where channels differ, text in, CLI."""
import copy
import json
import re
import shutil
from pathlib import Path

from plumbing import arithmetic, checkpoint, datasets, flags
from plumbing.tokenizer import Tokenizer

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import lora
import model as M
import nvfp4
import sample
import train
from lab import convert
from nvfp4 import FORMATS, block_scales
from tests.conftest import policy_of

FIXTURES = Path(__file__).parent / "fixtures"
TINY = Path(__file__).parent.parent / "assets" / "tiny"
IDS = torch.randint(0, 48, (4, 24), generator=torch.Generator().manual_seed(2))


def loaded(path, device="cpu", dtype=torch.bfloat16, fmt="nvfp4", calib=None, sequences=128, length=512):
    """model.load with AWQ, calibrated on a file's text."""
    return M.load(path, device, dtype, fmt, datasets.calibration(calib, path, sequences, length))


def snap(w, fmt, scale, global_scale):
    """w on the grid of these scales."""
    return nvfp4.encode(w, fmt, scale, global_scale).dequantize()


def config(kv=2, **changes):
    c = M.read_config(FIXTURES / "qwen2_tied")
    c.hidden_size, c.intermediate_size, c.head_dim, c.num_key_value_heads = 64, 128, 16, kv
    for k, v in changes.items():
        setattr(c, k, v)
    return c


def outliers(model, seed=0):
    """Make a few input channels of every linear fifty times larger, the way trained models are."""
    g = torch.Generator().manual_seed(seed)
    for block in model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.data[torch.randperm(len(norm.weight), generator=g)[:3]] *= 50
        for m in (block.attn.qkv_proj, block.mlp.gate_up_proj):  # v and up rows: the inputs of o and down
            rows = list(m.parts.values())
            m.weight.data[-rows[-1] :][torch.randperm(rows[-1], generator=g)[:3]] *= 20
    return model


def random_model(c=None, dtype=torch.float32, quant="none"):
    return outliers(M.build(c or config(), checkpoint.RandomCheckpoint(1), dtype=dtype))


def calibrated(model, ids=IDS):
    """[{linear: Stats}] of each block, from a forward pass of the original model."""
    out, x = [], model.embed(ids)
    rope = model.rope(torch.arange(ids.shape[1])[None])
    for block in model.layers:
        out.append(nvfp4.gather(block, x, rope))
    return out


def quantized(model, fmt="nvfp4"):
    model = copy.deepcopy(model)
    rows = [row for block, stats in zip(model.layers, calibrated(model), strict=True)
            for row in nvfp4.quantize_block(block, stats, model.config, fmt)]
    return model, rows


# ---- folding


def without_rounding(monkeypatch, harm=False):
    """What search chose is kept in float32, and its exponents are far from 0. harm: a producer that is divided is said to be worse
    than by plain rounding."""

    def unrounded(w, H, magnitude, fmt, exact=lambda s: s, divide=None, scaled=True):  # the last exponent, and its weight as it is
        s = magnitude.clamp(min=1e-8) ** (0.7 if scaled else 0)
        s = exact(s / (s.max() * s.min()).sqrt())
        worse = harm and divide is not None and bool((divide != 1).any())
        return nvfp4.Rounded(2.0 if worse else 0.5, 1.0, 0.7 * scaled, s, w * s / (1 if divide is None else divide[:, None]))

    def keep(q, parts, bias):
        m = M.Linear(q.shape[1], parts, bias is not None)
        m.weight.data = q
        if bias is not None:
            m.bias.data = bias
        return m

    monkeypatch.setattr(nvfp4, "search", unrounded)
    monkeypatch.setattr(nvfp4, "QuantLinear", keep)


def biased_model(kv, bias):
    model = random_model(config(kv, qkv_bias=bias))
    for block in model.layers:
        if bias:
            torch.nn.init.normal_(block.attn.qkv_proj.bias)
        for norm in (block.input_layernorm, block.post_attention_layernorm):  # whose weight / s is rounded
            norm.weight.data = norm.weight.data.bfloat16()
    return model


@pytest.mark.parametrize("kv,bias", [(1, True), (2, False), (2, True), (4, True)])
def test_the_folded_model_is_the_original_before_rounding(monkeypatch, kv, bias):
    """s folded into the wrong rows, heads that share a kv head with different s, a v bias left unscaled: all change the function."""
    model = biased_model(kv, bias)
    want = model(IDS)
    without_rounding(monkeypatch)
    folded, rows = quantized(model)
    assert (folded(IDS) - want).abs().max() < 1e-5 * want.abs().max().clamp(min=1) + 1e-5
    for a, b in zip(model.layers, folded.layers, strict=True):
        for name in ("input_layernorm", "post_attention_layernorm"):
            ratio = getattr(a, name).weight / getattr(b, name).weight
            assert ratio.max() / ratio.min() > 3  # something was folded
        ratio = (a.attn.qkv_proj.weight[-16 * kv :] / b.attn.qkv_proj.weight[-16 * kv :]).median(1).values
        assert ratio.max() / ratio.min() > 1.5


def test_a_producer_that_gives_up_leaves_its_consumer_unscaled(monkeypatch):
    """Scales of o and down that nothing in v and up takes back."""
    model = biased_model(2, True)
    want = model(IDS)
    without_rounding(monkeypatch, harm=True)
    folded, rows = quantized(model)
    assert [r["exponent"] for r in rows] == [0.7, 0.0] * 4
    assert (folded(IDS) - want).abs().max() < 1e-5 * want.abs().max().clamp(min=1) + 1e-5
    for a, b in zip(model.layers, folded.layers, strict=True):
        assert torch.equal(a.mlp.down_proj.weight, b.mlp.down_proj.weight)
        assert not torch.allclose(a.mlp.gate_up_proj.weight, b.mlp.gate_up_proj.weight)  # its own columns still are


def test_scales_folded_into_a_bfloat16_norm_are_exact():
    """w / s rounded to bfloat16 would put an error of 2^-9 on a whole channel, in every format and after any search."""
    model = random_model(dtype=torch.bfloat16)
    before = [b.input_layernorm.weight.clone() for b in model.layers]
    q, rows = quantized(model)
    assert any(r["exponent"] > 0 for r in rows if r["linear"] == "qkv_proj")
    for old, block, stats in zip(before, q.layers, calibrated(model), strict=True):
        new = block.input_layernorm.weight
        assert new.dtype == torch.bfloat16
        s = old.float() / new.float()
        assert torch.equal((old.float() / s).to(torch.bfloat16), new)
        w = block.attn.qkv_proj.q.dequantize() / s
        original = model.layers[0 if block is q.layers[0] else 1].attn.qkv_proj.weight.float()
        D = w[:96] - original[:96]  # the q and k rows, which nothing else divides
        H = stats["qkv_proj"].H
        assert nvfp4.output_error(D, H) / nvfp4.output_error(original[:96], H) < 0.03


def test_a_norm_weight_of_zero_is_left_alone():
    """0 / s and s = w / 0: one dead channel must not turn the model into NaN."""
    model = random_model()
    model.layers[0].input_layernorm.weight.data[5] = 0
    q, _ = quantized(model)
    assert q.layers[0].input_layernorm.weight[5] == 0 and torch.isfinite(q(IDS)).all()


# ---- the search


@pytest.mark.parametrize("fmt", FORMATS)
def test_awq_lowers_the_output_error_where_channels_differ(monkeypatch, fmt):
    """Constructed: 3 channels of 64 carry 50 times the activation. Channel scales alone must help, and the whole more. (MXFP4's
    scales are powers of two: each channel scale moves some blocks across a step, and less is won.)"""
    _, rows = quantized(random_model(), fmt)
    monkeypatch.setattr(nvfp4, "search_blocks", lambda w, fmt, scale, *_: scale)
    _, without = quantized(random_model(), fmt)
    channels, whole = {"nvfp4": (0.9, 0.7), "mxfp4": (1.001, 0.95)}.get(fmt, (0.9, 0.8))
    for r, alone in zip(rows, without, strict=True):
        if r["linear"] == "qkv_proj":
            assert alone["awq"] < channels * r["rtn"] and r["awq"] < whole * r["rtn"], r


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("seed", range(2))
def test_no_linear_is_ever_worse_than_plain_rounding(monkeypatch, fmt, seed):
    """Exponent 0 with the plain block scales is among the candidates; a producer that folding would harm makes it give up."""
    even = M.build(config(num_hidden_layers=1), checkpoint.RandomCheckpoint(seed), dtype=torch.float32)
    for model in (even, outliers(copy.deepcopy(even), seed)):
        for grid in (8, 0):
            monkeypatch.setattr(nvfp4, "GRID", grid)
            _, rows = quantized(model, fmt)
            assert len(rows) == 4 and all(r["awq"] <= r["rtn"] * (1 + 1e-6) for r in rows), grid


@pytest.mark.parametrize("fmt", FORMATS)
def test_searched_block_scales_are_valid_and_never_worse_per_block(fmt):
    """A scale byte that wraps around (0 - 1 = 255) is NaN in E4M3; a zero block's scale must stay harmless."""
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(16, 128, generator=g), torch.randn(400, 128, generator=g) * torch.rand(128, generator=g)
    w[3, :64] = 0
    w[4, :64] *= 1e-6
    H = x.T @ x
    scale, top = block_scales(w, fmt)
    best = nvfp4.search_blocks(w, fmt, scale, top, H)
    assert best.dtype == scale.dtype and best.shape == scale.shape
    value = nvfp4.scale_value(best, fmt)
    assert torch.isfinite(value).all() and (value >= 0).all()
    b = FORMATS[fmt].block
    for k in range(0, 128, b):
        before, after = ((snap(w, fmt, s, top) - w)[:, k : k + b] for s in (scale, best))
        h = H[k : k + b, k : k + b]
        assert (((after @ h) * after).sum(1) <= ((before @ h) * before).sum(1) * (1 + 1e-5)).all()
    assert nvfp4.output_error(snap(w, fmt, best, top) - w, H) < 0.95 * nvfp4.output_error(snap(w, fmt, scale, top) - w, H)


def test_block_scales_are_searched_for_the_scaled_activations(monkeypatch):
    """After W s the inputs are x / s: searching with the unscaled H would favour the wrong weights of a block."""
    g = torch.Generator().manual_seed(2)
    w, x = torch.randn(32, 64, generator=g), torch.randn(400, 64, generator=g) * torch.exp(torch.randn(64, generator=g))
    H = x.T @ x
    monkeypatch.setattr(nvfp4, "GRID", 5)
    divide = torch.rand(32, 1, generator=g) + 0.5  # what a consumer's scales take back from each row
    found = nvfp4.search(w, H, x.abs().mean(0), "nvfp4", divide=divide[:, 0])
    assert found.exponent > 0
    t, top = w * found.s / divide, found.q.global_scale
    for other in nvfp4.neighbours(block_scales(t, "nvfp4")[0], "nvfp4"):
        for k in range(0, 64, 16):
            h = H[k : k + 16, k : k + 16]  # in the original units: D = Q(W s) / s - W against H
            a, b = ((snap(t, "nvfp4", c, top) * divide / found.s - w)[:, k : k + 16] for c in (found.q.scale, other))
            assert (((a @ h) * a).sum(1) <= ((b @ h) * b).sum(1) * (1 + 1e-4)).all()
    assert abs(found.awq - nvfp4.output_error(found.q.dequantize() * divide / found.s - w, H) / nvfp4.output_error(w, H)) < 1e-6


def test_where_no_channel_scale_helps_block_scales_still_do(monkeypatch):
    """Activations that say nothing of what matters: exponent 0 is the best, and its blocks are to be searched as well."""
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(8, 64, generator=g), torch.randn(300, 64, generator=g)
    args = w, x.T @ x, torch.exp(3 * torch.randn(64, generator=g)), "nvfp4"
    monkeypatch.setattr(nvfp4, "GRID", 2)
    found, blocks = nvfp4.search(*args), nvfp4.search(*args, scaled=False)
    assert found.exponent == 0 and found.awq == blocks.awq < 0.95 * found.rtn


def test_the_grid_has_both_its_ends(monkeypatch):
    """Of two exponents, 0 and 1, the second wins where channels differ a lot; without it there is no search."""
    g = torch.Generator().manual_seed(3)
    w, x = torch.randn(16, 64, generator=g), torch.randn(400, 64, generator=g) * torch.exp(2 * torch.randn(64, generator=g))
    monkeypatch.setattr(nvfp4, "GRID", 1)
    monkeypatch.setattr(nvfp4, "search_blocks", lambda w, fmt, scale, *_: scale)
    found = nvfp4.search(w, x.T @ x, x.abs().mean(0), "nvfp4")
    assert found.exponent == 1 and found.awq < 0.5 * found.rtn


def test_the_exponent_is_the_best_of_the_grid(monkeypatch):
    """All twenty and 0 tried one by one, without block scales: its first few are not enough."""
    g = torch.Generator().manual_seed(4)
    w, x = torch.randn(16, 64, generator=g), torch.randn(400, 64, generator=g) * torch.exp(torch.randn(64, generator=g))
    H, mean = x.T @ x, x.abs().mean(0)
    errors = []
    for i in range(21):
        s = mean ** (i / 20) / (mean.max() * mean.min()) ** (i / 40)
        errors.append(nvfp4.output_error(nvfp4.quantize(w * s).dequantize() / s - w, H))
    best = min(range(21), key=errors.__getitem__)
    monkeypatch.setattr(nvfp4, "search_blocks", lambda w, fmt, scale, *_: scale)
    assert nvfp4.search(w, H, mean, "nvfp4").exponent == best / 20 > 0.3
    x[:, 0] = 0  # a channel that is never used
    assert nvfp4.search(w, x.T @ x, x.abs().mean(0), "nvfp4").exponent > 0.3


def test_activations_are_measured_by_their_size():
    """With their signs they cancel, and the channels that matter look small."""
    model, seen = random_model(), []
    model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten(0, 1)))
    stats, x = calibrated(model)[0]["down_proj"], torch.cat(seen)
    torch.testing.assert_close(stats.mean, x.abs().mean(0))
    torch.testing.assert_close(stats.H, x.T @ x / len(x))
    half = nvfp4.Stats(2, "cpu")
    half(None, (torch.full((1, 2), 300.0).half(),))  # the squares, 90,000, are more than float16 holds
    assert half.H.eq(90000).all()


def test_a_linear_of_zeros_has_no_error():
    """A share of nothing: it was not to divide by."""
    found = nvfp4.search(torch.zeros(4, 64), torch.eye(64), torch.ones(64), "nvfp4")
    assert found.rtn == found.awq == 0 and found.q.dequantize().eq(0).all()


def test_the_largest_scale_has_no_neighbour_that_is_none():
    """The byte above it is NaN in E4M3 and in E8M0."""
    for fmt, top in (("nvfp4", 126), ("mxfp4", 254)):
        for byte in (1, top):
            scale = torch.full((1, 1), byte, dtype=torch.uint8).view(FORMATS[fmt].scale_dtype)
            near = [s.view(torch.uint8).item() for s in nvfp4.neighbours(scale, fmt)]
            assert near and all(1 <= b <= top for b in near)


# ---- the whole of it


def test_an_embedding_in_another_dtype_than_the_blocks_is_taken(shallow, tmp_path, few):
    """Stored in float32 above blocks in 16 bits, it was a traceback in the first block."""
    home = Path(shutil.copytree(shallow, tmp_path / "m"))
    state = load_file(home / "model.safetensors")
    state = {k: v.float() if "embed" in k else v.bfloat16() for k, v in state.items()}
    save_file(state, home / "model.safetensors", metadata={"format": "pt"})
    convert.convert(home, tmp_path / "q", use_awq=True)
    assert load_file(tmp_path / "q" / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.float32


def write_text(tmp_path):
    file = tmp_path / "calib.jsonl"
    rows = [{"question": f"What is {i}+{i + 1}?", "answer": f"{2 * i + 1} #### {2 * i + 1}"} for i in range(200)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def at_load(shallow, tmp_path_factory):
    """(a model loaded with AWQ, the text it was calibrated on)."""
    calib = write_text(tmp_path_factory.mktemp("calib"))
    return loaded(shallow, calib=calib, sequences=4, length=32), calib


def test_each_block_is_calibrated_on_what_the_blocks_before_it_give(monkeypatch, shallow):
    """Not on the embedding, and not on what four bits make of it; as the format says."""
    model, seen, inputs = M.load(shallow, dtype=torch.float32), [], {}
    for path, m in M.projections(model):
        m.register_forward_pre_hook(lambda _, args, path=path: inputs.update({path: args[0].flatten(0, 1)}))
    model(datasets.calibration(None, shallow, 3, 32))
    monkeypatch.setattr(nvfp4, "BATCH", 2)
    monkeypatch.setattr(nvfp4, "quantize_block", lambda block, stats, config, fmt: seen.append((stats, fmt)) or [])
    loaded(shallow, "cpu", torch.float32, "nf4", sequences=3, length=32)
    assert [fmt for _, fmt in seen] == ["nf4", "nf4"]
    for path, x in inputs.items():
        s = seen[int(path.split(".")[1])][0][path.rpartition(".")[2]]
        assert torch.allclose(s.H, x.T @ x / len(x), rtol=1e-3, atol=1e-5) and torch.allclose(s.mean, x.abs().mean(0), rtol=1e-3)


def test_a_quantized_base_has_the_scales_that_an_adapter_asks_for(shallow, tmp_path, capsys, few):
    """--awq, which nobody had typed, was refused beside the checkpoint that nvfp4.py --awq had written."""
    convert.convert(shallow, tmp_path / "q", use_awq=True)
    m, had = M.load(shallow, dtype=torch.float32), flags.parse(train.COMMAND, ["--model", str(shallow), "--awq"])
    lora.add_lora(m, 2, 2.0)
    lora.save_adapter(m, tmp_path / "a")
    (tmp_path / "a" / "policy.json").write_text(json.dumps(policy_of(had)))
    model, _ = sample.load_policy(flags.parse(evaluation.COMMAND, ["--adapter", str(tmp_path / "a"), "--model", str(tmp_path / "q")]))
    assert lora.lora_layers(model) and not capsys.readouterr().err
    with pytest.raises(ValueError, match="is quantized already"):  # without an adapter that asks for them
        sample.load_policy(flags.parse(evaluation.COMMAND, ["--model", str(tmp_path / "q"), "--awq"]))


def test_the_command_says_what_awq_gains_and_writes_what_loading_makes(at_load, shallow, tmp_path, capsys, few):
    loaded, calib = at_load
    convert.main("quantize", ["--model", str(shallow), "--awq", "--calib", str(calib),
                              "--device", "cpu", "--out", str(tmp_path / "q")])
    said = re.search(r"AWQ leaves ([0-9]+)% of plain rounding's output error", capsys.readouterr().out)
    assert 20 < int(said[1]) < 90
    ids = datasets.calibration(calib, shallow)
    assert torch.equal(loaded(ids), M.load(tmp_path / "q")(ids))


def test_calibration_text_comes_from_files_or_the_embedded_task(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("12 + 30 = 42. " * 100)
    rows = tmp_path / "t.jsonl"
    rows.write_text('{"text": "one plus one"}\n{"text": null, "question": "q?", "answer": "a"}\n'
                    '{"prompt": "p?", "solution": "worked, so \\\\boxed{3}"}\n')  # MATH's, which only --data took
    assert datasets.texts(rows) == ["one plus one", "q?\na", "p?\nworked, so \\boxed{3}"]
    assert datasets.calibration(text, TINY, 3, 16).shape == (3, 16)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match='row 1: has no "text": needs question'):
        datasets.texts(tmp_path / "bad.jsonl")
    tok = Tokenizer(TINY)
    ids = [i for t in datasets.texts(rows) for i in [*tok.encode(t), tok.eos_ids[-1]]]  # documents end
    assert datasets.calibration(rows, TINY, 50, 4).flatten().tolist() == ids[: len(ids) // 4 * 4]
    built_in = datasets.calibration(None, TINY, 6, 64)
    assert built_in.shape == (6, 64) and built_in.unique().numel() > 20
    problem = arithmetic.problems("train", 1)[0]  # none that is asked in a test
    ids = tok.prompt_ids(problem["question"]) + tok.encode(arithmetic.solution(problem))
    assert built_in.flatten()[: len(ids) + 1].tolist() == [*ids, tok.eos_ids[-1]]
    assert datasets.calibration(rows, TINY, 50, 4).shape[0] < 50  # as many whole sequences as there are


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_gpu_calibrates_as_the_cpu_does_and_runs_what_it_made(fmt, tmp_path):
    """Errors within float32's reach of the CPU's, and logits through the fused kernel close to the dequantized ones."""
    calib = write_text(tmp_path)

    def report(device):
        model, ids = M.skeleton(M.read_config(TINY)), datasets.calibration(calib, TINY, 4, 64)
        pieces = M.stream(model, checkpoint.Checkpoint(TINY), device, torch.float32)
        rows = []
        for _ in nvfp4.calibrated(model, pieces, fmt, ids, device, rows):
            pass
        return rows

    for x, y in zip(report("cpu"), report("cuda"), strict=True):
        assert abs(x["rtn"] / y["rtn"] - 1) < 2e-2 and y["awq"] < x["awq"] * 1.1
    m = loaded(TINY, "cuda", torch.bfloat16, fmt, calib, sequences=4, length=64)
    ids = torch.arange(40)[None]
    want = M.load(TINY, dtype=torch.float32)(ids)
    plain = M.load(TINY, "cuda", torch.bfloat16, fmt)(ids.cuda()).float().cpu()
    assert (m(ids.cuda()).float().cpu() - want).norm() < (plain - want).norm()


@pytest.mark.gpu
def test_converting_holds_one_block_on_the_gpu(tmp_path):
    """A layer that stays referenced after it was written (a hook, a loop variable, the report) adds up to the whole model."""
    c = dict(model_type="qwen2", vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
             num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(c))
    model = M.build(M.read_config(tmp_path / "base"), checkpoint.RandomCheckpoint(), dtype=torch.bfloat16)
    with checkpoint.Writer(tmp_path / "m", tmp_path / "base") as w:
        for name, t in M.tensors(model):
            w.add(name, t)
    del model, t
    block = 2 * (1024 * (1024 + 256) + 1024 * 1024 + 3 * 1024 * 4096)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    convert.convert(tmp_path / "m", tmp_path / "q", "nvfp4", "cuda")
    assert torch.cuda.max_memory_allocated() - before < block + 2 * 4096 * 1024 * 4 * 12  # and rounding's temporaries
    assert torch.cuda.memory_allocated() - before < 1 << 20
