"""Realtime sessions that only transcribe: every turn becomes text, and nothing is answered."""

from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI
from openai.types.realtime import ClientSecretCreateResponse

from tests.clients.environments import REQUIREMENTS
from tests.support import await_until
from tests.web.conftest import Loaded, ServedGateway, serving
from tests.web.fake_client import AUDIO, Script
from tests.web.realtime.refused_socket import refusal_of
from tests.web.realtime.socket_client import Event, SocketClient, message, opened
from tests.web.realtime.speech_samples import question, silence
from tests.web.realtime.test_other_clients import HEARD_TEXT, run_client
from tests.web.realtime.test_other_clients import question as spoken_question
from web.realtime.snapshot import STATE

__all__ = ["spoken_question"]
_, LIVEKIT, PIPECAT = REQUIREMENTS
DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
STARTED, STOPPED = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"
COMMITTED = "input_audio_buffer.committed"
TURN = [STARTED, STOPPED, COMMITTED, "conversation.item.added", "conversation.item.done"]
TRANSCRIPTION = {"type": "transcription"}


@pytest.fixture
async def client(any_gateway: ServedGateway) -> AsyncIterator[SocketClient]:
    """A client of a transcription session, on graphs with and without a recogniser."""
    any_gateway.client.script = Script(heard=HEARD_TEXT)
    async with opened(any_gateway, "/v1/realtime", intent="transcription") as client:
        yield client


async def test_turn_becomes_its_transcript_and_nothing_else(
    client: SocketClient, any_gateway: ServedGateway
) -> None:
    await client.append(question())
    done = await client.until(COMPLETED)
    assert done["transcript"] == HEARD_TEXT
    kinds = client.kinds()
    assert [kind for kind in kinds if kind != DELTA] == ["session.created", *TURN, COMPLETED]
    deltas = [event["delta"] for event in client.events if event["type"] == DELTA]
    assert "".join(deltas) == HEARD_TEXT
    assert not any(AUDIO in spec.outputs for spec, _ in any_gateway.client.submitted)
    assert await client.events_before_refusal() == []


async def test_client_commits_its_turns_without_turn_detection(client: SocketClient) -> None:
    await client.detect_turns(None)
    await client.append(question())
    await client.send("input_audio_buffer.commit")
    item = (await client.until(COMMITTED))["item_id"]
    done = await client.until(COMPLETED)
    assert (done["item_id"], done["transcript"]) == (item, HEARD_TEXT)
    assert STARTED not in client.kinds()
    assert (await client.retrieve(item))["content"][0]["transcript"] == HEARD_TEXT


def test_session_object_has_the_fields_of_openais_type_only(client: SocketClient) -> None:
    session = client.events[0]["session"]
    assert set(session) == {"type", "object", "id", "include", "expires_at", "audio"}
    assert session["object"] == "realtime.transcription_session" and set(session["audio"]) == {
        "input"
    }
    heard = session["audio"]["input"]
    assert heard["transcription"] is not None
    detection = heard["turn_detection"]
    assert not detection["create_response"] and not detection["interrupt_response"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("response.create", {}),
        ("response.cancel", {}),
        ("conversation.item.create", {"item": message("hello")}),
        (
            "conversation.item.truncate",
            {"item_id": "item_1", "content_index": 0, "audio_end_ms": 0},
        ),
    ],
)
async def test_event_of_a_conversation_is_refused(
    client: SocketClient, any_gateway: ServedGateway, kind: str, fields: Event
) -> None:
    error = await client.refusal_of(kind, **fields)
    assert (error["param"], error["code"]) == ("type", "unsupported_value")
    assert not any_gateway.client.submitted


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"instructions": "Be brief."}, "instructions"),
        ({"tools": [{"type": "function", "name": "weather"}]}, "tools"),
        ({"output_modalities": ["text"]}, "output_modalities"),
        ({"max_output_tokens": 5}, "max_output_tokens"),
        ({"audio": {"output": {"voice": "marin"}}}, "audio.output"),
        ({"type": "realtime"}, "type"),
        (
            {
                "audio": {
                    "input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 5000}}
                }
            },
            "audio.input.turn_detection.idle_timeout_ms",
        ),
        ({"instructions": "", "tools": [], "tool_choice": "auto", "audio": {"output": {}}}, None),
    ],
)
async def test_field_of_responses_is_refused_by_name(
    client: SocketClient, fields: Event, refused: str | None
) -> None:
    errors, now = await client.update(**{**TRANSCRIPTION, **fields})
    assert [error["param"] for error in errors] == ([f"session.{refused}"] if refused else [])
    assert now == client.events[0]["session"]


