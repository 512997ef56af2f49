"""Contract of a gateway's connection to the fleet, for the real one and for the fake in memory that
the tests of `web` use.

The fleet behind the real connection has fake engines.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleet.config import FleetConfig
from fleet.control.stream import ClientStream
from fleet.control.voice import Saved
from fleet.core.chunk import Chunk
from fleet.core.clock import now_us
from fleet.core.errors import Aborted, BadInput, Conflict, FleetError, GatewayStopping, NotFound
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName, WorkerId
from fleet.core.request import RequestSpec
from fleet.models.qwen3_omni.tiny_tokenizer import build_tokenizer
from fleet.telemetry.trace import RequestFilter, RequestTrace, SoundGaps
from fleet.telemetry.views import LogQuery
from tests.harness import fake_spec_of, gateway, ready, thread_fleet
from tests.support import await_until
from tests.web.fake_client import RATE_HZ, FakeClient, Script
from web.gateway.fleet_port import FleetPort

UNKNOWN = RequestId("req-unknown")
KEEP_S = 60


@dataclass(slots=True)
class ConnectedFleet:
    """A fleet, real or fake, and a gateway's connection to it."""

    client: FleetPort
    config: FleetConfig

    def spec(self, num_tokens: int = 20) -> RequestSpec:
        return fake_spec_of(self.config, num_tokens=num_tokens)

    async def begin(self) -> tuple[RequestSpec, ClientStream]:
        """Submit a request that is still running after its first chunks, and read one chunk."""
        spec = self.spec(num_tokens=5_000)
        stream = await self.client.requests.submit(spec, None)
        assert (await anext(stream)).request == spec.id
        return spec, stream

    async def trace_in(self, request: RequestId, state: str) -> RequestTrace:
        async def found() -> RequestTrace | None:
            trace = await self.client.telemetry.trace(request)
            return trace if trace is not None and trace.state == state else None

        trace = await await_until(found, f"the request to be {state}")
        assert trace is not None
        return trace


@pytest.fixture(params=["real", "fake"])
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ConnectedFleet]:
    if request.param == "fake":
        config = FleetConfig(data_dir=tmp_path)
        script = Script(text="word " * 3_000, num_samples=3_000 * RATE_HZ)
        yield ConnectedFleet(
            FakeClient(config.graph_declaration(), build_tokenizer(), script), config
        )
        return
    with thread_fleet(request.getfixturevalue("redis_url"), f"data_dir={tmp_path}") as threads:
        async with gateway(threads) as client:
            await ready(client)
            yield ConnectedFleet(client, threads.config)


async def read(stream: ClientStream) -> list[Chunk]:
    return [chunk async for chunk in stream]


def by_edge(chunks: list[Chunk]) -> dict[EdgeName, list[Chunk]]:
    return {
        edge: [chunk for chunk in chunks if chunk.edge == edge]
        for edge in {chunk.edge for chunk in chunks}
    }


async def test_answer_is_streamed_to_its_end_traced_listed_and_logged(
    fleet: ConnectedFleet,
) -> None:
    telemetry, spec = fleet.client.telemetry, fleet.spec()
    assert await fleet.client.requests.check_admission(spec.id, spec.outputs) > 0
    edges = by_edge(await read(await fleet.client.requests.submit(spec, None)))
    assert set(edges) == set(spec.outputs)
    for chunks in edges.values():
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    trace = await fleet.trace_in(spec.id, "finished")
    graph = fleet.config.graph_declaration()
    assert {edge.name for edge in trace.edges} == {
        edge.name for edge in graph.edges_for(spec.outputs)
    }
    assert {edge.name: edge.consumed for edge in trace.edges if edge.name in edges} == {
        e: len(c) for e, c in edges.items()
    }
    stages = graph.stages_for(spec.outputs)
    assert [task.stage for task in trace.tasks] == [*stages, CLIENT]
    assert {task.state for task in trace.tasks} == {"finished"} and all(
        task.owner for task in trace.tasks
    )
    assert (trace.prompt_ids, trace.outputs, trace.sampling) == (
        spec.prompt_ids,
        spec.outputs,
        spec.sampling,
    )
    assert (
        0 < trace.created_us <= trace.ended_us <= trace.now_us
        and not trace.code
        and trace.error is None
    )
    page = await telemetry.list_requests(RequestFilter(state="finished", text=spec.id))
    (row,) = page.rows
    assert row.id == spec.id and [task.stage for task in row.tasks] == list(stages)
    assert set(row.first_us) == set(spec.outputs) and row.ended_us == trace.ended_us
    assert page.counts["finished"] == 1 and not page.next and await telemetry.num_live() == 0
    for edge, chunks in edges.items():
        assert await telemetry.has_edge_log(spec.id, edge)
        assert [chunk.index for chunk in await telemetry.edge_log(spec.id, edge)] == [
            chunk.index for chunk in chunks
        ]


