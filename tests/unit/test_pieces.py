"""Splitting a long text for speech: the pieces together are the same text, fit the limit, and end
where a reader would pause.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.processing.pieces import split_text


@given(st.text(alphabet="ab ,.!?;\n。，é", max_size=200), st.integers(1, 30))
def test_text_pieces_fit_and_join_to_the_text(text: str, most: int) -> None:
    pieces = split_text(text, lambda piece: len(piece) <= most)
    assert "".join(pieces) == text
    assert all(len(piece) <= most for piece in pieces)
    assert all(pieces) or not text


@pytest.mark.parametrize(
    ("text", "most", "pieces"),
    [
        ("One. Two. Three.", 10, ["One. Two. ", "Three."]),
        ("One. Two. Three.", 100, ["One. Two. Three."]),
        ("Is 3.14 a number? It is.", 20, ["Is 3.14 a number? ", "It is."]),
        (
            "First this, then that, and more. End.",
            14,
            ["First this, ", "then that, ", "and more. ", "End."],
        ),
        ("no marks in here at all", 9, ["no marks ", "in here ", "at all"]),
        ("unbreakable", 4, ["unbr", "eaka", "ble"]),
        ("一句。二句。三句。", 6, ["一句。二句。", "三句。"]),
        ('He said "Go!" Then he went.', 15, ['He said "Go!" ', "Then he went."]),
    ],
)
def test_text_is_cut_at_pauses(text: str, most: int, pieces: list[str]) -> None:
    assert split_text(text, lambda piece: len(piece) <= most) == pieces


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["." * 100_000, "." * 50_000 + '"' * 50_000], ids=["stops", "stops and quotes"]
)
def test_long_run_of_stops_is_split_in_linear_time(text: str) -> None:
    """A long run of full stops is split in linear time; reading the text again from each stop took
    more than a minute.
    """
    assert "".join(split_text(text, lambda piece: len(piece) <= 1_000)) == text
