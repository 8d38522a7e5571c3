"""Chats: from JSON lines to tokens and masks, and packed into samples."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.commands.data import merge_datasets, preprocess_data
from megatron_zpp.data.build import build_datasets
from megatron_zpp.data.chat_dataset import CHAT_BEGINS, HAS_LOSS, ID, first_fit
from megatron_zpp.data.gpt_dataset import SampleOptions
from megatron_zpp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_zpp.data.loader import make_batch, stack_samples
from tests.data.small_data import bytes_of, write_tokenizer_of_bytes
from tests.tools import call

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% elif m.role == 'user' %}U{{ m.content }}<eos>{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{% endfor %}"
)
OPTIONS = {"reset_position_ids": True, "reset_attention_mask": True, "sft": True}


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of bytes and <eos>, and TEMPLATE."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer_of_bytes(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def preprocess(tmp_path, tokenizer, capsys):
    """Run the tool with --chat on lines, or on the last call's; return its exit code and stderr.

    The output's prefix is tmp_path / "out".
    """

    def run(lines, *more: str):
        if lines is not None:
            (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        words = ["--chat", "--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), *more]
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
        code, _, err = call(preprocess_data, *words)
        return code, err

    return run


def parts(prefix, tokenizer) -> list[list[tuple[str, int]]]:
    """Return each chat's parts: the text, and whether it has loss."""
    from tokenizers import Tokenizer

    library, dataset = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()

    def text(sequence: int) -> str:
        return library.decode(dataset[sequence].tolist(), skip_special_tokens=False)

    assert dataset.sequence_modes is not None
    return [[(text(i), int(dataset.sequence_modes[i])) for i in range(*ends[d : d + 2])] for d in range(len(ends) - 1)]


CHATS = [messages("hi", "hello, é"), messages("a", "b", "c d", "e"), messages("?", "!")]
PARTS = [
    [("Uhi<eos>A", 0), ("hello, é<eos>", 1)],
    [("Ua<eos>A", 0), ("b<eos>", 1), ("Uc d<eos>A", 0), ("e<eos>", 1)],
    [("U?<eos>A", 0), ("!<eos>", 1)],
]


def test_the_chat_template_says_what_has_loss(preprocess, tmp_path, tokenizer):
    assert preprocess([json.dumps({"messages": chat}) for chat in CHATS]) == (0, "")
    assert parts(tmp_path / "out_messages_chat", tokenizer) == PARTS
    assert (
        preprocess([json.dumps({"talk": chat}) for chat in CHATS[:1]], "--json-keys", "talk", "--workers", "2")[0] == 0
    )
    assert parts(tmp_path / "out_talk_chat", tokenizer) == PARTS[:1]
    both = [str(tmp_path / f"out_{key}_chat") for key in ("messages", "talk")]
    merge_datasets.merge(both, str(tmp_path / "all"))
    assert parts(tmp_path / "all", tokenizer) == PARTS + PARTS[:1]


def test_a_job_that_stopped_at_a_bad_chat_goes_on(preprocess, tmp_path):
    lines = [json.dumps({"messages": chat}) for chat in [*CHATS, messages("long " * 200, "yes")] * 300]  # two blocks
    assert preprocess(lines)[0] == 0
    undisturbed = bytes_of(tmp_path)
    for file in tmp_path.glob("out*"):
        file.unlink()
    bad = json.dumps({"messages": [{"role": "tool", "content": "x"}]})
    code, err = preprocess([*lines, bad], "--save-seconds", "0")
    assert code == 2 and f"in.jsonl:{len(lines) + 1}: " in err and "no tool" in err
    code, err = preprocess(None, "--skip-bad-lines")
    assert code == 0 and "continuing after" in err
    assert {name: bytes_of(tmp_path)[name] for name in undisturbed} == undisturbed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a text", "the value of 'messages' is not a chat"),
        ([], "is not a chat"),
        (["a text"], "is not a chat"),
        ([{"content": "x"}], "is not a chat"),
        (messages("only a question"), "marks no token of this chat as the assistant's"),
        (messages("\ud800", "x"), "surrogates not allowed"),
        (messages(None, "x"), "a message of 'user' has no text as its 'content'; it has 'role', 'content'"),
        (
            [{"role": "user", "text": "q"}, *messages("", "x")[1:]],
            "has no text as its 'content'; it has 'role', 'text'",
        ),
        (messages(7, "x"), "a message of 'user' has no text as its 'content'"),
        (messages({"type": "text", "text": "q"}, "x"), "has no text as its 'content'"),
        (messages([], "x"), "a message of 'user' has parts that are not"),
        (messages([{"type": "text", "text": "q"}, {"type": "image", "url": "u"}], "x"), "has parts that are not"),
        (messages([{"type": "image", "text": "u"}], "x"), "has parts that are not"),
        (messages([{"type": "text", "text": None}], "x"), "has parts that are not"),
    ],
)
def test_bad_chats_are_named(preprocess, value, message):
    code, err = preprocess([json.dumps({"messages": CHATS[0]}), json.dumps({"messages": value})])
    assert code == 2 and "in.jsonl:2: " in err and message in err and err.count("\n") == 1


