"""From the command line to checked, frozen settings: ``parse_settings``.

A value comes from, in this order: the flag, the DeepSpeed file of ``--deepspeed_config`` (which may not contradict a
flag), ``--preset``, the recipe of ``--zeropp``, the field's default. ``resolve.py`` derives what is then still open,
and checks everything.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from megatron_zpp.arguments.command_line import read_command_line
from megatron_zpp.arguments.deepspeed_config import DeepSpeedConfig, read_deepspeed_config
from megatron_zpp.arguments.foreign_flags import NotNeeded
from megatron_zpp.arguments.help import help_text
from megatron_zpp.arguments.no_effect import DYNAMIC_SCALE_SETTINGS, check_needed
from megatron_zpp.arguments.recipe import recipe_values, stands_for
from megatron_zpp.arguments.resolve import resolve
from megatron_zpp.families import ARCHITECTURES, Architecture
from megatron_zpp.parallel.distributed import is_first_rank
from megatron_zpp.settings.checks import Mistakes, SettingsError, flag_of, flags_in, require, with_flags
from megatron_zpp.settings.flags import flags_of_fields, group_from
from megatron_zpp.settings.groups import Settings, all_flags, iterate_groups
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.config import ZeroPPConfig


def note_on_first_rank(text: str) -> None:
    """Print a note to stderr, once per run: on torchrun's rank 0, or without torchrun."""
    if is_first_rank():
        print(f"note: {text}", file=sys.stderr, flush=True)


