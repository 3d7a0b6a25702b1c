"""
The sampling engines: they turn slots that hold rows into their next tokens.

A row lives in a slot, which holds its keys and values, its last token and the key of its random
numbers. sample.py decides which row is where; an engine fills slots (`start`, `copy_row`, `move`)
and decodes the first `rows` of them (`run`). There are two:

`Eager` runs the model's modules, on any device: the CPU's engine, and the reference.
`onednn_linears` makes it faster on the CPU.
`Graphs` is the GPU's: decode.Step captured as one CUDA graph per batch size, sampling included,
replayed a few steps at a time; the next few are launched before the host looks at the tokens. It
stays on the model between calls (`release` frees it, `make_room` if need be). LoRA, noise and
temperature may change meanwhile, since the graph reads them in place; if weights have moved, a new
engine is made (`fingerprint`).

plumbing/draw.py draws a token: it depends on the row, never on what else is in the batch.

Left out: paged keys and values. A row owns the memory of the longest possible row; `engine_for`
plans how many fit, the others wait.

    TRITON_INTERPRET=1 pytest tests/test_sample.py tests/test_decode.py
    pytest -m gpu tests/test_sample.py tests/test_decode.py

Shapes: B rows, S slots, T tokens, C hidden, V vocabulary, L layers, Hkv kv heads, D head size.
"""
import copy
import functools
import weakref
from contextlib import contextmanager
from itertools import accumulate

from plumbing import ranks
from plumbing.draw import sample_ids, uniform

import torch
from torch.nn.utils.rnn import pad_sequence

import aqn
import model as qwen
from fast import batches, memory, plan
from model import KVCache, projections, to_device

# batch sizes with a graph; beyond them every 64
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class OneDNNLinear(torch.nn.Module):
    """A linear layer (N, K) in the blocked layout that oneDNN's small-batch GEMM wants."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
        self.bias = bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def changed(m):
    """Whether a module has a forward, or a hook, that is not this project's."""
    # the module it claims, which functools.wraps copies, and the real one: torch's, if decorated
    around = getattr(getattr(m.forward, "__func__", None), "__globals__", {})
    homes = (str(home).partition(".")[0] for home in (m.forward.__module__, around.get("__name__")))
    ours = {*homes} <= {"model", "nvfp4", "lora", "torch"}
    return not ours or bool(m._forward_pre_hooks or m._forward_hooks)


