"""Evaluate a checkpoint's model on tasks of lm-evaluation-harness, in one process and in fp32.

A sharded model is evaluated by its own trainer: --skip-train --eval-tasks NAME.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zpp.commands.common import given_architecture
from megatron_zpp.commands.generate_text import add_checkpoint_flags, chosen_device, load_model, open_checkpoint
from megatron_zpp.data.text.packages import load_package
from megatron_zpp.data.text.tokenizers import Tokenizer
from megatron_zpp.errors import reports_errors
from megatron_zpp.families import Architecture
from megatron_zpp.settings.flags import local_path, number, path_or_url

if TYPE_CHECKING:
    from megatron_zpp.integrations.lm_eval import ShardedLM


def run(args: argparse.Namespace, given: Architecture | None = None) -> Iterator[str]:
    """Yield a line per score. Raises ValueError, OSError or ImportError on a user's mistake."""
    load_package("lm_eval", "evaluate", "eval")
    from megatron_zpp.integrations.lm_eval import Tasks

    opened = open_checkpoint(args)
    tasks = Tasks(args.eval_tasks, args.eval_tasks_path, args.eval_tasks_limit, length=opened[2]["seq_length"])
    scores = tasks.evaluate(load_lm(args, *opened, given))
    for name, score in scores.items():
        yield f"{name.removeprefix('tasks/')}: {score:.6f}"


def load_lm(
    args: argparse.Namespace,
    checkpoint: Path,
    meta: dict[str, Any],
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    given: Architecture | None = None,
) -> ShardedLM:
    """Load a verified checkpoint's model for the harness."""
    from megatron_zpp.integrations.lm_eval import ShardedLM

    length, device = settings["seq_length"], chosen_device(args)
    model = load_model(checkpoint, meta, device, given)
    rows = model.config.vocab_size if meta.get("unpadded_vocabulary") else None
    return ShardedLM(model, tokenizer, length=length, batch_size=args.batch_size, vocab_size=rows, device=device)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint on tasks.", allow_abbrev=False)
    natural = number(int, at_least=1)
    add = parser.add_argument
    add("--eval-tasks", required=True, nargs="+", metavar="NAME", help="tasks of lm-evaluation-harness")
    folder = "folder with their YAML files; default the harness's own tasks"
    add("--eval-tasks-path", type=local_path(str), metavar="DIR", help=folder)
    add("--eval-tasks-limit", type=natural, metavar="N", help="the first N documents of each task; default all")
    add("--batch-size", type=natural, default=8, metavar="N", help="texts per forward pass; default 8")
    add("--load", required=True, type=path_or_url, metavar="DIR|URL", help="folder given to --save in training")
    add_checkpoint_flags(parser)
    return parser.parse_args(argv)


@reports_errors
def main() -> None:
    args = parse_arguments()
    print(*run(args, given_architecture(args)), sep="\n")
