"""The house: which file imports which, that the kernels alone need Triton, and what README.md says of files and defaults."""
import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from plumbing import flags

import pytest

import data
import grpo
import train
import walk

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fast", "plumbing", "lab")
GROUND = {"train", "grpo", "aqn", "sample", "model", "lora", "nvfp4", "marlin_triton", "eval", "data", "walk"}
FILES = {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
         for pattern in ("*.py", *(f"{folder}/*.py" for folder in FOLDERS)) for f in sorted(ROOT.glob(pattern))}


def folder(name):
    """The room of a file; the ground floor is ""."""
    return name.split(".")[0] if name.split(".")[0] in FOLDERS else ""


@functools.cache
def imported(name):
    """(files of ours that `name` imports anywhere, in functions and `if __name__` blocks too; all modules that it imports when it is
    imported itself)."""
    tree = ast.parse(FILES[name].read_text())
    found, at_once = set(), set()
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [f"{node.module}.{a.name}" for a in node.names]
            modules = [part if part in FILES else node.module for part in parts]
        found.update(m for m in modules if m in FILES)
        at_once.update(modules if node in tree.body else [])
    return found - {name}, at_once


def circles(arrows):
    """The names that reach themselves."""
    def reachable(start):
        seen, todo = set(), [start]
        while todo:
            new = arrows[todo.pop()] - seen
            seen |= new
            todo += new
        return seen
    return sorted(name for name in arrows if name in reachable(name))


def test_no_file_reaches_itself():
    """Sixteen files once imported each other in a circle through three imports inside functions: none could be read, or deleted, alone."""
    assert not circles({name: imported(name)[0] for name in FILES})


def test_arrows_between_rooms_run_down():
    """A utility that imported the method could not be skipped; a method that imported its fast twin could not be read alone."""
    arrows = {(folder(name), folder(other)): (name, other) for name in FILES for other in imported(name)[0]
              if folder(name) != folder(other)}
    lines = {arrow for arrow in ((name, other) for name in FILES for other in imported(name)[0]) if folder(arrow[0]) == "" and
             folder(arrow[1]) == "fast"}
    assert lines == {("sample", "fast")}  # the one that installs it
    assert {*arrows} <= {("", "plumbing"), ("", "fast"), ("fast", ""), ("fast", "plumbing"), ("lab", ""), ("lab", "plumbing"),
                         ("lab", "fast")}, arrows


def test_the_graph_is_what_the_files_say():
    """A graph that missed lazy imports or packages would have no circle either."""
    assert {"fast.decode", "fast.memory", "model"} <= imported("fast.engine")[0]
    assert "fast.engine" in imported("fast")[0] and "fast.engine" not in imported("fast")[1]
    assert "marlin_triton" in imported("nvfp4")[0] - imported("nvfp4")[1]
    assert {"plumbing.config", "plumbing.files"} <= imported("plumbing.checkpoint")[0]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_the_ground_floor_is_eleven_files_and_no_file_is_long():
    """The method was a fifth of twelve thousand lines, and a reader opened eighteen files to follow one token."""
    assert {name for name in FILES if not folder(name)} == GROUND
    assert not [name for name, f in FILES.items() if f.read_text().count("\n") > 560]


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_first_code_of_a_file_is_its_subject(name):
    """A workaround above the first line of thirteen files was what a reader met first."""
    assert "isort: skip" not in FILES[name].read_text()
    assert ast.get_docstring(ast.parse(FILES[name].read_text()))


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_kernels_alone_import_triton(name):
    """Where Triton is not installed, one import of it at the top of any file stops every command."""
    ours = {"marlin_triton", "fast.adapter", "fast.attention", "fast.batches", "fast.bits", "fast.compiling", "fast.decode", "fast.draw", "fast.engine",
            "fast.gemm", "fast.linears", "fast.logprobs", "fast.packed", "fast.scheduler"}
    if name not in ours | {"lab.bench"}:  # which measures the kernels
        assert not {m for m in imported(name)[1] if m and m.split(".")[0] == "triton"}
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
    assert "  1 1 1 1 " not in out.split("ratio to the sampler")[1]  # which was noisy


@pytest.mark.parametrize("signature", """\
model.load path_or_hub_id device dtype quant
nvfp4.quantize w fmt
nvfp4.dequantize q
marlin_triton.matmul x q
lora.add_lora model rank alpha
lora.save_adapter model folder
lora.load_adapter model folder
aqn.sigma step total_steps start end stages schedule
aqn.set_noise model sigma seed
sample.generate model prompts n max_new_tokens temperature top_p eos_ids seed
grpo.advantages rewards scale
grpo.policy_loss logp old_logp advantages mask loss eps_low eps_high
data.load name split
data.reward text answer
fast.install model""".splitlines())
def test_other_peoples_scripts_find_what_they_call(signature):
    """nvfp4.dequantize was gone for a day, since nothing here called it."""
    name, *arguments = signature.split()
    module, function = name.split(".")
    found = list(inspect.signature(getattr(importlib.import_module(module), function)).parameters)
    assert found[: len(arguments)] == arguments


