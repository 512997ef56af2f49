"""A long recording is transcribed once and whole, although its recogniser is killed on the way."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import soundfile

from tests.e2e.fleets import ProcessFleet, fleet_up
from tests.support import wait_until
from tests.web.realtime.speech_samples import RATE_HZ, spoken

pytestmark = pytest.mark.one_file_in(10, "processes")

SETTINGS = ("graph=cascade", "checkpoint=tiny", "device=cpu", "transfer.kind=redis", "web.port=0")
LONGEST_PIECE_S, LONG_S = 4.0, 60.0
KILLED_AFTER = (2, 7)
"""Numbers of pieces after which the recogniser is killed."""


def recording() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, spoken(round(LONG_S * RATE_HZ)), RATE_HZ, format="WAV")
    return buffer.getvalue()


def deltas(fleet: ProcessFleet, file: bytes) -> Iterator[str]:
    """Yield the text of each piece as it arrives; the last item is the whole text."""
    form = {"model": "tiny", "stream": "true"}
    path = f"{fleet.url}/v1/audio/transcriptions"
    with httpx.stream("POST", path, data=form, files={"file": file}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event.get("delta") or event["text"]


def transcript(
    fleet: ProcessFleet, file: bytes, on_piece: Callable[[int], None] = lambda _: None
) -> list[str]:
    texts: list[str] = []
    for text in deltas(fleet, file):
        texts.append(text)
        on_piece(len(texts))
    return texts


def test_transcript_is_the_same_after_its_recogniser_is_killed_twice(tmp_path: Path) -> None:
    limit = f"limits.max_audio_s={LONGEST_PIECE_S}"
    with fleet_up(tmp_path, *SETTINGS, limit) as fleet:
        file = recording()
        expected = transcript(fleet, file)
        assert len(expected) > LONG_S / LONGEST_PIECE_S and expected[-1] == "".join(expected[:-1])
        killed: list[int] = []

        def kill(num_pieces: int) -> None:
            if num_pieces in KILLED_AFTER:
                wait_until(lambda: "worker asr" in fleet.commands(), "the recogniser's process")
                process = fleet.commands()["worker asr"]
                killed.append(process.pid)
                process.kill()

        assert transcript(fleet, file, kill) == expected
        assert len(set(killed)) == 2
