"""
What an update computes at once: grpo.micro_batches and grpo.completion_logprobs for rows that lie
end to end (packed.py).

Completions of one prompt share its states: the prompt is computed once and the completions, each a
row of its own, continue it. With 16 completions of 200 tokens for each prompt of 105 this is 30%
fewer tokens and 22% less time. Here a group is a few completions of one prompt.

Shapes: S tokens, C hidden. Completions are grpo.Completion's: a prompt and ids, lists of token ids.
"""
import math
from itertools import chain

from plumbing import ranks

import torch

import grpo
from fast import engine, packed
from fast.compiling import compiling
from fast.linears import exact
from fast.logprobs import token_logprobs
from model import to_device

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
    own; several together are no more than a rank's share."""
    engine.make_room(model)  # the sampler's cache may have to go
    tokens = sum(size([c]) for c in completions)
    groups = by_prompt(completions, min(token_budget, tokens // ranks.world))
    share = ranks.share(groups, size)[ranks.rank]
    lists = engine.together(sorted(share, key=size), size, token_budget)
    return [[*chain(*groups)] for groups in lists]


def completion_logprobs(model, completions, temperature, blocks=None):
    """As grpo.completion_logprobs. blocks: as in packed.hidden."""
    same_sums = exact(model)
    rows = rows_of(by_prompt(completions), apart=same_sums)
    hidden = packed.hidden(model, *rows, blocks=blocks)  # (S, C)
    targets = to_device([i for c in completions for i in c.ids], hidden.device)  # (S,)
    logp, entropy = token_logprobs(hidden, model.lm_head.weight, targets, temperature,
                                   model.valid_vocab, exact=same_sums)
    return grpo.in_rows(completions, logp, entropy)


def plan_rollouts(model, args, longest):
    """Make the sampler for all rollouts of train.py, with rows of `longest` tokens (evaluating more
    rows makes a larger one); compile its kernels and the update's. Made for the first step's rows,
    it would have to be captured again at the first longer prompt, while all other ranks wait."""
    if not model.fast.knows(model):
        return
    rows = args.group_size * -(-args.prompts_per_step // ranks.world)
    with compiling():  # the sampler's first: they take longer
        engine.engine_for(model, min(rows, args.max_rows), longest,
                          longest - args.max_new_tokens).rehearse()
        engine.make_room(model)
        rehearse_update(model, args.micro_batch_tokens // 2 if exact(model) else 16)


def rehearse_update(model, tokens=16):
    """Call what an update calls, for completions of so many tokens that share a prompt and for one
    alone: within `compiling` this compiles its kernels. With exact sums alone the number matters:
    the GEMM's tile depends on it."""
    params = [p for p in model.parameters() if p.requires_grad]
    completion = grpo.Completion({}, [0] * 16, [0] * tokens, [], True)
    with torch.autograd.set_multithreading_enabled(False):
        for n in (2, 1):
            logp, _, _ = completion_logprobs(model, [completion] * n, 1.0, blocks=1)
            torch.autograd.grad(logp.sum(), params, allow_unused=True)


def rows_of(groups, apart=False):
    """packed.hidden's (rows, take, of): rows of ids; the places, counted over all rows, whose
    states predict the completions' tokens; the row that each row continues, itself if none. A
    group is a row for its prompt and rows that continue it; one completion is one row with its
    prompt, unless it is to be `apart`."""
    rows, take, of = [], [], []
    begin = 0  # place of the next row's first token
    for group in groups:
        prompt, first = group[0].prompt, len(rows)
        if len(group) == 1 and not apart:
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
