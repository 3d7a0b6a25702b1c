"""
Measurements behind the README's choices.

    gradient   which log-probs should the ratio be taken against when the sampler is noisy? The
               gradient of one step from noisy samples, for each --old-logp, beside the gradient
               from clean samples of the same prompts: their cosine, and the share of tokens that
               the clip takes away. Sigma 0, two clean gradients of different samples, is the
               ceiling.

    2x2        the paper's central ablation, {16 bits, NVFP4} x {AQN off, on} over five seeds, one
               run after another, each in a folder of --out; a run that is there is not repeated,
               one that was stopped goes on. Prints each arm's held-out accuracy, and what either
               factor adds within a seed, with standard errors over the seeds.

Flags after the name are train.py's; for `gradient`, --prompts-per-step x --group-size completions
are drawn for each gradient.

    python experiments.py gradient --prompts-per-step 32 --group-size 32 --out gradient.json
    python experiments.py gradient --model DIR --data gsm8k --prompt-style boxed --out gradient.json
    python experiments.py 2x2 --out runs/2x2
"""
import runtime.command  # isort: skip  # noqa: F401 (first: ctrl-C is one line from here on)
import json
import sys
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

import torch

import aqn
import data
import grpo
import lora
import plot
import sample
import train
from runtime import flags
from weights.files import check_out, whole

SIGMAS = (0.0, 1e-3, 1e-2, 5e-2)
SEEDS = range(5)
ARMS = {f"{quant}{noise}": ["--quant", quant, noise]
        for quant in ("none", "nvfp4") for noise in ("--no-aqn", "--aqn")}


def drawn(model, tok, rows, args, seed):
    """Graded completions with their advantages, a list."""
    groups = sample.generate(
        model, [r["ids"] for r in rows], args.group_size, args.max_new_tokens, args.temperature,
        eos_ids=tok.eos_ids, seed=seed, max_rows=args.max_rows)
    out = [[grpo.Completion(row, row["ids"], s.ids, s.logprobs, s.finished) for s in g]
           for row, g in zip(rows, groups, strict=True)]
    for c in chain(*out):
        c.reward = data.reward(tok.decode(c.ids), c.row["answer"], args.prompt_style)["reward"]
    grpo.set_advantages(out)
    return list(chain(*out))


def gradient_of(model, params, completions, settings):
    """(gradient of all parameters as one vector, share of clipped tokens) under the clean model."""
    m = grpo.mean_metrics(grpo.backward(model, completions, settings))
    flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
    for p in params:
        p.grad = None
    return flat, m["clip_low_frac"] + m["clip_high_frac"]


def gradient(args):
    model, tok = flags.load_policy(args)
    rows = data.load(args.data, "train", seed=args.seed)
    rows = data.prompts(tok, rows, args.prompt_style, args.max_prompt)[0][: args.prompts_per_step]
    params = lora.add_lora(model, args.lora_rank, args.lora_alpha, args.seed)
    model.checkpointing, out = args.checkpointing, []
    plain = grpo.Settings(args.loss, micro_batch_tokens=args.micro_batch_tokens,
                          max_new_tokens=args.max_new_tokens)
    clean = gradient_of(model, params, drawn(model, tok, rows, args, 1), plain)[0]
    for sigma in SIGMAS:
        aqn.set_noise(model, sigma, 7)
        completions = drawn(model, tok, rows, args, 2)
        aqn.set_noise(model, 0.0)
        for anchor in ("sampler", "current"):
            settings = grpo.Settings(**{**vars(plain), "old_logp": anchor, "tis_cap": args.tis_cap})
            g, clipped = gradient_of(model, params, completions, settings)
            cosine = torch.nn.functional.cosine_similarity(g, clean, 0).item()
            out.append({"sigma": sigma, "old_logp": anchor, "cosine": cosine, "clipped": clipped})
            print(json.dumps(out[-1]), flush=True)
    return out


def gradients(args, argv):
    check_out(args.out)
    rows = gradient(args)
    with whole(args.out) as part:
        part.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def ablation(args, argv):
    for seed in SEEDS:
        for arm, chosen in ARMS.items():
            out = Path(args.out) / f"{arm}-s{seed}"
            if (out / "summary.json").is_file():
                continue
            again = ["--resume"] if (out / "config.json").is_file() else [*argv, *chosen]
            code = train.main([*again, "--seed", str(seed), "--out", str(out)])
            if code:
                return code
    print(table(args.out))


def table(folder):
    """Markdown: held-out accuracy after each evaluation by arm, and the two factors' effects on the
    last one."""
    at, last = {}, {}  # {arm: {steps: [accuracy by seed]}}
    for arm in ARMS:
        runs = [Path(folder) / f"{arm}-s{seed}" for seed in SEEDS]
        at[arm] = {}
        for run in runs:
            for row in plot.read(run):
                if row["eval_accuracy"] is not None:
                    at[arm].setdefault(row["step"], []).append(row["eval_accuracy"])
        last[arm] = [json.loads((run / "summary.json").read_text())["accuracy_after"]
                     for run in runs]
    steps = list(at["none--aqn"])
    lines = ["| | " + " | ".join(f"after {s}" for s in steps) + " | at the end |",
             "|---" * (len(steps) + 2) + "|"]
    for arm in ARMS:
        cells = [told(at[arm][s]) for s in steps] + [told(last[arm])]
        lines.append(f"| {arm.replace('--', ', ')} | " + " | ".join(cells) + " |")
    pairs = {"NVFP4 adds": ("nvfp4", "none"), "AQN adds": ("--aqn", "--no-aqn")}
    for name, (more, less) in pairs.items():
        both = [(arm, arm.replace(more, less)) for arm in ARMS if arm != arm.replace(more, less)]
        gain = [fmean(last[a][i] - last[b][i] for a, b in both) for i in range(len(SEEDS))]
        lines.append(f"{name} {told(gain)} points, within a seed")
    return "\n".join(lines)


def told(values):
    """Mean and standard error, in percent."""
    return f"{100 * fmean(values):.1f} +- {100 * stdev(values) / len(values)**0.5:.1f}"


EXPERIMENTS = {"gradient": gradients, "2x2": ablation}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in EXPERIMENTS:
        return flags.run_command("train", EXPERIMENTS[argv[0]], argv[1:])
    print(f"experiments.py: error: name an experiment: {', '.join(EXPERIMENTS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
