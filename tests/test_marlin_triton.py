"""The FP4 GEMM: packing, the kernels (in the interpreter here, compiled with -m gpu), gradients, errors."""
import pytest
import torch

import marlin_triton as mt
import nvfp4

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FORMATS = list(mt.BLOCK)
# the interpreter cuts to bfloat16 where the GPU rounds to nearest
BOUND = 3e-3 if CUDA else 5e-3
gpu = pytest.mark.gpu


def weight(fmt, N, K, seed=0, uniform=True):
    """A Quantized with every code and a wide range of scales, subnormal ones and zero included."""
    g = torch.Generator().manual_seed(seed)
    block = mt.BLOCK[fmt]
    codes = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
    if fmt == "nvfp4":
        scale = torch.randint(0, 0x60, (N, K // block), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    elif fmt == "mxfp4":
        scale = torch.randint(118, 132, (N, K // block), generator=g, dtype=torch.uint8)
    else:
        scale = torch.rand(N, K // block, generator=g)
    rows = torch.full((N,), 0.037) if uniform else torch.rand(N, generator=g) + 0.1
    parts = (mt.pack(codes), scale, rows)
    return nvfp4.Quantized(fmt, (N, K), *(t.to(DEVICE) for t in parts))


def exact(q):
    return mt.plain(q).double()


def activations(M, K, seed=1):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def poisoned(*shape):
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.parametrize("N, K", [(1, 16), (7, 32), (8, 128), (19, 80), (9, 896), (24, 256)])
def test_packing_round_trip(N, K):
    """A row group or a chunk that is not full was once written over its neighbour."""
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    packed = mt.pack(codes)
    assert packed.shape == (N, -(-K // 128) * 64) and packed.dtype == torch.uint8
    assert torch.equal(mt.unpack(packed, K), codes)


def test_packing_is_local_to_groups_of_eight_rows():
    """Quantization packs a large weight in slices: slices from multiples of 8 must join to the whole."""
    codes = torch.randint(0, 16, (21, 272), dtype=torch.uint8)
    assert torch.equal(torch.cat([mt.pack(codes[:16]), mt.pack(codes[16:])]), mt.pack(codes))


def test_a_code_lies_where_the_docstring_draws_it():
    """Column 2 of a chunk is t = 1, w = 0, low plane, h = 0, p = 0: pair a, low half, of lane 1's first word."""
    codes = torch.zeros(8, 128, dtype=torch.uint8)
    codes[0, 2] = 0b1101
    word = mt.pack(codes).view(torch.int32)[0]
    assert word.nonzero().tolist() == [[4]] and word[4].item() == 0x8140


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("M, N, K", [(1, 8, 64), (3, 70, 320), (8, 64, 256), (9, 33, 192), (17, 40, 128), (40, 72, 384),
                                     (129, 16, 128)])
def test_kernel_matches_the_float64_product(fmt, M, N, K):
    """Every tile shape of the table; rows, columns and chunks that do not fill a tile; results never written stay NaN."""
    q, x, out = weight(fmt, N, K, seed=M), activations(M, K), poisoned(M, N)
    mt.gemm_few(x, q, out=out)
    assert error(out, x.double() @ exact(q).T) < BOUND


def test_kernel_takes_k_that_is_an_odd_number_of_blocks():
    """K = 80 has 5 scales a row: reading them four to a word crosses rows."""
    q, x = weight("nvfp4", 24, 80), activations(5, 80)
    assert error(mt.gemm_few(x, q, out=poisoned(5, 24)), x.double() @ exact(q).T) < BOUND


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("M", [5, 20])
def test_splits_of_k_sum_to_the_same_product_twice(M, split):
    """The last program to arrive adds partial sums in a fixed order and leaves its counter at zero for the next launch."""
    q, x = weight("nvfp4", 72, 768), activations(M, 768)
    first = mt.gemm_few(x, q, split=split)
    assert torch.equal(first, mt.gemm_few(x, q, split=split))
    assert error(first, x.double() @ exact(q).T) < BOUND
    assert mt.space(x.device)[1].count_nonzero() == 0


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bounds", [(), (40,), (32, 40)])
def test_epilogue_adds_bias_lora_and_residual(bounds, silu):
    """Each row takes its own part's columns of x A^T, also where a tile holds rows of two parts."""
    M, N, K, R = 3, 80, 256, 12
    q, x = weight("nvfp4", N, K, uniform=False), activations(M, K)
    bias, B, xa = activations(1, N, 2)[0], activations(N, R, 3), activations(M, R * (len(bounds) + 1), 4)
    residual = activations(M, N // 2 if silu else N, 5)
    want = x.double() @ exact(q).T + bias.double()
    for p, (a, b) in enumerate(zip((0, *bounds), (*bounds, N), strict=True)):
        want[:, a:b] += 0.5 * xa[:, p * R : (p + 1) * R].double() @ B[a:b].double().T
    if silu:
        want = torch.nn.functional.silu(want[:, : N // 2]) * want[:, N // 2 :]
    arguments = dict(bias=bias, xa=xa, B=B, bounds=bounds, scaling=0.5, residual=residual, silu=silu)
    want += residual.double()
    for split in (1, 2):
        assert error(mt.gemm_few(x, q, split=split, C=1, **arguments), want) < BOUND
    assert error(mt.linear_decode(x, q, **arguments), want) < BOUND
    # x A^T in slices of K that sum to it, more of them than splits
    slices = torch.cat([xa.float() * 0.3, xa.float() * 0.6, xa.float() * 0.1]).view(3, *xa.shape)
    assert error(mt.gemm_few(x, q, split=2, C=1, **{**arguments, "xa": slices}), want) < BOUND
    assert error(mt.linear_decode(x, q, **{**arguments, "xa": slices}), want) < BOUND


@pytest.mark.parametrize("M, K, PR", [(1, 256, 16), (5, 896, 48), (33, 304, 40)])
def test_lora_xa(M, K, PR):
    x, A = activations(M, K), activations(PR, K, 2)
    got = mt.lora_xa(x, A, out=poisoned(M, PR), asm=CUDA)
    assert error(got, x.double() @ A.double().T) < BOUND
    assert torch.equal(got, mt.lora_xa(x, A, asm=CUDA))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("N, K", [(9, 192), (72, 256)])
def test_dequantization_is_exact(fmt, N, K):
    """Value times block scale has 6 significant bits: the scratch holds NVFP4 and MXFP4 without rounding."""
    q = weight(fmt, N, K)
    got, want = mt.dequantize(q).double(), exact(q) / q.global_scale[:, None].double()
    assert torch.allclose(got, want, rtol=1e-6 if fmt != "nf4" else 1.2e-2, atol=0)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)])
def test_matmul_and_its_gradient(fmt, shape):
    q = weight(fmt, 24, 192)
    x = torch.randn(*shape, 192, device=DEVICE, requires_grad=True)
    y = mt.matmul(x, q)
    dy = torch.randn_like(y)
    y.backward(dy)
    w = exact(q)
    assert y.shape == (*shape, 24) and y.dtype == x.dtype and x.grad.shape == x.shape
    if x.numel():
        assert error(y, x.double() @ w.T) < (6e-3 if CUDA else 1e-5)  # a float32 x is cast to bfloat16 on the GPU
        assert error(x.grad, dy.double() @ w) < (6e-3 if CUDA else 1e-5)


def test_kernel_takes_rows_with_a_stride():
    q, x = weight("nvfp4", 16, 128), activations(6, 512)
    for view in (x[:, 128:256], x[::2, :128], x.view(6, 128, 4)[..., 1]):
        assert error(mt.gemm_few(view, q), view.double() @ exact(q).T) < BOUND


def test_no_rows():
    q = weight("nvfp4", 16, 128)
    assert mt.gemm_few(activations(0, 128), q).shape == (0, 16)
    assert mt.matmul(activations(0, 128), q).shape == (0, 16)


@pytest.mark.parametrize("change, message", [
    (lambda q, x: (q, x.int()), "pass bfloat16"),
    (lambda q, x: (q, x[:, :64]), "columns"),
    (lambda q, x: (q, x.to("meta")), "is on"),
    (lambda q, x: (spoil(q, 0x7F), x), "NaN"),
    (lambda q, x: (spoil(q, 0x88), x), "negative"),
    (lambda q, x: (nvfp4.Quantized("fp3", q.shape, q.codes, q.scale, q.global_scale), x), "unknown format"),
    (lambda q, x: (nvfp4.Quantized("nvfp4", q.shape, q.codes[:, :32], q.scale, q.global_scale), x), "do not fit"),
])
def test_what_the_kernels_cannot_take_is_an_error(change, message):
    q, x = change(weight("nvfp4", 16, 128), activations(3, 128))
    with pytest.raises(ValueError, match=message):
        mt.matmul(x, q)


def spoil(q, byte):
    q.scale.view(torch.uint8)[3, 2] = byte
    return q


def test_a_scale_changed_in_place_is_checked_again():
    q, x = weight("nvfp4", 16, 128), activations(3, 128)
    mt.matmul(x, q)
    q.scale.copy_(torch.full_like(q.scale.float(), float("nan")))
    with pytest.raises(ValueError, match="NaN"):
        mt.matmul(x, q)


@pytest.mark.parametrize("N, K", [(4608, 3584), (37888, 3584), (3584, 18944), (151936, 896), (1, 16)])
def test_plans_stay_within_their_buffers(N, K):
    """Partial sums beyond the workspace, or a split with an idle program, would read what nobody wrote."""
    for M in (1, 8, 9, 32, 64, 65, 256, 300, 4096, 65536):
        t = mt.plan(M, N, K, 132)
        tiles, blocks = -(-N // t["BN"]) * -(-M // t["BM"]), -(-K // (128 * t["C"]))
        per = -(-blocks // t["split"])
        assert (t["split"] - 1) * per < blocks
        assert t["split"] == 1 or tiles * t["split"] * t["BM"] * t["BN"] <= mt.PARTIALS and tiles <= 1 << 17


@gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("M", [1, 7, 16, 31, 64, 100, 200, 300, 1100])
@pytest.mark.parametrize("N, K", [(4864, 896), (896, 4864), (1001, 272)])
def test_gpu_matches_at_real_shapes(fmt, M, N, K):
    if K % mt.BLOCK[fmt]:
        pytest.skip("K is not a multiple of the block")
    for uniform in (True, False):
        q, x = weight(fmt, N, K, seed=M, uniform=uniform), activations(M, K)
        want, w = x.double() @ exact(q).T, exact(q)
        assert error(mt.gemm_few(x, q, out=poisoned(M, N)), want) < (3.2e-3 if fmt == "nf4" else BOUND)
        x.requires_grad_()
        y = mt.matmul(x, q)
        assert error(y, want) < (3.2e-3 if fmt == "nf4" else BOUND)
        y.backward(y.detach())
        assert error(x.grad, y.detach().double() @ w) < (3.2e-3 if fmt == "nf4" else BOUND)


@gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("M", [4, 24, 128])
def test_gpu_both_decoders_agree(fmt, M):
    """The PTX mixes four bytes at once; a compiler that regroups them would only show here."""
    q, x = weight(fmt, 256, 512), activations(M, 512)
    fast, slow = mt.gemm_few(x, q), mt.gemm_few(x, q, asm=False, BM=16, BN=64, warps=4, C=1, stages=1, split=1)
    assert error(fast, slow.double()) < (4e-3 if fmt != "nf4" else 5e-3)


@gpu
def test_gpu_decode_in_a_graph_equals_eager():
    """Counters, buffers and dependent launches survive replays, here of chained layers that read each other's output."""
    q1, q2 = weight("nvfp4", 3584, 3584), weight("nvfp4", 3584, 3584, seed=1)
    A, B, x = activations(16, 3584, 5) * 0.02, activations(3584, 16, 6) * 0.02, activations(4, 3584)
    buffers = [torch.empty_like(x) for _ in range(2)]

    def step():
        xa = mt.lora_xa(x, A)
        mt.linear_decode(x, q1, xa=xa, B=B, out=buffers[0])
        buffers[0].mul_(1e-3)
        mt.linear_decode(buffers[0], q2, residual=x, out=buffers[1])

    step()
    want = buffers[1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        buffers[1].fill_(float("nan"))
        graph.replay()
        assert torch.equal(buffers[1], want)


@gpu
def test_gpu_many_rows_and_64_bit_offsets():
    """65,536 rows of 37,888 outputs are more than 2^31 elements."""
    q, x = weight("nvfp4", 37888, 256), activations(65536, 256)
    y = mt.matmul(x, q)
    rows = torch.tensor([0, 1, 40000, 65535], device=DEVICE)
    assert error(y[rows], x[rows].double() @ exact(q).T) < BOUND
