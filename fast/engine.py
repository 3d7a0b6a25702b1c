"""
The sampling engine of the GPU: it turns slots that hold rows into their next tokens.

A row lives in a slot, which holds its keys and values, its last token and the key of its random
numbers. fast/scheduler.py decides which row is where; the engine fills slots and decodes the first
`rows` of them: decode.Step captured as one CUDA graph per batch size, sampling included, replayed a
few steps at a time. It stays on the model between calls. LoRA, noise and temperature may change
meanwhile, since the graph reads them in place; if weights have moved, a new engine is made.

Left out: paged keys and values. A row owns the memory of the longest possible row; `engine_for`
plans how many fit, the others wait.
"""
import functools
import sys
import weakref

from plumbing import ranks

import torch

import lora
import model as qwen
from fast import decode, logprobs, memory, packed, plan
from fast.compiling import compiling
from fast.linears import exact, identity
from model import KVCache, projections, to_device

# batch sizes with a graph, and multiples of 64: the GEMM takes as long for a tile that lacks rows
BUCKETS = (1, 2, 4, 8, 16, 32)

# what generate and completion_logprobs call of the plain files, and the kernels do themselves
BYPASSED = {
    "model": ("apply_rope", "rope_tables", "logits", "score", "token_logprobs", "KVCache.write",
              "Transformer.rope", "Transformer.hidden"),
    "sample": ("mix", "uniform", "sample_ids", "draw", "prefill", "Decoder.__init__",
               "Decoder.step", "Decoder.launch", "Decoder.keep"),
    "nvfp4": ("QuantLinear.forward", "QuantLinear.q.fget"),  # gemm.TiledLinear has its own
    "marlin_triton": ("matmul", "few_rows", "to_bfloat16"),
}


def replaced(model):
    """The name of a function of BYPASSED that is not its file's any more, or None; the model, or
    its class, may have a `hidden` or `rope` of its own."""
    for home, names in BYPASSED.items():
        module = sys.modules.get(home)
        for name in names if module else ():
            owner, path = module, name.split(".")
            if path[0] == "Transformer":
                owner, path = model, path[1:]
            function = functools.reduce(lambda o, part: getattr(o, part, None), path, owner)
            if getattr(function, "__globals__", None) is not vars(module):
                return f"{home}.{name}"
    return None


def changed(m):
    """Whether a module has a class, a forward, or a hook, that is not this project's."""
    # where its forward was written, not what it claims, which functools.wraps copies
    written = getattr(getattr(m.forward, "__func__", None), "__globals__", {})
    homes = {str(name).partition(".")[0] for name in (type(m).__module__, written.get("__name__"))}
    of_torch = isinstance(m, torch.nn.ModuleList | torch.nn.Embedding)  # model.py has no others
    ours = homes <= ({"torch"} if of_torch else {"model", "nvfp4", "lora", "fast"})
    hooks = m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks
    return not ours or any(hooks)


def usual_noise(m):
    """Whether a module has no noise, or one that the kernels read: of a norm, a number a channel,
    end to end, not trained."""
    noise = m._buffers.get("noise")
    return noise is None or (isinstance(m, qwen.RMSNorm) and noise.shape == m.weight.shape
                             and noise.is_contiguous() and not noise.requires_grad)


