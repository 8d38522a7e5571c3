"""Flags of Megatron-LM, Megatron-DeepSpeed and their launchers that are no settings here.

NOT_NEEDED holds those that ask for what is so anyway, or for what changes neither the model nor its training: they are
accepted, with one note. REFUSED holds those that a user may well bring along and that would change the run: each with
what to use instead. Flags that are settings here under another name are in ``translated_flags.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_zpp.settings.groups import Settings


@dataclass(frozen=True)
class NotNeeded:
    """Why a flag needs no setting; for a flag with a value, the values of which that is true."""

    because: str
    accepted: tuple[str, ...] | None = None  # None: the flag is a switch; ANY: whatever stands behind it
    holds: Callable[[Settings], bool] | None = None  # None: always


ANY: tuple[str, ...] = ()


def _same(because: str, *flags: str, accepted: tuple[str, ...] | None = None) -> dict[str, NotNeeded]:
    return {flag: NotNeeded(because, accepted) for flag in flags}


def _refused(instead: str, *flags: str) -> dict[str, str]:
    return {flag: instead for flag in flags}


_ATTENTION = "attention is torch's scaled_dot_product_attention, which picks the fastest kernel"
_COMMUNICATION = "FSDP2 overlaps its communication with computation"
_NO_SUCH_FUSION = "no hand-written fused kernel is used"
_EACH_ITS_PART = "each rank always saves and loads its own part, and any number of ranks loads it"
_ONE_FORMAT = "checkpoints have one format, safetensors files with a JSON index, which any number of ranks loads"
_NO_FP8 = "matrix products are computed in bf16 or fp16: there is no fp8"
_NOT_LOGGED = "times of single operations are not logged"
_BY_BLOCKS = "FSDP2 communicates one transformer block at a time"
_KEPT_WHOLE = "what is kept for recomputation is not divided over ranks, but by --sequence-parallel and its like"
_ALWAYS_WRITTEN = "it is always written to TensorBoard and wandb"

NOT_NEEDED: dict[str, NotNeeded] = {
    **_same(_ATTENTION, "--use-flash-attn", "--use-flash-attn-v2", "--use-flash-attn-triton"),
    "--attention-backend": NotNeeded(_ATTENTION, ANY),
    **_same("softmax is computed in fp32 inside the attention kernel", "--attention-softmax-in-fp32"),
    **_same("attention scores are not scaled by the layer's number", "--no-query-key-layer-scaling"),
    **_same("the causal mask is never materialized", "--no-create-attention-mask-in-dataloader"),
    **_same("there is one implementation of each model", "--use-mcore-models", "--use-legacy-models"),
    "--transformer-impl": NotNeeded("the models are plain PyTorch, without Transformer Engine", ANY),
    **_same(
        "weights are made shard by shard on their device, alike for every number of ranks", "--use-cpu-initialization"
    ),
    **_same(_NO_FP8, "--fp8-hybrid", "--fp8-param-gather", "--fp8-e4m3"),
    **_same(
        _NO_FP8,
        "--fp8",
        "--fp8-format",
        "--fp8-recipe",
        "--fp8-amax-history-len",
        "--fp8-amax-compute-algo",
        "--fp8-margin",
        "--fp8-interval",
        accepted=ANY,
    ),
    **_same(
        _NO_SUCH_FUSION,
        "--no-masked-softmax-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
    ),
    **_same("the output layer and the loss are one fused operation", "--cross-entropy-loss-fusion"),
    "--no-position-embedding": NotNeeded(
        "positions are learned only with --position-embedding-type learned_absolute",
        holds=lambda settings: settings.model.position_embedding_type != "learned_absolute",
    ),
    "--muon-no-split-qkv": NotNeeded("queries, keys and values of a layer are one matrix for Muon"),
    "--muon-tp-mode": NotNeeded("--optimizer muon has no tensor parallelism beside it", ANY),
    "--muon-fp32-matmul-prec": NotNeeded("Muon multiplies matrices in bf16, as torch.optim.Muon does", ANY),
    "--vocab-extra-ids": NotNeeded("the vocabulary is the tokenizer's", ("0",)),
    # Sharding and communication
    **_same("ZeRO is built in; choose its stage by --zero-stage", "--deepspeed"),
    "--use-distributed-optimizer": NotNeeded(
        "the optimizer is sharded from --zero-stage 1 on", holds=lambda settings: settings.zero.zero_stage >= 1
    ),
    **_same("sharding is PyTorch FSDP2", "--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"),
    "--DDP-impl": NotNeeded("ranks are kept alike by PyTorch FSDP2, as --zero-stage says", ANY),
    **_same(
        "launchers say a rank's number in the environment, where it is read",
        "--local_rank",
        "--local-rank",
        accepted=ANY,
    ),
    **_same(
        _BY_BLOCKS,
        "--ddp-bucket-size",
        "--zero-reduce-bucket-size",
        "--zero-allgather-bucket-size",
        "--tile-factor",
        accepted=ANY,
    ),
    **_same(_BY_BLOCKS, "--memory-centric-tiled-linear", "--scattered-embeddings", "--split-transformers"),
    **_same("--cpu-offload pins host memory where there is a GPU", "--use-pin-memory"),
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
        "--tp-comm-overlap",
    ),
    "--no-pipeline-parallel": NotNeeded(
        "the pipeline has one stage unless --pipeline-model-parallel-size",
        holds=lambda settings: settings.distributed.pipeline_model_parallel_size == 1,
    ),
    "--cp-comm-type": NotNeeded(
        "context-parallel ranks all-gather keys and values, whose result is that of p2p", ("p2p", "all_gather")
    ),
    **_same(
        "backward passes are split so that the step's result is that of an unsplit one", "--enable-zbh1-exact-semantics"
    ),
    "--expert-tensor-parallel-size": NotNeeded(
        "tensor-parallel ranks divide experts, each of which stays whole", ("1",)
    ),
    "--moe-token-dispatcher-type": NotNeeded(
        "tokens travel by an all-to-all wherever experts are divided", ("allgather", "alltoall", "alltoall_seq", "flex")
    ),
    **_same("the products of a layer's experts are one grouped operation", "--moe-grouped-gemm"),
    **_same("tokens are sorted by expert in plain PyTorch", "--moe-permute-fusion"),
    **_same("experts are sharded as all other parameters", "--create-moe-param-group"),
    "--moe-token-drop-policy": NotNeeded("experts drop the tokens that weigh least", ("probs",)),
    "--moe-router-dtype": NotNeeded("the router computes in fp32", ("fp32",)),
    "--remote-device": NotNeeded("what is offloaded is chosen by --cpu-offload", ("none",)),
    # Training
    **_same(
        "what is recomputed is chosen by --checkpoint-activations or --recompute-granularity",
        "--deepspeed-activation-checkpointing",
    ),
    **_same(
        _KEPT_WHOLE,
        "--partition-activations",
        "--distribute-saved-activations",
        "--distribute-checkpointed-activations",
        "--contigious-checkpointing",
        "--synchronize-each-layer",
    ),
    "--recompute-modules": NotNeeded("selective recomputation keeps matrix products and recomputes the rest", ANY),
    "--empty-unused-memory-level": NotNeeded("the allocator's cache is kept", ANY),
    "--exit-signal": NotNeeded("--exit-signal-handler waits for all of them", ("SIGTERM", "SIGUSR1", "SIGINT")),
    # Logging
    **_same(_NOT_LOGGED, "--timing-log-level", "--timing-log-option", accepted=ANY),
    **_same(_NOT_LOGGED, "--profile-backward"),
    **_same("the log has its lines, and --save its checkpoints; no progress.txt is written", "--log-progress"),
    **_same(
        _ALWAYS_WRITTEN,
        "--log-batch-size-to-tensorboard",
        "--log-learning-rate-to-tensorboard",
        "--log-loss-scale-to-tensorboard",
    ),
    **_same("norms of Adam's states are not logged; the gradients' norm is", "--log-optimizer-states-to-tensorboard"),
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
        "--no-ckpt-fully-parallel-save",
        "--universal-checkpoint",
    ),
    **_same(_ONE_FORMAT, "--use-dist-ckpt", "--auto-detect-ckpt-format", "--ckpt-assume-constant-structure"),
    **_same(_ONE_FORMAT, "--ckpt-format", "--dist-ckpt-format", "--dist-ckpt-strictness", accepted=ANY),
}

_LATER = "it does not exist here; leave it out"
_NO_OFFLOAD = "activations and checkpoints are not offloaded; leave it out"

REFUSED: dict[str, str] = {
    # Renamed
    "--batch-size": "use --micro-batch-size (samples per rank) and --global-batch-size",
    "--warmup": "use --lr-warmup-fraction",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--dropout": "use --hidden-dropout and --attention-dropout",
    "--checkpoint-in-cpu": _NO_OFFLOAD,
    "--step-batch-size-schedule": "use --rampup-batch-size",
    "--load-tag": "use --ckpt-step",
    "--override-ckpt-iteration": "use --ckpt-step",
    "--pretrained-checkpoint": "use --load with --finetune",
    "--padded-vocab-size": "use --make-vocab-size-divisible-by",
    "--tokenizer": "use --tokenizer-type and --tokenizer-model",
    "--epochs": "use --train-iters or --train-samples",
    "--use-torch-compile": "use --compile",
    # Launchers
    "--yaml-cfg": "give flags; a shell script holds them well",
    "--use-checkpoint-args": "give the model's flags; a checkpoint of another shape is refused",
    # Another way to shard
    "--num-virtual-stages-per-pipeline-rank": "use --num-layers-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout": "use --decoder-first-pipeline-num-layers and its like for the last",
    "--cpu-offloading": _NO_OFFLOAD,
    # Models that do not exist here
    **_refused(
        "the balancing loss (--moe-aux-loss-coeff) spreads tokens over experts; leave it out",
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
    # Data, checkpoints, logging
    "--tiktoken-special-tokens": "a JSON vocabulary begins with <unk>, <s>, </s> and special tokens without a name",
    "--dataloader-inter-document-masking": "use --reset-attention-mask --reset-position-ids",
    **_refused(
        "fill-in-the-middle permutes whole documents between their tokens; leave it out",
        "--fim-split-sample",
        "--fim-fragment-rate",
        "--fim-no-prefix",
    ),
    "--non-persistent-save-interval": "saving does not stop training: use a shorter --save-interval",
    **_refused(_LATER, "--ckpt-convert-format", "--ckpt-convert-save"),
    **_refused("evaluation uses the training batch size; leave it out", "--eval-global-batch-size"),
    **_refused("evaluation uses --micro-batch-size; leave it out", "--eval-micro-batch-size"),
    "--full-validation": "use --eval-iters",
    "--kill-switch-file": "use --exit-signal-handler and send a signal",
    # Another kind of training
    **_refused(
        "knowledge distillation does not exist here; leave out all that describes a teacher",
        "--kd",
        "--mos",
        "--kd-alpha-ce",
        "--kd-beta-ce",
        "--kd-temp",
        "--load-teacher",
        "--num-layers-teacher",
        "--num-experts-teacher",
        "--hidden-size-teacher",
        "--num-attention-heads-teacher",
    ),
    **_refused(
        "choosing data by difficulty and dropping tokens at random do not exist here; leave it out",
        "--data-efficiency-curriculum-learning",
        "--random-ltd",
        "--train-idx-path",
        "--train-desc-path",
        "--train-doc-idx-path",
        "--train-sample-idx-path",
        "--train-shuffle-idx-path",
    ),
    **_refused("use --finetune, which loads parameters alone", "--reset-iteration", "--no-load-lr-state"),
    **_refused(
        "fine-tuning on conversations does not exist here; leave it out", "--sft", "--sft-tokenizer-prompt-format"
    ),
}

# Megatron-DeepSpeed's scripts describe a dense model by all of these and one expert.
EXPERTS = "--num-experts"
OF_EXPERTS = (
    "--create-moe-param-group",
    "--topk",
    "--expert-interval",
    "--mlp-type",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
WITHOUT_EXPERTS = NotNeeded("there is one MLP, and so no experts", ANY)
NO_SUCH_EXPERTS = "experts do not have this here; leave it out"


def describes_experts(flag: str) -> bool:
    return flag in (EXPERTS, *OF_EXPERTS) or flag.startswith("--moe-")
