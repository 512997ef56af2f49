"""A worker that is lost during an answer: frozen past its lease and resumed, or killed while a
standby worker is loaded.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner

from fleet.cli.main import app
from fleet.control import keys, scripts
from fleet.control.connect import connect, first_text, run, text
from fleet.core.chunk import Chunk, decode_chunk
from fleet.core.ids import Epoch, RequestId, StageName, WorkerId, place_of
from fleet.graphs import DEFAULT_GRAPH, GRAPHS
from tests.control_plane import appended
from tests.disturbances import on_chunk
from tests.e2e.fleets import (
    FAKE,
    PATIENCE_S,
    START_S,
    ProcessFleet,
    fleet_up,
    owner_of,
    process_of,
    wait_for_another_owner,
    wait_for_workers,
    worker_ids,
)
from tests.harness import answer, answer_disturbed, assert_same, fake_spec_of, gateway_at, in_step
from tests.support import run_cli, stream_entries, wait_until

pytestmark = pytest.mark.one_file_in(10, "processes")

GRAPH = GRAPHS[DEFAULT_GRAPH]
STAGE = GRAPH.stages[1].name
OUT = GRAPH.edges_from(STAGE)[0]


async def compare_disturbed_answer(
    fleet: ProcessFleet, disturb: Callable[[RequestId], None]
) -> RequestId:
    """Call `disturb` in the middle of an answer, and compare the answer with an undisturbed one;
    return its request id.
    """
    async with gateway_at(fleet.redis_url, fleet.config) as client:
        expected = await answer(client, fake_spec_of(fleet.config))
        spec = fake_spec_of(fleet.config)
        after_chunk = on_chunk(GRAPH.edges[0].name, 8, lambda: disturb(spec.id))
        assert_same(await answer_disturbed(client, spec, None, after_chunk), expected)
    return spec.id


def output_log(control: redis.Redis, request: RequestId) -> list[Chunk]:
    return [
        decode_chunk(fields[b"h"])
        for _, fields in stream_entries(control, keys.edge(request, OUT.name))
    ]


def late_write(control: redis.Redis, request: RequestId, epoch: Epoch) -> str:
    """Append a chunk as the task's owner at `epoch`; return the script's reply."""
    chunk = Chunk(
        request=request, edge=OUT.name, index=len(output_log(control, request)), epoch=epoch
    )
    late = appended(chunk, stage=STAGE, consumer=StageName(OUT.target))
    return first_text(run(control, scripts.append([late])))


async def test_resumed_frozen_worker_changes_nothing_and_rejoins(tmp_path: Path) -> None:
    """A frozen worker that resumes changes nothing, and rejoins: SIGSTOP until another worker has
    claimed its task, then SIGCONT.
    """
    frozen_returns = ("lease.worker_ttl_s=1", "lease.end_hung_processes=false")
    settings = (*FAKE, *frozen_returns, f"stages.{STAGE}.replicas=2", *in_step(GRAPH))
    with fleet_up(tmp_path, *settings) as fleet, connect(fleet.redis_url) as control:
        wait_for_workers(control, STAGE, 2)
        frozen: list[tuple[WorkerId, Epoch]] = []

        def freeze(request: RequestId) -> None:
            stale, epoch = owner_of(control, request, STAGE)
            frozen.append((stale, epoch))
            process_of(stale).suspend()
            try:
                wait_until(
                    lambda: stale not in worker_ids(control), "its lease to lapse", PATIENCE_S
                )
                wait_for_another_owner(control, request, STAGE, stale)
                assert late_write(control, request, epoch) == "stale"
            finally:
                process_of(stale).resume()

        request = await compare_disturbed_answer(fleet, freeze)
        ((stale, epoch),) = frozen
        epochs = [chunk.epoch for chunk in output_log(control, request)]
        assert epochs == sorted(epochs) and epoch in epochs and epochs[-1] > epoch, (
            "the old owner wrote no chunk after the new one"
        )
        fleet.running.wait_for("it was fenced; the worker joins again", timeout_s=PATIENCE_S)

        def rejoined() -> list[WorkerId]:
            return [
                worker
                for worker in worker_ids(control)
                if place_of(worker) == place_of(stale) and worker != stale
            ]

        assert len(wait_until(rejoined, "the worker to rejoin", PATIENCE_S)) == 1


async def test_answer_needs_no_conductor_even_if_a_worker_is_killed(tmp_path: Path) -> None:
    """An answer needs no conductor even if a worker is killed: the conductor gets SIGSTOP, and the
    task's owner SIGKILL, after which its keeper fences it.
    """
    settings = (*FAKE, "lease.worker_ttl_s=3600", f"stages.{STAGE}.replicas=2", *in_step(GRAPH))
    with fleet_up(tmp_path, *settings) as fleet, connect(fleet.redis_url) as control:
        wait_for_workers(control, STAGE, 2)
        leader = WorkerId(text(control.get(keys.CONDUCTOR)).partition("|")[0])

        def kill(request: RequestId) -> None:
            killed, _ = owner_of(control, request, STAGE)
            process_of(killed).kill()
            wait_for_another_owner(control, request, STAGE, killed)

        process_of(leader).suspend()
        try:
            request = await compare_disturbed_answer(fleet, kill)
            wait_until(
                lambda: not control.sismember(keys.LIVE, request),
                "the request to be closed",
                PATIENCE_S,
            )
            assert text(control.hget(keys.request(request), "state")) == "finished"
        finally:
            process_of(leader).resume()


def reported_workers(fleet: ProcessFleet, *, standby: bool) -> set[str]:
    """Return the stage's workers, active or on standby, as `fleet status` reports them."""
    workers = json.loads(run_cli("status", "--json", cwd=fleet.folder, env=fleet.env).stdout)[
        "workers"
    ]
    return {
        worker["id"]
        for worker in workers
        if worker["role"] == STAGE and worker["standby"] is standby
    }


async def test_standby_replaces_a_killed_worker_and_the_restarted_one_stands_by(
    tmp_path: Path,
) -> None:
    """A standby worker replaces a killed one, and the restarted worker stands by. The answer
    resumes without a model load, since the standby is loaded and the lease outlasts the test.
    """
    settings = (*FAKE, "lease.worker_ttl_s=3600", f"stages.{STAGE}.standby=1", *in_step(GRAPH))
    stands_by = rf"worker {STAGE}@\S+ stands by\n"
    with fleet_up(tmp_path, *settings) as fleet, connect(fleet.redis_url) as control:
        fleet.running.wait_for(stands_by, timeout_s=START_S)
        (first,), (second,) = (
            reported_workers(fleet, standby=standby) for standby in (False, True)
        )
        owners: list[str] = []

        def kill(request: RequestId) -> None:
            killed, _ = owner_of(control, request, STAGE)
            process_of(killed).kill()
            owners.extend([killed, wait_for_another_owner(control, request, STAGE, killed)])

        await compare_disturbed_answer(fleet, kill)
        assert owners == [first, second], "the standby was loaded, and had no task before"
        fleet.running.wait_for(rf"{stands_by}(?:.*\n)*.*{stands_by}", timeout_s=START_S)
        (waiting,) = reported_workers(fleet, standby=True)
        assert reported_workers(fleet, standby=False) == {second} and waiting not in (first, second)
        assert fleet.running.stop(timeout_s=30) == 0


def test_up_help_mentions_standby() -> None:
    done = CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "140"})
    assert done.exit_code == 0 and "standby" in done.output
