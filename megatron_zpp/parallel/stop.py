"""Signals that ask a run to save and stop, and how its ranks agree on that."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """Whether a signal asked this rank to stop. Before ``catch``, nothing does.

    A signal reaches one rank, or each at another moment. So no rank acts on its own: they agree at points that all of
    them pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.are_caught = False
        self.is_asked = False

    def catch(self) -> None:
        """From now on signals are only remembered. Before, they end the process."""
        if self.are_caught:
            return
        self.are_caught = True
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)

    def agree(self) -> bool:
        """Whether any rank was asked. Collective, and free where no rank catches signals."""
        if not self.are_caught:
            return False
        asked = torch.tensor(float(self.is_asked), device=self.device)
        dist.all_reduce(asked)
        return asked.item() > 0

    def _remember(self, number: int, frame: object) -> None:
        self.is_asked = True


def end_at_once_on_ctrl_c() -> None:
    """As SIGTERM does: Python's own handler would wait until a collective returns, and then print a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
