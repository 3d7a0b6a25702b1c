"""
The FP4 GEMM to read: y = x w_hat^T for activations x (M, K) and a weight (N, K) of four-bit codes,
in plain Triton.

A few rows cost only what reading the weight costs. With M rows each weight takes part in M
products, and a GPU can do some 300 of them in the time it takes to read one 16-bit number. While
text is generated, M is the number of sequences, so the arithmetic is free, and four bits instead of
sixteen give up to 3.5 times the speed. `gemm_kernel` turns codes into numbers in registers, on
their way to the tensor core.

The trick is that E2M1 needs no table. It is a tiny float, s ee m, and becomes a float32 by moving
its bits: s to bit 31, ee to the low end of the exponent, m to the top of the mantissa.

    E2M1      s       ee m         (1 + m/2) * 2^(ee - 1)       code 5 = 0 10 1 is 3
    float32   s 000000ee m000...   (1 + m/2) * 2^(ee - 127)                     is 3 * 2^-126

Every value comes out 2^126 times too small, even 0.5, E2M1's only subnormal (ee = 0, m/2 without
the 1), which becomes a float32 subnormal by the same rule. The block scale takes back 2^112 (the
value does in MXFP4, whose scale may have no room for it), the epilogue 2^14. The tensor core gets
value * scale * 2^-14: at most 6 significant bits, which bfloat16 holds exactly. Sums and the
global scale are float32, so only the output is rounded: relative error 1.7e-3. A codebook's values
(NF4) are looked up, and their products with a scale are rounded as well: 2.4e-3.

With many rows it is different. Each tile of rows decodes the weight again, at six or seven
instructions a code, and the arithmetic is no longer free. So `decode_kernel` writes w_hat once,
rounded to bfloat16, and cuBLAS multiplies: relative error 2.4e-3. The gradient in x is computed
the same way. The weight has no gradient, and no 16-bit copy of it is kept.

    y = matmul(x, q)                                      # any number of rows, differentiable in x

A weight q is an nvfp4.Quantized: codes (N, K/2), scale (N, K/block), global_scale (N,), format.

Shapes: M rows of x, N outputs, K inputs; a program takes BM, BN, BK of them at a time.
"""
import functools
import math

import torch
import triton
import triton.language as tl

FEW = 128  # up to this many rows, decoding in registers is faster than decoding first
SCALES = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0", torch.float32: "float32"}


