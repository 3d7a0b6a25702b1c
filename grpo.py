"""
The RL mathematics of QeRL: advantages, policy objectives, log-probs through a chunked LM head. Pure functions on tensors.

Here: group advantages; GRPO, DAPO, Dr.GRPO and GSPO with clip-higher, an optional KL term (k3) and truncated importance
weights between sampler and trainer; DAPO's soft length penalty; log-probs and entropy without a (B, T, V) tensor.
Left out: value networks and GAE (a group's mean is the baseline), entropy bonuses (the paper uses none: quantization noise
explores), and DAPO's re-sampling loop, which needs the sampler and so stands in train.py.

Each loss is divided by the token or completion count of the *global* batch, passed in by the caller. So the losses of
micro-batches, and of GPUs, add up to exactly the full-batch loss: sum them, never average. Metrics add up likewise.

    python -c "import torch, grpo; print(grpo.advantages(torch.tensor([[1., 0, 0, 1], [1, 1, 1, 1]])))"
    python -m pytest tests/test_grpo.py

Shapes: P prompts, G completions a prompt, B rows, T completion tokens (padded), S flat tokens, C hidden, V vocabulary.
"""
import torch

from model import logits

LOSSES = ("grpo", "dapo", "dr_grpo", "gspo")


def advantages(rewards, scale=True, eps=1e-4):
    """A = (r - mean r) / (std r + eps) within each group: rewards (P, G) -> (P, G) float32.

    std has n - 1 below the fraction, as in TRL. scale=False leaves it out (Dr.GRPO). A group of equal rewards gets exact zeros.
    ValueError for groups of one, whose only advantage is always 0.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards {tuple(rewards.shape)}: want (prompts, group) with --group-size of at least 2")
    r = rewards.double()  # in float32 the mean of eight times 0.2 is not 0.2, and 1 / eps would make noise of the difference
    centred = r - r.mean(1, keepdim=True)
    return (centred / (r.std(1, keepdim=True) + eps) if scale else centred).float()


def soft_overlong_penalty(lengths, max_len, buffer):
    """DAPO's soft length penalty, added to the reward: 0 up to max_len - buffer tokens, then linear down to -1 at max_len."""
    if not 0 < buffer <= max_len:
        raise ValueError(f"the overlong buffer of {buffer} tokens must be within 1..{max_len}, the completion limit")
    return ((max_len - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def lengths_to_mask(lengths, width=None):
    """lengths (B,) -> mask (B, width) bool, true on each row's first `length` places (width: the longest row).

    Masks come from lengths here and everywhere: with pad == eos, comparing ids would mask the stop token, and the model would
    never be taught to stop."""
    width = int(lengths.max()) if width is None else width
    return torch.arange(width, device=lengths.device) < lengths[:, None]  # (B, width)


# ---- objectives


def policy_loss(logp, old_logp, advantages, mask, loss="grpo", eps_low=0.2, eps_high=0.2, ref_logp=None, beta=0.0,
                trainer_old_logp=None, tis_cap=None, total_tokens=None, total_seqs=None, max_len=None, entropy=None):
    """The clipped policy-gradient loss of a (micro-)batch -> (scalar to minimise, dict of metric sums).

    logp, old_logp   (B, T): of the trained policy (differentiable), and of whoever sampled. With quantization noise the two
                     differ from the first update on, so old_logp must be what the sampler recorded, never a re-computation.
    advantages (B,), mask (B, T) bool: true on the completion tokens to train on.
    loss             "grpo": mean over completions of the mean over tokens; "dapo": mean over tokens; "dr_grpo": sum over
                     tokens / (completions * max_len); "gspo": "grpo" with one ratio a completion, exp(mean log-ratio).
    ref_logp, beta   (B, T) of the frozen base (adapter off), and the weight of KL(pi || ref), estimator k3. Without beta the
                     KL is only measured.
    trainer_old_logp, tis_cap: (B, T) the trainer's own log-probs before the first update of this batch. The ratio is then taken
                     against these, and min(pi_trainer_old / pi_sampler, tis_cap) corrects for the sampler.
    total_tokens, total_seqs: counts over the *global* batch, of tokens in the mask and of completions with any. Default: this
                     batch's own, which is right only if it is the whole batch.
    entropy          (B, T), only measured.
    Metrics, 0-d tensors summed over the mask: loss, tokens, clip_low, clip_high, kl, logp_gap, logp_gap_max (a maximum),
    ratio_outside, entropy. Put them through sum_metrics and mean_metrics. ValueError for arguments that contradict each other.
    """
    if loss not in LOSSES:
        raise ValueError(f"--loss {loss}: choose one of {', '.join(LOSSES)}")
    if loss == "dr_grpo" and not max_len:
        raise ValueError("--loss dr_grpo needs max_len, the completion limit it divides by")
    if beta and ref_logp is None:
        raise ValueError(f"beta = {beta} needs ref_logp, the log-probs with the adapter off")
    if (trainer_old_logp is None) != (tis_cap is None):
        raise ValueError("truncated importance weights need both trainer_old_logp and tis_cap")
    if not logp.shape == old_logp.shape == mask.shape or advantages.shape != logp.shape[:1]:
        raise ValueError(f"shapes differ: logp {tuple(logp.shape)}, old_logp {tuple(old_logp.shape)}, "
                         f"mask {tuple(mask.shape)}, advantages {tuple(advantages.shape)}")

    def difference(a, b):  # what stands in the padding, inf or nan included, must reach neither loss nor gradient
        return a.masked_fill(~mask, 0.0) - b.masked_fill(~mask, 0.0)

    length = mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    anchor = old_logp if trainer_old_logp is None else trainer_old_logp
    log_ratio = difference(logp, anchor)  # (B, T)
    if loss == "gspo":  # the geometric mean over the tokens, so that one long completion does not overflow
        log_ratio = (log_ratio.sum(1, keepdim=True) / length).expand_as(logp)  # (B, 1) -> (B, T)
    ratio, adv = log_ratio.exp(), advantages[:, None].to(logp.dtype)
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)  # DAPO: clip-higher is eps_high > eps_low
    gain = torch.min(ratio * adv, clipped * adv)  # min also where A < 0: the pessimistic bound of PPO
    with torch.no_grad():
        own = logp if trainer_old_logp is None else trainer_old_logp
        drift = difference(own.detach(), old_logp)  # trainer - sampler, token by token
    if tis_cap is not None:
        level = (drift.sum(1, keepdim=True) / length).expand_as(drift) if loss == "gspo" else drift
        gain = gain * level.exp().clamp(max=tis_cap)
    kl = torch.zeros_like(gain)
    if ref_logp is not None:
        d = difference(ref_logp, logp)
        kl = d.exp() - d - 1
    per_token = beta * kl - gain if beta else -gain  # (B, T)

    total_tokens = torch.as_tensor(mask.sum() if total_tokens is None else total_tokens).clamp(min=1)
    total_seqs = torch.as_tensor(mask.any(1).sum() if total_seqs is None else total_seqs).clamp(min=1)
    per_token = per_token * mask
    if loss == "dapo":  # token-level over the whole batch: a long completion weighs more than a short one
        value = per_token.sum() / total_tokens
    elif loss == "dr_grpo":  # a constant instead of the length, which would favour short right and long wrong answers
        value = per_token.sum() / (total_seqs * max_len)
    else:
        value = (per_token / length).sum() / total_seqs

    with torch.no_grad():
        off = (drift.exp() - 1).abs() > 0.1
        metrics = {
            "loss": value.detach(),
            "tokens": mask.sum(),
            "clip_low": ((ratio < 1 - eps_low) & (adv < 0) & mask).sum(),  # only where the clip stops the gradient
            "clip_high": ((ratio > 1 + eps_high) & (adv > 0) & mask).sum(),
            "kl": (kl.detach() * mask).sum(),
            "logp_gap": drift.abs().sum(),
            "logp_gap_max": drift.abs().max() if drift.numel() else drift.sum(),
            "ratio_outside": (off & mask).sum(),
            "entropy": value.new_zeros(()) if entropy is None else entropy.detach().masked_fill(~mask, 0.0).sum(),
        }
    return value, metrics


def sum_metrics(parts):
    """Metrics of several micro-batches -> of all of them: sums, and the maximum of names that end in _max."""
    return {k: (torch.stack([p[k] for p in parts]).amax(0) if k.endswith("_max") else sum(p[k] for p in parts))
            for k in parts[0]}


def mean_metrics(total):
    """Summed metrics -> floats a token, under the column names of metrics.jsonl (one device synchronisation)."""
    names = list(total)
    t = dict(zip(names, torch.stack([total[k].double() for k in names]).tolist(), strict=True))
    n = max(t["tokens"], 1.0)
    return {"loss": t["loss"], "clip_low_frac": t["clip_low"] / n, "clip_high_frac": t["clip_high"] / n, "kl": t["kl"] / n,
            "logp_gap_mean": t["logp_gap"] / n, "logp_gap_max": t["logp_gap_max"],
            "ratio_outside_frac": t["ratio_outside"] / n, "entropy": t["entropy"] / n}


# ---- log-probs through the LM head


def log_softmax_chunk(hidden, weight, temperature, valid_vocab):
    """hidden (c, C), weight (V, C) -> log-probs (c, V), float32 (float64 in float64). Ids >= valid_vocab get -inf."""
    x = logits(hidden, weight)
    x[:, valid_vocab:] = -torch.inf  # Qwen's embedding has rows past the tokenizer's last id
    if temperature != 1.0:
        x.div_(temperature)  # what was sampled is the tempered distribution
    return torch.log_softmax(x, dim=-1)


class TokenLogprobs(torch.autograd.Function):
    """log p(target) and entropy, chunk by chunk over the tokens; nothing wider than a chunk's (c, V) lives in either pass.

    The upstream gradient of a token is one number, so d logp / d hidden (S, C) can be finished in forward, while the chunk's
    softmax is at hand: with frozen weights (LoRA) the backward is one multiplication and never sees the vocabulary again. The
    weight's gradient needs the upstream numbers first, so it recomputes the chunks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, valid_vocab, chunk, need_hidden, need_weight):
        acc = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy = (torch.empty(len(hidden), dtype=acc, device=hidden.device) for _ in range(2))
        slope = torch.empty_like(hidden) if need_hidden else None  # (S, C): -temperature * d logp / d hidden
        for i in range(0, len(hidden), chunk):
            s = slice(i, i + chunk)
            lp = log_softmax_chunk(hidden[s], weight, temperature, valid_vocab)  # (c, V)
            t = targets[s, None]  # (c, 1)
            logp[s] = lp.gather(1, t)[:, 0]
            p = lp.exp_()
            entropy[s] = torch.special.entr(p).sum(1)  # -p log p, and 0 at p = 0
            if need_hidden:
                p.scatter_add_(1, t, p.new_full(t.shape, -1.0))  # p - onehot, before rounding to bf16: no cancellation after
                slope[s] = p.to(weight.dtype) @ weight  # (c, V) @ (V, C)
            del lp, p  # before the next chunk allocates
        ctx.temperature, ctx.valid_vocab, ctx.chunk = temperature, valid_vocab, chunk
        ctx.save_for_backward(slope, *((hidden, weight, targets) if need_weight else ()))
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        slope, *saved = ctx.saved_tensors
        grad = -grad / ctx.temperature  # (S,)
        grad_hidden = None if slope is None else (slope * grad[:, None]).to(slope.dtype)
        grad_weight = None
        if saved:
            hidden, weight, targets = saved
            grad_weight = torch.zeros_like(weight, dtype=grad.dtype)  # float32: a sum over many chunks in bf16 would stall
            for i in range(0, len(hidden), ctx.chunk):
                s = slice(i, i + ctx.chunk)
                p = log_softmax_chunk(hidden[s], weight, ctx.temperature, ctx.valid_vocab).exp_()  # (c, V)
                t = targets[s, None]
                p.scatter_add_(1, t, p.new_full(t.shape, -1.0)).mul_(grad[s, None])
                grad_weight += p.to(hidden.dtype).t() @ hidden[s]  # (V, c) @ (c, C)
                del p
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def token_logprobs(hidden, weight, targets, temperature=1.0, valid_vocab=None, chunk=None):
    """log p(target) and entropy (nats) of softmax(hidden @ weight.T / temperature): (S,), (S,), float32.

    hidden (S, C): final-normed states of the positions that *predict* the targets; weight (V, C): the LM head; targets (S,) long
    in [0, valid_vocab). Ids >= valid_vocab have probability 0. logp is differentiable in hidden, and in weight if it requires
    grad; the entropy is a detached metric. `chunk`: tokens at a time; default: at most 0.5 GiB of float32 logits.
    Gather the positions you need before the call: prompt and padding positions cost as much as the others. Any S, 0 included.
    """
    if temperature <= 0:
        raise ValueError(f"--temperature {temperature}: must be > 0; greedy decoding has no log-prob to train on")
    V = weight.shape[0]
    valid_vocab = V if valid_vocab is None else valid_vocab
    if not 0 < valid_vocab <= V:
        raise ValueError(f"valid_vocab {valid_vocab} is outside 1..{V}, the rows of the LM head")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)}: want (S, C) and (S,)")
    chunk = max(1, 2**27 // V) if chunk is None else chunk
    grad = torch.is_grad_enabled()
    return TokenLogprobs.apply(hidden, weight, targets, float(temperature), valid_vocab, chunk,
                               grad and hidden.requires_grad, grad and weight.requires_grad)
