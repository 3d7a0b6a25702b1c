"""
Flags of the commands: a table at the top of each command's file, read here.

A table is a tuple of titles (str) and Flags. The embedded model (`--model tiny`, which trains in
minutes on a CPU) has its own defaults in a column beside the others. What an adapter was trained
with is written beside it (plumbing/policy.py) and is the default of eval.py and sample.py when they
are given the adapter or its run: flags that are `in_policy`.

    COMMAND = Command("train", "QeRL training.", FLAGS, check)
    args = parse(COMMAND, argv)
"""
import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plumbing import command as commands
from plumbing import hub, policy, ranks
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
    """A command's name, what --help says of it, its table of flags, and a function that checks the
    flags against each other and fills what is left open. `trains`: it makes a policy, and does not
    take the flags of one."""

    name: str
    about: str
    table: tuple
    check: Callable
    trains: bool = False

    @property
    def flags(self):
        return [f for f in self.table if isinstance(f, Flag)]


# ---- flags that several commands have


def model_flags(quants):
    return (
        "model",
        Flag("model", str, "tiny", "folder, hub id (or id@revision), or tiny, the embedded model",
             in_policy=True),
        Flag("quant", quants, "nvfp4", "number format of the frozen base; none is 16 bits",
             in_policy=True),
        Flag("awq", bool, False, "scales chosen by activations, not by rounding", in_policy=True),
        Flag("calib", str, None, "text for --awq (default: arithmetic problems)", in_policy=True),
        Flag("device", ("auto", "cpu", "cuda"), "auto", "auto is cuda where there is one"),
        Flag("dtype", ("auto", "bfloat16", "float32"), "auto",
             "auto is bfloat16 on cuda, else float32"),
    )


def temperature(text):
    """An argparse type: 0, or what logits can be divided by."""
    value = number(0, 100, float)(text)
    if 0 < value < 1e-6:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 (greedy), or 1e-6 or more")
    return value


ADAPTER_FLAGS = (
    "trained policy",
    Flag("run", str, None, "run folder of train.py: its adapter, base, format and prompt"),
    Flag("adapter", str, None, "folder of a LoRA adapter (train.py's or PEFT's)"),
)
DATA_FLAGS = (
    Flag("data", str, "gsm8k", "arithmetic, gsm8k, math500, aime24, aime25, amc23, bigmath, a "
         ".jsonl or .parquet, a folder, a hub id; for eval.py several with commas", "arithmetic",
         in_policy=True),
    Flag("levels", numbers(1, 1e4), None, "rows of these, 5 the hardest: 3,4,5 for Big-Math"),
    Flag("reward", str, None, "file.py:function of one's own: (text, row) -> a number, right from "
         "1 on (default: data.rewards)"),
)
PROMPT_FLAGS = (
    Flag("prompt-style", (*SUFFIX, "plain"), "tags", "what a question asks for", in_policy=True),
)
SAMPLING_FLAGS = (
    "sampling",
    Flag("max-new-tokens", number(1, 1e7), None, "completion limit (4096, or what fits)"),
    Flag("temperature", temperature, 0.6, "0 is greedy"),
    Flag("top-p", number(1e-6, 1, float, closed=True), 0.95,
         "draw from the likeliest, of this mass"),
)
ENGINE_FLAGS = (
    "engine",
    Flag("engine", ("auto", "plain", "fast", "exact"), "auto", "the functions of the files beside "
         "train.py, or faster ones (fast/); auto: fast where it can; exact: fast, log-probs of "
         "sampler and trainer equal to the last bit"),
    Flag("max-rows", number(1, 1e5), 256, "completions decoded side by side at most"),
    Flag("card-share", number(0.01, 1, float, closed=True), 1.0,
         "part of the card's memory to take, where several runs share it"),
    Flag("seed", number(0, 2**63), 0, "of samples, noise, data order and adapter"),
)


def parser(command, tiny=False, only_given=False):
    """The argparse parser of a command; `tiny`: the demo's defaults; `only_given`: no defaults."""
    p = commands.Parser(f"{command.name}.py", f"python {command.name}.py [flags]", command.about)
    group = p
    for f in command.table:
        if isinstance(f, str):
            group = p.add_argument_group(f)
            continue
        defaults = [] if f.default is None else [str(f.default)]
        if f.tiny is not None:
            defaults.append(f"tiny: {f.tiny}")
        if f.in_policy and not command.trains:
            defaults.append("an adapter's own")
        how = {"help": f.help + (f" [{'; '.join(defaults)}]" if defaults else "")}
        how["default"] = f.tiny if tiny and f.tiny is not None else f.default
        if only_given:
            how["default"] = argparse.SUPPRESS
        elif f.in_policy and not command.trains:
            how["default"] = None  # take_policy fills it
        if f.kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["choices" if isinstance(f.kind, tuple | dict) else "type"] = f.kind
        group.add_argument(f"--{f.name}", **how)
    return p


