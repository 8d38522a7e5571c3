"""Name the collective that a job hung in, and the ranks that it waited for, from what ranks wrote when they gave up.

megatron-zpp why-hung runs/mine  # the folder of --save
"""

import argparse
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_zpp.checkpoint.files import parse_json, read_regular
from megatron_zpp.errors import reports_errors
from megatron_zpp.parallel.flight_record import FILES
from megatron_zpp.settings.flags import local_path

SECONDS_OF_ONE_HANG = 600.0  # older records are of another


def read_records(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the records of the last hang, by rank. Raises ValueError without any, and for a damaged one."""
    paths = sorted(folder.glob(f"{FILES}*"))  # a rank's own .json last: it knows the unit
    if not paths:
        raise ValueError(f"{folder} holds no {FILES}N or {FILES}N.json, which ranks write when a collective fails")
    records = []
    for path in paths:
        content = read_regular(path)
        try:
            record = parse_json(content) if path.suffix == ".json" else _of_watchdog(path, content)
            explain({int(record["rank"]): record})  # which reads all of it
            records.append((float(record["time"]), record))
        except Exception as error:  # a damaged pickle raises anything
            raise ValueError(f"{path} is no record of collectives ({error!r}): remove it") from error
    last = max(time for time, _ in records)
    return {record["rank"]: record for time, record in records if time > last - SECONDS_OF_ONE_HANG}


class _PlainData(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers, and refuses a file that calls anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _of_watchdog(path: Path, content: bytes) -> dict[str, Any]:
    """Read torch's own file, which NCCL's watchdog writes, into the form of ``write_record``."""
    dump = _PlainData(io.BytesIO(content)).load()
    record = {"rank": int(path.name.removeprefix(FILES)), "time": path.stat().st_mtime, "where": None}
    groups = {name: json.loads(group["ranks"]) for name, group in dump["pg_config"].items()}
    return record | {"groups": groups, "entries": dump["entries"]}


def explain(records: Mapping[int, dict[str, Any]]) -> list[str]:
    """Describe each collective that ranks waited in: unit, ranks there, ranks missing and what these did last."""
    waiting: dict[tuple[Any, ...], list[int]] = {}
    lines = []
    calls = {rank: [_key(entry) for entry in record["entries"]] for rank, record in sorted(records.items())}
    for rank, keys in calls.items():
        if (key := _waited_in(keys, records[rank]["entries"])) is not None:
            waiting.setdefault(key, []).append(rank)
        if records[rank].get("lacks_nccl"):
            lines.append(f"note: torch on rank {rank} cannot dump NCCL's record: what follows leaves its calls out")
    for key, ranks in waiting.items():
        group, _, number, name, sizes = key
        members = records[ranks[0]]["groups"].get(group) or sorted(records)
        units = sorted({records[rank]["where"] for rank in ranks} - {None})
        of_unit = f", {' or '.join(units)}," if units else ""
        lines.append(f"{_ranks(ranks)} waited in {name}{of_unit} of {sizes}: number {number} of {_ranks(members)}")
        for rank in members:
            if rank not in records:
                lines.append(f"  rank {rank} is missing, and left no record: it was stopped, or died, before")
            elif key not in calls[rank]:
                there = [f"it called {k[3]} of {k[4]} there" for k in calls[rank] if k[:3] == key[:3]]
                last = [f"its last call was {k[3]} of {k[4]}" for k in calls[rank][-1:]]
                lines.append(f"  rank {rank} is missing: {[*there, *last, 'it called nothing'][0]}")
    return lines or ["no rank waited in a collective"]


def _waited_in(keys: Sequence[tuple[Any, ...]], entries: Sequence[Mapping[str, Any]]) -> tuple[Any, ...] | None:
    """Return the collective that a rank waited in: with NCCL, whose calls return at once, the oldest not completed."""
    # The recorder marks only one entry of a coalesced group as completed.
    completed = {key[:3] for key, entry in zip(keys, entries, strict=True) if entry["state"] == "completed"}
    pending = [key for key in keys if key[:3] not in completed]
    return next((key for key in pending if key[3].startswith("nccl:")), pending[-1] if pending else None)


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a collective's group, kind and number there, on which ranks must agree; then its name and sizes."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return entry["process_group"][0], entry["is_p2p"], number, entry["profiling_name"], str(entry["input_sizes"])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@reports_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path(Path), help="where the job saved: the folder of its --save")
    print("\n".join(explain(read_records(parser.parse_args().folder))))
