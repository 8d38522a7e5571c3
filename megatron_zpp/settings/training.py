"""Settings of training: batches and length, optimizer, schedule."""

from dataclasses import dataclass
from functools import partial

from megatron_zpp.bounds import flag

_curriculum = partial(flag, needs="curriculum_min_length", at_least=1)
_count = partial(flag, at_most=2**53)  # of samples or tokens
_non_negative = partial(flag, at_least=0)
_fraction = partial(flag, at_least=0, below=1)


@dataclass(frozen=True)
class TrainingSettings:
    """Batches, length of the run, evaluation."""

    micro_batch_size: int | None = flag(None, "samples per rank and forward pass", at_least=1, at_most=2**24)
    global_batch_size: int | None = flag(
        None, "samples per optimizer step; default micro-batch size * ranks", at_least=1, at_most=2**24
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "start size, increment, samples over which the batch size grows",
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        at_least=1,
        at_most=2**53,
    )
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        None,
        "batch sizes from numbers of tokens on, as 0:384 200B:768; the last is --global-batch-size",
        nargs="+",
        metavar="TOKENS:SIZE",
    )
    decrease_batch_size_if_needed: bool = flag(
        False, "round down a batch size that does not divide evenly, instead of refusing it"
    )
    train_iters: int | None = flag(None, "optimizer steps to train", at_least=1)
    train_samples: int | None = flag(None, "samples to train, instead of --train-iters", at_least=1, at_most=2**53)
    train_tokens: int | None = flag(
        None, "most tokens to train; may end the run before --train-iters or --train-samples", at_least=1, at_most=2**53
    )
    seq_length: int | None = flag(None, "tokens per sample", at_least=1, at_most=2**27)
    curriculum_min_length: int | None = flag(
        None, "first length of samples, which grow for --curriculum-iters; default full length", at_least=1
    )
    curriculum_max_length: int | None = _curriculum(None, "last length of samples; default --seq-length")
    curriculum_iters: int | None = _curriculum(None, "optimizer steps over which samples grow")
    curriculum_length_step: int = _curriculum(8, "lengths of growing samples are multiples of this")
    seed: int = flag(1234, "seed of weights, data order, dropout, stochastic rounding", at_least=0, at_most=2**32 - 1)
    eval_iters: int = flag(100, "batches per evaluation", at_least=0)
    eval_global_batch_size: int | None = flag(
        None, "samples per batch of an evaluation; default the last batch size of training", at_least=1, at_most=2**24
    )
    eval_interval: int | None = flag(None, "optimizer steps between evaluations; default none but the last", at_least=1)
    eval_tasks: tuple[str, ...] | None = flag(
        None, "tasks of lm-evaluation-harness to evaluate on, after training", nargs="+", metavar="NAME"
    )
    eval_tasks_path: str | None = flag(
        None, "folder with the tasks' YAML files; default the harness's own tasks", metavar="DIR", needs="eval_tasks"
    )
    eval_tasks_interval: int | None = flag(
        None, "optimizer steps between evaluations on tasks; default none but the last", needs="eval_tasks", at_least=1
    )
    eval_tasks_limit: int | None = flag(
        None, "documents of each task to evaluate on, the first ones; default all", needs="eval_tasks", at_least=1
    )
    deterministic_mode: bool = flag(
        False, "choose torch's deterministic algorithms, for the same numbers in each run; slower on GPUs"
    )
    skip_train: bool = flag(False, "only evaluate")
    dry_run: bool = flag(False, "check this command as its run would, print what it asks for and needs, and exit")
    dry_run_world_size: int | None = flag(
        None,
        "ranks of other machines for --dry-run; default the launcher's",
        needs="dry_run",
        at_least=1,
        at_most=2**20,
    )
    exit_interval: int | None = flag(None, "save and exit at iterations divisible by this", at_least=1)
    exit_duration_in_mins: float | None = flag(None, "save and exit after this many minutes", at_least=0)
    exit_signal_handler: bool = flag(False, "save and exit on SIGTERM and SIGUSR1, as with --save on Ctrl-C anyway")
    calculate_per_token_loss: bool = flag(
        False, "average the loss over all tokens of the batch, not over each micro-batch first"
    )
    no_check_for_nan_in_loss_and_grad: bool = flag(
        False, "do not stop because of NaN or Inf; such steps are still skipped"
    )
    max_nonfinite_steps: int | None = flag(
        None, "save and stop after N steps in a row with NaN or Inf; default 10, or 50 with a dynamic scale", at_least=1
    )
    loss_spike_factor: float | None = flag(
        None, "skip a step whose loss is above this multiple of the average of about 50 steps, as 2", above=1
    )
    manual_gc: bool = flag(False, "collect Python garbage only every --manual-gc-interval steps")
    manual_gc_interval: int = flag(0, "see --manual-gc; 0 = never", at_least=0)


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and regularization."""

    optimizer: str = flag("adam", "adam is AdamW; muon is AdamW except for matrices", choices=("adam", "sgd", "muon"))
    lr: float | None = _non_negative(None, "peak learning rate")
    min_lr: float = _non_negative(0.0, "learning rate at the end of the decay")
    decoupled_lr: float | None = _non_negative(None, "peak learning rate of embeddings and output layer; default --lr")
    decoupled_min_lr: float | None = _non_negative(
        None, "their learning rate at the end of the decay; default --min-lr", needs="decoupled_lr"
    )
    weight_decay: float = _non_negative(0.01, "decoupled weight decay; not applied to biases and 1-D parameters")
    start_weight_decay: float | None = _non_negative(None, "weight decay at the start, with --weight-decay-incr-style")
    end_weight_decay: float | None = _non_negative(None, "weight decay at the end, with --weight-decay-incr-style")
    weight_decay_incr_style: str = flag(
        "constant", "how weight decay moves from start to end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = _non_negative(1.0, "clip the global gradient norm to this; 0 = off")
    adam_beta1: float = _fraction(0.9, "Adam's first-moment decay")
    adam_beta2: float = _fraction(0.999, "Adam's second-moment decay")
    adam_eps: float = flag(1e-8, "Adam's epsilon", at_least=1e-37)
    sgd_momentum: float = _fraction(0.9, "SGD's momentum")
    muon_momentum: float = _fraction(0.95, "Muon's momentum")
    muon_use_nesterov: bool = flag(False, "Nesterov's momentum for Muon")
    muon_num_ns_steps: int = flag(5, "Newton-Schulz steps that orthogonalize Muon's momentum", at_least=1, below=100)
    muon_scale_mode: str = flag(
        "spectral",
        "Muon's update for R rows, C columns: times sqrt(max(R, C)), sqrt(max(1, R/C)) or sqrt(R/C)",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
    )
    muon_extra_scale_factor: float = flag(1.0, "scale Muon's update; 0.2 with spectral is as large as AdamW's", above=0)
    muon_period: int = flag(
        1, "orthogonalize whole matrices every k-th step, each node's rows alone in between; 0 = never", at_least=0
    )
    muon_momentum_bits: int | None = flag(
        None, "bits of the momentum that crosses nodes for whole matrices; default 16, lossless", at_least=1
    )
    muon_stale_rows: bool = flag(False, "between whole steps, complete each node's rows by those sent last")
    use_apex: bool = flag(False, "NVIDIA Apex's fused optimizer and norms, which must be installed")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (LoRA) beside frozen weights."""

    lora_rank: int | None = flag(
        None, "train adapters of this rank beside the frozen weights of --pretrained-checkpoint", at_least=1
    )
    lora_alpha: float = flag(32.0, "multiply the output of adapters by this / rank", above=0, needs="lora_rank")
    lora_target_modules: tuple[str, ...] | None = flag(
        None, "linear layers that get adapters; default all of the blocks", nargs="+", metavar="NAME", needs="lora_rank"
    )
    pretrained_checkpoint: str | None = flag(
        None, "folder of checkpoints whose latest has the frozen weights", metavar="DIR", needs="lora_rank"
    )


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning-rate schedule, counted in samples as in Megatron."""

    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(None, "steps over which to decay; default the length of the run", at_least=1)
    lr_decay_samples: int | None = _count(None, "samples over which to decay", at_least=1)
    lr_decay_tokens: int | None = _count(None, "tokens over which to decay", at_least=1)
    lr_warmup_style: str = flag("linear", "shape of the warm-up; log: DeepSpeed's", choices=("linear", "log"))
    lr_warmup_tokens: int = _count(0, "tokens of linear warm-up", at_least=0)
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", at_least=0)
    lr_warmup_samples: int = _count(0, "samples of linear warm-up", at_least=0)
    lr_warmup_fraction: float | None = _fraction(None, "warm-up as a fraction of the decay length")
    lr_warmup_init: float = _non_negative(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = flag(
        "exponential", "shape of WSD's final decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of WSD's final decay", at_least=1)
    lr_wsd_decay_samples: int | None = _count(None, "samples of WSD's final decay", at_least=1)
    override_opt_param_scheduler: bool = flag(
        False, "on resume take the schedule from the flags", name="--override-opt_param-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "on resume take the schedule from the checkpoint", name="--use-checkpoint-opt_param-scheduler"
    )
