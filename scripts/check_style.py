#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""First lines, lengths of files and functions, a README in every folder of code that names its files."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_FILE = 1000
MAX_FUNCTION = 60
C = {".c", ".h", ".cu", ".cuh", ".def"}
HASH = {".sh", ".py", ".build", ".txt", ".ini", ".toml"}
README_FOLDERS = ["src/base", "src/gpu", "src/ctl", "src/net", "src/host", "src/group", "src/moe", "tools",
                  "tools/crew", "tools/demo", "tools/perf", "tools/sim", "scripts", "bench", "doc", "examples", "test",
                  "test/unit", "test/ranks", "test/sim", "test/fuzz", "test/gpu", "test/python", "python",
                  "python/heddle/torch"]
# Words of other places that must not leak into the tree.
FORBIDDEN = re.compile(r"\.\./shared|/work/|Co-Authored-By", re.I)


def spdx_problem(path, lines):
    if path.suffix in C:
        ok = lines and lines[0].startswith("/* SPDX-License-Identifier: Apache-2.0 */")
        purpose = len(lines) > 1 and lines[1].startswith(("/*", "//"))
        if ok and not purpose:
            return "second line does not say the file's purpose"
    elif path.suffix in HASH or (lines and lines[0].startswith("#!")):
        ok = any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2])
    else:
        return None
    return None if ok else "no SPDX first line"


def long_functions(lines):
    """Functions open with '{' and close with '}' in the first column."""
    start = None
    for number, line in enumerate(lines, 1):
        if line == "{":
            start = number
        elif line.startswith("}") and start:
            if number - start - 1 > MAX_FUNCTION and line == "}":
                yield start, number - start - 1
            start = None


def problems_of(path):
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    problem = spdx_problem(path, lines)
    if problem:
        yield 1, problem
    if path.suffix in C | {".py", ".sh"} and len(lines) > MAX_FILE:
        yield MAX_FILE, f"{len(lines)} lines, more than {MAX_FILE}"
    if path.suffix in C:
        for number, length in long_functions(lines):
            yield number, f"function of {length} lines, more than {MAX_FUNCTION}"
    for number, line in enumerate(lines, 1):
        if line != line.rstrip() and path.suffix != ".md":
            yield number, "white space at the end"
        if FORBIDDEN.search(line) and path.name != "check_style.py":
            yield number, "names a place outside the tree"
    if text and not text.endswith("\n"):
        yield len(lines), "no newline at the end"


def unnamed(folder, names):
    """Files of the folder that its README does not name, with this or another ending."""
    readme = ROOT / folder / "README.md"
    if not readme.is_file():
        return ["README.md"]
    words = {word.partition(".")[0] for word in re.findall(r"[\w.]+", readme.read_text(encoding="utf-8"))}
    here = [path for path in map(pathlib.PurePath, names) if str(path.parent) == folder]
    return [path.name for path in here if path.stem not in words | {"README", "meson", "__init__"}]


def main():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.split("\n")
    count = 0
    for name in sorted(n for n in listed if n and not n.startswith("test/fuzz/corpus/")):
        path = ROOT / name
        if not path.is_file() or path.suffix in (".png", ".svg", ".bin") or name == "LICENSE":
            continue
        for number, problem in problems_of(path):
            count += 1
            print(f"{name}:{number}: {problem}")
    for folder in README_FOLDERS:
        for name in unnamed(folder, listed):
            count += 1
            print(f"{folder}/README.md: no word of {name}")
    print(f"{count} problems")
    return count > 0


sys.exit(main())
