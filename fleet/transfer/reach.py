"""Network access to a worker's memory: for this host only, by shared memory, or for the hosts of a
network. Checks the configured interface.

UCX has no authentication: a peer that can connect to an agent can read and write the memory of its
process. So the agent of a local-only worker opens no network socket: its peers open its shared
memory through `/proc`, which the kernel permits to processes of the same user alone. Only where the
kernel permits no copies between processes does the agent listen, on the loopback interface. Knows
no NIXL.
"""

import ctypes
import ipaddress
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from fleet.core.errors import ConfigError

log = logging.getLogger(__name__)

SETTING = "transfer.interface"
RDMA_DEVICES = Path("/sys/class/infiniband")
YAMA_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
CAP_SYS_PTRACE = 19
LOCAL_TRANSPORTS = "posix,cma"
"""UCX transports of a local-only worker: messages through a shared segment, and the kernel's copy
between processes of one user, for tensors. Not `sysv`: its segments are open to the group. Not
`posix` alone: a peer that is killed or stopped while it copies into the segment leaves an
incomplete entry, and closing the agent then never returns (after 3 of 100 interrupted reads, with
UCX 1.23).
"""
GPU_TRANSPORTS = "cuda_copy,cuda_ipc"
"""UCX transports that copy GPU memory, within a process and between processes of one host; neither
opens a network socket.
"""
SMALL_SEGMENTS = {"UCX_POSIX_FIFO_SIZE": "64", "UCX_POSIX_RX_BUFS_GROW": "65"}
"""UCX settings with which an agent uses 0.6 MB of /dev/shm instead of 4.3 MB; in a container
/dev/shm has 64 MiB.
"""
LOOPBACK = "127.0.0.0/8"
NETWORK_TRANSPORTS = "^sysv"  # all others that UCX has


def has_rdma() -> bool:
    """Return True if this host has an RDMA network device."""
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

NO_DEVICES_USED = "all"
"""Value of `UCX_NET_DEVICES` together with `LOCAL_TRANSPORTS`, which use no network device."""


