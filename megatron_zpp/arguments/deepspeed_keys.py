"""Every key of a DeepSpeed JSON file that we know, and what becomes of it.

A key sets settings, holds a section, must have a value that changes nothing here, or is not needed. Whatever else a
file holds is an error, since a misspelt key would otherwise train something other than what was asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_zpp.optim.optimizer import OPTIMIZERS


@dataclass(frozen=True)
class Sets:
    """The key sets these settings; ``convert`` raises ValueError on what it cannot read."""

    settings: tuple[str, ...]
    convert: Callable[[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Section:
    """An object of further keys. With ``switch``, a false one turns the section off and its other keys are unused.

    turns_on: the setting that is on where the section is there and not off. defaults: DeepSpeed's values of keys that
    the section may lack.
    """

    keys: dict[str, Key]
    required: tuple[str, ...] = ()
    switch: str | None = None
    turns_on: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ByType:
    """An object of "type" and "params": the type sets ``setting`` to its value here and says which params there are."""

    setting: str
    types: dict[str, tuple[str, Section]]


@dataclass(frozen=True)
class Only:
    """The key has no setting here: these values are what happens anyway, all others are refused."""

    values: tuple[Any, ...]
    otherwise: str


@dataclass(frozen=True)
class Off:
    """A section of a feature that we do not have: accepted while its ``switch`` is off, or all that are in it."""

    otherwise: str
    switch: str = "enabled"
    anywhere: bool = False


@dataclass(frozen=True)
class NotNeeded:
    """Any value is accepted and changes nothing, for this reason."""

    because: str


Key = Sets | Section | ByType | Only | Off | NotNeeded


# Values


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not abs(value) <= sys.float_info.max:  # Python reads 1e999, Infinity, NaN and 400 digits, too
        raise ValueError("must be a finite number")
    return float(value)


def whole_number(value: Any) -> int:
    """5, and 1e6 too: JSON files write large sizes so."""
    if number(value) != int(number(value)):
        raise ValueError("must be a whole number")
    return int(value)


def _sets(setting: str, convert: Callable[[Any], Any]) -> Sets:
    return Sets((setting,), lambda value: (convert(value),))


def _loss_scale(value: Any) -> float | None:
    return number(value) or None  # DeepSpeed's 0 means dynamic


def _power_of_two(value: Any) -> float:
    if not 0 <= whole_number(value) <= 127:  # beyond it fp32 overflows
        raise ValueError("must be a whole number from 0 to 127")
    return 2.0 ** int(value)


def _warmup_style(value: Any) -> str:
    if value not in ("linear", "log"):
        raise ValueError("must be linear or log")
    return str(value)


def _offload_device(value: Any) -> bool:
    if value not in ("none", "cpu"):
        raise ValueError("must be none or cpu")
    return bool(value == "cpu")


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of two numbers")
    return number(value[0]), number(value[1])


def _optimizer(value: Any) -> str:
    names = {name: optimizer for optimizer, kind in OPTIMIZERS.items() for name in kind.deepspeed_names}
    for name, optimizer in names.items():
        if str(value).lower() == name.lower():
            return optimizer
    raise ValueError(f"must be one of {', '.join(names)}")


# Sections

_SCHEDULED_BY_FSDP2 = NotNeeded("FSDP2 communicates one transformer block at a time and prefetches the next")
_MEMORY_BY_FSDP2 = NotNeeded("FSDP2 lays out and frees its own memory")
_CHECKPOINTS = NotNeeded("checkpoints are sharded and load on any number of ranks")
_PINNED = NotNeeded("host memory is pinned where there is a GPU")
# FSDP2 offloads parameters, gradients and optimizer state, or none of them: the two sections must agree.
_OFFLOAD = Section(
    {
        "device": _sets("cpu_offload", _offload_device),
        "pin_memory": _PINNED,
        "ratio": NotNeeded("all of the optimizer is offloaded, with the same result"),
        **{name: _MEMORY_BY_FSDP2 for name in ("buffer_count", "buffer_size", "max_in_cpu", "fast_init")},
        **{name: NotNeeded("nothing is kept on NVMe") for name in ("nvme_path", "pipeline_read", "pipeline_write")},
    }
)
_OF_MOMENTUM = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
_NO_STAIRS = Only((0,), "the learning rate moves along straight lines; leave it out")
_LOGGED_BY_FLAGS = NotNeeded("what is logged, and how often, is --log-interval, --log-throughput and their kin")

_LOCO = Section(
    {
        "err_beta": _sets("zeropp_loco_beta", number),
        "reset_T": _sets("zeropp_loco_reset_interval", whole_number),
    },
    turns_on="zeropp_loco",
)


def _stage_3(effect: Key, *names: str) -> dict[str, Key]:
    """Keys by DeepSpeed's two names for each."""
    return {f"{prefix}{name}": effect for name in names for prefix in ("stage3_", "")}


