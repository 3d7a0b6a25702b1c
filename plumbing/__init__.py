"""
What is not QeRL: files, flags, signals, checkpoints, tokenizers, grading, ranks. Whoever reads for
the method can skip it.

This file runs before torch is imported, which takes seconds: whoever has started a command in a
terminal reads what it is doing.
"""
import os
import sys
from pathlib import Path

COMMANDS = ("train.py", "eval.py", "sample.py", "walk.py", "nvfp4.py", "lora.py")
if (Path(sys.argv[0]).name in COMMANDS and not {"-h", "--help"} & {*sys.argv} and sys.stderr
        and sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"):
    print("loading PyTorch ...", file=sys.stderr, flush=True)
# Rollouts and updates need tensors of ever new sizes: without this setting, which torch reads when
# it is imported, the allocator keeps 46 GiB where tensors peak at 26.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
