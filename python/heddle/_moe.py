# SPDX-License-Identifier: Apache-2.0
"""Exchange of token rows with the ranks that hold their experts."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from heddle import _abi, _error
from heddle._abi import DType, MoeFormat, MoeLayout, MoeMemory, MoeProtocol, MoeWire, Status, lib
from heddle._data import Data, DeviceBytes, data_of, device_data_of, name_of
from heddle._group import int32s
from heddle._object import Object, microseconds

# A caller whose arrays have no such type gives the bits.
_BITS = {DType.BF16: DType.U16, DType.F16: DType.U16, DType.F8E4M3: DType.U8}
_PLAIN_NUMPY = {DType.BF16: "uint16", DType.F8E4M3: "uint8"}

Allocate = Callable[[tuple[int, ...], DType], Any]


def numpy_array(shape: tuple[int, ...], dtype: DType) -> Any:
    """Uninitialised numpy array; bfloat16 and fp8, which numpy lacks, as bits."""
    import numpy

    return numpy.empty(shape, dtype=_PLAIN_NUMPY.get(dtype) or name_of(dtype))


def _torch_cuda() -> Any:
    import torch  # CUDA arrays are its tensors, unless the caller brings others

    return torch


def cuda_tensor(shape: tuple[int, ...], dtype: DType) -> Any:
    """Uninitialised torch tensor on the current CUDA device."""
    torch = _torch_cuda()
    return torch.empty(shape, dtype=getattr(torch, name_of(dtype)), device="cuda")


@dataclasses.dataclass(frozen=True)
class MoeSizes:
    """What an exchange needs and how large its outputs are; the fields of struct hdl_moe_sizes."""

    arena_bytes: int
    combine_buffer_bytes: int
    combine_buffer_elements: int
    out_rows: int
    index_entries: int
    row_elements: int
    row_bytes: int
    scale_bytes: int


@dataclasses.dataclass
class Received:
    """Where dispatch delivers; the fields of struct hdl_moe_received, each an array or None.

    rows [out_rows, H], scales [out_rows, ceil(H/128)], counts [L], offsets [L+1], row_numbers, source_token
    [out_rows], ranges [L, S] (begin << 32 | count), local_ids and weights [out_rows, k], source_counts [S].
    num_rows and num_pairs are filled by dispatch; on CUDA they are -1, and the two numbers go to totals, int64 [2].
    Only rows that exist are written.
    """

    rows: Any
    scales: Any = None
    counts: Any = None
    offsets: Any = None
    row_numbers: Any = None
    source_token: Any = None
    ranges: Any = None
    local_ids: Any = None
    weights: Any = None
    source_counts: Any = None
    totals: Any = None
    num_rows: int = 0
    num_pairs: int = 0


class Step:
    """One step, from its dispatch to its combine; good for one combine."""

    def __init__(self, num_tokens: int) -> None:
        self.struct = _abi.MoeHandle()
        self.num_tokens = num_tokens
        #: Rows that combine reads; -1 = not known here (CUDA).
        self.num_outputs = 0


@dataclasses.dataclass(frozen=True)
class MoeOptions:
    """Options of an exchange, equal on all ranks; the fields of struct hdl_moe_opts."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: DType = DType.BF16
    format: MoeFormat = MoeFormat.PLAIN
    combine_dtype: DType | None = None
    combine_wire: MoeWire = MoeWire.ROW
    layout: MoeLayout = MoeLayout.EXPERT_3D
    align: int = 0
    zero_padding: bool = False
    exact: bool = False
    late_weights: bool = False
    lanes: int = 0
    dp_size: int = 1
    expert_counts: Sequence[int] | None = None
    expert_ids: Sequence[int] | None = None
    timeout: float | None = None
    memory: MoeMemory = MoeMemory.HOST
    cuda_device: int = 0
    cuda_blocks: int = 0
    protocol: MoeProtocol = MoeProtocol.AUTO

    def struct(self) -> _abi.MoeOpts:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        timeout = fields.pop("timeout")
        fields["combine_dtype"] = self.combine_dtype or 0
        for name in ("expert_counts", "expert_ids"):
            fields[name] = None if fields[name] is None else int32s(fields[name])
        return _abi.MoeOpts(**fields, timeout_us=microseconds(timeout))

    def sizes(self, num_ranks: int) -> MoeSizes:
        """Exact sizes for a group of `num_ranks` slots; allocates nothing. EINVAL as for creation."""
        found = _abi.MoeSizes()
        _error.check(lib.hdl_moe_size_hint(self.struct(), num_ranks, found))
        return MoeSizes(**found.values())

    def result_dtype(self) -> DType:
        """Type of expert outputs and of sums."""
        return self.combine_dtype or (DType.BF16 if self.dtype == DType.F8E4M3 else self.dtype)


