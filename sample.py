"""
Sampling: prompts in, completions with the log-prob of each token out.

`generate` is what training, evaluation and the chat call. A prompt is prefilled once and
its keys and values are copied to the rows of its group; then all rows decode together, one token a
step, and leave when they have ended. On a GPU a step is one CUDA graph: a few hundred kernels that
the host could not launch as fast as they run.

What a row draws depends on (seed, prompt index, sample index, position) and its logits, never on
what else is in the batch: no random state, one uniform number from a hash, and the id read off the
cumulative distribution.

Left out: beam search, repetition penalties, stop strings, speculative decoding; and (except in
fast/scheduler.py) refilling the slots of rows that have ended.

    [[first, second]] = generate(model, [ids], n=2, eos_ids=tok.eos_ids)
    python sample.py --prompt "What is 3 + 4 * 5?"              # lab/chat.py

Shapes: P prompts, B rows, T tokens, C hidden, V vocabulary, L layers, Hkv kv heads, S cached
positions, D head size.
"""
import importlib.util
import math
import sys
import warnings
from dataclasses import dataclass, field

from plumbing import checkpoint, command, config, datasets, flags, policy
from plumbing.tokenizer import Tokenizer

import torch
from tqdm import tqdm

import lora
import model as qwen
import nvfp4
from model import padded, to_device

PREFILL_TOKENS = 8192  # tokens of prompts that go through the model together, padding included
BUCKET = 256  # a graph's attention looks at a multiple of this many positions


# ---- how a token is drawn


# splitmix64 (Steele, Lea and Flood 2014): the golden ratio, and its finalizer's multipliers, as
# int64 holds them
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX1, MIX2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def mix(z):
    """splitmix64's finalizer on int64 tensors. torch multiplies modulo 2^64 and shifts
    arithmetically, hence the masks."""
    z = (z ^ (z >> 30 & 2**34 - 1)) * MIX1
    z = (z ^ (z >> 27 & 2**37 - 1)) * MIX2
    return z ^ (z >> 31 & 2**33 - 1)


def row_keys(seed, prompt, sample):
    """int64 key of each row from its prompt and sample index (int64 tensors); `uniform` turns it
    into numbers."""
    key = mix(torch.full_like(prompt, seed) + GOLDEN)
    return mix(mix(key + prompt * GOLDEN) + sample * GOLDEN)


def uniform(key, position):
    """One number in (0, 1) for each row: 23 bits of the hash, centred, so that float32 holds it
    and it is never 0 or 1."""
    bits = mix(key + (position + 1) * GOLDEN) >> 41 & 2**23 - 1
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
        ids = ids.clamp(max=cdf.shape[1] - 1)  # NaN gives V: `generate` refuses it
        ids = (ids if order is None else order.gather(1, ids))[:, 0]
    return ids, logp.gather(1, ids[:, None])[:, 0]


def draw(logits, key, position, temperature, top_p):
    """Draw one id a row: logits (B, V) of valid ids, key (B,) of the rows' random numbers, position
    (B,) of the new tokens -> ids (B,), logprobs (B,)."""
    return sample_ids(logits, uniform(key, position), temperature, top_p)


# ---- generate


@dataclass
class Sample:
    """One completion. ids: tokens, the EOS included if it was drawn. logprobs: of each, under
    softmax(logits / temperature) over the whole tokenizer vocabulary (also when top_p < 1 cut the
    tail before drawing; at temperature 0, under softmax(logits)). finished: ended with EOS, not at
    the length limit."""

    ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finished: bool = False


@dataclass
class Row:
    """A Sample in the making: the j-th of prompt number p."""

    p: int
    j: int
    prompt: list  # ids
    limit: int  # new tokens at most
    key: int  # of its random numbers
    sample: Sample

    @property
    def ended(self):
        return self.sample.finished or len(self.sample.ids) == self.limit


