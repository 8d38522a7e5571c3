"""What real and emulated islands have in common: all that a training loop has to know of either."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from megatron_zpp.zeropp import Traffic

from .config import IslandConfig


class IslandsInterface(Protocol):
    """The agreements of this process's islands with all others: Islands, EmulatedIslands, LeavingIslands."""

    config: IslandConfig
    num_islands: int
    may_leave: bool  # each is a job of its own
    steps: int  # of the islands' optimizers so far, skipped ones included
    has_replaced: bool  # the model's parameters, behind the last step
    traffic: Traffic  # what the ranks of this process have sent to other islands

    def describe(self) -> str:
        """One line: how many islands there are, and how they agree."""

    def begin_anew(self) -> None:
        """Take the parameters of the first island as agreed, and have all islands begin with them; collective.

        For weights that were loaded after ``apply_islands``. What is on its way is dropped.
        """

    def count_step(self) -> None:
        """Count a step of the optimizer, and agree if it is due; collective where it is.

        The hook of the optimizer calls it, if one was given. Call it yourself for a step that no optimizer takes (an
        overflow): islands agree at the same steps, skipped ones included.
        """

    def conclude(self) -> None:
        """Agree on all that was trained, when training ends; collective.

        What is on its way arrives. What was trained since an agreement began is agreed on as the islands' mean, without
        the outer optimizer. Islands that may leave agree at multiples of the interval alone: there it does nothing.
        """

    def not_counting(self) -> AbstractContextManager[None]:
        """Count no step of the optimizers in here.

        To load their states in: torch's ``set_optimizer_state_dict`` and ``get_optimizer_state_dict`` have an optimizer
        without state make a step of zeros.
        """

    def agreed_parameters(self) -> AbstractContextManager[None]:
        """Have the agreed parameters in the model in here, on all ranks, and the islands' own again behind."""

    def agreed_state(self) -> dict[str, Tensor]:
        """What all islands have alike, by "agreed.NAME" and "momentum.NAME": tensors of the kind of the parameters.

        They share the memory of what is in use, so that a loader may fill them in place.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """What else the ranks must keep for an exact continuation: steps, LoCo's errors, what is on its way.

        Collective. Keys begin with "RANK.", so that those of all ranks make one state.
        """

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave on the same ranks, when ``agreed_state`` and the models are filled.

        Of an empty state steps, errors and what is on its way start again.
        """


class NoIslands:
    """The islands of an ordinary run: nothing is agreed on, and nothing sent."""

    num_islands, may_leave, steps, has_replaced = 1, False, 0, False

    def __init__(self) -> None:
        self.config, self.traffic = IslandConfig(), Traffic()

    def _do_nothing(self, *_: object) -> None:
        """There is one island."""

    begin_anew = count_step = conclude = load_state_dict = _do_nothing

    def describe(self) -> str:
        return "no islands"

    def not_counting(self) -> AbstractContextManager[None]:
        return nullcontext()

    agreed_parameters = not_counting

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    agreed_state = state_dict


class LeavingInterface(IslandsInterface, Protocol):
    """LeavingIslands, for who does not import it."""

    agreed_at: int  # steps, of which the agreed parameters are

    @property
    def gathered_stats(self) -> Tensor | None:
        """The stats of each island at the last agreement, fp64 [K, n]; zeros for one that was behind."""

    def join(self) -> None:
        """Wait for the others, and have the agreed parameters in the model and ``steps`` as they have."""

    def leave(self) -> None:
        """Be gone, for the others; when this island has trained enough."""
