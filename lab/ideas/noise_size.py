"""How large is a sigma for this model? KL(noisy || clean) and entropy, in nats a token, along the
model's own samples, with a draw of the noise for each.

Sigma is absolute, and norms are not alike: see docs/noise.md. And how large is the rounding of
--quant, with --awq or a format of your own (int4.py)? KL(16 bits || four bits) along samples of the
16-bit model, and how often both have the same most likely token. The flags are train.py's:

    python lab/ideas/noise_size.py --model DIR --data gsm8k --prompts-per-step 24
    python lab/ideas/noise_size.py --model DIR --data gsm8k --quant mxfp4 --awq
"""
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plumbing import checkpoint, flags

import torch

import aqn
import data
import sample
import train

SIGMAS = (0.0, 1e-3, 1e-2, 5e-2, 1e-1)


def next_tokens(model, prompt, ids):
    """Log-probs (T, V) over the vocabulary at each of the T tokens `ids` drawn after `prompt`."""
    x = torch.tensor([prompt + ids[:-1]], device=model.embed.weight.device)
    return model(x)[0, len(prompt) - 1 :, : model.valid_vocab].float().log_softmax(1)


@torch.no_grad()
def sizes(model, completions, sigmas=SIGMAS):
    """{sigma: (KL(noisy || clean), entropy)} of sigmas, 0 first: means over the tokens of
    completions, [(prompt, ids)]."""
    sums, tokens = {sigma: torch.zeros(2) for sigma in sigmas}, 0
    for i, (prompt, ids) in enumerate(completions):
        clean = None
        for sigma in sigmas:
            aqn.set_noise(model, sigma, aqn.noise_seed(i))
            noisy = next_tokens(model, prompt, ids)
            clean = noisy if clean is None else clean  # (T, V)
            kl, entropy = noisy.exp() * (noisy - clean), -noisy.exp() * noisy
            sums[sigma] += torch.stack([kl.sum(), entropy.sum()]).cpu()
        tokens += len(ids)
    aqn.clear(model)
    return {sigma: (total / tokens).tolist() for sigma, total in sums.items()}


@torch.no_grad()
def rounding(model, exact, completions):
    """(KL(exact || model) in nats, share where both have the same most likely token): means over
    the tokens of completions, [(prompt, ids)]."""
    sums, tokens = torch.zeros(2), 0
    for prompt, ids in completions:
        p, q = (next_tokens(m, prompt, ids) for m in (exact, model))  # (T, V)
        kl, same = p.exp() * (p - q), p.argmax(1) == q.argmax(1)
        sums += torch.stack([kl.sum(), same.sum()]).cpu()
        tokens += len(ids)
    return (sums / tokens).tolist()


def draw(model, tok, rows, args, most=None):
    """[(prompt, ids)]: one sample of each row, of at most `most` tokens (--max-new-tokens)."""
    drawn = sample.generate(model, [row["ids"] for row in rows], 1, most or args.max_new_tokens,
                            eos_ids=tok.eos_ids, seed=args.seed, max_rows=args.max_rows)
    return [(row["ids"], s.ids) for row, (s,) in zip(rows, drawn, strict=True)]


def body(args, argv):
    model, tok = sample.load_policy(args)
    rows = data.load(args.data, "train", seed=args.seed, levels=args.levels)
    rows = data.prompts(tok, rows, args.prompt_style, args.max_prompt)[0][: args.prompts_per_step]
    stored = checkpoint.read_config(checkpoint.fetch(args.model))["quantization"]
    if args.quant != "none" and not stored:  # else there are no 16 bits to compare with
        exact, _ = sample.load_policy(Namespace(**vars(args) | {"quant": "none", "awq": False}))
        kl, same = rounding(model, exact, draw(exact, tok, rows, args))
        print(f"{args.quant}: KL to 16 bits {kl:.2g}, the same most likely token in {same:.1%}")
    weights = [norm.weight.abs().mean().item() for pair in aqn.norms(model) for norm in pair]
    print(f"mean |w| of the norms: {min(weights):.3g} to {max(weights):.3g}\n"
          "sigma     KL to clean  entropy")
    for sigma, (kl, entropy) in sizes(model, draw(model, tok, rows, args)).items():
        print(f"{sigma:<8g}  {kl:<11.2g}  {entropy:.3f}")


def main(argv=None):
    return flags.run_command(train.COMMAND, body, argv, "noise_size.py")


if __name__ == "__main__":
    sys.exit(main())
