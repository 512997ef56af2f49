"""Packed draft heads in the memory of workers, as they publish them for others to read."""

import msgspec


class HeldHead(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A version of the draft head in a worker's registered host memory. Units: bytes."""

    version: int
    address: int
    num_bytes: int


_decoder = msgspec.json.Decoder(HeldHead)


def encode_held(held: HeldHead | None) -> str:
    return msgspec.json.encode(held).decode() if held is not None else ""


def decode_held(text: str) -> HeldHead | None:
    """Decode; None if there is none, or another version of Fleet wrote it."""
    try:
        return _decoder.decode(text) if text else None
    except msgspec.DecodeError:
        return None
