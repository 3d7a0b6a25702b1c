"""A second idea: each completion of a group has a noise of its own.

With one noise a step, completions of a group differ only by their random numbers, and what the
noise did to all of them is subtracted with the group's mean. Here the j-th completions of all
prompts have the j-th noise, so that a group compares policies as well. All else is train.py:

    python lab/ideas/own_noise.py --out runs/own-s0 --aqn-start 5e-2
"""
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aqn
import train

draw, complete, level = aqn.set_noise, train.complete, 0.0


def set_noise(model, sigma, seed=0):
    global level
    level = sigma
    draw(model, sigma, seed)


def complete_each(model, tok, rows, args, seed, indices=None):
    single, each = Namespace(**vars(args) | {"group_size": 1}), []
    for j in range(args.group_size):
        own = aqn.noise_seed(seed, j)
        draw(model, level, own)
        each.append(complete(model, tok, rows, single, own, indices))
    return [sum(group, []) for group in zip(*each, strict=True)]


aqn.set_noise, train.complete = set_noise, complete_each

if __name__ == "__main__":
    sys.exit(train.main())
