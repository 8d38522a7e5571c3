"""Dump each rank's last collectives for ``megatron-zpp why-hung``: torch's Flight Recorder, for gloo and NCCL."""

import json
import os
import socket
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

PREFIX, FILES = "TORCH_FR_DUMP_TEMP_FILE", "hang_rank_"  # NCCL's watchdog writes there, too, by the rank's number


def record_collectives(folder: str | None) -> None:
    """Let torch record each rank's last 2,000 collectives. Call it before the first group. folder: of ``--save``."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if folder is not None:
        os.environ.setdefault(PREFIX, os.path.join(folder, FILES))


def last_collective() -> str | None:
    """Name the collective that this rank called last, as "all_reduce"; None without a record of any."""
    entries = _entries()
    return entries[-1]["profiling_name"].rpartition(":")[2] if entries else None


def _entries() -> list[dict[str, Any]]:
    """Return this rank's collectives, in the order of the calls: gloo's, and NCCL's, which has its own recorder."""
    dumps = [
        getattr(_distributed_c10d, name, lambda: "{}") for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    ]
    entries = [entry for dump in dumps for entry in json.loads(dump()).get("entries", [])]
    return sorted(entries, key=itemgetter("time_created_ns"))


def write_record(where: str | None) -> None:
    """Write this rank's record, as JSON, when it fails. where: the collective of which unit it failed in."""
    prefix = os.environ.get(PREFIX)
    if prefix is None or not dist.is_initialized():
        return
    groups = {group.group_name: dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_names}
    record: dict[str, Any] = {"rank": dist.get_rank(), "host": socket.gethostname(), "time": time.time()}
    record |= {"where": where, "groups": groups}
    record["entries"] = _entries()
    record["lacks_nccl"] = dist.get_backend() == "nccl" and not hasattr(_distributed_c10d, "_dump_nccl_trace_json")
    try:
        Path(f"{prefix}{record['rank']}.json").write_text(json.dumps(record))
    except OSError as error:  # the rank's own error matters more
        print(f"note: no record for why-hung ({error})", file=sys.stderr, flush=True)
