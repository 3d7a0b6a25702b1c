"""The meaning of the training loop: what the sampler and the update see in a run of train.py on the embedded model.

A run is recorded where sampling, update, loss and optimizer step are entered; the tests read the record. A mutation of the
loop that changes what is learned must fail one of them (tests/mutants.py)."""
import functools
import hashlib
import inspect
import json
import math
import re
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

from plumbing import arithmetic, curves, flags, metrics, run
from plumbing.files import TINY
from plumbing.tokenizer import Tokenizer

import pytest
import tokenizers
import torch

import aqn
import data
import grpo
import lora
import model as qwen
import sample
import train
from tests import conftest
from tests.conftest import adapted, drawn

POLICY_LOSS = grpo.policy_loss
SMALL = ["--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "24", "--lora-rank", "4", "--eval-n", "0",
         "--save-every", "99", "--device", "cpu", "--lr", "3e-3", "--no-dynamic-sampling",
         "--overlong", "none"]
SHORT = ["--prompts-per-step", "2", "--max-new-tokens", "8"]
Record = namedtuple("Record", "out code sampled updates losses steps")


def named(args, kw):
    """The arguments of a call of policy_loss by name, those left out with their defaults."""
    call = inspect.signature(POLICY_LOSS).bind(*args, **kw)
    call.apply_defaults()
    return call.arguments


def noise_of(model):
    return torch.cat([norm.noise for pair in aqn.norms(model) for norm in pair]).clone()


@functools.cache
def shortest():
    """Training problems by the length of their solution: 24 tokens must be enough for some answers."""
    return sorted(arithmetic.problems("train", 960), key=lambda row: len(arithmetic.solution(row)))


def problems(tmp_path, n):
    """A file of the n shortest problems."""
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in shortest()[:n]))
    return str(file)


def record(tmp_path, *argv):
    """Run train.py with what is drawn, updated and stepped written down."""
    r = Record(tmp_path / "run", [], [], [], [], [])
    generate, update, step = sample.generate, grpo.update, grpo.AdamW.step
    policy_loss = grpo.policy_loss

    def spy_generate(model, prompts, n, max_new_tokens, temperature, **kw):
        r.sampled.append({"noise": noise_of(model), "prompts": prompts, "n": n, "limit": max_new_tokens,
                          "temperature": temperature, "valid_vocab": model.valid_vocab,
                          "formats": {m.base.q and m.base.q.fmt for _, m in qwen.projections(model)}, **kw})
        return generate(model, prompts, n, max_new_tokens, temperature, **kw)

    def spy_update(model, optimizer, completions, settings):
        with torch.no_grad():
            clean = [p.clone() for p in optimizer.params]
        r.updates.append({"noise": noise_of(model), "completions": completions, "settings": settings, "rollouts": len(r.sampled),
                          "lr": optimizer.param_groups[0]["lr"], "stale": any(p.grad is not None for p in optimizer.params),
                          "group": dict(optimizer.param_groups[0]), "before": clean,
                          "rewards": [c.reward for c in completions], "advantages": [c.advantage for c in completions]})
        result = update(model, optimizer, completions, settings)
        r.updates[-1] |= {"result": result, "after": [p.detach().clone() for p in optimizer.params]}
        return result

    def spy_loss(*args, **kw):
        r.losses.append((len(r.updates) - 1, named(args, kw)))
        return policy_loss(*args, **kw)

    def spy_step(self):
        r.steps.append(torch.cat([p.grad.flatten() for p in self.params if p.grad is not None]).norm().item())
        return step(self)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(curves, "draw", lambda *a: None)
        m.setattr(sample, "generate", spy_generate)
        m.setattr(grpo, "update", spy_update)
        m.setattr(grpo, "policy_loss", spy_loss)
        m.setattr(grpo.AdamW, "step", spy_step)
        r.code.append(train.main([*SMALL, "--out", str(r.out), "--data", problems(tmp_path, 48), *argv]))
    return r


def vocabulary():
    """The last id of the embedded model's tokenizer, and 1, by its file: not by the value that the tests look at."""
    file = json.loads((TINY / "tokenizer.json").read_text())
    return 1 + max(*file["model"]["vocab"].values(), *(token["id"] for token in file["added_tokens"]))


def clean_model(r):
    """The policy that the first update of a record began with, without noise."""
    model = qwen.load(TINY, "cpu", torch.float32, "nvfp4")
    model.valid_vocab = vocabulary()
    params = lora.add_lora(model, 4, 32.0, 0)
    for p, value in zip(params, r.updates[0]["before"], strict=True):
        p.data.copy_(value)
    return model


