"""
QeRL in one loop: sample with a quantized, noisy policy; reward; advantages; update the LoRA adapter; log.

    python train.py                                                    # the embedded tiny model, minutes on a CPU
    python train.py --model Qwen/Qwen2.5-3B-Instruct --data gsm8k      # the paper's run on one GPU

The base model is frozen in NVFP4 and exists once: rollouts, log-probs and the update run the same modules. Before each
rollout AQN writes scheduled noise into the RMSNorms (aqn.py); the update then runs without it (Algorithm 1), against the
log-probs that the noisy sampler recorded. Nothing draws from a global random state: samples, noise and data order are
functions of (seed, step), so a run resumed from its folder repeats the uninterrupted one.

Left out, on purpose: several GPUs, a reward model, 8-bit optimizer states (the adapter's AdamW state is about 1% of the model).
A run folder holds config.json, metrics.jsonl, rollouts.jsonl, adapter/, checkpoint/, metrics.png and summary.json.

Shapes: P prompts, G completions a prompt, B rows of a micro-batch, L their length, T completion tokens, S flat tokens, C hidden.
"""
import argparse
import json
import math
import os
import random
import resource
import shlex
import signal
import sys
import time
from pathlib import Path

import torch

import aqn
import data
import eval as evaluation
import grpo
import lora
import plot
import sample
from runtime import engine
from runtime.flags import UserError, parse_args, place
from weights import checkpoint, memory


def setup_run_folder(args, argv):
    """The run folder and the arguments to run with: fresh (it must not hold a run yet), or those of the run to resume."""
    out = Path(args.out)
    if args.resume:
        if not (out / "checkpoint" / "state.pt").is_file():
            raise UserError(f"--resume: {out} has no checkpoint/state.pt to continue from; check --out")
        saved = json.loads((out / "config.json").read_text())
        given = [a.split("=")[0][2:].removeprefix("no-").replace("-", "_") for a in argv if a.startswith("--")]
        changed = [k for k in given if k not in ("resume", "out") and getattr(args, k) != saved[k]]
        if changed:
            name = changed[0]
            raise UserError(f"--{name.replace('_', '-')}: the run in {out} used {saved[name]}; --resume keeps a run's flags")
        return out, argparse.Namespace(**{**saved, "resume": True, "out": args.out})
    if (out / "config.json").exists():
        raise UserError(f"--out {out}: holds a run already; add --resume to continue it, or choose another folder")
    return out, args


