"""
Every flag of train.py: its type, its default, what it means. The defaults are the paper's; those of the embedded model, which
trains in minutes on a CPU, stand in a column beside them.

    python train.py --help
"""
import argparse
import math
from pathlib import Path

import aqn
import data
import grpo

TINY = Path(__file__).parent / "assets" / "tiny"


def at_least(low, kind=int, below=math.inf):
    """An argparse type: a number of `kind` in [low, below)."""

    def parse(text):
        value = kind(text)
        if not low <= value < below:
            limits = f"at least {low}" + (f" and below {below}" if below < math.inf else "")
            raise argparse.ArgumentTypeError(f"{text}: must be {limits}")
        return value

    parse.__name__ = kind.__name__  # argparse names it when `kind` itself cannot read the text
    return parse


def levels(text):
    """An argparse type: difficulty levels as in 3,4,5."""
    return sorted({int(part) for part in text.split(",")})


# flag, type or choices, default (the paper's), default of the embedded demo, meaning
KNOBS = (
    ("model", str, str(TINY), None, "checkpoint folder or hub id"),
    ("data", str, "gsm8k", "arithmetic", "gsm8k, arithmetic, or a .jsonl file / folder of {question, answer}"),
    ("levels", levels, None, None, "keep only rows of these levels, 5 the hardest: 3,4,5 for the paper's Big-Math"),
    ("out", str, None, None, "run folder (default: runs/<model>-<data>-<quant>-s<seed>)"),
    ("resume", bool, False, None, "continue the run in --out; its own flags are used again"),
    ("seed", at_least(0), 0, None, "of samples, noise, data order and adapter"),
    ("device", ("auto", "cpu", "cuda"), "auto", None, "cuda where there is one"),
    ("dtype", ("auto", "bfloat16", "float32"), "auto", None, "of activations: bfloat16 on cuda, float32 on the CPU"),
    ("quant", ("none", "nvfp4", "mxfp4", "nf4"), "nvfp4", None, "number format of the frozen base"),
    ("lora-rank", at_least(0), 32, 16, "0 with --quant none trains all parameters"),
    ("lora-alpha", at_least(1e-6, float), 32.0, 32.0, "the adapter is scaled by alpha / rank"),
    ("aqn", bool, True, None, "adaptive quantization noise in the RMSNorms"),
    ("aqn-start", at_least(0, float), 1e-2, None, "sigma of the first noisy stage"),
    ("aqn-end", at_least(0, float), 5e-4, None, "sigma of the last stage"),
    ("aqn-stages", at_least(2), 10, None, "equal intervals of training; the first has no noise"),
    ("aqn-schedule", aqn.SCHEDULES, "exponential", None, "how sigma falls from stage to stage"),
    ("aqn-scope", ("rollout", "both"), "rollout", None, "noise where samples are drawn only, or in the update's forward too"),
    ("loss", grpo.LOSSES, "grpo", "dapo", "objective"),
    ("eps-low", at_least(0, float), 0.2, None, "ratio clip below 1"),
    ("eps-high", at_least(0, float), 0.28, None, "ratio clip above 1 (DAPO: clip-higher)"),
    ("beta", at_least(0, float), 0.0, None, "weight of KL to the adapter-off model"),
    ("old-logp", ("sampler", "trainer"), "sampler", None, "what the ratio is taken against; trainer adds --tis-cap weights"),
    ("tis-cap", at_least(1, float), 2.0, None, "cap of the truncated importance weights of --old-logp trainer"),
    ("overlong", ("none", "mask", "soft"), "none", "mask", "completions cut at the limit: as they are, left out, length penalty"),
    ("overlong-buffer", at_least(1), 512, 16, "tokens over which --overlong soft falls from 0 to -1"),
    ("dynamic-sampling", bool, False, True, "DAPO: replace groups whose rewards are all equal"),
    ("max-resample", at_least(0), 2, 1, "extra rollouts a step that --dynamic-sampling may draw"),
    ("steps", at_least(1), None, 40, "rollouts (default: one pass over the data)"),
    ("prompts-per-step", at_least(1), 16, 16, "prompts a rollout"),
    ("group-size", at_least(2), 8, 8, "completions a prompt"),
    ("updates-per-rollout", at_least(1), 4, 2, "optimizer steps a rollout, each on its own share of the prompts"),
    ("micro-batch-tokens", at_least(1), 16384, 8192, "padded tokens a forward/backward holds at most (a single row always fits)"),
    ("checkpointing", bool, True, False, "recompute activations in backward: less memory, a third more arithmetic"),
    ("lr", at_least(0, float), 1e-5, 7e-4, "AdamW's peak learning rate, the same for each --quant"),
    ("weight-decay", at_least(0, float), 0.1, 0.0, "AdamW's"),
    ("beta1", at_least(0, float, 1), 0.9, None, "AdamW's"),
    ("beta2", at_least(0, float, 1), 0.99, None, "AdamW's"),
    ("warmup", at_least(0, float, 1), 0.1, None, "share of the optimizer steps spent warming up, then cosine to 0"),
    ("grad-clip", at_least(0, float), 0.2, 1.0, "norm the gradient is clipped to"),
    ("prompt-style", tuple(data.SUFFIX), "tags", None, "what the prompt asks for and the reward looks for"),
    ("max-prompt", at_least(1), 256, 128, "longer prompts are skipped and counted"),
    ("max-new-tokens", at_least(1), 4096, 96, "completion limit"),
    ("temperature", at_least(1e-6, float), 1.0, None, "of rollouts; log-probs are those of the tempered distribution"),
    ("max-rows", at_least(1), 256, 256, "completions decoded side by side at most"),
    ("eval-limit", at_least(0), 0, 256, "held-out questions before and after training, 0 for all"),
    ("eval-n", at_least(0), 1, 1, "samples a question in these evaluations, 0 for no evaluation"),
    ("eval-temperature", at_least(0, float), 0.6, 0.6, "0 is greedy"),
    ("eval-top-p", at_least(1e-6, float), 0.95, 0.95, "nucleus of the evaluations"),
    ("save-every", at_least(1), 20, 10, "steps between checkpoints"),
    ("gap-bound", at_least(0, float), 0.05, 0.05, "warn when sampler and trainer differ by more nats a token, noise off"),
)


