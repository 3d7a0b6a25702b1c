"""
Damaged checkpoints, adapters, data and runs, at random, for as long as one likes.

Each case takes something sound (a model, an adapter, rows, a run's files), damages it
in a way drawn from (seed, case), and gives it to a command: files are cut, mixed up or of another
kind, tensors miss or have other shapes, rows that people write have any fields. The fields that
tools write into JSON (config.json, say) are not checked one by one, and not damaged here. What may come back: exit code 0, or 2
and one line that names the file; a traceback, another code, a line that names nothing, something
left behind, or a case that does not end in time is a find, printed with the seed that repeats it.

    python tests/fuzz.py --minutes 10
    python tests/fuzz.py --seed 7 --case 123     # one again
"""
import argparse
import contextlib
import gzip
import io
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from plumbing.command import number  # noqa: E402

from safetensors.torch import load, load_file, save  # noqa: E402

from tests.test_bad_inputs import COMMANDS, seen, sound_files  # noqa: E402

DEEP = "[" * 100_000 + "]" * 100_000
SLOW, LATE = 10.0, 60.0  # seconds of processor time here, and of the clock, that no case may take
FILES = {  # what is damaged, and a command that reads it
    "model/config.json": "sample --model model --prompt x --max-new-tokens 2 --device cpu",
    "model/tokenizer.json": "sample --model model --prompt 1+1 --max-new-tokens 1 --device cpu",
    "model/tokenizer_config.json": "sample --model model --prompt 1+1 --max-new-tokens 1 --device cpu",
    "model/generation_config.json": "sample --model model --prompt x --max-new-tokens 2 --device cpu",
    "model/model.safetensors": "nvfp4 --model model --out new --device cpu",
    "model/model.safetensors.index.json": "sample --model model --prompt x --max-new-tokens 2 --device cpu",
    "adapter/adapter_config.json": "lora --merge --model model --adapter adapter --out new --device cpu",
    "adapter/adapter_model.safetensors": "lora --merge --model model --adapter adapter --out new --device cpu",
    "adapter/policy.json": "sample --adapter adapter --prompt x --max-new-tokens 2 --device cpu",
    "d.jsonl": "eval --model model --data d.jsonl --n 1 --max-new-tokens 1 --device cpu",
    "c.jsonl": "nvfp4 --model model --out new --device cpu --awq --calib c.jsonl",
    "run/metrics.jsonl": "plot run", "run/config.json": "plot run", "run/summary.json": "plot run",
}
VALUES = (None, True, False, 0, 1, -1, 2, 3, 33, 2**31, 2**63, 10**400, -10**400, 0.5, 1e-300, 1e300, "", "1", "x", "../x", "/x",
          "\x00", "é" * 300, [], [1], [[]], {}, {"a": 1}, [None], "x" * 10**5, float("nan"), float("inf"))


def sound(home):
    """What is damaged: sound_files, a run's flags and summary, and an index of the weights."""
    sound_files(home)
    for name in ("config", "summary"):
        (home / "run" / f"{name}.json").write_text('{"seed": 0, "accuracy_before": 0.5}')
    names = load_file(home / "model" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (home / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def damaged_json(rng, text):
    """A field, at any depth, becomes something else, appears or goes."""
    try:
        top = json.loads(text)
    except ValueError:
        return text
    at = top
    while isinstance(at, dict | list) and at:
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.4:
            break
        at = at[key]
    if not isinstance(at, dict | list) or not at:
        return json.dumps(rng.choice(VALUES))
    kind = rng.randrange(4)
    if kind == 0:
        at.pop(key)
    elif kind == 1 and isinstance(at, dict):
        at["".join(rng.choices("abc_", k=5))] = rng.choice(VALUES)
    elif isinstance(at[key], int) and not isinstance(at[key], bool) and kind == 2:
        at[key] = rng.choice((at[key] + rng.randint(-2, 2), at[key] * 2**rng.randint(1, 40), -at[key]))
    else:
        at[key] = rng.choice(VALUES)
    return json.dumps(top)


def damaged_bytes(rng, raw, single):
    """Cut, of another kind, or longer; with `single` perhaps only some of its bytes are others."""
    kind = rng.randrange(7 if single else 4)
    if kind == 0:
        return raw[: rng.randrange(len(raw) + 1)]
    if kind == 1:
        return gzip.compress(raw[:1000])
    if kind == 2:
        return rng.randbytes(rng.randrange(200))
    if kind == 3:
        return DEEP.encode() if rng.random() < 0.5 else raw + DEEP.encode()
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 3, 30))):
        at = rng.randrange(len(out) if kind == 4 else min(len(out), 300))  # a header matters more than the rest
        if kind == 6:
            out[at:at] = rng.randbytes(rng.randint(1, 4))
        else:
            out[at] = rng.randrange(256)
    return bytes(out)


