# SPDX-License-Identifier: Apache-2.0
"""Who belongs to a group, as applications see it through mooncake.pg: each function, each outcome, each promise."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import heddle
from heddle.torch import _members, _options
from mooncake import ep, pg
from ranks import Tree, arrive, end_together, join, raises, run, until
from worlds import free_port

CPU = torch.device("cpu")


def total(group: Any, value: float, count: int = 4) -> tuple[float, Any]:
    """all_reduce of one value: the sum, and the work."""
    t = torch.full((count,), float(value))
    work = group.allreduce([t])
    work.wait()
    assert (t == t[0]).all()
    return t[0].item(), work


def lose(group: Any, value: float) -> tuple[float, Any]:
    """all_reduces until one reports a loss."""
    while True:
        sum_, work = total(group, value)
        if not pg.get_local_success(work):
            return sum_, work


def hint(work: Any) -> list[int]:
    found = pg.get_failed_ranks_hint(work)
    assert found.dtype == torch.int32 and found.device == CPU
    return found.tolist()


def active(group: Any) -> list[int]:
    return pg.get_active_ranks(group).tolist()


# ------------------------------------------------------------------------ settings, options


def test_names() -> None:
    assert set(pg.__all__) <= set(dir(ep))
    assert [int(s) for s in pg.SyncAfterFailureStatus] == [0, 1, 2] and pg.SyncAfterFailureStatus.Rejected == 2
    assert [s.name for s in pg.ProposalStatus] == ["Rejected", "Applied", "AppliedWithDroppedRanks"]
    assert pg.ViewUpdateStatus is pg.ProposalStatus


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "settings", _options.Settings())
    pg.set_host_ip("127.0.0.1")
    pg.set_host_ip(ip="127.0.0.2")
    _options.settings.started = True
    pg.set_host_ip("127.0.0.2")
    with raises(RuntimeError, "127.0.0.3", "too late", "127.0.0.2"):
        pg.set_host_ip("127.0.0.3")
    pg.set_device_filter(names=["lo"])
    with raises(RuntimeError, "nic7", "lo"):
        pg.set_device_filter(["nic7"])
    pg.set_collective_timeout_us(1_000)
    pg.set_p2p_timeout_us(us=0)
    pg.set_fault_reconciliation_window_us(1_000_000)
    with raises(RuntimeError, "-1"):
        pg.set_p2p_timeout_us(-1)
    pg.set_transfer_engine(None)

    class Engine:
        def get_engine_ptr(self) -> int:
            return 1

    with pytest.warns(UserWarning, match="no effect"):
        pg.set_transfer_engine(engine=Engine())
    with raises(TypeError, "get_engine_ptr"):
        pg.set_transfer_engine(7)


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = torch.zeros(4, dtype=torch.int32)
    assert pg.MooncakeBackendOptions(mirror, True, 3).capacity(2) == 3
    assert pg.MooncakeBackendOptions(active_ranks=mirror).capacity(4) == 4
    assert pg.MooncakeBackendOptions(mirror, is_extension=True).is_extension
    given = pg.MooncakeBackendOptions(8, False, True, False)
    assert given.capacity(2) == 8 and given.auto_deactivate_on_failure and not given.auto_sync_on_failure
    assert not given.is_extension and not given.may_join
    given = pg.MooncakeBackendOptions(8, True, False)  # three numbers: the flags
    assert given.auto_deactivate_on_failure and not given.auto_sync_on_failure and given.may_join
    assert pg.MooncakeBackendOptions(max_group_size=0).capacity(5) == 5
    assert pg.MooncakeBackendOptions(-1).capacity(5) == 5
    with raises(RuntimeError, "3", "[4, 1024]"):
        pg.MooncakeBackendOptions(3).capacity(4)
    with raises(RuntimeError, "1025"):
        pg.MooncakeBackendOptions(1025).capacity(4)
    with raises(RuntimeError, "auto_sync"):
        pg.MooncakeBackendOptions(4, False, False, True)
    with raises(RuntimeError, "4 elements", "6"):
        pg.MooncakeBackendOptions(mirror, False, 6).capacity(2)
    with raises(RuntimeError, "int32", "int64"):
        pg.MooncakeBackendOptions(torch.zeros(4, dtype=torch.int64))
    with raises(RuntimeError, "contiguous"):
        pg.MooncakeBackendOptions(torch.zeros(8, dtype=torch.int32)[::2])
    with raises(TypeError, "expects"):
        pg.MooncakeBackendOptions()
    with raises(TypeError, "expects"):
        pg.MooncakeBackendOptions(4, capacity=3)
    monkeypatch.setenv("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE", "0")
    with raises(RuntimeError, "auto_sync"):
        pg.MooncakeBackendOptions.from_environment()
    monkeypatch.setenv("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE", "0")
    found = pg.MooncakeBackendOptions.from_environment()
    assert not found.auto_deactivate_on_failure and not found.auto_sync_on_failure


def sized(rank: int, size: int) -> int:
    t = torch.ones(100_000)
    dist.all_reduce(t)
    assert (t == size).all()
    with open("/proc/self/maps") as maps:
        low, high = next(line for line in maps if "heddle-window" in line).split()[0].split("-")
    return int(high, 16) - int(low, 16)


def test_pool_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(2, sized)[0]
    monkeypatch.setenv("MOONCAKE_P2P_CHUNK_SIZE", "65536")
    monkeypatch.setenv("MOONCAKE_P2P_POOL_SIZE", "1048576")
    assert _options.pool() == (16, 65536) and run(2, sized)[0] < whole / 2
    monkeypatch.setenv("MOONCAKE_P2P_POOL_SIZE", "100000")
    with raises(RuntimeError, "100000", "65536"):
        _options.pool()
    monkeypatch.setenv("MOONCAKE_P2P_POOL_SIZE", "1M")
    with raises(RuntimeError, "POOL_SIZE='1M'"):
        _options.pool()


def not_made(port: int, rank: int) -> None:
    """A rank that never comes: init returns, whoever uses the group is told, destroy() does not wait for ever."""
    group = join(port, rank, 3, timeout=1.5)
    assert group.size() == 3
    if (pid := os.fork()) == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(int("before the fork" not in str(error)))
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    with raises(RuntimeError, "rank"):
        dist.all_reduce(torch.ones(1))
    with raises(RuntimeError, "rank"):
        pg.get_active_ranks(group)
    dist.destroy_process_group()
    join(port, rank, 3, timeout=30)
    begin = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begin < 5


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="this torch's stores have one connection: init waits")
def test_a_rank_that_never_comes() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", not_made, tree.port, rank) for rank in range(2)]:
            tree.result(pid)


def waits_in_the_store(port: int, rank: int) -> None:
    """The ranks meet through the store that this rank waits in."""
    group = join(port, rank, 2)
    store = group.get_group_store()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        store.set("go", "")
        work.wait()
    else:
        store.get("go")
        dist.all_reduce(torch.ones(1))
    end_together(port, 2)


def test_an_application_that_waits_in_the_store() -> None:
    for _ in range(3):
        with Tree() as tree:
            tree.serve()
            for pid in [tree.fork(f"rank {rank}", waits_in_the_store, tree.port, rank) for rank in range(2)]:
                tree.result(pid)


# ------------------------------------------------------------------------ every function, every size


def quiet(group: Any, members: int, capacity: int) -> None:
    """Each function while nothing happens."""
    backend = group._get_backend(CPU)
    with raises(RuntimeError, "cuda"):
        group._get_backend(torch.device("cuda"))
    here = [True] * members + [False] * (capacity - members)
    for handle in (group, backend):
        assert active(handle) == [int(one) for one in here] and pg.get_active_ranks(handle).dtype == torch.int32
        assert pg.get_num_synced_ranks(handle) == members
        assert pg.get_peer_state(handle, list(range(capacity))) == here
        assert pg.get_peer_state(backend=handle, ranks=[]) == []
    for outside in (-1, capacity):
        with raises(RuntimeError, str(outside), f"[0, {capacity})"):
            pg.get_peer_state(group, [outside])
    assert pg.sync_after_failure(group).status == pg.SyncAfterFailureStatus.NoPending
    assert pg.get_current_epoch(group) > 0
    done = pg.activate_ranks(group, list(range(members)))  # all of them are active
    assert done.status == pg.ProposalStatus.Applied and done.dropped_ranks == [] and done.reject_reason == ""
    for refuse in (pg.activate_ranks, pg.deactivate_ranks):
        refused = refuse(group, [capacity])
        assert refused.status == pg.ProposalStatus.Rejected and str(capacity) in refused.reject_reason
    with pytest.warns(DeprecationWarning):
        pg.extend_group_size_to(group, capacity + 1)
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    assert hint(work) == [0] * capacity and pg.get_local_success(work)
    gloo = dist.new_group(backend="gloo")
    for function in (pg.get_active_ranks, pg.join_group, pg.sync_after_failure, pg.get_current_epoch):
        with raises(TypeError, "mooncake"):
            function(gloo)
    for change in (pg.get_peer_state, pg.activate_ranks, pg.deactivate_ranks, pg.recover_ranks):
        with raises(TypeError, "mooncake"):
            change(gloo, [0])
    work = dist.all_reduce(torch.ones(1), group=gloo, async_op=True)
    assert pg.get_failed_ranks_hint(work) is None and pg.get_local_success(work) is False
    work.wait()


def alone(rank: int, size: int) -> None:
    group = dist.group.WORLD
    quiet(group, size, size)
    refused = pg.deactivate_ranks(group, [0])
    assert refused.status == pg.ProposalStatus.Rejected and "last active rank" in refused.reject_reason
    for flags in MODES[1:]:
        quiet(dist.new_group(pg_options=pg.MooncakeBackendOptions(2, False, *flags)), 1, 2)


def test_a_world_of_one() -> None:
    run(1, alone)


def late(rank: int, size: int) -> None:
    """A rank that is slow is waited for, whatever the times of the set_ functions."""
    pg.set_collective_timeout_us(1_000)
    pg.set_p2p_timeout_us(1_000)
    pg.set_fault_reconciliation_window_us(1_000)
    group = dist.new_group()
    total(group, 1)
    if rank == 1:
        time.sleep(0.3)
    sum_, work = total(group, 1)
    assert sum_ == size and pg.get_local_success(work) and active(group) == [1] * size
    t = torch.full((1,), float(rank))
    if rank == 1:
        time.sleep(0.3)
        dist.send(t, 0, group)
    else:
        dist.recv(t, 1, group)
    assert t.item() == 1


def test_a_late_rank_is_not_lost() -> None:
    run(2, late)


def limits(us: int) -> None:
    _members._ADMISSION_US = _members._JOIN_US = us


def activates(group: Any, rank: int) -> None:
    until(lambda: all(pg.get_peer_state(group, [rank])))
    epoch = pg.get_current_epoch(group)
    done = pg.recover_ranks(group, [rank])
    assert done.status == pg.ProposalStatus.Applied and done.new_epoch >= epoch and done.dropped_ranks == []


def life(port: int, rank: int, size: int) -> None:
    """A group's life: the last rank comes later, is removed, comes back, is lost, is replaced; then rank 0 is lost."""
    last = size - 1
    limits(300_000)
    group = join(port, rank, last if rank < last else size, pg.MooncakeBackendOptions(size, rank == last))
    store = group.get_group_store()
    if rank == last:
        store.get("refused")
        for _ in range(2):
            with raises(RuntimeError, f"rank {last}"):
                pg.join_group(group)
        store.set("tried", "twice")
        limits(20_000_000)
        pg.join_group(group)
    else:
        quiet(group, last, size)
        if rank == 0:
            no = pg.activate_ranks(group, [last])
            assert no.status == pg.ProposalStatus.Rejected and str(last) in no.reject_reason, no
            store.set("refused", "yes")
        limits(20_000_000)
        store.get("tried")
        activates(group, last)
    together(group, size)
    if rank == last:
        assert pg.deactivate_ranks(group, [last]).status == pg.ProposalStatus.Applied  # itself
        with raises(RuntimeError, "NOTMEMBER"):
            dist.all_reduce(torch.ones(1))
        pg.join_group(group)
    else:
        until(lambda: active(group)[last] == 0)
        sum_, work = total(group, 1)
        assert sum_ == last and pg.get_local_success(work)
        activates(group, last)
    together(group, size)
    arrive(port)
    if rank == last:
        time.sleep(60)
    epoch = pg.get_current_epoch(group)
    sum_, work = lose(group, 1)
    assert sum_ == last and hint(work) == active_but(last, size, 0) and active(group) == active_but(last, size, 1)
    assert pg.sync_after_failure(group).status == pg.SyncAfterFailureStatus.Reconciled
    assert pg.get_current_epoch(group) > epoch
    activates(group, last)
    loses_rank_0(port, group, size)


