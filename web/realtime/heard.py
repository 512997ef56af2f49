"""Which words of a spoken text were heard, by how much of its sound was: history must not hold what nobody heard. Pure."""

DEFAULT_CHAR_S = 0.068
"""Seconds of speech per character, before any answer was whole: 14 to 15 characters a second."""
CAUTION = 1.05
"""Where the length of the whole is a guess, it is taken as a little longer: rather a word too few than one nobody heard."""
MAX_WORD = 32
WEIGHT = 0.3


class SpeakingRate:
    """How long a character takes, learnt from answers whose sound is whole. Units: seconds; one for each voice."""

    def __init__(self) -> None:
        self._char_s: dict[str, float] = {}

    def learn(self, voice: str, text: str, speech_s: float) -> None:
        if len(text) < 8 or speech_s <= 0:
            return
        told = speech_s / len(text)
        known = self._char_s.get(voice, told)
        self._char_s[voice] = known + WEIGHT * (told - known)

    def whole_s(self, voice: str, text: str, made_s: float, *, text_whole: bool) -> float:
        """How long the speech of `text` will be; `made_s` of it are made, which is the least it can be."""
        char_s = self._char_s.get(voice, DEFAULT_CHAR_S)
        return max(char_s * len(text) * CAUTION, made_s if text_whole else 0.0)


def words_heard(text: str, heard: float, whole: float) -> str:
    """The beginning of `text` that was heard: whole words only, in proportion to the sound.

    Units: `heard` of `whole`, both seconds or both samples.
    """
    if whole <= 0 or heard >= whole:
        return text if heard > 0 or not text else ""
    cut = int(len(text) * max(0.0, heard) / whole)
    if cut < len(text) and not text[cut].isspace():
        begin = max(text.rfind(" ", 0, cut), text.rfind("\n", 0, cut)) + 1
        # A script without spaces, or a word nobody says in one breath: then by character.
        cut = begin if cut - begin <= MAX_WORD else cut
    return text[:cut].rstrip()
