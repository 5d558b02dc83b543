#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns meson's testlog.json, or pytest's JUnit file, into lines "pass|fail|skip<TAB>PREFIX: NAME".

Exit code 1 if there is no test in it."""
import json
import sys
import xml.etree.ElementTree

WORD = {"OK": "pass", "EXPECTEDFAIL": "pass", "SKIP": "skip"}


def count_junit(path, prefix):
    tests = list(xml.etree.ElementTree.parse(path).iter("testcase"))
    for test in tests:
        outcomes = {child.tag for child in test}
        word = "fail" if outcomes & {"failure", "error"} else "skip" if "skipped" in outcomes else "pass"
        print(f"{word}\t{prefix}: {test.get('classname').split('.')[-1]}.{test.get('name')}")
    return len(tests)


def main(path, prefix):
    if path.endswith(".xml"):
        return count_junit(path, prefix)
    with open(path, encoding="utf-8") as log:
        tests = [json.loads(line) for line in log]
    for test in tests:
        name = test["name"].split(" / ")[-1].split(":")[-1]
        print(f"{WORD.get(test['result'], 'fail')}\t{prefix}: {name}")
    return len(tests)


sys.exit(main(*sys.argv[1:]) == 0)
