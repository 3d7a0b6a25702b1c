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
from itertools import chain
from pathlib import Path

from plumbing import checkpoint, console, flags, metrics, ranks
from plumbing.command import number
from plumbing.flags import Flag
from plumbing.run import Run, resolve_flags

import aqn
import data
import eval as evaluation
import grpo
import lora
import model as qwen
import sample

# name, type or choices, default, meaning, the embedded model's own default
FLAGS = (
    *sample.MODEL_FLAGS,
    "adapter",
    Flag("lora-rank", number(0, 4096), 32, "of LoRA; 0, with --quant none, trains all weights", 16),
    Flag("lora-alpha", number(1e-6, 1e6, float), 32.0, "the adapter is scaled by alpha / rank"),
    "noise",
    Flag("aqn", bool, True, "adaptive quantization noise in the RMSNorms"),
    *aqn.FLAGS,
    Flag("aqn-scope", ("rollout", "both"), "rollout", "noise in rollouts, or in updates as well"),
    "data and prompt",
    *flags.DATA_FLAGS,
    flags.PROMPT_STYLE,
    "rollout",
    Flag("steps", number(1, 1e8), None, "rollouts (default: one pass over the data)", 30),
    Flag("prompts-per-step", number(1, 1e5), 16, "prompts a rollout", 12),
    Flag("group-size", number(2, 1e4), 8, "completions a prompt"),
    Flag("max-prompt", number(1, 1e7), 256, "longer prompts, in tokens, are skipped", 128),
    Flag("max-new-tokens", number(1, 1e7), 4096, "completion limit", 96),
    Flag("temperature", number(1e-6, 100, float), 1.0, "of rollouts, and of all log-probs"),
    Flag("dynamic-sampling", bool, False, "DAPO: replace groups whose rewards are all equal", True),
    Flag("overlong", ("none", "mask", "soft"), "none",
         "cut completions: as they are, left out of the loss, DAPO's length penalty", "mask"),
    "objective",
    Flag("loss", grpo.OBJECTIVES, "grpo", "objective", "dapo"),
    Flag("eps-high", number(0, 1e6, float), None,
         "ratio clip above 1 (0.2; dapo 0.28, gspo 4e-4, cispo 4); below it is the objective's"),
    Flag("beta", number(0, 1e3, float), 0.0, "weight of the KL to the adapter-off model"),
    Flag("old-logp", ("sampler", "trainer", "current"), "sampler",
         "what the ratio is taken against: the log-probs of the sampler; of the trainer before "
         "the step (a second pass); of the update itself, detached, so that nothing is clipped"),
    "optimizer",
    Flag("updates-per-rollout", number(1, 1e5), 4, "optimizer steps, each on its own prompts", 2),
    Flag("micro-batch-tokens", number(0, 1e8), 0, "tokens a forward; 0: what fits, or 16384", 2048),
    Flag("checkpointing", ("auto", "on", "off"), "auto",
         "recompute blocks in backward, for memory; auto: off only where all fits", "off"),
    Flag("lr", number(0, 1, float), 1e-5, "AdamW's peak, the same for each --quant", 1e-3),
    Flag("grad-clip", number(1e-9, 1e6, float), 0.2, "norm the gradient is clipped to", 1.0),
    "held-out questions",
    Flag("eval-n", number(0, 1e4), 1, "samples a question, 0 for no evaluation"),
    Flag("eval-every", number(0, 1e8), 0, "steps between evaluations; 0: before and after", 10),
    Flag("eval-limit", number(1, 1e8), None, "how many questions (default: all)", 256),
    Flag("eval-temperature", number(0, 100, float), 0.6, "0 is greedy"),
    "run",
    Flag("out", str, None, "run folder (default: runs/<model>-<data>-<quant>-s<seed>)"),
    Flag("resume", bool, False, "continue the run in --out; a larger --steps extends it, and noise "
         "and learning rate go on as if it had been that from the start"),
    Flag("save-every", number(1, 1e8), 20, "steps between checkpoints", 10),
    *flags.ENGINE_FLAGS,
)
MAX_RESAMPLE = 2  # extra rollouts that --dynamic-sampling may draw in a step
NEEDS = (  # what some flags do nothing without, whether that is set, which flags
    ("--aqn", lambda args: args.aqn, ("aqn_start", "aqn_end", "aqn_schedule", "aqn_scope")),
    ("--eval-n 1 or more", lambda args: args.eval_n,
     ("eval_every", "eval_limit", "eval_temperature")),
    ("--lora-rank 1 or more", lambda args: args.lora_rank, ("lora_alpha",)),
    ("--awq", lambda args: args.awq, ("calib",)),
    ("--old-logp sampler or trainer", lambda args: args.old_logp != "current", ("eps_high",)),
)


