"""What rounding takes from an adapter that is added to outputs in 16 bits.

In bfloat16 a number has 8 bits. A LoRA adapter begins at zero, so for a while its part of an output
is below half a step of what it is added to, and lost if that has been rounded already. `once` adds
x W^T, the adapter's part, bias and residual in float32, and rounds, as on the GPU; `twice` rounds
before the adapter's part comes, in o and down with the residual, as it was there beside 16-bit
weights (docs/claims.md says in which runs). On the CPU, sampler and update alike:

    python lab/ideas/rounding.py once --quant none --no-aqn --dtype bfloat16 --out runs/once-s0
    python lab/ideas/rounding.py twice --quant none --no-aqn --dtype bfloat16 --out runs/twice-s0
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import lora
import model
import train

ORDER = "once"


def add(y, term, part):
    """y + term + part in float32, for y and part in float32; `twice`: y + term is rounded first."""
    y = y if term is None else y + term.float()
    return (y if ORDER == "once" else y.to(torch.bfloat16).float()) + part


def linear(self, x):
    """LoRALinear's output for x (..., K); of o and down, which a residual follows, x W^T and the
    adapter's part, in float32."""
    if not self.enabled:
        return self.base(x)
    xa = x @ self.A.to(x.dtype).T  # (..., K) -> (..., P*R)
    B = torch.block_diag(*self.B.split([*self.parts.values()])).to(x.dtype)  # (N, P*R)
    y = x.float() @ self.base.weight_in(torch.float32).T  # (..., K) -> (..., N)
    part = self.scaling * (xa.float() @ B.float().T)
    return (y, part) if len(self.parts) == 1 else add(y, self.bias, part).to(x.dtype)


def block(self, x, *args):
    """model.Block's output for x (B, T, C)."""
    for norm, run in ((self.input_layernorm, lambda h: self.attn(h, *args)),
                      (self.post_attention_layernorm, self.mlp)):
        y = run(norm(x))
        x = add(y[0], x, y[1]).to(x.dtype) if isinstance(y, tuple) else x + y
    return x


lora.LoRALinear.forward, model.Block.forward = linear, block

if __name__ == "__main__":
    if sys.argv[1:2] not in (["once"], ["twice"]):
        sys.exit(f"rounding.py: error: once or twice?\n\n{__doc__}")
    ORDER = sys.argv[1]
    sys.exit(train.main(sys.argv[2:]))
