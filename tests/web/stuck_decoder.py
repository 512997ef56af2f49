"""Audio decoder processes that accept files and never reply, for tests of other requests while a
decoder is busy.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import psutil
import pytest

from fleet.processing import decoder_pool
from tests.support import command_line

_TAKES_ALL = "import sys; sys.stdin.buffer.read()"
_numbers = count()


class StuckDecoders:
    """The stuck decoder processes that were started."""

    def __init__(self, mark: str) -> None:
        self.command = (sys.executable, "-c", _TAKES_ALL, mark)

    def pids(self) -> list[int]:
        return [
            child.pid
            for child in psutil.Process().children()
            if command_line(child) == self.command
        ]


@contextmanager
def stuck_decoders() -> Iterator[StuckDecoders]:
    """Make decoder pools start stuck processes instead of real ones."""
    stuck = StuckDecoders(f"stuck-decoder-{next(_numbers)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_pool, "COMMAND", stuck.command)
        yield stuck
