"""Learning rate and weight decay as pure functions of the samples trained on, by Megatron's formulas."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zpp.optim.batch_size import BatchSchedule
from megatron_zpp.settings.groups import OptimizerSettings, ScheduleSettings
from megatron_zpp.settings.resolved import ResolvedTraining

_DECAYS: dict[str, Callable[[float], float]] = {  # from 1 at the begin of a decay (0) to 0 at its end (1)
    "linear": lambda ratio: 1 - ratio,
    "cosine": lambda ratio: 0.5 * (1 + math.cos(math.pi * ratio)),
    "exponential": lambda ratio: 2 * 0.5**ratio - 1,
    "minus_sqrt": lambda ratio: 1 - math.sqrt(ratio),
}
_STYLES = (*_DECAYS, "constant", "inverse-square-root", "WSD")


@dataclass(frozen=True)
class Schedule:
    """The whole schedule of a run, all lengths in samples.

    As in Megatron, an optimizer step uses the values at the samples that the steps *before* it trained on. With
    warm-up, the first step therefore runs at ``warmup_init_lr``: at its default, 0, that step changes nothing. We keep
    this, so that step k has the same learning rate in both. A skipped step (fp16 overflow) does not move the schedule.
    """

    max_lr: float
    min_lr: float
    warmup_init_lr: float
    warmup_samples: float  # a fraction of the decay length need not be whole
    decay_samples: int
    decay_style: str
    wsd_decay_samples: int
    wsd_decay_style: str
    weight_decay: float
    warmup_log_steps: float = 0  # optimizer steps of a logarithmic warm-up; 0: it is linear

    @classmethod
    def from_settings(
        cls, optimizer: OptimizerSettings, schedule: ScheduleSettings, training: ResolvedTraining, batch: BatchSchedule
    ) -> Schedule:
        """Convert lengths to samples: iterations to what ``batch`` consumes in them, tokens by ``--seq-length``.

        Raises ValueError for lengths in the wrong unit (``--train-iters`` goes with ``--lr-*-iters``), given twice or
        missing.
        """
        if optimizer.lr is None:
            raise ValueError("--lr is required: the peak learning rate")
        _check_units(schedule, training)

        warmup_samples: float
        if training.train_iters is not None:
            run_samples = batch.samples_after(training.train_iters)
            decay_iters = schedule.lr_decay_iters
            decay_samples = run_samples if decay_iters is None else batch.samples_after(decay_iters)
            warmup_samples = batch.samples_after(schedule.lr_warmup_iters)
        else:
            assert training.train_samples is not None  # by _check_units
            run_samples = training.train_samples
            decay_samples = run_samples if schedule.lr_decay_samples is None else schedule.lr_decay_samples
            warmup_samples = schedule.lr_warmup_samples
        if schedule.lr_decay_tokens is not None:
            decay_samples = math.ceil(schedule.lr_decay_tokens / training.seq_length)
        if schedule.lr_warmup_tokens:
            warmup_samples = schedule.lr_warmup_tokens / training.seq_length
        if schedule.lr_warmup_fraction is not None:
            warmup_samples = schedule.lr_warmup_fraction * decay_samples

        if schedule.lr_decay_style == "WSD" and schedule.lr_wsd_decay_iters is None:
            raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters")
        warmup_log_steps = 0.0
        if schedule.lr_warmup_style == "log" and warmup_samples > 0:
            warmup_log_steps = max(2.0, warmup_samples / batch.global_batch_size(0))
        result = cls(
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup_init_lr=schedule.lr_warmup_init,
            warmup_samples=warmup_samples,
            decay_samples=decay_samples,
            decay_style=schedule.lr_decay_style,
            # Counted backwards from the end, where the batch has its full size.
            wsd_decay_samples=(schedule.lr_wsd_decay_iters or 0) * batch.global_batch_size(run_samples),
            wsd_decay_style=schedule.lr_wsd_decay_style,
            weight_decay=optimizer.weight_decay,
            warmup_log_steps=warmup_log_steps,
        )
        result._check()
        result.decoupled_lr(optimizer, 0)
        return result

    def decoupled_lr(self, optimizer: OptimizerSettings, samples: float) -> float | None:
        """Return the learning rate of word embeddings and output layer; None: as the rest. Raises ValueError."""
        if optimizer.decoupled_lr is None:
            return None
        least = self.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        if not max(least, self.warmup_init_lr) <= optimizer.decoupled_lr:
            bounds = f"--decoupled-min-lr {least}, by default --min-lr, or below --lr-warmup-init {self.warmup_init_lr}"
            raise ValueError(f"--decoupled-lr {optimizer.decoupled_lr} is below {bounds}")
        return dataclasses.replace(self, max_lr=optimizer.decoupled_lr, min_lr=least).lr(samples)

    def lr(self, samples: float) -> float:
        """Learning rate of the step that follows ``samples`` trained samples."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            rise = self.max_lr - self.warmup_init_lr
            if not self.warmup_log_steps:
                return self.warmup_init_lr + rise * samples / self.warmup_samples
            steps = samples / self.warmup_samples * self.warmup_log_steps
            return self.warmup_init_lr + rise * min(1.0, math.log(1 + steps) / math.log(self.warmup_log_steps))
        if self.decay_style == "constant":
            return self.max_lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            # Continuous with the end of the warm-up; max(..., 1) keeps it finite without one.
            ratio = max(self.warmup_samples, 1) / max(samples, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(ratio))
        begin, style = self.warmup_samples, self.decay_style
        if style == "WSD":
            begin, style = self.decay_samples - self.wsd_decay_samples, self.wsd_decay_style
            if samples <= begin:
                return self.min_lr + (self.max_lr - self.min_lr)
        # The decay is longer than the warm-up (see _check), so the length is positive.
        coefficient = _DECAYS[style]((samples - begin) / (self.decay_samples - begin))
        return self.min_lr + coefficient * (self.max_lr - self.min_lr)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; ``resume_schedule`` compares them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Schedule:
        """Raises ValueError for what is no ``state_dict``."""
        fields = dataclasses.fields(cls)
        if state.get("weight_decay_style") == "constant":  # saved when weight decay could still grow over a run
            ramp = ("start_weight_decay", "end_weight_decay", "weight_decay_samples", "weight_decay_style")
            weight_decay = state.get("end_weight_decay")
            state = {name: value for name, value in state.items() if name not in ramp} | {"weight_decay": weight_decay}
        wrong = sorted({field.name for field in fields} ^ state.keys())
        for field in fields:
            value = state.get(field.name, 0)
            if field.type in ("str", str):
                is_wrong = value not in (_DECAYS if field.name == "wsd_decay_style" else _STYLES)
            else:
                is_wrong = type(value) not in (int, float) or not 0 <= value < 2**63
            if is_wrong:
                wrong.append(field.name)
        if wrong:
            raise ValueError(f"{reprlib.repr(', '.join(wrong))} missing or wrong")
        schedule = cls(**state)
        schedule._check()
        return schedule

    def unused(self) -> set[str]:
        """Return the values that no learning rate depends on."""
        unused = set()
        if self.decay_style == "constant":
            unused |= {"min_lr", "decay_samples"}
        if self.decay_style != "WSD":
            unused |= {"wsd_decay_samples", "wsd_decay_style"}
        if self.warmup_samples == 0:
            unused |= {"warmup_init_lr", "warmup_log_steps"}
        return unused

    def _check(self) -> None:
        if self.max_lr < 0 or not 0 <= self.min_lr <= self.max_lr:
            raise ValueError(f"need 0 <= --min-lr <= --lr, but --min-lr is {self.min_lr} and --lr is {self.max_lr}")
        if not 0 <= self.warmup_init_lr <= self.max_lr:
            raise ValueError(f"--lr-warmup-init {self.warmup_init_lr} is not between 0 and --lr {self.max_lr}")
        if self.decay_samples < 1:
            raise ValueError("the learning-rate decay has no length; give a longer run or --lr-decay-iters/-samples")
        if not 0 <= self.warmup_samples < self.decay_samples:
            wrong = f"the warm-up of {self.warmup_samples:g} samples must be below the decay's {self.decay_samples}"
            raise ValueError(f"{wrong}, which includes it; shorten it or lengthen --lr-decay-iters/-samples")
        if self.decay_style == "WSD" and not 1 <= self.wsd_decay_samples <= self.decay_samples - self.warmup_samples:
            room = f"the {self.decay_samples - self.warmup_samples:g} between the warm-up and the end of the decay"
            raise ValueError(f"WSD's final decay of {self.wsd_decay_samples} samples must fit into {room}")


