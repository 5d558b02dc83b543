# SPDX-License-Identifier: Apache-2.0
"""Ranks of a test as forked processes: torch is imported once, and each test has a time limit."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mooncake import pg

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store looks the address of each connection up: a DNS server that does not answer would take 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
LIMIT = 60.0


class Failed(AssertionError):
    """A rank raised, died, or did not end in time."""


class Tree:
    """Processes that run functions and hand back what they return. Use as a context manager; it kills what is left."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._children: dict[int, tuple[str, int]] = {}  # pid: name, pipe
        self._deadline = time.monotonic() + limit
        self.port = 0

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in list(self._children):
            self.kill(pid)

    def fork(self, name: str, target: Callable[..., Any], *args: Any) -> int:
        """Starts a process; returns its pid."""
        get, put = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(put, target, args)
        os.close(put)
        self._children[pid] = (name, get)
        return pid

    def result(self, pid: int) -> Any:
        """What the process returned. Raises Failed with its traceback, or with its stacks if it hangs."""
        name, pipe = self._children.pop(pid)
        data = b""
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.3)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise Failed(f"{name} did not end in time; its stacks are above")
            block = os.read(pipe, 1 << 16)
            if not block:
                break
            data += block
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        if not data:
            raise Failed(f"{name} ended with {os.waitstatus_to_exitcode(status)} and without a result")
        good, value = pickle.loads(data)
        if not good:
            raise Failed(f"{name} raised:\n{value}")
        if status != 0:
            raise Failed(f"{name} ended with {os.waitstatus_to_exitcode(status)} after its work")
        return value

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Ends a process, and forgets it."""
        _, pipe = self._children.pop(pid)
        os.kill(pid, number)
        os.waitpid(pid, 0)
        os.close(pipe)

    def serve(self) -> None:
        """A process that holds torch's store and outlives every rank; its port is `port`."""
        get, put = os.pipe()
        self.fork("store", _serve, put)
        os.close(put)
        self.port = int(os.read(get, 16))
        os.close(get)

    def arrived(self, count: int) -> None:
        """Returns a little after `count` ranks called arrive(). Raises Failed if one ended instead."""
        store = dist.TCPStore("127.0.0.1", self.port, None, False)
        pids = {pipe: pid for pid, (_, pipe) in self._children.items()}
        while store.add("arrived", 0) < count:
            for pipe in select.select(pids, [], [], 0.01)[0]:
                self.result(pids.pop(pipe))
            assert time.monotonic() < self._deadline, f"{count} ranks did not arrive"
        time.sleep(0.2)


def _child(put: int, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 0
    try:
        result = (True, target(*args))
    except BaseException:  # noqa: BLE001
        result = (False, traceback.format_exc())
        code = 1
    data = pickle.dumps(result)
    while data:
        data = data[os.write(put, data) :]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(put: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(put, str(store.port).encode())
    os.close(put)
    while True:
        time.sleep(60)


def join(
    port: int,
    rank: int,
    size: int,
    options: pg.MooncakeBackendOptions | None = None,
    backend: str = "mooncake-cpu",
    timeout: float = 60,
) -> Any:
    """init_process_group through the tree's store; returns the group."""
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, pg_options=options)
    return dist.group.WORLD


def arrive(port: int, *groups: Any) -> None:
    """Says that this rank has made its groups: a death is a loss only from then on."""
    for group in groups:
        pg.get_current_epoch(group)
    dist.TCPStore("127.0.0.1", port, None, False).add("arrived", 1)


def end_together(port: int, count: int) -> None:
    """Returns when `count` ranks are here: who ends before is lost to the others, with rank 0 the coordinator too."""
    store = dist.TCPStore("127.0.0.1", port, None, False)
    store.add("ended", 1)
    until(lambda: store.add("ended", 0) >= count)


def _world(port: int, rank: int, size: int, options: Any, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    join(port, rank, size, options)
    result = target(rank, size, *args)
    dist.destroy_process_group()
    return result


def run(size: int, target: Callable[..., Any], *args: Any, options: Any = None, limit: float = LIMIT) -> list[Any]:
    """Runs target(rank, size, *args) in a world of `size` ranks; returns what each rank returned."""
    with Tree(limit) as tree:
        tree.serve()
        pids = [
            tree.fork(f"rank {rank} of {size}", _world, tree.port, rank, size, options, target, args)
            for rank in range(size)
        ]
        return [tree.result(pid) for pid in pids]


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """The block raises `kind` with all words in its text."""
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
        return
    raise AssertionError(f"{kind.__name__} with {words} was not raised")


def until(test: Callable[[], bool], limit: float = 20) -> None:
    """Polls until it holds."""
    deadline = time.monotonic() + limit
    while not test():
        assert time.monotonic() < deadline, f"did not come to hold in {limit} s"
        time.sleep(0.005)
