"""Kills, signals and a closed stdout at any moment: a run that goes on afterwards ends with the same bits, a command that does not
leaves one line and nothing else. Runs are forked, since torch takes seconds to import."""
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from plumbing import checkpoint, command, curves
from plumbing.files import whole

import pytest
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import eval as evaluation
import grpo
import model as qwen
import train
from lab import convert
from tests.conftest import rows_of

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--steps", "3", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--lora-rank", "2", "--eval-n", "0",
        "--save-every", "1", "--device", "cpu", "--updates-per-rollout", "2", "--checkpointing", "off", "--lr", "1e-2"]


@pytest.fixture(scope="module", autouse=True)
def quick():
    """No pictures, and no waiting for the disk: what a process has written outlives it. tqdm's lock is one for all processes
    that are forked: killed while it holds it, a run would stop every other."""
    tqdm.set_lock(threading.RLock())
    with pytest.MonkeyPatch.context() as m:
        m.setattr(curves, "draw", lambda lines, out: out.touch())
        m.setattr(os, "fsync", lambda f: None)
        yield


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """train.py's flags without --out: a model of one block, twenty questions, and a reward that differs within a group whatever is
    drawn."""
    home = tmp_path_factory.mktemp("data")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shutil.copytree(ROOT / "assets" / "tiny", home / "model", ignore=shutil.ignore_patterns("*.py", "model.*"))
    config = home / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | small))
    model = qwen.build(qwen.read_config(home / "model"), checkpoint.RandomCheckpoint())
    save_file(dict(qwen.tensors(model)), home / "model" / "model.safetensors")
    (home / "d.jsonl").write_text("".join(json.dumps({"question": f"What is {i}+1?", "answer": i + 1}) + "\n" for i in range(20)))
    (home / "r.py").write_text("import zlib\n\ndef f(text, row):\n    return zlib.crc32(text.encode()) % 100 / 100\n")
    return [*TINY, "--model", str(home / "model"), "--data", str(home / "d.jsonl"), "--reward", f"{home / 'r.py'}:f"]


def clock():
    """Random numbers that are others each time; what a failed test shows of its output begins with their seed."""
    seed = time.time_ns()
    print(f"random.Random({seed})")
    return random.Random(seed)


def start(main, argv, log, pipe=None):
    """main(argv) in a forked process, both outputs into the file `log`, or stdout into the pipe (read, write); returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(pipe[1] if pipe else out, 1)
        os.dup2(out, 2)
        if pipe:
            os.close(pipe[0])
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the command has its own handler
        sys.unraisablehook = lambda ignored: None  # a signal within a destructor is printed; by pytest's hook, in which another may fall
        code = main(argv) or 0
        sys.stdout.flush()
    except SystemExit as e:
        code = e.code
    except BaseException as e:
        print(f"Traceback: {type(e).__name__}", file=sys.stderr)
    finally:
        os._exit(code)


def end(pid):
    """The exit code; minus the signal for a process that was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def go_on(flags, out):
    """What a user would type next: --resume where there is a checkpoint, else the same again."""
    return [*flags, "--out", str(out), *(["--resume"] if (out / "checkpoint" / "state.pt").exists() else [])]


