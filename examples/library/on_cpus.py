"""Lets accelerate and torchtitan train on CPUs: torchrun --nproc-per-node 4 examples/library/on_cpus.py PROGRAM ...

To try the other programs of this folder, and to test them, where there is no GPU. Both packages shard only over
accelerators; torch itself shards over CPUs, too.
"""

import contextlib
import os
import runpy
import sys
import types

import torch
import torch.distributed as dist


def let_accelerate_shard_over_cpus() -> None:
    from accelerate import DistributedType, PartialState

    initialize = PartialState.__init__

    def as_an_accelerator(self: PartialState, *args: object, **kwargs: object) -> None:
        initialize(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU  # any of those that FSDP may follow

    PartialState.__init__ = as_an_accelerator  # type: ignore[method-assign]


class CPUs:
    """What torchtitan asks of ``torch.cuda``, as far as it goes without a GPU."""

    set_device = staticmethod(torch.cpu.set_device)
    device_count = staticmethod(torch.cpu.device_count)
    synchronize = staticmethod(torch.cpu.synchronize)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: torch.device) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: torch.device) -> dict[str, int]:
        return {}

    @staticmethod
    def reset_peak_memory_stats() -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def let_torchtitan_train_on_cpus() -> None:
    from torchtitan.tools import utils

    # Triton kernels for experts, which are imported for every model; torch's CPU build comes without triton.
    kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules[kernels.__name__] = kernels
    if not hasattr(dist, "set_timeout"):  # in torch 2.13
        dist.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]
    # Before torchtitan's other modules import them from there.
    utils.device_type, utils.device_module = "cpu", CPUs


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    let_accelerate_shard_over_cpus()
    with contextlib.suppress(ImportError):  # not installed
        let_torchtitan_train_on_cpus()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
