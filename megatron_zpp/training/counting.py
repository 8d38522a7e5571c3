"""How far a run is, as its counters say."""

from __future__ import annotations

from megatron_zpp.training.run import Run


def count_step(run: Run, skipped: bool = False) -> int:
    """Move the counters by an optimizer step, and return the samples that it took."""
    # Islands do not know of each other's skipped steps: their schedules count them, and stay alike.
    is_scheduled = run.has_islands or not skipped
    counters = run.counters
    num_samples = run.batches.global_batch_size(counters.consumed_train_samples)
    counters.iteration += 1
    counters.consumed_train_samples += num_samples
    if is_scheduled:
        assert run.settings.training.seq_length
        cut = run.settings.training.seq_length - run.sample_length(counters.iteration)
        counters.scheduled_samples += num_samples
        counters.cut_tokens += num_samples * cut
    return num_samples
