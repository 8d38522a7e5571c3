"""Every tokenizer gives texts back, ends documents with an id of its own, and names what it misses."""

import base64
import io
import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from megatron_zpp.data.text.tik_tokenizer import ALL_KINDS, TIKTOKEN_FILES, TIKTOKEN_PATTERNS
from megatron_zpp.data.text.tokenizers import build_tokenizer

TEXTS = ["the cat sat on the mat\n", "größe naïve 東京 🙂", "  indented\n\n\ttext  ", "a<|endoftext|>b </s>"]


@pytest.fixture(scope="session")
def corpus():
    return [f"{TEXTS[i % 2]} number {i}\n    the cat sat again" for i in range(200)]


@pytest.fixture(scope="session")
def byte_level_bpe(corpus):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return tokenizer


def write_sentencepiece_model(path: Path, corpus: Sequence[str], **special_ids: int) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
        **special_ids,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture
def sentencepiece_tokenizer(corpus, tmp_path):
    return build_tokenizer("SentencePieceTokenizer", str(write_sentencepiece_model(tmp_path / "t.model", corpus)))


def test_a_sentencepiece_model_may_end_documents_with_its_first_id_but_must_have_one(corpus, tmp_path):
    first = write_sentencepiece_model(tmp_path / "first.model", corpus, eos_id=0, unk_id=1, bos_id=2)
    assert build_tokenizer("SentencePieceTokenizer", str(first)).eod == 0
    without = write_sentencepiece_model(tmp_path / "without.model", corpus, eos_id=-1)
    with pytest.raises(ValueError, match="has no end-of-sequence id to end documents with"):
        build_tokenizer("SentencePieceTokenizer", str(without))


@pytest.fixture
def gpt2_tokenizer(byte_level_bpe, tmp_path):
    byte_level_bpe.model.save(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    return build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt")
    )


@pytest.fixture
def hf_file(byte_level_bpe, tmp_path):
    """As published ones often are: a special token, one that is put before every text, and truncation."""
    tokenizer = Tokenizer.from_str(byte_level_bpe.to_str())
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<stop>", special=True)])
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def hf_tokenizer(hf_file):
    (hf_file.parent / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    return build_tokenizer("HuggingFaceTokenizer", str(hf_file.parent))


def write_ranks(path, tokens):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return str(path)


BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture
def tiktoken_tokenizer(tmp_path):
    tokens = [*BYTES, b"th", b"the", b" c", b"at", b" cat"]
    file = write_ranks(tmp_path / "own.tiktoken", tokens)
    return build_tokenizer("TikTokenizer", file, tiktoken_pattern="gpt2")


@pytest.fixture
def byte_tokenizer():
    return build_tokenizer("ByteTokenizer")


@pytest.mark.parametrize("name", ["sentencepiece", "gpt2", "hf", "tiktoken", "byte"])
def test_texts_come_back(request, name):
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids  # spelling another tokenizer's token ends nothing
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


# Not in SentencePiece's: its own letter for a blank, which comes back as a blank.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60)


@pytest.mark.parametrize("name", ["sentencepiece", "gpt2", "hf", "tiktoken", "byte"])
@given(texts=st.lists(TEXT, max_size=5))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_texts_come_back_and_a_batch_is_no_other_than_its_texts(request, name, texts):
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    batch = [list(map(int, ids)) for ids in tokenizer.tokenize_batch(texts)]
    assert batch == [tokenizer.tokenize(text) for text in texts]
    assert [tokenizer.detokenize(ids) for ids in batch] == texts


def test_tiktoken_merges_what_the_file_says(tiktoken_tokenizer):
    assert tiktoken_tokenizer.tokenize("the cat") == [257, 260]
    assert (tiktoken_tokenizer.eod, tiktoken_tokenizer.vocab_size) == (261, 262)
    assert tiktoken_tokenizer.detokenize([257, 261]) == "the<|endoftext|>"


@pytest.mark.parametrize("size", [50_256, 128_000])
def test_published_tik_tokenizer_are_known_by_their_size(tmp_path, size):
    tokens = [*BYTES, *(b"%06d" % number for number in range(size - 256))]
    tokenizer = build_tokenizer("TikTokenizer", write_ranks(tmp_path / "t.tiktoken", tokens))
    pattern, eod, vocab_size = TIKTOKEN_FILES[size]
    assert (tokenizer.eod, tokenizer.vocab_size) == (eod, vocab_size)
    text = "it's 12345 größe\n\n  Über-all"
    own = tiktoken.Encoding(
        "own",
        pat_str=TIKTOKEN_PATTERNS[pattern],
        mergeable_ranks=dict(zip(tokens, range(size), strict=True)),
        special_tokens={},
    )
    assert tokenizer.tokenize(text) == own.encode(text)
    assert tokenizer.detokenize([*tokenizer.tokenize(text), vocab_size - 1]).startswith(text)


@pytest.mark.parametrize(
    "size, published",
    [(50_256, "r50k_base"), (50_280, "p50k_base"), (100_256, "cl100k_base"), (199_998, "o200k_base")],
)
def test_what_is_known_of_published_files_is_what_tiktoken_says(size, published, monkeypatch):
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *arguments, **more: {})  # would download the file
    encoding = openai_public.ENCODING_CONSTRUCTORS[published]()
    _, eod, vocab_size = TIKTOKEN_FILES[size]
    special = encoding["special_tokens"]
    assert eod == special["<|endoftext|>"]
    assert vocab_size == (encoding.get("explicit_n_vocab") or max(special.values()) + 1)


