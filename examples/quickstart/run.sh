#!/usr/bin/env bash
# Trains the same small GPT twice on 4 ranks of this machine, as if they were 2 nodes of 2 ranks: with ZeRO-3 in 16 bit,
# and with ZeRO++ and LoCo. Then it compares loss and traffic. `make quickstart` runs it. Text, tokenizer and tokens are
# made once and kept in $OUT.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-runs/quickstart}
MEGABYTES=${MEGABYTES:-20}  # megabytes of text
VOCAB_SIZE=${VOCAB_SIZE:-2048}
EVAL_ITERS=${EVAL_ITERS:-10}
TRAIN_ITERS=${TRAIN_ITERS:-300}

# 4 ranks share the cores: more threads than cores would only get in each other's way.
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
export OMP_NUM_THREADS=$((cores > 4 ? cores / 4 : 1))

say() { printf '\n== %s\n' "$*"; }

say "Making text from the sources of Python's standard library"
[ -f "$OUT/corpus.jsonl" ] || python examples/quickstart/make_corpus.py --output "$OUT/corpus.jsonl" --max-megabytes "$MEGABYTES"

say "Training a tokenizer, and tokenizing the text"
[ "$OUT/tokenizer.model" -nt "$OUT/corpus.jsonl" ] || python tools/train_tokenizer.py \
    --input "$OUT/corpus.jsonl" --vocab-size "$VOCAB_SIZE" --output "$OUT/tokenizer.model"
[ "$OUT/python_text_document.idx" -nt "$OUT/tokenizer.model" ] || python tools/preprocess_data.py \
    --input "$OUT/corpus.jsonl" --output-prefix "$OUT/python" --append-eod --workers "$cores" --log-interval 100000 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model"
du -h "$OUT"/corpus.jsonl "$OUT"/tokenizer.model "$OUT"/python_text_document.bin

# A GPT small enough for processors that are slow in bf16. It sees no text twice, so it needs no dropout.
train() {  # name, flags
    local name=$1
    shift
    torchrun --nproc-per-node 4 pretrain_gpt.py \
        --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --attention-dropout 0 --hidden-dropout 0 \
        --micro-batch-size 8 --train-iters "$TRAIN_ITERS" --eval-iters "$EVAL_ITERS" --log-interval 10 --num-workers 0 \
        --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta2 0.95 --weight-decay 0.1 \
        --data-path "$OUT/python_text_document" --split 97,3,0 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$OUT/tokenizer.model" \
        --bf16 --metrics-dir "$OUT/$name" "$@"
}

say "Training with ZeRO-3: weights and gradients are sent in 16 bit"
train zero3 --grad-reduce-in-bf16 --zeropp-ranks-per-node 2

say "Training with ZeRO++ and LoCo: between nodes, weights are sent in 8 bit and gradients in 4 bit, once per step"
train zeropp --zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients --zeropp-loco \
    --save "$OUT/zeropp" --overwrite-save --save-interval "$TRAIN_ITERS"

say "A sample of code from the ZeRO++ model"
python tools/generate_text.py --load "$OUT/zeropp" --prompt "    def test_" --num-tokens 80 --temperature 0.9 --top-k 40

say "Comparing both runs"
python examples/quickstart/summary.py --data-path "$OUT/python_text_document" --plot "$OUT/loss.png" \
    "ZeRO-3 in 16 bit=$OUT/zero3" "ZeRO++ with LoCo=$OUT/zeropp"
cat <<END

Both "nodes" are this machine, without a slow network between them. So tokens per second show what quantization costs,
and MB between nodes show what it saves.

Try next:
  source .venv/bin/activate
  python tools/generate_text.py --load $OUT/zeropp --prompt "class Test" --temperature 0.9 --top-k 40
  python pretrain_gpt.py --help
Read docs/tutorials/quickstart.md for each step of this run, docs/how-to/prepare-data.md to use your own text, and docs/how-to/train.md to train
larger models.
END
