#!/usr/bin/env bash
# Everything that needs a GPU, in two commands for a rented card that is bare at each start: tests the kernels, the training
# path and NCCL, measures kernels and the trainer, and trains a GPT of 135M parameters with 16-bit and with int8 communication.
# docs/how-to/gpu-checklist.md says what to prepare, and what each part answers.
#
#     benchmarks/gpu.sh FOLDER first      7 minutes at most
#     benchmarks/gpu.sh FOLDER second     3 minutes at most
#     benchmarks/gpu.sh FOLDER PART...    these parts, passed or not
#     benchmarks/gpu.sh --list            the commands of all parts
#
# FOLDER gets the results, four files, which grow as the parts run. A part that fails, or runs out of time, does not stop the
# others: the summary names it, and the exit status is 1. In the same FOLDER, parts that have passed are not run again.
# Needs one NVIDIA GPU, and a Python with torch for CUDA, numpy and pytest (.venv's, else python3; or PYTHON=...), but no
# network. SCALE=tiny tries the same commands with tiny models on a processor.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 2
}

SCALE=${SCALE:-gpu}
case $SCALE in # the two differ in sizes alone
    gpu)
        DEVICE=cuda MODEL=gpt-350m SEQUENCES=8 OFFLOADED=12 MEGABYTES=1024 CASES="cuda or built"
        LAYERS=18 WIDTH=768 HEADS=12 LENGTH=1024 STEPS=330 WARMUP=33 MINUTES=1.5
        ;;
    tiny)
        DEVICE=cpu MODEL=tiny-gpt SEQUENCES=2 OFFLOADED=1 MEGABYTES=1 CASES="one_pass and cpu or built"
        LAYERS=2 WIDTH=64 HEADS=2 LENGTH=64 STEPS=22 WARMUP=2 MINUTES=9
        export CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
        ;;
    *) fail "SCALE=$SCALE does not exist; choose one of: gpu tiny" ;;
esac
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
TEXT=${TEXT:-build/gpu-text}
[ ! -d build/cuda-objects ] || export ZEROPP_CUDA_OBJECTS=${ZEROPP_CUDA_OBJECTS-build/cuda-objects}
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} # H100 and H200, where kernels were not compiled ahead
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # the card is to be filled
[ -d "${CUDA_HOME:=/usr/local/cuda}/bin" ] && export CUDA_HOME PATH="$PATH:$CUDA_HOME/bin"

lists='' OUT=FOLDER
if [ "${1:-}" = --list ]; then
    lists=yes
else
    [ $# -ge 2 ] || fail "say where results go, and what to run: benchmarks/gpu.sh FOLDER first|second|PART..."
    for word in "${@:2}"; do
        { printf ' first\n second\n' && benchmarks/gpu.sh --list | cut -d: -f2; } | grep -x " $word" >/dev/null ||
            fail "there is no part called $word: benchmarks/gpu.sh --list shows all"
    done
    [ "$SCALE" = tiny ] || "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
        fail "$PYTHON has no torch that sees a CUDA device: run this on a machine with an NVIDIA GPU, or give PYTHON=..."
    mkdir -p "$1"
    OUT=$(cd "$1" && pwd)
    shift
fi
chosen=" $* " failed=0
BUDGET=${BUDGET:-$([[ $chosen == *" first "* ]] && echo 405 || echo 165)} # seconds for all parts together

say() {
    echo "$*" | tee -a "$OUT/summary.txt"
}

# Whether a Python module, a program (program:NAME) or a file (file:PATH) is there.
has() {
    case $1 in
        program:*) command -v "${1#*:}" >/dev/null ;;
        file:*) [ -e "${1#*:}" ] ;;
        *) "$PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec(sys.argv[1]))' "$1" ;;
    esac
}

# part NAME SECONDS NEEDS COMMAND...: runs a part, for so many seconds at most. NEEDS: separated by commas.
part() {
    local name=$1 seconds=$2 needs=$3 left=$((BUDGET - SECONDS)) start=$SECONDS me=$BASHPID before now need verdict
    shift 3
    if [ -n "$lists" ]; then
        echo "$call: $name: $seconds: $(printf '%q ' "$@")"
        return 0
    elif [[ " $call " == *"$chosen"* ]]; then
        [[ $call == *" "* ]] || ! grep -qs "^passed $name " "$OUT/summary.txt" || return 0 # a bare machine builds again
    elif [[ $chosen != *" $name "* ]]; then
        return 0
    fi
    for need in ${needs//,/ }; do
        has "$need" || {
            say "skipped $name (${need#*:} is not here)"
            return 0
        }
    done
    [ "$SCALE" = gpu ] || seconds=$left # a processor may be busy
    [ "$left" -gt 5 ] || {
        say "LEFT $name (the $BUDGET seconds are over)"
        failed=1
        return 1
    }
    read -ra before <"/proc/$me/stat"
    { printf '%q ' "$@" && echo && timeout --kill-after=5 "$((left < seconds ? left : seconds))" "$@"; } 2>&1 |
        sed -u "s/^/$name: /" | tee -a "$OUT/log.txt"
    case ${PIPESTATUS[0]} in
        0) verdict=passed ;;
        77) verdict=skipped ;; # and log.txt says why
        124 | 137) verdict=TIMEOUT failed=1 ;;
        *) verdict=FAILED failed=1 ;;
    esac
    read -ra now <"/proc/$me/stat"
    say "$verdict $name ($((SECONDS - start)) s, $(((now[15] + now[16] - before[15] - before[16]) / 100)) s of processors)"
    [ "$failed" = 0 ]
}