def rows_of(r):
    return [json.loads(line) for line in (r.out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Four steps of two updates, in the stages 0, 2, 5 and 7 of ten; a narrow clip, half of the updates to warm up."""
    with pytest.MonkeyPatch.context() as m:
        m.setitem(grpo.OBJECTIVES, "dapo", replace(grpo.OBJECTIVES["dapo"], clip=(0.01, 0.5)))
        m.setattr(grpo, "WARMUP", 0.5)
        return record(tmp_path_factory.mktemp("noisy"), "--steps", "4", "--aqn-start", "0.1", "--aqn-end", "0.02",
                      "--updates-per-rollout", "2", "--seed", "1", "--max-rows", "16", "--eps-high", "0.02", "--grad-clip", "0.01",
                      "--temperature", "0.9", "--loss", "dapo", "--micro-batch-tokens", "400")


SIGMAS = [0.0, *(0.1 ** (1 - i / 8) * 0.02 ** (i / 8) for i in (1, 4, 6))]  # of the nine noisy stages the second, fifth, seventh


# ---- noise


def test_noise_is_in_the_rollout_and_not_in_the_update(noisy):
    """Noise left on in the update: Algorithm 1 trains the clean policy. Noise that never fires."""
    assert noisy.code == [0]
    sigmas = [row["sigma"] for row in rows_of(noisy)]
    assert sigmas == pytest.approx(SIGMAS)
    for call, sigma in zip(noisy.sampled, sigmas, strict=True):
        assert call["noise"].std().item() == pytest.approx(sigma, rel=0.1)
    assert len(noisy.updates) == 8 and not any(u["noise"].any() for u in noisy.updates)


def test_noise_is_drawn_anew_each_step(noisy):
    """The same Z in every step is a fixed perturbation, which the adapter learns to undo."""
    a, b = (noisy.sampled[i]["noise"] / SIGMAS[i] for i in (2, 3))
    assert a.any() and (a * b).mean().abs() < 0.2 and (a - b).std() > 1


def test_samples_noise_order_and_adapter_are_functions_of_the_seed(noisy):
    """Drawn from a global state, they would differ after a resume; without the seed, runs of five seeds are one run five times."""

    def drawn_by(seed):
        m = qwen.load(TINY, "cpu", torch.float32)
        aqn.set_noise(m, aqn.sigma(3, 4, 0.1, 0.02), aqn.noise_seed(seed, 3))
        argv = ["--data", str(noisy.out.parent / "problems.jsonl"), "--eval-n", "0", "--seed", "1"]
        rows, _ = data.questions(flags.parse(train.COMMAND, argv))
        order = [row["question"] for row in train.Prompts(rows, seed).take(4)]
        return aqn.noise_seed(seed, "samples/0"), noise_of(m).tolist(), order, lora.add_lora(m, 4, 32.0, seed)[0].tolist()

    first = noisy.updates[:2]
    order = [c.row["question"] for pair in zip(*(u["completions"][::4] for u in first), strict=True) for c in pair]
    got = noisy.sampled[0]["seed"], noisy.sampled[3]["noise"].tolist(), order, first[0]["before"][0].tolist()
    assert got == drawn_by(1) and not any(a == b for a, b in zip(got, drawn_by(0), strict=True))


def test_questions_follow_the_seed_and_the_limit():
    """Seeds that share their problems vary less than they should; held-out questions are the same for all."""
    (a, held), (b, again) = (data.questions(flags.parse(train.COMMAND, ["--seed", seed, "--eval-limit", "7"])) for seed in "01")
    assert {row["chain"] for row in a} != {row["chain"] for row in b} and held == again and len(held) == 7
    # a tenth of all problems, by their digests, is for tests alone: no row is on its side by luck
    for rows, tested in ((a, False), (b, False), (held, True)):
        assert all((hashlib.sha256(row["chain"].encode()).digest()[0] < 26) == tested for row in rows)


def test_the_loop_gets_one_pass_and_the_style_that_was_asked_for(tmp_path, monkeypatch, shallow):
    """The number of steps when none is given; prompts that ask for one format and a reward for another are zeros for good."""
    given = []
    monkeypatch.setattr(train, "learn", lambda *a: given.extend(a))
    r = record(tmp_path, "--model", str(shallow), "--prompts-per-step", "5", "--prompt-style", "boxed")
    this, _, tok, _, prompts, score, _ = given
    [row] = prompts.take(1)
    assert r.code == [0] and this.args.steps == 48 // 5
    assert row["ids"] == tok.prompt_ids(row["question"], "boxed") != tok.prompt_ids(row["question"], "tags")
    assert score([(f"\\boxed{{{row['answer']}}}", row)])[0]["reward"] == 1.2


def test_a_pass_is_of_the_prompts_that_fit_and_at_least_a_step(tmp_path, monkeypatch, capsys, shallow):
    """Counted with those that --max-prompt skips, a pass goes on into the next; of fewer prompts than a step takes, it had no step."""
    tok, given = Tokenizer(TINY), []
    lengths = sorted(len(tok.prompt_ids(row["question"])) for row in shortest()[:48])
    fit = sum(n <= lengths[24] for n in lengths)
    monkeypatch.setattr(train, "learn", lambda this, *_: given.append(this.args.steps))
    for name, prompts in (("a", "1"), ("b", "64")):
        (tmp_path / name).mkdir()
        record(tmp_path / name, "--model", str(shallow), "--prompts-per-step", prompts, "--updates-per-rollout", "1", "--max-prompt",
               str(lengths[24]))
    assert given == [fit, 1] and fit < 48
    assert f"{fit} training prompts ({48 - fit} longer than --max-prompt), {fit} steps" in capsys.readouterr().out


def test_scope_both_keeps_the_rollouts_noise_in_the_update(tmp_path):
    """--aqn-scope both: update and sampler see one policy, so their log-probs agree although it is noisy."""
    r = record(tmp_path, "--steps", "2", "--aqn-start", "0.05", "--aqn-end", "0.05", "--aqn-scope", "both",
               "--updates-per-rollout", "1", *SHORT)
    assert r.sampled[1]["noise"].any() and torch.equal(r.updates[1]["noise"], r.sampled[1]["noise"])
    assert rows_of(r)[1]["logp_gap_mean"] < 1e-5


def test_no_aqn_is_no_noise(tmp_path):
    """The ablation's other arm."""
    r = record(tmp_path, "--steps", "2", "--no-aqn", "--updates-per-rollout", "1", *SHORT)
    assert not any(c["noise"].any() for c in r.sampled) and all(row["sigma"] == 0 for row in rows_of(r))


# ---- what is sampled


def test_each_step_draws_new_samples_of_new_prompts(noisy):
    """A seed that does not change from step to step, or a cursor that stands still."""
    assert len({call["seed"] for call in noisy.sampled}) == 4
    prompts = [tuple(p) for call in noisy.sampled for p in call["prompts"]]
    assert len(prompts) == 16 == len(set(prompts))


def test_flags_reach_the_sampler(noisy):
    """Temperature, limits, rows side by side, stop tokens and the tokenizer's last id."""
    tok = Tokenizer(TINY)
    for call in noisy.sampled:
        assert (call["n"], call["limit"], call["temperature"], call["max_rows"]) == (4, 24, 0.9, 16)
        assert call["eos_ids"] == tok.eos_ids and call["valid_vocab"] == vocabulary() < 512


def test_the_rollout_runs_on_the_quantized_base(noisy):
    """The ablation would compare 16 bits with 16 bits."""
    assert all(call["formats"] == {"nvfp4"} for call in noisy.sampled)


def test_flags_reach_the_adapter(noisy):
    """An adapter scaled by anything but alpha / rank learns at another rate."""
    config = json.loads((noisy.out / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)


# ---- what is learned from


def test_groups_of_several_sizes_are_refused(noisy):
    """The replay of an old completion, say, in train.rollout, would stand in another's group."""
    with pytest.raises(ValueError, match="length"):
        grpo.set_advantages([[grpo.Completion({}, [], [], [], True)] * n for n in (2, 3)])


def test_advantages_are_the_rewards_within_their_group(noisy):
    """Negated advantages unlearn; advantages of another group, or of the batch, are noise."""
    for u in noisy.updates:
        groups = torch.tensor(u["rewards"]).view(-1, 4)
        want = grpo.advantages(groups)
        torch.testing.assert_close(torch.tensor(u["advantages"]).view(-1, 4), want)
        for reward, advantage in zip(groups, want, strict=True):
            assert (advantage[reward > reward.mean()] > 0).all() and (advantage[reward < reward.mean()] < 0).all()
    assert any(len(set(u["rewards"])) > 1 for u in noisy.updates)


def test_rewards_are_of_the_completion_alone(noisy):
    """Correct and well-formed, each at its own weight, on the text that was sampled for that question: the prompt has tags of its
    own, and what it is graded by is another's if the rows are shifted. Decoded and graded here without the project's functions."""
    tok, counts = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")), []
    for u in noisy.updates:
        for c in u["completions"]:
            text = tok.decode(c.ids, skip_special_tokens=True)
            given = re.findall("<answer>([^<]*)</answer>", text)
            correct, formed = given[-1:] == [c.row["answer"]], bool(re.search("<think>.*</think>\\s*<answer>[^<]*</answer>", text, re.S))
            assert (c.text, c.correct, c.format, c.reward) == (text, correct, formed, pytest.approx(0.2 * formed + correct))
            assert c.prompt == Tokenizer(TINY).prompt_ids(c.row["question"])
            counts.append((correct, formed))
    assert {(True, True), (False, True), (False, False)} <= {*counts}


def test_one_broken_sample_among_finite_ones_ends_the_run(tmp_path, monkeypatch, capsys):
    """A NaN in one row, beside finite ones of its group: the ratio of each of its tokens would be NaN, and the update skipped or,
    masked, learned from the others as if nothing were wrong."""
    real, broken = qwen.logits, torch.tensor([5])
    monkeypatch.setattr(qwen, "logits", lambda x, w: real(x, w) if len(x) < 6 else real(x, w).index_fill(0, broken, math.nan))
    r = record(tmp_path, "--steps", "1", *SHORT)
    assert r.code == [2] and not r.updates
    assert "1 of 8 samples have log-probs that are NaN or inf: the model overflows" in capsys.readouterr().err


def test_each_group_is_in_exactly_one_update(noisy):
    """Every update on all groups reuses completions that the policy has already moved on; a group cut in two has half a mean."""
    for step in range(4):
        first, second = noisy.updates[2 * step : 2 * step + 2]
        assert first["rollouts"] == second["rollouts"] == step + 1
        seen = [tuple(c.prompt) for u in (first, second) for c in u["completions"]]
        assert sorted(seen) == sorted(tuple(p) for p in noisy.sampled[step]["prompts"] for _ in range(4))
        assert not {tuple(c.prompt) for c in first["completions"]} & {tuple(c.prompt) for c in second["completions"]}


def test_the_ratio_is_taken_against_what_the_sampler_recorded(noisy):
    """pi_old recomputed by the trainer makes every ratio 1, noise or not."""
    for index, call in noisy.losses:
        old, advantages, mask = (call[name] for name in ("old_logp", "advantages", "mask"))
        completions = {tuple(c.ids): c for c in noisy.updates[index]["completions"]}
        for i, n in enumerate(mask.sum(1).tolist()):
            match = [c for c in completions.values() if len(c.ids) == n and torch.equal(torch.tensor(c.logprobs), old[i, :n])]
            assert match and any(c.advantage == advantages[i].item() for c in match)
    gap = [row["logp_gap_mean"] for row in rows_of(noisy)]
    assert gap[0] < 1e-5 and min(gap[1:]) > 1e-4


def test_flags_reach_the_loss(noisy):
    """Clip-higher with its bounds swapped is clip-lower."""
    for _, call in noisy.losses:
        assert (call["loss"], call["eps_low"], call["eps_high"]) == ("dapo", None, 0.02)


def test_the_loss_is_normalised_by_the_whole_update(noisy):
    """DAPO's token mean is over all micro-batches of the update, not over each."""
    assert len(noisy.losses) > len(noisy.updates)
    for index, call in noisy.losses:
        completions = noisy.updates[index]["completions"]
        assert call["total_tokens"] == sum(len(c.ids) for c in completions) and call["total_seqs"] == len(completions)


def test_a_row_tells_of_all_completions_of_its_step(noisy):
    """Statistics of one update's share, cut ones taken for finished ones, an entropy below 0."""
    ends = Tokenizer(TINY).eos_ids
    for step, row in enumerate(rows_of(noisy)):
        drawn = [c for u in noisy.updates[2 * step : 2 * step + 2] for c in u["completions"]]
        assert all(c.finished == (c.ids[-1] in ends) for c in drawn)
        want = {"reward": sum(c.reward for c in drawn) / 16, "accuracy": sum(c.correct for c in drawn) / 16,
                "format": sum(c.format for c in drawn) / 16, "length_mean": sum(len(c.ids) for c in drawn) / 16,
                "reward_std": torch.tensor([c.reward for c in drawn]).view(4, 4).std(1).mean().item(),
                "reward_se": torch.tensor([c.reward for c in drawn]).view(4, 4).mean(1).std().item() / 2,
                "truncated_frac": sum(len(c.ids) == 24 and c.ids[-1] not in ends for c in drawn) / 16,
                "sampler_entropy": -sum(sum(c.logprobs) for c in drawn) / sum(len(c.ids) for c in drawn),
                "length_max": max(len(c.ids) for c in drawn), "groups": 4, "prompts_sampled": 4, "updates": 2, "skipped": 0}
        assert {name: row[name] for name in want} == pytest.approx(want)
    assert len({c.finished for u in noisy.updates for c in u["completions"]}) == 2


def test_sampler_and_trainer_are_compared_before_anything_is_learned(noisy):
    """With the later updates in it, the gap holds what they learned; half of the clip would warn of noise twice as late."""
    counts = []
    for row, u in zip(rows_of(noisy), noisy.updates[::2], strict=True):
        sums = {name: value.item() for name, value in u["result"][0].items()}
        want = {"logp_gap_mean": sums["logp_gap"], "sampler_kl": sums["sampler_kl"], "ratio_outside_frac": sums["ratio_outside"],
                "clip_first_frac": sums["clip_low"] + sums["clip_high"], "logp_gap_max": sums["logp_gap_max"] * sums["tokens"]}
        assert {name: row[name] * sums["tokens"] for name in want} == pytest.approx(want, rel=1e-5)
        counts.append((sums["clip_low"], sums["clip_high"]))
    assert any(low and high for low, high in counts)


def test_entropy_and_clip_are_of_all_updates_by_tokens(noisy):
    """Of the first update alone, or of each alike however few its tokens are."""
    for step, row in enumerate(rows_of(noisy)):
        both = [u["result"][0] for u in noisy.updates[2 * step : 2 * step + 2]]
        tokens = sum(sums["tokens"].item() for sums in both)
        names = {"entropy": "entropy", "clip_low_frac": "clip_low", "clip_high_frac": "clip_high"}
        want = {name: sum(sums[key].item() for sums in both) / tokens for name, key in names.items()}
        assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-5)


def step_of(r, sums, norms, prompts):
    """The row of a step of this run: two groups of two completions of two and four tokens, `prompts` of them drawn."""
    groups = [[grpo.Completion({"question": "q", "answer": "7"}, [1], [2] * n, [-1.0] * n, True, reward=float(n)) for n in (2, 4)]
              for _ in range(2)]
    updates = [({**sums, "tokens": torch.tensor(tokens)}, norm) for tokens, norm in zip((5.0, 7.0), norms, strict=True)]
    r.phase("log")
    row = {"step": 0, **metrics.sample_metrics(groups), "groups": 2, "prompts_sampled": prompts, "sigma": 0.0, "lr": 1e-3,
           **metrics.update_metrics(updates, r.args.beta)}
    r.log(row, groups, None)
    return json.loads((r.out / "metrics.jsonl").read_text().splitlines()[-1])


def a_run(out, *extra):
    return run.Run(train.COMMAND, flags.parse(train.COMMAND, ["--out", str(out), *extra]), [], None)


NO_METRICS = dict.fromkeys(("loss", "clip_low", "clip_high", "kl", "logp_gap", "logp_gap_max", "sampler_kl", "ratio_outside", "entropy"),
                           torch.tensor(1.0))


def test_times_and_speeds_are_those_of_the_step(monkeypatch, tmp_path):
    """A phase that is entered twice counts twice, and no step has the last one's seconds in it; tokens a second are of all that was
    drawn, groups that were replaced among them, and of all that was trained on."""
    clock = [100.0]
    monkeypatch.setattr(run, "time", lambda: clock[0])
    r = a_run(tmp_path)
    for _ in range(2):
        for name, seconds in (("evaluate", 50), ("rollout", 3), ("reward", 1), ("rollout", 2), ("update", 4)):
            r.phase(name)
            clock[0] += seconds
        r.drawn += 30
        row = step_of(r, NO_METRICS, (1.0, 1.0), 5)
    want = {"seconds": 120, "seconds_rollout": 5, "seconds_reward": 1, "seconds_update": 4, "seconds_step": 10,
            "rollout_tok_s": 30 / 5, "update_tok_s": 12 / 4}
    assert {name: row[name] for name in want} == pytest.approx(want)
    r.clock = {"rollout": 1.0, "update": 4.0}
    row = step_of(r, NO_METRICS, (math.inf, 1.0), 5)  # an update that was skipped took its time as well
    assert (row["updates"], row["skipped"], row["update_tok_s"]) == (1, 1, 12 / 4)


def test_one_prompt_says_nothing_of_the_rewards_error():
    """0.0 would be a mean without error; the tracker and the pictures leave out what is null."""
    group = [grpo.Completion({}, [1], [2], [-1.0], True, reward=r) for r in (0.0, 1.0)]
    assert metrics.sample_metrics([group])["reward_se"] is None and metrics.sample_metrics([group, group])["reward_se"] == 0.0


def test_each_second_is_counted_where_it_is_spent(monkeypatch):
    """Grading, or the held-out questions, counted as sampling: tokens a second of something else."""
    told = []
    monkeypatch.setattr(sample, "generate", lambda *a, **kw: told.append("drawn") or [[sample.Sample([1], [-1.0], True)]])
    monkeypatch.setattr(train.evaluation, "evaluate", lambda *a, **kw: told.append("asked"))
    this = SimpleNamespace(args=flags.parse(train.COMMAND, []), phase=told.append, evaluated=lambda *a: None, drawn=4)
    tok = SimpleNamespace(eos_ids=[2], decode=str)
    train.evaluate(this, None, tok, None, [])
    train.rollout(this, None, tok, lambda pairs: told.append("graded") or [{"reward": 1.0, "correct": True, "format": True}], [{"ids": [1]}], 0)
    assert told == ["evaluate", "asked", "rollout", "drawn", "reward", "graded", "rollout"] and this.drawn == 5


def test_an_update_that_was_skipped_is_not_in_the_means(tmp_path):
    """One NaN, and a row has no loss, no entropy and no gradient norm."""
    r = a_run(tmp_path)
    r.clock.update(rollout=1.0, update=1.0)
    row = step_of(r, NO_METRICS | {"loss": torch.tensor(3.0)}, (math.nan, 0.5), 2)
    assert (row["updates"], row["skipped"], row["grad_norm"], row["loss"]) == (1, 1, 0.5, 3.0)
    assert row["entropy"] == pytest.approx(1 / 7)


def test_a_step_without_an_update_has_no_entropy(tmp_path, capsys):
    """Its groups all taught nothing, or every update was skipped: an entropy of 0 would be drawn as one that was measured."""
    r = a_run(tmp_path)
    r.clock.update(rollout=1.0, update=1.0)
    row = step_of(r, NO_METRICS, (math.nan, math.nan), 2)
    assert {row[name] for name in ("entropy", "kl", "grad_norm", "loss", "logp_gap_mean", "clip_first_frac")} == {None}
    assert "ent - | grad - | dlogp - | sigma" in capsys.readouterr().out


def test_the_kl_is_of_all_updates(tmp_path):
    """Only sampler and trainer are compared before the first update moves one of them; then the KL to the base is still 0.
    Without --beta it is not measured: a 0 there said that the policy had not moved."""
    for beta, kl in (("0.1", pytest.approx(2 / 12)), ("0", None)):
        r = a_run(tmp_path, "--beta", beta)
        r.clock.update(rollout=1.0, update=1.0)
        row = step_of(r, NO_METRICS, (1.0, 1.0), 2)
        assert (row["kl"], row["sampler_kl"]) == (kl, pytest.approx(1 / 5))


# ---- the optimizer step


def test_learning_rate_of_each_update(noisy):
    """A rate that is never set stays at its peak: no warm-up, no decay."""
    total, warm = 8, 4
    want = [3e-3 * (i + 1) / warm if i < warm else 3e-3 * 0.5 * (1 + math.cos(math.pi * (i - warm) / (total - warm)))
            for i in range(total)]
    assert [u["lr"] for u in noisy.updates] == pytest.approx(want)
    assert [row["lr"] for row in rows_of(noisy)] == pytest.approx(want[1::2])


def test_adamw_is_the_papers(noisy):
    """AdamW's own defaults are (0.9, 0.999) and 0.01."""
    for u in noisy.updates:
        assert (u["group"]["betas"], u["group"]["weight_decay"]) == ((0.9, 0.99), 0.1)
    assert grpo.learning_rate(4, 100, 1.0) == 0.5  # half of a tenth


def test_constants_that_a_script_sets_are_used(policy, monkeypatch):
    """They were default arguments, bound when their file was read: a script that set another number trained as before."""
    monkeypatch.setattr(grpo, "BETAS", (0.5, 0.6))
    monkeypatch.setattr(grpo, "WEIGHT_DECAY", 0.0)
    monkeypatch.setattr(grpo, "TIS_CAP", 1.5)
    monkeypatch.setattr(aqn, "STAGES", 2)
    [group] = grpo.AdamW([torch.nn.Parameter(torch.ones(2))], 0.1).param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.0)
    assert {call["tis_cap"] for call in arguments(policy, monkeypatch, old_logp="current")[0]} == {1.5}
    assert aqn.sigma(1, 2, 0.3, 0.1) == 0.1


def test_weight_decay_is_decoupled_and_small_gradients_count(monkeypatch):
    """In the gradient, Adam would divide the decay by its own size; an eps above the gradients takes the step away."""
    p = torch.nn.Parameter(torch.ones(2))
    monkeypatch.setattr(grpo, "WEIGHT_DECAY", 0.5)
    optimizer = grpo.AdamW([p], 0.1)
    p.grad = torch.tensor([1e-5, -1e-5])
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([0.95 - 0.1, 0.95 + 0.1]), atol=2e-4, rtol=0)


