"""Reads the data flags: which files make up each split, with which weights, and which part of them."""

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_zpp.data.blended_dataset import normalize

SPLIT_NAMES = ("train", "valid", "test")

Edges = tuple[float, float]  # start and end of a split, as shares of a file's sequences


class Source(NamedTuple):
    """The data of one split."""

    prefixes: list[str]
    weights: list[float] | None  # as given; None: no weights
    edges: Edges


def read_sources(
    *,
    data_path: Sequence[str] | None = None,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    split: str | None = None,
) -> list[Source | None]:
    """Return the train, validation and test source; None for a split without data.

    Each path is a list of prefixes, or of weight prefix pairs; give ``data_path`` or others. Raises ValueError.
    """
    if data_path:
        blend = parse_blend(data_path)
        return [Source(*blend, edges) if edges else None for edges in split_edges(split or "969, 30, 1")]
    per_split = [train_data_path, valid_data_path, None]
    return [Source(*parse_blend(paths), (0.0, 1.0)) if paths else None for paths in per_split]


def parse_blend(paths: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return prefixes and weights of ``w1 p1 w2 p2 ...``; weights are None if there are only prefixes."""
    if len(paths) % 2 == 0 and all(_is_number(path) for path in paths[::2]):
        weights = [float(path) for path in paths[::2]]
        for weight in weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"weights of a blend must be positive, not {weight:g}: leave that dataset out")
        if sum(weights) == math.inf:
            raise ValueError("the weights of a blend are too large to add up")
        return list(paths[1::2]), weights
    if misplaced := [path for path in paths if _is_number(path) and not Path(f"{path}.idx").exists()]:
        raise ValueError(f"{misplaced[0]} is not a dataset; a blend is `weight prefix weight prefix ...`, in pairs")
    return list(paths), None


def split_edges(split: str) -> list[Edges | None]:
    """Return the edges of train, valid and test for shares such as ``969, 30, 1``; None for a share of 0."""
    try:
        parts = [*map(float, re.split(r"\s*,\s*|\s+", split.strip("'\" ")))]  # a script may leave quotes
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or not all(part >= 0 for part in parts) or not 0 < sum(parts) < math.inf:
        raise ValueError(f"--split {split!r} must be up to three shares of train, valid and test, such as 969,30,1")
    bounds = [0.0, *itertools.accumulate(normalize(parts + [0.0] * (3 - len(parts))))]
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(bounds)]


def split_sequences(num_sequences: int, edges: Edges) -> range:
    """Return the sequences of a split: contiguous, in file order, ends rounded half to even."""
    return range(round(edges[0] * num_sequences), round(edges[1] * num_sequences))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
