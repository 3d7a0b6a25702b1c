"""
What an update computes at once: completions of one prompt as a family, families as a micro-batch,
micro-batches as a rank's share.

Where rows lie end to end (packed.py), a family's prompt is computed once and its completions, each
its own row, continue it: with groups of 16, prompts of 105 tokens and completions of 200, 30% fewer
tokens and 22% less time. Elsewhere rows are padded, and each completion is a family.

    pytest tests/test_packed.py -k "share or micro"

Completions are grpo.Completion's: a prompt and ids, lists of token ids.
"""
import math
from itertools import chain

from plumbing import ranks

import torch

from model import HALVES

# completions a family at most: with more, few programs would do most of attention's backward
TOGETHER = 8


def packed(model):
    """The module fast.packed if it can run the model: on a GPU, in 16 bits, with a head size
    that attention.py takes and, for Qwen3, nothing but adapters to train. Else None: use model.py's
    own forward."""
    w, config = model.embed.weight, model.config
    fits = w.is_cuda and w.dtype in HALVES and config.head_dim in (16, 32, 64, 128)
    head_norms_learn = torch.is_grad_enabled() and w.requires_grad and config.qk_norm
    if not fits or head_norms_learn:
        return None
    from fast import packed  # needs Triton, which the CPU does without

    return packed


def size(family):
    """Tokens computed for completions of one prompt: a completion's last token predicts nothing."""
    return len(family[0].prompt) + sum(len(c.ids) - 1 for c in family)


def families(model, completions, token_budget=math.inf):
    """Where rows lie end to end, lists of neighbouring completions of one prompt, at most TOGETHER
    and within the budget; elsewhere, lists of one completion."""
    most, found = TOGETHER if packed(model) else 1, []
    for c in completions:
        f = found[-1] if found else []
        if (f and f[0].prompt == c.prompt and len(f) < most
                and size(f) + len(c.ids) - 1 <= token_budget):
            f.append(c)
        else:
            found.append([c])
    return found


def dealt(model, completions, token_budget):
    """Each rank's families, about as many tokens for each; none is larger than a rank's share."""
    share = sum(size([c]) for c in completions) // ranks.world
    return ranks.share(families(model, completions, min(token_budget, share)), size)


def micro_batches(model, families, token_budget):
    """Yields lists of completions, families kept together and the smallest first, so that what is
    computed for a list stays within the budget: its tokens where rows lie end to end, rows x
    longest where they are padded. A family that exceeds the budget is a list of its own."""
    end_to_end, batch, total = packed(model), [], 0
    for family in sorted(families, key=size):
        total += size(family)
        # if padded, a family is one row, and this one is the longest so far
        needs = total if end_to_end else (len(batch) + 1) * size(family)
        if batch and needs > token_budget:
            yield [*chain(*batch)]
            batch, total = [], size(family)
        batch.append(family)
    if batch:
        yield [*chain(*batch)]


def padding(batch):
    """(places computed for completions whose rows are padded, how many of them are padding)."""
    lengths = [size([c]) for c in batch]
    places = len(lengths) * max(lengths)
    return places, places - sum(lengths)


def rows_end_to_end(families):
    """packed.hidden's (rows, take, of): rows of ids; the places, counted over all rows, whose
    states predict the completions' tokens; the row that each row continues, itself if none. A
    family is a row for its prompt and rows that continue it, or one row with both."""
    rows, take, of, begin = [], [], [], 0
    for family in families:
        prompt, first = family[0].prompt, len(rows)
        if len(family) == 1:
            rows.append(prompt + family[0].ids[:-1])
        else:  # a completion of one token is predicted by the prompt: it needs no row
            rows += [prompt, *(c.ids[:-1] for c in family if len(c.ids) > 1)]
        of += [first] * (len(rows) - first)
        last = begin + len(prompt) - 1  # the prompt's, which predicts every first token
        begin += len(prompt)
        for c in family:
            take += [last, *range(begin, begin + len(c.ids) - 1)]
            begin += len(c.ids) - 1
    return rows, take, of
