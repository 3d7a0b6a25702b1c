"""Pass@1 on questions with a checkable answer: the base model and, with --adapter, the adapter on the same samples' seeds.

The paper's protocol: temperature 0.6, top-p 0.95, n samples a question, averaged. It uses the generator, the prompts and the
reward of training, so that a number here means what the same number in a training log means. Questions, not samples, are
the independent draws, so the standard error is that of the mean over questions. An adapter that changes nothing is an error:
the commonest wrong result in this field is a base model evaluated twice.

Left out: Pass@k for k > 1, majority votes, few-shot prompts.

    python eval.py --model assets/tiny --data arithmetic --quant nvfp4 --adapter runs/tiny-arithmetic-nvfp4-s0/adapter
    python eval.py --model Qwen/Qwen2.5-3B-Instruct --data gsm8k,math500 --prompt-style boxed --greedy --out rows.jsonl
"""
import argparse
import json
import math
import os
import shlex
import sys
import time
from pathlib import Path

import torch

import aqn
import data
import lora
import sample
from runtime.flags import place
from weights import checkpoint


def evaluate(model, tok, rows, style="tags", n=4, temperature=0.6, top_p=0.95, max_new_tokens=None, max_prompt=None,
             max_rows=None, seed=0, progress=False):
    """Sample n completions a question and grade them; AQN's noise is off meanwhile.

    max_new_tokens None: 4096, or what the model's positions leave. Returns accuracy, stderr (of the mean over questions, None
    for a single one), format, length (mean tokens), truncated (share cut at the limit), questions, skipped (longer than
    max_prompt), and rows: [{"question", "answer", "accuracy", "samples": [{"text", "correct", "format", "length", "finished"}]}].
    """
    kept, skipped = data.prompts(tok, rows, style, max_prompt)
    if max_new_tokens is None:
        room = model.config.max_position_embeddings - max(len(row["ids"]) for row in kept)
        max_new_tokens = max(1, min(4096, room))
    with aqn.clean(model):
        groups = sample.generate(model, [row["ids"] for row in kept], n=n, max_new_tokens=max_new_tokens, eos_ids=tok.eos_ids,
                                 temperature=temperature, top_p=top_p, seed=seed, max_rows=max_rows, progress=progress)
    out = []
    for row, group in zip(kept, groups, strict=True):
        samples = []
        for s in group:
            text = tok.decode(s.ids)
            score = data.reward(text, row["answer"], style)
            samples.append({"text": text, "correct": score["correct"], "format": score["format"], "length": len(s.ids),
                            "finished": s.finished})
        out.append({"question": row["question"], "answer": row["answer"], "accuracy": mean(s["correct"] for s in samples),
                    "samples": samples})
    flat = [s for row in out for s in row["samples"]]
    return {"accuracy": mean(row["accuracy"] for row in out), "stderr": stderr([row["accuracy"] for row in out]),
            "format": mean(s["format"] for s in flat), "length": mean(s["length"] for s in flat),
            "truncated": mean(not s["finished"] for s in flat), "questions": len(out), "skipped": skipped, "rows": out}


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def stderr(values):
    """Standard error of the mean of one value a question: the samples of a question are not independent of each other."""
    if len(values) < 2:
        return None
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1) / len(values))


@torch.no_grad()
def check_adapter(model, ids, folder):
    """ValueError unless the adapter moves the logits of a prompt (ids): one of zeros, or one not applied, is caught here."""
    ids = torch.tensor([ids], device=model.embed.weight.device)
    with lora.disabled(model):
        base = model(ids)
    if torch.equal(model(ids), base):
        zero = all(not m.B.any() for _, m in lora.lora_layers(model))
        why = "every B is zero, it was never trained" if zero else "the logits are the base model's, bit for bit"
        raise ValueError(f"--adapter {folder}: changes nothing ({why})")


def table(results):
    yield f"{'data':<16}{'model':<10}{'pass@1':>8}{'s.e.':>7}{'format':>9}{'length':>9}{'cut':>7}{'questions':>11}"
    for name, arm, r in results:
        se = "-" if r["stderr"] is None else f"{100 * r['stderr']:.1f}"
        yield (f"{name:<16}{arm:<10}{100 * r['accuracy']:>7.1f}%{se:>7}{100 * r['format']:>8.1f}%{r['length']:>9.1f}"
               f"{100 * r['truncated']:>6.1f}%{r['questions']:>11}")


def gain(base, adapter):
    """The adapter's gain over the base and its standard error, paired by question."""
    d = [b["accuracy"] - a["accuracy"] for a, b in zip(base["rows"], adapter["rows"], strict=True)]
    return mean(d), stderr(d)


