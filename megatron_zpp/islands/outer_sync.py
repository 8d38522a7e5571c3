"""DiLoCo's outer loop: count inner steps, and synchronize each fragment of the model when its outer step is due.

A trainer's checkpoint has all islands:

model.NAME                     the outer parameters, and what is not trained
optimizer.NAME.KEY             the first island's optimizer, so that a run without islands finds it
island1.model.NAME             an island's own parameters; the first island is island0
island1.optimizer.NAME.KEY     its optimizer
islands.momentum.NAME          the outer optimizer's momentum
islands.RANK.KEY               ``OuterSync.state_dict``
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_zpp.zeropp import Traffic, ZeroPP
from megatron_zpp.zeropp.fsdp.shared import below
from megatron_zpp.zeropp.fsdp.topology import gather_objects, process_rank

from .config import IslandConfig
from .fragment import Fragment, split_into_fragments
from .outer_state import local_data, trainable_parameters

# Settings on which saved errors and transfers do not depend.
NOT_OF_A_WIRE = ("outer_optimizer", "outer_lr", "outer_momentum", "loco_beta", "merge_alpha", "offload")


class OuterSync:
    """This rank's island, and how it synchronizes with all others. By default there are none, and nothing happens.

    Each of F fragments starts once in an interval of H steps, one after the other, and arrives ``sync_delay`` steps
    later. Its second hop starts halfway, when the first must be over.
    """

    steps = 0  # inner optimizer steps, skipped ones included
    resumes = _resumes_wires = False  # whether the last ``plan_resume`` found each island's own state
    _is_counting = True
    _left_out_at: int | None = None  # the step at which this island last contributed nothing

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        config: IslandConfig | None = None,
        group: dist.ProcessGroup | None = None,
        zeropp: ZeroPP | None = None,
    ) -> None:
        """Start all islands from the first one's parameters; a group of one rank has none. See ``apply_islands``."""
        if group is None or group.size() == 1:
            model = optimizer = zeropp = group = None
        self.num_islands, self.number = (1, 0) if group is None else (group.size(), group.rank())
        self.config, self._group = config or IslandConfig(), group
        self.traffic = Traffic() if zeropp is None else zeropp.traffic
        self._model, self._optimizer, self._zeropp = model, optimizer, zeropp
        self._fragments = [] if model is None or group is None else self._divide(model, group)
        self.restart()

    def _divide(self, model: nn.Module, group: dist.ProcessGroup) -> list[Fragment]:
        """Compare what ranks of the same place hold and want, and divide the model into fragments."""
        parameters = trainable_parameters(model)
        parts = [(name, tuple(local_data(parameter).shape), parameter.dtype) for name, parameter in parameters.items()]
        all_parts, configs = zip(*gather_objects((parts, self.config), group), strict=True)
        if any(parts != all_parts[0] for parts in all_parts):
            raise ValueError("ranks of the same place in their islands hold other parameters: shard all models equally")
        if any(config != configs[0] for config in configs):
            raise ValueError(f"islands have different settings, such as {self.config}: give all the same IslandConfig")
        divided = split_into_fragments(parameters, self.config.fragments)
        return [Fragment(part, self.config, group, self.traffic, parameters) for part in divided]

    def describe(self) -> str | None:
        """Return one line: how many islands there are, and how they synchronize; None without any."""
        return f"{self.num_islands} islands {self.config.describe()}" if self.num_islands > 1 else None

    @torch.no_grad()
    def restart(self) -> None:
        """Start all islands again from the first one's parameters, after you loaded weights. Collective."""
        for fragment in self._fragments:
            fragment.restart()
        self.load_state_dict({})

    def count_by_hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Call ``after_step`` after each step of the optimizer, but for what ``not_counting`` encloses."""
        optimizer.register_step_post_hook(lambda *_: self.after_step() if self._is_counting else None)

    @torch.no_grad()
    def after_step(self, step: int | None = None, is_last: bool = False) -> None:
        """Count an inner step, and synchronize the fragments that are due. Collective over islands if any is.

        An optimizer's hook calls it. Call it yourself for a step that is skipped (an overflow): all islands synchronize
        at the same steps. step: its number, where the loop counts. is_last: ``conclude``, too.
        """
        self.steps = self.steps + 1 if step is None else step
        is_replaced, delay = False, self.config.sync_delay
        for number, fragment in enumerate(self._fragments):
            if self._starts(number, self.steps):
                is_replaced |= self._start(fragment)
            if self._starts(number, self.steps - (delay + 1) // 2) and fragment.hops.is_in_flight:
                fragment.start_second_hop()
            if self._starts(number, self.steps - delay) and fragment.hops.is_in_flight:
                fragment.finish()
                is_replaced = True
        if is_replaced:
            self._parameters_replaced()
        if is_last:
            self.conclude()

    @torch.no_grad()
    def conclude(self) -> None:
        """Synchronize all steps so far, at the end of training. Collective.

        Fragments in flight arrive. Later steps enter as the islands' mean, without the outer optimizer.
        """
        for number, fragment in enumerate(self._fragments):
            steps_since_start = (self.steps - self._offset(number)) % self.config.sync_interval
            if fragment.hops.is_in_flight:
                if steps_since_start < (self.config.sync_delay + 1) // 2:
                    fragment.start_second_hop()
                fragment.finish()
            if steps_since_start > 0:
                self._start(fragment)
                fragment.start_second_hop()
                fragment.finish(on_mean=True)  # momentum would move as far as for a whole interval: E11, 0.6 % higher
        self._parameters_replaced()

    def _start(self, fragment: Fragment) -> bool:
        """Start a fragment; return whether parameters were replaced.

        An island that must not contribute begins again from the outer parameters. All of its parameters do, as one that
        is left with NaN would soon spoil the rest, and so do its optimizer and LoCo's errors.
        """
        # Another fragment of the same step finds this island whole again, but it has trained nothing since.
        if fragment.start(self.steps, is_left_out=self._left_out_at == self.steps):
            return False
        self._left_out_at = self.steps
        for each in self._fragments:
            each.outer.copy_to(each.parameters)
        if self._optimizer is not None:
            self._optimizer.state.clear()
        if self._zeropp is not None:
            self._zeropp.rescale_errors(0.0)
        return True

    def _starts(self, fragment: int, step: int) -> bool:
        return step > 0 and (step - self._offset(fragment)) % self.config.sync_interval == 0

    def _offset(self, fragment: int) -> int:
        return fragment * self.config.sync_interval // self.config.fragments

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Count no optimizer steps in this block: loading and reading an optimizer's state by torch steps a new one."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the outer parameters into the model for this block, then the island's own again. Call it on all ranks.

        ``traffic`` counts nothing meanwhile: no later step uses what is gathered here.
        """
        parameters = [parameter for fragment in self._fragments for parameter in fragment.parameters.values()]
        own = [local_data(parameter).clone() for parameter in parameters]
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.outer.copy_to(fragment.parameters)
        self._parameters_replaced()
        try:
            with self.traffic.paused():
                yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, own, strict=True):
                    local_data(parameter).copy_(value)
            self._parameters_replaced()

    def _parameters_replaced(self) -> None:
        """Drop copies of the old parameters: ZeRO++'s, and FSDP2 units that an evaluation left gathered."""
        if self._zeropp is not None:
            self._zeropp.invalidate()
        for module in self._model.modules() if self._model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what else an exact resume needs, as "RANK.KEY": steps, LoCo's errors, hops in flight."""
        state, rank = {}, process_rank()
        for number, fragment in enumerate(self._fragments):
            state[f"{rank}.steps"] = torch.tensor(self.steps)
            state |= {f"{rank}.fragment{number}.{key}": value for key, value in fragment.hops.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what ``state_dict`` returned on the same ranks, after models and outer parameters; {} restarts all."""
        rank = process_rank()
        self.steps = int(state.get(f"{rank}.steps", 0))
        for number, fragment in enumerate(self._fragments):
            fragment.hops.load_state_dict(below(state, f"{rank}.fragment{number}."))
        self._parameters_replaced()

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each island in order; its ranks must have the same. Collective."""
        return [value] if self._group is None else gather_objects(value, self._group)

    def end_step(self, step: int, ends: bool, *, is_last: bool, meets: bool) -> bool:
        """Call ``after_step``; return whether to end training: whether any island ``ends``, where all of them meet.

        Without islands this only returns ``ends``. Collective where they meet.
        """
        self.after_step(step, is_last)
        return ends if self._group is None else meets and any(self.gather(ends))

    def checkpoint_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn a run's tensors, "model.NAME" and so on, into this rank's part of a checkpoint of all islands."""
        if self._group is None:
            return dict(state)
        shared = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        wires = {f"islands.{key}": value for key, value in self.state_dict().items()}
        return self._named_as_own(state) | shared | self._named_outer_state() | wires

    def plan_resume(self, meta: Mapping[str, Any], is_same_layout: bool, trains: bool) -> tuple[list[str], int]:
        """Decide what to load from a checkpoint; return notes on what starts over, and the island to go on from.

        meta: "layout" has the number of islands that saved, "settings" their flags. trains: with its optimizer.
        """
        saved, notes = meta.get("layout", {}).get("island", 1), list[str]()
        self.resumes = self._group is not None and saved == self.num_islands and trains
        if self._group is not None and not self.resumes and trains:
            notes.append(f"islands start over from the checkpoint's parameters: {saved} islands saved")
        if saved > 1 and not self.resumes and trains:
            notes.append("the optimizer's state comes from the first island that saved")
        # Errors and transfers belong to ranks and to a wire format.
        settings = {name: value for name, value in dataclasses.asdict(self.config).items() if name not in NOT_OF_A_WIRE}
        is_same_wire = all(meta["settings"].get(f"island_{name}", value) == value for name, value in settings.items())
        self._resumes_wires = self.resumes and is_same_layout and is_same_wire
        if self.resumes and not self._resumes_wires:
            notes.append("LoCo's errors and transfers between islands start over: saved with other ranks or settings")
        return notes, self.number if self.resumes else 0

    def begin_load(
        self, state: Mapping[str, Tensor], saved: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Return the tensors to fill from a checkpoint, and what to call when they are filled. The call is collective.

        state: what a run fills, here named as this island's, and with others. saved: sizes and dtypes by name.
        """
        if not self.resumes:
            return dict(state), self.restart
        state = self._named_as_own(state)
        for name, tensor in self._named_outer_state().items():
            if name in saved or name.startswith("model."):  # momentum may not have existed yet
                state[name] = tensor
        wires = [name for name in saved if name.startswith(f"islands.{process_rank()}.") and self._resumes_wires]
        filled = state | {name: torch.empty(saved[name].size, dtype=saved[name].dtype) for name in wires}
        return filled, lambda: self.load_state_dict(below(filled, "islands."))

    def _named_as_own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        prefixes = ("model.", "optimizer.") if self.number > 0 else ("model.",)
        return {f"island{self.number}.{k}" if k.startswith(prefixes) else k: tensor for k, tensor in state.items()}

    def _named_outer_state(self) -> dict[str, Tensor]:
        """Return the outer parameters and the outer momentum: the tensors in use, to fill in place."""
        states = [item for fragment in self._fragments for item in fragment.outer.state_dict().items()]
        return {f"islands.{key}".replace("islands.agreed.", "model.", 1): tensor for key, tensor in states}
