"""Parse a command line of a small run, or say why it is refused."""

import shlex
from typing import Any

import pytest

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import Architecture, find_architecture
from megatron_zpp.settings.resolved import ResolvedSettings

MOCK = "--mock-data --vocab-size 100"
SHAPE = f"--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 {MOCK} "
SMALL = f"{SHAPE} --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
BYTES = "--tokenizer-type ByteTokenizer"
YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 4096"


def parse(
    command: str, architecture: str | Architecture = "gpt", world_size: int | None = 4
) -> tuple[ResolvedSettings, list[str]]:
    """Return settings and notes."""
    notes: list[str] = []
    found = find_architecture(architecture) if isinstance(architecture, str) else architecture
    return parse_settings(found, shlex.split(command), world_size, notes.append), notes


def flat(command: str, *args: Any) -> dict[str, Any]:
    return parse(command, *args)[0].as_flat_dict()


def mistakes(command: str, *args: Any) -> list[str]:
    """Return the messages of a refusal, each of which is one line."""
    with pytest.raises(SettingsError) as error:
        parse(command, *args)
    assert not any("\n" in message for message in error.value.messages)
    return list(error.value.messages)


def refusal(command: str, *args: Any) -> str:
    """Return the only message of a refusal."""
    (message,) = mistakes(command, *args)
    return message


def assert_words(message: str, words: str) -> None:
    for word in words.split():
        assert word in message, message
