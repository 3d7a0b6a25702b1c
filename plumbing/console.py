"""
What a run shows: its flags, a line a step, samples, warnings, and at the end what was learned; and
what eval.py shows.
"""
import shutil
import sys
import textwrap

from plumbing.command import cell

# columns of a step's line in the order in which a narrow terminal does without them
DROP_ORDER = ("GiB", "sigma", "tok/s", "dlogp", "trunc", "grad", "seconds", "ent", "len", "eta",
            "held-out")
SHOW_EVERY = 10  # steps between samples
GAP_BOUND = 0.05  # nats a token between sampler and trainer to warn at


def show_flags(args):
    text = "  ".join(f"{k}={v}" for k, v in vars(args).items())
    wide = min(100, width() or 100)
    print(textwrap.fill(text, wide, break_long_words=False, break_on_hyphens=False))
    if args.aqn and args.aqn_end > args.aqn_start:
        print(f"warning: --aqn-end {args.aqn_end:g}: is above --aqn-start {args.aqn_start:g}, so "
              "sigma rises from stage to stage", file=sys.stderr)


def show_step(row, samples, args, warned):
    """Print a row of metrics.jsonl as one line, its samples (rows of rollouts.jsonl) every
    SHOW_EVERY steps, and each warning once a run. warned: the set of those given so far."""
    print(step_line(row, args, width()), flush=True)
    if row["step"] % SHOW_EVERY == 0:
        for s in samples:
            mark = "right" if s["correct"] else f"wrong, it is {s['answer']}"
            text = one_line(s["text"], 12 + len(mark))
            print(f"      Q: {one_line(s['question'])}\n      A: {text} ({mark})")
    for text in warnings_for(row, args):
        if text not in warned:
            print(f"warning: {text}", flush=True)
        warned.add(text)


def step_line(row, args, wide=None):
    """A step's row as text; columns are left out until it has at most `wide` characters."""
    eta = (args.steps - row["step"] - 1) * row["seconds_step"]
    columns = {
        "step": f"{row['step']:>5}", "reward": f"reward {row['reward']:.3f}",
        "acc": f"acc {row['accuracy']:.3f}", "len": f"len {row['length_mean']:.0f}",
        "trunc": f"trunc {row['truncated_frac']:.0%}", "ent": f"ent {cell(row['entropy'], '.3f')}",
        "grad": f"grad {cell(row['grad_norm'], '.3f')}",
        "dlogp": f"dlogp {cell(row['logp_gap_mean'], '.4f')}", "sigma": f"sigma {row['sigma']:.1e}",
        "tok/s": f"{row['rollout_tok_s']:.0f} tok/s", "GiB": f"{row['peak_gib']:.1f} GiB",
        "seconds": f"{row['seconds_step']:.1f} s"}
    if row["eval_accuracy"] is not None:
        columns["held-out"] = f"held-out {row['eval_accuracy']:.1%}"
    columns["eta"] = f"eta {eta / 60:.0f} min"
    for name in DROP_ORDER:
        if wide is None or len(" | ".join(columns.values())) <= wide:
            break
        columns.pop(name, None)
    return " | ".join(columns.values())


