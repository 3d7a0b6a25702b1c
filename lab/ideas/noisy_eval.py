"""Does a noisier policy find answers that a clean one does not? Its pass@k says.

eval.py clears AQN's noise; here one draw of it, of a given sigma, stays on, or with `each` one of
its own for each sample of a question. All else is eval.py:

    python lab/ideas/noisy_eval.py 0.05 --model tiny --quant none --data arithmetic \
        --temperature 1 --top-p 1 --n 64 --k 1,4,16,64
    python lab/ideas/noisy_eval.py 0.05 each --model tiny ...
"""
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aqn
import eval as evaluation
import sample

together = sample.generate


@contextmanager
def noisy(model):
    aqn.set_noise(model, float(sys.argv[1]))
    yield
    aqn.clear(model)


def generate(model, prompts, n, limits, temperature, top_p, eos_ids, seed, *rest, **options):
    each = []
    for j in range(n):  # the j-th sample of each prompt
        own = aqn.noise_seed(seed, j)
        aqn.set_noise(model, float(sys.argv[1]), own)
        each.append(together(model, prompts, 1, limits, temperature, top_p, eos_ids, own, *rest,
                             **options))
    return [sum(group, []) for group in zip(*each, strict=True)]


aqn.clean = noisy

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"noisy_eval.py: error: SIGMA is missing\n\n{__doc__}")
    argv = sys.argv[2:]
    if argv[:1] == ["each"]:
        sample.generate, argv = generate, argv[1:]
    sys.exit(evaluation.main(argv))
