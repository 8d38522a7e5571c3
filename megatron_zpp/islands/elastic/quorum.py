"""Which islands are there, and agreements with them: one that loses an island on the way begins again without it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from threading import Condition, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.zeropp.fsdp.topology import gather_objects

from .channel import WrongSecretError, address_towards, connect, parse_address, read_secret
from .lighthouse import WAIT_SECONDS, Ask
from .links import BrokenOffError, Links
from .membership import Membership

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_FAILURES = 10  # of an agreement, one after the other, before the island gives up
SILENCE_SECONDS = 5.0  # after which the connection to the lighthouse is made again


class Quorum:
    """This rank, and those of its place in the islands that are there. Collective over the ranks of an island."""

    def __init__(
        self,
        membership: Membership,
        fingerprint: str,
        steps: Callable[[], int],
        state: Callable[[], dict[str, Tensor]],
        take: Callable[[int, dict[str, Tensor]], None],
    ) -> None:
        """Join. fingerprint: of all that ranks of the same place must have alike; islands with another are refused.

        steps, state: what a newcomer gets from another island, for its ``take``: tensors of the same names, shapes and
        dtypes. Raises ValueError for a secret or an address that cannot be.
        """
        if not dist.is_initialized():
            raise ValueError("an island that may leave is a job of its own: start it with torchrun")
        secret, lighthouse = read_secret(membership.secret_file), parse_address(membership.lighthouse)
        host = membership.bind or address_towards(lighthouse)
        self._membership, self._steps, self._state, self._take = membership, steps, state, take
        self._links = Links(host, secret, membership.island, membership.num_islands, membership.timeout)
        of_ranks = gather_objects((fingerprint, self._links.address))
        fingerprints, self._addresses = zip(*of_ranks, strict=True)
        self._fingerprint = hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()
        self._client = LighthouseClient(lighthouse, secret, membership.island) if dist.get_rank() == 0 else None
        # Ranks wait here for the first one, which may wait for others as long as its patience lasts.
        longest = membership.patience + 10 * membership.timeout + 60
        self._ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=longest))
        self._history = bytes(32).hex()  # of the agreements that led here, equal where these are
        self._agreements = 0
        self._has_taken = False  # another island's state, since its own last agreement
        self._num_asks = 0
        self.name = ""  # another one after each change, and after each agreement that broke off
        self._members: list[Ask] = []  # in the order of their numbers

    @property
    def islands(self) -> tuple[int, ...]:
        """The numbers of those that are there."""
        return tuple(member.island for member in self._members)

    @property
    def _right(self) -> tuple[int, str]:
        """What most of those have who agreed most often: how often, and the history. If equally many, the first's."""
        most = max(member.agreements for member in self._members)
        histories = Counter(member.history for member in self._members if member.agreements == most)
        return most, histories.most_common(1)[0][0]

    def _lacks_state(self, member: Ask) -> bool:
        return (member.agreements, member.history) != self._right

    @property
    def is_behind(self) -> bool:
        """Whether this island got the agreed state from another one, in this attempt to agree or one before."""
        return any(member.island == self._membership.island and self._adds_nothing(member) for member in self._members)

    def _adds_nothing(self, member: Ask) -> bool:
        return member.has_taken or self._lacks_state(member)

    @property
    def num_ahead(self) -> int:
        """How many of the islands are not behind; 1 where the last of them was lost on the way."""
        return max(1, sum(not self._adds_nothing(member) for member in self._members))

    @property
    def is_first(self) -> bool:
        """Whether no island that is there has agreed on anything yet."""
        return self._right[0] == 0

    def agree(self, exchange: Callable[[], T]) -> T:
        """Return what ``exchange`` does, once all that are there have it.

        It is called again, with those who are left, until none of them is lost on the way.
        Raises ValueError where this island does not fit the others, and RuntimeError where none come or all attempts
        break off.
        """
        renew, reason = False, ""
        for _ in range(MAX_FAILURES):
            self._gather(renew)
            try:
                self._on_all_ranks(self._meet)()
                result = self._on_all_ranks(lambda: self._finish(exchange))
            except BrokenOffError as error:
                renew, reason = True, str(error)
                self._log(f"the agreement of {_named(self.islands)} broke off, and begins again: {reason}")
                self._links.close()  # else those of another place would wait for this rank until the timeout
                continue
            digest = hashlib.sha256((self._right[1] + self.name).encode())
            self._agreements, self._history = self._right[0] + 1, digest.hexdigest()
            self._has_taken = False
            return result
        raise RuntimeError(
            f"{MAX_FAILURES} attempts of island {self._membership.island} to agree broke off, the last one because: "
            f"{reason}. Each machine of an island must reach those of the others at the addresses where they listen "
            "(--island-bind)"
        )

    @property
    def _others(self) -> list[int]:
        return [island for island in self.islands if island != self._membership.island]

    def _gather(self, renew: bool) -> None:
        """Find out who is there."""
        before, deadline = self.islands, time.monotonic() + self._membership.patience
        while True:
            quorum = self._ask(renew, deadline)
            if quorum["name"] != self.name:
                self._links.close()
            self.name, self._members = quorum["name"], [Ask(**member) for member in quorum["members"]]
            missing = set(range(self._membership.num_islands)) - set(self.islands)
            if not (self.is_first and missing) or self._misfit() is not None:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{_named(missing)} did not come within {self._membership.patience:g} seconds: is every island "
                    f"running, and asks the same lighthouse, {self._membership.lighthouse}?"
                )
            time.sleep(0.5)
        left, came = set(before) - set(self.islands), set(self.islands) - set(before)
        changes = [f"{_named(left)} left"] * bool(left) + [f"{_named(came)} came"] * bool(came)
        if changes:
            self._log(f"{', '.join(changes)}; there are now {_named(self.islands)}")

    def _ask(self, renew: bool, deadline: float) -> dict[str, Any]:
        """Ask the lighthouse for the next quorum, on the first rank, for all. Raises its errors on all."""
        self._num_asks += 1
        answer: list[Any] = [None, None]
        if self._client is not None:
            ask = Ask(
                self._num_asks,
                self._membership.island,
                self._membership.num_islands,
                renew,
                self._agreements,
                self._history,
                self._has_taken,
                self._steps(),
                self._fingerprint,
                list(self._addresses),
            )
            try:
                answer = [self._client.ask(ask, deadline), None]
            except (ValueError, TimeoutError) as error:
                answer = [None, error]
        dist.broadcast_object_list(answer, 0, group=self._ranks)
        quorum, refusal = answer
        if isinstance(refusal, TimeoutError):
            raise RuntimeError(
                f"island {self._membership.island} found no others to agree with, or no lighthouse, in "
                f"{self._membership.patience:g} seconds: {refusal}. Is the lighthouse running at "
                f"{self._membership.lighthouse}, and do the others ask the same one?"
            )
        if refusal is not None:
            raise refusal
        return quorum

    def _misfit(self) -> str | None:
        """Say what is not alike, if anything is."""
        sizes = {member.island: member.num_islands for member in self._members}
        if len(set(sizes.values())) > 1:
            given = ", ".join(f"{size} by island {island}" for island, size in sizes.items())
            return f"the number of islands that begin the run is given as {given}: give all the same --islands"
        prints = [member.fingerprint for member in self._members]
        if len(set(prints)) > 1 or len({len(member.addresses) for member in self._members}) > 1:
            return (
                f"of {_named(self.islands)} some have other ranks, parameters, parts of them, settings or data than "
                "the others: start all islands alike, each with its own number"
            )
        return None

    def _check_alike(self) -> None:
        """Raise ValueError where this island is the one that does not fit the others, before anything is exchanged."""
        problem = self._misfit()
        if problem is None:
            return
        if self.is_first or self.is_behind:
            raise ValueError(problem)
        raise BrokenOffError(problem)  # and those that come find the same, and end

    def _connect(self) -> None:
        if self._links.quorum != self.name:
            rank = dist.get_rank()
            peers = {member.island: member.addresses[rank] for member in self._members}
            self._links.form(self.name, {island: (peers[island][0], peers[island][1]) for island in self._others})

    def _finish(self, exchange: Callable[[], T]) -> T:
        result = exchange()
        # Or one would go on with what another, which lost a third, has not got.
        self._links.barrier(self._others)
        return result

    def _meet(self) -> Callable[[], None]:
        """Connect to the others, and send those who lack what the others agreed on this state, each from one of these.

        Returns what puts it into this island.

        An agreement may be over for one island, and broken off for others who no longer hear of it. Two may go on
        alone, one after the other, with a lighthouse that begins again and knows of neither.
        """
        self._check_alike()
        self._connect()
        takers = [member for member in self._members if self._lacks_state(member)]
        givers = [member for member in self._members if not self._lacks_state(member)]
        if astray := [member.island for member in takers if member.agreements == self._right[0]]:
            self._log(f"{_named(astray)} agreed without the others, and will take what they agreed on")
        source_of = {taker.island: givers[number % len(givers)].island for number, taker in enumerate(takers)}
        take = self._transfer(source_of)
        if self._membership.island not in source_of:
            return take

        def take_and_say_so() -> None:
            take()
            (self._agreements, self._history), self._has_taken = self._right, True

        return take_and_say_so

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        """Return what ``work`` does. Raises BrokenOffError on all ranks of this island if any one does."""
        problem = None
        try:
            result = work()
        except BrokenOffError as error:
            problem = error
        failed = torch.tensor([int(problem is not None)])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._ranks)
        if failed:
            raise problem or BrokenOffError("another rank of this island lost its peers")
        return result

    def take_from_furthest(self) -> Callable[[], None]:
        """Get the state of the island with the most steps, the first of them; returns what puts it into this one."""
        furthest = max(self._members, key=lambda member: member.steps)
        return self._transfer({island: furthest.island for island in self.islands if island != furthest.island})

    def _transfer(self, source_of: dict[int, int]) -> Callable[[], None]:
        """Send the state of some islands to others: their numbers, by the number of who takes it."""
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
        return lambda: self._take(steps, taken)

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
        """[n] of every island: [K, n]."""
        sent = wire.cpu().contiguous()
        received = sent.expand(len(self.islands), -1).clone()
        rows = {island: row for row, island in enumerate(self.islands) if island != self._membership.island}
        self._links.exchange(
            {island: [sent] for island in rows}, {island: [received[row]] for island, row in rows.items()}
        )
        return received.to(wire.device)

    def leave(self) -> None:
        """Tell the lighthouse that this island is gone."""
        if self._client is not None:
            self._client.leave()
        self._links.close()

    def _log(self, text: str) -> None:
        if dist.get_rank() == 0:
            logger.warning("island %d: %s", self._membership.island, text)


