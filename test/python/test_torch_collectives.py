# SPDX-License-Identifier: Apache-2.0
"""Every operation of torch.distributed on heddle's backend, with exact expected results, worlds of 1 to 8 ranks."""

from __future__ import annotations

import datetime
import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake import pg
from ranks import Tree, join, raises, run, until

INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
MOVED = [*INTEGERS, *FLOATS, *FP8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fnuz]


def filled(count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float32).to(dtype)


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, for types that cannot be compared too."""
    return tensor.dtype == other.dtype and torch.equal(
        tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


# ------------------------------------------------------------------- one world of each size


def reductions(rank: int, size: int) -> None:
    values = torch.tensor([2 + r % 3 for r in range(size)])
    mine = int(values[rank])
    ops = {
        dist.ReduceOp.SUM: int(values.sum()),
        dist.ReduceOp.MIN: int(values.min()),
        dist.ReduceOp.MAX: int(values.max()),
    }
    for dtype in INTEGERS + FLOATS + FP8:
        for op, expected in ops.items():
            for count in (0, 5, 3000) if dtype == torch.float32 else (5,):
                t = filled(count, mine, dtype)
                dist.all_reduce(t, op)
                assert same(t, filled(count, expected, dtype)), (dtype, op, count, t)
    for dtype in FLOATS:
        t = filled(7, 3, dtype)
        dist.all_reduce(t, dist.ReduceOp.AVG)
        assert same(t, filled(7, 3, dtype))
    for dtype in (torch.int64, torch.float64):
        t = filled(7, mine, dtype)
        dist.all_reduce(t, dist.ReduceOp.PRODUCT)
        assert same(t, filled(7, int(values.prod()), dtype))
    t = torch.tensor([1 << rank, 3])
    dist.all_reduce(t, dist.ReduceOp.BOR)
    assert t.tolist() == [(1 << size) - 1, 3]
    t = torch.tensor([1 << rank | 1 << 20, 3])
    dist.all_reduce(t, dist.ReduceOp.BAND)
    assert t.tolist() == [1 << 20 if size > 1 else 1 << 20 | 1, 3]
    t = torch.tensor([1, rank])
    dist.all_reduce(t, dist.ReduceOp.BXOR)
    assert t[0] == size % 2
    t = torch.tensor([True, rank == 0, False])
    dist.all_reduce(t, dist.ReduceOp.MAX)
    assert t.tolist() == [True, True, False]
    for dtype in (torch.complex64, torch.complex128):
        t = torch.full((3,), 1 + 2j * rank, dtype=dtype)
        dist.all_reduce(t)
        assert (t == size + 1j * size * (size - 1)).all()
    t = torch.ones(5)
    dist.all_reduce(t, dist._make_nccl_premul_sum(float(rank + 1)))
    assert (t == size * (size + 1) // 2).all()
    for root in range(size):
        t = filled(5, mine)
        dist.reduce(t, root)
        assert rank != root or (t == int(values.sum())).all()
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, torch.arange(3.0 * size))
    assert out.tolist() == [size * (3.0 * rank + i) for i in range(3)]
    blocks = [torch.full((r + 1,), float(r)) for r in range(size)]  # uneven
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, blocks)
    assert (out == size * rank).all()


def movement(rank: int, size: int) -> None:
    for dtype in MOVED:
        for root in (0, size - 1):
            t = filled(5, rank == root, dtype)
            dist.broadcast(t, root)
            assert same(t, filled(5, 1, dtype)), (dtype, t)
        slots = [filled(5, 0, dtype) for _ in range(size)]
        dist.all_gather(slots, filled(5, rank, dtype))
        assert all(same(slot, filled(5, r, dtype)) for r, slot in enumerate(slots)), dtype
        out = [filled(2, 0, dtype) for _ in range(size)]
        dist.all_to_all(out, [filled(2, (rank + to) % 7, dtype) for to in range(size)])
        assert all(same(t, filled(2, (rank + r) % 7, dtype)) for r, t in enumerate(out)), dtype
    out = torch.full((size, 4), -1.0)
    dist.all_gather_into_tensor(out, torch.full((4,), float(rank)))
    assert (out == torch.arange(float(size))[:, None]).all()
    slots = [torch.zeros(r + 1) for r in range(size)]  # uneven
    dist.all_gather(slots, torch.full((rank + 1,), float(rank)))
    assert all((slot == r).all() for r, slot in enumerate(slots))
    out = torch.empty(2 * size)
    dist.all_to_all_single(out, torch.arange(2.0 * size) + 100 * rank)
    assert out.tolist() == [100.0 * r + 2 * rank + i for r in range(size) for i in range(2)]
    rows = [(r + rank) % 3 for r in range(size)]  # from rank r; may be none
    out = torch.empty(sum(rows), 2)
    dist.all_to_all_single(out, torch.full((sum(rows), 2), float(rank)), rows, rows)
    assert out[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rows[r])]
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_to_all(uneven, [torch.full((rank + 1,), 10.0 * rank + to) for to in range(size)])
    assert all((t == 10 * r + rank).all() for r, t in enumerate(uneven))
    for root in range(size):
        slots = [torch.empty(3) for _ in range(size)] if rank == root else None
        dist.gather(torch.full((3,), float(rank)), slots, dst=root)
        assert slots is None or all((slot == r).all() for r, slot in enumerate(slots))
        t = torch.empty(3)
        dist.scatter(t, [torch.full((3,), float(r)) for r in range(size)] if rank == root else None, src=root)
        assert (t == rank).all()


def messages(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e5m2):
        out, got = filled(6, rank, dtype), filled(6, 9, dtype)
        work = dist.isend(out, after, tag=3)
        assert dist.recv(got, before, tag=3) == before
        work.wait()
        assert same(got, filled(6, before, dtype))
    first, second = torch.empty(2), torch.empty(2)  # tags in the other order
    works = [
        dist.isend(torch.full((2,), 1.0), after, tag=1),
        dist.isend(torch.full((2,), 2.0), after, tag=2),
        dist.irecv(second, before, tag=2),
        dist.irecv(first, before, tag=1),
    ]
    for work in works:
        work.wait()
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2]
    got = torch.empty(2)
    work = dist.isend(torch.full((2,), float(rank)), after)
    assert dist.recv(got) == before and (got == before).all()  # from any source
    work.wait()
    got = torch.empty(2)
    ops = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (got == before).all()
    big, back = torch.full((1 << 20,), float(rank)), torch.empty(1 << 20)  # both ways at once
    work = dist.isend(big, after)
    dist.recv(back, before)
    work.wait()
    assert (back == before).all()
    turned, got = torch.arange(6.0).view(2, 3).t(), torch.zeros(2, 3).t()
    work = dist.isend(turned, after)
    dist.recv(got, before)
    work.wait()
    assert torch.equal(got, turned)
    dist.send(torch.empty(0), after)
    dist.recv(torch.empty(0), before)


def layouts(rank: int, size: int) -> None:
    """Tensors that are not contiguous."""
    t = torch.full((4, 6), -1.0)
    column = t[:, 2]
    column.fill_(rank + 1)
    dist.all_reduce(column)
    total = size * (size + 1) // 2
    assert (column == total).all() and (t == -1).sum() == 20
    work = dist.all_reduce(column, async_op=True)
    work.wait()
    assert (column == size * total).all() and (t == -1).sum() == 20
    slots = [torch.zeros(3, 2).t() for _ in range(size)]
    dist.all_gather(slots, torch.full((3, 2), float(rank)).t())
    assert all((slot == r).all() for r, slot in enumerate(slots))
    wide = torch.full((size, 8), -1.0)
    dist.all_gather_into_tensor(wide[:, ::2], torch.full((4,), float(rank)))
    assert (wide[:, ::2] == torch.arange(float(size))[:, None]).all() and (wide[:, 1::2] == -1).all()
    t = torch.full((3,), 1 + 2j)
    dist.group.WORLD.broadcast([t.conj() if rank == 0 else t]).wait()
    assert rank == 0 or (t == 1 - 2j).all()
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf.data)
    assert (leaf == size).all()


def objects(rank: int, size: int) -> None:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(size)]
    listed = [rank, "a"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(listed, size - 1)
    assert listed == [size - 1, "a"]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert gathered is None or gathered == list(range(size))
    out = [None]
    dist.scatter_object_list(out, [{"to": r} for r in range(size)], 0)
    assert out == [{"to": rank}]


def works(rank: int, size: int) -> None:
    t = torch.ones(4)
    work = dist.all_reduce(t, async_op=True)
    assert work.get_future().wait()[0].data_ptr() == t.data_ptr() and (t == size).all()
    assert work.is_completed() and work.is_success() and work.exception() is None and work.result() == [t]
    assert work.wait() and pg.get_local_success(work) and pg.get_failed_ranks_hint(work).tolist() == [0] * size
    seen = []
    future = dist.all_reduce(t, async_op=True).get_future().then(lambda f: seen.append(f.value()[0][0].item()))
    future.wait()
    assert seen == [size * size]
    many = [torch.full((1024,), float(i)) for i in range(200)]
    pending = [dist.all_reduce(t, async_op=True) for t in many]
    for work in reversed(pending):
        work.wait()
    assert all((t == i * size).all() for i, t in enumerate(many))
    for _ in range(300):  # dropped works and tensors
        dist.all_reduce(torch.ones(1000), async_op=True)
    gc.collect()
    dist.barrier()
    group = dist.group.WORLD
    group._prune()
    assert not group.pending
    assert dist.barrier(async_op=True).wait()
    group.monitored_barrier(datetime.timedelta(seconds=20))
    t = torch.ones(2)
    thread = threading.Thread(target=dist.all_reduce, args=(t,))
    thread.start()
    thread.join()
    assert (t == size).all()


def coalesced(rank: int, size: int) -> None:
    a, b = torch.ones(3), torch.full((5,), 2.0)
    with dist._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    assert (a == size).all() and (b == 2 * size).all()
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(a)
        dist.broadcast(b, 0)
    manager.wait()
    assert (a == size * size).all()
    outs = [torch.empty(2 * size), torch.empty(3 * size)]
    with dist._coalescing_manager():
        for out, count in zip(outs, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, torch.full((count,), float(rank)))
    assert outs[0].view(size, 2)[:, 0].tolist() == list(range(size)) and (outs[1].view(size, 3)[-1] == size - 1).all()
    outs = [torch.empty(2), torch.empty(3)]
    with dist._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_tensor(out, torch.ones(out.numel() * size))
    assert (outs[0] == size).all() and (outs[1] == size).all()


def functional(rank: int, size: int) -> None:
    """From C++, through the trampoline."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    assert (funcol.all_reduce(torch.ones(3), "sum", group) == size).all()
    gathered = funcol.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert gathered.tolist() == [float(r) for r in range(size) for _ in range(2)]
    assert (funcol.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group) == size).all()
    assert (funcol.broadcast(torch.full((2,), float(rank)), size - 1, group) == size - 1).all()
    out = funcol.all_to_all_single(torch.full((size,), float(rank)), None, None, group)
    assert out.tolist() == list(range(size))
    many = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", group)
    assert all((t == size).all() for t in many)


