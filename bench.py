"""
Benchmarks on one GPU: the FP4 GEMM, rollouts, the update. Each measures its ceiling first, in the same run, then the number.

    kernels   marlin_triton against cuBLAS on bfloat16 weights, on the linear layers of Qwen2.5 7B and 32B. Weights rotate
              through more than 200 MB, so that the L2 cache holds none of them when their turn comes
    rollout   sample.generate on random weights of true shapes, every row alive to the end; --profile: where a step's time goes
    step      one update of train.py: log-probs, backward, AdamW
    report    no measurement: the README's tables and the pictures, from the JSON that the others wrote

Rows are merged into --out (a row measured again replaces the old one), so that a long table can be made in parts. Kernels are
timed as one CUDA graph of many launches, median of five replays: what is measured is the GPU, not Python. The figures of Marlin
and vLLM were measured on an H100 of the same kind with the same shapes and the same method.

    python bench.py kernels
    python bench.py rollout 7b:nvfp4:16:1,8,64 7b:none:16:1,8,64     # size : format : LoRA rank (0: none) : rows

Shapes: M rows, N outputs, K inputs of a GEMM.
"""
import argparse
import json
import math
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

import engine
import lora
import marlin_triton
import model as qwen
import nvfp4
import plan
import sample
import train
from runtime import flags

