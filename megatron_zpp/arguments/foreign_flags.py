"""Flags of Megatron-LM, Megatron-DeepSpeed and their launchers that are no settings here.

NOT_NEEDED holds those that ask for what is so anyway: they are accepted, with one note. REFUSED holds those that a
user may well bring along and that would change the run: each with what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_zpp.settings.groups import Settings


@dataclass(frozen=True)
class NotNeeded:
    """Why a flag needs no setting; for a flag with a value, the values of which that is true."""

    because: str
    accepted: tuple[str, ...] | None = None  # None: the flag is a switch
    holds: Callable[[Settings], bool] | None = None  # None: always


def _same(because: str, *flags: str) -> dict[str, NotNeeded]:
    return {flag: NotNeeded(because) for flag in flags}


def _refused(instead: str, *flags: str) -> dict[str, str]:
    return {flag: instead for flag in flags}


_ATTENTION = "attention is torch's scaled_dot_product_attention, which picks the fastest kernel"
_COMMUNICATION = "FSDP2 overlaps its communication with computation"
_NO_SUCH_FUSION = "no hand-written fused kernel is used"
_EACH_ITS_PART = "each rank always saves and loads its own part, and any number of ranks loads it"
_ALL_EXPERTS = "each rank has all experts"

NOT_NEEDED: dict[str, NotNeeded] = {
    **_same(_ATTENTION, "--use-flash-attn", "--use-flash-attn-v2"),
    "--attention-backend": NotNeeded(_ATTENTION, ("auto", "flash", "fused")),
    **_same("softmax is computed in fp32 inside the attention kernel", "--attention-softmax-in-fp32"),
    **_same("attention scores are not scaled by the layer's number", "--no-query-key-layer-scaling"),
    **_same("the causal mask is never materialized", "--no-create-attention-mask-in-dataloader"),
    **_same("there is one implementation of each model", "--use-mcore-models"),
    "--transformer-impl": NotNeeded("the models are plain PyTorch, without Transformer Engine", ("local",)),
    **_same(
        _NO_SUCH_FUSION,
        "--no-masked-softmax-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
    ),
    **_same("the output layer and the loss are one fused operation", "--cross-entropy-loss-fusion"),
    "--vocab-extra-ids": NotNeeded("the vocabulary is the tokenizer's", ("0",)),
    "--mlp-type": NotNeeded("the MLP is the usual one", ("standard",)),
    # Sharding and communication
    **_same("ZeRO is built in; choose its stage by --zero-stage", "--deepspeed"),
    "--use-distributed-optimizer": NotNeeded(
        "the optimizer is sharded from --zero-stage 1 on", holds=lambda settings: settings.zero.zero_stage >= 1
    ),
    **_same("sharding is PyTorch FSDP2", "--use-torch-fsdp2"),
    **_same(
        _COMMUNICATION,
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ),
    **_same(
        "FSDP2 reduce-scatters gradients from one contiguous buffer",
        "--zero-reduce-scatter",
        "--zero-contigious-gradients",
    ),
    **_same(
        "tensor-parallel collectives are not overlapped with matrix multiplications",
        "--no-async-tensor-model-parallel-allreduce",
    ),
    "--no-pipeline-parallel": NotNeeded(
        "the pipeline has one stage unless --pipeline-model-parallel-size",
        holds=lambda settings: settings.distributed.pipeline_model_parallel_size == 1,
    ),
    "--cp-comm-type": NotNeeded(
        "context-parallel ranks all-gather keys and values, whose result is that of p2p", ("p2p", "all_gather")
    ),
    "--ds-sequence-parallel-size": NotNeeded("sequences are shared by --context-parallel-size", ("1",)),
    "--expert-model-parallel-size": NotNeeded(_ALL_EXPERTS, ("1",)),
    "--expert-tensor-parallel-size": NotNeeded(_ALL_EXPERTS, ("1",)),
    "--moe-expert-parallel-size": NotNeeded(_ALL_EXPERTS, ("1",)),
    "--moe-token-dispatcher-type": NotNeeded(_ALL_EXPERTS, ("allgather", "alltoall", "alltoall_seq", "flex")),
    **_same("the products of a layer's experts are one grouped operation", "--moe-grouped-gemm"),
    **_same("tokens are sorted by expert in plain PyTorch", "--moe-permute-fusion"),
    "--moe-token-drop-policy": NotNeeded("experts drop the tokens that weigh least", ("probs",)),
    "--moe-router-dtype": NotNeeded("the router computes in fp32", ("fp32",)),
    "--remote-device": NotNeeded("what is offloaded is chosen by --cpu-offload", ("none",)),
    # Training
    **_same(
        "what is recomputed is chosen by --checkpoint-activations or --recompute-granularity",
        "--deepspeed-activation-checkpointing",
    ),
    "--empty-unused-memory-level": NotNeeded("the allocator's cache is kept", ("0",)),
    "--exit-signal": NotNeeded("--exit-signal-handler waits for all of them", ("SIGTERM", "SIGUSR1", "SIGINT")),
    "--timing-log-level": NotNeeded("times of single operations are not logged", ("0",)),
    "--timing-log-option": NotNeeded("times of single operations are not logged", ("minmax", "max", "all")),
    # Data and checkpoints
    "--data-impl": NotNeeded("data files are always memory-mapped", ("mmap",)),
    "--no-data-sharding": NotNeeded(
        "ranks share the data unless --data-sharding", holds=lambda settings: not settings.data.data_sharding
    ),
    "--num-dataset-builder-threads": NotNeeded("data sets are built by one thread", ("1",)),
    "--async-save": NotNeeded(
        "checkpoints are written while training goes on, unless --no-async-save",
        holds=lambda settings: not settings.checkpoint.no_async_save,
    ),
    **_same(
        _EACH_ITS_PART,
        "--ckpt-fully-parallel-save",
        "--ckpt-fully-parallel-load",
        "--dist-ckpt-optim-fully-reshardable",
    ),
}

_LATER = "it does not exist here; leave it out"
_NO_OFFLOAD = "activations and checkpoints are not offloaded; leave it out"

REFUSED: dict[str, str] = {
    # Renamed
    "--batch-size": "use --micro-batch-size (samples per rank) and --global-batch-size",
    "--warmup": "use --lr-warmup-fraction",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--layernorm-epsilon": "use --norm-epsilon",
    "--num-key-value-heads": "use --group-query-attention --num-query-groups",
    "--use-rotary-position-embeddings": "use --position-embedding-type rope",
    "--no-position-embedding": "use --position-embedding-type",
    "--dropout": "use --hidden-dropout and --attention-dropout",
    "--checkpoint-num-layers": "use --recompute-num-layers",
    "--checkpoint-in-cpu": _NO_OFFLOAD,
    "--train-tokens": "use --train-samples (tokens / sequence length)",
    "--lr-decay-tokens": "use --lr-decay-samples (tokens / sequence length)",
    "--lr-warmup-tokens": "use --lr-warmup-samples (tokens / sequence length)",
    "--step-batch-size-schedule": "use --rampup-batch-size",
    "--load-tag": "use --ckpt-step",
    "--override-ckpt-iteration": "use --ckpt-step",
    "--pretrained-checkpoint": "use --load with --finetune",
    "--override-lr-scheduler": "use --override-opt_param-scheduler",
    "--use-checkpoint-lr-scheduler": "use --use-checkpoint-opt_param-scheduler",
    "--distribute-checkpointed-activations": "activations are checkpointed by --recompute-granularity; leave it out",
    "--padded-vocab-size": "use --make-vocab-size-divisible-by",
    "--tokenizer": "use --tokenizer-type and --tokenizer-model",
    "--epochs": "use --train-iters or --train-samples",
    "--use-torch-compile": "use --compile",
    # Launchers
    **_refused("start with torchrun, which says a rank's number in the environment", "--local_rank", "--local-rank"),
    "--yaml-cfg": "give flags; a shell script holds them well",
    "--use-checkpoint-args": "give the model's flags; a checkpoint of another shape is refused",
    # Another way to shard
    **_refused("use --zero-stage 3", "--use-megatron-fsdp", "--use-custom-fsdp"),
    "--data-parallel-sharding-strategy": "use --zero-stage: 0 no_shard, 1 optim, 2 optim_grads, 3 optim_grads_params",
    **_refused(
        "FSDP2 communicates one transformer block at a time; leave it out",
        "--ddp-bucket-size",
        "--zero-reduce-bucket-size",
        "--zero-allgather-bucket-size",
    ),
    "--tp-comm-overlap": "tensor-parallel collectives are not overlapped with matrix multiplications; leave it out",
    **_refused(
        "what is kept for recomputation is not divided over ranks; use --sequence-parallel",
        "--partition-activations",
        "--distribute-saved-activations",
    ),
    "--num-virtual-stages-per-pipeline-rank": "use --num-layers-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout": "use --decoder-first-pipeline-num-layers and its like for the last",
    "--enable-zbh1-pipeline": "use --pipeline-schedule zero-bubble",
    "--cpu-offloading": _NO_OFFLOAD,
    **_refused("use --cpu-offload, for parameters and gradients too", "--cpu-optimizer", "--optimizer-cpu-offload"),
    "--use-pin-memory": "leave it out: --cpu-offload pins host memory where there is a GPU",
    # Models that do not exist here
    "--topk": "use --moe-router-topk",
    "--moe-loss-coeff": "use --moe-aux-loss-coeff",
    "--moe-train-capacity-factor": "use --moe-expert-capacity-factor",
    **_refused(
        "the balancing loss (--moe-aux-loss-coeff) spreads tokens over experts; leave it out",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate",
        "--moe-input-jitter-eps",
    ),
    **_refused(
        "this is part of the architecture and no flag changes it; leave it out",
        "--squared-relu",
        "--openai-gelu",
        "--rotary-interleaved",
        "--rotary-seq-len-interpolation-factor",
        "--fp32-residual-connection",
        "--apply-query-key-layer-scaling",
        "--apply-residual-connection-post-layernorm",
    ),
    **_refused(
        "fp8 is not supported; use --bf16",
        "--fp8",
        "--fp8-format",
        "--fp8-hybrid",
        "--fp8-recipe",
        "--fp8-param-gather",
        "--fp8-amax-history-len",
    ),
    "--use-cpu-initialization": "weights are made shard by shard on their device, alike for every number of ranks; "
    "leave it out",
    "--use-flash-attn-triton": "use none: attention is torch's scaled_dot_product_attention",
    **_refused("use --lr and --min-lr, which hold for all parameters", "--decoupled-lr", "--decoupled-min-lr"),
    # Data, checkpoints, logging
    "--dataloader-inter-document-masking": "use --reset-attention-mask --reset-position-ids",
    **_refused(
        "fill-in-the-middle permutes whole documents between their tokens; leave it out",
        "--fim-split-sample",
        "--fim-fragment-rate",
        "--fim-no-prefix",
    ),
    "--non-persistent-save-interval": "saving does not stop training: use a shorter --save-interval",
    **_refused(
        "checkpoints have one format, safetensors files with a JSON index, which Megatron does not read; leave it out",
        "--ckpt-format",
        "--use-dist-ckpt",
        "--auto-detect-ckpt-format",
    ),
    "--no-ckpt-fully-parallel-save": "each rank saves its own part; leave it out",
    "--universal-checkpoint": "checkpoints are not DeepSpeed's; they load on any number of ranks",
    **_refused(_LATER, "--ckpt-convert-format", "--ckpt-convert-save", "--dist-ckpt-strictness"),
    **_refused("evaluation uses the training batch size; leave it out", "--eval-global-batch-size"),
    **_refused("evaluation uses --micro-batch-size; leave it out", "--eval-micro-batch-size"),
    "--full-validation": "use --eval-iters",
    **_refused(
        _LATER, "--profile", "--use-pytorch-profiler", "--log-straggler", "--log-progress", "--kill-switch-file"
    ),
}
