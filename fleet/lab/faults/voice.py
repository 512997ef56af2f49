"""Voice sessions under faults: conversations over the Realtime WebSocket that resume at another
gateway without losing turns.

Each session asks one question after another, every other one aloud where the run has clips. An
answer passes if the received audio, over all connections, equals its log byte by byte. A session
passes if at its end the conversation still has every question and answer.
"""

import contextlib
import itertools
import random
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from fleet.lab.client.audio import BYTES_PER_SAMPLE, read_wav
from fleet.lab.client.client import ApiClient
from fleet.lab.client.errors import ApiError, ApiRefused, ApiUnreachable
from fleet.lab.client.realtime import (
    RealtimeEvent,
    decode_any_event,
    encode_event,
    update_audio_input,
)
from fleet.lab.faults.client_threads import ClientThreads
from fleet.lab.measure.prompts import PROMPTS

SILENCE_S = 5.0
"""Time without an event during an answer, after which a client connects to another gateway."""
GIVE_UP_S = 60.0
"""Time without any event after which a turn counts as lost."""
RECOMPUTED_S = 30.0
"""Time within which an answer's log is complete again after Redis has lost its end."""
RETRY_S = 0.2
COMPLETE = ("completed", "incomplete")
"""Statuses of a whole answer; "incomplete" is one that ended at its length limit."""
REFUSED = "refused"
"""Marker status of a response that failed before its first audio because the fleet cannot serve it
now; the client asks again.
"""
UNAVAILABLE = ("redis_unreachable", "overloaded", "gateway_stopping")
"""Error codes that correspond to HTTP status 503."""
MAX_REPEATS = 200
T = TypeVar("T")


class ChaosTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A question of a voice session and the outcome of its answer. `lost`: reason why it was not
    completely answered, else "".

    `resumed`: number of connections lost during the turn. `repeated`: number of responses asked for
    again, since they were refused or lost. `different`: whether the received audio differs from the
    log. `unread`: whether the log was missing. Units: seconds; `asked_s` and `ended_s` since the
    phase began, `longest_gap_s` between two pieces of audio.
    """

    session: int
    turn: int
    asked_s: float
    ended_s: float
    resumed: int = 0
    repeated: int = 0
    samples: int = 0
    longest_gap_s: float = 0.0
    lost: str = ""
    different: bool = False
    unread: bool = False


class ChaosSession(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a voice session. `forgotten`: items that the conversation lacked at its end, or
    had with different words.
    """

    turns: tuple[ChaosTurn, ...]
    forgotten: tuple[str, ...] = ()


@dataclass(slots=True)
class _Turn:
    """State of the current turn, from the events received so far."""

    number: int
    question: str
    asked_s: float
    is_asked: bool = False
    response: str = ""
    request: str = ""
    answer: str = ""
    audio: bytearray = field(default_factory=bytearray)
    status: str = ""
    progress_s: float = field(default_factory=time.monotonic)
    audio_s: float = 0.0
    longest_gap_s: float = 0.0
    resumed: int = 0
    repeated: int = 0

    def is_refused(self) -> bool:
        return self.status == REFUSED

    def ask_again(self) -> None:
        """Reset the turn's answer, so that the question is asked again, because its response was
        refused or is unknown to the session.
        """
        self.repeated += bool(self.response)
        self.response = ""
        self.request = ""
        self.answer = ""
        self.status = ""
        self.audio.clear()

    def add_audio(self, pcm: bytes) -> None:
        now_s = time.monotonic()
        if self.audio:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.audio_s)
        self.audio_s = now_s
        self.audio += pcm


class _Stopped(Exception):
    """The run was aborted."""


