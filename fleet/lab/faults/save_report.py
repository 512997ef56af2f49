"""Report on the saves of conversations in a run: counts, reasons of failures, and mistakes in the
files. Measures nothing.
"""

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.saves import Save, SavedConversation
from fleet.lab.faults.schedule import REDIS
from fleet.lab.report.stats import Summary, summarise

NAMES = re.compile(r"[\w.]+@[\w.:-]+|(?:\d+\.)*\d+(?::\d+)?")
"""Pattern of worker ids, addresses and numbers in an error message."""


class SaveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the saves of a run. `struck`: number of saves during which Redis had a fault, or a
    process of the save was the target of a fault. `struck_by`: number of struck saves by fault,
    such as "SIGKILL conductor"; a save counts once for each fault.

    `struck_failed`: number of struck saves that failed, by reason, without the names of workers and
    numbers. `unstruck_failed`: number of other saves that failed, by reason, for example since the
    worker that cached the conversation had already been lost. `wrong`: a line for each mistake,
    which fails the run. Units: seconds; `whole_s`, `failed_s`: durations of completed and of failed
    saves.
    """

    conversations: int
    turns: int
    saves: int
    whole: int
    struck: int
    struck_by: dict[str, int]
    struck_failed: dict[str, int]
    unstruck_failed: dict[str, int]
    whole_s: Summary | None
    failed_s: Summary | None
    wrong: tuple[str, ...]


def is_struck(save: Save, fault: InjectedFault) -> bool:
    """Return True if the fault occurred during the save, and was a fault in Redis or had a process
    of the save as its target.
    """
    meets = save.began_s <= fault.until_s and save.ended_s >= fault.at_s
    return meets and (fault.role == REDIS or fault.target in save.processes)


def report_saves(
    conversations: Sequence[SavedConversation], faults: Sequence[InjectedFault]
) -> SaveReport | None:
    """Summarise the saves of all conversations; return None for a run without conversations."""
    if not conversations:
        return None
    saves = [
        (save, [fault for fault in faults if is_struck(save, fault)])
        for conversation in conversations
        for save in conversation.saves
    ]
    failed = [(save, struck) for save, struck in saves if save.failed]
    whole = [save for save, _ in saves if not save.failed]
    wrong = [
        *(
            f"save of conversation {save.conversation}: {save.wrong}"
            for save, _ in saves
            if save.wrong
        ),
        *(
            f"conversation {at}: {wrong}"
            for at, each in enumerate(conversations)
            for wrong in each.wrong
        ),
    ]
    return SaveReport(
        conversations=len(conversations),
        turns=sum(conversation.turns for conversation in conversations),
        saves=len(saves),
        whole=sum(not save.wrong for save in whole),
        struck=sum(bool(struck) for _, struck in saves),
        struck_by=dict(Counter(f"{by.signal} {by.role}" for _, struck in saves for by in struck)),
        struck_failed=dict(Counter(reason_of(save) for save, struck in failed if struck)),
        unstruck_failed=dict(Counter(reason_of(save) for save, struck in failed if not struck)),
        whole_s=summarise([save.ended_s - save.began_s for save in whole]),
        failed_s=summarise([save.ended_s - save.began_s for save, _ in failed]),
        wrong=tuple(wrong),
    )


def reason_of(save: Save) -> str:
    """Return the error of a failed save without names and numbers, so that equal causes have equal
    texts.
    """
    return NAMES.sub("…", save.failed)


def reason_lines(report: SaveReport) -> list[str]:
    """Return a line of text for each reason of failed saves."""
    parts = (
        ("struck by a fault", report.struck_failed),
        ("before or after a fault", report.unstruck_failed),
    )
    return [
        f"{count} {'save' if count == 1 else 'saves'} {which} failed: {reason}"
        for which, reasons in parts
        for reason, count in reasons.items()
    ]
