#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than ten minutes: builds the kernels, tests them and the training path
# on the GPU, checks them with compute-sanitizer, and measures kernels and trainer.
#
#     benchmarks/gpu.sh [FOLDER [PART ...]]
#
# FOLDER: for the results; default benchmarks/results/gpu-<card>-<date>. PARTs: see "The parts" below; default all.
# Needs one NVIDIA GPU, nvcc, and a Python with torch for CUDA, numpy and pytest (.venv's, else python3; PYTHON=...
# chooses another); no network. A part that fails or runs out of time does not stop the others; the summary at the end
# names it, and the exit status is 1. The most valuable parts run first.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BUDGET=${BUDGET:-570} # seconds for all parts together
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # the card is to be filled
[ -d "${CUDA_HOME:=/usr/local/cuda}/bin" ] && export CUDA_HOME PATH="$PATH:$CUDA_HOME/bin"

fail() {
    echo "error: $*" >&2
    exit 2
}

card=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') ||
    fail "$PYTHON has no torch: choose a Python that has, PYTHON=/path/to/python benchmarks/gpu.sh"
[ -n "$card" ] || fail "torch of $PYTHON sees no CUDA device: this script is for a machine with an NVIDIA GPU"

slug=$(tr -cs 'a-z0-9\n' '-' <<<"${card,,}")
OUT=${1:-benchmarks/results/gpu-$slug-$(date +%F)}
shift $(($# > 0))
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/log.txt SUMMARY=$OUT/summary.txt
: >"$LOG"
: >"$SUMMARY"
chosen=" $* "
failed=0

# part NAME SECONDS WHAT-IT-NEEDS COMMAND...: runs one part, unless something that it needs is missing.
# Needs are Python modules, programs (program:NAME) and files (file:PATH), separated by commas.
part() {
    local name=$1 seconds=$2 needs=$3 left=$((BUDGET - SECONDS)) start=$SECONDS need verdict
    shift 3
    [ "$chosen" = "  " ] || [[ $chosen == *" $name "* ]] || return
    for need in ${needs//,/ }; do
        case $need in
            program:*) command -v "${need#*:}" >/dev/null ;;
            file:*) compgen -G "${need#*:}" >/dev/null ;;
            *) "$PYTHON" -c "import $need" 2>/dev/null ;;
        esac || {
            say "not run   $name: $need is missing"
            failed=1
            return
        }
    done
    [ "$left" -gt 10 ] || {
        say "not run   $name: the $BUDGET seconds are over"
        failed=1
        return
    }
    echo "=== $name: $*" | tee -a "$LOG"
    timeout --kill-after=10 "$((left < seconds ? left : seconds))" "$@" 2>&1 | tee -a "$LOG"
    case ${PIPESTATUS[0]} in
        0) verdict=passed ;;
        124 | 137) verdict="timed out" failed=1 ;;
        *) verdict=FAILED failed=1 ;;
    esac
    say "$verdict   $name ($((SECONDS - start)) s)"
}

say() {
    echo "$*" | tee -a "$LOG" "$SUMMARY"
}

# The parts

KERNELS="megatron_zpp/zeropp/wire/_kernels*.so"
say "$card, $(date -u +%FT%TZ)"
part machine 30 program:nvidia-smi nvidia-smi
part build 200 program:nvcc,setuptools bash -c "rm -f $KERNELS && '$PYTHON' setup.py build_ext --inplace && ls $KERNELS"
part environment 60 numpy "$PYTHON" -m megatron_zpp.commands.env
part kernel-tests 120 "file:$KERNELS,pytest,hypothesis" "$PYTHON" -m pytest -q tests/zeropp/test_kernels.py
part kernels 120 "file:$KERNELS,numpy" "$PYTHON" benchmarks/kernels.py --output "$OUT/kernels.json"
part trainer-gpt 180 numpy \
    "$PYTHON" benchmarks/trainer.py --model gpt-350m --steps 4 --rounds 2 --output "$OUT/trainer.jsonl"
# Four ranks on the card, as two nodes, gloo on copies in host memory between them: launches, and how much of the
# communication is exposed. The copies go through the host, so the times of the collectives are not NCCL's.
for flags in "" "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"; do
    part "step${flags:+-all-flags}" 120 "file:$KERNELS,numpy" "$PYTHON" -m torch.distributed.run --standalone \
        --nproc-per-node 4 tests/gpu/share_device.py cuda:0 benchmarks/trainer.py --model gpt-350m --micro-batch-size 1 \
        --no-compile --steps 2 --rounds 1 --flags "$flags" --output "$OUT/step.jsonl"
done
part gpu-tests 150 numpy,pytest "$PYTHON" -m pytest -q -m "" tests/gpu -k cuda
for tool in memcheck racecheck; do
    # Each tensor in an allocation of its own, so that a step beyond its end is seen.
    part $tool 90 "program:compute-sanitizer,file:$KERNELS,pytest,hypothesis" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool $tool --error-exitcode 1 \
        "$PYTHON" -m pytest -q tests/zeropp/test_kernels.py -k "small and cuda"
done
part trainer-llama 200 numpy \
    "$PYTHON" benchmarks/trainer.py --model llama-0.8b --steps 4 --rounds 2 --output "$OUT/trainer.jsonl"
part emulation 120 "file:$KERNELS,numpy" \
    "$PYTHON" benchmarks/emulation.py --model gpt-350m --bf16 --rounds 2 --output "$OUT/emulation.jsonl"

echo
cat "$SUMMARY"
echo "results: $OUT"
exit $failed
