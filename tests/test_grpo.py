"""Objectives against hand-written NumPy and finite differences."""
import math

from plumbing import metrics

import numpy as np
import pytest
import torch

import grpo
from tests import conftest


def batch(seed=0, B=5, T=7, drift=0.4):
    """A float64 batch whose ratios cross both clip bounds, with ragged lengths (a row of one token included)."""
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3
    old = logp + drift * torch.randn(B, T, generator=g, dtype=torch.float64)
    adv = torch.tensor([1.3, -0.8, -1.1, 0.4, -0.2], dtype=torch.float64)[:B]
    lengths = torch.tensor([T, 3, 1, 5, T][:B])
    return logp, old, adv, lengths


def mask_of(lengths):
    return torch.arange(lengths.max()) < lengths[:, None]


def means(m):
    """As metrics.jsonl has them, with the entropy that grpo.batch_loss adds."""
    return metrics.mean_metrics(m | {"entropy": torch.zeros(())})


def by_hand(logp, old, adv, lengths, loss, lo, hi, ref=None, beta=0.0, own=None, cap=None, max_len=None):
    """Token by token, from the formulas, in plain Python floats."""
    logp, old, adv = logp.numpy(), old.numpy(), adv.numpy()
    rows = []
    for i, n in enumerate(lengths.tolist()):
        anchor = old[i] if own is None else own[i].numpy()
        seq = np.exp(np.sum(logp[i, :n] - anchor[:n]) / n)
        row = []
        for t in range(n):
            r = seq if loss == "gspo" else np.exp(logp[i, t] - anchor[t])
            gain = min(r * adv[i], min(max(r, 1 - lo), 1 + hi) * adv[i])
            if own is not None:
                gap = (anchor[:n] - old[i, :n]).mean() if loss == "gspo" else anchor[t] - old[i, t]
                gain *= min(np.exp(gap), cap)
            d = 0.0 if ref is None else ref[i, t].item() - logp[i, t]
            row.append(-gain + beta * (np.exp(d) - d - 1))
        rows.append(row)
    if loss == "dapo":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if loss == "dr_grpo":
        return sum(map(sum, rows)) / (len(rows) * max_len)
    return sum(sum(r) / len(r) for r in rows) / len(rows)


@pytest.mark.parametrize("extra", ["plain", "kl", "tis"])
@pytest.mark.parametrize("loss", [name for name in grpo.OBJECTIVES if name != "cispo"])
def test_each_objective_equals_numpy_and_its_gradient_finite_differences(loss, extra):
    """A wrong normaliser, clip side or sign in any objective."""
    logp, old, adv, lengths = batch(drift=0.15 if loss == "gspo" else 0.4)
    lo, hi = (0.02, 0.03) if loss == "gspo" else (0.2, 0.28)
    g = torch.Generator().manual_seed(9)
    noise = 0.3 * torch.randn(logp.shape, generator=g, dtype=torch.float64)
    kw, hand = {"max_len": 11}, {"max_len": 11}
    if extra == "kl":
        kw |= {"ref_logp": logp + noise, "beta": 0.3}
        hand |= {"ref": logp + noise, "beta": 0.3}
    if extra == "tis":
        kw |= {"trainer_logp": old + noise, "tis_cap": 1.1}
        hand |= {"own": old + noise, "cap": 1.1}
    mask = mask_of(lengths)

    def f(x):
        return grpo.policy_loss(x, old, adv, mask, loss, lo, hi, **kw)[0]

    x = logp.clone().requires_grad_()
    value = f(x)
    assert value.item() == pytest.approx(by_hand(logp, old, adv, lengths, loss, lo, hi, **hand), rel=1e-12)
    value.backward()
    h = 1e-6
    for i, t in np.ndindex(*logp.shape):
        e = torch.zeros_like(logp)
        e[i, t] = h
        assert x.grad[i, t].item() == pytest.approx(((f(logp + e) - f(logp - e)) / (2 * h)).item(), rel=1e-5, abs=1e-8)


def test_cispo_weighs_every_token_by_its_clipped_ratio():
    """A clip that stops the gradient, or one that flows through the weight: CISPO's gradient is clip(ratio) A d logp."""
    logp, old, adv, lengths = batch(drift=1.5)
    mask, x = mask_of(lengths), logp.clone().requires_grad_()
    value, _ = grpo.policy_loss(x, old, adv, mask, "cispo", eps_low=0.5, eps_high=1.0)
    value.backward()
    weight = (logp - old).exp().clamp(0.5, 2.0) * adv[:, None] * mask / mask.sum()
    torch.testing.assert_close(x.grad, -weight)
    torch.testing.assert_close(value.detach(), -(weight * logp).sum())
    assert (((logp - old).exp() > 2.0) & mask).any()


