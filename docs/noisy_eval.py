"""Does a noisier policy find answers that a clean one does not? Its pass@k says.

eval.py clears AQN's noise; here one draw of it, of a given sigma, stays on. All else is eval.py:

    python docs/noisy_eval.py 0.05 --model tiny --quant none --data arithmetic \
        --temperature 1 --top-p 1 --n 64 --k 1,4,16,64
"""
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import aqn
import eval as evaluation


@contextmanager
def noisy(model):
    aqn.set_noise(model, float(sys.argv[1]))
    yield
    aqn.clear(model)


aqn.clean = noisy

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"noisy_eval.py: error: SIGMA is missing\n\n{__doc__}")
    sys.exit(evaluation.main(sys.argv[2:]))
