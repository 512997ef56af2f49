"""Text that is spoken while it arrives: time from the last character of the first clause to the
first voiced sample, over each transport that the fleet serves.

Speakers ask one after the other, each with a seed and connections of its own, and use the
transports in turn. On the speech socket the rest of the text is sent only after the first sound. A
speech call sends the whole text at once; a voice begins to speak once it has the first clause.
Knows no stage.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec
from rich.console import Group
from rich.text import Text

from fleet.lab.client.audio import PCM_RATE_HZ
from fleet.lab.client.client import ApiClient, SpeechCall
from fleet.lab.client.growing_speech import SpeechRefused
from fleet.lab.measure.deployment import target_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import with_background_load
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.report.result import MS, Result
from fleet.lab.report.stats import Ratio, Summary, at_most, summarise
from fleet.lab.report.tables import summary_table
from fleet.processing.spoken.clauses import ClauseCutter
from fleet.processing.voice_onset import FirstVoicedClock, VoicedSearch

TARGET_MS = 150.0
SOCKET, CALL = "speech socket", "speech call"
TEXTS = (
    "Good morning, here is what I found for you this time. There is more of it below.",
    "Of course I can. The train leaves at nine, and the station is not far away.",
    "The answer is five. Two and three make five, as everybody knows.",
    "That is a good question, and there are several answers to it. Let me begin with the first.",
    "Your order was sent yesterday. It should reach you on Friday, before noon.",
    "Let me see, the weather will be dry until the evening. After that it may rain.",
    "I am afraid not. The shop is closed on Sundays, and it opens late on Mondays.",
    "Thank you for waiting. Everything is ready now, and we can begin.",
)
"""Texts of several clauses, of which the first has 13 to 42 characters."""
UNSUPPORTED = "unsupported_value"


class FirstSound(msgspec.Struct, frozen=True, kw_only=True):
    """First sound of one text. `transport`: how the text was sent. `clause`: first clause of the
    text. All times begin with the last character of the clause. `first_ms` ends with the arrival of
    the first audio, voiced or not, and `received_ms` with the arrival of the first voiced sample.
    `played_ms` ends when that sample plays, if audio is played on arrival.
    """

    transport: str
    seed: int
    clause: str
    first_ms: float
    received_ms: float
    played_ms: float


class GrowingTextResult(Result, frozen=True, kw_only=True):
    """First sounds over all transports. `refused`: transports that the fleet does not serve, each
    with the reason that the fleet gave.
    """

    model: str
    spoken: tuple[FirstSound, ...]
    refused: dict[str, str]
    others_cores: float | None = None

    @property
    def transports(self) -> list[str]:
        return list(dict.fromkeys(each.transport for each in self.spoken))

    def summary(self, transport: str, field: str = "received_ms") -> Summary | None:
        """Summarise one time of a transport. `field`: name of the field of `FirstSound`."""
        return summarise(
            [getattr(each, field) for each in self.spoken if each.transport == transport]
        )

    def tables(self) -> Iterator[Group | Text]:
        rows = [
            (f"{transport}: {what}", self.summary(transport, field))
            for transport in self.transports
            for what, field in (
                ("first voiced sample received", "received_ms"),
                ("first voiced sample played", "played_ms"),
                ("first audio received, voiced or not", "first_ms"),
            )
        ]
        num_speakers = len({each.seed for each in self.spoken})
        title = f"from the last character of the first clause; {num_speakers} speakers"
        yield summary_table(f"{title} of {self.model}", "ms", rows)
        for transport, reason in self.refused.items():
            yield Text(f"{transport}: {reason}")

    def targets(self) -> list[Ratio]:
        return [
            at_most(f"{transport}, first sound, p95", found.p95, TARGET_MS, "ms")
            for transport in self.transports
            if (found := self.summary(transport)) is not None
        ]


class _Arrival:
    """Arrival of the first sound of one text. `sent_s`: time at which the last character of the
    text's first clause was sent, on `time.perf_counter`.
    """

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._search = VoicedSearch(PCM_RATE_HZ)
        self._clock = FirstVoicedClock(PCM_RATE_HZ)
        self._first_s = self._received_s = 0.0

    @property
    def is_voiced(self) -> bool:
        return self._clock.at_s is not None

    def receive(self, pcm: bytes) -> None:
        now_s = time.perf_counter()
        self._first_s = self._first_s or now_s
        self._clock.add(pcm, now_s)
        self._search.feed(pcm)
        if self._search.found and not self._received_s:
            self._received_s = now_s

    def result(self, transport: str, seed: int, clause: str) -> FirstSound:
        """Return the times of the first sound. Raises: BenchError if the speech is silent."""
        if self._clock.at_s is None:
            raise BenchError(f"{transport}: the fleet speaks {clause!r} as silence")
        first_ms, received_ms, played_ms = (
            round((at_s - self._sent_s) * MS, 1)
            for at_s in (self._first_s, self._received_s, self._clock.at_s)
        )
        return FirstSound(
            transport=transport,
            seed=seed,
            clause=clause,
            first_ms=first_ms,
            received_ms=received_ms,
            played_ms=played_ms,
        )


def until_first_clause(text: str) -> tuple[str, str]:
    """Return the beginning of a text up to the character by which its first clause is complete, and
    that clause. The character is the space after a mark; where a long clause ends between two
    words, it is the first letter of the next word. Raises: BenchError if the text has one clause.
    """
    cutter = ClauseCutter()
    for end, char in enumerate(text, 1):
        if clauses := cutter.feed(char):
            return text[:end], clauses[0].text
    raise BenchError(f"{text!r} has one clause; a text of several is needed")


def time_socket(api: ApiClient, _model: str, text: str, seed: int) -> FirstSound:
    """Speak a text on a speech socket, up to its last sample, and return the times of its first
    sound.

    Raises: SpeechRefused if the fleet does not serve the socket; ApiError, BenchError.
    """
    begin, clause = until_first_clause(text)
    with api.growing_speech() as speech:
        speech.configure(seed=seed)
        speech.add(begin[:-1])
        arrival = _Arrival(time.perf_counter())
        speech.add(begin[-1])
        sends_rest = True
        for pcm in speech:
            arrival.receive(pcm)
            if arrival.is_voiced and sends_rest:
                sends_rest = False
                speech.add(text[len(begin) :])
                speech.finish()
    return arrival.result(SOCKET, seed, clause)


def time_call(api: ApiClient, model: str, text: str, seed: int) -> FirstSound:
    """Speak a text by a speech call, up to its last sample, and return the times of its first
    sound. Raises: ApiError, BenchError.
    """
    arrival = _Arrival(time.perf_counter())
    call = SpeechCall(model=model, input=text, response_format="pcm", seed=seed)
    rest = b""
    with closing(api.open_speech(call)) as response:
        while piece := response.read():
            pcm = rest + piece
            whole = len(pcm) // 2 * 2
            rest = pcm[whole:]
            arrival.receive(pcm[:whole])
    return arrival.result(CALL, seed, until_first_clause(text)[1])


TimeText = Callable[[ApiClient, str, str, int], FirstSound]
TRANSPORTS: dict[str, TimeText] = {SOCKET: time_socket, CALL: time_call}


def warm_up(api: ApiClient, model: str, text: str) -> dict[str, str]:
    """Speak a text over each transport. Return the transports that the fleet does not serve, with
    the reason that the fleet gave. Raises: ApiError, BenchError.
    """
    refused: dict[str, str] = {}
    for transport, time_text in TRANSPORTS.items():
        try:
            time_text(api, model, text, 0)
        except SpeechRefused as error:
            if error.refusal != UNSUPPORTED:
                raise
            refused[transport] = error.message
    return refused


def measure_growing_text(
    api: ApiClient, texts: Sequence[str], num_speakers: int, step: Callable[[], None]
) -> GrowingTextResult:
    """Measure one text of each speaker over each transport that the fleet serves, after a warm-up
    text over each. Raises: ApiError, BenchError.
    """
    model = api.model()
    refused = warm_up(api, model, texts[0])
    step()
    served = [time_text for name, time_text in TRANSPORTS.items() if name not in refused]
    spoken: list[FirstSound] = []
    for seed in range(1, num_speakers + 1):
        text = texts[seed % len(texts)]
        spoken += [time_text(api, model, text, seed) for time_text in served]
        step()
    return GrowingTextResult(model=model, spoken=tuple(spoken), refused=refused)


def _measure(context: Context) -> GrowingTextResult:
    options, count = context.options, context.options.requests
    with target_fleet(context) as target:
        step = context.steps("spoken texts", count + 1)
        return with_background_load(
            options.up, lambda: measure_growing_text(target.api, TEXTS, count, step)
        )


MEASUREMENT = Measurement(
    place=143,
    key="growing_text",
    run=_measure,
    option="--growing-text",
    help="measure the first sound of --requests texts that are spoken while they arrive",
    of_gateway=True,
    about={
        "--growing-text": "the time from the last character of a text's first clause to the first "
        "voiced sample, on the speech socket, where the rest of the text comes later, and of a "
        "streamed speech call: --requests speakers one after the other, each with its own seed"
    },
)
