"""Many voice sessions on one gateway: everybody is answered, and one too many waits in line until somebody leaves."""

from pathlib import Path

import msgspec

from fleet.bench.voice_sessions_result import VoiceSessionsResult
from tests.support import run_cli

SESSIONS, TURNS = 6, 2


class Told(msgspec.Struct):
    voices: VoiceSessionsResult


class File(msgspec.Struct):
    report: Told


def test_six_talk_and_the_seventh_waits(tmp_path: Path) -> None:
    """Whether sound ran dry is a matter of the machine, and is measured, not tested."""
    out = tmp_path / "out.json"
    words = ["--voice", "--sessions", str(SESSIONS), "--engine", "fake", "--requests", str(TURNS), "--json", str(out)]
    done = run_cli("bench", *words, cwd=tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(out.read_bytes(), type=File).report.voices
    assert not found.faults
    assert [len(talk.turns) for talk in found.talks] == [TURNS] * SESSIONS
    assert [talk.console for talk in found.talks].count(True) == 1
    assert all(3.5 < turn.answer_s < 4.5 for turn in found.turns), "every answer came whole"
    beyond = found.beyond
    assert beyond is not None and beyond.position == 1 and not beyond.early
    assert beyond.let_in_ms is not None and beyond.answered
    assert {"web", "conductor"} <= set(found.cores)
    assert "one too many was told place 1" in done.stdout
