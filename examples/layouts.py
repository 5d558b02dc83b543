# SPDX-License-Identifier: Apache-2.0
"""The layouts that serving stacks build from groups, each in a few lines, checked against one process.

torchrun --nproc-per-node 4 examples/layouts.py        (or: heddle run -n 4 -- python examples/layouts.py)
"""

import functools

import torch
import torch.distributed as dist

from mooncake import pg  # noqa: F401  registers the backend


def tensor_parallel(rank: int, size: int, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The first matrix is split by columns, the second by rows: one all_reduce for the pair."""
    part = torch.relu(x @ w.chunk(size, 1)[rank]) @ v.chunk(size, 0)[rank]
    dist.all_reduce(part)
    return part


def pipeline_parallel(rank: int, size: int, x: torch.Tensor, layers: list[torch.Tensor]) -> torch.Tensor:
    """One layer a rank; micro-batches follow each other through the ranks."""
    sent, done = [], []
    for micro in x.chunk(4):
        here = micro.clone()
        if rank > 0:
            dist.recv(here, rank - 1)
        here = torch.tanh(here @ layers[rank])
        done.append(here)
        if rank < size - 1:
            sent.append(dist.isend(here, rank + 1))
    for work in sent:
        work.wait()
    out = torch.cat(done)
    dist.broadcast(out, size - 1)
    return out


def data_parallel(rank: int, size: int, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Requests are divided, answers collected."""
    out = torch.empty(x.size(0), w.size(1))
    dist.all_gather_into_tensor(out, x.chunk(size)[rank] @ w)
    return out


def expert_parallel(rank: int, size: int, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """One expert a rank; each token goes to the expert of its number, and comes back. (Buffer does it with top-k.)"""
    mine = x.chunk(size)[rank]
    owner = torch.arange(mine.size(0)) * (rank + 1) % size
    order = torch.argsort(owner, stable=True)
    give = torch.bincount(owner, minlength=size)
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give)
    arrived = torch.empty(int(take.sum()), x.size(1))
    dist.all_to_all_single(arrived, mine[order], take.tolist(), give.tolist())
    back = torch.empty_like(mine)
    dist.all_to_all_single(back, arrived * experts[rank], give.tolist(), take.tolist())
    out = torch.empty_like(back)
    out[order] = back
    assert torch.allclose(out, mine * experts[owner][:, None])
    return out


def prefill_and_decode(rank: int, size: int, prompt: torch.Tensor) -> None:
    """Two services with a group each; a prefill rank hands its cache to its decode rank."""
    half = size // 2
    prefill, decode = dist.new_group(list(range(half))), dist.new_group(list(range(half, size)))
    cache = prompt * (rank % half + 1)
    if rank < half:
        dist.all_reduce(cache, group=prefill)  # work inside the service
        dist.send(cache, rank + half)
    else:
        dist.recv(cache, rank - half)
        dist.all_reduce(cache, group=decode)
        assert torch.allclose(cache, prompt * half * half * (half + 1) / 2)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mooncake-cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights everywhere
    x, w, v = torch.randn(32, 16), torch.randn(16, 8 * size) / 4, torch.randn(8 * size, 16) / 4
    layers = [torch.randn(16, 16) / 4 for _ in range(size)]
    assert torch.allclose(tensor_parallel(rank, size, x, w, v), torch.relu(x @ w) @ v, atol=1e-4)
    expected = functools.reduce(lambda h, layer: torch.tanh(h @ layer), layers, x)
    assert torch.allclose(pipeline_parallel(rank, size, x, layers), expected, atol=1e-5)
    assert torch.allclose(data_parallel(rank, size, x, w), x @ w, atol=1e-4)
    expert_parallel(rank, size, x, torch.arange(1.0, size + 1))
    prefill_and_decode(rank, size, x)
    dist.barrier()
    if rank == 0:
        print("tensor, pipeline, data, expert parallel, prefill and decode: all right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
