#!/usr/bin/env bash
# Everything that needs a GPU, in calls of less than ten minutes: builds the kernels, tests them and the training path on the
# GPU, checks them with compute-sanitizer, measures kernels, steps, recipes and memory, and trains a GPT of 135M parameters with
# ZeRO-3's and ZeRO++'s numerics. docs/how-to/gpu-checklist.md says what each part answers.
#
#     benchmarks/gpu.sh [FOLDER [PART ...]]
#
# FOLDER: for the results; default benchmarks/results/gpu-<card>-<date>. Give the same one again, until nothing is left: parts
# that have passed are not run again, and training goes on from its checkpoint. PARTs: run these, passed or not.
# Needs one NVIDIA GPU, nvcc, and a Python with torch for CUDA, numpy and pytest (.venv's, else python3; PYTHON=...
# chooses another); training needs sentencepiece too; no network. A part that fails or runs out of time does not stop the
# others; the summary at the end names it, and the exit status is 1. The most valuable parts run first.
# SCALE=tiny runs the parts with tiny models on the processor, without a GPU, to try this script.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BUDGET=${BUDGET:-560} # seconds for all parts of a call together
SCALE=${SCALE:-gpu}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # the card is to be filled
[ -d "${CUDA_HOME:=/usr/local/cuda}/bin" ] && export CUDA_HOME PATH="$PATH:$CUDA_HOME/bin"

fail() {
    echo "error: $*" >&2
    exit 2
}

[ "$SCALE" = gpu ] || [ "$SCALE" = tiny ] || fail "SCALE=$SCALE does not exist; choose one of: gpu tiny"
if [ "$SCALE" = tiny ]; then
    card=tiny-cpu GPT=tiny-gpt LARGE=tiny-gpt LLAMA=tiny-llama EMULATED=(gpt-tiny) DEVICE=cpu TRAIN=laptop OFFLOADED=1
    COMPILE=(--no-compile) KERNEL_TESTS=(-k "encode_and_decode_small and cpu") KERNELS_OF=(--megabytes 1 --threads 1 --rounds 1)
    export CUDA_VISIBLE_DEVICES=
else
    card=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') ||
        fail "$PYTHON has no torch: choose a Python that has, PYTHON=/path/to/python benchmarks/gpu.sh"
    [ -n "$card" ] || fail "torch of $PYTHON sees no CUDA device: this script is for a machine with an NVIDIA GPU"
    GPT=gpt-350m LARGE=gpt-1.3b LLAMA=llama-0.8b EMULATED=(gpt-350m gpt-1.3b) DEVICE=cuda:0 TRAIN=gpu OFFLOADED=12
    COMPILE=() KERNEL_TESTS=() KERNELS_OF=()
fi

