"""Transcription of a recording that one request cannot hold: it is decoded into a temporary file,
cut at pauses, and each piece is a request of its own.

A few pieces are recognised at a time, so memory does not grow with the recording. A request that
loses its worker continues as any other, so each piece is in the transcript once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace

from fleet.core.errors import NoWorker, Overloaded, RedisUnreachable
from fleet.core.ids import new_request_id
from fleet.processing import RecognitionOptions, Recording
from fleet.processing.spooled_audio import LONGEST_PIECE_S, SpooledAudio
from fleet.processing.timed_text import shifted
from web.gateway.answer import HeardPiece
from web.gateway.gateway import Gateway
from web.openai.recognition import is_spoken, prepare_transcription, reports_of, text_of

log = logging.getLogger("fleet.web")

PIECES_AHEAD = 4
"""Pieces that are recognised at a time: a batch of the recogniser."""
RETRY_S, MAX_TRIES = 1.0, 300
"""Seconds between two tries of a piece that is refused because the fleet is overloaded, or has no
worker or no Redis, and the limit of tries. The first piece is tried once; a later piece is tried
again, so that the transcript of the earlier pieces is not lost.
"""


class LongTranscription:
    """The transcript of a decoded recording, piece by piece. All times count from the beginning of
    the recording. If the client names no language, the language recognised in the first piece with
    speech applies to all later pieces.
    """

    def __init__(self, gateway: Gateway, audio: SpooledAudio, hearing: RecognitionOptions) -> None:
        self._gateway, self._audio = gateway, audio
        self._hearing = replace(hearing, times=True)
        self._longest_s = min(LONGEST_PIECE_S, gateway.config.limits.max_audio_s)
        self._is_begun = False

    @property
    def seconds(self) -> float:
        return round(self._audio.num_samples / self._audio.rate_hz, 3)

    async def pieces(self) -> AsyncGenerator[HeardPiece]:
        """Yield the text and reports of each piece, in order; the text is empty for a piece without
        speech. The recording is closed at the end. If a piece fails or the caller stops early, the
        requests of the other pieces are aborted. Raises: FleetError.
        """
        running: deque[asyncio.Task[HeardPiece]] = deque()
        try:
            for start, end in self._audio.pieces(self._longest_s):
                running.append(asyncio.create_task(self._heard(start, end)))
                if len(running) == PIECES_AHEAD or not self._hearing.language:
                    yield self._joined(await running.popleft())
            while running:
                yield self._joined(await running.popleft())
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._audio.close()

    def _joined(self, piece: HeardPiece) -> HeardPiece:
        """Return a piece with a blank before its text, except for the first text; adopt the piece's
        language for later pieces.
        """
        if not self._hearing.language:
            found = next((one.language for one in piece.reports if one.language), None)
            self._hearing = replace(self._hearing, language=found)
        blank = " " if self._is_begun and piece.text else ""
        self._is_begun |= bool(piece.text)
        return HeardPiece(blank + piece.text, reports=piece.reports)

    async def _heard(self, start: int, end: int) -> HeardPiece:
        samples = await asyncio.to_thread(self._audio.read, start, end)
        recording = Recording(samples, self._audio.rate_hz)
        for num_left in reversed(range(MAX_TRIES)):
            try:
                return await self._recognized(recording, start / self._audio.rate_hz)
            except (NoWorker, Overloaded, RedisUnreachable) as error:
                if not start or not num_left:
                    raise
                log.info("a piece of a long recording waits: %s", error.message)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("the last try returns or raises")

    async def _recognized(self, recording: Recording, begin_s: float) -> HeardPiece:
        chat = await prepare_transcription(
            self._gateway, recording, new_request_id(), self._hearing
        )
        if not await is_spoken(chat):
            return HeardPiece("")
        active = await self._gateway.submit_prepared(chat)
        async with active.answer as answer:
            pieces = [piece async for piece in answer.pieces()]
        reports = tuple(shifted(report, begin_s) for report in reports_of(pieces))
        return HeardPiece("".join(map(text_of, pieces)), reports=reports)


async def spool_recording(gateway: Gateway, file: bytes) -> SpooledAudio:
    """Decode the file of a transcription to disk. Raises: BadInput, InputTooLarge naming `file`."""
    return await gateway.audio.spool(file, "file")
