"""train.py: the loop as a user runs it, on the embedded model, and the traps that small RL codebases fall into."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import aqn
import data
import flags
import lora
import model as qwen
import sample
import train

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--steps", "4", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "48", "--lora-rank", "4",
         "--eval-n", "0", "--save-every", "2", "--device", "cpu", "--aqn-stages", "4", "--no-dynamic-sampling"]


def run(out, *extra):
    return train.main([*SMALL, "--out", str(out), *extra])


def rows_of(out):
    timing = ("seconds", "tok_s", "peak")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not any(t in k for t in timing)} for r in rows]


def parameters_of(out):
    return torch.load(out / "checkpoint" / "state.pt", weights_only=True)["params"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run of four steps."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert run(out) == 0
    return out


@pytest.fixture(scope="module")
def policy():
    """(model with an adapter that does something, tokenizer, completions as train.rollout makes them)."""
    args = flags.parse_args([*SMALL, "--max-new-tokens", "40"])
    tok = data.Tokenizer(flags.TINY)
    model = qwen.load(flags.TINY, "cpu", torch.float32, "nvfp4")
    model.valid_vocab = len(tok)
    params = lora.add_lora(model, 4, 4)
    torch.manual_seed(0)
    for p in params:
        p.data.add_(0.02 * torch.randn_like(p))
    rows, _ = data.prompts(tok, data.load("arithmetic", "train", n=4), args.prompt_style, 128)
    groups, _ = train.rollout(model, tok, rows, args, 0, False)
    for g in groups:
        for i, r in enumerate(g):
            r["advantage"] = float(i) - 1.4
    return model, tok, [r for g in groups for r in g], args, params


def test_a_run_leaves_every_file_it_promises(straight):
    names = {"config.json", "metrics.jsonl", "rollouts.jsonl", "adapter", "checkpoint", "metrics.png", "summary.json"}
    assert names <= {p.name for p in straight.iterdir()}
    assert not list(straight.rglob("*.tmp"))
    summary = json.loads((straight / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "steps", "seconds", "command"} <= set(summary)
    wanted = {"reward", "accuracy", "format", "reward_std", "zero_var_frac", "entropy", "length_mean", "truncated_frac",
              "grad_norm", "lr", "sigma", "clip_low_frac", "clip_high_frac", "kl", "logp_gap_mean", "logp_gap_max",
              "ratio_outside_frac", "rollout_tok_s", "update_tok_s", "seconds_rollout", "seconds_reward", "seconds_update",
              "peak_gib"}
    for line in (straight / "metrics.jsonl").read_text().splitlines():
        assert wanted <= set(json.loads(line))


def test_resume_is_exact(straight, tmp_path, monkeypatch):
    """Invariant 7, defects 6, 17: k + (n - k) steps == n steps: weights, optimizer, samples, data order, noise stage."""
    out, generate, calls = tmp_path / "run", sample.generate, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:  # ctrl-C while the fourth rollout is drawn
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(sample, "generate", interrupted)
    assert run(out) == 130
    monkeypatch.setattr(sample, "generate", generate)
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "reward": 1}\n{"step": 4, "rew')  # rows that the checkpoint knows nothing of
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert rows_of(out) == rows_of(straight)
    for a, b in zip(parameters_of(out), parameters_of(straight), strict=True):
        assert torch.equal(a, b)


def test_a_resume_with_other_flags_is_refused(straight, capsys):
    assert train.main(["--resume", "--out", str(straight), "--lr", "0.5"]) == 2
    assert "--lr" in capsys.readouterr().err


def test_sigterm_saves_before_it_stops(tmp_path):
    """A preempted job loses at most the step it was in."""
    out = tmp_path / "run"
    argv = [sys.executable, "train.py", *SMALL, "--steps", "400", "--save-every", "400", "--out", str(out)]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.time() + 60
    while time.time() < deadline and not (out / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    state = torch.load(out / "checkpoint" / "state.pt", weights_only=True)
    assert 1 <= state["step"] == len(rows_of(out))


def test_an_existing_run_folder_is_not_overwritten(straight, capsys):
    before = (straight / "metrics.jsonl").read_bytes()
    assert run(straight) == 2
    assert "--resume" in capsys.readouterr().err and (straight / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("flags, named", [
    (["--lora-rank", "0"], "--lora-rank"), (["--aqn-start", "0"], "--aqn-start"), (["--group-size", "1"], "--group-size"),
    (["--no-such-flag", "1"], "--no-such-flag"), (["--quant", "int3"], "--quant"), (["--temperature", "0"], "--temperature"),
    (["--max-prompt", "2"], "--max-prompt"), (["--data", "nothing.jsonl"], "--data"), (["--model", "no/such/folder"], "--model"),
    (["--updates-per-rollout", "9"], "--updates-per-rollout"), (["--steps", "many"], "--steps"), (["--beta2", "1"], "--beta2"),
])
def test_bad_input_is_one_line_naming_the_flag_and_writes_nothing(tmp_path, capsys, flags, named):
    try:
        code = run(tmp_path / "run", *flags)
    except SystemExit as e:  # argparse's own refusals
        code = e.code
    err = capsys.readouterr().err
    assert code == 2 and named in err.splitlines()[-1] and not (tmp_path / "run").exists()


def test_an_empty_model_folder_and_an_empty_data_set_are_errors(tmp_path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "d.jsonl").write_text("")
    for given, named in ((["--model", str(tmp_path / "m")], "json"), (["--data", str(tmp_path / "d.jsonl")], "d.jsonl")):
        assert run(tmp_path / "run", *given) == 2
        assert named in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_sampler_and_trainer_agree_on_every_token(policy):
    """Invariant 2, defect 12: the log-probs recorded while sampling are the trainer's, temperature and masked ids included."""
    model, tok, rows, _, _ = policy
    for temperature in (1.0, 0.7):
        if temperature != 1.0:
            groups = sample.generate(model, [r["prompt"] for r in rows[:4]], 2, 24, temperature, eos_ids=tok.eos_ids, seed=3)
            rows = [{"prompt": r["prompt"], "ids": s.ids, "logprobs": s.logprobs}
                    for r, g in zip(rows, groups, strict=False) for s in g]
        with torch.no_grad():
            logp, _, mask = train.token_logprobs(model, rows, temperature)
        for r, values, m in zip(rows, logp, mask, strict=True):
            assert torch.allclose(values[m], torch.tensor(r["logprobs"]), atol=1e-4)


