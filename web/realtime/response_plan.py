"""Parameters of a response, and the times of its turn. Data only."""

from dataclasses import dataclass

from web.realtime.audio.formats import AudioFormat, PcmFormat
from web.realtime.session_tools import ToolSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan:
    """Parameters of a response. `form` is the format in which the client gets its audio.
    `skip_samples` and `skip_chars` are the part of the generation that an earlier response has
    sent, if this response continues it.
    `instructions` replace the session's instructions unless None. `own_input` is True if the
    response does not answer the conversation, but an input of its own. `ignored` lists fields of
    the request that have no effect. `tools`: functions that it may call.
    """

    spoken: bool
    in_conversation: bool
    conversation_id: str
    max_output_tokens: int | str = "inf"
    voice: str = ""
    form: AudioFormat = PcmFormat()
    speed: float = 1.0
    instructions: str | None = None
    own_input: bool = False
    metadata: dict[str, str] | None = None
    skip_samples: int = 0
    skip_chars: int = 0
    ignored: tuple[str, ...] = ()
    tools: ToolSettings = ToolSettings()


@dataclass(slots=True, kw_only=True)
class TurnTimestamps:
    """Times of a turn and its response, for their latency. Units: seconds of the session's clock;
    None if unknown or not reached.

    `voiced_end` is the time at which the last voiced sample of the user's turn arrived,
    `voiced_end_ms` its position in the session's input. `decided` is the time at which the turn was
    found to be over, `first_sent` the time of the first output, and `first_voiced` the time at
    which a client that plays without delay plays the first voiced sample.
    """

    voiced_end: float | None = None
    voiced_end_ms: int | None = None
    decided: float
    first_sent: float | None = None
    first_voiced: float | None = None
