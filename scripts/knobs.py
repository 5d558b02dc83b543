#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""knobs.py CONFIG_DEF PAGE: the page with @KNOBS@ replaced by every knob of config.def."""
import re
import sys

KIND = {"string": "text", "u64": "number", "size": "size, such as 64K", "duration": "time, such as 500ms",
        "boolean": "0 or 1", "level": "error, warn, info or debug"}
KNOB = re.compile(r'BASE_KNOB\(\s*(\w+),\s*"(\w+)",\s*(\w+),\s*"([^"]*)",\s*((?:"[^"]*"\s*)+)\)')


def escaped(text):
    return re.sub(r"([\\_*^`])", r"\\\1", text)


def main(definitions, page):
    with open(definitions, encoding="utf-8") as file:
        knobs = KNOB.findall(file.read())
    with open(page, encoding="utf-8") as file:
        text = file.read()
    parts = []
    for _, variable, kind, standard, help_text in sorted(knobs, key=lambda k: k[1]):
        sentence = "".join(re.findall(r'"([^"]*)"', help_text))
        shown = f"default {escaped(standard)}" if standard else "default empty"
        parts.append(f"*{escaped(variable)}* ({KIND[kind]}; {shown})\n\t{escaped(sentence[0].upper() + sentence[1:])}.\n")
    sys.stdout.write(text.replace("@KNOBS@\n", "\n".join(parts)))


main(*sys.argv[1:])
