"""Authenticated TCP connections among islands and their lighthouse: both ends prove that they know one secret.

Islands trust nobody on the network. A stranger gets a nonce and a refusal, and nothing that it sends is read beyond
its proof. Nothing is ever unpickled: messages are JSON of bounded size, or the bytes of a tensor whose size the reader
knows already. Each frame has a tag, so that nobody in between can change, repeat or reorder frames. They are not
encrypted.

    handshake   both: MAGIC, 32 random bytes; client: HMAC-SHA256(secret, "client" + both nonces); server: the same of
                "server", or 32 zeros where it refuses
    frame       8 bytes: size of the payload; payload; 32 bytes: BLAKE2b(number of the frame, size, payload), whose key
                is HMAC-SHA256(secret, "from client" or "from server" + both nonces)
"""

import hashlib
import hmac
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from threading import BoundedSemaphore, Lock, Thread
from typing import Any

logger = logging.getLogger(__name__)
MAGIC = b"megatron-zpp islands 1\n"
REFUSED = bytes(32)
MAX_MESSAGE = 2**20  # bytes of JSON; a quorum of 1,000 ranks has about 30 kB
MAX_STRANGERS = 32  # connections whose handshake is not over
HANDSHAKE_SECONDS = 5.0


class ChannelError(ConnectionError):
    """The other end is gone, too slow, or breaks the protocol."""


class WrongSecretError(ValueError):
    """The other end has another secret."""


def read_secret(file: str) -> bytes:
    """Read the secret that all islands of a run share. Raises ValueError if it is short, or if others may read it."""
    mode = os.stat(file).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"the islands' secret {file} is not a regular file")
    if mode & 0o077:
        raise ValueError(f"users other than its owner may read the islands' secret {file}: chmod 600 {file}")
    with open(file, "rb") as opened:
        secret = opened.read(4096).strip()
    if len(secret) < 32:
        few = f"the islands' secret in {file} has {len(secret)} bytes, and requires 32"
        raise ValueError(f"{few}: run (umask 077; openssl rand -hex 32 > {file}), and copy it to every machine")
    return secret


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6 address]:port". Raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"{address!r} is not an address such as host:29510")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Channel:
    """One connection whose other end has proved that it knows the secret."""

    def __init__(self, connection: socket.socket, secret: bytes, is_client: bool, deadline: float) -> None:
        """Shake hands. Raises WrongSecretError, or ChannelError."""
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = os.urandom(32)
        self._send(MAGIC + mine, deadline)
        hello = self._read(bytearray(len(MAGIC) + 32), deadline)
        if not hello.startswith(MAGIC):
            raise ChannelError("the other end uses another protocol, or another version of it")
        theirs = bytes(hello[len(MAGIC) :])
        nonces = mine + theirs if is_client else theirs + mine

        def digest(purpose: bytes) -> bytes:
            return hmac.digest(secret, purpose + nonces, "sha256")

        if is_client:
            self._send(digest(b"client"), deadline)
        # The server is the second to prove itself, so that strangers learn nothing from it.
        proof = self._read(bytearray(32), deadline)
        if not hmac.compare_digest(proof, digest(b"server" if is_client else b"client")):
            if not is_client:
                self._send(REFUSED, deadline)
            raise WrongSecretError("the other end has another secret")
        if not is_client:
            self._send(digest(b"server"), deadline)
        keys = digest(b"from client"), digest(b"from server")
        self._send_key, self._receive_key = keys if is_client else keys[::-1]
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes | memoryview, deadline: float) -> None:
        """Send one frame by ``deadline``, of time.monotonic()."""
        size = len(payload).to_bytes(8, "big")
        tag = _tag(self._send_key, self._num_sent, size, payload)
        self._num_sent += 1
        self._send(size, deadline)
        self._send(payload, deadline)
        self._send(tag, deadline)

    def receive_into(self, payload: memoryview, deadline: float) -> None:
        """Fill ``payload`` from a frame of that size. After a ChannelError its values mean nothing."""
        size = self._read(bytearray(8), deadline)
        if int.from_bytes(size, "big") != len(payload):
            raise ChannelError(f"a frame of {int.from_bytes(size, 'big')} bytes came instead of {len(payload)}")
        self._read(payload, deadline)
        self._check(size, payload, deadline)

    def send_message(self, message: dict[str, Any], deadline: float) -> None:
        self.send(json.dumps(message).encode(), deadline)

    def receive_message(self, deadline: float) -> dict[str, Any]:
        """Receive a JSON object from ``send_message``."""
        size = self._read(bytearray(8), deadline)
        if int.from_bytes(size, "big") > MAX_MESSAGE:
            raise ChannelError(f"a message of {int.from_bytes(size, 'big')} bytes; the limit is {MAX_MESSAGE}")
        payload = self._read(bytearray(int.from_bytes(size, "big")), deadline)
        self._check(size, payload, deadline)
        message = json.loads(payload)
        if not isinstance(message, dict):
            raise ChannelError("a message is not a JSON object")
        return message

    def close(self) -> None:
        """Close the connection, and wake threads that wait on it."""
        _hang_up(self._socket)

    def _check(self, size: bytes | bytearray, payload: bytearray | memoryview, deadline: float) -> None:
        tag = self._read(bytearray(32), deadline)
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._num_received, size, payload)):
            raise ChannelError("a frame was changed on the way")
        self._num_received += 1

    def _send(self, payload: bytes | memoryview, deadline: float) -> None:
        self._wait_until(deadline)
        try:
            self._socket.sendall(payload)  # the timeout covers the whole call
        except TimeoutError:
            raise ChannelError("the other end did not receive in time") from None

    def _read(self, buffer: Any, deadline: float) -> Any:
        """Fill a bytearray or memoryview."""
        view, num_read = memoryview(buffer), 0
        while num_read < len(view):
            self._wait_until(deadline)
            try:
                num_bytes = self._socket.recv_into(view[num_read:])
            except TimeoutError:
                raise ChannelError("nothing arrived in time") from None
            if num_bytes == 0:
                raise ChannelError("the connection was closed by the other end")
            num_read += num_bytes
        return buffer

    def _wait_until(self, deadline: float) -> None:
        self._socket.settimeout(max(1e-3, deadline - time.monotonic()))


