"""The verdict on an answer, one test for each rule: the sentence follows from the trace, and says
so where the trace does not tell.
"""

from collections.abc import Sequence

import msgspec
import pytest

from fleet.core.ids import CLIENT
from fleet.telemetry.trace import (
    PlaybackReport,
    RequestTrace,
    SpokenTurn,
    TaskTrace,
    TraceEvent,
)
from tests.web.build import build, build_rows
from tests.web.plausible_answers import (
    CODE2WAV,
    FRAMES,
    GRAPH,
    RATE,
    SAMPLES,
    TALKER,
    at,
    edge,
    spoken,
    task,
)
from web.console.answer_facts import AnswerFacts, Arrival
from web.console.verdict import judge

EVENTS = "at_us what stage worker detail"


def text_of(trace: RequestTrace, arrivals: Sequence[Arrival] = ()) -> str:
    return judge(AnswerFacts(trace, GRAPH, RATE, arrivals)).text


def test_answer_in_time_is_fine() -> None:
    assert text_of(spoken()) == (
        "Fine: first sound after 310 ms, 12 s of speech at 0.41 x real time, no dropout."
    )


def test_wait_is_counted_from_the_end_of_speech() -> None:
    turn = SpokenTurn(voiced_end_us=at(-500), decided_us=at(-2))
    assert text_of(spoken(turn=turn)).startswith(
        "Fine: first sound after 810 ms from the end of your speech, "
    )
    late = text_of(spoken(turn=SpokenTurn(voiced_end_us=at(-900), decided_us=at(-2))))
    assert late == "Slow: first sound after 1.2 s, 898 ms of it waiting for you to finish."


def test_answer_that_was_not_played_whole_says_so() -> None:
    report = PlaybackReport(played_samples=48_000, underruns=0, at_us=at(2_000))
    assert text_of(spoken(playback=report)).endswith(
        ", no dropout; 2.0 s of it reported as played."
    )


def test_answer_without_report_or_stored_times_is_not_called_fine() -> None:
    assert text_of(spoken(playback=None)) == (
        "Complete: first sound after 310 ms, 12 s of speech at 0.41 x real time; if it could be "
        "played without a gap is not known, no player has reported."
    )


def arrived(*times_ms: float) -> list[Arrival]:
    return [Arrival(at_us=at(ms), samples=RATE) for ms in times_ms]


def test_stored_times_tell_gaps_without_a_report() -> None:
    trace = spoken(playback=None)
    in_time = text_of(trace, arrivals=arrived(310, 900, 1800))
    assert in_time.startswith("Fine: ")
    assert in_time.endswith(", no gap in it; no report of a player.")
    assert text_of(trace, arrivals=arrived(310, 1910, 2900)) == (
        "Slow: 1 gap in the sound as it was made, the longest 600 ms; no report of a player."
    )


def test_gaps_that_were_noted_tell_the_same_once_the_times_are_deleted() -> None:
    trace = spoken(playback=None)
    for times in ((310, 900, 1800), (310, 1910, 2900)):
        arrivals = arrived(*times)
        noted = AnswerFacts(trace, GRAPH, RATE, arrivals).gaps
        assert noted is not None
        later = msgspec.structs.replace(trace, gaps=noted)
        assert text_of(later) == text_of(trace, arrivals)


def test_slow_stage_is_named_with_its_pace_and_batch() -> None:
    heard = PlaybackReport(played_samples=SAMPLES, underruns=3, at_us=at(20_000))
    slow = spoken(codes_end=17_140, sound_end=17_200, playback=heard)
    assert text_of(slow) == (
        "Slow: talker took 110 ms for each 80 ms of sound; 5 in its batch at talker@a:1:0a; "
        "3 dropouts."
    )


def test_stage_with_inputs_in_reserve_is_the_slow_one() -> None:
    sentence = text_of(spoken(codes_end=5000, sound_end=17_200))
    assert sentence.startswith("Slow: code2wav took 1.4 s for each second of sound; 5 in its batch")


def test_batch_that_was_not_reported_is_not_claimed() -> None:
    slow = spoken(codes_end=17_140, sound_end=17_200)
    tasks = tuple(msgspec.structs.replace(task, batches=()) for task in slow.tasks)
    assert "batch" not in text_of(msgspec.structs.replace(slow, tasks=tasks))


def test_stage_that_waited_for_its_client_is_not_slow() -> None:
    parked = build_rows(
        TraceEvent, EVENTS, (at(4000), "parked", CODE2WAV, "", "no credit on audio, text")
    )
    slow = spoken(codes_end=17_140, sound_end=17_200, events=tuple(parked))
    assert text_of(slow).startswith("Fine: ")
    heard = PlaybackReport(played_samples=SAMPLES, underruns=1, at_us=at(20_000))
    assert text_of(msgspec.structs.replace(slow, playback=heard)) == (
        "Slow: the client took the sound more slowly than it was made; 1 dropout."
    )


@pytest.mark.parametrize(
    ("claimed", "first", "reason"),
    [
        (1_501, 1_600, "1.5 s of it talker waiting for a worker"),
        (3, 1_600, "1.5 s of it talker to its first output"),
    ],
)
def test_late_first_sound_names_the_largest_part(claimed: float, first: float, reason: str) -> None:
    trace = spoken()
    tasks = (trace.tasks[0], task(TALKER, claimed, first, 5000), task(CODE2WAV, 3, 1_700, 5020))
    edges = (
        *trace.edges[:2],
        edge("codes", first, 5000, items=FRAMES),
        edge("audio", 1_700, 5020, rows=SAMPLES),
    )
    late = msgspec.structs.replace(trace, tasks=tasks, edges=edges)
    assert text_of(late) == f"Slow: first sound after 1.7 s, {reason}."