def load_data(args):
    """(training rows, held-out rows): the set's own splits, or for a single file a tenth of it kept out of training."""
    if Path(args.data).is_file():
        rows = data.load(args.data, seed=args.seed, levels=args.levels)
        random.Random(f"{args.seed}/held out").shuffle(rows)
        held = max(1, len(rows) // 10) if args.eval_n else 0
        return rows[held:] or rows, rows[:held][: args.eval_limit or None]
    rows = data.load(args.data, "train", seed=args.seed, levels=args.levels)
    try:
        return rows, data.load(args.data, "test", n=args.eval_limit or None) if args.eval_n else []
    except FileNotFoundError as e:
        raise UserError(f"--data {args.data}: {e}; --eval-n 0 trains without held-out questions") from None


# ---- the pieces of a step


class Prompts:
    """Training prompts in an order that is a function of (seed, epoch); `cursor` counts the prompts handed out."""

    def __init__(self, rows, seed):
        self.rows, self.seed, self.cursor, self.epoch, self.order = rows, seed, 0, None, None

    def take(self, n):
        chosen = []
        for _ in range(n):
            epoch, place = divmod(self.cursor, len(self.rows))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, list(range(len(self.rows)))
                random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
            chosen.append(self.rows[self.order[place]])
            self.cursor += 1
        return chosen


def rollout(model, tok, prompts, args, draw, progress):
    """G completions of each prompt with their rewards -> (a list of groups, each a list of G row dicts; seconds of grading).
    `draw` names the samples: another draw, other samples."""
    seed = aqn.noise_seed(args.seed, f"samples/{draw}")
    groups = sample.generate(model, [row["ids"] for row in prompts], n=args.group_size, max_new_tokens=args.max_new_tokens,
                             temperature=args.temperature, eos_ids=tok.eos_ids, seed=seed, max_rows=args.max_rows,
                             progress=progress)
    begin = time.time()
    for row, group in zip(prompts, groups, strict=True):
        for i, s in enumerate(group):
            text = tok.decode(s.ids)
            score = data.reward(text, row["answer"], args.prompt_style)
            if args.overlong == "soft":
                length = torch.tensor(float(len(s.ids)))
                score["reward"] += grpo.soft_overlong_penalty(length, args.max_new_tokens, args.overlong_buffer).item()
            group[i] = {"question": row["question"], "answer": row["answer"], "text": text, "prompt": row["ids"], "ids": s.ids,
                        "logprobs": s.logprobs, "finished": s.finished, **score}
    return groups, time.time() - begin


def collect(model, tok, prompts, args, step, progress):
    """A step's groups. DAPO's dynamic sampling: groups without variance are replaced from further prompts, at most
    --max-resample times. Returns (groups to train on, groups of the first rollout for honest statistics, prompts sampled,
    seconds of grading)."""
    first, seconds = rollout(model, tok, prompts.take(args.prompts_per_step), args, step, progress)
    if not args.dynamic_sampling:
        return first, first, len(first), seconds
    kept, sampled = [g for g in first if has_signal(g)], len(first)
    for again in range(args.max_resample):
        missing = args.prompts_per_step - len(kept)
        if not missing:
            break
        more, extra = rollout(model, tok, prompts.take(missing), args, f"{step}/{again + 1}", progress)
        kept += [g for g in more if has_signal(g)]
        sampled, seconds = sampled + missing, seconds + extra
    return kept, first, sampled, seconds


def has_signal(group):
    return len({row["reward"] for row in group}) > 1


def micro_batches(rows, token_budget):
    """Rows sorted by length and cut so that rows x longest stays within the budget (one row always goes)."""
    rows, batch = sorted(rows, key=lambda r: len(r["prompt"]) + len(r["ids"])), []
    for row in rows:
        if batch and (len(batch) + 1) * (len(row["prompt"]) + len(row["ids"])) > token_budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def token_logprobs(model, rows, temperature):
    """(logp (B, T), entropy (B, T), mask (B, T)) of the completions of `rows`, under the model as it is now."""
    device = model.embed.weight.device
    full = [r["prompt"] + r["ids"] for r in rows]
    L = max(map(len, full))
    ids = torch.tensor([f + [0] * (L - len(f)) for f in full], device=device)  # (B, L), padded on the right
    start = torch.tensor([len(r["prompt"]) for r in rows], device=device)[:, None]  # (B, 1)
    length = torch.tensor([len(r["ids"]) for r in rows], device=device)  # (B,)
    place = torch.arange(L - 1, device=device)  # place j predicts token j + 1
    predicts = (place >= start - 1) & (place < start - 1 + length[:, None])  # (B, L-1)
    hidden = model.hidden(ids)[:, :-1][predicts]  # (B, L-1, C) -> (S, C)
    logp, entropy = grpo.token_logprobs(hidden, model.lm_head.weight, ids[:, 1:][predicts], temperature, model.valid_vocab)
    mask = grpo.lengths_to_mask(length)  # (B, T)
    blank = torch.zeros(mask.shape, dtype=logp.dtype, device=device)
    return blank.masked_scatter(mask, logp), blank.masked_scatter(mask, entropy), mask  # (S,) -> (B, T)


def update(model, optimizer, params, rows, args):
    """One optimizer step on `rows` (whole groups). Returns summed metrics and the gradient norm before clipping.

    The loss is normalised by the counts of all rows, so that micro-batches add up to the full-batch loss."""
    device = model.embed.weight.device
    trained = [r for r in rows if r["finished"]] if args.overlong == "mask" else rows
    if not trained:
        return None, 0.0
    total_tokens, parts = sum(len(r["ids"]) for r in trained), []
    for batch in micro_batches(trained, args.micro_batch_tokens):
        T = max(len(r["ids"]) for r in batch)
        sampler = torch.tensor([r["logprobs"] + [0.0] * (T - len(r["ids"])) for r in batch], device=device)  # (B, T)
        extra = {}
        if args.beta:
            with torch.no_grad(), lora.disabled(model):
                extra["ref_logp"] = token_logprobs(model, batch, args.temperature)[0]
        if args.old_logp == "trainer":
            own = [r["trainer_logp"] + [0.0] * (T - len(r["ids"])) for r in batch]
            extra |= {"trainer_old_logp": torch.tensor(own, device=device), "tis_cap": args.tis_cap}
        logp, entropy, mask = token_logprobs(model, batch, args.temperature)
        loss, metrics = grpo.policy_loss(
            logp, sampler, torch.tensor([r["advantage"] for r in batch], device=device), mask, args.loss, args.eps_low,
            args.eps_high, beta=args.beta, total_tokens=total_tokens, total_seqs=len(trained), max_len=args.max_new_tokens,
            entropy=entropy, **extra)
        loss.backward()
        parts.append(metrics)
    norm = torch.nn.utils.clip_grad_norm_(params, args.grad_clip).item()
    if not math.isfinite(norm):
        raise UserError(f"the gradient norm is {norm}; nothing was updated. Lower --lr, or look for broken weights in --model")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grpo.sum_metrics(parts), norm


class AdamW(torch.optim.AdamW):
    """AdamW on float32 masters: 16-bit parameters (full training) are copied back after each step, LoRA's are masters already."""

    def __init__(self, params, args):
        self.params = params
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in params]
        super().__init__(self.masters, args.lr, (args.beta1, args.beta2), weight_decay=args.weight_decay)

    def step(self):
        pairs = [(p, m) for p, m in zip(self.params, self.masters, strict=True) if p is not m]
        for p, m in pairs:
            m.grad = None if p.grad is None else p.grad.float()
        super().step()
        with torch.no_grad():
            for p, m in pairs:
                p.copy_(m)
                p.grad = m.grad = None


