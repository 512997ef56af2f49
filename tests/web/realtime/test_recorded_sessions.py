"""Voice sessions as they are recorded: their turns while they live, at another gateway, and after
their end.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.config.web_schema import HistoryConfig
from fleet.core.errors import EngineError, NoWorker
from fleet.core.ids import RequestId
from fleet.history.file import HistoryFile
from fleet.history.sessions import KeptSession, KeptSessionStore
from tests.support import wait_until
from tests.web.conftest import Loaded, ServedGateway, bounded, serving, with_voice
from tests.web.console import html_audit
from tests.web.fake_client import FRAME_SAMPLES, RATE_HZ, Script
from tests.web.realtime.socket_client import opened
from tests.web.realtime.speech_samples import QUESTION, silence, speech
from web.console import formats
from web.realtime.session_views import shown_id

SPOKEN = silence(300) + speech(QUESTION) + silence(800)
HEARD = "What time is it?"
MIB = 1 << 20


def keeping(loaded: Loaded, folder: Path, **settings: Any) -> Loaded:
    history = HistoryConfig(folder=folder / "history", **settings)
    return replace(loaded, config=loaded.config.model_copy(update={"history": history}))


@pytest.fixture
def gateway(loaded: Loaded, tmp_path: Path) -> Iterator[ServedGateway]:
    with serving(keeping(loaded, tmp_path)) as gateway:
        yield gateway


@pytest.fixture
def hearing(cascade: Loaded, tmp_path: Path) -> Iterator[ServedGateway]:
    with serving(keeping(with_voice(cascade, partial_ms=0), tmp_path)) as gateway:
        gateway.client.script = Script(heard=HEARD, num_samples=FRAME_SAMPLES)
        yield gateway


def recorded(gateway: ServedGateway, session: str) -> dict[str, Any]:
    return gateway.http.get(f"/v1/fleet/sessions/{session}").raise_for_status().json()


def until_recorded(
    gateway: ServedGateway, session: str, is_wanted: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until the record of a session is as wanted, and return it."""
    found: list[dict[str, Any]] = []

    def has_it() -> bool:
        answer = gateway.http.get(f"/v1/fleet/sessions/{session}")
        if answer.status_code == 200 and is_wanted(answer.json()):
            found.append(answer.json())
        return bool(found)

    wait_until(has_it, f"the record of session {session}")
    return found[0]


def has_ended(record: dict[str, Any]) -> bool:
    return record["ended_us"] > 0


def num_ended(number: int) -> Callable[[dict[str, Any]], bool]:
    return lambda record: sum(bool(turn["outcome"]) for turn in record["turns"]) == number


def page_of(gateway: ServedGateway, path: str) -> str:
    answer = gateway.http.get(path)
    assert answer.status_code == 200, answer.text[:500]
    assert not (faults := html_audit.read(answer.text).faults), faults
    assert len(answer.content) < 100_000
    return answer.text


def shown(page: str) -> str:
    return " ".join(" ".join(html_audit.read(page).text).split())


async def test_turns_are_recorded_in_order_with_both_texts(gateway: ServedGateway) -> None:
    async with opened(gateway) as page:
        for text in ("first question", "second question"):
            await page.complete(text)
        record = until_recorded(gateway, page.session, num_ended(2))
        assert [turn["said"] for turn in record["turns"]] == ["first question", "second question"]
        assert {turn["answer"] for turn in record["turns"]} == {gateway.client.script.text}
        assert [turn["outcome"] for turn in record["turns"]] == ["completed", "completed"]
        requests = [spec.id for spec, _ in gateway.client.submitted if spec.kind == "voice"]
        assert [turn["request"] for turn in record["turns"]] == requests
        live = page_of(gateway, f"/sessions/{page.session}")
        assert "Live: 2 turns in" in shown(live) and "all answered" in shown(live)
        assert all(f'href="/requests/{request}"' in live for request in requests)
        assert f'href="/sessions/{page.session}"' in page_of(gateway, "/sessions")
    record = until_recorded(gateway, page.session, has_ended)
    assert not record["is_live"] and len(record["turns"]) == 2
    ended = shown(page_of(gateway, f"/sessions/{page.session}"))
    assert "Fine: 2 turns in" in ended and "second question" in ended
    (kept,) = gateway.http.get("/v1/fleet/kept/sessions").json()["data"]
    assert (kept["id"], kept["turns"], kept["why"]) == (page.session, 2, [])


