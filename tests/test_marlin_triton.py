"""The FP4 GEMM to read: its kernels (in the interpreter here, compiled with -m gpu), gradient, errors."""
import ast
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import marlin_triton as rg

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
X = torch.bfloat16 if CUDA else torch.float32  # the interpreter cannot multiply bfloat16
EXACT = 3e-6  # only float32 sums are rounded
ROUNDED = 2e-3 if CUDA else 5e-3  # to bfloat16 once; the interpreter cuts where the GPU rounds to nearest
gpu = pytest.mark.gpu

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


@dataclass(frozen=True)
class Format:
    block: int
    values: tuple
    codebook: tuple = None


@dataclass
class Weight:
    shape: tuple
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    format: Format

    def dequantize(self):
        return (self.products() * self.global_scale.double()[:, None]).float()

    def products(self):
        """value * scale (N, K) float64, written without the file under test."""
        values = torch.tensor(self.format.values, dtype=torch.float64, device=self.codes.device)
        even, odd = values[(self.codes % 16).int()], values[(self.codes // 16).int()]
        scale = torch.exp2(self.scale.double() - 127) if self.scale.dtype == torch.uint8 else self.scale.double()
        return torch.stack([even, odd], 2).view(self.shape) * scale.repeat_interleave(self.format.block, 1)


FORMATS = {"nvfp4": Format(16, E2M1), "mxfp4": Format(32, E2M1), "nf4": Format(64, NF4, NF4)}


def weight(fmt, N, K, seed=0):
    """Every code, many scales, a global scale a row. fmt: a name, or a Format with a codebook."""
    g = torch.Generator().manual_seed(seed)
    f = FORMATS.get(fmt, fmt)
    codes = torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8)
    shape = N, K // f.block
    rows = torch.rand(N, generator=g) + 0.1
    if fmt == "nvfp4":
        scale = torch.randint(0, 0x7F, shape, generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    elif fmt == "mxfp4":
        scale, rows = torch.randint(110, 134, shape, generator=g, dtype=torch.uint8), torch.ones(N)
    else:
        scale, rows = torch.rand(shape, generator=g), torch.ones(N)
    return Weight((N, K), *(t.to(DEVICE) for t in (codes, scale, rows)), f)


def all_scales(fmt):
    """A weight (scales, 2 * block) that has each code beside each scale: E4M3's 127, 0 and subnormals included, or some of E8M0."""
    f = FORMATS[fmt]
    if fmt == "nvfp4":
        column = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    else:
        column = torch.arange(100, 200, dtype=torch.uint8)
    n = len(column)
    codes = (torch.arange(2 * f.block) * 5 % 16).repeat(n, 1)
    codes = (codes[:, ::2] + codes[:, 1::2] * 16).to(torch.uint8)
    scale = torch.stack([column.view(torch.uint8)] * 2, 1).contiguous().view(column.dtype)
    return Weight((n, 2 * f.block), *(t.to(DEVICE) for t in (codes, scale, torch.ones(n))), f)


def activations(M, K, seed=1):
    """Numbers that bfloat16 holds, in the type that few_rows takes here."""
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE, X)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def bound(fmt):
    """What a float32 result may err by: a codebook's products are rounded to x's type."""
    return EXACT if fmt in ("nvfp4", "mxfp4") or not CUDA else ROUNDED


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """CPU tensors take the GPU's way, the kernels in the interpreter."""
    if not CUDA:
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("M, N, K", [(1, 8, 64), (3, 70, 320), (8, 64, 256), (9, 33, 192), (17, 40, 128), (40, 130, 384)])
def test_few_rows_match_the_float64_product(fmt, M, N, K):
    """Rows and columns that do not fill a tile; a global scale of its own a row; steps of 128 and 64 columns."""
    q, x = weight(fmt, N, K, seed=M), activations(M, K)
    got = rg.few_rows(x, q, torch.float32)
    assert got.shape == (M, N) and error(got, x.double() @ q.dequantize().double().T) < bound(fmt)
    assert torch.equal(rg.few_rows(x, q, torch.float16), got.half())  # what splits leave is not rounded


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_codebook_of_ones_own(block):
    """INT4, say: any block, a K that is a multiple of the block alone, and values that bfloat16 would not hold."""
    values = tuple(i / 3 for i in range(-8, 8))
    q, x = weight(Format(block, values, values), 21, 3 * block), activations(5, 3 * block)
    want = x.double() @ q.dequantize().double().T
    assert error(rg.few_rows(x, q, torch.float32), want) < bound("own")
    assert error(rg.to_bfloat16(q), q.dequantize().double()) < ROUNDED


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_each_code_with_each_scale_is_exact(fmt):
    """Subnormal scales, E2M1's subnormal 0.5, -0 and both nibbles, in the GEMM and decoded first."""
    q = all_scales(fmt)
    K = q.shape[1]
    got = rg.few_rows(torch.eye(K, device=DEVICE, dtype=X), q, torch.float32)  # row k is column k of the weight
    assert torch.equal(got.T.double(), q.products())
    assert torch.equal(rg.to_bfloat16(q).double(), q.products())  # whose global scales are 1


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("M", [3, 20])
def test_splits_of_k_add_up(M, splits, monkeypatch):
    """Five steps in three splits: the last is shorter; a remainder was lost where steps were divided evenly."""
    tile = rg.tile
    monkeypatch.setattr(rg, "tile", lambda *shape: tile(*shape) | {"splits": splits})
    q, x = weight("nvfp4", 70, 320), activations(M, 320)
    got = rg.few_rows(x, q, torch.float32)
    assert error(got, x.double() @ q.dequantize().double().T) < EXACT
    assert torch.equal(got, rg.few_rows(x, q, torch.float32))


@pytest.mark.parametrize("K", [16, 48, 64, 320, 896, 3584, 18944])
@pytest.mark.parametrize("N", [8, 3584, 37888])
def test_a_tile_divides_k_and_no_split_is_idle(N, K):
    """Loads have no masks along K, so that a step that does not divide K would read another row."""
    for M, cores in ((1, 132), (8, 132), (16, 132), (33, 108), (64, 24), (8, 1)):
        t = rg.tile(M, N, K, cores)
        steps, per = K // t["BK"], math.ceil(K / t["BK"] / t["splits"])
        assert K % t["BK"] == 0 and t["BK"] % 16 == 0 and (t["splits"] - 1) * per < steps
        assert t["BM"] >= min(M, 32) and t["splits"] <= math.ceil(steps / 4)


def test_k_is_split_where_tiles_are_few():
    """The 7B's down projection has 56 tiles for 132 processors; without a split more than half of them had nothing to do."""
    assert rg.tile(8, 3584, 18944, 132)["splits"] > 4
    assert rg.tile(8, 3584, 18944, 6)["splits"] == 1


def test_rows_of_x_that_do_not_lie_side_by_side():
    """A slice or a transpose: the kernel takes rows as K apart."""
    q, wide = weight("nvfp4", 40, 64), activations(5, 128)
    for x in (wide[:, ::2], activations(64, 5).T):
        assert error(rg.few_rows(x, q, torch.float32), x.double() @ q.dequantize().double().T) < EXACT


@pytest.mark.parametrize("fmt", FORMATS)
def test_many_rows_match_the_float64_product(fmt, as_on_a_gpu):
    """Decoded first, with the global scale of each row, and rounded; the product is rounded once more."""
    q, x = weight(fmt, 70, 320), activations(rg.FEW + 1, 320).bfloat16()
    got = rg.matmul(x, q)
    assert got.shape == (rg.FEW + 1, 70) and error(got, x.double() @ q.dequantize().double().T) < 1.5 * ROUNDED


def test_rows_decide_how_to_multiply(as_on_a_gpu, monkeypatch):
    """FEW rows still go through the GEMM; no rows have no tile."""
    went = []

    monkeypatch.setattr(rg, "few_rows", lambda x, q, dtype: went.append("few") or x.new_zeros(len(x), q.shape[0], dtype=dtype))
    monkeypatch.setattr(rg, "to_bfloat16", lambda q: went.append("many") or torch.zeros(*q.shape, dtype=torch.bfloat16, device=DEVICE))
    q = weight("nvfp4", 8, 64)
    for M in (0, 1, rg.FEW, rg.FEW + 1):
        assert rg.matmul(activations(M, 64), q).shape == (M, 8)
    assert went == ["many", "few", "few", "many"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_in_x(fmt, dtype, as_on_a_gpu, monkeypatch):
    """dx = dy w_hat, with each row's global scale; in x's type and shape."""
    monkeypatch.setattr(rg, "few_rows", lambda x, q, dtype: x.new_zeros(len(x), q.shape[0], dtype=dtype))
    q, x = weight(fmt, 70, 320), torch.zeros(2, 3, 320, device=DEVICE, dtype=dtype, requires_grad=True)
    dy = activations(6, 70).to(dtype).view(2, 3, 70)
    rg.matmul(x, q).backward(dy)
    assert x.grad.shape == x.shape and x.grad.dtype == dtype
    assert error(x.grad, dy.double() @ q.dequantize().double()) < 2 * ROUNDED


@pytest.mark.skipif(CUDA, reason="the way of CPU tensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_on_the_cpu_the_weight_is_dequantized(dtype, monkeypatch):
    """No kernel, no interpreter; leading dimensions and the dtype are x's."""
    monkeypatch.setattr(rg, "gemm_kernel", None)
    monkeypatch.setattr(rg, "decode_kernel", None)
    q, x = weight("nvfp4", 24, 64), activations(6, 64).to(dtype).view(2, 3, 64).requires_grad_()
    y = rg.matmul(x, q)
    assert y.shape == (2, 3, 24) and y.dtype == dtype
    assert error(y, x.double() @ q.dequantize().double().T) < 5e-3
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == dtype and error(x.grad, q.dequantize().double().sum(0).expand(2, 3, 64)) < 5e-3


def test_what_the_kernels_would_misread_is_refused():
    """They step through memory by K: columns that are not there, or a view with gaps, gave wrong numbers and no error."""
    q, x = weight("nvfp4", 8, 64), activations(2, 64)
    with pytest.raises(AssertionError):
        rg.matmul(x[:, :48], q)
    q.codes = weight("nvfp4", 8, 128).codes[:, ::2]
    with pytest.raises(AssertionError):
        rg.matmul(x, q)


def test_the_file_imports_nothing_of_the_project():
    """nvfp4.py imports it, and it is read on its own."""
    tree = ast.parse(Path(rg.__file__).read_text())
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert names == {"functools", "math", "torch", "triton", "triton.language"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


LAYERS = {"gate_up": (37888, 3584), "down": (3584, 18944), "qkv": (4608, 3584), "o": (3584, 3584)}


@gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_the_7b(layer):
    """Full size, both ways: within bfloat16's rounding, and the same bits each time."""
    q = weight("nvfp4", *LAYERS[layer])
    w = q.dequantize().double()
    for M in (1, 8, 16, 32, 64, 128, 300):
        x = activations(M, q.shape[1])
        y = rg.matmul(x, q)
        assert y.dtype == torch.bfloat16 and error(y, x.double() @ w.T) < (2e-3 if M <= rg.FEW else 3e-3)
        assert all(torch.equal(y, rg.matmul(x, q)) for _ in range(5))


@gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_and_formats_on_the_gpu(fmt, dtype):
    """Forward and backward, few rows and many; float32 keeps a float32 result."""
    q = weight(fmt, 1000, 1600)
    w = q.dequantize().double()
    for M in (1, 2, 8, 16, 17, 32, 64, 300):
        x = activations(M, 1600).to(dtype).requires_grad_()
        y = rg.matmul(x, q)
        assert y.dtype == dtype and error(y, x.double() @ w.T) < (3e-3 if fmt == "nf4" or M > rg.FEW else 2e-3)
        dy = activations(M, 1000).to(dtype)
        y.backward(dy)
        assert x.grad.dtype == dtype and error(x.grad, dy.double() @ w) < 3e-3
    if fmt != "nf4":
        x = activations(8, 1600)
        assert error(rg.few_rows(x, q, torch.float32), x.double() @ w.T) < EXACT


@gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("M", [1, 8, 32, 300])
def test_a_cuda_graph_replays_it(M, fmt):
    """Nothing waits for the host, and nothing depends on the values of x."""
    q, x = weight(fmt, 4608, 3584), activations(M, 3584)
    rg.matmul(x, q)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rg.matmul(x, q)
    x.copy_(activations(M, 3584, seed=2))
    graph.replay()
    assert torch.equal(y, rg.matmul(x, q))


@gpu
def test_a_weight_of_more_than_two_gib():
    """Offsets of rows overflowed int32: the last rows came from the first."""
    q = weight("nvfp4", 1024, 1 << 15)
    n = (1 << 17) + 64
    q.codes, q.scale, q.global_scale = (t.repeat(n // 1024 + 1, *[1] * (t.dim() - 1))[:n]
                                        for t in (q.codes, q.scale.view(torch.uint8), q.global_scale))
    q.shape, q.scale = (n, 1 << 15), q.scale.view(torch.float8_e4m3fn)
    x = activations(2, 1 << 15)
    y = rg.matmul(x, q)
    assert q.codes.numel() > 2**31 and torch.equal(y[:, -64:], y[:, (1 << 17) % 1024 :][:, :64])