def learning_rate(step, total, args):
    """Linear warm-up over the first --warmup of the optimizer steps, then a cosine to 0."""
    warm = max(1, round(args.warmup * total))
    if step < warm:
        return args.lr * (step + 1) / warm
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


# ---- saving


class Interrupt:
    """Ctrl-C and SIGTERM. While samples are drawn nothing has changed yet, so the step is dropped at once; an update is finished
    first. A second signal does not wait."""

    def __init__(self):
        self.asked, self.busy = False, False
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, self.handle)

    def handle(self, *_):
        if self.asked or not self.busy:
            self.asked = True
            raise KeyboardInterrupt
        self.asked = True
        print("finishing the update, then saving (again to stop at once)", flush=True)


def save(out, model, args, params, optimizer, state):
    """adapter/ and checkpoint/, each written under a temporary name and then renamed: what is there is always whole."""
    if args.lora_rank:
        lora.save_adapter(model, out / "adapter", args.model)
    (out / "checkpoint").mkdir(exist_ok=True)
    whole = {**state, "params": [p.detach().cpu() for p in params], "optimizer": optimizer.state_dict(),
             "masters": [m.detach().cpu() for m in optimizer.masters]}
    torch.save(whole, out / "checkpoint" / "state.pt.tmp")
    os.replace(out / "checkpoint" / "state.pt.tmp", out / "checkpoint" / "state.pt")


def restore(out, params, optimizer, prompts):
    """Load checkpoint/ into params, optimizer and data order; drop what was logged after it. Returns the saved state."""
    state = torch.load(out / "checkpoint" / "state.pt", map_location="cpu", weights_only=True)
    with torch.no_grad():
        for p, saved in zip([*params, *optimizer.masters], [*state["params"], *state["masters"]], strict=True):
            p.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    prompts.cursor = state["cursor"]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        lines = (out / name).read_text().splitlines(True) if (out / name).exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < state["step"]]
        (out / f"{name}.tmp").write_text("".join(kept))
        os.replace(out / f"{name}.tmp", out / name)
    return state


