"""
What surrounds the loop of train.py: the run folder, checkpoints and resume, signals, metrics,
the console.

A run folder holds config.json, metrics.jsonl (one row a step), rollouts.jsonl (text samples),
adapter/ and adapter_best/ (PEFT's layout, and policy.json) or, where all parameters are trained,
model/ (a Hugging Face checkpoint, at the end), checkpoint/ (what resume needs),
eval_before.jsonl and eval_after.jsonl (a row a held-out question), metrics.png and summary.json.
Each file appears whole or not at all. Nothing is written before everything that can be refused has
been; a folder without checkpoint/ holds nothing that is worth keeping, and a start takes it over.

    python train.py --out runs/x                  # ctrl-C at any moment
    python train.py --resume --out runs/x         # goes on; with a larger --steps beyond its end
"""
import gc
import hashlib
import json
import math
import os
import resource
import shlex
import shutil
import sys
import textwrap
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch

import eval as evaluation
import grpo
import lora
import plot
from runtime import command, flags, ranks
from weights import checkpoint
from weights.files import append, check_out, lines, lock, parse_json, read_json, whole

# what --resume may change
FREE = ("steps", *plot.IDLE)
NAMES = {"lock", "config.json", "metrics.jsonl", "rollouts.jsonl", "adapter", "adapter_best",
         "model", "checkpoint", "eval_before.jsonl", "eval_after.jsonl", "metrics.png",
         "summary.json"}


@dataclass
class State:
    """Where a run stands between two steps. Samples, noise and learning rate follow from it and the
    flags."""

    step: int = 0  # steps done
    cursor: int = 0  # training prompts handed out
    seconds: float = 0.0
    before: dict | None = None  # {"accuracy", "stderr"} of the held-out questions before training
    best: dict | None = None  # {"step", "accuracy", "stderr"} of the adapter in adapter_best/
    data: str = ""  # digest of the training questions


def settle(args, argv):
    """The flags to run with: as given in a fresh folder, those of the run with --resume. ValueError
    for a folder that holds a run or anything else, one that cannot be written, or a flag that a
    resumed run cannot change. Leaves nothing."""
    out = Path(args.out)
    check_out(out, folder=True)
    saved, begun = out / "config.json", (out / "checkpoint" / "state.pt").is_file()
    if not args.resume:
        if begun:
            raise ValueError(f"--out {out}: holds a run already; add --resume to continue it, "
                             "or choose another folder")
        for path in out.iterdir() if out.exists() else ():
            if path.name not in NAMES and not path.name.startswith((".", "events.out")):
                raise ValueError(f"--out {out}: holds {path.name}, which is no run's; choose "
                                 "another folder")
        return args
    if not saved.is_file():
        raise ValueError(f"--resume: {out} holds no run (no config.json); check --out")
    read = ((k.replace("_", "-"), v) for k, v in read_json(saved).items())
    old, wanted = flags.from_file("train", read, saved), flags.given("train", argv)
    for name, value in wanted.items():
        if name not in FREE and value != getattr(old, name):
            raise ValueError(f"--{name.replace('_', '-')}: the run in {out} used "
                             f"{getattr(old, name)}; --resume keeps a run's flags")
        setattr(old, name, value)
    old.resume, old.out = begun, args.out
    return old


