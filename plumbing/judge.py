"""
math-verify on many pairs of answers side by side, each in a process of its own.

No handler or thread can stop a power of big integers before it returns; the operating system can.
So one process imports sympy once and forks a child for each pair. A child that exceeds its
processor time or memory is ended, and the exit status says what it found. A pair that a large batch
had no time for counts as different for now, and is asked again when it comes again.

Left out: systems without fork.

    python -c 'from plumbing.judge import judge; print(judge.ask([("x>1", "1<x"), ("x>1", "x>2")]))'
"""

import atexit
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque

LEAST, MOST = 0.2, 1.0  # seconds of processor time that a pair may take
MEMORY = 2 << 30  # bytes a child may ask for
SAME = 7  # an exit status that no accident produces


class Judge:
    """The run's side of the process that forks, which is started when it is first asked."""

    def __init__(self, seconds=5.0):
        """seconds: time for each 512 pairs of a batch, divided among them."""
        self.seconds, self.lock, self.process, self.known = seconds, threading.Lock(), None, {}

    def ask(self, pairs):
        """[(given, gold), ...] in LaTeX -> list of bool, from any thread. ValueError where
        math-verify does not start."""
        with self.lock:
            if len(self.known) > 1 << 16:
                self.known.clear()
            if new := [pair for pair in dict.fromkeys(pairs) if pair not in self.known]:
                told = zip(new, self._told(new), strict=False)
                self.known.update((pair, v == ord("1")) for pair, v in told if v in b"01")
            return [self.known.get(pair, False) for pair in pairs]

    def _told(self, pairs):
        """A byte a pair: 1 same, 0 different, ? not reached; none where the process failed."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        try:
            seconds = self.seconds * -(-len(pairs) // 512)
            self.process.stdin.write(json.dumps([pairs, seconds]).encode() + b"\n")
            self.process.stdin.flush()
            told = self._line(seconds + 2.0)
        except BrokenPipeError:
            told = b""
        if not told:
            self.stop()
        return told

    def _start(self):
        self.stop()
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid())], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True)  # ctrl-C is for the run, which saves
        if self._line(120.0) != b"ready":
            self.stop()
            raise ValueError("math-verify does not start; pip install -r requirements.txt")

    def _line(self, seconds):
        out, end, line = self.process.stdout, time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            ready = select.select([out], [], [], max(0.0, end - time.monotonic()))[0]
            part = os.read(out.fileno(), 1 << 16) if ready else b""
            if not part:
                return b""
            line += part
        return line[:-1]

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            with contextlib.suppress(BrokenPipeError):  # what was not sent
                self.process.stdin.close()
            self.process = None


judge = Judge()
atexit.register(judge.stop)


# ---- the process that forks


def main(parent):
    """Answers a line of JSON with a line of verdicts until stdin closes or the parent is gone."""
    import logging

    import math_verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing a library prints may land among the verdicts

    def verify(given, gold):
        given, gold = (math_verify.parse(f"${s}$", parsing_timeout=None) for s in (given, gold))
        return math_verify.verify(gold, given, float_rounding=12, timeout_seconds=None)

    for pair in (("|x| < 1", "x < 2"), ("\\{1\\}", "(-\\infty,1) \\cup (1,\\infty)")):
        verify(*pair)  # loads what is loaded late, once for all children
    out.write(b"ready\n")
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 0.5)[0]:
            if not (line := sys.stdin.readline()):
                return
            out.write(_verdicts(verify, *json.loads(line), parent) + b"\n")


def _verdicts(verify, pairs, seconds, parent):
    verdicts, running = bytearray(b"?" * len(pairs)), {}
    todo = deque(range(len(pairs)))
    workers, end = min(8, os.cpu_count() or 1), time.monotonic() + seconds
    share = max(LEAST, min(seconds * workers / len(pairs), MOST))
    while (todo or running) and time.monotonic() < end and os.getppid() == parent:
        while todo and len(running) < workers:
            i = todo.popleft()
            if not (pid := os.fork()):
                _child(verify, *pairs[i], share)
            running[pid] = i
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            i, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            if code >= 0 or share == MOST:
                verdicts[i] = ord("1" if code == SAME else "0")
        else:
            time.sleep(0.001)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return bytes(verdicts)


def _child(verify, given, gold, seconds):
    same = False
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal nothing catches
        same = verify(given, gold)
    except BaseException:  # sympy raises anything on what it cannot read; that is a wrong answer
        pass
    os._exit(SAME if same else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