def refusals(rank: int, size: int) -> None:
    """What is refused takes its number, on this rank and on the others; the next call works."""
    group = dist.group.WORLD
    with raises(ValueError, "meta", "CPU"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with raises(ValueError, "sparse"):
        dist.all_reduce(torch.ones(4).to_sparse())
    with raises(ValueError, f"list of {size + 1} tensors", f"expected {size}"):
        dist.all_gather([torch.zeros(2)] * (size + 1), torch.zeros(2))
    with raises(ValueError, "output of", "expected"):
        dist.all_gather_into_tensor(torch.zeros(2 * size + 1), torch.zeros(2))
    with raises(ValueError, "input of", "expected"):
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * size + 1))
    with raises(TypeError, "float32", "float64"):
        group.all_gather_single(torch.zeros(2 * size, dtype=torch.float64), torch.zeros(2))
    with raises(TypeError, "moved, not reduced"):
        dist.all_reduce(torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fnuz))
    with raises(ValueError, "splits"):
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [2] * size)
    with raises(RuntimeError, "band", "f32"):
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND)
    if size > 1:
        with raises(RuntimeError, "count 2", "count 3", "rank"):
            dist.all_reduce(torch.zeros(3 if rank == 1 else 2))
        with raises(RuntimeError, "allreduce", "barrier"):
            if rank == 1:
                dist.barrier()
            else:
                dist.all_reduce(torch.zeros(2))
        with raises((ValueError, RuntimeError)):  # refused on one rank only
            dist.all_reduce(torch.ones(2, device="meta" if rank == 1 else "cpu"))
        with raises((ValueError, RuntimeError)):
            group.allreduce_coalesced([torch.ones(2), torch.ones(2, device="meta" if rank == 1 else "cpu")]).wait()
    t = torch.ones(2)
    dist.all_reduce(t)
    assert (t == size).all()


