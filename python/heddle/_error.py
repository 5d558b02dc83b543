# SPDX-License-Identifier: Apache-2.0
"""Statuses as exceptions."""

from __future__ import annotations

import ctypes
from typing import Any

from heddle._abi import Status, lib


class Error(RuntimeError):
    """A call or an operation that failed.

    status: heddle.Status; detail: the library's text, with the offending values; ranks: the ranks that
    caused the failure or whose data is missing, ascending, as far as they are known.
    """

    def __init__(self, status: int, detail: str = "", ranks: tuple[int, ...] = ()) -> None:
        self.status = Status(status)
        self.detail = detail
        self.ranks = ranks
        text = detail or lib.hdl_status_text(status).decode()
        super().__init__(f"{lib.hdl_status_name(status).decode()}: {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self.status), self.detail, self.ranks)


class InvalidError(Error, ValueError):
    """EINVAL: an argument is wrong, or another rank gave another one."""


class TimedOutError(Error, TimeoutError):
    """ETIMEDOUT: a deadline is over; the text says what was missing, on which rank."""


class IncompleteError(Error):
    """INCOMPLETE: finished over the ranks that are left; `ranks` says whose data is missing.

    result: what the call would have returned, over the ranks that are left.
    """

    result: Any = None


_CLASSES: dict[int, type[Error]] = {
    Status.EINVAL: InvalidError,
    Status.ETIMEDOUT: TimedOutError,
    Status.INCOMPLETE: IncompleteError,
}


def make(status: int, detail: str = "", ranks: tuple[int, ...] = ()) -> Error:
    """The exception for a status."""
    return _CLASSES.get(status, Error)(status, detail, ranks)


def last_detail() -> str:
    """Text of the calling thread's last call that was not OK."""
    return (lib.hdl_error_detail() or b"").decode(errors="replace")


def last(status: int) -> Error:
    """The exception for the calling thread's last call that was not OK."""
    return make(status, last_detail())


def check(status: int) -> None:
    """Raises unless the call that just returned on this thread was HDL_OK."""
    if status != 0:
        raise last(status)


def ranks_of(mask: ctypes.Array[ctypes.c_uint64]) -> tuple[int, ...]:
    """Numbers of the bits that are set, ascending."""
    return tuple(64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if bits >> bit & 1)
