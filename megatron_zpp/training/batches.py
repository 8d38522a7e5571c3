"""The micro-batches that this rank reads, from where the run's counters stand."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_zpp.data.loader import Batch, build_loader
from megatron_zpp.training.run import Run


class Streams:
    """Those of training, none where the run does not train, and of validation; None where the run has no such data."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.seek()

    def seek(self) -> None:
        """Go on from where the counters stand; for when they have jumped."""
        counters = self._run.counters
        self.train = batches_of(self._run, "train", counters.consumed_train_samples) or iter(())
        self.valid = batches_of(self._run, "valid", counters.consumed_valid_samples)


def batches_of(run: Run, split: str, consumed_samples: int) -> Iterator[Batch] | None:
    """This rank's micro-batches of a split from ``consumed_samples`` on; None if the run has no such data."""
    dataset, mesh = getattr(run.datasets, split), run.mesh
    if dataset is None:
        return None
    return build_loader(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=run.settings.training.micro_batch_size,
        dp_rank=None if mesh.emulated_ranks > 1 else mesh.dp_rank if split == "train" else mesh.dp_rank_of_job,
        dp_size=mesh.dp_size if split == "train" else mesh.dp_size_of_job,
        num_workers=run.settings.data.num_workers,
        device=run.device,
        dataloader_type=run.settings.data.dataloader_type,
        data_sharding=run.settings.data.data_sharding,
    )
