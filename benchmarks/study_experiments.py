"""What the study trains: experiments as lists of arms, each an arm of training with other flags for what travels.

An arm that two experiments share is trained once. 4 ranks on 2 nodes are emulated in one process; in some arms 8 ranks.
"""

from __future__ import annotations

from study_arms import (
    ABSMAX,
    BF16,
    BF16_WIRE,
    CONTROLS,
    FP32,
    GRADIENTS_WARM_UP,
    HADAMARD,
    HPZ,
    NODES,
    RANKS,
    UNBIASED,
    Arm,
    Experiment,
    Group,
    differences,
    few_bits,
    gradients,
    loco,
    moves,
    weights,
)

# The best learning rate of 0.03, 0.06, 0.1, 0.3, 1 and 3 for the fp32 wire.
SGD = "--optimizer sgd --sgd-momentum 0.9 --weight-decay 1e-4 --lr 0.1 --min-lr 0.01"

EXPERTS = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --num-experts 8 --moe-ffn-hidden-size 512 "
    "--moe-aux-loss-coeff 0.02"
)
EXPERTS_LOAD, TOKENS_SENT = "expert load (max/mean)", "tokens sent between nodes per step (MB)"
# The batch of four emulated ranks on two real ones, each of which has half of the experts.
ON_TWO_NODES = f"{EXPERTS} {BF16} --expert-model-parallel-size 2 --zero-ranks-per-node 1 --global-batch-size {{batch}}"


def tokens_on_two_nodes(name: str, flags: str) -> Arm:
    return Arm(name, f"{ON_TWO_NODES} {flags}".strip(), control=ON_TWO_NODES, real_ranks=2)


# Muon for the layers' matrices with updates as large as AdamW's, at learning rates that both take.
MUON_RATES = (2e-3, 4e-3, 8e-3)
WHOLE, BLOCKS = "--muon-period 1", "--muon-period 0"
EVERY_TENTH = "--muon-period 10 --muon-momentum-bits 4"
STALE_ROWS = f"{EVERY_TENTH} --muon-stale-rows"
STALE_IN_8_BITS = STALE_ROWS.replace("bits 4", "bits 8")


def muon(rate: float, period: str) -> str:
    return (
        f"--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2 {period} --lr {rate} --min-lr {rate / 10}"
    )


def feedback_group(title: str, wire: str, hops: str) -> Group:
    """Nothing, classic error feedback (beta 0), and LoCo, over one gradient wire."""
    arms = [Arm("nothing", f"{BF16} {wire}")]
    arms += [Arm("error feedback", f"{BF16} {wire} {loco(0.0, hops)}"), Arm("LoCo", f"{BF16} {wire} {loco(0.8, hops)}")]
    return Group(title, tuple(arms), recovers=True)


def on_twice_the_ranks(group: Group, nodes: int = NODES) -> Group:
    """The same batches on twice the ranks, each of which has half of the samples."""
    eight = f"--emulate-ranks {2 * RANKS} --emulate-nodes {nodes} --micro-batch-size {{half}}"
    hpz = f"--zero-hpz-partition-size {2 * RANKS // nodes}"
    arms = tuple(Arm(arm.name, f"{arm.flags.replace(HPZ, hpz)} {eight}") for arm in group.arms)
    return Group(f"{group.title}, {nodes} nodes of {2 * RANKS // nodes} ranks", arms, group.recovers)


TWO = f"{BF16} {gradients(8, 2, scaling=ABSMAX)}"
E4_BITS_AND_BLOCKS = (
    feedback_group("4 bits on both hops, blocks of 128", gradients(4, 4), "both"),
    feedback_group("4 bits on both hops, blocks of 4096", gradients(4, 4, 4096), "both"),
    feedback_group("8 bits within, 4 between nodes, blocks of 4096", gradients(8, 4, 4096), "inter"),
    feedback_group("2 bits on both hops, blocks of 128", gradients(2, 2, scaling=ABSMAX), "both"),
    feedback_group("8 bits within, 2 between nodes, blocks of 128", gradients(8, 2, scaling=ABSMAX), "inter"),
)


def with_sgd(group: Group) -> Group:
    """The same under SGD, against the fp32 wire under SGD."""
    arms = tuple(Arm(arm.name, f"{SGD} {arm.flags}", control=SGD) for arm in group.arms)
    return Group(f"SGD: {group.title}", arms, group.recovers)


