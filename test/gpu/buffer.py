#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Buffer and the operators on CUDA tensors against the same calls on CPU tensors, bit by bit; two ranks or one a GPU.

usage: buffer.py [RANKS]
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import heddle
import heddle.torch

H, M, E, K = 512, 32, 16, 8


def inputs(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    x = torch.randn(tokens, H, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    return x, ids, torch.rand(tokens, K, generator=generator)


def same(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    got = got.cpu()
    if got.dtype != wanted.dtype or not torch.equal(
        got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    ):
        raise AssertionError(f"rank {dist.get_rank()}: {name} differ")


def same_rows(name: str, got: torch.Tensor, wanted: torch.Tensor, counts: torch.Tensor) -> None:
    for expert, count in enumerate(counts.tolist()):
        same(f"{name} of expert {expert}", got[expert, :count], wanted[expert, :count])


def step(
    buffer: heddle.torch.Buffer, device: str, seed: int, how: str, fp8: bool, late: bool
) -> tuple[torch.Tensor, ...]:
    """rows, scales, counts, sums of one step."""
    x, ids, weights = (t.to(device) for t in inputs(seed, M - seed % 5))
    active = torch.ones(dist.get_world_size(), dtype=torch.int32, device=device)
    hook, aside = how == "hook", how == "aside"
    given = {"return_recv_hook": hook, "async_finish": aside}
    out, counts, handle, event, receive = buffer.dispatch(
        x, ids, active, M, E, 30_000_000, use_fp8=fp8, topk_weights=None if late else weights, **given
    )
    receive()
    event.current_stream_wait()
    rows, scales = out if fp8 else (out, torch.zeros(1))
    outputs = rows.float().to(torch.bfloat16)
    if how == "zero copy":
        buffer.get_next_combine_buffer(handle).copy_(outputs)
    sums, event, receive = buffer.combine(
        outputs, ids, weights, active, 30_000_000, handle, zero_copy=how == "zero copy", **given
    )
    receive()
    event.current_stream_wait()
    assert active.tolist() == [1] * dist.get_world_size()
    assert not handle.missing.any()
    return rows, scales, counts, sums


def compare_buffer(buffer: heddle.torch.Buffer) -> None:
    for seed, how in enumerate(("plain", "hook", "aside", "zero copy") * 3):
        for fp8, late in ((True, False), (False, False), (True, True)):
            wanted = step(buffer, "cpu", seed, "hook" if how == "hook" else "plain", fp8, late)
            got = step(buffer, "cuda", seed, how, fp8, late)
            torch.cuda.synchronize()
            same("counts", got[2], wanted[2])
            same_rows("rows", got[0], wanted[0], wanted[2])
            if fp8:
                same_rows("scales", got[1], wanted[1], wanted[2])
                assert got[1].stride(1) == 1
            same("sums", got[3], wanted[3])


def compare_graph(buffer: heddle.torch.Buffer) -> None:
    """A captured layer, replayed with other routing in place."""
    x, ids, weights = (t.cuda() for t in inputs(50, M))
    active = torch.ones(dist.get_world_size(), dtype=torch.int32, device="cuda")

    def layer() -> torch.Tensor:
        (rows, _), _, handle, _, _ = buffer.dispatch(x, ids, active, M, E, topk_weights=weights)
        return buffer.combine(rows.float().to(torch.bfloat16), ids, weights, active, -1, handle)[0]

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layer()
    for seed in range(51, 61):
        for tensor, fresh in zip((x, ids, weights), inputs(seed, M), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        cpu_x, cpu_ids, cpu_weights = inputs(seed, M)
        (rows, _), _, handle, _, _ = buffer.dispatch(cpu_x, cpu_ids, None, M, E, topk_weights=cpu_weights)
        outputs = rows.float().to(torch.bfloat16)
        same("sums of a replay", out, buffer.combine(outputs, cpu_ids, cpu_weights, None, -1, handle)[0])


def compare_operators(protocol: heddle.MoeProtocol) -> None:
    device = torch.cuda.current_device()
    memory = {"memory": heddle.MoeMemory.CUDA, "cuda_device": device, "protocol": protocol}
    moe = heddle.Moe(adopted(), E, K, H, M, dtype=heddle.DType.BF16, **memory)
    status = moe.status()
    ran = {status["dispatch_protocol"], status["combine_protocol"]}
    assert ran == {protocol or heddle.MoeProtocol.LL}, f"asked for {protocol}, ran {ran}"
    if torch.cuda.device_count() > 1:
        elsewhere = [t.to(f"cuda:{(device + 1) % torch.cuda.device_count()}") for t in inputs(69, M)]
        try:
            moe.dispatch(elsewhere[0], elsewhere[1], moe.new_received())
            raise AssertionError("rows of another device were taken")
        except TypeError:
            pass
    exchange = heddle.torch.register_exchange(moe)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, _, handle = torch.ops.heddle.dispatch(exchange, x, ids, weights)
        return torch.ops.heddle.combine(exchange, handle, rows * 2, x.size(0))

    on_host = heddle.Moe(adopted(), E, K, H, M, dtype=heddle.DType.BF16)
    reference = heddle.torch.register_exchange(on_host)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(70, 74):
        cpu = inputs(seed, M)
        x, ids, weights = (t.cuda() for t in cpu)
        same("sums of a compiled layer", compiled(x, ids, weights), layer(x, ids, weights).cpu())
        rows, _, _, handle = torch.ops.heddle.dispatch(reference, *cpu)
        wanted = torch.ops.heddle.combine(reference, handle, rows * 2, M)
        same(f"sums by {protocol}", layer(x, ids, weights), wanted)
    on_host.close()
    moe.close()


def adopted() -> object:
    from heddle.torch._buffer import _Adopted

    return _Adopted(dist.group.WORLD)


def rank_main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("mooncake-cpu")
    buffer = heddle.torch.Buffer(dist.group.WORLD)
    compare_buffer(buffer)
    compare_graph(buffer)
    for protocol in heddle.MoeProtocol:
        compare_operators(protocol)
    dist.barrier()
    buffer.close()
    dist.destroy_process_group()


def main(path: str = __file__, title: str = "Buffer on CUDA tensors") -> int:
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        return 77
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else max(2, torch.cuda.device_count())
    environment = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
    }
    start = time.monotonic()
    children = [subprocess.Popen([sys.executable, path], env=environment | {"RANK": str(r)}) for r in range(ranks)]
    failed = sum(child.wait() != 0 for child in children)
    print(f"{title}, {ranks} ranks: {failed} wrong, {time.monotonic() - start:.1f} s")
    return failed


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main()
    else:
        sys.exit(main())
