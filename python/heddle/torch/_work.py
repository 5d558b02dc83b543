# SPDX-License-Identifier: Apache-2.0
"""An operation under way, as torch sees it: waiting, futures, who failed."""

from __future__ import annotations

import collections
import ctypes
import datetime
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.futures import Future as _Future

from heddle import _error
from heddle._abi import FOREVER, Status, lib

if TYPE_CHECKING:
    from heddle.torch._group import ProcessGroup

PENDING = int(Status.PENDING)
Future: TypeAlias = "_Future[Any]"
# These mean that ranks were lost: wait() does not raise, get_local_success() and the hint tell.
_LOSSES = frozenset({Status.INCOMPLETE, Status.EPEER, Status.ELINK, Status.EFENCED})
_RAISE = os.environ.get("HEDDLE_RAISE_ON_FAILURE", "") not in ("", "0")
# C++ of torch 2.6 keeps its half of a work only: what it was given lives here until the ring is full. That of newer
# ones does so with the all_reduce of one number that tells DDP who has inputs left: it waits, then asks for the future.
_UNHELD = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 7)
_held: collections.deque[Work] = collections.deque(maxlen=4096 if _UNHELD else 16)


def micros(timeout: datetime.timedelta | None) -> int:
    """A timeout of torch in microseconds; none, zero and negative ones mean for ever."""
    if timeout is None:
        return FOREVER
    us = timeout // datetime.timedelta(microseconds=1)
    return us if us > 0 else FOREVER


def read_mask(fill: Callable[[Any, int], int], capacity: int) -> tuple[int, ...]:
    """Ranks of a mask that a C function writes."""
    words = (capacity + 63) // 64
    mask = (ctypes.c_uint64 * words)()
    fill(mask, words)
    return _error.ranks_of(mask)


