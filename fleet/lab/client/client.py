"""Typed API calls to a gateway."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar
from urllib.parse import urlencode
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from fleet.core.hand_off import HandOff
from fleet.core.ids import StageName
from fleet.lab.client.chat import ChatAnswer, ChatCall, Piece, StreamRecording, WholeAnswer
from fleet.lab.client.errors import ApiError, ApiSilent
from fleet.lab.client.growing_speech import GrowingSpeech
from fleet.lab.client.realtime import RealtimeSession
from fleet.lab.client.transport import TIMEOUT_S, ErrorMessage, OpenResponse, Transport

TRANSCRIPTIONS = "/v1/audio/transcriptions"
DATA = b"data: "

T = TypeVar("T", bound=msgspec.Struct)
BATCH_ENDS = ("completed", "failed", "expired", "cancelled")


class _ServedModel(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: tuple[_ServedModel, ...]


class WorkerState(msgspec.Struct, frozen=True):
    """State of a worker, or of a gateway, whose `role` is empty. `pages_kept`: KV pages that only
    hold cached prefixes, a part of `pages_used`.
    """

    role: str
    id: str = ""
    state: str = ""
    running: int = 0
    pages_used: int = 0
    pages_kept: int = 0
    slots_used: int = 0


class FleetWorkers(msgspec.Struct, frozen=True):
    data: tuple[WorkerState, ...]
    missing_roles: tuple[str, ...] = ()
    gone: tuple[WorkerState, ...] = ()


class ResourcesInUse(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that live requests occupy in all workers: tasks, KV pages, and slots of transfer
    arenas. Pages that only hold cached prefixes do not count.
    """

    tasks: int
    pages: int
    slots: int


class TracedTask(msgspec.Struct, frozen=True):
    stage: StageName
    hand_off: HandOff | None = None


class TracedRequest(msgspec.Struct, frozen=True):
    """The part of a request's trace that this client reads. `ended_us`: end of the request, 0
    while the request runs.
    """

    id: str
    state: str
    tasks: tuple[TracedTask, ...] = ()
    ended_us: int = 0


