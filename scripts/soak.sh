#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The long forms of the tests: an hour and a half. The last line is "N passed, N failed, N skipped".
#     HEDDLE_SOAK_SECONDS   of each chaos run (default 600)
#     HEDDLE_SOAK_SEED      of chaos and of the first schedule (default: drawn)
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

parts=(chaos-shm chaos-fabric chaos-mixed chaos-rank0 sim moe recovery recovery-fabric steps)
seconds=${HEDDLE_SOAK_SECONDS:-600}
seed=${HEDDLE_SOAK_SEED:-$((RANDOM * 32768 + RANDOM))}
mkdir -p build/soak
passed=0 failed=0

# try NAME COMMAND...: its last lines are shown, all of it when it fails.
try() {
    local name=$1 log=build/soak/$1.log begin=$SECONDS
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    if "$@" >"$log" 2>&1 </dev/null; then
        passed=$((passed + 1))
        tail -n 3 "$log"
    else
        failed=$((failed + 1))
        tail -n 60 "$log"
        echo "fail $name (seed $seed)"
    fi
    echo "$((SECONDS - begin)) s"
}

chaos() { try "$1" build/heddle chaos --seconds "$seconds" --seed "$seed" "${@:2}"; }

kinds=(--num-faults 6 --ops 8
    --faults 'kill,stop,cut,delay,reorder,join,leave,link,suspect,restart-coordinator')

# A million schedules of 3 to 8 ranks with every kind of fault, on all cores.
schedules() {
    for ranks in 3 4 5 6 7 8; do
        printf '%s\0' -n "$ranks" --capacity $((ranks + 2)) "${kinds[@]}" \
            --seeds "$seed..$((seed + 166666))"
    done | xargs -0 -n 12 -P "$(nproc)" build/heddle sim
}

run_part() {
    case "$1" in
    chaos-shm | chaos-fabric | chaos-mixed) chaos "$1" --transport "${1#chaos-}" ;;
    chaos-rank0) chaos "$1" --coordinator rank0 ;;
    sim)
        try sim schedules
        try sim-apart build/heddle sim --capacity 7 "${kinds[@]}" --apart --plane mapped \
            --seeds "$seed..$((seed + 24999))"
        ;;
    moe) try moe meson test -C build --no-rebuild --timeout-multiplier 4 moe_soak_million ;;
    recovery) try recovery build/heddle perf recovery ;;
    recovery-fabric) try recovery-fabric build/heddle perf recovery --transport fabric ;;
    # Deaths at every message, stalls, and branches that are rarely taken.
    steps) HEDDLE_SOAK=1 try steps meson test -C build --no-rebuild --suite ranks --timeout-multiplier 30 ;;
    *)
        echo "run: unknown part '$1' of soak; parts: ${parts[*]}" >&2
        exit 2
        ;;
    esac
}

need_build || exit 1
build_in build || exit 1
[ $# -gt 0 ] || set -- "${parts[@]}"
for part in "$@"; do
    run_part "$part"
done
printf '\ntime %d s\n' "$SECONDS"
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
