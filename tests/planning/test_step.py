"""Seconds of a step, against counts of a model that was written down by hand."""

import dataclasses

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.planning.cluster import Cluster, parse_cluster
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.estimate import Estimate
from megatron_zpp.planning.needs.traffic import Exchange, expert_rows, layer_exchanges
from megatron_zpp.planning.predict import estimate_on
from megatron_zpp.planning.search import RECOMPUTE_ALL
from megatron_zpp.planning.step import Arithmetic, StepTime, arithmetic, step_times

H, S, B, V, LAYERS = 64, 128, 2, 512, 3
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {H} --num-attention-heads 4 --seq-length {S} --micro-batch-size {B} "
    "--train-iters 1 --lr 1 --mock-data --vocab-size 100 --bf16 --disable-bias-linear --hidden-dropout 0"
)
LOW_BITS = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2"


def cluster(word: str = "2x2xA100@10", **more: object) -> Cluster:
    """Return GPUs of 1 TFLOP/s, whose program and memory take no time by default."""
    rates = dict(peak_tflops=1.0, efficiency=0.5, attention_efficiency=0.25, kernel_gbytes=1e12)
    rates |= dict(layer_microseconds=0.0, expert_microseconds=0.0)
    return dataclasses.replace(parse_cluster(word), **(rates | more))


def needs_of(more: str, spec: Cluster) -> Estimate:
    settings = parse_settings(GPT, f"{FLAGS} {more}".split(), spec.world_size, note=lambda _: None)
    return estimate_on(spec, GPT, settings, V)


def passes(more: str, spec: Cluster) -> tuple[Arithmetic, Arithmetic]:
    needs = needs_of(more, spec)
    return arithmetic(GPT, needs.settings, spec, needs.planned.whole)


def of_layer(needs: Estimate, has_experts: bool) -> list[tuple[Exchange, float]]:
    model = needs.planned.whole
    found = layer_exchanges(needs.architecture, needs.settings, needs.grid, model, LAYERS, has_experts)
    return [(exchange, runs) for _, exchange, runs in found]


def step(more: str, spec: Cluster) -> StepTime:
    (time,) = step_times(needs_of(more, spec), spec)
    return time


def test_seconds_of_products_and_attention_are_those_of_the_operations():
    forward, backward = passes("", cluster())
    tokens = B * S
    products = 2 * tokens * (4 * H * H + 8 * H * H) / 0.5e12  # attention's four matrices, the MLP's two
    attended = 2 * 2 * tokens * H * S / 2 / 0.25e12  # scores and values, each half masked
    assert forward.layer == pytest.approx(products + attended)
    assert backward.layer == pytest.approx(2 * products + 2.5 * attended)
    assert forward.head == pytest.approx(2 * tokens * H * V / 0.5e12)
    assert backward.head == pytest.approx(2 * forward.head)
    both = LAYERS * (forward.layer + backward.layer) + forward.head + backward.head
    assert step(f"--global-batch-size {3 * 4 * B}", cluster()).compute == pytest.approx(3 * both)


def test_the_program_itself_takes_time_for_each_layer_expert_and_step():
    host = dict(layer_microseconds=9e6, expert_microseconds=2e6, step_microseconds=5e6)
    for flags, experts in (("", 0), ("--num-experts 4", 4), ("--num-experts 4 --expert-model-parallel-size 2", 2)):
        plain, with_host = passes(flags, cluster()), passes(flags, cluster(**host))
        more = [slow.layer - fast.layer for slow, fast in zip(with_host, plain, strict=True)]
        assert more == pytest.approx([(9 + 2 * experts) / 3, (9 + 2 * experts) / 3 * 2])
        assert [each.head for each in with_host] == [each.head for each in plain]
    assert step("", cluster(**host)).optimizer - step("", cluster()).optimizer == pytest.approx(5 * LAYERS)


def test_recomputing_lengthens_the_backward_pass_by_what_is_computed_again():
    kinds = ("", "--recompute-activations", RECOMPUTE_ALL)
    nothing, selective, everything = (passes(more, cluster(kernel_gbytes=1.0)) for more in kinds)
    assert nothing[0] == selective[0] == everything[0]
    assert everything[1].layer == pytest.approx(nothing[1].layer + nothing[0].layer)
    assert nothing[1].layer < selective[1].layer < everything[1].layer


LINKS = dict(within_gbytes=1e-6, between_gbits=8e-6, within_microseconds=0.0, between_microseconds=0.0)  # 1 kB/s


