"""Both norms of each block trained beside LoRA, as the DAPO scripts of the paper's release do. The
noise is drawn in these same norms, so their training may be what makes it useful.

    python lab/ideas/norms.py --out runs/norms-s0

Each evaluation of the run is of the norms as they are then. Its adapter is saved without them: do
not evaluate it by eval.py.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lora
import train

add_lora = lora.add_lora


def with_norms(model, *args):
    norms = [norm.weight for block in model.layers
             for norm in (block.input_layernorm, block.post_attention_layernorm)]
    return [*add_lora(model, *args), *(w.requires_grad_() for w in norms)]


lora.add_lora = with_norms

if __name__ == "__main__":
    sys.exit(train.main())
