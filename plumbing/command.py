"""
What all commands have in common: bad flags refused in one line, numbers with bounds, exit code 2
for what the user can fix, and an orderly end on ctrl-C, SIGTERM, a closed terminal or a closed
stdout: each raises an exception, so that what is half written is removed and what can be saved is
saved (plumbing/run.py has its own handler).

    sys.exit(command.run("eval.py", lambda: body(args)))
"""
import argparse
import os
import runpy
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# flags that change no number of a run, and those that change only its last digits, or when it is
# evaluated
IDLE = ("resume", "out", "save_every")
MINOR = ("engine", "micro_batch_tokens", "checkpointing", "max_rows", "card_share", "eval_every")


def stop(*_):
    """A signal handler. C libraries may turn what it raises into an error of their own, so `run`
    checks stop.asked as well."""
    stop.asked = True
    raise KeyboardInterrupt


@contextmanager
def signals(handler):
    """Set `handler` for SIGNALS within the block, except for a SIGHUP that nohup has switched off;
    afterwards what was there before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can be asked to handle signals
        return
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = [(n, signal.signal(n, handler)) for n in (SIGNALS[:2] if nohup else SIGNALS)]
    try:
        yield
    finally:
        for n, old in before:
            signal.signal(n, old)


def run(name, body):
    """body() -> its exit code (0 for None); 2, after a line on stderr, for an error that the user
    can fix; 130 for a command that was stopped, or whose stdout nobody reads any more."""
    stop.asked = False
    if hasattr(sys.stdout, "reconfigure"):  # characters that the terminal lacks are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals(stop):
            code = body() or 0
            print(end="", flush=True)
            return code
    except (KeyboardInterrupt, Exception) as e:
        if isinstance(e, BrokenPipeError):  # `| head`: the interpreter's last flush would fail too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if stop.asked or isinstance(e, KeyboardInterrupt | BrokenPipeError):
            print(f"{name}: stopped", file=sys.stderr)
            return 130
        if not isinstance(e, ValueError | OSError):
            raise
        missing = isinstance(e, OSError) and e.filename  # else "[Errno 2] ..."
        why = f"{e.filename}: {e.strerror}" if missing else "; ".join(str(e).splitlines())
        why = why if len(why) < 500 else f"{why[:300]} ... {why[-100:]}"
        print(f"{name}: error: {why}", file=sys.stderr)
        return 2


class Parser(argparse.ArgumentParser):
    """argparse with no abbreviations, and a ValueError of one line for what it refuses."""

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message):
        raise ValueError(f"{message} (--help lists the flags)")


def cell(value, spec):
    """A number for the terminal; "-" for None."""
    return "-" if value is None else format(value, spec)


def number(least, most, kind=int):
    """An argparse type: a number of `kind` from `least` to `most`, never NaN."""

    def parse(text):
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: must be from {least} to {most:.7g}")
        return value

    parse.__name__ = kind.__name__  # argparse names it when `kind` itself cannot read the text
    return parse


def numbers(text):
    """An argparse type: whole numbers from 1 to 10,000 as in 3,4,5, each once, in order."""
    return sorted({number(1, 10_000)(part) for part in text.split(",")})


numbers.__name__ = "comma-separated int"  # as argparse names it


def become(script, *words):
    """Run `script`, a file of this project, with the command line's own words after `words`. It
    imports the file that calls this, and gets the module that is there: no class exists twice."""
    path = Path(__file__).resolve().parents[1] / script
    if not path.is_file():
        sys.exit(f"error: {script} is not there; the command needs it")
    main = sys.modules["__main__"]
    sys.modules[Path(main.__file__).stem] = main
    sys.argv = [str(path), *words, *sys.argv[1:]]
    runpy.run_path(str(path), run_name="__main__")
