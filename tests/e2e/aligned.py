"""Word ends in Pocket's speech, by alignment with the teacher model's speech of the same text.
Knows no server.
"""

import numpy as np

from fleet.lab.pocket.judge.listen import extent
from fleet.lab.pocket.judge.pitch import align
from fleet.lab.pocket.judge.questions import speak_all
from fleet.lab.pocket.shape import VOICES
from fleet.lab.pocket.speech.analysis import HOP_S, NUM_MELS, analyse
from fleet.lab.pocket.teacher import SAMPLE_RATE_HZ
from tests.web.voice.probe import Pcm


def word_ends(text: str, voice: str, pcm: Pcm) -> list[int]:
    """Return, for each word of `text`, the index after its last sample in `pcm`. Silence at the
    beginning and end of `pcm` is left out of the alignment.
    """
    (teacher,) = speak_all([(text, VOICES[voice])])
    samples = pcm.astype(np.float32) / np.float32(32768)
    spoken, reference = extent(samples), extent(teacher.samples)
    spoken_mels = analyse(samples[spoken]).features[:, :NUM_MELS]
    teacher_mels = analyse(teacher.samples[reference]).features[:, :NUM_MELS]
    pairs = align(spoken_mels - spoken_mels.mean(0), teacher_mels - teacher_mels.mean(0))
    ends_s = (
        np.array([*teacher.word_starts_s[1:], reference.stop / SAMPLE_RATE_HZ])
        - reference.start / SAMPLE_RATE_HZ
    )
    places = np.minimum(np.searchsorted(pairs[:, 1], ends_s / HOP_S), len(pairs) - 1)
    return [spoken.start + int(round(pairs[place, 0] * HOP_S * SAMPLE_RATE_HZ)) for place in places]
