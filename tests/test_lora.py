"""LoRA: the base model until B moves, off when disabled, and PEFT's layout both ways (tests/fixtures/make_fixtures.py)."""
import json
import math
import runpy
import shutil
from functools import partial
from pathlib import Path

from plumbing import checkpoint, datasets, flags, hub, policy

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import grpo
import lora
import model as M
import train
from lab import chat, convert
from lora import add_lora, disabled, load_adapter, lora_layers, save_adapter
from tests.conftest import policy_of

FIXTURES = Path(__file__).parent / "fixtures"
TINY = Path(__file__).parent.parent / "assets" / "tiny"
BASE = FIXTURES / "qwen2_tied"
IDS = torch.randint(0, 48, (2, 10), generator=torch.Generator().manual_seed(3))


def base(quant="none"):
    if quant == "none":
        return M.load(BASE, dtype=torch.float32)
    config = M.read_config(BASE)
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16  # nf4 needs blocks of 64
    return M.build(config, checkpoint.RandomCheckpoint(5), dtype=torch.float32, quant=quant)


def with_random_adapter(rank=3, alpha=5, seed=0):
    model = base()
    g = torch.Generator().manual_seed(seed)
    for p in add_lora(model, rank, alpha):
        p.data = torch.randn(p.shape, generator=g) * 0.2
    return model


def change(folder, tmp_path, config=None, weights=None):
    """A copy of an adapter folder with fields of its config (... deletes one) or its tensors changed."""
    out = tmp_path / "adapter"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    if config:
        raw = json.loads((out / "adapter_config.json").read_text()) | config
        (out / "adapter_config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    if weights:
        state = load_file(out / "adapter_model.safetensors")
        weights(state)
        save_file(state, out / "adapter_model.safetensors")
    return out


# ---- what the module computes


@pytest.mark.parametrize("quant", ["none", "nvfp4", "mxfp4", "nf4"])
def test_a_fresh_adapter_is_the_base_model_bit_for_bit_and_learns(quant):
    """A random B, or an A of zeros, would break one half of this or the other."""
    model = base(quant)
    before = model(IDS)
    params = add_lora(model, 4, 8)
    assert torch.equal(model(IDS), before)
    optimizer = torch.optim.SGD(params, lr=0.1)
    model(IDS).square().mean().backward()
    optimizer.step()
    for path, m in lora_layers(model):
        for part, rows in zip(m.parts, m.B.detach().split(list(m.parts.values())), strict=True):
            assert rows.abs().max() > 0, f"{path}.{part} did not move"
    assert not torch.equal(model(IDS), before)
    with disabled(model):
        assert torch.equal(model(IDS), before)
    assert not torch.equal(model(IDS), before)


def test_only_the_adapter_is_trainable_and_all_of_it_gets_a_gradient():
    model = with_random_adapter()
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == {f"layers.{i}.{m}.{x}" for i in range(2) for x in "AB"
                         for m in ("attn.qkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")}
    model(IDS).square().mean().backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None and p.grad.abs().max() > 0) == (name in trainable)
        assert name not in trainable or p.dtype == torch.float32


def test_each_projection_of_a_fused_group_has_its_own_a_and_b(tmp_path):
    """k's B applied to q's A x is a model that trains, and an adapter that no other tool can load."""
    model, x = with_random_adapter(), torch.randn(4, 32)
    save_adapter(model, tmp_path)
    m, state = model.layers[0].attn.qkv_proj, load_file(tmp_path / "adapter_model.safetensors")
    at, y = 0, m(x)
    for part, n in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        A, B = (state[f"base_model.model.model.layers.0.self_attn.{part}.lora_{k}.weight"] for k in "AB")
        w = m.base.weight[at : at + n] + 5 / 3 * B @ A  # (n, R) @ (R, K)
        assert torch.allclose(y[:, at : at + n], x @ w.T + m.base.bias[at : at + n], atol=1e-5)
        at += n
    assert at == y.shape[1]