def with_experts(group: Group) -> Group:
    """The same for a mixture of experts like Mixtral, of 5.7M parameters, of which a token meets 2.2M."""
    arms = tuple(Arm(arm.name, f"{EXPERTS} {arm.flags}".strip(), control=EXPERTS) for arm in group.arms)
    return Group(f"Experts: {group.title}", arms)


def with_muon(title: str, wire: str, rates: tuple[float, ...]) -> Group:
    """AdamW at its best learning rate, and Muon at some, over one wire."""
    ways = {
        "whole matrices": WHOLE,
        "node blocks": BLOCKS,
        "node blocks, every tenth whole in 4 bits": EVERY_TENTH,
        "stale rows, every tenth whole in 4 bits": STALE_ROWS,
        "stale rows, every tenth whole in 8 bits": STALE_IN_8_BITS,
    }
    arms = [
        Arm(f"Muon, {name}, learning rate {rate:g}", f"{wire} {muon(rate, period)}")
        for name, period in ways.items()
        for rate in rates
    ]
    return Group(title, (Arm("AdamW", wire), *arms))


E4_EIGHT_RANKS = (
    on_twice_the_ranks(feedback_group("4 bits on both hops, blocks of 4096", gradients(4, 4, 4096), "both")),
    on_twice_the_ranks(feedback_group("2 bits on both hops, blocks of 128", gradients(2, 2, scaling=ABSMAX), "both")),
)
E4_SGD = (
    Group("SGD with momentum", (Arm("fp32 wire", SGD, control=SGD),)),
    with_sgd(feedback_group("4 bits on both hops, blocks of 4096", gradients(4, 4, 4096), "both")),
    with_sgd(feedback_group("2 bits on both hops, blocks of 128", gradients(2, 2, scaling=ABSMAX), "both")),
)
E4_SENSITIVITY = Group(
    "Sensitivity of LoCo: 8 bits within, 2 between nodes, blocks of 128",
    (
        Arm("nothing", TWO),
        Arm("beta 0 (error feedback)", f"{TWO} {loco(0.0, 'inter')}"),
        Arm("beta 0.2", f"{TWO} {loco(0.2, 'inter')}"),
        Arm("beta 0.5", f"{TWO} {loco(0.5, 'inter')}"),
        Arm("beta 0.8", f"{TWO} {loco(0.8, 'inter')}"),
        Arm("beta 0.95", f"{TWO} {loco(0.95, 'inter')}"),
        Arm("beta 0.98", f"{TWO} {loco(0.98, 'inter')}"),
        Arm("beta 0.8 on both hops", f"{TWO} {loco(0.8, 'both')}"),
        Arm("beta 0.8, error in fp32", f"{TWO} {loco(0.8, 'inter', error='fp32')}"),
        Arm("beta 0.8, hard reset every 100 steps", f"{TWO} {loco(0.8, 'inter', reset_interval=100)}"),
        Arm("beta 0.8, decay over 100 steps", f"{TWO} {loco(0.8, 'inter', reset_interval=100, reset='decay')}"),
    ),
    recovers=True,
)

E6_RECIPE = (
    f"{BF16} {differences(4)} {gradients(8, 4)} {loco(0.8, 'inter')} --micro-batch-size {{half}} "
    "--global-batch-size {twice}"
)
INT8_COPIES = "--zero-quantized-weights --hpz-secondary-dtype int8"


ELEMENT_SCALES = "--zero-gradient-element-scales"


FEW_BITS = Group(
    "LoCo between nodes, 4 bits at first",
    (
        Arm("2-bit gradients, int4 differences", few_bits(2, 4)),
        Arm("2-bit gradients, int2 differences", few_bits(2, 2)),
    ),
)
TWO_FROM_THE_START = f"{BF16} {differences(4)} {gradients(8, 2)} {loco(0.8, 'inter')}"
SHORT_SCALES = f"{few_bits(2, 2)} --zero-scale-dtype bf16"
ONE_BIT = Arm("1-bit gradients, int4 differences", few_bits(1, 4))


def two_bits_with(feedback: str, name: str, intra_bits: int = 8) -> Arm:
    flags = f"{BF16} {differences(4)} {gradients(intra_bits, 2)} {feedback}".strip()
    return Arm(name, f"{flags} {GRADIENTS_WARM_UP}")


