"""The address by which other devices of the network reach this machine. Sends nothing."""

import socket

ELSEWHERE = ("198.51.100.1", 9)
"""Address reserved for documentation (RFC 5737): unused, and routed like any address beyond this
machine's network.
"""
EVERYWHERE = ("", "0.0.0.0", "::")
"""Host names with which a server listens on all addresses of the machine."""


def lan_address() -> str | None:
    """Return this machine's IPv4 address on its default route; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)  # chooses the route; a datagram socket sends nothing for it
        except OSError:
            return None
        return probe.getsockname()[0]
