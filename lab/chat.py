"""
Talk to a model: a chat, or one prompt. `python sample.py` starts this file. eval.py answers files.

    python sample.py --model Qwen/Qwen2.5-0.5B-Instruct
    python sample.py --prompt "What is 3 + 4 * 5?"
"""
import sys
from dataclasses import replace

from plumbing import flags
from plumbing.flags import Flag
from plumbing.tokenizer import styled

import sample

FLAGS = (
    *sample.MODEL_FLAGS,
    *flags.ADAPTER_FLAGS,
    "chat",
    # a chat with a base model asks for nothing in particular
    replace(flags.PROMPT_STYLE, default="plain"),
    Flag("prompt", str, None, "answer this and exit; without it: a chat"),
    *flags.SAMPLING_FLAGS,
    *flags.ENGINE_FLAGS,
)

COMMAND = flags.Command("sample", "Sample from a model: a chat, or one prompt.", FLAGS)


def turns(args, *texts):
    """Messages of a conversation, user and assistant in turn; questions in --prompt-style."""
    return [{"role": "assistant", "content": text} if i % 2 else
            {"role": "user", "content": styled(text, args.prompt_style)}
            for i, text in enumerate(texts)]


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
    [[drawn]] = sample.generate(model, [prompt], 1, args.max_new_tokens, args.temperature,
                                args.top_p, tok.eos_ids, args.seed, on_token=show)
    text = tok.decode(drawn.ids)
    print(text[len(shown) :] + ("" if drawn.finished else f" [cut after {len(drawn.ids)} tokens]"))
    return text


def chat(model, tok, args):
    """A conversation in the terminal until /quit, end of input (ctrl-D) or ctrl-C."""
    print("/clear starts over, /quit ends.", file=sys.stderr)
    texts = []
    while True:
        try:
            text = input("User: ")
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


def run(args, argv):
    model, tok = sample.load_policy(args)
    sample.set_engine(model, args.engine)
    if args.prompt is not None:
        answer(model, tok, args, [args.prompt])
    else:
        chat(model, tok, args)


def main(argv=None):
    return flags.run_command(COMMAND, run, argv)


if __name__ == "__main__":
    sys.exit(main())
