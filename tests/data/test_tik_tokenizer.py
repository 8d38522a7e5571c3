"""TikTokenizer: published files, Megatron's patterns and vocabularies, and what loses text."""

import base64
import json
import sys
import unicodedata

import pytest
import tiktoken
from tiktoken_ext import openai_public

from megatron_zpp.data.text.tik_tokenizer import ALL_KINDS, TIKTOKEN_FILES, TIKTOKEN_PATTERNS
from megatron_zpp.data.text.tokenizers import build_tokenizer
from tests.data.small_data import BYTES, write_ranks
from tests.data.test_tokenizers import TEXTS


def test_published_tik_tokenizer_are_known_by_their_size(tmp_path):
    size = 50_256
    tokens = [*BYTES, *(b"%06d" % number for number in range(size - 256))]
    tokenizer = build_tokenizer("TikTokenizer", write_ranks(tmp_path / "t.tiktoken", tokens))
    pattern, eod, vocab_size = TIKTOKEN_FILES[size]
    assert (tokenizer.eod, tokenizer.vocab_size) == (eod, vocab_size)
    text = "it's 12345 größe\n\n  Über-all"
    reference = tiktoken.Encoding(
        "reference",
        pat_str=TIKTOKEN_PATTERNS[pattern],
        mergeable_ranks=dict(zip(tokens, range(size), strict=True)),
        special_tokens={},
    )
    assert tokenizer.tokenize(text) == reference.encode(text)
    assert tokenizer.detokenize([*tokenizer.tokenize(text), vocab_size - 1]).startswith(text)


@pytest.mark.parametrize(
    "size, published", [(50_256, "r50k_base"), (50_280, "p50k_base"), (100_256, "cl100k_base"), (199_998, "o200k_base")]
)
def test_what_is_known_of_published_files_is_what_tiktoken_says(size, published, monkeypatch):
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *arguments, **more: {})  # would download the file
    encoding = openai_public.ENCODING_CONSTRUCTORS[published]()
    _, eod, vocab_size = TIKTOKEN_FILES[size]
    special = encoding["special_tokens"]
    assert eod == special["<|endoftext|>"]
    assert vocab_size == (encoding.get("explicit_n_vocab") or max(special.values()) + 1)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("v1", ["it", "'s", " ", "1", "2", " aB", " ÜberAll", "!/\n\n", "/x"]),
        ("v2", ["it", "'s", " ", "1", "2", " a", "B", " Über", "All", "!/\n\n/", "x"]),
        ("cl100k_base", ["it", "'s", " ", "12", " aB", " ÜberAll", "!/\n\n", "/x"]),
    ],
)
def test_megatrons_patterns_by_their_names(tmp_path, pattern, words):
    """What lies in one word is merged where the file has it; what lies in two never is."""
    text = "it's 12 aB ÜberAll!/\n\n/x"
    pieces = sorted({text[i:j].encode() for i in range(len(text)) for j in range(i + 1, len(text) + 1)}, key=len)
    tokens = [*BYTES, *(piece for piece in pieces if len(piece) > 1)]
    tokenizer = build_tokenizer("TikTokenizer", write_ranks(tmp_path / "t", tokens), tiktoken_pattern=pattern)
    assert [tokenizer.detokenize([i]) for i in tokenizer.tokenize(text)] == words


def write_json_vocabulary(path, tokens):
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def test_megatrons_json_vocabulary(tmp_path):
    """As Megatron builds it: special tokens first, then as many of the others as there is room for."""
    tokens = [*BYTES, b"th", b"the", b" c", b"at", b" cat"]
    file = write_json_vocabulary(tmp_path / "vocab.json", tokens)
    size = 1000 + len(tokens) - 1
    tokenizer = build_tokenizer("TikTokenizer", file, vocab_size=size, tiktoken_pattern="v2")
    reference = tiktoken.Encoding(
        "reference",
        pat_str=TIKTOKEN_PATTERNS["v2"],
        mergeable_ranks={token: 1000 + rank for rank, token in enumerate(tokens[:-1])},
        special_tokens={"<unk>": 0, "<s>": 1, "</s>": 2},
    )
    assert tokenizer.tokenize("the cat") == reference.encode_ordinary("the cat") == [1257, 1258, 1259]
    assert (tokenizer.eod, tokenizer.vocab_size) == (2, size)
    for text in TEXTS:
        assert tokenizer.tokenize(text) == reference.encode_ordinary(text)
        assert tokenizer.detokenize([*tokenizer.tokenize(text), 2]) == text + "</s>"


@pytest.mark.parametrize(
    ("content", "sizes", "message"),
    [
        ("{}", {}, "not a JSON vocabulary"),
        ('[{"rank": 0}]', {}, "not a JSON vocabulary"),
        ("[1", {}, "not a JSON vocabulary"),
        (None, {}, "has 256 tokens, not --vocab-size 131072 less 1000 special ones: give --vocab-size 1256"),
        (None, {"vocab_size": 1255}, "no room for 1000 special tokens and 256 bytes"),
        (BYTES[::-1], {"vocab_size": 1256}, "ranks must count from 0, bytes first"),
    ],
)
def test_json_vocabularies_that_are_refused(tmp_path, content, sizes, message):
    file = tmp_path / "vocab.json"
    write_json_vocabulary(file, content if isinstance(content, list) else BYTES)
    if isinstance(content, str):
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        build_tokenizer("TikTokenizer", str(file), tiktoken_pattern="v2", **sizes)


@pytest.mark.parametrize(
    ("pattern", "tokens", "message"),
    [
        *(
            (pattern, BYTES, r"--tiktoken-pattern \S+ leaves out \d+ of 117 bytes: give gpt2, ")
            for pattern in ("v3", "cl100k", r"\w+", r"\S+", r"\p{L}+|\s+|\p{N}+", r"[^\x00]+")
        ),
        ("(?=a)", BYTES, r"--tiktoken-pattern \(\?=a\) matches an empty piece of text"),
        ("(", BYTES, r"--tiktoken-pattern \(: "),
        (None, BYTES, "give --tiktoken-pattern: gpt2, cl100k_base, o200k_base, v1, v2 or a"),
        ("gpt2", BYTES[1:], "must hold each of the 256 bytes"),
    ],
)
def test_patterns_and_files_that_lose_text_are_refused(tmp_path, pattern, tokens, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer("TikTokenizer", write_ranks(tmp_path / "t.tiktoken", tokens), tiktoken_pattern=pattern)


def test_a_text_of_which_a_pattern_loses_some_is_refused(tmp_path):
    """A pattern that is good for all kinds of characters, but not for the letter ß."""
    tokenizer = build_tokenizer("TikTokenizer", write_ranks(tmp_path / "t", BYTES), tiktoken_pattern=r"[^ß]+")
    assert tokenizer.detokenize(tokenizer.tokenize("größer"[:2])) == "gr"
    for encode in (tokenizer.tokenize, lambda text: tokenizer.tokenize_batch(["fine", text])):
        with pytest.raises(ValueError, match=r"--tiktoken-pattern \[\^ß\]\+ leaves out 2 of (8|12) bytes"):
            encode("größer")


def test_the_sample_has_all_kinds_of_characters():
    kinds = {unicodedata.category(chr(i)) for i in range(sys.maxunicode + 1)} - {"Cs"}
    assert {unicodedata.category(character) for character in ALL_KINDS} == kinds
