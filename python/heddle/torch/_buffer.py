# SPDX-License-Identifier: Apache-2.0
"""The low-latency Buffer: dispatch and combine of a mixture-of-experts layer on tensors, over any process group."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from heddle import _abi, _error
from heddle._abi import MoeFormat, MoeMemory, Status, lib
from heddle._context import Context
from heddle._data import DeviceBytes
from heddle._group import Group
from heddle._moe import Moe, MoeOptions
from heddle._object import Object
from heddle.torch._group import ProcessGroup

log = logging.getLogger("heddle.torch")

_HINT_TOP_K = 64
# Kernels take weights with combine up to this k.
_LATE_TOP_K = 32


class StreamEvent:
    """The work that a stream has been given so far."""

    def __init__(self, stream: Any) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for that work."""
        torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What a call left on a stream (`async_finish` on CUDA). On the CPU a call is finished when it returns."""

    def __init__(self, event: Any = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event, if there is one."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


class Handle(tuple[Any, ...]):
    """From a dispatch to its combine; good for one.

    (source_token [L, R*M] int32, ranges [L, R] int64 = begin << 32 | count, M, H, E).
    missing: after combine, uint8 [T], 1 where a contribution is missing.
    """

    exchange: _Exchange
    update: int
    step: _abi.MoeHandle
    weights: torch.Tensor | None
    topk_shape: tuple[int, ...]
    missing: torch.Tensor


class _Shape(NamedTuple):
    """What an exchange is made for."""

    max_tokens: int
    hidden: int
    num_experts: int
    top_k: int
    use_fp8: bool
    device: torch.device = torch.device("cpu")

    def options(self) -> MoeOptions:
        on_cuda = self.device.type == "cuda"
        return MoeOptions(
            self.num_experts,
            self.top_k,
            self.hidden,
            self.max_tokens,
            format=MoeFormat.FP8 if self.use_fp8 else MoeFormat.PLAIN,
            late_weights=not on_cuda or self.top_k <= _LATE_TOP_K,
            memory=MoeMemory.CUDA if on_cuda else MoeMemory.HOST,
            cuda_device=(self.device.index or 0) if on_cuda else 0,
        )


class _Exchange:
    """One exchange, the number of the buffer's update that it has seen, and the structs of its calls.

    They are filled and used under the lock of the exchange: making new ones would take longer than the calls.
    """

    def __init__(self, shape: _Shape, moe: Moe, update: int) -> None:
        self.shape = shape
        self.moe = moe
        self.tokens = _abi.MoeTokens()
        self.received = _abi.MoeReceived()
        self.outputs = _abi.MoeOutputs()
        self.result = _abi.MoeResult()
        self.call = _abi.MoeCall()
        self.linked(update)

    def linked(self, update: int) -> None:
        self.update = update
        self.local = self.moe.local_experts
        self.rows = self.moe.num_ranks * self.shape.max_tokens
        # Where each expert begins, in the upper half: the library counts rows through, a handle by expert.
        first = torch.arange(self.local, device=self.shape.device) * self.rows << 32
        self.first = first[:, None].repeat(1, self.moe.num_ranks)

    def begin(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
        tokens = self.tokens
        tokens.num_tokens = count = ids.size(0)
        tokens.ids_are_64 = ids.dtype == torch.int64
        tokens.rows = x.data_ptr() if count else None
        tokens.topk_ids = ids.data_ptr() if count else None
        tokens.weights = None if weights is None else weights.data_ptr()

    def deliver(self, into: _Arrivals) -> None:
        received = self.received
        received.rows = into.rows.data_ptr()
        received.scales = None if into.scales is None else into.scales.data_ptr()
        received.counts = into.counts.data_ptr()
        received.source_token = into.source_token.data_ptr()
        received.ranges = into.ranges.data_ptr()

    def give(self, rows: torch.Tensor, weights: torch.Tensor | None) -> None:
        self.outputs.rows = rows.data_ptr()
        self.outputs.weights = None if weights is None else weights.data_ptr()

    def take(self, out: torch.Tensor, missing: torch.Tensor) -> None:
        self.result.rows = out.data_ptr()
        self.result.missing = missing.data_ptr()


class _Arrivals:
    """Where a dispatch delivers."""

    __slots__ = ("counts", "ranges", "rows", "scales", "source_token")

    def __init__(self, exchange: _Exchange) -> None:
        shape, local, rows, device = exchange.shape, exchange.local, exchange.rows, exchange.shape.device
        self.scales = None
        dtype = torch.float8_e4m3fn if shape.use_fp8 else torch.bfloat16
        self.rows = torch.empty((local, rows, shape.hidden), dtype=dtype, device=device)
        if shape.use_fp8:
            self.scales = torch.empty((local, rows, (shape.hidden + 127) // 128), device=device)
        self.counts = torch.empty(local, dtype=torch.int32, device=device)
        self.source_token = torch.full((local, rows), -1, dtype=torch.int32, device=device)
        self.ranges = exchange.first.clone()

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.rows, self.scales, self.counts, self.source_token, self.ranges


class _Run:
    """The stream that a call's work goes to (None on the CPU): current while the call is made."""

    def __init__(self, stream: Any, aside: bool) -> None:
        self._stream = stream
        self._aside = aside
        self._guard: Any = None

    def __enter__(self) -> None:
        if self._aside:
            self._guard = torch.cuda.stream(self._stream)
            self._guard.__enter__()

    def __exit__(self, *failure: Any) -> None:
        if self._guard is not None:
            self._guard.__exit__(*failure)

    def event(self, tensors: tuple[torch.Tensor | None, ...]) -> EventOverlap:
        """What the caller waits for; the tensors stay as they are until the stream is done with them."""
        if not self._aside:
            return EventOverlap()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)
        return EventOverlap(StreamEvent(self._stream))

    def then(self, receive: Callable[[], None]) -> Callable[[], None]:
        """The second phase comes after the first one, whatever stream is current then."""
        if self._stream is None:
            return receive
        sent = StreamEvent(self._stream)

        def after() -> None:
            sent.current_stream_wait()
            receive()

        return after


