"""Interruptions over `/v1/realtime`: somebody speaks into an answer, and how long it is until all of it has stopped.

The clock is this client's: from the moment the first voiced sample was sent. What is held is what the workers tell, which they do
several times in the time of a lease. Knows no stage.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from fleet.bench.chat import ChatApi, Held
from fleet.bench.errors import BenchError
from fleet.bench.voice import BLOCK_BYTES, BLOCK_MS, PATIENCE_S, Samples, SpokenQuestion
from fleet.reporting.stats import Summary, summarise

ASKED = "count to twenty"
"""Whose answer takes longer than it takes to be interrupted."""
LISTEN_BYTES = 25 * BLOCK_BYTES
"""Half a second of silence: so long the answer is heard before somebody speaks."""
LOOK_S = 0.01
VOICED = 0.1
"""Of the peak: what lies below at the beginning is no voice yet."""
DETECTION = {
    "type": "server_vad",
    "threshold": 0.5,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
    "create_response": False,
}


class BargeIn(msgspec.Struct, frozen=True, kw_only=True):
    """One interruption. Each from the first voiced sample: until the server says that it hears it, that the answer is cancelled,
    and until no worker holds a task, or memory, of it any more.
    """

    heard_ms: float
    cancelled_ms: float
    idle_ms: float
    memory_ms: float

    @property
    def freed_ms(self) -> float:
        """From the end of the answer to its memory free."""
        return self.memory_ms - self.cancelled_ms


class BargeInResult(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    turns: tuple[BargeIn, ...]
    others_cores: float | None = None

    def summary(self, name: str) -> Summary | None:
        """`name` is that of one of a `BargeIn`'s lengths."""
        return summarise([float(getattr(turn, name)) for turn in self.turns])


@dataclass(slots=True)
class Watcher:
    """Looks at what the fleet holds again and again. `seen`: (when by `time.perf_counter`, what), oldest first."""

    api: ChatApi
    seen: list[tuple[float, Held]] = field(default_factory=list[tuple[float, Held]])
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self.seen.append((time.perf_counter(), self.api.held()))
            except BenchError:
                continue  # who waits for it says so, if it lasts

    def when(self, after_s: float, enough: Callable[[Held], bool], what: str) -> tuple[float, Held]:
        """The first look after that time at which it was so. Raises: BenchError if it does not come to that."""
        deadline_s = time.perf_counter() + PATIENCE_S
        while time.perf_counter() < deadline_s:
            found = next((look for look in tuple(self.seen) if look[0] > after_s and enough(look[1])), None)
            if found is not None:
                return found
            time.sleep(LOOK_S)
        raise BenchError(f"{what} for {PATIENCE_S:g} s: does somebody else use this fleet?")


class _Response(msgspec.Struct, frozen=True):
    status: str = ""


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""


class _Event(msgspec.Struct, frozen=True):
    """What is read of any event."""

    type: str
    response: _Response | None = None
    error: _Problem | None = None


