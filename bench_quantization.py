"""
What four bits cost and what AWQ gives back, measured: the table of formats and methods, and the sizes and times of quantizing.

    table   {16 bits, NVFP4, MXFP4, NF4} x {plain rounding, AWQ}: perplexity on question + answer of the test split, paired with
            the 16-bit model document by document; greedy accuracy (boxed prompt); token entropy at temperature 1 on the
            model's own samples. `channels` and `blocks` are AWQ's two halves alone: channel scales, and block scales.
    sizes   random weights of the 7B, 14B and 32B shapes, quantized while loading: GiB on the card against `--plan`
    speed   a 7B checkpoint (random, written to a temporary folder first): reading alone, loading with --quant, and the command
            that writes NVFP4
    large   the 72B shapes, random weights made on the card: peak memory of quantizing while loading

Each finished row is in --out at once (and its likelihoods by document beside it, in *.nll.json), and a row that is there already
is not measured again: run it several times, in parts.

    python bench_quantization.py --model Qwen/Qwen2.5-0.5B-Instruct --data gsm8k/ --out results/quantization.json
    python bench_quantization.py --parts sizes,speed,large --out results/quantization.json
"""
import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

import torch

import bench
import data
import eval as evaluation
import grpo
import nvfp4
import sample
from runtime.flags import place
from weights import awq, checkpoint, convert, memory

METHODS = {"channels": {"finalists": None}, "blocks": {"grid": 0}, "awq": {}}  # options of awq.Search


def mean_se(values):
    return evaluation.mean(values), evaluation.stderr(values)


@torch.no_grad()
def own_entropy(model, tok, prompts, max_new_tokens, seed=0):
    """(mean, standard error over prompts) of the token entropy in nats, at temperature 1, along one sample of each prompt."""
    means, drawn = [], sample.generate(model, prompts, 1, max_new_tokens, eos_ids=tok.eos_ids, seed=seed)
    for prompt, (s,) in zip(prompts, drawn, strict=True):
        ids = torch.tensor([prompt + s.ids], device=model.embed.weight.device)
        hidden = model.hidden(ids[:, :-1])[0, len(prompt) - 1 :]  # (T, C): the positions that predict the sample
        _, entropy = grpo.token_logprobs(hidden, model.lm_head.weight, ids[0, len(prompt) :], valid_vocab=model.valid_vocab)
        means.append(entropy.mean().item())
    return mean_se(means)


def row(args, fmt, method, docs, questions, tok):
    """One line of the table."""
    begin = time.time()
    if method in METHODS:
        model = awq.load(args.model, args.device, args.dtype, fmt, args.calib, args.sequences, args.length, **METHODS[method])
    else:
        model = checkpoint.load(args.model, args.device, args.dtype, fmt)
    model.valid_vocab = len(tok)
    out = {"format": fmt, "method": method, "load_seconds": round(time.time() - begin, 1)}
    if method in METHODS:
        out["error_kept"] = math.exp(evaluation.mean(math.log(r["awq"] / r["rtn"]) for r in model.awq))
        out["exponents_above_0"] = evaluation.mean(r["exponent"] > 0 for r in model.awq)
    scored = awq.perplexity(model, docs)
    out["tokens"] = sum(n for _, _, n in scored)
    out["perplexity"] = math.exp(sum(a for a, _, _ in scored) / out["tokens"])
    out["entropy_on_text"] = sum(e for _, e, _ in scored) / out["tokens"]
    if args.questions:
        r = evaluation.evaluate(model, tok, questions[: args.questions], "boxed", n=1, temperature=0.0, top_p=1.0,
                                max_new_tokens=args.max_new_tokens)
        out |= {"accuracy": r["accuracy"], "accuracy_se": r["stderr"], "boxed": r["format"], "questions": r["questions"]}
    if args.samples:
        kept, _ = data.prompts(tok, questions[: args.samples], "boxed")
        out["entropy"], out["entropy_se"] = own_entropy(model, tok, [q["ids"] for q in kept], args.max_new_tokens)
    sample.release(model)
    return out | {"seconds": round(time.time() - begin, 1)}, [[round(a, 3), n] for a, _, n in scored]


