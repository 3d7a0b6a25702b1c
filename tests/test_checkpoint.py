"""Quantized checkpoints: bytes by hand, checkpoints that compressed-tensors made, round trips, damage, interruption."""
import hashlib
import json
import shutil
from pathlib import Path

from plumbing import checkpoint
from plumbing.files import read_json

import pytest
import torch
from safetensors.torch import load_file, save_file

import model as M
from lab import convert
from nvfp4 import FORMATS, Quantized, QuantLinear, pack, quantize

FIXTURES = Path(__file__).parent / "fixtures"
TINY = Path(__file__).parent.parent / "assets" / "tiny"
IDS = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(1))


def base(tmp_path, family="qwen2"):
    """A 16-bit checkpoint whose K suits every format: hidden 128, intermediate 256, two layers."""
    raw = json.loads((FIXTURES / "qwen2_tied" / "config.json").read_text()) | {"hidden_size": 128, "intermediate_size": 256}
    raw |= {"model_type": family, "head_dim": 32}
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text("{}")
    model = M.build(M.read_config(folder), checkpoint.RandomCheckpoint(3), dtype=torch.bfloat16)
    state = dict(M.tensors(model))
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    return folder


# ---- the layout


def test_packing_by_hand():
    """Codes 1, 2, 15, 0, ... in one row: the even column sits in the low nibble."""
    codes = torch.tensor([[1, 2, 15, 0] + [0] * 11 + [8]], dtype=torch.uint8)
    scale = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
    q = Quantized("nvfp4", (1, 16), pack(codes), scale, torch.tensor([0.25]))
    out = dict(checkpoint.packed_tensors("model.layers.0.self_attn.o_proj", q, slice(0, 1)))
    name = "model.layers.0.self_attn.o_proj.weight"
    assert out[f"{name}_packed"].tolist() == [[0x21, 0x0F, 0, 0, 0, 0, 0, 0x80]]
    assert out[f"{name}_scale"].view(torch.uint8).tolist() == [[0x3C]]
    assert out[f"{name}_global_scale"].tolist() == [4.0]  # the reciprocal
    assert set(out) == {f"{name}_{s}" for s in ("packed", "scale", "global_scale")}


@pytest.mark.parametrize("name", ["compressed_nvfp4", "compressed_mxfp4"])
def test_a_checkpoint_that_compressed_tensors_made_gives_its_logits(name):
    """Nibbles swapped, the reciprocal missed, one global scale for q, k and v: each changes the logits by more than 0.1."""
    expected = load_file(FIXTURES / name / "expected.safetensors")
    model = M.load(FIXTURES / name, dtype=torch.float32)
    assert (model(expected["ids"]) - expected["logits"]).abs().max() < 1e-4
    plain = M.load(FIXTURES / "qwen2_tied", dtype=torch.float32)
    assert (plain(expected["ids"]) - expected["logits"]).abs().max() > 0.1
    if "nvfp4" in name:
        assert model.layers[0].attn.qkv_proj.global_scale.unique().numel() == 3


def test_a_global_scale_may_be_a_scalar(tmp_path):
    """Some tools write it without a dimension."""
    folder = shutil.copytree(FIXTURES / "compressed_nvfp4", tmp_path / "q")
    state = load_file(folder / "model.safetensors")
    save_file({k: t.squeeze() if k.endswith("global_scale") else t for k, t in state.items()}, folder / "model.safetensors")
    model = M.load(folder)
    assert torch.equal(model(IDS), M.load(FIXTURES / "compressed_nvfp4")(IDS))
    assert all(torch.allclose(t, state[name]) for name, t in M.tensors(model) if name.endswith("global_scale"))  # each part's own


