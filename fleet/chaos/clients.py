"""One listener: an answer asked of one gateway and, should that one be lost, taken over from another by `Last-Event-ID`.

What a listener does here, any client of the API can do: it knows addresses, response headers and event ids.
"""

import http.client
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from fleet.bench.chat import READ_BYTES, Recording
from fleet.chaos.errors import Unanswered

UNREACHABLE_S = 30.0
"""Without a gateway for so long, a listener gives up."""
AGAIN_S = 0.1
TIMEOUT_S = 600.0
BLANK, ID, PARTED = b"\n\n", b"id: ", b'"code":"gateway_stopping"'
LOST = (OSError, http.client.HTTPException)
"""What a connection does whose other end has died, or says nothing for too long."""


class _Problem(msgspec.Struct, frozen=True):
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Problem


@dataclass(slots=True)
class Take:
    """What one listener was told, over however many connections. `moves` counts the gateways left in mid-answer. `silent` are
    connections that say nothing any more, closed only when another gateway has the answer: their own would take that for leaving.

    Units: `sent_s`, and `reached_s` when a gateway last answered, on this process's clock; pieces' times count from `sent_s`.
    """

    sent_s: float
    reached_s: float

    pieces: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    request_id: str = ""
    last_id: str = ""
    moves: int = 0
    silent: list[http.client.HTTPConnection] = field(default_factory=list[http.client.HTTPConnection])

    def recording(self, request: int) -> Recording:
        return Recording(prompt=request, sent_s=self.sent_s, pieces=tuple(self.pieces))

    def close_silent(self) -> None:
        while self.silent:
            self.silent.pop().close()

    def was_parted(self) -> bool:
        """Whether the last event says that the gateway leaves before the answer ends."""
        return any(PARTED in event for event in self._events()[-1:])

    def cut(self) -> None:
        """Forget the event that came in part, for it comes again, and the one with which a gateway took its leave.

        `last_id` is that of the last whole one that bears one.
        """
        whole = [event for event in self._events() if PARTED not in event]
        surplus = sum(len(piece) for _, piece in self.pieces) - sum(len(event) + len(BLANK) for event in whole)
        while surplus:
            at_s, piece = self.pieces.pop()
            kept = piece[: max(0, len(piece) - surplus)]
            surplus -= len(piece) - len(kept)
            if kept:
                self.pieces.append((at_s, kept))
        ids = [line.removeprefix(ID) for event in whole for line in event.split(b"\n") if line.startswith(ID)]
        self.last_id = ids[-1].decode() if ids else ""

    def _events(self) -> list[bytes]:
        """The whole ones, each without the blank line that ends it."""
        return b"".join(piece for _, piece in self.pieces).split(BLANK)[:-1]


class Gateways:
    """A fleet's gateways; listeners begin at each in turn. Thread-safe: each answer has connections of its own.

    `silence_s`: a connection that says nothing for so long is given up, for a frozen gateway breaks none. None: ten minutes.
    """

    def __init__(self, urls: Sequence[str], api_key: str | None = None, silence_s: float | None = None) -> None:
        self._addresses = [urlsplit(url).netloc for url in urls]
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = silence_s or TIMEOUT_S
        self._turns = itertools.count()

    def answer(self, body: bytes, cancelled: Callable[[], bool]) -> Take:
        """Ask, and listen to the end. Raises: Unanswered in one line: it was refused, or no gateway can be reached."""
        return self._told(body, "", cancelled)

    def once_more(self, request_id: str, cancelled: Callable[[], bool]) -> Take:
        """Listen to an answer that has been given, from its beginning. Raises: Unanswered."""
        return self._told(b"", request_id, cancelled)

    def _told(self, body: bytes, request_id: str, cancelled: Callable[[], bool]) -> Take:
        now_s = time.perf_counter()
        take = Take(sent_s=now_s, reached_s=now_s, request_id=request_id)
        try:
            self._ask_on(body, take, cancelled)
        finally:
            take.close_silent()
        return take

    def _ask_on(self, body: bytes, take: Take, cancelled: Callable[[], bool]) -> None:
        """One gateway after another, until one has told the end."""
        turn, pause = next(self._turns), threading.Event()
        while True:
            before_s = take.reached_s
            try:
                self._listen(self._addresses[turn % len(self._addresses)], body, take, cancelled)
                return
            except LOST as error:
                if time.perf_counter() - take.reached_s > UNREACHABLE_S or cancelled():
                    raise Unanswered(f"no gateway could be reached: {str(error) or type(error).__name__}") from error
                take.moves += bool(take.request_id)
                take.cut()
            turn += 1
            pause.wait(AGAIN_S if take.reached_s == before_s else 0)

    def _listen(self, address: str, body: bytes, take: Take, cancelled: Callable[[], bool]) -> None:
        """One connection: for a new answer, or for the rest of one that has begun. Raises: `LOST`, Unanswered."""
        connection = http.client.HTTPConnection(address, timeout=self._timeout_s)
        try:
            if take.request_id:
                resumed = {"last-event-id": take.last_id} if take.last_id else {}
                connection.request("GET", f"/v1/fleet/requests/{take.request_id}/stream", headers={**self._headers, **resumed})
            else:
                headers = {**self._headers, "content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise Unanswered(f"refused with status {response.status}: {_reason(response.read())}")
            take.close_silent()
            take.request_id = take.request_id or response.headers.get("x-request-id", "")
            take.reached_s = time.perf_counter()
            while (piece := response.read1(READ_BYTES)) and not cancelled():
                take.reached_s = time.perf_counter()
                take.pieces.append((take.reached_s - take.sent_s, piece))
            if take.was_parted():
                raise ConnectionError("the gateway stops")
        except TimeoutError:
            take.silent.append(connection)
            raise
        except BaseException:
            connection.close()
            raise
        connection.close()


def _reason(raw: bytes) -> str:
    try:
        return msgspec.json.decode(raw, type=_Refusal).error.message
    except msgspec.DecodeError:
        return "no reason given"