def active_but(rank: int, size: int, others: int) -> list[int]:
    """A mask that has `others` everywhere but at `rank`."""
    return [others ^ (slot == rank) for slot in range(size)]


def takes_the_place(port: int, rank: int, size: int) -> None:
    group = join(port, rank, size, pg.MooncakeBackendOptions(size, True))
    pg.join_group(group)
    loses_rank_0(port, group, size)


def loses_rank_0(port: int, group: Any, size: int) -> None:
    """Its process has the coordinator: nothing is decided any more, and each function says so."""
    together(group, size)
    arrive(port)
    if dist.get_rank() == 0:
        time.sleep(60)
    until(lambda: pg.sync_after_failure(group).status == pg.SyncAfterFailureStatus.Rejected)
    assert "ECOORD" in pg.sync_after_failure(group).reject_reason
    refused = pg.deactivate_ranks(group, [0])
    assert refused.status == pg.ProposalStatus.Rejected and "ECOORD" in refused.reject_reason


@pytest.mark.parametrize("size", range(2, 9))
def test_a_life(size: int) -> None:
    last = size - 1
    with Tree() as tree:
        tree.serve()
        pids = [tree.fork(f"rank {rank}", life, tree.port, rank, size) for rank in range(size)]
        tree.arrived(size)
        tree.kill(pids.pop())
        pids.append(tree.fork("replacement", takes_the_place, tree.port, last, size))
        tree.arrived(2 * size)
        tree.kill(pids.pop(0))
        for pid in pids:
            tree.result(pid)


