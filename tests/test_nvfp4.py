"""The quantized linear, and quantizing while a checkpoint loads."""
import json

from plumbing import checkpoint

import pytest
import torch
from safetensors.torch import save_file

import lora
import model as M
from nvfp4 import FORMATS, QuantLinear, quantize
from tests.conftest import weights

# ---- the linear, and loading


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantlinear_is_x_times_the_dequantized_weight(fmt):
    q, bias, x = quantize(weights(6, 64), fmt), torch.randn(6), torch.randn(2, 3, 64)
    for b in (None, bias):
        layer = QuantLinear(q, {"q_proj": 4, "k_proj": 2}, b)
        want = x @ q.dequantize().T + (0 if b is None else b)  # (2, 3, K) @ (K, N)
        assert torch.allclose(layer(x), want, atol=1e-6)
    assert layer(x).dtype == torch.float32
    low = QuantLinear(q, {"q_proj": 4, "k_proj": 2})
    assert low(x.bfloat16()).dtype == torch.bfloat16
    assert torch.allclose(low(x), want - bias, atol=1e-6)  # the cached copy follows x's dtype both ways
    low.global_scale.mul_(2)  # and what is written to the scales: it hid a noise there, or kept it after it had gone
    assert torch.allclose(low(x), 2 * (want - bias), atol=1e-5)


TINY = dict(model_type="qwen2", vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=True)


def tiny_folder(path, **changes):
    """A random checkpoint in Hugging Face layout, its norms and biases too."""
    (path / "config.json").write_text(json.dumps({**TINY, **changes}))
    model = M.build(M.read_config(path), checkpoint.RandomCheckpoint(), dtype=torch.float32)
    for p in model.parameters():
        if p.dim() == 1:
            p.add_(0.1 * torch.randn_like(p))
    save_file({name: t.contiguous() for name, t in M.tensors(model)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantizing_while_loading_is_quantizing_the_loaded_weight(tmp_path, fmt):
    """And the fused projections share one global scale, as one GEMM needs."""
    folder = tiny_folder(tmp_path)
    plain, quant = (M.load(folder, dtype=torch.float32, quant=f) for f in ("none", fmt))
    for path in ("layers.0.attn.qkv_proj", "layers.0.attn.o_proj", "layers.1.mlp.gate_up_proj", "layers.1.mlp.down_proj"):
        a, b = plain.get_submodule(path), quant.get_submodule(path)
        want = quantize(a.weight, fmt)
        assert b.parts == a.parts and b.shape == want.shape
        for field in ("codes", "scale", "global_scale"):
            assert torch.equal(getattr(b, field).view(torch.uint8), getattr(want, field).view(torch.uint8))
        assert b.global_scale.unique().numel() == 1
        assert (b.bias is None) == (a.bias is None) and (a.bias is None or torch.equal(a.bias, b.bias))
    ids = torch.arange(10)[None]
    for path, linear in plain.named_modules():
        if path.endswith("_proj"):
            linear.weight.data = quantize(linear.weight, fmt).dequantize()
    assert torch.allclose(quant(ids), plain(ids), atol=1e-5)


def test_embeddings_head_norms_and_biases_stay_as_they_were(tmp_path):
    folder = tiny_folder(tmp_path)
    plain, quant = M.load(folder), M.load(folder, quant="nvfp4")
    kept = dict(quant.named_parameters())
    assert set(kept) == {n for n, _ in plain.named_parameters() if not n.endswith("proj.weight")}
    for name, p in plain.named_parameters():
        assert name not in kept or (torch.equal(p, kept[name]) and kept[name].dtype == torch.bfloat16)
    assert sum(isinstance(m, QuantLinear) for m in quant.modules()) == 8


def test_there_is_one_copy_of_the_base_weights(tmp_path):
    """Adding LoRA, switching it off and running the model must share the storages that loading made."""
    model = M.load(tiny_folder(tmp_path), quant="nvfp4")

    def storages():
        return {b.untyped_storage().data_ptr() for m in model.modules() if isinstance(m, QuantLinear)
                for b in (m.codes, m.scale, m.global_scale)}

    before = storages()
    assert len(before) == 3 * 8
    lora.add_lora(model, 4, 8)
    with lora.disabled(model):
        model(torch.arange(5)[None])
    assert storages() == before


@pytest.mark.gpu
def test_loading_on_the_gpu_never_holds_the_16_bit_model(tmp_path):
    """Peak memory while loading: the quantized model, and a projection with its temporaries; nothing cached in 16 bits."""
    folder = tiny_folder(tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = M.load(folder, device="cuda", quant="nvfp4")
    held = torch.cuda.memory_allocated() - before
    weights = sum(m.shape[0] * m.shape[1] for m in model.modules() if isinstance(m, QuantLinear))
    assert held < 0.60 * weights  # 4.5 bits, and what is small here
    model(torch.arange(8, device="cuda")[None])  # takes the GEMM's and cuBLAS's buffers, 17 and 32 MB, and keeps no weight
    assert torch.cuda.memory_allocated() - before - held < 64 << 20 < weights
    assert torch.cuda.max_memory_allocated() - before < held + 12 * 8192 * 1024 * 4
