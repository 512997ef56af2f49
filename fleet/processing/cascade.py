"""The frontend of the graph `cascade`: the language model's template and tokenizer, one placeholder
per audio clip, and the voices and languages that the other stages' checkpoints name.
"""

import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from fleet.config.schema import Limits
from fleet.core.errors import BadInput, ConfigError, UnsupportedValue, quoted
from fleet.core.ids import StageName
from fleet.core.request import RequestSpec
from fleet.graphs.cascade import (
    ASR,
    CLIP_ID,
    LANGUAGE_PARAM,
    LM,
    PROMPT_PARAM,
    TEMPERATURE_PARAM,
    TIMES_PARAM,
    TTS,
    VOICE_PARAM,
)
from fleet.processing.base import AudioPart, ChatRequest, Message, TextPart
from fleet.processing.clips import clip_blob, clip_table, decode_clips
from fleet.processing.context_length import limit_answer_length
from fleet.processing.languages import LANGUAGE_NAMES
from fleet.processing.prompt import audio_mark
from fleet.processing.template import read_json
from fleet.processing.text import TextFrontend
from fleet.processing.tokenizer import token_ids
from fleet.processing.transcripts import literal_tokenizer, transcript_ids

ANSWER_RATE_HZ, PROMPT_RATE_HZ = 24_000, 16_000
OPENAI_VOICES = frozenset(
    "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split()
)
"""OpenAI's voice names, for which the checkpoint's default voice is used."""
_LANGUAGE_TOKEN = re.compile(r"<\|(\w+)\|>")


class CascadeFrontend(TextFrontend):
    """Prompt processing of a recogniser, a language model and a voice. `folders`: checkpoint folder
    of each stage. Raises: ConfigError if a folder lacks a file that is read.
    """

    sample_rate_hz = ANSWER_RATE_HZ
    audio_rate_hz = PROMPT_RATE_HZ

    def __init__(self, folders: Mapping[StageName, Path], limits: Limits) -> None:
        super().__init__(folders[LM], limits)
        self._literal = literal_tokenizer(folders[LM])
        self._voices = read_voices(folders[TTS])
        self._languages = read_languages(folders[ASR])

    def prepare(self, chat: ChatRequest) -> tuple[RequestSpec, bytes | None]:
        params: dict[str, str] = {}
        if chat.spoken:
            params[VOICE_PARAM] = self.voice(chat.voice, chat.voice_where)
        if chat.hearing.language is not None:
            params[LANGUAGE_PARAM] = self.language(chat.hearing.language, "language")
        if chat.hearing.temperature is not None:
            params[TEMPERATURE_PARAM] = str(chat.hearing.temperature)
        if chat.hearing.prompt:
            params[PROMPT_PARAM] = chat.hearing.prompt
        if chat.hearing.times:
            params[TIMES_PARAM] = "yes"
        clips = decode_clips(chat, rate_hz=self.audio_rate_hz, max_audio_s=self.limits.max_audio_s)
        is_answered = not chat.stages or LM in chat.stages
        ids = self._prompt_ids(chat) if is_answered else []
        self.check_length(ids, chat.where)
        spec = RequestSpec(
            id=chat.id,
            graph=chat.graph,
            prompt_ids=tuple(ids),
            audio=clip_table(clips, self.audio_rate_hz),
            outputs=chat.outputs,
            sampling={
                stage: limit_answer_length(one, len(ids), self.positions) if stage == LM else one
                for stage, one in chat.sampling.items()
            },
            params=params,
            given=self.given_ids(chat.given),
            created_us=chat.created_us,
            speech_text=self.checked(chat.speech_text) if chat.speech_text is not None else "",
        )
        return spec, clip_blob(clips)

    def prompt_text(self, ids: Sequence[int], heard: Sequence[str] = ()) -> str:
        texts: list[str] = []
        transcripts = iter(heard)
        for is_clip, run in groupby(ids, lambda one: one == CLIP_ID):
            part = list(run)
            if is_clip:
                texts += [audio_mark(next(transcripts, "")) for _ in part]
            else:
                texts.append(super().prompt_text(part))
        return "\n".join(filter(None, texts))

    def speech_pieces(self, text: TextPart, max_tokens: int) -> list[str]:
        """Return the whole text, since the voice reads texts of any length; empty if it has no
        letter and no digit.
        """
        whole = self.checked(text)
        return [whole] if any(map(str.isalnum, whole)) else []

    def transcription_prompt(self, language: str | None = None, where: str = "language") -> str:
        """Return "", since the recogniser takes no question, after a check of the language. Raises:
        UnsupportedValue.
        """
        if language is not None:
            self.language(language, where)
        return ""

    def language(self, given: str, where: str) -> str:
        """Return the code of a language given as a code (`en`, `en-US`) or an English name. Raises:
        UnsupportedValue.
        """
        name = given.strip().lower()
        code = LANGUAGE_NAMES.get(name, re.split("[-_]", name)[0])
        if not self._languages or code in self._languages:
            return code
        raise UnsupportedValue(
            f"{where}: {quoted(given)} is none of the languages that this model transcribes: "
            f"{', '.join(self._languages)}",
            param=where,
        )

    def languages(self) -> list[str]:
        return list(self._languages)

    def voices(self) -> list[str]:
        return list(self._voices)

    def voice(self, wanted: str | None, where: str = "audio.voice") -> str:
        name = (wanted or self._voices[0]).lower()
        if name in self._voices:
            return name
        if name in OPENAI_VOICES:
            return self._voices[0]
        known = ", ".join(self._voices)
        raise BadInput(f"{where}: no voice {quoted(name)}; use one of {known}", param=where)

    def _prompt_ids(self, chat: ChatRequest) -> list[int]:
        """Return the ids of the prompt, with one `CLIP_ID` for each clip.

        The template renders a random word, which no text of a user can contain, for each clip and
        each transcript.
        """
        if chat.plain is not None:
            return self.tokenize(chat)
        word = f"clip{secrets.token_hex(16)}"
        spoken = [part for message in chat.messages for part in _spoken_parts(message)]
        flat = tuple(
            dataclasses.replace(message, content=_flat(message, word)) for message in chat.messages
        )
        first, *others = self.render(dataclasses.replace(chat, messages=flat)).split(word)
        if len(others) != len(spoken):
            raise BadInput(
                "messages: the chat template drops an audio part; put audio in user messages",
                param="messages",
            )
        ids = token_ids(self.tokenizer, first, chat.where)
        for part, text in zip(spoken, others, strict=True):
            known = part.text.strip() if isinstance(part, TextPart) else None
            ids += [CLIP_ID] if known is None else transcript_ids(self._literal, known)
            ids += token_ids(self.tokenizer, text, chat.where)
        return ids


