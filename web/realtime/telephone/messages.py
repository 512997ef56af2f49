"""Messages of Twilio's Media Streams. Source: Twilio, "Media Streams - WebSocket Messages". Knows
no session.
"""

import base64
import binascii

import msgspec

from fleet.core.errors import BadInput

MAX_MESSAGE_CHARS = 256 * 1024
"""Size limit of a message. A message has 20 ms of audio, or the parameters of the call's start."""


class MediaFormat(msgspec.Struct, rename="camel", frozen=True):
    encoding: str = ""
    sample_rate: int = 0
    channels: int = 0


SERVED_FORMAT = MediaFormat("audio/x-mulaw", 8_000, 1)
"""The only format that Twilio sends."""


class Start(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """Beginning of a call. `custom_parameters` come from the TwiML that connected it."""

    stream_sid: str
    call_sid: str = ""
    media_format: MediaFormat
    custom_parameters: dict[str, str] = {}


class Media(msgspec.Struct, frozen=True):
    payload: str
    track: str = "inbound"

    @property
    def audio(self) -> bytes:
        """The µ-law audio. Raises: BadInput."""
        try:
            return base64.b64decode(self.payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadInput(f"media.payload: not base64: {error}", param="media.payload") from error


class Mark(msgspec.Struct, frozen=True):
    name: str


class CallMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message from Twilio. `event` is `connected`, `start`, `media`, `dtmf`, `mark` or `stop`;
    its content is in the field of that name.
    """

    event: str
    start: Start | None = None
    media: Media | None = None
    mark: Mark | None = None


class Payload(msgspec.Struct, frozen=True):
    payload: str


class SentMedia(msgspec.Struct, rename="camel", frozen=True, tag_field="event", tag="media"):
    stream_sid: str
    media: Payload


class SentMark(msgspec.Struct, rename="camel", frozen=True, tag_field="event", tag="mark"):
    stream_sid: str
    mark: Mark


class SentClear(msgspec.Struct, rename="camel", frozen=True, tag_field="event", tag="clear"):
    """Message after which Twilio discards the audio that was sent and not played."""

    stream_sid: str


Sent = SentMedia | SentMark | SentClear
_decoder = msgspec.json.Decoder(CallMessage)


def parse_message(raw: str | bytes) -> CallMessage:
    """Parse a message from Twilio. Raises: BadInput."""
    if len(raw) > MAX_MESSAGE_CHARS:
        raise BadInput(f"a message of {len(raw)} characters; at most {MAX_MESSAGE_CHARS} are read")
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise BadInput(f"not a Twilio message: {error}") from error


def encode_message(message: Sent) -> str:
    return msgspec.json.encode(message).decode()
