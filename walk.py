"""
One prompt from text to a LoRA gradient, with every shape and some of the numbers on the way.

What train.py does in a step, done once, slowly, on the embedded model. Read it beside the files it
names; change a line, or the question, and run it again.

    python walk.py
"""
import sys

from plumbing import command, flags
from plumbing.metrics import mean_metrics

import torch

import aqn
import data
import grpo
import lora
import sample
import train
from nvfp4 import FORMATS, unpack

QUESTION, ANSWER = "Take 11+5, subtract 10, triple it, add 43.", "61"
G, LIMIT = 4, 48  # completions of the prompt, tokens each


def show(what, value, numbers=None):
    print(f"  {what:<46} {tuple(value.shape)}")
    if numbers is not None:
        print("    " + " ".join(f"{x:.4g}" for x in numbers))


def main():
    given = f"--device cpu --quant none --overlong none --max-new-tokens {LIMIT}"
    args = flags.parse(train.COMMAND, given.split())
    base, tok = sample.load_policy(args)  # in 16 bits, to compare with
    args.quant = "nvfp4"
    model, _ = sample.load_policy(args)

    print("\n1. Text to ids (plumbing/tokenizer.py): the checkpoint's own chat template")
    ids = tok.prompt_ids(QUESTION, "tags")
    print("  " + repr(tok.tokenizer.decode(ids, skip_special_tokens=False)))
    show("prompt ids (T,)", torch.tensor(ids), ids[:12])

    print("\n2. A weight in four bits (nvfp4.py): value x block scale x global scale")
    w, q = base.layers[0].attn.qkv_proj.weight.detach(), model.layers[0].attn.qkv_proj.q
    codes = unpack(q.codes)
    show("qkv_proj (N, K), q, k and v stacked", w)
    show("packed codes, two a byte", q.codes)
    show("block scales, one for each 16 columns", q.scale)
    values = torch.tensor(FORMATS["nvfp4"].values)[codes[0, :6].int()]
    scale, g = q.scale[0, 0].float(), q.global_scale[0]
    print(f"  row 0, its first scale {scale:.4g}, global {g:.4g}; columns 0-5: 16 bits, code, "
          "value x scale x global")
    for a, code, value in zip(w[0], codes[0], values, strict=False):
        print(f"    {a:9.5f}  {code:3d}  {value * scale * g:9.5f}")

    print("\n3. LoRA beside it (lora.py): B = 0, so nothing changes yet")
    optimizer = grpo.AdamW(lora.add_lora(model, 8, 16), 2e-3)
    linear = model.layers[0].attn.qkv_proj
    show("A (parts x R, K)", linear.A)
    show("B (N, R)", linear.B)

    print("\n4. Noise in the norms (aqn.py): the sampler is not the policy that is trained")
    aqn.set_noise(model, 0.05, aqn.noise_seed(0, 1))
    norm = model.layers[0].input_layernorm
    show("norm weight w (C,)", norm.weight, norm.weight[:4].tolist())
    show("noise Z (C,)", norm.noise, norm.noise[:4].tolist())
    x = model.embed(torch.tensor([ids]))  # (1, T, C)
    show("embedded prompt (1, T, C)", x)
    show("x / rms(x) * (w + Z) (1, T, C)", norm(x))
    show("qkv (1, T, (H + 2 Hkv) D)", linear(norm(x)))

    print(f"\n5. {G} completions (sample.py), graded (data.py), beside their group (grpo.py)")
    [group] = sample.generate(model, [ids], G, LIMIT, eos_ids=tok.eos_ids, seed=3)
    row = {"question": QUESTION, "answer": ANSWER}
    cs = [grpo.Completion(row, ids, s.ids, s.logprobs, s.finished, tok.decode(s.ids))
          for s in group]
    for c in cs:
        c.reward = data.reward(c.text, row["answer"])["reward"]
    grpo.set_advantages([cs])
    for c in cs:
        print(f"  reward {c.reward:.1f}, advantage {c.advantage:+.2f}, "
              f"log p {sum(c.logprobs):6.2f}: {' '.join(c.text.split())!r}")

    print("\n6. The clean policy's log-probs of the same tokens, and the ratio (grpo.py)")
    aqn.clear(model)
    logp, entropy, mask = grpo.completion_logprobs(model, cs, 1.0)
    show("log-probs (G, T), padded; mask from lengths", logp)
    ratio = (logp[0][mask[0]] - torch.tensor(cs[0].logprobs)).exp()
    show("ratio to the sampler, first completion", ratio, ratio[:8].tolist())

    print("\n7. Loss, gradient, step")
    sums, grad_norm = grpo.update(model, optimizer, cs, args)
    m = mean_metrics(sums)
    print(f"  loss {m['loss']:.4f}, entropy {m['entropy']:.3f} nats, gradient norm {grad_norm:.4f}")
    print(f"  B moved by at most {linear.B.abs().max():.1e}; A had a gradient: "
          f"{bool(optimizer.state[linear.A]['exp_avg'].any())}, since B was 0")


if __name__ == "__main__":
    sys.exit(command.run("walk.py", main))
