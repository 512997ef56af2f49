"""Strict check of server events against the types of the `openai` package; unknown fields are
errors.
"""

from copy import deepcopy
from typing import Any, cast, get_args

from openai import BaseModel
from openai.types.realtime import RealtimeServerEvent
from pydantic import ValidationError

EXTENSION_PREFIX = "fleet."
"""Prefix of Fleet's extension events, which the server sends only on request."""
UNTYPED_FIELDS = frozenset(
    {
        # what went wrong, in words: the type has only a code
        "response.status_details.error.message",
        # sent by OpenAI's service too; the types are those of what a client sends
        "session.id",
        "session.object",
        "session.expires_at",
        # false: what is said is not kept; sent only to clients that ask for it
        "session.store",
        # about fields that were ignored
        "session.warnings",
        "response.warnings",
    }
)


def _types() -> dict[str, type[BaseModel]]:
    union, *_ = get_args(RealtimeServerEvent)
    return {get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(union)}


TYPES = _types()


def check_event(event: dict[str, Any]) -> None:
    """Check a server event against the type of the `openai` package with the same `type`. Events
    that begin with `fleet.` are not checked.

    Raises: AssertionError naming the field that OpenAI's type rejects or does not have.
    """
    kind = str(event["type"])
    if kind.startswith(EXTENSION_PREFIX):
        return
    assert kind in TYPES, f"{kind}: OpenAI has no such event"
    try:
        read = TYPES[kind].model_validate(_at_openais_rate(event))
    except ValidationError as error:
        raise AssertionError(f"{kind}: {error}") from error
    extras = set(_extras(read)) - UNTYPED_FIELDS
    assert not extras, f"{kind}: OpenAI's type has no {sorted(extras)}"


def _at_openais_rate(event: dict[str, Any]) -> dict[str, Any]:
    """Set the input rate of an event to 24 kHz, the only one in OpenAI's types; other rates are an
    extension.
    """
    if "session" not in event:
        return event
    changed = deepcopy(event)
    form = changed["session"]["audio"]["input"]["format"]
    if form is not None and form["type"] == "audio/pcm":
        form["rate"] = 24_000
    return changed


def _extras(value: object, at: str = "") -> list[str]:
    if isinstance(value, list):
        return [extra for inner in cast("list[object]", value) for extra in _extras(inner, at)]
    if not isinstance(value, BaseModel):
        return []
    found = [f"{at}{name}" for name in value.model_extra or {}]
    for name in type(value).model_fields:
        found += _extras(getattr(value, name), f"{at}{name}.")
    return found
