"""What flags stand for, what is refused where they meet, how commands end, and what ranks are told: in one process."""
import io
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from plumbing import checkpoint, command, datasets, flags, policy, ranks
from plumbing.files import TINY

import pytest
import torch

import aqn
import eval as evaluation
import grpo
import lora
import model as qwen
import sample
import train
from fast import memory
from lab import chat, convert

FIXTURES = Path(__file__).parent / "fixtures"
COMMANDS = {c.name: c for c in (train.COMMAND, evaluation.COMMAND, chat.COMMAND)}


def policy_of(args, base):
    """What train.py writes beside an adapter of these flags."""
    return policy.content(args, base, [*(f.dest for f in train.COMMAND.flags if f.in_policy), "reward"])


@pytest.mark.parametrize(("name", "argv", "says"), [
    ("train", ["--calib", "t.txt"], "--calib: plain rounding uses no text"), ("train", ["--awq", "--quant", "none"], "--awq: .*--quant is none"),
    ("eval", ["--run", "r", "--adapter", "a"], "--run and --adapter exclude each other"),
    ("eval", ["--n", "4", "--k", "8,1"], "--k 8: "), ("eval", ["--run", ""], "--run: is empty"), ("train", ["--reward", ""], "--reward: is empty")])
def test_flags_that_contradict_each_other_are_refused(name, argv, says):
    """AWQ that is parsed and forgotten looks like plain rounding, and --run $UNSET evaluated the base alone."""
    with pytest.raises(ValueError, match=says):
        flags.parse(COMMANDS[name], argv)


