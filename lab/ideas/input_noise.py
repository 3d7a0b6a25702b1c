"""Noise where AQN has none: on the inputs of o and down, which no norm precedes.

AQN's noise in a norm multiplies the input channels of q, k, v, gate and up. Here each input channel
of o and down is multiplied by 1 + Z as well. A buffer called `noise` is all that aqn.clear needs to
remove it, and a hook that works in place on tensors runs inside the sampler's CUDA graph:

    python lab/ideas/input_noise.py --out runs/input-s0
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aqn
import train
from model import projections

in_norms = aqn.set_noise


def multiply(linear, args):
    return (args[0] * (1 + linear.noise).to(args[0].dtype),)  # (..., K) * (K,)


def set_noise(model, sigma, seed=0):
    in_norms(model, sigma, seed)
    gen = torch.Generator().manual_seed(aqn.noise_seed(seed, "inputs"))
    for path, linear in projections(model):
        if path.endswith(("o_proj", "down_proj")):
            if not hasattr(linear, "noise"):
                zeros = torch.zeros(linear.shape[1], device=model.embed.weight.device)
                linear.register_buffer("noise", zeros, persistent=False)
                linear.register_forward_pre_hook(multiply)
            linear.noise.copy_(sigma * torch.randn(linear.shape[1], generator=gen))


aqn.set_noise = set_noise

if __name__ == "__main__":
    sys.exit(train.main())
