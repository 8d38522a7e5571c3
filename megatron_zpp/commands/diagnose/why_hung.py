"""Say which collective a job hung in, and which ranks it waited for, from what its ranks wrote when they gave up.

megatron-zpp why-hung runs/mine  # the folder of --save
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.errors import reports_errors
from megatron_zpp.files import read_json_object
from megatron_zpp.parallel.flight_record import FILES
from megatron_zpp.settings.flags import local_path

SECONDS_OF_ONE_HANG = 600.0  # older records are of another


def read_records(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the records of the last hang, by rank. Raises ValueError without any."""
    paths = sorted(folder.glob(f"{FILES}*.json"))
    if not paths:
        theirs = "; of NCCL's watchdog there are some: read them with torchfrtrace" if _of_nccl(folder) else ""
        raise ValueError(f"{folder} holds no {FILES}*.json, which ranks write when a collective fails{theirs}")
    records = [_read(path) for path in paths]
    last = max(record["time"] for record in records)
    return {record["rank"]: record for record in records if record["time"] > last - SECONDS_OF_ONE_HANG}


def _read(path: Path) -> dict[str, Any]:
    """Read one rank's record. Raises ValueError if something else is there."""
    record = read_json_object(path)
    try:
        int(record["rank"]), float(record["time"]), hash((record["where"], *map(_key, record["entries"])))
        if all(isinstance(members, list) for members in record["groups"].values()):
            return record
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        pass
    raise ValueError(f"{path} is no record of a rank: remove it, and look at the others")


def _of_nccl(folder: Path) -> bool:
    return any(path.suffix != ".json" for path in folder.glob(f"{FILES}*"))


def explain(records: Mapping[int, dict[str, Any]]) -> list[str]:
    """Describe each collective that ranks waited in: unit, ranks there, ranks missing and what these did last."""
    waiting: dict[tuple[Any, ...], list[int]] = {}
    for rank, record in sorted(records.items()):
        if record["entries"]:
            waiting.setdefault(_key(record["entries"][-1]), []).append(rank)
    lines = []
    for key, ranks in waiting.items():
        group, number, name, sizes = key
        members = records[ranks[0]]["groups"].get(group, [])
        units = sorted({records[rank]["where"] for rank in ranks} - {None})
        of_unit = f", {' or '.join(units)}," if units else ""
        lines.append(f"{_ranks(ranks)} waited in {name}{of_unit} of {sizes}: number {number} of {_ranks(members)}")
        for rank in members:
            if rank not in records:
                lines.append(f"  rank {rank} is missing, and left no record: it was stopped, or died, before")
            elif key not in (keys := [_key(entry) for entry in records[rank]["entries"]]):
                other = [k for k in keys if k[:2] == key[:2]]
                did = f"it called {other[0][2]} of {other[0][3]} there" if other else "its own line says where it was"
                lines.append(f"  rank {rank} is missing: {did}")
    return lines


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return entry["process_group"][0], number, entry["profiling_name"], str(entry["input_sizes"])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@reports_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path(Path), help="where the job saved: the folder of its --save")
    print("\n".join(explain(read_records(parser.parse_args().folder))))
