"""The listener's side of an answer as lanes: the user's sound, the sound of the answer as it was
heard, what was made against what was played. Pure; knows no stage by name and no SVG element.

Units: `*_us` are microseconds since 1970, `*_s` seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fleet.core.ids import CLIENT
from fleet.telemetry.trace import LIVE_STATES, PlaybackReport
from web.console import formats
from web.console.answer_facts import AUDIO, AnswerFacts
from web.console.lanes import SCALE, Axis, Lane, LanePoint, LaneShape, LaneSpan
from web.console.stored_sound import StoredSound
from web.console.waterfall import event_point
from web.gateway.word_times import WordTime

MARKED = ("lost", "handed_off", "failed")
LEAD = 0.15
"""Largest share of the axis that is left for sound before the answer."""
MIDDLE, WAVE, WORDS_Y = 16.0, 15.0, 32.0
"""Geometry of the answer's lane in SVG units: the wave's axis and largest height, the words' top.
"""
LEAST, QUIET = 0.03, 0.02
"""Height of silence, and the level up to which sound is drawn as quiet instead of being scaled up.
"""
STAIR_TOP, STAIR_BOTTOM = 4.0, 46.0
TALL = 48
MAX_STEPS = 300
"""Largest number of steps in the curve of produced sound; more could not be told apart."""
MIN_PHRASE = 110.0
"""Narrowest phrase on the axis that has room for its first words."""


@dataclass(frozen=True, slots=True)
class PlayedSound:
    """When each sample is heard: `samples[n]` samples were played at `times_us[n]`. `is_reported`
    is False if no player has reported, and playback is assumed to begin with the first sound and to
    go on while there is sound.
    """

    times_us: tuple[int, ...]
    samples: tuple[int, ...]
    is_reported: bool

    def at(self, sample: float) -> float:
        """Return the time at which a sample is heard."""
        return float(np.interp(sample, self.samples, self.times_us))

    @property
    def num_heard(self) -> int:
        return self.samples[-1]


def reports_of(facts: AnswerFacts) -> tuple[PlaybackReport, ...]:
    last = facts.trace.playback
    return (*facts.trace.earlier_playback, *((last,) if last is not None else ()))


def find_playing(facts: AnswerFacts) -> PlayedSound | None:
    """Return when the sound of an answer is heard; None without sound."""
    edge, rate_hz = facts.edge(AUDIO), facts.rate_hz
    if edge is None or not rate_hz or not facts.num_samples:
        return None
    if reports := [report for report in reports_of(facts) if report.played_samples]:
        first = reports[0]
        begin_us = max(first.at_us - round(first.played_samples / rate_hz * 1e6), edge.first_us)
        times, samples = [begin_us], [0]
        for report in reports:
            times.append(max(report.at_us, times[-1]))
            samples.append(max(report.played_samples, samples[-1]))
        return PlayedSound(tuple(times), tuple(samples), True)
    end_us, total = edge.first_us, 0
    times, samples = [end_us], [0]
    arrivals = [(arrival.at_us, arrival.samples) for arrival in facts.arrivals]
    for at_us, count in arrivals or [(edge.first_us, facts.num_samples)]:
        begin_us, total = max(end_us, at_us), total + count
        end_us = begin_us + round(count / rate_hz * 1e6)
        times += [begin_us, end_us]
        samples += [total - count, total]
    return PlayedSound(tuple(times), tuple(samples), False)


def find_axis(facts: AnswerFacts) -> Axis:
    """Return the axis of an answer: from the end of the user's speech to the end of the answer or
    of its playback.
    """
    trace, playing = facts.trace, find_playing(facts)
    end_us = max(facts.end_us, trace.created_us + 1, playing.times_us[-1] if playing else 0)
    start_us = min(trace.created_us, facts.origin_us)
    if trace.turn is not None:
        room_us = LEAD * (end_us - start_us)
        start_us -= round(min(room_us, _speech_s(facts) * 1e6))
    return Axis(start_us, end_us, trace.created_us)


def _speech_s(facts: AnswerFacts) -> float:
    """Return the length of the user's sound in seconds. For a spoken turn this is the prompt's last
    clip, since the earlier clips are from the turns before.
    """
    clips = facts.trace.audio if facts.trace.turn is None else facts.trace.audio[-1:]
    return sum(clip.duration_s for clip in clips)


def build_listener_lanes(
    facts: AnswerFacts, sound: StoredSound, axis: Axis, heard: Sequence[str]
) -> tuple[Lane, ...]:
    """Build the lanes of the listener. `heard` are the transcripts of the user's sound."""
    playing = find_playing(facts)
    lanes = [_user_lane(facts, axis, heard)] if facts.trace.audio else []
    if playing is not None:
        points = tuple(_marks(facts, axis))
        lanes += [
            _answer_lane(facts, sound, playing, axis, points),
            _flow_lane(facts, playing, axis),
        ]
    return tuple(lanes)


