"""The commands of docs/tutorials/model-to-chat.md, as printed: a model learns facts, then brevity, passes, chats."""

import re
import subprocess

import pytest

from tests.conftest import ROOT, environment
from tests.test_readme import blocks

pytestmark = pytest.mark.integrations


def test_the_tutorial_teaches_facts_and_short_answers(tmp_path):
    for name in ("tools", "examples", "megatron_zpp"):
        (tmp_path / name).symlink_to(ROOT / name)
    printed = []
    for command in blocks(ROOT / "docs" / "tutorials" / "model-to-chat.md", "sh"):
        words = ["bash", "-ec", command.replace("torchrun ", "torchrun --standalone ")]
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=580)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)
    make, sft, dpo, exam, chat = printed
    assert "runs/tutorial/model" in make
    first, last = map(float, re.findall(r"loss: ([\d.]+) -> ([\d.]+)", sft)[0])
    assert last < 0.1 * first
    before, margin = map(float, re.findall(r"rewards/margins: (-?[\d.]+) -> ([\d.]+)", dpo)[0])
    assert before == 0 and margin > 1
    scores = {name: float(score) for name, score in re.findall(r"^(\S+): ([\d.]+)$", exam, re.MULTILINE)}
    assert scores["facts/acc"] > 0.9 and scores["short/exact_match"] > 0.9
    assert chat == "Vesope lives in Zipe.\n"


def test_the_tutorial_is_short():
    text = (ROOT / "docs" / "tutorials" / "model-to-chat.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 600
