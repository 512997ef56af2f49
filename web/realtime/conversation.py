"""Items of a conversation: limited in number and audio, in order. Of a response that was cut, only
the words that were played count. Pure; knows no socket.

The user's speech is stored as PCM16 at 16 kHz. The full text of a response is stored beside its
played words, so that each cut is computed from the full text.
"""

from base64 import b64encode
from typing import Literal

import msgspec
import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.core.errors import BadInput, NotFound
from fleet.processing import AudioPart, Message, Recording, TextPart
from fleet.processing.call_messages import add_call, add_result
from fleet.processing.tool_calls.tools import FunctionCall
from fleet.processing.voice_activity import RATE_HZ
from web.realtime.audio.formats import OUTPUT_RATE_HZ, AudioFormat
from web.realtime.audio.played_text import Span, ended_words, played_speech, played_words
from web.realtime.protocol.server_events import (
    AnyItemBody,
    FunctionCallItem,
    FunctionOutputItem,
    ItemBody,
    ItemPart,
    PartBody,
    SpokenInput,
)

Role = Literal["user", "assistant", "system", "tool"]
Kind = Literal["message", "function_call", "function_call_output"]
FRAME_MS = 80
"""Tolerance, in milliseconds, by which a client's `audio_end_ms` may exceed the audio sent."""
ROOT = "root"
NEW_SPEECH = "new"
"""Name of the clip of a user's turn that is not an item of the conversation yet."""


class PlayedSpeech(msgspec.Struct, kw_only=True):
    """Full speech of a response, and how much of the speech was played. `text` is all text sent,
    `sent` the number of samples sent to the client, and `played` the number of samples played
    before the response was cut. `limit` is the number of samples that may ever count as played, set
    when the client truncates the response or another response continues it; None without a limit.
    Units: samples at 24 kHz.

    `word_ends` has, for each word, the characters of `text` and the samples up to its end. If
    `word_ends` is None, the played words are estimated: `silent` lists the silent ranges, and
    `whole` is the length of the speech of `text` without silence.
    """

    text: str
    whole: int
    sent: int
    played: int
    silent: list[Span] = []
    limit: int | None = None
    word_ends: list[tuple[int, int]] | None = None

    @property
    def played_text(self) -> str:
        if self.word_ends is not None:
            return ended_words(self.text, self.word_ends, self.played)
        speech = played_speech(self.played, self.silent, self.whole)
        return played_words(self.text, speech, self.whole)


class Part(msgspec.Struct, kw_only=True):
    """A content part of an item: text or audio. The `text` of the user's audio is its transcript,
    "" until it is known; the `text` of a response's audio contains only the words that were played.
    `clip` names the user's audio in `Conversation.clips`. `is_heard`: True once the transcript of
    the audio is known, which may be "".
    """

    kind: Literal["input_text", "input_audio", "output_text", "output_audio"]
    text: str = ""
    clip: str = ""
    speech: PlayedSpeech | None = None
    is_heard: bool = False


class Item(msgspec.Struct, kw_only=True):
    """An item of a conversation: a message, which has `parts`, or a function call or its result,
    which have a `call_id` and no parts. The `text` of a call is its arguments as JSON, and the
    `text` of a result is the result itself. Only a call has a `name`.
    """

    id: str
    role: Role
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    parts: list[Part] = []
    kind: Kind = "message"
    call_id: str = ""
    name: str = ""
    text: str = ""

    @property
    def is_empty(self) -> bool:
        if self.kind != "message":
            return False
        return not any(part.text.strip() or part.clip for part in self.parts)

    @property
    def call(self) -> FunctionCall:
        return FunctionCall(id=self.call_id, name=self.name, arguments=self.text)


class Clip(msgspec.Struct, frozen=True):
    """A clip of the user's audio, PCM16 at 16 kHz."""

    pcm: bytes

    @property
    def samples(self) -> NDArray[np.int16]:
        return np.frombuffer(self.pcm, "<i2")

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / RATE_HZ

    @property
    def recording(self) -> Recording:
        return Recording(self.samples, RATE_HZ)

    def in_format(self, form: AudioFormat) -> bytes:
        return form.of_pcm(soxr.resample(self.samples, RATE_HZ, form.rate))


