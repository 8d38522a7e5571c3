"""The lighthouse: knows which islands are there, and forms the quorums that synchronize.

    megatron-zpp lighthouse --secret-file island.secret --bind 10.8.0.1:29510 --min-islands 2

It outlives the islands. Each island's first rank sends it a heartbeat twice a second, and more often while it asks for
a quorum; each message has an answer. All state is in memory: a restarted lighthouse hears from everyone within
``heartbeat_timeout``.
"""

import argparse
import json
import logging
import math
import sys
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from threading import Condition, Event, Thread
from typing import Any

from megatron_zpp.errors import reports_errors

from .channel import Channel, Listener, WrongSecretError, connect, parse_address, read_secret

logger = logging.getLogger(__name__)
DEFAULT_ADDRESS = "127.0.0.1:29510"
MAX_ISLANDS = 1024
WAIT_SECONDS = 0.25  # for a quorum, before the lighthouse answers that there is none yet
SILENCE_SECONDS = 5.0  # after which an island connects to the lighthouse again


@dataclass(frozen=True)
class Ask:
    """An island's request for a quorum, as it is sent. Raises ValueError for a field of another type."""

    number: int  # of this request, counted by the island
    island: int
    num_islands: int
    renew: bool  # whether the last synchronization broke off
    num_syncs: int  # the number of synchronizations that led to its outer state
    history: str  # their digest
    has_taken: bool  # another island's outer state, since its own last synchronization
    steps: int
    fingerprint: str  # of all that must match
    addresses: list[tuple[str, int]]  # where its ranks listen
    unreachable: int | None = None  # the island that it could not connect to, twice in a row

    def __post_init__(self) -> None:
        numbers = (self.number, self.island, self.num_islands, self.num_syncs, self.steps)
        flags, texts = (self.renew, self.has_taken), (self.history, self.fingerprint)
        if not (
            all(type(number) is int and 0 <= number < 2**63 for number in numbers)
            and all(isinstance(flag, bool) for flag in flags)
            and all(isinstance(text, str) and len(text) == 64 for text in texts)
            and (self.unreachable is None or type(self.unreachable) is int)
            and all(isinstance(host, str) and type(port) is int for host, port in self.addresses)
        ):
            raise ValueError(f"the fields of a request differ from this version's: {self}"[:1000])


@dataclass
class Member:
    """One job of one island."""

    job: str
    peer: str
    seen: float  # when it last sent anything, of time.monotonic()
    ask: Ask | None = None  # while it asks for a quorum
    asked_at: float = 0.0
    answered: int = -1  # the number of its last request that has a quorum
    quorum: dict[str, Any] | None = None


