"""Handshake of a span connection: both ends prove that they have the same key, without sending it.
Pure; reads no socket.

The dialer sends HELLO (nonce, name, purpose), the listener answers CHALLENGE (nonce, MAC, name),
and the dialer ends with PROOF (MAC). A MAC covers the version, the role of its sender, both nonces,
both names and the purpose. Since it covers the role, a MAC sent back to its author is refused;
since it covers both nonces, so is a MAC of an earlier connection.

All versions of the protocol share the envelope of these messages, so that each end can name the
other's version in an error.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from fleet.core.errors import FleetError

VERSION = "fleet-span/1"
KEY_BYTES = NONCE_BYTES = MAC_BYTES = 32
MAX_NAME_BYTES = 512
MAX_BODY_BYTES = 2048
MAGIC = b"FSPH"
ENVELOPE = struct.Struct(">4sBBH")
"""Start of each message: magic bytes, message kind, version length, body length. The version and
the body follow.
"""
HELLO, CHALLENGE, PROOF = 1, 2, 3
_HELLO_BODY = struct.Struct(f">{NONCE_BYTES}sH")
_CHALLENGE_BODY = struct.Struct(f">{NONCE_BYTES}s{MAC_BYTES}s")
_DIALER, _LISTENER = b"dial", b"accept"
KEY_ADVICE = "give both workers the same security.fleet_secret"


class HandshakeRefused(FleetError):
    """The handshake failed, and the peer is refused. `reply`: bytes to send to the peer before
    closing, which explain the refusal; may be empty.
    """

    def __init__(self, message: str, *, reply: bytes = b"") -> None:
        super().__init__(message)
        self.reply = reply


@dataclass(frozen=True, slots=True)
class HandshakeMessage:
    """A parsed message of a handshake. `kind`: HELLO, CHALLENGE or PROOF. `version`: protocol
    version of the sender.
    """

    kind: int
    version: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ProvenPeer:
    """The peer of a connection after a successful handshake. `purpose`: text that the dialer
    announced; on the dialer's side its own text.
    """

    name: str
    purpose: str


class MessageBuffer:
    """Buffer for the handshake message that is being received.

    Invariants: never accepts bytes beyond this message, since frames may follow the last one; holds
    at most a few KB.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def num_missing(self) -> int:
        """Return how many bytes to read next.

        Raises: HandshakeRefused if the bytes so far are not the beginning of a message.
        """
        if len(self._bytes) < ENVELOPE.size:
            return ENVELOPE.size - len(self._bytes)
        magic, _, version_len, body_len = ENVELOPE.unpack_from(self._bytes)
        if magic != MAGIC or body_len > MAX_BODY_BYTES:
            raise HandshakeRefused(
                "the other process sent no message of this protocol; check that the address is "
                "a worker's span address"
            )
        return ENVELOPE.size + version_len + body_len - len(self._bytes)

    def append(self, received: bytes) -> HandshakeMessage | None:
        """Append at most `num_missing()` bytes; return the message once it is complete."""
        self._bytes += received
        if self.num_missing():
            return None
        _, kind, version_len, _ = ENVELOPE.unpack_from(self._bytes)
        body_start = ENVELOPE.size + version_len
        version = self._bytes[ENVELOPE.size : body_start].decode("ascii", "backslashreplace")
        message = HandshakeMessage(kind, version, bytes(self._bytes[body_start:]))
        self._bytes.clear()
        return message


def encode_message(kind: int, body: bytes, version: str = VERSION) -> bytes:
    assert len(body) <= MAX_BODY_BYTES, (
        f"a handshake message has {len(body)} bytes, limit {MAX_BODY_BYTES}"
    )
    return ENVELOPE.pack(MAGIC, kind, len(version), len(body)) + version.encode("ascii") + body


