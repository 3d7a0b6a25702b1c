"""
Benchmarks: the FP4 GEMM (`kernels`). Each states the ceiling it measured before the number, and ends with one line of JSON.

`kernels` times marlin_triton against cuBLAS on bfloat16 weights, on the linear layers of Qwen2.5 7B and 32B. Weights rotate
through more than 200 MB, so the L2 cache holds none of them when their turn comes, and the launches of a measurement are one CUDA
graph, as in a rollout: what is measured is the GPU, not Python.

    python bench.py kernels                     # all shapes, about three minutes on an H100
    python bench.py kernels --shapes 7b --m 1,8,64
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl


@triton.jit
def read(p, out, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.int32)
    for i in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK * 4):
        for j in tl.static_range(4):
            at = i + j * tl.num_programs(0) * BLOCK + tl.arange(0, BLOCK)
            acc += tl.load(p + at, mask=at < n, other=0)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def graph_time(calls, repeats=5):
    """Median microseconds of one call, the `calls` (functions of no argument) captured back to back in one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:  # compile, and let cuBLAS pick its workspace, before the capture
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def read_ceiling(megabytes=512):
    """GB/s of a kernel that only reads: the ceiling of every GEMM with few rows."""
    data = torch.zeros(megabytes << 18, dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(sms * 8, dtype=torch.int32, device="cuda")
    us = min(graph_time([lambda g=g, b=b: read[(sms * g,)](data, out, data.numel(), BLOCK=b, num_warps=b // 512)] * 3)
             for g, b in ((2, 4096), (4, 2048), (8, 2048)))
    return data.numel() * 4 / us / 1e3