def groups(rank: int, size: int) -> None:
    world = dist.group.WORLD
    assert dist.get_backend() == "mooncake-cpu" and type(world).__name__ == "ProcessGroup" and world.size() == size
    for step in (1, 2, 3):
        ranks = list(range(0, size, step))
        sub = dist.new_group(ranks)
        if rank in ranks:
            t = torch.full((2,), float(rank))
            dist.all_reduce(t, group=sub)
            assert (t == sum(ranks)).all() and dist.get_world_size(sub) == len(ranks)
            t = torch.full((2,), float(rank))
            dist.broadcast(t, ranks[-1], group=sub)  # by global rank
            assert (t == ranks[-1]).all()
            dist.destroy_process_group(sub)
            with raises(RuntimeError, "destroyed"):
                sub.allreduce([t])
    back = dist.new_group(list(range(size))[::-1])  # torch sorts them
    assert dist.get_rank(back) == rank
    gloo = dist.new_group(backend="gloo")
    t = torch.ones(1)
    dist.all_reduce(t, group=gloo)
    assert t == size


PARTS = [reductions, movement, messages, layouts, objects, works, coalesced, functional, refusals, groups]


def everything(rank: int, size: int) -> None:
    for part in PARTS:
        part(rank, size)


@pytest.mark.parametrize("size", range(1, 9))
def test_everything(size: int) -> None:
    run(size, everything)


