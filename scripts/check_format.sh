#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every C and CUDA file is as clang-format leaves it.
cd "$(dirname "$0")/.." || exit 1
git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