def learned(out):
    state = torch.load(out / "checkpoint" / "state.pt", weights_only=True)
    adapter = (out / "adapter" / "adapter_model.safetensors").read_bytes()
    return adapter, rows_of(out), [p.tolist() for p in state["params"]], state["step"]


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """(what an undisturbed run learns, its seconds)."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert train.main([*flags, "--out", str(out)]) == 0  # here, so that what is imported late is imported before the forks
    begin = time.time()
    assert end(start(train.main, [*flags, "--out", str(out.with_name("again"))], out.with_name("log"))) == 0
    seconds = time.time() - begin
    assert any(t.any() for name, t in load_file(out / "adapter" / "adapter_model.safetensors").items() if "lora_B" in name)
    return learned(out), seconds


def test_ten_kills_at_random_moments_change_no_bit(flags, straight, tmp_path):
    """kill -9: nothing cleans up, and whatever was half written is there afterwards."""
    rng, kills, runs = clock(), 0, 0
    while kills < 10 or runs == 0:
        out = tmp_path / f"run{runs}"
        while True:
            pid = start(train.main, go_on(flags, out), tmp_path / "log")
            if kills < 10:
                time.sleep(rng.random() * straight[1])
                os.kill(pid, signal.SIGKILL)
            code = end(pid)
            kills += code == -signal.SIGKILL
            if code != -signal.SIGKILL:
                assert code == 0, (tmp_path / "log").read_text()
                break
        assert learned(out) == straight[0]
        runs += 1


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGINT, signal.SIGTERM)])
def test_signals_at_random_moments_change_no_bit_and_leave_no_traceback(flags, straight, tmp_path, numbers):
    """Twice: a second ctrl-C in an update saved parameters of the next step under the number of the last."""
    rng, out, log, stopped = clock(), tmp_path / "run", tmp_path / "log", 0
    for _ in range(4):
        pid = start(train.main, go_on(flags, out), log)
        time.sleep(0.02 + rng.random() * straight[1])
        for number in numbers:
            os.kill(pid, number)
            time.sleep(0.01)
        code, text = end(pid), log.read_text()
        if code == 0 and "asks for no more" not in text:
            break
        stopped += 1
        assert code == 130 and "Traceback" not in text and "stopped" in text, (code, text[-800:])
    if code:
        assert end(start(train.main, go_on(flags, out), log)) == 0
    assert learned(out) == straight[0]
    assert not [p for p in out.rglob("*") if p.name.startswith(".")]


def test_a_ctrl_c_while_a_line_is_written_is_heard(flags, straight, tmp_path):
    """The handler printed as well: RuntimeError, a reentrant call inside the stream."""

    class Raw(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            if b" | reward" in bytes(data):
                os.kill(os.getpid(), signal.SIGINT)
            return os.write(1, data)

    def slow(argv):
        first, sys.stdout = sys.stdout, io.TextIOWrapper(io.BufferedWriter(Raw()), line_buffering=True)
        code = train.main(argv)
        del first  # it closes what Raw writes to
        return code

    out, log = tmp_path / "run", tmp_path / "log"
    assert end(start(slow, [*flags, "--out", str(out)], log)) == 130, log.read_text()
    assert "finishing the update" in log.read_text() and "stopped after 1 steps" in log.read_text()
    assert end(start(train.main, go_on(flags, out), log)) == 0 and learned(out) == straight[0]


def test_a_second_ctrl_c_in_an_update_saves_no_half_step(flags, straight, tmp_path, monkeypatch):
    """The parameters have moved, the step is not counted yet: saved so, --resume would do its updates twice."""
    real, out, calls = grpo.update, tmp_path / "run", []

    def twice(*args):
        result = real(*args)
        calls.append(1)
        if len(calls) == 3:  # the first of two updates of the second step
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return result

    with monkeypatch.context() as m:
        m.setattr(grpo, "update", twice)
        assert train.main([*flags, "--out", str(out)]) == 130
    step = torch.load(out / "checkpoint" / "state.pt", weights_only=True)["step"]
    assert step == (len(calls) - 1) // 2
    assert train.main(go_on(flags, out)) == 0 and learned(out) == straight[0]


def test_a_closed_stdout_stops_a_run_where_it_can_go_on(flags, straight, tmp_path):
    """python train.py | head: BrokenPipeError was an error of the user's, with nothing saved."""
    out = tmp_path / "run"
    read, write = os.pipe()
    pid = start(train.main, [*flags, "--save-every", "99", "--out", str(out)], tmp_path / "log", (read, write))
    os.close(write)
    with os.fdopen(read) as f:
        for line in f:
            if "| reward" in line:
                break
    assert end(pid) == 130 and "Traceback" not in (tmp_path / "log").read_text()
    assert torch.load(out / "checkpoint" / "state.pt", weights_only=True)["step"] >= 1
    assert train.main(go_on(flags, out)) == 0 and learned(out) == straight[0]


COMMANDS = {
    "eval": (evaluation.main, ["--data", "arithmetic", "--limit", "8", "--n", "2", "--out", "out.jsonl", "--quant", "none"]),
    "nvfp4": (partial(convert.main, "quantize"), ["--model", "model", "--out", "out", "--awq", "--device", "cpu"]),
}


