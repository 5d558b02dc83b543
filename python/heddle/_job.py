# SPDX-License-Identifier: Apache-2.0
"""The short way in, and what is known of the process as a whole."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

from heddle import _error
from heddle._abi import lib
from heddle._context import Context, open_contexts
from heddle._group import Group


class _World(Group):
    """A group that owns its context."""

    def _destroyed(self) -> None:
        super()._destroyed()
        self.context.close()


def init(**options: Any) -> Group:
    """Joins the job that the environment describes (torchrun, `heddle run`, mpirun, srun; else alone).

    Returns the group of all its ranks, whose close() leaves the job. options: those of heddle.Context.
    """
    return _World(Context(**options))


#: Groups that have no Group object: heddle.torch adds its own.
stats_sources: list[Callable[[], dict[str, dict[str, int]]]] = []


def stats() -> dict[str, dict[str, int]]:
    """Counters of every open group of this process, by its name ("torch 0" for torch's group "0")."""
    groups = [child for context in open_contexts() for child in context.children() if isinstance(child, Group)]
    found = {group.name: group.stats() for group in groups}
    for source in stats_sources:
        found |= source()
    return found


def info() -> dict[str, Any]:
    """What this build and machine can do: transports, provider, devices, topology, algorithms, knobs."""
    length = ctypes.c_size_t(0)
    lib.hdl_info(None, length)
    text = ctypes.create_string_buffer(length.value)
    _error.check(lib.hdl_info(text, length))
    found: dict[str, Any] = json.loads(text.value)
    return found
