# SPDX-License-Identifier: Apache-2.0
"""torch's calls become operations of a heddle group.

torch calls the methods below by name, from Python and (some of them) from C++. A call checks its tensors, packs those
that are not contiguous, and starts one operation; a call that is refused here still takes its operation number, so
that the ranks stay in step. A call that torch waits for at once (asyncOp false) runs inside the C library without a
handle.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.autograd.profiler as _profiler
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from heddle import _abi, _error
from heddle._abi import ANY_SOURCE, DType, lib
from heddle._data import NAMES
from heddle.torch._work import Completer, Finished, Future, Many, Pending, Work, complete, micros

_DTYPES = {getattr(torch, name): int(code) for name, code in NAMES.items()}
_U8 = int(DType.U8)
_SUM = dist.ReduceOp.SUM
_PREMUL_SUM = int(_abi.RedOp.PREMUL_SUM)
_AllreduceOptions = c10d.AllreduceOptions
_SAYS_ASYNC = hasattr(c10d.AllreduceOptions(), "asyncOp")
_UNSET = datetime.timedelta(milliseconds=-1)
# Signatures differ among versions of torch.
_Base: Any = dist.ProcessGroup
_F = TypeVar("_F", bound=Callable[..., Any])


def _is_async(opts: Any) -> bool:
    """Options of older versions of torch do not say it."""
    return getattr(opts, "asyncOp", True)


def _refusable(method: _F) -> _F:
    """A collective whose arguments are refused here takes its number: the others get an error, not a hang."""

    @functools.wraps(method)
    def call(self: Calls, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except _error.Error:
            raise
        except Exception:
            self._refuse(1)
            raise

    return call  # type: ignore[return-value]


def _options(kind: Any, opts: Any, **fields: Any) -> Any:
    """Options as torch makes them, from what a direct caller gave: nothing, an operator, or a root."""
    if type(opts) is kind:
        return opts
    made = kind()
    if isinstance(opts, int) and hasattr(made, "rootRank"):
        made.rootRank = opts
    elif opts is not None:
        made.reduceOp = opts
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _tensors(given: Any) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.is_cpu and tensor.layout is torch.strided:
        return
    if tensor.is_cuda:
        raise NotImplementedError("CUDA tensors are not supported by this version of heddle: give CPU tensors")
    raise ValueError(f"expected a dense CPU tensor, got one of device {tensor.device}, {tensor.layout}")


class _Memory:
    """The tensors of one call: packed where they are not contiguous, and copied back when it is finished."""

    __slots__ = ("code", "copies", "keep", "known", "unit")

    def __init__(self, like: torch.Tensor) -> None:
        code = _DTYPES.get(like.dtype)
        # Types that the library does not know can be moved as bytes.
        self.known = code is not None
        self.unit = 1 if code is not None else like.element_size()
        self.code = _U8 if code is None else code
        self.keep: list[Any] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        _check_device(tensor)
        packed = tensor.resolve_conj().contiguous() if tensor.is_complex() else tensor.contiguous()
        self.keep.append(packed)
        return packed

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        packed = self.source(tensor)
        if packed.data_ptr() != tensor.data_ptr():
            self.copies.append((tensor.detach(), packed))
        return packed

    def after(self, _work: Work | None = None) -> None:
        for tensor, packed in self.copies:
            tensor.copy_(packed)


def _same(tensors: Iterable[torch.Tensor], dtype: torch.dtype, what: str) -> None:
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"{what} have types {dtype} and {tensor.dtype}: expected one")


class Calls(_Base):  # type: ignore[misc]
    """The half of ProcessGroup that torch moves data with."""

    capacity: int
    alone: bool
    _rank: int
    _handle: ctypes.c_void_p | None

    def __init__(self, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._coalescing: list[Work] | None = None
        self._completer: Completer | None = None
        self._prune_at = 64
        self._lagging = False  # a change of members takes effect at a later operation
        self.pending: dict[Pending, None] = {}
        self._done = Finished(self, "done", [])  # stands for every call that went well while torch waited
        self._set_default_timeout(timeout)

    def _refuse(self, count: int) -> None:
        for _ in range(0 if self._over else count):
            op = ctypes.c_void_p()
            if lib.hdl_broadcast(self._alive(), None, None, 0, -1, 0, None, op) == 0:
                lib.hdl_op_free(op)

    def _call_for(self, opts: Any) -> _abi.Call:
        timeout = opts.timeout
        return self._call if timeout == _UNSET else _abi.Call(timeout_us=max(0, micros(timeout)))

    def _reduction(self, opts: Any, memory: _Memory | None) -> tuple[int, _abi.Call]:
        """Operator and call options."""
        if memory is not None and not memory.known:
            raise TypeError("tensors of this type can be moved, not reduced")
        op = opts.reduceOp
        call = self._call_for(opts)
        if op == _SUM:
            return 0, call
        code = op.op.value
        if code == _PREMUL_SUM:
            call = _abi.Call(timeout_us=call.timeout_us, scalar=float(op.__getstate__()[1]))
        return code, call

    def _issue(
        self,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        call: _abi.Call,
        wait: bool,
        outputs: list[torch.Tensor],
        memory: _Memory | None,
        after: Callable[[Work], None] | None = None,
        in_order: bool = True,
    ) -> Work:
        """One operation; `memory` and `after` as in Pending."""
        if _profiler._is_profiler_enabled and name[:8] != "heddle::":
            with _profiler.record_function(f"heddle::{name}"):
                return self._issue(f"heddle::{name}", function, args, call, wait, outputs, memory, after, in_order)
        if after is None and memory is not None and memory.copies:
            after = memory.after
        handle = self._handle or self._alive()
        if wait and self._coalescing is None:
            status = function(handle, *args, call, None)
            if self._lagging:
                self.refresh()
            if status == 0 and after is None:
                return self._done
            return Finished(self, name, outputs, status, after)
        op = ctypes.c_void_p()
        status = function(handle, *args, call, op)
        if self._lagging:
            self.refresh()
        if status != 0:
            raise _error.last(status)
        pending = Pending(self, name, op, outputs, (args, memory), after, in_order)
        self.pending[pending] = None
        if len(self.pending) >= self._prune_at:
            self._prune()
        if self._coalescing is not None:
            self._coalescing.append(pending)
        return pending

    def _prune(self) -> None:
        """Works that nobody waits for end here; their tensors were kept until now."""
        for work in list(self.pending):
            work.is_completed()
        self._prune_at = 2 * len(self.pending) + 64

    def complete_later(self, work: Work, source: Future, in_order: bool) -> None:
        """Completes a future when the work is finished. A send or receive may take for ever: a thread of its own.

        So does what a future's callback starts, which may wait for it there.
        """
        if not in_order or (self._completer is not None and self._completer.is_current()):
            threading.Thread(target=complete, args=(work, source), name="heddle-future", daemon=True).start()
            return
        if self._completer is None:
            self._completer = Completer("heddle-futures")
        self._completer.put(work, source)

    def _many(self, name: str, count: int, start: Callable[[int], Work]) -> Work:
        """`count` operations under one handle; if one is refused, so are those that have not begun."""
        works: list[Work] = []
        for i in range(count):
            try:
                works.append(start(i))
            except _error.Error:
                raise
            except Exception:
                self._refuse(count - i)
                raise
        return Many(self, name, works)

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """In place. tensors: a list of one tensor."""
        if type(opts) is not _AllreduceOptions:
            opts = _options(_AllreduceOptions, opts)
            tensors = _tensors(tensors)
        memory = None
        try:
            (tensor,) = tensors
            code = _DTYPES.get(tensor.dtype)
            if tensor.is_cpu and code is not None and tensor.is_contiguous():
                data, count = tensor.data_ptr(), tensor.numel()
            else:
                memory = _Memory(tensor)
                packed = memory.target(tensor)
                data, count, code = packed.data_ptr(), packed.numel(), memory.code
            redop, call = self._reduction(opts, memory)
        except _error.Error:
            raise
        except Exception:
            self._refuse(1)
            raise
        wait = _SAYS_ASYNC and not opts.asyncOp
        if wait and memory is None and self._coalescing is None and not _profiler._is_profiler_enabled:
            status = lib.hdl_allreduce(self._handle or self._alive(), data, data, count, code, redop, call, None)
            if self._lagging:
                self.refresh()
            return self._done if status == 0 else Finished(self, "all_reduce", tensors, status)
        # The tensor itself is kept by the list of outputs.
        args = (data, data, count, code, redop)
        return self._issue("all_reduce", lib.hdl_allreduce, args, call, wait, tensors, memory)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        tensors = _tensors(tensors)
        given = _options(c10d.AllreduceCoalescedOptions, opts)
        single = c10d.AllreduceOptions()
        single.reduceOp, single.timeout = given.reduceOp, given.timeout
        return self._many("all_reduce_coalesced", len(tensors), lambda i: self._reduce_one(tensors[i], single))

    def _reduce_one(self, tensor: torch.Tensor, opts: Any) -> Work:
        memory = _Memory(tensor)
        packed = memory.target(tensor)
        redop, call = self._reduction(opts, memory)
        args = (packed.data_ptr(), packed.data_ptr(), packed.numel(), memory.code, redop)
        return self._issue("all_reduce", lib.hdl_allreduce, args, call, False, [tensor], memory)

    @_refusable
    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Work:
        tensors = _tensors(tensors)
        opts = _options(c10d.ReduceOptions, opts, **({} if op is None else {"reduceOp": op}))
        (tensor,) = tensors
        memory = _Memory(tensor)
        root = opts.rootRank
        packed = memory.target(tensor) if root == self._rank else memory.source(tensor)
        redop, call = self._reduction(opts, memory)
        data = packed.data_ptr()
        args = (data, data if root == self._rank else None, packed.numel(), memory.code, redop, root)
        return self._issue("reduce", lib.hdl_reduce, args, call, not _is_async(opts), tensors, memory)

    @_refusable
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter(output, input, _options(c10d.ReduceScatterOptions, opts))

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, opts: Any, wait: bool | None = None) -> Work:
        memory = _Memory(output)
        _same([input], output.dtype, "input and output of reduce_scatter_tensor")
        to, out = memory.source(input), memory.target(output)
        redop, call = self._reduction(opts, memory)
        count, size = out.numel(), self.size()
        blocks = to.numel() // count if count else size
        if blocks * count != to.numel() or blocks > self.capacity or blocks <= self._rank:
            raise ValueError(
                f"reduce_scatter_tensor: input of {to.numel()} elements, output of {count}: "
                f"expected {size} blocks of {count}"
            )
        wait = not _is_async(opts) if wait is None else wait
        if blocks == size == self.capacity:
            args: tuple[Any, ...] = (to.data_ptr(), out.data_ptr(), count, memory.code, redop)
            return self._issue("reduce_scatter", lib.hdl_reduce_scatter, args, call, wait, [output], memory)
        # The group may grow meanwhile, or has shrunk: the library must not read behind the input.
        counts = self._array(*itertools.repeat(count, blocks))
        args = (to.data_ptr(), out.data_ptr(), counts, memory.code, redop)
        check = functools.partial(self._check_fits, "reduce_scatter_tensor", blocks, self._next(), memory)
        return self._issue("reduce_scatter", lib.hdl_reduce_scatterv, args, call, wait, [output], memory, check)

    @_refusable
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        outputs = _tensors(outputs)
        opts = _options(c10d.ReduceScatterOptions, opts)
        (output,) = outputs
        blocks = inputs if isinstance(inputs[0], torch.Tensor) else inputs[0]
        self._check_length(blocks, "reduce_scatter", "input")
        _same(blocks, output.dtype, "input and output of reduce_scatter")
        if blocks[self._rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: output of {output.numel()} elements, own input of {blocks[self._rank].numel()}"
            )
        memory = _Memory(output)
        out = memory.target(output)
        redop, call = self._reduction(opts, memory)
        for block in blocks:
            _check_device(block)
        to = memory.source(torch.cat([block.detach().reshape(-1) for block in blocks]))
        counts = self._array(*(block.numel() for block in blocks))
        args = (to.data_ptr(), out.data_ptr(), counts, memory.code, redop)
        return self._issue("reduce_scatter", lib.hdl_reduce_scatterv, args, call, not _is_async(opts), outputs, memory)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(c10d.ReduceScatterOptions, opts)
        return self._many(
            "reduce_scatter_coalesced",
            len(outputs),
            lambda i: self._reduce_scatter(outputs[i], inputs[i], opts, wait=False),
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------- movement

    @_refusable
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensors = _tensors(tensors)
        opts = _options(c10d.BroadcastOptions, opts)
        (tensor,) = tensors
        memory = _Memory(tensor)
        packed = memory.target(tensor)
        data = packed.data_ptr()
        args = (data, data, packed.numel() * memory.unit, memory.code, opts.rootRank)
        return self._issue(
            "broadcast", lib.hdl_broadcast, args, self._call_for(opts), not _is_async(opts), tensors, memory
        )

    @_refusable
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        opts = _options(c10d.AllgatherOptions, opts)
        return self._all_gather(output, input, opts, not _is_async(opts))

    _allgather_base = all_gather_single

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any, wait: bool) -> Work:
        memory = _Memory(input)
        _same([output], input.dtype, "input and output of all_gather_into_tensor")
        to, out = memory.source(input), memory.target(output)
        count, size = to.numel(), self.size()
        slots = out.numel() // count if count else size
        if slots * count != out.numel() or slots > self.capacity:
            raise ValueError(
                f"all_gather_into_tensor: output of {out.numel()} elements, input of {count}: "
                f"expected {size} times as many"
            )
        call, units = self._call_for(opts), count * memory.unit
        if slots == self.capacity:
            args = (to.data_ptr(), out.data_ptr(), units, memory.code)
            return self._issue("all_gather", lib.hdl_allgather, args, call, wait, [output], memory)
        # Not every slot fits. The library writes all that are active, so it gets other memory.
        room = torch.empty(self.capacity * count, dtype=out.dtype)
        memory.keep.append(room)
        args = (to.data_ptr(), room.data_ptr(), units, memory.code)
        after = functools.partial(self._take_slots, room, out.view(-1), count, slots, self._next(), memory)
        return self._issue("all_gather", lib.hdl_allgather, args, call, wait, [output], memory, after)

    def _take_slots(
        self, room: torch.Tensor, out: torch.Tensor, count: int, slots: int, number: int, memory: _Memory, work: Work
    ) -> None:
        """Active slots that fit are written, the others stay; one that is active and does not fit is an error."""
        for slot in self._took_part(number, work):
            if slot < slots:
                out[slot * count : (slot + 1) * count] = room[slot * count : (slot + 1) * count]
        memory.after()
        self._check_fits("all_gather_into_tensor", slots, number, None, work)

    def _check_fits(self, name: str, slots: int, number: int, memory: _Memory | None, work: Work) -> None:
        if memory is not None:
            memory.after()
        left_out = [slot for slot in self._took_part(number, work) if slot >= slots]
        if left_out:
            raise ValueError(f"{name}: room for {slots} ranks, but ranks {left_out} are active: expected {self.size()}")

    def _next(self) -> int:
        return int(lib.hdl_group_next(self._alive()))

    def _took_part(self, number: int, work: Work) -> list[int]:
        """Ranks whose data an operation has."""
        if self.alone:
            return [self._rank]
        ranks = []
        member = _abi.Member()
        for rank in range(self.capacity):
            if rank in work.failed or lib.hdl_group_member(self._alive(), rank, member) != 0:
                continue
            if member.rank_epoch and member.first <= number <= member.last:
                ranks.append(rank)
        return ranks

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(c10d.AllgatherOptions, opts)
        return self._many(
            "all_gather_coalesced", len(outputs), lambda i: self._all_gather(outputs[i], inputs[i], opts, False)
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_refusable
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(c10d.AllgatherOptions, opts)
        return self._all_gather_list(outputs, inputs, opts, not _is_async(opts))

    def _all_gather_list(self, outputs: Any, inputs: Any, opts: Any, wait: bool) -> Work:
        inputs = _tensors(inputs)
        (input,) = inputs
        slots = outputs if isinstance(outputs[0], torch.Tensor) else outputs[0]
        self._check_length(slots, "all_gather", "output")
        _same(slots, input.dtype, "input and outputs of all_gather")
        if slots[self._rank].numel() != input.numel():
            raise ValueError(
                f"all_gather: input of {input.numel()} elements, own output of {slots[self._rank].numel()}"
            )
        memory = _Memory(input)
        to = memory.source(input)
        base, counts, displs = self._places(memory, [memory.target(slot) for slot in slots])
        args = (to.data_ptr(), base, counts, displs, memory.code)
        return self._issue("all_gather", lib.hdl_allgatherv, args, self._call_for(opts), wait, list(slots), memory)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(c10d.AllgatherOptions, opts)
        lists = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
        return self._many(
            "all_gather_coalesced", len(inputs), lambda i: self._all_gather_list(lists[i], inputs[i], opts, False)
        )

    def _check_length(self, tensors: Any, name: str, what: str) -> None:
        if len(tensors) not in (self.size(), self.capacity):
            raise ValueError(f"{name}: {what} list of {len(tensors)} tensors, expected {self.size()}")

    def _places(self, memory: _Memory, tensors: list[torch.Tensor]) -> tuple[int | None, Any, Any]:
        """Base address, counts and distances of blocks that lie anywhere; memory.code may become bytes."""
        places = [tensor.data_ptr() if tensor.numel() else 0 for tensor in tensors]
        base = min((place for place in places if place), default=0)
        width = tensors[0].element_size() // memory.unit
        if any(place and (place - base) % width for place in places):
            raise ValueError(f"tensors of {tensors[0].dtype} lie at addresses that are not aligned to {width} bytes")
        counts = self._array(*(tensor.numel() * memory.unit for tensor in tensors))
        displs = self._array(*((place - base) // width if place else 0 for place in places))
        return base or None, counts, displs

    @_refusable
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        opts = _options(c10d.AllToAllOptions, opts)
        memory = _Memory(input)
        _same([output], input.dtype, "input and output of all_to_all_single")
        to, out = memory.source(input), memory.target(output)
        src = self._splits(to, input_split_sizes, "input", memory.unit)
        dst = self._splits(out, output_split_sizes, "output", memory.unit)
        args = (to.data_ptr(), *src, out.data_ptr(), *dst, memory.code)
        return self._issue(
            "all_to_all", lib.hdl_alltoallv, args, self._call_for(opts), not _is_async(opts), [output], memory
        )

    alltoall_base = all_to_all_single

    def _splits(self, tensor: torch.Tensor, splits: list[int], what: str, unit: int) -> tuple[Any, Any]:
        """Counts and distances. Splits count along the first dimension; without them it is divided evenly."""
        size = self.size()
        rows = tensor.size(0) if tensor.dim() else tensor.numel()
        if not splits:
            if rows % size:
                raise ValueError(f"all_to_all_single: {what} of {rows} rows cannot be divided among {size} ranks")
            splits = [rows // size] * size
        elif len(splits) not in (size, self.capacity) or sum(splits) != rows or min(splits) < 0:
            raise ValueError(f"all_to_all_single: {what} splits {splits}, expected {size} with the sum {rows}")
        width = (tensor.numel() // rows if rows else 0) * unit
        counts = [rows * width for rows in splits]
        return self._array(*counts), self._array(*itertools.accumulate(counts[:-1], initial=0))

    @_refusable
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(c10d.AllToAllOptions, opts)
        self._check_length(outputs, "all_to_all", "output")
        self._check_length(inputs, "all_to_all", "input")
        memory = _Memory(inputs[0])
        _same([*inputs, *outputs], inputs[0].dtype, "tensors of all_to_all")
        to = [memory.source(tensor) for tensor in inputs]
        out = [memory.target(tensor) for tensor in outputs]
        args = (*self._places(memory, to), *self._places(memory, out), memory.code)
        return self._issue(
            "all_to_all", lib.hdl_alltoallv, args, self._call_for(opts), not _is_async(opts), list(outputs), memory
        )

    @_refusable
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(c10d.GatherOptions, opts)
        (input,) = _tensors(inputs)
        memory = _Memory(input)
        to = memory.source(input)
        slots: list[torch.Tensor] = []
        base, displs = None, None
        counts = self._array(*itertools.repeat(to.numel() * memory.unit, self.size()))
        if opts.rootRank == self._rank:
            slots = list(outputs if outputs and isinstance(outputs[0], torch.Tensor) else outputs[0])
            self._check_length(slots, "gather", "output")
            _same(slots, input.dtype, "input and outputs of gather")
            self._check_counts(slots, to.numel(), "gather")
            base, counts, displs = self._places(memory, [memory.target(slot) for slot in slots])
        args = (to.data_ptr(), base, counts, displs, memory.code, opts.rootRank)
        return self._issue("gather", lib.hdl_gatherv, args, self._call_for(opts), not _is_async(opts), slots, memory)

    @_refusable
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = _options(c10d.ScatterOptions, opts)
        outputs = _tensors(outputs)
        (output,) = outputs
        memory = _Memory(output)
        out = memory.target(output)
        base, displs = None, None
        counts = self._array(*itertools.repeat(out.numel() * memory.unit, self.size()))
        if opts.rootRank == self._rank:
            slots = list(inputs if inputs and isinstance(inputs[0], torch.Tensor) else inputs[0])
            self._check_length(slots, "scatter", "input")
            _same(slots, output.dtype, "output and inputs of scatter")
            self._check_counts(slots, out.numel(), "scatter")
            base, counts, displs = self._places(memory, [memory.source(slot) for slot in slots])
        args = (base, counts, displs, out.data_ptr(), memory.code, opts.rootRank)
        return self._issue(
            "scatter", lib.hdl_scatterv, args, self._call_for(opts), not _is_async(opts), outputs, memory
        )

    @staticmethod
    def _check_counts(tensors: list[torch.Tensor], count: int, name: str) -> None:
        for rank, tensor in enumerate(tensors):
            if tensor.numel() != count:
                raise ValueError(f"{name}: tensor of rank {rank} has {tensor.numel()} elements, expected {count}")

    def barrier(self, opts: Any = None, **_: Any) -> Work:
        opts = _options(c10d.BarrierOptions, opts)
        return self._issue("barrier", lib.hdl_barrier, (), self._call_for(opts), not _is_async(opts), [], None)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that raises after `timeout`, naming the ranks that did not come; the group is over then."""
        call = self._call if timeout is None else _abi.Call(timeout_us=max(1, micros(timeout)))
        self._issue("monitored_barrier", lib.hdl_barrier, (), call, True, [], None).wait()

    # ------------------------------------------------------------ point to point

    def _message(self, tensors: Any, receive: bool) -> tuple[_Memory, torch.Tensor, list[torch.Tensor]]:
        tensors = _tensors(tensors)
        (tensor,) = tensors
        memory = _Memory(tensor)
        return memory, memory.target(tensor) if receive else memory.source(tensor), tensors

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        memory, packed, tensors = self._message(tensors, False)
        args = (packed.data_ptr(), packed.numel() * memory.unit, memory.code, dst, tag)
        return self._issue("send", lib.hdl_send, args, self._call, False, tensors, memory, in_order=False)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        memory, packed, tensors = self._message(tensors, True)
        args = (packed.data_ptr(), packed.numel() * memory.unit, memory.code, src, tag)
        return self._issue("recv", lib.hdl_recv, args, self._call, False, tensors, memory, in_order=False)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self.recv(tensors, ANY_SOURCE, tag)

    # ----------------------------------------------------------------- coalescing

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        works, self._coalescing = self._coalescing or [], None
        return Many(self, "coalesced", works)
