"""
Adaptive Quantization Noise (QeRL, Sec. 3.3): scheduled Gaussian noise folded into the RMSNorm
weights, so that a policy whose quantization error is static explores more at first, less later.

Why a norm: y = x / rms(x) * (w + Z) feeds W as y W^T. Channel k of y is multiplied by (w + Z)[k] /
w[k] = 1 + Z[k] / w[k], which is the same as multiplying input channel k of W by it (a row of W^T,
hence "row-wise" in the paper). So adding Z (C,) to a norm is multiplicative noise on the quantized
weights behind it, without a new GEMM and without touching a 4-bit weight. q,k,v share the Z of
input_layernorm and gate,up that of post_attention_layernorm; o, down and the LM head get none.

The noise has its own buffer (`norm.noise`) and is never added to the weight: redrawing replaces it,
sigma 0 restores the clean model bit for bit, and weights cannot drift. It is written in place, so
CUDA graphs that captured the buffers see it.

    sigma = aqn.sigma(step, total_steps, 1e-2, 5e-4)
    aqn.set_noise(model, sigma, aqn.noise_seed(seed, step))    # once a step, before its rollouts
    aqn.clear(model)                                           # Algorithm 1: the update is clean

To try your own noise, replace set_noise with a function that writes to the buffers, as
lab/ideas/relative_noise.py does. Draw it from a generator seeded by `seed`: then a run repeats, a
resumed one as well, and all ranks have the same noise. Every RMSNorm has a buffer; one called
`noise` in any other module will do. `clear` and `clean` reach them all, so that none leaks into an
evaluation, or, unless --aqn-scope is both, into an update.

    python aqn.py --aqn-start 1e-2 --aqn-end 5e-4      # print the schedule

Left out: noise on the activations of o and down (no norm precedes them), and redrawing within a
rollout.
"""
import argparse
import contextlib
import hashlib
import math
import sys

from plumbing import command, flags
from plumbing.command import number
from plumbing.flags import Flag

import torch


def exponential(start, end, x, n):
    """AQN, Eq. 8, in a form that hits both ends to the last bit."""
    return start ** (1 - x) * end**x


def between(start, end, f):
    return start * (1 - f) + end * f


STAGES = 10  # equal intervals of training, each with its sigma

SCHEDULES = {  # (start, end, x, n) -> sigma of noisy stage i = 0 to n, x = i / n
    "exponential": exponential,
    "linear": lambda start, end, x, n: between(start, end, x),
    "cosine": lambda start, end, x, n: between(start, end, (1 - math.cos(math.pi * x)) / 2),
    "logarithmic": lambda start, end, x, n: between(start, end, math.log1p(n * x) / math.log1p(n)),
    "eq8": exponential,  # Eq. 8 as printed: `sigma` gives its first stage noise, too
}

FLAGS = (  # of train.py, too
    Flag("aqn-start", number(1e-9, 10, float), 1e-2, "sigma of the first noisy stage"),
    Flag("aqn-end", number(1e-9, 10, float), 5e-4, "sigma of the last stage"),
    Flag("aqn-schedule", SCHEDULES, "exponential", "how sigma falls from stage to stage"),
)
COMMAND = flags.Command("aqn", "Print the noise schedule: sigma from stage to stage.", (
    *FLAGS, Flag("steps", number(1, 1e7), 200, "rollouts of a training run")))


def sigma(step, total_steps, start, end, stages=None, schedule="exponential"):
    """Standard deviation of the noise at step `step` (a rollout, with all its updates) of
    `total_steps`: a pure function, so a resume cannot restart it.

    Training is cut into `stages` equal intervals (default: STAGES). The first has no added noise
    (quantization noise alone explores), except in "eq8"; the others go from start to end, by a row
    of SCHEDULES. If only one stage is noisy, its level is end. Steps past the end keep the last."""
    stages = stages or STAGES
    stage = min(step * stages // total_steps, stages - 1)
    first = 0 if schedule == "eq8" else 1  # stage with noise
    if stage < first:
        return 0.0
    i, n = stage - first, stages - 1 - first  # the stage among the noisy ones, 0 to n
    return SCHEDULES[schedule](start, end, i / n, n) if n else end


def norms(model):
    """[(input_layernorm, post_attention_layernorm)] of every layer: all that get noise. Found by
    name: with a test of types that matches nothing, a run would silently train without noise."""
    return [(block.input_layernorm, block.post_attention_layernorm) for block in model.layers]


def noise_seed(*key):
    """A 63-bit seed from integers or strings: of (run seed, step), so that noise is redrawn each
    step and is the same again after a resume. A hash, because seed + step would give run 0 at step
    1 the noise of run 1 at step 0."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def buffers(model):
    """All noise buffers, in whatever module, those of your own code included."""
    return [b for name, b in model.named_buffers() if name.rpartition(".")[2] == "noise"]


@torch.no_grad()
def clear(model):
    """Zero every noise buffer: the clean model, bit for bit."""
    for b in buffers(model):
        b.zero_()


@torch.no_grad()
def set_noise(model, sigma, seed=0):
    """Draw Z ~ N(0, sigma^2) for each norm of `norms(model)`, float32, from a CPU generator seeded
    by (seed, layer, norm): the same on all devices. Zero every other noise buffer."""
    clear(model)
    for layer, pair in enumerate(norms(model) if sigma else ()):
        for which, norm in enumerate(pair):
            gen = torch.Generator().manual_seed(noise_seed(seed, layer, which))
            norm.noise.copy_(sigma * torch.randn(norm.noise.shape, generator=gen))


@contextlib.contextmanager
@torch.no_grad()
def clean(model):
    """No noise inside the `with` block, and the same noise as before after it, even if the block
    raises."""
    saved = [(b, b.clone()) for b in buffers(model)]
    try:
        clear(model)
        yield
    finally:
        for b, noise in saved:
            b.copy_(noise)


def main(argv=None):
    a = argparse.Namespace(**flags.defaults(COMMAND, "") | flags.given(COMMAND, argv))
    before = None
    for step in range(a.steps):
        level = sigma(step, a.steps, a.aqn_start, a.aqn_end, schedule=a.aqn_schedule)
        if level != before:
            print(f"from step {step:5d} on: sigma {level:.3e}")
        before = level


if __name__ == "__main__":
    sys.exit(command.run("aqn.py", main))
