# SPDX-License-Identifier: Apache-2.0
"""Heddle: elastic communication for distributed AI. Works with numpy arrays and anything with the buffer protocol.

Times are in seconds, sizes in bytes, counts in elements. Failures are raised as heddle.Error.
"""

from heddle._abi import ANY_SOURCE, ANY_TAG, DType, LogLevel, MemberState, ProcessState, RedOp, Status, lib
from heddle._context import Context, Store
from heddle._error import Error, IncompleteError, InvalidError, TimedOutError
from heddle._group import Group, Member, View

__version__ = lib.hdl_version().decode().split()[0]

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Context",
    "DType",
    "Error",
    "Group",
    "IncompleteError",
    "InvalidError",
    "LogLevel",
    "Member",
    "MemberState",
    "ProcessState",
    "RedOp",
    "Status",
    "Store",
    "TimedOutError",
    "View",
]
