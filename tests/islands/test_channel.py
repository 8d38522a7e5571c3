"""Who gets in between islands, and what a lighthouse answers. Without torchrun: sockets, threads and processes."""

import hashlib
import logging
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from megatron_zpp.islands.elastic import Membership
from megatron_zpp.islands.elastic import channel as channels
from megatron_zpp.islands.elastic.channel import (
    MAGIC,
    MAX_MESSAGE,
    MAX_STRANGERS,
    Channel,
    ChannelError,
    Listener,
    WrongSecretError,
    connect,
    parse_address,
    read_secret,
)
from megatron_zpp.islands.elastic.lighthouse import Ask, Lighthouse, LighthouseClient, status
from megatron_zpp.islands.elastic.links import BrokenOffError, Links
from megatron_zpp.islands.elastic.quorum import Quorum
from tests.ranks import free_port, run_ranks

SECRET = b"s" * 32


def soon() -> float:
    return time.monotonic() + 10


@pytest.fixture
def echo():
    """A listener that sends every message back; its ``served`` has what came."""
    served = []

    def serve(channel: Channel, peer: str) -> None:
        while True:
            served.append(channel.receive_message(soon()))
            channel.send_message(served[-1], soon())

    listener = Listener("127.0.0.1", 0, SECRET, serve, max_connections=4)
    listener.served = served
    yield listener
    listener.close()


def connected(listener: Listener | Lighthouse, secret: bytes = SECRET) -> Channel:
    return connect(listener.address, secret, soon())


def assert_serves(mine: Channel) -> None:
    mine.send_message({}, soon())
    assert mine.receive_message(soon()) == {}


class Shell:
    """What a stranger would have a trainer unpickle."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_stranger_is_refused_before_anything_is_read_and_logged_once(echo, tmp_path, caplog):
    """With a pickle, another secret, or another protocol; the next island is served."""
    evil = pickle.dumps(Shell(tmp_path / "ran"))
    with caplog.at_level(logging.WARNING):
        for hello in (evil + bytes(100), b"GET / HTTP/1.1\r\n\r\n" + bytes(100), MAGIC + bytes(64) + evil):
            with socket.create_connection(echo.address) as stranger:
                stranger.settimeout(10)
                stranger.sendall(hello)
                answer = b"".join(iter(lambda stranger=stranger: _read(stranger), b""))
            assert len(answer) == len(MAGIC) + 32 + 32 * hello.startswith(MAGIC) and answer.startswith(MAGIC)
        with pytest.raises(WrongSecretError):
            connected(echo, b"t" * 32)
        assert_serves(connected(echo))
    assert echo.served == [{}] and not (tmp_path / "ran").exists()
    assert sum("refused a connection" in message for message in caplog.messages) == 1


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_many_silent_connections_keep_no_island_out(echo):
    """Each would last until the handshake's time is over: the oldest make room."""
    silent = [socket.create_connection(echo.address) for _ in range(3 * MAX_STRANGERS)]
    assert_serves(connected(echo))
    silent[0].settimeout(10)
    while _read(silent[0]):
        pass  # ends before the handshake's time does: it was hung up on
    for connection in silent:
        connection.close()


def test_islands_have_a_limit_of_connections(echo):
    four = [connected(echo) for _ in range(4)]
    for mine in four:
        assert_serves(mine)
    fifth = connected(echo)
    with pytest.raises(OSError):
        assert_serves(fifth)


def test_a_message_too_large_ends_the_connection_without_being_read(echo):
    mine = connected(echo)
    mine._send((MAX_MESSAGE + 1).to_bytes(8, "big"), soon())
    with pytest.raises(ChannelError):
        mine.receive_message(soon())
    assert echo.served == []


