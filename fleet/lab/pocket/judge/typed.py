"""Evaluation of typed questions: share of right answers in total, by family, from memory of the
conversation, and outside the domain.
"""

from collections.abc import Sequence

from fleet.lab.pocket.corpus import ChatTurn, Dialogue, families
from fleet.lab.pocket.corpus.dialogue import DONT_KNOW
from fleet.lab.pocket.corpus.generate import MEMORY
from fleet.lab.pocket.judge.ask import JudgeClient, typed
from fleet.lab.pocket.judge.options import COMMAND, JudgeOptions
from fleet.lab.pocket.judge.questions import distinct
from fleet.lab.pocket.judge.report import Figure, JudgedAnswer, JudgeReport, share
from fleet.lab.report.progress import progress_bar

UNKNOWN, STRANGE = "unknown", "of no template"
STRANGERS = (
    "how do airplanes stay in the air",
    "what is the square root of two",
    "who painted the mona lisa",
    "write me a poem",
    "can you book a flight to rome",
    "what is photosynthesis",
    "how much is a ticket to the museum",
    "did my brother call",
    "which team is the best in the world",
    "translate good morning into french",
    "when did the war end",
    "is there life on mars",
    "how deep is the ocean",
    "what should i wear to the party",
    "set an alarm for seven",
    "play some music please",
    "why did you say that",
    "who invented the telephone",
    "how do i fix my car",
    "what is the fastest train",
)
"""Questions outside the domain: no table has their words and phrasings."""


def judge(report: JudgeReport, client: JudgeClient, options: JudgeOptions) -> JudgeReport:
    common = distinct(options.typed, options.seed)
    memory = _family(MEMORY, options.memory, options.seed)
    unknown = _family(UNKNOWN, options.unknown, options.seed)
    strange = [
        Dialogue(
            turns=(ChatTurn(role="user", text=text), ChatTurn(role="assistant", text=DONT_KNOW)),
            family=STRANGE,
        )
        for text in STRANGERS
    ]
    dialogues = list(dict.fromkeys([*common, *memory, *unknown, *strange]))
    with progress_bar(COMMAND, "typed questions", len(dialogues)) as advance:
        replies = client.ask_all(
            [typed(dialogue) for dialogue in dialogues], options.concurrency, advance
        )
    answered = {
        each: JudgedAnswer.of(each, "typed", reply.text)
        for each, reply in zip(dialogues, replies, strict=True)
    }
    figures = [
        _figure("right answers", [answered[each] for each in common], 95),
        _figure("from memory", [answered[each] for each in memory], 90),
        _figure("outside the domain, graceful", [answered[each] for each in unknown], 80),
        _figure("of no template at all, graceful", [answered[each] for each in strange], None),
        *(
            _figure(name, [answered[each] for each in common if each.family == name], None)
            for name in families()
        ),
    ]
    return report.adding(figures, typed=tuple(answered.values()))


def _family(name: str, count: int, seed: int) -> list[Dialogue]:
    return distinct(count, seed, lambda dialogue: dialogue.family == name)


def _figure(name: str, answered: Sequence[JudgedAnswer], target: float | None) -> Figure:
    value = share([each.right for each in answered])
    return Figure("typed", name, value, len(answered), target=target)
