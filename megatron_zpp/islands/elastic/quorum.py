"""Synchronize with the islands that are there: an exchange that loses an island starts again without it."""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.bounds import Bounds
from megatron_zpp.zeropp.config import check_fields
from megatron_zpp.zeropp.fsdp.topology import gather_objects

from .channel import address_towards, parse_address, read_secret
from .lighthouse import Ask, LighthouseClient
from .links import BrokenOffError, Links

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_FAILURES = 10  # of one synchronization, before the island gives up


@dataclass(frozen=True)
class Membership:
    """One elastic island. Raises ValueError for values out of bounds."""

    island: int  # its number, from 0; the same when it returns
    num_islands: int  # that begin the run together
    lighthouse: str  # such as "host:29510"
    secret_file: str  # with the secret that all islands and the lighthouse share; only its owner may read it
    bind: str | None = None  # this machine's address where its ranks listen; None: the one that reaches the lighthouse
    # Seconds for what one island sends another; a longer synchronization breaks off.
    timeout: float = field(default=60.0, metadata={"bounds": Bounds(above=0)})
    # Seconds to wait for others at a synchronization: longer than they train between two.
    patience: float = field(default=3600.0, metadata={"bounds": Bounds(above=0)})

    def __post_init__(self) -> None:
        check_fields(self, "")
        if not 0 <= self.island < self.num_islands:
            raise ValueError(f"island must be from 0 to num_islands - 1 = {self.num_islands - 1}, got {self.island}")


class MembershipError(RuntimeError):
    """No other islands came, or all attempts to synchronize broke off. Raised on all ranks of an island."""


