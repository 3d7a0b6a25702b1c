"""Both norms of each block trained beside LoRA, as the DAPO scripts of the paper's release do. The
noise is drawn in these same norms, so their training may be what makes it useful.

    python lab/ideas/norms.py --out runs/norms-s0

They are saved with the adapter, as PEFT's modules_to_save.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plumbing import peft

import lora
import train

add_lora = lora.add_lora


def with_norms(model, *args):
    params = add_lora(model, *args)
    return params + [peft.own_norm(norm).requires_grad_() for _, norm in peft.norms_of(model)]


lora.add_lora = with_norms

if __name__ == "__main__":
    sys.exit(train.main())
