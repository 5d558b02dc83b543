# SPDX-License-Identifier: Apache-2.0
"""A group grows from 2 ranks to 4 while it works. heddle run -n 4 -- python examples/grow.py (or torchrun)

Ranks 0 and 1 begin. Ranks 2 and 3 come later, as processes would that a scheduler starts when there is room. They get
the model and the step from a broadcast, the first operation of the larger group.
"""

import time

import numpy as np

import heddle

FOUNDERS, CAPACITY, STEPS = 2, 4, 60


def step_of(group: heddle.Group, model: np.ndarray, step: int) -> None:
    """Each member adds its share of the work; the shares depend on how many there are now."""
    share = np.full_like(model, 1 / len(group.view().active))
    model += group.all_reduce(share)
    model[0] = step + 1


def found(world: heddle.Group) -> tuple[heddle.Group, np.ndarray]:
    group = heddle.Group(world.context, "training", world.rank, FOUNDERS, capacity=CAPACITY)
    return group, np.zeros(8)


def join(world: heddle.Group) -> tuple[heddle.Group, np.ndarray]:
    time.sleep(0.2)
    group = heddle.Group(world.context, "training", world.rank, FOUNDERS, capacity=CAPACITY, join=True)
    group.join()
    return group, np.zeros(8)


def welcome(group: heddle.Group, model: np.ndarray) -> bool:
    """The first operation with new members. Are all there? Asked before it: behind it, who is done may leave."""
    full = len(group.view().active) == CAPACITY
    group.broadcast(model, root=0)
    return full


def newcomers(group: heddle.Group) -> list[int]:
    """Slots that wait to be admitted. Rank 0 decides for all, so that all admit at the same place."""
    ready = np.zeros(CAPACITY, np.int32)
    for rank in range(CAPACITY):
        ready[rank] = group.member(rank).member == heddle.MemberState.READY
    return np.flatnonzero(group.broadcast(ready, root=0)).tolist()


def main() -> None:
    with heddle.init() as world:
        assert world.size == CAPACITY, "start 4 ranks"
        founder = world.rank < FOUNDERS
        group, model = found(world) if founder else join(world)
        full = False if founder else welcome(group, model)
        step = int(model[0])
        while step < STEPS or not full:
            step_of(group, model, step)
            step += 1
            if new := newcomers(group):
                group.admit(new)
                full = welcome(group, model)
                print(f"rank {world.rank}: {new} came in at step {step}")
            time.sleep(0.005)
        assert np.allclose(model[1:], step), model
        print(f"rank {world.rank}: {step} steps, all {CAPACITY} ranks were there")


if __name__ == "__main__":
    main()