FEEDBACK_AT_TWO_BITS = Group(
    "2-bit gradients, int4 differences, 4 bits at first",
    (
        two_bits_with("", "no feedback"),
        two_bits_with(loco(0.0, "inter"), "error feedback"),
        two_bits_with(loco(0.5, "inter"), "LoCo, beta 0.5"),
        two_bits_with(loco(0.8, "inter"), "LoCo, beta 0.8"),
        two_bits_with(loco(0.95, "inter"), "LoCo, beta 0.95"),
        two_bits_with(f"{loco(0.95, 'inter')} {ELEMENT_SCALES}", "LoCo, beta 0.95, and scales of elements"),
        two_bits_with(f"{loco(0.8, 'inter')} --trial rising-beta", "LoCo, beta rising from 0 to 0.95"),
        two_bits_with(loco(0.8, "inter", error="bf16"), "LoCo, beta 0.8, error in bf16"),
        two_bits_with(loco(0.8, "inter", error="fp32"), "LoCo, beta 0.8, error in fp32"),
        two_bits_with(loco(0.8, "both"), "LoCo, beta 0.8, on both hops"),
        two_bits_with(loco(0.8, "both"), "LoCo, beta 0.8, on both hops, 2 bits within nodes too", intra_bits=2),
    ),
    recovers=True,
)


# Steps between agreements, which all divide the run, so that it ends with one; and the outer optimizer. Few steps take
# the mean as it is. More have DiLoCo's optimizer, with a momentum that suits so short a run: with 2 islands at 32
# steps, of one seed, the best of seven pairs of rates from 0.2 to 1 and momenta from 0 to 0.9.
TAKE_THE_MEAN = " --island-outer-optimizer sgd --island-outer-lr 1 --island-outer-momentum 0"
SHORT_MOMENTUM = " --island-outer-momentum 0.7"
INTERVALS = {1: TAKE_THE_MEAN, 10: TAKE_THE_MEAN, 32: SHORT_MOMENTUM, 100: SHORT_MOMENTUM}
ISLAND_WIRES = {
    "fp32": "",
    "int4": " --island-bits 4",
    "int4, LoCo": " --island-bits 4 --island-loco",
    "int2": " --island-bits 2",
    "int2, LoCo": " --island-bits 2 --island-loco",
}
# Between nodes at every step: alone, and before the islands part.
EVERY_STEP = Arm("int4 differences, 8-4 gradients", f"{BF16} {differences(4)} {gradients(8, 4)} {loco(0.8, 'inter')}")
# The best of 0.001, 0.002 and 0.003, of one seed. All others have 0.001.
HIGHER_RATE = Arm("fp32 wire, 0.002", "--lr 0.002")
AFTER_A_FIFTH = "after a fifth at every step"
FRAGMENTS = {
    "2 fragments": " --island-fragments 2",
    "2 fragments, 4 steps on their way": " --island-fragments 2 --island-sync-delay 4 --island-merge-alpha 0.5",
}


def every(steps: int) -> str:
    return f"every {steps} steps" if steps > 1 else "every step"


def islands(number: int) -> Group:
    """The ranks as so many islands, each on a node of its own, with fp32 inside."""
    flags = f"--emulate-nodes {number} --islands {number} --island-sync-interval"
    arms = [
        Arm(f"{every(interval)}, {wire}", f"{flags} {interval}{outer}{bits}")
        for interval, outer in INTERVALS.items()
        for wire, bits in ISLAND_WIRES.items()
    ]
    arms += [
        Arm(f"every 32 steps, {wire}, {how}", f"{flags} 32{SHORT_MOMENTUM}{ISLAND_WIRES[wire]}{fragments}")
        for how, fragments in FRAGMENTS.items()
        for wire in ("fp32", "int4, LoCo")
    ]
    arms += [
        Arm(
            f"{every(interval)}, {wire}, {AFTER_A_FIFTH}",
            f"{flags} {interval}{INTERVALS[interval]}{ISLAND_WIRES[wire]} --load {{begun}}",
            begins=EVERY_STEP.flags,
        )
        for interval in (32, 100)
        for wire in ("fp32", "int4, LoCo", "int2, LoCo")
    ]
    arms.append(Arm("every 32 steps, fp32, a momentum of 0.9", f"{flags} 32"))
    return Group(f"{number} islands", tuple(arms))


ISLANDS = {number: islands(number) for number in (2, 4)}


