"""
Log-probs through the LM head: model.token_logprobs for tokens that lie end to end.

They go through it chunk by chunk, each finished in both directions before the next: two kernels
for all that follows the logits, and a backward that never sees the vocabulary. For the upstream
gradient of a token is one number, so d logp / d hidden (S, C) can be computed in forward, while the
chunk's softmax is at hand; the backward is one multiplication.

Shapes: S tokens, c of them in a chunk, C hidden, V vocabulary.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton import next_power_of_2 as power

from model import logits

ROWS = 256  # that the LM head multiplies at once with --engine exact


@triton.jit
def score_kernel(logits, targets, logp, entropy, norm, valid, rows, inverse_temperature,
                 BLOCK: tl.constexpr):
    """A row of logits (c, V): log p(target), the entropy, and what the softmax takes off, as two
    numbers of norm (c, 2): their sum would round the smaller. Each lane carries its own maximum m,
    the sum of exponentials of y - m, and the sum of those times y - m; one reduction at the end."""
    r, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x, inverse = logits + r * rows, tl.load(inverse_temperature)
    m, total, mean = tl.full((BLOCK,), -1e30, tl.float32), lane * 0.0, lane * 0.0
    for v in range(0, valid, BLOCK):
        y = tl.load(x + v + lane, mask=v + lane < valid, other=-1e30) * inverse
        new = tl.maximum(m, y)
        fade, e = tl.exp(m - new), tl.exp(y - new)
        mean = fade * (mean + total * (m - new)) + e * (y - new)
        total, m = total * fade + e, new
    peak = tl.max(m, 0)
    weight = tl.exp(m - peak)
    mean = tl.sum(weight * (mean + total * (m - peak)), 0)
    total = tl.sum(weight * total, 0)
    log_total = tl.log(total)
    target = tl.load(targets + r)
    tl.store(logp + r, tl.load(x + target) * inverse - peak - log_total)
    tl.store(entropy + r, log_total - mean / total)
    tl.store(norm + 2 * r, peak)
    tl.store(norm + 2 * r + 1, log_total)


@triton.jit
def slope_kernel(logits, targets, norm, slope, valid, rows, inverse_temperature,
                 BLOCK: tl.constexpr):
    """Of a row of logits (c, V): p - onehot(target), 0 for ids from `valid` on."""
    r, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(logits + r * rows + ids, mask=ids < valid, other=-float("inf"))
    y *= tl.load(inverse_temperature)
    p = tl.exp(y - tl.load(norm + 2 * r) - tl.load(norm + 2 * r + 1))
    p -= tl.where(ids == tl.load(targets + r), 1.0, 0.0)
    tl.store(slope + r * rows + ids, p.to(slope.dtype.element_ty), mask=ids < rows)


def score(logits, targets, inverse_temperature, valid_vocab, dtype=None):
    """model.score from logits (c, V) float32 and 1 / temperature (1,); if a dtype is given, also
    p - onehot (c, V) in it, else None."""
    c, V = logits.shape
    logp, entropy, norm = logits.new_empty(c), logits.new_empty(c), logits.new_empty(c, 2)
    BLOCK, slope = min(4096, power(V)), None
    shape, options = (valid_vocab, V, inverse_temperature), {"BLOCK": BLOCK, "num_warps": 8}
    score_kernel[(c,)](logits, targets, logp, entropy, norm, *shape, **options)
    if dtype:
        slope = logits.new_empty(c, V, dtype=dtype)
        slope_kernel[c, triton.cdiv(V, BLOCK)](logits, targets, norm, slope, *shape, **options)
    return logp, entropy, slope


def head(hidden, weight, exact):
    """model.logits. exact: of ROWS rows at a time, those that are missing being 0, since the order
    of cuBLAS's sums depends on how many there are."""
    if not exact:
        return logits(hidden, weight)
    parts = [logits(F.pad(h, (0, 0, 0, ROWS - len(h))), weight) for h in hidden.split(ROWS)]
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[: len(hidden)]


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, valid_vocab, chunk, exact, need_hidden):
        logp = torch.empty(len(hidden), device=hidden.device)
        entropy = torch.empty_like(logp)
        # (S, C): -temperature * d logp / d hidden
        slope = torch.empty_like(hidden) if need_hidden else None
        inverse = torch.full((1,), 1 / temperature, device=hidden.device)
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            logp[s], entropy[s], p = score(head(hidden[s], weight, exact), targets[s], inverse,
                                           valid_vocab, weight.dtype if need_hidden else None)
            if need_hidden:
                slope[s] = p @ weight  # (c, V) @ (V, C)
            del p  # before the next chunk allocates
        ctx.temperature = temperature
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        [slope] = ctx.saved_tensors
        grad = -grad / ctx.temperature  # (S,)
        return (slope * grad[:, None]).to(slope.dtype), *[None] * 7


def token_logprobs(hidden, weight, targets, temperature=1.0, valid_vocab=None, chunk=None,
                   exact=False):
    """As model.token_logprobs, for a weight that is not trained; exact: as in `head`."""
    V = weight.shape[0]
    chunk = ROWS if exact else chunk or max(1, 2**26 // V // 128) * 128  # targets stay aligned
    need = torch.is_grad_enabled() and hidden.requires_grad
    return TokenLogprobs.apply(hidden, weight, targets, temperature, valid_vocab or V, chunk,
                               exact, need)
