#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The public header compiles alone as C11, C++17 and, where nvcc is present, CUDA, where the one for
# kernels does too; every internal header compiles alone, except those without a guard, which are
# included several times with other macros.
cd "$(dirname "$0")/.." || exit 1
failed=0
mkdir -p build-check
echo '#include "heddle.h"' >build-check/header.c
strict='-Wall -Wextra -Werror -Wpedantic -fsyntax-only -Iinclude'
# shellcheck disable=SC2086
cc -std=c11 $strict build-check/header.c || failed=1
# shellcheck disable=SC2086
c++ -std=c++17 $strict -x c++ build-check/header.c || failed=1
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ -x "$nvcc" ]; then
    echo '#include "heddle_device.cuh"' >>build-check/header.c
    "$nvcc" -x cu -Iinclude -c build-check/header.c -o build-check/header.o || failed=1
fi
for header in $(git ls-files -co --exclude-standard 'src/*.h' 'tools/*.h' | xargs grep -l '^#ifndef .*_H$'); do
    echo "#include \"${header#src/}\"" >build-check/header.c
    cc -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-unused-parameter -fsyntax-only \
        -Iinclude -Isrc -I. build-check/header.c || failed=1
done
exit $failed
