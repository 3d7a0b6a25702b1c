"""Another idea: noise in proportion to the norm's weight: the same share of each channel.

AQN's sigma is absolute, and norms are not alike: see docs/noise.md. All else is train.py:

    python lab/ideas/relative_noise.py --out runs/relative-s0 --aqn-start 5e-2
"""
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aqn
import train

absolute = aqn.set_noise


def set_noise(model, sigma, seed=0):
    absolute(model, sigma, seed)
    for norm in chain(*aqn.norms(model)):
        norm.noise.mul_(norm.weight.detach().abs())


aqn.set_noise = set_noise

if __name__ == "__main__":
    sys.exit(train.main())