def test_cispo_caps_ratios_at_five_unless_told():
    """With PPO's clip, tokens that the policy has already moved on would weigh as if it had not."""
    logp = torch.tensor([[0.01, 3.0, 9.0]]).log().requires_grad_()
    loss, _ = grpo.policy_loss(logp, torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3, dtype=torch.bool), "cispo")
    loss.backward()
    torch.testing.assert_close(logp.grad, -torch.tensor([[0.01, 3.0, 5.0]]) / 3)


def test_each_objective_has_its_own_clip():
    """GSPO's ratios are a thousand times closer to 1 than a token's: with 0.2 it would never clip."""
    args = torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool)
    for loss, high in (("grpo", 1.2), ("dapo", 1.28), ("dr_grpo", 1.2), ("gspo", 1.0004)):
        value, m = grpo.policy_loss(torch.ones(1, 1), *args, loss, max_len=1)
        assert value.item() == pytest.approx(-high) and m["clip_high"] == 1
        low = grpo.policy_loss(-torch.ones(1, 1), args[0], -args[1], args[2], loss, max_len=1)[0].item()
        assert low == pytest.approx(1 - 3e-4 if loss == "gspo" else 0.8)
        assert grpo.policy_loss(torch.ones(1, 1), *args, loss, 0.5, 0.5, max_len=1)[0].item() == pytest.approx(-1.5)


def test_clipped_tokens_are_counted_where_the_gradient_stops():
    """Below the clip with A > 0, or above it with A < 0, PPO's minimum is the plain gain: nothing is lost there. Nor in a group of
    equal rewards, which has no gradient anyway."""
    ratio = torch.tensor([[0.5, 1.0, 2.0], [0.5, 1.0, 2.0]])
    logp, mask = ratio.log().requires_grad_(), torch.tensor([[True] * 3, [True, True, False]])
    for sign, low, high in ((1.0, 0, 1), (-1.0, 2, 0)):
        loss, m = grpo.policy_loss(logp, torch.zeros(2, 3), sign * torch.ones(2), mask)
        [grad] = torch.autograd.grad(loss, logp)
        assert (m["clip_low"].item(), m["clip_high"].item()) == (low, high)
        assert ((grad == 0) & mask).sum() == low + high
        mean = means(m)
        assert (mean["clip_low_frac"], mean["clip_high_frac"]) == (low / 5, high / 5)
    m = grpo.policy_loss(logp, torch.zeros(2, 3), torch.zeros(2), mask)[1]
    assert m["clip_low"] == m["clip_high"] == 0


def test_what_is_counted_as_clipped_is_the_objectives_own_clip():
    """PPO's rule counted CISPO's weights above 5 only where A > 0. GSPO's ratio is a completion's: its padding is no token."""
    logp, mask = torch.tensor([[0.5, 2.0, 6.0], [0.5, 2.0, 6.0]]).log(), torch.ones(2, 3, dtype=torch.bool)
    m = grpo.policy_loss(logp, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, "cispo")[1]
    assert (m["clip_low"], m["clip_high"]) == (0, 2)
    m = grpo.policy_loss(logp, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, "cispo", eps_low=0.2)[1]
    assert (m["clip_low"], m["clip_high"]) == (2, 2)
    mask[:, 2] = False
    m = grpo.policy_loss(logp + 1, torch.zeros(2, 3), torch.tensor([1.0, 0.0]), mask, "gspo")[1]
    assert (m["clip_low"], m["clip_high"]) == (0, 2)


def test_the_k3_estimate_of_almost_equal_policies_keeps_its_digits():
    """exp(d) - 1 cancels: in float32 a KL of 5e-9 nats a token was -4e-9."""
    d = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)) * 1e-4
    mask, zero = torch.ones(1, 4096, dtype=torch.bool), torch.zeros(1, 4096)
    want = (d.double().expm1() - d.double()).sum().item()
    m = grpo.policy_loss(d, zero, torch.zeros(1), mask)[1]
    assert m["sampler_kl"].item() == pytest.approx(want, rel=1e-3)
    m = grpo.policy_loss(zero, zero, torch.zeros(1), mask, beta=0.1, ref_logp=d)[1]
    assert m["kl"].item() == pytest.approx(want, rel=1e-3)