class Run:
    """One run's folder, clock and signals. `phase(name)` begins a phase of the step: its seconds
    are counted, and Ctrl-C, SIGTERM, a closed terminal or stdout drop any phase at once but an
    update, which has changed weights when it ends and is logged first. `advance` ends it."""

    def __init__(self, args, argv):
        self.args, self.argv, self.out, self.started = args, argv, Path(args.out), time.time()
        self.begin = [*ranks.launcher(), *command.script(argv)]
        self.state, self.clock, self.current, self.asked = State(), {}, None, False
        self.warned, self.earlier, self.failed, self.drawn = set(), 0.0, 0, 0
        self.held = ExitStack()  # the folder's lock, and the signals

    def __enter__(self):
        gc.freeze()  # what stands by now stays; a look through it stops a step for 0.2 s
        self.held.callback(gc.unfreeze)
        return self

    def __exit__(self, *_):
        self.held.close()

    def open(self, optimizer, rows):
        """Make the folder, or with --resume load its checkpoint; from here on signals are handled.
        False if there is nothing to do: the run has ended, and --steps asks for no more.

        ValueError if another process is at work in the folder, if the checkpoint is damaged, or if
        `rows`, the training questions, are not those the run began with."""
        if ranks.rank == 0:
            self.tracker = tracker(self.args) if self.args.log_to else None
            self.out.mkdir(parents=True, exist_ok=True)
            busy = f"--out {self.out}: another run is at work in it; wait, or choose another folder"
            self.held.enter_context(lock(self.out / "lock", busy))
        told = [{k: v for k, v in r.items() if k != "ids"} for r in rows]  # all that --reward sees
        digest = hashlib.sha256(json.dumps(told, default=str).encode())
        self.state.data = digest.hexdigest()
        if self.args.resume:
            self.restore(optimizer)
            if self.state.step >= self.args.steps and (self.out / "summary.json").is_file():
                print(f"{self.out}: ended after {self.state.step} steps; a larger --steps goes on")
                return False
        if ranks.rank == 0:
            if not self.args.resume:
                for name in ("metrics.jsonl", "rollouts.jsonl"):
                    (self.out / name).unlink(missing_ok=True)  # of a start that came to nothing
            with whole(self.out / "config.json") as part:
                part.write_text(json.dumps(vars(self.args), indent=2) + "\n")
        self.earlier = self.state.seconds
        self.held.enter_context(command.signals(self.interrupt))
        told = "  ".join(f"{k}={v}" for k, v in vars(self.args).items())
        print(textwrap.fill(told, 100, break_long_words=False, break_on_hyphens=False))
        return True

    # ---- signals and time

    def interrupt(self, *_):
        again, self.asked = self.asked or ranks.stopped, True
        if ranks.world > 1 and (again or ranks.busy):
            return  # what is begun with the others is ended with them; torchrun has the patience
        if again or self.current not in ("update", "log"):
            command.stop()
        with suppress(OSError):  # no print: it may have come in the middle of one
            os.write(2, b"finishing the update, then saving (again to stop at once)\n")

    def phase(self, name):
        if self.asked and name in ("rollout", "evaluate"):
            raise KeyboardInterrupt  # it came in an exchange with other ranks
        now = time.time()
        if self.current:
            self.clock[self.current] = self.clock.get(self.current, 0.0) + now - self.since
        self.current, self.since = name, now

    def seconds(self):
        """Seconds of the run so far, those before a resume included."""
        return self.earlier + time.time() - self.started

    # ---- checkpoints

    @ranks.first
    def save(self, model, optimizer):
        """adapter/ and checkpoint/. ValueError, and nothing is written, if a parameter is not
        finite: what was saved before it stays."""
        broken = [name for name, p in model.named_parameters()
                  if p.requires_grad and not torch.isfinite(p).all()]
        if broken:
            raise ValueError(f"{broken[0]} holds NaN or inf after {self.state.step} steps; nothing "
                             f"was saved over the last checkpoint in {self.out}. Lower --lr")
        if self.args.lora_rank:
            self.save_adapter("adapter", model)
        (self.out / "checkpoint").mkdir(exist_ok=True)
        state = {**asdict(self.state), "params": [p.detach().cpu() for p in optimizer.params],
                 "masters": [m.detach().cpu() for m in optimizer.masters],
                 "optimizer": optimizer.state_dict()}
        state["digest"] = digest_of(state)
        with whole(self.out / "checkpoint" / "state.pt") as part:
            torch.save(state, part)

    @ranks.first
    def save_adapter(self, name, model):
        lora.save_adapter(model, self.out / name, self.args.model)
        flags.save_policy(self.out / name, model, self.args)

    def restore(self, optimizer):
        """checkpoint/ into the optimizer and its parameters; what was logged after it is
        dropped."""
        path, data = self.out / "checkpoint" / "state.pt", self.state.data
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state.pop("digest") != digest_of(state):
                raise ValueError("its bits have changed since it was written")
            tensors = [*state.pop("params"), *state.pop("masters")]
            ours = [*optimizer.params, *optimizer.masters]
            if [p.shape for p in ours] != [t.shape for t in tensors]:
                raise ValueError("its tensors are not those of this model")
            with torch.no_grad():
                for p, saved in zip(ours, tensors, strict=True):
                    p.copy_(saved)
            optimizer.load_state_dict(state.pop("optimizer"))
            self.state = State(**state)
        except Exception as e:  # torch's unpickler raises many kinds
            why = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            raise ValueError(f"{path}: cannot be resumed ({why}); start anew in another --out"
                             ) from None
        if self.state.data != data:
            raise ValueError(f"--data {self.args.data}: is not what the run in {self.out} began "
                             "with; --resume needs the same questions")
        if ranks.rank:
            return
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            path = self.out / name
            kept, rows = [], [*lines(path)] if path.exists() else []
            for n, text in rows:
                try:
                    row = parse_json(text, f"{path}, row {n}", {"step": (int, 0, 1 << 60)},
                                     ["step"])
                except ValueError:
                    if n < len(rows):
                        raise
                    break  # a kill in the middle of the last one
                kept += [text + "\n"] if row["step"] < self.state.step else []
            with whole(path) as part:
                part.write_text("".join(kept))

    # ---- what is written and shown

    @ranks.first
    def log(self, row, groups):
        """One step's row into metrics.jsonl, two samples into rollouts.jsonl, a line on the
        console."""
        append(self.out / "metrics.jsonl", [row])
        samples = [{"step": row["step"], "question": c.row["question"], "answer": c.row["answer"],
                    "text": c.text, "reward": c.reward, "correct": c.correct}
                   for c in (group[0] for group in groups[:2])]
        append(self.out / "rollouts.jsonl", samples)
        eta = (self.args.steps - row["step"] - 1) * row["seconds_step"]
        print(console(row) + f" | eta {eta / 60:.0f} min", flush=True)
        if self.args.show_every and row["step"] % self.args.show_every == 0:
            for s in samples:
                mark = "right" if s["correct"] else f"wrong, it is {s['answer']}"
                print(f"      Q: {one_line(s['question'])}\n"
                      f"      A: {one_line(s['text'])} ({mark})")
        for text in warnings_for(row, self.args):
            if text not in self.warned:  # once a run is enough to be told
                print(f"warning: {text}", flush=True)
            self.warned.add(text)
        if self.tracker:
            self.tracker({k: v for k, v in row.items() if v is not None}, row["step"])

    def due(self, step):
        """Whether the held-out questions are asked before this step: so a row has both the accuracy
        of its samples and the held-out accuracy of the policy that drew them, and a resumed run
        evaluates where the uninterrupted one does."""
        a = self.args
        return a.eval_n and (step == 0 or a.eval_every and step % a.eval_every == 0)

    def evaluated(self, result, model):
        """The accuracy before training, and later the best adapter so far, into adapter_best/."""
        s, found = self.state, {k: result[k] for k in ("accuracy", "stderr")}
        print(f"held-out accuracy after {s.step} steps: {found['accuracy']:.1%}", flush=True)
        if s.step == 0:
            s.before = found
            write_rows(self.out / "eval_before.jsonl", result["rows"])
        elif self.args.eval_every and (s.best is None or found["accuracy"] > s.best["accuracy"]):
            s.best = {"step": s.step, **found}
            if self.args.lora_rank:
                self.save_adapter("adapter_best", model)

    def advance(self, step, cursor, model, optimizer):
        """`step` steps are done: save where --save-every says so, stop if a signal has come."""
        s = self.state
        s.step, s.cursor, s.seconds = step, cursor, self.seconds()
        self.phase(None)
        if self.asked:
            raise KeyboardInterrupt
        if step % self.args.save_every == 0:
            self.save(model, optimizer)

    def watch(self, updates, model):
        """Count updates that were skipped because their gradient was not finite; ValueError after
        ten in a row, with the first broken tensor if there is one."""
        for _, norm in filter(None, updates):
            self.failed = 0 if math.isfinite(norm) else self.failed + 1
        if self.failed >= 10:
            tensors = chain(model.named_parameters(), model.named_buffers())
            broken = next((name for name, t in tensors if t.is_floating_point()
                           and not torch.isfinite(t.float()).all()), "none, the loss overflows")
            raise ValueError(f"{self.failed} updates in a row had a gradient that is not finite; "
                             f"first broken tensor: {broken}. Lower --lr, or check --model")

    def stop(self, model, optimizer):
        """The end of a run that was interrupted: saved where it stands, but for one that was told
        twice, whose parameters may be on their way from one step to the next."""
        ranks.stop()
        if self.current in ("update", "log"):
            print(f"\nstopped within step {self.state.step}; the last checkpoint stands, continue "
                  f"with: {self.again()}")
            return 130
        self.save(model, optimizer)
        print(f"\nstopped after {self.state.step} steps; continue with: {self.again()}")
        return 130

    @ranks.first
    def fail(self, model, optimizer):
        """An error ends the run, in a reward of one's own, say, or for want of memory: what was
        learned before it is saved, unless an update was on its way."""
        try:
            if self.state.step and self.current not in ("update", "log"):
                self.save(model, optimizer)
        finally:
            if (self.out / "checkpoint" / "state.pt").is_file():
                print(f"the last checkpoint stands, continue with: {self.again()}", file=sys.stderr)

    def again(self):
        return shlex.join([*self.begin, "--resume", "--out", str(self.out)])

    @ranks.first
    def finish(self, after, model):
        """summary.json, metrics.png, model/ if all parameters were trained, and what was learned
        in the last lines."""
        if not self.args.lora_rank:
            self.save_model(model)
        s, before = self.state, self.state.before
        s.seconds = self.seconds()
        gain = error = None
        if after:
            base = [json.loads(text) for _, text in lines(self.out / "eval_before.jsonl")]
            gain, error = evaluation.gain({"rows": base}, after)
        summary = {"accuracy_before": before and before["accuracy"],
                   "accuracy_after": after and after["accuracy"],
                   "stderr_before": before and before["stderr"],
                   "stderr_after": after and after["stderr"], "gain": gain, "stderr_gain": error,
                   "best": s.best, "steps": s.step,
                   "seconds": round(s.seconds, 1), "peak_gib": round(peak_gib(), 2),
                   "command": shlex.join([*self.begin, *self.argv])}
        if after:
            write_rows(self.out / "eval_after.jsonl", after["rows"])
        with whole(self.out / "summary.json") as part:
            part.write_text(json.dumps(summary, indent=2) + "\n")
        plot.plot([self.out], self.out / "metrics.png")
        print(f"{self.out}: {'adapter' if self.args.lora_rank else 'model'}/, metrics.jsonl, "
              f"metrics.png, summary.json ({s.seconds:.0f} s)")
        if after:
            show_learned(base, after["rows"])
            print(f"held-out accuracy: {before['accuracy']:.1%} before, {after['accuracy']:.1%} "
                  f"after {s.step} steps ({100 * gain:+.1f} +- {evaluation.error(error)} points)")

    def save_model(self, model):
        """All parameters as a Hugging Face checkpoint in model/, with policy.json."""
        out = self.out / "model"
        shutil.rmtree(out, ignore_errors=True)  # of before the run was extended
        with checkpoint.Writer(out, flags.model_folder(self.args.model)) as writer:
            for name, tensor in checkpoint.tensors(model):
                writer.add(name, tensor)
        flags.save_policy(out, model, self.args)


