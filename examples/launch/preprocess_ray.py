"""Tokenize a corpus on the machines of a Ray cluster, then merge: the same bytes as on one machine.

    python examples/launch/preprocess_ray.py --input data/pile --output-prefix data/all --parts 64 -- FLAGS

Run it from a folder that all machines share. FLAGS are tools/preprocess_data.py's: the tokenizer, --append-eod.
Files are taken in the order of their names. A part that a machine left unfinished goes on where it stopped.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import ray

from megatron_zpp.commands.data import preprocess_data
from megatron_zpp.data.text.corpus import find_files
from megatron_zpp.errors import reports_errors


def tokenize(folder: str, files: list[str], prefix: str, workers: int, flags: list[str]) -> None:
    words = [sys.executable, "tools/preprocess_data.py", "--input", *files, "--output-prefix", prefix]
    subprocess.run([*words, "--workers", str(workers), *flags], cwd=folder, check=True)


@reports_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="folder of text files")
    parser.add_argument("--output-prefix", type=Path, required=True)
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--cpus-per-part", type=int, default=8)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- FLAGS of tools/preprocess_data.py")
    args = parser.parse_args()
    flags = [flag for flag in args.flags if flag != "--"]
    given = preprocess_data.parse_arguments(["--input", str(args.input), "--output-prefix", "x", *flags])
    files = [str(file.path) for file in find_files(given.input, given.input_format)]
    if not 0 < args.parts <= len(files):
        parser.error(f"--parts must be 1 to the number of files below {args.input}, {len(files)}")
    folder = args.output_prefix.with_name(f"{args.output_prefix.name}_parts")
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [i * len(files) // args.parts for i in range(args.parts + 1)]
    task = ray.remote(num_cpus=args.cpus_per_part, max_retries=3)(tokenize)
    parts = [
        task.remote(os.getcwd(), files[bounds[i] : bounds[i + 1]], str(folder / f"{i:05d}"), args.cpus_per_part, flags)
        for i in range(args.parts)
    ]
    ray.get(parts)
    merge = [
        sys.executable,
        "tools/merge_datasets.py",
        "--input",
        str(folder),
        "--output-prefix",
        str(args.output_prefix),
    ]
    subprocess.run(merge, check=True)


if __name__ == "__main__":
    sys.exit(main())
