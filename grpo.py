"""
The RL mathematics of QeRL: advantages, objectives, one optimizer step (update -> backward ->
batch_loss -> completion_logprobs, policy_loss).

An objective is three functions: the level (token or completion) at which the ratio is taken, the
gain to maximise, and what its sum is divided by. GRPO, DAPO, Dr.GRPO, GSPO and CISPO are rows of
one table (`OBJECTIVES`). Left out: value networks and GAE (a group's mean is the baseline) and
entropy bonuses (the paper uses none: quantization noise explores).

Each loss is divided by the token or completion count of the *global* batch. So the losses of
micro-batches, and of GPUs, add up to exactly the full-batch loss: sum them, never average. Metrics
add up likewise.

    python -c "import torch, grpo; print(grpo.advantages(torch.tensor([[1., 0, 0, 1]])))"

Shapes: P prompts, G completions a prompt, B rows, L tokens of a row (padded), T completion tokens
(padded), S flat tokens, C hidden.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from plumbing import ranks
from plumbing.metrics import sum_over_ranks

import torch
from torch.nn.utils.rnn import pad_sequence

import aqn
import lora
import model as qwen
from model import padded, to_device

# values for which there are no flags, the paper's but for TIS_CAP; a script may set others
BETAS, WEIGHT_DECAY = (0.9, 0.99), 0.1  # AdamW's
WARMUP = 0.1  # share of the updates that warm up
TIS_CAP = 2.0  # cap of the importance weights of --old-logp trainer and current


@dataclass
class Completion:
    """One sampled answer: what was drawn, what it earned, and what the update is told about it."""

    row: dict  # the question's row of the data set
    prompt: list  # ids
    ids: list  # of the completion, the EOS included if it was drawn
    logprobs: list  # of each id, under the policy that sampled it: noise included
    finished: bool  # ended with EOS, not at the length limit
    text: str = ""
    reward: float = 0.0
    correct: bool = False
    format: bool = False
    advantage: float = 0.0
    trainer_logprobs: list | None = None  # of each id, under the trainer's policy before the step


def advantages(rewards, scale=True, eps=1e-4):
    """A = (r - mean r) / (std r + eps) within each group: rewards (P, G) -> (P, G) float32.

    std divides by n - 1, as in TRL. scale=False skips the division by it (Dr.GRPO). A group of
    equal rewards gets exact zeros."""
    # minus the first reward: the mean of eight 0.2s is not quite 0.2, and 1 / eps amplifies that
    r = rewards.double() - rewards[:, :1].double()
    centred = r - r.mean(1, keepdim=True)
    return (centred / (r.std(1, keepdim=True) + eps) if scale else centred).float()


def set_advantages(groups, scale=True):
    """Fill in the advantage of each Completion from the rewards of its group; groups are P lists of
    G completions; scale: see `advantages`."""
    if groups:
        rewards = torch.tensor([[c.reward for c in group] for group in groups],
                               dtype=torch.double)  # (P, G)
        values = advantages(rewards, scale).flatten().tolist()
        for c, value in zip(chain(*groups), values, strict=True):
            c.advantage = value


def has_signal(group):
    """Whether the rewards of a group differ; else its advantages are 0, or as good as."""
    first = group[0].reward  # sums of the same parts may differ in the last bit
    return not all(math.isclose(c.reward, first, rel_tol=1e-9) for c in group)


def soft_overlong_penalty(length, max_len):
    """DAPO's soft length penalty, added to the reward: 0 up to 7/8 of max_len tokens, then linear
    to -1 at max_len."""
    buffer = max_len / 8
    return max(-1.0, min((max_len - buffer - length) / buffer, 0.0))


# ---- objectives: level of the ratio, surrogate, normaliser


def of_tokens(log_ratio, mask):
    """A ratio for each token."""
    return log_ratio


def of_completions(log_ratio, mask):
    """GSPO: one ratio a completion, the geometric mean over its tokens, so that a long one does not
    overflow."""
    length = mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    return (log_ratio.sum(1, keepdim=True) / length).expand_as(log_ratio)  # (B, 1) -> (B, T)


def ppo_clip(ratio, adv, logp, low, high):
    """PPO: the smaller of the plain and the clipped gain, also where A < 0 (the pessimistic bound).
    DAPO: high > low."""
    return torch.min(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)


def clipped_weight(ratio, adv, logp, low, high):
    """CISPO: the clipped ratio is a constant weight of REINFORCE; no token loses its gradient."""
    return ratio.clamp(1 - low, 1 + high).detach() * adv * logp


def completion_mean(per_token, mask, tokens, seqs, max_len):
    """GRPO: mean over completions of the mean over their tokens."""
    return (per_token / mask.sum(1, keepdim=True).clamp(min=1)).sum() / seqs


def token_mean(per_token, mask, tokens, seqs, max_len):
    """DAPO: mean over the tokens of the whole batch: a long completion weighs more."""
    return per_token.sum() / tokens


def constant(per_token, mask, tokens, seqs, max_len):
    """Dr.GRPO: dividing by the length would favour short right and long wrong answers."""
    return per_token.sum() / (seqs * max_len)


@dataclass(frozen=True)
class Objective:
    level: Callable  # log-ratios (B, T), mask -> log-ratios (B, T)
    # ratio, advantages, logp, low, high -> gain (B, T). Called again with low and high infinite:
    # where the two differ, a token counts as clipped. An entropy bonus would be one more term,
    # -c * logp.detach() * logp
    surrogate: Callable
    normaliser: Callable  # per_token, mask, tokens, seqs, max_len -> the loss
    clip: tuple = (0.2, 0.2)  # eps_low, eps_high if none are given
    scale: bool = True  # advantages are divided by their group's standard deviation


OBJECTIVES = {
    "grpo": Objective(of_tokens, ppo_clip, completion_mean),
    "dapo": Objective(of_tokens, ppo_clip, token_mean, (0.2, 0.28)),
    "dr_grpo": Objective(of_tokens, ppo_clip, constant, scale=False),
    "gspo": Objective(of_completions, ppo_clip, completion_mean, (3e-4, 4e-4)),
    "cispo": Objective(of_tokens, clipped_weight, token_mean, (1.0, 4.0)),  # ratios in [0, 5]
}


def policy_loss(logp, old_logp, advantages, mask, loss="grpo", eps_low=None, eps_high=None,
                ref_logp=None, beta=0.0, trainer_logp=None, tis_cap=TIS_CAP, total_tokens=None,
                total_seqs=None, max_len=None):
    """The policy-gradient loss of a (micro-)batch -> (scalar to minimise, dict of metric sums).

    logp, old_logp: (B, T) log-probs, of the trained policy (differentiable) and of the sampler, the
        policy that drew the tokens: with noise they differ even before the first update.
    advantages: (B,). mask: (B, T) bool, true on the completion tokens to train on.
    loss: a name of OBJECTIVES. eps_low, eps_high: the ratio's clip; None is the objective's own.
    ref_logp, beta: (B, T) of the frozen base (adapter off), and the weight of KL(pi || ref),
        estimator k3. Without beta the KL is only measured.
    trainer_logp: (B, T), log-probs by the trainer's own forward pass. The ratio is then taken
        against these, and a weight corrects for the sampler. For GSPO it is a geometric mean too
        (TRL's exp(sum) would be 0 or the cap for a long completion):
            --old-logp   trainer_logp               ratio          weight
            sampler      None                       pi / old       none
            trainer      before the first update    pi / trainer   min(trainer / old, tis_cap)
            current      logp.detach()              pi / pi = 1    min(pi / old, tis_cap)
    total_tokens, total_seqs: counts over the *global* batch, of tokens in the mask and of
        completions. Default: this batch's own, which is right only if it is the whole batch.
    max_len: Dr.GRPO's constant.

    Metrics are 0-d tensors: the loss itself, and sums over the mask; see ratio_metrics."""
    # what would be broadcast, or left out, without a word
    assert logp.shape == old_logp.shape == mask.shape and advantages.shape == logp.shape[:1]
    assert ref_logp is not None or not beta
    objective = OBJECTIVES[loss]
    low = objective.clip[0] if eps_low is None else eps_low
    high = objective.clip[1] if eps_high is None else eps_high

    # The ratio, cut at e^80: past e^88 it would be inf, and its gradient NaN.
    anchor = old_logp if trainer_logp is None else trainer_logp
    ratio = objective.level(difference(logp, anchor, mask), mask).clamp(max=80).exp()  # (B, T)

    # How much each token gains, and where the clip changes that.
    adv = advantages[:, None].to(logp.dtype)  # (B, 1)
    masked_logp = logp.masked_fill(~mask, 0.0)
    gain = objective.surrogate(ratio, adv, masked_logp, low, high)  # (B, T)
    with torch.no_grad():
        unclipped = objective.surrogate(ratio, adv, masked_logp, math.inf, math.inf)
        clipped = ((gain - unclipped).abs() > 0) & mask  # NaN counts as not clipped

    # Trainer minus sampler: a metric and, where the ratio is to the trainer, a weight too (TIS).
    gap = difference(logp.detach() if trainer_logp is None else trainer_logp, old_logp, mask)
    if trainer_logp is not None:
        gain = gain * objective.level(gap, mask).exp().clamp(max=tis_cap)

    # The distance to the frozen base, by k3: never negative, and unbiased on samples of pi.
    d = torch.zeros_like(logp) if ref_logp is None else difference(ref_logp, logp, mask)
    kl = torch.expm1(d) - d
    per_token = (beta * kl - gain if beta else -gain) * mask  # (B, T)

    # Normalised by the counts of the global batch.
    tokens = torch.as_tensor(mask.sum() if total_tokens is None else total_tokens).clamp(min=1)
    seqs = torch.as_tensor(mask.any(1).sum() if total_seqs is None else total_seqs).clamp(min=1)
    value = objective.normaliser(per_token, mask, tokens, seqs, max_len)
    return value, {"loss": value.detach(), "kl": kl.sum().detach(),
                   **ratio_metrics(ratio, clipped, gap, mask)}


def difference(a, b, mask):
    """a - b on the mask, 0 elsewhere: values in the padding, even nan, have no effect."""
    return a.masked_fill(~mask, 0.0) - b.masked_fill(~mask, 0.0)


@torch.no_grad()
def ratio_metrics(ratio, clipped, gap, mask):
    """Metric sums of the ratio, and of the gap (B, T): trainer minus sampler, token by token."""
    return {
        "tokens": mask.sum(),
        # counted where the clip changes the gain: PPO's does only where it stops the gradient
        "clip_low": (clipped & (ratio < 1)).sum(),
        "clip_high": (clipped & (ratio > 1)).sum(),
        "logp_gap": gap.abs().sum(),
        "logp_gap_max": gap.abs().max(),  # the one that is no sum
        "sampler_kl": (torch.expm1(gap) - gap).sum(),  # KL(sampler || trainer), k3
        "ratio_outside": ((torch.expm1(gap).abs() > 0.1) & mask).sum()}


# ---- one optimizer step; `settings` are the flags of train.py


def completion_logprobs(model, completions, temperature):
    """(logp (B, T), entropy (B, T), mask (B, T)) of B completions, under the model as it is now:
    its noise, its adapter."""
    if model.fast and model.fast.knows(model):
        return model.fast.completion_logprobs(model, completions, temperature)

    # Prompts and completions in rows, padded on the right. The state at a token predicts the next
    # one, so the last token of a row predicts nothing and is left out.
    device = model.embed.weight.device
    rows = [c.prompt + c.ids[:-1] for c in completions]
    hidden = model.hidden(padded(rows, device))  # (B, L) -> (B, L, C)

    # The states that predict the completions' tokens, row after row, and these tokens.
    states = [h[len(c.prompt) - 1 : len(row)]
              for c, row, h in zip(completions, rows, hidden, strict=True)]
    targets = to_device([i for c in completions for i in c.ids], device)  # (S,)
    logp, entropy = qwen.token_logprobs(torch.cat(states), model.lm_head.weight, targets,
                                        temperature, model.valid_vocab)  # (S,), (S,)
    return in_rows(completions, logp, entropy)


def in_rows(completions, logp, entropy):
    """Values of the tokens of B completions, one after the other (S,) -> padded rows (B, T), and
    their mask (B, T), true on the tokens.

    Masks come from lengths here and everywhere: with pad == eos, comparing ids would mask the stop
    token, and the model would never be taught to stop."""
    lengths = [len(c.ids) for c in completions]
    # by their lengths: indexing by the mask would make the host wait for the GPU
    logp = pad_sequence(logp.split(lengths), batch_first=True)  # (S,) -> (B, T)
    entropy = pad_sequence(entropy.split(lengths), batch_first=True)
    places = torch.arange(max(lengths), device=logp.device)  # (T,)
    return logp, entropy, places < to_device(lengths, logp.device)[:, None]


def micro_batches(model, completions, token_budget):
    """This rank's share of the completions, in lists that are each computed at once: the shortest
    first, so that rows need little padding, and with rows x longest within the budget. A completion
    that exceeds it gets a list of its own."""
    if model.fast and model.fast.knows(model):
        return model.fast.micro_batches(model, completions, token_budget)

    def tokens(c):
        return len(c.prompt) + len(c.ids) - 1

    batches = []
    for c in sorted(ranks.share(completions, tokens)[ranks.rank], key=tokens):
        # sorted, so that c would be the longest row of its batch
        if batches and (len(batches[-1]) + 1) * tokens(c) <= token_budget:
            batches[-1].append(c)
        else:
            batches.append([c])
    return batches


def trained(completions, overlong):
    """The completions to train on: DAPO's mask omits truncated ones, as neither right nor wrong."""
    return [c for c in completions if c.finished or overlong != "mask"]


@torch.no_grad()
def record_trainer_logprobs(model, completions, settings):
    """Fill `trainer_logprobs` of each completion that is trained on, in a separate pass before any
    parameter moves (--old-logp trainer)."""
    chosen = trained(completions, settings.overlong)
    place = {id(c): i for i, c in enumerate(chosen)}
    own = []  # (place, log-probs) of each in this rank's share
    for batch in micro_batches(model, chosen, settings.micro_batch_tokens):
        logp, _, _ = completion_logprobs(model, batch, settings.temperature)
        rows = logp.tolist()  # all at once: each transfer waits for the device
        own += [(place[id(c)], row[: len(c.ids)]) for c, row in zip(batch, rows, strict=True)]
    for i, logprobs in chain(*ranks.gather(own)):  # every rank needs them all
        chosen[i].trainer_logprobs = logprobs


def batch_loss(model, batch, settings, total_tokens, total_seqs):
    """policy_loss of one micro-batch, with whichever further log-probs `settings` ask for."""
    device = model.embed.weight.device
    # The base is the same model, adapter off and without noise.
    ref_logp = None
    if settings.beta:
        with torch.no_grad(), lora.disabled(model), aqn.clean(model):
            ref_logp = completion_logprobs(model, batch, settings.temperature)[0]

    logp, entropy, mask = completion_logprobs(model, batch, settings.temperature)
    trainer_logp = None
    if settings.old_logp == "trainer":
        trainer_logp = padded([c.trainer_logprobs for c in batch], device, torch.float32)  # (B, T)
    elif settings.old_logp == "current":  # the ratio is 1: the plain policy gradient, weighted
        trainer_logp = logp.detach()
    old_logp = padded([c.logprobs for c in batch], device, torch.float32)  # (B, T)
    advantages = to_device([c.advantage for c in batch], device, torch.float32)
    loss, sums = policy_loss(
        logp, old_logp, advantages, mask, settings.loss, eps_high=settings.eps_high,
        ref_logp=ref_logp, beta=settings.beta, trainer_logp=trainer_logp, tis_cap=TIS_CAP,
        total_tokens=total_tokens, total_seqs=total_seqs, max_len=settings.max_new_tokens)
    return loss, {**sums, "entropy": entropy.sum()}


def backward(model, completions, settings):
    """Accumulate the gradient of the loss of whole groups in the parameters, by micro-batch ->
    summed metrics, or None if no completion is trained on. Each rank does its own share."""
    learned = trained(completions, settings.overlong)
    if not learned:
        return None

    # The counts that the loss is divided by. Dr.GRPO divides by a constant: it counts the masked
    # completions as well.
    total_tokens = sum(len(c.ids) for c in learned)
    counted = completions if OBJECTIVES[settings.loss].normaliser is constant else learned

    parts = []  # the metrics of each micro-batch
    for batch in micro_batches(model, learned, settings.micro_batch_tokens):
        loss, metrics = batch_loss(model, batch, settings, total_tokens, len(counted))
        loss.backward()
        parts.append(metrics)

    return sum_over_ranks(parts)


def update(model, optimizer, completions, settings):
    """One optimizer step on whole groups -> (summed metrics, gradient norm before clipping), or
    None if none is trained on. If the norm is not finite, nothing has changed."""
    metrics = backward(model, completions, settings)
    if metrics is None:
        return None
    ranks.sum_gradients(optimizer.params)
    norm = torch.nn.utils.clip_grad_norm_(optimizer.params, settings.grad_clip).item()
    if math.isfinite(norm):  # a NaN in one completion would be in every parameter after the step
        optimizer.step()
    optimizer.zero_grad()
    return metrics, norm


class AdamW(torch.optim.AdamW):
    """AdamW with the paper's settings; `params` are the float32 tensors that it trains, which
    `update` clips and the run saves."""

    def __init__(self, params, lr):
        self.params = params
        super().__init__(params, lr, BETAS, weight_decay=WEIGHT_DECAY)


def set_rate(optimizer, lr):
    """Set lr in each parameter group, times the group's `times` if it has that key. AdamW above has
    one group; an optimizer of your own may have several."""
    for group in optimizer.param_groups:
        group["lr"] = float(lr * group.get("times", 1.0))  # a numpy number would not load again


def learning_rate(step, total, peak):
    """Linear warm-up over the first share WARMUP of `total` optimizer steps, then a cosine to 0."""
    warm = max(1, round(WARMUP * total))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))
