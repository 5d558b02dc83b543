#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Heddle, Open MPI and gloo side by side, alternating, in one run.

    ./run bench [--quick] [--rounds N] [--only PART,...]

Parts: 2, 4, 8 (ranks), fabric, start. Writes table.md, results.json and plot.png under build/bench/.

On a virtual machine the distance between two cores changes while one looks on: the host moves them
between hardware threads of one core, cores with a common cache, and cores without. Every time from 8 B
to 1 MiB follows it by a factor of two to ten. So the distance (a word's way there and back) is measured
before and after each program, and a ratio divides Heddle's time by the median of the peer's times at the
same distance; shown are the median and the smallest and largest over the rounds, and the median at each
distance. What ran while the distance changed is not compared."""
import argparse
import datetime
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
OUT = BUILD / "bench"
HEDDLE = str(BUILD / "heddle")
OPS = ["allreduce", "broadcast", "allgather", "alltoall", "barrier", "pingpong"]
IN_PLACE = {"allreduce", "broadcast"}
SIZES = [8, 4096, 1 << 20, 64 << 20]
SMALL = {"allreduce", "barrier", "allgather", "alltoall", "pingpong"}
CALM = {"allreduce", "barrier", "allgather"}


def mpi_command(ranks, cma, idle):
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks),
            "--mca", "pml", "ob1", "--mca", "btl", "self,vader",
            "--mca", "btl_vader_single_copy_mechanism", "cma" if cma else "none",
            "--mca", "mpi_yield_when_idle", "1" if idle else "0"]


VARIANTS = [(cma, idle) for cma in (True, False) for idle in (True, False)]


def target(ranks, op, size):
    """Largest allowed ratio to Open MPI and to gloo; None = none was set."""
    if ranks == 8:
        return (1.0, None) if op == "allreduce" and size == 8 else (None, None)
    if op == "barrier":
        size = 8
    if ranks == 2:
        if size == 8:
            return (1.0, 1 / 50) if op in SMALL else (None, None)
        if size == 4096:
            return (0.8, 1 / 30) if op in SMALL else (None, None)
        if size == 1 << 20:
            return 0.6 if op == "allreduce" else 0.8, 1 / 6
        return 0.5 if op == "allreduce" else 0.8, 0.45
    if size <= 4096:
        return (1.0, 1 / 30) if op in CALM else (None, None)
    if size == 1 << 20:
        return 0.7, 1 / 6
    return (0.5, 0.5) if op == "allreduce" else (None, None)


def run(command, timeout=60, **extra):
    """A program's JSON lines; one that hangs is ended with all that it started."""
    env = dict(os.environ, PYTHONWARNINGS="ignore", OMPI_MCA_btl_base_warn_component_unused="0", **extra)
    output = errors = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT,
                          stdin=subprocess.DEVNULL, start_new_session=True) as child:
        for sign, patience in ((signal.SIGTERM, timeout), (signal.SIGKILL, 5)):
            try:
                output, errors = child.communicate(timeout=patience)
                break
            except BaseException as problem:
                say(f"ended with signal {sign}: {' '.join(command)}")
                os.killpg(child.pid, sign)
                if not isinstance(problem, subprocess.TimeoutExpired):
                    raise
    if child.returncode != 0:
        say(f"failed with {child.returncode}: {' '.join(command)}\n{errors[-2000:]}")
    lines = (line[line.find("{"):] for line in output.splitlines() if "{" in line)
    return [json.loads(line) for line in lines]


def say(text):
    print(text, file=sys.stderr, flush=True)


def distance():
    """Nanoseconds of a word's way from one core to another and back, and the class that it belongs to:
    distances of one class differ by less than a factor of four."""
    lines = run([str(OUT / "first"), "cores"], timeout=20)
    ns = lines[0]["cores_ns"] if lines else 0
    return ns, round(math.log2(ns) / 2) if ns else None


