"""Answers as traces at a collector (`telemetry.otlp`), and the caller's trace context."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.sync.client import connect

from fleet.config.web_schema import OtlpConfig, TelemetryConfig
from fleet.core.clock import now_us
from fleet.core.errors import ConfigError
from fleet.core.events import RequestEnded
from fleet.core.ids import RequestId
from fleet.core.trace_context import parse_traceparent, span_id_of, trace_id_of
from fleet.telemetry.trace import RequestTrace
from fleet.telemetry.views import FeedEntry
from tests.support import await_until
from tests.web.collector import Collector, attributes_of, collecting
from tests.web.conftest import Loaded, ServedGateway, chat
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible_answers import OTHER, TALKER, add_answers
from tests.web.speech_stream_client import SpeechStreamClient
from web.fleet_api.otlp import exporter as answer_exporter
from web.fleet_api.otlp.exporter import AnswerExporter
from web.fleet_api.otlp.sender import read_headers
from web.gateway.gateway import Gateway

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export answers as soon as they have ended."""
    for name in ("SETTLE_S", "POLL_S"):
        monkeypatch.setattr(answer_exporter, name, 0.01)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def exporting(loaded: Loaded, **otlp: Any) -> Loaded:
    telemetry = TelemetryConfig(otlp=OtlpConfig.model_validate(otlp))
    return replace(loaded, config=loaded.config.model_copy(update={"telemetry": telemetry}))


@asynccontextmanager
async def exporter_of(
    loaded: Loaded, fleet: FakeTelemetry, made: list[AnswerExporter] | None = None
) -> AsyncIterator[Gateway]:
    """Run the export of a gateway without its server. `made`: list that gets the exporter."""
    client = loaded.fake_client()
    client.show(fleet)
    gateway = Gateway(loaded.config, client, loaded.frontend)
    exporter = AnswerExporter(gateway)
    exporter.start()
    if made is not None:
        made.append(exporter)

    async def is_followed() -> bool:
        return fleet.is_followed

    try:
        await await_until(is_followed, "the exporter to follow the events")
        yield gateway
    finally:
        await exporter.stop()


def end(fleet: FakeTelemetry, trace: RequestTrace) -> None:
    event = RequestEnded(request=trace.id, state=trace.state)
    fleet.say(FeedEntry(id=f"{now_us() // 1000}-{len(fleet.feed)}", event=event))


async def received(collector: Collector, trace: RequestTrace) -> dict[str, Any]:
    async def is_there() -> bool:
        return any(attributes_of(s).get("gen_ai.response.id") == trace.id for s in collector.spans)

    await await_until(is_there, f"the collector to have the answer {trace.id}")
    return collector.of(trace.id)


def count(gateway: Gateway, outcome: str) -> float:
    return (
        gateway.metrics.registry.get_sample_value(
            "fleet_exported_answers_total", {"outcome": outcome}
        )
        or 0.0
    )


async def counted(outcome: str, number: int, *gateways: Gateway) -> None:
    async def is_counted() -> bool:
        return sum(count(gateway, outcome) for gateway in gateways) == number

    await await_until(is_counted, f"{number} answers to be counted as {outcome}")


