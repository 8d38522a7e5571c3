"""Every tokenizer gives texts back, ends documents with an id of its own, and names what it misses."""

import io
import json
import sys

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from megatron_zpp.data.tokenizers import build_tokenizer

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


@pytest.fixture
def sentencepiece_tokenizer(corpus, tmp_path):
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
    )
    (tmp_path / "t.model").write_bytes(model.getvalue())
    return build_tokenizer("SentencePieceTokenizer", str(tmp_path / "t.model"))


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


@pytest.fixture
def byte_tokenizer():
    return build_tokenizer("ByteTokenizer")


@pytest.mark.parametrize("name", ["sentencepiece", "gpt2", "hf", "byte"])
def test_texts_come_back(request, name):
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    for text in TEXTS:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod not in ids  # spelling another tokenizer's token ends nothing
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


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
        ({"tokenizer_type": "NullTokenizer"}, ValueError, "needs --vocab-size"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, ValueError, "needs --tokenizer-model"),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "no.model"},
            FileNotFoundError,
            "no.model does not exist",
        ),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": __file__}, ValueError, "not a SentencePiece"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": __file__}, ValueError, "not a tokenizer.json"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, ValueError, "needs --merge-file"),
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
    with pytest.raises(ImportError, match=r"pip install 'megatron_zpp\[hf\]'"):
        build_tokenizer("HuggingFaceTokenizer", str(hf_file))
