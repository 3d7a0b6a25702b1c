"""
Text to token ids and back, and a question as the chat turn that a checkpoint was trained to answer.

The chat template is the checkpoint's own, rendered in jinja2's sandbox: it is downloaded code, so
its time, memory and output are bounded too. Left out: tool calls and chat histories; a bound on the
time when a thread other than the main one renders.

    python data.py --data arithmetic --n 2 --model assets/tiny
"""
import json
import re
import resource
import signal
import threading
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from plumbing.files import decode, read_json, shown

SUFFIX = {
    "tags": "Reason step by step in <think></think>, then give the final answer in "
            "<answer></answer>.",
    "boxed": r"Please reason step by step, and put your final answer within \boxed{}.",
}
SECONDS, MEMORY = 2.0, 1 << 28  # what a chat template may take: time, and bytes of extra memory


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
        self.tokenizer.no_truncation()  # settings of whoever saved it last
        self.tokenizer.no_padding()
        self.size = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.settings = folder / "tokenizer_config.json"
        if not self.settings.is_file():
            raise FileNotFoundError(f"{self.settings}: not found; --model must be a folder of a "
                                    "chat checkpoint")
        config = read_json(self.settings)
        model, generation = (
            read_json(folder / name, {"vocab_size": (int, 1, 1 << 22)}) if
            (folder / name).is_file() else {} for name in ("config.json", "generation_config.json"))
        if not 0 < self.size <= model.get("vocab_size", 1 << 22):
            raise ValueError(f"{path} has {self.size} ids but {folder / 'config.json'} says "
                             f"vocab_size {model.get('vocab_size')}: the tokenizer is another "
                             "model's")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self.special = {k: self._content(k, config.get(k)) for k in names}
        self.eos_ids = self._ends({"generation_config.json": generation, "config.json": model})
        self.template = self._compile(config.get("chat_template"))

    def _content(self, name, token):  # a string or an AddedToken's dict
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise ValueError(f"{self.settings}: {name} {shown(token)} must be text")
        return token

    def _ends(self, found):
        ids = {self.tokenizer.token_to_id(self.special["eos_token"] or "")}
        for file, config in found.items():
            one = config.get("eos_token_id")
            some = one if isinstance(one, list) else [] if one is None else [one]
            if not all(type(i) is int and 0 <= i < 1 << 22 for i in some):
                raise ValueError(f"{self.folder / file}: eos_token_id {str(one):.40} must be an id "
                                 "or a list of ids")
            ids.update(some)
        if not ids - {None}:
            raise ValueError(f"{self.folder}: no eos_token in tokenizer_config.json and no "
                             "eos_token_id in generation_config.json")
        return sorted(ids - {None})

    def _compile(self, template):
        import jinja2.sandbox

        if isinstance(template, list):  # several named templates
            template = next((t.get("template") for t in template if isinstance(t, dict)
                             and t.get("name") == "default"), None)
        self.source, file = self.settings, self.folder / "chat_template.jinja"
        if file.is_file():  # newer, and first in transformers too
            template, self.source = decode(file.read_bytes(), file), file
        if not template or not isinstance(template, str):
            raise ValueError(f"{self.settings}: no chat_template; use an instruct checkpoint, or "
                             "add one")
        # with {% generation %} other trainers mark the assistant's tokens: here an ordinary block
        template = re.sub(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})",
                          lambda m: m[1] + ("endif" if m[2] else "if true"), template)
        # the settings and functions that checkpoints are written against
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.intercepted_binops = frozenset({"*", "**"})  # no signal interrupts a power of big ints
        env.binop_table = {"*": _times, "**": _power}
        env.filters["tojson"] = lambda x, indent=None: json.dumps(
            x, ensure_ascii=False, indent=indent)
        env.globals["raise_exception"] = _template_error
        env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
        with self._bounded("does not compile"):
            return env.from_string(template)

    @contextmanager
    def _bounded(self, what):
        """Bounds on time and memory; whatever the template does wrong is a ValueError."""
        main = threading.current_thread() is threading.main_thread()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        pages = Path("/proc/self/statm")  # Linux
        try:
            if pages.exists():
                held = int(pages.read_text().split()[0]) * resource.getpagesize() + MEMORY
                soft = held if limits[0] == resource.RLIM_INFINITY else min(held, limits[0])
                resource.setrlimit(resource.RLIMIT_AS, (soft, limits[1]))
            if main:
                before = signal.signal(signal.SIGALRM, _late)
                timer = signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                yield
            finally:
                if main:
                    signal.setitimer(signal.ITIMER_REAL, *timer)
                    signal.signal(signal.SIGALRM, before)
                resource.setrlimit(resource.RLIMIT_AS, limits)
        except Exception as e:  # a template may fail in any way
            why = f"takes more than {MEMORY >> 20} MiB" if isinstance(e, MemoryError) else e
            raise ValueError(f"{self.source}: chat_template {what}: {why}") from None

    def __len__(self):
        return self.size

    def encode(self, text):
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # half a character: what bytes of another encoding become
            raise ValueError(f"{shown(text)}: is not UTF-8; write it in that") from None

    def decode(self, ids):
        """Text of a completion without special tokens (<|im_end|>, padding); <think> is not one."""
        ids = [i for i in ids if i < self.size]
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def chat(self, messages):
        """messages [{"role", "content"}] -> the text the checkpoint was trained to continue."""
        special = {k: v for k, v in self.special.items() if v is not None}
        with self._bounded("failed"):
            out = self.template.render(messages=messages, add_generation_prompt=True, tools=None,
                                       documents=None, **special)
            if len(out) > (1 << 20) + 4 * sum(len(m["content"]) for m in messages):
                raise ValueError(f"it writes {len(out)} characters")
        return out

    def prompt_ids(self, question, style="tags", max_prompt=None):
        """Ids of a question with the style's instruction; None if more than max_prompt."""
        ids = self.encode(self.chat([{"role": "user", "content": styled(question, style)}]))
        return None if max_prompt is not None and len(ids) > max_prompt else ids


def styled(question, style):
    """The question with its style's instruction below it; `plain` has none."""
    if style == "plain":
        return question
    if style not in SUFFIX:
        raise unknown_style(style)
    return f"{question}\n{SUFFIX[style]}"


def unknown_style(style):
    return ValueError(f"--prompt-style {style}: unknown, choose from {', '.join(SUFFIX)}")


def _template_error(message):
    raise ValueError(message)


def _late(*_):
    raise TimeoutError(f"takes more than {SECONDS} s")


def _power(a, b):
    return a ** b if max(abs(a), abs(b)) < 1000 else _template_error("a power too large")


def _times(a, b):
    big = isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > 1 << 14
    return _template_error("a product too large") if big else a * b
