"""At which steps the fragments of a model travel between islands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

START, TURN, FINISH = "start", "turn", "finish"


@dataclass(frozen=True)
class Timetable:
    """Fragment f starts at every ``interval``-th step, f/F of an interval before the others' turn comes round again.

    It arrives ``delay`` steps later. Halfway, where the first hop must be over, it turns from the first to the second.
    """

    interval: int  # H
    fragments: int  # F
    delay: int  # below H, so that a fragment is on its way once

    def due(self, step: int) -> Iterator[tuple[int, str]]:
        """What to do behind this step, counted from 1: fragments, and what with each; alike on all ranks."""
        for fragment in range(self.fragments):
            for action, after in ((START, 0), (TURN, (self.delay + 1) // 2), (FINISH, self.delay)):
                started = step - after
                if started > 0 and (started - fragment * self.interval // self.fragments) % self.interval == 0:
                    yield fragment, action


def divide(parameters: Mapping[str, nn.Parameter], fragments: int) -> list[dict[str, nn.Parameter]]:
    """The parameters of each fragment, by name: layers go round in their order, all else is in the first.

    A layer is what the first number in a name says: "layers.5" of "layers.5.mlp.weight". Raises ValueError for a
    fragment without any.
    """
    layers: dict[str, int] = {}
    divided: list[dict[str, nn.Parameter]] = [{} for _ in range(fragments)]
    for name, parameter in parameters.items():
        layer = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
        number = layers.setdefault(layer[0], len(layers)) if layer is not None else 0
        divided[number % fragments][name] = parameter
    if not all(divided):
        raise ValueError(f"{fragments} fragments are more than the {len(layers)} layers of a rank: ask for fewer")
    return divided
