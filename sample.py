"""
Sampling: prompts in, completions with the log-prob of each token out.

`generate` is what training, evaluation and the command line call. A prompt is prefilled once and its keys and values are
copied to the rows of its group; then all rows decode together, one token a step. A row lives in a slot: when it finishes, a
waiting row takes the slot, and when none waits, the last row moves into the hole and the batch shrinks.

The token that a row draws depends on (seed, prompt index, sample index, position) and on its logits, never on who else was in
the batch: one uniform number comes from an integer hash of the four, and the token is read off the cumulative distribution.

Left out: beam search, repetition penalties, stop strings, speculative decoding.

    python sample.py --model Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 12 * 7?"
    python sample.py --model Qwen/Qwen2.5-0.5B-Instruct --file prompts.txt --out out.jsonl --n 4

Shapes: B rows, S slots, T tokens, C hidden, V vocabulary, L layers, Hkv kv heads, D head size.
"""
import copy
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from model import KVCache

PREFILL_TOKENS = 8192  # tokens a prefill call may hold, padding included; longer prompts go through in chunks
EAGER_ROWS = 256  # rows that decode together in the eager engine, if the caller does not say


@dataclass
class Sample:
    """One completion. ids: tokens, the EOS included if it was drawn. logprobs: of each, under softmax(logits / temperature) over
    the whole tokenizer vocabulary (also when top_p < 1 cut the tail before drawing; at temperature 0, under softmax(logits)).
    finished: ended with EOS, not at the length limit."""

    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finished: bool = False


# ----------------------------------------------------------------------------- drawing tokens


def signed(x):
    return (x & (2**64 - 1)) - (2**64 if x >> 63 & 1 else 0)


GOLDEN, MIX1, MIX2 = signed(0x9E3779B97F4A7C15), signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mix(z):
    """splitmix64's finalizer on int64 tensors. torch multiplies modulo 2^64 and shifts arithmetically, hence the masks."""
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * MIX1
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * MIX2
    return z ^ (z >> 31 & (1 << 33) - 1)


def row_keys(seed, prompt, sample):
    """int64 key of each row from its prompt and sample index (int64 tensors); `uniform` turns it into numbers."""
    key = mix(torch.full_like(prompt, signed(seed)) + GOLDEN)
    return mix(mix(key + prompt * GOLDEN) + sample * GOLDEN)


def uniform(key, position):
    """One number in (0, 1) for each row: 23 bits of the hash, centred, so that float32 holds it and it is never 0 or 1."""
    bits = mix(key + (position + 1) * GOLDEN) >> 41 & (1 << 23) - 1
    return (bits.float() + 0.5) * 2.0**-23


def sample_ids(logits, u, temperature=1.0, top_p=1.0):
    """Draw one id a row by inverting the cumulative distribution at u.

    logits (B, V) of valid ids only, u (B,) in (0, 1) -> ids (B,) long, logprobs (B,) float32 of the whole tempered
    distribution. temperature 0 is greedy. top_p keeps the most likely ids up to and including the one that crosses top_p."""
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
        # first id whose cdf exceeds u * total: an id of probability 0 does not raise the cdf and is never it
        ids = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).clamp(max=cdf.shape[1] - 1)
        ids = (ids if order is None else order.gather(1, ids))[:, 0]
    return ids, logp.gather(1, ids[:, None])[:, 0]


# ----------------------------------------------------------------------------- one decode step, eagerly


