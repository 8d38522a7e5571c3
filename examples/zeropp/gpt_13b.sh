#!/usr/bin/env bash
#SBATCH --job-name=zeropp-gpt-13b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
# GPT-13B on the Pile: does quantizing weights and gradients change the loss? (ZeRO++, arXiv 2306.10209, pretraining)
#
#   examples/zeropp/gpt_13b.sh                                a tiny GPT on this machine's processor, two minutes
#   SCALE=gpu examples/zeropp/gpt_13b.sh                      a GPT of 125M on this machine's GPUs
#   RECIPE=zeropp sbatch examples/zeropp/gpt_13b.sh           the paper's scale; requeues itself, and goes on
#   SCALE=full HEAD=node0:29400 examples/zeropp/gpt_13b.sh     the same without Slurm, typed on each of 8 machines
#
# More flags of the trainer may follow, and win: examples/zeropp/gpt_13b.sh --train-iters 20. See ../common.sh for OUT,
# DRY_RUN, ESTIMATE and their kin, and ../README.md for the data.
#
# RECIPE=zero3             weights and gradients in 16 bit, by PyTorch FSDP2's own collectives
#        zeropp            weights in WEIGHT_BITS=8 (or 6), in blocks; hpZ; gradients in 4 bit on both hops
#        zeropp-nonblocked the same with one scale for each tensor's shard, of weights and of gradients: "non-blocked"
#
# What the paper reports: the abstract, that 13B trains on par with 8-bit and 6-bit gathers of the weights; and that
# non-blocked quantization diverges at the beginning. No losses of 13B. Batch, learning rate and tokens: not stated in what we read of it. Batch (1024 x 2048 tokens), learning rate (1e-4, cosine to a tenth), its warm-up
# (375 million tokens), AdamW (0.9, 0.95), weight decay and clipping are ours, in the range that the GPT-3 paper (arXiv
# 2005.14165) states; the tokens (42 billion, as for gpt_350m.sh) and no dropout are ours alone.
#
# What the full scale needs, as estimated by ESTIMATE=1 for 8 nodes of 8 A100 and 100 Gbit/s out of each node
# (by the planner; activations are about right, and nothing of it was measured on GPUs):
#   RECIPE=zero3: 26 GB a GPU; a node sends 603 GB per step; a step takes 73 s, the run 17 days
#   RECIPE=zeropp: 36 GB a GPU; a node sends 17 GB per step; a step takes 15 s, the run 3.5 days
#   RECIPE=zeropp WEIGHT_BITS=6: 36 GB a GPU; a node sends 15 GB per step; a step takes 15 s, the run 3.4 days
#   RECIPE=zeropp-nonblocked: 36 GB a GPU; a node sends 17 GB per step; a step takes 15 s, the run 3.5 days
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
source examples/common.sh
RECIPE=${RECIPE:-zeropp} WEIGHT_BITS=${WEIGHT_BITS:-8}
one_of RECIPE zero3 zeropp zeropp-nonblocked
one_of WEIGHT_BITS 8 6
OUT=${OUT:-runs/zeropp/gpt_13b/$SCALE-$RECIPE-$WEIGHT_BITS}
BASELINE=${BASELINE-runs/zeropp/gpt_13b/$SCALE-zero3-$WEIGHT_BITS}
GPU=${GPU:-A100}
cluster 8 8

case $SCALE in
    laptop) tiny_run ;;
    gpu) small_run ;;
    full)
        VOCABULARY=50257
        MODEL=(--preset gpt-13b --seq-length 2048 --recompute-granularity selective)
        LENGTH=(--micro-batch-size 2 --global-batch-size 1024 --train-iters 20000 --lr-warmup-iters 179)
        RATE=(--lr 1e-4 --min-lr 1e-5)
        OFTEN=(--log-interval 10 --eval-iters 10 --eval-interval 500 --save-interval 250)
        OFTEN+=(--tensorboard-dir "$OUT/tensorboard" --zeropp-monitor-interval 100)
        TEXT=(--data-path data/pile_text_document --tokenizer-type GPT2BPETokenizer)
        TEXT+=(--vocab-file data/gpt2/vocab.json --merge-file data/gpt2/merges.txt)
        ;;
esac

ZEROPP=(--zero-quantized-weights --zeropp-weight-bits "$WEIGHT_BITS" --zero-hpz-partition-size "$RANKS_PER_NODE"
    --zero-quantized-gradients --zeropp-gradient-bits 4 --zeropp-gradient-intra-bits 4)
case $RECIPE in
    zero3) COMMUNICATION=(--grad-reduce-in-bf16) ;;
    zeropp) COMMUNICATION=("${ZEROPP[@]}") ;;
    zeropp-nonblocked) COMMUNICATION=("${ZEROPP[@]}" --zeropp-weight-block-size 0 --zeropp-gradient-block-size 0) ;;
esac

launch pretrain_gpt.py "${MODEL[@]}" --attention-dropout 0 --hidden-dropout 0 --bf16 \
    "${LENGTH[@]}" "${RATE[@]}" --lr-decay-style cosine \
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    "${TEXT[@]}" "${OFTEN[@]}" --log-throughput \
    --zeropp-ranks-per-node "$RANKS_PER_NODE" "${COMMUNICATION[@]}" \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --load-latest-good --save-keep-last 3 --exit-signal-handler "$@"
conclude zeropp/gpt_13b.sh zeropp-weights "$RECIPE" RECIPE=zero3 "$@"
