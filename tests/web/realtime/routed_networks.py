"""A client and a server in private networks of their own, as network namespaces of Linux, and the
two routers between them as a thread. The client's has a port for each pair of a source and a target
and admits only answers to it (a symmetric NAT); the server's forwards some ports of a public
address unchanged. Packets are lost, delayed and reordered.

Needs root and `/dev/net/tun`. Knows nothing of calls.
"""

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Self

CLIENT_HOST, CLIENT_ROUTER = "192.168.7.2", "198.51.100.7"
SERVER_HOST, SERVER_ROUTER = "10.9.0.2", "203.0.113.5"
CLIENT_NET, SERVER_NET = f"fleet-client-{os.getpid()}", f"fleet-server-{os.getpid()}"
UDP = 17
MTU = 1500
FIRST_PORT = 50_000
OPEN_PORTS = range(40_000, 40_100)
"""UDP ports that the server's router forwards; its system chooses ports among them."""
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PORTS_SETTING = "/proc/sys/net/ipv4/ip_local_port_range"
Address = tuple[str, int]


def is_possible() -> bool:
    """Return True if this process may create networks."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("ip") is not None


@contextmanager
def within(net: str) -> Iterator[None]:
    """Let this thread, and those that it starts, create their sockets in a network."""
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{net}") as inside:
        _enter(inside.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.setns(namespace, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


@contextmanager
def network(name: str, host: str) -> Iterator[int]:
    """Create a network with one host, whose packets to elsewhere are read from the yielded file."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with within(name):
            Path(PORTS_SETTING).write_text(f"{OPEN_PORTS.start} {OPEN_PORTS.stop - 1}")
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"out", IFF_TUN | IFF_NO_PI))
        for command in (
            "link set lo up",
            "link set out up",
            f"addr add {host}/24 dev out",
            "route add default dev out",
        ):
            subprocess.run(["ip", "-n", name, *command.split()], check=True)
        try:
            yield tun
        finally:
            os.close(tun)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datagram:
    """A UDP datagram within an IPv4 packet."""

    source: Address
    target: Address
    payload: bytes

    @classmethod
    def read(cls, packet: bytes) -> Self | None:
        """Return None for a packet that is no whole UDP datagram."""
        if len(packet) < 28 or packet[0] >> 4 != 4 or packet[9] != UDP:
            return None
        begin = 4 * (packet[0] & 15)
        source_port, target_port = struct.unpack_from("!HH", packet, begin)
        source, target = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
        return cls(
            source=(source, source_port),
            target=(target, target_port),
            payload=packet[begin + 8 :],
        )

    def packet(self) -> bytes:
        """Return the packet. Its datagram has no checksum, which IPv4 permits."""
        length = 8 + len(self.payload)
        addresses = socket.inet_aton(self.source[0]) + socket.inet_aton(self.target[0])
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, UDP, 0) + addresses
        total = sum(struct.unpack("!10H", head))
        total = (total & 0xFFFF) + (total >> 16)
        head = head[:10] + struct.pack("!H", ~total & 0xFFFF) + head[12:]
        return head + struct.pack("!HHHH", self.source[1], self.target[1], length, 0) + self.payload


@dataclass(slots=True)
class Routers:
    """The two routers. Units: `delay_s` and `jitter_s`, half of its range, in seconds in each
    direction; `loss`, share of packets.
    """

    loss: float
    delay_s: float
    jitter_s: float
    num_lost: int = 0
    num_late: int = 0
    _ports: dict[tuple[Address, Address], int] = field(
        default_factory=dict[tuple[Address, Address], int]
    )
    _next_port: Iterator[int] = field(default_factory=lambda: count(FIRST_PORT))
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def forget(self) -> None:
        """Give the client new ports, as if its network had changed."""
        self._ports = {}

    def from_client(self, sent: Datagram) -> Datagram | None:
        """Return the datagram at the server, None if there is no way to its target."""
        if sent.target[0] != SERVER_ROUTER or sent.target[1] not in OPEN_PORTS:
            return None
        pair = (sent.source, sent.target)
        if pair not in self._ports:
            self._ports[pair] = next(self._next_port)
        port = self._ports[pair]
        target = (SERVER_HOST, sent.target[1])
        return Datagram(source=(CLIENT_ROUTER, port), target=target, payload=sent.payload)

    def from_server(self, sent: Datagram) -> Datagram | None:
        """Return the datagram at the client, None if the client has sent nothing to its source."""
        source = (SERVER_ROUTER, sent.source[1])
        for (host, admitted), port in self._ports.items():
            if (CLIENT_ROUTER, port) == sent.target and admitted == source:
                return Datagram(source=source, target=host, payload=sent.payload)
        return None

    def run(self, client: int, server: int, stop: threading.Event) -> None:
        """Pass packets between the files of both networks until `stop` is set."""
        ways = {client: (self.from_client, server), server: (self.from_server, client)}
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers, last_due = count(), {client: 0.0, server: 0.0}
        with selectors.DefaultSelector() as ready:
            for tun in ways:
                ready.register(tun, selectors.EVENT_READ)
            while not stop.is_set():
                due_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
                for key, _ in ready.select(min(0.05, due_s)):
                    route, out = ways[key.fd]
                    sent = Datagram.read(os.read(key.fd, MTU))
                    passed = route(sent) if sent is not None else None
                    if passed is None or self._is_lost():
                        continue
                    jitter_s = self._random.uniform(-self.jitter_s, self.jitter_s)
                    due = time.monotonic() + self.delay_s + jitter_s
                    self.num_late += due < last_due[out]
                    last_due[out] = max(due, last_due[out])
                    heapq.heappush(waiting, (due, next(numbers), out, passed.packet()))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, _, out, packet = heapq.heappop(waiting)
                    os.write(out, packet)

    def _is_lost(self) -> bool:
        is_lost = self._random.random() < self.loss
        self.num_lost += is_lost
        return is_lost


@contextmanager
def routed(routers: Routers) -> Iterator[None]:
    """Create both networks, and route between them."""
    with ExitStack() as stack:
        client = stack.enter_context(network(CLIENT_NET, CLIENT_HOST))
        server = stack.enter_context(network(SERVER_NET, SERVER_HOST))
        stop = threading.Event()
        thread = threading.Thread(target=routers.run, args=(client, server, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(10)
