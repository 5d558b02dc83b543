#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and timings on a machine with GPUs: check_gpu.sh [CASES] [SEED]. Exit code 77 without one.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 1
cases=${1:-40} seed=${2:-1}
build=${HEDDLE_GPU_BUILD:-build/test/gpu}
# Loading kernels lazily would wait for kernels that wait for each other.
export CUDA_MODULE_LOADING=EAGER

scripts/check_sass.py "$build"/../../src/gpu/*.fatbin "$build"/../../tools/*.fatbin
status=$?
[ $status = 0 ] || [ $status = 77 ] || exit 1
timeout 600 "$build/moe_check" "$cases" "$seed"
status=$?
[ $status = 77 ] && exit 77
[ $status = 0 ] || exit 1
timeout 60 "$build/moe_values" || exit 1
timeout 90 "$build/moe_processes"
status=$?
[ $status = 0 ] || [ $status = 77 ] || exit 1
timeout 120 "$build/moe_api" || exit 1
timeout 300 "$build/moe_lost" || exit 1
export HEDDLE_LIBRARY=${HEDDLE_LIBRARY:-$PWD/build/src/libheddle.so} PYTHONPATH=python:python/mooncake
# Torch's tensors, where there is a torch that sees the GPUs.
if python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    # 4 ranks share 2 GPUs too: then ranks wait long for each other.
    for ranks in 2 4; do
        timeout 180 python3 test/gpu/buffer.py $ranks || exit 1
    done
    timeout 180 python3 test/gpu/cases.py || exit 1
    timeout 60 python3 test/gpu/windows.py || exit 1
    timeout 90 python3 test/gpu/beside.py || exit 1
fi
if command -v compute-sanitizer >/dev/null; then
    # Small shapes, phases one after the other: checked kernels are too slow to wait for each other.
    MOE_CHECK_MODE=0 timeout 300 compute-sanitizer --tool memcheck --error-exitcode 1 "$build/moe_check" 4 "$seed" || exit 1
    MOE_CHECK_MODE=0 timeout 300 compute-sanitizer --tool racecheck --error-exitcode 1 "$build/moe_check" 1 "$seed" || exit 1
fi
timeout 30 "$build/gpu_ring" && timeout 60 "$build/../../heddle" run -n 2 -- "$build/gpu_ring"
status=$?
[ $status = 0 ] || [ $status = 77 ] || exit 1
timeout 400 scripts/gpu_targets.py || exit 1
timeout 120 "$build/../../heddle" perf --micro
