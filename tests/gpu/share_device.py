"""Let ranks that have met already share one device, through the staging backend."""

import torch
import torch.distributed as dist

from megatron_zpp.parallel import staged_backend


def restart_group(device: torch.device, store: str, backend: str = staged_backend.NAME) -> None:
    """Leave the default process group for one of the same ranks that all use ``device``. store: a file's name."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that leaves early would take the others' store along
    dist.destroy_process_group()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # or DeviceMesh chooses card LOCAL_RANK, which only rank 0 has
    staged_backend.register()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
