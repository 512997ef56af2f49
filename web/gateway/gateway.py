"""From a checked chat to an answer under way: what the API and the console share. Knows no HTTP."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from fleet.config.schema import FleetConfig
from fleet.control.client import ClientStream
from fleet.core.clock import now_us
from fleet.core.errors import BadInput, ConfigError, FleetError, InputTooLarge, ModelNotFound, UnsupportedValue, quoted
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling
from fleet.graphs import Graph
from fleet.processing import AudioPart, ChatRequest, Frontend, GivenAnswer, Message, TextPart
from web.gateway.answer import Answer, ClientEdges
from web.gateway.audio_preparation import AudioPreparation
from web.gateway.metrics import Metrics
from web.gateway.playback_reports import HeardNotes
from web.gateway.sampling import request_seed, resolve_sampling, stage_defaults
from web.gateway.stored_body import kept_body
from web.ports import FleetPort
from web.schema.chat import AudioUrlPartBody, ChatBody, MessageBody, PartBody, StreamOptions, TextPartBody, voice_name

log = logging.getLogger("fleet.web")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRequest:
    """An answer under way, and what was resolved for it."""

    answer: Answer
    seed: int
    voice: str | None
    spoken: bool

    def headers(self, ignored: Sequence[str]) -> dict[str, str]:
        """What the response says of it beside its body. `ignored` are names of fields that the client sent."""
        headers = {"x-fleet-seed": str(self.seed)}
        if self.voice is not None:
            headers["x-fleet-voice"] = self.voice
        if ignored:
            headers["x-fleet-ignored"] = ", ".join(ascii(name[:64])[1:-1][:64] for name in ignored[:32])
        return headers


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOverrides:
    """What routes other than chat put beside a body: messages in place of its own, an answer or its beginning that is given, and
    what errors call the prompt and the voice. `continues`: its sound follows other sound, and keeps all of its leading silence.
    """

    messages: tuple[Message, ...] = ()
    given: GivenAnswer = ()
    where: str = "messages"
    voice_where: str = "audio.voice"
    continues: bool = False


class Gateway:
    """Raises: ConfigError if the graph has no text edge to the client, or the deployment's sampling is wrong."""

    def __init__(self, config: FleetConfig, client: FleetPort, frontend: Frontend) -> None:
        self.config = config
        self.client = client
        self.frontend = frontend
        self.graph = config.graph_declaration()
        self.edges = client_edges(self.graph)
        self.model = model_name(config)
        self.metrics = Metrics(client, self.model)
        self.heard = HeardNotes(client)
        self.started_s = int(time.time())
        self.closing = asyncio.Event()
        """Set at shutdown: endless streams end, and answers cut short are left to another gateway."""
        self._audio = AudioPreparation(client, frontend, config.limits)
        self._defaults = stage_defaults(config, frontend.sampling())
        self._main = next(stage.name for stage in self.graph.stages if stage.main)

    @property
    def speaks(self) -> bool:
        return self.edges.audio is not None and self.frontend.sample_rate_hz > 0

    def detach_all(self) -> None:
        """End whatever still runs here; see `GatewayRequests.detach_all`."""
        self.client.requests.detach_all()

    def close(self) -> None:
        """End what the gateway started, after its last request."""
        self._audio.close()

    def check_model(self, wanted: str, where: str = "model") -> None:
        """Accept the model's name and its aliases (`web.model_aliases`). Raises: ModelNotFound naming `where`."""
        if wanted != self.model and wanted not in self.config.web.model_aliases:
            others = ", and web.model_aliases lists its other names" if self.config.web.model_aliases else ""
            raise ModelNotFound(f"{where}: no model {quoted(wanted)}; this server has {self.model!r}{others}", param=where)

    async def open(
        self, body: ChatBody, request_id: RequestId, asked: RequestOverrides | None = None, *, kind: str = ""
    ) -> ActiveRequest:
        """Check, prepare and submit. A caller cancelled meanwhile leaves no request behind.

        `kind`: what people look for it by; speech or text where it is not given, as the body asks.

        Raises: BadInput, InputTooLarge, ModelNotFound, Overloaded, NoWorker, RedisUnreachable.
        """
        self.check_model(body.model)
        spoken = "audio" in body.wants
        outputs = self.outputs(spoken=spoken)
        seed = request_seed(body)
        stages = self.graph.stages_for(outputs)
        asked = asked or RequestOverrides()
        chat = ChatRequest(
            id=request_id,
            graph=self.config.graph,
            messages=asked.messages or await self._messages(body),
            outputs=outputs,
            sampling=resolve_sampling(body, self.config, self._defaults, stages, seed),
            spoken=spoken,
            voice=voice_name(body.audio.voice) if body.audio is not None else None,
            given=asked.given,
            created_us=now_us(),
            where=asked.where,
            voice_where=asked.voice_where,
        )
        spec, blob = await asyncio.to_thread(self.frontend.prepare, await self._audio.decode(chat))
        spec = msgspec.structs.replace(
            spec, reply=reply_of(body) | self._silence_of(asked, spoken=spoken), session=session_of(body), body=kept_body(body),
            model=self.model, kind=kind or ("speech" if spoken else "text"),
        )  # fmt: skip
        if isinstance(asked.given, TextPart):
            spec = self._as_long_as_given(spec)
        stream = await self._submit(spec, blob)
        return ActiveRequest(answer=self._answer(spec, stream), seed=seed, voice=spec.params.get("voice"), spoken=spoken)

    def _silence_of(self, asked: RequestOverrides, *, spoken: bool) -> dict[str, str]:
        """The bound on leading silence, kept with the request: positions in its sound are the same at every gateway."""
        max_ms = self.config.web.max_leading_silence_ms
        return {MAX_LEADING_SILENCE_MS: str(max_ms)} if spoken and max_ms is not None and not asked.continues else {}

    def _as_long_as_given(self, spec: RequestSpec) -> RequestSpec:
        """An answer that is given whole has no other end than its own."""
        main = msgspec.structs.replace(self._sampling_of(spec, self._main), max_tokens=len(spec.given))
        return msgspec.structs.replace(spec, sampling={**spec.sampling, self._main: main})

    async def resume(self, request_id: RequestId) -> Answer | None:
        """Go on with an answer that another gateway, or another connection, began; None if there is no such request.

        Raises: RedisUnreachable.
        """
        found = await self.client.requests.resume(request_id)
        return self._answer(*found) if found is not None else None

    def _answer(self, spec: RequestSpec, stream: ClientStream) -> Answer:
        silence_ms = spec.reply.get(MAX_LEADING_SILENCE_MS)
        return Answer(
            spec=spec,
            main=self._sampling_of(spec, self._main),
            stream=stream,
            edges=self.edges,
            frontend=self.frontend,
            metrics=self.metrics,
            closing=self.closing,
            num_cached=self._num_cached,
            max_leading_silence_ms=int(silence_ms) if silence_ms is not None else None,
        )

    async def _num_cached(self, spec: RequestSpec) -> int:
        """Of a request whose answer has ended, how many prompt positions the conversation's earlier turn had computed."""
        if not spec.session:
            return 0
        try:
            view = await self.client.telemetry.trace(spec.id)
        except FleetError as error:
            log.warning("request %s: what was spared of it is not known: %s", spec.id, error.message)
            return 0
        spared = [task.cached_rows for task in view.tasks if task.stage == self._main] if view is not None else []
        return min(sum(spared), len(spec.prompt_ids))

    async def _submit(self, spec: RequestSpec, blob: bytes | None) -> ClientStream:
        submitting = asyncio.ensure_future(self.client.requests.submit(spec, blob))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # Whether the request was written is not known until the script has answered.
            stream = await submitting
            await stream.abort("the client left")
            raise

    def outputs(self, *, spoken: bool) -> tuple[EdgeName, ...]:
        """The client edges of an answer. Raises: UnsupportedValue where the model does not speak."""
        if not spoken:
            return (self.edges.text,)
        if self.edges.audio is None or not self.speaks:
            raise UnsupportedValue("modalities: this model does not speak; ask for text", param="modalities")
        return (self.edges.text, self.edges.audio)

    async def keep_transcript(self, audio_id: str, transcript: str) -> int:
        """Remember a spoken answer's words; until when, in seconds since 1970."""
        await self.client.voice.save_transcript(audio_id, transcript, self.config.retention_s)
        return int(time.time()) + self.config.retention_s

    async def _messages(self, body: ChatBody) -> tuple[Message, ...]:
        if len(body.messages) > self.config.limits.max_messages:
            raise InputTooLarge(
                f"messages: {len(body.messages)} messages; at most {self.config.limits.max_messages} are allowed",
                param="messages",
            )
        return tuple([await self._message(message, index) for index, message in enumerate(body.messages)])

    async def _message(self, message: MessageBody, index: int) -> Message:
        where = f"messages[{index}]"
        role = "system" if message.role == "developer" else message.role
        content = message.content
        if message.audio is not None and content is None:
            content = await self.client.voice.transcript(message.audio.id)
            if content is None:
                where_audio = f"{where}.audio.id"
                raise BadInput(
                    f"{where_audio}: no such answer, or it has expired; send its transcript as content instead",
                    param=where_audio,
                )
        if content is None:
            raise BadInput(f"{where}.content: this field is required", param=f"{where}.content")
        if isinstance(content, str):
            return Message(role=role, content=TextPart(text=content, where=f"{where}.content"))
        return Message(role=role, content=tuple(_part(p, f"{where}.content[{n}]") for n, p in enumerate(content)))

    @staticmethod
    def _sampling_of(spec: RequestSpec, stage: StageName) -> Sampling:
        return spec.sampling.get(stage, Sampling())


