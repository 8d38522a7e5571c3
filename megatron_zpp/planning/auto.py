"""``--zeropp auto``: measure the cluster that a run has, predict a step with each recipe, and choose one."""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.arguments.no_effect import lost_under_muon
from megatron_zpp.arguments.recipe import choice_of
from megatron_zpp.families import Architecture
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.planning.measure import HEAD_DIM, LEAST_TOKENS, Options, measure_cluster, measure_links
from megatron_zpp.planning.predict import estimate_on, predict
from megatron_zpp.planning.search import USABLE, WIRES
from megatron_zpp.planning.step import StepTime
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.zeropp import build_topology
from megatron_zpp.zeropp.fsdp.topology import Topology
from megatron_zpp.zeropp.recipes import LOSS_BUDGET, RECIPES

# The planner's median error against the cluster in a box (docs/evidence/planner.md): recipes nearer than that are
# equally fast, however well the links were measured.
PREDICTION_ERROR = 0.044
MOST_TOKENS = {"cpu": 512, "cuda": 8192}  # per timed micro-batch; more tokens are computed at the same rate
MOST_SECONDS = 0.1  # per timed collective: at 100 Mbit/s a MB or two, more than a link takes in one burst

# Tried with each recipe: a node's copies at every ZeRO stage, the least memory first. Then copies on each card, which
# must be faster to be chosen, and what is in host memory, which alone may fit.
_WAYS = ((3, "node"), (2, "node"), (1, "node"), (3, "card"), (3, "node", "copies"), (3, "node", "all"))
WAYS = [
    f"--zero-stage={stage} --zeropp-weight-copies={place} --zeropp-offload={''.join(offload) or 'none'}"
    for stage, place, *offload in _WAYS
]

# Settings of the run with a recipe and a way, on nodes of that many ranks.
Parse = Callable[[str, int], ResolvedSettings]
Choice = tuple[str, int, str]  # a recipe and a way, the ranks of a node, and in a paragraph why


def choose_recipe(architecture: Architecture, parse: Parse, vocabulary: int, device: torch.device) -> Choice:
    """Measure, predict and choose. Collective; the same on all ranks. Raises ValueError for what is not predicted."""
    start = time.monotonic()
    settings = parse("zero3", 1)
    topology = find_nodes(settings)
    if topology.num_nodes == 1:
        return "zero3", topology.ranks_per_node, "--zeropp auto: zero3, since all ranks are on one node"
    training, width = settings.training, settings.model.hidden_size // HEAD_DIM * HEAD_DIM
    tokens = min(training.micro_batch_size * training.seq_length, MOST_TOKENS[device.type])
    options = Options(device, max(width, HEAD_DIM), max(tokens, LEAST_TOKENS), is_brief=True)
    options = replace(options, seconds=0.05, least_repeats=2, most_seconds=MOST_SECONDS)
    cluster = measure_cluster(topology.ranks_per_node, options)
    again = replace(cluster, **measure_links(topology, options))
    chosen: list[Any] = [None]
    with errors_on_all_ranks():
        if dist.get_rank() == 0:
            try:
                times, refused = predict_recipes((cluster, again), architecture, parse, vocabulary)
            except ValueError as error:
                names = ", ".join(RECIPES)
                raise ValueError(f"--zeropp auto cannot predict this run ({error}): name one of {names}") from error
            name = choose(times, LOSS_BUDGET)
            why = explain(cluster, times, refused, name, LOSS_BUDGET, time.monotonic() - start)
            chosen = [(name, topology.ranks_per_node, why)]
    dist.broadcast_object_list(chosen)
    choice: Choice = chosen[0]
    return choice


def find_nodes(settings: ResolvedSettings) -> Topology:
    """Find the nodes of all ranks, as they run if no flag says it. Collective."""
    stated, world = settings.zeropp.ranks_per_node, dist.group.WORLD
    assert world is not None
    return build_topology(world, stated and stated * settings.distributed.tensor_model_parallel_size)


Times = Mapping[str, tuple[StepTime, StepTime]]  # {recipe and way: its times by two measurements of the links}


