"""How large is a sigma for this model? KL(noisy || clean) and entropy, in nats a token, along the
model's own samples, with a draw of the noise for each.

Sigma is absolute, and norms differ from model to model: see noise.md. The flags are train.py's:

    python lab/ideas/noise_size.py
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
def sizes(model, completions):
    """{sigma: (KL(noisy || clean), entropy)}, means over the tokens of completions, [(prompt,
    ids)]."""
    sums, tokens = {sigma: torch.zeros(2) for sigma in SIGMAS}, 0
    for i, (prompt, ids) in enumerate(completions):
        x = torch.tensor([prompt + ids[:-1]], device=model.embed.weight.device)
        logp = {}  # sigma -> (T, V)
        for sigma in SIGMAS:
            aqn.set_noise(model, sigma, aqn.noise_seed(i))
            y = model(x)[0, len(prompt) - 1 :, : model.valid_vocab]
            logp[sigma] = y.float().log_softmax(1)
        for sigma, noisy in logp.items():
            kl, entropy = noisy.exp() * (noisy - logp[0.0]), -noisy.exp() * noisy
            sums[sigma] += torch.stack([kl.sum(), entropy.sum()]).cpu()
        tokens += len(ids)
    aqn.clear(model)
    return {sigma: (total / tokens).tolist() for sigma, total in sums.items()}


def main(args, argv):
    model, tok = sample.load_policy(args)
    rows = data.load(args.data, "train", seed=args.seed, levels=args.levels)
    rows = data.prompts(tok, rows, args.prompt_style, args.max_prompt)[0][: args.prompts_per_step]
    prompts = [row["ids"] for row in rows]
    drawn = sample.generate(model, prompts, 1, args.max_new_tokens, eos_ids=tok.eos_ids,
                            seed=args.seed, max_rows=args.max_rows)
    weights = sorted(norm.weight.abs().mean().item() for pair in aqn.norms(model) for norm in pair)
    print(f"mean |w| of the {len(weights)} norms: {weights[0]:.3g} to {weights[-1]:.3g}, half of "
          f"them below {weights[len(weights) // 2]:.3g}\nsigma     KL to clean  entropy")
    pairs = [(prompt, s.ids) for prompt, (s,) in zip(prompts, drawn, strict=True)]
    for sigma, (kl, entropy) in sizes(model, pairs).items():
        print(f"{sigma:<8g}  {kl:<11.2g}  {entropy:.3f}")


if __name__ == "__main__":
    sys.exit(flags.run_command(train.COMMAND, main, name="noise_size.py"))
