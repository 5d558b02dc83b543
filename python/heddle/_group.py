# SPDX-License-Identifier: Apache-2.0
"""An ordered set of ranks that do operations together."""

from __future__ import annotations

import ctypes
import dataclasses
import html
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_uint64
from typing import Any

from heddle import _abi, _error
from heddle._abi import MemberState, ProcessState, Status, lib
from heddle._collectives import Collectives
from heddle._context import Context
from heddle._object import microseconds


@dataclasses.dataclass(frozen=True)
class View:
    """What a group has agreed on. `active` and `absent` are slots, ascending; absent ones are lost."""

    epoch: int
    rank: int
    capacity: int
    size: int
    active: tuple[int, ...]
    absent: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Member:
    """What is known of a slot: process (job_rank -1 = none), place in the group, first and last operation."""

    process: ProcessState
    member: MemberState
    job_rank: int
    rank_epoch: int
    first: int
    last: int


def int32s(values: Sequence[int]) -> ctypes.Array[c_int32]:
    """A C array of the values."""
    return (c_int32 * len(values))(*values)


class Group(Collectives):
    """A group of the context's job; collective among its founders (not with join=True).

    name: identity together with capacity. rank, num_ranks: own slot and number of founders; 0 founders = all
    ranks of the job. ranks: job rank of each slot. capacity: slots, for groups that grow. timeout: seconds
    for creation (60); op_timeout: deadline of every operation in seconds (none). The flags: heddle.h.

    Raises heddle.Error: ECONFIG if the founders' options differ (naming the field, values and ranks),
    ETIMEDOUT listing the ranks that were not seen, EINVAL.
    """

    _what = "group"

    def __init__(
        self,
        context: Context,
        name: str | None = None,
        rank: int = 0,
        num_ranks: int = 0,
        *,
        capacity: int = 0,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        op_timeout: float | None = None,
        window_chunks: int = 0,
        chunk_bytes: int = 0,
        completion_local: bool = False,
        manual_deactivate: bool = False,
        manual_sync: bool = False,
        join: bool = False,
    ) -> None:
        super().__init__(context)
        if ranks is not None and len(ranks) != num_ranks:
            raise ValueError(f"ranks has {len(ranks)} entries, num_ranks is {num_ranks}")
        opts = _abi.GroupOpts(
            name=None if name is None else name.encode(),
            rank=rank,
            num_ranks=num_ranks,
            capacity=capacity,
            ranks=None if ranks is None else int32s(ranks),
            timeout_us=microseconds(timeout),
            op_timeout_us=microseconds(op_timeout),
            window_chunks=window_chunks,
            chunk_bytes=chunk_bytes,
            completion_local=completion_local,
            manual_deactivate=manual_deactivate,
            manual_sync=manual_sync,
            join=join,
        )
        self.context = context
        self.name = name or "world"
        self._on_view: object = None
        # Dropped operations that are not finished, with what they read and write.
        self._orphans: list[tuple[ctypes.c_void_p, Any]] = []
        made = ctypes.c_void_p()
        _error.check(context.call(lib.hdl_group_create, opts, made))
        self._opened(made.value or 0)
        #: Slots of the group.
        self.capacity: int = self.view().capacity

    # ------------------------------------------------------------------ state

    @property
    def next(self) -> int:
        """Number that the next collective called here gets; operations count from 1."""
        return int(self.call(lib.hdl_group_next))

    def view(self) -> View:
        """Snapshot of the newest view."""
        words = 16  # the largest capacity is 1024
        active, absent = (c_uint64 * words)(), (c_uint64 * words)()
        view = _abi.View(mask_words=words, active=active, absent=absent)
        _error.check(self.call(lib.hdl_group_view, view))
        return View(view.epoch, view.rank, view.capacity, view.size, _error.ranks_of(active), _error.ranks_of(absent))

    def member(self, rank: int) -> Member:
        """What is known of a slot, changes that lie ahead included. EINVAL: outside the capacity."""
        found = _abi.Member()
        _error.check(self.call(lib.hdl_group_member, rank, found))
        states = {"process": ProcessState(found.process), "member": MemberState(found.member)}
        return Member(**found.values() | states)

    def stats(self) -> dict[str, int]:
        """Counters since creation, by the names of struct hdl_group_stats."""
        found = _abi.GroupStats()
        _error.check(self.call(lib.hdl_group_stats, found))
        return found.values()

    def transport(self, rank: int) -> str | None:
        """Path to a peer: "self", "shm" or "fabric:<provider>"; None for a vacant slot."""
        found = self.call(lib.hdl_group_transport, rank)
        return None if found is None else str(found.decode())

    def __repr__(self) -> str:
        if self.closed:
            return f"<heddle.Group {self.name!r} {self._gone}>"
        view = self.view()
        lost = f" lost {list(view.absent)}" if view.absent else ""
        return f"<heddle.Group {self.name!r} rank {view.rank} of {view.size} active {list(view.active)}{lost}>"

    def _repr_html_(self) -> str:
        """The newest view as a table, for notebooks."""
        if self.closed:
            return html.escape(repr(self))
        view = self.view()
        rows = "".join(self._html_row(view, rank) for rank in range(view.capacity))
        heads = "".join(f"<th>{head}</th>" for head in ("rank", "process", "member", "job rank", "operations", "path"))
        title = (
            f"group {self.name!r}: rank {view.rank}, epoch {view.epoch}, {len(view.active)} of {view.capacity} slots"
        )
        return f"<table><caption>{html.escape(title)}</caption><tr>{heads}</tr>{rows}</table>"

    def _html_row(self, view: View, rank: int) -> str:
        member = self.member(rank)
        last = "" if member.last == 2**64 - 1 else member.last
        operations = f"{member.first} to {last}" if member.rank_epoch else ""
        name = f"<b>{rank}</b>" if rank == view.rank else str(rank)
        cells = (
            name,
            "lost" if rank in view.absent else member.process.name.lower(),
            member.member.name.lower(),
            member.job_rank if member.job_rank >= 0 else "",
            operations,
            html.escape(self.transport(rank) or ""),
        )
        return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"

    # ------------------------------------------------------------- membership

    def sync(self, timeout: float | None = None) -> None:
        """Waits until every change that was noticed or proposed before is decided; at most `timeout` seconds (20)."""
        _error.check(self.call(lib.hdl_group_sync, microseconds(timeout)))

    def admit(self, ranks: Sequence[int], timeout: float | None = None) -> int:
        """Lets ranks in that call join(), and returns the number of their first operation. Waits at most 20 s.

        If every member calls it at the same place of its program, that is the next operation.
        """
        first = c_uint64()
        _error.check(self.call(lib.hdl_group_admit, int32s(ranks), len(ranks), microseconds(timeout), first))
        return first.value

    def evict(self, ranks: Sequence[int], timeout: float | None = None) -> None:
        """Removes ranks as planned, or deactivates lost ones. Waits at most 20 s."""
        _error.check(self.call(lib.hdl_group_evict, int32s(ranks), len(ranks), microseconds(timeout)))

    def join(self, timeout: float | None = None) -> int:
        """Becomes a member once a member admits this rank; returns the number of the first operation. At most 300 s."""
        first = c_uint64()
        _error.check(self.call(lib.hdl_group_join, microseconds(timeout), first))
        return first.value

    def leave(self, timeout: float | None = None) -> None:
        """Removes the own rank; join() comes back. Waits at most 20 s."""
        _error.check(self.call(lib.hdl_group_leave, microseconds(timeout)))

    def on_view(self, callback: Callable[[int], None] | None) -> None:
        """Calls callback(epoch) after views were committed, on a thread of the library; None ends it.

        The callback may call everything but the waiting functions of the group and close().
        """
        thunk = _abi.ViewCallback() if callback is None else _abi.ViewCallback(lambda _u, _g, epoch: callback(epoch))
        _error.check(self.call(lib.hdl_group_on_view, thunk, None))
        self._on_view = thunk  # the earlier one is not running any more

    def abort(self) -> None:
        """Leaves at once, from any thread: blocked and later calls raise EABORTED, the others see a lost rank."""
        _error.check(self.call(lib.hdl_group_abort))

    def _sweep(self) -> None:
        """Frees dropped operations that are finished by now. With the context their handles are gone."""
        if self.context.ended:
            self._orphans.clear()
        for orphan in self._orphans.copy():
            if lib.hdl_op_test(orphan[0]) != Status.PENDING:
                self._orphans.remove(orphan)
                lib.hdl_op_free(orphan[0])

    def _interrupt(self, handle: int) -> None:
        lib.hdl_group_abort(handle)

    _destroy = staticmethod(lib.hdl_group_destroy)

    def _destroyed(self) -> None:
        self._sweep()