def show_learned(before, after):
    """One question that was answered wrong before training and right after it."""
    for b, a in zip(before, after, strict=True):
        if b["accuracy"] == 0 and a["accuracy"] == 1:
            print(f"one of the questions: {one_line(a['question'])} (it is {a['answer']})\n"
                  f"  before: {one_line(b['samples'][0]['text'])}\n"
                  f"  after:  {one_line(a['samples'][0]['text'])}")
            return


def digest_of(state):
    """A digest of everything in a checkpoint: torch.load takes flipped bits for numbers."""
    h = hashlib.sha256()

    def add(x):
        if isinstance(x, torch.Tensor):
            h.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(x, dict | list | tuple):
            for item in x.items() if isinstance(x, dict) else x:
                add(item)
        else:
            h.update(repr(x).encode())

    add(state)
    return h.hexdigest()


@ranks.first
def write_rows(path, rows):
    with whole(path) as part:
        append(part, rows)


def one_line(text, width=160):
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def peak_gib():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / (2**30 if sys.platform == "darwin" else 2**20)


def reserved_gib():
    """What the allocator held at most, its unused pieces included: what other runs could not."""
    return torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def metrics_row(run, step, groups, kept, n_prompts, updates, sigma, lr, result):
    """A step's row of metrics.jsonl. groups: the first rollout, whole, for honest statistics; kept:
    the groups trained on; n_prompts: how many were drawn; updates: (summed metrics, gradient norm)
    of each, None where it had nothing to train on; result: the evaluation before this step, if
    there was one."""
    run.phase("log")
    updates = [u for u in updates if u]
    skipped = sum(not math.isfinite(norm) for _, norm in updates)
    updates = [u for u in updates if math.isfinite(u[1])]
    flat = [c for g in groups for c in g]
    lengths = [len(c.ids) for c in flat]
    spread = torch.tensor([[c.reward for c in g] for g in groups])  # (P, G)
    rewards = spread.mean(1)  # (P,): the groups are the independent draws
    row = {"step": step, "reward": mean(c.reward for c in flat),
           "reward_se": (rewards.std() / len(groups) ** 0.5).item() if len(groups) > 1 else 0.0,
           "accuracy": mean(c.correct for c in flat), "format": mean(c.format for c in flat),
           "reward_std": spread.std(1).mean().item(),
           "zero_var_frac": mean(not has_signal(g) for g in groups), "length_mean": mean(lengths),
           "length_max": max(lengths), "truncated_frac": mean(not c.finished for c in flat),
           # -log p of what was drawn: the entropy of the policy that sampled, its noise included
           "sampler_entropy": -sum(sum(c.logprobs) for c in flat) / sum(lengths),
           "groups": len(kept), "prompts_sampled": n_prompts, "updates": len(updates), "lr": lr,
           "sigma": sigma, "skipped": skipped, "grad_norm": mean(norm for _, norm in updates)}
    names = ("loss", "clip_low_frac", "clip_high_frac", "kl", "logp_gap_mean", "logp_gap_max",
             "sampler_kl", "ratio_outside_frac", "entropy", "padding_frac", "clip_first_frac")
    row |= dict.fromkeys(names, 0.0)
    if updates:
        each = [grpo.mean_metrics(sums) for sums, _ in updates]
        row |= grpo.mean_metrics(grpo.sum_metrics([sums for sums, _ in updates]))
        row["loss"] = mean(m["loss"] for m in each)
        # sampler and trainer are compared before the step's first update moves one of them
        first = each[0]
        row |= {k: first[k] for k in first if k.startswith(("logp_gap", "sampler_kl", "ratio"))}
        row["clip_first_frac"] = first["clip_low_frac"] + first["clip_high_frac"]
    s = {name: run.clock.pop(name, 0.0) for name in ("rollout", "reward", "update")}
    drawn, run.drawn = run.drawn, 0
    trained = sum(float(sums["tokens"]) for sums, _ in updates)
    return row | {"eval_accuracy": result and result["accuracy"],
                  "eval_stderr": result and result["stderr"], "seconds": run.seconds(),
                  "seconds_rollout": s["rollout"], "seconds_reward": s["reward"],
                  "seconds_update": s["update"], "seconds_step": sum(s.values()),
                  "rollout_tok_s": drawn / s["rollout"], "update_tok_s": trained / s["update"],
                  "peak_gib": peak_gib(), "reserved_gib": reserved_gib()}


