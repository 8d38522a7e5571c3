"""Settings of ZeRO, data, checkpoints, logs and ranks."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron_zpp.fields import flag
from megatron_zpp.zeropp.config import QUANTIZED
from megatron_zpp.zeropp.recipes import AUTO, RECIPES

_advanced = partial(flag, tier="advanced")
_folder = partial(flag, None, metavar="DIR")
_place = partial(flag, None, metavar="DIR|URL")
_file = partial(flag, None, metavar="FILE")
_prefixes = partial(flag, None, nargs="+", metavar="PREFIX|URL")
_size = partial(flag, 1, at_least=1)  # ranks per group
_loading = partial(flag, needs="load")
_saving = partial(flag, effective_with="save")
_profile = partial(flag, needs="profile")
_publishing = partial(flag, needs="publish", at_least=1)


@dataclass(frozen=True)
class ZeroSettings:
    """ZeRO."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="free")
    zero_stage: int = flag(
        3,
        "shard nothing (0), optimizer state (1), also gradients (2), also parameters (3)",
        at_least=0,
        at_most=3,
        settles="wire",
        deepspeed="zero_optimization.stage",
        first="Memory and links",
    )
    recipe: str | None = flag(
        None,
        "recipe for what is sent between nodes (docs/reference/recipes.md), or auto, which measures and chooses one; "
        "other flags override a recipe's",
        name="--zeropp",
        choices=(*RECIPES, AUTO),
        settles="wire",
        first="Memory and links",
    )
    cpu_offload: bool = flag(
        False,
        "keep parameters, gradients and optimizer state in host memory, and step there",
        settles="wire",
        deepspeed="zero_optimization.cpu_offload zero_optimization.cpu_offload_param",
    )
    zeropp_monitor_interval: int | None = flag(
        None, "log quantization errors every k-th optimizer step", at_least=1, effective_with=QUANTIZED
    )
    deepspeed_config: str | None = _file(
        "DeepSpeed JSON file with batch sizes, ZeRO, precision, optimizer and schedule", name="--deepspeed_config"
    )


@dataclass(frozen=True)
class DataSettings:
    """Training data."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="--override-data")
    data_path: tuple[str, ...] | None = _prefixes(
        "dataset prefixes, or weight prefix pairs", first="Data", in_plans="{data}"
    )
    split: str | None = flag(
        None, "shares of train, valid, test; default 969, 30, 1, or 97, 3, 0 of --hf-dataset", metavar="A,B,C"
    )
    train_data_path: tuple[str, ...] | None = _prefixes(
        "dataset(s) of the train split, instead of --split", in_plans="{data}"
    )
    valid_data_path: tuple[str, ...] | None = _prefixes("dataset(s) of the validation split")
    data_cache_path: str | None = _folder(
        "folder of the index cache; default beside the data, for a bucket ~/.cache", resume="free"
    )
    no_mmap_bin_files: bool = flag(False, "read tokens from the file instead of mapping it into memory", resume="free")
    dataloader_type: str = _advanced("single", "read samples once, or in a cycle", choices=("single", "cyclic"))
    sft: bool = flag(False, "train on chats of preprocess_data --chat, with loss on the assistant's tokens alone")
    hf_dataset: tuple[str, ...] | None = flag(
        None,
        "stream text of the Hugging Face Hub, or of a folder of Parquet or JSON lines; behind its name options "
        "as KEY=VALUE, such as column=content (docs/how-to/stream-text.md)",
        nargs="+",
        metavar="NAME",
        first="Data",
        in_plans="{data}",
        resume="compared",
        tier="experimental",
    )
    mock_data: bool = flag(False, "random tokens instead of data, to measure speed", first="Data", in_plans="{data}")
    num_workers: int = flag(2, "loader processes per rank", at_least=0, at_most=256, resume="free")
    eod_mask_loss: bool = flag(False, "no loss where the input is the end-of-document token")
    reset_position_ids: bool = flag(False, "restart positions after an end-of-document token")
    reset_attention_mask: bool = flag(False, "tokens attend to their own document alone")


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="free")
    save: str | None = _place("folder to save checkpoints in", first="Checkpoints and logs")
    overwrite_save: bool = _saving(False, "start even if --save holds another run's checkpoints, and overwrite them")
    save_interval: int | None = _saving(
        None,
        "optimizer steps between checkpoints; required with --save",
        at_least=1,
        tier="stable",
        first="Checkpoints and logs",
    )
    no_async_save: bool = _saving(False, "write each checkpoint before training goes on, without a copy in host memory")
    save_retain_interval: int | None = _saving(
        None, "keep checkpoints at multiples of this, and the last --save-keep-last; default keep all", at_least=1
    )
    save_keep_last: int | None = _saving(
        None, "latest (finite) checkpoints to keep; default all, or 2 with --save-retain-interval", at_least=1
    )
    load: str | None = _place(
        "folder to resume from; only an empty or absent --save starts from scratch", first="Checkpoints and logs"
    )
    ckpt_step: int | None = _loading(None, "iteration to load; default the latest", at_least=0)
    load_latest_good: bool = _loading(False, "load the newest checkpoint without damage, NaN or Inf")
    override_data: bool = _loading(False, "on resume take data, tokenizer, order, seed and --seq-length from the flags")
    override_model: tuple[str, ...] | None = _loading(
        None, "on resume take these of the model from the flags, as rotary_base", nargs="+", metavar="NAME"
    )
    finetune: bool = _loading(
        False, "load only the parameters, start at iteration 0, and note what differs from their run"
    )
    new_token_init: str = flag(
        "mean",
        "rows of tokens that the checkpoint's tokenizer lacks: the mean of the others, or random",
        choices=("mean", "random"),
        effective_with="finetune",
        tier="advanced",
    )
    no_save_optim: bool = _saving(False, "leave the optimizer out of checkpoints")
    no_load_optim: bool = _loading(False, "do not load the optimizer")
    no_load_rng: bool = _loading(False, "do not load random states")
    publish: str | None = _folder("folder to publish weights in, to the bit of bf16, for processes that follow the run")
    publish_interval: int = _publishing(1, "optimizer steps between published versions")


@dataclass(frozen=True)
class LoggingSettings:
    """Log, metrics, TensorBoard, wandb, MLflow."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="free")
    log_interval: int = flag(100, "optimizer steps between log lines", at_least=1, first="Checkpoints and logs")
    log_throughput: bool = flag(False, "log TFLOP/s per GPU")
    log_params_norm: bool = flag(False, "log the parameters' norm")
    log_num_zeros_in_grad: bool = flag(False, "log the number of zero gradients")
    log_straggler: bool = _advanced(False, "report ranks that stay slow, and nodes with slow links")
    peak_tflops: float | None = _advanced(None, "peak TFLOP/s of one device, for MFU; known for common GPUs", above=0)
    metrics_dir: str | None = _folder("folder of metrics.jsonl; default --tensorboard-dir, or else --save")
    tensorboard_dir: str | None = _folder("folder of TensorBoard events", first="Checkpoints and logs")
    wandb_project: str | None = flag(
        None, "wandb project; no wandb without it", deepspeed="wandb.project", first="Checkpoints and logs"
    )
    wandb_exp_name: str | None = flag(None, "wandb run name", effective_with="wandb_project")
    wandb_entity: str | None = flag(None, "wandb entity", effective_with="wandb_project", deepspeed="wandb.team")
    mlflow_experiment: str | None = flag(
        None, "MLflow experiment, in MLFLOW_TRACKING_URI or else the folder mlruns beside metrics.jsonl"
    )
    profile: bool = flag(False, "profile a few steps: for Nsight Systems, or with --use-pytorch-profiler")
    use_pytorch_profiler: bool = _profile(False, "write traces for Perfetto to --tensorboard-dir or SAVE/profile")
    profile_step_start: int = _profile(10, "profile the steps after this one", at_least=0)
    profile_step_end: int = _profile(12, "the last step to profile", at_least=1)
    profile_ranks: tuple[int, ...] | None = _profile(None, "ranks to profile; default all", nargs="+", at_least=0)