# ------------------------------------------------------------------------ losses


MODES = ((True, True), (True, False), (False, False))
LOST = 1


def survivor(port: int, rank: int, size: int) -> None:
    """A group for each way of handling a loss; one process is lost to all of them."""
    mirror = torch.full((size,), 7, dtype=torch.int32)
    groups = [join(port, rank, size, pg.MooncakeBackendOptions(mirror, False, size))]
    groups += [dist.new_group(pg_options=pg.MooncakeBackendOptions(size, False, *flags)) for flags in MODES[1:]]
    epochs = [pg.get_current_epoch(group) for group in groups]
    store, hints = groups[0].get_group_store(), active_but(LOST, size, 0)
    arrive(port)
    if rank == LOST:
        time.sleep(60)
    for group, flags, epoch in zip(groups, MODES, epochs, strict=True):
        sum_, work = lose(group, rank + 1)
        left = active_but(LOST, size, 1) if flags[0] else [1] * size
        assert sum_ == size * (size + 1) / 2 - LOST - 1 and hint(work) == hints and not pg.get_local_success(work)
        if all(flags):
            assert mirror.tolist() == left
        if not flags[0]:
            assert active(group) == left
        assert pg.sync_after_failure(group).status == pg.SyncAfterFailureStatus.Reconciled
        assert active(group) == left and pg.get_current_epoch(group) > epoch
        assert pg.get_peer_state(group, list(range(size))) == [slot != LOST for slot in range(size)]
        if not flags[0]:
            assert hint(total(group, 1)[1]) == hints and active(group) == left
            removes_the_lost(group, store, rank, size)
        sum_, work = total(group, 1)
        assert sum_ == size - 1 and pg.get_local_success(work) and active(group) == active_but(LOST, size, 1)
    end_together(port, size - 1)


