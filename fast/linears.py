"""
The projections as decode steps and updates use them: the weight where it is, and 16-bit copies of
the adapter, which is trained in float32.

A decode step multiplies by the weight as it lies (decode.py). Below one in 16 bits lies A, in the
same matrix, so that one GEMM gives both x W^T and x A^T. An update, and a prefill of many tokens,
multiply by [w_hat | s B] in a scratch (packed.py), except forward with --engine exact.

Shapes: M rows of x, S tokens, a linear has N outputs, K inputs, P parts; R rank, PR = P*R, E = PR
rounded up to 8.
"""
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch

import lora
from fast import gemm
from fast.plan import FEW
from model import projections

LINEARS = WeakKeyDictionary()  # model -> {whether its adapters are on: its FastLinears}


def exact(model):
    """Whether each sum is taken in an order that the number of rows does not change (--engine
    exact), so that sampler and trainer agree to the last bit."""
    return getattr(model.fast, "exact", False)


def adapter_of(m):
    """The lora.LoRALinear that a projection is, if it is enabled, or None."""
    return m if isinstance(m, lora.LoRALinear) and m.enabled else None


class FastLinear:
    """A linear and copies of its adapter: A (PR, K), padded_A (E, K), which is A with rows of zeros
    behind it, B (N, R), and tail = s B / alpha (N, E) with the parts of B on a block diagonal.
    alpha: as in gemm.decoded."""

    def __init__(self, m, dtype, exact=False):
        self.base, self.adapter, self.q, self.exact = m.base, adapter_of(m), m.base.q, exact
        self.N, self.K = m.shape
        self.parts = [*m.parts.values()]
        self.tiled = self.q is not None and self.q.codes.is_cuda  # else torch multiplies
        self.alpha = (gemm.common_scale(self.q) or 1.0) if self.tiled else 1.0
        self.E, self.scaling, self.bounds = 0, 0.0, ()
        self.A = self.B = self.tail = self.both = None
        if (a := self.adapter) is not None:
            self.R, self.PR, self.scaling = a.rank, len(a.A), float(a.scaling)
            self.E = -(-self.PR // 8) * 8  # rows of x A^T stay aligned to 16 bytes
            self.bounds = tuple(accumulate(self.parts))[:-1]  # rows where later parts begin
            if self.q is None:
                self.both = with_rows(m.base, self.E)
                self.padded_A = self.both[self.N :]
            else:
                self.padded_A = a.A.new_zeros(self.E, self.K, dtype=dtype)
            self.A, self.B = self.padded_A[: self.PR], torch.empty_like(a.B, dtype=dtype)
            self.tail = a.A.new_zeros(self.N, self.E, dtype=dtype)
            self.trained_A, self.trained_B = a.A.detach(), a.B.detach()  # what refresh copies
        self.made_from = identity(m)  # after with_rows, which moves the weight

    def blocks(self, t):
        """The blocks of t (N, E) where a part's outputs meet its own columns: P views (N_p, R)."""
        return [rows[:, i * self.R : (i + 1) * self.R]
                for i, rows in enumerate(t.split(self.parts))]

    def few(self, rows):
        """Whether this many rows are better off with a decode step's linear, which reads its weight
        as it is."""
        return rows <= FEW and (self.tiled or self.q is None and self.E > 0 and self.A.is_cuda)

    def weight(self, dtype):
        """(w (N, K + E), alpha): alpha * w is [w_hat | s B]; in the scratch, it lasts until the
        next."""
        if self.tiled:
            return gemm.decoded(self.q, self.tail)
        w = self.base.weight_in(dtype)
        return (gemm.beside(w, self.tail) if self.E else w), 1.0

    def forward(self, wide, residual):
        """wide [h | x A^T] (S, K + E) -> y (S, N) = h w^T + s x A^T B^T + residual or bias: no
        linear has both."""
        if self.exact:  # the decode step's kernel
            return gemm.gemm_few(wide[:, : self.K], self.q, self.base.bias, self.A, self.B,
                                 self.bounds, self.scaling, residual, exact=True)
        w, alpha = self.weight(wide.dtype)
        start = self.base.bias if residual is None else residual
        return gemm.scaled(wide, w.T, alpha, start)

    def backward(self, dy):
        """dy (S, N) -> wide [dh | d(x A^T)] (S, K + E); dh lacks what comes through x A^T."""
        return gemm.scaled(dy, *self.weight(dy.dtype))


def identity(m):
    """What changes if a weight or the adapter of a projection is replaced, or scaled otherwise: a
    global scale also by what is written to it. A FastLinear keeps what it read alive, so that
    nothing else comes to lie there."""
    base, a = m.base, adapter_of(m)
    own = [*base._parameters.values(), *base._buffers.values()]
    if a is not None:
        own += a._parameters.values()
    g = base._buffers.get("global_scale")
    written = None if g is None else g._version
    return base, a, a and a.scaling, *(t.data_ptr() for t in own if t is not None), written


def with_rows(linear, more):
    """(N + more, K): a 16-bit linear's weight, which is moved there and stays the only copy, and
    rows below it."""
    N, wide = linear.shape[0], getattr(linear, "wide", None)
    if wide is None or len(wide) != N + more or wide.data_ptr() != linear.weight.data_ptr():
        linear.wide = wide = linear.weight.new_zeros(N + more, linear.shape[1])
        wide[:N] = linear.weight
        linear.weight.data = wide[:N]
    return wide


@torch.no_grad()
def linears_of(model):
    """The four FastLinears of each block. They are made once, and again when a weight or an adapter
    has been replaced."""
    modules = [m for _, m in projections(model)]
    kept = LINEARS.setdefault(model, {})
    on = any(adapter_of(m) for m in modules)
    if [p.made_from for p in kept.get(on, ())] != [*map(identity, modules)]:
        kept[on] = [FastLinear(m, model.embed.weight.dtype, exact(model)) for m in modules]
    return [kept[on][i : i + 4] for i in range(0, len(modules), 4)]


@torch.no_grad()
def refresh(linears):
    """Copy the adapters' current parameters into `linears`."""
    adapted = [p for block in linears for p in block if p.E]
    if adapted:
        torch._foreach_copy_([t for p in adapted for t in (p.A, p.B)],
                             [t for p in adapted for t in (p.trained_A, p.trained_B)])
    for p in adapted:
        for B, tail in zip(p.trained_B.split(p.parts), p.blocks(p.tail), strict=True):
            torch.mul(B, p.scaling / p.alpha, out=tail)
