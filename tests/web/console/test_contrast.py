"""Contrast of the console's colours by the formula of WCAG 2: 4.5 to 1 for text on every background
it is used on, 3 to 1 for lines and marks.
"""

import re

import pytest

from tests.support import REPO

CSS = (REPO / "web" / "console" / "static" / "console.css").read_text()
PAIRS = dict(re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}, #[0-9a-f]{6})\)", CSS))
GROUNDS = ("bg", "panel", "raised")
STAGES = tuple(f"c{number}" for number in range(6))
TEXT = [
    *(
        (ink, ground)
        for ink in ("text", "dim", "accent", "good", "bad", "warn", *STAGES)
        for ground in GROUNDS
    ),
    ("accent-text", "accent"),
    ("bad", "bad-bg"),
    ("text", "bad-bg"),
    ("warn", "warn-bg"),
    ("text", "warn-bg"),
    ("dim", "warn-bg"),
    ("dim", "bad-bg"),
    ("accent", "bad-bg"),
    ("accent", "warn-bg"),
    ("text", "bubble"),
]
MARKS = [(ink, ground) for ink in ("edge", *STAGES, "warn", "bad") for ground in GROUNDS]


def luminance(colour: str) -> float:
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(ink: str, ground: str, theme: int) -> float:
    pair = [luminance(PAIRS[name].split(", ")[theme]) for name in (ink, ground)]
    return (max(pair) + 0.05) / (min(pair) + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_colours_have_contrast(theme: int) -> None:
    poor = {
        f"{ink} on {ground}": round(ratio, 2)
        for ink, ground in TEXT
        if (ratio := contrast(ink, ground, theme)) < 4.5
    }
    assert not poor, poor


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_mark_colours_have_contrast(theme: int) -> None:
    poor = {
        f"{ink} on {ground}": round(ratio, 2)
        for ink, ground in MARKS
        if (ratio := contrast(ink, ground, theme)) < 3.0
    }
    assert not poor, poor


def test_colours_are_defined_in_both_themes() -> None:
    """All colours are CSS variables defined in both themes, since other colours would not be
    checked.
    """
    body = CSS.partition("--mono")[2]
    assert not re.findall(r"#[0-9a-f]{3,8}\b", body)
    assert set(re.findall(r"var\(--([a-z0-9-]+)", CSS)) <= {*PAIRS, "mono", "stage"}
