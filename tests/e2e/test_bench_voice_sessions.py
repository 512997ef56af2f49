"""The benchmark of many voice sessions on one gateway."""

from pathlib import Path

import pytest

from fleet.lab.measure.voice_sessions import VoiceSessionsResult
from tests.bench_reports import read_result
from tests.support import run_cli

SESSIONS, TURNS = 6, 2
OPTIONS = ("--telephone", "--webrtc")


@pytest.mark.one_in(11, "benchmarks")
@pytest.mark.parametrize(
    "form",
    [[], ["--telephone"], ["--webrtc"]],
    ids=["voice sessions", "telephone calls", "calls over WebRTC"],
)
def test_session_beyond_the_limit_is_queued_then_admitted(tmp_path: Path, form: list[str]) -> None:
    """A session beyond the limit is queued, then admitted; a call would be refused, so none is
    tried. Underruns depend on the machine, so they are measured and not tested.
    """
    out = tmp_path / "out.json"
    arguments = [
        "--voice",
        "--sessions",
        str(SESSIONS),
        "--engine",
        "fake",
        "--requests",
        str(TURNS),
        *form,
        "--json",
        str(out),
    ]
    done = run_cli("bench", *arguments, cwd=tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = read_result(out, VoiceSessionsResult, "voice_sessions")
    assert not found.faults
    assert [len(session.turns) for session in found.sessions] == [TURNS] * SESSIONS
    assert [session.console for session in found.sessions].count(True) == (0 if form else 1)
    assert [found.telephone, found.webrtc] == [option in form for option in OPTIONS]
    assert all(3.5 < turn.answer_s < 4.5 for turn in found.turns), "every answer is complete"
    assert {"web", "conductor"} <= set(found.cores)
    if found.webrtc:
        assert found.queued is None
        return
    queued = found.queued
    assert queued is not None and queued.position == 1 and not queued.early
    assert queued.admitted_ms is not None and queued.answered
    assert "got queue position 1" in done.stdout
