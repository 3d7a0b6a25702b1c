"""
What a run shows: its flags, a line a step, samples, warnings, and at the end what was learned; and
what eval.py shows.
"""
import shutil
import sys
import textwrap

from plumbing.command import cell

SHOW_EVERY = 10  # steps between samples
GAP_BOUND = 0.05  # nats a token between sampler and trainer to warn at


def show_flags(args):
    text = "  ".join(f"{k}={v}" for k, v in vars(args).items())
    print(textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False))


def show_start(args, rows, skipped, params, weight):
    """Print how a run begins; weight: one of the base, for device and dtype."""
    print(f"{rows} training prompts ({skipped} longer than --max-prompt), {args.steps} steps, "
          f"{sum(p.numel() for p in params):,} trainable parameters, {weight.device.type}, "
          f"{str(weight.dtype).removeprefix('torch.')}; updates of {args.micro_batch_tokens} "
          f"tokens a micro-batch, checkpointing {args.checkpointing}")


def show_step(row, samples, args, warned):
    """Print a row of metrics.jsonl as one line, its samples (rows of rollouts.jsonl) every
    SHOW_EVERY steps, and each warning once a run. warned: the set of those given so far."""
    print(step_line(row, args)[: width()], flush=True)
    if row["step"] % SHOW_EVERY == 0:
        for s in samples:
            mark = "right" if s["correct"] else f"wrong, it is {s['answer']}"
            print(f"      Q: {one_line(s['question'])}\n      A: {one_line(s['text'])} ({mark})")
    for text in warnings_for(row, args):
        if text not in warned:
            print(f"warning: {text}", flush=True)
        warned.add(text)


def step_line(row, args):
    """A step's row as text, what matters most first: a terminal's width may cut it."""
    eta = (args.steps - row["step"] - 1) * row["seconds_step"]
    held_out = row["eval_accuracy"]
    columns = [
        f"{row['step']:>5}", f"reward {row['reward']:.3f}", f"acc {row['accuracy']:.3f}",
        *([] if held_out is None else [f"held-out {held_out:.1%}"]),
        f"len {row['length_mean']:.0f}", f"trunc {row['truncated_frac']:.0%}",
        f"ent {cell(row['entropy'], '.3f')}", f"grad {cell(row['grad_norm'], '.3f')}",
        f"dlogp {cell(row['logp_gap_mean'], '.4f')}", f"sigma {row['sigma']:.1e}",
        f"{row['rollout_tok_s']:.0f} tok/s", f"{row['peak_gib']:.1f} GiB",
        f"{row['seconds_step']:.1f} s", f"eta {eta / 60:.0f} min"]
    return " | ".join(columns)


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
        yield ("no group has rewards that differ, so they teach nothing: raise --group-size, or "
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


def show_end(out, args, summary):
    """Print what a run leaves in its folder `out`, and the gain."""
    s = summary
    print(f"{out}: {'adapter' if args.lora_rank else 'model'}/, metrics.jsonl, metrics.png, "
          f"summary.json ({s['seconds']:.0f} s)")
    if s["accuracy_after"] is not None:
        print(f"held-out accuracy: {s['accuracy_before']:.1%} before, {s['accuracy_after']:.1%} "
              f"after {s['steps']} steps ({100 * s['gain']:+.1f} +- {points(s['stderr_gain'])} "
              "points)")


def show_results(results, own_reward=None):
    """Print eval.py's table and what is to be said of its rows: [(set, model, evaluate's dict)]."""
    wide = max(15, *(len(name) for name, _, _ in results))
    print(f"{'data':<{wide}} {'model':<10}{'pass@1':>8}{'s.e.':>7}{'format':>9}{'length':>9}"
          f"{'cut':>7}{'questions':>11}")
    for name, arm, r in results:
        print(f"{name:<{wide}} {arm:<10}{100 * r['accuracy']:>7.1f}%{points(r['stderr']):>7}"
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


def one_line(text):
    """A text without line breaks, cut to 160 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 160 else text[:157] + "..."
