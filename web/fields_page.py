"""Generator of the page about all request fields: `python -m web.fields_page fleet/docs/fields.md`
writes the page. Knows no gateway.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from web.openapi.operations import OPERATIONS
from web.openapi.query_fields import IGNORED, PREFIX
from web.schema.fields.audio import SPEECH, SPEECH_EVENTS, TRANSCRIPTION
from web.schema.fields.batches import BATCH, FILE
from web.schema.fields.chat import CHAT
from web.schema.fields.completion import COMPLETION
from web.schema.fields.decision import DECISION
from web.schema.fields.fleet import JOB, ROLE
from web.schema.fields.realtime import CALL, EVENTS, QUERY, SECRET, SESSION, WEBRTC
from web.schema.fields.response import RESPONSE
from web.schema.fields.table import Field, FieldTable

HEAD = """# Fields

Generated from `web/schema/fields` by `python -m web.fields_page fleet/docs/fields.md`; a test
compares the two, and the tables with the types of the `openai` package.

* **served**: the field has its effect.
* **refused**: 400 (an `error` event over WebSockets) whose `param` names the field; it
  constrains, forces, ends or conditions an answer. null, and the neutral values listed, are
  accepted; without a list these are false and every empty value.
* **ignored**: the field cannot change the answer. The response header `x-fleet-ignored` lists
  the ignored fields of a request; where a client may count on a field, the answer has an entry in
  `warnings`, and the log a line.

Any other field is refused unless its value is null, false, empty, or made of these alone. `[]`
stands for an index. A row about an object that is refused or ignored counts for all fields within
it.
"""
TABLES: Sequence[FieldTable] = (
    CHAT,
    RESPONSE,
    DECISION,
    COMPLETION,
    SPEECH,
    *SPEECH_EVENTS.values(),
    TRANSCRIPTION,
    SESSION,
    *EVENTS.values(),
    QUERY,
    CALL,
    SECRET,
    WEBRTC,
    FILE,
    BATCH,
    JOB,
    ROLE,
)


def page() -> str:
    return "\n".join([HEAD, *(line for table in TABLES for line in _section(table)), *_queries()])


def _section(table: FieldTable) -> Iterator[str]:
    yield f"## {table.title}"
    yield ""
    yield "| field | | reason |"
    yield "|---|---|---|"
    groups: dict[tuple[str, str], list[str]] = {}
    for row in table.rows:
        groups.setdefault((row.verdict, _reason(row)), []).append(row.path)
    for (verdict, reason), paths in groups.items():
        yield f"| {', '.join(f'`{path}`' for path in paths)} | {verdict} | {reason} |"
    yield ""


def _queries() -> Iterator[str]:
    yield "## Query parameters"
    yield ""
    yield "Any other parameter of a route under `/v1` is refused, unless it is empty."
    yield ""
    yield "| route | parameters | |"
    yield "|---|---|---|"
    for op in OPERATIONS:
        if op.query and op.path.startswith(PREFIX):
            yield (
                f"| `{op.method} {op.path}` | {', '.join(f'`{name}`' for name in op.query)} | "
                "served |"
            )
    for name, reason in IGNORED.items():
        yield f"| every one | `{name}` | ignored: {reason} |"
    yield ""


def _reason(row: Field) -> str:
    reason = row.reason.replace("|", "\\|")
    if row.verdict != "refused" or row.checked_by_value or row.accepted is None:
        return reason
    shown = ", ".join(f"`{json.dumps(value)}`" for value in row.accepted)
    return f"{reason} (neutral: {shown})" if shown else f"{reason} (neutral: only null)"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
