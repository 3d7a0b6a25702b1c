"""
Every flag of train.py, eval.py and sample.py in one table, by groups: one name and one default for
one thing. Also what the flags of a policy stand for: `load_policy` gives the model and tokenizer to
all commands alike.

The defaults are the paper's unless the help says otherwise; those of the embedded model (`--model
tiny`, which trains in minutes on a CPU) stand in a column beside them. What an adapter was trained
with (base, format, AWQ, prompt) is written beside it in policy.json, and is the default of eval.py
and sample.py when they are given the adapter or its run.

    python train.py --help
"""
import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from plumbing import checkpoint, ranks
from plumbing import command as commands
from plumbing.command import number, numbers
from plumbing.config import packed_format, read_config
from plumbing.files import check_out, file_digest, read_json, shown
from plumbing.formats import FORMATS, OURS

import torch

import aqn
import data
import grpo
import lora
from lab import awq

QUANTS = ("none", *FORMATS)


@dataclass(frozen=True)
class Flag:
    """name; type, choices or bool; default; meaning; the demo's own default; whether policy.json
    gives the default."""

    name: str
    kind: object
    default: object
    help: str
    tiny: object = None
    kept: bool = False


# a group and the commands that have it, then its flags
TABLE = (
    "model: train eval sample",
    Flag("model", str, "tiny", "folder, hub id, or tiny, the embedded model", kept=True),
    Flag("quant", QUANTS, "nvfp4", "number format of the frozen base; none is 16 bits", kept=True),
    Flag("awq", bool, False, "scales chosen by activations, not by rounding", kept=True),
    Flag("calib", str, None, "text for --awq (default: arithmetic problems)", kept=True),
    Flag("device", ("auto", "cpu", "cuda"), "auto", "auto is cuda where there is one"),
    Flag("dtype", ("auto", "bfloat16", "float16", "float32"), "auto",
         "auto is bfloat16 on cuda, else float32"),
    "trained policy: eval sample",
    Flag("run", str, None, "run folder of train.py: its adapter, base, format and prompt"),
    Flag("adapter", str, None, "folder of a LoRA adapter (train.py's or PEFT's)"),
    "adapter: train",
    Flag("lora-rank", number(0, 4097), 32, "0 with --quant none trains all parameters", 16),
    Flag("lora-alpha", number(1e-6, 1e6, float), 32.0, "the adapter is scaled by alpha / rank"),
    "noise: train",
    Flag("aqn", bool, True, "adaptive quantization noise in the RMSNorms"),
    Flag("aqn-start", number(0, 10, float), 1e-2, "sigma of the first noisy stage"),
    Flag("aqn-end", number(0, 10, float), 5e-4, "sigma of the last stage"),
    Flag("aqn-stages", number(2, 1e6), 10, "equal intervals of training; the first has no noise"),
    Flag("aqn-schedule", aqn.SCHEDULES, "exponential", "how sigma falls from stage to stage"),
    Flag("aqn-scope", ("rollout", "both"), "rollout",
         "where the noise is on: rollouts alone, or the update as well"),
    "data and prompt: train eval",
    Flag("data", str, "gsm8k",
         "arithmetic, gsm8k, math500, aime24, aime25, amc23, bigmath, a .jsonl or .parquet, a "
         "folder, a hub id; eval.py takes several with commas", "arithmetic", kept=True),
    Flag("levels", numbers(1, 1e4), None,
         "train on rows of these (eval.py: ask them), 5 the hardest: 3,4,5 for Big-Math"),
    Flag("reward", str, None, "file.py:function, a reward of one's own (default: data.rewards)"),
    "prompt: train eval sample",
    Flag("prompt-style", (*data.SUFFIX, "plain"), "tags", "what a question asks for", kept=True),
    "rollout: train",
    Flag("steps", number(1, 1e8), None, "rollouts (default: one pass over the data)", 30),
    Flag("prompts-per-step", number(1, 1e5), 16, "prompts a rollout", 12),
    Flag("group-size", number(2, 1e4), 8, "completions a prompt"),
    Flag("max-prompt", number(1, 1e7), 256, "longer prompts, in tokens, are skipped", 128),
    Flag("max-new-tokens", number(1, 1e7), 4096, "completion limit", 96),
    Flag("temperature", number(1e-6, 100, float), 1.0, "of rollouts, and of all log-probs"),
    Flag("dynamic-sampling", bool, False, "DAPO: replace groups whose rewards are all equal", True),
    Flag("spare-prompts", number(0, 1e5), 0, "drawn with the rest, to replace such groups at once"),
    Flag("max-resample", number(0, 1000), 2, "extra rollouts that --dynamic-sampling may draw", 1),
    Flag("overlong", ("none", "mask", "soft"), "none",
         "cut completions: as they are, left out of the loss, DAPO's length penalty", "mask"),
    Flag("overlong-buffer", number(1, 1e7), 512, "tokens over which soft falls from 0 to -1", 16),
    "objective: train",
    Flag("loss", grpo.OBJECTIVES, "grpo", "objective", "dapo"),
    Flag("eps-low", number(0, 1e6, float), None, "ratio clip below 1 (0.2; gspo 3e-4, cispo none)"),
    Flag("eps-high", number(0, 1e6, float), None, "above 1 (0.2; dapo 0.28, gspo 4e-4, cispo 4)"),
    Flag("beta", number(0, 1e3, float), 0.0, "weight of the KL to the adapter-off model"),
    Flag("old-logp", ("sampler", "trainer", "current"), "sampler",
         "what the ratio is taken against: the log-probs of the sampler; of the trainer before "
         "the step (a second pass); of the update itself, detached, so that nothing is clipped"),
    Flag("tis-cap", number(1, 1e6, float), 2.0, "cap of the weights of trainer and current"),
    "optimizer: train",
    Flag("updates-per-rollout", number(1, 1e5), 4, "optimizer steps, each on its own prompts", 2),
    Flag("micro-batch-tokens", number(0, 1e8), 0, "tokens a forward may hold; 0: what fits", 2048),
    Flag("checkpointing", ("auto", "on", "off"), "auto",
         "recompute blocks in backward, for memory; auto: on the CPU, or if needed", "off"),
    Flag("lr", number(0, 1, float), 1e-5, "AdamW's peak, the same for each --quant", 1e-3),
    Flag("weight-decay", number(0, 100, float), 0.1, "AdamW's", 0.0),
    Flag("beta1", number(0, 1, float), 0.9, "AdamW's"),
    Flag("beta2", number(0, 1, float), 0.99, "AdamW's"),
    Flag("warmup", number(0, 1, float), 0.1, "share of the updates that warm up; then cosine to 0"),
    Flag("grad-clip", number(1e-9, 1e6, float), 0.2, "norm the gradient is clipped to", 1.0),
    "held-out questions: train",
    Flag("eval-n", number(0, 1e4), 1, "samples a question, 0 for no evaluation"),
    Flag("eval-every", number(0, 1e8), 0, "steps between evaluations; 0: before and after", 10),
    Flag("eval-limit", number(1, 1e8), None, "how many questions (default: all)", 256),
    Flag("eval-temperature", number(0, 100, float), 0.6, "0 is greedy"),
    Flag("eval-top-p", number(1e-6, 1, float, closed=True), 0.95, "nucleus"),
    "questions: eval",
    Flag("split", ("test", "train"), "test", "which part of the data"),
    Flag("limit", number(1, 1e8), None, "questions of each set, drawn by --seed (default: all)"),
    Flag("n", number(1, 1e4), None, "samples a question (default: 4; with --greedy 1)"),
    Flag("max-prompt", number(1, 1e7), None, "skip and count longer prompts, in tokens"),
    Flag("k", numbers(1, 1e4), None, "also pass@k and the majority of k, for these, as in 1,4,8"),
    Flag("greedy", bool, False, "the likeliest token always, one sample a question"),
    Flag("out", str, None, "a row per question, to this .jsonl; one that was begun goes on"),
    "chat: sample",
    Flag("prompt", str, None, "answer this and exit; without it and without --file: a chat"),
    Flag("file", str, None, 'prompts, one a line, or .jsonl with "prompt" or "question"'),
    Flag("out", str, None, "where --file's answers go, .jsonl"),
    Flag("n", number(1, 1e4), 1, "answers a prompt, with --file"),
    Flag("system", str, None, "system message"),
    "sampling: eval sample",
    Flag("max-new-tokens", number(1, 1e7), None, "completion limit (4096, or what fits)"),
    Flag("temperature", number(0, 100, float), 0.6, "0 is greedy"),
    Flag("top-p", number(1e-6, 1, float, closed=True), 0.95,
         "draw from the likeliest, of this mass"),
    "run: train",
    Flag("out", str, None, "run folder (default: runs/<model>-<data>-<quant>-s<seed>)"),
    Flag("resume", bool, False, "continue the run in --out; a larger --steps extends it, and noise "
         "and learning rate go on as if it had been that from the start"),
    Flag("save-every", number(1, 1e8), 20, "steps between checkpoints", 10),
    Flag("show-every", number(0, 1e8), 10, "steps between samples on the terminal, 0: none"),
    Flag("log-to", ("tensorboard", "wandb"), None, "also log there (pip install it first)"),
    Flag("gap-bound", number(0, 1e6, float), 0.05, "nats between sampler and trainer to warn at"),
    "engine: train eval sample",
    Flag("max-rows", number(1, 1e5), 256, "completions decoded side by side at most"),
    Flag("card-share", number(0.01, 1, float, closed=True), 1.0,
         "part of the card's memory to take, where several runs share it"),
    Flag("seed", number(0, 2**63), 0, "of samples, noise, data order and adapter"),
    "ranks: train eval",
    Flag("timeout", number(1, 1e6), 1800, "seconds that a rank of torchrun waits for the others"),
)
NOISE = "--aqn", lambda a: a.aqn
RESAMPLED = "--dynamic-sampling", lambda a: a.dynamic_sampling
HELD_OUT = "--eval-n 1 or more", lambda a: a.eval_n
# flags of train.py that do nothing without another: which other, and whether it is set
NEEDS = {
    **dict.fromkeys(("aqn_start", "aqn_end", "aqn_stages", "aqn_schedule", "aqn_scope"), NOISE),
    **dict.fromkeys(("eval_every", "eval_limit", "eval_temperature"), HELD_OUT),
    "eval_top_p": ("--eval-n 1 or more and --eval-temperature above 0",
                   lambda a: a.eval_n and a.eval_temperature),
    **dict.fromkeys(("spare_prompts", "max_resample"), RESAMPLED),
    "overlong_buffer": ("--overlong soft", lambda a: a.overlong == "soft"),
    "tis_cap": ("--old-logp trainer or current", lambda a: a.old_logp != "sampler"),
    "lora_alpha": ("--lora-rank 1 or more", lambda a: a.lora_rank),
}
ABOUT = {"train": "QeRL training.", "eval": "Pass@1 of a model, and of an adapter beside it.",
         "sample": "Sample from a model: chat, one prompt, or a file of prompts."}


