"""What the study trains: experiments as lists of arms, each an arm of training with other flags for what is sent.

An arm that two experiments share is trained once. 4 local ranks count as 2 nodes; in some arms 8 ranks.
E2 and E6 were of weight differences, which are gone: commit cdc7657 trains them, and results/old/ has their rows.
"""

from collections.abc import Iterator

from study_arms import (
    ABSMAX,
    BF16,
    BF16_WIRE,
    CONTROLS,
    ELEMENT_SCALES,
    EXPERTS,
    FAMILIES,
    FP32,
    HIGHER_RATE,
    ISLANDS,
    LARGER_LLAMA,
    LLAMA,
    LOCO,
    LOCO_ON_BOTH_HOPS,
    SGD_CONTROL,
    UNBIASED,
    Arm,
    Experiment,
    Group,
    few_bits,
    gradients,
    group,
    loco,
    moves,
    of_family,
    on_twice_the_ranks,
    weights,
    with_and_without_element_scales,
    with_experts,
    with_sgd,
)

from megatron_zpp.zeropp import recipes

TWO_BITS_BY_ABSMAX = gradients(8, 2, scaling=ABSMAX)
FP32_GRADIENTS = "Weights through hpZ, gradients in fp32"


# E4


def feedback_group(title: str, wire: str, hops: str) -> Group:
    """Nothing, classic error feedback (beta 0), and LoCo, over one gradient wire."""
    wire = f"{BF16} {wire}"
    arms = {"nothing": wire, "error feedback": f"{wire} {loco(0.0, hops)}", "LoCo": f"{wire} {loco(0.8, hops)}"}
    return group(title, arms)


LARGE_BLOCKS = feedback_group("4 bits on both hops, blocks of 4096", gradients(4, 4, 4096), "both")
TWO_ON_BOTH_HOPS = feedback_group("2 bits on both hops, blocks of 128", gradients(2, 2, scaling=ABSMAX), "both")
E4_BITS_AND_BLOCKS = (
    feedback_group("4 bits on both hops, blocks of 128", gradients(4, 4), "both"),
    LARGE_BLOCKS,
    feedback_group("8 bits within, 4 between nodes, blocks of 4096", gradients(8, 4, 4096), "inter"),
    TWO_ON_BOTH_HOPS,
    feedback_group("8 bits within, 2 between nodes, blocks of 128", TWO_BITS_BY_ABSMAX, "inter"),
)
E4_SENSITIVITY = group(
    "Sensitivity of LoCo: 8 bits within, 2 between nodes, blocks of 128",
    {
        "nothing": "",
        "beta 0 (error feedback)": loco(0.0, "inter"),
        **{f"beta {beta}": loco(beta, "inter") for beta in (0.2, 0.5, 0.8, 0.95, 0.98)},
        "beta 0.8 on both hops": LOCO_ON_BOTH_HOPS,
        "beta 0.8, error in fp32": loco(0.8, "inter", error="fp32"),
        "beta 0.8, hard reset every 100 steps": loco(0.8, "inter", reset_interval=100),
        "beta 0.8, decay over 100 steps": loco(0.8, "inter", reset_interval=100, reset="decay"),
    },
    common=f"{BF16} {TWO_BITS_BY_ABSMAX}",
)

LARGEST_FIFTH = f"{gradients(8, 1)} {loco(0.95, 'inter')} {ELEMENT_SCALES} --zeropp-scale-dtype bf16 "
LARGEST_FIFTH += "--zeropp-gradient-bits-warmup {warmup}:4"
LARGE_BATCHES = "--global-batch-size {large} --train-iters 200"
HIGHER = "--lr 0.0014 --min-lr 0.00014"

# E9

EXPERTS_LOAD, TOKENS_SENT = "expert load (max/mean)", "tokens sent between nodes per step (MB)"
# The batch of four ranks on two, each of which has half of the experts.
ON_TWO_NODES = (
    f"{EXPERTS} {BF16} --expert-model-parallel-size 2 --zeropp-ranks-per-node 1 --global-batch-size {{batch}}"
)

# E10: Muon for the layers' matrices with updates as large as AdamW's, at learning rates that both take.

EVERY_TENTH = "--muon-period 10 --muon-momentum-bits"
MUON_RATES = (2e-3, 4e-3, 8e-3)
MUON_PERIODS = {
    "whole matrices": "--muon-period 1",
    "node blocks": "--muon-period 0",
    "node blocks, every tenth whole in 4 bits": f"{EVERY_TENTH} 4",
    "stale rows, every tenth whole in 4 bits": f"{EVERY_TENTH} 4 --muon-stale-rows",
    "stale rows, every tenth whole in 8 bits": f"{EVERY_TENTH} 8 --muon-stale-rows",
}