def test_gradients_are_clipped_and_the_norm_before_is_logged(noisy):
    """Without clipping one bad group decides the step."""
    assert len(noisy.steps) == 8 and max(noisy.steps) <= 0.01 * 1.001
    norms = [u["result"][1] for u in noisy.updates]
    assert max(norms) > 0.01
    means = [(a + b) / 2 for a, b in zip(norms[::2], norms[1::2], strict=True)]
    assert [row["grad_norm"] for row in rows_of(noisy)] == pytest.approx(means)


def test_every_update_moves_the_adapter_and_nothing_else_does(noisy):
    """An update whose result is thrown away, or parameters that change between updates."""
    for u, following in zip(noisy.updates, [*noisy.updates[1:], None], strict=True):
        assert any(not torch.equal(a, b) for a, b in zip(u["before"], u["after"], strict=True))
        assert following is None or all(torch.equal(a, b) for a, b in zip(u["after"], following["before"], strict=True))


def test_every_update_begins_without_a_gradient(noisy):
    """Gradients that pile up: each update would repeat all the earlier ones."""
    assert not any(u["stale"] for u in noisy.updates)


def test_the_logged_loss_is_the_mean_over_the_updates(noisy):
    """A sum grows with --updates-per-rollout."""
    for step, row in enumerate(rows_of(noisy)):
        losses = [u["result"][0]["loss"].item() for u in noisy.updates[2 * step : 2 * step + 2]]
        assert row["loss"] == pytest.approx(sum(losses) / 2)