def test_the_stop_token_is_trained(policy):
    """Trap 11: with pad == eos, a mask made by comparing ids drops the stop token, and the model never learns to stop."""
    model, tok, rows, _, _ = policy
    finished = [r for r in rows if r["finished"]]
    assert finished and all(r["ids"][-1] in tok.eos_ids for r in finished)
    _, _, mask = train.token_logprobs(model, finished, 1.0)
    assert mask.sum(1).tolist() == [len(r["ids"]) for r in finished]


def test_any_micro_batching_gives_the_same_gradient_and_loss(policy, monkeypatch):
    """Trap 14: token mean over the global batch, and the logged loss is not the last micro-batch's."""
    model, _, rows, args, params = policy
    seen = []

    def keep(p, clip):
        seen.append([q.grad.clone() for q in p])
        return torch.tensor(1.0)

    class Still:
        def step(self):
            pass

        def zero_grad(self, set_to_none):
            for p in params:
                p.grad = None

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    losses = []
    for budget in (1, 300, 10**6):
        args.micro_batch_tokens = budget
        metrics, _ = train.update(model, Still(), params, rows, args)
        losses.append(metrics["loss"].item())
    assert len(list(train.micro_batches(rows, 1))) == len(rows) and len(list(train.micro_batches(rows, 10**6))) == 1
    for grads in seen[1:]:
        for a, b in zip(grads, seen[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert max(losses) - min(losses) < 1e-5


def test_noisy_rollouts_are_off_policy_for_the_clean_update(policy):
    """Defect 4: with noise in the rollout only, the ratio is not identically 1; with the noise off it is."""
    model, tok, rows, args, _ = policy
    questions = [{"ids": r["prompt"], "question": r["question"], "answer": r["answer"]} for r in rows[::4]]
    gaps = []
    for sigma in (0.0, 0.05):
        aqn.set_noise(model, sigma, 1)
        noisy = [r for g in train.rollout(model, tok, questions, args, 1, False)[0] for r in g]
        aqn.set_noise(model, 0.0)
        with torch.no_grad():
            logp, _, mask = train.token_logprobs(model, noisy, 1.0)
        sampler = torch.cat([torch.tensor(r["logprobs"]) for r in noisy])
        gaps.append((logp[mask] - sampler).abs().mean().item())
    assert gaps[0] < 1e-5 and gaps[1] > 1e-3


def test_training_moves_the_adapter_and_leaves_one_untouched_base(straight):
    """Invariants 1 and 5: the quantized base is shared by rollout and update and never changes; B has moved."""
    model = lora.load_adapter(qwen.load(flags.TINY, "cpu", torch.float32, "nvfp4"), straight / "adapter")
    assert all(m.B.abs().sum() > 0 for _, m in lora.lora_layers(model))
    assert not [n for n, p in model.named_parameters() if p.requires_grad and not n.endswith((".A", ".B"))]


def test_full_parameter_training_moves_every_matrix(tmp_path):
    out = tmp_path / "run"
    assert run(out, "--lora-rank", "0", "--quant", "none", "--steps", "1", "--aqn-stages", "2", "--lr", "1e-3") == 0
    before = qwen.load(flags.TINY, "cpu", torch.float32)
    for p, q in zip(before.parameters(), parameters_of(out), strict=True):
        if p.dim() == 2:
            assert not torch.equal(p, q)


def test_sixteen_bit_parameters_are_trained_through_float32_masters():
    """In bfloat16 a step of 1e-5 on a weight of 1 rounds to nothing; many of them must still add up."""
    args = flags.parse_args(["--lr", "1e-4", "--weight-decay", "0"])
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = train.AdamW([p], args)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (p < 0.995).all()


def test_data_order_is_a_function_of_seed_and_cursor():
    rows = [{"i": i} for i in range(7)]
    a, b = train.Prompts(rows, 0), train.Prompts(rows, 0)
    first = a.take(5) + a.take(9)
    assert first == b.take(14) and sorted(r["i"] for r in first[:7]) == list(range(7)) and first[:7] != first[7:]
    b.cursor = 5
    assert b.take(9) == first[5:]


def test_the_arms_of_the_ablation_differ_by_one_flag():
    """Defect 10: BF16 and NVFP4, noise on and off, run at the same learning rate, data and everything else."""
    base = vars(flags.parse_args(["--model", "m", "--out", "o"]))
    for given, changed in ((["--quant", "none"], {"quant"}), (["--no-aqn"], {"aqn"})):
        arm = vars(flags.parse_args(["--model", "m", "--out", "o", *given]))
        assert {k for k in base if base[k] != arm[k]} == changed


def test_learning_rate_warms_up_and_ends_near_zero():
    args = flags.parse_args(["--lr", "1.0", "--warmup", "0.1"])
    lrs = [train.learning_rate(i, 100, args) for i in range(100)]
    assert lrs[0] == pytest.approx(0.1) and max(lrs) == lrs[9] == lrs[10] == 1.0 and lrs[-1] < 0.01


@pytest.mark.parametrize("change, told", [
    ({"reward": 0.0}, "--prompt-style"), ({"format": 0.0}, "--prompt-style boxed"), ({"truncated_frac": 1.0}, "--max-new-tokens"),
    ({"zero_var_frac": 1.0}, "--group-size"), ({"logp_gap_mean": 0.2, "sigma": 0.0}, "--old-logp trainer"),
])
def test_a_run_that_cannot_learn_is_told_what_to_do(change, told):
    """Defect 7: a prompt without the instruction that the reward wants trains on zeros, silently."""
    args = flags.parse_args([])
    fine = {"reward": 0.5, "format": 0.5, "truncated_frac": 0.1, "zero_var_frac": 0.5, "logp_gap_mean": 0.2, "sigma": 0.01}
    assert not list(train.warnings_for(fine, args))
    assert any(told in text for text in train.warnings_for({**fine, **change}, args))


def test_dynamic_sampling_replaces_groups_without_variance_and_is_bounded(policy, monkeypatch):
    model, tok, _, args, _ = policy
    rows = [{"ids": [1], "question": "q", "answer": "a"}] * 50
    drawn = []

    def fake(model, tok, prompts, args, draw, progress):
        drawn.append(len(prompts))
        return [[{"reward": float(len(drawn) > 1 and i == 0 and j == 0)} for j in range(2)] for i in range(len(prompts))], 0.0

    monkeypatch.setattr(train, "rollout", fake)
    args.dynamic_sampling, args.max_resample, args.prompts_per_step = True, 2, 4
    kept, first, sampled, _ = train.collect(model, tok, train.Prompts(rows, 0), args, 0, False)
    assert drawn == [4, 4, 3] and sampled == 11 and len(kept) == 2 and len(first) == 4
    assert all(train.has_signal(g) for g in kept)


def test_a_single_file_keeps_a_tenth_out_of_training(tmp_path):
    """Otherwise the accuracy called held-out is measured on the training questions."""
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(50)))
    rows, held = train.load_data(flags.parse_args(["--data", str(tmp_path / "d.jsonl"), "--eval-limit", "0"]))
    assert (len(rows), len(held)) == (45, 5) and not {r["question"] for r in rows} & {r["question"] for r in held}


def test_a_set_without_a_test_split_is_an_error_before_anything_is_written(tmp_path, capsys):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    assert run(tmp_path / "run", "--data", str(tmp_path / "d"), "--eval-n", "1") == 2
    assert "--eval-n 0" in capsys.readouterr().err and not (tmp_path / "run").exists()
