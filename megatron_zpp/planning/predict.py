"""Predict a run on a cluster: memory, bytes, and the seconds of everything in a step, by the cluster's rates."""

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import Architecture, find_architecture
from megatron_zpp.metrics.history import RunHistory
from megatron_zpp.models.activation_checkpoint import recomputed_modules
from megatron_zpp.models.moe import active_parameters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.parallel.stages import idle_micro_batches
from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.planning.needs.division import RankGrid, RankGroup, pipeline_placement
from megatron_zpp.planning.needs.estimate import Estimate, RankEstimate, estimate
from megatron_zpp.planning.needs.traffic import (
    FP32,
    Exchange,
    UnitExchanges,
    effective_zero_stage,
    expert_all_to_all,
    expert_rows,
    hidden_state_bytes,
    island_piece_bytes,
    recomputed_blocks,
    resent_share,
    wire_dtypes,
)
from megatron_zpp.planning.step import BETWEEN, WITHIN, StepShape, StepTime, Transfer, UnitTimes, simulate
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp.recipes import RECIPES

# Bytes that kernels move to synchronize islands, for each element of a shard: differences, both hops, the outer step
# and the merge are about 13 passes over fp32.
SYNC_BYTES = 13 * 4
LOGIT_BYTES = 16  # a pass reads and writes in 16 bit at the matrix product, in fp32 from the softmax on


