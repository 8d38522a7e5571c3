#!/usr/bin/env bash
#SBATCH --job-name=loco-mixtral
#SBATCH --nodes=16
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
# Mixtral-8x7B on 5 billion tokens of RedPajama-V2: LoCo under a mixture of experts (LoCo, arXiv 2407.04480).
#
#   examples/loco/mixtral.sh                     a tiny mixture on this machine's processor, two minutes
#   SCALE=gpu examples/loco/mixtral.sh           one of 494M parameters on this machine's GPUs
#   RECIPE=loco sbatch examples/loco/mixtral.sh  full scale; requeues itself, and goes on
#
# More flags of the trainer may follow, and win: examples/loco/mixtral.sh --train-iters 20. See ../common.sh for OUT,
# DRY_RUN, ESTIMATE and their kin, and ../README.md for the data.
#
# A layer's eight experts are divided among the ranks of a node, so that tokens are sent to them within it.
#
# RECIPE=zero3        weights and gradients in 16 bit, by PyTorch FSDP2's own collectives
#        zeropp       weights in 8 bit; hpZ; gradients in 4 bit on both hops, in blocks of BLOCK elements
#        loco         the same, and LoCo on both hops, as DeepSpeed had it (beta 0.8, reset every 1024 steps)
#        int8         ours, --zeropp int8: moved int8 codes of weights; gradients in 8 bit within a node and 4 bit between
#                     them, LoCo there; blocks of 128
# BLOCK               default: the model's width, about what DeepSpeed had. In blocks of 128, our default elsewhere,
#                     4 bits lose so little that LoCo has nothing to win back (docs/evidence/experiments.md)
#
# What is reported: LoCo's abstract, Adam 14-40 % faster on LLAMA and MoE under Megatron-LM and FSDP, no degradation. The
# paper's tables, Mixtral 8x7B's among them, we have not read and do not quote.
# Data, batch and learning rate: not stated in what we read. Ours: 256 x 4096 tokens a step, AdamW (0.9, 0.95), weight
# decay 0.1, clipping at 1, 1e-4, cosine to a tenth, a balancing loss of 0.02 (Mixtral's).
#
# What the full scale needs, as estimated by ESTIMATE=1 for 16 nodes of 8 A100 and 100 Gbit/s out of each node
# (by the planner; activations are about right, and nothing of it was measured on GPUs):
#   RECIPE=zero3: 33 GB a GPU; a node sends 526 GB per step; a step takes 56 s, the run 3.1 days
#   RECIPE=zeropp: 68 GB a GPU; a node sends 66 GB per step; a step takes 8.5 s, the run 11 hours
#   RECIPE=loco: 76 GB a GPU; a node sends 66 GB per step; a step takes 8.5 s, the run 11 hours
#   RECIPE=int8: 68 GB a GPU; a node sends 29 GB per step; a step takes 4.8 s, the run 6.3 hours
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
source examples/common.sh
RECIPE=${RECIPE:-loco}
one_of RECIPE zero3 zeropp loco int8
OUT=${OUT:-runs/loco/mixtral/$SCALE-$RECIPE}
BASELINE=${BASELINE-runs/loco/mixtral/$SCALE-zero3}
GPU=${GPU:-A100}
cluster 16 8

case $SCALE in
    laptop)
        tiny_run
        MODEL+=(--num-experts 4)
        ;;
    gpu)
        small_run
        MODEL+=(--num-experts 8)
        ;;
    full)
        VOCABULARY=32000
        WIDTH=4096
        MODEL=(--preset mixtral-8x7b --seq-length 4096 --recompute-granularity selective)
        LENGTH=(--micro-batch-size 1 --global-batch-size 256 --train-iters 4768 --lr-warmup-iters 200)
        RATE=(--lr 1e-4 --min-lr 1e-5)
        OFTEN=(--log-interval 10 --eval-iters 20 --eval-interval 250 --save-interval 250)
        OFTEN+=(--tensorboard-dir "$OUT/tensorboard" --zeropp-monitor-interval 100)
        TEXT=(--data-path data/redpajama_llama2_raw_content_document --tokenizer-type SentencePieceTokenizer)
        TEXT+=(--tokenizer-model data/llama2/tokenizer.model)
        ;;
esac
MODEL+=(--moe-aux-loss-coeff 0.02)
[ "$RANKS_PER_NODE" = 1 ] || MODEL+=(--expert-model-parallel-size "$RANKS_PER_NODE")

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
conclude loco/mixtral.sh loco-experts "$RECIPE" RECIPE=zero3 "$@"
