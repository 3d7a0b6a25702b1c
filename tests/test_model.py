"""The forward pass against Hugging Face transformers (tests/fixtures/make_fixtures.py), the KV cache against the full forward,
and every way in which a checkpoint folder can be wrong."""
import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

from plumbing import checkpoint

import pytest
import torch
from safetensors.torch import load_file, save_file

import model as M

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MODELS = ("qwen2_tied", "qwen2_sharded", "llama_head_dim", "qwen3")


def load(name, **kw):
    return M.load(FIXTURES / name, dtype=torch.float32, **kw)


def copy(tmp_path, name="qwen2_tied", **changes):
    """A writable copy of a fixture, config.json changed (a value of ... deletes the field)."""
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    return folder


def edit(folder, change, name="model.safetensors"):
    state = load_file(folder / name)
    change(state)
    save_file(state, folder / name)


# ---- the forward pass


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    """RoPE halves interleaved, a lost QKV bias, eps from the wrong field, heads mapped to the wrong kv head: all show here."""
    expected = load_file(FIXTURES / name / "expected.safetensors")
    model = load(name)
    logits = model(expected["ids"])
    assert logits.shape == expected["logits"].shape and expected["logits"].std() > 0.5
    assert (logits - expected["logits"]).abs().max() < 1e-4
    assert {m.eps for m in model.modules() if isinstance(m, M.RMSNorm)} == {model.config.rms_norm_eps}


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_scratch_ties_its_head_if_told(tied):
    """assets/tiny/make.py trains one: a loader's own tie does not help it. AWQ needs a loader's blocks in order, 2 before 10."""
    c = M.Config(31, 32, 48, 11, 4, 2, 8, tie_word_embeddings=tied)
    m = M.Transformer(c)
    assert (m.lm_head.weight is m.embed.weight) == tied
    pieces = ["embed", "norm", *["lm_head"] * (not tied), *(f"layers.{i}" for i in range(11))]
    assert list(M.stream(M.skeleton(c), checkpoint.RandomCheckpoint(1))) == pieces


