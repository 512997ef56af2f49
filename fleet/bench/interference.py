"""Whether long prompts make running answers wait: with prefill and decode together, and split, by as many workers.

The same load on one fleet after another: answers that stream all the time, first in peace, then while a train of long prompts
arrives, each when its time has come and not when there is room for it. Only text is asked for, so that the stage that reads the
prompt is all that is measured. Knows stages only as declared.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from fleet.bench.answer_timing import AnswerTiming
from fleet.bench.chat import ChatApi, Recording, read_recording
from fleet.bench.deployment import TargetFleet, own_fleet, resolve_config
from fleet.bench.errors import BenchError
from fleet.bench.options import BenchOptions
from fleet.bench.prompts import PROMPTS
from fleet.bench.split import body_of, num_workers, split, together, with_checkpoint
from fleet.config.settings import read_settings
from fleet.reporting.background_load import BackgroundLoad
from fleet.reporting.stats import Summary, summarise

TOGETHER, SPLIT = "together", "split"
MEDIA = ("text",)
STEADY_TOKENS = 256
LONG_TOKENS = 2
"""What a long prompt is answered with: it is its reading that disturbs."""
PEACE_S = 5.0
PROBE_CHARACTERS = 2000
BUSY = 2.0
"""Long prompts come so many times as far apart as one takes alone: a train that keeps half a worker busy, and never piles up."""
NUM_ALONE = 3

Steps = Callable[[str, int], Callable[[], None]]


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """Between two pieces of one answer: when the later one came, since the load began, and how long that was after the other."""

    at_s: float
    gap_s: float


class LongPrompt(msgspec.Struct, frozen=True, array_like=True):
    """When it was sent, since the load began, and how long its first text took."""

    sent_s: float
    first_text_s: float
    num_tokens: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet under the load. `workers`: of each role. `others_cores`: kept busy meanwhile by what is not ours."""

    name: str
    workers: dict[str, int]
    peace: tuple[Gap, ...]
    train: tuple[Gap, ...]
    long_prompts: tuple[LongPrompt, ...]
    others_cores: float

    @property
    def peace_s(self) -> Summary | None:
        return summarise([gap.gap_s for gap in self.peace])

    @property
    def train_s(self) -> Summary | None:
        return summarise([gap.gap_s for gap in self.train])

    @property
    def long_s(self) -> Summary | None:
        return summarise([prompt.first_text_s for prompt in self.long_prompts])


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """Units: `interval_s` from one long prompt to the next, the same on both sides; `num_tokens` of each."""

    num_streams: int
    num_tokens: int
    interval_s: float
    together: Side
    split: Side

    @property
    def ratio(self) -> float | None:
        """The split fleet's 95th percentile of gaps while long prompts come, over the other's."""
        ours, theirs = self.split.train_s, self.together.train_s
        return ours.p95 / theirs.p95 if ours and theirs else None


class _Train(msgspec.Struct, frozen=True, kw_only=True):
    """Found out on the first fleet, and the same for the second."""

    characters: int
    interval_s: float


def measure_interference(options: BenchOptions, steps: Steps) -> Interference:
    """Raises: BenchError if the deployment has nothing to split, or a request fails."""
    plain = resolve_config(options.config, options.overrides)
    given = with_checkpoint(plain, options.overrides)
    apart = (*given, *split(plain))
    as_one = (*apart, *together(resolve_config(options.config, apart)))
    if num_workers(resolve_config(options.config, as_one)) != num_workers(resolve_config(options.config, apart)):
        raise BenchError("the two fleets would not have as many workers; give `replicas` in one place only", param="--set")
    train: _Train | None = None
    sides: dict[str, Side] = {}
    for name, overrides in ((TOGETHER, as_one), (SPLIT, apart)):
        started = steps(f"starting a fleet, prefill and decode {name}", 1)
        with own_fleet(options.config, overrides) as target:
            started()
            load = _Load(target, options)
            train = train or load.find_train()
            sides[name] = load.run(name, train, steps)
    assert train is not None
    return Interference(
        num_streams=options.concurrency,
        num_tokens=max(prompt.num_tokens for prompt in sides[TOGETHER].long_prompts),
        interval_s=train.interval_s,
        together=sides[TOGETHER],
        split=sides[SPLIT],
    )


