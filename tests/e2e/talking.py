"""A real fleet, a Voice page before it, and a visitor with a microphone: what the tests of both together share."""

from base64 import b64decode
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import soxr
from playwright.sync_api import Page, expect

from fleet.config.schema import WebConfig
from fleet.processing.voice_onset import LeadingSilenceTrimmer
from tests.e2e.gateways import Switch
from tests.support import start_cli
from tests.web.realtime import spoken
from tests.web.voice import probe
from tests.web.voice.browsers import MIC_RATE_HZ, Browsers, ask, js, visiting, wait_js
from tests.web.voice.probe import Pcm

OPTIONS = ("--set", "web.port=0")
QUESTION, ANSWER = "what is the opposite of hot", "the opposite of hot is cold"
LONG = "count to twenty"
"""Answered with eleven seconds of speech."""
LEAD_IN_S = 1.0
LIVE_PAGE_CUT = ("ERR_INCOMPLETE_CHUNKED_ENCODING", "htmx:sse:error", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET")
"""What the browser says where a stream that it follows is cut, as some of these tests do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`switch` leads to the gateway of `fleet up`, unless a test has it lead elsewhere."""

    folder: Path
    url: str
    switch: Switch

    def get(self, path: str) -> Any:
        answer = httpx.get(self.url + path, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def sound(self, request: str) -> Pcm:
        """All of an answer's, once more from the log, without the leading silence that is not sent."""
        told = httpx.get(f"{self.url}/v1/fleet/requests/{request}/audio", timeout=30)
        assert told.status_code == 200, told.text
        silence = LeadingSilenceTrimmer(spoken.RATE_HZ, WebConfig().max_leading_silence_ms)
        return np.frombuffer(silence.feed(told.content[44:]) + silence.finish(), "<i2")

    def story(self, answer: dict[str, Any]) -> dict[str, Any]:
        return self.get(f"/v1/fleet/requests/{answer['requestId']}")

    def said(self, question: str, voice: str) -> tuple[str, Pcm]:
        """The whole answer to a typed question, and its sound."""
        messages = [{"role": "user", "content": question}]
        spoken = {"modalities": ["text", "audio"], "audio": {"voice": voice, "format": "pcm16"}}
        body = {"model": "pocket", "messages": messages, **spoken}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60).json()
        audio = answer["choices"][0]["message"]["audio"]
        return audio["transcript"].strip(), np.frombuffer(b64decode(audio["data"]), "<i2")

    def worker(self, role: str) -> dict[str, Any]:
        return next(worker for worker in self.get("/v1/fleet/workers")["data"] if worker["role"] == role)

    def running(self) -> int:
        return sum(worker["running"] for worker in self.get("/v1/fleet/workers")["data"])


@contextmanager
def talking_fleet(folder: Path) -> Iterator[Fleet]:
    with start_cli("up", *OPTIONS, cwd=folder) as running:
        url = running.wait_for(r"fleet: ready at (http://\S+)\n", timeout_s=110)[1]
        with Switch.to(int(url.rpartition(":")[2])) as switch:
            yield Fleet(folder=folder, url=url, switch=switch)


def silence(seconds: float) -> Pcm:
    return np.zeros(int(seconds * MIC_RATE_HZ), np.int16)


@cache
def speech(text: str) -> Pcm:
    """At the microphone's rate."""
    said = np.frombuffer(spoken.speech(text), "<i2").astype(np.float32)
    return np.clip(soxr.resample(said, spoken.RATE_HZ, MIC_RATE_HZ), -32767, 32767).astype(np.int16)


def microphone(browsers: Browsers, fleet: Fleet) -> AbstractContextManager[Page]:
    """A visitor who says the question `LEAD_IN_S` after opening the microphone, once."""
    sound = np.concatenate([silence(LEAD_IN_S), speech(QUESTION), silence(120)])
    return visiting(browsers.hearing("question", sound), fleet.switch.url, LIVE_PAGE_CUT, bypass_csp=True)


def answers(page: Page) -> list[dict[str, Any]]:
    """The page's, oldest first."""
    answers = "fleetVoice.conversation.responses.byId.values()"
    wanted = "({ responseId, requestId, serial, text, historyText, received, played, cut, done, underruns, itemId })"
    return cast("list[dict[str, Any]]", js(page, f"[...{answers}].map({wanted} => {wanted})"))


def ready(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("Ready")
    probe.prepare(page)


def interrupt(page: Page) -> None:
    """Ask for a long answer, and speak into it."""
    ask(page, LONG)
    wait_js(page, "fleetVoice.player.playing")
    page.locator("#talk-button").click()
    probe.watch_mic(page)
    expect(page.locator(".turn.assistant.cut-off .notes")).to_contain_text("interrupted")
