"""What an experiment of the study is made of: arms of training with other flags for what travels, and these flags."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

RANKS, NODES = 4, 2
BF16 = "--bf16"  # computing in bf16, fp32 masters: what all arms but the fp32 wire have
HPZ = f"--zero-hpz-partition-size {RANKS // NODES}"


@dataclass(frozen=True)
class Scale:
    """A model and how long it is trained; on CPUs it sees every token once."""

    shape: str
    micro_batch_size: int  # per rank
    train_iters: int
    eval_iters: int
    lr: float
    adam_beta2: float
    vocab_size: int
    corpus: str  # flags of make_corpus.py
    jobs: int = 1  # runs side by side
    text_of: str = ""  # another scale, whose corpus, tokenizer and tokens it takes
    ranks: int = RANKS  # on NODES nodes
    seeds: tuple[int, ...] = (1, 2, 3)  # that an arm needs to be shown
    split: str = "98,2,0"


CPU = Scale(  # 1.3M parameters, 0.8M tokens
    "--num-layers 2 --hidden-size 192 --num-attention-heads 4 --seq-length 128",
    micro_batch_size=2,
    train_iters=800,
    eval_iters=64,
    lr=1e-3,  # below the best, which E18 looks for
    adam_beta2=0.99,
    vocab_size=2048,
    corpus="--packages torch --max-megabytes 70",
    jobs=2,
)
LARGER = "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 128"
GPU = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights"
)
LLAMA_16M = f"{LLAMA} --num-layers 9 --hidden-size 384 --num-attention-heads 6 --seq-length 256"
LLAMA_187M = f"{LLAMA} --num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
LARGE = Scale(GPU, 4, train_iters=3000, eval_iters=32, lr=1e-3, adam_beta2=0.95, vocab_size=8192, corpus=CPU.corpus)
SCALES = {
    "cpu": CPU,
    # "cpu" for arms at learning rates that were chosen on other seeds and other documents: "rates" is validated on what
    # "tuned" trains on, and never sees what "tuned" is validated on.
    "rates": replace(CPU, text_of="cpu", seeds=(101, 102), split="96,2,2"),
    "tuned": replace(CPU, text_of="cpu", seeds=(1, 2, 3, 4, 5, 6, 7, 8)),
    # 5.3M parameters, 3.1M tokens
    "larger": replace(CPU, shape=LARGER, train_iters=3000, eval_iters=128, text_of="cpu", seeds=(1,)),
    # 15.7M parameters, 13.1M tokens
    "llama": replace(
        CPU, shape=LLAMA_16M, micro_batch_size=4, train_iters=3200, adam_beta2=0.95, text_of="cpu", seeds=(1,)
    ),
    # 30M parameters, 25M tokens
    "gpu": LARGE,
    # 187M parameters, 39M tokens
    "gpu-llama": replace(
        LARGE, shape=LLAMA_187M, train_iters=1200, eval_iters=16, lr=6e-4, text_of="gpu", ranks=8, seeds=(1,)
    ),
    # to see that everything runs
    "tiny": Scale(TINY, 2, 3, 1, lr=1e-3, adam_beta2=0.95, vocab_size=400, corpus="--max-megabytes 3"),
}


@dataclass(frozen=True)
class Arm:
    """One way to travel: its name in the tables, and its flags.

    ``{half}`` stands for half of the scale's micro-batch size, ``{batch}`` for the samples of a step, ``{warmup}`` for
    the steps in which the learning rate warms up, ``{begun}`` for the checkpoint of an arm that ``begins`` with other
    flags, for this share of the steps. ``control``: the flags of the arm that it is compared with.
    """

    name: str
    flags: str
    control: str = ""  # the fp32 wire
    real_ranks: int | None = None  # each a node of its own, started by torchrun
    begins: str | None = None
    begins_share: float = 0.2

    @property
    def program(self) -> str:
        return "benchmarks/study_trials.py" if "--trial" in self.flags else "pretrain_gpt.py"


@dataclass(frozen=True)
class Group:
    """Arms that differ in one thing."""

    title: str
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class Experiment:
    """Groups of arms. Their page also has what study_pages.toml says of them.

    observed: what the log shows beside losses, and the table at the end of training. control: what the arms are
    compared with, in words.
    """

    title: str
    groups: tuple[Group, ...]
    observed: tuple[str, ...] = ()
    scale: str = "cpu"
    control: str = "the fp32 wire"


def group(
    title: str,
    arms: Mapping[str, str],
    common: str = "",
    control: str = "",
    real_ranks: int | None = None,
) -> Group:
    """Arms by name: the flags that all have in common, then each arm's."""
    all_flags = {name: f"{common} {flags}".strip() for name, flags in arms.items()}
    return Group(title, tuple(Arm(name, flags, control, real_ranks) for name, flags in all_flags.items()))


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


def with_and_without_element_scales(title: str, wire: str) -> Group:
    return group(title, {"block scales": wire, "and scales of elements": f"{wire} {ELEMENT_SCALES}"})


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
HIGHER_RATE = Arm("fp32 wire, 0.002", "--lr 0.002")
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
    arms.append(Arm("every 32 steps, fp32, a momentum of 0.9", f"{flags} 32"))
    return Group(f"{number} islands", tuple(arms))


ISLANDS = {number: islands(number) for number in (2, 4)}
