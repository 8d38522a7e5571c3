"""Name the collective that a job hung in, and the ranks that it waited for, from what ranks wrote when they gave up.

megatron-zpp why-hung runs/mine  # the folder of --save
"""

import argparse
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_zpp.checkpoint.files import parse_json, read_regular
from megatron_zpp.commands.common import report_errors
from megatron_zpp.parallel.flight_record import FILES
from megatron_zpp.settings.flags import local_path

SECONDS_OF_ONE_HANG = 600.0  # older records are of another


class Call(NamedTuple):
    """A collective as all ranks of its group number it, and what this rank asked of it."""

    group: str
    is_p2p: bool
    number: int
    name: str  # "nccl:all_reduce"
    sizes: str

    @property
    def place(self) -> tuple[str, bool, int]:
        """The group and number, at which ranks may have called different collectives."""
        return self[:3]


@dataclass(frozen=True)
class Record:
    """The last collectives of one rank."""

    rank: int
    time: float
    where: str | None  # the collective of which unit failed
    groups: dict[str, list[int]]  # global ranks
    calls: list[Call]
    waited_in: Call | None
    lacks_nccl: bool = False  # this rank's torch could not dump NCCL's collectives


def read_records(folder: Path) -> dict[int, Record]:
    """Read the records of the last hang, by rank. Raises ValueError without any, and for a damaged one."""
    paths = sorted(folder.glob(f"{FILES}*"))  # a rank's own .json last: it knows the unit
    if not paths:
        raise ValueError(f"{folder} holds no {FILES}N or {FILES}N.json, which ranks write when a collective fails")
    records = []
    for path in paths:
        content = read_regular(path)
        try:
            if path.suffix == ".json":
                records.append(_record(parse_json(content)))
            else:
                rank, time = int(path.name.removeprefix(FILES)), path.stat().st_mtime
                records.append(_record(_of_watchdog(content) | {"rank": rank, "time": time}))
        except Exception as error:  # a damaged pickle raises anything
            raise ValueError(f"{path} is no record of collectives ({error!r}): remove it") from error
    last = max(record.time for record in records)
    return {record.rank: record for record in records if record.time > last - SECONDS_OF_ONE_HANG}


class _PlainData(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers, and refuses a file that calls anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _of_watchdog(content: bytes) -> dict[str, Any]:
    """Read torch's own file, which NCCL's watchdog writes, into the form of ``write_record``."""
    dump = _PlainData(io.BytesIO(content)).load()
    groups = {name: json.loads(group["ranks"]) for name, group in dump["pg_config"].items()}
    return {"where": None, "groups": groups, "entries": dump["entries"]}


def _record(content: Mapping[str, Any]) -> Record:
    groups = {str(name): [int(rank) for rank in ranks] for name, ranks in content["groups"].items()}
    calls = [_call(entry) for entry in content["entries"]]
    # NCCL's calls return at once: a rank waits in the oldest that is not completed. Of calls that started as one, the
    # recorder completes one entry of the whole.
    states = [entry["state"] for entry in content["entries"]]
    completed = {call.place for call, state in zip(calls, states, strict=True) if state == "completed"}
    pending = [call for call in calls if call.place not in completed]
    waited_in = next((call for call in pending if call.name.startswith("nccl:")), pending[-1] if pending else None)
    rank, lacks_nccl = int(content["rank"]), bool(content.get("lacks_nccl"))
    return Record(rank, float(content["time"]), content["where"], groups, calls, waited_in, lacks_nccl)


def _call(entry: Mapping[str, Any]) -> Call:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    group, name = str(entry["process_group"][0]), str(entry["profiling_name"])
    return Call(group, bool(entry["is_p2p"]), int(number), name, str(entry["input_sizes"]))


def explain(records: Mapping[int, Record]) -> list[str]:
    """Describe each collective that ranks waited in: unit, ranks there, ranks missing and what these did last."""
    waiting: dict[Call, list[int]] = {}
    lines = []
    for rank, record in sorted(records.items()):
        if record.waited_in is not None:
            waiting.setdefault(record.waited_in, []).append(rank)
        if record.lacks_nccl:
            lines.append(f"note: torch on rank {rank} cannot dump NCCL's record: what follows leaves its calls out")
    for call, ranks in waiting.items():
        members = records[ranks[0]].groups.get(call.group) or sorted(records)
        units = sorted({where for rank in ranks if (where := records[rank].where) is not None})
        of_unit = f", {' or '.join(units)}," if units else ""
        what = f"{call.name}{of_unit} of {call.sizes}: number {call.number}"
        lines.append(f"{_ranks(ranks)} waited in {what} of {_ranks(members)}")
        for rank in members:
            if rank not in records:
                lines.append(f"  rank {rank} is missing, and left no record: it was stopped, or died, before")
            elif call not in records[rank].calls:
                there = [f"it called {o.name} of {o.sizes} there" for o in records[rank].calls if o.place == call.place]
                last = [f"its last call was {o.name} of {o.sizes}" for o in records[rank].calls[-1:]]
                lines.append(f"  rank {rank} is missing: {[*there, *last, 'it called nothing'][0]}")
    return lines or ["no rank waited in a collective"]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def main() -> int:
    return report_errors(_main)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=local_path(Path), help="where the job saved: the folder of its --save")
    print("\n".join(explain(read_records(parser.parse_args().folder))))
