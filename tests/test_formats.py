"""The number formats, code by code and scale by scale, against tables written out here; packing."""
import itertools
import math

import pytest
import torch

import nvfp4
from nvfp4 import (
    FORMATS,
    Format,
    Quantized,
    block_scales,
    pack,
    quantize,
    unpack,
)
from tests.conftest import weights

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
    return Quantized(fmt, (N, K), pack(codes), scale, g)


def unpacked(q):
    return unpack(q.codes)


# ---- decoding


def test_every_code_with_every_e4m3_scale_decodes_to_its_exact_value():
    """Subnormal scales (bytes 1..7) flushed to zero, or -0 codes decoded as -6, would pass any test on random weights."""
    finite = [b for b in range(256) if not math.isnan(e4m3(b))]
    assert len(finite) == 254
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(finite), 1)  # (254, 16): a row a scale
    scale = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    want = torch.tensor([[v * e4m3(b) for v in CODE_VALUE] for b in finite])
    assert torch.equal(make("nvfp4", codes, scale).dequantize(), want)
    g = torch.full((len(finite),), 0.37)
    assert torch.equal(make("nvfp4", codes, scale, g).dequantize(), want * g[:, None])


def test_every_code_with_every_e8m0_scale_decodes_to_its_exact_value():
    """Byte 0 is 2^-127, a float32 subnormal; byte 255 is not a number in the format and never written."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(255, 2)  # (255, 32)
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    want = torch.tensor([[v * 2.0 ** (s - 127) for v in CODE_VALUE * 2] for s in range(255)], dtype=torch.float64)
    assert torch.equal(make("mxfp4", codes, scale).dequantize().double(), want.float().double())


def test_nf4_decodes_through_the_published_codebook():
    """The QLoRA codebook: 16 ascending values, -1, 0 and 1 among them, asymmetric around zero."""
    table = torch.tensor(nvfp4.NF4)
    assert len(table) == 16 and (table.diff() > 0).all() and table[0] == -1 and table[7] == 0 and table[15] == 1
    # quantiles of a normal: 8 on the negative side, 9 on the positive one, between 1/2 and the offset 0.9677083
    quantile = torch.distributions.Normal(0, 1).icdf
    top = quantile(torch.linspace(0.9677083, 0.5, 9)[:-1])
    low = -quantile(torch.linspace(0.9677083, 0.5, 8)[:-1])
    assert torch.allclose(torch.cat([low, torch.zeros(1), top.flip(0)]) / top[0], table, atol=2e-7)
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 4)
    assert torch.equal(make("nf4", codes, torch.tensor([[0.25]])).dequantize(), table.repeat(1, 4) * 0.25)


# ---- rounding


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_code_is_a_fixed_point(fmt):
    """Quantizing dequantized weights again must change nothing: else save, load and quantize would drift."""
    q = quantize(weights(), fmt)
    again = quantize(q.dequantize(), fmt)
    assert torch.equal(again.dequantize(), q.dequantize())


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
    assert (q.dequantize()[:, 5] / w[:, 5]).clamp(0.75, 1.2).equal(q.dequantize()[:, 5] / w[:, 5])


def test_nf4_takes_the_nearest_codebook_entry():
    w = weights(4, 128)
    q = quantize(w, "nf4")
    table = torch.tensor(nvfp4.NF4, dtype=torch.float64)
    x = (w.view(4, 2, 64) / w.view(4, 2, 64).abs().amax(-1, keepdim=True)).double()
    assert torch.equal(unpacked(q).view(4, 2, 64).long(), (x[..., None] - table).abs().argmin(-1))
    assert torch.equal(q.scale, w.view(4, 2, 64).abs().amax(-1))


def test_a_codebook_of_ones_own_is_one_row(own):
    """Each block size by its formula: INT4 was once rounded to E2M1, with E4M3's scales, because its name was not NF4."""
    w, block = weights(9, 384), FORMATS[own].block
    w[3, :block] = 0
    q = quantize(w, own)
    blocks = w.view(9, -1, block)
    scale = blocks.abs().amax(-1) / 7
    code = torch.where(scale[..., None] > 0, blocks / scale[..., None], 0).round().clamp(-8, 7)
    assert torch.equal(q.scale, scale) and q.scale.dtype == torch.float32 and q.global_scale.eq(1).all()
    assert torch.equal(nvfp4.dequantize(q), (code * scale[..., None]).view(9, 384))
    assert torch.equal(unpacked(q).view(9, -1, block).float() - 8, code)
    assert torch.equal(quantize(q.dequantize(), own).dequantize(), q.dequantize())


