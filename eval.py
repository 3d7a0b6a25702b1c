"""
Pass@1 on questions with a checkable answer, for the base model and, with --adapter, for the
adapter, sampled with the same seeds.

The paper's protocol: temperature 0.6, top-p 0.95, n samples a question, averaged. It uses
training's generator, prompts and reward, so that a number here means what the same number in a
training log means. Questions, not samples, are the independent draws, so the standard error is that
of the mean over questions. An adapter that changes nothing is an error: the commonest wrong result
in this field is a base model evaluated twice.

--k adds pass@k and the majority vote among k. With --out, repeating the command of a stopped
evaluation continues it where it was, and ends with the same numbers.

Left out: few-shot prompts.

    python eval.py --run runs/tiny-arithmetic-nvfp4-s0 --data arithmetic
    python eval.py --model Qwen/Qwen2.5-3B-Instruct --data gsm8k,math500 --prompt-style boxed
"""
import hashlib
import json
import math
import sys
import time
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, stdev

from plumbing import checkpoint, flags, policy, ranks
from plumbing.command import number, numbers
from plumbing.files import check, check_out, file_digest, read_jsonl, write_jsonl
from plumbing.flags import Flag
from plumbing.grade import same_all

import torch

import aqn
import data
import lora
import sample

FLAGS = (
    *sample.MODEL_FLAGS,
    *flags.ADAPTER_FLAGS,
    "questions",
    Flag("data", str, "gsm8k", "arithmetic, gsm8k, math500, aime24, aime25, amc23, a .jsonl or "
         ".parquet, a folder, a hub id; several with commas", "arithmetic", in_policy=True),
    Flag("levels", numbers(1, 1e4), None, "ask rows of these, 5 the hardest, as in 3,4,5"),
    Flag("reward", str, None, "file.py:function, a reward of one's own (default: data.rewards)"),
    *flags.PROMPT_FLAGS,
    Flag("split", ("test", "train"), "test", "which part of the data"),
    Flag("limit", number(1, 1e8), None, "questions of each set, drawn by --seed (default: all)"),
    Flag("n", number(1, 1e4), None, "samples a question (default: 4; with --greedy 1)"),
    Flag("max-prompt", number(1, 1e7), None, "skip and count longer prompts, in tokens"),
    Flag("k", numbers(1, 1e4), None, "also pass@k and the majority of k, for these, as in 1,4,8"),
    Flag("greedy", bool, False, "the likeliest token always, one sample a question"),
    Flag("out", str, None, "a row per question, to this .jsonl; one that was begun goes on"),
    Flag("json", bool, False, "print the results as a line of JSON, too"),
    *flags.SAMPLING_FLAGS,
    *flags.ENGINE_FLAGS,
)
PART = 4  # --out is written after every PART * --max-rows samples


def check_flags(args):
    flags.check_graded(args)
    args.temperature = 0.0 if args.greedy else args.temperature
    flags.check_copies("n", args.n or 1, args.temperature, "--greedy, or --temperature 0,")
    if args.out:
        check_out(args.out)
    args.n = args.n or (1 if args.temperature == 0 else 4)
    if args.k and args.k[-1] > args.n:
        raise ValueError(f"--k {args.k[-1]}: takes as many samples a question, raise --n")


COMMAND = flags.Command("eval", "Pass@1 of a model, and of an adapter beside it.", FLAGS,
                        check_flags)


