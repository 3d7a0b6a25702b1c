"""The FP4 GEMM as Triton compiles it for Hopper, no card needed, and what is wrong with its machine code.

    python tests/sass.py        # of five tiles: products by the tensor core, and registers that change while one may read them"""
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import marlin_triton as mt
from runtime import bits
from weights.formats import FORMATS

POINTERS = {**dict.fromkeys(("x", "bias", "A", "B", "res", "out"), "*bf16"), "codes": "*u8", "scale": "*u8",
            **dict.fromkeys(("g", "part", "sums"), "*fp32"), **dict.fromkeys(("count", "flags"), "*i32")}
NUMBERS = {**dict.fromkeys(("M", "N", "K", "sx", "sc", "ss", "sb", "b0", "b1"), "i32"), "scaling": "fp32"}


def compiled(tile, glu, dtype):
    """SASS of the GEMM of a tile of TILES, with LoRA; x and the result in `dtype`, bf16 or fp16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = mt.gemm.arg_names
    tma = tile["BM"] >= 128
    types = POINTERS | NUMBERS | ({"xd": f"tensordesc<bf16[{tile['BM']}, 64]>"} if tma else {})
    types = {name: t.replace("bf16", dtype) for name, t in types.items()}
    decoder = bits.decoder(FORMATS["nvfp4"], {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], True)
    constants = dict(FMT="nvfp4", **decoder, BM=tile["BM"], BN=tile["BN"], SPLIT=1, WHOLE=0, STAGES=tile["stages"], W=tile["warps"],
                     R=16, RP=16, P=1 + glu, RA=16 + 16 * glu, AT=1, Z=4, ZR=1, BA=min(tile["BM"], 16), ONE=not glu, GLU=glu, BIAS=False, RES=not glu,
                     FAST=True, PDL=True, TMA=tma, EARLY=False, **({} if tma else {"xd": None}))
    whole = [*POINTERS, "N", "K", "sx", "sc", "ss", "sb"]  # multiples of 16
    source = ASTSource(mt.gemm, {n: types.get(n, "constexpr") for n in names},
                       {(names.index(n),): value for n, value in constants.items()},
                       {(names.index(n),): [["tt.divisibility", 16]] for n in whole})
    options = {"num_warps": tile["warps"]} | ({"maxnreg": tile["maxnreg"]} if "maxnreg" in tile else {})
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["sass"]


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


def main():
    for i, glu, dtype in ((1, False, "bf16"), (3, True, "bf16"), (3, True, "fp16"), (4, True, "bf16"), (5, False, "bf16")):
        sass = compiled(mt.TILES[i], glu, dtype)
        print(json.dumps({"BM": mt.TILES[i]["BM"], "x": dtype, "products": sass.count("HGMMA"), "unwaited": unwaited(sass)[:3]}))


if __name__ == "__main__":
    main()
