"""What the study trains: experiments as lists of arms, each an arm of training with other flags for what is sent.

An arm that two experiments share is trained once. 4 local ranks count as 2 nodes; in some arms 8 ranks.
E2 and E6 were of weight differences (commit cdc7657 trains them), E7 of scales of elements in 4 bits and E8 of a larger
GPT (both db9a989d), E13 of rates that E18 replaces: results/old/.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from study_arms import BF16, HPZ, LARGER, LLAMA, NODES, RANKS, Arm, Experiment, Group, group

from megatron_zpp.zeropp import recipes

ABSMAX = "absmax"  # three levels at 2 bits, as in the published work


def weights(bits: int, block_size: int) -> str:
    """qwZ through hpZ; block size 0: one scale per parameter and rank."""
    return f"{BF16} {HPZ} --zero-quantized-weights --zeropp-weight-bits {bits} --zeropp-weight-block-size {block_size}"


def moves(bits: int | None) -> str:
    """Codes that move (wire/moves.py); None: the bits of bf16."""
    return f"{HPZ} --zeropp-weight-moves" + (f" --zero-quantized-weights --zeropp-weight-bits {bits}" if bits else "")


def gradients(intra: int, inter: int, block_size: int = 128, scaling: str = "") -> str:
    """scaling: of the hops with less than 4 bits; default by bits."""
    flags = (
        f"--zero-quantized-gradients --zeropp-gradient-intra-bits {intra} --zeropp-gradient-bits {inter} "
        f"--zeropp-gradient-block-size {block_size}"
    )
    if scaling and intra < 4:
        flags += f" --zeropp-gradient-intra-scaling {scaling}"
    return flags + (f" --zeropp-gradient-scaling {scaling}" if scaling and inter < 4 else "")


def loco(beta: float, hops: str, error: str = "int8", reset_interval: int = 0, reset: str = "hard") -> str:
    """Error feedback; reset_interval 0: never."""
    return (
        f"--zeropp-loco --zeropp-loco-beta {beta} --zeropp-loco-hops {hops} --zeropp-loco-error-dtype {error} "
        f"--zeropp-loco-reset-interval {reset_interval} --zeropp-loco-reset {reset}"
    )


UNBIASED = "--zeropp-gradient-rounding stochastic"
ELEMENT_SCALES = "--zeropp-gradient-element-scales"


def few_bits(wire: str, gradient_bits: int) -> str:
    """Weights by ``wire``; gradients in 8 bits within nodes, LoCo between them, and 4 bits at first."""
    flags = f"{BF16} {wire} {gradients(8, gradient_bits)} {loco(0.8, 'inter')}"
    return flags + " --zeropp-gradient-bits-warmup {warmup}:4"


FP32 = Arm("fp32 wire", "")
BF16_WIRE = Arm("bf16 wire (ZeRO-3 in 16 bit)", f"{BF16} --grad-reduce-in-bf16")
CONTROLS = Group("Controls", (FP32, BF16_WIRE))


# The same arms, trained otherwise


def on_twice_the_ranks(arms: Group, nodes: int = NODES) -> Group:
    """The same batches on twice the ranks, each of which has half of the samples."""
    eight = f"--emulate-ranks {2 * RANKS} --emulate-nodes {nodes} --micro-batch-size {{half}}"
    hpz = f"--zero-hpz-partition-size {2 * RANKS // nodes}"
    flags = {arm.name: f"{arm.flags.replace(HPZ, hpz)} {eight}" for arm in arms.arms}
    return group(f"{arms.title}, {nodes} nodes of {2 * RANKS // nodes} ranks", flags)


# The best learning rate of 0.03, 0.06, 0.1, 0.3, 1 and 3 for the fp32 wire.
SGD = "--optimizer sgd --sgd-momentum 0.9 --weight-decay 1e-4 --lr 0.1 --min-lr 0.01"
SGD_CONTROL = group("SGD with momentum", {"fp32 wire": SGD}, control=SGD)
EXPERTS = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 0.02"
LARGER_LLAMA = f"{LLAMA} {LARGER}"

# E14: a model of each kind as the scale's shape allows, with all that its attention, norms and router have.
_EIGHT_EXPERTS = "--num-experts 8 --moe-router-topk 2"
_WINDOW = "--window-size 31,0 --window-attn-skip-freq 2 --group-query-attention --num-query-groups 2"
FAMILIES = {
    "DeepSeek": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm --q-lora-rank 96 --kv-lora-rank 48 "
    f"--qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 48 {_EIGHT_EXPERTS} "
    "--moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.0001",
    "gpt-oss": "--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7 --normalization RMSNorm "
    f"--position-embedding-type rope --untie-embeddings-and-output-weights --softmax-type learnable {_WINDOW} "
    f"{_EIGHT_EXPERTS} --moe-ffn-hidden-size 192 --moe-router-bias --moe-aux-loss-coeff 0.02",
    "Gemma": "--geglu --normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope "
    "--disable-bias-linear --qk-layernorm --post-self-attn-layernorm --post-mlp-layernorm --ffn-hidden-size 768 "
    f"--rotary-base 1000000 --rotary-base-local 10000 --embedding-multiplier 13.86 {_WINDOW}",
}


def with_sgd(arms: Group) -> Group:
    """The same under SGD, against the fp32 wire under SGD."""
    flags = {arm.name: f"{SGD} {arm.flags}" for arm in arms.arms}
    return group(f"SGD: {arms.title}", flags, control=SGD)


def with_experts(arms: Group) -> Group:
    """The same for a mixture of experts like Mixtral, of 5.7M parameters, of which a token meets 2.2M."""
    flags = {arm.name: f"{EXPERTS} {arm.flags}".strip() for arm in arms.arms}
    return group(f"Experts: {arms.title}", flags, control=EXPERTS)


def of_family(name: str, arms: Mapping[str, str]) -> Group:
    """The wires of ``arms`` under one family's model, each against its fp32 wire."""
    return group(f"Like {name}", {FP32.name: "", **arms}, common=FAMILIES[name], control=FAMILIES[name])