def parse_settings(
    architecture: Architecture,
    argv: Sequence[str] | None = None,
    world_size: int | None = None,
    note: Callable[[str], None] = note_on_first_rank,
    ranks_per_node: int | None = None,
) -> ResolvedSettings:
    """Read, complete and check all settings of a run.

    world_size: ranks of the run, unless --dry-run-world-size gives another number; None: as many as --local-ranks says,
    or one. note: receives one line for each flag or key that was accepted but changes nothing. ranks_per_node: for
    --zeropp; None: as the launcher says.

    Raises SettingsError with one line for each mistake. ``--help`` prints and raises SystemExit(0). Needs no process
    group, and reads no file but the one that ``--deepspeed_config`` names.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    asked = [i for i, word in enumerate(argv) if word in ("-h", "--help", "--help-all")]
    if asked:
        print(help_text(architecture, argv[asked[0] :]))
        raise SystemExit(0)
    mistakes = Mistakes()
    line = read_command_line(argv, mistakes, architecture.presets)
    given = line.given
    config, preset = DeepSpeedConfig(), dict[str, Any]()
    if "deepspeed_config" in given:
        try:
            config = read_deepspeed_config(given["deepspeed_config"])
        except SettingsError as error:  # without its settings, others would seem missing
            raise SettingsError(*mistakes.messages, *error.messages) from error
    notes = _choose_between(given, config)
    with mistakes.collected():
        _check_agreement(given, config)
    with mistakes.collected():
        preset = _preset(architecture, given) if "preset" in given else {}
    values, chosen = preset | config.values | given, given.keys() | config.values.keys()
    if "local_nodes" in values:
        values = {"local_ranks": values["local_nodes"]} | values  # one rank each
    world_size = given.get("dry_run_world_size") or world_size or values.get("local_ranks") or 1
    with mistakes.collected():
        values = recipe_values(values, world_size, ranks_per_node) | values

    checked_from = len(mistakes.messages)
    with mistakes.collected_unless_named():
        check_needed(values, chosen)
    settings = _into_groups(architecture.name, values, mistakes)
    with mistakes.collected_unless_named():
        settings, without_effect = resolve(architecture, settings, chosen, world_size, config.accumulation_steps)
        notes += without_effect
    with mistakes.collected_unless_named():
        _check_not_needed(line.not_needed, settings)
    in_file = {flag.name: config.origins[name] for name, flag in all_flags().items() if name in config.origins}
    for i, message in enumerate(mistakes.messages[checked_from:], checked_from):
        keys = [key for name, key in in_file.items() if name in flags_in(message)]
        mistakes.messages[i] += f" ({', '.join(keys)} in {config.path})" if keys else ""
    mistakes.report()
    for text in [*config.notes(), *notes, *line.notes(), *filter(None, [stands_for(settings)])]:
        note(text)
    return cast(ResolvedSettings, settings)


def stated_flags(architecture: Architecture, argv: Sequence[str]) -> set[str]:
    """Return the flags, as --help has them, that a command line states by itself or by its DeepSpeed file.

    Raises SettingsError for a file that cannot be read. Other mistakes are ``parse_settings``' to report.
    """
    given, config = read_command_line(argv, Mistakes(), architecture.presets).given, DeepSpeedConfig()
    if "deepspeed_config" in given:
        config = read_deepspeed_config(given["deepspeed_config"])
    batches = {"--global-batch-size"} if config.accumulation_steps is not None else set[str]()
    return batches.union(map(flag_of, given | config.values))


def _choose_between(given: dict[str, Any], config: DeepSpeedConfig) -> list[str]:
    """Drop values of flags or file that have no effect in Megatron-DeepSpeed, whose scripts hold both. Return notes.

    There the file's sections fp16 and bf16 choose the precision and scale the loss, the file's monitors and Megatron's
    write to places of their own, and --global-batch-size changes the file's batch size before the first step.
    """
    notes, fixed, batch = list[str](), given.get("loss_scale"), given.get("global_batch_size")
    if batch is not None and config.values.get("global_batch_size", batch) != batch:
        del config.values["global_batch_size"]
        written = config.origins.pop("global_batch_size")
        notes.append(f"{written} of {config.path} has no effect beside --global-batch-size {batch}")
        config.accumulation_steps = None  # follows from the batch sizes
    dynamic = [config.origins[name] for name in ("loss_scale", *DYNAMIC_SCALE_SETTINGS) if name in config.values]
    if fixed is not None and dynamic and config.values.get("loss_scale") is None:
        del given["loss_scale"]
        notes.append(f"--loss-scale {fixed:g} has no effect: {dynamic[0]} of {config.path} asks for a dynamic one")
    for precision, other in ("fp16", "bf16"), ("bf16", "fp16"):
        if precision in given and config.values.get(other) and not config.values.get(precision):
            del given[precision]
            config.values.pop(precision, None)
            notes.append(f"--{precision} has no effect: {config.origins[other]} of {config.path} computes otherwise")
    for name in ("tensorboard_dir", "wandb_project", "wandb_entity"):
        if name in given and name in config.values:
            written = f"{config.origins.pop(name)} of {config.path}"
            if config.values.pop(name) != given[name]:
                notes.append(f"{written} has no effect beside {flag_of(name)} {given[name]}")
    return notes


def _check_agreement(given: dict[str, Any], config: DeepSpeedConfig) -> None:
    """Check that flags and DeepSpeed file state equal values, and the same kind of loss scale."""
    typed = {name: flag_of(name) + ("" if value is True else f" {value}") for name, value in given.items()}
    written = {name: f"{origin} of {config.path}" for name, origin in config.origins.items()}
    mistakes = [
        f"{typed[name]} contradicts {written[name]}; make them equal or leave one out"
        for name in given
        if name in config.values and given[name] != config.values[name]
    ]
    dynamic = [typed[name] for name in DYNAMIC_SCALE_SETTINGS if name in typed and name not in written]
    if config.values.get("loss_scale") is not None and "loss_scale" not in typed and dynamic:
        mistakes.append(
            f"{written['loss_scale']} is a fixed loss scale, and {', '.join(dynamic)} is of a dynamic one; leave "
            "one of them out"
        )
    if mistakes:
        raise SettingsError(*mistakes)


def _check_not_needed(not_needed: Mapping[str, NotNeeded], settings: Settings) -> None:
    """Refuse a flag that asks for something else than this run does."""
    values = settings.as_flat_dict()
    for name, flag in not_needed.items():
        holds = all(
            values[setting] > 0 if allowed == "above 0" else values[setting] in allowed
            for setting, allowed in flag.only_if.items()
        )
        require(holds, f"{name} does not hold for this run: {flag.because}")


def _preset(architecture: Architecture, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a published model, by field name."""
    name = given["preset"]
    for other in ARCHITECTURES:
        is_other = name in other.presets and name not in architecture.presets
        require(not is_other, f"--preset {name} is for {other.script}")
    preset = architecture.preset(name)
    if "untie_embeddings_and_output_weights" in given:  # overrides its opposite
        preset.pop("tie_embeddings_and_output_weights", None)
    return preset


def _into_groups(architecture: str, values: dict[str, Any], mistakes: Mistakes) -> Settings:
    unknown = values.keys() - all_flags().keys()
    assert not unknown, f"no setting is called {', '.join(unknown)}"
    groups: dict[str, Any] = {}
    for attribute, group in iterate_groups():
        try:
            groups[attribute] = group_from(group, values)
        except ValueError as error:  # only ZeRO++'s and the islands' check themselves when they are made
            with mistakes.collected_unless_named():
                what = "ZeRO++ settings" if group is ZeroPPConfig else "settings of islands"
                raise SettingsError(f"{what}: {with_flags(str(error), flags_of_fields(group))}") from error
    return Settings(architecture=architecture, **groups)
