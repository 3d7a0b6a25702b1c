"""
What surrounds the loop of train.py: the run folder, signals, metrics, checkpoints and resume.
Most of what the terminal shows is in console.py.

A run folder holds config.json, metrics.jsonl (one row a step), rollouts.jsonl (text samples),
adapter/ and adapter_best/ (PEFT's layout) or, where all parameters are trained, model/ (Hugging
Face's), checkpoint/ (what resume needs), eval_before.jsonl and eval_after.jsonl (a row a held-out
question), metrics.png and summary.json. All but the logs appear whole or not at all. A new run
writes nothing until everything that can be refused has been checked; its first checkpoint comes
before the first step, so that --resume goes on with whatever has begun.
"""
import argparse
import gc
import hashlib
import json
import math
import os
import resource
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time

from plumbing import command, console, files, flags, hub, metrics, policy, ranks
from plumbing.command import IDLE, MINOR
from plumbing.files import append, check_out, lock, read_json, saved, whole

import torch

# what --resume may change: a run must be able to continue on a card with less memory, and where its
# files have moved (`restore` compares what is in them)
FREE = ("steps", "model", "data", "calib", *IDLE, *MINOR)
BESIDE_FLAGS = ("command", "script", "commits")  # what else config.json holds
# what a start leaves that was killed before its first checkpoint
LEFTOVERS = ("lock", "config.json", "checkpoint")


@dataclass
class State:
    """Where a run stands between two steps. Samples, noise and learning rate follow from it and the
    flags."""

    step: int = 0  # steps done
    cursor: int = 0  # training prompts handed out
    seconds: float = 0.0
    before: dict | None = None  # {"accuracy", "stderr"} of the held-out questions before training
    best: dict | None = None  # {"step", "accuracy", "stderr"} of the adapter in adapter_best/
    data: str = ""  # digest of the questions
    base: dict = field(default_factory=dict)  # policy.base_of
    last: dict = field(default_factory=dict)  # the last step's row, but for times and evaluation
    command: str = ""  # the command line that began the run
    script: str = ""  # its script, and the words that are not train.py's


def resolve_flags(spec, args, argv):
    """The flags to run with: those given, in a fresh folder; with --resume, the run's own.
    ValueError for a folder that holds anything else, or a flag that a resumed run cannot change."""
    out = Path(args.out)
    check_out(out, folder=True)
    if args.resume:
        return flags_of_run(spec, args.out, argv)
    if (out / "checkpoint" / "state.pt").is_file():
        raise ValueError(f"--out {out}: holds a run already; add --resume to continue it, or "
                         "choose another folder")
    for path in out.iterdir() if out.exists() else ():
        if path.name not in LEFTOVERS and not path.name.startswith("."):
            raise ValueError(f"--out {out}: holds {path.name}; choose a new or an empty folder")
    return args


def flags_of_run(spec, out, argv):
    """The flags in the config.json of the run in `out`, with those in argv that may change."""
    config = Path(out) / "config.json"
    if not config.is_file():
        raise ValueError(f"--resume: {out} holds no run (no config.json); check --out")
    found = read_json(config)
    hub.COMMITS.update(found.get("commits") or {})  # it goes on with the files that it began with
    args = argparse.Namespace(**{k: v for k, v in found.items() if k not in BESIDE_FLAGS})
    if other := vars(args).keys() ^ {f.dest for f in spec.flags}:
        raise ValueError(f"{config}: the run was begun by another version of train.py, or by a "
                         f"script of yours, with other flags ({min(other)}); continue it with "
                         "that, or start anew in another --out")
    flags.check_choices(spec, vars(args), config)
    for name, value in flags.given(spec, argv).items():
        if name not in FREE and value != getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')}: the run in {out} used "
                             f"{getattr(args, name)}; --resume keeps a run's flags")
        setattr(args, name, value)
    args.out = out
    return args