@dataclass(frozen=True)
class Prediction:
    """One run on one cluster."""

    cluster: Cluster
    needs: Estimate
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        """The rate of the whole cluster."""
        return self.needs.tokens / self.needs.steps / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization as in the log, without recomputation."""
        peak = self.cluster.world_size * self.cluster.peak_tflops * 1e12
        return self.tokens_per_second * self.needs.flops_per_token / peak

    @property
    def dollars_per_million_tokens(self) -> float:
        """The cost; 0 without a price."""
        dollars = self.cluster.world_size * self.cluster.dollars_per_gpu_hour
        return dollars / 3600 / self.tokens_per_second * 1e6


def estimate_on(cluster: Cluster, architecture: Architecture, settings: ResolvedSettings, vocabulary: int) -> Estimate:
    """Count memory and bytes, as ``estimate`` does. Raises ValueError for what is not estimated."""
    grid = RankGrid(cluster.nodes, cluster.gpus_per_node, settings.distributed)
    return estimate(architecture, settings, vocabulary, grid, cluster.ring_passes)


def predict(cluster: Cluster, needs: Estimate) -> Prediction:
    """Predict the run that ``needs`` counts; its slowest stage decides. Raises ValueError where islands cut nodes."""
    shapes = set(step_shapes(needs, cluster))
    slowest = max(map(simulate, shapes), key=lambda time: time.seconds)
    if needs.settings.distributed.islands > 1:
        slowest = _with_island_syncs(slowest, cluster, needs)
    return Prediction(cluster, needs, slowest)


def island_cluster(settings: ResolvedSettings, cluster: Cluster) -> Cluster:
    """Return one island's part of the cluster: all of it without islands. Raises ValueError if nodes are cut."""
    islands = settings.distributed.islands
    if islands == 1:
        return cluster
    if cluster.nodes % islands or islands % cluster.sites:
        cut = f"--islands {islands} of {cluster.nodes} nodes at {cluster.sites} site(s)"
        raise ValueError(f"{cut}: islands that are planned are whole nodes of one site; give another number")
    return replace(cluster, nodes=cluster.nodes // islands, sites=1)


def _with_island_syncs(time: StepTime, cluster: Cluster, needs: Estimate) -> StepTime:
    """Add to the time of a step within an island its share of an interval's synchronization."""
    config, islands = needs.settings.island, needs.settings.distributed.islands
    # Seconds of one of the two hops for the whole model, the mean of both. All ranks of an island send at once: each to
    # the same rank of every other island, and then around the ring.
    pieces = island_piece_bytes(needs.settings, needs.planned)  # of a rank of each stage
    hop = cluster.gpus_per_node * (islands - 1) * max(pieces) * 8e-9 / cluster.between_gbits
    microseconds = cluster.between_microseconds
    if cluster.sites > 1:
        to_other_sites = islands - islands / cluster.sites
        leaving_site = cluster.world_size / cluster.sites / len(pieces) * to_other_sites * sum(pieces)
        hop, microseconds = max(hop, leaving_site * 8e-9 / cluster.site_gbits), cluster.site_microseconds
    hop += config.fragments * islands / 2 * microseconds * 1e-6
    fragment_hop = hop / config.fragments
    # A fragment's second hop begins halfway through the delay. Training waits if a hop takes longer than its steps.
    steps_per_hop = ((config.sync_delay + 1) // 2, config.sync_delay // 2)
    waited = config.fragments * sum(max(0.0, fragment_hop - steps * time.seconds) for steps in steps_per_hop)
    # Links carry all fragments once in an interval, however they overlap.
    waited = max(waited, 2 * hop - config.sync_interval * time.seconds)
    shard = max(sum(exchanges.unit.numel for exchanges in rank.exchanges) for rank in needs.ranks)
    kernels = SYNC_BYTES * shard / (1e9 * cluster.kernel_gbytes)
    return replace(
        time,
        exposed_islands=waited / config.sync_interval,
        compression=time.compression + kernels / config.sync_interval,
    )


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of one forward or backward pass of a micro-batch."""

    layer: float
    head: float


def step_shapes(needs: Estimate, cluster: Cluster) -> list[StepShape]:
    """Describe the step of the run that ``needs`` counts, for a rank of each pipeline stage."""
    settings, model = needs.settings, needs.planned.whole
    cluster = island_cluster(settings, cluster)
    forward, backward = arithmetic(needs.architecture, settings, cluster, model)
    two_ranks = RankGroup(2, 1) if needs.grid.group("pipeline").nodes > 1 else RankGroup(1, 2)
    hidden = make_transfer(Exchange(two_ranks, hidden_state_bytes(settings, model), is_straight=True), cluster)
    placement, schedule = pipeline_placement(settings.distributed, model), settings.distributed.pipeline_schedule
    shapes = []
    for number, rank in enumerate(needs.ranks):
        *ends, root = (_unit_times(settings, unit, cluster) for unit in rank.exchanges if unit.unit.layer is None)
        layers = []
        collectives = {
            has_experts: layer_collectives(needs, cluster, rank.num_layers, has_experts)
            for has_experts in {unit.unit.has_experts for unit in rank.exchanges}
        }
        for layer in range(rank.num_layers):  # one unit, or two if its experts have their own
            exchanges = [unit for unit in rank.exchanges if unit.unit.layer == layer]
            units = [_unit_times(settings, unit, cluster) for unit in exchanges]
            share = 1 / len(units)
            units = [replace(unit, forward=share * forward.layer, backward=share * backward.layer) for unit in units]
            in_forward, in_backward = collectives[exchanges[-1].unit.has_experts]
            units[0] = replace(units[0], in_forward=in_forward, in_backward=in_backward)
            layers += units
        if placement is not None:
            layers[0] = replace(layers[0], in_forward=(hidden, *layers[0].in_forward))
            layers[-1] = replace(layers[-1], in_backward=(hidden, *layers[-1].in_backward))
        has_head = placement is None or placement.ranks[-1] == number
        before = (len(ends) + 1) // 2  # the root is gathered first; half of the ends come before the layers
        shapes.append(
            StepShape(
                units=(root, *ends[:before], *layers, *ends[before:]),
                micro_batches=needs.micro_batches,
                zero_stage=effective_zero_stage(settings),
                head_forward=forward.head if has_head else 0.0,
                head_backward=backward.head if has_head else 0.0,
                optimizer=_optimizer_seconds(settings, rank, cluster),
                overlaps=cluster.overlaps,
                idle_micro_batches=idle_micro_batches(schedule, placement) if schedule and placement else 0.0,
            )
        )
    return shapes


def arithmetic(
    architecture: Architecture, settings: ResolvedSettings, cluster: Cluster, model: Transformer
) -> tuple[Arithmetic, Arithmetic]:
    """Return the times of the forward pass and of the backward pass, recomputation included, on one rank.

    The time of matrix products and attention follows from their FLOPs, that of the rest from its bytes. The backward
    pass has twice the products and 2.5 times the attention, which computes scores again (FlashAttention).
    """
    config, training, activation = model.config, settings.training, settings.activation
    modules = activation.recompute_modules or ()
    distributed, placement = settings.distributed, pipeline_placement(settings.distributed, model)
    tensor_parallel, num_layers = distributed.tensor_model_parallel_size, len(model.layers)
    tokens = training.micro_batch_size * training.seq_length / distributed.context_parallel_size
    head = 2 * config.hidden_size * config.vocab_size
    products = architecture.flops_per_token(config, 0) / 3 - head  # without attention
    attended = (architecture.flops_per_token(config, training.seq_length) / 3 - head - products) / num_layers
    products = tokens * products / num_layers / tensor_parallel / cluster.flops_per_second
    attended = tokens * attended / tensor_parallel / (cluster.peak_tflops * 1e12 * cluster.attention_efficiency)
    weights, _ = wire_dtypes(settings)
    kept = recomputed = 0.0
    if architecture.activations is not None:
        block = architecture.activations(config, weights.itemsize)
        block = block.per_tensor_parallel_rank(tensor_parallel, distributed.sequence_parallel)
        block = block.attending(training.seq_length, distributed.context_parallel_size)
        kept = tokens * block.everything / cluster.layer_bytes_per_second
        if modules:
            recomputed = tokens * sum(block.modules.get(name, 0) for name in modules) / cluster.layer_bytes_per_second
        elif activation.recompute_granularity == "selective":
            recomputed = tokens * max(0, block.everything - block.linear_layers) / cluster.layer_bytes_per_second
    logits = tokens * LOGIT_BYTES * config.vocab_size / tensor_parallel / cluster.layer_bytes_per_second
    head_products = tokens * head / tensor_parallel / cluster.flops_per_second
    experts = (settings.model.num_experts or 0) / distributed.expert_model_parallel_size
    host = 1e-6 * (cluster.layer_microseconds + experts * cluster.expert_microseconds)
    # The forward pass writes and reads what is kept. The backward pass reads it, and writes and reads its gradient.
    forward = Arithmetic(_with_host(products + attended + 2 * kept, host / 3, cluster), head_products + logits)
    layers_per_stage = num_layers // (placement.num_stages if placement is not None else 1)
    again = recomputed_blocks(activation, layers_per_stage) / layers_per_stage * forward.layer + 2 * recomputed
    again += _product_share(model, modules) * products + attended * ("core_attn" in modules)
    backward_layer = _with_host(2 * products + 2.5 * attended + 3 * kept + again, 2 * host / 3, cluster)
    return forward, Arithmetic(backward_layer, 2 * head_products + logits)


def _product_share(model: Transformer, modules: Sequence[str]) -> float:
    """Return the share of the layers' weights that a token meets again when these modules are recomputed."""
    names = set(modules) - {"core_attn"} - ({"shared_experts"} if "moe" in modules else set())
    again = [found for block in model.layers for name in names for found in recomputed_modules(block, name)]
    return sum(map(active_parameters, again)) / active_parameters(model.layers)


def _with_host(seconds: float, host: float, cluster: Cluster) -> float:
    """Add the program's own time. A GPU computes while its host issues what is next."""
    return max(seconds, host) if cluster.overlaps else seconds + host


def _optimizer_seconds(settings: ResolvedSettings, rank: RankEstimate, cluster: Cluster) -> float:
    # The norm reads gradients. Clipping and the step read and write them, parameters and the optimizer's state.
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    moved = sum(
        part.numel * (1 + 2 * (2 + state_tensors(settings.optimizer, unit.unit.is_hidden_matrix(part))))
        for unit in rank.exchanges
        for part in unit.unit.shards
    )
    host = 1e-6 * rank.num_layers * cluster.step_microseconds
    return _with_host(FP32 * moved / (1e9 * cluster.kernel_gbytes), host, cluster)


def _unit_times(settings: ResolvedSettings, exchanges: UnitExchanges, cluster: Cluster) -> UnitTimes:
    sent = {name: each for name, each in vars(exchanges).items() if isinstance(each, Exchange)}
    transfers: dict[str, Any] = {name: make_transfer(exchange, cluster) for name, exchange in sent.items()}
    stays_gathered = exchanges.unit.layer is None or effective_zero_stage(settings) < 3
    return UnitTimes(stays_gathered=stays_gathered, **transfers)  # the same names in both


def make_transfer(exchange: Exchange, cluster: Cluster) -> Transfer:
    """Return the times of a collective and of the kernels before and after it."""
    link = BETWEEN if exchange.group.nodes > 1 else WITHIN
    rate = 1e9 * cluster.kernel_gbytes
    return Transfer(link, cluster.exchange_seconds(exchange), exchange.encoded / rate, exchange.decoded / rate)


def layer_collectives(
    needs: Estimate, cluster: Cluster, num_layers: int, has_experts: bool
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Return the collectives of one mean layer that each pass waits for: tensor, context and expert parallelism's."""
    settings, grid, model = needs.settings, needs.grid, needs.planned.whole
    training, distributed, config = settings.training, settings.distributed, model.config
    weights, _ = wire_dtypes(settings)
    tensor, context = grid.group("tensor"), grid.group("context")
    tokens = training.micro_batch_size * training.seq_length // context.size
    row_bytes = 0  # rows that experts compute for a rank's samples
    if has_experts:
        row_bytes = round(weights.itemsize * config.hidden_size * (expert_rows(settings, grid) / tensor.size))
    parts: list[Transfer] = []
    if tensor.size > 1:
        # All-reduces after attention and the MLP; with sequence parallelism, gathers and reduce-scatters.
        piece = weights.itemsize * tokens * config.hidden_size // tensor.size
        all_reduce = make_transfer(Exchange(tensor, piece, passes=2), cluster)
        parts.append(all_reduce)
        if has_experts:
            # Every rank has all tokens and runs those of its experts; results and gradients are gathered.
            parts.append(make_transfer(Exchange(tensor, row_bytes, is_straight=True), cluster))
            if distributed.sequence_parallel:
                parts.append(make_transfer(Exchange(tensor, piece), cluster))
        if not has_experts or settings.model.shared_expert_size:
            parts.append(all_reduce)
    resent, sent_again = list[Transfer](), list[Transfer]()  # again: what selective recomputation does not keep
    if context.size > 1 and needs.architecture.activations is not None:
        # Keys and values are gathered, and their gradients are reduce-scattered.
        width = needs.architecture.activations(config, weights.itemsize).keys_and_values
        resent.append(make_transfer(Exchange(context, tokens * width // tensor.size), cluster))
        sent_again += _scale(resent, resent_share(settings.activation, num_layers, "core_attn"))
    exchange = expert_all_to_all(settings, grid, model) if has_experts else None
    if exchange is not None:  # there and back
        if distributed.moe_token_bits is not None:
            quantized = row_bytes + exchange.group.size * exchange.nbytes
            exchange = replace(exchange, encoded=quantized, decoded=quantized)
        both_ways = 2 * [make_transfer(exchange, cluster)]
        resent += both_ways
        sent_again += _scale(both_ways, resent_share(settings.activation, num_layers, "moe"))
    again = _scale(parts, recomputed_blocks(settings.activation, num_layers) / num_layers)
    return (*parts, *resent), (*parts, *again, *resent, *sent_again)


def _scale(transfers: list[Transfer], share: float) -> list[Transfer]:
    return [
        replace(each, seconds=share * each.seconds, encode=share * each.encode, decode=share * each.decode)
        for each in transfers
        if share > 0
    ]


def compare_with_log(run: RunHistory, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return the seconds of a step and of its parts, predicted and measured.

    Raises ValueError if the cluster is not the run's, or its log lacks the command or waits.
    """
    time = predict_logged(run, cluster).time
    predicted = time.seconds, time.exposed_between, time.exposed_within
    step, between, within = zip(predicted, measured_seconds(run), strict=True)
    return {
        "a step": step,
        "waiting for links between nodes": between,
        "waiting for links within nodes": within,
        "the rest": (step[0] - between[0] - within[0], step[1] - between[1] - within[1]),
    }


def measured_seconds(run: RunHistory) -> tuple[float, float, float]:
    """Return what a step took, and the waits for links between and within nodes: medians over log lines but the first.

    Raises ValueError if the run did not log them.
    """
    metrics, length = run.metrics, int(run.settings["seq_length"])
    rates, batches = metrics.get("tokens-per-second", {}), metrics.get("batch-size", {})
    columns = [
        {i: batches[i] * length / rate for i, rate in rates.items() if i in batches},
        *(metrics.get(f"comm/seconds-waited-{link}-nodes", {}) for link in ("between", "within")),
    ]
    if not all(columns):
        raise ValueError(f"{run.name} did not log how long its ranks waited for links")
    step, between, within = (statistics.median([*column.values()][1:] or [*column.values()]) for column in columns)
    return step, between, within


def calibrate(cluster: Cluster, run: RunHistory) -> Cluster:
    """Return the cluster at the rate of arithmetic that explains what a logged run on such nodes did beside waiting.

    Both shares of the peak change alike. Raises ValueError if the run's ranks are no whole nodes of the cluster, if it
    logged no waits, or if no rate explains it.
    """
    ranks = int(run.settings.get("world_size", 0))
    if ranks % cluster.gpus_per_node:
        raise ValueError(f"{run.name} had {ranks} ranks, which are no whole nodes of {cluster.gpus_per_node} GPUs")
    own = replace(cluster, nodes=ranks // cluster.gpus_per_node, sites=1)
    needs = predict_logged(run, own).needs
    step, between, within = measured_seconds(run)
    measured = step - between - within

    def scaled(factor: float, of: Cluster) -> Cluster:
        products, attention = factor * of.efficiency, factor * of.attention_efficiency
        return replace(of, efficiency=products, attention_efficiency=attention)

    def seconds(factor: float) -> float:
        time = predict(scaled(factor, own), needs).time
        return time.seconds - time.exposed_between - time.exposed_within

    low, high = 1e-4, 1 / max(cluster.efficiency, cluster.attention_efficiency)
    if not seconds(high) <= measured <= seconds(low):
        explained = f"{run.name} took {measured:.3g} s a step without waits: no rate of arithmetic explains that"
        raise ValueError(f"{explained}, at the peak it is {seconds(high):.3g} s")
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return scaled(high, cluster)


def predict_logged(run: RunHistory, cluster: Cluster) -> Prediction:
    """Predict a run by the command that started it. Raises ValueError."""
    missing = {"architecture", "padded_vocab_size", "command", "world_size"} - run.settings.keys()
    if missing:
        raise ValueError(f"{run.name} does not say its {', '.join(sorted(missing))}: an older version wrote it")
    ranks = int(run.settings["world_size"])
    if ranks != cluster.world_size:
        raise ValueError(f"--cluster has {cluster.nodes} x {cluster.gpus_per_node} GPUs, but {run.name} had {ranks}")
    architecture, vocabulary = find_architecture(run.settings["architecture"]), int(run.settings["padded_vocab_size"])
    flags = shlex.split(run.settings["command"])[1:]
    if run.settings.get("zeropp") in RECIPES:
        flags += ["--zeropp", run.settings["zeropp"]]  # what auto chose
    per_node = cluster.gpus_per_node
    settings = parse_settings(architecture, flags, ranks, lambda _: None, ranks_per_node=per_node)
    return predict(cluster, estimate_on(cluster, architecture, settings, vocabulary))