class _Adopted(Object):
    """The C group of a process group, which frees it."""

    _what = "process group"

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(None)
        self._opened(group.handle().value or 0)
        # Exchanges end before the group that they are made of.
        group.before_end.append(_closer(self))

    @staticmethod
    def _destroy(handle: int) -> None:
        pass


def _closer(adopted: Object) -> Callable[[], None]:
    held = weakref.ref(adopted)

    def close() -> None:
        found = held()
        if found is not None:
            found.close()

    return close


class _Meeting:
    """A process group as a store: rank 0's one record goes to all others by a broadcast."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._told = False
        self._record: bytes | None = None
        if rank != 0:
            self._record = self._broadcast(None)

    def _broadcast(self, record: bytes | None) -> bytes | None:
        box = [record]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]

    def put(self, _key: str, record: bytes) -> None:
        if not self._told:
            self._told = True
            self._broadcast(record)

    def get(self, _key: str, timeout: float) -> bytes:
        if self._record is None:
            raise RuntimeError("rank 0 of the process group could not begin")
        return self._record

    def give_up(self) -> None:
        """Of rank 0 when it failed before it could tell."""
        self.put("", b"")


def _job_over(group: Any, disable_p2p: bool) -> Group:
    """A group of our own with the ranks of a foreign process group; it owns its context."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    meeting = _Meeting(group, rank)
    try:
        context = Context(rank, size, store=meeting, transport="fabric" if disable_p2p else None)
    except BaseException:
        if rank == 0:
            meeting.give_up()
        raise
    return Group(context)