def warnings_for(row, args):
    """Yields the warnings that this row calls for, each with what to do about it."""
    drawn_anew = args.dynamic_sampling and row["groups"]
    if row["reward"] == row["reward_std"] == 0 and not drawn_anew:  # -1 and 1 have a mean of 0
        yield ("every reward is 0: nothing can be learned; does --prompt-style fit the model, is "
               "--max-new-tokens long enough?")
    elif row["format"] == 0:
        other = "tags" if args.prompt_style == "boxed" else "boxed"
        yield (f"no completion follows the {args.prompt_style} format: try --prompt-style {other} "
               "or an instruction-tuned --model")
    if row["truncated_frac"] == 1:
        yield f"every completion was cut at {args.max_new_tokens} tokens: raise --max-new-tokens"
    if row["zero_var_frac"] == 1 and not drawn_anew:
        yield ("no group has rewards that differ, so there is no gradient: raise --group-size, or "
               "choose easier or harder --data")
    gap, alike = row["logp_gap_mean"] or 0, row["sigma"] == 0 or args.aqn_scope == "both"
    if alike and gap > GAP_BOUND:
        weighted = "" if args.old_logp == "current" else "--old-logp current, or "
        yield (f"sampler and trainer disagree by more than {GAP_BOUND} nats a token: "
               f"use {weighted}--dtype float32")
    if row["skipped"]:
        yield "an update was skipped: its gradient was not finite; lower --lr, or check --model"
    if (row["clip_first_frac"] or 0) > 0.02:  # nothing has been learned from these completions yet
        if alike:
            what, use = "rounding in sampler and trainer", "--old-logp current, or --dtype float32"
        else:
            what, use = "the noise", "--old-logp trainer, or lower --aqn-start"
        yield (f"more than 2% of the tokens are clipped before the first update: {what} alone "
               f"moves the ratio out of the clip; use {use}")
    if args.reward and row["accuracy"] == 0 and row["reward_std"]:
        yield ("no completion counts as right: where --reward returns a number, that is one of at "
               'least 1; a dict may say so beside its "reward", as "correct"')


def show_end(out, args, summary, before, after):
    """Print what a run leaves in its folder `out`, one question answered wrong before training and
    right after it, and the gain. before, after: rows of eval_before.jsonl and eval_after.jsonl."""
    print(f"{out}: {'adapter' if args.lora_rank else 'model'}/, metrics.jsonl, metrics.png, "
          f"summary.json ({summary['seconds']:.0f} s)")
    for b, a in zip(before, after, strict=True):
        if b["accuracy"] == 0 and a["accuracy"] == 1:
            question = one_line(a["question"], 31 + len(str(a["answer"])))
            print(f"one of the questions: {question} (it is {a['answer']})\n"
                  f"  before: {one_line(b['samples'][0]['text'])}\n"
                  f"  after:  {one_line(a['samples'][0]['text'])}")
            break
    if after:
        s = summary
        print(f"held-out accuracy: {s['accuracy_before']:.1%} before, {s['accuracy_after']:.1%} "
              f"after {s['steps']} steps ({100 * s['gain']:+.1f} +- {points(s['stderr_gain'])} "
              "points)")


def show_results(results, own_reward=None):
    """Print eval.py's table and what is to be said of its rows: [(set, model, evaluate's dict)]."""
    print(f"{'data':<15} {'model':<10}{'pass@1':>8}{'s.e.':>7}{'format':>9}{'length':>9}"
          f"{'cut':>7}{'questions':>11}")
    for name, arm, r in results:
        print(f"{name:<15} {arm:<10}{100 * r['accuracy']:>7.1f}%{points(r['stderr']):>7}"
              f"{100 * r['format']:>8.1f}%{r['length']:>9.1f}{100 * r['truncated']:>6.1f}%"
              f"{r['questions']:>11}")
    for name, arm, r in results:
        many = [f"{k} {100 * v[0]:.1f}% (s.e. {points(v[1])})" for k, v in r.items() if "@" in k]
        if many:
            print(f"{name}, {arm}: {', '.join(many)}")
        if own_reward:
            print(f"{name}, {arm}: mean reward {r['reward']:.3f}")
        if "gain" in r:
            print(f"{name}: the adapter adds {100 * r['gain']:+.1f} points (s.e. "
                  f"{points(r['stderr_gain'])})")
        if r["skipped"]:
            print(f"{name}, {arm}: {r['skipped']} questions skipped, longer than --max-prompt")
        if r["format"] == 0:
            print(f"warning: {name}, {arm}: no completion follows the format; does --prompt-style "
                  "fit the model?")


def width():
    """Columns of the terminal that stdout is; None where it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None


def points(share):
    """A share as percent for the terminal; "-" for None."""
    return cell(share and 100 * share, ".1f")


def one_line(text, beside=10):
    """A text without line breaks, cut to fit the terminal `beside` so many other characters."""
    text, most = " ".join(text.split()), max(10, width() - beside) if width() else 160
    return text if len(text) <= most else text[: most - 3] + "..."
