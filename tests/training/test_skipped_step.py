"""A step that is skipped although it is finite, for its loss spikes, leaves the run as if it had never been."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_zpp.data.loader import build_loader
from megatron_zpp.training.step import train_step
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, write_text

BATCH = 8
LOCO = "--zero-quantized-gradients --zeropp-loco --zeropp-gradient-bits 3 --zeropp-ranks-per-node 2"
RUNS = {
    "both hops, decaying": f"{LOCO} --zeropp-loco-hops both --zeropp-loco-reset decay --zeropp-loco-reset-interval 5",
    "fp16": f"{LOCO} --fp16 --initial-loss-scale 256 --hysteresis 1",
    "weights too": f"{LOCO} --zero-quantized-weights --zero-hpz-partition-size 2",
}


def _states(argvs: dict[str, list[str]]) -> dict[str, tuple[dict, dict]]:
    """What each run is after steps of batches 0 and 1: without, and with a step between that spikes."""
    return {name: (_state(argv, spikes=False), _state(argv, spikes=True)) for name, argv in argvs.items()}


def _state(argv: list[str], spikes: bool) -> dict:
    run, _ = start(argv)

    def step(batch: int, factor: float = 1.0) -> float:
        batches = build_loader(
            run.datasets.train,
            consumed_samples=batch * BATCH,
            micro_batch_size=1,
            dp_rank=run.mesh.dp_rank,
            dp_size=run.mesh.dp_size,
            num_workers=0,
            device="cpu",
        )
        scaled = run.model.register_forward_hook(lambda model, inputs, losses: losses * factor)
        (result,) = train_step(run, batches, BATCH // dist.get_world_size(), stop=False)
        scaled.remove()
        assert result.spiked == result.skipped == (factor != 1)
        return result.loss

    first = step(0)
    if spikes:
        average = run.counters.average_loss
        second = step(2, factor=4.0)
        assert second > 3 * first
        # The average moves towards a spike, but no further than to its limit: 2 * the average.
        assert run.counters.average_loss == pytest.approx(0.98 * first + 0.02 * 2 * first)
        run.counters.average_loss = average
    step(1)
    optimizer = [
        {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
        for state in run.optimizer.state.values()
    ]
    return {
        "parameters": [parameter.detach().to_local() for parameter in run.model.parameters()],
        "optimizer": optimizer,
        "errors": run.zeropp.state_dict(),
        "counters": dataclasses.asdict(run.counters),
        "scale": run.states[0].scaler.scale,
    }


def test_a_spike_with_loco_leaves_no_trace(tmp_path):
    data = write_text(tmp_path)
    common = f"--global-batch-size {BATCH} --loss-spike-factor 2 --attention-dropout 0 --hidden-dropout 0"
    argvs = {name: flags(data, common, more) for name, more in RUNS.items()}
    for of_rank in run_ranks(4, _states, argvs):
        for name, (expected, result) in of_rank.items():
            assert any("error" in key for key in expected["errors"]), name
            torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