class Eager:
    """The reference engine, and the CPU's: model.hidden on a KVCache of `slots` rows, one step at a time."""

    def __init__(self, model, slots, max_len, temperature, top_p):
        self.model, self.temperature, self.top_p = model, temperature, top_p
        self.cache = KVCache(model, slots, max_len)
        device = self.cache.length.device
        self.token = torch.zeros(slots, dtype=torch.long, device=device)  # the last token of each row, not yet in the cache
        self.key = torch.zeros(slots, dtype=torch.long, device=device)
        self.longest = [0] * slots  # cache.length on the host

    def start(self, slots, tokens, lengths, keys):
        """Rows that begin: the cache holds `lengths` tokens of each slot, and `tokens` come next."""
        at = torch.tensor(slots, device=self.token.device)
        self.token[at] = torch.tensor(tokens, device=at.device)
        self.cache.length[at] = torch.tensor(lengths, device=at.device)
        self.key[at] = keys.to(at.device)
        for s, t in zip(slots, lengths, strict=True):
            self.longest[s] = t

    def copy_row(self, source, target, length):
        """The first `length` cached tokens of slot `source` to slot `target`."""
        for t in (self.cache.k, self.cache.v):
            t[:, target, :, :length] = t[:, source, :, :length]

    def move(self, source, target):
        """The row in slot `source`, whole, to slot `target`."""
        self.copy_row(source, target, self.longest[source])
        for t in (self.token, self.key, self.cache.length):
            t[target] = t[source]
        self.longest[target] = self.longest[source]

    def run(self, rows):
        """Decode the first `rows` slots; returns tokens and log-probs as lists [step][row]."""
        view = copy.copy(self.cache)
        view.k, view.v, view.length = self.cache.k[:, :rows], self.cache.v[:, :rows], self.cache.length[:rows]
        view.used = max(self.longest[:rows])
        x = self.model.hidden(self.token[:rows, None], view)[:, 0]  # (B, C)
        logits = self.model.lm_head(x)[:, : self.model.valid_vocab]  # (B, V)
        view.length += 1  # in place: the slots' own lengths
        u = uniform(self.key[:rows], view.length)
        ids, logprobs = sample_ids(logits, u, self.temperature, self.top_p)
        self.token[:rows] = ids
        for s in range(rows):
            self.longest[s] += 1
        return [ids.tolist()], [logprobs.tolist()]