def _user_lane(facts: AnswerFacts, axis: Axis, heard: Sequence[str]) -> Lane:
    duration_s, turn = _speech_s(facts), facts.trace.turn
    said = " ".join(heard if turn is None else heard[-1:]).strip()
    quoted = f": “{said}”" if said else ""
    spans: tuple[LaneSpan, ...] = ()
    note = f"{formats.seconds(duration_s)} of sound, sent whole"
    if turn is not None:
        waited = formats.ms((turn.decided_us - turn.voiced_end_us) / 1000)
        speech = axis.span(
            axis.start_us,
            turn.voiced_end_us,
            "speech",
            f"your speech, {formats.seconds(duration_s)}, ended "
            f"{axis.at(turn.voiced_end_us)}{quoted}",
        )
        wait = axis.span(
            turn.voiced_end_us, turn.decided_us, "pause", f"waiting for you to finish, {waited}"
        )
        spans = (replace(speech, label=said), wait)
        note = f"waited {waited} for you to finish"
    return Lane(key="you", label="you", kind="you", stage="", note=note + quoted, spans=spans)


def _marks(facts: AnswerFacts, axis: Axis) -> Iterator[LanePoint]:
    for event in facts.trace.events:
        if event.what in MARKED and event.stage:
            yield event_point(event, axis)
        elif event.what == "attached" and event.stage == CLIENT:
            yield event_point(event, axis)


def _answer_lane(
    facts: AnswerFacts,
    sound: StoredSound,
    playing: PlayedSound,
    axis: Axis,
    points: tuple[LanePoint, ...],
) -> Lane:
    shapes = tuple(_wave(sound.peaks, facts, playing, axis))
    how = "as the player reported" if playing.is_reported else "if played at once"
    note = f"{formats.seconds(facts.sound_s)}, {how}"
    heard_us = playing.times_us[-1]
    whole = axis.span(playing.times_us[0], heard_us, "heard", f"the answer's sound, {note}")
    words = tuple(_phrases(sound.words, facts, playing, axis))
    return Lane(
        key="answer",
        label="answer",
        kind="answer",
        stage="",
        note=note if shapes else f"{note}; {_absence(facts)}",
        spans=(*(() if shapes else (whole,)), *_dropouts(facts, playing, axis), *words),
        points=points,
        shapes=shapes,
        height=TALL,
    )


def _absence(facts: AnswerFacts) -> str:
    is_live = facts.trace.state in LIVE_STATES
    return "drawn when the answer has ended" if is_live else "the sound is not stored"


def _wave(
    peaks: Sequence[float], facts: AnswerFacts, playing: PlayedSound, axis: Axis
) -> Iterator[LaneShape]:
    """Yield the wave of the part that was heard, then of the part that was not."""
    if not peaks:
        return
    share, loudest = facts.num_samples / len(peaks), max(*peaks, QUIET)
    last_us, per_us = playing.times_us[-1], facts.rate_hz / 1e6
    heard: list[tuple[float, float]] = []
    unheard: list[tuple[float, float]] = []
    for number, level in enumerate(peak / loudest for peak in peaks):
        sample = (number + 0.5) * share
        if sample <= playing.num_heard:
            heard.append((axis.x(playing.at(sample)), level))
        elif (at_us := last_us + (sample - playing.num_heard) / per_us) <= axis.end_us:
            unheard.append((axis.x(at_us), level))
    for kind, levels in (("heard", heard), ("unheard", unheard)):
        if len(levels) > 1:
            yield LaneShape(kind=kind, path=_outline(levels))


