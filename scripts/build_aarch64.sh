#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_aarch64.sh FOLDER: compiles every object of the library and the command for aarch64.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
folder=$1
libdir=$(pkg-config --variable pc_path pkg-config)
export PKG_CONFIG_LIBDIR=$libdir
if [ ! -e "$folder/build.ninja" ]; then
    rm -rf "$folder"
    meson setup "$folder" --cross-file scripts/aarch64.ini -Dwerror=true -Dcuda=disabled \
        -Dtests=false -Dman=disabled -Dpkg_config_path="$libdir"
fi
mapfile -t objects < <(ninja -C "$folder" -t targets all | sed -n 's/^\(.*\.o\): c_COMPILER.*/\1/p')
ninja -C "$folder" "${objects[@]}"
for object in "${objects[@]}"; do
    readelf -h "$folder/$object" | grep -q AArch64 || { echo "$object is not for aarch64"; exit 1; }
done
echo "${#objects[@]} objects"
[ "${#objects[@]}" -gt 10 ]