def test_disabled_restores_each_layer_as_it_was_even_after_an_error():
    model = with_random_adapter()
    lora_layers(model)[0][1].enabled = False
    with pytest.raises(RuntimeError, match="inside"), disabled(model):
        assert not any(m.enabled for _, m in lora_layers(model))
        assert all(torch.equal(m.dense(), m.base.dense()) for _, m in lora_layers(model))
        raise RuntimeError("inside")
    assert [m.enabled for _, m in lora_layers(model)] == [False] + [True] * 7


def test_a_bfloat16_base_keeps_a_float32_adapter():
    """AdamW on bfloat16 parameters loses updates below 2^-8 of a weight: at the paper's rates that is all of them."""
    model = M.load(BASE)
    params = add_lora(model, 4, 4)
    assert {p.dtype for p in params} == {torch.float32} and model(IDS).dtype == torch.bfloat16


def test_same_seed_same_adapter_and_the_spread_of_a_is_pefts():
    a, b, c = ([p.detach().clone() for p in add_lora(base(), 8, 8, seed=s)] for s in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and not torch.equal(a[0], c[0])
    assert abs(a[0].mean()) < 0.1 / math.sqrt(32) and a[0].min() < 0
    assert len({tuple(p.flatten().tolist()) for p in a[::2]}) == len(a[::2])  # no two layers begin alike
    assert a[0].abs().max() <= 1 / math.sqrt(32) and a[0].abs().max() > 0.95 / math.sqrt(32)


def test_a_second_adapter_is_an_error():
    """One around the other: the saved file would hold one of them."""
    model = base()
    add_lora(model, 2, 2)
    with pytest.raises(AssertionError, match="has an adapter already"):
        add_lora(model, 2, 2)


# ---- files


def test_saved_names_and_shapes_are_pefts(tmp_path, monkeypatch):
    """Checked by hand against an adapter that PEFT wrote: same keys, same shapes, float32."""
    monkeypatch.setitem(hub.COMMITS, "some/model@v1", "0a1b")
    save_adapter(with_random_adapter(rank=4), tmp_path, "some/model@v1")
    ours, theirs = (load_file(d / "adapter_model.safetensors") for d in (tmp_path, FIXTURES / "peft_all"))
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {k: (v.shape, v.dtype) for k, v in theirs.items()}
    assert ours["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 64)
    assert ours["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    assert ours["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"].shape == (16, 4)
    assert len(ours) == 2 * 7 * 2
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    known = json.loads((FIXTURES / "peft_all" / "adapter_config.json").read_text())
    assert set(config) <= set(known) and config["peft_type"] == "LORA"
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", "0a1b")
    assert (config["r"], config["lora_alpha"]) == (4, 5) and len(config["target_modules"]) == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_only_what_has_an_adapter_is_named(tmp_path):
    """Of an adapter of attention alone other readers would look for the MLP's tensors."""
    model = with_random_adapter(rank=4)
    for block in model.layers:
        block.mlp.gate_up_proj, block.mlp.down_proj = block.mlp.gate_up_proj.base, block.mlp.down_proj.base
    save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_layers_that_a_script_scales_otherwise_are_loaded_as_they_were_trained(tmp_path):
    """One scaling is saved: the first layer's was the others' too, and another policy was evaluated."""
    model = with_random_adapter()
    lora_layers(model)[1][1].scaling *= 8
    save_adapter(model, tmp_path)
    assert torch.allclose(load_adapter(base(), tmp_path)(IDS), model(IDS), atol=1e-5)


@pytest.mark.parametrize("rank,alpha", [(3, 5), (4, 32), (1, 1.3)])
def test_save_then_load_gives_the_same_logits_bit_for_bit(tmp_path, rank, alpha):
    model = with_random_adapter(rank, alpha)
    want = model(IDS)
    save_adapter(model, tmp_path / "a")
    again = load_adapter(base(), tmp_path / "a")
    assert torch.equal(again(IDS), want)
    save_adapter(again, tmp_path / "b")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(AssertionError, match="the model has an adapter already"):
        load_adapter(again, tmp_path / "a")


@pytest.mark.parametrize("name", ["peft_all", "peft_rslora"])
def test_an_adapter_that_peft_saved_gives_pefts_logits(name):
    """peft_all: every projection, alpha 6 over rank 4. peft_rslora: alpha 5 over sqrt(3), on q, v and down only."""
    expected = load_file(FIXTURES / name / "expected.safetensors")
    model = base()
    assert (model(expected["ids"]) - expected["logits"]).abs().max() > 1
    load_adapter(model, FIXTURES / name)
    assert (model(expected["ids"]) - expected["logits"]).abs().max() < 1e-4
    with disabled(model):
        assert (model(expected["ids"]) - base()(expected["ids"])).abs().max() == 0


def folder_with_norms(tmp_path):
    """peft_all with input norms of its own, and its tensors."""
    state, g = load_file(FIXTURES / "peft_all" / "adapter_model.safetensors"), torch.Generator().manual_seed(5)
    for i in range(2):
        state[f"base_model.model.model.layers.{i}.input_layernorm.weight"] = 1 + torch.rand(32, generator=g)
    return change(FIXTURES / "peft_all", tmp_path, {"modules_to_save": ["input_layernorm"]}, lambda s: s.update(state)), state


def test_norms_of_an_adapters_own(tmp_path):
    """They were refused, which is what the paper's release saves."""
    folder, state = folder_with_norms(tmp_path)
    model, plain = load_adapter(base(), folder), base()
    norm = "layers.1.input_layernorm"
    assert torch.equal(model.get_submodule(norm).weight, state[f"base_model.model.model.{norm}.weight"])
    want = model(IDS)
    with pytest.raises(RuntimeError, match="inside"), disabled(model):
        assert torch.equal(model(IDS), plain(IDS))
        raise RuntimeError("inside")
    assert torch.equal(model(IDS), want)

    save_adapter(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["modules_to_save"]  # PEFT looks for no others
    assert torch.equal(load_adapter(base(), tmp_path / "again")(IDS), want)


def test_what_peft_saves_of_norms_gives_pefts_logits(tmp_path):
    """Written by the library itself, where it is installed."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    net = peft.get_peft_model(net, peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["input_layernorm", "post_attention_layernorm"], init_lora_weights=False))
    for name, p in net.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    net.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        want = net(IDS).logits
    assert (load_adapter(base(), tmp_path / "a")(IDS) - want).abs().max() < 1e-4 * want.abs().max()


def test_norms_of_an_adapter_are_merged(tmp_path):
    folder, _ = folder_with_norms(tmp_path)
    convert.merge(BASE, folder, tmp_path / "m")
    want = load_adapter(base(), folder)(IDS)
    assert (M.load(tmp_path / "m", dtype=torch.float32)(IDS) - want).abs().max() < 0.05 * want.abs().max()


def test_a_norm_that_is_not_there_and_targets_that_are_no_projections_are_named(tmp_path):
    for config, weights, says in (
            ({"r": 0}, None, "adapter_config.json: r is 0, lora_alpha"), ({"r": "4"}, None, "r is '4'"), ({"r": 4.0}, None, "r is 4.0"),
            ({"lora_alpha": [1]}, None, r"lora_alpha \[1\]"), ({"r": True}, None, "r is True"),
            ({"modules_to_save": ["input_layernorm"]}, None, "holds no input_layernorm, which adapter_config.json says was trained"),
            (None, lambda s: s.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}), "lm_head.lora_A.weight fits this model nowhere; .* merge others into their base with PEFT"),
            (None, lambda s: s.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 32)}), "embed_tokens.lora_embedding_A fits this model nowhere")):
        with pytest.raises(ValueError, match=says):
            load_adapter(base(), change(FIXTURES / "peft_all", tmp_path, config, weights))


def test_an_adapter_in_a_pickle_is_refused_for_what_it_is(tmp_path):
    folder = change(FIXTURES / "peft_all", tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="adapter_model.bin is a pickle: .* saves it anew"):
        load_adapter(base(), folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_in_sixteen_bits_is_taken_as_it_is(tmp_path, dtype):
    """Most of the hub's are; they train on in float32."""
    rounded = change(FIXTURES / "peft_all", tmp_path, weights=lambda s: s.update({k: t.to(dtype) for k, t in s.items()}))
    model, want = (load_adapter(base(), folder) for folder in (rounded, FIXTURES / "peft_all"))
    for (_, m), (_, n) in zip(lora_layers(model), lora_layers(want), strict=True):
        assert m.A.dtype == m.B.dtype == torch.float32
        assert torch.equal(m.A, n.A.to(dtype).float()) and torch.equal(m.B, n.B.to(dtype).float()) and m.B.any()


@pytest.mark.parametrize("field,value", [
    ("use_dora", True), ("rank_pattern", {"q_proj": 2}), ("alpha_pattern", {"q_proj": 2}), ("bias", "all"), ("lora_bias", True), ("fan_in_fan_out", True), ("modules_to_save", ["lm_head"]),
    ("layer_replication", [[0, 1]]), ("peft_type", "LOHA"),
    ("trainable_token_indices", [1]), ("init_lora_weights", "pissa"), ("alora_invocation_tokens", [5]),
    ("target_parameters", ["x"]), ("a_field_of_next_year", 1),
])
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, field, value):
    """Ignoring one of these loads an adapter that computes something else than it was trained to."""
    model = base()
    with pytest.raises(ValueError, match="adapter_config.json: only plain LoRA is supported") as e:
        load_adapter(model, change(FIXTURES / "peft_all", tmp_path, {field: value}))
    assert f"{field} = {value!r}" in str(e.value) and not lora_layers(model)


@pytest.mark.parametrize("config", [
    {"target_modules": "all-linear"}, {"target_modules": r".*self_attn.*"}, {"layers_to_transform": [0, 1]},
    {"lora_dropout": 0.05}, {"init_lora_weights": "gaussian"}, {"bias": ...}, {"use_dora": ...}, {"rank_pattern": None},
])
def test_fields_that_change_nothing_load(tmp_path, config):
    expected = load_file(FIXTURES / "peft_all" / "expected.safetensors")
    model = load_adapter(base(), change(FIXTURES / "peft_all", tmp_path, config))
    assert (model(expected["ids"]) - expected["logits"]).abs().max() < 1e-4


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


@pytest.mark.parametrize("config,weights,message", [
    (None, lambda s: s.update({Q_A: torch.ones(5, 32)}), r"q_proj.lora_A.weight is \(5, 32\), the model's is \(4, 32\)"),
    (None, lambda s: s.update({Q_A: torch.ones(32, 4)}), r"q_proj.lora_A.weight is \(32, 4\), the model's is \(4, 32\)"),
    (None, lambda s: s.update({Q_B: torch.ones(16, 4)}), r"q_proj.lora_B.weight is \(16, 4\), the model's is \(32, 4\)"),
    (None, lambda s: s.pop(Q_B), "q_proj.lora_A.weight is there, but .*q_proj.lora_B.weight is missing"),
    (None, lambda s: s.update({Q_A.replace("q_proj", "qkv"): torch.ones(4, 32)}), "self_attn.qkv.lora_A.weight fits this model"),
    (None, lambda s: s.update({Q_A.replace("layers.0", "layers.9"): torch.ones(4, 32)}), "layers.9.* fits this model nowhere"),
    (None, lambda s: s.clear(), "is empty; copy the adapter again"),
    ({"r": 8}, None, r"lora_A.weight is \(4, .*, the model's is \(8, "),
    ({"r": ...}, None, "adapter_config.json: the field 'r' is missing"),
    ({"lora_alpha": None}, None, "the field 'lora_alpha' is missing"),
])
def test_adapters_that_do_not_fit_are_refused_before_the_model_changes(tmp_path, config, weights, message):
    model = base()
    before = model(IDS)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, change(FIXTURES / "peft_all", tmp_path, config, weights))
    assert torch.equal(model(IDS), before) and not lora_layers(model)


# ---- merging


@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_the_merged_checkpoint_computes_what_base_and_adapter_do(tmp_path, quant):
    """Merging into the 16-bit weights the adapter was not trained on (w, not w_hat), or with the wrong part's A, is far off."""
    convert.main("merge", ["--merge", "--model", str(BASE), "--adapter", str(FIXTURES / "peft_rslora"),
                           "--out", str(tmp_path / "m"), "--quant", quant, "--device", "cpu"])
    model = load_adapter(M.load(BASE, dtype=torch.float32, quant=quant), FIXTURES / "peft_rslora")
    merged = M.load(tmp_path / "m", dtype=torch.float32)
    assert not lora_layers(merged) and all(p.dtype == torch.float32 for p in merged.parameters())
    assert {t.dtype for t in load_file(tmp_path / "m" / "model.safetensors").values()} == {torch.bfloat16}
    want = model(IDS)
    with disabled(model):
        effect = (want - model(IDS)).abs().max()
    assert (merged(IDS) - want).abs().max() < 0.05 * effect  # the sum is rounded to bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())


def test_a_merge_takes_the_adapters_own_format(tmp_path):
    """Without --quant an adapter of NVFP4 was merged into 16 bits, which it was not fitted to, and nothing said so."""
    shutil.copytree(FIXTURES / "peft_all", tmp_path / "a")
    asked = {"data": "arithmetic", "prompt_style": "boxed", "reward": "mine.py:f"}
    (tmp_path / "a" / "policy.json").write_text(json.dumps({"quant": "nvfp4", "model": str(BASE), **asked}))
    convert.main("merge", ["--merge", "--model", str(BASE), "--adapter", str(tmp_path / "a"), "--out", str(tmp_path / "m"), "--device", "cpu"])
    convert.merge(BASE, tmp_path / "a", tmp_path / "want", quant="nvfp4")
    got, want = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "want"))
    assert all(torch.equal(got[k], want[k]) for k in want)
    # evaluated by default as it was trained; what it was asked in went with the adapter
    assert json.loads((tmp_path / "m" / "policy.json").read_text()) == {"quant": "none", **asked}
    convert.convert(tmp_path / "m", tmp_path / "four", "mxfp4")
    had = flags.parse(chat.COMMAND, ["--model", str(tmp_path / "four")])
    assert had.prompt_style == "boxed" and had.trained_with == {"quant": "mxfp4", **asked}


