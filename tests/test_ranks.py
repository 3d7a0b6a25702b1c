"""Several ranks: that they compute what one does, and that they begin, stop and fail together. Embedded model, gloo, forked
processes in the place of torchrun's (.ci/run has a run under torchrun itself)."""
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import weakref
from types import SimpleNamespace

from plumbing import arithmetic, curves, ranks

import pytest
import torch
import torch.distributed as dist

import data
import eval as evaluation
import grpo
import sample
import train
from tests.conftest import exit_code, first_blocks, parameters_of, rows_of

SMALL = ["--steps", "4", "--prompts-per-step", "3", "--group-size", "4", "--max-new-tokens", "12", "--lora-rank", "4", "--save-every", "2",
         "--device", "cpu", "--no-dynamic-sampling", "--updates-per-rollout", "2", "--lr", "1e-5",
         "--eval-n", "1", "--eval-limit", "3", "--eval-every", "3", "--data", "arithmetic",
         "--loss", "dapo", "--overlong", "none", "--checkpointing", "off"]


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    """Few problems, a quarter of a model, a reward that it sometimes earns, no pictures, and no patience with the dead."""
    home = tmp_path_factory.mktemp("quick")
    rows, mine, model = arithmetic.problems("train", 64), home / "mine.py", first_blocks(1, home / "model")
    mine.write_text("def third(text, row):\n    return {'reward': len(text) % 3, 'correct': len(text) % 2 == 0}\n")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data, "problems", lambda split, n, *rest: [dict(row) for row in rows[:n]])
        m.setattr(curves, "draw", lambda lines, out: out.touch())
        m.setattr(grpo, "WARMUP", 0)
        m.setattr(sys.modules[__name__], "SMALL", [*SMALL, "--model", str(model), "--reward", f"{mine}:third"])
        m.setattr(os, "fsync", lambda f: None)
        m.setattr(ranks, "PATIENCE", 0.1)
        yield


def launch(n, argv, tmp_path, hook=None, main=train.main):
    """main(argv) on n ranks as torchrun runs them: when one fails, the others get SIGTERM. hook(rank) runs in each before.
    Returns ([exit code, or minus the signal that ended it], [what each printed])."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    logs, codes = [tmp_path / f"rank{r}.log" for r in range(n)], [None] * n
    for log in logs:
        log.write_text("")  # a rank may be ended before it opens its own
    sys.stdout.flush()
    pids = []
    for r in range(n):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 70
            try:
                sys.stdout = sys.stderr = open(logs[r], "w", buffering=1)
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(r), "WORLD_SIZE": str(n)}
                ranks.rank, ranks.world = r, n
                if hook:
                    hook(r)
                code = exit_code(main, argv)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code or 0)
    begin = time.time()
    while None in codes:
        for r in [r for r in range(n) if codes[r] is None]:
            pid, status = os.waitpid(pids[r], os.WNOHANG)
            if time.time() - begin > 60:
                os.kill(pids[r], signal.SIGKILL)
            if pid:
                codes[r] = os.waitstatus_to_exitcode(status)
                for other in [q for q in range(n) if codes[r] and codes[q] is None]:
                    os.kill(pids[other], signal.SIGTERM)
        time.sleep(0.01)
    return codes, [log.read_text() for log in logs]


def alike(a, b, atol):
    """Two runs drew the same samples, logged the same, and ended in the same place, well away from where they began."""
    assert (a / "rollouts.jsonl").read_text() == (b / "rollouts.jsonl").read_text()
    for one, other in zip(rows_of(a), rows_of(b), strict=True):
        one, other = ({k: v or 0.0 for k, v in row.items()} for row in (one, other))
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    for p, q in zip(parameters_of(a), parameters_of(b), strict=True):
        assert (p - q).abs().max() < atol
    assert max(p.abs().max() for p in parameters_of(a)[1::2]) > 5 * atol  # each B began at zero


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Four steps on one rank."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert train.main([*SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same on two, how they ended and what they printed."""
    folder = tmp_path_factory.mktemp("two")
    codes, said = launch(2, [*SMALL, "--out", str(folder / "run")], folder)
    return SimpleNamespace(out=folder / "run", codes=codes, said=said)