def test_a_gradient_that_is_not_finite_changes_nothing(monkeypatch):
    """A NaN in one completion would be in every parameter after the step."""
    loss = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *a, **kw: (loss(*a, **kw)[0] * float("nan"), loss(*a, **kw)[1]))
    model = qwen.load(TINY, "cpu", torch.float32, "nvfp4")
    params = lora.add_lora(model, 2, 2)
    before = [p.detach().clone() for p in params]
    optimizer = grpo.AdamW(params, 0.1)
    completions = [grpo.Completion({}, [1, 2, 3], [4, 5], [-1.0, -1.0], True, advantage=1.0)]
    _, norm = grpo.update(model, optimizer, completions, conftest.settings())
    assert math.isnan(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True)) and not optimizer.state
    assert all(p.grad is None for p in params)


def test_a_skipped_update_leaves_nothing_in_the_gradients():
    """A NaN that stayed in a gradient would be in all later ones."""
    model = qwen.load(TINY, "cpu", torch.float32, "none")
    optimizer = grpo.AdamW(list(model.requires_grad_(True).parameters()), 1e-3)

    def update(advantage):
        cs = [grpo.Completion({}, [1, 2, 3], [4, 5], [-5.0, -5.0], True, advantage=a) for a in (advantage, -1.0)]
        return grpo.update(model, optimizer, cs, conftest.settings())[1]

    first, broken, after = update(1.0), update(math.nan), update(1.0)
    assert math.isfinite(first) and math.isnan(broken) and math.isfinite(after)


