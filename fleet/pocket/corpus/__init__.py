"""What Pocket is taught to answer: dialogues written by small grammars, with the answer to every question known.

Start at `generate`; `families` lists the kinds of dialogue, `table` says what is held out, `text` how words become symbols.
Knows nothing of sound and nothing of models.
"""

from fleet.pocket.corpus.dialogue import ChatTurn, Dialogue, Split, is_right
from fleet.pocket.corpus.generate import dialogues, families, sentences
from fleet.pocket.corpus.text import SYMBOLS, decode, encode, spoken

__all__ = [
    "SYMBOLS", "Dialogue", "Split", "ChatTurn", "decode", "dialogues", "encode", "families", "is_right", "sentences", "spoken",
]  # fmt: skip
