"""Resolution of a request's fields about single tokens to token ids. Knows no stage."""

from collections.abc import Iterator

import msgspec

from fleet.core.errors import SHOWN_CHARS, BadInput, UnsupportedValue
from fleet.core.request import Sampling
from fleet.processing import Frontend
from web.schema.chat import AnswerOptions
from web.schema.token_fields import TokenFields


def with_token_fields(
    sampling: Sampling, body: AnswerOptions, frontend: Frontend, *, spoken: bool
) -> Sampling:
    """Return the main stage's sampling with the request's fields about single tokens. `spoken`:
    True if the answer has audio.

    Raises: BadInput naming an id outside the vocabulary, or a word without tokens; UnsupportedValue
    for log probabilities of a spoken answer.
    """
    if body.num_logprobs is not None and spoken:
        raise UnsupportedValue(
            "logprobs: not served with speech; ask for text alone", param="logprobs"
        )
    stops, allowed = body.stop_token_ids or (), body.allowed_token_ids or ()
    sampling = msgspec.structs.replace(
        sampling,
        min_p=sampling.min_p if body.min_p is None else body.min_p,
        logit_bias=tuple(_biases(body)),
        bad_words=frontend.word_ids(body.bad_words, "bad_words") if body.bad_words else (),
        stop_token_ids=tuple(sorted(set(stops))),
        allowed_token_ids=tuple(sorted(set(allowed))),
        top_logprobs=body.num_logprobs,
    )
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "stop_token_ids": stops,
        "allowed_token_ids": allowed,
    }
    for where, ids in named.items():
        for token in ids:
            if token >= frontend.num_ids:
                raise BadInput(
                    f"{where}: {token} is no token of this model, whose ids are 0 to "
                    f"{frontend.num_ids - 1}",
                    param=where,
                )
    return sampling


def _biases(body: TokenFields) -> Iterator[tuple[int, float]]:
    """Yield the biases by token id. Raises: BadInput for a key that is no token id."""
    seen: set[int] = set()
    for key, bias in (body.logit_bias or {}).items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else None
        if token is None or token in seen:
            where = f"logit_bias.{key[:SHOWN_CHARS]}"
            raise BadInput(f"{where}: keys are token ids, each once", param=where)
        seen.add(token)
        yield token, bias