@torch.no_grad()
def generate(model, prompts, n=1, max_new_tokens=256, temperature=1.0, top_p=1.0, eos_ids=(),
             seed=0, max_rows=256, on_token=None, indices=None):
    """n completions of each prompt (lists of ids); returns, per prompt and in order, a list of n
    Samples.

    max_new_tokens: an int, or one per prompt; None is 4096, or fewer if positions run out.
    temperature 0: greedy. max_rows: rows that decode together. on_token(prompt, sample, id) is
    called as tokens arrive, for streaming. indices: of the prompts in the larger set that they come
    from (default: 0, 1, ...): a part draws what it would in the whole. ValueError if a prompt does
    not fit the model, or the model's output is not finite."""
    if max_new_tokens is None:
        room = model.config.max_position_embeddings
        max_new_tokens = [max(1, min(4096, room - len(prompt))) for prompt in prompts]
    if not isinstance(max_new_tokens, list | tuple):
        max_new_tokens = [max_new_tokens] * len(prompts)
    assert n > 0 and min(max_new_tokens, default=1) > 0
    assert temperature >= 0 and 0 < top_p <= 1
    check_prompts(model, prompts, max_new_tokens)
    eos_ids = {*eos_ids}
    # a row for each completion; those of a prompt are neighbours, so that they share its prefill
    numbers = torch.tensor(range(len(prompts)) if indices is None else indices, dtype=torch.long)
    keys = row_keys(seed, numbers[:, None], torch.arange(n)).tolist()  # (P, n)
    rows = [Row(p, j, prompts[p], max_new_tokens[p], keys[p][j], Sample())
            for p in range(len(prompts)) for j in range(n)]
    # a live line, in a terminal that does not show the tokens themselves
    with tqdm(total=len(rows), unit="row", desc="sample", leave=False,
              disable=bool(on_token) or None) as bar:
        decode(model, rows, temperature, top_p, eos_ids, max_rows, bar, on_token)

    lost = sum(not math.isfinite(sum(row.sample.logprobs)) for row in rows)
    if lost:
        raise ValueError(f"{lost} of {len(rows)} samples have log-probs that are NaN or inf: the "
                         "model overflows; check --model and --adapter, or train with a lower --lr")
    return [[row.sample for row in rows[p * n : (p + 1) * n]] for p in range(len(prompts))]


def decode(model, rows, temperature, top_p, eos_ids, max_rows, bar, on_token):
    """Fill the samples of `rows`; bar: a tqdm that counts those that have ended."""
    if model.fast and model.fast.knows(model):
        return model.fast.decode(model, rows, temperature, top_p, eos_ids, max_rows, draw, bar,
                                 on_token)

    for first in range(0, len(rows), max_rows):
        decoder = Decoder(model, rows[first : first + max_rows], temperature, top_p)
        while decoder.rows:
            # Draw the next token of every row.
            ids, logprobs = decoder.step()
            for row, token, logprob in zip(decoder.rows, ids, logprobs, strict=True):
                if row.ended:
                    continue
                row.sample.ids.append(token)
                row.sample.logprobs.append(logprob)
                row.sample.finished = token in eos_ids
                bar.update(row.ended)
                if on_token:
                    on_token(row.p, row.j, token)

            # Rows that have ended leave: on the CPU at once; on a GPU when half the batch has, as
            # each new batch size has to be captured.
            live = [i for i, row in enumerate(decoder.rows) if not row.ended]
            most = len(decoder.rows) // 2 if decoder.graphs else len(decoder.rows) - 1
            if len(live) <= most:
                decoder.keep(live)


class Decoder:
    """Rows that decode together: for each its keys and values, its last token (not yet cached)
    and the key of its random numbers."""

    def __init__(self, model, rows, temperature, top_p):
        self.model, self.rows = model, rows
        self.temperature, self.top_p = temperature, top_p
        device = model.embed.weight.device
        self.graphs = device.type == "cuda"  # whether steps are captured
        # the captured step, the tensors that it fills, and how far its attention looks
        self.graph, self.drawn, self.positions = None, None, 0

        # One prefill a prompt. Its keys and values are copied to the rows of its group.
        prompts = {row.p: row.prompt for row in rows}
        filled = prefill(model, [*prompts.values()])
        place = {p: i for i, p in enumerate(prompts)}
        group = to_device([place[row.p] for row in rows], device)  # (B,)
        longest = max(len(row.prompt) + row.limit for row in rows)
        self.cache = qwen.KVCache(model, len(rows), longest)
        T = filled.k.shape[3]
        self.cache.k[:, :, :, :T] = filled.k[:, group]  # (L, P, Hkv, T, D) -> (L, B, Hkv, T, D)
        self.cache.v[:, :, :, :T] = filled.v[:, group]

        # The last token of a prompt is what the first step reads.
        self.cache.length = to_device([len(row.prompt) - 1 for row in rows], device)
        self.token = to_device([row.prompt[-1] for row in rows], device)
        self.key = to_device([row.key for row in rows], device)

    def step(self):
        """Draw the next token of each row; returns ids and log-probs as lists."""
        # of the longest row so far: the host knows it without asking the GPU
        needed = max(len(row.prompt) + len(row.sample.ids) for row in self.rows)
        if self.graph is not None and needed <= self.positions:
            self.graph.replay()
            ids, logprobs = self.drawn
        else:
            self.positions = needed
            if self.graphs:  # a graph's shapes are fixed: it sees spare positions, masked
                whole = math.ceil(needed / BUCKET) * BUCKET
                self.positions = min(whole, self.cache.k.shape[3])
            ids, logprobs = self.launch()
            if self.graphs:
                self.capture()
        return ids.tolist(), logprobs.tolist()

    def launch(self):
        """The step itself: ids (B,), log-probs (B,). All state changes in place."""
        self.cache.used = self.positions - 1  # model.hidden adds the new token
        x = self.model.hidden(self.token[:, None], self.cache)[:, 0]  # (B, C)
        logits = qwen.logits(x, self.model.lm_head.weight)[:, : self.model.valid_vocab]  # (B, V)
        # a row that has ended goes on until it leaves, but not past the end of the cache
        self.cache.length.add_(1).clamp_(max=self.cache.k.shape[3] - 1)
        ids, logprobs = draw(logits, self.key, self.cache.length, self.temperature, self.top_p)
        self.token.copy_(ids)
        return ids, logprobs

    def capture(self):
        """Record `launch` as a CUDA graph, to be replayed until the batch shrinks or the rows grow
        past self.positions. It replays what your own hook launches, too, if that works on tensors
        in place; if a step cannot be captured, all run without a graph."""
        # drop the last graph and its outputs first: freed during a capture, they crash the process
        self.graph = self.drawn = None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                drawn = self.launch()
            self.graph, self.drawn = graph, drawn
        except RuntimeError as e:
            self.graphs = False
            warnings.warn(f"decoding without a CUDA graph, slowly: {str(e).splitlines()[0]}",
                          stacklevel=2)

    def keep(self, live):
        """Keep the rows at the places `live`: the last of them move into the holes."""
        n = len(live)
        holes = sorted(set(range(n)) - set(live))
        for hole, i in zip(holes, [i for i in live if i >= n], strict=True):
            self.rows[hole] = self.rows[i]
            self.cache.k[:, hole] = self.cache.k[:, i]
            self.cache.v[:, hole] = self.cache.v[:, i]
            for t in (self.cache.length, self.token, self.key):
                t[hole] = t[i]
        self.rows, self.cache = self.rows[:n], self.cache.rows(0, n)
        self.token, self.key = self.token[:n], self.key[:n]
        self.graph = self.drawn = None


