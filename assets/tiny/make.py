"""
Trains the embedded model from scratch: a Qwen2.5-shaped transformer of 0.9 million parameters that
does arithmetic in words and symbols, and is half-trained on purpose.

Reinforcement learning needs a model that can do the task but often does not. So after a first part
on clean worked solutions, the demonstrations have habits: most work a problem out line by line, but
in about half of the places where there is something to carry they forget it; some take two
operations in one line, which is shorter and mostly wrong; some guess, or leave the tags out. The
model learns to imitate all of them, and each right way of working stays in it without being the
rule. Left out on purpose: any reward, and any preference among the demonstrations.

The model beside this file began with the same initial weights, to the bit; that its 2,400 steps
repeat to the bit as well has not been tried.

    python assets/tiny/make.py --out /tmp/tiny
    python eval.py --model /tmp/tiny --data arithmetic
"""
import argparse
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
from plumbing.arithmetic import apply, problems, solution, steps  # noqa: E402
from plumbing.files import write_json  # noqa: E402
from plumbing.tokenizer import SUFFIX, Tokenizer  # noqa: E402

from model import Transformer, read_config, tensors  # noqa: E402

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "use_sliding_window": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "vocab_size": 512,
}
# Qwen2.5's own split: one digit a token, a space goes with the word after it.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# How often a problem is guessed instead of worked out, how often a line takes two operations at
# once, and how often a carry is forgotten.
GUESS = {"symbols": 0.05, "steps": 0.1, "mixed": 0.1, "story": 0.15}
JUMP = 0.06
FORGET = {"+": 0.5, "-": 0.6, "*": 0.65}


def demonstration(rng, row):
    """The assistant's turn for an arithmetic row, in some of its habits."""
    if rng.random() < GUESS[row["form"]]:
        guess = max(0, int(row["answer"]) + rng.choice([-10, -2, -1, 0, 0, 0, 1, 2, 10]))
        return rng.choice((f"<think></think><answer>{guess}</answer>", f"The answer is {guess}."))
    lines, todo = [], steps(row["chain"])
    value = todo[0][0]
    while todo:
        count = 2 if rng.random() < JUMP else 1
        line = str(value)
        for _, op, k, _ in todo[:count]:
            carried = apply(value % 10, op, k % 10) // 10 if rng.random() < FORGET[op] else 0
            value = max(0, apply(value, op, k) - 10 * carried)
            line += f"{op}{k}"
        lines.append(f"{line}={value}")
        todo = todo[count:]
    return "<think>" + "\n".join(lines) + f"</think><answer>{value}</answer>"


def write_tokenizer(out, seed):
    """A byte-level BPE with Qwen's split, its special tokens after the ordinary ones as in Qwen,
    and its chat template."""
    corpus = ["user\n", "assistant\n", "system\n", *("\n" + s for s in SUFFIX.values())] * 20
    for row in problems("train", 3000, seed):
        corpus += [f"{row['question']}\n", solution(row), f"The answer is {row['answer']}."]
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
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "unk_token": None, "add_prefix_space": False,
        "add_bos_token": False, "model_max_length": 512,
        "additional_special_tokens": SPECIAL[1:], "chat_template": TEMPLATE})
    write_json(out / "generation_config.json",
               {"bos_token_id": end, "pad_token_id": end, "eos_token_id": [stop, end]})
    write_json(out / "config.json", {**CONFIG, "bos_token_id": end, "eos_token_id": stop})
    return Tokenizer(out)


def batches(tok, seed, rows, size, write):
    """Endless (ids (B, T), targets (B, T)) of what `write(rng, row)` says; targets are -100 where
    nothing is learned: prompt, padding."""
    rng = random.Random(seed)
    while True:
        # Neighbours of like length share a batch: 16 batches are drawn at once and sorted.
        drawn = []
        for row in rng.sample(rows, 16 * size):
            answer = tok.encode(write(rng, row)) + tok.eos_ids[-1:]
            drawn.append((tok.prompt_ids(row["question"]), answer))
        drawn.sort(key=lambda pa: len(pa[0]) + len(pa[1]))
        groups = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        rng.shuffle(groups)
        for group in groups:
            T = max(len(p) + len(a) for p, a in group)
            ids = torch.zeros(size, T, dtype=torch.long)
            targets = torch.full((size, T), -100)
            for b, (p, a) in enumerate(group):
                ids[b, : len(p) + len(a)] = torch.tensor(p + a)
                targets[b, len(p) - 1 : len(p) + len(a) - 1] = torch.tensor(a)
            yield ids, targets


def save(model, out):
    """bf16 safetensors under the names of a Hugging Face checkpoint."""
    saved = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in tensors(model)}
    save_file(saved, out / "model.safetensors", metadata={"format": "pt"})


def train(model, args, clean, habits, out):
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params if p.dim() > 1]},
         {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}],
        betas=(0.9, 0.95), weight_decay=0.05)
    start, losses, warm = time.time(), [], max(1, args.clean // 10)
    for step in range(args.clean + args.habits):
        # the rate falls to a half on clean solutions, then from a quarter to 0 on the habits
        left = args.clean + args.habits - step
        rate = min((step + 1) / warm, (2 * args.clean - step) / (2 * args.clean - warm))
        if left <= args.habits:
            rate = max(0.02, left / args.habits) / 4
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        ids, targets = next(habits if left <= args.habits else clean)
        hidden = model.hidden(ids)[targets >= 0]  # (S, C): only where there is something to learn
        loss = F.cross_entropy(model.lm_head(hidden), targets[targets >= 0])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1} loss {sum(losses[-100:]) / 100:.4f} "
                  f"{time.time() - start:.0f} s", flush=True)
    save(model, out)


def main():
    parser = argparse.ArgumentParser(description="Train the embedded model from scratch.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", required=True, help="folder to write the checkpoint to")
    add("--clean", type=int, default=2000, help="optimizer steps on clean solutions")
    add("--habits", type=int, default=400, help="optimizer steps on habits after them")
    add("--batch", type=int, default=32, help="demonstrations a step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--rows", type=int, default=60000, help="different problems")
    add("--seed", type=int, default=0, help="of problems, habits and initial weights")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    tok = write_tokenizer(out, args.seed)
    torch.manual_seed(args.seed)
    torch.randn(CONFIG["vocab_size"], CONFIG["hidden_size"])  # what nn.Embedding once drew in vain
    model = Transformer(read_config(out))
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.02)
    print(f"{len(tok)} token ids, {sum(p.numel() for p in model.parameters()):,} parameters")
    rows = problems("train", args.rows, args.seed)
    clean = batches(tok, args.seed, rows, args.batch, lambda rng, row: solution(row))
    habits = batches(tok, args.seed + 1, rows, args.batch, demonstration)
    train(model, args, clean, habits, out)


if __name__ == "__main__":
    main()
