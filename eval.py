"""Pass@1 on questions with a checkable answer: the base model and, with --adapter, the adapter on
the same samples' seeds.

The paper's protocol: temperature 0.6, top-p 0.95, n samples a question, averaged. It uses the
generator, the prompts and the reward of training, so that a number here means what the same number
in a training log means. Questions, not samples, are the independent draws, so the standard error is
that of the mean over questions. An adapter that changes nothing is an error: the commonest wrong
result in this field is a base model evaluated twice.

Left out: Pass@k for k > 1, majority votes, few-shot prompts.

    python eval.py --run runs/tiny-arithmetic-nvfp4-s0 --data arithmetic
    python eval.py --model Qwen/Qwen2.5-3B-Instruct --data gsm8k,math500 --prompt-style boxed
"""
import json
import math
import shlex
import sys
import time
from pathlib import Path

import torch

import aqn
import data
import lora
import sample
from runtime import flags
from weights.files import whole


def evaluate(model, tok, rows, style="tags", n=4, temperature=0.6, top_p=0.95, max_new_tokens=None,
             max_prompt=None, max_rows=None, seed=0, score=None, progress=False):
    """Sample n completions a question and grade them; AQN's noise is off meanwhile.

    max_new_tokens None: 4096, or what the model's positions leave. score: (text, row) -> as
    data.reward (default: that of the style). Returns accuracy, stderr (of the mean over questions,
    None for a single one), format, length (mean tokens), truncated (share cut at the limit),
    questions, skipped (longer than max_prompt), and rows: [{"question", "answer", "accuracy",
    "samples": [{"text", "correct", "format", "length", "finished"}]}]."""
    kept, skipped = data.prompts(tok, rows, style, max_prompt)
    score = score or data.scorer(style)
    if max_new_tokens is None:
        longest = max(len(row["ids"]) for row in kept)
        max_new_tokens = max(1, min(4096, model.config.max_position_embeddings - longest))
    with aqn.clean(model):
        groups = sample.generate(
            model, [row["ids"] for row in kept], n, max_new_tokens, temperature, top_p, tok.eos_ids,
            seed, max_rows, progress)
    out = []
    for row, group in zip(kept, groups, strict=True):
        samples = []
        for s in group:
            text = tok.decode(s.ids)
            graded = score(text, row)
            samples.append({"text": text, "correct": graded["correct"], "format": graded["format"],
                            "length": len(s.ids), "finished": s.finished})
        out.append({"question": row["question"], "answer": row["answer"],
                    "accuracy": mean(s["correct"] for s in samples), "samples": samples})
    flat = [s for row in out for s in row["samples"]]
    return {"accuracy": mean(row["accuracy"] for row in out),
            "stderr": stderr([row["accuracy"] for row in out]),
            "format": mean(s["format"] for s in flat), "length": mean(s["length"] for s in flat),
            "truncated": mean(not s["finished"] for s in flat), "questions": len(out),
            "skipped": skipped, "rows": out}


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def stderr(values):
    """Standard error of the mean of one value a question: the samples of a question are not
    independent of each other."""
    if len(values) < 2:
        return None
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1) / len(values))


@torch.no_grad()
def check_adapter(model, ids, folder):
    """ValueError unless the adapter moves the logits of a prompt (ids): one of zeros, or one not
    applied, is caught here."""
    ids = torch.tensor([ids], device=model.embed.weight.device)
    with lora.disabled(model):
        base = model(ids)
    if torch.equal(model(ids), base):
        zero = all(not m.B.any() for _, m in lora.lora_layers(model))
        why = "the logits are the base model's, bit for bit"
        if zero:
            why = "every B is zero, it was never trained"
        raise ValueError(f"--adapter {folder}: changes nothing ({why})")


def table(results):
    yield (f"{'data':<16}{'model':<10}{'pass@1':>8}{'s.e.':>7}{'format':>9}{'length':>9}"
           f"{'cut':>7}{'questions':>11}")
    for name, arm, r in results:
        se = "-" if r["stderr"] is None else f"{100 * r['stderr']:.1f}"
        yield (f"{name:<16}{arm:<10}{100 * r['accuracy']:>7.1f}%{se:>7}{100 * r['format']:>8.1f}%"
               f"{r['length']:>9.1f}{100 * r['truncated']:>6.1f}%{r['questions']:>11}")


def gain(base, adapter):
    """The adapter's gain over the base and its standard error, paired by question."""
    d = [b["accuracy"] - a["accuracy"] for a, b in zip(base["rows"], adapter["rows"], strict=True)]
    return mean(d), stderr(d)


def run(args, argv):
    begin = time.time()
    flags.model_folder(args.model)
    # all sets are read before anything is loaded or sampled: a mistyped name costs nothing
    sets = [(Path(name).stem, data.load(name, args.split, args.limit, args.seed, args.levels))
            for name in args.data.split(",")]
    score = data.scorer(args.prompt_style, args.reward)
    model, tok = flags.load_policy(args)
    if args.adapter:
        kept, _ = data.prompts(tok, sets[0][1][:1], args.prompt_style)
        check_adapter(model, kept[0]["ids"], args.adapter)
    results, gains = [], []
    for name, rows in sets:
        def arm(name=name, rows=rows):
            return evaluate(model, tok, rows, args.prompt_style, args.n, args.temperature,
                            args.top_p, args.max_new_tokens, args.max_prompt, args.max_rows,
                            args.seed, score, progress=sys.stderr.isatty())

        with lora.disabled(model):
            results.append((name, "base", arm()))
        if args.adapter:
            results.append((name, "adapter", arm()))
            gains.append((name, *gain(results[-2][2], results[-1][2])))
    print("\n".join(table(results)))
    for name, d, se in gains:
        error = "" if se is None else f" (s.e. {100 * se:.1f})"
        print(f"{name}: the adapter adds {100 * d:+.1f} points{error}")
    for name, arm, r in results:
        if r["skipped"]:
            print(f"{name}, {arm}: {r['skipped']} questions skipped, longer than --max-prompt")
        if r["format"] == 0:
            print(f"warning: {name}, {arm}: no completion follows the format; does --prompt-style "
                  "fit the model?")
    if args.out:
        with whole(args.out) as part, open(part, "w") as f:
            f.writelines(json.dumps({"data": name, "model": arm, **row}) + "\n"
                         for name, arm, r in results for row in r["rows"])
    summary = [{"data": name, "model": arm, **{k: v for k, v in r.items() if k != "rows"}}
               for name, arm, r in results]
    print(json.dumps({"results": summary, "seconds": round(time.time() - begin, 1),
                      "command": shlex.join(["python", "eval.py", *argv])}))


def main(argv=None):
    return flags.run_command("eval", run, argv)


if __name__ == "__main__":
    sys.exit(main())
