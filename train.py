"""
QeRL in one loop: sample with a quantized, noisy policy; grade; advantages; update the adapter; log.

    python train.py                                                  # the embedded model, on a CPU
    python train.py --model Qwen/Qwen2.5-3B-Instruct --data gsm8k    # the paper's run, on one GPU
    torchrun --nproc-per-node=8 train.py --model ...                 # the same update on eight

The base model is frozen in NVFP4 and exists once: rollouts, log-probs and the update run the same
modules. `learn` is the paper's Algorithm 1 in numbered paragraphs; what it calls is in aqn.py
(noise), sample.py (rollouts), data.py (rewards), grpo.py (advantages, objectives, optimizer step);
`run` is the run folder with its clock, its log and its checkpoints (plumbing/run.py).
Nothing draws from a global random state: samples, noise and data order are functions of (seed,
step), so a run resumed from its folder repeats the uninterrupted one.

Left out, on purpose: models larger than a card, a reward model, 8-bit optimizer states (the
adapter's take 0.6 GiB for 7B, rank 32).

Shapes: P prompts, G completions a prompt.
"""
import random
import sys
from functools import partial
from itertools import chain
from pathlib import Path

from plumbing import checkpoint, flags, ranks
from plumbing.run import Run, metrics_row, settle

import aqn
import data
import eval as evaluation
import grpo
import lora
import sample
from fast import engine


class Prompts:
    """Training prompts in an order that is a function of (seed, epoch); `cursor` counts those
    handed out."""

    def __init__(self, rows, seed):
        self.rows, self.seed, self.cursor, self.epoch, self.order = rows, seed, 0, None, None

    def take(self, n):
        chosen = []
        for _ in range(n):
            epoch, place = divmod(self.cursor, len(self.rows))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, [*self.rows]
                random.Random(f"{self.seed}/{epoch}").shuffle(self.order)
            chosen.append(self.order[place])
            self.cursor += 1
        return chosen