@pytest.mark.parametrize(
    ("more", "gathers", "reductions"),
    [
        ("", 2, 1),
        ("--global-batch-size 24", 6, 3),
        ("--global-batch-size 24 --zero-stage 2", 1, 3),
        ("--global-batch-size 24 --zero-stage 1", 1, 1),
    ],
)
def test_a_step_waits_for_every_collective_of_its_stage(more, gathers, reductions):
    flags = f"--grad-reduce-in-bf16 --untie-embeddings-and-output-weights {more}"
    found = step(flags, cluster(**LINKS))
    layers = LAYERS * 12 * H * H * 2  # bytes in 16 bit, without norms
    ends = (2 * V + S) * H * 2
    micro_batches = max(1, gathers // 2)  # the ends stay gathered between the passes
    sent = (gathers + reductions) * layers + ((micro_batches if "stage" not in more else 1) + reductions) * ends
    assert found.exposed_between == pytest.approx(3 / 4 * sent / 1000, rel=0.02)
    assert found.exposed_within == 0


def test_weights_and_gradients_cross_nodes_behind_a_pass():
    """Only the first unit's weights and the last one's gradients are waited for, until links are slower than passes."""
    low_bits = f"{LOW_BITS} --global-batch-size 24"
    slow, fast = cluster(**LINKS), cluster(**LINKS | dict(between_gbits=1e3))
    for spec in (slow, fast):
        sent = needs_of(low_bits, spec).ranks[0].collectives
        between = [each for each in sent if each.exchange.group.nodes > 1]
        weights = sum(spec.exchange_seconds(each.exchange) for each in between if each.what == "weights")
        gradients = sum(spec.exchange_seconds(each.exchange) for each in between if each.what == "gradients")
        computing = [LAYERS * each.layer + each.head for each in passes(low_bits, spec)]
        exposed = step(low_bits, spec).exposed_between
        if spec is slow:
            assert exposed == pytest.approx(weights + gradients - sum(computing))
        else:
            assert exposed == pytest.approx((weights + gradients) / (LAYERS + 1), rel=1e-6)  # units: the root, too
        of_deepspeed = dataclasses.replace(spec, overlaps=False)
        assert step(low_bits, of_deepspeed).exposed_between == pytest.approx(weights + gradients)


def test_replicas_add_up_once_per_step():
    once, often = (
        step(f"--num-distributed-optimizer-instances 2 --global-batch-size {batch}", cluster(**LINKS))
        for batch in (8, 32)
    )
    assert once.exposed_between == often.exposed_between > 0 and often.exposed_within > 3 * once.exposed_within


def test_muon_waits_for_matrices():
    """A rank sends its rows to the other node in 4 bits, then to its node's owners, and updated rows come back."""
    rows = LAYERS * 12 * H * H / 4  # elements of a rank's shards
    flags = "--optimizer muon --muon-momentum-bits 4 --zeropp-ranks-per-node 2"
    muon, adam = (step(more, cluster(**LINKS)) for more in (flags, "--zeropp-ranks-per-node 2"))
    between = muon.exposed_between - adam.exposed_between
    assert between == pytest.approx(2 * rows * (1 / 2 + 4 / 128) / 1000, rel=0.02)  # both ranks share the link
    assert muon.exposed_within - adam.exposed_within == pytest.approx(3 / 2 * 2 * rows / 1000)  # half, in 16 bit


def test_a_pipeline_idles_for_some_micro_batches():
    flags = f"--pipeline-model-parallel-size 2 --global-batch-size 16 --num-layers 4 {FLAGS.split('--hidden-size')[0]}"
    first, last = step_times(needs_of(f"{flags} --num-layers 4", cluster()), cluster())
    for time in (first, last):  # 1 of 4 micro-batches: stages - 1
        assert time.bubble == pytest.approx((time.seconds - time.optimizer - time.bubble) / 4)
    assert last.compute > first.compute  # the output layer
    hidden = 2 * 4 * 2 * B * S * H * 2  # twice for each of 4 micro-batches, from both ranks of a node in 16 bit
    slow = cluster(**LINKS)
    first, _ = step_times(needs_of(f"{flags} --num-layers 4", slow), slow)
    assert first.exposed_between == pytest.approx(hidden / 1000)


@pytest.mark.parametrize(
    ("more", "again"),
    [
        ("", 0),
        ("--recompute-activations", 2),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 2 / 3),
        ("--moe-layer-freq 3", 0),
    ],
)
def test_a_layer_waits_for_tokens_that_are_sent_to_experts(more, again):
    spec = cluster(**LINKS)
    needs = needs_of(f"--num-experts 4 --expert-model-parallel-size 4 {more}", spec)
    # A quarter of the rows [S * B tokens, each to 2 experts] goes to each of 4 ranks, half of all to the other node.
    leaving = 2 * (S * B * 2 * H * 2) / 2  # bytes out of a node, of its two ranks in 16 bit
    ((exchange, runs),) = of_layer(needs, has_experts=True)
    assert spec.exchange_seconds(exchange) == pytest.approx(leaving / 1000, rel=1e-4)
    assert runs == pytest.approx(4 + again)  # there and back, in both passes
    plain = needs_of(f"--num-experts 4 {more}", spec)
    layers = 1 if "freq" in more else LAYERS
    more_seconds = step_times(needs, spec)[0].exposed_between - step_times(plain, spec)[0].exposed_between
    assert more_seconds < layers * runs * leaving / 1000 and not of_layer(needs, has_experts=False)


