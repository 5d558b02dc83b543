#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors of each rank as windows: the others' kernels read and write them; two ranks or one a GPU.

usage: windows.py [RANKS]
"""

import ctypes
import os
import sys
from collections.abc import Callable

import buffer
import torch

import heddle
from heddle._abi import lib
from heddle._error import check


def refused(status: heddle.Status, what: str, call: Callable[[], None]) -> None:
    try:
        call()
    except heddle.Error as error:
        assert error.status == status, f"{what}: {error}"
    else:
        raise AssertionError(f"{what} was taken")


def adopt(context: heddle.Context, address: int, nbytes: int) -> None:
    check(context.call(lib.hdl_window_adopt, address, nbytes, ctypes.c_void_p()))


def rank_main() -> None:
    world = heddle.init()
    context, rank, ranks = world.context, world.rank, world.size
    torch.cuda.set_device(rank % torch.cuda.device_count())
    # A place within an allocation: what lies around it must stay.
    whole = torch.full((ranks + 2, 1 << 20), 255, dtype=torch.uint8, device="cuda")
    mine = whole[1:-1]
    window = heddle.DeviceWindow(context, mine)
    refused(heddle.Status.EINVAL, "more than the allocation", lambda: adopt(context, mine.data_ptr(), 1 << 45))
    refused(heddle.Status.EINVAL, "memory of the host", lambda: adopt(context, mine.cpu().data_ptr(), 8))
    refused(heddle.Status.ENOTSUP, "a wait for a word of a GPU", lambda: window.wait(0, 1))
    packed = torch.frombuffer(bytearray(window.pack().ljust(512, b"\0")), dtype=torch.uint8)
    handles = [bytes(handle.tolist()) for handle in world.all_gather(packed).view(ranks, 512)]
    peers = [heddle.PeerWindow(context, handle) for handle in handles]
    again = heddle.PeerWindow(context, handles[0])
    refused(heddle.Status.ENOTSUP, "a put into memory of a GPU", lambda: again.put(0, b"12345678"))
    again.close()
    for turn in range(20):
        mine.fill_(rank)
        torch.cuda.synchronize()
        world.barrier()
        views = [torch.as_tensor(p.device_bytes(mine.numel()), device="cuda").view(mine.shape) for p in peers]
        views[(rank + 1) % ranks][rank].copy_(torch.full((1 << 20,), 100 + turn + rank, dtype=torch.uint8).cuda())
        torch.cuda.synchronize()
        world.barrier()
        for owner, view in enumerate(views):
            writer = (owner - 1) % ranks
            wanted = torch.full(mine.shape, owner, dtype=torch.uint8)
            wanted[writer] = 100 + turn + writer
            assert torch.equal(view.cpu(), wanted), f"rank {rank}: memory of rank {owner} in turn {turn}"
        world.barrier()
    assert (whole[0] == 255).all() and (whole[-1] == 255).all()
    for peer in peers:
        peer.close()
    world.barrier()
    window.close()
    world.close()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main()
    else:
        sys.exit(buffer.main(__file__, "tensors as windows"))