def flags_of(command):
    """(group, flag) of each flag that a command has, in the table's order."""
    for entry in TABLE:
        if isinstance(entry, str):
            group, _, having = entry.partition(": ")
        elif command in having.split():
            yield group, entry


def dest(flag):
    return flag.name.replace("-", "_")


def parser(command, tiny=False, only_given=False):
    """The argparse parser of a command; `tiny`: the demo's defaults; `only_given`: no defaults."""
    p = commands.Parser(f"{command}.py", f"python {command}.py [flags]", ABOUT[command])
    groups = {}
    for title, f in flags_of(command):
        defaults = [] if f.default is None else [str(f.default)]
        if f.tiny is not None:
            defaults.append(f"tiny: {f.tiny}")
        if f.kept and command != "train":
            defaults.append("an adapter's own")
        how = {"help": f.help + (f" [{'; '.join(defaults)}]" if defaults else "")}
        how["default"] = f.tiny if tiny and f.tiny is not None else f.default
        if only_given:
            how["default"] = argparse.SUPPRESS
        elif f.kept and command != "train":
            how["default"] = None  # take_policy fills it
        if f.kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["choices" if isinstance(f.kind, tuple | dict) else "type"] = f.kind
        if title not in groups:
            groups[title] = p.add_argument_group(title)
        groups[title].add_argument(f"--{f.name}", **how)
    return p


