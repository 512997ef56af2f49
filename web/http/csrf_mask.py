"""Masks of the CSRF token: each page has it in another form, so that compressed pages of different
length do not tell it character by character (BREACH).
"""

import secrets


def mask(token: str) -> str:
    """Return a new random mask followed by `token`, a hexadecimal text, under this mask."""
    plain = bytes.fromhex(token)
    pad = secrets.token_bytes(len(plain))
    return (pad + _xor(plain, pad)).hex()


def unmask(masked: str) -> str:
    """Return the token in `masked`, the result of `mask`; "" if `masked` has another form."""
    try:
        raw = bytes.fromhex(masked)
    except ValueError:
        return ""
    half = len(raw) // 2
    return _xor(raw[:half], raw[half:]).hex() if half * 2 == len(raw) else ""


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(left ^ right for left, right in zip(one, other, strict=True))