def check_choices(command, values, where):
    """ValueError if a value in `values`, {dest: value} as read from the file `where`, is none of
    its flag's choices."""
    for f in command.flags:
        value = values.get(f.dest)
        if isinstance(f.kind, tuple | dict) and value is not None and value not in f.kind:
            raise ValueError(f"{where}: --{f.name} {value}: not one of {', '.join(f.kind)}; one of "
                             "a script's own needs that script")


def given(command, argv):
    """The flags given on the command line, without defaults, as a dict."""
    return vars(parser(command, only_given=True).parse_args(argv))


def is_tiny(model):
    """Whether --model is the embedded model, by its name or by its folder."""
    return model == "tiny" or Path(model).resolve() == TINY


def parse(command, argv):
    """The flags of a command as a Namespace, checked against each other; the embedded model gets
    the demo's defaults. ValueError for what is refused; nothing is loaded or written."""
    model = given(command, argv).get("model", "tiny")
    args = parser(command, tiny=command.trains and is_tiny(model)).parse_args(argv)
    for name, value in vars(args).items():
        if value == "" and name != "calib":  # --run $UNSET; an empty --calib undoes the adapter's
            raise ValueError(f"--{name.replace('_', '-')}: is empty; give a value or leave it out")
    if not command.trains:
        take_policy(command, args)
    if args.awq and args.quant == "none":
        raise ValueError("--awq: chooses the scales of a four-bit format; --quant is none")
    if args.calib and not args.awq:
        raise ValueError("--calib: plain rounding uses no text; add --awq")
    args.calib = args.calib or None
    command.check(args)
    return args


def read_policy(command, folder):
    """The policy.json in `folder` without its nulls, {} where there is none; ValueError for what is
    no value of the command's flags."""
    found = saved(folder, "policy.json", policy.FIELDS)
    found = {name: value for name, value in found.items() if value is not None}
    check_choices(command, found, Path(folder) / "policy.json")
    return found


def take_policy(command, args):
    """Fill the flags that were not given from --run or --adapter, else from the table."""
    if args.run and args.adapter:
        raise ValueError("--run and --adapter exclude each other: a run holds its adapter")
    folder = args.adapter or args.model  # a merged model has a policy.json as well
    if args.run:
        adapter, model = Path(args.run, "adapter"), Path(args.run, "model")
        if adapter.is_dir():
            folder = args.adapter = str(adapter)
        elif not model.is_dir():
            raise ValueError(f"--run {args.run}: has no adapter/ nor model/ (before its first "
                             "save); give the folder that train.py called --out")
        elif args.model is not None:
            raise ValueError(f"--model {args.model}: --run {args.run} holds a whole model, all of "
                             "it trained; leave one of them out")
        else:
            folder = args.model = str(model)
    args.trained_with = read_policy(command, folder) if folder else {}
    for f in command.flags:
        if f.in_policy and getattr(args, f.dest) is None:
            default = f.tiny if f.tiny is not None and is_tiny(args.model) else f.default
            if command.name == "sample" and f.name == "prompt-style":
                default = "plain"  # a chat with a base model asks for nothing in particular
            if f.name != "calib" or args.awq:  # its text is no use to plain rounding
                default = args.trained_with.get(f.dest, default)
            setattr(args, f.dest, default)
    if args.trained_with.get("commit") and args.model == args.trained_with.get("model"):
        hub.COMMITS.setdefault(args.model, args.trained_with["commit"])


def check_copies(flag, n, temperature, zero):
    if n > 1 and temperature == 0:
        raise ValueError(f"--{flag} {n}: {zero} gives the same completion each time; leave it out")


def check_graded(args):
    if args.prompt_style == "plain" and not args.reward:
        raise ValueError("--prompt-style plain: asks for nothing that could be graded; choose tags "
                         "or boxed, or grade by --reward")


def warn_idle(command, needs, args, argv):
    """Print a warning for each flag in argv that has no effect beside the others. needs: {flag:
    the one without which it does nothing}."""
    for name in given(command, argv):
        other = needs.get(name)
        if other and not getattr(args, other):
            said = f"--{name}: does nothing without --{other}".replace("_", "-")
            print(f"warning: {said}", file=sys.stderr)


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
        except RuntimeError as e:
            where, _, wanted = str(e).rpartition("DefaultCPUAllocator: ")
            if not where and not isinstance(e, torch.OutOfMemoryError):
                raise
            lower = "--micro-batch-tokens, " if command.trains else ""
            wanted = ". ".join(wanted.split(". ")[:3])  # how much was asked for, and was free
            raise ValueError(f"out of {'' if where else 'GPU '}memory ({wanted}); lower {lower}"
                             "--max-rows or --max-new-tokens") from None

    return commands.run(name or f"{command.name}.py", parsed)