def from_file(command, values, where):
    """The Namespace of `values`, (flag name, value) pairs read from the file `where`, as if they
    were on the command line; ValueError for what could not be there."""
    known, argv = {f.name: f for _, f in flags_of(command)}, []
    for name, value in values:
        if value is None:
            continue
        text = ",".join(map(str, value)) if name == "levels" and isinstance(value, list) else value
        kind = known[name].kind if name in known else None
        fits = type(text) is bool if kind is bool else type(text) in (str, int, float)
        if kind is None or not fits:
            raise ValueError(f"{where}: {name} {shown(value)} is not a value of --{name}")
        argv.append(f"--{name}={text}" if kind is not bool else f"--{'' if text else 'no-'}{name}")
    try:
        return parser(command).parse_args(argv)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def given(command, argv):
    """The flags given on the command line, without defaults, as a dict."""
    return vars(parser(command, only_given=True).parse_args(argv))


def parse(command, argv):
    """The flags of a command as a Namespace, checked against each other; the embedded model gets
    the demo's defaults. ValueError for what is refused; nothing is loaded or written."""
    named = given(command, argv).get("model", "tiny")
    args = parser(command, tiny=command == "train" and named == "tiny").parse_args(argv)
    for name, value in vars(args).items():
        if value == "" and name != "calib":  # --run $UNSET; an empty --calib undoes the adapter's
            raise ValueError(f"--{name.replace('_', '-')}: is empty; give a value or leave it out")
    if command != "train":
        take_policy(command, args)
    if args.awq and args.quant == "none":
        raise ValueError("--awq: chooses the scales of a four-bit format; --quant is none")
    if args.calib and not args.awq:
        raise ValueError("--calib: plain rounding uses no text; add --awq")
    if args.dtype == "float16" and args.quant == "mxfp4":
        raise ValueError("--dtype float16: MXFP4's scales do not fit it; use bfloat16, or "
                         "--quant nvfp4")
    if command != "sample" and args.prompt_style == "plain" and not args.reward:
        raise ValueError("--prompt-style plain: asks for nothing that could be graded; choose tags "
                         "or boxed, or grade by --reward")
    args.calib = args.calib or None
    {"train": check_train, "eval": check_eval, "sample": check_sample}[command](args)
    return args