def questions(args):
    """(training rows, held-out rows): the data set's own splits. Of a single file, a tenth of the
    questions is held out, each once, and no row that asks one of these is trained on."""
    if Path(args.data).is_file():
        rows = data.load(args.data, levels=args.levels)
        random.Random(f"{args.seed}/held out").shuffle(rows)
        once = {}  # the first row of each question
        for row in rows:
            once.setdefault(row["question"], row)
        held = [*once.values()][: max(1, len(once) // 10)] if args.eval_n else []
        asked = {row["question"] for row in held}
        rows = [row for row in rows if row["question"] not in asked]
        if not rows:
            raise ValueError(f"--data {args.data}: one question is too few to hold one out; "
                             "--eval-n 0 trains without")
        return rows, held[: args.eval_limit]
    rows = data.load(args.data, "train", seed=args.seed, levels=args.levels)
    try:
        held = data.load(args.data, "test", n=args.eval_limit) if args.eval_n else []
    except FileNotFoundError as e:
        raise ValueError(f"--data {args.data}: {e}; --eval-n 0 trains without held-out questions"
                         ) from None
    asked = {row["question"] for row in rows}
    if n := sum(row["question"] in asked for row in held):
        print(f"warning: --data {args.data}: {n} of {len(held)} held-out questions are trained on",
              file=sys.stderr)
    return rows, held


def rollout(run, model, tok, score, rows, key):
    """G graded completions of each row's prompt from the policy as it is now: P groups, the same on
    all ranks. A different `key` gives different samples."""
    args, mine = run.args, ranks.mine(range(len(rows)))  # the prompts that this rank draws for
    seed = aqn.noise_seed(args.seed, f"samples/{key}")
    run.phase("rollout")
    groups = complete(model, tok, [rows[i] for i in mine], args, seed, indices=mine)
    run.phase("reward")
    grade([*chain(*groups)], tok, score, args)
    run.phase("rollout")  # waiting for the longest completion of all ranks
    groups = ranks.merge(groups)
    run.drawn += sum(len(c.ids) for c in chain(*groups))
    return groups


def complete(model, tok, rows, args, seed, indices=None):
    """G completions of each row's prompt, not graded yet; indices: see sample.generate."""
    groups = sample.generate(
        model, [row["ids"] for row in rows], args.group_size, args.max_new_tokens,
        args.temperature, eos_ids=tok.eos_ids, seed=seed, max_rows=args.max_rows,
        progress=sys.stderr.isatty(), indices=indices)
    return [[grpo.Completion(row, row["ids"], s.ids, s.logprobs, s.finished) for s in group]
            for row, group in zip(rows, groups, strict=True)]


def grade(completions, tok, score, args):
    """Fill in the text and reward of each completion; they are graded side by side."""
    for c in completions:
        c.text = tok.decode(c.ids)
    verdicts = score([(c.text, c.row) for c in completions])
    for c, graded in zip(completions, verdicts, strict=True):
        c.reward, c.correct, c.format = graded["reward"], graded["correct"], graded["format"]
        if args.overlong == "soft":
            c.reward += grpo.soft_overlong_penalty(len(c.ids), args.max_new_tokens,
                                                   args.overlong_buffer)


def learn(run, model, tok, optimizer, prompts, score, held_out):
    """The training loop, Algorithm 1 of the paper, from step run.state.step on."""
    args, draw = run.args, partial(rollout, run, model, tok, score)
    schedule = args.aqn_start, args.aqn_end, args.aqn_stages, args.aqn_schedule
    settings = grpo.Settings.of(args)
    for step in range(run.state.step, args.steps):
        result = evaluate(run, model, tok, score, held_out) if run.due(step) else None

        # 1. Noise (AQN, Eq. 8): drawn anew for each step, the same for all its rollouts. It sits in
        #    the RMSNorms of the one model there is: the sampler has no weights of its own.
        sigma = aqn.sigma(step, args.steps, *schedule) if args.aqn else 0.0
        aqn.set_noise(model, sigma, aqn.noise_seed(args.seed, step))

        # 2. Sample and grade. The sampler records the log-prob of each token as it draws it.
        spare = args.spare_prompts if args.dynamic_sampling else 0
        first = draw(prompts.take(args.prompts_per_step + spare), step)
        groups, n_prompts = first, len(first)  # trained on; drawn
        if args.dynamic_sampling:  # DAPO: a group of equal rewards teaches nothing, take another
            groups = [g for g in first if grpo.has_signal(g)][: args.prompts_per_step]
            for again in range(args.max_resample):
                missing = args.prompts_per_step - len(groups)
                if not missing:
                    break
                more = draw(prompts.take(missing), f"{step}/{again + 1}")
                groups = groups + [g for g in more if grpo.has_signal(g)]
                n_prompts += missing

        # 3. Advantages: each completion compared with its group; no critic.
        run.phase("update")
        grpo.set_advantages(groups, scale=grpo.OBJECTIVES[args.loss].scale)

        # 4. Optimizer steps, each on its own groups. Algorithm 1 trains the clean policy, but a
        #    noisy one drew the samples, so pi_old is the log-probs that the sampler recorded.
        if args.aqn_scope == "rollout":
            aqn.clear(model)
        engine.make_room(model, model.update_bytes)  # the sampler's cache may have to go
        if args.old_logp == "trainer":
            grpo.record_trainer_logprobs(model, chain(*groups), settings)
        updates, n = [], args.updates_per_rollout  # (summed metrics, gradient norm) of each
        for i in range(n):  # each on every n-th group
            lr = grpo.learning_rate(step * n + i, args.steps * n, args.lr, args.warmup)
            grpo.set_rate(optimizer, lr)
            updates.append(grpo.update(model, optimizer, list(chain(*groups[i::n])), settings))
        run.check(updates, model)  # ValueError if ten in a row were not finite

        # 5. Log and save.
        run.phase("log")
        row = metrics_row(run, step, first, groups, n_prompts, updates, sigma, lr, result)
        run.log(row, first)
        run.advance(step + 1, prompts.cursor, model, optimizer)


def evaluate(run, model, tok, score, rows):
    """Held-out accuracy of the policy as it is now, without its noise."""
    run.phase("evaluate")
    a = run.args
    result = evaluation.evaluate(
        model, tok, rows, style=a.prompt_style, n=a.eval_n, temperature=a.eval_temperature,
        top_p=a.eval_top_p, max_new_tokens=a.max_new_tokens, max_prompt=a.max_prompt,
        max_rows=a.max_rows, score=score, progress=sys.stderr.isatty())
    run.evaluated(result, model)
    return result


def train(args, argv):
    args = settle(args, argv)
    flags.tell_idle(args, argv)
    checkpoint.fetch(args.model)  # a mistyped name is refused before anything is read
    score = data.scorer(args.prompt_style, args.reward)
    train_rows, held_out = questions(args)
    model, tok = flags.load_policy(args)
    rows, skipped = data.prompts(tok, train_rows, args.prompt_style, args.max_prompt)
    asked = data.prompts(tok, held_out, args.prompt_style, args.max_prompt)[0] if held_out else []
    longest = max(len(row["ids"]) for row in [*rows, *asked])
    room = model.config.max_position_embeddings
    if longest + args.max_new_tokens > room:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: after the longest prompt's "
                         f"{longest} it passes the model's {room} positions; lower it, or "
                         "--max-prompt")
    prompts = Prompts(rows, args.seed)
    args.steps = args.steps or max(1, len(rows) // args.prompts_per_step)
    if args.lora_rank:
        params = lora.add_lora(model, args.lora_rank, args.lora_alpha, args.seed)
    else:
        params = list(model.requires_grad_(True).parameters())
    optimizer = grpo.AdamW(params, args.lr, (args.beta1, args.beta2), args.weight_decay)
    engine.settle_update(args, model, params)  # settles --micro-batch-tokens and --checkpointing

    with Run(args, argv) as run:
        if not run.open(model, optimizer, [*rows, *held_out]):  # the run is over and not extended
            return 0
        prompts.cursor = run.state.cursor
        engine.prepare(args, model, longest + args.max_new_tokens)
        weight = model.embed.weight
        print(f"{len(rows)} training prompts ({skipped} longer than --max-prompt), {args.steps} "
              f"steps, {sum(p.numel() for p in params):,} trainable parameters, "
              f"{weight.device.type}, {str(weight.dtype).removeprefix('torch.')}; updates of "
              f"{args.micro_batch_tokens} tokens a micro-batch, checkpointing {args.checkpointing}")
        try:
            learn(run, model, tok, optimizer, prompts, score, held_out)
            if args.steps % args.save_every:  # otherwise `learn` has saved
                run.save(model, optimizer)
            after = None
            if args.eval_n:
                after = evaluate(run, model, tok, score, held_out)
                if args.eval_every and args.lora_rank:  # it may be the best: --resume must know
                    run.save(model, optimizer)
            run.finish(after)
        except KeyboardInterrupt:
            return run.stop(model, optimizer)
        except Exception:
            run.fail(model, optimizer)
            raise
    return 0


def main(argv=None):
    return flags.run_command("train", train, argv)


if __name__ == "__main__":
    sys.exit(main())
