"""A fake server of the console's voice socket, which detects speech by loudness and answers by a
script. Knows no gateway.

The server follows the socket's protocol, so that the page can be tested without a fleet: audio on
time, late, repeated, or missing.
"""

import asyncio
import json
import logging
import struct
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray
from starlette.websockets import WebSocket, WebSocketDisconnect

from fleet.processing.voice_onset import VoicedSearch

log = logging.getLogger("tests.voice")

Pcm = NDArray[np.int16]
Event = dict[str, object]

RATE_HZ = 24_000
CHUNK = 1920
LEAD_S = 1.0
VOICED_RMS = 0.02
VOICED_BLOCKS = 3
SILENCE_MS = 400
MIN_BUFFERED_MS = 100
TEXT = "This is the answer, spoken aloud."
PARTS = (
    ("endpointing", SILENCE_MS),
    ("queue", 3),
    ("thinker", 61),
    ("talker", 48),
    ("code2wav", 22),
    ("gateway", 6),
)


def tone(seconds: float, hz: float = 440.0, rate_hz: int = RATE_HZ, level: float = 0.3) -> Pcm:
    at = np.arange(int(seconds * rate_hz)) / rate_hz
    return (np.sin(2 * np.pi * hz * at) * level * 32767).astype(np.int16)


async def pace(seconds: float) -> None:
    """Wait for `seconds`, so that audio is sent at the pace of a real answer."""
    loop = asyncio.get_running_loop()
    tick = loop.create_future()
    loop.call_later(max(0.0, seconds), lambda: tick.done() or tick.set_result(None))
    await tick


@dataclass(slots=True, kw_only=True)
class VoiceScript:
    """Scripted behaviour of the fake voice server for the next connections and answers.

    `drop_after`: answer samples after which the connection is closed, once. `stall_after`: answer
    samples after which nothing more is sent. `place`: position in the queue. `repeat`: number of
    samples sent again after a reconnect. `late`: number of audio frames sent after a cancel.
    """

    text: str = TEXT
    samples: Pcm = field(default_factory=lambda: tone(1.0))
    transcript: str | None = "what the user said"
    drop_after: int | None = None
    stall_after: int | None = None
    gap_s: float = 0.0
    lead_s: float = LEAD_S
    failure: Event | None = None
    error: Event | None = None
    place: int = 0
    forget: bool = False
    refuse: tuple[int, str] | None = None
    repeat: int = 0
    timing: bool = True
    late: int = 0


@dataclass(slots=True)
class FakeAnswer:
    """A spoken answer of the fake server, of which it may send only a part."""

    response: str
    item: str
    text: str
    samples: Pcm
    spoken: bool
    waited: bool
    over: bool = False
    truncated_ms: int | None = None


