"""Where the training loop is: what weights and gradients must know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class MicroBatch:
    """Where the training loop is, shared by all units."""

    is_last: bool = True
    accumulations: int = 0  # that have begun with a micro-batch that is not the last
    is_accumulating: bool = False
    optimizer_steps: int = 0  # so far, but those whose gradients were thrown away
    is_step_complete: bool = False  # all gradients of one more were reduced since the last forward pass

    def begin_forward_pass(self) -> None:
        """What was reduced before is a step by now, whatever optimizer took it, or was undone."""
        self.optimizer_steps += self.is_step_complete
        self.is_step_complete = False

    def undo_step(self) -> None:
        """The gradients since the last optimizer step are thrown away."""
        self.is_accumulating = self.is_step_complete = False

    def begin(self, is_last: bool) -> None:
        """Say whether the backward pass that comes, or runs, is the step's last."""
        if not is_last and (self.is_last or not self.is_accumulating):
            self.accumulations, self.is_accumulating = self.accumulations + 1, True
        self.is_last = is_last

    def reduced(self) -> None:
        """Gradients were reduced; those of the last micro-batch end the accumulation."""
        self.is_accumulating &= not self.is_last
        self.is_step_complete |= self.is_last

    def state_dict(self) -> dict[str, Tensor]:
        return {"optimizer_steps": torch.tensor(self.optimizer_steps + self.is_step_complete)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """State that was saved without a number of steps leaves it as it is."""
        if "optimizer_steps" in state:
            self.set_optimizer_steps(int(state["optimizer_steps"]))

    def set_optimizer_steps(self, steps: int) -> None:
        self.optimizer_steps, self.is_step_complete = steps, False
