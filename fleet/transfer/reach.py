"""From where a worker's memory may be read: this host only, by shared memory, or the hosts of a network. Checks the interface.

UCX has no authentication: a peer that can connect to an agent can read and write the memory of its process. So the agent of a
local-only worker opens no network socket at all: its peers open its shared memory through `/proc`, which the kernel permits to
processes of the same user alone. Knows no NIXL.
"""

import ipaddress
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleet.core.errors import ConfigError

log = logging.getLogger(__name__)

SETTING = "transfer.interface"
RDMA_DEVICES = Path("/sys/class/infiniband")
LOCAL_TRANSPORTS = ("posix", "cma")
"""Messages through a shared segment, and the kernel's copy between processes of one user. Where that copy is not permitted (Yama,
a container without ptrace) UCX leaves `cma` out, and data goes through the segment. Those of `sysv` would be open to the group.
"""
LOCAL_DEFAULTS = {
    # Of /dev/shm, which has 64 MiB in a container, an agent takes 0.6 MB so, not 4.3; no slower (measured with UCX 1.23).
    "UCX_POSIX_FIFO_SIZE": "64",
    "UCX_POSIX_RX_BUFS_GROW": "65",
    # The death of a peer is noticed after this where `cma` is left out; the default of 20 s is beyond every deadline.
    "UCX_KEEPALIVE_INTERVAL": "1s",
}
NETWORK_TRANSPORTS = "^sysv"
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_GIVEN = dict(os.environ)
"""The environment that the process was started with: `enforce` changes the current one."""
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Reach:
    """`devices`: the network devices that peers connect to, as UCX names them; none: peers are processes of this host and user.
    """

    devices: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """A local-only worker reads only from workers of the same place; a networked one has none."""
        if self.devices:
            return ""
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("ipc", "pid") if Path(f"/proc/self/ns/{kind}").is_symlink()]
        return " ".join([socket.gethostname(), str(os.getuid()), *spaces])

    def settings(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the UCX settings to put into the environment, of which `given` is the one that the process was started with.

        The configuration decides what may connect; `given` may only narrow it further, or choose among transports of the network.
        """
        transports = given.get("UCX_TLS", "")
        if self.devices:
            return {
                "UCX_NET_DEVICES": ",".join(self.devices),
                "UCX_TLS": transports or NETWORK_TRANSPORTS,
                "UCX_POSIX_ERROR_HANDLING": given.get("UCX_POSIX_ERROR_HANDLING", "n"),
            }
        narrower = transports and set(transports.split(",")) <= {*LOCAL_TRANSPORTS, "self"}
        return {
            **{name: given.get(name, value) for name, value in LOCAL_DEFAULTS.items()},
            "UCX_NET_DEVICES": "all",  # of LOCAL_TRANSPORTS: none
            "UCX_TLS": transports if narrower else ",".join(LOCAL_TRANSPORTS),
            # Else UCX does not use shared memory where the death of a peer must be an error.
            "UCX_POSIX_ERROR_HANDLING": "y",
        }

    def enforce(self) -> None:
        """Put the settings into this process's environment, which UCX reads when an agent is created."""
        settings = self.settings(_GIVEN)
        for name, value in settings.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        self._log_in_force(settings)

    def _log_in_force(self, settings: Mapping[str, str]) -> None:
        """Log once what is in force where the environment asks for something, or a network device listens."""
        given = {name: _GIVEN[name] for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in _GIVEN}
        overruled = [f"{name}={value}" for name, value in given.items() if settings.get(name) != value]
        shown = f"UCX_TLS={settings['UCX_TLS']}" + (f" UCX_NET_DEVICES={settings['UCX_NET_DEVICES']}" if self.devices else "")
        where = "workers of other hosts may connect" if self.devices else f"workers of this host only, for {SETTING} is not set"
        line = f"transfers: {shown} ({where})" + (f"; {' '.join(overruled)} of the environment is not used" if overruled else "")
        if (given or self.devices) and line not in _logged:
            _logged.add(line)
            log.log(logging.WARNING if overruled else logging.INFO, "%s", line)


LOCAL = Reach()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevices:
    """`addresses`: the IP addresses of each interface. `rdma`: the interfaces of each RDMA device; none of InfiniBand."""

    addresses: Mapping[str, tuple[IpAddress, ...]]
    rdma: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls) -> "HostDevices":
        addresses: dict[str, tuple[IpAddress, ...]] = {}
        for label, found in psutil.net_if_addrs().items():
            # A further IPv4 address has a label such as eth0:1; its interface is eth0.
            name = label.partition(":")[0]
            for one in found:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    address = ipaddress.ip_address(one.address.partition("%")[0])
                    addresses[name] = (*addresses.get(name, ()), address)
        devices = sorted(RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
        rdma = {device.name: tuple(sorted(net.name for net in (device / "device" / "net").glob("*"))) for device in devices}
        return cls(addresses=addresses, rdma=rdma)

    def matching(self, wanted: str) -> dict[str, tuple[IpAddress, ...]]:
        """Return the UCX devices that match an interface, RDMA device, address or network, with their addresses."""
        if wanted in self.addresses:
            return {wanted: self.addresses[wanted]}
        device, _, port = wanted.partition(":")
        if device in self.rdma:
            of_interfaces = [self.addresses.get(name, ()) for name in self.rdma[device]]
            return {f"{device}:{port or 1}": tuple(address for addresses in of_interfaces for address in addresses)}
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError:
            return {}
        return {name: found for name, found in self.addresses.items() if any(address in network for address in found)}

    def __str__(self) -> str:
        named = [f"{name} ({', '.join(map(str, found))})" for name, found in sorted(self.addresses.items())]
        return ", ".join([*named, *(f"{device} (RDMA)" for device in self.rdma)]) or "none"


def reach_of(interface: str | None, *, allow_public: bool, host: HostDevices | None = None) -> Reach:
    """Resolve `transfer.interface`, one or several with commas between them, on this host.

    Raises: ConfigError where it matches nothing here, or an interface with a public address and `allow_public` is not set.
    """
    if interface is None:
        return LOCAL
    host = host or HostDevices.read()
    devices: dict[str, tuple[IpAddress, ...]] = {}
    for wanted in (part.strip() for part in interface.split(",")):
        matching = host.matching(wanted)
        if not matching:
            raise ConfigError(
                f"{SETTING}: nothing on this host matches {wanted!r}; give the name, an address or a network of one of: {host}; "
                "or null for workers of this host only", param=SETTING,
            )  # fmt: skip
        devices |= matching
    public = [f"{address} of {name}" for name, found in devices.items() for address in found if address.is_global]
    if public and not allow_public:
        raise ConfigError(
            f"{SETTING}: {interface} has a public address ({', '.join(public)}), and transfers have no authentication; "
            "name a private interface, or set security.allow_public_transfer: true behind a firewall", param=SETTING,
        )  # fmt: skip
    return Reach(tuple(devices))
