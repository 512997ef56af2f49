"""The stage that speaks: text as it arrives in, pieces of speech out, and the same pieces again
after a loss.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.config.credits import Credits
from fleet.core.errors import BadInput, EngineError
from fleet.core.ids import DECODE, RequestId
from fleet.core.request import RequestSpec, Sampling
from fleet.engine.base import EngineInput, EngineRequest
from fleet.engine.voice import TEXT, VoiceEngine
from fleet.graphs.cascade import AUDIO, CASCADE, SAID, TTS
from fleet.models.voices.base import Speech, VoiceModel, VoiceName
from fleet.stages.base import BuiltStage, EdgeItem, LoggedOutput
from fleet.stages.cascade import tts
from fleet.stages.cascade.narration import ClauseSpeaker
from fleet.worker.task.outbound import EdgeLog, OutboundEdge
from tests.stage_options import stage_options

ANSWER = (
    "Sure, **Dr. Smith** pays $3.50. 😀 Then `he` goes home at 7:30 pm, as usual, by train.\n"
    "```py\nprint(1. , 2)\n```\n- one\n- two\n"
)
OPTIONS = stage_options(stage=TTS, checkpoint=Path("."))


class ToneVoice(VoiceModel):
    """Speaks 900 samples per letter, of values that depend on every argument; fails on `boom`."""

    sample_rate_hz = tts.RATE_HZ

    def voices(self) -> Sequence[VoiceName]:
        return [VoiceName(name="tone", language="en-US"), VoiceName(name="low", language="en-GB")]

    def synthesize(self, text: str, voice: str, *, speed: float, seed: int) -> Speech:
        if "boom" in text:
            raise EngineError("the voice failed: boom")
        ends = np.cumsum([900 * len(word) for word in text.split()])
        key = sum(map(ord, text + voice)) + seed + int(speed * 100)
        samples = np.sin(np.arange(ends[-1] / speed) * 0.01 + key).astype(np.float32)
        return Speech(samples=samples, word_ends=np.rint(ends / speed).astype(np.int64))


def tone_stage() -> BuiltStage:
    speaker = ClauseSpeaker(ToneVoice())
    return BuiltStage(
        engine=VoiceEngine(speaker),
        adapter=lambda spec, _blob: tts.VoiceTask(spec, OPTIONS, speaker),
    )


def spec_of(
    name: str = "r", *, speech_text: str = "", params: Mapping[str, str] | None = None
) -> RequestSpec:
    return RequestSpec(
        id=RequestId(name),
        graph="cascade",
        prompt_ids=(),
        outputs=(AUDIO,),
        params=dict(params or {}),
        sampling={TTS: Sampling(seed=3)},
        speech_text=speech_text,
    )


def speak(
    stage: BuiltStage,
    spec: RequestSpec,
    pieces: Sequence[bytes],
    logged: LoggedOutput | None = None,
) -> list[EdgeItem]:
    """Return all items of one request, whose text arrives as `pieces` while it is spoken."""
    adapter = stage.adapter(spec, None)
    request, inputs = adapter.open(logged or {})
    stage.engine.submit(request)
    items: list[EdgeItem] = []

    def feed(inputs: Sequence[EngineInput]) -> None:
        for piece in inputs:
            stage.engine.feed(spec.id, piece)
        while stage.engine.is_ready():
            items.extend(item for out in stage.engine.step() for item in adapter.produce(out))

    feed(inputs)
    for number, piece in enumerate(pieces, 1):
        arrays = {"ids": np.array([7], np.int32), "text": np.frombuffer(piece, np.uint8)}
        feed(adapter.consume(SAID, DECODE, arrays, final=number == len(pieces)))
    assert stage.engine.stats().running == 0
    return items


def contents(items: Sequence[EdgeItem]) -> list[tuple[bool, dict[str, bytes]]]:
    return [
        (item.final, {name: array.tobytes() for name, array in item.arrays.items()})
        for item in items
    ]


def joined(items: Sequence[EdgeItem], name: str) -> np.ndarray:
    return np.concatenate([item.arrays[name] for item in items if name in item.arrays])


def words_in(items: Sequence[EdgeItem]) -> list[str]:
    return joined(items, "words").tobytes().decode().split("\0")[:-1]


def tokens_of(text: str, cuts: Sequence[int] = ()) -> list[bytes]:
    data = text.encode()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


@pytest.fixture(scope="module")
def hibari(tmp_path_factory: pytest.TempPathFactory) -> BuiltStage:
    folder = CASCADE.stage(TTS).shipped_folder("hibari")
    assert folder is not None
    return tts.build(stage_options(stage=TTS, checkpoint=folder))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=40))
def test_speech_does_not_depend_on_how_the_text_arrives(cuts: list[int]) -> None:
    whole = contents(speak(tone_stage(), spec_of(speech_text=ANSWER), []))
    assert contents(speak(tone_stage(), spec_of(), tokens_of(ANSWER, cuts))) == whole


def test_recovery_at_any_piece_releases_the_rest_with_the_same_bytes(hibari: BuiltStage) -> None:
    for stage, share in ((tone_stage(), 1), (hibari, 4)):
        items = speak(stage, spec_of(), tokens_of(ANSWER, range(0, 200, 3)))
        assert len(items) >= 8
        for num_logged in range(0, len(items) + 1, share):
            check_recovery(stage, items, num_logged)


def check_recovery(stage: BuiltStage, items: list[EdgeItem], num_logged: int) -> None:
    """Check what a new owner sends after the first `num_logged` of `items` are in the log."""
    sent = items[:num_logged]
    names = items[0].arrays if sent else ()
    logged: LoggedOutput = {(AUDIO, DECODE): {name: joined(sent, name) for name in names}}
    log = EdgeLog(
        rows=[len(item.arrays["pcm"]) for item in sent],
        final=num_logged == len(items),
        walks=[DECODE] * num_logged,
    )
    edge = CASCADE.edge(AUDIO)
    outbound = OutboundEdge(edge, edge.policy, Credits(chunks=64), writes_markers=False, logged=log)
    again = speak(stage, spec_of(), tokens_of(ANSWER, [5, 60]), logged if sent else None)
    released = [draft for item in again for draft in outbound.offer(item)]
    first = min(num_logged, len(items) - 1)
    assert [draft.index for draft in released] == list(range(first, len(items)))
    assert [
        (draft.final, {name: array.tobytes() for name, array in draft.arrays.items()})
        for draft in released
    ] == (contents(items[num_logged:]) or [(True, {})])


def test_history_replaces_the_samples_that_a_client_has_heard() -> None:
    whole = speak(tone_stage(), spec_of(speech_text=ANSWER), [])
    for num_known in (1, 11_999, 12_000, 40_001):
        heard = np.full(num_known, 5, np.int16)
        again = speak(
            tone_stage(), spec_of(speech_text=ANSWER), [], {(AUDIO, DECODE): {"pcm": heard}}
        )
        pcm = joined(again, "pcm")
        assert (pcm[:num_known] == 5).all()
        assert pcm[num_known:].tolist() == joined(whole, "pcm")[num_known:].tolist()
        assert [len(item.arrays["pcm"]) for item in again] == [
            len(item.arrays["pcm"]) for item in whole
        ]


def test_pieces_are_short_and_words_end_in_them(hibari: BuiltStage) -> None:
    for stage in (tone_stage(), hibari):
        items = speak(stage, spec_of(speech_text=ANSWER), [])
        assert [item.final for item in items] == [False] * (len(items) - 1) + [True]
        assert "".join(words_in(items)) == ANSWER
        ends = joined(items, "word_ends")
        assert list(ends) == sorted(ends) and len(ends) == len(words_in(items))
        begin = 0
        for item in items:
            end = begin + len(item.arrays["pcm"])
            assert begin <= end <= begin + tts.MAX_PIECE_SAMPLES
            assert all(begin <= word_end <= end for word_end in item.arrays["word_ends"])
            begin = end
        at = dict(zip(words_in(items), ends.tolist(), strict=True))
        assert at[" $3.50. "] <= at["😀"] < at[" Then"] < at[" train.\n"]


def test_text_without_words_ends_without_sound() -> None:
    for text in ("", "  \n", "```\nx = 1\n```\n", "😀"):
        items = speak(tone_stage(), spec_of(), tokens_of(text, [1]) or [b""])
        assert [item.final for item in items] == [True]
        assert len(items[0].arrays.get("pcm", ())) == 0
        assert not text or "".join(words_in(items)) == text


def test_requests_take_turns_clause_by_clause() -> None:
    engine = tone_stage().engine
    for name in "ab":
        engine.submit(EngineRequest(request_id=RequestId(name), sampling=Sampling()))
        text = np.frombuffer(b"One, two, three, four. Five and six. Seven. " * 3, np.uint8)
        engine.feed(RequestId(name), EngineInput(walk=DECODE, arrays={TEXT: text}, final=True))
    order = ""
    while engine.is_ready():
        order += "".join(output.request_id for output in engine.step())
    assert order[:6] == "ababab" and order.count("a") == order.count("b") > 3


def test_pieces_of_a_clause_that_is_not_complete_are_not_unread() -> None:
    engine, request = tone_stage().engine, RequestId("r")
    engine.submit(EngineRequest(request_id=request, sampling=Sampling()))
    for text, num_unread in ((b"Well, ", 0), (b"this ", 0), (b"is it, ", 3), (b"and ", 4)):
        arrays = {TEXT: np.frombuffer(text, np.uint8)}
        engine.feed(request, EngineInput(walk=DECODE, arrays=arrays))
        assert engine.num_unread(request) == num_unread
    engine.step()
    assert engine.num_unread(request) == 0


def test_failing_clause_and_bytes_that_are_no_text_fail_only_their_request() -> None:
    engine = tone_stage().engine
    for name, text in (("bad", b"boom"), ("bytes", b"\xff\xfe"), ("good", b"All is well.")):
        engine.submit(EngineRequest(request_id=RequestId(name), sampling=Sampling()))
        arrays = {TEXT: np.frombuffer(text, np.uint8)}
        engine.feed(RequestId(name), EngineInput(walk=DECODE, arrays=arrays, final=True))
    outputs = [output for _ in range(6) for output in engine.step()]
    errors = {output.request_id: str(output.error) for output in outputs if output.error}
    assert errors == {
        "bad": "the voice failed: boom",
        "bytes": "text: not UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid "
        "start byte)",
    }
    assert [output.request_id for output in outputs if output.final] == ["good"]


def test_voice_and_speed_of_a_request_are_used_or_refused_by_name() -> None:
    plain, low, fast = (
        joined(speak(tone_stage(), spec_of(speech_text=ANSWER, params=params), []), "pcm")
        for params in ({}, {"voice": "low"}, {"speed": "4"})
    )
    assert low.tolist() != plain.tolist() and len(fast) == pytest.approx(len(plain) / 4, rel=0.01)
    for params, message in (
        ({"voice": "nova"}, "voice: no voice 'nova'; use one of tone, low"),
        ({"speed": "0.2"}, "speed: '0.2' is not a number from 0.25 to 4.0"),
        ({"speed": "nan"}, "speed: 'nan' is not a number from 0.25 to 4.0"),
        ({"speed": "fast"}, "speed: 'fast' is not a number from 0.25 to 4.0"),
    ):
        with pytest.raises(BadInput) as refused:
            tone_stage().adapter(spec_of(speech_text="Hi.", params=params), None).open()
        assert str(refused.value) == message
