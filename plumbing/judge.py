"""
math-verify on many pairs of answers side by side, in processes that may die of them.

No handler or thread can stop a power of big integers before it returns; the operating system can.
So one process imports sympy once and forks workers; the kernel ends a worker whose pair has used
up its processor time, and gives it no more than its memory. It is the pair's own time, not the
clock's: a verdict does not depend on how busy the machine is. Left out: systems without fork.

    python -c 'from plumbing.judge import ask; print(ask([("x>1", "1<x"), ("x>1", "x>2")]))'
"""
import contextlib
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time

CPU = 2.0  # seconds of processor time that a pair may take; most take a twentieth of one
WALL = 60.0  # seconds that 512 pairs may take, a last resort: a pair not reached is different
MEMORY = 2 << 30  # bytes a worker may ask for
STARTED, SAME = 1, 2
lock, server = threading.Lock(), None


def ask(pairs):
    """[(given, gold), ...] in LaTeX -> whether each is the same, from any thread."""
    global server
    with lock:
        runs = server is not None and server.poll() is None
        if not runs:
            server = subprocess.Popen(
                [sys.executable, "-P", __file__, str(os.getpid())], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, start_new_session=True)  # where ctrl-C does not reach it
        seconds = WALL * -(-len(pairs) // 512)
        timer = threading.Timer(seconds + (2 if runs else 120), server.kill)
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(json.dumps([pairs, seconds]).encode() + b"\n")
            server.stdin.flush()
        line = server.stdout.readline()
        timer.cancel()
        if not line:
            server.kill()
            server.wait()
    if not line and not runs:
        raise ValueError("math-verify does not start; pip install -r requirements.txt")
    return json.loads(line) if line else [False] * len(pairs)


def main(parent):
    """The process that forks. It ends when stdin closes."""
    import logging
    from dataclasses import replace

    import math_verify

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing a library prints may land among the verdicts
    # The whole answer or nothing: by default it looks for a number in what it cannot read, and
    # takes the t of 3t for a unit.
    latex = math_verify.LatexExtractionConfig()
    latex = replace(latex, normalization_config=replace(latex.normalization_config, units=False))

    def verify(given, gold):
        given, gold = (math_verify.parse(f"${s}$", [latex], "no_fallback", "first_match", None)
                       for s in (given, gold))
        # In both directions, for it is not symmetric: of an equation given where none is asked for
        # it takes the right side, so that 2x + z = 1 is 1, though 1 is not 2x + z = 1. Sets and
        # inequalities, which it would only compare one way round, it is told to compare both ways.
        # The precision is for numbers as small as 2^{-98}, all of which are 0 to fifteen places.
        return all(math_verify.verify(*pair, float_rounding=12, numeric_precision=60,
                                      allow_set_relation_comp=True, timeout_seconds=None)
                   for pair in ((gold, given), (given, gold)))

    for pair in (  # what is loaded and learned late, once for all workers
            ("|x| < 1", "(-1,1) \\cup (2,\\infty)"), ("\\{1, \\pi\\}", "\\{1\\}"),
            ("-\\frac{x^2}{2} + 3\\sqrt[3]{y}", "(x+1)(y-2)"), ("y = \\sin 2x", "y = 2"),
            ("\\begin{pmatrix} 1 & x \\\\ 0 & -2 \\end{pmatrix}", "2^{n+1} - \\log_2 x")):
        verify(*pair)
    for line in sys.stdin:
        print(json.dumps(_verdicts(verify, *json.loads(line), parent)), file=out)


def _verdicts(verify, pairs, seconds, parent):
    workers, end = min(8, os.cpu_count() or 1), time.monotonic() + seconds
    shares = [range(i, len(pairs), workers) for i in range(workers)]
    found, running = mmap.mmap(-1, len(pairs)), {}  # found: what the workers write
    while True:
        for share in shares:
            if share not in running and not all(found[i] for i in share):
                running[share] = os.fork() or _work(verify, pairs, share, found)
        if not running or time.monotonic() > end or os.getppid() != parent:
            break
        if pid := os.waitpid(-1, os.WNOHANG)[0]:
            running = {share: p for share, p in running.items() if p != pid}
        else:
            time.sleep(0.001)
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [verdict == SAME for verdict in found[:]]


def _work(verify, pairs, share, found):
    try:
        for i in share:
            if not found[i]:
                found[i] = STARTED
                signal.setitimer(signal.ITIMER_PROF, CPU)  # whose signal nothing catches
                found[i] = SAME if verify(*pairs[i]) else STARTED
    finally:  # sympy raises anything on what it cannot read; that is a wrong answer
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