async def test_answer_whose_worker_died_is_exported_with_its_recovery(
    loaded: Loaded, collector: Collector, tmp_path: Path
) -> None:
    headers = tmp_path / "headers"
    headers.write_text("Authorization: Basic c2VjcmV0\n\nX-Scope-OrgID: fleet\n")
    headers.chmod(0o600)
    loaded = exporting(loaded, endpoint=collector.url, headers_file=headers)
    fleet = FakeTelemetry()
    trace = add_answers(fleet, [1, 2, 3])["interrupted"]
    async with exporter_of(loaded, fleet) as gateway:
        end(fleet, trace)
        spans = await received(collector, trace)
        await counted("sent", 1, gateway)
        assert not count(gateway, "lost")
    answer = attributes_of(spans["answer"])
    assert spans["answer"].name == "chat omni" and not spans["answer"].parent_span_id
    assert spans["answer"].trace_id.hex() == trace_id_of(trace.id, "")
    assert answer["gen_ai.operation.name"] == "chat"
    assert answer["gen_ai.request.model"] == answer["gen_ai.response.model"] == "omni"
    assert answer["gen_ai.output.type"] == "speech"
    assert answer["gen_ai.usage.input_tokens"] == len(trace.prompt_ids)
    assert answer["gen_ai.usage.output_tokens"] == 20
    assert answer["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.09)
    times = (spans["answer"].start_time_unix_nano, spans["answer"].end_time_unix_nano)
    assert times == (trace.created_us * 1000, trace.ended_us * 1000)
    assert {*spans} == {"answer", *(task.stage for task in trace.tasks)}
    talker = spans[TALKER]
    assert talker.trace_id == spans["answer"].trace_id
    (recovery,) = [event for event in talker.events if event.name == "fleet.recovery"]
    assert attributes_of(recovery) == {"fleet.worker": OTHER, "fleet.detail": "died"}
    claims = [attributes_of(e)["fleet.worker"] for e in talker.events if e.name == "fleet.claimed"]
    assert claims == [OTHER, f"{TALKER}@a:1:0a"]
    (sent,) = collector.headers
    assert (sent["authorization"], sent["x-scope-orgid"]) == ("Basic c2VjcmV0", "fleet")
    assert collector.paths == ["/v1/traces"]


async def test_one_gateway_of_two_exports_an_answer_and_the_other_after_its_death(
    loaded: Loaded, collector: Collector
) -> None:
    loaded = exporting(loaded, endpoint=f"{collector.url}/own/path")
    fleet = FakeTelemetry()
    answers = add_answers(fleet, [1])
    async with exporter_of(loaded, fleet) as first:
        async with exporter_of(loaded, fleet) as second:
            for name in ("fine", "slow", "failed"):
                end(fleet, answers[name])
                await received(collector, answers[name])
        end(fleet, answers["interrupted"])
        await received(collector, answers["interrupted"])
    await counted("sent", len(answers), first, second)
    ids = [span.span_id for span in collector.spans]
    assert len(ids) == len({*ids}) and {*collector.paths} == {"/own/path"}
    failed = collector.of(answers["failed"].id)["answer"]
    assert failed.status.code == 2 and attributes_of(failed)["error.type"] == "engine_error"


async def test_answers_that_the_collector_refuses_are_counted_and_logged(
    loaded: Loaded, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    loaded = exporting(loaded, endpoint=collector.url)
    fleet = FakeTelemetry()
    trace = add_answers(fleet, [1])["fine"]

    async with exporter_of(loaded, fleet) as gateway:
        with caplog.at_level(logging.WARNING, "fleet.web"):
            end(fleet, trace)
            await counted("lost", 1, gateway)
    (line,) = [one.getMessage() for one in caplog.records if one.name == "fleet.web"]
    assert line == (
        f"1 ended answers are not exported (telemetry.otlp): {collector.url} did not take them"
    )


async def test_answer_that_ended_just_before_the_gateway_stops_is_exported(
    loaded: Loaded, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_exporter, "SETTLE_S", 3600.0)
    fleet = FakeTelemetry()
    trace = add_answers(fleet, [1])["fine"]
    exporter: list[AnswerExporter] = []
    async with exporter_of(exporting(loaded, endpoint=collector.url), fleet, exporter):
        end(fleet, trace)

        async def is_waiting() -> bool:
            return exporter[0].num_waiting == 1

        await await_until(is_waiting, "the exporter to know the end of the answer")
    assert collector.of(trace.id)


async def test_ended_answers_beyond_the_bound_are_lost_oldest_first(
    loaded: Loaded, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_exporter, "MAX_WAITING", 2)
    monkeypatch.setattr(answer_exporter, "SETTLE_S", 3600.0)
    fleet = FakeTelemetry()
    answers = add_answers(fleet, [1])
    async with exporter_of(exporting(loaded, endpoint=collector.url), fleet) as gateway:
        for trace in answers.values():
            end(fleet, trace)
        await counted("lost", len(answers) - 2, gateway)
    sent = {attributes_of(span).get("gen_ai.response.id") for span in collector.spans} - {None}
    assert sent == {trace.id for trace in [*answers.values()][-2:]}, "the others, at the stop"


@pytest.mark.parametrize(("flags", "share", "is_sent"), [("01", 0.0, True), ("00", 1.0, False)])
async def test_caller_decides_about_the_export_of_its_answer(
    loaded: Loaded, collector: Collector, flags: str, share: float, is_sent: bool
) -> None:
    loaded = exporting(loaded, endpoint=collector.url, share=share)
    client = loaded.fake_client()
    gateway = Gateway(loaded.config, client, loaded.frontend)
    caller = f"00-{TRACE}-{SPAN}-{flags}"
    sender = AnswerExporter(gateway)._sender  # pyright: ignore[reportPrivateUsage]
    fine = add_answers(FakeTelemetry(), [1])["fine"]
    assert sender is not None and sender.wants(fine) is (share == 1.0)
    called = msgspec.structs.replace(fine, traceparent=caller)
    assert sender.wants(called) is is_sent
    assert sender.send([called])
    span = collector.of(fine.id)["answer"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)


def test_traceparent_is_kept_with_the_request_and_shown(gateway: ServedGateway) -> None:
    answer = gateway.http.post(
        "/v1/chat/completions",
        json={"model": "omni", "messages": [{"role": "user", "content": "hello"}]},
        headers={"traceparent": CALLER, "tracestate": "vendor=1"},
    )
    request = RequestId(answer.headers["x-request-id"])
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{span_id_of(request)}-01"
    assert gateway.client.spec_of(request).traceparent == CALLER
    detail = gateway.http.get(f"/v1/fleet/requests/{request}").json()
    assert (detail["trace_id"], detail["traceparent"]) == (TRACE, CALLER)
    assert TRACE in gateway.http.get(f"/requests/{request}").text
    plain = chat(gateway)
    assert "traceresponse" not in plain.headers
    own = gateway.http.get(f"/v1/fleet/requests/{plain.headers['x-request-id']}").json()
    assert own["trace_id"] == trace_id_of(own["id"], "") and not own["traceparent"]


def test_traceparent_of_a_socket_is_that_of_all_its_answers(
    cascade_gateway: ServedGateway,
) -> None:
    address = f"{cascade_gateway.url.replace('http', 'ws', 1)}/v1/audio/speech/stream"
    with connect(address, additional_headers={"traceparent": CALLER}, max_size=None) as socket:
        client = SpeechStreamClient(socket)
        client.configure()
        for said in ("Hello there.", "And again."):
            client.say(said)
            client.until("audio.done")
    assert {spec.traceparent for spec, _ in cascade_gateway.client.submitted} == {CALLER}
    assert len(cascade_gateway.client.submitted) >= 2


@pytest.mark.parametrize(
    "header",
    [
        "",
        CALLER.upper(),
        CALLER[:-1],
        f"{CALLER}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        "nonsense",
    ],
)
def test_malformed_traceparent_is_ignored(gateway: ServedGateway, header: str) -> None:
    assert parse_traceparent(header) is None
    answer = gateway.http.post(
        "/v1/chat/completions",
        json={"model": "omni", "messages": [{"role": "user", "content": "hello"}]},
        headers={"traceparent": header},
    )
    assert answer.status_code == 200 and "traceresponse" not in answer.headers
    assert not gateway.client.spec_of(RequestId(answer.headers["x-request-id"])).traceparent


def test_traceparent_of_a_later_version_is_read_and_two_headers_are_ignored(
    gateway: ServedGateway,
) -> None:
    later = parse_traceparent(f"cc-{TRACE}-{SPAN}-03-more")
    assert later is not None and later.header == CALLER
    answer = gateway.http.get("/v1/models", headers=[("traceparent", CALLER)] * 2)
    assert "traceresponse" not in answer.headers


def test_export_without_its_packages_names_the_command(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    loaded = exporting(loaded, endpoint="http://localhost:4318")
    gateway = Gateway(loaded.config, loaded.fake_client(), loaded.frontend)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[otlp\]'"):
        AnswerExporter(gateway)


def test_error_in_the_file_of_headers_names_the_line_and_not_its_content(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("X-One: 1\nsecret without a colon\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="line 2") as refused:
        read_headers(path)
    assert "secret" not in refused.value.message
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_headers(path)
