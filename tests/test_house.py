"""The house: which file imports which, and that the kernels alone need Triton."""
import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import walk

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(".".join(f.relative_to(ROOT).with_suffix("").parts)
               for pattern in ("*.py", "weights/*.py", "runtime/*.py") for f in ROOT.glob(pattern)
               if f.stem != "__init__")


@functools.cache
def imported(name):
    """(modules that `name` imports anywhere, those it imports when it is imported itself).

    Not counted: what only runs as a command (`if __name__`), and the door model.load."""
    body = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text()).body
    body = [n for n in body if not (isinstance(n, ast.If) and "__name__" in ast.unparse(n.test))]
    if name == "model":
        body = [n for n in body if getattr(n, "name", None) != "load"]
    found = [set(), set()]
    for top in body:
        for node in ast.walk(top):
            modules = []
            if isinstance(node, ast.Import):
                modules = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            found[0].update(modules)
            found[1].update(modules if node is top else [])
    return found


def reachable(name):
    seen, todo = set(), [name]
    while todo:
        new = (imported(todo.pop())[0] & set(NAMES)) - seen
        seen |= new
        todo += new
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_arrows_only_run_down(name):
    """Six files once imported each other in a circle: none could be read, or imported, alone."""
    assert name not in reachable(name), [n for n in reachable(name) if name in reachable(n)]


def test_the_graph_is_what_the_files_say():
    """A graph that missed lazy imports or packages would have no circle either."""
    assert {"runtime.decode", "weights.memory", "model"} <= imported("runtime.engine")[0]
    assert "runtime.decode" not in imported("runtime.engine")[1]
    assert "marlin_triton" in imported("nvfp4")[0] - imported("nvfp4")[1]
    assert {"weights.formats", "weights.files"} <= imported("weights.checkpoint")[1]


def test_the_plain_model_imports_nothing_of_ours():
    assert not imported("model")[0] & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_alone_import_triton(name):
    """Where Triton is not installed, one import of it at the top of any file stops every command."""
    ours = {"marlin_triton", "runtime.attention", "runtime.bits", "runtime.decode", "runtime.packed"}
    if name not in ours | {"bench"}:  # bench.py measures the kernels
        assert not {m for m in imported(name)[0] if m and m.split(".")[0] == "triton"}
        assert not imported(name)[1] & ours


def test_the_project_runs_without_triton():
    """Files, formats, a quantized model with LoRA and sampling, in a process that cannot import it."""
    r = subprocess.run([sys.executable, "tests/no_triton.py"], cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


def test_the_walk_prints_what_it_promises(capsys):
    """From text to a gradient on B: a renamed function would leave readers with a traceback."""
    walk.main()
    out = capsys.readouterr().out
    assert all(f"{i}. " in out for i in range(1, 8)) and "B moved by at most 2.0e-03" in out  # Adam's first step is the learning rate
