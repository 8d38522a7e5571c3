"""Commands of tutorials, as printed, and the library's programs: models learn to answer, nodes meet, losses fall."""

import json
import re

import pytest

from tests.conftest import ROOT
from tests.test_readme import SETUP, blocks, commands, run_as_printed
from tests.tools import run
from tests.training.small_run import ended, torchrun

TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.long
@pytest.mark.evidence  # README's own text runs in make test; this takes 10 minutes on a slow machine
def test_from_text_to_a_model_that_answers(tmp_path):
    page = TUTORIALS / "text-to-chat.md"
    *_, said = run_as_printed(blocks(page, "sh")[1:], tmp_path)  # the first sets the machine up
    shown = [block for block in page.read_text(encoding="utf-8").split("```")[1::2] if block.startswith("\n")]
    assert said == shown[-1].removeprefix("\n")


@pytest.mark.long
def test_two_nodes_meet_on_one_machine(tmp_path):
    (tmp_path / "runs").mkdir()
    (printed,) = run_as_printed(blocks(TUTORIALS / "two-nodes.md", "sh"), tmp_path)
    assert "2 nodes of 2 ranks" in printed and "iteration       20/      20" in printed


@pytest.mark.long
def test_200_steps_teach_100_answers(tmp_path):
    page = TUTORIALS / "fine-tune.md"
    printed = run_as_printed([each for each in commands(page) if not each.startswith(SETUP)], tmp_path)
    lines = (tmp_path / "runs/finetuning/chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    questions, answers = zip(*[[message["content"] for message in chat] for chat in chats], strict=True)
    assert len(answers) == 100
    assert any(text.strip() in answers for text in printed)  # the page's question is one of them
    (tmp_path / "questions.txt").write_text("\n".join(questions) + "\n")
    words = "--load runs/finetuning/tuned --chat --temperature 0 --num-tokens 60 --prompt-file questions.txt"
    said = run("python", "tools/generate_text.py", *words.split(), folder=tmp_path, timeout=600).stdout
    assert [text.rstrip("\n") for text in re.split(r"^== \d+\n", said, flags=re.MULTILINE)[1:]] == [*answers]


@pytest.mark.integrations
def test_a_model_learns_facts_and_short_answers(tmp_path):
    make, sft, dpo, exam, chat = run_as_printed(blocks(TUTORIALS / "model-to-chat.md", "sh"), tmp_path)
    assert "runs/tutorial/model" in make
    first, last = map(float, re.findall(r"loss: ([\d.]+) -> ([\d.]+)", sft)[0])
    assert last < 0.1 * first
    before, margin = map(float, re.findall(r"rewards/margins: (-?[\d.]+) -> ([\d.]+)", dpo)[0])
    assert before == 0 and margin > 1
    scores = {name: float(score) for name, score in re.findall(r"^(\S+): ([\d.]+)$", exam, re.MULTILINE)}
    assert scores["facts/acc"] > 0.9 and scores["short/exact_match"] > 0.9
    assert chat == "Vesope lives in Zipe.\n"


@pytest.mark.long
@pytest.mark.parametrize("program", ["plain_pytorch.py", "huggingface_llama.py", "islands.py"])
def test_the_loss_falls(program):
    out, _ = ended(torchrun(4, [], script=f"examples/library/{program}"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 4 and losses[-1] < 0.96 * losses[0]
    sent = [float(megabytes) for megabytes in re.findall(r"sent ([\d.]+) MB", out)]
    assert sent[0] > 0 and len(set(sent)) == 1  # the same every step