def _outline(levels: Sequence[tuple[float, float]]) -> str:
    upper = [f"{x:g} {MIDDLE - WAVE * max(level, LEAST):.1f}" for x, level in levels]
    lower = [f"{x:g} {MIDDLE + WAVE * max(level, LEAST):.1f}" for x, level in reversed(levels)]
    return f"M{'L'.join([*upper, *lower])}z"


def _phrases(
    words: Sequence[WordTime], facts: AnswerFacts, playing: PlayedSound, axis: Axis
) -> Iterator[LaneSpan]:
    """Yield the words that were heard, joined to phrases that are wide enough to be read."""
    phrase: list[WordTime] = []
    per_ms = facts.rate_hz / 1000
    heard = [word for word in words if word.end_ms * per_ms <= playing.num_heard]
    for number, word in enumerate(heard):
        phrase.append(word)
        begin_us = round(playing.at(phrase[0].start_ms * per_ms))
        end_us = round(playing.at(word.end_ms * per_ms))
        is_last = number + 1 == len(heard)
        if axis.x(end_us) - axis.x(begin_us) < MIN_PHRASE and not is_last:
            continue
        text = " ".join(each.word for each in phrase)
        span = axis.span(begin_us, end_us, "word", f"“{text}”, {axis.at(begin_us)}")
        yield replace(span, label=text)
        phrase = []


def _dropouts(facts: AnswerFacts, playing: PlayedSound, axis: Axis) -> Iterator[LaneSpan]:
    """Yield the times in which playback ran dry: between two reports of which the later has more
    dropouts, or without reports as the times of the chunks tell.
    """
    if not playing.is_reported:
        for from_us, to_us in facts.dry_times():
            took = formats.ms((to_us - from_us) / 1000)
            detail = f"nothing to play for {took}, {axis.at(from_us)}"
            yield axis.span(from_us, to_us, "dropout", detail)
        return
    start = PlaybackReport(played_samples=0, underruns=0, at_us=playing.times_us[0])
    for before, report in pairwise((start, *reports_of(facts))):
        count = report.underruns - before.underruns
        if count > 0:
            what = f"{count} dropout{'' if count == 1 else 's'}, reported {axis.at(report.at_us)}"
            yield axis.span(before.at_us, report.at_us, "dropout", what)


def _flow_lane(facts: AnswerFacts, playing: PlayedSound, axis: Axis) -> Lane:
    """Return the lane of sound made against sound played, each as a curve over time."""
    total = max(facts.num_samples, 1)

    def y(samples: float) -> str:
        return f"{STAIR_BOTTOM - (STAIR_BOTTOM - STAIR_TOP) * min(samples / total, 1):.1f}"

    shapes: list[LaneShape] = []
    if facts.arrivals:
        path, made = f"M{axis.x(facts.arrivals[0].at_us):g} {y(0)}", 0
        every = -(-len(facts.arrivals) // MAX_STEPS)
        for number, arrival in enumerate(facts.arrivals, 1):
            made += arrival.samples
            if number % every == 0 or number == len(facts.arrivals):
                path += f"H{axis.x(arrival.at_us):g}V{y(made)}"
        shapes.append(LaneShape(kind="made", path=f"{path}H{SCALE}"))
    if playing.is_reported:
        points = zip(playing.times_us, playing.samples, strict=True)
        path = "L".join(f"{axis.x(at):g} {y(samples)}" for at, samples in points)
        shapes.append(LaneShape(kind="played", path=f"M{path}"))
    return Lane(
        key="flow",
        label="made, played",
        kind="flow",
        stage="",
        note=_describe_flow(facts, playing),
        spans=tuple(_dropouts(facts, playing, axis)),
        shapes=tuple(shapes),
        height=TALL,
    )


def _describe_flow(facts: AnswerFacts, playing: PlayedSound) -> str:
    made = f"{formats.seconds(facts.sound_s)} made"
    if not facts.arrivals:
        made += f", {_absence(facts)}"
    if not playing.is_reported:
        return f"{made}; no report of a player"
    return f"{made}; {formats.seconds(playing.num_heard / facts.rate_hz)} played"