class UserError(Exception):
    """One line for the terminal, exit code 2."""


def parse_args(argv):
    """Flags as a Namespace; the embedded demo's defaults where --model is the embedded model."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model", default=str(TINY))
    demo = Path(first.parse_known_args([a for a in argv if a not in ("-h", "--help")])[0].model).resolve() == TINY
    p = argparse.ArgumentParser(description="QeRL training", allow_abbrev=False)
    for name, kind, paper, tiny, text in KNOBS:
        default = tiny if demo and tiny is not None else paper
        shown = f" [{paper}]" if tiny in (None, paper) else f" [{paper}; tiny: {tiny}]"
        shown = {"model": " [the embedded assets/tiny]", "out": "", "levels": "", "steps": f" [tiny: {tiny}]"}.get(name, shown)
        if kind is bool:
            p.add_argument(f"--{name}", action=argparse.BooleanOptionalAction if name != "resume" else "store_true",
                           default=default, help=text + shown)
        elif isinstance(kind, tuple):
            p.add_argument(f"--{name}", choices=kind, default=default, help=text + shown)
        else:
            p.add_argument(f"--{name}", type=kind, default=default, help=text + shown)
    args = p.parse_args(argv)
    if args.aqn:
        aqn.sigma(0, 1, args.aqn_start, args.aqn_end, args.aqn_stages, args.aqn_schedule)  # raises what it would raise later
    if args.lora_rank == 0 and args.quant != "none":
        raise UserError(f"--lora-rank 0 trains all parameters and needs --quant none; {args.quant} weights cannot be trained")
    if args.lora_rank == 0 and args.beta:
        raise UserError("--beta needs an adapter: its reference is the adapter-off model; use --lora-rank 1 or more")
    if args.updates_per_rollout > args.prompts_per_step:
        raise UserError(f"--updates-per-rollout {args.updates_per_rollout}: more than --prompts-per-step {args.prompts_per_step}")
    if args.out is None:
        args.out = f"runs/{Path(args.model).name}-{Path(args.data).stem}-{args.quant}-s{args.seed}"
    return args
