"""Every tokenizer gives texts back, ends documents with a separate id, and names what it misses."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import (
    SentencePieceTokenizer as MegatronsSentencePieceTokenizer,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from megatron_zpp.convert.hf.tokenizer import write_tokenizer
from megatron_zpp.data.text.description import describe_tokenizer, differences
from megatron_zpp.data.text.preprocessing import Job, preprocess
from megatron_zpp.data.text.tokenizers import build_tokenizer
from tests.data.small_data import BYTES, train_sentencepiece, write_ranks

TEXTS = ["the cat sat on the mat\n", "größe naïve 東京 🙂", "  indented\n\n\ttext  ", "a<|endoftext|>b </s>"]
HF = {"tokenizer_type": "HuggingFaceTokenizer"}
CORPUS = [f"{TEXTS[i % 2]} number {i}\n    the cat sat again" for i in range(200)]


@pytest.fixture(scope="session")
def byte_level_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return tokenizer


def write_sentencepiece_model(path: Path, **special_ids: int) -> str:
    return train_sentencepiece(path, CORPUS, vocab_size=320, add_dummy_prefix=False, **special_ids)


@pytest.fixture
def sentencepiece_tokenizer(tmp_path):
    return build_tokenizer("SentencePieceTokenizer", write_sentencepiece_model(tmp_path / "t.model"))


def test_a_sentencepiece_model_may_end_documents_with_its_first_id_but_must_have_one(tmp_path):
    first = write_sentencepiece_model(tmp_path / "first.model", eos_id=0, unk_id=1, bos_id=2)
    ends = [
        describe_tokenizer("SentencePieceTokenizer", build_tokenizer("SentencePieceTokenizer", model))
        for model in (first, write_sentencepiece_model(tmp_path / "second.model"))
    ]
    assert ends[0]["eod"] == 0 and "the end of a document is 0, here 2" in differences(*ends)
    without = write_sentencepiece_model(tmp_path / "without.model", eos_id=-1)
    with pytest.raises(ValueError, match="has no end-of-sequence id to end documents with"):
        build_tokenizer("SentencePieceTokenizer", without)


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
def tiktoken_tokenizer(tmp_path):
    file = write_ranks(tmp_path / "t.tiktoken", [*BYTES, b"th", b"the", b" c", b"at", b" cat"])
    return build_tokenizer("TikTokenizer", file, tiktoken_pattern="gpt2")


@pytest.fixture
def byte_tokenizer():
    return build_tokenizer("ByteTokenizer")


# Not in SentencePiece's: its own letter for a blank, which comes back as a blank.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60)


@pytest.fixture
def megatron_tokenizer(tmp_path):
    return build_tokenizer("MegatronSentencePieceTokenizer", write_sentencepiece_model(tmp_path / "t.model"))


@pytest.mark.parametrize("name", ["sentencepiece", "megatron", "gpt2", "hf", "tiktoken", "byte"])
@given(texts=st.lists(TEXT, max_size=5))
@example(texts=TEXTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_texts_come_back_and_a_batch_is_no_other_than_its_texts(request, name, texts):
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    batch = [list(map(int, ids)) for ids in tokenizer.tokenize_batch(texts)]
    assert batch == [tokenizer.tokenize(text) for text in texts]
    prefix = list(tokenizer.special.prefix)
    assert all(ids[: len(prefix)] == prefix for ids in batch)
    assert [ids[len(prefix) :] for ids in batch] == [tokenizer.tokenize(text, False) for text in texts]
    assert [tokenizer.detokenize(ids[len(prefix) :]) for ids in batch] == texts
    assert all(0 <= i < tokenizer.vocab_size for ids in [*batch, [tokenizer.eod]] for i in ids)
    assert all(tokenizer.eod not in ids for ids in batch)  # spelling another tokenizer's token ends nothing


def test_a_tokenizer_without_unknown_token_that_drops_characters_is_refused(tmp_path):
    for unknown in (None, "<unk>"):
        model = models.BPE({"a": 0, "b": 1, "<unk>": 2, "</s>": 3}, [], unk_token=unknown)
        Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        if unknown is None:
            with pytest.raises(ValueError, match=r"tokenizer\.json leaves characters out .* such as 'I'"):
                build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
        else:
            assert build_tokenizer("HuggingFaceTokenizer", str(tmp_path)).tokenize("aIb") == [0, 2, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            (name, content, f"{name} {message}")
            for name in ("tokenizer_config.json", "config.json")
            for content, message in (
                *((b"", "is not JSON"), (b"[]", "holds no JSON object but a list")),
                (b"\xff", "is not UTF-8 text"),
            )
        ),
        ("tokenizer_config.json", b'{"eos_token": ["<stop>"]}', "has no known end-of-document token"),
        ("tokenizer_config.json", b"{}", r'name its "eos_token" in .*tokenizer_config\.json'),
        ("config.json", b'{"vocab_size": 351}', r"ids up to 351, but the model of .*config\.json only 351"),
        ("config.json", b'{"vocab_size": 352}', None),
    ],
)
def test_files_beside_a_tokenizer_that_do_not_fit_are_named(hf_tokenizer, hf_file, name, content, message):
    assert hf_tokenizer.vocab_size == 352
    (hf_file.parent / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        build_tokenizer("HuggingFaceTokenizer", str(hf_file.parent))


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer"])
def test_whatever_a_tokenizers_file_is_the_error_names_it(tmp_path, kind):
    (tmp_path / "merges").write_text("")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    contents = {"empty": b"", "zeros": bytes(1000), "object": b"{}", "list": b"[]", "latin": b"\xff\xfe"}
    contents["deep"] = b"[" * 9999
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "folder", "pipe", "none"):
        flags = {"tokenizer_model": str(tmp_path / name), "vocab_file": str(tmp_path / name)}
        with pytest.raises((ValueError, FileNotFoundError), match=f"{tmp_path}/{name}"):
            build_tokenizer(kind, tiktoken_pattern="gpt2", merge_file=str(tmp_path / "merges"), **flags)


def test_gpt2_files_without_some_bytes_are_refused(gpt2_tokenizer, tmp_path):
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    del vocabulary["A"], vocabulary["B"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    with pytest.raises(ValueError, match="lacks 2 of the 256 bytes"):
        build_tokenizer("GPT2BPETokenizer", **files)


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


def test_hf_puts_its_bos_in_front_unless_told_not_to_and_cuts_nothing(hf_tokenizer, hf_file, byte_level_bpe):
    text = TEXTS[0] * 5
    ids = byte_level_bpe.encode(text).ids
    bare = build_tokenizer("HuggingFaceTokenizer", str(hf_file), tokenizer_hf_no_include_special_tokens=True)
    assert bare.tokenize(text) == bare.tokenize_batch([text])[0] == hf_tokenizer.tokenize(text, False) == ids
    assert hf_tokenizer.tokenize(text) == hf_tokenizer.tokenize_batch([text])[0] == [350, *ids]
    assert (hf_tokenizer.special.prefix, bare.special.prefix) == ((350,), ())
    assert hf_tokenizer.eod == hf_tokenizer.vocab_size - 1


PLAIN, IM_END = {"tokenizer_class": "PreTrainedTokenizerFast"}, {"eos_token": "<|im_end|>"}
IN_DECODER = {"added_tokens_decoder": {"352": {"content": "<|im_end|>", "special": True}}}
PLACES: dict[str, dict[str, dict]] = {  # where published folders name special tokens
    "tokenizer_config": {"tokenizer_config": PLAIN | {"eos_token": "<stop>", "bos_token": "<bos>"}},
    "as an object": {"tokenizer_config": PLAIN | {"eos_token": {"__type": "AddedToken", "content": "<stop>"}}},
    "special_tokens_map": {"tokenizer_config": PLAIN, "special_tokens_map": {"eos_token": {"content": "<stop>"}}},
    "no tokenizer_config": {"special_tokens_map": {"eos_token": "<stop>", "pad_token": "<bos>"}},
    "two files": {
        "tokenizer_config": PLAIN | IN_DECODER | {"bos_token": "<bos>", "eos_token": "<stop>"},
        "special_tokens_map": {"bos_token": "<stop>", "eos_token": "<stop>"},
    },
    "an added token": {"tokenizer_config": PLAIN | IM_END | IN_DECODER},
    "added_tokens.json": {"tokenizer_config": PLAIN | IM_END, "added_tokens": {"<|im_end|>": 352}},
    "in no other file": {"tokenizer_config": PLAIN | IM_END},
    "add_bos_token": {"tokenizer_config": PLAIN | {"eos_token": "<stop>", "add_bos_token": False}},
}


@pytest.mark.parametrize("files", PLACES.values(), ids=PLACES)
def test_special_tokens_are_those_that_transformers_finds(hf_file, files):
    for name, content in files.items():
        (hf_file.parent / f"{name}.json").write_text(json.dumps(content))
    ours, theirs = build_tokenizer("HuggingFaceTokenizer", str(hf_file)), AutoTokenizer.from_pretrained(hf_file.parent)
    special = ours.special
    assert special.eod == theirs.eos_token_id and special.bos == theirs.bos_token_id
    assert special.pad == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)
    for text in (*TEXTS, "<bos><stop><|im_end|>"):
        assert ours.tokenize(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("files", "eod", "source"),
    [
        ({"generation_config": {"eos_token_id": [351, 350]}}, 351, "generation_config.json"),
        ({"config": {"eos_token_id": 351}, "tokenizer_config": {"eos_token": None}}, 351, "config.json"),
        ({"config": {"eos_token_id": 350}, "generation_config": {"eos_token_id": 351}}, 351, "generation_config.json"),
    ],
)
def test_an_end_that_no_tokenizers_file_names_is_that_of_generation(hf_file, files, eod, source):
    for name, content in files.items():
        (hf_file.parent / f"{name}.json").write_text(json.dumps(content))
    special = build_tokenizer("HuggingFaceTokenizer", str(hf_file)).special
    assert (special.eod, special.sources["eod"], special.conflict) == (eod, source, None)


def test_no_letter_ends_documents_because_a_model_of_another_tokenizer_lies_beside(hf_file, tmp_path):
    for end in (2, 50256):
        (hf_file.parent / "config.json").write_text(json.dumps({"eos_token_id": end}))
        with pytest.raises(ValueError, match='has no known end-of-document token; name its "eos_token"'):
            build_tokenizer("HuggingFaceTokenizer", str(hf_file))
    tokenizer = Tokenizer.from_file(str(hf_file))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(hf_file))
    ours = build_tokenizer("HuggingFaceTokenizer", str(hf_file))
    assert ours.eod == tokenizer.token_to_id("<|endoftext|>")
    (tmp_path / "hf").mkdir()
    ids = write_tokenizer({**HF, "tokenizer_model": str(hf_file)}, ours, tmp_path / "hf")
    assert ids["eos_token_id"] == ours.eod


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"eos_token": "<stop>"}, "special_tokens_map": {"eos_token": "<bos>"}},
            r"tokenizer_config.json ends texts with <stop> and .*_map.json ends texts with <bos>: make both",
        ),
        (
            {"tokenizer_config": {"eos_token": "<stop>"}, "generation_config": {"eos_token_id": [350, 7]}},
            r"tokenizer_config.json ends texts with 351 \(<stop>\), and generation_config.json with 350, 7: make both",
        ),
    ],
)
def test_files_that_name_two_ends_are_refused_before_any_text_is_tokenized(hf_file, tmp_path, files, message):
    for name, content in files.items():
        (hf_file.parent / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    job = Job((str(tmp_path / "in.jsonl"),), str(tmp_path / "out"), {**HF, "tokenizer_model": str(hf_file.parent)})
    with pytest.raises(ValueError, match=message):
        preprocess(job, lambda *_: None, print)
    assert not list(tmp_path.glob("out*"))


def test_megatrons_older_sentencepiece_tokenizer_is_megatrons(tmp_path):
    """Its tokens were added in this order; megatron-core's own class adds any that it is told to."""
    model = write_sentencepiece_model(tmp_path / "t.model")
    names = dict(cls="<CLS>", sep="<SEP>", eod="<EOD>", mask="<MASK>", pad="<PAD>", bos="<s>", eos="</s>")
    tokens = {f"{name}_token": token for name, token in names.items()}
    theirs = MegatronsSentencePieceTokenizer(model, tokens, True, trim_spm_separator_after_special_token=False)
    ours = build_tokenizer("MegatronSentencePieceTokenizer", model)
    plain = build_tokenizer("SentencePieceTokenizer", model)
    assert (ours.vocab_size, ours.eod, ours.special.bos) == (theirs.vocab_size, plain.vocab_size + 2, theirs.bos_id)
    assert ours.eod == theirs.token_to_id("<EOD>") and ours.special.pad == theirs.pad_id
    for text in (*TEXTS, "<CLS>two <SEP> parts<EOD>", "<s>a</s>"):
        assert ours.tokenize(text) == theirs.text_to_ids(text)