def settings_given(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the UCX settings that an operator made in `environment`, without settings that a
    parent process of Fleet made for itself.
    """
    given = {name: value for name, value in environment.items() if name.startswith("UCX_")}
    own = (LOCAL_TRANSPORTS, f"{LOCAL_TRANSPORTS},{GPU_TRANSPORTS}")
    if given.get("UCX_TLS") in own and given.get("UCX_NET_DEVICES") == NO_DEVICES_USED:
        for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_POSIX_ERROR_HANDLING"):
            given.pop(name, None)
    return given


_GIVEN = settings_given(os.environ)
"""UCX settings in the environment when the process started; `enforce` changes the current
environment.
"""
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Reach:
    """Network access to a worker's memory: the peers that may connect to read it.

    `devices`: UCX names of the network devices at which the worker accepts peers; empty if only
    processes of this user on this host may connect. `gpu`: True if peers read GPU memory as well as
    host memory. `address`: address of this host, as peers see it.
    """

    devices: tuple[str, ...] = ()
    gpu: bool = field(default=False, kw_only=True)
    address: str = field(default="127.0.0.1", kw_only=True)

    @property
    def place(self) -> str:
        """Identity of host and user: a local-only worker and its peers have the same; empty for a
        worker with network access.
        """
        if self.devices:
            return ""
        spaces = [
            os.readlink(path)
            for path in ("/proc/self/ns/ipc", "/proc/self/ns/pid")
            if os.path.islink(path)
        ]
        return " ".join(
            [socket.gethostname(), str(os.getuid()), *spaces, LOCAL.settings({})["UCX_TLS"]]
        )

    def settings(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the UCX settings that admit only these peers. `given`: UCX settings in the
        operator's environment. Settings that tune transfers are kept; settings that would admit
        further peers are overridden.
        """
        if self.devices:
            return {
                "UCX_NET_DEVICES": ",".join(self.devices),
                "UCX_TLS": given.get("UCX_TLS", NETWORK_TRANSPORTS),
                "UCX_POSIX_ERROR_HANDLING": given.get("UCX_POSIX_ERROR_HANDLING", "n"),
            }
        also = f",{GPU_TRANSPORTS}" if self.gpu else ""
        if not copies_between_processes():
            return {
                "UCX_NET_DEVICES": ",".join(HostDevices.read().matching(LOOPBACK)),
                "UCX_TLS": f"tcp{also}",
            }
        return {
            **{name: given.get(name, value) for name, value in SMALL_SEGMENTS.items()},
            "UCX_NET_DEVICES": NO_DEVICES_USED,
            "UCX_TLS": f"{LOCAL_TRANSPORTS}{also}",
            # Without it UCX uses no shared memory for endpoints that report the death of a peer.
            "UCX_POSIX_ERROR_HANDLING": "y",
        }

    def enforce(self) -> None:
        """Put the UCX settings for these peers into this process's environment, which UCX reads
        when an agent is created.
        """
        settings = self.settings(_GIVEN)
        for name, value in settings.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        self._log_in_force(settings)

    def _log_in_force(self, settings: Mapping[str, str]) -> None:
        """Log once the settings in force if network sockets are open or settings of the environment
        are overridden.
        """
        asked = [(name, _GIVEN[name]) for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in _GIVEN]
        unused = [f"{name}={value}" for name, value in asked if settings[name] != value]
        uses_tcp = not self.devices and settings["UCX_TLS"].startswith("tcp")
        parts = [
            f"transfers: UCX_TLS={settings['UCX_TLS']} "
            f"UCX_NET_DEVICES={settings['UCX_NET_DEVICES']}"
        ]
        if not self.devices:
            parts.append(f"workers of this host only, since {SETTING} is null")
            if uses_tcp:
                parts.append(
                    "any user of this host can connect, since the kernel permits no copies "
                    "between processes (ptrace)"
                )
        if unused:
            parts.append(
                f"ignored settings of the environment: {' '.join(unused)}; set {SETTING} instead"
            )
        line = "; ".join(parts)
        if line not in _logged and (unused or self.devices or uses_tcp):
            _logged.add(line)
            log.log(logging.WARNING if unused or not self.devices else logging.INFO, "%s", line)


LOCAL = Reach()


@cache
def copies_between_processes() -> bool:
    """Return True if UCX can use `cma` (the kernel's copy between processes), by the conditions
    that UCX itself checks.
    """
    source, into = ctypes.c_uint64(1), ctypes.c_uint64(0)
    spans = [(ctypes.c_uint64 * 2)(ctypes.addressof(value), 8) for value in (into, source)]
    copy = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if (
        copy is None
        or copy(
            os.getpid(),
            *(part for span in spans for part in (span, ctypes.c_ulong(1))),
            ctypes.c_ulong(0),
        )
        != 8
    ):
        return False
    scope = YAMA_SCOPE.read_text().strip() if YAMA_SCOPE.is_file() else "0"
    return scope in ("0", "1") or (scope == "2" and bool(_capabilities() >> CAP_SYS_PTRACE & 1))


def _capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevices:
    """Network devices of this host. `addresses`: IP addresses of each interface. `rdma`: interfaces
    of each RDMA device; empty for InfiniBand.
    """

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
        rdma = {
            device.name: tuple(sorted(net.name for net in (device / "device" / "net").glob("*")))
            for device in devices
        }
        return cls(addresses=addresses, rdma=rdma)

    def matching(self, wanted: str) -> dict[str, tuple[IpAddress, ...]]:
        """Return the UCX devices, with their IP addresses, that match `wanted`: an interface, RDMA
        device, address or network.
        """
        if wanted in self.addresses:
            return {wanted: self.addresses[wanted]}
        device, _, port = wanted.partition(":")
        if device in self.rdma:
            of_interfaces = [self.addresses.get(name, ()) for name in self.rdma[device]]
            return {
                f"{device}:{port or 1}": tuple(
                    address for addresses in of_interfaces for address in addresses
                )
            }
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError:
            return {}
        return {
            name: found
            for name, found in self.addresses.items()
            if any(address in network for address in found)
        }

    def __str__(self) -> str:
        named = [
            f"{name} ({', '.join(map(str, found))})"
            for name, found in sorted(self.addresses.items())
        ]
        return ", ".join([*named, *(f"{device} (RDMA)" for device in self.rdma)]) or "none"


def reach_of(
    interface: str | None, *, allow_public: bool, host: HostDevices | None = None
) -> Reach:
    """Return the network access that `transfer.interface` configures on this host. `interface`: one
    or more interfaces, devices, addresses or networks, separated by commas; None for this host
    only.

    Raises: ConfigError if `interface` matches nothing here, or has a public address and
    `allow_public` is not set.
    """
    if interface is None:
        return LOCAL
    host = host or HostDevices.read()
    devices: dict[str, tuple[IpAddress, ...]] = {}
    for wanted in (part.strip() for part in interface.split(",")):
        matching = host.matching(wanted)
        if not matching:
            raise ConfigError(
                f"{SETTING}: nothing on this host matches {wanted!r}; give the name, an address "
                f"or a network of one of: {host}; "
                "or null for workers of this host only",
                param=SETTING,
            )
        devices |= matching
    public = [
        f"{address} of {name}"
        for name, found in devices.items()
        for address in found
        if address.is_global
    ]
    if public and not allow_public:
        raise ConfigError(
            f"{SETTING}: {interface} has a public address ({', '.join(public)}), and transfers "
            "have no authentication; "
            "name a private interface, or set security.allow_public_transfer: true behind a "
            "firewall",
            param=SETTING,
        )
    addresses = [str(address) for found in devices.values() for address in found]
    return Reach(tuple(devices), address=addresses[0]) if addresses else Reach(tuple(devices))
