# SPDX-License-Identifier: Apache-2.0
"""Collectives and point to point on arrays."""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

from heddle import _abi
from heddle._abi import ANY_SOURCE, ANY_TAG, RedOp, lib
from heddle._data import Data, data_of, new_like
from heddle._error import Error
from heddle._object import Object, microseconds
from heddle._operation import Operation

_Sizes = ctypes.Array[ctypes.c_size_t]
_Method = TypeVar("_Method", bound=Callable[..., Any])
# What stands for an argument in a call that is to be refused.
_REFUSED: dict[Any, Any] = {ctypes.c_int: -1, _abi.Int32: 0, ctypes.c_size_t: 0}


def refuse(group: Object, function: Callable[..., int]) -> None:
    """Takes the number of a collective whose arguments are bad: the other ranks get EINVAL instead of waiting."""
    operation = ctypes.c_void_p()
    arguments = [_REFUSED.get(kind) for kind in function.argtypes[1:-1]]  # type: ignore[attr-defined]
    group.call(function, *arguments, operation)
    lib.hdl_op_free(operation)


def _numbered(even: Callable[..., int], uneven: Callable[..., int] | None = None) -> Callable[[_Method], _Method]:
    """A method that takes a number, also when Python refuses the arguments. `uneven`: what it calls with counts."""

    def decorate(method: _Method) -> _Method:
        place = list(inspect.signature(method).parameters).index("counts") - 1 if uneven else 0

        def has_counts(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
            return (arguments[place] if len(arguments) > place else named.get("counts")) is not None

        @functools.wraps(method)
        def call(self: Collectives, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception as failure:
                if not isinstance(failure, Error):
                    refuse(self, uneven if uneven and has_counts(arguments, named) else even)
                if isinstance(failure, ctypes.ArgumentError):
                    raise TypeError(f"{method.__name__}: {failure}") from None
                raise

        return cast(_Method, call)

    return decorate


def _redop(op: RedOp | str) -> RedOp:
    if not isinstance(op, str):
        return RedOp(op)
    if op.upper() not in RedOp.__members__:
        raise ValueError(f"operator {op!r} is none of {', '.join(RedOp.__members__)}")
    return RedOp[op.upper()]


def _sizes(values: Sequence[int]) -> _Sizes:
    for value in values:
        if value < 0:
            raise ValueError(f"a negative count in {list(values)}")
    return (ctypes.c_size_t * len(values))(*values)


def _packed(counts: Sequence[int]) -> list[int]:
    """Places of blocks that lie one after another."""
    return [0, *accumulate(counts)][: len(counts)]


def _room(data: Data, count: int, what: str) -> None:
    if data.count != count:
        raise ValueError(f"{what} has {data.count} elements, {count} are needed")


def _same_type(one: Data, other: Data) -> None:
    if one.dtype != other.dtype:
        raise TypeError(f"input is {one.dtype.name}, output is {other.dtype.name}")


def _target(x: Any, source: Data, out: Any, shape: tuple[int, ...], count: int) -> tuple[Any, Data]:
    """`out`, which must have `count` elements, or new memory of the shape."""
    result = new_like(x, shape) if out is None else out
    target = data_of(result, write=True)
    _same_type(source, target)
    _room(target, count, "out")
    return result, target


class Collectives(Object):
    """The data calls of a group.

    All ranks call the collectives of a group in the same order, with the same counts and types. Arrays are
    contiguous: numpy, torch on the CPU, or anything with the buffer protocol. Where `out` is None, reductions and
    broadcast are in place, the others return new memory of the kind of `x`.

    Each takes `timeout`, a deadline in seconds after which the group is aborted on this rank (the group's own by
    default), and `wait`: with False it returns a heddle.Operation at once. Raises IncompleteError when ranks were
    lost, InvalidError for a mismatched call (naming both calls), heddle.Error otherwise; see doc/guide.md.
    """

    @property
    def rank(self) -> int:
        """Own slot."""
        return int(self.call(lib.hdl_group_rank))

    @property
    def size(self) -> int:
        """Highest active slot + 1."""
        return int(self.call(lib.hdl_group_size))

    def _run(
        self,
        name: str,
        function: Callable[..., int],
        arguments: tuple[Any, ...],
        buffers: tuple[Any, ...],
        result: Any,
        timeout: float | None,
        wait: bool,
        scalar: float = 0.0,
    ) -> Any:
        call = None
        if timeout is not None or scalar:
            call = _abi.Call(timeout_us=microseconds(timeout), scalar=scalar)
        operation = Operation(self, name, result, buffers)  # type: ignore[arg-type]
        operation._start(function, *arguments, call)
        return operation.wait() if wait else operation

    def _counts(self, counts: Sequence[int], what: str = "counts") -> _Sizes:
        size = self.size
        if len(counts) != size:
            raise ValueError(f"{what} has {len(counts)} entries, the group has {size} ranks")
        return _sizes(counts)

    def _in_and_out(self, x: Any, out: Any) -> tuple[Data, Data]:
        """For calls whose output has the shape of their input, or is the input."""
        source = data_of(x, write=out is None)
        if out is None:
            return source, source
        target = data_of(out, write=True)
        _same_type(source, target)
        _room(target, source.count, "out")
        return source, target

    def barrier(self, timeout: float | None = None, wait: bool = True) -> Any:
        """Returns when all ranks have called it."""
        return self._run("barrier", lib.hdl_barrier, (), (), None, timeout, wait)

    @_numbered(lib.hdl_broadcast)
    def broadcast(self, x: Any, root: int = 0, timeout: float | None = None, wait: bool = True) -> Any:
        """x of the root is written to x of all others; returns x."""
        data = data_of(x, write=True)
        arguments = (data.address, data.address, data.count, data.dtype, root)
        return self._run("broadcast", lib.hdl_broadcast, arguments, (data,), x, timeout, wait)

    @_numbered(lib.hdl_reduce)
    def reduce(
        self,
        x: Any,
        op: RedOp | str = RedOp.SUM,
        root: int = 0,
        out: Any = None,
        timeout: float | None = None,
        wait: bool = True,
        scalar: float = 1.0,
    ) -> Any:
        """Reduces to the root: into `out`, else in place; elsewhere `out` is not written. `scalar`: see all_reduce."""
        source, target = self._in_and_out(x, out)
        arguments = (source.address, target.address, source.count, source.dtype, _redop(op), root)
        result = x if out is None else out
        return self._run("reduce", lib.hdl_reduce, arguments, (source, target), result, timeout, wait, scalar)

    @_numbered(lib.hdl_allreduce)
    def all_reduce(
        self,
        x: Any,
        op: RedOp | str = RedOp.SUM,
        out: Any = None,
        timeout: float | None = None,
        wait: bool = True,
        scalar: float = 1.0,
    ) -> Any:
        """Reduces over all ranks: into `out`, else in place. The same bytes on every rank.

        op: RedOp or its name. scalar: of PREMUL_SUM, this rank's factor.
        """
        source, target = self._in_and_out(x, out)
        arguments = (source.address, target.address, source.count, source.dtype, _redop(op))
        result = x if out is None else out
        return self._run("all_reduce", lib.hdl_allreduce, arguments, (source, target), result, timeout, wait, scalar)

    @_numbered(lib.hdl_allgather, lib.hdl_allgatherv)
    def all_gather(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """out [size, *x.shape]: block r is x of rank r.

        With counts [size]: rank r gives counts[r] elements, which land at displs[r] (one after another).
        """
        source = data_of(x)
        size = self.size
        if counts is None:
            result, target = _target(x, source, out, (size, *source.shape), size * source.count)
            arguments: tuple[Any, ...] = (source.address, target.address, source.count, source.dtype)
            function = lib.hdl_allgather
        else:
            displs = _packed(counts) if displs is None else displs
            result, target = self._uneven_target(x, source, out, counts, displs)
            arguments = (source.address, target.address, self._counts(counts), self._counts(displs, "displs"))
            arguments += (source.dtype,)
            function = lib.hdl_allgatherv
            _room(source, counts[self.rank], "x")
        return self._run("all_gather", function, arguments, (source, target), result, timeout, wait)

    def _uneven_target(
        self, x: Any, source: Data, out: Any, counts: Sequence[int], displs: Sequence[int]
    ) -> tuple[Any, Data]:
        """Output of blocks of `counts` at `displs`."""
        if len(displs) != len(counts):
            raise ValueError(f"counts has {len(counts)} entries, displs {len(displs)}")
        needed = max((d + c for d, c in zip(displs, counts, strict=True)), default=0)
        result = new_like(x, (needed,)) if out is None else out
        target = data_of(result, write=True)
        _same_type(source, target)
        if target.count < needed:
            raise ValueError(f"out has {target.count} elements, {needed} are needed")
        return result, target

    @_numbered(lib.hdl_reduce_scatter, lib.hdl_reduce_scatterv)
    def reduce_scatter(
        self,
        x: Any,
        op: RedOp | str = RedOp.SUM,
        out: Any = None,
        counts: Sequence[int] | None = None,
        timeout: float | None = None,
        wait: bool = True,
        scalar: float = 1.0,
    ) -> Any:
        """x [size, ...]: out gets the reduced block of the own rank. With counts [size]: x is blocks of counts[r]."""
        source = data_of(x)
        size = self.size
        if counts is None:
            if not source.shape or source.count % size:
                raise ValueError(f"x of shape {source.shape} is not {size} equal blocks")
            mine = source.count // size
            shape = source.shape[1:] if source.shape[0] == size else (mine,)
            arguments: tuple[Any, ...] = (mine,)
            function = lib.hdl_reduce_scatter
        else:
            arguments = (self._counts(counts),)
            _room(source, sum(counts), "x")
            mine = counts[self.rank]
            shape = (mine,)
            function = lib.hdl_reduce_scatterv
        result, target = _target(x, source, out, shape, mine)
        arguments = (source.address, target.address, *arguments, source.dtype, _redop(op))
        return self._run("reduce_scatter", function, arguments, (source, target), result, timeout, wait, scalar)

    @_numbered(lib.hdl_alltoall, lib.hdl_alltoallv)
    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        out_counts: Sequence[int] | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """x [size, ...]: block d goes to block s of `out` on rank d, s being the own rank.

        With counts and out_counts [size]: blocks of counts[d] elements one after another to each rank d, and of
        out_counts[s] from each rank s.
        """
        source = data_of(x)
        size = self.size
        if (counts is None) != (out_counts is None):
            raise ValueError("counts and out_counts go together")
        if counts is None or out_counts is None:
            if source.count % size:
                raise ValueError(f"x of {source.count} elements is not {size} equal blocks")
            result, target = _target(x, source, out, source.shape, source.count)
            arguments: tuple[Any, ...] = (source.address, target.address, source.count // size, source.dtype)
            function = lib.hdl_alltoall
        else:
            _room(source, sum(counts), "x")
            result, target = _target(x, source, out, (sum(out_counts),), sum(out_counts))
            arguments = (source.address, self._counts(counts), _sizes(_packed(counts)), target.address)
            arguments += (self._counts(out_counts, "out_counts"), _sizes(_packed(out_counts)), source.dtype)
            function = lib.hdl_alltoallv
        return self._run("all_to_all", function, arguments, (source, target), result, timeout, wait)

    @_numbered(lib.hdl_gather, lib.hdl_gatherv)
    def gather(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """On the root out [size, *x.shape], block r is x of rank r; None elsewhere. counts, displs: see all_gather."""
        source = data_of(x)
        size = self.size
        at_root = self.rank == root
        result, target = None, None
        if counts is not None:
            displs = _packed(counts) if displs is None else displs
        if at_root and counts is not None and displs is not None:
            result, target = self._uneven_target(x, source, out, counts, displs)
        elif at_root:
            result, target = _target(x, source, out, (size, *source.shape), size * source.count)
        address = None if target is None else target.address
        if counts is None or displs is None:
            arguments: tuple[Any, ...] = (source.address, address, source.count, source.dtype, root)
            function = lib.hdl_gather
        else:
            _room(source, counts[self.rank], "x")
            arguments = (source.address, address, self._counts(counts), self._counts(displs, "displs"))
            arguments += (source.dtype, root)
            function = lib.hdl_gatherv
        return self._run("gather", function, arguments, (source, target), result, timeout, wait)

    @_numbered(lib.hdl_scatter, lib.hdl_scatterv)
    def scatter(
        self,
        x: Any,
        out: Any,
        root: int = 0,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """x [size, *out.shape] on the root (elsewhere ignored, may be None): block r is written to out of rank r.

        With counts [size]: rank r gets counts[r] elements from displs[r] (one after another).
        """
        target = data_of(out, write=True)
        size = self.size
        source = data_of(x) if self.rank == root else None
        if source is not None:
            _same_type(source, target)
        address = None if source is None else source.address
        if counts is None:
            if source is not None:
                _room(source, size * target.count, "x")
            arguments: tuple[Any, ...] = (address, target.address, target.count, target.dtype, root)
            function = lib.hdl_scatter
        else:
            displs = _packed(counts) if displs is None else displs
            needed = max((d + c for d, c in zip(displs, counts, strict=True)), default=0)
            if source is not None and source.count < needed:
                raise ValueError(f"x has {source.count} elements, {needed} are needed")
            _room(target, counts[self.rank], "out")
            arguments = (address, self._counts(counts), self._counts(displs, "displs"), target.address)
            arguments += (target.dtype, root)
            function = lib.hdl_scatterv
        return self._run("scatter", function, arguments, (source, target), out, timeout, wait)

    def send(self, x: Any, peer: int, tag: int = 0, timeout: float | None = None, wait: bool = True) -> Any:
        """Sends x; ordered per peer and tag. Raises heddle.Error with EPEER if the peer is lost."""
        data = data_of(x)
        arguments = (data.address, data.count, data.dtype, peer, tag)
        return self._run("send", lib.hdl_send, arguments, (data,), None, timeout, wait)

    def recv(
        self,
        out: Any,
        peer: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Receives into `out` and returns it; Operation.source says from whom. EINVAL if the lengths differ."""
        data = data_of(out, write=True)
        arguments = (data.address, data.count, data.dtype, peer, tag)
        return self._run("recv", lib.hdl_recv, arguments, (data,), out, timeout, wait)