@pytest.mark.parametrize(
    ("package", "kind", "extra"), [("tokenizers", "HuggingFaceTokenizer", "hf"), ("tiktoken", "TikTokenizer", "data")]
)
def test_missing_package_names_the_extra(monkeypatch, hf_file, package, kind, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install {package}, or megatron_zpp's extra {extra}"):
        build_tokenizer(kind, str(hf_file))


def test_a_model_of_hugging_face_by_its_name(tmp_path, byte_level_bpe, monkeypatch):
    """As ``hf download`` leaves it: a folder per model, in which a branch names a commit, and a commit has files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abc")
    theirs = Tokenizer.from_str(byte_level_bpe.to_str())
    theirs.add_special_tokens(["<|end|>"])
    theirs.save(str(snapshot / "tokenizer.json"))
    (snapshot / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    monkeypatch.chdir(tmp_path)
    ours = build_tokenizer("HFTokenizer", "some/model")  # its other name
    assert ours.tokenize(TEXTS[0]) == theirs.encode(TEXTS[0]).ids
    assert ours.eod == theirs.token_to_id("<|end|>")
    with pytest.raises(FileNotFoundError, match=r"has no model of that name: hf download other/model "):
        build_tokenizer("HuggingFaceTokenizer", "other/model")
    with pytest.raises(FileNotFoundError, match=r"/no/such/folder does not exist$"):
        build_tokenizer("HuggingFaceTokenizer", "/no/such/folder")


def said(*messages: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": message}] for message in messages]


def test_a_chat_template_writes_the_message(hf_tokenizer, hf_file):
    template = "{{ bos_token }}|{{ messages[0].content }}{% if add_generation_prompt %}|answer:{% endif %}"
    several = [{"name": "tool", "template": "?"}, {"name": "default", "template": template}]
    for in_config in (template, several):
        config = {"bos_token": "<bos>", "chat_template": in_config}
        (hf_file.parent / "tokenizer_config.json").write_text(json.dumps(config))
        assert hf_tokenizer.apply_chat_template(said("a <b>", "c")) == ["<bos>|a <b>|answer:", "<bos>|c|answer:"]
    (hf_file.parent / "chat_template.jinja").write_text("from the file")
    assert hf_tokenizer.apply_chat_template(said("a")) == ["from the file"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", r"has no chat template \(chat_template.jinja\)"),
        ("{% if %}", "template does not work: Expected an expression"),
        ("{{ raise_exception('only users') }}", "template does not work: only users"),
        ("{{ ''.__class__.__mro__ }}", "template does not work: .*unsafe"),
        ("{{ messages + 1 }}", "template does not work: can only concatenate"),
    ],
)
def test_chat_templates_that_do_not_work(hf_tokenizer, hf_file, template, message):
    (hf_file.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match=message):
        hf_tokenizer.apply_chat_template(said("a"))
