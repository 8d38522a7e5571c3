"""Words that no engineer says stay out of the package and its pages; CONTRIBUTING.md says what to write instead."""

import re

import pytest

from tests.conftest import ROOT

WORST = re.compile(
    r"\bso many\b|\bso manyth\b|\btravel(s|led)?\b|\banew\b|\bbehind (a|the|each|every) step\b"
    r"|\bstands? below\b|\bBelow stands?\b|\bof its own kind\b|\bhow-manieth\b",
    re.IGNORECASE,
)
NO_NOUN = re.compile(r"\b(those|that) of\b(?! course)|\balike\b", re.IGNORECASE)
BEGINS_WITHOUT_A_NOUN = re.compile(
    r"(?:^\s*|\s)(?:#|//|\"\"\") ?(?:of|that of|those of|what is|what was) ", re.IGNORECASE
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


def test_each_comment_and_sentence_names_its_noun() -> None:
    """No comment begins with "of ..." or "what is ..."; nothing says "those of" and leaves the reader to guess."""
    found = []
    for file in [
        *PAGES,
        *CODE,
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("csrc/**/*.[hc]*"),
    ]:
        if file.name in ("CONTRIBUTING.md", "test_words.py"):  # they show such words
            continue
        before = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            goes_on = re.match(r"\s*(#|//)", before) and re.match(r"\s*(#|//)", line)  # a comment of several lines
            if NO_NOUN.search(line) or (file.suffix != ".md" and not goes_on and BEGINS_WITHOUT_A_NOUN.search(line)):
                found.append(f"{file.relative_to(ROOT)}: {line.strip()}")
            before = line
    assert not found, "\n".join(found)
