"""Messages between the owner of network links and the relay that forwards their packets: a line of
JSON each.
"""

import msgspec


class RelayCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the commands, each of which is answered by one `LinkFlows`."""


class SetLink(RelayCommand, frozen=True, kw_only=True):
    """Set the delay of one link, each way, or cut it: packets on their way are lost, too. `ends`:
    numbers of its devices.
    """

    ends: tuple[int, int]
    delay_s: float
    is_cut: bool = False


class ReadFlows(RelayCommand, frozen=True, kw_only=True):
    """Order to report what has crossed the links so far."""


AnyRelayCommand = SetLink | ReadFlows


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


class LinkFlows(msgspec.Struct, frozen=True, kw_only=True):
    """All flows that have had packets."""

    flows: tuple[LinkFlow, ...] = ()