@pytest.mark.parametrize("name,fmt", [("compressed_nvfp4", "nvfp4"), ("compressed_mxfp4", "mxfp4")])
def test_what_we_declare_is_what_compressed_tensors_declares(name, fmt):
    """Serving engines pick their kernel by these fields."""
    theirs = json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"]
    ours = checkpoint.quantization_config(fmt, FORMATS[fmt])
    for field in ("quant_method", "format", "ignore", "quantization_status", "kv_cache_scheme"):
        assert ours[field] == theirs[field]
    a, b = ours["config_groups"]["group_0"], theirs["config_groups"]["group_0"]
    assert a["weights"] == b["weights"] and a["targets"] == b["targets"] and a["input_activations"] is None
    stored = load_file(FIXTURES / name / "model.safetensors")
    model = M.load(FIXTURES / name)
    again = dict(M.tensors(model))
    assert {k: (v.dtype, v.shape) for k, v in stored.items()} == {k: (v.dtype, v.shape) for k, v in again.items()}
    for k, v in stored.items():
        if not k.endswith("global_scale"):
            assert torch.equal(v.view(torch.uint8), again[k].contiguous().view(torch.uint8)), k


# ---- round trips


@pytest.mark.parametrize("fmt,family", [*((fmt, "qwen2") for fmt in FORMATS), ("nvfp4", "qwen3")])
def test_save_then_load_gives_the_same_logits_bit_for_bit(tmp_path, fmt, family):
    """And a second time around: the stored reciprocal of the global scale must not drift."""
    folder = base(tmp_path, family)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.q_proj.weight"][:2] = 0  # blocks of zeros are there in checkpoints that were quantized once
    state["model.layers.0.mlp.up_proj.weight"][:, :64] = -0.0
    for name in (name for name in state if name.endswith(".bias")):
        state[name].normal_()  # whatever `tensors` made of those of the base
    save_file(state, folder / "model.safetensors")
    convert.convert(folder, tmp_path / "q", fmt)
    at_load, loaded = M.load(folder, quant=fmt), M.load(tmp_path / "q")
    assert torch.equal(loaded(IDS), at_load(IDS))
    for a, b in zip(at_load.modules(), loaded.modules(), strict=True):
        if isinstance(a, QuantLinear):
            for field in ("codes", "scale", "global_scale"):
                assert torch.equal(getattr(a, field).view(torch.uint8), getattr(b, field).view(torch.uint8))
    again = dict(M.tensors(loaded))
    stored = load_file(tmp_path / "q" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(stored[k].view(torch.uint8), v.contiguous().view(torch.uint8)) for k, v in again.items())
    assert torch.equal(M.load(tmp_path / "q", quant=fmt)(IDS), at_load(IDS))  # saying --quant again is no contradiction


@pytest.mark.parametrize("own", [32], indirect=True)
def test_a_format_of_ones_own_is_written_and_read(tmp_path, shallow, own, few):
    """Its scales as they are, chosen by AWQ among their neighbours."""
    rows = convert.convert(shallow, tmp_path / "q", own, use_awq=True)
    name, state = "model.layers.0.self_attn.o_proj.weight", load_file(tmp_path / "q" / "model.safetensors")
    assert rows and all(row["awq"] < row["rtn"] for row in rows)
    q = M.load(tmp_path / "q").layers[0].attn.o_proj.q
    assert q.fmt == own and state[f"{name}_scale"].dtype == torch.float32
    codes = torch.stack([state[f"{name}_packed"] & 15, state[f"{name}_packed"] >> 4], -1).flatten(1).float() - 8
    assert torch.equal(q.dequantize(), codes * state[f"{name}_scale"].repeat_interleave(FORMATS[own].block, 1))


@pytest.mark.parametrize("fmt", ["nvfp4", "nf4"])
def test_projections_that_a_script_leaves_in_16_bits_are_exempt_in_the_config(tmp_path, monkeypatch, fmt):
    """Other tools look for four bits in all that is not on the list."""
    read, plain = M.read_linear, "layers.1.mlp.down_proj"
    monkeypatch.setattr(M, "read_linear", lambda m, path, source, quant, *rest: read(m, path, source, "none" if path == plain else quant, *rest))
    folder = base(tmp_path)
    convert.convert(folder, tmp_path / "q", fmt)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", f"model.{plain}"]
    monkeypatch.undo()
    model = M.load(tmp_path / "q", quant=fmt)
    assert [path for path, m in M.projections(model) if m.q is None] == [plain]
    assert torch.equal(model.get_submodule(plain).weight, M.load(folder).get_submodule(plain).weight)


