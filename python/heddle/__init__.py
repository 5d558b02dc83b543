# SPDX-License-Identifier: Apache-2.0
"""Heddle: elastic communication for distributed AI, on numpy arrays and anything with the buffer protocol.

    import heddle
    world = heddle.init()
    world.all_reduce(array)

Times are in seconds, sizes in bytes, counts in elements. Failures are raised as heddle.Error.
"""

from heddle._abi import (
    ANY_SOURCE,
    ANY_TAG,
    DType,
    LogLevel,
    MemberState,
    MoeFormat,
    MoeLayout,
    MoeMemory,
    MoeProtocol,
    MoeWire,
    ProcessState,
    RedOp,
    SignalOp,
    Status,
    lib,
)
from heddle._context import Context, Store
from heddle._error import Error, IncompleteError, InvalidError, TimedOutError
from heddle._group import Group, Member, View
from heddle._job import info, init, stats
from heddle._moe import Moe, MoeOptions, MoeSizes, Received, Step
from heddle._operation import Operation
from heddle._window import DeviceWindow, PeerWindow, Window

__version__: str = lib.hdl_version().decode().split()[0]

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Context",
    "DType",
    "DeviceWindow",
    "Error",
    "Group",
    "IncompleteError",
    "InvalidError",
    "LogLevel",
    "Member",
    "MemberState",
    "Moe",
    "MoeFormat",
    "MoeLayout",
    "MoeMemory",
    "MoeOptions",
    "MoeProtocol",
    "MoeSizes",
    "MoeWire",
    "Operation",
    "PeerWindow",
    "ProcessState",
    "Received",
    "RedOp",
    "SignalOp",
    "Status",
    "Step",
    "Store",
    "TimedOutError",
    "View",
    "Window",
    "info",
    "init",
    "stats",
]
