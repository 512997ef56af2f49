"""The benchmark of a long recording, with a scripted gateway and processes that really end."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import soundfile

from fleet.lab.client.audio import PCM_RATE_HZ
from fleet.lab.client.client import ApiClient
from fleet.lab.client.errors import ApiError
from fleet.lab.measure.assistant import QUESTIONS, SENTENCES
from fleet.lab.measure.recording import (
    KILLED_AT,
    Assembled,
    RecordingResult,
    RecordingRun,
    ResidentMemory,
    Written,
    assemble,
)
from fleet.lab.measure.speakers import BenchSpeaker
from fleet.lab.measure.word_errors import WordErrors
from tests.support import HttpHandler, serve_http

PIECES = tuple(f"piece {number} " for number in range(10))
RECORDING = Assembled(b"mp3", 40.0, "".join(PIECES))


@dataclass(slots=True)
class RecordingGateway:
    """A gateway whose busiest worker is the last of `processes`, one less at each listing."""

    processes: list["subprocess.Popen[bytes]"]
    events: list[dict[str, object]]
    forms: list[bytes] = field(default_factory=list[bytes])
    listed: int = 3

    def answer(self, handler: HttpHandler) -> None:
        if handler.path == "/v1/fleet/workers":
            workers = [
                {"id": f"asr@host:{process.pid}:1", "role": "asr", "running": number}
                for number, process in enumerate(self.processes[: self.listed])
            ]
            self.listed -= 1
            handler.send(200, json.dumps({"data": workers}).encode())
            return
        self.forms.append(handler.read_body())
        lines = [f"data: {json.dumps(event)}\n\n" for event in self.events]
        handler.send(200, "".join(lines).encode())


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_busiest_worker_is_killed_at_each_moment(
    processes: list["subprocess.Popen[bytes]"],
) -> None:
    events: list[dict[str, object]] = [{"delta": piece} for piece in PIECES]
    gateway = RecordingGateway(processes, [*events, {"text": "".join(PIECES)}])
    with serve_http(gateway.answer) as url:
        run = RecordingRun(api=ApiClient(url), model="voice", pid=1, recording=RECORDING)
        written = run.write_down(lambda: None, KILLED_AT)
    assert written.pieces == PIECES and written.text == RECORDING.said
    assert [process.wait(timeout=60) for process in processes[1:]] == [-signal.SIGKILL] * 2
    assert processes[0].poll() is None
    assert written.killed == tuple(f"asr@host:{p.pid}:1" for p in reversed(processes[1:]))
    assert b'name="stream"\r\n\r\ntrue\r\n' in gateway.forms[0]


def test_failure_in_the_middle_of_a_transcript_is_an_error(
    processes: list["subprocess.Popen[bytes]"],
) -> None:
    failed: list[dict[str, object]] = [{"delta": "a"}, {"error": {"message": "no worker of asr"}}]
    gateway = RecordingGateway(processes, failed)
    with serve_http(gateway.answer) as url, pytest.raises(ApiError, match="no worker of asr"):
        list(ApiClient(url).transcribed_pieces("voice", b"mp3", "a.mp3"))


def test_recording_has_each_sentence_and_the_wanted_length() -> None:
    speaker = BenchSpeaker(
        name="beep", speak=lambda text, _: np.full(len(text) * 100, 900, np.int16)
    )
    made = assemble(speaker, 1, lambda: None)
    assert made.duration_s == pytest.approx(soundfile.info(io.BytesIO(made.file)).duration, abs=0.1)
    assert made.duration_s >= 60
    for text in (*(text for text, _ in QUESTIONS), *SENTENCES):
        assert text in made.said
    assert PCM_RATE_HZ == soundfile.info(io.BytesIO(made.file)).samplerate


def test_targets_tell_a_transcript_that_differs_from_an_equal_one() -> None:
    use = ResidentMemory(name="fleet worker asr", half_way_mib=100.0, end_mib=120.0)
    calm = Written(took_s=4.0, pieces=PIECES, killed=(), memory=(use,))
    other = Written(took_s=8.0, pieces=(*PIECES, "twice"), killed=("a", "b"), memory=())
    result = RecordingResult(
        model="voice",
        speaker="beep",
        recorded_s=40.0,
        errors=WordErrors(words=100, errors=4),
        runs=(calm, other),
    )
    missed = {ratio.name for ratio in result.targets() if not ratio.met}
    assert missed == {
        "times real time, the slower run",
        "equal transcripts",
        "memory, end / half way",
    }
    equal = msgspec.structs.replace(
        result, runs=(calm, msgspec.structs.replace(other, pieces=PIECES, took_s=5.0))
    )
    assert {ratio.name for ratio in equal.targets() if not ratio.met} == {"memory, end / half way"}
    assert list(result.tables())
