"""lab/chat.py: a chat, or one prompt."""
import inspect

from plumbing import flags
from plumbing.files import TINY
from plumbing.tokenizer import SUFFIX, Tokenizer

import pytest
import torch

import model as M
import sample
from lab import chat


def test_a_conversation_is_what_was_said_in_turn():
    """The model's own answers as the user's, or questions without what the style asks for."""
    args = flags.parse(chat.COMMAND, ["--prompt-style", "tags"])
    roles = [(m["role"], m["content"]) for m in chat.turns(args, "1+1?", "2", "2+2?")]
    ask = SUFFIX["tags"]
    assert roles == [("user", f"1+1?\n{ask}"), ("assistant", "2"), ("user", f"2+2?\n{ask}")]
    assert chat.turns(flags.parse(chat.COMMAND, []), "1+1?") == [{"role": "user", "content": "1+1?"}]


def test_a_chat_remembers_until_it_is_cleared(monkeypatch):
    said, asked = iter(["a", "b", " ", "/clear", "d", "/quit"]), []
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.setattr(chat, "answer", lambda model, tok, args, texts: asked.append(texts) or f"to {texts[-1]}")
    chat.chat(None, None, None)
    assert asked == [["a"], ["a", "to a", "b"], ["d"]]


def test_a_chat_outlives_a_question_that_does_not_fit(monkeypatch, capsys):
    """A conversation past the model's positions ended the program, and was lost."""
    args, said = flags.parse(chat.COMMAND, ["--max-new-tokens", "4"]), iter(["x" * 9999, "hi", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    chat.chat(M.load(TINY, "cpu", torch.float32), Tokenizer(TINY), args)
    out = capsys.readouterr().out
    assert out.count("; /clear starts over]") == 1 and out.count("Assistant: ") == 2


@pytest.mark.parametrize("last", ["", "\ufffd"])
@pytest.mark.parametrize("finished", [True, False])
def test_an_answer_is_drawn_as_the_flags_say_and_told_as_it_comes(monkeypatch, capsys, finished, last):
    """Another temperature than asked for, no stop token; half a character, but for one that ends the answer, or all that was said
    again, on the terminal."""
    names, seen, ids = inspect.signature(sample.generate), {}, [*"a\u00e9!".encode(), *"\u00e9".encode()[:1] * bool(last)]

    def scripted(*a, **kw):
        seen.update(names.bind(*a, **kw).arguments)
        for t in ids:
            seen["on_token"](0, 0, t)
        return [[sample.Sample(ids, [-1.0] * len(ids), finished)]]

    class Bytes:
        eos_ids = [7]

        def chat_ids(self, messages):
            return [*messages[-1]["content"].encode()]

        def decode(self, ids):
            return bytes(ids).decode("utf-8", errors="replace")

    monkeypatch.setattr(sample, "generate", scripted)
    args = flags.parse(chat.COMMAND, ["--temperature", "0.4", *["--max-new-tokens", "5000"] * finished, "--top-p", "0.8", "--seed", "6"])
    assert chat.answer(None, Bytes(), args, ["hi"]) == f"a\u00e9!{last}"
    end = "" if finished else f" [cut after {len(ids)} tokens]"
    assert capsys.readouterr().out == f"a\u00e9!{last}{end}\n"
    want = {"prompts": [[*b"hi"]], "n": 1, "max_new_tokens": 5000 if finished else None, "temperature": 0.4, "top_p": 0.8, "eos_ids": [7], "seed": 6}
    assert {name: seen[name] for name in want} == want


def test_one_prompt_is_answered_by_the_engine_asked_for(monkeypatch):
    engines = []
    monkeypatch.setattr(sample, "set_engine", lambda model, engine: engines.append(engine))
    assert chat.main(["--engine", "plain", "--prompt", "1+1?", "--max-new-tokens", "1"]) == 0 and engines == ["plain"]
