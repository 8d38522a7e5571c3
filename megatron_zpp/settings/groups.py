"""Every setting of a run, once: its name, type, default, meaning and command-line flag.

Each dataclass is one group of flags in ``--help``; the field ``num_layers`` is the flag ``--num-layers`` unless
``flag(..., name=...)`` says otherwise. Names and defaults are Megatron-LM's wherever it has the setting. The flags of
ZeRO++ and LoCo are the fields of ``ZeroPPConfig``, those of islands of ``IslandConfig``. ``arguments.parse_settings``
fills, checks and freezes them; everything downstream takes the group it needs.

Bounds refuse what no run survives: products of larger sizes overflow 64 bits, smaller epsilons are 0 in fp32.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from megatron_zpp.islands.config import IslandConfig
from megatron_zpp.islands.elastic.membership import Membership
from megatron_zpp.settings.flags import Flag, flag, flat_values, iterate_flags, setting_of
from megatron_zpp.zeropp.config import ZeroPPConfig


@dataclass(frozen=True)
class ModelSettings:
    """The network."""

    preset: str | None = flag(None, "published model of this architecture whose shape to use; other flags override it")
    num_layers: int | None = flag(None, "number of transformer blocks", at_least=1, at_most=10_000)
    hidden_size: int | None = flag(None, "width of the residual stream", at_least=1, at_most=2**24)
    ffn_hidden_size: int | None = flag(None, "width of the MLP; default: the architecture's", at_least=1, at_most=2**26)
    num_attention_heads: int | None = flag(None, "number of query heads", at_least=1, at_most=2**16)
    kv_channels: int | None = flag(None, "width of one head; default hidden / heads", at_least=1, at_most=2**16)
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int | None = flag(
        None, "number of key/value heads with --group-query-attention", needs="group_query_attention", at_least=1
    )
    max_position_embeddings: int | None = flag(
        None, "longest sequence that the model can take; default --seq-length", at_least=1, at_most=2**27
    )
    position_embedding_type: str | None = flag(
        None,
        "kind of positions; yarn is rope that YaRN stretches; default: the architecture's",
        choices=("learned_absolute", "rope", "yarn", "none"),
    )
    rotary_base: int = flag(10000, "base of the rotary embedding", at_least=1)
    rotary_percent: float = flag(1.0, "share of each head's channels that are rotated", above=0, at_most=1)
    use_rope_scaling: bool = flag(
        False, "divide low rotary frequencies as Llama 3.1 does, for sequences beyond 8192 tokens"
    )
    rope_scaling_factor: float = flag(8.0, "what --use-rope-scaling divides by", above=0)
    yarn_rotary_scaling_factor: float | None = flag(
        None, "how many times the original context yarn reaches", at_least=1
    )
    yarn_original_max_position_embeddings: int | None = flag(
        None, "context that the model was trained with before yarn", at_least=1
    )
    yarn_beta_fast: float = flag(32.0, "yarn keeps channels that turn so often within that context", above=0)
    yarn_beta_slow: float = flag(1.0, "yarn stretches channels that turn no more often than this", above=0)
    window_size: str | None = flag(
        None, "a token attends to LEFT tokens before it, and to RIGHT = 0 after it; default all", metavar="LEFT,RIGHT"
    )
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary up to a multiple of this", at_least=1)
    normalization: str | None = flag(
        None,
        "norms before the sublayers; default: the architecture's",
        choices=("LayerNorm", "RMSNorm", "layernorm", "rmsnorm"),
    )
    norm_epsilon: float = flag(1e-5, "epsilon of LayerNorm and RMSNorm", at_least=1e-37)
    apply_layernorm_1p: bool = flag(False, "norms multiply by 1 + weight")
    qk_layernorm: bool = flag(False, "norms of each head's queries and keys")
    swiglu: bool = flag(False, "SwiGLU in the MLP, not GELU; always with pretrain_llama.py")
    no_bias_gelu_fusion: bool = flag(
        False,
        "GELU by the error function, as Megatron computes it without its fused kernel; default its tanh approximation",
    )
    disable_bias_linear: bool = flag(False, "linear layers without bias; always with pretrain_llama.py")
    add_qkv_bias: bool = flag(False, "with --disable-bias-linear: queries, keys and values have biases all the same")
    num_experts: int | None = flag(
        None, "experts in place of the MLP, of which each token has a few; default: an MLP", at_least=2, at_most=2**10
    )
    moe_layer_freq: int = flag(1, "experts in every so manyth block", needs="num_experts", at_least=1)
    moe_first_layer: int = flag(1, "the first block with experts, counted from 1", needs="num_experts", at_least=1)
    moe_experts_per_layer: str | None = flag(
        None, "such as 32,32,64: experts of each block that has some; default: all alike", needs="num_experts"
    )
    moe_residual: bool = flag(
        False,
        "weigh the MLP, or the expert that has all tokens, against a token's experts (Megatron-DeepSpeed's residual)",
        needs="num_experts",
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "width of an expert; default --ffn-hidden-size", needs="num_experts", at_least=1, at_most=2**26
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of an expert that has all tokens; default: there is none", needs="num_experts", at_least=1
    )
    moe_router_topk: int = flag(2, "experts that a token goes to", needs="num_experts", at_least=1)
    moe_router_score_function: str = flag(
        "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid"), needs="num_experts"
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "with sigmoid: balance experts by biases of their scores, which follow their load", needs="num_experts"
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, "what such a bias moves in a step", needs="moe_router_enable_expert_bias", above=0
    )
    moe_router_pre_softmax: bool = flag(
        False, "softmax over all experts, so that the weights of a token's do not add up to 1", needs="num_experts"
    )
    moe_router_topk_scaling_factor: float = flag(
        1.0, "multiply the weights of a token's experts", needs="num_experts", above=0
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss", "what spreads tokens over experts", choices=("aux_loss", "none"), needs="num_experts"
    )
    moe_aux_loss_coeff: float = flag(0.0, "coefficient of the balancing loss, as 0.01", needs="num_experts", at_least=0)
    moe_z_loss_coeff: float = flag(0.0, "coefficient of the router's z-loss, as 0.001", needs="num_experts", at_least=0)
    moe_expert_capacity_factor: float | None = flag(
        None,
        "an expert drops tokens beyond so many times its even share; default: it drops none",
        needs="num_experts",
        above=0,
        at_most=2**10,
    )
    moe_eval_capacity_factor: float | None = flag(
        None,
        "the same in evaluations; default: as in training",
        needs="moe_expert_capacity_factor",
        above=0,
        at_most=2**10,
    )
    moe_min_capacity: int = flag(
        1, "tokens that an expert takes in any case", needs="moe_expert_capacity_factor", at_least=1, at_most=2**31
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", above=0)
    attention_dropout: float | None = flag(
        None, "dropout of attention weights; default: the architecture's", at_least=0, below=1
    )
    hidden_dropout: float | None = flag(
        None, "dropout of embeddings and residuals; default: the architecture's", at_least=0, below=1
    )
    untie_embeddings_and_output_weights: bool = flag(False, "separate output layer; default: the architecture's")
    tie_embeddings_and_output_weights: bool = flag(
        False, "the embeddings are the output layer too; default: the architecture's"
    )


@dataclass(frozen=True)
class TrainingSettings:
    """Batches, length of the run, evaluation."""

    micro_batch_size: int | None = flag(
        None, "samples per data-parallel rank and forward pass", at_least=1, at_most=2**24
    )
    global_batch_size: int | None = flag(
        None, "samples per optimizer step; default micro-batch size * ranks", at_least=1, at_most=2**24
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "batch-size ramp-up: start size, increment, samples over which to ramp",
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        at_least=1,
        at_most=2**53,
    )
    decrease_batch_size_if_needed: bool = flag(False, "round a batch size that does not divide down, not refuse it")
    train_iters: int | None = flag(None, "optimizer steps to train", at_least=1)
    train_samples: int | None = flag(None, "samples to train, instead of --train-iters", at_least=1, at_most=2**53)
    train_tokens: int | None = flag(
        None,
        "tokens to train, at most; ends the run before --train-iters or --train-samples",
        at_least=1,
        at_most=2**53,
    )
    seq_length: int | None = flag(None, "tokens per sample", at_least=1, at_most=2**27)
    curriculum_min_length: int | None = flag(
        None,
        "cut samples to so many tokens at first, and less and less until --curriculum-iters; default whole ones",
        at_least=1,
    )
    curriculum_max_length: int | None = flag(
        None,
        "tokens of samples after --curriculum-iters; default --seq-length",
        at_least=1,
        needs="curriculum_min_length",
    )
    curriculum_iters: int | None = flag(
        None, "optimizer steps over which samples grow", at_least=1, needs="curriculum_min_length"
    )
    curriculum_length_step: int = flag(
        8, "lengths of growing samples are multiples of this", at_least=1, needs="curriculum_min_length"
    )
    seed: int = flag(
        1234, "seed of initialisation, data order, dropout and stochastic rounding", at_least=0, at_most=2**32 - 1
    )
    eval_iters: int = flag(100, "batches per evaluation", at_least=0)
    eval_interval: int | None = flag(None, "optimizer steps between evaluations; default none but the last", at_least=1)
    skip_train: bool = flag(False, "only evaluate")
    dry_run: bool = flag(False, "say what this command asks for and what it needs, and leave without starting it")
    dry_run_world_size: int | None = flag(
        None,
        "ranks that --dry-run is about; default those that the launcher started",
        needs="dry_run",
        at_least=1,
        at_most=2**20,
    )
    exit_interval: int | None = flag(None, "save and exit at iterations divisible by this", at_least=1)
    exit_duration_in_mins: float | None = flag(None, "save and exit after this many minutes", at_least=0)
    exit_signal_handler: bool = flag(False, "save and exit on SIGTERM, SIGUSR1 or Ctrl-C")
    calculate_per_token_loss: bool = flag(
        False, "average the loss over all tokens of the global batch, not per micro-batch first"
    )
    no_check_for_nan_in_loss_and_grad: bool = flag(False, "never stop because of NaN or Inf, whose steps are skipped")
    max_nonfinite_steps: int | None = flag(
        None,
        "save and stop after so many steps in a row with NaN or Inf; default 10, or 50 while a loss scale adapts",
        at_least=1,
    )
    loss_spike_factor: float | None = flag(
        None,
        "skip a step whose loss is more than so many times the average of the last steps' (about 50), as 2",
        above=1,
    )
    manual_gc: bool = flag(False, "collect Python garbage only every --manual-gc-interval steps")
    manual_gc_interval: int = flag(0, "see --manual-gc; 0 = never", at_least=0)


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and regularization."""

    optimizer: str = flag(
        "adam",
        "adam is AdamW, as in Megatron; muon: Muon for the layers' matrices, AdamW for the rest",
        choices=("adam", "sgd", "muon"),
    )
    lr: float | None = flag(None, "peak learning rate", at_least=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", at_least=0)
    decoupled_lr: float | None = flag(
        None, "peak learning rate of word embeddings and output layer; default --lr", at_least=0
    )
    decoupled_min_lr: float | None = flag(
        None, "their learning rate at the end of the decay; default --min-lr", at_least=0, needs="decoupled_lr"
    )
    weight_decay: float = flag(0.01, "decoupled weight decay; not applied to biases and 1-D parameters", at_least=0)
    start_weight_decay: float | None = flag(
        None, "weight decay at the start, with --weight-decay-incr-style", at_least=0
    )
    end_weight_decay: float | None = flag(None, "weight decay at the end, with --weight-decay-incr-style", at_least=0)
    weight_decay_incr_style: str = flag(
        "constant", "how weight decay moves from start to end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "clip the global gradient norm to this; 0 = off", at_least=0)
    adam_beta1: float = flag(0.9, "Adam's first-moment decay", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "Adam's second-moment decay", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "Adam's epsilon", at_least=1e-37)
    sgd_momentum: float = flag(0.9, "SGD's momentum", at_least=0, below=1)
    muon_momentum: float = flag(0.95, "Muon's momentum", at_least=0, below=1)
    muon_use_nesterov: bool = flag(False, "Nesterov's momentum for Muon")
    muon_num_ns_steps: int = flag(5, "Newton-Schulz steps that orthogonalize Muon's momentum", at_least=1, below=100)
    muon_scale_mode: str = flag(
        "spectral",
        "Muon's update for R rows, C columns: times sqrt(max(R, C)), sqrt(max(1, R/C)) or sqrt(R/C)",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
    )
    muon_extra_scale_factor: float = flag(
        1.0, "multiply Muon's update; 0.2 with spectral makes it as large as AdamW's", above=0
    )
    muon_period: int = flag(
        1,
        "Muon orthogonalizes whole matrices every so many steps, the rows of each node by themselves in between; "
        "1 = always whole, 0 = never",
        at_least=0,
    )
    muon_momentum_bits: int | None = flag(
        None, "bits of the momentum that crosses nodes for whole matrices; default 16, which lose nothing", at_least=1
    )
    muon_stale_rows: bool = flag(
        False, "between Muon's whole steps, complete each node's rows by those that the others sent last"
    )
    use_apex: bool = flag(False, "NVIDIA Apex's fused optimizer, where it is installed")


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning-rate schedule, counted in samples as in Megatron."""

    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(None, "steps over which to decay; default the length of the run", at_least=1)
    lr_decay_samples: int | None = flag(None, "samples over which to decay", at_least=1, at_most=2**53)
    lr_decay_tokens: int | None = flag(None, "tokens over which to decay", at_least=1, at_most=2**53)
    lr_warmup_style: str = flag(
        "linear", "shape of the warm-up; log is the default of DeepSpeed's schedulers", choices=("linear", "log")
    )
    lr_warmup_tokens: int = flag(0, "tokens of linear warm-up", at_least=0, at_most=2**53)
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", at_least=0)
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", at_least=0, at_most=2**53)
    lr_warmup_fraction: float | None = flag(None, "warm-up as a fraction of the decay length", at_least=0, below=1)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", at_least=0)
    lr_wsd_decay_style: str = flag(
        "exponential", "shape of WSD's final decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of WSD's final decay", at_least=1)
    lr_wsd_decay_samples: int | None = flag(None, "samples of WSD's final decay", at_least=1, at_most=2**53)
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume take the schedule from the flags, though the checkpoint's differs",
        name="--override-opt_param-scheduler",
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume take the schedule from the checkpoint", name="--use-checkpoint-opt_param-scheduler"
    )


@dataclass(frozen=True)
class PrecisionSettings:
    """Mixed precision. Parameters and optimizer state are always kept in fp32; this is what computes and travels."""

    bf16: bool = flag(False, "compute in bfloat16")
    fp16: bool = flag(False, "compute in float16, with loss scaling")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "reduce gradients in fp32; default with --bf16, unless --zero-quantized-gradients quantizes both hops"
    )
    grad_reduce_in_bf16: bool = flag(
        False, "reduce gradients in bfloat16; quantized ones are handed over in it and added up in fp32"
    )
    loss_scale: float | None = flag(None, "fixed loss scale of --fp16; default dynamic", above=0)
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", above=0)
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale", above=0)
    loss_scale_window: int = flag(1000, "clean steps after which the loss scale doubles", at_least=1)
    hysteresis: int = flag(2, "overflows before the loss scale is halved", at_least=1)


@dataclass(frozen=True)
class ActivationSettings:
    """Activation checkpointing and compilation."""

    recompute_activations: bool = flag(False, "the same as --recompute-granularity selective")
    recompute_granularity: str | None = flag(
        None, "full: whole blocks; selective: keep matrix products, recompute the rest", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None,
        "uniform: every --recompute-num-layers blocks are one checkpoint; "
        "block: the first --recompute-num-layers blocks are checkpointed",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "see --recompute-method; default 1", at_least=1)
    checkpoint_activations: bool = flag(False, "DeepSpeed's name for --recompute-granularity full")
    compile: bool = flag(False, "torch.compile each block")


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
        "keep so many of the latest checkpoints, and of the latest finite ones; default all, or 2 with "
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
        "groups of consecutive ranks, normally clusters, that train by themselves and agree on parameters every "
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
        "for what one island sends another; an agreement that takes longer begins again with those that are there",
        needs="islands_may_leave",
        above=0,
        at_most=86_400,
    )
    island_patience_seconds: float = flag(
        Membership.patience,
        "how long an island waits for others before it gives up; longer than any trains between two agreements",
        needs="islands_may_leave",
        above=0,
        at_most=31_536_000,
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "HSDP: so many groups of ranks, normally the nodes, each shard the whole model and add up their gradients once "
        "per optimizer step; torchtitan's data_parallel_replicate_degree",
        at_least=1,
    )
    emulate_ranks: int | None = flag(
        None,
        "compute in this one process what so many data-parallel ranks would, bit for bit: docs/emulation.md",
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
        1, "ranks that share each sequence, whose length 2 * so many must divide", at_least=1
    )
    expert_model_parallel_size: int = flag(
        1, "ranks among which the experts of a layer are divided; tokens travel to them", at_least=1
    )
    moe_token_bits: int | None = flag(
        None,
        "bits (4, 6, 8) of tokens that travel to experts, of what comes back, and of gradients; default: as computed",
        needs="expert_model_parallel_size",
        at_least=4,
        at_most=8,
    )


@dataclass(frozen=True)
class Settings:
    """All groups of one run."""

    architecture: str  # its name; ``architectures.find_architecture`` has its record
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    precision: PrecisionSettings = PrecisionSettings()
    activation: ActivationSettings = ActivationSettings()
    zero: ZeroSettings = ZeroSettings()
    zeropp: ZeroPPConfig = ZeroPPConfig()
    island: IslandConfig = IslandConfig()
    data: DataSettings = DataSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    distributed: DistributedSettings = DistributedSettings()

    def as_flat_dict(self) -> dict[str, Any]:
        """Every setting by its name, for logs, wandb's config and checkpoints' metadata."""
        flat: dict[str, Any] = {"architecture": self.architecture}
        for attribute, _ in iterate_groups():
            flat |= flat_values(getattr(self, attribute))
        return flat


def iterate_groups() -> Iterator[tuple[str, type[Any]]]:
    """Each group's attribute of Settings and its dataclass, in order."""
    for attribute, group in typing.get_type_hints(Settings).items():
        if isinstance(group, type) and is_dataclass(group):
            yield attribute, group


@functools.cache
def all_flags() -> dict[str, Flag]:
    """{setting: flag} of all groups."""
    return {flag.setting: flag for _, group in iterate_groups() for flag in iterate_flags(group)}


@functools.cache
def flags_by_name() -> dict[str, Flag]:
    """{name or alias: flag} of all groups."""
    return {name: flag for flag in all_flags().values() for name in (flag.name, *flag.aliases)}


def with_current_names(saved: dict[str, Any]) -> dict[str, Any]:
    """Saved settings {setting: value}, those of former names under their present ones."""
    now = {setting_of(name): flag.setting for name, flag in flags_by_name().items()}
    return {now.get(setting, setting): value for setting, value in saved.items()}
