"""Arrival times of the parts of one streamed answer, and the latency metrics computed from them.
Pure; uses no HTTP and no clock.

Units: seconds since the request was sent.
"""

from collections.abc import Sequence

import msgspec

from fleet.lab.client.audio import BYTES_PER_SAMPLE, PCM_RATE_HZ
from fleet.lab.client.chat import StreamRecording, read_stream


class AudioChunk(msgspec.Struct, frozen=True, array_like=True):
    """A received audio chunk: its arrival time and its duration."""

    at_s: float
    audio_s: float


class AnswerTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival times of one answer. `prompt`: index of the prompt in its phase. `sent_s` counts from
    the start of the phase; `text` has the arrival time of each text chunk. `num_samples`: number of
    audio samples.
    """

    prompt: int
    sent_s: float
    text: tuple[float, ...] = ()
    audio: tuple[AudioChunk, ...] = ()
    done_s: float
    answer: str = ""
    num_samples: int = 0
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0


class PlaybackSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulated playback that starts with the first chunk, pauses when the buffer is
    empty, and resumes with the next chunk.

    `viability`: share of chunks that arrived before the buffer was empty; the first chunk always
    counts.
    """

    viability: float
    stalled_s: float


class AnswerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Latency metrics of one answer. Audio metrics are None without audio, `first_text_s` without
    text.

    `rtf`: seconds from the request to the last sample per second of audio; below 1 is faster than
    real time.
    """

    first_text_s: float | None
    first_audio_s: float | None
    last_sample_s: float | None
    audio_s: float
    rtf: float | None
    max_gap_s: float | None
    viability: float | None
    stalled_s: float | None
    total_s: float


def time_answer(
    prompt: int, recording: StreamRecording, phase_began_s: float = 0.0
) -> AnswerTiming:
    """Decode a recorded stream and return its arrival times. `phase_began_s`: beginning of the
    phase on the clock of `recording.sent_s`. Raises: StreamError.
    """
    answer = read_stream(recording.pieces)
    num_samples = [len(pcm) // BYTES_PER_SAMPLE for _, pcm in answer.audio]
    return AnswerTiming(
        prompt=prompt,
        sent_s=recording.sent_s - phase_began_s,
        text=tuple(at_s for at_s, _ in answer.text),
        audio=tuple(
            AudioChunk(at_s, count / PCM_RATE_HZ)
            for (at_s, _), count in zip(answer.audio, num_samples, strict=True)
        ),
        done_s=recording.pieces[-1][0],
        answer="".join(text for _, text in answer.text),
        num_samples=sum(num_samples),
        num_prompt_tokens=answer.prompt_tokens,
        num_answer_tokens=answer.text_tokens,
    )


def simulate_playback(audio: Sequence[AudioChunk]) -> PlaybackSummary:
    """Simulate the playback of chunks in order of arrival. Without chunks the viability is 1."""
    if not audio:
        return PlaybackSummary(viability=1.0, stalled_s=0.0)
    on_time, stalled_s = 1, 0.0
    empty_s = audio[0].at_s + audio[0].audio_s
    for chunk in audio[1:]:
        late_s = max(0.0, chunk.at_s - empty_s)
        on_time += late_s == 0.0
        stalled_s += late_s
        empty_s += late_s + chunk.audio_s
    return PlaybackSummary(viability=on_time / len(audio), stalled_s=stalled_s)


def gaps(audio: Sequence[AudioChunk]) -> list[float]:
    """Return the times, in seconds, between the arrivals of successive audio chunks."""
    return [later.at_s - earlier.at_s for earlier, later in zip(audio, audio[1:], strict=False)]


def measure_answer(timing: AnswerTiming) -> AnswerMetrics:
    audio = timing.audio
    audio_s = sum(chunk.audio_s for chunk in audio)
    playback = simulate_playback(audio) if audio else None
    return AnswerMetrics(
        first_text_s=timing.text[0] if timing.text else None,
        first_audio_s=audio[0].at_s if audio else None,
        last_sample_s=audio[-1].at_s if audio else None,
        audio_s=audio_s,
        rtf=audio[-1].at_s / audio_s if audio_s else None,
        max_gap_s=max(gaps(audio), default=None),
        viability=playback.viability if playback else None,
        stalled_s=playback.stalled_s if playback else None,
        total_s=timing.done_s,
    )
