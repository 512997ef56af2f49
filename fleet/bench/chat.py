"""The benchmark's HTTP client: a streamed chat completion as (time, bytes), decoded only after the measuring. Knows no stage.

Blocking on purpose: one thread a request costs the machine under test less than an event loop that parses as it goes.
"""

import http.client
import socket
import time
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from fleet.bench.answer_timing import AnswerTiming, AudioChunk
from fleet.bench.errors import BenchError
from fleet.core.hand_off import HandOff
from fleet.core.ids import StageName

PCM_RATE_HZ = 24_000
"""What `pcm16` means in this API. Source: OpenAI's reference, "24kHz, mono, little-endian"."""
BYTES_PER_SAMPLE = 2
READ_BYTES = 1 << 16
TIMEOUT_S = 600.0
DATA, DONE = b"data: ", b"[DONE]"

Headers = dict[str, str]
T = TypeVar("T", bound=msgspec.Struct)


class _Problem(msgspec.Struct, frozen=True):
    message: str


class _AudioDelta(msgspec.Struct, frozen=True):
    data: str | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    audio: _AudioDelta | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta


class _Details(msgspec.Struct, frozen=True):
    text_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens_details: _Details = _Details()


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Problem | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: _Problem


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class _Worker(msgspec.Struct, frozen=True):
    role: str
    running: int = 0
    pages_used: int = 0
    pages_kept: int = 0
    slots_used: int = 0


