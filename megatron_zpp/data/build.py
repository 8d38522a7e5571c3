"""Builds a run's datasets from ``.bin/.idx`` files, or of random tokens."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_zpp.data.blended_dataset import BlendedDataset, normalize, shares
from megatron_zpp.data.chat_dataset import ChatDataset
from megatron_zpp.data.gpt_dataset import GPTDataset, SampleOptions, TooLittleDataError
from megatron_zpp.data.index_cache import IndexCache, Progress, no_progress
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.source import DataRequest, Datasets, DataSource, NumSamples, SplitDataset
from megatron_zpp.data.text.description import check_same_tokenizer
from megatron_zpp.data.text.sources import SPLIT_NAMES, Edges, Source, read_sources, split_sequences


class MockDataset(Dataset):
    """Random tokens instead of data, the same for every rank and run, to measure speed."""

    def __init__(self, num_samples: int, options: SampleOptions, vocab_size: int, split: int) -> None:
        self.num_samples, self.options, self.vocab_size, self.split = num_samples, options, vocab_size, split

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        random = np.random.default_rng((self.options.seed, self.split, index))
        return random.integers(self.vocab_size, size=self.options.seq_length + 1, dtype=np.int64)

    @property
    def order(self) -> dict[str, Any]:
        return {"mock_data": self.vocab_size, "seed": self.options.seed, "seq_length": self.options.seq_length}


def _open_mock(request: DataRequest) -> Datasets:
    make, size = MockDataset, request.tokenizer.vocab_size
    return Datasets(*(make(n, request.options, size, i) if n else None for i, n in enumerate(request.num_samples)))


def build_datasets(
    options: SampleOptions,
    *,
    num_samples: NumSamples,
    vocab_size: int | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    cache_path: str | None = None,
    mmap_tokens: bool = True,
    progress: Progress = no_progress,
    note: Callable[[str], None] = warnings.warn,
    **paths: Any,
) -> Datasets:
    """Build the train, validation and test datasets, equal on every rank, without communication.

    ``paths`` are the arguments of ``read_sources``; a split of 0 of ``num_samples`` is not built. ``vocab_size`` None
    leaves the ids unchecked. ``tokenizer``: the run's, described; a dataset of another one is refused. ``note`` gets a
    line for each evaluation that the default of ``split`` leaves no sample, and for datasets of unknown tokenizers.
    Raises FileNotFoundError or ValueError if data is missing, damaged or too little.
    """
    sources = read_sources(**paths)
    if sources[0] is None and num_samples[0]:
        raise ValueError("no training data: give the train split a share in --split, or --train-data-path")
    cache = IndexCache(cache_path, progress)
    files: dict[str, IndexedDataset] = {}

    def build_one(name: str, prefix: str, edges: Edges, size: int | None) -> GPTDataset | ChatDataset:
        if prefix not in files:
            files[prefix] = IndexedDataset(prefix, mmap_tokens)
            if vocab_size is not None:
                check_vocabulary(files[prefix], vocab_size, cache, (tokenizer or {}).get("type", ""))
            check_end_of_document(files[prefix], options)
            if tokenizer is not None:
                check_same_tokenizer(prefix, files[prefix].tokenizer, tokenizer)
        if options.sft:
            chats = split_sequences(files[prefix].num_documents, edges)
            return ChatDataset(files[prefix], chats, options, num_samples=size, name=name, cache=cache)
        sequences = split_sequences(len(files[prefix]), edges)
        return GPTDataset(files[prefix], sequences, options, num_samples=size, name=name, cache=cache)

    def build_split(name: str, source: Source | None, size: int | None) -> SplitDataset | None:
        """Build one dataset or blend of ``size`` samples or a few more; None: one epoch of each dataset."""
        if source is None or size == 0:
            return None
        prefixes, weights, edges = source
        if weights is None and len(prefixes) == 1:
            return build_one(name, prefixes[0], edges, size)
        to_build: Sequence[int | None] = [None] * len(prefixes)
        blend_size = size
        if weights is not None:
            if size is None:
                raise ValueError(f"a blend by weights has no epochs: how many samples of {name}?")
            weights = normalize(weights)
            targets, to_build = shares(weights, size)
            blend_size = sum(targets)
        parts = [build_one(name, prefix, edges, count) for prefix, count in zip(prefixes, to_build, strict=True)]
        blend = BlendedDataset(parts, weights, blend_size, name=name, cache=cache)
        if size is not None and len(blend) < size:
            once = f"prefixes without weights are read once each: {len(blend)} samples in the {name} split"
            fewer = "shorten the run" if name == "train" else "lower --eval-iters"
            raise ValueError(f"{once}, but the run asks for {size}; give each prefix a weight, or {fewer}")
        return blend

    def build_asked_for(name: str, source: Source | None, size: int | None) -> SplitDataset | None:
        try:
            return build_split(name, source, size)
        except TooLittleDataError as error:
            is_default = paths.get("split") is None and bool(paths.get("data_path"))
            if name == "train" or not is_default:
                raise
            note(f"nothing is evaluated on {name} data: by the default of --split, {error}")
            return None

    datasets = Datasets(*map(build_asked_for, SPLIT_NAMES, sources, num_samples))
    unknown = [prefix for prefix, indexed in files.items() if indexed.tokenizer is None]
    if tokenizer is not None and (tokenizer["prefix"] or tokenizer["suffix"]) and unknown:
        which = f"{unknown[0]}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}"
        note(f"{which} has no .tokenizer.json: assuming texts as this run's tokenizer makes them")
    return datasets


def check_vocabulary(indexed: IndexedDataset, vocab_size: int, cache: IndexCache, tokenizer_type: str = "") -> None:
    """Raise ValueError if ``indexed`` holds ids beyond ``vocab_size``. The result of a scan is cached."""
    if indexed.dtype.kind == "f":
        raise ValueError(f"{indexed.token_path} holds {indexed.dtype} numbers, not token ids")
    if indexed.dtype.kind == "u" and np.iinfo(indexed.dtype).max < vocab_size:
        return
    status = indexed.token_path.stat()
    smallest, largest = cache.arrays(
        indexed.prefix,
        f"{Path(indexed.prefix).name}-token-range",
        {**indexed.fingerprint, "bin_bytes": status.st_size, "bin_mtime_ns": status.st_mtime_ns},
        lambda advance: {"range": np.array(indexed.token_range(advance))},
        indexed.num_tokens,
    )["range"]
    if smallest < 0 or largest >= vocab_size:
        token = smallest if smallest < 0 else largest
        found = f"{indexed.token_path} holds token {token}, but the vocabulary has {vocab_size}"
        remedy = "use the tokenizer that the data was made with"
        if "SentencePiece" in tokenizer_type and vocab_size <= token < vocab_size + 7:
            remedy += ". Megatron-LM's SentencePieceTokenizer before February 2026 is MegatronSentencePieceTokenizer"
        raise ValueError(f"{found}: {remedy}")


def check_end_of_document(indexed: IndexedDataset, options: SampleOptions) -> None:
    """Raise ValueError if ``options`` use ends of documents, but none of up to 1,000 documents ends with that id."""
    if options.sft or not (options.eod_mask_loss or options.reset_position_ids or options.reset_attention_mask):
        return
    sampled = np.linspace(0, indexed.num_documents - 1, min(indexed.num_documents, 1000)).astype(np.int64)
    begins, ends = indexed.document_indices[sampled], indexed.document_indices[sampled + 1]
    last = [sequence for sequence in ends[ends > begins] - 1 if indexed.sequence_lengths[sequence]]
    found = {int(indexed.get(sequence, int(indexed.sequence_lengths[sequence]) - 1)[0]) for sequence in last}
    if found and options.eod not in found:
        none = f"no document of {indexed.prefix} ends with {options.eod}, the tokenizer's end-of-document id"
        flags = "--eod-mask-loss, --reset-position-ids and --reset-attention-mask"
        raise ValueError(f"{none}: make the data with --append-eod and the same tokenizer, or leave {flags} out")


def _open_files(request: DataRequest) -> Datasets:
    flags, paths = request.flags, ("data_path", "train_data_path", "valid_data_path", "split")
    return build_datasets(
        request.options,
        num_samples=request.num_samples,
        vocab_size=request.tokenizer.vocab_size,
        tokenizer=request.described,
        cache_path=flags.data_cache_path,
        mmap_tokens=not flags.no_mmap_bin_files,
        progress=request.progress,
        note=request.note,
        **{name: getattr(flags, name) for name in paths},
    )


FILES = DataSource(("data_path",), _open_files)
FILES_PER_SPLIT = DataSource(("train_data_path", "valid_data_path"), _open_files, excludes=("split",))
MOCK = DataSource(("mock_data",), _open_mock, excludes=("sft",), reads_text=False)
