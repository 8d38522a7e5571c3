"""Digests made with Megatron-LM's own dataset modules and its compiled helper: ours must be the same bytes.

The two datasets stand in ``golden/``, beside golden.json with the whole digests; the tables here hold their beginnings.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "golden.json").read_text())
OPTIONS = SampleOptions(seq_length=128, seed=1234)

# split, its number, samples -> length, document, sample and shuffle index, first 3 samples. Of 257 samples an epoch,
# 500 take 243 of the last epoch, which is joint with the first; 550 take 35 of it, which is separate.
TABLE = {
    ("1", 0, None): (257, "a5592ce2e033e806", "5e9571d6d94fe724", "2cd8e926aa4b505d", "9e978cfc2fe4eccd"),
    ("1", 0, 100): (257, "a5592ce2e033e806", "5e9571d6d94fe724", "2cd8e926aa4b505d", "9e978cfc2fe4eccd"),
    ("1", 0, 500): (515, "ba39417804ca9fb7", "2ce344eadc4e89e8", "9f14d4a4a5ef7d22", "4883438ade34c205"),
    ("1", 0, 550): (772, "a4de78dc78fb8916", "e0a2021c6c25ed67", "65d942f58ef80cfa", "bb1f6f6866f5d5dd"),
    ("90,8,2", 0, 400): (459, "aea6f1aa4c96116a", "5adcc841033c3cc7", "2f98283c222ad9fa", "58c7d1fd75c258b8"),
    ("90,8,2", 1, 20): (23, "6bc3e42675408533", "ad7879fa91c7f5fc", "cca7bf813927b1ca", "3711743116327f50"),
    ("90,8,2", 2, 3): (4, "4d2a4808c122819c", "4e648b8b9a3c1932", "81c1a5a2f482e82c", "f4a2d6113e2a3372"),
}
# Names in golden.json; those of 500 and 550 samples are the wrong way round there.
NAMES = {
    ("1", 0, None): "one_epoch_no_target",
    ("1", 0, 100): "one_epoch_100",
    ("1", 0, 500): "separate_last_epoch_500",
    ("1", 0, 550): "joint_last_epoch_550",
    ("90,8,2", 0, 400): "split_90_8_2_train",
    ("90,8,2", 1, 20): "split_90_8_2_valid",
    ("90,8,2", 2, 3): "split_90_8_2_test",
}
# dataset: documents, tokens, first x of the generator, text, .bin, .idx
CORPORA = {
    "a": (200, 32_965, 1, "1a2acfeb52a76d31", "15c5a38ba117c02f", "95d91727b0eaf2eb"),
    "b": (60, 12_225, 2, "890ab6bf4a6e84e4", "2290f1115063743b", "efe2c1dc5f13655d"),
}
WORDS = "alpha beta gamma delta river stone seven eight a an the of to and größe naïve 東京 zero-shot loss mask token ."


def digest(data) -> str:
    return hashlib.sha256(data.tobytes() if isinstance(data, np.ndarray) else data).hexdigest()


def build(path, tmp_path, **options):
    return build_datasets(OPTIONS, data_path=path, cache_path=str(tmp_path), **options)


def assert_equals(dataset, length, document, sample, shuffle, samples):
    assert len(dataset) == length
    for array, dtype, expected in (
        (dataset.document_index, "int32", document),
        (dataset.sample_index, "int32", sample),
        (dataset.shuffle_index, "uint32", shuffle),
    ):
        assert (array.dtype, digest(array)[: len(expected)]) == (dtype, expected)
    assert digest(np.stack([dataset[i] for i in range(3)]))[: len(samples)] == samples


def corpus(documents, x):
    """The text of each document, by a 31-bit linear congruential generator."""
    words = WORDS.split()

    def draw():
        nonlocal x
        x = (1103515245 * x + 12345) % 2**31
        return x >> 16

    for number in range(documents):
        count = 1 + draw() % 60
        yield " ".join(words[draw() % len(words)] for _ in range(400 if number == 7 else count))


@pytest.mark.parametrize("name", CORPORA)
def test_corpus_made_anew_is_the_same_files(tmp_path, name):
    documents, tokens, x, text, bin_, idx = CORPORA[name]
    texts = list(corpus(documents, x))
    assert digest("".join(f"{document}\n" for document in texts).encode())[:16] == text
    with IndexedDatasetWriter(tmp_path / name, "<u2") as writer:
        for document in texts:
            writer.add_document([[*document.encode(), 256]])
    assert writer.num_tokens == tokens
    for suffix, expected in ((".bin", bin_), (".idx", idx)):
        data = (tmp_path / f"{name}{suffix}").read_bytes()
        assert digest(data)[:16] == expected
        assert data == (GOLDEN / f"{name}{suffix}").read_bytes()


@pytest.mark.parametrize("case", TABLE, ids=lambda case: NAMES[case])
@pytest.mark.parametrize("mmap_tokens", [True, False])
def test_dataset_equals_megatrons(tmp_path, case, mmap_tokens):
    split, number, samples = case
    counts = [0, 0, 0]
    counts[number] = samples
    dataset = build([str(GOLDEN / "a")], tmp_path, split=split, num_samples=tuple(counts), mmap_tokens=mmap_tokens)[
        number
    ]
    assert_equals(dataset, *TABLE[case])
    whole = EXPECTED["gpt"][NAMES[case]]
    arrays = [whole[f"{name}_index"]["sha256"] for name in ("document", "sample", "shuffle")]
    assert_equals(dataset, whole["length"], *arrays, whole["first_samples_sha256"])


def test_blend_equals_megatrons(tmp_path):
    paths = ["0.3", str(GOLDEN / "a"), "0.7", str(GOLDEN / "b")]
    blend = build(paths, tmp_path, split="1", num_samples=(300, 0, 0)).train
    assert (blend.dataset_index.dtype, blend.dataset_sample_index.dtype) == (np.int16, np.int64)
    assert digest(blend.dataset_index)[:16] == "81f74a9262e7f9bf"
    assert digest(blend.dataset_sample_index)[:16] == "2f88d40a2ba42ac5"
    assert blend.dataset_index[:12].tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1]
    a, b = blend.datasets
    assert_equals(a, *TABLE["1", 0, 100])
    assert_equals(b, 286, "5827668b7ee66ddf", "e423295b446aaf1d", "ded5b980afd553cf", "48da56a932919b99")
    assert blend[1].tolist() == a[0].tolist()


def test_table_covers_golden_json():
    assert set(NAMES.values()) == set(EXPECTED["gpt"])
