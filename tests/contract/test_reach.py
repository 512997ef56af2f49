"""Which processes can access a worker's memory: by default processes of its host and user,
otherwise processes on the configured interface.
"""

import ipaddress
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleet.core.errors import TransferError
from fleet.core.ids import WorkerId
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import LOCAL, Reach
from tests.contract.transfer_peer import PeerProcess, pattern, peer_process, ref_of
from tests.support import REPO, cli_env, wait_until

pytestmark = pytest.mark.one_file_in(3, "transfers between processes")

MIB = 1024 * 1024
OTHER_USER = 65534
STRANGERS = [("tcp", os.getuid())] + (
    [("shared memory", OTHER_USER), ("tcp", OTHER_USER)] if os.getuid() == 0 else []
)
"""Readers that must be refused: (transport, user id). Only root can become another user, and a
process of the same user can read any process of that user, with or without UCX.
"""
SHARED_BYTES = MIB
"""Size in bytes of one agent's shared memory; a container has 64 MiB in all."""


@pytest.fixture(scope="module")
def local_peer() -> Iterator[PeerProcess]:
    # An environment that asks for more than the configuration permits.
    with peer_process(
        "nixl", "local@peer:41", MIB, env={"UCX_TLS": "tcp,cma", "UCX_NET_DEVICES": "all"}
    ) as process:
        yield process


def listening(peer: PeerProcess) -> set[str]:
    """Return the addresses of the peer's network sockets that others can send to."""
    sockets = psutil.Process(peer.pid).net_connections(kind="inet")
    return {one.laddr.ip for one in sockets if one.laddr and not one.raddr}


def segments(peer: PeerProcess) -> list[os.stat_result]:
    """Return the files of shared memory that the peer has open."""
    opened = Path(f"/proc/{peer.pid}/fd").iterdir()
    return [link.stat() for link in opened if os.readlink(link).startswith("/dev/shm/")]


def read(peer: PeerProcess, reach: Reach) -> bytes:
    reader = NixlTransfer(WorkerId("reader@here:40"), MIB, MIB, reach)
    try:
        data = wait_until(
            reader.pull(ref_of(peer.publish("r", 1, 1000)), peer.metadata, 10.0).poll,
            "the read to end",
        )
        assert data is not None
        return data
    finally:
        reader.close()
        peer.release("r")


def test_worker_without_interface_has_no_network_socket_and_is_read_from(
    local_peer: PeerProcess,
) -> None:
    assert read(local_peer, LOCAL) == pattern(1, 1000)
    assert listening(local_peer) == set()


def test_shared_memory_of_worker_is_its_users_alone_and_small(local_peer: PeerProcess) -> None:
    found = segments(local_peer)
    assert found
    assert {(stat.S_IMODE(file.st_mode), file.st_uid) for file in found} == {(0o600, os.getuid())}
    assert sum(file.st_size for file in found) < SHARED_BYTES
    assert not list(Path("/dev/shm").glob("*ucx*")), (
        "nothing is left for another process to open, or behind a killed one"
    )


@pytest.mark.parametrize(("over", "user"), STRANGERS)
def test_process_outside_the_fleet_cannot_read_with_a_workers_metadata(
    local_peer: PeerProcess, over: str, user: int
) -> None:
    ref = ref_of(local_peer.publish("r", 2, 64))
    command = [sys.executable, "-m", "tests.contract.unauthorized_reader"]
    options = [local_peer.metadata.hex(), str(ref.address), str(user), over]
    env = cli_env({"UCX_TLS": "tcp"} if over == "tcp" else {})
    done = subprocess.run(
        [*command, *options],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    local_peer.release("r")
    assert done.stdout.startswith("refused: "), done.stdout
    assert read(local_peer, LOCAL) == pattern(1, 1000), "its own peers still read"


def test_worker_on_the_loopback_network_listens_there_only_and_is_read_from() -> None:
    with peer_process(
        "nixl", "looped@peer:42", MIB, env={"UCX_TLS": "tcp"}, interface="127.0.0.0/8"
    ) as peer:
        assert read(peer, Reach(("lo",))) == pattern(1, 1000)
        addresses = listening(peer)
        assert addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses)
        with pytest.raises(TransferError):
            read(peer, LOCAL)
