"""Messages between the measurement of layer spans and the processes that it starts.

Loads no tensor library, nor does the measurement itself.
"""

import msgspec

Extents = tuple[tuple[int, int, int], ...]
"""Rows of a pass: for each request the number of its table, the first position and the one after
the last.
"""


class SpanCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the commands, each of which is answered by one `SpanReply`."""


class Connect(SpanCommand, frozen=True, kw_only=True):
    """Addresses of span workers by name: of an anchor's route, in order; to a worker those that it
    may have to connect to.
    """

    addresses: dict[str, tuple[str, int]]


class Answer(SpanCommand, frozen=True, kw_only=True):
    """Answer `num_requests` requests together, each of `num_prompt` tokens, with `num_tokens`."""

    num_requests: int
    num_prompt: int
    num_tokens: int


class Compute(SpanCommand, frozen=True, kw_only=True):
    """Compute passes of rows of this width, one after another, with the own layers: nothing is
    received or sent.

    Where the output head is, logits of each extent's last row are computed if it is in `draws`,
    which has a part for each pass.
    """

    passes: tuple[Extents, ...]
    draws: tuple[tuple[bool, ...], ...]
    row_width: int


class ReadMemory(SpanCommand, frozen=True, kw_only=True):
    """Read every weight of a span once, and report the memory."""


AnyCommand = Connect | Answer | Compute | ReadMemory


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `peak`: the most that was resident. Resident now: `anonymous` of no file, and
    `weight_files` of the checkpoint's files.

    `data`: what counts for the limit. `weights`: size of a span, as loaded.
    """

    peak: int
    anonymous: int
    weight_files: int
    data: int
    weights: int = 0


class SpanReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a process to a command. `error`: the cause of a failure; empty if the command
    succeeded. `seconds`: duration of `Compute`, or from the start to the last token of `Answer`.

    `prefill_s`: time until every request has its first token. `num_decoded`: the number of tokens
    after that time. `hop_s`: the time of each step of an anchor from its sending to its result,
    without the computation of the span workers. `sent_s`: the time at which the anchor sent each
    step, by its own clock. `passes`: the extents of each step that the anchor formed, of rows of
    `row_width`. `draws`: a flag for each extent of each step, True if a token is sampled after it.
    """

    seconds: float = 0.0
    prefill_s: float = 0.0
    num_decoded: int = 0
    answers: tuple[tuple[int, ...], ...] = ()
    passes: tuple[Extents, ...] = ()
    draws: tuple[tuple[bool, ...], ...] = ()
    row_width: int = 0
    hop_s: tuple[float, ...] = ()
    sent_s: tuple[float, ...] = ()
    address: tuple[str, int] | None = None
    memory: ProcessMemory | None = None
    error: str = ""
