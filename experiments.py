"""
Measurements behind the README's choices, apart from training runs.

    gradient   which log-probs should the ratio be taken against when the sampler is noisy? The
               gradient of one step from noisy samples, for each --old-logp, beside the gradient
               from clean samples of the same prompts: their cosine, and the share of tokens that
               the clip takes away. Sigma 0, two clean gradients of different samples, is the
               ceiling.

Flags after the name are train.py's; --prompts-per-step x --group-size completions are drawn for
each gradient.

    python experiments.py gradient --prompts-per-step 32 --group-size 32 --out gradient.json
    python experiments.py gradient --model DIR --data gsm8k --prompt-style boxed --out gradient.json
"""
import json
import sys
from itertools import chain

import torch

import aqn
import data
import grpo
import lora
import sample
from runtime import flags
from weights.files import whole

SIGMAS = (0.0, 1e-3, 1e-2, 5e-2)


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


def run(args, argv):
    rows = gradient(args)
    with whole(args.out) as part:
        part.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] != ["gradient"]:
        print("experiments.py: error: name an experiment: gradient", file=sys.stderr)
        return 2
    return flags.run_command("train", run, argv[1:])


if __name__ == "__main__":
    sys.exit(main())
