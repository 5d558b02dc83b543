#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs shellcheck over every shell script.
cd "$(dirname "$0")/.." || exit 1
{
    git ls-files -co --exclude-standard '*.sh'
    git ls-files -co --exclude-standard | grep -v '\.' | xargs grep -lE '^#!.*\b(ba)?sh$'
    echo .ci/run
} | sort -u | xargs shellcheck -x -S warning