def compare(rows, likelihoods):
    """Adds to each row its gap to the 16-bit row in nats a token, paired by document, and the share of plain rounding's gap
    that the method removes. likelihoods: {"format method": [[nats, tokens] of each document]}."""
    base = likelihoods["none -"]
    for r in rows:
        own = likelihoods[f"{r['format']} {r['method']}"]
        d = [a - b for (a, _), (b, _) in zip(own, base, strict=True)]
        r["gap"] = sum(d) / r["tokens"]
        # of a ratio of sums: the documents are the draws, and their lengths differ
        r["gap_se"] = math.sqrt(sum((x - r["gap"] * n) ** 2 for x, (_, n) in zip(d, own, strict=True))) / r["tokens"]
    for r in rows:
        plain = next((p for p in rows if p["format"] == r["format"] and p["method"] == "rtn"), None)
        if plain and r["method"] in METHODS:
            r["gap_removed"] = 1 - r["gap"] / plain["gap"]


def show(rows):
    print(f"{'format':<8}{'method':<10}{'perplexity':>11}{'gap, nats':>20}{'removed':>9}{'accuracy':>16}{'entropy':>17}")
    for r in rows:
        gap = f"{r['gap']:.4f} +- {r['gap_se']:.4f}" if "gap" in r else "-"
        removed = f"{100 * r['gap_removed']:.0f}%" if "gap_removed" in r else "-"
        accuracy = f"{100 * r['accuracy']:.1f}% +- {100 * (r['accuracy_se'] or 0):.1f}" if "accuracy" in r else "-"
        entropy = f"{r['entropy']:.3f} +- {r['entropy_se'] or 0:.3f}" if "entropy" in r else "-"
        name = "16 bits" if r["format"] == "none" else r["format"]
        print(f"{name:<8}{r['method']:<10}{r['perplexity']:>11.4f}{gap:>20}{removed:>9}{accuracy:>16}{entropy:>17}")


def measured(fn):
    """(result, seconds, peak GiB of the GPU) of fn()."""
    torch.cuda.reset_peak_memory_stats()
    seconds, out = bench.timed(fn)
    return out, seconds, torch.cuda.max_memory_allocated() / memory.GIB


def size(name, fmt):
    """Quantize random weights of a shape while loading; GiB held and at the peak, against the memory."""
    before, config = torch.cuda.memory_allocated(), bench.config(name)
    model, seconds, peak = measured(lambda: checkpoint.build(config, checkpoint.RandomCheckpoint(), "cuda", torch.bfloat16, fmt))
    held = (torch.cuda.memory_allocated() - before) / memory.GIB
    del model
    torch.cuda.empty_cache()
    planned = sum(memory.weights(config, fmt).values()) / memory.GIB
    return {"shape": name, "format": fmt, "gib": held, "planned_gib": planned, "peak_gib": peak, "seconds": round(seconds, 1)}


def speed(fmt="nvfp4", name="7b"):
    """Seconds to read a 16-bit checkpoint, to load it quantized, and to write it quantized."""
    C, F, L, H, kv, V, tied = bench.SHAPES[name]
    raw = {"model_type": "qwen2", "vocab_size": V, "hidden_size": C, "intermediate_size": F, "num_hidden_layers": L,
           "num_attention_heads": H, "num_key_value_heads": kv, "tie_word_embeddings": tied}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "config"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        model = checkpoint.build(bench.config(name), checkpoint.RandomCheckpoint(), "cuda", torch.bfloat16)
        with checkpoint.Writer(Path(tmp) / "base", folder) as writer:
            for tensor in checkpoint.tensors(model):
                writer.add(*tensor)
        del model, tensor
        torch.cuda.empty_cache()
        source = checkpoint.Checkpoint(Path(tmp) / "base")
        begin = time.time()
        total = sum(source.get(n).clone().nbytes for n in sorted(source.where, key=lambda n: (source.where[n], n)))
        reading = time.time() - begin
        model, loading, peak = measured(lambda: checkpoint.load(Path(tmp) / "base", "cuda", quant=fmt))
        del model
        torch.cuda.empty_cache()
        report, writing, write_peak = measured(lambda: convert.convert(Path(tmp) / "base", Path(tmp) / "q", fmt, "cuda"))
    return {"shape": name, "format": fmt, "checkpoint_gib": total / memory.GIB, "reading_seconds": round(reading, 1),
            "load_seconds": round(loading, 1), "load_peak_gib": peak, "write_seconds": round(writing, 1),
            "write_peak_gib": write_peak}


