"""A noise whose size each norm learns: w + exp(s) Z, with one trained number s a norm.

The noise has to be in the update for s to have a gradient, hence --aqn-scope both. The adapter is
saved without the numbers: evaluations of the run are clean, so they are not needed there.

    python lab/ideas/learned_noise.py --aqn-scope both --out runs/learned-s0
"""
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aqn
import lora
import model
import train

add_lora = lora.add_lora


def forward(self, x):
    """model.RMSNorm's, with the noise times exp(s)."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
    noise = self.noise * self.s.exp() if hasattr(self, "s") else self.noise  # (C,)
    return (h * (self.weight.float() + noise)).to(x.dtype)


def with_scales(net, *args):
    params, device = add_lora(net, *args), net.embed.weight.device
    for norm in itertools.chain(*aqn.norms(net)):
        norm.s = torch.nn.Parameter(torch.zeros((), device=device))
        params.append(norm.s)
    return params


model.RMSNorm.forward, lora.add_lora = forward, with_scales

if __name__ == "__main__":
    sys.exit(train.main())