class _Session:
    """One conversation whose events are read as they come, by a thread of its own, while somebody speaks."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._told: list[tuple[float, _Event]] = []
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def send(self, event: dict[str, object]) -> None:
        self._socket.send(msgspec.json.encode(event).decode())

    def speak(self, pcm: bytes) -> float:
        """In real time: a block is sent once it would have been recorded. Returns when the first sample was spoken."""
        began_s = at_s = time.perf_counter()
        for start in range(0, len(pcm), BLOCK_BYTES):
            at_s += BLOCK_MS / 1e3
            time.sleep(max(0.0, at_s - time.perf_counter()))
            self.send({"type": "input_audio_buffer.append", "audio": b64encode(pcm[start : start + BLOCK_BYTES]).decode()})
        return began_s

    def when(self, kind: str) -> tuple[float, _Event]:
        """The first event of this kind of the session, and when it came. Raises: BenchError."""
        with self._more:
            self._more.wait_for(lambda: self._first(kind) or self._first("error") or not self._thread.is_alive(), PATIENCE_S)
            if (problem := self._first("error")) is not None:
                error = problem[1].error
                raise BenchError(f"the session says: {error.message if error else 'an error without a message'}")
            if (found := self._first(kind)) is None:
                raise BenchError(f"no {kind} within {PATIENCE_S:g} s: was the voice heard as speech? Name recordings with --wav")
            return found

    def _first(self, kind: str) -> tuple[float, _Event] | None:
        return next((told for told in self._told if told[1].type == kind), None)

    def _listen(self) -> None:
        try:
            for raw in self._socket:
                told = (time.perf_counter(), _event.decode(raw))
                with self._more:
                    self._told.append(told)
                    self._more.notify_all()
        except ConnectionClosed:
            return  # whoever waits for an event sees that this thread is over
        finally:
            with self._more:
                self._more.notify_all()


_event = msgspec.json.Decoder(_Event)


def measure_barge_in(api: ChatApi, voice: SpokenQuestion, turns: int, step: Callable[[], None]) -> BargeInResult:
    """`turns` interruptions of answers by the same voice, and one before them that does not count. Raises: BenchError."""
    model = api.model()
    measured: list[BargeIn] = []
    try:
        for number in range(turns + 1):
            # A session each: what one has said is no part of the next.
            with connect(api.realtime_url(model), additional_headers=api.headers(), max_size=None) as socket:
                turn = _interrupt(api, _Session(socket), voice.samples)
            if number:
                measured.append(turn)
            step()
    except InvalidStatus as error:
        raise BenchError(f"{api.url} refuses a voice session with status {error.response.status_code}") from error
    except (OSError, WebSocketException) as error:
        raise BenchError(f"the voice session at {api.url} broke off: {error}") from error
    return BargeInResult(model=model, turns=tuple(measured))


def _interrupt(api: ChatApi, session: _Session, voice: Samples) -> BargeIn:
    watcher = Watcher(api)
    session.send({"type": "session.update", "session": {"type": "realtime", "audio": {"input": {"turn_detection": DETECTION}}}})
    session.when("session.updated")
    with watcher.watching():
        before = watcher.when(0.0, lambda held: held.tasks == 0, "the fleet was not idle")[1]
        session.send({"type": "conversation.item.create", "item": _typed(ASKED)})
        session.send({"type": "response.create"})
        session.when("response.output_audio.delta")
        session.speak(bytes(LISTEN_BYTES))
        spoken_s = session.speak(_from_its_first(voice).tobytes())
        heard_s, _ = session.when("input_audio_buffer.speech_started")
        cancelled_s, done = session.when("response.done")
        if done.response is None or done.response.status != "cancelled" or cancelled_s < spoken_s:
            raise BenchError(f"the answer to {ASKED!r} was over before it was interrupted: a longer one is needed")
        idle_s, _ = watcher.when(spoken_s, lambda held: held.tasks == 0, "the stages were not idle")
        memory_s, _ = watcher.when(spoken_s, lambda held: _no_more(held, before), "the memory was not free")
    heard_ms, cancelled_ms, idle_ms, memory_ms = (
        round((at_s - spoken_s) * 1e3, 1) for at_s in (heard_s, cancelled_s, idle_s, memory_s)
    )
    return BargeIn(heard_ms=heard_ms, cancelled_ms=cancelled_ms, idle_ms=idle_ms, memory_ms=memory_ms)


def _typed(text: str) -> dict[str, object]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def _no_more(held: Held, before: Held) -> bool:
    return held.tasks == 0 and held.pages <= before.pages and held.slots <= before.slots


def _from_its_first(samples: Samples) -> Samples:
    """Without the silence, and the breath, before its first voiced sample."""
    level = np.abs(samples.astype(np.int32))
    return samples[int(np.argmax(level > VOICED * int(level.max(initial=0)))) :]
