"""The three number formats, code by code and scale by scale, against tables written out here; the linear; loading."""
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file

import lora
import marlin_triton
import model as M
import nvfp4
from nvfp4 import BLOCK, Quantized, QuantLinear, block_scales, dequantize, encode, quantize

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
CODE_VALUE = E2M1 + [-v for v in E2M1]
NAN = float("nan")


def e4m3(byte):
    """The value of an E4M3 byte, from the format's definition (bias 7, no infinity, S.1111.111 is NaN)."""
    sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest_even(x):
    """The E2M1 value nearest to a Python float x, ties to the even code, by trying all of them."""
    best = min(range(8), key=lambda c: (abs(abs(x) - E2M1[c]), c % 2))
    return math.copysign(E2M1[best], x)


def make(fmt, codes, scale, global_scale=None):
    N, K = codes.shape
    g = torch.ones(N) if global_scale is None else global_scale
    return Quantized(fmt, (N, K), marlin_triton.pack(codes), scale, g)


def unpacked(q):
    return marlin_triton.unpack(q.codes, q.shape[1])


def weights(N=8, K=128, seed=0, spread=3.0):
    """Random weights whose blocks differ in size by several powers of two."""
    g = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(N, K // 16, generator=g)).repeat_interleave(16, 1)
    return torch.randn(N, K, generator=g) * size * 0.02


# ---- decoding


def test_every_code_with_every_e4m3_scale_decodes_to_its_exact_value():
    """Subnormal scales (bytes 1..7) flushed to zero, or -0 codes decoded as -6, would pass any test on random weights."""
    finite = [b for b in range(256) if not math.isnan(e4m3(b))]
    assert len(finite) == 254
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(finite), 1)  # (254, 16): a row a scale
    scale = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    want = torch.tensor([[v * e4m3(b) for v in CODE_VALUE] for b in finite])
    assert torch.equal(dequantize(make("nvfp4", codes, scale)), want)
    g = torch.full((len(finite),), 0.37)
    assert torch.equal(dequantize(make("nvfp4", codes, scale, g)), want * g[:, None])


