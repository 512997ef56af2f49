"""English names of spoken languages, and their ISO codes. Knows no model."""

from collections.abc import Mapping

LANGUAGE_NAMES: Mapping[str, str] = {
    "english": "en",
    "chinese": "zh",
    "german": "de",
    "spanish": "es",
    "russian": "ru",
    "korean": "ko",
    "french": "fr",
    "japanese": "ja",
    "portuguese": "pt",
    "turkish": "tr",
    "polish": "pl",
    "dutch": "nl",
    "arabic": "ar",
    "italian": "it",
}
"""Code of each language by its English name."""
_NAMES: Mapping[str, str] = {code: name for name, code in LANGUAGE_NAMES.items()}


def language_name(code: str) -> str:
    """Return the English name of a language in small letters; the code itself if it has no name
    here.
    """
    return _NAMES.get(code, code)
