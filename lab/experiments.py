"""
Measurements behind the README's choices.

    gradient   which log-probs should the ratio be taken against when the sampler is noisy? The
               gradient of one step from noisy samples, for each --old-logp, beside the gradient
               from clean samples of the same prompts: their cosine, and the share of tokens that
               the clip takes away. Sigma 0, two clean gradients of different samples, is the
               ceiling.

    2x2        the paper's central ablation: {16 bits, NVFP4} x {AQN off, on}
    format     without noise: 16 bits, NVFP4 rounded plainly and by AWQ, MXFP4, NF4 (QLoRA's)
    noise      no noise, and sigma from 1e-2 to 2e-1; the ratio against the sampler or the update
    schedule   how the noise decays
    objective  GRPO, DAPO, Dr.GRPO, GSPO, CISPO
    rank       of the adapter
    copies     one four-bit copy of the weights that samples and is trained through, or, as with an
               inference engine beside a trainer, four bits to sample and 16 to train, the ratio
               against the sampler or, with a truncated weight, against the trainer itself

    compare    existing runs, whatever made them, or rows of results/runs.jsonl: what each flag in
               which they differ adds, to the accuracy after training or, with --growth, to how
               fast that of the samples rises

All but the first and the last train: each arm with each seed, in a folder of its own in --out
(runs/NAME). A finished run is not repeated, a stopped one continues; the flags must be the same,
and may be left out if only the table is wanted. They print each arm's held-out accuracy with its
standard error over the seeds, and what `compare` says.

Flags after the name are train.py's, and for those that train also --seeds 0,1,2,3,4 and --jobs 1:
runs side by side, spread over the cards; one has room for several when the model is small. For
`gradient`, --prompts-per-step x --group-size completions are drawn for each gradient.

    python lab/experiments.py gradient --model DIR --data gsm8k --out gradient.json
    python lab/experiments.py 2x2 --out runs/2x2
    python lab/experiments.py noise --seeds 0,1,2 --jobs 4 --out runs/noise --model DIR --data gsm8k
    python lab/experiments.py two-copies --out runs/apart          # one run of train.py, so trained
    python lab/experiments.py compare '2x2_1.5b/*' runs/2x2/*/ [--growth] [--interval]
"""
import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, product
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, stdev
from threading import Lock
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import ALONE, command, curves, flags, ranks
from plumbing.command import IDLE, MINOR
from plumbing.files import check_out, read_jsonl, saved, whole

import torch

import aqn
import data
import grpo
import lora
import sample
import train
from eval import stderr
from lab import archive, plot

SIGMAS = (0.0, 1e-3, 1e-2, 5e-2)
UNUSED = "-"  # the value of a flag that did nothing in a run
# experiment -> {arm: train.py's flags}
ARMS = {
    "2x2": {f"{quant}{noise}": ["--quant", quant, noise]
            for quant in ("none", "nvfp4") for noise in ("--no-aqn", "--aqn")},
    "format": {arm: ["--no-aqn", "--quant", arm] for arm in sample.QUANTS} | {
        "nvfp4-awq": ["--no-aqn", "--quant", "nvfp4", "--awq"]},
    "noise": {"none": ["--no-aqn"]} | {
        f"{sigma}-{anchor}": ["--aqn", "--aqn-start", sigma, "--old-logp", anchor]
        for sigma in ("1e-2", "5e-2", "1e-1", "2e-1") for anchor in ("sampler", "current")},
    "schedule": {name: ["--aqn-schedule", name] for name in aqn.SCHEDULES if name != "eq8"},
    "objective": {name: ["--loss", name] for name in grpo.OBJECTIVES},
    "rank": {str(r): ["--lora-rank", str(r), "--lora-alpha", str(r)] for r in (16, 32, 64, 128)},
    "copies": {"one": [], "two": [], "two-trainer": ["--old-logp", "trainer"]},
}


def drawn(model, tok, rows, score, args, seed):
    """Graded completions with their advantages, a list."""
    groups = train.complete(model, tok, rows, args, seed)
    completions = [*chain(*groups)]
    train.grade(completions, tok, score, args)
    grpo.set_advantages(groups, scale=grpo.OBJECTIVES[args.loss].scale)
    return completions


