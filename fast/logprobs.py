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

from fast import fused
from model import logits


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, valid_vocab, chunk, need_hidden):
        logp = torch.empty(len(hidden), device=hidden.device)
        entropy = torch.empty_like(logp)
        # (S, C): -temperature * d logp / d hidden
        slope = torch.empty_like(hidden) if need_hidden else None
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            logp[s], entropy[s], p = fused.score(logits(hidden[s], weight), targets[s], temperature,
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
