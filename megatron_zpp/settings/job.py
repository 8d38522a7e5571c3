"""Settings of what is around training: ZeRO, data, checkpoints, logs, ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.islands.elastic import Membership
from megatron_zpp.settings.flags import flag


@dataclass(frozen=True)
class ZeroSettings:
    """ZeRO."""

    zero_stage: int = flag(
        3, "what is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters", at_least=0, at_most=3
    )
    cpu_offload: bool = flag(
        False, "keep parameters, gradients and optimizer state in host memory, and let the optimizer step there"
    )
    zeropp_monitor_interval: int | None = flag(
        None,
        "optimizer steps between samples of quantization errors, for the log",
        aliases=("--zeropp-monitor-interval",),
        at_least=1,
    )
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed JSON file with batch sizes, ZeRO, precision, optimizer and schedule",
        name="--deepspeed_config",
        metavar="FILE",
    )


@dataclass(frozen=True)
class DataSettings:
    """Training data."""

    data_path: tuple[str, ...] | None = flag(
        None, "dataset prefixes, or weight prefix pairs", nargs="+", metavar="PREFIX"
    )
    split: str | None = flag(None, "shares of train, valid, test; default 969, 30, 1", metavar="A,B,C")
    train_data_path: tuple[str, ...] | None = flag(
        None, "dataset(s) of the train split, instead of --split", nargs="+", metavar="PREFIX"
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "dataset(s) of the validation split", nargs="+", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(None, "dataset(s) of the test split", nargs="+", metavar="PREFIX")
    data_args_path: str | None = flag(None, "file that holds what --data-path takes", metavar="FILE")
    per_split_data_args_path: str | None = flag(
        None, "JSON file of what --train-data-path and the flags like it take: keys train, valid, test", metavar="FILE"
    )
    data_cache_path: str | None = flag(None, "folder of the index cache; default beside the data", metavar="DIR")
    no_mmap_bin_files: bool = flag(False, "read tokens from the file instead of mapping it into memory")
    data_order_stable: bool = flag(
        False, "an order of samples that does not depend on the length of the run: each epoch is shuffled by itself"
    )
    mid_level_dataset_surplus: float = flag(
        0.005, "how much more of each dataset of a blend to index than its share", at_least=0, at_most=1
    )
    dataloader_type: str = flag(
        "single", "the order of samples: once through, or round and round", choices=("single", "cyclic")
    )
    data_sharding: bool = flag(False, "with --dataloader-type cyclic: each rank keeps to its own part of the data")
    pad_last_valid_sample: bool = flag(False, "validate on the last, incomplete sample too, padded without loss")
    mock_data: bool = flag(False, "random tokens instead of data, to measure speed")
    num_workers: int = flag(2, "loader processes per rank", at_least=0, at_most=256)
    eod_mask_loss: bool = flag(False, "no loss where the input is the end-of-document token")
    reset_position_ids: bool = flag(False, "positions begin again behind an end-of-document token")
    reset_attention_mask: bool = flag(False, "tokens attend to their own document alone")
    fim_data: bool = flag(False, "fill-in-the-middle: move the middle of documents to their end")
    fim_rate: float = flag(0.5, "share of documents that --fim-data permutes", at_least=0, at_most=1)
    fim_spm_rate: float = flag(0.5, "share of these in the order suffix, prefix, middle", at_least=0, at_most=1)
    fim_prefix_token: str = flag("<fim_prefix>", "token before the prefix, or its id")
    fim_middle_token: str = flag("<fim_middle>", "token before the middle, or its id")
    fim_suffix_token: str = flag("<fim_suffix>", "token before the suffix, or its id")


@dataclass(frozen=True)
class TokenizerSettings:
    """Tokenizer."""

    tokenizer_type: str | None = flag(
        None,
        "kind of tokenizer; default GPT2BPETokenizer with --vocab-file",
        choices=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "HFTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
        ),
    )
    tokenizer_model: str | None = flag(
        None,
        "SentencePiece model; .tiktoken file or JSON vocabulary; tokenizer.json, its folder, or its model's name in "
        "Hugging Face's cache",
        metavar="PATH",
    )
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer", metavar="FILE")
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer", metavar="FILE")
    vocab_size: int | None = flag(
        None, "vocabulary size of NullTokenizer, and of TikTokenizer with a JSON vocabulary: default 131072", at_least=1
    )
    tiktoken_pattern: str | None = flag(
        None, "how TikTokenizer cuts words: gpt2, cl100k_base, o200k_base, v1, v2 or a regular expression", metavar="P"
    )
    tiktoken_num_special_tokens: int | None = flag(
        None,
        "ids before the tokens of TikTokenizer's JSON vocabulary: <unk>, <s>, </s> and others; default 1000",
        at_least=3,
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints."""

    save: str | None = flag(None, "folder to save checkpoints in", metavar="DIR")
    overwrite_save: bool = flag(
        False,
        "save over the checkpoints of another run in --save; without it they are kept, and the run does not start",
    )
    save_interval: int | None = flag(None, "optimizer steps between checkpoints; required with --save", at_least=1)
    no_async_save: bool = flag(False, "write each checkpoint before training goes on, without a copy in host memory")
    save_retain_interval: int | None = flag(
        None,
        "keep the checkpoints at iterations divisible by this, and the last --save-keep-last; default keep all",
        at_least=1,
    )
    save_keep_last: int | None = flag(
        None,
        "keep this number of the latest checkpoints, and of the latest finite ones; default all, or 2 with "
        "--save-retain-interval",
        at_least=1,
    )
    load: str | None = flag(None, "folder to resume from; an empty or absent one starts from scratch", metavar="DIR")
    ckpt_step: int | None = flag(None, "iteration to load; default the latest", at_least=0)
    exit_on_missing_checkpoint: bool = flag(False, "fail when --load holds no checkpoint")
    verify_checkpoint: str = flag(
        "all",
        "what is read of files to find damage before loading: all, an eighth of each, or no more than sizes",
        choices=("all", "sample", "none"),
    )
    load_latest_good: bool = flag(False, "load the newest checkpoint without damage, NaN or Inf")
    override_batch_size: bool = flag(False, "on resume take the batch size from the flags, though it was another")
    override_data: bool = flag(
        False, "on resume take data, their order, the seed and --seq-length from the flags, though they were others"
    )
    finetune: bool = flag(False, "load only the parameters and start at iteration 0")
    no_save_optim: bool = flag(False, "leave the optimizer out of checkpoints")
    no_save_rng: bool = flag(False, "leave random states out of checkpoints")
    no_load_optim: bool = flag(False, "do not load the optimizer")
    no_load_rng: bool = flag(False, "do not load random states")