# ---- options


@pytest.fixture(scope="module")
def policy():
    """(model whose adapter does something, its optimizer, eight graded completions of two prompts, two of them cut)."""
    model, tok, optimizer = adapted(0.05)
    completions = drawn(model, tok, 2, seed=1)
    for i, c in enumerate(completions):
        c.finished, c.advantage = i not in (1, 6), i % 4 - 1.4
    return model, optimizer, completions


def arguments(policy, monkeypatch, **settings):
    """What one update passes to policy_loss, by name; micro-batches of one completion, keyed by its ids."""
    model, optimizer, completions = policy
    calls, real = [], POLICY_LOSS

    def spy(*args, **kw):
        calls.append(named(args, kw))
        return real(*args, **kw)

    monkeypatch.setattr(grpo, "policy_loss", spy)
    result = grpo.update(model, optimizer, completions, conftest.settings(micro_batch_tokens=1, max_new_tokens=40, **settings))
    return calls, result


def test_the_kl_reference_is_the_model_without_its_adapter(policy, monkeypatch):
    """Against itself the KL is always 0, and --beta does nothing; at another temperature it is never 0. Logged per token."""
    model, _, completions = policy
    aqn.set_noise(model, 0.1, seed=1)  # as with --aqn-scope both: the reference has none
    calls, result = arguments(policy, monkeypatch, beta=0.1, temperature=0.7)
    aqn.clear(model)
    with torch.no_grad(), lora.disabled(model):
        want = {tuple(c.ids): grpo.completion_logprobs(model, [c], 0.7)[0] for c in completions}
    for call in calls:
        ref = call["ref_logp"]
        assert any(w.shape == ref.shape and torch.allclose(w, ref, atol=1e-5) for w in want.values())
        assert not torch.allclose(ref, call["logp"], atol=1e-3) and call["beta"] == 0.1
    d = torch.cat([(call["ref_logp"] - call["logp"]).flatten() for call in calls])
    assert metrics.mean_metrics(result[0])["kl"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)


