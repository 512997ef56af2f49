"""Options of an evaluation: its parts and their numbers of questions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from fleet.core.errors import BadInput

Part = Literal["typed", "speech_out", "speech_in", "speed"]
PARTS: tuple[Part, ...] = get_args(Part)
COMMAND = "fleet pocket eval"
COUNTS = ("typed", "memory", "unknown", "speech_out", "speech_in", "speed")
"""Names of the options that are numbers of questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Options of an evaluation: numbers of questions by part, and how to ask. The targets hold for
    the default numbers.

    `memory` and `unknown`: dialogues of these two families, some of which are also among the typed
    ones. `speech_in`: questions that are asked twice, clean and in noise. `workers`: processes that
    measure speech. `own_sampling`: whether to use the checkpoint's sampling, not greedy. `floor`:
    whether to transcribe the teacher's speech, too. `sounds`: folder that receives every spoken
    answer as a WAV file.
    Raises: BadInput naming the field.
    """

    parts: tuple[Part, ...] = PARTS
    typed: int = 500
    memory: int = 100
    unknown: int = 100
    speech_out: int = 360
    speech_in: int = 300
    speed: int = 24
    concurrency: int = 6
    workers: int = 2
    own_sampling: bool = False
    floor: bool = True
    seed: int = 0
    sounds: Path | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise BadInput(
                f"parts: {unknown[0]!r} is unknown; use some of {', '.join(PARTS)}", param="parts"
            )
        if not self.parts:
            raise BadInput(f"parts: none is named; use some of {', '.join(PARTS)}", param="parts")
        for name in (*COUNTS, "concurrency", "workers"):
            if getattr(self, name) < 1:
                raise BadInput(
                    f"{name}: {getattr(self, name)} is too few; use at least 1", param=name
                )


def options_of(
    parts: Sequence[str],
    questions: int | None,
    *,
    own_sampling: bool,
    sounds: Path | None,
    api_key: str | None = None,
) -> JudgeOptions:
    """Return the options for a command's arguments. `parts`: parts to evaluate, all if empty.
    `questions`: number of questions in each part, None for the defaults. `sounds`: folder for the
    spoken answers, None to keep none. Raises: BadInput.
    """
    sizes = {} if questions is None else dict.fromkeys(COUNTS, questions)
    chosen = cast("tuple[Part, ...]", tuple(parts)) or PARTS
    return JudgeOptions(
        parts=chosen, own_sampling=own_sampling, sounds=sounds, api_key=api_key, **sizes
    )