async def test_spoken_turn_has_its_words_its_sound_and_its_wait(hearing: ServedGateway) -> None:
    async with opened(hearing) as page:
        await page.speak(SPOKEN)
        await page.until("fleet.timing")
        record = until_recorded(
            hearing, page.session, lambda found: num_ended(1)(found) and found["turns"][0]["parts"]
        )
        (turn,) = record["turns"]
        assert turn["has_speech"] and turn["said"] == HEARD and turn["voice_to_voice_ms"] > 0
        root = f"/v1/fleet/sessions/{page.session}/turns"
        assert hearing.http.get(f"{root}/1/speech").content[:4] == b"RIFF"
        for number, status in (("2", 404), ("none", 400)):
            assert hearing.http.get(f"{root}/{number}/speech").status_code == status
        html = page_of(hearing, f"/sessions/{page.session}")
        assert f'src="{root}/1/speech"' in html and "waiting for you to finish" in html
        assert f'src="/v1/fleet/requests/{turn["request"]}/audio"' in html
    until_recorded(hearing, page.session, has_ended)
    ended = page_of(hearing, f"/sessions/{page.session}")
    assert "deleted when a session ends" in ended and HEARD in ended
    assert hearing.http.get(f"{root}/1/speech").status_code == 404


async def test_words_that_nobody_transcribed_are_said_to_be_missing(
    gateway: ServedGateway,
) -> None:
    async with opened(gateway) as page:
        await page.speak(SPOKEN)
        await page.completed()
        (turn,) = until_recorded(gateway, page.session, num_ended(1))["turns"]
        assert turn["said"] is None and turn["has_speech"]
        text = shown(page_of(gateway, f"/sessions/{page.session}"))
        assert "session.audio.input.transcription" in text


@pytest.mark.parametrize(
    ("script", "outcome", "sentence"),
    [
        (Script(refusal=NoWorker("no worker of role talker")), "refused", "1 refused (overloaded)"),
        (Script(fail_at=3, failure=EngineError("it broke")), "failed", "1 failed (engine_error)"),
    ],
)
async def test_answer_that_did_not_come_is_told(
    gateway: ServedGateway, script: Script, outcome: str, sentence: str
) -> None:
    gateway.client.script = script
    async with opened(gateway) as page:
        await page.ask("hello")
        assert (await page.done())["status"] == "failed"
        until_recorded(gateway, page.session, num_ended(1))
    until_recorded(gateway, page.session, has_ended)
    text = shown(page_of(gateway, f"/sessions/{page.session}"))
    assert "With failures: 1 turn in" in text and sentence in text
    listed = page_of(gateway, f"/sessions?why={outcome}")
    assert page.session in listed and page.session not in page_of(gateway, "/sessions?why=moved")


async def test_interrupted_answer_tells_what_was_played(gateway: ServedGateway) -> None:
    gateway.client.script = Script(num_samples=8 * RATE_HZ, gap_s=0.02)
    async with opened(gateway) as page:
        await page.ask("count")
        response = (await page.until("response.created"))["response"]["id"]
        await page.until_audio(response, FRAME_SAMPLES)
        await page.speak(speech(QUESTION))
        assert (await page.done())["status_details"]["reason"] == "turn_detected"
        record = until_recorded(gateway, page.session, num_ended(1))
        turn = record["turns"][0]
        assert (turn["outcome"], turn["cause"]) == ("cancelled", "turn_detected")
        assert turn["played"] != turn["answer"]
        text = shown(page_of(gateway, f"/sessions/{page.session}"))
        assert "1 interrupted by the caller" in text and "Played until it was cut" in text


async def test_dropouts_belong_to_the_turn_whose_player_reported_them(
    gateway: ServedGateway,
) -> None:
    async with opened(gateway) as page:
        done = await page.complete("hello")
        await page.complete("again")
        report = {"response_id": done["id"], "samples": 10, "underruns": 3}
        await page.send("fleet.played", **report)
        record = until_recorded(
            gateway, page.session, lambda found: any(t["underruns"] for t in found["turns"])
        )
        assert [turn["underruns"] for turn in record["turns"]] == [3, 0]


async def test_nothing_that_was_said_is_kept_if_the_client_asks_for_that(
    gateway: ServedGateway, tmp_path: Path
) -> None:
    async with opened(gateway) as page:
        await page.update(store=False)
        await page.complete("a secret")
        body = gateway.client.submitted[-1][0].body
        assert '"store": false' in body, "so that the answer is not kept either"
    record = until_recorded(gateway, page.session, has_ended)
    assert not record["has_texts"] and record["turns"][0]["outcome"] == "completed"
    kept = KeptSessionStore(HistoryFile(tmp_path / "history", 16 * MIB, 14)).read(page.session)
    assert kept is not None and b"a secret" not in kept.record
    assert gateway.client.script.text.encode() not in kept.record
    assert "asked that nothing be stored" in page_of(gateway, f"/sessions/{page.session}")