def prefill(model, prompts):
    """A KVCache with a row for each prompt, filled with all but the prompt's last token; its
    `length` stays 0."""
    longest = max(len(prompt) for prompt in prompts) - 1
    cache = qwen.KVCache(model, len(prompts), longest)
    ids = padded([prompt[:-1] for prompt in prompts], cache.k.device)  # (P, T)
    together = max(1, PREFILL_TOKENS // max(1, longest))
    for first in range(0, len(prompts) if longest else 0, together):
        rows = cache.rows(first, first + together)
        model.hidden(ids[first : first + together], rows)
    return cache


def check_prompts(model, prompts, limits):
    """ValueError if a prompt is empty, too long for the model, or of another tokenizer."""
    room = model.config.max_position_embeddings
    for i, (p, m) in enumerate(zip(prompts, limits, strict=True)):
        if not p:
            raise ValueError(f"prompt {i} is empty: a prompt has at least one token")
        if len(p) + m > room:
            raise ValueError(f"a prompt's {len(p)} tokens and {m} new ones pass the model's {room} "
                             "positions; shorten it, or lower --max-new-tokens")
        if not 0 <= min(p) <= max(p) < model.config.vocab_size:
            raise ValueError(f"prompt {i}: ids from {min(p)} to {max(p)}, and the model has "
                             f"{model.config.vocab_size}: wrong tokenizer?")


# ---- what all commands share

MODEL_FLAGS = flags.model_flags(("none", *nvfp4.FORMATS))


def load_policy(args):
    """(model, tokenizer) of the flags: base, format, AWQ, adapter, no ids past the tokenizer's."""
    device, dtype = policy.place(args.device, args.dtype)
    if device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(args.card_share)
    folder = checkpoint.fetch(args.model)
    adapter = getattr(args, "adapter", None)  # train.py makes its own
    if adapter:
        policy.check(args)  # before the slow part
    stored = checkpoint.read_config(folder)["quantization"]
    if stored and args.quant == "none":  # nor could --lora-rank 0 train them
        raise ValueError(f"--quant none: the weights in {folder} have four bits already; use "
                         f"--quant {config.format_of(stored, folder)}")
    tok = Tokenizer(folder)
    calibration = None
    # a quantized base already has the scales that its adapter asks for (see policy.check)
    if args.awq and not (stored and getattr(args, "trained_with", {}).get("awq")):
        calibration = datasets.calibration(args.calib, folder)
    model = qwen.load(folder, device, dtype, args.quant, calibration)
    model.valid_vocab = len(tok)
    if device == "cpu" and model.config.hidden_size < 512:
        torch.set_num_threads(1)  # too little work for two: they would mostly wait for each other
    if adapter:
        lora.load_adapter(model, adapter)
    return model, tok


def set_engine(model, engine):
    """--engine: put the fast functions on the model where that is asked for and possible."""
    if engine == "plain" or engine == "auto" and not model.embed.weight.is_cuda:
        return
    why = "fast/ is not there"
    if importlib.util.find_spec("fast"):
        import fast

        why = fast.install(model, exact=engine == "exact")
    if why and engine != "auto":
        raise ValueError(f"--engine {engine}: {why}; take --engine auto or plain")
    if why:
        print(f"engine: plain, since {why}", file=sys.stderr)


if __name__ == "__main__":
    command.become("lab/chat.py")
