"""Masks of the CSRF token: each page has it in another form, so that compressed pages of different
length do not tell it character by character (BREACH).
"""

import secrets


def mask(token: str) -> str:
    """Return `token`, hexadecimal digits, under a random mask that precedes it."""
    plain = bytes.fromhex(token)
    pad = secrets.token_bytes(len(plain))
    return (pad + _xor(plain, pad)).hex()


def unmask(masked: str) -> str:
    """Return the token under a mask; "" if `masked` is not of this form."""
    try:
        raw = bytes.fromhex(masked)
    except ValueError:
        return ""
    half = len(raw) // 2
    return _xor(raw[:half], raw[half:]).hex() if half * 2 == len(raw) else ""


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(left ^ right for left, right in zip(one, other, strict=True))
