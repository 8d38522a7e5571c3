"""Seconds of arithmetic and kernels, against counts of a model that was written down by hand."""

import dataclasses

import pytest

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.planning.cluster import LIKE, Cluster, like_program, parse_cluster
from megatron_zpp.planning.needs.division import RankGrid
from megatron_zpp.planning.needs.traffic import expert_rows
from megatron_zpp.planning.predict import Arithmetic, arithmetic, estimate_on, step_shapes
from megatron_zpp.planning.search import RECOMPUTE_ALL
from megatron_zpp.planning.step import StepShape

H, S, B, V, LAYERS = 64, 128, 2, 512, 3
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {H} --num-attention-heads 4 --seq-length {S} --micro-batch-size {B} "
    "--train-iters 1 --lr 1 --mock-data --vocab-size 100 --bf16 --disable-bias-linear --hidden-dropout 0"
)


def find(more: str, spec: Cluster) -> tuple[StepShape, tuple[Arithmetic, Arithmetic], Transformer]:
    """Return the shape of the step, the times of both passes, and the model."""
    settings = parse_settings(GPT, f"{FLAGS} {more}".split(), spec.world_size, note=lambda _: None)
    needs = estimate_on(spec, GPT, settings, V)
    (shape,) = step_shapes(needs, spec)
    model = needs.planned.whole
    return shape, arithmetic(GPT, settings, spec, model), model


def cluster(**more: float) -> Cluster:
    """Return a GPU of 1 TFLOP/s; by default its memory is so fast that it takes no time."""
    rates = dict(peak_tflops=1.0, efficiency=0.5, attention_efficiency=0.25, kernel_gbytes=1e12) | more
    return dataclasses.replace(parse_cluster("2x2xA100@10"), **rates)


def test_products_and_attention():
    spec = cluster()
    _, (forward, backward), _ = find("", spec)
    tokens = B * S
    products = 2 * tokens * (4 * H * H + 8 * H * H) / 0.5e12  # attention's four matrices, the MLP's two
    attended = 2 * 2 * tokens * H * S / 2 / 0.25e12  # scores and values, each half masked
    assert forward.layer == pytest.approx(products + attended)
    assert backward.layer == pytest.approx(2 * products + 2.5 * attended)
    assert forward.head == pytest.approx(2 * tokens * H * V / 0.5e12)
    assert backward.head == pytest.approx(2 * forward.head)


def test_other_programs_take_a_share_of_the_rate_and_time_of_the_host():
    spec = cluster()
    _, (ours, _), _ = find("", spec)
    _, (slower, _), _ = find("", like_program(spec, "torchtitan"))
    assert slower.head == pytest.approx(ours.head / LIKE["torchtitan"][0])
    _, layer, expert = LIKE["huggingface"]
    for flags, experts in (("", 0), ("--num-experts 4", 4), ("--num-experts 4 --expert-model-parallel-size 2", 2)):
        shape = find(flags, like_program(cluster(peak_tflops=1e6), "huggingface"))[1]
        assert sum(each.layer for each in shape) == pytest.approx(1e-6 * (layer + experts * expert), rel=1e-3)


def test_overhead_of_the_program():
    spec = cluster()
    plain_shape, plain, _ = find("", spec)
    host = dict(layer_microseconds=9e6, step_microseconds=5e6)
    # A CPU computes when the program is done with a layer; a GPU meanwhile, and that is nothing beside 9 seconds.
    for overlaps, computes in ((False, 1), (True, 0)):
        shape, passes, _ = find("", cluster(**host, overlaps=overlaps))
        expected = [seconds + computes * each.layer for seconds, each in zip((3, 6), plain, strict=True)]
        assert [each.layer for each in passes] == pytest.approx(expected)
        assert [each.head for each in passes] == [each.head for each in plain]
        assert shape.optimizer == pytest.approx(5 * LAYERS + computes * plain_shape.optimizer)


def test_recomputation():
    spec = cluster(kernel_gbytes=1.0)
    kinds = ("", "--recompute-activations", RECOMPUTE_ALL)
    nothing, selective, everything = (find(more, spec)[1] for more in kinds)
    assert nothing[0] == selective[0] == everything[0]
    assert everything[1].layer == pytest.approx(nothing[1].layer + nothing[0].layer)
    assert nothing[1].layer < selective[1].layer < everything[1].layer


