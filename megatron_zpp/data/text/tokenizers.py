"""Tokenizers: text to ids and back, and the end-of-document id.

``build_tokenizer`` is the one entry; what it returns has ``vocab_size``, ``eod``, ``tokenize`` and ``detokenize``.
No tokenizer but Llama2Tokenizer adds ids of its own (such as a beginning-of-sequence id) to a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Required, TypedDict

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.data.text.tik_tokenizer import TikTokenizer, check_no_character_is_left_out
from megatron_zpp.files import read_json_object

TOKENIZER_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "HFTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
)
# Names of the end-of-document token in published tokenizer.json files that don't come with a tokenizer_config.json.
KNOWN_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "[EOS]", "<|eot_id|>")


Ids = Sequence[int] | NDArray


class TokenizerFlags(TypedDict, total=False):
    """The arguments of ``build_tokenizer``."""

    tokenizer_type: Required[str]
    tokenizer_model: str | None
    vocab_file: str | None
    merge_file: str | None
    vocab_size: int | None
    tiktoken_pattern: str | None
    tiktoken_num_special_tokens: int | None


class Tokenizer(Protocol):
    """What the data tools and the trainer need of a tokenizer."""

    vocab_size: int  # ids are below it; not padded
    eod: int  # the id that ends a document

    def tokenize(self, text: str) -> list[int]: ...

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        """The same for many texts, faster; in one thread, so that several processes don't fight for the cores."""
        ...

    def detokenize(self, ids: list[int]) -> str: ...


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int | None = None,
) -> Tokenizer:
    """The tokenizer that Megatron's flags of the same names describe.

    Raises ValueError for an unknown type, a missing flag or an unusable file, FileNotFoundError for a missing file,
    ImportError if the package it needs is not installed.
    """
    match tokenizer_type:
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer":
            return SentencePieceTokenizer(_file(tokenizer_type, "--tokenizer-model", tokenizer_model))
        case "Llama2Tokenizer":
            return Llama2Tokenizer(_file(tokenizer_type, "--tokenizer-model", tokenizer_model))
        case "HuggingFaceTokenizer" | "HFTokenizer":
            return HuggingFaceTokenizer(huggingface_path(tokenizer_model))
        case "GPT2BPETokenizer":
            return GPT2BPETokenizer(
                _file(tokenizer_type, "--vocab-file", vocab_file), _file(tokenizer_type, "--merge-file", merge_file)
            )
        case "TikTokenizer":
            file = _file(tokenizer_type, "--tokenizer-model", tokenizer_model)
            return TikTokenizer(file, tiktoken_pattern, vocab_size, tiktoken_num_special_tokens)
        case "ByteTokenizer":
            return ByteTokenizer()
        case "NullTokenizer":
            if vocab_size is None:
                raise ValueError("NullTokenizer needs --vocab-size, the number of ids in the data")
            return NullTokenizer(vocab_size)
    raise ValueError(f"unknown --tokenizer-type {tokenizer_type}; known: {', '.join(TOKENIZER_TYPES)}")


