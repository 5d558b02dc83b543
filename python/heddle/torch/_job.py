# SPDX-License-Identifier: Apache-2.0
"""Contexts of this process, and how its ranks meet through torch's store."""

from __future__ import annotations

import ctypes
import datetime
import functools
import itertools
import logging
import os
import threading
import time
from typing import Any

from heddle import _abi, _error, _log
from heddle._abi import Status, lib
from heddle.torch._options import settings

log = logging.getLogger("heddle.torch")

_KEY = "heddle/coordinator"
_numbers = itertools.count(1)
_used: set[bytes] = set()  # records of coordinators that this process knew; a later job has another
_stores: list[Any] = []  # torch's server lives in one of these; a job that comes later on its port needs it


class _Meeting:
    """The store as a bootstrap: rank 0 writes one record, the others wait for one that they have not used yet."""

    def __init__(self, store: Any) -> None:
        self._given = store
        self.aside = hasattr(store, "clone")  # older versions of torch have one connection for everybody
        self._record = b""
        self._put = _abi.BootstrapPut(self._on_put)
        self._get = _abi.BootstrapGet(self._on_get)
        # The number makes it the first meeting of its kind in this process: the library counts them.
        self.struct = _abi.Bootstrap(user=next(_numbers), put=self._put, get=self._get)

    @functools.cached_property
    def _store(self) -> Any:
        """A connection of its own: who waits in torch's, as the application may, holds its lock all the while."""
        try:
            return self._given.clone() if self.aside else self._given
        except RuntimeError:  # a store written in Python
            return self._given

    def _on_put(self, _user: int, _key: bytes, value: int, length: int) -> int:
        try:
            self._record = ctypes.string_at(value, length)
            self._store.set(_KEY, self._record.hex())
        except Exception:
            log.exception("cannot write %s into the store", _KEY)
            return int(Status.ESYSTEM)
        return 0

    def _on_get(self, _user: int, _key: bytes, value: int, length: Any, timeout_us: int) -> int:
        try:
            record = self._wait(time.monotonic() + timeout_us / 1e6)
        except Exception:
            log.exception("cannot read %s from the store", _KEY)
            return int(Status.ESYSTEM)
        if record is None:
            return int(Status.ETIMEDOUT)
        if len(record) > length[0]:
            return int(Status.EINVAL)
        ctypes.memmove(value, record, len(record))
        length[0] = len(record)
        self._record = record
        return 0

    def _wait(self, deadline: float) -> bytes | None:
        pause = 0.001
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait([_KEY], datetime.timedelta(seconds=max(left, 0.001)))
                record = bytes.fromhex(self._store.get(_KEY).decode())
                if record and record not in _used:
                    return record
            except (RuntimeError, ValueError):  # not there in time, or gone between the two calls
                pass
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def over(self, rank: int) -> None:
        """A later job on this store must not follow this one's coordinator."""
        _used.add(self._record)
        if rank == 0:
            try:
                self._store.set(_KEY, "")
            except Exception as error:  # noqa: BLE001  its server may be gone already
                log.debug("cannot clear %s: %s", _KEY, error)


def _interface(store: Any) -> str | None:
    """Where to listen: what the application says; the loopback if the store is there; None = the library chooses."""
    if settings.host_ip:
        return settings.host_ip
    if settings.device_filter and os.path.isdir(f"/sys/class/net/{settings.device_filter[0]}"):
        return settings.device_filter[0]
    if os.environ.get("HEDDLE_INTERFACE"):
        return None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return "lo" if getattr(store, "host", "") in ("localhost", "127.0.0.1", "::1") else None


class Job:
    """A context. shared: it is a world's, whose sub-groups name their ranks; else it has the ranks of one group."""

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout: datetime.timedelta, shared: bool) -> None:
        self.rank = rank
        self.shared = shared
        self._groups = 0
        self._lock = threading.Lock()
        self._joining = threading.Lock()
        self.meeting = _Meeting(store)
        if not any(known is store for known in _stores):
            _stores.append(store)
        self._store, self._num_ranks, self._timeout = store, num_ranks, timeout
        self.context: ctypes.c_void_p | None = None
        settings.started = True

    def connect(self) -> ctypes.c_void_p:
        """The context; the first call joins the job, which takes as long as the other ranks do."""
        with self._joining:
            if self.context is None:
                context = ctypes.c_void_p()
                _error.check(lib.hdl_context_create(self._choices(), context))
                self.context = context
            return self.context

    def _choices(self) -> _abi.ContextOpts:
        options = _abi.ContextOpts(
            rank=self.rank,
            num_ranks=self._num_ranks,
            timeout_us=max(1, self._timeout // datetime.timedelta(microseconds=1)),
            log_level=_log.level(),
            log_fd=_log.descriptor(),
        )
        options.bootstrap = ctypes.pointer(self.meeting.struct)
        interface = _interface(self._store)
        if interface:
            options.interface = interface.encode()
        if os.environ.get("MC_FORCE_TCP", "").lower() in ("1", "true"):
            options.transport = b"fabric"
        return options

    def enter(self) -> None:
        with self._lock:
            self._groups += 1

    def leave(self) -> None:
        """The last group takes the context with it."""
        with self._lock:
            self._groups -= 1
            if self._groups:
                return
            context, self.context = self.context, None
        self.meeting.over(self.rank)
        if context is not None:
            lib.hdl_context_destroy(context)
