"""Traces, request index, workers, queues and series, read from a real Redis, agree with the
requests' events.
"""

import asyncio
from itertools import product

import msgspec
import pytest

from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.control.telemetry.series import growth_of, rates_of
from fleet.core.errors import BadInput, Conflict, NotFound
from fleet.core.events import TaskFailed
from fleet.core.ids import CLIENT, RequestId, WorkerId
from fleet.core.request import AudioClip
from fleet.telemetry.trace import END_STATES, EdgeTrace, RequestFilter, RequestTrace, SoundGaps
from fleet.telemetry.views import SERIES_STEP_S
from tests.control_plane import KEEP_S, REQUEST, STAGE, WORKER, Control
from tests.harness import answer, fake_spec, gateway, open_fleet, thread_fleet, wait_ended
from tests.support import await_until

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
IN_STEP = "edges.audio.credits=4"


def events_of_stage(trace: RequestTrace, stage: str) -> list[str]:
    return [mark.what for mark in trace.events if mark.stage == stage]


async def test_trace_contains_every_event_in_order(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        spec = msgspec.structs.replace(fake_spec(fleet), traceparent=CALLER)
        received = await answer(client, spec)
        for request, num_samples in ((spec.id, 123), (RequestId("req-none"), 1)):
            await client.telemetry.record_playback(request, played_samples=num_samples, underruns=2)
        await client.telemetry.record_turn(spec.id, voiced_end_us=1_000_000, decided_us=1_500_000)
        await client.telemetry.record_gaps(spec.id, SoundGaps(num=2, longest_us=70_000))
        trace = await wait_ended(client, spec.id)
        gateways = [WorkerId(client.id), WorkerId("gateway@other:1:aa")]
        claims = [await client.telemetry.claim_export(spec.id, one) for one in gateways * 2]
    assert claims == [True, False, False, False], "one gateway exports an answer, once"
    assert trace.traceparent == CALLER
    assert trace.playback is not None
    assert (trace.playback.played_samples, trace.playback.underruns) == (123, 2)
    assert trace.turn is not None and trace.gaps == SoundGaps(num=2, longest_us=70_000)
    assert (trace.turn.voiced_end_us, trace.turn.decided_us) == (1_000_000, 1_500_000)
    assert (
        trace.state == "finished"
        and trace.error is None
        and trace.kind == "speech"
        and trace.prompt_ids == spec.prompt_ids
    )
    assert [mark.at_us for mark in trace.events] == sorted(mark.at_us for mark in trace.events)
    assert trace.events[0].what == "submitted" and trace.events[-1].what == "ended"
    graph = fleet.config.graph_declaration()
    for stage in graph.stages:
        events = events_of_stage(trace, stage.name)
        assert (
            events[:2] == ["granted", "claimed"] and events[-1] == "finished" and "output" in events
        ), stage.name
    for task in trace.tasks:
        if task.stage == CLIENT:
            continue
        assert (
            trace.created_us
            <= task.granted_us
            <= task.claimed_us
            <= task.first_us
            <= task.finished_us
            <= trace.ended_us
        )
        assert task.owner.startswith(f"{task.stage}@")
        (batches,) = task.batches
        assert batches.worker == task.owner and batches.num_steps > 0, "of every owner"
        assert (batches.mean, batches.most) == (1, 1), "the only request is alone in its batches"
    for edge in trace.edges:
        assert (
            edge.produced == edge.consumed > 0
            and edge.num_bytes > 0
            and edge.first_us <= edge.last_us
        )
        check_receipt(trace, edge)
    audio_edge = next(edge for edge in trace.edges if edge.medium == "audio")
    assert audio_edge.rows == len(received[audio_edge.name])
    assert [span.worker for span in trace.kv if span.stage == "thinker"] == [trace.tasks[0].owner]
    assert all(span.from_us <= span.to_us for span in trace.kv)


async def test_playback_reports_are_kept_in_order_and_thinned_out(redis_url: str) -> None:
    num_reports = 150
    async with open_fleet(redis_url) as (fleet, client):
        spec = fake_spec(fleet)
        await answer(client, spec)
        for number in range(num_reports):
            await client.telemetry.record_playback(
                spec.id, played_samples=100 * number, underruns=number // 50
            )
        trace = await wait_ended(client, spec.id)
    assert trace.playback is not None and trace.playback.played_samples == 14_900
    earlier = trace.earlier_playback
    assert 32 <= len(earlier) <= 64
    for name in ("played_samples", "underruns", "at_us"):
        values = [getattr(report, name) for report in (*earlier, trace.playback)]
        assert values == sorted(values), name
    assert earlier[-1].played_samples == 14_800, "the newest are all kept"
    assert earlier[0].played_samples < 1_000, "and the first moments are still known"


def check_receipt(trace: RequestTrace, edge: EdgeTrace) -> None:
    """Check the consumer's statistics of an edge."""
    task = next(task for task in trace.tasks if task.stage == edge.target)
    (receipt,) = [receipt for receipt in task.receipts if receipt.edge == edge.name]
    assert 0 < receipt.num_chunks <= edge.produced
    assert 0 <= receipt.hop_mean_us <= receipt.hop_max_us
    assert receipt.first_us <= receipt.last_us
    assert receipt.worker == task.owner or edge.target == CLIENT


async def test_trace_contains_a_lost_worker_and_its_kv_spans(redis_url: str) -> None:
    with thread_fleet(redis_url, IN_STEP) as fleet:
        fleet.add_worker("talker")
        async with gateway(fleet) as client:
            spec = fake_spec(fleet, num_tokens=60)
            stream, lost = await client.requests.submit(spec, None), ""
            async for chunk in stream:
                if chunk.edge == "audio" and chunk.index == 1 and not lost:
                    owner = await asyncio.to_thread(
                        fleet.owner, spec.id, fleet.config.graph_declaration().stages[1].name
                    )
                    lost = owner.worker
                    await asyncio.to_thread(fleet.kill, owner)
            trace = await wait_ended(client, spec.id)
            gone = [view for view in await client.telemetry.workers(with_gone=True) if view.gone]
    events = events_of_stage(trace, "talker")
    assert events.count("claimed") == 2 and events.index("lost") > events.index("claimed")
    (mark,) = [mark for mark in trace.events if mark.what == "lost"]
    assert mark.worker == lost and mark.detail == "died"
    first, second = [span for span in trace.kv if span.stage == "talker"]
    assert first.worker == lost != second.worker and first.to_us == mark.at_us <= second.from_us
    assert [(view.id, view.state) for view in gone] == [(lost, "died")] and gone[0].role == "talker"


def test_trace_of_a_failure_names_stage_and_cause(control: Control) -> None:
    epoch = control.own()
    failed = TaskFailed(
        request=REQUEST, stage=STAGE, epoch=epoch, code="engine_error", message="no | good"
    )
    assert control.run(scripts.fail(failed)) == "ok"
    lines = [text(line) for line in control.client.lrange(keys.trace(REQUEST), 0, -1)]
    assert lines[-2].split("|", 5)[1:] == [
        "failed",
        STAGE,
        str(epoch),
        "lm@test:1:a",
        "engine_error: no | good",
    ]
    assert (
        lines[-1].endswith("|ended||||failed: no | good")
        and 0 < control.client.ttl(keys.trace(REQUEST)) <= KEEP_S
    )
    assert control.client.zrange(keys.index("failed"), 0, -1) == [REQUEST.encode()]
    assert not control.client.exists(keys.index("running"), keys.index("submitted"))


async def test_request_index_pages_filters_and_counts(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        specs = [fake_spec(fleet, num_tokens=4, seed=seed) for seed in range(7)]
        for spec in specs:
            await answer(client, spec)
            await wait_ended(client, spec.id)
        aborted_spec = fake_spec(fleet, num_tokens=4)
        await (await client.requests.submit(aborted_spec, None)).abort("no more")
        telemetry, newest_first = (
            client.telemetry,
            sorted([*(s.id for s in specs), aborted_spec.id], reverse=True),
        )
        seen: list[str] = []
        before = ""
        while True:
            page = await telemetry.list_requests(RequestFilter(), before=before, limit=3)
            seen += [row.id for row in page.rows]
            if not (before := page.next):
                break
        assert seen == newest_first and page.counts == {
            **dict.fromkeys(page.counts, 0),
            "finished": 7,
            "aborted": 1,
        }
        whole = await telemetry.list_requests(RequestFilter(state="finished"), limit=7)
        assert (
            len(whole.rows) == 7
            and whole.next == ""
            and all(row.tasks and row.first_us for row in whole.rows)
        )
        owner = whole.rows[0].tasks[0].worker
        assert (
            len(
                (
                    await telemetry.list_requests(
                        RequestFilter(worker=owner, kind="speech", stage="talker")
                    )
                ).rows
            )
            >= 7
        )
        assert not (await telemetry.list_requests(RequestFilter(kind="text"))).rows
        assert not (await telemetry.list_requests(RequestFilter(min_ms=3_600_000))).rows
        aborted = RequestFilter(state="aborted", text=aborted_spec.id[8:])
        counts = (await telemetry.list_requests(aborted)).counts
        assert counts == {**dict.fromkeys(page.counts, 0), "aborted": 1}
        first = whole.rows[-1]
        around = RequestFilter(from_us=first.created_us, to_us=first.created_us)
        assert [row.id for row in (await telemetry.list_requests(around)).rows] == [first.id]
        for nobody in (
            RequestFilter(to_us=first.created_us - 120_000_000),
            RequestFilter(from_us=page.now_us + 3_600_000_000),
        ):
            assert not (await telemetry.list_requests(nobody)).rows
        assert [
            r.id
            for r in (await telemetry.list_requests(RequestFilter(text=aborted_spec.id[8:]))).rows
        ] == [aborted_spec.id]
        with pytest.raises(BadInput, match="no state 'asleep'"):
            await telemetry.list_requests(RequestFilter(state="asleep"))


def test_request_index_removes_expired_requests(control: Control) -> None:
    control.abort()
    assert control.client.zrange(keys.INDEX_ALL, 0, -1) == [REQUEST.encode()]
    control.client.zadd(keys.index("expires"), {REQUEST: 1})
    control.submit("req-2")
    control.abort(RequestId("req-2"))
    assert control.client.zrange(keys.INDEX_ALL, 0, -1) == [b"req-2"]
    for state in END_STATES:
        assert control.client.zrange(keys.index(state), 0, -1) == (
            [b"req-2"] if state == "aborted" else []
        )


async def test_retried_request_retains_its_audio(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        spec = fake_spec(fleet)
        received = await answer(client, spec)
        again = await client.operations.retry(spec.id)
        trace = await wait_ended(client, again)
        assert trace.state == "finished" and trace.retry_of == spec.id != again
        audio_log = await client.telemetry.edge_log(
            again, next(e.name for e in trace.edges if e.medium == "audio")
        )
        data = b"".join(t.data or b"" for chunk in audio_log for t in chunk.tensors.values())
        assert len(data) == received[audio_log[0].edge].nbytes
        found = await client.requests.resume(again)
        assert found is not None and len([chunk async for chunk in found[1]]) >= len(audio_log)
        with pytest.raises(NotFound):
            await client.operations.retry(RequestId("req-none"))


async def test_spoken_prompt_can_be_retried_for_a_minute(redis_url: str) -> None:
    async with open_fleet(redis_url) as (fleet, client):
        clip = AudioClip(offset_samples=0, num_samples=4, rate_hz=16_000)
        spec = msgspec.structs.replace(fake_spec(fleet), audio=(clip,))
        await answer(client, spec, b"\0" * 16)
        await wait_ended(client, spec.id)
        assert 0 < fleet.clients[0].ttl(keys.blob(spec.id)) <= 60
        again = await client.operations.retry(spec.id)
        assert (await wait_ended(client, again)).state == "finished"
        fleet.clients[0].delete(keys.blob(spec.id))
        with pytest.raises(Conflict, match="deleted"):
            await client.operations.retry(spec.id)


async def test_series_sums_counts_of_all_gateways(redis_url: str) -> None:
    with thread_fleet(redis_url) as fleet:
        async with gateway(fleet) as one, gateway(fleet) as other:
            for client in (one, other):
                spec = fake_spec(fleet)
                await answer(client, spec)
                await wait_ended(client, spec.id)
                client.telemetry.record_underruns(3)
                client.telemetry.record_rtf(0.5)
                await client.telemetry.write_series(client.id)
            points = await one.telemetry.series()
        async with gateway(fleet) as third:
            assert sum(point.underruns for point in await third.telemetry.series()) == 6, (
                "a new gateway reads the counts of all gateways"
            )
    assert len(points) == 720 and points[-1].at_us > points[0].at_us
    assert (
        sum(point.submitted for point in points) == 2
        and sum(p.ended.get("finished", 0) for p in points) == 2
    )
    measured = [point for point in points if point.first_audio_p95_ms is not None]
    assert measured and all(
        0 < (p.first_text_p50_ms or 0) <= (p.first_text_p95_ms or 0) for p in measured
    )
    assert any(point.rtf_p95 is not None and 0.5 <= point.rtf_p95 < 0.6 for point in points)
    assert any(
        "thinker" in point.running and point.task_p50_ms.get("thinker", 0) > 0 for point in points
    )


def test_rates_cover_the_last_minute() -> None:
    steps = [(n, {"in:lm": 6, "out:lm": 3, "pulled:rows": 1_000 * n}) for n in range(20)]
    assert rates_of(steps, "in") == {"lm": 6 / SERIES_STEP_S} and rates_of(steps, "out") == {
        "lm": 3 / SERIES_STEP_S
    }
    assert growth_of(steps, "pulled") == {"rows": 1_000 / SERIES_STEP_S}
    assert growth_of([*steps, (20, {"pulled:rows": 0})], "pulled") == {"rows": 0.0}, (
        "the count of a departed worker is gone"
    )
    assert rates_of([], "in") == {} and growth_of(steps[:1], "pulled") == {"rows": 0.0}


async def test_pending_grants_are_listed_with_their_age(redis_url: str) -> None:
    async with open_fleet(redis_url, without="talker") as (fleet, client_of_fleet):
        fields: dict[str, str | bytes] = {"kind": "worker", "capacity": "1"}
        run(
            fleet.clients[0],
            scripts.register(WorkerId("talker@frozen:1:a"), "talker", 10**12, fields),
        )
        spec = fake_spec(fleet)
        stream = await client_of_fleet.requests.submit(spec, None)

        async def waits() -> bool:
            return any(
                queue.pending
                for queue in await client_of_fleet.telemetry.queues()
                if queue.role == "talker"
            )

        await await_until(waits, "a grant to be pending")
        queue = next(
            queue for queue in await client_of_fleet.telemetry.queues() if queue.role == "talker"
        )
        (grant,) = queue.pending
        assert (
            grant.request == spec.id
            and grant.stage == "talker"
            and not grant.read
            and 0 <= grant.age_s < 60
        )
        await stream.abort("enough")


def test_trace_is_bounded(control: Control) -> None:
    for _ in range(150):
        control.own()
        control.fence()
        control.register(WORKER)
    assert control.client.llen(keys.trace(REQUEST)) == 400


async def test_request_id_with_a_colon_is_not_found(redis_url: str) -> None:
    """A request id with a colon is not found: ids come from URLs, and such an id could name the key
    of a task or of an edge's log.
    """
    async with open_fleet(redis_url) as (fleet, client):
        spec = fake_spec(fleet)
        await answer(client, spec)
        reads = (client.telemetry.trace, client.operations.retry, client.requests.resume)
        others = [
            RequestId(f"{spec.id}:{rest}") for rest in ("edge:audio", "task:thinker", "trace")
        ]
        for read, other in product(reads, others):
            with pytest.raises(NotFound):
                await read(other)