def test_trainer_logprobs_are_those_before_the_first_update(tmp_path):
    """--old-logp trainer: recorded after an update, the second update's ratio would start at 1 again; and the weight that
    corrects for the sampler must come along, capped; at another temperature than the update's, no ratio would be 1."""
    r = record(tmp_path, "--steps", "1", "--updates-per-rollout", "2", "--old-logp", "trainer", "--aqn-schedule", "eq8",
               "--aqn-start", "0.05", "--aqn-end", "0.01", "--lr", "0.05", "--temperature", "0.9")
    assert rows_of(r)[0]["sigma"] == 0.05
    model = clean_model(r)
    for u in r.updates:
        for c in u["completions"]:
            with torch.no_grad():
                logp = grpo.completion_logprobs(model, [c], 0.9)[0][0]
            torch.testing.assert_close(torch.tensor(c.trainer_logprobs), logp, atol=1e-4, rtol=0)
            assert not torch.allclose(torch.tensor(c.logprobs), logp, atol=1e-3)  # the sampler was noisy
    second = [call for index, call in r.losses if index == 1]
    assert all((c["logp"] - c["trainer_logp"]).abs().max() > 1e-4 and c["tis_cap"] == 2.0 for c in second)


def test_current_logprobs_make_every_ratio_one_and_keep_the_weight(policy, monkeypatch):
    """--old-logp current: no clip acts, no second pass is needed, the truncated weight corrects for the sampler."""
    model, _, completions = policy
    aqn.set_noise(model, 0.05, 1)  # the policy is not the one that sampled
    monkeypatch.setitem(grpo.OBJECTIVES, "grpo", replace(grpo.OBJECTIVES["grpo"], clip=(0.0, 0.0)))
    calls, result = arguments(policy, monkeypatch, old_logp="current")
    aqn.set_noise(model, 0.0)
    for call in calls:
        assert torch.equal(call["trainer_logp"], call["logp"].detach()) and call["tis_cap"] == 2.0
        assert not call["trainer_logp"].requires_grad  # the weight is a constant
        assert not torch.allclose(call["old_logp"], call["trainer_logp"], atol=1e-3)
    assert result[0]["clip_low"] == result[0]["clip_high"] == 0 and result[0]["logp_gap"] > 0
    assert result[1] > 0  # not detached, the ratio would be 1 whatever the parameters, its gradient 0


