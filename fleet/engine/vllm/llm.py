"""The part of vLLM that the engine uses, as protocols and plain data: the rest of Fleet never
imports vLLM itself.

Source: vllm 0.32, v1/engine/llm_engine.py. Legend: n positions, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fleet.core.chunk import LOGPROBS, TOP_IDS
from fleet.engine.base import Arrays, EngineRequest

Ticket = Mapping[str, object]
"""vLLM's `kv_transfer_params`, by which another vLLM finds a prompt's blocks in the prefill half.
Private to vLLM; values are of JSON types.
"""


class LlmLogprob(Protocol):
    """Log probability of a token, and the token's rank among all, 1 for the most likely."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...


class LlmCompletion(Protocol):
    """New tokens of an answer. `logprobs`: log probabilities by token id, for each new token, if
    the request asks for them.
    """

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, LlmLogprob]] | None: ...
    @property
    def finish_reason(self) -> str | None: ...


class LlmOutput(Protocol):
    """New tokens that vLLM returns for one request. `num_cached_tokens`: number of prompt tokens
    served from the prefix cache. `kv_transfer_params`: ticket by which another vLLM reads the
    request's blocks.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def outputs(self) -> Sequence[LlmCompletion]: ...
    @property
    def finished(self) -> bool: ...
    @property
    def num_cached_tokens(self) -> int | None: ...
    @property
    def kv_transfer_params(self) -> Ticket | None: ...


class Llm(Protocol):
    """The methods of vLLM's `LLMEngine` that Fleet uses."""

    def add_request(self, request_id: str, prompt: object, params: object) -> str:
        """Return vLLM's own id of the request. Raises: ValueError if the prompt cannot be
        served.
        """
        ...

    def step(self) -> Sequence[LlmOutput]: ...

    def abort_request(self, request_ids: list[str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedRows:
    """Progress of a prompt, with hidden states of the tapped layer: the prompt is computed up to
    position `stop`.

    `llm_id`: vLLM's id of the request. `rows` float32 [n, H]: the tapped layer's inputs at
    `positions` int32 [n].
    """

    llm_id: str
    stop: int
    positions: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What vLLM is to compute for a request, besides its prompt, which ends with `num_known` tokens
    of the answer.

    `max_tokens`: the largest number of tokens after the known ones. `row_positions`: positions
    among the first `num_prompt` whose hidden states of the tapped layer are wanted; if it is None,
    the progress of the prompt is not reported either. `hands_off`: True if only the blocks are
    wanted, for another vLLM. `ticket`: ticket of the blocks to read from another vLLM. `salt`:
    number that makes the model's sampling noise differ from other stages.
    """

    request: EngineRequest
    num_known: int
    max_tokens: int
    end_ids: frozenset[int]
    num_prompt: int
    row_positions: Sequence[int] | None = None
    hands_off: bool = False
    ticket: Ticket | None = None
    salt: int = 0


def logprob_arrays(made: LlmCompletion, at: int, num_top: int | None) -> Arrays:
    """Return the output arrays of the log probabilities of new token `at`, with the `num_top` most
    likely ids; no arrays if `num_top` is None.
    """
    if num_top is None or made.logprobs is None:
        return {}
    token, listed = made.token_ids[at], made.logprobs[at]
    ranked = sorted(listed, key=lambda one: listed[one].rank or 1)[:num_top]
    logprobs = [listed[one].logprob for one in (token, *ranked)]
    return {
        LOGPROBS: np.array([logprobs], np.float32),
        TOP_IDS: np.array([ranked], np.int32).reshape(1, num_top),
    }


def token_prompt(ids: Sequence[int], arrays: Arrays) -> object:
    """Return a text-only prompt in vLLM's form."""
    return {"prompt_token_ids": list(ids)}


def no_rows(request: EngineRequest, ids: np.ndarray) -> Sequence[int] | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLlm:
    """A running vLLM engine, and access to the parts of it that differ between releases.

    `sampling_params` makes vLLM's settings of a request. `pages` returns vLLM's used and total KV
    blocks. `check_health` raises if vLLM's executor has failed. `take_rows` returns the progress of
    prompts in the last step. `num_held` counts the requests that vLLM knows, including ended ones
    whose blocks are held for another vLLM. `prefix_of` takes vLLM's id of a running request and
    returns a function that counts the request's leading positions in the prefix cache, also after
    the request's end.
    """

    llm: Llm
    vocab_size: int
    max_positions: int
    sampling_params: Callable[[Draws], object]
    pages: Callable[[], tuple[int, int]]
    check_health: Callable[[], None]
    take_rows: Callable[[], Sequence[TappedRows]] = lambda: ()
    num_held: Callable[[], int] = lambda: 0
    prefix_of: Callable[[str], Callable[[], int]] = lambda llm_id: lambda: 0
