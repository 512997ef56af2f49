"""Submission of checked chat requests, shared by all endpoints. Knows no HTTP."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from fleet.config.schema import FleetConfig
from fleet.control.client import BACKGROUND, Applicant, ClientStream, VoiceHold
from fleet.core.clock import now_us
from fleet.core.errors import (
    ConfigError,
    FleetError,
    InputTooLarge,
    ModelNotFound,
    UnsupportedValue,
    quoted,
)
from fleet.core.ids import EdgeName, RequestId, StageName
from fleet.core.request import RequestSpec, Sampling, session_name
from fleet.core.trace_context import current_traceparent
from fleet.graphs import Graph, RequestInput
from fleet.processing import (
    AudioPart,
    ChatRequest,
    Frontend,
    GivenAnswer,
    Message,
    PlainPrompt,
    RecognitionOptions,
    TextPart,
)
from web.gateway.answer import AnswerContext, AnswerStream, ClientEdges
from web.gateway.answer_words import WORD_ENDS
from web.gateway.audio_preparation import AudioPreparation
from web.gateway.fleet_port import FleetPort
from web.gateway.history import AnswerHistory
from web.gateway.incidents import IncidentReader
from web.gateway.live_captures import NO_STORE, LiveCaptures
from web.gateway.messages import is_large, messages_of
from web.gateway.metrics import Metrics
from web.gateway.playback_reports import PlaybackReports
from web.gateway.prepared_chat import ActiveRequest, PreparedChat
from web.gateway.rule_check import RuleCheck
from web.gateway.sampling import request_seed, resolve_sampling, stage_defaults
from web.gateway.shares import FairShares
from web.gateway.sound_gaps import note_gaps
from web.gateway.stored_body import stored_body
from web.gateway.token_sampling import with_token_fields
from web.gateway.tool_requests import ToolRequest, check_history, read_tool_request
from web.http.callers import current_caller
from web.http.offload import INLINE_BYTES, prepare_in_thread, read_input
from web.http.priority import is_background
from web.http.refused_work import current_sender
from web.schema.chat import AnswerOptions, ChatBody, StreamOptions

log = logging.getLogger("fleet.web")


class Gateway:
    """Entry point of all endpoints to the model: checks, prepares, submits and resumes chat
    requests.

    Raises: ConfigError if the graph has no text edge to the client, or if the deployment's sampling
    is invalid.
    """

    def __init__(self, config: FleetConfig, client: FleetPort, frontend: Frontend) -> None:
        self.config = config
        self.client = client
        self.frontend = frontend
        self.graph = config.graph_declaration()
        self.edges = client_edges(self.graph)
        self.model = model_name(config)
        self.metrics = Metrics(client, self.model)
        self.playback_reports = PlaybackReports(client)
        self.started_s = int(time.time())
        self.closing = asyncio.Event()
        """Event that is set at shutdown: endless streams end, and unfinished answers can be resumed
        at another gateway.
        """
        self.audio = AudioPreparation(client, frontend, config.limits)
        self._rules = RuleCheck(frontend)
        self._shares = FairShares(config.limits)
        self._defaults = stage_defaults(config, frontend.sampling())
        self._main = self.graph.main_stage.name
        self.call_format = frontend.tools.format(config.web.tool_format)
        """Form in which the model writes function calls; "" if it calls none."""
        self.captures = LiveCaptures(client, config)
        self.history = AnswerHistory(config)
        self.incidents = IncidentReader(client, config, self.history)
        self._answer_context = AnswerContext(
            edges=self.edges,
            frontend=frontend,
            metrics=self.metrics,
            closing=self.closing,
            num_cached=self._num_cached,
            tells_prompt=self._tells_prompt,
            note_gaps=partial(note_gaps, client),
        )

    @property
    def speaks(self) -> bool:
        return self.edges.audio is not None and self.frontend.sample_rate_hz > 0

    @property
    def hears(self) -> bool:
        return self.frontend.audio_rate_hz > 0

    @property
    def speaks_texts(self) -> bool:
        """True if the graph has a stage that speaks a given text, without the main stage."""
        return any(edge.replaced_by == "speech_text" for edge in self.graph.edges)

    def check_word_times(self, *, asked: bool) -> None:
        """Check that the voice knows the times of its words, if a client has `asked` for them.
        Raises: UnsupportedValue.
        """
        known = any(
            edge.name == self.edges.audio and WORD_ENDS in edge.tensors for edge in self.graph.edges
        )
        if asked and not known:
            raise UnsupportedValue(
                "word_timestamps: the voice of this model does not know the times of its words; "
                "leave it out",
                param="word_timestamps",
            )

    def is_spoken(self, spec: RequestSpec) -> bool:
        """Return True if the answer to a request has audio."""
        return self.edges.audio in spec.outputs

    def _tells_prompt(self, spec: RequestSpec) -> bool:
        return any(edge.target == self._main for edge in self.graph.edges_of(spec))

    def check_model(self, wanted: str, where: str = "model") -> None:
        """Check that `wanted` is the model's name or one of its aliases (`web.model_aliases`).

        Raises: ModelNotFound naming the field `where`.
        """
        if wanted != self.model and wanted not in self.config.web.model_aliases:
            others = (
                ", and web.model_aliases lists its other names"
                if self.config.web.model_aliases
                else ""
            )
            raise ModelNotFound(
                f"{where}: no model {quoted(wanted)}; this server has {self.model!r}{others}",
                param=where,
            )

    async def prepare(self, body: ChatBody, request_id: RequestId) -> PreparedChat:
        """Check and prepare the request of a chat completion, for `submit_prepared`.

        Raises: BadInput, InputTooLarge, ModelNotFound, Overloaded, NoWorker, RedisUnreachable.
        """
        self.check_model(body.model)
        self.outputs(spoken="audio" in body.wants)
        self.check_num_messages(len(body.messages))
        messages = await messages_of(body, self._transcript)
        stored = await read_input(is_large(body), stored_body, body)
        return await self.prepare_chat(body, messages, request_id, stored=stored)

    async def prepare_chat(
        self,
        options: AnswerOptions,
        messages: tuple[Message, ...],
        request_id: RequestId,
        *,
        stored: str | None = None,
        kind: str = "",
        given: GivenAnswer = (),
        where: str = "messages",
        voice_where: str = "audio.voice",
        continues: bool = False,
        arrived_s: float | None = None,
        outputs: tuple[EdgeName, ...] | None = None,
        speech_text: TextPart | None = None,
        plain: PlainPrompt | None = None,
        hearing: RecognitionOptions = RecognitionOptions(),  # noqa: B008
    ) -> PreparedChat:
        """Check a chat and decode its audio, for `submit_prepared`.

        `stored` is the copy of the body for the trace, by default made from the options and
        messages. `kind` is shown in lists, by default speech or text. If the answer `continues`
        other audio, leading silence is not trimmed. `arrived_s` orders a client's waiting requests,
        by default now. `outputs`: client edges, by default from `Gateway.outputs`.

        Raises: BadInput, InputTooLarge, Overloaded, NoWorker, RedisUnreachable.
        """
        spoken = "audio" in options.wants
        outputs = self.outputs(spoken=spoken) if outputs is None else outputs
        stages = self.graph.stages_for(outputs, _inputs(messages, speech_text))
        tools, sampling = await self._sampling_for(options, stages, seed := request_seed(options))
        chat = ChatRequest(
            id=request_id,
            graph=self.config.graph,
            messages=messages,
            outputs=outputs,
            stages=stages,
            speech_text=speech_text,
            plain=plain,
            hearing=hearing,
            continues=options.continues,
            sampling=sampling,
            spoken=spoken,
            voice=options.voice,
            given=given,
            created_us=now_us(),
            where=where,
            voice_where=voice_where,
            tools=tools.prompt,
        )
        applicant = self._applicant(continues, arrived_s)
        spec, blob = await self._prepare_spec(chat, applicant)
        spec = msgspec.structs.replace(
            spec,
            reply=self._reply_of(options, tools, trims=spoken and not continues),
            session=session_of(options, current_caller().listed_name),
            body=stored_body(options, messages) if stored is None else stored,
            kind=kind or ("speech" if spoken else "text"),
        )
        return PreparedChat(spec=spec, blob=blob, seed=seed, spoken=spoken, applicant=applicant)

    def _applicant(self, continues: bool, arrived_s: float | None) -> Applicant:
        """Return the request's entry in the queue. `continues`: the request goes on with an earlier
        answer, so that background priority does not send it to the end of the queue again.
        """
        applicant = self._shares.applicant(current_sender(), current_caller())
        if is_background() and not continues:
            applicant.client = BACKGROUND
        if arrived_s is not None:
            applicant.arrived_s = arrived_s
        return applicant

    async def _sampling_for(
        self, options: AnswerOptions, stages: tuple[StageName, ...], seed: int
    ) -> tuple[ToolRequest, dict[StageName, Sampling]]:
        """Return what a request asks of its tools, and the sampling of each of `stages`, after a
        check of the rule for the answer.
        """
        tools = read_tool_request(options, self.call_format, self.frontend.tools)
        sampling = resolve_sampling(options, self.config, self._defaults, stages, seed)
        if self._main in sampling:
            spoken = "audio" in options.wants
            sampling[self._main] = with_token_fields(
                sampling[self._main], options, self.frontend, spoken=spoken
            )
        if (rule := tools.rule) is not None:
            main = sampling[self._main]
            if (own := options.rule) is not None and own != rule:
                await self._rules.check(own, main)  # an error in it must not name the tools
            await self._rules.check(rule, main)
            sampling[self._main] = msgspec.structs.replace(main, constraint=rule.constraint)
        return tools, sampling

    async def _prepare_spec(
        self, chat: ChatRequest, applicant: Applicant
    ) -> tuple[RequestSpec, bytes | None]:
        """Decode a chat's audio, and return its request and audio blob."""
        check_history(chat.messages, self.call_format)
        decoded = await self.audio.decode(chat, applicant)
        spec, blob = await prepare_in_thread(
            num_chars(chat) > INLINE_BYTES, self.frontend.prepare, decoded
        )
        spec = msgspec.structs.replace(
            spec,
            stages=chat.stages,
            model=self.model,
            continues=chat.continues,
            key=current_caller().name,
            traceparent=parent.header if (parent := current_traceparent()) is not None else "",
            is_counted=bool(applicant.key),
            audio_hz=self.frontend.sample_rate_hz if self.edges.audio in chat.outputs else 0,
            tools=chat.tools.use,
        )
        if isinstance(chat.given, TextPart):
            spec = self._with_length_of_given(spec)
        return spec, blob

    def close(self) -> None:
        """End the processes that decode audio and check rules, after the last request."""
        self.audio.close()
        self._rules.close()

    async def submit_prepared(self, chat: PreparedChat) -> ActiveRequest:
        """Submit a prepared request, when it is its turn. If the caller is cancelled meanwhile, the
        request is aborted.

        Raises: Overloaded, NoWorker, RedisUnreachable.
        """
        chat.applicant.num_bytes = num_bytes(chat.spec, chat.blob)
        stream = await self._submit_spec(chat)
        return ActiveRequest(chat=chat, answer=self._answer(chat.spec, stream))

    def _reply_of(
        self, options: AnswerOptions, tools: ToolRequest, *, trims: bool
    ) -> dict[str, str]:
        """Return the options for the shape of the answer, as stored with the request, so that its
        positions are the same at every gateway. `trims`: True if leading silence is limited.
        """
        max_ms = self.config.web.max_leading_silence_ms
        limited = {MAX_LEADING_SILENCE_MS: str(max_ms)} if trims and max_ms is not None else {}
        return reply_of(options) | tools.reply | limited

    def _with_length_of_given(self, spec: RequestSpec) -> RequestSpec:
        """Return the request with max_tokens set to the length of its given answer, so that the
        model adds nothing to that answer.
        """
        sampling, replace = self._sampling_of(spec, self._main), msgspec.structs.replace
        main = replace(sampling, max_tokens=len(spec.given))
        return replace(spec, sampling={**spec.sampling, self._main: main})

    async def resume(
        self, request_id: RequestId, voice: VoiceHold | None = None
    ) -> AnswerStream | None:
        """Return the answer of a request that another gateway or connection submitted, as a stream
        from its beginning; None if there is no such request. `voice`: this gateway's hold on the
        voice session to which the answer belongs; None outside of voice sessions.

        Raises: RedisUnreachable; ResumedElsewhere if another gateway holds that session now.
        """
        found = await self.client.requests.resume(request_id, voice)
        return self._answer(*found) if found is not None else None

    def _answer(self, spec: RequestSpec, stream: ClientStream) -> AnswerStream:
        silence_ms = spec.reply.get(MAX_LEADING_SILENCE_MS)
        return AnswerStream(
            self._answer_context,
            spec,
            self._sampling_of(spec, self._main),
            stream,
            max_leading_silence_ms=int(silence_ms) if silence_ms is not None else None,
            on_complete=partial(self.captures.offer, spec, stream.blob),
        )

    async def _num_cached(self, spec: RequestSpec) -> int:
        """Count the prompt positions of a finished request that were reused from the previous turn
        of its conversation.
        """
        if not spec.session:
            return 0
        try:
            view = await self.client.telemetry.trace(spec.id)
        except FleetError as error:
            log.warning(
                "request %s: the number of its cached prompt tokens cannot be read: %s",
                spec.id,
                error.message,
            )
            return 0
        cached = (
            [task.cached_rows for task in view.tasks if task.stage == self._main]
            if view is not None
            else []
        )
        return sum(cached)

    async def _submit_spec(self, chat: PreparedChat) -> ClientStream:
        submitting = asyncio.ensure_future(
            self.client.requests.submit(chat.spec, chat.blob, chat.applicant)
        )
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # the script may have written the request: wait for its result before the abort
            chat.applicant.withdraw()
            with contextlib.suppress(FleetError):
                await (await submitting).abort("the client left")
            raise

    def outputs(self, *, spoken: bool, heard: bool = False) -> tuple[EdgeName, ...]:
        """Return the client edges of an answer: text, audio if it is `spoken`, and the transcript
        of the prompt if it is `heard` and the graph gives one.

        Raises: UnsupportedValue if the model does not speak.
        """
        if heard and self.edges.heard is not None:
            return (self.edges.heard, *self.outputs(spoken=spoken))
        if not spoken:
            return (self.edges.text,)
        if self.edges.audio is None or not self.speaks:
            raise UnsupportedValue(
                "modalities: this model does not speak; ask for text", param="modalities"
            )
        return (self.edges.text, self.edges.audio)

    async def keep_transcript(self, audio_id: str, transcript: str, key: str) -> int:
        """Store the transcript of a spoken answer, so that later requests of the API key named
        `key` can refer to the answer by `audio_id`. Returns the expiry in seconds since 1970, which
        repeated calls do not change.
        """
        return await self.client.voice.save_transcript(
            f"{audio_id}:{key}", transcript, int(time.time()) + self.config.retention_s
        )

    async def _transcript(self, audio_id: str) -> str | None:
        return await self.client.voice.transcript(f"{audio_id}:{current_caller().name}")

    def check_num_messages(self, num_messages: int, where: str = "messages") -> None:
        """Check the number of messages of a chat, in the field `where`. Raises: InputTooLarge above
        `limits.max_messages`.
        """
        if num_messages > self.config.limits.max_messages:
            reason = (
                f"{num_messages} messages; at most {self.config.limits.max_messages} are allowed"
            )
            raise InputTooLarge(f"{where}: {reason}", param=where)

    @staticmethod
    def _sampling_of(spec: RequestSpec, stage: StageName) -> Sampling:
        return spec.sampling.get(stage, Sampling())