class LighthouseClient:
    """Tells the lighthouse, in a thread, that this island is there; and asks it for quorums."""

    def __init__(self, address: tuple[str, int], secret: bytes, island: int) -> None:
        self._address, self._secret = address, secret
        self._me = {"island": island, "job": uuid.uuid4().hex}
        self._ask: Ask | None = None
        self._answer: dict[str, Any] | Exception | None = None
        self._problem = "it was not reached yet"
        self._has_met = self._leaves = False
        self._changed = Condition()
        self._thread: Thread | None = None

    def ask(self, ask: Ask, deadline: float) -> dict[str, Any]:
        """Return the quorum. Raises ValueError where this island is refused, and TimeoutError at ``deadline``."""
        with self._changed:
            self._ask, self._answer = ask, None
            if self._thread is None:  # an island that does not ask yet is not there
                self._thread = Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._answer is not None, max(0.0, deadline - time.monotonic())):
                raise TimeoutError(self._problem)
            if isinstance(self._answer, Exception):
                raise self._answer
            assert self._answer is not None
            return self._answer

    def leave(self) -> None:
        """Say that this island is gone; wait at most as long as the lighthouse may take to hear it."""
        with self._changed:
            self._leaves = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(SILENCE_SECONDS)

    def _run(self) -> None:
        while not self._leaves:
            try:
                channel = connect(self._address, self._secret, time.monotonic() + SILENCE_SECONDS)
            except WrongSecretError:
                self._fail("it has another secret than this island: copy the file to all (--island-secret-file)")
            except OSError as error:
                self._problem = str(error)
            else:
                try:
                    self._talk(channel)
                except (OSError, ValueError, TypeError, KeyError) as error:
                    self._problem = str(error)
                channel.close()
            if not self._leaves:
                time.sleep(1)

    def _fail(self, problem: str) -> None:
        self._problem = problem
        with self._changed:
            if not self._has_met:  # later it may be a stranger where the lighthouse was
                self._answer = ValueError(f"the lighthouse at {self._address[0]}:{self._address[1]}: {problem}")
                self._changed.notify_all()

    def _talk(self, channel: Any) -> None:
        """Send messages until the connection breaks, or this island leaves."""
        while True:
            with self._changed:
                ask, leaves = self._ask, self._leaves
            message = {**self._me, "ask": None if ask is None else asdict(ask), "leaves": leaves}
            channel.send_message(message, time.monotonic() + SILENCE_SECONDS)
            answer = channel.receive_message(time.monotonic() + SILENCE_SECONDS)
            self._has_met, self._problem = True, "others did not ask for an agreement, too few or not all of them"
            if leaves:
                return
            with self._changed:
                if "refused" in answer:
                    self._answer = ValueError(answer["refused"])
                elif ask is not None and answer.get("number") == ask.number:
                    self._ask, self._answer = None, answer["quorum"]
                self._changed.notify_all()
                if self._ask is None:
                    self._changed.wait_for(lambda: self._ask is not None or self._leaves, 2 * WAIT_SECONDS)
            if "refused" in answer:
                time.sleep(1)


def _named(islands: Iterable[int]) -> str:
    """Format as "island 1" or "islands 0, 2"."""
    return f"island{'s' if len(numbers := sorted(islands)) > 1 else ''} {', '.join(map(str, numbers))}"
