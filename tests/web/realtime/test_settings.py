"""Merging of a `session.update` into the session's settings."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import BadInput
from web.realtime.audio.turn_end import WAITS, Eagerness
from web.realtime.protocol.client_events import SessionUpdate, parse_event
from web.realtime.protocol.session_update import read_patch
from web.realtime.protocol.settings import (
    SemanticVad,
    ServerVad,
    Settings,
    TranscriptionSettings,
    merge_settings,
)

ON, OFF = 200, 60_000


def updated(settings: Settings, **session: Any) -> Settings:
    """Return `settings` after an update of the session. Raises: BadInput for the first field that
    is refused.
    """
    event = parse_event(
        json.dumps({"type": "session.update", "session": {"type": "realtime", **session}})
    )
    assert isinstance(event, SessionUpdate)
    patch, invalid = read_patch(event.session)
    changed, unserved = merge_settings(settings, patch)
    for refused in (*invalid, *unserved):
        raise refused
    return changed


def with_input(settings: Settings, **input_: Any) -> Settings:
    return updated(settings, audio={"input": input_})


def test_absent_field_is_unchanged_and_null_is_off() -> None:
    first = with_input(
        Settings(),
        turn_detection={"type": "server_vad", "threshold": 0.7},
        transcription={"model": "whisper-1"},
    )
    second = with_input(first, turn_detection={"type": "server_vad", "silence_duration_ms": 300})
    assert second.detection == ServerVad(threshold=0.7, silence_duration_ms=300)
    assert second.audio.input.transcription == first.audio.input.transcription
    third = with_input(second, turn_detection=None, transcription=None)
    assert (
        third.detection is None
        and third.audio.input.transcription is None
        and third.rules(ON, OFF) is None
    )
    assert updated(third, instructions="Be brief.").detection is None


@pytest.mark.parametrize("eagerness", sorted(WAITS))
def test_semantic_detection_sets_the_length_of_silence(eagerness: Eagerness) -> None:
    settings = with_input(
        Settings(), turn_detection={"type": "semantic_vad", "eagerness": eagerness}
    )
    assert isinstance(settings.detection, SemanticVad)
    rules = settings.rules(ON, OFF)
    assert rules is not None and rules.silence_ms == WAITS[eagerness].unknown_ms
    assert rules.waits == WAITS[eagerness] and rules.speculate_ms == ON
    early = settings.rules(ON, OFF, recognizes=True)
    assert early is not None and early.speculate_ms < WAITS["high"].complete_ms


def test_fields_without_effect_leave_the_settings_as_they_are() -> None:
    assert updated(Settings(), tools=[], tracing=None, something_new={"a": 1}) == Settings()


def test_audio_and_text_together_mean_audio() -> None:
    assert updated(Settings(), output_modalities=["text", "audio"]).output_modalities == ("audio",)
    assert updated(Settings(), output_modalities=["text", "text"]).output_modalities == ("text",)
    assert updated(
        Settings(output_modalities=("text",)), output_modalities=None
    ).output_modalities == ("audio",)


def test_parts_of_a_transcription_change_alone() -> None:
    first = with_input(Settings(), transcription={"model": "whisper-1", "language": "de"})
    second = with_input(first, transcription={"language": "en"})
    assert second.audio.input.transcription == TranscriptionSettings(
        model="whisper-1", language="en"
    )


def test_choices_without_effect_are_stored() -> None:
    kept = updated(
        Settings(),
        tool_choice="none",
        truncation="disabled",
        prompt=None,
        include=None,
        tracing="auto",
    )
    assert (kept.tool_choice, kept.truncation, kept.tracing) == ("none", "disabled", None)
    assert updated(kept, tool_choice=None, truncation=None) == Settings()


def test_nulls_are_explicit() -> None:
    encoded = json.loads(msgspec.json.encode(with_input(Settings(), turn_detection=None)))
    assert (
        encoded["audio"]["input"]["turn_detection"] is None
        and encoded["prompt"] is None
        and encoded["tracing"] is None
    )
    assert (
        encoded["audio"]["input"]["noise_reduction"] is None
        and encoded["max_output_tokens"] == "inf"
    )


@given(
    st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)
def test_numbers_are_applied_or_named(silence_ms: int, threshold: float, create: bool) -> None:
    detection = {
        "type": "server_vad",
        "silence_duration_ms": silence_ms,
        "threshold": threshold,
        "create_response": create,
    }
    try:
        now = with_input(Settings(), turn_detection=detection).detection
    except BadInput as error:
        assert error.param is not None and "turn_detection" in error.param
        return
    assert now == ServerVad(
        silence_duration_ms=silence_ms, threshold=threshold, create_response=create
    )
