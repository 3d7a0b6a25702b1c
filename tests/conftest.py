"""What several files of tests share. Libraries are imported where they are needed: the process that only hands tests out to
others needs none."""
import dataclasses
import functools
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from plumbing.files import TINY

import pytest


def pytest_configure(config):
    """Without a GPU, Triton's kernels run in its interpreter; that is decided when they are defined, so before any test file is
    imported."""
    if config.getoption("dist", "no") == "no":  # here tests will run
        import torch

        # side by side, more threads than cores wait for each other: three tests took minutes so
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))))
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")
            with suppress(ImportError):
                patch_once()


@pytest.fixture
def few(monkeypatch):
    """AWQ is calibrated on 4 sequences of 32 tokens."""
    from plumbing import datasets

    monkeypatch.setattr(datasets, "calibration", functools.partial(datasets.calibration, sequences=4, length=32))


def settings(**own):
    """What grpo.update needs to know: train.py's flags, all at their defaults but `own`."""
    from plumbing import flags

    import train

    args = flags.parse(train.COMMAND, ["--model", "some/model", "--micro-batch-tokens", "16384"])
    vars(args).update(own)
    return args


def patch_once():
    """Triton's interpreter without half of its work. At each call of a function from a kernel it patches all of triton.language again;
    what a launch has patched holds for its calls, and what the first call adds is never taken back. Each sum and product of integers
    is computed again in 64 bits, for a check of overflow that is then not made; each operation builds a table of dtypes."""
    from triton.runtime import interpreter

    patch, np_dtype, known = functools.cache(interpreter._patch_lang), interpreter._get_np_dtype, {}

    def call(self, *args, **kw):
        patch(self.fn)
        return self.rewrite()(*args, **kw)

    def dtype_of(kind):
        if kind.name not in known:
            known[kind.name] = np_dtype(kind)
        return known[kind.name]

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = dtype_of
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def pytest_collection_modifyitems(items):
    """The slowest files first, so that both processes end together."""
    slow = ("test_ranks", "test_kill", "test_train", "test_grade", "test_gemm", "test_packed", "test_fast", "test_loop",
            "test_awq", "test_ideas", "test_bad_inputs")
    items.sort(key=lambda item: slow.index(item.path.stem) if item.path.stem in slow else len(slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two processes for the whole suite, file by file. None for some of its files, where starting them would take longer than
    they save, and none on a GPU, whose memory is counted there."""
    return 2 if not config.option.file_or_dir and "not gpu" in config.option.markexpr else 0


@pytest.fixture(autouse=True)
def blank_pictures(request, monkeypatch):
    """A run ends with a picture of its curves, half of the time that a run of two steps takes: drawn where pictures are tested."""
    if request.node.path.stem not in ("test_plot", "test_archive", "test_bad_inputs"):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, out, **options: Path(out).touch())


@pytest.fixture(autouse=True, scope="module")
def few_exponents(request):
    """AWQ tries four exponents for a linear, where twenty take most of the time of a small model's conversion: but where the search is
    tested, and on a GPU."""
    import torch

    import nvfp4

    with pytest.MonkeyPatch.context() as m:
        if request.path.stem != "test_awq" and not torch.cuda.is_available():
            m.setattr(nvfp4, "GRID", 4)
        yield


def first_blocks(n, folder):
    """The embedded model's first n blocks, a checkpoint in `folder`: where it does not matter what a model says."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "*.md"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": n}))
    tensors = load_file(folder / "model.safetensors")
    kept = {k: t for k, t in tensors.items() if not k.startswith("model.layers.") or int(k.split(".")[2]) < n}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """Two blocks."""
    return first_blocks(2, tmp_path_factory.mktemp("models") / "shallow")


@pytest.fixture(params=[16, 32, 64, 128])
def own(request, monkeypatch):
    """A number format of one's own: INT4, -8..7 with a float32 scale for each `param` columns."""
    import torch

    from nvfp4 import FORMATS, Format

    monkeypatch.setitem(FORMATS, "own", Format(request.param, torch.float32, tuple(range(-8, 8))))
    return "own"


def policy_of(args):
    """What train.py would write into policy.json."""
    from plumbing import policy

    import train

    kept = [f.dest for f in train.COMMAND.flags if f.in_policy]
    return policy.content(args, policy.base_of(args), [*kept, "reward"])


@pytest.fixture
def on_fast_path(monkeypatch):
    """A function that puts the fast functions on a model, whatever fast.install would say of its device and dtype, and returns
    it. On a CPU, where Triton's interpreter runs the kernels, there is memory for as many rows as are asked for."""
    import torch

    import fast
    from fast import engine

    def put(model):
        fast.tile(model)
        model.fast = fast.Fast()
        return model

    if not torch.cuda.is_available():
        monkeypatch.setattr(engine, "free_bytes", lambda: 2**40)
    return put


def exit_code(main, argv):
    """What the shell would see of a command."""
    try:
        return main(argv)
    except SystemExit as e:  # argparse's own refusals
        return e.code


def tiny(seed=0, dtype=None):
    """Three layers, norm weights away from 1 (so that Z / w is not Z)."""
    import torch

    import model as qwen

    torch.manual_seed(seed)
    m = qwen.Transformer(qwen.Config(31, 32, 48, 3, 4, 2, 8)).requires_grad_(False)
    for name, p in m.named_parameters():
        if "norm" in name:
            p.uniform_(0.5, 1.5)
        elif "weight" in name:
            p.normal_(0, 0.2)
    for p in m.parameters():
        p.data = p.data.to(dtype or torch.float32)
    return m


def weights(N=8, K=128, seed=0, spread=3.0):
    """Random weights whose blocks differ in size by several powers of two."""
    import torch

    g = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(N, K // 16, generator=g)).repeat_interleave(16, 1)
    return torch.randn(N, K, generator=g) * size * 0.02


def adapted(spread=0.05):
    """(the tiny model in NVFP4 whose adapter is away from zero by `spread`, its tokenizer, its optimizer)."""
    from plumbing.tokenizer import Tokenizer

    import torch

    import grpo
    import lora
    import model as qwen

    tok = Tokenizer(TINY)
    model = qwen.load(TINY, "cpu", torch.float32, "nvfp4")
    model.valid_vocab = len(tok)
    params = lora.add_lora(model, 4, 4)
    torch.manual_seed(0)
    for p in params:
        p.data.add_(spread * torch.randn_like(p))
    return model, tok, grpo.AdamW(params, 0.0)


def drawn(model, tok, n, **options):
    """Four completions of up to 40 tokens of each of n problems: a list of Completions."""
    import data
    import grpo
    import sample

    rows, _ = data.prompts(tok, data.load("arithmetic", "train", n=n))
    groups = sample.generate(model, [row["ids"] for row in rows], 4, 40, eos_ids=tok.eos_ids, **options)
    return [grpo.Completion(row, row["ids"], s.ids, s.logprobs, s.finished)
            for row, group in zip(rows, groups, strict=True) for s in group]


def rows_of(out):
    """The rows of a run's metrics.jsonl without what depends on the machine."""
    timing = ("seconds", "tok_s", "peak")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not any(t in k for t in timing)} for r in rows]


def parameters_of(out):
    """The trained parameters in a run's checkpoint."""
    import torch

    return torch.load(out / "checkpoint" / "state.pt", weights_only=True)["params"]