class DialHandshake:
    """The dialer's side of a handshake: send `hello()`, then pass the listener's message to
    `answer`.
    """

    def __init__(self, key: bytes, own_name: str, purpose: str) -> None:
        self._key, self._purpose = _checked_key(key), purpose
        self._name, self._nonce = _encoded_name(own_name), secrets.token_bytes(NONCE_BYTES)

    def hello(self) -> bytes:
        purpose = self._purpose.encode()
        assert len(purpose) <= MAX_NAME_BYTES, (
            f"a purpose has {len(purpose)} bytes, limit {MAX_NAME_BYTES}"
        )
        return encode_message(
            HELLO, _HELLO_BODY.pack(self._nonce, len(self._name)) + self._name + purpose
        )

    def answer(self, message: HandshakeMessage) -> tuple[ProvenPeer, bytes]:
        """Check the listener's challenge; return the proven listener, and the proof to send.

        Raises: HandshakeRefused.
        """
        body = _checked_body(message, CHALLENGE, _CHALLENGE_BODY.size)
        nonce, mac = _CHALLENGE_BODY.unpack_from(body)
        name = body[_CHALLENGE_BODY.size :]
        transcript = (self._nonce, nonce, self._name, name, self._purpose.encode())
        if not hmac.compare_digest(mac, _mac(self._key, _LISTENER, transcript)):
            raise HandshakeRefused(f"the other process has another key; {KEY_ADVICE}")
        peer = _decoded_peer(name, self._purpose.encode(), self._name)
        return peer, encode_message(PROOF, _mac(self._key, _DIALER, transcript))


class AcceptHandshake:
    """The listener's side of a handshake: `receive` takes the dialer's two messages, in order."""

    def __init__(self, key: bytes, own_name: str) -> None:
        self._key, self._name = _checked_key(key), _encoded_name(own_name)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript: tuple[bytes, ...] | None = None

    @property
    def awaits_proof(self) -> bool:
        return self._transcript is not None

    def receive(self, message: HandshakeMessage) -> bytes | ProvenPeer:
        """Return the challenge to send after the first message, and the proven dialer after the
        second.

        Raises: HandshakeRefused.
        """
        return (
            self._challenge(message)
            if self._transcript is None
            else self._verify(message, self._transcript)
        )

    def _challenge(self, message: HandshakeMessage) -> bytes:
        body = _checked_body(message, HELLO, _HELLO_BODY.size)
        nonce, name_len = _HELLO_BODY.unpack_from(body)
        names = body[_HELLO_BODY.size :]
        if len(names) < name_len:
            raise HandshakeRefused("the first message of the other process is malformed")
        self._transcript = (nonce, self._nonce, names[:name_len], self._name, names[name_len:])
        mac = _mac(self._key, _LISTENER, self._transcript)
        return encode_message(CHALLENGE, _CHALLENGE_BODY.pack(self._nonce, mac) + self._name)

    def _verify(self, message: HandshakeMessage, transcript: tuple[bytes, ...]) -> ProvenPeer:
        mac = _checked_body(message, PROOF, MAC_BYTES)
        if not hmac.compare_digest(mac, _mac(self._key, _DIALER, transcript)):
            raise HandshakeRefused(f"the other process has another key; {KEY_ADVICE}")
        return _decoded_peer(transcript[2], transcript[4], self._name)


def _checked_key(key: bytes) -> bytes:
    assert len(key) == KEY_BYTES, (
        f"the key of span connections has {len(key)} bytes, not {KEY_BYTES}"
    )
    return key


def _encoded_name(name: str) -> bytes:
    encoded = name.encode()
    assert 0 < len(encoded) <= MAX_NAME_BYTES, (
        f"a name has {len(encoded)} bytes, not 1 to {MAX_NAME_BYTES}"
    )
    return encoded


def _checked_body(message: HandshakeMessage, kind: int, min_bytes: int) -> bytes:
    if message.version != VERSION:
        raise HandshakeRefused(
            f"the other process uses version {message.version[:64]!r} of the protocol, and this "
            f"process {VERSION!r}; "
            "run one version of Fleet on both",
            # An empty message of the next kind carries the version of this process.
            reply=encode_message(CHALLENGE, b"") if kind == HELLO else b"",
        )
    if message.kind != kind or len(message.body) < min_bytes:
        raise HandshakeRefused(
            f"the other process sent message {message.kind} of {len(message.body)} bytes where "
            f"message {kind} was due"
        )
    return message.body


def _decoded_peer(name: bytes, purpose: bytes, own_name: bytes) -> ProvenPeer:
    """Decode a peer's name and purpose, after the MAC was verified. A peer with this process's own
    name is refused: the connection leads back here, by a relay or a stale address.
    """
    if name == own_name:
        raise HandshakeRefused("the connection leads back to this process; check the address")
    try:
        return ProvenPeer(name.decode(), purpose.decode())
    except UnicodeDecodeError as error:
        raise HandshakeRefused("the name or purpose of the other process is not UTF-8") from error


def _mac(key: bytes, role: bytes, transcript: tuple[bytes, ...]) -> bytes:
    # Each part with its length in front: no two transcripts have the same bytes.
    parts = (VERSION.encode(), role, *transcript)
    return hmac.new(
        key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), hashlib.sha256
    ).digest()