class Graphs:
    """decode.Step on persistent buffers, one CUDA graph for each batch size of `sizes` that comes
    up. `prompts` (packed.Prefill) fills the cache."""

    stall = 2  # about how many decode steps a prefill costs the rows that wait for it
    ahead = 1  # runs that may be launched while the results of an earlier one are not fetched yet

    def __init__(self, model, slots, max_len, prefill_tokens=memory.PREFILL_TOKENS[0]):
        self.slots, self.max_len, self.prefill_tokens = slots, max_len, prefill_tokens
        self.sizes = [*(b for b in (*BUCKETS, *range(64, slots, 64)) if b < slots), slots]
        self.cache = KVCache(model, slots, max_len)
        self.step = decode.Step(model, self.cache)
        self.graphs = {}  # (batch size, greedy, nucleus) -> replay
        self.rehearsed = set()  # (greedy, nucleus) of the steps that are compiled
        self.refresh = None  # the replay that copies the adapter
        self.pool, self.scratch = None, []  # memory of the graphs, and buffers that they read
        self.prompts = packed.Prefill(self.step)
        if self.cache.k.is_cuda:
            # steps launched ahead may outlive generate. Their memory is freed with the graphs, and
            # the allocator waits for the capture's stream, not for the replay's
            end = weakref.finalize(self, torch.cuda.synchronize, self.cache.k.device)
            end.atexit = False

    def begin(self, temperature, top_p, eos_ids, draw=None):
        st = self.step
        st.draw = draw
        if len(eos_ids) > len(st.eos):
            raise ValueError(f"{len(eos_ids)} stop tokens: the GPU engine compares with at most "
                             f"{len(st.eos)}")
        if any(p.E for block in st.layers for p in block):  # hundreds of copies in one launch
            self.refresh = self.refresh or self.capture(st.refresh)
            self.refresh()
        st.inverse_temperature.fill_(1 / temperature if temperature else 1.0)
        ids = [*eos_ids] + [-1] * (len(st.eos) - len(eos_ids))
        st.eos.copy_(to_device(ids, st.eos.device))  # the host must not wait for the refresh
        st.alive.zero_()
        st.cache.length.zero_()
        self.last = 0  # size of the last batch
        # Step.step's greedy and nucleus: but for top_p's sort, temperature is read from memory
        self.way = temperature == 0, (temperature, top_p) if top_p < 1 else None

    def start(self, slots, rows):
        """Begin `rows` in `slots`: of each prompt all but the last token is in the cache."""
        st = self.step
        state = [(row.prompt[-1], row.key, len(row.prompt), row.limit) for row in rows]
        at, token, key, prompt, limit = to_device([slots, *zip(*state, strict=True)],
                                                  self.cache.k.device)
        st.token[at], st.key[at], st.prompt[at] = token, key, prompt
        st.cache.length[at], st.stop[at] = prompt - 1, prompt - 1 + limit
        st.alive.index_fill_(0, at, 1)

    def copy_row(self, source, first, end, length):
        """Copy the first `length` cached tokens of slot `source` to slots first..end - 1."""
        for t in (self.cache.k, self.cache.v):
            t[:, first:end, :, :length] = t[:, source, None, :, :length]

    def move(self, source, target, length):
        """Move the row in slot `source` to slot `target`; `length` bounds its cached tokens."""
        self.copy_row(source, target, target + 1, length)
        st = self.step
        for t in (st.token, st.prompt, st.key, st.stop, st.alive, st.cache.length):
            t[target] = t[source]
        # if a larger batch size decodes this slot in vain, it stays cheap
        st.alive[source], st.cache.length[source] = 0, 0

    def run(self, rows, steps):
        """Decode the first `rows` slots at most `steps` times; returns (how many times it does, a
        function that returns ids and log-probs as lists [row][step])."""
        st = self.step
        steps = min(steps, len(st.out_ids))
        size = next(s for s in self.sizes if s >= rows)
        if ranks.world > 1 and size < self.last:
            # rows end, and eventually all will: if each rank captures the smaller sizes now, at the
            # same time, no rank waits for another's capture in a later step
            for smaller in self.sizes[: self.sizes.index(size)]:
                self.launcher(smaller)
        self.last = size
        launch = self.launcher(size)
        st.count.zero_()
        for _ in range(steps):
            launch()
        # the next run overwrites these: they are copied to pinned memory, in stream order
        ids, logprobs = (t.to("cpu", non_blocking=True, copy=True)
                         for t in (st.out_ids, st.out_logp))
        done = torch.cuda.current_stream().record_event() if st.out_ids.is_cuda else None

        def fetch():
            if done:
                done.synchronize()
            return ids[:steps, :rows].T.tolist(), logprobs[:steps, :rows].T.tolist()

        return steps, fetch

    def launcher(self, rows):
        """A function that decodes `rows` slots once: the replay of a graph, captured now if it is
        not there yet."""
        st = self.step
        how = rows, *self.way
        if how in self.graphs:
            return self.graphs[how]
        # What `capture` runs first changes only results that are overwritten: no row is alive.
        alive = st.alive.clone()
        st.alive.zero_()
        st.count.zero_()
        if self.way not in self.rehearsed and self.cache.k.is_cuda:
            with compiling():
                self.rehearse(*self.way)
        self.graphs[how] = self.capture(lambda: st.step(*how))
        st.alive.copy_(alive)
        return self.graphs[how]

    @torch.no_grad()
    def rehearse(self, greedy=False, nucleus=None):
        """Call decode.Step.step(size, greedy, nucleus) for all sizes: within `compiling` this
        compiles its kernels."""
        self.rehearsed.add((greedy, nucleus))
        for size in reversed(self.sizes):  # what takes longest to compile comes first
            self.step.step(size, greedy, nucleus, blocks=1)  # all blocks launch the same kernels

    def capture(self, launch):
        """Capture launch() as a CUDA graph and return its replay (on the CPU, launch itself). It is
        rehearsed once, to compile and make buffers, which a capture must not do."""
        device = self.cache.k.device
        if device.type != "cuda":
            return launch
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            launch()
        self.pool = self.pool or graph.pool()
        # A prefill, or a step of more rows than plan.FEW, decodes weights into a buffer that is
        # replaced when a larger weight comes: it must be kept.
        self.scratch.append([*plan.SPACE.get(device, ())])
        return graph.replay


