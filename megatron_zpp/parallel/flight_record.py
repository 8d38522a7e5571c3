"""What each rank's last collectives were, for ``megatron-zpp why-hung``: torch's Flight Recorder, of gloo and NCCL."""

import json
import os
import socket
import sys
import time
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
    return json.loads(_distributed_c10d._dump_fr_trace_json()).get("entries", [])  # type: ignore[attr-defined,no-any-return]


def write_record(where: str | None) -> None:
    """Write this rank's record, as JSON, when it fails. where: the collective of which unit it failed in."""
    prefix = os.environ.get(PREFIX)
    if prefix is None or not dist.is_initialized():
        return
    groups = {group.group_name: dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_names}
    record: dict[str, Any] = {"rank": dist.get_rank(), "host": socket.gethostname(), "time": time.time()}
    record |= {"where": where, "groups": groups}
    record["entries"] = _entries()
    try:
        Path(f"{prefix}{record['rank']}.json").write_text(json.dumps(record))
    except OSError as error:  # what the rank failed of matters more
        print(f"note: no record for why-hung ({error})", file=sys.stderr, flush=True)
