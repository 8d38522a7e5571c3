"""How an island that is a job of its own (--islands-may-leave) joins the others, keeps up with them, and leaves.

What it reads, and where its schedule stands, follows from the steps that the islands have in common. Where islands
cannot leave, nothing here does anything.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron_zpp.parallel.distributed import errors_on_all_ranks, print_once
from megatron_zpp.training.loss import mean_loss
from megatron_zpp.training.run import Run


def join(run: Run) -> None:
    """Wait for the others, and stand where they do, behind the evaluation that may be due there."""
    islands, counters = run.leaving, run.counters
    if islands is None:
        return
    read = counters.consumed_train_samples
    _stand_at(run, counters.iteration)
    with errors_on_all_ranks():
        if counters.consumed_train_samples != read:
            raise ValueError(
                f"the checkpoint's run read {read} samples in {counters.iteration} steps, where these batches make "
                f"{counters.consumed_train_samples}. Islands that may leave tell by their steps alone what to read: "
                "give the batch size that the run had from its first step, or --finetune"
            )
    print_once(f"{_name_of(run)} waits for the others")
    islands.join()
    _stand_at(run, islands.steps)
    print_once(f"{_name_of(run)} trains from iteration {islands.steps} on; {islands.num_islands} are there")


def keep_up(run: Run) -> bool:
    """Whether the step's agreement took this island, which had fallen behind, to where the others are.

    If so the counters stand there now: behind their step, and before the evaluation that may be due.
    """
    islands, iteration = run.leaving, run.counters.iteration
    if islands is None or islands.steps == iteration:
        return False
    _stand_at(run, islands.steps, is_evaluated=False)
    print_once(
        f"note: {_name_of(run)} was behind with its step {iteration}, and goes on with the others from iteration "
        f"{islands.steps}"
    )
    return True


def report_agreement(run: Run) -> None:
    """Where the step ended in an agreement: the loss over all islands since the last one."""
    islands, counters = run.leaving, run.counters
    if islands is None or islands.agreed_at != counters.iteration:
        return
    assert islands.told is not None
    loss_sum, num_tokens = islands.told.sum(dim=0).tolist()
    loss, name = mean_loss(loss_sum, num_tokens), f"{run.loss.name} of all islands"
    run.loss_since_agreement.loss_sum = run.loss_since_agreement.num_tokens = 0.0
    if dist.get_rank() == dist.get_world_size() - 1:
        print(
            f" islands agreed at iteration {counters.iteration} | islands there: {islands.num_islands} | "
            f"{name}: {loss:.6E} | ",
            flush=True,
        )
    run.writers.write({name: loss}, counters.iteration, counters.consumed_train_samples)


def leave_others(run: Run) -> None:
    """Tell the others not to wait for this island; it will not agree with them again."""
    if run.leaving is not None:
        run.leaving.leave()


def _stand_at(run: Run, steps: int, is_evaluated: bool = True) -> None:
    """Have the counters as they are behind so many steps of whichever islands took them."""
    counters, interval = run.counters, run.settings.training.eval_interval
    counters.iteration = counters.consumed_train_samples = counters.scheduled_samples = counters.cut_tokens = 0
    for _ in range(steps):
        run.count_step()
    evaluated = min(steps if is_evaluated else steps - 1, run.train_iters - 1)
    counters.consumed_valid_samples = (evaluated // interval if interval else 0) * run.samples_of_evaluation
    for zeropp in run.zeropps:
        zeropp.set_optimizer_steps(steps - counters.skipped_iterations)


def _name_of(run: Run) -> str:
    return f"island {run.mesh.job} of {run.mesh.num_jobs}"
