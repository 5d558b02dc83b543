#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""command.py HEDDLE PART: the command as a person uses it; parts: run, signals, perf, demo, info, help."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

HEDDLE = sys.argv[1]
MANUAL = pathlib.Path(__file__).resolve().parent.parent.parent / "doc/man/heddle.1.scd"
KEYS = ["op", "ranks", "bytes", "transport", "algorithm", "min_us", "p50_us", "p99_us", "algbw_GBps", "busbw_GBps",
        "checked"]
OPS = ["allreduce", "broadcast", "reduce", "allgather", "reducescatter", "alltoall", "gather", "scatter", "barrier",
       "sendrecv", "pingpong"]
FACTORS = {"allreduce": 1.5, "allgather": 0.75, "reducescatter": 0.75, "alltoall": 0.75, "gather": 0.75,
           "scatter": 0.75}


def heddle(*args, **env):
    return subprocess.run([HEDDLE, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          timeout=110, env={**os.environ, **env}, check=False)


def check(condition, what, done=None):
    if not condition:
        print("wrong:", what)
        if done:
            print(done.returncode, done.stdout, done.stderr)
        sys.exit(1)


def can_make_hosts():
    return heddle("run", "-n", 2, "--hosts", 2, "--", "true").returncode == 0


def test_help():
    done = heddle("help")
    check(done.returncode == 0 and "run" in done.stdout and "perf" in done.stdout, "help", done)
    check(heddle("--help").stdout == done.stdout and heddle().stdout == done.stdout, "three ways to the help")
    check(heddle("version").stdout.startswith("heddle 0."), "version")
    commands = re.findall(r"^  (\w+) ", done.stdout, re.M)[:-1]  # but help
    manual = MANUAL.read_text(encoding="utf-8").replace("*", "")
    check(len(commands) >= 7, "commands", done)
    for command in [[c] for c in commands] + [["perf", "moe"], ["perf", "recovery"], ["perf", "--micro"]]:
        done = heddle(*command, "--help")
        check(done.returncode == 0 and "usage: heddle " + command[0] in done.stdout, f"{command} --help", done)
        check(heddle("help", *command).stdout == done.stdout, f"help {command}")
        for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", done.stdout, re.M):
            check(option == "--help" or re.search(option + r"\b", manual), f"{command} {option} is not in heddle(1)")
        done = heddle(*command, "--nonsense")
        check(done.returncode == 2 and done.stderr.count("\n") == 1 and "--nonsense" in done.stderr, "one sentence", done)
    for args in (["nonsense"], ["perf"], ["perf", "nonsense"], ["perf", "allreduce", "--bytes", "8,x"], ["run", "-n", "0", "a"],
                 ["run", "a"], ["run", "-n", "2"], ["perf", "barrier", "-n", "x"], ["info", "x"], ["demo", "a", "b"],
                 ["perf", "allreduce", "--transport", "pigeon"], ["perf", "moe", "--dtype", "f16"],
                 ["perf", "recovery", "--transport", "pigeon"], ["perf", "--micro", "pigeon"],
                 ["chaos", "--coordinator", "none"], ["sim", "--plane", "x"], ["coordinator", "--listen", "here"],
                 ["coordinator", "--token-file", ""], ["coordinator", "--dead-after", "0"], ["coordinator", "--grace", "0"],
                 ["chaos", "--dead-after", "0.1"], ["sim", "--seeds", 2**64 - 1], ["sim", "--num-faults", 2**31 - 1],
                 ["sim", "--capacity", 4], ["sim", "--link", 2], ["sim", "--link", 0], ["sim", "--second", "kill"],
                 ["sim", "--exhaustive", "--json"], ["perf", "moe", "-n", 3], ["perf", "moe", "--topk", 65],
                 ["perf", "moe", "--tokens", 2**31], ["demo", "-n", 500]):
        done = heddle(*args)
        check(done.returncode == 2 and done.stderr.count("\n") == 1, " ".join(map(str, args)), done)


def test_run():
    done = heddle("run", "-n", 3, "--", "sh", "-c", "echo $RANK of $WORLD_SIZE; echo err >&2")
    check(done.returncode == 0, "run", done)
    check(sorted(done.stdout.splitlines()) == [f"[{r}] {r} of 3" for r in range(3)], "prefixed output", done)
    check(sorted(done.stderr.splitlines()) == [f"[{r}] err" for r in range(3)], "prefixed errors", done)
    done = heddle("run", "--ranks", 2, "--raw", "sh", "-c", "echo $#", "x", "-n", "y")
    check(done.stdout == "2\n2\n", "the program's own options", done)
    done = heddle("run", "-n", 4, "--", "sh", "-c", "test $RANK != 2 || exit 7")
    check(done.returncode == 7 and "rank 2" in done.stderr, "exit code of the first failure", done)
    done = heddle("run", "-n", 2, "--", "sh", "-c", "kill -SEGV $$")
    check(done.returncode == 128 + signal.SIGSEGV, "a killed rank", done)
    begin = time.monotonic()
    done = heddle("run", "-n", 2, "--timeout", 0.5, "--", "sleep", 60)
    check(done.returncode == 124 and time.monotonic() - begin < 20, "timeout", done)
    done = heddle("run", "-n", 2, "--grace", 0.3, "--", "sh", "-c", "test $RANK = 1 && exit 3; sleep 60")
    check(done.returncode == 3, "grace", done)
    done = heddle("run", "-n", 2, "--", "/nonsense")
    check(done.returncode == 127 and done.stderr.count("\n") == 1, "no such program", done)
    with tempfile.TemporaryDirectory() as folder:
        mark = os.path.join(folder, "mark")
        done = heddle("run", "-n", 2, "--", "sh", "-c", f"(setsid sleep 2; touch {mark}) & exit 0")
        time.sleep(2.5)
        check(done.returncode == 0 and not os.path.exists(mark), "what a rank leaves running", done)
        check(re.fullmatch(r"heddle: ended \d+ processes that the ranks had left running\n", done.stderr), "said so", done)
    if can_make_hosts():
        done = heddle("run", "-n", 4, "--hosts", 2, "--", "sh", "-c", "echo $LOCAL_RANK $LOCAL_WORLD_SIZE $HEDDLE_INTERFACE")
        check(sorted(done.stdout.splitlines()) == ["[0] 0 2 10.77.0.1", "[1] 1 2 10.77.0.1", "[2] 0 2 10.77.0.2",
                                                   "[3] 1 2 10.77.0.2"], "hosts", done)
        only_ipv6 = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec $0 perf barrier -n 2"
        done = subprocess.run(["unshare", "--net", "sh", "-c", only_ipv6, HEDDLE], capture_output=True, text=True,
                              timeout=110, check=False)
        check(done.returncode == 0, "a machine with IPv6 only", done)


def test_signals():
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([HEDDLE, "run", "-n", "2", "--", "sh", "-c",
                               "trap 'echo got; exit 0' TERM INT; echo up; while :; do sleep 0.1; done"],
                              stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as launcher:
            lines = [launcher.stdout.readline() for _ in range(2)]
            check(all("up" in line for line in lines), "the ranks start")
            launcher.send_signal(number)
            rest = launcher.stdout.read()
            check(rest.count("got") == 2, f"signal {number} reaches both ranks: {rest}")
            check(launcher.wait(20) == 128 + number, f"exit code after signal {number}: {launcher.returncode}")


def rows(done):
    check(done.returncode == 0, "perf", done)
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_row(row, op, transport):
    check(list(row) == KEYS, f"keys {list(row)}")
    check(row["op"] == op and row["checked"] is True, f"row {row}")
    check(transport in row["transport"], f"transport {row['transport']}, not {transport}")
    check(0 < row["min_us"] <= row["p50_us"] <= row["p99_us"], f"times {row}")
    want = row["bytes"] / row["p50_us"] / 1e3
    check(abs(row["algbw_GBps"] - want) <= 0.01 * want + 1e-3, f"algbw of {row}")
    check(abs(row["busbw_GBps"] - want * FACTORS.get(op, 1)) <= 0.01 * want + 1e-3, f"busbw of {row}")


def test_perf():
    hosts = can_make_hosts()
    for op in OPS:
        for transport, extra in (("shm", []), ("fabric", ["--transport", "fabric"])) + (
                (("mixed", ["--hosts", "2"]),) if hosts else ()):
            found = rows(heddle("perf", op, "-n", 4, "--bytes", "8,4K,100000", "--iters", 5, "--json", *extra))
            check(len(found) == (1 if op == "barrier" else 3), f"rows of {op}")
            for row in found:
                check_row(row, op, transport)
            if op != "barrier":
                check([row["bytes"] for row in found] == [16 if op == "reducescatter" else 8, 4096, 100000], "bytes")
        done = heddle("perf", op, "-n", 2, "--bytes", "64", "--iters", 5, "--json", "--corrupt")
        check(done.returncode == 1, f"{op} with a spoiled byte", done)
        check([json.loads(line)["checked"] for line in done.stdout.splitlines()] == [False], "checked", done)
    done = heddle("perf", "allgather", "-n", 2, "--bytes", str(2**64 - 1))
    check(done.returncode == 1 and "not enough memory" in done.stderr, "a size that nobody has", done)
    done = heddle("perf", "moe", "--tokens", 2**31 - 1, "--hidden", 2**20, "--iters", 1)
    check(done.returncode == 1 and re.search("HDL_ENOMEM: .", done.stderr), "tokens that nobody has room for", done)
    found = rows(heddle("perf", "allreduce", "--ranks", 1, "--bytes", "1K", "--json", "--iters", 3))
    check(found[0]["transport"] == "self", "one rank alone")
    done = heddle("perf", "allreduce", "-n", 2, "--bytes", "8,1M", "--iters", 5)
    check(done.returncode == 0 and "MiB" in done.stdout and "yes" in done.stdout, "output for people", done)
    done = heddle("run", "-n", 2, "--raw", "--", HEDDLE, "perf", "broadcast", "--bytes", "64", "--json", "--iters", 3)
    check(len(rows(done)) == 1, "inside a launcher", done)
    done = heddle("run", "-n", 2, "--raw", "--", HEDDLE, "perf", "broadcast", "-n", "3", "--bytes", "64")
    check(done.returncode == 2, "another number of ranks than the launcher's", done)


def test_demo():
    for args in ([], ["-n", 3, __file__], ["-n", 1], ["-n", 7], ["--words"], [HEDDLE]):  # the last is binary
        done = heddle("demo", *args)
        check(done.returncode == 0 and done.stdout.splitlines()[-1] == "demo ok", f"demo {args}", done)
    with tempfile.NamedTemporaryFile() as empty:
        for path in (empty.name, "/nonsense", "/tmp"):
            done = heddle("demo", path)
            check(done.returncode == 1 and done.stderr.count("\n") == 1 and path in done.stderr,
                  f"demo of {path} is refused in one line", done)
    done = heddle("demo", "--elastic")
    check(done.returncode == 0 and done.stdout.splitlines()[-1] == "demo ok", "demo of a loss", done)
    for word in ("whole again", "at work", "ranks 012-", "ranks 0123"):
        check(word in done.stdout, f"'{word}' in the elastic demo", done)
    check(heddle("demo", "--elastic", "-n", 1).returncode == 2, "nobody is left")


def test_info():
    done = heddle("info", "--json")
    check(done.returncode == 0 and done.stdout.count("\n") == 1, "one line", done)
    info = json.loads(done.stdout)
    check(isinstance(info, dict) and info, "an object", done)
    text = heddle("info").stdout
    for word in ("version", "transports", "shm", "fabric", "self", "compiled_for"):
        check(word in text and word in done.stdout, f"'{word}' in info", done)
    knobs = [json.loads(line) for line in heddle("info", "--env", "--json").stdout.splitlines()]
    check("HEDDLE_LOG" in [knob["name"] for knob in knobs], "knobs")
    check(heddle("info", "--env").stdout.count("default") >= len(knobs), "knobs for people")
    done = heddle("info", "--report", HEDDLE_TOKEN="00" * 32)
    check(done.returncode == 0 and "kernel" in done.stdout and "HEDDLE_TOKEN" in done.stdout, "report", done)
    check("00" * 32 not in done.stdout, "the report tells no secret")
    json.loads(heddle("info", "--report", "--json").stdout)
    for command in ("info >/dev/full", "info >&-", "perf barrier --iters 5 >&-"):
        done = subprocess.run(f"{HEDDLE} {command}", shell=True, capture_output=True, text=True, timeout=60, check=False)
        check(done.returncode == 1 and "output could not be written" in done.stderr, command, done)


for name in ("RANK", "WORLD_SIZE", "HEDDLE_TOKEN"):
    os.environ.pop(name, None)
globals()["test_" + sys.argv[2]]()
