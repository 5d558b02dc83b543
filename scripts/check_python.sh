#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_python.sh wheels FOLDER | tests FOLDER JUNIT [PYTEST ARGS] | older FOLDER OLDER: builds both wheels and
# installs them into an environment of their own, which borrows torch, numpy and pytest from .venv; runs the
# tests against that, where no compiler can be found; makes OLDER from FOLDER, with the oldest torch that
# installs. Ends with 77 if none does.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
. scripts/setup.sh
folder=$(readlink -m "$2")

# borrow FOLDER ENVIRONMENT: packages of an environment that come after its own.
borrow() {
    local own lender
    own=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    lender=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$lender" >"$own/borrowed.pth"
}

case "$1" in
wheels)
    rm -rf "$folder"
    mkdir -p "$folder"
    .venv/bin/pip wheel -q --no-deps -w "$folder/wheels" -Csetup-args=-Dcuda=disabled .
    cp -r python/mooncake "$folder/mooncake"
    .venv/bin/pip wheel -q --no-deps -w "$folder/wheels" "$folder/mooncake"
    ls "$folder"/wheels/heddle-*-py3-none-*.whl "$folder"/wheels/heddle_mooncake-*-py3-none-any.whl
    .venv/bin/python -m venv "$folder/venv"
    "$folder/venv/bin/pip" install -q --no-index --no-deps "$folder"/wheels/*.whl
    "$folder/venv/bin/heddle" --help >/dev/null
    ;;
older)
    older=$(readlink -m "$3")
    rm -rf "$older"
    .venv/bin/python -m venv "$older/venv"
    site=$("$older/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$older/venv/bin/pip" install -q --no-index --no-deps "$folder"/wheels/*.whl
    borrow "$older/venv" .venv
    for version in 2.6.0 2.7.0 2.8.0 2.9.0 2.10.0 2.11.0 2.12.0; do
        # Its GPU libraries would be gigabytes; the packages that it needs besides are those of .venv.
        timeout 180 "$older/venv/bin/pip" install -q --no-deps --no-cache-dir "torch==$version" || continue
        scripts/torch_stubs.py "$site" "$older/stubs"
        LD_LIBRARY_PATH=$older/stubs "$older/venv/bin/python" -W ignore -c 'import torch; print(torch.__version__)'
        exit 0
    done
    echo "no torch older than that of .venv installs within 3 minutes"
    exit 77
    ;;
tests)
    junit=$(readlink -m "$3")
    [ -n "$(ls "$folder"/venv/lib/python*/site-packages/heddle/libheddle.so)" ]
    borrow "$folder/venv" .venv
    shift 3
    mkdir -p "$folder/bin"
    for tool in sh bash env uname; do
        ln -sf "$(command -v "$tool")" "$folder/bin/"
    done
    [ ! -d "$folder/stubs" ] || export LD_LIBRARY_PATH=$folder/stubs
    PATH=$folder/venv/bin:$folder/bin HEDDLE_INTERFACE=lo PYTHONDONTWRITEBYTECODE=1 \
        "$folder/venv/bin/python" -m pytest -q -o cache_dir="$folder/cache" --junitxml "$junit" test/python "$@"
    ;;
esac
