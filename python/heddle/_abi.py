# SPDX-License-Identifier: Apache-2.0
"""The C interface as one table: constants, structs and functions of heddle.h.

test/python/test_abi.py compares it with the header. Every call through `lib` releases the GIL.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from heddle import _library

# ------------------------------------------------------------------ constants

FOREVER = -1
ANY_SOURCE = -1
ANY_TAG = -1
WINDOW_HANDLE_BYTES = 512
NO_SIGNAL = ctypes.c_size_t(-1).value


class Status(enum.IntEnum):
    """Status of a call or an operation."""

    OK = 0
    PENDING = 1
    INCOMPLETE = 2
    EINVAL = -1
    ENOMEM = -2
    ENOTSUP = -3
    EBUSY = -4
    ETIMEDOUT = -5
    ESYSTEM = -6
    EGPU = -7
    EINTERNAL = -8
    EPEER = -20
    ELINK = -21
    ESTALE = -40
    ENOTMEMBER = -41
    EORDER = -42
    ECONFIG = -43
    EFENCED = -44
    ECOORD = -45
    EABORTED = -46


class DType(enum.IntEnum):
    """Type of an element."""

    I8 = 0
    U8 = 1
    I16 = 2
    U16 = 3
    I32 = 4
    U32 = 5
    I64 = 6
    U64 = 7
    BOOL = 8
    F16 = 9
    BF16 = 10
    F32 = 11
    F64 = 12
    C64 = 13
    C128 = 14
    F8E4M3 = 15
    F8E5M2 = 16


class RedOp(enum.IntEnum):
    """Operator of a reduction; ranks are combined in ascending order, large results between hosts host by host."""

    SUM = 0
    AVG = 1
    PROD = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


class LogLevel(enum.IntEnum):
    DEFAULT = 0
    ERROR = 1
    WARN = 2
    INFO = 3
    DEBUG = 4


class ProcessState(enum.IntEnum):
    """What is known of the process in a slot."""

    NONE = 0
    LIVE = 1
    LOST = 2


class MemberState(enum.IntEnum):
    """What a slot is to the group."""

    NONE = 0
    READY = 1
    ACTIVE = 2
    INACTIVE = 3


class WindowKind(enum.IntEnum):
    HOST = 0


class SignalOp(enum.IntEnum):
    """What a signal does to the word of the peer."""

    SET = 0
    ADD = 1


class MoeLayout(enum.IntEnum):
    """Order of the rows that dispatch delivers."""

    EXPERT_3D = 0
    EXPERT_FLAT = 1
    RANK_MAJOR = 2
    INDEXED = 3


class MoeFormat(enum.IntEnum):
    """What a row becomes on the way."""

    PLAIN = 0
    FP8 = 1
    FP8_POW2 = 2
    FP8_UE8M0 = 3


class MoeWire(enum.IntEnum):
    """Type of a contribution between ranks in combine."""

    ROW = 0
    F32 = 1
    FP8 = 2


class MoeMemory(enum.IntEnum):
    """Where the memory of an exchange's calls lies."""

    HOST = 0
    CUDA = 1


class MoeProtocol(enum.IntEnum):
    """How rows cross between GPUs."""

    AUTO = 0
    LL = 1
    CHUNK = 2
    BULK = 3


# C name of an enum and prefix of its constants.
ENUMS: dict[str, tuple[type[enum.IntEnum], str]] = {
    "hdl_status": (Status, "HDL_"),
    "hdl_dtype": (DType, "HDL_"),
    "hdl_redop": (RedOp, "HDL_"),
    "hdl_log_level": (LogLevel, "HDL_LOG_"),
    "hdl_process_state": (ProcessState, "HDL_PROCESS_"),
    "hdl_member_state": (MemberState, "HDL_MEMBER_"),
    "hdl_window_kind": (WindowKind, "HDL_WINDOW_"),
    "hdl_signal_op": (SignalOp, "HDL_SIGNAL_"),
    "hdl_moe_layout": (MoeLayout, "HDL_MOE_"),
    "hdl_moe_format": (MoeFormat, "HDL_MOE_"),
    "hdl_moe_wire": (MoeWire, "HDL_MOE_WIRE_"),
    "hdl_moe_memory": (MoeMemory, "HDL_MOE_"),
    "hdl_moe_protocol": (MoeProtocol, "HDL_MOE_"),
}

