# SPDX-License-Identifier: Apache-2.0
"""Plain numpy: sums, gathers and messages. heddle run -n 4 -- python examples/numpy_allreduce.py (or torchrun)"""

import numpy as np

import heddle


def main() -> None:
    with heddle.init() as world:
        rank, size = world.rank, world.size

        # In place, the same bytes on every rank.
        x = np.full(4, rank + 1, np.float32)
        world.all_reduce(x)
        assert (x == size * (size + 1) / 2).all()

        # New memory: row r is what rank r gave.
        table = world.all_gather(np.array([rank, rank**2]))
        assert table.tolist() == [[r, r**2] for r in range(size)]

        # Started, then waited for; the program may compute meanwhile.
        blocks = np.arange(size * 3, dtype=np.float64).reshape(size, 3)
        started = world.reduce_scatter(blocks, wait=False)
        inside = np.tanh(blocks).sum()
        mine = started.wait()
        assert np.array_equal(mine, size * blocks[rank]) and inside >= 0

        # A ring of messages.
        message = world.send(np.array([rank]), (rank + 1) % size, wait=False)
        left = world.recv(np.zeros(1, np.int64), (rank - 1) % size)
        message.wait()

        print(f"rank {rank} of {size}: the sum is {x[0]:g}, rank {left[0]} is on the left")
        if rank == 0:
            print(world)


if __name__ == "__main__":
    main()
