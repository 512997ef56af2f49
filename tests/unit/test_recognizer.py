"""The recogniser's batch loop on a scripted model: windows, loops of tokens, recovery."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import BadInput
from fleet.core.ids import RequestId, Walk
from fleet.core.request import Sampling
from fleet.engine.base import TOKEN, EngineInput, EngineOutput, EngineRequest
from fleet.engine.recognizer import (
    CLIP,
    HeardWindow,
    RecognizerEngine,
    RecognizerModel,
    WindowDetails,
    WindowJob,
)
from fleet.engine.repetition import MAX_UNIT, MIN_REPEATS, MIN_TOKENS, looped_tokens

END, ENGLISH, GERMAN = 0, 1, 2
RATE = 100
SIZES = (8 * RATE, 20 * RATE, 30 * RATE)
WALK = Walk("decode")
LOUD = 0.5
"""Amplitude from which samples count as speech."""


@dataclass(slots=True, eq=False)
class ScriptedWindow:
    job: WindowJob
    tokens: list[int]
    left: list[int]


@dataclass(slots=True, eq=False)
class ScriptedModel(RecognizerModel[ScriptedWindow]):
    """Model whose windows have tokens that depend on their samples, size, language and place.

    `loops_up_to`: largest window in which the tokens of speech never end. `broken`: first sample of
    clips for which every call fails. `step_s`: seconds that a window of a long clip is heard for.
    """

    loops_up_to: int = 0
    broken: float = -1.0
    step_s: int = 30
    opened: list[WindowJob] = field(default_factory=list[WindowJob])
    batches: list[int] = field(default_factory=list[int])

    @property
    def rate_hz(self) -> int:
        return RATE

    @property
    def window_sizes(self) -> Sequence[int]:
        return SIZES

    @property
    def end_token(self) -> int:
        return END

    def check_request(self, params: Mapping[str, str]) -> None:
        if params.get("language", "en") not in ("en", "de"):
            raise BadInput("language: unknown", param="language")

    def open(self, job: WindowJob) -> ScriptedWindow:
        self.opened.append(job)
        if job.samples[0] == self.broken:
            raise RuntimeError("broken clip")
        content = round(float(np.abs(job.samples).sum())) + 7 * sum(job.place)
        detected = ENGLISH if content % 2 else GERMAN
        tokens = list(job.known) or ([] if job.language else [detected])
        spoken = {"en": ENGLISH, "de": GERMAN}.get(job.language, tokens[0] if tokens else 0)
        script = [10 + (content * spoken + n * n) % 89 for n in range(3 + content % 5)]
        if job.num_samples <= self.loops_up_to:
            script = script[:2] + [50, 51, 52] * 60
        num_sampled = len(tokens) - (0 if job.language else 1)
        return ScriptedWindow(job, tokens, [*script, END][num_sampled:])

    def max_tokens(self, job: WindowJob) -> int:
        return 200

    def details(self, window: ScriptedWindow, tokens: Sequence[int]) -> WindowDetails:
        count = len(tokens)
        return WindowDetails(
            begins=np.arange(count),
            ends=np.arange(count) + 1,
            logprobs=np.zeros(count, np.float32),
            no_speech=0.0,
        )

    def advance(self, windows: Sequence[ScriptedWindow]) -> None:
        self.batches.append(len(windows))
        for window in windows:
            window.tokens.append(window.left.pop(0))

    def hear(self, job: WindowJob, tokens: Sequence[int]) -> HeardWindow:
        kept = [token for token in tokens if token != END]
        whole = len(job.samples)
        step = min(whole, self.step_s * RATE) if job.timed and kept else whole
        return HeardWindow(tokens=(*kept, END), num_samples=step)

    def language_of(self, tokens: Sequence[int]) -> str:
        return {ENGLISH: "en", GERMAN: "de"}.get(tokens[0], "") if tokens else ""

    def check(self) -> None: ...


def clip(seconds: float, *, silent_after_s: float = 1e9, first: float = 1.0) -> np.ndarray:
    samples = np.full(round(seconds * RATE), first, np.float32)
    samples[round(min(silent_after_s, seconds) * RATE) :] = 0.0
    return samples


def is_loud(samples: np.ndarray) -> bool:
    return bool((np.abs(samples) > LOUD).any())


def submit(
    engine: RecognizerEngine[ScriptedWindow],
    clips: Sequence[np.ndarray],
    *,
    name: str = "a",
    history: Sequence[int] = (),
    params: Mapping[str, str] | None = None,
    max_tokens: int = 100,
) -> RequestId:
    request = RequestId(name)
    engine.submit(
        EngineRequest(
            request_id=request,
            sampling=Sampling(max_tokens=max_tokens),
            params=params or {},
            history={TOKEN: np.array(history, np.int32)} if history else {},
        )
    )
    for number, samples in enumerate(clips, 1):
        piece = EngineInput(walk=WALK, arrays={"samples": samples}, final=number == len(clips))
        engine.feed(request, piece)
    return request


def run(engine: RecognizerEngine[ScriptedWindow]) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.is_ready():
        outputs += engine.step()
    return outputs


def windows_of(outputs: Sequence[EngineOutput]) -> list[tuple[int, list[int]]]:
    """Return the clip and the tokens of each window."""
    return [
        (int(output.arrays[CLIP][0]), output.arrays[TOKEN].tolist())
        for output in outputs
        if output.arrays
    ]


@pytest.mark.parametrize(
    ("seconds", "silent_after_s", "size"),
    [
        (0.5, 1e9, 8),
        (6.0, 1e9, 8),
        (6.1, 1e9, 20),
        (7.5, 5.5, 8),
        (17.9, 5.6, 8),
        (18.0, 1e9, 20),
        (25.0, 17.0, 20),
        (25.0, 17.9, 30),
        (30.0, 1e9, 30),
    ],
)
def test_window_leaves_two_seconds_of_silence_after_the_speech(
    seconds: float, silent_after_s: float, size: int
) -> None:
    model = ScriptedModel()
    engine = RecognizerEngine(model, max_batch=1, has_speech=is_loud)
    submit(engine, [clip(seconds, silent_after_s=silent_after_s)])
    run(engine)
    assert [job.num_samples // RATE for job in model.opened] == [size]


def test_clip_without_speech_has_no_text_and_no_encoder_pass() -> None:
    model = ScriptedModel()
    engine = RecognizerEngine(model, max_batch=1, has_speech=is_loud)
    submit(engine, [clip(3, first=0.1), clip(0), clip(3), clip(70, first=0.1)])
    outputs = run(engine)
    silent = [number for number, tokens in windows_of(outputs) if tokens == [END]]
    assert silent == [0, 1, 3, 3, 3] and outputs[-1].final
    assert [job.place for job in model.opened] == [(2, 0)]


def test_looping_window_is_recognised_again_at_the_largest_size() -> None:
    calm, looping = ScriptedModel(), ScriptedModel(loops_up_to=SIZES[0])
    expected = RecognizerEngine(calm, max_batch=1)
    submit(expected, [clip(3)])
    engine = RecognizerEngine(looping, max_batch=1)
    submit(engine, [clip(3)])
    assert windows_of(run(engine)) == windows_of(run(expected))
    assert [job.num_samples for job in looping.opened] == [SIZES[0], SIZES[-1]]
    assert sum(looping.batches) < 40


def test_window_that_loops_at_the_largest_size_ends_after_the_first_saying() -> None:
    model = ScriptedModel(loops_up_to=SIZES[-1])
    engine = RecognizerEngine(model, max_batch=1)
    submit(engine, [clip(3)], params={"language": "en"})
    ((_, tokens),) = windows_of(run(engine))
    assert tokens[2:] == [50, 51, 52, END]
    assert [job.num_samples for job in model.opened] == [SIZES[0], SIZES[-1]]


@given(st.data())
def test_loop_is_found_exactly_when_a_unit_fills_the_end(data: st.DataObject) -> None:
    unit_len = data.draw(st.integers(1, MAX_UNIT))
    unit = list(range(100, 100 + unit_len))
    head = data.draw(st.lists(st.integers(0, 99), max_size=30, unique=True))
    enough = max(MIN_REPEATS * unit_len, MIN_TOKENS)
    num_filled = data.draw(st.integers(0, 2 * enough))
    tail = (unit * (num_filled // unit_len + 1))[:num_filled]
    expected = num_filled - unit_len if num_filled >= enough else 0
    assert looped_tokens([*head, *tail]) == expected


def long_and_short() -> list[np.ndarray]:
    return [clip(75), clip(3, first=0.1), clip(4, first=0.7), clip(28, first=0.9)]


@pytest.mark.parametrize("model", [lambda: ScriptedModel(step_s=13), ScriptedModel])
def test_recovery_at_any_token_gives_the_same_windows(
    model: Callable[[], ScriptedModel],
) -> None:
    engine = RecognizerEngine(model(), max_batch=2, has_speech=is_loud)
    submit(engine, long_and_short())
    whole = windows_of(run(engine))
    tokens = [token for _, window in whole for token in window]
    assert len(whole) >= 6 and len({number for number, _ in whole}) == 4
    for num_known in range(len(tokens) + 1):
        again = model()
        engine = RecognizerEngine(again, max_batch=2, has_speech=is_loud)
        submit(engine, long_and_short(), history=tokens[:num_known])
        outputs = run(engine)
        assert windows_of(outputs) == whole and outputs[-1].final
        num_ended = tokens[:num_known].count(END)
        silent = sum(window == [END] for _, window in whole[num_ended:])
        assert len(again.opened) == len(whole) - num_ended - silent


def test_one_encoder_pass_per_step_and_at_most_a_batch_of_windows() -> None:
    model = ScriptedModel()
    engine = RecognizerEngine(model, max_batch=3)
    for number in range(7):
        submit(engine, [clip(2 + number)], name=str(number))
    while engine.is_ready():
        before = len(model.opened)
        engine.step()
        assert len(model.opened) - before <= 1
    assert len(model.opened) == 7 and max(model.batches) == 3


def test_paused_windows_leave_room_for_others() -> None:
    engine = RecognizerEngine(ScriptedModel(), max_batch=1)
    waits = submit(engine, [clip(3)], name="waits")
    engine.step()
    engine.pause(waits, paused=True)
    runs = submit(engine, [clip(4)], name="runs")
    assert [output.request_id for output in run(engine)] == [runs]
    engine.pause(waits, paused=False)
    assert [output.request_id for output in run(engine)] == [waits]


def test_detected_language_holds_for_its_clip_only() -> None:
    model = ScriptedModel()
    engine = RecognizerEngine(model, max_batch=1)
    submit(engine, [clip(65), clip(3, first=0.68), clip(5)])
    windows = windows_of(run(engine))
    first_of_clip = {number: tokens[0] for number, tokens in reversed(windows)}
    assert set(first_of_clip.values()) == {ENGLISH, GERMAN}
    languages = [(job.place[0], job.language) for job in model.opened]
    named = {ENGLISH: "en", GERMAN: "de"}
    assert languages == [(0, ""), *[(0, named[first_of_clip[0]])] * 2, (1, ""), (2, "")]


def test_failing_clip_fails_its_request_only() -> None:
    engine = RecognizerEngine(ScriptedModel(broken=0.25), max_batch=4)
    fails = submit(engine, [clip(3, first=0.25)], name="fails")
    bad = submit(engine, [np.array([0.0, np.nan], np.float32)], name="bad")
    runs = submit(engine, [clip(3)], name="runs")
    ends = {output.request_id: output for output in run(engine)}
    assert "broken clip" in str(ends[fails].error)
    assert str(ends[bad].error) == "samples: sample 1 is not finite"
    assert ends[runs].final and engine.stats().running == 0


def test_unknown_language_is_refused_and_leaves_nothing() -> None:
    engine = RecognizerEngine(ScriptedModel(), max_batch=1)
    with pytest.raises(BadInput, match="language"):
        submit(engine, [clip(3)], params={"language": "tlh"})
    assert engine.stats().running == 0


def test_token_limit_ends_a_window_with_the_end_token() -> None:
    engine = RecognizerEngine(ScriptedModel(), max_batch=1)
    submit(engine, [clip(3)], max_tokens=2, params={"language": "de"})
    ((_, tokens),) = windows_of(run(engine))
    assert len(tokens) == 3 and tokens[-1] == END
