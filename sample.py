"""
Sampling: prompts in, completions with the log-prob of each token out.

`generate` is what training, evaluation and the command line call. A prompt is prefilled once and its keys and values are
copied to the rows of its group; then all rows decode together, one token a step. A row lives in a slot: when it finishes, a
waiting row takes the slot, and when none waits, the last row moves into the hole and the batch shrinks.

The token that a row draws depends on (seed, prompt index, sample index, position) and on its logits, never on who else was in
the batch: one uniform number comes from an integer hash of the four, and the token is read off the cumulative distribution.

Two engines share that scheduling. `Eager` runs the model's modules, on any device: the CPU's engine, and the reference.
`Graphs` is the GPU's: decode.Step captured as one CUDA graph per batch size, sampling included, replayed a few steps at a time
before the host looks at the tokens. It stays on the model between calls (`release` frees it); LoRA, noise and temperature
may change meanwhile, since the graph reads them from where they lie.

Left out: beam search, repetition penalties, stop strings, speculative decoding, paged keys and values (a row owns the memory
of its longest possible length).

    python sample.py --prompt "What is 3 + 4 * 5?"
    python sample.py --model Qwen/Qwen2.5-0.5B-Instruct --file prompts.txt --out out.jsonl --n 4

Shapes: B rows, S slots, T tokens, C hidden, V vocabulary, L layers, Hkv kv heads, D head size.
"""
import argparse
import copy
import json
import sys
import time
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import model as qwen
from model import KVCache

PREFILL_TOKENS = 8192  # tokens a prefill call may hold, padding included; longer prompts go through in chunks
MAX_ROWS = 256  # rows that decode together, if the caller does not say
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # batch sizes with a graph of their own


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


# ----------------------------------------------------------------------------- the engines


class Packed(torch.nn.Module):
    """A linear layer (N, K) in the blocked layout that oneDNN's small-batch GEMM wants."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8), bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


@contextmanager
def packed(model):
    """Linear layers as Packed inside the `with`. A few rows times a plain row-major weight is slow on the CPU (1.6 times in
    bfloat16, 3 in float32); packing costs as much as a few tokens. It is a second copy of the weights, for the one call."""
    swaps = []
    if model.embed.weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        for owner in list(model.modules()):
            for name, m in owner.named_children():
                if not hasattr(m, "parts") or hasattr(m, "base"):  # neither a Linear nor a QuantLinear
                    continue
                if hasattr(m, "codes"):
                    m(model.embed.weight.new_zeros(1, m.shape[1]))  # makes cpu_weight
                swaps.append((owner, name, m))
                setattr(owner, name, Packed(m.cpu_weight if hasattr(m, "codes") else m.weight, m.bias))
    try:
        yield
    finally:
        for owner, name, m in swaps:
            setattr(owner, name, m)


class Eager:
    """The reference engine, and the CPU's: model.hidden on a KVCache of `slots` rows, one step at a time."""

    def __init__(self, model, slots, max_len):
        self.model, self.slots, self.max_len = model, slots, max_len
        self.cache = KVCache(model, slots, max_len)
        # token: the last one of each row, not yet in the cache; key: of its random numbers
        self.token, self.key = (torch.zeros(slots, dtype=torch.long, device=self.cache.k.device) for _ in range(2))
        self.longest = [0] * slots  # cache.length on the host

    def begin(self, temperature, top_p, eos_ids):
        self.temperature, self.top_p = temperature, top_p

    def start(self, slots, tokens, lengths, limits, keys):
        """Rows that begin: the cache holds `lengths` tokens of each slot, `tokens` come next, at most `limits` are drawn."""
        at = torch.tensor(slots, device=self.token.device)
        self.token[at] = torch.tensor(tokens, device=at.device)
        self.cache.length[at] = torch.tensor(lengths, device=at.device)
        self.key[at] = keys
        for s, t in zip(slots, lengths, strict=True):
            self.longest[s] = t

    def copy_row(self, source, target, length):
        """The first `length` cached tokens of slot `source` to slot `target`."""
        for t in (self.cache.k, self.cache.v):
            t[:, target, :, :length] = t[:, source, :, :length]

    def move(self, source, target, length):
        """The row in slot `source`, whole, to slot `target`; `length` bounds its cached tokens."""
        self.copy_row(source, target, length)
        for t in (self.token, self.key, self.cache.length):
            t[target] = t[source]
        self.longest[target] = self.longest[source]

    def run(self, rows, steps):
        """Decode the first `rows` slots, at most `steps` times; returns ids and log-probs as lists [row][step]."""
        view = copy.copy(self.cache)
        view.k, view.v, view.length = self.cache.k[:, :rows], self.cache.v[:, :rows], self.cache.length[:rows]
        view.used = max(self.longest[:rows])
        x = self.model.hidden(self.token[:rows, None], view)[:, 0]  # (B, C)
        logits = self.model.lm_head(x)[:, : self.model.valid_vocab]  # (B, V)
        view.length += 1  # in place: the slots' own lengths
        ids, logprobs = sample_ids(logits, uniform(self.key[:rows], view.length), self.temperature, self.top_p)
        self.token[:rows] = ids
        for s in range(rows):
            self.longest[s] += 1
        return ids[:, None].tolist(), logprobs[:, None].tolist()