def test_ratio_is_against_the_samplers_logprobs():
    """Old log-probs recomputed by the trainer make every ratio 1, so the clip never acts."""
    logp, old, adv, lengths = batch()
    mask = mask_of(lengths)
    off = grpo.policy_loss(logp, old, adv, mask)[1]
    on = grpo.policy_loss(logp, logp, adv, mask)[1]
    r = (logp - old).exp()
    assert off["clip_high"] == ((r > 1.2) & (adv[:, None] > 0) & mask).sum() > 0
    assert off["clip_low"] == ((r < 0.8) & (adv[:, None] < 0) & mask).sum() > 0
    assert off["ratio_outside"] == (((r < 0.9) | (r > 1.1)) & mask).sum() > 0
    assert off["logp_gap_max"] == (logp - old)[mask].abs().max()
    torch.testing.assert_close(off["logp_gap"], (logp - old)[mask].abs().sum())
    torch.testing.assert_close(off["sampler_kl"], (r - 1 - r.log())[mask].sum())
    assert not any(on[k] for k in ("clip_high", "clip_low", "ratio_outside", "logp_gap", "logp_gap_max"))


def test_a_clip_of_zero_is_not_the_default():
    """--eps-high 0 says that no ratio above 1 is rewarded."""
    args = torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool)
    assert grpo.policy_loss(torch.full((1, 1), 0.1), *args, eps_low=0.0, eps_high=0.0)[0].item() == pytest.approx(-1.0)
    assert grpo.policy_loss(torch.full((1, 1), -0.1), args[0], -args[1], args[2], eps_low=0.0, eps_high=0.0)[0].item() == pytest.approx(1.0)


@pytest.mark.parametrize("loss", grpo.OBJECTIVES)
def test_micro_batches_add_up_to_the_full_batch(loss):
    """DAPO's token mean: per-micro-batch means, or the last micro-batch's loss reported as the loss."""
    logp, old, adv, lengths = batch()
    mask = mask_of(lengths)
    kw = dict(loss=loss, ref_logp=old, beta=0.1, max_len=9)
    x = logp.clone().requires_grad_()
    full, whole = grpo.policy_loss(x, old, adv, mask, **kw)
    full.backward()
    y, parts = logp.clone().requires_grad_(), []
    for rows in ([0], [1, 2, 3], [4]):
        kw["ref_logp"] = old[rows]
        part, m = grpo.policy_loss(y[rows], old[rows], adv[rows], mask[rows], total_tokens=int(mask.sum()), total_seqs=5, **kw)
        part.backward()
        parts.append(m)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-15)
    total = metrics.sum_metrics(parts)
    for k in whole:
        torch.testing.assert_close(total[k], whole[k], msg=k)
    assert abs(parts[-1]["loss"] - full) > 1e-3 * full.abs()  # the last micro-batch alone is another number
    mean = means(total)
    assert mean["logp_gap_mean"] == pytest.approx((logp - old)[mask].abs().mean().item())
    assert mean["loss"] == pytest.approx(full.item())


@pytest.mark.parametrize("loss", grpo.OBJECTIVES)
def test_padding_reaches_neither_loss_nor_gradient(loss):
    """-inf or nan in the padding times a zero mask is nan; a padding token must also not count as one."""
    logp, old, adv, lengths = batch()
    mask = mask_of(lengths)
    want = grpo.policy_loss(logp, old, adv, mask, loss, max_len=9, ref_logp=old, beta=0.1)
    dirty = logp.masked_fill(~mask, -torch.inf).requires_grad_()
    bad = old.masked_fill(~mask, torch.nan)
    value, m = grpo.policy_loss(dirty, bad, adv, mask, loss, max_len=9, ref_logp=bad, beta=0.1)
    value.backward()
    assert value == want[0] and all(m[k] == want[1][k] for k in m)
    assert dirty.grad.isfinite().all() and not dirty.grad[~mask].any() and dirty.grad[mask].any()


def test_a_ratio_too_large_for_its_float_leaves_the_other_tokens_their_gradient():
    """inf behind the clip has gradient inf * 0: one token's NaN was in all parameters, and the whole update was skipped."""
    logp = torch.full((2, 2), -0.1, requires_grad=True)
    old = torch.tensor([[-100.0, -0.1], [-60.1, -0.1]])
    value, m = grpo.policy_loss(logp, old, torch.tensor([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool))
    value.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[0.0, -0.25], [0.25 * math.exp(60), 0.25]]), rtol=1e-4, atol=0)
    assert m["clip_high"] == 1


def test_masks_come_from_lengths():
    """With pad == eos, a mask made by comparing ids drops the stop token, and the model never learns to stop."""
    eos = pad = 2
    ids = torch.tensor([[5, 6, eos, pad], [eos, pad, pad, pad], [7, 8, 9, 4]])
    batch = [grpo.Completion({}, [0], row[:n], [], True) for row, n in zip(ids.tolist(), (3, 1, 4), strict=True)]
    mask = grpo.in_rows(batch, *torch.zeros(2, 8))[2]
    assert mask.tolist() == [[True] * 3 + [False], [True] + [False] * 3, [True] * 4]
    assert mask[ids == eos].sum() == 2 and (ids != pad).sum() < mask.sum()
    logp = torch.zeros(3, 4, requires_grad=True)
    grpo.policy_loss(logp, torch.zeros(3, 4), torch.ones(3), mask)[0].backward()
    assert (logp.grad != 0).equal(mask)