def test_a_file_that_becomes_a_command_hands_on_its_words(tmp_path, monkeypatch, capsys):
    (tmp_path / "s.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setitem(sys.modules, "lora", lora)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "lora.py", raising=False)
    monkeypatch.setattr(sys, "argv", ["lora.py", "--merge"])
    command.become(tmp_path / "s.py", "merge")
    assert capsys.readouterr().out == "['merge', '--merge']\n"


def test_a_style_without_answers_needs_a_reward_of_ones_own():
    """eval.py refused it when all samples had been drawn, train.py also where a reward could grade it."""
    for name in ("train", "eval"):
        with pytest.raises(ValueError, match="--prompt-style plain: asks for nothing that could be graded"):
            flags.parse(COMMANDS[name], ["--prompt-style", "plain"])
        assert flags.parse(COMMANDS[name], ["--prompt-style", "plain", "--reward", "own.py:f"]).prompt_style == "plain"


def test_runs_of_other_seeds_have_other_folders():
    """Named alike, the second would be refused, or go on with the first."""
    outs = {flags.parse(train.COMMAND, given).out for given in ([], ["--seed", "1"], ["--quant", "none"], ["--data", "x/d.jsonl"], ["--model", "m"])}
    assert len(outs) == 5 and "runs/tiny-arithmetic-nvfp4-s0" in outs


def test_the_defaults_are_the_papers():
    """Whoever gives a model and data alone trains as the paper does; what is no flag any more is its value as well."""
    args, paper = vars(flags.parse(train.COMMAND, ["--model", "m"])), {
        "quant": "nvfp4", "awq": False, "lora_rank": 32, "lora_alpha": 32.0, "aqn": True, "aqn_start": 1e-2, "aqn_end": 5e-4,
        "aqn_schedule": "exponential", "aqn_scope": "rollout", "data": "gsm8k", "prompt_style": "tags", "steps": None,
        "prompts_per_step": 16, "group_size": 8, "max_prompt": 256, "max_new_tokens": 4096, "temperature": 1.0, "dynamic_sampling": False,
        "overlong": "none", "loss": "grpo", "eps_high": None, "beta": 0.0, "old_logp": "sampler", "updates_per_rollout": 4, "lr": 1e-5,
        "grad_clip": 0.2, "eval_n": 1, "eval_every": 0, "eval_limit": None, "eval_temperature": 0.6, "engine": "auto", "card_share": 1.0,
        "seed": 0}
    assert {name: args[name] for name in paper} == paper
    assert (grpo.BETAS, grpo.WEIGHT_DECAY, grpo.WARMUP, grpo.TIS_CAP) == ((0.9, 0.99), 0.1, 0.1, 2.0)
    assert (aqn.STAGES, train.MAX_RESAMPLE, grpo.soft_overlong_penalty(4096 - 256, 4096)) == (10, 2, -0.5)


def test_the_demos_defaults_are_the_demos():
    """A learning rate of 1e-3 is for a model of a million parameters; the README's numbers are of these."""
    demo, want = vars(flags.parse(train.COMMAND, [])), {
        "model": "tiny", "data": "arithmetic", "quant": "nvfp4", "lora_rank": 16, "lora_alpha": 32.0, "steps": 30, "prompts_per_step": 12,
        "group_size": 8, "max_prompt": 128, "max_new_tokens": 96, "dynamic_sampling": True, "overlong": "mask", "loss": "dapo", "updates_per_rollout": 2, "micro_batch_tokens": 2048, "checkpointing": "off",
        "grad_clip": 1.0, "eval_n": 1, "eval_every": 10, "eval_limit": 256, "save_every": 10, "seed": 0}
    assert {name: demo[name] for name in want} == want
    assert flags.parse(train.COMMAND, []).lr == 1e-3 and flags.parse(train.COMMAND, ["--model", "m"]).lr == 1e-5


@pytest.mark.parametrize(("name", "named"), [("train", "--micro-batch-tokens, --max-rows"), ("eval", "lower --max-rows")])
def test_what_is_too_large_for_the_card_says_which_flags_to_lower(capsys, name, named):
    """It was a traceback of a hundred lines."""
    def body(args, argv):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. And. Much. More.")

    assert flags.run_command(COMMANDS[name], body, []) == 2
    err = capsys.readouterr().err
    assert named in err and "Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free)" in err and err.count("\n") == 1


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: this machine has no CUDA device; use --device cpu"):
        policy.place("cuda")
    assert policy.place() == ("cpu", torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert policy.place() == ("cuda", torch.bfloat16) and policy.place("cpu") == ("cpu", torch.float32)


@pytest.mark.parametrize(("idle", "used"), [
    ("--aqn-start 1e-3 --no-aqn", "--aqn-start 1e-3"), ("--aqn-scope both --no-aqn", "--aqn-scope both"),
    ("--eval-limit 9 --eval-n 0", "--eval-limit 9"), ("--eval-temperature 0 --eval-n 0", "--eval-temperature 0"),
    ("--lora-alpha 9 --lora-rank 0 --quant none", "--lora-alpha 9"), ("--calib t --resume", "--calib t --awq --resume"), ("--eps-high 1 --old-logp current", "--eps-high 1 --old-logp trainer")])
def test_a_flag_that_does_nothing_is_told_of(idle, used, capsys):
    """Without a word, whoever sets it believes that it was measured."""
    for given, told in ((idle, 1), (used, 0)):
        flags.warn_idle(train.COMMAND, train.NEEDS, flags.parse(train.COMMAND, given.split()), given.split())
        assert capsys.readouterr().err.count(f"warning: {idle.split()[0]}: does nothing without --") == told


def test_the_share_of_the_card_is_taken(monkeypatch, shallow):
    """Two runs on one card that each plan with all of it: the second runs out of memory."""
    shares, load = [], qwen.load
    monkeypatch.setattr(policy, "place", lambda *a: ("cuda", torch.float32))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(qwen, "load", lambda folder, device, *rest: load(folder, "cpu", *rest))
    for share in ("0.25", "1.0"):
        sample.load_policy(flags.parse(train.COMMAND, ["--model", str(shallow), "--card-share", share]))
    assert shares == [0.25, 1.0]


@pytest.mark.parametrize(("spec", "flag"), [(train.COMMAND, "--eval-temperature"), (evaluation.COMMAND, "--temperature"), (chat.COMMAND, "--temperature")])
def test_a_temperature_out_of_bounds_is_refused_with_the_other_flags(spec, flag):
    """It was refused after the model was loaded, in a run folder that had been made, as another flag."""
    for value in ("-1", "nan", "101", "hot"):
        with pytest.raises(ValueError, match=f"argument {flag}: "):
            flags.parse(spec, [flag, value])
    for value in ("0", "1e-6", "2"):
        assert float(value) in vars(flags.parse(spec, [flag, value])).values()


def test_what_an_adapter_was_trained_with_is_written_read_and_missed(shallow, tmp_path, capsys, monkeypatch):
    """AWQ's scales are part of the base as the format is: evaluated without them, an adapter meets another one."""
    m = qwen.load(shallow, dtype=torch.float32)
    lora.add_lora(m, 2, 2.0)
    given = ["--model", str(shallow), "--quant", "mxfp4", "--awq", "--calib", "t.txt", "--prompt-style", "boxed", "--reward", "own.py:f",
             "--data", "math500"]
    lora.save_adapter(m, tmp_path)
    base = checkpoint.fingerprint(shallow)
    had = policy_of(flags.parse(train.COMMAND, given), base)
    (tmp_path / "policy.json").write_text(json.dumps(had))
    assert had["reward"] == "own.py:f" and had | base == had
    args = flags.parse(evaluation.COMMAND, ["--adapter", str(tmp_path)])
    assert (args.quant, args.awq, args.calib, args.prompt_style, args.data) == ("mxfp4", True, "t.txt", "boxed", "math500")
    args = flags.parse(evaluation.COMMAND, ["--adapter", str(tmp_path), "--no-awq", "--prompt-style", "tags"] + ["--calib", ""])
    assert (args.awq, args.calib, args.prompt_style) == (False, None, "tags")
    policy.check(args)
    assert "warning: --awq False: the adapter was trained with True" in capsys.readouterr().err
    with pytest.raises(ValueError, match="another base"):
        policy.check(SimpleNamespace(**vars(args) | {"trained_with": had | {"weights": "none:0"}}))
    (tmp_path / "policy.json").write_text(json.dumps(had | {"quant": None}))
    assert flags.parse(evaluation.COMMAND, ["--adapter", str(tmp_path)]).quant == "nvfp4"  # null is no format, nor a traceback


def test_scales_by_another_text_are_told_of(shallow, tmp_path, capsys):
    """An adapter beside other roundings of its base than it was trained on, and no word of it."""
    text, adapter, m = tmp_path / "t.txt", tmp_path / "adapter", qwen.load(shallow, dtype=torch.float32)
    text.write_text("one")
    lora.add_lora(m, 2, 2.0)
    lora.save_adapter(m, adapter)
    args = flags.parse(train.COMMAND, ["--model", str(shallow), "--awq", "--calib", str(text)])
    (adapter / "policy.json").write_text(json.dumps(policy_of(args, policy.base_of(args))))
    again = flags.parse(evaluation.COMMAND, ["--adapter", str(adapter)])
    policy.check(again)
    assert not capsys.readouterr().err
    text.write_text("two")
    for more in ([], ["--calib", ""]):
        policy.check(flags.parse(evaluation.COMMAND, ["--adapter", str(adapter), *more]))
        assert "the adapter was trained with scales by another text" in capsys.readouterr().err
    policy.check(flags.parse(evaluation.COMMAND, ["--adapter", str(adapter), "--no-awq"]))
    assert capsys.readouterr().err == "warning: --awq False: the adapter was trained with True\n"


def test_four_bits_are_not_taken_for_sixteen():
    """--lora-rank 0 "trained all parameters" of a quantized checkpoint, which were its embedding and norms, and wrote a model/ that did
    not load; the update's memory was planned without the GEMM's scratch."""
    args = flags.parse(train.COMMAND, ["--model", str(FIXTURES / "compressed_nvfp4"), "--quant", "none", "--lora-rank", "0", "--device", "cpu"])
    with pytest.raises(ValueError, match="--quant none: .*compressed_nvfp4 have four bits already; use --quant nvfp4"):
        sample.load_policy(args)


def test_the_folder_of_the_embedded_model_is_the_embedded_model(shallow):
    """It had the defaults of a large one: another data set, a rate of a hundredth, completions of 4096 tokens."""
    for main in (train, evaluation):
        args = [vars(flags.parse(main.COMMAND, ["--model", str(m), "--out", "o"])) | {"model": ""} for m in ("tiny", TINY, shallow)]
        assert args[0] == args[1] != args[2]


def test_questions_are_asked_for_a_format_and_chats_are_not():
    assert [flags.parse(c, []).prompt_style for c in COMMANDS.values()] == ["tags", "tags", "plain"]


def test_awq_calibrates_on_the_text_that_was_given(monkeypatch, shallow):
    """--calib that is parsed and forgotten: scales of arithmetic problems under another text's name."""
    texts, load = [], qwen.load
    monkeypatch.setattr(datasets, "calibration", lambda text, folder: (text, folder))
    monkeypatch.setattr(qwen, "load", lambda *a: texts.append(a[3:]) or load(*a[:3], "none"))
    for given in ([], ["--calib", "t.txt"]):
        sample.load_policy(flags.parse(train.COMMAND, ["--model", str(shallow), "--awq", "--device", "cpu", *given]))
    sample.load_policy(flags.parse(train.COMMAND, ["--model", str(shallow), "--device", "cpu"]))
    assert texts == [("nvfp4", (None, shallow)), ("nvfp4", ("t.txt", shallow)), ("nvfp4", None)]


# ---- how commands end


def test_what_a_user_can_mend_is_one_line_and_a_bug_is_a_traceback(capsys):
    """A bug told as the user's mistake is never found."""
    def fails(error):
        def body():
            raise error
        return body

    assert command.run("x.py", fails(ValueError("a\nb"))) == 2 and capsys.readouterr().err == "x.py: error: a; b\n"
    assert command.run("x.py", fails(OSError("z" * 5000))) == 2 and len(capsys.readouterr().err) < 450
    with pytest.raises(TypeError):
        command.run("x.py", fails(TypeError("a bug")))


def test_a_letter_that_the_terminal_does_not_know_ends_nothing(monkeypatch):
    """A completion in Chinese on a Latin-1 terminal ended the run at the same step each time."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    assert command.run("x.py", lambda: print("\u4e8c = 2, \u00e9")) == 0
    assert shown.getvalue() == b"\\u4e8c = 2, \xe9\n"


def test_a_signal_that_a_library_makes_an_error_of_is_a_stop(capsys):
    """And what was there before a command is there after it: the next one's errors are its own."""
    def body():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("what a callback returned is no number") from None

    before = signal.getsignal(signal.SIGTERM), sys.stdout
    assert command.run("x.py", body) == 130 and capsys.readouterr().err == "x.py: stopped\n"
    assert (signal.getsignal(signal.SIGTERM), sys.stdout) == before
    assert command.run("x.py", lambda: open("no such file")) == 2


def test_a_reader_that_has_gone_is_noticed_before_the_end(monkeypatch, capsys):
    """python eval.py | head, whose last lines are still in the buffer: exit code 120 and a message of Python's own."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out, monkeypatch.context() as m:
        m.setattr(sys, "stdout", out)
        assert command.run("x.py", lambda: print("a line")) == 130
    assert capsys.readouterr().err == "x.py: stopped\n"


def test_the_allocator_may_grow_its_segments():
    """It kept 46 GiB where tensors peak at 26."""
    assert os.environ["PYTORCH_ALLOC_CONF"]


# ---- ranks, as far as one process shows them


def test_each_rank_takes_the_card_of_its_place_and_waits_for_half_an_hour(monkeypatch):
    """All ranks on one card run out of its memory; torch's own ten minutes are less than a long rollout may take."""
    cards, groups = [], []
    monkeypatch.setattr(ranks, "world", 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", cards.append)
    monkeypatch.setattr(torch, "zeros", lambda *a, **kw: None)
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda backend, timeout: groups.append((backend, timeout.total_seconds())))
    monkeypatch.setattr(ranks.dist, "all_reduce", lambda t: None)
    ranks.start(SimpleNamespace(device="auto"))
    ranks.start(SimpleNamespace(device="cpu"))
    assert cards == [1] and groups == [("cpu:gloo,cuda:nccl", 1800), ("gloo", 1800)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--nproc-per-node: rank 1 of this machine has no card, there are 1"):
        ranks.start(SimpleNamespace(device="cuda"))


def test_no_rank_parts_before_all_are_done(monkeypatch):
    """Rank 0 writes last: torchrun would end it with those that had nothing more to do."""
    did = []
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "gather", did.append)
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: did.append("parted"))
    ranks.end()
    assert did == [None, "parted"]


def test_gradients_of_sixteen_bits_are_summed_in_thirty_two(monkeypatch):
    """Over many ranks the sum would lose what each adds."""
    p, q = (torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(2))
    p.grad, seen = torch.ones(3, dtype=torch.bfloat16), []
    monkeypatch.setattr(ranks, "world", 2)
    monkeypatch.setattr(ranks.dist, "all_reduce", lambda flat: seen.append(flat.dtype) or flat.mul_(2))
    ranks.sum_gradients([p, q])
    assert seen == [torch.float32] * 2 and p.grad.tolist() == [2, 2, 2] and q.grad.tolist() == [0, 0, 0] and p.grad.dtype == torch.bfloat16


def test_the_line_to_continue_with_starts_as_many_ranks(monkeypatch):
    """Without the dashes torchrun takes --run and --n for its own."""
    monkeypatch.setattr(sys, "argv", ["eval.py", "--run", "a folder"])
    assert ranks.command_line() == "python eval.py --run 'a folder'"
    monkeypatch.setattr(ranks, "world", 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks.command_line() == "torchrun --nproc-per-node=2 -- eval.py --run 'a folder'"


def test_an_objective_of_ones_own_is_a_row_of_the_table(monkeypatch):
    """Its name was refused by --loss unless the row had been added before train.py was imported."""
    monkeypatch.setitem(grpo.OBJECTIVES, "mine", grpo.OBJECTIVES["grpo"])
    assert flags.parse(train.COMMAND, ["--loss", "mine"]).loss == "mine"


def test_tiny_is_a_model_wherever_one_is_named(monkeypatch, tmp_path, capsys):
    """README says so of each --model; two commands took it for the name of a folder."""
    monkeypatch.chdir(tmp_path)
    convert.main("quantize", ["--plan", "tiny"])
    assert capsys.readouterr().out == f"{memory.table(qwen.read_config(TINY))}\n"
    assert convert.main("quantize", ["--model", "tiny", "--out", "q", "--device", "cpu"]) == 0