_ZERO = Section(
    {
        "stage": _sets("zero_stage", whole_number),
        "zero_quantized_weights": _sets("zero_quantized_weights", boolean),
        # DeepSpeed's 0 is off, like 1.
        "zero_hpz_partition_size": _sets("zero_hpz_partition_size", lambda value: whole_number(value) or 1),
        "zero_quantized_gradients": _sets("zero_quantized_gradients", boolean),
        "zeropp_loco_param": _LOCO,
        "zero_quantized_nontrainable_weights": Only((False,), "frozen weights are not supported; leave it out"),
        "reduce_scatter": Only((True,), "gradients are always reduce-scattered; leave it out"),
        "allgather_partitions": Only((True,), "parameters are always all-gathered; leave it out"),
        "offload_param": _OFFLOAD,
        "offload_optimizer": _OFFLOAD,
        "cpu_offload": _sets("cpu_offload", boolean),
        "cpu_offload_param": _sets("cpu_offload", boolean),
        "cpu_offload_use_pin_memory": _PINNED,
        "mics_shard_size": Only((-1,), "use --num-distributed-optimizer-instances, the ranks divided by this size"),
        "mics_hierarchical_params_gather": Only((False,), "MiCS is not supported; leave it out"),
        "reduce_bucket_size": _SCHEDULED_BY_FSDP2,
        "allgather_bucket_size": _SCHEDULED_BY_FSDP2,
        "overlap_comm": _SCHEDULED_BY_FSDP2,
        "use_multi_rank_bucket_allreduce": _SCHEDULED_BY_FSDP2,
        "contiguous_gradients": _MEMORY_BY_FSDP2,
        "round_robin_gradients": _MEMORY_BY_FSDP2,
        "sub_group_size": _MEMORY_BY_FSDP2,
        "memory_efficient_linear": _MEMORY_BY_FSDP2,
        **_stage_3(
            _SCHEDULED_BY_FSDP2,
            "prefetch_bucket_size",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        ),
        **_stage_3(
            _MEMORY_BY_FSDP2,
            "max_live_parameters",
            "max_reuse_distance",
            "param_persistence_threshold",
            "model_persistence_threshold",
        ),
        **_stage_3(_CHECKPOINTS, "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save"),
        "load_from_fp32_weights": _CHECKPOINTS,
        "elastic_checkpoint": _CHECKPOINTS,
        "pipeline_loading_checkpoint": _CHECKPOINTS,
        "ignore_unused_parameters": NotNeeded("these models use all their parameters"),
        "override_module_apply": NotNeeded("models are initialised shard by shard"),
        "legacy_stage1": Only((False,), "leave it out"),
        "log_trace_cache_warnings": _LOGGED_BY_FLAGS,
    }
)

_FP16 = Section(
    {
        "enabled": _sets("fp16", boolean),
        "loss_scale": _sets("loss_scale", _loss_scale),
        "initial_scale_power": _sets("initial_loss_scale", _power_of_two),
        "loss_scale_window": _sets("loss_scale_window", whole_number),
        "hysteresis": _sets("hysteresis", whole_number),
        "min_loss_scale": _sets("min_loss_scale", number),
        "auto_cast": Only((False,), "leave it out: inputs are tokens"),
        "consecutive_hysteresis": Only((False,), "hysteresis is refilled only when the loss scale grows; leave it out"),
        "fp16_master_weights_and_grads": Only((False,), "master weights are always fp32; leave it out"),
    },
    required=("enabled",),
    switch="enabled",
)

_BF16 = Section(
    {
        "enabled": _sets("bf16", boolean),
        "immediate_grad_update": _SCHEDULED_BY_FSDP2,
        "check_grad_overflow": NotNeeded("NaN is always looked for, unless --no-check-for-nan-in-loss-and-grad"),
    },
    required=("enabled",),
    switch="enabled",
)

_OPTIMIZER = Section(
    {
        "type": _sets("optimizer", _optimizer),
        "params": Section(
            {
                "lr": _sets("lr", number),
                "betas": Sets(("adam_beta1", "adam_beta2"), _pair),
                "eps": _sets("adam_eps", number),
                "weight_decay": _sets("weight_decay", number),
                "momentum": _sets("sgd_momentum", number),
                "bias_correction": Only((True,), "Adam corrects its bias; leave it out"),
                "adam_w_mode": Only((True,), "weight decay is decoupled, as in AdamW; leave it out"),
                "torch_adam": NotNeeded("the fused optimizer is torch's, or Apex's with --use-apex"),
                "amsgrad": Only((False,), "AMSGrad is not supported; leave it out"),
                "nesterov": Only((False,), "Nesterov momentum is not supported; leave it out"),
                "dampening": Only((0,), "dampening is not supported; leave it out"),
            }
        ),
        "legacy_fusion": Only((False,), "leave it out"),
    }
)

