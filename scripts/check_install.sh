#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_install.sh FOLDER: a release build is installed into an empty tree, and a program is compiled
# against that tree with pkg-config and run.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
. scripts/setup.sh
folder=$(readlink -m "$1")
root=$folder/root
build_in "$folder" -Dwerror=true -Dbuildtype=release -Dtests=false -Dcuda=disabled --prefix "$root" --libdir lib
rm -rf "$root"
meson install -C "$folder" --no-rebuild --quiet

for file in include/heddle.h include/heddle_device.cuh lib/libheddle.so lib/pkgconfig/heddle.pc bin/heddle \
    share/man/man1/heddle.1 share/man/man7/heddle.7 share/man/man3/libheddle.3; do
    [ -e "$root/$file" ] || { echo "$file is not installed"; exit 1; }
done
cat >"$folder/smoke.c" <<'EOF'
#include <heddle.h>
#include <stdio.h>
int main(void)
{
    puts(hdl_status_text(HDL_OK));
    return hdl_dtype_size(HDL_F32) != sizeof(float);
}
EOF
export PKG_CONFIG_PATH=$root/lib/pkgconfig
# shellcheck disable=SC2046
cc -Werror "$folder/smoke.c" -o "$folder/smoke" $(pkg-config --cflags --libs heddle)
LD_LIBRARY_PATH=$root/lib "$folder/smoke"
"$root/bin/heddle" --help >/dev/null
