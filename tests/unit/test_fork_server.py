"""The fork server of keepers, with real processes: what a forked command inherits, and what remains
when a process is killed.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet.cli import fork_client
from fleet.cli.fork_client import ForkedProcess, ForkStarter
from fleet.cli.hangs import HangWatch
from fleet.cli.keeper import UNKNOWN_STATUS, ChildProcess
from fleet.config import FleetConfig
from tests.support import await_until, cli_env, wait_until

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

COMMAND = "tests.forked_command"


class Forks:
    """Fork starters of one folder, as keepers use them; `close` disconnects them from the
    server.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starters: list[ForkStarter] = []

    def starter(self, *modules: str) -> ForkStarter:
        self.starters.append(ForkStarter(folder=self.folder, modules=(*modules, COMMAND)))
        return self.starters[-1]

    async def close(self) -> None:
        for starter in self.starters:
            await starter.close()


@pytest.fixture
async def forks(tmp_path: Path) -> AsyncIterator[Forks]:
    forks = Forks(tmp_path)
    yield forks
    await forks.close()
    wait_until(lambda: not list(tmp_path.glob("*.sock")), "the server to end after its last keeper")


async def start(
    starter: ForkStarter, *arguments: str, env: dict[str, str] | None = None
) -> tuple[ChildProcess, dict[str, Any]]:
    """Start a command by fork; return it with its description of its own process."""
    read_end, write_end = os.pipe()
    process = await starter.start(arguments, write_end, cli_env(env))
    os.close(write_end)
    with os.fdopen(read_end) as output:
        line = output.readline()
        assert line.startswith("{"), line + output.read()
        return process, json.loads(line)


async def test_forked_command_has_all_that_a_new_process_would_have(
    forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(forks.folder)
    given = {"REDIS_URL": "redis://:password@host", "FLEET_TEXT": "ä=ö\nü", "OMP_NUM_THREADS": "2"}
    process, shown = await start(forks.starter("torch"), "exit", "3", env=given)
    assert isinstance(process, ForkedProcess) and await process.wait() == 3
    assert shown["arguments"] == ["exit", "3"] and shown["folder"] == str(forks.folder)
    assert shown["environment"] == cli_env(given), "nothing of the server's environment is left"
    assert shown["pid"] == shown["session"] == process.pid and shown["terminates"]
    assert shown["keeper"] == os.getpid() != shown["parent"]
    assert shown["threads"] == [1, 1]
    second, also_shown = await start(forks.starter("torch"), "exit", "0", env=given)
    assert await second.wait() == 0
    assert shown["torch"][1] == 2 and shown["torch"][0] != also_shown["torch"][0], (
        "threads and random numbers of its own"
    )
    assert not [link for link in shown["links"] if "socket:" in link or "anon_inode:" in link], (
        "none of the server's descriptors"
    )


async def test_forked_commands_of_two_keepers_share_a_server_and_no_random_state(
    forks: Forks,
) -> None:
    (first, one), (second, two) = [await start(forks.starter(), "wait") for _ in range(2)]
    assert one["parent"] == two["parent"]
    assert not set(one["draws"]) & set(two["draws"])
    assert psutil.Process(first.pid).cmdline() == [sys.executable, "-m", "fleet.cli", "wait"]
    second.terminate()
    os.kill(first.pid, signal.SIGKILL)
    assert (await first.wait(), await second.wait()) == (-signal.SIGKILL, -signal.SIGTERM)


async def test_environment_of_the_server_has_no_secret(forks: Forks) -> None:
    process, shown = await start(
        forks.starter(), "exit", "0", env={"REDIS_URL": "redis://:p@host", "HF_TOKEN": "t"}
    )
    assert not {"REDIS_URL", "HF_TOKEN"} & set(psutil.Process(shown["parent"]).environ())
    assert await process.wait() == 0


async def test_variable_that_libraries_read_needs_another_server(forks: Forks) -> None:
    starts = [
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "wait"),
        ({}, "wait"),
        ({"PORT": "5100", "FLEET_CONFIG": "x"}, "wait"),
    ]
    running = [await start(forks.starter(), command, env=env) for env, command in starts]
    active, passive, also_passive = (shown["parent"] for _, shown in running)
    assert active != passive == also_passive
    for process, _ in running:
        process.terminate()
        assert await process.wait() == -signal.SIGTERM


async def test_killed_server_leaves_its_commands_and_is_replaced(forks: Forks) -> None:
    starter = forks.starter()
    first, shown = await start(starter, "wait")
    os.kill(shown["parent"], signal.SIGKILL)
    second, again = await start(forks.starter(), "wait")
    assert isinstance(second, ForkedProcess) and again["parent"] != shown["parent"]
    assert psutil.Process(first.pid).status() == psutil.STATUS_SLEEPING
    first.terminate()
    assert await first.wait() == UNKNOWN_STATUS
    third, last = await start(starter, "exit", "0")
    assert last["parent"] == again["parent"] and await third.wait() == 0
    second.terminate()
    assert await second.wait() == -signal.SIGTERM
    os.kill(again["parent"], signal.SIGKILL)
    fourth, shown = await start(starter, "exit", "0")
    assert (
        isinstance(fourth, ForkedProcess)
        and shown["parent"] != again["parent"]
        and await fourth.wait() == 0
    )