class Work(dist.Work):
    """What async_op=True returns.

    failed: in-group ranks whose data is missing or that caused the failure, ascending; () if none.
    """

    failed: tuple[int, ...] = ()
    _status = PENDING
    _error: BaseException | None = None
    _future: Future | None = None

    def __init__(self, group: ProcessGroup, name: str, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.group = group
        self.name = name
        self._outputs = outputs
        self._lock = threading.Lock()
        if _UNHELD:
            _held.append(self)

    def _block(self, timeout_us: int) -> bool:
        """True when finished."""
        return True

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits until the buffers are final; False if the timeout is over first (the operation goes on).

        A lost rank does not raise (see get_local_success) unless HEDDLE_RAISE_ON_FAILURE=1. Raises heddle.Error for
        a call that does not match the other ranks', an aborted group, a lost coordinator, the group's own timeout.
        """
        if self._status == PENDING and not self._block(micros(timeout)):
            return False
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._status != PENDING or self._block(0)

    def is_success(self) -> bool:
        return self.is_completed() and self._status == 0

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Future:
        """A future of the output tensors."""
        with self._lock:
            if self._future is None:
                source: Future = _Future()
                # An exception stored in a future makes DDP's reducer crash; one raised in a callback does not.
                self._future = source.then(self._value)
                if self._status != PENDING:
                    source.set_result(None)
                else:
                    self._later(source)
            return self._future

    def _value(self, _: Future) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def _later(self, source: Future) -> None:
        raise NotImplementedError

    def _conclude(
        self, status: int, detail: str, failed: tuple[int, ...], after: Callable[[Work], None] | None
    ) -> None:
        """Takes over how it ended. The status comes last: others look at it without a lock."""
        # A fenced rank's operation names nobody else: what it lacks is this rank's membership.
        self.failed = failed or ((self.group.rank(),) if status in _LOSSES else ())
        if after is not None:
            try:
                after(self)
            except Exception as error:  # noqa: BLE001  wait() raises it
                self._error = error
        if status != 0 and (status not in _LOSSES or _RAISE) and self._error is None:
            self._error = _error.make(status, f"{self.name}: {detail}" if detail else "", self.failed)
        if status != 0:
            self.group.failed(self, status, detail)
        self._status = status

    def __repr__(self) -> str:
        state = "pending" if self._status == PENDING else Status(self._status).name
        return f"<heddle {self.name}: {state}{f', failed {list(self.failed)}' if self.failed else ''}>"


class Finished(Work):
    """An operation that was waited for in its call."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        outputs: list[torch.Tensor],
        status: int = 0,
        after: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__(group, name, outputs)
        detail, failed = "", self.failed
        if status != 0:
            detail = _error.last_detail()
            failed = read_mask(lib.hdl_last_failed, group.capacity)
        self._conclude(status, detail, failed, after)
        if status == Status.EFENCED:  # before the call or in it: nobody could ask a work which
            self._error = _error.make(status, f"{name}: {detail}", failed)


class Pending(Work):
    """An operation with a handle. It keeps its tensors; its group keeps it until it is finished."""

    _waiters = 0
    _source = -1

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        op: ctypes.c_void_p,
        outputs: list[torch.Tensor],
        keep: Any,
        after: Callable[[Work], None] | None,
        in_order: bool,
    ) -> None:
        super().__init__(group, name, outputs)
        self._op: ctypes.c_void_p | None = op
        self._keep = keep
        self._after = after
        self._in_order = in_order
        if not _UNHELD and name.endswith("all_reduce") and outputs[0].numel() == 1:
            _held.append(self)

    def _block(self, timeout_us: int) -> bool:
        with self._lock:
            if self._op is None:
                return True
            op = self._op
            self._waiters += 1
        status = PENDING
        try:
            status = lib.hdl_op_wait(op, timeout_us)
        finally:
            with self._lock:
                self._waiters -= 1
                if status != PENDING and self._status == PENDING:
                    self._take(op, status)
                if self._status != PENDING and not self._waiters and self._op is not None:
                    self._op = None
                    lib.hdl_op_free(op)
        return self._status != PENDING

    def _take(self, op: ctypes.c_void_p, status: int) -> None:
        """Once, under the lock: who waits too must find the copies done."""
        group, after = self.group, self._after
        failed: tuple[int, ...] = ()
        detail = ""
        if status != 0:
            failed = read_mask(lambda mask, words: lib.hdl_op_failed(op, mask, words), group.capacity)
            detail = lib.hdl_op_detail(op).decode(errors="replace")
        if self.name.endswith("recv") and status == 0:
            rank = ctypes.c_int32(-1)
            lib.hdl_op_source(op, rank, None)
            self._source = rank.value
        self._conclude(status, detail, failed, after)
        self._keep = self._after = None
        group.pending.pop(self, None)

    def _later(self, source: Future) -> None:
        self.group.complete_later(self, source, self._in_order)

    def source_rank(self) -> int:
        """Group rank that a receive got its data from."""
        self.wait()
        return self._source

    _source_rank = source_rank


class Many(Work):
    """Several operations under one handle, as a coalescing manager makes them."""

    def __init__(self, group: ProcessGroup, name: str, works: list[Work]) -> None:
        super().__init__(group, name, [tensor for work in works for tensor in work._outputs])
        self._works = works

    def _block(self, timeout_us: int) -> bool:
        deadline = None if timeout_us < 0 else _now_us() + timeout_us
        for work in self._works:
            left = FOREVER if deadline is None else max(0, deadline - _now_us())
            if work._status == PENDING and not work._block(left):
                return False
        self.failed = tuple(sorted({rank for work in self._works for rank in work.failed}))
        self._error = next((work._error for work in self._works if work._error is not None), None)
        self._status = next((work._status for work in self._works if work._status != 0), 0)
        return True

    def _later(self, source: Future) -> None:
        self.group.complete_later(self, source, True)


def _now_us() -> int:
    return time.monotonic_ns() // 1000


class Completer:
    """Completes the futures of a group's collectives, in their order, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work, source: Future) -> None:
        self._queue.put((work, source))

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        self._queue.put(None)
        if not self.is_current():
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            complete(*item)
            del item


def complete(work: Work, source: Future) -> None:
    """Waits and lets the future's callback take the result or the error."""
    work._block(FOREVER)
    source.set_result(None)
