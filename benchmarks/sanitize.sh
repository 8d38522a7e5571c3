#!/usr/bin/env bash
# Runs tests of every kernel under compute-sanitizer: benchmarks/sanitize.sh memcheck|racecheck PYTHON. Ends with status 77
# where it cannot attach, which some virtual machines refuse: that shows in a program that does next to nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

starts_cuda='import ctypes; cuda = ctypes.CDLL("libcuda.so.1"); context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0'
seen=$(compute-sanitizer --tool "$1" "$2" -c "$starts_cuda" 2>&1) || true
if [[ $seen != *"ERROR SUMMARY: 0 errors"* && $seen != *"RACECHECK SUMMARY: 0 hazards"* ]]; then
    echo "skipped, because $1 cannot attach here: $seen"
    exit 77
fi
# Each tensor in an allocation of its own, so that a step beyond its end is seen.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTORCH_ALLOC_CONF='' compute-sanitizer --tool "$1" --error-exitcode 1 \
    "$2" -m pytest -q tests/zeropp/test_kernels.py tests/zeropp/test_moves.py -k "small and cuda"
