"""Costly bodies and events: each is refused by a limit that its error names, in bounded memory."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from tests.support import REPO
from tests.web.bombs import BODIES, CHAT, EVENTS, MIB, Bomb, audio_chat

MAX_GROWTH_BYTES = 100 * MIB
"""Limit beside the body, which is in memory twice while it is joined."""


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """A gateway process."""

    url: str
    pid: int

    def growth(self, start: int) -> int:
        """Return the growth of peak resident memory since `mark`."""
        return self._bytes("VmHWM") - start

    def mark(self) -> int:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self._bytes("VmRSS")

    def _bytes(self, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UploadTarget]:
    command = [sys.executable, "-m", "tests.web.gateway_process", str(tmp_path_factory.mktemp("target"))]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield UploadTarget(process.stdout.readline().strip(), process.pid)
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize("bomb", BODIES, ids=str)
def test_costly_body_is_refused_in_bounded_memory(target: UploadTarget, bomb: Bomb) -> None:
    body, start = bomb.make(), target.mark()
    answer = httpx.post(target.url + bomb.path, content=body, headers={"content-type": bomb.media_type}, timeout=30)
    assert answer.status_code == bomb.status, answer.text
    message = answer.json()["error"]["message"]
    assert bomb.message in message and len(message) < 1_000
    assert target.growth(start) < 2 * len(body) + MAX_GROWTH_BYTES


@pytest.mark.parametrize("bomb", EVENTS, ids=str)
def test_costly_event_is_refused_in_bounded_memory_without_disconnect(target: UploadTarget, bomb: Bomb) -> None:
    with connect(target.url.replace("http", "ws") + "/v1/realtime") as socket:
        assert json.loads(socket.recv())["type"] == "session.created"
        event, start = bomb.make(), target.mark()
        socket.send(event, text=True)
        error = json.loads(socket.recv())["error"]
        assert bomb.message in error["message"] and len(error["message"]) < 1_000
        assert error["code"] == ("input_too_large" if bomb.status == 413 else "invalid_value")
        assert target.growth(start) < 4 * len(event) + MAX_GROWTH_BYTES
        socket.send('{"type": "input_audio_buffer.clear"}')
        assert json.loads(socket.recv())["type"] == "input_audio_buffer.cleared"


def test_long_recording_is_accepted(target: UploadTarget) -> None:
    body = audio_chat(11_000_000)
    answer = httpx.post(target.url + CHAT, content=body, timeout=30)
    assert answer.status_code == 200, answer.text