class Lighthouse:
    """Serves islands in its own threads until ``close``."""

    def __init__(
        self, bind: str, secret: bytes, min_islands: int = 1, heartbeat_timeout: float = 5.0, join_timeout: float = 60.0
    ) -> None:
        """Start; ``megatron-zpp lighthouse --help`` explains the numbers. Raises ValueError or OSError."""
        self._min_islands, self._heartbeat_timeout, self._join_timeout = min_islands, heartbeat_timeout, join_timeout
        self._members: dict[int, Member] = {}
        self._rivals: dict[str, float] = {}  # jobs whose island is there already, and since when they try
        self._left_out: dict[str, str] = {}  # jobs that others cannot reach, and what they are told
        self._quorum: tuple[str, list[str]] = "", []  # its name and jobs
        self._started = time.monotonic()
        self._changed = Condition()
        self._listener = Listener(*parse_address(bind), secret, self._serve, max_connections=2 * MAX_ISLANDS)
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()

    def _serve(self, channel: Channel, peer: str) -> None:
        while True:
            message = channel.receive_message(time.monotonic() + 60)
            try:
                answer = self._answer(message, peer)
            except (ValueError, TypeError, KeyError) as error:  # it knows the secret: an island of another version
                why = f"the lighthouse cannot read what this island asks ({error})"
                answer = {"refused": f"{why}: run the same version of megatron_zpp everywhere"}
            channel.send_message(answer, time.monotonic() + 5)

    def _answer(self, message: dict[str, Any], peer: str) -> dict[str, Any]:
        with self._changed:
            now = time.monotonic()
            self._forget(now)
            if "island" not in message:
                asking = sorted(island for island, member in self._members.items() if member.ask is not None)
                return {"islands": sorted(self._members), "asking": asking}
            island, job = int(message["island"]), str(message["job"])
            if not 0 <= island < MAX_ISLANDS:
                return {"refused": f"island {island}: a lighthouse serves islands 0 to {MAX_ISLANDS - 1}"}
            if job in self._left_out:
                return {"refused": self._left_out[job]}
            member = self._members.get(island)
            if member is not None and member.job != job:
                # Either that job was killed moments ago, or there are two.
                if now - self._rivals.setdefault(job, now) < 2 * self._heartbeat_timeout:
                    return {}
                return {"refused": f"island {island} is there already, at {member.peer}: give each its own number"}
            self._rivals.pop(job, None)
            if message.get("leaves"):
                self._members.pop(island, None)
                self._changed.notify_all()
                return {}
            if member is None:
                logger.info("island %d is there, at %s", island, peer)
                member = self._members[island] = Member(job, peer, now)
            member.seen, member.peer = now, peer
            if message.get("ask") is None:
                return {}
            ask = Ask(**message["ask"])
            if ask.number != member.answered and member.ask is None:
                member.ask, member.asked_at = ask, now
                self._form(now)
            if ask.number != member.answered:
                self._changed.wait(WAIT_SECONDS)
                self._form(time.monotonic())
            return {"number": ask.number, "quorum": member.quorum} if ask.number == member.answered else {}

    def _forget(self, now: float) -> None:
        for island in [i for i, member in self._members.items() if now - member.seen >= self._heartbeat_timeout]:
            logger.info("island %d is gone: silent for %g seconds", island, self._heartbeat_timeout)
            del self._members[island]

    def _form(self, now: float) -> None:
        """Form a quorum of all that ask, if all islands that are there ask, or if most have for long enough."""
        self._forget(now)
        asks = {i: member.ask for i, member in sorted(self._members.items()) if member.ask is not None}
        self._leave_out_unreachable(asks)
        if len(asks) < max(1, self._min_islands):
            return
        if len(asks) < len(self._members):
            waited = now - min(self._members[island].asked_at for island in asks)
            if waited < self._join_timeout or 2 * len(asks) <= len(self._members):
                return
        # A new lighthouse first waits for heartbeats of all. Otherwise the first to ask would synchronize alone.
        is_complete = len(asks) == max(ask.num_islands for ask in asks.values())
        if now - self._started < self._heartbeat_timeout and not is_complete:
            return
        name, jobs = self._quorum[0], [self._members[island].job for island in asks]
        if jobs != self._quorum[1] or any(ask.renew for ask in asks.values()):
            name = uuid.uuid4().hex
            logger.info("islands %s synchronize from now on", ", ".join(map(str, asks)))
        self._quorum = name, jobs
        quorum = {"name": name, "members": [asdict(ask) for ask in asks.values()]}
        for island, ask in asks.items():
            member = self._members[island]
            member.ask, member.answered, member.quorum = None, ask.number, quorum
        self._changed.notify_all()

    def _leave_out_unreachable(self, asks: dict[int, Ask]) -> None:
        """Refuse an island that others cannot reach, and take it out of ``asks``: with it none would synchronize.

        At least two say so, and of no other island as many do, who may only see that it waits for the first.
        """
        named = Counter(ask.unreachable for ask in asks.values() if ask.unreachable in asks)
        (island, votes), *others = [*named.most_common(2), (None, 0)][:2]
        if island is None or votes < 2 or votes == others[0][1] or len(asks) <= max(1, self._min_islands):
            return
        where = ", ".join(f"{host}:{port}" for host, port in asks.pop(island).addresses)
        why = f"{votes} other islands cannot reach island {island} at {where}: can they connect there (--island-bind)?"
        logger.warning("%s It is left out until it starts again", why)
        self._left_out[self._members.pop(island).job] = why
        self._changed.notify_all()


