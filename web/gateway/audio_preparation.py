"""Decoding of the audio in requests: after admission, and outside of the event loop.

Knows no HTTP, no container and no codec.
"""

import asyncio

import numpy as np

from fleet.config.schema import Limits
from fleet.control.client import Applicant
from fleet.core.errors import InputTooLarge
from fleet.processing import ChatRequest, Frontend, Recording
from fleet.processing.audio import decode_blocks, decode_parts, needs_decoder
from fleet.processing.base import AudioSource, Samples
from fleet.processing.decoder_pool import DecoderPool
from fleet.processing.decoding import DecodeJob
from fleet.processing.spooled_audio import SpooledAudio, pcm16
from web.gateway.fleet_port import FleetPort


class AudioPreparation:
    """Decoder of the audio files in chat requests, with a pool of decoder processes.

    Invariants: at any time, at most as many requests are being decoded as the fleet could admit in
    addition to the running requests.
    """

    def __init__(self, client: FleetPort, frontend: Frontend, limits: Limits) -> None:
        self._client = client
        self._frontend = frontend
        self._max_audio_s = limits.max_audio_s
        self._max_long_s = limits.max_transcription_s
        self._pool = DecoderPool()
        self._num_preparing = 0

    async def decode(self, chat: ChatRequest, applicant: Applicant) -> ChatRequest:
        """Wait in the queue as `applicant`, then return the chat with its audio decoded. A chat
        without undecoded audio is returned at once. Cancelling the caller ends the decoding.
        """
        parts = [
            (part.where, part.data)
            for part in chat.audio_parts
            if not isinstance(part.data, np.ndarray)
        ]
        if not parts or not self._frontend.audio_rate_hz:
            return chat
        self._frontend.voice(chat.voice, chat.voice_where)
        applicant.num_bytes = sum(_num_bytes(data) for _, data in parts)
        await self._wait_until_admissible(chat, applicant)
        self._count(1)
        try:
            return chat.with_samples(await self._samples(parts))
        finally:
            self._count(-1)

    async def _wait_until_admissible(self, chat: ChatRequest, applicant: Applicant) -> None:
        """Wait until the fleet would admit the request beside those that are being prepared."""
        requests = self._client.requests
        while True:
            num_admissible = await requests.check_admission(chat.id, chat.outputs, applicant)
            if self._num_preparing < num_admissible:
                return
            cause = f"{self._num_preparing} requests with audio are being prepared already"
            await requests.wait_for_turn(chat.id, applicant, cause)

    def _count(self, by: int) -> None:
        self._num_preparing += by
        self._client.requests.count_preparing(by)

    async def _samples(self, parts: list[tuple[str, AudioSource]]) -> list[Samples]:
        rate_hz = self._frontend.audio_rate_hz
        files = [(where, data) for where, data in parts if not isinstance(data, Recording)]
        if needs_decoder(files):
            assert len(files) == len(parts), "a chat holds files or recordings, never both"
            return await self._pool.decode(
                DecodeJob.of(files, rate_hz=rate_hz, max_audio_s=self._max_audio_s)
            )
        return await asyncio.to_thread(
            decode_parts, parts, rate_hz=rate_hz, max_audio_s=self._max_audio_s, plain_only=True
        )

    async def spool(self, file: bytes, where: str) -> SpooledAudio:
        """Decode one file of at most `limits.max_transcription_s` to disk. Cancelling the caller
        ends the decoding.

        Raises: BadInput, InputTooLarge naming the field `where`.
        """
        audio, max_s = SpooledAudio(self._frontend.audio_rate_hz), self._max_long_s
        try:
            if needs_decoder([(where, file)]):
                job = DecodeJob.of(
                    [(where, file)], rate_hz=audio.rate_hz, max_audio_s=max_s, streams=True
                )
                await self._pool.decode(job, audio.append)
            else:
                await asyncio.to_thread(_spool_plain, file, where, audio, max_s)
        except BaseException as error:
            audio.close()
            if not isinstance(error, InputTooLarge):
                raise
            cause = f"the recording is longer than {max_s:g} s (limits.max_transcription_s)"
            raise InputTooLarge(f"{where}: {cause}", param=where) from error
        return audio

    def close(self) -> None:
        """End the decoder processes, after the last request."""
        self._pool.close()


def _spool_plain(file: bytes, where: str, audio: SpooledAudio, max_s: float) -> None:
    """Decode a plain WAV file to disk."""
    for block in decode_blocks(
        file, rate_hz=audio.rate_hz, max_s=max_s, where=where, plain_only=True
    ):
        audio.append(pcm16(block))


def _num_bytes(data: AudioSource) -> int:
    return data.samples.nbytes if isinstance(data, Recording) else len(data)
