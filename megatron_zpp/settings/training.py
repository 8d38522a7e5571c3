"""Settings of training: batches and length, optimizer, schedule."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from megatron_zpp.fields import flag

_advanced = partial(flag, tier="advanced")
_free = partial(flag, resume="free")
_tuning = partial(_free, tier="advanced")
_batch = partial(flag, resume="--override-opt_param-scheduler")
_order = partial(flag, resume="--override-data")
_compared = partial(flag, resume="compared")
_WARMUPS = "lr_warmup_iters lr_warmup_fraction lr_warmup_samples lr_warmup_tokens"
_curriculum = partial(_order, needs="curriculum_min_length", at_least=1)
_count = partial(flag, at_most=2**53)  # samples or tokens
_non_negative = partial(flag, at_least=0)
_muon = partial(flag, effective_with="optimizer=muon", tier="experimental")
_wsd = partial(flag, effective_with="lr_decay_style=WSD")
_fraction = partial(flag, at_least=0, below=1)
_LENGTH = "--train-iters 1000"


@dataclass(frozen=True)
class TrainingSettings:
    """Batches, length of the run, evaluation."""

    micro_batch_size: int | None = _free(
        None,
        "samples per rank and forward pass",
        at_least=1,
        at_most=2**24,
        settles="micro-batch",
        deepspeed="train_micro_batch_size_per_gpu",
        first="Training",
    )
    global_batch_size: int | None = _batch(
        None,
        "samples per optimizer step; default micro-batch size * ranks",
        at_least=1,
        at_most=2**24,
        deepspeed="train_batch_size",
        first="Training",
    )
    rampup_batch_size: tuple[int, ...] | None = _batch(
        None,
        "start size, increment, samples over which the batch size grows",
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        at_least=1,
        at_most=2**53,
    )
    step_batch_size_schedule: tuple[str, ...] | None = _batch(
        None,
        "batch sizes from numbers of tokens on, as 0:384 200B:768; the last is --global-batch-size",
        nargs="+",
        metavar="TOKENS:SIZE",
    )
    train_iters: int | None = _compared(
        None, "optimizer steps to train", at_least=1, first="Training", in_plans=_LENGTH
    )
    train_samples: int | None = _compared(
        None, "samples to train, instead of --train-iters", at_least=1, at_most=2**53, in_plans=_LENGTH
    )
    train_tokens: int | None = _compared(
        None,
        "most tokens to train; may end the run before --train-iters or --train-samples",
        at_least=1,
        at_most=2**53,
        in_plans=_LENGTH,
    )
    seq_length: int | None = _order(
        None,
        "tokens per sample",
        at_least=1,
        at_most=2**27,
        deepspeed="curriculum_learning.max_difficulty",
        first="The model",
    )
    curriculum_min_length: int | None = _order(
        None,
        "first length of samples, which grow by 8 tokens for --curriculum-iters; default full length",
        at_least=8,
        deepspeed="curriculum_learning.min_difficulty",
    )
    curriculum_iters: int | None = _curriculum(
        None,
        "optimizer steps over which samples grow",
        deepspeed="curriculum_learning.schedule_config.total_curriculum_step",
    )
    seed: int = _order(1234, "seed of weights, data order, dropout, stochastic rounding", at_least=0, at_most=2**32 - 1)
    eval_iters: int = _free(100, "batches per evaluation", at_least=0, first="Checkpoints and logs")
    eval_interval: int | None = _free(
        None, "optimizer steps between evaluations; default none but the last", at_least=1, first="Checkpoints and logs"
    )
    eval_tasks: tuple[str, ...] | None = _free(
        None, "tasks of lm-evaluation-harness to evaluate on, after training", nargs="+", metavar="NAME"
    )
    eval_tasks_path: str | None = _free(
        None, "folder with the tasks' YAML files; default the harness's own tasks", metavar="DIR", needs="eval_tasks"
    )
    eval_tasks_interval: int | None = _free(
        None, "optimizer steps between evaluations on tasks; default none but the last", needs="eval_tasks", at_least=1
    )
    deterministic_mode: bool = _free(
        False, "choose torch's deterministic algorithms, for the same numbers in each run; slower on GPUs"
    )
    skip_train: bool = _free(False, "only evaluate")
    config: tuple[str, ...] | None = _free(
        None,
        "TOML or YAML files with settings by the names of their flags; the last one and the command line win",
        aliases=("--yaml-cfg",),
        nargs="+",
        metavar="FILE",
    )
    print_config: bool = _free(False, "print all settings that are not their defaults as a file for --config, and exit")
    dry_run: bool = _free(False, "check this command as its run would, print what it asks for and needs, and exit")
    dry_run_world_size: int | None = _free(
        None,
        "ranks of other machines for --dry-run; default the launcher's",
        needs="dry_run",
        at_least=1,
        at_most=2**20,
    )
    exit_interval: int | None = _free(None, "save and exit at iterations divisible by this", at_least=1)
    exit_duration_in_mins: float | None = _free(None, "save and exit after this many minutes", at_least=0)
    exit_signal_handler: bool = _free(False, "save and exit on SIGTERM and SIGUSR1, as with --save on Ctrl-C anyway")
    calculate_per_token_loss: bool = flag(
        False, "average the loss over all tokens of the batch, not over each micro-batch first", resume="noted"
    )
    no_check_for_nan_in_loss_and_grad: bool = _free(
        False, "do not stop because of NaN or Inf; such steps are still skipped"
    )
    max_nonfinite_steps: int | None = _tuning(
        None, "save and stop after N steps in a row with NaN or Inf; default 10, or 50 with a dynamic scale", at_least=1
    )
    loss_spike_factor: float | None = _advanced(
        None,
        "skip a step whose loss is above this multiple of the average of about 50 steps, as 2",
        above=1,
        resume="noted",
    )
    manual_gc: bool = _tuning(False, "collect Python garbage at log lines alone, at the same time on all ranks")


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer and regularization."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="noted")
    optimizer: str = flag(
        "adam",
        "adam is AdamW; muon is AdamW except for matrices",
        choices=("adam", "sgd", "muon"),
        resume="--no-load-optim",
    )
    lr: float | None = _non_negative(
        None,
        "peak learning rate",
        resume="compared",
        deepspeed="optimizer.params.lr",
        first="Training",
        in_plans="--lr 1e-4",
    )
    min_lr: float = _non_negative(0.0, "learning rate at the end of the decay", resume="compared", first="Training")
    decoupled_lr: float | None = _non_negative(
        None, "peak learning rate of embeddings and output layer; default --lr", resume="--override-opt_param-scheduler"
    )
    decoupled_min_lr: float | None = _non_negative(
        None,
        "their learning rate at the end of the decay; default --min-lr",
        needs="decoupled_lr",
        resume="--override-opt_param-scheduler",
    )
    weight_decay: float = _non_negative(
        0.01,
        "decoupled weight decay; not applied to biases and 1-D parameters",
        resume="compared",
        deepspeed="optimizer.params.weight_decay",
    )
    clip_grad: float = _non_negative(
        1.0,
        "clip the global gradient norm to this; 0 = off",
        deepspeed="gradient_clipping optimizer.params.max_grad_norm",
    )
    adam_beta1: float = _fraction(0.9, "Adam's first-moment decay")
    adam_beta2: float = _fraction(0.999, "Adam's second-moment decay")
    adam_eps: float = flag(1e-8, "Adam's epsilon", at_least=1e-37, deepspeed="optimizer.params.eps")
    sgd_momentum: float = _fraction(
        0.9, "SGD's momentum", effective_with="optimizer=sgd", deepspeed="optimizer.params.momentum"
    )
    muon_momentum: float = _muon(0.95, "Muon's momentum", at_least=0, below=1)
    muon_use_nesterov: bool = _muon(False, "Nesterov's momentum for Muon")
    muon_scale_mode: str = _muon(
        "spectral",
        "Muon's update for R rows, C columns: times sqrt(max(R, C)), sqrt(max(1, R/C)) or sqrt(R/C)",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
    )
    muon_extra_scale_factor: float = _muon(
        1.0, "scale Muon's update; 0.2 with spectral is as large as AdamW's", above=0
    )
    muon_period: int = _muon(
        1, "orthogonalize whole matrices every k-th step, each node's rows alone in between; 0 = never", at_least=0
    )
    muon_momentum_bits: int | None = _muon(
        None, "bits of the momentum that crosses nodes for whole matrices; default 16, exact", at_least=1
    )
    muon_stale_rows: bool = _muon(False, "between whole steps, complete each node's rows by those sent last")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (LoRA) beside frozen weights."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="model")
    lora_rank: int | None = _advanced(
        None,
        "train adapters of this rank beside the linear layers of --pretrained-checkpoint, which stay frozen",
        at_least=1,
    )
    lora_alpha: float = flag(32.0, "multiply the output of adapters by this / rank", above=0, needs="lora_rank")
    pretrained_checkpoint: str | None = flag(
        None,
        "folder of checkpoints whose latest has the frozen weights",
        metavar="DIR",
        needs="lora_rank",
        resume="noted",
    )


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning-rate schedule, counted in samples as in Megatron."""

    FLAGS: ClassVar[dict[str, str]] = dict(resume="compared")
    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(None, "steps over which to decay; default the length of the run", at_least=1)
    lr_decay_samples: int | None = _count(None, "samples over which to decay", at_least=1)
    lr_decay_tokens: int | None = _count(None, "tokens over which to decay", at_least=1)
    lr_warmup_style: str = flag(
        "linear", "shape of the warm-up; log: DeepSpeed's", choices=("linear", "log"), effective_with=_WARMUPS
    )
    lr_warmup_tokens: int = _count(0, "tokens of linear warm-up", at_least=0)
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", at_least=0, first="Training")
    lr_warmup_samples: int = _count(0, "samples of linear warm-up", at_least=0)
    lr_warmup_fraction: float | None = _fraction(None, "warm-up as a fraction of the decay length")
    lr_warmup_init: float = _non_negative(0.0, "learning rate at the start of the warm-up", effective_with=_WARMUPS)
    lr_wsd_decay_style: str = _wsd(
        "exponential", "shape of WSD's final decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = _wsd(None, "steps of WSD's final decay", at_least=1)
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume take the schedule from the flags",
        name="--override-opt_param-scheduler",
        resume="free",
        effective_with="load",
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume take the schedule from the checkpoint",
        name="--use-checkpoint-opt_param-scheduler",
        resume="free",
        effective_with="load",
    )
