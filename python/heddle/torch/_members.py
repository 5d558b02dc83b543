# SPDX-License-Identifier: Apache-2.0
"""Who belongs to a group: the functions of mooncake.pg. Ranks are in-group ranks everywhere."""

from __future__ import annotations

import ctypes
import enum
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from heddle import _abi, _error
from heddle._abi import MemberState, ProcessState, lib
from heddle.torch._group import ProcessGroup
from heddle.torch._work import Work

log = logging.getLogger("heddle.torch")

_ADMISSION_US = 40_000_000  # 20 s for admission, 20 s for the acknowledgement
_JOIN_US = 300_000_000


class SyncAfterFailureStatus(enum.IntEnum):
    """How sync_after_failure() ended."""

    Reconciled = 0
    NoPending = 1
    Rejected = 2


class ProposalStatus(enum.IntEnum):
    """How a proposal to change the members ended."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2


ViewUpdateStatus = ProposalStatus


@dataclass
class SyncAfterFailureResponse:
    """reject_reason is empty unless status is Rejected."""

    status: SyncAfterFailureStatus
    reject_reason: str = ""


@dataclass
class ProposeViewUpdateResponse:
    """new_epoch: of the view that has the change; dropped_ranks: asked for and not in it, ascending."""

    status: ProposalStatus
    new_epoch: int = 0
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


def _group(backend: Any) -> ProcessGroup:
    if not isinstance(backend, ProcessGroup):
        raise TypeError(f"expected a group of backend mooncake or mooncake-cpu, got {type(backend).__name__}")
    return backend


def _member(group: ProcessGroup, rank: int) -> _abi.Member:
    member = _abi.Member()
    _error.check(lib.hdl_group_member(group.handle(), rank, member))
    return member


def _could_be_active(member: _abi.Member) -> bool:
    return member.process == ProcessState.LIVE and member.member in (MemberState.READY, MemberState.ACTIVE)


def get_active_ranks(backend: Any) -> torch.Tensor:
    """int32 [max_group_size], 1 = active: the live mirror, on the CPU (or the tensor of the options).

    That another member removed a lost rank shows after the own next collective, or after sync_after_failure() or a
    call that changes members; any other change at once.
    """
    group = _group(backend)
    group.refresh()
    return group.active_ranks


def get_num_synced_ranks(backend: Any) -> int:
    """Slots that could be activated now; those that are active already count."""
    group = _group(backend)
    return sum(_could_be_active(_member(group, rank)) for rank in range(group.capacity))


def get_peer_state(backend: Any, ranks: Sequence[int]) -> list[bool]:
    """Local read: is each rank registered, reachable, and ready to join or active? RuntimeError outside the slots."""
    group = _group(backend)
    for rank in ranks:
        if not 0 <= rank < group.capacity:
            raise RuntimeError(f"rank {rank} is not in [0, {group.capacity})")
    return [_could_be_active(_member(group, rank)) for rank in ranks]


def activate_ranks(backend: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Lets ranks in that called join_group(). Waits 20 s for their readiness and 20 s for the acknowledgement.

    Any member may call it, and several may; on return the own view, get_active_ranks() and the world size have the
    change. A refusal is a status, with the reason, not an exception.
    """
    return _propose(_group(backend), ranks, True)


recover_ranks = activate_ranks


def deactivate_ranks(backend: Any, ranks: Sequence[int]) -> ProposeViewUpdateResponse:
    """Removes ranks as planned, or lost ones for good; the own rank too: then it returns when the others applied it."""
    return _propose(_group(backend), ranks, False)


def _propose(group: ProcessGroup, ranks: Sequence[int], active: bool) -> ProposeViewUpdateResponse:
    wanted = sorted({int(rank) for rank in ranks})
    array = (ctypes.c_int32 * len(wanted))(*wanted)
    if active:
        status = lib.hdl_group_admit(group.handle(), array, len(wanted), _ADMISSION_US, None)
    else:
        status = lib.hdl_group_evict(group.handle(), array, len(wanted), _ADMISSION_US)
    if status != 0:
        reason = str(_error.last(status))
        log.warning("group %s: %s %s refused: %s", group.getGroupName(), _verb(active), wanted, reason)
        return ProposeViewUpdateResponse(ProposalStatus.Rejected, group.refresh().epoch, [], reason)
    epoch = group.refresh(taken=True).epoch
    dropped = [rank for rank in wanted if (_member(group, rank).member == MemberState.ACTIVE) != active]
    done = ProposalStatus.AppliedWithDroppedRanks if dropped else ProposalStatus.Applied
    return ProposeViewUpdateResponse(done, epoch, dropped)


def _verb(active: bool) -> str:
    return "activation of" if active else "deactivation of"


def join_group(backend: Any) -> None:
    """Waits up to 300 s until a member activates this rank. After a removal it comes back the same way.

    RuntimeError says what is missing, for which rank; it may be called again then.
    """
    group = _group(backend)
    _error.check(lib.hdl_group_join(group.handle(), _JOIN_US, None))
    group.alone = False
    group.refresh(taken=True)


def sync_after_failure(backend: Any) -> SyncAfterFailureResponse:
    """Waits until everything that this rank noticed is decided and in its view."""
    group = _group(backend)
    before = group.refresh()
    was = (before.epoch, before.num_absent)
    status = lib.hdl_group_sync(group.handle(), 0)
    if status != 0:
        return SyncAfterFailureResponse(SyncAfterFailureStatus.Rejected, str(_error.last(status)))
    now = group.refresh(taken=True)
    changed = group.unsynced_failures or (now.epoch, now.num_absent) != was
    group.unsynced_failures = False
    return SyncAfterFailureResponse(SyncAfterFailureStatus.Reconciled if changed else SyncAfterFailureStatus.NoPending)


def get_current_epoch(backend: Any) -> int:
    """Number of the newest view; grows with every committed view, with gaps."""
    return int(_group(backend).refresh().epoch)


def get_failed_ranks_hint(work: Any) -> torch.Tensor | None:
    """int32 [max_group_size] on the CPU, 1 = this rank's data is missing or it caused the failure.

    None for a work of another backend. Waits for nothing: all zero while the operation is under way.
    """
    if not isinstance(work, Work):
        return None
    hint = torch.zeros(work.group.capacity, dtype=torch.int32)
    hint[list(work.failed)] = 1
    return hint


def get_local_success(work: Any) -> bool:
    """True iff the hint is all zero; False for a work of another backend."""
    return isinstance(work, Work) and not work.failed


def extend_group_size_to(backend: Any, size: int) -> None:
    """Has no effect: capacity is max_group_size of the options."""
    _group(backend)
    warnings.warn(
        "extend_group_size_to is deprecated and does nothing: give max_group_size in MooncakeBackendOptions",
        DeprecationWarning,
        stacklevel=2,
    )
