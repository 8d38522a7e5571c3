"""How a configuration on some ranks is described to people, and identified in checkpoints."""

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config import ZeroPPConfig
from .fsdp.formats import Formats
from .fsdp.fsdp_unit import FSDPUnit
from .fsdp.topology import process_rank
from .wire import kernels
from .wire.layout import FEWEST_QUANTIZED, block_size_of
from .wire.quantization import Code, mix_seed

logger = logging.getLogger(__name__)
LEAST_KEPT = 2**26  # bytes of gathered weights, below which gathering them again costs little


def describe(config: ZeroPPConfig, units: Sequence[FSDPUnit]) -> str:
    """Describe the nodes and ranks, and how weights and gradients are sent: a line for each group of units."""
    num_units, lines = Counter((unit.topology.num_nodes, unit.topology.ranks_per_node) for unit in units), []
    for (num_nodes, per_node), count in num_units.items():
        line = f"{num_nodes} {_plural('node', num_nodes)} of {per_node} {_plural('rank', per_node)}; "
        if num_nodes * per_node == 1:
            line += "nothing is sent"
        else:
            gradients = _gradients(config, num_nodes, per_node)
            line += f"weights are sent {_weights(config, num_nodes)}; gradients {gradients}"
        line += f"; seed {config.seed}" if "stochastic" in line else ""
        lines.append(line + (f" ({count} {_plural('unit', count)})" if len(num_units) > 1 else ""))
    return "\n".join(lines)


def _weights(config: ZeroPPConfig, num_nodes: int) -> str:
    rounding = config.weight_rounding
    in_full = _bits(config.weight_bits if config.quantized_weights else None, config.weight_scaling, rounding)
    formats = Formats(config, num_nodes)
    if not formats.has_secondary_partition:
        return f"{in_full} at every gather"
    frozen = f", frozen matrices in {config.frozen_dtype}" if config.frozen_dtype is not None else ""
    between = f"as moves of {'bits' if in_full == 'unquantized' else in_full}" if formats.sends_moves else in_full
    where = ", from host memory" if config.offloads("copies") else ""
    if config.weight_copies == "card":
        return f"{between} between nodes and on to all of their ranks once per step{where}{frozen}"
    within = in_full if formats.keeps_wires else _bits(config.weight_intra_bits, config.weight_intra_scaling, rounding)
    return f"{between} between nodes once per step, {within} within a node at every gather{where}{frozen}"


def _gradients(config: ZeroPPConfig, num_nodes: int, ranks_per_node: int) -> str:
    if not config.quantized_gradients:
        return "unquantized at every micro-batch"
    rounding = config.gradient_rounding
    within = _bits(config.gradient_intra_bits, config.gradient_intra_scaling, rounding)
    more = ["element scales"] if config.gradient_element_scales else []
    last = ["int{1} in the first {0} steps".format(*config.warmup)] if config.warmup is not None else []
    between = _bits(config.gradient_bits, config.gradient_scaling, rounding, more, last)
    if config.loco is not None:
        where = ", errors in host memory" if config.offloads("errors") else ""
        loco = f" with LoCo (beta {config.loco.beta}{where})"
        between += loco
        within += loco if config.loco.hops == "both" else ""
    hops = [f"{within} within a node at every micro-batch"] if ranks_per_node > 1 else []
    hops += [f"{between} between nodes once per step"] if num_nodes > 1 else []
    if config.gradient_sum_dtype != "fp32" or config.offloads("sums"):
        rounding = "" if config.gradient_sum_dtype == "fp32" else " (stochastic)"
        where = " in host memory" if config.offloads("sums") else ""
        hops.append(f"kept as {config.gradient_sum_dtype}{rounding}{where} between micro-batches")
    return ", ".join(hops)


def _bits(
    bits: int | None, scaling: str | None, rounding: str, more: Sequence[str] = (), last: Sequence[str] = ()
) -> str:
    if bits is None:
        return "unquantized"
    how = ["mean"] if Code(bits, scaling).is_mean else []
    how += [*more, *(["stochastic"] if rounding == "stochastic" else []), *last]
    code = "ternary" if bits == 1 else f"int{bits}"
    return code + (f" ({', '.join(how)})" if how else "")


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"


# Settings that change what is sent, not what is kept from step to step.
_STATELESS = (
    *("seed", "gradient_bits_warmup", "weight_intra_scaling", "gradient_scaling", "gradient_intra_scaling"),
    *("gradient_sum_dtype", "exact_undo", "weight_copies", "offload"),
)


def settings_of_state(config: ZeroPPConfig) -> dict[str, Any]:
    """Return the settings that ranks must have in common with those that saved a state, to load it."""
    return asdict(config, dict_factory=lambda fields: {name: x for name, x in fields if name not in _STATELESS})