def _tag(key: bytes, number: int, size: bytes | bytearray, payload: bytes | bytearray | memoryview) -> bytes:
    tag = hashlib.blake2b(number.to_bytes(8, "big") + size, key=key, digest_size=32)
    tag.update(payload)
    return tag.digest()


def connect(address: tuple[str, int], secret: bytes, deadline: float) -> Channel:
    """Connect to a ``Listener``. Raises WrongSecretError, or OSError, which includes ChannelError."""
    connection = socket.create_connection(address, timeout=max(1e-3, deadline - time.monotonic()))
    try:
        return Channel(connection, secret, is_client=True, deadline=deadline)
    except BaseException:
        connection.close()
        raise


class Listener:
    """Accepts connections at one address, and serves each that knows the secret in its own thread."""

    def __init__(
        self, host: str, port: int, secret: bytes, serve: Callable[[Channel, str], None], max_connections: int
    ) -> None:
        """serve: gets a channel, and the address of its other end. Raises OSError if it cannot listen."""
        ((family, _, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._socket = socket.create_server(address[:2], family=family)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._secret, self._serve, self._max_connections = secret, serve, max_connections
        self._strangers: list[socket.socket] = []  # the oldest first
        self._slots = BoundedSemaphore(max_connections)
        self._has_logged, self._lock = False, Lock()
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                connection, peer = self._socket.accept()
            except OSError:  # closed, or the process has too many files open
                time.sleep(0.1)
                continue
            with self._lock:
                # A handshake takes moments, so the oldest is closed: many connections keep nobody out for long.
                self._strangers.append(connection)
                if len(self._strangers) > MAX_STRANGERS:
                    _hang_up(self._strangers.pop(0))
            Thread(target=self._handshake_and_serve, args=(connection, f"{peer[0]}:{peer[1]}"), daemon=True).start()

    def _handshake_and_serve(self, connection: socket.socket, peer: str) -> None:
        try:
            channel = Channel(connection, self._secret, False, time.monotonic() + HANDSHAKE_SECONDS)
        except (WrongSecretError, OSError) as error:
            self._refuse(connection, peer, str(error))
            return
        finally:
            with self._lock:
                if connection in self._strangers:
                    self._strangers.remove(connection)
        if not self._slots.acquire(blocking=False):
            self._refuse(connection, peer, f"there are already {self._max_connections} connections")
            return
        try:
            self._serve(channel, peer)
        except (OSError, ValueError, KeyError, TypeError):  # it is gone, or breaks the protocol
            channel.close()
        finally:
            self._slots.release()

    def _refuse(self, connection: socket.socket, peer: str, reason: str) -> None:
        _hang_up(connection)
        with self._lock:
            has_logged, self._has_logged = self._has_logged, True
        if not has_logged:
            host, port = self.address
            logger.warning(
                "islands: refused a connection from %s to %s:%d, before anything else was read: %s. Later refusals "
                "are not logged",
                peer,
                host,
                port,
                reason,
            )


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)  # wakes threads that wait on it
    connection.close()


def address_towards(address: tuple[str, int]) -> str:
    """Return this machine's address on the route to ``address``; nothing is sent."""
    ((family, _, _, _, towards), *_) = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)
        return str(probe.getsockname()[0])
