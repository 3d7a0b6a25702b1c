"""
Flags of the commands: a table at the top of each command's file, read here.

A table is a tuple of titles (str) and Flags. The embedded model has defaults of its own. Flags that
are `in_policy` are written beside an adapter (plumbing/policy.py), and are the defaults of eval.py
and sample.py where they are given the adapter or its run.

    args = parse(Command("train", "QeRL training.", FLAGS, check), argv)
"""
import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from plumbing import command as commands
from plumbing import hub, ranks
from plumbing.command import number, numbers
from plumbing.files import TINY, saved
from plumbing.tokenizer import SUFFIX

import torch


@dataclass(frozen=True)
class Flag:
    """name; type, choices or bool; default; meaning; the demo's own default; whether policy.json
    gives the default."""

    name: str
    kind: object
    default: object
    help: str
    tiny: object = None
    in_policy: bool = False

    @property
    def dest(self):
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Command:
    """check(args): to check flags against each other, and fill what is left open. `trains`: it
    makes a policy, and does not take the flags of one."""

    name: str
    about: str
    table: tuple
    check: Callable = lambda args: None
    trains: bool = False

    @property
    def flags(self):
        return [f for f in self.table if isinstance(f, Flag)]


# ---- flags that several commands have


def model_flags(quants):
    return (
        "model",
        Flag("model", expanduser, "tiny", "folder, hub id (or id@revision), or tiny, the embedded "
             "model", in_policy=True),
        Flag("quant", quants, "nvfp4", "number format of the frozen base; none leaves it as it is",
             in_policy=True),
        Flag("awq", bool, False, "scales chosen by activations, not by rounding", in_policy=True),
        Flag("calib", str, None, "text for --awq (default: arithmetic problems)", in_policy=True),
        Flag("device", ("auto", "cpu", "cuda"), "auto", "auto is cuda where there is one"),
        Flag("dtype", ("auto", "bfloat16", "float32"), "auto",
             "auto is bfloat16 on cuda, else float32"),
    )


ADAPTER_FLAGS = (
    "trained policy",
    Flag("run", str, None, "run folder of train.py: its adapter, base, format and prompt"),
    Flag("adapter", str, None, "folder of a LoRA adapter (train.py's or PEFT's)"),
)
DATA_FLAGS = (
    Flag("data", str, "gsm8k", "arithmetic, gsm8k, math500, aime24, aime25, amc23, bigmath (to "
         "train on), a .jsonl or .parquet, a folder, a hub id; for eval.py several with commas",
         "arithmetic", in_policy=True),
    Flag("levels", numbers, None, "rows of these, 5 the hardest: 3,4,5 for Big-Math"),
    Flag("reward", str, None, "file.py:function of one's own: (text, row) -> a number, right from "
         "1 on (default: data.rewards)"),
)
PROMPT_STYLE = Flag("prompt-style", (*SUFFIX, "plain"), "tags", "what a question asks for",
                    in_policy=True)
SAMPLING_FLAGS = (
    "sampling",
    Flag("max-new-tokens", number(1, 1e7), None, "completion limit (4096, or what fits)"),
    Flag("temperature", number(0, 100, float), 0.6, "0 is greedy"),
    Flag("top-p", number(1e-6, 1, float), 0.95, "draw from the likeliest, of this mass"),
)
ENGINE_FLAGS = (
    "engine",
    Flag("engine", ("auto", "plain", "fast", "exact"), "auto", "the functions of the files beside "
         "train.py, or faster ones (fast/); auto: fast where it can; exact: fast, log-probs of "
         "sampler and trainer equal to the last bit"),
    Flag("max-rows", number(1, 1e5), 256, "completions decoded side by side at most"),
    Flag("card-share", number(0.01, 1, float), 1.0,
         "part of the card's memory to take, where several runs share it"),
    Flag("seed", number(0, 2**63 - 1), 0, "of samples, noise, data and adapter"),
)


def parser(command):
    """The argparse parser of a command, for what is given: `parse` adds the defaults, which depend
    on it."""
    p = commands.Parser(f"{command.name}.py", f"python {command.name}.py [flags]", command.about,
                        argument_default=argparse.SUPPRESS)
    group = p
    for f in command.table:
        if isinstance(f, str):
            group = p.add_argument_group(f)
            continue
        known = [] if f.default is None else [str(f.default)]
        if f.tiny is not None:
            known.append(f"tiny: {f.tiny}")
        if f.in_policy and not command.trains:
            known.append("an adapter's own")
        how = {"help": f.help + (f" [{'; '.join(known)}]" if known else "")}
        if f.kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["choices" if isinstance(f.kind, tuple | dict) else "type"] = f.kind
        group.add_argument(f"--{f.name}", **how)
    return p


def given(command, argv):
    """The flags given on the command line, without defaults, as a dict."""
    return vars(parser(command).parse_args(argv))


