"""Network reach of a worker's memory, and invalid transfer settings that end a command before it
loads anything.
"""

import ipaddress
from pathlib import Path

import psutil
import pytest

from fleet.process.free_ports import free_port
from tests.support import run_cli, set_options, start_cli

pytestmark = pytest.mark.one_file_in(10, "processes")

SETTINGS = ("engine=fake", "device=cpu", "transfer.kind=nixl")
SECRET = "0123456789abcdef" * 4
START_S = 60.0


@pytest.mark.parametrize("interface", ["null", "127.0.0.0/8"])
def test_worker_listens_only_on_loopback_and_shows_no_secret(
    redis_url: str, tmp_path: Path, interface: str
) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    settings = set_options(
        *SETTINGS, f"transfer.interface={interface}", f"security.fleet_secret={secret}"
    )
    with start_cli(
        "worker", "thinker", *settings, cwd=tmp_path, env={"REDIS_URL": redis_url}
    ) as worker:
        worker.wait_for("is ready", timeout_s=START_S)
        process = psutil.Process(worker.process.pid)
        open_to = {
            one.laddr.ip
            for one in process.net_connections(kind="inet")
            if one.laddr and not one.raddr
        }
        shown = " ".join(process.cmdline()) + str(process.environ()) + worker.output()
    assert all(ipaddress.ip_address(address).is_loopback for address in open_to)
    assert bool(open_to) == (interface != "null")
    assert SECRET not in shown


@pytest.mark.parametrize(
    "command", [("up",), ("worker", "thinker"), ("worker", "thinker", "--keep")]
)
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "transfer.interface=nowhere7",
            "fleet: transfer.interface: nothing on this host matches 'nowhere7'; give the name",
        ),
        (
            "security.fleet_secret=missing",
            "fleet: security.fleet_secret: missing cannot be read: No such file or directory",
        ),
    ],
)
def test_unusable_setting_ends_the_command_with_one_line_before_anything_starts(
    tmp_path: Path, command: tuple[str, ...], setting: str, message: str
) -> None:
    settings = (
        *SETTINGS,
        setting,
        f"redis.port={free_port()}",
        "web.port=0",
        f"data_dir={tmp_path / 'data'}",
    )
    done = run_cli(*command, *set_options(*settings), cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "data").exists()
