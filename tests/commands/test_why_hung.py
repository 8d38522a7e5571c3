"""What why-hung reads: records of failing ranks, and torch's own files, as NCCL's watchdog writes them."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from megatron_zpp.commands.diagnose import why_hung
from megatron_zpp.parallel import flight_record
from tests.ranks import run_ranks
from tests.tools import call_well, call_wrongly


def _dumped() -> bytes:
    """This rank's record as torch writes it, after one reduction; without stacks, which are not read."""
    dist.all_reduce(torch.ones(4))
    return _distributed_c10d._dump_fr_trace(includeStackTraces=False)


@pytest.fixture(scope="module")
def dump() -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "100")
        return pickle.loads(run_ranks(1, _dumped)[0])


def entries(dump, *calls):
    """torch's entry for each (number, name, state): NCCL's differ in the name and the state alone."""
    first = dump["entries"][0]
    return [
        first | {"collective_seq_id": number, "profiling_name": name, "state": state, "time_created_ns": i}
        for i, (number, name, state) in enumerate(calls)
    ]


def write(folder: Path, dump, **calls_of_rank):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    for name, calls in calls_of_rank.items():
        rank = name.removeprefix("rank")
        content = dump | {"pg_config": config, "entries": entries(dump, *calls)}
        (folder / f"hang_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))


def test_a_hang_on_gpus_is_named_from_the_files_of_nccls_watchdog(dump, tmp_path):
    write(
        tmp_path,
        dump,
        rank0=[(1, "nccl:all_reduce", "completed"), (2, "nccl:_all_gather_base", "started")],
        rank1=[(1, "nccl:all_reduce", "completed")],
    )
    assert call_well(why_hung, tmp_path).splitlines() == [
        "rank 0 waited in nccl:_all_gather_base of [[4]]: number 2 of ranks 0, 1, 2",
        "  rank 1 is missing: its last call was nccl:all_reduce of [[4]]",
        "  rank 2 is missing, and left no record: it was stopped, or died, before",
    ]


def test_a_rank_whose_host_ran_ahead_is_named_where_its_gpu_waits(dump, tmp_path):
    started_as_one = [(2, "nccl:_all_gather_base", "scheduled"), (2, "nccl:coalesced", "completed")]
    ahead = [(3, "nccl:all_reduce", "started"), (4, "nccl:all_gather", "scheduled")]
    write(tmp_path, dump, rank0=[*started_as_one, *ahead], rank1=[*started_as_one, (3, "nccl:broadcast", "started")])
    said = call_well(why_hung, tmp_path)
    assert "rank 0 waited in nccl:all_reduce of [[4]]: number 3" in said
    assert "  rank 1 is missing: it called nccl:broadcast of [[4]] there" in said
    assert "number 2" not in said and "number 4" not in said


def test_the_record_of_a_failing_rank_has_nccls_collectives_too(dump, tmp_path, monkeypatch):
    nccl = entries(dump, (7, "nccl:all_to_all", "started"))
    for name, content in (("_dump_fr_trace_json", []), ("_dump_nccl_trace_json", nccl)):
        monkeypatch.setattr(
            _distributed_c10d, name, lambda c=content: json.dumps({"entries": c}).encode(), raising=False
        )
    assert flight_record.last_collective() == "all_to_all"


def test_a_record_without_nccls_collectives_says_so(dump, tmp_path):
    gloo = entries(dump, (1, "gloo:all_reduce", "scheduled"))
    record = {"rank": 0, "time": 1.0, "where": None, "groups": {}, "entries": gloo, "lacks_nccl": True}
    (tmp_path / "hang_rank_0.json").write_text(json.dumps(record))
    said = call_well(why_hung, tmp_path)
    assert said.startswith("note: torch on rank 0 cannot dump NCCL's record")
    assert "rank 0 waited in gloo:all_reduce" in said


class Danger:
    def __reduce__(self):
        return print, ("executed",)


DAMAGED = {
    "hang_rank_0.json": [
        b"",
        b"{",
        b"[]",
        b'{"rank": 0}',
        b"\xff\xfe",
        b'{"rank": 0, "time": 0, "where": null, "groups": [], "entries": [{}]}',
    ],
    "hang_rank_0": [
        b"",
        b"\x80\x02",
        pickle.dumps([]),
        pickle.dumps({"entries": [{}], "pg_config": {}}),
        pickle.dumps(Danger()),
    ],
    "hang_rank_x": [pickle.dumps({"entries": [], "pg_config": {}})],
}


@pytest.mark.parametrize("name, content", [(name, content) for name in DAMAGED for content in DAMAGED[name]])
def test_a_damaged_record_is_one_line_that_names_it(tmp_path, capsys, name, content):
    (tmp_path / name).write_bytes(content)
    error = call_wrongly(why_hung, tmp_path)
    assert f"{tmp_path / name} is no record of collectives" in error and "Traceback" not in error
    assert "executed" not in capsys.readouterr().out
