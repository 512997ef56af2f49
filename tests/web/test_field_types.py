"""The field tables are complete: every field of the `openai` package's types and of the request
bodies has a row, and the documentation page shows every row.

`python -m web.fields_page fleet/docs/fields.md` writes the page.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from openai.types import BatchCreateParams, FileCreateParams
from openai.types.audio.speech_create_params import SpeechCreateParams
from openai.types.audio.transcription_create_params import TranscriptionCreateParams
from openai.types.chat.completion_create_params import (
    CompletionCreateParams as ChatCompletionParams,
)
from openai.types.completion_create_params import CompletionCreateParams
from openai.types.decision_create_params import DecisionCreateParams
from openai.types.realtime.call_create_params import CallCreateParams
from openai.types.realtime.client_secret_create_params import ClientSecretCreateParams
from openai.types.realtime.realtime_client_event_param import RealtimeClientEventParam
from openai.types.realtime.realtime_connect_params import RealtimeConnectParams
from openai.types.responses.response_create_params import ResponseCreateParams
from pydantic import BaseModel

from tests.support import REPO
from web.fields_page import TABLES, page
from web.realtime.protocol.client_events import AnyClientEvent
from web.realtime.protocol.settings import BETA, SessionPatch
from web.realtime.transport.client_secrets import SecretBody
from web.schema.audio import SpeechBody, TranscriptionForm
from web.schema.batches import BatchBody, FileForm
from web.schema.chat import ChatBody
from web.schema.completion import CompletionBody
from web.schema.decision_body import DecisionBody
from web.schema.fields.audio import SPEECH, SPEECH_EVENTS, TRANSCRIPTION
from web.schema.fields.batches import BATCH, FILE
from web.schema.fields.chat import CHAT
from web.schema.fields.completion import COMPLETION
from web.schema.fields.decision import DECISION
from web.schema.fields.realtime import EVENTS, QUERY, SECRET, SESSION, WEBRTC
from web.schema.fields.response import RESPONSE
from web.schema.fields.table import Field, FieldTable, served
from web.schema.response_body import TextResponseBody
from web.speech_stream import client_events

LISTS = (list, tuple, Iterable, Sequence)


def fields_of(kind: Any, path: str = "", within: tuple[object, ...] = ()) -> Iterator[str]:
    """Yield the path of each field of a type, through objects, lists, unions and mappings of any
    depth.
    """
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    if is_model or hasattr(kind, "__required_keys__"):
        if kind in within:
            return
        for name, inner in get_type_hints(kind, include_extras=True).items():
            if is_model and name not in kind.model_fields:
                continue
            name = (kind.model_fields[name].alias or name) if is_model else name
            full = f"{path}.{name}" if path else name
            yield full
            yield from fields_of(inner, full, (*within, kind))
        return
    origin, inner_kinds = get_origin(kind), get_args(kind)
    if origin is Literal:
        return
    if origin in LISTS or "Sequence" in getattr(origin, "__name__", ""):
        path += "[]"
    elif origin in (dict, Mapping):
        path, inner_kinds = f"{path}.*", inner_kinds[1:]
    for inner in inner_kinds:
        yield from fields_of(inner, path, within)


def missing(table: FieldTable, kind: Any) -> list[str]:
    """Return the fields of a type without a row in `table`: neither a row of their own nor a row of
    an unserved object around them.
    """
    return sorted({path for path in fields_of(kind) if table.row_of(path) is None})


def event_type(event: Any) -> str:
    hint = get_type_hints(event, include_extras=True)["type"]
    while get_origin(hint) is not Literal:
        hint = get_args(hint)[0]
    return get_args(hint)[0]


OPENAI = {event_type(event): event for event in get_args(RealtimeClientEventParam)}
BODIES: list[tuple[FieldTable, Any]] = [
    (CHAT, ChatCompletionParams),
    (COMPLETION, CompletionCreateParams),
    (RESPONSE, ResponseCreateParams),
    (DECISION, DecisionCreateParams),
    (SPEECH, SpeechCreateParams),
    (TRANSCRIPTION, TranscriptionCreateParams),
    (SECRET, ClientSecretCreateParams),
    (QUERY, RealtimeConnectParams),
    (FILE, FileCreateParams),
    (BATCH, BatchCreateParams),
    *((EVENTS[kind], event) for kind, event in OPENAI.items() if kind != "session.update"),
]


@pytest.mark.parametrize(("table", "kind"), BODIES, ids=[table.title for table, _ in BODIES])
def test_every_field_of_openais_types_has_a_row(table: FieldTable, kind: Any) -> None:
    assert set(fields_of(kind)) and missing(table, kind) == []


def test_every_setting_of_openais_sessions_has_a_row() -> None:
    paths = set(fields_of(OPENAI["session.update"]))
    settings = {path for path in paths if path.startswith("session.")}
    assert (
        len(settings) > 80
        and sorted(path for path in settings if SESSION.row_of(path) is None) == []
    )
    assert (
        paths - settings
        == {"type", "event_id", "session"}
        == {row.path for row in EVENTS["session.update"].rows}
    )


def test_every_setting_of_openais_calls_has_a_row() -> None:
    paths = set(fields_of(CallCreateParams))
    settings = {path for path in paths if path.startswith("session.")}
    assert paths - settings == {row.path for row in WEBRTC.rows} == {"sdp", "session"}
    assert settings and sorted(path for path in settings if SESSION.row_of(path) is None) == []


def test_every_event_of_openais_clients_has_a_table() -> None:
    assert OPENAI.keys() == EVENTS.keys() - {"fleet.played"}


def test_walk_reaches_nested_fields() -> None:
    paths = set(fields_of(ChatCompletionParams))
    assert {
        "messages[].content[].input_audio.data",
        "tools[].custom.format.grammar.syntax",
        "stop",
        "audio.voice.id",
    } <= paths


@pytest.mark.parametrize(
    "path", ["web_search_options", "messages[].content[].input_audio.format", "stream_options"]
)
def test_missing_row_is_detected(path: str) -> None:
    shorter = FieldTable("shorter", [row for row in CHAT.rows if row.path != path])
    assert path in missing(shorter, ChatCompletionParams)


SERVED: list[tuple[FieldTable, type[BaseModel], str]] = [
    (CHAT, ChatBody, ""),
    (COMPLETION, CompletionBody, ""),
    (RESPONSE, TextResponseBody, ""),
    (DECISION, DecisionBody, ""),
    (SPEECH, SpeechBody, ""),
    *((SPEECH_EVENTS[kind], event, "") for kind, event in client_events.EVENTS.items()),
    (TRANSCRIPTION, TranscriptionForm, ""),
    (SECRET, SecretBody, ""),
    (FILE, FileForm, ""),
    (BATCH, BatchBody, ""),
    (SESSION, SessionPatch, "session"),
    *((EVENTS[event_type(event)], event, "") for event in get_args(AnyClientEvent)),
]
READ_ELSEWHERE = {"file", "languages"}
"""Form fields that the form's model does not have: the upload, and another name of the language."""