# -------------------------------------------------------------------- structs

BootstrapPut = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t)
BootstrapGet = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, POINTER(c_size_t), c_int64)
LogCallback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)
ViewCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_uint64)
AllocCallback = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t)
ReleaseCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)


class Int32(c_int32):
    """An argument that ctypes would cut to 32 bits without a word."""

    @classmethod
    def from_param(cls, value: Any) -> c_int32:
        number = c_int32(value)
        if number.value != value:
            raise ValueError(f"{value} is no 32-bit integer")
        return number


class Sized(ctypes.Structure):
    """A struct that begins with its own size. Raises ValueError for a number or text that its field would cut."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        for name, value in fields.items():
            held = getattr(self, name)
            if isinstance(value, (int, bytes)) and held != value and (held or value):
                raise ValueError(f"{name} {value!r} does not fit its field")
        self.size = ctypes.sizeof(self)

    def values(self) -> dict[str, Any]:
        """The fields but for the size, by name."""
        return {name: getattr(self, name) for name, *_ in self._fields_[1:]}


class Bootstrap(ctypes.Structure):
    _fields_ = [("user", c_void_p), ("put", BootstrapPut), ("get", BootstrapGet)]


class Allocator(ctypes.Structure):
    _fields_ = [("user", c_void_p), ("alloc", AllocCallback), ("release", ReleaseCallback)]


class ContextOpts(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("coordinator", c_char_p),
        ("bootstrap", POINTER(Bootstrap)),
        ("shared_dir", c_char_p),
        ("token", c_char_p),
        ("interface", c_char_p),
        ("transport", c_char_p),
        ("timeout_us", c_int64),
        ("dead_after_us", c_int64),
        ("grace_us", c_int64),
        ("log_level", c_int),
        ("log", LogCallback),
        ("log_user", c_void_p),
        ("allocator", POINTER(Allocator)),
        ("link_timeout_us", c_int64),
        ("standalone", c_bool),
        ("log_fd", c_int),
    ]


class GroupOpts(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("capacity", c_int32),
        ("ranks", POINTER(c_int32)),
        ("timeout_us", c_int64),
        ("op_timeout_us", c_int64),
        ("window_chunks", c_uint32),
        ("chunk_bytes", c_size_t),
        ("completion_local", c_bool),
        ("manual_deactivate", c_bool),
        ("manual_sync", c_bool),
        ("join", c_bool),
        ("found_only", c_bool),
    ]


class View(ctypes.Structure):
    _fields_ = [
        ("epoch", c_uint64),
        ("rank", c_int32),
        ("capacity", c_int32),
        ("size", c_int32),
        ("num_active", c_int32),
        ("num_absent", c_int32),
        ("mask_words", c_int32),
        ("active", POINTER(c_uint64)),
        ("absent", POINTER(c_uint64)),
    ]


class Member(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("process", c_int),
        ("member", c_int),
        ("job_rank", c_int32),
        ("rank_epoch", c_uint64),
        ("first", c_uint64),
        ("last", c_uint64),
    ]


class GroupStats(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("ops_issued", c_uint64),
        ("ops_done", c_uint64),
        ("ops_failed", c_uint64),
        ("bytes_sent", c_uint64),
        ("bytes_received", c_uint64),
        ("views", c_uint64),
        ("redone_chunks", c_uint64),
        ("stale_drops", c_uint64),
        ("reconnects", c_uint64),
        ("evidence_exit", c_uint64),
        ("evidence_closed", c_uint64),
        ("evidence_silence", c_uint64),
        ("refused_frames", c_uint64),
        ("evidence_to_commit_us", c_int64),
    ]


class Call(Sized):
    _fields_ = [("size", c_size_t), ("timeout_us", c_int64), ("scalar", c_double)]


class MoeOpts(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int32),
        ("max_tokens", c_int32),
        ("dtype", c_int),
        ("format", c_int),
        ("combine_dtype", c_int),
        ("combine_wire", c_int),
        ("layout", c_int),
        ("align", c_int32),
        ("zero_padding", c_bool),
        ("exact", c_bool),
        ("late_weights", c_bool),
        ("lanes", c_int32),
        ("dp_size", c_int32),
        ("expert_counts", POINTER(c_int32)),
        ("expert_ids", POINTER(c_int32)),
        ("timeout_us", c_int64),
        ("memory", c_int),
        ("cuda_device", c_int32),
        ("cuda_blocks", c_int32),
        ("protocol", c_int),
    ]


class MoeSizes(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("arena_bytes", c_uint64),
        ("combine_buffer_bytes", c_uint64),
        ("combine_buffer_elements", c_uint64),
        ("out_rows", c_uint64),
        ("index_entries", c_uint64),
        ("row_elements", c_uint64),
        ("row_bytes", c_uint64),
        ("scale_bytes", c_uint64),
    ]


class MoeHandle(ctypes.Structure):
    _fields_ = [("word", c_uint64 * 4)]


class MoeCall(Sized):
    _fields_ = [("size", c_size_t), ("active", c_void_p), ("timeout_us", c_int64), ("stream", c_void_p)]


class MoeTokens(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("topk_ids", c_void_p),
        ("weights", c_void_p),
        ("num_tokens", c_int64),
        ("ids_are_64", c_bool),
        ("num_tokens_at", c_void_p),
    ]


class MoeReceived(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("counts", c_void_p),
        ("offsets", c_void_p),
        ("row_numbers", c_void_p),
        ("source_token", c_void_p),
        ("ranges", c_void_p),
        ("local_ids", c_void_p),
        ("weights", c_void_p),
        ("source_counts", c_void_p),
        ("num_rows", c_int64),
        ("num_pairs", c_int64),
        ("totals", c_void_p),
    ]


class MoeOutputs(Sized):
    _fields_ = [("size", c_size_t), ("rows", c_void_p), ("weights", c_void_p)]


class MoeResult(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("rows", c_void_p),
        ("bias", c_void_p * 2),
        ("accumulate", c_bool),
        ("missing", c_void_p),
    ]


class MoeState(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("generation", c_uint64),
        ("steps", c_uint64),
        ("failed_steps", c_uint64),
        ("incomplete_calls", c_uint64),
        ("stale_drops", c_uint64),
        ("last_error", c_int),
        ("error_token", c_int64),
        ("error_position", c_int64),
        ("error_value", c_int64),
        ("expert_rows", c_void_p),
        ("wait_ns", c_void_p),
        ("bytes_sent", c_void_p),
        ("bytes_received", c_void_p),
        ("dispatch_protocol", c_int),
        ("combine_protocol", c_int),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "hdl_bootstrap": Bootstrap,
    "hdl_allocator": Allocator,
    "hdl_context_opts": ContextOpts,
    "hdl_group_opts": GroupOpts,
    "hdl_view": View,
    "hdl_member": Member,
    "hdl_group_stats": GroupStats,
    "hdl_call": Call,
    "hdl_moe_opts": MoeOpts,
    "hdl_moe_sizes": MoeSizes,
    "hdl_moe_handle": MoeHandle,
    "hdl_moe_call": MoeCall,
    "hdl_moe_tokens": MoeTokens,
    "hdl_moe_received": MoeReceived,
    "hdl_moe_outputs": MoeOutputs,
    "hdl_moe_result": MoeResult,
    "hdl_moe_state": MoeState,
}

# ------------------------------------------------------------------ functions

# Objects and data are plain addresses; so an int, None and a c_void_p fit.
_PTR = c_void_p
_OUT = POINTER(c_void_p)
_ENUM = c_int
_CALL = POINTER(Call)
_SIZES = POINTER(c_size_t)
_RANKS = POINTER(c_int32)
_MASK = POINTER(c_uint64)
_HANDLE = POINTER(MoeHandle)

# Name: (result, arguments). Data calls end with the call's options and the operation.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hdl_status_name": (c_char_p, (_ENUM,)),
    "hdl_status_text": (c_char_p, (_ENUM,)),
    "hdl_error_detail": (c_char_p, ()),
    "hdl_version": (c_char_p, ()),
    "hdl_dtype_size": (c_size_t, (_ENUM,)),
    "hdl_dtype_name": (c_char_p, (_ENUM,)),
    "hdl_redop_name": (c_char_p, (_ENUM,)),
    "hdl_context_create": (_ENUM, (POINTER(ContextOpts), _OUT)),
    "hdl_context_destroy": (None, (_PTR,)),
    "hdl_context_dump": (_ENUM, (_PTR, c_int)),
    "hdl_group_create": (_ENUM, (_PTR, POINTER(GroupOpts), _OUT)),
    "hdl_group_destroy": (None, (_PTR,)),
    "hdl_group_abort": (_ENUM, (_PTR,)),
    "hdl_group_view": (_ENUM, (_PTR, POINTER(View))),
    "hdl_group_rank": (c_int32, (_PTR,)),
    "hdl_group_size": (c_int32, (_PTR,)),
    "hdl_group_sync": (_ENUM, (_PTR, c_int64)),
    "hdl_group_admit": (_ENUM, (_PTR, _RANKS, Int32, c_int64, _MASK)),
    "hdl_group_evict": (_ENUM, (_PTR, _RANKS, Int32, c_int64)),
    "hdl_group_join": (_ENUM, (_PTR, c_int64, _MASK)),
    "hdl_group_leave": (_ENUM, (_PTR, c_int64)),
    "hdl_group_next": (c_uint64, (_PTR,)),
    "hdl_group_on_view": (_ENUM, (_PTR, ViewCallback, _PTR)),
    "hdl_group_member": (_ENUM, (_PTR, Int32, POINTER(Member))),
    "hdl_group_stats": (_ENUM, (_PTR, POINTER(GroupStats))),
    "hdl_group_transport": (c_char_p, (_PTR, Int32)),
    "hdl_barrier": (_ENUM, (_PTR, _CALL, _OUT)),
    "hdl_broadcast": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, Int32, _CALL, _OUT)),
    "hdl_reduce": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, _ENUM, Int32, _CALL, _OUT)),
    "hdl_allreduce": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, _ENUM, _CALL, _OUT)),
    "hdl_allgather": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, _CALL, _OUT)),
    "hdl_allgatherv": (_ENUM, (_PTR, _PTR, _PTR, _SIZES, _SIZES, _ENUM, _CALL, _OUT)),
    "hdl_reduce_scatter": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, _ENUM, _CALL, _OUT)),
    "hdl_reduce_scatterv": (_ENUM, (_PTR, _PTR, _PTR, _SIZES, _ENUM, _ENUM, _CALL, _OUT)),
    "hdl_alltoall": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, _CALL, _OUT)),
    "hdl_alltoallv": (_ENUM, (_PTR, _PTR, _SIZES, _SIZES, _PTR, _SIZES, _SIZES, _ENUM, _CALL, _OUT)),
    "hdl_gather": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, Int32, _CALL, _OUT)),
    "hdl_gatherv": (_ENUM, (_PTR, _PTR, _PTR, _SIZES, _SIZES, _ENUM, Int32, _CALL, _OUT)),
    "hdl_scatter": (_ENUM, (_PTR, _PTR, _PTR, c_size_t, _ENUM, Int32, _CALL, _OUT)),
    "hdl_scatterv": (_ENUM, (_PTR, _PTR, _SIZES, _SIZES, _PTR, _ENUM, Int32, _CALL, _OUT)),
    "hdl_send": (_ENUM, (_PTR, _PTR, c_size_t, _ENUM, Int32, Int32, _CALL, _OUT)),
    "hdl_recv": (_ENUM, (_PTR, _PTR, c_size_t, _ENUM, Int32, Int32, _CALL, _OUT)),
    "hdl_op_test": (_ENUM, (_PTR,)),
    "hdl_op_wait": (_ENUM, (_PTR, c_int64)),
    "hdl_op_detail": (c_char_p, (_PTR,)),
    "hdl_op_failed": (c_int32, (_PTR, _MASK, c_size_t)),
    "hdl_op_source": (_ENUM, (_PTR, _RANKS, _RANKS)),
    "hdl_op_free": (None, (_PTR,)),
    "hdl_last_failed": (c_int32, (_MASK, c_size_t)),
    "hdl_window_create": (_ENUM, (_PTR, c_size_t, _ENUM, _OUT)),
    "hdl_window_adopt": (_ENUM, (_PTR, _PTR, c_size_t, _OUT)),
    "hdl_window_destroy": (None, (_PTR,)),
    "hdl_window_data": (_PTR, (_PTR,)),
    "hdl_window_bytes": (c_size_t, (_PTR,)),
    "hdl_window_pack": (_ENUM, (_PTR, _PTR, _SIZES)),
    "hdl_window_open": (_ENUM, (_PTR, _PTR, c_size_t, _OUT)),
    "hdl_window_close": (None, (_PTR,)),
    "hdl_peer_window_map": (_PTR, (_PTR,)),
    "hdl_put": (_ENUM, (_PTR, c_size_t, _PTR, c_size_t, c_size_t, c_uint64, _ENUM)),
    "hdl_signal": (_ENUM, (_PTR, c_size_t, c_uint64, _ENUM)),
    "hdl_window_wait": (_ENUM, (_PTR, c_size_t, c_uint64, _PTR, c_int64)),
    "hdl_flush": (_ENUM, (_PTR, c_int64)),
    "hdl_moe_size_hint": (_ENUM, (POINTER(MoeOpts), Int32, POINTER(MoeSizes))),
    "hdl_moe_create": (_ENUM, (_PTR, POINTER(MoeOpts), _OUT)),
    "hdl_moe_destroy": (None, (_PTR,)),
    "hdl_moe_update": (_ENUM, (_PTR, _RANKS, _RANKS)),
    "hdl_moe_local_experts": (c_int32, (_PTR,)),
    "hdl_moe_dispatch": (_ENUM, (_PTR, POINTER(MoeTokens), POINTER(MoeReceived), POINTER(MoeCall), _HANDLE)),
    "hdl_moe_dispatch_send": (_ENUM, (_PTR, POINTER(MoeTokens), POINTER(MoeCall), _HANDLE)),
    "hdl_moe_dispatch_recv": (_ENUM, (_PTR, _HANDLE, POINTER(MoeReceived), POINTER(MoeCall))),
    "hdl_moe_combine": (_ENUM, (_PTR, _HANDLE, POINTER(MoeOutputs), POINTER(MoeResult), POINTER(MoeCall))),
    "hdl_moe_combine_send": (_ENUM, (_PTR, _HANDLE, POINTER(MoeOutputs), POINTER(MoeCall))),
    "hdl_moe_combine_recv": (_ENUM, (_PTR, _HANDLE, POINTER(MoeResult), POINTER(MoeCall))),
    "hdl_moe_next_combine_buffer": (_ENUM, (_PTR, _HANDLE, _OUT)),
    "hdl_moe_status": (_ENUM, (_PTR, POINTER(MoeState))),
    "hdl_info": (_ENUM, (_PTR, _SIZES)),
}


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_library.find()))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


lib = _load()