def at_learning_rates(title: str, wire: str) -> Group:
    """The wire at four learning rates; 0.001 is the scale's own."""
    rates = {"0.001": "", **{f"{rate}": f"--lr {rate} --min-lr {rate / 10:g}" for rate in (0.0007, 0.0014, 0.002)}}
    return group(title, {f"learning rate {rate}": f"{wire} {flags}".strip() for rate, flags in rates.items()})


def few_levels(beta: float) -> str:
    """Weights in fp32 and gradients in 2 bits between nodes, with scales of elements, and with 4 bits at first."""
    flags = f"{gradients(0, 2)} {loco(beta, 'inter')} {ELEMENT_SCALES}"
    return flags + " --zeropp-gradient-bits-warmup {warmup}:4"


def muon_at(rate: float, period: str) -> str:
    return (
        f"--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2 {period} --lr {rate} --min-lr {rate / 10}"
    )


MUON = muon_at(0.004, MUON_PERIODS["whole matrices"])


def with_muon(title: str, wire: str, rates: tuple[float, ...]) -> Group:
    """AdamW at the study's learning rate, and Muon at some, over one wire, against whole matrices at 0.004."""
    arms = {
        f"Muon, {name}, learning rate {rate:g}": f"{wire} {muon_at(rate, period)}"
        for name, period in MUON_PERIODS.items()
        for rate in rates
    }
    return group(title, {"AdamW": wire, **arms}, control=f"{wire} {MUON}")


def _blocks(size: int) -> str:
    return f"blocks of {size}" if size else "one scale"


RECIPES = {
    "ZeRO++ (int8 weights, 4-4 gradients)": f"{weights(8, 256)} {gradients(4, 4)}",
    "ZeRO++ with LoCo": f"{weights(8, 256)} {gradients(4, 4)} {LOCO_ON_BOTH_HOPS}",
}
# What docs/reference/recipes.md proposes for few bytes.
MOVED_CODES = f"{few_bits(moves(6), 2)} {ELEMENT_SCALES}"
INT8 = f"{BF16} {moves(8)} {gradients(8, 4)} {loco(0.8, 'inter')}"
FLOAT8 = {"bf16": "", "float8, tensorwise": "--fp8-format hybrid", "float8, rowwise": "--fp8-format e4m3"}


def llama_recipes(title: str, model: str, block_sizes: tuple[int, ...]) -> Group:
    """ZeRO-3, ZeRO++ and LoCo as the LoCo paper trains them, against the fp32 wire of the same model."""
    arms = {BF16_WIRE.name: BF16_WIRE.flags}
    for size in block_sizes:
        wire = f"{weights(8, 256)} {gradients(4, 4, size)}"
        arms[f"ZeRO++, gradients in blocks of {size}"] = wire
        arms[f"ZeRO++ with LoCo, blocks of {size}"] = f"{wire} {LOCO_ON_BOTH_HOPS}"
    return group(title, {FP32.name: "", **arms}, common=model, control=model)


def blocked_or_not(title: str, model: str) -> Group:
    """The whole recipe with scales of blocks, and with one scale for each parameter and rank."""
    arms = {
        "ZeRO++, all in blocks": f"{weights(8, 256)} {gradients(8, 4)}",
        "ZeRO++, weights non-blocked": f"{weights(8, 0)} {gradients(8, 4)}",
        "ZeRO++, weights and gradients non-blocked": f"{weights(8, 0)} {gradients(8, 4, 0)}",
    }
    return group(f"Blocked and non-blocked: {title}", {FP32.name: "", **arms}, common=model, control=model)


# E18 to E20. DeepSpeed's groups of these models: gradients in groups of a matrix's smaller dimension (192), weights in
# groups of 4,608 to 6,912 elements.
PUBLISHED_WEIGHTS = weights(8, 6144)
PUBLISHED = f"{PUBLISHED_WEIGHTS} {gradients(4, 4, 192)}"
HEADLINE = {
    "bf16": BF16_WIRE.flags,
    "fp32": "",
    **{f"`{name}`": f"{BF16} --zeropp {name}" for name in list(recipes.RECIPES)[1:]},
    "ZeRO++ as published": PUBLISHED,
    "ZeRO++ as published, LoCo": f"{PUBLISHED} {LOCO_ON_BOTH_HOPS}",
}
MODELS = {"GPT, 1.3M parameters": "", "Llama, 1.6M parameters": LLAMA}
RATES = (0.001, 0.0015, 0.002, 0.003)
COMMON_RATE = 0.002


