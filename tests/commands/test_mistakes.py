"""Each program meets files that are missing, of another kind, unreadable or on a full disk: one line, status 2."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_zpp.__main__ import ALIASES, COMMANDS
from megatron_zpp.commands.data import train_tokenizer
from megatron_zpp.planning.cluster import default_cluster, write_cluster
from tests.conftest import ROOT, environment
from tests.tools import call_wrongly, run
from tests.training.small_run import NO_DROPOUT, RUN, SHAPE

TRAIN = f"{SHAPE} {RUN} {NO_DROPOUT} --train-iters 2 --num-workers 0 --split 1,0,0 --eval-iters 0 --save-interval 2"
PIECES = "--tokenizer-type SentencePieceTokenizer"
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"


@dataclass(frozen=True)
class Program:
    """A command line that works, with WORLD for the folder of all inputs.

    reads: its flags of files and folders to read, and which of the folder they are; "" is the first word. writes: its
    flags of files and folders to write. first: flags go before ``words``. goes_on: flags whose faults it only warns of.
    late: a library that it imports while it runs.
    """

    words: str = ""
    reads: dict[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    first: bool = False
    goes_on: tuple[str, ...] = ()
    late: str = "os"


PROGRAMS = {
    "preprocess-data": Program(
        PIECES, {"--input": "corpus.jsonl", "--tokenizer-model": "tokenizer.model"}, ("--output-prefix",)
    ),
    "train-tokenizer": Program("--vocab-size 300", {"--input": "corpus.jsonl"}, ("--output",)),
    "merge-datasets": Program("", {"--input": "data_text_document"}, ("--output-prefix",)),
    "inspect-dataset": Program(PIECES, {"": "data_text_document", "--tokenizer-model": "tokenizer.model"}),
    "inspect-checkpoint list": Program("", {"": "saved"}),
    "inspect-checkpoint verify": Program("", {"": "saved"}),
    "inspect-checkpoint diff": Program("WORLD/saved", {"": "saved"}),
    "generate-text": Program(
        "--num-tokens 2", {"--load": "saved", "--prompt-file": "prompts", "--tokenizer-model": "tokenizer.model"}
    ),
    "chat": Program("--num-tokens 2", {"--load": "saved"}),
    "evaluate": Program("--eval-tasks facts", {"--load": "saved"}),
    "export-hf": Program("", {"--load": "saved", "--tokenizer-model": "tokenizer.model"}, ("--output",)),
    "export-peft": Program("", {"--load": "adapted"}, ("--output",)),
    "import-hf": Program(PIECES, {"--input": "huggingface", "--tokenizer-model": "tokenizer.model"}, ("--save",)),
    "export-megatron": Program("", {"--load": "saved"}, ("--output",)),
    "import-megatron": Program("--tokenizer-type NullTokenizer --vocab-size 300", {"--input": "megatron"}, ("--save",)),
    "estimate": Program(f"--vocabulary 999 pretrain-gpt {MODEL}", {"--deepspeed_config": "deepspeed.json"}),
    "plan": Program(
        f"--vocabulary 999 pretrain-gpt {MODEL}", {"--cluster": "cluster.toml", "--calibrate-from": "board"}, first=True
    ),
    "plan --measure": Program("--hidden-size 64 --tokens 16", {}, ("--output",)),
    "plan --try": Program(
        f"gpt --iterations 20 -- {TRAIN} --tokenizer-type ByteTokenizer", {"--data-path": "data_text_document"}
    ),
    "report": Program("", {"": "board"}, ("--output",), late="matplotlib.pyplot"),
    "why-hung": Program("", {"": "hung"}),
    "doctor": Program(),  # these two read nothing that a user names
    "env": Program(),
    "pretrain-gpt": Program(
        f"{TRAIN} {PIECES}",
        {"--data-path": "data_text_document", "--tokenizer-model": "tokenizer.model"},
        ("--save", "--publish", "--tensorboard-dir", "--data-cache-path"),
        goes_on=("--tensorboard-dir", "--data-cache-path"),
        late="torch.utils.tensorboard",
    ),
    "pretrain-llama": Program(
        f"{TRAIN} {PIECES} --tokenizer-model WORLD/tokenizer.model --data-path WORLD/data_text_document",
        {"--load": "saved"},
    ),
}


def test_every_program_is_tried():
    assert {program.split()[0] for program in PROGRAMS} == {*COMMANDS}
    assert {" ".join(words) for words in ALIASES.values()} <= {*PROGRAMS}


def fill_world(folder: Path) -> None:
    """Make one of each kind of file and folder that programs read, in a folder that every user may read."""
    folder.chmod(0o755)
    texts = [json.dumps({"text": f"words {i} and {i * i}, in a text of its own"}) for i in range(400)]
    (folder / "corpus.jsonl").write_text("\n".join(texts))
    (folder / "prompts").write_text("words\n")
    (folder / "deepspeed.json").write_text("{}")
    (folder / "secret").write_text("x" * 40)
    (folder / "secret").chmod(0o600)
    write_cluster(folder / "cluster.toml", default_cluster(1, 1, "H100", 100.0))
    (folder / "hung").mkdir()
    record = {"rank": 0, "host": "a", "time": 1.0, "where": None, "groups": {}, "entries": []}
    (folder / "hung" / "hang_rank_0.json").write_text(json.dumps(record))
    pieces = f"{PIECES} --tokenizer-model {folder}/tokenizer.model"
    train = f"pretrain-llama {TRAIN} {pieces} --data-path {folder}/data_text_document"
    for words in (
        f"train-tokenizer --input {folder}/corpus.jsonl --vocab-size 300 --output {folder}/tokenizer.model",
        f"preprocess-data --input {folder}/corpus.jsonl --output-prefix {folder}/data --append-eod {pieces}",
        f"{train} --save {folder}/saved --tensorboard-dir {folder}/board",
        f"{train} --save {folder}/adapted --lora-rank 2 --pretrained-checkpoint {folder}/saved",
        f"export-hf --load {folder}/saved --output {folder}/huggingface",
        f"export-megatron --load {folder}/saved --output {folder}/megatron",
    ):
        run("python", "-m", "megatron_zpp", *words.split())


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mistakes"))  # pytest's own are for one user alone
    fill_world(folder)
    yield folder
    shutil.rmtree(folder)


# What may be wrong with what a program reads: each puts something else at ``path``, where ``good`` would be right.


def missing(path: Path, good: Path) -> None:
    pass


def other_kind(path: Path, good: Path) -> None:
    path.write_text("") if good.is_dir() else path.mkdir()


def link_to_itself(path: Path, good: Path) -> None:
    path.symlink_to(path)


def pipe(path: Path, good: Path) -> None:
    os.mkfifo(path)


def no_utf8(path: Path, good: Path) -> None:
    path.write_bytes(b"\xff\xfe{\x80}\n" * 9)
    path.chmod(0o600)


def forbidden(path: Path, good: Path) -> None:
    path.mkdir() if good.is_dir() else shutil.copy(good, path)
    path.chmod(0)


READS = (missing, other_kind, link_to_itself, pipe, no_utf8, forbidden)


# What may be wrong with where it writes: each yields a path that it cannot write.


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    if options != "ro":
        (folder / "others").write_bytes(bytes(4096))
    try:
        yield folder / "new"
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def full_disk(folder: Path) -> AbstractContextManager[Path]:
    return _mounted(folder, "size=4k")


def read_only(folder: Path) -> AbstractContextManager[Path]:
    return _mounted(folder, "ro")


@contextmanager
def below_a_file(folder: Path) -> Iterator[Path]:
    (folder / "file").touch()
    yield folder / "file" / "new"


@contextmanager
def below_a_loop(folder: Path) -> Iterator[Path]:
    (folder / "loop").symlink_to("loop")
    yield folder / "loop" / "new"


@contextmanager
def forbidden_folder(folder: Path) -> Iterator[Path]:
    folder.chmod(0o555)
    yield folder / "new"


WRITES = (full_disk, read_only, below_a_file, below_a_loop, forbidden_folder)
# Root may read and write everything, so a user without rights runs the program. That user cannot import Python's own
# library where it is readable for root alone: the program and its late library are imported before.
AS_NOBODY = (
    "import concurrent.futures.process, os, runpy, sys, LATE; from megatron_zpp.__main__ import find_program; "
    "find_program(sys.argv[1]); "
    "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534); "
    "runpy.run_module('megatron_zpp', run_name='__main__', alter_sys=True)"
)


def start(world: Path, program: str, changed: dict[str, Path], as_nobody: bool) -> subprocess.CompletedProcess[str]:
    """Run a program with ``changed`` in place of a flag's path."""
    given = PROGRAMS[program]
    with tempfile.TemporaryDirectory(dir=world) as elsewhere:
        os.chmod(elsewhere, 0o777)
        paths = {flag: world / good for flag, good in given.reads.items()}
        paths |= {flag: Path(elsewhere) / flag for flag in given.writes} | changed
        flags = [str(word) for flag, path in sorted(paths.items()) for word in (flag, path) if word]
        words = given.words.replace("WORLD", str(world)).split()
        words = [*flags, *words] if given.first else [*words, *flags]
        start_it = ["-c", AS_NOBODY.replace("LATE", given.late)] if as_nobody else ["-m", "megatron_zpp"]
        words = [*start_it, *program.split(), *words]
        alone = {"RANK": "0", "WORLD_SIZE": "1"} if program == "plan --measure" else {}
        return run("python", *words, status=None, timeout=60, folder=Path(elsewhere), **alone)


