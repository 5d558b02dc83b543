# SPDX-License-Identifier: Apache-2.0
"""Operations in flight."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from ctypes import c_int32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from heddle import _error
from heddle._abi import Status, lib

if TYPE_CHECKING:
    from heddle._group import Group

# A wait comes up so often, for signals such as Ctrl-C.
_SLICE_US = 100_000


class Operation:
    """One collective, send or receive that was started with wait=False. Holds its buffers until it is finished.

    A dropped one goes on, and its buffers are held all the same.
    """

    def __init__(self, group: Group, name: str, result: Any, buffers: tuple[Any, ...]) -> None:
        self._group = group
        self._handle = c_void_p()
        self._status: int = Status.PENDING
        self._buffers = buffers
        self._result = result
        self._ranks: tuple[int, ...] = ()
        self._detail = ""
        self._source = (-1, -1)
        #: What was called.
        self.name = name

    def _start(self, function: Callable[..., int], *arguments: Any) -> None:
        self._group._sweep()
        status = self._group.call(function, *arguments, self._handle)
        if status != Status.OK:
            self._status = status
            self._buffers = ()
            raise _error.last(status)

    def test(self) -> bool:
        """Makes progress; True when it is finished. Waits for nothing, raises nothing."""
        if self._status == Status.PENDING:
            self._note(self._inside(lib.hdl_op_test))
        return self._status != Status.PENDING

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end and returns the result, which is also in the buffer given as output.

        Raises TimeoutError after `timeout` seconds (the operation goes on), IncompleteError if ranks were lost
        (its `result` is what the others made), heddle.Error for what else ended it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._status == Status.PENDING:
            limit = _SLICE_US
            if deadline is not None:
                limit = min(limit, max(0, int((deadline - time.monotonic()) * 1e6)))
            self._note(self._inside(lib.hdl_op_wait, limit))
            if self._status == Status.PENDING and deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name} is not finished after {timeout} s")
        return self.result

    @property
    def status(self) -> Status:
        """PENDING, or how it ended."""
        return Status(self._status)

    @property
    def failed(self) -> tuple[int, ...]:
        """Ranks whose data is missing or that caused the failure; empty while pending."""
        return self._ranks

    @property
    def source(self) -> tuple[int, int]:
        """(rank, tag) that a finished receive got its data from; else (-1, -1)."""
        return self._source

    @property
    def result(self) -> Any:
        """What the call returns with wait=True. Raises as wait() does, heddle.Error with PENDING before the end."""
        if self._status == Status.OK:
            return self._result
        failure = _error.make(self._status, self._detail, self._ranks)
        if isinstance(failure, _error.IncompleteError):
            failure.result = self._result
        raise failure

    def _inside(self, function: Callable[..., int], *arguments: Any) -> int:
        """A call on the handle, during which neither the group nor the context is freed."""
        group, me = self._group, threading.get_ident()
        inside = (group.context if group.closed else group)._inside
        inside.add(me)
        try:
            return Status.EABORTED if self._gone() else function(self._handle, *arguments)
        finally:
            inside.discard(me)

    def _gone(self) -> bool:
        """The handle is not there any more: it ends with the context, and a forked child has none."""
        return self._group.forked or self._group.context.ended

    def _note(self, status: int) -> None:
        """Takes over what the handle knows once the operation is finished."""
        if status == Status.PENDING or self._status != Status.PENDING:
            return
        if status != Status.OK and not self._gone():
            words = (self._group.capacity + 63) // 64
            mask = (c_uint64 * words)()
            lib.hdl_op_failed(self._handle, mask, words)
            self._ranks = _error.ranks_of(mask)
            self._detail = (lib.hdl_op_detail(self._handle) or b"").decode(errors="replace")
        elif status == Status.OK and self.name == "recv":
            rank, tag = c_int32(), c_int32()
            if lib.hdl_op_source(self._handle, rank, tag) == Status.OK:
                self._source = (rank.value, tag.value)
        self._status = status
        self._buffers = ()

    def __del__(self) -> None:
        if not getattr(self, "_handle", None) or sys.is_finalizing() or self._gone():
            return
        if self._status == Status.PENDING and not self.test():
            self._group._orphans.append((self._handle, self._buffers))
        else:
            lib.hdl_op_free(self._handle)

    def __repr__(self) -> str:
        return f"<heddle.Operation {self.name} {self.status.name}>"
