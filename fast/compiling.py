"""
Kernels compiled ahead. As they come up, one by one, they would take most of a minute of a first
step. Each has a process of its own: threads would wait for one another, since part of compiling is
Python.

    with compiling():
        engine.rehearse()        # calls what launches the kernels of a decode step

Whatever kernel is loaded, by them or later, is told how to divide an SM's memory.
"""
import ctypes
import gc
import multiprocessing
import os
import signal
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest import mock

from plumbing import ranks
from plumbing.command import SIGNALS

import torch
import triton

# seconds that a compiler waits for a core, since those who had one may have been killed, and then
# may take: it may hang in a lock that another thread held when it was forked
PATIENCE = 60
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver API


def prefer_shared(module, function, *_):
    """Triton's hook for a kernel that was loaded: of the memory that is L1 and shared memory, all
    that can be is to be shared, which is Triton's own choice above 48 KB. A kernel that asks for
    another division than the one that runs waits until an SM is empty, and cannot start early."""
    if torch.version.cuda:
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, 100)
        assert not error, f"cuFuncSetAttribute: CUDA driver error {error}"


triton.knobs.runtime.kernel_load_end_hook.add(prefer_shared)


@contextmanager
def compiling():
    """Within the block Triton's kernels are compiled, side by side, and none is launched."""
    run, fork = triton.JITFunction.run, multiprocessing.get_context("fork")
    cores = fork.Semaphore(max(1, os.cpu_count() // ranks.world))
    jobs = []  # (process, what it runs, the kernel to be)

    def compile_only(kernel, *args, warmup, **options):
        return run(kernel, *args, warmup=True, **options)

    def submit(make):
        """make() -> a kernel: from Triton's cache, or compiled, and then it is there."""
        kernel = Future()
        try:  # make_ir begins to compile: it is not called if the cache has the kernel
            with mock.patch.object(triton.compiler.ASTSource, "make_ir", side_effect=KeyError):
                kernel.set_result(make())
        except KeyError:
            process = fork.Process(target=fill_cache, args=(make, cores), daemon=True)
            with suppress(OSError):  # no more processes: make() below compiles it
                process.start()
            jobs.append((process, make, kernel))
        return kernel

    with (triton.AsyncCompileMode(SimpleNamespace(submit=submit)),
          mock.patch.object(triton.JITFunction, "run", compile_only)):
        try:
            yield
            for process, make, kernel in jobs:
                if process.pid:
                    process.join()
                kernel.set_result(make())
        finally:
            for _, _, kernel in jobs:
                if not kernel.done():  # an exception: the mode would wait for it
                    kernel.set_result(None)


def fill_cache(make, cores):
    """Compile a kernel into Triton's cache, in a process forked for it."""
    gc.disable()  # the end of a tensor would call the GPU, which no other process may
    # nor keep open what is the parent's: the GPU, the run's lock
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    for n in SIGNALS:
        signal.signal(n, signal.SIG_DFL)
    cores.acquire(timeout=PATIENCE)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)  # its signal ends the process
    with suppress(Exception):  # the parent meets it too
        kernel = make()
        # older Tritons make a kernel's launcher with a C compiler
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    cores.release()