@triton.jit
def decode(codes, scale, book, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Codes (BN, BK/2) and scales (BN, BK/BLOCK) -> value * scale (BN, BK), float32; for E2M1 2^-14
    times that."""
    if SCALE == "float32":
        value = tl.load(book + (tl.join(codes, codes >> 4) & 15))  # (BN, BK/2, 2)
    else:
        # move a code to the top of 32 bits, then down by 6: s stays in bit 31, ee m reach 24..22
        code = codes.to(tl.int32)
        top = tl.join(code << 28, code << 24)  # (BN, BK/2, 2)
        # keep only these bits: the shift has filled 30..25 with copies of s
        value = (top >> 6 & ~0x7E3FFFFF).to(tl.float32, bitcast=True)

    # the scale times 2^112: E4M3 becomes a float16 in the same way, 2^8 times too small; E8M0 is
    # the exponent field of a float32
    if SCALE == "e4m3":
        scale = (scale.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 2.0**120
    elif SCALE == "e8m0":
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        value *= 2.0**112  # a scale above 2^15 has no room for it

    BN: tl.constexpr = codes.shape[0]
    BK: tl.constexpr = codes.shape[1] * 2
    product = tl.reshape(value, (BN, BK // BLOCK, BLOCK)) * scale[:, :, None]
    return tl.reshape(product, (BN, BK))


@triton.jit
def gemm_kernel(x, codes, scale, book, g, out, M, N, steps, SCALE: tl.constexpr,
                BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[split] (M, N) = x w_hat^T over one split of the K = steps * BK columns."""
    K = steps * BK  # as a product: Triton sees that rows are aligned, and copies 16 bytes at a time

    # this program's rows of x and of the weight; past the last they begin again, and are not stored
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = (n % N).to(tl.int64)
    xp = x + (m % M)[None, :] * K + tl.arange(0, BK)[:, None]  # (BK, BM)
    cp = codes + row[:, None] * (K // 2) + tl.arange(0, BK // 2)[None, :]  # (BN, BK/2)
    sp = scale + row[:, None] * (K // BLOCK) + tl.arange(0, BK // BLOCK)[None, :]  # (BN, BK/BLOCK)

    # its split of K. Triton pipelines the loop: while one tile is multiplied, the next are on their
    # way to shared memory
    split = tl.program_id(2)
    per = tl.cdiv(steps, tl.num_programs(2))
    acc = tl.zeros((BN, BM), tl.float32)
    for i in range(split * per, tl.minimum(split * per + per, steps)):
        xt = tl.load(xp + i * BK)
        c = tl.load(cp + i * (BK // 2))
        s = tl.load(sp + i * (BK // BLOCK))
        w = decode(c, s, book, SCALE, BLOCK).to(x.dtype.element_ty)
        # the weight goes on the left, where the tensor core takes 16 rows at a time; on the right
        # a single row of x is padded only to 8
        acc = tl.dot(w, xt, acc)  # (BN, BK) @ (BK, BM)

    # the epilogue, in float32: the global scale, and the factor E2M1 still lacks
    if SCALE != "float32":
        acc *= 2.0**14
    acc *= tl.load(g + row)[:, None]
    to = out + (split * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def decode_kernel(codes, scale, book, g, out, N, steps, SCALE: tl.constexpr, BLOCK: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr):
    """out (N, K) = w_hat, rounded to bfloat16."""
    K = steps * BK
    i = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    c = tl.load(codes + row * (K // 2) + i * (BK // 2) + tl.arange(0, BK // 2)[None, :])
    s = tl.load(scale + row * (K // BLOCK) + i * (BK // BLOCK) + tl.arange(0, BK // BLOCK)[None, :])
    w = decode(c, s, book, SCALE, BLOCK)  # (BN, BK)
    if SCALE != "float32":
        w *= 2.0**14
    w *= tl.load(g + row)
    to = out + row * K + i * BK + tl.arange(0, BK)[None, :]
    tl.store(to, w.to(out.dtype.element_ty), mask=(n < N)[:, None])


@functools.cache
def table(codebook, device):
    return torch.tensor(codebook or (0.0,), device=device)


def arguments(q):
    """(what the kernels read of q, the constants by which they decode it)."""
    scale = q.scale if q.scale.dtype == torch.float32 else q.scale.view(torch.uint8)
    tensors = q.codes, scale, table(q.format.codebook, q.codes.device), q.global_scale
    return tensors, {"SCALE": SCALES[q.scale.dtype], "BLOCK": q.format.block}


def tile(M, N, K, cores):
    """How `cores` processors share the product of x (M, K) and a weight (N, K)."""
    BM = max(8, min(32, triton.next_power_of_2(M)))
    BN = 64
    BK = math.gcd(K, 128)  # K is a multiple of it, so that no load needs a mask
    # where tiles are few, K is split, until each processor has some eight programs, which hide one
    # another's waiting, or a program has only four steps
    tiles = triton.cdiv(M, BM) * triton.cdiv(N, BN)
    per = max(4, triton.cdiv(K // BK * tiles, 8 * cores))
    return {"BM": BM, "BN": BN, "BK": BK, "splits": triton.cdiv(K // BK, per), "num_warps": 4,
            "num_stages": 4}


def few_rows(x, q, dtype):
    """x (M, K) times w_hat^T: (M, N) in `dtype`. x is bfloat16; on the CPU, where the kernel needs
    TRITON_INTERPRET=1, float32, as the interpreter cannot multiply bfloat16."""
    (M, K), N = x.shape, q.shape[0]
    cores = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    t = tile(M, N, K, cores)
    splits = t.pop("splits")
    out = torch.empty(splits, M, N, dtype=dtype if splits == 1 else torch.float32, device=x.device)
    tensors, constants = arguments(q)
    gemm_kernel[triton.cdiv(M, t["BM"]), triton.cdiv(N, t["BN"]), splits](
        x.contiguous(), *tensors, out, M, N, K // t["BK"], **constants, **t)
    return out.sum(0).to(dtype) if splits > 1 else out[0]


def to_bfloat16(q):
    """w_hat (N, K), rounded to bfloat16."""
    (N, K), BK = q.shape, math.gcd(q.shape[1], 128)
    out = torch.empty(N, K, dtype=torch.bfloat16, device=q.codes.device)
    tensors, constants = arguments(q)
    decode_kernel[K // BK, triton.cdiv(N, 64)](*tensors, out, N, K // BK, **constants, BN=64, BK=BK)
    return out


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q):
        ctx.q = q
        x16 = x.to(torch.bfloat16)
        if 0 < x.shape[0] <= FEW:
            return few_rows(x16, q, x.dtype)
        return (x16 @ to_bfloat16(q).T).to(x.dtype)  # (M, K) @ (K, N)

    @staticmethod
    def backward(ctx, dy):
        dx = dy.to(torch.bfloat16) @ to_bfloat16(ctx.q)  # (M, N) @ (N, K)
        return dx.to(dy.dtype), None


def matmul(x, q):
    """x (..., K) times a quantized weight q (N, K): (..., N) in x.dtype, differentiable in x.

    Factors are bfloat16 and sums float32; on the CPU it is plain torch in float32."""
    # the kernels read memory by these, not by the tensors' own sizes and strides
    assert x.shape[-1] == q.shape[1] and q.codes.is_contiguous() and q.scale.is_contiguous()
    if not x.is_cuda:
        return (x.float() @ q.dequantize().T).to(x.dtype)  # (..., K) @ (K, N)
    return Matmul.apply(x.reshape(-1, x.shape[-1]), q).view(*x.shape[:-1], q.shape[0])