@pytest.mark.parametrize("block, dtype, values", [
    (8, torch.float32, nvfp4.NF4), (256, torch.float32, nvfp4.NF4), (96, torch.float32, nvfp4.NF4),
    (64, torch.float32, nvfp4.NF4[:15]), (64, torch.float32, nvfp4.NF4[::-1]), (16, torch.float32, nvfp4.E2M1),
    (64, torch.float8_e4m3fn, nvfp4.NF4), (64, torch.uint8, nvfp4.NF4)])
def test_a_row_that_the_kernels_cannot_decode_is_refused(block, dtype, values):
    """Half a step's scale, a table that is not searched in order, or bytes for a codebook's scales: wrong numbers, not an error."""
    with pytest.raises(ValueError, match="a block has 16, 32, 64 or 128 columns"):
        Format(block, dtype, values)


@pytest.mark.parametrize("values", [range(-15, 1), range(-16, 0), [*range(15), math.inf], [math.nan, *range(15)], [*range(15), 14]])
def test_a_codebook_that_no_scale_fits_is_refused(values):
    """A last value of 0 made every weight NaN, one below 0 turned all signs round: found in the first rollout, or never."""
    with pytest.raises(ValueError, match="16 ascending values, all finite, the last above 0"):
        Format(64, torch.float32, tuple(map(float, values)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_small_scales_belong_to_formats_of_that_name(monkeypatch, dtype):
    """The kernels know them by it: a row of one's own was rounded with float32 scales, whatever it said."""
    monkeypatch.setitem(FORMATS, "mine", Format(16, dtype, nvfp4.E2M1))
    with pytest.raises(AssertionError, match="mine: needs a codebook"):
        quantize(torch.ones(8, 128), "mine")


# ---- degenerate weights


@pytest.mark.parametrize("fmt", FORMATS)
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
        w_hat = q.dequantize()
        assert torch.isfinite(w_hat).all() and torch.isfinite(1 / q.global_scale).all()
        assert fmt != "nvfp4" or q.scale.view(torch.uint8).max() < 127  # no NaN, and no -0, which checkpoints must not hold
        assert (w_hat[w == 0] == 0).all()
        assert ((w_hat - w).abs() <= 0.34 * w.abs().amax() + 1e-40).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_name(fmt, bad):
    """One bad weight would silently turn a whole tensor's global scale into NaN."""
    w = weights(3, 64)
    w[2, 17] = bad
    with pytest.raises(ValueError, match="layers.1.attn.o_proj: the weight holds NaN or inf"):
        quantize(w, fmt, "layers.1.attn.o_proj")


def test_rounding_by_chunks_of_rows_is_rounding_at_once(monkeypatch):
    """The last, short chunk, and a chunk smaller than a row."""
    w = weights(21, 256)
    want = quantize(w, "nvfp4")
    for chunk in (1, 256, 2560, 10**6):
        monkeypatch.setattr(nvfp4, "PORTION", chunk)
        assert torch.equal(quantize(w, "nvfp4").codes, want.codes)


def test_the_global_scale_survives_its_stored_reciprocal():
    """Checkpoints store 1/global: for every float32 mantissa, 1/(1/g) must be g again, where g = 1/(1/top)."""
    top = (torch.arange(2**23, dtype=torch.int32) + (120 << 23)).view(torch.float32)
    g = 1 / (1 / top)
    assert torch.equal(1 / (1 / g), g)
    for seed in range(64):
        g = block_scales(weights(seed=seed), "nvfp4")[1]
        assert torch.equal(1 / (1 / g), g)


# ---- two codes a byte


def test_two_codes_share_a_byte_the_even_column_low():
    """Every checkpoint of four bits has this order; the other one is a permutation of columns, and trains to nothing."""
    codes = torch.tensor([[1, 2, 15, 0], [7, 8, 9, 10]], dtype=torch.uint8)
    assert nvfp4.pack(codes).tolist() == [[0x21, 0x0F], [0x87, 0xA9]]
    assert torch.equal(unpack(nvfp4.pack(codes)), codes)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_gpu_rounds_and_decodes_as_the_cpu_does(fmt):
    """A division that is not IEEE on the device, or flushed subnormals, would make checkpoints depend on where they were made."""
    w = weights(64, 512)
    w[3, :64] = 0
    a, b = quantize(w, fmt), quantize(w.cuda(), fmt)
    for field in ("codes", "scale", "global_scale"):
        assert torch.equal(getattr(a, field).view(torch.uint8), getattr(b, field).cpu().view(torch.uint8))
    assert torch.equal(a.dequantize(), b.dequantize().cpu())
    every = make("mxfp4", torch.arange(16, dtype=torch.uint8).repeat(255, 2), torch.arange(255, dtype=torch.uint8)[:, None])
    moved = Quantized("mxfp4", every.shape, *(t.cuda() for t in (every.codes, every.scale, every.global_scale)))
    assert torch.equal(moved.dequantize().cpu(), every.dequantize())
