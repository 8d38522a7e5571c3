"""A dry run refuses what the run refuses, with the same words, and nothing else."""

import contextlib
import io
import os
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.commands.pretrain import pretrain
from megatron_zpp.families import GPT, LLAMA, load_architecture
from megatron_zpp.settings.groups import all_flags
from tests.arguments.fuzzing import words_needed
from tests.ranks import free_port, run_ranks
from tests.training.small_run import flags

# What the small run's own flags say, other programs and processes, what takes long, and the publisher's lock.
LEFT_OUT = """
    dry_run dry_run_world_size deepspeed_config preset compile wandb_project num_workers publish
    exit_duration_in_mins exit_signal_handler distributed_timeout_minutes train_iters train_samples train_tokens
"""
NUMBERS = ("1", "2", "3", "4", "8", "16", "64", "0", "0.1", "0.5", "1e-3")
TEXTS = ("folder", "1", "2,1,1", "core_attn", "moe", "mlp", "linear_qkv", "256")
BATCHES = int(os.environ.get("DRY_RUN_BATCHES", "2"))  # batches of 10 draws; 100 batches take half an hour
Draw = tuple[str, list[str]]  # architecture and command line
Ended = tuple[int, list[str]]  # status and errors


def draws(seed: int, world_size: int, data: str) -> Iterator[Draw]:
    """Draw up to four flags with what they need, until the checks of flags alone let them pass."""
    draw = random.Random(seed)
    known = [flag for flag in all_flags().values() if flag.setting not in LEFT_OUT.split()]
    while True:
        architecture, words = draw.choice((GPT, LLAMA)), list[str]()
        for flag in draw.sample(known, draw.randint(1, 4)):
            words += words_needed(flag).format(folder="folder").split()
            pool = flag.choices or (NUMBERS if flag.value_type in (int, float) else TEXTS)
            count = flag.nargs if isinstance(flag.nargs, int) else int(flag.value_type is not bool)
            words += [flag.name, *(str(draw.choice(pool)) for _ in range(count))]
        if "--wandb-project" in words:
            continue  # its flags need it, and the run a login
        argv = flags(data, *words, length="--train-iters 1")
        with contextlib.suppress(SettingsError):
            parse_settings(architecture, argv, world_size, note=lambda text: None)
            yield architecture.name, argv


def dry_and_real(pairs: list[Draw], folder: str, ports: list[int]) -> list[tuple[Ended, Ended]]:
    """Return how the dry run of each command line and its run ended, each in an empty folder. For ``run_ranks``."""
    dist.barrier()
    dist.destroy_process_group()  # the program makes its own
    ended = []
    for i, (pair, port) in enumerate(zip(pairs, ports, strict=True)):
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))  # another one: no rank meets the run before
        ended.append((_ended(pair, f"{folder}/dry{i}", "--dry-run"), _ended(pair, f"{folder}/real{i}")))
    return ended


def _ended(pair: Draw, folder: str, *more: str) -> Ended:
    architecture, argv = pair
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    sys.argv = [f"pretrain_{architecture}.py", *argv, *more]
    code = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            pretrain(load_architecture(architecture))
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    errors = [line.replace("error: rank 0: ", "error: ") for line in err.getvalue().splitlines()]
    return code, [line for line in errors if line.startswith("error: ")]


def assert_alike(world_size: int, pairs: list[Draw], folder: Path, timeout: float = 250) -> list[Ended]:
    ports = [free_port() for _ in pairs]
    results = run_ranks(world_size, dry_and_real, pairs, str(folder), ports, timeout=timeout)[0]
    unlike = [(pair, dry, real) for pair, (dry, real) in zip(pairs, results, strict=True) if dry != real]
    assert not unlike, "\n".join(f"{pair}: {dry}, {real}" for pair, dry, real in unlike)
    return [real for _, real in results]


@pytest.mark.parametrize(
    ("seed", "world_size", "count"),
    [
        (0, 1, 20),
        *(pytest.param(seed, 4 if seed % 10 == 1 else 1, 10, marks=pytest.mark.long) for seed in range(1, BATCHES + 1)),
    ],
)
def test_a_dry_run_ends_as_the_run_whatever_flags_are_drawn(data, tmp_path, seed, world_size, count):
    ended = assert_alike(world_size, [*islice(draws(seed, world_size, data), count)], tmp_path, timeout=850)
    assert seed > 0 or {code for code, _ in ended} >= {0, 2}  # ten draws may all train


REFUSED = {
    "--recompute-activations --recompute-modules moe": "--recompute-modules moe: no block of this model has it",
    "--load mistyped": "--load mistyped holds no checkpoint",
    "--lora-rank 2 --pretrained-checkpoint mistyped": "mistyped holds no checkpoint",
    "--split text": "--split 'text' must be up to three shares",
    "--data-path mistyped": "mistyped.idx does not exist",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model mistyped.json": "mistyped.json does not exist",
    "--tokenizer-type NullTokenizer --vocab-size 100": "the vocabulary has 101: use the tokenizer",
    "--seq-length 4000000": "less than 4000000 + 1",
    "--save /dev/null/run --save-interval 1": "/dev/null is no folder that this user may change",
    "--profile --use-pytorch-profiler": "--profile needs a place for its files",
    "--distributed-backend nccl": "--distributed-backend nccl needs a GPU",
    "--padded-vocab-size 32": "--padded-vocab-size 32 is below the tokenizer's 257 tokens",
    "--num-layers 64 --hidden-size 16384": "make the model smaller, or start on more machines",
    "--bf16 --fp8-format hybrid --hidden-size 24": "--fp8-format finds no linear layer",
}


def test_mistakes_that_only_ranks_noticed_are_told_by_a_dry_run(data, tmp_path):
    """Before hundreds of nodes have started."""
    pairs = [("gpt", flags(data, words, length="--train-iters 1")) for words in REFUSED]
    for message, (code, errors) in zip(REFUSED.values(), assert_alike(1, pairs, tmp_path), strict=True):
        assert code == 2 and len(errors) == 1 and message in errors[0], (message, errors)


def test_a_pipeline_s_run_and_its_dry_run_refuse_modules_that_no_stage_has(data, tmp_path):
    words = "--pipeline-model-parallel-size 2 --recompute-activations --recompute-modules moe"
    (ended,) = assert_alike(2, [("gpt", flags(data, words, length="--train-iters 1"))], tmp_path)
    assert ended[0] == 2 and "--recompute-modules moe: no block of this model has it" in ended[1][0]