@pytest.mark.parametrize(("more", "gathers"), [("", 2), ("--recompute-activations", 3), (RECOMPUTE_ALL, 3)])
def test_a_layer_waits_for_keys_and_values_that_are_gathered(more, gathers):
    spec = cluster(**LINKS)
    needs = needs_of(f"--context-parallel-size 4 {more}", spec)
    ((exchange, runs),) = of_layer(needs, has_experts=False)
    assert spec.exchange_seconds(exchange) > B * S * H * 2 / 1000  # at least the keys of other ranks
    assert runs == gathers
    alone = step_times(needs_of(f"--micro-batch-size 2 {more}", spec), spec)[0].exposed_between
    assert step_times(needs, spec)[0].exposed_between > alone


def test_exchanges_of_experts():
    """Few bits of tokens are quantized before each way and after it; tensor-parallel ranks gather results."""
    needs = needs_of("--num-experts 4 --expert-model-parallel-size 4 --moe-token-bits 8", cluster())
    ((exchange, _),) = of_layer(needs, has_experts=True)
    assert exchange.encoded == exchange.decoded
    assert exchange.encoded == pytest.approx(S * B * 2 * (2 * H + H + 4), rel=0.1)  # int8, and a scale in fp32
    spec = cluster(**LINKS | dict(within_gbytes=1e-9))  # a byte a second
    needs = needs_of("--num-experts 4 --tensor-model-parallel-size 2", spec)
    (summed, twice), (made, often) = of_layer(needs, has_experts=True)
    assert (twice, often) == (2, 2)
    # Attention's all-reduce of 2 passes over half the bytes; half of 2 rows a token, in 16 bit.
    assert spec.exchange_seconds(summed) == pytest.approx(2 * S * B * H)
    assert spec.exchange_seconds(made) == pytest.approx(S * B * 2 * H)
    assert step_times(needs, spec)[0].exposed_within == pytest.approx(LAYERS * 2 * 4 * S * B * H)


def test_quantizing_touches_its_bytes_and_nothing_else_does():
    spec = cluster(kernel_gbytes=1.0)
    assert step("--zeropp-ranks-per-node 2", spec).compression == 0 < step(LOW_BITS, spec).compression
    sent = needs_of(LOW_BITS, spec).ranks[0].collectives
    weights_between, _, reduce, *_ = (each.exchange for each in sent)  # and a gather, of the first unit
    numel = 12 * H * H / 4  # matrix elements in a rank's shard; norms are little more
    sent = 2 * numel + numel * (1 + 4 / 256)  # read in 16 bit; int8 and its scales are written
    assert weights_between.encoded == pytest.approx(sent, rel=0.05)
    assert weights_between.decoded == pytest.approx(2 * weights_between.encoded)  # both nodes' shards
    gradients = 2 * 4 * numel + 4 * numel * (1 + 4 / 128)  # from all four ranks, in 16 bit and as int8
    assert reduce.encoded == pytest.approx(gradients, rel=0.05)


def test_rows_of_experts_within_a_node_are_padded_to_their_capacity():
    run = "--preset qwen3-30b-a3b --vocab-size 9 --seq-length 64 --micro-batch-size 2 --train-iters 1 --lr 1"

    def rows(nodes: int, ranks_per_node: int, capacity: str = "") -> float:
        settings = parse_settings(
            LLAMA, f"{run} --mock-data --expert-model-parallel-size 8 {capacity}".split(), 16, note=str
        )
        return expert_rows(settings, RankGrid(nodes, ranks_per_node, settings.distributed)) / (2 * 64 * 8)

    factor = "--moe-expert-capacity-factor"
    assert [rows(2, 8), rows(4, 4)] == [1, 1]
    assert [rows(2, 8, f"{factor} 1.25"), rows(2, 8, f"{factor} 0.5"), rows(2, 8, f"{factor} 4")] == [1.25, 0.5, 1]
    assert [rows(4, 4, f"{factor} 1.25"), rows(4, 4, f"{factor} 0.5")] == [1, 0.5]  # between nodes nothing is padded
