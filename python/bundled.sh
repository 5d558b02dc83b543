#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# bundled.sh CC... LIBRARY LIBRARY: paths of the shared libraries that the linker takes for -lLIBRARY, by soname.
set -eu
compiler=
while [ $# -gt 2 ]; do
    compiler="$compiler $1"
    shift
done
for name in "$@"; do
    linked=$($compiler -print-file-name="lib$name.so")
    soname=$(readelf -d "$linked" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
    echo "$(dirname "$linked")/$soname"
done
