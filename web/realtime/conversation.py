"""The items of a conversation: bounded, in order, and holding only what was heard. Pure; knows no socket and no model.

User speech is kept as PCM16 at 16 kHz. What the assistant said is kept whole beside what was heard of it, so that a later cut is
made from the same whole.
"""

import io
import wave
from base64 import b64encode
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
import soxr

from fleet.core.errors import BadInput, NotFound
from web.realtime.heard import Span, speech_heard, words_heard
from web.realtime.server_events import ItemBody, ItemPart, PartBody, SpokenInput
from web.realtime.settings import OUTPUT_RATE_HZ
from web.realtime.turns import RATE_HZ
from web.schema.chat import InputAudio, InputAudioPartBody, MessageBody, TextPartBody
from web.schema.chat import PartBody as ChatPart

Role = Literal["user", "assistant", "system"]
FRAME_MS = 80
"""A client's count of what it played may be ahead of what it was sent by less than a frame."""
ROOT = "root"


class PlayedSpeech(msgspec.Struct, kw_only=True):
    """An assistant's speech. Units: samples at 24 kHz. `sent` of its sound left for the client, `heard` of it was played before
    something cut it; nothing is said in `silent`. `whole`: what the speech of `text` would be without silence.
    """

    text: str
    whole: int
    sent: int
    heard: int
    silent: list[Span] = []


class Part(msgspec.Struct, kw_only=True):
    """`text` of sound is its transcript: of the user's "" until it is known, of the assistant's only what was heard."""

    kind: Literal["input_text", "input_audio", "output_text", "output_audio"]
    text: str = ""
    clip: str = ""
    """The name of the sound among the conversation's clips."""
    said: PlayedSpeech | None = None


class Item(msgspec.Struct, kw_only=True):
    id: str
    role: Role
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    parts: list[Part]

    @property
    def is_empty(self) -> bool:
        return not any(part.text.strip() or part.clip for part in self.parts)


