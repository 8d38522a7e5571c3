"""Build the site: python docs/build.py, or make docs. Pages lie in docs/ for readers of the repository, too.

README.md is the home page. Links to files outside of docs/ become links to the repository, pictures of results are
copied, and the API's settings get a table of their fields. Then zensical builds build/site, and fails at a broken link
or anchor.
"""

import dataclasses
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from flags_page import describe, table

ROOT = Path(__file__).resolve().parents[1]
DOCS, COPY = ROOT / "docs", ROOT / "build" / "docs"
LINK = re.compile(r"(?<=\])\(([^)\s:]+?)(#[^)\s]*)?\)")
PICTURES = (".png", ".svg")
DIRECTIVE = re.compile(r"^::: (megatron_zpp\.\S+Config)$", re.MULTILINE)


def for_the_site(page: Path, place: Path, repository: str) -> str:
    """Return the page's text with links that a site can follow from ``place``, a folder of docs/."""

    def rewrite(link: re.Match[str]) -> str:
        target, anchor = (page.parent / link[1]).resolve(), link[2] or ""
        if (target / "index.md").exists():
            target /= "index.md"
        if target.suffix in PICTURES and not target.is_relative_to(DOCS):
            shutil.copy(target, COPY / "images")
            target = DOCS / "images" / target.name
        if target.is_relative_to(DOCS) and not target.is_dir():
            return f"({os.path.relpath(target, place)}{anchor})"
        kind = "tree" if target.is_dir() else "blob"
        return f"({repository}/{kind}/main/{target.relative_to(ROOT)}{anchor})"

    return DIRECTIVE.sub(_with_fields, LINK.sub(rewrite, page.read_text(encoding="utf-8")))


def _with_fields(directive: re.Match[str]) -> str:
    """Put a table of a settings class's fields under its entry; mkdocstrings shows docstrings alone."""
    rows = []
    for field in dataclasses.fields(pkgutil.resolve_name(directive[1])):
        if "help" in field.metadata:
            meaning = describe(field.metadata["help"], field.metadata.get("choices"), field.metadata["bounds"])
            if field.metadata.get("zero_is_none"):  # a flag's 0 is None here
                meaning = meaning.replace("0 =", "None =")
            rows.append((f"`{field.name}`", f"`{field.default}`", meaning))
    return f"{directive[0]}\n    options:\n      members: false\n\n{table(('field', 'default', 'meaning'), rows)}"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(DOCS, COPY, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in [ROOT / "README.md", *DOCS.glob("**/*.md")]:
        inside = page.relative_to(DOCS) if page.is_relative_to(DOCS) else Path("index.md")
        text = for_the_site(page, (DOCS / inside).parent, project["urls"]["Repository"])
        (COPY / inside).write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
