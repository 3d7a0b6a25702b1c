"""
Talk to a model: a chat, one prompt, or a file of prompts. `python sample.py` starts this file.

    python sample.py --prompt "What is 3 + 4 * 5?"
    python sample.py --model Qwen/Qwen2.5-0.5B-Instruct --file prompts.txt --out out.jsonl --n 4
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plumbing import flags, ranks
from plumbing.command import number
from plumbing.files import check_out, lines, read_jsonl, write_jsonl
from plumbing.flags import Flag
from plumbing.tokenizer import styled

import sample

FLAGS = (
    *sample.MODEL_FLAGS,
    *flags.ADAPTER_FLAGS,
    "chat",
    *flags.PROMPT_FLAGS,
    Flag("prompt", str, None, "answer this and exit; without it and without --file: a chat"),
    Flag("file", str, None, 'prompts, one a line, or .jsonl with "prompt" or "question"'),
    Flag("out", str, None, "where --file's answers go, .jsonl"),
    Flag("n", number(1, 1e4), 1, "answers a prompt, with --file"),
    *flags.SAMPLING_FLAGS,
    *flags.ENGINE_FLAGS,
)


def check(args):
    """ValueError for flags that contradict each other."""
    if ranks.world > 1:
        raise ValueError("sample.py is one process; start it with python, not torchrun")
    if (args.file is None) != (args.out is None):
        raise ValueError("--file and --out go together")
    if args.file and args.prompt is not None:
        raise ValueError("--prompt and --file exclude each other")
    if args.n > 1 and not args.file:
        raise ValueError(f"--n {args.n}: goes with --file; a chat and --prompt have one answer")
    flags.check_copies("n", args.n, args.temperature, "--temperature 0")
    if args.out:
        check_out(args.out)
        if Path(args.out).resolve() == Path(args.file).resolve():
            raise ValueError(f"--out {args.out}: is --file itself; choose another name")


COMMAND = flags.Command("sample", "Sample from a model: chat, one prompt, or a file of prompts.",
                        FLAGS, check)


def read_prompts(path):
    """Prompts of a file: one a line, or .jsonl rows with "prompt" (or "question")."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--file {path}: no such file")
    if path.suffix.lower() == ".jsonl":
        prompts = []
        for where, row in read_jsonl(path, {"prompt": str, "question": str}):
            given = (row.get(column) or "" for column in ("prompt", "question"))
            prompts.append(next((text for text in given if text.strip()), ""))
            if not prompts[-1]:
                raise ValueError(f'--file {where}: needs "prompt" or "question"')
    else:
        prompts = [text for _, text in lines(path)]
    if not prompts:
        raise ValueError(f"--file {path}: no prompts in it, one line of text each is expected")
    return prompts


def turns(args, *texts):
    """Messages of a conversation, user and assistant in turn; questions in --prompt-style."""
    messages = []
    for i, text in enumerate(texts):
        user = i % 2 == 0
        content = styled(text, args.prompt_style) if user else text
        messages.append({"role": "user" if user else "assistant", "content": content})
    return messages


def answer(model, tok, args, texts):
    """The next turn of a conversation, printed piece by piece as its tokens arrive; returns its
    text."""
    ids, shown = [], ""

    def show(_prompt, _sample, token):
        nonlocal shown
        ids.append(token)
        text = tok.decode(ids)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            print(text[len(shown) :], end="", flush=True)
            shown = text

    prompt = tok.chat_ids(turns(args, *texts))
    most = sample.limit(model, prompt, args.max_new_tokens)
    [[drawn]] = sample.generate(model, [prompt], 1, most, args.temperature,
                                args.top_p, tok.eos_ids, args.seed, on_token=show)
    full = len(prompt) + most == model.config.max_position_embeddings
    cut = "the model has no more positions" if full else "raise --max-new-tokens"
    text = tok.decode(drawn.ids)
    print(text[len(shown) :] + ("" if drawn.finished else f" [cut: {cut}]"))
    return text


def chat(model, tok, args):
    """A conversation in the terminal until /quit, end of input (ctrl-D) or ctrl-C."""
    print("A line that ends in \\ goes on. /clear starts over, /quit ends.", file=sys.stderr)
    texts = []
    while True:
        try:
            text = input("User: ")
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{input('... ')}"
            if text.strip() == "/quit":
                return
            if text.strip() == "/clear":
                texts = []
            elif text.strip():
                print("Assistant: ", end="", flush=True)
                texts += [text, answer(model, tok, args, [*texts, text])]
        except ValueError as e:  # past the model's positions
            print(f"[{e}; /clear starts over]")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def batch(model, tok, args, prompts):
    """--file -> --out: one JSON row a sample, in order, written whole at the end."""
    ids = [tok.prompt_ids(text, args.prompt_style) for text in prompts]
    limits = [sample.limit(model, p, args.max_new_tokens) for p in ids]
    groups = sample.generate(model, ids, args.n, limits, args.temperature, args.top_p, tok.eos_ids,
                             args.seed, args.max_rows, progress=sys.stderr.isatty())
    rows = [{"prompt": text, "sample": j, "text": tok.decode(s.ids), "tokens": len(s.ids),
             "finished": s.finished, "logprob": sum(s.logprobs)}
            for text, group in zip(prompts, groups, strict=True) for j, s in enumerate(group)]
    write_jsonl(args.out, rows, ensure_ascii=False)
    print(f"{args.out}: {len(rows)} rows, {sum(row['tokens'] for row in rows)} tokens")


def run(args, argv):
    prompts = read_prompts(args.file) if args.file else None
    model, tok = sample.load_policy(args)
    sample.set_engine(model, args.engine)
    if prompts:
        batch(model, tok, args, prompts)
    elif args.prompt is not None:
        answer(model, tok, args, [args.prompt])
    else:
        chat(model, tok, args)


def main(argv=None):
    return flags.run_command(COMMAND, run, argv)


if __name__ == "__main__":
    sys.exit(main())