def check(args):
    """Fill in --out's default; ValueError for flags that contradict each other."""
    if args.out is None:
        args.out = f"runs/{Path(args.model).name}-{Path(args.data).stem}-{args.quant}-s{args.seed}"
    if args.resume:  # its flags are the run's own, which were checked when it began
        return
    flags.check_graded(args)
    if args.lora_rank == 0:
        # the KL's reference is the adapter off; AdamW's steps are less than bfloat16's last bit
        if args.quant != "none" or args.beta or args.dtype == "bfloat16":
            raise ValueError("--lora-rank 0 trains all parameters in float32: it needs --quant "
                             "none, no --beta and no --dtype bfloat16")
        args.dtype = "float32"
    if args.updates_per_rollout > args.prompts_per_step:
        raise ValueError(f"--updates-per-rollout {args.updates_per_rollout}: each takes prompts of "
                         f"its own, and --prompts-per-step is {args.prompts_per_step}")


COMMAND = flags.Command("train", "QeRL training.", FLAGS, check, trains=True)


# ---- the loop


def learn(run, model, tok, optimizer, prompts, score, held_out):
    """Algorithm 1 of the paper, from step run.state.step on."""
    args = run.args
    for step in range(run.state.step, args.steps):
        result = evaluate(run, model, tok, score, held_out) if run.due(step) else None

        # 1. Noise (AQN, Eq. 8): drawn anew for each step, the same for all its rollouts. It sits in
        #    the RMSNorms of the one model there is: the sampler has no weights of its own.
        sigma = 0.0
        if args.aqn:
            sigma = aqn.sigma(step, args.steps, args.aqn_start, args.aqn_end,
                              schedule=args.aqn_schedule)
        aqn.set_noise(model, sigma, aqn.noise_seed(args.seed, step))

        # 2. Sample and grade. The sampler records the log-prob of each token as it draws it.
        begin = prompts.cursor
        sampled = rollout(run, model, tok, score, prompts.take(args.prompts_per_step), step)
        groups = sampled  # those to train on
        if args.dynamic_sampling:
            groups = resample(run, model, tok, score, prompts, sampled, step)

        # 3. Advantages: each completion compared with its group; no critic.
        run.phase("update")
        grpo.set_advantages(groups, scale=grpo.OBJECTIVES[args.loss].scale)

        # 4. Optimizer steps, each on its own groups. Algorithm 1 trains the clean policy, but a
        #    noisy one drew the samples, so pi_old is the log-probs that the sampler recorded.
        if args.aqn_scope == "rollout":
            aqn.clear(model)
        if args.old_logp == "trainer":
            grpo.record_trainer_logprobs(model, chain(*groups), args)
        updates = []  # (summed metrics, gradient norm) of each
        n = args.updates_per_rollout
        for i in range(n):
            lr = grpo.learning_rate(step * n + i, args.steps * n, args.lr)
            grpo.set_rate(optimizer, lr)
            every_nth = groups[i::n]
            updates.append(grpo.update(model, optimizer, list(chain(*every_nth)), args))
        run.check(updates)  # ValueError if ten in a row were not finite

        # 5. Log and save.
        run.phase("log")
        row = {"step": step, **metrics.sample_metrics(sampled), "groups": len(groups),
               "prompts_sampled": prompts.cursor - begin, "lr": lr, "sigma": sigma,
               **metrics.update_metrics(updates, args.beta)}
        run.state.last = dict(row)  # log changes the row
        run.log(row, sampled, result)
        run.advance(step + 1, prompts.cursor, optimizer)


def rollout(run, model, tok, score, rows, key):
    """G graded completions of each row's prompt from the policy as it is now: P groups, the same on
    all ranks. A different `key` gives different samples."""
    args = run.args
    mine = ranks.mine(range(len(rows)))  # the prompts that this rank draws for
    seed = aqn.noise_seed(args.seed, f"samples/{key}")
    run.phase("rollout")
    groups = complete(model, tok, [rows[i] for i in mine], args, seed, indices=mine)
    run.phase("reward")
    grade([*chain(*groups)], tok, score, args)
    run.phase("rollout")  # waiting for the longest completion of all ranks
    groups = ranks.merge(groups)
    run.drawn += sum(len(c.ids) for c in chain(*groups))
    return groups


def resample(run, model, tok, score, prompts, sampled, step):
    """DAPO's dynamic sampling: a group of equal rewards teaches nothing, so another prompt takes
    its place. Returns the groups to train on."""
    groups = [group for group in sampled if grpo.has_signal(group)]
    for again in range(MAX_RESAMPLE):
        missing = run.args.prompts_per_step - len(groups)
        if missing == 0:
            break
        more = rollout(run, model, tok, score, prompts.take(missing), f"{step}/{again + 1}")
        groups = groups + [group for group in more if grpo.has_signal(group)]
    return groups