def gradient_of(model, params, completions, settings):
    """(gradient of all parameters as one vector, share of clipped tokens) under the clean model."""
    total = grpo.backward(model, completions, settings)
    flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None] or [torch.zeros(1)])
    if not flat.any():
        raise ValueError("--group-size: in no group do rewards differ, or all were cut and masked, "
                         "so there is no gradient; take more completions, or --prompts-per-step")
    m = grpo.mean_metrics(total)
    for p in params:
        p.grad = None
    return flat, m["clip_low_frac"] + m["clip_high_frac"]


def gradient(args, argv):
    check_out(args.out)
    if args.lora_rank == 0:
        raise ValueError("--lora-rank 0: the gradients are of an adapter; use 1 or more")
    score = data.scorer(args.prompt_style, args.reward)
    model, tok = sample.load_policy(args)
    rows = data.load(args.data, "train", seed=args.seed, levels=args.levels)
    rows = data.prompts(tok, rows, args.prompt_style, args.max_prompt)[0][: args.prompts_per_step]
    params = lora.add_lora(model, args.lora_rank, args.lora_alpha, args.seed)
    train.plan_update(model, args, params)
    out, settings = [], {anchor: replace(grpo.Settings.of(args), old_logp=anchor)
                         for anchor in ("sampler", "current")}
    draw, seed = partial(drawn, model, tok, rows, score, args), 2 * args.seed
    clean = gradient_of(model, params, draw(seed + 1), settings["sampler"])[0]
    for sigma in SIGMAS:
        aqn.set_noise(model, sigma, 7 + seed)
        completions = draw(seed + 2)
        aqn.clear(model)
        for anchor in settings:
            g, clipped = gradient_of(model, params, completions, settings[anchor])
            cosine = torch.nn.functional.cosine_similarity(g, clean, 0).item()
            out.append({"sigma": sigma, "old_logp": anchor, "cosine": cosine, "clipped": clipped})
            print(json.dumps(out[-1]), flush=True)
    with whole(args.out) as part:
        part.write_text("[\n" + ",\n".join(map(json.dumps, out)) + "\n]\n")


@contextmanager
def two_copies():
    """Inside the `with`, train.py samples from --quant's weights but takes its updates through a
    16-bit copy of the model, which shares the adapter."""
    load, add, install, twins = sample.load_policy, lora.add_lora, sample.set_engine, {}

    def load_both(args):
        if args.lora_rank == 0:
            raise ValueError("--lora-rank 0: what two copies share is an adapter; use 1 or more")
        if args.awq:
            raise ValueError("--awq: moves the norms' scales, which the 16-bit copy keeps; an "
                             "adapter fits one of the two only. Leave it out")
        if args.aqn and args.aqn_scope == "both":
            raise ValueError("--aqn-scope both: the trained copy has no noise; leave it out")
        model, tok = load(args)
        twins[model], _ = load(argparse.Namespace(**{**vars(args), "quant": "none", "awq": False}))
        return model, tok

    def add_to_both(model, *rest):
        params = add(model, *rest)
        add(twins[model], *rest)
        both = lora.lora_layers(model), lora.lora_layers(twins[model])
        for (_, own), (_, twin) in zip(*both, strict=True):
            twin.A, twin.B = own.A, own.B
        return params

    def install_on_both(model, engine):
        install(model, engine)
        install(twins[model], engine)

    def through_twin(f):
        def call(model, *rest):
            twins[model].checkpointing = model.checkpointing
            return f(twins[model], *rest)
        return call

    with mock.patch.object(sample, "load_policy", load_both), \
            mock.patch.object(lora, "add_lora", add_to_both), \
            mock.patch.object(sample, "set_engine", install_on_both), \
            mock.patch.object(grpo, "update", through_twin(grpo.update)), \
            mock.patch.object(grpo, "record_trainer_logprobs",
                              through_twin(grpo.record_trainer_logprobs)):
        yield


def apart(argv):
    called = [__file__, "two-copies", *argv]  # what summary.json, lab/plot.py and a resume go by
    with two_copies(), mock.patch.object(sys, "argv", called):
        return flags.run_command(train.COMMAND, train.train, argv, "lab/experiments.py")