def proxied(listener: Listener | Links, change) -> tuple[str, int]:
    """Return the address of a man in the middle, who applies ``change`` to all that is sent after the handshake."""
    server = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        client, _ = server.accept()
        upstream = socket.create_connection(listener.address)

        def back() -> None:
            while data := _read(upstream):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=back, daemon=True).start()
        passed, handshake = 0, len(MAGIC) + 64
        while data := _read(client):
            upstream.sendall(data if passed < handshake else change(data))
            passed += len(data)

    threading.Thread(target=relay, daemon=True).start()
    return server.getsockname()


@pytest.mark.parametrize(
    "change", [lambda data: data.replace(b"good", b"evil"), lambda data: data + data], ids=["changed", "repeated"]
)
def test_a_frame_that_is_changed_or_repeated_on_its_way_is_not_taken(echo, change):
    mine = connect(proxied(echo, change), SECRET, soon())
    payload = b'{"be": "good"}'
    tag = channels._tag(mine._send_key, 0, len(payload).to_bytes(8, "big"), payload)
    mine._send(len(payload).to_bytes(8, "big") + payload + tag, soon())  # in one piece
    with pytest.raises(ChannelError):
        mine.receive_message(soon())
        mine.receive_message(soon())
    assert echo.served in ([], [{"be": "good"}])  # once at most


def test_a_connection_that_is_led_to_another_rank_is_not_taken():
    """Someone in between knows no secret, but may choose where a connection ends: at a rank with other parameters."""
    meant, other = (Links("127.0.0.1", SECRET, island, 2, timeout=2) for island in range(2))
    other.form("q", {0: proxied(meant, lambda data: data)})
    with pytest.raises(BrokenOffError, match=r"island 1 at .* did not connect in 2 seconds"):
        meant.form("q", {1: other.address})
    other.form("q", {0: meant.address})
    meant.form("q", {1: other.address})


def _addresses(secret_file: str, bind: str | None) -> list[str]:
    membership = Membership(0, 2, lighthouse="127.0.0.1:1", secret_file=secret_file, bind=bind)
    quorum = Quorum(membership, "fingerprint", lambda: 0, dict, lambda steps, state: None)
    return [host for host, port in quorum._addresses]


