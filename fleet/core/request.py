"""A client's request, as every process reads it. Knows no HTTP and no model: sampling settings are
keyed by stage name.
"""

from hashlib import blake2b
from typing import Literal

import msgspec

from fleet.core.ids import EdgeName, RequestId, StageName


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """Rule for the whole text of an answer. `kind` is the language of `text`: a JSON schema (for
    any object, `{"type": "object"}`), a regular expression, or a grammar in the form of Lark or of
    llama.cpp (GBNF).
    """

    kind: Literal["json", "regex", "grammar"]
    text: str


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer may call functions. `format`: name of the form in which the model writes calls
    (`fleet/processing/tool_calls/formats.py`). `names`: functions that may be called. `max_calls`:
    most calls of one answer, 0 for any number.
    """

    format: str
    names: tuple[str, ...]
    max_calls: int = 0


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one stage, and the limit of its output.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens` counts as
    `max_new_tokens` of `transformers` does, the end token included. `seed` keys the counter-based
    noise (seed, stage, codebook, index). Before `min_tokens` no end token is sampled and stop
    strings do not count; with `ignore_eos` no end token is ever sampled. With a `constraint` only
    tokens that keep its rule are sampled, and the answer ends where the rule allows no more, or on
    the shortest way when `max_tokens` is near.

    The last fields are about single token ids. `min_p`: share of the highest probability below
    which no token is sampled; 0 is off. `logit_bias`: numbers added to the logits of ids before all
    else. `allowed_token_ids`: the only ids that are sampled; () for all. `bad_words`: sequences of
    ids that are never completed. `stop_token_ids`: ids that end the answer, as its last token, and
    are not sampled before `min_tokens`. `top_logprobs`: number of most likely ids whose log
    probabilities are given beside each token's own; None for no log probabilities at all.
    `logprob_ids`: ids whose log probabilities are given instead of the most likely ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 0
    stop: tuple[str, ...] = ()
    constraint: Constraint | None = None
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    logprob_ids: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if the fields about single token ids, from `min_p` on, have their default values."""
        return not (
            self.min_p
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.stop_token_ids
            or self.top_logprobs is not None
        )

    def may_end(self, num_drawn: int) -> bool:
        """Return True if the next token, after `num_drawn` sampled tokens, may be an end token."""
        return not self.ignore_eos and num_drawn >= self.min_tokens


NUM_CONTINUED = 8


def session_name(key: str) -> str:
    """Return the internal name of the conversation that clients call `key`: a digest, which is safe
    in a Redis key.
    """
    return blake2b(key.encode(), digest_size=16).hexdigest()


class AudioClip(msgspec.Struct, frozen=True, kw_only=True):
    """Audio clip of a prompt. Its samples, mono float32 at `rate_hz`, are in the request's blob."""

    offset_samples: int
    num_samples: int
    rate_hz: int


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request. `prompt_ids`: token ids of the prompt, with one placeholder id per audio
    position. `outputs`: requested client edges.

    `reply`: state from which another gateway can continue the answer; no worker reads it.
    `session`: name of the conversation whose earlier turns this prompt begins with; "" without one.
    `kind` (text, speech, voice, transcription), `model`, `retry_of` and `body` (the client's
    request without its audio): data for operators who search for the request. `given`: tokens with
    which the main stage's answer begins, as if they had been sampled. Sampling continues after
    them, unless the last token ends an answer; stop strings are matched only in sampled text.
    `stages`: stages that the request runs, decided where it is submitted; () for all stages that
    its outputs and inputs need (`Graph.stages_of`). `speech_text`: text to speak instead of an
    answer of the main stage, for a graph whose speaking stage reads text. `continues`: True if the
    answer continues the prompt's last message, instead of beginning a new one. `key`: name of the
    API key that sent the request; "" without keys. `is_counted`: True if the request counts towards
    the limits of that key; False for requests of voice sessions. `audio_hz`: sample rate of the
    spoken answer; 0 without. `tools`: functions that the answer may call; a call is never spoken.
    `traceparent`: the caller's span as `core/trace_context.py` reads it; "" without one.

    Units: `created_us` is in wall-clock microseconds since 1970.
    """

    id: RequestId
    graph: str
    prompt_ids: tuple[int, ...]
    audio: tuple[AudioClip, ...] = ()
    outputs: tuple[EdgeName, ...] = ()
    sampling: dict[StageName, Sampling] = {}
    params: dict[str, str] = {}
    reply: dict[str, str] = {}
    session: str = ""
    kind: str = ""
    model: str = ""
    retry_of: str = ""
    given: tuple[int, ...] = ()
    body: str = ""
    created_us: int = 0
    version: int = 1
    stages: tuple[StageName, ...] = ()
    speech_text: str = ""
    continues: bool = False
    key: str = ""
    is_counted: bool = False
    audio_hz: int = 0
    tools: ToolUse | None = None
    traceparent: str = ""

    @property
    def continued_ids(self) -> tuple[int, ...]:
        """The last token ids, at most `NUM_CONTINUED`, of the message that the answer continues;
        they decide how its first token is written. () for an answer that begins a new message.
        """
        last = self.prompt_ids[-NUM_CONTINUED:] if self.continues else ()
        return tuple(token for token in last if token >= 0)

    @property
    def prompt_audio_ms(self) -> int:
        """Duration of the audio in the prompt."""
        return sum(clip.num_samples * 1000 // clip.rate_hz for clip in self.audio)


_encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(RequestSpec).decode


def encode_request(spec: RequestSpec) -> bytes:
    return _encoder.encode(spec)
