"""How large is a sigma for this model? KL(noisy || clean) and entropy, in nats a token, along the
model's own samples, with a draw of the noise for each.

Sigma is absolute, and norms differ from model to model: see noise.md. The flags are train.py's:

    python lab/ideas/noise_size.py --model DIR --data gsm8k --prompts-per-step 24
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plumbing import flags

import torch

import aqn
import data
import sample
import train

SIGMAS = (0.0, 1e-3, 1e-2, 5e-2, 1e-1)


@torch.no_grad()
def sizes(model, completions, sigmas=SIGMAS):
    """{sigma: (KL(noisy || clean), entropy)} of sigmas, 0 first: means over the tokens of
    completions, [(prompt, ids)]."""
    sums, tokens = {sigma: torch.zeros(2) for sigma in sigmas}, 0
    for i, (prompt, ids) in enumerate(completions):
        x = torch.tensor([prompt + ids[:-1]], device=model.embed.weight.device)
        clean = None
        for sigma in sigmas:
            aqn.set_noise(model, sigma, aqn.noise_seed(i))
            noisy = model(x)[0, len(prompt) - 1 :, : model.valid_vocab].float().log_softmax(1)
            clean = noisy if clean is None else clean  # (T, V)
            kl, entropy = noisy.exp() * (noisy - clean), -noisy.exp() * noisy
            sums[sigma] += torch.stack([kl.sum(), entropy.sum()]).cpu()
        tokens += len(ids)
    aqn.clear(model)
    return {sigma: (total / tokens).tolist() for sigma, total in sums.items()}


def main(args, argv):
    model, tok = sample.load_policy(args)
    rows = data.load(args.data, "train", seed=args.seed, levels=args.levels)
    rows = data.prompts(tok, rows, args.prompt_style, args.max_prompt)[0][: args.prompts_per_step]
    drawn = sample.generate(model, [row["ids"] for row in rows], 1, args.max_new_tokens,
                            eos_ids=tok.eos_ids, seed=args.seed, max_rows=args.max_rows)
    weights = [norm.weight.abs().mean().item() for pair in aqn.norms(model) for norm in pair]
    print(f"mean |w| of the norms: {min(weights):.3g} to {max(weights):.3g}\n"
          "sigma     KL to clean  entropy")
    pairs = [(row["ids"], s.ids) for row, (s,) in zip(rows, drawn, strict=True)]
    for sigma, (kl, entropy) in sizes(model, pairs).items():
        print(f"{sigma:<8g}  {kl:<11.2g}  {entropy:.3f}")


if __name__ == "__main__":
    sys.exit(flags.run_command(train.COMMAND, main, name="noise_size.py"))