LOCO, LOCO_ON_BOTH_HOPS = loco(0.8, "inter"), loco(0.8, "both")

# Islands

# Steps between agreements, which all divide the run, so that it ends with one; and the outer optimizer. Few steps take
# the mean as it is. More have DiLoCo's optimizer, with a momentum that suits so short a run: with 2 islands at 32
# steps, of one seed, the best of seven pairs of rates from 0.2 to 1 and momenta from 0 to 0.9.
TAKE_THE_MEAN = " --island-outer-lr 1 --island-outer-momentum 0"
SHORT_MOMENTUM = " --island-outer-momentum 0.7"
INTERVALS = {1: TAKE_THE_MEAN, 10: TAKE_THE_MEAN, 32: SHORT_MOMENTUM, 100: SHORT_MOMENTUM}
ISLAND_WIRES = {
    "fp32": "",
    "int4": " --island-bits 4",
    "int4, LoCo": " --island-bits 4 --island-loco",
    "int2": " --island-bits 2",
    "int2, LoCo": " --island-bits 2 --island-loco",
}
# The best of 0.001, 0.002 and 0.003, of one seed. All others have 0.001.
HIGHER_RATE = Arm("fp32 wire, 0.002 down to 0.0001", "--lr 0.002")
AFTER_A_FIFTH = "after a fifth at every step"
FRAGMENTS = {
    "2 fragments": " --island-fragments 2",
    "2 fragments, 4 steps on their way": " --island-fragments 2 --island-sync-delay 4 --island-merge-alpha 0.5",
}


def every(steps: int) -> str:
    return f"every {steps} steps" if steps > 1 else "every step"


def islands(number: int) -> Group:
    """The ranks as this many islands, each on a node of its own, with fp32 inside."""
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
    for interval in (32, 100):
        for wire in ("fp32", "int4, LoCo", "int2, LoCo"):
            name = f"{every(interval)}, {wire}, {AFTER_A_FIFTH}"
            begun = f"{flags} {interval}{INTERVALS[interval]}{ISLAND_WIRES[wire]} --load {{begun}}"
            arms.append(Arm(name, begun, begins=f"{BF16} --zeropp int8"))
    return Group(f"{number} islands", tuple(arms))


ISLANDS = {number: islands(number) for number in (2, 4)}

TWO_BITS_BY_ABSMAX = gradients(8, 2, scaling=ABSMAX)
FP32_GRADIENTS = "Weights through hpZ, gradients in fp32"


# E4


def feedback_group(title: str, wire: str, hops: str) -> Group:
    """Nothing, classic error feedback (beta 0), and LoCo, over one gradient wire."""
    wire = f"{BF16} {wire}"
    arms = {"no feedback": wire, "error feedback": f"{wire} {loco(0.0, hops)}", "LoCo": f"{wire} {loco(0.8, hops)}"}
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
        "no feedback": "",
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
FOUR_TIMES = "batches of 4 times the samples, a quarter of the steps"

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


