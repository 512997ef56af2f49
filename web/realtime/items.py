"""Conversation items that the client sends: their checks and their conversion. Knows no
response.
"""

from copy import copy

import msgspec
import numpy as np
import soxr

from fleet.core.errors import BadInput, InputTooLarge, UnsupportedValue
from fleet.processing import TextPart
from fleet.processing.voice_activity import RATE_HZ
from web.gateway.gateway import Gateway
from web.realtime.conversation import ROOT, Clip, Conversation, Item, Part
from web.realtime.protocol import server_events as say
from web.realtime.protocol.capabilities import takes_text_only
from web.realtime.protocol.client_events import ItemPatch, PartPatch, decode_audio
from web.realtime.protocol.settings import INPUT_FORMAT, SERVED_FORMAT, Settings
from web.schema.fields.chat import NO_TOOLS

MIN_CLIP_MS = 100
"""Least length of a clip, as in OpenAI's service: shorter audio contains no word."""


class BufferEmpty(BadInput):
    code = "input_audio_buffer_commit_empty"


def check_length(retained_ms: int, gateway: Gateway, settings: Settings) -> None:
    """Check that `retained_ms` of buffered audio are enough for an item. Raises: BufferEmpty, whose
    message also tells why audio is not read at all, if that is the cause.
    """
    if retained_ms >= MIN_CLIP_MS:
        return
    unread = ""
    if not gateway.hears:
        unread = " (this model takes text only)"
    elif settings.audio.input.format is None:
        unread = f" ({INPUT_FORMAT} is refused, so audio is not read)"
    least = f"at least {MIN_CLIP_MS} ms are needed"
    raise BufferEmpty(f"the input buffer holds {retained_ms} ms of audio; {least}{unread}")