def removes_the_lost(group: Any, store: Any, rank: int, size: int) -> None:
    """Rank 0 removes it: to the others that shows with their own next collective, sync, or call about members."""
    epoch = pg.get_current_epoch(group)
    store.add("looked", 1)
    until(lambda: store.add("looked", 0) == size - 1)
    if rank == 0:
        assert pg.deactivate_ranks(group, [LOST]).status == pg.ProposalStatus.Applied
    else:
        until(lambda: pg.get_current_epoch(group) > epoch)
        shown = pg.get_active_ranks(group)
        assert shown.tolist() == [1] * size
        if rank % 3 == 0:
            assert pg.sync_after_failure(group).status == pg.SyncAfterFailureStatus.Reconciled
        elif rank % 3 == 1:
            assert pg.deactivate_ranks(group, [LOST]).status == pg.ProposalStatus.Applied
        else:
            total(group, 1)
        assert shown.tolist() == active_but(LOST, size, 1)
    if rank == 0 or rank % 3 != 2:
        total(group, 1)


def lose_one(size: int, lost: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """body(port, rank, ...) on `size` ranks, of which one is killed when all have arrived: the others' results."""
    with Tree() as tree:
        tree.serve()
        pids = [tree.fork(f"rank {rank}", body, tree.port, rank, *arguments) for rank in range(size)]
        tree.arrived(size)
        tree.kill(pids.pop(lost))
        return [tree.result(pid) for pid in pids]


@pytest.mark.parametrize("size", range(2, 9))
def test_a_killed_rank(size: int) -> None:
    lose_one(size, LOST, survivor, size)


def roots(port: int, rank: int) -> None:
    group = join(port, rank, 3)
    arrive(port, group)
    lose(group, 1)
    t = torch.full((4,), float(rank))
    work = dist.broadcast(t, 1, async_op=True)
    work.wait()
    assert hint(work) == [0, 1, 0] and (t == rank).all()
    out = torch.full((4,), -1.0)
    work = dist.scatter(out, None, src=1, async_op=True)
    work.wait()
    assert hint(work) == [0, 1, 0] and (out == -1).all()
    slots = [torch.full((2,), -1.0) for _ in range(3)]
    work = dist.all_gather(slots, torch.full((2,), float(rank)), async_op=True)
    work.wait()
    assert pg.get_local_success(work) and [s[0].item() for s in slots] == [0, -1, 2]
    out = torch.full((6,), -1.0)
    dist.all_to_all_single(out, torch.full((6,), float(rank)))
    assert out.tolist() == [0, 0, -1, -1, 2, 2]
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.ones(6))
    assert (out == 2).all()
    end_together(port, 2)


