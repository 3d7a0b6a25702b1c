"""An idea in a dozen lines: is it the redrawing of the noise that matters, or its presence?

Here every step has the noise of the first one, which only shrinks with sigma. All else is train.py:

    python lab/ideas/fixed_noise.py --out runs/fixed-s0 --seed 0
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aqn
import train

redrawn = aqn.set_noise
aqn.set_noise = lambda model, sigma, seed=0: redrawn(model, sigma, seed=0)

if __name__ == "__main__":
    sys.exit(train.main())
