"""An elastic island in the trainer (--islands-may-leave): its folders, joining the others, and what it logs.

DIR/island_1   what island 1 writes if all are given DIR: checkpoints, TensorBoard's events, traces
"""

import dataclasses
import json
import os
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_zpp.checkpoint import CheckpointError, find_checkpoint
from megatron_zpp.checkpoint.folder import complete_checkpoints
from megatron_zpp.checkpoint.on_resume import must_be_alike
from megatron_zpp.checkpoint.resume import goes_on_in
from megatron_zpp.data.build import Datasets
from megatron_zpp.islands.elastic import ElasticIslands, Membership
from megatron_zpp.islands.elastic.channel import parse_address, read_secret
from megatron_zpp.parallel.distributed import errors_on_all_ranks, print_once
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.loss import LossSoFar, mean_loss
from megatron_zpp.training.run import Run
from megatron_zpp.zeropp import ZeroPP


def prepare_island(settings: ResolvedSettings) -> ResolvedSettings:
    """Return settings with the island's own folders. Collective. Raises an error early if it could not join the others.

    It loads what it saved. Before its first save it loads what the folder of --load itself holds, such as the
    checkpoint of a run without islands, if that is not the folder of --save and empty.
    """

    def with_own_folders(group: object, *names: str) -> dict[str, Any]:
        folders = {name: getattr(group, name) for name in names}
        return {name: folder and os.path.join(folder, own) for name, folder in folders.items()}

    logging, checkpoint, own = settings.logging, settings.checkpoint, f"island_{settings.distributed.island_number}"
    load = [checkpoint.load]
    with errors_on_all_ranks():
        # check_islands requires both.
        assert settings.distributed.island_lighthouse and settings.distributed.island_secret_file
        parse_address(settings.distributed.island_lighthouse)
        read_secret(settings.distributed.island_secret_file)
        if dist.get_rank() == 0 and checkpoint.load is not None:
            try:
                has_saved = find_checkpoint(os.path.join(checkpoint.load, own)) is not None
            except CheckpointError:  # loading reports it, unless --load-latest-good or --ckpt-step finds another one
                has_saved = True
            starts = goes_on_in(checkpoint) and not complete_checkpoints(checkpoint.load)
            if has_saved or starts:
                load = [os.path.join(checkpoint.load, own)]
    dist.broadcast_object_list(load)
    log_folders = with_own_folders(logging, "tensorboard_dir", "wandb_save_dir", "profile_dir")
    return dataclasses.replace(
        settings,
        checkpoint=dataclasses.replace(checkpoint, load=load[0], **with_own_folders(checkpoint, "save")),
        logging=dataclasses.replace(logging, **log_folders),
    )


def build_elastic_islands(
    model: nn.Module,
    zeropp: ZeroPP | None,
    settings: ResolvedSettings,
    mesh: Mesh,
    datasets: Datasets,
    loss_since_sync: LossSoFar,
) -> ElasticIslands:
    """Synchronize with islands that have the same data, batches and settings; others are refused when they join."""
    ranks, training = settings.distributed, settings.training
    assert ranks.island_number is not None and ranks.island_lighthouse and ranks.island_secret_file  # by check_islands
    membership = Membership(
        ranks.island_number,
        ranks.islands,
        ranks.island_lighthouse,
        ranks.island_secret_file,
        ranks.island_bind,
        ranks.island_timeout_seconds,
        ranks.island_patience_seconds,
    )
    batches = (mesh.dp_size, training.micro_batch_size)
    evaluations = (training.eval_interval, training.eval_iters, training.eval_global_batch_size)
    orders = [split.order for split in datasets if split is not None]
    must_match = json.dumps([must_be_alike(settings), batches, evaluations, orders], sort_keys=True)
    return ElasticIslands(model, None, settings.island, membership, zeropp, must_match, loss_since_sync.local_stats)


def join(run: Run) -> None:
    """Wait for the other islands, if this one is elastic, and go to their step, after its evaluation."""
    islands, counters, name = run.elastic, run.counters, f"island {run.mesh.job} of {run.mesh.num_jobs}"
    if islands is None:
        return
    num_read = counters.consumed_train_samples
    _set_counters(run, counters.iteration)
    with errors_on_all_ranks():
        if counters.consumed_train_samples != num_read:
            before = f"the checkpoint's run read {num_read} samples in {counters.iteration} steps"
            now = f"where these batches make {counters.consumed_train_samples}"
            raise ValueError(f"{before}, {now}: give the batch size that it had from its first step, or --finetune")
    print_once(f"{name} waits for the others")
    islands.join()
    _set_counters(run, islands.steps)
    print_once(f"{name} trains from iteration {islands.steps} on; {islands.num_islands} are there")


def catch_up(run: Run) -> bool:
    """Set the counters to the others' step, before its evaluation, if this island was behind; return whether it was."""
    islands, iteration = run.elastic, run.counters.iteration
    if islands is None or islands.steps == iteration:
        return False
    _set_counters(run, islands.steps, is_evaluated=False)
    print_once(
        f"note: island {run.mesh.job} of {run.mesh.num_jobs} was behind with its step {iteration}, and goes on with "
        f"the others from iteration {islands.steps}"
    )
    return True


def report_sync(run: Run) -> None:
    """Log the loss over all islands since the last synchronization, if the last step ended in one."""
    islands, counters = run.elastic, run.counters
    if islands is None or islands.last_sync_step != counters.iteration:
        return
    assert islands.gathered_stats is not None
    loss_sum, num_tokens = islands.gathered_stats.sum(dim=0).tolist()
    loss, name = mean_loss(loss_sum, num_tokens), f"{run.loss.name} of all islands"
    run.loss_since_sync.loss_sum = run.loss_since_sync.num_tokens = 0.0
    if dist.get_rank() == dist.get_world_size() - 1:
        print(
            f" islands synchronized at iteration {counters.iteration} | islands there: {islands.num_islands} | "
            f"{name}: {loss:.6E} | ",
            flush=True,
        )
    run.writers.write({name: loss}, counters.iteration, counters.consumed_train_samples)


def _set_counters(run: Run, steps: int, is_evaluated: bool = True) -> None:
    """Set the counters to what they are after ``steps`` steps of any islands, and after or before its evaluation."""
    counters, interval = run.counters, run.settings.training.eval_interval
    counters.iteration = counters.consumed_train_samples = counters.scheduled_samples = counters.cut_tokens = 0
    for _ in range(steps):
        run.count_step()
    evaluated = min(steps if is_evaluated else steps - 1, run.train_iters - 1)
    counters.consumed_valid_samples = (evaluated // interval if interval else 0) * run.samples_of_evaluation
    for zeropp in run.zeropps:
        zeropp.set_optimizer_steps(steps - counters.skipped_iterations)