def test_every_code_with_every_e8m0_scale_decodes_to_its_exact_value():
    """Byte 0 is 2^-127, a float32 subnormal; byte 255 is not a number in the format and never written."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(255, 2)  # (255, 32)
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    want = torch.tensor([[v * 2.0 ** (s - 127) for v in CODE_VALUE * 2] for s in range(255)], dtype=torch.float64)
    assert torch.equal(dequantize(make("mxfp4", codes, scale)).double(), want.float().double())


def test_nf4_decodes_through_the_published_codebook():
    """The QLoRA codebook: 16 ascending values, -1, 0 and 1 among them, asymmetric around zero."""
    table = torch.tensor(marlin_triton.NF4)
    assert len(table) == 16 and (table.diff() > 0).all() and table[0] == -1 and table[7] == 0 and table[15] == 1
    # quantiles of a normal: 8 on the negative side, 9 on the positive one, between 1/2 and the offset 0.9677083
    quantile = torch.distributions.Normal(0, 1).icdf
    top = quantile(torch.linspace(0.9677083, 0.5, 9)[:-1])
    low = -quantile(torch.linspace(0.9677083, 0.5, 8)[:-1])
    assert torch.allclose(torch.cat([low, torch.zeros(1), top.flip(0)]) / top[0], table, atol=2e-7)
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 4)
    assert torch.equal(dequantize(make("nf4", codes, torch.tensor([[0.25]]))), table.repeat(1, 4) * 0.25)


# ---- rounding


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
def test_each_code_is_a_fixed_point(fmt):
    """Quantizing dequantized weights again must change nothing: else save, load and quantize would drift."""
    q = quantize(weights(), fmt)
    again = quantize(dequantize(q), fmt)
    assert torch.equal(dequantize(again), dequantize(q))


def test_ties_go_to_the_even_code_and_large_values_saturate():
    """Half-way points decided by 'round half up' bias every weight away from zero."""
    mid = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    around = [m + d for m in mid for d in (-1e-3, 0, 1e-3)] + [0.0, 6.0, 6.5, 1e4]
    x = torch.tensor(around + [-v for v in around])
    got = torch.tensor(CODE_VALUE)[nvfp4.round_e2m1(x).int()]
    assert got.tolist() == [nearest_even(v) for v in x.tolist()]
    assert got[1:21:3].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert nvfp4.round_e2m1(torch.tensor([-0.1, -0.0]))[0] == 0  # no negative zeros


def test_nvfp4_follows_its_formula_element_by_element():
    """Scales in the wrong dtype, a scale not rounded before the codes are taken, or a global taken per block."""
    w = weights(4, 64)
    q = quantize(w, "nvfp4")
    grid = sorted(e4m3(b) for b in range(127))
    top = w.abs().max().item() / 2688
    assert q.global_scale.shape == (4,) and torch.allclose(q.global_scale, torch.full((4,), top), rtol=2e-7, atol=0)
    assert q.scale.float().max() == 448  # all of E4M3's range is used
    for n, b in itertools.product(range(4), range(4)):
        block = w[n, b * 16 : b * 16 + 16].tolist()
        exact = max(map(abs, block)) / 6 / top
        s = min(grid, key=lambda v, exact=exact: abs(v - exact))
        assert q.scale[n, b].float().item() == s
        for k, v in enumerate(block):
            want = nearest_even(v / (s * q.global_scale[0].item())) if s else 0
            assert CODE_VALUE[unpacked(q)[n, b * 16 + k]] == want


def test_mxfp4_scale_is_the_ocp_power_of_two():
    """floor(log2 amax) - 2, exact at powers of two: log2 in float32 is off by one ulp at some of them."""
    amax = [2.0**e * m for e in range(-20, 21) for m in (1.0, 1.4, 1.5, 1.999, 1 - 2**-24)]
    w = torch.zeros(len(amax), 32)
    w[:, 5] = torch.tensor(amax)
    q = quantize(w, "mxfp4")
    assert q.scale[:, 0].tolist() == [127 + math.frexp(a)[1] - 3 for a in torch.tensor(amax).tolist()]
    assert (dequantize(q)[:, 5] / w[:, 5]).clamp(0.75, 1.2).equal(dequantize(q)[:, 5] / w[:, 5])


def test_nf4_takes_the_nearest_codebook_entry():
    w = weights(4, 128)
    q = quantize(w, "nf4")
    table = torch.tensor(marlin_triton.NF4, dtype=torch.float64)
    x = (w.view(4, 2, 64) / w.view(4, 2, 64).abs().amax(-1, keepdim=True)).double()
    assert torch.equal(unpacked(q).view(4, 2, 64).long(), (x[..., None] - table).abs().argmin(-1))
    assert torch.equal(q.scale, w.view(4, 2, 64).abs().amax(-1))


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relative_error_is_that_of_four_bits(fmt, dtype):
    """A decode in the wrong order or a missing scale is an error of order one, whatever the input's dtype."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype)
    error = (dequantize(quantize(w, fmt)) - w.float()).norm() / w.float().norm()
    assert {"nvfp4": 0.08, "mxfp4": 0.09, "nf4": 0.08}[fmt] < error < {"nvfp4": 0.11, "mxfp4": 0.15, "nf4": 0.11}[fmt]


# ---- degenerate weights


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
def test_zero_and_tiny_blocks_never_make_nan(fmt):
    """0/0 in an all-zero block, or 1/global = inf when the whole tensor is (almost) zero."""
    K = 128
    one_zero_block = weights(2, K)
    one_zero_block[0, :64] = 0
    one_tiny_block = weights(2, K)
    one_tiny_block[1, 64:] *= 1e-30
    cases = [torch.zeros(2, K), -torch.zeros(2, K), torch.zeros(2, K, dtype=torch.bfloat16), torch.full((2, K), 1e-45),
             torch.full((2, K), 1e-38), one_zero_block, one_tiny_block, torch.full((2, K), 3e38)]
    for w in cases:
        q = quantize(w, fmt)
        w_hat = dequantize(q)
        assert torch.isfinite(w_hat).all() and torch.isfinite(1 / q.global_scale).all()
        assert fmt != "nvfp4" or q.scale.view(torch.uint8).max() < 127  # no NaN, and no -0, which checkpoints must not hold
        assert (w_hat[w == 0] == 0).all()
        assert ((w_hat - w).abs() <= 0.34 * w.abs().amax() + 1e-40).all()