@dataclass(frozen=True)
class DistributedSettings:
    """Ranks."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="free")
    distributed_backend: str | None = flag(None, "default nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = flag(10.0, "limit for a stuck collective", at_least=0.01, at_most=525_600)
    islands: int = _size(
        "groups of ranks that train alone and average parameters every --island-sync-interval steps (DiLoCo)",
        at_most=2**16,
        resume="compared",
        tier="experimental",
    )
    num_distributed_optimizer_instances: int = _size(
        "HSDP: groups of ranks, normally nodes, that each shard the whole model; gradients are summed once per step",
        settles="wire",
    )
    local_ranks: int | None = flag(
        None,
        "start N ranks on this machine, without torchrun; default one for each of --local-nodes "
        "(docs/reference/local-ranks.md)",
        aliases=("--emulate-ranks",),
        at_least=1,
        at_most=4096,
        tier="experimental",
    )
    local_nodes: int = _size(
        "nodes that the ranks of --local-ranks count as", aliases=("--emulate-nodes",), tier="experimental"
    )
    tensor_model_parallel_size: int = _size(
        "ranks among which each linear layer is sharded", settles="layout", first="Memory and links"
    )
    sequence_parallel: bool = flag(
        False,
        "with tensor parallelism: shard activations along the sequence too",
        effective_with="tensor_model_parallel_size",
    )
    pipeline_model_parallel_size: int = _size(
        "ranks among which the layers are divided, as stages of a pipeline", settles="layout", first="Memory and links"
    )
    pipeline_schedule: str | None = _advanced(
        None,
        "order of the micro-batches' passes; default 1f1b, or interleaved with virtual stages",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers per stage when a pipeline rank has several stages; default one stage a rank", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = _advanced(None, "the same, as the number of stages", at_least=1)
    decoder_first_pipeline_num_layers: int | None = _advanced(
        None, "first rank's layers; default its share", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = _advanced(None, "last rank's layers; default its share", at_least=1)
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embeddings as a layer of the first stage", effective_with="pipeline_model_parallel_size"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count output layer and loss as a layer of the last stage", effective_with="pipeline_model_parallel_size"
    )
    context_parallel_size: int = _size(
        "ranks that share each sequence; twice this must divide its length", settles="layout"
    )
    expert_model_parallel_size: int = _size(
        "ranks among which a layer's experts are divided; tokens are sent to them", settles="layout"
    )
    expert_tensor_parallel_size: int | None = _advanced(
        None,
        "ranks among which Megatron shards an expert, and here whole experts; default the tensor-parallel ones",
        at_least=1,
    )
    moe_token_bits: int | None = flag(
        None,
        "bits (4, 6, 8) of tokens sent to experts and back, and of their gradients; default: as computed",
        needs="expert_model_parallel_size",
        at_least=4,
        at_most=8,
        resume="noted",
        tier="experimental",
    )
