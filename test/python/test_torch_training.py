# SPDX-License-Identifier: Apache-2.0
"""What is built on process groups works on ours: DDP, FSDP2, meshes, sharded optimizers, compiled collectives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import run


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def batches(size: int) -> list[torch.Tensor]:
    return [torch.randn(8, 16, generator=torch.Generator().manual_seed(r)) for r in range(size)]


def mean_gradients(base: nn.Module, size: int) -> list[torch.Tensor]:
    """Of all ranks' losses, computed here."""
    sums: list[torch.Tensor] = []
    for batch in batches(size):
        local = copy.deepcopy(base)
        local(batch).square().mean().backward()
        grads = [p.grad for p in local.parameters()]
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else [g.clone() for g in grads]
    return [g / size for g in sums]


def ddp(rank: int, size: int) -> list[float]:
    base = model()
    expected = mean_gradients(base, size)
    wrapped = DistributedDataParallel(model(seed=rank), bucket_cap_mb=0.001)  # rank 0's weights are given to all
    wrapped(batches(size)[rank]).square().mean().backward()
    for p, grad in zip(wrapped.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-6)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        if step % 3 == 2:
            with wrapped.no_sync():
                wrapped(batches(size)[rank]).square().mean().backward()
        loss = wrapped(batches(size)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    # Uneven inputs: who has none left stands in, and gradients are divided by the number of those who have some.
    with wrapped.join(divide_by_initial_world_size=False):
        for _ in range(rank + 1):
            wrapped.zero_grad()
            wrapped(batches(size)[rank]).square().mean().backward()
    if rank == size - 1:
        alone = copy.deepcopy(wrapped.module)
        alone.zero_grad()
        alone(batches(size)[rank]).square().mean().backward()
        for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    wrapped(batches(size)[rank]).square().mean().backward()
    return losses


def test_ddp() -> None:
    losses = run(3, ddp)
    assert losses[0] == losses[1] == losses[2] and losses[0][-1] < losses[0][0]


def fsdp(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    base = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    torch.manual_seed(1)
    for p in base.parameters():
        nn.init.normal_(p)
    expected = mean_gradients(base, size)
    sharded = copy.deepcopy(base)
    mesh = init_device_mesh("cpu", (size,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(batches(size)[rank]).square().mean().backward()
    for p, grad in zip(sharded.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5)
    torch.optim.Adam(sharded.parameters()).step()


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch shards on GPUs only")
def test_fsdp2() -> None:
    run(2, fsdp)


def meshes(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].get_local_rank() == rank % 2 and mesh["dp"].get_local_rank() == rank // 2
    t = torch.full((2,), float(rank))
    dist.all_reduce(t, group=mesh.get_group("tp"))
    assert (t == (1 if rank < 2 else 5)).all()
    whole = torch.arange(32.0).view(8, 4)
    sharded = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    assert sharded.to_local().shape == (4, 4) and torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh["tp"], [Replicate()]).to_local(), whole)
    assert torch.equal(sharded.redistribute(mesh["tp"], [Shard(1)]).full_tensor(), whole)
    assert torch.equal((sharded @ distribute_tensor(whole.t().contiguous(), mesh["tp"], [Replicate()])).full_tensor(),
                       whole @ whole.t())  # fmt: skip


def test_meshes_and_dtensor() -> None:
    run(4, meshes)


def others(rank: int, size: int) -> Any:
    """Sharded optimizer, gradients through collectives, compiled collectives."""
    import torch.distributed._functional_collectives as funcol
    import torch.distributed.nn.functional as dist_nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    wrapped(batches(size)[rank]).square().mean().backward()
    optimizer.step()
    x = torch.full((2,), float(rank), requires_grad=True)
    dist_nn.all_reduce(x).sum().backward()
    assert (x.grad == size).all()

    def doubled(t: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(t, "sum", dist.group.WORLD) * 2

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    assert (compiled(torch.ones(3)) == 2 * size).all()

    def broken(t: torch.Tensor) -> torch.Tensor:
        dist.barrier()  # not part of a graph: it is called, and our code in it is not compiled
        return t + 1

    assert (torch.compile(broken, backend="eager")(torch.ones(3)) == 2).all()

    def chained(future: Any) -> torch.Tensor:
        second = dist.all_reduce(future.value()[0], async_op=True)
        assert second is not None
        return second.get_future().wait()[0]

    first = dist.all_reduce(torch.ones(2), async_op=True)
    assert first is not None
    assert (first.get_future().then(chained).wait() == size * size).all()
    return [p.sum().item() for p in wrapped.parameters()]


def test_others() -> None:
    found = run(2, others)
    assert found[0] == found[1]