@dataclass(frozen=True)
class LoggingSettings:
    """Log, TensorBoard, wandb."""

    log_interval: int = flag(100, "optimizer steps between log lines", at_least=1)
    log_throughput: bool = flag(False, "log TFLOP/s per GPU")
    log_params_norm: bool = flag(False, "log the parameters' norm")
    log_num_zeros_in_grad: bool = flag(False, "log the number of zero gradients")
    log_straggler: bool = flag(False, "say which rank computes slowly, and which node's link is slow, where that lasts")
    peak_tflops: float | None = flag(
        None, "peak TFLOP/s of one device, for MFU; default known for common GPUs", above=0
    )
    tensorboard_dir: str | None = flag(None, "folder of TensorBoard events", metavar="DIR")
    tensorboard_log_interval: int = flag(1, "optimizer steps between TensorBoard and wandb points", at_least=1)
    tensorboard_queue_size: int = flag(1000, "TensorBoard's queue", at_least=1)
    log_timers_to_tensorboard: bool = flag(False, "iteration time and throughput to TensorBoard and wandb")
    log_validation_ppl_to_tensorboard: bool = flag(False, "validation perplexity to TensorBoard and wandb")
    log_memory_to_tensorboard: bool = flag(False, "device memory to TensorBoard and wandb")
    log_world_size_to_tensorboard: bool = flag(False, "world size to TensorBoard and wandb")
    wandb_project: str | None = flag(None, "wandb project; no wandb without it")
    wandb_exp_name: str | None = flag(None, "wandb run name")
    wandb_entity: str | None = flag(None, "wandb entity")
    wandb_save_dir: str | None = flag(None, "folder of wandb's files; default SAVE/wandb", metavar="DIR")
    profile: bool = flag(False, "profile a few steps: for Nsight Systems, or with --use-pytorch-profiler")
    use_pytorch_profiler: bool = flag(False, "write traces that Perfetto opens", needs="profile")
    profile_step_start: int = flag(10, "profile the steps after this one", needs="profile", at_least=0)
    profile_step_end: int = flag(12, "the last step to profile", needs="profile", at_least=1)
    profile_ranks: tuple[int, ...] | None = flag(
        None, "ranks to profile; default all", needs="profile", nargs="+", at_least=0
    )
    profile_dir: str | None = flag(
        None, "folder of traces; default that of TensorBoard, or SAVE/profile", needs="profile", metavar="DIR"
    )
    record_memory_history: bool = flag(
        False, "write a snapshot of GPU memory, with its history, after the profiled steps", needs="profile"
    )


