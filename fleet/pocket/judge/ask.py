"""Questions to a fleet through its API, some at a time, each answered whole. Knows no stage but the one whose length it bounds.

A dialogue's earlier answers are given as they should have been, so that one wrong answer is counted once.
"""

import io
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import soundfile
import soxr
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from fleet.bench.chat import ChatApi
from fleet.bench.errors import BenchError
from fleet.pocket.corpus import Dialogue
from fleet.pocket.teacher import SAMPLE_RATE_HZ

MAX_TEXT_TOKENS: Final = 128
MAX_FRAMES: Final = 375
"""Far more than any answer has: what is as long has no end."""
MAX_ANSWER_S: Final = MAX_FRAMES * 0.08

Samples = NDArray[np.float32]
Advance = Callable[[], None]


class _Sound(msgspec.Struct, frozen=True):
    data: str
    format: str = "wav"


class SoundPart(msgspec.Struct, frozen=True, tag="input_audio", tag_field="type"):
    input_audio: _Sound


class TextPart(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | tuple[SoundPart | TextPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuestion:
    """The conversation so far. With a voice, the answer is to be spoken."""

    messages: tuple[Message, ...]
    voice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """`samples` mono of 24 kHz in -1..1, none where nothing was to be spoken."""

    text: str
    finish_reason: str
    samples: Samples


class _Voice(msgspec.Struct, frozen=True):
    voice: str
    format: str


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    messages: tuple[Message, ...]
    modalities: tuple[str, ...]
    max_tokens: int = MAX_TEXT_TOKENS
    seed: int
    stream: bool = False
    stream_options: _StreamOptions | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    audio: _Voice | UnsetType = UNSET
    fleet: dict[str, dict[str, int]] | UnsetType = UNSET


class _File(msgspec.Struct, frozen=True):
    data: str


class _Answer(msgspec.Struct, frozen=True):
    content: str | None = None
    audio: _File | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Answer
    finish_reason: str


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


class JudgeClient(ChatApi):
    """One fleet, asked greedily or as its checkpoint draws by itself. Thread-safe.

    Raises: BenchError in one line when the fleet cannot be reached or refuses.
    """

    def __init__(self, url: str, *, api_key: str | None = None, own_sampling: bool = False, seed: int = 0) -> None:
        super().__init__(url, api_key)
        self._temperature = UNSET if own_sampling else 0.0
        self._seed = seed
        self.name = self.model()

    def ask(self, question: ChatQuestion) -> ChatReply:
        return _reply(self._post(self.body(question)), self.url)

    def ask_all(self, questions: Sequence[ChatQuestion], concurrency: int, advance: Advance) -> list[ChatReply]:
        """The replies in the order of the questions. The first failure ends it, without waiting for what was not yet sent."""

        def one(question: ChatQuestion) -> ChatReply:
            reply = self.ask(question)
            advance()
            return reply

        pool = ThreadPoolExecutor(max_workers=concurrency)
        try:
            return list(pool.map(one, questions))
        finally:
            pool.shutdown(cancel_futures=True)

    def body(self, question: ChatQuestion, *, stream: bool = False) -> bytes:
        speaks = question.voice is not None
        body = _Body(
            model=self.name,
            messages=question.messages,
            modalities=("text", "audio") if speaks else ("text",),
            seed=self._seed,
            stream=stream,
            stream_options=_StreamOptions() if stream else UNSET,
            temperature=self._temperature,
            audio=_Voice(question.voice or "", "pcm16" if stream else "wav") if speaks else UNSET,
            fleet={"talker": {"max_tokens": MAX_FRAMES}} if speaks else UNSET,
        )
        return msgspec.json.encode(body)

    def _post(self, body: bytes) -> bytes:
        connection = self._connection()
        try:
            headers = {**self._headers, "content-type": "application/json"}
            connection.request("POST", f"{self._path}/v1/chat/completions", body, headers)
            response = connection.getresponse()
            raw = response.read()
        except OSError as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        if response.status != 200:
            raise self._refusal(response.status, raw)
        return raw


def typed(dialogue: Dialogue, voice: str | None = None) -> ChatQuestion:
    """The dialogue up to its last question."""
    messages = tuple(Message(role=turn.role, content=turn.text) for turn in dialogue.turns[:-1])
    return ChatQuestion(messages=messages, voice=voice)


def spoken(dialogue: Dialogue, clips: Sequence[bytes]) -> ChatQuestion:
    """The same with every turn of the user as a sound file: `clips`, one for each."""
    of_user = iter(clips)
    messages = tuple(
        Message(role=turn.role, content=(_sound(next(of_user)),) if turn.role == "user" else turn.text)
        for turn in dialogue.turns[:-1]
    )
    return ChatQuestion(messages=messages)


def transcribe(clip: bytes) -> ChatQuestion:
    """What is said in a sound file?"""
    return ChatQuestion(messages=(Message(role="user", content=(_sound(clip), TextPart("transcribe"))),))


def _sound(clip: bytes) -> SoundPart:
    return SoundPart(_Sound(b64encode(clip).decode("ascii")))


def _reply(raw: bytes, url: str) -> ChatReply:
    try:
        choice = msgspec.json.decode(raw, type=_Completion).choices[0]
        samples = _samples(b64decode(choice.message.audio.data)) if choice.message.audio else np.zeros(0, np.float32)
    except (msgspec.DecodeError, IndexError, ValueError, soundfile.SoundFileError) as error:
        raise BenchError(f"{url} answers, but not as a fleet does ({error})", param="url") from error
    return ChatReply(text=choice.message.content or "", finish_reason=choice.finish_reason, samples=samples)


def _samples(file: bytes) -> Samples:
    samples, rate_hz = soundfile.read(io.BytesIO(file), dtype="float32")
    return soxr.resample(np.asarray(samples, np.float32), rate_hz, SAMPLE_RATE_HZ)
