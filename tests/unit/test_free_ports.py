"""Choice of free ports for servers that tests and measurements start."""

import socket

from fleet.process.free_ports import OUTGOING_PORTS, free_ports


def test_free_ports_differ_and_are_never_given_to_a_client() -> None:
    """Free ports differ, and are never given to a client's outgoing connection; otherwise a client
    that reconnects to a restarting server could take the server's port.
    """
    ports = free_ports(50)
    first_outgoing = int(OUTGOING_PORTS.read_text().split()[0])
    assert len(set(ports)) == 50 and max(ports) < first_outgoing
    with socket.create_server(("127.0.0.1", ports[0])) as server:
        assert server.getsockname()[1] == ports[0]