def test_a_subnormal_block_scale_keeps_its_block():
    """A block 2^-15 times the largest gets an E4M3 scale below 2^-6: it must not vanish."""
    w = torch.ones(1, 32)
    w[0, 16:] = 2.0**-15
    q = quantize(w, "nvfp4")
    assert 0 < q.scale[0, 1].float() < 2**-6
    assert torch.allclose(dequantize(q)[0, 16:], w[0, 16:], rtol=0.2)


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_name(fmt, bad):
    """One bad weight would silently turn a whole tensor's global scale into NaN."""
    w = weights(3, 64)
    w[2, 17] = bad
    with pytest.raises(ValueError, match="layers.1.attn.o_proj: the weight holds NaN or inf"):
        quantize(w, fmt, "layers.1.attn.o_proj")


def test_shapes_that_do_not_fit_and_unknown_formats_are_refused():
    for fmt, K in (("nvfp4", 24), ("mxfp4", 48), ("nf4", 96)):
        with pytest.raises(ValueError, match=f"up: K = {K} is not divisible by {fmt}'s block of {BLOCK[fmt]}"):
            quantize(torch.ones(2, K), fmt, "up")
    with pytest.raises(ValueError, match="--quant int4: unknown format"):
        quantize(torch.ones(2, 64), "int4")


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
@pytest.mark.parametrize("N,blocks", [(1, 1), (3, 1), (7, 3), (130, 5)])
def test_odd_shapes_pack_and_come_back(fmt, N, blocks):
    """K = 48 is three NVFP4 blocks but one and a half packing units."""
    K = BLOCK[fmt] * blocks
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N))
    q = quantize(w, fmt)
    assert len(q.codes) == N and K // 2 <= q.codes.shape[1] < K // 2 + 64 and q.codes.dtype == torch.uint8
    assert q.scale.shape == (N, blocks) and q.scale.dtype == {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8,
                                                              "nf4": torch.float32}[fmt]
    assert torch.equal(encode(dequantize(q), fmt, q.scale, q.global_scale).codes, q.codes)
    assert dequantize(q).shape == (N, K)


def test_rounding_by_chunks_of_rows_is_rounding_at_once(monkeypatch):
    """The last, short chunk and a chunk smaller than a row."""
    w = weights(7, 64)
    want = quantize(w, "nvfp4").codes
    for chunk in (1, 64, 130, 10**6):
        monkeypatch.setattr(nvfp4, "CHUNK", chunk)
        assert torch.equal(quantize(w, "nvfp4").codes, want)


def test_four_and_a_half_bits_a_weight():
    """A Quantized with codes one a byte, or float32 scales, would be correct and twice the size."""
    for fmt, bits in (("nvfp4", 4.5), ("mxfp4", 4.25), ("nf4", 4.5)):
        q = quantize(weights(8, 1024), fmt)
        assert (q.codes.nbytes + q.scale.nbytes) * 8 == bits * 8 * 1024


def test_the_global_scale_survives_its_stored_reciprocal():
    """Checkpoints store 1/global: for every float32 mantissa, 1/(1/g) must be g again, where g = 1/(1/top)."""
    top = (torch.arange(2**23, dtype=torch.int32) + (120 << 23)).view(torch.float32)
    g = 1 / (1 / top)
    assert torch.equal(1 / (1 / g), g)
    assert block_scales(weights(), "nvfp4")[1][0] in 1 / (1 / block_scales(weights(), "nvfp4")[1])


