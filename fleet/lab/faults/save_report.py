"""Report on the saves of a run: counts, the reasons of those that failed, and what is wrong.
Measures nothing.
"""

import re
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Group

from fleet.lab.faults.faults import InjectedFault
from fleet.lab.faults.saves import Save, SavedConversation
from fleet.lab.faults.schedule import REDIS
from fleet.lab.report.stats import Summary, summarise
from fleet.lab.report.tables import NONE, table_of, titled

NAMES = re.compile(r"[\w.]+@[\w.:-]+|(?:\d+\.)*\d+(?::\d+)?")
"""Workers, addresses and numbers in a reason."""


class SaveReport(msgspec.Struct, frozen=True, kw_only=True):
    """`struck`: saves during which a signal was sent to one of their processes, one of them was
    stopped, or Redis had a fault.

    `failed`: by reason, without the names of workers and numbers; `struck_failed`: those of the
    struck ones. `unstruck_failed`: no fault came within them, for example since the worker that had
    the rows was lost before.
    `wrong`: what fails the run. Units: seconds; `whole_s`, `failed_s`: durations.
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
    """Return True if a fault came into a save."""
    meets = save.began_s <= fault.until_s and save.ended_s >= fault.at_s
    return meets and (fault.role == REDIS or fault.target in save.processes)


def report_saves(
    conversations: Sequence[SavedConversation], faults: Sequence[InjectedFault]
) -> SaveReport | None:
    """Return None for a run without conversations."""
    if not conversations:
        return None
    saves = [save for conversation in conversations for save in conversation.saves]
    by = {
        index: [fault for fault in faults if is_struck(save, fault)]
        for index, save in enumerate(saves)
    }
    failed = [(index, save) for index, save in enumerate(saves) if save.failed]
    struck_by = Counter(f"{fault.signal} {fault.role}" for found in by.values() for fault in found)
    return SaveReport(
        conversations=len(conversations),
        turns=sum(conversation.turns for conversation in conversations),
        saves=len(saves),
        whole=sum(not save.failed and not save.wrong for save in saves),
        struck=sum(bool(found) for found in by.values()),
        struck_by=dict(struck_by),
        struck_failed=dict(Counter(reason_of(save) for index, save in failed if by[index])),
        unstruck_failed=dict(Counter(reason_of(save) for index, save in failed if not by[index])),
        whole_s=summarise([save.ended_s - save.began_s for save in saves if not save.failed]),
        failed_s=summarise([save.ended_s - save.began_s for _, save in failed]),
        wrong=(
            *(
                f"save of conversation {save.conversation}: {save.wrong}"
                for save in saves
                if save.wrong
            ),
            *(
                f"conversation {at}: {wrong}"
                for at, each in enumerate(conversations)
                for wrong in each.wrong
            ),
        ),
    )


def reason_of(save: Save) -> str:
    """Return the reason of a failed save, equal for equal causes."""
    return NAMES.sub("…", save.failed)


def saves_table(report: SaveReport) -> Group:
    table = table_of("", "count")
    rows = (
        ("conversations", report.conversations),
        ("turns", report.turns),
        ("saves", report.saves),
        ("saved whole", report.whole),
        ("struck by a fault", report.struck),
        *((f"  by {fault}", count) for fault, count in report.struck_by.items()),
        ("failed, struck by a fault", sum(report.struck_failed.values())),
        ("failed, before or after a fault", sum(report.unstruck_failed.values())),
        ("wrong", len(report.wrong)),
    )
    for name, count in rows:
        table.add_row(name, str(count))
    for name, summary in (("whole", report.whole_s), ("failed", report.failed_s)):
        times = f"{summary.p50 * 1e3:.0f}, {summary.high * 1e3:.0f}" if summary else NONE
        table.add_row(f"duration of {name} ones, ms: p50, max", times)
    return titled("saved conversations under faults", table)


def reason_lines(report: SaveReport) -> list[str]:
    """Return a line for each reason of failed saves."""
    parts = (
        ("struck by a fault", report.struck_failed),
        ("before or after a fault", report.unstruck_failed),
    )
    return [
        f"{count} {'save' if count == 1 else 'saves'} {which} failed: {reason}"
        for which, reasons in parts
        for reason, count in reasons.items()
    ]
