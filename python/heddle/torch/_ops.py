# SPDX-License-Identifier: Apache-2.0
"""What torch.compile needs: dispatch and combine as custom operators for its graphs, our own code left as it is."""

from __future__ import annotations

import ctypes
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from heddle._abi import DType, MoeFormat, MoeLayout
from heddle._moe import Moe, Received, Step

_exchanges: weakref.WeakValueDictionary[int, Moe] = weakref.WeakValueDictionary()
_DTYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}


def register_exchange(moe: Moe) -> int:
    """A number that names the exchange (layout EXPERT_3D) in calls of torch.ops.heddle; it lives as long as `moe`."""
    if moe.options.layout != MoeLayout.EXPERT_3D:
        raise ValueError(f"the operators take layout EXPERT_3D, the exchange has {moe.options.layout.name}")
    _exchanges[id(moe)] = moe
    return id(moe)


def _new(moe: Moe, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, scales, counts) like what dispatch delivers; scales are empty without FP8."""
    o, local = moe.options, moe.local_experts
    shape = (local, moe.num_sources * o.max_tokens)
    dtype = torch.float8_e4m3fn if o.format != MoeFormat.PLAIN else _DTYPES[o.dtype]
    groups = moe.sizes.scale_bytes if o.format == MoeFormat.FP8_UE8M0 else moe.sizes.scale_bytes // 4
    scale = torch.uint8 if o.format == MoeFormat.FP8_UE8M0 else torch.float32
    return (
        x.new_empty((*shape, o.hidden), dtype=dtype),
        x.new_empty((*shape, groups), dtype=scale),
        x.new_empty((local,), dtype=torch.int32),
    )


@torch.library.custom_op("heddle::dispatch", mutates_args=())
def dispatch(
    exchange: int, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows [L, R*M, H], scales, counts [L], step int64 [4] on the CPU) of heddle.Moe.dispatch."""
    moe = _exchanges[exchange]
    rows, scales, counts = _new(moe, x)
    received = Received(rows, scales=scales if scales.numel() else None, counts=counts)
    step, _ = moe.dispatch(x.contiguous(), topk_idx.contiguous(), received, topk_weights.contiguous())
    handle = torch.empty(4, dtype=torch.int64)
    ctypes.memmove(handle.data_ptr(), ctypes.byref(step.struct), 32)
    return rows, scales, counts, handle


@dispatch.register_fake
def _(
    exchange: int, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # A number that differs between layers is a symbol to the compiler; int() makes it compile each.
    return (*_new(_exchanges[int(exchange)], x), torch.empty(4, dtype=torch.int64))


@torch.library.custom_op("heddle::combine", mutates_args=())
def combine(exchange: int, step: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The sums [T, H] of heddle.Moe.combine, for the step that dispatch returned."""
    moe = _exchanges[exchange]
    opened = Step(num_tokens)
    ctypes.memmove(ctypes.byref(opened.struct), step.data_ptr(), 32)
    out = rows.new_empty((num_tokens, moe.options.hidden))
    moe.combine(opened, rows.contiguous(), out)
    return out


@combine.register_fake
def _(exchange: int, step: torch.Tensor, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return rows.new_empty((num_tokens, _exchanges[int(exchange)].options.hidden))


def _functions(owner: Any) -> Iterator[types.FunctionType]:
    for value in list(vars(owner).values()):
        found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        while isinstance(found, types.FunctionType):
            yield found
            found = getattr(found, "__wrapped__", None)
        if isinstance(value, type) and value.__module__ == getattr(owner, "__name__", None):
            yield from _functions(value)


def leave_alone() -> None:
    """Keeps torch.compile from compiling our functions when a compiled program calls them outside of its graphs."""
    # torch.compiler.disable would import the compiler, a second for every program.
    frames: Any = torch._C._dynamo.eval_frame
    skip: Any = getattr(frames, "skip_code", None)  # torch 2.6
    if skip is None and hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(action, action)
        skip = lambda code: frames.set_code_exec_strategy(code, strategy)  # noqa: E731

    for name, module in list(sys.modules.items()):
        for function in _functions(module) if skip and name.partition(".")[0] == "heddle" else ():
            skip(function.__code__)
