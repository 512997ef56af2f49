"""A streamed answer to the byte: its text, its PCM, when each chunk came, and where it first differs from another. Pure."""

from base64 import b64decode
from collections.abc import Iterator

import msgspec
import numpy as np

from fleet.bench.answer_timing import AudioChunk, simulate_playback
from fleet.bench.chat import BYTES_PER_SAMPLE, PCM_RATE_HZ, Recording

DATA, DONE = b"data: ", b"[DONE]"
TEXT, AUDIO = "text", "audio"
ROUNDING_STEPS = 32
"""Of 16-bit PCM: a thousandth of full scale, 60 dB below it. Another code frame differs by hundreds of times that."""
BYTES_PER_S = BYTES_PER_SAMPLE * PCM_RATE_HZ


class ReceivedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a listener was told. Units: `audio` is 16-bit little-endian mono PCM at 24 kHz; times are seconds since the request.

    `chunks_s`: when each piece of audio came, or of text where the answer has no audio. `stalled_s`: for how long a listener who
    plays from the first piece on had nothing to play before the end; None without audio.
    """

    text: bytes
    audio: bytes
    chunks_s: tuple[float, ...]
    stalled_s: float | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first byte at which two answers differ; where one is the beginning of the other, that one's length.

    `peak` is the largest difference between samples, where the texts are equal and the audio is as long; else None.
    Units: bytes of UTF-8 in `text`, of 16-bit PCM in `audio`; `peak` in steps of 16-bit PCM.
    """

    medium: str
    offset: int
    expected_bytes: int
    got_bytes: int
    peak: int | None = None

    @property
    def is_rounding(self) -> bool:
        """Whether the answers say and sound the same, but for the last bits of samples."""
        return self.peak is not None and self.peak <= ROUNDING_STEPS


class Broken(Exception):
    """A stream that is not a whole answer; its message says why."""


class _Problem(msgspec.Struct, frozen=True):
    message: str


class _Audio(msgspec.Struct, frozen=True):
    data: str | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    audio: _Audio | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    error: _Problem | None = None


_event = msgspec.json.Decoder(_Event)


def read_answer(recording: Recording) -> ReceivedAnswer:
    """Decode a stream to its end. Raises: Broken if it carries an error or stops before its end."""
    text, audio = bytearray(), bytearray()
    text_s: list[float] = []
    heard: list[AudioChunk] = []
    for at_s, event in _events(recording):
        if event.error is not None:
            raise Broken(event.error.message)
        for choice in event.choices:
            if choice.delta.content:
                text += choice.delta.content.encode()
                text_s.append(at_s)
            if choice.delta.audio is not None and choice.delta.audio.data:
                pcm = b64decode(choice.delta.audio.data)
                audio += pcm
                heard.append(AudioChunk(at_s, len(pcm) / BYTES_PER_S))
    chunks_s = tuple(piece.at_s for piece in heard) or tuple(text_s)
    stalled_s = simulate_playback(heard).stalled_s if heard else None
    return ReceivedAnswer(text=bytes(text), audio=bytes(audio), chunks_s=chunks_s, stalled_s=stalled_s)


def _events(recording: Recording) -> Iterator[tuple[float, _Event]]:
    """Server-sent events, each with the time at which its last byte came. Raises: Broken at an end without `[DONE]`."""
    rest, count = b"", 0
    for at_s, piece in recording.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line == DATA + DONE:
                return
            if line.startswith(DATA):
                count += 1
                yield at_s, _event.decode(line.removeprefix(DATA))
    raise Broken(f"the stream stopped before its end, after {count} events")


def first_difference(expected: ReceivedAnswer, got: ReceivedAnswer) -> Difference | None:
    """Text first: audio that follows another text differs for that reason."""
    for medium, ours, theirs in ((TEXT, expected.text, got.text), (AUDIO, expected.audio, got.audio)):
        if ours != theirs:
            shorter = min(len(ours), len(theirs))
            offset = next((at for at in range(shorter) if ours[at] != theirs[at]), shorter)
            peak = _peak(ours, theirs) if medium == AUDIO and len(ours) == len(theirs) else None
            return Difference(medium=medium, offset=offset, expected_bytes=len(ours), got_bytes=len(theirs), peak=peak)
    return None


def _peak(ours: bytes, theirs: bytes) -> int:
    """Of two pieces of 16-bit PCM of one length."""
    a, b = (
        np.frombuffer(pcm[: len(pcm) // BYTES_PER_SAMPLE * BYTES_PER_SAMPLE], "<i2").astype(np.int32) for pcm in (ours, theirs)
    )
    return int(np.abs(a - b).max(initial=0))


def longest_gap_s(chunks_s: tuple[float, ...]) -> float | None:
    """Seconds between two chunks, at the most; None with fewer than two."""
    return max((later - earlier for earlier, later in zip(chunks_s, chunks_s[1:], strict=False)), default=None)
