"""
What four bits cost and what AWQ gives back: {16 bits, NVFP4, MXFP4, NF4} x {plain rounding, AWQ}.

Perplexity of the test split's questions with answers, its gap to 16 bits paired by document, and
KL(16-bit model || this one) on the same text; greedy accuracy (boxed prompt); token entropy at
temperature 1 on the model's own samples. --methods: `rtn` is plain rounding. Each row is in --out
as soon as it is measured.

    python lab/bench_quantization.py --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k/ --out q.json
"""
import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import checkpoint, command, datasets
from plumbing.files import check_out, write_json
from plumbing.policy import place
from plumbing.tokenizer import Tokenizer

import torch

import data
import model as qwen
import sample
from eval import evaluate, stderr
from model import logits, token_logprobs
from nvfp4 import FORMATS

NEW = 400  # tokens, at most, of answers and samples


@torch.no_grad()
def scored(model, ids, start):
    """(log-prob, entropy) in nats, each (T,), of the tokens from `start` on in `ids`, a list."""
    ids = torch.tensor([ids], device=model.embed.weight.device)
    hidden = model.hidden(ids[:, :-1])[0, start - 1 :]  # (T, C): what predicts those tokens
    return token_logprobs(hidden, model.lm_head.weight, ids[0, start:],
                          valid_vocab=model.valid_vocab)


def likelihoods(model, docs):
    """[[negative log-likelihood in nats, tokens scored] of each document], which is token ids; its
    first token is not scored. exp(sum / tokens) is the perplexity."""
    return [[-scored(model, doc, 1)[0].sum().item(), len(doc) - 1] for doc in docs]


def own_entropy(model, tok, prompts):
    """(mean, standard error) over prompts of the token entropy in nats along one sample of each."""
    drawn = sample.generate(model, prompts, 1, NEW, eos_ids=tok.eos_ids)
    means = [scored(model, prompt + s.ids, len(prompt))[1].mean().item()
             for prompt, (s,) in zip(prompts, drawn, strict=True)]
    return fmean(means), stderr(means)


@torch.no_grad()
def divergence(reference, model, docs):
    """[[KL(reference || model) in nats, tokens] of each document], the KL summed over the
    next-token distributions after each token."""
    out = []
    for doc in docs:
        ids = torch.tensor([doc[:-1]], device=model.embed.weight.device)
        p, q = (logits(m.hidden(ids)[0], m.lm_head.weight)[:, : model.valid_vocab].log_softmax(1)
                for m in (reference, model))  # (T, V)
        out.append([(p.exp() * (p - q)).sum().item(), len(doc) - 1])
    return out


def per_token(sums):
    """(mean, standard error) per token, from [[sum over its tokens, tokens] of each document]."""
    tokens = sum(n for _, n in sums)
    ratio = sum(x for x, _ in sums) / tokens
    # the error of a ratio of sums: the documents are the draws, and their lengths differ
    return ratio, math.sqrt(sum((x - ratio * n) ** 2 for x, n in sums)) / tokens


def row(args, fmt, method, docs, questions, tok):
    """One line of the table, and [[nats, tokens] of each document]."""
    where, text = (args.model, args.device, args.dtype), []
    if method == "awq":
        text = [datasets.calibration(args.calib, checkpoint.fetch(args.model))]
    model, out = qwen.load(*where, fmt, *text), {"format": fmt, "method": method}
    sample.set_engine(model, "auto")
    model.valid_vocab = len(tok)
    nats = likelihoods(model, docs)
    out["tokens"] = sum(n for _, n in nats)
    out["perplexity"] = math.exp(per_token(nats)[0])
    if args.divergence:
        # loaded for each row and then freed: what follows plans with the memory that is free
        reference = model if fmt == "none" else qwen.load(*where)
        out["kl"], out["kl_se"] = per_token(divergence(reference, model, docs[: args.divergence]))
        del reference
    if args.questions:
        r = evaluate(model, tok, questions[: args.questions], style="boxed", n=1,
                     temperature=0.0, top_p=1.0, max_new_tokens=NEW)
        out |= {"accuracy": r["accuracy"], "accuracy_se": r["stderr"], "questions": r["questions"]}
    if args.samples:
        kept = [q["ids"] for q in data.prompts(tok, questions[: args.samples], "boxed")[0]]
        out["entropy"], out["entropy_se"] = own_entropy(model, tok, kept)
    return out, nats


def compare(rows, nats):
    """Add to each row its gap to the 16-bit row in nats a token, and the share of plain rounding's
    gap that AWQ removes. nats: of each row [[nats, tokens] of a document]."""
    plain = {}
    for r, own in zip(rows, nats, strict=True):
        r["gap"], r["gap_se"] = per_token([(a - b, n) for (a, n), (b, _) in zip(
            own, nats[0], strict=True)])
        if r["method"] == "rtn":
            plain[r["format"]] = r["gap"]
        elif r["format"] in plain:
            r["gap_removed"] = 1 - r["gap"] / plain[r["format"]]


def run(args):
    check_out(args.out, new=True)
    args.device, args.dtype = place(args.device)
    args.calib, test = args.data / "train.jsonl", args.data / "test.jsonl"
    tok = Tokenizer(checkpoint.fetch(args.model))
    docs = [tok.encode(t) for t in datasets.texts(test)[: args.documents]]
    questions = data.load(test, "test")
    settings = {k: v if isinstance(v, (int, str, list)) else str(v)
                for k, v in vars(args).items() if k != "out"}
    rows, nats = [], []
    for fmt, method in [("none", "-")] + [(f, m) for f in args.formats for m in args.methods]:
        new, its_nats = row(args, fmt, method, docs, questions, tok)
        rows.append(new)
        nats.append(its_nats)
        compare(rows, nats)
        write_json(args.out, {"table_settings": settings, "table": rows}, indent=1)
        print(json.dumps(new), flush=True)


def main(argv=None):
    p = command.Parser(description=__doc__.split("\n")[1],
                       formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, number, formats = p.add_argument, command.number, list(FORMATS)
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--model", required=True, help="16-bit checkpoint")
    add("--data", type=Path, required=True, help="folder of train.jsonl (calibration), test.jsonl")
    add("--formats", nargs="+", choices=formats, default=formats, help="beside 16 bits")
    add("--methods", nargs="+", choices=["rtn", "awq"], default=["rtn", "awq"], help="to try")
    add("--documents", type=number(1, 1e6), default=1319, help="test documents for the perplexity")
    add("--divergence", type=number(0, 1e6), default=256, help="of them for the KL, 0 for none")
    add("--questions", type=number(0, 1e6), default=1319, help="greedy questions, 0 for none")
    add("--samples", type=number(0, 1e6), default=256, help="samples for the entropy, 0 for none")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="cuda if there is one")
    return command.run("lab/bench_quantization.py", lambda: run(p.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
