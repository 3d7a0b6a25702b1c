"""What flags stand for, and what is refused where they meet: the checks that no command's own tests make."""
import json
from types import SimpleNamespace

import pytest
import torch

import lora
import model as qwen
from runtime import flags, ranks
from weights import checkpoint


@pytest.mark.parametrize(("command", "argv", "says"), [
    ("train", ["--calib", "t.txt"], "--calib: plain rounding uses no text"), ("train", ["--awq", "--quant", "none"], "--awq: .*--quant is none"),
    ("train", ["--dtype", "float16", "--quant", "mxfp4"], "--dtype float16: MXFP4's scales"), ("sample", ["--file", "p.txt"], "--file and --out"),
    ("eval", ["--n", "4", "--k", "8,1"], "--k 8: ")])
def test_flags_that_contradict_each_other_are_refused(command, argv, says):
    """AWQ that is parsed and forgotten looks like plain rounding."""
    with pytest.raises(ValueError, match=says):
        flags.parse(command, argv)


def test_sampling_is_one_process(monkeypatch):
    """Under torchrun each rank would write the same file."""
    monkeypatch.setattr(ranks, "world", 2)
    with pytest.raises(ValueError, match="sample.py is one process"):
        flags.parse("sample", [])


def test_runs_of_other_seeds_have_other_folders():
    """Named alike, the second would be refused, or go on with the first."""
    outs = {flags.parse("train", given).out for given in ([], ["--seed", "1"], ["--quant", "none"], ["--data", "x/d.jsonl"], ["--model", "m"])}
    assert len(outs) == 5 and "runs/tiny-arithmetic-nvfp4-s0" in outs


def test_the_demos_defaults_are_the_demos():
    """A learning rate of 1e-3 is for a model of a million parameters."""
    assert flags.parse("train", []).lr == 1e-3 and flags.parse("train", ["--model", "m"]).lr == 1e-5


@pytest.mark.parametrize(("command", "named"), [("train", "--micro-batch-tokens, --max-rows"), ("eval", "lower --max-rows")])
def test_what_is_too_large_for_the_card_says_which_flags_to_lower(capsys, command, named):
    """It was a traceback of a hundred lines."""
    def body(args, argv):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. And. Much. More.")

    assert flags.run_command(command, body, []) == 2
    err = capsys.readouterr().err
    assert named in err and "Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free)" in err and err.count("\n") == 1


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: this machine has no CUDA device; use --device cpu"):
        flags.place("cuda")
    with pytest.raises(ValueError, match="--dtype float16: for GPUs"):
        flags.place("auto", "float16")
    assert flags.place() == ("cpu", torch.float32)


def test_the_share_of_the_card_is_taken(monkeypatch, shallow):
    """Two runs on one card that each plan with all of it: the second runs out of memory."""
    shares, load = [], checkpoint.load
    monkeypatch.setattr(flags, "place", lambda *a: ("cuda", torch.float32))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(checkpoint, "load", lambda folder, device, *rest: load(folder, "cpu", *rest))
    for share in ("0.25", "1.0"):
        flags.load_policy(flags.parse("train", ["--model", str(shallow), "--card-share", share]))
    assert shares == [0.25, 1.0]


def test_what_an_adapter_was_trained_with_is_written_read_and_missed(shallow, tmp_path, capsys):
    """AWQ's scales are part of the base as the format is: evaluated without them, an adapter meets another one."""
    m = qwen.load(shallow, dtype=torch.float32)
    lora.add_lora(m, 2, 2.0)
    given = ["--model", str(shallow), "--quant", "mxfp4", "--awq", "--calib", "t.txt", "--prompt-style", "boxed"]
    lora.save_adapter(m, tmp_path)
    flags.save_policy(tmp_path, m, flags.parse("train", given))
    policy = json.loads((tmp_path / "policy.json").read_text())
    assert policy["base"] == flags.base_hash(m)
    args = flags.parse("eval", ["--adapter", str(tmp_path)])
    assert (args.quant, args.awq, args.calib, args.prompt_style) == ("mxfp4", True, "t.txt", "boxed")
    args = flags.parse("eval", ["--adapter", str(tmp_path), "--no-awq", "--prompt-style", "tags"] + ["--calib", ""])
    assert (args.awq, args.prompt_style) == (False, "tags")
    flags.check_policy(args, m)
    assert "warning: --awq False: the adapter was trained with True" in capsys.readouterr().err
    with pytest.raises(ValueError, match="another base"):
        flags.check_policy(SimpleNamespace(**vars(args) | {"trained_with": policy | {"base": "0"}}), m)