def append(path, rows):
    with open(path, "a") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def peak_gib(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def warnings_for(row, args):
    """What a user of this row should be told, each with what to do."""
    if row["reward"] == 0:
        yield "every reward is 0: nothing can be learned; does --prompt-style fit the model, is --max-new-tokens long enough?"
    elif row["format"] == 0:
        yield f"no completion follows the {args.prompt_style} format: try --prompt-style boxed or an instruction-tuned --model"
    if row["truncated_frac"] == 1:
        yield f"every completion was cut at {args.max_new_tokens} tokens: raise --max-new-tokens"
    if row["zero_var_frac"] == 1:
        yield "no group has rewards that differ, so there is no gradient: raise --group-size, or choose easier or harder --data"
    if row["logp_gap_mean"] > args.gap_bound and (row["sigma"] == 0 or args.aqn_scope == "both"):
        yield (f"sampler and trainer disagree by {row['logp_gap_mean']:.3f} nats a token (bound {args.gap_bound}): "
               "use --old-logp trainer, or --dtype float32")


# ---- the run


def train(argv):
    started = time.time()
    args = parse_args(argv)
    out, args = setup_run_folder(args, argv)
    device, dtype = place(args.device, args.dtype)

    folder = checkpoint.fetch(args.model)
    tok = data.Tokenizer(folder)
    train_rows, test_rows = load_data(args)
    rows, skipped = data.prompts(tok, train_rows, args.prompt_style, args.max_prompt)
    prompts = Prompts(rows, args.seed)
    steps = args.steps or max(1, len(rows) // args.prompts_per_step)
    model = checkpoint.load(folder, device, dtype, args.quant)
    model.valid_vocab, model.checkpointing = len(tok), args.checkpointing
    if args.lora_rank:
        params = lora.add_lora(model, args.lora_rank, args.lora_alpha, args.seed)
    else:
        params = list(model.requires_grad_(True).parameters())
    optimizer = AdamW(params, args)

    out.mkdir(parents=True, exist_ok=True)
    state = {"step": 0, "cursor": 0, "before": None, "seconds": 0.0}
    if args.resume:
        state = restore(out, params, optimizer, prompts)
        state = {k: state[k] for k in ("step", "cursor", "before", "seconds")}
    else:
        (out / "config.json").write_text(json.dumps(vars(args), indent=2) + "\n")
    print("\n".join(f"{k:>20} {v}" for k, v in vars(args).items()))
    print(f"{len(rows)} training prompts ({skipped} longer than --max-prompt), {steps} steps, "
          f"{sum(p.numel() for p in params):,} trainable parameters, {device}, {str(dtype)[6:]}")

    def evaluate():
        if not args.eval_n:
            return None
        return evaluation.evaluate(model, tok, test_rows, args.prompt_style, args.eval_n, args.eval_temperature, args.eval_top_p,
                                   args.max_new_tokens, args.max_prompt, args.max_rows, progress=sys.stderr.isatty())

    if state["before"] is None and args.eval_n:
        state["before"] = evaluate()["accuracy"]
        print(f"held-out accuracy before training: {state['before']:.1%}", flush=True)

    interrupt, resumed_seconds = Interrupt(), state["seconds"]
    try:
        for step in range(state["step"], steps):
            t0 = time.time()
            # AQN: fresh noise a step, constant over the step's rollouts (Algorithm 1)
            schedule = (args.aqn_start, args.aqn_end, args.aqn_stages, args.aqn_schedule)
            sigma = aqn.sigma(step, steps, *schedule) if args.aqn else 0.0
            aqn.set_noise(model, sigma, aqn.noise_seed(args.seed, step))
            groups, first, sampled, grading = collect(model, tok, prompts, args, step, progress=sys.stderr.isatty())
            t1 = time.time()
            interrupt.busy = True

            if groups:
                rewards = torch.tensor([[r["reward"] for r in g] for g in groups])  # (P, G)
                advantage = grpo.advantages(rewards, scale=args.loss != "dr_grpo")  # (P, G)
                for g, a in zip(groups, advantage.tolist(), strict=True):
                    for r, value in zip(g, a, strict=True):
                        r["advantage"] = value
            if args.aqn_scope == "rollout":
                aqn.set_noise(model, 0.0)
            if device == "cuda":
                need = memory.update_bytes(model.config, args.quant, args.micro_batch_tokens,
                                           args.checkpointing)
                engine.make_room(model, sum(need))
            if args.old_logp == "trainer":  # before any parameter moves
                for batch in micro_batches([r for g in groups for r in g], args.micro_batch_tokens):
                    with torch.no_grad():
                        logp, _, mask = token_logprobs(model, batch, args.temperature)
                    for r, values, m in zip(batch, logp, mask, strict=True):
                        r["trainer_logp"] = values[m].tolist()

            updates = []
            for i in range(args.updates_per_rollout):
                share = groups[i :: args.updates_per_rollout]
                turn = step * args.updates_per_rollout + i
                lr = optimizer.param_groups[0]["lr"] = learning_rate(turn, steps * args.updates_per_rollout, args)
                if share:
                    updates.append(update(model, optimizer, params, [r for g in share for r in g], args))
            updates = [u for u in updates if u[0] is not None]
            t2 = time.time()

            flat = [r for g in first for r in g]
            used = [r for g in groups for r in g]
            lengths = [len(r["ids"]) for r in flat]
            row = {"step": step, "reward": mean(r["reward"] for r in flat), "accuracy": mean(r["correct"] for r in flat),
                   "format": mean(r["format"] for r in flat),
                   "reward_std": mean(torch.tensor([r["reward"] for r in g]).std().item() for g in first),
                   "zero_var_frac": mean(not has_signal(g) for g in first), "length_mean": mean(lengths),
                   "length_max": max(lengths), "truncated_frac": mean(not r["finished"] for r in flat),
                   "groups": len(groups), "prompts_sampled": sampled, "updates": len(updates), "lr": lr, "sigma": sigma,
                   "grad_norm": mean(norm for _, norm in updates)}
            row |= grpo.mean_metrics(grpo.sum_metrics([m for m, _ in updates])) if updates else dict.fromkeys(METRICS, 0.0)
            if updates:  # the gap is between policies only before the first update of the step moves one of them
                row |= {k: v for k, v in grpo.mean_metrics(updates[0][0]).items() if k.startswith(("logp_gap", "ratio"))}
            generated = sampled * args.group_size * mean(lengths)
            row |= {"seconds": resumed_seconds + t2 - started, "seconds_rollout": t1 - t0 - grading, "seconds_reward": grading,
                    "rollout_tok_s": generated / (t1 - t0 - grading),
                    "update_tok_s": sum(len(r["prompt"]) + len(r["ids"]) for r in used) / (t2 - t1), "seconds_update": t2 - t1,
                    "peak_gib": peak_gib(device)}
            append(out / "metrics.jsonl", [row])
            append(out / "rollouts.jsonl", [{"step": step, **{k: g[0][k] for k in SHOWN}} for g in first[:2]])
            state = {"step": step + 1, "cursor": prompts.cursor, "before": state["before"], "seconds": row["seconds"]}
            eta = (steps - step - 1) * (t2 - t0)
            print(f"{step:>5} | reward {row['reward']:.3f} | acc {row['accuracy']:.3f} | len {row['length_mean']:.0f} | "
                  f"trunc {row['truncated_frac']:.0%} | ent {row['entropy']:.3f} | grad {row['grad_norm']:.3f} | "
                  f"dlogp {row['logp_gap_mean']:.4f} | sigma {sigma:.1e} | {row['rollout_tok_s']:.0f} tok/s | "
                  f"{row['peak_gib']:.1f} GB | {t2 - t0:.1f} s | eta {eta / 60:.0f} min", flush=True)
            for text in warnings_for(row, args):
                print(f"warning: {text}", flush=True)
            if interrupt.asked:
                raise KeyboardInterrupt
            interrupt.busy = False
            if (step + 1) % args.save_every == 0:
                save(out, model, args, params, optimizer, state)
    except KeyboardInterrupt:
        save(out, model, args, params, optimizer, state)
        print(f"\nstopped after step {state['step'] - 1}; continue with: python train.py --resume --out {shlex.quote(str(out))}")
        return 130

    aqn.set_noise(model, 0.0)
    save(out, model, args, params, optimizer, state)
    after = evaluate()
    summary = {"accuracy_before": state["before"], "accuracy_after": after and after["accuracy"], "steps": steps,
               "seconds": round(resumed_seconds + time.time() - started, 1), "peak_gib": round(peak_gib(device), 2),
               "command": shlex.join(["python", "train.py", *argv])}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot.plot([out], out / "metrics.png")
    if after:
        print(f"held-out accuracy: {state['before']:.1%} before, {after['accuracy']:.1%} after {steps} steps")
    print(f"{out}: adapter/, metrics.jsonl, metrics.png, summary.json ({summary['seconds']:.0f} s)")
    return 0


METRICS = ("loss", "clip_low_frac", "clip_high_frac", "kl", "logp_gap_mean", "logp_gap_max", "ratio_outside_frac", "entropy")
SHOWN = ("question", "answer", "text", "reward", "correct")


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        return train(argv)
    except torch.OutOfMemoryError as e:
        problem = f"out of GPU memory ({str(e).split('. ')[0]}); lower --micro-batch-tokens, --max-rows or --max-new-tokens"
    except (UserError, ValueError, FileNotFoundError, ConnectionError) as e:
        problem = e
    print(f"train.py: error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