ENGINES = weakref.WeakKeyDictionary()  # model -> (fingerprint, Graphs, rows asked for)
UPDATES = weakref.WeakKeyDictionary()  # model -> bytes that an update takes besides the model


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


def make_room(model):
    """Free the engine on `model` if an update would not fit beside it."""
    if model in ENGINES and free_bytes() < UPDATES.get(model, 0):
        release(model)


def plan_update(model, args, params, share=1.0):
    """Settle train.py's --micro-batch-tokens and --checkpointing by the free memory (share: 2 for
    all of it, not half), and print what takes how much. A resumed run keeps its micro-batches:
    others round differently."""
    longest = args.max_prompt + args.max_new_tokens
    later = 12 * sum(p.numel() for p in params)  # gradients and two moments, at the first update
    free = min(ranks.gather(free_bytes())) - later
    tokens, recompute = memory.fit_update(model.config, free * share, longest,
                                          args.micro_batch_tokens, args.checkpointing)
    peak = sum(memory.update_bytes(model.config, max(tokens, longest), recompute))
    UPDATES[model] = later + peak
    gib = [n / memory.GIB for n in (torch.cuda.memory_allocated(), later, peak, free)]
    print("GiB: {:.1f} model and adapter, {:.1f} gradients and moments, {:.1f} at the peak of "
          "an update, {:.1f} free for it and for rollouts".format(*gib))
    args.micro_batch_tokens, args.checkpointing = tokens, "on" if recompute else "off"


def fingerprint(model):
    """What a captured graph holds on to: projections, where the other weights lie, and what it has
    as numbers."""
    norms = [m for m in model.modules() if isinstance(m, qwen.RMSNorm)]
    weights = [model.embed.weight, model.lm_head.weight]
    weights += [t for m in norms for t in (m.weight, m.noise)]
    return ([identity(m) for _, m in projections(model)], [t.data_ptr() for t in weights],
            [m.eps for m in norms], model.valid_vocab, model.config.rope_theta,
            model.config.rope_scaling)