def defaults(command, model):
    """{dest: default} of a command's flags; the embedded model (tiny or its folder) has its own."""
    tiny = model == "tiny" or Path(model).is_dir() and Path(model).resolve() == TINY
    return {f.dest: f.tiny if tiny and f.tiny is not None else f.default for f in command.flags}


def check_choices(command, values, where):
    """ValueError if one of `values`, {dest: value} from the file `where`, is no choice there is."""
    for f in command.flags:
        value = values.get(f.dest)
        if isinstance(f.kind, tuple | dict) and value is not None and value not in f.kind:
            raise ValueError(f"{where}: --{f.name} {value}: not one of {', '.join(f.kind)}; one of "
                             "a script's own needs that script")


def parse(command, argv):
    """The flags of a command as a Namespace, checked against each other: those given, else those of
    the policy, else the defaults, for the embedded model the demo's. ValueError for what is
    refused; nothing is loaded or written."""
    values = given(command, argv)
    for name, value in values.items():
        if value == "" and name != "calib":  # --run $UNSET; an empty --calib undoes the adapter's
            raise ValueError(f"--{name.replace('_', '-')}: is empty; give a value or leave it out")
    if not command.trains:
        values = with_policy(command, values)
    model = values.get("model", "tiny")
    args = argparse.Namespace(**defaults(command, model) | values)
    if args.awq and args.quant == "none":
        raise ValueError("--awq: chooses the scales of a four-bit format; --quant is none")
    resumed = command.trains and args.resume  # the run's own --awq is not known yet
    if args.calib and not args.awq and not resumed:
        raise ValueError("--calib: plain rounding uses no text; add --awq")
    args.calib = args.calib or None
    command.check(args)
    return args


def read_policy(command, folder):
    """The policy.json in `folder` without its nulls, {} where there is none; ValueError for what is
    no choice of a flag that has choices."""
    found = saved(folder, "policy.json")
    found = {name: value for name, value in found.items() if value is not None}
    check_choices(command, found, Path(folder) / "policy.json")
    return found


def with_policy(command, given):
    """The flags `given` with those that --run stands for, and those that its adapter, --adapter or
    the folder of a merged --model was trained with; all of its policy.json is "trained_with"."""
    given, run = dict(given), given.get("run")
    if run and "adapter" in given:
        raise ValueError("--run and --adapter exclude each other: a run holds its adapter")
    if run:
        adapter, model = Path(run, "adapter"), Path(run, "model")
        if adapter.is_dir():
            given["adapter"] = str(adapter)
        elif not model.is_dir():
            raise ValueError(f"--run {run}: has no adapter/ nor model/ (before its first save); "
                             "give the folder that train.py called --out")
        elif "model" in given:
            raise ValueError(f"--model {given['model']}: --run {run} holds a whole model, all of "
                             "it trained; leave one of them out")
        else:
            given["model"] = str(model)
    folder = given.get("adapter") or given.get("model")  # a merged model has a policy.json as well
    had = read_policy(command, folder) if folder else {}
    in_policy = {f.dest for f in command.flags if f.in_policy}
    values = {name: value for name, value in had.items() if name in in_policy} | given
    if not values.get("awq") and "calib" not in given:
        values.pop("calib", None)  # its text is no use to plain rounding
    if "commit" in had and values.get("model") == had.get("model", ""):
        hub.COMMITS.setdefault(had["model"], had["commit"])
    return values | {"trained_with": had}


def check_graded(args):
    if args.prompt_style == "plain" and not args.reward:
        raise ValueError("--prompt-style plain: asks for nothing that could be graded; choose tags "
                         "or boxed, or grade by --reward")


def warn_idle(command, needs, args, argv):
    """Print a warning for each flag in argv that has no effect beside the others. needs: [(the flag
    that some need, args -> whether that is set, these flags)]."""
    for name in given(command, argv):
        for flag, used, names in needs:
            if name in names and not used(args):
                print(f"warning: --{name.replace('_', '-')}: does nothing without {flag}",
                      file=sys.stderr)


def run_command(command, body, argv=None, name=None):
    """Run body(args, argv) and return its exit code, as commands.run does. name: that of a script
    that has the flags of `command`."""
    argv = sys.argv[1:] if argv is None else argv

    @ranks.rank_0_speaks
    def parsed():
        try:
            args = parse(command, argv)
            if sys.stderr.isatty():
                print(f"loading {args.model} ...", file=sys.stderr, flush=True)
            ranks.start(args)
            code = body(args, argv)
            ranks.end()
            return code
        except torch.OutOfMemoryError as e:
            lower = "--micro-batch-tokens, " if command.trains else ""
            wanted = ". ".join(str(e).split(". ")[:3])  # how much was asked for, and was free
            raise ValueError(f"out of GPU memory ({wanted}); lower {lower}--max-rows or "
                             "--max-new-tokens") from None

    return commands.run(name or f"{command.name}.py", parsed)