class ItemReader:
    """Converts items that the client sends into items of the conversation. Audio is read in the
    session's input format, and one clip is at most `limits.max_audio_s` long.
    """

    def __init__(self, gateway: Gateway, settings: Settings) -> None:
        self._gateway = gateway
        self._check_text = gateway.frontend.check_text
        self._format, self._max_audio_s = (
            settings.audio.input.format,
            gateway.config.limits.max_audio_s,
        )

    def item(self, patch: ItemPatch, where: str) -> tuple[Item, dict[str, Clip]]:
        """Return the converted item, and its audio by clip name. `where` names the item in errors.

        Raises: BadInput, UnsupportedValue naming the field.
        """
        if patch.type == "item_reference":
            raise BadInput(
                f"{where}.type: a reference is valid in response.input only", param=f"{where}.type"
            )
        if patch.id == ROOT:
            raise BadInput(
                f"{where}.id: {ROOT!r} is where a conversation begins; choose another",
                param=f"{where}.id",
            )
        if patch.type != "message":
            return self._call_item(patch, where), {}
        if patch.role is None:
            raise BadInput(f"{where}.role: this field is required", param=f"{where}.role")
        item = Item(id=patch.id or say.new_id("item"), role=patch.role, parts=[])
        clips: dict[str, Clip] = {}
        for index, part_patch in enumerate(patch.content):
            at = f"{where}.content[{index}]"
            part = _part(part_patch, patch.role, at)
            self._check_text(TextPart(text=part.text, where=at))
            if part.kind == "input_audio":
                part.clip = f"{item.id}.{index}"
                clips[part.clip] = self.clip(part_patch.audio or "", f"{at}.audio")
            item.parts.append(part)
        if item.is_empty:
            raise BadInput(f"{where}.content: holds no text and no audio", param=f"{where}.content")
        return item, clips

    def _call_item(self, patch: ItemPatch, where: str) -> Item:
        """Return a function call or the result of one. Raises: UnsupportedValue for a model that
        calls no functions; BadInput.
        """
        if not self._gateway.call_format:
            reason = f"{patch.type} is not served, since {NO_TOOLS}; send items of type message"
            raise UnsupportedValue(f"{where}.type: {reason}", param=f"{where}.type")
        is_call = patch.type == "function_call"
        text = "arguments" if is_call else "output"
        for name in ("name", text) if is_call else ("call_id", text):
            if getattr(patch, name) is None:
                raise BadInput(f"{where}.{name}: this field is required", param=f"{where}.{name}")
        for name in ("call_id", "name", text):
            at = f"{where}.{name}"
            self._check_text(TextPart(text=getattr(patch, name) or "", where=at))
        return Item(
            id=patch.id or say.new_id("item"),
            role="assistant" if is_call else "tool",
            kind="function_call" if is_call else "function_call_output",
            call_id=patch.call_id or say.new_id("call"),
            name=patch.name or "",
            text=getattr(patch, text),
        )

    def items(self, patches: list[ItemPatch], known: Conversation, where: str) -> Conversation:
        """Return the `input` of a response out of band as a separate conversation, made of new
        items and references to items in `known`. `where` names the list in errors.

        Raises: NotFound, BadInput.
        """
        conversation = Conversation(
            len(patches),
            self._max_audio_s,
            sends_transcripts=self._gateway.edges.heard is not None,
        )
        for index, patch in enumerate(patches):
            at = f"{where}[{index}]"
            if patch.type == "item_reference":
                if patch.id is None:
                    raise BadInput(f"{at}.id: this field is required", param=f"{at}.id")
                item = known.find(patch.id, f"{at}.id")
                clips = {part.clip: known.clips[part.clip] for part in item.parts if part.clip}
                # A copy, since parts that exceed the bounds are removed here and must stay in the
                # conversation.
                item = msgspec.structs.replace(item, parts=[copy(part) for part in item.parts])
            else:
                item, clips = self.item(patch, at)
            conversation.add(item, clips, where=f"{at}.id")
        return conversation

    def clip(self, data: str, where: str) -> Clip:
        if self._format is None:
            raise no_input_format(where, self._gateway)
        rate_hz = self._format.rate
        audio = decode_audio(data, where)
        whole = len(audio) - len(audio) % self._format.sample_bytes
        samples = np.frombuffer(self._format.to_pcm(audio[:whole]), "<i2")
        if len(samples) * 1000 < MIN_CLIP_MS * rate_hz:
            raise BadInput(f"{where}: the audio is shorter than {MIN_CLIP_MS} ms", param=where)
        if len(samples) > self._max_audio_s * rate_hz:
            raise InputTooLarge(
                f"{where}: the audio is longer than {self._max_audio_s:g} s", param=where
            )
        if rate_hz != RATE_HZ:
            samples = soxr.resample(samples, rate_hz, RATE_HZ)
        return Clip(samples.astype("<i2").tobytes())


def no_input_format(where: str, gateway: Gateway) -> UnsupportedValue:
    """Return the error for audio that arrives while the session has no input format. `where` names
    the audio's field.
    """
    if not gateway.hears:
        return takes_text_only(where)
    message = (
        f"{where}: audio is not read while {INPUT_FORMAT} is refused; set it to {SERVED_FORMAT}"
    )
    return UnsupportedValue(message, param=where)


def _part(patch: PartPatch, role: str, where: str) -> Part:
    """Convert a content part without its audio. The types `text` and `audio` of the beta protocol
    mean input or output by the item's role.
    """
    is_audio = patch.type in ("input_audio", "output_audio", "audio")
    if role == "assistant":
        if patch.type in ("input_text", "input_audio"):
            raise BadInput(
                f"{where}.type: an assistant's content is output_text or output_audio",
                param=f"{where}.type",
            )
        # Its audio is not read: a prompt holds the transcript.
        return Part(
            kind="output_audio" if is_audio else "output_text",
            text=(patch.transcript if is_audio else patch.text) or "",
        )
    if patch.type in ("output_text", "output_audio"):
        raise BadInput(
            f"{where}.type: the content of a {role} is input_text or input_audio",
            param=f"{where}.type",
        )
    if is_audio and role != "user":
        raise UnsupportedValue(
            f"{where}.type: only a user's content can be audio", param=f"{where}.type"
        )
    field = "audio" if is_audio else "text"
    if getattr(patch, field) is None:
        raise BadInput(f"{where}.{field}: this field is required", param=f"{where}.{field}")
    if is_audio:
        return Part(kind="input_audio", text=patch.transcript or "")
    return Part(kind="input_text", text=patch.text or "")
