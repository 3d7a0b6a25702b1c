"""
Benchmarks on one GPU: `kernels`, `rollout`, `step` and `plain`, described at the functions of these
names. The first three measure their ceiling in the same run, before the numbers.

Rows are merged into --out as they are measured, so that a long table can be made in parts;
lab/tables.py puts them into docs/measured.md. Kernels are timed as one CUDA graph of many launches,
median of its replays: what is measured is the GPU, not Python.

    python lab/bench.py kernels
    python lab/bench.py rollout 7b:nvfp4:16:1,8,64 7b:none:16:1,8,64

Shapes: M rows, N outputs, K inputs of a GEMM.
"""
import argparse
import gc
import json
import math
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import checkpoint, command, flags
from plumbing.files import whole
from plumbing.run import peak_gib

import torch
import triton
import triton.language as tl

import grpo
import lora
import model as qwen
import nvfp4
import sample
import train
from fast import batches, engine, memory
from fast import gemm as fast_gemm
from fast.layout import tile
from lab import archive
from lab.tables import HOME, RESULTS, ROWS, card

# hidden, intermediate, layers, heads, kv heads, vocabulary, tied head of Qwen2.5
SIZES = {"0.5b": (896, 4864, 24, 14, 2, 151936, True),
         "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
         "3b": (2048, 11008, 36, 16, 2, 151936, True),
         "7b": (3584, 18944, 28, 28, 4, 152064, False),
         "14b": (5120, 13824, 48, 40, 8, 152064, False),
         "32b": (5120, 27648, 64, 40, 8, 152064, False),
         "72b": (8192, 29568, 80, 64, 8, 152064, False)}
LAYERS = ("qkv", "o", "gate_up", "down")