@dataclass(frozen=True)
class DistributedSettings:
    """Ranks."""

    distributed_backend: str | None = flag(None, "default nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = flag(
        10.0, "time after which a stuck collective ends the run", at_least=0.01, at_most=525_600
    )
    islands: int = flag(
        1,
        "groups of consecutive ranks, normally clusters, that train by themselves and synchronize parameters every "
        "--island-sync-interval steps (DiLoCo): docs/islands.md",
        at_least=1,
        at_most=2**16,
    )
    islands_may_leave: bool = flag(
        False,
        "start each island as a job of its own, which may die and return while the others go on; --islands is how many "
        "begin, ranks are those of one",
    )
    island_number: int | None = flag(
        None,
        "which island this job is, from 0 on; the same when it returns; required with --islands-may-leave",
        needs="islands_may_leave",
        at_least=0,
    )
    island_lighthouse: str | None = flag(
        None,
        "where the islands' lighthouse listens (megatron-zpp lighthouse); required with --islands-may-leave",
        needs="islands_may_leave",
        metavar="HOST:PORT",
    )
    island_secret_file: str | None = flag(
        None,
        "file with the secret that all islands and their lighthouse share; required with --islands-may-leave",
        needs="islands_may_leave",
        metavar="FILE",
    )
    island_bind: str | None = flag(
        None,
        "address of this machine at which its ranks listen for other islands; default: the one from which it reaches "
        "the lighthouse",
        needs="islands_may_leave",
        metavar="ADDRESS",
    )
    island_timeout_seconds: float = flag(
        Membership.timeout,
        "for what one island sends another; a longer synchronization restarts with the islands that are there",
        needs="islands_may_leave",
        above=0,
        at_most=86_400,
    )
    island_patience_seconds: float = flag(
        Membership.patience,
        "how long an island waits for others before it gives up; longer than any trains between two synchronizations",
        needs="islands_may_leave",
        above=0,
        at_most=31_536_000,
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "HSDP: groups of ranks, normally the nodes, that each shard the whole model and add up gradients once "
        "per optimizer step; torchtitan's data_parallel_replicate_degree",
        at_least=1,
    )
    emulate_ranks: int | None = flag(
        None,
        "compute in this one process what this number of data-parallel ranks would, bit for bit: docs/emulation.md",
        at_least=1,
        at_most=4096,
    )
    emulate_nodes: int = flag(1, "nodes that the ranks of --emulate-ranks are on", at_least=1)
    tensor_model_parallel_size: int = flag(1, "ranks among which each linear layer is sharded", at_least=1)
    sequence_parallel: bool = flag(
        False, "shard activations between linear layers along the sequence too; with --tensor-model-parallel-size"
    )
    pipeline_model_parallel_size: int = flag(
        1, "ranks among which the layers are divided, as stages of a pipeline", at_least=1
    )
    pipeline_schedule: str | None = flag(
        None,
        "order of forward and backward passes of the micro-batches; default 1f1b, or interleaved with virtual stages",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers of one stage, where a pipeline rank has several stages; default one stage a rank", at_least=1
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first pipeline rank; default its share", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last pipeline rank; default its share", at_least=1
    )
    context_parallel_size: int = flag(
        1, "ranks that share each sequence; twice this must divide its length", at_least=1
    )
    expert_model_parallel_size: int = flag(
        1, "ranks among which the experts of a layer are divided; tokens are sent to them", at_least=1
    )
    moe_token_bits: int | None = flag(
        None,
        "bits (4, 6, 8) of tokens that are sent to experts, of what comes back, and of gradients; default: as computed",
        needs="expert_model_parallel_size",
        at_least=4,
        at_most=8,
    )
