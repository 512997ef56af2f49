"""An independent speech recogniser: pocketsphinx with Pocket's vocabulary, and a bigram model or a
grammar of Pocket's answers.

A transcript depends neither on earlier utterances nor on an expected text.
"""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import soxr
from numpy.typing import NDArray

from fleet.lab.pocket.corpus import dialogues
from fleet.lab.pocket.judge.language import arpa, jsgf
from fleet.lab.pocket.judge.words import dictionary_text, known_words, model_folder

Kind = Literal["bigram", "grammar"]
RATE_HZ: Final = 16_000
NUM_DIALOGUES, SEED = 12_000, 0
"""Number and seed of the training dialogues from whose answers the bigrams are counted."""
THROAT: Final[Mapping[str, float]] = {"chelsie": 0.9, "ethan": 0.93}
"""Factor by which a voice is lowered and slowed before recognition, since its vocal tract is
shorter than in the recogniser's training data.

The factor was tuned on the teacher's speech of training answers, like `_HISS` and `SEARCH`, so that
no setting favours a model over its teacher.
"""
SEARCH: Final[Mapping[Kind, Mapping[str, object]]] = {"bigram": {"fwdtree": False}, "grammar": {}}
"""Search settings of pocketsphinx by language model. For bigrams, the first pass uses a flat
lexicon instead of a prefix tree, since the prefix tree prunes short words too early.

On 180 teacher's answers the WER without these settings was 15.7 % with bigrams and 3.9 % with the
grammar; with them, `THROAT`, and `_PAD_S` as the only silence around the speech, it is 9.5 % and
1.7 %.
"""
_HISS: Final = 1e-3
"""Amplitude of noise added to digital silence, on which the recogniser was not trained: without it
the WER is 10 %.
"""
_PAD_S, _PEAK = 0.2, 0.7
_PRONUNCIATION = re.compile(r"\(\d+\)")


class Recogniser:
    """Transcribes spoken answers of Pocket. Raises: ConfigError if pocketsphinx is not
    installed.
    """

    def __init__(self, kind: Kind) -> None:
        self._decoder = _decoder(kind)

    def words(self, samples: NDArray[np.float32], rate_hz: int, voice: str = "") -> str:
        """Return the transcript of speech, "" if nothing was recognised. `samples`: speech without
        silence around it. `voice`: Pocket's voice, which selects the factor of `THROAT`; "" for
        none.
        """
        self._decoder.start_utt()
        self._decoder.process_raw(
            _prepared(samples, rate_hz * THROAT.get(voice, 1.0)), full_utt=True
        )
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return _PRONUNCIATION.sub("", hypothesis.hypstr) if hypothesis else ""


def _decoder(kind: Kind) -> Any:
    folder = model_folder()
    # only the evaluation needs it, and serving does not depend on it
    from pocketsphinx import Decoder

    with tempfile.TemporaryDirectory(prefix="fleet-judge-") as name:
        words, rules = Path(name, "words.dict"), Path(name, f"rules.{kind}")
        words.write_text(dictionary_text(known_words()))
        rules.write_text(language(kind))
        model = {"lm": str(rules)} if kind == "bigram" else {"lm": None, "jsgf": str(rules)}
        return Decoder(
            hmm=str(folder / "en-us"),
            dict=str(words),
            cmn="batch",
            loglevel="FATAL",
            **model,
            **SEARCH[kind],
        )


def language(kind: Kind) -> str:
    """Return the text of a language model: bigrams of Pocket's training answers, or the grammar of
    its tables.
    """
    if kind == "grammar":
        return jsgf()
    turns = (
        turn for dialogue in dialogues("train", NUM_DIALOGUES, SEED) for turn in dialogue.turns
    )
    return arpa((turn.text for turn in turns if turn.role == "assistant"), known_words())


def _prepared(samples: NDArray[np.float32], rate_hz: float) -> bytes:
    silence = np.zeros(int(_PAD_S * rate_hz), np.float32)
    wave = soxr.resample(np.concatenate([silence, samples, silence]), rate_hz, RATE_HZ)
    wave = wave + _HISS * np.random.default_rng(SEED).standard_normal(len(wave)).astype(np.float32)
    return (wave * (_PEAK * 32767 / max(float(np.abs(wave).max()), 1e-3))).astype("<i2").tobytes()