@contextmanager
def onednn_linears(model):
    """On the CPU, every linear becomes a OneDNNLinear inside the `with`.

    Multiplying a few rows by a plain row-major weight is slow there; reordering costs as much as a
    few tokens. The result is a second copy of the weights, for one call, so an adapter can be
    merged into it; but not in bfloat16, where rounding would remove most of the adapter. A linear
    with noise, or a forward of the user's, is left alone: its weight is not all that it does."""
    swaps, w = [], model.embed.weight  # (path, the module there, its replacement)
    able = w.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if w.dtype != torch.float32:  # not every CPU can; these, and other dtypes, use torch's own
        able = (able and w.dtype == torch.bfloat16
                and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if able:
        for path, m in [*projections(model), ("lm_head", model.lm_head)]:
            if any(b.any() for b in aqn.buffers(m).values()) or changed(m) or changed(m.base):
                continue
            weight = m.base.weight_in(w.dtype)
            if m.adapter is not None and w.dtype == torch.float32:
                weight = weight + m.adapter.delta()
            elif m is not m.base:
                path, m = f"{path}.base", m.base
            swaps.append((path, m, OneDNNLinear(weight, m.bias)))
    try:
        for path, _, fast in swaps:
            model.set_submodule(path, fast)
        yield
    finally:
        for path, m, _ in swaps:
            model.set_submodule(path, m)


class Eager:
    """The reference engine, and the CPU's: model.hidden on a KVCache of `slots` rows, one step at
    a time."""

    prompts, stall, ahead = None, 0, 0  # see Graphs

    def __init__(self, model, slots, max_len):
        self.model, self.slots, self.max_len = model, slots, max_len
        self.cache = KVCache(model, slots, max_len)
        # token: the last one of each row, not yet in the cache; key: of its random numbers
        self.token, self.key = (torch.zeros(slots, dtype=torch.long, device=self.cache.k.device)
                                for _ in range(2))
        self.longest = [0] * slots  # cache.length on the host

    def begin(self, temperature, top_p, eos_ids):
        self.temperature, self.top_p = temperature, top_p

    def start(self, slots, tokens, lengths, limits, keys):
        """Begin rows in `slots`: the cache holds `lengths` tokens of each, `tokens` come next, and
        at most `limits` are drawn."""
        at, token, length, key = to_device([slots, tokens, lengths, keys], self.token.device)
        self.token[at], self.cache.length[at], self.key[at] = token, length, key
        for s, t in zip(slots, lengths, strict=True):
            self.longest[s] = t

    def copy_row(self, source, first, end, length):
        """Copy the first `length` cached tokens of slot `source` to slots first..end - 1."""
        for t in (self.cache.k, self.cache.v):
            t[:, first:end, :, :length] = t[:, source, None, :, :length]

    def move(self, source, target, length):
        """Move the row in slot `source` to slot `target`; `length` bounds its cached tokens."""
        self.copy_row(source, target, target + 1, length)
        for t in (self.token, self.key, self.cache.length):
            t[target] = t[source]
        self.longest[target] = self.longest[source]

    def run(self, rows, steps):
        """Decode the first `rows` slots at most `steps` times; returns (how many times it does, a
        function that returns ids and log-probs as lists [row][step])."""
        view = copy.copy(self.cache)
        view.k, view.v = self.cache.k[:, :rows], self.cache.v[:, :rows]
        view.length = self.cache.length[:rows]
        view.used = max(self.longest[:rows])
        x = self.model.hidden(self.token[:rows, None], view)[:, 0]  # (B, C)
        # on the GPU in float32, as in the trainer; on the CPU by the module, which may be swapped
        head = self.model.lm_head
        logits = qwen.logits(x, head.weight) if x.is_cuda else head(x)  # (B, V)
        view.length += 1  # in place: the slots' own lengths
        u = uniform(self.key[:rows], view.length)
        logits = logits[:, : self.model.valid_vocab]
        ids, logprobs = sample_ids(logits, u, self.temperature, self.top_p)
        self.token[:rows] = ids
        for s in range(rows):
            self.longest[s] += 1
        return 1, lambda: (ids[:, None].tolist(), logprobs[:, None].tolist())


class Graphs:
    """The GPU engine: decode.Step on persistent buffers, one CUDA graph for each batch size of
    BUCKETS that comes up. `prompts` (packed.Prefill, or None) fills the cache; `stall`: about how
    many decode steps a prefill, however small, costs the rows that wait for it. `ahead`: how many
    runs may be launched while the results of an earlier one are not fetched yet."""

    stall, ahead = 2, 1

    def __init__(self, model, slots, max_len, top_p=1.0):
        from fast import decode  # needs Triton, which the CPU path does without

        D = model.config.head_dim
        if D < 32 or D & (D - 1):
            raise ValueError(f"--model: heads of size {D}; the GPU engine takes powers of two "
                             "from 32 on; use --device cpu")
        self.slots, self.max_len = slots, max_len
        larger = range(BUCKETS[-1] + 64, slots, 64)
        self.sizes = [*(b for b in (*BUCKETS, *larger) if b < slots), slots]  # batch sizes
        self.top_p = top_p  # if < 1, the memory plan has room for its sort
        self.cache = KVCache(model, slots, max_len)
        self.step = decode.Step(model, self.cache)
        self.graphs, self.refresh, self.pool, self.scratch = {}, None, None, []
        packed = batches.packed(model)
        self.prompts = packed and packed.Prefill(model, self.step)
        if self.cache.k.is_cuda:
            # steps launched ahead may outlive generate. Their memory is freed with the graphs, and
            # the allocator waits for the capture's stream, not for the replay's
            end = weakref.finalize(self, torch.cuda.synchronize, self.cache.k.device)
            end.atexit = False

    def begin(self, temperature, top_p, eos_ids):
        st = self.step
        if len(eos_ids) > len(st.eos):
            raise ValueError(f"{len(eos_ids)} stop tokens: the GPU engine compares with at most "
                             f"{len(st.eos)}")
        if st.adapters:  # hundreds of small copies in one launch
            self.refresh = self.refresh or self.capture(self.copy_adapters)
            self.refresh()
        st.inverse_temperature.fill_(1 / temperature if temperature else 1.0)
        st.eos.fill_(-1)
        ids = torch.tensor(sorted(eos_ids), dtype=torch.long, device=st.eos.device)
        st.eos[: len(eos_ids)] = ids
        st.alive.zero_()
        st.cache.length.zero_()
        self.last = 0  # size of the last batch
        self.greedy = temperature == 0
        # temperature is read from memory, except by the sort for top_p
        self.nucleus = (temperature, top_p) if top_p < 1 else None

    def copy_adapters(self):
        """Copy LoRA's current parameters to where the kernels read them."""
        self.step.refresh()
        if self.prompts:
            self.prompts.refresh()

    def start(self, slots, tokens, lengths, limits, keys):
        st = self.step
        at, token, length, limit, key = to_device([slots, tokens, lengths, limits, keys],
                                                  self.cache.k.device)
        st.token[at], st.key[at] = token, key
        st.cache.length[at], st.stop[at] = length, length + limit
        st.alive.index_fill_(0, at, 1)

    copy_row = Eager.copy_row

    def move(self, source, target, length):
        self.copy_row(source, target, target + 1, length)
        st = self.step
        for t in (st.token, st.key, st.stop, st.alive, st.cache.length):
            t[target] = t[source]
        # if a larger batch size decodes this slot in vain, it stays cheap
        st.alive[source], st.cache.length[source] = 0, 0

    def run(self, rows, steps):
        st = self.step
        steps = min(steps, len(st.out_ids))
        size = next(s for s in self.sizes if s >= rows)
        if ranks.world > 1 and size < self.last:
            # rows end, and eventually all will: if each rank captures the smaller sizes now, at the
            # same time, no rank waits for another's capture in a later step
            for smaller in self.sizes[: self.sizes.index(size)]:
                self.launcher(smaller)
        self.last, launch = size, self.launcher(size)
        st.count.zero_()
        for _ in range(steps):
            launch()
        # the next run overwrites these: copy them to the host, in stream order
        ids, logprobs = (torch.empty_like(t, device="cpu", pin_memory=t.is_cuda)
                         .copy_(t, non_blocking=True) for t in (st.out_ids, st.out_logp))
        done = torch.cuda.Event() if st.out_ids.is_cuda else None
        if done:
            done.record()

        def fetch():
            if done:
                done.synchronize()
            return ids[:steps, :rows].T.tolist(), logprobs[:steps, :rows].T.tolist()

        return steps, fetch

    def launcher(self, rows):
        """A function that decodes `rows` slots once: the replay of a graph, captured now if it is
        not there yet."""
        st, way = self.step, (self.greedy, self.nucleus)
        how = rows, *way
        if how in self.graphs:
            return self.graphs[how]
        # The rehearsal changes nothing but results that are overwritten: no row is alive in it.
        alive = st.alive.clone()
        st.alive.zero_()
        st.count.zero_()
        if all(known[1:] != way for known in self.graphs):
            st.compile(self.sizes, *way)
        self.graphs[how] = self.capture(lambda: st.step(*how))
        st.alive.copy_(alive)
        return self.graphs[how]

    def capture(self, launch):
        """Capture launch() as a CUDA graph and return its replay (on the CPU, launch itself). It is
        rehearsed once, to compile, check weights and make buffers, which a capture must not do."""
        device = self.cache.k.device
        if device.type != "cuda":
            return launch
        side = side_stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launch()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            launch()
        self.pool = self.pool or graph.pool()
        self.scratch.append(gemm_buffers(device))
        return graph.replay


@functools.cache
def side_stream(device):
    """The stream that rehearsals run on. There is only one: cuBLAS keeps a workspace of 32 MiB for
    each stream it has seen, so one for each batch size would add up to a gigabyte."""
    return torch.cuda.Stream(device)


def gemm_buffers(device):
    """The GEMM's buffers on `device`, or (). With more rows than plan.FEW, a graph decodes weights
    into one of them, which is replaced when a larger weight comes: whoever keeps the graph must
    keep these."""
    return tuple(plan.SPACE.get(device, ()))


ENGINES = weakref.WeakKeyDictionary()  # model -> (fingerprint, Graphs, rows asked for)


def release(model):
    """Free the engine that `generate` left on `model`: its keys, values and graphs. The next call
    makes another."""
    if ENGINES.pop(model, None) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes():
    """Bytes of GPU memory that tensors could still take, within this process's share."""
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties().total_memory
    share = int(torch.cuda.get_per_process_memory_fraction() * total)
    left = min(torch.cuda.mem_get_info()[0], share - reserved)
    return left + reserved - torch.cuda.memory_allocated()


def make_room(model, need):
    """Free the engine on `model` if the `need` bytes of an update would not fit beside it; nothing
    to do without a GPU."""
    if model in ENGINES and free_bytes() < need:
        release(model)


def settle_update(args, model, params):
    """Settle train.py's --micro-batch-tokens and --checkpointing by the free memory, and print what
    takes how much; model.update_bytes is set to what an update takes of it. On the CPU auto is
    16,384 tokens and on. A resumed run keeps its micro-batches: others round differently."""
    longest, w = args.max_prompt + args.max_new_tokens, model.embed.weight
    tokens, recompute = args.micro_batch_tokens or 16384, args.checkpointing != "off"
    if w.is_cuda:
        way = batches.packed(model) is not None, w.dtype.itemsize
        # gradient and two moments; with several ranks, also the buffer that gradients are summed in
        later = (12 if ranks.world == 1 else 16) * sum(p.numel() for p in params)
        free = min(ranks.gather(free_bytes())) - later
        tokens, recompute = memory.fit_update(model.config, free, longest, args.micro_batch_tokens,
                                              args.checkpointing, *way)
        peak = sum(memory.update_bytes(model.config, max(tokens, longest), recompute, *way))
        model.update_bytes = later + peak
        gib = [n / memory.GIB for n in (torch.cuda.memory_allocated(), later, peak, free)]
        print("GiB: {:.1f} model and adapter, {:.1f} gradients and moments, {:.1f} at the peak of "
              "an update, {:.1f} free for it and for rollouts".format(*gib))
    args.micro_batch_tokens, args.checkpointing = tokens, "on" if recompute else "off"
    model.checkpointing = recompute


def prepare(args, model, longest):
    """Make the GPU engine for train.py's rollouts and evaluations, with rows of `longest` tokens.
    If it were made for the first step's rows, it would have to be captured again at the first
    longer prompt, while all other ranks wait."""
    if model.embed.weight.is_cuda:
        rows = args.group_size * -(-args.prompts_per_step // ranks.world)
        top_p = args.eval_top_p if args.eval_n and args.eval_temperature else 1.0
        engine_for(model, min(rows, args.max_rows), longest, top_p)


def fingerprint(model):
    """What a captured graph holds on to: where the weights lie, which adapters are on, and their
    scaling."""
    adapters = (m.adapter for _, m in projections(model))
    # each module's own: parameters() and buffers() would take milliseconds
    tensors = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
    return (tuple(t.data_ptr() for t in tensors if t is not None), model.valid_vocab,
            tuple(a and a.scaling for a in adapters))


def working_bytes(model, slots, top_p):
    """memory.rollout_bytes of this model, minus the scratch that is there already."""
    held = sum(t.nbytes for t in gemm_buffers(model.embed.weight.device))
    scratch = memory.gemm_scratch(model.config)
    return memory.rollout_bytes(model.config, slots, top_p) - min(held, scratch)


def check_known(model):
    """ValueError for noise, a forward or a hook of the user's own that the kernels do not have."""
    for name in aqn.buffers(model):
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), qwen.RMSNorm):
            raise ValueError(f"{name}: the GPU's kernels read the noise of the norms alone; give "
                             "it a line in fast/decode.py and fast/packed.py, and allow it")
    for name, m in model.named_modules():
        if changed(m):
            raise ValueError(f"{name}: the GPU's kernels call no forward or hook of one's own; use "
                             "--device cpu, or write it in fast/decode.py and fast/packed.py")


