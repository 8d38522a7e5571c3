#!/usr/bin/env bash
#SBATCH --job-name=loco-gpt-345m
#SBATCH --nodes=2
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
# GPT-345M: LoCo under Adam and under SGD (LoCo, arXiv 2407.04480).
#
#   examples/loco/gpt_345m.sh                    a tiny GPT on this machine's processor, two minutes
#   SCALE=gpu examples/loco/gpt_345m.sh          a GPT of 125M on this machine's GPUs
#   RECIPE=loco sbatch examples/loco/gpt_345m.sh full scale; requeues itself, and goes on
#
# More flags of the trainer may follow, and win: examples/loco/gpt_345m.sh --train-iters 20. See ../common.sh for OUT,
# DRY_RUN, ESTIMATE and their kin, and ../README.md for the data.
#
# RECIPE=zero3        weights and gradients in 16 bit, by PyTorch FSDP2's own collectives
#        zeropp       weights in 8 bit; hpZ; gradients in 4 bit on both hops, in blocks of BLOCK elements
#        loco         the same, and LoCo on both hops, as DeepSpeed had it (beta 0.8, reset every 1024 steps)
#        int8         ours, --zeropp int8: moved int8 codes of weights; gradients in 8 bit within a node and 4 bit between
#                     them, LoCo there; blocks of 128
# BLOCK               default: the model's width, about what DeepSpeed had. In blocks of 128, our default elsewhere,
#                     4 bits lose so little that LoCo has nothing to win back (docs/evidence/experiments.md)
# OPTIMIZER=adam      AdamW (0.9, 0.95), weight decay 0.1, 3e-4 at full scale
#           sgd       momentum 0.9, 0.1 (with SCALE=laptop 0.5)
#
# What is reported: LoCo's abstract, that Adam and SGD keep their rates of convergence (a theorem, non-convex). The paper's
# tables we have not read and do not quote.
# Data, batch and learning rate: not stated in what we read; ours: the Pile, 512 x 1024 tokens a step, 31 billion tokens.
# The shape is Megatron-LM's GPT-345M, 24 layers of width 1024. SGD's learning rate is ours and was not tuned.
#
# What the full scale needs, as estimated by ESTIMATE=1 for 2 nodes of 8 A100 and 100 Gbit/s out of each node
# (by the planner; activations are about right, and nothing of it was measured on GPUs):
#   RECIPE=zero3: 14 GB a GPU; a node sends 3.8 GB per step; a step takes 0.95 s, the run 16 hours
#   RECIPE=zeropp: 14 GB a GPU; a node sends 0.27 GB per step; a step takes 0.58 s, the run 9.7 hours
#   RECIPE=loco: 14 GB a GPU; a node sends 0.27 GB per step; a step takes 0.58 s, the run 9.7 hours
#   RECIPE=int8: 14 GB a GPU; a node sends 0.12 GB per step; a step takes 0.58 s, the run 9.7 hours
#   RECIPE=zero3 OPTIMIZER=sgd: 14 GB a GPU; a node sends 3.8 GB per step; a step takes 0.95 s, the run 16 hours
#   RECIPE=loco OPTIMIZER=sgd: 14 GB a GPU; a node sends 0.27 GB per step; a step takes 0.58 s, the run 9.7 hours
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
source examples/common.sh
RECIPE=${RECIPE:-loco} OPTIMIZER=${OPTIMIZER:-adam}
one_of RECIPE zero3 zeropp loco int8
one_of OPTIMIZER adam sgd
OUT=${OUT:-runs/loco/gpt_345m/$SCALE-$RECIPE-$OPTIMIZER}
BASELINE=${BASELINE-runs/loco/gpt_345m/$SCALE-zero3-$OPTIMIZER}
GPU=${GPU:-A100}
cluster 2 8

case $SCALE in
    laptop) tiny_run ;;
    gpu) small_run ;;
    full)
        VOCABULARY=50257
        WIDTH=1024
        MODEL=(--preset gpt-350m --seq-length 1024)
        LENGTH=(--micro-batch-size 16 --global-batch-size 512 --train-iters 60000 --lr-warmup-iters 600)
        RATE=(--lr 3e-4 --min-lr 3e-5)
        OFTEN=(--log-interval 50 --eval-iters 20 --eval-interval 1000 --save-interval 2000)
        OFTEN+=(--tensorboard-dir "$OUT/tensorboard" --zeropp-monitor-interval 100)
        TEXT=(--data-path data/pile_text_document --tokenizer-type GPT2BPETokenizer)
        TEXT+=(--vocab-file data/gpt2/vocab.json --merge-file data/gpt2/merges.txt)
        ;;
esac

case $OPTIMIZER in
    adam) RATE+=(--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1) ;;
    sgd)
        RATE=(--lr 0.1 --min-lr 0.01)
        [ "$SCALE" != laptop ] || RATE=(--lr 0.5 --min-lr 0.05)
        RATE+=(--optimizer sgd --sgd-momentum 0.9 --weight-decay 1e-4)
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

launch pretrain_gpt.py "${MODEL[@]}" --attention-dropout 0 --hidden-dropout 0 --bf16 \
    "${LENGTH[@]}" "${RATE[@]}" --lr-decay-style cosine --clip-grad 1.0 \
    "${TEXT[@]}" "${OFTEN[@]}" --log-throughput \
    --zeropp-ranks-per-node "$RANKS_PER_NODE" "${COMMUNICATION[@]}" \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --load-latest-good --save-keep-last 3 --exit-signal-handler "$@"
conclude loco/gpt_345m.sh loco-rates "$RECIPE" RECIPE=zero3 "$@"
