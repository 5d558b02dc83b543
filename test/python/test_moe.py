# SPDX-License-Identifier: Apache-2.0
"""heddle.Moe: layouts, formats, phases, masks and mistakes, against rows and sums computed here."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import heddle
from heddle import DType, MoeFormat, MoeLayout, Status
from ranks import Tree, raises
from worlds import run, start

TOKENS, HIDDEN, TOP_K, EACH, MOST = 5, 12, 3, 3, 6


def tokens_of(rank: int, size: int, step: int = 0) -> tuple[Any, Any, Any]:
    made = np.random.default_rng([rank, size, step])
    x = made.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    ids = np.stack([made.permutation(EACH * size)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    ids[2, 1] = -1
    return x, ids, made.random((TOKENS, TOP_K), np.float32)


def pairs_of(rank: int, size: int, step: int = 0) -> list[list[tuple[int, int]]]:
    """(source, token) of each own expert, in order."""
    return [
        [(s, t) for s in range(size) for t in range(TOKENS) if e in tokens_of(s, size, step)[1][t]]
        for e in range(rank * EACH, (rank + 1) * EACH)
    ]


def expected_sums(rank: int, size: int, step: int = 0) -> Any:
    """Expert e multiplies by e + 1."""
    x, ids, weights = tokens_of(rank, size, step)
    return x * (np.where(ids >= 0, ids + 1, 0) * weights).sum(1, keepdims=True)


def check_layout(world: heddle.Group, layout: MoeLayout) -> None:
    rank, size = world.rank, world.size
    options = {"layout": layout, "dtype": DType.F32, "align": 4 if layout == MoeLayout.EXPERT_FLAT else 0}
    with heddle.Moe(world, EACH * size, TOP_K, HIDDEN, MOST, **options) as moe:
        assert moe.local_experts == EACH and moe.num_ranks == size
        for step_number in range(4):
            x, ids, weights = tokens_of(rank, size, step_number)
            pairs = pairs_of(rank, size, step_number)
            received = moe.new_received()
            step, status = moe.dispatch(x, ids if step_number % 2 else ids.astype(np.int64), received, weights)
            assert status == Status.OK and received.counts.tolist() == [len(p) for p in pairs]
            rows, scale = received.rows, np.arange(rank * EACH, (rank + 1) * EACH) + 1
            if layout == MoeLayout.EXPERT_3D:
                for e, expected in enumerate(pairs):
                    for place, (s, t) in enumerate(expected):
                        assert np.array_equal(rows[e, place], tokens_of(s, size, step_number)[0][t])
                        assert received.source_token[e, place] == t
                outputs = rows * scale[:, None, None].astype(np.float32)
            elif layout == MoeLayout.EXPERT_FLAT:
                outputs = rows.copy()
                for e, expected in enumerate(pairs):
                    begin = received.offsets[e]
                    assert begin % 4 == 0
                    for place, (s, t) in enumerate(expected):
                        assert np.array_equal(rows[begin + place], tokens_of(s, size, step_number)[0][t])
                    outputs[begin : begin + len(expected)] *= scale[e]
                assert received.offsets[-1] == received.num_rows
            elif layout == MoeLayout.RANK_MAJOR:
                n = received.num_rows
                local, w = received.local_ids[:n], received.weights[:n]
                outputs = rows.copy()
                outputs[:n] *= (np.where(local >= 0, local + rank * EACH + 1, 0) * w).sum(1, keepdims=True)
            else:
                n = received.num_pairs
                outputs = rows[received.row_numbers[:n]]
                for e in range(EACH):
                    outputs[received.offsets[e] : received.offsets[e + 1]] *= scale[e]
            out, missing = np.full((TOKENS, HIDDEN), 7, np.float32), np.ones(TOKENS, np.uint8)
            if received.num_pairs:
                with raises(ValueError, "too small"):
                    moe.combine(step, outputs[:0], out)
            if step_number < 2:
                assert moe.combine(step, outputs, out, missing=missing) == Status.OK
            else:
                bias = np.full((TOKENS, HIDDEN), 0.5, np.float32)
                moe.combine_send(step, outputs)
                moe.combine_recv(step, out, bias=[bias, bias], accumulate=True, missing=missing)
                out -= 8
            assert np.allclose(out, expected_sums(rank, size, step_number), rtol=1e-4, atol=1e-4)
            assert not missing.any()
        state = moe.status()
        assert state["steps"] == 4 and state["failed_steps"] == 0 and len(state["expert_rows"]) == EACH
        assert sum(state["expert_rows"]) > 0 and len(state["bytes_sent"]) == size


@pytest.mark.parametrize("layout", MoeLayout)
@pytest.mark.parametrize("size", [1, 3])
def test_layouts(layout: MoeLayout, size: int) -> None:
    run(size, check_layout, layout)


def formats(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    x, ids, weights = tokens_of(rank, size)
    half = x.astype(np.float16)
    moe = heddle.Moe(world, EACH * size, TOP_K, HIDDEN, MOST, dtype=DType.F16, format=MoeFormat.FP8)
    received = moe.new_received()
    assert received.rows.dtype == np.uint8 and received.scales.shape == (EACH, size * MOST, 1)
    step, _ = moe.dispatch(half, ids, received, weights)
    assert (received.scales[0, : received.counts[0]] > 0).all()
    buffer = np.frombuffer(moe.next_combine_buffer(step), np.float16)
    buffer[:] = 0
    out = np.ones((TOKENS, HIDDEN), np.float16)
    moe.combine(step, buffer, out)
    assert not out.any()
    late = heddle.Moe(world, EACH * size, TOP_K, HIDDEN, MOST, late_weights=True, format=MoeFormat.FP8_UE8M0)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, truncated
    received = late.new_received()
    assert received.scales.dtype == np.uint8
    step, _ = late.dispatch_send(bits, ids)
    late.dispatch_recv(step, received)
    out = np.ones((TOKENS, HIDDEN), np.uint16)
    late.combine(step, np.zeros((EACH, size * MOST, HIDDEN), np.uint16), out, weights=weights)
    assert not out.any()
    sizes = late.options.sizes(size)
    assert sizes == late.sizes and sizes.out_rows == EACH * size * MOST and sizes.row_elements == HIDDEN


def test_formats_and_late_weights() -> None:
    run(2, formats)


def mistakes(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    moe = heddle.Moe(world, EACH * size, TOP_K, HIDDEN, MOST, dtype=DType.F32)
    x, ids, weights = tokens_of(rank, size)
    received = moe.new_received()

    def good() -> None:
        step, _ = moe.dispatch(x, ids, received, weights)
        out = np.empty((TOKENS, HIDDEN), np.float32)
        moe.combine(step, received.rows * (np.arange(EACH) + rank * EACH + 1)[:, None, None].astype("f4"), out)
        assert np.allclose(out, expected_sums(rank, size), rtol=1e-4, atol=1e-4)
        with raises(heddle.Error, "ESTALE"):
            moe.combine(step, received.rows, out)

    maps: tuple[tuple[str, list[int] | None, list[int] | None], ...] = (
        ("1 entries", [EACH * size], list(range(EACH * size))),
        (f"{EACH * size - 1} entries", [EACH] * size, list(range(1, EACH * size))),
        ("without expert_counts", None, [0]),
        ("without expert_ids", [EACH] * size, None),
    )
    for text, per_rank, held in maps:
        if rank == 0:
            with raises(ValueError, text):
                moe.update(per_rank, held)
        else:
            with raises(heddle.Error, "rank 0"):
                moe.update()
    wrong_id = ids.copy()
    wrong_id[3, 0] = 99
    for kind, text, arguments in (
        (ValueError, "token 3", (x, wrong_id, received, weights)),
        (ValueError, "elements", (x[:2], ids, received, weights)),
        (TypeError, "F64", (x.astype(np.float64), ids, received, weights)),
        (TypeError, "int32 or int64", (x, ids.astype(np.int16), received, weights)),
        (ValueError, "[tokens, 3]", (x, ids[:, :2].copy(), received, weights)),
        (ValueError, "weights", (x, ids, received, weights[:1])),
        (ValueError, "rows of shape", (x, ids, heddle.Received(received.rows[:1]), weights)),
    ):
        if rank == 0:
            with raises(kind, text):  # type: ignore[arg-type]
                moe.dispatch(*arguments)
        else:
            with raises(heddle.Error, "EPEER", "rank 0"):
                moe.dispatch(x, ids, received, weights)
        good()
    step, _ = moe.dispatch(x, ids, received, weights)
    with raises(ValueError, "rows of shape"):
        moe.combine(step, received.rows[:, :1].copy(), np.empty((TOKENS, HIDDEN), np.float32))
    moe.combine(step, received.rows, np.empty((TOKENS, HIDDEN), np.float32))
    good()
    with raises(heddle.Error, "ECONFIG", "hidden"):
        heddle.Moe(world, EACH * size, TOP_K, HIDDEN + rank, MOST)
    with raises(ValueError, "EINVAL"):
        heddle.Moe(world, EACH * size + 1, TOP_K, HIDDEN, MOST)
    with raises(ValueError, "active"):
        moe.dispatch_recv(heddle.Step(0), received, active=np.ones(size + 1, np.int32))
    # Another map of experts: all on rank 1.
    counts = [0] * size
    counts[1] = EACH * size
    moe.update(counts, list(range(EACH * size)))
    assert moe.local_experts == counts[rank]
    received = moe.new_received()
    step, _ = moe.dispatch(x, ids, received, weights)
    if rank != 1:
        assert received.num_rows == 0
    out = np.empty((TOKENS, HIDDEN), np.float32)
    scale = np.arange(counts[rank]) + 1
    moe.combine(step, received.rows * scale[:, None, None].astype("f4"), out)
    assert np.allclose(out, expected_sums(rank, size), rtol=1e-4, atol=1e-4)
    world.barrier()
    moe.close()
    with raises(ValueError, "the exchange is closed"):
        moe.dispatch(x, ids, received, weights)


def test_mistakes_and_another_map() -> None:
    run(2, mistakes)


def loses_one(world: heddle.Group) -> None:
    rank, size = world.rank, world.size
    moe = heddle.Moe(world, EACH * size, TOP_K, HIDDEN, MOST, dtype=DType.F32)
    x, ids, weights = tokens_of(rank, size)
    received = moe.new_received()
    world.barrier()
    if rank == 1:
        os._exit(5)
    with raises(heddle.IncompleteError):
        moe.dispatch(x, ids, received, weights)
    active, missing = np.ones(size, np.int32), np.zeros(TOKENS, np.uint8)
    step, _ = moe.dispatch(x, ids, received, weights, active=active)
    assert active.tolist() == [1, 0, 1] and not (received.ranges[:, 1] & 0xFFFFFFFF).any()
    out = np.zeros((TOKENS, HIDDEN), np.float32)
    scale = (np.arange(EACH) + rank * EACH + 1)[:, None, None].astype("f4")
    assert moe.combine(step, received.rows * scale, out, missing=missing, active=active) == Status.INCOMPLETE
    assert missing.tolist() == [int(any(e // EACH == 1 for e in row if e >= 0)) for row in ids]
    assert np.allclose(out[missing == 0], expected_sums(rank, size)[missing == 0], rtol=1e-4, atol=1e-4)


def test_a_rank_is_lost() -> None:
    with Tree() as tree:
        pids = start(tree, 3, loses_one)
        for rank in (0, 2):
            tree.result(pids[rank])