class Clip:
    """The user's sound, PCM16 at 16 kHz, and the file it is sent to the model as."""

    def __init__(self, pcm: bytes) -> None:
        self.pcm = pcm
        self._file = ""

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / RATE_HZ

    def for_client(self) -> bytes:
        """PCM16 at the rate that `audio/pcm` has on the wire."""
        return soxr.resample(np.frombuffer(self.pcm, "<i2"), RATE_HZ, OUTPUT_RATE_HZ).astype("<i2").tobytes()

    def file(self) -> str:
        """A WAV in base64, made once: the clip is part of every later turn's prompt."""
        if not self._file:
            buffer = io.BytesIO()
            with wave.open(buffer, "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE_HZ)
                file.writeframes(self.pcm)
            self._file = b64encode(buffer.getvalue()).decode("ascii")
        return self._file


class Conversation:
    """Invariants: at most `max_items` items and `max_audio_s` seconds of the user's sound; the oldest go first, and are told."""

    def __init__(self, max_items: int, max_audio_s: float) -> None:
        self.items: list[Item] = []
        self.clips: dict[str, Clip] = {}
        self.version = 0
        """Grows with every change of what a prompt would hold."""
        self._max_items, self._max_audio_s = max_items, max_audio_s

    def snapshot(self) -> "Conversation":
        """A copy that a thread may read while this one changes; both have the same items and clips."""
        copy = Conversation(self._max_items, self._max_audio_s)
        copy.items, copy.clips = list(self.items), dict(self.clips)
        return copy

    def find(self, item_id: str, param: str = "item_id") -> Item:
        """Raises: NotFound."""
        for item in self.items:
            if item.id == item_id:
                return item
        raise NotFound(f"{param}: no item {item_id!r} in this conversation", param=param)

    def previous(self, item_id: str) -> str | None:
        ids = [item.id for item in self.items]
        index = ids.index(item_id) if item_id in ids else len(ids)
        return ids[index - 1] if index > 0 else None

    @property
    def last_id(self) -> str | None:
        return self.items[-1].id if self.items else None

    def holds(self, item: Item) -> bool:
        return any(other is item for other in self.items)

    def add(
        self, item: Item, clips: dict[str, Clip] | None = None, after: str | None = None, *, where: str = "item.id"
    ) -> list[str]:
        """Put it after the given item (`root`: first; None: last). Returns the ids of those that had to go for it. `where` is
        what the client calls the item's id.

        Raises: NotFound, BadInput.
        """
        if any(other.id == item.id for other in self.items):
            raise BadInput(f"{where}: there is an item {item.id!r} already", param=where)
        place = len(self.items)
        if after == ROOT:
            place = 0
        elif after is not None:
            place = self.items.index(self.find(after, "previous_item_id")) + 1
        self.items.insert(place, item)
        self.clips |= clips or {}
        self.version += 1
        return self._shrink(item)

    def remove(self, item_id: str) -> None:
        """Raises: NotFound."""
        item = self.find(item_id)
        self.items.remove(item)
        for part in item.parts:
            self.clips.pop(part.clip, None)
        self.version += 1

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """The listener heard so much of it. What an earlier cut took does not come back.

        Raises: NotFound, BadInput.
        """
        item = self.find(item_id)
        part = item.parts[content_index] if content_index < len(item.parts) else None
        if part is None or part.said is None:
            raise BadInput("content_index: only an assistant's spoken content can be truncated", param="content_index")
        sent_ms = part.said.sent * 1000 // OUTPUT_RATE_HZ
        if audio_end_ms > sent_ms + FRAME_MS:
            raise BadInput(f"audio_end_ms: {audio_end_ms} is beyond the item's {sent_ms} ms of audio", param="audio_end_ms")
        self.cut(item, min(part.said.heard, audio_end_ms * OUTPUT_RATE_HZ // 1000))

    def cut(self, item: Item, heard: int) -> None:
        """Keep of an assistant's speech only the words within its first `heard` samples."""
        for part in item.parts:
            if part.said is not None:
                part.said.heard = heard
                speech = speech_heard(heard, part.said.silent, part.said.whole)
                part.text = words_heard(part.said.text, speech, part.said.whole)
        self.version += 1

    def note_transcript(self, item_id: str, content_index: int, text: str) -> bool:
        """What the user said; false if the item is gone. A prompt does not change by it: the model hears the sound itself."""
        for item in self.items:
            if item.id == item_id and content_index < len(item.parts):
                item.parts[content_index].text = text
                return True
        return False

    def body(self, item: Item, *, with_audio: bool = False) -> ItemBody:
        """The item as the wire has it."""
        return ItemBody(id=item.id, status=item.status, role=item.role, content=[self._part(p, with_audio) for p in item.parts])

    def _part(self, part: Part, with_audio: bool) -> ItemPart:
        if part.kind == "input_audio":
            clip = self.clips.get(part.clip)
            audio = b64encode(clip.for_client()).decode("ascii") if clip is not None and with_audio else msgspec.UNSET
            return SpokenInput(transcript=part.text or None, audio=audio)
        if part.kind == "output_audio":
            return PartBody(type=part.kind, transcript=part.text)
        return PartBody(type=part.kind, text=part.text)

    def _shrink(self, newest: Item) -> list[str]:
        gone: list[str] = []
        while len(self.items) > self._max_items:
            gone.append(self._drop_oldest(newest))
        while sum(clip.seconds for clip in self.clips.values()) > self._max_audio_s:
            oldest = next((item for item in self.items if any(part.clip for part in item.parts)), newest)
            if oldest is newest:
                break
            self._mute(oldest)
            if oldest.is_empty:
                self.items.remove(oldest)
                gone.append(oldest.id)
        return gone

    def _drop_oldest(self, newest: Item) -> str:
        oldest = next(item for item in self.items if item is not newest)
        self.remove(oldest.id)
        return oldest.id

    def _mute(self, item: Item) -> None:
        """Of speech that is too long ago, its words stay where they are known."""
        for part in item.parts:
            if part.clip:
                self.clips.pop(part.clip, None)
                part.clip = ""

    def messages(self, instructions: str, *, skip: int = 0) -> list[MessageBody]:
        """The prompt: the items after the first `skip`, what an assistant said in several goes as one message."""
        found = [MessageBody(role="system", content=instructions)] if instructions else []
        for item in self.items[skip:]:
            if item.is_empty or item.status == "in_progress":
                continue
            message = self._message(item)
            last = found[-1] if found else None
            if last is not None and item.role == "assistant" == last.role:
                said, more = str(last.content).rstrip(), str(message.content).lstrip()
                found[-1] = MessageBody(role="assistant", content=f"{said} {more}")
            else:
                found.append(message)
        return found

    def _message(self, item: Item) -> MessageBody:
        if item.role != "user" or not any(part.clip for part in item.parts):
            return MessageBody(role=item.role, content=" ".join(part.text for part in item.parts if part.text))
        return MessageBody(role="user", content=list(self._chat_parts(item)))

    def _chat_parts(self, item: Item) -> Iterator[ChatPart]:
        for part in item.parts:
            if part.clip:
                audio = InputAudio(data=self.clips[part.clip].file(), format="wav")
                yield InputAudioPartBody(type="input_audio", input_audio=audio)
            elif part.text:
                yield TextPartBody(type="text", text=part.text)
