"""AQN by its effect. Sigma is absolute, and norms weigh more in one model than in the next: here it
is chosen so that the noisy policy is --target-kl nats a token away from the clean one, on samples
of the model as it is before training. By default four bits' own distance from 16 on Qwen2.5-Coder.

    python lab/ideas/target_noise.py --target-kl 0.05 --aqn-scope both --out runs/target-s0

The schedule keeps its shape: all of it is multiplied by one factor.
"""
import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plumbing.command import number

import aqn
import lora
import train
from lab.ideas.noise_size import draw, sizes

PROMPTS = 16  # whose samples the distance is measured on
TOKENS = 64  # of each sample
learn, sigma = train.learn, aqn.sigma


def found(model, completions, target, low=1e-4, high=1.0, halvings=12):
    """The sigma whose KL(noisy || clean) on the completions is `target`, by halving its range."""
    for _ in range(halvings):
        middle = (low * high) ** 0.5
        kl, _ = sizes(model, completions, (0.0, middle))[middle]
        low, high = (middle, high) if kl < target else (low, middle)
    return (low * high) ** 0.5


def learn_with(target, run, model, tok, optimizer, prompts, *more):
    """train.learn, with sigma from `target`. The base decides it: a run that is resumed with the
    same target has the same."""
    rows, args = prompts.rows[:PROMPTS], run.args
    if not args.aqn:
        raise ValueError("--no-aqn: there is no noise whose size could be chosen; leave it out")
    with lora.disabled(model):
        largest = found(model, draw(model, tok, rows, args, TOKENS), target)
    print(f"sigma from {largest:.3g}, whose KL is {target:g}, instead of {args.aqn_start:g}")
    aqn.sigma = lambda *a, **kw: sigma(*a, **kw) * largest / args.aqn_start
    learn(run, model, tok, optimizer, prompts, *more)


def main(argv):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--target-kl", type=number(1e-6, 10, float), default=0.05)
    own, argv = parser.parse_known_args(argv)
    train.learn = partial(learn_with, own.target_kl)
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
