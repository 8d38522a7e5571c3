"""Every kind of tokenizer in every program: the table of docs/reference/data.md is what this test finds."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_zpp.commands import evaluate, generate_text
from megatron_zpp.commands.convert import export_hf, import_hf
from megatron_zpp.commands.data import preprocess_data
from tests.convert.hf.test_tokenizer import KINDS
from tests.ranks import run_ranks
from tests.training.small_run import start, train_quietly

pytestmark = pytest.mark.integrations
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "data.md"
PROGRAMS = ("preprocess", "train", "finetune", "SFT", "evaluate", "generate", "export", "import")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def with_template(folder: Path) -> dict[str, object]:
    flags = KINDS["huggingface-bos"](folder)
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return flags


TOKENIZERS: dict[str, Callable[[Path], dict[str, object]]] = {
    "SentencePieceTokenizer": KINDS["bpe"],
    "GPTSentencePieceTokenizer": lambda folder: KINDS["bpe"](folder) | {"tokenizer_type": "GPTSentencePieceTokenizer"},
    "MegatronSentencePieceTokenizer": KINDS["megatron"],
    "Llama2Tokenizer": KINDS["llama2"],
    "HuggingFaceTokenizer": with_template,
    "GPT2BPETokenizer": KINDS["gpt2"],
    "TikTokenizer": KINDS["megatrons-tiktoken"],
    "ByteTokenizer": KINDS["bytes"],
    "NullTokenizer": lambda folder: {"tokenizer_type": "NullTokenizer", "vocab_size": 100},
}


def try_programs(folder: Path, kind: str) -> Iterator[tuple[str, str | None]]:
    """Yield each program, and why it refuses a tokenizer; None: it works."""
    words = import_hf.tokenizer_words(TOKENIZERS[kind](folder))
    text = "3 1 4 1 5 92 65 35 " if kind == "NullTokenizer" else "def f(x):\n    return x\n"
    (folder / "text.jsonl").write_text(json.dumps({"text": 20 * text}) + "\n")
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": 5 * text}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    ours, theirs = str(folder / "ours"), str(folder / "hf")

    def preprocess(*more: str) -> None:
        argv = ["--output-prefix", str(folder / "data"), *words, *more]
        preprocess_data.run(preprocess_data.parse_arguments(argv))

    def train(name: str, *more: str) -> None:
        shape = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --split 1 --num-workers 0"
        run = "--micro-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1 --save-interval 1"
        argv = f"{shape} {run} --data-path {folder / name} --no-async-save".split()
        assert "iteration        1/" in train_quietly(start([*argv, *words, *more], "llama")[0])

    def sft() -> None:
        preprocess("--input", str(folder / "chats.jsonl"), "--chat")
        train("data_messages_chat", "--sft", "--load", ours, "--finetune", "--save", str(folder / "sft"))

    def evaluate_text() -> None:
        args = evaluate.parse_arguments(["--load", ours, "--eval-tasks", "none", "--device", "cpu"])
        model = evaluate.load_lm(args, *generate_text.open_checkpoint(args))
        assert model.loglikelihood_rolling([type("Request", (), {"args": (text,)})])[0] < 0

    def generate() -> None:
        argv = ["--load", ours, "--prompt", text, "--num-tokens", "2", "--device", "cpu"]
        assert "".join(generate_text.run(generate_text.parse_arguments(argv)))

    def import_again() -> None:
        given = words if kind == "NullTokenizer" else []
        argv = ["--input", theirs, "--save", str(folder / "again"), *given]
        assert "logits differ" in import_hf.import_(import_hf.parse_arguments(argv))

    programs: dict[str, Callable[[], object]] = {
        "preprocess": lambda: preprocess("--input", str(folder / "text.jsonl"), "--append-eod"),
        "train": lambda: train("data_text_document", "--save", ours),
        "finetune": lambda: train("data_text_document", "--load", ours, "--finetune", "--save", str(folder / "tuned")),
        "SFT": sft,
        "evaluate": evaluate_text,
        "generate": generate,
        "export": lambda: export_hf.export(export_hf.parse_arguments(["--load", ours, "--output", theirs])),
        "import": import_again,
    }
    for name in PROGRAMS:
        try:
            programs[name]()
            yield name, None
        except ValueError as error:
            yield name, str(error)


def on_rank(folder: str) -> dict[str, dict[str, str | None]]:
    found = {}
    for kind in TOKENIZERS:
        (Path(folder) / kind).mkdir()
        found[kind] = dict(try_programs(Path(folder) / kind, kind))
    return found


def test_the_table_of_tokenizers_and_programs_is_true(tmp_path):
    (found,) = run_ranks(1, on_rank, str(tmp_path), timeout=280)
    refused = [(kind, reason) for kind, cells in found.items() for reason in cells.values() if reason is not None]
    reasons = sorted({reason.replace(kind, "such a tokenizer") for kind, reason in refused})
    lines = ["| `--tokenizer-type` | " + " | ".join(PROGRAMS) + " |", "| --- |" + " --- |" * len(PROGRAMS)]
    for kind, cells in found.items():
        shown = ["yes" if reason is None else "no" for reason in cells.values()]
        lines.append(f"| `{kind}` | " + " | ".join(shown) + " |")
    table = "\n".join([*lines, "", *(f'"no": {reason}.' for reason in reasons)])
    assert table in PAGE.read_text(), f"the table in {PAGE} should be:\n{table}"
    assert len(refused) <= 0.15 * len(found) * len(PROGRAMS)