def section(file, title):
    return (ROOT / file).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_readme_counts_lines():
    """Its list is read before any file is opened; a file that is not in it is not found."""
    said = {name: int(count) for name, count in re.findall(r"(?m)^([\w./]+) +([0-9]+) ", section("README.md", "Files").split("```")[1])}
    found = {FILES[name].name: FILES[name].read_text().count("\n") for name in GROUND}
    for room in FOLDERS:
        found[f"{room}/"] = sum(f.read_text().count("\n") for f in (ROOT / room).rglob("*.py"))
    assert said == found


def test_the_readme_is_short():
    """It had grown to 5,959 words, with the algorithm at line 135."""
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 10_000 and text.count("\n") <= 160 and max(map(len, text.splitlines())) < 160


def test_dependencies_are_declared_once_each():
    """requirements.txt pins what was tested last; pyproject.toml has ranges, so that uv finds a PyTorch for older drivers."""
    pinned = {re.split("[=;]", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {re.split("[=;<>! ]", line)[0] for line in ranges} == pinned


def test_results_stay_small():
    """84 MB in 4,835 files, and a log of 155 KB that nobody read to its end."""
    files = [f for f in (ROOT / "results").rglob("*") if f.is_file()]
    pictures = [f.stat().st_size for f in files if f.suffix == ".png"]
    assert sum(f.stat().st_size for f in files) < 3e6 and len(files) < 40 and len(pictures) <= 6 and max(pictures) < 150e3
    for name, most in (("results/LOG.md", 300), ("docs/claims.md", 250), ("docs/measured.md", 145)):
        lines = (ROOT / name).read_text().splitlines()
        assert len(lines) <= most and max(map(len, lines)) <= 160, name


@pytest.mark.parametrize("name", ["README.md", "docs/claims.md", "docs/guide.md", "docs/measured.md", "docs/noise.md", "results/LOG.md"])
def test_what_is_linked_to_is_there(name):
    """A figure whose rows were moved or renamed."""
    links = re.findall(r"\]\((?!http|#)([^)#]+)", (ROOT / name).read_text())
    assert links and not [link for link in links if not ((ROOT / name).parent / link).exists()]


def test_each_row_of_the_guides_formats_names_its_tests():
    """What is said to be read is held by a test."""
    rows = [line for line in section("docs/guide.md", "Checkpoints and adapters").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for row in rows:
        file, names = row.strip("| ").rpartition("| ")[2].split("::")
        text = (ROOT / "tests" / file).read_text()
        assert all(f"def {name}(" in text for name in names.split(", ")), row


def test_defaults_are_what_the_guide_says():
    """Its table of differences from the paper, row by row; test_flags.py has the rest."""
    first = next(part for part in section("docs/guide.md", "Defaults, beside the paper's").split("\n\n") if part.lstrip().startswith("|"))
    table = [line.strip("|").split("|") for line in first.splitlines() if line.startswith("| ")]
    here, why = ({row[0].strip(): row[column].strip() for row in table[1:]} for column in (2, 3))
    args, demo = flags.parse(train.COMMAND, ["--model", "m"]), flags.parse(train.COMMAND, [])
    right, formed = (data.reward(text, "1")["reward"] for text in ("<answer>1</answer>", "<think></think><answer>2</answer>"))
    numbers = {"updates a rollout": [args.updates_per_rollout], "reward, GSM8K": [right, formed],
               "noise": [args.aqn_start, args.aqn_end], "learning rate": [args.lr], "completion length": [args.max_new_tokens],
               "clip": [x for loss in ("grpo", "dapo", "gspo") for x in grpo.OBJECTIVES[loss].clip]}
    words = {"updates a rollout": "quarter", "pi_old": f"the {args.old_logp}'s", "noise": ", applied", "rounding": "plain;",
             "trained beside LoRA": "LoRA alone", "optimizer": "AdamW in float32", "prompt": f"(`--prompt-style {args.prompt_style}`)",
             "overlong completions": "graded as they are; the demo masks"}
    assert (args.aqn, args.awq, args.overlong, demo.overlong) == (True, False, "none", "mask")
    assert {*numbers, *words} == {*here}  # a new row needs a line here
    for name, values in numbers.items():
        found = re.findall(r"[0-9][0-9,]*(?:\.[0-9]+)?(?:e-[0-9]+)?", here[name])
        assert [float(x.replace(",", "")) for x in found] == values, name
    assert not [name for name, word in words.items() if word not in here[name]]
    assert f"rank {args.lora_rank}" in why["optimizer"]
    assert len(train.COMMAND.flags) <= 45
