"""Joining the process group, and errors of some ranks that all of them report as one."""

from __future__ import annotations

import contextlib
import io
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_zpp.parallel.distributed import FailedTogether, errors_on_all_ranks, init_distributed
from tests.ranks import run_in_turn, run_ranks


def _fail_on(ranks: dict[int, Exception]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            with errors_on_all_ranks():
                if dist.get_rank() in ranks:
                    raise ranks[dist.get_rank()]
        except FailedTogether:
            return err.getvalue()
    return "no error"


FAILURES: dict[str, dict[int, Exception]] = {  # by what rank 0 reports
    "no error": {},
    "error: rank 2: disk is full\n": {2: OSError("disk is\n  full")},
    "error: wrong\n": {rank: ValueError("wrong") for rank in range(3)},
    "error: rank 1: a\n": {1: ValueError("a"), 2: ImportError("b")},
}


def test_an_error_of_some_ranks_stops_all():
    found = run_in_turn(3, {report: partial(_fail_on, failing) for report, failing in FAILURES.items()})
    for report, of_ranks in found.items():
        silent = "no error" if not FAILURES[report] else ""
        assert of_ranks == [report, silent, silent]


def _alone(backend: str | None) -> tuple[str, int, str]:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    device = init_distributed(backend, timeout_minutes=1)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return device.type, dist.get_world_size(), str(total.item())


def test_one_rank_needs_no_launcher():
    ((device, world_size, total),) = run_ranks(1, _alone, "gloo")
    assert (device, world_size, total) == ("cpu", 1, "1.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu():
    with pytest.raises(ValueError, match="nccl needs a GPU"):
        init_distributed("nccl", timeout_minutes=1)


def test_ranks_need_what_torchrun_says(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"):
        init_distributed("gloo", timeout_minutes=1)
