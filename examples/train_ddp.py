# SPDX-License-Identifier: Apache-2.0
"""DDP training that loses a rank by kill -9, goes on, and takes a replacement in.

    torchrun --nproc-per-node 4 examples/train_ddp.py        (or: heddle run -n 4 -- python examples/train_ddp.py)

Each process that the launcher starts only watches: it runs the trainer, and runs it again if it is killed.
"""

import os
import signal
import subprocess
import sys


def watch() -> None:
    life = 0
    while (code := subprocess.call([sys.executable, __file__], env=os.environ | {"LIFE": str(life)})) < 0:
        print(f"rank {os.environ['RANK']} was killed by {signal.Signals(-code).name}; starting it again", flush=True)
        life += 1
    sys.exit(code)


def train(rank: int, size: int, newcomer: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from mooncake import pg

    torch.set_num_threads(1)
    options = pg.MooncakeBackendOptions(size, newcomer)
    dist.init_process_group("mooncake-cpu", rank=rank, world_size=size, pg_options=options)
    group = dist.group.WORLD
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    curve: list[float] = []
    returned = -1  # step at which the replacement came
    if newcomer:
        pg.join_group(group)  # returns when the others have admitted us

    def meet() -> tuple[nn.Module, torch.optim.Optimizer]:
        """All ranks, at the same step: rank 0 gives its history and, inside DDP, its weights."""
        nonlocal curve, returned
        told = [curve, returned]
        dist.broadcast_object_list(told, 0)
        curve, returned = told
        wrapped = DistributedDataParallel(net)
        return wrapped, torch.optim.SGD(wrapped.parameters(), 0.05)

    wrapped, optimizer = meet()
    while returned < 0 or len(curve) < returned + 50:
        step = len(curve)
        if rank == 1 and step == 20 and not newcomer:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (wrapped(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lost = [r for r, active in enumerate(pg.get_active_ranks(group).tolist()) if not active]
        ready = bool(lost) and all(pg.get_peer_state(group, lost))
        # The mean over the ranks that took part, and whether all of them see the replacement.
        shared = torch.tensor([loss.item(), float(ready)])
        dist.all_reduce(shared, dist.ReduceOp.AVG)
        curve.append(shared[0].item())
        if shared[1] == 1:
            pg.recover_ranks(group, lost)
            returned = len(curve)
            wrapped, optimizer = meet()
    curves: list[list[float]] = [[] for _ in range(size)]
    dist.all_gather_object(curves, curve)
    assert all(other == curve for other in curves), "the curves differ"
    if rank == 0:
        print(f"{len(curve)} steps, replacement at {returned}, loss {curve[0]:.3f} -> {curve[-1]:.3f}, equal on all")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "LIFE" not in os.environ:
        watch()
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LIFE"]) > 0)