def damaged_tensors(rng, raw):
    state = load(raw)
    name = rng.choice(sorted(state))
    t = state[name].clone()
    kind = rng.randrange(3)
    if kind == 0:
        t = t[..., : max(1, t.shape[-1] // 2)].contiguous()
    elif kind == 1:
        t = t[None]
    state.pop(name) if kind == 2 else state.__setitem__(name, t)
    return save(state)


def damage(rng, path):
    raw = path.read_bytes()
    if path.suffix == ".safetensors" and rng.random() < 0.7:
        new = damaged_tensors(rng, raw)
    elif path.name in ("c.jsonl", "d.jsonl") and rng.random() < 0.7:
        lines = raw.decode().splitlines(True)
        n = rng.randrange(len(lines))
        lines[n] = damaged_json(rng, lines[n]) + "\n"
        new = "".join(lines).encode()
    else:
        new = damaged_bytes(rng, raw, path.suffix != ".json")
    path.unlink()
    path.write_bytes(new)


def loader(rng, home):
    """One command over one damaged file; what is wrong with how it ended, or None."""
    file, line = rng.choice(list(FILES.items()))
    if "index" not in file:
        (home / "model" / "model.safetensors.index.json").unlink()
    damage(rng, home / file)
    before = seen(home)
    name, *argv = shlex.split(line)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = COMMANDS[name](argv) or 0
    except SystemExit as e:
        code = e.code
    told = err.getvalue().splitlines()
    if code not in (0, 2):
        return f"{file}: exit code {code}"
    if code == 2 and (len(told) != 1 or len(told[0]) > 600):
        return f"{file}: {len(told)} lines: {told[-1:]}"
    if code == 2 and not any(part in told[0] for part in (*file.split("/"), "model", "--", "name too long")):
        return f"{file}: the line names nothing: {told[0]}"
    if code == 2 and seen(home) != before:
        return f"{file}: left behind {set(seen(home)) ^ set(before)}"
    return None


def case(seed, number, base):
    """What is wrong in one case, or None."""
    rng = random.Random(f"{seed}/{number}")
    home = base.with_name("case")
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(base, home, copy_function=os.link)
    os.chdir(home)
    begin, used = time.time(), time.process_time()
    try:
        problem = loader(rng, home)
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        problem = f"{type(e).__name__}: {str(e)[:200]}\n{traceback.format_exc()[-1500:]}"
    seconds, used = time.time() - begin, time.process_time() - used
    return problem or (f"took {seconds:.1f} s ({used:.1f} here)" if used > SLOW or seconds > LATE else None)


def main():
    p = argparse.ArgumentParser(description="Fuzz of the loaders.", allow_abbrev=False)
    p.add_argument("--minutes", type=number(0, 1e5, float), default=1.0, help="how long")
    p.add_argument("--seed", type=number(0, 2**63 - 1), default=0, help="of all cases")
    p.add_argument("--case", type=number(0, 2**63 - 1), help="this one alone")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    finds, begin, at = 0, time.time(), args.case or 0
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary, "sound")
        base.mkdir()
        sound(base)
        while time.time() - begin < 60 * args.minutes:
            if problem := case(args.seed, at, base):
                finds += 1
                print(f"--seed {args.seed} --case {at}: {problem}", flush=True)
            at += 1
            if args.case is not None:
                break
        os.chdir(ROOT)
    print(f"{at - (args.case or 0)} cases of seed {args.seed}, {finds} finds, {time.time() - begin:.0f} s")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
