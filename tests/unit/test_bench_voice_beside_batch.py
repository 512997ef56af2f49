"""The benchmark of voice beside a batch, without a fleet: how batches follow one another, and the
comparison of both kinds of rounds.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from fleet.batches.lines import find_faults
from fleet.batches.records import ENDPOINTS
from fleet.lab.client.client import ApiClient, BatchLines, BatchState
from fleet.lab.client.realtime import LatencyPart
from fleet.lab.measure import running_batches
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.options import parse
from fleet.lab.measure.running_batches import RunningBatches, batch_lines
from fleet.lab.measure.voice import SILENCE_MS
from fleet.lab.measure.voice_beside_batch import (
    MEASUREMENT,
    MOST_RATIO,
    SpokenTurns,
    VoiceBesideBatch,
)
from fleet.lab.measure.voice_client import SessionResult, SessionTurn
from tests.bench_reports import missed, report_of, shown
from tests.support import wait_until

NUM_LINES = 5


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(running_batches, "POLL_S", 0.001)
    yield


@dataclass
class FakeBatches:
    """Batches of a fake fleet: each look at a batch answers a further line of it, up to
    `num_lines`. `num_failed`: number of lines with an error.
    """

    num_lines: int = NUM_LINES
    num_failed: int = 0
    answered: dict[str, int] = field(default_factory=dict[str, int])
    cancelled: list[str] = field(default_factory=list[str])

    def start(self) -> BatchState:
        name = f"batch_{len(self.answered)}"
        self.answered[name] = 0
        return BatchState(id=name, status="validating")

    def look(self, name: str) -> BatchState:
        is_open = name not in self.cancelled
        self.answered[name] = min(self.num_lines, self.answered[name] + is_open)
        status = "in_progress" if self.answered[name] < self.num_lines else "completed"
        counts = BatchLines(completed=self.answered[name], failed=self.num_failed)
        return BatchState(id=name, status=status if is_open else "cancelled", request_counts=counts)


class BatchApi(ApiClient):
    def __init__(self, batches: FakeBatches) -> None:
        super().__init__("http://127.0.0.1:1")
        self.batches = batches

    def start_batch(self, lines: bytes, endpoint: str = "") -> BatchState:
        assert lines == b"lines" and endpoint == "/v1/chat/completions"
        return self.batches.start()

    def batch(self, batch_id: str) -> BatchState:
        return self.batches.look(batch_id)

    def cancel_batch(self, batch_id: str) -> BatchState:
        self.batches.cancelled.append(batch_id)
        return self.batches.look(batch_id)


def test_ended_batch_is_followed_by_the_next_and_the_last_is_cancelled() -> None:
    fake = FakeBatches()
    running = RunningBatches(BatchApi(fake), b"lines")
    with running.running():
        assert fake.answered["batch_0"] > 0, "the block begins with the first answer"
        wait_until(lambda: len(fake.answered) >= 3, "the third batch")
    assert fake.answered["batch_0"] == fake.answered["batch_1"] == NUM_LINES
    assert fake.cancelled in ([], [list(fake.answered)[-1]])
    fake.num_lines = 10**9
    with running.running():
        last = list(fake.answered)[-1]
    assert fake.cancelled[-1] == last, "it would not have ended by itself"
    answered = dict(fake.answered)
    assert running.num_answered() >= sum(answered.values())


def test_batch_with_failed_lines_ends_the_measurement() -> None:
    with (
        pytest.raises(BenchError, match="2 of its lines have an error"),
        RunningBatches(BatchApi(FakeBatches(num_failed=2)), b"lines").running(),
    ):
        pytest.fail("no line was answered")


def test_batch_that_no_job_runs_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_batches, "SETTLE_S", 0.0)
    with (
        pytest.raises(BenchError, match="does `fleet jobs` run"),
        RunningBatches(BatchApi(FakeBatches(num_lines=0)), b"lines").running(),
    ):
        pytest.fail("no line was answered")


def test_lines_are_a_valid_input_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lines") / "in.jsonl"
    path.write_bytes(batch_lines("m", 40, 7))
    assert find_faults(path, ENDPOINTS) == (40, [])
    bodies = [json.loads(line)["body"] for line in path.read_text().splitlines()]
    assert {body["max_tokens"] for body in bodies} == {7}
    assert len({body["messages"][0]["content"] for body in bodies}) == 40


def session(*voiced_ms: float, fault: str = "") -> SessionResult:
    turns = [
        SessionTurn(
            voice_to_voice_ms=SILENCE_MS + each,
            first_audio_ms=SILENCE_MS + each - 1,
            parts=(LatencyPart(name="talker", ms=each / 2),),
            underruns=0,
            answer_s=1.0,
            late_ms=(),
        )
        for each in voiced_ms
    ]
    return SessionResult(console=False, turns=tuple(turns), mic_late_ms=(), fault=fault)


def result(beside_ms: float, num_answered: int = 3, num_turns: int = 2) -> VoiceBesideBatch:
    return VoiceBesideBatch(
        model="m",
        engine="torch",
        wanted_turns=2 + num_turns,
        num_lines=NUM_LINES,
        num_answered=num_answered,
        beside_s=2.0,
        alone=SpokenTurns(sessions=(session(100, 100),)),
        beside=SpokenTurns(sessions=(session(beside_ms, beside_ms),)),
        others_cores=0.0,
    )


def test_later_first_sound_beside_the_batch_misses_both_targets() -> None:
    assert not missed(result(100 * MOST_RATIO - 0.1))
    late = missed(result(100 * MOST_RATIO + 0.1))
    assert late == [f"first sound, batch / alone, {name}" for name in ("p50", "p95")]
    page = shown(report_of(voice_beside_batch=result(90)))
    assert "3 lines answered beside voice, 1.5 per second" in page
    assert "talker, beside a batch" in page


def test_missing_answers_and_a_batch_that_stands_still_miss_their_targets() -> None:
    assert missed(result(100, num_turns=3)) == ["questions not answered"]
    assert missed(result(100, num_answered=0)) == ["lines answered beside voice"]
    silent = VoiceBesideBatch(
        model="m",
        engine="torch",
        wanted_turns=2,
        num_lines=NUM_LINES,
        num_answered=1,
        beside_s=1.0,
        alone=SpokenTurns(sessions=(session(fault="refused with status 503"),)),
        beside=SpokenTurns(),
        others_cores=0.0,
    )
    assert missed(silent) == ["questions not answered"]
    assert "refused with status 503" in shown(report_of(voice_beside_batch=silent))


def test_sessions_of_this_measurement_request_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (
        ["--sessions", "1"],
        ["--sessions", "3", "--engine", "fake"],
        ["--wav", "a.wav"],
    ):
        assert parse(["--voice-beside-batch", *options]).chosen == (MEASUREMENT,)
    with pytest.raises(SystemExit):
        parse(["--voice-beside-batch", "--sessions", "2", "--telephone"])
    assert "leave out the other form" in capsys.readouterr().err