def test_overlong_rows_can_be_masked_or_penalised():
    """Cut completions counted as wrong answers; an all-masked batch must give 0, not nan."""
    mask = mask_of(torch.tensor([3, 4]))
    logp = torch.zeros(2, 4, requires_grad=True)
    for loss in grpo.OBJECTIVES:
        for totals in ({}, {"total_tokens": 0, "total_seqs": 0}):
            value, m = grpo.policy_loss(logp, torch.ones(2, 4), torch.ones(2), mask & False, loss, max_len=4, **totals)
            assert value == 0 and means(m)["logp_gap_mean"] == 0
    assert [grpo.soft_overlong_penalty(n, 160) for n in (10, 140, 150, 160, 180)] == [0, 0, -0.5, -1, -1]


@pytest.mark.parametrize("loss", grpo.OBJECTIVES)
def test_a_completion_without_tokens_to_train_on_is_not_counted(loss):
    """A mean over completions whose divisor knows the masked ones is smaller than the mean."""
    logp, old, adv, lengths = batch()
    mask = mask_of(lengths)
    mask[1] = False
    kept = [0, 2, 3, 4]
    whole = grpo.policy_loss(logp, old, adv, mask, loss, max_len=9)[0]
    torch.testing.assert_close(whole, grpo.policy_loss(logp[kept], old[kept], adv[kept], mask[kept], loss, max_len=9)[0])


def test_advantages_are_by_group():
    """Normalising over the batch instead of the group, or noise from groups without variance."""
    r = torch.tensor([[1.2, 0.2, 0.2, 0.0], [0.2] * 4, [1.2, 1.2, 1.2, 1.2]])
    a, n = grpo.advantages(r), r.numpy().astype(np.float64)
    want = (n - n.mean(1, keepdims=True)) / (n.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(a.numpy(), want, atol=1e-6)
    assert a.dtype == torch.float32 and not a[1:].any()
    np.testing.assert_allclose(grpo.advantages(r, scale=False).numpy(), n - n.mean(1, keepdims=True), atol=1e-7)
    for n_same in range(2, 40):  # 0.1 is not a binary fraction: its mean must still be itself
        for dtype in (torch.float32, torch.float64):
            assert not grpo.advantages(torch.full((1, n_same), 0.1, dtype=dtype)).any()


def test_rewards_that_float32_cannot_tell_apart_teach_and_those_that_rounding_tells_apart_do_not():
    """Four different rewards of -2e8 had four advantages of 0; 0.1 + 0.2 beside 0.3 was a signal, whose advantages were all 0."""
    def group(*rewards):
        return [grpo.Completion({}, [1], [2], [0.0], True, reward=r) for r in rewards]

    large = group(-2e8, -2e8 - 5, -2e8 - 7, -2e8 - 3)
    grpo.set_advantages([large], scale=False)
    assert grpo.has_signal(large)
    assert [c.advantage for c in large] == [3.75, -1.25, -3.25, 0.75]
    assert metrics.sample_metrics([group(0.1 + 0.2, 0.3, 0.3)])["zero_var_frac"] == 1
    assert not grpo.has_signal(group(0.1 + 0.2, 0.3, 0.3)) and not grpo.has_signal(group(0.0, 0.0)) and grpo.has_signal(group(0.0, 1e-6))


def test_what_would_be_left_out_or_broadcast_in_silence_is_an_error():
    """A silent fallback: no KL, or a broadcast advantage where one was asked for."""
    x, a, m = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool)
    for kw in ({"beta": 0.1}, {"advantages": torch.zeros(1)},
               {"advantages": torch.zeros(2, 1)}, {"old_logp": torch.zeros(1, 3)}, {"mask": m[:1]}):
        with pytest.raises(AssertionError):
            grpo.policy_loss(**{"logp": x, "old_logp": x, "advantages": a, "mask": m, **kw})


def test_a_rank_sends_no_log_probs_of_an_earlier_pass(monkeypatch):
    """One whose share is empty would send what it had, and overwrite the others'."""
    c, sent = grpo.Completion({}, [1], [2], [0.0], True, trainer_logprobs=[9.0]), []
    monkeypatch.setattr(grpo, "micro_batches", lambda *_: [])
    monkeypatch.setattr(grpo.ranks, "gather", lambda own: sent.append(own) or [own])
    grpo.record_trainer_logprobs(None, [c], conftest.settings())
    assert sent == [[]]
