"""A relay of IP packets between TUN devices: each pair of devices has a link with a delay, which
can be cut. Knows no namespace.
"""

import heapq
import os
import select
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from fleet.lab.measure.calls import Caller

READ_BYTES = 65_536
TCP, IPV4 = 6, 4
PORTS = struct.Struct(">HH")
FlowKey = tuple[int, int, int, int]
"""Numbers of the devices, and ports, of the source and of the destination."""


class SetLink(msgspec.Struct, frozen=True, kw_only=True):
    """Message to the relay that sets the delay of one link, or cuts it.

    `ends`: numbers of the two TUN devices that the link connects. `delay_s`: delay in each
    direction. `is_cut`: True if the link loses all packets, including packets on their way.
    """

    ends: tuple[int, int]
    delay_s: float
    is_cut: bool = False


class LinkFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one direction of a TCP connection, without headers, retransmissions included.

    `source`, `destination`: numbers of the devices. `num_bytes` were delivered, `num_lost_bytes`
    were lost on a cut link.
    """

    source: int
    destination: int
    source_port: int
    destination_port: int
    num_bytes: int
    num_lost_bytes: int


@dataclass(frozen=True, slots=True, order=True)
class HeldPacket:
    """A packet on a link. `due_s`: time of its delivery, by `time.monotonic`; `number`: packets of
    one link stay in order.
    """

    due_s: float
    number: int
    source: int = field(compare=False)
    destination: int = field(compare=False)
    content: bytes = field(compare=False)

    @property
    def payload(self) -> tuple[int, int, int]:
        """Return the source port, the destination port and the number of payload bytes; 0 ports of
        what is not TCP.
        """
        header_len, total_len = 4 * (self.content[0] & 15), int.from_bytes(self.content[2:4], "big")
        if self.content[9] != TCP:
            return 0, 0, total_len - header_len
        source, destination = PORTS.unpack_from(self.content, header_len)
        return (
            source,
            destination,
            total_len - header_len - 4 * (self.content[header_len + 12] >> 4),
        )


class PacketRelay:
    """The links between devices, all of them without delay at first."""

    def __init__(self, devices: Sequence[int], caller: Caller) -> None:
        self._devices, self._caller = devices, caller
        self._numbers = {device: number for number, device in enumerate(devices)}
        self._links: dict[frozenset[int], SetLink] = {}
        self._held: list[HeldPacket] = []
        self._num_packets = 0
        self._delivered: dict[FlowKey, int] = {}
        self._lost: dict[FlowKey, int] = {}

    def run(self) -> None:
        """Relay until the input ends: each command is answered with the flows so far."""
        for device in self._devices:
            os.set_blocking(device, False)
        while True:
            wait_s = max(0.0, self._held[0].due_s - time.monotonic()) if self._held else None
            readable, _, _ = select.select([*self._devices, self._caller], [], [], wait_s)
            for ready in readable:
                if isinstance(ready, Caller):
                    self._follow_command()
                else:
                    self._receive(self._numbers[ready])
            self._deliver()

    def _receive(self, source: int) -> None:
        """Hold every packet that has arrived from a device. What is not IPv4 to another device is
        dropped.
        """
        with suppress(BlockingIOError):
            while True:
                content = os.read(self._devices[source], READ_BYTES)
                destination = content[19] - 1 if content[0] >> 4 == IPV4 else source
                if destination == source or not 0 <= destination < len(self._devices):
                    continue
                link = self._links.get(frozenset((source, destination)))
                self._num_packets += 1
                due_s = time.monotonic() + (link.delay_s if link is not None else 0.0)
                heapq.heappush(
                    self._held, HeldPacket(due_s, self._num_packets, source, destination, content)
                )

    def _deliver(self) -> None:
        """Deliver the packets that are due, or lose them if the link is cut now."""
        now_s = time.monotonic()
        while self._held and self._held[0].due_s <= now_s:
            packet = heapq.heappop(self._held)
            link = self._links.get(frozenset((packet.source, packet.destination)))
            is_cut = link is not None and link.is_cut
            self._count(packet, self._lost if is_cut else self._delivered)
            if not is_cut:
                with suppress(OSError):  # the device is gone: its namespace ends
                    os.write(self._devices[packet.destination], packet.content)

    def _count(self, packet: HeldPacket, counts: dict[FlowKey, int]) -> None:
        source_port, destination_port, num_bytes = packet.payload
        key = packet.source, packet.destination, source_port, destination_port
        counts[key] = counts.get(key, 0) + num_bytes

    def _follow_command(self) -> None:
        """Set the link that a command names, if any. Raises: EOFError at the end of the input."""
        link: SetLink | None = self._caller.receive(SetLink | None)
        if link is not None:
            self._links[frozenset(link.ends)] = link
        self._caller.send(self._flows())

    def _flows(self) -> tuple[LinkFlow, ...]:
        return tuple(
            LinkFlow(
                source=key[0],
                destination=key[1],
                source_port=key[2],
                destination_port=key[3],
                num_bytes=self._delivered.get(key, 0),
                num_lost_bytes=self._lost.get(key, 0),
            )
            for key in sorted({*self._delivered, *self._lost})
        )


def relay(devices: list[int], caller: Caller) -> None:
    """Relay packets between devices, whose file descriptors are given; number N has the address
    that ends with N + 1.
    """
    caller.send(())
    PacketRelay(devices, caller).run()
