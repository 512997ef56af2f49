"""The listener's lanes: when sound was heard, made and missing, and pauses of the stages."""

import re

import msgspec
import numpy as np

from fleet.telemetry.trace import AudioIn, PlaybackReport, RequestTrace, SpokenTurn
from tests.web.plausible_answers import (
    CODE2WAV,
    GRAPH,
    RATE,
    SAMPLES,
    START,
    TALKER,
    WORDS,
    at,
    build_answers,
    code_chunks,
    events_of,
    reports,
    sound_chunks,
    spoken,
)
from web.console.answer_facts import AnswerFacts, Arrival
from web.console.answer_view import build_waterfall
from web.console.lanes import SCALE, Lane
from web.console.listener import find_axis, find_playing
from web.console.stalls import find_stalls
from web.console.stored_sound import NO_SOUND, StoredSound, peaks_of, read_sound


def facts_of(trace: RequestTrace, sound: StoredSound = NO_SOUND) -> AnswerFacts:
    return AnswerFacts(trace, GRAPH, RATE, sound.arrivals)


def lanes_of(trace: RequestTrace, sound: StoredSound = NO_SOUND) -> dict[str, Lane]:
    shown = build_waterfall(facts_of(trace, sound), {}, sound, ("hot or cold",))
    return {lane.key: lane for lane in shown.lanes}


def test_peaks_are_the_highest_levels_of_equal_parts() -> None:
    pcm = np.zeros(1000, "<i2")
    pcm[250], pcm[999] = 16_384, -32_768
    assert peaks_of(pcm, 4) == (0.0, 0.5, 0.0, 1.0)
    assert peaks_of(pcm[:2], 4) == (0.0, 0.0), "short sound has fewer peaks than asked for"


def test_stored_sound_has_times_of_chunks_and_words() -> None:
    trace = build_answers()["fine"]
    sound = read_sound(sound_chunks(trace), RATE)
    assert sum(arrival.samples for arrival in sound.arrivals) == SAMPLES
    assert len(sound.peaks) == 300 and max(sound.peaks) > 0.1
    assert [word.word for word in sound.words] == WORDS.split()
    assert sound.words[-1].end_ms == 12_400


def test_chunks_without_a_time_tell_no_arrivals() -> None:
    trace = build_answers()["fine"]
    chunks = [msgspec.structs.replace(chunk, produced_us=0) for chunk in sound_chunks(trace)]
    sound = read_sound(chunks, RATE)
    assert sound.arrivals == () and len(sound.peaks) == 300


