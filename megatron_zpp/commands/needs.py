"""Memory and traffic of a planned run as text, for --dry-run, estimate and plan."""

from megatron_zpp.planning.needs.estimate import Estimate, communicators
from megatron_zpp.planning.needs.traffic import effective_zero_stage


def memory_and_traffic(needs: Estimate) -> list[str]:
    """Format the run's length, the model's size, what a rank keeps and what a node sends."""
    rank, nodes, islands = needs.largest, needs.grid.nodes, needs.grid.distributed.islands
    which = f" of pipeline rank {needs.ranks.index(rank)}, the largest" if len(needs.ranks) > 1 else ""
    working = {f"{name} (about)": nbytes for name, nbytes in rank.working.items()}
    active = needs.planned.active_parameters
    used = "" if active == needs.parameters else f", {active:,} of them for a token"
    steps = f"{needs.steps:,} steps, the last of {needs.micro_batches} micro-batch(es) a rank"
    lines = [f"{needs.tokens:,} tokens in {steps}", f"{needs.parameters:,} parameters{used}", ""]
    lines += _gigabytes(f"memory of a GPU{which}, GB", rank.states | working | {"in all": needs.memory})
    if effective_zero_stage(needs.settings) == 3:
        lines += [f"  {rank.resident_weights / 1e9:9.3g}  more inside zeropp.resident_weights(), for generation, and"]
        lines += [f"  {1000 * rank.cache_per_token / 1e9:9.3g}  more for each 1,000 tokens of texts, in its cache"]
    number, nbytes = communicators(needs.settings, needs.grid)
    if number:
        groups = f"{number} communicator{'s' * (number > 1)}"
        lines += [f"  {nbytes / 1e9:9.3g}  more with NCCL, for {groups} (about; outside torch's allocator)"]
    if rank.host:
        lines += ["", *_gigabytes("host memory for each GPU, GB", rank.host)]
    sent = {what: nbytes / nodes for what, nbytes in needs.sent_between_nodes.items()}
    lines += ["", *_gigabytes("sent to other nodes per step by each node, GB", sent)]
    lines += [f"  {needs.sent_per_node / needs.parameters:9.3g}  bytes for each parameter of the model"]
    if islands > 1:
        per_island = needs.sent_between_islands / islands
        title = "sent to other islands per step by each island, GB, a mean over an interval"
        lines += ["", *_gigabytes(title, {"island synchronization": per_island})]
        lines += [f"  {per_island / needs.parameters:9.3g}  bytes for each parameter of the model"]
    return lines


def _gigabytes(title: str, rows: dict[str, int] | dict[str, float]) -> list[str]:
    return [title, *(f"  {nbytes / 1e9:9.3g}  {name}" for name, nbytes in rows.items())]
