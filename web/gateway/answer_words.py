"""Times of the words of a spoken answer, where the voice tells them. Knows no request."""

import numpy as np

from fleet.core.chunk import Chunk, WireTensor

WORD_ENDS, WORDS = "word_ends", "words"

WordEnd = tuple[int, int]
"""End of a word: characters of the answer up to its end, and samples of the audio up to its end."""


class AnswerWords:
    """Words of an answer, read from the chunks of its audio. A chunk has two tensors: `word_ends`,
    int32 [words], is the position in the audio of the sample after each word; `words`, uint8, is
    the UTF-8 text of the words, each ended by a zero byte. Joined, the words are the text.
    """

    def __init__(self) -> None:
        self._ends: list[WordEnd] | None = None
        self.text = ""
        """The words so far, joined."""

    def add(self, chunk: Chunk) -> None:
        """Add the words of a chunk, if the chunk has words."""
        if WORD_ENDS not in chunk.tensors:
            return
        ends = np.frombuffer(_bytes(chunk.tensors[WORD_ENDS]), "<i4").tolist()
        words = _bytes(chunk.tensors.get(WORDS)).split(b"\0")[:-1]
        self._ends = self._ends or []
        for end, word in zip(ends, words, strict=True):
            self.text += word.decode("utf-8", "replace")
            self._ends.append((len(self.text), end))

    def ends(self, num_trimmed: int) -> list[WordEnd] | None:
        """Return the ends of the words; None if no chunk had words. `num_trimmed`: samples that
        were removed from the beginning of the audio.
        """
        if self._ends is None:
            return None
        return [(chars, max(0, end - num_trimmed)) for chars, end in self._ends]


def _bytes(tensor: WireTensor | None) -> bytes:
    return tensor.data if tensor is not None and tensor.data is not None else b""
