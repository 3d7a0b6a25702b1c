"""
What tiles of the FP4 GEMM cost within a decode step: how many microseconds longer a block takes
with each than with the tile that fast.plan chooses. For another card, or another model; timed
alone they rank differently.

    python lab/bench_tiles.py --sizes 7b 3b --rows 8 64

A step has 320 live tokens a row, random weights and an adapter. Rows are merged into --out.

Shapes: M rows, N outputs, K inputs of a GEMM.
"""
import argparse
import dataclasses
import functools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import command

import torch
import triton

import nvfp4
from fast import engine, gemm, memory
from fast.layout import CHUNK, tile
from fast.plan import PARTIALS, plan, sms
from lab import bench

RANK = 16  # of the adapter
BLOCKS = 10  # of the model, at most


def candidates(M, N, K, cores):
    """Keywords of gemm_few that might be fast for x (M, K) and a weight (N, K) and with which two
    programs fit an SM. K is split for all rows of tiles or, so that SMs have equal shares, only for
    those beyond one, two ... whole tiles per SM."""
    blocks, top = -(-K // CHUNK), max(8, min(128, triton.next_power_of_2(M)))
    for BM in sorted({max(8, top // 2), top, min(128, 2 * top)}):
        for BN, warps in ((32, 2), (64, 4), (128, 4), (128, 8)):
            rows, MT = -(-N // BN), -(-M // BM)
            most = rows * MT // cores  # whole tiles that every SM may have
            for stages in (2, 3, 4) if warps == 8 else (3, 4):
                fit = min(32 // warps, 227_000 // (stages * CHUNK * (2 * BM + BN // 2)))
                for uncut in sorted({n * cores // MT for n in (0, most - 1, most) if n >= 0}):
                    cut = (rows - uncut) * MT  # tiles
                    on = (n * cores // max(1, cut) for n in (1 / 4, 1 / 2, 1, 2, 4, fit))
                    splits = (max(1, min(16, int(n))) for n in on)
                    for split in sorted({-(-blocks // -(-blocks // n)) for n in splits}):
                        fits = cut * split * BM * BN <= PARTIALS
                        if fit >= 2 and (fits if split > 1 else uncut == 0):
                            yield {"BM": BM, "BN": BN, "warps": warps, "stages": stages,
                                   "split": split, "whole": uncut if split > 1 else 0} | (
                                       {"maxnreg": 128} if warps == 8 else {})


@functools.lru_cache(1)
def some_weight(N, K):
    return tile(nvfp4.quantize(torch.ones(N, K, device="cuda"), "nvfp4"))


def layer_call(M, name):
    """gemm_few as a decode step of M rows calls it for a layer such as "7b.down", all but q."""
    size, layer = name.rsplit(".", 1)
    c = bench.config(size)
    N, K, parts = memory.linears(c)[f"{layer}_proj"]
    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
    kv = c.num_key_value_heads * c.head_dim
    bounds = {"qkv": (N - 2 * kv, N - kv), "gate_up": (N // 2,)}.get(layer, ())
    known = {"A": x.new_ones(parts * RANK, K), "B": x.new_ones(N, RANK), "bounds": bounds}
    if layer == "gate_up":
        known["glu"] = True
    elif layer == "qkv":
        known |= {"bias": x.new_ones(N), "early": True}
    else:
        known["residual"] = x.new_ones(M, N)
    return partial(gemm.gemm_few, x, **known)


def compile_tile(work):
    """Whether a tile runs. Called in a process of its own, which leaves it in Triton's cache."""
    M, name, tile = work
    try:
        layer_call(M, name)(some_weight(*bench.linear(name)), **tile)
        torch.cuda.synchronize()
    except (RuntimeError, triton.TritonError):  # too much shared memory, say
        return False
    return True


def step_us(model, M, shape=None, tile=None):
    """Microseconds of a decode step of M rows, in which linears of `shape` take `tile`."""
    def chosen(*of):
        ns, own = plan(*of)
        return ns, own | {"maxnreg": None} | tile if of[1:3] == shape else own

    engine.ENGINES[model][1].graphs.clear()
    with mock.patch.object(gemm, "plan", chosen):
        replay = bench.replayer(model, M, 320)
    return bench.event_us(replay, 20)


def measure(model, name, M, base, pool):
    """A row: the tiles for a layer such as "7b.down" at M rows; base: step_us with plan's tiles."""
    shape, cores = bench.linear(name), sms(torch.device("cuda"))
    blocks = len(model.layers)
    some, own = [*candidates(M, *shape, cores)], plan(M, *shape, cores)[1]
    own = {k: own[k] for k in (*some[0], "maxnreg") if k in own}
    some = [own, *(t for t in some if t != own)]
    # compile all before timing any: compiling runs them on the card that is timed
    able = [*pool.map(compile_tile, [(M, name, t) for t in some])]
    step_us(model, M)  # not counted: the first step after a pause is slower
    us = {" ".join(f"{k}={v}" for k, v in t.items()):
          round((step_us(model, M, shape, t) - base) / blocks, 2)
          for t, runs in zip(some, able, strict=True) if runs}
    best = min(us, key=us.get)
    return {"shape": name, "fmt": "nvfp4", "lora_rank": RANK, "M": M, "blocks": blocks,
            "step_us": base, "us": us, "best": best, "gain": -us[best]}


def tiles(args):
    columns = {"shape": "11", "M": "d", "step_us": ".1f", "gain": ".2f", "best": "60"}
    bench.show(columns)
    # processes, since Triton compiles one kernel at a time
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        for size in args.sizes:
            c = bench.config(size)
            c = dataclasses.replace(c, num_hidden_layers=min(BLOCKS, c.num_hidden_layers))
            model, _ = bench.build(c, "nvfp4")
            bench.adapt(model, RANK)
            engine.engine_for(model, max(args.rows), 512, 1.0)
            for M in args.rows:
                bench.draw(model, bench.random_prompts(1, 256), M, 2)  # compiles
                base = step_us(model, M)
                for layer in bench.LAYERS:
                    row = measure(model, f"{size}.{layer}", M, base, pool)
                    bench.show(columns, row)
                    bench.merge_rows(args.out, [row], ("shape", "fmt", "lora_rank", "M"))


def parse_args(argv=None):
    p = argparse.ArgumentParser(description="Tiles of the FP4 GEMM on one GPU.", allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    some = {"nargs": "+", "metavar": "NAME"}
    p.add_argument("--sizes", **some, choices=bench.SIZES, default=["7b"], help="models")
    p.add_argument("--rows", **some, type=int, default=[8, 64], help="values of M")
    p.add_argument("--out", type=Path, help="JSON list that the rows are merged into "
                   "(default: tiles_CARD.json in results/)")
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        p.error("needs a CUDA device")
    args.out = args.out or bench.RESULTS / f"tiles_{bench.card()}.json"
    return args


if __name__ == "__main__":
    sys.exit(command.run("lab/bench_tiles.py", lambda: tiles(parse_args())))