class _Workers(msgspec.Struct, frozen=True):
    data: tuple[_Worker, ...]
    missing_roles: tuple[str, ...]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What requests take of all workers together: tasks, pages of keys and values, slots of the arenas for tensors on their way.
    Not what is kept of a conversation between its turns.
    """

    tasks: int
    pages: int
    slots: int


class _Task(msgspec.Struct, frozen=True):
    stage: StageName
    hand_off: HandOff | None = None


class _Story(msgspec.Struct, frozen=True):
    tasks: tuple[_Task, ...]


_event = msgspec.json.Decoder(_Event)


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_event_ids`: for who resumes a stream; other servers do not know it."""

    include_usage: bool = True
    include_event_ids: bool | UnsetType = UNSET


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """A streamed, greedy request. `fleet` bounds single stages; `seed` is fixed so that nothing differs between runs."""

    model: str
    messages: list[dict[str, str]]
    modalities: list[str]
    audio: dict[str, str] | None
    stream: bool = True
    stream_options: StreamOptions = StreamOptions()
    temperature: float = 0.0
    seed: int = 0
    fleet: dict[str, dict[str, int | float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A streamed answer, undecoded. Units: each piece's time counts from the moment the request was sent.

    `request`: its id, by which the fleet tells its story.
    """

    prompt: int
    sent_s: float
    pieces: tuple[tuple[float, bytes], ...]
    request: str = ""


class ChatApi:
    """One fleet's gateway. Thread-safe: each call is a connection of its own.

    Raises: BenchError in one line when the gateway cannot be reached, refuses, or stops before the end.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"--url {url!r}: not an address; write http://HOST:PORT", param="--url")
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise BenchError(f"--url {url!r}: {error}", param="--url") from error
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure, self._host, self._path = parts.scheme == "https", parts.hostname, parts.path.rstrip("/")
        self._headers: Headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def model(self) -> str:
        """The name of the model it serves; who knows it may ask for answers."""
        models = _decoded(self._get("/v1/models"), _Models, self.url)
        if not models.data:
            raise BenchError(f"{self.url} serves no model")
        return models.data[0].id

    def roles(self) -> frozenset[str]:
        """The roles that have a worker. Raises: BenchError while some role has none."""
        workers = _decoded(self._get("/v1/fleet/workers"), _Workers, self.url)
        if workers.missing_roles:
            raise BenchError(f"the fleet at {self.url} is not ready: no worker for {', '.join(workers.missing_roles)}")
        return frozenset(worker.role for worker in workers.data if worker.role)

    def held(self) -> Held:
        """As the workers say; each tells it several times in the time of its lease."""
        workers = _decoded(self._get("/v1/fleet/workers"), _Workers, self.url).data
        return Held(
            tasks=sum(worker.running for worker in workers),
            pages=sum(worker.pages_used - worker.pages_kept for worker in workers),
            slots=sum(worker.slots_used for worker in workers),
        )

    def hand_offs(self, request: str) -> dict[StageName, HandOff]:
        """How each stage's task of a request went from one worker to another, where it did and that was told."""
        story = _decoded(self._get(f"/v1/fleet/requests/{request}"), _Story, self.url)
        return {task.stage: task.hand_off for task in story.tasks if task.hand_off is not None}

    def answer(self, prompt: int, body: bytes, began_s: float, cancelled: Callable[[], bool]) -> Recording:
        """Send one request and record its stream to the end, or until it is cancelled. `began_s` is the phase's start."""
        sent_s = time.perf_counter()
        pieces: list[tuple[float, bytes]] = []
        connection = self._connection()
        try:
            headers = {**self._headers, "content-type": "application/json"}
            connection.request("POST", f"{self._path}/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response.status, response.read())
            while (piece := response.read1(READ_BYTES)) and not cancelled():
                pieces.append((time.perf_counter() - sent_s, piece))
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        request = response.getheader("x-request-id", "")
        return Recording(prompt=prompt, sent_s=sent_s - began_s, pieces=tuple(pieces), request=request)

    def headers(self) -> Headers:
        """What proves the right to ask."""
        return dict(self._headers)

    def realtime_url(self, model: str) -> str:
        """Of a voice session that also tells where its time goes."""
        return f"{self._socket_url}/v1/realtime?{urlencode({'model': model, 'fleet': '1'})}"

    def console_url(self) -> str:
        """Of the voice session that the console's page has."""
        return f"{self._socket_url}/console/ws?page=bench"

    @property
    def _socket_url(self) -> str:
        return f"{'wss' if self._secure else 'ws'}://{self._host}:{self.port}{self._path}"

    def speech(self, body: dict[str, str]) -> bytes:
        """A text as sound, whole."""
        return self._whole("POST", "/v1/audio/speech", msgspec.json.encode(body))

    def _get(self, path: str) -> bytes:
        return self._whole("GET", path)

    def _whole(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = self._connection()
        headers = {**self._headers, "content-type": "application/json"} if body is not None else self._headers
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        if response.status != 200:
            raise self._refusal(response.status, raw)
        return raw

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self.port, timeout=TIMEOUT_S)

    def _unreachable(self, error: Exception) -> BenchError:
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            said = f"nothing answers at {self.url}; start a fleet with `fleet up`, or let --up start one"
        else:
            said = f"the connection to {self.url} broke: {str(error) or type(error).__name__}"
        return BenchError(said, param="--url")

    def _refusal(self, status: int, raw: bytes) -> BenchError:
        try:
            said = msgspec.json.decode(raw, type=_Failure).error.message
        except msgspec.DecodeError:
            said = "no reason given"
        return BenchError(f"{self.url} refused with status {status}: {said}")


def read_recording(recording: Recording) -> AnswerTiming:
    """Decode a finished stream. Raises: BenchError if it carries an error or stops before its end."""
    text: list[float] = []
    words: list[str] = []
    audio: list[AudioChunk] = []
    num_samples = num_prompt_tokens = num_answer_tokens = 0
    for at_s, event in _events(recording):
        if event.error is not None:
            raise BenchError(f"the fleet failed a request: {event.error.message}")
        if event.usage is not None:
            num_prompt_tokens = event.usage.prompt_tokens
            num_answer_tokens = event.usage.completion_tokens_details.text_tokens
        for choice in event.choices:
            if choice.delta.content:
                text.append(at_s)
                words.append(choice.delta.content)
            if choice.delta.audio is not None and choice.delta.audio.data:
                count = len(b64decode(choice.delta.audio.data)) // BYTES_PER_SAMPLE
                num_samples += count
                audio.append(AudioChunk(at_s, count / PCM_RATE_HZ))
    return AnswerTiming(
        prompt=recording.prompt,
        sent_s=recording.sent_s,
        text=tuple(text),
        audio=tuple(audio),
        done_s=recording.pieces[-1][0],
        answer="".join(words),
        num_samples=num_samples,
        num_prompt_tokens=num_prompt_tokens,
        num_answer_tokens=num_answer_tokens,
    )


def _events(recording: Recording) -> list[tuple[float, _Event]]:
    """Server-sent events, each with the time at which its last byte came."""
    events: list[tuple[float, _Event]] = []
    rest = b""
    for at_s, piece in recording.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line == DATA + DONE:
                return events
            if line.startswith(DATA):
                events.append((at_s, _event.decode(line.removeprefix(DATA))))
    if events and events[-1][1].error is not None:
        return events
    raise BenchError("the fleet's stream stopped before its end; was a process killed?")


def _decoded(raw: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise BenchError(f"{url} answers, but not as a fleet does ({error})", param="--url") from error