def test_what_a_link_points_to_is_written(tmp_path):
    """--out results.jsonl, a link to a larger disk: the link became a file on the small one."""
    file, link = tmp_path / "disk" / "file", tmp_path / "link"
    file.parent.mkdir()
    file.write_text("old")
    link.symlink_to(file)
    with whole(link) as part:
        assert part.parent == file.parent
        part.write_text("new")
    assert link.is_symlink() and file.read_text() == "new"


def test_a_device_behind_a_link_is_not_replaced(tmp_path):
    """A log linked to /dev/null, rewritten by --resume as root: the machine's /dev/null became a file. A pipe is as safe to try."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: is a device or a pipe"), whole(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "pipe").is_fifo()


def test_a_command_runs_in_any_thread():
    """Handlers can be set in the main one alone: in another there are none, and no error."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(command.run("x.py", lambda: 0)))
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize(("name", "number"), [
    ("eval", signal.SIGINT), ("nvfp4", signal.SIGTERM), ("eval", signal.SIGHUP), ("eval", signal.SIGPIPE)])
def test_any_command_that_is_stopped_ends_in_one_line(shallow, tmp_path, monkeypatch, few, name, number):
    """A traceback of forty lines on ctrl-C; a SIGTERM that left X.part behind."""
    monkeypatch.chdir(tmp_path)
    os.symlink(shallow, "model")
    main, argv = COMMANDS[name]

    heard, begun = os.pipe()
    real = command.signals

    @contextmanager
    def signals(*handlers):  # before it has handlers, a signal ends any process
        with real(*handlers):
            os.write(begun, b".")
            yield

    monkeypatch.setattr(command, "signals", signals)
    read, write = os.pipe()
    pid = start(main, argv, tmp_path / "log", (read, write) if number == signal.SIGPIPE else None)
    os.close(read)
    os.close(write)
    os.close(begun)
    os.read(heard, 1)
    os.close(heard)
    time.sleep(clock().random() * 0.6)
    if number != signal.SIGPIPE:
        os.kill(pid, number)
    code, text = end(pid), Path("log").read_text()
    assert code in (0, 130) and "Traceback" not in text and "Error" not in text, (code, text[-800:])
    assert code == 0 or f"{name}.py: stopped" in text or "\nstopped" in text, text[-800:]
    assert {p.name for p in tmp_path.iterdir()} <= {"log", "model", "out.jsonl", "out"}


def test_a_command_that_another_file_does_is_one_process():
    """Started anew, it loaded PyTorch twice, three seconds more; beside itself, each class would be there twice."""
    env = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([sys.executable, "nvfp4.py", "--help"], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert imported.count("torch") == 1 and "nvfp4" not in imported and "--fmt" in done.stdout


def test_nohup_outlives_its_terminal(monkeypatch):
    """A handler of ours in the place of nohup's SIG_IGN would end the run that nohup is to keep."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command.signals(command.stop):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.getsignal(signal.SIGTERM) == command.stop
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_file_is_whole_or_not_there(tmp_path):
    """Whatever the block raises, the old content stays and nothing lies beside it."""
    path = tmp_path / "x.json"
    path.write_text("old")
    for error in (KeyboardInterrupt, ValueError, OSError):
        with pytest.raises(error), whole(path) as part:
            part.write_text("new")
            raise error
        assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.json"]
    with pytest.raises(OSError, match=r"x\.json: cannot be written"), whole(path):
        raise RuntimeError("what torch.save raises on a full disk")


def test_a_file_is_on_the_disk_before_it_has_its_name_and_whoever_may_can_read_it(tmp_path, monkeypatch):
    """A name without its bytes is what a power cut leaves; a checkpoint for its owner alone, what serves nobody."""
    did, replace, mask = [], os.replace, os.umask(0o027)
    monkeypatch.setattr(os, "fsync", lambda f: did.append(os.fstat(f).st_size))
    monkeypatch.setattr(os, "replace", lambda a, b: did.append(Path(b).name) or replace(a, b))
    try:
        with whole(tmp_path / "x.json") as part:
            part.write_text("new")
    finally:
        os.umask(mask)
    assert did == [3, "x.json"] and (tmp_path / "x.json").stat().st_mode & 0o777 == 0o640
