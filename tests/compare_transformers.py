"""
A real checkpoint beside Hugging Face transformers (not a test: transformers is no dependency of this project).

    pip install transformers
    python tests/compare_transformers.py families
    python tests/compare_transformers.py logits --model DIR --data gsm8k --out results/logits_h100.json
    python tests/compare_transformers.py speed --model DIR --data gsm8k --device cpu --out results/generate_cpu.json

families: a tiny random model of each family that is read here, written by transformers; max |difference| of logits in float32.
logits: for each of 20 prompts both models see the same ids; max |difference| over all positions and ids. speed: 8 prompts
sampled at temperature 1 to 64 new tokens each, no stop token, by sample.generate and by transformers' generate, in turn, the best
of three; both in each of the two dtypes.
"""
import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import model as qwen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from plumbing import checkpoint

import data
import sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def logits(prompts, ours, theirs, device):
    worst, total, agree, count, scale = 0.0, 0.0, 0, 0, 0.0
    for ids in prompts:
        x = torch.tensor([ids], device=device)
        a, b = ours(x).float(), theirs(x).logits.float()
        gap = (a - b).abs()
        worst, total = max(worst, gap.max().item()), total + gap.mean().item()
        agree, count, scale = agree + (a.argmax(-1) == b.argmax(-1)).sum().item(), count + len(ids), b.abs().max().item()
    return {"max_abs_diff": worst, "mean_abs_diff": total / len(prompts), "argmax_agree": agree / count, "largest_logit": scale}


def speed(prompts, ours, theirs, device, new=64):
    length = min(map(len, prompts))
    prompts = [ids[-length:] for ids in prompts]  # transformers would pad
    x = torch.tensor(prompts, device=device)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0,
               "max_new_tokens": new, "min_new_tokens": new}
    runs = {"ours": lambda: sample.generate(ours, prompts, max_new_tokens=new),
            "transformers": lambda: theirs.generate(x, attention_mask=torch.ones_like(x), **options)}
    seconds = {name: [] for name in runs}
    for _ in range(3):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    ours, theirs = (len(prompts) * new / min(s) for s in seconds.values())
    return {"rows": len(prompts), "prompt": length, "new": new, "ours_tok_s": ours, "transformers_tok_s": theirs,
            "ratio": ours / theirs}


def families(transformers):
    """{family: max |difference of logits|} of tiny models with random norms, biases and large q and k."""
    shape = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128)
    report, ids = {}, torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(0))
    for name, options in (("Qwen2", {}), ("Llama", {"head_dim": 32}), ("Qwen3", {"head_dim": 32})):
        config = getattr(transformers, f"{name}Config")(**shape, **options)
        theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for key, p in theirs.named_parameters():
            torch.nn.init.normal_(p, 1.0 if key.endswith("norm.weight") else 0.0, 0.3)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = qwen.load(folder, dtype=torch.float32)
        report[name] = (ours(ids) - theirs(ids).logits).abs().max().item()
    return report


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description="this project beside transformers, on one checkpoint")
    p.add_argument("what", choices=["families", "logits", "speed"])
    p.add_argument("--model", help="checkpoint folder or hub id, for logits and speed")
    p.add_argument("--data", default="gsm8k", help="data set whose first questions are the prompts")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    p.add_argument("--out", help="write the JSON here too")
    args = p.parse_args()
    import transformers

    if args.what == "families":
        print(json.dumps({"transformers": transformers.__version__, "max_abs_diff": families(transformers)}))
        return
    if not args.model:
        p.error(f"{args.what}: --model is needed")
    # tf32 would round float32 products to 10 bits and hide what is compared here
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = checkpoint.fetch(args.model)
    tok = data.Tokenizer(folder)
    prompts = [tok.prompt_ids(r["question"], "boxed") for r in data.load(args.data, "test", n=20 if args.what == "logits" else 8)]
    report = {"model": str(folder.name), "prompts": len(prompts), "tokens": sum(map(len, prompts)), "device": args.device,
              "cores": os.cpu_count(), "transformers": transformers.__version__, "torch": torch.__version__}
    for name, dtype in DTYPES.items():
        ours = qwen.load(folder, args.device, dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        report[name] = {"logits": logits, "speed": speed}[args.what](prompts, ours, theirs, args.device)
        del ours, theirs
    print(json.dumps(report))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
