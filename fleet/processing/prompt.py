"""Prompt construction for all language models: tokenizer, chat template, end tokens, limits. Knows
no audio.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path

from fleet.config.schema import Limits
from fleet.core.errors import BadInput, ConfigError, ContextLengthExceeded
from fleet.core.request import ToolUse
from fleet.processing.bad_words import bad_word_ids
from fleet.processing.base import ChatRequest, GivenAnswer, Message, PlainPrompt, TextPart
from fleet.processing.continuation import Continuation
from fleet.processing.detokenize import IncrementalDetokenizer
from fleet.processing.end_ids import read_end_ids, read_vocab_size
from fleet.processing.pieces import split_text
from fleet.processing.template import TemplateMessage, load_template, read_json, token_text
from fleet.processing.token_bytes import TokenBytes
from fleet.processing.tokenizer import load_tokenizer, token_ids
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.prompt import calls_for_template, shown_id, without_tools
from fleet.processing.tool_calls.support import ToolSupport
from fleet.processing.tool_calls.tools import FunctionTool

ROLES = ("system", "user", "assistant", "tool")
MAX_CHARS_PER_TOKEN = 32
"""A text of more characters than this times the token limit is refused before it is tokenised."""
USUAL_CHARS_PER_TOKEN = 4
"""Characters per token of ordinary text. If a text is estimated by this number to have twice the
allowed tokens, its beginning is tokenised first, to refuse it early.
"""


class PromptFrontend:
    """Base of the frontends: a checkpoint's tokenizer and chat template, with the limits on a
    prompt.
    """

    positions: int | None = None

    def __init__(self, checkpoint: Path, limits: Limits) -> None:
        self.tokenizer = load_tokenizer(checkpoint)
        self.limits = limits
        self._end_ids = read_end_ids(checkpoint)
        self.num_ids = read_vocab_size(checkpoint) or self.tokenizer.get_vocab_size()
        self._end_id = self._end_of_answer(checkpoint)
        self._examples = _examples(checkpoint)
        self._template = load_template(checkpoint)
        self.tools = ToolSupport(self._template, self.tokenizer)
        self._controls = {
            i: t.content for i, t in self.tokenizer.get_added_tokens_decoder().items() if t.special
        }
        self._control_tokens = tuple(self._controls.values())
        self._longest_control = max(map(len, self._control_tokens), default=1)
        self._media_ids: frozenset[int] = frozenset()
        """Tokens that stand for audio, images or video in a prompt."""

    def detokenizer(self, tools: ToolUse | None = None) -> IncrementalDetokenizer:
        markers = FORMATS[tools.format].markers if tools is not None else ()
        return IncrementalDetokenizer(self.tokenizer, markers)

    def prompt_text(self, ids: Sequence[int], heard: Sequence[str] = ()) -> str:
        """Return the ids of a prompt as text for people to read: each text on a line of its own,
        role names instead of control tokens, and `[audio]` in place of each clip, with its
        transcript where `heard` has one.
        """
        pieces: list[str] = []
        transcripts = iter(heard)
        for special, run in groupby(ids, self._controls.get):
            text = "" if special else self.tokenizer.decode(list(run)).strip()
            if special and self._is_audio(special):
                pieces.append(audio_mark(next(transcripts, "")))
            elif special is not None and (role := special.strip("<|>")) in ROLES:
                pieces.append(f"{role}:")
            elif text:
                pieces.append(text)
        return "\n".join(pieces)

    def _is_audio(self, control: str) -> bool:
        """Return True if a control token marks the positions of an audio clip."""
        return False

    def languages(self) -> list[str]:
        return []

    def examples(self) -> list[str]:
        return self._examples

    def end_ids(self) -> frozenset[int]:
        return self._end_ids

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.of(token_id)

    def word_ids(self, words: Sequence[str], where: str) -> tuple[tuple[int, ...], ...]:
        return bad_word_ids(self.tokenizer, words, where)

    def check_text(self, text: TextPart) -> None:
        self.checked(text)

    def tokenize(self, chat: ChatRequest) -> list[int]:
        """Return the prompt's ids, with one placeholder per audio part.

        Raises: BadInput, ContextLengthExceeded naming the field.
        """
        if chat.plain is not None:
            return self._plain_ids(chat.plain, chat.where)
        return token_ids(self.tokenizer, self.render(chat), chat.where)

    def render(self, chat: ChatRequest) -> str:
        """Return the text of the prompt. Raises: as `tokenize`."""
        if not chat.messages:
            raise BadInput("messages: give at least one message", param="messages")
        tools = chat.tools
        messages = [self._for_template(message, tools.call_format) for message in chat.messages]
        definitions = [self._definition(tool) for tool in tools.described]
        if not self.tools.writes_tools:
            messages, definitions = without_tools(messages, definitions), []
        if chat.continues:
            continuation = Continuation()
            marked = self._template.render(
                continuation.marked(messages), definitions, where=chat.where, opens_answer=False
            )
            text = continuation.cut(marked)
        else:
            text = self._template.render(messages, definitions, where=chat.where)
        self._check_num_chars(text, chat.where)
        return text

    def _plain_ids(self, prompt: PlainPrompt, where: str) -> list[int]:
        """Return the token ids of a prompt without a template. Control tokens are allowed, except
        for the tokens that stand for audio, images or video.

        Raises: BadInput, ContextLengthExceeded naming the field `where`.
        """
        if isinstance(prompt, TextPart):
            check_encodable(prompt)
            self._check_num_chars(prompt.text, where)
            ids = token_ids(self.tokenizer, prompt.text, where, with_special_tokens=True)
        else:
            ids = list(prompt)
        size = self.tokenizer.get_vocab_size()
        if not ids or min(ids) < 0 or max(ids) >= size:
            cause = f"a token id must be from 0 to {size - 1}" if ids else "holds no token"
            raise BadInput(f"{where}: {cause}", param=where)
        if found := self._media_ids.intersection(ids):
            name = self.tokenizer.id_to_token(min(found))
            cause = f"the token {name!r} is a part of audio, images or video, which a text has not"
            raise BadInput(f"{where}: {cause}", param=where)
        return ids

    def _check_num_chars(self, text: str, where: str) -> None:
        """Refuse a text of far too many tokens before all of it is tokenised. Raises:
        ContextLengthExceeded.
        """
        if len(text) > self.limits.max_prompt_tokens * MAX_CHARS_PER_TOKEN:
            raise ContextLengthExceeded.of(
                where,
                self.limits.max_prompt_tokens,
                f"the prompt has {len(text)} characters, far more than that",
            )
        self._check_beginning(text, where)

    def check_length(self, ids: Sequence[int], where: str) -> None:
        """Check the length of a prompt, audio positions included. `where`: field of the user's
        input that has the prompt. Raises: ContextLengthExceeded beyond the limit.
        """
        if len(ids) > self.limits.max_prompt_tokens:
            raise ContextLengthExceeded.of(
                where, self.limits.max_prompt_tokens, f"the prompt has {len(ids)} tokens"
            )

    def given_ids(self, given: GivenAnswer) -> tuple[int, ...]:
        """Return the token ids of a supplied answer; a text gets an end token.

        Raises: BadInput if the text contains a control token, or nothing that the model can say.
        """
        if isinstance(given, tuple):
            return given
        ids = token_ids(self.tokenizer, self.checked(given), given.where)
        if not ids:
            raise BadInput(
                f"{given.where}: holds nothing that this model can say", param=given.where
            )
        return (*ids, self._end_id)

    def speech_pieces(self, text: TextPart, max_tokens: int) -> list[str]:
        """Split the text into pieces of at most `max_tokens`, end token included; pieces without
        tokens are dropped.
        """

        @lru_cache(maxsize=8)
        def num_tokens(piece: str) -> int:
            return len(token_ids(self.tokenizer, piece, text.where))

        return [
            piece
            for piece in split_text(
                self.checked(text), lambda piece: num_tokens(piece) < max_tokens
            )
            if num_tokens(piece)
        ]

    def checked(self, part: TextPart) -> str:
        """Return the text of a part after a check. Raises: BadInput if the text contains a control
        token, which could forge a turn or audio.
        """
        for token in self._control_tokens:
            if token in part.text:
                raise BadInput(
                    f"{part.where}: holds the model's control token {token!r}; remove it",
                    param=part.where,
                )
        check_encodable(part)
        return part.text

    def _end_of_answer(self, checkpoint: Path) -> int:
        """Return the end token that the tokenizer names, since other end tokens end other kinds of
        text; the one with the smallest id if the tokenizer names none.
        """
        named = token_text(read_json(checkpoint / "tokenizer_config.json").get("eos_token"))
        found = self.tokenizer.token_to_id(named) if named is not None else None
        return found if found is not None and found in self._end_ids else min(self._end_ids)

    def _check_beginning(self, text: str, where: str) -> None:
        """Refuse a text of far too many tokens after tokenising only its beginning, which takes a
        fraction of the time.

        Raises: ContextLengthExceeded if the beginning alone has twice the allowed tokens.
        """
        limit = self.limits.max_prompt_tokens
        beginning = text[: limit * USUAL_CHARS_PER_TOKEN]
        if len(text) < 2 * len(beginning):
            return
        num_tokens = len(token_ids(self.tokenizer, beginning, where))
        if num_tokens > 2 * limit:
            raise ContextLengthExceeded.of(
                where,
                limit,
                f"the first {len(beginning)} characters of the prompt have {num_tokens} tokens",
            )

    def _for_template(self, message: Message, call_format: str) -> TemplateMessage:
        name = (
            {"name": self.checked(TextPart(text=message.name, where="messages"))}
            if message.name
            else {}
        )
        for call in message.calls:
            for text in (call.id, call.name, call.arguments):
                self.checked(TextPart(text=text, where="messages"))
        fields: dict[str, object] = dict(calls_for_template(message.calls, call_format))
        if message.call_id:
            fields["tool_call_id"] = shown_id(message.call_id, call_format)
        return {
            "role": message.role,
            "content": self._content(message),
            **name,
            **fields,
        }

    def _definition(self, tool: FunctionTool) -> Mapping[str, object]:
        """Return a tool as the template reads it. Raises: BadInput for a control token in it."""
        definition = tool.definition
        self.checked(TextPart(text=json.dumps(definition, ensure_ascii=False), where="tools"))
        return definition

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        if isinstance(message.content, TextPart):
            return self.checked(message.content)
        parts: list[dict[str, str]] = []
        before = ""
        """End of the previous text parts: a template may join parts, so a control token may span
        two of them.
        """
        for part in message.content:
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": self.checked(part)})
                joined = before + part.text
                self.checked(TextPart(text=joined, where=part.where))
                before = joined[-self._longest_control :]
            else:
                before = ""
                parts.append({"type": "audio", "audio": "clip"})
        # Templates add tools to the system message as to a string, even if they read parts, which
        # they put together without a separator.
        if message.role == "system" and all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
        return parts


def check_encodable(part: TextPart) -> None:
    """Check that a text can be encoded. Raises: BadInput."""
    try:
        part.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(f"{part.where}: holds half of a surrogate pair", param=part.where) from error


def _examples(checkpoint: Path) -> list[str]:
    """Return the example questions in examples.json, `{"examples": [...]}`, a file that Fleet adds
    to a checkpoint; empty without the file.
    """
    listed = read_json(checkpoint / "examples.json").get("examples", [])
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise ConfigError(
            f"{checkpoint / 'examples.json'}: examples must be a list of texts", param="checkpoint"
        )
    return [str(text) for text in listed]


def audio_mark(transcript: str) -> str:
    """Return what stands for an audio clip in a prompt that people read."""
    return f"[audio: {transcript}]" if transcript else "[audio]"