def test_reported_playback_tells_when_a_sample_was_heard() -> None:
    playing = find_playing(facts_of(spoken(**reports(310, 0, 0))))
    assert playing is not None and playing.is_reported
    assert playing.at(SAMPLES // 2) == at(310 + 1100), "as the first of two reports says"
    assert playing.num_heard == SAMPLES


def test_unreported_playback_begins_with_the_first_sound_and_waits_for_more() -> None:
    late = StoredSound(
        arrivals=(Arrival(at_us=at(310), samples=RATE), Arrival(at_us=at(2310), samples=RATE))
    )
    playing = find_playing(facts_of(spoken(playback=None), late))
    assert playing is not None and not playing.is_reported
    assert playing.at(RATE // 2) == at(310 + 500)
    assert playing.at(1.5 * RATE) == at(2310 + 500), "the second half after the gap"


def test_axis_reaches_from_the_users_speech_to_the_end_of_playback() -> None:
    turn = SpokenTurn(voiced_end_us=at(-500), decided_us=at(-5))
    clip = (AudioIn(duration_s=0.4),)
    axis = find_axis(facts_of(spoken(turn=turn, audio=clip, **reports(310, *(0,) * 11))))
    assert (axis.start_us, axis.end_us) == (at(-900), at(310 + 11 * 1100))
    assert axis.zero_us == START and dict(axis.labels())[axis.x(START)] == "0"
    long = (AudioIn(duration_s=600.0),)
    bounded = find_axis(facts_of(spoken(turn=turn, audio=long)))
    shown = bounded.end_us - bounded.start_us
    assert at(-500) - bounded.start_us < 0.15 * shown, "long speech leaves room for the answer"


def test_user_lane_tells_the_wait_and_the_transcript() -> None:
    lane = lanes_of(build_answers()["fine"])["you"]
    assert [span.kind for span in lane.spans] == ["speech", "pause"]
    assert "hot or cold" in lane.spans[0].detail
    assert lane.spans[1].detail == "waiting for you to finish, 345 ms"
    unknown = lanes_of(msgspec.structs.replace(build_answers()["fine"], turn=None))["you"]
    assert unknown.spans == () and "sent whole" in unknown.note, "an unknown time is not drawn"


def test_wave_is_divided_into_what_was_heard_and_what_was_not() -> None:
    trace = build_answers()["fine"]
    sound = read_sound(sound_chunks(trace), RATE)
    assert [shape.kind for shape in lanes_of(trace, sound)["answer"].shapes] == ["heard"]
    cut = msgspec.structs.replace(trace, ended_us=at(14_000), **reports(310, 0, last=RATE))
    shapes = lanes_of(cut, sound)["answer"].shapes
    assert [shape.kind for shape in shapes] == ["heard", "unheard"]
    assert lanes_of(trace)["answer"].shapes == (), "sound that is not stored is not drawn"
    for shape in shapes:
        numbers = [float(x) for x in re.findall(r"[ML]([\d.]+) ", shape.path)]
        assert numbers and all(0 <= x <= SCALE for x in numbers)


def test_words_are_drawn_where_they_were_heard() -> None:
    trace = build_answers()["fine"]
    lane = lanes_of(trace, read_sound(sound_chunks(trace), RATE))["answer"]
    phrases = [span for span in lane.spans if span.kind == "word"]
    assert " ".join(span.label for span in phrases) == WORDS
    assert [span.x for span in phrases] == sorted(span.x for span in phrases)


def test_dropouts_lie_between_the_reports_that_count_them() -> None:
    trace = spoken(17_140, 17_200, **reports(310, 0, 0, 2))
    (dropout,) = [span for span in lanes_of(trace)["flow"].spans if span.kind == "dropout"]
    axis = find_axis(facts_of(trace))
    assert abs(dropout.x - axis.x(at(310 + 2200))) < 0.2
    assert "2 dropouts, reported at 3610 ms" in dropout.detail


def test_curves_of_made_and_played_end_with_the_sound() -> None:
    trace = build_answers()["fine"]
    shapes = lanes_of(trace, read_sound(sound_chunks(trace), RATE))["flow"].shapes
    assert [shape.kind for shape in shapes] == ["made", "played"]
    made, played = (re.findall(r"[V ]([\d.]+)", shape.path)[-1] for shape in shapes)
    assert made == played == "4.0", "all was made and played"
    without = msgspec.structs.replace(trace, playback=None, earlier_playback=())
    assert lanes_of(without)["flow"].shapes == (), "what is not known is not drawn"


def test_deaths_are_marked_on_the_answer() -> None:
    lane = lanes_of(build_answers()["interrupted"])["answer"]
    assert [point.kind for point in lane.points] == ["lost"]


def test_pause_is_far_longer_than_the_stage_usually_takes() -> None:
    trace = build_answers()["slow"]
    (stall,) = find_stalls(trace, {"codes": code_chunks(trace)}, ())[TALKER]
    assert 900_000 < stall.to_us - stall.from_us < 1_100_000 and stall.usual_us < 120_000
    fine = build_answers()["fine"]
    assert find_stalls(fine, {"codes": code_chunks(fine)}, ())[TALKER] == ()


def test_larger_chunk_is_no_pause() -> None:
    times, rows = (0, 100, 300, 700, 1_500, 3_100), (1, 1, 2, 4, 8, 16)
    ramp = [Arrival(at_us=at(ms), samples=n * 1000) for ms, n in zip(times, rows, strict=True)]
    trace = build_answers()["fine"]
    assert find_stalls(trace, {}, ramp)[CODE2WAV] == ()


def test_time_without_a_worker_is_no_pause_of_the_stage() -> None:
    steady = [Arrival(at_us=at(100 * n + (1000 if n > 5 else 0)), samples=2400) for n in range(12)]
    events = events_of((1000, "lost", CODE2WAV, "code2wav@a:1:0a", "died"))
    assert len(find_stalls(spoken(), {}, steady)[CODE2WAV]) == 1
    assert find_stalls(spoken(events=events), {}, steady)[CODE2WAV] == ()


def test_reports_beyond_the_sound_are_cut_to_it() -> None:
    report = PlaybackReport(played_samples=2 * SAMPLES, underruns=0, at_us=at(13_000))
    path = lanes_of(spoken(playback=report))["flow"].shapes[0].path
    assert path.endswith(" 4.0")
