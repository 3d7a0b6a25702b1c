"""Objectives against hand-written NumPy and finite differences; the chunked LM head against the dense one."""
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from runtime import logprobs


def batch(seed=0, B=5, T=7, drift=0.4):
    """A float64 batch whose ratios cross both clip bounds, with ragged lengths (a row of one token included)."""
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3
    old = logp + drift * torch.randn(B, T, generator=g, dtype=torch.float64)
    adv = torch.tensor([1.3, -0.8, -1.1, 0.4, -0.2], dtype=torch.float64)[:B]
    lengths = torch.tensor([T, 3, 1, 5, T][:B])
    return logp, old, adv, lengths


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
        kw |= {"trainer_old_logp": old + noise, "tis_cap": 1.1}
        hand |= {"own": old + noise, "cap": 1.1}
    mask = grpo.lengths_to_mask(lengths)

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
    mask, x = grpo.lengths_to_mask(lengths), logp.clone().requires_grad_()
    value, _ = grpo.policy_loss(x, old, adv, mask, "cispo", eps_low=0.5, eps_high=1.0)
    value.backward()
    weight = (logp - old).exp().clamp(0.5, 2.0) * adv[:, None] * mask / mask.sum()
    torch.testing.assert_close(x.grad, -weight)
    torch.testing.assert_close(value.detach(), -(weight * logp).sum())
    assert (((logp - old).exp() > 2.0) & mask).any()


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
    """Below the clip with A > 0, or above it with A < 0, PPO's minimum is the plain gain: nothing is lost there."""
    ratio = torch.tensor([[0.5, 1.0, 2.0], [0.5, 1.0, 2.0]])
    logp, mask = ratio.log().requires_grad_(), torch.tensor([[True] * 3, [True, True, False]])
    for sign, low, high in ((1.0, 0, 1), (-1.0, 2, 0)):
        loss, m = grpo.policy_loss(logp, torch.zeros(2, 3), sign * torch.ones(2), mask)
        [grad] = torch.autograd.grad(loss, logp)
        assert (m["clip_low"].item(), m["clip_high"].item()) == (low, high)
        assert ((grad == 0) & mask).sum() == low + high


def test_sampler_kl_is_the_k3_estimate():
    """A gap without sign cannot tell noise from rounding: KL(sampler || trainer) over what the sampler drew."""
    logp, old, adv, lengths = batch()
    mask = grpo.lengths_to_mask(lengths)
    d = (logp - old)[mask]
    torch.testing.assert_close(grpo.policy_loss(logp, old, adv, mask)[1]["sampler_kl"], (d.exp() - 1 - d).sum())


def test_negative_advantage_takes_the_minimum():
    """max() instead of PPO's min() stops the push away from a bad token just where it is most needed."""
    logp = torch.tensor([[np.log(2.0)]], requires_grad=True)
    args = torch.zeros(1, 1), torch.tensor([-1.0]), torch.ones(1, 1, dtype=torch.bool)
    value, m = grpo.policy_loss(logp, *args)
    value.backward()
    assert value.item() == pytest.approx(2.0) and logp.grad.item() == pytest.approx(2.0)  # max(): 1.2 and 0
    assert m["clip_low"] == m["clip_high"] == 0
    logp = torch.tensor([[np.log(0.5)]], requires_grad=True)
    value, m = grpo.policy_loss(logp, *args)
    value.backward()
    assert value.item() == pytest.approx(0.8) and logp.grad.item() == 0 and m["clip_low"] == 1


def test_ratio_is_against_the_samplers_logprobs():
    """Old log-probs recomputed by the trainer make every ratio 1, so the clip never acts."""
    logp, old, adv, lengths = batch()
    mask = grpo.lengths_to_mask(lengths)
    off = grpo.policy_loss(logp, old, adv, mask)[1]
    on = grpo.policy_loss(logp, logp, adv, mask)[1]
    r = (logp - old).exp()
    assert off["clip_high"] == ((r > 1.2) & (adv[:, None] > 0) & mask).sum() > 0
    assert off["clip_low"] == ((r < 0.8) & (adv[:, None] < 0) & mask).sum() > 0
    assert off["ratio_outside"] == (((r < 0.9) | (r > 1.1)) & mask).sum() > 0
    assert off["logp_gap_max"] == (logp - old)[mask].abs().max()
    torch.testing.assert_close(off["logp_gap"], (logp - old)[mask].abs().sum())
    assert not any(on[k] for k in ("clip_high", "clip_low", "ratio_outside", "logp_gap", "logp_gap_max"))


