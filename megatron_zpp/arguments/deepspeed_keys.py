"""Every key of a DeepSpeed JSON file that we know, and what becomes of it.

A key sets settings, holds a section, must have a value that changes nothing here, or is not needed. Whatever else a
file holds is an error, since a misspelt key would otherwise train something other than what was asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
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

    turns_on: the setting that is on where the section is there.
    """

    keys: dict[str, Key]
    required: tuple[str, ...] = ()
    switch: str | None = None
    turns_on: str | None = None


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
    """A section of a feature that we do not have: accepted while its ``switch`` is off."""

    otherwise: str
    switch: str = "enabled"


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
        "ratio": Only((1,), "all of it is offloaded; leave it out"),
        **{name: _MEMORY_BY_FSDP2 for name in ("buffer_count", "buffer_size", "max_in_cpu", "fast_init")},
        **{name: NotNeeded("nothing is kept on NVMe") for name in ("nvme_path", "pipeline_read", "pipeline_write")},
    }
)
_LOGGED_BY_FLAGS = NotNeeded("what is logged, and how often, is --log-interval, --log-throughput and their kin")

_LOCO = Section(
    {
        "err_beta": _sets("zeropp_loco_beta", number),
        "reset_T": _sets("zeropp_loco_reset_interval", whole_number),
    },
    turns_on="zeropp_loco",
)

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
        "stage3_prefetch_bucket_size": _SCHEDULED_BY_FSDP2,
        "stage3_module_granularity_threshold": _SCHEDULED_BY_FSDP2,
        "stage3_use_all_reduce_for_fetch_params": _SCHEDULED_BY_FSDP2,
        "stage3_allgather_sequential": _SCHEDULED_BY_FSDP2,
        "contiguous_gradients": _MEMORY_BY_FSDP2,
        "round_robin_gradients": _MEMORY_BY_FSDP2,
        "sub_group_size": _MEMORY_BY_FSDP2,
        "memory_efficient_linear": _MEMORY_BY_FSDP2,
        "stage3_max_live_parameters": _MEMORY_BY_FSDP2,
        "stage3_max_reuse_distance": _MEMORY_BY_FSDP2,
        "stage3_param_persistence_threshold": _MEMORY_BY_FSDP2,
        "stage3_model_persistence_threshold": _MEMORY_BY_FSDP2,
        "stage3_gather_16bit_weights_on_model_save": _CHECKPOINTS,
        "stage3_gather_fp16_weights_on_model_save": _CHECKPOINTS,
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
_LINEAR_WARMUP = Only(("linear",), "DeepSpeed's logarithmic warm-up, its default, is not supported; use linear")
_STEPS: dict[str, Key] = {
    "warmup_type": _LINEAR_WARMUP,
    "warmup_num_steps": _sets("lr_warmup_iters", whole_number),
    "total_num_steps": _sets("lr_decay_iters", whole_number),
}
_SCHEDULER = ByType(
    "lr_decay_style",
    {
        "WarmupLR": (
            "constant",
            Section(
                {
                    "warmup_type": _LINEAR_WARMUP,
                    "warmup_num_steps": _STEPS["warmup_num_steps"],
                    "warmup_min_lr": _sets("lr_warmup_init", number),
                    "warmup_max_lr": _sets("lr", number),
                },
                required=("warmup_type", "warmup_num_steps", "warmup_max_lr"),
            ),
        ),
        "WarmupDecayLR": (
            "linear",
            Section(
                {
                    **_STEPS,
                    "warmup_min_lr": Sets(("lr_warmup_init", "min_lr"), lambda value: (number(value), number(value))),
                    "warmup_max_lr": _sets("lr", number),
                },
                required=("warmup_type", "warmup_num_steps", "total_num_steps", "warmup_max_lr"),
            ),
        ),
        "WarmupCosineLR": (
            "cosine",
            # The ratios are no settings: deepspeed_config.py multiplies them by the optimizer's learning rate.
            Section(
                {
                    **_STEPS,
                    "warmup_min_ratio": _sets("warmup_min_ratio", number),
                    "cos_min_ratio": _sets("cos_min_ratio", number),
                },
                required=("warmup_type", "warmup_num_steps", "total_num_steps", "cos_min_ratio"),
            ),
        ),
    },
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
        "prescale_gradients": Only((False,), "gradients are scaled so that fp16 does not overflow; leave it out"),
        "gradient_predivide_factor": Only((1,), "gradients are scaled so that fp16 does not overflow; leave it out"),
        "sparse_gradients": Only((False,), _UNSUPPORTED),
        "disable_allgather": Only((False,), _UNSUPPORTED),
        "activation_checkpointing": _ACTIVATIONS,
        "zero_allow_untested_optimizer": NotNeeded("every --optimizer works with every --zero-stage"),
        "zero_force_ds_cpu_optimizer": NotNeeded("with --cpu-offload torch's fused optimizer runs on the host"),
        "steps_per_print": _LOGGED_BY_FLAGS,
        "wall_clock_breakdown": _LOGGED_BY_FLAGS,
        "memory_breakdown": _LOGGED_BY_FLAGS,
        "dump_state": _LOGGED_BY_FLAGS,
        "tensorboard": Off("use --tensorboard-dir"),
        "wandb": Off("use --wandb-project"),
        "csv_monitor": Off("use --tensorboard-dir or --wandb-project"),
        "comet": Off("use --tensorboard-dir or --wandb-project"),
        "comms_logger": Off("the log line shows bytes per step and level; leave it out"),
        "flops_profiler": Off("use --log-throughput"),
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
                "curriculum_learning",
                "data_efficiency",
                "elasticity",
                "hybrid_engine",
                "nebula",
            )
        },
    }
)
