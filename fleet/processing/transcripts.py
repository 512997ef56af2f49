"""Transcripts of a prompt's audio clips, in the place of the clips. Knows no recogniser."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fleet.core.errors import ChunkOrderError
from fleet.processing.tokenizer import load_tokenizer, token_ids


def literal_tokenizer(checkpoint: Path) -> Tokenizer:
    """Load a checkpoint's tokenizer so that it encodes the text of a control token as ordinary
    text.

    Raises: ConfigError as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.encode_special_tokens = True
    return tokenizer


def insert_transcripts(
    prompt_ids: Sequence[int], clip_id: int, texts: Sequence[str], tokenizer: Tokenizer
) -> list[int]:
    """Return a prompt with each placeholder `clip_id` replaced by the tokens of its clip's text. A
    placeholder without a text, or with an empty one, is removed. `tokenizer`: a
    `literal_tokenizer`, since whatever a user says is text.
    """
    ids: list[int] = []
    left = iter(texts)
    for token in prompt_ids:
        if token != clip_id:
            ids.append(token)
        elif text := next(left, ""):
            ids += transcript_ids(tokenizer, text)
    return ids


def transcript_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a transcript, as they stand in a prompt. `tokenizer`: a
    `literal_tokenizer`.
    """
    return token_ids(tokenizer, text, "messages") if text else []


class Transcripts:
    """The texts of a prompt's clips, from pieces in the order in which they were recognised."""

    def __init__(self, num_clips: int) -> None:
        self._texts = [bytearray() for _ in range(num_clips)]

    def add(self, arrays: Mapping[str, np.ndarray]) -> list[tuple[int, str]]:
        """Append the pieces in a chunk to the texts of their clips; return (clip index, text) of
        each piece. Shapes: `clip`, `sizes` int32 [pieces], `text` uint8 [bytes].

        Raises: ChunkOrderError if the pieces do not fit together.
        """
        raw = arrays["text"].tobytes() if "text" in arrays else b""
        clips = arrays["clip"].tolist() if "clip" in arrays else []
        sizes = arrays["sizes"].tolist() if "sizes" in arrays else [len(raw)] * min(1, len(clips))
        is_whole = len(sizes) == len(clips) and sum(sizes) == len(raw)
        if not is_whole or not all(0 <= clip < len(self._texts) for clip in clips):
            raise ChunkOrderError(
                f"a transcript of clips {clips} with sizes {sizes} does not fit its {len(raw)} "
                f"bytes and the {len(self._texts)} clips of the prompt"
            )
        added: list[tuple[int, str]] = []
        for clip, size in zip(clips, sizes, strict=True):
            piece, raw = raw[:size], raw[size:]
            self._texts[clip] += piece
            added.append((clip, piece.decode("utf-8", "replace")))
        return added

    def texts(self) -> list[str]:
        """Return the text of each clip, without surrounding blanks."""
        return [raw.decode("utf-8", "replace").strip() for raw in self._texts]