def test_an_adapter_of_awqs_weights_is_merged_into_those(tmp_path, monkeypatch, capsys):
    """It was merged into plainly rounded weights, which it was not fitted to."""
    shutil.copytree(FIXTURES / "peft_all", tmp_path / "a")
    own, mine = (str(tmp_path / name) for name in ("own.txt", "mine.txt"))
    for file in (own, mine):
        Path(file).write_text("some text")
    (tmp_path / "a" / "policy.json").write_text(json.dumps({"quant": "nvfp4", "awq": True, "calib": own}))
    ids, asked = torch.randint(0, 48, (4, 32), generator=torch.Generator().manual_seed(1)), []
    monkeypatch.setattr(datasets, "calibration", lambda text, *_: asked.append(text) or ids)
    for more in ([], ["--calib", mine]):
        convert.main("merge", ["--merge", "--model", str(BASE), "--adapter", str(tmp_path / "a"), "--out", str(tmp_path / f"m{len(more)}"), *more])
    assert asked == [own, mine]
    convert.main("merge", ["--merge", "--model", str(BASE), "--adapter", str(tmp_path / "a"), "--out", str(tmp_path / "none"), "--quant", "none"])
    assert convert.main("merge", ["--merge", "--model", str(BASE), "--adapter", str(FIXTURES / "peft_all"), "--out", str(tmp_path / "m3"), "--calib", "t"]) == 2
    assert "--calib t: these weights are not AWQ's" in capsys.readouterr().err and len(asked) == 2
    model, merged = load_adapter(M.load(BASE, quant="nvfp4", calibration=ids), tmp_path / "a"), M.load(tmp_path / "m0")
    plain = load_adapter(M.load(BASE, quant="nvfp4"), tmp_path / "a")
    for a, b, c in zip(model.layers, merged.layers, plain.layers, strict=True):
        for name in M.PROJECTIONS:
            want = a.get_submodule(name).dense().bfloat16()
            assert torch.equal(b.get_submodule(name).weight, want) and not torch.equal(c.get_submodule(name).dense().bfloat16(), want)
        assert torch.equal(a.input_layernorm.weight, b.input_layernorm.weight)