def test_lost_roots_and_slots_that_stay() -> None:
    lose_one(3, 1, roots)


def messenger(port: int, rank: int) -> int:
    group = join(port, rank, 3)
    arrive(port, group)
    dist.barrier()
    if rank == 1:
        time.sleep(60)
    other, rounds = 2 - rank, 0
    lost = group.recv([torch.empty(2)], 1, 5)
    while True:
        got = torch.empty(2)
        work = dist.isend(torch.full((2,), float(rounds)), other, tag=1)
        came = dist.irecv(got, other, tag=1)
        assert came.wait() and work.wait()
        assert pg.get_local_success(came) and pg.get_local_success(work), (rank, rounds, came, work)
        assert (got == rounds).all()
        rounds += 1
        done = torch.tensor([int(lost.is_completed() and rounds >= 50)])
        if rank == 0:
            dist.send(done, 2, tag=2)
        else:
            dist.recv(done, 0, tag=2)
        if done.item():
            break
    assert lost.wait() and hint(lost) == [0, 1, 0]
    work = group.send([torch.ones(2)], 1, 5)
    work.wait()
    assert hint(work) == [0, 1, 0] and not pg.get_local_success(work)
    end_together(port, 2)
    return rounds


def test_messages_among_the_healthy_go_on() -> None:
    first, second = lose_one(3, 1, messenger)
    assert first == second


