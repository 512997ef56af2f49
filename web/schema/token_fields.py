"""Fields of a chat about single tokens of its answer: biases, cuts, ends, log probabilities. Data
only; the ids are checked in `web/gateway/token_sampling.py`.

Sources: openai 3.57 types (`logit_bias`, `logprobs`, `top_logprobs`), vllm 0.32 (the others).
"""

from typing import Annotated

from pydantic import BeforeValidator, Field

from fleet.core.errors import BadInput
from web.http.json_bounds import max_keys
from web.schema.body import Body
from web.schema.unserved import EMPTY

MAX_BIASES = 300
MAX_WORDS = 256
MAX_ALLOWED = 1024
MAX_LOGPROBS = 20


def unset(value: object) -> object:
    """Return None for a value that clients send for an unset field. A JSON schema of neutral
    values, such as {"const": null}, is none of these.
    """
    return None if value is False or value in EMPTY else value


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
Unset = BeforeValidator(unset)


class TokenFields(Body):
    """Fields about single tokens. `logit_bias` has token ids as keys."""

    min_p: Annotated[Annotated[float, Field(ge=0, le=1)] | None, Unset] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, Unset, max_keys(MAX_BIASES)
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Field(max_length=MAX_ALLOWED, fail_fast=True)] | None, Unset
    ] = None
    bad_words: Annotated[
        Annotated[list[Word], Field(max_length=MAX_WORDS, fail_fast=True)] | None, Unset
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Field(max_length=MAX_WORDS, fail_fast=True)] | None, Unset
    ] = None


class LogprobFields(Body):
    """Fields that ask for log probabilities."""

    logprobs: bool | None = None
    top_logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, Unset] = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to list for each token, beside the log probability of the
        token itself; None if no log probabilities are wanted. Raises: BadInput.
        """
        if not self.logprobs and self.top_logprobs:
            raise BadInput("top_logprobs: needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