class Run(ExitStack):
    """One run's folder, clock and signals, in the order in which train.py calls them: `open`; in
    each step `phase`, `evaluated` if it is `due`, `check`, `log`, `advance`; and at the end
    `finish`, `stop` or `fail`.

    spec: the flags.Command of train.py. save_weights(folder): to write what is trained."""

    def __init__(self, spec, args, argv, save_weights):
        super().__init__()  # the folder's lock, the signals, the collector: held to the end
        self.spec, self.args, self.save_weights = spec, args, save_weights
        self.out = Path(args.out).absolute()  # a reward may change the working directory
        own = (Counter(sys.argv[1:]) - Counter(argv)).elements()  # the words of one's own script
        self.state = State(command=ranks.command_line(), base=policy.base_of(args),
                           script=" ".join([Path(sys.argv[0]).name, *own]))
        self.again = f"{self.state.command}{' --resume' * ('--resume' not in argv)}"
        self.started = time()
        self.clock = {}  # seconds of each phase of a step
        self.current = None  # the phase
        self.drawn = 0  # tokens sampled in this step, replaced groups included
        self.failed = 0  # updates skipped in a row
        self.warned = set()  # warnings given
        self.interrupted = False  # a signal has come

    def open(self, optimizer, rows):
        """Make the folder and a first checkpoint, or with --resume load the last one; from here on
        signals are handled. False if the run has ended, and --steps asks for no more. rows: all
        questions of training and evaluation. ValueError as in `claim` and `restore`."""
        ranks.gather(None)  # all ranks have looked into the folder before one writes there
        self.claim()
        asked = [{k: v for k, v in r.items() if k != "ids"} for r in rows]  # all that --reward sees
        self.state.data = hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()
        if self.args.resume:
            self.restore(optimizer)
        self.tidy()
        ended = saved(self.out, "summary.json").get("steps")  # perhaps of an earlier end
        if ended == self.state.step >= self.args.steps:
            self.report()  # it may have been stopped while its curves were drawn
            print(f"{self.out}: ended after {ended} steps; a larger --steps goes on")
            return False
        if not self.args.resume:
            self.write_state(optimizer)
        self.started -= self.state.seconds
        gc.freeze()  # what exists by now stays; going through it would stop a step for 0.2 s
        self.callback(gc.unfreeze)
        self.enter_context(command.signals(self.interrupt))
        console.show_flags(self.args)
        return True

    @ranks.first
    def claim(self):
        """Make the folder and lock it; ValueError if another process has it, or has trained in it
        since `resolve_flags`."""
        (self.out / "checkpoint").mkdir(parents=True, exist_ok=True)
        busy = f"--out {self.out}: another run is at work in it; wait, or choose another folder"
        self.enter_context(lock(self.out / "lock", busy))
        if not self.args.resume and (self.out / "checkpoint" / "state.pt").is_file():
            raise ValueError(busy)

    @ranks.first
    def tidy(self):
        """Remove what a save that was killed has left behind; write config.json."""
        for path in [*self.out.rglob(".*.part")]:
            files.discard(path)
        beside = {"command": self.state.command, "script": self.state.script,
                  "commits": hub.COMMITS}
        files.write_json(self.out / "config.json", vars(self.args) | beside)

    # ---- time and signals

    def seconds(self):
        """Seconds of the run so far, those before a resume included."""
        return time() - self.started

    def phase(self, name):
        """Begin a phase of the step (evaluate, rollout, reward, update, log; then None), and count
        the seconds of the one before it."""
        if self.interrupted and name in ("rollout", "evaluate"):
            raise KeyboardInterrupt  # it came during an exchange with other ranks
        now = time()
        if self.current:
            self.clock[self.current] = self.clock.get(self.current, 0.0) + now - self.since
        self.current, self.since = name, now

    @property
    def halfway(self):
        """Whether weights may have changed in a step not logged yet: not a moment to save."""
        return self.current in ("update", "log")

    def interrupt(self, *_):
        """The handler of ctrl-C, SIGTERM, a closed terminal or stdout. Stops at once, except within
        an update: that is finished and logged, then `advance` stops. A second signal does not wait
        for that, except with several ranks, which stop together (see `phase` and ranks.gather)."""
        again, self.interrupted = self.interrupted or ranks.stopped, True
        if ranks.world > 1 and (again or ranks.busy):
            return  # what ranks begin together they end together; torchrun waits long enough
        if again or not self.halfway:
            command.stop()  # raises KeyboardInterrupt
        with suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(2, b"finishing the update, then saving (again to stop at once)\n")

    # ---- in each step

    def due(self, step):
        """Whether the held-out questions are asked before this step: by the policy that then draws
        its samples, and in a resumed run where the uninterrupted one asks them."""
        a = self.args
        return a.eval_n and (step == 0 or a.eval_every and step % a.eval_every == 0)

    def evaluated(self, result):
        """Keep the accuracy before training, later the best adapter so far in adapter_best/."""
        s, found = self.state, {k: result[k] for k in ("accuracy", "stderr")}
        long = result.get("skipped")
        print(f"held-out accuracy after {s.step} steps: {found['accuracy']:.1%}"
              + (f", reward {result['reward']:.3f}" if self.args.reward else "")
              + (f" ({long} questions longer than --max-prompt)" if long else ""), flush=True)
        if s.step == 0:
            s.before = found
            if ranks.rank == 0:
                files.write_jsonl(self.out / "eval_before.jsonl", result["rows"])
        elif self.args.eval_every and (s.best is None or found["accuracy"] > s.best["accuracy"]):
            if self.args.lora_rank:
                s.best = {"step": s.step, **found}
                self.write_weights("adapter_best")

    def check(self, updates):
        """Count updates that were skipped because their gradient was not finite; ValueError after
        ten in a row."""
        for _, norm in filter(None, updates):
            self.failed = 0 if math.isfinite(norm) else self.failed + 1
            if self.failed == 10:
                raise ValueError("10 updates in a row had a gradient that is not finite; lower "
                                 "--lr, or check --model")

    @ranks.first
    def log(self, row, groups, result):
        """Write a step's row, with the columns of the clock, to metrics.jsonl and two samples of
        its `groups` to rollouts.jsonl, and show them. result: the evaluation before this step, or
        None."""
        clock, drawn, self.clock, self.drawn = self.clock, self.drawn, {}, 0
        s = {f"seconds_{k}": clock.get(k, 0.0) for k in ("rollout", "reward", "update")}
        trained = row.pop("trained_tokens")
        row |= {"eval_accuracy": result and result["accuracy"],
                "eval_stderr": result and result["stderr"], "seconds": self.seconds(), **s,
                "seconds_step": sum(s.values()), "rollout_tok_s": drawn / s["seconds_rollout"],
                "update_tok_s": trained / s["seconds_update"] if trained else None,
                # the allocator's own peak is larger: it holds unused pieces, lost to other runs
                "peak_gib": peak_gib(), "reserved_gib": torch.cuda.max_memory_reserved() / 2**30}
        append(self.out / "metrics.jsonl", [row])
        samples = [{"step": row["step"], "question": c.row["question"], "answer": c.row["answer"],
                    "text": c.text, "reward": c.reward, "correct": c.correct}
                   for c in (group[0] for group in groups[:2])]
        append(self.out / "rollouts.jsonl", samples)
        try:
            console.show_step(row, samples, self.args, self.warned)
        except OSError:  # nobody reads stdout any more
            self.interrupt()

    def advance(self, step, cursor, optimizer):
        """`step` steps are done: save where --save-every says so, and after the last; stop if a
        signal has come."""
        s = self.state
        s.step, s.cursor, s.seconds = step, cursor, self.seconds()
        self.phase(None)
        if self.interrupted:
            raise KeyboardInterrupt
        if step % self.args.save_every == 0 or step == self.args.steps:
            self.save(optimizer)

    # ---- checkpoints

    @ranks.first
    def save(self, optimizer):
        """Write adapter/ or model/, and checkpoint/. ValueError, and what was saved before stays,
        if a parameter is not finite."""
        if not all(torch.isfinite(p).all() for p in optimizer.params):
            raise ValueError(f"a parameter holds NaN or inf after {self.state.step} steps; nothing "
                             f"was saved over the last checkpoint in {self.out}. Lower --lr")
        if not self.args.lora_rank:
            files.discard(self.out / "model")  # the last checkpoint holds all of it
        self.write_weights("adapter" if self.args.lora_rank else "model")
        self.write_state(optimizer)

    @ranks.first
    def write_state(self, optimizer):
        """Write checkpoint/."""
        state = {**asdict(self.state), "params": [p.detach().cpu() for p in optimizer.params],
                 "optimizer": optimizer.state_dict()}
        state["last"] = json.loads(json.dumps(state["last"]))  # a schedule's numpy number, say
        with whole(self.out / "checkpoint" / "state.pt") as part:
            torch.save(state, part)
            # what a script keeps in it and --resume cannot read, an object of its own, fails now
            torch.load(part, map_location="cpu", mmap=True, weights_only=True)

    @ranks.first
    def write_weights(self, name):
        """Write what is trained, and its policy.json, to the folder `name`."""
        self.save_weights(self.out / name)
        kept = [f.dest for f in self.spec.flags if f.in_policy]
        content = policy.content(self.args, self.state.base, [*kept, "reward"])
        files.write_json(self.out / name / "policy.json", content)

    def restore(self, optimizer):
        """Go on from checkpoint/; what was logged after it is dropped. ValueError if it is damaged,
        or if the questions or the weights are not the same."""
        path = self.out / "checkpoint" / "state.pt"
        if not path.is_file():
            raise ValueError(f"{path}: not there, the run was stopped before its first step; start "
                             "it without --resume")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as e:  # torch's unpickler raises many kinds
            raise ValueError(f"{path}: is no checkpoint, or not whole ({type(e).__name__}); copy "
                             "it again, or start anew in another --out") from None
        params, moments = state.pop("params"), state.pop("optimizer")
        was = State(**state)
        if was.data != self.state.data:
            raise ValueError(f"--data {self.args.data}: is not what the run in {self.out} began "
                             "with; --resume needs the same questions")
        if was.base != self.state.base:
            raise ValueError(f"--model {self.args.model}: its weights, its format, or the text of "
                             f"--calib, are not those the run in {self.out} began with; --resume "
                             "needs the same")
        if was.script != self.state.script:
            print(f"warning: --resume: the run was begun by {was.script}, and goes on by "
                  f"{self.state.script}", file=sys.stderr)
        try:
            with torch.no_grad():
                for p, saved in zip(optimizer.params, params, strict=True):
                    p.copy_(saved)
            optimizer.load_state_dict(moments)
        except (KeyError, RuntimeError, ValueError):  # torch's, of another shape or optimizer
            raise ValueError(f"{path}: has other parameters, or another optimizer's state, than "
                             f"are trained here; the run was begun by {was.script}") from None
        self.args.steps = max(self.args.steps, was.step)  # what is done is done
        self.state = was
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            self.cut(self.out / name)

    @ranks.first
    def cut(self, path):
        """Drop a log's rows of steps that will be done again, and an incomplete last row."""
        rows = files.read_log(path) if path.exists() else ()
        files.write_jsonl(path, [row for row in rows if row["step"] < self.state.step])

    # ---- the end

    @ranks.first
    def finish(self, optimizer, after):
        """Write eval_after.jsonl, summary.json and metrics.png, and print what was learned. after:
        the last evaluation, None with --eval-n 0."""
        if self.state.best:  # by the last evaluation, perhaps: a --resume goes on from it
            self.write_state(optimizer)
        before, gain, error = self.state.before, None, None
        if after:
            files.write_jsonl(self.out / "eval_after.jsonl", after["rows"])
            asked = [row for _, row in files.read_jsonl(self.out / "eval_before.jsonl")]
            gain, error = metrics.gain(asked, after["rows"])
        summary = {"accuracy_before": before and before["accuracy"],
                   "accuracy_after": after and after["accuracy"],
                   "stderr_before": before and before["stderr"],
                   "stderr_after": after and after["stderr"], "gain": gain, "stderr_gain": error,
                   "best": self.state.best, "steps": self.state.step,
                   "seconds": round(self.seconds(), 1), "peak_gib": round(peak_gib(), 2),
                   "command": self.state.command}
        files.write_json(self.out / "summary.json", summary)
        self.report()

    @ranks.first
    def report(self):
        """Write metrics.png and print what was learned, for a run that has its summary.json."""
        from plumbing import curves  # here: matplotlib takes a second to import

        curves.draw(self.out, self.out / "metrics.png")
        console.show_end(self.out, self.args, read_json(self.out / "summary.json"))

    def stop(self, optimizer):
        """The end of an interrupted run: it is saved as it is, except after a second signal within
        an update, when parameters may be on their way from one step to the next."""
        ranks.stop()
        if self.halfway:
            where = f"within step {self.state.step}; the last checkpoint stands,"
        else:
            where = f"after {self.state.step} steps;"
            self.save(optimizer)
        print(f"\nstopped {where} continue with: {self.again}")
        return 130

    @ranks.first
    def fail(self, optimizer):
        """An error (in the user's own reward, say, or out of memory) ends the run: what was learned
        before is saved, unless the error came within an update."""
        try:
            if not self.halfway:
                self.save(optimizer)
        finally:
            print(f"the last checkpoint stands, continue with: {self.again}", file=sys.stderr)


def peak_gib():
    if peak := torch.cuda.max_memory_allocated():  # 0 where nothing is on a GPU
        return peak / 2**30
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / (2**30 if sys.platform == "darwin" else 2**20)
