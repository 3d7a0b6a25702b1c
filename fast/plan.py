"""
Which tile a launch of the FP4 GEMM takes, and the buffers that all launches share.

A table of times and a page of arithmetic instead of an autotuner: the choice costs nothing at run
time, is the same in each run and on each rank, and can be tested without a GPU. The times are an
H200's.

    python -c "from fast.plan import plan; print(plan(8, 37888, 3584, 132))"

Shapes: M rows of x, N outputs, K inputs.
"""
import functools

import torch

from fast.layout import CHUNK

# A program takes BM rows of x and BN of w, in `stages` stages and `warps` warps. `fit` of them are
# on an SM at once, which takes about `wave` ns and, for each chunk of K, `alone` ns and `each` ns a
# program. At most 111 KB of shared memory.
TILES = [dict(BM=8, BN=64, stages=3, warps=4, fit=7, wave=66, alone=290, each=302),
         dict(BM=8, BN=64, stages=4, warps=4, fit=7, wave=355, alone=81, each=357),
         dict(BM=16, BN=64, stages=4, warps=4, fit=6, wave=94, alone=198, each=210, maxnreg=80),
         dict(BM=32, BN=64, stages=4, warps=4, fit=4, wave=1480, alone=208, each=176),
         dict(BM=32, BN=64, stages=3, warps=4, fit=5, wave=249, alone=680, each=96),
         dict(BM=64, BN=64, stages=3, warps=4, fit=3, wave=398, alone=442, each=74),
         dict(BM=64, BN=64, stages=4, warps=4, fit=2, wave=366, alone=291, each=100),
         dict(BM=128, BN=64, stages=3, warps=4, fit=2, wave=1620, alone=396, each=162),
         dict(BM=128, BN=64, stages=2, warps=4, fit=3, wave=2200, alone=501, each=216, maxnreg=168),
         dict(BM=128, BN=128, stages=2, warps=8, fit=2, wave=268, alone=1492, each=2, maxnreg=128)]
# float32 partial sums, int32 arrival counters of splits and flags of adapters that a launch may use
PARTIALS, COUNTERS, FLAGS = 1 << 22, 1 << 17, 1 << 14
FEW = 896  # up to this many rows the kernel is, as a rule, faster than cuBLAS with what is decoded
SPACE = {}  # device -> [partial sums, arrival counters, dequantized weight]


def sms(device):
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def space(device):
    """The device's buffers, shared by all layers (two streams at once would collide), made on the
    first call: 17 MB. The counters, and the flags behind them, are zero between kernels. The third,
    the scratch for a dequantized weight, grows to the largest weight that needed it
    (memory.gemm_scratch)."""
    if device not in SPACE:
        SPACE[device] = [torch.empty(PARTIALS, device=device),
                         torch.zeros(COUNTERS + FLAGS, dtype=torch.int32, device=device),
                         torch.empty(0, dtype=torch.bfloat16, device=device)]
    return SPACE[device]


def parts(chunks, most):
    """Into how many parts, at most, `chunks` can be cut so that none is empty."""
    return -(-chunks // -(-chunks // most))


def ranges(N, K, cores):
    """In how many ranges of K, of at least 12 chunks, an exact sum is taken, whatever M is: as many
    as give three programs of 64 outputs to an SM."""
    chunks = -(-K // CHUNK)
    return parts(chunks, max(1, min(3 * cores // -(-N // 64), chunks // 12)))


@functools.lru_cache(1 << 12)
def plan(M, N, K, cores, exact=False):
    """The tile of TILES, with its split of K, that should be the fastest for this shape on `cores`
    SMs. exact: K is split in `ranges`, or each program computes the sum of one range after another.

    Programs run in waves of as many as fit. Splits fill one wave better, at the cost of the partial
    sums that they write and read. The times were fitted to what a decode step of ten blocks with an
    adapter, replayed as a CUDA graph, takes with each of many tiles in place of this one
    (results/tiles_h200.json), and to kernels of 256 to 2,048 rows (results/gemm_tiles_h200.json):
    for the choice to be right, not each time by itself."""
    found, blocks, most = [], -(-K // CHUNK), max(8, 1 << (M - 1).bit_length())
    sums = ranges(N, K, cores) if exact else 1
    for t in TILES:  # the sums of two ranges take the registers of two programs of 128 x 128
        if t["BM"] > most or t["BN"] == 128 and sums > 1:
            continue
        MT, partial, slots = -(-M // t["BM"]), t["BM"] * t["BN"], t["fit"] * cores
        tiles = -(-N // t["BN"]) * MT
        waves = tiles // slots
        whole = waves * slots // MT  # rows of tiles in full waves; what is left may be split
        rest = tiles - whole * MT
        # places of programs that make x A^T first (adapter_work), and of earlier kernels', fitted
        taken = max(32, M) if M <= 64 else 2048 // t["BM"]

        def wave(chunks, programs, t=t):  # ns on an SM
            return t["wave"] + chunks * (t["alone"] + programs * t["each"])

        for split in sorted({1, sums} if exact else {parts(blocks, n) for n in range(1, 17)}):
            programs = rest * split
            if split > 1 and (programs > slots or programs * partial > PARTIALS or exact and whole):
                break
            ns = waves * wave(blocks, t["fit"])
            if rest:
                ns += wave(-(-blocks // split), min(t["fit"], max(1, programs / cores)))
            # the last program reads all splits' sums of a tile, an SM writes those of its programs
            ns += (split > 1) * (1300 + partial * (0.1 * split + 0.17 * programs / cores))
            ns += 2640 * (slots - taken < programs <= slots)  # some of them wait for a place
            found.append((ns, t | {"split": split, "ranges": max(1, sums // split),
                                   "whole": whole if split > 1 else 0}))
    return min(found, key=lambda timed: timed[0])[1]
