"""Which checkpoints are good: finite ones are told from others, and outlive them."""

import contextlib
import errno
import io
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from megatron_zpp.arguments.parse import parse_settings
from megatron_zpp.checkpoint import CheckpointError, find_checkpoint, meta, read_meta
from megatron_zpp.checkpoint.files import write_shards
from megatron_zpp.checkpoint.folder import retain
from megatron_zpp.commands import generate_text
from megatron_zpp.commands.convert import export_hf
from megatron_zpp.commands.inspect_checkpoint import main as inspect
from megatron_zpp.families import GPT
from megatron_zpp.training.pretrain import NotFiniteError
from tests.checkpoint.saved import iterations, save
from tests.ranks import run_in_turn, run_ranks
from tests.training.small_run import NO_DROPOUT, call_pretrain, flags, start, train_quietly

NAN = math.nan


@pytest.mark.parametrize(
    "values, keep_last, interval, kept",
    [
        ([1, 1, 1, 1], 2, None, [3, 4]),
        ([1, NAN, NAN, NAN], 1, None, [1, 4]),
        ([1, 1, 1, math.inf, NAN], 2, None, [2, 3, 4, 5]),
        ([1, NAN, 1, 1], 2, None, [3, 4]),  # gone on from the first one: the NaN grow old too
        ([1, 1, NAN, NAN, NAN], 1, 3, [2, 3, 5]),
        ([NAN, NAN, NAN], 1, None, [3]),
    ],
)
def test_retention_takes_no_finite_checkpoint_for_one_that_is_not(tmp_path, values, keep_last, interval, kept):
    for iteration, value in enumerate(values, start=1):
        save(tmp_path, iteration, value)
        retain(tmp_path, keep_last, interval)
    assert iterations(tmp_path) == kept


def test_retention_deletes_nothing_that_the_disk_does_not_give_now(tmp_path, monkeypatch):
    for iteration, value in enumerate([1.0, NAN, NAN], start=1):
        save(tmp_path, iteration, value)

    def read(path):
        if path.parent.name == "iter_0000001":
            raise OSError(errno.EIO, "Input/output error")
        return path.read_bytes()

    monkeypatch.setattr(meta, "read_regular", read)  # no file system here fails in this way when asked to
    retain(tmp_path, 1, None)
    assert iterations(tmp_path) == [1, 3]


def test_the_inspector_names_what_is_not_finite(tmp_path, capsys):
    save(tmp_path, 2)
    save(tmp_path, 3, NAN)
    assert inspect(["list", str(tmp_path)]) == 0
    newest, older = capsys.readouterr().out.splitlines()
    assert "NaN or Inf in model.first, model.second" in newest and "NaN" not in older
    assert inspect(["verify", str(tmp_path), "--ckpt-step", "2"]) == 0
    assert inspect(["verify", str(tmp_path)]) == 1
    assert "iter_0000003 is not finite" in capsys.readouterr().out


def test_a_checkpoint_of_iteration_0_as_imports_make_is_chosen_by_its_number(tmp_path):
    with pytest.raises(CheckpointError, match="not holds no checkpoint, and so none of iteration 7"):
        find_checkpoint(str(tmp_path / "not"), 7)
    with pytest.raises(CheckpointError, match="holds no checkpoint, and so none of iteration 7"):
        find_checkpoint(str(tmp_path), 7)  # as a run that has made the folder says
    save(tmp_path, 0)
    save(tmp_path, 3)
    chosen = ["--load", str(tmp_path), "--ckpt-step", "0"]
    for words in (generate_text.parse_arguments(chosen), export_hf.parse_arguments([*chosen, "--output", "x"])):
        assert find_checkpoint(words.load, words.ckpt_step) == tmp_path / "iter_0000000"
    settings = parse_settings(GPT, flags("x", *chosen), note=lambda text: None)
    assert settings.checkpoint.ckpt_step == 0
    assert inspect(["verify", str(tmp_path), "--ckpt-step", "0"]) == 0


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_nan_and_inf_are_seen_in_every_kind_of_number(tmp_path, dtype, value):
    tensors = {"fine": torch.full((2, 5), 0.5).to(dtype), "bad": torch.full((2, 5), 0.5).to(dtype)}
    tensors["bad"].view(-1)[7] = NAN if dtype == torch.float8_e4m3fn else value  # which has no Inf
    tensors |= {"none": torch.zeros(0, dtype=dtype), "whole": torch.ones(3, dtype=torch.int8)}
    items = create_default_local_save_plan(tensors, is_coordinator=True).items
    assert write_shards(tmp_path / "file", items, lambda item: tensors[item.index.fqn])[1] == ["bad"]


def _diverge(argv: list[str], spoil: str) -> str:
    """Train; before step 3 is saved, NaN comes on the last rank: in a parameter, the optimizer, or later losses."""
    run, _ = start(argv)
    write = run.writers.write

    def write_and_spoil(metrics, iteration, consumed_samples) -> None:  # is called on every rank
        write(metrics, iteration, consumed_samples)
        if iteration == 3 and dist.get_rank() == dist.get_world_size() - 1:
            weight = run.model.layers[1].mlp.linear_fc1.weight
            with torch.no_grad():
                if spoil == "parameter":
                    weight.to_local()[0, 0] = NAN
                elif spoil == "optimizer":
                    run.optimizer.state[weight]["exp_avg"].to_local()[0, 0] = NAN
                else:
                    run.model.layers[1].register_forward_hook(lambda module, inputs, output: output * NAN)

    run.writers.write = write_and_spoil
    out = io.StringIO()
    with contextlib.suppress(NotFiniteError):
        train_quietly(run, out)
    return out.getvalue()


SPOILT = {"parameter": "model.layers.1.mlp.linear_fc1.weight", "optimizer": "optimizer.", "loss": "the loss"}


def test_a_run_that_diverges_keeps_a_checkpoint_to_go_on_from(data, tmp_path):
    common = f"{NO_DROPOUT} --global-batch-size 2 --train-iters 6"
    save = "--save-interval 1 --save-keep-last 1 --max-nonfinite-steps 3 --save"
    calls = {spoil: partial(_diverge, flags(data, common, save, f"{tmp_path / spoil}"), spoil) for spoil in SPOILT}
    outs = run_in_turn(2, calls)
    found = {spoil: iterations(tmp_path / spoil) for spoil in SPOILT}
    loads = [f"--load {tmp_path / spoil} {more}" for spoil in SPOILT for more in ("--load-latest-good", "")]
    results = run_ranks(1, call_pretrain, *(flags(data, common, load) for load in loads))[0]
    for (spoil, wanted), good, latest in zip(SPOILT.items(), results[::2], results[1::2], strict=True):
        finite, folder = 3 if spoil == "loss" else 2, tmp_path / spoil
        assert found[spoil] == [finite, 6]
        assert any(name.startswith(wanted) for name in read_meta(folder / "iter_0000006")["nonfinite"])
        assert "note: this checkpoint holds NaN or Inf in" in outs[spoil][0]
        assert good[0] == 0 and f"note: passed over: {folder}/iter_0000006 is not finite" in good[1], good
        assert f"iter_{finite:07d} at iteration {finite}" in good[1]
        assert latest[0] == (0 if spoil == "loss" else 3), latest  # 3: it begins with NaN, and comes to nothing
        assert "--load-latest-good takes the newest checkpoint that is finite" in latest[1]
        assert "iter_0000006 at iteration 6" in latest[1]
