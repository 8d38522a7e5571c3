"""The commands of docs/tutorials/fine-tune.md, as printed: a model learns 100 answers."""

import json
import re
import subprocess

import pytest

from tests.conftest import ROOT, environment
from tests.test_readme import SETUP, commands


@pytest.mark.long
def test_200_steps_teach_100_answers(tmp_path):
    for name in ("tools", "examples", "pretrain_llama.py", "megatron_zpp"):
        (tmp_path / name).symlink_to(ROOT / name)

    def run(command: str) -> str:
        words = ["bash", "-c", command.replace("torchrun ", "torchrun --standalone ")]
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    printed = [
        run(each) for each in commands(ROOT / "docs" / "tutorials" / "fine-tune.md") if not each.startswith(SETUP)
    ]
    lines = (tmp_path / "runs/finetuning/chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    questions, answers = zip(*[[message["content"] for message in chat] for chat in chats], strict=True)
    assert len(answers) == 100 and any(
        text.strip() in answers for text in printed
    )  # the page's question is one of them
    (tmp_path / "questions.txt").write_text("\n".join(questions) + "\n")
    said = run(
        "python tools/generate_text.py --load runs/finetuning/tuned --chat --temperature 0 --num-tokens 60 "
        "--prompt-file questions.txt"
    )
    assert [text.rstrip("\n") for text in re.split(r"^== \d+\n", said, flags=re.MULTILINE)[1:]] == [*answers]
