"""Network namespaces on this host, with a slow link between each two, for measurements and tests.
Needs Linux and root.

Each namespace has a TUN device; `link_relay` forwards the packets. The kernel's netem is not
needed. Nothing outside the namespaces is changed, and everything is removed at the end of the
block.
"""

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fleet.lab.measure.calls import ProcessCall, ProcessSettings
from fleet.lab.measure.errors import BenchError
from fleet.lab.studies.link_relay import LinkFlow, SetLink

TUN = Path("/dev/net/tun")
NETWORK = "10.83.0.0/24"
PREFIX = "fleet-"
IFF_TUN, IFF_NO_PI, TUNSETIFF = 0x0001, 0x1000, 0x400454CA
REQUEST = struct.Struct("16sH22x")
"""`struct ifreq` for TUNSETIFF: interface name, in which the kernel replaces %d, and flags."""
QUEUE_PACKETS = 10_000
"""Queue length of a TUN device: a burst of several MiB waits for the relay without loss."""
RELAY = "fleet.lab.studies.link_relay:relay"


class LinkedNamespaces:
    """Handle of the linked network namespaces `names`, valid until the block of `linked_namespaces`
    ends.
    """

    def __init__(self, names: Sequence[str], devices: Sequence[int]) -> None:
        self.names, self._delay_s = tuple(names), 0.0
        settings = ProcessSettings(pass_fds=tuple(devices))
        self.relay = ProcessCall(RELAY, devices, name="the relay of the links", settings=settings)
        self.relay.receive(tuple[()])

    def address(self, name: str) -> str:
        return f"{NETWORK.rpartition('.')[0]}.{self.names.index(name) + 1}"

    def command(self, name: str) -> list[str]:
        """Return a command-line prefix that runs a command in the namespace `name`."""
        return ["ip", "netns", "exec", _own_name(name)]

    def set_delay(self, delay_s: float) -> None:
        """Set the delay of every link, in each direction. Cut links are restored."""
        self._delay_s = delay_s
        for number, name in enumerate(self.names):
            for other in self.names[:number]:
                self.heal(name, other)

    def cut(self, one: str, other: str) -> None:
        """Cut the link between two namespaces: every packet on it is lost."""
        self._set(one, other, is_cut=True)

    def heal(self, one: str, other: str) -> None:
        """Restore the link between two namespaces."""
        self._set(one, other, is_cut=False)

    def flows(self, source: str, destination: str) -> list[LinkFlow]:
        """Return the TCP flows from one namespace to another so far."""
        ends = self.names.index(source), self.names.index(destination)
        flows = self.relay.ask(None, tuple[LinkFlow, ...])
        return [flow for flow in flows if (flow.source, flow.destination) == ends]

    def _set(self, one: str, other: str, *, is_cut: bool) -> None:
        ends = self.names.index(one), self.names.index(other)
        link = SetLink(ends=ends, delay_s=self._delay_s, is_cut=is_cut)
        self.relay.ask(link, tuple[LinkFlow, ...])


@contextmanager
def linked_namespaces(*names: str, delay_s: float = 0.0) -> Iterator[LinkedNamespaces]:
    """Make the namespaces `names` with a link between each two, and remove all at the end of the
    block. `delay_s`: delay of each link, one way. Raises: BenchError where that is not possible.
    """
    remove_abandoned()
    with _devices(names) as devices:
        links = LinkedNamespaces(names, devices)
        with links.relay:
            _close(devices)
            links.set_delay(delay_s)
            yield links


def find_obstacle() -> str:
    """Return the reason why namespaces and TUN devices cannot be made here, "" if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux, and root"
    try:
        with _devices(["probe"]):
            return ""
    except BenchError as error:
        return error.message


def remove_abandoned() -> None:
    """Remove the namespaces left by processes that were killed."""
    for line in _ip("netns", "list").splitlines():
        prefix, _, rest = line.partition(" ")[0].partition("-")
        pid = rest.partition("-")[0]
        if f"{prefix}-" == PREFIX and pid.isdigit() and not psutil.pid_exists(int(pid)):
            _remove(line.partition(" ")[0])


def _own_name(name: str) -> str:
    return f"{PREFIX}{os.getpid()}-{name}"


@contextmanager
def _devices(names: Sequence[str]) -> Iterator[list[int]]:
    """Make namespaces with one TUN device each, and yield the devices' file descriptors. The
    namespaces are removed at the end of the block.
    """
    devices: list[int] = []
    try:
        for number, name in enumerate(names, start=1):
            _ip("netns", "add", _own_name(name))
            devices.append(_open_device(_own_name(name), f"{NETWORK.rpartition('.')[0]}.{number}"))
        yield devices
    finally:
        _close(devices)
        for name in names:
            _remove(_own_name(name))


def _open_device(namespace: str, address: str) -> int:
    """Open a TUN device and move it into a namespace; return its file descriptor."""
    try:
        device = os.open(TUN, os.O_RDWR)
    except OSError as error:
        raise BenchError(f"{TUN} cannot be opened: {error.strerror}") from error
    try:
        answer = fcntl.ioctl(device, TUNSETIFF, REQUEST.pack(b"fleet%d", IFF_TUN | IFF_NO_PI))
        name = REQUEST.unpack(answer)[0].rstrip(b"\0").decode()
        _ip("link", "set", name, "netns", namespace)
        _ip(
            "-n", namespace, "address", "add", f"{address}/{NETWORK.partition('/')[2]}", "dev", name
        )
        _ip("-n", namespace, "link", "set", name, "up", "txqueuelen", str(QUEUE_PACKETS))
        _ip("-n", namespace, "link", "set", "lo", "up")
    except OSError as error:
        os.close(device)
        raise BenchError(f"no TUN device can be made: {error.strerror}") from error
    except BenchError:
        os.close(device)
        raise
    return device


def _close(devices: list[int]) -> None:
    while devices:
        os.close(devices.pop())


def _remove(namespace: str) -> None:
    with suppress(BenchError):  # it was never made
        _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> str:
    """Run the `ip` command and return its output. Raises: BenchError with the command's error."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BenchError("the command `ip` is missing; install iproute2") from error
    if done.returncode:
        raise BenchError(f"`ip {' '.join(arguments)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout
