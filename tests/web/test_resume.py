"""A streamed answer resumes after any event, when its gateway or connection is lost, without loss
or repetition.
"""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from fleet.core.errors import EngineError
from tests.support import wait_until
from tests.web.conftest import HELLO, Loaded, ServedGateway, serving
from tests.web.fake_client import Script
from web import serve

BODY = {
    "model": "omni",
    "messages": HELLO,
    "stream": True,
    "modalities": ["text", "audio"],
    "audio": {"voice": "ethan", "format": "pcm16"},
    "stream_options": {"include_usage": True, "include_event_ids": True},
}


def events(lines: str) -> list[tuple[str, dict[str, object]]]:
    """Return (id, data) of every event; the id is "" if the event has none, and `[DONE]` has an
    empty object as data.
    """
    found: list[tuple[str, dict[str, object]]] = []
    for block in lines.strip().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if not line.startswith(":")
        )
        found.append(
            (fields.get("id", ""), {} if fields["data"] == "[DONE]" else json.loads(fields["data"]))
        )
    return found


def reported(found: list[tuple[str, dict[str, object]]]) -> tuple[str, bytes]:
    """Return the transcript and the audio in the events."""
    text, sound = "", b""
    for _, data in found:
        for choice in data.get("choices", []):  # type: ignore[attr-defined]
            audio = choice["delta"].get("audio") or {}
            text += audio.get("transcript") or ""
            sound += base64.b64decode(audio.get("data") or "")
    return text, sound


def streamed(gateway: ServedGateway) -> tuple[str, list[tuple[str, dict[str, object]]]]:
    response = gateway.http.post("/v1/chat/completions", json=BODY)
    return response.headers["x-request-id"], events(response.text)


def test_stopping_gateway_ends_stream_with_resume_hint(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "GRACE_S", 0.2)
    with ExitStack() as first:
        leaving = first.enter_context(serving(loaded))
        leaving.client.script = Script(stall_at=4)
        with (
            leaving.http.stream("POST", "/v1/chat/completions", json=BODY) as response,
            ThreadPoolExecutor() as pool,
        ):
            lines = response.iter_lines()
            before = [next(lines) for _ in range(8)]
            asked = pool.submit(
                leaving.http.post, "/v1/chat/completions", json={**BODY, "stream": False}
            )
            wait_until(lambda: len(leaving.client.streams) == 2, "the second to be asked")
            leaving.stop()
            began = events("\n".join([*before, *lines]))
            refused = asked.result()
    assert capsys.readouterr().err == ""
    *read_report, (_, error) = began
    assert error["error"]["code"] == "gateway_stopping"  # type: ignore[index]
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "gateway_stopping"
    assert not any(stream.aborted for stream in leaving.client.streams.values())
    with serving(loaded, client=leaving.client) as other:
        other.client.script = Script()
        last_id = [event_id for event_id, _ in read_report if event_id][-1]
        path = f"/v1/fleet/requests/{response.headers['x-request-id']}/stream"
        rest = events(other.http.get(path, headers={"last-event-id": last_id}).text)
        whole = events(other.http.get(path).text)
    assert [data for _, data in read_report + rest] == [data for _, data in whole]


@pytest.mark.parametrize("at", [1, 4, 9])
def test_answer_resumes_after_any_event(gateway: ServedGateway, at: int) -> None:
    request, whole = streamed(gateway)
    last_id = [event_id for event_id, _ in whole[: at + 1] if event_id][-1]
    resumed = gateway.http.get(
        f"/v1/fleet/requests/{request}/stream", headers={"last-event-id": last_id}
    )
    rest = events(resumed.text)
    kept = max(position for position, (event_id, _) in enumerate(whole) if event_id == last_id)
    text, sound = reported(whole[: kept + 1])
    more_text, more_sound = reported(rest)
    assert (text + more_text, sound + more_sound) == reported(whole)
    assert rest[-1] == whole[-1] and rest[-2] == whole[-2], "the usage and [DONE] are the same"
    assert [event_id for event_id, _ in rest if event_id] == [
        event_id for event_id, _ in whole[kept + 1 :] if event_id
    ]


def test_resume_without_id_sends_complete_answer(gateway: ServedGateway) -> None:
    request, whole = streamed(gateway)
    again = events(gateway.http.get(f"/v1/fleet/requests/{request}/stream").text)
    assert reported(again) == reported(whole) and again[0] == whole[0]


def test_resumed_answer_reports_failure(gateway: ServedGateway) -> None:
    request, _ = streamed(gateway)
    gateway.client.script = Script(fail_at=2, failure=EngineError("it broke"))
    last = events(gateway.http.get(f"/v1/fleet/requests/{request}/stream").text)[-1]
    assert last[1]["error"]["message"] == "it broke"  # type: ignore[index]


@pytest.mark.parametrize("last_id", ["", "5", "x.2", "1.3", "-1.0", "1.2.3", "9" * 4301 + ".0"])
def test_invalid_event_id_is_refused(gateway: ServedGateway, last_id: str) -> None:
    request, _ = streamed(gateway)
    refused = gateway.http.get(
        f"/v1/fleet/requests/{request}/stream", headers={"last-event-id": last_id}
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "Last-Event-ID"


def test_resume_of_unknown_request_is_not_found(gateway: ServedGateway) -> None:
    missing = gateway.http.get("/v1/fleet/requests/req-none/stream")
    assert missing.status_code == 404 and "req-none" in missing.json()["error"]["message"]


def test_head_request_does_not_take_over_answer(gateway: ServedGateway) -> None:
    request, _ = streamed(gateway)
    answer = gateway.http.head(f"/v1/fleet/requests/{request}/stream")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET"
