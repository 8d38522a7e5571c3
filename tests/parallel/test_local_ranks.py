"""``--local-ranks``: real ranks on this machine, started by the command itself."""

import os
import re
import sys
from unittest.mock import patch

import pytest
import torch

from megatron_zpp.checkpoint import read_meta
from megatron_zpp.checkpoint.storage import iterate_tensors
from megatron_zpp.parallel.distributed import device_of_rank
from megatron_zpp.parallel.local_ranks import start_local_ranks
from tests.training.small_run import ended, flags, ranks_of, torchrun, wait_for_iteration

LOCAL = "--local-ranks 4 --local-nodes 2"


def saved(folder):
    """The trained tensors of a checkpoint, by name."""
    checkpoint = folder / "iter_0000003"
    names = ("model.", "optimizer.", "rng.")
    return {
        name: tensor
        for name, tensor in iterate_tensors(checkpoint, read_meta(checkpoint), "")
        if name.startswith(names)
    }


def test_local_ranks_train_as_torchruns_to_the_bit(data, tmp_path):
    common = "--zeropp int8 --hidden-dropout 0.1 --train-iters 3 --save-interval 3"
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    out, err = ended(torchrun(0, flags(data, common, LOCAL, f"--save {ours}")))
    assert "on 4 ranks (cpu" in out and "2 nodes of 2 ranks; weights are sent as moves of int8 between nodes" in out
    assert err.count("note: --zeropp int8 stands for") == 1 and "OMP_NUM_THREADS" not in err
    ended(torchrun(4, flags(data, common, f"--zeropp-ranks-per-node 2 --save {theirs}")))
    expected = saved(theirs)
    assert saved(ours).keys() == expected.keys() and len(expected) > 30
    assert all(tensor.equal(expected[name]) for name, tensor in saved(ours).items())


def test_nodes_alone_start_one_rank_each_and_tensor_parallel_ranks_count_too(data):
    argv = flags(data, "--zeropp int8 --train-iters 1 --local-nodes 2 --local-ranks 4 --tensor-model-parallel-size 2")
    out, _ = ended(torchrun(0, argv))
    assert "2 nodes of 1 rank; weights are sent" in out
    out, _ = ended(torchrun(0, flags(data, "--train-iters 1 --local-nodes 2")))
    assert "on 2 ranks (cpu" in out and "2 nodes of 1 rank; weights are sent" in out


def test_a_mistake_in_flags_is_one_line_before_any_rank_starts(data):
    out, err = ended(torchrun(0, flags(data, "--local-ranks 4 --local-nodes 3")), status=2)
    assert out == "" and err == "error: --local-nodes 3 does not divide --local-ranks 4; choose one of 1, 2, 4\n"


def test_other_ranks_than_those_of_a_launcher_are_refused(data):
    for ranks in (1, 2):
        out, err = ended(torchrun(ranks, flags(data, "--local-ranks 4")), status=1)
        refused = f"error: --local-ranks 4 starts its ranks by itself, and this run has {ranks}: leave it out"
        assert out == "" and refused in err and err.count("Traceback") <= 1  # torchrun's


def test_a_mistake_that_ranks_find_and_a_killed_rank_end_all_with_status_1(tmp_path, data):
    _, err = ended(torchrun(0, flags(str(tmp_path / "none"), "--local-ranks 2")), status=1)
    assert re.search(r"error: .*none", err) and "error: rank" not in err
    process = torchrun(0, flags(data, "--local-ranks 2 --train-iters 100000"))
    wait_for_iteration(process, 3)
    os.kill(ranks_of(process)[1], 9)
    _, err = ended(process, status=1)
    assert "rank      : 1 (local_rank: 1)" in err and "Signal 9" in err


@pytest.mark.parametrize("command", [["python", "-m", "ipykernel_launcher"], ["python", "-", "--local-ranks", "2"]])
def test_a_notebook_is_not_replaced_by_torchrun(monkeypatch, command):
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--local-ranks", "2"])
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("replaced"))
    with pytest.raises(ValueError, match="put the program into a file, or start it with torchrun"):
        start_local_ranks(2, 1)


@pytest.mark.parametrize(("cards", "card"), [(1, 0), (2, 1), (4, 3)])
def test_ranks_share_cards_where_they_outnumber_them(monkeypatch, cards, card):
    monkeypatch.setenv("LOCAL_RANK", "3")
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: cards),
    ):
        assert device_of_rank(None, local_ranks=4) == torch.device("cuda", card)
        if cards < 4:
            with pytest.raises(ValueError, match=r"share . GPU\(s\), which NCCL refuses: leave --distributed-backend"):
                device_of_rank("nccl", local_ranks=4)
            with pytest.raises(ValueError, match="local rank 3 has no GPU"):
                device_of_rank(None)
