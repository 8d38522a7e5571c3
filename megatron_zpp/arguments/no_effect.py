"""Given settings that have no effect: refused without the flag that they need, or noted as left-overs of a script."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_zpp.settings.checks import SettingsError, flag_of
from megatron_zpp.settings.flags import Flag
from megatron_zpp.settings.groups import Settings, all_flags
from megatron_zpp.zeropp.recipes import DEFAULT


def check_needed(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Raise SettingsError for given flags without the ones they need.

    A ZeRO++ setting without its switch would leave the collectives unquantized unnoticed, and a head layout without
    its switch would train another network. values: from flags, DeepSpeed's file and preset; all others are off.
    """
    on = {setting for setting in given if values[setting] is not False}
    needs = {flag.name: flag.needs for flag in all_flags().values() if flag.needs and flag.setting in on}
    alone = [f"{name} needs {flag_of(needed)}" for name, needed in needs.items() if not values.get(needed)]
    if alone:
        raise SettingsError(*alone)


DYNAMIC_SCALE_SETTINGS = ("initial_loss_scale", "loss_scale_window", "hysteresis")


def _missing(flag: Flag, values: Mapping[str, Any]) -> str:
    """Return the flags, one of which would give ``flag`` an effect; "" where a run has one."""
    needed: dict[str, list[str]] = {}
    for setting, equals, value in (condition.partition("=") for condition in flag.effective_with.split()):
        if str(values[setting]) == value if equals else values[setting] != all_flags()[setting].default:
            return ""
        needed.setdefault(flag_of(setting), []).append(value)
    return " or ".join(f"{name} {' or '.join(several)}".rstrip() for name, several in needed.items())


def lost_under_muon(settings: Settings) -> str | None:
    """Say what 1-bit or 2-bit gradients lost under Muon, if a run has both."""
    bits, lost = settings.zeropp.gradient_bits, {1: "2", 2: "0.6"}
    if settings.optimizer.optimizer != "muon" or bits not in lost:
        return None
    return f"{bits}-bit gradients lost {lost[bits]} % of loss under Muon (docs/evidence/experiments.md, E19)"


def notes_on(settings: Settings, given: set[str]) -> Iterator[str]:
    """Yield a note for each ``given`` setting that has no effect in this run, and for what a run does unexpectedly."""
    values = settings.as_flat_dict()
    for name, flag in all_flags().items():
        if name in given and (missing := _missing(flag, values)):
            yield f"{flag.name} has no effect without {missing}"
    if (loses := lost_under_muon(settings)) is not None:
        yield f"{loses}: use --zeropp {DEFAULT}"
    if settings.distributed.context_parallel_size > 1 and settings.model.expert_capacity_factor is not None:
        yield (
            "with --context-parallel-size each rank counts --moe-expert-capacity-factor in its own part of a sample: "
            "it drops other tokens than one rank would"
        )
    training = settings.training
    batches_grow = training.rampup_batch_size or training.step_batch_size_schedule
    if training.train_tokens and not training.curriculum_min_length and (training.train_samples or not batches_grow):
        samples = training.train_samples or (training.train_iters or 0) * (training.global_batch_size or 0)
        tokens = samples * (training.seq_length or 0)
        if tokens > training.train_tokens:
            yield f"--train-tokens {training.train_tokens} ends with the step that reaches it, after {tokens} tokens"
    if settings.precision.fp16 and settings.precision.loss_scale is not None:
        for name in DYNAMIC_SCALE_SETTINGS:
            if name in given:
                yield f"{flag_of(name)} has no effect with a fixed --loss-scale"
    tokenizer = settings.tokenizer
    has_json = tokenizer.tokenizer_type == "TikTokenizer" and (tokenizer.tokenizer_model or "").endswith(".json")
    if "vocab_size" in given and tokenizer.tokenizer_type != "NullTokenizer" and not has_json:
        yield f"--vocab-size has no effect: {tokenizer.tokenizer_type} knows its own"