def test_the_names_of_patterns_are_patterns(tmp_path):
    file = write_ranks(tmp_path / "t.tiktoken", BYTES)
    for name, pattern in TIKTOKEN_PATTERNS.items():
        for given_as in (name, pattern):
            tokenizer = build_tokenizer("TikTokenizer", file, tiktoken_pattern=given_as)
            assert tokenizer.detokenize(tokenizer.tokenize(TEXTS[1])) == TEXTS[1]


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


@pytest.mark.parametrize("num_special", [1000, 5])
def test_megatrons_json_vocabulary(tmp_path, num_special):
    """As Megatron builds it: special tokens first, then as many of the others as there is room for."""
    tokens = [*BYTES, b"th", b"the", b" c", b"at", b" cat"]
    file = write_json_vocabulary(tmp_path / "vocab.json", tokens)
    given = {} if num_special == 1000 else {"tiktoken_num_special_tokens": num_special}
    size = num_special + len(tokens) - 1
    tokenizer = build_tokenizer("TikTokenizer", file, vocab_size=size, tiktoken_pattern="v2", **given)
    own = tiktoken.Encoding(
        "own",
        pat_str=TIKTOKEN_PATTERNS["v2"],
        mergeable_ranks={token: num_special + rank for rank, token in enumerate(tokens[:-1])},
        special_tokens={"<unk>": 0, "<s>": 1, "</s>": 2},
    )
    assert tokenizer.tokenize("the cat") == own.encode_ordinary("the cat") == [num_special + i for i in (257, 258, 259)]
    assert (tokenizer.eod, tokenizer.vocab_size) == (2, size)
    for text in TEXTS:
        assert tokenizer.tokenize(text) == own.encode_ordinary(text)
        assert tokenizer.detokenize([*tokenizer.tokenize(text), 2]) == text + "</s>"