class VoiceConversation:
    """Client of one voice session; its methods block the calling thread. `threads`: client threads
    of all sessions, with the events that end them. `clips`: spoken questions, PCM16 at 24 kHz.
    """

    def __init__(
        self,
        number: int,
        apis: Sequence[ApiClient],
        model: str,
        seed: int,
        now_s: Callable[[], float],
        threads: ClientThreads,
        clips: Sequence[bytes] = (),
    ) -> None:
        self._number = number
        self._apis = apis
        self._model = model
        self._now_s = now_s
        self._threads = threads
        self._clips = clips
        self._random = random.Random(f"{seed} {number}")
        self._gateways = itertools.count(number)
        self._session = ""
        self._socket: ClientConnection | None = None
        self._turns: list[ChaosTurn] = []
        self._said: dict[str, str] = {}
        """Items of the conversation with their transcripts; a typed question has none."""
        self._open: _Turn | None = None

    def unfinished(self) -> ChaosSession:
        """Return the result of a session that has not ended; its current turn counts as lost."""
        turn = self._open
        if turn is None:
            return self._session_of("session: its client failed, as its stack on stderr says")
        self._turns.append(self._result(turn, lost="its answer did not end"))
        return self._session_of()

    def _session_of(self, *forgotten: str) -> ChaosSession:
        return ChaosSession(turns=tuple(self._turns), forgotten=forgotten)

    def run(self, step: Callable[[], None]) -> ChaosSession:
        """Take at least one turn, until the run finishes; then compare the conversation with what
        was said. Return the result.
        """
        forgotten: list[str] = []
        try:
            while not self._threads.finishing.is_set() or not self._turns:
                self._turns.append(self._take_turn(len(self._turns)))
                step()
                if self._turns[-1].lost:
                    break
            else:
                forgotten = self._forgotten()
        except _Stopped:
            pass
        finally:
            self._leave()
        return self._session_of(*forgotten)

    def _take_turn(self, number: int) -> ChaosTurn:
        """Ask a question and receive its answer, over as many connections as needed; return the
        turn's outcome.
        """
        turn = _Turn(
            number=number, question=f"item_q{self._number}_{number}", asked_s=self._now_s()
        )
        self._open = turn
        content = self._content(number)
        try:
            self._persist(turn, lambda: self._advance(turn, content))
            result = self._compare(turn)
        except ApiError as error:
            result = self._result(turn, lost=str(error))
        self._open = None
        return result

    def _is_spoken(self, number: int) -> bool:
        return bool(self._clips) and number % 2 == 0

    def _content(self, number: int) -> dict[str, str]:
        """Return the content of a turn's question."""
        if self._is_spoken(number):
            pcm = self._random.choice(self._clips)
            return {"type": "input_audio", "audio": b64encode(pcm).decode()}
        return {"type": "input_text", "text": self._random.choice(PROMPTS)}

    def _persist(self, turn: _Turn, attempt: Callable[[], T]) -> T:
        """Call `attempt`, and repeat it on new connections after errors. Raises: ApiError if a
        retry is useless, or nothing has arrived for `GIVE_UP_S`.
        """
        while True:
            try:
                self._connect(turn)
                return attempt()
            except ApiRefused as error:
                reason = str(error)
            except (OSError, WebSocketException, ApiUnreachable) as error:
                reason = f"the connection broke: {str(error) or type(error).__name__}"
            self._abort()
            turn.resumed += 1
            if time.monotonic() - turn.progress_s > GIVE_UP_S:
                raise ApiError(reason)
            self._threads.cancelled.wait(RETRY_S)

    def _advance(self, turn: _Turn, content: dict[str, str]) -> None:
        """Ask the question if that is still to do, and receive the answer over one connection.
        Raises: ApiError, OSError, WebSocketException if the connection ends first.
        """
        if not turn.is_asked:
            self._ask(turn, content)
        pause = threading.Event()
        while not turn.status:
            if not turn.response:
                self._send("response.create")
                turn.response = self._until(turn, "response.created").response.id
            self._apply(turn, self._receive(turn))
            if turn.is_refused():
                turn.ask_again()
                pause.wait(RETRY_S)

    def _ask(self, turn: _Turn, content: dict[str, str]) -> None:
        if not turn.resumed or self._has(turn, turn.question) is None:
            message = {"type": "message", "role": "user", "content": [content]}
            self._send("conversation.item.create", item={"id": turn.question, **message})
            self._until(turn, "conversation.item.added", turn.question)
        turn.is_asked = True

    def _connect(self, turn: _Turn) -> None:
        """Ensure an open connection: keep the present one, else open a session or resume it at the
        next gateway.
        """
        if self._socket is not None:
            return
        api = self._apis[next(self._gateways) % len(self._apis)]
        num_samples = len(turn.audio) // BYTES_PER_SAMPLE
        url = (
            api.resumed_realtime_url(self._session, turn.response, num_samples)
            if self._session
            else api.realtime_url(self._model)
        )
        try:
            self._socket = connect(
                url, additional_headers=api.headers, max_size=None, open_timeout=SILENCE_S
            )
        except InvalidStatus as error:
            raise ApiRefused(api.url, error.response.status_code, "no voice session") from error
        try:
            created = self._until(turn, "session.created").session.id
        except ApiRefused:
            # A gateway that died may not have written a session in which nothing was said yet.
            self._session = self._session if self._said else ""
            raise
        if not self._session:
            self._session = created
            self._socket.send(update_audio_input(turn_detection=None))
            self._until(turn, "session.updated")
        else:
            self._catch_up(turn)

    def _catch_up(self, turn: _Turn) -> None:
        """Update the turn after the session was resumed: keep waiting for its response, receive the
        rest of a response that has ended, or reset the turn if its response was lost.
        """
        resumed = self._until(turn, "fleet.resumed")
        if turn.status or (turn.response and resumed.response_id == turn.response):
            return
        answered = self._has(turn, turn.answer) if turn.answer else None
        if turn.response and answered is not None:
            self._said[turn.answer] = answered
            self._receive_rest(turn)
            turn.status = COMPLETE[0]
        elif not turn.status:
            turn.ask_again()
            turn.is_asked = False

    def _receive_rest(self, turn: _Turn) -> None:
        """Receive the audio of a response that ended while the client was disconnected, up to the
        length of its log.
        """
        whole = len(self._logged_audio(turn) or b"")
        while len(turn.audio) < whole:
            self._apply(turn, self._receive(turn))

    def _apply(self, turn: _Turn, event: RealtimeEvent) -> None:
        if event.type == "fleet.request":
            turn.request = event.request_id
        elif event.type == "response.output_item.added":
            turn.answer = event.item.id
        elif event.type == "response.output_audio.delta" and event.response_id in (
            None,
            turn.response,
        ):
            turn.add_audio(b64decode(event.delta))
        elif event.type == "response.output_item.done":
            self._said[event.item.id] = event.item.transcript
        elif event.type == "response.done" and event.response.id == turn.response:
            turn.status = event.response.status
            if (
                event.response.code in UNAVAILABLE
                and not turn.audio
                and turn.repeated < MAX_REPEATS
            ):
                turn.status = REFUSED
            elif turn.status not in COMPLETE:
                raise ApiError(f"the response was {turn.status}: {event.response.failure}")

    def _has(self, turn: _Turn, item: str) -> str | None:
        """Return the transcript of a conversation item, None if the conversation does not have
        it.
        """
        self._send("conversation.item.retrieve", item_id=item)
        while True:
            event = self._receive(turn, errors=True)
            if event.type == "error":
                return None
            if event.type == "conversation.item.retrieved" and event.item.id == item:
                return event.item.transcript
            self._apply(turn, event)

    def _until(self, turn: _Turn, event_type: str, item: str = "") -> RealtimeEvent:
        """Return the next event of a type; apply the events before it to the turn."""
        while True:
            event = self._receive(turn)
            if event.type == event_type and (not item or event.item.id == item):
                return event
            self._apply(turn, event)

    def _receive(self, turn: _Turn, *, errors: bool = False) -> RealtimeEvent:
        """Return the next event, and record its arrival as the turn's progress. An error event is
        returned if `errors` is True, else raised as ApiRefused. Raises: OSError after `SILENCE_S`;
        WebSocketException; _Stopped if the run was aborted.
        """
        assert self._socket is not None, "connected before"
        if self._threads.cancelled.is_set():
            raise _Stopped
        event = decode_any_event(self._socket.recv(SILENCE_S))
        if event.type != "error":
            turn.progress_s = time.monotonic()
        if event.type == "error" and not errors:
            # A refused connection: the reason, then its close.
            raise ApiRefused("the voice session", 503, event.error.message)
        return event

    def _send(self, event_type: str, **fields: object) -> None:
        assert self._socket is not None, "connected before"
        self._socket.send(encode_event(event_type, **fields))

    def _abort(self) -> None:
        """Drop the connection without a closing handshake, since that would end the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(2)
            socket.socket.close()

    def _leave(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError, WebSocketException):
                self._socket.close()

    def _logged_audio(self, turn: _Turn) -> bytes | None:
        """Return the answer's audio from its log, None if Redis has lost or deleted it."""
        for api in itertools.islice(itertools.cycle(self._apis), 2 * len(self._apis)):
            try:
                return read_wav(api.answer_audio(turn.request))
            except ApiError:
                continue
        return None

    def _compare(self, turn: _Turn) -> ChaosTurn:
        """Compare the received audio with the log and return the turn's result. Waits up to
        `RECOMPUTED_S` until the log is complete, since workers recompute the part that Redis lost.
        """
        pause, deadline_s = threading.Event(), time.monotonic() + RECOMPUTED_S
        logged = self._logged_audio(turn)
        while (
            logged is not None and len(logged) < len(turn.audio) and time.monotonic() < deadline_s
        ):
            pause.wait(RETRY_S)
            logged = self._logged_audio(turn)
        return self._result(
            turn,
            unread=logged is None,
            different=logged is not None and logged != bytes(turn.audio),
        )

    def _result(
        self, turn: _Turn, *, lost: str = "", different: bool = False, unread: bool = False
    ) -> ChaosTurn:
        return ChaosTurn(
            session=self._number,
            turn=turn.number,
            asked_s=turn.asked_s,
            ended_s=self._now_s(),
            resumed=turn.resumed,
            repeated=turn.repeated,
            samples=len(turn.audio) // BYTES_PER_SAMPLE,
            longest_gap_s=turn.longest_gap_s,
            lost=lost,
            different=different,
            unread=unread,
        )

    def _forgotten(self) -> list[str]:
        """Return a line for each item that was said, but is missing from the conversation or has
        other words there.
        """
        turn = _Turn(
            number=len(self._turns),
            question="",
            asked_s=self._now_s(),
            is_asked=True,
            status=COMPLETE[0],
        )
        questions = {
            f"item_q{self._number}_{done.turn}": None if self._is_spoken(done.turn) else ""
            for done in self._turns
        }
        forgotten: list[str] = []
        for item, words in (questions | self._said).items():
            found = self._retrieve(turn, item)
            if found is None or (words is not None and found != words):
                forgotten.append(
                    f"session {self._number}, {item}: "
                    f"{'missing' if found is None else 'other words'}"
                )
        return forgotten

    def _retrieve(self, turn: _Turn, item: str) -> str | None:
        try:
            return self._persist(turn, lambda: self._has(turn, item))
        except ApiError:
            return None