slug=$(tr -cs 'a-z0-9\n' '-' <<<"${card,,}")
OUT=${1:-benchmarks/results/gpu-$slug-$(date +%F)}
shift $(($# > 0))
mkdir -p "$OUT/passed"
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/log.txt SUMMARY=$OUT/summary.txt
chosen=" $* "
failed=0

# part NAME SECONDS WHAT-IT-NEEDS COMMAND...: runs one part, unless it has passed, or something that it needs is missing.
# Needs are Python modules, programs (program:NAME) and files (file:PATH), separated by commas.
part() {
    local name=$1 seconds=$2 needs=$3 left=$((BUDGET - SECONDS)) start=$SECONDS need verdict
    shift 3
    if [ "$chosen" = "  " ]; then
        [ ! -e "$OUT/passed/$name" ] || return
    else
        [[ $chosen == *" $name "* ]] || return
    fi
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
    [ "$SCALE" = gpu ] || seconds=$BUDGET # of a processor, busy as it may be
    [ "$left" -gt 10 ] || {
        say "not run   $name: the $BUDGET seconds are over"
        failed=1
        return
    }
    echo "=== $name: $*" | tee -a "$LOG"
    timeout --kill-after=30 "$((left < seconds ? left : seconds))" "$@" 2>&1 | tee -a "$LOG"
    case ${PIPESTATUS[0]} in
        0) verdict=passed && touch "$OUT/passed/$name" ;;
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
ALL_FLAGS="--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
say "$card, $(date -u +%FT%TZ)"
if [ "$SCALE" = gpu ]; then
    part machine 30 program:nvidia-smi nvidia-smi
    part build 200 program:nvcc,setuptools bash -c "rm -f $KERNELS && '$PYTHON' setup.py build_ext --inplace && ls $KERNELS"
fi
part environment 60 numpy "$PYTHON" -m megatron_zpp.commands.env
part kernel-tests 120 "file:$KERNELS,pytest,hypothesis" "$PYTHON" -m pytest -q tests/zeropp/test_kernels.py "${KERNEL_TESTS[@]}"
part kernels 120 "file:$KERNELS,numpy" "$PYTHON" benchmarks/kernels.py "${KERNELS_OF[@]}" --output "$OUT/kernels.json"
# Tokens/s, MFU, the parts of a step by the profiler, and peak memory beside the estimator's.
part trainer-gpt 180 numpy \
    "$PYTHON" benchmarks/trainer.py --model $GPT "${COMPILE[@]}" --steps 4 --rounds 2 --output "$OUT/trainer.jsonl"
# Four ranks on the card, as two nodes, gloo on copies in host memory between them: launches, and how much of the
# communication is exposed. The copies go through the host, so the times of the collectives are not NCCL's.
for flags in "" "$ALL_FLAGS"; do
    part "step${flags:+-all-flags}" 120 "file:$KERNELS,numpy" "$PYTHON" -m torch.distributed.run --standalone \
        --nproc-per-node 4 tests/gpu/share_device.py $DEVICE benchmarks/trainer.py --model $GPT --micro-batch-size 1 \
        --no-compile --steps 2 --rounds 1 --flags "--num-workers 0 $flags" --output "$OUT/step.jsonl"
done
if [ "$SCALE" = gpu ]; then
    part gpu-tests 150 numpy,pytest "$PYTHON" -m pytest -q -m "" tests/gpu -k cuda
    for tool in memcheck racecheck; do
        # Each tensor in an allocation of its own, so that a step beyond its end is seen.
        part $tool 90 "program:compute-sanitizer,file:$KERNELS,pytest,hypothesis" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
            compute-sanitizer --tool $tool --error-exitcode 1 \
            "$PYTHON" -m pytest -q tests/zeropp/test_kernels.py -k "small and cuda"
    done
fi
# What a recipe's arithmetic costs in a step: 8 ranks on 2 nodes, emulated, beside plain training on the same batches.
for model in "${EMULATED[@]}"; do
    for recipe in lossless int8 int6 ternary; do
        part "$recipe-$model" 150 "file:$KERNELS,numpy" "$PYTHON" benchmarks/emulation.py --model "$model" --bf16 \
            --recipe $recipe --rounds 2 --output "$OUT/emulation.jsonl"
    done
done
# The same step with float8 products, and with what half of the layers save in host memory.
for more in "fp8 torchao --fp8-format hybrid" "offload numpy --cpu-offloading-num-layers $OFFLOADED"; do
    read -r name needs flags <<<"$more"
    part "trainer-$name" 120 "$needs" "$PYTHON" benchmarks/trainer.py --model $GPT "${COMPILE[@]}" --steps 4 --rounds 2 \
        --flags "$flags" --output "$OUT/trainer.jsonl"
done
part trainer-llama 200 numpy \
    "$PYTHON" benchmarks/trainer.py --model $LLAMA "${COMPILE[@]}" --steps 4 --rounds 2 --output "$OUT/trainer.jsonl"
part trainer-large 200 numpy \
    "$PYTHON" benchmarks/trainer.py --model $LARGE "${COMPILE[@]}" --steps 2 --rounds 1 --output "$OUT/trainer.jsonl"
# The loss: a GPT of 18 layers of 768 with ZeRO-3's numerics and ZeRO++'s. A call that ends saves, and the next one goes on.
[[ $PYTHON != */* ]] || PATH="$(cd "$(dirname "$PYTHON")" && pwd):$PATH"
export CORPUS=${CORPUS:-$OUT/corpus}
for recipe in zero3 zeropp; do
    part "train-$recipe" 540 "file:$KERNELS,numpy,sentencepiece" env SCALE=$TRAIN GPUS=1 RECIPE=$recipe OUT="$OUT/$recipe" \
        examples/zeropp/gpt_350m.sh --save-interval 100
done
part losses 60 "file:$OUT/passed/train-zero3,file:$OUT/passed/train-zeropp" "$PYTHON" examples/quickstart/summary.py compare \
    --data-path "$CORPUS/python_text_document" "ZeRO-3=$OUT/zero3/log.txt" "ZeRO++=$OUT/zeropp/log.txt"

echo
cat "$SUMMARY"
echo "results: $OUT"
[ $failed = 0 ] || echo "something is left: benchmarks/gpu.sh $OUT goes on"
exit $failed
