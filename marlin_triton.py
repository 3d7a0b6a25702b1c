"""
The FP4 GEMM: y = x w_hat^T for x (M, K) in bfloat16 and a packed four-bit weight (N, K).
"""
import torch

BLOCK = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


def pack(codes):
    """Codes (N, K), one uint8 each in 0..15, to the kernel's order: (N, ceil(K/32)*16) uint8, columns past K are code 0."""
    if codes.dim() != 2 or codes.dtype != torch.uint8:
        raise ValueError(f"pack: codes must be a (N, K) uint8 tensor, got {tuple(codes.shape)} {codes.dtype}")
    N, K = codes.shape
    c = torch.nn.functional.pad(codes, (0, -K % 32)).int()
    c = ((c & 8) << 12) | ((c & 7) << 6)  # where a bfloat16 wants them: sign in bit 15, the others in 8..6
    c = c.view(N, -1, 2, 4, 2, 2).transpose(2, 3)  # unit, plane, word, pair, half -> (N, unit, word, plane, pair, half)
    a, b, c, d = (c[..., 0] | c[..., 1] << 16).flatten(3).unbind(-1)  # 4 x (N, unit, word), two codes each
    d_high = d & ~0x00400040
    word = a | shift(b, 4) | rotate(c, 26) | rotate(d_high, 30) | shift(d & 0x00400040, 6)
    return word.view(N, -1).contiguous().view(torch.uint8)


def unpack(packed, K):
    """The inverse of pack: (N, K) uint8 codes."""
    N = packed.shape[0]
    w = packed.contiguous().view(torch.int32)  # (N, 4 words a unit)
    d = (rotate(w, 2) & 0x81808180 - (1 << 32)) | ((w << 6) & 0x00400040)
    v = torch.stack([w, w << 4, rotate(w, 6), d], -1).view(N, -1, 4, 2, 2)  # (N, unit, word, plane, pair)
    v = torch.stack([v & 0xFFFF, shift(v, 16)], -1).transpose(2, 3)  # (N, unit, plane, word, pair, half)
    return (((v >> 12) & 8) | ((v >> 6) & 7)).to(torch.uint8).reshape(N, -1)[:, :K].contiguous()


def shift(w, s):
    """Logical right shift of int32."""
    return (w >> s) & ((1 << (32 - s)) - 1)


def rotate(w, s):
    """Rotate int32 right by s bits."""
    return shift(w, s) | (w << (32 - s))


def block_scales(q):
    """q's block scales (N, K/block) as float32, without the global scale."""
    return torch.ldexp(torch.ones((), device=q.scale.device), q.scale.int() - 127) if q.fmt == "mxfp4" else q.scale.float()


def dequantize(q, dtype=torch.float32):
    """w_hat / global_scale: (N, K), code value times block scale."""
    N, K = q.shape
    table = torch.tensor(NF4 if q.fmt == "nf4" else E2M1, device=q.codes.device)
    w = table[unpack(q.codes, K).int()].view(N, K // BLOCK[q.fmt], BLOCK[q.fmt])
    return (w * block_scales(q)[..., None]).view(N, K).to(dtype)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q):
        ctx.q = q
        return (x.float() @ (dequantize(q) * q.global_scale[:, None]).T).to(x.dtype)  # (M, K) @ (K, N)

    @staticmethod
    def backward(ctx, dy):
        q = ctx.q
        return (dy.float() @ (dequantize(q) * q.global_scale[:, None])).to(dy.dtype), None  # (M, N) @ (N, K)


def matmul(x, q):
    """x (..., K) times the quantized weight q (N, K): (..., N) in x.dtype, differentiable in x."""
    return Matmul.apply(x.reshape(-1, x.shape[-1]), q).view(*x.shape[:-1], q.shape[0])
