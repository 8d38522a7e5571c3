"""What an island that is a job of its own (--islands-may-leave) needs: a secret, folders, the other islands.

DIR/island_1   what island 1 writes where all say DIR: checkpoints, TensorBoard's events, traces
"""

from __future__ import annotations

import dataclasses
import json
import os

import torch.distributed as dist
from torch import nn

from megatron_zpp.checkpoint import CheckpointError, find_checkpoint
from megatron_zpp.data.build import Datasets
from megatron_zpp.islands import LeavingInterface
from megatron_zpp.islands.elastic.channel import parse_address, read_secret
from megatron_zpp.islands.elastic.leaving import apply_leaving_islands
from megatron_zpp.islands.elastic.membership import Membership
from megatron_zpp.parallel.distributed import errors_on_all_ranks, print_once
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.loss import LOSS_NAME, LossSoFar, mean_loss
from megatron_zpp.training.run import Run
from megatron_zpp.zeropp import ZeroPPInterface


def prepare_island(settings: ResolvedSettings) -> ResolvedSettings:
    """The settings with the island's own folders; early, an error where it could not join the others. Collective.

    It loads what it saved; as long as there is nothing, what the folder of --load itself holds, such as the checkpoint
    of a run without islands.
    """
    with errors_on_all_ranks():
        assert settings.distributed.island_lighthouse and settings.distributed.island_secret_file  # by check_islands
        parse_address(settings.distributed.island_lighthouse)
        read_secret(settings.distributed.island_secret_file)
    logging, checkpoint = settings.logging, settings.checkpoint
    load = [checkpoint.load]
    with errors_on_all_ranks():
        if dist.get_rank() == 0 and checkpoint.load is not None:
            own = os.path.join(checkpoint.load, _folder_name(settings))
            load = [own if _was_saved_in(own) else checkpoint.load]
    dist.broadcast_object_list(load)
    return dataclasses.replace(
        settings,
        checkpoint=dataclasses.replace(checkpoint, load=load[0], save=_own_folder(settings, checkpoint.save)),
        logging=dataclasses.replace(
            logging,
            tensorboard_dir=_own_folder(settings, logging.tensorboard_dir),
            wandb_save_dir=_own_folder(settings, logging.wandb_save_dir),
            profile_dir=_own_folder(settings, logging.profile_dir),
        ),
    )


def _own_folder(settings: ResolvedSettings, folder: str | None) -> str | None:
    return None if folder is None else os.path.join(folder, _folder_name(settings))


def _folder_name(settings: ResolvedSettings) -> str:
    return f"island_{settings.distributed.island_number}"


def _was_saved_in(folder: str) -> bool:
    """Whether a checkpoint was saved there, good or not."""
    try:
        return find_checkpoint(folder) is not None
    except CheckpointError:  # which loading says again, unless --load-latest-good or --ckpt-step finds another one
        return True


def build_leaving_islands(
    model: nn.Module,
    zeropp: ZeroPPInterface | None,
    settings: ResolvedSettings,
    mesh: Mesh,
    datasets: Datasets,
    loss_since_agreement: LossSoFar,
) -> LeavingInterface:
    """The agreements with islands that read the same data in the same batches, and step by the same settings.

    Others are refused when they join.
    """
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
    batches = (ranks.islands, mesh.dp_size, training.micro_batch_size, training.global_batch_size)
    ramps = (training.rampup_batch_size, training.curriculum_min_length, training.curriculum_iters)
    lengths = (training.train_iters, training.train_samples, training.eval_interval, training.eval_iters)
    orders = [split.order for split in datasets if split is not None]
    samplers = (settings.data.dataloader_type, settings.data.data_sharding)
    steps = [dataclasses.asdict(group) for group in (settings.optimizer, settings.schedule)]
    alike = json.dumps([batches, ramps, lengths, orders, samplers, steps], sort_keys=True)
    return apply_leaving_islands(
        model, None, settings.island, membership, zeropp, alike, loss_since_agreement.local_stats
    )


def join(run: Run) -> None:
    """Wait for the others and go to their step, after the evaluation that may be due there. Nothing without islands."""
    islands, counters = run.leaving, run.counters
    if islands is None:
        return
    read = counters.consumed_train_samples
    _stand_at(run, counters.iteration)
    with errors_on_all_ranks():
        if counters.consumed_train_samples != read:
            raise ValueError(
                f"the checkpoint's run read {read} samples in {counters.iteration} steps, where these batches make "
                f"{counters.consumed_train_samples}. Islands that may leave know by their steps alone what to read: "
                "give the batch size that the run had from its first step, or --finetune"
            )
    print_once(f"{_name_of(run)} waits for the others")
    islands.join()
    _stand_at(run, islands.steps)
    print_once(f"{_name_of(run)} trains from iteration {islands.steps} on; {islands.num_islands} are there")


def catch_up(run: Run) -> bool:
    """Whether the step's agreement took this island, which had fallen behind, to where the others are.

    If so, the counters are there now: after their step, before the evaluation that may be due.
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
    assert islands.gathered_stats is not None
    loss_sum, num_tokens = islands.gathered_stats.sum(dim=0).tolist()
    loss, name = mean_loss(loss_sum, num_tokens), f"{LOSS_NAME} of all islands"
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
    """Set the counters to what they are after ``steps`` steps, whichever islands took them."""
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
