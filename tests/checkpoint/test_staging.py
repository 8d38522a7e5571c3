"""What a save in the background copies to host memory: each tensor once, into memory that is kept for the next save."""

from unittest.mock import patch

from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor

from megatron_zpp.commands import estimate
from megatron_zpp.zeropp.api import local_part
from megatron_zpp.zeropp.recipes import RECIPES
from tests.ranks import run_ranks
from tests.training.small_run import flags, start, train_quietly

STATE = f"--bf16 --zeropp {[*RECIPES][-2]} --zeropp-ranks-per-node 2 --vocab-size 512 --num-layers 1"


def bytes_of_saves(argv):
    """Bytes of each save's tensors of this rank, of the storages of their copies, and of those that are new memory."""
    saves, storages = [], {}

    def saved(executor, staged, **options):
        of_save = {}
        for tensor in map(local_part, staged.values()):
            of_save[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        new = sum(storage.nbytes() for pointer, storage in of_save.items() if pointer not in storages)
        storages.update(of_save)  # kept, so that nothing else gets their addresses
        nbytes = sum(local_part(tensor).nbytes for tensor in staged.values())
        saves.append((nbytes, sum(storage.nbytes() for storage in of_save.values()), new))
        return execute(executor, staged, **options)

    run, _ = start(argv)
    execute = _ThreadBasedAsyncCheckpointExecutor.execute_save
    with patch.object(_ThreadBasedAsyncCheckpointExecutor, "execute_save", saved):
        train_quietly(run)
    return saves


def test_a_save_copies_what_is_estimated_once_into_the_memory_of_the_save_before(data, tmp_path):
    argv = flags(data, f"{STATE} --train-iters 4 --save-interval 2 --save {tmp_path}")
    cluster = ["--nodes", "2", "--ranks-per-node", "2", "--vocabulary", "257", "pretrain_gpt.py"]
    host = estimate.run(estimate.parse_arguments([*cluster, *argv])).needs.largest.host
    (planned,) = host.values()
    for first, second in run_ranks(4, bytes_of_saves, argv):
        nbytes, copied, new = first
        assert 0 < nbytes == copied == new  # no other rank's rows, and no padding
        assert second == (nbytes, nbytes, 0)
        # A random state, and some scalars of each parameter and unit.
        assert 0 <= nbytes - planned < 10_000