MIRROR, USAGE, WAV, MAX_LEADING_SILENCE_MS = "mirror", "usage", "wav", "max_leading_silence_ms"


def reply_of(body: ChatBody) -> dict[str, str]:
    """What a body says of its answer's shape, as the request keeps it: a key is there or not."""
    options = body.stream_options or StreamOptions()
    wanted = {MIRROR: "text" in body.wants, USAGE: options.include_usage, WAV: options.include_wav_headers}
    return {name: "yes" for name, given in wanted.items() if given}


def session_of(body: ChatBody) -> str:
    """The conversation's name inside the fleet: of one length, and fit for a key of Redis, whatever the client calls it."""
    key = body.prompt_cache_key
    return blake2b(key.encode(), digest_size=16).hexdigest() if key is not None else ""


def client_edges(graph: Graph) -> ClientEdges:
    by_medium = {medium: edge for edge, medium in graph.media.items()}
    if "text" not in by_medium:
        raise ConfigError(f"graph {graph.name}: no edge carries text to the client", param="graph")
    return ClientEdges(text=by_medium["text"], audio=by_medium.get("audio"))


def model_name(config: FleetConfig) -> str:
    """The configured name, else the checkpoint folder's, else the graph's."""
    if config.web.model_name:
        return config.web.model_name
    folder = Path(config.checkpoint)
    if folder.parent.name == "snapshots":  # the model hub's cache: models--OWNER--NAME/snapshots/REVISION
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name if folder.name not in ("", "auto") else config.graph


def _part(part: PartBody, where: str) -> TextPart | AudioPart:
    if isinstance(part, TextPartBody):
        return TextPart(text=part.text, where=f"{where}.text")
    if isinstance(part, AudioUrlPartBody):
        return AudioPart(data=part.audio_url.url, where=f"{where}.audio_url.url")
    return AudioPart(data=part.input_audio.data, where=f"{where}.input_audio.data")
