"""Launch scripts of Megatron-LM and Megatron-DeepSpeed, one of each kind, with their flags as published, train small.

What is behind ``SMALL`` are sizes, lengths and paths: of a flag that is given twice, the last one holds.
"""

import math

import pytest

from tests.parallel.layouts import results_on

DEEPSPEED = (
    "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.013 --lr 2.0e-4 "
    "--min-lr 1.0e-6 --lr-decay-style cosine --lr-decay-tokens 300000000000 --lr-warmup-tokens 3000000000 "
    "--train-tokens 300000000000 --train-samples 292968750 --exit-duration-in-mins 30000000 --split 949,50,1 "
    "--log-interval 10 --eval-interval 100 --eval-iters 10 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --fp16 "
    "--seed 1234 --no-async-tensor-model-parallel-allreduce --tensorboard-queue-size 1 --log-timers-to-tensorboard "
    "--log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --log-optimizer-states-to-tensorboard "
    "--data-impl mmap --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --deepspeed "
)
SCRIPTS = {
    "lengths that grow, activation checkpointing": DEEPSPEED
    + "--checkpoint-activations --deepspeed-activation-checkpointing --tensor-model-parallel-size 2 --zero-stage 0 "
    "--moe-expert-parallel-size 1 --num-experts 1 --no-pipeline-parallel --use-rotary-position-embeddings",
    "Llama": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lr 3e-4 --lr-decay-style cosine "
    "--min-lr 3e-5 --train-iters 250000 --lr-warmup-iters 2000 --bf16 --no-query-key-layer-scaling "
    "--attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings --swiglu "
    "--untie-embeddings-and-output-weights "
    "--normalization rmsnorm --disable-bias-linear --zero-stage=0 --deepspeed --num-key-value-heads 2",
    "Transformer Engine and fp8": "--use-mcore-models --group-query-attention --num-query-groups 2 --kv-channels 8 "
    "--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused "
    "--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --train-samples 1953125000 "
    "--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 "
    "--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --weight-decay 0.1 --bf16 --grad-reduce-in-bf16 "
    "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid "
    "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --sequence-parallel "
    "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --ckpt-format torch_dist --profile --log-throughput",
}
SMALL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --make-vocab-size-divisible-by 32 --micro-batch-size 1 --global-batch-size 8 "
    "--eval-iters 1 --log-interval 1 --num-workers 0 --tokenizer-type ByteTokenizer --distributed-backend gloo "
)
SMALLER = {
    **{"--train-iters": 2, "--train-samples": 16, "--train-tokens": 512},
    **{"--lr-decay-iters": 2, "--lr-decay-samples": 16, "--lr-decay-tokens": 512},
    **{"--lr-warmup-iters": 1, "--lr-warmup-samples": 8, "--lr-warmup-tokens": 256},
    "--num-layers-per-virtual-pipeline-stage": 1,
}
FILE = """"train_batch_size": 512, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10, "gradient_clipping": 1.0,
    "prescale_gradients": true, "wall_clock_breakdown": false"""  # --global-batch-size wins
BF16 = '"bf16": {"enabled": true}'
FP16 = """"fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
    "initial_scale_power": 11}"""
CURRICULUM = """"curriculum_learning": {"enabled": true, "curriculum_type": "seqlen", "min_difficulty": 8,
    "max_difficulty": 32, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8}}"""


@pytest.mark.long
def test_published_scripts_train_small(data, tmp_path):
    runs = {}
    for name, script in SCRIPTS.items():
        words = [*script.split(), *SMALL.split(), "--data-path", data]
        words += [str(word) for flag, value in SMALLER.items() if flag in words for word in (flag, value)]
        if "--deepspeed" in words:
            content = [FILE, FP16 if "--fp16" in words else BF16, *([CURRICULUM] if name.startswith("lengths") else [])]
            content.append(f'"zero_optimization": {{"stage": {3 if "--zero-stage 3" in script else 0}}}')
            file = tmp_path / f"{len(runs)}.json"
            file.write_text(f"{{{', '.join(content)}}}")
            words += ["--deepspeed_config", str(file)]
        runs[name] = "gpt", words
    for name, (metrics, _, out) in results_on(4, runs).items():
        losses = metrics["lm loss"]
        assert len(losses) == 2 and all(map(math.isfinite, losses)), name
        assert losses[0] == pytest.approx(math.log(288), abs=0.5), name  # ln of the padded vocabulary
        assert "lm loss value" in out, name
