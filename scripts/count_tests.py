#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns meson's testlog.json into lines "pass|fail|skip<TAB>PREFIX: NAME"."""
import json
import sys

WORD = {"OK": "pass", "EXPECTEDFAIL": "pass", "SKIP": "skip"}


def main(path, prefix):
    with open(path, encoding="utf-8") as log:
        for line in log:
            test = json.loads(line)
            name = test["name"].split(" / ")[-1].split(":")[-1]
            print(f"{WORD.get(test['result'], 'fail')}\t{prefix}: {name}")


main(*sys.argv[1:])
