"""
Log-probs of tokens through the LM head, without a (B, T, V) tensor: chunk by chunk of tokens, each
finished in both directions before the next.

The update, AWQ's search and the perplexities score tokens here; the sampler has its own kernels.

    python -m pytest tests/test_logprobs.py

Shapes: S tokens, c of them in a chunk, C hidden, V vocabulary.
"""
import torch

from model import HALVES, logits


def score(hidden, weight, targets, temperature, valid_vocab):
    """(log p(target) (c,), entropy (c,), both float32 (float64 in float64), softmax -
    onehot(target) (c, V)) of a chunk's hidden (c, C) and weight (V, C). Ids >= valid_vocab have
    probability 0."""
    if hidden.is_cuda and weight.dtype in HALVES:
        from fast import fused  # the same in one kernel

        return fused.score(logits(hidden, weight), targets, temperature, valid_vocab, weight.dtype)
    x = logits(hidden, weight)
    x[:, valid_vocab:] = -torch.inf  # Qwen's embedding has rows past the tokenizer's last id
    if temperature != 1.0:
        x.div_(temperature)  # tokens were sampled from the tempered distribution
    lp = torch.log_softmax(x, dim=-1)
    t = targets[:, None]
    logp = lp.gather(1, t)[:, 0]
    p = lp.exp_()
    entropy = torch.special.entr(p).sum(1)  # -p log p, and 0 at p = 0
    # -1 is added before rounding to 16 bits: no cancellation after it
    return logp, entropy, p.scatter_add_(1, t, p.new_full(t.shape, -1.0)).to(weight.dtype)


class TokenLogprobs(torch.autograd.Function):
    """log p(target) and entropy, chunk by chunk over the tokens; neither pass holds anything wider
    than a chunk's (c, V).

    The upstream gradient of a token is one number, so d logp / d hidden (S, C) can be finished in
    forward, while the chunk's softmax is at hand: with frozen weights (LoRA) the backward is one
    multiplication and never sees the vocabulary again. The weight's gradient needs the upstream
    numbers first, so it recomputes the chunks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, valid_vocab, chunk, need_hidden,
                need_weight):
        acc = torch.promote_types(hidden.dtype, torch.float32)
        logp = torch.empty(len(hidden), dtype=acc, device=hidden.device)
        entropy = torch.empty_like(logp)
        # (S, C): -temperature * d logp / d hidden
        slope = torch.empty_like(hidden) if need_hidden else None
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            logp[s], entropy[s], p = score(hidden[s], weight, targets[s], temperature, valid_vocab)
            if need_hidden:
                slope[s] = p @ weight  # (c, V) @ (V, C)
            del p  # before the next chunk allocates
        ctx.temperature, ctx.valid_vocab, ctx.chunk = temperature, valid_vocab, chunk
        ctx.save_for_backward(slope, *((hidden, weight, targets) if need_weight else ()))
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        slope, *saved = ctx.saved_tensors
        grad = -grad / ctx.temperature  # (S,)
        grad_hidden = None if slope is None else (slope * grad[:, None]).to(slope.dtype)
        grad_weight = None
        if saved:
            hidden, weight, targets = saved
            # float32: a sum over many chunks in bf16 would stall
            grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
            for i in range(0, len(hidden), ctx.chunk):
                s = slice(i, i + ctx.chunk)
                *_, p = score(hidden[s], weight, targets[s], ctx.temperature, ctx.valid_vocab)
                scaled = (hidden[s] * grad[s, None]).to(p.dtype)
                grad_weight += p.T @ scaled  # (V, c) @ (c, C)
                del p
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def token_logprobs(hidden, weight, targets, temperature=1.0, valid_vocab=None, chunk=None):
    """log p(target) and entropy (nats) of softmax(hidden @ weight.T / temperature): (S,), (S,),
    float32.

    hidden (S, C): final-normed states of the positions that *predict* the targets; weight (V, C):
    the LM head; targets (S,) long in [0, valid_vocab). Ids >= valid_vocab have probability 0. logp
    is differentiable in hidden, and in weight if it requires grad; the entropy is a detached
    metric. `chunk`: tokens at a time; default: at most 0.5 GiB of float32 logits. Gather the
    positions you need before the call: prompt and padding positions cost as much as the others. Any
    S, 0 included.
    """
    if temperature <= 0:
        raise ValueError(f"--temperature {temperature}: must be > 0; greedy decoding has no "
                         "log-prob to train on")
    V = weight.shape[0]
    valid_vocab = V if valid_vocab is None else valid_vocab
    if not 0 < valid_vocab <= V:
        raise ValueError(f"valid_vocab {valid_vocab} is outside 1..{V}, the rows of the LM head")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)}: want "
                         "(S, C) and (S,)")
    chunk = max(1, 2**27 // V) if chunk is None else chunk
    grad = torch.is_grad_enabled()
    return TokenLogprobs.apply(hidden, weight, targets, float(temperature), valid_vocab, chunk,
                               grad and hidden.requires_grad, grad and weight.requires_grad)