@pytest.mark.parametrize("told", [{"RANK": "16"}, {"RANK": ""}, {"RANK": "1", "WORLD_SIZE": "1"}])
def test_a_rank_without_others_is_rank_0(monkeypatch, told):
    """RANK is a name that a shell script may well have, of LoRA's: every command was silent, and wrote nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    at_import = runpy.run_path(ranks.__file__)
    assert at_import["rank"] == 0 and at_import["mine"]([1, 2, 3]) == [1, 2, 3]


def test_two_ranks_compute_the_update_of_one(one, two):
    """Averaged losses, gradients of one share, samples that depend on the rank: each gives another adapter."""
    assert two.codes == [0, 0], two.said
    alike(one, two.out, 1e-6)


def test_rank_0_speaks_and_writes(two):
    """Each line once; a row a step, whoever drew its samples."""
    assert two.codes == [0, 0], two.said
    assert "held-out accuracy after 4 steps" in two.said[0] and two.said[1] == ""
    assert [row["step"] for row in rows_of(two.out)] == [0, 1, 2, 3]


@pytest.mark.parametrize("n, flags", [
    (3, ["--dynamic-sampling", "--old-logp", "trainer"]),
    (4, ["--loss", "dr_grpo", "--overlong", "mask", "--beta", "0.1", "--max-new-tokens", "30"]),
    (3, ["--loss", "grpo", "--lora-rank", "0", "--quant", "none", "--lr", "1e-6"]),
], ids=["resampled", "masked", "full"])
def test_prompts_that_do_not_divide_by_the_ranks(tmp_path, n, flags):
    """Two prompts a step, of which some teach nothing: a rank may have none to sample or to train on, and joins each sum."""
    argv = [*SMALL, "--steps", "2", "--prompts-per-step", "2", "--eval-n", "0", "--lr", "1e-4", *flags]
    assert train.main([*argv, "--out", str(tmp_path / "1")]) == 0
    codes, said = launch(n, [*argv, "--out", str(tmp_path / "n")], tmp_path)
    assert codes == [0] * n, said
    alike(tmp_path / "1", tmp_path / "n", 1e-5)


def at_call(module, name, nth, action):
    """From the nth call on, action() comes before module.name."""
    real, calls = getattr(module, name), []

    def spy(*args, **kw):
        calls.append(1)
        if len(calls) == nth:
            action()
        return real(*args, **kw)

    setattr(module, name, spy)


def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("where, rank, again", [
    ((sample, "generate", 5), 1, 2), ((grpo, "update", 8), 1, 1), ((torch, "save", 2), 0, 2)], ids=["rollout", "update", "save"])
def test_a_killed_rank_ends_all_and_resume_is_exact(one, two, tmp_path, where, rank, again):
    """Nobody waits for the dead, what was saved before is whole, and two ranks, or one, go on from it to the same end."""
    out = tmp_path / "run"
    begin = time.time()
    codes, said = launch(2, [*SMALL, "--out", str(out)], tmp_path, lambda r: r == rank and at_call(*where, kill))
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] != 0 and time.time() - begin < 30, said
    codes, said = launch(again, ["--resume", "--out", str(out)], tmp_path)
    assert codes == [0] * again, said
    if again == 1:
        alike(one, out, 1e-6)
    else:
        assert rows_of(out) == rows_of(two.out)
        assert all(torch.equal(p, q) for p, q in zip(parameters_of(out), parameters_of(two.out), strict=True))


@pytest.mark.parametrize("where, who", [
    ((sample, "generate", 4), [0, 1]), ((sample, "generate", 4), [1]), ((dist, "all_gather_object", 6), [0]),
    ((grpo, "update", 5), [0])], ids=["both", "one", "exchange", "update"])
def test_a_signal_stops_all_ranks_at_one_point(two, tmp_path, where, who):
    """Whoever gets it, and wherever: saved once, between two steps that all have finished."""
    out = tmp_path / "run"
    codes, said = launch(2, [*SMALL, "--out", str(out), "--save-every", "99"], tmp_path,
                         lambda r: r in who and at_call(*where, lambda: kill(signal.SIGTERM)))
    assert codes == [130, 130] and said[0].count("continue with") == 1 and said[1] == "", said
    steps = 3 if where[0] is grpo else 2
    assert rows_of(out) == rows_of(two.out)[:steps]
    assert torch.load(out / "checkpoint" / "state.pt", weights_only=True)["step"] == steps


def test_bad_input_is_refused_once(tmp_path, monkeypatch):
    """Argparse's refusals, the flags' and the data's: by all ranks, told by one, however long the machine lets it wait."""
    monkeypatch.setattr(ranks, "PATIENCE", 60)  # nobody waits for it: rank 0's end ends the others
    for flags, named in ((["--lr", "x"], "--lr"), (["--beta", "1", "--lora-rank", "0"], "--lora-rank"), (["--data", "no.jsonl"], "no.jsonl")):
        codes, said = launch(2, [*SMALL, *flags, "--out", str(tmp_path / "run")], tmp_path)
        assert codes[0] == 2 and codes[1] in (130, -signal.SIGTERM) and said[1] == "" and said[0].count("error:") == 1 and named in said[0], said
    assert not (tmp_path / "run").exists()