def prefill(model, engine, prompts, slots):
    """Fill the cache of slots[i] with all of prompts[i] but its last token, which the first decode step reads.

    Prompts run together, padded on the right, at most PREFILL_TOKENS at a time; one that is longer goes in chunks."""
    todo = sorted(((p[:-1], s) for p, s in zip(prompts, slots, strict=True) if len(p) > 1), key=lambda t: -len(t[0]))
    while todo:
        longest = len(todo[0][0])
        batch, todo = todo[: max(1, PREFILL_TOKENS // longest)], todo[max(1, PREFILL_TOKENS // longest) :]
        cache = KVCache(model, len(batch), longest)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for i, (p, _) in enumerate(batch):
            ids[i, : len(p)] = torch.tensor(p)
        ids = ids.to(cache.k.device)
        for part in ids.split(PREFILL_TOKENS, dim=1):
            model.hidden(part, cache)
            cache.length += part.shape[1]
        for i, (p, s) in enumerate(batch):
            engine.cache.k[:, s, :, : len(p)] = cache.k[:, i, :, : len(p)]
            engine.cache.v[:, s, :, : len(p)] = cache.v[:, i, :, : len(p)]


# ----------------------------------------------------------------------------- generate


@torch.no_grad()
def generate(model, prompts, n=1, max_new_tokens=256, temperature=1.0, top_p=1.0, eos_ids=(), seed=0, max_rows=None,
             progress=False, on_token=None):
    """n completions of each prompt (lists of ids); returns, per prompt and in order, a list of n Samples.

    max_new_tokens: an int, or one per prompt. temperature 0: greedy. max_rows: rows that decode together (default: what fits).
    progress: a live line (rows done, tokens/s). on_token(prompt, sample, id): called as tokens arrive, for streaming.
    ValueError names the flag when an argument is out of range or a prompt does not fit the model."""
    limits = list(max_new_tokens) if isinstance(max_new_tokens, (list, tuple)) else [max_new_tokens] * len(prompts)
    check_arguments(model, prompts, n, limits, temperature, top_p, max_rows)
    out = [[Sample() for _ in range(n)] for _ in prompts]
    if not prompts:
        return out
    device = model.embed.weight.device
    eos = set(eos_ids)
    waiting = deque((p, j) for p in range(len(prompts)) for j in range(n))
    index = torch.tensor(list(waiting))
    keys = row_keys(seed, index[:, 0], index[:, 1]).view(len(prompts), n).to(device)
    slots = min(len(waiting), max_rows or EAGER_ROWS)
    engine = Eager(model, slots, max(len(p) + m for p, m in zip(prompts, limits, strict=True)), temperature, top_p)
    live, held = [], [None] * slots  # live[s]: the (prompt, sample) in slot s; held[s]: the prompt whose cache lies there
    bar = tqdm(total=len(waiting), unit="row", desc="sample", leave=False, disable=not progress)
    begin, tokens = time.perf_counter(), 0
    free = list(range(slots))
    while True:
        # waiting rows take the free slots, lowest first; what is left free is closed by moving the last rows down
        starts = []
        while waiting and free:
            s = free.pop(0)
            live[s : s + 1] = [waiting.popleft()]
            starts.append(s)
        for s in reversed(free):
            last = live.pop()
            if s < len(live):
                engine.move(len(live), s)
                live[s], held[s] = last, held[len(live)]
        if not live:
            break
        if starts:
            fill(model, engine, prompts, starts, live, held)
            rows = [live[s] for s in starts]
            engine.start(starts, [prompts[p][-1] for p, _ in rows], [len(prompts[p]) - 1 for p, _ in rows],
                         torch.stack([keys[p, j] for p, j in rows]))
        new_ids, new_logprobs = engine.run(len(live))
        free = []
        for s, (p, j) in enumerate(live):
            sample = out[p][j]
            for ids, logprobs in zip(new_ids, new_logprobs, strict=True):
                sample.ids.append(ids[s])
                sample.logprobs.append(logprobs[s])
                tokens += 1
                if on_token:
                    on_token(p, j, ids[s])
                sample.finished = ids[s] in eos
                if sample.finished or len(sample.ids) == limits[p]:
                    free.append(s)
                    break
        bar.update(len(free))
        if progress:
            bar.set_postfix_str(f"{len(live) - len(free)} live, {tokens / (time.perf_counter() - begin):.0f} tokens/s")
    bar.close()
    return out


def fill(model, engine, prompts, starts, live, held):
    """Bring the prompt of each starting row into its slot: it may lie there already, or in the slot of another row of its
    group, else it is prefilled. While a prompt has rows waiting, some slot always holds it, since freed slots go to them."""
    fresh = {}  # prompt -> the slot it is prefilled into
    where = {p: s for s, p in enumerate(held) if p is not None}
    copies = []
    for s in starts:
        p = live[s][0]
        if held[s] == p:
            continue
        if p not in where:
            where[p] = fresh[p] = s
        elif where[p] != s:
            copies.append((p, s))
    # a slot that still holds another group's prompt may be its only copy: read those before they are overwritten
    for p, s in copies:
        if p not in fresh:
            engine.copy_row(where[p], s, len(prompts[p]) - 1)
    prefill(model, engine, [prompts[p] for p in fresh], list(fresh.values()))
    for p, s in copies:
        if p in fresh:
            engine.copy_row(fresh[p], s, len(prompts[p]) - 1)
    for s in starts:
        held[s] = live[s][0]


def check_arguments(model, prompts, n, limits, temperature, top_p, max_rows):
    if n < 1:
        raise ValueError(f"--n {n}: must be at least 1")
    if any(m < 1 for m in limits) or len(limits) != len(prompts):
        raise ValueError(f"--max-new-tokens {min(limits, default=0)}: must be at least 1, one number or one per prompt")
    if not temperature >= 0:
        raise ValueError(f"--temperature {temperature}: must be 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p}: must be above 0 and at most 1")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"--max-rows {max_rows}: must be at least 1")
    room = model.config.max_position_embeddings
    for i, (p, m) in enumerate(zip(prompts, limits, strict=True)):
        if not p:
            raise ValueError(f"prompt {i} is empty: a prompt has at least one token")
        if len(p) + m > room:
            raise ValueError(f"prompt {i} has {len(p)} tokens, with --max-new-tokens {m} it passes the model's {room} positions")
        if min(p) < 0 or max(p) >= model.config.vocab_size:
            raise ValueError(f"prompt {i} holds the id {max(p)}, the model has {model.config.vocab_size}: wrong tokenizer?")