class Moe(Object):
    """An exchange of the group: dispatch, the caller's experts, combine. Collective; all ranks give the same options.

    options: those of heddle.MoeOptions, by name. Rows are arrays of `dtype`; where numpy has no such type
    (bfloat16, fp8), arrays of uint16 or uint8 with the bits. Every rank takes part in every step, also
    without tokens. Threads may share an exchange; their calls follow one another.

    Calls that meet a lost or late rank raise IncompleteError, unless the caller gives `active` (int32 [R], 1 =
    take part): then the entry is set to 0 and the call returns Status.INCOMPLETE. timeout: seconds to wait for
    a source (None: only a lost rank ends the wait).

    With memory=MoeMemory.CUDA all arrays are CUDA tensors (or have __cuda_array_interface__), `active` too, and calls
    only put their work into a stream: torch's current one, or `stream` (an integer, or an object with cuda_stream or
    ptr). They can be captured into a graph. What is missing is found in active, missing and status().

    Raises heddle.Error: ECONFIG if options differ (naming field, values, ranks), EINVAL for a value out of range.
    """

    _what = "exchange"

    def __init__(self, group: Object, num_experts: int, top_k: int, hidden: int, max_tokens: int, **options: Any):
        super().__init__(group)
        #: The options.
        self.options = MoeOptions(num_experts, top_k, hidden, max_tokens, **options)
        #: Held during each call of the library.
        self.lock = threading.Lock()
        view = _abi.View()
        _error.check(group.call(lib.hdl_group_view, view))
        #: Slots of the group (R), and ranks that give rows of their own (S).
        self.num_ranks: int = view.capacity
        made = ctypes.c_void_p()
        struct = self.options.struct()
        wrong = self._wrong_map(self.options.expert_counts, self.options.expert_ids)
        if wrong:
            struct.expert_ids = None  # refused by all ranks
        status = group.call(lib.hdl_moe_create, struct, made)
        if wrong:
            raise ValueError(wrong)
        _error.check(status)
        self._opened(made.value or 0)
        self.num_sources = self.num_ranks // self.options.dp_size
        self.on_device = self.options.memory == MoeMemory.CUDA
        self.sizes = self.options.sizes(self.num_ranks)

    @property
    def local_experts(self) -> int:
        """L, experts of this rank."""
        return int(self.call(lib.hdl_moe_local_experts))

    def _fields(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """Shape and type of all that dispatch delivers by the layout and the format."""
        o, local, rows = self.options, self.local_experts, self.sizes.out_rows
        shape = (local, self.num_sources * o.max_tokens) if o.layout == MoeLayout.EXPERT_3D else (rows,)
        fields: dict[str, tuple[tuple[int, ...], DType]] = {
            "rows": ((*shape, o.hidden), DType.F8E4M3 if o.format != MoeFormat.PLAIN else o.dtype),
            "counts": ((local,), DType.I32),
            "source_token": (shape, DType.I32),
            "ranges": ((local, self.num_sources), DType.I64),
            "source_counts": ((self.num_sources,), DType.I32),
        }
        if self.sizes.scale_bytes and o.format == MoeFormat.FP8_UE8M0:
            fields["scales"] = ((*shape, self.sizes.scale_bytes), DType.U8)
        elif self.sizes.scale_bytes:
            fields["scales"] = ((*shape, self.sizes.scale_bytes // 4), DType.F32)
        if o.layout in (MoeLayout.EXPERT_FLAT, MoeLayout.INDEXED):
            fields["offsets"] = ((local + 1,), DType.I64)
        if o.layout == MoeLayout.INDEXED:
            fields["row_numbers"] = ((self.sizes.index_entries,), DType.I64)
        if o.layout in (MoeLayout.RANK_MAJOR, MoeLayout.INDEXED):
            fields["local_ids"] = ((rows, o.top_k), DType.I32)
            fields["weights"] = ((rows, o.top_k), DType.F32)
        if self.on_device:
            fields["totals"] = ((2,), DType.I64)
        return fields

    def new_received(self, allocate: Allocate | None = None) -> Received:
        """Arrays for dispatch: all that the layout and the format have. Default: numpy arrays, CUDA tensors."""
        allocate = allocate or (cuda_tensor if self.on_device else numpy_array)
        return Received(**{name: allocate(*field) for name, field in self._fields().items()})

    def _into(self, received: Received) -> _abi.MoeReceived:
        """The struct; refuses arrays that are too small."""
        struct = _abi.MoeReceived()
        fields = self._fields()
        for field in dataclasses.fields(Received)[:-2]:
            array = getattr(received, field.name)
            if array is None:
                continue
            data = self._data(array, write=True)
            if field.name in fields:
                shape, dtype = fields[field.name]
                self._check_room(data, dtype, math.prod(shape), field.name)
            setattr(struct, field.name, data.address)
        return struct

    def _data(self, source: Any, write: bool = False) -> Data:
        if not self.on_device:
            return data_of(source, write)
        device: Any = getattr(source, "device", None)
        own = self.options.cuda_device
        if getattr(device, "type", None) == "cuda" and device.index != own:
            raise TypeError(f"the tensor is on {device}, the exchange on device {own} (MoeOptions.cuda_device)")
        return device_data_of(source, write)

    def _stream(self, stream: Any) -> int | None:
        """The stream of a call as the C interface takes it."""
        if not self.on_device:
            return None
        if stream is None:
            stream = _torch_cuda().cuda.current_stream(self.options.cuda_device)
        if isinstance(stream, int):
            return stream
        return int(stream.cuda_stream if hasattr(stream, "cuda_stream") else stream.ptr)

    # ------------------------------------------------------------------- dispatch

    def dispatch(
        self,
        rows: Any,
        topk_ids: Any,
        received: Received,
        weights: Any = None,
        scales: Any = None,
        active: Any = None,
        timeout: float | None = None,
        stream: Any = None,
        num_tokens_at: Any = None,
    ) -> tuple[Step, Status]:
        """rows [T, H], topk_ids [T, k] (int32 or int64, -1 = nothing), weights f32 [T, k] -> received.

        scales: [T, ceil(H/128)] f32 (uint8 for UE8M0) of rows that are fp8 already. num_tokens_at (CUDA): int32 [1]
        on the device with the number of tokens, at most T, which may change between replays of a graph.
        Raises InvalidError for an id or a T out of range (naming values), heddle.Error with EPEER if another rank's
        arguments were refused.
        """
        tokens, step = self._checked(self._tokens, rows, topk_ids, weights, scales, num_tokens_at)
        into = self._checked(self._into, received)
        arguments = ((tokens, into), (step.struct,))
        return step, self._take(lib.hdl_moe_dispatch, active, timeout, *arguments, received, into, step, stream)

    def dispatch_send(
        self,
        rows: Any,
        topk_ids: Any,
        weights: Any = None,
        scales: Any = None,
        active: Any = None,
        stream: Any = None,
        num_tokens_at: Any = None,
    ) -> tuple[Step, Status]:
        """First half of dispatch: waits for nobody; the arrays may be reused when it returns."""
        tokens, step = self._checked(self._tokens, rows, topk_ids, weights, scales, num_tokens_at)
        status = self._finish(lib.hdl_moe_dispatch_send, active, None, (tokens,), (step.struct,), stream)
        return step, status

    def dispatch_recv(
        self, step: Step, received: Received, active: Any = None, timeout: float | None = None, stream: Any = None
    ) -> Status:
        """Second half of dispatch."""
        into = self._into(received)
        arguments = ((step.struct, into), ())
        return self._take(lib.hdl_moe_dispatch_recv, active, timeout, *arguments, received, into, step, stream)

    def refuse(self) -> None:
        """A dispatch whose arguments are bad: this step is over on all ranks, the others get EPEER."""
        tokens = _abi.MoeTokens(num_tokens=self.options.max_tokens + 1)
        with self.lock:
            self.call(lib.hdl_moe_dispatch_send, tokens, None, _abi.MoeHandle())

    def _checked(self, make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except (TypeError, ValueError):
            if not self.on_device:
                self.refuse()
            raise

    def _tokens(
        self, rows: Any, topk_ids: Any, weights: Any, scales: Any, num_tokens_at: Any
    ) -> tuple[_abi.MoeTokens, Step]:
        ids = self._data(topk_ids)
        if ids.dtype not in (DType.I32, DType.I64):
            raise TypeError(f"topk_ids is {ids.dtype.name}, int32 or int64 is needed")
        if len(ids.shape) != 2 or ids.shape[1] != self.options.top_k:
            raise ValueError(f"topk_ids has shape {ids.shape}, [tokens, {self.options.top_k}] is needed")
        count = ids.shape[0]
        tokens = _abi.MoeTokens(
            rows=self._address(rows, self.options.dtype, count * self.options.hidden, "rows") if count else None,
            topk_ids=ids.address if count else None,
            weights=None if weights is None else self._address(weights, DType.F32, ids.count, "weights"),
            num_tokens=count,
            ids_are_64=ids.dtype == DType.I64,
        )
        if scales is not None:
            tokens.scales = self._data(scales).address
        if num_tokens_at is not None:
            tokens.num_tokens_at = self._address(num_tokens_at, DType.I32, 1, "num_tokens_at")
        return tokens, Step(count)

    def _check_room(self, data: Data, dtype: DType, count: int, what: str) -> None:
        if data.dtype not in (dtype, _BITS.get(dtype)):
            raise TypeError(f"{what} is {data.dtype.name}, {dtype.name} is needed")
        if data.count < count:
            raise ValueError(f"{what} of shape {data.shape} is too small, {count} elements are needed")

    def _address(self, array: Any, dtype: DType, count: int, what: str, write: bool = False) -> int:
        data = self._data(array, write)
        if data.dtype not in (dtype, _BITS.get(dtype)):
            raise TypeError(f"{what} is {data.dtype.name}, {dtype.name} is needed")
        if data.count != count:
            raise ValueError(f"{what} of shape {data.shape} has {data.count} elements, {count} are needed")
        return data.address

    def _take(
        self,
        function: Callable[..., int],
        active: Any,
        timeout: float | None,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        received: Received,
        struct: _abi.MoeReceived,
        step: Step,
        stream: Any,
    ) -> Status:
        try:
            return self._finish(function, active, timeout, before, after, stream)
        finally:
            received.num_rows, received.num_pairs = struct.num_rows, struct.num_pairs
            layout = self.options.layout
            if layout == MoeLayout.EXPERT_3D:
                step.num_outputs = self.local_experts * self.num_sources * self.options.max_tokens
            else:
                step.num_outputs = struct.num_pairs if layout == MoeLayout.INDEXED else struct.num_rows

    def _finish(
        self,
        function: Callable[..., int],
        active: Any,
        timeout: float | None,
        before: tuple[Any, ...],
        after: tuple[Any, ...] = (),
        stream: Any = None,
    ) -> Status:
        call = _abi.MoeCall(timeout_us=microseconds(timeout), stream=self._stream(stream))
        if active is not None:
            call.active = self._address(active, DType.I32, self.num_ranks, "active", write=True)
        with self.lock:
            status = self.call(function, *before, call, *after)
        if status < 0 or (status == Status.INCOMPLETE and active is None):
            raise _error.last(status)
        return Status(status)

    # -------------------------------------------------------------------- combine

    def combine(
        self,
        step: Step,
        rows: Any,
        out: Any,
        weights: Any = None,
        bias: Sequence[Any] = (),
        accumulate: bool = False,
        missing: Any = None,
        active: Any = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Status:
        """Sums weight * expert output for every own token into out [T, H].

        rows: expert outputs in the place of the rows that dispatch delivered, or what next_combine_buffer() gave.
        weights: if dispatch got none. bias: up to two [T, H], added in order. accumulate: adds what `out` holds.
        missing: uint8 [T], set to 1 where a contribution is missing.
        """
        outputs = self._outputs(rows, weights, step)
        result = self._result(out, bias, accumulate, missing, step)
        return self._finish(lib.hdl_moe_combine, active, timeout, (step.struct, outputs, result), stream=stream)

    def combine_send(
        self, step: Step, rows: Any, weights: Any = None, active: Any = None, stream: Any = None
    ) -> Status:
        """First half of combine: waits for nobody; the arrays may be reused when it returns."""
        outputs = self._outputs(rows, weights, step)
        return self._finish(lib.hdl_moe_combine_send, active, None, (step.struct, outputs), stream=stream)

    def combine_recv(
        self,
        step: Step,
        out: Any,
        bias: Sequence[Any] = (),
        accumulate: bool = False,
        missing: Any = None,
        active: Any = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Status:
        """Second half of combine."""
        result = self._result(out, bias, accumulate, missing, step)
        return self._finish(lib.hdl_moe_combine_recv, active, timeout, (step.struct, result), stream=stream)

    def _outputs(self, rows: Any, weights: Any, step: Step) -> _abi.MoeOutputs:
        data = self._data(rows)
        if not isinstance(rows, (memoryview, DeviceBytes)):  # those of next_combine_buffer
            self._check_room(data, self.options.result_dtype(), step.num_outputs * self.options.hidden, "rows")
        outputs = _abi.MoeOutputs(rows=data.address)
        if weights is not None:
            outputs.weights = self._address(weights, DType.F32, step.num_tokens * self.options.top_k, "weights")
        return outputs

    def _result(self, out: Any, bias: Sequence[Any], accumulate: bool, missing: Any, step: Step) -> _abi.MoeResult:
        count, dtype = step.num_tokens * self.options.hidden, self.options.result_dtype()
        if len(bias) > 2:
            raise ValueError(f"{len(bias)} biases, at most 2 are taken")
        result = _abi.MoeResult(rows=self._address(out, dtype, count, "out", write=True), accumulate=accumulate)
        for i, array in enumerate(bias):
            result.bias[i] = self._address(array, dtype, count, "bias")
        if missing is not None:
            result.missing = self._address(missing, DType.U8, step.num_tokens, "missing", write=True)
        return result

    def next_combine_buffer(self, step: Step) -> memoryview | DeviceBytes:
        """Registered memory shaped like the input of combine, as bytes: combine reads it in place.

        From dispatch_send to the end of that step's combine; do not use it after update() or close().
        """
        address = ctypes.c_void_p()
        _error.check(self.call(lib.hdl_moe_next_combine_buffer, step.struct, address))
        if self.on_device:
            return DeviceBytes(self, address.value or 0, self.sizes.combine_buffer_bytes)
        memory: Any = (ctypes.c_char * self.sizes.combine_buffer_bytes).from_address(address.value or 0)
        memory._exchange = self
        return memoryview(memory).cast("B")

    # -------------------------------------------------------------------- changes

    def update(self, expert_counts: Sequence[int] | None = None, expert_ids: Sequence[int] | None = None) -> None:
        """Links all members anew after a change of membership, with another map of experts if given.

        Collective; a new member creates a Moe at that place. Older steps are ESTALE.
        """
        counts = None if expert_counts is None else int32s(expert_counts)
        wrong = self._wrong_map(expert_counts, expert_ids)
        ids = None if expert_ids is None or wrong else int32s(expert_ids)
        with self.lock:
            status = self.call(lib.hdl_moe_update, counts, ids)
            if wrong:
                raise ValueError(wrong)
            _error.check(status)
        if expert_counts is not None:
            self.options = dataclasses.replace(self.options, expert_counts=expert_counts, expert_ids=expert_ids)
            self.sizes = self.options.sizes(self.num_ranks)

    def _wrong_map(self, counts: Sequence[int] | None, ids: Sequence[int] | None) -> str:
        """What is wrong with the lengths, which the library cannot see."""
        if counts is not None and len(counts) != self.num_ranks:
            return f"expert_counts has {len(counts)} entries, the group has {self.num_ranks} slots"
        if counts is not None and ids is not None and len(ids) != sum(counts):
            return f"expert_ids has {len(ids)} entries, expert_counts has {sum(counts)} experts"
        return ""

    def status(self) -> dict[str, Any]:
        """Counters since creation and the last failure, by the names of struct hdl_moe_state; arrays as lists."""
        expert_rows = (ctypes.c_uint64 * max(1, self.local_experts))()
        per_rank = {name: (ctypes.c_uint64 * self.num_ranks)() for name in ("wait_ns", "bytes_sent", "bytes_received")}
        addresses = {name: ctypes.addressof(array) for name, array in per_rank.items()}
        state = _abi.MoeState(expert_rows=ctypes.addressof(expert_rows), **addresses)
        _error.check(self.call(lib.hdl_moe_status, state))
        found = state.values() | {name: list(array) for name, array in per_rank.items()}
        found["last_error"] = Status(state.last_error)
        for name in ("dispatch_protocol", "combine_protocol"):
            found[name] = MoeProtocol(found[name])
        found["expert_rows"] = list(expert_rows)[: self.local_experts]
        return found

    _destroy = staticmethod(lib.hdl_moe_destroy)
