"""Client of the evaluation, which sends questions to a fleet through its API, several concurrently.

The earlier turns of a dialogue contain the right answers, so that a wrong answer counts only once.
"""

import io
from base64 import b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import soundfile
import soxr
from msgspec import UNSET
from numpy.typing import NDArray

from fleet.lab.client.chat import (
    AudioContent,
    ChatAnswer,
    ChatCall,
    ChatMessage,
    ChatStreamOptions,
    EncodedAudio,
    OutputAudio,
    TextContent,
)
from fleet.lab.client.client import ApiClient
from fleet.lab.client.errors import ApiError
from fleet.lab.pocket.corpus import Dialogue
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ

MAX_TEXT_TOKENS: Final = 128
MAX_FRAMES: Final = 375
"""Length limit of a spoken answer in codec frames, far above any right answer, so that an answer
that reaches the limit counts as not ended.
"""
MAX_ANSWER_S: Final = MAX_FRAMES * 0.08

Samples = NDArray[np.float32]
Advance = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatQuestion:
    """Messages of a conversation up to its last question. `voice`: voice of the spoken answer, None
    for a text answer.
    """

    messages: tuple[ChatMessage, ...]
    voice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """Answer to a question. `samples`: mono at 24 kHz in -1..1, empty if no speech was
    requested.
    """

    text: str
    finish_reason: str
    samples: Samples


class JudgeClient(ApiClient):
    """Client of one fleet, with greedy sampling or the checkpoint's default sampling. Thread-safe.
    The constructor asks the fleet for the name of its model.

    Raises: ApiError if the fleet cannot be reached or refuses the request.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, own_sampling: bool = False, seed: int = 0
    ) -> None:
        super().__init__(url, api_key)
        self._temperature = UNSET if own_sampling else 0.0
        self._seed = seed
        self.name = self.model()

    def ask(self, question: ChatQuestion) -> ChatReply:
        return _reply(self.chat(self._call(question)), self.url)

    def ask_all(
        self, questions: Sequence[ChatQuestion], concurrency: int, advance: Advance
    ) -> list[ChatReply]:
        """Return the replies in the order of the questions; `advance` is called after each reply.
        The first failure is raised, and cancels the questions that were not yet sent.
        """

        def one(question: ChatQuestion) -> ChatReply:
            reply = self.ask(question)
            advance()
            return reply

        pool = ThreadPoolExecutor(max_workers=concurrency)
        try:
            return list(pool.map(one, questions))
        finally:
            pool.shutdown(cancel_futures=True)

    def streamed_body(self, question: ChatQuestion) -> bytes:
        return msgspec.json.encode(self._call(question, stream=True))

    def _call(self, question: ChatQuestion, *, stream: bool = False) -> ChatCall:
        has_voice = question.voice is not None
        return ChatCall(
            model=self.name,
            messages=question.messages,
            modalities=("text", "audio") if has_voice else ("text",),
            max_tokens=MAX_TEXT_TOKENS,
            seed=self._seed,
            stream=stream,
            stream_options=ChatStreamOptions() if stream else UNSET,
            temperature=self._temperature,
            audio=OutputAudio(voice=question.voice, format="pcm16" if stream else "wav")
            if has_voice
            else UNSET,
            fleet={"talker": {"max_tokens": MAX_FRAMES}} if has_voice else UNSET,
        )


def typed(dialogue: Dialogue, voice: str | None = None) -> ChatQuestion:
    """Return a dialogue up to its last question, as text. `voice`: voice of the spoken answer, None
    for text.
    """
    messages = tuple(ChatMessage(role=turn.role, content=turn.text) for turn in dialogue.turns[:-1])
    return ChatQuestion(messages=messages, voice=voice)


def spoken(dialogue: Dialogue, clips: Sequence[bytes]) -> ChatQuestion:
    """Return a dialogue up to its last question, with the user's turns as audio files. `clips`: one
    audio file per turn of the user.
    """
    user_clips = iter(clips)
    messages = tuple(
        ChatMessage(
            role=turn.role,
            content=(_audio(next(user_clips)),) if turn.role == "user" else turn.text,
        )
        for turn in dialogue.turns[:-1]
    )
    return ChatQuestion(messages=messages)


def transcribe(clip: bytes) -> ChatQuestion:
    """Return a request for the transcript of an audio file."""
    return ChatQuestion(
        messages=(ChatMessage(role="user", content=(_audio(clip), TextContent("transcribe"))),)
    )


def wav_file(samples: Samples, rate_hz: int) -> bytes:
    """Encode mono samples in -1..1 as a 16-bit WAV file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _audio(clip: bytes) -> AudioContent:
    return AudioContent(EncodedAudio(b64encode(clip).decode("ascii")))


def _reply(answer: ChatAnswer, url: str) -> ChatReply:
    try:
        samples = _samples(answer.audio) if answer.audio else np.zeros(0, np.float32)
    except soundfile.SoundFileError as error:
        raise ApiError(f"{url} did not return a WAV file ({error})", param="url") from error
    return ChatReply(text=answer.text, finish_reason=answer.finish_reason, samples=samples)


def _samples(file: bytes) -> Samples:
    samples, rate_hz = soundfile.read(io.BytesIO(file), dtype="float32")
    return soxr.resample(np.asarray(samples, np.float32), rate_hz, SAMPLE_RATE_HZ)