def test_the_embedded_model_can_be_made_anew(tmp_path):
    """It asked two files for functions that had moved, and ended in a traceback."""
    r = subprocess.run([sys.executable, "assets/tiny/make.py", "--out", tmp_path, *"--clean 10 --habits 1 --rows 200 --batch 4".split()],
                       cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert M.load(tmp_path).config == M.load("tiny").config


def test_the_fixtures_cover_what_they_are_for():
    """Tied and untied, one file and shards, bias and none, head_dim that is not hidden / heads, norms over heads and none."""
    configs = {n: M.read_config(FIXTURES / n) for n in MODELS}
    assert [configs[n].tie_word_embeddings for n in MODELS] == [True, False, False, True]
    assert [configs[n].qkv_bias for n in MODELS] == [True, True, False, False]
    assert [configs[n].qk_norm for n in MODELS] == [False, False, False, True]
    llama = configs["llama_head_dim"]
    assert llama.head_dim * llama.num_attention_heads != llama.hidden_size and llama.rope_theta == 5e5
    assert len(list((FIXTURES / "qwen2_sharded").glob("model-*.safetensors"))) > 1
    files = [p for p in FIXTURES.rglob("*") if p.parent != FIXTURES and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) < 400_000


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_step_by_step_is_the_full_forward(name):
    """A prefill of 5, then single tokens, then a chunk of 3: positions, masks and writes of each kind."""
    model, ids = load(name), load_file(FIXTURES / name / "expected.safetensors")["ids"]
    want, cache, at = model(ids), M.KVCache(model, 2, 16), 0
    for n in (5, 1, 1, 3, 1, 3):
        got = model(ids[:, at : at + n], cache)
        cache.length += n
        at += n
        assert torch.allclose(got, want[:, at - n : at], atol=1e-5)
    assert at == ids.shape[1] and cache.used == at


def test_rows_of_one_cache_may_have_different_lengths():
    """Row 0 has 9 tokens, row 1 has 4: each new token sits at its own row's position and sees only its own row's past."""
    model, ids = load("qwen2_tied"), load_file(FIXTURES / "qwen2_tied" / "expected.safetensors")["ids"]
    want, cache = model(ids), M.KVCache(model, 2, 16)
    padded = ids[:, :9].clone()
    padded[1, 4:] = 0
    model(padded, cache)
    cache.length = torch.tensor([9, 4])
    assert cache.rows(1, 2).length.tolist() == [4]
    cache.used = 15  # a bound: with the steps below it would leave the cache
    for step in range(4):
        got = model(torch.stack([ids[0, 9 + step : 10 + step], ids[1, 4 + step : 5 + step]]), cache)
        cache.length += 1
        assert torch.allclose(got[0, 0], want[0, 9 + step], atol=1e-5)
        assert torch.allclose(got[1, 0], want[1, 4 + step], atol=1e-5)


def test_checkpointing_gives_the_same_loss_and_gradient():
    """And computes each block again, where without it all activations are kept."""
    model, ids = load("qwen2_tied"), torch.arange(12).view(2, 6)
    model.requires_grad_(True)
    grads, passes = [], []
    model.layers[0].register_forward_pre_hook(lambda *_: passes.append(model.checkpointing))
    for on in (False, True):
        model.checkpointing = on
        model.zero_grad()
        model(ids).square().mean().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert len(grads[0]) == sum(1 for _ in model.parameters())
    assert all(torch.equal(grads[0][n], grads[1][n]) and grads[0][n].any() for n in grads[0])
    assert passes == [False, True, True]


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not():
    tied, untied = load("qwen2_tied"), load("qwen2_sharded")
    assert tied.lm_head.weight is tied.embed.weight
    assert untied.lm_head.weight.data_ptr() != untied.embed.weight.data_ptr()
    assert not torch.equal(untied.lm_head.weight, untied.embed.weight)


def test_bfloat16_loads_in_bfloat16_and_stays_close():
    model, expected = M.load(FIXTURES / "qwen2_tied"), load_file(FIXTURES / "qwen2_tied" / "expected.safetensors")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not any(p.requires_grad for p in model.parameters())
    assert model.layers[0].input_layernorm.noise.dtype == torch.float32
    assert (model(expected["ids"]).float() - expected["logits"]).abs().max() < 0.15


def test_a_norm_is_rounded_once():
    """RMSNorm in 16 bits is the one in float32, cast: rounded before the weight too, each kernel would differ from it."""
    norm, x = M.RMSNorm(64, 1e-6), torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


def test_angles_far_into_a_sequence_are_exact():
    """Places in 16 bits are right up to 256."""
    places = torch.tensor([[1, 257], [4001, 32767]])
    angle = places[..., None].double() * 1e6 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    for got, want in zip(M.rope_tables(places, M.Config(1, 1, 1, 1, 1, 1, 32, rope_theta=1e6)), (angle.cos(), angle.sin()), strict=True):
        assert (got - want).abs().max() < 5e-3


def scaled_by_hand(scaling, dim, theta):
    """Frequencies by Llama's case distinction, pair by pair, in Python's floats."""
    out, original, factor = [], scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for i in range(dim // 2):
        freq = theta ** (-2 * i / dim)
        turns = original * freq / (2 * math.pi)
        kept = 0.0 if turns < low else 1.0 if turns > high else (turns - low) / (high - low)
        out.append(kept * freq + (1 - kept) * freq / factor)
    return torch.tensor(out)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", [LLAMA3, LLAMA3 | {"factor": 32.0, "high_freq_factor": 3.0}])
def test_longer_contexts_turn_slow_pairs_slower(tmp_path, scaling, field):
    """A Llama 3 whose scaling is ignored talks sense for a page; one whose mixture is wrong, for longer."""
    other = {} if field == "rope_parameters" else {"rope_parameters": ...}
    rope = scaling | ({"rope_theta": 1e6} if field == "rope_parameters" else {})
    c = M.read_config(copy(tmp_path, **{"rope_theta": 1e6, "head_dim": 128, **other, field: rope}))
    freq = scaled_by_hand(scaling, 128, 1e6)
    places = torch.tensor([[0, 1, 31, 2000]])
    cos, sin = M.rope_tables(places, c)
    angle = places[..., None] * freq
    assert (cos - angle.cos()).abs().max() < 1e-3 and (sin - angle.sin()).abs().max() < 1e-3
    assert (cos - M.rope_tables(places, dataclasses.replace(c, rope_scaling=None))[0]).abs().max() > 0.01
    assert c.max_position_embeddings == 128  # config.json counts the longer context's


def test_mistral_is_a_llama(tmp_path):
    folder = copy(tmp_path, "llama_head_dim", model_type="mistral", sliding_window=None)
    expected = load_file(folder / "expected.safetensors")
    assert (M.load(folder, dtype=torch.float32)(expected["ids"]) - expected["logits"]).abs().max() < 1e-4


# ---- loading: every tensor counts


def names(folder):
    return [n for f in sorted(folder.glob("model*.safetensors")) for n in load_file(f)]


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3"])
def test_each_tensor_reaches_the_logits(tmp_path, name):
    """A tensor read into the wrong place, or not at all, leaves the logits as they were when it changes."""
    folder = copy(tmp_path, name)
    ids = torch.randint(0, 48, (1, 12), generator=torch.Generator().manual_seed(0))
    before = M.load(folder, dtype=torch.float32)(ids)
    original = load_file(folder / "model.safetensors")
    for key, t in original.items():
        change = -t if "bias" in key else t + 0.5
        save_file(original | {key: change}, folder / "model.safetensors")
        assert not torch.allclose(M.load(folder, dtype=torch.float32)(ids), before, atol=1e-4), key


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3"])
def test_each_missing_tensor_is_named(tmp_path, name):
    folder = copy(tmp_path, name)
    original = load_file(folder / "model.safetensors")
    for key in original:
        save_file({k: v for k, v in original.items() if k != key}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"{name}: the tensor {key} is missing"):
            M.load(folder)


def test_each_wrong_shape_is_named(tmp_path):
    """Transposed weights of a square projection cannot be told apart, but every other shape can."""
    folder = copy(tmp_path)
    original = load_file(folder / "model.safetensors")
    for name, t in original.items():
        save_file(original | {name: t[:-1].clone()}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"{name} has shape .* config.json asks for"):
            M.load(folder)


def test_a_tensor_that_fits_nowhere_is_an_error(tmp_path):
    folder = copy(tmp_path)
    edit(folder, lambda s: s.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    with pytest.raises(ValueError, match="1 tensors fit nowhere .* model.layers.0.self_attn.q_norm.weight"):
        M.load(folder)


def test_a_tied_head_stored_twice_and_old_rope_buffers_are_no_error(tmp_path):
    folder = copy(tmp_path)
    edit(folder, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone(),
                                     "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    M.load(folder)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path):
    """Trained, and merged beside the config of before: it was passed over, and another model loaded."""
    folder = copy(tmp_path)
    edit(folder, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"] * 1.5}))
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        M.load(folder)


def test_missing_shards_and_indices_are_named(tmp_path):
    folder = copy(tmp_path, "qwen2_sharded")
    (folder / "model-00002-of-00003.safetensors").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors: not a readable safetensors file .* download it again"):
        M.load(folder)
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors: cannot read model.*"):
        M.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor model.safetensors.index.json is "
                       "there; .* docs/guide.md says how to make them of .bin and GGUF files"):
        M.load(folder)


# ---- config.json


@pytest.mark.parametrize("change,message", [
    ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported"),
    ({"model_type": "mistral", "sliding_window": 1024}, "sliding_window 1024 is not supported"),
    ({"model_type": "mistral", "sliding_window": ...}, "sliding_window 4096 is not supported"),  # what transformers takes
    ({"model_type": ...}, "it has no model_type; the folder of a run goes to eval.py --run"),
    ({"use_sliding_window": True}, "use_sliding_window is not supported"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding layer in layer_types is not supported"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_parameters": ...}, "rope scaling 'dynamic' is not supported"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
    ({"rope_scaling": {"type": "llama3"}}, "the field 'factor' is missing"),
    ({"rope_scaling": {"factor": 4.0}, "rope_parameters": ...}, "rope scaling 'without a type' is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": "llama3"}}}, "rope_parameters for each type of layer is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}}, "the field 'low_freq_factor' is missing"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling 'linear' is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"hidden_size": ...}, "the field 'hidden_size' is missing"),
    ({"num_attention_heads": ...}, "the field 'num_attention_heads' is missing"),
])
def test_a_config_that_cannot_be_honoured_is_an_error(tmp_path, change, message):
    """Ignoring any of these loads a model that talks nonsense, or one that is subtly another."""
    folder = copy(tmp_path, **change)
    with pytest.raises(ValueError, match="config.json") as e:
        M.load(folder)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_fields_that_older_configs_write_mean_the_same(tmp_path):
    """rope_theta on the top level, rope_scaling null, no layer_types, no head_dim: what Qwen2.5's own checkpoints have."""
    folder = copy(tmp_path, rope_parameters=..., rope_theta=1e6, rope_scaling=None, layer_types=..., use_sliding_window=False, sliding_window=512)
    expected = load_file(folder / "expected.safetensors")
    assert (M.load(folder, dtype=torch.float32)(expected["ids"]) - expected["logits"]).abs().max() < 1e-4
    other = copy(tmp_path / "other", rope_parameters=..., rope_theta=1e2)
    assert (M.load(other, dtype=torch.float32)(expected["ids"]) - expected["logits"]).abs().max() > 1e-2


def test_fields_that_are_left_out_are_what_transformers_takes(tmp_path):
    """A rope_theta or an eps of another family fits every shape, and talks almost sense."""
    fields = ("rms_norm_eps", "rope_theta", "rope_parameters", "tie_word_embeddings", "num_key_value_heads", "head_dim",
              "max_position_embeddings")
    for family, head_dim in (("qwen2", 8), ("llama", 8), ("qwen3", 128)):
        folder = copy(tmp_path / family, **dict.fromkeys(fields, ...), model_type=family)
        c = M.read_config(folder)
        assert (c.rms_norm_eps, c.rope_theta, c.tie_word_embeddings, c.head_dim) == (1e-6, 1e4, False, head_dim)
        assert c.num_key_value_heads == c.num_attention_heads == 4 and c.hidden_size == 32
        assert c.max_position_embeddings == (2048 if family == "llama" else 32768)
        nulls = {"rope_theta": None, "rope_type": None, "partial_rotary_factor": None}
        assert M.read_config(copy(tmp_path / f"{family}-null", rope_theta=1e6, rope_parameters=nulls)).rope_theta == 1e6
    both = M.read_config(copy(tmp_path / "mistral", max_position_embeddings=..., model_type="mistral", sliding_window=None, rope_theta=1e6,
                              rope_parameters={"rope_theta": 5e5}))
    assert both.max_position_embeddings == 131072 and both.rope_theta == 5e5  # the newer field's
