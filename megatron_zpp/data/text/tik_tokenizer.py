"""TikTokenizer, and the files that it reads: a ``.tiktoken`` file, or Megatron's JSON vocabulary."""

import base64
import binascii
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_zpp.data.text.packages import load_package
from megatron_zpp.data.text.special_tokens import SpecialTokens

# A character of each Unicode category but surrogates, which are not text.
ALL_KINDS = (
    "It's 12345 \u01c5ungla \u02b0\u6771\u4eac e\u0301 \u0915\u0903 a\u20dd \u2167 x\u00b2 a_b-c (d) \u00abe\u00bb, f! "
    "\u20ac5 + ^ \u00a9 \u00a0\u2028\u2029\r\n\n\t  \x00 \u200b \ue000 \u0378 \U0001f642  "
)

# How published vocabularies split a text into words before they merge bytes; their files do not say.
TIKTOKEN_PATTERNS = {  # v1 and v2 are Megatron-LM's names
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k_base": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
# Number of tokens of a published file -> pattern, end of document, number of ids with all special ones.
TIKTOKEN_FILES = {
    50_256: ("gpt2", 50_256, 50_257),  # r50k_base
    50_280: ("gpt2", 50_256, 50_281),  # p50k_base, whose end of document is between the others
    100_256: ("cl100k_base", 100_257, 100_277),
    199_998: ("o200k_base", 199_999, 200_019),
    128_000: ("cl100k_base", 128_001, 128_256),  # Llama 3's tokenizer.model
}


# Ids by token, without special ones; names of special ids, the end of a document's first, and then the beginning's;
# number of ids, with special ones; pattern, if known.
Vocabulary = tuple[dict[bytes, int], dict[int, str], int, str | None]


class TikTokenizer:
    """A ``.tiktoken`` file, or Megatron's ``.json`` vocabulary.

    Neither says how texts are split into words. Published .tiktoken files are known by their size; for another one,
    ``pattern`` is a name of ``TIKTOKEN_PATTERNS`` or a regular expression. Special tokens inside a text are text.

    ``tokenize`` raises ValueError if ``pattern`` leaves out a part of the text.
    """

    def __init__(self, file: Path, pattern: str | None, vocab_size: int | None) -> None:
        tiktoken = load_package("tiktoken", "TikTokenizer", "data")
        is_json = file.suffix == ".json"
        vocabulary = _read_json_vocabulary(file, vocab_size) if is_json else _read_tiktoken(file)
        ids, self.names, self.vocab_size, known_pattern = vocabulary
        self.eod, bos, *_ = *self.names, None
        self._pattern, self.ranks = pattern or known_pattern, ids
        if self._pattern is None:
            unknown = f"{file} is not one of the published files; how does it split texts into words?"
            raise ValueError(f"{unknown} give --tiktoken-pattern: {', '.join(TIKTOKEN_PATTERNS)} or a regex")
        special_ids = frozenset(range(self.vocab_size)).difference(ids.values())
        self.special = SpecialTokens(self.eod, bos, ids=special_ids)
        self.pattern: str = TIKTOKEN_PATTERNS.get(self._pattern, self._pattern)
        self._known = {*ids.values(), self.eod}
        self._num_bytes = np.zeros(max(ids.values()) + 1, np.int64)  # bytes per id
        self._num_bytes[list(ids.values())] = list(map(len, ids))
        try:
            self._encoding = tiktoken.Encoding(
                file.name, pat_str=self.pattern, mergeable_ranks=ids, special_tokens={self.names[self.eod]: self.eod}
            )
        except ValueError as error:
            raise ValueError(f"--tiktoken-pattern {self._pattern}: {error}") from error
        try:
            self.tokenize(ALL_KINDS)  # refuses most patterns that leave something out, before the first text
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a Rust panic is a BaseException
                raise
            raise ValueError(f"--tiktoken-pattern {self._pattern} matches an empty piece of text") from None

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenize_batch([text])[0].tolist()

    def tokenize_batch(self, texts: list[str]) -> list[NDArray]:
        batch = [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        # If the tokens have as many bytes as the texts, nothing was left out. Checked for all texts at once, which
        # halves the time for short ones.
        num_bytes = len("".join(texts).encode("utf-8"))
        kept = int(self._num_bytes[np.concatenate(batch)].sum()) if batch else 0
        if kept != num_bytes:
            left_out = f"--tiktoken-pattern {self._pattern} leaves out {num_bytes - kept} of {num_bytes} bytes"
            raise ValueError(f"{left_out}: give {', '.join(TIKTOKEN_PATTERNS)}, or one that matches every character")
        return batch

    def detokenize(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i in self._known])  # other special ids have no text


def _read_tiktoken(file: Path) -> Vocabulary:
    """Read a line per token: its bytes in base64, and its id. In an unknown file, the id after the last is the eod."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ids = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{file} is not a tiktoken file: {error}") from error
    if len(set(ids.values())) < len(lines) or not all(bytes([byte]) in ids for byte in range(256)):
        raise ValueError(f"{file} is not a tiktoken file: it must hold each of the 256 bytes, and no id twice")
    after = max(ids.values()) + 1
    pattern, eod, size = TIKTOKEN_FILES.get(len(ids), (None, after, after + 1))
    if eod in ids.values() or size < after:
        raise ValueError(f"{file} has as many tokens as a published file, but other ids")
    names = {eod: "<|endoftext|>"} if size != 128_256 else {eod: "<|end_of_text|>", 128_000: "<|begin_of_text|>"}
    return ids, names, size, pattern


def _read_json_vocabulary(file: Path, size: int | None) -> Vocabulary:
    """Read Megatron's list of {"rank": 0, 1, ..., "token_bytes": base64, "token_str"} and take the first entries.

    1000 special ids come first (<unk>, <s>, </s>, and unused ones), then the tokens up to ``size``.
    ``</s>`` ends a document.
    """
    size, num_special = size or 2**17, 1000  # Megatron's defaults
    wanted = size - num_special
    try:
        entries = json.loads(file.read_bytes())[: max(0, wanted)]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        ranks = [entry["rank"] for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON vocabulary of TikTokenizer: {error!r}") from error
    if wanted < 256:
        raise ValueError(f"--vocab-size {size} has no room for {num_special} special tokens and 256 bytes")
    if ranks != [*range(len(ranks))] or tokens[:256] != [bytes([byte]) for byte in range(256)]:
        raise ValueError(f"{file} is not a JSON vocabulary of TikTokenizer: its ranks must count from 0, bytes first")
    if len(set(tokens)) < wanted:
        few = f"{file} has {len(set(tokens)):,} tokens, not --vocab-size {size} less {num_special} special ones"
        raise ValueError(f"{few}: give --vocab-size {len(set(tokens)) + num_special}")
    ids = {token: rank + num_special for rank, token in enumerate(tokens)}
    names = {2: "</s>", 1: "<s>", 0: "<unk>", 3: "<mask>", 4: "<pad>", 5: "<cls>", 6: "<sep>"}
    return ids, {i: name for i, name in names.items() if i < num_special}, size, None
