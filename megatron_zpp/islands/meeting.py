"""Who of the islands is there, and what their ranks of the same place send each other: torchft's work.

A lighthouse, which outlives the islands, hears from each of them several times a second. Before an agreement it says
who takes part, a quorum; the ranks of the same place in these islands then have a gloo group of their own.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, BarrierOptions, BroadcastOptions

from .membership import Membership

try:
    from torchft import Manager

    from .meeting_group import MeetingGroup
except ImportError as error:
    raise ImportError(
        "islands that come and go need the package torchft: pip install torchft, or megatron_zpp's extra islands"
    ) from error

logger = logging.getLogger(__name__)
State = dict[str, Any]
T = TypeVar("T")
MAX_FAILURES = 10  # of an agreement, one after the other, before the island gives up


class BrokenOffError(Exception):
    """Another island is gone, or too slow: what was sent since the last quorum counts for nothing."""


class Meeting:
    """This rank, and those of its place in the islands that are there. Collective over the ranks of an island."""

    def __init__(
        self, membership: Membership, state_dict: Callable[[], State], load_state_dict: Callable[[State], None]
    ) -> None:
        """state_dict: what an island that comes gets from another one, which is handed to its ``load_state_dict``."""
        if not dist.is_initialized() or "MASTER_ADDR" not in os.environ:
            raise ValueError("an island that may leave is a job of its own: start it with torchrun")
        lighthouse = membership.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if lighthouse is None:
            raise ValueError("where is the lighthouse? Set lighthouse, or TORCHFT_LIGHTHOUSE, to http://host:port")
        self._membership = membership
        self._lighthouse = lighthouse
        timeout = timedelta(seconds=membership.timeout)
        self._group = MeetingGroup(timeout)
        self._history = bytes(32)  # of the agreements that led here, equal where these are
        self._compared = ""  # the group whose histories are known to be equal
        self._num_ahead = 0
        self._has_taken = False  # another island's state, since its own last agreement

        def given() -> State:
            return {"history": self._history, "state": state_dict()}

        def take(its: State) -> None:
            self._history, self._has_taken = its["history"], True
            load_state_dict(its["state"])

        def manage() -> Manager:
            return Manager(
                pg=self._group,
                state_dict=given,
                load_state_dict=take,
                min_replica_size=1,
                init_sync=False,  # it would take ranks' parts from different islands
                timeout=timeout,
                connect_timeout=timeout,
                quorum_timeout=timedelta(seconds=membership.patience),
                quorum_retries=math.ceil(membership.patience),  # one a second, of a lighthouse that does not answer
                lighthouse_addr=lighthouse,
                replica_id=f"island{membership.island:04d}",  # in whose order the ranks of a group are
            )

        # The first rank's writes into the store where it is; there may be what another one wrote before a restart.
        if dist.get_rank() == 0:
            self._manager = manage()
        dist.barrier()
        if dist.get_rank() > 0:
            self._manager = manage()

    @property
    def islands(self) -> tuple[int, ...]:
        """The numbers of those that are there, in the order of the group's ranks."""
        return self._group.islands

    @property
    def quorum(self) -> str:
        """Another word after each change, and after each agreement that broke off."""
        return self._group.name

    @property
    def is_behind(self) -> bool:
        """Whether this island gets the agreed state from another one, when they agree; or did in an attempt before."""
        return self._has_taken or not self._manager.is_participating()

    @property
    def num_ahead(self) -> int:
        """How many of the islands are not behind; 1 where the last of them was lost on the way."""
        return max(1, self._num_ahead)

    @property
    def is_first(self) -> bool:
        """Whether no island that is there has agreed on anything yet."""
        return not self.is_behind and self._manager.current_step() == 0

    def agree(self, exchange: Callable[[], T]) -> T:
        """What ``exchange`` returns, once all that are there have it.

        It is called anew, with those who are left, until none of them is lost on the way.
        """
        reason = "of another rank"
        for _ in range(MAX_FAILURES):
            self._gather()
            try:
                self._compare_histories()
                result = exchange()
                # Or one would go on with what another, which lost a third, has not got.
                self._wait_for(self._group.barrier, BarrierOptions())
            except BrokenOffError as error:
                self._log(f"the agreement of {self._named(self.islands)} broke off, and begins again: {error}")
                self._manager.report_error(error)
                reason = str(error)
            # Ranks of an island find out one after the other, each in one of five collectives.
            if self._manager.should_commit(timeout=timedelta(seconds=6 * self._membership.timeout)):
                self._history = hashlib.sha256(self._history + self._group.name.encode()).digest()
                self._has_taken = False
                return result
        raise RuntimeError(
            f"{MAX_FAILURES} attempts of island {self._membership.island} to agree broke off, the last one because: "
            f"{reason}. Each machine of an island must reach those of the others, by their hostnames, and by what "
            "torchrun has for --master-addr"
        )

    def _gather(self) -> None:
        """Find out who is there."""
        before, deadline = self.islands, time.monotonic() + self._membership.patience
        while True:
            try:
                self._manager.start_quorum()
                self._manager.wait_quorum()
            except (RuntimeError, TimeoutError) as error:
                raise RuntimeError(
                    f"island {self._membership.island} found no others to agree with, or no lighthouse, in "
                    f"{self._membership.patience} seconds: {error}. Is the lighthouse running at {self._lighthouse}, "
                    "and do the others ask the same one?"
                ) from error
            missing = set(range(self._membership.num_islands)) - set(self.islands)
            if not (self.is_first and missing):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._named(missing)} did not come within {self._membership.patience} seconds: is every island "
                    f"running, and asks the same lighthouse, {self._lighthouse}?"
                )
            time.sleep(0.5)
        left, came = set(before) - set(self.islands), set(self.islands) - set(before)
        changes = [f"{self._named(left)} left"] * bool(left) + [f"{self._named(came)} came"] * bool(came)
        if changes:
            self._log(f"{', '.join(changes)}; there are now {self._named(self.islands)}")

    def _compare_histories(self) -> None:
        """Have those agree with the others who are as far, but by agreements of their own.

        An agreement may be over for one island, and broken off for others who no longer hear of it. Two may go on
        alone, one after the other, with a lighthouse that begins again and knows of neither.
        """
        num_participants, participates = self._manager.num_participants(), self._manager.is_participating()
        if num_participants + (not participates) > len(self.islands):
            # torchft keeps a group while its quorum has the same number, as another lighthouse's first one may have.
            raise BrokenOffError("the lighthouse began again, and knows of others")
        if self._compared == self._group.name:
            self._num_ahead = num_participants
            return
        mine = bytes([self.is_behind]) + self._history
        received = self.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8)).tolist()  # [K, 1 + 32]
        histories = [None if is_behind else bytes(history) for is_behind, *history in received]
        counts = Counter(history for history in histories if history is not None)
        self._num_ahead = counts.total()
        if len(counts) > 1:
            ((right, _),) = counts.most_common(1)  # the first of those with as many
            astray = [island for island, its in zip(self.islands, histories, strict=True) if its not in (None, right)]
            if self._membership.island in astray:  # then it is behind, and gets what they have
                ago = {"step": self._manager.current_step() - 1, "batches_committed": self._manager.batches_committed()}
                self._manager.load_state_dict(ago)
            raise BrokenOffError(f"{self._named(astray)} agreed without the others, and will take what they agreed on")
        self._compared = self._group.name

    def all_to_all(self, wires: Tensor) -> Tensor:
        """Send row i of [K, ...] to island i of K; row i of the result came from there."""
        sent = wires.cpu()
        received = torch.empty_like(sent)
        self._wait_for(self._group.alltoall_base, received, sent, [], [], AllToAllOptions())
        return received.to(wires.device)

    def all_gather(self, wire: Tensor) -> Tensor:
        """[n] of every island: [K, n]."""
        sent = wire.cpu()
        received = sent.new_empty(len(self.islands), sent.numel())
        self._wait_for(self._group.allgather_into_tensor_coalesced, [received.view(-1)], [sent], AllgatherOptions())
        return received.to(wire.device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """That of the group's rank ``source``."""
        values, options = tensor.cpu().clone(memory_format=torch.contiguous_format), BroadcastOptions()
        options.rootRank = source
        self._wait_for(self._group.broadcast, [values], options)
        return values

    def leave(self) -> None:
        dist.barrier()  # the first rank's server answers all of them
        self._manager.shutdown(wait=False)

    def _wait_for(self, collective: Callable[..., dist.Work], *arguments: Any) -> None:
        if error := self._manager.errored():  # the group could not be formed, or an island behind got no state
            raise BrokenOffError(str(error.original_exception))
        if not self.quorum:  # nor tried again, since a new lighthouse's quorum has the same number
            raise BrokenOffError("no group could be formed")
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            raise BrokenOffError(str(error)) from error

    def _log(self, text: str) -> None:
        if dist.get_rank() == 0:
            logger.warning("island %d: %s", self._membership.island, text)

    @staticmethod
    def _named(islands: Iterable[int]) -> str:
        """Such as "islands 0, 2"."""
        numbers = sorted(islands)
        return f"island{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
