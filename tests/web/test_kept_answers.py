"""Answers that a gateway keeps: their links work after Redis has forgotten them."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.config.web_schema import HistoryConfig
from fleet.core.clock import now_us
from fleet.core.events import RequestEnded
from fleet.core.ids import RequestId
from fleet.telemetry.trace import RequestTrace
from fleet.telemetry.views import FeedEntry
from tests.support import await_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_telemetry import FakeTelemetry
from tests.web.plausible import busy
from web.fleet_api import answer_keeper
from web.fleet_api.answer_keeper import AnswerKeeper
from web.gateway.gateway import Gateway


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep answers as soon as they have ended."""
    for name in ("SETTLE_S", "WRITE_POLL_S", "LOCK_POLL_S"):
        monkeypatch.setattr(answer_keeper, name, 0.01)


def keeping(loaded: Loaded, folder: Path, *, max_mib: int = 16, sound: bool = True) -> Loaded:
    history = HistoryConfig(folder=folder / "history", max_mib=max_mib, sound=sound)
    return Loaded(
        checkpoint=loaded.checkpoint,
        config=loaded.config.model_copy(update={"history": history}),
        frontend=loaded.frontend,
    )


@pytest.fixture
def gateway(loaded: Loaded, tmp_path: Path) -> Iterator[ServedGateway]:
    with serving(keeping(loaded, tmp_path)) as gateway:
        yield gateway


@pytest.fixture
def fleet(gateway: ServedGateway) -> FakeTelemetry:
    reported = busy(gateway.client.graph)
    gateway.client.show(reported)
    return reported


def ended(fleet: FakeTelemetry, is_wanted: Callable[[RequestTrace], bool]) -> RequestTrace:
    """Return a request that has ended and whose texts may be kept."""
    body = json.dumps({"model": "omni"})
    found = next(trace for trace in fleet.traces.values() if trace.ended_us and is_wanted(trace))
    fleet.traces[found.id] = msgspec.structs.replace(found, body=body)
    return fleet.traces[found.id]


def forget(fleet: FakeTelemetry) -> None:
    """Forget every request, as Redis does after their retention."""
    fleet.traces.clear()
    fleet.edge_logs.clear()
    fleet.rows.clear()


def shown(gateway: ServedGateway, request: str) -> dict[str, Any]:
    detail = gateway.http.get(f"/v1/fleet/requests/{request}").raise_for_status().json()
    return {name: value for name, value in detail.items() if name != "now_us"}


def test_pinned_answer_is_read_after_redis_has_forgotten_it(
    gateway: ServedGateway, fleet: FakeTelemetry
) -> None:
    request = ended(fleet, lambda trace: (trace.id, "audio") in fleet.edge_logs).id
    path = f"/v1/fleet/requests/{request}"
    before = shown(gateway, request)
    audio, trace = (gateway.http.get(f"{path}/{part}").content for part in ("audio", "trace"))
    assert before["answer"] and audio[:4] == b"RIFF"
    assert gateway.http.post(f"{path}/pin").json()["pinned"]
    forget(fleet)
    assert shown(gateway, request) == before
    assert gateway.http.get(f"{path}/audio").content == audio
    assert gateway.http.get(f"{path}/trace").json() == json.loads(trace)
    page = gateway.http.get(f"/requests/{request}")
    assert page.status_code == 200 and before["answer"] in unescape(page.text)
    (kept,) = gateway.http.get("/v1/fleet/kept").json()["data"]
    assert (kept["id"], kept["why"], kept["pinned"]) == (request, ["pinned"], True)
    assert not gateway.http.delete(f"{path}/pin").json()["pinned"]
    assert not gateway.http.get("/v1/fleet/kept?why=pinned").json()["data"][0]["pinned"]


def test_unknown_request_cannot_be_pinned(gateway: ServedGateway, fleet: FakeTelemetry) -> None:
    assert gateway.http.post("/v1/fleet/requests/req-none/pin").status_code == 404
    assert gateway.http.get("/v1/fleet/kept?why=bored").status_code == 400


def test_server_that_keeps_nothing_says_so(loaded: Loaded, tmp_path: Path) -> None:
    with serving(keeping(loaded, tmp_path, max_mib=0)) as gateway:
        reported = busy(gateway.client.graph)
        gateway.client.show(reported)
        request = ended(reported, lambda _: True).id
        refused = gateway.http.post(f"/v1/fleet/requests/{request}/pin")
        assert refused.status_code == 409 and "history.max_mib" in refused.text
        assert not (tmp_path / "history").exists()


