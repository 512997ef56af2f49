"""What one listener heard of one answer, and the numbers that follow from it. Pure; knows no HTTP and no clock.

Times are seconds since the request was sent.
"""

from collections.abc import Sequence

import msgspec


class AudioChunk(msgspec.Struct, frozen=True, array_like=True):
    """A piece of audio that arrived."""

    at_s: float
    audio_s: float


class AnswerTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as it came. `sent_s` counts from the start of the phase; `text` holds the times at which text came."""

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
    """A listener who starts at the first chunk, waits whenever nothing is left, and goes on with the next chunk.

    `viability` is the share of chunks that arrived before the sound ran out; the first one counts.
    """

    viability: float
    stalled_s: float


class AnswerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one answer; those of sound are None where there was none, `first_text_s` where there was no text.

    `rtf` is seconds from request to last sample per second of audio: below 1 is faster than it plays.
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


def simulate_playback(audio: Sequence[AudioChunk]) -> PlaybackSummary:
    """Play chunks in their order of arrival. Nothing to play is perfectly viable."""
    if not audio:
        return PlaybackSummary(viability=1.0, stalled_s=0.0)
    on_time, stalled_s = 1, 0.0
    runs_dry_s = audio[0].at_s + audio[0].audio_s
    for chunk in audio[1:]:
        late_s = max(0.0, chunk.at_s - runs_dry_s)
        on_time += late_s == 0.0
        stalled_s += late_s
        runs_dry_s += late_s + chunk.audio_s
    return PlaybackSummary(viability=on_time / len(audio), stalled_s=stalled_s)


def gaps(audio: Sequence[AudioChunk]) -> list[float]:
    """Seconds between one chunk's arrival and the next."""
    return [later.at_s - earlier.at_s for earlier, later in zip(audio, audio[1:], strict=False)]


def measure_answer(trace: AnswerTiming) -> AnswerMetrics:
    audio = trace.audio
    audio_s = sum(chunk.audio_s for chunk in audio)
    playback = simulate_playback(audio) if audio else None
    return AnswerMetrics(
        first_text_s=trace.text[0] if trace.text else None,
        first_audio_s=audio[0].at_s if audio else None,
        last_sample_s=audio[-1].at_s if audio else None,
        audio_s=audio_s,
        rtf=audio[-1].at_s / audio_s if audio_s else None,
        max_gap_s=max(gaps(audio), default=None),
        viability=playback.viability if playback else None,
        stalled_s=playback.stalled_s if playback else None,
        total_s=trace.done_s,
    )
