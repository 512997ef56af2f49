"""Log probabilities of an answer's tokens in the shape of OpenAI's chat completions."""

from collections.abc import Sequence

from fleet.processing import Frontend
from web.gateway.answer_logprobs import TokenLogprob
from web.schema.responses import ChoiceLogprobs, ListedLogprob, TokenLogprobs

LEAST = -9999.0
"""Log probability of a token that is impossible, as OpenAI and vLLM write it."""


def choice_logprobs(tokens: Sequence[TokenLogprob], frontend: Frontend) -> ChoiceLogprobs:
    """Return tokens of an answer with their text, their UTF-8 bytes, and the most likely tokens at
    their places.
    """

    def listed(token: int, logprob: float) -> ListedLogprob:
        data = frontend.token_bytes(token)
        return ListedLogprob(
            token=data.decode("utf-8", "replace"), logprob=max(logprob, LEAST), bytes=list(data)
        )

    content: list[TokenLogprobs] = []
    for one in tokens:
        own = listed(one.token, one.logprob)
        content.append(
            TokenLogprobs(
                token=own.token,
                logprob=own.logprob,
                bytes=own.bytes,
                top_logprobs=[listed(token, logprob) for token, logprob in one.top],
            )
        )
    return ChoiceLogprobs(content=content)