class Buffer:
    """Dispatch and combine over a torch process group: heddle's, or any other whose ranks can reach each other.

    Collective. num_ep_buffer_bytes: shared memory that the exchanges may take on a rank, 0 = what they need; see
    get_ep_buffer_size_hint(). disable_p2p: no shared memory, also on one host (with a foreign process group).
    Attributes: rank, group_size (R), group, backend, num_ep_buffer_bytes, _use_fallback.

    With CUDA tensors all ranks are processes of one host with a GPU each; calls only put their work into the current
    stream, and what is missing is found in active_ranks (a CUDA tensor then), handle.missing and the exchange's status.

    Raises heddle.Error as heddle.Moe does.
    """

    def __init__(self, group: Any, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.group_size: int = dist.get_world_size(group)
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        #: The host path, as long as no CUDA tensor was given.
        self._use_fallback = True
        self._side: Any = None
        self.backend: Any = dist.get_backend(group)
        self._exchanges: dict[_Shape, _Exchange] = {}
        self._last: _Exchange | None = None
        self._updates = 0
        self._job: Object = _Adopted(group) if isinstance(group, ProcessGroup) else _job_over(group, disable_p2p)
        self._slots = group.capacity if isinstance(group, ProcessGroup) else self.group_size

    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of shared memory on each rank for k up to 64 (or E) and two steps at once."""
        top_k = min(_HINT_TOP_K, num_experts)
        shapes = [
            _Shape(num_max_dispatch_tokens_per_rank, hidden, num_experts, top_k, use_fp8) for use_fp8 in (False, True)
        ]
        return max(shape.options().sizes(num_ranks).arena_bytes for shape in shapes)

    def connect(self, is_update: bool = False) -> None:
        """Links with the other ranks; done by the constructor and, for is_update, by update_ep_member()."""
        if is_update:
            self.update_ep_member()

    def update_ep_member(self) -> None:
        """After a change of membership: R is group.size() again, and the next dispatch links all members anew.

        Collective; new members make a Buffer at that place. Earlier handles are then ESTALE.
        """
        self.group_size = dist.get_world_size(self.group)
        self._updates += 1

    def close(self) -> None:
        """Ends the exchanges; tensors of get_next_combine_buffer() are gone."""
        self._exchanges.clear()
        self._last = None
        context = getattr(self._job, "context", None)
        self._job.close()
        if context is not None:
            context.close()

    # ------------------------------------------------------------------ exchanges

    def _map(self, num_experts: int) -> list[int] | None:
        """E/R experts each on the first R slots; None where that is all slots."""
        if num_experts % self.group_size:
            raise ValueError(f"{num_experts} experts are not divisible among {self.group_size} ranks")
        if self.group_size == self._slots:
            return None
        each = num_experts // self.group_size
        return [each if slot < self.group_size else 0 for slot in range(self._slots)]

    def _exchange(self, shape: _Shape) -> _Exchange:
        """The exchange for a shape: found, linked anew, or made (the latter two collectively)."""
        found = self._exchanges.get(shape)
        if found is not None and found.update == self._updates:
            return found
        counts = self._map(shape.num_experts)
        ids = None if counts is None else list(range(shape.num_experts))
        if found is not None:
            found.moe.update(counts or self._even(shape.num_experts), ids or list(range(shape.num_experts)))
            found.linked(self._updates)
            return found
        options = dataclasses.replace(shape.options(), expert_counts=counts, expert_ids=ids)
        needed = options.sizes(self._slots).arena_bytes
        used = sum(exchange.moe.sizes.arena_bytes for exchange in self._exchanges.values())
        if self.num_ep_buffer_bytes and used + needed > self.num_ep_buffer_bytes:
            raise ValueError(
                f"dispatch of M {shape.max_tokens} H {shape.hidden} E {shape.num_experts} k {shape.top_k} "
                f"use_fp8={shape.use_fp8} needs an exchange of {needed} bytes beside {used} that others have, "
                f"num_ep_buffer_bytes is {self.num_ep_buffer_bytes}"
            )
        fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        made = _Exchange(shape, Moe(self._job, **fields), self._updates)
        self._exchanges[shape] = made
        return made

    def _even(self, num_experts: int) -> list[int]:
        return [num_experts // self._slots] * self._slots

    def _mask(
        self, active_ranks: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(mask of all slots for the C call, the caller's tensor to update or None)."""
        members = self.group.active_ranks if isinstance(self.group, ProcessGroup) else None
        if active_ranks is not None and members is not None and active_ranks.data_ptr() == members.data_ptr():
            active_ranks = None  # a call writes into its mask, but only views change the members
        if active_ranks is None and device.type == "cuda":
            return None, None  # the members
        if active_ranks is None:
            if members is not None:
                return members[: self._slots].to("cpu", torch.int32, copy=True), None
            return torch.ones(self._slots, dtype=torch.int32), None
        _on(device, active_ranks, "active_ranks")
        length = active_ranks.numel()
        if active_ranks.dtype != torch.int32 or length not in (self.group_size, self._slots):
            raise ValueError(
                f"active_ranks is {active_ranks.dtype} of length {length}, int32 of length {self.group_size} is needed"
            )
        if length == self._slots and active_ranks.is_contiguous():
            return active_ranks, None
        mask = torch.zeros(self._slots, dtype=torch.int32, device=device)
        mask[:length] = active_ranks
        return mask, active_ranks

    def _call(
        self,
        exchange: _Exchange,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        function: Callable[..., int],
        *arguments: Any,
        last: tuple[Any, ...] = (),
    ) -> None:
        """One C call, whose options stand before `last`; ranks that did not come are cleared in the caller's mask."""
        device = exchange.shape.device
        mask, target = self._mask(active_ranks, device)
        call = exchange.call
        call.active = None if mask is None else mask.data_ptr()
        if device.type == "cuda":
            call.stream = torch.cuda.current_stream(device).cuda_stream
        call.timeout_us = timeout_us if timeout_us != 0 else 1  # 0 is no limit there
        status = exchange.moe.call(function, *arguments, call, *last)
        if status < 0:
            raise _error.last(status)
        if target is not None and mask is not None:
            target.copy_(mask[: target.numel()])
        if status == Status.INCOMPLETE and active_ranks is None:
            log.warning("buffer rank %d: ranks did not come or are lost; active_ranks says which if given", self.rank)

    # ------------------------------------------------------------------- dispatch

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        active_ranks: torch.Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int = -1,
        use_fp8: bool | None = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Callable[[], None]]:
        """Brings rows to the ranks of their experts.

        x bf16 [T, H]; topk_idx int64 or int32 [T, k], -1 = nothing; active_ranks int32 [R] (None = the group's): a
        source that has not come after timeout_us (-1: no limit) or is lost is set to 0 in it; topk_weights f32 [T, k]:
        if they are given, contributions come back weighted and summed. Returns recv_x [L, R*M, H] bf16, or
        float8_e4m3fn with scales f32 [L, R*M, ceil(H/128)] (use_fp8, default), recv_count int32 [L], handle, event,
        hook. With return_recv_hook nothing is waited for until hook() is called.

        Raises ValueError (shapes, E not divisible by R, more than num_ep_buffer_bytes), InvalidError for an id or a T
        out of range, heddle.Error with EPEER if another rank's arguments were refused.
        """
        try:
            self._check(x, topk_idx, topk_weights, async_finish, return_recv_hook)
            use_fp8 = use_fp8 is not False
            top_k = topk_idx.size(1)
            shape = _Shape(num_max_dispatch_tokens_per_rank, x.size(1), num_experts, top_k, use_fp8, x.device)
            self._mask(active_ranks, x.device)
            exchange = self._exchange(shape)
        except (TypeError, ValueError, NotImplementedError) as failure:
            last = self._last
            if last is not None and not last.moe.on_device and not isinstance(failure, _error.Error):
                last.moe.refuse()
            raise
        self._last = exchange
        into = _Arrivals(exchange)
        weights = None if topk_weights is None else topk_weights.to(torch.float32).contiguous()
        x, ids, step = x.contiguous(), topk_idx.contiguous(), _abi.MoeHandle()

        def receive() -> None:
            with exchange.moe.lock:
                exchange.deliver(into)
                arguments = (lib.hdl_moe_dispatch_recv, step, exchange.received)
                self._call(exchange, active_ranks, timeout_us, *arguments)
            finish()

        def finish() -> None:
            into.ranges -= exchange.first
            if scales is not None and into.scales is not None and scales is not into.scales:
                scales.copy_(into.scales)

        scales = into.scales
        if scales is not None and exchange.moe.on_device:
            # GEMMs want the scales of neighbouring tokens side by side.
            scales = torch.empty_like(scales.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        run = self._begin(exchange, async_finish)
        with run, exchange.moe.lock:
            exchange.begin(x, ids, weights)
            if return_recv_hook:
                arguments: tuple[Any, ...] = (lib.hdl_moe_dispatch_send, exchange.tokens)
            else:
                exchange.deliver(into)
                arguments = (lib.hdl_moe_dispatch, exchange.tokens, exchange.received)
            self._call(exchange, active_ranks, timeout_us, *arguments, last=(step,))
            if not return_recv_hook:
                finish()
        rows, source, ranges = into.rows, into.source_token, into.ranges
        if self.group_size != self._slots:
            end = self.group_size * shape.max_tokens
            rows, source, ranges = rows[:, :end], source[:, :end], ranges[:, : self.group_size]
            scales = None if scales is None else scales[:, :end]
        handle = Handle((source, ranges, shape.max_tokens, shape.hidden, num_experts))
        handle.exchange, handle.step, handle.weights = exchange, step, weights
        handle.topk_shape, handle.update = topk_idx.shape, self._updates
        out = rows if scales is None else (rows, scales)
        hook = _once(run.then(receive)) if return_recv_hook else _nothing
        return out, into.counts, handle, run.event((x, ids, weights, *into.tensors())), hook

    @staticmethod
    def _check(
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> None:
        _one_way(async_finish, return_recv_hook)
        for tensor, what in ((x, "x"), (topk_idx, "topk_idx"), (topk_weights, "topk_weights")):
            _on(x.device, tensor, what)
        if x.is_cuda and topk_weights is None and topk_idx.size(-1) > _LATE_TOP_K:
            raise NotImplementedError(f"with CUDA tensors and k > {_LATE_TOP_K} dispatch needs topk_weights")
        if x.dim() != 2 or topk_idx.dim() != 2 or x.size(0) != topk_idx.size(0):
            raise ValueError(f"x {list(x.shape)} and topk_idx {list(topk_idx.shape)} are not [T, H] and [T, k]")
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x is {x.dtype}, torch.bfloat16 is needed")
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_idx is {topk_idx.dtype}, torch.int64 or int32 is needed")
        if topk_weights is not None and topk_weights.shape != topk_idx.shape:
            raise ValueError(f"topk_weights {list(topk_weights.shape)} and topk_idx {list(topk_idx.shape)} differ")

    # -------------------------------------------------------------------- combine

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        handle: Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:
        """Brings the experts' outputs back and sums them with the weights.

        x bf16 [L, R*M, H], in the places of dispatch's rows; with zero_copy the outputs are in the memory of
        get_next_combine_buffer() instead and x is not read. topk_idx, topk_weights [T, k]: as at dispatch. Returns
        combined_x bf16 [T, H] (`out` if given), event, hook; missing contributions: handle.missing.

        Raises heddle.Error with ESTALE for a handle that was used or is older than an update; ValueError for shapes.
        """
        _one_way(async_finish, return_recv_hook)
        if handle.update != self._updates:
            raise _error.make(Status.ESTALE, "the handle is older than update_ep_member()")
        exchange, step = handle.exchange, handle.step
        device = exchange.shape.device
        for tensor, what in ((x, "x"), (topk_idx, "topk_idx"), (topk_weights, "topk_weights"), (out, "out")):
            _on(device, tensor, what)
        if topk_idx.shape != handle.topk_shape or topk_weights.shape != handle.topk_shape:
            raise ValueError(
                f"topk_idx {list(topk_idx.shape)} and topk_weights {list(topk_weights.shape)} are not those of the "
                f"dispatch, {list(handle.topk_shape)}"
            )
        weights: torch.Tensor | None = topk_weights.to(torch.float32).contiguous()
        if handle.weights is not None:
            # On CUDA a look would wait for the stream.
            if not exchange.moe.on_device and not torch.equal(weights, handle.weights):  # type: ignore[arg-type]
                raise ValueError("topk_weights are not those that were given to dispatch")
            weights = None
        rows = self._outputs(x, handle, zero_copy)
        count, hidden = topk_idx.size(0), exchange.shape.hidden
        result = torch.empty((count, hidden), dtype=torch.bfloat16, device=device) if out is None else out
        if result.dtype != torch.bfloat16 or result.shape != (count, hidden):
            raise ValueError(
                f"out is {result.dtype} {list(result.shape)}, torch.bfloat16 [{count}, {hidden}] is needed"
            )
        target = result if result.is_contiguous() else torch.empty_like(result, memory_format=torch.contiguous_format)
        missing = handle.missing = torch.zeros(count, dtype=torch.uint8, device=device)

        def receive() -> None:
            with exchange.moe.lock:
                exchange.take(target, missing)
                arguments = (lib.hdl_moe_combine_recv, step, exchange.result)
                self._call(exchange, active_ranks, timeout_us, *arguments)
            if target is not result:
                result.copy_(target)

        run = self._begin(exchange, async_finish)
        with run, exchange.moe.lock:
            exchange.give(rows, weights)
            if return_recv_hook:
                arguments: tuple[Any, ...] = (lib.hdl_moe_combine_send, step, exchange.outputs)
            else:
                exchange.take(target, missing)
                arguments = (lib.hdl_moe_combine, step, exchange.outputs, exchange.result)
            self._call(exchange, active_ranks, timeout_us, *arguments)
            if target is not result and not return_recv_hook:
                result.copy_(target)
        hook = _once(run.then(receive)) if return_recv_hook else _nothing
        return result, run.event((rows, target, result, missing)), hook

    def _begin(self, exchange: _Exchange, async_finish: bool) -> _Run:
        """Where a call's work goes: the current stream, or one of the buffer's own beside it."""
        if not exchange.moe.on_device:
            return _Run(None, False)
        self._use_fallback = False
        if not async_finish:
            return _Run(torch.cuda.current_stream(exchange.shape.device), False)
        if self._side is None:
            self._side = torch.cuda.Stream(exchange.shape.device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(exchange.shape.device))
        return _Run(self._side, True)

    def _outputs(self, x: torch.Tensor, handle: Handle, zero_copy: bool) -> torch.Tensor:
        """The experts' outputs as the C call takes them: [L, slots*M, H]."""
        if zero_copy:
            return self._combine_buffer(handle)
        shape, (local, rows) = handle.exchange.shape, handle[0].shape
        if x.dtype != torch.bfloat16 or tuple(x.shape) != (local, rows, shape.hidden):
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)}, torch.bfloat16 [{local}, {rows}, {shape.hidden}] is needed"
            )
        if self.group_size == self._slots:
            return x.contiguous()
        wide = torch.empty(
            (local, self._slots * shape.max_tokens, shape.hidden), dtype=torch.bfloat16, device=shape.device
        )
        wide[:, :rows] = x
        return wide

    def _combine_buffer(self, handle: Handle) -> torch.Tensor:
        exchange = handle.exchange
        shape = (exchange.local, exchange.rows, exchange.shape.hidden)
        address = ctypes.c_void_p()
        _error.check(exchange.moe.call(lib.hdl_moe_next_combine_buffer, handle.step, address))
        if exchange.moe.on_device:
            held = DeviceBytes(exchange.moe, address.value or 0, exchange.moe.sizes.combine_buffer_bytes)
            data = torch.as_tensor(held, device=exchange.shape.device).view(torch.bfloat16)
            return data[: math.prod(shape)].view(shape)
        memory: Any = (ctypes.c_char * exchange.moe.sizes.combine_buffer_bytes).from_address(address.value or 0)
        memory._exchange = exchange
        return torch.frombuffer(memory, dtype=torch.bfloat16)[: math.prod(shape)].view(shape)

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Registered memory bf16 [L, R*M, H] for the experts' outputs, to be followed by combine(zero_copy=True).

        Valid until that combine ends. Raises heddle.Error with ESTALE for a used handle.
        """
        return self._combine_buffer(handle)[:, : self.group_size * handle.exchange.shape.max_tokens]


def _one_way(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError("async_finish and return_recv_hook exclude each other")


def _on(device: torch.device, tensor: torch.Tensor | None, what: str) -> None:
    if tensor is not None and tensor.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{what} is on {tensor.device}: Buffer takes CPU and CUDA tensors")
    if tensor is not None and tensor.device != device:
        raise TypeError(f"{what} is on {tensor.device}, the other tensors are on {device}")


def _nothing() -> None:
    """The hook of a call that has finished."""


def _once(work: Callable[[], None]) -> Callable[[], None]:
    """A hook that may be called again."""
    waiting = [work]

    def hook() -> None:
        while waiting:
            waiting.pop()()

    return hook
