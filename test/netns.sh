#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes hosts out of network namespaces: runs a command with their names, removes them again.
#
#   test/netns.sh N command [args]     N namespaces on one bridge, 10.77.x.1 .. 10.77.x.N
#
# The command finds in its environment NETNS_COUNT, NETNS_NAMES ("a b c") and NETNS_ADDRESSES. Needs
# root; exits 77 (skipped) without. Always cleans up, also when interrupted.
set -eu

[ $# -ge 2 ] || { echo "usage: $0 N command [args]" >&2; exit 2; }
count=$1
shift
[ "$(id -u)" = 0 ] || { echo "network namespaces need root" >&2; exit 77; }
command -v ip >/dev/null || { echo "no ip command" >&2; exit 77; }

# Unique per process: several tests may run at once.
tag=hd$$
net=10.77.$(($$ % 200 + 20))
bridge_ns=${tag}b

cleanup() {
    trap - EXIT INT TERM HUP
    i=1
    while [ "$i" -le "$count" ]; do
        ip netns del "${tag}n$i" 2>/dev/null || :
        i=$((i + 1))
    done
    ip netns del "$bridge_ns" 2>/dev/null || :
}
trap cleanup EXIT
trap 'cleanup; exit 130' INT TERM HUP

if ! ip netns add "$bridge_ns" 2>/dev/null; then
    echo "network namespaces are not allowed here" >&2
    exit 77
fi
names=
addresses=
if [ "$count" -ne 2 ]; then
    ip -n "$bridge_ns" link add br0 type bridge
    ip -n "$bridge_ns" link set br0 up
fi
i=1
while [ "$i" -le "$count" ]; do
    ns=${tag}n$i
    ip netns add "$ns"
    ip -n "$ns" link set lo up
    if [ "$count" -ne 2 ]; then
        ip -n "$bridge_ns" link add "v$i" type veth peer name veth0 netns "$ns"
        ip -n "$bridge_ns" link set "v$i" master br0 up
    elif [ "$i" = 2 ]; then
        ip -n "${tag}n1" link add veth0 type veth peer name veth0 netns "$ns"
        ip -n "${tag}n1" addr add "$net.1/24" dev veth0
        ip -n "${tag}n1" link set veth0 up
    fi
    if [ "$count" -ne 2 ] || [ "$i" = 2 ]; then
        ip -n "$ns" addr add "$net.$i/24" dev veth0
        ip -n "$ns" link set veth0 up
    fi
    names="$names${names:+ }$ns"
    addresses="$addresses${addresses:+ }$net.$i"
    i=$((i + 1))
done
export NETNS_COUNT="$count" NETNS_NAMES="$names" NETNS_ADDRESSES="$addresses"
status=0
"$@" || status=$?
exit "$status"
