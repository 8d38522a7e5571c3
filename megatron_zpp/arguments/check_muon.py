"""Check what a run says of Muon against the rest of its settings."""

from __future__ import annotations

from megatron_zpp.settings.checks import require
from megatron_zpp.settings.groups import Settings
from megatron_zpp.zeropp.config import SUPPORTED_BITS


def check_muon(settings: Settings) -> None:
    """Raise SettingsError unless ``--optimizer muon`` knows how the run's matrices are laid out."""
    if settings.optimizer.optimizer != "muon":
        return
    bits = settings.optimizer.muon_momentum_bits
    require(
        bits is None or bits in SUPPORTED_BITS,
        f"--muon-momentum-bits must be one of {', '.join(map(str, SUPPORTED_BITS))}, or left out; got {bits}",
    )
    require(
        not settings.optimizer.muon_stale_rows or settings.optimizer.muon_period > 1,
        "--muon-stale-rows are renewed at every whole step: give a --muon-period above 1, such as 10",
    )
    require(
        settings.distributed.tensor_model_parallel_size == 1,
        "--optimizer muon takes matrices whose rows alone are divided: leave --tensor-model-parallel-size out",
    )
    require(
        settings.model.num_experts is None,
        "--optimizer muon would take the experts of a layer for one matrix: leave --num-experts out",
    )
    require(
        not settings.zero.cpu_offload,
        "--optimizer muon multiplies matrices, on the device that computes: leave --cpu-offload out",
    )
    require(
        settings.zero.zero_stage >= 1,
        "--optimizer muon needs --zero-stage 1, 2 or 3, where ranks have parts of a matrix, got 0",
    )
    require(not settings.optimizer.use_apex, "--optimizer muon is none of Apex's: leave --use-apex out")