def trainings(name, seeds, jobs, args, argv):
    """Every arm of the experiment with every seed, `jobs` at a time; then the table."""
    if not args.eval_n:
        raise ValueError("--eval-n 0: the table is of held-out accuracy; leave it out")
    own = {"seed", *chain(*(flags.given(train.COMMAND, arm) for arm in ARMS[name].values()))}
    if twice := sorted(own & flags.given(train.COMMAND, argv).keys()):
        other = "--seeds" if twice[0] == "seed" else "another experiment"
        raise ValueError(f"--{twice[0].replace('_', '-')}: is what the arms of {name} differ in; "
                         f"leave it out, or take {other}")
    if jobs > 1 and not ALONE:
        raise ValueError(f"--jobs {jobs}: starts train.py, without what the caller "
                         "may have changed; start lab/experiments.py itself, or leave it out")
    every = [(arm, [*argv, *ARMS[name][arm], "--seed", str(seed)], folder(args.out, arm, seed))
             for seed, arm in product(seeds, ARMS[name])]
    todo = [run for run in every if not (run[-1] / "summary.json").is_file()]
    for _, given, out in every:
        # beside runs that are there, runs of default flags would be others
        check_flags(out, vars(flags.parse(train.COMMAND, given)) if todo
                    else flags.given(train.COMMAND, given))
    Path(args.out).mkdir(parents=True, exist_ok=True)
    processes = Processes(jobs)

    def one(run):
        arm, given, out = run
        given = [*given, *["--resume"] * (out / "config.json").is_file(), "--out", str(out)]
        two = name == "copies" and arm != "one"
        if jobs == 1:
            return apart(given) if two else train.main(given)
        return processes.run([__file__, "two-copies"] if two else [train.__file__], given, out)

    with ThreadPoolExecutor(jobs) as pool, processes.stopping():
        for code in map(one, todo) if jobs == 1 else results(pool, one, todo):
            if code:
                return code
    print(table(name, seeds, args.out), flush=True)
    print("\n".join(compare([out for *_, out in every])))


def results(pool, f, items):
    """f of each item, in order, by the pool's threads. What has not begun when the caller leaves is
    not begun."""
    futures = [pool.submit(f, item) for item in items]
    try:
        for future in futures:
            until(future.done)
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def until(done):
    """Wait until done(), in short sleeps: Python sees a signal that comes just before the main
    thread waits for a lock, as a future's result or a process takes, only once it has the lock."""
    while not done():
        time.sleep(0.02)


