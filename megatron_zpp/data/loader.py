"""Turns a dataset into the micro-batches of a data-parallel rank."""

import ctypes
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_zpp.data.chat_dataset import CHAT_BEGINS, HAS_LOSS, ID
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.source import SplitDataset
from megatron_zpp.data.text_stream import TextStream

# tokens int64 [B, L], labels int64 [B, L], loss_mask float32 [B, L]; if asked for, position_ids int64 [B, L] and
# cu_seqlens int32 [D + 1]: the starts of the D documents of the flattened batch, and B * L.
Batch = dict[str, Tensor]

PADDING = np.iinfo(np.int64).min  # no id, not even in files of signed integers
_PR_SET_PDEATHSIG = 1  # prctl's option for the signal that a process gets when its parent ends
PREFETCHED_CALLS = 4  # per worker: enough to ride out a slow read


def build_loader(
    dataset: SplitDataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int,
    device: torch.device | str,
    dataloader_type: str = "single",
) -> Iterator[Batch]:
    """Iterate over the batches of one data-parallel rank from ``consumed_samples`` on.

    A batch depends on the arguments alone, so a run resumes anywhere. The iterator does not stop: it raises ValueError
    when the dataset has no further full batch, and the ValueError or OSError of a file that can't be read.
    """
    options, pin_memory = dataset.options, torch.device(device).type == "cuda"
    if isinstance(dataset, TextStream):
        call = functools.partial(_call_in_workers, num_workers=num_workers)
        micro_batches = dataset.micro_batches(call, consumed_samples, micro_batch_size, dp_rank, dp_size)
    else:
        order, read = cyclic_order if dataloader_type == "cyclic" else single_order, functools.partial(_read, dataset)
        numbers = order(len(dataset), consumed_samples, micro_batch_size, dp_rank, dp_size)  # type: ignore[arg-type]
        micro_batches = _call_in_workers(read, numbers, num_workers)

    def batches() -> Iterator[Batch]:
        for ids in micro_batches:
            batch = make_batch(ids, options)
            yield {name: tensor.pin_memory() for name, tensor in batch.items()} if pin_memory else batch
        total = len(dataset)  # type: ignore[arg-type]
        over = f"out of data: the dataset has {total} samples, and the run asks for more from {consumed_samples} on"
        raise ValueError(f"{over}; shorten the run or give more data")

    return batches()


def _read(dataset: Any, numbers: list[int]) -> NDArray[np.int64]:
    return stack_samples([dataset[number] for number in numbers], dataset.options.seq_length + 1)


def _call_in_workers(function: Callable[[Any], Any], arguments: Iterable[Any], num_workers: int) -> Iterator[Any]:
    """Yield ``function`` of each argument, in order, from workers that start with the first; raise what they raise."""
    loader = DataLoader(
        _Calls(function),
        batch_size=None,
        sampler=arguments,
        num_workers=num_workers,
        prefetch_factor=PREFETCHED_CALLS if num_workers else None,
        # Workers send arrays through a pipe: each tensor would be a shared-memory file, ten times slower.
        collate_fn=_identity,
        # The loader draws a seed for its workers: a separate generator leaves dropout's alone.
        generator=torch.Generator(),
        worker_init_fn=_start_worker,
    )
    for result in loader:
        if isinstance(result, Exception):
            raise result
        yield result


class _Calls(Dataset):
    """Results by their arguments; or what is wrong with a file, as a value.

    Raised in a worker it would arrive with that process's traceback as its message.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, argument: Any) -> Any:
        try:
            return self.function(argument)
        except (ValueError, OSError) as error:
            return error


def _identity(result: object) -> object:
    return result


def stack_samples(samples: Sequence[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """Stack samples of ``length`` ids or fewer, padded with ``PADDING``; int64 [B, length]."""
    ids = np.full((len(samples), length), PADDING)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample)] = sample
    return ids


def make_batch(ids: NDArray[np.int64], options: SampleOptions) -> Batch:
    """Make the model's inputs of samples [B, L + 1]; ``PADDING`` becomes token 0 without loss.

    An end-of-document token belongs to the document that it ends. Chats say where they begin, and what has loss.
    """
    is_token = ids != PADDING
    begins, has_loss = np.zeros_like(is_token), is_token  # [B, L + 1]: a document begins here; it is to be predicted
    if options.sft:
        begins = is_token & (ids & CHAT_BEGINS > 0)
        has_loss = is_token & (ids & HAS_LOSS > 0) & ~begins  # the chat before predicts nothing of this one
        begins[:, 1:] |= is_token[:, :-1] & ~is_token[:, 1:]  # padding is a document
        ids = ids & ID
    ids = np.where(is_token, ids, 0)
    tokens, labels, loss_mask = (np.ascontiguousarray(part) for part in (ids[:, :-1], ids[:, 1:], has_loss[:, 1:]))
    batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
    if options.eod_mask_loss:
        loss_mask &= tokens != options.eod  # nothing can predict what follows
    batch["loss_mask"] = torch.from_numpy(loss_mask.astype(np.float32))
    if options.reset_position_ids or options.reset_attention_mask:
        if not options.sft:
            begins[:, 1:] = ids[:, :-1] == options.eod
        begins = begins[:, :-1]  # [B, L]
        begins[:, 0] = True  # the sample
        if options.reset_position_ids:
            positions = np.arange(options.seq_length)
            last_begin = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
            batch["position_ids"] = torch.from_numpy(positions - last_begin)
        if options.reset_attention_mask:
            cu_seqlens = np.append(np.flatnonzero(begins), begins.size)
            batch["cu_seqlens"] = torch.from_numpy(cu_seqlens.astype(np.int32))
    return batch


def _start_worker(worker: int) -> None:
    """Ignore signals to the whole job, but end with the rank.

    Ctrl-C may ask ranks to save and exit; a rank reads until then and ends its workers, unless it is killed.
    """
    rank = multiprocessing.parent_process()
    if sys.platform == "linux" and multiprocessing.get_start_method() == "fork":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if rank is not None and os.getppid() != rank.pid:
            os._exit(1)  # it died before this call
    elif rank is not None:  # the worker is a child of a server, which outlives the rank
        threading.Thread(target=_end_with, args=(rank.sentinel,), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one thread


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


# Which samples a rank reads, in which order: each function yields its micro-batches as lists of sample numbers, from
# ``consumed_samples`` on. A block is the ``micro_batch_size * num_ranks`` samples that all ranks read at a time.


def single_order(
    total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Read the dataset once, in its order: rank r takes the r-th part of each block. An incomplete block is dropped.

    Global batch k holds samples k * G to (k + 1) * G for any number of ranks, micro-batch size and accumulation, so a
    run resumes from the number of consumed samples alone.
    """
    block = micro_batch_size * num_ranks
    for first in range(consumed_samples, total_samples - block + 1, block):
        yield list(range(first + micro_batch_size * rank, first + micro_batch_size * (rank + 1)))


def cyclic_order(
    total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Read the dataset without end, each epoch in another random order.

    As in Megatron the epoch's number seeds ``torch.randperm``, and rank r takes every n-th sample of a block. Unlike
    Megatron's, an epoch holds every sample for any layout; a block may span two epochs. Where the dataset is a multiple
    of the block both are the same.
    """
    permutation = functools.lru_cache(maxsize=1)(functools.partial(_permutation, total_samples))
    positions = itertools.count(consumed_samples + rank, num_ranks)
    while total_samples:
        places = (divmod(position, total_samples) for position in itertools.islice(positions, micro_batch_size))
        yield [int(permutation(epoch)[place]) for epoch, place in places]


def _permutation(size: int, epoch: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
