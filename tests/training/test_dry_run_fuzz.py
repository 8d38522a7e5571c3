"""Whatever flags are drawn, a dry run refuses what the run refuses, and nothing else."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_zpp.arguments.parse import SettingsError, parse_settings
from megatron_zpp.families import GPT, LLAMA
from megatron_zpp.settings.groups import all_flags
from tests.arguments.fuzzing import words_needed
from tests.training.small_run import call_pretrain, flags

# What other machines or other programs decide, what the small run's own flags say, and what takes long.
LEFT_OUT = """
    dry_run dry_run_world_size deepspeed_config preset compile wandb_project eval_tasks
    exit_duration_in_mins exit_signal_handler distributed_timeout_minutes num_workers
    islands_may_leave island_number island_lighthouse island_secret_file island_bind island_timeout_seconds
    island_patience_seconds train_iters train_samples train_tokens
"""
NUMBERS = ("1", "2", "3", "4", "8", "16", "64", "0", "0.1", "0.5", "1e-3")
TEXTS = ("folder", "1", "2,1,1", "core_attn", "moe", "mlp", "query_key_value", "256")
Draw = tuple[str, list[str]]  # architecture and command line


def draws(seed: int, world_size: int, data: str) -> Iterator[Draw]:
    """Draw up to four flags with what they need, until the checks of flags alone let them pass."""
    draw = random.Random(seed)
    known = [flag for flag in all_flags().values() if flag.setting not in LEFT_OUT.split()]
    while True:
        architecture, words = draw.choice((GPT, LLAMA)), list[str]()
        for flag in draw.sample(known, draw.randint(1, 4)):
            words += words_needed(flag).format(folder="folder").split()
            pool = flag.choices or (NUMBERS if flag.value_type in (int, float) else TEXTS)
            count = flag.nargs if isinstance(flag.nargs, int) else int(flag.value_type is not bool)
            words += [flag.name, *(str(draw.choice(pool)) for _ in range(count))]
        argv = flags(data, *words, length="--train-iters 1")
        try:
            parse_settings(architecture, argv, world_size, note=lambda text: None)
        except SettingsError:
            continue
        yield architecture.name, argv


def _both(pairs: list[Draw], port: int) -> list[list[tuple[int, str]]]:
    """Status and errors of the dry run and of the run, for each command line, each in an empty folder."""
    results = []
    for architecture, argv in pairs:
        of_pair = []
        for more in (["--dry-run"], []):
            folder = Path(tempfile.gettempdir()) / f"dry_run_fuzz_{port}"
            folder.mkdir(exist_ok=True)
            ((code, _, err),) = call_pretrain([*argv, *more], architecture=architecture, folder=str(folder), port=port)
            of_pair.append((code, err))
        results.append(of_pair)
    return results
