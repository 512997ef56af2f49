"""The address by which other devices of the network reach this machine. Sends nothing."""

import socket

ELSEWHERE = ("198.51.100.1", 9)
"""An address of documentation (RFC 5737): routed like any address beyond this machine's network,
and unused.
"""
EVERYWHERE = ("", "0.0.0.0", "::")
"""Hosts with which a server listens on all addresses."""


def lan_address() -> str | None:
    """Return this machine's IPv4 address on its default route, or None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)  # chooses the route; a datagram socket sends nothing for it
        except OSError:
            return None
        return probe.getsockname()[0]
