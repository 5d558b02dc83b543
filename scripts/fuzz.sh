#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh FOLDER SECONDS JOBS: runs every fuzz target so long, from its corpus; what it finds new stays
# in FOLDER/corpus. Prints "pass NAME N inputs" or "fail NAME" for each.
set -u
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
folder=$1 seconds=$2 jobs=$3

run_one() {
    local folder=$1 seconds=$2 target=$3 name
    name=$(basename "$target")
    mkdir -p "$folder/corpus/$name"
    if "$target" -max_total_time="$seconds" -timeout=60 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
        -artifact_prefix="$folder/crash-$name-" "$folder/corpus/$name" "test/fuzz/corpus/${name#fuzz_}" \
        >"$folder/$name.log" 2>&1; then
        echo "pass $name $(sed -n 's/^stat::number_of_executed_units: *//p' "$folder/$name.log") inputs"
    else
        echo "fail $name"
        tail -n 40 "$folder/$name.log" | sed 's/^/    /'
    fi
}
export -f run_one

find "$folder/test/fuzz" -maxdepth 1 -type f -name 'fuzz_*' -perm -u+x | sort |
    xargs -I TARGET -P "$jobs" bash -c 'run_one "$@"' fuzz "$folder" "$seconds" TARGET