class Conversation:
    """The items and audio clips of one conversation.

    `sends_transcripts`: prompts have the transcript of the user's audio, once it is known, instead
    of the audio.
    Invariants: at most `max_items` items and `max_audio_s` seconds of the user's audio; the oldest
    items and clips are removed first.
    """

    def __init__(
        self, max_items: int, max_audio_s: float, *, sends_transcripts: bool = False
    ) -> None:
        self.sends_transcripts = sends_transcripts
        self.items: list[Item] = []
        self.clips: dict[str, Clip] = {}
        self.version = 0
        """Number that increases with every change of the prompt, except when a transcript arrives.
        """
        self._max_items, self._max_audio_s = max_items, max_audio_s

    def snapshot(self) -> "Conversation":
        """Return a copy with the same items and clips, which a thread may read while the original
        changes.
        """
        copy = Conversation(
            self._max_items, self._max_audio_s, sends_transcripts=self.sends_transcripts
        )
        copy.items, copy.clips = list(self.items), dict(self.clips)
        return copy

    def find(self, item_id: str, param: str = "item_id") -> Item:
        """Return an item by its id. `param` names the client's field in the error. Raises:
        NotFound.
        """
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

    def find_call(self, call_id: str, kind: Kind = "function_call") -> Item | None:
        """Return the item of the call with this id, or with `kind` "function_call_output" the item
        of its result; None if there is no such item.
        """
        same = (item for item in self.items if item.kind == kind and item.call_id == call_id)
        return next(same, None)

    def _check_call(self, item: Item, where: str) -> None:
        """Check that a result belongs to a call and is its first one, and that a call is new.
        Raises: BadInput naming the field `where`.
        """
        if item.kind == "message":
            return
        if self.find_call(item.call_id, item.kind) is not None:
            what = "a call" if item.kind == "function_call" else "a result of the call"
            raise BadInput(f"{where}: there is {what} {item.call_id!r} already", param=where)
        if item.kind == "function_call_output" and self.find_call(item.call_id) is None:
            raise BadInput(f"{where}: no call {item.call_id!r} in this conversation", param=where)

    def holds(self, item: Item) -> bool:
        return any(other is item for other in self.items)

    def add(
        self,
        item: Item,
        clips: dict[str, Clip] | None = None,
        after: str | None = None,
        *,
        where: str = "item.id",
    ) -> list[str]:
        """Insert an item with its audio `clips` after the item with the id `after`: `root` inserts
        it at the beginning, None at the end. Returns the ids of older items that were removed to
        stay within the limits. `where` names the client's field with the item's id, for errors.

        Raises: NotFound, BadInput.
        """
        if any(other.id == item.id for other in self.items):
            raise BadInput(f"{where}: there is an item {item.id!r} already", param=where)
        self._check_call(item, f"{where.removesuffix('.id')}.call_id")
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
        """Remove an item and its audio. Raises: NotFound."""
        item = self.find(item_id)
        self.items.remove(item)
        for part in item.parts:
            self.clips.pop(part.clip, None)
        self.version += 1

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Cut a response's speech at `audio_end_ms`, where the client stopped playing it. The
        client knows better than this server what it has played, but words that an earlier
        truncation removed stay removed.

        Raises: NotFound, BadInput.
        """
        item = self.find(item_id)
        part = item.parts[content_index] if content_index < len(item.parts) else None
        if part is None or part.speech is None:
            raise BadInput(
                "content_index: only an assistant's spoken content can be truncated",
                param="content_index",
            )
        sent_ms = part.speech.sent * 1000 // OUTPUT_RATE_HZ
        if audio_end_ms > sent_ms + FRAME_MS:
            raise BadInput(
                f"audio_end_ms: {audio_end_ms} is beyond the item's {sent_ms} ms of audio",
                param="audio_end_ms",
            )
        speech, end = part.speech, audio_end_ms * OUTPUT_RATE_HZ // 1000
        limit = end if speech.limit is None else min(end, speech.limit)
        if limit < speech.sent:
            speech.limit = limit
        self.cut(item, min(limit, speech.sent))

    def cut(self, item: Item, played: int) -> None:
        """Cut the text of a response to the words within the first `played` samples of its audio. A
        later cut starts from the full text again.
        """
        for part in item.parts:
            if (speech := part.speech) is not None:
                speech.played = played
                part.text = speech.played_text
        self.version += 1

    def set_transcript(self, item_id: str, content_index: int, text: str) -> bool:
        """Store the transcript of the user's audio in a part of an item; return False if the item
        was removed. `version` stays the same, so that a response made from the audio stays valid.
        """
        for item in self.items:
            if item.id == item_id and content_index < len(item.parts):
                item.parts[content_index].text = text
                item.parts[content_index].is_heard = True
                return True
        return False

    def set_clip_transcript(self, clip: str, text: str) -> None:
        """Store the transcript of the clip with this name; do nothing if no item has the clip."""
        for item in self.items:
            for number, part in enumerate(item.parts):
                if part.clip == clip:
                    self.set_transcript(item.id, number, text)

    def transcript_of(self, clip: str) -> str | None:
        """Return the transcript of the clip with this name; None if it is not known."""
        parts = (part for item in self.items for part in item.parts if part.clip == clip != "")
        part = next(parts, None)
        return part.text if part is not None and part.is_heard else None

    def body(self, item: Item, audio_format: AudioFormat | None = None) -> AnyItemBody:
        """Return an item in the form that the client receives; the user's audio is included if the
        client's `audio_format` is given.
        """
        if item.kind == "function_call":
            return FunctionCallItem(
                id=item.id,
                status=item.status,
                name=item.name,
                call_id=item.call_id,
                arguments=item.text,
            )
        if item.kind == "function_call_output":
            return FunctionOutputItem(
                id=item.id, status=item.status, call_id=item.call_id, output=item.text
            )
        return ItemBody(
            id=item.id,
            status=item.status,
            role=item.role,
            content=[self._part(part, audio_format) for part in item.parts],
        )

    def _part(self, part: Part, audio_format: AudioFormat | None) -> ItemPart:
        if part.kind == "input_audio":
            clip = self.clips.get(part.clip)
            audio = (
                b64encode(clip.in_format(audio_format)).decode("ascii")
                if clip is not None and audio_format is not None
                else msgspec.UNSET
            )
            return SpokenInput(transcript=part.text or None, audio=audio)
        if part.kind == "output_audio":
            return PartBody(type=part.kind, transcript=part.text)
        return PartBody(type=part.kind, text=part.text)

    def _shrink(self, newest: Item) -> list[str]:
        removed: list[str] = []
        while len(self.items) > self._max_items:
            oldest = next(item for item in self.items if item is not newest)
            self.remove(oldest.id)
            removed.append(oldest.id)
        while sum(clip.seconds for clip in self.clips.values()) > self._max_audio_s:
            oldest = next(
                (item for item in self.items if any(part.clip for part in item.parts)), newest
            )
            if oldest is newest:
                break
            self._remove_audio(oldest)
            if oldest.is_empty:
                self.items.remove(oldest)
                removed.append(oldest.id)
        return removed

    def _remove_audio(self, item: Item) -> None:
        """Remove the audio of an item. Its transcript, if known, stays as the item's text."""
        for part in item.parts:
            if part.clip:
                self.clips.pop(part.clip, None)
                part.clip = ""

    def messages(self, instructions: str, speech: Clip | None = None) -> list[Message]:
        """Return the conversation as chat messages. Consecutive responses become one message, with
        the calls after them; calls that were cut, and results without a call, are left out.
        `speech` is appended as the user's last turn.
        """
        messages: list[Message] = []
        if instructions:
            messages.append(
                Message(
                    role="system", content=TextPart(text=instructions, where="messages[0].content")
                )
            )
        for item in self.items:
            if item.is_empty or item.status == "in_progress":
                continue
            last = messages[-1] if messages else None
            if item.kind != "message":
                _add_call(messages, item)
            elif last is not None and item.role == "assistant" == last.role and not last.calls:
                assert isinstance(last.content, TextPart)
                text = f"{last.content.text.rstrip()} {_text_of(item).lstrip()}"
                messages[-1] = Message(
                    role="assistant", content=TextPart(text=text, where=last.content.where)
                )
            else:
                messages.append(self._message(item, f"messages[{len(messages)}].content"))
        if speech is not None:
            where = f"messages[{len(messages)}].content[0].input_audio.data"
            messages.append(
                Message(
                    role="user",
                    content=(AudioPart(data=speech.recording, where=where, name=NEW_SPEECH),),
                )
            )
        return messages

    def _message(self, item: Item, where: str) -> Message:
        if item.role != "user" or not any(part.clip for part in item.parts):
            return Message(role=item.role, content=TextPart(text=_text_of(item), where=where))
        content: list[TextPart | AudioPart] = []
        for part in item.parts:
            at = f"{where}[{len(content)}]"
            if part.clip and self.sends_transcripts and part.is_heard:
                content.append(TextPart(text=part.text, where=f"{at}.text", is_transcript=True))
            elif part.clip:
                content.append(
                    AudioPart(
                        data=self.clips[part.clip].recording,
                        where=f"{at}.input_audio.data",
                        name=part.clip,
                    )
                )
            elif part.text:
                content.append(TextPart(text=part.text, where=f"{at}.text"))
        return Message(role="user", content=tuple(content))


def _add_call(messages: list[Message], item: Item) -> None:
    """Add a function call to the last message if that is a response, or a result after its call."""
    where = f"messages[{len(messages)}].content"
    if item.kind == "function_call_output":
        add_result(messages, item.call_id, TextPart(text=item.text, where=where))
    elif item.status == "completed":
        add_call(messages, item.call, where)


def _text_of(item: Item) -> str:
    return " ".join(part.text for part in item.parts if part.text)
