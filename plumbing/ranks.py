"""
Data parallel training: the little that a run needs to know about its other ranks.

    torchrun --nproc-per-node=2 train.py --model ... --data ...

Each rank is a process with its own card. The prompts of a step, or the questions of an evaluation,
are split by rank (`mine`), the results go to all ranks (`merge`), and from there on every rank
holds the same groups, so that no decision of the loop needs a message. The update splits
completions again, by their tokens (`share`), divides by the counts of all of them, and sums
gradients (`sum_gradients`). Objects travel by gloo, gradients by NCCL where there are GPUs. Started
without torchrun there is one rank, and nothing here does anything.

A rank that dies ends all: torchrun stops the others with SIGTERM and, half a minute later, kills
them (its --shutdown-timeout). A rank that is stopped (ctrl-C, SIGTERM) tells the others at the next
`gather`, so all leave at the same point of the loop; none ends until rank 0 has saved.

Left out: sharded weights or optimizer state (each rank has all), rollouts beside the update.
"""
import os
import shlex
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps

import torch
import torch.distributed as dist

world = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ["RANK"]) if world > 1 else 0  # RANK without WORLD_SIZE is not torchrun's
busy = False  # in a collective: an interrupt must wait, the others count on this rank
stopped = False  # all ranks know that the run is to stop
TIMEOUT = 1800  # seconds that an exchange may take: the others may still be sampling
PATIENCE = 10  # seconds that rank 0 has to raise the same error before this rank does


def command_line():
    """The command line of this process, as text for a shell. Without the two dashes torchrun takes
    eval.py's --run and --n for its own."""
    here = os.environ.get("LOCAL_WORLD_SIZE", world)
    launcher = ["python"] if world == 1 else ["torchrun", f"--nproc-per-node={here}", "--"]
    return shlex.join([*launcher, *sys.argv])


def start(args):
    """Join the other ranks; each gets the card of its local rank. ValueError if there are too few
    cards, ConnectionError if the others do not come."""
    if world == 1 or dist.is_initialized():
        return
    backend, here = "gloo", int(os.environ.get("LOCAL_RANK", 0))
    if args.device != "cpu" and torch.cuda.is_available():
        if here >= torch.cuda.device_count():
            raise ValueError(f"--nproc-per-node: rank {here} of this machine has no card, there "
                             f"are {torch.cuda.device_count()}")
        torch.cuda.set_device(here)
        backend = "cpu:gloo,cuda:nccl"
    # torch imports this module late (with the first optimizer), and its default arguments hold the
    # process group of that moment. They would keep it, and gloo's threads, past `end`; a thread
    # with a tensor to free when the interpreter ends aborts the process. Now it holds none.
    from torch.distributed.nn import functional  # noqa: F401
    with together():
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT))
        if "nccl" in backend:  # NCCL takes its buffers now, before free memory is counted
            dist.all_reduce(torch.zeros(1, device="cuda"))


def end():
    """Wait until all ranks are done (rank 0 with its files), and leave the group."""
    if dist.is_initialized():
        with suppress(ConnectionError):  # this rank's work is done
            gather(None)
        dist.destroy_process_group()


def rank_0_speaks(body):
    """Rank 0 prints for all: what others print is dropped, so an error on all of them is printed
    once. A rank that fails alone prints its error after rank 0 has had time to fail too and
    torchrun to end it. With gloo alone a rank that fails leaves the group, too."""

    @wraps(body)
    def quiet():
        streams = sys.stdout, sys.stderr
        if rank > 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")
        try:
            return body()
        except Exception:
            if rank > 0:
                time.sleep(PATIENCE)
            sys.stdout, sys.stderr = streams
            raise
        finally:
            if dist.is_initialized() and dist.get_backend() == "gloo":  # NCCL's might wait
                dist.destroy_process_group()  # see `start`: its threads would abort this process

    return quiet


def first(method):
    """Only rank 0 does it; the others return None."""

    @wraps(method)
    def only(*args, **kw):
        return method(*args, **kw) if rank == 0 else None

    return only


@contextmanager
def together():
    """Around a collective: interrupts wait, and a failure (another rank has gone, or was slower
    than TIMEOUT) is a ConnectionError."""
    global busy
    busy = True
    try:
        yield
    except RuntimeError as e:
        raise ConnectionError(f"rank {rank}: another rank ended, or was slower than {TIMEOUT} s "
                              f"({str(e).partition(chr(10))[0]})") from None
    finally:
        busy = False


def gather(item):
    """[the item of each rank], the same list on all of them. KeyboardInterrupt on all if one was
    stopped."""
    global stopped
    if world == 1:
        return [item]
    parts = [None] * world
    with together():
        dist.all_gather_object(parts, (stopped, item))
    if not stopped and any(other for other, _ in parts):
        stopped = True
        raise KeyboardInterrupt
    return [part for _, part in parts]


def stop():
    """This rank was stopped: stop the others too, in the `gather` where they wait for it."""
    global stopped
    if world > 1 and not stopped:
        stopped = True
        with suppress(ConnectionError):  # they may be gone already
            gather(None)


def mine(items):
    """This rank's part of `items`: every world-th."""
    return items[rank::world]


def merge(items):
    """Each rank's results for its `mine` -> those for all items, in order, on every rank."""
    parts = gather(items)
    return [parts[i % world][i // world] for i in range(sum(map(len, parts)))]


def share(items, size):
    """[items of each rank], their sizes about equal: the largest first, each to the rank that has
    least. The same on every rank."""
    parts, load = [[] for _ in range(world)], [0] * world
    for item in sorted(items, key=size, reverse=True):
        least = load.index(min(load))
        parts[least].append(item)
        load[least] += size(item)
    return parts


def sum_gradients(params):
    """Sum each p.grad over all ranks, in float32; None counts as zeros, so that a rank with nothing
    to train takes part."""
    if world == 1:
        return
    for p in params:
        total = (torch.zeros_like(p) if p.grad is None else p.grad).float().contiguous()
        with together():
            dist.all_reduce(total)
        p.grad = total.to(p.dtype)
