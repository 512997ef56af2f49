"""`transfer.interface` on hosts of several kinds, and the resulting settings of UCX."""

import ipaddress

import pytest

from fleet.core.errors import ConfigError
from fleet.transfer import reach
from fleet.transfer.reach import LOCAL, HostDevices, Reach, reach_of, settings_given


def addresses(*texts: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, ...]:
    return tuple(ipaddress.ip_address(text) for text in texts)


HOST = HostDevices(
    addresses={
        "lo": addresses("127.0.0.1", "::1"),
        "eth0": addresses("10.0.3.7", "fe80::1"),
        "eth1": addresses("10.1.0.9", "fd00::9"),
        "wan0": addresses("8.8.4.4"),
        "wan1": addresses("192.168.7.1", "2a00:1450:4001::1"),
    },
    rdma={"mlx5_0": (), "mlx5_1": ("eth1",), "mlx5_2": ("wan0",)},
)


def devices(interface: str, *, allow_public: bool = False) -> tuple[str, ...]:
    return reach_of(interface, allow_public=allow_public, host=HOST).devices


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("eth0", ("eth0",)),
        ("10.0.3.7", ("eth0",)),
        ("10.0.0.0/16", ("eth0",)),
        ("10.0.3.9/16", ("eth0",)),
        ("10.0.0.0/8", ("eth0", "eth1")),
        ("fd00::/8", ("eth1",)),
        ("127.0.0.0/8", ("lo",)),
        ("eth0, eth1", ("eth0", "eth1")),
        ("mlx5_0:1", ("mlx5_0:1",)),
        ("mlx5_1", ("mlx5_1:1",)),
        ("mlx5_0:2,eth0", ("mlx5_0:2", "eth0")),
    ],
)
def test_interface_is_matched_by_name_address_or_network(
    interface: str, expected: tuple[str, ...]
) -> None:
    assert devices(interface) == expected


@pytest.mark.parametrize(
    "interface",
    ["eth9", "10.2.0.0/16", "10.0.3.8", "0.0.0", "mlx5_9:1", "eth0,nonsense", "host.example"],
)
def test_unknown_interface_is_refused_with_the_known_ones(interface: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"transfer\.interface: .* matches .*eth0 \(10\.0\.3\.7, fe80::1\), .*mlx5",
    ) as refused:
        devices(interface)
    assert refused.value.param == "transfer.interface"


@pytest.mark.parametrize("interface", ["wan0", "wan1", "192.168.7.1", "0.0.0.0/0", "mlx5_2:1"])
def test_interface_with_a_public_address_is_refused_unless_permitted(interface: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"transfer\.interface: .*public address .*security\.allow_public_transfer: true",
    ):
        devices(interface)
    assert devices(interface, allow_public=True)


def test_worker_without_interface_uses_no_network_in_any_environment() -> None:
    settings = LOCAL.settings(
        {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "UCX_POSIX_ERROR_HANDLING": "n"}
    )
    assert settings["UCX_TLS"] == "posix,cma"
    assert (settings["UCX_POSIX_ERROR_HANDLING"], settings["UCX_NET_DEVICES"]) == ("y", "all")


def test_local_worker_on_a_gpu_has_transports_for_its_memory_and_the_same_peers() -> None:
    on_gpu = Reach(gpu=True)
    assert on_gpu.settings({})["UCX_TLS"] == "posix,cma,cuda_copy,cuda_ipc"
    assert on_gpu.place == LOCAL.place
    assert settings_given(on_gpu.settings({})).keys() == settings_given(LOCAL.settings({})).keys()
    assert Reach(("eth0",), gpu=True).settings({}) == Reach(("eth0",)).settings({}), (
        "all transports are there already"
    )


def test_worker_without_process_copies_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = LOCAL.place
    monkeypatch.setattr(reach, "copies_between_processes", lambda: False)
    assert LOCAL.settings({"UCX_NET_DEVICES": "all"}) == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    assert LOCAL.place != copied, "the two kinds cannot read each other"


def test_worker_with_interface_uses_no_other_and_respects_transport_of_environment() -> None:
    networked = Reach(("mlx5_0:1", "eth0"))
    assert networked.settings({})["UCX_TLS"] == "^sysv"
    settings = networked.settings({"UCX_TLS": "rc,cuda_copy", "UCX_NET_DEVICES": "all"})
    assert (settings["UCX_TLS"], settings["UCX_NET_DEVICES"]) == ("rc,cuda_copy", "mlx5_0:1,eth0")


def test_settings_of_a_parent_process_are_not_the_operators() -> None:
    assert settings_given({**LOCAL.settings({}), "PATH": "/bin"}).keys() == {
        "UCX_POSIX_FIFO_SIZE",
        "UCX_POSIX_RX_BUFS_GROW",
    }
    assert settings_given({"UCX_TLS": "rc", "UCX_NET_DEVICES": "all"}) == {
        "UCX_TLS": "rc",
        "UCX_NET_DEVICES": "all",
    }
