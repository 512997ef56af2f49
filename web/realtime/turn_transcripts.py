"""Transcripts of the user's turns in one voice session: words while a turn is under way, and the
whole transcript of its item.

A transcript comes with the response to the turn, where the graph gives it, or from the recognition
of the pause that ended the turn; otherwise it is requested.
"""

import asyncio
import logging

from fleet.core.errors import FleetError
from web.http.errors import error_type
from web.openai.recognition import transcribe
from web.realtime.context import SessionContext
from web.realtime.conversation import Clip
from web.realtime.generation import Generation
from web.realtime.partial_transcripts import AgreedWords, PartialTranscript, PartialTranscripts
from web.realtime.protocol import server_events as server
from web.realtime.response_manager import ResponseManager

log = logging.getLogger("fleet.web")

Recognition = asyncio.Task[str | None]


class TurnTranscripts:
    def __init__(
        self,
        context: SessionContext,
        responses: ResponseManager,
        partials: PartialTranscripts,
    ) -> None:
        self._context, self._responses = context, responses
        self._waiting: list[str] = []
        """Ids of the user's items whose transcripts are requested once no response is about to
        begin.
        """
        self._sent: dict[str, AgreedWords] = {}
        """Words that were sent to the client, by item id, for turns without a complete transcript.
        """
        self._recognitions: dict[str, Recognition] = {}
        """Tasks that recognise whole turns, by item id, for turns without a complete transcript."""
        self._jobs: set[asyncio.Task[None]] = set()
        partials.listeners.append(self._send_partial)

    @property
    def come_with_responses(self) -> bool:
        """True if the transcript of a turn comes with the response to it."""
        return self._context.gateway.edges.heard is not None

    def add(self, item_id: str) -> None:
        """Add an item of which the client wants the transcript."""
        self._waiting.append(item_id)

    def keep(self, item_id: str, recognition: Recognition | None) -> None:
        """Keep the recognition of a turn that has just ended, for its transcript; ignore None."""
        if recognition is not None:
            self._recognitions[item_id] = recognition

    async def recognized(self, item_id: str) -> str | None:
        """Return the transcript of a turn whose recognition was kept; None without one, or if it
        failed.
        """
        recognition = self._recognitions.get(item_id)
        return await recognition if recognition is not None else None

    def send_waiting(self) -> None:
        """Request all waiting transcripts in the background, and send each one as it arrives. Call
        this once a response has begun, or if no response is active.
        """
        items, self._waiting = self._waiting, []
        for item_id in items:
            clip = self._context.conversation.clips.get(clip_name(item_id))
            if clip is not None:
                job = asyncio.create_task(self._transcribe(item_id, clip))
                self._jobs.add(job)
                job.add_done_callback(self._on_job_done)

    def send_with_response(self) -> None:
        """Send the transcripts that come with the response that has just begun."""
        if self.come_with_responses and self._responses.active is not None:
            self.send_waiting()

    def forget(self, item_id: str) -> None:
        """Forget the sent words and the recognition of a turn; a recognition under way is
        cancelled.
        """
        self._sent.pop(item_id, None)
        if (recognition := self._recognitions.pop(item_id, None)) is not None:
            recognition.cancel()

    def stop(self) -> None:
        for job in (*self._jobs, *self._recognitions.values()):
            job.cancel()

    def _send_partial(self, partial: PartialTranscript) -> None:
        words = self._sent.setdefault(partial.item_id, AgreedWords())
        self._send_delta(partial.item_id, words.add(partial.text))

    def _send_delta(self, item_id: str, delta: str) -> None:
        if delta:
            self._context.send(
                server.TranscriptionDelta(item_id=item_id, content_index=0, delta=delta)
            )

    async def _heard(self, item_id: str, generation: Generation) -> str | None:
        """Send the transcript that comes with a response as it arrives, and return it; None if the
        response ends before it.
        """
        text, words = "", self._sent.setdefault(item_id, AgreedWords())
        try:
            async for delta in generation.transcript_of(clip_name(item_id)):
                text += delta
                self._send_delta(item_id, words.finish(text))
        except FleetError:
            return None
        return text

    async def _transcribe(self, item_id: str, clip: Clip) -> None:
        name = clip_name(item_id)
        generation = self._responses.hearing(name)
        text = await self._heard(item_id, generation) if generation is not None else None
        try:
            async with self._responses.recognitions.recognizing(name):
                if text is None:
                    text = await self._text(item_id, clip)
                is_known = self._context.conversation.set_transcript(item_id, 0, text)
        except FleetError as error:
            detail = server.TranscriptionError(
                type=error_type(error), code=error.code, message=error.message, param=error.param
            )
            self._context.send(
                server.TranscriptionFailed(item_id=item_id, content_index=0, error=detail)
            )
            return
        finally:
            words = self._sent.get(item_id, AgreedWords())
            self.forget(item_id)
        if is_known:
            self._send_delta(item_id, words.finish(text))
            usage = server.TranscriptionUsage(seconds=round(clip.seconds, 3))
            self._context.send(
                server.TranscriptionCompleted(
                    item_id=item_id, content_index=0, transcript=text, usage=usage
                )
            )

    async def _text(self, item_id: str, clip: Clip) -> str:
        """Return the transcript of an item: the known one, the kept recognition, or a new
        recognition. Raises: FleetError.
        """
        text = self._context.conversation.transcript_of(clip_name(item_id))
        if text is None:
            text = await self.recognized(item_id)
        if text is None:
            settings = self._context.settings
            text = await transcribe(
                self._context.gateway, clip.recording, settings.hearing, settings.store_option
            )
        return text

    def _on_job_done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("the transcription of a user's turn failed", exc_info=error)


def clip_name(item_id: str) -> str:
    """Return the name of the audio of a spoken turn."""
    return f"{item_id}.0"
