# SPDX-License-Identifier: Apache-2.0
"""The measurements of `heddle perf` over torch.distributed's gloo: same operations, sizes and timing.

    gloo_perf.py SECONDS OP,OP,... BYTES,BYTES,...     as a rank, under a launcher
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist

ITERS_MIN, ITERS_MAX = 5, 5000


def make_call(op, size, rank, ranks):
    """A function without arguments that does the operation once, and the bytes it moves."""
    if op == "allreduce":
        data = torch.zeros(max(size // 4, 1), dtype=torch.float32)
        return lambda: dist.all_reduce(data), size
    if op == "broadcast":
        data = torch.zeros(size, dtype=torch.uint8)
        return lambda: dist.broadcast(data, 0), size
    if op in ("allgather", "alltoall"):
        block = max(size // ranks, 1)
        whole = torch.zeros(block * ranks, dtype=torch.uint8)
        if op == "allgather":
            part = torch.zeros(block, dtype=torch.uint8)
            return lambda: dist.all_gather_into_tensor(whole, part), block * ranks
        other = torch.zeros(block * ranks, dtype=torch.uint8)
        return lambda: dist.all_to_all_single(whole, other), block * ranks
    if op == "barrier":
        return dist.barrier, 0
    data = torch.zeros(max(size, 1), dtype=torch.uint8)
    return (lambda: pingpong(data, rank)), size


def pingpong(data, rank):
    if rank == 0:
        dist.send(data, 1)
        dist.recv(data, 1)
    elif rank == 1:
        dist.recv(data, 0)
        dist.send(data, 0)


def time_calls(call, iters, halves):
    times = []
    before = time.perf_counter_ns()
    for _ in range(iters):
        call()
        now = time.perf_counter_ns()
        times.append((now - before) / 1e3 / halves)
        before = now
    return times


def measure(op, size, seconds, rank, ranks):
    call, moved = make_call(op, size, rank, ranks)
    halves = 2 if op == "pingpong" else 1
    warm = time_calls(call, 3 if size >= 1 << 20 else 20, 1)
    mean = sum(warm[len(warm) // 2:]) / (len(warm) - len(warm) // 2)
    iters = torch.tensor([min(max(int(seconds * 1e6 / mean), ITERS_MIN), ITERS_MAX)])
    dist.broadcast(iters, 0)
    dist.barrier()
    times = torch.tensor(time_calls(call, int(iters), halves), dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    times = times.sort().values
    if rank == 0:
        print(json.dumps({"op": op, "ranks": ranks, "bytes": moved, "iters": int(iters), "min_us": float(times[0]),
                          "p50_us": float(times[(len(times) - 1) // 2]),
                          "p99_us": float(times[int((len(times) - 1) * 0.99)])}), flush=True)


def main(seconds, ops, sizes):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for op in ops.split(","):
        for size in sizes.split(","):
            measure(op, int(size), float(seconds), rank, ranks)
            if op == "barrier":
                break
    dist.destroy_process_group()


main(*sys.argv[1:])
