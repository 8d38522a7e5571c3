"""The training program: parse the command line, start the ranks, build the run, train, and end with a status."""

import dataclasses
import functools
import os
import signal
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_zpp.arguments.parse import SettingsError, note_on_first_rank, parse_settings, stated_flags
from megatron_zpp.arguments.recipe import choice_of, stands_for
from megatron_zpp.arguments.settings_file import format_settings
from megatron_zpp.checkpoint.files import write_durably
from megatron_zpp.checkpoint.folder import SETTINGS, complete_checkpoints
from megatron_zpp.checkpoint.resume import recipe_to_keep
from megatron_zpp.commands.dry_run import dry_run, print_config
from megatron_zpp.errors import describe_error, messages_of
from megatron_zpp.families import Architecture
from megatron_zpp.files import as_path
from megatron_zpp.integrations.float8 import describe_float8
from megatron_zpp.metrics.lasting import keep_streams
from megatron_zpp.parallel import distributed
from megatron_zpp.parallel.flight_record import record_collectives
from megatron_zpp.parallel.local_ranks import is_launched, start_local_ranks
from megatron_zpp.planning.auto import choose_recipe, find_nodes
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import estimate
from megatron_zpp.settings.groups import DistributedSettings
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.data import find_tokenizer
from megatron_zpp.training.loss import LanguageModelLoss
from megatron_zpp.training.nonfinite import NotFiniteError
from megatron_zpp.training.pretrain import train
from megatron_zpp.training.setup import build_trainer
from megatron_zpp.training.trainer import Trainer
from megatron_zpp.zeropp import ZeroPP
from megatron_zpp.zeropp.recipes import AUTO

# docs/reference/checkpoints.md lists them: 0 trained to the end, or saved and stopped as asked; 1 crashed.
EXIT_USER_ERROR = 2
EXIT_NOT_FINITE = 3


def main(architecture: Architecture, loss_class: type[LanguageModelLoss] = LanguageModelLoss) -> NoReturn:
    keep_streams()
    try:
        pretrain(architecture, distributed.CtrlC(), loss_class)
    except SystemExit as exit_:
        distributed.exit_process(exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None))
    distributed.exit_process(0)


