"""Makes a corpus of what every Python has: the sources and documentation strings of its standard library.

    python examples/quickstart/make_corpus.py --output corpus.jsonl

One JSON object a line, with the keys ``text`` and ``path``, one source file each, in an order that is shuffled but
always the same, so that training and validation text are alike. The library proper (about 12 MB) comes first when
choosing; its test programs, where they are installed, fill up what ``--max-megabytes`` leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
TEST_FOLDERS = {"test", "tests", "idle_test"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the standard library's sources as JSON lines.")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--max-megabytes", type=float, default=20.0, metavar="N", help="size of the corpus; default 20")
    args = parser.parse_args()
    library = Path(sysconfig.get_path("stdlib"))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    partial = args.output.with_name(args.output.name + ".partial")
    size = documents = 0
    with open(partial, "w", encoding="utf-8") as file:
        for path in chosen_files(library, args.max_megabytes * 1e6):
            text = path.read_text(encoding="utf-8")
            file.write(json.dumps({"text": text, "path": path.relative_to(library).as_posix()}) + "\n")
            size += len(text)
            documents += 1
    if documents == 0:
        partial.unlink()
        print(f"error: no sources of the standard library in {library}", file=sys.stderr)
        return 1
    partial.replace(args.output)
    print(f"{args.output}: {documents:,} documents, {size / 1e6:.1f} million characters from {library}")
    return 0


def chosen_files(library: Path, max_bytes: float) -> list[Path]:
    """Source files up to ``max_bytes`` in all, shuffled."""

    def shuffled(path: Path) -> bytes:  # by a digest of the name: any machine with this Python has the same order
        return hashlib.sha256(path.relative_to(library).as_posix().encode()).digest()

    def is_test(path: Path) -> bool:
        return not TEST_FOLDERS.isdisjoint(path.relative_to(library).parts)

    sources = [path for path in library.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(library).parts)]
    chosen, size = [], 0
    for path in sorted(sources, key=lambda path: (is_test(path), shuffled(path))):
        if size >= max_bytes:
            break
        if is_text(path):
            chosen.append(path)
            size += path.stat().st_size
    return sorted(chosen, key=shuffled)


def is_text(path: Path) -> bool:
    """Whether the file is UTF-8 and not empty; a few tests of the compiler are not."""
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False


if __name__ == "__main__":
    sys.exit(main())
