"""Who speaks to Pocket: the teacher's English accents with its variants, and the variants that training never hears.

Left out are variants that whisper, croak, drawl or sound like a machine on purpose. Knows no texts and no samples.
"""

from random import Random
from typing import Final

from fleet.pocket.teacher import Voice

ACCENTS: Final = {
    "en-us": 6,
    "en": 3,
    "en-gb-x-rp": 2,
    "en-us-nyc": 2,
    "en-gb-scotland": 1,
    "en-gb-x-gbclan": 1,
    "en-gb-x-gbcwmd": 1,
    "en-029": 1,
}
"""By how often they are heard."""
PLAIN: Final = ("", "+f1", "+f2", "+f3", "+f5", "+m1", "+m2", "+m3", "+m4", "+m6", "+m7", "+m8")
OTHERS: Final = (
    "+klatt", "+klatt2", "+klatt4", "+klatt5", "+adam", "+announcer", "+aunty", "+benjamin", "+boris", "+caleb", "+david",
    "+edward", "+grandma", "+iven4", "+kaukovalta", "+marcelo", "+max", "+michel", "+miguel", "+norbert", "+pablo", "+paul",
    "+pedro", "+rob", "+sandro", "+shelby", "+steph", "+travis", "+victor", "+zac", "+Alex", "+Andrea", "+Annie", "+Denis",
    "+Gene", "+Lee", "+Mario", "+Michael", "+Nguyen", "+anika",
)  # fmt: skip
UNSEEN: Final = ("+f4", "+m5", "+klatt3", "+linda", "+quincy", "+robert", "+belinda", "+grandpa", "+Alicia", "+Andy", "+Mike")
"""Variants that training never hears, in any accent."""
PLAIN_SHARE: Final = 0.4
RATES_WPM, PITCHES, PITCH_RANGES = (110, 190), (20, 80), (20, 80)


def known_voice(rng: Random) -> Voice:
    """Someone to learn from."""
    return _voice(rng, rng.choice(PLAIN if rng.random() < PLAIN_SHARE else OTHERS))


def unseen_voice(rng: Random) -> Voice:
    """Someone that training never hears."""
    return _voice(rng, rng.choice(UNSEEN))


def _voice(rng: Random, variant: str) -> Voice:
    accent = rng.choices(list(ACCENTS), list(ACCENTS.values()))[0]
    return Voice(
        name=accent + variant,
        rate_wpm=rng.randint(*RATES_WPM),
        pitch=rng.randint(*PITCHES),
        pitch_range=rng.randint(*PITCH_RANGES),
    )
