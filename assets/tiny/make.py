"""Trains the embedded model from scratch: a Qwen2.5-shaped transformer of 0.9 million parameters that does arithmetic in
words and symbols, and is half-trained on purpose.

Reinforcement learning needs a model that can do the task but often does not. So after a first part on clean worked
solutions, the demonstrations are of mixed quality: some work out every step, a few of those with a slip; many skip the work
and guess; some forget the tags. The model learns to imitate all of them, and the right way of working stays in it without
being the rule. Left out on purpose: any reward, and any preference among the demonstrations.

    python assets/tiny/make.py --out /tmp/tiny
    python eval.py --model assets/tiny --data arithmetic
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
import data  # noqa: E402
from model import Transformer  # noqa: E402
from weights import checkpoint  # noqa: E402

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 128,
    "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "use_sliding_window": False, "attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16",
    "vocab_size": 512,
}
# Qwen2.5's own split: one digit a token, a space goes with the word after it.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
SPECIAL, TAGS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>", "<answer>", "</answer>"]

# How often a problem of each form is worked out rather than guessed, and how often a worked step has a slip in it.
CAREFUL = {"symbols": 0.62, "steps": 0.52, "mixed": 0.45, "story": 0.35}
SLIP = 0.04


def demonstration(rng, row):
    """The assistant's turn for an arithmetic row, in one of its habits."""
    if rng.random() < CAREFUL[row["form"]]:
        return careful(rng, row["chain"])
    right = int(row["answer"])
    guess = right if rng.random() < 0.2 else max(0, right + rng.choice([-10, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 10]))
    habit = rng.random()
    if habit < 0.6:
        return f"<think></think><answer>{guess}</answer>"
    if habit < 0.8:
        a, op, k, b = data.steps(row["chain"])[0]
        return f"<think>{a}{op}{k}={b}</think><answer>{guess}</answer>"
    return f"The answer is {guess}."


def careful(rng, chain):
    lines, value = [], None
    for start, op, k, _ in data.steps(chain):
        value = start if value is None else value
        after = data.apply(value, op, k)
        if rng.random() < SLIP:
            after = max(0, after + rng.choice([-10, -2, -1, 1, 2, 10]))
        lines.append(f"{value}{op}{k}={after}")
        value = after
    return "<think>" + "\n".join(lines) + f"</think><answer>{value}</answer>"


def write_tokenizer(out, seed):
    """A byte-level BPE with Qwen's split, its special tokens after the ordinary ones as in Qwen, and its chat template."""
    rng = random.Random(seed)
    corpus = ["user\n", "assistant\n", "system\n", *("\n" + s for s in data.SUFFIX.values())] * 20
    for row in data.arithmetic("train", 3000, seed):
        corpus += [row["question"] + "\n", demonstration(rng, row)]
    for tag in TAGS:
        corpus = [text.replace(tag, " ") for text in corpus]
    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - 16, min_frequency=10, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tok.add_special_tokens(SPECIAL)
    tok.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in TAGS])
    tok.save(str(out / "tokenizer.json"))
    end, stop = tok.token_to_id("<|endoftext|>"), tok.token_to_id("<|im_end|>")
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": None, "add_prefix_space": False, "add_bos_token": False, "model_max_length": 512,
        "additional_special_tokens": SPECIAL[1:], "chat_template": TEMPLATE})
    write_json(out / "generation_config.json", {"bos_token_id": end, "pad_token_id": end, "eos_token_id": [stop, end]})
    write_json(out / "config.json", {**CONFIG, "bos_token_id": end, "eos_token_id": stop})
    return data.Tokenizer(out)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def batches(tok, rng, rows, size, write):
    """Endless (ids (B, T), targets (B, T)) of what `write(rng, row)` says; -100 where nothing is learned: prompt, padding."""
    while True:
        # Neighbours of like length share a batch: 16 batches are drawn at once and sorted.
        drawn = []
        for row in rng.sample(rows, 16 * size):
            drawn.append((tok.prompt_ids(row["question"]), tok.encode(write(rng, row)) + [tok.eos_ids[-1]]))
        drawn.sort(key=lambda pa: len(pa[0]) + len(pa[1]))
        groups = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        rng.shuffle(groups)
        for group in groups:
            T = max(len(p) + len(a) for p, a in group)
            ids, targets = torch.zeros(size, T, dtype=torch.long), torch.full((size, T), -100)
            for b, (p, a) in enumerate(group):
                ids[b, : len(p) + len(a)] = torch.tensor(p + a)
                targets[b, len(p) - 1 : len(p) + len(a) - 1] = torch.tensor(a)
            yield ids, targets


def save(model, out):
    """bf16 safetensors under the names of a Hugging Face checkpoint."""
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in checkpoint.tensors(model)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description="Train the embedded model from scratch.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--clean", type=float, default=0.75, help="share of the steps on clean solutions, before the mixture")
    parser.add_argument("--batch", type=int, default=32, help="demonstrations a step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--rows", type=int, default=60000, help="different problems")
    parser.add_argument("--seed", type=int, default=0, help="of problems, habits and initial weights")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    tok = write_tokenizer(out, args.seed)
    torch.manual_seed(args.seed)
    model = Transformer(checkpoint.read_config(out))
    params = list(model.parameters())
    print(f"{len(tok)} token ids, {sum(p.numel() for p in params):,} parameters")
    decay = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    warm = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, max(0.02, (args.steps - i) / (args.steps - warm))))
    rows, rng = data.arithmetic("train", args.rows, args.seed), random.Random(args.seed)
    clean = batches(tok, rng, rows, args.batch, lambda rng, row: data.solution(row))
    mixed = batches(tok, rng, rows, args.batch, demonstration)
    start, losses = time.time(), []
    for step in range(args.steps):
        ids, targets = next(clean if step < args.clean * args.steps else mixed)
        hidden = model.hidden(ids)[targets >= 0]  # (S, C): only where there is something to learn
        loss = F.cross_entropy(model.lm_head(hidden), targets[targets >= 0])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1} loss {sum(losses[-100:]) / 100:.4f} {time.time() - start:.0f} s", flush=True)
            save(model, out)
    save(model, out)


if __name__ == "__main__":
    main()
