# SPDX-License-Identifier: Apache-2.0
"""FSDP2 training on CPU.

torchrun --nproc-per-node 2 examples/train_fsdp.py        (or: heddle run -n 2 -- python examples/train_fsdp.py)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mooncake import pg  # noqa: F401  registers the backend


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mooncake-cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (size,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    first = last = 0.0
    for step in range(60):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        first, last = first or mean.item(), mean.item()
    if rank == 0:
        kept = sum(p.to_local().numel() for p in net.parameters())
        whole = sum(p.numel() for p in net.parameters())
        print(f"rank 0 keeps {kept} of {whole} parameters; loss {first:.3f} -> {last:.3f}")
    assert last < first / 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
