"""
Would a test notice? Small mutations of the sources, each of which must make a named test fail.

A test suite is only as good as the mistakes it catches, and a training loop hides its mistakes
well: with its advantages negated it still runs, logs and saves. Every entry of MUTANTS is such a
mistake, in one line of one file, and the test that is there to catch it. This is done to copies in
a temporary folder, never to the tree itself. What counts is an assertion that fails (or a test that
raises); a fixture that breaks or a file that no longer imports proves nothing, and is an error. So
is a mutation whose text is no longer found exactly once, and a named test that fails unmutated.

A parent process imports the libraries (not the project) once and forks a child for each mutant,
two at a time.

    python tests/mutants.py                   # all of them, as a table; exit code 1 if one survives
    python tests/mutants.py --third           # a third, chosen by the date, as CI does
    python tests/mutants.py draw.py negated   # those whose file or name contains one of these
"""
import argparse
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 150  # seconds after which a test that a mutation keeps from ending is given up
# imported once, before the children are forked, where each would need five seconds for them
LIBRARIES = ("pytest", "torch", "torch._dynamo", "torch.utils.checkpoint", "numpy", "triton",
             "safetensors.torch", "tokenizers", "jinja2.sandbox", "huggingface_hub",
             "matplotlib.pyplot", "tqdm")

