"""
How a token is drawn: one uniform number from a hash of (seed, prompt, sample, position), and the
id read off the cumulative distribution.

No random state: what a row draws does not depend on what else is in the batch, nor on the engine.
fast/decode.py draws with the same numbers on the GPU.

    key = row_keys(seed, prompt, sample)
    ids, logprobs = sample_ids(logits, uniform(key, position), temperature=0.6, top_p=0.95)

Shapes: B rows, V vocabulary.
"""
import torch


def signed(x):
    """A 64-bit number as torch's int64 holds it."""
    return (x & (2**64 - 1)) - (2**64 if x >> 63 & 1 else 0)


# splitmix64 (Steele, Lea and Flood 2014): the golden ratio, and its finalizer's multipliers
GOLDEN, MIX1, MIX2 = map(signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(z):
    """splitmix64's finalizer on int64 tensors. torch multiplies modulo 2^64 and shifts
    arithmetically, hence the masks."""
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * MIX1
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * MIX2
    return z ^ (z >> 31 & (1 << 33) - 1)


def row_keys(seed, prompt, sample):
    """int64 key of each row from its prompt and sample index (int64 tensors); `uniform` turns it
    into numbers."""
    key = mix(torch.full_like(prompt, signed(seed)) + GOLDEN)
    return mix(mix(key + prompt * GOLDEN) + sample * GOLDEN)


def uniform(key, position):
    """One number in (0, 1) for each row: 23 bits of the hash, centred, so that float32 holds it
    and it is never 0 or 1."""
    bits = mix(key + (position + 1) * GOLDEN) >> 41 & (1 << 23) - 1
    return (bits.float() + 0.5) * 2.0**-23


def sample_ids(logits, u, temperature=1.0, top_p=1.0):
    """Draw one id a row by inverting the cumulative distribution at u.

    logits (B, V) of valid ids only, u (B,) in (0, 1) -> ids (B,) long, logprobs (B,) float32 under
    the whole tempered distribution. temperature 0 is greedy. top_p keeps the most likely ids up to
    and including the one that crosses top_p."""
    if temperature == 0:
        logp, ids = logits.float().log_softmax(-1), logits.argmax(-1)
    else:
        logp = (logits.float() / temperature).log_softmax(-1)
        p, order = logp.exp(), None
        if top_p < 1:
            p, order = p.sort(dim=-1, descending=True, stable=True)
            before = p.cumsum(-1) - p  # mass of the ids that are likelier
            p = p.masked_fill(before >= top_p, 0)
        cdf = p.cumsum(-1)
        # the first id whose cdf exceeds u * total; an id of probability 0 does not raise the cdf,
        # so it is never drawn
        ids = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
        ids = ids.clamp(max=cdf.shape[1] - 1)
        ids = (ids if order is None else order.gather(1, ids))[:, 0]
    return ids, logp.gather(1, ids[:, None])[:, 0]
