# SPDX-License-Identifier: Apache-2.0
"""Settings of the process and options of a group, under the names that applications use."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

import torch

CAPACITY_MAX = 1024
_CHUNK = 256 << 10


class Settings:
    """What the set_ functions keep. Taken over by contexts and groups that are made afterwards."""

    host_ip: str | None = None
    device_filter: list[str] | None = None
    started = False  # a context exists, or existed


settings = Settings()


def set_host_ip(ip: str) -> None:
    """Address that this process is reached at; without it, the one on the route to the master.

    RuntimeError once a group exists, unless it is the address that was set before.
    """
    if settings.started and ip != settings.host_ip:
        was = settings.host_ip or "chosen by the route to the master"
        raise RuntimeError(f"set_host_ip({ip!r}) comes too late: a group exists, and its address is {was}")
    settings.host_ip = str(ip)


def set_device_filter(names: list[str]) -> None:
    """Network devices to use, of those in /sys/class/infiniband and /sys/class/net; without it, all.

    RuntimeError for a name that does not exist; the text lists those that do.
    """
    names = [str(name) for name in names]
    known = sorted(
        {entry.name for kind in ("infiniband", "net") for entry in _entries(pathlib.Path("/sys/class") / kind)}
    )
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RuntimeError(f"no network device {', '.join(unknown)}; this machine has {', '.join(known) or 'none'}")
    settings.device_filter = names


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def set_transfer_engine(engine: Any) -> None:
    """Accepted for compatibility: None, or an object with get_engine_ptr(). The data path does not use it."""
    if engine is None:
        return
    if not callable(getattr(engine, "get_engine_ptr", None)):
        raise TypeError(f"set_transfer_engine expects None or an object with get_engine_ptr(), got {type(engine)}")
    warnings.warn("set_transfer_engine has no effect here: heddle moves data by its own transports", stacklevel=2)


def set_collective_timeout_us(us: int) -> None:
    """Accepted, and bounds nothing: ranks are watched all the time, and none is given up for being slow."""
    int(us)


def set_p2p_timeout_us(us: int) -> None:
    """The same for sends and receives. RuntimeError if negative."""
    if int(us) < 0:
        raise RuntimeError(f"set_p2p_timeout_us({us}): expected microseconds, 0 or more")


def set_fault_reconciliation_window_us(us: int) -> None:
    """Accepted: a decision about a lost rank takes milliseconds here, whatever its upper bound."""
    int(us)


def pool() -> tuple[int, int]:
    """(chunks, bytes of one) of a group's memory, from MOONCAKE_P2P_POOL_SIZE and MOONCAKE_P2P_CHUNK_SIZE; 0 = default.

    RuntimeError if the pool is no multiple of the chunk.
    """
    pool_bytes, chunk = (_bytes(f"MOONCAKE_P2P_{name}_SIZE") for name in ("POOL", "CHUNK"))
    if not pool_bytes:
        return 0, chunk
    size = chunk or _CHUNK
    if pool_bytes % size:
        raise RuntimeError(f"MOONCAKE_P2P_POOL_SIZE={pool_bytes} is not a multiple of the chunk size {size}")
    return pool_bytes // size, chunk


def _bytes(name: str) -> int:
    text = os.environ.get(name, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise RuntimeError(f"{name}={text!r}: expected a number of bytes above 0")
    return int(text or 0)


def _flag(name: str) -> bool:
    return os.environ.get(name, "1").strip().lower() not in ("0", "false", "off", "no")


class MooncakeBackendOptions:
    """Options of a group, for init_process_group(pg_options=) and new_group(pg_options=).

        MooncakeBackendOptions(active_ranks: Tensor[, is_extension[, max_group_size]])
        MooncakeBackendOptions(max_group_size: int[, is_extension[, auto_deactivate_on_failure, auto_sync_on_failure]])
        MooncakeBackendOptions(max_group_size: int, auto_deactivate_on_failure, auto_sync_on_failure)

    active_ranks: int32, contiguous, at least max_group_size elements: becomes the live mirror of the members, 1 =
    active. is_extension: this process joins a group that exists, or replaces a rank (True), or founds one (False);
    not given: it joins if the group runs already. max_group_size: slots of the group, 0 = its size. Defaults of the
    flags: True, or MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE and MOONCAKE_PG_AUTO_SYNC_ON_FAILURE where there are no
    options.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        tensors = ("active_ranks", "is_extension", "max_group_size")
        numbers = ("max_group_size", "is_extension", "auto_deactivate_on_failure", "auto_sync_on_failure")
        by_tensor = isinstance(args[0], torch.Tensor) if args else "active_ranks" in kwargs
        names = tensors if by_tensor else numbers
        if len(args) == 3 and not by_tensor:
            names = ("max_group_size", *numbers[2:])
        given = dict(zip(names, args, strict=False))
        extra = [name for name in kwargs if name not in names or name in given]
        if len(args) > len(names) or extra or not (args or kwargs):
            raise TypeError(
                "MooncakeBackendOptions expects (active_ranks[, is_extension[, max_group_size]]) or "
                "(max_group_size[, is_extension[, auto_deactivate_on_failure, auto_sync_on_failure]]), "
                f"got {args} {kwargs}"
            )
        given.update(kwargs)
        self.active_ranks: torch.Tensor | None = given.get("active_ranks")
        self.max_group_size = int(given.get("max_group_size", 0))
        self.is_extension = bool(given.get("is_extension", False))
        self.may_join = "is_extension" not in given
        self.auto_deactivate_on_failure = bool(given.get("auto_deactivate_on_failure", True))
        self.auto_sync_on_failure = bool(given.get("auto_sync_on_failure", True))
        if self.active_ranks is not None and (
            self.active_ranks.dtype != torch.int32 or not self.active_ranks.is_contiguous()
        ):
            raise RuntimeError(f"active_ranks must be a contiguous int32 tensor, got {self.active_ranks.dtype}")
        if self.auto_sync_on_failure and not self.auto_deactivate_on_failure:
            raise RuntimeError(
                "auto_sync_on_failure needs auto_deactivate_on_failure: a view that nobody changes cannot be waited for"
            )

    @classmethod
    def from_environment(cls) -> MooncakeBackendOptions:
        """What holds without an options object."""
        return cls(
            0,
            False,
            _flag("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE"),
            _flag("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"),
        )

    def capacity(self, size: int) -> int:
        """Slots of a group of `size` ranks. RuntimeError outside [size, 1024]."""
        capacity = self.max_group_size if self.max_group_size > 0 else size
        if not size <= capacity <= CAPACITY_MAX:
            raise RuntimeError(f"max_group_size {capacity} is not in [{size}, {CAPACITY_MAX}]")
        if self.active_ranks is not None and self.active_ranks.numel() < capacity:
            raise RuntimeError(f"active_ranks has {self.active_ranks.numel()} elements, max_group_size is {capacity}")
        return capacity

    def __repr__(self) -> str:
        return (
            f"MooncakeBackendOptions(max_group_size={self.max_group_size}, is_extension={self.is_extension}, "
            f"auto_deactivate_on_failure={self.auto_deactivate_on_failure}, "
            f"auto_sync_on_failure={self.auto_sync_on_failure})"
        )
