# SPDX-License-Identifier: Apache-2.0
"""Worlds of heddle.init() as forked processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import heddle
from ranks import LIMIT, Tree


def free_port() -> int:
    """A port that nobody listens on, with free ones behind it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def set_place(rank: int, size: int, port: int) -> None:
    """The environment as a launcher sets it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _rank(rank: int, size: int, port: int, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    set_place(rank, size, port)
    with heddle.init() as world:
        return target(world, *args)


def start(tree: Tree, size: int, target: Callable[..., Any], *args: Any) -> list[int]:
    """Forks ranks that call target(world, *args); returns their pids."""
    port = free_port()
    return [tree.fork(f"rank {r} of {size}", _rank, r, size, port, target, args) for r in range(size)]


def run(size: int, target: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
    """Runs target(world, *args) in each of `size` ranks; returns what each returned."""
    with Tree(limit) as tree:
        return [tree.result(pid) for pid in start(tree, size, target, *args)]
