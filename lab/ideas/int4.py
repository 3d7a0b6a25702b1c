"""A four-bit integer format: codes are -8 to 7, with a float32 scale for each 32 weights.

One row of nvfp4.FORMATS, put there before the commands are imported, is in all their flags, files
and kernels. The first word names the command, so that all of them know the row; noise_size.py says
how far the format is from 16 bits:

    python lab/ideas/int4.py noise_size --quant int4
    python lab/ideas/int4.py train --quant int4 --out runs/int4-s0
    python lab/ideas/int4.py eval --run runs/int4-s0
    python lab/ideas/int4.py sample --run runs/int4-s0 --prompt "What is 12+39?"
"""
import sys
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nvfp4 import FORMATS, Format

FORMATS["int4"] = Format(32, torch.float32, tuple(range(-8, 8)))

MODULES = {"train": "train", "eval": "eval", "sample": "lab.chat",
           "noise_size": "lab.ideas.noise_size"}

if __name__ == "__main__":
    command, argv = "".join(sys.argv[1:2]), sys.argv[2:]
    if command not in MODULES:
        sys.exit(f"int4.py: error: train, eval, sample or noise_size?\n\n{__doc__}")
    sys.exit(import_module(MODULES[command]).main(argv))
