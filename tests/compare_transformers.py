"""
Logits of a real checkpoint against Hugging Face transformers' (not a test: transformers is no dependency of this project).

    pip install transformers && python tests/compare_transformers.py --model DIR --data gsm8k --out results/logits_h100.json

For each of 20 prompts both models see the same ids; reported is max |difference| of the logits over all positions and ids.
"""
import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import data
import model as qwen


def main():
    p = argparse.ArgumentParser(description="max |logit difference| to transformers")
    p.add_argument("--model", required=True, help="checkpoint folder or hub id")
    p.add_argument("--data", default="gsm8k", help="data set whose first questions are the prompts")
    p.add_argument("--n", type=int, default=20, help="prompts")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    p.add_argument("--out", help="write the JSON here too")
    args = p.parse_args()
    import transformers

    # tf32 would round float32 products to 10 bits and hide what is compared here
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = qwen.fetch(args.model)
    tok = data.Tokenizer(folder)
    prompts = [tok.prompt_ids(r["question"], "boxed") for r in data.load(args.data, "test", n=args.n)]
    report = {"model": str(folder.name), "prompts": len(prompts), "tokens": sum(map(len, prompts)),
              "transformers": transformers.__version__, "torch": torch.__version__}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        ours = qwen.load(folder, args.device, dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        worst, total, agree, count, scale = 0.0, 0.0, 0, 0, 0.0
        with torch.no_grad():
            for ids in prompts:
                x = torch.tensor([ids], device=args.device)
                a, b = ours(x).float(), theirs(x).logits.float()
                gap = (a - b).abs()
                worst, total = max(worst, gap.max().item()), total + gap.mean().item()
                agree, count, scale = agree + (a.argmax(-1) == b.argmax(-1)).sum().item(), count + len(ids), b.abs().max().item()
        report[name] = {"max_abs_diff": worst, "mean_abs_diff": total / len(prompts), "argmax_agree": agree / count,
                        "largest_logit": scale}
        del ours, theirs
    print(json.dumps(report))
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