MIRROR, USAGE, WAV, MAX_LEADING_SILENCE_MS = "mirror", "usage", "wav", "max_leading_silence_ms"

BYTES_PER_TOKEN = 36
"""Memory of a token id in a list of Python numbers."""


def num_bytes(spec: RequestSpec, blob: bytes | None) -> int:
    """Estimate the memory that a prepared request takes."""
    return len(blob or b"") + BYTES_PER_TOKEN * len(spec.prompt_ids) + len(spec.body)


def _inputs(messages: Sequence[Message], speech_text: TextPart | None) -> set[RequestInput]:
    """Return the inputs of a chat besides the text of its prompt."""
    parts = (
        part
        for message in messages
        if isinstance(message.content, tuple)
        for part in message.content
    )
    given: dict[RequestInput, bool] = {
        "audio": any(isinstance(part, AudioPart) for part in parts),
        "speech_text": speech_text is not None,
    }
    return {name for name, is_given in given.items() if is_given}


def num_chars(chat: ChatRequest) -> int:
    """Count the characters of the chat's texts."""
    plain = len(chat.plain.text) if isinstance(chat.plain, TextPart) else 0
    contents = (message.content for message in chat.messages)
    parts = (
        part
        for content in contents
        for part in (content if isinstance(content, tuple) else (content,))
    )
    return plain + sum(len(part.text) for part in parts if isinstance(part, TextPart))


