#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_python.sh wheels FOLDER | tests FOLDER JUNIT [PYTEST ARGS]: builds both wheels and installs them into
# an environment of their own, which borrows torch, numpy and pytest from .venv; runs the tests against that,
# where no compiler can be found.
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
tests)
    junit=$(readlink -m "$3")
    [ -n "$(ls "$folder"/venv/lib/python*/site-packages/heddle/libheddle.so)" ]
    borrow "$folder/venv" "${LENDER:-.venv}"
    shift 3
    mkdir -p "$folder/bin"
    for tool in sh bash env uname; do
        ln -sf "$(command -v "$tool")" "$folder/bin/"
    done
    PATH=$folder/venv/bin:$folder/bin HEDDLE_INTERFACE=lo PYTHONDONTWRITEBYTECODE=1 \
        "$folder/venv/bin/python" -m pytest -q -o cache_dir="$folder/cache" --junitxml "$junit" test/python "$@"
    ;;
esac
