#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times of exchanges on GPUs against their targets: gpu_targets.py [sweep] [RANKS] [REPLAYS].

Targets are for 2 and 4 GPUs with H 7168, top-k 8, 256 experts, FP8 rows. Ranks that share
a GPU take turns on it: then figures only show that all of it runs. HEDDLE_GPU_BUILD names
the folder of built tests. Exit code 1 if data were wrong, 77 without a GPU.

sweep: what AUTO should choose on these GPUs (choose_protocols and dispatch_plan in moe/gpu_exchange.c): every protocol
for dispatch and for contributions of each type, and how many blocks of dispatch send.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

BUILD = os.environ.get("HEDDLE_GPU_BUILD", "build/test/gpu")
LINK_GBPS = 450
TOKENS = (1, 8, 32, 128, 256, 512, 1024, 4096)
# us by ranks, tokens: dispatch, combine, and what they must not exceed
TARGETS: dict[int, dict[int, tuple[float, ...]]] = {
    4: {
        1: (6, 6),
        8: (6, 6),
        32: (7, 8.5),
        128: (13.5, 21, 16, 24),
        256: (21.5, 36),
        1024: (70, 126),
        4096: (255, 485),
    },
    2: {128: (8, 11)},
}
# T = 128, weights with combine, in one call, in two: target, must
LATE_TARGETS: dict[int, tuple[tuple[float | None, float | None], ...]] = {4: ((24, None), (38, 45))}
PROTOCOLS = ("auto", "ll", "chunk", "bulk")


def note(what: str, figure: str, limit: str = "", verdict: str = "") -> None:
    print(f"{what:44} {figure:>24} {limit:20} {verdict}", flush=True)


def judge(what: str, figure: str, value: float, target: float | None, must: float | None = None) -> bool:
    """One line; whether a target was missed."""
    if target is None:
        note(what, figure)
        return False
    limit = f"<= {target:.1f}" + (f" (must {must:g})" if must else "")
    verdict = "met" if value <= target else "within its must" if must and value <= must else "MISSED"
    note(what, figure, limit, verdict)
    return value > target


