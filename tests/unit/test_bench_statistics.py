"""The benchmark's arithmetic: percentiles, playback, ratios, and streams cut at any byte."""

import base64

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.config import load_config
from fleet.core.ids import RequestId
from fleet.core.request import RequestSpec
from fleet.lab.client.chat import StreamRecording
from fleet.lab.client.errors import StreamError
from fleet.lab.measure.answer_timing import (
    AnswerTiming,
    AudioChunk,
    gaps,
    measure_answer,
    simulate_playback,
    time_answer,
)
from fleet.lab.measure.comparison import compare
from fleet.lab.measure.hop import HopResult
from fleet.lab.measure.load import LoadPhase
from fleet.lab.measure.reference import ReferenceAnswer, ReferenceResult, ReferenceWork
from fleet.lab.measure.serving import Serving, stage_bounds
from fleet.lab.measure.serving_report import against_baseline, against_twin
from fleet.lab.report.stats import Ratio, percentile, summarise

SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(SAMPLES, st.floats(0, 100))
def test_percentile_equals_numpy(samples: list[float], percent: float) -> None:
    assert percentile(samples, percent) == pytest.approx(
        float(np.percentile(samples, percent)), rel=1e-9, abs=1e-9
    )


def test_summary_ignores_missing_samples() -> None:
    summary = summarise([None, 3.0, 1.0, None, 2.0])
    assert summary is not None
    assert (summary.count, summary.p50, summary.mean, summary.low, summary.high) == (
        3,
        2.0,
        2.0,
        1.0,
        3.0,
    )
    assert summarise([None, None]) is None
    assert summarise([]) is None


def test_ratio_is_met_on_its_side_of_the_target() -> None:
    assert Ratio(name="latency", value=0.1, target=0.1, at_most=True).met
    assert not Ratio(name="latency", value=0.11, target=0.1, at_most=True).met
    assert Ratio(name="throughput", value=4.0, target=4.0, at_most=False).met
    assert not Ratio(name="throughput", value=3.9, target=4.0, at_most=False).met


def test_playback_does_not_stall_if_chunks_arrive_in_time() -> None:
    audio = [AudioChunk(1.0, 0.5), AudioChunk(1.5, 0.5), AudioChunk(1.6, 1.0), AudioChunk(2.9, 0.5)]
    assert simulate_playback(audio).viability == 1.0
    assert simulate_playback(audio).stalled_s == 0.0


def test_late_chunk_stalls_playback_and_delays_the_rest() -> None:
    audio = [
        AudioChunk(1.0, 0.5),
        AudioChunk(1.75, 0.5),
        AudioChunk(2.25, 0.5),
        AudioChunk(3.0, 0.5),
    ]
    playback = simulate_playback(audio)
    # 0.25 s late, then just in time for the delayed playback, then 0.25 s late again
    assert playback.viability == 0.5
    assert playback.stalled_s == pytest.approx(0.5)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 2)), min_size=1, max_size=20))
def test_playback_delayed_by_its_stalls_never_stalls(pieces: list[tuple[float, float]]) -> None:
    """If playback starts later by the total duration of its stalls, it never stalls."""
    arrivals = sorted(at_s for at_s, _ in pieces)
    audio = [
        AudioChunk(at_s, length_s) for at_s, (_, length_s) in zip(arrivals, pieces, strict=True)
    ]
    stalled_s = simulate_playback(audio).stalled_s
    delayed = [AudioChunk(audio[0].at_s + stalled_s + 1e-9, audio[0].audio_s), *audio[1:]]
    assert simulate_playback(delayed).viability == 1.0
    assert 0 <= stalled_s <= max(arrivals) - min(arrivals)


