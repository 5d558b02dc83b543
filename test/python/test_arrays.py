# SPDX-License-Identifier: Apache-2.0
"""heddle's own interface: collectives on arrays, operations in flight, windows."""

from __future__ import annotations

import array
import ctypes
import itertools
import mmap
import os
import pickle
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import heddle
from heddle import IncompleteError, InvalidError, Status
from ranks import Tree, raises, until
from worlds import run, start

NUMBERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]


def every_collective(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    for name in [*NUMBERS, "complex64", "complex128", "bool"]:
        x = (np.arange(7) + rank).astype(name)
        blocks = [(np.arange(7) + r).astype(name) for r in range(size)]
        assert np.array_equal(world.all_gather(x), np.stack(blocks))
        for root in {0, size - 1}:
            y = x.copy()
            assert world.broadcast(y, root) is y
            assert np.array_equal(y, blocks[root])
        sends = np.stack([x + (d if name != "bool" else 0) for d in range(size)]).astype(name)
        expected = np.stack([b + (rank if name != "bool" else 0) for b in blocks]).astype(name)
        assert np.array_equal(world.all_to_all(sends), expected)
        gathered = world.gather(x, root=size - 1)
        assert (gathered is None) if rank != size - 1 else np.array_equal(gathered, np.stack(blocks))
        out = np.zeros_like(x)
        assert world.scatter(np.stack(blocks) if rank == 0 else None, out) is out
        assert np.array_equal(out, x)
    for name in NUMBERS:
        x = np.full(5, 1 + rank % 2, name)
        inputs = [np.full(5, 1 + r % 2, name) for r in range(size)]
        for op, reduce in (("sum", np.sum), ("prod", np.prod), ("min", np.min), ("max", np.max)):
            expected = reduce(np.stack(inputs), axis=0).astype(name)
            out = np.zeros_like(x)
            assert world.all_reduce(x, op, out=out) is out
            assert np.array_equal(out, expected) and (x == 1 + rank % 2).all()
        y = x.copy()
        world.reduce(y, heddle.RedOp.SUM, root=0)
        assert rank != 0 or np.array_equal(y, np.stack(inputs).sum(axis=0).astype(name))
        spread = np.tile(x, (size, 1))
        assert np.array_equal(world.reduce_scatter(spread), np.stack(inputs).sum(axis=0).astype(name))
    for op, fold in (("band", np.bitwise_and), ("bor", np.bitwise_or), ("bxor", np.bitwise_xor)):
        bits = [np.array([r + 1, 12], np.uint32) for r in range(size)]
        assert np.array_equal(world.all_reduce(bits[rank].copy(), op), fold.reduce(np.stack(bits)))
    assert world.all_reduce(np.float32([3]), "avg")[0] == 3
    scaled = world.all_reduce(np.float64([1]), "premul_sum", scalar=float(rank + 1))
    assert scaled[0] == size * (size + 1) / 2
    world.barrier()


def uneven(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    counts = [r % 3 for r in range(size)]
    x = np.full(counts[rank], rank, np.int32)
    packed = np.concatenate([np.full(c, r, np.int32) for r, c in enumerate(counts)])
    assert np.array_equal(world.all_gather(x, counts=counts), packed)
    displs = [5 * r for r in range(size)]
    out = np.full(5 * size, -1, np.int32)
    world.all_gather(x, out, counts, displs)
    for r, c in enumerate(counts):
        assert (out[5 * r : 5 * r + c] == r).all() and (out[5 * r + c : 5 * r + 5] == -1).all()
    gathered = world.gather(x, 0, counts=counts)
    assert rank != 0 or np.array_equal(gathered, packed)
    mine = np.full(counts[rank], -1, np.int32)
    world.scatter(packed if rank == 0 else None, mine, counts=counts)
    assert np.array_equal(mine, x)
    assert np.array_equal(world.reduce_scatter(packed, counts=counts), x * size)
    to = [(rank + d) % 3 for d in range(size)]
    of = [(s + rank) % 3 for s in range(size)]
    sent = np.concatenate([np.full(c, 10 * rank + d, np.int64) for d, c in enumerate(to)])
    got = world.all_to_all(sent, counts=to, out_counts=of)
    assert np.array_equal(got, np.concatenate([np.full(c, 10 * s + rank, np.int64) for s, c in enumerate(of)]))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_collectives(size: int) -> None:
    run(size, every_collective)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_uneven_blocks(size: int) -> None:
    run(size, uneven)


def kinds_of_memory(world: heddle.Group) -> None:
    size = world.size
    numbers = array.array("d", [1.0, 2.0])
    assert world.all_reduce(numbers).tolist() == [size, 2.0 * size]
    assert world.all_gather(numbers).tolist() == [numbers.tolist()] * size
    raw = bytearray(b"\x01\x02")
    assert world.all_reduce(raw) == bytes([size, 2 * size])
    assert bytes(world.all_gather(b"ab")) == b"ab" * size  # may be read
    floats = (ctypes.c_float * 2)(1, 2)
    assert list(world.all_reduce(floats)) == [size, 2 * size]
    longs = (ctypes.c_long * 2)(1, 2)
    assert list(world.all_reduce(longs)) == [size, 2 * size]
    with mmap.mmap(-1, 4096) as page:
        page[:2] = b"\x01\x01"
        world.all_reduce(page)
        assert page[0] == size
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    assert world.all_reduce(tensor) is tensor and (tensor == size).all()
    gathered = world.all_gather(tensor)
    assert isinstance(gathered, torch.Tensor) and gathered.shape == (size, 2, 3)
    fp8 = torch.ones(4).to(torch.float8_e4m3fn)
    assert (world.all_reduce(fp8).float() == size).all()
    empty = np.zeros(0, np.float32)
    assert world.all_reduce(empty).size == 0
    grid = np.ones((3, 4), np.int16)
    assert world.all_gather(grid).shape == (size, 3, 4)


def test_kinds_of_memory() -> None:
    run(2, kinds_of_memory)


def refusals(world: heddle.Group) -> None:
    """What Python refuses on rank 0 is told to the others, who do not wait; the next call works."""
    rank = world.rank
    x, y = np.ones(4, np.float32), np.ones((2, 4), np.float32)
    foreign = np.ones(4, np.dtype("f4").newbyteorder())
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    both = [4, 4]

    def reduced() -> Any:
        return world.all_reduce(x)

    cases: list[tuple[type[BaseException], str, Any, Any]] = [
        (ValueError, "contiguous", lambda: world.all_reduce(np.ones((4, 4), np.float32)[:, 0]), reduced),
        (ValueError, "read-only", lambda: world.all_reduce(frozen), reduced),
        (ValueError, "read-only", lambda: world.all_reduce(b"abcd"), reduced),
        (TypeError, "foreign order", lambda: world.all_reduce(foreign), reduced),
        (TypeError, "none of", lambda: world.all_reduce(np.array(["a"])), reduced),
        (TypeError, "", lambda: world.all_reduce(None), reduced),
        (ValueError, "'median'", lambda: world.all_reduce(x, "median"), reduced),
        (ValueError, "5 elements, 4", lambda: world.all_reduce(x, out=np.ones(5, np.float32)), reduced),
        (TypeError, "F32", lambda: world.all_reduce(x, out=np.ones(4)), reduced),
        (ValueError, "4 elements, 8", lambda: world.all_gather(x, np.ones(4, np.float32)), lambda: world.all_gather(x)),
        (ValueError, "counts has 1", lambda: world.all_gather(x, counts=[4]), lambda: world.all_gather(x, counts=both)),
        (ValueError, "negative", lambda: world.all_gather(x, counts=[4, -4]), lambda: world.all_gather(x, counts=both)),
        (ValueError, "equal blocks", lambda: world.reduce_scatter(np.ones(3)), lambda: world.reduce_scatter(y)),
        (ValueError, "equal blocks", lambda: world.all_to_all(np.ones(3)), lambda: world.all_to_all(y)),
        (ValueError, "go together", lambda: world.all_to_all(y, counts=[1, 1]), lambda: world.all_to_all(y)),
        (ValueError, "x has", lambda: world.scatter(x, np.ones(4, np.float32)), lambda: world.scatter(None, x.copy())),
        (ValueError, "displs", lambda: world.gather(x, counts=both, displs=[0]), lambda: world.gather(x, counts=both)),
        (TypeError, "", lambda: world.broadcast(x, root="a"), lambda: world.broadcast(x)),
        (TypeError, str(1 << 40), lambda: world.broadcast(x, 1 << 40), lambda: world.broadcast(x)),
        (InvalidError, "root 9", lambda: world.broadcast(x, 9), lambda: world.broadcast(x)),
        (InvalidError, "band", lambda: world.all_reduce(x, "band"), reduced),
    ]  # fmt: skip
    for kind, text, bad, good in cases:
        if rank == 0:
            with raises(kind, text):
                bad()
        else:
            with raises(InvalidError, "EINVAL"):
                good()
        assert world.all_reduce(np.ones(1))[0] == 2
    for cut in ({"name": "a\0b"}, {"num_ranks": 1 << 32}, {"chunk_bytes": -1}):
        with raises(ValueError, "does not fit"):
            heddle.Group(world.context, **cut)
    with raises(InvalidError, "count 4", "count 5") as _:
        world.all_reduce(np.ones(4 + rank, np.float32))
    try:
        world.all_reduce(x) if rank else world.barrier()
    except heddle.Error as failure:
        assert failure.status == Status.EORDER and "barrier" in failure.detail
        again = pickle.loads(pickle.dumps(failure))
        assert (again.status, again.detail, again.ranks) == (failure.status, failure.detail, failure.ranks)
    else:
        raise AssertionError("a mismatch went unseen")
    world.barrier()


def test_refusals_are_told_to_all() -> None:
    run(2, refusals)


def in_flight(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    arrays = [np.full(100, rank + i, np.int64) for i in range(200)]
    operations = [world.all_reduce(x, wait=False) for x in arrays]
    assert all(isinstance(o, heddle.Operation) for o in operations)
    for i, operation in enumerate(operations):
        result = operation.wait()
        assert result is arrays[i] and (result == size * i + size * (size - 1) // 2).all()
        assert operation.status == Status.OK and operation.test() and operation.failed == ()
    # Dropped operations go on, and hold their memory.
    keep = np.zeros(size * 50_000)
    for _ in range(20):
        world.all_gather(np.full(50_000, float(rank)), keep, wait=False)
    world.barrier()
    until(lambda: (keep.reshape(size, -1) == np.arange(size)[:, None]).all())
    # A timeout leaves it pending.
    if rank == 0:
        operation = world.barrier(wait=False)
        begin = time.monotonic()
        with raises(TimeoutError, "barrier", "0.2"):
            operation.wait(0.2)
        assert 0.15 < time.monotonic() - begin < 5
        assert operation.status == Status.PENDING and not operation.test() and "PENDING" in repr(operation)
        with raises(heddle.Error, "PENDING"):
            _ = operation.result
        world.send(np.zeros(1), 1)
        operation.wait()
    elif rank == 1:
        world.recv(np.zeros(1), 0)
        world.barrier()
    else:
        world.barrier()


def test_operations_in_flight() -> None:
    run(3, in_flight)


def messages(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    after, before = (rank + 1) % size, (rank - 1) % size
    operation = world.send(np.arange(1000) + rank, after, tag=3, wait=False)
    got = world.recv(np.zeros(1000, np.int64), before, tag=3)
    assert np.array_equal(got, np.arange(1000) + before)
    operation.wait()
    if rank == 0:
        sources = set()
        for _ in range(size - 1):
            operation = world.recv(np.zeros(1), wait=False)
            value = operation.wait()
            source, tag = operation.source
            assert value[0] == source and tag == 10 + source
            sources.add(source)
        assert sources == set(range(1, size))
    else:
        world.send(np.full(1, float(rank)), 0, tag=10 + rank)
    if rank == 1:
        with raises(InvalidError):
            world.recv(np.zeros(3), 2)
    elif rank == 2:
        world.send(np.zeros(2), 1)
    world.barrier()


def test_send_and_receive() -> None:
    run(3, messages)


def windows(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    with heddle.Window(world.context, 4096) as window:
        packed = np.zeros(512, np.uint8)
        handle = window.pack()
        packed[: len(handle)] = np.frombuffer(handle, np.uint8)
        handles = world.all_gather(packed)
        after = heddle.PeerWindow(world.context, handles[(rank + 1) % size].tobytes())
        before = heddle.PeerWindow(world.context, handles[(rank - 1) % size].tobytes())
        data = np.arange(100, dtype=np.int32) + rank
        after.put(1024, data, signal_offset=8, value=5)
        window.wait(8, 5, source=before, timeout=30)
        got = np.frombuffer(window.data, np.int32, 100, 1024)
        assert np.array_equal(got, np.arange(100) + (rank - 1) % size)
        after.flush(30)
        after.signal(16, 2, heddle.SignalOp.ADD)
        window.wait(16, 2)
        assert after.mapped is not None
        with raises(TimeoutError, "ETIMEDOUT"):
            window.wait(24, 1, timeout=0.05)
        with raises(InvalidError):
            after.put(4090, data)
        with raises(InvalidError):
            heddle.PeerWindow(world.context, b"no handle")
        with raises(InvalidError):
            heddle.Window(world.context, 0)
        world.barrier()
    with raises(InvalidError, "closed"):
        window.pack()


def test_windows() -> None:
    run(3, windows)


def threads(world: heddle.Group) -> None:
    """Any thread may call; waiting in one does not keep the others from running."""
    rank = world.rank
    groups = [heddle.Group(world.context, f"thread {i}") for i in range(4)]
    sums = [0.0] * 4

    def work(i: int) -> None:
        for k in range(50):
            sums[i] = groups[i].all_reduce(np.full(10, float(k)))[0]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sums == [49.0 * world.size] * 4
    ticks = itertools.count()
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            next(ticks)
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    if rank == 0:
        time.sleep(0.5)
    world.barrier()
    done.set()
    ticker.join()
    assert next(ticks) > 50 or rank == 0


def test_threads() -> None:
    run(2, threads)


def loses_one(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    epochs: list[int] = []
    world.on_view(epochs.append)
    world.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.full(3, rank + 1.0)
    with raises(IncompleteError, "INCOMPLETE", "allreduce", "without ranks 1"):
        try:
            world.all_reduce(x)
        except IncompleteError as failure:
            assert failure.ranks == (1,) and failure.result is x and (x == size * (size + 1) / 2 - 2).all()
            raise
    until(lambda: world.view().active == tuple(r for r in range(size) if r != 1))
    assert world.all_reduce(np.ones(1))[0] == size - 1
    until(lambda: bool(epochs))
    assert epochs[-1] <= world.view().epoch
    world.on_view(None)
    assert world.member(1).process == heddle.ProcessState.LOST
    assert world.stats()["evidence_exit"] >= 0 and heddle.stats()["world"]["views"] >= 2
    with raises(heddle.Error, "EPEER"):
        world.recv(np.zeros(1), 1)
    with raises(heddle.Error, "EPEER"):
        world.broadcast(np.zeros(1), 1)
    assert "lost" in world._repr_html_()


def test_a_rank_is_killed() -> None:
    with Tree() as tree:
        pids = start(tree, 4, loses_one)
        for rank in (0, 2, 3):
            tree.result(pids[rank])
