"""A text that grows while it is spoken, cut into the clauses in which the voice speaks it. Knows no
request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from fleet.processing.spoken.clauses import Clause, ClauseCutter

SLICE_CHARS = 256
"""Characters that are cut at a time. Cutting takes microseconds for each, and other connections
must not wait for a long piece.
"""


class GrowingText:
    """Text of one utterance. Its clauses depend on the whole text alone, and not on the pieces in
    which it arrives. `num_waiting`: characters that belong to no yielded clause yet.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self._cutter = ClauseCutter()
        self._pieces: deque[str] = deque()
        self._ended = False
        self._grown = asyncio.Event()

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.num_waiting += len(piece)
        self._grown.set()

    def finish(self) -> None:
        """End the text."""
        self._ended = True
        self._grown.set()

    async def clauses(self) -> AsyncIterator[Clause]:
        """Yield each clause as soon as the text so far completes it."""
        while self._pieces or not self._ended:
            if not self._pieces:
                self._grown.clear()
                await self._grown.wait()
                continue
            for clause in self._cutter.feed(self._take()):
                self.num_waiting -= len(clause.text)
                yield clause
            await asyncio.sleep(0)
        for clause in self._cutter.finish():
            self.num_waiting -= len(clause.text)
            yield clause

    def _take(self) -> str:
        piece = self._pieces.popleft()
        if len(piece) > SLICE_CHARS:
            self._pieces.appendleft(piece[SLICE_CHARS:])
        return piece[:SLICE_CHARS]