def test_clip_higher_uses_its_own_bound():
    """eps_high ignored: DAPO's clip-higher would be plain clipping."""
    logp = torch.full((1, 1), np.log(1.25))
    args = torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool)
    assert grpo.policy_loss(logp, *args, eps_high=0.28)[0].item() == pytest.approx(-1.25)
    assert grpo.policy_loss(logp, *args, eps_high=0.20)[0].item() == pytest.approx(-1.20)


@pytest.mark.parametrize("loss", grpo.OBJECTIVES)
def test_micro_batches_add_up_to_the_full_batch(loss):
    """DAPO's token mean: per-micro-batch means, or the last micro-batch's loss reported as the loss."""
    logp, old, adv, lengths = batch()
    mask = grpo.lengths_to_mask(lengths)
    entropy = torch.rand(logp.shape, dtype=torch.float64)
    kw = dict(loss=loss, ref_logp=old, beta=0.1, max_len=9)
    x = logp.clone().requires_grad_()
    full, whole = grpo.policy_loss(x, old, adv, mask, entropy=entropy, **kw)
    full.backward()
    y, parts = logp.clone().requires_grad_(), []
    for rows in ([0], [1, 2, 3], [4]):
        kw["ref_logp"] = old[rows]
        part, m = grpo.policy_loss(y[rows], old[rows], adv[rows], mask[rows], entropy=entropy[rows],
                                   total_tokens=int(mask.sum()), total_seqs=5, **kw)
        part.backward()
        parts.append(m)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-15)
    total = grpo.sum_metrics(parts)
    for k in whole:
        torch.testing.assert_close(total[k], whole[k], msg=k)
    assert abs(parts[-1]["loss"] - full) > 1e-3 * full.abs()  # the last micro-batch alone is another number
    mean = grpo.mean_metrics(total)
    assert mean["entropy"] == pytest.approx(entropy[mask].mean().item())
    assert mean["logp_gap_mean"] == pytest.approx((logp - old)[mask].abs().mean().item())
    assert mean["loss"] == pytest.approx(full.item())


def test_padding_reaches_neither_loss_nor_gradient():
    """-inf or nan in the padding times a zero mask is nan; a padding token must also not count as one."""
    logp, old, adv, lengths = batch()
    mask = grpo.lengths_to_mask(lengths)
    want = grpo.policy_loss(logp, old, adv, mask, ref_logp=old, beta=0.1)
    dirty = logp.masked_fill(~mask, -torch.inf).requires_grad_()
    bad = old.masked_fill(~mask, torch.nan)
    value, m = grpo.policy_loss(dirty, bad, adv, mask, ref_logp=bad, beta=0.1)
    value.backward()
    assert value == want[0] and all(m[k] == want[1][k] for k in m)
    assert dirty.grad.isfinite().all() and not dirty.grad[~mask].any() and dirty.grad[mask].any()


def test_masks_come_from_lengths():
    """With pad == eos, a mask made by comparing ids drops the stop token, and the model never learns to stop."""
    eos = pad = 2
    ids = torch.tensor([[5, 6, eos, pad], [eos, pad, pad, pad], [7, 8, 9, 4]])
    mask = grpo.lengths_to_mask(torch.tensor([3, 1, 4]), 4)
    assert mask.tolist() == [[True] * 3 + [False], [True] + [False] * 3, [True] * 4]
    assert mask[ids == eos].sum() == 2 and (ids != pad).sum() < mask.sum()
    assert grpo.lengths_to_mask(torch.tensor([2, 0])).tolist() == [[True, True], [False, False]]
    logp = torch.zeros(3, 4, requires_grad=True)
    grpo.policy_loss(logp, torch.zeros(3, 4), torch.ones(3), mask)[0].backward()
    assert (logp.grad != 0).equal(mask)


def test_overlong_rows_can_be_masked_or_penalised():
    """Cut completions counted as wrong answers; an all-masked batch must give 0, not nan."""
    mask = grpo.lengths_to_mask(torch.tensor([3, 4]))
    logp = torch.zeros(2, 4, requires_grad=True)
    for loss in grpo.OBJECTIVES:
        for totals in ({}, {"total_tokens": 0, "total_seqs": 0}):
            value, m = grpo.policy_loss(logp, torch.ones(2, 4), torch.ones(2), mask & False, loss, max_len=4, **totals)
            assert value == 0 and grpo.mean_metrics(m)["logp_gap_mean"] == 0
    penalty = grpo.soft_overlong_penalty(torch.tensor([10, 80, 90, 100, 120]), 100, 20)
    assert penalty.tolist() == [0, 0, -0.5, -1, -1]
    with pytest.raises(ValueError, match="buffer"):
        grpo.soft_overlong_penalty(torch.tensor([1]), 100, 101)


def test_advantages_are_by_group():
    """Normalising over the batch instead of the group, or noise from groups without variance."""
    r = torch.tensor([[1.2, 0.2, 0.2, 0.0], [0.2] * 4, [1.2, 1.2, 1.2, 1.2]])
    a, n = grpo.advantages(r), r.numpy().astype(np.float64)
    want = (n - n.mean(1, keepdims=True)) / (n.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(a.numpy(), want, atol=1e-6)
    assert a.dtype == torch.float32 and not a[1:].any()
    np.testing.assert_allclose(grpo.advantages(r, scale=False).numpy(), n - n.mean(1, keepdims=True), atol=1e-7)
    for n_same in range(2, 40):  # 0.1 is not a binary fraction: its mean must still be itself
        assert not grpo.advantages(torch.full((1, n_same), 0.1)).any()
    with pytest.raises(ValueError, match="--group-size"):
        grpo.advantages(torch.ones(3, 1))


def test_contradicting_arguments_are_errors():
    """A silent fallback: no KL, no correction or a broadcast advantage where one was asked for."""
    x, a, m = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool)
    for kw, word in (({"loss": "ppo"}, "--loss"), ({"loss": "dr_grpo"}, "max_len"), ({"beta": 0.1}, "ref_logp"),
                     ({"tis_cap": 2.0}, "trainer_old_logp"), ({"trainer_old_logp": x}, "tis_cap")):
        with pytest.raises(ValueError, match=word):
            grpo.policy_loss(x, x, a, m, **kw)
    with pytest.raises(ValueError, match="shapes"):
        grpo.policy_loss(x, x, torch.zeros(3), m)


# ---- the chunked LM head


def dense(hidden, weight, targets, temperature=1.0, valid=None):
    logits = (hidden @ weight.T)[:, :valid] / temperature
    lp = torch.log_softmax(logits, -1)
    return lp.gather(1, targets[:, None])[:, 0], -(lp.exp() * lp).sum(-1)


def head(S=23, C=6, V=17, valid=13, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(S, C, generator=g, dtype=torch.float64)
    weight = torch.randn(V, C, generator=g, dtype=torch.float64)
    targets = torch.randint(valid or V, (S,), generator=g)
    return hidden, weight, targets, torch.randn(S, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000, None])
@pytest.mark.parametrize("temperature,valid", [(1.0, None), (0.7, 13)])
def test_chunked_head_equals_dense_in_value_and_gradient(chunk, temperature, valid):
    """A chunk boundary, the temperature or the mask missing from one of the three results."""
    hidden, weight, targets, up = head(valid=valid)
    h1, w1, h2, w2 = (t.clone().requires_grad_() for t in (hidden, weight, hidden, weight))
    logp, entropy = logprobs.token_logprobs(h1, w1, targets, temperature, valid, chunk)
    want, want_entropy = dense(h2, w2, targets, temperature, valid)
    torch.testing.assert_close(logp, want)
    torch.testing.assert_close(entropy, want_entropy.detach())
    assert logp.requires_grad and not entropy.requires_grad
    (logp * up).sum().backward()
    (want * up).sum().backward()
    torch.testing.assert_close(h1.grad, h2.grad)
    torch.testing.assert_close(w1.grad, w2.grad)


def test_chunked_head_passes_gradcheck():
    """A gradient that agrees with nothing but its own formula."""
    hidden, weight, targets, _ = head(S=5, C=3, V=7, valid=6)
    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: logprobs.token_logprobs(h, w, targets, 1.3, 6, 2)[0], (hidden, weight))


def test_temperature_is_applied_before_the_logprob():
    """Dividing the log-prob, or forgetting the temperature, biases every ratio."""
    hidden, weight, targets, _ = head(valid=None)
    hot = logprobs.token_logprobs(hidden, weight, targets, temperature=2.0)[0]
    torch.testing.assert_close(hot, logprobs.token_logprobs(hidden / 2, weight, targets)[0])
    cold = logprobs.token_logprobs(hidden, weight, targets)[0]
    assert (hot - cold).abs().max() > 0.1 and (hot - cold / 2).abs().max() > 0.1
    with pytest.raises(ValueError, match="--temperature"):
        logprobs.token_logprobs(hidden, weight, targets, temperature=0.0)


def test_ids_past_the_tokenizer_have_probability_zero():
    """The embedding's spare rows take probability in the trainer that the sampler never gives them."""
    hidden, weight, _, _ = head()
    everything = torch.arange(17)
    for row in range(3):
        logp = logprobs.token_logprobs(hidden[row].expand(17, -1), weight, everything, valid_vocab=13)[0]
        assert (logp[13:] == -torch.inf).all() and logp[:13].exp().sum().item() == pytest.approx(1.0)
    w = weight.clone().requires_grad_()
    h = hidden.clone().requires_grad_()
    logprobs.token_logprobs(h, w, torch.zeros(23, dtype=torch.long), valid_vocab=13)[0].sum().backward()
    assert not w.grad[13:].any() and w.grad[:13].any() and h.grad.isfinite().all()
    for bad in (0, 18):
        with pytest.raises(ValueError, match="valid_vocab"):
            logprobs.token_logprobs(hidden, weight, torch.zeros(23, dtype=torch.long), valid_vocab=bad)


