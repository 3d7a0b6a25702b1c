"""
The columns of metrics.jsonl: sums over micro-batches to means, and what describes a rollout and a
step's updates; and what an adapter gains, with its error.
"""
import math
from itertools import chain
from statistics import fmean, stdev

from plumbing import ranks

import torch


def sum_metrics(parts):
    """Metrics of several micro-batches -> those of all: sums; of names that end in _max, maxima."""
    return {k: torch.stack([p[k] for p in parts]).amax(0) if k.endswith("_max")
            else sum(p[k] for p in parts) for k in parts[0]}


def as_floats(total):
    """Summed metrics as floats; one device synchronisation."""
    return dict(zip(total, torch.stack([v.double() for v in total.values()]).tolist(), strict=True))


def sum_over_ranks(parts):
    """sum_metrics of the parts of all ranks; one at least has some."""
    if ranks.world > 1:  # as floats: GPU tensors do not travel, CPU tensors take milliseconds
        all_parts = chain(*ranks.gather([as_floats(sum_metrics(parts))] if parts else []))
        parts = [{k: torch.tensor(v, dtype=torch.double) for k, v in p.items()} for p in all_parts]
    return sum_metrics(parts)


def mean_metrics(total):
    """Summed metrics -> means per token (the loss and the maximum as they are), as floats under the
    column names of metrics.jsonl."""
    t = as_floats(total)
    n = max(t["tokens"], 1.0)
    return {"loss": t["loss"], "clip_low_frac": t["clip_low"] / n,
            "clip_high_frac": t["clip_high"] / n, "kl": t["kl"] / n,
            "logp_gap_mean": t["logp_gap"] / n, "logp_gap_max": t["logp_gap_max"],
            "sampler_kl": t["sampler_kl"] / n, "ratio_outside_frac": t["ratio_outside"] / n,
            "entropy": t["entropy"] / n}


def sample_metrics(groups):
    """The columns of metrics.jsonl that describe a rollout: P groups of G Completions."""
    flat = [*chain(*groups)]
    lengths = [len(c.ids) for c in flat]
    rewards = torch.tensor([[c.reward for c in g] for g in groups], dtype=torch.double)  # (P, G)
    means = rewards.mean(1)  # (P,): the groups are the independent draws
    spread = rewards.amax(1) - rewards.amin(1)  # (P,)
    return {"reward": fmean(c.reward for c in flat),
            "reward_se": (means.std() / len(groups) ** 0.5).item() if len(groups) > 1 else None,
            "accuracy": fmean(c.correct for c in flat), "format": fmean(c.format for c in flat),
            "reward_std": rewards.std(1).mean().item(),
            "zero_var_frac": (spread <= 1e-9 * rewards.abs().amax(1)).double().mean().item(),
            "length_mean": fmean(lengths), "length_max": max(lengths),
            "truncated_frac": fmean(not c.finished for c in flat),
            # mean -log p of what was drawn: the entropy of the sampling policy, its noise included
            "sampler_entropy": -sum(sum(c.logprobs) for c in flat) / sum(lengths)}


def update_metrics(updates, beta):
    """The columns that describe a step's updates, each (summed metrics, gradient norm), or None
    where it had nothing to train on. Without any they are null: an entropy of 0 would claim one."""
    updates = [u for u in updates if u]
    finite = [u for u in updates if math.isfinite(u[1])]
    row = dict.fromkeys(("grad_norm", "loss", "clip_low_frac", "clip_high_frac", "kl",
                         "logp_gap_mean", "logp_gap_max", "sampler_kl", "ratio_outside_frac",
                         "entropy", "clip_first_frac"))
    row |= {"updates": len(finite), "skipped": len(updates) - len(finite),
            "trained_tokens": sum(float(sums["tokens"]) for sums, _ in updates)}
    if not finite:
        return row
    each = [mean_metrics(sums) for sums, _ in finite]
    row |= mean_metrics(sum_metrics([sums for sums, _ in finite]))
    row["loss"] = fmean(m["loss"] for m in each)
    row["grad_norm"] = fmean(norm for _, norm in finite)
    # sampler and trainer are compared before the step's first update moves one of them
    start = each[0]
    row |= {k: start[k] for k in start if k.startswith(("logp_gap", "sampler_kl", "ratio"))}
    row["clip_first_frac"] = start["clip_low_frac"] + start["clip_high_frac"]
    row["kl"] = row["kl"] if beta else None  # else the base model was not run
    return row


def stderr(values):
    """Standard error of the mean of independent values (of one value a question: the samples of a
    question are not independent of each other); None for a single one."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def gain(before, after):
    """The gain in accuracy and its standard error, paired by question: rows of eval.evaluate."""
    d = [b["accuracy"] - a["accuracy"] for a, b in zip(before, after, strict=True)]
    return fmean(d), stderr(d)
