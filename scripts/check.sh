#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All tests, quick ones first. The last line is "N passed, N failed, N skipped".
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

# The tree may belong to another user than the one who checks it.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'

mkdir -p build-check
results=$PWD/build-check/results
: >"$results"
begin=$SECONDS
jobs=$(nproc)
fuzz_seconds=${HEDDLE_FUZZ_SECONDS:-60}
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0:allocator_may_return_null=1}
export LSAN_OPTIONS=${LSAN_OPTIONS:-suppressions=$PWD/scripts/lsan.supp:print_suppressions=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}

# record pass|fail|skip NAME [WHY]
record() {
    printf '%s\t%s\n' "$1" "$2" >>"$results"
    [ "$1" = pass ] || printf '%s %s %s\n' "$1" "$2" "${3:-}"
}

part() { printf '\n== %s (%d s)\n' "$1" $((SECONDS - begin)); }

# try NAME COMMAND...: one test; its output is shown when it fails.
try() {
    local name=$1 log=build-check/${1//[^a-zA-Z0-9]/_}.log
    shift
    if "$@" >"$log" 2>&1 </dev/null; then
        record pass "$name"
    elif [ $? = 77 ]; then
        record skip "$name" "$(tail -n 1 "$log")"
    else
        record fail "$name"
        tail -n 60 "$log"
    fi
}

# meson_tests FOLDER PREFIX ARG...: runs the tests of a build and counts each.
meson_tests() {
    local folder=$1 prefix=$2
    shift 2
    rm -f "$folder/meson-logs/testlog.json"
    ${wrapper:-} meson test -C "$folder" --no-rebuild --num-processes "$jobs" --print-errorlogs "$@" \
        </dev/null | grep -Ev ' (OK|EXPECTEDFAIL) +[0-9.]+s|^$|^(Ok|Expected Fail|Fail|Unexpected Pass|Skipped|Timeout):|^Full log' |
        tail -n 200
    local part=build-check/part name verdict left=3
    scripts/count_tests.py "$folder/meson-logs/testlog.json" "$prefix" >"$part" ||
        record fail "$prefix: tests ran"
    # A shared machine may stall a test beyond its time: at most three are tried once more,
    # alone, and named. One that fails by itself fails again.
    while IFS=$'\t' read -r verdict name; do
        if [ "$verdict" = fail ] && [ $((left--)) -gt 0 ] &&
            ${wrapper:-} meson test -C "$folder" --no-rebuild --num-processes 1 "$@" \
                "${name#"$prefix: "}" >/dev/null 2>&1 </dev/null; then
            verdict=pass
            echo "flaky $name: failed once, passed alone; its first output is above"
        fi
        printf '%s\t%s\n' "$verdict" "$name" >>"$results"
    done <"$part"
}

check_style() {
    part style
    need_style
    try format scripts/check_format.sh
    try layers scripts/check_layers.py
    try style scripts/check_style.py
    try spelling scripts/check_spelling.sh
    try shellcheck scripts/check_shell.sh
    try headers scripts/check_headers.sh
}

# The build that the tests run in: warnings are errors.
main_build() {
    [ -n "${main_built:-}" ] && return
    part build
    try build build_in build-check/main -Dwerror=true
    main_built=1
    try symbols scripts/check_symbols.py build-check/main/src/libheddle.so
    try libraries scripts/check_libraries.sh build-check/main/src/libheddle.so
    try examples scripts/check_examples.py build-check/main
}

# By hand only: its false alarms differ from version to version.
check_lint() {
    main_build
    part lint
    have clang-tidy || install clang-tidy
    mapfile -t sources < <(git ls-files 'src/*.c' 'tools/*.c')
    for source in "${sources[@]}"; do
        try "lint $source" clang-tidy --quiet -p build-check/main "$source"
    done
}

check_suite() {
    main_build
    part "$1"
    meson_tests build-check/main "$1" --suite "$1"
}

# Tests of the suite `native` need speed or memory that sanitizers do not leave.
check_asan() {
    part "asan and ubsan"
    try "build asan" build_in build-check/asan -Dwerror=true -Db_sanitize=address,undefined -Dcuda=disabled
    meson_tests build-check/asan asan --no-suite native --timeout-multiplier 4
}

# Suite `tsan`: tests whose threads share memory. Randomised addresses collide with TSan's map.
check_tsan() {
    part tsan
    try "build tsan" build_in build-check/tsan -Dwerror=true -Db_sanitize=thread -Dcuda=disabled
    local wrapper=
    setarch "$(uname -m)" -R true 2>/dev/null && wrapper="setarch $(uname -m) -R"
    meson_tests build-check/tsan tsan --suite tsan --timeout-multiplier 4
}

# start_fuzz SECONDS [WRAPPER...]: builds the targets and starts them, each for so long.
start_fuzz() {
    part "build fuzz"
    need_fuzzer
    CC=clang try "build fuzz" build_in build-check/fuzz -Dfuzz=true -Dtests=false -Dtools=false \
        -Dcuda=disabled -Dman=disabled -Db_sanitize=address,undefined -Db_lundef=false
    "${@:2}" scripts/fuzz.sh build-check/fuzz "$1" "$jobs" >build-check/fuzz.out &
    fuzz=$!
}

# Tests of ranks wait more than they compute: fuzzing has the rest of the processors meanwhile, two minutes
# for one. A session of its own is a scheduling group where the kernel makes such groups.
start_fuzz_aside() {
    # shellcheck disable=SC2016
    start_fuzz $((fuzz_seconds * 2)) setsid nice -n 19 sh -c '(echo 19 >/proc/self/autogroup) 2>/dev/null; exec "$@"' aside
    trap 'kill -- -"$fuzz" 2>/dev/null' EXIT
}

check_fuzz() {
    [ -n "${fuzz:-}" ] || start_fuzz "$fuzz_seconds"
    part fuzz
    wait "$fuzz"
    trap - EXIT
    cat build-check/fuzz.out
    grep -q '^pass\|^fail' build-check/fuzz.out || record fail "fuzz: targets ran"
    sed -n 's/^\(pass\|fail\) \([^ ]*\).*/\1\t\2/p' build-check/fuzz.out >>"$results"
}

check_builds() {
    main_build
    part builds
    need_cross
    if have nvcc || [ -x /usr/local/cuda/bin/nvcc ]; then
        try "build with nvcc" grep -q 'nvcc.* -fatbin' build-check/main/build.ninja
    else
        record skip "build with nvcc" "nvcc not found"
    fi
    try "build asan" build_in build-check/asan -Dwerror=true -Db_sanitize=address,undefined -Dcuda=disabled
    try "build tsan" build_in build-check/tsan -Dwerror=true -Db_sanitize=thread -Dcuda=disabled
    try "build aarch64" scripts/build_aarch64.sh build-check/aarch64
    try "build without nvcc and install" scripts/check_install.sh build-check/release
}

# pytest against the wheels in an environment without a compiler, and the table of the C interface with one.
check_python() {
    main_build
    part python
    need_python
    local code=(python test/python examples)
    try "python format" .venv/bin/ruff format --check "${code[@]}"
    try "python lint" .venv/bin/ruff check "${code[@]}"
    try "python types" .venv/bin/mypy python/heddle python/mooncake/mooncake
    try "python table" env PYTHONPATH=python HEDDLE_LIBRARY=build-check/main/src/libheddle.so \
        .venv/bin/python -m pytest -q -p no:cacheprovider test/python/test_abi.py
    try "python wheels" scripts/check_python.sh wheels build-check/python
    # It mostly waits for the network.
    try "python older torch" scripts/check_python.sh older build-check/python build-check/python-older &
    local older=$!
    python_tests python
    wait "$older"
    # What differs between versions of torch needs no world of each size.
    [ ! -d build-check/python-older/stubs ] ||
        python_tests python-older -k 'test_torch and not ((everything or life or test_a_killed) and (4 or 5 or 6 or 7))'
}

# python_tests FOLDER [PYTEST ARGS]: as for the other parts, at most three are tried once more, and named.
python_tests() {
    local name=$1 part=build-check/part folder=build-check/$1
    shift
    rm -f "$folder.xml"
    scripts/check_python.sh tests "$folder" "$folder.xml" "$@" </dev/null | tail -n 200
    scripts/count_tests.py "$folder.xml" "$name" >"$part" || record fail "$name: tests ran"
    if [ "$(grep -c '^fail' "$part")" -gt 0 ] && [ "$(grep -c '^fail' "$part")" -le 3 ] &&
        scripts/check_python.sh tests "$folder" "$folder-again.xml" --lf --lfnf=none </dev/null >/dev/null 2>&1; then
        sed -n 's/^fail\t\(.*\)/flaky \1: failed once, passed alone; its first output is above/p' "$part"
        sed -i 's/^fail/pass/' "$part"
    fi
    cat "$part" >>"$results"
}

run_part() {
    case "$1" in
    all)
        for p in style unit sim; do run_part "$p"; done
        start_fuzz_aside
        for p in ranks python asan tsan fuzz builds; do run_part "$p"; done
        ;;
    style) check_style ;;
    lint) check_lint ;;
    unit | sim | ranks) check_suite "$1" ;;
    asan) check_asan ;;
    tsan) check_tsan ;;
    fuzz) check_fuzz ;;
    python) check_python ;;
    builds) check_builds ;;
    *)
        echo "run: unknown part '$1' of check" >&2
        exit 2
        ;;
    esac
}

need_build || {
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
}
[ $# -gt 0 ] || set -- all
for p in "$@"; do
    run_part "$p"
done

# A build that two parts need is one test.
sort -u -t $'\t' -k 2,2 -k 1,1 "$results" >"$results.unique"
passed=$(grep -c '^pass' "$results.unique")
failed=$(grep -c '^fail' "$results.unique")
skipped=$(grep -c '^skip' "$results.unique")
printf '\ntime %d s\n' $((SECONDS - begin))
grep '^fail' "$results.unique" | sed 's/\t/ /'
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