def tell_idle(args, argv):
    """Print a warning for each of train.py's flags in argv that has no effect beside the others."""
    for name in given("train", argv):
        flag, used = NEEDS.get(name, ("", None))
        if used and not used(args):
            print(f"warning: --{name.replace('_', '-')}: does nothing without {flag}",
                  file=sys.stderr)


def check_copies(flag, n, temperature, zero):
    if n > 1 and temperature == 0:
        raise ValueError(f"--{flag} {n}: {zero} gives the same completion each time; leave it out")


def check_train(args):
    if args.aqn:
        for stage in {0, 1, args.aqn_stages // 2, args.aqn_stages - 1}:  # what it would raise later
            aqn.sigma(stage, args.aqn_stages, args.aqn_start, args.aqn_end, args.aqn_stages,
                      args.aqn_schedule)
    if args.lora_rank == 0 and args.quant != "none":
        raise ValueError(f"--lora-rank 0 trains all parameters and needs --quant none; "
                         f"{args.quant} cannot be trained")
    if args.lora_rank == 0 and args.dtype == "float16":
        raise ValueError("--dtype float16: gradients of the weights themselves would vanish in it; "
                         "use bfloat16, or --lora-rank 1 or more")
    if args.lora_rank == 0 and args.beta:
        raise ValueError("--beta: its reference is the model without adapter; raise --lora-rank")
    if args.updates_per_rollout > args.prompts_per_step:
        raise ValueError(f"--updates-per-rollout {args.updates_per_rollout}: each takes prompts of "
                         f"its own, and --prompts-per-step is {args.prompts_per_step}")
    check_copies("eval-n", args.eval_n, args.eval_temperature, "--eval-temperature 0")
    if args.overlong == "soft":
        grpo.soft_overlong_penalty(0, args.max_new_tokens, args.overlong_buffer)
    if args.out is None:
        args.out = f"runs/{Path(args.model).name}-{Path(args.data).stem}-{args.quant}-s{args.seed}"


def check_eval(args):
    args.temperature = 0.0 if args.greedy else args.temperature
    check_copies("n", args.n or 1, args.temperature, "--greedy, or --temperature 0,")
    if args.out:
        check_out(args.out)
    args.n = args.n or (1 if args.temperature == 0 else 4)
    if args.k and args.k[-1] > args.n:
        raise ValueError(f"--k {args.k[-1]}: takes as many samples a question, raise --n")


def check_sample(args):
    if ranks.world > 1:
        raise ValueError("sample.py is one process; start it with python, not torchrun")
    if (args.file is None) != (args.out is None):
        raise ValueError("--file and --out go together")
    if args.file and args.prompt is not None:
        raise ValueError("--prompt and --file exclude each other")
    if args.n > 1 and not args.file:
        raise ValueError(f"--n {args.n}: goes with --file; a chat and --prompt have one answer")
    check_copies("n", args.n, args.temperature, "--temperature 0")
    if args.out:
        check_out(args.out)
        if Path(args.out).resolve() == Path(args.file).resolve():
            raise ValueError(f"--out {args.out}: is --file itself; choose another name")


def run_command(command, body, argv=None, name=None):
    """Run body(args, argv) and return its exit code, as commands.run does. name: that of a script
    that has the flags of `command`."""
    argv = sys.argv[1:] if argv is None else argv

    @ranks.one_voice
    def parsed():
        try:
            args = parse(command, argv)
            ranks.start(args)
            code = body(args, argv)
            ranks.end()
            return code
        except RuntimeError as e:
            where, _, told = str(e).rpartition("DefaultCPUAllocator: ")
            if not where and not isinstance(e, torch.OutOfMemoryError):
                raise
            lower = "--micro-batch-tokens, " if command == "train" else ""
            told = ". ".join(told.split(". ")[:3])  # how much was asked for, and was free
            raise ValueError(f"out of {'' if where else 'GPU '}memory ({told}); lower {lower}"
                             "--max-rows or --max-new-tokens") from None

    return commands.run(name or f"{command}.py", parsed)


# ---- what the flags stand for


def place(device="auto", dtype="auto"):
    """(device, torch.dtype) that --device and --dtype stand for: auto is cuda where there is a GPU,
    with bfloat16, else the CPU, with float32. ValueError for what the machine cannot do."""
    device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine has no CUDA device; use --device cpu")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    if dtype == "float16" and device == "cpu":
        raise ValueError("--dtype float16: for GPUs; the CPU takes float32 or bfloat16")
    return device, getattr(torch, dtype)


def dtype_of(args):
    """The name of what --dtype stands for."""
    return str(place(args.device, args.dtype)[1]).removeprefix("torch.")


def load_policy(args):
    """(model, tokenizer) of the flags: base, format, AWQ, adapter, no ids past the tokenizer's."""
    device, dtype = place(args.device, args.dtype)
    if device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(args.card_share)
    folder = checkpoint.fetch(args.model)
    if getattr(args, "adapter", None):
        check_policy(args)  # before the slow part
    stored = read_config(folder).quantization
    if stored and args.quant == "none":  # nor could --lora-rank 0 train them
        raise ValueError(f"--quant none: the weights in {folder} have four bits already; use "
                         f"--quant {packed_format(stored, folder)}")
    tok = data.Tokenizer(folder)
    # a quantized one already has the scales that its adapter asks for (see check_policy)
    if args.awq and not (stored and getattr(args, "trained_with", {}).get("awq")):
        model = awq.load(folder, device, dtype, args.quant, args.calib)
    else:
        model = checkpoint.load(folder, device, dtype, args.quant)
    model.valid_vocab = len(tok)
    if device == "cpu" and model.config.hidden_size < 512:
        torch.set_num_threads(1)  # too little work for two: they would mostly wait for each other
    if getattr(args, "adapter", None):
        lora.load_adapter(model, args.adapter)
    return model, tok


def base_of(args):
    """What tells the base of these flags from others: checkpoint.fingerprint's digests; `text`, the
    digest of --awq's text file; `format`, the FORMATS row of a format that a script has added."""
    told = checkpoint.fingerprint(args.model)
    if args.quant in FORMATS and args.quant not in OURS:
        told["format"] = repr(FORMATS[args.quant])
    if args.awq and args.calib:
        told["text"] = file_digest(awq.text_file(args.calib))
    return told


def policy(args, base):
    """What goes into policy.json beside an adapter: what it was trained with and must be used with.
    base: base_of(args), as it was when training began."""
    kept = [*(dest(f) for _, f in flags_of("train") if f.kept), "reward"]
    return {name: getattr(args, name) for name in kept} | {"dtype": dtype_of(args)} | base


def read_policy(folder):
    """The policy.json in `folder`, {} where there is none (an adapter of another program)."""
    path = Path(folder) / "policy.json"
    if not path.is_file():
        return {}
    texts = ("base", "norms", "weights", "text", "format", "reward")
    found = read_json(path, dict.fromkeys(texts, str))
    kept = [(f.name, found.get(dest(f))) for _, f in flags_of("train")
            if f.kept or f.name == "dtype"]
    from_file("train", kept, f"{path}; a format of a script's own needs that script, else delete "
                 "the file to choose --model, --quant and --prompt-style by hand")
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
    args.trained_with = read_policy(folder) if folder else {}
    for _, f in flags_of(command):
        if f.kept and getattr(args, dest(f)) is None:
            default = f.tiny if args.model == "tiny" and f.tiny is not None else f.default
            if command == "sample" and f.name == "prompt-style":
                default = "plain"  # a chat with a base model asks for nothing in particular
            if f.name != "calib" or args.awq:  # its text is no use to plain rounding
                default = args.trained_with.get(dest(f), default)
            setattr(args, dest(f), default)


def merged(folder):
    """Digests of the adapters that `lora.py --merge` has put into a checkpoint."""
    path = folder / "merged.json"
    return (read_json(path, {"adapters": list}).get("adapters") or []) if path.is_file() else []


def check_policy(args):
    """ValueError if the adapter was trained on another base, or is merged into this one; a warning
    where the format, or AWQ's text, differs."""
    had, now = args.trained_with, base_of(args)
    weights = Path(args.adapter) / "adapter_model.safetensors"
    if weights.is_file() and file_digest(weights) in merged(checkpoint.fetch(args.model)):
        raise ValueError(f"--model {args.model}: the adapter {args.adapter} is merged into it "
                         "already; give the base it was trained on, or leave the adapter out")

    def stored(of):  # the format it is stored in: none, nvfp4, ...
        return (of.get("weights") or "").partition(":")[0]

    same = stored(had) == stored(now)  # only then can the digests of all weights be compared
    known = "weights" if same else "base"
    if had.get(known) not in (None, now[known]):
        raise ValueError(f"--model {args.model}: the adapter {args.adapter} was trained on another "
                         f"base, {had.get('model')}; an adapter only fits its own")
    scaled_here = args.awq and stored(now) == "none"
    if not same and had.get("norms") and not scaled_here:
        # one of the two was rounded beforehand; if by AWQ, its norms hold the scales
        scaled = had["norms"] != now["norms"]
        if scaled != bool(had.get("awq")):
            raise ValueError(f"--model {args.model}: was rounded by other scales (AWQ's, or "
                             f"without AWQ) than the adapter {args.adapter} was trained with; give "
                             f"its own base, {had.get('model')}")
    for name in ("quant", "awq"):
        if had.get(name, getattr(args, name)) != getattr(args, name):
            print(f"warning: --{name} {getattr(args, name)}: the adapter was trained with "
                  f"{had[name]}", file=sys.stderr)
    if had.get("format") not in (None, now.get("format")):
        print(f"warning: --quant {args.quant}: is another format than the adapter was trained with",
              file=sys.stderr)
    if same and args.awq and had.get("text") != now.get("text"):
        print(f"warning: --calib {args.calib or 'by default'}: the adapter was trained with scales "
              "by another text", file=sys.stderr)
    dtype = dtype_of(args)
    if same and args.awq and had.get("dtype", dtype) != dtype:
        print(f"warning: --dtype {dtype}: the adapter was trained with AWQ's scales as they come "
              f"out in {had['dtype']}", file=sys.stderr)