class Graphs:
    """The GPU engine: decode.Step on persistent buffers, one CUDA graph for each batch size of BUCKETS that comes up."""

    def __init__(self, model, slots, max_len):
        import decode  # needs Triton, which the CPU path does without

        self.slots, self.max_len = slots, max_len
        self.cache = KVCache(model, slots, max_len)
        self.step = decode.Step(model, self.cache)
        self.most_steps, self.most_eos = decode.STEPS, decode.EOS_SLOTS
        self.graphs, self.pool = {}, None

    def begin(self, temperature, top_p, eos_ids):
        if len(eos_ids) > self.most_eos:
            raise ValueError(f"{len(eos_ids)} stop tokens: the GPU engine compares with at most {self.most_eos}")
        st = self.step
        st.refresh()
        st.inverse_temperature.fill_(1 / temperature if temperature else 1.0)
        st.eos.fill_(-1)
        st.eos[: len(eos_ids)] = torch.tensor(sorted(eos_ids), dtype=torch.long, device=st.eos.device)
        st.alive.zero_()
        st.cache.length.zero_()
        # temperature is read from memory, except by the sort that top_p takes
        self.mode = ("greedy",) if temperature == 0 else ("draw",) if top_p == 1 else ("top-p", temperature, top_p)

    def start(self, slots, tokens, lengths, limits, keys):
        st, at = self.step, torch.tensor(slots, device=self.cache.k.device)
        put = torch.tensor([tokens, lengths, limits], device=at.device)  # (3, rows)
        st.token[at], st.cache.length[at], st.key[at], st.alive[at] = put[0], put[1], keys, 1
        st.stop[at] = put[1] + put[2]

    copy_row = Eager.copy_row

    def move(self, source, target, length):
        self.copy_row(source, target, length)
        st = self.step
        for t in (st.token, st.key, st.stop, st.alive, st.cache.length):
            t[target] = t[source]
        st.alive[source], st.cache.length[source] = 0, 0  # what a larger bucket decodes in vain stays cheap

    def run(self, rows, steps):
        steps, st = min(steps, self.most_steps), self.step
        launch = self.launcher(min([b for b in BUCKETS if b >= rows] + [self.slots]))
        st.count.zero_()
        for _ in range(steps):
            launch()
        return st.out_ids[:steps, :rows].T.tolist(), st.out_logp[:steps, :rows].T.tolist()

    def launcher(self, rows):
        """A function that decodes `rows` slots once: the replay of a graph, captured now if it is the first time."""
        if (rows, self.mode) in self.graphs:
            return self.graphs[rows, self.mode]
        st, greedy, draw = self.step, self.mode[0] == "greedy", None
        if self.mode[0] == "top-p":
            _, temperature, top_p = self.mode

            def draw(logits, key, position):
                return sample_ids(logits, uniform(key, position), temperature, top_p)

        def launch():
            st.step(rows, greedy, draw)

        if st.token.is_cuda:
            # the rehearsal compiles and allocates; with no row alive it changes nothing but results that are overwritten
            alive = st.alive.clone()
            st.alive.zero_()
            st.count.zero_()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                launch()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                launch()
            self.pool = self.pool or graph.pool()
            st.alive.copy_(alive)
            launch = graph.replay
        self.graphs[rows, self.mode] = launch
        return launch


