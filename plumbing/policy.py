"""
policy.json, beside each adapter: what it was trained with and must be used with (base, format, AWQ,
prompt). It gives eval.py and sample.py their defaults (flags.with_policy), and keeps an adapter
from another base (`check`).
"""
import sys
from pathlib import Path

from plumbing import checkpoint, hub
from plumbing.files import file_digest, saved

import torch


def place(device="auto", dtype="auto"):
    """(device, torch.dtype) that --device and --dtype stand for: auto is cuda where there is a GPU,
    with bfloat16, else the CPU, with float32. ValueError for what the machine cannot do."""
    device = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine has no CUDA device; use --device cpu")
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return device, getattr(torch, dtype)


def base_of(args):
    """checkpoint.fingerprint of these flags' base, and `text`, the digest of --awq's text file."""
    found = checkpoint.fingerprint(args.model)
    if args.awq and args.calib:
        found["text"] = file_digest(args.calib)
    return found


def content(args, base, names):
    """What goes into policy.json: the flags `names`, and `base`, base_of(args) at the start."""
    dtype = str(place(args.device, args.dtype)[1]).removeprefix("torch.")
    commit = {"commit": hub.COMMITS[args.model]} if args.model in hub.COMMITS else {}
    return {name: getattr(args, name) for name in names} | {"dtype": dtype} | commit | base


def merged(folder):
    """Digests of the adapters that `lora.py --merge` has put into a checkpoint."""
    return saved(folder, "merged.json").get("adapters") or []


def check(args):
    """ValueError if the adapter was trained on another base, or is merged into this one; a warning
    where the format, or AWQ's text, differs."""
    trained, now = args.trained_with, base_of(args)
    weights = Path(args.adapter) / "adapter_model.safetensors"
    if weights.is_file() and file_digest(weights) in merged(checkpoint.fetch(args.model)):
        raise ValueError(f"--model {args.model}: the adapter {args.adapter} is merged into it "
                         "already; give the base it was trained on, or leave the adapter out")

    def stored(of):  # the format it is stored in: none, nvfp4, ...
        return (of.get("weights") or "").partition(":")[0]

    same = stored(trained) == stored(now)  # only then can the digests of all weights be compared
    known = "weights" if same else "base"
    if trained.get(known) not in (None, now[known]):
        raise ValueError(f"--model {args.model}: the adapter {args.adapter} was trained on another "
                         f"base, {trained.get('model')}; an adapter only fits its own")
    scaled_here = args.awq and stored(now) == "none"
    if not same and trained.get("norms") and not scaled_here:
        # one of the two was rounded beforehand; if by AWQ, its norms hold the scales
        scaled = trained["norms"] != now["norms"]
        if scaled != bool(trained.get("awq")):
            raise ValueError(f"--model {args.model}: was rounded by other scales (AWQ's, or "
                             f"without AWQ) than the adapter {args.adapter} was trained with; give "
                             f"its own base, {trained.get('model')}")
    for name in ("quant", "awq"):
        if trained.get(name, getattr(args, name)) != getattr(args, name):
            print(f"warning: --{name} {getattr(args, name)}: the adapter was trained with "
                  f"{trained[name]}", file=sys.stderr)
    if same and args.awq and trained.get("text") != now.get("text"):
        print(f"warning: --calib {args.calib or 'by default'}: the adapter was trained with scales "
              "by another text", file=sys.stderr)


def warn_evaluated(args):
    """A warning where eval.py asks what was trained on, or grades by another reward."""
    data, reward = (args.trained_with.get(name) for name in ("data", "reward"))
    if data in args.data.split(",") and Path(data).is_file():
        print(f"warning: --data {data}: most of its questions were trained on; those that were "
              "held out, if any, are in eval_after.jsonl of the run", file=sys.stderr)
    if reward and not args.reward:  # a reward is code, which is not run unasked
        print(f"warning: trained by --reward {reward}, graded here by --prompt-style "
              f"{args.prompt_style}; add --reward to compare with the run's own accuracy",
              file=sys.stderr)
