"""The interface of a data source: what it declares, and what it gets to build a run's datasets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.index_cache import Progress
from megatron_zpp.data.text.tokenizers import Tokenizer

NumSamples = tuple[int | None, int | None, int | None]  # for train, valid and test; None: one epoch


class SplitDataset(Protocol):
    """The samples of a split; ``order``: all that they depend on, wherever the files are."""

    options: SampleOptions

    @property
    def order(self) -> dict[str, Any]: ...


class Datasets(NamedTuple):
    """The datasets of a run; None for a split that has no data or needs no samples."""

    train: SplitDataset | None
    valid: SplitDataset | None
    test: SplitDataset | None


@dataclass(frozen=True)
class DataRequest:
    """Everything that a data source needs to build a run's datasets."""

    flags: Any  # settings.job.DataSettings, which this folder does not import
    options: SampleOptions
    num_samples: NumSamples
    tokenizer: Tokenizer
    described: Mapping[str, Any]  # the tokenizer
    progress: Progress
    note: Callable[[str], None]


@dataclass(frozen=True)
class DataSource:
    """A row of ``sources.SOURCES``. ``open`` builds equal datasets on every rank, without communication."""

    settings: tuple[str, ...]  # fields of DataSettings: any of them chooses this source
    open: Callable[[DataRequest], Datasets]
    excludes: tuple[str, ...] = ()  # other fields, which it cannot follow
    check: Callable[[Any], object] = lambda flags: None  # raises ValueError, before files are read
    reads_text: bool = True  # False: it makes ids itself, and needs --vocab-size alone
