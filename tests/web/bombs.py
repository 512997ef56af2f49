"""Small HTTP bodies and WebSocket events that would cost an unprotected gateway much memory or
time. Sends nothing.

`BODIES` and `EVENTS` list the bombs with the refusal that each gets. All fit the default limits of
a deployment.
"""

import base64
import io
import wave
from collections.abc import Callable
from dataclasses import dataclass

from fleet.config.schema import Limits

MIB = 1024 * 1024
CHAT, SPEECH, TRANSCRIPTIONS = (
    "/v1/chat/completions",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
)
SECRETS, JOBS = "/v1/realtime/client_secrets", "/v1/fleet/jobs"
JSON, FORM = "application/json", "multipart/form-data; boundary=bomb"
MAX_BODY_BYTES = Limits().max_body_bytes
CHAT_HEAD = b'{"model":"omni","messages":[{"role":"user","content":"hello"}],'
SPEECH_HEAD = b'{"model":"omni","input":"hello",'
EMOJI = "\N{GRINNING FACE}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bomb:
    """A costly HTTP body or WebSocket event, and the refusal that it must get. `message`: part of
    the refusal's text. `path` and `media_type`: route and type of a body; unused for an event.
    """

    name: str
    make: Callable[[], bytes]
    status: int
    message: str
    path: str = ""
    media_type: str = JSON

    def __str__(self) -> str:
        return self.name


def filled(head: bytes, unit: bytes, tail: bytes, size: int = MAX_BODY_BYTES) -> bytes:
    """Return `head`, then `unit` as often as fits, then `tail`: up to `size` bytes in all."""
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def keys(head: bytes, num: int, tail: bytes, value: bytes = b'""') -> bytes:
    return head + b",".join(b'"k%d":%s' % (index, value) for index in range(num)) + tail


def part(headers: bytes, content: bytes = b"x", num: int = 1) -> bytes:
    """Return a multipart form of `num` equal parts."""
    return b"--bomb\r\n%b\r\n\r\n%b\r\n" % (headers, content) * num + b"--bomb--\r\n"


