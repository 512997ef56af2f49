"""Transcripts of a turn that is still under way: its audio so far is recognised again and again.

A later recognition may correct an earlier one, and clients only append. So they are sent the words
on which the last two recognitions agree. Knows no conversation and no response.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass

from fleet.core.errors import FleetError
from fleet.processing.voice_activity import RATE_HZ
from web.openai.recognition import transcribe
from web.realtime.context import SessionContext
from web.realtime.conversation import Clip

log = logging.getLogger("fleet.web")

REST_FACTOR = 2.0
"""Pause after each recognition, as a multiple of the duration of the recognition, so that one turn
takes at most a third of a stage's time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialTranscript:
    """What was recognised in a turn up to position `end`. `is_pause`: True if the user was silent
    then, so that `text` is the whole transcript unless the turn goes on.

    Units: samples at 16 kHz since the beginning of the session's input.
    """

    item_id: str
    text: str
    end: int
    is_pause: bool = False


class AgreedWords:
    """The words of a growing transcript that two successive recognitions have in common. `text`
    only grows.
    """

    def __init__(self) -> None:
        self.text = ""
        self._last: list[str] = []

    def add(self, text: str) -> str:
        """Add a recognition. Returns the text that the recognition newly confirms; "" if there is
        none.
        """
        words, last = re.findall(r"\s*\S+", text), self._last
        self._last = words
        count = next(
            (n for n, pair in enumerate(zip(words, last, strict=False)) if pair[0] != pair[1]),
            min(len(words), len(last)),
        )
        return self.finish("".join(words[:count]))

    def finish(self, text: str) -> str:
        """Extend `text` to the given text, and return the new part; "" if the given text
        contradicts the text so far.
        """
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += new
        return new


class PartialTranscripts:
    """Recogniser of the turn under way. At most one recognition runs at a time.

    `peek`: returns the turn's audio between two positions. `is_wanted`: True if anybody reads the
    transcripts. `listeners` are called with each transcript, in order.
    """

    def __init__(
        self,
        context: SessionContext,
        peek: Callable[[int, int], bytes],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.listeners: list[Callable[[PartialTranscript], None]] = []
        self._context, self._clock = context, context.clock
        self._peek, self._is_wanted = peek, is_wanted
        self._interval = context.gateway.config.voice.partial_ms * RATE_HZ // 1000
        self._item_id = ""
        self._start = self._heard_end = 0
        self._rest_until = 0.0
        self._job: asyncio.Task[str | None] | None = None
        self._pause: asyncio.Task[str | None] | None = None

    def begin(self, item_id: str, start: int) -> None:
        """Begin a turn at position `start`."""
        self.stop()
        self._item_id = item_id
        self._start = start
        self._heard_end = start

    def add(self, end: int) -> None:
        """Recognise the turn up to position `end`, if enough was said since the last time. Not
        called in silence, which may become a pause: its recognition must not wait for this one.
        """
        is_due = end - self._heard_end >= self._interval and self._clock.now() >= self._rest_until
        if self._item_id and self._interval and self._job is None and is_due and self._is_wanted():
            self._run(self._recognized(end), end, is_pause=False)

    def pause(self, end: int, heard: AsyncIterator[str] | None = None) -> None:
        """Recognise the turn up to a pause, in place of a recognition under way. `heard`:
        transcript of the turn, if a speculative generation brings it; None to run a recognition.
        """
        if self._item_id and self._interval and self._is_wanted():
            self._cancel()
            work = self._recognized(end) if heard is None else _joined(heard)
            self._run(work, end, is_pause=True)
            self._pause = self._job if heard is None else None

    def resume(self) -> None:
        """Record that the turn goes on after a pause, so that the pause has no whole transcript."""
        self._pause = None

    def end(self) -> "asyncio.Task[str | None] | None":
        """End the turn. Returns the task that recognises the pause with which the turn ended, None
        if there is no such task. The result of the task is the turn's whole transcript, or None
        after a failure.
        """
        whole, self._pause = self._pause, None
        if self._job is not whole:
            self._cancel()
        self._item_id = ""
        self._job = None
        return whole

    def stop(self) -> None:
        """End the turn without a transcript."""
        if (whole := self.end()) is not None:
            whole.cancel()

    def _cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def _run(self, work: Coroutine[None, None, str | None], end: int, *, is_pause: bool) -> None:
        self._heard_end = end
        item_id, began = self._item_id, self._clock.now()
        job = asyncio.create_task(work)
        self._job = job

        def on_done(_: object) -> None:
            if self._job is job:
                self._job = None
                now = self._clock.now()
                self._rest_until = now + REST_FACTOR * (now - began)
            text = None if job.cancelled() else job.result()
            if text is not None and item_id == self._item_id:
                found = PartialTranscript(item_id=item_id, text=text, end=end, is_pause=is_pause)
                for listener in self.listeners:
                    listener(found)

        job.add_done_callback(on_done)

    async def _recognized(self, end: int) -> str | None:
        try:
            clip = Clip(self._peek(self._start, end))
            settings = self._context.settings
            return await transcribe(
                self._context.gateway, clip.recording, settings.hearing, settings.store_option
            )
        except FleetError as error:
            log.debug("a turn under way was not transcribed: %s", error.message)
            return None


async def _joined(deltas: AsyncIterator[str]) -> str | None:
    try:
        return "".join([delta async for delta in deltas])
    except FleetError:
        return None
