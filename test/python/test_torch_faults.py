# SPDX-License-Identifier: Apache-2.0
"""Ranks of a busy group are killed at random moments and replaced; every result is checked.

HEDDLE_KILLS=100 pytest -s test_torch_faults.py: a long run, with a table of times at the end.
"""

from __future__ import annotations

import json
import os
import random
import select
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from mooncake import pg
from ranks import Tree, join, until

RANKS = 4
KILLS = int(os.environ.get("HEDDLE_KILLS", "6"))
TOTAL = RANKS * (RANKS + 1) // 2


def say(pipe: int, **record: Any) -> None:
    """One line, short enough to be written in one piece."""
    os.write(pipe, json.dumps(record).encode() + b"\n")


def one(group: Any, rank: int) -> tuple[float, list[int]]:
    t = torch.full((1024,), float(rank + 1))
    work = group.allreduce([t])
    work.wait()
    assert (t == t[0]).all()
    return t[0].item(), [r for r, lost in enumerate(pg.get_failed_ranks_hint(work).tolist()) if lost]


def rank_main(port: int, rank: int, life: int, kills: int, pipe: int) -> None:
    begin = time.monotonic()
    group = join(port, rank, RANKS, pg.MooncakeBackendOptions(RANKS, life > 0))
    done = torch.zeros(1, dtype=torch.int64)
    if life > 0:
        pg.join_group(group)
    assert one(group, rank)[0] == TOTAL  # who is lost before takes the group's creation along
    if life > 0:
        say(pipe, what="replaced", seconds=time.monotonic() - begin)
        dist.broadcast(done, 0)
    while done.item() < kills:
        if rank == 0:
            say(pipe, what="ready")
        while True:
            before, (value, lost) = time.monotonic(), one(group, rank)
            if lost:
                break
            assert value == TOTAL, value
        noticed = time.monotonic()
        assert len(lost) == 1 and value == TOTAL - lost[0] - 1, (value, lost)
        again, none = one(group, rank)
        assert again == TOTAL - lost[0] - 1 and not none, (again, none)
        say(pipe, what="lost", rank=rank, lost=lost[0], kill=done.item(), began=before, noticed=noticed,
            right=time.monotonic())  # fmt: skip
        until(lambda lost=lost: all(pg.get_peer_state(group, lost)), 60)
        answer = pg.recover_ranks(group, lost)
        assert answer.status == pg.ProposalStatus.Applied, answer
        assert one(group, rank) == (TOTAL, [])
        done += 1
        dist.broadcast(done, 0)
    dist.barrier()
    dist.destroy_process_group()


class Lines:
    """Records of the ranks, as they come."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._rest = pipe, b""
        self.seen: list[dict[str, Any]] = []

    def until_ready(self) -> None:
        while True:
            while b"\n" in self._rest:
                line, self._rest = self._rest.split(b"\n", 1)
                self.seen.append(json.loads(line))
                if self.seen[-1]["what"] == "ready":
                    return
            assert select.select([self._pipe], [], [], 60)[0], "rank 0 was not ready within 60 s"
            self._rest += os.read(self._pipe, 4096)

    def rest(self) -> None:
        os.set_blocking(self._pipe, False)
        while data := os.read(self._pipe, 65536):
            self._rest += data
        self.seen += [json.loads(line) for line in self._rest.split(b"\n") if line]


def spread(values: list[float]) -> str:
    ms = sorted(1e3 * v for v in values)
    return f"n {len(ms):4}  median {statistics.median(ms):7.1f} ms  worst {ms[-1]:7.1f} ms"


def test_kills_at_random_moments() -> None:
    chance = random.Random(int(os.environ.get("HEDDLE_SEED", "1")))
    get, put = os.pipe()
    lines, killed = Lines(get), []
    with Tree(limit=60 + 5 * KILLS) as tree:
        tree.serve()
        pids = [tree.fork(f"rank {r}", rank_main, tree.port, r, 0, KILLS, put) for r in range(RANKS)]
        for life in range(1, KILLS + 1):
            lines.until_ready()
            time.sleep(chance.uniform(0.02, 0.2))
            victim = chance.randrange(1, RANKS)
            killed.append((victim, time.monotonic()))
            tree.kill(pids[victim])
            pids[victim] = tree.fork(f"life {life} of rank {victim}", rank_main, tree.port, victim, life, KILLS, put)
        for pid in pids:
            tree.result(pid)
    os.close(put)
    lines.rest()
    lost = [r for r in lines.seen if r["what"] == "lost"]
    assert len(lost) == KILLS * (RANKS - 1) and all(r["lost"] == killed[r["kill"]][0] for r in lost)
    print(f"\n{KILLS} kills of {RANKS} ranks")
    print("operation returned  ", spread([r["noticed"] - killed[r["kill"]][1] for r in lost]))
    print("next one right      ", spread([r["right"] - killed[r["kill"]][1] for r in lost]))
    print("replacement at work ", spread([r["seconds"] for r in lines.seen if r["what"] == "replaced"]))
