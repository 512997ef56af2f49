"""Client for a gateway in a separate process whose memory and stalls a test measures. Sends nothing
by itself.
"""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support import REPO
from tests.web.stall_probe import PATH

_senders = itertools.count(2)
"""Counter for the last numbers of loopback client addresses (127.0.0.N)."""


@dataclass(frozen=True, slots=True)
class GatewayTarget:
    """A gateway process with default limits."""

    url: str
    pid: int

    def growth(self, start: int) -> int:
        """Return the growth of peak resident memory, in bytes, since it was `start` bytes."""
        return self._bytes("VmHWM") - start

    def mark(self) -> int:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self._bytes("VmRSS")

    def post(self, path: str, body: bytes, media_type: str) -> httpx.Response:
        """Send a body from a new loopback address, so that the gateway's per-address limit of
        refused work does not count earlier bodies.
        """
        with self.sender() as sender:
            return sender.post(path, content=body, headers={"content-type": media_type})

    def sender(self) -> httpx.Client:
        """Return an HTTP client that connects from a new loopback address."""
        return httpx.Client(
            base_url=self.url,
            transport=httpx.HTTPTransport(local_address=new_address()),
            timeout=60,
        )

    def longest_stall_s(self) -> float:
        """Return the longest stall of the event loop since the previous call."""
        return float(httpx.get(self.url + PATH).json())

    def _bytes(self, name: str) -> int:
        found = re.search(
            rf"^{name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE
        )
        assert found is not None
        return int(found[1]) * 1024


def new_address() -> str:
    high, low = divmod(next(_senders), 250)
    return f"127.0.{high}.{low + 1}"


@contextmanager
def gateway_target(folder: Path) -> Iterator[GatewayTarget]:
    """Run a gateway on the checkpoint in `folder`, which gets a tiny one if it has none."""
    command = [sys.executable, "-m", "tests.web.gateway_process", str(folder)]
    with subprocess.Popen(
        command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield GatewayTarget(process.stdout.readline().strip(), process.pid)
        process.stdin.close()
        assert process.wait(30) == 0
