# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Finds or installs what the commands of ./run need. Sourced, from the top folder.

PATH="$PWD/.venv/bin:$PATH"
export PATH

have() { command -v "$1" >/dev/null 2>&1; }
have_package() { pkg-config --exists "$@" 2>/dev/null; }

# install PACKAGE...: by apt-get as root, else says what to type.
install() {
    local line="apt-get install -y --no-install-recommends $*"
    if ! have apt-get; then
        echo "run: missing: $* (names of Debian packages); install them and try again" >&2
        exit 1
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "run: missing packages; type:" >&2
        echo "    sudo apt-get update && sudo $line" >&2
        exit 1
    fi
    echo "run: $line" >&2
    export DEBIAN_FRONTEND=noninteractive
    if [ -z "${apt_updated:-}" ]; then
        apt-get update -qq </dev/null >&2 || true
        apt_updated=1
    fi
    # shellcheck disable=SC2086
    $line -qq -o Dpkg::Use-Pty=0 </dev/null >/dev/null
}

# A folder .venv with pip in it, for Python packages that the system lacks.
make_venv() {
    [ -x .venv/bin/pip ] && return
    python3 -c 'import ensurepip, venv' 2>/dev/null || install python3-venv
    python3 -m venv .venv >&2
}

# meson 1.0 or later.
have_meson() {
    have meson && [ "$(printf '1.0\n%s\n' "$(meson --version)" | sort -V | head -n 1)" = 1.0 ]
}

need_build() {
    local missing=()
    have cc || missing+=(gcc)
    [ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
    have python3 || missing+=(python3)
    have ninja || missing+=(ninja-build)
    have pkg-config || missing+=(pkg-config)
    have_package libuv || missing+=(libuv1-dev)
    have_package libsodium || missing+=(libsodium-dev)
    have_package libfabric || missing+=(libfabric-dev)
    have_package cmocka || missing+=(libcmocka-dev)
    have scdoc || missing+=(scdoc)
    have ip || missing+=(iproute2)
    [ ${#missing[@]} = 0 ] || install "${missing[@]}"
    if ! have_meson; then
        if have apt-get && [ "$(id -u)" = 0 ]; then
            install meson
            hash -r
        fi
        if ! have_meson; then
            make_venv
            .venv/bin/pip install -q 'meson>=1.0,<2' >&2
        fi
    fi
}

# The runtime of clang's sanitizers and fuzzer is a package of its own, named by version.
need_fuzzer() {
    have clang || install clang
    echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d == (char *)n; }' |
        clang -fsanitize=fuzzer,address -x c - -o /dev/null 2>/dev/null && return
    local version
    version=$(clang -dumpversion | cut -d. -f1)
    if apt-cache show "libclang-rt-$version-dev" >/dev/null 2>&1; then
        install "libclang-rt-$version-dev"
    else
        install "libclang-common-$version-dev"
    fi
}

need_style() {
    local missing=()
    have git || missing+=(git)
    have c++ || missing+=(g++)
    have clang-format || missing+=(clang-format)
    have codespell || missing+=(codespell)
    have shellcheck || missing+=(shellcheck)
    have readelf || missing+=(binutils)
    [ ${#missing[@]} = 0 ] || install "${missing[@]}"
}

need_cross() {
    have aarch64-linux-gnu-gcc || install gcc-aarch64-linux-gnu libc6-dev-arm64-cross
}

need_bench() {
    local missing=()
    have mpirun || missing+=(openmpi-bin)
    have mpicc || missing+=(libopenmpi-dev)
    have iperf3 || missing+=(iperf3)
    [ ${#missing[@]} = 0 ] || install "${missing[@]}"
    python3 -c "import torch, matplotlib" 2>/dev/null && return
    make_venv
    .venv/bin/python -c 'import torch, matplotlib' 2>/dev/null ||
        .venv/bin/pip install -q torch==2.13.0 numpy matplotlib >&2
}

# What the Python tests need, in .venv/.
need_python() {
    have readelf || install binutils
    make_venv
    .venv/bin/python -c 'import torch, numpy, pytest' 2>/dev/null && [ -x .venv/bin/mypy ] && [ -x .venv/bin/ruff ] ||
        .venv/bin/pip install -q torch==2.13.0 numpy pytest 'mypy>=2,<3' 'ruff>=0.15,<0.18' >&2
}

# A Python with what need_bench asks for.
bench_python() {
    if [ -x .venv/bin/python ] && .venv/bin/python -c 'import torch, matplotlib' 2>/dev/null; then
        echo .venv/bin/python
    else
        echo python3
    fi
}

# build_in FOLDER OPTION...: sets the folder up once, then builds. The output is shown on failure.
build_in() {
    local folder=$1
    shift
    if [ ! -e "$folder/build.ninja" ]; then
        rm -rf "$folder"
        meson setup "$folder" "$@" >"$folder.log" 2>&1 || {
            cat "$folder.log" >&2
            return 1
        }
        mv "$folder.log" "$folder/setup.log"
    fi
    ninja -C "$folder" >"$folder/build.log" 2>&1 || {
        cat "$folder/build.log" >&2
        return 1
    }
}

build_default() {
    [ -e build/build.ninja ] || echo "run: building in build/, the first time this takes a minute or two" >&2
    # lib: where pkg-config and the linker look, also without dpkg-architecture, where meson takes lib64.
    build_in build --libdir lib || exit 1
}