# DeepSpeed's schedulers count steps, which are iterations here; WarmupDecayLR decays to where it started.
_WARMUP: dict[str, Key] = {
    "warmup_type": _sets("lr_warmup_style", _warmup_style),
    "warmup_num_steps": _sets("lr_warmup_iters", whole_number),
}
_LOGARITHMIC = {"warmup_type": "log"}
_TOTAL: dict[str, Key] = {"total_num_steps": _sets("lr_decay_iters", whole_number)}
_SCHEDULER = ByType(
    "lr_decay_style",
    {
        "WarmupLR": (
            "constant",
            Section(
                {
                    **_WARMUP,
                    "warmup_min_lr": _sets("lr_warmup_init", number),
                    "warmup_max_lr": _sets("lr", number),
                },
                required=("warmup_num_steps", "warmup_max_lr"),
                defaults=_LOGARITHMIC,
            ),
        ),
        "WarmupDecayLR": (
            "linear",
            Section(
                {
                    **_WARMUP,
                    **_TOTAL,
                    "warmup_min_lr": Sets(("lr_warmup_init", "min_lr"), lambda value: (number(value), number(value))),
                    "warmup_max_lr": _sets("lr", number),
                },
                required=("warmup_num_steps", "total_num_steps", "warmup_max_lr"),
                defaults=_LOGARITHMIC,
            ),
        ),
        "WarmupCosineLR": (
            "cosine",
            # The ratios are no settings: deepspeed_config.py multiplies them by the optimizer's learning rate.
            Section(
                {
                    **_WARMUP,
                    **_TOTAL,
                    "warmup_min_ratio": _sets("warmup_min_ratio", number),
                    "cos_min_ratio": _sets("cos_min_ratio", number),
                },
                required=("warmup_num_steps", "total_num_steps", "cos_min_ratio"),
                defaults=_LOGARITHMIC,
            ),
        ),
        # Up and down along straight lines, and then constant.
        "OneCycle": (
            "linear",
            Section(
                {
                    "cycle_min_lr": Sets(("lr_warmup_init", "min_lr"), lambda value: (number(value), number(value))),
                    "cycle_max_lr": _sets("lr", number),
                    "cycle_first_step_size": _sets("lr_warmup_iters", whole_number),
                    # No setting: deepspeed_config.py adds the first.
                    "cycle_second_step_size": _sets("cycle_second_step_size", whole_number),
                    "cycle_first_stair_count": _NO_STAIRS,
                    "cycle_second_stair_count": _NO_STAIRS,
                    "decay_step_size": NotNeeded("the learning rate does not decay after the cycle"),
                    "decay_lr_rate": Only((0,), "after the cycle the learning rate stays at cycle_min_lr"),
                    "cycle_momentum": Only((False,), "momentum stays as it is; DeepSpeed's default is true"),
                    **{name: NotNeeded("momentum stays as it is") for name in _OF_MOMENTUM},
                },
                required=("cycle_min_lr", "cycle_max_lr", "cycle_first_step_size"),
                defaults={"cycle_momentum": True},
            ),
        ),
    },
)

_CURRICULUM = Section(
    {
        "enabled": Only((True, False), "must be true or false"),
        "curriculum_type": Only(("seqlen",), "only sequences grow"),
        "min_difficulty": _sets("curriculum_min_length", whole_number),
        "max_difficulty": _sets("curriculum_max_length", whole_number),
        "schedule_type": Only(("fixed_linear",), "sequences grow linearly; use fixed_linear"),
        "schedule_config": Section(
            {
                "total_curriculum_step": _sets("curriculum_iters", whole_number),
                "difficulty_step": _sets("curriculum_length_step", whole_number),
            },
            required=("total_curriculum_step", "difficulty_step"),
        ),
    },
    required=("enabled", "min_difficulty", "max_difficulty", "schedule_type", "schedule_config"),
    switch="enabled",
)

_NO_EFFICIENCY = "choosing data by difficulty and dropping tokens at random do not exist here; turn it off"
_DATA_EFFICIENCY = Section(
    {
        "enabled": NotNeeded("it turns on nothing by itself"),
        "seed": NotNeeded("--seed orders the data"),
        "data_routing": Off(_NO_EFFICIENCY),
        "data_sampling": Off(_NO_EFFICIENCY),
    },
    switch="enabled",
)

