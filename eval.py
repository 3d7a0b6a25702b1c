"""
Pass@1 on questions with a checkable answer, for the base model and, with --run or --adapter,
for the adapter, sampled with the same seeds.

The paper's protocol: temperature 0.6, top-p 0.95, n samples a question, averaged. It uses
training's generator, prompts and reward, so that a number here means what the same number in a
training log means. Questions, not samples, are the independent draws, so the standard error is that
of the mean over questions. An adapter that changes nothing is an error: the commonest wrong result
in this field is a base model evaluated twice.

Left out: few-shot prompts, majority votes.

    python eval.py --run runs/tiny-arithmetic-nvfp4-s0 --data arithmetic
    python eval.py --model Qwen/Qwen2.5-3B-Instruct --data gsm8k,math500 --prompt-style boxed
"""
import math
import sys
from contextlib import nullcontext
from itertools import chain, product
from statistics import fmean

from plumbing import checkpoint, flags, policy, ranks
from plumbing.command import number, numbers
from plumbing.console import show_results
from plumbing.files import check_out, write_jsonl
from plumbing.flags import Flag
from plumbing.metrics import gain, stderr

import torch

import aqn
import data
import lora
import sample

FLAGS = (
    *sample.MODEL_FLAGS,
    *flags.ADAPTER_FLAGS,
    "questions",
    *flags.DATA_FLAGS,
    flags.PROMPT_STYLE,
    Flag("limit", number(1, 1e8), None, "questions a set, drawn by --seed (all; arithmetic: 512)"),
    Flag("n", number(1, 1e4), None, "samples a question (default: 4; at --temperature 0: 1)"),
    Flag("max-prompt", number(1, 1e7), None, "skip and count longer prompts, in tokens"),
    Flag("k", numbers, None, "also pass@k for these, as in 1,4,8"),
    Flag("out", str, None, "a row a question with all its samples, to this new .jsonl"),
    *flags.SAMPLING_FLAGS,
    *flags.ENGINE_FLAGS,
)


def check_flags(args):
    flags.check_graded(args)
    if args.out:
        check_out(args.out, new=True)
    args.n = args.n or (1 if args.temperature == 0 else 4)
    if args.k and args.k[-1] > args.n:
        raise ValueError(f"--k {args.k[-1]}: takes as many samples a question, raise --n")


COMMAND = flags.Command("eval", "Pass@1 of a model, and of an adapter beside it.", FLAGS,
                        check_flags)


