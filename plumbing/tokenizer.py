"""
Text to token ids and back, and a question as the chat turn that a checkpoint was trained to answer.

The chat template is the checkpoint's own, rendered in jinja2's sandbox, since it is downloaded
code. Left out: tool calls.

    Tokenizer("assets/tiny").prompt_ids("What is 1+1?")
"""
import json
from datetime import datetime
from pathlib import Path

from plumbing.files import decode, read_json, saved

import jinja2.sandbox
import tokenizers

SUFFIX = {
    "tags": "Reason step by step in <think></think>, then give the final answer in "
            "<answer></answer>.",
    "boxed": r"Please reason step by step, and put your final answer within \boxed{}.",
}


class Tokenizer:
    """tokenizer.json and the chat template of a checkpoint folder.

    `eos_ids`: every id that ends a turn, of three files together (Qwen's instruct models stop at
    <|im_end|>, and at <|endoftext|> too). `len(tok)` is the last id + 1: a checkpoint's embedding
    may have more rows than that, which no sampler may ever pick. FileNotFoundError or ValueError
    with a line that names the file."""

    def __init__(self, folder):
        self.folder = folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # tokenizers raises plain Exception
            raise ValueError(f"{path}: not a tokenizer file ({e})") from None
        self.tokenizer.no_truncation()  # settings of whoever saved it last
        self.tokenizer.no_padding()
        self.size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        config = read_json(folder / "tokenizer_config.json")
        model = saved(folder, "config.json")
        generation = saved(folder, "generation_config.json")
        if self.size > model.get("vocab_size", self.size):
            raise ValueError(f"{path} has {self.size} ids but {folder / 'config.json'} says "
                             f"vocab_size {model.get('vocab_size')}: the tokenizer is another "
                             "model's")
        self.special = {}  # as text, for the template
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token  # an AddedToken
            if token is not None:
                self.special[name] = token
        self.eos_ids = self._ends(generation, model)
        self.template = self._compile(config.get("chat_template"))

    def _ends(self, *configs):
        """The ids that end a turn, in order."""
        ids = [self.tokenizer.token_to_id(self.special.get("eos_token", ""))]
        for config in configs:
            found = config.get("eos_token_id")
            ids += found if isinstance(found, list) else [found]
        ids = [i for i in ids if i is not None]
        if not ids:
            raise ValueError(f"{self.folder}: needs an eos_token in tokenizer_config.json, or an "
                             "eos_token_id, an id or a list of ids, in generation_config.json")
        return sorted({*ids})

    def _compile(self, template):
        file = self.folder / "chat_template.jinja"
        if file.is_file():  # newer, and first in transformers too
            template = decode(file.read_bytes(), file)
        if not template or not isinstance(template, str):
            raise ValueError(f"{self.folder / 'tokenizer_config.json'}: no chat_template; use an "
                             "instruct checkpoint, or add one")

        def raise_exception(message):
            raise ValueError(message)

        # the settings and functions that checkpoints are written against
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = lambda x, indent=None: json.dumps(
            x, ensure_ascii=False, indent=indent)
        env.globals["raise_exception"] = raise_exception
        env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        try:
            return env.from_string(template)
        except jinja2.TemplateError as e:
            raise ValueError(f"{self.folder}: its chat template is broken ({e})") from None

    def __len__(self):
        return self.size

    def encode(self, text):
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # half a character: what bytes of another encoding become
            raise ValueError(f"{text!r:.60}: is not UTF-8; write it in that") from None

    def decode(self, ids):
        """Text of a completion without special tokens (<|im_end|>, padding); <think> is not one."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def chat(self, messages):
        """messages [{"role", "content"}] -> the text the checkpoint was trained to continue."""
        return self.template.render(messages=messages, add_generation_prompt=True, tools=None,
                                    documents=None, **self.special)

    def chat_ids(self, messages):
        return self.encode(self.chat(messages))

    def prompt_ids(self, question, style="tags", max_prompt=None):
        """Ids of a question with the style's instruction; None if more than max_prompt."""
        ids = self.chat_ids([{"role": "user", "content": styled(question, style)}])
        return None if max_prompt is not None and len(ids) > max_prompt else ids


def styled(question, style):
    """The question with its style's instruction below it; `plain` has none."""
    return question if style == "plain" else f"{question}\n{SUFFIX[style]}"