# ------------------------------------------------------------------------ single subjects


def lives(port: int, rank: int, size: int) -> None:
    for _ in range(4):
        join(port, rank, size)
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t == size
        dist.destroy_process_group()


def test_destroy_and_begin_again_on_one_store() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", lives, tree.port, rank, 3) for rank in range(3)]:
            tree.result(pid)


def beside(port: int, rank: int) -> None:
    """Groups of ours in a world of gloo's, of some of its ranks: a job of their own."""
    join(port, rank, 4, backend="gloo")
    for ranks in ([1, 3], [0, 1, 2]):
        sub = dist.new_group(ranks, backend="mooncake-cpu")
        if rank in ranks:
            t = torch.full((2,), float(rank))
            dist.all_reduce(t, group=sub)
            assert (t == sum(ranks)).all() and pg.get_active_ranks(sub).tolist() == [1] * len(ranks)
    dist.barrier()
    dist.destroy_process_group()


def test_groups_beside_another_backend() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", beside, tree.port, rank) for rank in range(4)]:
            tree.result(pid)


def late(rank: int, size: int) -> float:
    """wait() with a timeout returns False, and the operation goes on."""
    if rank == 1:
        time.sleep(0.5)
    begin = time.monotonic()
    t = torch.ones(2)
    work = dist.all_reduce(t, async_op=True)
    if rank == 0:
        assert work.wait(datetime.timedelta(milliseconds=50)) is False and not work.is_completed()
        assert pg.get_failed_ranks_hint(work).tolist() == [0] * size
    assert work.wait() and (t == size).all()
    took = time.monotonic() - begin
    dist.barrier()
    return took


