"""A switch whose frames arrive later: what joins the nodes of the cluster in a box where their links have a latency."""

import selectors
import socket
import sys
import time
from collections import deque

# From linux/if_packet.h; Python's socket module lacks it.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
VNET_HEADER_BYTES = 10  # says what the network card would do: checksums, and cutting up segments of up to 64 KB
LARGEST_FRAME_BYTES = 1 << 17


def switch(interfaces: list[str], delay_seconds: float) -> None:
    """Pass each Ethernet frame of one of ``interfaces`` on to the others, after a delay. Never returns."""
    ports, waiting = [], deque[tuple[float, socket.socket, bytes]]()
    selector = selectors.DefaultSelector()
    for interface in interfaces:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        port.bind((interface, ETH_P_ALL))
        port.setblocking(False)
        selector.register(port, selectors.EVENT_READ)
        ports.append(port)
    port_of: dict[bytes, socket.socket] = {}  # by hardware address
    while True:
        until_next = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(until_next):
            source = key.fileobj
            assert isinstance(source, socket.socket)
            frame = source.recv(LARGEST_FRAME_BYTES)
            to, sender = frame[VNET_HEADER_BYTES:][:6], frame[VNET_HEADER_BYTES:][6:12]
            port_of[sender] = source
            due = time.monotonic() + delay_seconds
            targets = [port_of[to]] if to in port_of else [port for port in ports if port is not source]
            waiting += [(due, port, frame) for port in targets]
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, frame = waiting.popleft()
            port.setblocking(True)  # a link that is full holds frames up, and TCP slows down
            port.send(frame)
            port.setblocking(False)


if __name__ == "__main__":  # delay.py MILLISECONDS INTERFACE...
    switch(sys.argv[2:], float(sys.argv[1]) / 1000)