def state_prefix(config: ZeroPPConfig, units: Sequence[FSDPUnit]) -> str:
    """Return the prefix of the keys of a rank's state. It names the layout, so a loader with another finds no keys."""
    shapes = [(unit.topology.num_nodes, unit.topology.ranks_per_node, unit.topology.rank) for unit in units]
    shape = shapes[0] if len(set(shapes)) == 1 else shapes
    shards = [(unit.name, [(p.numel, p.quantizable, *p.is_nf4 * ("nf4",)) for p in unit.shards]) for unit in units]
    frozen: list[int] = []
    if config.loco is not None or config.gradient_element_scales:  # only their states depend on what is trainable
        frozen = [i for i, p in enumerate(chain.from_iterable(u.parameters for u in units)) if not p.requires_grad]
    fingerprint = mix_seed(repr(settings_of_state(config)), repr(shape), repr(shards), repr(frozen))
    nodes = " and ".join(dict.fromkeys(f"{num_nodes} x {per_node}" for num_nodes, per_node, _ in shapes))
    return f"{process_rank()}.{nodes} ranks, settings {fingerprint:08x}/"


def warn_of_lost_state() -> None:
    logger.warning(
        "the state of ZeRO++ is left out: it was saved with another model, other ranks and nodes, other frozen "
        "parameters, or another ZeroPPConfig, or not by all ranks. LoCo's errors begin at zero, elements have no "
        "scales, and weights are sent in full once"
    )


def warn(config: ZeroPPConfig, units: Sequence[FSDPUnit], device: torch.device) -> None:
    """Warn of settings without effect, and of what makes a run slow. Call it on one rank."""
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the kernels of all streams in one queue, so that communication waits "
            "for computation and computation for communication: unset it (Megatron's scripts set it for its own "
            "tensor parallelism, which FSDP2 does not use)"
        )
    if config.quantized_weights or config.quantized_gradients or config.weight_moves:
        kernels.warn_if_missing(device)
    for world_size, num_nodes in sorted({(unit.topology.world_size, unit.topology.num_nodes) for unit in units}):
        where = f"{world_size} data-parallel ranks on one node"
        if world_size == 1:
            if config.enabled and all(unit.topology.world_size == 1 for unit in units):
                logger.warning("ZeRO++ has no effect on one rank: there is nothing to gather or reduce")
        elif num_nodes == 1:
            sends_plain = config.quantized_gradients and config.gradient_intra_bits is None
            corrects_inter = config.loco is not None and config.loco.hops == "inter"
            for what, is_idle, reason in (
                ("hpZ", config.hpz_partition_size > 1, "all gathers stay within it"),
                ("weight_copies", config.weight_copies != "node", "all gathers stay within it"),
                ("LoCo", corrects_inter, "it corrects the hop between nodes"),
                ("gradient_element_scales", config.gradient_element_scales, "it scales the hop between nodes"),
                ("qgZ", sends_plain, "gradient_intra_bits leaves the hop within it unquantized"),
            ):
                if is_idle:
                    logger.warning("%s has no effect on %s: %s", what, where, reason)
    if config.frozen_dtype is not None and not any(shard.is_nf4 for unit in units for shard in unit.shards):
        logger.warning(
            "frozen_dtype has no effect: it needs several nodes, and matrices that are frozen (requires_grad False) "
            "before apply_zeropp and that nf4_skip does not name"
        )
    sizes = [config.weight_block_size] if config.quantized_weights else []
    sizes += [config.gradient_block_size] if config.quantized_gradients else []
    small = []
    for unit in units:
        shards = [shard for shard in unit.shards if shard.quantizable and unit.topology.world_size > 1]
        if any(block_size_of(shard.numel, size) == 0 < shard.numel for shard in shards for size in sizes):
            small.append(unit.label)
    if small:
        named = ", ".join(small[:5]) + (f" and {len(small) - 5} more" if len(small) > 5 else "")
        logger.warning(
            "matrices of %s are sent unquantized: a rank holds fewer than %d elements of them, too few for a scale",
            named,
            FEWEST_QUANTIZED,
        )


def note_repeated_gathers(units: Sequence[FSDPUnit]) -> None:
    """Note that a further micro-batch is about to gather weights which their device has memory to keep."""
    again = [u for u in units if u.is_sharded and u.topology.world_size > 1 and not u.all_gather.has_all_copies]
    nbytes = sum(unit.topology.world_size * unit.whole.numel * unit.gathered_dtype.itemsize for unit in again)
    if LEAST_KEPT <= nbytes <= (free := _free_memory(units[0].device)):
        logger.warning(
            "every micro-batch of a step gathers the same weights again, %.2g GB, and %.2g GB are free: keep them with "
            "fully_shard(..., reshard_after_forward=False) and, before each backward pass, "
            "model.set_reshard_after_backward(is_last_micro_batch); the trainer's flag is --zero-stage 2",
            nbytes / 1e9,
            free / 1e9,
        )


def _free_memory(device: torch.device) -> float:
    """Return the bytes that a rank can allocate on ``device`` beside the most that it has had there."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    memory = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", memory.read_text()) if memory.exists() else None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    # Ranks of a host share what it has, and half is for activations, of which there are none now.
    return 1024 * int(found[1]) / ranks / 2 if found is not None else 0