class Quorum:
    """This rank and those of its place in the islands that are there. Collective over the ranks of an island.

    name: changes when islands leave or come, and after each synchronization that broke off.
    islands: the numbers of those that are there.
    is_first: whether none of them has synchronized yet.
    is_behind: whether this island takes, or took in an earlier attempt, the outer state of another one.
    num_ahead: how many islands are not behind; 1 if the last of them was lost.
    """

    def __init__(
        self,
        membership: Membership,
        fingerprint: str,
        steps: Callable[[], int],
        state: Callable[[], dict[str, Tensor]],
        load: Callable[[int, dict[str, Tensor]], None],
    ) -> None:
        """fingerprint: of all that ranks of the same place must have in common; other islands are refused.

        steps, state: what an island that is behind gets from another one, for its ``load``: tensors of the same names,
        shapes and dtypes. Raises ValueError for a bad secret or address.
        """
        if not dist.is_initialized():
            raise ValueError("an elastic island is a job of its own: start it with torchrun")
        secret, lighthouse = read_secret(membership.secret_file), parse_address(membership.lighthouse)
        host = membership.bind or address_towards(lighthouse)
        self._membership, self._steps, self._state, self._load = membership, steps, state, load
        self._links = Links(host, secret, membership.island, membership.num_islands, membership.timeout)
        fingerprints, self._addresses = zip(*gather_objects((fingerprint, self._links.address)), strict=True)
        self._fingerprint = hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()
        self._client = LighthouseClient(lighthouse, secret, membership.island) if dist.get_rank() == 0 else None
        # Ranks wait here for the first one, which waits for other islands up to its patience.
        longest = membership.patience + 10 * membership.timeout + 60
        self._ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=longest))
        self._version = 0, bytes(32).hex()  # of the outer state: the number of synchronizations, and their digest
        self._has_taken = False  # another island's outer state, since this one's last synchronization
        self._num_asks = 0
        self.name = ""
        self.islands: tuple[int, ...] = ()

    def _enter(self, quorum: dict[str, Any]) -> None:
        """Become part of the quorum from the lighthouse."""
        self.name, self._members = quorum["name"], [Ask(**member) for member in quorum["members"]]
        self.islands = tuple(member.island for member in self._members)
        self._others = [island for island in self.islands if island != self._membership.island]
        # The version that counts is of those that synchronized most often what most of them have, or else the first.
        most = max(member.num_syncs for member in self._members)
        histories = Counter(member.history for member in self._members if member.num_syncs == most)
        self._newest = most, histories.most_common(1)[0][0]
        behind = {member.island for member in self._members if member.has_taken or self._lacks_state(member)}
        self.is_first = most == 0
        self.is_behind = self._membership.island in behind
        self.num_ahead = max(1, len(self._members) - len(behind))

    def _lacks_state(self, member: Ask) -> bool:
        return (member.num_syncs, member.history) != self._newest

    def run(self, exchange: Callable[[], T]) -> T:
        """Return the result of ``exchange``, once all islands that are there have theirs.

        It is called again, with the islands that are left, until none is lost during it. Raises ValueError if this
        island does not fit the others, and MembershipError if none come or all attempts break off.
        """

        def exchange_and_wait() -> T:
            result = exchange()
            # Otherwise one would continue with a result that another, which lost a third, does not have.
            self._links.barrier(self._others)
            return result

        renew, reason, before, unreachable = False, "", None, None
        for _ in range(MAX_FAILURES):
            self._wait_for_islands(renew, unreachable)
            try:
                self._on_all_ranks(self._connect_and_update)()
                result = self._on_all_ranks(exchange_and_wait)
            except BrokenOffError as error:
                renew, reason = True, str(error)
                # Where a run begins all must come, and an accident is no proof.
                unreachable = error.unreachable if error.unreachable == before and not self.is_first else None
                before = error.unreachable
                self._log(f"the synchronization of {_named(self.islands)} broke off, and starts again: {reason}")
                self._links.close()  # otherwise ranks of another place would wait for this one until the timeout
                continue
            digest = hashlib.sha256((self._newest[1] + self.name).encode())
            self._version, self._has_taken = (self._newest[0] + 1, digest.hexdigest()), False
            return result
        broke_off = f"{MAX_FAILURES} attempts of island {self._membership.island} to synchronize broke off: {reason}"
        raise MembershipError(f"{broke_off}. Do islands reach each other where they listen (--island-bind)?")

    def _wait_for_islands(self, renew: bool, unreachable: int | None) -> None:
        """Enter the next quorum; where a run begins, that of all islands."""
        before, deadline = self.islands, time.monotonic() + self._membership.patience
        while True:
            quorum = self._ask(renew, unreachable, deadline)
            if quorum["name"] != self.name:
                self._links.close()
            self._enter(quorum)
            missing = set(range(self._membership.num_islands)) - set(self.islands)
            if not (self.is_first and missing) or self._misfit() is not None:
                break
            if time.monotonic() > deadline:
                late = f"{_named(missing)} did not come within {self._membership.patience:g} seconds"
                raise MembershipError(f"{late}: do all ask the lighthouse {self._membership.lighthouse}?")
            time.sleep(0.5)
        left, came = set(before) - set(self.islands), set(self.islands) - set(before)
        changes = [f"{_named(left)} left"] * bool(left) + [f"{_named(came)} came"] * bool(came)
        if changes:
            self._log(f"{', '.join(changes)}; there are now {_named(self.islands)}")

    def _ask(self, renew: bool, unreachable: int | None, deadline: float) -> dict[str, Any]:
        """Ask the lighthouse for the next quorum, on the first rank for all. Raises its errors on all."""
        self._num_asks += 1
        answer: list[Any] = [None]
        if self._client is not None:
            island, num_islands = self._membership.island, self._membership.num_islands
            fit = self._fingerprint, list(self._addresses)
            state = *self._version, self._has_taken, self._steps()
            ask = Ask(self._num_asks, island, num_islands, renew, *state, *fit, unreachable)
            try:
                answer = [self._client.ask(ask, deadline)]
            except (ValueError, TimeoutError) as error:
                answer = [error]
        dist.broadcast_object_list(answer, 0, group=self._ranks)
        (quorum,) = answer
        if isinstance(quorum, TimeoutError):
            member = self._membership
            alone = f"island {member.island} found no others, or no lighthouse, in {member.patience:g} seconds"
            raise MembershipError(f"{alone}: {quorum}. Is it running at {member.lighthouse}, and do others ask it?")
        if isinstance(quorum, ValueError):
            raise quorum
        return quorum

    def _misfit(self) -> str | None:
        """Return how the islands' settings differ; None if they match."""
        sizes = {member.island: member.num_islands for member in self._members}
        if len(set(sizes.values())) > 1:
            given = ", ".join(f"{size} by island {island}" for island, size in sizes.items())
            return f"the number of islands that begin the run is given as {given}: give all the same --islands"
        if len({(member.fingerprint, len(member.addresses)) for member in self._members}) > 1:
            return (
                f"of {_named(self.islands)} some have other ranks, parameters, parts of them, settings or data than "
                "the others: start all islands alike, each with its own number"
            )
        return None

    def _connect_and_update(self) -> Callable[[], None]:
        """Connect to the others, and send the newest outer state to islands that lack it.

        Returns what loads it into this island. Raises ValueError if this island does not fit the others, before
        anything is exchanged.

        Islands may lack it because a synchronization was over for one and broke off for others, or because two went on
        alone, one after the other, with a lighthouse that restarted and knew of neither.
        """
        problem = self._misfit()
        if problem is not None:
            if self.is_first or self.is_behind:
                raise ValueError(problem)
            raise BrokenOffError(problem)  # the newcomers find the same, and end
        if self._links.quorum != self.name:
            rank = dist.get_rank()
            peers = {member.island: member.addresses[rank] for member in self._members}
            self._links.form(self.name, {island: (peers[island][0], peers[island][1]) for island in self._others})
        takers = [member for member in self._members if self._lacks_state(member)]
        givers = [member for member in self._members if not self._lacks_state(member)]
        if astray := [member.island for member in takers if member.num_syncs == self._newest[0]]:
            self._log(f"{_named(astray)} synchronized without the others, and will take over their state")
        source_of = {taker.island: givers[number % len(givers)].island for number, taker in enumerate(takers)}
        load = self._transfer(source_of)
        if self._membership.island not in source_of:
            return load

        def load_and_note() -> None:
            load()
            self._version, self._has_taken = self._newest, True

        return load_and_note

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``. Raises BrokenOffError on all ranks of this island if any one does."""
        problem = None
        try:
            result = work()
        except BrokenOffError as error:
            problem = error
        # 0: done; 1: it broke off; 2 and more: the island that could not be reached.
        failed = torch.tensor([0 if problem is None else 1 if problem.unreachable is None else 2 + problem.unreachable])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._ranks)
        if failed:
            text = "another rank of this island lost its peers" if problem is None else str(problem)
            raise BrokenOffError(text, int(failed) - 2 if failed > 1 else None)
        return result

    def take_from_furthest(self) -> Callable[[], None]:
        """Get the state of the island with the most steps, the first of them; return what loads it into this one."""
        furthest = max(self._members, key=lambda member: member.steps)
        return self._transfer({island: furthest.island for island in self.islands if island != furthest.island})

    def _transfer(self, source_of: dict[int, int]) -> Callable[[], None]:
        """Send islands the outer state of others, whose numbers ``source_of`` gives; return what loads it here."""
        me = self._membership.island
        if me not in {*source_of, *source_of.values()}:
            return lambda: None
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self._state().items()}
        sent = {taker: list(state.values()) for taker, source in source_of.items() if source == me}
        if me not in source_of:
            self._links.exchange(sent, {})
            return lambda: None
        taken = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self._links.exchange(sent, {source_of[me]: list(taken.values())})
        (steps,) = (member.steps for member in self._members if member.island == source_of[me])
        return lambda: self._load(steps, taken)

    def all_to_all(self, wires: Tensor) -> Tensor:
        """Send row i of [K, ...] to island i of K; row i of the result came from there."""
        sent = wires.cpu().contiguous()
        received = sent.clone()
        rows = {island: row for row, island in enumerate(self.islands) if island != self._membership.island}
        self._links.exchange(
            {island: [sent[row]] for island, row in rows.items()},
            {island: [received[row]] for island, row in rows.items()},
        )
        return received.to(wires.device)

    def all_gather(self, wire: Tensor) -> Tensor:
        """Return [n] of every island: [K, n]."""
        return self.all_to_all(wire.cpu().expand(len(self.islands), -1)).to(wire.device)

    def leave(self) -> None:
        """Tell the lighthouse that this island is gone."""
        if self._client is not None:
            self._client.leave()
        self._links.close()

    def _log(self, text: str) -> None:
        if dist.get_rank() == 0:
            logger.warning("island %d: %s", self._membership.island, text)


def _named(islands: Iterable[int]) -> str:
    """Format as "island 1" or "islands 0, 2"."""
    return f"island{'s' if len(numbers := sorted(islands)) > 1 else ''} {', '.join(map(str, numbers))}"
