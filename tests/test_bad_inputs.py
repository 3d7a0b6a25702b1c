"""Every command, given what it cannot take: exit code 2, one line on stderr that names the flag or the file, no traceback, nothing
left behind, and nothing of the user's touched.

A row is (command and its flags, what is spoiled beforehand, words of the line). The commands run in this process, in a folder
that holds a model, an adapter, a run and sets of data, all sound until a row spoils one of them."""
import gzip
import json
import os
import resource
import shlex
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import eval as evaluation
import lora
import model as qwen
import train
from lab import chat, convert, experiments, plot
from tests.conftest import exit_code

TINY = Path(__file__).resolve().parents[1] / "assets" / "tiny"
COMMANDS = {"train": train.main, "eval": evaluation.main, "sample": chat.main, "nvfp4": partial(convert.main, "quantize"),
            "lora": partial(convert.main, "merge"), "plot": plot.main, "experiments": experiments.main}
ROW = '{"question": "What is 1+1?", "answer": "2", "prompt": "What is 1+1?", "step": 0, "reward": 1.0}'


def sound_files(home):
    """A model, its adapter, data and a run's metrics, all as they should be."""
    shutil.copytree(TINY, home / "model", ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__"))
    m = qwen.load(TINY, dtype=torch.float32)
    lora.add_lora(m, 2, 2.0)
    lora.save_adapter(m, home / "adapter")
    (home / "adapter" / "policy.json").write_text('{"model": "tiny", "quant": "none"}')
    for name in ("d.jsonl", "c.jsonl"):
        (home / name).write_text((ROW + "\n") * 3)
    (home / "run").mkdir()
    (home / "run" / "metrics.jsonl").write_text((ROW + "\n") * 2)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """What the rows spoil copies of."""
    home = tmp_path_factory.mktemp("sound")
    sound_files(home)
    (home / "set").mkdir()
    for split in ("train", "test"):
        shutil.copy(home / "d.jsonl", home / "set" / f"{split}.jsonl")
    for name in ("run/config.json", "run/summary.json"):
        (home / name).write_text("{}")
    (home / "mine.txt").write_text("my own notes")
    return home


def seen(home):
    """What is there and when it was last written, in the order of the names."""
    found = {str(p.relative_to(home)): p.lstat() for p in sorted(home.rglob("*"))}
    return {name: (s.st_ino, s.st_mtime_ns, s.st_size) if stat.S_ISREG(s.st_mode) else s.st_mode for name, s in found.items()}


@pytest.fixture
def refused(sound, tmp_path, monkeypatch, capsys):
    """refused(command line, spoil, words): asserts all that the module's docstring says."""
    home = tmp_path / "home"
    shutil.copytree(sound, home, copy_function=os.link)
    monkeypatch.chdir(home)

    def check(line, spoil, words):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        spoil(home)
        before = seen(home)
        command, *argv = shlex.split(line)
        try:
            code = exit_code(COMMANDS[command], argv)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # or the tests' own log is a file too large
        err = capsys.readouterr().err.splitlines()
        assert code == 2 and len(err) == 1 and "error: " in err[0], (code, err[-3:])
        assert all(word in err[0] for word in words.split("|")), err[0]
        assert len(err[0]) < 400, "a line that is read"
        assert seen(home) == before

    return check


def nothing(home):
    pass


def write(path, content):
    """The files are links to those of `sound`, which must stay."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


# ---- JSON that is not what it should be, in every file that is read

BAD = {"list": "[1, 2]", "number": "1", "cut": '{"a": 1, "b', "digits": '{"a": %s}' % ("9" * 5000),
       "latin": b'{"a": "caf\xe9"}', "gzip": gzip.compress(b"{}"), "utf-16": '{"a": 1}'.encode("utf-16")}
READ = {  # file: the command that reads it
    "model/config.json": "sample --model model --prompt x --device cpu",
    "model/tokenizer_config.json": "eval --model model --data d.jsonl",
    "model/generation_config.json": "sample --model model --prompt x",
    "model/tokenizer.json": "sample --model model --prompt x",
    "model/model.safetensors.index.json": "nvfp4 --model model --out new",
    "plan/config.json": "nvfp4 --plan plan",
    "adapter/adapter_config.json": "lora --merge --model model --adapter adapter --out new",
    "adapter/policy.json": "sample --adapter adapter --prompt x",
    "d.jsonl": "train --data d.jsonl --out new",
    "set/test.jsonl": "eval --data set",
    "c.jsonl": "nvfp4 --model model --out new --awq --calib c.jsonl",
    "run/metrics.jsonl": "plot run",
    "run/summary.json": "plot run",
    "run/config.json": "plot run",
    "old/config.json": "train --resume --out old",
}
# a tokenizer is read by a library of its own, which takes numbers as they come
JSON = [(file, bad) for file in READ for bad in BAD if (file, bad) not in {("model/tokenizer.json", "digits")}]


@pytest.mark.parametrize(("file", "bad"), JSON)
def test_json_of_any_other_kind_is_named(refused, file, bad):
    """In each kind of file: a traceback, or a file that was read as if it were empty."""
    raw = BAD[bad] if isinstance(BAD[bad], bytes) else BAD[bad].encode()

    def spoil(home):
        write(home / file, raw + (b"\n" + ROW.encode() + b"\n" if file == "run/metrics.jsonl" and bad != "utf-16" else b""))

    refused(READ[file], spoil, file)


# ---- fields out of bounds


def config(name="model/config.json", **fields):
    def spoil(home):
        path = home / name
        old = json.loads(path.read_text()) if path.exists() and name.endswith("json") else {}
        write(path, json.dumps(old | fields) + "\n" + ("{}\n" if name.endswith("metrics.jsonl") else ""))

    return spoil


def tensors(change, name="model/model.safetensors"):
    def spoil(home):
        state = load_file(home / name)
        change(state)
        write(home / name, save(state))

    return spoil


def raw(name, content):
    return lambda home: write(home / name, content)


def template(text):
    return config("model/tokenizer_config.json", chat_template=text)


def put(key, value):
    return lambda state: state.__setitem__(key, value(state[key]))


ASK, TRAIN = "sample --model model --prompt x --device cpu", "train --data d.jsonl --out new"
Q, EMBED, NORM = "model.layers.1.self_attn.q_proj", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MERGE = "lora --merge --model model --adapter adapter --out new --device cpu"
INDEX = "model/model.safetensors.index.json"

FIELDS = [
    (ASK, lambda home: (config(eos_token_id=None)(home), config("model/generation_config.json", eos_token_id=None)(home),
                        config("model/tokenizer_config.json", eos_token=None)(home)), "needs an eos_token in tokenizer_config.json"),
    (ASK, config("model/tokenizer_config.json", chat_template=5), "tokenizer_config.json|chat_template"),
    (ASK, config("model/tokenizer_config.json", chat_template=[1, {"name": "default"}]), "tokenizer_config.json|chat_template"),
    (ASK, lambda home: (config(INDEX, weight_map={EMBED: "gone.safetensors"})(home), (home / "model" / "model.safetensors").unlink()),
     "gone.safetensors|download it again"),
    ("sample --adapter adapter --prompt x", config("adapter/policy.json", quant="fp3"), "policy.json|--quant"),
    ("sample --adapter adapter --prompt x", config("adapter/policy.json", model="\0"), "--model"),
    ("plot run", config("run/metrics.jsonl", reward=1), "metrics.jsonl, row 1|step"),
    ("train --resume --out old", config("old/config.json", lr=1e-5), "old/config.json|with other flags"),
    ("eval --data d.jsonl --out rows.jsonl", config("rows.jsonl", data="d", model="base", run="0"), "--out rows.jsonl"),
    # data: the file and the row
    ("train --data d.jsonl --out new", raw("d.jsonl", ROW + '\n{"question": 5, "answer": "1"}\n'), "d.jsonl, row 2"),
    ("train --data d.jsonl --out new", raw("d.jsonl", ROW + '\n{"question": "q", "answer": true}\n'), "d.jsonl, row 2"),
    ("train --data d.jsonl --out new", raw("d.jsonl", ROW + '\n{"question": "q", "answer": {"a": 1}}\n'), "d.jsonl, row 2"),
    ("train --data d.jsonl --out new", raw("d.jsonl", ROW.encode() + b'\n{"question": "\xff", "answer": "1"}\n'), "d.jsonl, row 2|UTF-8"),
    ("train --data d.jsonl --out new", raw("d.jsonl", ""), "d.jsonl|no rows"),
    ("train --data d.jsonl --out new", raw("d.jsonl", "\x00" * 1000), "d.jsonl, row 1"),
    ("train --data d.parquet --out new", raw("d.parquet", b"PAR1 no parquet PAR1"), "d.parquet|not a parquet file"),
    ("train --data d.parquet --out new", raw("d.parquet", b""), "d.parquet|not a parquet file"),
    ("train --data d.jsonl.gz --out new", raw("d.jsonl.gz", gzip.compress(ROW.encode())), "d.jsonl.gz, row 1|unpack it"),
    ("train --data d.jsonl --levels 3 --out new", nothing, "d.jsonl|--levels"),
    ("nvfp4 --model model --out new --awq --calib c.jsonl", raw("c.jsonl", '{"question": "q"}'), "c.jsonl, row 1"),
    ("nvfp4 --model model --out new --awq --calib c.txt", raw("c.txt", b"\xff\xfe"), "c.txt|UTF-8"),
    ("nvfp4 --model model --out new --awq --calib c.txt", raw("c.txt", "short"), "--calib c.txt|more text"),
    ("nvfp4 --model model --out new --awq --calib none.jsonl", nothing, "none.jsonl"),
    (ASK, lambda home: (config("model/tokenizer_config.json", chat_template=None)(home), raw("model/chat_template.jinja", b"\xff")(home)),
     "chat_template.jinja|UTF-8"),
    # chat templates
    (ASK, template("{{ raise_exception('no chat') }}"), "no chat"),
    # weights, on the way in: by sampling, evaluating, quantizing and merging
    (ASK, tensors(put(f"{Q}.weight", lambda t: t.to(torch.int8))), f"{Q}.weight|torch.int8"),
    (ASK, tensors(put(EMBED, lambda t: t > 0)), f"{EMBED}|torch.bool"),
    (ASK, tensors(put(NORM, lambda t: t.to(torch.complex64))), f"{NORM}|torch.complex64"),
    (ASK, tensors(put(f"{Q}.weight", lambda t: t.to(torch.float8_e4m3fn))), f"{Q}.weight|float8"),
    (MERGE, tensors(put(A, lambda t: t * torch.nan), "adapter/adapter_model.safetensors"), f"{A}|NaN"),
    (MERGE, tensors(put(A, lambda t: t.to(torch.int8)), "adapter/adapter_model.safetensors"), f"{A}|int8"),
    (MERGE, tensors(put(A, lambda t: t.to(torch.float8_e5m2)), "adapter/adapter_model.safetensors"), f"{A}|float8"),
    ("nvfp4 --model model --out new --device cpu", tensors(put(f"{Q}.weight", lambda t: t.to(torch.int8))), f"{Q}.weight|torch.int8"),
    (MERGE, raw("adapter/adapter_model.safetensors", b"\xff" * 100), "adapter_model.safetensors"),
    (ASK, raw("model/model.safetensors", b"\xff" * 100), "model.safetensors|download it again"),
    (ASK, raw("model/model.safetensors", b""), "model.safetensors|download it again"),
    (ASK, raw("model/tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}'), "tokenizer.json"),
]


@pytest.mark.parametrize(("line", "spoil", "words"), FIELDS)
def test_what_files_hold_is_checked(refused, line, spoil, words):
    refused(line, spoil, words)


# ---- flags


def folder(name):
    return lambda home: (home / name).mkdir(parents=True)


def limits(*flags):
    """Rows of one flag each: below, above, no number, NaN and infinity."""
    return [(f"{line} --{flag}={value}", nothing, f"--{flag}") for line, flag, values in flags for value in values.split()]


def pipe(home):
    os.mkfifo(home / "pipe")


FLAGS = limits(
    (TRAIN, "steps", "0 -1 1e3 999999999999 x"), (TRAIN, "lr", "-1 nan inf 1e9 x"), (TRAIN, "temperature", "0 nan 1e9"),
    (TRAIN, "group-size", "1 1000000000"), (TRAIN, "prompts-per-step", "0 1000000000"), (TRAIN, "lora-rank", "-1 100000000"),
    (TRAIN, "lora-alpha", "0 nan inf"), (TRAIN, "max-new-tokens", "0 99999999999"), (TRAIN, "max-prompt", "0 1.5"),
    (TRAIN, "seed", "-1 99999999999999999999"), (TRAIN, "aqn-start", "-1 nan inf 1e9 0"), (TRAIN, "engine", "x"),
    (TRAIN, "eps-high", "-1 nan"), (TRAIN, "beta", "-1 nan inf"),
    (TRAIN, "grad-clip", "-1 0 nan"), (TRAIN, "micro-batch-tokens", "-1 1e5"), (TRAIN, "save-every", "0"),
    (TRAIN, "eval-n", "-1 999999999"), (TRAIN, "max-rows", "0 99999999"), (TRAIN, "card-share", "0 1.0000005 nan"), (TRAIN, "levels", "0 x 3,,4"), (TRAIN, "device", "tpu"),
    ("eval --data d.jsonl", "n", "0 -1 99999999 x"), ("eval --data d.jsonl", "limit", "0 -5 99999999999"),
    ("eval --data d.jsonl", "temperature", "-1 nan inf"), ("eval --data d.jsonl", "top-p", "0 1.0000005 nan"),
    ("eval --data d.jsonl", "k", "0 8 1,x"), ("eval --data d.jsonl", "device", "gpu"),
    ("sample --prompt x", "temperature", "nan -1"), ("sample --prompt x", "max-new-tokens", "0"),
    ("nvfp4 --plan model", "rank", "0 1000000000 x"), ("nvfp4 --plan model", "tokens", "0 -1 99999999999"),
    ("nvfp4 --model model --out new", "device", "tpu"),
)
OTHERS = [
    ("eval --data arithmetic --limit 99999999", nothing, "arithmetic|100000"),
    ("eval --data ''", nothing, "--data: is empty"),
    ("eval --data set,nowhere", nothing, "--data nowhere"),
    ("train --data bigmath --out new", nothing, "--levels"),
    ("train --data bigmath --levels 1,2 --out new", nothing, "--levels"),
    ("eval --data bigmath --levels 3,4,5", nothing, "bigmath has no test split"),
    ("train --data only --out new --eval-n 1", raw("only/train.jsonl", ROW), "--eval-n 0"),
    ("train --no-such-flag --out new", nothing, "--no-such-flag"),
    (f"{TRAIN} --updates-per-rollout 99", nothing, "--updates-per-rollout"),
    ("train --data arithmetic --out new --max-prompt 2", nothing, "--max-prompt 2"),
    (f"{TRAIN} --quant int3", nothing, "--quant"),
    (f"{TRAIN} --dtype float16", nothing, "--dtype"),
    (f"{TRAIN} --beta 0.1 --quant none --lora-rank 0", nothing, "--beta"),
    ("train --data arithmetic --out new --engine fast --device cpu", nothing,
     "--engine fast: the model is not on a CUDA device; take --engine auto or plain"),
    ("train --step 4 --out new", nothing, "--step"),
    ("train --reward mine.txt:f --out new", nothing, "--reward"),
    ("sample --run mine.txt --prompt x", nothing, "--run"),
    ("sample --run run --adapter adapter --prompt x", nothing, "--adapter"),
    ("nvfp4", nothing, "--model --plan is required"),
    ("nvfp4 --model model", nothing, "--out"),
    ("nvfp4 --plan model --out new", nothing, "--out: name the folder to write; beside --plan, which only prints, leave it out"),
    ("nvfp4 --model model --plan model", nothing, "not allowed with argument --model"),
    ("nvfp4 --model model --out new --calib c.jsonl", nothing, "--calib: plain rounding uses no text; add --awq"),
    ("nvfp4 --model mine.txt --out new", nothing, "--model mine.txt"),
    ("nvfp4 --plan mine.txt", nothing, "mine.txt"),
    ("lora --merge --model model --adapter run --out new", nothing, "--adapter run"),
    ("eval --data d.jsonl --adapter run", folder("run/adapter_best"), "--adapter run: adapter_config.json"),
    (MERGE, raw("adapter/policy.json", '{"model": "other", "quant": "none", "base": "0"}'), "--model model|another base, other"),
    ("lora --model model --adapter adapter --out new", nothing, "the following arguments are required: --merge"),
    ("lora --merge --model nowhere --adapter adapter --out new", nothing, "--model nowhere: no such folder"),
    ("lora --merge --model model --adapter nowhere --out new", nothing, "--adapter nowhere: adapter_config.json is missing"),
    (MERGE, lambda home: (home / "adapter" / "adapter_model.safetensors").unlink(), "--adapter adapter: adapter_model.safetensors is missing"),
    ("sample --model no/such-folder-here/at-all --prompt x", nothing, "--model no/such-folder-here/at-all"),
    ("sample --model ./org/name --prompt x", nothing, "--model ./org/name: no such folder; give a checkpoint folder or a hub id"),
    ("sample --model set --prompt x", nothing, "set/config.json"),
    ("sample --prompt x --max-new-tokens 999 --device cpu", nothing, "positions"),
    ("train --reward none.py:score --out new", nothing, "none.py: No such file or directory"),
    ("train --reward own.py --out new", nothing, "want file.py:function"),
    ("train --reward own.py:score --out new", raw("own.py", "def other(): 0"), "own.py: has no function score; define score(text, row)"),
    ("train --reward own.py:score --out new", raw("own.py", "score = 1"), "own.py: has no function score"),
    ("eval --data arithmetic --levels 3", nothing, "--levels: the problems of --data arithmetic"),
    ("plot", nothing, "RUN"),
    ("plot nowhere", nothing, "nowhere: no such folder"),
    ("plot set", nothing, "set/metrics.jsonl"),
    ("plot run", raw("run/metrics.jsonl", ""), "no complete row"),
    ("plot run --out x.docx", nothing, "docx"),
    ("experiments", nothing, "what, RUN"),
    # --out: refused before the work, and what is there stays
    ("train --data d.jsonl --out mine.txt", nothing, "--out mine.txt"),
    ("train --data d.jsonl --out mine.txt/x", nothing, "--out mine.txt/x"),
    ("train --data d.jsonl --out model", nothing, "--out model|choose a new"),
    ("train --data d.jsonl --out .", nothing, "--out .|choose a new"),
    ("train --resume --out nowhere", nothing, "--resume"),
    ("train --data d.jsonl --out begun", lambda home: (folder("begun/checkpoint")(home), raw("begun/checkpoint/state.pt", "x")(home)), "--out begun|--resume"),
    ("eval --data d.jsonl --out set", nothing, "--out set"),
    ("eval --data d.jsonl --out no/where.jsonl", nothing, "--out no/where.jsonl"),
    ("eval --data d.jsonl --out mine.txt", nothing, "mine.txt"),
    ("eval --data d.jsonl --out d.jsonl", nothing, "--out d.jsonl"),
    ("nvfp4 --model model --out run", nothing, "--out run|exists"),
    ("nvfp4 --model model --out mine.txt", nothing, "--out mine.txt"),
    ("nvfp4 --model model --out mine.txt/x", nothing, "--out mine.txt/x"),
    ("lora --merge --model model --adapter adapter --out mine.txt/x", nothing, "--out mine.txt/x"),
    ("lora --merge --model model --adapter adapter --out set", nothing, "--out set|exists"),
    ("plot run --out set", nothing, "--out set"),
    ("plot run --out pipe", pipe, "--out pipe: is a device or a pipe"),
    ("eval --data d.jsonl --out pipe", pipe, "--out pipe: is a device or a pipe"),
    ("train --data d.jsonl --out pipe", pipe, "--out pipe: is a device or a pipe"),
    ("plot run --out no/where.png", nothing, "--out no/where.png"),
]


@pytest.mark.parametrize(("line", "spoil", "words"), FLAGS + OTHERS)
def test_flags_and_places_are_checked_before_the_work(refused, line, spoil, words):
    refused(line, spoil, words)


# ---- a full disk


def full_disk(n):
    """No file may become larger than n bytes until the command has ended. The next best thing to a disk of that size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize(("line", "room", "words"), [
    ("nvfp4 --model model --out new --device cpu", 50_000, "cannot be written"),
    (MERGE, 50_000, "cannot be written"),
    ("eval --data d.jsonl --out new.jsonl --n 1 --max-new-tokens 2 --quant none", 100, "new.jsonl: cannot be written"),
    ("plot run", 1000, "compare.png: cannot be written"),
])
def test_a_full_disk_is_one_line_and_leaves_nothing(refused, line, room, words):
    """X.partial and a traceback were left, of hours of work."""
    refused(line, lambda home: full_disk(room), words)


def test_names_that_are_the_users_are_never_touched(sound, tmp_path, monkeypatch, capsys):
    """merge and quantize deleted X.partial, eval wrote over X.part and X.tmp."""
    home = tmp_path / "home"
    shutil.copytree(sound, home)
    monkeypatch.chdir(home)
    mine = {f"{name}{end}": f"mine: {name}{end}" for name in ("new", "out.jsonl", "c.png") for end in (".partial", ".part", ".tmp")}
    for name, text in mine.items():
        Path(name).write_text(text)
    for line in ("nvfp4 --model model --out new --device cpu", "plot run --out c.png"):
        command, *argv = shlex.split(line)
        assert not exit_code(COMMANDS[command], argv), capsys.readouterr().err
    shutil.rmtree("new")
    assert not exit_code(COMMANDS["lora"], shlex.split(MERGE)[1:])
    assert not exit_code(COMMANDS["eval"], shlex.split("--data d.jsonl --out out.jsonl --n 1 --max-new-tokens 1"))
    assert {name: Path(name).read_text() for name in mine} == mine
    assert not [p for p in home.rglob("*") if p.name.startswith(".")]


def test_the_fuzzer_starts():
    """What it takes from here was renamed, and nobody noticed."""
    done = subprocess.run([sys.executable, "tests/fuzz.py", "--case", "3"], cwd=TINY.parents[1], capture_output=True, text=True)
    assert done.stdout.startswith("1 cases of seed 0, 0 finds"), done.stderr