class Results:
    """Median times by (peer, ranks, op, asked size): one for each round, as (us, class of distance)."""

    def __init__(self):
        self.times = {}
        self.seen = {}

    def at_one_distance(self, measure):
        """Runs measure() and returns what it returned, and the class if it was the same before and after."""
        before, first = distance()
        lines = measure()
        after, last = distance()
        place = first if first == last else None
        if place is not None:
            self.seen.setdefault(place, []).extend((before, after))
        return lines, place

    def name(self, place):
        return f"{statistics.median(self.seen[place]):.0f} ns"

    def add(self, peer, ranks, op, size, us, place=None):
        self.times.setdefault((peer, ranks, op, size), []).append((us, place))

    def get(self, peer, ranks, op, size, place=None):
        return [us for us, at in self.times.get((peer, ranks, op, size), []) if place in (None, at)]

    def best_mpi(self, ranks, op, size, place=None):
        """The setting that is the fastest (at that distance), or None."""
        found = [(statistics.median(times), variant) for variant in VARIANTS
                 if (times := self.get(variant, ranks, op, size, place))]
        return min(found)[1] if found else None

    def worthwhile(self, ranks, op, sizes):
        """Open MPI's settings that came near the fastest at any size so far; busy ranks that outnumber the
        cores take minutes for nothing."""
        def near(variant):
            times = [(self.get(variant, ranks, op, size), self.get(self.best_mpi(ranks, op, size), ranks, op, size))
                     for size in sizes]
            return any(not mine or statistics.median(mine) < 2 * statistics.median(best) for mine, best in times)

        return [variant for variant in VARIANTS if near(variant)]

    def ratios(self, ranks, op, size):
        """Ratios to Open MPI, by class of distance."""
        found = {}
        for place in sorted(self.seen):
            variant = self.best_mpi(ranks, op, size, place)
            ours = self.get("heddle", ranks, op, size, place)
            if ours and variant is not None:
                theirs = statistics.median(self.get(variant, ranks, op, size, place))
                found[place] = [us / theirs for us in ours]
        return found


def listed(lines, op, sizes):
    """Pairs a program's lines of one operation with the sizes that were asked for."""
    mine = [line for line in lines if line["op"] == op]
    return zip([0] if op == "barrier" else sizes, mine)


def one_round(results, ranks, ops, sizes, seconds):
    """One operation after the other, the peers next to each other: gloo starts slowly and comes last."""
    asked = ",".join(map(str, sizes))

    def keep(peer, wanted, command):
        lines, place = results.at_one_distance(lambda: run(command))
        for op in wanted:
            for size, line in listed(lines, op, sizes):
                if not line.get("checked", True):
                    say(f"WRONG DATA: {line}")
                results.add(peer, ranks, op, size, line["p50_us"], place)

    for op in ops:
        keep("heddle", [op], [HEDDLE, "perf", op, "-n", str(ranks), "--json", "--time", str(seconds), "--bytes",
                              asked] + (["--in-place"] if op in IN_PLACE else []))
        for variant in results.worthwhile(ranks, op, sizes):
            keep(variant, [op], mpi_command(ranks, *variant) + [str(OUT / "mpi_perf"), str(seconds), op, asked])
    if ranks <= 4:
        keep("gloo", ops, [HEDDLE, "run", "-n", str(ranks), "--raw", "--", sys.executable, "bench/gloo_perf.py",
                           str(seconds), ",".join(ops), asked])


# ------------------------------------------------------------------------------------------- parts

def ranks_part(results, ranks, args, save):
    ops = ["allreduce"] if ranks == 8 else OPS
    sizes = [8] if ranks == 8 else SIZES
    for number in range(args.rounds):
        say(f"{ranks} ranks: round {number + 1} of {args.rounds}")
        one_round(results, ranks, ops, sizes, args.seconds)
        save()


def fabric_part(results, args):
    """Two network namespaces: all_reduce against gloo, a large send against iperf3."""
    sizes = [8, 4096, 1 << 20]
    rates = []
    for number in range(args.rounds):
        say(f"fabric over two namespaces: round {number + 1} of {args.rounds}")
        lines = run([HEDDLE, "perf", "allreduce", "-n", "2", "--hosts", "2", "--json", "--in-place", "--time",
                     str(args.seconds), "--bytes", ",".join(map(str, sizes))])
        for size, line in listed(lines, "allreduce", sizes):
            results.add("heddle", "fabric", "allreduce", size, line["p50_us"])
        lines = run([HEDDLE, "run", "-n", "2", "--hosts", "2", "--raw", "--", sys.executable, "bench/gloo_perf.py",
                     str(args.seconds), "allreduce", ",".join(map(str, sizes))], GLOO_SOCKET_IFNAME="heddle0")
        for size, line in listed(lines, "allreduce", sizes):
            results.add("gloo", "fabric", "allreduce", size, line["p50_us"])
        send = run([HEDDLE, "perf", "pingpong", "-n", "2", "--hosts", "2", "--json", "--bytes", "64M",
                    "--time", str(max(args.seconds, 1))])
        iperf = run([HEDDLE, "run", "-n", "2", "--hosts", "2", "--raw", "--", "sh", "bench/iperf.sh",
                     str(1 if args.quick else 3)])
        if send and iperf:
            rates.append((send[0]["algbw_GBps"], iperf[0]["GBps"]))
    return rates