def at_rate(flags: str, rate: float) -> str:
    return f"{flags} --lr {rate:g} --min-lr {rate / 10:g}".strip()


def rates_of(name: str, flags: str, model: str) -> Group:
    """One wire at each of ``RATES``."""
    arms = {f"learning rate {rate:g}": at_rate(f"{model} {flags}".strip(), rate) for rate in RATES}
    return group(name, arms, control=at_rate(f"{model} {flags}".strip(), COMMON_RATE))


def headline(title: str, model: str) -> Group:
    """Each headline wire at the common learning rate, against the bf16 wire."""
    arms = {name: at_rate(f"{model} {flags}".strip(), COMMON_RATE) for name, flags in HEADLINE.items()}
    return group(title, arms, control=arms["bf16"])


UNDER_MUON = ("bf16", "`int8`", "`int6`", "`ternary`")


def muon_rates_of(name: str) -> Group:
    """One wire under Muon at each of ``MUON_RATES``."""
    arms = {f"learning rate {r:g}": f"{HEADLINE[name]} {muon_at(r, '--muon-period 1')}" for r in MUON_RATES}
    return group(f"GPT, 1.3M parameters, Muon: {name}", arms, control=f"{HEADLINE[name]} {MUON}")


def headline_with_muon() -> Group:
    """Four headline wires under Muon, at the rate that E10 found best, against the bf16 wire."""
    arms = {name: f"{HEADLINE[name]} {MUON}" for name in UNDER_MUON}
    return group("GPT, 1.3M parameters, Muon at 0.004", arms, control=arms["bf16"])


def feedback_at_rate() -> Iterator[Group]:
    """E4's large blocks and two recipes, with classic error feedback and with LoCo, at the common learning rate."""
    wires = {LARGE_BLOCKS.title: {arm.name: arm.flags for arm in LARGE_BLOCKS.arms}}
    for name in ("`int8`", "`int6`"):
        wires[name] = {"error feedback": f"{HEADLINE[name]} --zeropp-loco-beta 0", "LoCo": HEADLINE[name]}
    for title, flags in wires.items():
        arms = {name: at_rate(wire, COMMON_RATE) for name, wire in flags.items()}
        yield group(f"GPT, 1.3M parameters, {title}", arms, control=_BF16_AT_RATE)


_BF16_AT_RATE = at_rate(BF16_WIRE.flags, COMMON_RATE)
TABLE_5 = Group(
    "GPT, 1.3M parameters",
    (
        Arm("ZeRO-3", _BF16_AT_RATE, _BF16_AT_RATE),
        Arm("hpZ, qwZ, qgZ", at_rate(PUBLISHED, COMMON_RATE), _BF16_AT_RATE),
        Arm(
            "hpZ, qwZ, qgZ for the first half",  # resumes without qgZ, within a node too, from a checkpoint
            at_rate(f"{PUBLISHED_WEIGHTS} --grad-reduce-in-bf16 --load {{begun}}", COMMON_RATE),
            _BF16_AT_RATE,
            begins=at_rate(PUBLISHED, COMMON_RATE),
            begins_share=0.5,
        ),
        Arm("hpZ, qwZ, no qgZ", at_rate(f"{PUBLISHED_WEIGHTS} --grad-reduce-in-bf16", COMMON_RATE), _BF16_AT_RATE),
        Arm("hpZ, qwZ, qgZ, LoCo", at_rate(f"{PUBLISHED} {LOCO_ON_BOTH_HOPS}", COMMON_RATE), _BF16_AT_RATE),
        Arm("`int8`", at_rate(f"{BF16} --zeropp int8", COMMON_RATE), _BF16_AT_RATE),
    ),
)


