# SPDX-License-Identifier: Apache-2.0
"""A process's membership in a job."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import weakref
from typing import Protocol

from heddle import _abi, _error, _log
from heddle._abi import LogLevel, Status, lib
from heddle._object import Object, microseconds


class Store(Protocol):
    """A key-value store through which the ranks of a job find each other."""

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for the key, at most `timeout` seconds. Raises TimeoutError when they are over."""


def _text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


_asked = threading.local()  # the store of the context that this thread creates, and what it raised
_kinds: weakref.WeakKeyDictionary[Store, int] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


def _put(_user: int, key: bytes, value: int, length: int) -> int:
    try:
        _asked.store.put(key.decode(), ctypes.string_at(value, length))
    except BaseException as failure:  # noqa: BLE001  none may cross the C frames
        _asked.failure = failure
        return Status.ESYSTEM
    return Status.OK


def _get(_user: int, key: bytes, value: int, length: ctypes._Pointer[ctypes.c_size_t], timeout_us: int) -> int:
    try:
        data = _asked.store.get(key.decode(), timeout_us / 1e6)
    except TimeoutError:
        return Status.ETIMEDOUT
    except BaseException as failure:  # noqa: BLE001
        _asked.failure = failure
        return Status.ESYSTEM
    if len(data) > length[0]:
        return Status.EINVAL
    ctypes.memmove(value, data, len(data))
    length[0] = len(data)
    return Status.OK


# One pair for all stores, since the library tells stores apart by what they are called with.
_PUT, _GET = _abi.BootstrapPut(_put), _abi.BootstrapGet(_get)


def _kind(store: Store) -> int:
    """The library counts the contexts that meet through one store: all ranks must come to the same number."""
    try:
        return _kinds.setdefault(store, next(_numbers))
    except TypeError:  # not hashable, or without weak references
        return next(_numbers)


def create(opts: _abi.ContextOpts, store: Store | None) -> ctypes.c_void_p:
    """A new context of the C library. Raises heddle.Error, and what the store raised."""
    _asked.store, _asked.failure = store, None
    if store is not None:
        opts.bootstrap = ctypes.pointer(_abi.Bootstrap(_kind(store), _PUT, _GET))
    made = ctypes.c_void_p()
    status = lib.hdl_context_create(opts, made)
    failure, _asked.store, _asked.failure = _asked.failure, None, None
    if failure is not None:
        if status == Status.OK:
            lib.hdl_context_destroy(made)
        raise failure
    _error.check(status)
    return made


class Context(Object):
    """Joins a job; without arguments as the environment says (torchrun, `heddle run`, mpirun, srun), else alone.

    rank, num_ranks: place in the job, both or none. The coordinator is found by `coordinator` ("host:port"),
    `store`, `shared_dir` (a directory that all ranks see) or the environment. timeout: seconds for joining
    (60); dead_after: seconds of silence that mean death (5); grace, link_timeout: see heddle.h. Log lines become
    records of the logger `heddle` if the application has set up logging before, else they go to stderr.

    Raises heddle.Error: EINVAL (options), ETIMEDOUT (no coordinator in time), ECONFIG (version or token
    differs); and what the store raised.
    """

    _what = "context"

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 0,
        *,
        coordinator: str | None = None,
        store: Store | None = None,
        shared_dir: str | None = None,
        token: str | None = None,
        interface: str | None = None,
        transport: str | None = None,
        timeout: float | None = None,
        dead_after: float | None = None,
        grace: float | None = None,
        link_timeout: float | None = None,
        standalone: bool = False,
        log_level: LogLevel = LogLevel.DEFAULT,
    ) -> None:
        super().__init__(None)
        opts = _abi.ContextOpts(
            rank=rank,
            num_ranks=num_ranks,
            coordinator=_text(coordinator),
            shared_dir=_text(shared_dir),
            token=_text(token),
            interface=_text(interface),
            transport=_text(transport),
            timeout_us=microseconds(timeout),
            dead_after_us=microseconds(dead_after),
            grace_us=microseconds(grace),
            link_timeout_us=microseconds(link_timeout),
            standalone=standalone,
            log_level=log_level or _log.level(),
            log_fd=_log.descriptor(),
        )
        self._opened(create(opts, store).value or 0)
        _open_contexts.add(self)

    def dump(self, fd: int = 2) -> None:
        """Writes the last 64 operations of every group, links and counters as text to a file descriptor."""
        _error.check(self.call(lib.hdl_context_dump, fd))

    _destroy = staticmethod(lib.hdl_context_destroy)


_open_contexts: weakref.WeakSet[Context] = weakref.WeakSet()


def open_contexts() -> list[Context]:
    """The contexts of this process that are not closed."""
    return [context for context in _open_contexts if not context.closed]


@atexit.register
def _close_contexts() -> None:
    """Leaves the jobs in order while Python callbacks can still run; each step is bounded by the library."""
    for context in list(_open_contexts):
        context.close()


def _forget_contexts() -> None:
    for context in list(_open_contexts):
        context._forget()


os.register_at_fork(after_in_child=_forget_contexts)