RESULTS = Path(__file__).parent / "results"
# hidden, intermediate, layers, heads, kv heads, vocabulary, tied head of Qwen2.5
SHAPES = {"0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
          "3b": (2048, 11008, 36, 16, 2, 151936, True), "7b": (3584, 18944, 28, 28, 4, 152064, False),
          "14b": (5120, 13824, 48, 40, 8, 152064, False), "32b": (5120, 27648, 64, 40, 8, 152064, False),
          "72b": (8192, 29568, 80, 64, 8, 152064, False)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
MARLIN_ROWS = ROWS[:-1]
# speed-up of Marlin (vLLM 0.33, NVFP4 weights, bfloat16 activations) over cuBLAS at MARLIN_ROWS
MARLIN = {"7b.qkv": (1.23, 1.25, 1.27, 1.25, 1.17, 1.08, 0.78, 0.57, 0.50, 0.40, 0.37, 0.36),
          "7b.o": (1.19, 1.20, 1.19, 1.20, 1.39, 0.99, 0.72, 0.54, 0.50, 0.41, 0.37, 0.41),
          "7b.gate_up": (2.50, 2.58, 2.59, 2.58, 2.45, 2.24, 1.67, 0.94, 0.54, 0.40, 0.42, 0.44),
          "7b.down": (1.94, 2.11, 2.13, 2.14, 1.96, 1.80, 1.24, 0.79, 0.62, 0.38, 0.45, 0.47),
          "32b.qkv": (1.96, 2.15, 2.21, 2.20, 1.83, 1.46, 1.01, 0.77, 0.52, 0.44, 0.47, 0.40),
          "32b.o": (1.26, 1.58, 1.58, 1.59, 1.50, 1.31, 0.92, 0.66, 0.56, 0.43, 0.39, 0.44),
          "32b.gate_up": (2.80, 2.89, 2.88, 2.87, 2.71, 2.52, 1.83, 0.97, 0.52, 0.46, 0.45, 0.44),
          "32b.down": (2.50, 2.68, 2.69, 2.70, 2.56, 1.94, 1.36, 0.99, 0.61, 0.42, 0.41, 0.47)}
# decode tokens/s of vLLM 0.24: (size, format, LoRA rank): {rows: tokens/s}
VLLM = {("7b", "none", 16): {1: 129, 2: 264, 8: 1031, 32: 3978, 64: 7173, 128: 10722},
        ("7b", "nvfp4", 16): {1: 190, 2: 397, 8: 1552, 32: 5378, 64: 8091},
        ("7b", "nvfp4", 0): {1: 273, 8: 2097, 64: 9956, 128: 12348},
        ("32b", "nvfp4", 16): {1: 65, 2: 137, 8: 530, 32: 1697}}
ROLLOUTS = ("7b:nvfp4:16:1,2,8,32,64,128,8x16,queue 7b:nvfp4:0:1,8,64,128 7b:nvfp4:32:8 7b:nvfp4:64:8 7b:mxfp4:16:8 7b:nf4:16:8 "
            "7b:none:16:1,2,8,32,64,128 14b:nvfp4:16:1,8 14b:none:16:1,8 32b:nvfp4:16:1,2,8,32 32b:none:16:1,8").split()


# ---- measuring


@triton.jit
def read(p, out, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK * 4):
        for j in tl.static_range(4):
            at = i + j * tl.num_programs(0) * BLOCK + tl.arange(0, BLOCK)
            acc += tl.load(p + at, mask=at < n, other=0)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def graph_time(calls, repeats=5):
    """Median microseconds of one call, the `calls` (functions of no argument) captured back to back in one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compile, check each weight, and let cuBLAS pick its workspace, before the capture
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def rotate(f, things, at_least=20):
    """graph_time's calls: f on each of `things` in turn, all of them at least once."""
    return [lambda t=t: f(t) for t in things * math.ceil(at_least / len(things))]


def read_ceiling(megabytes=1024):
    """GB/s of a kernel that only reads: the ceiling of every GEMM with few rows."""
    data = torch.zeros(megabytes << 18, dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(sms * 8, dtype=torch.int32, device="cuda")
    us = min(graph_time([lambda g=g, b=b: read[(sms * g,)](data, out, data.numel(), BLOCK=b, num_warps=b // 512)] * 3)
             for g, b in ((2, 4096), (4, 2048), (8, 2048)))
    return data.numel() * 4 / us / 1e3


def config(size):
    C, I, L, H, kv, V, tied = SHAPES[size]
    return qwen.Config(V, C, I, L, H, kv, C // H, rope_theta=1e6, tie_word_embeddings=tied)


def merge(path, rows, key):
    """Write `rows` into the JSON list at `path`; old rows with the same values of `key` go."""
    old = json.loads(path.read_text()) if path.is_file() else []
    new = {tuple(r[k] for k in key) for r in rows}
    kept = [r for r in old if tuple(r[k] for k in key) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text("[\n" + ",\n".join(json.dumps(r) for r in kept + rows) + "\n]\n")
    os.replace(temporary, path)


def rounded(row):
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


# ---- kernels


def random_weight(fmt, N, K):
    """A Quantized of random codes and scales: speed and rounding do not depend on where the numbers come from."""
    codes = torch.randint(0, 256, (N, -(-K // marlin_triton.CHUNK) * 64), dtype=torch.uint8, device="cuda")
    blocks = (N, K // marlin_triton.BLOCK[fmt])
    if fmt == "nf4":
        scale = torch.rand(blocks, device="cuda") + 0.1
    else:
        low, high = (48, 72) if fmt == "nvfp4" else (118, 124)
        scale = torch.randint(low, high, blocks, dtype=torch.uint8, device="cuda")
    scale = scale.view(torch.float8_e4m3fn) if fmt == "nvfp4" else scale
    return nvfp4.Quantized(fmt, (N, K), codes, scale, torch.full((N,), 0.01 if fmt == "nvfp4" else 1.0, device="cuda"))


def relative_error(y, x, w):
    """|y - x w^T| / |x w^T| in float64, of at most 64 rows; w (N, K) float32."""
    rows = torch.randperm(len(x), device="cuda")[:64]
    error = norm = 0.0
    for n in range(0, len(w), 8192):
        exact = x[rows].double() @ w[n : n + 8192].double().T
        error += (y[rows, n : n + 8192].double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    return math.sqrt(error / norm)


def kernels(args):
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}, read ceiling {ceiling:.0f} GB/s")
    print(f"{'shape':<12}{'fmt':<7}{'M':>7}{'us':>9}{'cuBLAS':>9}{'speed-up':>10}{'Marlin':>8}{'read':>7}{'rel. err':>10}")
    results = []
    for name in args.shapes:
        size, layer = name.split(".")
        N, K, _ = plan.linears(config(size))[f"{layer}_proj"]
        dense = [torch.randn(N, K, dtype=torch.bfloat16, device="cuda") for _ in range(max(2, math.ceil(2.4e8 / (2 * N * K))))]
        for fmt in args.formats if name in ("7b.gate_up", "7b.down") else args.formats[:1]:
            weights = [random_weight(fmt, N, K) for _ in range(max(2, math.ceil(2.4e8 / (N * K / 2))))]
            w, nbytes = nvfp4.dequantize(weights[0]), N * K * plan.BITS[fmt] / 8
            for back in (False, True):
                for M in args.rows if not back else (2048,):
                    x = torch.randn(M, N if back else K, dtype=torch.bfloat16, device="cuda")
                    gemm = partial(marlin_triton.many, transposed=True) if back else marlin_triton.product
                    ours, theirs = partial(gemm, x), (x.matmul if back else lambda d, x=x: x @ d.T)
                    calls = 8 if back else 24 if M <= 1024 else 4
                    us, cublas = graph_time(rotate(ours, weights, calls)), graph_time(rotate(theirs, dense, calls))
                    err = relative_error(ours(weights[0]), x, w.T if back else w)
                    gbps = (nbytes + 2 * M * (N + K)) / us / 1e3
                    results.append(rounded({
                        "fmt": fmt, "shape": name, "pass": "backward" if back else "forward", "N": N, "K": K, "M": M, "us": us,
                        "cublas_us": cublas, "speedup": cublas / us, "read_gbps": gbps, "pct_read": 100 * gbps / ceiling,
                        "rel_err": err}))
                    marlin = f"{MARLIN[name][MARLIN_ROWS.index(M)]:.2f}" if M in MARLIN_ROWS and not back else "-"
                    print(f"{name:<12}{fmt:<7}{f'dx {M}' if back else M:>7}{us:>9.1f}{cublas:>9.1f}{cublas / us:>10.2f}"
                          f"{marlin:>8}{gbps / ceiling:>7.0%}{err:>10.1e}", flush=True)
            del weights, w
        del dense
    merge(args.out, results, ("fmt", "shape", "pass", "M"))
    print(json.dumps(results))


# ---- rollouts


def timed(f):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    out = f()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, out


def floor_bytes(c, quant, rank, rows, length):
    """Bytes that one decode step must read, by part: weights, LM head, adapter in 16 bits, keys and values of `length` tokens."""
    w = plan.weights(c, quant)
    return {"linear": w["attention"] + w["mlp"], "head": w["lm_head"] or w["embeddings"],
            "lora": 2 * plan.lora_parameters(c, rank), "kv": rows * length * plan.kv_per_token(c)}


def rollout(args):
    ceiling = read_ceiling()
    print(f"{torch.cuda.get_device_name()}, read ceiling {ceiling:.0f} GB/s, prompt {args.prompt}, {args.new} new tokens")
    print(f"{'config':<18}{'rows':>7}{'tokens/s':>10}{'vLLM':>8}{'step ms':>9}{'floor':>7}{'x floor':>9}{'first token s':>15}"
          f"{'peak GiB':>10}")
    built, results = None, []
    for text in args.configs:
        size, quant, rank, todo = text.split(":")
        rank, c = int(rank), config(size)
        c.num_hidden_layers = args.layers or c.num_hidden_layers
        if built != (size, quant):
            model = None
            torch.cuda.empty_cache()
            model, built = qwen.build(c, qwen.RandomCheckpoint(), "cuda", torch.bfloat16, quant), (size, quant)
        adapt(model, rank)
        torch.cuda.reset_peak_memory_stats()
        weights_gib = torch.cuda.memory_allocated() / plan.GIB
        for what in todo.split(","):
            row = {"size": size, "quant": quant, "lora_rank": rank, "prompt": args.prompt, "new": args.new,
                   "weights_gib": weights_gib}
            row |= queue(model, args) if what == "queue" else rows_alive(model, c, quant, rank, what, args, ceiling)
            row = rounded(row | {"peak_gib": torch.cuda.max_memory_allocated() / plan.GIB})
            results.append(row)
            vllm = VLLM.get((size, quant, rank), {}).get(row["rows"], "-")
            print(f"{f'{size} {quant} r{rank}':<18}{what:>7}{row['decode_tok_s']:>10.0f}{vllm:>8}{row.get('step_ms', 0):>9.2f}"
                  f"{row.get('floor_ms', 0):>7.2f}{row.get('step_ms', 0) / row.get('floor_ms', 1):>9.2f}{row['prefill_s']:>15.3f}"
                  f"{row['peak_gib']:>10.1f}", flush=True)
            if args.profile and what.isdigit():
                profile(model, int(what), args.prompt, floor_bytes(c, quant, rank, int(what), args.prompt), ceiling)
        engine.release(model)
        if not args.layers:
            merge(args.out, results, ("size", "quant", "lora_rank", "rows", "kind"))
    print(json.dumps(results))


def adapt(model, rank):
    """Put an adapter of `rank` around the model's linears (0: none), instead of the one that is there."""
    for block in model.layers:
        for owner in (block.attn, block.mlp):
            for name, m in list(owner.named_children()):
                setattr(owner, name, getattr(m, "base", m))
    if rank:
        for p in lora.add_lora(model, rank, rank):
            torch.nn.init.normal_(p, std=0.01)


def draw(model, prompts, n, new):
    return sample.generate(model, prompts, n, max_new_tokens=new, max_rows=len(prompts) * n, seed=1)


def random_prompts(count, length):
    return torch.randint(0, 150000, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def rows_alive(model, c, quant, rank, what, args, ceiling):
    """`what`: "8" rows of one prompt, or "8x16": 16 samples of each of 8 prompts."""
    groups, n = map(int, what.split("x")) if "x" in what else (1, int(what))
    rows, prompts = groups * n, random_prompts(groups, args.prompt)
    engine.graphs(model, rows, args.prompt + args.new, 1.0)  # one engine for the short and the long run
    draw(model, prompts, n, 2)  # compiles and captures
    first, _ = timed(lambda: draw(model, prompts, n, 1))
    whole, out = timed(lambda: draw(model, prompts, n, args.new))
    assert all(len(s.ids) == args.new for group in out for s in group)
    step = (whole - first) / (args.new - 1)
    floor = sum(floor_bytes(c, quant, rank, rows, args.prompt + args.new / 2).values()) / ceiling / 1e9
    replay = replayer(model, rows, args.prompt + args.new // 2)
    alone, _ = timed(lambda: [replay() for _ in range(40)])
    return {"rows": rows, "kind": what if "x" in what else "rows", "decode_tok_s": rows / step, "step_ms": 1e3 * step,
            "replay_ms": 1e3 * alone / 40, "prefill_s": first, "floor_ms": 1e3 * floor}


def replayer(model, rows, tokens):
    """A function that decodes one step of `rows` rows, `tokens` live in each, by the CUDA graph alone: no host's loop."""
    graphs = engine.ENGINES[model][1]
    graphs.step.cache.length.fill_(tokens)
    replay = graphs.launcher(rows)

    def step():
        graphs.step.count.zero_()
        replay()

    step()  # captures, if it is the first of so many rows
    return step


def queue(model, args, requests=256, slots=64):
    """Requests of log-normal length (median 300, at most 2048) through 64 slots: tokens/s, prefills included, over the whole."""
    g = torch.Generator().manual_seed(0)
    lengths = (torch.randn(requests, generator=g).mul(0.7).exp() * 300).clamp(8, 2048).long().tolist()
    prompts = random_prompts(requests, args.prompt)
    engine.graphs(model, slots, args.prompt + max(lengths), 1.0)
    for rows in (b for b in engine.BUCKETS if b <= slots):  # capture each batch size
        draw(model, prompts[:1], rows, 2)
    first, _ = timed(lambda: draw(model, prompts[:slots], 1, 1))
    seconds, out = timed(lambda: sample.generate(model, prompts, max_new_tokens=lengths, max_rows=slots, seed=1))
    tokens = sum(len(group[0].ids) for group in out)
    return {"rows": slots, "kind": "queue", "requests": requests, "decode_tok_s": tokens / seconds, "prefill_s": first}


def profile(model, rows, tokens, floors, ceiling, steps=20):
    """Prints where a decode step's time goes: by kernel, from the end of the one before to its own, since with dependent launch
    kernels overlap and durations would count that twice; then the time that the bytes of each part need at the ceiling."""
    step = replayer(model, rows, tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.end, e.name) for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    took, last, gemms = {}, spans[0][0], 0
    for end, name in spans:
        if name == "gemm":
            name, gemms = "gemm, " + ("qkv", "o", "gate_up", "down")[gemms % 4], gemms + 1
        count, us = took.get(name, (0, 0.0))
        took[name], last = (count + 1, us + end - last), end
    print(f"{'kernel':<60}{'calls':>8}{'us a call':>11}{'us a step':>11}")
    for name, (count, us) in sorted(took.items(), key=lambda t: -t[1][1])[:16]:
        print(f"{name[:58]:<60}{count / steps:>8.0f}{us / count:>11.1f}{us / steps:>11.1f}")
    for part, nbytes in floors.items():
        print(f"floor, {part + ':':<10}{nbytes / ceiling / 1e3:>9.1f} us a step")


# ---- the update


def step(args):
    """One update of train.py on random weights of true shapes: seconds, tokens/s, share of the matmul rate, peak memory."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ceiling = 2 * 8192**3 / graph_time([lambda: a @ a] * 5) / 1e6  # TFLOP/s
    print(f"{torch.cuda.get_device_name()}, bfloat16 matmul {ceiling:.0f} TFLOP/s, {args.tokens} tokens in rows of {args.length}")
    print(f"{'size':>5}{'format':>8}{'seconds':>9}{'tokens/s':>10}{'TFLOP/s':>9}{'share':>7}{'weights GiB':>13}{'peak GiB':>10}")
    results = []
    for size in args.sizes:
        for quant in args.quants:
            torch.cuda.empty_cache()
            row = {"size": size, "quant": quant, "lora_rank": 32, "tokens": args.tokens, "length": args.length}
            try:
                row |= update(size, quant, args)
                row |= {"tok_s": args.tokens / row["seconds"], "share": row["tflops"] / ceiling}
                print(f"{size:>5}{quant:>8}{row['seconds']:>9.2f}{row['tok_s']:>10.0f}{row['tflops']:>9.0f}{row['share']:>7.0%}"
                      f"{row['weights_gib']:>13.1f}{row['peak_gib']:>10.1f}", flush=True)
            except torch.OutOfMemoryError:
                row["out_of_memory"] = True
                print(f"{size:>5}{quant:>8}  does not fit", flush=True)
            results.append(rounded(row))
    merge(args.out, results, ("size", "quant", "tokens", "length"))
    print(json.dumps(results))


def update(size, quant, args):
    c, half = config(size), args.length // 2
    model = qwen.build(c, qwen.RandomCheckpoint(), "cuda", torch.bfloat16, quant)
    model.checkpointing = True
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    knobs = flags.parse_args(["--model", "m", "--micro-batch-tokens", str(args.micro_batch_tokens)])
    params = lora.add_lora(model, 32, 32)
    optimizer = train.AdamW(params, knobs)
    rows = [{"prompt": ids[:half], "ids": ids[half:], "logprobs": [-12.0] * half, "finished": True, "advantage": i % 3 - 1.0}
            for i, ids in enumerate(random_prompts(args.tokens // args.length, args.length))]
    seconds = statistics.median(timed(lambda: train.update(model, optimizer, params, rows, knobs))[0] for _ in range(3))
    # forward, recomputed forward and dL/dx of the blocks; forward and dL/dx of the head on the completion's half
    blocks = sum(n * k for n, k, _ in plan.linears(c).values()) * c.num_hidden_layers
    return {"seconds": seconds, "tflops": 2 * args.tokens * (3 * blocks + c.vocab_size * c.hidden_size) / seconds / 1e12,
            "weights_gib": weights / plan.GIB, "peak_gib": torch.cuda.max_memory_allocated() / plan.GIB}


# ---- tables and pictures


def figure(title, ylabel):
    from matplotlib.figure import Figure

    fig = Figure(figsize=(7, 4), layout="constrained")
    ax = fig.subplots()
    ax.set(xscale="log", xlabel="rows", ylabel=ylabel, title=title)
    ax.spines[["top", "right"]].set_visible(False)
    return fig, ax


def save(fig, ax, ticks, name):
    ax.set_xticks(ticks, map(str, ticks), fontsize=8)
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=8)
    fig.savefig(RESULTS / name, dpi=130)


def report(args):
    """Tables in Markdown on the terminal, pictures beside the JSON, of whatever lies in results/."""
    for name, show in (("kernels_h100", report_kernels), ("rollout_h100", report_rollout)):
        if (RESULTS / f"{name}.json").is_file():
            show(json.loads((RESULTS / f"{name}.json").read_text()))


def report_kernels(rows):
    ours = {(r["shape"], r["M"]): r["speedup"] for r in rows if r["fmt"] == "nvfp4" and r["pass"] == "forward"}
    marlin = {(s, m): f"{v:.2f}" for s, values in MARLIN.items() for m, v in zip(MARLIN_ROWS, values, strict=True)}
    shapes = [s for s in MARLIN if (s, 1) in ours]
    shown = [m for m in ROWS if all((s, m) in ours for s in shapes)]
    print("| shape | " + " | ".join(f"M = {m}" for m in shown) + " |\n|---|" + "---|" * len(shown))
    for s in shapes:
        print(f"| {s} | " + " | ".join(f"{ours[s, m]:.2f} ({marlin.get((s, m), '-')})" for m in shown) + " |")
    mean = {m: statistics.geometric_mean(ours[s, m] for s in shapes) for m in shown}
    theirs = {m: f"{statistics.geometric_mean(MARLIN[s][i] for s in shapes):.2f}" for i, m in enumerate(MARLIN_ROWS)}
    print("| geometric mean | " + " | ".join(f"{mean[m]:.2f} ({theirs.get(m, '-')})" for m in shown) + " |\n")
    fig, ax = figure("NVFP4 GEMM against cuBLAS on bfloat16 weights, one H100", "speed-up over cuBLAS")
    for color, s in zip(("#0b6e99", "#d9541e", "#2a9d5c"), ("7b.gate_up", "7b.down", "7b.o"), strict=True):
        ax.plot(shown, [ours[s, m] for m in shown], color=color, lw=2, marker="o", ms=4, label=s)
        ax.plot(MARLIN_ROWS, MARLIN[s], color=color, lw=1, ls="--", label=f"{s}, Marlin")
    ax.axhline(1, color="#999999", lw=0.8)
    save(fig, ax, shown, "kernels_h100.png")


def report_rollout(rows):
    speed = {(r["size"], r["quant"], r["lora_rank"], r["rows"]): r for r in rows if r["kind"] == "rows"}
    print("| model, rows | tokens/s | vLLM 0.24 | ratio | step ms | floor ms | peak GiB |\n|---|---|---|---|---|---|---|")
    for (size, quant, rank, n), r in sorted(speed.items(), key=lambda kv: (float(kv[0][0][:-1]), kv[0][1:])):
        theirs = VLLM.get((size, quant, rank), {}).get(n)
        ratio = f"{r['decode_tok_s'] / theirs:.2f}" if theirs else "-"
        name = f"{size} {'BF16' if quant == 'none' else quant.upper()}{f' + LoRA {rank}' if rank else ''}, {n}"
        print(f"| {name} | {r['decode_tok_s']:.0f} | {theirs or '-'} | {ratio} | {r['step_ms']:.2f} | {r['floor_ms']:.2f} | "
              f"{r['peak_gib']:.1f} |")
    fig, ax = figure("Decoding, Qwen2.5-7B shapes + LoRA 16, one H100", "tokens/s")
    for color, quant, label in (("#0b6e99", "nvfp4", "NVFP4"), ("#d9541e", "none", "BF16")):
        mine = sorted((n, r["decode_tok_s"]) for (size, q, rank, n), r in speed.items() if (size, q, rank) == ("7b", quant, 16))
        ax.plot([n for n, _ in mine], [v for _, v in mine], color=color, lw=2, marker="o", ms=4, label=label)
        theirs = VLLM["7b", quant, 16]
        ax.plot(list(theirs), list(theirs.values()), color=color, lw=1, ls="--", marker="x", ms=4, label=f"{label}, vLLM 0.24")
    ax.set_yscale("log")
    save(fig, ax, [n for n, _ in mine], "rollout_h100.png")


def parse_args(argv=None):
    p = argparse.ArgumentParser(description="Benchmarks on one GPU.", allow_abbrev=False)
    sub = p.add_subparsers(dest="what", required=True)

    def command(name, text, out):
        c = sub.add_parser(name, help=text, description=text, allow_abbrev=False,
                           formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        if out:
            c.add_argument("--out", type=Path, default=RESULTS / out, help="JSON list that the rows are merged into")
        return c

    def names(known):
        def parse(text):
            for name in text.split(","):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name}: choose from {', '.join(known)}")
            return text.split(",")
        return parse

    c = command("kernels", "the FP4 GEMM against cuBLAS", "kernels_h100.json")
    c.add_argument("--shapes", type=names(MARLIN), default=list(MARLIN), help="of " + ", ".join(MARLIN))
    c.add_argument("--rows", type=lambda t: [int(m) for m in t.split(",")], default=list(ROWS), help="values of M")
    c.add_argument("--formats", type=names(nvfp4.FORMATS), default=["nvfp4", "mxfp4", "nf4"],
                   help="the first for every shape, all for 7b.gate_up and 7b.down")
    c = command("rollout", "decoding throughput", "rollout_h100.json")
    c.add_argument("configs", nargs="*", default=ROLLOUTS, help="size:format:rank:rows, rows as 1,8 or 8x16 or queue")
    c.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    c.add_argument("--new", type=int, default=512, help="tokens drawn")
    c.add_argument("--layers", type=int, default=0, help="fewer layers than the model has: a quick look, written nowhere")
    c.add_argument("--profile", action="store_true", help="print where a step's time goes")
    c = command("step", "one update of training", "step_h100.json")
    c.add_argument("--sizes", type=names(SHAPES), default=["3b", "7b", "14b", "32b"], help="of " + ", ".join(SHAPES))
    c.add_argument("--quants", type=names(plan.BITS), default=["none", "nvfp4"], help="of none, nvfp4, mxfp4, nf4")
    c.add_argument("--tokens", type=int, default=32768, help="of an update, prompts included")
    c.add_argument("--length", type=int, default=1024, help="of a row, half of it prompt")
    c.add_argument("--micro-batch-tokens", type=int, default=16384, help="as in train.py")
    command("report", "tables and pictures from results/", None)
    args = p.parse_args(argv)
    for text in args.configs if args.what == "rollout" else ():
        size, quant, rank, rows = (text.split(":") + [""] * 4)[:4]
        fine = all(r == "queue" or all(n.isdigit() and int(n) for n in r.split("x", 1)) for r in rows.split(","))
        if size not in SHAPES or quant not in plan.BITS or not rank.isdigit() or not fine or text.count(":") != 3:
            p.error(f"{text}: expected size:format:rank:rows, as 7b:nvfp4:16:1,8; sizes are {', '.join(SHAPES)}")
    if args.what != "report" and not torch.cuda.is_available():
        p.error(f"{args.what}: needs a CUDA device")
    return args


if __name__ == "__main__":
    args = parse_args()
    {"kernels": kernels, "rollout": rollout, "step": step, "report": report}[args.what](args)