class SpeechCall(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/audio/speech`."""

    model: str
    input: str
    response_format: str = "wav"
    voice: str | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class BatchLines(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a batch's lines: those with an answer, and those with an error."""

    completed: int = 0
    failed: int = 0


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a batch that this client reads."""

    id: str
    status: str
    request_counts: BatchLines = BatchLines()

    @property
    def has_ended(self) -> bool:
        return self.status in BATCH_ENDS


class _StoredFile(msgspec.Struct, frozen=True):
    id: str


class _Transcript(msgspec.Struct, frozen=True):
    text: str


class _TranscriptEvent(msgspec.Struct, frozen=True):
    """An event of a streamed transcript. `delta`: the next piece; "" in the last event."""

    delta: str = ""
    error: ErrorMessage | None = None


class ApiClient:
    """Client of one gateway. Thread-safe: each call opens its own connection. `timeout_s`: read
    time-out of calls whose answer comes as a whole.

    Raises: ApiError in one line when the gateway cannot be reached, refuses, or stops before the
    end.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._transport = Transport(url, api_key, timeout_s)
        self.url, self.port = self._transport.url, self._transport.port
        self.headers = self._transport.headers

    def model(self) -> str:
        """Return the name of the model that the fleet serves."""
        models = self._get("/v1/models", _ModelList).data
        if not models:
            raise ApiError(f"{self.url} serves no model")
        return models[0].id

    def workers(self) -> FleetWorkers:
        return self._get("/v1/fleet/workers", FleetWorkers)

    def roles(self) -> frozenset[str]:
        """Return the roles that the fleet serves. Raises: ApiError while a role has no worker."""
        workers = self.workers()
        if workers.missing_roles:
            raise ApiError(
                f"the fleet at {self.url} is not ready: no worker for "
                f"{', '.join(workers.missing_roles)}"
            )
        return frozenset(worker.role for worker in workers.data if worker.role)

    def resources_in_use(self) -> ResourcesInUse:
        """Sum the workers' reports of resources in use; workers renew their reports several times
        per lease.
        """
        workers = self.workers().data
        return ResourcesInUse(
            tasks=sum(worker.running for worker in workers),
            pages=sum(worker.pages_used - worker.pages_kept for worker in workers),
            slots=sum(worker.slots_used for worker in workers),
        )

    def traced_request(self, request_id: str) -> TracedRequest:
        return self._get(f"/v1/fleet/requests/{request_id}", TracedRequest)

    def answer_audio(self, request_id: str) -> bytes:
        """Return the audio of an answer, read from the log of its request, as a WAV file."""
        return self._transport.call("GET", f"/v1/fleet/requests/{request_id}/audio")

    def chat(self, call: ChatCall) -> ChatAnswer:
        """Send a chat request and return its whole answer."""
        raw = self._transport.call("POST", "/v1/chat/completions", msgspec.json.encode(call))
        choices = self._decoded(raw, WholeAnswer).choices
        if not choices:
            raise ApiError(f"{self.url} sent an answer without a choice", param="url")
        message = choices[0].message
        audio = message.audio.decoded() if message.audio is not None else None
        transcript = message.audio.transcript if message.audio is not None else ""
        return ChatAnswer(
            text=message.content or "",
            finish_reason=choices[0].finish_reason,
            audio=audio,
            transcript=transcript,
        )

    def open_chat(
        self, body: bytes, *, timeout_s: float = TIMEOUT_S, small_buffers: bool = False
    ) -> OpenResponse:
        """Begin a streamed answer and return its open response. `body`: encoded `ChatCall`.
        `small_buffers`: True to keep at most some KiB in socket buffers, so that the gateway soon
        notices that the client does not read.
        """
        return self._transport.open(
            "POST",
            "/v1/chat/completions",
            body,
            timeout_s=timeout_s,
            small_buffers=small_buffers,
        )

    def resume_chat(
        self, request_id: str, last_event_id: str, *, timeout_s: float = TIMEOUT_S
    ) -> OpenResponse:
        """Continue a streamed answer after the event `last_event_id`; "" starts from the
        beginning.
        """
        headers = {"last-event-id": last_event_id} if last_event_id else {}
        return self._transport.open(
            "GET", f"/v1/fleet/requests/{request_id}/stream", headers=headers, timeout_s=timeout_s
        )

    def record_chat(
        self, body: bytes, is_cancelled: Callable[[], bool] = lambda: False
    ) -> StreamRecording:
        """Send one request and record its stream to the end. Once `is_cancelled()` is True, close
        the connection and return the pieces received so far. Raises: ApiError.
        """
        pieces: list[Piece] = []
        sent_s = time.perf_counter()
        try:
            with closing(self.open_chat(body)) as response:
                while (piece := response.read()) and not is_cancelled():
                    pieces.append((time.perf_counter() - sent_s, piece))
        except ApiSilent as error:
            error.close()
            raise
        return StreamRecording(sent_s=sent_s, pieces=tuple(pieces), request_id=response.request_id)

    def speech(self, call: SpeechCall) -> bytes:
        """Return the speech for a text, as an audio file."""
        return self._transport.call("POST", "/v1/audio/speech", msgspec.json.encode(call))

    def open_speech(self, call: SpeechCall) -> OpenResponse:
        """Begin the speech for a text and return its open response, whose body is an audio file
        that arrives while the rest is still being generated.
        """
        return self._transport.open("POST", "/v1/audio/speech", msgspec.json.encode(call))

    @contextmanager
    def growing_speech(self) -> Iterator[GrowingSpeech]:
        """Open a socket that speaks texts while they arrive, for the duration of the block. Raises:
        ApiError if it is refused, or breaks off inside the block.
        """
        url = f"{self._transport.websocket_url}/v1/audio/speech/stream"
        with self._socket(url, "speech socket") as socket:
            yield GrowingSpeech(socket)

    def transcribe(self, model: str, file: bytes, name: str = "audio.wav") -> str:
        """Return the transcript of an audio file. `name`: file name that is sent with it."""
        body, headers = _form({"model": model}, file, name)
        raw = self._transport.call("POST", TRANSCRIPTIONS, body, headers)
        return self._decoded(raw, _Transcript).text

    def start_batch(self, lines: bytes, endpoint: str = "/v1/chat/completions") -> BatchState:
        """Upload the lines of a batch, and start it. `endpoint`: route of all its lines."""
        body, headers = _form({"purpose": "batch"}, lines, "in.jsonl")
        file = self._decoded(self._transport.call("POST", "/v1/files", body, headers), _StoredFile)
        batch = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
        raw = self._transport.call("POST", "/v1/batches", msgspec.json.encode(batch))
        return self._decoded(raw, BatchState)

    def batch(self, batch_id: str) -> BatchState:
        return self._get(f"/v1/batches/{batch_id}", BatchState)

    def cancel_batch(self, batch_id: str) -> BatchState:
        """Cancel a batch and return its state. Lines that have no answer yet end with an error."""
        raw = self._transport.call("POST", f"/v1/batches/{batch_id}/cancel")
        return self._decoded(raw, BatchState)

    def transcribed_pieces(self, model: str, file: bytes, name: str) -> Iterator[str]:
        """Yield the transcript of an audio file in pieces, as the gateway sends them. `name`: file
        name that is sent with it.
        """
        body, headers = _form({"model": model, "stream": "true"}, file, name)
        with closing(self._transport.open("POST", TRANSCRIPTIONS, body, headers)) as response:
            for line in _lines(response):
                event = self._decoded(line.removeprefix(DATA), _TranscriptEvent)
                if event.error is not None:
                    raise ApiError(f"{self.url}: {event.error.message}")
                if event.delta:
                    yield event.delta

    def realtime_url(self, model: str) -> str:
        """Return the WebSocket address of a voice session with latency reports."""
        query = urlencode({"model": model, "fleet": "1"})
        return f"{self._transport.websocket_url}/v1/realtime?{query}"

    def resumed_realtime_url(self, session_id: str, response_id: str, samples: int) -> str:
        """Return the WebSocket address that resumes a voice session. `response_id`: response to
        continue, "" for none. `samples`: number of audio samples of this response that the client
        has received.
        """
        query = {"session": session_id, "fleet": "1"} | (
            {"response": response_id, "samples": samples} if response_id else {}
        )
        return f"{self._transport.websocket_url}/v1/realtime?{urlencode(query)}"

    def start_call(self, model: str, offer: str) -> str:
        """Open a voice session over WebRTC, with latency reports, and return the gateway's answer.
        `offer` and the answer are session descriptions (SDP).
        """
        query = urlencode({"model": model, "fleet": "1"})
        headers = {"content-type": "application/sdp"}
        path = f"/v1/realtime/calls?{query}"
        return self._transport.call("POST", path, offer.encode(), headers).decode()

    def console_url(self) -> str:
        """Return the WebSocket address that the console's Voice page opens."""
        return f"{self._transport.websocket_url}/console/ws?page=bench"

    @contextmanager
    def realtime(self, model: str) -> Iterator[RealtimeSession]:
        """Open a voice session for the duration of the block. Raises: ApiError if it is refused, or
        breaks off inside the block.
        """
        with self._socket(self.realtime_url(model), "voice session") as socket:
            yield RealtimeSession(socket)

    @contextmanager
    def _socket(self, url: str, what: str) -> Iterator[ClientConnection]:
        """Open a WebSocket for the duration of the block. `what`: name of the connection in error
        messages. Raises: ApiError if the connection is refused, or breaks off inside the block.
        """
        try:
            with connect(url, additional_headers=self.headers, max_size=None) as socket:
                yield socket
        except InvalidStatus as error:
            raise ApiError(
                f"{self.url} refuses a {what} with status {error.response.status_code}"
            ) from error
        except (OSError, WebSocketException) as error:
            raise ApiError(f"the {what} at {self.url} broke off: {error}") from error

    def _get(self, path: str, kind: type[T]) -> T:
        return self._decoded(self._transport.call("GET", path), kind)

    def _decoded(self, raw: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise ApiError(
                f"{self.url} does not answer as a fleet does ({error})", param="url"
            ) from error


def _form(fields: dict[str, str], file: bytes, name: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a form with a file. `name`: name of the file."""
    boundary = uuid4().hex
    parts = [(f'name="{field}"', value.encode()) for field, value in fields.items()]
    body = b"".join(
        f"--{boundary}\r\ncontent-disposition: form-data; {disposition}\r\n\r\n".encode()
        + content
        + b"\r\n"
        for disposition, content in (*parts, (f'name="file"; filename="{name}"', file))
    )
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    return body + f"--{boundary}--\r\n".encode(), headers


def _lines(response: OpenResponse) -> Iterator[bytes]:
    """Yield the lines of a stream that carry data."""
    unread = b""
    while piece := response.read():
        *lines, unread = (unread + piece).split(b"\n")
        yield from (line for line in lines if line.startswith(DATA))
