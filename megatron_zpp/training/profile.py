"""``--profile``: record a few steps as traces for Perfetto, or as ranges for Nsight Systems."""

from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_zpp.metrics.lasting import Attempts
from megatron_zpp.parallel.distributed import print_once
from megatron_zpp.settings.resolved import ResolvedSettings
from megatron_zpp.training.trainer import Callback, Trainer


def check_profile(settings: ResolvedSettings) -> str | None:
    """Return the folder for profiles. Raises ValueError without one."""
    logging, save = settings.logging, settings.run_folder
    folder = logging.tensorboard_dir or (f"{save}/profile" if save else None)
    if logging.use_pytorch_profiler and folder is None:
        raise ValueError("--profile needs a place for its files: give --tensorboard-dir or --save")
    return folder


class StepProfile(Callback):
    """Profiles the steps and ranks that flags ask for, and names what is sent: "gather between nodes: layers.3"."""

    def __init__(self, trainer: Trainer) -> None:
        settings = trainer.settings.logging
        rank, on_gpu = dist.get_rank(), trainer.device.type == "cuda"
        self.settings, self.trainer = settings, trainer
        self.waits = trainer.zeropp.waits if trainer.zeropp is not None else None
        if settings.profile and not settings.use_pytorch_profiler and not on_gpu:
            print_once("note: --profile alone is for Nsight Systems and GPUs: add --use-pytorch-profiler for a trace")
        folder = check_profile(trainer.settings)
        of_rank = settings.profile and (not settings.profile_ranks or rank in settings.profile_ranks)
        self.is_due = of_rank and (settings.use_pytorch_profiler or on_gpu)
        self._recording = ExitStack()  # writes and ends the profile that is being taken
        if self.is_due and folder is not None:
            self.trace = Path(folder) / f"rank{rank:05d}.trace.json.gz"
            self.trace.parent.mkdir(parents=True, exist_ok=True)

    def before_step(self) -> None:
        """Begin before step S + 1, and end before step E + 1: evaluations and saves in between are recorded."""
        iteration = self.trainer.counters.iteration
        if self.is_due and iteration == self.settings.profile_step_start:
            self._begin()
        if iteration == self.settings.profile_step_end:
            self.on_end(None)

    def on_end(self, problem: str | None) -> None:
        """Write what was recorded, if a profile is being taken."""
        if self.is_due:
            Attempts(f"the profile in {getattr(self, 'trace', 'nsys')}", retries=False)(self._recording.close)

    def _begin(self) -> None:
        if self.waits is not None:
            self.waits.are_named = True
            self._recording.callback(setattr, self.waits, "are_named", False)
        if self.settings.use_pytorch_profiler:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            profiler = profile(activities=activities, record_shapes=True)
            self._recording.callback(lambda: profiler.export_chrome_trace(str(self.trace)))  # when it has stopped
            self._recording.enter_context(profiler)
        else:
            torch.cuda.profiler.start()  # for nsys --capture-range cudaProfilerApi
            self._recording.callback(torch.cuda.profiler.stop)
            self._recording.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
