"""A process fleet that trains a draft head: runs survive the death of every process that takes
part, and leave nothing behind.
"""

import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from fleet.control import keys
from fleet.control.connect import connect, text
from fleet.core.ids import WorkerId, place_of
from fleet.drafts.trainer.folder import VERSIONS
from tests.disturbances import AppendOnlyFile
from tests.e2e.fleets import ProcessFleet, fleet_up, worker_ids
from tests.support import (
    RedisProcess,
    Running,
    freeze_process,
    run_cli,
    start_cli,
    wait_until,
)

pytestmark = pytest.mark.one_file_in(5, "answers of processes")

SETTINGS = (
    "graph=text",
    "checkpoint=tiny",
    "web.port=0",
    "training.enabled=true",
    "training.window_samples=2",
    "training.batch_samples=2",
    "training.passes=1",
    "training.max_in_flight=4",
    "training.held_out=0.2",
    "stages.trainer.standby=1",
    "stages.lm.speculation.drafter=eagle3",
    "lease.gateway_timeout_s=2",
)
NUM_SAMPLES = 40


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    with fleet_up(tmp_path_factory.mktemp("training"), *SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def pool(fleet: ProcessFleet) -> Path:
    path = fleet.folder / "pool.jsonl"
    write_pool(path)
    return path


def write_pool(path: Path) -> None:
    lines = (
        {"prompt": f"question {number}", "answer": f"the answer is {number}"}
        for number in range(NUM_SAMPLES)
    )
    path.write_text("\n".join(map(json.dumps, lines)))


@contextmanager
def training(
    fleet: ProcessFleet, pool: Path, env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Running]:
    """Begin a training run; yield it once it has trained on some samples. `env`: environment in
    addition to the fleet's.
    """
    own = {**fleet.env, **env}
    with start_cli("train", "--pool", str(pool), cwd=fleet.folder, env=own) as run:
        run.wait_for(r"running: [1-9]\d* of \d+ samples trained on")
        yield run


def pid_of(fleet: ProcessFleet, role: str) -> int:
    """Return the pid of the active trainer, of the worker that computes captures, of the conductor,
    or of Redis, by `role`.
    """
    if role in ("conductor", "redis"):
        with connect(fleet.redis_url) as control:
            leader = WorkerId(text(control.get(keys.CONDUCTOR)).partition("|")[0])
            return (
                place_of(leader)[1]
                if role == "conductor"
                else int(control.info("server")["process_id"])
            )
    trainer = fleet.get("/v1/fleet/training")["trainer"]
    worker = (
        trainer
        if role == "trainer"
        else fleet.get("/v1/fleet/drafters")["data"][0]["workers"][0]["worker"]
    )
    return place_of(WorkerId(worker))[1]


def assert_finished(run: Running) -> int:
    """Check that the run has finished; return the number of the head version that it made."""
    done = run.wait_for(
        rf"finished: {NUM_SAMPLES} of {NUM_SAMPLES} samples trained on, \d+ windows, version (\d+)",
        timeout_s=90,
    )
    assert run.process.wait(timeout=30) == 0
    return int(done[1])


def wait_for_nothing_live(fleet: ProcessFleet) -> None:
    wait_until(
        lambda: not fleet.get("/v1/fleet/requests?state=running")["data"],
        "no request to be open",
        30,
    )


@pytest.mark.parametrize(
    ("role", "signum"),
    [
        ("trainer", signal.SIGKILL),
        ("lm", signal.SIGKILL),
        ("trainer", signal.SIGSTOP),
        ("conductor", signal.SIGKILL),
        ("redis", signal.SIGKILL),
    ],
)
def test_training_run_survives_a_lost_process(
    fleet: ProcessFleet, pool: Path, role: str, signum: signal.Signals
) -> None:
    with training(fleet, pool) as run:
        lost = psutil.Process(pid_of(fleet, role))
        lost.send_signal(signum)
        assert assert_finished(run) >= 1
        wait_until(lambda: not lost.is_running(), "the process to be ended, also a stopped one", 30)
    wait_for_nothing_live(fleet)


def files_of(fleet: ProcessFleet) -> dict[str, str]:
    """Return the hash of every file that readers of the trainers' folder may see, by its path."""
    folder = fleet.config.drafts_dir
    paths = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    return {
        str(path): hashlib.sha256((folder / path).read_bytes()).hexdigest()
        for path in paths
        if not any(part.startswith(".") for part in path.parts)
    }


def test_trainer_that_was_frozen_changes_nothing_when_it_continues(tmp_path: Path) -> None:
    """The trainer is frozen while it trains, and continues once its successor has finished the run:
    its files stay as they are, and the next run is trained by the successor. Its keeper, which
    would end it, is told to leave it.
    """
    pool = tmp_path / "pool.jsonl"
    write_pool(pool)
    with fleet_up(tmp_path, *SETTINGS, "lease.end_hung_processes=false") as fleet:
        with training(fleet, pool) as run:
            frozen = fleet.get("/v1/fleet/training")["trainer"]
            pid = place_of(WorkerId(frozen))[1]
            freeze_process(pid)
            try:
                number = assert_finished(run)
                visible = files_of(fleet)
            finally:
                os.kill(pid, signal.SIGCONT)
        with connect(fleet.redis_url) as control:
            wait_until(
                lambda: any(
                    place_of(worker)[1] == pid and worker != frozen
                    for worker in worker_ids(control)
                ),
                "the frozen trainer to join again",
                60,
            )
        assert files_of(fleet) == visible
        with training(fleet, pool) as run:
            assert assert_finished(run) == number + 1
        wait_for_nothing_live(fleet)


def test_training_goes_on_after_redis_lost_its_last_writes(tmp_path: Path) -> None:
    """Redis forgets the second of two runs: the checkpoints and version that it made. The third run
    continues from them, and the version gets its number again.
    """
    data, pool = tmp_path / "redis", tmp_path / "pool.jsonl"
    data.mkdir()
    write_pool(pool)
    server = RedisProcess(data)
    server.start()
    try:
        with fleet_up(tmp_path, *SETTINGS, env={"REDIS_URL": server.url}) as fleet:
            env = {"REDIS_URL": server.url}
            log, windows = AppendOnlyFile(server, data), list[int]()
            for number in (1, 2, 3):
                if number == 2:
                    log.record_size()
                elif number == 3:
                    log.restart()
                with training(fleet, pool, env) as run:
                    assert assert_finished(run) == number
                windows.append(fleet.get("/v1/fleet/training")["figures"]["windows"])
            versions = fleet.get("/v1/fleet/training")["versions"]
    finally:
        server.stop()
    assert windows[0] < windows[1] < windows[2], "no window is lost"
    assert [each["number"] for each in versions] == [3, 2, 1]
    assert len({each["sha256"] for each in versions}) == 3


def test_captures_of_a_killed_run_are_aborted(fleet: ProcessFleet, pool: Path) -> None:
    with training(fleet, pool) as run:
        run.process.kill()
    wait_for_nothing_live(fleet)
    with training(fleet, pool) as run:
        assert_finished(run)


def test_stopped_run_makes_no_version(fleet: ProcessFleet, pool: Path) -> None:
    before = len(fleet.get("/v1/fleet/training")["versions"])
    with training(fleet, pool) as run:
        assert run.stop(signal.SIGINT) == 1
    assert "stopped:" in run.output() and "version" not in run.output()
    assert len(fleet.get("/v1/fleet/training")["versions"]) == before
    wait_for_nothing_live(fleet)


def test_version_is_promoted_and_rolled_back_by_command(fleet: ProcessFleet, pool: Path) -> None:
    with training(fleet, pool) as run:
        number = assert_finished(run)
    assert (
        run_cli("draft", "promote", str(number), cwd=fleet.folder, env=fleet.env).stdout
        == f"version {number}\n"
    )

    def versions() -> set[int]:
        return {
            each["figures"]["version"]
            for each in fleet.get("/v1/fleet/drafters")["data"][0]["workers"]
        }

    wait_until(lambda: versions() == {number}, "the worker to draft with it", 20)
    listed = run_cli(
        "draft", "versions", cwd=fleet.folder, env={**fleet.env, "COLUMNS": "200"}
    ).stdout
    assert re.search(rf"│ {number} +│ \* ", listed), listed
    assert run_cli("draft", "rollback", cwd=fleet.folder, env=fleet.env).returncode == 0
    wait_until(lambda: number not in versions(), "the worker to draft with the one before", 20)
    (sha256,) = [
        each["sha256"]
        for each in fleet.get("/v1/fleet/training")["versions"]
        if each["number"] == number
    ]
    added = run_cli(
        "draft",
        "add",
        str(fleet.config.drafts_dir / VERSIONS / sha256),
        cwd=fleet.folder,
        env=fleet.env,
    )
    assert added.stdout == f"version {number}\n", "equal bytes are one version"
    exported = run_cli("draft", "export", str(number), "out", cwd=fleet.folder, env=fleet.env)
    assert exported.returncode == 0 and (fleet.folder / "out" / "config.json").is_file(), (
        exported.stderr
    )
    refused = run_cli("draft", "promote", "999", cwd=fleet.folder, env=fleet.env)
    assert refused.returncode == 1 and refused.stderr.splitlines()[-1].startswith(
        "fleet: no version 999"
    ), refused.stderr


def test_samples_are_forgotten_by_command(fleet: ProcessFleet, pool: Path) -> None:
    with training(fleet, pool) as run:
        assert_finished(run)
    assert run_cli("train", "forget", cwd=fleet.folder, env=fleet.env).returncode == 0
    wait_until(
        lambda: fleet.get("/v1/fleet/training")["figures"]["replay_samples"] == 0,
        "no sample to be held",
        20,
    )


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"prompt": "a", "answer": ""}', "pool.jsonl:1: answer must be text"),
        ("{", "pool.jsonl:1: no JSON"),
        ('{"answer": "b"}', "pool.jsonl:1: needs either prompt or messages"),
        ('{"prompt": "a", "reply": "b"}', "pool.jsonl:1: unknown field reply"),
        (
            '{"messages": [{"role": "robot", "content": "a"}]}',
            "pool.jsonl:1: prompt, and each message's content, must be text",
        ),
    ],
)
def test_wrong_line_of_a_pool_is_named(
    fleet: ProcessFleet, tmp_path: Path, line: str, cause: str
) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text(line + "\n")
    done = run_cli("train", "--pool", str(path), cwd=fleet.folder, env=fleet.env)
    assert done.returncode == 1 and cause in done.stderr.splitlines()[-1], done.stderr
