"""The seconds of one optimizer step: the sum of what a rank computes, sends and waits for.

Published runs are explained best if collectives hide behind no arithmetic (docs/evidence/planner.md). In this program
ZeRO++'s between nodes do: hpZ's behind a forward pass, qgZ's behind a backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zpp.families import Architecture
from megatron_zpp.models.activation_checkpoint import recomputed_modules
from megatron_zpp.models.moe import active_parameters
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.optim.optimizer import OPTIMIZERS
from megatron_zpp.parallel.stages import idle_micro_batches
from megatron_zpp.planning.cluster import Cluster
from megatron_zpp.planning.needs.division import pipeline_placement
from megatron_zpp.planning.needs.estimate import Estimate, RankEstimate
from megatron_zpp.planning.needs.traffic import FP32, Exchange, block_activations, recomputed_blocks
from megatron_zpp.settings.resolved import ResolvedSettings

LOGIT_BYTES = 16  # a pass reads and writes in 16 bit at the matrix product, in fp32 from the softmax on


@dataclass
class StepTime:
    """Seconds of a step, by the device's work or wait."""

    compute: float = 0.0  # forward and backward passes
    compression: float = 0.0  # encoding and decoding
    optimizer: float = 0.0
    exposed_within: float = 0.0  # waiting for links within the node
    exposed_between: float = 0.0
    bubble: float = 0.0  # waiting for other stages of a pipeline
    exposed_islands: float = 0.0  # waiting for other islands, a mean over an interval

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())

    def add(self, exchange: Exchange, runs: float, cluster: Cluster) -> None:
        """Add a collective that runs that often in the step, and the kernels before and after it."""
        seconds = runs * cluster.exchange_seconds(exchange)
        if exchange.group.nodes > 1:
            self.exposed_between += seconds
        else:
            self.exposed_within += seconds
        kernels = (exchange.encoded + exchange.decoded) / cluster.kernel_gbytes
        # Copies to and from the host count here, because the waits that a log measures leave them out.
        self.compression += runs * (kernels + exchange.through_host / cluster.host_gbytes) / 1e9


def step_times(needs: Estimate, cluster: Cluster) -> list[StepTime]:
    """Return the step of a rank of each pipeline stage, without what islands add."""
    settings, model = needs.settings, needs.planned.whole
    forward, backward = arithmetic(needs.architecture, settings, cluster, model)
    placement, schedule = pipeline_placement(settings.distributed, model), settings.distributed.pipeline_schedule
    idle = idle_micro_batches(schedule, placement) if schedule and placement else 0.0
    times = []
    for number, rank in enumerate(needs.ranks):
        has_head = placement is None or placement.ranks[-1] == number
        passes = [rank.num_layers * each.layer + has_head * each.head for each in (forward, backward)]
        time = StepTime(needs.micro_batches * sum(passes), optimizer=_optimizer_seconds(settings, rank, cluster))
        for each in rank.collectives:  # published runs fit best if the first and last stage wait twice, too
            runs = 2 * needs.micro_batches if each.what == "hidden states" else each.runs
            time.add(each.exchange, runs, cluster)
        for behind, computing in zip(("forward", "backward"), passes, strict=True):
            hops = [each.exchange for each in rank.collectives if each.behind == behind]
            if hops and cluster.overlaps:  # but a rank waits for the first unit's weights and the last one's gradients
                seconds = sum(map(cluster.exchange_seconds, hops))
                time.exposed_between -= min(computing, seconds - seconds / len(hops))
        time.bubble = idle / needs.micro_batches * (time.seconds - time.optimizer)
        times.append(time)
    return times


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of one forward or backward pass of a micro-batch."""

    layer: float
    head: float


def arithmetic(
    architecture: Architecture, settings: ResolvedSettings, cluster: Cluster, model: Transformer
) -> tuple[Arithmetic, Arithmetic]:
    """Return the times of the forward pass and of the backward pass, recomputation included, on one rank.

    The time of matrix products and attention follows from their FLOPs, the rest's from its bytes. The backward
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
    block, recomputed = block_activations(architecture, settings, model), 0.0
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
    forward = Arithmetic(products + attended + 2 * kept + host / 3, head_products + logits)
    layers_per_stage = num_layers // (placement.num_stages if placement is not None else 1)
    again = recomputed_blocks(activation, layers_per_stage) / layers_per_stage * forward.layer + 2 * recomputed
    again += _product_share(model, modules) * products + attended * ("core_attn" in modules)
    backward_layer = 2 * products + 2.5 * attended + 3 * kept + again + 2 * host / 3
    return forward, Arithmetic(backward_layer, 2 * head_products + logits)


def _product_share(model: Transformer, modules: Sequence[str]) -> float:
    """Return the share of the layers' weights that a token meets again when these modules are recomputed."""
    names = set(modules) - {"core_attn"} - ({"shared_experts"} if "moe" in modules else set())
    again = [found for block in model.layers for name in names for found in recomputed_modules(block, name)]
    return sum(map(active_parameters, again)) / active_parameters(model.layers)


def _optimizer_seconds(settings: ResolvedSettings, rank: RankEstimate, cluster: Cluster) -> float:
    # The norm reads gradients. Clipping and the step read and write them, parameters and the optimizer's state.
    state_tensors = OPTIMIZERS[settings.optimizer.optimizer].state_tensors
    moved = sum(
        part.numel * (1 + 2 * (2 + state_tensors(settings.optimizer, unit.is_hidden_matrix(part))))
        for unit in rank.units
        for part in unit.shards
    )
    host = 1e-6 * rank.num_layers * cluster.step_microseconds
    return FP32 * moved / (1e9 * cluster.kernel_gbytes) + host