class SentencePieceTokenizer:
    """A SentencePiece model, as of ``tools/train_tokenizer.py``; documents end with its ``</s>``."""

    def __init__(self, model: Path) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{model} is not a SentencePiece model") from error
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise ValueError(f"{model} has no end-of-sequence id to end documents with; train it with one")

    def tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return self._processor.encode(texts, num_threads=1)

    def detokenize(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class Llama2Tokenizer(SentencePieceTokenizer):
    """A SentencePiece model whose ``<s>`` begins each text, as in Megatron."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self._bos: int = self._processor.bos_id()
        if self._bos < 0:
            raise ValueError(f"{model} has no beginning-of-sequence id; use GPTSentencePieceTokenizer, which adds none")

    def tokenize(self, text: str) -> list[int]:
        return [self._bos, *super().tokenize(text)]

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return [[self._bos, *ids] for ids in super().tokenize_batch(texts)]


class _LibraryTokenizer:
    """A tokenizer of the package tokenizers, which adds no special tokens to a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # A saved tokenizer may cut or pad what it encodes; documents must stay whole.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocabulary.values(), default=-1) + 1

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        # One thread where the environment says TOKENIZERS_PARALLELISM=false, which the library reads.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def detokenize(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A ``tokenizer.json``, or a model folder that holds one; ``huggingface_path`` finds them by a model's name.

    Documents end with the ``eos_token`` of the ``tokenizer_config.json`` beside it, or else with the first of
    ``KNOWN_EOD_TOKENS`` that it has. As in the library, a text that spells a special token becomes that token.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist; HuggingFaceTokenizer reads a tokenizer.json")
        library = _tokenizers_library("HuggingFaceTokenizer")
        try:
            super().__init__(library.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises a bare Exception for whatever it can't read
            raise ValueError(f"{file} is not a tokenizer.json: {error}") from error
        self.eod = self._find_eod(file)
        self._check_model(file)
        check_no_character_is_left_out(file, self.tokenize)

    def _check_model(self, file: Path) -> None:
        """A model beside the tokenizer must have a place for each of its ids."""
        config_file = file.parent / "config.json"
        if config_file.is_file():
            size = read_json_object(config_file).get("vocab_size")
            if isinstance(size, int) and size < self.vocab_size:
                raise ValueError(
                    f"{file} has ids up to {self.vocab_size - 1}, but the model of {config_file} only {size} ids"
                )

    def _find_eod(self, file: Path) -> int:
        config_file = file.parent / "tokenizer_config.json"
        if config_file.is_file():
            token = read_json_object(config_file).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token in self.vocabulary:
                return self.vocabulary[token]
        for token in KNOWN_EOD_TOKENS:
            if token in self.vocabulary:
                return self.vocabulary[token]
        raise ValueError(
            f'{file} has no known end-of-document token; name it in {config_file} as {{"eos_token": "..."}}'
        )


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE, of its ``vocab.json`` and ``merges.txt``; documents end with ``<|endoftext|>``.

    That name inside a text is text, not the end of a document.
    """

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        library = _tokenizers_library("GPT2BPETokenizer")
        from tokenizers import decoders, models, pre_tokenizers

        try:
            model = models.BPE.from_file(str(vocab_file), str(merge_file))
        except Exception as error:
            raise ValueError(f"{vocab_file} and {merge_file} are not GPT-2 BPE files: {error}") from error
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer)
        missing = [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in self.vocabulary]
        if missing:
            raise ValueError(
                f"{vocab_file} lacks {len(missing)} of the 256 bytes: texts that hold them would lose them"
            )
        if "<|endoftext|>" not in self.vocabulary:
            raise ValueError(f"{vocab_file} has no <|endoftext|>; GPT-2's vocab.json has")
        self.eod = self.vocabulary["<|endoftext|>"]


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 as the end of a document."""

    vocab_size = 257
    eod = 256

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def detokenize(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class NullTokenizer:
    """Texts that are already ids in decimal digits, separated by blanks; the id after the last ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def tokenize(self, text: str) -> list[int]:
        words = text.split()
        wrong = next((word for word in words if not word.isdecimal()), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no id: NullTokenizer reads texts of ids, such as '17 4 256'")
        ids = [int(word) for word in words]
        if ids and not 0 <= min(ids) <= max(ids) < self.eod:
            raise ValueError(f"ids {min(ids)} to {max(ids)} are not all below --vocab-size {self.eod}")
        return ids

    def tokenize_batch(self, texts: list[str]) -> Sequence[Ids]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _tokenizers_library(tokenizer_type: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"{tokenizer_type} needs the package tokenizers: pip install tokenizers, or megatron_zpp's extra hf"
        ) from error
    return tokenizers


MODEL = re.compile(r"[\w.-]+(/[\w.-]+)?")  # a model's name at Hugging Face


def huggingface_path(value: str | None) -> Path:
    """What ``--tokenizer-model`` of HuggingFaceTokenizer says: a path, or a model's name, whose files are then those in
    Hugging Face's cache. Nothing is downloaded."""
    if value is None or value.endswith(".json") or Path(value).exists() or not MODEL.fullmatch(value):
        return _path("HuggingFaceTokenizer", "--tokenizer-model", value)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        found = None
    else:
        found = try_to_load_from_cache(value, "tokenizer.json")
    if not isinstance(found, str):
        raise FileNotFoundError(
            f"--tokenizer-model {value} does not exist, and Hugging Face's cache has no tokenizer.json of a model of "
            f"that name; where there is a network: hf download {value} tokenizer.json tokenizer_config.json"
        )
    return Path(found).parent


def _path(tokenizer_type: str, flag: str, value: str | None) -> Path:
    if value is None:
        raise ValueError(f"{tokenizer_type} needs {flag}")
    if not Path(value).exists():
        raise FileNotFoundError(f"{flag} {value} does not exist")
    return Path(value)


def _file(tokenizer_type: str, flag: str, value: str | None) -> Path:
    path = _path(tokenizer_type, flag, value)
    if not path.is_file():
        raise ValueError(f"{flag} {value} is no regular file")
    return path