ENGINES = weakref.WeakKeyDictionary()  # model -> (fingerprint, Graphs, rows asked for)


def release(model):
    """Free the engine that `generate` left on `model`: its keys, values and graphs. The next call makes another."""
    if ENGINES.pop(model, None) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def fingerprint(model):
    """What a captured graph holds on to: where the weights lie, which adapters are on, and their scaling."""
    return (tuple(t.data_ptr() for t in [*model.parameters(), *model.buffers()]), model.valid_vocab,
            tuple((m.enabled, m.scaling) for m in model.modules() if hasattr(m, "scaling")))


def row_bytes(model, max_len):
    """Bytes of one row's keys and values."""
    c = model.config
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * max_len * model.embed.weight.element_size()


def working_bytes(model, slots, top_p):
    """Memory to leave for a prefill's activations, a decoded projection, the logits and the sort of top_p."""
    c = model.config
    prefill = PREFILL_TOKENS * (4 * c.hidden_size + 3 * c.intermediate_size) * 4
    scratch = 2 * c.hidden_size * c.intermediate_size * 2
    return prefill + scratch + slots * c.vocab_size * (8 if top_p == 1 else 32) + (1 << 29)


def graphs(model, slots, max_len, top_p):
    """The model's Graphs engine for (at most) `slots` rows of max_len tokens; the one of the last call if it serves.

    ValueError if not even one row fits the free memory."""
    mark = fingerprint(model)
    old_mark, old, wanted = ENGINES.get(model, (None, None, 0))
    if old is not None and old_mark == mark and old.max_len >= max_len and max(old.slots, wanted) >= slots:
        return old
    if old is not None:  # training and evaluation take turns: make one that serves both
        slots, max_len = max(slots, wanted), max(max_len, old.max_len)
        del old
        release(model)
    max_len = -(-max_len // 64) * 64
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    fit = int((free - working_bytes(model, slots, top_p)) // row_bytes(model, max_len))
    if fit < 1:
        need = (row_bytes(model, max_len) + working_bytes(model, slots, top_p)) / 2**30
        raise ValueError(f"--max-new-tokens: one row of {max_len} tokens needs {need:.1f} GiB, {free / 2**30:.1f} are free; "
                         "lower it, shorten the prompts, lower --max-rows, or choose a smaller --model or another --quant")
    engine = Graphs(model, min(slots, fit), max_len)
    ENGINES[model] = (mark, engine, slots)
    return engine


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
             progress=False, on_token=None, eager=False):
    """n completions of each prompt (lists of ids); returns, per prompt and in order, a list of n Samples.

    max_new_tokens: an int, or one per prompt. temperature 0: greedy. max_rows: rows that decode together (default: MAX_ROWS, or
    what fits the GPU's memory; the others wait). progress: a live line (rows done, tokens/s). on_token(prompt, sample, id) is
    called as tokens arrive, for streaming. eager: the reference engine on the GPU too. ValueError names the flag when an argument
    is out of range, a prompt does not fit the model, or no row fits the memory."""
    limits = list(max_new_tokens) if isinstance(max_new_tokens, (list, tuple)) else [max_new_tokens] * len(prompts)
    check_arguments(model, prompts, n, limits, temperature, top_p, max_rows)
    out = [[Sample() for _ in range(n)] for _ in prompts]
    if not prompts:
        return out
    eos = set(eos_ids)
    index = torch.cartesian_prod(torch.arange(len(prompts)), torch.arange(n)).view(-1, 2)
    keys = row_keys(seed, index[:, 0], index[:, 1]).view(len(prompts), n)
    slots = min(len(index), max_rows or MAX_ROWS)
    max_len = max(len(p) + m for p, m in zip(prompts, limits, strict=True))
    engine = Eager(model, slots, max_len) if eager or not model.embed.weight.is_cuda else graphs(model, slots, max_len, top_p)
    engine.begin(temperature, top_p, eos)
    with packed(model):
        decode_all(model, engine, prompts, out, limits, keys, eos, min(slots, engine.slots), progress, on_token)
    return out


def decode_all(model, engine, prompts, out, limits, keys, eos, slots, progress, on_token):
    """generate's loop: every (prompt, sample) through a slot of the engine, its tokens into out[prompt][sample]."""
    waiting = deque((p, j) for p, group in enumerate(out) for j in range(len(group)))
    live, held = [], [None] * slots  # live[s]: the (prompt, sample) in slot s; held[s]: the prompt whose cache lies there
    bar = tqdm(total=len(waiting), unit="row", desc="sample", leave=False, disable=not progress)
    begin, tokens, free = time.perf_counter(), 0, list(range(slots))
    while True:
        # waiting rows take the free slots, lowest first; what is left free is closed by moving the last rows down
        starts = []
        while waiting and free:
            s = free.pop(0)
            live[s : s + 1] = [waiting.popleft()]
            starts.append(s)
        for s in reversed(free):
            p, j = live.pop()
            if s < len(live):
                engine.move(len(live), s, len(prompts[p]) + len(out[p][j].ids))
                live[s], held[s] = (p, j), p
        if not live:
            break
        if starts:
            fill(model, engine, prompts, starts, live, held)
            rows = [live[s] for s in starts]
            engine.start(starts, [prompts[p][-1] for p, _ in rows], [len(prompts[p]) - 1 for p, _ in rows],
                         [limits[p] for p, _ in rows], torch.stack([keys[p, j] for p, j in rows]).to(engine.cache.k.device))
        left = max(limits[p] - len(out[p][j].ids) for p, j in live)
        new_ids, new_logprobs = engine.run(len(live), left)
        free = []
        for s, (p, j) in enumerate(live):
            sample, ids = out[p][j], new_ids[s][: limits[p] - len(out[p][j].ids)]
            if not eos.isdisjoint(ids):
                ids = ids[: 1 + next(i for i, t in enumerate(ids) if t in eos)]
                sample.finished = True
            sample.ids += ids
            sample.logprobs += new_logprobs[s][: len(ids)]
            tokens += len(ids)
            if sample.finished or len(sample.ids) == limits[p]:
                free.append(s)
            if on_token:
                for t in ids:
                    on_token(p, j, t)
        bar.update(len(free))
        if progress:
            bar.set_postfix_str(f"{len(live) - len(free)} live, {tokens / (time.perf_counter() - begin):.0f} tokens/s")
    bar.close()


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


# ----------------------------------------------------------------------------- the command


def read_prompts(path):
    """Prompts of a file: one a line, or .jsonl rows with "prompt" (or "question")."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--file {path}: no such file")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        for i, line in enumerate(lines):
            try:
                row = json.loads(line)
                lines[i] = row["prompt"] if "prompt" in row else row["question"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"--file {path}: line {i + 1} is not a JSON object with \"prompt\" or \"question\"") from None
    if not lines or not all(isinstance(t, str) for t in lines):
        raise ValueError(f"--file {path}: no prompts in it, one line of text each is expected")
    return lines


def limit(model, prompt, args):
    """--max-new-tokens; without it, 512 or what the model's positions leave."""
    return args.max_new_tokens or max(1, min(512, model.config.max_position_embeddings - len(prompt)))


def answer(model, tok, messages, args, stream=None):
    """One completion of a conversation; its text, also written to `stream` piece by piece as tokens arrive."""
    ids, shown = [], ""

    def show(_prompt, _sample, token):
        nonlocal shown
        ids.append(token)
        text = tok.decode(ids)
        if stream and not text.endswith("\ufffd"):  # half a character: wait for the rest
            stream.write(text[len(shown) :])
            stream.flush()
            shown = text

    prompt = tok.encode(tok.chat(messages))
    [[sample]] = generate(model, [prompt], 1, limit(model, prompt, args), args.temperature, args.top_p, tok.eos_ids, args.seed,
                          on_token=show)
    if stream:
        stream.write("\n")
    return tok.decode(sample.ids)


def chat(model, tok, system, args):
    """A conversation in the terminal, each answer streamed, until end of input (ctrl-D) or ctrl-C."""
    print("type a message; an empty line starts over, ctrl-D ends", file=sys.stderr)
    messages = list(system)
    while True:
        try:
            text = input("> ").strip()
            if not text:
                messages = list(system)
                continue
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": answer(model, tok, messages, args, sys.stdout)})
        except (EOFError, KeyboardInterrupt):
            print()
            return


def batch(model, tok, system, args):
    """--file -> --out: one JSON row a sample, in order, written whole at the end."""
    prompts = read_prompts(args.file)
    ids = [tok.encode(tok.chat([*system, {"role": "user", "content": text}])) for text in prompts]
    groups = generate(model, ids, args.n, [limit(model, p, args) for p in ids], args.temperature, args.top_p, tok.eos_ids,
                      args.seed, max_rows=args.max_rows, progress=sys.stderr.isatty())
    rows = [{"prompt": text, "sample": j, "text": tok.decode(s.ids), "tokens": len(s.ids), "finished": s.finished,
             "logprob": sum(s.logprobs)} for text, group in zip(prompts, groups, strict=True) for j, s in enumerate(group)]
    temporary = Path(f"{args.out}.tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    temporary.replace(args.out)
    print(f"{args.out}: {len(rows)} rows, {sum(row['tokens'] for row in rows)} tokens")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Sample from a model: chat, one prompt, or a file of prompts.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(Path(__file__).parent / "assets" / "tiny"), help="checkpoint folder or hub id")
    add("--adapter", help="folder of a PEFT-layout LoRA adapter")
    add("--quant", default="none", choices=["none", "nvfp4", "mxfp4", "nf4"], help="format of the weights")
    add("--prompt", help="answer this and exit; without it and without --file: a chat")
    add("--file", help="prompts, one a line, or .jsonl with \"prompt\" or \"question\"")
    add("--out", help="where --file's answers go, .jsonl")
    add("--system", help="system message")
    add("--temperature", type=float, default=0.7, help="0: greedy")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest ids that hold this mass")
    add("--max-new-tokens", type=int, help="most tokens of an answer (default: 512, or what the model has room for)")
    add("--n", type=int, default=1, help="answers a prompt, with --file")
    add("--max-rows", type=int, help="rows that decode together, with --file (default: what fits)")
    add("--seed", type=int, default=0, help="the same seed, the same answers")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:i")
    add("--dtype", choices=["bfloat16", "float32"], help="of activations (default: bfloat16 on cuda, float32 on cpu)")
    args = parser.parse_args(argv)
    if (args.file is None) != (args.out is None):
        parser.error("--file and --out go together")
    if args.file and args.prompt is not None:
        parser.error("--prompt and --file exclude each other")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: no CUDA device here; use --device cpu")
    return parser, args


def main(argv=None):
    import data
    import lora

    parser, args = parse_args(argv)
    try:
        folder = qwen.fetch(args.model)
        tok = data.Tokenizer(folder)
        dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
        model = qwen.load(folder, args.device, dtype, args.quant)
        model.valid_vocab = min(model.config.vocab_size, len(tok))
        if args.adapter:
            lora.load_adapter(model, args.adapter)
        system = [{"role": "system", "content": args.system}] if args.system else []
        if args.file:
            batch(model, tok, system, args)
        elif args.prompt is not None:
            answer(model, tok, [*system, {"role": "user", "content": args.prompt}], args, sys.stdout)
        else:
            chat(model, tok, system, args)
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
