"""Words that no engineer says stay out of the package and its pages; CONTRIBUTING.md says what to write instead."""

import re

import pytest

from tests.conftest import ROOT

WORST = re.compile(
    r"\bso many\b|\bso manyth\b|\btravel(s|led)?\b|\banew\b|\bbehind (a|the|each|every) step\b"
    r"|\bstands? below\b|\bBelow stands?\b|\bof its own kind\b|\bhow-manieth\b",
    re.IGNORECASE,
)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
CODE = [*ROOT.glob("megatron_zpp/**/*.py"), *ROOT.glob("megatron_zpp/**/*.toml"), *ROOT.glob("examples/**/*.sh")]


@pytest.mark.parametrize("kind", ["pages", "code"])
def test_none_of_the_worst_words(kind: str) -> None:
    found = []
    for file in PAGES if kind == "pages" else CODE:
        text = file.read_text(encoding="utf-8")
        if file.name == "CONTRIBUTING.md":  # whose table of words shows them
            text = text.partition("\n## Words\n")[0] + text.partition("\n## Measuring\n")[2]
        found += [f"{file.relative_to(ROOT)}: {line.strip()}" for line in text.splitlines() if WORST.search(line)]
    assert not found, "\n".join(found)
