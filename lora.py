r"""
LoRA beside a frozen linear, kept in float32, saved and loaded in PEFT's layout.

    y = base(x) + (alpha / r) * (x A^T) B^T      A (r, K) random, B (N, r) zero: the first step
                                                 starts at the base model

q,k,v and gate,up are fused in the base model, but each original projection keeps its own A and B,
as in the checkpoints that PEFT reads and writes: A is stacked to (parts * r, K), one GEMM for all,
and B (N, r) is stacked by rows, so that part i uses columns i*r .. (i+1)*r of x A^T. The adapter is
never merged into four-bit weights: rounding would erase it. `--merge` (lab/convert.py) writes a
16-bit checkpoint instead, w_hat + (alpha / r) B A.

    add_lora(model, rank=32, alpha=32); train; save_adapter(model, "runs/x/adapter")
    load_adapter(model, "runs/x/adapter")
    with disabled(model): ...                     # the KL reference: the same model, adapter off
    python lora.py --merge --model Qwen/Qwen2.5-3B-Instruct --quant nvfp4 \
        --adapter runs/x/adapter --out merged/

Shapes: N outputs, K inputs, R rank, P parts of a fused projection.
"""
import math
from contextlib import contextmanager

from plumbing import command, peft

import torch
import torch.nn as nn

from model import projections, stored_name


class LoRALinear(nn.Module):
    """`base` plus a low-rank term; the interface is described at model.Linear. A (P*R, K) and
    B (N, R) are float32 parameters. A is random, from `generator`; B is zero."""

    def __init__(self, base, rank, scaling, generator=None):
        super().__init__()
        self.base, self.parts, self.shape = base, base.parts, base.shape
        self.rank, self.scaling, self.enabled = rank, scaling, True
        device = next(t.device for t in [*base.parameters(), *base.buffers()])
        N, K = base.shape
        bound = 1 / math.sqrt(K)  # what PEFT's kaiming_uniform_(a=sqrt(5)) comes to
        A = (torch.rand(len(self.parts) * rank, K, generator=generator) * 2 - 1) * bound
        self.A = nn.Parameter(A.to(device))
        self.B = nn.Parameter(torch.zeros(N, rank, device=device))

    def by_part(self):
        """{part: (A (R, K), B (N_p, R))}, views of the parameters."""
        A = self.A.detach().split(self.rank)
        B = self.B.detach().split([*self.parts.values()])
        return {part: (a, b) for part, a, b in zip(self.parts, A, B, strict=True)}

    def dense(self):
        if not self.enabled:
            return self.base.dense()
        parts = [b @ a for a, b in self.by_part().values()]  # P x (N_p, R) @ (R, K)
        return self.base.dense() + self.scaling * torch.cat(parts)  # (N, K)

    def forward(self, x):
        y = self.base(x)
        if not self.enabled:
            return y
        xa = x @ self.A.to(x.dtype).T  # (..., K) -> (..., P*R)
        # the parts' B on a block diagonal: one GEMM that adds to y, instead of one per part, a
        # concatenation and a sum
        B = torch.block_diag(*self.B.to(x.dtype).split([*self.parts.values()]))  # (N, P*R)
        delta = torch.addmm(y.reshape(-1, y.shape[-1]), xa.reshape(-1, xa.shape[-1]), B.T,
                            alpha=self.scaling)
        return delta.view_as(y)  # (..., N)


def lora_layers(model):
    """[(path, LoRALinear)] in module order."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, LoRALinear)]


def add_lora(model, rank, alpha, seed=0):
    """Put a LoRALinear around every projection of every block, in place, and freeze all else;
    returns the trainable parameters. rank >= 1; scaling is alpha / rank."""
    assert not lora_layers(model), "the model has an adapter already"
    model.requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    for path, m in projections(model):
        model.set_submodule(path, LoRALinear(m, rank, alpha / rank, g))
    return [p for _, m in lora_layers(model) for p in (m.A, m.B)]


@contextmanager
def disabled(model):
    """The base model inside the `with`: every adapter off, and norms as they were before training
    (lab/ideas/norms.py trains some); restored on the way out."""
    layers = [m for _, m in lora_layers(model) if m.enabled]
    for m in layers:
        m.enabled = False
    try:
        with peft.base_norms(model):
            yield
    finally:
        for m in layers:
            m.enabled = True


# ---- PEFT's files


def names(path, part):
    """PEFT's names of the A and B of the original projection `part` in the fused one at `path`."""
    where = f"base_model.model.{stored_name(path, part)}"
    return f"{where}.lora_A.weight", f"{where}.lora_B.weight"


def save_adapter(model, folder, base_model=""):
    """Write the adapter, and any norms that belong to it, to `folder`, in PEFT's layout and
    float32. One scaling is saved, the first layer's; B makes up for another."""
    first = lora_layers(model)[0][1]
    state = {name: norm.weight.detach() for name, norm in peft.own_norms(model).items()}
    for path, m in lora_layers(model):
        for part, (A, B) in m.by_part().items():
            a, b = names(path, part)
            state[a], state[b] = A, B * (m.scaling / first.scaling)
    peft.save(folder, state, first.rank, first.scaling, base_model)


def read_adapter(model, folder):
    """(rank, scaling, {PEFT's name: tensor}) of an adapter folder, checked against the shapes of
    `model` (a skeleton will do). ValueError for what cannot be honoured."""
    rank, scaling, state = peft.read(folder)
    shapes = {name: tuple(norm.weight.shape) for name, norm in peft.norms_of(model)}
    for path, m in projections(model):
        for part, n in m.parts.items():
            a, b = names(path, part)
            shapes |= {a: (rank, m.shape[1]), b: (n, rank)}
    peft.check(folder, state, shapes)
    return rank, scaling, state


@torch.no_grad()
def take_tensors(path, m, state):
    """Copy what `state` (PEFT's names) holds for the new LoRALinear `m` at `path`; a part that
    `state` leaves out was no target: its B stays zero, so it contributes nothing."""
    for part, (A, B) in m.by_part().items():
        a, b = names(path, part)
        if b in state:
            A.copy_(state[a])
            B.copy_(state[b])


def load_adapter(model, folder):
    """Load a PEFT-layout adapter into `model`, which has none. Raises what read_adapter raises, and
    then leaves the model as it was."""
    rank, scaling, state = read_adapter(model, folder)
    add_lora(model, rank, scaling * rank)
    for path, m in lora_layers(model):
        take_tensors(path, m, state)
    for name, norm in peft.norms_of(model):
        if name in state:
            peft.own_norm(norm, state[name])
    return model


if __name__ == "__main__":
    command.become("lab/convert.py", "merge")
