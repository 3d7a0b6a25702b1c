"""GGUF files, as llama.cpp's converter writes them, and .bin folders, made into checkpoints. Without the package gguf a stand-in
reads them, so that the names, orders and fields are held where it is not installed."""
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from plumbing.tokenizer import Tokenizer

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import model as M
from lab import convert

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PIECES = {"qwen2": "qwen2_tied", "llama": "llama_head_dim", "qwen3": "qwen3"}


def alphabet():
    """The 256 characters that stand for bytes in byte-level vocabularies, as GPT-2 published them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in shown] + [chr(256 + i) for i in range(256 - len(shown))]


def vocabulary(size, specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
    tokens = [*alphabet(), "12", "he", "hel", "Ġ1", *specials]
    kinds = [1] * (len(tokens) - len(specials)) + [3] * len(specials)
    pad = max(0, size - len(tokens))
    return tokens + [f"[PAD{i}]" for i in range(pad)], kinds + [5] * pad


def fields_of(folder, arch):
    raw, n = json.loads((folder / "config.json").read_text()), f"{arch}."
    return {"general.architecture": arch, n + "block_count": raw["num_hidden_layers"], n + "embedding_length": raw["hidden_size"],
            n + "feed_forward_length": raw["intermediate_size"], n + "context_length": raw["max_position_embeddings"],
            n + "attention.head_count": raw["num_attention_heads"], n + "attention.head_count_kv": raw["num_key_value_heads"],
            n + "attention.key_length": M.read_config(folder).head_dim, n + "rope.freq_base": raw["rope_parameters"]["rope_theta"],
            n + "attention.layer_norm_rms_epsilon": float(np.float32(raw["rms_norm_eps"]))}


def tokenizer_fields(size, pre="qwen2"):
    tokens, kinds = vocabulary(size)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": ["1 2", "h e", "he l", "Ġ 1"], "tokenizer.ggml.bos_token_id": 260,
            "tokenizer.ggml.eos_token_id": 262, "tokenizer.ggml.padding_token_id": 260, "tokenizer.ggml.eot_token_id": 260,
            "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"}


def tensors_of(folder, arch, heads, kv_heads):
    """{GGUF's name: float32 array}, with the rows of Llama's q and k as llama.cpp's converter permutes them."""
    out = {}
    for name, t in load_file(folder / "model.safetensors").items():
        stem, kind = name.rsplit(".", 1)
        w = t.float().numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            n = heads if stem.endswith("q_proj") else kv_heads
            w = w.reshape(n, 2, w.shape[0] // n // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        if stem not in ENDS:
            _, _, layer, part = stem.split(".", 3)
            stem = f"blk.{layer}.{NAMES[part]}"
        out[f"{ENDS.get(stem, stem)}.{kind}"] = np.ascontiguousarray(w)
    return out


def stand_in(fields, tensors):
    """A module with what lab/foreign.py asks of the package."""
    kind = SimpleNamespace(name="F32")
    reader = SimpleNamespace(
        fields={k: SimpleNamespace(contents=lambda v=v: v) for k, v in fields.items()},
        tensors=[SimpleNamespace(name=k, data=t, tensor_type=kind, shape=np.array(t.shape[::-1])) for k, t in tensors.items()])
    return SimpleNamespace(GGUFReader=lambda path: reader, dequantize=lambda array, kind: array)


def written(path, fields, tensors, types=None):
    """The file, written by the package; types: of tensors that are quantized already."""
    import gguf

    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif name != "general.architecture":
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(name, value)
    for name, t in tensors.items():
        writer.add_tensor(name, t, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(params=["stand-in", "package"])
def make(request, tmp_path, monkeypatch):
    """make(fields, tensors) -> the path of such a file."""
    path = tmp_path / "m.gguf"

    def write(fields, tensors):
        if request.param == "package":
            written(path, fields, tensors)
        else:
            path.write_bytes(b"GGUF")
            monkeypatch.setitem(sys.modules, "gguf", stand_in(fields, tensors))
        return path

    if request.param == "package" and not importlib.util.find_spec("gguf"):
        pytest.skip("the package gguf is not installed")
    return write


def model_of(arch, **more):
    folder = FIXTURES / PIECES[arch]
    raw = json.loads((folder / "config.json").read_text())
    fields = fields_of(folder, arch) | tokenizer_fields(48) | more
    return folder, fields, tensors_of(folder, arch, raw["num_attention_heads"], raw["num_key_value_heads"])


@pytest.mark.parametrize("arch", PIECES)
def test_a_gguf_file_computes_what_its_source_does(tmp_path, make, arch):
    """Llama's q and k in llama.cpp's order of rows, or an eps of float32 (9.99999997e-07), is another model."""
    folder, fields, tensors = model_of(arch)
    assert convert.main("convert", [str(make(fields, tensors)), "--out", str(tmp_path / "out")]) == 0
    expected = load_file(folder / "expected.safetensors")
    model = M.load(tmp_path / "out", dtype=torch.float32)
    assert (model(expected["ids"]) - expected["logits"]).abs().max() < 1e-4
    want = M.read_config(folder)
    assert model.config == want
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [260, 262]  # the end of the text and of the turn


def test_rounded_weights_come_back_as_llama_cpp_multiplies_them(tmp_path):
    """Q8_0 by the package: each block of 32 is eight-bit integers times a float16."""
    gguf = pytest.importorskip("gguf")
    _, fields, tensors = model_of("qwen2")
    name = "blk.0.ffn_up.weight"
    packed = gguf.quantize(tensors[name], gguf.GGMLQuantizationType.Q8_0)
    written(path := tmp_path / "m.gguf", fields, tensors | {name: packed}, {name: gguf.GGMLQuantizationType.Q8_0})
    convert.rewrite_body([str(path), "--out", str(tmp_path / "out")])
    scale = np.abs(tensors[name].reshape(-1, 32)).max(1, keepdims=True) / 127
    by_hand = np.round(tensors[name].reshape(-1, 32) / scale) * scale.astype(np.float16).astype(np.float32)
    got = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(got, torch.from_numpy(by_hand.reshape(tensors[name].shape)).bfloat16())


@pytest.mark.parametrize(("pre", "ids"), [("qwen2", ["1", "2", "Ġ", "1", "hel"]), ("llama-bpe", ["12", "Ġ", "1", "hel"]),
                                          ("smollm", ["1", "2", "Ġ", "1", "hel"])])
def test_the_tokenizer_splits_as_the_models_own_does(tmp_path, make, pre, ids):
    """Digits one by one, by threes, or not merged with a space: other ids than the model was trained on. Its special tokens keep
    theirs, though they are in no vocabulary of merges."""
    _, fields, tensors = model_of("qwen2")
    tensors["token_embd.weight"] = np.zeros((263 + 9, 32), np.float32)
    fields |= tokenizer_fields(263 + 9, pre)
    convert.rewrite_body([str(make(fields, tensors)), "--out", str(tmp_path / "out")])
    tok, (tokens, _) = Tokenizer(tmp_path / "out"), vocabulary(0)
    assert tok.encode("12 1hel") == [tokens.index(t) for t in ids]
    assert tok.encode("<|im_start|>hel<|im_end|>") == [261, tokens.index("hel"), 262]
    assert tok.decode(tok.encode("naïve ñ 🙂\n")) == "naïve ñ 🙂\n"
    assert tok.chat([{"role": "user", "content": "x"}]) == "<|im_start|>x<|im_end|>" and tok.eos_ids == [260, 262] and len(tok) == 263


@pytest.mark.parametrize(("more", "scaling"), [
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    ({"factors": 8.0}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192}),
    ({"factors": 32.0}, {"rope_type": "llama3", "factor": 32.0}), ({"rope.scaling.type": "none"}, None)])
def test_longer_contexts_come_along(tmp_path, make, more, scaling):
    """Of Llama 3's scaling a GGUF holds one factor a frequency, and no parameter."""
    _, fields, tensors = model_of("llama", **{f"llama.{k}": v for k, v in more.items() if k != "factors"})
    if "factors" in more:
        tensors["rope_freqs.weight"] = np.ones(8, np.float32)
        for i in range(8):
            turns = 8192 * 5e5 ** (-i / 8) / (2 * math.pi)
            kept = 0 if turns < 1 else 1 if turns > 4 else (turns - 1) / 3
            tensors["rope_freqs.weight"][i] = 1 / (kept + (1 - kept) / more["factors"])
    convert.rewrite_body([str(make(fields, tensors)), "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "config.json").read_text()).get("rope_scaling")
    assert found == scaling if scaling is None else {*scaling.items()} <= {*found.items()}


@pytest.mark.parametrize(("change", "message"), [
    (lambda f, t: f.update({"general.architecture": "gemma3"}), "the architecture 'gemma3' is not supported"),
    (lambda f, t: t.pop("blk.1.ffn_up.weight"), "the tensor model.layers.1.mlp.up_proj.weight is missing"),
    (lambda f, t: t.update({"blk.0.attn_q.weight": np.zeros((8, 32), np.float32)}), "q_proj.weight has shape"),
    (lambda f, t: t.update({"blk.0.ffn_gate_inp.weight": np.zeros((8, 32), np.float32)}), "fit nowhere.*blk.0.ffn_gate_inp.weight"),
    (lambda f, t: f.update({"qwen2.expert_count": 8}), "expert_count is not supported"),
    (lambda f, t: f.update({"qwen2.attention.sliding_window": 512}), "attention.sliding_window is not supported"),
    (lambda f, t: f.update({"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0,
                            "qwen2.rope.scaling.original_context_length": 64}), "rope scaling 'linear' is not supported"),
    (lambda f, t: t.update({"rope_freqs.weight": np.full(4, 3.0, np.float32)}), "rope_freqs are not those of a Llama 3"),
    (lambda f, t: f.pop("qwen2.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is None, not a float"),
    (lambda f, t: f.update({"tokenizer.ggml.model": "llama"}), "give --tokenizer, a folder of this model"),
    (lambda f, t: f.update({"tokenizer.ggml.pre": "tekken"}), r"its tokenizer \('tekken'\) is none of qwen2, llama-bpe, smollm"),
    (lambda f, t: f.pop("tokenizer.ggml.tokens"), "holds no tokenizer; give --tokenizer"),
    (lambda f, t: f.update({"tokenizer.ggml.merges": ["q# q#"]}), "its merges do not fit its tokens.*give --tokenizer"),
])
def test_what_a_gguf_file_cannot_be_is_named(tmp_path, make, capsys, change, message):
    _, fields, tensors = model_of("qwen2")
    change(fields, tensors)
    with pytest.raises(ValueError, match=message):
        convert.rewrite_body([str(make(fields, tensors)), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_the_models_own_page_is_checked_and_taken(tmp_path, make):
    """Sentencepiece vocabularies are not rebuilt; another model's tokenizer fits every shape."""
    _, fields, tensors = model_of("qwen2")
    tensors["token_embd.weight"] = np.zeros((263, 32), np.float32)
    fields |= tokenizer_fields(263)
    convert.rewrite_body([str(path := make(fields, tensors)), "--out", str(tmp_path / "one")])
    fields["tokenizer.ggml.model"] = "llama"
    path = make(fields, tensors)
    convert.rewrite_body([str(path), "--out", str(tmp_path / "two"), "--tokenizer", str(tmp_path / "one")])
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == (tmp_path / "one" / "tokenizer.json").read_bytes()
    fields["tokenizer.ggml.tokens"] = ["0", *fields["tokenizer.ggml.tokens"][1:]]
    with pytest.raises(ValueError, match="--tokenizer .*one: is another model's: '!' is its id 0, and None in"):
        convert.rewrite_body([str(make(fields, tensors)), "--out", str(tmp_path / "three"), "--tokenizer", str(tmp_path / "one")])
    with pytest.raises(FileNotFoundError, match="--tokenizer .*: tokenizer.json is missing"):
        convert.rewrite_body([str(path), "--out", str(tmp_path / "three"), "--tokenizer", str(tmp_path)])


def test_without_the_package_a_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert convert.main("convert", [str(tmp_path / "m.gguf"), "--out", str(tmp_path / "out")]) == 2
    assert "pip install gguf" in capsys.readouterr().err


def test_a_file_that_is_no_gguf_is_named(tmp_path, capsys):
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(99))
    assert convert.main("convert", [str(tmp_path / "m.gguf"), "--out", str(tmp_path / "out")]) == 2
    assert "m.gguf: not a GGUF file that can be read" in capsys.readouterr().err


# ---- .bin files, and what --model says of both


def in_bins(folder, n=1):
    shutil.copytree(FIXTURES / "qwen2_tied", folder)
    state = [*load_file(folder / "model.safetensors").items()]
    (folder / "model.safetensors").unlink()
    if n == 1:
        torch.save(dict(state), folder / "pytorch_model.bin")
        return folder
    where = {}
    for i in range(n):
        file = f"pytorch_model-{i + 1:05d}-of-{n:05d}.bin"
        torch.save(dict(state[i::n]), folder / file)
        where |= {name: file for name, _ in state[i::n]}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("n", [1, 3])
def test_a_folder_of_bin_files_becomes_one_of_safetensors(tmp_path, n):
    folder = in_bins(tmp_path / "bins", n)
    assert convert.main("convert", [str(folder), "--out", str(tmp_path / "out")]) == 0
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "out", FIXTURES / "qwen2_tied"))
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())


def test_a_bin_file_that_runs_code_is_refused(tmp_path, capsys):
    """A pickle may do anything."""
    folder, ran = in_bins(tmp_path / "bins"), tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return Path.touch, (ran,)

    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    assert convert.main("convert", [str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "pytorch_model.bin: not a readable .bin file" in capsys.readouterr().err and not ran.exists() and not (tmp_path / "out").exists()


def test_the_model_flag_says_what_to_run(tmp_path):
    """"Is the download complete?" alone sent people to download it again."""
    folder, file = in_bins(tmp_path / "bins"), tmp_path / "some" / "m.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    shutil.copy(folder / "config.json", file.parent)
    for other in (folder, file.parent):
        with pytest.raises(FileNotFoundError, match=f"{other}: neither model.safetensors .* Of .bin and GGUF files lab/convert.py makes"):
            M.load(other)
    with pytest.raises(ValueError, match=f"--model {file}: a GGUF file.*python lab/convert.py {file} --out DIR"):
        M.load(file)


def test_what_is_quantized_in_bin_files_is_refused(tmp_path):
    folder = in_bins(tmp_path / "bins")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quant_method 'gptq'"):
        convert.rewrite_body([str(folder), "--out", str(tmp_path / "out")])
