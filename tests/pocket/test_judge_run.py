"""The whole evaluation (`fleet pocket eval`) against a fake fleet over HTTP that knows all answers
and has the teacher model's voices.
"""

import io
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from rich.console import Console

from fleet.core.errors import BadInput
from fleet.lab.client.errors import ApiError
from fleet.lab.pocket.corpus.dialogue import DONT_KNOW
from fleet.lab.pocket.judge import speech_in
from fleet.lab.pocket.judge.ask import Advance, ChatQuestion, ChatReply, JudgeClient
from fleet.lab.pocket.judge.options import JudgeOptions
from fleet.lab.pocket.judge.questions import distinct
from fleet.lab.pocket.judge.report import Figure, JudgeReport, draw, show, write_report
from fleet.lab.pocket.judge.run import run
from fleet.lab.pocket.shape import VOICES
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ, Teacher, Voice
from fleet.lab.report.machine import describe_machine
from tests.support import HttpHandler, serve_http

pytestmark = pytest.mark.one_file_in(3, "making of Pocket")

SMALL = JudgeOptions(
    typed=26, memory=5, unknown=5, speech_out=4, speech_in=2, speed=2, concurrency=4, workers=1
)
Samples = NDArray[np.float32]


@dataclass(slots=True, kw_only=True)
class FakeFleet:
    """A fake fleet that answers typed questions correctly (with `forget`, wrongly after earlier
    turns), and spoken questions with `DONT_KNOW`.
    """

    url: str = ""
    forget: bool = False
    status: int = 200
    answers: dict[str, str] = field(default_factory=dict[str, str])
    speeches: dict[tuple[str, str], Samples] = field(default_factory=dict[tuple[str, str], Samples])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_answers(self, count: int, seed: int = 0) -> None:
        for dialogue in distinct(count, seed):
            self.answers[" / ".join(turn.text for turn in dialogue.turns[:-1])] = dialogue.turns[
                -1
            ].text

    def answer(self, messages: list[dict[str, Any]]) -> str:
        if any(isinstance(message["content"], list) for message in messages) or (
            self.forget and len(messages) > 1
        ):
            return DONT_KNOW
        return (
            self.answers.get(
                " / ".join(message["content"] for message in messages), DONT_KNOW
            ).capitalize()
            + "."
        )

    def speech(self, text: str, voice: str) -> Samples:
        with self.lock:
            if (text, voice) not in self.speeches:
                self.speeches[text, voice] = (
                    Teacher().speak(text.lower().strip("."), VOICES[voice]).samples
                )
            return self.speeches[text, voice]

    def reply(self, body: dict[str, Any]) -> bytes:
        with self.lock:
            self.bodies.append(body)
        text = self.answer(body["messages"])
        samples = self.speech(text, body["audio"]["voice"]) if "audio" in body else None
        return _streamed(text, samples) if body["stream"] else _whole(text, samples)

    def serve(self, handler: HttpHandler) -> None:
        if handler.command == "GET":
            handler.send(200, b'{"data":[{"id":"pocket"}]}')
            return
        body = msgspec.json.decode(handler.read_body())
        handler.send(
            self.status,
            self.reply(body) if self.status == 200 else b'{"error":{"message":"too busy"}}',
        )


def _whole(text: str, samples: Samples | None) -> bytes:
    message: dict[str, Any] = {"content": text}
    if samples is not None:
        file = io.BytesIO()
        soundfile.write(file, samples, SAMPLE_RATE_HZ, format="WAV")
        message["audio"] = {"data": b64encode(file.getvalue()).decode()}
    return msgspec.json.encode({"choices": [{"message": message, "finish_reason": "stop"}]})


def _streamed(text: str, samples: Samples | None) -> bytes:
    pcm = (np.zeros(0) if samples is None else samples * 32767).astype("<i2").tobytes()
    deltas: list[dict[str, Any]] = [{"content": text}]
    deltas += [
        {"audio": {"data": b64encode(pcm[at : at + 12_000]).decode()}}
        for at in range(0, len(pcm), 12_000)
    ]
    events: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
    events.append(
        {
            "choices": [],
            "usage": {"prompt_tokens": 3, "completion_tokens_details": {"text_tokens": 5}},
        }
    )
    return (
        b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        + b"data: [DONE]\n\n"
    )


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fake = FakeFleet()

    with serve_http(fake.serve) as fake.url:
        yield fake


def _figure(report: JudgeReport, name: str) -> Figure:
    return next(figure for figure in report.figures if figure.name == name)