def start_part(args):
    """Seconds from the launcher's start to the last rank's first all_reduce, and memory; idle time."""
    found = {"heddle": [], "mpi": [], "heddle_kib": [], "mpi_kib": [], "idle": []}
    for number in range(args.rounds):
        say(f"start and memory: round {number + 1} of {args.rounds}")
        for peer, command in (("heddle", [HEDDLE, "run", "-n", "4", "--raw", "--", str(OUT / "first")]),
                              ("mpi", mpi_command(4, True, True) + [str(OUT / "mpi_perf"), "first"])):
            began = time.time()
            lines = run(command)
            if len(lines) == 4:
                found[peer].append(max(line["done_us"] for line in lines) / 1e6 - began)
                found[peer + "_kib"].append(max(line["private_kib"] for line in lines))
    say("idle ranks")
    lines = run([HEDDLE, "run", "-n", "2", "--raw", "--", str(OUT / "first"), "3" if args.quick else "10"])
    found["idle"] = [line["idle_percent"] for line in lines]
    return found


# ------------------------------------------------------------------------------------------- report

def size_text(size):
    for unit, step in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= step:
            return f"{size // step} {unit}"
    return f"{size} B" if size else "-"


def time_text(us):
    if us >= 1000:
        return f"{us / 1000:.2f} ms"
    return f"{us:.2f} us" if us < 100 else f"{us:.0f} us"


def verdict(value, limit):
    if limit is None or value is None:
        return ""
    return "ok" if value <= limit else "**missed**"


def spread(values):
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def ratio_cells(values, limit):
    if not values:
        return "-", "", ""
    bound = "" if limit is None else (f"1/{1 / limit:.0f}" if limit < 0.3 else f"{limit:.2f}")
    return spread(values), bound, verdict(statistics.median(values), limit)


def by_distance(results, ratios, limit):
    return ", ".join(f"{results.name(place)} {statistics.median(values):.2f}" +
                     ("!" if limit and statistics.median(values) > limit else "")
                     for place, values in ratios.items())


def row(results, ranks, op, size):
    ours = results.get("heddle", ranks, op, size)
    if not ours:
        return None, None
    ratios = results.ratios(ranks, op, size)
    place = max(ratios, key=lambda at: len(ratios[at])) if ratios else None  # times are shown at one distance
    variant = results.best_mpi(ranks, op, size, place)
    mpi = results.get(variant, ranks, op, size, place) if variant is not None else []
    gloo = results.get("gloo", ranks, op, size)
    limits = target(ranks, op, size) if isinstance(ranks, int) else (None, 1.0 if size == 8 else None)
    slow = statistics.median(gloo) if gloo else 0
    cells = [str(ranks), op, size_text(size), time_text(statistics.median(results.get("heddle", ranks, op, size, place))),
             time_text(statistics.median(mpi)) if mpi else "-",
             ("cma" if variant[0] else "copy") + (", yield" if variant[1] else "") if mpi else "-",
             *ratio_cells(sum(ratios.values(), []), limits[0]), by_distance(results, ratios, limits[0]),
             time_text(slow) if gloo else "-", *ratio_cells([us / slow for us in ours] if gloo else [], limits[1])]
    return "| " + " | ".join(cells) + " |", variant if mpi else None


