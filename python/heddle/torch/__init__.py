# SPDX-License-Identifier: Apache-2.0
"""Process groups for torch.distributed. Importing it registers the backends `mooncake-cpu` and `mooncake`."""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

import torch.distributed as dist

from heddle import _abi
from heddle._abi import lib
from heddle.torch import _group
from heddle.torch._buffer import Buffer, EventOverlap
from heddle.torch._group import ProcessGroup
from heddle.torch._job import Job
from heddle.torch._members import (
    ProposalStatus,
    ProposeViewUpdateResponse,
    SyncAfterFailureResponse,
    SyncAfterFailureStatus,
    ViewUpdateStatus,
    activate_ranks,
    deactivate_ranks,
    extend_group_size_to,
    get_active_ranks,
    get_current_epoch,
    get_failed_ranks_hint,
    get_local_success,
    get_num_synced_ranks,
    get_peer_state,
    join_group,
    recover_ranks,
    sync_after_failure,
)
from heddle.torch._ops import leave_alone, register_exchange
from heddle.torch._options import (
    MooncakeBackendOptions,
    set_collective_timeout_us,
    set_device_filter,
    set_fault_reconciliation_window_us,
    set_host_ip,
    set_p2p_timeout_us,
    set_transfer_engine,
)
from heddle.torch._work import Work

__all__ = [
    "Buffer",
    "EventOverlap",
    "MooncakeBackendOptions",
    "ProcessGroup",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "ViewUpdateStatus",
    "Work",
    "activate_ranks",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_current_epoch",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "join_group",
    "recover_ranks",
    "register_exchange",
    "set_collective_timeout_us",
    "set_device_filter",
    "set_fault_reconciliation_window_us",
    "set_host_ip",
    "set_p2p_timeout_us",
    "set_transfer_engine",
    "sync_after_failure",
]


def _job_of(dist_opts: Any, capacity: int) -> Job:
    """Groups of a world that is ours share its context. Any other group is a job of its own ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    part = bool(list(dist_opts.global_ranks_in_group))
    if part and isinstance(world, ProcessGroup):
        return world.job
    return Job(dist_opts.store, dist_opts.group_rank, capacity, dist_opts.timeout, not part)


def _creator(backend: str, devices: tuple[str, ...]) -> Any:
    def create(dist_opts: Any, options: Any = None) -> ProcessGroup:
        if options is not None and not isinstance(options, MooncakeBackendOptions):
            raise TypeError(f"pg_options of backend {backend}: expected MooncakeBackendOptions, got {type(options)}")
        given = options or MooncakeBackendOptions.from_environment()
        capacity = given.capacity(dist_opts.group_size)
        return ProcessGroup(backend, dist_opts, given, _job_of(dist_opts, capacity), devices)

    return create


def _register() -> None:
    for name, devices in {"mooncake-cpu": ("cpu",), "mooncake": ("cuda",)}.items():
        if name not in dist.Backend.backend_list:
            # The CUDA backend takes CPU tensors too, so that objects and control data need no second group.
            ours = devices if devices == ("cpu",) else ("cpu", *devices)
            dist.Backend.register_backend(name, _creator(name, ours), extended_api=True, devices=list(devices))


def _shut_down_ours() -> None:
    """torch 2.6 shuts down its own backends only, when a group is destroyed."""
    c10d: Any = dist.distributed_c10d
    theirs = getattr(c10d, "_shutdown_backend", None)
    if theirs is not None:

        def shut_down(group: Any) -> None:
            group.shutdown() if isinstance(group, ProcessGroup) else theirs(group)

        c10d._shutdown_backend = shut_down


def _at_exit() -> None:
    """Operations may go on writing while the interpreter ends: their memory stays, and no callback comes any more."""
    for group in _group._groups:
        if group._made.wait(2) and group._handle is not None:
            lib.hdl_group_on_view(group._handle, _abi.ViewCallback(), None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group.pending))


_register()
leave_alone()
_shut_down_ours()
atexit.register(_at_exit)
