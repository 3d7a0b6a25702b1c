"""Without a GPU, Triton's kernels run in its interpreter; that is decided when they are defined, so before any import of them."""
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def exit_code(main, argv):
    """What the shell would see of a command."""
    try:
        return main(argv)
    except SystemExit as e:  # argparse's own refusals
        return e.code
