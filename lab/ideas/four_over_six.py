"""Another rounding: each block of NVFP4 takes the better of two scales (Four Over Six, arXiv
2512.02010).

E2M1 is coarsest near its end: where a block's largest weight becomes 6, nothing lies between it and
4. Where it becomes 4, the steps up there are three quarters as wide, and all others half as wide
again. Each block takes what leaves it the smaller squared error. Codes, scales, files and kernels
stay NVFP4's, and no calibration text is needed:

    python lab/ideas/four_over_six.py --out runs/better-s0

eval.py alone rounds plainly: do not ask it about the adapter.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import nvfp4
import train

six_alone = nvfp4.block_scales


def block_scales(w, fmt, name="weight"):
    scale, top = six_alone(w, fmt, name)
    if fmt != "nvfp4":
        return scale, top
    blocks = (len(w), -1, nvfp4.FORMATS[fmt].block)
    amax = w.float().reshape(blocks).abs().amax(-1)  # (N, K/block)
    top = top * 448 / 256  # E4M3 ends at 448: half as much again as the largest scale must fit
    six, four = ((amax / end / top[:, None]).to(scale.dtype) for end in (6, 4))

    def error(scale):
        return (nvfp4.snap(w, fmt, scale, top) - w).view(blocks).square().sum(-1)

    best = torch.where(error(four) < error(six), four.float(), six.float())
    return best.to(scale.dtype), top


nvfp4.block_scales = block_scales

if __name__ == "__main__":
    sys.exit(train.main())