def test_evaluation_writes_table_json_and_plot(fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.add_answers(400)
    report = run(fleet.url, replace(SMALL, sounds=tmp_path / "sounds"))
    assert list(report.took_s) == ["speed", "typed", "speech_out", "speech_in"]
    assert _figure(report, "right answers").value == 100
    assert _figure(report, "from memory").met and _figure(report, "from memory").count == 5
    assert _figure(report, "answers that ran dry, 4 streams at once").met
    assert _figure(report, "first audio, median").met
    assert len(report.speech_out) == 4 and len(list((tmp_path / "sounds").glob("*.wav"))) == 4
    assert report.lacking == ("oink",)
    assert _figure(report, "right answers, clean") in report.missed

    write_report(report, tmp_path / "report.json")
    assert (
        msgspec.convert(
            msgspec.json.decode((tmp_path / "report.json").read_bytes())["report"], JudgeReport
        )
        == report
    )
    console = Console(record=True, width=120, file=io.StringIO())
    show(report, console)
    shown = console.export_text()
    assert "right answers" in shown and "met" in shown and "missed" in shown and "<= 8 %" in shown
    draw(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_answers_are_counted_per_family(fleet: FakeFleet) -> None:
    fleet.add_answers(400)
    fleet.forget = True
    report = run(fleet.url, JudgeOptions(parts=("typed",), typed=130, memory=10, unknown=10))
    assert (_figure(report, "from memory").value or 0) < 50 and _figure(
        report, "from memory"
    ).met is False
    right = sum(each.right for each in report.typed[:130])
    assert _figure(report, "right answers").value == pytest.approx(100 * right / 130)
    assert 0 < right < 130


def test_questions_are_greedy_without_own_sampling(fleet: FakeFleet) -> None:
    for own_sampling in (False, True):
        run(
            fleet.url,
            JudgeOptions(
                parts=("typed",), typed=3, memory=1, unknown=1, own_sampling=own_sampling, seed=3
            ),
        )
    greedy = [body for body in fleet.bodies if "temperature" in body]
    assert len(greedy) == len(fleet.bodies) / 2 and all(body["temperature"] == 0 for body in greedy)
    assert {body["seed"] for body in fleet.bodies} == {3}


def test_refused_request_ends_the_evaluation_with_its_reason(fleet: FakeFleet) -> None:
    fleet.status = 503
    with pytest.raises(ApiError, match="too busy"):
        run(fleet.url, JudgeOptions(parts=("typed",), typed=3, memory=1, unknown=1))


def test_unreachable_gateway_is_one_line() -> None:
    with pytest.raises(ApiError, match="nothing answers"):
        run("http://127.0.0.1:9", JudgeOptions(parts=("typed",)))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"typed": 0}, "typed"),
        ({"parts": ("singing",)}, "parts"),
        ({"parts": ()}, "parts"),
        ({"workers": 0}, "workers"),
    ],
)
def test_invalid_option_names_its_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as raised:
        JudgeOptions(**options)
    assert raised.value.param == field


class TranscribingClient(JudgeClient):
    """A fake client that answers the dialogues in their order, the first one wrongly, and
    transcribes all questions except the last.
    """

    def __init__(self) -> None:
        self.questions: list[ChatQuestion] = []

    def ask_all(self, questions: Any, concurrency: int, advance: Advance) -> list[ChatReply]:
        self.questions += questions
        dialogues = distinct(len(questions) // 2, 0)
        texts = [dialogue.turns[-1].text for dialogue in dialogues]
        texts[0] = "nonsense"
        texts += [dialogue.turns[-2].text for dialogue in dialogues[:-1]] + [""]
        return [
            ChatReply(text=text, finish_reason="stop", samples=np.zeros(0, np.float32))
            for text in texts
        ]


def test_noise_of_spoken_questions_is_15_db_below_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of spoken questions is 15 dB below the speech. The two conditions have the same
    voice, so that only the noise differs.
    """
    conditions = [replace(condition, draw=lambda _: Voice()) for condition in speech_in.CONDITIONS]
    monkeypatch.setattr(speech_in, "CONDITIONS", tuple(conditions))
    client = TranscribingClient()
    empty = JudgeReport(began="", url="", model="", machine=describe_machine(), sampling="", seed=0)
    report = speech_in.judge(empty, client, JudgeOptions(speech_in=4))
    values = {figure.name: figure.value for figure in report.figures}
    assert (
        values["right answers, clean"] == values["right answers, unseen voices, 15 dB noise"] == 75
    )
    words = [len(each.text.split()) for each in report.transcribed[:4]]
    assert values["WER of transcripts, clean"] == pytest.approx(100 * words[-1] / sum(words))
    assert len(report.speech_in) == len(report.transcribed) == 8
    clean, noisy = (_clip(client.questions[index]) for index in (4, 12))
    snr_db = 10 * np.log10(np.square(clean).mean() / np.square(noisy - clean).mean())
    assert 11 < snr_db < 15.1, "pauses do not count, so the mean is a little less"


def _clip(question: ChatQuestion) -> Samples:
    message = msgspec.to_builtins(question.messages[0])
    assert message["content"][1] == {"type": "text", "text": "transcribe"}
    samples, rate_hz = soundfile.read(
        io.BytesIO(b64decode(message["content"][0]["input_audio"]["data"])), dtype="float32"
    )
    assert rate_hz == 16_000
    return np.asarray(samples, np.float32)
