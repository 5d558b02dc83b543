# SPDX-License-Identifier: Apache-2.0
"""The process group: how it is made and ends, what torch asks it, and its view of the members."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import datetime
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from heddle import _abi, _error
from heddle._abi import MemberState, Status, lib
from heddle._job import stats_sources
from heddle.torch._calls import Calls
from heddle.torch._job import Job
from heddle.torch._options import MooncakeBackendOptions, pool
from heddle.torch._work import Work, micros

log = logging.getLogger("heddle.torch")

# Every group made in this process that was not shut down. Also keeps memory alive that operations write into.
_groups: list[ProcessGroup] = []


class ProcessGroup(Calls):
    """A torch process group whose operations are heddle's. dist.group.WORLD is one of these.

    capacity: slots; options: the group's options; job: the context it lives in.
    """

    # What torch asks a backend, which is this object too (_get_backend).
    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(
        self, backend: str, dist_opts: Any, options: MooncakeBackendOptions | None, job: Job, devices: tuple[str, ...]
    ) -> None:
        rank, size = int(dist_opts.group_rank), int(dist_opts.group_size)
        super().__init__(rank, size, dist_opts.timeout)
        self._rank = rank
        self._declared = size
        self._backend_name = backend
        self._group_name = self._group_desc = str(dist_opts.group_id)
        self._devices = devices
        self._store = dist_opts.store
        self._lock = threading.Lock()
        self.before_end: list[Callable[[], None]] = []  # what is made of the group ends before it
        self.options = options or MooncakeBackendOptions.from_environment()
        self.capacity = self.options.capacity(size)
        self.alone = self.options.is_extension
        self._held_at = 0  # the next collective when somebody removed a lost rank that is still shown; 0 = none is
        self.unsynced_failures = False  # something failed since sync_after_failure() was called last
        self.job = job
        members = (rank,) if self.alone else range(size)
        active = torch.tensor([int(r in members) for r in range(self.capacity)], dtype=torch.int32)
        self.active_ranks = active if self.options.active_ranks is None else self.options.active_ranks
        self.active_ranks[: self.capacity] = active
        self._array = ctypes.c_size_t * self.capacity
        self._on_view = _abi.ViewCallback(self._view_changed)
        self._handle: ctypes.c_void_p | None = None
        self._over = False  # it was destroyed, or could not be made
        self._failure: BaseException | None = None
        self._process = os.getpid()
        # The ranks meet while the application goes on; whatever needs the group waits for it.
        self._made = threading.Event()
        job.enter()
        _groups.append(self)
        # But a group with room for more is there when init returns: who joins it may be told to start then.
        if job.meeting.aside and self.capacity == size:
            _thread.start_new_thread(self._make, (dist_opts,))  # Thread.start() would wait until it runs
        else:
            self._make(dist_opts)

    def _make(self, dist_opts: Any) -> None:
        try:
            self._handle = self._create(dist_opts)
            self.refresh()
            _error.check(lib.hdl_group_on_view(self._handle, self._on_view, None))
            log.info("group %s: rank %d of %d, %d slots", self._group_name, self._rank, self.size(), self.capacity)
        except BaseException as error:  # noqa: BLE001  who uses the group is told
            log.warning("group %s was not made: %s", self._group_name, error)
            self._failure = error
        with self._lock:
            self._made.set()
            late = self._over
        if late:
            self._end(self._handle)

    def _end(self, handle: ctypes.c_void_p | None) -> None:
        self._handle = None
        if handle is not None:
            lib.hdl_group_on_view(handle, _abi.ViewCallback(), None)
            lib.hdl_group_destroy(handle)
        self.job.leave()

    def _create(self, dist_opts: Any) -> ctypes.c_void_p:
        chunks, chunk_bytes = pool()
        opts = _abi.GroupOpts(
            window_chunks=chunks,
            chunk_bytes=chunk_bytes,
            name=self._group_name.encode()[-63:],
            rank=self._rank,
            num_ranks=min(self._declared, self.capacity),
            capacity=self.capacity,
            timeout_us=max(1, micros(dist_opts.timeout)),
            manual_deactivate=not self.options.auto_deactivate_on_failure,
            manual_sync=not self.options.auto_sync_on_failure,
            join=self.alone,
            found_only=self.options.may_join,
        )
        ranks = list(dist_opts.global_ranks_in_group)
        if ranks and self.job.shared:
            opts.ranks = (ctypes.c_int32 * len(ranks))(*ranks)
        handle = ctypes.c_void_p()
        context = self.job.connect()
        status = lib.hdl_group_create(context, opts, handle)
        if status == Status.EBUSY and self.options.may_join:
            log.warning("group %s runs already: rank %d is alone until join_group()", self._group_name, self._rank)
            self.alone = opts.join = True
            opts.found_only = False
            status = lib.hdl_group_create(context, opts, handle)
        _error.check(status)
        return handle

    # ------------------------------------------------------------ what torch asks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        """Highest active rank + 1; a joiner has the size that it declared until join_group()."""
        if self.alone or self._handle is None:  # nothing is known yet, or any more
            return self._declared
        return int(lib.hdl_group_size(self._handle))

    getRank = rank
    getSize = size

    def name(self) -> str:
        return self._backend_name

    getBackendName = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._devices]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type not in self._devices:
            raise RuntimeError(f"backend {self._backend_name} has no device {device}, only {', '.join(self._devices)}")
        return self

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout
        self._call = _abi.Call(timeout_us=max(0, micros(timeout)))

    def _get_sequence_number_for_group(self) -> int:
        return int(lib.hdl_group_next(self._alive())) - 1

    def _set_sequence_number_for_group(self) -> None:
        pass

    def __repr__(self) -> str:
        state = ", destroyed" if self._over else ""
        return f"<heddle {self._backend_name} group {self._group_name}: rank {self._rank} of {self.size()}{state}>"

    def _alive(self) -> ctypes.c_void_p:
        """The C library's group, once the ranks have met; the error if they could not."""
        if self._handle is None:
            if self._over:
                raise _error.make(Status.EABORTED, f"group {self._group_name} was destroyed")
            if self._process != os.getpid():
                raise _error.make(Status.EINVAL, "the group was made before the fork: it belongs to the parent process")
            self._made.wait()
            if self._handle is None:
                raise self._failure or _error.make(Status.EABORTED, f"group {self._group_name} was destroyed")
        return self._handle

    # ----------------------------------------------------------------- membership

    def handle(self) -> ctypes.c_void_p:
        """The C library's group."""
        return self._alive()

    def stats(self) -> dict[str, int]:
        """Counters since creation, by the names of struct hdl_group_stats."""
        found = _abi.GroupStats()
        _error.check(lib.hdl_group_stats(self._alive(), found))
        return found.values()

    def failed(self, work: Work, status: int, detail: str) -> None:
        """An operation ended without success; the mirror is brought up to date before its wait() returns."""
        self.unsynced_failures |= bool(work.failed)
        if self._handle is not None:
            self.refresh()
        log.info("group %s: %s: %s %s", self._group_name, work.name, Status(status).name, detail or work.failed)

    def refresh(self, taken: bool = False) -> _abi.View:
        """The newest view; the mirror of active ranks follows.

        That another member removed a lost rank shows from the own next collective on, or `taken`: with the end of an
        own call about members.
        """
        words = (self.capacity + 63) // 64
        mask, absent = (ctypes.c_uint64 * words)(), (ctypes.c_uint64 * words)()
        view = _abi.View(mask_words=words, active=mask, absent=absent)
        member = _abi.Member()
        handle = self._alive()
        with self._lock:  # whoever reads later writes later
            _error.check(lib.hdl_group_view(handle, view))
            now = [mask[rank // 64] >> rank % 64 & 1 for rank in range(self.capacity)]
            shown = self.active_ranks[: self.capacity].tolist()
            removed = [r for r in _error.ranks_of(absent) if shown[r] > now[r] and r != self._rank]
            if taken or self.options.auto_deactivate_on_failure or not removed:
                self._held_at = 0
            else:
                number = lib.hdl_group_next(handle)
                self._held_at = self._held_at or number
                if number == self._held_at:
                    for rank in removed:
                        now[rank] = 1
            if shown != now:
                self.active_ranks[: self.capacity] = torch.tensor(now, dtype=torch.int32)
                ranks = [rank for rank in range(self.capacity) if now[rank]]
                log.info("group %s: view %d: active ranks %s", self._group_name, view.epoch, ranks)
            # A change that takes effect at a later operation shows from that operation on.
            self._lagging = False
            for rank in range(self.capacity):
                if lib.hdl_group_member(handle, rank, member) == 0:
                    self._lagging |= now[rank] != (member.member == MemberState.ACTIVE)
        return view

    def _view_changed(self, _user: int, _group: int, _epoch: int) -> None:
        """On a thread of the library."""
        with contextlib.suppress(_error.Error):  # the group is being destroyed
            self.refresh()

    # ------------------------------------------------------------------------ end

    def abort(self) -> None:
        """Ends every operation here, from any thread; the others see this rank as lost in this group."""
        if not self._over:
            _error.check(lib.hdl_group_abort(self._alive()))
            log.warning("group %s: aborted by this rank", self._group_name)

    def shutdown(self) -> None:
        """Waits up to 2 s for unfinished operations, leaves the group, and with the last group the job."""
        if self._over:
            return
        self._made.wait(2)
        with self._lock:
            self._over, made, handle = True, self._made.is_set(), self._handle
        _groups.remove(self)
        if handle is None:  # a group that the ranks still meet for ends when they have
            if made:
                self._end(None)
            return
        for end in self.before_end:
            end()
        self._declared = self.size()
        deadline = time.monotonic() + 2
        for work in list(self.pending):
            work._block(max(0, int((deadline - time.monotonic()) * 1e6)))
        if self.pending:
            # Threads may be waiting for these, on memory that is about to go.
            lib.hdl_group_abort(handle)
            for work in list(self.pending):
                work._block(1_000_000)
        if self._completer is not None:
            self._completer.stop()
        self._end(handle)


def _stats() -> dict[str, dict[str, int]]:
    return {f"torch {group.getGroupName()}": group.stats() for group in _groups}


stats_sources.append(_stats)
