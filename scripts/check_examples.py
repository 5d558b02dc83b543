#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_examples.py BUILD: compiles every C program in the documents against the library and runs it
as 2 ranks. A program is a ```c block with a main; the line `/* run: N */` in it asks for N ranks."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "doc/guide.md"]
BLOCK = re.compile(r"^```c\n(.*?)^```", re.M | re.S)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    if done.returncode != 0:
        print(" ".join(command), "ended with", done.returncode)
        print(done.stdout + done.stderr)
    return done.returncode == 0


def check_program(build, name, text):
    source = build / f"{name}.c"
    source.write_text(text, encoding="utf-8")
    program = str(build / name)
    library = build / "src"
    compiled = run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", str(source), "-o", program,
                    f"-L{library}", "-lheddle", f"-Wl,-rpath,{library}"])
    ranks = re.search(r"/\* run: (\d+) \*/", text)
    return compiled and run([str(build / "heddle"), "run", "-n", ranks.group(1) if ranks else "2", "--timeout", "60",
                             "--", program])


def main(build):
    good = count = 0
    for document in DOCUMENTS:
        path = ROOT / document
        blocks = BLOCK.findall(path.read_text(encoding="utf-8")) if path.is_file() else []
        for number, text in enumerate(b for b in blocks if re.search(r"\bmain\(", b)):
            count += 1
            good += check_program(build, f"example_{path.stem}_{number}", text)
    print(f"{good} of {count} programs are right")
    return good != count or count == 0


sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
