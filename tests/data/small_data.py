"""Small datasets: those in golden/, and those that a test writes and reads."""

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

GOLDEN = Path(__file__).parent / "golden"
BYTES = [bytes([byte]) for byte in range(256)]
A, B = str(GOLDEN / "a"), str(GOLDEN / "b")


def write(prefix: str | Path, documents: Sequence, dtype: str = "<u2") -> Path:
    """Write documents, each a list of sequences."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return Path(prefix)


def read(prefix: str | Path) -> list[list[list[int]]]:
    dataset = IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()
    return [[dataset[s].tolist() for s in range(*ends[d : d + 2])] for d in range(dataset.num_documents)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Content of all files but the input."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "in.jsonl"}


def train_data(cache: Path, num_samples: int = 100, path: Sequence[str] = (A,), **options: Any) -> Any:
    """Build the training data alone; ``options``: of its samples."""
    sample, counts = SampleOptions(**{"seq_length": 128, "seed": 1234} | options), (num_samples, 0, 0)
    return build_datasets(sample, data_path=[*path], split="1", num_samples=counts, cache_path=str(cache)).train


def train_sentencepiece(path: Path, texts: Iterable[str], **options: Any) -> str:
    """Train a model that keeps every byte of a text; return its path."""
    model = io.BytesIO()
    kept = dict(byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False)
    options = dict(model_type="bpe", minloglevel=2) | kept | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
    path.write_bytes(model.getvalue())
    return str(path)


def write_ranks(path: Path, tokens: Iterable[bytes]) -> str:
    """Write a .tiktoken file."""
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return str(path)


def write_tokenizer_of_bytes(folder: Path, first_id: int = 0) -> None:
    """Write a tokenizer.json of the 256 bytes and <eos>, id 256, and its configuration. first_id: of the first byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({character: (i + first_id) % 256 for i, character in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