def at_rate(flags: str, rate: float) -> str:
    return f"{flags} --lr {rate:g} --min-lr {rate / 10:g}".strip()


def muon_at(rate: float, period: str = MUON_PERIODS["whole matrices"]) -> str:
    return at_rate(f"--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2 {period}", rate)


MUON = muon_at(0.004)


def with_muon(title: str, wire: str, rates: tuple[float, ...]) -> Group:
    """AdamW at the study's learning rate, and Muon at some, over one wire, against whole matrices at 0.004."""
    arms = {
        f"Muon, {name}, learning rate {rate:g}": f"{wire} {muon_at(rate, period)}"
        for name, period in MUON_PERIODS.items()
        for rate in rates
    }
    return group(title, {"AdamW": wire, **arms}, control=f"{wire} {MUON}")


RECIPES = {
    "ZeRO++ (int8 weights, 4-4 gradients)": f"{weights(8, 256)} {gradients(4, 4)}",
    "ZeRO++ with LoCo": f"{weights(8, 256)} {gradients(4, 4)} {LOCO_ON_BOTH_HOPS}",
}
# What `int8`, `int6` and `ternary` set.
INT8 = f"{BF16} {moves(8)} {gradients(8, 4)} {loco(0.8, 'inter')}"
INT6 = f"{few_bits(moves(6), 2)} {ELEMENT_SCALES}"
TERNARY = f"{BF16} {moves(6)} {LARGEST_FIFTH}"
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


# E18 to E22. DeepSpeed's groups of these models: gradients in groups of a matrix's smaller dimension (192 and 256),
# weights in groups of 4,608 to 6,912 elements, and at 5.2M of 4,096.
GROUPS_OF_1M, GROUPS_OF_5M = (weights(8, 6144), gradients(4, 4, 192)), (weights(8, 4096), gradients(4, 4, 256))
PUBLISHED = " ".join(GROUPS_OF_1M)
HEADLINE = {
    "bf16": BF16_WIRE.flags,
    "fp32": "",
    **{f"`{name}`": f"{BF16} --zeropp {name}" for name in list(recipes.RECIPES)[1:]},
    "ZeRO++ as published": PUBLISHED,
    "ZeRO++ as published, LoCo": f"{PUBLISHED} {LOCO_ON_BOTH_HOPS}",
}
POWER_SGD = {n: f"--trial powersgd:{n} {BF16} --global-batch-size {{batch}}" for n in (2, 80)}
TWO_ISLANDS = f"{BF16_WIRE.flags} --islands 2 --island-sync-interval 32{SHORT_MOMENTUM}{ISLAND_WIRES['int4, LoCo']}"
RATES = (0.001, 0.0015, 0.002, 0.003)
COMMON_RATE = 0.002
ISLAND_RATES = {"from the first step on": 0.001, AFTER_A_FIFTH: 0.0015}  # their best of E18
# Flags and the bf16 wire's best rate in E18; the Llama's on seed 101.
MODELS = {"GPT, 1.3M parameters": ("", COMMON_RATE), "Llama, 1.6M parameters": (LLAMA, 0.0015)}


def rates_of(name: str, flags: str, model: str, control: float = COMMON_RATE, real_ranks: int | None = None) -> Group:
    """One wire at each of ``RATES``."""
    flags = f"{model} {flags}".strip()
    arms = {f"learning rate {rate:g}": at_rate(flags, rate) for rate in RATES}
    return group(name, arms, control=at_rate(flags, control), real_ranks=real_ranks)


def headline(title: str, model: str, rate: float, names: Iterable[str] = HEADLINE) -> Group:
    """Return headline wires at one learning rate, against the bf16 wire."""
    arms = {name: at_rate(f"{model} {HEADLINE[name]}".strip(), rate) for name in names}
    return group(f"{title}, {rate:g}", arms, control=arms["bf16"])


HEADLINES = [headline(title, *model) for title, model in MODELS.items()]
AT_5M = ("bf16", "`int8`", "`int6`")
UNDER_MUON = (*AT_5M, "`ternary`")


def muon_rates_of(name: str) -> Group:
    """One wire under Muon at each of ``MUON_RATES``, and at twice the highest."""
    arms = {f"learning rate {r:g}": f"{HEADLINE[name]} {muon_at(r)}" for r in (*MUON_RATES, 0.016)}
    return group(f"GPT, 1.3M parameters, Muon: {name}", arms, control=f"{HEADLINE[name]} {MUON}")