def test_answer_metrics_follow_from_arrivals() -> None:
    timing = AnswerTiming(
        prompt=0,
        sent_s=0.0,
        text=(0.1, 0.2),
        audio=(AudioChunk(0.5, 1.0), AudioChunk(1.2, 1.0)),
        done_s=1.3,
    )
    metrics = measure_answer(timing)
    assert (metrics.first_text_s, metrics.first_audio_s, metrics.last_sample_s) == (0.1, 0.5, 1.2)
    assert (metrics.audio_s, metrics.rtf, metrics.viability, metrics.total_s) == (
        2.0,
        0.6,
        1.0,
        1.3,
    )
    assert gaps(timing.audio) == [pytest.approx(0.7)]


def test_answer_without_audio_has_no_audio_metrics() -> None:
    metrics = measure_answer(AnswerTiming(prompt=0, sent_s=0.0, text=(0.1,), done_s=0.2))
    assert metrics.audio_s == 0.0
    assert (metrics.first_audio_s, metrics.rtf, metrics.viability, metrics.max_gap_s) == (
        None,
        None,
        None,
        None,
    )


PCM = bytes(range(240))
STREAM = b"".join(
    b"data: " + line + b"\n\n"
    for line in (
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"delta":{"content":"Gr\xc3\xbc","audio":{"transcript":"Gr\xc3\xbc"}}}]}',
        b'{"choices":[{"delta":{"content":"n"}}]}',
        b'{"choices":[{"delta":{"audio":{"data":"' + base64.b64encode(PCM) + b'"}}}]}',
        b'{"choices":[{"delta":{},"finish_reason":"stop"}]}',
        b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens_details":{"text_tokens":3}}}',
        b"[DONE]",
    )
)


def recording(*pieces: bytes) -> StreamRecording:
    return StreamRecording(
        sent_s=0.0, pieces=tuple((float(index), piece) for index, piece in enumerate(pieces))
    )


