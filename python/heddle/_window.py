# SPDX-License-Identifier: Apache-2.0
"""Registered memory that peers write: put, signal, wait."""

from __future__ import annotations

import ctypes
from typing import Any

from heddle import _abi, _error
from heddle._abi import SignalOp, WindowKind, lib
from heddle._context import Context
from heddle._data import DeviceBytes, data_of, device_data_of
from heddle._object import Object, microseconds


class Window(Object):
    """`nbytes` of zeroed, page-aligned memory of this process that peers may write.

    Raises heddle.Error: EINVAL (0 bytes), ENOMEM, ESYSTEM.
    """

    _what = "window"

    def __init__(self, context: Context, nbytes: int) -> None:
        super().__init__(context)
        made = ctypes.c_void_p()
        _error.check(context.call(lib.hdl_window_create, nbytes, WindowKind.HOST, made))
        self._opened(made.value or 0)

    @property
    def data(self) -> memoryview:
        """The memory as bytes, writable. Do not use it after close()."""
        address, nbytes = self.call(lib.hdl_window_data), self.call(lib.hdl_window_bytes)
        memory = (ctypes.c_char * nbytes).from_address(address)
        memory._window = self
        return memoryview(memory).cast("B")

    def pack(self) -> bytes:
        """Handle for peers, who open it with PeerWindow: at most WINDOW_HANDLE_BYTES."""
        room = ctypes.create_string_buffer(_abi.WINDOW_HANDLE_BYTES)
        length = ctypes.c_size_t(len(room))
        _error.check(self.call(lib.hdl_window_pack, ctypes.addressof(room), length))
        return room.raw[: length.value]

    def wait(self, offset: int, value: int, source: PeerWindow | None = None, timeout: float | None = None) -> None:
        """Waits until the 64-bit word at `offset` is at least `value`.

        Raises TimedOutError after `timeout` seconds (None = never), heddle.Error with EPEER when `source` is lost.
        """
        peer = None if source is None else source.handle
        limit = _abi.FOREVER if timeout is None else int(timeout * 1e6)
        _error.check(self.call(lib.hdl_window_wait, offset, value, peer, limit))

    _destroy = staticmethod(lib.hdl_window_destroy)


class DeviceWindow(Window):
    """Memory of a CUDA tensor, for kernels of peers on this host; pack() is all that it does besides.

    The tensor is held until close(). Its allocator must be one that CUDA IPC can share: torch's is, but not with
    expandable segments. Raises heddle.Error: EINVAL (not device memory), ENOTSUP (no driver, or such an allocator).
    """

    def __init__(self, context: Context, tensor: Any) -> None:
        Object.__init__(self, context)
        made = ctypes.c_void_p()
        data = device_data_of(tensor, write=True)
        nbytes = data.count * lib.hdl_dtype_size(data.dtype)
        _error.check(context.call(lib.hdl_window_adopt, data.address, nbytes, made))
        self._opened(made.value or 0)
        self._tensor = tensor


class PeerWindow(Object):
    """A peer's window, opened from its packed handle.

    Raises heddle.Error: EINVAL (not a handle), EPEER (its process is gone), ENOTSUP (not reachable).
    """

    _what = "peer's window"

    def __init__(self, context: Context, packed: bytes) -> None:
        super().__init__(context)
        made = ctypes.c_void_p()
        _error.check(context.call(lib.hdl_window_open, packed, len(packed), made))
        self._opened(made.value or 0)
        self._sources: list[Any] = []

    def put(
        self,
        offset: int,
        source: Any,
        signal_offset: int | None = None,
        value: int = 1,
        signal_op: SignalOp = SignalOp.SET,
    ) -> None:
        """Writes `source` at `offset`, then raises the word at signal_offset (None = no signal).

        Whoever sees the signal sees the whole block. `source` is held, and must not be changed, until flush().
        """
        data = data_of(source)
        nbytes = data.count * lib.hdl_dtype_size(data.dtype)
        where = _abi.NO_SIGNAL if signal_offset is None else signal_offset
        _error.check(self.call(lib.hdl_put, offset, data.address, nbytes, where, value, signal_op))
        self._sources.append(data)

    def signal(self, offset: int, value: int = 1, op: SignalOp = SignalOp.SET) -> None:
        """Raises the 64-bit word at `offset` (8-byte aligned): SET or ADD."""
        _error.check(self.call(lib.hdl_signal, offset, value, op))

    def flush(self, timeout: float | None = None) -> None:
        """Until all earlier puts have left their sources; at most `timeout` seconds (None = forever)."""
        _error.check(self.call(lib.hdl_flush, _abi.FOREVER if timeout is None else microseconds(timeout)))
        self._sources.clear()

    @property
    def mapped(self) -> int | None:
        """Address of the peer's memory if it is mapped here, else None."""
        found: int | None = self.call(lib.hdl_peer_window_map)
        return found

    def device_bytes(self, count: int) -> DeviceBytes:
        """The first `count` bytes of a peer's DeviceWindow, for torch.as_tensor and cupy.asarray, until close()."""
        return DeviceBytes(self, self.mapped or 0, count)

    _destroy = staticmethod(lib.hdl_window_close)
