"""
A real checkpoint beside Hugging Face transformers (not a test: transformers is no dependency of this project).

    pip install transformers
    python tests/compare_transformers.py families
    python tests/compare_transformers.py logits --model DIR --data gsm8k --out results/logits_h100.json

families: a tiny random model of each family that is read here, written by transformers; max |difference| of logits in float32 over the largest.
logits: for each of 20 prompts both models see the same ids; max |difference| over all positions and ids, in each of two dtypes.
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import checkpoint
from plumbing.tokenizer import Tokenizer

import torch

import data
import model as qwen

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


def families(transformers):
    """{family: max |difference of logits| over the largest} of tiny models with random norms, biases and large q and k."""
    shape = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128)
    report, ids = {}, torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(0))
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
              "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for kind, options in (("Qwen2", {}), ("Llama", {"head_dim": 32}), ("Qwen3", {"head_dim": 32}), ("Mistral", {"sliding_window": None}),
                          ("Llama, llama3", {"rope_parameters": llama3})):
        name = kind.partition(",")[0]
        config = getattr(transformers, f"{name}Config")(**shape, **options)
        theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        for key, p in theirs.named_parameters():
            torch.nn.init.normal_(p, 1.0 if key.endswith("norm.weight") else 0.0, 0.3)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = qwen.load(folder, dtype=torch.float32)
        want = theirs(ids).logits
        report[kind] = ((ours(ids) - want).abs().max() / want.abs().max()).item()
    return report


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description="this project beside transformers, on one checkpoint")
    p.add_argument("what", choices=["families", "logits"])
    p.add_argument("--model", help="checkpoint folder or hub id, for logits")
    p.add_argument("--data", default="gsm8k", help="data set whose first questions are the prompts")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    p.add_argument("--out", help="write the JSON here too")
    args = p.parse_args()
    import transformers

    if args.what == "families":
        print(json.dumps({"transformers": transformers.__version__, "max_diff_over_largest": families(transformers)}))
        return
    if not args.model:
        p.error(f"{args.what}: --model is needed")
    # tf32 would round float32 products to 10 bits and hide what is compared here
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = checkpoint.fetch(args.model)
    tok = Tokenizer(folder)
    prompts = [tok.prompt_ids(r["question"], "boxed") for r in data.load(args.data, "test", n=20)]
    report = {"model": str(folder.name), "prompts": len(prompts), "tokens": sum(map(len, prompts)), "device": args.device,
              "transformers": transformers.__version__, "torch": torch.__version__}
    for name, dtype in DTYPES.items():
        ours = qwen.load(folder, args.device, dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        report[name] = logits(prompts, ours, theirs, args.device)
        del ours, theirs
    print(json.dumps(report))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