def resume_schedule(
    from_flags: Schedule, saved: dict[str, Any], *, override: bool = False, use_checkpoint: bool = False
) -> Schedule:
    """Choose the schedule with which to continue from a checkpoint that holds ``saved`` (a ``Schedule.state_dict``).

    ``override``: the flags win. ``use_checkpoint``: the checkpoint wins. With neither they must agree, as in Megatron,
    in all values that some step depends on: a constant schedule has no length. Raises ValueError if they differ.
    """
    if override:
        return from_flags
    if (style := saved.get("weight_decay_style")) in ("linear", "cosine"):
        grew = f"the checkpoint's schedule: its weight decay grew over the run ({style}), which went"
        raise ValueError(f"{grew}: --override-opt_param-scheduler goes on with --weight-decay")
    try:
        before = Schedule.from_state_dict(saved)
    except ValueError as error:
        damaged = f"the checkpoint's schedule is damaged, or of another version ({error})"
        raise ValueError(f"{damaged}: use the flags' with --override-opt_param-scheduler") from error
    if use_checkpoint:
        return before
    unused = before.unused() & from_flags.unused()
    values = dataclasses.asdict(before)
    differences = [
        f"{name} {values[name]} in the checkpoint, {value} by the flags"
        for name, value in dataclasses.asdict(from_flags).items()
        if values[name] != value and name not in unused
    ]
    if differences:
        changed = f"the schedule changed since the checkpoint was saved: {'; '.join(differences)}"
        same = "Give the same (a longer run keeps the decay with --lr-decay-iters or --lr-decay-samples)"
        flags = "--override-opt_param-scheduler, or the checkpoint's with --use-checkpoint-opt_param-scheduler"
        raise ValueError(f"{changed}. {same}, or choose the flags' with {flags}")
    return from_flags