def parse_args(argv):
    p = argparse.ArgumentParser(description="Measure what four bits cost and what AWQ gives back.", allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--parts", default="table", help="of table, sizes, speed, large; several with commas")
    p.add_argument("--out", required=True, help="JSON file; rows that are in it are kept and not measured again")
    p.add_argument("--model", help="16-bit checkpoint for the table")
    p.add_argument("--data", help="folder with train.jsonl (calibration) and test.jsonl, rows of question and answer")
    p.add_argument("--formats", default="nvfp4,mxfp4,nf4", help="for table, sizes")
    p.add_argument("--methods", default="rtn,awq", help="of rtn, awq, channels, blocks; for table")
    p.add_argument("--shapes", default="7b,14b,32b", help="for sizes")
    p.add_argument("--documents", type=int, default=1319, help="test documents for the perplexity")
    p.add_argument("--questions", type=int, default=1319, help="greedy questions, 0 for none")
    p.add_argument("--samples", type=int, default=256, help="samples for the entropy, 0 for none")
    p.add_argument("--max-new-tokens", type=int, default=400, help="of answers and samples")
    p.add_argument("--sequences", type=int, default=128, help="calibration sequences")
    p.add_argument("--length", type=int, default=512, help="tokens in each")
    p.add_argument("--minutes", type=float, default=60, help="begin no further row after this many")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="cuda where there is one")
    args = p.parse_args(argv)
    for flag, known in (("parts", ("table", "sizes", "speed", "large")), ("formats", nvfp4.FORMATS), ("shapes", bench.SHAPES),
                        ("methods", ("rtn", *METHODS))):
        values = getattr(args, flag).split(",")
        for v in values:
            if v not in known:
                p.error(f"--{flag} {v}: unknown, choose from {', '.join(known)}")
        setattr(args, flag, values)
    if "table" in args.parts and not (args.model and args.data):
        p.error("--model and --data are needed for the table")
    try:
        args.device, args.dtype = place(args.device)
    except ValueError as e:
        p.error(str(e))
    if set(args.parts) - {"table"} and not torch.cuda.is_available():
        p.error(f"--parts {','.join(set(args.parts) - {'table'})}: needs a CUDA device")
    return p, args


def run(args):
    begin, out = time.time(), Path(args.out)
    beside = out.with_suffix(".nll.json")
    results, likelihoods = (json.loads(p.read_text()) if p.is_file() else {} for p in (out, beside))

    def add(part, key, fn):
        rows = results.setdefault(part, [])
        if any(all(r[k] == v for k, v in key.items()) for r in rows) or time.time() - begin > args.minutes * 60:
            return
        if part == "table":
            new, likelihoods[f"{key['format']} {key['method']}"] = fn()
            rows.append(new)
            compare(rows, likelihoods)
        else:
            rows.append(fn())
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, content in ((beside, json.dumps(likelihoods)), (out, json.dumps(results, indent=1))):
            path.with_suffix(".part").write_text(content + "\n")
            os.replace(path.with_suffix(".part"), path)
        print(json.dumps(rows[-1]), flush=True)

    if "table" in args.parts:
        folder = checkpoint.fetch(args.model)
        tok, test = data.Tokenizer(folder), Path(args.data) / "test.jsonl"
        args.calib = Path(args.data) / "train.jsonl"
        docs = [tok.encode(t) for t in awq.texts(test)[: args.documents]]
        questions = data.load(test, "test")
        results["table_settings"] = {k: str(v) if isinstance(v, Path | torch.dtype) else v for k, v in vars(args).items()
                                     if k not in ("parts", "out", "minutes", "shapes")}
        for fmt, method in [("none", "-")] + [(f, m) for f in args.formats for m in args.methods]:
            add("table", {"format": fmt, "method": method},
                lambda fmt=fmt, method=method: row(args, fmt, method, docs, questions, tok))
        show(results["table"])
    if "sizes" in args.parts:
        for name in args.shapes:
            for fmt in args.formats:
                add("sizes", {"shape": name, "format": fmt}, lambda name=name, fmt=fmt: size(name, fmt))
    if "speed" in args.parts:
        add("speed", {"shape": "7b"}, speed)
    if "large" in args.parts:
        add("large", {"shape": "72b"}, lambda: size("72b", "nvfp4"))
    print(json.dumps(results))


def main(argv=None):
    parser, args = parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