def test_all_arithmetic_of_the_model_is_in_the_step():
    spec = cluster(kernel_gbytes=1.0)
    for more in ("", "--untie-embeddings-and-output-weights", "--num-experts 4 --expert-model-parallel-size 2"):
        shape, (forward, backward), model = find(more, spec)
        assert sum(unit.forward for unit in shape.units) == pytest.approx(LAYERS * forward.layer)
        assert sum(unit.backward for unit in shape.units) == pytest.approx(LAYERS * backward.layer)
        # The root is gathered first; its ends stand around the layers, and stay gathered as it does.
        stays = [unit.stays_gathered for unit in shape.units]
        ends = len(model.end_units())
        inner = stays[1 + (ends + 1) // 2 : len(stays) - ends // 2]
        assert stays[0] and not any(inner) and stays.count(True) == 1 + ends


@pytest.mark.parametrize(
    ("more", "transfers", "again"),
    [
        ("", 2, 0),
        ("--recompute-activations", 2, 2),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 2, 2 / 3),
        ("--moe-layer-freq 3", 2, 0),
    ],
)
def test_a_layer_waits_for_tokens_that_are_sent_to_experts(more, transfers, again):
    spec = cluster(within_gbytes=1e-6, between_gbits=8e-6, kernel_gbytes=1e12)  # 1000 bytes a second
    shape = find(f"--num-experts 4 --expert-model-parallel-size 4 {more}", spec)[0]
    # Of the rows [S * B tokens, each to 2 experts] a quarter goes to each of 4 ranks, half of all to the other node.
    leaving = 2 * (S * B * 2 * H * 2) / 2  # bytes out of a node, of its two ranks in 16 bit
    waits = [unit for unit in shape.units if unit.in_forward]
    assert len(waits) == (LAYERS if "freq" not in more else 1)
    for unit in waits:
        assert len(unit.in_forward) == transfers and {each.link for each in unit.in_forward} == {"between nodes"}
        assert sum(each.seconds for each in unit.in_forward) == pytest.approx(2 * leaving / 1000, rel=1e-4)
        in_backward = sum(each.seconds for each in unit.in_backward)
        assert in_backward == pytest.approx((2 + again) * leaving / 1000, rel=1e-4)


@pytest.mark.parametrize(("more", "gathers"), [("", 0), ("--recompute-activations", 1), (RECOMPUTE_ALL, 1)])
def test_a_layer_waits_for_keys_and_values_that_are_gathered(more, gathers):
    spec = cluster(within_gbytes=1e-6, between_gbits=8e-6, kernel_gbytes=1e12)  # 1000 bytes a second
    shape = find(f"--context-parallel-size 4 {more}", spec)[0]
    (unit, *_) = [unit for unit in shape.units if unit.in_forward]
    (gather,) = unit.in_forward
    assert gather.seconds > B * S * H * 2 / 1000  # at least the keys of other ranks
    assert sum(each.seconds for each in unit.in_backward) == pytest.approx((1 + gathers) * gather.seconds)


def test_transfers_of_experts():
    """Few bits of tokens are quantized before each way and after it; tensor-parallel ranks gather results."""
    shape = find("--num-experts 4 --expert-model-parallel-size 4 --moe-token-bits 8", cluster(kernel_gbytes=1e-6))[0]
    (there, back) = next(unit.in_forward for unit in shape.units if unit.in_forward)
    assert there == back and there.encode == there.decode
    assert there.encode * 1000 == pytest.approx(S * B * 2 * (2 * H + H + 4), rel=0.1)  # int8, and a scale in fp32
    spec = cluster(within_gbytes=1e-9, within_microseconds=0)  # a byte a second
    shape = find("--num-experts 4 --tensor-model-parallel-size 2", spec)[0]
    (summed, made) = next(unit.in_forward for unit in shape.units if unit.in_forward)
    assert summed.seconds == pytest.approx(2 * S * B * H)  # attention's all-reduce of 2 passes over half the bytes
    assert made.seconds == pytest.approx(S * B * 2 * H)  # half of 2 rows a token, in 16 bit


def test_quantizing_touches_its_bytes_and_nothing_else_does():
    spec = cluster(kernel_gbytes=1.0)
    low_bits = "--zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size 2"
    plain, quantized = (find(more, spec)[0] for more in ("--zeropp-ranks-per-node 2", low_bits))
    unit = plain.units[1]
    assert (unit.gather.encode, unit.gather.decode, unit.reduce.encode) == (0, 0, 0) and unit.gradients_between is None
    unit = quantized.units[1]
    numel = 12 * H * H / 4  # of the matrices, in a rank's shard; norms are little more
    sent = 2 * numel + numel * (1 + 4 / 256)  # read in 16 bit; int8 and its scales are written
    assert unit.weights_between.encode * 1e9 == pytest.approx(sent, rel=0.05)
    assert unit.weights_between.decode == pytest.approx(2 * unit.weights_between.encode)  # of both nodes
    gradients = 2 * 4 * numel + 4 * numel * (1 + 4 / 128)  # of all four ranks, in 16 bit and as int8
    assert unit.reduce.encode * 1e9 == pytest.approx(gradients, rel=0.05)


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