def perf(ranks: int, replays: int, *options: str) -> list[dict[str, Any]]:
    """Rows of heddle perf moe."""
    command = [f"{BUILD}/../../heddle", "perf", "moe", "--device", "cuda", "-n", str(ranks), "--json"]
    command += ["--hidden", "7168", "--experts", "256", "--dtype", "fp8", "--iters", str(replays), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not all(row["checked"] for row in rows if row["protocol"] != "NCCL"):
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    return rows


def kernels(ranks: int, replays: int, tokens: tuple[int, ...], **settings: int) -> list[tuple[float, float]]:
    """us of dispatch and combine by moe_perf, one process for all ranks."""
    command = [f"{BUILD}/moe_perf", str(ranks), ",".join(map(str, tokens)), str(replays)]
    env = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    found = re.findall(r"dispatch median\s+([\d.]+).*combine median\s+([\d.]+)", done.stdout)
    assert len(found) == len(tokens), done.stdout
    return [(float(dispatch), float(combine)) for dispatch, combine in found]


def late(ranks: int, replays: int, kind: int) -> float:
    """us of combine at T = 128 whose weights come with it, in one call or in two."""
    return kernels(ranks, replays, (128,), MOE_PERF_LATE=kind)[0][1]


def uniform(ranks: int, replays: int, *options: str) -> int:
    missed = 0
    rows = perf(ranks, replays, "-t", ",".join(map(str, TOKENS)), *options)
    for tokens in TOKENS:
        of = {row["op"]: row for row in rows if row["tokens"] == tokens}
        targets = TARGETS.get(ranks, {}).get(tokens, ())
        for i, op in enumerate(("dispatch", "combine")):
            row = of[op]
            nccl = of.get(f"{op} nccl")
            figure = f"{row['p50_us']:.1f} ({row['protocol']}, p99 {row['p99_us']:.1f})"
            what = f"T {tokens} {op}, us" + (f"; NCCL {nccl['p50_us']:.1f}" if nccl else "")
            target, must = (targets[at] if len(targets) > at else None for at in (i, i + 2))
            missed += judge(what, figure, row["p50_us"], target, must)
            ratio = row["p99_us"] / row["p50_us"]
            missed += judge(f"T {tokens} {op}, p99 / median", f"{ratio:.2f}", ratio, 1.5)
        pair, kernels = of["pair"]["p50_us"], of["dispatch"]["p50_us"] + of["combine"]["p50_us"]
        figure = f"{pair:.1f} (kernels {kernels:.1f})"
        missed += judge(f"T {tokens} both in one graph; in two, us", figure, pair, of["apart"]["p50_us"])
    return missed


def skewed(ranks: int, replays: int) -> int:
    """Within 1.3 of the wire floor of the rank that gets most, and 6 us."""
    missed = 0
    for routing in ("zipf", "hot"):
        for row in perf(ranks, replays, "-t", "32,128,1024", "--routing", routing):
            if row["op"] in ("pair", "apart"):
                continue
            floor = row["GBps"] * row["p50_us"] / LINK_GBPS
            what = f"T {row['tokens']} {row['op']}, {routing}, us"
            missed += judge(what, f"{row['p50_us']:.1f}", row["p50_us"], 1.3 * floor + 6)
    return missed


def protocols(ranks: int, replays: int) -> None:
    """No targets: what AUTO should choose."""
    for name in PROTOCOLS:
        for row in perf(ranks, replays, "-t", "1,32,128,256,1024,4096", "--protocol", name):
            if row["op"] not in ("pair", "apart"):
                note(f"T {row['tokens']} {row['op']}, {name} = {row['protocol']}, us", f"{row['p50_us']:.1f}")


def faster_from(tokens: tuple[int, ...], by_protocol: dict[str, list[float]]) -> int | None:
    """The fewest tokens from which BULK is faster than LL for good."""
    first = None
    for count, ll, bulk in zip(tokens, by_protocol["ll"], by_protocol["bulk"], strict=True):
        first = (first or count) if bulk < ll else None
    return first


def sweep(ranks: int, replays: int) -> None:
    tokens = (1, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
    # Bytes of a row to a peer: dispatch in FP8 with scales and weights, then contributions.
    kinds = (
        ("dispatch", 0, 0, 7168 + 56 * 4 + 32),
        ("F32 sums", 1, 1, 7168 * 4),
        ("FP8 sums", 1, 2, 7168),
        ("sums of rows", 1, 0, 7168 * 2),
    )
    for name, op, wire, row in kinds:
        times: dict[str, list[float]] = {}
        for number, protocol in enumerate(PROTOCOLS):
            found = kernels(ranks, replays, tokens, MOE_PERF_WIRE=wire, MOE_PERF_PROTOCOL=number)
            times[protocol] = [pair[op] for pair in found]
        for i, count in enumerate(tokens):
            note(f"T {count} {name}, {' / '.join(PROTOCOLS)}, us", " / ".join(f"{times[p][i]:.1f}" for p in PROTOCOLS))
        first = faster_from(tokens, times)
        note(f"{name}: BULK faster than LL", f"from {first} tokens" if first else "never")
        if first:
            note(f"{name}: bytes to a peer there", f"{first * row / 2**20:.2f} MiB")
    for count in (512, 1024, 4096):
        for senders in (44, 66, 88, 110, 132, 154, 176):
            found = kernels(ranks, replays, (count,), MOE_PERF_PROTOCOL=3, MOE_DISPATCH_SENDERS=senders)
            note(f"T {count} dispatch, BULK, {senders} blocks send, us", f"{found[0][0]:.1f}")


def main() -> None:
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, check=False).stdout
    gpus = listed.count("GPU ")
    if gpus == 0:
        print("skipped: no GPU")
        sys.exit(77)
    numbers = [int(word) for word in sys.argv[1:] if word != "sweep"]
    ranks = numbers[0] if numbers else gpus
    replays = numbers[1] if len(numbers) > 1 else 200
    print(f"{ranks} ranks on {gpus} GPUs, medians of {replays} replays of 20 steps")
    if "sweep" in sys.argv:
        sweep(ranks, max(replays // 10, 5))
        return
    # NCCL takes no two ranks on a GPU.
    missed = uniform(ranks, replays, *(("--compare", "alltoall") if ranks <= gpus else ()))
    if ranks > 1:
        missed += skewed(ranks, replays)
    if ranks <= gpus:
        for kind, (target, must) in enumerate(LATE_TARGETS.get(ranks, ((None, None), (None, None))), 1):
            value = late(ranks, replays, kind)
            what = f"T 128 combine, its weights with it, {kind} call{'s' if kind > 1 else ''}, us"
            missed += judge(what, f"{value:.1f}", value, target, must)
    protocols(ranks, max(replays // 4, 5))
    print(f"{missed} targets missed")


if __name__ == "__main__":
    try:
        main()
    except FileNotFoundError:
        print("skipped: no GPU")
        sys.exit(77)
