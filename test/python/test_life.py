# SPDX-License-Identifier: Apache-2.0
"""Lives: exits in any state, forks, closing under calls, logging, the command, growth."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import numpy as np
import pytest

import heddle
from heddle import InvalidError, Status
from ranks import Tree, raises, until
from worlds import run, start

PRELUDE = """
import atexit, ctypes, gc, os, sys, threading, time
import heddle
world = heddle.init()
rank, size = world.rank, world.size
world.barrier()
"""

# What two ranks do last; the program must end by itself, with this code.
EXITS = {
    "open": ("", 0),
    "closed": ("world.close(); world.close()", 0),
    "with": ("with world: pass", 0),
    "raised": ("raise RuntimeError('an error of the program')", 1),
    "sys_exit": ("sys.exit(3)", 3),
    "os_exit": ("sys.stdout.flush(); os._exit(4)", 4),
    "pending_receive": ("x = bytearray(8); op = world.recv(x, wait=False)", 0),
    "dropped_receive": ("world.recv(bytearray(8), wait=False)", 0),
    "pending_collective": ("op = world.barrier(wait=False) if rank == 0 else None", 0),
    "daemon_thread_inside": (
        "threading.Thread(target=lambda: world.recv(bytearray(8)), daemon=True).start(); time.sleep(0.2)",
        0,
    ),
    "daemon_thread_in_c": (
        "x = ctypes.create_string_buffer(8); threading.Thread(target=lambda: world.call(heddle.lib.hdl_recv, "
        "ctypes.addressof(x), 8, 0, 1 - rank, 0, None, None), daemon=True).start(); time.sleep(0.2)",
        0,
    ),
    "callback": ("world.on_view(lambda epoch: time.sleep(0.01)); world.evict([0]) if rank == 1 else None", 0),
    "window": (
        "w = heddle.Window(world.context, 4096); p = heddle.PeerWindow(world.context, w.pack()); view = w.data",
        0,
    ),
    "cycle": ("world.me = world; del world; gc.collect()", 0),
    "late_call": ("atexit.register(lambda: print(repr(world)))", 0),
    "destroyed_by_interpreter": ("sys.modules['keep'] = world; heddle.keep = world", 0),
    "second_context": ("other = heddle.Group(heddle.Context(), 'other'); other.barrier(); world.close()", 0),
}


def launch(program: str, size: int = 2, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "heddle", "run", "-n", str(size), "--", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("name", EXITS)
def test_exit(name: str) -> None:
    last, code = EXITS[name]
    begin = time.monotonic()
    done = launch(PRELUDE + last)
    assert done.returncode == code, done.stdout + done.stderr
    assert time.monotonic() - begin < 12
    assert "Fatal" not in done.stderr and "Segmentation" not in done.stderr
    if code == 0:
        assert "Traceback" not in done.stderr.replace("in thread", "") or "thread" in name, done.stderr


def test_import_needs_neither_torch_nor_numpy() -> None:
    program = """
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        import array, heddle
        with heddle.init() as world:
            x = array.array("f", [1, 2])
            world.all_reduce(x)
            assert x.tolist() == [world.size, 2 * world.size]
            assert world.all_gather(x).tolist() == [x.tolist()] * world.size
            moe = heddle.Moe(world, world.size, 1, 2, 1, dtype=heddle.DType.F32)
            received = heddle.Received(array.array("f", [0] * (2 * world.size)))
            ids, ones = memoryview(bytearray(4)).cast("i", [1, 1]), array.array("f", [1])
            step, status = moe.dispatch(x, ids, received, ones)
            moe.combine(step, received.rows, x)
            assert x.tolist() == [world.size, 2 * world.size]
    """
    done = launch(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr


def test_command() -> None:
    for arguments in (["--help"], ["info"], ["run", "-n", "2", "--", sys.executable, "-c", ""]):
        done = subprocess.run([sys.executable, "-m", "heddle", *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    assert heddle.info()["version"].split()[0] == heddle.__version__


def forks(world: heddle.Group) -> None:
    """A child without exec can do nothing with the parent's objects, and harms nobody; it may join a job of its own."""
    window = heddle.Window(world.context, 4096)
    pending = world.recv(bytearray(8), (world.rank + 1) % world.size, tag=9, wait=False)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for call in (world.barrier, world.view, window.pack, lambda: world.all_reduce(np.ones(1)), world.abort):
                with raises(InvalidError, "forked child"):
                    call()
            with raises(heddle.Error):
                pending.wait(1)
            world.close()
            for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
                del os.environ[name]
            with heddle.init() as alone:
                assert alone.size == 1 and alone.all_reduce(np.ones(1))[0] == 1
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    workers = [multiprocessing.get_context("fork").Process(target=np.ones, args=(10,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    assert world.all_reduce(np.ones(1))[0] == world.size
    world.send(bytes(8), (world.rank - 1) % world.size, tag=9)
    pending.wait()
    world.barrier()


def test_fork_without_exec() -> None:
    run(2, forks)


def closes_under_a_call(world: heddle.Group) -> None:
    group = heddle.Group(world.context, "second")
    failures: list[heddle.Error] = []

    def wait_for_ever() -> None:
        try:
            group.recv(bytearray(8))
        except heddle.Error as failure:
            failures.append(failure)

    threads = [threading.Thread(target=wait_for_ever) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    begin = time.monotonic()
    group.close()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - begin < 3 and len(failures) == 3
    assert {failure.status for failure in failures} <= {Status.EABORTED, Status.EPEER}
    with raises(InvalidError, "the group is closed"):
        group.barrier()
    assert "closed" in repr(group) and "closed" in group._repr_html_()
    third = heddle.Group(world.context, "third")
    operation = third.recv(bytearray(8), wait=False)
    third.abort()
    with raises(heddle.Error, "EABORTED"):
        operation.wait()
    with raises(heddle.Error, "EABORTED"):
        third.barrier()
    world.barrier()
    context = world.context
    children = context.children()
    assert world in children and third in children
    context.close()
    assert world.closed and third.closed and context.closed and not context.children()


def test_close_and_abort_under_calls() -> None:
    run(2, closes_under_a_call)


def deadlines(world: heddle.Group) -> None:
    if world.rank == 0:
        with raises(TimeoutError, "ETIMEDOUT", "barrier", "1"):
            world.barrier(timeout=0.3)
        with raises(heddle.Error):
            world.barrier()
    else:
        time.sleep(1)


def test_deadline_of_an_operation() -> None:
    run(2, deadlines)


def test_options_that_differ_or_are_wrong() -> None:
    def target(world: heddle.Group) -> None:
        with raises(heddle.Error, "ECONFIG", "chunk_bytes"):
            heddle.Group(world.context, "differs", chunk_bytes=4096 * (1 + world.rank))
        with raises(ValueError, "2 entries", "3"):
            heddle.Group(world.context, "x", 0, 3, ranks=[0, 1])
        if world.rank == 0:
            with raises(TimeoutError, "ranks 1", "not seen"):
                heddle.Group(world.context, "alone", timeout=0.3)
        world.barrier()

    run(2, target)
    with raises(InvalidError, "rank 5 of a job of 2"):
        heddle.Context(5, 2)
    with raises(InvalidError, "transport"):
        heddle.Context(0, 1, transport="pigeon")
    with raises(TimeoutError, "ETIMEDOUT"):
        heddle.Context(1, 2, coordinator="127.0.0.1:9", timeout=0.3)


class Dictionary:
    """A store in a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def put(self, key: str, value: bytes) -> None:
        with open(self.path + key.replace("/", "_") + ".tmp", "wb") as file:
            file.write(value)
        os.rename(file.name, file.name[:-4])

    def get(self, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while not os.path.exists(self.path + key.replace("/", "_")):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)
        with open(self.path + key.replace("/", "_"), "rb") as file:
            return file.read()


def test_store_of_the_user(tmp_path: Any) -> None:
    def target(rank: int) -> None:
        for life in range(2):
            context = heddle.Context(rank, 3, store=Dictionary(f"{tmp_path}/{life}"), interface="lo", timeout=20)
            with heddle.Group(context) as group:
                assert group.all_reduce(np.ones(1))[0] == 3
            context.close()
            if rank == 0:  # a rank's garbage is nothing that the others know of
                gc.collect()

    with Tree() as tree:
        for pid in [tree.fork(f"rank {rank}", target, rank) for rank in range(3)]:
            tree.result(pid)

    class Broken:
        def put(self, key: str, value: bytes) -> None:
            raise KeyError("no such store")

        get = put

    for rank in (0, 1):
        with raises(KeyError, "no such store"):
            heddle.Context(rank, 2, store=Broken(), interface="lo", timeout=1)  # type: ignore[arg-type]


def logs(world: heddle.Group) -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("heddle")
    logger.addHandler(Keep())
    logger.setLevel(logging.DEBUG)
    with heddle.Group(heddle.Context()) as group:
        group.barrier()
        until(lambda: len(records) > 0)
    levels = {record.levelno for record in records}
    assert levels <= {logging.DEBUG, logging.INFO, logging.WARNING}


def test_logging() -> None:
    run(2, logs)


def interrupted(world: heddle.Group) -> None:
    """Ctrl-C gets a rank out of a call that waits; the operation goes on."""
    if world.rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with raises(KeyboardInterrupt):
            world.barrier()
        world.send(bytes(1), 1)
    else:
        world.recv(bytearray(1), 0)
        world.barrier()
    world.barrier()


def test_ctrl_c() -> None:
    run(2, interrupted)


def grows(world: heddle.Group) -> list[int]:
    """From 2 to 4 by admission at the same place; then one is evicted, comes back, one leaves."""
    rank, joins = world.rank, world.rank >= 2
    group = heddle.Group(world.context, "elastic", rank, 2, capacity=4, join=joins)
    sizes = []
    if joins:
        assert group.all_reduce(np.full(1, 7.0))[0] == 7  # over itself alone
        first = group.join()
    else:
        sizes.append(int(group.all_reduce(np.ones(1))[0]))
        first = group.admit([2, 3])
    assert group.next == first
    assert group.member(3).member == heddle.MemberState.ACTIVE
    sizes.append(int(group.all_reduce(np.ones(1))[0]))
    assert group.view().active == (0, 1, 2, 3) and group.size == 4
    world.barrier()
    if rank == 0:
        group.evict([3])
    if rank == 3:
        until(lambda: group.member(3).member == heddle.MemberState.INACTIVE)
        with raises(heddle.Error, "ENOTMEMBER"):
            group.barrier()
        group.join()
    else:
        until(lambda: 3 not in group.view().active)
        sizes.append(int(group.all_reduce(np.ones(1))[0]))
        group.admit([3])
    sizes.append(int(group.all_reduce(np.ones(1))[0]))
    if rank == 1:
        group.leave()
    else:
        group.sync()
        until(lambda: 1 not in group.view().active)
    if rank == 0:
        with raises(InvalidError, "9"):
            group.admit([9])
        with raises(TimeoutError, "1"):
            group.admit([1], timeout=0.2)
        with raises(InvalidError, "no ranks"):
            group.evict([], timeout=0.2)
    world.barrier()
    return sizes


def test_growth_and_shrinking() -> None:
    sizes = run(4, grows)
    assert sizes == [[2, 4, 3, 4], [2, 4, 3, 4], [4, 3, 4], [4, 4]]


def test_html_escapes_names() -> None:
    def target(world: heddle.Group) -> None:
        with heddle.Group(world.context, "<b>") as group:
            assert "<b>'" not in group._repr_html_() and "&lt;b&gt;" in group._repr_html_()
            assert group.transport(0) == "self" and "rank 0 of 1" in repr(group)
        read, write = os.pipe()
        world.context.dump(write)
        assert b"group" in os.read(read, 65536)
        with raises(InvalidError):
            group.stats()

    run(1, target)


def test_many_lives() -> None:
    def target(world: heddle.Group) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        for i in range(20):
            with heddle.Group(world.context, f"life {i}") as group:
                group.all_reduce(np.ones(100))
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 4

    with Tree() as tree:
        for pid in start(tree, 2, target):
            tree.result(pid)
