"""Reads the data flags: which files make up each split, with which weights, and which part of them."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_zpp.data.blended_dataset import normalize
from megatron_zpp.files import read_json_object, read_text

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
    data_args_path: str | None = None,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    per_split_data_args_path: str | None = None,
    split: str | None = None,
) -> list[Source | None]:
    """Return the train, validation and test source; None for a split without data.

    Each path is a list of prefixes, or of weight prefix pairs; ``data_args_path`` is a file with what ``data_path``
    takes, ``per_split_data_args_path`` a JSON file {"train": ..., "valid": ..., "test": ...} of lists or strings.
    Raises ValueError or OSError if flags contradict each other or a file can't be read.
    """
    per_split = [train_data_path, valid_data_path, test_data_path]
    values = {
        "--data-path": data_path,
        "--data-args-path": data_args_path,
        "--train/valid/test-data-path": any(per_split),
        "--per-split-data-args-path": per_split_data_args_path,
    }
    given = [name for name, value in values.items() if value]
    if not given:
        raise ValueError("no data: give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give one")
    if data_args_path:
        data_path = read_text(data_args_path).split()
        if not data_path:
            raise ValueError(f"--data-args-path {data_args_path} is empty")
    if data_path:
        blend = parse_blend(data_path)
        return [Source(*blend, edges) if edges else None for edges in split_edges(split or "969, 30, 1")]
    if split is not None:
        raise ValueError(f"--split divides --data-path; it has no meaning with {given[0]}: leave it out")
    if per_split_data_args_path:
        per_split = read_per_split(per_split_data_args_path)
    return [Source(*parse_blend(paths), (0.0, 1.0)) if paths else None for paths in per_split]


def read_per_split(path: str) -> list[Sequence[str] | None]:
    """Read the paths of train, valid and test from the JSON file of ``--per-split-data-args-path``."""
    splits = read_json_object(path, unique=True)
    if not set(splits) <= set(SPLIT_NAMES):
        raise ValueError(f"--per-split-data-args-path {path} must hold an object of train, valid and test")
    for name, value in splits.items():
        is_list = isinstance(value, list) and all(type(word) in (str, int, float) for word in value)
        if not (value is None or isinstance(value, str) or is_list):
            form = f'for {name}: give a list of prefixes, or of weights and prefixes, as ["0.7", "A", "0.3", "B"]'
            raise ValueError(f"--per-split-data-args-path {path} gives {json.dumps(value)} {form}")
    paths = [splits.get(name) for name in SPLIT_NAMES]
    return [value.split() if isinstance(value, str) else value and [str(word) for word in value] for value in paths]


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