def set_lr_and_weight_decay(
    optimizer: torch.optim.Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    """Set this step's values. Groups built without weight decay stay without."""
    for group in optimizer.param_groups:
        group["lr"] = decoupled_lr if group.get("decoupled") else lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _check_units(schedule: ScheduleSettings, training: ResolvedTraining) -> None:
    if (training.train_iters is None) == (training.train_samples is None):
        raise ValueError("give the length of the run as either --train-iters or --train-samples, or as --train-tokens")
    in_iters, in_samples = training.train_iters is not None, training.train_samples is not None
    for name in ("lr-decay", "lr-warmup"):
        for unit, allowed, instead in (("iters", in_iters, "samples"), ("samples", in_samples, "iters")):
            value = getattr(schedule, f"{name}-{unit}".replace("-", "_"))
            if value and not allowed:
                raise ValueError(f"--{name}-{unit} does not go with --train-{instead}; use --{name}-{instead}")
    fraction = schedule.lr_warmup_fraction
    if schedule.lr_decay_tokens is not None and (schedule.lr_decay_iters or schedule.lr_decay_samples):
        raise ValueError("give the decay once: --lr-decay-tokens or --lr-decay-iters/-samples")
    warmups = [schedule.lr_warmup_tokens, schedule.lr_warmup_iters or schedule.lr_warmup_samples, fraction is not None]
    if sum(map(bool, warmups)) > 1:
        raise ValueError("give the warm-up once: --lr-warmup-fraction, -tokens, -iters or -samples")
