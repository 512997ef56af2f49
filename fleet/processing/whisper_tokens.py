"""Special tokens of a Whisper checkpoint, read from its own files. Knows no weights.

Source: transformers 5.23, models/whisper/generation_whisper.py (`_retrieve_init_tokens`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fleet.core.errors import BadInput, ConfigError, quoted
from fleet.processing.template import read_json
from fleet.processing.tokenizer import load_tokenizer

GENERATION = "generation_config.json"
TRANSCRIBE = "transcribe"
START_OF_PREVIOUS = "<|startofprev|>"
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTokens:
    """Ids of a checkpoint's special tokens; None for a token that the checkpoint lacks. Ids below
    `end` are text.

    `languages`: id of each language's token by ISO code; empty for a model of English only.
    `no_speech`: id of a token that stands for a window without speech, and is never sampled.
    `timestamp_begin`: id of the timestamp 0.00; each further id is 20 ms later. `suppressed`: ids
    that are never sampled; `suppressed_first`: further ids that never come first in a window.
    `last_first_timestamp`: largest id with which a window with timestamps may begin; None for no
    limit.
    """

    start: int
    end: int
    start_of_previous: int | None
    transcribe: int | None
    no_timestamps: int
    languages: Mapping[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    last_first_timestamp: int | None

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    @property
    def timestamp_begin(self) -> int:
        return self.no_timestamps + 1

    def language_id(self, language: str) -> int | None:
        """Return the id of a language's token; None for a model of English only, which has no such
        tokens. Raises: BadInput naming the known languages.
        """
        code = language.strip().lower()
        known = self.languages or {"en": None}
        if code not in known:
            raise BadInput(
                f"language: {quoted(language)} is not a language of this recogniser; it knows the "
                f"ISO codes {', '.join(sorted(known))}",
                param="language",
            )
        return known[code]


def read_whisper_tokens(folder: Path) -> WhisperTokens:
    """Read the special tokens of a checkpoint. Raises: ConfigError naming the file and the missing
    key.
    """
    config = read_json(folder / "config.json") | read_json(folder / GENERATION)
    languages, tasks = _ids_by_name(config, "lang_to_id"), _ids_by_name(config, "task_to_id")
    no_timestamps = _id(folder, config, "no_timestamps_token_id")
    first = config.get("max_initial_timestamp_index")
    previous = config.get("prev_sot_token_id")
    if previous is None:
        previous = load_tokenizer(folder).token_to_id(START_OF_PREVIOUS)
    if languages and TRANSCRIBE not in tasks:
        raise _missing(folder, f"task_to_id.{TRANSCRIBE}")
    return WhisperTokens(
        start=_id(folder, config, "decoder_start_token_id"),
        end=_id(folder, config, "eos_token_id"),
        start_of_previous=previous if isinstance(previous, int) else None,
        transcribe=tasks.get(TRANSCRIBE),
        no_timestamps=no_timestamps,
        languages={
            match[1]: token
            for name, token in languages.items()
            if (match := _LANGUAGE.fullmatch(name)) is not None
        },
        suppressed=_ids(config, "suppress_tokens"),
        suppressed_first=_ids(config, "begin_suppress_tokens"),
        last_first_timestamp=no_timestamps + 1 + first if isinstance(first, int) else None,
    )


def _id(folder: Path, config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if isinstance(value, list):
        value = next(iter(cast("list[object]", value)), None)
    if not isinstance(value, int):
        raise _missing(folder, key)
    return value


def _missing(folder: Path, key: str) -> ConfigError:
    return ConfigError(
        f"checkpoint {folder}: {GENERATION} has no {key}; give a Whisper checkpoint as "
        "`transformers` publishes it",
        param="checkpoint",
    )


def _ids(config: Mapping[str, object], key: str) -> tuple[int, ...]:
    return tuple(int(str(one)) for one in cast("list[object]", config.get(key) or ()))


def _ids_by_name(config: Mapping[str, object], key: str) -> dict[str, int]:
    found = cast("Mapping[str, object]", config.get(key) or {})
    return {name: int(str(token)) for name, token in found.items()}
