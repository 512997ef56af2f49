"""Dialogues that Pocket is trained on, generated from templates, with the right answer to every
question.

Start at `generate`; `families` lists the kinds of dialogue, `table` decides which questions are
held out, `text` maps words to symbols. Independent of audio and models.
"""

from fleet.lab.pocket.corpus.dialogue import ChatTurn, Dialogue, Split, is_right
from fleet.lab.pocket.corpus.generate import dialogues, families, sentences
from fleet.lab.pocket.corpus.text import SYMBOLS, decode, encode, spoken

__all__ = [
    "SYMBOLS",
    "Dialogue",
    "Split",
    "ChatTurn",
    "decode",
    "dialogues",
    "encode",
    "families",
    "is_right",
    "sentences",
    "spoken",
]
