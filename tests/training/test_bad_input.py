"""A user's mistake on several ranks: one line on stderr that says what to do, a failing exit code, and no hang."""

import contextlib
import io
import json
import os
import shutil
import sys

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.parallel.distributed import FailedTogether
from megatron_zpp.training.setup import build_trainer
from tests.ranks import run_ranks
from tests.training.small_run import ROOT, ended, flags, torchrun

MEETS_AN_ERROR = """
from megatron_zpp.families import GPT
from megatron_zpp.commands import pretrain
from megatron_zpp.parallel.distributed import StopSignals

def train(run, start):
    StopSignals(run.device).catch()  # as --exit-signal-handler does: torchrun's SIGTERM must end a rank still
    raise ValueError("met by all")

pretrain.train = train
pretrain.main(GPT)
"""


def our_errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error: ")]


SEVERAL = ["--log-interval", "--seed", "--bf16", "zero_quantized_weights"]


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        pytest.param("--deepspeed_config {} --log-interval 0 --sed 1 --bf16 yes", SEVERAL, id="before ranks meet"),
        pytest.param("--load {}", ["is a file, not a folder"], id="after ranks meet", marks=pytest.mark.long),
    ],
)
def test_a_mistake_is_the_last_line_under_torchrun(data, tmp_path, mistake, expected):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_quantised_weights": True}}))
    words = [str(ROOT / "pretrain_gpt.py"), *flags(data, mistake.format(config))]
    process = torchrun(2, words, sys.executable, ["--no-python"])  # ranks that are torchrun's children
    _, err = ended(process, status=1)  # torchrun's; its report is of one rank, and repeats the mistake
    # Where it is noticed, and once more below torchrun's report.
    is_said = [part in error for part, error in zip(expected * 2, our_errors(err), strict=True)]
    assert is_said == [True] * len(expected * 2)
    report = err[err.index("FAILED") :]
    assert report.count("exitcode  : 2") == report.count("exitcode") == 1 and expected[0] in report
    assert our_errors(report) == err.splitlines()[-len(expected) :]


def test_an_error_that_every_rank_meets_on_its_own_is_said_once(data, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MEETS_AN_ERROR)
    _, err = ended(torchrun(2, flags(data), str(script)), status=1)
    assert our_errors(err) == ["error: met by all"] * 2


def test_an_environment_that_no_launcher_makes(data):
    cases = [
        ("WORLD_SIZE", "two", {}),
        ("WORLD_SIZE", "0", {}),
        ("WORLD_SIZE", "9" * 20, {}),
        ("RANK", "2", {"WORLD_SIZE": "2"}),
        ("LOCAL_RANK", "½", {}),
        ("LOCAL_WORLD_SIZE", "2", {}),
        ("MASTER_PORT", "65536", {}),
    ]
    processes = [torchrun(0, flags(data), **more, **{name: value}) for name, value, more in cases]
    for process, (name, value, _) in zip(processes, cases, strict=True):
        _, err = ended(process, status=2)
        (line,) = err.splitlines()
        assert line.startswith("error: ") and f"{name} in the environment must be a whole number from " in line
        assert f"is '{value}': start the ranks with torchrun, or unset it for a single one" in line


def _reports(argvs: list[list[str]]) -> list[str]:
    """What this rank says to each command line; all ranks give up together, or this hangs."""
    reports = []
    for argv in argvs:
        settings = parse_settings(GPT, argv, dist.get_world_size(), note=lambda text: None)
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(FailedTogether):
            build_trainer(GPT, settings, torch.device("cpu"))
        reports.append(err.getvalue())
    return reports


def test_what_is_wrong_with_files_is_said_once(data, tmp_path):
    prefix = tmp_path / "text"
    for suffix in (".bin", ".idx"):
        shutil.copy(data + suffix, f"{prefix}{suffix}")
    with open(f"{prefix}.bin", "r+b") as tokens:
        tokens.truncate(1000)
    for suffix in (".bin", ".idx"):
        shutil.copy(data + suffix, tmp_path / f"damaged{suffix}")
    with open(tmp_path / "damaged.idx", "r+b") as index:
        index.seek(-8 * 20, os.SEEK_END)
        index.write(b"\xff" * 8)  # the end of a document, as -1
    huge = "--hidden-size 524288 --num-attention-heads 4096"
    null = "--tokenizer-type NullTokenizer --vocab-size 100"
    cases = [
        (flags(str(tmp_path / "nowhere")), "no dataset at"),
        (flags(str(prefix)), "text.bin holds 1000 bytes"),
        (flags(str(tmp_path / "damaged"), "--no-mmap-bin-files"), "damaged.idx is damaged: its documents do not cover"),
        (flags(data, null), "holds token 256, but the vocabulary has 101"),
        (flags(data, "--tokenizer-type SentencePieceTokenizer --tokenizer-model /none.model"), "/none.model"),
        (flags(data, "--split 1000000,1,1"), "valid"),  # not one document
        (flags(data, huge), "GB of parameters, gradients and optimizer a rank"),
        (flags(data, f"{huge} --pipeline-model-parallel-size 2"), "the model needs about "),
        (flags(data, f"--save {prefix}.bin --save-interval 1"), "is no folder that this user"),
    ]
    first, *others = run_ranks(4, _reports, [argv for argv, _ in cases])
    for report, (_, expected) in zip(first, cases, strict=True):
        assert report.startswith("error: ") and report.count("\n") == 1 and expected in report, report
    assert others == [[""] * len(cases)] * 3
