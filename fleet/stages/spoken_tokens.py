"""The tokens of an answer that are spoken: those before its first function call. Knows no edge."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer

from fleet.core.request import ToolUse
from fleet.processing.detokenize import IncrementalDetokenizer
from fleet.processing.tool_calls.formats import FORMATS
from fleet.processing.tool_calls.parser import CallEvent, CallParser, Said


class SpokenTokens:
    """Filter of one answer's tokens. Tokens whose text may belong to a call are held back until
    later ones decide. The result depends on the tokens alone, so it is the same after a recovery.
    """

    def __init__(self, tools: ToolUse, tokenizer: Callable[[], Tokenizer]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer(), FORMATS[tools.format].markers)
        self._parser = CallParser(tools)
        self._held: deque[tuple[int, int]] = deque()
        """Tokens held back, each with the length of the answer's text up to its end."""
        self._num_chars, self._num_said = 0, 0

    @property
    def has_ended(self) -> bool:
        """True once a call has begun: nothing after it is spoken."""
        return self._parser.num_calls > 0

    def add(self, token: int) -> Iterator[int]:
        """Add the next token; yield the tokens that are certainly spoken. Consume the iterator
        before the next call.
        """
        text = self._detokenizer.add([token])
        self._num_chars += len(text)
        self._held.append((token, self._num_chars))
        return self._released(self._parser.add(text))

    def finish(self) -> Iterator[int]:
        """Yield the held-back tokens that are spoken after all. Call after the last token."""
        return self._released(self._parser.finish())

    def _released(self, events: Sequence[CallEvent]) -> Iterator[int]:
        self._num_said += sum(len(event.text) for event in events if isinstance(event, Said))
        while self._held and self._held[0][1] <= self._num_said:
            yield self._held.popleft()[0]