def check(world: Path, program: str, flag: str, fault: Callable) -> None:
    """Run a program with one fault, and assert that it ends with one line of its own."""
    needs_root = fault in (full_disk, read_only) or fault in (forbidden, forbidden_folder)
    if needs_root and os.geteuid() != 0:
        pytest.skip("mounts, and another user's files, need root")
    with tempfile.TemporaryDirectory(dir=world) as folder:
        os.chmod(folder, 0o755)
        path, as_nobody = Path(folder) / "given", fault in (forbidden, forbidden_folder)
        if flag in PROGRAMS[program].writes:
            path.mkdir()
            with fault(path) as place:
                done = start(world, program, {flag: place}, as_nobody)
        else:
            good = world / PROGRAMS[program].reads[flag]
            suffix = ".idx" if good.name == "data_text_document" else ""
            fault(Path(f"{path}{suffix}"), Path(f"{good}{suffix}"))
            done = start(world, program, {flag: path}, as_nobody)
        case = f"{program} {flag} {fault.__name__}: status {done.returncode}\n{done.stderr}"
        assert "Traceback" not in done.stderr, case
        if flag in PROGRAMS[program].goes_on:
            assert done.returncode == 0 and folder in done.stderr, case
            return
        lines = [line for line in done.stderr.splitlines() if "error:" in line]
        assert done.returncode == 2 and len(lines) == 1 and done.stderr.splitlines()[-1] == lines[0], case
        assert folder in lines[0] or "needs the package" in lines[0], case