def evaluate(model, tok, rows, *, style="tags", n=4, temperature=0.6, top_p=0.95,
             max_new_tokens=None, max_prompt=None, max_rows=None, seed=0, score=None,
             progress=False, ks=(), done=(), keep=None):
    """Sample n completions a question and grade them, with AQN's noise off.

    max_new_tokens None: 4096, or what the model's positions leave. score: from data.scorer (the
    style's by default). keep: called with the rows so far now and then; done: the rows that keep
    was given in an earlier call; this one goes on from there and draws what that one would have.
    Returns `summary`'s dict, skipped (longer than max_prompt), and rows: [{"question", "answer",
    "accuracy", "samples": [{"text", "given", "correct", "format", "length", "finished"}]}]."""
    kept, skipped = data.prompts(tok, rows, style, max_prompt)
    score, out = score or data.scorer(style), [*done]
    if [row["question"] for row in out] != [row["question"] for row in kept[: len(out)]]:
        raise ValueError("--out: its rows are not of the first questions in their order; choose "
                         "another name")
    part = max(1, PART * (max_rows or sample.MAX_ROWS) // n) if keep else len(kept)
    for at in range(len(out), len(kept), part):
        mine = ranks.mine(range(at, min(at + part, len(kept))))
        some = [kept[i] for i in mine]
        limits = [sample.limit(model, row["ids"], max_new_tokens) for row in some]
        with aqn.clean(model):
            groups = sample.generate(
                model, [row["ids"] for row in some], n, limits, temperature, top_p,
                tok.eos_ids, seed, max_rows, progress, indices=mine)
        out += ranks.merge(graded(tok, some, groups, score))
        if keep:
            keep(out)
    return {**summary(out, ks), "skipped": skipped, "rows": out}


def graded(tok, rows, groups, score):
    """The rows that `evaluate` returns, from each row's group of samples."""
    texts = [[tok.decode(s.ids) for s in group] for group in groups]
    pairs = [(text, row) for row, said in zip(rows, texts, strict=True) for text in said]
    verdicts = iter(score(pairs))  # all are graded side by side
    out = []
    for row, group, said in zip(rows, groups, texts, strict=True):
        samples = []
        for s, text in zip(group, said, strict=True):
            samples.append({"text": text, **next(verdicts), "length": len(s.ids),
                            "finished": s.finished})
        out.append({"question": row["question"], "answer": row["answer"],
                    "accuracy": fmean(s["correct"] for s in samples), "samples": samples})
    return out


def summary(rows, ks=()):
    """accuracy, stderr (of the mean over questions, None for a single one), format, reward, length
    (mean tokens), truncated (share cut at the limit), questions; for each k of ks pass@k and maj@k,
    (mean, standard error). No maj@k if your own reward does not say which answers were given."""
    flat = [s for row in rows for s in row["samples"]]
    accuracies = [row["accuracy"] for row in rows]
    out = {"accuracy": fmean(accuracies), "stderr": stderr(accuracies),
           "format": fmean(s["format"] for s in flat), "reward": fmean(s["reward"] for s in flat),
           "length": fmean(s["length"] for s in flat),
           "truncated": fmean(not s["finished"] for s in flat), "questions": len(rows)}
    same = same_answers(rows) if ks else None
    votes = all(s["given"] is not None for s in flat if s["correct"])
    for k in ks:
        passed = [pass_at(k, [s["correct"] for s in row["samples"]]) for row in rows]
        blocks = range(0, len(rows[0]["samples"]) - k + 1, k)  # so maj@1 is pass@1
        voted = [fmean(majority(row["samples"][i : i + k], same) for i in blocks) for row in rows]
        out[f"pass@{k}"] = fmean(passed), stderr(passed)
        if votes:
            out[f"maj@{k}"] = fmean(voted), stderr(voted)
    return out


def pass_at(k, correct):
    """The chance that k of the samples, drawn without replacement, hold a right one: the unbiased
    estimate of pass@k (Chen et al., 2021), 1 - C(n - c, k) / C(n, k)."""
    n = len(correct)
    return 1 - math.comb(n - sum(correct), k) / math.comb(n, k)


def same_answers(rows):
    """{(a, b), (b, a)} for every two answers that samples of one question gave and that are the
    same, however written."""
    pairs = set()
    for row in rows:
        given = dict.fromkeys(s["given"] for s in row["samples"] if s["given"] is not None)
        pairs.update(combinations(given, 2))
    pairs = sorted(pairs)
    same = [pair for pair, alike in zip(pairs, same_all(pairs), strict=True) if alike]
    return {*same, *((b, a) for a, b in same)}


def majority(samples, same):
    """Whether the answer that most samples give is right; in a tie, the one given first. A sample
    without an answer has no vote."""
    votes = {}  # {the answer as first written: the samples that give it}
    for s in samples:
        if (given := s["given"]) is not None:
            first = next((v for v in votes if v == given or (v, given) in same), given)
            votes.setdefault(first, []).append(s)
    return bool(votes) and max(votes.values(), key=len)[0]["correct"]


def stderr(values):
    """Standard error of the mean of one value a question: the samples of a question are not
    independent of each other."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


@torch.no_grad()
def check_adapter(model, ids, folder):
    """ValueError unless the adapter changes the logits of a prompt (ids): an adapter of zeros, or
    one that is not applied, is caught here."""
    ids = torch.tensor([ids], device=model.embed.weight.device)
    with lora.disabled(model):
        base = model(ids)
    if torch.equal(model(ids), base):
        trained = any(m.B.any() for _, m in lora.lora_layers(model))
        why = ("the logits are the base model's, bit for bit" if trained else
               "every B is zero, it was never trained")
        raise ValueError(f"--adapter {folder}: changes nothing ({why})")


def table(results):
    yield (f"{'data':<16}{'model':<10}{'pass@1':>8}{'s.e.':>7}{'format':>9}{'length':>9}"
           f"{'cut':>7}{'questions':>11}")
    for name, arm, r in results:
        yield (f"{name:<16}{arm:<10}{100 * r['accuracy']:>7.1f}%{error(r['stderr']):>7}"
               f"{100 * r['format']:>8.1f}%{r['length']:>9.1f}{100 * r['truncated']:>6.1f}%"
               f"{r['questions']:>11}")
    for name, arm, r in results:
        many = [f"{k} {100 * v[0]:.1f}% (s.e. {error(v[1])})" for k, v in r.items() if "@" in k]
        if many:
            yield f"{name}, {arm}: {', '.join(many)}"


def error(stderr):
    return "-" if stderr is None else f"{100 * stderr:.1f}"


def gain(base, adapter):
    """The adapter's gain over the base and its standard error, paired by question."""
    d = [b["accuracy"] - a["accuracy"] for a, b in zip(base["rows"], adapter["rows"], strict=True)]
    return fmean(d), stderr(d)


def plain(args):
    """The model's name without an adapter: if a run trained all of it, it is not the base."""
    return "trained" if args.run and not args.adapter else "base"


def digests(args, sets, script):
    """{(set, model): digest} of what a row depends on: script (the command line's words that are
    no flags of eval.py), flags, questions, the model's weights and tokenizer, the files of --reward
    and --calib, the adapter."""
    free = ("out", "run", "adapter", "device", "engine", "card_share", "max_rows", "k", "data",
            "trained_with", "json")
    read, found = [policy.base_of(args)], {}
    folder = checkpoint.fetch(args.model)
    read += [file_digest(f) for f in map(folder.joinpath, checkpoint.BESIDE) if f.is_file()]
    read += [file_digest(args.reward.rpartition(":")[0])] if args.reward else []
    for name, rows in sets:
        # the user's own reward sees all columns
        what = [Path(script[0]).name, *script[1:],
                {k: v for k, v in vars(args).items() if k not in free},
                [row if args.reward else [row["question"], row["answer"]] for row in rows], *read]
        digest = hashlib.sha256(json.dumps(what, default=str).encode())
        found[name, plain(args)] = digest.hexdigest()[:16]
        if args.adapter:
            for file in sorted(Path(args.adapter).glob("adapter_*.*")):
                digest.update(file.read_bytes())
            found[name, "adapter"] = digest.hexdigest()[:16]
    return found


class SavedRows:
    """--out: the finished rows of each set and model, each with `run`, the digest of what it
    depends on. ValueError if the file holds anything but rows of this very evaluation."""

    def __init__(self, args, sets, script):
        self.path, self.done = args.out and Path(args.out), {}
        self.runs = digests(args, sets, script) if self.path else {}
        if not self.path or not self.path.exists():
            return
        fields = {"text": str, "correct": bool, "format": bool, "reward": float,
                  "length": (int, 0, 1 << 40), "finished": bool}
        for where, row in read_jsonl(self.path):
            check(row, where, {"data": str, "model": str, "samples": list, "question": str,
                               "accuracy": (float, 0, 1)})
            key = row.get("data"), row.get("model")
            if row.get("run") is None or row["run"] != self.runs.get(key):
                raise ValueError(f"--out {self.path}: holds something else than rows of this "
                                 "evaluation; choose another name")
            check(row, where, {}, ("samples", "question", "accuracy"))
            for s in row["samples"]:
                check(s, where, fields | {"given": str}, fields)
            self.done.setdefault(key, []).append(row)

    @ranks.first
    def keep(self, name, arm, rows):
        """Write the rows of this set and model so far, and those of the others."""
        head = {"data": name, "model": arm, "run": self.runs[name, arm]}
        self.done[name, arm] = [{**head, **row} for row in rows]
        write_jsonl(self.path, chain(*self.done.values()))


def run(args, argv):
    begin = time.time()
    checkpoint.fetch(args.model)
    # all sets are read before anything is loaded or sampled: a mistyped name costs nothing
    wanted = args.data.split(",")
    if len({*wanted}) < len(wanted):
        raise ValueError(f"--data {args.data}: names a set twice")
    names = [Path(name).stem for name in wanted]
    names = names if len({*names}) == len(names) else wanted
    sets = [(name, data.load(file, args.split, args.limit, args.seed, args.levels))
            for name, file in zip(names, wanted, strict=True)]
    trained = args.trained_with.get("data")
    if trained in wanted and Path(trained).is_file():
        print(f"warning: --data {trained}: most of its questions were trained on; those that were "
              "held out, if any, are in eval_after.jsonl of the run", file=sys.stderr)
    own = args.trained_with.get("reward")
    if own and not args.reward:  # it is code, which is not run unasked
        print(f"warning: trained by --reward {own}, graded here by --prompt-style "
              f"{args.prompt_style}; add --reward to compare with the run's own accuracy",
              file=sys.stderr)
    score = data.scorer(args.prompt_style, args.reward)
    saved = SavedRows(args, sets, [word for word in sys.argv if word not in argv])
    model, tok = sample.load_policy(args)
    sample.set_engine(model, args.engine)
    room = model.config.max_position_embeddings
    for name, rows in sets:  # before the first of them is sampled
        kept, _ = data.prompts(tok, rows, args.prompt_style, args.max_prompt)
        longest, new = max(len(row["ids"]) for row in kept), args.max_new_tokens or 1
        if longest + new > room:
            raise ValueError(f"--data {name}: with --max-new-tokens {new} its longest prompt of "
                             f"{longest} passes the model's {room} positions; lower that, or skip "
                             "such prompts by --max-prompt")
    if args.adapter:
        check_adapter(model, kept[0]["ids"], args.adapter)

    def measured(name, rows, arm):
        return evaluate(
            model, tok, rows, style=args.prompt_style, n=args.n, temperature=args.temperature,
            top_p=args.top_p, max_new_tokens=args.max_new_tokens, max_prompt=args.max_prompt,
            max_rows=args.max_rows, seed=args.seed, score=score, progress=sys.stderr.isatty(),
            ks=args.k or (), done=saved.done.get((name, arm), ()),
            keep=partial(saved.keep, name, arm) if args.out else None)

    results, alone = [], plain(args)
    for name, rows in sets:
        with lora.disabled(model):
            base = measured(name, rows, alone)
        results.append((name, alone, base))
        if args.adapter:
            r = measured(name, rows, "adapter")
            r["gain"], r["stderr_gain"] = gain(base, r)
            results.append((name, "adapter", r))
    print("\n".join(table(results)))
    for name, arm, r in results if args.reward else ():
        print(f"{name}, {arm}: mean reward {r['reward']:.3f}")
    for name, _, r in results:
        if "gain" in r:
            print(f"{name}: the adapter adds {100 * r['gain']:+.1f} points (s.e. "
                  f"{error(r['stderr_gain'])})")
    for name, arm, r in results:
        if r["skipped"]:
            print(f"{name}, {arm}: {r['skipped']} questions skipped, longer than --max-prompt")
        if r["format"] == 0:
            print(f"warning: {name}, {arm}: no completion follows the format; does --prompt-style "
                  "fit the model?")
    if args.json:
        rows = [{"data": name, "model": arm} | {k: v for k, v in r.items() if k != "rows"}
                for name, arm, r in results]
        print(json.dumps({"results": rows, "seconds": round(time.time() - begin, 1),
                          "command": ranks.command_line(argv, "eval.py")}))


def main(argv=None):
    return flags.run_command(COMMAND, run, argv)


if __name__ == "__main__":
    sys.exit(main())