def test_sampler_anchor_takes_no_weight(policy, monkeypatch):
    """--old-logp sampler: the ratio itself corrects; a weight on top would count the gap twice."""
    calls, _ = arguments(policy, monkeypatch)
    assert all(call["trainer_logp"] is None for call in calls)


def test_overlong_mask_leaves_cut_completions_out(policy, monkeypatch):
    """DAPO: a completion that was cut is neither right nor wrong."""
    calls, result = arguments(policy, monkeypatch, overlong="mask")
    kept = [c for c in policy[2] if c.finished]
    assert len(kept) == 6 and len(calls) == 6 and result[0]["tokens"] == sum(len(c.ids) for c in kept)
    assert all(call["total_seqs"] == 6 and call["total_tokens"] == result[0]["tokens"] for call in calls)
    for trains_on_all in ("none", "soft"):
        assert len(arguments(policy, monkeypatch, overlong=trains_on_all)[0]) == 8


def test_the_logged_entropy_is_of_the_policy_at_the_tokens_that_are_trained_on(policy, monkeypatch):
    """The number that tells a collapse: over each token's distribution, at the temperature of the run."""
    model, _, completions = policy
    _, result = arguments(policy, monkeypatch, temperature=0.7, overlong="mask")
    with torch.no_grad():
        found = [grpo.completion_logprobs(model, [c], 0.7)[1] for c in completions if c.finished]
    assert metrics.mean_metrics(result[0])["entropy"] == pytest.approx(torch.cat(found, 1).mean().item(), rel=1e-4) != 0


def test_an_update_with_nothing_to_train_on_changes_nothing(policy):
    """All completions cut, or no group with signal: no step, which would move the parameters by the momentum of earlier ones."""
    model, _, completions = policy
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = grpo.AdamW(params, 0.1)
    before = [p.detach().clone() for p in params]
    cut, settings = [c for c in completions if not c.finished], conftest.settings(overlong="mask")
    grpo.record_trainer_logprobs(model, cut, settings)
    assert len(cut) == 2 and grpo.update(model, optimizer, cut, settings) is None and grpo.update(model, optimizer, [], settings) is None
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True)) and not optimizer.state


