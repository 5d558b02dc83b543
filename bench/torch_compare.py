#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two torch backends side by side on this machine, alternating in one run: medians and spread, as table and plot.

    bench/torch_compare.py --collective all_reduce,sendrecv --backend mooncake-cpu,gloo -g 2 -b 8 -e 64M -f 8

Collectives: all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier, sendrecv (half a round trip),
outstanding (200 operations at once, then the wait for all), ddp (a training step), init, idle.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BASIC = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "sendrecv"]
SPECIAL = ["outstanding", "ddp", "init", "idle"]


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kKmMgG]?)(?:i?[bB])?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 8, 4K, 64M")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", default="all_reduce", help="names, comma separated, or all")
    parser.add_argument("--backend", default="mooncake-cpu,gloo", help="two backends, comma separated")
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("-g", "--ranks", type=int, default=2, help="ranks")
    parser.add_argument("-b", "--begin", type=parse_size, default=8, help="smallest size")
    parser.add_argument("-e", "--end", type=parse_size, default=64 << 20, help="largest size")
    parser.add_argument("-f", "--factor", type=int, default=8, help="from one size to the next")
    parser.add_argument("--sizes", help="these sizes instead, comma separated")
    parser.add_argument("--rounds", type=int, default=5, help="alternations between the two backends")
    parser.add_argument("--plot", metavar="FILE", help="picture of the medians")
    parser.add_argument("--json", metavar="FILE", help="all samples")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    found = parser.parse_args()
    found.backends = found.backend.split(",")
    found.collectives = BASIC + SPECIAL if found.collective == "all" else found.collective.split(",")
    unknown = set(found.collectives) - set(BASIC + SPECIAL)
    if unknown or len(found.backends) != 2 or found.factor < 2:
        parser.error(f"unknown: {', '.join(unknown)}" if unknown else "two backends and a factor of 2 or more")
    if found.sizes:
        found.steps = [parse_size(text) for text in found.sizes.split(",")]
    else:
        found.steps, size = [], found.begin
        while size <= found.end:
            found.steps.append(size)
            size *= found.factor
    return found


# ---------------------------------------------------------------------------- in a rank


