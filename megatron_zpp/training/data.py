"""Build a run's datasets from its settings, and read micro-batches from them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_zpp.checkpoint.meta import Counters
from megatron_zpp.data.blended_dataset import BlendedDataset
from megatron_zpp.data.chat_dataset import ChatDataset
from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions
from megatron_zpp.data.loader import Batch, build_loader
from megatron_zpp.data.source import DataRequest, Datasets, SplitDataset
from megatron_zpp.data.sources import chosen_sources
from megatron_zpp.data.text.description import format_description
from megatron_zpp.data.text.packages import load_package
from megatron_zpp.data.text.sources import SPLIT_NAMES
from megatron_zpp.data.text.tokenizers import Tokenizer, build_tokenizer
from megatron_zpp.data.text_stream import TextStream
from megatron_zpp.metrics.progress import progress
from megatron_zpp.parallel.distributed import errors_on_all_ranks, gather_if_any, print_once
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.settings.resolved import ResolvedSettings, ResolvedTokenizer, ResolvedTraining
from megatron_zpp.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron_zpp.integrations.lm_eval import Tasks


MANY_EPOCHS = 4


def build_data(
    settings: ResolvedSettings, tokenizer: Tokenizer, described: Mapping[str, Any], num_samples: tuple[int, int, int]
) -> Datasets:
    """Build the datasets. described: the tokenizer; num_samples: to train, validate and test."""
    print_once(f"  tokenizer: {format_description(described)}")
    training, data = settings.training, settings.data
    options = SampleOptions(
        seq_length=training.seq_length,
        seed=training.seed,
        eod=tokenizer.eod,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids or data.sft,
        reset_attention_mask=data.reset_attention_mask or data.sft,
        sft=data.sft,
    )
    (source,) = chosen_sources(data).values()
    shown = partial(progress, any_rank=True, line_every=10.0)  # by the rank that builds: its node's others wait for it
    datasets = source.open(
        DataRequest(data, options, num_samples, tokenizer, described, shown, lambda text: print_once(f"note: {text}"))
    )
    for name, dataset in zip(SPLIT_NAMES, datasets, strict=True):
        for part in dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]:
            if isinstance(part, ChatDataset):
                print_once(f"  {name}: {part.describe()}")
    if datasets.train is not None:
        for line in describe_length(datasets.train, num_samples[0], training):
            print_once(line)
    return datasets


def describe_length(train: SplitDataset, num_samples: int, training: ResolvedTraining) -> Iterator[str]:
    """Yield the tokens and epochs of a run of ``num_samples``, and a warning where it repeats data too often."""
    at_most = "" if training.curriculum_min_length is None else "at most "
    length = f"  train: {at_most}{num_samples * training.seq_length:,} tokens in {num_samples:,} samples"
    if not isinstance(train, GPTDataset | ChatDataset | BlendedDataset):  # it has no epochs
        yield length
        return
    parts = train.datasets if isinstance(train, BlendedDataset) else [train]
    weights = (train.weights if isinstance(train, BlendedDataset) else None) or [1.0]
    epochs = [weight * num_samples / part.samples_per_epoch for part, weight in zip(parts, weights, strict=True)]
    most = max(epochs)
    least = f"{min(epochs):.3g} to " if len(epochs) > 1 else ""
    yield f"{length}, {least}{most:.3g} epochs"
    if most > MANY_EPOCHS:
        prefix = parts[epochs.index(most)].indexed.prefix
        repeats = f"WARNING: {prefix} is read {most:.3g} times, and data teach little after {MANY_EPOCHS} epochs"
        yield f"{repeats} (arXiv 2305.16264): give more data, or end earlier"


def find_tokenizer(names: ResolvedTokenizer) -> Tokenizer:
    return build_tokenizer(**dataclasses.asdict(names))


def load_tasks(training: ResolvedTraining) -> Tasks | None:
    """Load the tasks of ``--eval-tasks``. Raises ValueError for one that does not exist, ImportError."""
    if training.eval_tasks is None:
        return None
    load_package("lm_eval", "--eval-tasks", "eval")
    from megatron_zpp.integrations.lm_eval import Tasks

    return Tasks(training.eval_tasks, training.eval_tasks_path, length=training.seq_length)


def check_same_data_on_all_ranks(datasets: Datasets) -> None:
    """Each node reads its own copy of the data: refuse copies that differ."""
    ours = json.dumps([split.order for split in datasets if split is not None])
    of_rank_0 = [ours]
    dist.broadcast_object_list(of_rank_0)
    differing = gather_if_any(dist.get_rank() if ours != of_rank_0[0] else None)
    with errors_on_all_ranks():
        others = [rank for rank in differing if rank is not None]
        if others:
            differs = f"ranks {', '.join(map(str, others))} read other data than rank 0: the files differ between nodes"
            raise ValueError(f"{differs}; copy the files of one node to all")


def resume_streams(datasets: Datasets, meta: Mapping[str, Any], counters: Counters, mesh: Mesh) -> None:
    """Go on in streams of text where ``meta`` says; at their start where it is empty. Raises ValueError."""
    # {data-parallel rank: {split: position}}. A run that only evaluates may have other text, and begins at its start.
    saved = dict(meta.get("streams") or []) if datasets.train is not None else {}
    for split, read in (("train", counters.consumed_train_samples), ("valid", counters.consumed_valid_samples)):
        if not isinstance(stream := getattr(datasets, split), TextStream):
            continue
        if meta and datasets.train is not None and len(saved) != mesh.dp_size:
            divided = f"the text was divided among {len(saved)} data-parallel ranks, and is now among {mesh.dp_size}"
            raise ValueError(f"{divided}: give the same number, or --override-data, which reads it from its start")
        start = {"samples": read // mesh.dp_size, "state": None, "skip": 0}
        stream.begin_at(saved[mesh.dp_rank].get(split, start) if saved else start)


def batches_of(trainer: Trainer, split: str, consumed_samples: int) -> Iterator[Batch] | None:
    """Iterate over this rank's micro-batches of a split from ``consumed_samples`` on; None without such data."""
    dataset, mesh = getattr(trainer.datasets, split), trainer.mesh
    if dataset is None:
        return None
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=trainer.settings.training.micro_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_workers=trainer.settings.data.num_workers,
        device=trainer.device,
        dataloader_type=trainer.settings.data.dataloader_type,
    )