def config(size):
    C, F, L, H, kv, V, tied = SIZES[size]
    return qwen.Config(V, C, F, L, H, kv, C // H, rope_theta=1e6, tie_word_embeddings=tied)


def linear(name):
    """(N, K) of a layer, named as in "0.5b.down"."""
    size, layer = name.rsplit(".", 1)
    return memory.linears(config(size))[f"{layer}_proj"][:2]


def floor_bytes(c, quant, rank, rows, length):
    """Bytes that one decode step must read: weights, LM head, adapter in 16 bits, keys and values
    of `length` tokens."""
    w = memory.weights(c, quant)
    head = w["lm_head"] or w["embeddings"]
    return (w["attention"] + w["mlp"] + head + 2 * memory.lora_parameters(c, rank)
            + rows * length * memory.kv_per_token(c))


def revision():
    """The commit that is measured, with a + if files differ from it, results aside; "" without."""
    ask = "git describe --always --abbrev=8 && git diff --quiet HEAD -- :!results || echo +"
    out = subprocess.run(ask, shell=True, cwd=HOME, capture_output=True, text=True)
    return "" if out.stderr else "".join(out.stdout.split())


def record(path, row, key):
    """Print a row and write it into the JSON list at `path`, where it replaces one with the same
    values of `key`. A row of what did not fit lacks some of them."""
    row = archive.short(row, 4) | {"revision": revision()}
    print(*(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
          flush=True)
    old = json.loads(path.read_text()) if path.is_file() else []
    kept = [r for r in old if any(r.get(k) != row.get(k) for k in key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as part:
        part.write_text("[\n" + ",\n".join(map(json.dumps, [*kept, row])) + "\n]\n")


# ---- measurements


def build(c, quant, path="fast"):
    """A model of random weights on the GPU, and the GiB that it takes."""
    gc.collect()  # a model before this one may be part of a reference cycle
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = qwen.build(c, checkpoint.RandomCheckpoint(), "cuda", quant=quant)
    sample.set_engine(model, path)
    return model, (torch.cuda.memory_allocated() - before) / memory.GIB


def timed(f):
    """(seconds, result) of f(), the GPU's work included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    out = f()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, out


def graph_time(f, things, at_least=20):
    """Median microseconds of f on one of `things`, taken in turn in one CUDA graph. Few replays:
    under seconds of load the card lowers its clock, as it did not for the peers' figures."""
    calls = [partial(f, t) for t in things * math.ceil(at_least / len(things))]
    for call in calls:  # compile, check each weight
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []  # by the card's clock: a host's may tick in steps of 8 ms
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[1:])


@triton.jit
def read(p, out, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK * 4):
        for j in tl.static_range(4):
            at = i + j * tl.num_programs(0) * BLOCK + tl.arange(0, BLOCK)
            acc += tl.load(p + at, mask=at < n, other=0)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def read_ceiling():
    """GB/s of a kernel that only reads (one GiB): the ceiling for anything with few rows."""
    data = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(sms * 8, dtype=torch.int32, device="cuda")
    us = min(graph_time(lambda b, g=g: read[sms * g,](data, out, len(data), b, num_warps=b // 512),
                        [block]) for g, block in ((2, 4096), (4, 2048), (8, 2048)))
    print(f"{torch.cuda.get_device_name()}, read ceiling {data.nbytes / us / 1e3:.0f} GB/s")
    return data.nbytes / us / 1e3


def kernels(args):
    """The FP4 GEMM against cuBLAS on bfloat16 weights, on the linear layers of the 7B and 32B."""
    ceiling = read_ceiling()
    for name in map(".".join, product(("7b", "32b"), LAYERS)):
        N, K = linear(name)
        # more weights than L2 holds
        dense = [torch.randn(N, K, dtype=torch.bfloat16, device="cuda")
                 for _ in range(max(2, math.ceil(2.4e8 / (2 * N * K))))]
        for fmt in nvfp4.FORMATS if name in ("7b.gate_up", "7b.down") else ["nvfp4"]:
            weights = [tile(nvfp4.quantize(torch.randn(N, K, device="cuda"), fmt))
                       for _ in range(max(2, math.ceil(4.8e8 / (N * K))))]
            for M, back in [(M, False) for M in ROWS] + [(2048, True)]:
                row = {"fmt": fmt, "shape": name} | gemm(weights, dense, M, back, ceiling)
                record(args.out, row, ("fmt", "shape", "pass", "M"))


def gemm(weights, dense, M, back, ceiling):
    """A row: the GEMM of M rows with `weights` (Tiled) and with `dense`, both (N, K)."""
    (N, K), fmt = dense[0].shape, weights[0].fmt
    x = torch.randn(M, N if back else K, dtype=torch.bfloat16, device="cuda")
    if back:
        ours, theirs = (lambda q: fast_gemm.scaled(x, *fast_gemm.decoded(q))), (lambda w: x @ w)
    else:
        ours, theirs = (lambda q: fast_gemm.matmul(x, q)), (lambda w: x @ w.T)
    calls = 8 if back else 24 if M <= 1024 else 4
    us, cublas = graph_time(ours, weights, calls), graph_time(theirs, dense, calls)
    gbps = (N * K * memory.BITS[fmt] / 8 + 2 * M * (N + K)) / us / 1e3
    some, w = torch.randperm(M, device="cuda")[:64], weights[0].dequantize().double()
    exact = x[some].double() @ (w if back else w.T)
    error = (ours(weights[0])[some] - exact).norm() / exact.norm()
    return {"pass": "backward" if back else "forward", "N": N, "K": K, "M": M, "us": us,
            "cublas_us": cublas, "speedup": cublas / us, "read_gbps": gbps,
            "pct_read": 100 * gbps / ceiling, "rel_err": error.item()}


def rollout(args):
    """Decoding throughput of sample.generate on random weights of true shapes."""
    ceiling = read_ceiling()
    for text in args.configs:
        size, quant, rank, todo = text.split(":")
        rank, c = int(rank), config(size)
        model, weights_gib = build(c, quant)
        if rank:
            for p in lora.add_lora(model, rank, rank):
                torch.nn.init.normal_(p, std=0.01)
        torch.cuda.reset_peak_memory_stats()
        for what in todo.split(","):
            row = {"size": size, "quant": quant, "lora_rank": rank, "prompt": args.prompt,
                   "new": args.new, "weights_gib": weights_gib}
            if what == "queue":
                row |= queue(model, args)
            else:
                row |= rows_alive(model, what, args)
                floor = floor_bytes(c, quant, rank, row["rows"], args.prompt + args.new / 2)
                row["floor_ms"] = floor / ceiling / 1e6
            record(args.out, row | {"peak_gib": peak_gib()},
                   ("size", "quant", "lora_rank", "prompt", "rows", "kind"))
        engine.release(model)
        del model  # before the next one is built


def draw(model, prompts, n, new, rows=None):
    """(seconds, samples) of n samples a prompt, `rows` side by side."""
    rows = rows or len(prompts) * n
    return timed(lambda: sample.generate(model, prompts, n, new, max_rows=rows, seed=1))


def random_prompts(count, length):
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 150000, (count, length), generator=g).tolist()


def random_completions(count, prompt, new, group=1):
    """`count` Completions of `new` tokens each, `group` of a prompt."""
    texts = random_prompts(count, prompt + new)
    return [grpo.Completion({}, texts[i - i % group][:prompt], ids[prompt:], [-12.0] * new, True,
                            advantage=i % 3 - 1.0) for i, ids in enumerate(texts)]


def decoding(model, prompts, n, new, warm):
    """Seconds to the first token of n samples a prompt, and of a decode step of all of them, host
    included. A first rollout of `warm` tokens compiles and captures."""
    draw(model, prompts, n, warm)
    first = min(draw(model, prompts, n, 1)[0] for _ in range(3))
    last, out = draw(model, prompts, n, new)
    assert all(len(s.ids) == new for group in out for s in group)
    return first, (last - first) / (new - 1)


def rows_alive(model, what, args):
    """`what`: "8" rows of one prompt, or "8x16": 16 samples of each of 8 prompts."""
    groups, n = map(int, what.split("x")) if "x" in what else (1, int(what))
    rows = groups * n
    # one engine, whatever is drawn
    engine.engine_for(model, rows, args.prompt + args.new, args.prompt)
    first, step = decoding(model, random_prompts(groups, args.prompt), n, args.new, warm=2)
    return {"rows": rows, "kind": what if "x" in what else "rows", "decode_tok_s": rows / step,
            "step_ms": 1e3 * step, "prefill_s": first}


def queue(model, args, requests=256, slots=64):
    """Requests of log-normal length (median 300, at most 2048) through 64 slots: tokens/s over
    the whole, prefills included."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randn(requests, generator=g).mul(0.7).exp().mul(300).clamp(8, 2048).int()
    lengths = lengths.tolist()
    prompts = random_prompts(requests, args.prompt)
    graphs = engine.engine_for(model, slots, args.prompt + max(lengths), args.prompt)
    for rows in graphs.sizes:  # capture each batch size
        draw(model, prompts[:1], rows, 2)
    first, _ = draw(model, prompts[:slots], 1, 1)
    seconds, out = draw(model, prompts, 1, lengths, slots)
    tokens = sum(len(group[0].ids) for group in out)
    return {"rows": slots, "kind": "queue", "requests": requests, "prefill_s": first,
            "decode_tok_s": tokens / seconds}


def step(args):
    """One step of train.py on random weights of true shapes: seconds of rollout and update, share
    of the matmul rate, and memory; a row without seconds did not fit."""
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ceiling = 2 * 8192**3 / graph_time(square.matmul, [square]) / 1e6  # TFLOP/s
    del square
    print(f"{torch.cuda.get_device_name()}, bfloat16 matmul {ceiling:.0f} TFLOP/s")
    if args.card_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.card_gib * memory.GIB / total)
    for size, quant in product(args.sizes, args.quants):
        row = {"size": size, "quant": quant, "lora_rank": args.rank, "prompt": args.prompt,
               "completions": args.completions, "group": args.group, "new": args.new,
               "card_gib": args.card_gib}
        try:
            phases(row, config(size), ceiling, args)
        except torch.OutOfMemoryError:
            row["out_of_memory"] = True
        record(args.out, row, ("size", "quant", "lora_rank", "completions", "group", "prompt",
                               "new", "micro_batch", "checkpointing", "card_gib"))


def phases(row, c, ceiling, args):
    """Measure one size and format and add the figures to its row."""
    model, row["weights_gib"] = build(c, row["quant"])
    optimizer = grpo.AdamW(lora.add_lora(model, args.rank, args.rank), 1e-6)
    settings = train_flags("--max-prompt", args.prompt, "--max-new-tokens", args.new)
    engine.plan_update(model, settings, optimizer.params, args.share)
    model.checkpointing = settings.checkpointing == "on"
    row["micro_batch"], row["checkpointing"] = settings.micro_batch_tokens, model.checkpointing
    if args.rollout:
        prompts = random_prompts(args.completions, args.prompt)
        torch.cuda.reset_peak_memory_stats()
        row["capture_s"], _ = draw(model, prompts, 1, 2)  # compiles and captures
        row["rollout_s"] = draw(model, prompts, 1, args.new)[0]
        row["rollout_gib"] = peak_gib()
        engine.make_room(model)
    completions = random_completions(args.completions, args.prompt, args.new, args.group)
    # a prompt's states are computed once for several of its completions
    row["tokens"] = sum(map(batches.size, batches.by_prompt(completions, row["micro_batch"])))
    torch.cuda.reset_peak_memory_stats()
    update = partial(grpo.update, model, optimizer, completions, settings)
    seconds = [timed(update)[0] for _ in range(4)]
    row["first_update_s"] = seconds[0]  # it compiles
    row["update_s"] = statistics.median(seconds[1:])
    row["update_gib"], row["peak_gib"] = peak_gib(), max(peak_gib(), row.get("rollout_gib", 0))
    # forward and dL/dx of the blocks, and of the head on the completions; no recomputation counted
    blocks = sum(n * k for n, k, _ in memory.linears(c).values()) * c.num_hidden_layers
    head = c.vocab_size * c.hidden_size
    flops = 4 * (row["tokens"] * blocks + args.completions * args.new * head)
    row["share"] = flops / row["update_s"] / 1e12 / ceiling


def plain(args):
    """One of --engine's paths beside another: a decode step and an update of 8 completions of 1,024
    tokens with checkpointing, NVFP4 and LoRA 16. The fastest of three measurements of the step and
    of four updates: a card that lowers its clock for a moment has spoiled single ones."""
    slow, quick = args.paths[0], args.paths[-1]
    for size in args.sizes:
        rows = 64 if size in ("0.5b", "1.5b", "3b") else 8
        row = {"size": size, "rows": rows} | by_paths(size, args.paths, rows)
        for what in ("step_ms", "update_s") if slow != quick else ():
            row[f"times_{what}"] = row[f"{slow}_{what}"] / row[f"{quick}_{what}"]
        record(args.out, row, ("size", "rows"))


def train_flags(*given):
    """train.py's flags: the paper's, but for those given."""
    return flags.parse(train.COMMAND, ["--model", "random", *map(str, given)])


def by_paths(size, paths, rows):
    """Figures of a row of `plain`: a decode step of `rows` rows and an update by each path."""
    model, _ = build(config(size), "nvfp4", "plain")
    model.checkpointing = True
    optimizer, out = grpo.AdamW(lora.add_lora(model, 16, 16), 1e-6), {}
    completions = random_completions(8, 256, 1024)
    settings = train_flags("--micro-batch-tokens", 16384)
    update = partial(grpo.update, model, optimizer, completions, settings)
    torch.cuda.reset_peak_memory_stats()
    for path in paths:
        sample.set_engine(model, path)
        prompts = random_prompts(rows, 257)  # no bucket ends within: one capture, and in both
        steps = [decoding(model, prompts, 1, 144, warm=144)[1] for _ in range(3)]
        out[f"{path}_step_ms"] = 1e3 * min(steps)
        out[f"{path}_update_s"] = min(timed(update)[0] for _ in range(4))  # the first compiles
        out[f"{path}_gib"] = peak_gib()
        torch.cuda.reset_peak_memory_stats()
    return out


# ---- flags


def rollout_config(text):
    """An argparse type: a model of `rollout`, and the rows to measure it at."""
    rows = r"([1-9]\d*(x[1-9]\d*)?|queue)"
    sizes, formats = "|".join(SIZES), "|".join(memory.BITS)
    if not re.fullmatch(rf"({sizes}):({formats}):\d+:{rows}(,{rows})*", text):
        raise argparse.ArgumentTypeError(f"{text}: expected size:format:rank:rows, as "
                                         f"7b:nvfp4:16:1,8; sizes are {', '.join(SIZES)}")
    return text


def parse_args(argv=None):
    parser, each = command.Parser(description="Benchmarks on one GPU."), {}
    sub = parser.add_subparsers(dest="what", required=True)
    for f in (kernels, rollout, step, plain):
        name = f.__name__
        each[name] = sub.add_parser(name, help=f.__doc__, description=f.__doc__,
                                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        each[name].set_defaults(run=f)
        each[name].add_argument("--out", type=Path, help="JSON list that the rows are merged into "
                                f"(default: {name}_CARD.json in results/)")
    some = {"nargs": "+", "metavar": "NAME"}
    add = each["rollout"].add_argument
    add("configs", nargs="+", type=rollout_config, metavar="CONFIG",
        help="size:format:LoRA rank (0: none):rows, rows as 1,8 or 8x16 or queue")
    add("--prompt", type=int, default=256, help="tokens of a prompt")
    add("--new", type=int, default=512, help="tokens drawn")
    add = each["step"].add_argument
    add("--sizes", **some, choices=SIZES, default=["3b", "7b", "14b", "32b"], help="models")
    add("--quants", **some, choices=memory.BITS, default=["none", "nvfp4"], help="formats")
    add("--rank", type=int, default=16, help="of the adapter")
    add("--completions", type=int, default=8, help="of an update")
    add("--group", type=int, default=1, help="completions of a prompt")
    add("--prompt", type=int, default=256, help="tokens of a prompt")
    add("--new", type=int, default=2048, help="tokens of a completion")
    add("--share", type=float, default=1.0, help="2: take all that is free, not half")
    add("--card-gib", type=float, default=0, help="limit the memory, as of a smaller card")
    add("--no-rollout", dest="rollout", action="store_false", help="the update alone")
    add = each["plain"].add_argument
    add("--sizes", **some, choices=SIZES, default=["0.5b", "3b", "7b"], help="models")
    add("--paths", **some, choices=("plain", "fast", "exact"), default=["plain", "fast"],
        help="one, or two, the slower one first")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error(f"{args.what}: needs a CUDA device")
    args.out = args.out or RESULTS / f"{args.what}_{card()}.json"
    return args


def main():
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    sys.exit(command.run("lab/bench.py", main))
