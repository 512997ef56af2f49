"""Helpers for tests of the Voice page on a real fleet: the fleet, a page with a microphone, and
interruptions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import soxr
from playwright.sync_api import Page, expect

from fleet.config.schema import WebConfig
from fleet.lab.client.chat import ChatCall, ChatMessage, OutputAudio
from fleet.processing.voice_onset import LeadingSilenceTrimmer
from tests.e2e.fleets import START_S, ProcessFleet, fleet_up
from tests.e2e.gateways import Switch
from tests.web.realtime import speech_samples
from tests.web.voice import probe
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, ask, js, visiting, wait_js
from tests.web.voice.probe import Pcm

QUESTION, ANSWER = "what is the opposite of hot", "the opposite of hot is cold"
LONG = "count to twenty"
"""A question whose answer is eleven seconds of speech."""
LEAD_IN_S = 1.0
LIVE_PAGE_CUT = (
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
    "htmx:sse:error",
    "ERR_EMPTY_RESPONSE",
    "ERR_CONNECTION_RESET",
)
"""Browser errors for an event stream that is cut, as some tests do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceFleet(ProcessFleet):
    """A fleet whose browsers connect to the proxy `switch`, which forwards to the fleet's gateway
    unless a test sets another gateway.
    """

    switch: Switch

    def audio(self, request: str) -> Pcm:
        """Return an answer's audio from the log, without the leading silence, which the gateway
        does not send.
        """
        silence = LeadingSilenceTrimmer(speech_samples.RATE_HZ, WebConfig().max_leading_silence_ms)
        return np.frombuffer(
            silence.feed(self.api.answer_audio(request)[44:]) + silence.finish(), "<i2"
        )

    def trace(self, answer: dict[str, Any]) -> dict[str, Any]:
        return self.get(f"/v1/fleet/requests/{answer['requestId']}")

    def ask(self, question: str, voice: str) -> tuple[str, Pcm]:
        """Return the transcript and audio of the answer to a typed question."""
        messages, audio = (
            (ChatMessage(role="user", content=question),),
            OutputAudio(voice=voice, format="pcm16"),
        )
        answer = self.api.chat(
            ChatCall(model="pocket", messages=messages, modalities=("text", "audio"), audio=audio)
        )
        return answer.transcript.strip(), np.frombuffer(answer.audio or b"", "<i2")

    def worker(self, role: str) -> dict[str, Any]:
        return next(
            worker for worker in self.get("/v1/fleet/workers")["data"] if worker["role"] == role
        )


@contextmanager
def talking_fleet(
    folder: Path, *settings: str, options: Sequence[str] = (), start_s: float = START_S
) -> Iterator[VoiceFleet]:
    with (
        fleet_up(folder, "web.port=0", *settings, options=options, start_s=start_s) as fleet,
        Switch.to(fleet.api.port) as switch,
    ):
        yield VoiceFleet(running=fleet.running, folder=folder, url=fleet.url, switch=switch)


def silence(seconds: float) -> Pcm:
    return np.zeros(int(seconds * MIC_RATE_HZ), np.int16)


@cache
def speech(text: str) -> Pcm:
    """Return speech of `text` at the microphone's rate."""
    pcm = np.frombuffer(speech_samples.speech(text), "<i2").astype(np.float32)
    return np.clip(soxr.resample(pcm, speech_samples.RATE_HZ, MIC_RATE_HZ), -32767, 32767).astype(
        np.int16
    )


@contextmanager
def microphone(
    browsers: Browsers, fleet: VoiceFleet, question: Pcm | None = None, **options: object
) -> Iterator[Page]:
    """Open a Voice page, ready to talk, whose microphone plays the question once, after
    `LEAD_IN_S`. `question`: its speech at the microphone's rate; by default, that of `QUESTION`.
    """
    spoken = speech(QUESTION) if question is None else question
    pcm = np.concatenate([silence(LEAD_IN_S), spoken, silence(120)])
    browser = browsers.with_microphone(f"question-{crc32(pcm.tobytes())}", pcm)
    with visiting(browser, fleet.switch.url, LIVE_PAGE_CUT, bypass_csp=True, **options) as page:
        expect(page.locator("#state")).to_have_text("Ready")
        probe.prepare(page)
        yield page


def answers(page: Page) -> list[dict[str, Any]]:
    """Return the answers that the page has recorded, oldest first."""
    answers = "fleetVoice.conversation.responses.byId.values()"
    wanted = (
        "({ responseId, requestId, serial, text, historyText, received, played, cut, done, "
        "underruns, itemId })"
    )
    return cast("list[dict[str, Any]]", js(page, f"[...{answers}].map({wanted} => {wanted})"))


def interrupt(page: Page, request: str = LONG) -> None:
    """Request a long answer, and interrupt it by speech."""
    ask(page, request)
    wait_js(page, "fleetVoice.player.playing")
    page.locator("#talk-button").click()
    probe.watch_mic(page)
    expect(page.locator(".turn.assistant.cut-off .notes")).to_contain_text("interrupted")