async def test_frozen_server_delays_a_start_and_starts_nothing_later(
    forks: Forks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starter = forks.starter()
    first, shown = await start(starter, "wait")
    first.terminate()
    assert await first.wait() == -signal.SIGTERM
    server = psutil.Process(shown["parent"])
    server.suspend()
    monkeypatch.setattr(fork_client, "REPLY_TIMEOUT_S", 0.1)
    process = await starter.start(["--help"], os.open(os.devnull, os.O_WRONLY), cli_env())
    assert not isinstance(process, ForkedProcess) and await process.wait() == 0
    (line,) = caplog.messages
    assert line.endswith("not by the fork server: it did not answer within 0.1 s")
    process = await starter.start(["--help"], os.open(os.devnull, os.O_WRONLY), cli_env())
    assert not isinstance(process, ForkedProcess) and await process.wait() == 0
    assert caplog.messages == [line], "later starts do not wait for it"
    server.resume()
    wait_until(lambda: not server.is_running() or not server.children(), "the late process to end")


async def test_stopped_server_is_killed_and_leaves_its_commands(forks: Forks) -> None:
    """A server that is stopped is killed by the keepers that watch it; its command runs on, and the
    next one is forked by another server.
    """
    starter = forks.starter()
    starter.hangs = HangWatch(lease_s=0.4)
    first, shown = await start(starter, "wait")
    waiting = asyncio.create_task(first.wait())
    server = psutil.Process(shown["parent"])
    server.suspend()

    async def is_killed() -> bool:
        return not server.is_running() or server.status() == psutil.STATUS_ZOMBIE

    await await_until(is_killed, "the stopped server to be killed")
    assert psutil.Process(first.pid).status() == psutil.STATUS_SLEEPING
    first.terminate()
    assert await waiting == UNKNOWN_STATUS
    second, again = await start(starter, "exit", "0")
    assert isinstance(second, ForkedProcess) and again["parent"] != shown["parent"]
    assert await second.wait() == 0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, "
            "daemon=True).start()",
            "started a thread",
        ),
        (
            "import no_such_module",
            "its imports failed (ModuleNotFoundError: No module named 'no_such_module')",
        ),
    ],
    ids=["thread", "error"],
)
async def test_server_that_cannot_fork_is_replaced_by_new_processes_and_one_log_line(
    forks: Forks, caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    (forks.folder / "preloaded.py").write_text(source)
    starter, env = (
        forks.starter("preloaded"),
        {"PYTHONPATH": f"{forks.folder}:{cli_env()['PYTHONPATH']}"},
    )
    for _ in range(2):
        process = await starter.start(["--help"], os.open(os.devnull, os.O_WRONLY), cli_env(env))
        assert not isinstance(process, ForkedProcess) and await process.wait() == 0
    (line,) = caplog.messages
    assert reason in line


async def test_folder_that_cannot_be_used_leaves_new_processes(
    forks: Forks, caplog: pytest.LogCaptureFixture
) -> None:
    (forks.folder / "file").touch()
    forks.folder /= "file"
    starter = forks.starter()
    process = await starter.start(["--help"], os.open(os.devnull, os.O_WRONLY), cli_env())
    assert not isinstance(process, ForkedProcess) and await process.wait() == 0
    (line,) = caplog.messages
    assert str(forks.folder) in line


def test_process_tied_by_a_pipe_is_killed_even_while_it_is_stopped() -> None:
    code = (
        "import os, sys, signal; from fleet.process.parent_death import die_with_pipe; "
        "die_with_pipe(int(sys.argv[1])); "
    )
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGSTOP)", str(read_end)]
    with subprocess.Popen(command, env=cli_env(), pass_fds=[read_end]) as process:
        wait_until(
            lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED,
            "the process to be stopped",
        )
        os.close(write_end)
        assert process.wait(timeout=20) == -signal.SIGKILL
    os.close(read_end)


@pytest.mark.parametrize(
    "setting", [{"preload_workers": False}, {"engine": "fake"}, {"engine": "vllm"}], ids=str
)
def test_roles_without_torch_or_with_the_setting_off_use_no_server(setting: dict[str, Any]) -> None:
    config = FleetConfig.model_validate(setting)
    assert not isinstance(fork_client.make_starter(config, config.roles()[0]), ForkStarter)
    assert isinstance(fork_client.make_starter(FleetConfig(), config.roles()[0]), ForkStarter)
