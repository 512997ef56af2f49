"""Voices of Pocket's users: espeak-ng's English accents with its voice variants. Some variants are
kept out of training as unseen voices.

Variants that whisper, croak, drawl or imitate a machine are not used at all.
"""

from random import Random
from typing import Final

from fleet.lab.pocket.teacher import Voice

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
"""Weight of each accent in the random choice."""
PLAIN: Final = ("", *"+f1 +f2 +f3 +f5 +m1 +m2 +m3 +m4 +m6 +m7 +m8".split())
OTHERS: Final = tuple(
    (
        "+klatt +klatt2 +klatt4 +klatt5 +adam +announcer +aunty +benjamin +boris +caleb "
        "+david +edward +grandma +iven4 +kaukovalta +marcelo +max +michel +miguel +norbert "
        "+pablo +paul +pedro +rob +sandro +shelby +steph +travis +victor +zac +Alex +Andrea "
        "+Annie +Denis +Gene +Lee +Mario +Michael +Nguyen +anika"
    ).split()
)
UNSEEN: Final = tuple(
    ("+f4 +m5 +klatt3 +linda +quincy +robert +belinda +grandpa +Alicia +Andy +Mike").split()
)
"""Voice variants that training does not use, in any accent."""
PLAIN_SHARE: Final = 0.4
RATES_WPM, PITCHES, PITCH_RANGES = (110, 190), (20, 80), (20, 80)


def known_voice(rng: Random) -> Voice:
    """Choose a random training voice."""
    return _voice(rng, rng.choice(PLAIN if rng.random() < PLAIN_SHARE else OTHERS))


def unseen_voice(rng: Random) -> Voice:
    """Choose a random voice that training does not use."""
    return _voice(rng, rng.choice(UNSEEN))


def _voice(rng: Random, variant: str) -> Voice:
    accent = rng.choices(list(ACCENTS), list(ACCENTS.values()))[0]
    return Voice(
        name=accent + variant,
        rate_wpm=rng.randint(*RATES_WPM),
        pitch=rng.randint(*PITCHES),
        pitch_range=rng.randint(*PITCH_RANGES),
    )