def parse_args(argv):
    p = argparse.ArgumentParser(description="Pass@1 of a model, and of an adapter beside it.", allow_abbrev=False)
    p.add_argument("--model", default=str(Path(__file__).parent / "assets" / "tiny"),
                   help="checkpoint folder or hub id [the embedded assets/tiny]")
    p.add_argument("--data", default="arithmetic", help=f"arithmetic, gsm8k, {', '.join(data.HUB)}, a .jsonl file or a folder; "
                                                        "several with commas [%(default)s]")
    p.add_argument("--split", default="test", choices=["test", "train"], help="which part of the data [%(default)s]")
    p.add_argument("--adapter", help="folder of a LoRA adapter to evaluate beside the base [none]")
    p.add_argument("--quant", default="none", choices=["none", "nvfp4", "mxfp4", "nf4"], help="format of the base [%(default)s]")
    p.add_argument("--n", type=int, help="samples a question [4; with --greedy 1]")
    p.add_argument("--greedy", action="store_true", help="the likeliest token always, one sample a question [off]")
    p.add_argument("--temperature", type=float, default=0.6, help="of sampling [%(default)s]")
    p.add_argument("--top-p", type=float, default=0.95, help="nucleus of sampling [%(default)s]")
    p.add_argument("--max-new-tokens", type=int, help="completion limit [4096, or what the model's positions leave]")
    p.add_argument("--max-prompt", type=int, help="skip and count longer prompts [none]")
    p.add_argument("--prompt-style", default="tags", choices=list(data.SUFFIX), help="what the prompt asks for [%(default)s]")
    p.add_argument("--limit", type=int, help="questions of each set, drawn by --seed [all]")
    p.add_argument("--seed", type=int, default=0, help="of samples and of --limit [%(default)s]")
    p.add_argument("--out", help="write a row per question to this .jsonl [none]")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto is cuda where there is one [auto]")
    p.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"],
                   help="auto is bfloat16 on cuda, else float32 [auto]")
    p.add_argument("--batch", type=int, help="rows decoded together [what fits]")
    args = p.parse_args(argv)
    for name in ("n", "max_new_tokens", "max_prompt", "limit", "batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.greedy and args.n not in (None, 1):
        p.error(f"--n {args.n}: --greedy gives the same completion each time; leave --n out")
    if args.out and (Path(args.out).is_dir() or not Path(args.out).resolve().parent.is_dir()):
        p.error(f"--out {args.out}: must be a file, in a folder that exists")
    args.n = args.n or (1 if args.greedy else 4)
    args.temperature = 0.0 if args.greedy else args.temperature
    return p, args


def run(args, argv):
    begin = time.time()
    device, dtype = place(args.device, args.dtype)
    folder = checkpoint.fetch(args.model)
    tok = data.Tokenizer(folder)
    # all sets are read before anything is sampled: a mistyped name should not cost the sets before it
    sets = [(name, data.load(name, args.split, args.limit, args.seed)) for name in args.data.split(",")]
    model = checkpoint.load(folder, device, dtype, args.quant)
    model.valid_vocab = len(tok)
    if args.adapter:
        lora.load_adapter(model, args.adapter)
        kept, _ = data.prompts(tok, sets[0][1][:1], args.prompt_style)
        check_adapter(model, kept[0]["ids"], args.adapter)
    options = {"style": args.prompt_style, "n": args.n, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed,
               "max_new_tokens": args.max_new_tokens, "max_prompt": args.max_prompt, "max_rows": args.batch,
               "progress": sys.stderr.isatty()}
    results, gains = [], []
    for name, rows in sets:
        with lora.disabled(model):
            results.append((Path(name).stem, "base", evaluate(model, tok, rows, **options)))
        if args.adapter:
            results.append((Path(name).stem, "adapter", evaluate(model, tok, rows, **options)))
            gains.append((Path(name).stem, *gain(results[-2][2], results[-1][2])))
    print("\n".join(table(results)))
    for name, d, se in gains:
        print(f"{name}: the adapter adds {100 * d:+.1f} points" + ("" if se is None else f" (s.e. {100 * se:.1f})"))
    for name, arm, r in results:
        if r["skipped"]:
            print(f"{name}, {arm}: {r['skipped']} questions skipped, longer than --max-prompt {args.max_prompt}")
        if r["format"] == 0:
            print(f"warning: {name}, {arm}: no completion follows the format; does --prompt-style fit the model?")
    if args.out:
        part = Path(args.out).with_name(Path(args.out).name + ".part")
        part.write_text("".join(json.dumps({"data": name, "model": arm, **row}) + "\n"
                                for name, arm, r in results for row in r["rows"]))
        os.replace(part, args.out)
    summary = [{"data": name, "model": arm, **{k: v for k, v in r.items() if k != "rows"}} for name, arm, r in results]
    print(json.dumps({"results": summary, "seconds": round(time.time() - begin, 1),
                      "command": shlex.join(["python", "eval.py", *argv])}))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser, args = parse_args(argv)
    try:
        run(args, argv)
    except torch.OutOfMemoryError as e:
        parser.error(f"out of GPU memory ({str(e).split('. ')[0]}); lower --batch or --max-new-tokens")
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