def field(name: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="%b"' % name


def wav_base64(num_bytes: int) -> bytes:
    """Return a WAV file of silence in base64."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48_000)
        file.writeframes(bytes(num_bytes))
    return base64.b64encode(buffer.getvalue())


def audio_chat(num_bytes: int) -> bytes:
    """Return a legitimate chat request with about `num_bytes` of audio."""
    audio = b'{"type":"input_audio","input_audio":{"format":"wav","data":"%b"}}' % wav_base64(
        num_bytes
    )
    return b'{"model":"omni","messages":[{"role":"user","content":[%b]}]}' % audio


TOO_MANY, TOO_WIDE, TOO_LONG = (
    "more than 65536 JSON values",
    "characters beyond ASCII",
    "bytes beside strings",
)
UNTYPED_PART = b'{"model":"omni","messages":[{"role":"user","content":[{"type":"'

BODIES = (
    Bomb(
        name="messages of numbers",
        path=CHAT,
        status=413,
        message=TOO_MANY,
        make=lambda: filled(b'{"model":"omni","messages":[', b"0,", b"0]}", MIB),
    ),
    Bomb(
        name="messages of numbers below the bound",
        path=CHAT,
        status=400,
        message="messages[0]: Input should be",
        make=lambda: filled(b'{"model":"omni","messages":[', b"0,", b"0]}", 128_000),
    ),
    Bomb(
        name="parts of numbers below the bound",
        path=CHAT,
        status=400,
        message="messages[0].content[0]: Input should be",
        make=lambda: filled(
            b'{"model":"omni","messages":[{"role":"user","content":[', b"0,", b"0]}]}", 128_000
        ),
    ),
    Bomb(
        name="empty lists",
        path=CHAT,
        status=413,
        message=TOO_MANY,
        make=lambda: filled(CHAT_HEAD + b'"x":[', b"[],", b"0]}"),
    ),
    Bomb(
        name="lists within lists",
        path=CHAT,
        status=413,
        message=TOO_MANY,
        make=lambda: b"[" * MAX_BODY_BYTES,
    ),
    Bomb(
        name="one key again and again",
        path=CHAT,
        status=413,
        message=TOO_MANY,
        make=lambda: filled(CHAT_HEAD, b'"x":{},', b'"x":1}'),
    ),
    Bomb(
        name="quotes", path=CHAT, status=413, message=TOO_MANY, make=lambda: b'"' * MAX_BODY_BYTES
    ),
    Bomb(
        name="unknown fields",
        path=CHAT,
        status=400,
        message="more than 256 unknown fields",
        make=lambda: keys(CHAT_HEAD, 60_000, b"}"),
    ),
    Bomb(
        name="values of logit_bias",
        path=CHAT,
        status=400,
        message="logit_bias: 60000 keys; at most 300",
        make=lambda: keys(CHAT_HEAD + b'"logit_bias":{', 60_000, b"}}"),
    ),
    Bomb(
        name="sections of a chat's fleet",
        path=CHAT,
        status=400,
        message="fleet: 60000 keys; at most 64",
        make=lambda: keys(CHAT_HEAD + b'"fleet":{', 60_000, b"}}"),
    ),
    Bomb(
        name="long number",
        path=CHAT,
        status=413,
        message=TOO_LONG,
        make=lambda: filled(CHAT_HEAD + b'"n":', b"9", b"}"),
    ),
    Bomb(
        name="numbers of many digits",
        path=CHAT,
        status=413,
        message=TOO_LONG,
        make=lambda: filled(CHAT_HEAD + b'"x":[', b"9" * 4_000 + b",", b"0]}"),
    ),
    Bomb(
        name="white space",
        path=CHAT,
        status=413,
        message=TOO_LONG,
        make=lambda: b" " * MAX_BODY_BYTES,
    ),
    Bomb(
        name="text of four bytes a character",
        path=CHAT,
        status=413,
        message=TOO_WIDE,
        make=lambda: filled(b'{"x":"' + EMOJI, b"a", b'"}'),
    ),
    Bomb(
        name="escaped text",
        path=CHAT,
        status=413,
        message=TOO_WIDE,
        make=lambda: filled(b'{"x":"', b"\\ud83d\\ude00", b'"}'),
    ),
    Bomb(
        name="text in no known field",
        path=CHAT,
        status=400,
        message="model: this field is required",
        make=lambda: filled(b'{"x":"', b"a", b'"}'),
    ),
    Bomb(
        name="long type of a part",
        path=CHAT,
        status=400,
        message="messages[0].content[0]: Input tag",
        make=lambda: filled(UNTYPED_PART, b"a", b'"}]}]}'),
    ),
    Bomb(
        name="sections of a speech's fleet",
        path=SPEECH,
        status=413,
        message=TOO_MANY,
        make=lambda: keys(SPEECH_HEAD + b'"fleet":{', 120_000, b"}}", b"0"),
    ),
    Bomb(
        name="fields of a section",
        path=SPEECH,
        status=400,
        message="fleet.talker: 60000 keys; at most 64",
        make=lambda: keys(SPEECH_HEAD + b'"fleet":{"talker":{', 60_000, b"}}}", b"0"),
    ),
    Bomb(
        name="lists in a speech",
        path=SPEECH,
        status=413,
        message=TOO_MANY,
        make=lambda: filled(SPEECH_HEAD + b'"x":[', b"[],", b"0]}"),
    ),
    Bomb(
        name="modalities of a client secret",
        path=SECRETS,
        status=413,
        message=TOO_MANY,
        make=lambda: filled(b'{"session":{"output_modalities":[', b"0,", b"0]}}", 250_000),
    ),
    Bomb(
        name="lists in a job",
        path=JOBS,
        status=400,
        message="arguments.streams: ",
        make=lambda: filled(b'{"kind":"bench","arguments":{"streams":[', b"[],", b"0]}}", 60_000),
    ),
    Bomb(
        name="fields of a form",
        path=TRANSCRIPTIONS,
        media_type=FORM,
        status=400,
        message="Too many fields",
        make=lambda: part(field(b"x"), num=100_000),
    ),
    Bomb(
        name="files of a form",
        path=TRANSCRIPTIONS,
        media_type=FORM,
        status=400,
        message="Too many files",
        make=lambda: part(field(b"x") + b'; filename="a"', num=100_000),
    ),
    Bomb(
        name="long field of a form",
        path=TRANSCRIPTIONS,
        media_type=FORM,
        status=413,
        message="prompt: more than 65536 bytes",
        make=lambda: part(field(b"prompt"), b"a" * (MAX_BODY_BYTES - 1_000)),
    ),
    Bomb(
        name="long headers in a form",
        path=TRANSCRIPTIONS,
        media_type=FORM,
        status=413,
        message="bytes of headers",
        make=lambda: part(field(b"x") + b"\r\nX-A: " + b"a" * 4_000 + b"\r\nX-B: " + b"b" * 4_200),
    ),
    Bomb(
        name="header of megabytes in a form",
        path=TRANSCRIPTIONS,
        media_type=FORM,
        status=400,
        message="the body is not a form",
        make=lambda: part(field(b"a" * (MAX_BODY_BYTES - 1_000))),
    ),
    Bomb(
        name="long boundary of a form",
        path=TRANSCRIPTIONS,
        media_type=FORM + "b" * 8_000,
        status=400,
        message="content-type: more than 1024 characters",
        make=lambda: part(field(b"x")),
    ),
    Bomb(
        name="preamble of a form",
        path=TRANSCRIPTIONS,
        media_type=FORM,
        status=400,
        message="file: this field is required",
        make=lambda: part(field(b"model"), b"omni") + b"\r\n" * (15 * MIB),
    ),
)

PLAIN, MANY_IN_EVENT = (
    "at most 262144 are read of an event that carries no audio",
    "the event: more than 8192 JSON values",
)
MAX_EVENT_BYTES = 15 * MIB
APPEND = b'{"type":"input_audio_buffer.append","audio":"'

EVENTS = (
    Bomb(
        name="lists in a session.update",
        status=413,
        message=MANY_IN_EVENT,
        make=lambda: filled(
            b'{"type":"session.update","session":{"x":[', b"[],", b"0]}}", MAX_EVENT_BYTES
        ),
    ),
    Bomb(
        name="short session.update of many values",
        status=413,
        message=MANY_IN_EVENT,
        make=lambda: filled(b'{"type":"session.update","session":{"x":[', b"[],", b"0]}}", 200_000),
    ),
    Bomb(
        name="metadata of a response",
        status=413,
        message=MANY_IN_EVENT,
        make=lambda: keys(
            b'{"type":"response.create","response":{"metadata":{', 120_000, b"}}}", b"0"
        ),
    ),
    Bomb(
        name="metadata below the bound",
        status=400,
        message="response.metadata: 8000 keys; at most 16 are allowed",
        make=lambda: keys(
            b'{"type":"response.create","response":{"metadata":{', 8_000, b"}}}", b"0"
        ),
    ),
    Bomb(
        name="items of a response",
        status=413,
        message=MANY_IN_EVENT,
        make=lambda: filled(
            b'{"type":"response.create","response":{"input":[', b"{},", b"0]}}", MAX_EVENT_BYTES
        ),
    ),
    Bomb(
        name="text of a deletion",
        status=413,
        message=PLAIN,
        make=lambda: filled(
            b'{"type":"conversation.item.delete","item_id":"', b"a", b'"}', 8 * MIB
        ),
    ),
    Bomb(
        name="text of four bytes a character in an audio event",
        status=413,
        message=TOO_WIDE,
        make=lambda: filled(APPEND + EMOJI, b"a", b'"}', MAX_EVENT_BYTES),
    ),
    Bomb(
        name="event without a type",
        status=413,
        message="an event without a type: ",
        make=lambda: filled(b'{"x":"', b"a", b'"}', 8 * MIB),
    ),
)