def reply_of(body: AnswerOptions) -> dict[str, str]:
    """Return the options for the shape of the answer, as stored with the request; absent keys are
    off.
    """
    options = body.stream_options or StreamOptions()
    wanted = {
        MIRROR: "text" in body.wants,
        USAGE: options.include_usage,
        WAV: options.include_wav_headers,
        NO_STORE: body.store is False,
    }
    return {name: "yes" for name, is_wanted in wanted.items() if is_wanted}


def session_of(body: AnswerOptions, key: str) -> str:
    """Return the internal name of the conversation `prompt_cache_key`; "" without that field.
    `key`: name of the API key in `web.keys_file`, to separate clients' conversations; "" for none.
    """
    if body.prompt_cache_key is None:
        return ""
    return session_name(f"{key}/{body.prompt_cache_key}" if key else body.prompt_cache_key)


def client_edges(graph: Graph) -> ClientEdges:
    by_medium = {medium: edge for edge, medium in graph.media.items()}
    if "text" not in by_medium:
        raise ConfigError(f"graph {graph.name}: no edge carries text to the client", param="graph")
    return ClientEdges(
        text=by_medium["text"], audio=by_medium.get("audio"), heard=by_medium.get("transcript")
    )


def model_name(config: FleetConfig) -> str:
    """Return the model's name for clients: the configured name, otherwise the name of the
    checkpoint folder, otherwise the name of the graph.
    """
    if config.web.model_name:
        return config.web.model_name
    folder = Path(config.checkpoint)
    # the model hub's cache: models--OWNER--NAME/snapshots/REVISION
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name if folder.name not in ("", "auto") else config.graph