@pytest.mark.parametrize("cut", range(1, len(STREAM), 7))
def test_stream_decodes_the_same_however_its_bytes_are_cut(cut: int) -> None:
    timing = time_answer(4, recording(STREAM[:cut], STREAM[cut:]))
    assert (timing.answer, timing.num_samples, timing.prompt) == ("Grün", len(PCM) // 2, 4)
    assert (timing.num_prompt_tokens, timing.num_answer_tokens) == (7, 3)
    audio_ends = STREAM.index(b"\n", STREAM.index(b'"data":"')) + 1
    assert timing.audio[0].at_s == (0.0 if cut >= audio_ends else 1.0)


def test_stream_comments_are_ignored() -> None:
    assert time_answer(0, recording(b": waiting\n\n" + STREAM)).answer == "Grün"


def test_error_event_raises() -> None:
    with pytest.raises(StreamError, match="no pages left"):
        time_answer(0, recording(b'data: {"error":{"message":"no pages left"}}\n\n'))


@pytest.mark.parametrize("stream", [STREAM[:-20], b"", b"data: [DO"])
def test_stream_without_done_event_raises(stream: bytes) -> None:
    with pytest.raises(StreamError, match="before its end"):
        time_answer(0, recording(stream))


def test_stage_bounds_cover_every_sampling_stage_greedily() -> None:
    config = load_config(None)
    graph = config.graph_declaration()
    bounds = stage_bounds(config, max_tokens=9, frames=33)
    assert set(bounds) == {stage.name for stage in graph.stages if stage.default_sampling}
    for stage in graph.stages:
        if stage.name in bounds:
            assert bounds[stage.name] == {"max_tokens": 9 if stage.main else 33, "temperature": 0.0}
    assert stage_bounds(load_config(None, ("graph=text",)), 9, 33) == {
        "lm": {"max_tokens": 9, "temperature": 0.0}
    }


def phase(
    name: str, concurrency: int, wall_s: float, first_s: float, last_s: float, count: int = 4
) -> LoadPhase:
    timings = tuple(
        AnswerTiming(
            prompt=index,
            sent_s=0.0,
            text=(0.01,),
            audio=(AudioChunk(first_s, 1.0), AudioChunk(last_s, 1.0)),
            done_s=last_s,
            answer="ab",
            num_samples=48_000,
            num_prompt_tokens=2,
        )
        for index in range(count)
    )
    metrics = tuple(measure_answer(timing) for timing in timings)
    return LoadPhase(
        name=name, concurrency=concurrency, wall_s=wall_s, timings=timings, metrics=metrics
    )


def serving() -> Serving:
    return Serving(
        url="http://here",
        model="m",
        graph="g",
        bounds={},
        prompts=("a",) * 4,
        single=phase("single stream", 1, wall_s=4.0, first_s=0.1, last_s=1.0),
        concurrent=phase("concurrent", 8, wall_s=2.0, first_s=0.3, last_s=1.9),
    )


def result(
    seconds: float, num_samples: int = 48_000, answer_ids: tuple[int, ...] = (1, 2), count: int = 4
) -> ReferenceResult:
    answered = ReferenceAnswer(
        seconds=seconds,
        first_audio_s=seconds,
        num_samples=num_samples,
        sample_rate_hz=24_000,
        answer_ids=answer_ids,
    )
    return ReferenceResult(
        answers=(answered,) * count, load_s=0.0, num_threads=1, device="cpu", dtype="float32"
    )


def reference_work(*requests: RequestSpec, warm_up: int = 0) -> ReferenceWork:
    return ReferenceWork(
        requests=requests,
        messages=([],) * len(requests),
        num_threads=(1,),
        device="cpu",
        dtype="float32",
        warm_up=warm_up,
        sample_rate_hz=24_000,
    )


def test_baseline_ratios_compare_medians_and_throughput() -> None:
    ratios = against_baseline(serving(), result(seconds=2.0))
    assert [ratio.value for ratio in ratios] == [
        pytest.approx(0.05),
        pytest.approx(0.5),
        pytest.approx(4.0),
    ]
    assert all(ratio.met for ratio in ratios)
    assert [ratio.met for ratio in against_baseline(serving(), result(seconds=0.9))] == [
        False,
        False,
        False,
    ]


def test_low_concurrency_has_no_throughput_target() -> None:
    few = msgspec.structs.replace(
        serving(), concurrent=phase("concurrent", 4, wall_s=2.0, first_s=0.3, last_s=1.9)
    )
    assert [ratio.name for ratio in against_baseline(few, result(2.0))] == [
        "first audio / baseline",
        "last sample / baseline",
    ]


def test_twin_ratio_compares_wall_times() -> None:
    (ratio,) = against_twin(serving(), result(seconds=0.8))
    assert ratio.value == pytest.approx(1.25)
    assert ratio.met


def test_hop_target_checks_the_median() -> None:
    (ratio,) = HopResult(
        delivery_us=(100.0, 400.0, 9000.0), append_us=(1.0,), ping_us=(1.0,)
    ).targets()
    assert (ratio.value, ratio.met) == (400.0, True)


class LetterFrontend:
    """Frontend double whose detokenizer maps id 1 to "a" and id 2 to "b"."""

    def detokenizer(self) -> "LetterFrontend":
        return self

    def add(self, ids: tuple[int, ...]) -> str:
        return "".join("?ab"[number] for number in ids)

    def finish(self) -> str:
        return ""


def test_agreement_counts_prompts_texts_and_lengths_separately() -> None:
    spec = RequestSpec(id=RequestId("r"), graph="g", prompt_ids=(5, 6))
    work = reference_work(*[spec] * 4)
    other = result(1.0)
    answers = (
        other.answers[0],
        msgspec.structs.replace(other.answers[0], answer_ids=(2, 1)),
        msgspec.structs.replace(other.answers[0], num_samples=1),
        msgspec.structs.replace(other.answers[0], same_prompt=False),
    )
    agreement = compare(
        serving().single.timings,
        msgspec.structs.replace(other, answers=answers),
        work,
        LetterFrontend(),  # type: ignore[arg-type]
    )
    assert (agreement.count, agreement.same_prompt, agreement.same_text, agreement.same_length) == (
        4,
        3,
        3,
        3,
    )
