# SPDX-License-Identifier: Apache-2.0
"""Contexts of this process, and how its ranks meet through torch's store."""

from __future__ import annotations

import ctypes
import datetime
import functools
import logging
import os
import threading
import time
from typing import Any

from heddle import _abi, _log
from heddle._abi import lib
from heddle._context import create
from heddle.torch._options import settings

log = logging.getLogger("heddle.torch")

_KEY = "heddle/coordinator"
_used: set[bytes] = set()  # records of coordinators that this process knew; a later job has another
_stores: list[Any] = []  # torch's server lives in one of these; a job that comes later on its port needs it


class _Meeting:
    """torch's store as ours: rank 0 writes one record, the others wait for one that they have not used yet."""

    def __init__(self, store: Any) -> None:
        self._given = store
        self.aside = hasattr(store, "clone")  # older versions of torch have one connection for everybody
        self._record = b""

    @functools.cached_property
    def _store(self) -> Any:
        """A connection of its own: who waits in torch's, as the application may, holds its lock all the while."""
        try:
            return self._given.clone() if self.aside else self._given
        except RuntimeError:  # a store written in Python
            return self._given

    def put(self, _key: str, record: bytes) -> None:
        self._record = record
        self._store.set(_KEY, record.hex())

    def get(self, _key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        pause = 0.001
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait([_KEY], datetime.timedelta(seconds=max(left, 0.001)))
                record = bytes.fromhex(self._store.get(_KEY).decode())
                if record and record not in _used:
                    self._record = record
                    return record
            except (RuntimeError, ValueError):  # not there in time, or gone between the two calls
                pass
            if time.monotonic() >= deadline:
                raise TimeoutError
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
                self.context = create(self._choices(), self.meeting)
            return self.context

    def _choices(self) -> _abi.ContextOpts:
        options = _abi.ContextOpts(
            rank=self.rank,
            num_ranks=self._num_ranks,
            timeout_us=max(1, self._timeout // datetime.timedelta(microseconds=1)),
            log_level=_log.level(),
            log_fd=_log.descriptor(),
        )
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
