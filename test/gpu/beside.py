#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A matrix product beside steps that may use 24 multiprocessors, against the same product confined to the others.

usage: beside.py [RANKS]
"""

import os
import statistics
import sys

import buffer
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from buffer import adopted

import heddle
import heddle.torch

BUDGET, TOKENS, HIDDEN, TOP_K, SIZE, PRODUCTS, ROUNDS = 24, 128, 7168, 8, 8192, 20, 7
TILE_M, TILE_N, TILE_K = 128, 256, 64


@triton.jit
def multiply(a, b, out, size: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr):
    """out = a @ b, the tiles shared by as many programs as there are."""
    tiles: tl.constexpr = (size // rows) * (size // columns)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        group = tile // (8 * (size // columns))
        m = (group * 8 + tile % 8) * rows + tl.arange(0, rows)
        n = tile // 8 % (size // columns) * columns + tl.arange(0, columns)
        k = tl.arange(0, depth)
        acc = tl.zeros((rows, columns), dtype=tl.float32)
        for first in range(0, size, depth):
            left = tl.load(a + m[:, None] * size + (first + k)[None, :])
            right = tl.load(b + (first + k)[:, None] * size + n[None, :])
            acc = tl.dot(left, right, acc)
        tl.store(out + m[:, None] * size + n[None, :], acc.to(tl.bfloat16))


def step_graph() -> tuple[torch.cuda.CUDAGraph, tuple]:
    """50 steps, and what they need."""
    ranks = dist.get_world_size()
    experts = 64 * ranks
    options = {"format": heddle.MoeFormat.FP8, "memory": heddle.MoeMemory.CUDA, "lanes": 1}
    device = torch.cuda.current_device()
    moe = heddle.Moe(adopted(), experts, TOP_K, HIDDEN, TOKENS, cuda_device=device, cuda_blocks=BUDGET, **options)
    received = moe.new_received()
    x = torch.randn(TOKENS, HIDDEN, device="cuda").to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, device="cuda")[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    outputs = torch.randn(received.rows.shape, device="cuda", dtype=torch.bfloat16)
    sums = torch.empty_like(x)

    def step() -> None:
        handle, _ = moe.dispatch(x, ids, received, weights=weights)
        moe.combine(handle, outputs, sums)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(50):
            step()
    return graph, (moe, received, x, ids, weights, outputs, sums)


def products(a: torch.Tensor, out: torch.Tensor, programs: int) -> float:
    """Milliseconds of a product by so many programs, of some in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(PRODUCTS):
        multiply[(programs,)](a, a, out, SIZE, TILE_M, TILE_N, TILE_K, num_warps=8, num_stages=4)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / PRODUCTS


def rank_main() -> None:
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("mooncake-cpu")
    a = torch.randn(SIZE, SIZE, device="cuda").to(torch.bfloat16)
    out, wanted = torch.empty_like(a), a @ a
    everything = torch.cuda.get_device_properties().multi_processor_count
    others = everything - BUDGET
    graph, kept = step_graph()
    side = torch.cuda.Stream(priority=-1)
    times: dict[str, list[float]] = {"alone": [], "confined": [], "beside": [], "steps alone": [], "steps": []}
    for _ in range(ROUNDS):
        times["alone"].append(products(a, out, everything))
        times["confined"].append(products(a, out, others))
        assert torch.allclose(out.float(), wanted.float(), atol=4, rtol=0.02)
        for kind in ("steps alone", "steps"):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(side):
                begin.record()
                for _ in range(20):
                    graph.replay()
                end.record()
            if kind == "steps":
                times["beside"].append(products(a, out, others))
                assert not end.query(), "the steps ended before the products did"
            torch.cuda.synchronize()
            times[kind].append(begin.elapsed_time(end) * 1000 / (20 * 50))
    alone, confined, beside, steps_alone, steps = (statistics.median(each) for each in times.values())
    slower = beside / confined - 1
    print(
        f"  rank {dist.get_rank()}: product by {everything} multiprocessors {alone:.3f} ms, by {others} {confined:.3f},"
        f" beside steps within {BUDGET} {beside:.3f}: {100 * slower:+.1f} %;"
        f" a step {steps_alone:.1f} us, beside {steps:.1f}",
        flush=True,
    )
    dist.barrier()
    kept[0].close()
    dist.destroy_process_group()
    if slower > 0.1:
        sys.exit("the product slows by more than 10 %")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main()
    else:
        sys.argv[1:] = sys.argv[1:] or [str(torch.cuda.device_count())]
        sys.exit(buffer.main(__file__, "a product beside steps"))