def has_signal(group):
    """Whether the rewards of a group differ: if not, its advantages are all 0."""
    return len({c.reward for c in group}) > 1


def console(row):
    held_out = "" if row["eval_accuracy"] is None else f" | held-out {row['eval_accuracy']:.1%}"
    return (f"{row['step']:>5} | reward {row['reward']:.3f} | acc {row['accuracy']:.3f} | "
            f"len {row['length_mean']:.0f} | trunc {row['truncated_frac']:.0%} | "
            f"ent {row['entropy']:.3f} | grad {row['grad_norm']:.3f} | "
            f"dlogp {row['logp_gap_mean']:.4f} | sigma {row['sigma']:.1e} | "
            f"{row['rollout_tok_s']:.0f} tok/s | {row['peak_gib']:.1f} GB | "
            f"{row['seconds_step']:.1f} s{held_out}")


def warnings_for(row, args):
    """What a user of this row should be told, each with what to do."""
    if row["reward"] == 0:
        yield ("every reward is 0: nothing can be learned; does --prompt-style fit the model, is "
               "--max-new-tokens long enough?")
    elif row["format"] == 0:
        yield (f"no completion follows the {args.prompt_style} format: try --prompt-style boxed or "
               "an instruction-tuned --model")
    if row["truncated_frac"] == 1:
        yield f"every completion was cut at {args.max_new_tokens} tokens: raise --max-new-tokens"
    if row["zero_var_frac"] == 1:
        yield ("no group has rewards that differ, so there is no gradient: raise --group-size, or "
               "choose easier or harder --data")
    if row["logp_gap_mean"] > args.gap_bound and (row["sigma"] == 0 or args.aqn_scope == "both"):
        yield (f"sampler and trainer disagree by more than {args.gap_bound} nats a token: "
               "use --old-logp current, or --dtype float32")
    if row["skipped"]:
        yield "an update was skipped: its gradient was not finite; lower --lr, or check --model"
    if row["clip_first_frac"] > 0.02:  # nothing has been learned from these completions yet
        yield ("more than 2% of the tokens are clipped before the first update: the noise alone "
               "moves the ratio out of the clip; use --old-logp current, or lower --aqn-start")


def tracker(args):
    """row, step -> the --log-to program."""
    try:
        if args.log_to == "wandb":
            import wandb

            run = wandb.init(project="qerl", name=Path(args.out).name, config=vars(args))
            return lambda row, step: run.log(row, step=step)
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(f"--log-to {args.log_to}: not installed; pip install {args.log_to}"
                         ) from None
    writer = SummaryWriter(args.out)
    return lambda row, step: [writer.add_scalar(k, v, step) for k, v in row.items()]
