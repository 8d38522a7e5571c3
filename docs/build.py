"""Build the site: python docs/build.py, or make docs. Pages lie in docs/ for readers of the repository, too.

Their links to files outside of docs/ become links to the repository, pictures of results are copied, and the API's
settings get a table of their fields. Then zensical builds build/site, and fails at a broken link or anchor.
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


def for_the_site(page: Path, repository: str) -> str:
    """Return the page's text with links that a site can follow."""

    def rewrite(link: re.Match[str]) -> str:
        target = (page.parent / link[1]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        inside = target.relative_to(ROOT)
        if target.suffix in PICTURES:
            shutil.copy(target, COPY / "images" / target.name)
            return f"({os.path.relpath(DOCS / 'images' / target.name, page.parent)})"
        kind = "tree" if target.is_dir() else "blob"
        return f"({repository}/{kind}/main/{inside}{link[2] or ''})"

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
    return f"{directive[0]}\n\n{table(('field', 'default', 'meaning'), rows)}"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(DOCS, COPY, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in DOCS.glob("**/*.md"):
        copy = COPY / page.relative_to(DOCS)
        copy.write_text(for_the_site(page, project["urls"]["Repository"]), encoding="utf-8")
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