@asynccontextmanager
async def keeper_of(loaded: Loaded, fleet: FakeTelemetry) -> AsyncIterator[Gateway]:
    """Run the keeper of a gateway without its server."""
    client = loaded.fake_client()
    client.show(fleet)
    gateway = Gateway(loaded.config, client, loaded.frontend)
    keeper = AnswerKeeper(gateway)
    keeper.start()
    try:
        yield gateway
    finally:
        await keeper.stop()


def end(fleet: FakeTelemetry, trace: RequestTrace, state: str = "failed") -> None:
    event = RequestEnded(request=trace.id, state=state)
    fleet.say(FeedEntry(id=f"{now_us() // 1000}-{len(fleet.feed)}", event=event))


async def kept_names(gateway: Gateway) -> dict[RequestId, tuple[str, ...]]:
    return {one.request: one.why for one in await gateway.history.newest(50)}


async def followed(fleet: FakeTelemetry) -> None:
    async def is_followed() -> bool:
        return fleet.is_followed

    await await_until(is_followed, "a keeper to follow the events")


async def is_kept(gateway: Gateway, trace: RequestTrace, why: str) -> None:
    async def has_it() -> bool:
        return why in (await kept_names(gateway)).get(trace.id, ())

    await await_until(has_it, f"answer {trace.id} to be kept")


async def test_failed_answer_and_one_with_dropouts_are_kept_by_themselves(
    loaded: Loaded, tmp_path: Path
) -> None:
    loaded = keeping(loaded, tmp_path)
    fleet = busy(loaded.config.graph_declaration())
    failed = ended(fleet, lambda trace: trace.state == "failed")
    fine = ended(fleet, lambda trace: trace.state == "finished")
    other = ended(fleet, lambda trace: trace.state == "finished" and trace.id != fine.id)
    async with keeper_of(loaded, fleet) as gateway:
        await followed(fleet)
        end(fleet, other, "finished")
        end(fleet, failed)
        gateway.playback_reports.note(fine.id, 1000, 2)
        await is_kept(gateway, failed, "failed")
        await is_kept(gateway, fine, "dropouts")
        assert await kept_names(gateway) == {failed.id: ("failed",), fine.id: ("dropouts",)}
        record = await gateway.history.read(failed.id)
        assert record is not None and failed.error is not None
        assert failed.error.encode() in record.record


async def test_nothing_that_was_said_is_kept_of_an_answer_that_must_not_be_stored(
    loaded: Loaded, tmp_path: Path
) -> None:
    loaded = keeping(loaded, tmp_path)
    fleet = busy(loaded.config.graph_declaration())
    trace = ended(fleet, lambda trace: (trace.id, "text") in fleet.edge_logs)
    for body in (json.dumps({"model": "omni", "store": False}), ""):
        fleet.traces[trace.id] = msgspec.structs.replace(trace, body=body)
        async with keeper_of(loaded, fleet) as gateway:
            await AnswerKeeper(gateway).keep(trace.id, ["failed"])
            kept = await gateway.history.read(trace.id)
        assert kept is not None and not kept.sound
        record = msgspec.msgpack.decode(kept.record)
        detail = record["detail"]
        assert not any(detail[name] for name in ("prompt", "answer", "body", "prompt_ids"))
        assert not record["logs"] and detail["state"] == trace.state


async def test_of_two_gateways_one_follows_and_the_other_takes_over(
    loaded: Loaded, tmp_path: Path
) -> None:
    loaded = keeping(loaded, tmp_path)
    fleets = [busy(loaded.config.graph_declaration()) for _ in range(2)]
    first, second = (ended(fleet, lambda trace: trace.state == "failed") for fleet in fleets)
    async with keeper_of(loaded, fleets[0]) as leading:
        await followed(fleets[0])
        async with keeper_of(loaded, fleets[1]):
            end(fleets[0], first)
            await is_kept(leading, first, "failed")
            assert not fleets[1].is_followed
    async with keeper_of(loaded, fleets[1]) as following:
        await followed(fleets[1])
        end(fleets[1], second)
        await is_kept(following, second, "failed")
