"""Predict every candidate on a cluster, and rank those that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_zpp.architectures import Architecture
from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.models.transformer import Transformer
from megatron_zpp.planning.candidates import (
    MICRO_BATCH_SIZES,
    RECOMPUTATIONS,
    Layout,
    Travel,
    is_settled,
    layouts,
    travels,
)
from megatron_zpp.planning.cluster import ClusterSpec
from megatron_zpp.planning.predict import Prediction, estimate_on, predict
from megatron_zpp.settings.checks import SettingsError
from megatron_zpp.settings.groups import Settings
from megatron_zpp.training.estimate import Estimate

USABLE = 0.9  # of a GPU's memory: the rest is CUDA's, NCCL's and lost between blocks

# What the trainer asks for and a plan does not depend on; each with the flags that say it.
FILLED_IN = (
    (("--train-iters", "--train-samples", "--train-tokens"), "--train-iters 1000"),
    (("--lr",), "--lr 1e-4"),
    (("--data-path", "--train-data-path", "--mock-data"), "--mock-data"),
    (("--tokenizer-type", "--vocab-file"), "--tokenizer-type NullTokenizer --vocab-size {vocabulary}"),
)


@dataclass(frozen=True)
class Candidate:
    """A setting in a layout."""

    travel: Travel
    layout: Layout
    flags: str  # beside the user's


@dataclass(frozen=True)
class Outcome:
    """The fastest micro-batch and recomputation of a candidate that fits."""

    candidate: Candidate
    recompute: str
    prediction: Prediction
    flags: str  # all that the user's command lacks


@dataclass(frozen=True)
class Refused:
    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Plan:
    cluster: ClusterSpec
    outcomes: list[Outcome]  # fastest first
    refused: list[Refused]


def complete(flags: Sequence[str], cluster: ClusterSpec, vocabulary: int) -> tuple[list[str], list[str]]:
    """The flags with what a plan needs and they do not say, and what the user's command must get of that."""
    told = list(flags)
    kept = [] if {"--bf16", "--fp16"} & set(flags) else ["--bf16"]
    if "--global-batch-size" not in flags:
        kept += ["--global-batch-size", str(cluster.world_size)]
    told += kept
    for names, typed in FILLED_IN:
        if not set(names) & set(flags):
            told += typed.format(vocabulary=vocabulary).split()
    return told, kept


def make_plan(
    architecture: Architecture, flags: Sequence[str], vocabulary: int, cluster: ClusterSpec, usable: float = USABLE
) -> Plan:
    """Raises ValueError, or SettingsError, for flags that no candidate could be made of."""
    told, kept = complete(flags, cluster, vocabulary)
    outcomes: list[Outcome] = []
    refused: list[Refused] = []
    model: Transformer | None = None
    errors: list[SettingsError] = []
    for candidate in _candidates(architecture, told, cluster):
        words = [*told, *candidate.flags.split()]
        if not is_settled("micro-batch", flags):
            words += ["--micro-batch-size", "1"]
        try:
            settings = parse_settings(architecture, words, cluster.world_size, note=lambda _: None)
        except SettingsError as error:
            errors.append(error)
            refused.append(Refused(candidate, error.messages[0]))
            continue
        model = model if model is not None else architecture.build_model(settings.model, vocabulary)
        found = _best(architecture, candidate, settings, vocabulary, cluster, model, flags, usable)
        if isinstance(found, Refused):
            refused.append(found)
        else:
            outcomes.append(dataclasses.replace(found, flags=" ".join([*kept, *found.flags.split()])))
    if errors and len(errors) == len(refused) and not outcomes:
        raise errors[0]
    outcomes.sort(key=lambda outcome: -outcome.prediction.tokens_per_second)
    return Plan(cluster, outcomes, refused)


def _candidates(architecture: Architecture, told: Sequence[str], cluster: ClusterSpec) -> Iterator[Candidate]:
    words = [*told] if "--micro-batch-size" in told else [*told, "--micro-batch-size", "1"]
    settings = parse_settings(architecture, words, cluster.world_size, note=lambda _: None)
    if settings.distributed.islands > 1:
        raise ValueError(
            "islands are not planned: leave --islands out; tools/estimate.py counts their memory and bytes"
        )
    for layout in layouts(cluster, settings.model, told):
        for travel, typed in travels(cluster, told, settings.training.train_iters or 1000):
            yield Candidate(travel, layout, f"{typed} {layout.flags}".strip())


def _best(
    architecture: Architecture,
    candidate: Candidate,
    settings: Settings,
    vocabulary: int,
    cluster: ClusterSpec,
    model: Transformer,
    flags: Sequence[str],
    usable: float,
) -> Outcome | Refused:
    """Over micro-batches and recomputation."""
    memory = usable * cluster.memory_gb * 1e9
    best: Outcome | None = None
    least: Estimate | None = None
    reason = ""
    for words, variant, recompute in _variants(settings, flags):
        try:
            needs = estimate_on(architecture, variant, vocabulary, cluster, model)
        except ValueError as error:
            reason = str(error)
            continue
        if least is None or needs.memory < least.memory:
            least = needs
        if needs.memory > memory:
            continue
        prediction = predict(architecture, variant, cluster, needs, model)
        if best is None or prediction.time.seconds < best.prediction.time.seconds:
            best = Outcome(candidate, recompute, prediction, f"{candidate.flags} {words}".strip())
    if best is not None:
        return best
    if least is None:
        return Refused(candidate, reason)
    return Refused(candidate, f"needs {least.memory / 1e9:.0f} GB of a GPU's {memory / 1e9:.0f} that can be used")


def _variants(settings: Settings, flags: Sequence[str]) -> Iterator[tuple[str, Settings, str]]:
    """Flags, the settings that they make, and the name of what is recomputed."""
    sizes = [settings.training.micro_batch_size] if is_settled("micro-batch", flags) else MICRO_BATCH_SIZES
    recomputations = {"": "as given"} if is_settled("recompute", flags) else RECOMPUTATIONS
    for size in sizes:
        training = dataclasses.replace(settings.training, micro_batch_size=size)
        typed = "" if is_settled("micro-batch", flags) else f"--micro-batch-size {size}"
        for words, name in recomputations.items():
            activation = settings.activation
            if name == "selective":
                activation = dataclasses.replace(activation, recompute_granularity="selective")
            elif name == "all":
                activation = dataclasses.replace(
                    activation, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
                )
            yield (
                f"{typed} {words}".strip(),
                dataclasses.replace(settings, training=training, activation=activation),
                name,
            )