# ---- the linear, and loading


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
def test_quantlinear_is_x_times_the_dequantized_weight(fmt):
    q, bias, x = quantize(weights(6, 64), fmt), torch.randn(6), torch.randn(2, 3, 64)
    for b in (None, bias):
        layer = QuantLinear(q, {"q_proj": 4, "k_proj": 2}, b)
        want = x @ dequantize(q).T + (0 if b is None else b)  # (2, 3, K) @ (K, N)
        assert torch.allclose(layer(x), want, atol=1e-6)
    assert layer(x).dtype == torch.float32
    low = QuantLinear(q, {"q_proj": 4, "k_proj": 2})
    assert low(x.bfloat16()).dtype == torch.bfloat16
    assert torch.allclose(low(x), want - bias, atol=1e-6)  # the cached copy follows x's dtype both ways


def test_quantlinear_passes_the_gradient_to_x_and_has_nothing_to_train():
    layer = QuantLinear(quantize(weights(6, 64)), {"o_proj": 6}, torch.zeros(6))
    x = torch.randn(5, 64, requires_grad=True)
    layer(x).square().sum().backward()
    w = dequantize(layer.q)
    assert torch.allclose(x.grad, 2 * (x @ w.T) @ w, atol=1e-5)
    assert not any(p.requires_grad for p in layer.parameters())


def test_rows_of_a_fused_group_may_carry_their_own_global_scale():
    """Checkpoints of other tools store q, k and v with a global scale each: one number for the fused weight would be wrong."""
    parts = [quantize(weights(4, 64, seed) * 10**seed) for seed in range(3)]
    fused = Quantized("nvfp4", (12, 64), *(torch.cat([getattr(p, f) for p in parts]) for f in ("codes", "scale", "global_scale")))
    x = torch.randn(2, 64)
    want = torch.cat([x @ dequantize(p).T for p in parts], -1)
    assert torch.allclose(QuantLinear(fused, {"q_proj": 4, "k_proj": 4, "v_proj": 4})(x), want, rtol=1e-5, atol=1e-5)


TINY = dict(model_type="qwen2", vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=True)


def tiny_folder(path, seed=0, **changes):
    """A random checkpoint in Hugging Face layout."""
    raw = {**TINY, **changes}
    (path / "config.json").write_text(json.dumps(raw))
    c, g, state = M.Config.read(path), torch.Generator().manual_seed(seed), {}

    def put(name, *shape):
        state[name] = torch.randn(shape, generator=g) * 0.1

    put("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    put("model.norm.weight", c.hidden_size)
    q, kv, C, F = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.hidden_size, c.intermediate_size
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}."
        for name, n, k in (("q", q, C), ("k", kv, C), ("v", kv, C), ("o", C, q)):
            put(f"{layer}self_attn.{name}_proj.weight", n, k)
            if name != "o":
                put(f"{layer}self_attn.{name}_proj.bias", n)
        for name, n, k in (("gate", F, C), ("up", F, C), ("down", C, F)):
            put(f"{layer}mlp.{name}_proj.weight", n, k)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}{norm}.weight"] = 1 + 0.1 * torch.randn(C, generator=g)
    save_file(state, path / "model.safetensors")
    return path


@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
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
            linear.weight.data = dequantize(quantize(linear.weight, fmt))
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
    """Invariant 1: adding LoRA, switching it off and running the model must share the storages that loading made."""
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
@pytest.mark.parametrize("fmt", nvfp4.FORMATS)
def test_the_gpu_rounds_and_decodes_as_the_cpu_does(fmt):
    """A division that is not IEEE on the device, or flushed subnormals, would make checkpoints depend on where they were made."""
    w = weights(64, 512)
    w[3, :64] = 0
    a, b = quantize(w, fmt), quantize(w.cuda(), fmt)
    for field in ("codes", "scale", "global_scale"):
        assert torch.equal(getattr(a, field).view(torch.uint8), getattr(b, field).cpu().view(torch.uint8))
    assert torch.equal(dequantize(a), dequantize(b).cpu())
    every = make("mxfp4", torch.arange(16, dtype=torch.uint8).repeat(255, 2), torch.arange(255, dtype=torch.uint8)[:, None])
    moved = Quantized("mxfp4", every.shape, *(t.cuda() for t in (every.codes, every.scale, every.global_scale)))
    assert torch.equal(dequantize(moved).cpu(), dequantize(every))


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
