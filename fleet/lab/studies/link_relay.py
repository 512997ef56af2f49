"""A relay of IP packets between TUN devices. Any two devices have a link with a delay, which can be
cut. Knows nothing about network namespaces.
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
"""Key of a TCP flow: source device number, destination device number, source port, destination
port.
"""


class SetLink(msgspec.Struct, frozen=True, kw_only=True):
    """Message to the relay that sets the delay of one link, or cuts it.

    `ends`: numbers of the two TUN devices that the link connects. `delay_s`: delay in each
    direction. `is_cut`: True if the link loses all packets, including packets on their way.
    """

    ends: tuple[int, int]
    delay_s: float
    is_cut: bool = False


class LinkFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Payload bytes of one direction of a TCP connection since the relay began, retransmissions
    included. All other packets from `source` to `destination` are one flow with the ports 0.

    `source`, `destination`: numbers of the devices. `num_bytes`: delivered bytes. `num_lost_bytes`:
    bytes lost on a cut link.
    """

    source: int
    destination: int
    source_port: int
    destination_port: int
    num_bytes: int
    num_lost_bytes: int


@dataclass(frozen=True, slots=True, order=True)
class HeldPacket:
    """A packet on its way over a link. `due_s`: delivery time on `time.monotonic`. `number`: serial
    number, which keeps the packets of a link in order.
    """

    due_s: float
    number: int
    source: int = field(compare=False)
    destination: int = field(compare=False)
    content: bytes = field(compare=False)

    @property
    def payload(self) -> tuple[int, int, int]:
        """Return the source port, the destination port and the number of payload bytes. Ports are 0
        if the packet is not TCP.
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
    """Forwards packets between TUN devices, with a delay per link. Links have no delay until one is
    set.
    """

    def __init__(self, devices: Sequence[int], caller: Caller) -> None:
        self._devices, self._caller = devices, caller
        self._numbers = {device: number for number, device in enumerate(devices)}
        self._links: dict[frozenset[int], SetLink] = {}
        self._held: list[HeldPacket] = []
        self._num_packets = 0
        self._delivered: dict[FlowKey, int] = {}
        self._lost: dict[FlowKey, int] = {}

    def run(self) -> None:
        """Relay packets, and answer each command with the flows counted so far. Raises: EOFError
        when the caller closes the input.
        """
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
        """Hold every packet that has arrived from the device `source` until it is due. Packets that
        are not IPv4, or not addressed to another device, are dropped.
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
        """Write the packets that are due to their devices; count packets on a cut link as lost."""
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
        """Receive a command, which is the new state of a link or None, apply the new state, and
        reply with the flows. Raises: EOFError at the end of the input.
        """
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
    """Relay packets between TUN devices. `devices`: file descriptors; device number N has the IP
    address that ends with N + 1. Raises: EOFError when the caller closes the input.
    """
    caller.send(())
    PacketRelay(devices, caller).run()
