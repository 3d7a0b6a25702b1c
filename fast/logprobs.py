"""
Log-probs of tokens through the LM head, chunk by chunk, each finished in both directions before
the next: model.token_logprobs with one kernel for all that follows the logits, and a backward that
never sees the vocabulary.

The upstream gradient of a token is one number, so d logp / d hidden (S, C) can be finished in
forward, while the chunk's softmax is at hand: the backward is one multiplication.

    pytest tests/test_logprobs.py

Shapes: S tokens, c of them in a chunk, C hidden, V vocabulary.
"""
import torch
import triton
import triton.language as tl
from triton import next_power_of_2 as power

from model import logits


@triton.jit
def score_kernel(logits, targets, logp, entropy, grad, valid, rows, inverse_temperature,
                 BLOCK: tl.constexpr):
    """A row of logits (c, V): log p(target), the entropy, and p - onehot(target), 0 for ids from
    `valid` on. Each lane carries its own maximum m, the sum of exponentials of y - m, and the sum
    of those times y - m; one reduction at the end."""
    r, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = logits + r * rows
    m, total, mean = tl.full((BLOCK,), -1e30, tl.float32), lane * 0.0, lane * 0.0
    for v in range(0, valid, BLOCK):
        y = tl.load(x + v + lane, mask=v + lane < valid, other=-1e30) * inverse_temperature
        new = tl.maximum(m, y)
        fade, e = tl.exp(m - new), tl.exp(y - new)
        mean = fade * (mean + total * (m - new)) + e * (y - new)
        total, m = total * fade + e, new
    peak = tl.max(m, 0)
    weight = tl.exp(m - peak)
    mean = tl.sum(weight * (mean + total * (m - peak)), 0)
    total = tl.sum(weight * total, 0)
    log_total = tl.log(total)  # not added to the peak, which may be large: that would round it
    target = tl.load(targets + r)
    tl.store(logp + r, tl.load(x + target) * inverse_temperature - peak - log_total)
    tl.store(entropy + r, log_total - mean / total)
    for v in range(0, rows, BLOCK):
        ids = v + lane
        y = tl.load(x + ids, mask=ids < valid, other=-float("inf")) * inverse_temperature
        p = tl.exp(y - peak - log_total) - tl.where(ids == target, 1.0, 0.0)
        tl.store(grad + r * rows + ids, p.to(grad.dtype.element_ty), mask=ids < rows)


def score(logits, targets, temperature, valid_vocab, dtype):
    """model.score from logits (c, V) float32, and p - onehot (c, V) in `dtype`."""
    c, V = logits.shape
    logp, entropy = logits.new_empty(c), logits.new_empty(c)
    grad = torch.empty(c, V, dtype=dtype, device=logits.device)
    score_kernel[(c,)](logits, targets, logp, entropy, grad, valid_vocab, V, 1 / temperature,
                       BLOCK=min(4096, power(V)), num_warps=8)
    return logp, entropy, grad


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, valid_vocab, chunk, need_hidden):
        logp = torch.empty(len(hidden), device=hidden.device)
        entropy = torch.empty_like(logp)
        # (S, C): -temperature * d logp / d hidden
        slope = torch.empty_like(hidden) if need_hidden else None
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            logp[s], entropy[s], p = score(logits(hidden[s], weight), targets[s], temperature,
                                           valid_vocab, weight.dtype)
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
        return (slope * grad[:, None]).to(slope.dtype), *[None] * 6


def token_logprobs(hidden, weight, targets, temperature=1.0, valid_vocab=None, chunk=None):
    """As model.token_logprobs, for a weight that is not trained."""
    V = weight.shape[0]
    need = torch.is_grad_enabled() and hidden.requires_grad
    return TokenLogprobs.apply(hidden, weight, targets, float(temperature), valid_vocab or V,
                               chunk or max(1, 2**27 // V), need)