EXPERIMENTS = {
    "E1": Experiment(
        "Weights as low-bit integers (qwZ)",
        (
            CONTROLS,
            group(
                FP32_GRADIENTS,
                {
                    f"int{bits}, {_blocks(size)}": weights(bits, size)
                    for bits, sizes in {8: (256, 2048, 0), 6: (256, 0), 4: (256, 2048, 0)}.items()
                    for size in sizes
                },
            ),
        ),
    ),
    "E3": Experiment(
        "Gradients as low-bit integers, without state (qgZ)",
        (
            CONTROLS,
            group(
                "Bits within a node - between nodes",
                {
                    **{
                        f"{intra}-4, blocks of {size}": gradients(intra, 4, size)
                        for size in (128, 512, 4096)
                        for intra in (4, 8)
                    },
                    "4-4, blocks of 4096, stochastic": f"{gradients(4, 4, 4096)} {UNBIASED}",
                    "4-4, one scale (non-blocked)": gradients(4, 4, 0),
                },
                common=BF16,
            ),
        ),
    ),
    "E4": Experiment(
        "Error feedback and LoCo",
        (
            CONTROLS,
            *E4_BITS_AND_BLOCKS,
            on_twice_the_ranks(LARGE_BLOCKS),
            on_twice_the_ranks(TWO_ON_BOTH_HOPS),
            E4_SENSITIVITY,
            SGD_CONTROL,
            with_sgd(LARGE_BLOCKS),
            with_sgd(TWO_ON_BOTH_HOPS),
        ),
    ),
    "E5": Experiment(
        "Whole recipes of ZeRO++",
        (
            CONTROLS,
            group("4 bits between nodes", RECIPES),
            group(
                "2 bits between nodes",
                {
                    "ZeRO++ (int8 weights, 4-2 gradients)": f"{weights(8, 256)} {gradients(4, 2, scaling=ABSMAX)}",
                    "ZeRO++ with LoCo, 4-2 gradients": f"{weights(8, 256)} {gradients(4, 2, scaling=ABSMAX)} "
                    f"{LOCO_ON_BOTH_HOPS}",
                },
            ),
        ),
    ),
    "E7": Experiment(
        "Scales of elements",
        (
            CONTROLS,
            with_and_without_element_scales(
                "8 bits within, 4 between nodes, blocks of 4096", f"{BF16} {gradients(8, 4, 4096)}"
            ),
            with_and_without_element_scales(
                "8 bits within, 4 between nodes, blocks of 4096, LoCo", f"{BF16} {gradients(8, 4, 4096)} {LOCO}"
            ),
        ),
    ),
    "E8": Experiment(
        "Moved codes in a larger model",
        (
            group(
                "5.3M parameters",
                {
                    "fp32 wire": "",
                    "moved int6 codes, 1-bit gradients, scales of elements, beta 0.95": f"{BF16} {moves(6)} "
                    f"{LARGEST_FIFTH}",
                },
            ),
            group(
                "Gradients in fp32, compared with the bf16 wire",
                {
                    BF16_WIRE.name: BF16_WIRE.flags,
                    **{f"int{bits}, moved codes": f"{BF16} {moves(bits)}" for bits in (8, 6)},
                },
                control=BF16_WIRE.flags,
            ),
        ),
        scale="larger",
    ),
    "E9": Experiment(
        "A mixture of experts",
        (
            with_experts(CONTROLS),
            with_experts(group("4 bits between nodes", RECIPES)),
            with_experts(LARGE_BLOCKS),
            group(
                "Experts divided between two real nodes, all in bf16: tokens on the wire",
                {"bf16": "", **{f"int{bits}, blocks of 128": f"--moe-token-bits {bits}" for bits in (8, 4)}},
                common=ON_TWO_NODES,
                control=ON_TWO_NODES,
                real_ranks=2,
            ),
        ),
        observed=(EXPERTS_LOAD, TOKENS_SENT),
    ),
    "E10": Experiment(
        "Muon",
        (with_muon(BF16_WIRE.name, BF16_WIRE.flags, MUON_RATES),),
        control="Muon, whole matrices, 0.004",
    ),
    "E11": Experiment(
        "Islands",
        (CONTROLS, Group("A higher learning rate", (HIGHER_RATE,)), *ISLANDS.values()),
    ),
    "E12": Experiment(
        "Moved codes",
        (
            CONTROLS,
            group(
                FP32_GRADIENTS,
                {
                    "int8, blocks of 256, absmax of each step": weights(8, 256),
                    "bf16, moved bits": f"{BF16} {moves(None)}",
                    **{f"int{bits}, moved codes": f"{BF16} {moves(bits)}" for bits in (8, 6, 4)},
                },
            ),
            group(
                "2-bit gradients with scales of elements and LoCo, 4 bits at first",
                {f"int{bits}, moved codes": f"{few_bits(moves(bits), 2)} {ELEMENT_SCALES}" for bits in (8, 6)},
            ),
            group(
                "1-bit gradients with scales of elements and LoCo of beta 0.95, 4 bits at first, short scales",
                {
                    **{f"int{bits}, moved codes": f"{BF16} {moves(bits)} {LARGEST_FIFTH}" for bits in (8, 6)},
                    "int6, moved codes, learning rate 0.0014": f"{BF16} {moves(6)} {LARGEST_FIFTH} {HIGHER}",
                },
            ),
            group(
                "The same with 1-bit gradients, batches of 4 times the samples, a quarter of the steps",
                {FP32.name: "", "int6, moved codes": f"{BF16} {moves(6)} {LARGEST_FIFTH.format(warmup=20)}"},
                common=LARGE_BATCHES,
                control=LARGE_BATCHES,
            ),
            on_twice_the_ranks(
                group("1-bit gradients", {"int6, moved codes": f"{BF16} {moves(6)} {LARGEST_FIFTH}"}), 4
            ),
            on_twice_the_ranks(group("1-bit gradients", {"weights in bf16": f"{BF16} {LARGEST_FIFTH}"}), 8),
            SGD_CONTROL,
            with_sgd(group("Gradients in fp32", {"int6, moved codes": f"{BF16} {moves(6)}"})),
            with_sgd(group("1-bit gradients", {"int6, moved codes": f"{BF16} {moves(6)} {LARGEST_FIFTH}"})),
            group(
                "Muon, whole matrices, learning rate 0.004: weights through hpZ, gradients in fp32",
                {
                    "bf16, moved bits": f"{BF16} {moves(None)} {MUON}",
                    **{f"int{bits}, moved codes": f"{BF16} {moves(bits)} {MUON}" for bits in (8, 6)},
                    "int6, moved codes, 1-bit gradients": f"{BF16} {moves(6)} {LARGEST_FIFTH} {MUON}",
                },
                control=f"{BF16} {moves(None)} {MUON}",
            ),
        ),
    ),
    "E13": Experiment(
        "Learning rates before they were tuned",
        (
            at_learning_rates("The fp32 wire", ""),
            at_learning_rates("2 bits between nodes, four levels, beta 0.8", few_levels(0.8)),
        ),
    ),
    "E14": Experiment(
        "Families of 2026",
        tuple(
            of_family(name, {**RECIPES, "int6 moved codes, 2-bit gradients, LoCo, 4 bits at first": MOVED_CODES})
            for name in FAMILIES
        ),
    ),
    "E15": Experiment(
        "Dense Llama",
        (
            llama_recipes("Llama, 1.6M parameters", LLAMA, (4096, 128)),
            group(
                "Llama, 1.6M parameters: recipes",
                {
                    "int8: moved codes, 4-bit gradients, LoCo": INT8,
                    "int6: moved codes, 2-bit gradients with scales of elements, LoCo": MOVED_CODES,
                    "ternary: moved int6 codes, 1-bit gradients with scales of elements, LoCo of beta 0.95": (
                        f"{BF16} {moves(6)} {LARGEST_FIFTH}"
                    ),
                },
                common=LLAMA,
                control=LLAMA,
            ),
            blocked_or_not("Llama", LLAMA),
            blocked_or_not("Llama that begins with four outliers a layer", f"--trial outliers:30 {LLAMA}"),
            llama_recipes("Llama, 5.2M parameters", LARGER_LLAMA, (4096,)),
        ),
    ),
    "E16": Experiment(
        "Float8 products",
        tuple(
            group(
                f"Llama, 1.6M parameters, a quarter of the steps: {wire}",
                {name: f"{flags} {products}".strip() for name, products in FLOAT8.items()},
                common=f"{LLAMA} --train-iters 200",
                control=f"{LLAMA} --train-iters 200 {flags}",
            )
            for wire, flags in (("int8, moved codes, 4-bit gradients, LoCo", INT8), ("bf16", BF16_WIRE.flags))
        ),
        control="bf16 products",
    ),
    "E17": Experiment(
        "A larger Llama",
        (
            group(
                "15.7M parameters",
                {BF16_WIRE.name: BF16_WIRE.flags, "`--zeropp int8`": f"{BF16} --zeropp int8"},
                control=BF16_WIRE.flags,
            ),
        ),
        scale="llama",
        control="ZeRO-3 in bf16",
    ),
    "E18": Experiment(
        "Learning rates of the headline wires",
        (
            *(
                rates_of(f"{title}: {name}", flags, m)
                for title, m in MODELS.items()
                for name, flags in HEADLINE.items()
            ),
            *(muon_rates_of(name) for name in UNDER_MUON),
        ),
        scale="rates",
        control=f"{COMMON_RATE:g}, under Muon 0.004",
    ),
    "E19": Experiment(
        "Headline wires at a tuned learning rate",
        (*(headline(title, model) for title, model in MODELS.items()), headline_with_muon(), *feedback_at_rate()),
        scale="tuned",
        control="the bf16 wire",
    ),
    "E20": Experiment(
        "ZeRO++'s Table 5",
        (TABLE_5,),
        scale="tuned",
        control="ZeRO-3",
    ),
}
OBSERVED = {name for experiment in EXPERIMENTS.values() for name in experiment.observed}
