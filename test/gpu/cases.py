#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hard cases of Buffer and Moe on GPUs: full memory, offsets above 2^31, a busy GPU, no waiting host, mixed replays.

usage: cases.py [RANKS]
"""

import os
import random
import sys
import time

import buffer
import torch
import torch.distributed as dist
from buffer import E, M, adopted, inputs, same, step

import heddle
import heddle.torch


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text}", flush=True)


def exchange(experts: int, top_k: int, hidden: int, tokens: int) -> heddle.Moe:
    options = {"memory": heddle.MoeMemory.CUDA, "cuda_device": torch.cuda.current_device()}
    return heddle.Moe(adopted(), experts, top_k, hidden, tokens, **options)


def full_memory() -> None:
    """Creation says what was asked and what is free, on all ranks, and succeeds when there is room again."""
    torch.cuda.empty_cache()
    dist.barrier()
    first = dist.get_rank() < torch.cuda.device_count()  # of the ranks that share its GPU
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (96 << 20) if first else 0, dtype=torch.uint8, device="cuda")
    dist.barrier()
    try:
        exchange(64, 8, 7168, 4096)
        raise AssertionError("an exchange was created in no memory")
    except heddle.Error as error:
        text = str(error)
        assert "bytes asked" in text or "rank" in text, text
        say(text)
    dist.barrier()
    del hog
    torch.cuda.empty_cache()
    exchange(64, 8, 7168, 4096).close()
    say("full memory: refused, then created")


def large_offsets() -> None:
    """All tokens of all ranks go to the very last expert, whose last row lies above 2^31 elements."""
    ranks, tokens, hidden = dist.get_world_size(), 1024, 7168
    local = (1 << 31) // (ranks * tokens * hidden) + 8
    moe = exchange(local * ranks, 1, hidden, tokens)
    received = moe.new_received()
    assert received.rows.numel() > 1 << 31
    rows = []
    for r in range(ranks):
        generator = torch.Generator().manual_seed(500 + r)
        rows.append(torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16).cuda())
    mine = rows[dist.get_rank()]
    ids = torch.full((tokens, 1), local * ranks - 1, dtype=torch.int64, device="cuda")
    handle, _ = moe.dispatch(mine, ids, received, weights=torch.ones(tokens, 1, device="cuda"))
    sums = torch.zeros_like(mine)
    moe.combine(handle, received.rows, sums)
    torch.cuda.synchronize()
    if dist.get_rank() == ranks - 1:
        same("rows of the last expert", received.rows[-1], torch.cat(rows).cpu())
    same("sums of the last expert", sums, mine.cpu())
    moe.close()
    say(f"{received.rows.numel()} elements, the last row written and read")


def busy_gpu(layer: heddle.torch.Buffer) -> None:
    """Steps, the first of an exchange too, beside products that fill the GPU."""
    side = torch.cuda.Stream()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    wanted = [step(layer, "cpu", seed, "plain", True, False) for seed in range(4)]
    torch.cuda.synchronize()

    def fill() -> None:
        with torch.cuda.stream(side):
            for _ in range(800):
                torch.mm(a, a, out=out)

    fill()
    fresh = heddle.torch.Buffer(dist.group.WORLD)
    same("sums of a first step", step(fresh, "cuda", 0, "plain", True, False)[3], wanted[0][3])
    steps, over = 0, False
    fill()
    while not over and steps < 100:
        got = step(fresh, "cuda", steps % 4, "plain", True, False)
        torch.cuda.current_stream().synchronize()
        same("counts beside products", got[2], wanted[steps % 4][2])
        same("sums beside products", got[3], wanted[steps % 4][3])
        any_over = torch.tensor([int(side.query())])
        dist.all_reduce(any_over, dist.ReduceOp.MAX)  # all ranks end together
        over = bool(any_over)
        steps += not over
    torch.cuda.synchronize()
    fresh.close()
    assert steps > 0
    say(f"{steps} steps beside products that fill the GPU")


def no_waiting(layer: heddle.torch.Buffer) -> None:
    """Steps are queued behind a kernel that runs for long: the host never waits, counts are read on the device only."""
    x, ids, weights = (t.cuda() for t in inputs(300, M))

    def layer_step() -> torch.Tensor:
        (rows, _), counts, handle, _, _ = layer.dispatch(x, ids, None, M, E, topk_weights=weights)
        there = torch.arange(rows.size(1), device="cuda") < counts[:, None]
        outputs = torch.where(there[:, :, None], rows.float(), 0).to(torch.bfloat16)
        return layer.combine(outputs, ids, weights, None, -1, handle)[0]

    cpu = inputs(300, M)
    (rows, _), _, handle, _, _ = layer.dispatch(cpu[0], cpu[1], None, M, E, topk_weights=cpu[2])
    wanted = layer.combine(rows.float().to(torch.bfloat16), cpu[1], cpu[2], None, -1, handle)[0]
    for _ in range(20):
        layer_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(2_000_000_000)  # cycles: a second
    start = time.monotonic()
    sums = [layer_step() for _ in range(20)]
    took = time.monotonic() - start
    busy = not torch.cuda.current_stream().query()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert busy, f"20 steps were queued after {took:.2f} s only"
    for got in sums:
        same("sums of a queued step", got, wanted)
    say(f"20 steps queued in {took * 1e3:.1f} ms behind a kernel that still ran")


def mixed_graphs(layer: heddle.torch.Buffer) -> None:
    """8 graphs with as many numbers of tokens, of one buffer, replayed in mixed order."""
    graphs, outs, wanted = [], [], []
    for n, tokens in enumerate((1, 2, 5, 8, 13, 21, 27, M)):
        x, ids, weights = inputs(200 + n, tokens)
        (rows, _), _, handle, _, _ = layer.dispatch(x, ids, None, M, E, topk_weights=weights)
        wanted.append(layer.combine(rows.float().to(torch.bfloat16), ids, weights, None, -1, handle)[0])
        x, ids, weights = x.cuda(), ids.cuda(), weights.cuda()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            (rows, _), _, handle, _, _ = layer.dispatch(x, ids, None, M, E, topk_weights=weights)
            outs.append(layer.combine(rows.float().to(torch.bfloat16), ids, weights, None, -1, handle)[0])
        graphs.append((graph, x, ids, weights))
    order = random.Random(3)
    for i in range(10_000):
        n = order.randrange(8)
        graphs[n][0].replay()
        if i % 50 == 49:
            torch.cuda.synchronize()
            same(f"sums of replay {i}", outs[n], wanted[n])
            outs[n].zero_()
    say("10000 replays of 8 graphs in mixed order")


def rank_main() -> None:
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("mooncake-cpu")
    layer = heddle.torch.Buffer(dist.group.WORLD)
    for seed in range(2):
        step(layer, "cuda", seed, "plain", True, False)
    no_waiting(layer)
    mixed_graphs(layer)
    busy_gpu(layer)
    large_offsets()
    full_memory()
    dist.barrier()
    layer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main()
    else:
        sys.exit(buffer.main(__file__, "hard cases on GPUs"))
