"""A spoken question to an assistant and its answer, over `/v1/realtime`, with a simulated sound
card.

Knows no stage. The times of a turn come from the card's recording.
"""

import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from fleet.lab.client.audio import BYTES_PER_S, PCM_RATE_HZ
from fleet.lab.client.client import ApiClient
from fleet.lab.client.realtime import (
    BLOCK_BYTES,
    LatencyPart,
    RealtimeEvent,
    RealtimeSession,
    append_audio,
    encode_event,
)
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.sound_card import SoundCard, read_latency_s
from fleet.lab.measure.speakers import SpokenPrompt, write_wav
from fleet.lab.measure.voice import EventReader

INSTRUCTIONS = "You are a helpful assistant. Answer in one short sentence."
MAX_TOKENS = 64
LEAD_IN_S, TAIL_S = 0.3, 0.2
PATIENCE_S = 120.0
"""Longest wait for an answer or a transcript; on a busy machine both take long."""
COMPLETE = ("completed", "incomplete")


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A spoken question and its answer. `heard`: transcript of the question. `answer`: text of the
    answer. `answer_s`: duration of the answer's audio.

    `voice_to_voice_ms`: time in the recording from the microphone's last voiced sample to the
    loudspeaker's first one. `after_decision_ms`: time to the same sample from the arrival of the
    event that ends the user's turn. `transcript_ms`: time from that event's arrival to the arrival
    of the final transcript. `parts`: latency that the fleet itself reported, part by part.
    """

    question: str
    heard: str
    answer: str
    voice_to_voice_ms: float
    after_decision_ms: float
    underruns: int
    answer_s: float
    parts: tuple[LatencyPart, ...]
    transcript_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFiles:
    """Files that keep a turn: the answer as it was sent, and the recording of the sound card."""

    answer: Path
    recording: Path


@dataclass(slots=True)
class _Received:
    """What a session has sent so far. Units: `decided_s`, the end of the user's turn, `heard_s`,
    the arrival of its transcript, and `restarted_s`, the end of the last cancelled answer, in
    seconds of the recording.
    """

    card: SoundCard
    heard: str | None = None
    decided_s: float = 0.0
    heard_s: float = 0.0
    restarted_s: float = 0.0
    pcm: bytearray = field(default_factory=bytearray)
    answer: str = ""
    status: str = ""
    failure: str = ""
    parts: tuple[LatencyPart, ...] = ()

    def take(self, event: RealtimeEvent, at_s: float) -> None:
        match event.type:
            case "input_audio_buffer.speech_stopped":
                self.decided_s = at_s
            case "conversation.item.input_audio_transcription.completed":
                self.heard = f"{self.heard or ''} {event.transcript}".strip()
                self.heard_s = at_s
            case "response.output_audio.delta":
                pcm = b64decode(event.delta)
                self.pcm += pcm
                self.card.receive(pcm)
            case "response.output_audio_transcript.delta":
                self.answer += event.delta
            case "fleet.timing":
                self.parts = event.parts
            case "response.done":
                self._end(event)
            case _:
                pass

    def _end(self, event: RealtimeEvent) -> None:
        """End the answer. A cancelled answer, which the rest of the question interrupted, is
        discarded.
        """
        self.card.end_answer()
        self.status, self.failure = event.response.status, event.response.failure
        if self.status == "cancelled":
            self.card.flush()
            self.restarted_s = self.card.num_samples / PCM_RATE_HZ
            self.pcm.clear()
            self.answer = self.status = ""


def ask_assistant(
    api: ApiClient,
    model: str,
    question: SpokenPrompt,
    files: TurnFiles,
    begin: Callable[[], object] = lambda: None,
) -> AssistantTurn:
    """Ask one question in a session of its own. `begin`: called once the session is open.

    Raises: ApiError, BenchError.
    """
    card = SoundCard()
    received = _Received(card)
    with api.realtime(model) as session:
        events = EventReader(session)
        session.send(_settings(model))
        events.wait("session.updated")
        begin()
        card.speak(
            np.concatenate([np.zeros(int(LEAD_IN_S * PCM_RATE_HZ), np.int16), question.samples])
        )
        _converse(session, events, received)
    card.write(files.recording)
    write_wav(files.answer, np.frombuffer(bytes(received.pcm), "<i2"))
    if received.status not in COMPLETE:
        raise BenchError(f"the answer to {question.text!r} was not completed: {received.failure}")
    ended_s, voiced_s = read_latency_s(files.recording, received.restarted_s)
    return AssistantTurn(
        question=question.text,
        heard=received.heard or "",
        answer=received.answer.strip(),
        voice_to_voice_ms=round((voiced_s - ended_s) * 1e3, 1),
        after_decision_ms=round((voiced_s - received.decided_s) * 1e3, 1),
        underruns=card.underruns,
        answer_s=len(received.pcm) / BYTES_PER_S,
        parts=received.parts,
        transcript_ms=round((received.heard_s - received.decided_s) * 1e3, 1),
    )


def _converse(session: RealtimeSession, events: EventReader, received: _Received) -> None:
    """Run the sound card in real time until the answer is played and the transcript has come."""
    card, began_s = received.card, time.perf_counter()
    waiting: deque[tuple[float, RealtimeEvent]] = deque()
    to_send = bytearray()
    tail_s = limit_s = 0.0
    while tail_s < TAIL_S:
        now_s = card.num_samples / PCM_RATE_HZ
        waiting += events.take()
        # a late loop must not play what arrived after the block began
        while waiting and waiting[0][0] - began_s <= now_s:
            at_s, event = waiting.popleft()
            received.take(event, at_s - began_s)
        if card.is_speaking or not card.is_quiet:
            limit_s = now_s + PATIENCE_S
        if now_s > limit_s:
            missing = "answer" if not received.status else "transcript"
            raise BenchError(f"no {missing} of a spoken question within {PATIENCE_S:g} s")
        is_over = received.status and received.heard is not None and card.is_quiet
        to_send += card.tick()
        next_s = card.num_samples / PCM_RATE_HZ
        tail_s = tail_s + next_s - now_s if is_over else 0.0
        time.sleep(max(0.0, began_s + next_s - time.perf_counter()))
        if len(to_send) >= BLOCK_BYTES:
            session.send(append_audio(bytes(to_send)))
            to_send.clear()


def _settings(model: str) -> str:
    # As the Voice page asks.
    audio = {"turn_detection": {"type": "semantic_vad"}, "transcription": {"model": model}}
    session = {
        "type": "realtime",
        "instructions": INSTRUCTIONS,
        "max_output_tokens": MAX_TOKENS,
        "audio": {"input": audio},
    }
    return encode_event("session.update", session=session)
