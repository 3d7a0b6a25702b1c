"""
Commands that stream a checkpoint's blocks (model.stream): quantize it, plain or with AWQ; merge an
adapter into it. (--plan counts what formats cost, and streams nothing.)

Both take one block at a time, from disk to the device, changed, into the new checkpoint: they need
memory for one block, the embedding and the head, and one shard of the output. `python nvfp4.py` and
`python lora.py` start this file.

    python nvfp4.py --model Qwen/Qwen2.5-3B-Instruct --fmt nvfp4 --awq --out qwen-3b-nvfp4/
    python nvfp4.py --plan Qwen/Qwen2.5-32B-Instruct
    python lora.py --merge --model qwen-3b-nvfp4/ --adapter runs/x/adapter --out merged/
"""
import argparse
import sys
from pathlib import Path
from statistics import fmean

from plumbing import checkpoint, command, datasets, flags, peft, policy
from plumbing.files import file_digest

import torch
import torch.nn as nn
from tqdm import tqdm

import lora
import model as qwen
from lab import chat
from model import PROJECTIONS, Linear
from nvfp4 import FORMATS


def write(writer, model, path, dtype=None):
    """Write what a qwen.stream of `model` has brought at `path`, in `dtype` (None: as it is), and
    free it if it is a block."""
    for name, tensor in qwen.tensors(model.get_submodule(path), path):
        writer.add(name, tensor if dtype is None else tensor.to(dtype))
    if path.startswith("layers."):
        model.layers[int(path.split(".")[1])] = None


def asked(folder):
    """What the policy.json in `folder` says of prompts and rewards: it holds in every format."""
    return {k: v for k, v in flags.read_policy(chat.COMMAND, folder).items()
            if k in ("data", "prompt_style", "reward")}


def convert(path_or_hub_id, out, fmt="nvfp4", device="cpu", use_awq=False, calib=None,
            shard_bytes=2 << 30):
    """Quantize a 16-bit checkpoint into the folder `out` (checkpoint.Writer); returns the rows of
    nvfp4.calibrated's report, none of plain rounding.

    Weights stay in the dtype they are stored in. ValueError for an `out` that exists, a checkpoint
    that is quantized already, and whatever `quantize` and `datasets.calibration` refuse."""
    folder = checkpoint.fetch(path_or_hub_id)
    config, source = qwen.read_config(folder), checkpoint.Checkpoint(folder)
    if config.quantization:
        raise ValueError(f"--model: {folder} is quantized already; give the 16-bit checkpoint")
    model, report = qwen.skeleton(config), []
    with checkpoint.Writer(out, folder, fmt, FORMATS[fmt], shard_bytes) as writer:
        if had := asked(folder):
            writer.notes["policy.json"] = {"quant": fmt} | had
        ids = datasets.calibration(calib, folder) if use_awq else None
        bar = tqdm(desc=fmt, total=len(model.layers), disable=None)
        for path in qwen.stream(model, source, device, None, fmt, ids, report):
            write(writer, model, path)
            bar.update(path.startswith("layers."))
        bar.close()
    return report


def in_16_bits(m):
    """A model.Linear with the weight that the linear `m` multiplies by, adapter included."""
    with torch.device("meta"):
        out = Linear(m.shape[1], m.parts, m.base.bias is not None)
    out.weight, out.bias = nn.Parameter(m.dense().to(torch.bfloat16)), m.base.bias
    return out


@torch.no_grad()
def merge(path_or_hub_id, adapter, out, device="cpu", quant="none", calib=None,
          dtype=torch.bfloat16):
    """Write base + adapter as a 16-bit checkpoint in Hugging Face layout.

    quant: the format the adapter was trained on, if the checkpoint is not quantized itself: it was
    fitted to w_hat, not w. calib: datasets.calibration's ids if AWQ rounded it; dtype: what AWQ ran
    in, since its scales follow from activations."""
    folder = checkpoint.fetch(path_or_hub_id)
    model = qwen.skeleton(qwen.read_config(folder))
    rank, scaling, state = lora.read_adapter(model, adapter)
    digests = policy.merged(folder) + [file_digest(Path(adapter) / "adapter_model.safetensors")]
    with checkpoint.Writer(out, folder) as writer:
        writer.notes |= {"merged.json": {"adapters": digests},
                         "policy.json": {"quant": "none"} | asked(adapter)}
        source = checkpoint.Checkpoint(folder)
        for path in qwen.stream(model, source, device, dtype, quant, calib):
            piece = model.get_submodule(path)
            for name in PROJECTIONS if path.startswith("layers.") else ():
                m = lora.LoRALinear(piece.get_submodule(name), rank, scaling)
                lora.take_tensors(f"{path}.{name}", m, state)
                piece.set_submodule(name, in_16_bits(m))
            for name, norm in peft.norms_of(piece, path):
                if name in state:
                    norm.weight.copy_(state[name])
            write(writer, model, path, torch.bfloat16)