def _is_spoken(part: TextPart | AudioPart) -> bool:
    return isinstance(part, AudioPart) or part.is_transcript


def _spoken_parts(message: Message) -> list[TextPart | AudioPart]:
    """Return the clips and transcripts of a message, in order."""
    parts = message.content if isinstance(message.content, tuple) else (message.content,)
    return [part for part in parts if _is_spoken(part)]


def _flat(message: Message, word: str) -> TextPart:
    """Return the parts of a message joined to one string, with `word` for each clip and each
    transcript.
    """
    parts = message.content if isinstance(message.content, tuple) else (message.content,)
    texts = [
        part.text if isinstance(part, TextPart) and not part.is_transcript else word
        for part in parts
    ]
    return TextPart(text="\n".join(texts), where=parts[0].where if parts else "messages")


def read_voices(folder: Path) -> tuple[str, ...]:
    """Return the names of the voices in a folder's voice.json, the default one first. Raises:
    ConfigError if the file is missing or names none.
    """
    listed = read_json(folder / "voice.json").get("voices")
    if not isinstance(listed, list) or not listed or not all(isinstance(v, str) for v in listed):
        raise ConfigError(
            f"checkpoint {folder}: voice.json must have a list of names, voices", param="checkpoint"
        )
    return tuple(str(name).lower() for name in listed)


def read_languages(folder: Path) -> tuple[str, ...]:
    """Return the language codes in generation_config.json, sorted; empty if the file names none."""
    listed = read_json(folder / "generation_config.json").get("lang_to_id")
    tokens = map(str, listed) if isinstance(listed, Mapping) else ()
    return tuple(
        sorted(found[1] for token in tokens if (found := _LANGUAGE_TOKEN.fullmatch(token)))
    )
