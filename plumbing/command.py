"""
What all commands have in common: bad flags refused in one line, numbers with bounds, exit code 2
for what the user can fix, and an orderly end on ctrl-C, SIGTERM, a closed terminal or a closed
stdout.

Before `run`, while torch is imported, ctrl-C ends the process in one line (plumbing/__init__.py).
`run` turns each of these ends into a KeyboardInterrupt, so that what is half written is removed and
what can be saved is saved (plumbing/run.py has its own handler).

    sys.exit(command.run("eval.py", lambda: body(args)))
"""
import argparse
import os
import shlex
import signal
import sys
import threading
from contextlib import contextmanager
from itertools import dropwhile, takewhile
from pathlib import Path

from plumbing import ALONE, HOME, MAIN
from plumbing.files import file_digest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# a user's own script, not pytest, for instance
OWN = not ALONE and str(MAIN).endswith(".py") and Path(MAIN).name != "__main__.py"
# flags that change no number of a run, and those that change only its last digits, or when it is
# evaluated
IDLE = ("resume", "out", "save_every", "card_share")
MINOR = ("engine", "micro_batch_tokens", "checkpointing", "max_rows", "eval_every")


def stop(*_):
    """A signal handler. C libraries may turn what it raises into an error of their own, so `run`
    checks stop.asked as well."""
    stop.asked = True
    raise KeyboardInterrupt


def script(argv, name="train.py"):
    """What was started, and what else it was told: the words of the command line except argv, the
    flags of `name`; this project's folder is left off. ["train.py"]; ["mine.py", "--tau",
    "5"] if mine.py has a flag of its own."""
    own = typed(argv) or [name]
    path = Path(own[0]).resolve()
    return [str(path.relative_to(HOME)) if path.is_relative_to(HOME) else own[0], *own[1:]]


def typed(argv):
    """`script`'s words as they were typed, so that they can be typed again in the same folder; []
    if argv does not come from the command line but from a test, say, or a notebook."""
    own, rest = sys.argv[:1], [*argv]
    for word in sys.argv[1:]:
        if rest and word == rest[0]:
            del rest[0]
        else:
            own.append(word)
    if not rest:
        return own
    # a user's own script may add flags that nobody typed
    return [*sys.argv[:1], *(word for word in sys.argv[1:] if word not in argv)] if OWN else []


def script_of(line, flags):
    """The script of a kept command line, and what else it was told before the first of `flags`, as
    text: `script` of a run that was started some time ago. ValueError if it cannot be read."""
    try:
        words = shlex.split(line)
    except ValueError as e:
        raise ValueError(f"command cannot be read ({e})") from None
    ours = {f"--{no}{name.replace('_', '-')}" for name in flags for no in ("", "no-")}
    words = dropwhile(lambda word: not word.endswith(".py"), words)
    own = takewhile(lambda word: word.partition("=")[0] not in ours, words)
    return " ".join(takewhile(lambda word: word != "&&", own))


@contextmanager
def signals(handler, after=None):
    """Set `handler` for SIGNALS within the block, except for a SIGHUP that nohup has switched off;
    afterwards set `after`, or what was there before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can be asked to handle signals
        return
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = SIGNALS[:2] if kept else SIGNALS
    before = [(n, signal.signal(n, handler)) for n in heard]
    try:
        yield
    finally:
        for n, old in before:
            signal.signal(n, old if after is None else after)


class Out:
    """sys.stdout; if its reader has gone, that counts as a signal like the others, and further
    output is dropped. Characters that its encoding lacks are escaped."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        return self.attempt(self.stream.write, text)

    def flush(self):
        return self.attempt(self.stream.flush)

    def attempt(self, call, *args):
        try:
            return call(*args)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            handler = signal.getsignal(signal.SIGTERM)
            (handler if callable(handler) else stop)()


def run(name, body):
    """body() -> its exit code (0 for None); 2, after a line on stderr, for an error that the user
    can fix; 130 for a command that was stopped."""
    before, stop.asked = sys.stdout, False
    sys.stdout = before and Out(before)
    try:
        # once all is done, no signal may disturb the interpreter's exit
        with signals(stop, signal.SIG_IGN if ALONE else None):
            code = body() or 0
            print(end="", flush=True)
            return code
    except (KeyboardInterrupt, Exception) as e:
        if stop.asked or isinstance(e, KeyboardInterrupt):
            print(f"{name}: stopped", file=sys.stderr)
            return 130
        if not isinstance(e, ValueError | OSError):
            raise
        why = "; ".join(str(e).splitlines())
        why = why if len(why) < 500 else f"{why[:300]} ... {why[-100:]}"
        print(f"{name}: error: {why}", file=sys.stderr)
        return 2
    finally:
        sys.stdout = before


class Parser(argparse.ArgumentParser):
    """argparse with no abbreviations, and a ValueError of one line for what it refuses."""

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message):
        raise ValueError(f"{message} (--help lists the flags)")


def cell(value, spec):
    """A number for the terminal; "-" for None."""
    return "-" if value is None else format(value, spec)


def number(low, end, kind=int, closed=False):
    """An argparse type: a number of `kind` in [low, end), or `closed` in [low, end], never NaN."""

    def parse(text):
        value = kind(text)
        if not (low <= value < end or closed and value == end):
            bounds = f"at least {low} and {'at most' if closed else 'below'} {end:.7g}"
            raise argparse.ArgumentTypeError(f"{text}: must be {bounds}")
        return value

    parse.__name__ = kind.__name__  # argparse names it when `kind` itself cannot read the text
    return parse


def numbers(low, end):
    """An argparse type: whole numbers in [low, end) as in 3,4,5, each once, in order."""

    def parse(text):
        return sorted({number(low, end)(part) for part in text.split(",")})

    parse.__name__ = "comma-separated int"
    return parse


def own_code(args):
    """{"reward": digest of --reward's file, "code": digest of the user's own script}, each only if
    there is one."""
    own = {"reward": args.reward and args.reward.rpartition(":")[0], "code": OWN and MAIN}
    return {name: file_digest(path) for name, path in own.items() if path}


def become(script, *words):
    """Start `script`, a file of this project, in place of this process, with the command line's own
    words after `words`. It imports the file that calls this: so no class exists twice."""
    path = Path(__file__).resolve().parents[1] / script
    if not path.is_file():
        sys.exit(f"error: {script} is not there; the command needs it")
    os.execv(sys.executable, [sys.executable, str(path), *words, *sys.argv[1:]])