TESTS=("$PYTHON" -m pytest -q -m "" --durations 5)
TRAINER=("$PYTHON" benchmarks/trainer.py --model "$MODEL" --output "$OUT/trainer.jsonl")

call="first second"
part machine 5 program:nvidia-smi nvidia-smi
part build 90 program:nvidia-smi,program:nvcc,setuptools bash -c \
    '"$0" setup.py build_ext --inplace && ls -l megatron_zpp/zeropp/wire/_kernels.so' "$PYTHON"

call=first # the most valuable parts first
part environment 30 numpy "$PYTHON" -m megatron_zpp.commands.env
part kernel-tests 75 pytest,hypothesis "${TESTS[@]}" tests/zeropp/test_kernels.py tests/zeropp/test_moves.py -k "$CASES"
part training-tests 90 pytest "${TESTS[@]}" tests/gpu/test_training.py -k "training_equals_gloo and $DEVICE"
part memcheck 60 program:compute-sanitizer,pytest,hypothesis benchmarks/sanitize.sh memcheck "$PYTHON"
part kernels 60 numpy "$PYTHON" benchmarks/kernels.py --megabytes $MEGABYTES --threads 1 --rounds 3 --beside --output "$OUT/kernels.json"
# Tokens/s and MFU beside a plain FSDP2 loop, parts of a step by the profiler, peak memory beside the estimator's.
part trainer 100 numpy "${TRAINER[@]}" --micro-batch-size $SEQUENCES --steps 4 --rounds 2
# Four ranks on the card, as two nodes: launches, and how much of the communication is exposed. Copies go through the host, so
# the times of the collectives are not NCCL's.
part step 60 numpy "$PYTHON" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 4 \
    "${TRAINER[@]:1}" --micro-batch-size 1 --no-compile --steps 2 --rounds 1 --flags \
    "--num-workers 0 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2 --zeropp-loco"
part nccl 45 pytest "${TESTS[@]}" tests/gpu/test_collectives.py -k "every_collective and $DEVICE"
part racecheck 60 program:compute-sanitizer,pytest,hypothesis benchmarks/sanitize.sh racecheck "$PYTHON"
part float8 60 torchao "${TRAINER[@]}" --micro-batch-size $SEQUENCES --steps 4 --rounds 2 --flags "--fp8-format hybrid"
part offload 60 numpy "${TRAINER[@]}" --micro-batch-size $SEQUENCES --no-compile --steps 4 --rounds 2 \
    --flags "--cpu-offloading-num-layers $OFFLOADED"

call=second
# The loss of 2 ranks, each as a node of its own, on the one card; each token once: side by side, since it does not depend on time.
TRAIN=("$PYTHON" pretrain_gpt.py --num-layers $LAYERS --hidden-size $WIDTH --num-attention-heads $HEADS --seq-length $LENGTH
    --attention-dropout 0 --hidden-dropout 0 --bf16 --micro-batch-size 8 --global-batch-size 64 --train-iters $STEPS
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters $WARMUP --adam-beta2 0.95 --weight-decay 0.1
    --data-path "$TEXT/python_text_document" --split 98,2,0 --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$TEXT/tokenizer.model" --log-interval 5 --eval-interval 20 --eval-iters 2 --log-throughput
    --local-nodes 2 --exit-duration-in-mins $MINUTES)
part train-bf16 115 "sentencepiece,file:$TEXT/tokenizer.model" "${TRAIN[@]}" --metrics-dir "$OUT/bf16" --grad-reduce-in-bf16 &
bf16=$!
part train-int8 115 "sentencepiece,file:$TEXT/tokenizer.model" "${TRAIN[@]}" --metrics-dir "$OUT/int8" --zeropp int8 || failed=1
wait $bf16 || failed=1

[ -z "$lists" ] || exit 0
echo
cat "$OUT/summary.txt"
echo "results: $OUT"
exit $failed
