"""The house: which file imports which, that the kernels alone need Triton, and what README.md says of files and defaults."""
import ast
import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

from plumbing import flags

import pytest

import data
import grpo
import walk

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(".".join(f.relative_to(ROOT).with_suffix("").parts)
               for pattern in ("*.py", "fast/*.py", "plumbing/*.py", "lab/*.py") for f in ROOT.glob(pattern)
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
    assert {"fast.decode", "fast.memory", "model"} <= imported("fast.engine")[0]
    assert "fast.decode" not in imported("fast.engine")[1]
    assert "marlin_triton" in imported("nvfp4")[0] - imported("nvfp4")[1]
    assert {"plumbing.formats", "plumbing.files"} <= imported("plumbing.checkpoint")[1]


def test_the_plain_model_imports_nothing_of_ours():
    assert not imported("model")[0] & set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_alone_import_triton(name):
    """Where Triton is not installed, one import of it at the top of any file stops every command."""
    ours = {"marlin_triton", "fast.adapter", "fast.attention", "fast.bits", "fast.decode", "fast.fused", "fast.packed"}
    if name not in ours | {"lab.bench", "lab.bench_tiles"}:  # which measure the kernels
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


@pytest.mark.parametrize(("words", "says"), [
    (["What is 1+1?"], "a question and its answer"), ("What is 1+1? 2".split(), "a question and its answer"),
    (["1+1? " * 400, "2"], "pass the model's 512 positions")], ids=["alone", "bare", "long"])
def test_the_walk_takes_a_question_and_its_answer(monkeypatch, capsys, words, says):
    """Another question was graded by the first one's answer; without quotes "What" was asked, and "is" was right; a long one
    was a traceback."""
    monkeypatch.setattr(sys, "argv", ["walk.py", *words])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(ROOT / "walk.py"), run_name="__main__")
    assert says in f"{e.value} {capsys.readouterr().err}"


def section(title):
    """A section of README.md."""
    return (ROOT / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_readme_counts_lines():
    """Its list is read before any file is opened; a file that is not in it is not found."""
    said, folder = {}, ""
    for indent, name, count in re.findall(r"(?m)^( *)([\w./]+) +([0-9]*)", section("Files").split("```")[1]):
        folder = folder if indent else name
        if count:
            said[folder + name if indent else name] = int(count)
    wrong = []
    for name in dict.fromkeys([*said, *(f"{module.replace('.', '/')}.py" for module in NAMES)]):
        files = (ROOT / name).glob("*.py") if name.endswith("/") else [ROOT / name]
        lines = sum(f.read_text().count("\n") for f in files if f.is_file())
        if said.get(name) != lines:
            wrong.append(f"{name}: README says {said.get(name, 'nothing')}, is {lines}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_results_stay_small():
    """84 MB in 4,835 files, and a log of 155 KB that nobody read to its end."""
    files = [f for f in (ROOT / "results").rglob("*") if f.is_file()]
    pictures = [f.stat().st_size for f in files if f.suffix == ".png"]
    assert sum(f.stat().st_size for f in files) < 3e6 and len(files) < 40 and len(pictures) <= 6 and max(pictures) < 150e3
    for name, most in (("results/LOG.md", 300), ("docs/claims.md", 250), ("docs/measured.md", 110)):
        lines = (ROOT / name).read_text().splitlines()
        assert len(lines) <= most and max(map(len, lines)) <= 160, name


@pytest.mark.parametrize("name", ["README.md", "docs/claims.md", "docs/measured.md", "docs/noise.md", "results/LOG.md"])
def test_what_is_linked_to_is_there(name):
    """A figure whose rows were moved or renamed."""
    links = re.findall(r"\]\((?!http|#)([^)#]+)", (ROOT / name).read_text())
    assert links and not [link for link in links if not ((ROOT / name).parent / link).exists()]


def test_defaults_are_what_the_readme_says():
    """Its table of differences from the paper, row by row; what is not in the table is the paper's own."""
    first = next(part for part in section("Defaults, beside the paper's").split("\n\n") if part.lstrip().startswith("|"))
    table = [line.strip("|").split("|") for line in first.splitlines() if line.startswith("| ")]
    here, why = ({row[0].strip(): row[column].strip() for row in table[1:]} for column in (2, 3))
    args, demo = flags.parse("train", ["--model", "m"]), flags.parse("train", [])
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
    paper = {"quant": "nvfp4", "lr": 1e-5, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "warmup": 0.1, "grad_clip": 0.2,
             "prompts_per_step": 16, "group_size": 8, "max_prompt": 256, "temperature": 1.0, "loss": "grpo", "beta": 0.0,
             "eps_low": None, "eps_high": None, "dynamic_sampling": False, "aqn_stages": 10, "aqn_schedule": "exponential",
             "eval_temperature": 0.6, "eval_top_p": 0.95, "steps": None, "lora_alpha": 32.0, "tis_cap": 2.0, "aqn_scope": "rollout",
             "eval_n": 1, "eval_every": 0, "eval_limit": None, "overlong_buffer": 512, "max_resample": 2, "spare_prompts": 0, "card_share": 1.0, "seed": 0}
    assert {name: getattr(args, name) for name in paper} == paper