def with_and_without_element_scales(title: str, wire: str) -> Group:
    return Group(title, (Arm("block scales", wire), Arm("and scales of elements", f"{wire} {ELEMENT_SCALES}")))


def _less_memory(name: str, flags: str) -> Arm:
    return Arm(name, f"{E6_RECIPE} {flags}", control=E6_RECIPE)


EXPERIMENTS = {
    "E1": Experiment(
        "Weights as low-bit integers (qwZ)",
        (
            CONTROLS,
            Group(
                "Weights through hpZ, gradients in fp32",
                (
                    Arm("int8, blocks of 256", weights(8, 256)),
                    Arm("int8, blocks of 2048", weights(8, 2048)),
                    Arm("int8, one scale", weights(8, 0)),
                    Arm("int6, blocks of 256", weights(6, 256)),
                    Arm("int6, one scale", weights(6, 0)),
                    Arm("int4, blocks of 256", weights(4, 256)),
                    Arm("int4, blocks of 2048", weights(4, 2048)),
                    Arm("int4, one scale", weights(4, 0)),
                ),
            ),
        ),
    ),
    "E2": Experiment(
        "Weight differences",
        (
            CONTROLS,
            Group(
                "Weights through hpZ, gradients in fp32",
                (
                    Arm("int4 themselves, blocks of 2048", weights(4, 2048)),
                    Arm("int4 differences, blocks of 2048", f"{BF16} {differences(4)}"),
                    Arm(
                        "int4 differences, blocks of 2048, two micro-batches",
                        f"{BF16} {differences(4)} --micro-batch-size {{half}} --global-batch-size {{batch}}",
                    ),
                    Arm("int2 differences, blocks of 256", f"{BF16} {differences(2, 256)}"),
                ),
            ),
        ),
    ),
    "E3": Experiment(
        "Gradients as low-bit integers, no state (qgZ)",
        (
            CONTROLS,
            Group(
                "Bits within a node - between nodes",
                (
                    Arm("4-4, blocks of 128", f"{BF16} {gradients(4, 4)}"),
                    Arm("8-4, blocks of 128", f"{BF16} {gradients(8, 4)}"),
                    Arm("4-4, blocks of 512", f"{BF16} {gradients(4, 4, 512)}"),
                    Arm("8-4, blocks of 512", f"{BF16} {gradients(8, 4, 512)}"),
                    Arm("4-4, blocks of 4096", f"{BF16} {gradients(4, 4, 4096)}"),
                    Arm("8-4, blocks of 4096", f"{BF16} {gradients(8, 4, 4096)}"),
                    Arm("4-4, blocks of 4096, stochastic", f"{BF16} {gradients(4, 4, 4096)} {UNBIASED}"),
                    Arm(
                        "4-4, blocks of 4096, stochastic, Hadamard",
                        f"{BF16} {gradients(4, 4, 4096)} {UNBIASED} {HADAMARD}",
                    ),
                    Arm("4-4, one scale (non-blocked)", f"{BF16} {gradients(4, 4, 0)}"),
                ),
            ),
        ),
    ),
    "E4": Experiment(
        "Error feedback (LoCo)", (CONTROLS, *E4_BITS_AND_BLOCKS, *E4_EIGHT_RANKS, E4_SENSITIVITY, *E4_SGD)
    ),
    "E5": Experiment(
        "Whole recipes",
        (
            CONTROLS,
            Group(
                "4 bits between nodes",
                (
                    Arm("ZeRO++ (int8 weights, 4-4 gradients)", f"{weights(8, 256)} {gradients(4, 4)}"),
                    Arm("ZeRO++ with LoCo", f"{weights(8, 256)} {gradients(4, 4)} {loco(0.8, 'both')}"),
                    Arm(
                        "SDP4Bit (int4 differences, 8-4 gradients, Hadamard, stochastic)",
                        f"{BF16} {differences(4)} {gradients(8, 4)} {UNBIASED} {HADAMARD}",
                    ),
                    Arm(
                        "int4 differences, 8-4 gradients, LoCo between nodes",
                        f"{BF16} {differences(4)} {gradients(8, 4)} {loco(0.8, 'inter')}",
                    ),
                ),
            ),
            on_twice_the_ranks(
                Group(
                    "4 bits between nodes",
                    (
                        Arm(
                            "int4 differences, 8-4 gradients, LoCo between nodes, 8 ranks",
                            f"{BF16} {differences(4)} {gradients(8, 4)} {loco(0.8, 'inter')}",
                        ),
                    ),
                )
            ),
            Group(
                "2 bits and 1 between nodes",
                (
                    Arm("ZeRO++ (int8 weights, 4-2 gradients)", f"{weights(8, 256)} {gradients(4, 2, scaling=ABSMAX)}"),
                    Arm(
                        "ZeRO++ with LoCo, 4-2 gradients",
                        f"{weights(8, 256)} {gradients(4, 2, scaling=ABSMAX)} {loco(0.8, 'both')}",
                    ),
                    Arm(
                        "SDP4Bit, 8-2 gradients",
                        f"{BF16} {differences(4)} {gradients(8, 2, scaling=ABSMAX)} {UNBIASED} {HADAMARD}",
                    ),
                    Arm("int4 differences, 8-2 gradients by mean, LoCo", TWO_FROM_THE_START),
                    Arm("int4 differences, 8-2 gradients by mean, LoCo, 4 bits at first", few_bits(2, 4)),
                    Arm("int2 differences by mean, 8-2 gradients by mean, LoCo, 4 bits at first", few_bits(2, 2)),
                    Arm("int2 differences, 8-2 gradients, LoCo, 4 bits at first, bf16 scales", SHORT_SCALES),
                    Arm("int4 differences, 8-1 gradients, LoCo, 4 bits at first", ONE_BIT.flags),
                    Arm(
                        "int4 differences, 8-2 gradients, LoCo between nodes",
                        f"{BF16} {differences(4)} {gradients(8, 2, scaling=ABSMAX)} {loco(0.8, 'inter')}",
                    ),
                ),
            ),
        ),
    ),
    "E6": Experiment(
        "Less memory",
        (
            Group(
                "int4 differences, 8-4 gradients, LoCo between nodes, 4 micro-batches",
                (
                    Arm("sums in fp32", E6_RECIPE, control=E6_RECIPE),
                    _less_memory("sums in bf16", "--zero-gradient-sum-dtype bf16"),
                    _less_memory("sums in int8", "--zero-gradient-sum-dtype int8"),
                    _less_memory("sums and copies in int8", f"--zero-gradient-sum-dtype int8 {INT8_COPIES}"),
                ),
            ),
        ),
    ),
    "E7": Experiment(
        "Scales of elements",
        (
            CONTROLS,
            with_and_without_element_scales(
                "int4 differences, 8-2 gradients, LoCo between nodes",
                TWO_FROM_THE_START,
            ),
            with_and_without_element_scales(
                "int4 differences, 8-2 gradients, LoCo between nodes, 4 bits at first", few_bits(2, 4)
            ),
            with_and_without_element_scales(
                "int2 differences, 8-2 gradients, LoCo between nodes, 4 bits at first", few_bits(2, 2)
            ),
            with_sgd(
                with_and_without_element_scales(
                    "int4 differences, 8-2 gradients, LoCo between nodes, 4 bits at first", few_bits(2, 4)
                )
            ),
            Group(
                "fp32 wire, elements limited by their own history, as 2 bits limit them",
                (
                    FP32,
                    Arm("what is cut off is lost", "--trial limited-elements"),
                    Arm("what is cut off comes later", "--trial limited-elements-with-rest"),
                ),
            ),
            with_and_without_element_scales(
                "8 bits within, 4 between nodes, blocks of 4096", f"{BF16} {gradients(8, 4, 4096)}"
            ),
            with_and_without_element_scales(
                "8 bits within, 4 between nodes, blocks of 4096, LoCo",
                f"{BF16} {gradients(8, 4, 4096)} {loco(0.8, 'inter')}",
            ),
        ),
    ),
    "E8": Experiment(
        "Two bits and one",
        (
            CONTROLS,
            Group(FEW_BITS.title, (*FEW_BITS.arms, ONE_BIT)),
            on_twice_the_ranks(FEW_BITS),
            on_twice_the_ranks(FEW_BITS, nodes=2 * NODES),
            Group("SGD with momentum", (Arm("fp32 wire", SGD, control=SGD),)),
            with_sgd(FEW_BITS),
            FEEDBACK_AT_TWO_BITS,
            Group(
                "Tried: 1-bit gradients, int4 differences, LoCo between nodes, 4 bits at first",
                (
                    ONE_BIT,
                    Arm("scales of elements, learned from the 4 bits", f"{ONE_BIT.flags} {ELEMENT_SCALES}"),
                    Arm("the largest of a block in bf16", f"{ONE_BIT.flags} --trial outliers"),
                    Arm("the four largest of a block in bf16", f"{ONE_BIT.flags} --trial four-outliers"),
                    Arm("4 bits for the embeddings, 1 for the rest", f"{ONE_BIT.flags} --trial bits-by-layer"),
                    Arm("subtractive dither", f"{ONE_BIT.flags} --trial dither"),
                ),
            ),
            Group(
                "Tried: 2-bit gradients, int4 differences, LoCo between nodes",
                (
                    Arm("as they are", TWO_FROM_THE_START),
                    Arm("subtractive dither", f"{TWO_FROM_THE_START} --trial dither"),
                    Arm("the largest of a block in bf16", f"{TWO_FROM_THE_START} --trial outliers"),
                ),
            ),
            Group(
                "Tried: 2-bit gradients, int2 differences, LoCo between nodes, 4 bits at first",
                (
                    FEW_BITS.arms[1],
                    Arm("scales of elements of differences", f"{FEW_BITS.arms[1].flags} --trial difference-scales"),
                ),
            ),
        ),
    ),
    "E9": Experiment(
        "A mixture of experts",
        (
            with_experts(CONTROLS),
            with_experts(
                Group(
                    "4 bits between nodes",
                    (
                        Arm("ZeRO++ (int8 weights, 4-4 gradients)", f"{weights(8, 256)} {gradients(4, 4)}"),
                        Arm("ZeRO++ with LoCo", f"{weights(8, 256)} {gradients(4, 4)} {loco(0.8, 'both')}"),
                        Arm(
                            "int4 differences, 8-4 gradients, LoCo between nodes",
                            f"{BF16} {differences(4)} {gradients(8, 4)} {loco(0.8, 'inter')}",
                        ),
                    ),
                )
            ),
            Group(
                "Experts divided between two real nodes, all in bf16: tokens on the wire",
                (
                    tokens_on_two_nodes("bf16", ""),
                    tokens_on_two_nodes("int8, blocks of 128", "--moe-token-bits 8"),
                    tokens_on_two_nodes("int4, blocks of 128", "--moe-token-bits 4"),
                ),
            ),
        ),
        observed=(EXPERTS_LOAD, TOKENS_SENT),
    ),
    "E10": Experiment(
        "Muon",
        (
            with_muon("bf16 wire (ZeRO-3 in 16 bit)", BF16_WIRE.flags, MUON_RATES),
            with_muon(
                "int4 differences, 8-4 gradients, LoCo between nodes",
                f"{BF16} {differences(4)} {gradients(8, 4)} {loco(0.8, 'inter')}",
                MUON_RATES[1:2],
            ),
        ),
    ),
    "E11": Experiment(
        "Islands",
        (
            CONTROLS,
            Group(
                "Every step: LoCo between nodes",
                (EVERY_STEP, Arm("int2 differences, 2-bit gradients", few_bits(2, 2))),
            ),
            Group("A higher learning rate", (HIGHER_RATE,)),
            *ISLANDS.values(),
        ),
    ),
    "E12": Experiment(
        "Moved codes",
        (
            CONTROLS,
            Group(
                "Weights through hpZ, gradients in fp32",
                (
                    Arm("int8, blocks of 256, absmax of each step", weights(8, 256)),
                    Arm("bf16, moved bits", f"{BF16} {moves(None)}"),
                    *(Arm(f"int{bits}, moved codes", f"{BF16} {moves(bits)}") for bits in (8, 6, 4)),
                ),
            ),
            Group(
                "2-bit gradients with scales of elements and LoCo, 4 bits at first",
                (
                    Arm("int4 differences", f"{few_bits(2, 4)} {ELEMENT_SCALES}"),
                    *(
                        Arm(
                            f"int{bits}, moved codes",
                            f"{few_bits(2, 4).replace(differences(4), moves(bits))} {ELEMENT_SCALES}",
                        )
                        for bits in (8, 6)
                    ),
                ),
            ),
            Group("SGD with momentum", (Arm("fp32 wire", SGD, control=SGD),)),
            with_sgd(Group("Gradients in fp32", (Arm("int6, moved codes", f"{BF16} {moves(6)}"),))),
        ),
    ),
}
OBSERVED = {name for experiment in EXPERIMENTS.values() for name in experiment.observed}
