"""Commands of tutorials, as printed: a model learns text, then chats, then answers; two nodes meet."""

import subprocess

import pytest

from tests.conftest import ROOT, environment
from tests.test_readme import blocks


@pytest.mark.long
def test_from_text_to_a_model_that_answers(tmp_path):
    for name in ("tools", "examples", "pretrain_llama.py", "megatron_zpp"):
        (tmp_path / name).symlink_to(ROOT / name)
    page = ROOT / "docs" / "tutorials" / "text-to-chat.md"
    _setup, *steps = blocks(page, "sh")
    for step in steps:
        words = ["bash", "-ec", step.replace("torchrun ", "torchrun --standalone ")]
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"
    shown = [block for block in page.read_text(encoding="utf-8").split("```")[1::2] if block.startswith("\n")]
    assert done.stdout == shown[-1].removeprefix("\n")


@pytest.mark.long
def test_two_nodes_meet_on_one_machine(tmp_path):
    for name in ("pretrain_gpt.py", "megatron_zpp"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs").mkdir()
    (command,) = blocks(ROOT / "docs" / "tutorials" / "two-nodes.md", "sh")
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "2 nodes of 2 ranks" in done.stdout and "iteration       20/      20" in done.stdout
