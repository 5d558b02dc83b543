#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# libheddle.so needs libc, libuv and libsodium, and nothing else: what is opened at run time is not linked.
needed=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
echo "$needed"
for library in $needed; do
    case "$library" in
    libc.so.* | libm.so.* | libpthread.so.* | libdl.so.* | librt.so.* | ld-linux-*) ;;
    libuv.so.* | libsodium.so.*) ;;
    *)
        echo "$1 needs $library"
        exit 1
        ;;
    esac
done
