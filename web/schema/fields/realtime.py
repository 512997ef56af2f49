"""Field tables of the client's Realtime events, session settings, and client secrets. Data only.
Source: openai 3.57 types.
"""

from web.schema.fields.audio import HINTS, PROMPT_RULE
from web.schema.fields.chat import CHOICE_SERVED, TOOLS_SERVED
from web.schema.fields.common import CONSTRAINTS, IMAGES, RULES
from web.schema.fields.table import (
    Field,
    FieldTable,
    ignored,
    refused,
    refused_by_value,
    served,
    under,
)

_SAMPLING = "voice answers use the checkpoint's own sampling; remove it"
_PROMPT = "no prompts are stored here; send the text itself as instructions"
_REASONING = "thinking cannot be turned on, off or down here; remove it"
_MCP = "servers of tools (MCP) are not called here; call them in the client, as functions"
_BETA = "a field of the beta dialect; use {}"

_FORMAT = [
    *served("format"),
    *served("format.type", "audio/pcm, and G.711 as audio/pcmu and audio/pcma"),
    *served("format.rate", "G.711 has 8000; PCM16 is sent at 24000, and read at 8000 to 48000"),
]
_VOICE = served("voice voice.id")
_ANSWER: list[Field] = [
    *served("instructions output_modalities"),
    *served("max_output_tokens", "limited by the server"),
    *refused_by_value("tools", TOOLS_SERVED),
    *refused_by_value("tool_choice", CHOICE_SERVED),
    *served("parallel_tool_calls", "false: at most one call"),
    *refused("reasoning", _REASONING, accepted=()),
    *refused("prompt", _PROMPT, accepted=()),
    *refused("temperature top_p seed", _SAMPLING),
]
"""Fields that both a session and a single response may have."""

_TRANSCRIPTION: list[Field] = [
    *served("model", "a name under which this server answers"),
    *served("language", "one of the checkpoint's languages; by default the model detects it"),
    *refused("languages", "send the one that is spoken as language"),
    *refused_by_value("prompt", PROMPT_RULE),
    *refused("keywords", HINTS),
    *refused("delay", "a turn is transcribed when it has ended; remove it"),
]
_DETECTION = served(
    "type threshold prefix_padding_ms silence_duration_ms idle_timeout_ms create_response "
    "interrupt_response eagerness"
)

_SESSION: list[Field] = [
    *served("type", "realtime or transcription; fixed once the session has an item"),
    *served("store", "false: what is said is not kept after the end, and nothing is trained on it"),
    *served("model", "a name under which this server answers"),
    *ignored(
        "id object expires_at client_secret warnings",
        "set by the server; a client sends back what it was sent",
    ),
    *_ANSWER,
    *refused_by_value("truncation", "auto and disabled are accepted; a retention ratio is refused"),
    *refused("include", "logprobs of transcripts are not sent; remove it"),
    *ignored("tracing", "about OpenAI's page of traces; here every request has a page of its own"),
    *served("audio audio.input audio.output"),
    *under("audio.input", _FORMAT, served("transcription turn_detection")),
    *under("audio.input.transcription", _TRANSCRIPTION),
    *under("audio.input.turn_detection", _DETECTION),
    *refused(
        "audio.input.noise_reduction",
        "audio is not filtered; turn it off, or filter it in the client",
    ),
    *under(
        "audio.output",
        _FORMAT,
        _VOICE,
        refused_by_value(
            "speed",
            "0.25 to 1.5, from the next response on; models whose voice has one speed accept 1.0",
        ),
    ),
    *refused_by_value("modalities", _BETA.format("output_modalities")),
    *refused_by_value("input_audio_format", _BETA.format("audio.input.format")),
    *refused_by_value("output_audio_format", _BETA.format("audio.output.format")),
    *refused_by_value("turn_detection", _BETA.format("audio.input.turn_detection")),
    *refused("voice", _BETA.format("session.audio.output.voice")),
    *refused("speed", _BETA.format("session.audio.output.speed"), accepted=(1,)),
    *refused("input_audio_transcription", _BETA.format("session.audio.input.transcription")),
    *refused("input_audio_noise_reduction", _BETA.format("session.audio.input.noise_reduction")),
    *refused(
        "max_response_output_tokens", _BETA.format("session.max_output_tokens"), accepted=("inf",)
    ),
]

_ITEM: list[Field] = [
    *served(
        "type",
        "message, and item_reference in response.input; function_call and function_call_output for "
        "a model that calls functions",
    ),
    *served("id role content content[].type content[].text content[].audio content[].transcript"),
    *refused("content[].image_url", IMAGES),
    *ignored("content[].detail", "about images, which are refused"),
    *ignored("object status", "OpenAI's reference says that they have no effect"),
    *served("call_id name arguments output", "of a function call, and of its result"),
    *refused("approval_request_id approve reason server_label tools error", _MCP),
]

_RESPONSE: list[Field] = [
    *served("conversation input metadata"),
    *under("input[]", _ITEM),
    *_ANSWER,
    *served("audio audio.output"),
    *under("audio.output", _FORMAT, _VOICE),
    *refused_by_value("modalities", _BETA.format("output_modalities")),
    *refused_by_value("output_audio_format", _BETA.format("audio.output.format")),
    *refused_by_value("voice", _BETA.format("audio.output.voice")),
    *refused_by_value("max_response_output_tokens", _BETA.format("max_output_tokens")),
]

_CONSTRAINTS = [
    row
    for row in (*RULES, *CONSTRAINTS)
    if row.path not in {own.path for own in (*_SESSION, *_RESPONSE)}
]
_EVENT = served("type event_id")

SESSION = FieldTable("session.update: session", under("session", _SESSION, _CONSTRAINTS))
SECRET = FieldTable(
    "POST /v1/realtime/client_secrets",
    served("expires_after expires_after.anchor expires_after.seconds session"),
    under("session", _SESSION, _CONSTRAINTS),
)
WEBRTC = FieldTable(
    "POST /v1/realtime/calls",
    served("sdp"),
    served("session", "as in session.update"),
)
EVENTS: dict[str, FieldTable] = {
    kind: FieldTable(kind, _EVENT, rows)
    for kind, rows in {
        "session.update": served("session"),
        "input_audio_buffer.append": served("audio"),
        "input_audio_buffer.commit": [],
        "input_audio_buffer.clear": [],
        "output_audio_buffer.clear": [],
        "conversation.item.create": served("previous_item_id item") + under("item", _ITEM),
        "conversation.item.delete": served("item_id"),
        "conversation.item.retrieve": served("item_id"),
        "conversation.item.truncate": served("item_id content_index audio_end_ms"),
        "response.create": served("response") + under("response", _RESPONSE, _CONSTRAINTS),
        "response.cancel": served("response_id"),
        "fleet.played": served("response_id samples underruns buffer_ms"),
    }.items()
}
"""Field table of each event type. The settings in a `session.update` have the table `SESSION`,
since each of their fields is refused alone.
"""
CALL = FieldTable(
    "WS /v1/telephone/twilio: custom parameters",
    served("key", "the API key or a client secret"),
    served("model", "a name under which this server answers"),
    served("voice instructions"),
)
QUERY = FieldTable(
    "WS /v1/realtime: query",
    served("model", "a name under which this server answers"),
    served("session response samples chars", "resume a session"),
    served("fleet", "1: extensions are sent"),
    served("intent", "conversation, or transcription for a session of that type"),
    refused("call_id", "a call has its events in its own data channel; connect without it"),
    ignored("api-version", "names the version of Azure's API; the events here have one"),
)
