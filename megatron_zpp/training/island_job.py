"""What an island that is a job of its own (--islands-may-leave) needs before it trains: a secret, folders, the others.

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
from megatron_zpp.islands.channel import parse_address, read_secret
from megatron_zpp.islands.leaving import apply_leaving_islands
from megatron_zpp.islands.membership import Membership
from megatron_zpp.parallel.distributed import errors_on_all_ranks
from megatron_zpp.parallel.mesh import Mesh
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.loss import LossSoFar
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
            own = os.path.join(checkpoint.load, _name_of(settings))
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
    return None if folder is None else os.path.join(folder, _name_of(settings))


def _name_of(settings: ResolvedSettings) -> str:
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
    return apply_leaving_islands(model, None, settings.island, membership, zeropp, alike, loss_since_agreement.tell)