@pytest.mark.parametrize(
    ("table", "kind", "prefix"), SERVED, ids=[table.title for table, *_ in SERVED]
)
def test_served_rows_are_the_fields_that_a_route_reads(
    table: FieldTable, kind: type[BaseModel], prefix: str
) -> None:
    read = {path for path in fields_of(kind, prefix) if not path.startswith("fleet.")}
    rows: dict[str, Field] = {row.path: row for row in table.rows if row.path not in READ_ELSEWHERE}
    assert {path for path, row in rows.items() if row.verdict == "served"} <= read
    assert sorted(path for path in read if path not in rows) == []
    unread = sorted(
        path for path in read if rows[path].verdict == "refused" and not rows[path].checked_by_value
    )
    assert unread == [], "a refused field needs no code that reads it"
    assert prefix == "" or {f"session.{name}" for name in BETA} <= rows.keys()


def test_every_unserved_row_has_a_reason() -> None:
    assert [
        row.path
        for table in TABLES
        for row in table.rows
        if row.verdict != "served" and not row.reason
    ] == []


def test_two_rows_of_one_path_are_refused() -> None:
    with pytest.raises(ValueError, match="'model'"):
        FieldTable("double", served("model input"), served("model"))


def test_page_has_every_row() -> None:
    written = (REPO / "fleet/docs/fields.md").read_text()
    assert written == page(), "run: python -m web.fields_page fleet/docs/fields.md"
    assert all(f"`{row.path}`" in written for table in TABLES for row in table.rows)
