"""Unused TCP ports of this machine, for servers that are about to start."""

import contextlib
import random
import socket
from pathlib import Path

OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT, USUAL_OUTGOING_PORT, MAX_TRIES = 15_000, 32_768, 100


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return `count` different ports that nothing uses on `host`. Another process may bind a port
    before the caller does.

    The ports are below the range that the system gives to outgoing connections. While a server on a
    port of that range is restarted, a client that tries to reconnect may be given the server's own
    port, and keep it.
    """
    with contextlib.ExitStack() as held:
        probes = [
            held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            for _ in range(count)
        ]
        for probe in probes:
            _bind_free(probe, host)
        return [int(probe.getsockname()[1]) for probe in probes]


def _bind_free(probe: socket.socket, host: str) -> None:
    """Bind `probe` to a random port below the range of outgoing connections, or to any free port if
    that range leaves no room.
    """
    draw = random.SystemRandom()
    for _ in range(MAX_TRIES):
        with contextlib.suppress(OSError):
            probe.bind(
                (host, draw.randrange(LOWEST_PORT, max(LOWEST_PORT + 1, _first_outgoing_port())))
            )
            return
    probe.bind((host, 0))


def _first_outgoing_port() -> int:
    try:
        return int(OUTGOING_PORTS.read_text().split()[0])
    except OSError:  # no Linux
        return USUAL_OUTGOING_PORT


def free_port(host: str = "127.0.0.1") -> int:
    """Return one unused port. For two ports call `free_ports`: two calls of this function may
    return the same port.
    """
    return free_ports(1, host)[0]