class Processes:
    """Trainings side by side, `jobs` at most: each on one of the cards, and with its part of that
    card's memory, since it would take all that is free."""

    def __init__(self, jobs):
        all_cards = ",".join(map(str, range(torch.cuda.device_count())))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_cards).split(",")
        each = -(-jobs // len(visible))
        self.share = ["--card-share", str(1 / each)] if each > 1 else []
        self.children, self.starting = set(), Lock()  # held while one is there and not among them
        self.cards = SimpleQueue()  # a free card for each job
        for i in range(jobs):
            self.cards.put(visible[i % len(visible)])

    def run(self, script, given, out):
        """The exit code of a process that trains into the folder `out`; it prints to `out`.log."""
        print(out, flush=True)
        card = self.cards.get()
        try:
            with open(f"{out}.log", "a") as log:
                code = self.process([sys.executable, *script, *self.share, *given], stdout=log,
                                    stderr=log, env=os.environ | {"CUDA_VISIBLE_DEVICES": card})
            if code:
                print(f"{out}: ended with exit code {code}, see {out}.log", file=sys.stderr)
            return code
        finally:
            self.cards.put(card)

    def process(self, argv, **options):
        """The exit code of a process. ctrl-C in a terminal does not reach it but by `stopping`: a
        second one would keep it from saving."""
        with self.starting:
            child = subprocess.Popen(argv, start_new_session=True, **options)
            self.children.add(child)
        try:
            return child.wait()
        finally:
            self.children.discard(child)

    @contextmanager
    def stopping(self):
        """Who stops what is inside the `with` stops the processes too, and is waited for."""
        try:
            yield
        except KeyboardInterrupt:
            while self.children:
                try:
                    with self.starting:
                        told = [*self.children]
                    for child in told:
                        child.terminate()
                    for child in told:
                        until(lambda child=child: child.poll() is not None)
                except KeyboardInterrupt:  # again: they are told again, and stop at once
                    continue
            raise


def folder(out, arm, seed):
    return Path(out) / f"{arm}-s{seed}"


def check_flags(out, wanted):
    """ValueError if a run in the folder `out` has other flags than those wanted."""
    had = saved(out, "config.json")
    for flag, value in wanted.items():
        counts = flag not in IDLE + MINOR and (flag, value) != ("steps", None)
        if counts and had.get(flag, value) != value:
            raise ValueError(f"--{flag.replace('_', '-')} {value}: the run in {out} used "
                             f"{had[flag]}; choose another --out")


def table(name, seeds, out):
    """Markdown: held-out accuracy after each evaluation by arm."""
    at, last, arms = {}, {}, ARMS[name]  # {arm: {steps: [accuracy by seed]}}
    for arm in arms:
        runs, at[arm] = [folder(out, arm, seed) for seed in seeds], {}
        for run in runs:
            for row in curves.read(run):
                if row["eval_accuracy"] is not None:
                    at[arm].setdefault(row["step"], []).append(row["eval_accuracy"])
        last[arm] = [accuracy_after(run) for run in runs]
    # of all runs: means of some seeds beside those of others would compare the seeds
    steps = [s for s in at[arm] if all(len(of.get(s, ())) == len(seeds) for of in at.values())]
    lines = ["| | " + " | ".join(f"after {s}" for s in steps) + " | at the end |",
             "|---" * (len(steps) + 2) + "|"]
    for arm in arms:
        cells = [percent(at[arm][s]) for s in steps] + [percent(last[arm])]
        lines.append(f"| {arm.replace('--', ', ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def percent(values):
    """Their mean, and its standard error."""
    mean = f"{100 * fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} +- {100 * stderr(values):.1f}"


def accuracy_after(run):
    """Of a run that has ended, and has not gone on since."""
    found, steps = saved(run, "summary.json"), saved(run, "config.json").get("steps")
    if found.get("accuracy_after") is None or found.get("steps", steps) != steps:
        raise ValueError(f"{run}: has no accuracy_after of its last step in summary.json; let it "
                         "end, without --eval-n 0")
    return found["accuracy_after"]


def answers(run):
    """Accuracy on each held-out question after training, in the set's order; None where it was not
    kept."""
    path, fields = Path(run) / "eval_after.jsonl", {"accuracy": (float, 0, 1)}
    if path.is_file():
        return [row["accuracy"] for _, row in read_jsonl(path, fields, fields)]


def rise(run):
    """How far a finished run's samples got in the first half of its steps: their mean accuracy
    there, above that in the first sixteenth."""
    accuracy = [row["accuracy"] for row in curves.read(run)]
    if len(accuracy) != (saved(run, "config.json").get("steps") or len(accuracy)):
        raise ValueError(f"{run}: has {len(accuracy)} steps, not all that it was to have; let it "
                         "end")
    begun, half = max(2, len(accuracy) // 16), len(accuracy) // 2
    if half <= begun:
        raise ValueError(f"{run}: has {len(accuracy)} steps; --growth needs 6 or more")
    return fmean(accuracy[begun:half]) - fmean(accuracy[:begun])


def late_entropy(run):
    """Mean entropy, nats a token, of a run's samples in its second half; nan if none trained."""
    entropies = curves.column(curves.read(run), "entropy")
    return curves.trailing_mean(entropies, len(entropies) - len(entropies) // 2)[-1]


def compare(runs, growth=False, entropy=False, interval=False, pairs=False):
    """A line for each flag in which runs differ, or flags that change together, and each two of its
    values: what that adds to the accuracy after training, or with `growth` to the `rise` of the
    samples', over pairs of runs that are alike in all else, the seed included. What a flag switches
    on changes with it: noise of 5e-2 is one change from none. In points, with the standard error
    over seeds and, where their answers are kept, over questions. pairs: each pair is a draw."""
    runs = [*{Path(run).resolve(): run for run in runs}.values()]
    had = flags_used(runs)
    for one, other in combinations(runs, 2):
        if had[one] == had[other]:
            raise ValueError(f"{one} and {other} have the same flags; leave one out")
    measure = late_entropy if entropy else rise if growth else accuracy_after
    ends = {run: [measure(run)] for run in runs}
    by_question = {run: None if growth else answers(run) for run in runs}
    after = ends if entropy or pairs or None in by_question.values() else by_question
    if len({len(each) for each in after.values()}) > 1:
        raise ValueError("RUN: they were asked different numbers of questions; compare others")

    values = {flag: [had[run][flag] for run in runs] for flag in had[runs[0]]}
    # How a flag groups the runs. Flags that group them alike are one change: quant and lr, of runs
    # none 5e-4 and nvfp4 1e-3. With a third, nvfp4 5e-4, they are two, and those runs are no pair.
    grouping = {flag: tuple(map(column.index, column)) for flag, column in values.items()}
    found = {}  # {(what lines are sorted by, the change as text): {seed: [gains by question]}}
    for pair in combinations(runs, 2):
        one, other = (had[run] for run in pair)
        # what differs and was on in both; what was on in one alone follows from these
        causes = [f for f in values if one[f] != other[f] and UNUSED not in (one[f], other[f])]
        if "seed" in causes or len({grouping[f] for f in causes}) > 1:
            continue
        flag = causes[0]
        (low, less), (high, more) = sorted((place(had[r][flag], values[flag]), r) for r in pair)
        change = (flag, low, high), change_text(had[less], had[more], causes, values)
        gains = [100 * (b - a) for a, b in zip(after[less], after[more], strict=True)]
        draw = pair if pairs else had[less].get("seed")
        found.setdefault(change, {}).setdefault(draw, []).append(gains)
    unit = "hundredths of a nat" if entropy else "points"
    return [f"{text}: {effect([*found[order, text].values()], unit, interval, pairs)}"
            for order, text in sorted(found)]


def change_text(less, more, causes, values):
    """The causes as text, "aqn off -> on", and of a flag that was on in one of the two alone its
    value, "aqn-start 0.05", if all runs together have several `values` of it."""
    text = [f"{f} {plot.shown(f, less[f])} -> {plot.shown(f, more[f])}" for f in causes]
    for flag, column in values.items():
        on = [given[flag] for given in (less, more) if given[flag] != UNUSED]
        if len(on) == 1 and len({str(v) for v in column if v != UNUSED}) > 1:
            text.append(f"{flag} {plot.shown(flag, on[0])}")
    return ", ".join(text)


def flags_used(runs):
    """{run: {flag: value}}, the same flags for each, by name: an older run that was not asked for
    one has its default, and one that did nothing is UNUSED."""
    had, default = {run: plot.told(run) for run in runs}, vars(flags.parse(train.COMMAND, []))
    if empty := [run for run in runs if not had[run]]:
        raise ValueError(f"{empty[0]}: has no config.json; give folders that train.py wrote")
    every = sorted({*chain(*had.values())})
    for run, given in had.items():
        now = default | given
        off = {k for k, (_, used) in train.NEEDS.items() if not used(argparse.Namespace(**now))}
        had[run] = {k.replace("_", "-"): UNUSED if k in off else now.get(k) for k in every}
    return had


def effect(seeds, unit="points", interval=False, pairs=False):
    """What a change adds, as text. seeds: of each the gains of its pairs, points by question.
    interval: also what that says at 95%, by the wider of the errors; the least effect that four of
    five such experiments would tell from 0; the standard deviation of a pair's gain."""
    means, n = [[*map(fmean, zip(*pairs, strict=True))] for pairs in seeds], sum(map(len, seeds))
    questions = [*map(fmean, zip(*means, strict=True))]
    text = f"{fmean(questions):+.1f} {unit}"
    of = f" ({n} pairs)" if n > len(seeds) else ""
    draws = ("pairs" if pairs else "seeds") + of
    margins = []
    for what, values in ((draws, [*map(fmean, means)]), ("questions", questions)):
        if len(values) > 1:
            text += f", +- {stderr(values):.1f} over {len(values)} {what}"
            t95, t80 = (student(p, len(values) - 1) for p in (0.975, 0.8))
            margins.append((t95 * stderr(values), (t95 + t80) * stderr(values)))
    if interval and margins:
        margin, least = max(margins)
        low, high = (fmean(questions) + sign * margin for sign in (-1, 1))
        text += f"; 95%: {low:+.1f} to {high:+.1f}, seen from {least:.1f} on"
        each = [fmean(gains) for of_seed in seeds for gains in of_seed]
        text += f", s.d. of a pair {stdev(each):.1f}" if len(each) > 1 else ""
    return text


def student(p, freedom):
    """The quantile p of Student's t. With t = sqrt(freedom) tan(angle) its density is a power of a
    cosine, so the angle is found by halving, where the area below it is p's share."""
    def area(angle):
        return angle * fmean(math.cos(angle * (i + 0.5) / 400) ** (freedom - 1) for i in range(400))

    low, high = 0.0, math.pi / 2
    share = (2 * p - 1) * area(high)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if area(middle) < share else (low, middle)
    return freedom ** 0.5 * math.tan(low)


def arms(runs):
    """A line for runs that differ in their seed alone: accuracy before and after, and the entropy
    of the first samples and of those in the second half, nats a token."""
    for label, members in plot.lines(runs):
        after = percent([*map(accuracy_after, members)])
        before = fmean(saved(run, "summary.json")["accuracy_before"] for run in members)
        first = fmean(curves.read(run)[0]["entropy"] for run in members)
        late = fmean(map(late_entropy, members))
        yield f"{label}: {100 * before:.1f} -> {after}, entropy {first:.3f} -> {late:.3f}"


def place(value, values):
    """A key to sort a flag's values by: without it first, then numbers, then as they came."""
    with_it = value not in (None, False, "none")
    return with_it, value if isinstance(value, int | float) else float("inf"), values.index(value)


def comparison(argv):
    p = command.Parser(prog="lab/experiments.py compare", description=compare.__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py wrote, or a "
                   "quoted pattern of rows in results/runs.jsonl, as '2x2_1.5b/nvfp4*'")
    add = partial(p.add_argument, action="store_true")
    add("--growth", help="of the samples' accuracy, in the first half of training")
    add("--entropy", help="of the samples' entropy, in the second half of training")
    add("--interval", help="with the 95%% interval (Student's t), and the least effect to be seen")
    add("--pairs", help="errors over pairs, not over seeds: for runs of several models")
    add("--arms", help="first each arm's accuracy before and after training, and its entropy")
    given = vars(p.parse_args(argv))
    with archive.folders(given.pop("runs")) as runs:
        if given.pop("arms"):
            print("\n".join(arms(runs)))
        lines = compare(runs, **given)
    print("\n".join(lines) or "no two of these runs have the same seed, and differ in one flag")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else None
    if name != "compare" and not {"-h", "--help"}.isdisjoint(argv):
        text = f"{__doc__.strip()}\n\n`python train.py --help` lists its flags."
        return command.run("lab/experiments.py", partial(print, text))
    if ranks.world > 1:
        if ranks.rank == 0:
            print("lab/experiments.py: error: is one process; start it with python, not torchrun "
                  "(--jobs uses several cards)", file=sys.stderr)
        return 2
    if name == "gradient":
        return flags.run_command(train.COMMAND, gradient, ["--out", "gradient.json", *argv[1:]],
                                 "lab/experiments.py")
    if name == "two-copies":
        return apart(argv[1:])
    if name == "compare":
        return command.run("lab/experiments.py", partial(comparison, argv[1:]))
    if name not in ARMS:
        print("lab/experiments.py: error: name an experiment: gradient, two-copies, compare, "
              + ", ".join(ARMS), file=sys.stderr)
        return 2
    own = argparse.ArgumentParser(f"lab/experiments.py {name}", add_help=False, allow_abbrev=False)
    own.add_argument("--seeds", type=command.numbers(0, 1 << 63), default=[*range(5)])
    own.add_argument("--jobs", type=int, choices=range(1, 65), metavar="N", default=1)
    mine, rest = own.parse_known_args(argv[1:])
    rest = ["--out", f"runs/{name}", *rest]  # train.py's own default is another run's folder
    return flags.run_command(train.COMMAND, partial(trainings, name, mine.seeds, mine.jobs), rest,
                             "lab/experiments.py")


if __name__ == "__main__":
    sys.exit(main())
