#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Whatever is killed, nothing is left: no process, shared memory, file or namespace; and the next
# run works. (Sockets have no names in the file system: they end with their process.)
# Arguments: the heddle command and a rank program that loops.
set -eu
heddle=$1
program=$2

snapshot() {
    ls -A /dev/shm
    find /tmp -maxdepth 1 -name '*heddle*' | sort
    # shellcheck disable=SC2009
    ps -eo args= | grep -F "$program" | grep -v -e grep -e leftovers || true
    find /run/netns -type f 2>/dev/null | sort
}

before=$(snapshot)
for round in 1 2 3; do
    for hosts in "" "--hosts 2"; do
        [ -z "$hosts" ] || [ "$(id -u)" = 0 ] || continue
        # shellcheck disable=SC2086
        "$heddle" run -n 4 $hosts -- "$program" forever >/dev/null 2>&1 &
        launcher=$!
        sleep "0.$((round * 3))"
        kill -9 "$launcher"
        wait "$launcher" 2>/dev/null || true
        tries=0
        until [ "$(snapshot)" = "$before" ]; do
            tries=$((tries + 1))
            if [ "$tries" -gt 30 ]; then
                echo "left behind after a kill:" >&2
                snapshot >&2
                exit 1
            fi
            sleep 0.1
        done
    done
done
"$heddle" run -n 4 --timeout 60 -- "$program" once