def test_awqs_weights_are_merged_as_they_came_out_in_training(tmp_path, monkeypatch):
    """Scales follow from activations: what was trained in float32 was merged into those of bfloat16, 0.2 in the logits away."""
    shutil.copytree(FIXTURES / "peft_all", tmp_path / "a")
    (tmp_path / "a" / "policy.json").write_text(json.dumps({"quant": "nvfp4", "awq": True, "dtype": "float32"}))
    ids = torch.randint(0, 48, (16, 32), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(datasets, "calibration", lambda *_: ids)
    convert.main("merge", ["--merge", "--model", str(BASE), "--adapter", str(tmp_path / "a"), "--out", str(tmp_path / "m"), "--device", "cpu"])
    assert {t.dtype for t in load_file(tmp_path / "m" / "model.safetensors").values()} == {torch.bfloat16}
    merged = M.load(tmp_path / "m")
    for dtype, same in ((torch.float32, True), (torch.bfloat16, False)):
        trained = load_adapter(M.load(BASE, dtype=dtype, quant="nvfp4", calibration=ids), tmp_path / "a")
        assert same == all(torch.equal(b.get_submodule(name).weight, a.get_submodule(name).dense().bfloat16())
                           for a, b in zip(trained.layers, merged.layers, strict=True) for name in M.PROJECTIONS)


def test_a_merge_into_another_base_is_refused_before_its_blocks(tmp_path, monkeypatch, capsys):
    """It went through all of them first: of a 32B, minutes."""
    shutil.copytree(FIXTURES / "peft_all", tmp_path / "a")
    monkeypatch.setattr(lora, "take_tensors", lambda *_: pytest.fail("a block came by"))
    for other in ({"base": "another"}, checkpoint.fingerprint(BASE) | {"weights": "none:another"}):
        (tmp_path / "a" / "policy.json").write_text(json.dumps({"quant": "none", **other}))
        assert convert.main("merge", ["--merge", "--model", str(BASE), "--adapter", str(tmp_path / "a"), "--out", str(tmp_path / "m")]) == 2
        assert "another base" in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_a_merged_model_is_no_base_of_its_adapter(tmp_path):
    """Norms and embedding are the base's: the adapter was taken, and applied twice, also where policy.json is of before bases were told
    by all their weights, or the merged model was quantized. Four bits of the base are still its base."""
    shutil.copytree(FIXTURES / "peft_all", tmp_path / "a")
    (tmp_path / "a" / "policy.json").write_text(json.dumps({"model": str(BASE), "quant": "none", **checkpoint.fingerprint(BASE)}))
    convert.merge(BASE, tmp_path / "a", tmp_path / "merged")
    convert.convert(BASE, tmp_path / "four")
    for more in ([], ["--model", str(tmp_path / "four"), "--quant", "nvfp4"]):
        policy.check(flags.parse(chat.COMMAND, ["--adapter", str(tmp_path / "a"), *more]))
    convert.convert(tmp_path / "merged", tmp_path / "merged_four")
    for name, more in (("merged", []), ("merged_four", ["--quant", "nvfp4"])):
        with pytest.raises(ValueError, match=f"--model {tmp_path}/{name}: the adapter .* is merged into it already"):
            policy.check(flags.parse(chat.COMMAND, ["--adapter", str(tmp_path / "a"), "--model", str(tmp_path / name), *more]))
    shutil.copytree(FIXTURES / "peft_all", tmp_path / "b")
    state = load_file(tmp_path / "b" / "adapter_model.safetensors")  # that was trained on
    save_file({k: 2 * v for k, v in state.items()}, tmp_path / "b" / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copy(tmp_path / "a" / "policy.json", tmp_path / "b")
    with pytest.raises(ValueError, match=f"--model {tmp_path}/merged: .*another base, {BASE}"):
        policy.check(flags.parse(chat.COMMAND, ["--adapter", str(tmp_path / "b"), "--model", str(tmp_path / "merged")]))
    convert.merge(tmp_path / "merged", tmp_path / "b", tmp_path / "both")  # it holds both
    assert len(policy.merged(tmp_path / "both")) == 2


def test_a_merged_model_is_not_rounded_again_unasked(tmp_path, monkeypatch):
    """By --quant's default most of what the adapter had learned was gone, and nothing said so."""
    monkeypatch.setenv("HOME", str(tmp_path))
    convert.merge(BASE, FIXTURES / "peft_all", tmp_path / "m")
    for command in (evaluation.COMMAND, chat.COMMAND):
        assert flags.parse(command, ["--model", str(tmp_path / "m")]).quant == "none" != flags.parse(command, ["--model", str(BASE)]).quant
        assert flags.parse(command, ["--model", "~/m"]).quant == "none"  # of --model=~/m, which no shell expands
    convert.convert(tmp_path / "m", tmp_path / "four")
    assert flags.parse(evaluation.COMMAND, ["--model", str(tmp_path / "four")]).quant == "nvfp4"


@pytest.fixture(scope="module")
def folders(shallow, tmp_path_factory):
    """A base, and its checkpoints in four bits by plain rounding and by AWQ's scales."""
    home = tmp_path_factory.mktemp("four")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(datasets, "calibration", partial(datasets.calibration, sequences=2, length=32))
        for name in ("plain", "awq"):
            convert.convert(shallow, home / name, use_awq=name == "awq")
    return {"base": shallow, "plain": home / "plain", "awq": home / "awq"}


@pytest.mark.parametrize(("trained", "now", "fits"), [
    ("base", "plain", True), ("base", "awq", False), ("base --awq", "awq", True), ("base --awq", "plain", False), ("awq", "base", False),
    ("base --awq", "plain --awq", False), ("awq", "base --awq", True), ("plain", "base", True)])
def test_awqs_scales_are_not_taken_for_plain_rounding(folders, tmp_path, trained, now, fits):
    """They are folded into the norms: an adapter of the other scales was taken, where one of the two checkpoints is packed."""
    shutil.copytree(FIXTURES / "peft_all", tmp_path / "a")
    args = [["--model", str(folders[name]), "--quant", "nvfp4", *more] for name, *more in (trained.split(), now.split())]
    had = flags.parse(train.COMMAND, args[0])
    (tmp_path / "a" / "policy.json").write_text(json.dumps(policy_of(had)))
    no = [] if "--awq" in now else ["--no-awq"]
    wanted = flags.parse(evaluation.COMMAND, ["--adapter", str(tmp_path / "a"), *args[1], *no])
    if fits:
        policy.check(wanted)
    else:
        with pytest.raises(ValueError, match="was rounded by other scales"):
            policy.check(wanted)


def test_a_quantized_checkpoint_is_merged(tmp_path):
    folder = FIXTURES / "compressed_nvfp4"
    convert.merge(folder, FIXTURES / "peft_all", tmp_path / "m")
    model = load_adapter(M.load(folder), FIXTURES / "peft_all")
    merged = M.load(tmp_path / "m")(IDS).float()
    with disabled(model):
        assert (merged - model(IDS).float()).abs().max() > 1
    assert (merged - model(IDS).float()).abs().max() < 0.5
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())


@pytest.mark.parametrize("quant", ["none", "nvfp4"])
def test_the_documented_training_of_norms(monkeypatch, quant):
    """lab/ideas/norms.py: both norms of each block, by the adapter's optimizer, and nothing else of the base."""
    monkeypatch.setattr(lora, "add_lora", add_lora)  # put back afterwards
    runpy.run_path(str(Path(__file__).parents[1] / "lab" / "ideas" / "norms.py"))
    m = base(quant)
    optimizer = grpo.AdamW(lora.add_lora(m, 2, 2), 1e-2)
    before = {name: w.detach().clone() for name, w in m.named_parameters()}
    m(IDS).square().mean().backward()
    optimizer.step()
    moved = {name for name, w in m.named_parameters() if not w.equal(before[name])}
    B = {name for name in before if name.endswith(".B")}
    assert B <= moved and {name for name in moved - B if not name.endswith(".A")} == {f"layers.{i}.{norm}_layernorm.weight" for i in range(len(m.layers)) for norm in ("input", "post_attention")}