@pytest.mark.parametrize(
    ("content", "sizes", "message"),
    [
        ("{}", {}, "not a JSON vocabulary"),
        ('[{"rank": 0}]', {}, "not a JSON vocabulary"),
        ("[1", {}, "not a JSON vocabulary"),
        (None, {}, "has 256 tokens, and --vocab-size 131072 less 1000 special ones .*: give --vocab-size 1256"),
        (None, {"vocab_size": 1255}, "room for 256 others"),
        (None, {"tiktoken_num_special_tokens": 2}, "at least 3 special tokens"),
    ],
)
def test_json_vocabularies_that_are_refused(tmp_path, content, sizes, message):
    file = tmp_path / "vocab.json"
    write_json_vocabulary(file, BYTES)
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        build_tokenizer("TikTokenizer", str(file), tiktoken_pattern="v2", **sizes)


def test_a_json_vocabulary_begins_with_the_bytes(tmp_path):
    file = write_json_vocabulary(tmp_path / "vocab.json", BYTES[::-1])
    with pytest.raises(ValueError, match="ranks must count from 0, bytes first"):
        build_tokenizer("TikTokenizer", file, tiktoken_pattern="v2", vocab_size=1256)


@pytest.mark.parametrize("pattern", ["v3", "cl100k", r"\w+", r"\S+", r"\p{L}+|\s+|\p{N}+", r"[^\x00]+"])
def test_a_pattern_that_loses_text_is_refused(tmp_path, pattern):
    file = write_ranks(tmp_path / "t.tiktoken", BYTES)
    with pytest.raises(ValueError, match=r"--tiktoken-pattern \S+ leaves out \d+ of 117 bytes of a text: give gpt2, "):
        build_tokenizer("TikTokenizer", file, tiktoken_pattern=pattern)


def test_a_pattern_that_matches_nothing_at_all_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--tiktoken-pattern \(\?=a\) matches an empty piece of text"):
        build_tokenizer("TikTokenizer", write_ranks(tmp_path / "t.tiktoken", BYTES), tiktoken_pattern="(?=a)")


def test_a_text_of_which_a_pattern_loses_some_is_refused(tmp_path):
    """A pattern that is good for all kinds of characters, but not for the letter ß."""
    tokenizer = build_tokenizer("TikTokenizer", write_ranks(tmp_path / "t", BYTES), tiktoken_pattern=r"[^ß]+")
    assert tokenizer.detokenize(tokenizer.tokenize("größer"[:2])) == "gr"
    for encode in (tokenizer.tokenize, lambda text: tokenizer.tokenize_batch(["fine", text])):
        with pytest.raises(ValueError, match=r"--tiktoken-pattern \[\^ß\]\+ leaves out 2 of (8|12) bytes of a text"):
            encode("größer")


def test_the_sample_has_all_kinds_of_characters():
    kinds = {unicodedata.category(chr(i)) for i in range(sys.maxunicode + 1)} - {"Cs"}
    assert {unicodedata.category(character) for character in ALL_KINDS} == kinds