@pytest.mark.parametrize("by_api", [True, False])
async def test_aborted_request_ends_once(fleet: ConnectedFleet, by_api: bool) -> None:
    requests = fleet.client.requests
    spec, stream = await fleet.begin()
    assert await fleet.client.telemetry.num_live() == 1
    if by_api:
        assert await requests.abort(spec.id)
        with pytest.raises(Aborted):
            await read(stream)
    else:
        await stream.abort("the client left")
    trace = await fleet.trace_in(spec.id, "aborted")
    assert trace.code == "aborted" and trace.error == (
        "cancelled through the API" if by_api else "the client left"
    )
    assert (
        not await requests.abort(spec.id)
        and trace.ended_us
        and await fleet.client.telemetry.num_live() == 0
    )


async def test_request_is_resumed_from_its_first_chunk(fleet: ConnectedFleet) -> None:
    spec = fleet.spec()
    before = await read(await fleet.client.requests.submit(spec, None))
    await fleet.trace_in(spec.id, "finished")
    resumed = await fleet.client.requests.resume(spec.id)
    assert resumed is not None and resumed[0] == spec
    assert by_edge(await read(resumed[1])) == by_edge(before)


async def test_stopping_gateway_ends_streams_and_leaves_requests_resumable(
    fleet: ConnectedFleet,
) -> None:
    spec, stream = await fleet.begin()
    fleet.client.requests.detach_all()
    with pytest.raises(GatewayStopping):
        await read(stream)
    assert (await fleet.trace_in(spec.id, "running")).ended_us == 0
    resumed = await fleet.client.requests.resume(spec.id)
    assert resumed is not None
    first = [await anext(resumed[1]) for _ in range(6)]
    assert all(chunks[0].index == 0 for chunks in by_edge(first).values())
    await resumed[1].abort("the test is over")


async def test_unread_request_runs_on_to_its_end(fleet: ConnectedFleet) -> None:
    spec = fleet.spec()
    stream = await fleet.client.requests.submit(spec, None)
    await anext(stream)
    stream.run_on()
    await fleet.trace_in(spec.id, "finished")


async def test_unknown_request_is_neither_found_nor_changed(fleet: ConnectedFleet) -> None:
    client = fleet.client
    assert await client.requests.resume(UNKNOWN) is None and not await client.requests.abort(
        UNKNOWN
    )
    assert await client.telemetry.trace(UNKNOWN) is None and not await client.telemetry.edge_log(
        UNKNOWN, EdgeName("text")
    )
    assert not (await client.telemetry.list_requests(RequestFilter(text=UNKNOWN))).rows
    await client.telemetry.record_playback(UNKNOWN, played_samples=1, underruns=0)
    await client.telemetry.record_turn(UNKNOWN, voiced_end_us=1, decided_us=2)
    await client.telemetry.record_gaps(UNKNOWN, SoundGaps(num=1, longest_us=2))
    assert not await client.telemetry.claim_export(UNKNOWN, WorkerId(client.id))
    assert await client.telemetry.trace(UNKNOWN) is None


ORDERS: list[tuple[str, Callable[[FleetPort], Awaitable[object]]]] = [
    ("request_id", lambda client: client.operations.retry(UNKNOWN)),
    (
        "request_id",
        lambda client: client.operations.redeliver(UNKNOWN, StageName("talker"), Epoch(0)),
    ),
    ("request_id", lambda client: client.operations.retry_dead_letter(UNKNOWN)),
    ("request_id", lambda client: client.operations.drop_dead_letter(UNKNOWN)),
    ("worker_id", lambda client: client.operations.order_worker("absent", "drain")),
    ("job_id", lambda client: client.jobs.retry("no-job")),
    ("job_id", lambda client: client.jobs.stop("no-job")),
    ("job_id", lambda client: client.jobs.delete("no-job")),
    ("job_id", lambda client: client.jobs.read_file("no-job", "report.json")),
    ("state", lambda client: client.telemetry.list_requests(RequestFilter(state="odd"))),
    ("level", lambda client: client.telemetry.logs(LogQuery(level="odd"))),
    ("before", lambda client: client.telemetry.logs(LogQuery(), before="odd")),
]


async def test_order_or_query_for_nothing_is_refused_by_its_parameter(
    fleet: ConnectedFleet,
) -> None:
    for param, call in ORDERS:
        with pytest.raises(BadInput) as refused:
            await call(fleet.client)
        assert refused.value.param == param, refused.value.message
        assert isinstance(refused.value, NotFound) == param.endswith("_id")


async def test_workers_of_every_role_and_the_gateway_are_listed(fleet: ConnectedFleet) -> None:
    telemetry = fleet.client.telemetry
    *workers, own = await telemetry.workers()
    assert {view.role for view in workers} == {
        role.name for role in fleet.config.roles()
    } and own.role == ""
    assert own.id == fleet.client.id and all(
        view.takes_tasks and view.capacity and view.started_us for view in workers
    )
    assert await telemetry.missing_roles() == [] and await telemetry.dead_letters() == []