def test_dropouts_of_sound_made_in_time_are_not_blamed_on_a_stage() -> None:
    heard = PlaybackReport(played_samples=SAMPLES, underruns=2, at_us=at(20_000))
    trace = spoken(playback=heard)
    start = "Slow: 2 dropouts, although the sound as a whole was made in time; "
    assert text_of(trace) == f"{start}when its parts were made is no longer stored."
    assert text_of(trace, arrivals=arrived(310, 900)) == (
        f"{start}it had no gap when it left the last stage."
    )
    assert text_of(trace, arrivals=arrived(310, 2310)) == f"{start}1 gap in it, the longest 1.0 s."


def test_death_is_told_with_cause_successor_and_completeness() -> None:
    events = build_rows(
        TraceEvent,
        EVENTS,
        (at(3), "claimed", TALKER, "talker@a:2:0b", ""),
        (at(1200), "lost", TALKER, "talker@a:2:0b", "died"),
        (at(1201), "granted", TALKER, "", ""),
        (at(1600), "claimed", TALKER, "talker@a:1:0a", ""),
    )
    trace = spoken(events=tuple(events))
    found = judge(AnswerFacts(trace, GRAPH, RATE), {"talker@a:2:0b": "SIGKILL"})
    assert found.text == (
        "Interrupted by a death: talker@a:2:0b died (SIGKILL) after 1.2 s; talker@a:1:0a continued "
        "after 400 ms; no sample was lost, no dropout."
    )
    workers = [piece.worker for piece in found.pieces if piece.worker]
    assert workers == ["talker@a:2:0b", "talker@a:1:0a"], "both are links"
    assert "(SIGKILL)" not in text_of(trace), "a cause that is not stored is not told"


def test_loss_without_a_death_is_no_death() -> None:
    events = build_rows(
        TraceEvent,
        EVENTS,
        (at(1200), "lost", TALKER, "talker@a:1:0a", "revoked"),
        (at(1250), "claimed", TALKER, "talker@a:1:0a", ""),
    )
    assert text_of(spoken(events=tuple(events))) == (
        "Interrupted: talker@a:1:0a had the task taken away by an operator after 1.2 s, and "
        "continued after 50 ms; no sample was lost, no dropout."
    )


def test_lost_gateway_is_told_by_the_attachment_of_another() -> None:
    events = build_rows(
        TraceEvent,
        EVENTS,
        (at(1200), "lost", CLIENT, "gateway@a:9:0c", "died"),
        (at(1700), "attached", CLIENT, "gateway@a:8:0d", ""),
    )
    assert "gateway@a:8:0d continued after 500 ms" in text_of(spoken(events=tuple(events)))


def test_chunks_that_did_not_arrive_are_counted() -> None:
    events = build_rows(TraceEvent, EVENTS, (at(9), "lost", TALKER, "talker@a:1:0a", "lapsed"))
    trace = spoken(events=tuple(events))
    short = edge("audio", 310, 5020, rows=SAMPLES, consumed=18)
    sentence = text_of(msgspec.structs.replace(trace, edges=(*trace.edges[:3], short)))
    assert "stopped answering after 9.0 ms, and nobody took talker over" in sentence
    assert "2 chunks did not reach the client" in sentence


def test_refusal_is_told_in_its_own_words() -> None:
    trace = spoken(
        state="failed",
        code="context_length_exceeded",
        error="messages: This model's maximum context length is 64 tokens.",
        edges=(),
    )
    assert text_of(trace) == (
        "Refused: messages: This model's maximum context length is 64 tokens."
    )


def test_failure_names_stage_worker_and_what_was_made() -> None:
    events = build_rows(
        TraceEvent, EVENTS, (at(700), "failed", TALKER, "talker@a:1:0a", "engine_error: no")
    )
    trace = spoken(state="failed", code="engine_error", error="no", events=tuple(events))
    start = "Failed: no; talker at talker@a:1:0a after 700 ms; "
    assert text_of(trace) == f"{start}12 s of speech made."
    silent = msgspec.structs.replace(trace, edges=())
    assert text_of(silent) == f"{start}nothing reached the listener."


def test_stopped_answer_tells_why_and_how_much_was_heard() -> None:
    report = PlaybackReport(played_samples=24_000, underruns=0, at_us=at(2_000))
    trace = spoken(
        state="aborted", error="cancelled through the API", ended_us=at(1400), playback=report
    )
    assert text_of(trace) == (
        "Stopped: cancelled through the API, after 1.4 s; 12 s of speech made, 1.0 s of it "
        "reported as played."
    )


def test_running_answer_tells_what_it_waits_for() -> None:
    waiting = build(TaskTrace, stage=TALKER, state="granted", granted_us=at(1))
    trace = spoken(
        state="running",
        ended_us=0,
        now_us=at(700),
        tasks=(waiting,),
        edges=(edge("text", 90, 600),),
    )
    assert text_of(trace) == (
        "Running: for 700 ms; waiting for a worker: talker; 20 tokens of text made."
    )


def test_text_answer_is_judged_by_its_text() -> None:
    trace = spoken(edges=(edge("text", 90, 900),), ended_us=at(910))
    assert text_of(trace) == "Fine: first text after 90 ms, 20 tokens in 820 ms."


def test_answer_without_output_is_not_called_fine() -> None:
    assert text_of(spoken(edges=())) == "Without output: it ended, and the trace has no output."