async def test_session_that_moves_keeps_its_turns_and_names_both_gateways(
    loaded: Loaded, tmp_path: Path
) -> None:
    settings = keeping(loaded, tmp_path)
    with serving(settings) as first, serving(settings, client=first.client) as second:
        async with opened(first) as page:
            await page.complete("at the first")
            until_recorded(first, page.session, num_ended(1))
            await page.drop()
        async with opened(second, session=page.session) as again:
            await again.complete("at the second")
            record = until_recorded(second, page.session, num_ended(2))
            assert [t["said"] for t in record["turns"]] == ["at the first", "at the second"]
        until_recorded(second, page.session, has_ended)


def test_session_whose_gateway_was_killed_claims_no_end(
    gateway: ServedGateway, tmp_path: Path
) -> None:
    record = {
        "object": "fleet.session",
        "view": {
            "id": "sess_killed",
            "gateway": "gateway@a:1:00",
            "state": "speaking",
            "turns": 1,
            "voice_to_voice_last_ms": None,
            "voice_to_voice_median_ms": None,
            "interruptions": 0,
            "underruns": 0,
            "input_rate_hz": 24_000,
            "voice": "v",
            "request_id": None,
            "created_us": 1_800_000_000_000_000,
            "seen_us": 1_800_000_060_000_000,
        },
        "turns": [{"number": 1, "response": "resp_1", "said": "hello", "gateways": ["g"]}],
    }
    KeptSessionStore(HistoryFile(tmp_path / "history", 16 * MIB, 14)).keep(
        KeptSession(
            session="sess_killed",
            began_us=1_800_000_000_000_000,
            seen_us=1_800_000_060_000_000,
            num_turns=1,
            record=msgspec.msgpack.encode(record),
        )
    )
    text = shown(page_of(gateway, "/sessions/sess_killed"))
    assert "End not recorded: 1 turn in 60 s" in text and "not known here" in text
    assert "sess_killed" in page_of(gateway, "/sessions?state=unknown")
    assert "sess_killed" not in page_of(gateway, "/sessions?state=ended")


async def test_read_only_gateway_shows_no_id_that_opens_a_session(
    loaded: Loaded, tmp_path: Path
) -> None:
    settings = keeping(loaded, tmp_path)
    hidden = bounded(settings, read_only=True)
    with serving(settings) as first, serving(hidden, client=first.client) as second:
        async with opened(first) as page:
            await page.complete("hello")
            until_recorded(first, page.session, num_ended(1))
            name = shown_id(page.session)
            assert page.session not in page_of(second, "/sessions")
            assert page.session not in page_of(second, f"/sessions/{name}")
        until_recorded(first, page.session, has_ended)
        assert "Fine: 1 turn" in shown(page_of(second, f"/sessions/{name}"))
        assert page.session not in page_of(second, f"/sessions/{name}")


def test_unknown_session_is_not_found(gateway: ServedGateway) -> None:
    for path in ("/sessions/sess_none", "/v1/fleet/sessions/sess_none"):
        assert gateway.http.get(path).status_code == 404
    assert gateway.http.get("/v1/fleet/kept/sessions?why=bored").status_code == 400


@pytest.mark.parametrize("kind", ["gateway", "hearing"])
async def test_page_of_a_spoken_turn_shows_that_turn_as_its_prompt(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Earlier turns are folded away, and their sound does not count as this turn's."""
    gateway: ServedGateway = request.getfixturevalue(kind)
    async with opened(gateway) as page:
        await page.complete("the first thing")
        for _ in range(2):
            await page.speak(SPOKEN)
            await page.completed()
        record = until_recorded(gateway, page.session, num_ended(3))
    html = page_of(gateway, f"/requests/{record['turns'][2]['request']}")
    prompt = html.partition("<h2>Prompt</h2>")[2].partition("</div>")[0]
    turn, _, earlier = prompt.partition("<details")
    assert turn.count("[audio") == 1 and "the first thing" not in turn
    assert "the first thing" in earlier
    (speech_s,) = re.findall(r'aria-label="your speech, ([^,]*), ended', html)
    clips = gateway.client.traces[RequestId(record["turns"][2]["request"])].audio
    assert speech_s == formats.seconds(clips[-1].duration_s)
    assert len(clips) == (2 if kind == "gateway" else 1)