def headline_with_muon() -> Group:
    """Four headline wires under Muon, at the rate that E10 found best, and AdamW, against the bf16 wire under Muon."""
    arms = {name: f"{HEADLINE[name]} {MUON}" for name in UNDER_MUON} | {"bf16, AdamW at 0.002": _BF16_AT_RATE}
    return group("GPT, 1.3M parameters, Muon at 0.004", arms, control=arms["bf16"])


def feedback_at_rate() -> Iterator[Group]:
    """E4's large blocks and two recipes, with classic error feedback and with LoCo, at the common learning rate."""
    wires = {LARGE_BLOCKS.title: {arm.name: arm.flags for arm in LARGE_BLOCKS.arms}}
    for name in ("`int8`", "`int6`"):
        wires[name] = {"error feedback": f"{HEADLINE[name]} --zeropp-loco-beta 0", "LoCo": HEADLINE[name]}
    for title, flags in wires.items():
        arms = {name: at_rate(wire, COMMON_RATE) for name, wire in flags.items()}
        yield group(f"GPT, 1.3M parameters, {title}", arms, control=_BF16_AT_RATE)


def islands_at(rate: float, how: str) -> Arm:
    """Two islands that agree every 32 steps in int4 with LoCo, from the first step on or after a fifth of the run."""
    arm = Arm(how, at_rate(TWO_ISLANDS, rate), _BF16_AT_RATE)
    if how == AFTER_A_FIFTH:
        return replace(arm, flags=f"{arm.flags} --load {{begun}}", begins=at_rate(BF16_WIRE.flags, rate))
    return arm


def island_rates_of(how: str) -> Group:
    """Two islands at each of ``RATES``."""
    control = islands_at(COMMON_RATE, how).flags
    arms = [replace(islands_at(rate, how), name=f"learning rate {rate:g}", control=control) for rate in RATES]
    return Group(f"GPT, 1.3M parameters: 2 islands {how}", tuple(arms))


_BF16_AT_RATE = at_rate(BF16_WIRE.flags, COMMON_RATE)


def table_5(title: str, qwz: str, qgz: str) -> Group:
    """Return the arms of ZeRO++'s Table 5, then LoCo and `int8`."""
    published, no_qgz, half = f"{qwz} {qgz}", f"{qwz} --grad-reduce-in-bf16", "hpZ, qwZ, qgZ for the first half"
    arms = {
        "ZeRO-3": HEADLINE["bf16"],
        "hpZ, qwZ, qgZ": published,
        half: f"{no_qgz} --load {{begun}}",  # resumes without qgZ, within a node too
        "hpZ, qwZ, no qgZ": no_qgz,
        "hpZ, qwZ, qgZ, LoCo": f"{published} {LOCO_ON_BOTH_HOPS}",
        "`int8`": HEADLINE["`int8`"],
    }
    made = group(title, {name: at_rate(flags, COMMON_RATE) for name, flags in arms.items()}, control=_BF16_AT_RATE).arms
    begins = at_rate(published, COMMON_RATE)
    return Group(title, tuple(replace(a, begins=begins, begins_share=0.5) if a.name == half else a for a in made))


