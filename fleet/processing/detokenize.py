"""Incremental decoding of token ids to text, and the end of an answer at a stop string. Knows no
model and no request.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_HELD = 3
"""Most tokens that are held back for an incomplete UTF-8 character: it lacks at most three bytes,
and each byte is at most one token.
"""


class IncrementalDetokenizer:
    """Detokenizer that decodes a sliding window of the last ids and releases the text that later
    ids cannot change.

    Invariants: the released pieces joined, `finish()` included, equal the decoding of all ids
    together; no piece ends inside a character. The window begins with the previous released piece
    as context, since some decoders drop a leading space. Decoders with byte fallback write U+FFFD
    for every byte in a run of byte tokens whose end is incomplete, even for bytes of the context.

    `shown`: texts of control tokens that are part of the text; others are left out.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = _special_ids(tokenizer, shown) if shown else {}
        self._window: list[int] = []
        self._num_settled = 0
        """Ids at the head of the window that serve as context only."""
        self._num_released = 0
        """Characters of the window's own text (beyond the context) already released."""
        self._num_unsure = 0
        """Ids since the text last ended in a complete character."""

    def begin_after(self, ids: Sequence[int]) -> None:
        """Set the ids that precede the text. The last one must end a complete character."""
        self._window, self._num_settled = list(ids), len(ids)

    def add(self, ids: Sequence[int]) -> str:
        return "".join(self._add_one(token_id) for token_id in ids)

    def finish(self) -> str:
        released, self._num_released = self._num_released, 0
        text = self._own_text()
        self._window.clear()
        self._num_settled = self._num_unsure = 0
        return text[released:]

    def _add_one(self, token_id: int) -> str:
        if token_id in self._shown:
            return self.finish() + self._shown[token_id]
        self._window.append(token_id)
        text = self._own_text()
        held = len(text) - len(text.rstrip(REPLACEMENT))
        self._num_unsure = self._num_unsure + 1 if held else 0
        # not the start of a character, though its last bytes may be
        if self._num_unsure > MAX_HELD:
            held = min(held, MAX_HELD)
        piece = text[self._num_released : len(text) - held]
        self._num_released += len(piece)
        if held == 0 and text:
            self._window = self._window[self._num_settled :]
            self._num_settled = len(self._window)
            self._num_released = 0
        return piece

    def _own_text(self) -> str:
        decode = self._tokenizer.decode
        context = decode(self._window[: self._num_settled], skip_special_tokens=True)
        return decode(self._window, skip_special_tokens=True)[len(context) :]


def _special_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[int, str]:
    """Return the texts that are control tokens of the tokenizer, by their ids."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        number: token.content for number, token in added if token.special and token.content in texts
    }


class StopTrimmer:
    """Filter that passes an answer's text through up to the first stop string, and holds back text
    that could be the beginning of one.

    Invariants: released text contains no stop string, and no part of the stop string that ended the
    answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