def operation(name: str, group: Any, size: int, rank: int, ranks: int) -> Callable[[], None]:
    """One call; `size` is what a rank gives (all_reduce, broadcast) or what all give together."""
    import torch
    import torch.distributed as dist

    count = max(1, size // 4)
    part = max(1, count // ranks)
    x, whole, block = torch.ones(count), torch.ones(part * ranks), torch.ones(part)
    out = torch.empty(part * ranks)
    if name == "sendrecv":

        def both() -> None:
            if rank == 0:
                dist.send(x, 1, group)
                dist.recv(x, 1, group)
            elif rank == 1:
                dist.recv(x, 0, group)
                dist.send(x, 0, group)

        return both
    if name == "outstanding":
        many = [torch.ones(1024) for _ in range(200)]

        def all_of_them() -> None:
            for work in [dist.all_reduce(t, group=group, async_op=True) for t in many]:
                work.wait()

        return all_of_them
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "all_gather": lambda: dist.all_gather(list(out.chunk(ranks)), block, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(block, list(whole.chunk(ranks)), group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, whole, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }
    return calls[name]


def training(group: Any) -> Callable[[], None]:
    """11 million parameters, images of 32x32, batch 8."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    layers: list[nn.Module] = []
    for a, b in [(3, 64), (64, 128), (128, 256), (256, 512)]:
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(2048, 4352), nn.ReLU(), nn.Linear(4352, 10)]
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()

    return step


def measure(call: Callable[[], None], group: Any, budget: float) -> float:
    """Seconds per call, the slowest rank's; all ranks make the same number of calls."""
    import torch
    import torch.distributed as dist

    for _ in range(3):
        call()
    begin = time.perf_counter()
    call()
    guess = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(guess, dist.ReduceOp.MAX, group=group)
    times = max(3, min(2000, int(budget / max(guess.item(), 1e-6))))
    dist.barrier(group=group)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    took = torch.tensor([(time.perf_counter() - begin) / times])
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return took.item()


def cpu_and_private() -> tuple[float, float]:
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    private = sum(int(kb) for kb in re.findall(r"Private_(?:Clean|Dirty): +(\d+)", text))
    return time.process_time(), private / 1024


def rank_main(given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    if any(name.startswith("mooncake") for name in given.backends):
        from mooncake import pg  # noqa: F401
    torch.set_num_threads(1)
    rank, ranks = given.rank, given.ranks
    store = dist.TCPStore("127.0.0.1", given.port, ranks, rank == 0)
    found: list[dict[str, Any]] = []

    def add(name: str, size: int, backend: str, value: float, unit: str) -> None:
        found.append({"name": name, "bytes": size, "backend": backend, "value": value, "unit": unit})

    if "init" in given.collectives:
        for round_ in range(given.rounds):
            for backend in given.backends:
                own = dist.PrefixStore(f"{backend}{round_}", store)
                own.set(f"here{rank}", "")
                own.wait([f"here{r}" for r in range(ranks)])
                begin = time.perf_counter()
                dist.init_process_group(backend, store=own, rank=rank, world_size=ranks)
                took = time.perf_counter() - begin
                dist.all_reduce(torch.ones(2))
                slowest = torch.tensor([took, time.perf_counter() - begin])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                dist.barrier()
                dist.destroy_process_group()
                add("init", 0, backend, slowest[0].item() * 1e6, "us")
                add("init + 1st op", 0, backend, slowest[1].item() * 1e6, "us")
    if "idle" in given.collectives:
        for backend in given.backends:
            _, before = cpu_and_private()
            dist.init_process_group(
                backend, store=dist.PrefixStore(f"idle{backend}", store), rank=rank, world_size=ranks
            )
            dist.all_reduce(torch.ones(1 << 18))
            add("private memory", 0, backend, cpu_and_private()[1] - before, "MiB")
            begin, _ = cpu_and_private()
            time.sleep(4)
            add("idle", 0, backend, (cpu_and_private()[0] - begin) / 4 * 100, "% of a core")
            dist.destroy_process_group()
    dist.init_process_group(given.backends[0], store=dist.PrefixStore("run", store), rank=rank, world_size=ranks)
    groups = {backend: dist.new_group(backend=backend) for backend in given.backends}
    steps = {backend: training(group) for backend, group in groups.items()} if "ddp" in given.collectives else {}
    for name in given.collectives:
        if name in ("init", "idle"):
            continue
        sizes = [0] if name in ("barrier", "outstanding", "ddp") else given.steps
        for size in sizes:
            for _ in range(given.rounds):
                for backend, group in groups.items():
                    dist.barrier(group=group)
                    call = steps[backend] if name == "ddp" else operation(name, group, size, rank, ranks)
                    half = 2 if name == "sendrecv" else 1
                    add(name, size, backend, measure(call, group, 1.5 if name == "ddp" else 0.3) / half * 1e6, "us")
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------ the table


def start(given: argparse.Namespace) -> list[dict[str, Any]]:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = pathlib.Path(__file__).resolve().parent.parent
    paths = [str(root / "python"), str(root / "python/mooncake"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--port", str(port)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(given.ranks)
    ]
    texts = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit(f"a rank failed: {[child.returncode for child in children]}")
    line = next(line for line in texts[0].splitlines() if line.startswith("RESULT "))
    return list(json.loads(line.removeprefix("RESULT ")))


def human(value: float, unit: str) -> str:
    if unit != "us":
        return f"{value:.2f} {unit}"
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def table(given: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    a, b = given.backends
    print(f"{given.ranks} ranks, {given.rounds} rounds; median (least to most); ratio = {a} / {b}\n")
    print(f"{'':16}{'bytes':>10}  {a:>32}  {b:>32}  ratio")
    keys = list(dict.fromkeys((f["name"], f["bytes"], f["unit"]) for f in found))
    for name, size, unit in keys:
        cells, medians = [], []
        for backend in (a, b):
            values = [f["value"] for f in found if (f["name"], f["bytes"], f["backend"]) == (name, size, backend)]
            medians.append(statistics.median(values))
            cells.append(f"{human(medians[-1], unit)} ({human(min(values), unit)} to {human(max(values), unit)})")
        ratio = f"{medians[0] / medians[1]:.3f}" if medians[1] > 0 else ""
        print(f"{name:16}{size or '':>10}  {cells[0]:>32}  {cells[1]:>32}  {ratio}")


def plot(given: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [n for n in given.collectives if len({f["bytes"] for f in found if f["name"] == n}) > 1]
    figure, axes = pyplot.subplots(1, max(1, len(names)), figsize=(5 * max(1, len(names)), 4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=False):
        for backend in given.backends:
            sizes = sorted({f["bytes"] for f in found if f["name"] == name})
            rows = [[f["value"] for f in found if (f["name"], f["bytes"], f["backend"]) == (name, s, backend)]
                    for s in sizes]  # fmt: skip
            axis.plot(sizes, [statistics.median(row) for row in rows], marker="o", label=backend)
            axis.fill_between(sizes, [min(row) for row in rows], [max(row) for row in rows], alpha=0.2)
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us", title=f"{name}, {given.ranks} ranks")
        axis.legend()
    figure.tight_layout()
    figure.savefig(given.plot)


def main() -> None:
    given = options()
    if given.rank is not None:
        rank_main(given)
        return
    found = start(given)
    table(given, found)
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(found))
    if given.plot:
        plot(given, found)


if __name__ == "__main__":
    main()
