"""TikTokenizer, and the files that it reads: a ``.tiktoken`` file, or Megatron's JSON vocabulary."""

from __future__ import annotations

import base64
import binascii
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# A character of each kind that Unicode has, but half a surrogate pair, which is no text.
ALL_KINDS = (
    "It's 12345 \u01c5ungla \u02b0\u6771\u4eac e\u0301 \u0915\u0903 a\u20dd \u2167 x\u00b2 a_b-c (d) \u00abe\u00bb, f! "
    "\u20ac5 + ^ \u00a9 \u00a0\u2028\u2029\r\n\n\t  \x00 \u200b \ue000 \u0378 \U0001f642  "
)

# How published vocabularies cut a text into words before they merge bytes: part of a vocabulary, yet not in its file.
_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_O200K_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MEGATRON_V1_WORDS = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_MEGATRON_V2_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_PATTERNS = {
    "gpt2": _GPT2_WORDS,
    "cl100k_base": _CL100K_WORDS,
    "o200k_base": _O200K_WORDS,
    "v1": _MEGATRON_V1_WORDS,  # by Megatron-LM's names
    "v2": _MEGATRON_V2_WORDS,
}
# Published files by their number of tokens: pattern, end of document, number of ids with all special ones.
TIKTOKEN_FILES = {
    50_256: ("gpt2", 50_256, 50_257),  # r50k_base
    50_280: ("gpt2", 50_256, 50_281),  # p50k_base, whose end of document is amid the others
    100_256: ("cl100k_base", 100_257, 100_277),
    199_998: ("o200k_base", 199_999, 200_019),
    128_000: ("cl100k_base", 128_001, 128_256),  # Llama 3's tokenizer.model
}

# Of Megatron's JSON vocabularies
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
DEFAULT_NUM_SPECIAL = 1000
DEFAULT_SIZE = 2**17


@dataclass(frozen=True)
class TiktokenVocabulary:
    ids: dict[bytes, int]  # of the tokens that texts become; special ones are others
    eod: int
    eod_name: str
    size: int  # with all special ids
    pattern: str | None  # a name of TIKTOKEN_PATTERNS; None: not known


class TikTokenizer:
    """A ``.tiktoken`` file, or Megatron's ``.json`` vocabulary, read by the functions below the class.

    Neither says how texts are cut into words. Published .tiktoken files are known by their size; with another one
    ``pattern`` is a name of ``TIKTOKEN_PATTERNS`` or a regular expression. Special tokens inside a text are text.

    ``tokenize`` raises ValueError for a text of which ``pattern`` leaves something out.
    """

    def __init__(
        self,
        file: Path,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int | None = None,
    ) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ImportError(
                "TikTokenizer needs the package tiktoken: pip install tiktoken, or megatron_zpp's extra data"
            ) from error
        if file.suffix == ".json":
            found = read_json_vocabulary(file, vocab_size, num_special_tokens)
        else:
            found = read_tiktoken(file)
        pattern = pattern or found.pattern
        if pattern is None:
            raise ValueError(
                f"{file} is none of the published files; how does it cut texts into words? give --tiktoken-pattern, "
                f"{', '.join(TIKTOKEN_PATTERNS)} or a regular expression"
            )
        self.eod, self.vocab_size = found.eod, found.size
        try:
            self._encoding = tiktoken.Encoding(
                file.name,
                pat_str=TIKTOKEN_PATTERNS.get(pattern, pattern),
                mergeable_ranks=found.ids,
                special_tokens={found.eod_name: found.eod},
            )
        except ValueError as error:
            raise ValueError(f"--tiktoken-pattern {pattern}: {error}") from error
        self._known = {*found.ids.values(), self.eod}
        self._pattern = pattern
        self._num_bytes = np.zeros(max(found.ids.values()) + 1, np.int64)  # of each id
        for token, i in found.ids.items():
            self._num_bytes[i] = len(token)
        try:
            self.tokenize(ALL_KINDS)  # most patterns which leave something out are refused before the first text
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; no Exception
                raise
            raise ValueError(f"--tiktoken-pattern {pattern} matches an empty piece of text") from None

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0].tolist()

    def tokenize_batch(self, texts: list[str]) -> list[NDArray]:
        batch = [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        # The tokens of what the pattern matches follow each other in a text, so their sizes tell of any gap. All texts
        # at once: one by one, short ones would take twice as long.
        num_bytes = len("".join(texts).encode("utf-8"))
        kept = int(self._num_bytes[np.concatenate(batch)].sum()) if batch else 0
        if kept != num_bytes:
            raise ValueError(
                f"--tiktoken-pattern {self._pattern} leaves out {num_bytes - kept} of {num_bytes} bytes of a text: "
                f"give {', '.join(TIKTOKEN_PATTERNS)}, or a regular expression that matches every character"
            )
        return batch

    def detokenize(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i in self._known])  # other special ids have no text


def read_tiktoken(file: Path) -> TiktokenVocabulary:
    """A line per token: its bytes in base64, and its id. The id after the last ends a document of an unknown file."""
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
    return TiktokenVocabulary(ids, eod, "<|endoftext|>", size, pattern)


def read_json_vocabulary(file: Path, size: int | None, num_special: int | None) -> TiktokenVocabulary:
    """Megatron's: a list of {"rank": 0, 1, ..., "token_bytes": base64, "token_str"}, of which the first are taken.

    Special ids come first: <unk>, <s>, </s>, and room for others up to ``num_special``; the tokens have the ids that
    follow, up to ``size``. ``</s>`` ends a document. None: Megatron's defaults.
    """
    size, num_special = size or DEFAULT_SIZE, DEFAULT_NUM_SPECIAL if num_special is None else num_special
    wanted = size - num_special
    try:
        entries = json.loads(file.read_bytes())[: max(0, wanted)]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        ranks = [entry["rank"] for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON vocabulary of TikTokenizer: {error!r}") from error
    if num_special <= SPECIAL_TOKENS.index("</s>") or wanted < 256:
        raise ValueError(
            f"--vocab-size {size} with --tiktoken-num-special-tokens {num_special}: give at least 3 special tokens, "
            "and room for 256 others"
        )
    if ranks != [*range(len(ranks))] or tokens[:256] != [bytes([byte]) for byte in range(256)]:
        raise ValueError(f"{file} is not a JSON vocabulary of TikTokenizer: its ranks must count from 0, bytes first")
    if len(set(tokens)) < wanted:
        raise ValueError(
            f"{file} has {len(set(tokens)):,} tokens, and --vocab-size {size} less {num_special} special ones needs "
            f"{wanted:,}: give --vocab-size {len(set(tokens)) + num_special}"
        )
    ids = {token: rank + num_special for rank, token in enumerate(tokens)}
    return TiktokenVocabulary(ids, SPECIAL_TOKENS.index("</s>"), "</s>", size, None)


def check_no_character_is_left_out(file: Path, tokenize: Callable[[str], Sequence[int] | NDArray]) -> None:
    """Raise ValueError if a letter, digit or sign becomes no id at all; blanks and control characters may."""
    for character in ALL_KINDS:
        if unicodedata.category(character)[0] in "LNPS" and not len(tokenize(character)):
            raise ValueError(
                f"{file} leaves characters out that it does not know, such as {character!r}: texts would lose them "
                "without a trace; give its model an unknown token or all bytes"
            )
