"""The sentence on a voice session: how it went, from its recorded turns. Pure; knows no page."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from web.console import formats
from web.console.verdict import MAX_FIRST_MS, AnswerVerdict, Kind, Piece
from web.realtime.recorded_sessions import SessionRecord
from web.realtime.turn_log import TurnRecord
from web.realtime.turn_outcomes import TurnOutcome, outcome_of

SAID: dict[TurnOutcome, str] = {
    "interrupted": "interrupted by the caller",
    "stopped": "stopped by the client",
    "cut": "cut at the limit of tokens",
    "refused": "refused",
    "failed": "failed",
    "open": "without a recorded end",
    "unanswered": "without an answer",
}
TROUBLE_NAMES = {
    "failed": "an answer failed",
    "refused": "an answer was refused",
    "moved": "resumed at another gateway",
    "dropouts": "dropouts",
}
LIVE_OUTCOMES: dict[TurnOutcome, str] = {"open": "under way", "unanswered": "not answered yet"}


def judge_session(record: SessionRecord) -> AnswerVerdict:
    """Return the sentence on a session."""
    counts = Counter[TurnOutcome]()
    counts.update(outcome_of(turn) for turn in record.turns)
    title, kind = _title(record, counts)
    words = [f"{title}: {_length(record)}", *_parts(record, counts)]
    return AnswerVerdict(kind, (Piece(", ".join(words)), Piece(f"{_end(record)}.")))


def usual_wait_ms(turns: Sequence[TurnRecord]) -> float | None:
    """Return the median wait from the end of the caller's speech to the first sound of the answer;
    None if no turn has a known wait.
    """
    known = [t.voice_to_voice_ms for t in turns if t.voice_to_voice_ms is not None]
    return statistics.median(known) if known else None


def _title(record: SessionRecord, counts: Counter[TurnOutcome]) -> tuple[str, Kind]:
    wait_ms = usual_wait_ms(record.turns)
    if record.is_live:
        return "Live", "running"
    if not record.ended_us:
        return "End not recorded", "unknown"
    if counts["failed"] or counts["refused"]:
        return "With failures", "failed"
    if any(turn.underruns for turn in record.turns):
        return "With dropouts", "slow"
    if wait_ms is not None and wait_ms > MAX_FIRST_MS:
        return "Slow", "slow"
    if not record.turns:
        return "Nothing was said", "unknown"
    if counts["open"] or counts["unanswered"]:
        return "Ended before the last answer", "stopped"
    return "Fine", "fine"


def _length(record: SessionRecord) -> str:
    view = record.view
    number = record.turns[-1].number if record.turns else 0
    until_us = record.ended_us or view.seen_us
    took = formats.seconds((until_us - view.created_us) / 1e6)
    return f"{_count(number, 'turn')} in {took}"


def _parts(record: SessionRecord, counts: Counter[TurnOutcome]) -> Iterator[str]:
    """Yield what happened to the turns that are recorded."""
    turns = record.turns
    words: dict[TurnOutcome, str] = {**SAID, **(LIVE_OUTCOMES if record.is_live else {})}
    if turns and turns[0].number > 1:
        yield f"of which the first {turns[0].number - 1} are no longer recorded"
    if counts["answered"]:
        is_all = counts["answered"] == len(turns)
        yield "all answered" if is_all else f"{counts['answered']} answered"
    for outcome, said in words.items():
        if counts[outcome]:
            yield f"{counts[outcome]} {said}{_causes(turns, outcome)}"
    if resumed := sum(turn.continues for turn in turns):
        yield f"{resumed} continued after a false alarm"
    if moved := sum(len(turn.gateways) > 1 for turn in turns):
        yield f"{moved} resumed at another gateway"
    if dropouts := sum(turn.underruns for turn in turns):
        yield _count(dropouts, "dropout")
    if (wait_ms := usual_wait_ms(turns)) is not None:
        usual = formats.ms(wait_ms)
        yield f"usual wait {usual} from the end of the caller's speech to the first sound"


def _causes(turns: Sequence[TurnRecord], outcome: TurnOutcome) -> str:
    if outcome not in ("failed", "refused"):
        return ""
    found = dict.fromkeys(turn.cause for turn in turns if outcome_of(turn) == outcome)
    causes = ", ".join(filter(None, found))
    return f" ({causes})" if causes else ""


def _end(record: SessionRecord) -> str:
    if record.is_live:
        return ""
    if record.ended_us:
        return f"; {record.end}" if record.end else ""
    return (
        "; what came after the last record is not known here: its gateway stopped, or a gateway "
        "of another host continued it"
    )


def _count(number: int, what: str) -> str:
    return f"{formats.count(number)} {what}{'' if number == 1 else 's'}"
