"""Codec between message structs and MessagePack bytes."""

from typing import Any, Generic, TypeVar

import msgspec

from fleet.core.errors import UnknownWireVersion

MessageT = TypeVar("MessageT")


class WireCodec(Generic[MessageT]):
    """MessagePack codec for the messages of one kind of connection. `union`: union of the message
    types. `what`: name of the messages in an error.
    """

    def __init__(self, union: Any, what: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)
        self._what = what

    def encode(self, message: MessageT) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> MessageT:
        """Decode one message. Raises: UnknownWireVersion if the message is damaged or another
        version of Fleet wrote it.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnknownWireVersion(
                f"{self._what} cannot be read: {error}; run one version of Fleet"
            ) from error
