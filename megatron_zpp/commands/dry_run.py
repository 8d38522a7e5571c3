"""--dry-run and --print-config: check a command, and print its settings, and what they need. Nothing is started."""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_zpp.arguments.check_zero import check_replicas_on_nodes
from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.arguments.resolve_parallel import check_vocabulary, data_parallel_size
from megatron_zpp.arguments.settings_file import changed_settings, format_settings
from megatron_zpp.commands.needs import memory_and_traffic
from megatron_zpp.families import Architecture, vocabulary_of
from megatron_zpp.parallel.distributed import device_of_rank, is_first_rank, ranks_of_environment
from megatron_zpp.parallel.local_ranks import is_launched
from megatron_zpp.parallel.mesh import MODEL_PARALLEL_SETTINGS, ranks_per_model_copy
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import estimate
from megatron_zpp.settings.checks import flag_of, require
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.data import find_tokenizer
from megatron_zpp.training.model import ModelBuilder
from megatron_zpp.training.setup import build_mesh, check_machine, plan_run
from megatron_zpp.zeropp import Traffic
from megatron_zpp.zeropp.recipes import AUTO

USUAL_RANKS_PER_NODE = 8


def print_config(architecture: Architecture) -> None:
    """Print a command's settings, on the launcher's first rank. Raises ValueError for wrong ones."""
    if is_first_rank():
        launched = ranks_of_environment() if is_launched() else None
        print(format_settings(parse_settings(architecture, world_size=launched)), end="", flush=True)


def dry_run(architecture: Architecture) -> None:
    """Print what a run would do, on the launcher's first rank. Raises ValueError for what a run would refuse."""
    launched = ranks_of_environment() if is_launched() else None
    if not is_first_rank():
        return
    notes: list[str] = []
    settings = parse_settings(architecture, world_size=launched, note=notes.append)
    if settings.zero.recipe == AUTO:
        notes.append("--zeropp auto chooses a recipe when the run starts, by its links; this is what zero3 needs")
    world_size = settings.training.dry_run_world_size or launched or settings.distributed.local_ranks or 1
    ranks_per_node, source = _ranks_per_node(settings, world_size)
    nodes = world_size // ranks_per_node
    grid = RankGrid(nodes, ranks_per_node, settings.distributed)
    needs = _check(architecture, settings, grid, world_size)
    parts = [
        _ranks(settings, grid, source),
        [
            "settings that are not their defaults, derived ones among them",
            *(f"  {flag.typed(value)}" for flag, value in changed_settings(settings)),
        ],
        [f"note: {note}" for note in notes],
        needs,
        ["nothing was started: leave --dry-run out to train"],
    ]
    print("\n\n".join("\n".join(lines) for lines in parts if lines), flush=True)


def _ranks(settings: ResolvedSettings, grid: RankGrid, source: str) -> list[str]:
    distributed, kind = settings.distributed, f"{settings.architecture}, ZeRO stage {settings.zero.zero_stage}"
    names = (*MODEL_PARALLEL_SETTINGS, "expert_model_parallel_size")
    sizes = [f"{flag_of(name)} {getattr(distributed, name)}" for name in names]
    return [
        f"{kind}, {grid.world_size} rank(s) on {grid.nodes} node(s) ({source})",
        f"{data_parallel_size(distributed, grid.world_size)} data-parallel rank(s), {', '.join(sizes)}",
        *([f"{distributed.islands} islands {settings.island.describe()}"] if distributed.islands > 1 else []),
    ]


def _ranks_per_node(settings: ResolvedSettings, world_size: int) -> tuple[int, str]:
    """Return the ranks of each node, and where the number comes from."""
    if (ranks := settings.distributed.local_ranks) is not None:
        return ranks // settings.distributed.local_nodes, "--local-ranks"
    config, launchers = settings.zeropp, os.environ.get("LOCAL_WORLD_SIZE")
    if ranks_per_model_copy(settings.distributed) == 1:  # else these count only a node's data-parallel ranks
        if config.ranks_per_node is not None:
            return config.ranks_per_node, "--zeropp-ranks-per-node"
        if config.hpz_partition_size > 1:
            return config.hpz_partition_size, "--zero-hpz-partition-size"
    if launchers is not None:
        require(world_size % int(launchers) == 0, f"LOCAL_WORLD_SIZE {launchers} does not divide {world_size} ranks")
        return int(launchers), "LOCAL_WORLD_SIZE of the launcher"
    ranks, source = world_size, "one node"
    if world_size % USUAL_RANKS_PER_NODE == 0:
        ranks, source = USUAL_RANKS_PER_NODE, f"{USUAL_RANKS_PER_NODE} a node"
    return ranks, f"{source}, unless LOCAL_WORLD_SIZE or --zeropp-ranks-per-node says otherwise"


def _check(architecture: Architecture, settings: ResolvedSettings, grid: RankGrid, world_size: int) -> list[str]:
    """Refuse what the run refuses, by its own checks, on ranks of which this process alone exists.

    With --dry-run-world-size the run is for other machines: their files, packages and memory are not looked for.
    Returns length, memory and traffic, or why they are not known, as lines. Raises FailedTogether, ValueError, OSError,
    ImportError.
    """
    is_here, vocabulary = settings.training.dry_run_world_size is None, settings.tokenizer.vocab_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    device = torch.device("cpu")
    if is_here:
        device = device_of_rank(settings.distributed.distributed_backend, settings.distributed.local_ranks)
        check_machine(settings, device)
    mesh = build_mesh(settings, torch.device("cpu"))  # also for GPUs: nothing is computed
    if (replicas := settings.distributed.num_distributed_optimizer_instances) > 1:
        averaging = grid.group("averaging")
        check_replicas_on_nodes(replicas, averaging.size, averaging.ranks_per_node)
    if is_here:
        vocab_size = plan_run(architecture, settings, mesh).vocab_size
    else:
        try:
            vocabulary = find_tokenizer(settings.tokenizer).vocab_size
        except (OSError, ValueError, ImportError) as error:
            if vocabulary is None:
                return [f"model, memory and traffic are not estimated without --vocab-size: {error}"]
        vocab_size = vocabulary_of(settings.model, vocabulary)
        check_vocabulary(settings.distributed, vocab_size, settings.model.make_vocab_size_divisible_by)
    builder = ModelBuilder(architecture, settings, vocab_size, device, mesh, Traffic())
    stages = builder.build_parts().values()
    if is_here:
        builder.check_memory(*stages)
    try:
        needs = estimate(architecture, settings, vocab_size, grid)
    except ValueError as error:
        parameters = architecture.num_parameters(architecture.build_config(settings.model, vocab_size))
        kept = builder.kept_bytes(*stages) / 1e9
        return [
            f"{parameters:,} parameters",
            f"the first rank keeps {kept:.3g} GB of parameters, gradients and optimizer in fp32",
            f"other memory and traffic are not estimated: {error}",
        ]
    return memory_and_traffic(needs)