def pretrain(
    architecture: Architecture,
    ctrl_c: distributed.CtrlC | None = None,
    loss_class: type[LanguageModelLoss] = LanguageModelLoss,
) -> None:
    """Train as the command line says. End the process with a status unless all goes well."""
    start = time.monotonic()
    try:
        for word, show in (("--print-config", print_config), ("--dry-run", dry_run)):
            if word in sys.argv[1:]:
                show(architecture)
                return
        parsed: ResolvedSettings | SettingsError
        notes: list[str] = []
        try:
            launched = distributed.ranks_of_environment() if is_launched() else None
            parsed = parse_settings(architecture, world_size=launched, note=notes.append)
            ranks = parsed.distributed
            start_local_ranks(ranks.local_ranks, ranks.local_nodes)  # does not return in the process that starts them
        except SettingsError as error:
            parsed, ranks = error, DistributedSettings()
        for text in notes:
            note_on_first_rank(text)
        record_collectives(None if isinstance(parsed, SettingsError) else parsed.run_folder)
        # The ranks meet to report a mistake too: torchrun ends them all when the first one leaves.
        device = distributed.init_distributed(
            ranks.distributed_backend, ranks.distributed_timeout_minutes, local_ranks=ranks.local_ranks
        )
        with distributed.errors_on_all_ranks():
            if isinstance(parsed, SettingsError):
                raise parsed
            settings = parsed
        if settings.training.exit_signal_handler:
            # Python's own handler would wait until a collective returns, and then print a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if settings.training.deterministic_mode:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time
            torch.use_deterministic_algorithms(True)
        settings, why = chosen_settings(architecture, settings, device)
        trainer = build_trainer(architecture, settings, device, loss_class)
        if (save := settings.checkpoint.save) is not None and not settings.training.skip_train:
            with distributed.errors_on_all_ranks():
                if dist.get_rank() == 0:
                    write_durably(as_path(save) / SETTINGS, format_settings(settings).encode())
        describe(trainer)
        if why is not None:
            distributed.print_once(why)
        if ctrl_c is not None:
            ctrl_c.describe = functools.partial(_where_interrupted, trainer)
        try:
            train(trainer, start)
        except NotFiniteError as error:  # on all ranks
            distributed.report_error(str(error))
            trainer.writers.close()
            distributed.exit_together(EXIT_NOT_FINITE, [str(error)])
        trainer.writers.close()
    except distributed.FailedTogether as failed:
        distributed.exit_together(EXIT_USER_ERROR, failed.args)
    except (ValueError, OSError, ImportError) as error:
        _exit_alone_or_together(error)
    except Exception as error:
        distributed.die(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def chosen_settings(
    architecture: Architecture, settings: ResolvedSettings, device: torch.device
) -> tuple[ResolvedSettings, str | None]:
    """Replace ``--zeropp auto`` by the recipe of the checkpoint, or by one chosen now; return why, too. Collective."""
    if settings.zero.recipe != AUTO:
        return settings, None

    stated = stated_flags(architecture, sys.argv[1:])

    def parse(choice: str, ranks_per_node: int | None = None) -> ResolvedSettings:
        way = [word for word in choice.split() if word.partition("=")[0] not in stated]  # the command's own flags win
        words = [*sys.argv[1:], "--zeropp", *way]
        return parse_settings(architecture, words, dist.get_world_size(), lambda _: None, ranks_per_node=ranks_per_node)

    kept = recipe_to_keep(settings.checkpoint)
    if kept is not None:
        choice = choice_of(kept), find_nodes(settings).ranks_per_node, ""
    else:
        with distributed.errors_on_all_ranks():
            vocabulary = find_tokenizer(settings.tokenizer).vocab_size
        choice = choose_recipe(architecture, parse, vocabulary, device)
    words, ranks_per_node, why = choice
    settings = parse(words, ranks_per_node)
    why = why or f"--zeropp auto: {choice_of(settings.as_flat_dict())}, as the checkpoint's run"
    return settings, f"{why}\n  {stands_for(settings)}"


# Megatron's scripts do not give --zero-stage: this line says what their run shards.
_SHARDED = (
    "data-parallel ranks shard nothing, as Megatron without --use-distributed-optimizer",
    "data-parallel ranks shard optimizer state, as Megatron with --use-distributed-optimizer",
    "data-parallel ranks shard gradients and optimizer state",
    "data-parallel ranks shard parameters, gradients and optimizer state, unless --zero-stage says 0, 1 or 2",
)


def describe(trainer: Trainer) -> None:
    """Print the model, the ranks, and how both are divided, on rank 0."""
    zeropp, world_size = trainer.zeropp, dist.get_world_size()
    ranks = "ranks" if world_size > 1 else "rank"
    distributed.print_once(
        f"{trainer.architecture.name} with {trainer.architecture.num_parameters(trainer.model.config):,} parameters, "
        f"ZeRO stage {trainer.settings.zero.zero_stage} on {world_size} {ranks} ({trainer.device.type}, "
        f"torch {torch.__version__})"
    )
    if world_size > 1:
        distributed.print_once(_SHARDED[trainer.settings.zero.zero_stage])
    if (recipe := trainer.settings.precision.fp8_recipe) is not None:
        distributed.print_once(describe_float8(trainer.model.layers, recipe, emulate=trainer.device.type == "cpu"))
    if trainer.pipeline is not None:
        distributed.print_once(trainer.pipeline.describe())
    if zeropp is not None and world_size > 1:
        distributed.print_once(zeropp.describe())
        if dist.get_rank() == 0 and (on_two := _describe_two_nodes(trainer, zeropp)) is not None:
            print(on_two, flush=True)
    if (synchronization := trainer.islands.describe()) is not None:
        distributed.print_once(synchronization)


def _describe_two_nodes(trainer: Trainer, zeropp: ZeroPP) -> str | None:
    """Say what a run of one node would send between two, by the estimate; None for others, and where it has none."""
    settings, ranks = trainer.settings, dist.get_world_size() // 2
    if any(unit.topology.num_nodes > 1 for unit in zeropp.units):
        return None
    hpz = ranks if settings.zeropp.hpz_partition_size > 1 else 1
    config = dataclasses.replace(settings.zeropp, ranks_per_node=None, hpz_partition_size=hpz)
    settings = dataclasses.replace(settings, zeropp=config)
    try:
        grid, passes = RankGrid(2, ranks, settings.distributed), 2 if dist.get_backend() == "gloo" else 1
        needs = estimate(trainer.architecture, settings, trainer.plan.vocab_size, grid, passes)
    except ValueError:
        return None
    sent = sum(needs.sent_between_nodes.values()) / 1e6
    return f"nothing crosses nodes: this is one; two nodes of {ranks} ranks would send about {sent:,.3f} MB per step"


def _where_interrupted(trainer: Trainer) -> str:
    """Say at which step a run was interrupted, and what of it is saved."""
    save, here = trainer.settings.checkpoint.save, f"after iteration {trainer.counters.iteration}"
    if save is None:
        return f"{here}: nothing is saved, there is no --save"
    saved = complete_checkpoints(save)
    last = f"--load {save} goes on from {saved[-1].name}" if saved else f"{save} holds no checkpoint yet"
    return f"{here}, not saved: {last}"


def _exit_alone_or_together(error: Exception) -> NoReturn:
    """Report an error of this rank. If all ranks have it, rank 0 does, and torchrun ends the others while they wait."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the trainer's handler would not end the wait
    if distributed.is_first_rank():
        distributed.report_error(*messages_of(error))
        distributed.exit_together(EXIT_USER_ERROR, messages_of(error))
    time.sleep(5)
    print(f"error: rank {os.environ['RANK']}: {describe_error(error)}", file=sys.stderr, flush=True)
    sys.exit(EXIT_USER_ERROR)
