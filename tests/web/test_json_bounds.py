"""The scan that bounds a JSON text counts like a parser, however the text is split into pieces."""

import json
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet.core.errors import InputTooLarge
from web.http import json_bounds
from web.http.json_bounds import MAX_OUTSIDE_BYTES, MAX_WIDE_BYTES, check_json

SPECIAL = st.text(st.sampled_from('\\"[]{},:/u0a\N{GRINNING FACE}'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | SPECIAL,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SPECIAL, inner, max_size=4),
    max_leaves=20,
)


def separators(value: object) -> int:
    """Return the number of commas and opening brackets outside of strings."""
    if isinstance(value, dict):
        inner = list(cast("dict[str, object]", value).values())
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return 0
    return 1 + max(0, len(inner) - 1) + sum(separators(one) for one in inner)


def is_within(raw: bytes, max_values: int) -> bool:
    try:
        check_json(raw, max_values=max_values)
    except InputTooLarge:
        return False
    return True


@given(VALUES, st.booleans(), st.integers(1, 9))
@example(["\\", '"', "a,b"], False, 3)
def test_json_values_are_counted_as_by_parser(
    value: object, escaped: bool, piece_bytes: int
) -> None:
    raw = json.dumps(value, ensure_ascii=escaped).encode()
    num = separators(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "_PIECE_BYTES", piece_bytes)
        # strings are counted for each piece, which may be as short as a quote
        assert is_within(raw, num + raw.count(b'"')) and (num == 0 or not is_within(raw, num - 1))


def with_text(text: str, tail: str = "") -> bytes:
    return json.dumps({"x": text + tail}, ensure_ascii=False).encode()


LONG = "a" * MAX_WIDE_BYTES


@pytest.mark.parametrize(
    "raw",
    [
        with_text("\N{GRINNING FACE}", LONG),
        with_text(LONG, "\N{GRINNING FACE}"),
        with_text(LONG, "\N{GRINNING FACE}" * 9),
        b'{"x":"\\u00e9' + LONG.encode() + b'"}',
        json.dumps(["\N{GRINNING FACE}" * 20_000] * 200, ensure_ascii=False).encode(),
    ],
    ids=["at the start", "at the end", "twice", "escaped", "in many strings"],
)
def test_long_text_beyond_ascii_is_refused(raw: bytes) -> None:
    with pytest.raises(InputTooLarge, match="characters beyond ASCII"):
        check_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        with_text(LONG + LONG),
        b'{"x":"' + b"A\\/" * MAX_WIDE_BYTES + b'"}',
        b'{"x":"' + b"\\\\u" * MAX_WIDE_BYTES + b'"}',
        json.dumps(
            {"said": "\N{GRINNING FACE} ,[{" * 1_000, "data": LONG + LONG}, ensure_ascii=False
        ).encode(),
        with_text(",[{" * MAX_WIDE_BYTES),
        json.dumps({"said": "\N{GRINNING FACE}" * 100_000}, ensure_ascii=False).encode(),
    ],
    ids=[
        "base64",
        "base64 with escaped slashes",
        "escaped backslashes",
        "text beside base64",
        "separators in text",
        "text",
    ],
)
def test_long_base64_and_text_are_accepted(raw: bytes) -> None:
    check_json(raw)


def test_long_text_beside_strings_is_refused() -> None:
    with pytest.raises(InputTooLarge, match="bytes beside strings"):
        check_json(b"9" * (MAX_OUTSIDE_BYTES + 1))
