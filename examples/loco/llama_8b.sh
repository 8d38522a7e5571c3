#!/usr/bin/env bash
#SBATCH --job-name=loco-llama-8b
#SBATCH --nodes=4
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
# Llama-8B on 5 billion tokens of RedPajama-V2: does LoCo win back what 4-bit gradients lose? (LoCo, arXiv 2407.04480)
#
#   examples/loco/llama_8b.sh                    a tiny Llama on this machine's processor, two minutes
#   SCALE=gpu examples/loco/llama_8b.sh          a Llama of 125M on this machine's GPUs
#   RECIPE=loco sbatch examples/loco/llama_8b.sh full scale; requeues itself, and goes on
#
# More flags of the trainer may follow, and win: examples/loco/llama_8b.sh --train-iters 20. See ../common.sh for OUT,
# DRY_RUN, ESTIMATE and their kin, and ../README.md for the data.
#
# RECIPE=zero3        weights and gradients in 16 bit, by PyTorch FSDP2's own collectives
#        zeropp       weights in 8 bit; hpZ; gradients in 4 bit on both hops, in blocks of BLOCK elements
#        loco         the same, and LoCo on both hops, as DeepSpeed had it (beta 0.8, reset every 1024 steps)
#        int8         ours, --zeropp int8: moved int8 codes of weights; gradients in 8 bit within a node and 4 bit between
#                     them, LoCo there; blocks of 128
# BLOCK               default: the model's width, about what DeepSpeed had. In blocks of 128, our default elsewhere,
#                     4 bits lose so little that LoCo has nothing to win back (docs/evidence/experiments.md)
#
# What is reported: DeepSpeed's PR 6730, by LoCo's authors (Llama-2-style models of 0.8B on 30B tokens and of 8B on 5B
# tokens of RedPajama-V2): LoCo on ZeRO++ beats ZeRO++ clearly at 0.8B, less at 8B; at no extra time; extra memory "depends
# on model". Curves without numbers. LoCo's abstract (arXiv 2407.04480): no degradation, and Adam 14-40 % faster on LLAMA
# and MoE under Megatron-LM and FSDP. The paper's tables we have not read and do not quote.
# The model's exact shape, batch and learning rate: not stated in what we read. Ours: Llama 3's 8B and its tokenizer, 256 x
# 4096 tokens a step, AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, 3e-4, cosine to a tenth.
#
# What the full scale needs, as estimated by ESTIMATE=1 for 4 nodes of 8 A100 and 100 Gbit/s out of each node
# (by the planner; activations are about right, and nothing of it was measured on GPUs):
#   RECIPE=zero3: 38 GB a GPU; a node sends 179 GB per step; a step takes 26 s, the run 1.4 days
#   RECIPE=zeropp: 44 GB a GPU; a node sends 9.1 GB per step; a step takes 8.7 s, the run 12 hours
#   RECIPE=loco: 53 GB a GPU; a node sends 9.1 GB per step; a step takes 8.7 s, the run 12 hours
#   RECIPE=int8: 44 GB a GPU; a node sends 4 GB per step; a step takes 8.7 s, the run 11 hours
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
source examples/common.sh
RECIPE=${RECIPE:-loco}
one_of RECIPE zero3 zeropp loco int8
OUT=${OUT:-runs/loco/llama_8b/$SCALE-$RECIPE}
BASELINE=${BASELINE-runs/loco/llama_8b/$SCALE-zero3}
GPU=${GPU:-A100}
cluster 4 8

case $SCALE in
    laptop) tiny_run ;;
    gpu) small_run ;;
    full)
        VOCABULARY=128256
        WIDTH=4096
        MODEL=(--preset llama-8b --seq-length 4096 --recompute-granularity selective)
        LENGTH=(--micro-batch-size 2 --global-batch-size 256 --train-iters 4768 --lr-warmup-iters 200)
        RATE=(--lr 3e-4 --min-lr 3e-5)
        OFTEN=(--log-interval 10 --eval-iters 20 --eval-interval 250 --save-interval 250)
        OFTEN+=(--tensorboard-dir "$OUT/tensorboard" --zeropp-monitor-interval 100)
        TEXT=(--data-path data/redpajama_llama3_raw_content_document --tokenizer-type TikTokenizer)
        TEXT+=(--tokenizer-model data/llama3/tokenizer.model)
        ;;
esac

ZEROPP=(--zero-quantized-weights --zeropp-weight-bits 8 --zero-hpz-partition-size "$RANKS_PER_NODE"
    --zero-quantized-gradients --zeropp-gradient-bits 4)
AS_PUBLISHED=(--zeropp-gradient-intra-bits 4 --zeropp-gradient-block-size "${BLOCK:-$WIDTH}")
case $RECIPE in
    zero3) COMMUNICATION=(--grad-reduce-in-bf16) ;;
    zeropp) COMMUNICATION=("${ZEROPP[@]}" "${AS_PUBLISHED[@]}") ;;
    loco)
        COMMUNICATION=("${ZEROPP[@]}" "${AS_PUBLISHED[@]}" --zeropp-loco --zeropp-loco-hops both --zeropp-loco-beta 0.8
            --zeropp-loco-reset-interval 1024)
        ;;
    int8) COMMUNICATION=(--zeropp "$RECIPE") ;;
esac

launch pretrain_llama.py "${MODEL[@]}" --bf16 \
    "${LENGTH[@]}" "${RATE[@]}" --lr-decay-style cosine \
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    "${TEXT[@]}" "${OFTEN[@]}" --log-throughput \
    --zeropp-ranks-per-node "$RANKS_PER_NODE" "${COMMUNICATION[@]}" \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --load-latest-good --save-keep-last 3 --exit-signal-handler "$@"
conclude loco/llama_8b.sh loco-speed "$RECIPE" RECIPE=zero3 "$@"
