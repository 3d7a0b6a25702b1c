"""
What is not QeRL: files, flags, signals, checkpoints, tokenizers, grading, ranks. Whoever reads for
the method can skip it.

This file runs before torch is imported, which takes seconds: from here on ctrl-C ends a command in
one line, and whoever started it in a terminal reads what it is doing.
"""
import os
import signal
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
MAIN = getattr(sys.modules["__main__"], "__file__", None)  # None: a prompt, or a notebook
COMMANDS = ("train.py", "eval.py", "sample.py", "walk.py", "nvfp4.py", "lora.py")
# whether one of this project's own commands was started: not imported, and no script of a user's,
# who is told to put it beside them
ALONE = MAIN is not None and (Path(MAIN).resolve().parent == HOME / "lab"
                              or Path(MAIN).resolve() in [HOME / name for name in COMMANDS])


def leave(*_):
    os.write(2, b"stopped\n")
    os._exit(130)


if ALONE:
    signal.signal(signal.SIGINT, leave)
    without = {"-h", "--help"} & {*sys.argv} or Path(MAIN).name in ("archive.py", "plot.py")
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # of the processes that torchrun starts
    if first and not without and sys.stderr.isatty():
        print("loading PyTorch ...", file=sys.stderr, flush=True)
# Rollouts and updates need tensors of ever new sizes: without this setting, which torch reads when
# it is imported, the allocator keeps 46 GiB where tensors peak at 26.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
