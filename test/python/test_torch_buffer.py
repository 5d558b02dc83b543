# SPDX-License-Identifier: Apache-2.0
"""Buffer on CPU tensors: every outcome of its functions, against sums computed here."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import heddle
from mooncake import ep, pg
from mooncake.mooncake_ep_buffer import Buffer, EventOverlap
from ranks import Tree, join, raises, run, until

MAX_TOKENS, HIDDEN, TOP_K, EACH = 6, 160, 3, 4


def tokens_of(rank: int, size: int, experts: int, count: int = 5, step: int = 0) -> tuple[Any, Any, Any]:
    """x, topk_idx, topk_weights of a rank; the same on whoever computes them."""
    made = torch.Generator().manual_seed(1000 * step + 10 * size + rank)
    x = torch.randn(count, HIDDEN, generator=made).to(torch.bfloat16)
    idx = torch.stack([torch.randperm(experts, generator=made)[:TOP_K] for _ in range(count)])
    idx[count // 2, 1] = -1
    return x, idx, torch.rand(count, TOP_K, generator=made)


def dequantised(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out.float()
    rows, scales = out
    return rows.float() * scales.repeat_interleave(128, dim=-1)[..., : rows.size(-1)]


def check_received(out: Any, count: Any, handle: Any, rank: int, size: int, experts: int, step: int, fp8: bool) -> None:
    """Rows are those of all sources in order, experts packed at the front."""
    local = experts // size
    rows = dequantised(out)
    assert rows.shape == (local, size * MAX_TOKENS, HIDDEN)
    for e in range(local):
        place = 0
        for source in range(size):
            x, idx, _ = tokens_of(source, size, experts, step=step)
            begin = place
            for token in range(x.size(0)):
                if rank * local + e in idx[token].tolist():
                    assert int(handle[0][e, place]) == token
                    close = torch.allclose(rows[e, place], x[token].float(), rtol=0.07 if fp8 else 0, atol=1e-2)
                    assert close if fp8 else torch.equal(rows[e, place], x[token].float())
                    place += 1
            assert int(handle[1][e, source]) == begin << 32 | place - begin
        assert int(count[e]) == place
    assert handle[2:] == (MAX_TOKENS, HIDDEN, experts)


def expected_sum(rank: int, size: int, experts: int, step: int = 0, without: int = -1) -> torch.Tensor:
    """Expert e multiplies by e + 1."""
    x, idx, weights = tokens_of(rank, size, experts, step=step)
    factors = torch.zeros(x.size(0))
    for token in range(x.size(0)):
        for j in range(TOP_K):
            e = int(idx[token, j])
            if e >= 0 and e // (experts // size) != without:
                factors[token] += weights[token, j] * (e + 1)
    return x.float() * factors[:, None]


def experts_on(out: Any, rank: int, size: int, experts: int) -> torch.Tensor:
    local = experts // size
    scale = torch.arange(rank * local, (rank + 1) * local) + 1
    return (dequantised(out) * scale[:, None, None]).to(torch.bfloat16)


def check_sum(result: torch.Tensor, expected: torch.Tensor, fp8: bool) -> None:
    assert torch.allclose(result.float(), expected, rtol=0.1 if fp8 else 0.03, atol=0.5 if fp8 else 0.1)


def one_step(
    buffer: Buffer,
    rank: int,
    size: int,
    step: int,
    fp8: bool = False,
    hook: bool = False,
    early: bool = False,
    **how: Any,
) -> torch.Tensor:
    experts = how.get("experts", EACH * size)
    x, idx, weights = tokens_of(rank, size, experts, step=step)
    active = torch.ones(size, dtype=torch.int32)
    out, count, handle, event, recv = buffer.dispatch(
        x, idx, active, MAX_TOKENS, experts, -1, use_fp8=fp8, return_recv_hook=hook,
        topk_weights=weights if early else None, async_finish=how.get("async_finish", False),
    )  # fmt: skip
    assert isinstance(event, EventOverlap)
    if hook:
        recv()
    event.current_stream_wait()
    check_received(out, count, handle, rank, size, experts, step, fp8)
    y = experts_on(out, rank, size, experts)
    if how.get("zero_copy"):
        memory = buffer.get_next_combine_buffer(handle)
        assert memory.shape == y.shape and memory.dtype == torch.bfloat16
        memory.copy_(y)
        y = torch.full_like(y, float("nan"))  # it is not read
    combined, event, recv = buffer.combine(
        y, idx, weights, active, -1, handle, zero_copy=how.get("zero_copy", False), return_recv_hook=hook,
        out=how.get("out"), async_finish=how.get("async_finish", False),
    )  # fmt: skip
    if hook:
        recv()
        recv()  # harmless
    with event:
        pass
    check_sum(combined, expected_sum(rank, size, experts, step), fp8)
    assert active.tolist() == [1] * size and not handle.missing.any()
    if how.get("out") is not None:
        assert combined is how["out"]
    with raises(heddle.Error, "ESTALE"):
        buffer.combine(y, idx, weights, active, -1, handle)
    return combined


def every_way(rank: int, size: int) -> None:
    buffer = Buffer(dist.group.WORLD)
    assert (buffer.rank, buffer.group_size, buffer.num_ep_buffer_bytes) == (rank, size, 0)
    assert buffer.group is dist.group.WORLD and buffer.backend == dist.get_backend()
    buffer._use_fallback = True
    assert buffer._use_fallback is True
    buffer.connect()
    step = 0
    same: list[torch.Tensor] = []
    for fp8 in (False, True):
        for hook in (False, True):
            for early in (False, True):
                one_step(buffer, rank, size, step, fp8, hook, early)
                step += 1
        one_step(buffer, rank, size, step, fp8, zero_copy=True)
        one_step(buffer, rank, size, step + 1, fp8, out=torch.empty(5, HIDDEN, dtype=torch.bfloat16))
        one_step(buffer, rank, size, step + 2, fp8, out=torch.empty(HIDDEN, 5, dtype=torch.bfloat16).t())
        one_step(buffer, rank, size, step + 3, fp8, async_finish=True)
        step += 4
    for _ in range(2):
        same.append(one_step(buffer, rank, size, 77))
    assert torch.equal(*same)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_way_of_a_step(size: int) -> None:
    run(size, every_way)


def over_gloo(port: int, rank: int, size: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    whole = Buffer(dist.group.WORLD)
    pair = dist.new_group([0, 2])
    for step in range(3):
        one_step(whole, rank, size, step, hook=step == 1)
    if rank != 1:
        part = Buffer(pair, disable_p2p=True)
        one_step(part, dist.get_rank(pair), 2, 9)
        part.close()
    whole.close()
    dist.barrier()
    dist.destroy_process_group()


def test_over_gloo_and_its_subgroup() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", over_gloo, tree.port, rank, 3) for rank in range(3)]:
            tree.result(pid)


def nothing_and_much(rank: int, size: int) -> None:
    """Ranks without tokens take part; other shapes get another exchange; int32 ids are the same."""
    buffer = Buffer(dist.group.WORLD)
    experts = EACH * size
    x, idx, weights = tokens_of(rank, size, experts)
    if rank == 0:
        x, idx, weights = x[:0], idx[:0], weights[:0]
    out, _, handle, _, _ = buffer.dispatch(x, idx.int(), None, MAX_TOKENS, experts, -1, use_fp8=False)
    y = experts_on(out, rank, size, experts)
    combined, _, _ = buffer.combine(y, idx, weights, None, -1, handle)
    assert combined.shape == (0 if rank == 0 else 5, HIDDEN)
    if rank:
        check_sum(combined, expected_sum(rank, size, experts), False)
    for max_tokens, hidden in ((8, 16), (6, 32), (8, 16)):
        x = torch.ones(4, hidden, dtype=torch.bfloat16)
        ids = torch.full((4, 1), rank, dtype=torch.int64)
        out, count, handle, _, _ = buffer.dispatch(x, ids, None, max_tokens, size, -1)
        assert count.tolist() == [4] and out[0].shape == (1, size * max_tokens, hidden)
        buffer.combine(
            torch.zeros(1, size * max_tokens, hidden, dtype=torch.bfloat16), ids, torch.ones(4, 1), None, -1, handle
        )
    # A token without an expert gets exactly 0.
    ids = torch.full((4, 1), -1, dtype=torch.int64)
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    out, _, handle, _, _ = buffer.dispatch(x, ids, None, 8, size, -1)
    y = torch.ones(1, size * 8, 16, dtype=torch.bfloat16)
    combined, _, _ = buffer.combine(y, ids, torch.ones(4, 1), None, -1, handle)
    assert not combined.any()


def test_ranks_without_tokens_and_other_shapes() -> None:
    run(2, nothing_and_much)


def sizes(rank: int, size: int) -> None:
    hint = Buffer.get_ep_buffer_size_hint(MAX_TOKENS, HIDDEN, size, EACH * size)
    assert isinstance(hint, int) and hint > 2 * MAX_TOKENS * HIDDEN
    buffer = Buffer(dist.group.WORLD, hint)
    one_step(buffer, rank, size, 0)
    x, idx, _ = tokens_of(rank, size, EACH * size)
    with raises(ValueError, "num_ep_buffer_bytes", str(hint)):
        buffer.dispatch(x, idx, None, 600, EACH * size, -1)
    # The refusal on all ranks has ended a step on all ranks; the next ones work.
    for step in (1, 2):
        one_step(buffer, rank, size, step)


def test_size_hint_and_limit() -> None:
    run(2, sizes)


def mistakes(rank: int, size: int) -> None:
    buffer = Buffer(dist.group.WORLD)
    experts = EACH * size
    one_step(buffer, rank, size, 0)
    x, idx, weights = tokens_of(rank, size, experts)

    def refused(kind: type[BaseException], words: tuple[str, ...], **wrong: Any) -> None:
        """Rank 0 gives bad arguments; the others are told; the next step works."""
        good = {"x": x, "topk_idx": idx, "active_ranks": None, "num_max_dispatch_tokens_per_rank": MAX_TOKENS,
                "num_experts": experts, "timeout_us": -1, "use_fp8": False}  # fmt: skip
        if rank == 0:
            with raises(kind, *words):
                buffer.dispatch(**(good | wrong))
        else:
            with raises(heddle.Error, "EPEER"):
                buffer.dispatch(**good)
        one_step(buffer, rank, size, 1)

    bad_id = idx.clone()
    bad_id[1, 2] = experts
    refused(ValueError, ("EINVAL", "token 1", str(experts)), topk_idx=bad_id)
    many = torch.zeros(MAX_TOKENS + 1, HIDDEN, dtype=torch.bfloat16)
    refused(ValueError, ("EINVAL", "7", "6"), x=many, topk_idx=torch.zeros(MAX_TOKENS + 1, TOP_K, dtype=torch.int64))
    refused(TypeError, ("bfloat16",), x=x.float())
    refused(TypeError, ("int64",), topk_idx=idx.float())
    refused(ValueError, ("[T, H]",), x=x[:2])
    refused(ValueError, ("topk_weights",), topk_weights=weights[:1])
    refused(ValueError, ("active_ranks", str(size)), active_ranks=torch.ones(size + 1, dtype=torch.int32))
    refused(ValueError, ("not divisible", str(experts + 1)), num_experts=experts + 1)
    refused(ValueError, ("exclude",), async_finish=True, return_recv_hook=True)
    meta = torch.empty(5, HIDDEN, dtype=torch.bfloat16, device="meta")
    refused(NotImplementedError, ("meta", "CPU"), x=meta)

    # combine: whatever is refused may be called again with the same handle.
    out, _, handle, _, _ = buffer.dispatch(x, idx, None, MAX_TOKENS, experts, -1, use_fp8=False, topk_weights=weights)
    y = experts_on(out, rank, size, experts)
    for kind, words, wrong in (
        (ValueError, ("is needed",), {"x": y[:, 1:]}),
        (ValueError, ("is needed",), {"x": y.float()}),
        (ValueError, ("given to dispatch",), {"topk_weights": weights + 1}),
        (ValueError, ("topk_idx",), {"topk_idx": idx[:1]}),
        (ValueError, ("out is",), {"out": torch.empty(1, HIDDEN, dtype=torch.bfloat16)}),
        (ValueError, ("exclude",), {"async_finish": True, "return_recv_hook": True}),
        (ValueError, ("active_ranks",), {"active_ranks": torch.ones(size, dtype=torch.int64)}),
    ):
        good = {
            "x": y,
            "topk_idx": idx,
            "topk_weights": weights,
            "active_ranks": None,
            "timeout_us": -1,
            "handle": handle,
        }
        with raises(kind, *words):  # type: ignore[arg-type]
            buffer.combine(**(good | wrong))
    check_sum(buffer.combine(y, idx, weights, None, -1, handle)[0], expected_sum(rank, size, experts), False)
    dist.barrier()
    if rank == 1:
        with raises(ValueError, "own"):
            buffer.dispatch(x, idx, torch.tensor([1, 0], dtype=torch.int32), MAX_TOKENS, experts, -1, use_fp8=False)
    else:
        with raises(heddle.Error, "EPEER"):
            buffer.dispatch(x, idx, None, MAX_TOKENS, experts, -1, use_fp8=False)
    one_step(buffer, rank, size, 2)


def test_mistakes_are_told_to_all() -> None:
    run(2, mistakes)


def late(rank: int, size: int) -> None:
    """A rank that does not come in time is masked and missing; the next step takes it back in."""
    buffer = Buffer(dist.group.WORLD)
    experts = EACH * size
    one_step(buffer, rank, size, 0)
    dist.barrier()
    if rank == 2:
        time.sleep(0.5)
    x, idx, weights = tokens_of(rank, size, experts, step=1)
    active = torch.ones(size, dtype=torch.int32)
    out, _, handle, _, _ = buffer.dispatch(x, idx, active, MAX_TOKENS, experts, 50_000, use_fp8=False)
    if rank != 2:
        assert active.tolist() == [1, 1, 0]
        assert int(handle[1][:, 2].sum() & 0xFFFFFFFF) == 0
    y = experts_on(out, rank, size, experts)
    combined, _, _ = buffer.combine(y, idx, weights, active, 50_000, handle)
    if rank != 2:
        check_sum(combined, expected_sum(rank, size, experts, 1, without=2), False)
        chose = [any(int(e) // EACH == 2 for e in row) for row in idx]
        assert handle.missing.tolist() == [int(c) for c in chose]
    dist.barrier()
    one_step(buffer, rank, size, 2)
    # Masked by the caller from the beginning: not waited for, though it is there.
    active = torch.tensor([1, 1, 0], dtype=torch.int32) if rank != 2 else torch.ones(size, dtype=torch.int32)
    out, _, handle, _, _ = buffer.dispatch(x, idx, active, MAX_TOKENS, experts, 300_000, use_fp8=False)
    buffer.combine(experts_on(out, rank, size, experts), idx, weights, active, 300_000, handle)
    dist.barrier()
    one_step(buffer, rank, size, 3)


def test_late_and_masked_ranks() -> None:
    run(3, late)


def survives(port: int, rank: int) -> None:
    join(port, rank, 3)
    buffer = Buffer(dist.group.WORLD)
    one_step(buffer, rank, 3, 0)
    dist.barrier()
    if rank == 1:
        os._exit(9)
    x, idx, weights = tokens_of(rank, 3, 3 * EACH, step=1)
    active = torch.ones(3, dtype=torch.int32)
    out, _, handle, _, _ = buffer.dispatch(x, idx, active, MAX_TOKENS, 3 * EACH, -1, use_fp8=False)
    combined, _, _ = buffer.combine(experts_on(out, rank, 3, 3 * EACH), idx, weights, active, -1, handle)
    assert active.tolist() == [1, 0, 1]
    check_sum(combined, expected_sum(rank, 3, 3 * EACH, 1, without=1), False)
    until(lambda: pg.get_active_ranks(dist.group.WORLD).tolist() == [1, 0, 1])
    # A membership as a mask: a copy, or the group's own tensor, into which no call writes.
    members = pg.get_active_ranks(dist.group.WORLD)
    for active in (members.clone(), members):
        out, _, handle, _, _ = buffer.dispatch(x, idx, active, MAX_TOKENS, 3 * EACH, -1, use_fp8=False)
        combined, _, _ = buffer.combine(experts_on(out, rank, 3, 3 * EACH), idx, weights, active, -1, handle)
        check_sum(combined, expected_sum(rank, 3, 3 * EACH, 1, without=1), False)
        assert active.tolist() == [1, 0, 1]
    dist.barrier()  # who leaves is lost for those who are in the step still
    dist.destroy_process_group()


def test_a_rank_is_killed() -> None:
    with Tree() as tree:
        tree.serve()
        pids = [tree.fork(f"rank {rank}", survives, tree.port, rank) for rank in range(3)]
        for rank in (0, 2):
            tree.result(pids[rank])


def grows(port: int, rank: int) -> None:
    options = pg.MooncakeBackendOptions(4, rank >= 2)
    join(port, rank, 4 if rank >= 2 else 2, options)
    group = dist.group.WORLD
    if rank < 2:
        buffer = Buffer(group)
        one_step(buffer, rank, 2, 0, experts=8)
        one_step(buffer, rank, 2, 1, zero_copy=True, experts=8)
        x, idx, weights = tokens_of(rank, 2, 2 * EACH)
        full = torch.tensor([1, 1, 0, 0], dtype=torch.int32)  # as long as the capacity
        _out, _, old, _, _ = buffer.dispatch(x, idx, full, MAX_TOKENS, 2 * EACH, -1, use_fp8=False)
        until(lambda: all(pg.get_peer_state(group, [2, 3])), 40)
        ep.activate_ranks(group, [2, 3])
        buffer.update_ep_member()
        assert buffer.group_size == 4
    else:
        pg.join_group(group)
        buffer = Buffer(group)
    one_step(buffer, rank, 4, 2, experts=8)
    one_step(buffer, rank, 4, 3, hook=True, experts=8)
    if rank < 2:
        with raises(heddle.Error, "ESTALE"):
            buffer.combine(torch.empty(EACH, 2 * MAX_TOKENS, HIDDEN, dtype=torch.bfloat16), idx, weights, None, -1, old)
    dist.barrier()
    dist.destroy_process_group()


def test_growth_from_2_to_4() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", grows, tree.port, rank) for rank in range(4)]:
            tree.result(pid)


def lives(rank: int, size: int) -> None:
    """Dropped, closed and left open buffers; hooks that were never called."""
    for _ in range(3):
        buffer = Buffer(dist.group.WORLD)
        one_step(buffer, rank, size, 0)
        del buffer
        gc.collect()
    buffer = Buffer(dist.group.WORLD)
    x, idx, _ = tokens_of(rank, size, EACH * size)
    buffer.dispatch(x, idx, None, MAX_TOKENS, EACH * size, -1, return_recv_hook=True)
    buffer.close()
    with raises(heddle.Error, "closed"):
        buffer.dispatch(x, idx, None, MAX_TOKENS, EACH * size, -1)
    buffer = Buffer(dist.group.WORLD)
    one_step(buffer, rank, size, 0)
    dist.destroy_process_group()
    with raises(heddle.Error, "closed"):
        one_step(buffer, rank, size, 0)


def lives_in(port: int, rank: int) -> None:
    join(port, rank, 2)
    lives(rank, 2)


def test_lives_of_buffers() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", lives_in, tree.port, rank) for rank in range(2)]:
            tree.result(pid)


def test_event_overlap_alone() -> None:
    class Event:
        waited = 0

        def current_stream_wait(self) -> None:
            self.waited += 1

    event = Event()
    with EventOverlap(event, (torch.zeros(1),)):
        assert event.waited == 0
    assert event.waited == 1
    EventOverlap().current_stream_wait()


def test_elastic_buffer_says_that_it_is_not_there() -> None:
    with raises(ImportError, "ElasticBuffer", "mooncake_ep_buffer"):
        import mooncake.mooncake_elastic_buffer  # noqa: F401