EXPERIMENTS = {
    "E1": Experiment(
        "Weights as low-bit integers (qwZ)",
        (
            CONTROLS,
            group(
                FP32_GRADIENTS,
                {
                    f"int{bits}, {f'blocks of {size}' if size else 'one scale'}": weights(bits, size)
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
                    "int8, moved codes": f"{BF16} {moves(8)} {LARGEST_FIFTH}",
                    "int6, moved codes": TERNARY,
                    "int6, moved codes, learning rate 0.0014": at_rate(TERNARY, 0.0014),
                },
            ),
            group(
                f"The same with 1-bit gradients, {FOUR_TIMES}",
                {FP32.name: "", "int6, moved codes": TERNARY.format(warmup=20)},
                common=LARGE_BATCHES,
                control=LARGE_BATCHES,
            ),
            on_twice_the_ranks(group("1-bit gradients", {"int6, moved codes": TERNARY}), 4),
            on_twice_the_ranks(group("1-bit gradients", {"weights in bf16": f"{BF16} {LARGEST_FIFTH}"}), 8),
            SGD_CONTROL,
            with_sgd(group("Gradients in fp32", {"int6, moved codes": f"{BF16} {moves(6)}"})),
            with_sgd(group("1-bit gradients", {"int6, moved codes": TERNARY})),
            group(
                "Muon, whole matrices, learning rate 0.004: weights through hpZ, gradients in fp32",
                {
                    "bf16, moved bits": f"{BF16} {moves(None)} {MUON}",
                    **{f"int{bits}, moved codes": f"{BF16} {moves(bits)} {MUON}" for bits in (8, 6)},
                    "int6, moved codes, 1-bit gradients": f"{TERNARY} {MUON}",
                },
                control=f"{BF16} {moves(None)} {MUON}",
            ),
        ),
    ),
    "E14": Experiment(
        "Families of 2026",
        tuple(
            of_family(name, {**RECIPES, "int6 moved codes, 2-bit gradients, LoCo, 4 bits at first": INT6})
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
                    "int6: moved codes, 2-bit gradients with scales of elements, LoCo": INT6,
                    "ternary: moved int6 codes, 1-bit gradients with scales of elements, LoCo of beta 0.95": TERNARY,
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
        (
            group(
                "Llama, 1.6M parameters, a quarter of the steps: int8, moved codes, 4-bit gradients, LoCo",
                {name: f"{INT8} {products}".strip() for name, products in FLOAT8.items()},
                common=f"{LLAMA} --train-iters 200",
                control=f"{LLAMA} --train-iters 200 {INT8}",
            ),
        ),
        control="bf16 products",
    ),
    "E17": Experiment(
        "A larger Llama",
        (
            group(
                "15.7M parameters",
                {BF16_WIRE.name: BF16_WIRE.flags, "`int8`": HEADLINE["`int8`"]},
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
                for title, (m, _) in MODELS.items()
                for name, flags in HEADLINE.items()
            ),
            rates_of("GPT, 1.3M parameters: DDP with PowerSGD of rank 4", POWER_SGD[2], "", real_ranks=1),
            rates_of(f"GPT, 1.3M parameters: bf16, {FOUR_TIMES}", BF16_WIRE.flags, LARGE_BATCHES),
            *(island_rates_of(how) for how in ISLAND_RATES),
            *(muon_rates_of(name) for name in UNDER_MUON),
        ),
        scale="rates",
        control=f"{COMMON_RATE:g}, under Muon 0.004",
    ),
    "E19": Experiment(
        "Headline wires at a tuned learning rate",
        (
            *HEADLINES,
            headline_with_muon(),
            group(
                "GPT, 1.3M parameters, DDP with PowerSGD of rank 4",
                {f"{n} exact steps": at_rate(flags, COMMON_RATE) for n, flags in POWER_SGD.items()},
                control=_BF16_AT_RATE,
                real_ranks=1,
            ),
            group(
                f"GPT, 1.3M parameters, {FOUR_TIMES}",
                # validated on as many samples as its control
                {"bf16": at_rate(f"{LARGE_BATCHES} {BF16_WIRE.flags} --eval-iters 16", COMMON_RATE)},
                control=_BF16_AT_RATE,
            ),
            Group(
                "GPT, 1.3M parameters, 2 islands that agree every 32 steps in int4 with LoCo, outer momentum 0.7",
                tuple(replace(islands_at(rate, how), name=f"{how}, {rate:g}") for how, rate in ISLAND_RATES.items()),
            ),
            *feedback_at_rate(),
        ),
        scale="tuned",
        control="the bf16 wire",
    ),
    "E20": Experiment(
        "ZeRO++'s Table 5", (table_5("GPT, 1.3M parameters", *GROUPS_OF_1M),), scale="tuned", control="ZeRO-3"
    ),
    "E21": Experiment(
        "Learning rates of a Llama of 5.2 million parameters",
        tuple(rates_of(name, HEADLINE[name], "", control=RATES[0]) for name in AT_5M),
        scale="5m-rates",
        control=f"{RATES[0]:g}",
    ),
    "E22": Experiment(
        "A Llama of 5.2 million parameters",
        (
            headline("Llama, 5.2M parameters", "", COMMON_RATE, AT_5M),  # the better of E21's two rates
            table_5("Llama, 5.2M parameters, ZeRO++'s Table 5", *GROUPS_OF_5M),
        ),
        scale="5m",
        control="the bf16 wire",
    ),
}
OBSERVED = {name for experiment in EXPERIMENTS.values() for name in experiment.observed}
