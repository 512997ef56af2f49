"""The UTF-8 bytes that a token id adds to a text, also where they are no whole character. Knows no
model and no request.

Source: `bytes_to_unicode` of GPT-2, whose characters byte-level vocabularies are written in; byte
tokens such as `<0xE2>` of SentencePiece.
"""

import json
import re
from functools import cache

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
REPLACEMENT = "\ufffd"


class TokenBytes:
    """Bytes of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in _decoder_types(tokenizer)
        self._added = tokenizer.get_added_tokens_decoder()

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer does not have."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        if self._is_byte_level and all(char in _byte_of() for char in token):
            return bytes(_byte_of()[char] for char in token)
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(found[1])
        # after another token, since decoders drop the space before the first
        before = self._tokenizer.decode([token_id], skip_special_tokens=False)
        both = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return both[len(before) :].encode()


def _decoder_types(tokenizer: Tokenizer) -> set[str]:
    """Return the types of a tokenizer's decoders."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {str(one["type"]) for one in (state, *state.get("decoders", ()))}


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
