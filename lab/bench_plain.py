"""
How fast the files that one reads are, beside fast/: a decode step and an update of each, on one
card, with random weights of true shapes, NVFP4 and LoRA 16. Also the largest model that the plain
path trains on this card.

    python lab/bench_plain.py                       # 0.5B and 3B with 64 rows, 7B with 8
    python lab/bench_plain.py --largest 14b 32b     # one update each, until one does not fit
"""
import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import checkpoint, command

import torch

import fast
import grpo
import lora
import model as qwen
import sample
from lab.bench import merge_rows, random_prompts
from lab.bench_report import RESULTS, SIZES, card, config

ROWS = {"0.5b": 64, "3b": 64, "7b": 8}
PROMPT, SHORT, LONG = 256, 16, 144  # tokens of a prompt, and drawn: a step is the difference
COMPLETIONS, NEW = 8, 1024  # of an update


def seconds(f):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    f()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def build(size):
    model = qwen.build(config(size), checkpoint.RandomCheckpoint(), "cuda", quant="nvfp4")
    return model, grpo.AdamW(lora.add_lora(model, 16, 16), 1e-6)


def decode_ms(model, rows):
    """Milliseconds of a decode step, host included, after a call that compiles and captures."""
    prompts = random_prompts(rows, PROMPT)

    def draw(n):
        sample.generate(model, prompts, 1, n, max_rows=rows)

    draw(LONG)
    short, long = (min(seconds(lambda n=n: draw(n)) for _ in range(2)) for n in (SHORT, LONG))
    return (long - short) / (LONG - SHORT) * 1e3


def update_s(model, optimizer):
    """Seconds of an update, the second of two."""
    texts = random_prompts(COMPLETIONS, PROMPT + NEW)
    completions = [grpo.Completion({}, ids[:PROMPT], ids[PROMPT:], [-12.0] * NEW, True,
                                   advantage=i % 3 - 1.0) for i, ids in enumerate(texts)]
    settings = grpo.Settings(micro_batch_tokens=16384)
    return [seconds(lambda: grpo.update(model, optimizer, completions, settings))
            for _ in range(2)][1]


def compare(size, rows):
    """A row: both paths of one size."""
    model, optimizer = build(size)
    model.checkpointing = True
    row = {"size": size, "rows": rows}
    for engine in ("plain", "fast"):
        if engine == "fast" and (why := fast.install(model)):
            raise ValueError(f"fast/: {why}")
        torch.cuda.reset_peak_memory_stats()
        row[f"{engine}_step_ms"] = decode_ms(model, rows)
        row[f"{engine}_update_s"] = update_s(model, optimizer)
        row[f"{engine}_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for what in ("step_ms", "update_s"):
        row[f"times_{what}"] = row[f"plain_{what}"] / row[f"fast_{what}"]
    return row


def largest(sizes):
    """A row for each size whose update fits the card on the plain path."""
    for size in sizes:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            model, optimizer = build(size)
            model.checkpointing = True
            row = {"size": size, "plain_update_s": update_s(model, optimizer)}
        except torch.OutOfMemoryError:
            print(f"{size}: does not fit")
            return
        yield row | {"plain_gib": torch.cuda.max_memory_allocated() / 2**30}
        del model, optimizer


def main():
    p = argparse.ArgumentParser(description="The plain path beside fast/, on one GPU.",
                                allow_abbrev=False)
    p.add_argument("--largest", nargs="+", choices=SIZES, default=[], help="sizes to try, in order")
    p.add_argument("--sizes", nargs="*", choices=SIZES, default=[*ROWS], help="sizes to compare")
    p.add_argument("--out", type=Path, help="default: plain_CARD.json in results/")
    args = p.parse_args()
    rows = [compare(size, ROWS.get(size, 8)) for size in args.sizes]
    rows += largest(args.largest)
    for row in rows:
        print(json.dumps(row))
    merge_rows(args.out or RESULTS / f"plain_{card()}.json", rows, ("size", "rows"))


if __name__ == "__main__":
    sys.exit(command.run("lab/bench_plain.py", main))
