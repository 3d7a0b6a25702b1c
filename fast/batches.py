"""
What an update computes at once, and how: grpo.micro_batches, grpo.completion_logprobs and
model.token_logprobs for rows that lie end to end (packed.py).

Completions of one prompt share its states: the prompt is computed once and the completions, each a
row of its own, continue it. With 16 completions of 200 tokens for each prompt of 105 this is 30%
fewer tokens and 22% less time. Here a group is a few completions of one prompt.

Log-probs go through the LM head chunk by chunk, each finished in both directions before the next:
one kernel for all that follows the logits, and a backward that never sees the vocabulary. For the
upstream gradient of a token is one number, so d logp / d hidden (S, C) can be computed in forward,
while the chunk's softmax is at hand; the backward is one multiplication.

    TRITON_INTERPRET=1 pytest tests/test_packed.py tests/test_logprobs.py

Shapes: S tokens, c of them in a chunk, C hidden, V vocabulary. Completions are grpo.Completion's: a
prompt and ids, lists of token ids.
"""
import math

from plumbing import ranks

import torch
import triton
import triton.language as tl
from triton import next_power_of_2 as power

import grpo
from fast import decode, engine, packed
from model import logits, to_device

# completions of a group at most: with more, few programs would do most of attention's backward
TOGETHER = 8


def size(group):
    """Tokens computed for completions of one prompt: a completion's last token predicts nothing."""
    return len(group[0].prompt) + sum(len(c.ids) - 1 for c in group)


def by_prompt(completions, token_budget=math.inf):
    """Groups of neighbouring completions of one prompt, at most TOGETHER and within the budget."""
    groups = []
    for c in completions:
        last = groups[-1] if groups else []
        if (last and last[0].prompt == c.prompt and len(last) < TOGETHER
                and size(last) + len(c.ids) - 1 <= token_budget):
            last.append(c)
        else:
            groups.append([c])
    return groups


def micro_batches(model, completions, token_budget):
    """As grpo.micro_batches, completions of a prompt kept together: this rank's share, in lists of
    at most token_budget tokens, the smallest groups first. A group that exceeds it is a list of its
    own; none is larger than a rank's share."""
    engine.make_room(model)  # the sampler's cache may have to go
    tokens = sum(size([c]) for c in completions)
    groups = by_prompt(completions, min(token_budget, tokens // ranks.world))
    share = ranks.share(groups, size)[ranks.rank]
    lists, total = [], 0  # total: of the last list
    for group in sorted(share, key=size):
        if not lists or total + size(group) > token_budget:
            lists.append([])
            total = 0
        lists[-1] += group
        total += size(group)
    return lists


def completion_logprobs(model, completions, temperature):
    """As grpo.completion_logprobs."""
    rows = rows_end_to_end(by_prompt(completions))
    hidden = packed.hidden(model, *rows)  # (S, C)
    targets = to_device([i for c in completions for i in c.ids], hidden.device)  # (S,)
    logp, entropy = token_logprobs(hidden, model.lm_head.weight, targets, temperature,
                                   model.valid_vocab)
    return grpo.in_rows(completions, logp, entropy)


def compile_update(model):
    """Compile what an update launches, for completions that share a prompt and for one alone."""
    params = [p for p in model.parameters() if p.requires_grad]
    completion = grpo.Completion({}, [0] * 16, [0] * 16, [], True)
    # in this thread, where `compiling` sees the backward's kernels too
    with decode.compiling(), torch.autograd.set_multithreading_enabled(False):
        for n in (2, 1):
            logp, _, _ = completion_logprobs(model, [completion] * n, 1.0)
            torch.autograd.grad(logp.sum(), params, allow_unused=True)


def rows_end_to_end(groups):
    """packed.hidden's (rows, take, of): rows of ids; the places, counted over all rows, whose
    states predict the completions' tokens; the row that each row continues, itself if none. A
    group is a row for its prompt and rows that continue it, or one row with both."""
    rows, take, of = [], [], []
    begin = 0  # place of the next row's first token
    for group in groups:
        prompt, first = group[0].prompt, len(rows)
        if len(group) == 1:
            rows.append(prompt + group[0].ids[:-1])
        else:  # a completion of one token is predicted by the prompt: it needs no row
            rows += [prompt, *(c.ids[:-1] for c in group if len(c.ids) > 1)]
        of += [first] * (len(rows) - first)
        begin += len(prompt)
        last = begin - 1  # the prompt's, which predicts every first token
        for c in group:
            take.append(last)
            take += range(begin, begin + len(c.ids) - 1)
            begin += len(c.ids) - 1
    return rows, take, of


# ---- log-probs through the LM head


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
                               chunk or max(1, 2**26 // V), need)
