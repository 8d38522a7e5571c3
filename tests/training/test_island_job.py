"""Which folder an elastic island loads from."""

from __future__ import annotations

from pathlib import Path

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.families import GPT
from megatron_zpp.training.islands import prepare_island
from tests.islands.elastic_jobs import secret_file
from tests.ranks import run_ranks
from tests.training.small_run import flags

ISLAND = "--islands 2 --islands-may-leave --island-number 1 --island-lighthouse localhost:1 --island-secret-file"


def _folder(load: Path) -> str:
    argv = flags("nowhere", f"{ISLAND} {secret_file()} --load {load}")
    folder = prepare_island(parse_settings(GPT, argv, 1, note=lambda text: None)).checkpoint.load
    assert folder is not None
    return folder


def _folders(load: Path) -> list[str]:
    found, own = [_folder(load)], load / "island_1"
    for tracker in (None, "4", "not an iteration"):
        own.mkdir(exist_ok=True)
        if tracker is not None:
            (own / "latest_checkpointed_iteration.txt").write_text(tracker)
        found.append(_folder(load))
    return found


def test_a_damaged_checkpoint_of_its_own_is_left_to_loading(tmp_path):
    """Which says what is wrong with it, or finds an older one, as --load-latest-good and --ckpt-step ask."""
    (folders,) = run_ranks(1, _folders, tmp_path)
    assert folders == [str(tmp_path)] * 2 + [str(tmp_path / "island_1")] * 2
