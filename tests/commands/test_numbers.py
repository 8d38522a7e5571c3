"""The tools' flags: no word is a traceback, and what is refused is named."""

import argparse
import itertools
import sys

import pytest

from megatron_zpp.commands import estimate, generate_text, inspect_checkpoint, measure_cluster, plan, suggest_settings
from megatron_zpp.commands.convert import export_hf, export_megatron, import_megatron
from megatron_zpp.commands.data import inspect_dataset, preprocess_data, train_tokenizer
from tests.arguments.fuzzing import WORDS

TOOLS = {
    preprocess_data: (
        "--input x --output-prefix y --tokenizer-type NullTokenizer",
        "--workers --max-document-megabytes --save-seconds --log-interval --vocab-size",
    ),
    train_tokenizer: ("--input x --vocab-size 300 --output y", "--vocab-size --max-megabytes"),
    generate_text: ("--load x", "--ckpt-step --num-tokens --temperature --top-k --top-p --seed --device"),
    export_hf: ("--load x --output y", "--ckpt-step --vocab-size --max-file-size"),
    export_megatron: ("--load x --output y", "--ckpt-step"),
    import_megatron: ("--input x --save y", "--ckpt-step --vocab-size"),
    estimate: ("--vocabulary 9 pretrain-gpt", "--nodes --ranks-per-node --link-gbps --vocabulary"),
    measure_cluster: ("--output x", "--hidden-size --tokens --ranks-per-node"),
    plan: (
        "--cluster x --vocabulary 9 pretrain-gpt",
        "--vocabulary --dollars-per-gpu-hour --usable-memory --rows --commands",
    ),
    inspect_dataset: ("x", "--show --vocab-size"),
    inspect_checkpoint: ("verify x", "--ckpt-step"),
    suggest_settings: ("gpt", "--local-ranks --local-nodes --iterations --link-gbps"),
}
NONSENSE = {"-1", "nan", "inf", "", "9" * 30, "1e400", "ünï🙂"}


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_no_word_for_a_number_is_a_traceback(monkeypatch, capsys, tmp_path, tool):
    monkeypatch.chdir(tmp_path)
    common, flags = TOOLS[tool]
    for flag, word in itertools.product(flags.split(), {*WORDS, *NONSENSE}):
        given = [f"{flag}={word}"]
        argv = [*common.split(), *given] if tool not in (estimate, plan) else [*given, *common.split()]
        try:
            if hasattr(tool, "parse_arguments"):
                tool.parse_arguments(argv)
            else:
                monkeypatch.setattr(sys, "argv", ["tool", *argv])
                assert tool.main() != 0  # there is no such file
        except SystemExit as stop:
            assert stop.code == 2
            said = capsys.readouterr().err
            assert "error: " in said and (flag in said or tool is suggest_settings), (flag, word, said)
        else:
            assert word not in NONSENSE - {"9" * 30}, (flag, word)


@pytest.mark.parametrize(("word", "said"), [("1e-300", "1e-30"), ("nan", "finite"), ("-0.5", "at least 0")])
def test_temperatures_that_no_softmax_survives(word, said):
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        generate_text.temperature(word)
