"""
Text to token ids and back, and a question as the chat turn that a checkpoint was trained to answer.

The chat template is the checkpoint's own, rendered in jinja2's sandbox: it is code from a download.
Left out: tool calls and chat histories.

    python data.py --data arithmetic --n 2 --model assets/tiny
"""
import json
from datetime import datetime
from pathlib import Path

SUFFIX = {
    "tags": "Reason step by step in <think></think>, then give the final answer in "
            "<answer></answer>.",
    "boxed": r"Please reason step by step, and put your final answer within \boxed{}.",
}


class Tokenizer:
    """tokenizer.json and the chat template of a checkpoint folder.

    `eos_ids`: every id that ends a turn, from generation_config.json, config.json and
    tokenizer_config.json together (Qwen's instruct models stop at <|im_end|>, and at <|endoftext|>
    too). `len(tok)` is the last id + 1: a checkpoint's embedding may have more rows than that,
    which no sampler may ever pick. FileNotFoundError or ValueError with a line that names the file.
    """

    def __init__(self, folder):
        import tokenizers

        self.folder = folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not found; --model must be a folder with "
                                    "tokenizer.json beside config.json")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # tokenizers raises plain Exception
            raise ValueError(f"{path}: not a tokenizer file ({e})") from None
        self.size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        config = _read_json(folder / "tokenizer_config.json")
        model = _read_json(folder / "config.json", optional=True)
        generation = _read_json(folder / "generation_config.json", optional=True)
        if self.size > model.get("vocab_size", self.size):
            raise ValueError(f"{path} has {self.size} ids but {folder / 'config.json'} says "
                             f"vocab_size {model['vocab_size']}: the tokenizer is another model's")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self.special = {k: _content(config.get(k)) for k in names}
        self.eos_ids = self._ends(generation.get("eos_token_id"), model.get("eos_token_id"))
        self.template = self._compile(config.get("chat_template"))

    def _ends(self, *found):
        ids = {self.tokenizer.token_to_id(self.special["eos_token"] or "")}
        for one in found:
            ids.update([one] if isinstance(one, int) else one or [])
        if not ids - {None}:
            raise ValueError(f"{self.folder}: no eos_token in tokenizer_config.json and no "
                             "eos_token_id in generation_config.json")
        return sorted(ids - {None})

    def _compile(self, template):
        import jinja2.sandbox

        if isinstance(template, list):  # several named templates
            template = {t["name"]: t["template"] for t in template}.get("default")
        if not template and (self.folder / "chat_template.jinja").is_file():
            template = (self.folder / "chat_template.jinja").read_text()
        if not template:
            raise ValueError(f"{self.folder / 'tokenizer_config.json'}: no chat_template; "
                             "use an instruct checkpoint, or add one")
        # the settings and functions that checkpoints are written against
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = lambda x, indent=None: json.dumps(
            x, ensure_ascii=False, indent=indent)
        env.globals["raise_exception"] = _template_error
        env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        try:
            return env.from_string(template)
        except jinja2.TemplateError as e:
            raise ValueError(f"{self.folder}: chat_template does not compile: {e}") from None

    def __len__(self):
        return self.size

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Text of a completion without special tokens (<|im_end|>, padding); <think> is none."""
        ids = [i for i in ids if i < self.size]
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def chat(self, messages):
        """messages [{"role", "content"}] -> the text the checkpoint was trained to continue."""
        special = {k: v for k, v in self.special.items() if v is not None}
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, **special)
        except Exception as e:  # a template may fail in any way
            raise ValueError(f"{self.folder}: chat_template failed: {e}") from None

    def prompt_ids(self, question, style="tags", max_prompt=None):
        """Ids of a question with the style's instruction; None if more than max_prompt of them."""
        ids = self.encode(self.chat([{"role": "user", "content": styled(question, style)}]))
        return None if max_prompt is not None and len(ids) > max_prompt else ids


def styled(question, style):
    """The question with what its style asks for below it; `plain` asks for nothing."""
    if style == "plain":
        return question
    if style not in SUFFIX:
        raise unknown_style(style)
    return f"{question}\n{SUFFIX[style]}"


def unknown_style(style):
    return ValueError(f"--prompt-style {style}: unknown, choose from {', '.join(SUFFIX)}")


def _template_error(message):
    raise ValueError(message)


def _content(token):  # a token in tokenizer_config.json is a string or an AddedToken's dict
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path, optional=False):
    if optional and not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: not found; --model must be a folder of a chat "
                                "checkpoint") from None
    except ValueError as e:
        raise ValueError(f"{path}: not JSON ({e})") from None