def test_an_error_of_all_ranks_is_saved_by_the_first(tmp_path, monkeypatch):
    """A reward that raised ended the other rank at once, and with it rank 0 in the middle of its save."""
    monkeypatch.setattr(ranks, "PATIENCE", 60)

    def refuse():
        raise RuntimeError("--reward: of all")

    codes, said = launch(2, [*SMALL, "--out", str(tmp_path / "run")], tmp_path, lambda r: at_call(sample, "generate", 2, refuse))
    assert codes[0] == 70 and codes[1] in (130, -signal.SIGTERM) and said[1] == "" and "continue with" in said[0], (codes, said)


def test_a_rank_that_fails_alone_is_heard(tmp_path):
    """Its stderr was silenced with the others'."""

    def refuse():
        raise ValueError("--reward: this one alone")

    codes, said = launch(2, [*SMALL, "--out", str(tmp_path / "run")], tmp_path,
                         lambda r: r == 1 and at_call(sample, "generate", 2, refuse))
    assert codes[1] == 2 and said[1] == "train.py: error: --reward: this one alone\n" and codes[0] != 0


def test_an_evaluation_is_dealt_out_and_the_same(tmp_path):
    """Three questions on two ranks: the same rows in the same order, written once."""
    argv = ["--data", "arithmetic", "--limit", "3", "--n", "2", "--max-new-tokens", "30", "--device", "cpu", "--temperature", "1"]
    assert evaluation.main([*argv, "--out", str(tmp_path / "1.jsonl")]) == 0
    codes, said = launch(2, [*argv, "--out", str(tmp_path / "2.jsonl")], tmp_path, main=evaluation.main)
    assert codes == [0, 0] and said[1] == "" and said[0].count("pass@1") == 1, said
    assert (tmp_path / "1.jsonl").read_text() == (tmp_path / "2.jsonl").read_text()


def test_nothing_keeps_the_group(tmp_path):
    """A group that outlives `end` keeps gloo's threads, of which one may abort the process as the interpreter ends."""

    def main(argv):
        for name in [m for m in sys.modules if m.startswith("torch.distributed.nn")]:
            del sys.modules[name]
        ranks.start(SimpleNamespace(device="cpu"))
        importlib.import_module("torch.distributed.nn.functional")  # as the first optimizer does
        group = weakref.ref(dist.group.WORLD)
        ranks.gather(0)
        ranks.end()
        assert group() is None and not ranks.busy  # else a signal would wait for the next exchange

    codes, said = launch(2, [], tmp_path, main=main)
    assert codes == [0, 0], said


def test_shares_are_balanced_by_tokens(monkeypatch):
    """One long completion weighs as much as many short ones."""
    monkeypatch.setattr(ranks, "world", 3)
    sizes = [100, 10, 10, 30, 20, 60, 90, 5, 5]
    parts = ranks.share(sizes, lambda n: n)
    assert sorted(sum(parts, [])) == sorted(sizes) and [sum(p) for p in parts] == [110, 110, 110]