def short(port: int, rank: int) -> None:
    """Outputs of the size that is left, after a shrink from 4 to 3."""
    group = join(port, rank, 4, pg.MooncakeBackendOptions(5))
    arrive(port, group)
    lose(group, 1)
    until(lambda: dist.get_world_size() == 3)
    out = torch.full((7,), -1.0)
    dist.all_gather_into_tensor(out[:6], torch.full((2,), float(rank)))
    assert out.tolist() == [0, 0, 1, 1, 2, 2, -1]
    dist.reduce_scatter_tensor(out[:2], torch.ones(6))
    assert out[:2].tolist() == [3, 3]
    with raises(ValueError, "room for 2 ranks", "[2]"):
        dist.all_gather_into_tensor(out[:4], torch.full((2,), float(rank)))
    assert total(group, 1)[0] == 3
    end_together(port, 3)


def test_short_outputs() -> None:
    lose_one(4, 3, short)


def stopped(port: int, rank: int, at_once: bool) -> str:
    """Rank 1 is stopped until rank 0 counts it as dead: its pending wait() does not raise, its next call does."""
    os.environ["HEDDLE_DEAD_AFTER"] = "500ms"
    group = join(port, rank, 2)
    arrive(port, group)
    dist.barrier()
    if rank == 0:
        time.sleep(1)  # so that the other one is stopped while it waits
        lose(group, 1)
        until(lambda: all(pg.get_peer_state(group, [1])), 30)
        assert pg.recover_ranks(group, [1]).status == pg.ProposalStatus.Applied
        assert total(group, 1)[0] == 2
        end_together(port, 2)
        return ""
    hints = []
    while True:
        t = torch.ones(4)
        try:
            if at_once:
                dist.all_reduce(t)
            else:
                work = group.allreduce([t])
                work.wait()
                hints.append(pg.get_failed_ranks_hint(work).tolist())
                assert pg.get_local_success(work) == (hints[-1] == [0, 0])
                # What rank 0 gave while this one was stopped may end it before the news comes.
                assert hints[-1] == [0, 1] or t.tolist() == [2.0] * 4
        except RuntimeError as error:
            assert "FENCED" in str(error)
            break
    assert at_once or (len(hints) <= 2 and [0, 1] not in hints[:-1])
    pg.join_group(group)
    assert total(group, 1)[0] == 2
    end_together(port, 2)
    return "back"


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stopped_rank_comes_back(at_once: bool) -> None:
    with Tree() as tree:
        tree.serve()
        pids = [tree.fork(f"rank {rank}", stopped, tree.port, rank, at_once) for rank in range(2)]
        tree.arrived(2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(2)
        os.kill(pids[1], signal.SIGCONT)
        assert tree.result(pids[1]) == "back"
        tree.result(pids[0])


def raising(port: int, rank: int) -> str:
    from heddle.torch import _work

    _work._RAISE = True  # what HEDDLE_RAISE_ON_FAILURE=1 sets
    arrive(port, join(port, rank, 2))
    try:
        while True:
            dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return str(error)


def test_wait_raises_for_a_lost_rank_if_asked_to() -> None:
    (text,) = lose_one(2, 1, raising)
    assert "INCOMPLETE" in text and "all_reduce: operation" in text and "without ranks 1" in text, text


# ------------------------------------------------------------------------ coming and going


def founder(port: int, rank: int, size: int, capacity: int) -> None:
    mirror = torch.zeros(capacity, dtype=torch.int32)
    group = join(port, rank, size, pg.MooncakeBackendOptions(mirror, False, capacity))
    dist.TCPStore("127.0.0.1", port, None, False).set("founded", "")  # init has returned: that is enough to join
    assert dist.get_world_size() == size and mirror.tolist() == [1] * size + [0] * (capacity - size)
    assert pg.get_peer_state(group, range(size)) == [True] * size
    newcomers = list(range(size, capacity))
    epoch = pg.get_current_epoch(group)
    until(lambda: all(pg.get_peer_state(group, newcomers)))
    assert pg.get_num_synced_ranks(group) == capacity
    done = pg.recover_ranks(group, newcomers)
    assert done.status == pg.ProposalStatus.Applied and done.new_epoch > epoch and done.dropped_ranks == []
    assert dist.get_world_size() == capacity and dist.get_rank() == rank and mirror.tolist() == [1] * capacity
    together(group, capacity)
    end_together(port, capacity)


def newcomer(port: int, rank: int, capacity: int, says_so: bool) -> float:
    begin = time.monotonic()
    if says_so:
        group = join(port, rank, capacity, pg.MooncakeBackendOptions(capacity, True))
    else:  # that the group runs is enough
        dist.TCPStore("127.0.0.1", port, None, False).get("founded")
        group = join(port, rank, capacity, pg.MooncakeBackendOptions(capacity))
    assert dist.get_world_size() == capacity and dist.get_rank() == rank
    assert total(group, 5)[0] == 5  # alone
    out = torch.full((capacity,), -1.0)
    dist.all_gather_into_tensor(out, torch.full((1,), float(rank)))
    assert out.tolist() == [float(rank) if r == rank else -1.0 for r in range(capacity)]
    pg.join_group(group)
    assert active(group) == [1] * capacity
    together(group, capacity)
    took = time.monotonic() - begin
    end_together(port, capacity)
    return took


def together(group: Any, size: int) -> None:
    assert total(group, 1)[0] == size
    out = torch.empty(size)
    dist.all_gather_into_tensor(out, torch.full((1,), float(dist.get_rank())))
    assert out.tolist() == list(range(size))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, dist.get_rank())
    assert found == list(range(size))