# ---- the commands


def quantize_body(argv):
    p = command.Parser(
        "nvfp4.py",
        description="Quantize a checkpoint to four bits, or count what each format would cost.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, count, what = p.add_argument, command.number, p.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="16-bit checkpoint folder or hub id, to quantize")
    what.add_argument("--plan", metavar="MODEL",
                      help="only print what a checkpoint, or hub id, costs in each format")
    add("--out", help="folder to write; must not exist")
    add("--fmt", choices=list(FORMATS), default="nvfp4", help="number format")
    add("--awq", action="store_true",
        help="choose scales by activations (AWQ, nvfp4.py) instead of plain rounding")
    add("--calib", help="text for --awq: a .jsonl (question and answer, or text) or a text file "
                        "(worked arithmetic problems)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="cuda if there is one")
    add("--rank", type=count(1, 4096), default=32, help="LoRA rank that --plan counts with")
    add("--tokens", type=count(1, 10**8), default=16384,
        help="micro-batch tokens that --plan counts with")
    args = p.parse_args(argv)
    if bool(args.plan) == bool(args.out):
        p.error("--out: name the folder to write; beside --plan, which only prints, leave it out")
    if args.plan:
        from fast import memory  # here: fast/ may have been deleted

        config = qwen.read_config(checkpoint.fetch(args.plan, weights=False))
        print(memory.table(config, args.rank, args.tokens))
        return
    if args.calib and not args.awq:
        p.error("--calib: plain rounding uses no text; add --awq")
    device, _ = policy.place(args.device)
    report = convert(args.model, args.out, args.fmt, device, args.awq, args.calib)
    if args.awq:
        kept = [row["awq"] / row["rtn"] for row in report if row["rtn"]]
        print(f"AWQ leaves {100 * fmean(kept or [1]):.0f}% of plain rounding's output error on the "
              "calibration text")
    size = sum(f.stat().st_size for f in Path(args.out).glob("*.safetensors")) / 2**30
    print(f"{args.out}: {size:.2f} GiB")


def merge_body(argv):
    p = command.Parser(
        "lora.py", description="Merge an adapter into a 16-bit checkpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = p.add_argument
    add("--merge", action="store_true", required=True, help="what to do")
    add("--model", required=True, help="checkpoint folder or hub id, 16-bit or quantized")
    add("--adapter", required=True, help="adapter folder, ours or PEFT's")
    add("--out", required=True, help="folder to write; must not exist")
    add("--quant", choices=["none", *FORMATS],
        help="format the adapter was trained on (default: its own, by policy.json, or none)")
    add("--calib", help="AWQ's text, where the adapter was trained with --awq (default: its own)")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="cuda if there is one")
    args = p.parse_args(argv)
    had, folder = flags.read_policy(chat.COMMAND, args.adapter), checkpoint.fetch(args.model)
    args.quant = args.quant or had.get("quant", "none")
    args.trained_with, args.awq = had, had.get("awq", False) and args.quant != "none"
    # a quantized checkpoint has its scales already
    calibrate = args.awq and qwen.read_config(folder).quantization is None
    if args.calib and not calibrate:
        raise ValueError(f"--calib {args.calib}: these weights are not AWQ's to make; leave it out")
    args.calib = (args.calib or had.get("calib")) if calibrate else None
    args.dtype = had.get("dtype", "bfloat16") if calibrate else "bfloat16"
    policy.check(args)  # before the slow part
    ids = datasets.calibration(args.calib, folder) if calibrate else None
    device, dtype = policy.place(args.device, args.dtype)
    merge(folder, args.adapter, args.out, device, args.quant, ids, dtype)
    print(f"{args.out}: 16 bits, adapter included")


def main(what, argv):
    """`what`: quantize (the flags of nvfp4.py) or merge (of lora.py)."""
    name, body = {"quantize": ("nvfp4.py", quantize_body), "merge": ("lora.py", merge_body)}[what]
    return command.run(name, lambda: body(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