def own_code(model):
    """What of the model the kernels do not have, in a few words: a function, a noise, a forward or
    a hook of the user's own, a parameter that gets no gradient; None if there is none."""
    if name := replaced(model):
        return f"{name} is your own, and the kernels do not call it"
    if torch.nn.modules.module._has_any_global_hook():
        return "all modules have a hook of your own"
    for name, m in model.named_modules():
        if not usual_noise(m):
            return (f"{name}.noise is a noise of your own, and the kernels read that of the norms "
                    "alone")
        if changed(m):
            return f"{name or 'the model'} has a class, a forward or a hook of your own"
        if name.endswith((".o_proj", ".gate_up_proj", ".down_proj")) and m.base.bias is not None:
            return f"{name} has a bias, and the kernels add none there"
        trained = any(p is not None and p.requires_grad for p in m._parameters.values())
        known = isinstance(m, qwen.RMSNorm | lora.LoRALinear)
        if trained and (not known or name.endswith((".q_norm", ".k_norm"))):  # Qwen3's of heads
            return (f"{name} has parameters that are trained, and the kernels train adapters and "
                    "the norms of blocks alone")
    return None


def engine_for(model, slots, max_len, longest):
    """The model's Graphs engine for (at most) `slots` rows of max_len tokens, whose prompts have up
    to `longest`; the last call's if it will do. ValueError if not even one row fits the free
    memory."""
    mark, old, wanted = ENGINES.get(model, (None, None, 0))
    if (mark == fingerprint(model) and max(old.slots, wanted) >= slots
            and old.max_len >= max_len and old.prefill_tokens >= longest):
        return old
    if old is not None:  # training and evaluation take turns: make one that serves both
        slots, max_len = max(slots, wanted), max(max_len, old.max_len)
        del old
        release(model)
    max_len = -(-max_len // 64) * 64
    config, weight = model.config, model.embed.weight
    scratch = sum(t.nbytes for t in plan.SPACE.get(weight.device, ()))  # what is there already
    free = free_bytes() + min(scratch, memory.gemm_scratch(config))
    row = memory.row_bytes(config, max_len, weight.element_size())
    # for exact sums the head multiplies rows that are not there
    spare = 8 * logprobs.ROWS * config.vocab_size * exact(model)
    for size in memory.PREFILL_TOKENS:
        prefill_tokens = max(size, longest)  # a prompt is computed at once
        fixed = memory.prefill_bytes(config, prefill_tokens) + spare
        fit = int((free - fixed) // row)
        if fit >= min(slots, 8):
            break
    if fit < 1:
        raise ValueError(f"--max-new-tokens: one row of {max_len} tokens needs "
                         f"{(row + fixed) / 2**30:.1f} GiB, {free / 2**30:.1f} are free; lower "
                         "it, shorten the prompts, or choose a smaller --model or another --quant")
    engine = Graphs(model, min(slots, fit), max_len, prefill_tokens)
    ENGINES[model] = (fingerprint(model), engine, slots)  # it may have moved the weights
    return engine


def together(items, size, most):
    """Lists of neighbouring items whose sizes come to `most` or less; a larger item is alone."""
    lists, total = [], 0  # total: of the last list
    for item in items:
        if not lists or total + size(item) > most:
            lists.append([])
            total = 0
        lists[-1].append(item)
        total += size(item)
    return lists


def prefill(model, engine, prompts, slots):
    """Fill the cache of slots[i] with all of prompts[i] but its last token, which the first decode
    step reads. Prompts run laid end to end, at most engine.prefill_tokens at a time."""
    todo = [(p[:-1], slot) for p, slot in zip(prompts, slots, strict=True) if len(p) > 1]
    for batch in together(todo, lambda t: len(t[0]), engine.prefill_tokens):
        engine.prompts.run(model, *zip(*batch, strict=True), engine.capture)