def evaluate(model, tok, rows, *, style="tags", n=4, temperature=0.6, top_p=0.95,
             max_new_tokens=None, max_prompt=None, max_rows=256, seed=0, score=None, ks=()):
    """Sample n completions a question and grade them, with AQN's noise off.

    max_new_tokens: as in sample.generate. score: of data.scorer (the style's by default). Returns
    `summary`'s dict, skipped (longer than max_prompt), and rows: [{"question", "answer",
    "accuracy", "samples": [{"text", "reward", "given", "correct", "format", "length",
    "finished"}]}]."""
    kept, skipped = data.prompts(tok, rows, style, max_prompt)
    asked = ranks.mine(kept)  # the questions that this rank asks
    with aqn.clean(model):
        groups = sample.generate(
            model, [row["ids"] for row in asked], n, max_new_tokens, temperature, top_p,
            tok.eos_ids, seed, max_rows, indices=ranks.mine(range(len(kept))))

    # Grade all samples side by side, then put them together by question.
    drawn = [*chain(*groups)]
    texts = [tok.decode(s.ids) for s in drawn]
    score = score or data.scorer(style)
    verdicts = score([(text, asked[i // n]) for i, text in enumerate(texts)])
    samples = [{"text": text, **verdict, "length": len(s.ids), "finished": s.finished}
               for s, text, verdict in zip(drawn, texts, verdicts, strict=True)]
    out = []
    for i, row in enumerate(asked):
        own = samples[i * n : (i + 1) * n]
        out.append({"question": row["question"], "answer": row["answer"],
                    "accuracy": fmean(s["correct"] for s in own), "samples": own})
    out = ranks.merge(out)
    return {**summary(out, ks), "skipped": skipped, "rows": out}


def summary(rows, ks=()):
    """accuracy, stderr (of the mean over questions, None for a single one), format, reward, length
    (mean tokens), truncated (share cut at the limit), questions; for each k of ks pass@k, (mean,
    standard error)."""
    flat = [s for row in rows for s in row["samples"]]
    accuracies = [row["accuracy"] for row in rows]
    out = {"accuracy": fmean(accuracies), "stderr": stderr(accuracies),
           "format": fmean(s["format"] for s in flat), "reward": fmean(s["reward"] for s in flat),
           "length": fmean(s["length"] for s in flat),
           "truncated": fmean(not s["finished"] for s in flat), "questions": len(rows)}
    for k in ks:
        passed = [pass_at(k, [s["correct"] for s in row["samples"]]) for row in rows]
        out[f"pass@{k}"] = fmean(passed), stderr(passed)
    return out


def pass_at(k, correct):
    """The chance that k of the samples, drawn without replacement, hold a right one: the unbiased
    estimate of pass@k (Chen et al., 2021), 1 - C(n - c, k) / C(n, k)."""
    n = len(correct)
    return 1 - math.comb(n - sum(correct), k) / math.comb(n, k)


@torch.no_grad()
def check_adapter(model, ids, folder):
    """ValueError unless the adapter changes the logits of a prompt (ids): an adapter of zeros, or
    one that is not applied, is caught here."""
    ids = torch.tensor([ids], device=model.embed.weight.device)
    with lora.disabled(model):
        base = model(ids)
    if torch.equal(model(ids), base):
        raise ValueError(f"--adapter {folder}: changes nothing; was it ever trained?")


def run(args, argv):
    checkpoint.read_config(checkpoint.fetch(args.model))  # a wrong --model is refused first
    # all sets are read before anything is loaded or sampled: a mistyped name costs nothing
    sets = [(name, data.load(name, "test", args.limit, args.seed, args.levels))
            for name in dict.fromkeys(args.data.split(","))]
    policy.warn_evaluated(args)
    score = data.scorer(args.prompt_style, args.reward)
    model, tok = sample.load_policy(args)
    sample.set_engine(model, args.engine)
    for _, rows in sets:  # that all prompts fit, before the first is answered
        ids = [row["ids"] for row in data.prompts(tok, rows, args.prompt_style, args.max_prompt)[0]]
        sample.check_prompts(model, ids, [args.max_new_tokens or 1] * len(ids))
    if args.adapter:
        ids = tok.prompt_ids(sets[0][1][0]["question"], args.prompt_style)
        check_adapter(model, ids, args.adapter)

    # a run without an adapter has trained all of the model
    arms = ["base", "adapter"] if args.adapter else ["trained" if args.run else "base"]
    results = []  # (set, arm, evaluate's dict)
    try:
        for (name, rows), arm in product(sets, arms):
            with nullcontext() if arm == "adapter" else lora.disabled(model):
                r = evaluate(
                    model, tok, rows, style=args.prompt_style, n=args.n,
                    temperature=args.temperature, top_p=args.top_p,
                    max_new_tokens=args.max_new_tokens, max_prompt=args.max_prompt,
                    max_rows=args.max_rows, seed=args.seed, score=score, ks=args.k or ())
            results.append((name, arm, r))
            if arm == "adapter":
                r["gain"], r["stderr_gain"] = gain(results[-2][2]["rows"], r["rows"])
            if args.out and ranks.rank == 0:
                write_jsonl(args.out, ({"data": name, "model": arm, **row}
                                       for name, arm, r in results for row in r["rows"]))
    finally:  # a stop in a later set must not lose these
        if results:
            show_results(results, args.reward)


def main(argv=None):
    return flags.run_command(COMMAND, run, argv)


if __name__ == "__main__":
    sys.exit(main())
