"""Build the site: python docs/build.py, or make docs. Pages lie in docs/ for readers of the repository, too.

Their links to files outside of docs/ become links to the repository, and pictures of results are copied. Then zensical
builds build/site, and fails at a broken link or anchor.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, COPY = ROOT / "docs", ROOT / "build" / "docs"
LINK = re.compile(r"(?<=\])\(([^)\s:]+?)(#[^)\s]*)?\)")
PICTURES = (".png", ".svg")


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

    return LINK.sub(rewrite, page.read_text(encoding="utf-8"))


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