def predict_recipes(
    clusters: tuple[Cluster, Cluster], architecture: Architecture, parse: Parse, vocabulary: int
) -> tuple[Times, dict[str, str]]:
    """Predict a step with each recipe and way on both clusters; also return why others were refused."""
    times, refused = {}, {}
    for recipe, way in itertools.product(RECIPES, WAYS):
        is_plain = (recipe, way) == ("zero3", WAYS[0])
        try:
            settings = parse(f"{recipe} {way}", clusters[0].gpus_per_node)
            needs = estimate_on(clusters[0], architecture, settings, vocabulary)
        except ValueError as error:
            if is_plain:
                raise
            if way == WAYS[0]:  # zero3 has no copies
                refused[f"{recipe} {way}"] = str(error).splitlines()[0]
            continue
        name = choice_of(settings.as_flat_dict())  # a command's own flags win, so two ways may be one
        if name in times or name in refused:
            continue
        if (loses := lost_under_muon(settings)) is not None:
            refused[name] = loses
            continue
        nbytes = needs.memory + (sum(needs.largest.host.values()) if clusters[0].gpu == "CPU" else 0)  # one memory
        in_host, host_gb = clusters[0].gpus_per_node * sum(needs.largest.host.values()), clusters[0].host_gb
        if not is_plain and nbytes > USABLE * clusters[0].memory_gb * 1e9:
            refused[name] = f"needs {nbytes / 1e9:.3g} GB of {clusters[0].memory_gb:.3g}"
            continue
        if host_gb and in_host > USABLE * host_gb * 1e9:
            refused[name] = f"needs {in_host / 1e9:.3g} GB of the {host_gb:.3g} of a node's host"
            continue
        first, second = (predict(cluster, needs).time for cluster in clusters)
        times[name] = first, second
    return times, refused


def choose(times: Times, loss_budget: float) -> str:
    """Return what rounds least, then comes first in ``WAYS``, then is fastest, of what cannot be told from the fastest.

    loss_budget: percent. A recipe is slower if it is so by all measurements, and by more than ``PREDICTION_ERROR``.
    """
    allowed = {name: both for name, both in times.items() if RECIPES[name.split()[0]].risk <= loss_budget}
    fastest = min(allowed.values(), key=_seconds)
    limit = (1 + PREDICTION_ERROR) * max(time.seconds for time in fastest)
    near = [name for name, both in allowed.items() if min(time.seconds for time in both) <= limit]
    ways = list(dict.fromkeys(name.partition(" ")[2] for name in times))
    rounds = {wire.recipe.name: wire.rank for wire in WIRES}

    def preference(name: str) -> tuple[int, int, float]:
        recipe, _, way = name.partition(" ")
        return rounds[recipe], ways.index(way), _seconds(times[name])

    return min(near, key=preference)


def _seconds(both: tuple[StepTime, StepTime]) -> float:
    return sum(time.seconds for time in both) / 2


def explain(cluster: Cluster, times: Times, refused: Mapping[str, str], name: str, budget: float, took: float) -> str:
    """Say in one paragraph what was measured and chosen, and what the next two would cost."""
    time, others = times[name][0], sorted((other for other in times if other != name), key=lambda n: _seconds(times[n]))
    next_two = " and ".join(f"{_seconds(times[other]):.3g} s with {other}" for other in others[:2])
    over = {name: RECIPES[name].risk for name in (key.split()[0] for key in times) if RECIPES[name].risk > budget}
    left_out = [f"{other} may cost {risk:.2g} % of loss, more than {budget:g} %" for other, risk in over.items()]
    left_out += [f"{other}: {why}" for other, why in refused.items()]
    return (
        f"--zeropp auto: {name} ({RECIPES[name.split()[0]].summary}). Measured in {took:.0f} s: {cluster.nodes} nodes "
        f"of {cluster.gpus_per_node} ranks, {cluster.between_gbits:.3g} Gbit/s out of a node and "
        f"{cluster.within_gbytes:.3g} GB/s a rank within it. Predicted: {_seconds(times[name]):.3g} s a step, of which "
        f"{time.compute:.3g} s compute and {time.exposed_between:.3g} s wait for links between nodes; {next_two}. It "
        "rounds least of those that neither two measurements of the links nor the planner's error of "
        f"{PREDICTION_ERROR:.1%} tell from the fastest; zero3 and lossless round nothing."
        + (f" Left out: {'; '.join(left_out)}." if left_out else "")
        + " Checkpoints keep the choice."
    )
