"""Exchanges among the ranks of one place in their islands, over one authenticated connection for each pair."""

import ctypes
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Condition

import torch
from torch import Tensor

from .channel import Channel, Listener, WrongSecretError, connect


class BrokenOffError(Exception):
    """Another island is gone or too slow: everything since the quorum was formed is void.

    unreachable: the island that could not be connected to; None where a connection broke, which others may have caused.
    """

    def __init__(self, text: str, unreachable: int | None = None) -> None:
        super().__init__(text)
        self.unreachable = unreachable


class Links:
    """This rank's connections to those of its place in the islands of a quorum, in host memory and over TCP."""

    def __init__(self, host: str, secret: bytes, island: int, num_islands: int, timeout: float) -> None:
        """Listen at ``host``. timeout: seconds for one exchange. Raises OSError if it cannot listen there."""
        self._secret, self._island, self._timeout = secret, island, timeout
        self.quorum = ""  # the name of the quorum whose links are open
        self._channels: dict[int, Channel] = {}  # by island
        self._arrived: dict[tuple[str, int], Channel] = {}  # by quorum and island; the oldest first
        self._has_arrived = Condition()
        self._max_arrived = 2 * num_islands
        self._listener = Listener(host, 0, secret, self._serve, max_connections=2 * num_islands)
        self.address = self._listener.address
        self._threads = ThreadPoolExecutor(max_workers=2 * num_islands, thread_name_prefix="islands")

    def _serve(self, channel: Channel, peer: str) -> None:
        hello = channel.receive_message(time.monotonic() + self._timeout)
        if tuple(hello["to"]) != self.address:
            raise ValueError("somebody in between led an island's connection to another rank")
        with self._has_arrived:
            self._arrived[str(hello["quorum"]), int(hello["island"])] = channel
            if len(self._arrived) > self._max_arrived:  # of old quorums
                self._arrived.pop(next(iter(self._arrived))).close()
            self._has_arrived.notify_all()

    def form(self, quorum: str, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect to the ranks at ``addresses``, by island, that form the same quorum. Raises BrokenOffError."""
        self.close()
        self.quorum, deadline = quorum, time.monotonic() + self._timeout
        try:
            for island, address in addresses.items():
                if island < self._island:
                    self._channels[island] = channel = connect(address, self._secret, deadline)
                    channel.send_message({"quorum": quorum, "island": self._island, "to": address}, deadline)
            for island in (island for island in addresses if island > self._island):
                key = quorum, island
                with self._has_arrived:
                    if not self._has_arrived.wait_for(lambda: key in self._arrived, deadline - time.monotonic()):  # noqa: B023
                        raise TimeoutError(f"it did not connect in {self._timeout:g} seconds")
                    self._channels[island] = self._arrived.pop(key)
        except (OSError, WrongSecretError) as error:
            self.close()
            host, port = addresses[island]
            raise BrokenOffError(f"island {island} at {host}:{port}: {error}", island) from error

    def exchange(self, sent: Mapping[int, Sequence[Tensor]], received: Mapping[int, Sequence[Tensor]]) -> None:
        """Send and receive tensors, by island, all at once.

        All are contiguous and in host memory, and both sides know their sizes and order. Before it raises
        BrokenOffError it closes the links, so that the others notice; ``received`` is then undefined.
        """
        deadline = time.monotonic() + self._timeout

        def send(island: int) -> None:
            for tensor in sent[island]:
                self._channels[island].send(_bytes_of(tensor), deadline)

        def receive(island: int) -> None:
            for tensor in received[island]:
                self._channels[island].receive_into(_bytes_of(tensor), deadline)

        futures = {self._threads.submit(send, island): island for island in sent}
        futures |= {self._threads.submit(receive, island): island for island in received}
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future.done() and future.exception() is not None]
        if failed:
            self.close()
            wait(futures)
            error = failed[0].exception()
            if not isinstance(error, (OSError, KeyError)):  # KeyError: the links are closed already
                raise error or AssertionError
            raise BrokenOffError(f"island {futures[failed[0]]}: {error}") from error

    def barrier(self, islands: Iterable[int]) -> None:
        """Wait until the other islands call this, too. Raises BrokenOffError."""
        peers = list(islands)
        here = torch.ones(1, dtype=torch.uint8)
        self.exchange({peer: [here] for peer in peers}, {peer: [torch.empty_like(here)] for peer in peers})

    def close(self) -> None:
        """Close all connections; the next quorum opens new ones."""
        channels, self._channels, self.quorum = self._channels, {}, ""
        for channel in channels.values():
            channel.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, without NumPy, which may not be installed."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