@pytest.mark.parametrize(("size", "capacity", "says_so"), [(1, 2, True), (1, 3, False), (2, 4, True), (3, 8, False)])
def test_growth(size: int, capacity: int, says_so: bool) -> None:
    with Tree() as tree:
        tree.serve()
        pids = [tree.fork(f"rank {rank}", founder, tree.port, rank, size, capacity) for rank in range(size)]
        pids += [tree.fork(f"rank {r}", newcomer, tree.port, r, capacity, says_so) for r in range(size, capacity)]
        for pid in pids:
            tree.result(pid)


def lost_at_once(port: int, rank: int) -> None:
    """The newcomer is killed between its admission and the end of the call that asked for it."""
    group = join(port, rank, rank + 1, pg.MooncakeBackendOptions(2, rank == 1))
    store = group.get_group_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        pg.join_group(group)
        time.sleep(60)
    until(lambda: all(pg.get_peer_state(group, [1])))
    admit = heddle._abi.lib.hdl_group_admit

    def admit_and_lose(*args: Any) -> int:
        status = admit(*args)
        os.kill(int(store.get("pid")), signal.SIGKILL)
        until(lambda: not pg.get_peer_state(group, [1])[0])
        return int(status)

    heddle._abi.lib.hdl_group_admit = admit_and_lose
    done = pg.activate_ranks(group, [0, 1])
    assert done.status == pg.ProposalStatus.AppliedWithDroppedRanks and done.dropped_ranks == [1], done
    assert active(group) == [1, 0] and done.new_epoch == pg.get_current_epoch(group)
    sum_, _ = total(group, 1)
    assert sum_ == 1


def test_a_rank_that_is_lost_as_it_comes() -> None:
    with Tree() as tree:
        tree.serve()
        pids = [tree.fork(f"rank {rank}", lost_at_once, tree.port, rank) for rank in range(2)]
        tree.result(pids[0])


def loses_and_takes_back(port: int, rank: int, size: int, lost: int) -> None:
    group = join(port, rank, size)
    sub = dist.new_group(list(range(size)))
    arrive(port, group, sub)
    lose(group, 1)
    lose(sub, 1)
    for one in (group, sub):
        until(lambda one=one: all(pg.get_peer_state(one, [lost])))
        done = pg.recover_ranks(one, [lost])
        assert done.status == pg.ProposalStatus.Applied, done
    assert total(group, 1)[0] == size and total(sub, 1)[0] == size
    end_together(port, size)