def test_the_trainers_own_logprobs_keep_nothing_for_a_backward(policy, monkeypatch):
    """A pass whose activations nobody will ask for would hold as many of them as an update."""
    kept, real = [], grpo.completion_logprobs
    monkeypatch.setattr(grpo, "completion_logprobs", lambda *a: kept.append(real(*a)) or kept[-1])
    grpo.record_trainer_logprobs(policy[0], policy[2], conftest.settings(micro_batch_tokens=100))
    assert kept and not any(logp.requires_grad for logp, _, _ in kept)
    for c in policy[2]:
        c.trainer_logprobs = None


def test_dr_grpo_divides_by_a_constant_also_where_completions_are_masked(policy, monkeypatch):
    """Its divisor is the budget of the rollout: fewer finished completions must not make each of them count for more."""
    for overlong in ("none", "mask"):
        calls, _ = arguments(policy, monkeypatch, loss="dr_grpo", overlong=overlong)
        assert all(call["total_seqs"] == 8 and call["max_len"] == 40 for call in calls)


@pytest.mark.parametrize("loss", ["dr_grpo", "own"])
def test_dr_grpo_does_not_divide_by_the_standard_deviation(tmp_path, monkeypatch, loss):
    """Nor does a row of one's own that says so."""
    monkeypatch.setitem(grpo.OBJECTIVES, "own", replace(grpo.OBJECTIVES["dapo"], scale=False))
    r = record(tmp_path, "--steps", "1", "--updates-per-rollout", "1", "--loss", loss)
    rewards = torch.tensor(r.updates[0]["rewards"]).view(4, 4)
    want = rewards - rewards.mean(1, keepdim=True)
    torch.testing.assert_close(torch.tensor(r.updates[0]["advantages"]).view(4, 4), want)
    assert want.any()


@pytest.mark.parametrize(("overlong", "want"), [("none", 1.0), ("mask", 1.0), ("soft", 0.5)])
def test_only_soft_lowers_the_reward_of_a_long_completion(overlong, want):
    """A masked completion is neither right nor wrong: penalised as well, it would lower the mean of its group."""
    args = SimpleNamespace(overlong=overlong, max_new_tokens=16)
    c = grpo.Completion({}, [1], [2] * 15, [-1.0] * 15, False)
    train.grade([c], SimpleNamespace(decode=str), lambda pairs: [{"reward": 1.0, "correct": True, "format": False}], args)
    assert c.reward == want


def test_dynamic_sampling_replaces_groups_without_variance_and_is_bounded(tmp_path, monkeypatch):
    """DAPO: what has equal rewards is not trained on; further prompts are drawn at most twice, under the same noise and another
    seed; statistics and the samples shown are of the first rollout. What is drawn again is trained on as the rest is: it had no
    advantages, or no log-probs of the trainer."""
    real, calls = train.rollout, []

    def scripted(run, model, tok, score, rows, draw):
        groups = real(run, model, tok, score, rows, draw)
        for i, g in enumerate(groups):
            for j, c in enumerate(g):  # the first rollout has signal in one group of four, the second in one, the third in none
                c.reward = float(j == 0 and i == 0 and len(calls) < 2)
        calls.append((draw, [row["question"] for row in rows]))
        return groups

    monkeypatch.setattr(train, "rollout", scripted)
    r = record(tmp_path, "--steps", "1", "--updates-per-rollout", "1", "--dynamic-sampling", "--aqn-schedule", "eq8",
               "--aqn-start", "0.05", "--old-logp", "trainer")
    assert [len(rows) for _, rows in calls] == [4, 3, 2] and len({draw for draw, _ in calls}) == 3
    assert len({q for _, rows in calls for q in rows}) == 9 and len({c["seed"] for c in r.sampled}) == 3
    assert r.sampled[0]["noise"].any() and all(torch.equal(c["noise"], r.sampled[0]["noise"]) for c in r.sampled)
    trained = r.updates[0]["completions"]
    assert [c.row["question"] for c in trained] == [q for _, rows in calls[:2] for q in rows[:1] * 4]
    assert r.updates[0]["advantages"] == pytest.approx(2 * [1.5, -0.5, -0.5, -0.5], rel=1e-3)  # (1 - 1/4) / (1/2)
    model = clean_model(r)
    for c in trained:
        with torch.no_grad():
            logp = grpo.completion_logprobs(model, [c], 1.0)[0][0]
        torch.testing.assert_close(torch.tensor(c.trainer_logprobs), logp, atol=1e-4, rtol=0)
        assert not torch.allclose(torch.tensor(c.logprobs), logp, atol=1e-3)
    [row] = rows_of(r)
    assert (row["groups"], row["prompts_sampled"], row["zero_var_frac"], row["reward"]) == (2, 9, 0.75, 1 / 16)
    shown = [json.loads(line)["question"] for line in (r.out / "rollouts.jsonl").read_text().splitlines()]
    assert shown == calls[0][1][:2]


# ---- learning


def test_a_few_steps_raise_the_reward(tmp_path, monkeypatch):
    """The whole loop, end to end, on four problems again and again: what is rewarded becomes more frequent."""
    monkeypatch.setattr(curves, "draw", lambda *a: None)
    monkeypatch.setattr(grpo, "WARMUP", 0)
    out = tmp_path / "run"
    code = train.main([*SMALL, "--steps", "3", "--group-size", "8", "--lora-rank", "8",
                       "--data", problems(tmp_path, 4), "--out", str(out)])
    rewards = [json.loads(line)["reward"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert code == 0 and rewards[-1] - rewards[0] > 0.15