_ONE_RUN = NotNeeded("a run has one folder of TensorBoard events, --tensorboard-dir, and one wandb run")
_TENSORBOARD = Section(
    {
        "enabled": _ONE_RUN,
        "output_path": _sets("output_path", str),  # no setting: deepspeed_config.py puts the two together
        "job_name": _sets("job_name", str),
    },
    required=("enabled", "output_path"),
    switch="enabled",
    defaults={"job_name": "DeepSpeedJobName"},
)
_WANDB = Section(
    {
        "enabled": _ONE_RUN,
        "project": _sets("wandb_project", str),
        "team": _sets("wandb_entity", str),
        "group": NotNeeded("wandb reads WANDB_RUN_GROUP from the environment"),
    },
    required=("enabled",),
    switch="enabled",
    defaults={"project": "deepspeed"},
)
_FLOPS = NotNeeded("--log-throughput logs TFLOP/s of the whole model at each line, and no part's")
_FLOPS_PROFILER = Section(
    {
        "enabled": _FLOPS,
        **{
            name: _FLOPS
            for name in (
                "profile_step",
                "module_depth",
                "top_modules",
                "detailed",
                "output_file",
                "recompute_fwd_factor",
            )
        },
    },
    required=("enabled",),
    switch="enabled",
    turns_on="log_throughput",
)

_ACTIVATIONS = Section(
    {
        "partition_activations": Only((False,), "activations are not divided over ranks; use --sequence-parallel"),
        "cpu_checkpointing": Only((False,), "offloading is not supported; leave it out"),
        "number_checkpoints": NotNeeded("which blocks are checkpointed is --recompute-method, --recompute-num-layers"),
        "contiguous_memory_optimization": _MEMORY_BY_FSDP2,
        "synchronize_checkpoint_boundary": Only((False,), "leave it out"),
        "profile": Only((False,), "leave it out"),
    }
)


def _reduce_in(value: Any) -> tuple[bool, bool]:
    if value not in ("fp32", "bf16", "bfp16"):
        raise ValueError("must be fp32 or bf16")
    return value == "fp32", value != "fp32"


_MEAN = NotNeeded("the mean of the gradients is the same; FSDP2 divides so that fp16 does not overflow")
_UNSUPPORTED = "it is not supported; leave it out"

TOP = Section(
    {
        "train_batch_size": _sets("global_batch_size", whole_number),
        "train_micro_batch_size_per_gpu": _sets("micro_batch_size", whole_number),
        "gradient_accumulation_steps": _sets("accumulation_steps", whole_number),  # no setting: batch sizes follow
        "zero_optimization": _ZERO,
        "fp16": _FP16,
        "bf16": _BF16,
        "optimizer": _OPTIMIZER,
        "scheduler": _SCHEDULER,
        "gradient_clipping": _sets("clip_grad", number),
        "communication_data_type": Sets(("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"), _reduce_in),
        "data_types": Section({"grad_accum_dtype": Only(("fp32",), "gradients are summed in fp32; leave it out")}),
        "prescale_gradients": _MEAN,
        "gradient_predivide_factor": _MEAN,
        "dataloader_drop_last": NotNeeded("a step never trains on fewer samples than the batch size"),
        "curriculum_learning": _CURRICULUM,
        "data_efficiency": _DATA_EFFICIENCY,
        "compression_training": Off("compressing a model does not exist here; leave it out", anywhere=True),
        "sparse_gradients": Only((False,), _UNSUPPORTED),
        "disable_allgather": Only((False,), _UNSUPPORTED),
        "activation_checkpointing": _ACTIVATIONS,
        "zero_allow_untested_optimizer": NotNeeded("every --optimizer works with every --zero-stage"),
        "zero_force_ds_cpu_optimizer": NotNeeded("with --cpu-offload torch's fused optimizer runs on the host"),
        "steps_per_print": _LOGGED_BY_FLAGS,
        "wall_clock_breakdown": _LOGGED_BY_FLAGS,
        "memory_breakdown": _LOGGED_BY_FLAGS,
        "dump_state": _LOGGED_BY_FLAGS,
        "tensorboard": _TENSORBOARD,
        "wandb": _WANDB,
        "csv_monitor": NotNeeded("no CSV file is written: log line, TensorBoard and wandb have the numbers"),
        "comet": Off("use --tensorboard-dir or --wandb-project"),
        "comms_logger": NotNeeded("each log line shows the bytes that a step sends"),
        "flops_profiler": _FLOPS_PROFILER,
        "checkpoint": Section(
            {
                "tag_validation": _CHECKPOINTS,
                "parallel_write": _CHECKPOINTS,
                "load_universal": Only((False,), "checkpoints are not DeepSpeed's; leave it out"),
                "use_node_local_storage": Only((False,), _UNSUPPORTED),
            }
        ),
        "aio": NotNeeded("nothing is kept on NVMe"),
        **{
            name: Off(_UNSUPPORTED)
            for name in (
                "amp",
                "torch_autocast",
                "autotuning",
                "eigenvalue",
                "progressive_layer_drop",
                "elasticity",
                "hybrid_engine",
                "nebula",
            )
        },
    }
)