NO_FAULT = (("plan --try", forbidden),)  # nobody may not start this Python
CASES = [
    (program, flag, fault)
    for program, given in PROGRAMS.items()
    for flag, faults in ({flag: READS for flag in given.reads} | {flag: WRITES for flag in given.writes}).items()
    for fault in faults
    if (program, fault) not in NO_FAULT
]


@pytest.mark.parametrize(("program", "flag", "fault"), CASES[:: 2 * len(READS) + 1])  # each fault in turn
def test_a_wrong_path_is_one_line_that_names_it(world, program, flag, fault):
    check(world, program, flag, fault)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_wrong_path_of_a_program_is_one_line_that_names_it(world, program):
    """Each flag with every second fault, beginning with another one at the next flag."""
    of_program = [case for case in CASES if case[0] == program]
    flags = list(dict.fromkeys(flag for _, flag, _ in of_program))
    for place, flag in enumerate(flags, start=[*PROGRAMS].index(program)):
        for case in [case for case in of_program if case[1] == flag][place % 2 :: 2]:
            check(world, *case)


@pytest.mark.long
def test_programs_that_import_other_packages_show_none_of_their_warnings(world, tmp_path):
    # A process of its own: this one's has imported them.
    words = ("export-hf", "--load", world / "saved", "--output", tmp_path / "new")
    assert run(sys.executable, "-m", "megatron_zpp", *words).stderr == ""


def test_a_prompt_that_is_no_text_is_one_line():
    words = ["python", "-m", "megatron_zpp", "generate-text", "--load", "x", "--prompt", b"a\xff"]
    env = environment()
    done = subprocess.run(
        [Path(env["PATH"].split(":")[0]) / "python", *words[1:]], capture_output=True, env=env, cwd=ROOT
    )
    assert done.returncode == 2 and b"--prompt: 'a\\udcff' is not UTF-8 text" in done.stderr.splitlines()[-1]


def test_a_tokenizer_of_texts_that_are_all_too_long_says_so(tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "a" * (5 << 20)}))
    words = ("--input", tmp_path / "long.jsonl", "--vocab-size", 300, "--output", tmp_path / "model")
    assert "long.jsonl holds no text of at most 4 MB under 'text'" in call_wrongly(train_tokenizer, *words)


def test_a_port_in_use_is_one_line_that_names_it(world, tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        trainer = run("python", ROOT / "pretrain_gpt.py", "--num-layers", "2", status=2, **rank)
        assert trainer.stderr.startswith(
            f"error: cannot access localhost:{port}: Address already in use (another program"
        )


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [("> /dev/full", 2, "error: cannot write to stdout: No space left on device"), ("| true", 141, "")],
)
def test_output_that_nobody_can_take_is_one_line_or_none(world, target, status, said):
    words = f"python -m megatron_zpp inspect-dataset {world}/data_text_document {target}; exit ${{PIPESTATUS[0]}}"
    done = run("bash", "-c", words, status=status)
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)
