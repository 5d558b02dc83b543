#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# As a rank of two on two hosts: raw TCP from rank 1 to rank 0, by iperf3, for $1 seconds.
set -eu
if [ "$RANK" = 0 ]; then
    exec timeout $(($1 + 20)) iperf3 -s -1 -B "$MASTER_ADDR" -p 5201 >/dev/null
fi
tries=0
until timeout $(($1 + 5)) iperf3 --connect-timeout 2000 -c "$MASTER_ADDR" -p 5201 -t "$1" -l 1M -J 2>/dev/null |
    python3 -c 'import json, sys
rate = json.load(sys.stdin)["end"]["sum_received"]["bits_per_second"]
print(json.dumps({"GBps": rate / 8e9}))' 2>/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 20 ] || exit 1
    sleep 0.1
done
