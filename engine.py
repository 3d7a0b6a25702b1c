"""
The engines of sampling: what turns slots that hold rows into their next tokens, and how a token is drawn.

A row lives in a slot: its keys and values, its last token, the key of its random numbers. sample.py decides which row is where;
an engine fills slots (`start`, `copy_row`, `move`) and decodes the first `rows` of them (`run`). There are two:

`Eager` runs the model's modules, on any device: the CPU's engine, and the reference. `packed` makes it faster on the CPU.
`Graphs` is the GPU's: decode.Step captured as one CUDA graph per batch size, sampling included, replayed a few steps at a time
before the host looks at the tokens. It stays on the model between calls (`release` frees it). LoRA, noise and temperature may
change meanwhile, since the graph reads them from where they lie; weights that moved make a new engine (`fingerprint`).

The token that a row draws depends on (seed, prompt index, sample index, position) and on its logits, never on who else was in
the batch: one uniform number comes from an integer hash of the four, and the token is read off the cumulative distribution.

Left out: paged keys and values. A row owns the memory of the longest possible row; `graphs` plans how many fit, the others wait.

    TRITON_INTERPRET=1 pytest tests/test_sample.py tests/test_decode.py
    pytest -m gpu tests/test_sample.py tests/test_decode.py

Shapes: B rows, S slots, T tokens, C hidden, V vocabulary, L layers, Hkv kv heads, D head size.
"""
import copy
import weakref
from contextlib import contextmanager

import torch

import model as qwen
from model import KVCache

PREFILL_TOKENS = 8192  # tokens a prefill call may hold, padding included; longer prompts go through in chunks
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # batch sizes with a graph; then every 64


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
        # on the GPU in float32, as the trainer's; on the CPU the module, which `packed` swaps
        logits = qwen.logits(x, self.model.lm_head.weight) if x.is_cuda else self.model.lm_head(x)  # (B, V)
        view.length += 1  # in place: the slots' own lengths
        logits = logits[:, : self.model.valid_vocab]
        ids, logprobs = sample_ids(logits, uniform(self.key[:rows], view.length), self.temperature, self.top_p)
        self.token[:rows] = ids
        for s in range(rows):
            self.longest[s] += 1
        return ids[:, None].tolist(), logprobs[:, None].tolist()


class Graphs:
    """The GPU engine: decode.Step on persistent buffers, one CUDA graph for each batch size of BUCKETS that comes up."""

    def __init__(self, model, slots, max_len, top_p=1.0):
        import decode  # needs Triton, which the CPU path does without

        D = model.config.head_dim
        if D < 32 or D & (D - 1):
            raise ValueError(f"--model: heads of size {D}; the GPU engine takes powers of two from 32 on; use --device cpu")
        self.slots, self.max_len, self.top_p = slots, max_len, top_p  # top_p: the memory planned has room for its sort if < 1
        self.cache = KVCache(model, slots, max_len)
        self.step = decode.Step(model, self.cache)
        self.most_steps, self.most_eos = decode.STEPS, decode.EOS_SLOTS
        self.graphs, self.pool, self.scratch = {}, None, []

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
        launch = self.launcher(min(next((b for b in BUCKETS if b >= rows), -(-rows // 64) * 64), self.slots))
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
            # The rehearsal compiles, checks weights and makes buffers, all of which a capture must not. With no row alive it
            # changes nothing but results that are overwritten.
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
            self.scratch.append(marlin_scratch(st.token.device))
            st.alive.copy_(alive)
            launch = graph.replay
        self.graphs[rows, self.mode] = launch
        return launch


def marlin_scratch(device):
    """marlin_triton's buffers on `device`, or (). At more rows than its FEW a graph decodes weights into one of them, which is
    replaced when a larger weight comes: whoever keeps the graph keeps these."""
    import marlin_triton

    return tuple(marlin_triton.SPACE.get(device, ()))


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
    """Memory to leave free for a prefill's activations, the FP4 GEMM's buffers, the logits and the sort of top_p."""
    c, device = model.config, model.embed.weight.device
    prefill = PREFILL_TOKENS * (4 * c.hidden_size + 3 * c.intermediate_size) * 4
    scratch, shapes = 0, [m.shape for m in model.modules() if hasattr(m, "codes")]
    if shapes:
        import marlin_triton

        scratch = max(0, marlin_triton.workspace_bytes(shapes) - sum(t.nbytes for t in marlin_scratch(device)))
    # float32 logits, twice since the allocator keeps the rehearsal's apart from the graph's; log-probs, values and indices twice
    return prefill + scratch + slots * c.vocab_size * (8 if top_p == 1 else 48) + (1 << 29)


def graphs(model, slots, max_len, top_p):
    """The model's Graphs engine for (at most) `slots` rows of max_len tokens; the one of the last call if it serves.

    ValueError if not even one row fits the free memory."""
    mark = fingerprint(model)
    old_mark, old, wanted = ENGINES.get(model, (None, None, 0))
    if (old is not None and old_mark == mark and old.max_len >= max_len and max(old.slots, wanted) >= slots
            and (old.top_p < 1 or top_p == 1)):
        return old
    if old is not None:  # training and evaluation take turns: make one that serves both
        slots, max_len, top_p = max(slots, wanted), max(max_len, old.max_len), min(top_p, old.top_p)
        del old
        release(model)
    max_len = -(-max_len // 64) * 64
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    fit = int((free - working_bytes(model, slots, top_p)) // row_bytes(model, max_len))
    if fit < 1:
        need = (row_bytes(model, max_len) + working_bytes(model, slots, top_p)) / 2**30
        raise ValueError(f"--max-new-tokens: one row of {max_len} tokens needs {need:.1f} GiB, {free / 2**30:.1f} are free; "
                         "lower it, shorten the prompts, lower --max-rows, or choose a smaller --model or another --quant")
    engine = Graphs(model, min(slots, fit), max_len, top_p)
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
