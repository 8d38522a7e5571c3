"""Complete the settings of how a run computes: precision, float8 products, recomputation."""

import dataclasses

from megatron_zpp.optim.batch_size import Curriculum
from megatron_zpp.parallel.pipeline import SPLITS_BACKWARD
from megatron_zpp.settings.checks import flag_of, require
from megatron_zpp.settings.groups import ActivationSettings, PrecisionSettings, Settings

_FLOAT8_RECIPES = {"tensorwise": "hybrid", "rowwise": "e4m3", "rowwise_with_gw_hp": "e4m3"}  # recipe: its format
_FLOAT8_MULTIPLE = 16  # divides every dimension of a float8 product


def resolve_precision(settings: Settings) -> PrecisionSettings:
    """Complete the precision. Raises SettingsError."""
    precision = settings.precision
    require(not (precision.fp16 and precision.bf16), "--fp16 and --bf16 exclude each other; give one")
    both = "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; give one"
    require(not (precision.grad_reduce_in_bf16 and precision.accumulate_allreduce_grads_in_fp32), both)
    in_fp32 = precision.accumulate_allreduce_grads_in_fp32
    if precision.bf16 and not in_fp32 and not precision.grad_reduce_in_bf16:
        # Megatron's rule: bf16 has too few digits to sum gradients in, so sums are fp32 unless asked otherwise. By qgZ
        # that quantizes both hops they are fp32 anyway, and autograd's gradients stay bf16, in half the memory; but
        # where micro-batches are reduced together, FSDP2 adds them up first.
        zeropp, schedule = settings.zeropp, settings.distributed.pipeline_schedule
        quantizes = zeropp.quantized_gradients and None not in (zeropp.gradient_bits, zeropp.gradient_intra_bits)
        in_fp32 = not (quantizes and settings.zero.zero_stage >= 2 and schedule not in SPLITS_BACKWARD)
        precision = dataclasses.replace(precision, grad_reduce_in_bf16=not in_fp32)
    recipe = precision.fp8_recipe
    if precision.fp8_format is not None:
        recipe = recipe or next(name for name, form in _FLOAT8_RECIPES.items() if form == precision.fp8_format)
        form = _FLOAT8_RECIPES[recipe]
        unlike = f"--fp8-recipe {recipe} computes in {form} alone, not {precision.fp8_format}: give --fp8-format {form}"
        require(form == precision.fp8_format, unlike)
    return dataclasses.replace(precision, accumulate_allreduce_grads_in_fp32=in_fp32, fp8_recipe=recipe)


def check_float8(settings: Settings) -> None:
    """Raise SettingsError where float8 products would have sizes that GPUs do not take, or be none."""
    precision, training, num_layers = settings.precision, settings.training, settings.model.num_layers or 0
    if precision.fp8_format is None:
        return
    lengths = [training.seq_length or 0]
    lengths += [Curriculum.step] if training.curriculum_min_length is not None else []
    for length in lengths:
        tokens = (training.micro_batch_size or 0) * length // settings.distributed.context_parallel_size
        uneven = f"--fp8-format needs micro-batches of a multiple of {_FLOAT8_MULTIPLE} tokens on a rank, not {tokens}"
        require(tokens % _FLOAT8_MULTIPLE == 0, f"{uneven}: change --micro-batch-size or --seq-length")
    in_bf16 = sum(layers_in_bf16(precision))
    none = f"--first-last-layers-bf16 leaves none of --num-layers {num_layers} for --fp8-format"
    require(in_bf16 < num_layers, f"{none}: leave one out, or give more layers")


def layers_in_bf16(precision: PrecisionSettings) -> tuple[int, int]:
    """Return how many layers at the start and at the end have no float8 products."""
    return (1, 1) if precision.first_last_layers_bf16 else (0, 0)


def resolve_activation(activation: ActivationSettings, num_layers: int) -> ActivationSettings:
    """Complete recomputation. Raises SettingsError."""
    granularity = activation.recompute_granularity
    method, layers = activation.recompute_method, activation.recompute_num_layers
    modules = activation.recompute_modules if granularity == "selective" else None  # else without effect, and noted
    offloaded = activation.cpu_offloading_num_layers
    require(offloaded <= num_layers, f"--cpu-offloading-num-layers {offloaded} is above --num-layers {num_layers}")
    held = "--cpu-offloading-num-layers cannot offload what --recompute-granularity selective keeps by operator"
    require(not offloaded or granularity != "selective" or modules, f"{held}: use full, or --recompute-modules")
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            require(getattr(activation, name) is None, f"{flag_of(name)} needs --recompute-granularity full")
    else:
        method, layers = method or "uniform", 1 if layers is None else layers
        message = f"--recompute-num-layers {layers} must be between 1 and --num-layers {num_layers}"
        require(1 <= layers <= num_layers, message)
    return dataclasses.replace(
        activation,
        recompute_granularity=granularity,
        recompute_modules=modules,
        recompute_method=method,
        recompute_num_layers=layers,
    )