@pytest.mark.parametrize("bind, expected", [(None, "127.0.0.1"), ("127.0.0.2", "127.0.0.2")])
def test_ranks_listen_at_one_address_that_is_given_or_towards_the_lighthouse(tmp_path, bind, expected):
    """The address of --island-bind; never all addresses."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    assert run_ranks(2, _addresses, str(file), bind) == [[expected] * 2] * 2


def test_a_secret_is_long_and_of_its_owner_alone(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"s" * 32 + b"\n")
    file.chmod(0o600)
    assert read_secret(str(file)) == SECRET
    file.chmod(0o640)
    with pytest.raises(ValueError, match=f"chmod 600 {file}"):
        read_secret(str(file))
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes, and requires 32"):
        read_secret(str(file))
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ValueError, match="not a regular file"):
        read_secret(str(tmp_path / "fifo"))


def test_addresses():
    assert parse_address("host:29510") == ("host", 29510)
    assert parse_address("[::1]:1") == ("::1", 1)
    for wrong in ("host", ":1", "host:", "http://host:29510/", "host:99999"):
        with pytest.raises(ValueError, match="is not an address such as host:29510"):
            parse_address(wrong)


@pytest.fixture
def lighthouse():
    server = Lighthouse("127.0.0.1:0", SECRET, heartbeat_timeout=1.2)
    yield server
    server.close()


def ask_of(island: int, number: int = 1, **more: object) -> Ask:
    digest = hashlib.sha256().hexdigest()
    fields = {"number": number, "island": island, "num_islands": 2, "renew": False, "num_syncs": 0, "history": digest}
    fields |= {"has_taken": False, "steps": 0, "fingerprint": digest, "addresses": [["127.0.0.1", 1]]}
    return Ask(**fields | more)


def client_of(lighthouse: Lighthouse, island: int, secret: bytes = SECRET) -> LighthouseClient:
    return LighthouseClient(lighthouse.address, secret, island)


def test_a_quorum_forms_when_all_that_are_there_ask(lighthouse):
    clients, quorums = [client_of(lighthouse, island) for island in range(2)], []
    for number, islands in enumerate([[0, 1], [0, 1], [0]], 1):
        if islands == [0]:
            clients[1].leave()
        with ThreadPoolExecutor() as threads:
            quorums.append([*threads.map(lambda i, n=number: clients[i].ask(ask_of(i, n), soon()), islands)])
        assert all(quorum == quorums[-1][0] for quorum in quorums[-1])
        assert [member["island"] for member in quorums[-1][0]["members"]] == islands
    first, second, third = (answers[0]["name"] for answers in quorums)
    assert first == second != third
    assert status(f"127.0.0.1:{lighthouse.address[1]}", SECRET) == {"islands": [0], "asking": []}


def test_a_second_island_of_the_same_number_is_refused(lighthouse):
    one, other = client_of(lighthouse, 0), client_of(lighthouse, 0)
    one.ask(ask_of(0, num_islands=1), soon())
    with pytest.raises(ValueError, match=r"island 0 is there already, at 127\.0\.0\.1"):
        other.ask(ask_of(0, num_islands=1), soon())


def test_an_island_that_starts_again_takes_the_place_of_one_that_died(lighthouse):
    dies = connected(lighthouse)
    dies.send_message({"island": 0, "job": "killed", "ask": asdict(ask_of(0, num_islands=1))}, soon())
    assert "quorum" in dies.receive_message(soon())
    assert client_of(lighthouse, 0).ask(ask_of(0, num_islands=1), soon())["members"][0]["island"] == 0


def test_another_secret_is_reported_at_once(lighthouse):
    with pytest.raises(ValueError, match="has another secret than this island"):
        client_of(lighthouse, 0, b"t" * 32).ask(ask_of(0), soon())


def test_one_that_sends_nonsense_harms_no_other(lighthouse):
    """It knows the secret, so it is an island; of another version, for example."""
    good = asdict(ask_of(1))
    for ask in ({"number": 1}, good | {"steps": "many"}, good | {"addresses": 3}, good | {"renew": None}, [1]):
        mine = connected(lighthouse)
        for island, words in ((1, "run the same version"), (5000, "a lighthouse serves islands 0 to 1023")):
            mine.send_message({"island": island, "job": "x", "ask": ask}, soon())
            assert words in mine.receive_message(soon())["refused"]
    assert client_of(lighthouse, 0).ask(ask_of(0, num_islands=1), soon())["members"][0]["island"] == 0


def test_a_lighthouse_that_is_not_there_is_said_at_once_and_once(caplog):
    client = LighthouseClient(("127.0.0.1", free_port()), SECRET, 3)
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError, match="Connection refused"):
        client.ask(ask_of(3), time.monotonic() + 3)  # it tries every second
    (said,) = [message for message in caplog.messages if message.startswith("island 3: the lighthouse at 127.0.0.1:")]
    assert "Connection refused; it is asked again every second" in said


def test_one_alone_waits_until_a_new_lighthouse_has_heard_from_all():
    """Otherwise the first to ask would synchronize without those who train."""
    server = Lighthouse("127.0.0.1:0", SECRET, heartbeat_timeout=1.5)
    began = time.monotonic()
    client_of(server, 0).ask(ask_of(0), soon())
    assert time.monotonic() - began > 1
    server.close()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"island": 3, "num_islands": 3}, "island must be from 0 to num_islands - 1 = 2, got 3"),
        ({"island": -1, "num_islands": 3}, "island must be from 0 to num_islands - 1 = 2, got -1"),
        ({"island": 0, "num_islands": 0}, "island must be from 0"),
        ({"island": 0, "num_islands": 2, "timeout": 0.0}, "timeout must be above 0, got 0.0"),
        ({"island": 0, "num_islands": 2, "patience": float("nan")}, "patience must be a finite number, got nan"),
    ],
)
def test_a_membership_out_of_bounds_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Membership(lighthouse="localhost:1", secret_file="secret", **values)
