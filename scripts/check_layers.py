#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes follow the order of the layers; libuv, libfabric, libsodium and CUDA stay in theirs."""
import pathlib
import re
import sys

ALLOWED = {
    "base": {"base"},
    "gpu": {"gpu", "base"},
    "ctl": {"ctl", "base"},
    "net": {"net", "base", "gpu"},
    "host": {"host", "base", "ctl"},
    "group": {"group", "base", "net", "ctl", "host", "gpu"},
    "moe": {"moe", "base", "gpu", "net", "group"},
}
# Headers of other libraries, and the layers that may see them.
FOREIGN = [
    (re.compile(r"uv\.h$|uv/"), {"host"}),
    (re.compile(r"sodium\.h$|sodium/"), {"host", "ctl"}),
    (re.compile(r"rdma/"), {"net"}),
    (re.compile(r"cuda|nvrtc|nvml|cooperative_groups"), {"gpu"}),
]
# The control plane has no socket, thread, clock or float.
FORBIDDEN_IN_CTL = re.compile(
    r"sys/socket\.h|netinet|pthread|threads\.h|time\.h|math\.h|poll\.h|unistd\.h|base/(clock|futex)\.h"
)
TRANSPORT = re.compile(r"net/(self|shm|fabric|cuda|proxy)(_|$)")
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.M)


def check_own(path, layer, name):
    parts = name.split("/")
    if len(parts) == 1:
        return None if name in ("heddle.h", "heddle_device.cuh") else f"'{name}' is not LAYER/FILE"
    if parts[0] not in ALLOWED:
        return f"'{name}' is in no layer"
    if layer is not None and parts[0] not in ALLOWED[layer]:
        return f"{layer} may not include {parts[0]}"
    mine, other = TRANSPORT.match(f"{layer}/{path.stem}"), TRANSPORT.match(name.rsplit(".", 1)[0])
    if mine and other and mine.group(1) != other.group(1):
        return f"a transport may not include another one: {name}"
    return None


def check_foreign(path, layer, name):
    if layer == "ctl" and FORBIDDEN_IN_CTL.search(name):
        return f"ctl may not include {name}"
    if path.suffix in (".cu", ".cuh"):
        return None
    for pattern, layers in FOREIGN:
        if pattern.match(name) and layer not in layers:
            return f"only {', '.join(sorted(layers))} may include {name}"
    return None


def main():
    problems = 0
    root = pathlib.Path(__file__).resolve().parent.parent / "src"
    files = [p for p in root.rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh", ".def")]
    for path in sorted(files):
        relative = path.relative_to(root)
        layer = relative.parts[0] if len(relative.parts) > 1 else None
        for quote, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            check = check_own if quote == '"' else check_foreign
            problem = check(path, layer, name)
            if problem:
                problems += 1
                print(f"src/{relative}: {problem}")
    print(f"{len(files)} files, {problems} problems")
    return problems > 0


sys.exit(main())