def test_texts_in_parts_are_trained_on_as_the_text_and_not_as_python_s_list(preprocess, tmp_path, tokenizer):
    hi = [{"type": "text", "text": "h"}, "i"]
    whole = [{"type": "text", "text": "hello, "}, {"type": "text", "text": "é"}]
    assert preprocess([json.dumps({"messages": messages(hi, whole)})]) == (0, "")
    assert parts(tmp_path / "out_messages_chat", tokenizer) == PARTS[:1]


def test_a_message_of_calls_alone_needs_no_content(preprocess, tmp_path, tokenizer):
    (tokenizer / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content or m.tool_calls[0].name }}{% endgeneration %}{% endfor %}"
    )
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"name": "find"}]}]
    assert preprocess([json.dumps({"messages": chat})]) == (0, "")
    assert parts(tmp_path / "out_messages_chat", tokenizer) == [[("find", 1)]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{{ 1 // (messages | length - 3) }}", "by zero"),
        ("{{ 2.0 ** (messages | length * 400) }}", "out of range"),
        ("{{ messages[messages | length - 3]['x']['y'] if messages | length == 3 }}", "has no attribute 'x'"),
    ],
)
def test_whatever_a_template_raises_is_a_bad_line(preprocess, tmp_path, tokenizer, wrong, message):
    (tokenizer / "chat_template.jinja").write_text(wrong + TEMPLATE)
    lines = [json.dumps({"messages": messages(*contents)}) for contents in (("a", "b"), ("a", "b", "c"))]
    code, err = preprocess(lines)
    assert code == 2 and "in.jsonl:2: the tokenizer's chat template does not work: " in err and message in err
    (tokenizer / "chat_template.jinja").write_text(wrong + TEMPLATE)
    assert preprocess(lines, "--skip-bad-lines", "--restart")[0] == 0
    assert len(parts(tmp_path / "out_messages_chat", tokenizer)) == 1


def test_a_template_that_marks_nothing_is_refused(preprocess, tokenizer):
    (tokenizer / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code, err = preprocess([json.dumps({"messages": CHATS[0]})])
    assert code == 2 and "put {% generation %} and {% endgeneration %} around it" in err
    (tokenizer / "chat_template.jinja").unlink()
    assert "has no chat template" in preprocess([json.dumps({"messages": CHATS[0]})])[1]


def write_chats(prefix, chats) -> str:
    """Write chats, each a list of (tokens, mode)."""
    with IndexedDatasetWriter(prefix, "<u2", has_modes=True) as writer:
        for chat in chats:
            lengths, modes = [len(ids) for ids, _ in chat], np.array([mode for _, mode in chat], np.uint8)
            tokens = np.array([token for ids, _ in chat for token in ids])
            writer.add_documents(tokens, lengths, [len(chat)], modes)
    return str(prefix)


def chats_of(rng, count: int, longest: int) -> list:
    """Chat i consists of the token i + 1, so that each token says whose it is."""
    return [
        [([i + 1] * n, 0), ([i + 1] * m, 1)] for i, (n, m) in enumerate(rng.integers(1, longest // 2 + 1, (count, 2)))
    ]


def build(prefix: str, seq_length: int, num_samples: int = 1, **more):
    options = SampleOptions(seq_length=seq_length, seed=3, **OPTIONS)
    return build_datasets(options, data_path=[prefix], split="1", num_samples=(num_samples, 0, 0), **more).train


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_each_chat_goes_into_the_first_sample_with_room(lengths):
    room, expected = [], []
    for length in lengths:
        place = next((i for i, free in enumerate(room) if free >= length), len(room))
        room += [20] if place == len(room) else []
        room[place] -= length
        expected.append(place)
    assert first_fit(np.array(lengths), 20).tolist() == expected


def test_every_epoch_has_every_chat_whole_and_once(tmp_path):
    chats = chats_of(np.random.default_rng(0), 50, 16)
    dataset = build(write_chats(tmp_path / "x", chats), 31, 60)
    assert len(dataset) >= 60
    flat = [token for i in range(len(dataset)) for token in dataset[i].tolist()]
    assert max(len(dataset[i]) for i in range(len(dataset))) <= 32
    begins = [i for i, token in enumerate(flat) if token & CHAT_BEGINS]
    orders = []
    for first, last in zip(begins, [*begins[1:], len(flat)], strict=True):
        ids, masks = [token & ID for token in flat[first:last]], [bool(token & HAS_LOSS) for token in flat[first:last]]
        (asks, _), (answers, _) = chats[ids[0] - 1]
        assert ids == asks + answers and masks == [False] * len(asks) + [True] * len(answers)
        orders.append(ids[0])
    epochs = [orders[i : i + 50] for i in range(0, len(orders), 50)]
    assert len(epochs) > 2 and all(sorted(epoch) == list(range(1, 51)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    shorter = build(dataset.indexed.prefix, 31, 20)
    assert len(shorter) < len(dataset) and shorter.order == dataset.order
    assert all(np.array_equal(shorter[i], dataset[i]) for i in range(len(shorter)))


def test_a_long_chat_loses_its_end_and_is_counted(tmp_path):
    dataset = build(write_chats(tmp_path / "x", [[([1] * 5, 0), ([2] * 20, 1)], [([3], 0), ([4], 1)]]), 8)
    assert sorted(len(dataset[i]) for i in range(len(dataset))) == [2, 9]
    text = f"2 chats of {tmp_path}/x in 2 samples an epoch, 61% full; 1 chats are longer than --seq-length 8 and lose"
    assert dataset.describe().startswith(text)


def test_a_chat_whose_answers_are_all_cut_is_left_out_and_counted(tmp_path):
    """Its first token is predicted by nothing, and its answer may begin just beyond the sample."""
    chats = [
        [([1] * 9, 0), ([2] * 20, 1)],
        [([3] * 8, 0), ([4], 1)],
        [([5], 1), ([6] * 4, 0)],
        [([7], 1), ([8] * 9, 0), ([9], 1)],
        [([10] * 2, 1)],
    ]
    dataset = build(write_chats(tmp_path / "x", chats), 8, 4)
    seen = {int(token & ID) for i in range(len(dataset)) for token in dataset[i]}
    assert seen == {3, 4, 10}
    assert dataset.describe().startswith(f"2 chats of {tmp_path}/x in 2 samples an epoch, 61% full; 0 chats are longer")
    assert dataset.describe().endswith("; 3 more lose all of their answers and are left out")
    assert [build(dataset.indexed.prefix, length).order["left_out"] for length in (8, 32)] == [3, 1]
    batch = make_batch(stack_samples([dataset[i] for i in range(len(dataset))], 9), dataset.options)
    assert batch["loss_mask"].sum(dim=1).min() > 0


def test_chats_whose_answers_are_all_cut_are_refused(tmp_path):
    prefix = write_chats(tmp_path / "x", [[([1] * 9, 0), ([2] * 20, 1)]] * 3)
    none = r"none of the 3 chats in the train split of .*/x has an answer within --seq-length 8: give a larger one"
    with pytest.raises(ValueError, match=none):
        build(prefix, 8)


def test_batches_separate_chats_and_padding():
    loss, begins = HAS_LOSS, CHAT_BEGINS
    samples = [
        [1 | begins, 2 | loss, 3 | begins, 4, 5 | loss, 6 | loss],
        [7 | begins | loss, 8 | loss, 9 | begins | loss, 10 | loss],
    ]
    ids = stack_samples([np.array(sample) for sample in samples], 7)
    batch = make_batch(ids, SampleOptions(seq_length=6, seed=1, **OPTIONS))
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5, 6, 0], [8, 9, 10, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 0, 1, 0, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 6, 8, 10, 12]


def test_each_kind_of_data_is_refused_by_the_other(tmp_path):
    chats = write_chats(tmp_path / "chats", chats_of(np.random.default_rng(2), 4, 16))
    with pytest.raises(ValueError, match=r"holds chats, .* train on chats with --sft"):
        build_datasets(SampleOptions(seq_length=8, seed=1), data_path=[chats], split="1", num_samples=(1, 0, 0))
    with IndexedDatasetWriter(tmp_path / "plain", "<u2") as writer:
        writer.add_document([[1, 2, 3]])
    with pytest.raises(ValueError, match="does not mark the assistant's words: make it with --chat"):
        build(str(tmp_path / "plain"), 8)
    with pytest.raises(FileNotFoundError, match=r"tools/preprocess_data.py makes a dataset of such a file"):
        build(str(tmp_path / "chats.jsonl"), 8)
    with pytest.raises(ValueError, match=r"the valid split of .* has none of its 4 chats"):
        options = SampleOptions(seq_length=8, seed=3, **OPTIONS)
        build_datasets(options, data_path=[chats], split="100,1,0", num_samples=(1, 1, 0))
    with pytest.raises(ValueError, match="one holds chats"):
        merge_datasets.merge([chats, str(tmp_path / "plain")], str(tmp_path / "all"))
    with (
        pytest.raises(ValueError, match="has one for each sequence"),
        IndexedDatasetWriter(tmp_path / "y", "<u2") as writer,
    ):
        writer.add_documents(np.array([1]), [1], [1], np.array([1], np.uint8))