class Widest(TorchDispatchMode):
    """Records the largest tensor that any operator, forward or backward, returns, and counts the matrix products."""

    numel = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.mm.default
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("train_weight", [False, True])
def test_no_full_logits_tensor_in_forward_or_backward(train_weight):
    """(B, T, V) float32 logits, in either pass, are the memory peak at a vocabulary of 152k."""
    S, C, V, chunk = 64, 4, 50, 8
    hidden, weight, targets, up = head(S, C, V, None)
    hidden.requires_grad_(), weight.requires_grad_(train_weight)
    with Widest() as chunked:
        (logprobs.token_logprobs(hidden, weight, targets, chunk=chunk)[0] * up).sum().backward()
    with Widest() as full:
        (dense(hidden, weight, targets)[0] * up).sum().backward()
    assert full.numel == S * V and chunked.numel == chunk * V


def test_default_chunk_bounds_the_logits(monkeypatch):
    """A default chunk in tokens that does not know the vocabulary: 1024 tokens are 0.6 GB at 152k and nothing at 512."""
    seen = []
    monkeypatch.setattr(logprobs.TokenLogprobs, "apply", lambda *a: seen.append(a[5]))
    for V in (512, 151936, 2**28):
        logprobs.token_logprobs(torch.empty(1, 1), torch.empty(1, 1).expand(V, 1), torch.zeros(1, dtype=torch.long))
    assert seen == [262144, 883, 1] and 883 * 151936 * 4 <= 2**29


def test_head_computes_no_more_than_was_asked_for():
    """LoRA: a backward that goes over the vocabulary again; under no_grad (old and reference log-probs): gradients for nobody."""
    hidden, weight, targets, up = head(S=64, C=4, V=50, valid=None)
    hidden.requires_grad_()
    with Widest() as forward:
        loss = (logprobs.token_logprobs(hidden, weight, targets, chunk=32)[0] * up).sum()
    with Widest() as backward:
        loss.backward()
    assert forward.products == 4 and backward.products == 0 and backward.numel == hidden.numel()
    weight.requires_grad_()
    with torch.no_grad(), Widest() as silent:
        logp, _ = logprobs.token_logprobs(hidden, weight, targets, chunk=32)
    assert silent.products == 2 and not logp.requires_grad
    torch.testing.assert_close(logp, dense(hidden, weight, targets)[0].detach())


def test_bf16_inputs_give_float32_logprobs_close_to_dense():
    """A bf16 softmax: sums over the vocabulary lose everything below 1/256."""
    hidden, weight, targets, up = head(S=40, C=16, V=300, valid=None)
    h1 = hidden.bfloat16().requires_grad_()
    h2 = hidden.bfloat16().float().requires_grad_()
    w = (weight * 0.3).bfloat16()
    logp, entropy = logprobs.token_logprobs(h1, w, targets, chunk=16)
    want, want_entropy = dense(h2, w.float(), targets)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp, want, atol=0.03, rtol=0)
    torch.testing.assert_close(entropy, want_entropy, atol=0.03, rtol=0)
    (logp * up.float()).sum().backward()
    (want * up.float()).sum().backward()
    assert h1.grad.dtype == torch.bfloat16
    torch.testing.assert_close(h1.grad.float(), h2.grad, atol=0.05, rtol=0.03)


def test_no_tokens_at_all():
    """A micro-batch whose completions are all masked away: empty results, zero gradients, no crash."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    logp, entropy = logprobs.token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,) and not weight.grad.any()


@pytest.mark.gpu
def test_gpu_bf16_head_keeps_float32_logits():
    """On the device the GEMM must hand out float32: bf16 logits near 20 move the log-prob by up to 0.06."""
    g = torch.Generator().manual_seed(0)
    hidden = (torch.randn(700, 512, generator=g)).cuda().bfloat16().requires_grad_()
    weight = (torch.randn(30000, 512, generator=g) * 0.2).cuda().bfloat16()
    targets = torch.randint(29000, (700,), generator=g).cuda()
    ref = hidden.detach().float().requires_grad_()
    want, want_entropy = dense(ref, weight.float(), targets, 0.9, 29000)
    logp, entropy = logprobs.token_logprobs(hidden, weight, targets, 0.9, 29000, chunk=256)
    torch.testing.assert_close(logp, want, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(entropy, want_entropy, atol=2e-3, rtol=1e-3)
    logp.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(hidden.grad.float(), ref.grad, atol=0.02, rtol=0.02)