async def test_update_makes_an_unused_session_one_of_transcription(
    any_gateway: ServedGateway,
) -> None:
    any_gateway.client.script = Script(heard=HEARD_TEXT)
    form = {"type": "audio/pcmu"}
    async with opened(any_gateway, "/v1/realtime") as client:
        errors, now = await client.update(
            **TRANSCRIPTION, audio={"input": {"format": form, "transcription": {"language": "en"}}}
        )
        assert not errors and now["type"] == "transcription"
        assert now["audio"]["input"]["format"] == form
        assert now["audio"]["input"]["transcription"]["language"] == "en"
    async with opened(any_gateway, "/v1/realtime") as client:
        await client.complete("hello")
        errors, now = await client.update(**TRANSCRIPTION)
        assert [error["param"] for error in errors] == ["session.type"]
        assert now["type"] == "realtime"


async def test_session_of_transcription_continues_at_another_gateway(loaded: Loaded) -> None:
    with serving(loaded) as here, serving(loaded, client=here.client) as there:
        here.client.script = Script(heard=HEARD_TEXT)
        async with opened(here, "/v1/realtime", intent="transcription", fleet=1) as client:
            await client.append(question())
            await client.until(COMPLETED)

            async def is_written() -> bool:
                stored = here.client.voice.held[client.session].fields
                return HEARD_TEXT.encode() in stored.get(STATE, b"")

            await await_until(is_written, "the turn to be written down")
            await client.drop()
        async with opened(there, "/v1/realtime", session=client.session, fleet=1) as again:
            assert again.events[0]["session"]["type"] == "transcription"
            await again.append(silence(200) + question())
            assert (await again.until(COMPLETED))["transcript"] == HEARD_TEXT


async def test_client_secret_opens_a_session_of_transcription(locked: ServedGateway) -> None:
    locked.client.script = Script(heard=HEARD_TEXT)
    async with AsyncOpenAI(base_url=f"{locked.url}/v1", api_key="secret", max_retries=0) as client:
        secret = await client.realtime.client_secrets.create(
            session={
                "type": "transcription",
                "audio": {"input": {"transcription": {"model": "omni", "language": "en"}}},
            }
        )
    assert secret.session.type == "transcription"
    ClientSecretCreateResponse.model_validate(secret.model_dump())
    async with AsyncOpenAI(
        base_url=f"{locked.url}/v1", api_key=secret.value, max_retries=0
    ) as client:
        async with client.realtime.connect(model="omni") as connection:
            event = await connection.recv()
            assert event.type == "session.created" and event.session.type == "transcription"


async def test_model_of_text_has_no_sessions_of_transcription(text_only: Loaded) -> None:
    with serving(text_only) as gateway:
        refusal = await refusal_of(gateway, "/v1/realtime?intent=transcription")
        assert refusal.error["param"] == "intent"
        async with opened(gateway, "/v1/realtime") as client:
            errors, now = await client.update(**TRANSCRIPTION)
            assert [error["param"] for error in errors] == ["session.type"]
            assert now["type"] == "realtime"


@pytest.mark.parametrize(
    ("script", "requirement"),
    [("livekit_stt.script", LIVEKIT), ("pipecat_stt.script", PIPECAT)],
    ids=["livekit", "pipecat"],
)
def test_transcriber_of_another_client_hears_a_question(
    any_gateway: ServedGateway, spoken_question: str, script: str, requirement: str
) -> None:
    any_gateway.client.script = Script(heard=HEARD_TEXT)
    printed = run_client(script, requirement, any_gateway.url, "omni", spoken_question)
    assert printed.splitlines()[-1] == f"heard: {HEARD_TEXT}"
