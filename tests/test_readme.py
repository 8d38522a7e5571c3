"""Every command of README.md, CONTRIBUTING.md and docs/ works.

Commands are the lines of blocks marked ``bash``. Each page's commands run in the page's order, in a folder where the
quickstart has been run on little text:

* the trainer: its flags are checked as they stand for its number of ranks; then, where these are at most 4, it runs on
  so many real ranks, with flags put behind that make it small. With --dry-run it is a program like others;
* other programs run as they stand, or with what ``SMALL`` adds;
* ``make`` targets must exist: continuous integration runs ``make test``, and the quickstart's test the quickstart;
  pytest, ruff and mypy are parts of ``make test``;
* what sets a machine up (``SETUP``) is what ``make`` does, and is not run.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_zpp.__main__ import TOOLS
from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import find_architecture
from tests.conftest import ROOT
from tests.convert.megatron.layouts import CONFIGS, random_model, write_torch, write_universal
from tests.ranks import free_port, run_ranks
from tests.tools import run
from tests.training.small_run import call_pretrain

# Their commands train or measure for long, also where it is made small: `make test-long` runs them.
LONG = (
    *("CONTRIBUTING", "evidence/benchmarks", "evidence/experiments", "evidence/kernels", "how-to/choose-settings"),
    *("how-to/compare-runs", "how-to/from-megatron", "how-to/hugging-face", "how-to/install", "how-to/plan-a-cluster"),
    *("how-to/save-and-resume", "how-to/train", "reference/log", "reference/parallelism", "reference/planner"),
    *("tutorials/two-nodes",),
)
AS_PRINTED = ("tutorials/fine-tune",)  # test_tutorials.py runs their commands as they stand
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SETUP = ("git clone", "cd ", "python3 -m venv ", "source ", "pip install", ".venv/bin/pip install")
PARTS_OF_MAKE_TEST = ("pytest", "ruff", "mypy")
TINY_RUN = shlex.split("""--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 32
    --max-position-embeddings 32 --eval-iters 1 --log-interval 1 --num-workers 0""")
SHORTER = """--save-interval 3 --lr-warmup-iters 1 --lr-decay-iters 3 --lr-wsd-decay-iters 1 --eval-interval 2
    --train-samples 24 --lr-decay-samples 24 --lr-warmup-samples 8 --train-tokens 768 --lr-decay-tokens 768
    --lr-warmup-tokens 256 --num-query-groups 2 --num-layers-per-virtual-pipeline-stage 1 --recompute-num-layers 1"""
SMALL = {
    "benchmarks/kernels.py": ["--rounds", "1", "--megabytes", "1", "--threads", "1"],
    "benchmarks/trainer.py": ["--rounds", "1", "--steps", "2", "--no-compile"],
    "benchmarks/study.py": [
        "E12",
        "--match",
        "int6.*rate",
        "--scale",
        "tiny",
        "--seeds",
        "1",
        "--results",
        "study.jsonl",
    ],
    "examples/quickstart/make_corpus.py": ["--max-megabytes", "1.5"],
    "tools/plan.py --try": ["--iterations", "20", "--try=--zero-quantized-gradients"],
    "tools/train_tokenizer.py": ["--vocab-size", "400", "--max-megabytes", "0.3"],
    "tools/generate_text.py": ["--num-tokens", "5"],
}
MAX_RANKS = 4


def page_name(page: Path) -> str:
    """README, how-to/train: as the site has it."""
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def run_as_printed(texts: Iterable[str], folder: Path) -> list[str]:
    """What each of a page's blocks prints in a folder that looks like the repository's root; jobs have own ports."""
    for name in ("tools", "examples", "pretrain_gpt.py", "pretrain_llama.py", "megatron_zpp"):
        (folder / name).symlink_to(ROOT / name)
    words = [text.replace("torchrun --nproc", "torchrun --standalone --nproc") for text in texts]
    return [run("bash", "-ec", each, folder=folder, timeout=900).stdout for each in words]


def trainer(command: str) -> tuple[int, int, str, list[str]] | None:
    """Ranks, ranks per node, architecture and flags of a command that starts the trainer; None for another."""
    words = shlex.split(command, comments=True)
    script = next((word for word in words if re.fullmatch(r"pretrain_\w+\.py|pretrain-\w+", word)), None)
    if script is None:
        return None
    launcher, flags = words[: words.index(script)], words[words.index(script) + 1 :]
    if "--dry-run" in flags or any(word.startswith("tools/") or word in TOOLS for word in launcher):
        return None  # a program that takes the trainer's command

    def option(name: str) -> int:
        return int(launcher[launcher.index(name) + 1]) if name in launcher else 1

    of_node = option("--nproc-per-node")
    return option("--nnodes") * of_node, of_node, script[len("pretrain_") :].removesuffix(".py"), flags


def small_flags(flags: list[str]) -> list[str]:
    """Flags to put behind ``flags`` so that the same run is small: the last of a flag counts."""
    small = list(TINY_RUN)
    if "--deepspeed_config" not in flags:  # its file may hold the batch sizes
        small += ["--micro-batch-size", "1", "--global-batch-size", "8"]
    elif "--seq-length" in flags:  # and the length of a sample
        length = flags[flags.index("--seq-length") + 1]
        small += ["--seq-length", length, "--max-position-embeddings", length]
    iterations = flags[flags.index("--train-iters") + 1] if "--train-iters" in flags else "0"
    shorter = {"--train-iters": "4" if int(iterations) > 100 else "3"}  # a run that goes on for longer still does
    shorter |= re.findall(r"(\S+) (\S+)", SHORTER)
    for flag, value in shorter.items():
        small += [flag, value] if flag in flags else []
    small += ["--num-layers", "4"] if "--pipeline-model-parallel-size" in flags else []
    if "--rampup-batch-size" in flags:
        small += ["--rampup-batch-size", "4", "4", "8"]
    return small


@pytest.fixture
def folder(quickstart) -> Path:
    """A folder that looks like the repository's root to a user who has run the quickstart, and has checkpoints of
    other programs."""
    config = dataclasses.replace(CONFIGS["gpt"], vocab_size=512)  # the quickstart's tokenizer has 500 pieces
    for whose, layout in {"megatron": write_torch, "deepspeed": functools.partial(write_universal, rows=500)}.items():
        layout(quickstart.folder / "checkpoints" / whose, random_model(config), config)
    for name in ("tools", "examples", "benchmarks", "pretrain_gpt.py", "pretrain_llama.py", "tests", "docs"):
        (quickstart.folder / name).symlink_to(ROOT / name)
    return quickstart.folder


def test_pages_have_commands():
    assert {"make quickstart", "make test"} <= set(commands(ROOT / "README.md"))
    assert sum(len(commands(page)) for page in PAGES) > 10


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=page_name)
def test_pages_activate_the_environment_before_they_use_it(page):
    of_a_clean_shell = itertools.takewhile(lambda command: "source .venv/bin/activate" not in command, commands(page))
    assert all(command.startswith(("make ", "python3 -m venv ")) for command in of_a_clean_shell)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page_name(page) in LONG else (), id=page_name(page))
        for page in PAGES
        if commands(page) and page_name(page) not in AS_PRINTED
    ],
)
def test_commands_work(page, folder):
    for name, content in re.findall(r"`([\w.]+\.json)`[^\n]*\n+```json\n(.*?)^```", page.read_text(), re.M | re.S):
        (folder / name).write_text(content)
    of_later_pages = {command for later in PAGES[PAGES.index(page) + 1 :] for command in commands(later)}
    for command in commands(page):
        training = trainer(command)
        if "benchmarks/" in command and command in of_later_pages:
            continue  # it measures for long, and no page changes what it does
        if training is not None:
            run_trainer(*training, folder)
        elif command.startswith("make "):
            target = command.split()[1]
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), command
        elif command.split()[0] in PARTS_OF_MAKE_TEST:
            assert all((ROOT / word).exists() for word in command.split()[1:] if "/" in word), command
        elif not command.startswith(SETUP):
            run_program(command, folder)


def run_trainer(ranks: int, of_node: int, architecture: str, flags: list[str], folder: Path) -> None:
    if "--help" in flags:
        return  # test_arguments reads it
    if "--local-ranks" in flags:
        ranks = of_node = int(flags[flags.index("--local-ranks") + 1])
    with contextlib.chdir(folder), patch.dict(os.environ, LOCAL_WORLD_SIZE=str(of_node)):  # as torchrun sets it
        parse_settings(find_architecture(architecture), flags, ranks, note=lambda text: None)
    if ranks > MAX_RANKS:
        return
    argv = flags + small_flags(flags)
    train = partial(call_pretrain, architecture=architecture, folder=str(folder), port=free_port())
    codes, outs, errs = zip(*(result for (result,) in run_ranks(ranks, train, argv)), strict=True)
    assert set(codes) == {0}, f"{shlex.join(argv)}\n{''.join(errs)}"
    assert "lm loss value" in outs[-1], shlex.join(argv)


def run_program(command: str, folder: Path) -> None:
    more = next((words for program, words in SMALL.items() if program in command), [])
    before, dashes, after = command.partition(" -- ")  # what follows is another program's
    run("bash", "-c", f"{before} {shlex.join(more)}{dashes}{after}", folder=folder)


def words(text: str) -> int:
    """Without code, and signs that are no words."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return len(re.findall(r"\S*\w\S*", text))


def test_pages_are_short_and_in_the_site():
    """No page that is read from top to bottom is long; the site's menu and landing pages name every page."""
    most = {"tutorials": 1500, "how-to": 600, "concepts": 1500}
    for part, limit in most.items():
        assert {page.stem: n for page in ROOT.glob(f"docs/{part}/*.md") if (n := words(page.read_text())) > limit} == {}
    assert words((ROOT / "README.md").read_text()) <= 650
    named = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert sorted(named) == sorted(["index.md", *pages])  # README.md is the home page
    for landing in ROOT.glob("docs/**/index.md"):
        linked = re.findall(r"\]\(([\w-]+\.md)\)", landing.read_text(encoding="utf-8"))
        assert sorted(linked) == sorted({page.name for page in landing.parent.glob("*.md")} - {"index.md"})


def test_no_line_of_code_is_cut_on_the_site():
    """At 1280 pixels a block shows 76 characters."""
    code = [(page, block) for page in PAGES[2:] for block in blocks(page, r"\w*")]
    assert not [f"{page.name}: {line}" for page, block in code for line in block.splitlines() if len(line) > 76]


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
