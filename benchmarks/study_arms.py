"""Scales, arms of training, groups of arms, and experiments: the study consists of these."""

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
LLAMA_5M = f"{LLAMA} --num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 256"
LLAMA_16M = f"{LLAMA} --num-layers 9 --hidden-size 384 --num-attention-heads 6 --seq-length 256"
LLAMA_187M = f"{LLAMA} --num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
LARGE = Scale(GPU, 4, train_iters=3000, eval_iters=32, lr=1e-3, adam_beta2=0.95, vocab_size=8192, corpus=CPU.corpus)
LOG_INTERVAL = 20  # steps
LONGER = replace(CPU, micro_batch_size=4, train_iters=3200, adam_beta2=0.95, text_of="cpu")  # 13.1M tokens
SCALES = {
    "cpu": CPU,
    # "cpu" for arms at learning rates that were chosen on other seeds and other documents: "rates" is validated on what
    # "tuned" trains on, and never sees what "tuned" is validated on.
    "rates": replace(CPU, text_of="cpu", seeds=(101, 102), split="96,2,2"),
    "tuned": replace(CPU, text_of="cpu", seeds=(1, 2, 3, 4, 5, 6, 7, 8)),
    # 5.2M parameters, and their rates: 13.1M and 3.3M tokens
    "5m": replace(LONGER, shape=LLAMA_5M),
    "5m-rates": replace(LONGER, shape=LLAMA_5M, train_iters=800, seeds=(101,), split="96,2,2"),
    "llama": replace(LONGER, shape=LLAMA_16M, seeds=(1,)),  # 15.7M parameters
    "gpu": LARGE,  # 30M parameters, 25M tokens
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