def replacement(port: int, rank: int, size: int) -> float:
    begin = time.monotonic()
    extension = pg.MooncakeBackendOptions(size, True)
    group = join(port, rank, size, extension)
    sub = dist.new_group(list(range(size)), pg_options=extension)
    pg.join_group(group)
    pg.join_group(sub)
    assert total(group, 1)[0] == size
    took = time.monotonic() - begin
    assert total(sub, 1)[0] == size
    end_together(port, size)
    return took


@pytest.mark.parametrize(("size", "lost"), [(2, 1), (4, 1), (3, 0)])
def test_a_replacement_takes_the_place_of_a_killed_rank(size: int, lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tree() as tree, contextlib.ExitStack() as ended:
        tree.serve()
        if lost == 0:  # with a coordinator of its own any rank may be lost
            address = f"127.0.0.1:{free_port()}"
            monkeypatch.setenv("HEDDLE_TOKEN", "5a" * 32)
            command = [sys.executable, "-m", "heddle", "coordinator", "--listen", address]
            ended.callback(ended.enter_context(subprocess.Popen(command)).kill)
            monkeypatch.setenv("HEDDLE_COORDINATOR", address)
            monkeypatch.setenv("HEDDLE_STANDALONE", "1")
        pids = [tree.fork(f"rank {rank}", loses_and_takes_back, tree.port, rank, size, lost) for rank in range(size)]
        tree.arrived(size)
        tree.kill(pids.pop(lost))  # its successor may register while it is being declared dead
        pids.append(tree.fork("replacement", replacement, tree.port, lost, size))
        for pid in pids:
            tree.result(pid)


def removed_and_gone(port: int, rank: int) -> None:
    group = join(port, rank, 3)
    dist.barrier()
    if rank == 0:
        assert pg.deactivate_ranks(group, [2]).status == pg.ProposalStatus.Applied
    until(lambda: active(group) == [1, 1, 0])
    if rank == 2:
        return
    until(lambda: not pg.get_peer_state(group, [2])[0])
    for _ in range(100):
        sum_, work = total(group, 1)
        assert sum_ == 2 and pg.get_local_success(work)
    assert dist.get_world_size() == 2
    end_together(port, 2)


def test_removed_and_gone() -> None:
    with Tree() as tree:
        tree.serve()
        for pid in [tree.fork(f"rank {rank}", removed_and_gone, tree.port, rank) for rank in range(3)]:
            tree.result(pid)


def test_import_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(ep)


# ------------------------------------------------------------------------ programs written for the peer


def begins_small(rank: int, port: int, ready: int) -> None:
    """Half of the ranks meet, part, and meet again with all, on the same address: as its own test does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if rank < 2:
        dist.init_process_group(backend="mooncake-cpu", rank=rank, world_size=2)
        dist.barrier()
        dist.destroy_process_group()
        os.write(ready, b"x")
    dist.init_process_group(backend="mooncake-cpu", rank=rank, world_size=4)
    x = torch.tensor([rank + 1], dtype=torch.int32, device="cpu")
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    assert int(x) == 10
    dist.destroy_process_group()


def test_a_larger_world_on_the_same_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    get, put = os.pipe()
    with Tree() as tree:
        pids = [tree.fork(f"rank {rank}", begins_small, rank, port, put) for rank in range(2)]
        assert os.read(get, 1) and os.read(get, 1)
        pids += [tree.fork(f"rank {rank}", begins_small, rank, port, put) for rank in (2, 3)]
        for pid in pids:
            tree.result(pid)


def counted(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(8))
    found = heddle.stats()["torch 0"]
    assert found["ops_issued"] >= 1 and found["ops_failed"] == 0 and dist.group.WORLD.stats().keys() == found.keys()


def test_statistics() -> None:
    run(2, counted)