def test_wait_with_a_timeout() -> None:
    assert run(2, late)[0] > 0.4


def alone_in_it(port: int, rank: int) -> str:
    group = join(port, rank, 2, timeout=60)
    dist.barrier()
    if rank == 1:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=0.5), group)
        group._set_default_timeout(datetime.timedelta(seconds=0.5))
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError as error:
            return str(error)
        return "no error"
    time.sleep(1.5)
    work = group.allreduce([torch.ones(2)])
    work.wait()
    assert not pg.get_local_success(work)
    return str(pg.get_failed_ranks_hint(work).tolist())


def test_the_groups_timeout_aborts_it_here() -> None:
    with Tree() as tree:
        tree.serve()
        pids = [tree.fork(f"rank {rank}", alone_in_it, tree.port, rank) for rank in range(2)]
        hint, text = (tree.result(pid) for pid in pids)
        assert "ETIMEDOUT" in text and "missing ranks 0" in text and "all_reduce" in text, text
        assert hint == "[0, 1]"


def aborted(rank: int, size: int) -> None:
    group = dist.group.WORLD
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        future = work.get_future()
        begin = time.monotonic()
        threading.Timer(0.1, group.abort).start()
        with raises(RuntimeError, "ABORTED"):
            work.wait()
        assert time.monotonic() - begin < 2
        with raises(RuntimeError, "ABORTED"):
            future.wait()
        with raises(RuntimeError, "ABORTED"):
            dist.all_reduce(torch.ones(2))
    else:
        time.sleep(0.3)
        work = group.allreduce([torch.ones(2)])
        work.wait()
        assert pg.get_failed_ranks_hint(work).tolist() == [1] + [0] * (size - 1)


def test_abort() -> None:
    run(3, aborted)


def named(rank: int, size: int) -> None:
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0)
    names = {event.name for event in profile.events()}
    assert {"heddle::all_reduce", "heddle::broadcast"} <= names, names


def test_the_profiler_shows_operations() -> None:
    run(2, named)


def cuda(port: int) -> None:
    join(port, 0, 1, backend="mooncake")
    assert dist.get_backend() == "mooncake"
    dist.barrier()

    class Pretended:
        """A CUDA tensor of a machine that has none."""

        dtype, is_cpu, is_cuda = torch.float32, False, True

        def element_size(self) -> int:
            return 4

        def is_complex(self) -> bool:
            return False

    with raises(NotImplementedError, "CUDA tensors are not supported"):
        dist.group.WORLD.allreduce([Pretended()])


def test_cuda_tensors_are_refused_in_a_sentence() -> None:
    with Tree() as tree:
        tree.serve()
        tree.result(tree.fork("rank 0", cuda, tree.port))


def forked(rank: int, size: int) -> None:
    """A data loader's worker: harmless, and its calls fail with a sentence."""
    dist.barrier()
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t == size


def test_fork() -> None:
    run(2, forked)


def leaves_early(port: int, rank: int) -> None:
    """Ends without destroy, with an operation under way."""
    join(port, rank, 2)
    dist.barrier()
    if rank == 0:
        until(lambda: pg.get_active_ranks(dist.group.WORLD).tolist() == [1, 0])
    else:
        dist.all_reduce(torch.ones(1000), async_op=True)


def test_exit_without_destroy() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", leaves_early, tree.port, rank) for rank in range(2)]:
            tree.result(pid)