def test_a_tokenizer_without_unknown_token_that_drops_characters_is_refused(tmp_path):
    for unknown in (None, "<unk>"):
        model = models.BPE({"a": 0, "b": 1, "<unk>": 2, "</s>": 3}, [], unk_token=unknown)
        Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        if unknown is None:
            with pytest.raises(ValueError, match=r"tokenizer\.json leaves characters out .* such as 'I'"):
                build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        else:
            assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).tokenize("aIb") == [0, 2, 1]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is not JSON"), (b"[]", "holds no JSON object but a list"), (b"\xff", "is not UTF-8 text")],
)
def test_damaged_files_beside_a_tokenizer_are_named(hf_tokenizer, hf_file, name, content, message):
    (hf_file.parent / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        build_tokenizer("HuggingFaceTokenizer", str(hf_file.parent))


def test_an_end_of_document_that_is_no_name_is_none(hf_tokenizer, hf_file):
    (hf_file.parent / "tokenizer_config.json").write_text('{"eos_token": ["<stop>"]}')
    with pytest.raises(ValueError, match="has no known end-of-document token"):
        build_tokenizer("HuggingFaceTokenizer", str(hf_file.parent))


KINDS_AND_FLAGS = {
    "SentencePieceTokenizer": "tokenizer_model",
    "HuggingFaceTokenizer": "tokenizer_model",
    "GPT2BPETokenizer": "vocab_file",
    "TikTokenizer": "tokenizer_model",
}


@pytest.mark.parametrize("kind", KINDS_AND_FLAGS)
def test_whatever_a_tokenizers_file_is_the_error_names_it(tmp_path, kind):
    (tmp_path / "merges").write_text("")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    contents = {
        "empty": b"",
        "zeros": bytes(1000),
        "object": b"{}",
        "list": b"[]",
        "latin": b"\xff\xfe",
        "deep": b"[" * 9999,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "folder", "pipe", "none"):
        flags = {KINDS_AND_FLAGS[kind]: str(tmp_path / name), "merge_file": str(tmp_path / "merges")}
        with pytest.raises((ValueError, FileNotFoundError), match=f"{tmp_path}/{name}"):
            build_tokenizer(kind, tiktoken_pattern="gpt2", **flags)


def test_tik_tokenizer_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(ValueError, match="give --tiktoken-pattern, gpt2, cl100k_base, o200k_base, v1, v2 or a"):
        build_tokenizer("TikTokenizer", write_ranks(tmp_path / "a", BYTES))
    with pytest.raises(ValueError, match="must hold each of the 256 bytes"):
        build_tokenizer("TikTokenizer", write_ranks(tmp_path / "a", BYTES[1:]), tiktoken_pattern="gpt2")
    with pytest.raises(ValueError, match=r"--tiktoken-pattern \(: "):
        build_tokenizer("TikTokenizer", write_ranks(tmp_path / "a", BYTES), tiktoken_pattern="(")


def test_gpt2_files_without_some_bytes_are_refused(gpt2_tokenizer, tmp_path):
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    del vocabulary["A"], vocabulary["B"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    with pytest.raises(ValueError, match="lacks 2 of the 256 bytes"):
        build_tokenizer("GPT2BPETokenizer", **files)


def test_a_model_with_too_few_ids_for_its_tokenizer_is_refused(hf_tokenizer, hf_file):
    config = hf_file.parent / "config.json"
    config.write_text(json.dumps({"vocab_size": hf_tokenizer.vocab_size}))
    build_tokenizer("HuggingFaceTokenizer", str(hf_file.parent))
    config.write_text(json.dumps({"vocab_size": hf_tokenizer.vocab_size - 1}))
    with pytest.raises(ValueError, match=f"but the model of .*config.json only {hf_tokenizer.vocab_size - 1} ids"):
        build_tokenizer("HuggingFaceTokenizer", str(hf_file.parent))


def test_byte_tokenizer_ids(byte_tokenizer):
    assert (byte_tokenizer.vocab_size, byte_tokenizer.eod) == (257, 256)
    assert byte_tokenizer.tokenize("aß") == [97, 195, 159]
    assert byte_tokenizer.detokenize([97, 256, 195]) == "a\ufffd"


def test_null_tokenizer_reads_ids():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("3 99") == [3, 99]
    assert tokenizer.detokenize([3, 99]) == "3 99"
    with pytest.raises(ValueError, match="not all below --vocab-size 100"):
        tokenizer.tokenize("3 100")
    for text in ("3 four", "3 -1", "3.0"):
        with pytest.raises(ValueError, match=f"'{text.split()[-1]}' is not an id"):
            tokenizer.tokenize(text)


def test_hf_adds_and_cuts_nothing_and_takes_the_configured_end(hf_tokenizer, byte_level_bpe):
    text = TEXTS[0] * 5
    assert hf_tokenizer.tokenize(text) == byte_level_bpe.encode(text).ids
    assert hf_tokenizer.eod == hf_tokenizer.vocab_size - 1


def test_hf_without_a_known_end_says_what_to_do(hf_file):
    with pytest.raises(ValueError, match=r"tokenizer_config\.json as .*eos_token"):
        build_tokenizer("HuggingFaceTokenizer", str(hf_file))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokenizer_type": "WordTokenizer"}, ValueError, "known: SentencePieceTokenizer, "),
        ({"tokenizer_type": "NullTokenizer"}, ValueError, "requires --vocab-size"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, ValueError, "requires --tokenizer-model"),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "no.model"},
            FileNotFoundError,
            "no.model does not exist",
        ),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": __file__}, ValueError, "not a SentencePiece"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": __file__}, ValueError, "not a tokenizer.json"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, ValueError, "requires --merge-file"),
        ({"tokenizer_type": "TikTokenizer", "tokenizer_model": __file__}, ValueError, "not a tiktoken file"),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__, "merge_file": __file__},
            ValueError,
            "not GPT-2 BPE files",
        ),
    ],
)
def test_bad_files_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        build_tokenizer(**arguments)


