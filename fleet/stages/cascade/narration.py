"""Reading of an answer's text by a voice: the text's clauses, each normalized and spoken."""

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fleet.core.errors import BadInput, quoted
from fleet.engine.voice import Narration, Speaker, SpokenClause
from fleet.graphs.cascade import CLAUSE_PARAM, SPEED_PARAM, VOICE_PARAM
from fleet.models.voices.base import MAX_SPEED, MIN_SPEED, VoiceModel, VoiceName, find_voice
from fleet.processing.spoken.clauses import Clause, ClauseCutter
from fleet.processing.spoken.given_clause import GivenClause
from fleet.processing.spoken.normalize import spoken_text

_PCM_PEAK = 32767


class ClauseSpeaker(Speaker):
    """Speaker that reads answers with the voices of one model."""

    def __init__(self, voice: VoiceModel) -> None:
        self._voice = voice

    def check(self, params: Mapping[str, str]) -> None:
        """Raise BadInput if the parameters name an unknown voice or an invalid speed. Without a
        voice or a speed in the parameters, the default is used.
        """
        find_voice(self._voice.voices(), params.get(VOICE_PARAM, ""))
        read_speed(params)

    def open(self, params: Mapping[str, str], seed: int) -> Narration:
        name = find_voice(self._voice.voices(), params.get(VOICE_PARAM, ""))
        place = params.get(CLAUSE_PARAM)
        cutter = ClauseCutter() if place is None else GivenClause(place)
        return ClauseNarration(self._voice, name, cutter, speed=read_speed(params), seed=seed)


class ClauseNarration(Narration):
    """Narration of one request."""

    def __init__(
        self,
        voice: VoiceModel,
        name: VoiceName,
        cutter: ClauseCutter | GivenClause,
        *,
        speed: float,
        seed: int,
    ) -> None:
        self._voice, self._name = voice, name
        self._speed, self._seed = speed, seed
        self._cutter = cutter
        self._clauses: deque[Clause] = deque()

    def feed(self, text: str, *, final: bool) -> None:
        self._clauses += self._cutter.feed(text)
        if final:
            self._clauses += self._cutter.finish()

    @property
    def num_clauses(self) -> int:
        return len(self._clauses)

    def speak(self) -> SpokenClause:
        spoken = spoken_text(self._clauses.popleft(), self._name.language)
        ends = [0]
        wave = np.zeros(0, np.int16)
        if spoken.text:
            utterance = self._voice.synthesize(
                spoken.text, self._name.name, speed=self._speed, seed=self._seed
            )
            wave = to_pcm16(utterance.samples)
            ends += utterance.word_ends.tolist()
        return SpokenClause(
            wave=wave,
            words=[word.text for word in spoken.written],
            word_ends=[ends[word.num_spoken] for word in spoken.written],
        )


def read_speed(params: Mapping[str, str]) -> float:
    """Return the speed that parameters ask for, 1 by default. Raises: BadInput if the speed is not
    a number from `MIN_SPEED` to `MAX_SPEED`.
    """
    given = params.get(SPEED_PARAM, "1")
    try:
        speed = float(given)
    except ValueError:
        speed = math.nan
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise BadInput(
            f"speed: {quoted(given)} is not a number from {MIN_SPEED} to {MAX_SPEED}", param="speed"
        )
    return speed


def to_pcm16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return np.rint(np.clip(samples, -1.0, 1.0) * _PCM_PEAK).astype(np.int16)