def test_shards_and_index_load_as_one_file_does(tmp_path):
    folder = base(tmp_path)
    convert.convert(folder, tmp_path / "one")
    convert.convert(folder, tmp_path / "many", shard_bytes=20_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2 and {p.name for p in shards} == set(index["weight_map"].values())
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    tensors = {k: v for p in shards for k, v in load_file(p).items()}
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in tensors.values())
    assert torch.equal(M.load(tmp_path / "many")(IDS), M.load(tmp_path / "one")(IDS))
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "many")  # a download over another: which of the two?
    with pytest.raises(ValueError, match="many: holds model.safetensors and other shards"):
        M.load(tmp_path / "many")
    (tmp_path / "many" / "model.safetensors").unlink()
    assert (tmp_path / "many" / "tokenizer.json").read_text() == "{}"
    assert len({p.stat().st_mode for p in [*shards, tmp_path / "many" / "config.json"]}) == 1  # readable by whoever serves it
    assert json.loads((tmp_path / "many" / "config.json").read_text())["quantization_config"]["format"] == "nvfp4-pack-quantized"


def test_models_are_told_apart_by_their_files(tmp_path):
    """One digest for all bases refuses none; one that changes with the number format, the shards or the tied head refuses its own, and
    so does one that a new version computes otherwise."""
    assert checkpoint.fingerprint("tiny") == {"base": "aed9e098cc0c2810", "norms": "0f86550e930c544d", "weights": "none:854ea1e0d1c7a0d2"}
    folder = base(tmp_path)
    state, first = load_file(folder / "model.safetensors"), checkpoint.fingerprint(folder)

    def changed(folder=folder, **tensors):
        save_file(state | tensors, folder / "model.safetensors")
        return checkpoint.fingerprint(folder)

    for name in state:
        other = changed(**{name: state[name] + 1})
        ends = name in ("model.norm.weight", "model.embed_tokens.weight")
        assert other["weights"] != first["weights"] and (other["base"] != first["base"]) == ends, name
    assert changed(**{name: t.float() for name, t in state.items()}) == first
    assert changed(**{"lm_head.weight": torch.zeros(2, 2), "model.rotary_emb.inv_freq": torch.zeros(2)}) == first == changed()
    config = json.loads((folder / "config.json").read_text())
    far = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for change, alike in (({"rope_parameters": {"rope_theta": 100.0}}, False), ({"rope_scaling": far}, False), ({"rms_norm_eps": 0.5}, False), ({"max_position_embeddings": 64}, True)):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert (checkpoint.fingerprint(folder) == first) == alike, change
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))  # then the head is a weight of its own
    heads = [changed(**{"lm_head.weight": torch.full((2, 2), x)})["weights"] for x in (0.0, 1.0)]
    assert heads[0] != heads[1]
    (folder / "config.json").write_text(json.dumps(config))
    changed()
    with checkpoint.Writer(tmp_path / "shards", folder, shard_bytes=1 << 14) as writer:
        for name, tensor in state.items():
            writer.add(name, tensor)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict(reversed(where.items()))}))
    assert checkpoint.fingerprint(tmp_path / "shards") == first
    convert.convert(folder, tmp_path / "q")
    four = checkpoint.fingerprint(tmp_path / "q")
    assert four["base"] == first["base"] and four["weights"].startswith("nvfp4:") and first["weights"].startswith("none:")
    state = load_file(tmp_path / "q" / "model.safetensors")
    for name in (n for n in state if n.endswith(("_packed", "_scale"))):
        flipped = (state[name].view(torch.uint8) ^ 1).view(state[name].dtype)
        assert changed(tmp_path / "q", **{name: flipped})["weights"] != four["weights"], name