class LighthouseClient:
    """An island's connection to the lighthouse: sends heartbeats in a thread, and asks for quorums."""

    def __init__(self, address: tuple[str, int], secret: bytes, island: int) -> None:
        self._address, self._secret = address, secret
        self._identity = {"island": island, "job": uuid.uuid4().hex}
        self._ask: Ask | None = None
        self._answer: dict[str, Any] | Exception | None = None
        self._problem = "it was not reached yet"
        self._was_reached = self._leaves = False
        self._changed = Condition()
        self._thread: Thread | None = None

    def ask(self, ask: Ask, deadline: float) -> dict[str, Any]:
        """Return the quorum. Raises ValueError if this island is refused, and TimeoutError at ``deadline``."""
        with self._changed:
            self._ask, self._answer = ask, None
            if self._thread is None:  # no heartbeats before the first request
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
        """Tell the lighthouse that this island is gone; wait for at most SILENCE_SECONDS."""
        with self._changed:
            self._leaves = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(SILENCE_SECONDS)

    def _run(self) -> None:
        while not self._leaves:
            try:
                channel = connect(self._address, self._secret, time.monotonic() + SILENCE_SECONDS)
                try:
                    self._exchange_messages(channel)
                finally:
                    channel.close()
            except WrongSecretError:
                self._problem = "it has another secret than this island: copy the file to all (--island-secret-file)"
                with self._changed:
                    if not self._was_reached:  # later a stranger may have taken the lighthouse's address
                        host, port = self._address
                        self._answer = ValueError(f"the lighthouse at {host}:{port}: {self._problem}")
                        self._changed.notify_all()
            except (OSError, ValueError, TypeError, KeyError) as error:
                if self._problem != str(error):  # not at every attempt
                    who = f"island {self._identity['island']}: the lighthouse at {self._address[0]}:{self._address[1]}"
                    logger.warning("%s: %s; it is asked again every second", who, error)
                self._problem = str(error)
            if not self._leaves:
                time.sleep(1)

    def _exchange_messages(self, channel: Channel) -> None:
        """Send messages until the connection breaks, or this island leaves."""
        while True:
            with self._changed:
                ask, leaves = self._ask, self._leaves
            message = {**self._identity, "ask": None if ask is None else asdict(ask), "leaves": leaves}
            channel.send_message(message, time.monotonic() + SILENCE_SECONDS)
            answer = channel.receive_message(time.monotonic() + SILENCE_SECONDS)
            self._was_reached, self._problem = True, "too few of the others asked to synchronize, or not all of them"
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


def status(address: str, secret: bytes) -> dict[str, Any]:
    """Ask the lighthouse at ``address`` which islands are there, and which of them ask for a quorum."""
    deadline = time.monotonic() + 5
    channel = connect(parse_address(address), secret, deadline)
    try:
        channel.send_message({}, deadline)
        return channel.receive_message(deadline)
    finally:
        channel.close()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Form quorums of the elastic islands that are there.")
    parser.add_argument("--secret-file", required=True, help="file with the secret that all islands share")
    parser.add_argument("--bind", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="listen there (%(default)s)")
    for name, default, help in (
        ("--min-islands", 1, "fewer do not synchronize; more than half keep two sites from parting"),
        ("--heartbeat-timeout", 5.0, "seconds of silence after which an island is gone"),
        ("--join-timeout", 60.0, "seconds that islands which ask wait for those that train"),
    ):
        parser.add_argument(name, type=type(default), default=default, help=help)
    parser.add_argument("--status", action="store_true", help="print which islands the one at --bind knows, and exit")
    return parser


@reports_errors
def main() -> None:
    """Run ``megatron-zpp lighthouse`` until it is stopped."""
    parser = build_parser()
    options = parser.parse_args()
    for name, least in (("min_islands", 1), ("heartbeat_timeout", 2), ("join_timeout", 1)):
        if not least <= getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a number of at least {least}")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    secret = read_secret(options.secret_file)
    if options.status:
        try:
            print(json.dumps(status(options.bind, secret)))
        except OSError as error:
            raise ConnectionError(
                f"no lighthouse answers at --bind {options.bind}: {error}; give its address"
            ) from error
        return
    times = options.heartbeat_timeout, options.join_timeout
    lighthouse = Lighthouse(options.bind, secret, options.min_islands, *times)
    host, port = lighthouse.address
    logger.info("the lighthouse listens at %s", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        Event().wait()
    except KeyboardInterrupt:
        lighthouse.close()


if __name__ == "__main__":
    sys.exit(main())
