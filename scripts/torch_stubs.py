#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_stubs.py SITE_PACKAGES OUT: empty stand-ins for the GPU libraries that a torch built for GPUs is linked to.

With OUT in LD_LIBRARY_PATH such a torch runs on the CPU without gigabytes of packages: its tests need no more.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sys

SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+)\.so|ld-linux")


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    site, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    libraries = [*site.glob("torch/lib/*.so*"), *site.glob("torch/_C*.so")]
    needed: set[str] = set()
    undefined: set[str] = set()
    defined: set[str] = set()
    owner: dict[str, str] = {}  # of a symbol version
    for library in libraries:
        needed |= set(re.findall(r"NEEDED\).*\[(.*)\]", output("readelf", "-d", str(library))))
        file = ""
        for line in output("readelf", "-VW", str(library)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            if found := re.search(r"Name: (\S+)\s+Flags", line):
                owner[found[1]] = file
        for line in output("nm", "-D", str(library)).splitlines():
            kind, name = line.split()[-2:]
            if kind == "U":
                undefined.add(name)
            elif kind not in "vw":
                defined.add(name.split("@")[0])
    missing = sorted(n for n in needed if n not in {library.name for library in libraries} and not SYSTEM.match(n))
    symbols: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        version = version.lstrip("@")
        if name in defined:
            continue
        if owner.get(version) in missing:
            symbols[owner[version]][version].add(name)
        elif not version and re.match(r"cu|nccl|nv", name):
            symbols[missing[0]][""].add(name)
    for library_name in missing:
        versions = symbols[library_name]
        code = "".join(f"int {name}(void) {{ return 999; }}\n" for names in versions.values() for name in sorted(names))
        script = "\n".join(f"{v} {{ global: {'; '.join(sorted(names))}; }};" for v, names in versions.items() if v)
        (out / "stub.c").write_text(code)
        (out / "stub.map").write_text(script)
        options = [f"-Wl,--version-script={out / 'stub.map'}"] if script else []
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library_name}", *options]
        output(*command, "-o", str(out / library_name), str(out / "stub.c"))


if __name__ == "__main__":
    main()
