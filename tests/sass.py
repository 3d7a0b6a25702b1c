"""Every kernel as Triton compiles it for a card that is not there, and what is wrong with its machine code.

Decode steps, a prefill and an update of two small models run as on a GPU, on CPU tensors that say they are on one: each launch
compiles, and nothing is computed. So a kernel that a card's compiler refuses, or that needs more shared memory than the card has,
is found without the card; and on Hopper registers that change while the tensor core may still read them.

    python tests/sass.py        # for an H100; a line a kernel
    python tests/sass.py 89     # RTX 4090; 80 is an A100, 100 a B200, 120 an RTX 5090"""
import json
import re
import sys
from collections import defaultdict
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

from plumbing import checkpoint

import fast
import lora
import model as M
import sample
from fast import decode, gemm, logprobs, packed
from fast.layout import tile
from fast.plan import TILES
from nvfp4 import FORMATS, quantize

SHARED = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes a program may have


class Card:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, arch):
        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)
        self.get_current_device = self.get_current_stream = lambda *_: 0


def pretend(arch):
    """{kernel, the GEMM by tile: {variant: what Triton made of it, or its error}} of all launches from here on."""
    triton.runtime.driver.set_active(Card(arch))
    torch.Tensor.is_cuda = property(lambda t: True)
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    decode.product32 = packed.product32 = lambda a, b: a.float() @ b.float()  # has no CPU kernel
    packed.compiling = nullcontext  # each launch compiles as it is
    made, run = defaultdict(dict), JITFunction.run

    def compiled(kernel, *args, grid, warmup, **options):
        name = kernel.__name__ if kernel is not gemm.gemm else "gemm {BM}x{BN}x{STAGES}".format_map(options)
        try:
            out = run(kernel, *args, grid=grid, warmup=True, **options)
            made[name][out.hash] = out
        except Exception as e:  # the compilers' errors share no base class
            made[name][str(e)] = e

    JITFunction.run = compiled
    return made


def work(made, quant, dtype, config, *few):
    """Of a random model with LoRA: steps of so many rows, each way of drawing, a prefill, an update. The first block first: what
    fast/ compiles ahead, of all blocks' kernels."""
    m = M.build(config, checkpoint.RandomCheckpoint(), dtype=dtype, quant=quant)
    fast.tile(m)
    lora.add_lora(m, 16, 32)
    cache = M.KVCache(m, 256, 512)
    step = decode.Step(m, cache)
    step.draw = sample.draw
    prompts = [[*range(35)], [*range(200)]]
    for blocks in (1, None):
        ahead = {name: len(variants) for name, variants in made.items()}
        for rows in few:
            step.hidden(rows, blocks)
        packed.hidden(m, [*prompts, [1, 2]], [0], of=[0, 1, 1], blocks=blocks).sum().backward()
    assert ahead == {name: len(variants) for name, variants in made.items()}, "a later block launches other kernels"
    for rows in few:
        scores = torch.zeros(rows, config.vocab_size)
        step.sample(scores)
        step.sample(scores, greedy=True)
        step.sample(scores, nucleus=(1.0, 0.9))
    packed.Prefill(step).run(m, prompts, [0, 1])
    packed.hidden(m, [prompts[0], [*range(205)]], [0]).sum().backward()  # a multiple of 16 tokens
    logprobs.score(scores, torch.zeros(rows, dtype=torch.long), torch.ones(1), 1000, dtype)


def unwaited(sass):
    """Pairs of a wgmma and an instruction after it that writes one of the registers it takes its left side from, with no wait
    between them on some path: the hardware reads them when it comes to it."""
    lines, labels = [], {}
    for line in sass.splitlines()[1:]:  # the first has the kernel's name
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        elif line:  # scheduling, tab, instruction
            lines.append(re.sub(r"^@!?U?P\w+ +", "@ ", line.split("\t")[1].rstrip(" ;")))
    found = []
    for i, line in enumerate(lines):
        if not (left := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line)):
            continue
        read, todo, seen = set(range(int(left[1]), int(left[1]) + 4)), [i + 1], set()
        while todo:
            j = todo.pop()
            if j in seen or j >= len(lines) or "WARPGROUP.DEPBAR" in lines[j]:
                continue
            seen.add(j)
            op, _, operands = lines[j].removeprefix("@ ").partition(" ")
            to = next((r for r in operands.split(", ") if not re.match(r"!?U?P(\d|T)", r)), "")
            wide = 4 if re.search(r"128|M88\.4", op) else 2 if re.search(r"64|WIDE|M88\.2", op) else 1
            if (to := re.match(r"R(\d+)\b", to)) and read & set(range(int(to[1]), int(to[1]) + wide)):
                found.append((line, lines[j]))
            if op.startswith("BRA"):
                todo.append(labels[re.search(r"LBB\d+", operands)[0]])
            if not op.startswith(("BRA", "EXIT")) or lines[j].startswith("@ "):
                todo.append(j + 1)
    return found


def main(arch=90):
    made = pretend(arch)
    work(made, "nvfp4", torch.bfloat16, M.Config(1024, 512, 1536, 2, 4, 2, 128), 1, 16, 32, 64, 256)
    work(made, "none", torch.bfloat16, M.Config(1024, 512, 1536, 2, 4, 2, 64, qk_norm=True), 1, 256)  # Qwen3's
    for fmt in FORMATS:
        q = tile(quantize(torch.randn(512, 512), fmt))
        gemm.decoded(q)
        for rows in (4, 64):
            gemm.gemm_few(torch.zeros(rows, 512, dtype=torch.bfloat16), q)
    q = tile(quantize(torch.randn(512, 512), "nvfp4"))
    for t in TILES:
        x = torch.zeros(512, 512, dtype=torch.bfloat16)
        for R, rows in product((16, 256), (t["BM"], t["BM"] // 2)):  # the copy unit takes no half of a tile
            gemm.gemm_few(x[:rows], q, A=x[:R], B=x[:, :R].contiguous(), **t)
        for split, ranges in ((2, 1), (1, 2)):
            gemm.gemm_few(x[: t["BM"]], q, A=x[:16], B=x[:, :16].contiguous(), exact=True, split=split, ranges=ranges, **t)
    for name, variants in sorted(made.items()):
        good = [v for v in variants.values() if not isinstance(v, Exception)]
        products = [v.asm["ptx"].count("wgmma.mma_async") for v in good]
        sass = [v.asm["sass"] for v, n in zip(good, products, strict=True) if n]
        print(json.dumps({
            "arch": arch, "kernel": name, "variants": len(variants),
            "errors": [str(v)[:300] for v in variants.values() if isinstance(v, Exception)],
            "shared": max((v.metadata.shared for v in good), default=0), "of": SHARED[arch],
            "products": min(products, default=0),
            "unwaited": [pair for s in sass for pair in unwaited(s)][:3]}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