def table(results, parts, rates, start, machine):
    head = ["ranks", "operation", "bytes", "Heddle", "Open MPI", "its setting", "ratio", "target", "",
            "by distance", "gloo", "ratio", "target", ""]
    lines = [f"# Side by side, {machine}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    used = set()
    for ranks in parts:
        for op in OPS:
            for size in [0] if op == "barrier" else SIZES:
                text, variant = row(results, ranks, op, size)
                if text:
                    lines.append(text)
                    used.add((ranks, variant) if variant else None)
    lines += ["", "How often each algorithm passes over memory: doc/design/group.md.", ""]
    if rates:
        share = statistics.median(ours / theirs for ours, theirs in rates)
        lines.append(f"fabric, 64 MiB send: {statistics.median(r[0] for r in rates):.2f} GB/s, iperf3 "
                     f"{statistics.median(r[1] for r in rates):.2f} GB/s, share {share:.2f} "
                     f"({min(a / b for a, b in rates):.2f} to {max(a / b for a, b in rates):.2f}), target 0.80: "
                     + ("ok" if share >= 0.8 else "**missed**"))
    if start and start["heddle"]:
        ours, mib = statistics.median(start["heddle"]), statistics.median(start["heddle_kib"]) / 1024
        lines.append(f"start to first all_reduce, 4 ranks: {ours:.3f} s, target 0.32 s: {verdict(ours, 0.32)}")
        if start["mpi"]:
            both = [a / b for a, b in zip(start["heddle"], start["mpi"])]
            lines.append(f"the same, Open MPI: {statistics.median(start['mpi']):.3f} s, ratio {spread(both)}, "
                         f"target 0.50: {verdict(statistics.median(both), 0.5)}")
        lines.append(f"private memory after it: {mib:.1f} MiB, target 12 MiB: {verdict(mib, 12)}" +
                     (f" (Open MPI {statistics.median(start['mpi_kib']) / 1024:.1f} MiB)" if start["mpi_kib"] else ""))
        if start["idle"]:
            lines.append(f"idle rank: {max(start['idle']):.3f} % of a core, target 0.2 %: "
                         f"{verdict(max(start['idle']), 0.2)}")
    lines += ["", "Open MPI's command lines (the fastest of cma and copy, yield and not, for each row):", ""]
    for ranks, (cma, idle) in sorted(pair for pair in used if pair):
        lines.append("    " + " ".join(mpi_command(ranks, cma, idle)) + " mpi_perf ...")
    return "\n".join(lines) + "\n"


def plot(results, parts):
    try:
        import matplotlib
    except ImportError:
        say("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot
    shown = [ranks for ranks in parts if ranks in (2, 4)]
    if not shown:
        return
    figure, axes = pyplot.subplots(len(shown), len(OPS), figsize=(3 * len(OPS), 3 * len(shown)), squeeze=False)
    for line, ranks in enumerate(shown):
        for column, op in enumerate(OPS):
            axis = axes[line][column]
            sizes = [0] if op == "barrier" else SIZES
            for name in ("heddle", "mpi", "gloo"):
                points = []
                for size in sizes:
                    key = results.best_mpi(ranks, op, size) if name == "mpi" else name
                    times = results.get(key, ranks, op, size)
                    if times:
                        points.append((max(size, 1), statistics.median(times)))
                if points:
                    axis.plot(*zip(*points), marker="o", label={"mpi": "Open MPI"}.get(name, name))
            axis.set(xscale="log", yscale="log", title=f"{op}, {ranks} ranks", xlabel="bytes", ylabel="us")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(OUT / "plot.png", dpi=110)


def machine_text():
    memory = next(line.split()[1] for line in open("/proc/meminfo", encoding="ascii"))
    copy = run([str(OUT / "first"), "copy"])
    rate = f", one core copies {copy[0]['copy_GBps']:.1f} GB/s" if copy else ""
    model = [line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if "model name" in line]
    return (f"{datetime.date.today()}, {os.cpu_count()} cores ({model[0] if model else 'unknown'}), "
            f"{int(memory) / (1 << 20):.0f} GiB{rate}")


def build_programs():
    OUT.mkdir(parents=True, exist_ok=True)
    library = str(BUILD / "src")
    subprocess.run(["mpicc", "-O3", "-o", str(OUT / "mpi_perf"), "bench/mpi_perf.c"], cwd=ROOT, check=True)
    subprocess.run(["cc", "-O2", "-Iinclude", "-o", str(OUT / "first"), "bench/first.c", "-L" + library, "-lheddle",
                    "-Wl,-rpath," + library], cwd=ROOT, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--rounds", type=int, help="alternations (default 5)")
    parser.add_argument("--only", default="2,4,8,fabric,start", help="parts to run")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.seconds = 0.05 if args.quick else 0.25
    only = args.only.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    build_programs()
    run_parts(only, args, machine_text())


def report(state, machine):
    """Written after every round and part, so that an interrupted run keeps what it has."""
    text = table(state["results"], state["parts"], state["rates"], state["start"], machine)
    (OUT / "table.md").write_text(text, encoding="utf-8")
    kept = [{"peer": "openmpi" if isinstance(key[0], tuple) else key[0],
             "setting": list(key[0]) if isinstance(key[0], tuple) else None,
             "ranks": key[1], "op": key[2], "bytes": key[3], "p50_us": [us for us, _ in times],
             "distance": [place and state["results"].name(place) for _, place in times]}
            for key, times in state["results"].times.items()]
    (OUT / "results.json").write_text(json.dumps({"machine": machine, "times": kept, "rates": state["rates"],
                                                  "start": state["start"]}), encoding="utf-8")
    return text


def run_parts(only, args, machine):
    state = {"results": Results(), "rates": [], "start": None, "parts": []}
    text = ""
    for part in (2, 4, 8, "fabric", "start"):
        if str(part) not in only:
            continue
        if part == "start":
            state["start"] = start_part(args)
        else:
            state["parts"].append(part)
            if part == "fabric":
                state["rates"] = fabric_part(state["results"], args)
            else:
                ranks_part(state["results"], part, args, lambda: report(state, machine))
        text = report(state, machine)
    plot(state["results"], state["parts"])
    print(text)
    say(f"written to {OUT.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
