# SPDX-License-Identifier: Apache-2.0
"""Arrays as the C interface sees them: address, number of elements, type."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

from heddle._abi import DType

NAMES = {
    "int8": DType.I8,
    "uint8": DType.U8,
    "int16": DType.I16,
    "uint16": DType.U16,
    "int32": DType.I32,
    "uint32": DType.U32,
    "int64": DType.I64,
    "uint64": DType.U64,
    "bool": DType.BOOL,
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "float32": DType.F32,
    "float64": DType.F64,
    "complex64": DType.C64,
    "complex128": DType.C128,
    "float8_e4m3fn": DType.F8E4M3,
    "float8_e5m2": DType.F8E5M2,
}
# Letters of the struct module, for other objects with the buffer protocol.
_SIGNED = {1: DType.I8, 2: DType.I16, 4: DType.I32, 8: DType.I64}
_UNSIGNED = {1: DType.U8, 2: DType.U16, 4: DType.U32, 8: DType.U64}
_LETTERS = {"e": DType.F16, "f": DType.F32, "d": DType.F64, "?": DType.BOOL, "c": DType.U8}
_LETTERS |= {"Zf": DType.C64, "Zd": DType.C128}
_FOREIGN_ORDER = ">!" if sys.byteorder == "little" else "<"


@dataclasses.dataclass(frozen=True, slots=True)
class Data:
    """`count` contiguous elements of `dtype` at `address`; `owner` keeps them alive."""

    address: int
    count: int
    dtype: DType
    shape: tuple[int, ...]
    owner: Any


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)


def named_dtype(name: str) -> DType:
    """DType of a numpy or torch type's name. TypeError: there is none."""
    found = NAMES.get(name.removeprefix("torch."))
    if found is None:
        raise TypeError(f"type {name} is none of {', '.join(NAMES)}")
    return found


def name_of(dtype: DType) -> str:
    """What numpy and torch call the type."""
    return next(name for name, known in NAMES.items() if known == dtype)


def _of_tensor(tensor: Any, write: bool, device: str = "cpu") -> Data:
    if tensor.device.type != device:
        raise TypeError(f"the tensor is on {tensor.device}, this takes memory of {device}")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    return Data(tensor.data_ptr(), tensor.numel(), named_dtype(str(tensor.dtype)), tuple(tensor.shape), tensor)


def _of_array(array: Any, write: bool) -> Data:
    interface = array.__array_interface__
    address, readonly = interface["data"]
    if write and readonly:
        raise ValueError("the array is read-only")
    if interface.get("strides") is not None and not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous")
    if interface["typestr"][0] in _FOREIGN_ORDER:
        raise TypeError(f"the array's bytes are in foreign order: {interface['typestr']}")
    shape = tuple(interface["shape"])
    return Data(address, math.prod(shape), named_dtype(array.dtype.name), shape, array)


def _letter_dtype(letter: str, itemsize: int) -> DType:
    plain = letter.lstrip("@=<>!")
    if letter[0] not in _FOREIGN_ORDER:
        if plain in _LETTERS:
            return _LETTERS[plain]
        if plain in ("b", "h", "i", "l", "q", "n"):
            return _SIGNED[itemsize]
        if plain in ("B", "H", "I", "L", "Q", "N"):
            return _UNSIGNED[itemsize]
    raise TypeError(f"a buffer of format {letter!r}")


class _Held:
    """A buffer export, which keeps the object from moving or shrinking its memory until it is dropped."""

    def __init__(self, exporter: Any) -> None:
        self.view = memoryview(exporter)
        if not self.view.c_contiguous:
            raise ValueError("the buffer is not contiguous")
        raw = _PyBuffer()
        _get_buffer(self.view, raw, 0)
        self.address = raw.buf or 0
        _release_buffer(raw)


def _of_buffer(exporter: Any, write: bool) -> Data:
    held = _Held(exporter)
    view = held.view
    if write and view.readonly:
        raise ValueError(f"the {type(exporter).__name__} is read-only")
    shape = tuple(view.shape or ())
    return Data(held.address, math.prod(shape), _letter_dtype(view.format, view.itemsize), shape, held)


def data_of(source: Any, write: bool = False) -> Data:
    """The memory of a numpy array, a torch tensor on the CPU, or anything with the buffer protocol.

    TypeError: no such object or type; ValueError: not contiguous (C order), or read-only and `write`.
    """
    if hasattr(source, "data_ptr"):
        return _of_tensor(source, write)
    if hasattr(source, "__array_interface__"):
        return _of_array(source, write)
    return _of_buffer(source, write)


def device_data_of(source: Any, write: bool = False) -> Data:
    """The same for CUDA: a torch tensor, or anything with __cuda_array_interface__."""
    if hasattr(source, "data_ptr"):
        return _of_tensor(source, write, "cuda")
    interface = getattr(source, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"a {type(source).__name__} is no memory of a CUDA device")
    if interface.get("strides") is not None:
        raise ValueError("the array is not contiguous")
    address, readonly = interface["data"]
    if write and readonly:
        raise ValueError("the array is read-only")
    shape = tuple(interface["shape"])
    return Data(address, math.prod(shape), named_dtype(str(source.dtype)), shape, source)


class DeviceBytes:
    """Bytes of device memory that another object owns, for torch.as_tensor and cupy.asarray."""

    def __init__(self, owner: object, address: int, count: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def new_like(source: Any, shape: Sequence[int]) -> Any:
    """Uninitialised memory of the kind and type of `source`: tensor for tensor, array for array, else a memoryview."""
    if hasattr(source, "new_empty"):
        return source.new_empty(tuple(shape))
    if hasattr(source, "__array_interface__"):
        import numpy  # whoever has an array has it

        return numpy.empty(tuple(shape), dtype=source.dtype)
    view = memoryview(source)
    flat: Any = memoryview(bytearray(math.prod(shape) * view.itemsize))
    return flat.cast(view.format, list(shape))