def test_missing_package_names_the_extra(monkeypatch, hf_file):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install tokenizers, or megatron_zpp's extra hf"):
        build_tokenizer("HuggingFaceTokenizer", str(hf_file))


def test_missing_tiktoken_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ImportError, match=r"pip install tiktoken, or megatron_zpp's extra data"):
        build_tokenizer("TikTokenizer", write_ranks(tmp_path / "a", BYTES), tiktoken_pattern="gpt2")


def test_megatrons_names_of_sentencepiece_models(tmp_path, corpus):
    model = str(write_sentencepiece_model(tmp_path / "t.model", corpus))
    plain, megatrons, llama2 = (
        build_tokenizer(name, model)
        for name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
    )
    bos = sentencepiece.SentencePieceProcessor(model_file=model).bos_id()
    for text in TEXTS:
        ids = plain.tokenize(text)
        assert megatrons.tokenize(text) == ids
        assert llama2.tokenize(text) == [bos, *ids]
        assert llama2.detokenize(llama2.tokenize(text)) == plain.detokenize(ids)
    assert [list(ids) for ids in llama2.tokenize_batch(TEXTS)] == [llama2.tokenize(text) for text in TEXTS]
    assert (llama2.eod, llama2.vocab_size) == (plain.eod, plain.vocab_size)
    without = str(write_sentencepiece_model(tmp_path / "w.model", corpus, bos_id=-1))
    with pytest.raises(ValueError, match="no beginning-of-sequence id"):
        build_tokenizer("Llama2Tokenizer", without)


def test_hftokenizer_is_huggingfaces(tmp_path, byte_level_bpe):
    byte_level_bpe.add_special_tokens(["<|endoftext|>"])
    byte_level_bpe.save(str(tmp_path / "tokenizer.json"))
    ours = [build_tokenizer(name, str(tmp_path)) for name in ("HFTokenizer", "HuggingFaceTokenizer")]
    assert ours[0].tokenize(TEXTS[0]) == ours[1].tokenize(TEXTS[0])


def test_a_model_of_hugging_face_by_its_name(tmp_path, byte_level_bpe, monkeypatch):
    """As ``hf download`` leaves it: a folder per model, in which a branch names a commit, and a commit has files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abc")
    byte_level_bpe.add_special_tokens(["<|end|>"])
    byte_level_bpe.save(str(snapshot / "tokenizer.json"))
    (snapshot / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    monkeypatch.chdir(tmp_path)
    ours = build_tokenizer("HuggingFaceTokenizer", "some/model")
    assert ours.tokenize(TEXTS[0]) == byte_level_bpe.encode(TEXTS[0]).ids
    assert ours.eod == byte_level_bpe.token_to_id("<|end|>")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json .*: hf download other/model "):
        build_tokenizer("HuggingFaceTokenizer", "other/model")
    with pytest.raises(FileNotFoundError, match=r"/no/such/folder does not exist$"):
        build_tokenizer("HuggingFaceTokenizer", "/no/such/folder")
