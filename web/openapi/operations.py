"""Table of the API's routes: their bodies, responses and parameters. A test compares it with the
routes that are served. Knows no stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from pydantic import BaseModel

from fleet.batches.records import JSONL, Batch, FileObject
from fleet.drafts.figures.training import TrainingState
from fleet.telemetry.routes import SpanRoutes
from fleet.telemetry.views import Job, Transfers
from web.fleet_api.health import Health, Readiness
from web.fleet_api.history import KeptList, PinResult
from web.fleet_api.request_detail import RequestDetail
from web.fleet_api.routes import (
    AbortResult,
    DeadLetterList,
    DeletionResult,
    DrafterResult,
    DraftsList,
    JobBody,
    JobList,
    JournalList,
    LogList,
    QueueList,
    RedeliveryResult,
    RequestList,
    RetryResult,
    SeriesList,
    WorkerList,
    WorkerOrderResult,
)
from web.fleet_api.scaling import RoleOrderBody, RoleOrderResult
from web.fleet_api.training import ForgottenResult, VersionResult
from web.openai.audio_encoder import MEDIA_TYPES
from web.openai.batches import BatchPage
from web.openai.files import FileDeletion, FilePage
from web.openai.transcript_formats import Transcription, VerboseTranscription
from web.realtime.recorded_sessions import SessionRecord
from web.realtime.transport.client_secrets import Secret, SecretBody
from web.realtime.transport.routes import SessionEnded, SessionList
from web.realtime.transport.session_routes import KeptSessionList
from web.realtime.webrtc.routes import FORM, SDP
from web.schema.audio import SpeechBody, TranscriptionForm
from web.schema.batches import BatchBody, FileForm
from web.schema.chat import ChatBody
from web.schema.completion import Completion, CompletionBody
from web.schema.decision_body import DecisionBody
from web.schema.decision_object import DecisionObject
from web.schema.response_body import TextResponseBody
from web.schema.response_object import ItemList, ResponseDeleted, ResponseObject
from web.schema.responses import ChatCompletion, Model, ModelList, SpeechModelList, VoiceList

EVENTS, JSON, TEXT = "text/event-stream", "application/json", "text/plain"
ZIP = "application/zip"


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the table: one method of one route.

    `body` is the JSON request body, `form` the text fields of a multipart body that also has a
    `file`, `raw` the media types of another body. `answer` is the JSON response, `others` are
    alternatives to it, `media` other media types of the response. `headers` and `query` are the
    request's parameters with their descriptions. `statuses` are the statuses of successful
    responses.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | type[msgspec.Struct] | None = None
    form: type[BaseModel] | None = None
    raw: Sequence[str] = ()
    answer: type[msgspec.Struct] | None = None
    others: Sequence[type[msgspec.Struct]] = ()
    media: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    statuses: Sequence[int] = (200,)


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation in text and speech, streamed or whole",
        body=ChatBody,
        answer=ChatCompletion,
        media=(EVENTS,),
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Answer a message or a stored conversation in text, streamed or whole",
        body=TextResponseBody,
        answer=ResponseObject,
        media=(EVENTS,),
    ),
    Operation("GET", "/v1/responses/{response_id}", "A stored response", answer=ResponseObject),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        "Delete a stored response",
        answer=ResponseDeleted,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "The input of a stored response",
        answer=ItemList,
        query={
            "limit": "items, from 1 to 100",
            "order": "desc (the newest first) or asc",
            "after": "id of the last item of the previous page",
        },
    ),
    Operation("POST", "/v1/responses/{response_id}/cancel", "Not served: always 400", statuses=()),
    Operation(
        "POST",
        "/v1/decisions",
        "Answer questions about one input with probabilities",
        body=DecisionBody,
        answer=DecisionObject,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue up to four texts, without a chat template, streamed or whole",
        body=CompletionBody,
        answer=Completion,
        media=(EVENTS,),
    ),
    Operation(
        "POST",
        "/v1/audio/speech",
        "Convert text to speech, streamed",
        body=SpeechBody,
        media=(*MEDIA_TYPES.values(), EVENTS),
    ),
    Operation(
        "POST",
        "/v1/audio/transcriptions",
        "Transcribe speech",
        form=TranscriptionForm,
        answer=Transcription,
        others=(VerboseTranscription,),
        media=(TEXT, EVENTS),
    ),
    Operation("POST", "/v1/audio/translations", "Not served: always 400", statuses=()),
    Operation("GET", "/v1/realtime", "A WebSocket; over plain HTTP always 426", statuses=()),
    Operation(
        "GET", "/v1/audio/speech/stream", "A WebSocket; over plain HTTP always 426", statuses=()
    ),
    Operation("GET", "/v1/audio/voices", "The voices, the default one first", answer=VoiceList),
    Operation("GET", "/v1/audio/models", "The model, if it speaks", answer=SpeechModelList),
    Operation("GET", "/v1/models", "The one model that is served", answer=ModelList),
    Operation("GET", "/v1/models/{model}", "That model, and what it can do", answer=Model),
    Operation("POST", "/v1/files", "Store a file for a batch", form=FileForm, answer=FileObject),
    Operation(
        "GET",
        "/v1/files",
        "Stored files",
        answer=FilePage,
        query={
            "after": "id of the last file of the previous page",
            "limit": "files",
            "order": "asc or desc (the default), by time",
            "purpose": "batch or batch_output",
        },
    ),
    Operation("GET", "/v1/files/{file_id}", "One file", answer=FileObject),
    Operation("GET", "/v1/files/{file_id}/content", "What a file holds", media=(JSONL,)),
    Operation("DELETE", "/v1/files/{file_id}", "Delete a file", answer=FileDeletion),
    Operation(
        "POST",
        "/v1/batches",
        "Answer all requests of a file in the background",
        body=BatchBody,
        answer=Batch,
    ),
    Operation(
        "GET",
        "/v1/batches",
        "Batches, newest first",
        answer=BatchPage,
        query={"after": "id of the last batch of the previous page", "limit": "batches"},
    ),
    Operation("GET", "/v1/batches/{batch_id}", "One batch", answer=Batch),
    Operation("POST", "/v1/batches/{batch_id}/cancel", "End a batch early", answer=Batch),
    Operation(
        "POST",
        "/v1/realtime/client_secrets",
        "A short-lived key for one voice session of a browser",
        body=SecretBody,
        answer=Secret,
    ),
    Operation(
        "POST",
        "/v1/realtime/calls",
        "Open a voice session over WebRTC: an offer, or a form with sdp and session",
        raw=(SDP, FORM),
        media=(SDP,),
        query={
            "model": "a name under which this server answers",
            "session": "resume this session",
            "response": "of which the client has received",
            "samples": "so much audio",
            "chars": "and so much text",
            "fleet": "1: extensions are sent",
        },
        statuses=(201,),
    ),
    Operation(
        "POST", "/v1/realtime/calls/{call_id}/hangup", "End a call and its session", media=(TEXT,)
    ),
    Operation(
        "GET",
        "/v1/fleet/requests",
        "Requests, newest first",
        answer=RequestList,
        query={
            "state": "in this state",
            "stage": "with a task of this stage",
            "worker": "that this worker had",
            "kind": "of this kind",
            "model": "to this model",
            "min_ms": "minimum duration in ms",
            "session": "of this conversation, as a request's `session` names it",
            "from": "live at this time or later, such as 2026-11-30T18:13:00Z",
            "to": "live at this time or earlier",
            "q": "a part of the id",
            "limit": "rows",
            "before": "`next` of the previous page",
        },
    ),
    Operation("GET", "/v1/fleet/requests/{request_id}", "A request's trace", answer=RequestDetail),
    Operation("DELETE", "/v1/fleet/requests/{request_id}", "Abort a request", answer=AbortResult),
    Operation(
        "GET",
        "/v1/fleet/requests/{request_id}/stream",
        "Resume a streamed answer; refused if web.read_only is set",
        media=(EVENTS,),
        headers={"Last-Event-ID": "id of the last received event"},
    ),
    Operation(
        "GET",
        "/v1/fleet/requests/{request_id}/audio",
        "The answer's audio, while it is stored",
        media=(MEDIA_TYPES["wav"],),
    ),
    Operation(
        "GET",
        "/v1/fleet/requests/{request_id}/trace",
        "The trace as Perfetto reads it",
        media=(JSON,),
    ),
    Operation(
        "GET",
        "/v1/fleet/requests/{request_id}/bundle",
        "What is stored about a request, as a ZIP file without keys and names of people",
        media=(ZIP,),
    ),
    Operation(
        "POST",
        "/v1/fleet/requests/{request_id}/retry",
        "Submit the same request again",
        answer=RetryResult,
        statuses=(201,),
    ),
    Operation(
        "GET",
        "/v1/fleet/kept",
        "Answers that are kept for days, newest first",
        answer=KeptList,
        query={
            "why": "kept for this reason",
            "limit": "rows",
            "before": "`next` of the previous page",
        },
    ),
    Operation("POST", "/v1/fleet/requests/{request_id}/pin", "Keep an answer", answer=PinResult),
    Operation(
        "DELETE",
        "/v1/fleet/requests/{request_id}/pin",
        "Keep an answer no longer than others",
        answer=PinResult,
    ),
    Operation(
        "POST",
        "/v1/fleet/requests/{request_id}/tasks/{stage}/redeliver",
        "Take a stage's task back from its worker, to be granted again",
        answer=RedeliveryResult,
        query={"epoch": "refuse if the task has another epoch by now"},
    ),
    Operation(
        "GET",
        "/v1/fleet/workers",
        "Workers, recently ended workers, and roles without a worker",
        answer=WorkerList,
    ),
    Operation(
        "POST",
        "/v1/fleet/workers/{worker_id}/{order}",
        "Order a worker: drain, resume, stop or dump",
        answer=WorkerOrderResult,
    ),
    Operation(
        "PUT",
        "/v1/fleet/roles/{role}",
        "Order how many workers a role has",
        body=RoleOrderBody,
        answer=RoleOrderResult,
    ),
    Operation(
        "GET",
        "/v1/fleet/drafters",
        "Drafters of the stages, and how many drafts were accepted",
        answer=DraftsList,
    ),
    Operation(
        "POST",
        "/v1/fleet/drafters/{stage}/{drafter}",
        "Choose a drafter: off, ngram, suffix, eagle3, auto or configured",
        answer=DrafterResult,
    ),
    Operation(
        "GET",
        "/v1/fleet/training",
        "The trainer, captures, and versions of the draft head",
        answer=TrainingState,
    ),
    Operation(
        "POST",
        "/v1/fleet/training/forget",
        "Let the trainer forget all samples that it holds",
        answer=ForgottenResult,
    ),
    Operation(
        "POST",
        "/v1/fleet/draft-versions/{number}/promote",
        "Draft with a version of the draft head; 0: that of the start",
        answer=VersionResult,
    ),
    Operation(
        "POST",
        "/v1/fleet/draft-versions/rollback",
        "Return to the version before the present one",
        answer=VersionResult,
    ),
    Operation("GET", "/v1/fleet/queues", "Queue and workers of each role", answer=QueueList),
    Operation(
        "GET", "/v1/fleet/dead-letters", "Requests that killed workers", answer=DeadLetterList
    ),
    Operation(
        "POST",
        "/v1/fleet/dead-letters/{request_id}/retry",
        "Submit its request again",
        answer=RetryResult,
        statuses=(201,),
    ),
    Operation(
        "DELETE",
        "/v1/fleet/dead-letters/{request_id}",
        "Delete a dead letter",
        answer=DeletionResult,
    ),
    Operation("GET", "/v1/fleet/transfers", "Tensors between workers, by edge", answer=Transfers),
    Operation(
        "GET",
        "/v1/fleet/routes",
        "Routes of divided models, their processes, and span workers in none",
        answer=SpanRoutes,
    ),
    Operation("GET", "/v1/fleet/series", "Time series of the last hour", answer=SeriesList),
    Operation(
        "GET",
        "/v1/fleet/journal",
        "What happened to processes, roles and answers, newest first",
        answer=JournalList,
        query={
            "since": "from this time, in microseconds since 1970",
            "until": "until this time, in microseconds since 1970",
            "what": "entries of this kind",
            "limit": "entries",
        },
    ),
    Operation(
        "GET",
        "/v1/fleet/logs",
        "Log lines of all processes, newest first",
        answer=LogList,
        query={
            "q": "a part of the message",
            "level": "this level and above",
            "worker": "of this worker",
            "request": "about this request",
            "process": "of this process",
            "limit": "lines",
            "before": "`next` of the previous page",
        },
    ),
    Operation("GET", "/v1/fleet/jobs", "Background jobs", answer=JobList),
    Operation("POST", "/v1/fleet/jobs", "Start a job", body=JobBody, answer=Job, statuses=(201,)),
    Operation("GET", "/v1/fleet/jobs/{job_id}", "One job", answer=Job),
    Operation("DELETE", "/v1/fleet/jobs/{job_id}", "Delete a finished job", answer=DeletionResult),
    Operation(
        "GET",
        "/v1/fleet/jobs/{job_id}/files/{name}",
        "A file of a job's report: report.json or report.png",
        media=(JSON, "image/png"),
    ),
    Operation(
        "POST", "/v1/fleet/jobs/{job_id}/retry", "Run a job again", answer=Job, statuses=(201,)
    ),
    Operation("POST", "/v1/fleet/jobs/{job_id}/stop", "Stop a running job", answer=Job),
    Operation(
        "GET", "/v1/fleet/sessions", "Live voice sessions of every gateway", answer=SessionList
    ),
    Operation(
        "DELETE", "/v1/fleet/sessions/{session_id}", "End a voice session", answer=SessionEnded
    ),
    Operation(
        "GET",
        "/v1/fleet/sessions/{session_id}",
        "A voice session with its turns, live or kept",
        answer=SessionRecord,
    ),
    Operation(
        "GET",
        "/v1/fleet/sessions/{session_id}/turns/{number}/speech",
        "What the caller said in a turn of a live session",
        media=("audio/wav",),
    ),
    Operation(
        "GET",
        "/v1/fleet/kept/sessions",
        "Voice sessions that are kept for days, the latest begun first",
        answer=KeptSessionList,
        query={
            "state": "`ended`, or `unknown` if the end was not recorded",
            "why": "with this trouble",
            "key": "of this API key",
            "q": "a part of the id",
            "from": "live from this time",
            "to": "live until this time",
            "limit": "rows",
            "before": "`next` of the previous page",
        },
    ),
    Operation("GET", "/health", "This process is up", answer=Health),
    Operation("GET", "/ready", "Every role has a worker", answer=Readiness, statuses=(200, 503)),
    Operation(
        "GET",
        "/metrics",
        "Metrics, as Prometheus reads them; with an API key where one is set, unless "
        "web.open_metrics is",
        media=(TEXT,),
    ),
    Operation("GET", "/openapi.json", "This document", media=(JSON,)),
)
