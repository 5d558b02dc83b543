#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The public header, the export map, the library's symbols, the manual and the tests name the same functions.

check_symbols.py LIBRARY     compare all five
check_symbols.py --write     write the export map from the header
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAP = ROOT / "src/heddle.map"
MANUAL = ROOT / "doc/man/libheddle.3.scd"


def header_functions():
    text = (ROOT / "include/heddle.h").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return set(re.findall(r"HDL_API\b[^;{]*?\b(hdl_\w+)\s*\(", text))


def map_functions():
    return set(re.findall(r"\b(hdl_\w+);", MAP.read_text(encoding="utf-8")))


def library_functions(library):
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True,
                           text=True).stdout.split("\n")
    names = {line.split()[-1].split("@")[0] for line in lines if line.strip()}
    return {n for n in names if n != "HEDDLE_0"}


def manual_functions():
    return set(re.findall(r"\*(hdl_\w+)\*", MANUAL.read_text(encoding="utf-8")))


def tested_functions():
    found = set()
    for path in (ROOT / "test").rglob("*"):
        if path.suffix in (".c", ".py", ".h", ".cc") and path.is_file():
            found |= set(re.findall(r"\bhdl_\w+", path.read_text(encoding="utf-8")))
    return found


def write_map():
    names = "\n".join(f"        {n};" for n in sorted(header_functions()))
    MAP.write_text("HEDDLE_0 {\n    global:\n" + names + "\n    local:\n        *;\n};\n", encoding="utf-8")


def compare(what, found, expected, missing_only=False):
    missing = sorted(expected - found)
    surplus = [] if missing_only else sorted(found - expected)
    for name in missing:
        print(f"{what}: {name} is missing")
    for name in surplus:
        print(f"{what}: {name} is not in heddle.h")
    return len(missing) + len(surplus)


def main(argument):
    if argument == "--write":
        write_map()
        return 0
    public = header_functions()
    problems = compare("src/heddle.map", map_functions(), public)
    problems += compare(argument, library_functions(argument), public)
    problems += compare("doc/man/libheddle.3.scd", manual_functions(), public)
    problems += compare("test", tested_functions(), public, missing_only=True)
    print(f"{len(public)} public functions, {problems} problems")
    return problems > 0


sys.exit(main(sys.argv[1]))
