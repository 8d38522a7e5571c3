"""Makes a corpus of what every Python has: the sources and documentation strings of its standard library.

    python examples/quickstart/make_corpus.py --output corpus.jsonl
    python examples/quickstart/make_corpus.py --output large.jsonl --packages torch --max-megabytes 70

One JSON object a line, with the keys ``text`` and ``path``, one source file each, in an order that is shuffled but
always the same, so that training and validation text are similar. The library proper (about 12 MB) comes first when
choosing; its test programs, where they are installed, and then installed packages fill up what ``--max-megabytes``
leaves.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
import sysconfig
from pathlib import Path

from megatron_zpp.errors import attempt, reports_errors

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
TEST_FOLDERS = {"test", "tests", "idle_test"}


@reports_errors
def main() -> None:
    parser = argparse.ArgumentParser(description="Write the standard library's sources as JSON lines.")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--max-megabytes", type=float, default=20.0, metavar="N", help="size of the corpus; default 20")
    parser.add_argument("--packages", nargs="+", default=[], metavar="NAME", help="installed packages to add")
    args = parser.parse_args()
    roots = [Path(sysconfig.get_path("stdlib"))]
    for name in args.packages:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"no package called {name} is installed; pip install it, or leave it out")
        roots.append(Path(spec.submodule_search_locations[0]))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    partial = args.output.with_name(args.output.name + ".partial")
    size = documents = 0
    with attempt("write", args.output), open(partial, "w", encoding="utf-8") as file:
        for path, name in chosen_files(roots, args.max_megabytes * 1e6):
            text = path.read_text(encoding="utf-8")
            file.write(json.dumps({"text": text, "path": name}) + "\n")
            size += len(text)
            documents += 1
    if documents == 0:
        partial.unlink()
        raise ValueError(f"no sources of the standard library in {roots[0]}")
    partial.replace(args.output)
    print(f"{args.output}: {documents:,} documents, {size / 1e6:.1f} million characters from {roots[0]}")


def chosen_files(roots: list[Path], max_bytes: float) -> list[tuple[Path, str]]:
    """Source files up to ``max_bytes`` in all with their names, shuffled. roots: the library's folder, packages'."""
    sources = []  # (number of the root, is a test, digest, path, name)
    for number, root in enumerate(roots):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).parts
            if LEFT_OUT.isdisjoint(parts):
                name = "/".join(parts if number == 0 else (root.name, *parts))
                # By a digest of the name: any machine with these versions has the same order.
                digest = hashlib.sha256(name.encode()).digest()
                sources.append((number, not TEST_FOLDERS.isdisjoint(parts), digest, path, name))
    chosen, size = [], 0
    for _, _, digest, path, name in sorted(sources):
        if size >= max_bytes:
            break
        if is_text(path):
            chosen.append((digest, path, name))
            size += path.stat().st_size
    return [(path, name) for _, path, name in sorted(chosen)]


def is_text(path: Path) -> bool:
    """Whether the file is UTF-8 and not empty; a few tests of the compiler are not."""
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False


if __name__ == "__main__":
    sys.exit(main())
