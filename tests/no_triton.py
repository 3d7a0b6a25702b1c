"""
The project where Triton is not installed, as on a Mac: its import fails here.

    python tests/no_triton.py                        # every file, four bits, sampling
    python tests/no_triton.py train.py --help        # a command
"""
import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace as Made
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
# the kernels, and what measures them on a GPU
NEED_TRITON = {"marlin_triton", "fast.adapter", "fast.attention", "fast.batches", "fast.bits",
               "fast.compiling", "fast.decode", "fast.draw", "fast.engine", "fast.gemm",
               "fast.linears", "fast.logprobs", "fast.packed", "fast.scheduler", "lab.bench"}
sys.path.insert(0, str(ROOT))
sys.modules["triton"] = None


def modules():
    """Names of the project's modules."""
    files = [f for folder in ("", "fast/", "plumbing/", "lab/") for f in ROOT.glob(f"{folder}*.py")]
    return sorted(".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files
                  if f.stem != "__init__")


def main():
    for name in modules():
        if name not in NEED_TRITON:
            importlib.import_module(name)
    import torch

    import fast
    import lora
    import model
    import nvfp4
    import sample

    for fmt in nvfp4.FORMATS:
        w = torch.randn(8, 128)
        assert (nvfp4.quantize(w, fmt).dequantize() - w).norm() < 0.2 * w.norm()
    m = model.load(ROOT / "assets" / "tiny", dtype=torch.float32, quant="nvfp4")
    lora.add_lora(m, 4, 4)
    [[s]] = sample.generate(m, [[1, 2, 3]], max_new_tokens=8)
    assert len(s.ids) == 8 and m(torch.tensor([s.ids])).isfinite().all()
    weight = Made(is_cuda=True, device=0, dtype=torch.bfloat16)
    card = Made(embed=Made(weight=weight), config=Made(head_dim=64), layers=[])
    with mock.patch("torch.cuda.get_device_capability", lambda device: (9, 0)):
        assert fast.refusal(card) == "triton is not installed"


if __name__ == "__main__":
    if sys.argv[1:]:
        del sys.argv[0]
        sys.exit(runpy.run_path(sys.argv[0], run_name="__main__"))
    main()
