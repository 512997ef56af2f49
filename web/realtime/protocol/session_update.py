"""Application of a `session.update`: every valid and served field is applied, and every other field
refused.

A refused audio format leaves the session without a format, since audio of one format must never be
read, or played, as another. Knows no socket.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from pydantic import ValidationError

from fleet.core.errors import BadInput, UnsupportedValue
from web.gateway.gateway import Gateway
from web.realtime.audio.formats import PcmFormat
from web.realtime.protocol.capabilities import drop_unserved, takes_text_only
from web.realtime.protocol.client_events import DETECTION_KINDS, bad_field
from web.realtime.protocol.settings import (
    SAME_IN_BETA,
    SessionPatch,
    Settings,
    merge_settings,
)
from web.realtime.protocol.transcription_session import (
    TRANSCRIPTION,
    only_transcribing,
    refusals,
)
from web.schema.fields.realtime import SESSION

Side = Literal["input", "output"]
Fields = Mapping[str, object]
DETECTION = ("audio", "input", "turn_detection")
OBJECTS = frozenset(
    {
        (),
        ("audio",),
        ("audio", "input"),
        ("audio", "output"),
        ("audio", "input", "transcription"),
        DETECTION,
    }
)
"""Paths of the objects whose fields are refused singly. A mistake in a field of any other object
refuses the whole object.
"""


def apply_update(
    gateway: Gateway, settings: Settings, fields: Fields, *, has_begun: bool
) -> tuple[Settings, list[BadInput]]:
    """Apply `fields` of a `session.update` to `settings`. Returns the changed settings, and a
    refusal for each field that was not applied. `has_begun`: the conversation is not empty, so the
    type is fixed.
    """
    without_effect = list(SESSION.refusals(fields, "session"))
    patch, invalid = read_patch(fields)
    changed, unserved = apply_patch(gateway, settings, patch, is_fixed=has_begun)
    refused = [*without_effect, *invalid, *unserved]
    for side in ("input", "output"):
        if _format_refused(side, changed, patch, refused):
            changed = _without_format(changed, side)
    return changed, refused


def apply_patch(
    gateway: Gateway, settings: Settings, patch: SessionPatch, *, is_fixed: bool = False
) -> tuple[Settings, list[BadInput]]:
    """Apply a valid patch to `settings`. Returns the changed settings, and a refusal for each field
    that is not served. `is_fixed`: the session's type cannot change any more.
    """
    refused: list[BadInput] = []
    if (wrong := _wrong_type(gateway, settings, patch, is_fixed)) is not None:
        refused.append(wrong)
        patch = patch.model_copy(update={"type": settings.type})
    changed, unserved = merge_settings(settings, patch)
    if (patch.type or settings.type) == TRANSCRIPTION:
        refused += refusals(patch)
        changed = only_transcribing(settings, changed.audio.input)
    changed, unsupported = drop_unserved(gateway, settings, changed, patch)
    return changed, [*refused, *unserved, *unsupported]


def served_settings(gateway: Gateway, settings: Settings, patch: SessionPatch) -> Settings:
    """Return `settings` of a new session with a patch applied. Raises: BadInput for the first field
    that is not served.
    """
    changed, unserved = apply_patch(gateway, settings, patch)
    for refused in unserved:
        raise refused
    return changed


def _wrong_type(
    gateway: Gateway, settings: Settings, patch: SessionPatch, is_fixed: bool
) -> UnsupportedValue | None:
    where = "session.type"
    if patch.type in (None, settings.type):
        return None
    if patch.type == TRANSCRIPTION and not gateway.hears:
        return takes_text_only(where)
    if is_fixed or settings.type == TRANSCRIPTION:
        message = f"this session is of type {settings.type}; open another one"
        return UnsupportedValue(f"{where}: {message}", param=where)
    return None


def read_patch(fields: Fields) -> tuple[SessionPatch, list[BadInput]]:
    """Validate `fields` of a `session.update`. Returns the valid fields as a patch, and a refusal
    for each invalid field.
    """
    refused: list[BadInput] = []
    while True:
        try:
            return SessionPatch.model_validate(fields), refused
        except ValidationError as error:
            wrong = bad_field(error, "session", within="session")
            path = _invalid_path(error.errors(include_url=False, include_input=False)[0]["loc"])
            if not path:
                raise wrong from error
            refused.append(wrong)
            fields = _without(fields, path)


def _invalid_path(loc: Sequence[int | str]) -> tuple[str, ...]:
    """Return the path of the field to remove for a validation error at the location `loc`: the
    innermost field that can be refused alone. Locations also contain union branches and list items.
    """
    path: tuple[str, ...] = ()
    for piece in loc:
        if path not in OBJECTS:
            break
        # A location names the type of turn detection before its field.
        if isinstance(piece, str) and not (path == DETECTION and piece in DETECTION_KINDS):
            path = (*path, piece)
    return path


def _without(fields: Fields, path: Sequence[str]) -> Fields:
    name, *rest = path
    inner = fields[name]
    if rest and isinstance(inner, Mapping):
        return {**fields, name: _without(inner, rest)}  # pyright: ignore[reportUnknownArgumentType]
    return {other: value for other, value in fields.items() if other != name}


def _format_refused(
    side: Side, changed: Settings, patch: SessionPatch, refused: list[BadInput]
) -> bool:
    where, beta = f"session.audio.{side}.format", f"{side}_audio_format"
    if any(error.param is not None and error.param.startswith(where) for error in refused):
        return True
    value = getattr(patch, beta)
    return value is not None and (
        value != SAME_IN_BETA or getattr(changed.audio, side).format != PcmFormat()
    )


def _without_format(settings: Settings, side: Side) -> Settings:
    changed = msgspec.structs.replace(getattr(settings.audio, side), format=None)
    return msgspec.structs.replace(
        settings, audio=msgspec.structs.replace(settings.audio, **{side: changed})
    )
