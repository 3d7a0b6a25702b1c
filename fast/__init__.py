"""
The same functions, faster: kernels, CUDA graphs and memory planning for NVIDIA GPUs. Nothing here
changes what is computed; a reader of the method can leave it closed, and train without it.

`install(model)` is the only door. TABLE says what it replaces, by what, why that is faster, and
which test holds the two equal in Triton's interpreter (pytest -m gpu has others for the card). A
model that the kernels do not know (a forward, a hook or a noise buffer of your own) goes back to
the plain functions, with one printed line.

    fast.install(model)                  # model.fast is None before it, and on the plain path
    python train.py --engine plain       # the same run without this folder
    python train.py --engine exact       # log-probs of sampler and trainer equal to the last bit
"""
import sys

import torch

import nvfp4
from model import projections

TABLE = (  # what is replaced, by what, why that is faster, the test that holds the two equal
    ("sample.decode", "scheduler.decode",
     "one CUDA graph of fused kernels a step; slots are refilled as rows end; the host "
     "works a few steps behind",
     "test_scheduler.py::test_generate_equals_the_plain_function"),
    ("grpo.completion_logprobs", "batches.completion_logprobs",
     "no padding; a prompt computed once for its completions; LoRA inside the GEMM; all "
     "between two GEMMs in one kernel",
     "test_packed.py::test_completion_logprobs_equal_the_plain_ones"),
    ("grpo.micro_batches", "batches.micro_batches",
     "counts tokens, not padded rows; keeps a prompt's completions together",
     "test_packed.py::test_completions_of_a_prompt_share_its_states"),
    ("model.token_logprobs", "logprobs.token_logprobs",
     "softmax, entropy and gradient of a chunk in two kernels",
     "test_logprobs.py::test_the_kernel_equals_the_plain_function"),
    ("nvfp4.QuantLinear", "gemm.TiledLinear",
     "codes lie as the tensor core wants them; inline PTX decodes them in registers",
     "test_gemm.py::test_kernel_matches_the_float64_product"),
)


def install(model, exact=False):
    """Put the fast functions on a model, in place; returns why not, or None if they are there.
    Four-bit codes are rearranged layer by layer, so that there is never a second copy of them
    all. exact: sampler and trainer take each sum in the same order, and agree to the last bit."""
    why = refusal(model) or (inexact(model) if exact else None)
    if why is None:
        if model.fast:
            uninstall(model)
        tile(model)
        model.fast = Fast(exact)
    return why


def refusal(model):
    """Why the kernels cannot run a model, or None."""
    w, config = model.embed.weight, model.config
    if not w.is_cuda:
        return "the model is not on a CUDA device"
    if torch.cuda.get_device_capability(w.device) < (8, 0):
        return "the kernels need an Ampere card (sm_80) or later"
    if w.dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, and the model is in {w.dtype}"
    if config.head_dim not in (32, 64, 128):
        return f"the kernels take heads of 32, 64 or 128 numbers, not {config.head_dim}"
    try:
        from fast import engine, layout
    except ModuleNotFoundError as e:
        return f"{e.name} is not installed"
    for path, m in projections(model):
        if (q := m.base.q) is None:
            continue
        if q.shape[0] % 8 or q.shape[1] % layout.CHUNK:
            return f"{path} is {q.shape[0]} x {q.shape[1]}, no multiple of 8 x {layout.CHUNK}"
        # an E4M3 byte over 126 is negative or no number, an E8M0 byte the exponent plus 127; of a
        # weight that is laid out already, they have been looked at
        most = {"nvfp4": 126, "mxfp4": 154}.get(q.fmt) if type(q) is nvfp4.Quantized else None
        if most and (nvfp4.scale_bits(q.scale) > most).any():
            return f"{path} has a block scale that the kernels do not carry: over 2^27, or negative"
    return engine.own_code(model)


def inexact(model):
    """Why sampler and trainer cannot agree to the last bit, or None."""
    if any(m.base.q is None for _, m in projections(model)):
        return "cuBLAS multiplies 16-bit weights, in an order that depends on the number of rows"
    if model.config.qk_norm:
        return "the sampler and the trainer sum the norms of Qwen3's heads in different orders"
    if torch.cuda.get_device_capability(model.embed.weight.device)[0] != 9:
        return "the kernels' sums have been compared on Hopper cards alone"
    return None


def tile(model):
    """Lay out the four-bit codes of every projection for the tensor core, in place: what is
    attached to a linear stays."""
    from fast import layout
    from fast.gemm import TiledLinear

    for _, m in projections(model):
        if type(m.base) is nvfp4.QuantLinear:
            t = layout.tile(m.base.q)
            m.base.codes, m.base.scale, m.base.__class__ = t.codes, t.scale, TiledLinear


def uninstall(model):
    """Put the plain functions back; free the sampling engine and the copies of the adapter."""
    from fast import engine, layout, linears
    from fast.gemm import TiledLinear

    engine.release(model)
    linears.LINEARS.pop(model, None)
    model.fast = None
    for _, m in projections(model):
        if type(m.base) is TiledLinear:
            q = layout.untile(m.base.q)
            m.base.codes, m.base.scale, m.base.__class__ = q.codes, q.scale, nvfp4.QuantLinear


class Fast:
    """model.fast: the functions of TABLE that the plain ones hand over to."""

    def __init__(self, exact=False):
        from fast import batches, engine, scheduler  # they need Triton

        self.exact = exact
        self.decode = scheduler.decode
        self.micro_batches = batches.micro_batches
        self.completion_logprobs = batches.completion_logprobs
        self.plan_update = engine.plan_update
        self.plan_rollouts = batches.plan_rollouts

    def knows(self, model):
        """Whether the kernels still know the model; else it goes back to the plain functions.
        ValueError if sums were to be exact, which the plain ones' are not."""
        from fast import engine

        why = engine.own_code(model)
        if why and self.exact:
            raise ValueError(f"--engine exact: {why}; take --engine auto or plain")
        if why:
            uninstall(model)
            model.checkpointing = True  # the plain functions keep more than was planned for
            print(f"engine: plain from here on, since {why}", file=sys.stderr)
        return why is None