# source file -> (name, text that is there once, what it becomes, tests that must notice). A test is
# written as file::name without the two words "test_".
MUTANTS = {
    "train.py": [
        ("the noise stays on in the update", 'args.aqn_scope == "rollout"', "False",
         "loop::noise_is_in_the_rollout_and_not_in_the_update"),
        ("the noise is off in the update of scope both", 'args.aqn_scope == "rollout"', "True",
         "loop::scope_both_keeps_the_rollouts_noise_in_the_update"),
        ("the noise is never redrawn", "aqn.noise_seed(args.seed, step)",
         "aqn.noise_seed(args.seed, 0)", "loop::noise_is_drawn_anew_each_step"),
        ("every seed's noise", "aqn.noise_seed(args.seed, step)", "aqn.noise_seed(0, step)",
         "loop::samples_noise_order_and_adapter_are_functions_of_the_seed"),
        ("every seed's samples", 'args.seed, f"samples', '0, f"samples',
         "loop::samples_noise_order_and_adapter_are_functions_of_the_seed"),
        ("every seed's order of prompts", "Prompts(rows, args.seed)", "Prompts(rows, 0)",
         "loop::samples_noise_order_and_adapter_are_functions_of_the_seed"),
        ("every seed's adapter", "args.lora_alpha, args.seed)", "args.lora_alpha, 0)",
         "loop::samples_noise_order_and_adapter_are_functions_of_the_seed"),
        ("every seed's problems", '"train", seed=args.seed', '"train", seed=0',
         "loop::questions_follow_the_seed_and_the_limit"),
        ("every seed's tenth is held out", 'f"{args.seed}/held out"', '"0/held out"',
         "train::a_single_file_keeps_a_tenth_out_of_training"),
        ("all of a file's tenth is asked", "rows[:held][: args.eval_limit]", "rows[:held]",
         "train::a_single_file_keeps_a_tenth_out_of_training"),
        ("all of the test split is asked", '"test", n=args.eval_limit', '"test"',
         "loop::questions_follow_the_seed_and_the_limit"),
        ("the noise stays at its start", "args.aqn_start, args.aqn_end,",
         "args.aqn_start, args.aqn_start,", "loop::noise_is_in_the_rollout_and_not_in_the_update"),
        ("the noise begins at its end", "args.aqn_start, args.aqn_end,",
         "args.aqn_end, args.aqn_end,", "loop::trainer_logprobs_are_those_before_the_first_update"),
        ("one step is a pass", "args.steps or max(1, len(rows) // args.prompts_per_step)",
         "args.steps or 1", "loop::the_loop_gets_one_pass_and_the_style_that_was_asked_for"),
        ("prompts of one style", "train_rows, args.prompt_style", 'train_rows, "tags"',
         "loop::the_loop_gets_one_pass_and_the_style_that_was_asked_for"),
        ("rewards of one style", "data.scorer(args.prompt_style,", 'data.scorer("tags",',
         "loop::the_loop_gets_one_pass_and_the_style_that_was_asked_for"),
        ("as many rows side by side as there are", "max_rows=args.max_rows", "max_rows=256",
         "loop::flags_reach_the_sampler"),
        ("samples of the groups that were kept are shown", "lr, result), first)",
         "lr, result), groups)",
         "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("the noise ignores --no-aqn", "if args.aqn else 0.0", "if True else 0.0",
         "loop::no_aqn_is_no_noise"),
        ("the schedule counts from the second step", "aqn.sigma(step, ", "aqn.sigma(step + 1, ",
         "loop::noise_is_in_the_rollout_and_not_in_the_update"),
        ("the learning rate is never set", 'optimizer.param_groups[0]["lr"] = lr',
         'optimizer.defaults["lr"] = lr', "loop::learning_rate_of_each_update"),
        ("one learning rate for all updates of a step", "step * n + i", "step * n",
         "loop::learning_rate_of_each_update"),
        ("every update on all groups", "groups[i::n]", "groups",
         "loop::each_group_is_in_exactly_one_update"),
        ("Dr.GRPO divides by the standard deviation", 'scale=args.loss != "dr_grpo"', "scale=True",
         "loop::dr_grpo_does_not_divide_by_the_standard_deviation"),
        ("the overlong penalty is ignored", "c.reward += ", "c.reward += 0 * ",
         "loop::overlong_soft_lowers_the_reward_of_long_completions"),
        ("samples seeded without the step", 'f"samples/{name}"', '"samples"',
         "loop::each_step_draws_new_samples_of_new_prompts"),
        ("prompts of one epoch in every epoch's order", '(f"{self.seed}/{epoch}")',
         '(f"{self.seed}")', "train::data_order_is_a_function_of_seed_and_cursor"),
        ("the cursor of the prompts stands still", "self.cursor += 1", "self.cursor += 0",
         "loop::each_step_draws_new_samples_of_new_prompts"),
        ("the cursor is not saved", "run.advance(step + 1, prompts.cursor,",
         "run.advance(step + 1, 0,", "train::resume_is_exact"),
        ("the cursor is not restored", "prompts.cursor = run.state.cursor", "prompts.cursor = 0",
         "train::resume_is_exact"),
        ("sampling at temperature 1", "args.temperature, eos_ids=", "1.0, eos_ids=",
         "loop::flags_reach_the_sampler"),
        ("the stop tokens are not passed", "eos_ids=tok.eos_ids", "eos_ids=()",
         "loop::flags_reach_the_sampler"),
        ("the sampler's log-probs are not recorded", "s.ids, s.logprobs, s.finished",
         "s.ids, [0.0] * len(s.ids), s.finished",
         "loop::the_ratio_is_taken_against_what_the_sampler_recorded"),
        ("every completion counts as finished", "s.ids, s.logprobs, s.finished",
         "s.ids, s.logprobs, True", "loop::a_row_tells_of_all_completions_of_its_step"),
        ("groups without signal are trained on", "groups = [g for g in first if has_signal(g)]",
         "groups = list(first)",
         "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("resampled groups without signal are kept", "[g for g in more if has_signal(g)]", "more",
         "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("resampled groups with signal are dropped", "groups + [g for g in more if has_signal(g)]",
         "groups", "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("dynamic sampling goes on past its bound", "range(args.max_resample)",
         "range(args.max_resample + 1)",
         "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("resampling draws the first rollout's samples", 'f"{step}/{again + 1}"', "step",
         "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("statistics of the groups that were kept", "step, first, groups, n_prompts,",
         "step, groups, groups, n_prompts,",
         "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("held-out questions at temperature 1", "a.eval_n, a.eval_temperature, a.eval_top_p",
         "a.eval_n, 1.0, a.eval_top_p", "train::held_out_questions_are_asked_as_the_flags_say"),
        ("held-out questions graded by another reward", "a.max_rows, score=score",
         "a.max_rows, score=None", "train::held_out_questions_are_asked_as_the_flags_say"),
        ("betas are not passed", "(args.beta1, args.beta2)", "(0.9, 0.99)",
         "loop::adamw_gets_its_flags"),
        ("weight decay is not passed", "(args.beta1, args.beta2), args.weight_decay",
         "(args.beta1, args.beta2), 0.0", "loop::adamw_gets_its_flags"),
        ("held-out questions are trained on", "return rows[held:], rows[:held]",
         "return rows, rows[:held]", "train::a_single_file_keeps_a_tenth_out_of_training"),
        ("samples depend on the rank", "isatty(), indices=mine)", "isatty())",
         "ranks::two_ranks_compute_the_update_of_one"),
        ("a rank trains on what it drew alone", "return ranks.merge(groups)", "return groups",
         "ranks::two_ranks_compute_the_update_of_one"),
        ("the adapter's alpha is its rank", "args.lora_rank, args.lora_alpha, args.seed",
         "args.lora_rank, args.lora_rank, args.seed", "loop::flags_reach_the_adapter"),
    ],
    "grpo.py": [
        ("gradients in float16 are not scaled up", "2.0 ** math.floor(math.log2(most)) if half",
         "1.0 if half", "packed::gradients_do_not_vanish_in_float16"),
        ("gradients in float16 stay scaled up", "            p.grad /= scale\n",
         "            pass\n", "packed::gradients_do_not_vanish_in_float16"),
        ("a rank divides by its own tokens", "settings, sum(lengths), len(counted)",
         "settings, sum(lengths[ranks.rank :: ranks.world]), len(counted)",
         "ranks::two_ranks_compute_the_update_of_one"),
        ("each rank trains on all", "share = dealt(model, learned, budget)[ranks.rank]",
         "share = families(model, learned, budget)", "ranks::two_ranks_compute_the_update_of_one"),
        ("gradients are not summed over ranks", "    ranks.sum_gradients(optimizer.params)\n", "",
         "ranks::two_ranks_compute_the_update_of_one"),
        ("metrics of one rank's share", "in p.items()} for p in all_parts]", "in p.items()} for p in [*all_parts][:1]]",
         "ranks::two_ranks_compute_the_update_of_one"),
        ("the trainer's log-probs stay on their rank", "chain(*found), strict=True):",
         "chain(*found), strict=True) if ranks.world == 1 else ():",
         "ranks::prompts_that_do_not_divide_by_the_ranks"),
        ("standard deviation of the batch", "r.std(1, keepdim=True)", "r.std()",
         "grpo::advantages_are_by_group"),
        ("advantages against the mean of the batch", "centred = r - r.mean(1, keepdim=True)",
         "centred = r - r.mean()", "grpo::advantages_are_by_group"),
        ("the length penalty begins at the limit", "(max_len - buffer - lengths)",
         "(max_len - lengths)", "grpo::overlong_rows_can_be_masked_or_penalised"),
        ("the stop token is masked", "device=lengths.device) < lengths[:, None]",
         "device=lengths.device) < lengths[:, None] - 1", "grpo::masks_come_from_lengths"),
        ("GSPO's ratio is a product", "(log_ratio.sum(1, keepdim=True) / length)",
         "log_ratio.sum(1, keepdim=True)",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("PPO takes the larger gain", "torch.min(ratio * adv", "torch.max(ratio * adv",
         "grpo::negative_advantage_takes_the_minimum"),
        ("the two bounds of the clip are swapped", "ratio.clamp(1 - low, 1 + high) * adv)",
         "ratio.clamp(1 - high, 1 + low) * adv)", "grpo::clip_higher_uses_its_own_bound"),
        ("a gradient through CISPO's weight", "ratio.clamp(1 - low, 1 + high).detach()",
         "ratio.clamp(1 - low, 1 + high)", "grpo::cispo_weighs_every_token_by_its_clipped_ratio"),
        ("GRPO counts tokens, not completions",
         "return (per_token / mask.sum(1, keepdim=True).clamp(min=1))",
         "return (per_token / mask.sum().clamp(min=1))",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("DAPO divides by its micro-batch's tokens", "return per_token.sum() / tokens",
         "return per_token.sum() / mask.sum()", "grpo::micro_batches_add_up_to_the_full_batch"),
        ("Dr.GRPO divides by the length", "/ (seqs * max_len)", "/ (seqs * mask.sum(1).max())",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("GSPO clips like PPO", "(3e-4, 4e-4)", "(0.2, 0.2)",
         "grpo::each_objective_has_its_own_clip"),
        ("the importance weight is not truncated", ".exp().clamp(max=tis_cap)", ".exp()",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("no importance weight", "gain = gain * objective.level(gap, mask)",
         "gain = gain * objective.level(0 * gap, mask)",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("the ratio is against the sampler where the trainer was asked for",
         "anchor = old_logp if trainer_old_logp is None else trainer_old_logp",
         "anchor = old_logp",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("clipped tokens are counted where no gradient stops",
         "(ratio < 1 - low) & (adv < 0) & mask", "(ratio < 1 - low) & mask",
         "grpo::clipped_tokens_are_counted_where_the_gradient_stops"),
        ("the KL has its arguments swapped", "difference(ref_logp, logp)",
         "difference(logp, ref_logp)",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("beta is ignored", "(beta * kl - gain if beta else -gain)", "(-gain)",
         "grpo::each_objective_equals_numpy_and_its_gradient_finite_differences"),
        ("the largest gap is the sum of the largest", ".amax(0)", ".sum(0)",
         "grpo::micro_batches_add_up_to_the_full_batch"),
        ("log-probs from the state before", "b * L + len(c.prompt) - 1, b * L + len(row))",
         "b * L + len(c.prompt) - 2, b * L + len(row) - 1)",
         "train::sampler_and_trainer_agree_on_every_token"),
        ("the update forgets the temperature",
         "logp, entropy, mask = completion_logprobs(model, batch, s.temperature)",
         "logp, entropy, mask = completion_logprobs(model, batch, 1.0)",
         "loop::the_ratio_is_taken_against_what_the_sampler_recorded"),
        ("the two bounds are swapped on their way", "s.loss, s.eps_low, s.eps_high",
         "s.loss, s.eps_high, s.eps_low", "loop::flags_reach_the_loss"),
        ("the KL reference forgets the temperature",
         "reference = completion_logprobs(model, batch, s.temperature)",
         "reference = completion_logprobs(model, batch, 1.0)",
         "loop::the_kl_reference_is_the_model_without_its_adapter"),
        ("trainer log-probs forget the temperature", "batch, settings.temperature)", "batch, 1.0)",
         "loop::trainer_logprobs_are_those_before_the_first_update"),
        ("the logged KL is a sum", '"kl": t["kl"] / n', '"kl": t["kl"]',
         "loop::the_kl_reference_is_the_model_without_its_adapter"),
        ("the KL reference is the adapter itself", "with torch.no_grad(), lora.disabled(model):",
         "with torch.no_grad():", "loop::the_kl_reference_is_the_model_without_its_adapter"),
        ("trainer log-probs are those of the update",
         "anchor = padded([c.trainer_logprobs for c in batch])", "anchor = logp.detach()",
         "loop::trainer_logprobs_are_those_before_the_first_update"),
        ("the update's own log-probs keep their gradient", "anchor = logp.detach()",
         "anchor = logp", "loop::current_logprobs_make_every_ratio_one_and_keep_the_weight"),
        ("the overlong mask is ignored", 'or overlong != "mask"', "or True",
         "loop::overlong_mask_leaves_cut_completions_out"),
        ("advantages negated", "values = advantages(rewards, scale)",
         "values = advantages(-rewards, scale)",
         "loop::advantages_are_the_rewards_within_their_group"),
        ("Dr.GRPO's divisor counts the finished ones", "counted = completions if",
         "counted = learned if",
         "loop::dr_grpo_divides_by_a_constant_also_where_completions_are_masked"),
        ("each micro-batch is normalised by itself", "settings, sum(lengths), len(counted)",
         "settings, None, None", "loop::the_loss_is_normalised_by_the_whole_update"),
        ("the loss of the last micro-batch", "parts.append(metrics)", "parts = [metrics]",
         "train::any_micro_batching_gives_the_same_gradient_and_loss"),
        ("the gradient of the last micro-batch", "        (scale * loss).backward()",
         "        model.zero_grad() or loss.backward()",
         "train::any_micro_batching_gives_the_same_gradient_and_loss"),
        ("gradients are not clipped", "optimizer.params, settings.grad_clip",
         "optimizer.params, 1e9", "loop::gradients_are_clipped_and_the_norm_before_is_logged"),
        ("a gradient that is not finite is stepped", "if math.isfinite(norm):", "if True:",
         "loop::a_gradient_that_is_not_finite_changes_nothing"),
        ("gradients pile up from update to update",
         "    optimizer.step()\n    optimizer.zero_grad()", "    optimizer.step()",
         "loop::every_update_begins_without_a_gradient"),
        ("a NaN stays in 16-bit gradients", "for p in (*self.params, *self.masters):", "for p in self.masters:",
         "loop::a_skipped_update_leaves_nothing_in_16_bit_gradients"),
        ("short completions overflow float16", "1024 * min(lengths) * len(lengths))", "64 * sum(lengths))",
         "packed::a_short_completion_does_not_overflow_float16"),
        ("the step is left out", "    optimizer.step()\n", "    optimizer.state\n",
         "loop::every_update_moves_the_adapter_and_nothing_else_does"),
        ("16-bit parameters never see their masters", "p.copy_(m)", "p.copy_(p)",
         "train::sixteen_bit_parameters_are_trained_through_float32_masters"),
        ("CISPO clips like PPO", "token_mean, (1.0, 4.0)", "token_mean, (0.2, 0.28)",
         "grpo::cispo_caps_ratios_at_five_unless_told"),
        ("tokens clipped below are called clipped above",
         '"clip_low_frac": t["clip_low"] / n,\n            "clip_high_frac": t["clip_high"] / n',
         '"clip_low_frac": t["clip_high"] / n,\n            "clip_high_frac": t["clip_low"] / n',
         "grpo::clipped_tokens_are_counted_where_the_gradient_stops"),
        ("completions without tokens are counted", "mask.any(1).sum() if total_seqs",
         "mask.shape[0] if total_seqs",
         "grpo::a_completion_without_tokens_to_train_on_is_not_counted"),
        ("the entropy is not measured", "max_len=s.max_new_tokens, entropy=entropy)",
         "max_len=s.max_new_tokens, entropy=None)",
         "loop::the_logged_entropy_is_of_the_policy_at_the_tokens_that_are_trained_on"),
        ("a step with nothing to learn from", "    if metrics is None:\n        return None\n", "",
         "loop::an_update_with_nothing_to_train_on_changes_nothing"),
        ("a loss of no completions", "    if not learned:\n        return None\n", "",
         "loop::an_update_with_nothing_to_train_on_changes_nothing"),
        ("the trainer's log-probs keep their activations",
         "@torch.no_grad()\ndef record_trainer", "def record_trainer",
         "loop::the_trainers_own_logprobs_keep_nothing_for_a_backward"),
        ("the learning rate does not decay", "peak * 0.5 * (1 + math.cos(",
         "peak * (1 + 0 * math.cos(", "train::learning_rate_warms_up_and_ends_near_zero"),
    ],
    "runtime/logprobs.py": [
        ("spare rows of the embedding have probability", "x[:, valid_vocab:] = -torch.inf",
         "x[:, valid_vocab:] += 0", "logprobs::ids_past_the_tokenizer_have_probability_zero"),
        ("the temperature multiplies", "x.div_(temperature)", "x.mul_(temperature)",
         "logprobs::temperature_is_applied_before_the_logprob"),
        ("the temperature is missing in the gradient", "grad = -grad / ctx.temperature",
         "grad = -grad", "logprobs::chunked_head_equals_dense_in_value_and_gradient"),
    ],
    "aqn.py": [
        ("the command prints another schedule", "a.aqn_stages, a.aqn_schedule)", "a.aqn_stages)",
         "aqn::command_prints_what_training_uses"),
        ("the command has a last sigma of its own", "default=5e-4", "default=1e-4",
         "aqn::command_prints_what_training_uses"),
        ("a noise of one's own stays on", '== "noise"}', '== "noise" and "layernorm" in name}',
         "aqn::a_noise_of_ones_own_is_cleared_with_the_others"),
        ("the schedule rises", "start ** (1 - x) * end**x", "start**x * end ** (1 - x)",
         "aqn::schedule_gives_the_published_levels"),
        ("the first stage is noisy", "elif stage == 0:", "elif stage < 0:",
         "aqn::schedule_gives_the_published_levels"),
        ("the variance instead of the deviation", "sigma * torch.randn(",
         "sigma**2 * torch.randn(",
         "aqn::noise_of_each_norm_is_its_own_and_has_the_deviation_asked_for"),
        ("noise on the first norm of a layer only", "in enumerate(pair):",
         "in enumerate(pair[:1]):", "aqn::noise_reaches_every_layer_norm_and_only_those"),
        ("one noise for all layers", "noise_seed(seed, layer, which)", "noise_seed(seed, which)",
         "aqn::noise_of_each_norm_is_its_own_and_has_the_deviation_asked_for"),
        ("noise is not cleared", "        b.zero_()", "        b.add_(0)",
         "aqn::sigma_zero_restores_the_clean_output_bit_for_bit"),
        ("noise is not given back after a clean block", "b.copy_(saved[name])", "b.copy_(b)",
         "aqn::clean_block_is_clean_and_restores_the_noise"),
    ],
    "model.py": [
        ("noise relative to the weight", "self.weight.float() + self.noise",
         "self.weight.float() * (1 + self.noise)",
         "aqn::noise_equals_row_scaling_of_the_weights_behind_it"),
        ("the rotation turns the other way", "a * cos - b * sin, b * cos + a * sin",
         "a * cos + b * sin, b * cos - a * sin", "model::logits_equal_transformers"),
        ("gate and up are swapped", "F.silu(gate) * up", "F.silu(up) * gate",
         "model::logits_equal_transformers"),
        ("cached keys see the future", "device=ids.device) <= pos[..., None]",
         "device=ids.device) <= pos[..., None] + 1",
         "model::rows_of_one_cache_may_have_different_lengths"),
    ],
    "lora.py": [
        ("full training goes where weights are frozen", "w.dtype not in HALVES or trains or",
         "w.dtype not in HALVES or", "packed::training_all_parameters_takes_the_modules"),
        ("heads of any size go to the kernels", "or trains or model.config.head_dim not in sizes:",
         "or trains:", "packed::training_all_parameters_takes_the_modules"),
        ("the scaling is alpha", "LoRALinear(m, rank, alpha / rank, g)",
         "LoRALinear(m, rank, alpha, g)",
         "lora::each_projection_of_a_fused_group_has_its_own_a_and_b"),
        ("rank-stabilised adapters are scaled plainly", "alpha / math.sqrt(rank) if",
         "alpha / rank if", "lora::an_adapter_that_peft_saved_gives_pefts_logits"),
        ("a loaded adapter keeps the old scaling", "        m.scaling = scaling\n",
         "        m.scaling *= 1\n", "lora::save_then_load_gives_the_same_logits_bit_for_bit"),
        ("a fresh adapter is not the base", "torch.zeros(N, rank, device=device)",
         "torch.ones(N, rank, device=device)",
         "lora::a_fresh_adapter_is_the_base_model_bit_for_bit_and_learns"),
        ("the base is trained as well", "model.requires_grad_(False)",
         "model.requires_grad_(True)",
         "lora::only_the_adapter_is_trainable_and_all_of_it_gets_a_gradient"),
        ("a merge forgets the scaling", "self.scaling * torch.cat(delta)", "torch.cat(delta)",
         "lora::the_merged_checkpoint_computes_what_base_and_adapter_do"),
        ("switching back turns on what was off", "m.enabled = on", "m.enabled = True",
         "lora::disabled_restores_each_layer_as_it_was_even_after_an_error"),
        ("targets that are left out keep their B", "B.zero_()", "B.add_(0)",
         "lora::a_subset_of_targets_clears_what_an_earlier_adapter_left"),
        ("the saved alpha is the scaling", "alpha = round(m.scaling * m.rank, 9)",
         "alpha = round(m.scaling, 9)", "lora::save_then_load_gives_the_same_logits_bit_for_bit"),
    ],
    "sample.py": [
        ("the stop token is cut off", "ids[: 1 + next(", "ids[: next(", "sample::stops"),
        ("no completion is finished", "sample.finished = True", "sample.finished = False",
         "sample::stops"),
        ("the samples of a group are copies", "row_keys(seed, index[:, 0], index[:, 1])",
         "row_keys(seed, index[:, 0], index[:, 0])",
         "sample::group_members_differ_and_equal_prompts_too"),
        ("the seed is ignored", "row_keys(seed,", "row_keys(0,",
         "sample::samples_do_not_depend_on_the_other_prompts"),
        ("top-p does not reach the engine", "engine.begin(temperature, top_p, eos)",
         "engine.begin(temperature, 1.0, eos)",
         "sample::what_is_drawn_is_a_function_of_seed_prompt_sample_and_position"),
        ("a neighbour's slot stays empty", "copies[-1][2] += 1", "copies[-1][2] += 0",
         "sample::refill_and_shrink_keep_every_sample"),
        ("a copied prompt lacks its last token",
         "engine.copy_row(fresh[p], first, end, len(prompts[p]) - 1)",
         "engine.copy_row(fresh[p], first, end, len(prompts[p]) - 2)",
         "sample::logprobs_equal_the_full_forward"),
        ("a row that moves leaves its newest keys behind",
         "len(prompts[p]) + len(out[p][j].ids) + flight.steps)", "len(prompts[p]))",
         "sample::refill_and_shrink_keep_every_sample"),
        ("a NaN is a sample", "if lost := sum(not math.isfinite(", "if lost := 0 * sum(not math.isfinite(",
         "sample::a_model_that_overflows_is_refused"),
        ("the device waits for the host", "if not engine.ahead:", "if True:",
         "decode::the_next_steps_are_launched_before_the_last_ones_are_fetched"),
        ("steps past the limit are launched", "flight.steps * ((p, j) in flight.places)", "0",
         "decode::the_next_steps_are_launched_before_the_last_ones_are_fetched"),
        ("a row that begins counts as in flight", "flight.steps * ((p, j) in flight.places)",
         "flight.steps", "decode::the_next_steps_are_launched_before_the_last_ones_are_fetched"),
        ("a row's tokens are another's", "(p, j), i = row, landed.places[row]", "(p, j), i = row, s",
         "decode::engine_equals_eager"),
        ("a hole is a row in flight", "enumerate(live) if row}, fetch)", "enumerate(live)}, fetch)",
         "decode::rows_that_wait_for_company_leave_holes_and_draw_the_same"),
        ("answers of a file at one temperature", "args.n, limits, args.temperature,",
         "args.n, limits, 1.0,", "sample::flags_reach_the_file_of_answers"),
        ("the first prompt's limit for all", "args.n, limits, args.temp",
         "args.n, limits[0], args.temp", "sample::flags_reach_the_file_of_answers"),
        ("the system message is dropped", "if args.system else []", "if False else []",
         "sample::a_conversation_is_what_was_said_in_turn"),
        ("the model's answers are the user's", '"user" if user else "assistant"', '"user"',
         "sample::a_conversation_is_what_was_said_in_turn"),
        ("a chat that was cleared goes on", "                texts = []\n", "                pass\n",
         "sample::a_chat_remembers_until_it_is_cleared"),
        ("each end is a prefill of its own", "idle >= engine.stall * busy", "True",
         "decode::rows_that_wait_for_company_leave_holes_and_draw_the_same"),
    ],
    "marlin_triton.py": [
        ("the descriptor's second half is its first", "xd.load([pid % MT * BM, kc + 64])",
         "xd.load([pid % MT * BM, kc])", "marlin_triton::each_tile_matches"),
        ("float16 is decoded into bfloat16's scratch", "buffers[2].view(dtype)", "buffers[2]",
         "marlin_triton::in_float16"),
        ("gate and up change places", "gate, up = tl.split(", "up, gate = tl.split(",
         "marlin_triton::epilogue_multiplies_silu_of_gate_with_up"),
        ("a row takes another part's x A^T", "(own == p)", "(own == P - 1 - p)",
         "marlin_triton::epilogue_adds_bias_lora_and_residual"),
        ("a slice of x A^T is left out", "mask=keep[:, :, None], other=0.0,",
         "mask=keep[:, :, None] & (z > 0), other=0.0,",
         "marlin_triton::epilogue_multiplies_silu_of_gate_with_up"),
        ("the first slices count twice", "+ (n + z), mask", "+ z, mask",
         "marlin_triton::many_slices_are_added_up_once"),
        ("a slice ends a chunk early", "tl.minimum(K, z * per + per)",
         "tl.minimum(K, z * per + per - 128)",
         "marlin_triton::epilogue_multiplies_silu_of_gate_with_up"),
        ("a wave is never full", "programs * t[\"each\"])", "0)",
         "marlin_triton::plans_are_near_the_fastest_that_was_measured"),
        ("the last maker adds one slice", "added(sums + spot * Z, here, Z,",
         "added(sums + spot * Z, here, 1,",
         "marlin_triton::many_slices_are_added_up_once"),
        ("whole tiles are summed in part", "per = tl.where(cut, tl.cdiv(KB, SPLIT), KB)", "per = tl.cdiv(KB, SPLIT)",
         "marlin_triton::only_the_last_tiles_are_split"),
        ("the adapter's flag stays up", "== everyone - 1", "== everyone",
         "marlin_triton::epilogue_multiplies_silu_of_gate_with_up"),
        ("the residual of few rows is not added", "acc += rs.to(tl.float32)", "acc += 0 * rs.to(tl.float32)",
         "marlin_triton::the_result_may_overwrite_the_residual"),
        ("the residual is not added", "tl.load(res + o, mask=keep, other=0.0)", "0 * tl.load(res + o)",
         "marlin_triton::the_result_may_overwrite_the_residual"),
        ("a split is left out", "tl.static_range(1, SPLIT)", "tl.static_range(2, SPLIT)",
         "marlin_triton::the_result_may_overwrite_the_residual"),
    ],
    "runtime/bits.py": [
        ("NF4's signs change places", "0xd9c8", "0xc8d9",
         "marlin_triton::what_the_ptx_makes_of_a_word"),
        ("E2M1's last pair without its mantissa", "0x00400040, d, 0xea", "0x00000040, d, 0xea",
         "marlin_triton::what_the_ptx_makes_of_a_word"),
        ("E2M1 in float16 with the neighbours' bits", "0xe2;    and.b32 b, b, 0x8e008e00;", "0xe2;",
         "marlin_triton::what_the_ptx_makes_of_a_word"),
    ],
    "runtime/decode.py": [
        ("a row's norm without its noise", "return w + tl.load(noise + c, mask=c < C, other=0)",
         "return w", "decode::step_equals_the_modules"),
        ("the sum of one split is not divided", "(acc / l[:, None]).to(dtype)", "acc.to(dtype)",
         "decode::step_equals_the_modules"),
        ("splits count alike", "+ f[:, None] * some", "+ some",
         "decode::step_equals_the_modules"),
        ("a split's arrival is not forgotten", "        tl.store(arrived + b * HKV + h, 0)\n", "",
         "decode::step_equals_the_modules"),
    ],
    "runtime/batches.py": [
        ("the last micro-batch is dropped", "    if batch:\n        yield [*", "    if not batch:\n        yield [*",
         "train::micro_batches_hold_no_more_than_their_budget"),
        ("a completion's first token is predicted by another's last", "take += [last, *range", "take += [begin - 1, *range",
         "packed::completions_of_a_prompt_share_its_states"),
        ("a prompt is computed for each completion", "len(f) < most", "len(f) < 1",
         "packed::completions_of_a_prompt_share_its_states"),
        ("a family passes the budget", "size(f) + len(c.ids) - 1 <= token_budget", "size(f) <= token_budget",
         "packed::completions_of_a_prompt_share_its_states"),
        ("padding fills a packed micro-batch", "total if end_to_end else", "",
         "packed::micro_batches_count_padding_only_where_there_is_padding"),
        ("a family keeps ranks idle", "min(token_budget, share)", "token_budget",
         "packed::families_leave_no_rank_idle"),
    ],
    "runtime/attention.py": [
        ("a key is seen one query early", "place[:, None] >= place[None, :]), x", "place[:, None] + 1 >= place[None, :]), x",
         "attention::attention_equals_the_softmax_in_value_and_gradient"),
        ("a completion sees another's tokens as its prompt's", "(j + place)[None, :] < stop", "(j + place)[None, :] <= stop",
         "attention::rows_that_continue_another_see_it_and_give_it_their_gradients"),
        ("a prompt has no gradient from its completions", "seen = end.scatter_reduce(0, of, end, \"amax\")", "seen = end",
         "attention::rows_that_continue_another_see_it_and_give_it_their_gradients"),
        ("queries of the next row have weight", "(j == 0) | (at + j + B > seen)", "j == 0",
         "attention::attention_equals_the_softmax_in_value_and_gradient"),
        ("older sums do not fade", "total * fade + tl.sum(p, 1)", "total + tl.sum(p, 1)",
         "attention::attention_equals_the_softmax_in_value_and_gradient"),
        ("one query head of a group counts", "range(G * steps)", "range(steps)",
         "attention::attention_equals_the_softmax_in_value_and_gradient"),
        ("empty rows shift the blocks", "searchsorted(last, n, right=True)", "searchsorted(last, n)",
         "attention::blocks_cover_each_token_once_and_are_as_many_as_shapes_say"),
    ],
    "runtime/packed.py": [
        ("a completion's places begin at 0", "at = len(rows[of[i]]) if of and of[i] != i else 0", "at = 0",
         "packed::completions_of_a_prompt_share_its_states"),
        ("replaced parameters live on", "same = same and now == ", "same = same and 0 < len",
         "packed::another_adapter_or_weight_is_what_the_next_pass_takes"),
        ("a replaced weight lives on", "self.q.codes is m.base.codes", "True",
         "packed::another_adapter_or_weight_is_what_the_next_pass_takes"),
        ("a trained adapter is copied once", "    refresh(linears)\n    ids, places",
         "    ids, places", "packed::another_adapter_or_weight_is_what_the_next_pass_takes"),
        ("the noise is left out of training", "m.weight, m.noise", "m.weight, 0 * m.noise",
         "packed::packed_equals_the_modules_in_value_and_gradient"),
        ("LoRA's scale is lost", "p.adapter.scaling / p.alpha", "1 / p.alpha",
         "packed::packed_equals_the_modules_in_value_and_gradient"),
        ("B's gradient lacks the scale", ".mul_(p.adapter.scaling)", "",
         "packed::packed_equals_the_modules_in_value_and_gradient"),
        ("no gradient through x A^T", "            h.addmm_(dxa, p.A)", "            pass",
         "packed::packed_equals_the_modules_in_value_and_gradient"),
    ],
    "runtime/fused.py": [
        ("a norm's gradient without its mean", " - v * (tl.sum(g * v) / C)", "",
         "packed::packed_equals_the_modules_in_value_and_gradient"),
        ("the gradient turns with the rotation", "g1 * co + g2 * si, g2 * co - g1 * si",
         "g1 * co - g2 * si, g2 * co + g1 * si",
         "packed::packed_equals_the_modules_in_value_and_gradient"),
        ("silu's gradient is a sigmoid's", "sigmoid * (1 + gate - silu)", "sigmoid",
         "packed::packed_equals_the_modules_in_value_and_gradient"),
        ("padding is written to the cache", "place_t >= 0", "place_t >= -1",
         "packed::prefill_fills_the_cache_as_the_modules_do"),
        ("spare ids have probability in the kernel", "mask=v + lane < valid", "mask=v + lane < rows",
         "packed::score_is_one_kernel_for_log_prob_entropy_and_slope"),
    ],
    "runtime/engine.py": [
        ("the same number at every position", "uniform(self.key[:rows], view.length)",
         "uniform(self.key[:rows], 0 * view.length)",
         "sample::what_is_drawn_is_a_function_of_seed_prompt_sample_and_position"),
        ("spare rows of the embedding are drawn", "logits[:, : self.model.valid_vocab]",
         "logits[:]", "sample::logprobs_equal_the_full_forward"),
        ("a long prompt's chunks overwrite each other", "cache.length += part.shape[1]",
         "cache.length += 0", "sample::long_prompts_go_through_in_chunks"),
        ("a row that moves leaves its random numbers behind",
         "for t in (self.token, self.key, self.cache.length):",
         "for t in (self.token, self.cache.length):",
         "sample::refill_and_shrink_keep_every_sample"),
        ("graphs of an adapter's old scaling", "tuple(a and a.scaling for a in adapters)", "()",
         "decode::a_fingerprint_is_of_all_that_a_graph_holds_on_to"),
        ("graphs of weights that were replaced",
         "tuple(t.data_ptr() for t in tensors if t is not None), model", "model",
         "decode::a_fingerprint_is_of_all_that_a_graph_holds_on_to"),
        ("an engine of weights that moved serves", "old_mark == mark", "True",
         "decode::an_engine_is_made_anew_only_where_the_last_one_does_not_serve"),
        ("an engine with fewer rows than asked for is made anew", "max(old.slots, wanted) >= slots",
         "old.slots >= slots", "decode::an_engine_is_made_anew_only_where_the_last_one_does_not_serve"),
        ("top-p sorts in memory that nobody planned", " and (old.top_p < 1 or top_p == 1)):", "):",
         "decode::an_engine_is_made_anew_only_where_the_last_one_does_not_serve"),
        ("an engine serves the last call alone", "max(slots, wanted), max(max_len, old.max_len)",
         "slots, max_len", "decode::an_engine_is_made_anew_only_where_the_last_one_does_not_serve"),
        ("biases are left out while sampling", "self.bias = bias", "self.bias = None",
         "train::sampler_and_trainer_agree_on_every_token"),
        ("the adapter is left out while sampling on the CPU",
         "weight = weight + m.scaling * torch.cat(delta)", "pass",
         "train::sampler_and_trainer_agree_on_every_token"),
        ("the GPU engine leaves the random numbers of a row that moves",
         "for t in (st.token, st.key, st.stop,", "for t in (st.token, st.stop,",
         "decode::a_row_that_moves_takes_everything_along"),
        ("the GPU engine multiplies by the temperature", "1 / temperature if temperature",
         "temperature if temperature",
         "decode::the_engine_takes_temperature_and_stop_tokens_of_each_call"),
    ],
    "runtime/draw.py": [
        ("the temperature multiplies the logits", "logits.float() / temperature",
         "logits.float() * temperature", "sample::logprobs_equal_the_full_forward"),
        ("the id that crosses top-p is left out", "before = p.cumsum(-1) - p",
         "before = p.cumsum(-1)", "sample::top_p_keeps_the_boundary_token"),
        ("log-probs are not tempered", "return ids, logp.gather",
         "return ids, logits.float().log_softmax(-1).gather",
         "sample::logprobs_equal_the_full_forward"),
        ("what top-p cuts off goes to the last id", "u[:, None] * cdf[:, -1:]", "u[:, None]",
         "sample::top_p_keeps_the_boundary_token"),
        ("the position is left out of the hash", "(position + 1) * GOLDEN",
         "(0 * position + 1) * GOLDEN", "sample::uniform_is_a_pure_function_and_never_0_or_1"),
        ("the prompt is left out of the key", "key + prompt * GOLDEN", "key + 0 * prompt",
         "sample::uniform_is_a_pure_function_and_never_0_or_1"),
    ],
    "runtime/tokenizer.py": [
        ("one stop token of several", "return sorted(ids - {None})",
         "return sorted(ids - {None})[:1]", "data::every_way_to_end_a_turn_is_an_eos"),
        ("the prompt does not ask for the format", 'return f"{question}\\n{SUFFIX[style]}"',
         "return question", "data::prompt_is_the_checkpoints_own_template"),
        ("the template has no special tokens", "add_generation_prompt=True, **special)",
         "add_generation_prompt=True)", "data::special_tokens_are_the_templates_own"),
        ("the tokenizer adds special tokens", "encode(text, add_special_tokens=False)",
         "encode(text)", "data::special_tokens_are_the_templates_own"),
        ("config.json's stop token is not one", ', "config.json": model}', "}",
         "data::every_way_to_end_a_turn_is_an_eos"),
        ("a template of its own file is not found", "not template and file.is_file()", "False",
         "data::a_template_may_lie_in_a_file_of_its_own"),
        ("a prompt as long as the limit is skipped", "len(ids) > max_prompt",
         "len(ids) >= max_prompt", "data::long_prompts_are_skipped_and_counted"),
        ("a template has all the time there is", "signal.ITIMER_REAL, SECONDS",
         "signal.ITIMER_REAL, 9", "bad_inputs::a_template_that_never_ends_is_given_up"),
        ("the assistant's turn is not opened", "add_generation_prompt=True",
         "add_generation_prompt=False", "data::prompt_is_the_checkpoints_own_template"),
    ],
    "data.py": [
        ("the format earns nothing", "0.2 * well_formed", "0.0 * well_formed",
         "data::format_and_correctness_add_up"),
        ("the first answer counts", 'text.rfind("<answer>", 0, end)',
         'text.find("<answer>", 0, end)', "data::the_last_answer_counts"),
        ("an answer that is cut off counts", '"<answer>" in text[end:]', "False",
         "data::an_answer_cut_off_is_no_answer"),
        ("test problems are trained on", 'in_test(chain) != (split == "test")', "False",
         "data::arithmetic_train_and_test_are_disjoint"),
        ("the worked solution is the answer", 'answer.rsplit("####", 1)[1]',
         'answer.rsplit("####", 1)[0]', "data::jsonl_columns_of_the_usual_sets"),
        ("long prompts are kept", 'row["question"], style, max_prompt)',
         'row["question"], style, None)', "data::long_prompts_are_skipped_and_counted"),
        ("level 5 is the easiest fifth", "5 - sum(rate > edge", "1 + sum(rate > edge",
         "data::levels_are_quintiles_of_the_solve_rate"),
        ("a reward that overflows is taken", "not abs(r) <= 1e9", 'not abs(r) < float("inf")',
         "data::an_own_reward_that_is_no_finite_number_is_an_error"),
        ("levels that a set has are replaced", 'if "level" not in row:', "if True:",
         "data::levels_are_quintiles_of_the_solve_rate"),
        ("a reward of one's own is always right", 'score.get("correct", r >= 1)',
         'score.get("correct", r >= 0)',
         "data::own_reward_sees_the_whole_row_and_may_return_a_number"),
    ],
    "runtime/grade.py": [
        ("the first box counts", "if at > best[0]:", "if best[1] is None:",
         "data::boxed_braces_balance_and_the_last_box_counts"),
        ("one answer is two of a set", "del left[verdicts.index(True)]", "pass",
         "grade::what_is_another_number_is_wrong"),
        ("expressions that meet at a point are one", "for point in range(3):\n            x, y",
         "for point in range(1):\n            x, y",
         "grade::expressions_that_meet_at_a_point_are_not_the_same"),
        ("what differs for negative letters is wrong", "False if point < 2 else None", "False",
         "grade::expressions_that_meet_at_a_point_are_not_the_same"),
        ("a thousand pi is pi", '(str(scale), "(",', '("1", "(",',
         "grade::roots_logarithms_degrees_and_thousands_have_their_values"),
        ("a percentage is its number", "return x / 100 == y if x_percent else x == y / 100",
         "return x == y", "grade::numbers_are_compared_as_numbers"),
    ],
    "runtime/latex.py": [
        ("every root is a square root", "Fraction(1) / order", "Fraction(1) / 2",
         "grade::roots_logarithms_degrees_and_thousands_have_their_values"),
        ("every logarithm is natural", "/ cmath.log(base), exponent", ", exponent",
         "grade::roots_logarithms_degrees_and_thousands_have_their_values"),
        ("degrees are radians", "complex(math.pi / 180)", "1",
         "grade::roots_logarithms_degrees_and_thousands_have_their_values"),
    ],
    "weights/formats.py": [
        ("ties go to the odd code", "(2.5, 0)", "(2.5, 1)",
         "formats::ties_go_to_the_even_code_and_large_values_saturate"),
        ("block scales leave the top of the grid empty", "(amax / 6 / top)", "(amax / 4 / top)",
         "formats::nvfp4_follows_its_formula_element_by_element"),
        ("the global scale changes when it is stored", "top = 1 / (1 / top)", "top = 1 * top",
         "formats::the_global_scale_survives_its_stored_reciprocal"),
        ("MXFP4's scale is twice as large", "exponent - 3 + 127", "exponent - 2 + 127",
         "formats::mxfp4_scale_is_the_ocp_power_of_two"),
        ("NF4 rounds down", "(table[1:] + table[:-1]) / 2", "table[1:]",
         "formats::nf4_takes_the_nearest_codebook_entry"),
        ("negative weights become positive", ".to(torch.uint8) * 8", ".to(torch.uint8) * 0",
         "formats::nvfp4_follows_its_formula_element_by_element"),
    ],
    "nvfp4.py": [
        ("the bias of a quantized linear is dropped", "self.cpu_weight(x.dtype), self.bias",
         "self.cpu_weight(x.dtype), None", "nvfp4::quantlinear_is_x_times_the_dequantized_weight"),
        ("a copy in the old precision is kept", "self.copy is None or self.copy.dtype != dtype",
         "self.copy is None", "nvfp4::quantlinear_is_x_times_the_dequantized_weight"),
    ],
    "weights/awq.py": [
        ("the norm is not folded", "torch.isfinite(folded), folded, gain)",
         "torch.isfinite(folded), gain, gain)",
         "awq::the_folded_model_is_the_original_before_rounding"),
        ("the bias of v is not divided", "(bias.float() / divide)", "(bias.float() / 1)",
         "awq::the_folded_model_is_the_original_before_rounding"),
        ("the worst block scale wins", "better = e < least", "better = e > least",
         "awq::searched_block_scales_are_valid_and_never_worse_per_block"),
        ("block scales are searched for unscaled activations", "H / s / s[:, None]", "H",
         "awq::block_scales_are_searched_for_the_scaled_activations"),
        ("perplexity counts the tokens it does not score", "len(docs[i]) - 1)", "len(docs[i]))",
         "awq::perplexity_in_padded_batches_is_perplexity_one_by_one"),
    ],
    "weights/checkpoint.py": [
        ("another eps where none is given", '"rms_norm_eps", 1e-6)', '"rms_norm_eps", 1e-5)',
         "model::fields_that_are_left_out_are_what_transformers_takes"),
        ("another theta where none is given", 'raw.get("rope_theta", 10000.0)',
         'raw.get("rope_theta", 1e6)', "model::fields_that_are_left_out_are_what_transformers_takes"),
        ("Qwen3's heads share the hidden size", '128 if raw["model_type"] == "qwen3" else',
         '128 if raw["model_type"] == "" else',
         "model::fields_that_are_left_out_are_what_transformers_takes"),
        ("heads are tied where nobody says so", '"tie_word_embeddings", False)',
         '"tie_word_embeddings", True)',
         "model::fields_that_are_left_out_are_what_transformers_takes"),
        ("all heads share one key", 'raw.get("num_key_value_heads", heads)',
         'raw.get("num_key_value_heads", 1)',
         "model::fields_that_are_left_out_are_what_transformers_takes"),
        ("a plan fetches the weights", "    if weights:\n", "    if True:\n",
         "model::a_hub_id_fetches_only_what_is_read_and_says_when_it_cannot"),
        ("stop tokens stay on the hub", '["generation_config.json", "tokenizer.json"',
         '["tokenizer.json"', "model::a_hub_id_fetches_only_what_is_read_and_says_when_it_cannot"),
        ("the chat template stays on the hub", '"chat_template.jinja", "model*', '"model*',
         "model::a_hub_id_fetches_only_what_is_read_and_says_when_it_cannot"),
        ("stop tokens stay behind", '"generation_config.json", "special_tokens_map.json"',
         '"special_tokens_map.json"', "checkpoint::what_a_tokenizer_reads_comes_along"),
        ("zero points are ignored", ',\n                        ("symmetric", True)):', "):",
         "checkpoint::quantization_that_cannot_be_honoured_is_refused"),
        ("INT4 is read as FP4", '("type", "float"), ', "",
         "checkpoint::quantization_that_cannot_be_honoured_is_refused"),
        ("quantized outputs are ignored", '("input_activations", "output_activations"):',
         '("input_activations",):', "checkpoint::quantization_that_cannot_be_honoured_is_refused"),
        ("scales that overflow are let through", "raw < 253", "raw < 255",
         "checkpoint::scales_that_are_no_scales_are_refused"),
        ("nibbles are swapped on the way in", "[codes & 15, codes >> 4]",
         "[codes >> 4, codes & 15]",
         "checkpoint::a_checkpoint_that_compressed_tensors_made_gives_its_logits"),
        ("nibbles are swapped on the way out", "codes[:, 0::2] | codes[:, 1::2] << 4",
         "codes[:, 1::2] | codes[:, 0::2] << 4", "checkpoint::packing_by_hand"),
        ("the global scale is stored as it is", "1 / q.global_scale[rows][:1]",
         "q.global_scale[rows][:1]",
         "checkpoint::save_then_load_gives_the_same_logits_bit_for_bit"),
        ("tensors that fit nowhere are ignored", "    if unused:", "    if False:",
         "model::a_tensor_that_fits_nowhere_is_an_error"),
        ("a NaN on its way in is let through",
         "if weight and not torch.stack(t.aminmax()).isfinite().all():", "if False:",
         "bad_inputs::what_files_hold_is_checked"),
        ("a shard may lie anywhere", r'[\w.-]+\.safetensors", shard', r'.+", shard',
         "bad_inputs::what_files_hold_is_checked"),
        ("biases are written as zeros", 'yield f"{where}.{name}.bias", b',
         'yield f"{where}.{name}.bias", 0 * b',
         "checkpoint::save_then_load_gives_the_same_logits_bit_for_bit"),
    ],
    "weights/convert.py": [
        ("a merge takes the weights before rounding", "device, dtype, quant):",
         'device, dtype, "none"):',
         "lora::the_merged_checkpoint_computes_what_base_and_adapter_do"),
    ],
    "weights/files.py": [
        ("numbers past all bounds are read", "if value - value != 0:", "if False:",
         "bad_inputs::json_of_any_other_kind_is_named"),
        ("half a character is read", 'if "\\\\u" in text:', "if False:",
         "bad_inputs::json_of_any_other_kind_is_named"),
        ("bounds are for show", "bounds[0] <= found <= bounds[1]", "True",
         "bad_inputs::what_files_hold_is_checked"),
        ("a part is left behind", "            part.unlink(missing_ok=True)", "            pass",
         "kill::a_file_is_whole_or_not_there"),
    ],
    "runtime/command.py": [
        ("a terminal that closes ends what nohup keeps", "is signal.SIG_IGN",
         "is None", "kill::nohup_outlives_its_terminal"),
        ("a closed stdout is an error", "        except OSError:\n            os.dup2",
         "        except KeyError:\n            os.dup2",
         "kill::a_closed_stdout_stops_a_run_where_it_can_go_on"),
    ],
    "weights/memory.py": [
        ("the sort of top-p is planned where there is none", "8 if top_p == 1 else 48",
         "48 if top_p == 1 else 8", "memory::rollouts_plan_float32_logits_and_the_sort_of_top_p"),
        ("the plan forgets one of Adam's moments", "* 4 * 4  #", "* 4 * 3  #",
         "memory::the_table_says_what_fits_a_card_and_how_much_is_left"),
        ("the table forgets the adapter", "sum(peaks[f][:2]))", "sum(peaks[f][:1]))",
         "memory::the_table_says_what_fits_a_card_and_how_much_is_left"),
        ("a card that holds the weights is large enough", "if sum(peaks[f]) <= room else",
         "if peaks[f][0] <= room else",
         "memory::the_table_says_what_fits_a_card_and_how_much_is_left"),
        ("the plan forgets the values", "return 2 * c.num_hidden_layers",
         "return c.num_hidden_layers", "memory::the_plan_of_the_published_shapes"),
    ],
    "runtime/run.py": [
        ("the collector stops steps", "gc.freeze()", "gc.get_freeze_count()", "train::the_collector_passes_over_what_a_run_began_with"),
        ("what a run began with stays", "self.held.callback(gc.unfreeze)", "self.held.callback(gc.get_count)",
         "train::the_collector_passes_over_what_a_run_began_with"),
        ("the optimizer's state is not restored",
         'optimizer.load_state_dict(state.pop("optimizer"))', 'state.pop("optimizer")',
         "train::resume_is_exact"),
        ("the parameters are not restored", "                    p.copy_(saved)",
         "                    p.copy_(p)", "train::resume_is_exact"),
        ("16-bit masters are saved", '"masters": [m.detach().cpu() for m in optimizer.masters]',
         '"masters": [p.detach().cpu() for p in optimizer.params]',
         "train::a_resume_restores_the_float32_masters"),
        ("the best adapter is not remembered", "self.state = State(**state)",
         'self.state = State(**state | {"best": None})',
         "train::an_extended_run_knows_its_best_adapter"),
        ("the first adapter stays on the disk", 'self.save_adapter("adapter", model)',
         '(self.out / "adapter").exists() or self.save_adapter("adapter", model)',
         "train::training_moves_the_adapter_and_leaves_one_untouched_base"),
        ("rows after the checkpoint are kept", '["step"] < self.state.step', '["step"] >= 0',
         "train::resume_is_exact"),
        ("the step that was saved is done again", "s.step, s.cursor, s.seconds = step,",
         "s.step, s.cursor, s.seconds = step - 1,", "train::resume_is_exact"),
        ("the worst adapter is kept as the best", 'found["accuracy"] > s.best["accuracy"]',
         'found["accuracy"] < s.best["accuracy"]',
         "train::held_out_accuracy_by_step_and_the_best_adapter"),
        ("a signal's handler prints", 'os.write(2, b"finishing the update',
         'print("finishing the update',
         "kill::a_ctrl_c_while_a_line_is_written_is_heard"),
        ("an interrupt drops an update that is half done", 'self.current not in ("update", "log")',
         'self.current not in ("log",)',
         "train::a_signal_in_an_update_waits_for_the_step_and_its_row"),
        ("half a step is saved", 'if self.current in ("update", "log"):', "if False:",
         "kill::a_second_ctrl_c_in_an_update_saves_no_half_step"),
        ("checkpoints are never due", "if step % self.args.save_every == 0:", "if False:",
         "train::a_checkpoint_every_so_many_steps"),
        ("broken parameters are saved over good ones", "        if broken:", "        if False:",
         "train::a_broken_parameter_is_not_saved_over_a_good_one"),
        ("a checkpoint with flipped bits is resumed", 'state.pop("digest") != digest_of(state)',
         'not state.pop("digest")', "train::a_damaged_checkpoint_is_one_line_and_never_a_resume"),
        ("an interrupt leaves in an exchange", "(again or ranks.busy)", "again",
         "ranks::a_signal_stops_all_ranks_at_one_point"),
        ("a run goes on with other questions", "self.state.data != data", "False",
         "train::resume_needs_the_questions_it_began_with"),
        ("a policy that only makes NaN is trained on", "self.failed + 1", "0",
         "train::skipped_updates_are_counted_and_ten_in_a_row_end_the_run"),
        ("the logged loss is the sum", 'row["loss"] = mean(m["loss"] for m in each)',
         'row["loss"] = sum(m["loss"] for m in each)',
         "loop::the_logged_loss_is_the_mean_over_the_updates"),
        ("finished is counted as truncated", "mean(not c.finished for c in flat)",
         "mean(c.finished for c in flat)", "loop::a_row_tells_of_all_completions_of_its_step"),
        ("the error is that of one group", "(rewards.std() / len(groups) ** 0.5)",
         "(rewards.std())", "loop::a_row_tells_of_all_completions_of_its_step"),
        ("the entropy has the wrong sign", '"sampler_entropy": -sum(', '"sampler_entropy": sum(',
         "loop::a_row_tells_of_all_completions_of_its_step"),
        ("the deviation of the batch", "spread.std(1).mean()", "spread.std()",
         "loop::a_row_tells_of_all_completions_of_its_step"),
        ("the gap of all updates", 'for k in first if k.startswith', 'for k in () if k.startswith',
         "loop::sampler_and_trainer_are_compared_before_anything_is_learned"),
        ("the first clip's upper side alone", 'first["clip_low_frac"] + first["clip_high_frac"]',
         'first["clip_high_frac"]',
         "loop::sampler_and_trainer_are_compared_before_anything_is_learned"),
        ("the first clip's lower side alone", 'first["clip_low_frac"] + first["clip_high_frac"]',
         'first["clip_low_frac"]',
         "loop::sampler_and_trainer_are_compared_before_anything_is_learned"),
        ("the first clip is of all updates", 'first["clip_low_frac"] + first["clip_high_frac"]',
         'row["clip_low_frac"] + row["clip_high_frac"]',
         "loop::sampler_and_trainer_are_compared_before_anything_is_learned"),
        ("the gap of the last update", "first = each[0]", "first = each[-1]",
         "loop::the_ratio_is_taken_against_what_the_sampler_recorded"),
        ("a group has signal whatever its rewards", "len({c.reward for c in group}) > 1",
         "len({c.reward for c in group}) > 0",
         "loop::dynamic_sampling_replaces_groups_without_variance_and_is_bounded"),
        ("speed of the groups that were kept", "tokens = n_prompts * len(groups[0])",
         "tokens = len(kept) * len(groups[0])", "loop::times_and_speeds_are_those_of_the_step"),
        ("speed of the first update", 'sum(float(sums["tokens"]) for sums, _ in updates)',
         'float(updates[0][0]["tokens"])', "loop::times_and_speeds_are_those_of_the_step"),
        ("seconds pile up from step to step", "run.clock.pop(name, 0.0)",
         "run.clock.get(name, 0.0)", "loop::times_and_speeds_are_those_of_the_step"),
        ("a phase that is entered again counts once",
         "self.clock.get(self.current, 0.0) + now - self.since", "now - self.since",
         "loop::times_and_speeds_are_those_of_the_step"),
        ("seconds begin again at 0", "self.earlier = self.state.seconds", "self.earlier = 0.0",
         "train::seconds_count_on_after_a_resume"),
        ("seconds are not saved", "s.step, s.cursor, s.seconds = step, cursor, self.seconds()",
         "s.step, s.cursor = step, cursor", "train::seconds_count_on_after_a_resume"),
        ("the shortest completion is the longest", '"length_max": max(lengths)',
         '"length_max": min(lengths)', "loop::a_row_tells_of_all_completions_of_its_step"),
        ("groups are counted as updates", '"updates": len(updates), "lr"',
         '"updates": len(kept), "lr"', "loop::a_row_tells_of_all_completions_of_its_step"),
        ("entropy and clip of the first update",
         "grpo.mean_metrics(grpo.sum_metrics([sums for sums, _ in updates]))",
         "grpo.mean_metrics(updates[0][0])", "loop::entropy_and_clip_are_of_all_updates_by_tokens"),
        ("the means hold updates that were skipped",
         "updates = [u for u in updates if math.isfinite(u[1])]", "pass",
         "loop::an_update_that_was_skipped_is_not_in_the_means"),
        ("the error of a held-out accuracy is the accuracy", 'result and result["stderr"]',
         'result and result["accuracy"]', "train::held_out_accuracy_by_step_and_the_best_adapter"),
        ("the error after is that of before", 'after and after["stderr"]',
         'before and before["stderr"]', "train::held_out_accuracy_by_step_and_the_best_adapter"),
        ("evaluated a step too early", "step % a.eval_every == 0",
         "(step + 1) % a.eval_every == 0", "train::an_extended_run_knows_its_best_adapter"),
        ("an adapter that nobody compared is the best", "elif self.args.eval_every and (",
         "elif (",
         "train::a_run_that_was_stopped_in_its_last_evaluation_ends_when_it_is_resumed"),
        ("a run without its last evaluation has ended",
         ' and (self.out / "summary.json").is_file():', ":",
         "train::a_run_that_was_stopped_in_its_last_evaluation_ends_when_it_is_resumed"),
        ("rows of a start that came to nothing are kept",
         "(self.out / name).unlink(missing_ok=True)", "pass",
         "train::a_start_that_came_to_nothing_does_not_block_the_next"),
        ("a run goes on with other answers",
         '{k: v for k, v in r.items() if k != "ids"} for r in rows', 'r["question"] for r in rows',
         "train::resume_needs_the_questions_it_began_with"),
        ("ten skipped updates in a thousand end a run",
         "self.failed = 0 if math.isfinite(norm) else self.failed + 1",
         "self.failed += not math.isfinite(norm)", "train::scattered_skips_do_not_end_a_run"),
        ("the model of the shorter run is in the way", "shutil.rmtree(out, ignore_errors=True)",
         "pass", "train::a_full_parameter_run_leaves_a_checkpoint_that_the_commands_load"),
        ("nothing goes to the tracker", "        if self.tracker:\n", "        if False:\n",
         "train::each_row_goes_to_the_tracker"),
        ("a gap is put down to noise that both have",
         '(row["sigma"] == 0 or args.aqn_scope == "both")', '(row["sigma"] == 0)',
         "train::a_run_that_cannot_learn_is_told_what_to_do"),
    ],
    "runtime/ranks.py": [
        ("gradients are averaged", "q.grad = g.view_as(q)", "q.grad = (g / world).view_as(q)",
         "ranks::two_ranks_compute_the_update_of_one"),
        ("the last bucket is not summed", "< BUCKET and i + 1 < len(params)", "< BUCKET",
         "ranks::two_ranks_compute_the_update_of_one"),
        ("groups in the order of the ranks", "parts[i % world][i // world]",
         "[x for part in parts for x in part][i]", "ranks::two_ranks_compute_the_update_of_one"),
        ("shares of equal numbers, not tokens", "load[least] += size(item)", "load[least] += 1",
         "ranks::shares_are_balanced_by_tokens"),
        ("every rank writes", "if rank == 0 else None", "if True else None",
         "ranks::rank_0_speaks_and_writes"),
        ("every rank speaks", "        if rank == 0:\n            return body()", "        if True:\n            return body()",
         "ranks::rank_0_speaks_and_writes"),
        ("a rank that fails alone is silent", "sys.stdout, sys.stderr = streams", "pass",
         "ranks::a_rank_that_fails_alone_is_heard"),
        ("a rank is stopped and the others are not told", "    if world > 1 and not stopped:",
         "    if False:", "ranks::a_signal_stops_all_ranks_at_one_point"),
        ("a default argument keeps the group", "    from torch.distributed.nn import functional",
         "    pass", "ranks::nothing_keeps_the_group"),
    ],
    "runtime/flags.py": [
        ("the tokenizer's last id is not set", "model.valid_vocab = len(tok)", "len(tok)",
         "loop::flags_reach_the_sampler"),
        ("another learning rate than the paper's", '0, 1, float), 1e-5', '0, 1, float), 1e-4',
         "house::defaults_are_what_the_readme_says"),
        ("another beta2 than the paper's", "0.99, \"AdamW's\"", "0.999, \"AdamW's\"",
         "house::defaults_are_what_the_readme_says"),
        ("another group than the paper's", '"group-size", number(2, 1e4), 8', '"group-size", number(2, 1e4), 16',
         "house::defaults_are_what_the_readme_says"),
        ("another last sigma than the README's", "5e-4, \"sigma of the last", "1e-4, \"sigma of the last",
         "house::defaults_are_what_the_readme_says"),
        ("another pi_old than the README's", '("sampler", "trainer", "current"), "sampler"',
         '("sampler", "trainer", "current"), "current"', "house::defaults_are_what_the_readme_says"),
        ("policy.json is ignored", "args.trained_with.get(dest(f), default)", "default",
         "train::an_adapter_remembers_what_it_was_trained_with"),
        ("an adapter of another base is taken",
         'policy.get("base", base_hash(model)) != base_hash(model)', "False",
         "train::an_adapter_remembers_what_it_was_trained_with"),
        ("--awq is ignored", "    if args.awq:\n", "    if False:\n",
         "awq::the_flag_of_the_commands_loads_with_awq"),
        ("the adapter is not loaded", "lora.load_adapter(model, args.adapter)",
         "lora.lora_layers(model)", "eval::the_adapter_is_applied_and_the_base_is_the_base"),
        ("a greedy evaluation draws", "0.0 if args.greedy else args.temperature",
         "args.temperature", "eval::flags_reach_the_evaluation"),
        ("one sample a question, whatever the protocol", "(1 if args.greedy else 4)", "1",
         "eval::flags_reach_the_evaluation"),
        ("another temperature of evaluations than the paper's",
         'Flag("temperature", number(0, 100, float), 0.6', 'Flag("temperature", number(0, 100, float), 1.0',
         "eval::flags_reach_the_evaluation"),
        ("another nucleus of evaluations than the paper's", '1.000001, float), 0.95, "draw',
         '1.000001, float), 1.0, "draw', "eval::flags_reach_the_evaluation"),
        ("every base has one hash", "some.numpy().tobytes()", 'b""',
         "train::bases_are_told_apart_whatever_their_format"),
        ("levels are lost in a resume", 'if name == "levels" and isinstance(value, list)', "if False",
         "train::a_resume_reads_every_flag_as_it_was_written"),
        ("what was switched off comes back in a resume", "{'' if text else 'no-'}{name}", "{name}",
         "train::a_resume_reads_every_flag_as_it_was_written"),
        ("a KL to the trained model itself", "args.lora_rank == 0 and args.beta:", "False:",
         "train::bad_input_is_one_line_naming_the_flag_and_writes_nothing"),
        ("a style that cannot be graded is trained on", 'if args.prompt_style == "plain":', "if False:",
         "train::bad_input_is_one_line_naming_the_flag_and_writes_nothing"),
        ("the format is not passed", "checkpoint.load(folder, device, dtype, args.quant)",
         'checkpoint.load(folder, device, dtype, "none")',
         "loop::the_rollout_runs_on_the_quantized_base"),
    ],
    "plot.py": [
        ("the last accuracy has no error", '"eval_stderr": summary.get("stderr_after")',
         '"eval_stderr": None', "plot::held_out_accuracy_is_drawn_where_it_was_measured"),
        ("the last accuracy was at no time", '"seconds": summary.get("seconds")', '"seconds": None',
         "plot::held_out_accuracy_is_drawn_where_it_was_measured"),
    ],
    "experiments.py": [
        ("two copies are one", 'name == "copies" and arm != "one"', "False",
         "experiments::two_copies_are_made_for_their_own_arms"),
        ("one copy is two", 'name == "copies" and arm != "one"', 'name == "copies"',
         "experiments::two_copies_are_made_for_their_own_arms"),
        ("an adapter's scaling falls with its rank", '"--lora-alpha", str(r)', '"--lora-alpha", "32"',
         "experiments::each_arm_is_what_its_name_says"),
        ("a run that was stopped is passed over", "            if code:\n                return code\n    print",
         "            pass\n    print",
         "experiments::a_run_that_fails_or_is_stopped_ends_the_experiment"),
        ("the gradient is of the noisy model", "        aqn.set_noise(model, 0.0)\n", "        pass\n",
         "experiments::the_gradient_is_of_the_clean_model_on_noisy_samples"),
        ("a gradient is compared with itself", "drawn(model, tok, rows, args, 2)",
         "drawn(model, tok, rows, args, 1)",
         "experiments::the_gradient_is_of_the_clean_model_on_noisy_samples"),
    ],
    "eval.py": [
        ("the noise stays on in the evaluation", "with aqn.clean(model):", "with torch.no_grad():",
         "eval::noise_never_reaches_an_evaluation"),
        ("the base is evaluated with its adapter",
         "with lora.disabled(model):\n            results",
         "with torch.no_grad():\n            results",
         "eval::the_adapter_is_applied_and_the_base_is_the_base"),
        ("the error is over samples", '"stderr": stderr(accuracies)',
         '"stderr": stderr([s["correct"] for s in flat])', "eval::what_is_counted"),
        ("top-p is dropped", "temperature, top_p,\n", "temperature, 1.0,\n",
         "eval::arguments_reach_the_sampler"),
        ("the seed is dropped", "seed, max_rows, progress, indices",
         "0, max_rows, progress, indices", "eval::arguments_reach_the_sampler"),
        ("pass@k counts with replacement", "math.comb(n - sum(correct), k) / math.comb(n, k)",
         "((n - sum(correct)) / n) ** k",
         "benchmarks::pass_at_k_is_unbiased_and_not_the_share_of_questions_with_a_right_sample"),
        ("a majority counts spellings", "v == given or (v, given) in same", "v == given",
         "benchmarks::a_majority_counts_answers_not_spellings"),
        ("each part of a set draws the first part's samples", "progress, indices=mine)",
         "progress)",
         "benchmarks::an_evaluation_goes_on_where_it_was_stopped_and_ends_the_same",
         "ranks::an_evaluation_is_dealt_out_and_the_same"),
        ("rows of another evaluation are kept", 'row["run"] != self.runs.get(key)', "False",
         "benchmarks::results_of_another_evaluation_are_not_taken_for_this_one"),
        ("the gain is the other way round", 'b["accuracy"] - a["accuracy"]',
         'a["accuracy"] - b["accuracy"]', "eval::what_is_counted"),
        ("the base's gain over the adapter", "gain(results[-2][2], results[-1][2])",
         "gain(results[-1][2], results[-2][2])", "eval::flags_reach_the_evaluation"),
        ("one temperature for all", "args.n, args.temperature,\n", "args.n, 0.6,\n",
         "eval::flags_reach_the_evaluation"),
        ("one nucleus for all", "args.top_p, args.max_new_tokens", "0.95, args.max_new_tokens",
         "eval::flags_reach_the_evaluation"),
        ("one seed for all", "args.seed, score, sys.stderr", "0, score, sys.stderr",
         "eval::flags_reach_the_evaluation"),
        ("prompts of one style", "tok, rows, args.prompt_style, args.n", 'tok, rows, "tags", args.n',
         "eval::flags_reach_the_evaluation"),
        ("the test split whatever was asked for", "data.load(file, args.split,",
         'data.load(file, "test",', "eval::flags_reach_the_evaluation"),
        ("rows of another adapter are kept", "digest.update(file.read_bytes())", "pass",
         "eval::rows_of_an_adapter_or_answers_that_have_changed_are_refused"),
        ("rows of the shorter run are kept", "if self.path and args.run and not args.adapter:",
         "if False:", "eval::rows_of_a_run_that_went_on_are_refused"),
        ("rows graded by other answers are kept", '[row["question"], row["answer"]]',
         '[row["question"]]', "eval::rows_of_an_adapter_or_answers_that_have_changed_are_refused"),
        ("the shortest prompt sets the limit", "longest = max(len(", "longest = min(len(",
         "eval::the_limit_is_what_the_longest_prompt_leaves"),
        ("graded in one style", "score or data.scorer(style)", "score or data.scorer()",
         "eval::answers_are_graded_in_the_style_they_were_asked_in"),
    ],
}


@dataclass
class Mutant:
    file: str
    name: str
    old: str
    new: str
    tests: list  # node ids

    def problem(self):
        """Why it cannot be applied, or None."""
        found = (ROOT / self.file).read_text().count(self.old)
        return None if found == 1 else f"its text is in {self.file} {found} times: {self.old!r}"

    def apply(self, folder):
        path = folder / self.file
        text = path.read_text().replace(self.old, self.new)
        path.unlink()  # a hard link to the clean copy
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()


def mutants():
    def node(test):
        file, name = test.split("::")
        return f"tests/test_{file}.py::test_{name}"

    return [Mutant(file, name, old, new, [node(t) for t in tests])
            for file, rows in MUTANTS.items() for name, old, new, *tests in rows]


# ---- running tests in forked children


class Failures:
    """A pytest plugin: [(when, node id)] of what fails."""

    def __init__(self):
        self.seen = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.seen.append((report.when, report.nodeid))


def child(clean, folder, mutant, tests):
    """In a forked process: run `tests` in a copy with `mutant` applied; None: in the clean one."""
    import pytest

    output = os.open(f"{folder}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    gc.freeze()  # what was imported before the fork is not gone through again
    if mutant:
        signal.alarm(LIMIT)
        shutil.copytree(clean, folder, copy_function=os.link)
        mutant.apply(folder)
    os.chdir(folder if mutant else clean)
    failures = Failures()
    code = pytest.main(["-o", "addopts=-q", "-m", "not gpu", "-p", "no:cacheprovider",
                        *(["-x"] if mutant else []), f"--basetemp={folder}.tmp", *tests],
                       plugins=[failures])
    lines = [str(int(code)), *("\t".join(seen) for seen in failures.seen)]
    Path(f"{folder}.result").write_text("\n".join(lines))


def run(clean, jobs, workers=2):
    """jobs: [(mutant or None, tests)], `workers` at a time; yields (mutant, tests, seconds of CPU
    time, exit code of pytest or None, [(when, node id) that failed], output) as they end."""
    jobs, running = list(enumerate(jobs)), {}
    while jobs or running:
        while jobs and len(running) < workers:
            i, (mutant, tests) = jobs.pop(0)
            folder = clean.with_name(f"{'tests' if mutant is None else 'mutant'}{i}")
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    child(clean, folder, mutant, tests)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            running[pid] = mutant, tests, folder
        pid, _, used = os.wait4(-1, 0)
        mutant, tests, folder = running.pop(pid)
        result = Path(f"{folder}.result")
        code, *failed = result.read_text().splitlines() if result.exists() else [None]
        output = Path(f"{folder}.log").read_text(errors="replace")
        yield (mutant, tests, used.ru_utime + used.ru_stime, code and int(code),
               [tuple(line.split("\t")) for line in failed], output)
        for leftover in (folder, Path(f"{folder}.tmp")):
            shutil.rmtree(leftover, ignore_errors=True)


def unmutated(clean, chosen):
    """Run the named tests as they are, file by file; returns how many files have one that fails."""
    files, bad = {}, 0
    for node in {node: None for mutant in chosen for node in mutant.tests}:
        files.setdefault(node.split("::")[0], []).append(node)
    for _, tests, _, code, failed, output in run(clean, [(None, t) for t in files.values()]):
        if code != 0:
            bad += 1
            what = ", ".join(node for _, node in failed) or tests[0].split("::")[0]
            print(f"error: fails without any mutation: {what}\n{output[-2000:]}")
    return bad


def verdict(code, failed):
    """(killed, what to print)."""
    if failed and failed[0][0] == "call":
        return True, failed[0][1].removeprefix("tests/")
    if code is None:
        return False, f"DID NOT END in {LIMIT} s, or crashed"
    if code == 0:
        return False, "SURVIVES"
    where = " of ".join(failed[0]) if failed else "no test ran"
    return False, f"BREAKS more than the test: {where}"


def chosen_by(args, every):
    if args.third:
        part = date.today().timetuple().tm_yday % 3
        print(f"third {part + 1} of 3")
        return every[part::3]
    return [m for m in every
            if not args.names or any(name in f"{m.file}: {m.name}" for name in args.names)]


def main():
    parser = argparse.ArgumentParser(description="Mutations of the sources that tests must notice.")
    parser.add_argument("names", nargs="*", help="parts of names or files (default: all)")
    parser.add_argument("--third", action="store_true", help="a third of them, chosen by the date")
    args = parser.parse_args()
    every = mutants()
    problems = [f"error: {m.name}: {problem}" for m in every if (problem := m.problem())]
    chosen, begin = chosen_by(args, every), time.time()
    if not chosen:
        problems.append(f"error: no mutant is called {' or '.join(args.names)}")
    if problems:
        print("\n".join(problems))
        return 1

    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg",
                   "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they cost each child seconds
    sys.path.remove(str(Path(__file__).parent))
    import torch
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py has it
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as temporary:
        clean = Path(temporary, "clean")
        shutil.copytree(ROOT, clean, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        if unmutated(clean, chosen):
            return 1
        width, alive = max(len(f"{m.file}: {m.name}") for m in chosen), 0
        print(f"{'mutant':<{width}}{'CPU s':>8}  killed by")
        for m, _, seconds, code, failed, output in run(clean, [(m, m.tests) for m in chosen]):
            killed, text = verdict(code, failed)
            alive += not killed
            print(f"{f'{m.file}: {m.name}':<{width}}{seconds:>8.1f}  {text}", flush=True)
            if code not in (0, 1):
                print(output[-1500:])
    print(f"{len(chosen)} mutants, {alive} alive, {time.time() - begin:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
