"""The verdict on an answer: one sentence on what happened to the listener, and why. Pure.

Each claim follows from the trace. Where the trace does not tell, the sentence says so. Knows no
stage by name and no page.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from fleet.core.ids import CLIENT
from fleet.telemetry.trace import LIVE_STATES, SoundGaps
from web.console import formats
from web.console.answer_facts import AUDIO, LOSSES, TEXT, AnswerFacts, Loss, Pace
from web.http.errors import REFUSALS

Kind = Literal["fine", "slow", "interrupted", "refused", "failed", "stopped", "running", "unknown"]
MAX_FIRST_MS = 1000.0
"""Wait for the first output from which an answer counts as slow: people notice a pause of a second
as a break of the conversation.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a sentence. `worker` is the worker that the part names, "" for other words."""

    text: str
    worker: str = ""


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """What happened to the listener. `kind` is the class of the outcome, `pieces` the sentence."""

    kind: Kind
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


Words = list[Piece | str]
"""Parts of a sentence; plain strings name no worker."""


def judge(facts: AnswerFacts, causes: Mapping[str, str] | None = None) -> AnswerVerdict:
    """Return the verdict on an answer. `causes`: signal or exit status of workers that died, by
    worker id, as far as it is known.
    """
    state = facts.trace.state
    if state in LIVE_STATES:
        return _verdict("running", "Running", _progress(facts))
    if state == "failed":
        return _failed(facts)
    if state == "aborted":
        return _verdict("stopped", "Stopped", _stopped(facts))
    if facts.edge(AUDIO) is None and facts.edge(TEXT) is None:
        return _verdict("unknown", "Without output", ["it ended, and the trace has no output"])
    if losses := facts.losses():
        return _interrupted(facts, losses, causes or {})
    if slow := _slowness(facts):
        return _verdict("slow", "Slow", slow)
    tells_gaps = facts.underruns is not None or facts.gaps or facts.edge(AUDIO) is None
    return _verdict("fine", "Fine" if tells_gaps else "Complete", _fine(facts))


def _verdict(kind: Kind, title: str, words: Words) -> AnswerVerdict:
    pieces = [Piece(word) if isinstance(word, str) else word for word in words]
    return AnswerVerdict(kind, (Piece(f"{title}: "), *pieces, Piece(".")))


def _took(us: float) -> str:
    return formats.ms(us / 1000) if us < 1e6 else formats.seconds(us / 1e6)


def _count(number: int, what: str) -> str:
    return f"{formats.count(number)} {what}{'' if number == 1 else 's'}"


def _progress(facts: AnswerFacts) -> Words:
    words: Words = [f"for {_took(facts.end_us - facts.trace.created_us)}"]
    waiting = [t.stage for t in facts.trace.tasks if t.stage != CLIENT and not t.claimed_us]
    if waiting:
        words.append(f"; waiting for a worker: {', '.join(waiting)}")
    return [*words, "; ", *_made(facts)]


def _made(facts: AnswerFacts) -> Words:
    """Say how much of the answer was made, however it ended."""
    if facts.num_samples:
        return [f"{formats.seconds(facts.sound_s)} of speech made"]
    edge = facts.edge(TEXT)
    return [f"{_count(edge.items, 'token')} of text made" if edge is not None else "no output yet"]


def _failed(facts: AnswerFacts) -> AnswerVerdict:
    trace = facts.trace
    why = (trace.error or trace.code or "the cause is not stored").rstrip(".")
    silent = facts.edge(AUDIO) is None and facts.edge(TEXT) is None
    if trace.code in REFUSALS and silent:
        return _verdict("refused", "Refused", [why])
    failed = next((event for event in trace.events if event.what == "failed"), None)
    words: Words = [why]
    if failed is not None and failed.stage:
        words.append(f"; {failed.stage}")
        words += [" at ", Piece(failed.worker, failed.worker)] if failed.worker else []
        words.append(f" after {_took(failed.at_us - trace.created_us)}")
    words.append("; nothing reached the listener" if silent else "; ")
    return _verdict("failed", "Failed", words if silent else [*words, *_made(facts)])


def _stopped(facts: AnswerFacts) -> Words:
    why = (facts.trace.error or "the cause is not stored").rstrip(".")
    took = _took(facts.end_us - facts.trace.created_us)
    return [f"{why}, after {took}; ", *_made(facts), *_played(facts)]


def _played(facts: AnswerFacts) -> Words:
    report = facts.trace.playback
    if report is None or not facts.rate_hz or not facts.num_samples:
        return []
    if report.played_samples >= facts.num_samples:
        return [", all of it played"]
    return [f", {formats.seconds(report.played_samples / facts.rate_hz)} of it reported as played"]


def _interrupted(
    facts: AnswerFacts, losses: tuple[Loss, ...], causes: Mapping[str, str]
) -> AnswerVerdict:
    words: Words = []
    for number, loss in enumerate(losses):
        words += ["; "] if number else []
        words += _describe_loss(facts, loss, causes)
    died = any(loss.how in ("died", "lapsed") for loss in losses)
    words += ["; ", *_completeness(facts), *_dropouts(facts)]
    title = "Interrupted by a death" if died else "Interrupted"
    return _verdict("interrupted", title, words)


def _describe_loss(facts: AnswerFacts, loss: Loss, causes: Mapping[str, str]) -> Iterator[Piece]:
    cause = causes.get(loss.worker, "")
    what = LOSSES.get(loss.how, loss.how or "lost the task")
    yield Piece(loss.worker or f"the worker of {loss.stage}", loss.worker)
    yield Piece(
        f" {what}{f' ({cause})' if cause else ''} "
        f"after {_took(loss.at_us - facts.trace.created_us)}"
    )
    if not loss.resumed_us:
        yield Piece(f", and nobody took {loss.stage} over")
        return
    same = loss.next_worker == loss.worker
    yield Piece(", and " if same else "; ")
    if not same:
        yield Piece(loss.next_worker or "another worker", loss.next_worker)
    yield Piece(f"{'' if same else ' '}continued after {_took(loss.resumed_us - loss.at_us)}")


def _completeness(facts: AnswerFacts) -> Words:
    """Say if the client has received everything, as far as the acknowledged chunks tell."""
    out = facts.edge(AUDIO) or facts.edge(TEXT)
    assert out is not None
    what = "sample" if out.medium == AUDIO else "token"
    if out.consumed >= out.produced:
        return [f"no {what} was lost"]
    return [f"{_count(out.produced - out.consumed, 'chunk')} did not reach the client"]


def _dropouts(facts: AnswerFacts) -> Words:
    if facts.underruns is None:
        return []
    return [f", {_count(facts.underruns, 'dropout')}" if facts.underruns else ", no dropout"]


def _slowness(facts: AnswerFacts) -> Words:
    """Say why the listener had to wait; empty if the answer came in time."""
    heard = [f"; {_count(facts.underruns, 'dropout')}"] if facts.underruns else []
    medium = AUDIO if facts.edge(AUDIO) is not None else TEXT
    pace = facts.slow_stage()
    if pace is not None and facts.waited_for_client():
        return ["the client took the sound more slowly than it was made", *heard] if heard else []
    if pace is not None:
        return [*_describe_pace(pace), *heard]
    first_ms = facts.first_ms(medium)
    if first_ms is not None and first_ms > MAX_FIRST_MS:
        return [*_describe_start(facts, medium, first_ms), *heard]
    if facts.underruns:
        return _describe_dropouts(facts, facts.underruns)
    if facts.underruns is None and (gaps := facts.gaps) is not None and gaps.num:
        words = f"{_count(gaps.num, 'gap')} in the sound as it was made, {_longest(gaps)}"
        return [f"{words}; no report of a player"]
    return []


def _longest(gaps: SoundGaps) -> str:
    return f"the longest {_took(gaps.longest_us)}"


def _describe_pace(pace: Pace) -> Words:
    task = pace.task
    words: Words = [f"{task.stage} took {_took(pace.took_ms * 1000)} for each "]
    words.append(f"{pace.item_ms:.0f} ms of sound" if pace.item_ms < 1000 else "second of sound")
    owner = next((sizes for sizes in task.batches if sizes.worker == task.owner), None)
    if owner is not None:
        words.append(f"; {formats.count(round(owner.mean, 1))} in its batch")
    if task.owner:
        words += [" at ", Piece(task.owner, task.owner)]
    return words


def _describe_start(facts: AnswerFacts, medium: str, first_ms: float) -> Words:
    what = "sound" if medium == AUDIO else "text"
    words: Words = [f"first {what} after {_took(first_ms * 1000)}"]
    steps = facts.first_steps(medium)
    if steps:
        name = max(steps, key=lambda step: steps[step])
        words.append(f", {_took(steps[name] * 1000)} of it {name}")
    return words


def _describe_dropouts(facts: AnswerFacts, count: int) -> Words:
    words: Words = [f"{_count(count, 'dropout')}, although the sound as a whole was made in time"]
    gaps = facts.gaps
    if gaps is not None and gaps.num:
        return [*words, f"; {_count(gaps.num, 'gap')} in it, {_longest(gaps)}"]
    if gaps is not None:
        return [*words, "; it had no gap when it left the last stage"]
    return [*words, "; when its parts were made is no longer stored"]


def _fine(facts: AnswerFacts) -> Words:
    trace = facts.trace
    medium = AUDIO if facts.edge(AUDIO) is not None else TEXT
    first_ms = facts.first_ms(medium)
    assert first_ms is not None
    since = " from the end of your speech" if trace.turn is not None else ""
    first = f"first {'sound' if medium == AUDIO else 'text'} after {_took(first_ms * 1000)}{since}"
    if medium == TEXT:
        edge = facts.edge(TEXT)
        assert edge is not None
        return [f"{first}, {_count(edge.items, 'token')} in {_took(facts.end_us - edge.first_us)}"]
    words: Words = [f"{first}, {formats.seconds(facts.sound_s)} of speech"]
    if facts.sound_s:
        rtf = (facts.end_us - trace.created_us) / 1e6 / facts.sound_s
        words.append(f" at {formats.ratio(rtf)} x real time")
    return [*words, *_continuity(facts), *_played_part(facts)]


def _continuity(facts: AnswerFacts) -> Words:
    """Say whether the sound had a dropout, by the player's report, or without a report by the times
    at which the sound was made.
    """
    if facts.underruns is not None:
        return [", no dropout"]
    if facts.gaps is not None:
        return [", no gap in it; no report of a player"]
    return ["; if it could be played without a gap is not known, no player has reported"]


def _played_part(facts: AnswerFacts) -> Words:
    report = facts.trace.playback
    if report is None or report.played_samples >= facts.num_samples or not facts.rate_hz:
        return []
    return [f"; {formats.seconds(report.played_samples / facts.rate_hz)} of it reported as played"]