def engine_for(model, slots, max_len, top_p):
    """The model's Graphs engine for (at most) `slots` rows of max_len tokens; the last call's if it
    will do. ValueError if not even one row fits the free memory, or by check_known."""
    check_known(model)
    mark = fingerprint(model)
    old_mark, old, wanted = ENGINES.get(model, (None, None, 0))
    if (old is not None and old_mark == mark and old.max_len >= max_len
            and max(old.slots, wanted) >= slots and (old.top_p < 1 or top_p == 1)):
        return old
    if old is not None:  # training and evaluation take turns: make one that serves both
        slots, max_len = max(slots, wanted), max(max_len, old.max_len)
        top_p = min(top_p, old.top_p)
        del old
        release(model)
    max_len = -(-max_len // 64) * 64
    free, fixed = free_bytes(), working_bytes(model, 0, top_p)
    row = max_len * memory.kv_per_token(model.config, model.embed.weight.element_size())
    row += working_bytes(model, 1, top_p) - fixed
    fit = int((free - fixed) // row)
    if fit < 1:
        raise ValueError(f"--max-new-tokens: one row of {max_len} tokens needs "
                         f"{(row + fixed) / 2**30:.1f} GiB, {free / 2**30:.1f} are free; lower "
                         "it, shorten the prompts, or choose a smaller --model or another --quant")
    engine = Graphs(model, min(slots, fit), max_len, top_p)
    ENGINES[model] = (fingerprint(model), engine, slots)  # it may have moved the weights
    return engine


def prefill(model, engine, prompts, slots):
    """Fill the cache of slots[i] with all of prompts[i] but its last token, which the first decode
    step reads; at most PREFILL_TOKENS at a time.

    On the GPU prompts run laid end to end. On the CPU, and where one is longer than that, they run
    padded on the right, a long one in parts."""
    most = memory.PREFILL_TOKENS
    todo = sorted(((p[:-1], s) for p, s in zip(prompts, slots, strict=True) if len(p) > 1),
                  key=lambda t: -len(t[0]))
    while todo:
        longest = len(todo[0][0])
        if engine.prompts is not None and longest <= most:
            n = sum(tokens <= most for tokens in accumulate(len(p) for p, _ in todo))
            engine.prompts.run(model, *zip(*todo[:n], strict=True), engine.capture)
        else:
            n = max(1, most // longest)
            prefill_padded(model, engine, todo[:n], most)
        todo = todo[n:]


def prefill_padded(model, engine, batch, most):
    """prefill of [(tokens, slot)], the longest first, by the model's modules. A single one is
    written straight to its slot: beside a long one there may be no room for a second cache."""
    slot, longest, alone = batch[0][1], len(batch[0][0]), len(batch) == 1
    cache = copy.copy(engine.cache) if alone else KVCache(model, len(batch), longest)
    if alone:
        cache.k, cache.v = (t[:, slot : slot + 1] for t in (cache.k, cache.v))
        cache.length, cache.used = torch.zeros_like(cache.length[:1]), 0
    ids = pad_sequence([torch.tensor(p) for p, _ in batch], batch_first=True)
    # for a part that sees earlier ones, attention on the GPU keeps the scores, in float32
    later = max(1, min(most, 512 * most // longest))
    first, *parts = ids.to(cache.k.device).split(most, dim=1)
    for part in (first, *(p for t in parts for p in t.split(later, dim=1))):
        model.hidden(part, cache)
        cache.length += part.shape[1]
    for i, (p, s) in enumerate(() if alone else batch):
        engine.cache.k[:, s, :, : len(p)] = cache.k[:, i, :, : len(p)]
        engine.cache.v[:, s, :, : len(p)] = cache.v[:, i, :, : len(p)]