def complete(model, tok, rows, args, seed, indices=None):
    """G completions of each row's prompt, not graded yet; indices: see sample.generate."""
    groups = sample.generate(
        model, [row["ids"] for row in rows], args.group_size, args.max_new_tokens,
        args.temperature, eos_ids=tok.eos_ids, seed=seed, max_rows=args.max_rows, indices=indices)
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
            c.reward += grpo.soft_overlong_penalty(len(c.ids), args.max_new_tokens)


def evaluate(run, model, tok, score, rows):
    """Held-out accuracy of the policy as it is now, without its noise."""
    run.phase("evaluate")
    a = run.args
    result = evaluation.evaluate(
        model, tok, rows, style=a.prompt_style, n=a.eval_n, temperature=a.eval_temperature,
        max_new_tokens=a.max_new_tokens, max_prompt=a.max_prompt, max_rows=a.max_rows, score=score)
    run.evaluated(result)
    return result


# ---- before and after the loop


class Prompts:
    """Training prompts in an order that is a function of (seed, epoch); `cursor` counts those
    handed out."""

    def __init__(self, rows, seed):
        self.rows = rows
        self.seed = seed
        self.cursor = 0

    def take(self, n):
        chosen = []
        while len(chosen) < n:  # the epoch may end on the way
            epoch, place = divmod(self.cursor, len(self.rows))
            order = [*self.rows]
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            part = order[place : place + n - len(chosen)]
            chosen += part
            self.cursor += len(part)
        return chosen


def save_weights(model, args, folder):
    """What was trained, into `folder`: an adapter in PEFT's layout or, with --lora-rank 0, a
    Hugging Face checkpoint."""
    aqn.clear(model)  # a noise of the user's own may be in what is saved
    if args.lora_rank:
        return lora.save_adapter(model, folder, args.model)
    with checkpoint.Writer(folder, checkpoint.fetch(args.model)) as writer:
        for name, tensor in qwen.tensors(model):
            writer.add(name, tensor)


def train(args, argv):
    args = resolve_flags(COMMAND, args, argv)
    flags.warn_idle(COMMAND, NEEDS, args, argv)

    # Questions, model, prompts; all that can be refused is refused before the run begins.
    checkpoint.read_config(checkpoint.fetch(args.model))  # a wrong --model is refused first
    score = data.scorer(args.prompt_style, args.reward)
    train_rows, held_out = data.questions(args)
    model, tok = sample.load_policy(args)
    rows, skipped = data.prompts(tok, train_rows, args.prompt_style, args.max_prompt)
    asked = data.prompts(tok, held_out, args.prompt_style, args.max_prompt)[0] if held_out else []
    longest = max((row["ids"] for row in [*rows, *asked]), key=len)
    sample.check_prompts(model, [longest], [args.max_new_tokens])
    prompts = Prompts(rows, args.seed)
    args.steps = args.steps or max(1, len(rows) // args.prompts_per_step)

    # An adapter is trained or, with --lora-rank 0, all parameters.
    if args.lora_rank:
        params = lora.add_lora(model, args.lora_rank, args.lora_alpha, args.seed)
    else:
        params = list(model.requires_grad_(True).parameters())
    optimizer = grpo.AdamW(params, args.lr)

    # What an update holds at once: on the fast path by free memory.
    sample.set_engine(model, args.engine)
    if model.fast:
        model.fast.plan_update(model, args, params)
    args.micro_batch_tokens = args.micro_batch_tokens or 16384
    if args.checkpointing == "auto":
        args.checkpointing = "on"
    model.checkpointing = args.checkpointing == "on"

    # The run folder; with --resume it says where the run stands.
    with Run(COMMAND, args, argv, lambda folder: save_weights(model, args, folder)) as run:
        if not run.open(optimizer, [*rows, *held_out]):  # the run is over and not extended
            return 0
        prompts.cursor = run.state.cursor
        if model.fast:
            model.fast.plan_rollouts(model, args, len(longest) + args.max_new_tokens)
        console.show_start(args, len(rows), skipped, params, model.embed.weight)
        try:
            learn(run, model, tok, optimizer, prompts, score, held_out)
            after = evaluate(run, model, tok, score, held_out) if args.eval_n else None
            run.finish(optimizer, after)
        except KeyboardInterrupt:
            return run.stop(optimizer)
        except Exception:
            run.fail(optimizer)
            raise
    return 0


def main(argv=None):
    return flags.run_command(COMMAND, train, argv)


if __name__ == "__main__":
    sys.exit(main())