async def test_retried_request_has_a_new_id_and_the_same_prompt(fleet: ConnectedFleet) -> None:
    spec = fleet.spec()
    await read(await fleet.client.requests.submit(spec, None))
    again = await fleet.client.operations.retry(spec.id)
    resumed = await fleet.client.requests.resume(again)
    assert again != spec.id and resumed is not None
    assert (resumed[0].retry_of, resumed[0].prompt_ids) == (spec.id, spec.prompt_ids)
    assert await read(resumed[1]) and (await fleet.trace_in(again, "finished")).retry_of == spec.id


async def test_voice_session_is_written_by_its_last_holder(fleet: ConnectedFleet) -> None:
    voice = fleet.client.voice
    first = await voice.hold("s", KEEP_S, "", new=True)
    assert (
        first is not None
        and not first.fields
        and await voice.hold("s", KEEP_S, "", new=True) is None
    )
    saved = await voice.save(
        "s", first.epoch, "", KEEP_S, {"view": b"v", "state": b"x", "away_us": b"1"}
    )
    again = await voice.save("s", first.epoch, "", KEEP_S, {"more": b"m"}, ["view"])
    assert saved is again is Saved.OK and await voice.views() == {}
    second = await voice.hold("s", KEEP_S, "")
    assert (
        second is not None
        and second.epoch > first.epoch
        and second.fields == {"state": b"x", "more": b"m"}
    )
    assert await voice.save("s", first.epoch, "", KEEP_S, {"view": b"old"}) is Saved.STALE
    assert not await voice.end("s", first.epoch)
    assert await voice.save("s", second.epoch, "", KEEP_S, {"view": b"new"}) is Saved.OK
    assert await voice.views() == {"s": b"new"}
    assert {"state", "more", "view"} <= {*await voice.field_names("s")}
    assert await voice.read("s", ["more", "view", "none"]) == {"more": b"m", "view": b"new"}
    assert not await voice.field_names("none") and not await voice.read("none", ["view"])
    assert await voice.end("s", second.epoch) and not await voice.end("s", second.epoch)
    assert await voice.hold("s", KEEP_S, "") is None and not await voice.was_ended("s", "")


async def test_operator_end_of_a_voice_session_is_known_to_its_owner(fleet: ConnectedFleet) -> None:
    voice = fleet.client.voice
    assert (
        await voice.hold("s", KEEP_S, "/1", new=True) and await voice.hold("s", KEEP_S, "") is None
    )
    assert await voice.end("s") and not await voice.end("s")
    assert await voice.was_ended("s", "/1") and not await voice.was_ended("s", "")
    await voice.save_secret("secret:1", b"settings", KEEP_S)
    expires_at = now_us() // 1_000_000 + KEEP_S
    assert await voice.save_transcript("audio-1", "the words", expires_at) == expires_at
    assert await voice.save_transcript("audio-1", "the words", expires_at + 7) == expires_at, (
        "the first expiry is repeated"
    )
    assert (await voice.secret("secret:1"), await voice.secret("secret:2")) == (b"settings", None)
    assert (await voice.transcript("audio-1"), await voice.transcript("audio-2")) == (
        "the words",
        None,
    )


async def test_login_ends_at_its_time_or_when_it_is_removed(fleet: ConnectedFleet) -> None:
    logins = fleet.client.logins
    await logins.add("a", KEEP_S)
    ends_us = await logins.ends_us("a")
    assert ends_us is not None and 0 < ends_us - now_us() <= KEEP_S * 1_000_000
    await logins.renew("a", 2 * KEEP_S)
    assert (await logins.ends_us("a") or 0) > ends_us
    await logins.remove("a")
    await logins.renew("a", KEEP_S)
    assert await logins.ends_us("a") is None


async def test_response_is_found_and_deleted_by_its_owner_only(fleet: ConnectedFleet) -> None:
    responses = fleet.client.responses
    assert await responses.load("resp_1", "anna") is None
    await responses.save("resp_1", "anna", b"first")
    await responses.save("resp_1", "anna", b"second")
    assert await responses.load("resp_1", "anna") == b"second"
    assert await responses.load("resp_1", "ben") is None
    assert not await responses.delete("resp_1", "ben")
    assert await responses.delete("resp_1", "anna")
    assert not await responses.delete("resp_1", "anna")
    assert await responses.load("resp_1", "anna") is None


async def test_job_is_queued_canceled_retried_and_deleted(fleet: ConnectedFleet) -> None:
    jobs = fleet.client.jobs
    job = await jobs.submit("bench", {"measure": "scale"})
    assert job.state == "queued" and [view.id for view in await jobs.list_jobs()] == [job.id]
    with pytest.raises(Conflict):
        await jobs.retry(job.id)
    await jobs.stop(job.id)
    with pytest.raises(Conflict):
        await jobs.stop(job.id)
    again = await jobs.retry(job.id)
    assert again.id != job.id and again.arguments == job.arguments and again.state == "queued"
    await jobs.delete(job.id)
    assert await jobs.find(job.id) is None and [view.id for view in await jobs.list_jobs()] == [
        again.id
    ]
    with pytest.raises(FleetError):
        await jobs.submit("no-such-kind", {})
