#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks for a fault of ptxas 13.0 in compiled kernels: a register read too soon after it was zeroed.

usage: check_sass.py FATBIN...

`x = condition ? a * b : 0` in 64 bits becomes CS2R x, SRZ, then a product under a predicate. ptxas counts the wait for
CS2R from the product on, so where the predicate is off the next instruction can read the old x: it is issued 5 cycles
after CS2R, where 7 are needed and are otherwise kept. Exit code 77 without cuobjdump.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

NEEDED = 7
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/")


def kernels(path: str) -> Iterator[tuple[str, list[tuple[str, str, int]]]]:
    """Each kernel's instructions: place, text, cycles until the next is issued."""
    text = subprocess.run(["cuobjdump", "-sass", path], check=True, capture_output=True, text=True).stdout
    for part in text.split("Function : ")[1:]:
        found = [(m[1], m[2], int(m[3], 16) >> 41 & 15) for m in INSTRUCTION.finditer(part)]
        yield part.split(None, 1)[0], found


def registers(operand: str) -> set[int]:
    return {int(number) + i for number, wide in re.findall(r"\bR(\d+)(\.64)?", operand) for i in range(1 + bool(wide))}


def early_reads(code: list[tuple[str, str, int]]) -> Iterator[str]:
    for at, (place, text, cycles) in enumerate(code):
        zeroed = re.match(r"CS2R R(\d+), SRZ", text)
        if not zeroed:
            continue
        stale = {int(zeroed[1]), int(zeroed[1]) + 1}
        for _, later, more in code[at + 1 :]:
            bare = re.sub(r"^@!?U?P\d+\s+", "", later)
            name, _, rest = bare.partition(" ")
            operands = rest.split(",")
            stores = name.startswith(("ST", "RED"))
            if cycles >= NEEDED or re.match(r"(BRA|BSYNC|BSSY|CALL|RET|EXIT)", name):
                break
            if bare == later and any(registers(o) & stale for o in (operands if stores else operands[1:])):
                yield f"{place}: {text}, then after {cycles} cycles {later}"
                break
            if bare == later and not stores:
                stale -= registers(operands[0])
            cycles += more


def main() -> int:
    if not shutil.which("cuobjdump"):
        print("skipped: no cuobjdump")
        return 77
    bad = looked_at = 0
    for path in sys.argv[1:]:
        for name, code in kernels(path):
            looked_at += 1
            for fault in early_reads(code):
                print(f"{path}: {name} {fault}")
                bad += 1
    print(f"{looked_at} kernels, {bad} registers read too soon after they were zeroed")
    return 1 if bad or not looked_at else 0


if __name__ == "__main__":
    sys.exit(main())