class _Load:
    """What is put on one fleet."""

    def __init__(self, target: TargetFleet, options: BenchOptions) -> None:
        self._target, self._options = target, options
        self._api = ChatApi(target.url, read_settings().api_key)
        self._model = self._api.model()
        self._steady = [self._body(prompt, STEADY_TOKENS) for prompt in PROMPTS]
        self._began_s = time.perf_counter()

    def find_train(self) -> _Train:
        """How long a text makes so many tokens, and how long such a prompt takes alone."""
        wanted, least = self._options.prompt_tokens, self._trace(self._ask(self._body("a", LONG_TOKENS))).num_prompt_tokens
        probe = self._trace(self._ask(self._long(0, PROBE_CHARACTERS)))
        characters = int(max(1, wanted - least) * PROBE_CHARACTERS / (probe.num_prompt_tokens - least))
        took_s = [self._trace(self._ask(self._long(number, characters))).done_s for number in range(NUM_ALONE + 1)][1:]
        return _Train(characters=characters, interval_s=BUSY * sorted(took_s)[NUM_ALONE // 2])

    def run(self, name: str, train: _Train, steps: Steps) -> Side:
        """Streams from the beginning to the end; the train after some time of peace."""
        count, stop = self._options.concurrency, threading.Event()
        self._ask(self._long(0, train.characters))
        peace = steps(f"{count} answers at a time, {name}", 1)
        neighbours = BackgroundLoad()
        self._began_s = time.perf_counter()
        with ThreadPoolExecutor(max_workers=count) as pool:
            streams = [pool.submit(self._stream, number, stop) for number in range(count)]
            try:
                _sleep_until(self._began_s + PEACE_S, streams)
                peace()
                begins_s = time.perf_counter() - self._began_s
                long_prompts = self._send_train(train, streams, steps(f"long prompts, {name}", self._options.requests))
                ends_s = time.perf_counter() - self._began_s
            finally:
                stop.set()
            traces = [self._trace(recording) for stream in streams for recording in stream.result()]
        gaps = [gap for trace in traces for gap in gaps_of(trace)]
        return Side(
            name=name,
            workers={role.name: role.replicas for role in self._target.config.roles()},
            peace=tuple(gap for gap in gaps if gap.at_s < begins_s),
            train=tuple(gap for gap in gaps if begins_s <= gap.at_s < ends_s),
            long_prompts=long_prompts,
            others_cores=neighbours.cores(),
        )

    def _stream(self, number: int, stop: threading.Event) -> list[Recording]:
        """One answer after another until told to stop."""
        recordings: list[Recording] = []
        while not stop.is_set():
            body = self._steady[(number + len(recordings) * self._options.concurrency) % len(self._steady)]
            recordings.append(self._ask(body))
        return recordings

    def _send_train(
        self, train: _Train, streams: Sequence["Future[list[Recording]]"], advance: Callable[[], None]
    ) -> tuple[LongPrompt, ...]:
        """Each at its time, whether or not the one before has been answered; waits for them all."""
        began_s, answers = time.perf_counter(), list["Future[Recording]"]()
        with ThreadPoolExecutor(max_workers=self._options.requests) as pool:
            for number in range(self._options.requests):
                _sleep_until(began_s + number * train.interval_s, streams)
                answers.append(pool.submit(self._ask, self._long(number + 1, train.characters)))
                advance()
            traces = [self._trace(answer.result()) for answer in answers]
        return tuple(
            LongPrompt(sent_s=trace.sent_s, first_text_s=trace.text[0], num_tokens=trace.num_prompt_tokens)
            for trace in traces
            if trace.text
        )

    def _ask(self, body: bytes) -> Recording:
        return self._api.answer(0, body, self._began_s, lambda: False)

    def _trace(self, recording: Recording) -> AnswerTiming:
        return read_recording(recording)

    def _long(self, number: int, characters: int) -> bytes:
        """No two begin alike, so that none can be served from what another left."""
        text = " ".join(PROMPTS)
        return self._body((f"{number}. " + text * (characters // len(text) + 1))[:characters], LONG_TOKENS)

    def _body(self, prompt: str, max_tokens: int) -> bytes:
        return body_of(self._model, prompt, self._target.config, max_tokens=max_tokens, frames=LONG_TOKENS, media=MEDIA)


def gaps_of(trace: AnswerTiming) -> list[Gap]:
    """Between the pieces of text of one answer."""
    pairs = zip(trace.text, trace.text[1:], strict=False)
    return [Gap(trace.sent_s + later_s, later_s - earlier_s) for earlier_s, later_s in pairs]


def _sleep_until(moment_s: float, streams: Sequence["Future[list[Recording]]"]) -> None:
    """Raises: what ended a stream meanwhile."""
    while (left_s := moment_s - time.perf_counter()) > 0:
        ended = next((stream for stream in streams if stream.done()), None)
        if ended is not None:
            ended.result()
        time.sleep(min(left_s, 0.1))