class FakeVoiceServer:
    """Fake voice server of one test, which records what its sockets receive. Times are
    `time.monotonic` values.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reset()

    def reset(self) -> None:
        self.script = VoiceScript()
        self.connections: list[FakeConnection] = []
        self.events: list[Event] = []
        self.answers: dict[str, FakeAnswer] = {}
        self.mic: list[tuple[float, Pcm]] = []
        self.rate_hz = RATE_HZ
        self.detects = True
        self.modalities = ["audio"]

    def of_type(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["type"] == kind]

    def received_audio(self) -> Pcm:
        """Return all microphone audio received so far."""
        return np.concatenate([np.zeros(0, np.int16), *(pcm for _, pcm in list(self.mic))])

    def active(self) -> Event:
        """Return the fields of the event `fleet.resumed` that describe an answer in progress."""
        answer = next((known for known in self.answers.values() if not known.over), None)
        if answer is None:
            return {"response_id": None, "item_id": None, "transcript": ""}
        return {"response_id": answer.response, "item_id": answer.item, "transcript": answer.text}

    def call(self, work: Callable[[], Coroutine[object, object, object]]) -> None:
        """Run a coroutine in the server's event loop, from the test's thread."""
        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(work(), self.loop)

    def disconnect(self) -> None:
        """Break the first connection, and refuse new ones until the script changes."""
        self.script = VoiceScript(refuse=(1011, ""))
        self.call(self.connections[0].drop)

    async def endpoint(self, websocket: WebSocket) -> None:
        self.loop = asyncio.get_running_loop()
        connection = FakeConnection(self, websocket)
        self.connections.append(connection)
        await connection.run()


class FakeConnection:
    def __init__(self, server: FakeVoiceServer, websocket: WebSocket) -> None:
        self.server = server
        self.websocket = websocket
        self.query = dict(websocket.query_params)
        self.session = self.query.get("session", "")
        self.answering: asyncio.Task[None] | None = None
        self.under_way: FakeAnswer | None = None
        self.voiced = 0
        self.quiet_ms = 0.0
        self.received_ms = 0.0
        self.buffered_ms = 0.0
        self.voiced_end_ms = 0
        self.turn: str | None = None
        self.serial = 0
        self.received: list[str] = []
        """Received frames in order: the type of a JSON event, or "audio" for a binary frame."""

    async def run(self) -> None:
        script = self.server.script
        await self.websocket.accept()
        if script.refuse is not None:
            await self.websocket.close(*script.refuse)
            return
        if script.place:
            await self.send("fleet.queue", position=script.place)
        else:
            await self.admit()
        try:
            while (message := await self.websocket.receive())["type"] == "websocket.receive":
                await self.take(message)
        except WebSocketDisconnect:
            log.debug("the page left while it was written to")
        finally:
            self.stop()

    async def take(self, message: Mapping[str, object]) -> None:
        audio = message.get("bytes")
        if isinstance(audio, bytes):
            self.received.append("audio")
            await self.receive_audio(np.frombuffer(audio, "<i2").astype(np.int16))
        else:
            await self.handle(cast(Event, json.loads(cast(str, message["text"]))))

    async def send(self, kind: str, **fields: object) -> None:
        await self.websocket.send_text(json.dumps({"type": kind, "event_id": "event_x", **fields}))

    async def admit(self) -> None:
        if self.session and self.server.script.forget:
            self.server.script.forget = False
            error = {
                "code": "not_found",
                "message": f"session: no session {self.session!r}",
                "param": "session",
            }
            await self.send("error", error=error)
            await self.websocket.close(1008, "session: no such session")
            return
        resumes, self.session = (
            bool(self.session),
            self.session or f"sess_{len(self.server.connections)}",
        )
        await self.send("session.created", session={"id": self.session})
        if resumes:
            await self.send("fleet.resumed", session_id=self.session, **self.server.active())
        held = self.server.answers.get(self.query.get("response", ""))
        if held is not None:
            start = int(self.query.get("samples", "0")) - self.server.script.repeat
            self.answer_from(held, max(0, start))

    async def drop(self) -> None:
        """Close the connection without sending an event."""
        self.stop()
        await self.websocket.close(1011)

    async def handle(self, event: Event) -> None:
        self.server.events.append(event)
        kind = str(event["type"])
        self.received.append(kind)
        if kind == "session.update":
            await self.update(cast("dict[str, object]", event["session"]))
        elif kind == "response.create":
            await self.respond(
                metadata=cast("dict[str, Event]", event).get("response", {}).get("metadata")
            )
        elif kind == "input_audio_buffer.clear":
            self.buffered_ms = 0.0
        elif kind == "input_audio_buffer.commit":
            await self.commit_buffer()
        elif kind == "response.cancel":
            await self.cancel("client_cancelled")
        elif kind == "conversation.item.truncate":
            self.cut(str(event["item_id"]), cast(int, event["audio_end_ms"]))
            await self.send(
                "conversation.item.truncated",
                **{k: event[k] for k in ("item_id", "content_index", "audio_end_ms")},
            )
        elif kind == "conversation.item.retrieve":
            await self.retrieve(str(event["item_id"]))

    async def update(self, session: dict[str, object]) -> None:
        audio = cast("dict[str, dict[str, object]]", session["audio"])
        self.server.rate_hz = cast("dict[str, int]", audio["input"]["format"])["rate"]
        self.server.detects = audio["input"]["turn_detection"] is not None
        self.server.modalities = cast("list[str]", session["output_modalities"])
        await self.send("session.updated", session=session)

    # Speech of the user

    async def receive_audio(self, pcm: Pcm) -> None:
        self.server.mic.append((time.monotonic(), pcm))
        length_ms = 1000 * len(pcm) / self.server.rate_hz
        self.received_ms += length_ms
        self.buffered_ms += length_ms
        if not self.server.detects:
            return
        loud = float(np.sqrt(np.mean((pcm / 32768) ** 2))) > VOICED_RMS
        self.voiced = self.voiced + 1 if loud else 0
        self.quiet_ms = 0.0 if loud else self.quiet_ms + length_ms
        if self.turn is None and self.voiced >= VOICED_BLOCKS:
            await self.begin_turn()
        elif self.turn is not None and self.quiet_ms >= SILENCE_MS:
            await self.end_turn(self.turn)

    async def begin_turn(self) -> None:
        self.turn = f"item_user_{len(self.server.mic)}"
        await self.send("fleet.state", state="hearing")
        await self.send(
            "input_audio_buffer.speech_started",
            audio_start_ms=int(self.received_ms),
            item_id=self.turn,
        )
        await self.cancel("turn_detected")

    async def end_turn(self, turn: str) -> None:
        self.turn = None
        self.voiced_end_ms = int(self.received_ms - self.quiet_ms)
        await self.send("fleet.state", state="thinking")
        await self.send(
            "input_audio_buffer.speech_stopped", audio_end_ms=int(self.received_ms), item_id=turn
        )
        await self.commit(turn)
        await self.respond(waited=True)

    async def commit_buffer(self) -> None:
        """Commit the audio recorded by push to talk as the user's turn."""
        buffered_ms, self.buffered_ms = self.buffered_ms, 0.0
        if buffered_ms < MIN_BUFFERED_MS:
            await self.send(
                "error",
                error={
                    "code": "input_audio_buffer_commit_empty",
                    "message": f"{buffered_ms} ms of audio",
                },
            )
            return
        await self.commit(f"item_ptt_{len(self.server.events)}")

    async def commit(self, item: str) -> None:
        await self.send("input_audio_buffer.committed", previous_item_id=None, item_id=item)
        transcript = self.server.script.transcript
        if transcript is None:
            kind = "conversation.item.input_audio_transcription.failed"
            await self.send(kind, item_id=item, content_index=0, error={"message": "no words"})
            return
        kind = "conversation.item.input_audio_transcription"
        await self.send(f"{kind}.delta", item_id=item, content_index=0, delta=transcript[:4])
        await self.send(f"{kind}.completed", item_id=item, content_index=0, transcript=transcript)

    # Answers

    async def respond(self, *, waited: bool = False, metadata: object = None) -> None:
        script = self.server.script
        if self.under_way is not None and not self.under_way.over:
            await self.send(
                "error",
                error={
                    "code": "conversation_already_has_active_response",
                    "message": "one is active",
                },
            )
            return
        if script.error is not None:
            await self.send("error", error=script.error)
            return
        number = len(self.server.answers) + 1
        spoken = "audio" in self.server.modalities
        answer = FakeAnswer(
            f"resp_{number}", f"item_{number}", script.text, script.samples, spoken, waited
        )
        self.server.answers[answer.response] = answer
        created = {"id": answer.response, "status": "in_progress", "metadata": metadata}
        await self.send("response.created", response=created)
        await self.send("fleet.request", response_id=answer.response, request_id=f"req-{number}")
        await self.send(
            "response.output_item.added",
            response_id=answer.response,
            output_index=0,
            item={"id": answer.item},
        )
        if script.failure is not None:
            await self.done(answer, "failed", {"type": "failed", "error": script.failure})
            return
        self.answer_from(answer, 0)

    def answer_from(self, answer: FakeAnswer, start: int) -> None:
        self.stop()
        self.under_way = answer
        self.answering = asyncio.create_task(self.send_answer(answer, start))

    async def send_answer(self, answer: FakeAnswer, start: int) -> None:
        kind = "output_audio_transcript" if answer.spoken else "output_text"
        where = {
            "response_id": answer.response,
            "item_id": answer.item,
            "output_index": 0,
            "content_index": 0,
        }
        if start == 0:
            for word in answer.text.split(" "):
                delta = word if word == answer.text.split(" ")[0] else f" {word}"
                await self.send(f"response.{kind}.delta", **where, delta=delta)
        if answer.spoken:
            await self.send_audio(answer, start)
            await self.send("response.output_audio.done", **where)
        whole = {"transcript": answer.text} if answer.spoken else {"text": answer.text}
        await self.send(f"response.{kind}.done", **where, **whole)
        await self.done(answer, "completed", None)
        self.under_way = None

    async def send_audio(self, answer: FakeAnswer, start: int) -> None:
        script = self.server.script
        self.serial += 1
        serial = self.serial
        ids = {"response_id": answer.response, "item_id": answer.item}
        await self.send("fleet.audio", serial=serial, **ids, rate=RATE_HZ)
        began, voiced = time.monotonic(), VoicedSearch(RATE_HZ)
        for offset in range(start, len(answer.samples), CHUNK):
            if script.drop_after is not None and offset >= script.drop_after:
                script.drop_after = None
                await self.websocket.close(1011)
                await asyncio.Event().wait()
            if script.stall_after is not None and offset >= script.stall_after:
                await asyncio.Event().wait()
            await self.frame(serial, offset, answer.samples[offset : offset + CHUNK])
            if not voiced.found and start == 0:
                voiced.feed(answer.samples[offset : offset + CHUNK].astype("<i2").tobytes())
                if voiced.found:
                    await self.send(
                        "fleet.voiced", response_id=answer.response, sample=voiced.floor
                    )
            if offset == start and start == 0 and script.timing:
                await self.timing(answer)
            ahead = (offset - start + CHUNK) / RATE_HZ - (time.monotonic() - began)
            await pace(max(script.gap_s, ahead - script.lead_s))

    async def frame(self, serial: int, offset: int, pcm: Pcm) -> None:
        await self.websocket.send_bytes(
            struct.pack("<II", serial, offset) + pcm.astype("<i2").tobytes()
        )

    async def timing(self, answer: FakeAnswer) -> None:
        parts = [
            {"name": name, "ms": ms} for name, ms in PARTS if answer.waited or name != "endpointing"
        ]
        number = answer.response.removeprefix("resp_")
        ids = {
            "response_id": answer.response,
            "request_id": f"req-{number}",
            "item_id": answer.item,
        }
        total = sum(cast(int, part["ms"]) for part in parts) if answer.waited else None
        ended = self.voiced_end_ms if answer.waited else None
        await self.send(
            "fleet.timing", **ids, voice_to_voice_ms=total, voiced_end_ms=ended, parts=parts
        )

    async def done(self, answer: FakeAnswer, status: str, details: Event | None) -> None:
        answer.over = True
        usage = {
            "output_token_details": {"text_tokens": len(answer.text.split()), "audio_tokens": 0}
        }
        response = {
            "id": answer.response,
            "status": status,
            "status_details": details,
            "usage": usage,
        }
        await self.send("response.done", response=response)

    async def cancel(self, reason: str) -> None:
        """Cancel the answer, then send the script's `late` frames, which the page must not play."""
        answer = self.under_way
        if answer is None:
            if reason == "client_cancelled":
                await self.send(
                    "error",
                    error={"code": "response_cancel_not_active", "message": "no active response"},
                )
            return
        self.stop()
        if answer.spoken:
            await self.send(
                "response.output_audio.done", response_id=answer.response, item_id=answer.item
            )
        await self.done(answer, "cancelled", {"type": "cancelled", "reason": reason})
        for _ in range(self.server.script.late):
            await self.frame(self.serial, 0, tone(0.08))

    def stop(self) -> None:
        if self.answering is not None:
            self.answering.cancel()
        self.answering = self.under_way = None

    def cut(self, item: str, audio_end_ms: int) -> None:
        for answer in self.server.answers.values():
            if answer.item == item:
                answer.truncated_ms = audio_end_ms

    async def retrieve(self, item: str) -> None:
        """Send the item's transcript, truncated in proportion to the audio."""
        answer = next(known for known in self.server.answers.values() if known.item == item)
        share = (answer.truncated_ms or 0) / 1000 / (len(answer.samples) / RATE_HZ)
        text = answer.text[: int(share * len(answer.text))].rpartition(" ")[0]
        content = [{"type": "output_audio", "transcript": text}]
        await self.send(
            "conversation.item.retrieved",
            item={"id": item, "role": "assistant", "content": content},
        )
