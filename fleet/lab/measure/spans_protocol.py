"""Messages between the benchmark of layer spans and the processes that it starts.

Imports no tensor library; the benchmark itself does not either.
"""

import msgspec

Extents = tuple[tuple[int, int, int], ...]
"""Positions computed in one step, by request: (number of the page table, first position, end
position).
"""


class SpanCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of the commands; a process answers each with a `SpanReply`."""


class Connect(SpanCommand, frozen=True, kw_only=True):
    """Command with the addresses of all span workers by name. An anchor takes them as its route, in
    this order; a span worker keeps them to connect to the next worker of a route.
    """

    addresses: dict[str, tuple[str, int]]


class Answer(SpanCommand, frozen=True, kw_only=True):
    """Command to an anchor to compute `num_tokens` tokens for each of `num_requests` requests with
    prompts of `num_prompt` tokens, all together.
    """

    num_requests: int
    num_prompt: int
    num_tokens: int


class Compute(SpanCommand, frozen=True, kw_only=True):
    """Command to compute steps with the process's own layers on random hidden states of width
    `row_width`, without communication.

    `draws`: flags by step and extent, True if a token is sampled after the extent; the process with
    the output head computes logits there.
    """

    passes: tuple[Extents, ...]
    draws: tuple[tuple[bool, ...], ...]
    row_width: int


class ReadMemory(SpanCommand, frozen=True, kw_only=True):
    """Command to read every weight of the span once, and then report the process's memory."""


AnyCommand = Connect | Answer | Compute | ReadMemory


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a process in bytes. `peak`: peak of resident memory. `anonymous`: resident memory
    without a file. `weight_files`: resident memory of the checkpoint's files.

    `data`: memory that counts for RLIMIT_DATA. `weights`: size of the span's weights as loaded.
    """

    peak: int
    anonymous: int
    weight_files: int
    data: int
    weights: int = 0


class SpanReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of a process to a command. `error`: cause of a failure; empty if the command succeeded.
    `seconds`: duration of `Compute`, or from the start to the last token of `Answer`.

    `prefill_s`: time until every request has its first token. `num_decoded`: number of tokens after
    that time. `hop_s`: time of each step of an anchor from its sending to its result, minus the
    computation of the span workers. `sent_s`: time at which the anchor sent each step, on its own
    clock. `passes`: extents of each step that the anchor formed, with hidden states of width
    `row_width`. `draws`: flags by step and extent, True if a token is sampled after the extent.
    `address`: address of a span worker, in its first reply. `memory`: result of `ReadMemory`.
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