def test_the_ends_of_a_wide_model_are_whole(tmp_path):
    """policy.json of before has the hash of all of the last norm: of 5,120 numbers the first 4,096 are another's."""
    shutil.copytree(base(tmp_path), tmp_path / "wide")
    config, state = read_json(tmp_path / "wide" / "config.json"), load_file(tmp_path / "wide" / "model.safetensors")
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config | {"hidden_size": 5120}))
    seen = set()
    for at in (0, 5119):
        norm = torch.ones(5120, dtype=torch.bfloat16)
        norm[at] = 2
        save_file(state | {"model.norm.weight": norm}, tmp_path / "wide" / "model.safetensors")
        told = checkpoint.fingerprint(tmp_path / "wide")
        rows = state["model.embed_tokens.weight"].flatten()[: 64 * 5120]
        assert told["base"] == hashlib.sha256(torch.cat([norm, rows]).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        seen.add(told["base"])
    assert len(seen) == 2


def test_what_is_not_rounded_stays_as_it_is_stored(tmp_path):
    """Norms and embeddings of float32, cast to 16 bits on the way, are another model's before anything is rounded."""
    folder = base(tmp_path)
    state = {k: t.float() + 1e-4 for k, t in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    convert.convert(folder, tmp_path / "q")
    kept = {k: t for k, t in load_file(tmp_path / "q" / "model.safetensors").items() if k in state}
    assert len(kept) > 6 and all(t.dtype == torch.float32 and torch.equal(t, state[k]) for k, t in kept.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_four_bits_are_of_what_is_stored_whatever_the_rest_is_cast_to(tmp_path, dtype):
    """Cast to bfloat16 before they were rounded, as on a GPU, weights of float32 or float16 were 3% off those of the converted
    checkpoint and of the CPU: a third of NVFP4's own error."""
    folder, g = base(tmp_path), torch.Generator().manual_seed(0)
    state = {k: (t.float() * (1 + 1e-3 * torch.randn(t.shape, generator=g))).to(dtype) for k, t in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    convert.convert(folder, tmp_path / "q")
    want = M.load(tmp_path / "q").layers[1].mlp.down_proj.dense()
    for cast in (torch.bfloat16, torch.float32):
        m = M.load(folder, dtype=cast, quant="nvfp4")
        assert torch.equal(m.layers[1].mlp.down_proj.dense(), want) and m.embed.weight.dtype == m.layers[1].attn.qkv_proj.bias.dtype == cast


def test_what_a_tokenizer_reads_comes_along(tmp_path):
    """A checkpoint without generation_config.json has one stop token of several, without its template another prompt."""
    folder, beside = base(tmp_path), ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in beside:
        (folder / name).write_text(f'{{"of": "{name}"}}')
    (folder / "pytorch_model.bin").write_text("as large again")
    convert.convert(folder, tmp_path / "q")
    assert all((tmp_path / "q" / name).read_text() == (folder / name).read_text() for name in beside)
    assert not (tmp_path / "q" / "pytorch_model.bin").exists()


# ---- the layouts of others


EXPECTED = FIXTURES / "compressed_nvfp4" / "expected.safetensors"


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_four_bit_activations_stay_in_16_bits_and_a_line_says_so(tmp_path, capsys, fmt):
    """W4A4 of compressed-tensors, with a quantized cache: its weights are the same bytes."""
    source = FIXTURES / f"compressed_{fmt}"

    def more(state):
        names = [n.removesuffix("weight_packed") for n in state if n.endswith("weight_packed")]
        of_cache = {f"model.layers.0.self_attn.{k}_scale": torch.ones(1) for k in "kv"}
        return state | {f"{n}input_global_scale": torch.ones(1) for n in names if fmt == "nvfp4"} | of_cache

    folder = declared(tmp_path / "q", source, more, group={"input_activations": {"num_bits": 4, "dynamic": "local"}},
                      kv_cache_scheme={"num_bits": 8})
    assert torch.equal(M.load(folder)(IDS), M.load(source)(IDS))
    said = capsys.readouterr().err
    assert said.count("stay in 16 bits") == 1 and str(folder) in said


@pytest.mark.parametrize("what", ["head", "part"])
def test_a_head_in_four_bits_and_parts_in_16_beside_others_in_four_are_refused(tmp_path, what):
    """k of a fused q, k, v, exempt by a recipe, or the head in four bits: "weight_packed is missing" sounded like a bad download."""
    folder = base(tmp_path)
    raw = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(raw))
    plain = load_file(folder / "model.safetensors")
    head = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file(plain | {"lm_head.weight": head}, folder / "model.safetensors")
    convert.convert(folder, tmp_path / "q")
    file, name = tmp_path / "q" / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    state = load_file(file)
    if what == "head":
        del state["lm_head.weight"]
        state |= dict(checkpoint.packed_tensors("lm_head", quantize(head), slice(0, 48)))
    else:
        state = {k: t for k, t in state.items() if not k.startswith(name)} | {name: plain[name]}
    save_file(state, file)
    wrong = "lm_head" if what == "head" else "model.layers.1.self_attn.q_proj"
    with pytest.raises(ValueError, match=f"{wrong}.weight is stored in four bits; .*give the 16-bit checkpoint and --quant nvfp4"):
        M.load(tmp_path / "q")


# ---- damage


def test_each_tensor_missing_of_a_wrong_shape_or_type_is_named(tmp_path):
    """Codes cast to another integer type, or scales to bfloat16, would load as other weights."""
    folder = base(tmp_path)
    convert.convert(folder, tmp_path / "q")
    file = tmp_path / "q" / "model.safetensors"
    original = load_file(file)
    for name in (n for n in original if "layers.0.self_attn.k_proj" in n or "layers.0.mlp.down" in n):
        t = original[name]
        save_file({k: v for k, v in original.items() if k != name}, file)
        with pytest.raises(ValueError, match=f"the tensor {name} is missing"):
            M.load(tmp_path / "q")
        save_file(original | {name: torch.cat([t.view(torch.uint8)] * 2).view(t.dtype)}, file)
        with pytest.raises(ValueError, match=f"{name} has shape"):
            M.load(tmp_path / "q")
        if "weight" in name:
            save_file(original | {name: t.view(torch.int8) if t.dtype == torch.uint8 else t.bfloat16()}, file)
            with pytest.raises(ValueError, match=f"{name} is stored as torch.(int8|bfloat16), and can be read as torch.*alone"):
                M.load(tmp_path / "q")
    name = "model.layers.0.mlp.down_proj.weight_packed"
    save_file(original | {name: original[name].flatten()}, file)  # as many numbers
    with pytest.raises(ValueError, match=f"{name} has shape"):
        M.load(tmp_path / "q")
    name = "model.norm.weight"  # config.json says nothing of its type
    save_file(original | {name: original[name].to(torch.int8)}, file)
    with pytest.raises(ValueError, match=f"{name} is stored as torch.int8, and can be read as torch.float32 or torch.*alone"):
        M.load(tmp_path / "q")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        M.load(tmp_path / "q")


@pytest.mark.parametrize("change,message", [
    ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "quant_method 'bitsandbytes'"),
    *(({"quant_method": method}, f"quant_method '{method}'") for method in ("awq", "gptq", "fp8", "torchao", "hqq")),
    ({"quant_method": "qerl", "format": "int4-pack-quantized", "group": {"format": None}}, "quant_method 'qerl' with 'int4-pack-quantized'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
    ({"format": "pack-quantized", "group": {"format": None}}, "'pack-quantized'"),
    ({"format": "float-quantized", "group": {"format": None}}, "'float-quantized'"),
    ({"format": None, "group": {"format": None}}, "with ''"),
    ({"group": {"format": "mxfp4-pack-quantized"}}, "'mxfp4-pack-quantized and nvfp4-pack-quantized'"),
])
def test_quantization_that_cannot_be_read_is_refused_with_what_to_do(tmp_path, change, message):
    """An AWQ or FP8 checkpoint's owner reads in the same line that the 16-bit one and --quant need no conversion."""
    folder = declared(tmp_path / "q", FIXTURES / "compressed_nvfp4", **change)
    quant = "nf4" if change.get("quant_method") == "bitsandbytes" else "nvfp4"
    with pytest.raises(ValueError, match=f"config.json: quantization_config has .*Give the 16-bit checkpoint and --quant {quant}") as e:
        M.load(folder)
    assert message in str(e.value) and "\n" not in str(e.value)


def declared(folder, source, tensors=None, group=None, **change):
    """A copy of a quantized checkpoint whose quantization_config is changed, and its tensors by `tensors`, a function."""
    shutil.copytree(source, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_0"].update(group or {})
    raw["quantization_config"].update(change)
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors:
        state = load_file(folder / "model.safetensors")
        save_file(tensors(state), folder / "model.safetensors")
    return folder


def test_a_quant_that_contradicts_the_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="--quant nf4: .*compressed_nvfp4 is quantized to nvfp4 already; use --quant nvfp4"):
        M.load(FIXTURES / "compressed_nvfp4", quant="nf4")
    with pytest.raises(ValueError, match="quantized already; give the 16-bit checkpoint"):
        convert.convert(FIXTURES / "compressed_nvfp4", tmp_path / "q")
    assert not list(tmp_path.iterdir())


# ---- interruption and the command line


def test_an_interrupted_run_leaves_nothing_that_loads(tmp_path, monkeypatch):
    """Killed half-way (nothing cleans up), or stopped by an error: no folder of that name, and the partial one does not load."""
    folder, real = base(tmp_path), checkpoint.packed_tensors
    calls = []

    def stop(q, parts, where):
        calls.append(where)
        if len(calls) == 5:
            raise KeyboardInterrupt
        yield from real(q, parts, where)

    monkeypatch.setattr(checkpoint, "packed_tensors", stop)
    with pytest.raises(KeyboardInterrupt):
        convert.convert(folder, tmp_path / "q", shard_bytes=5_000)
    assert len(calls) == 5 and sorted(p.name for p in tmp_path.iterdir()) == ["base"]

    calls.clear()
    with monkeypatch.context() as m:
        m.setattr(shutil, "rmtree", lambda *a, **k: None)  # a kill does not clean up
        with pytest.raises(KeyboardInterrupt):
            convert.convert(folder, tmp_path / "q", shard_bytes=5_000)
    [left] = [p for p in tmp_path.iterdir() if p.name != "base"]
    assert left.name.startswith(".q.") and left.name.endswith(".part")
    with pytest.raises(FileNotFoundError):
        M.load(left)
    convert.convert(folder, tmp_path / "q")
    assert sorted(p.name for p in tmp_path.iterdir()) == [left.name, "base", "q"]
    assert torch.equal(M.load(tmp_path / "q")(IDS), M.load(folder, quant="nvfp4")(IDS))


def test_no_more_than_a_shard_is_held_in_host_memory(tmp_path, monkeypatch):
    """Row slices of a fused weight that keep the whole alive, or a list of all tensors written at the end."""
    held = []
    real = checkpoint.Writer.add

    def add(self, name, tensor):
        real(self, name, tensor)
        held.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.shard.values()}.values()))

    monkeypatch.setattr(checkpoint.Writer, "add", add)
    convert.convert(base(tmp_path), tmp_path / "q", shard_bytes=36_000)
    assert max(held) <= 36_000 and len(held) > 20


def test_the_command_writes_a_checkpoint_and_says_what_it_cost(tmp_path, capsys):
    convert.main("quantize", ["--model", str(base(tmp_path)), "--out", str(tmp_path / "q"), "--fmt", "mxfp4", "--device", "cpu"])
    assert capsys.readouterr().out == f"{tmp_path / 'q'}: 0.00 GiB\n" and M.load(tmp_path / "q").layers[0].attn.o_proj.q.fmt == "mxfp4"
