r"""Evolution strategies on four-bit weights: no gradient, only rewards (as QES and EGGROLL do).

Member j of the population is the adapter with its B moved by SIGMA E_j; E_1 is -E_0, E_3 is -E_2,
and so on. The j-th completion of each prompt is drawn by member j, so that every member answers the
same questions. Its fitness is its mean advantage, and B moves along the sum of fitness times E: the
finite-difference estimate of the gradient of the mean reward. A stays as it was drawn, so that each
member moves the weights by a matrix of the adapter's rank. It samples as many tokens as GRPO does.

    python lab/ideas/evolution.py --no-aqn --no-dynamic-sampling --updates-per-rollout 1 \
        --lr 3e-3 --out runs/es-s0
"""
import sys
from argparse import Namespace
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import aqn
import grpo
import lora
import train

SIGMA = 0.05  # of B's perturbation; training by gradients moves B by about as much
complete = train.complete


def perturb(model, seed, member, size):
    """Add size * E of a member to each B."""
    sign = 1 - 2 * (member % 2)
    for layer, (_, m) in enumerate(lora.lora_layers(model)):
        gen = torch.Generator().manual_seed(aqn.noise_seed(seed, member // 2, layer))
        m.B.data.add_(sign * size * torch.randn(m.B.shape, generator=gen).to(m.B.device))


def complete_by_members(model, tok, rows, args, seed, indices=None):
    single, members = Namespace(**vars(args) | {"group_size": 1}), []
    before = [m.B.detach().clone() for _, m in lora.lora_layers(model)]
    for j in range(args.group_size):
        perturb(model, seed, j, SIGMA)
        groups = complete(model, tok, rows, single, aqn.noise_seed(seed, j), indices)
        for c in chain(*groups):
            c.member = seed, j
        members.append(groups)
        for (_, m), B in zip(lora.lora_layers(model), before, strict=True):
            m.B.data.copy_(B)
    return [[*chain(*group)] for group in zip(*members, strict=True)]


@torch.no_grad()
def update(model, optimizer, completions, settings):
    """One step along the estimated gradient. No metrics: no log-prob is computed."""
    fitness = {}
    for c in completions:
        fitness.setdefault(c.member, []).append(c.advantage)
    now = [m.B.detach().clone() for _, m in lora.lora_layers(model)]
    for (seed, member), values in fitness.items():
        perturb(model, seed, member, sum(values) / len(completions) / SIGMA)
    for (_, m), B in zip(lora.lora_layers(model), now, strict=True):
        m.B.grad = B - m.B  # the optimizer descends
        m.B.data.copy_(B)
    torch.nn.utils.clip_grad_norm_(optimizer.params, settings.grad_clip)
    optimizer.step()
    optimizer.zero_grad()


train.complete, grpo.update = complete_by_members, update

if __name__ == "__main__":
    sys.exit(train.main())
