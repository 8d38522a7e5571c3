"""The planner's predictions beside what was published of ZeRO++ on V100s. ``planner.py zeropp`` prints them.

The tutorial's log states shape, batch and times, not the links: 100 Gbit/s are assumed. The blog's figures of 384 V100s
state the size, tokens per GPU and links: the shape is the tutorial's here, with one sequence of 512 tokens after the
other. TFLOP/s are by Megatron's formula with recomputation, as the tutorial counts them.
"""

import dataclasses

from common import markdown_table

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.planning.cluster import default_cluster
from megatron_zpp.planning.predict import estimate_on, predict
from megatron_zpp.planning.step import StepTime

LAYERS, HIDDEN, LENGTH, VOCABULARY = 40, 6144, 512, 50257
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --seq-length {LENGTH} --num-attention-heads 32 --fp16 "
    "--checkpoint-activations --tensor-model-parallel-size 1 --train-iters 40 --mock-data --vocab-size 50257 --lr 1e-4"
)
HPZ = "--zero-hpz-partition-size 16"
WIRES = {
    "ZeRO-3": "",
    "qwZ": "--zero-quantized-weights --zeropp-ranks-per-node 16",
    "hpZ": HPZ,
    "qgZ": "--zero-quantized-gradients --zeropp-ranks-per-node 16",
    "ZeRO++": f"--zero-quantized-weights --zero-quantized-gradients {HPZ}",
}
# nodes of 16, Gbit/s of a node, tokens per GPU: published seconds (tutorial) or TFLOP/s (blog), ZeRO-3 and ZeRO++
TUTORIAL = (4, 100, 512, (9.9559, 3.6806))
BLOG = [(24, 100, 1024, (14, 31)), (24, 100, 2048, (26, 46)), (24, 400, 1024, (25, 35)), (24, 400, 2048, (40, 53))]
SCALING_NODES, SCALING_RATES = (4, 8, 16, 24), (100, 200, 400, 800)  # with 1024 tokens per GPU: weak scaling
FASTER = 0.45  # share of the peak; the blog's 53 TFLOP/s are 0.42 of it, with all else


def step(nodes: int, gbits: float, tokens_per_gpu: int, wire: str, **of_gpu: float) -> StepTime:
    """Predict a step; ``of_gpu`` replaces what is assumed of a V100."""
    cluster = dataclasses.replace(default_cluster(nodes, 16, "V100", gbits), **of_gpu)  # type: ignore[arg-type]
    micro_batch = tokens_per_gpu // LENGTH
    batch = f"--micro-batch-size {micro_batch} --global-batch-size {micro_batch * cluster.world_size}"
    flags = f"{MODEL} {batch} {WIRES[wire]}".split()
    settings = parse_settings(GPT, flags, cluster.world_size, note=lambda _: None)
    return predict(cluster, estimate_on(cluster, GPT, settings, VOCABULARY)).time


def overlapped_and_not(nodes: int, gbits: float, tokens_per_gpu: int, wire: str) -> str:
    """TFLOP/s at FASTER: with collectives beside computation, and with one after the other."""
    found = step(nodes, gbits, tokens_per_gpu, wire, efficiency=FASTER)
    # What a GPU that computes in no time waits for.
    waits = step(nodes, gbits, tokens_per_gpu, wire, efficiency=1.0, peak_tflops=1e7)
    in_turn = found.compute + found.compression + found.optimizer + waits.exposed_within + waits.exposed_between
    return f"{tflops(tokens_per_gpu, found.seconds):.1f}, {tflops(tokens_per_gpu, in_turn):.1f}"


def tflops(tokens_per_gpu: int, seconds: float) -> float:
    """Return TFLOP/s of a GPU."""
    rest = 1 + LENGTH / (6 * HIDDEN) + VOCABULARY / (16 * LAYERS * HIDDEN)
    return 96 * tokens_per_gpu * LAYERS * HIDDEN**2 * rest / seconds / 1e12


def tables() -> str:
    published = [f"{1e3 * seconds:,.0f}" for seconds in TUTORIAL[3]]
    predicted = [f"{1e3 * step(*TUTORIAL[:3], wire).seconds:,.0f}" for wire in ("ZeRO-3", "ZeRO++")]
    said = ["The tutorial's step takes {} and {} ms; predicted are {} and {} ms.".format(*published, *predicted)]
    lines = []
    for nodes, gbits, tokens, rates in BLOG:
        times = {wire: step(nodes, gbits, tokens, wire).seconds for wire in WIRES}
        alone = [f"{times['ZeRO-3'] / times[wire]:.2f}" for wire in ("qwZ", "hpZ", "qgZ")]
        cells: list[object] = [gbits, tokens]
        for wire, rate in zip(("ZeRO-3", "ZeRO++"), rates, strict=True):
            cells += [rate, f"{tflops(tokens, times[wire]):.1f}", overlapped_and_not(nodes, gbits, tokens, wire)]
        lines.append([*cells, *alone])
    at = f"at {FASTER}, beside and after computing"
    headings = ["Gbit/s", "tokens", "ZeRO-3, published", "predicted", at, "ZeRO++, published", "predicted", at]
    said.append(markdown_table([*headings, "qwZ alone", "hpZ", "qgZ"], lines))
    lines = []
    for nodes in SCALING_NODES:
        cells = [16 * nodes]
        for gbits in SCALING_RATES:
            pair = [tflops(1024, step(nodes, gbits, 1024, wire).seconds) for wire in ("ZeRO-3", "ZeRO++")]
            cells.append(f"{pair[0]:.1f}, {pair[1]:.1f} ({pair[1] / pair[0]:.2f} x)")
        lines.append(cells)
    said.append("Weak scaling at 1,024 tokens per GPU, predicted: ZeRO-3, ZeRO++ (ratio).")
    return "\n\n".join([*said, markdown_table(["V100", *(f"{gbits} Gbit/s" for gbits in SCALING_RATES)], lines)])
