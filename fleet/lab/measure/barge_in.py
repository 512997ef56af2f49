"""Barge-in benchmark over `/v1/realtime`: speech interrupts an answer; measured is the time until
the answer has stopped in every process.

All times count from the first voiced sample sent, on this client's clock. Resources in use come
from the workers' reports, which are renewed several times per lease. Takes the stages from the
graph.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from rich.console import Group

from fleet.lab.client.client import ApiClient, ResourcesInUse
from fleet.lab.client.errors import ApiError
from fleet.lab.client.realtime import BLOCK_BYTES, RealtimeSession, encode_event, update_audio_input
from fleet.lab.measure.deployment import target_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import with_background_load
from fleet.lab.measure.measurement import Context, Measurement
from fleet.lab.measure.polling import polling
from fleet.lab.measure.voice import (
    TIMEOUT_S,
    EventReader,
    Samples,
    SpokenQuestion,
    questions_of,
)
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, Summary, at_most, summarise
from fleet.lab.report.tables import summary_table

LONG_QUESTION = "count to twenty"
"""A question whose answer outlasts the interruption."""
LISTEN_BYTES = 25 * BLOCK_BYTES
"""Silence sent before the interruption: half a second, during which the answer plays."""
POLL_S = 0.01
TARGET_P50_MS, FREED_TARGET_P50_MS = 250.0, 300.0
VOICED = 0.1
"""Amplitude threshold for the first voiced sample, relative to the peak."""
DETECTION = {
    "type": "server_vad",
    "threshold": 0.5,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
    "create_response": False,
}


class BargeIn(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one interruption, each from the first voiced sample sent: until speech was reported,
    the answer was cancelled, all tasks had ended, and their memory was free.
    """

    detected_ms: float
    cancelled_ms: float
    idle_ms: float
    memory_ms: float

    @property
    def freed_ms(self) -> float:
        """Time from the end of the answer until its memory was free."""
        return self.memory_ms - self.cancelled_ms


class BargeInResult(Result, frozen=True, kw_only=True):
    """Measured interruptions, each in a session of its own."""

    model: str
    turns: tuple[BargeIn, ...]
    others_cores: float | None = None

    def summary(self, field: str) -> Summary | None:
        """Summarise one duration of the interruptions. `field`: name of the field of `BargeIn`."""
        return summarise([float(getattr(turn, field)) for turn in self.turns])

    def tables(self) -> list[Group]:
        rows = [
            ("speech detected", self.summary("detected_ms")),
            ("answer cancelled", self.summary("cancelled_ms")),
            ("all stages idle", self.summary("idle_ms")),
            ("memory free", self.summary("memory_ms")),
        ]
        title = f"{len(self.turns)} interrupted answers of {self.model}"
        return [summary_table(title, "ms from the first voiced sample", rows)]

    def targets(self) -> list[Ratio]:
        """Compare two medians with their targets: first voiced sample to the answer's end, and
        answer's end to free memory.
        """
        parts = (
            ("barge-in to cancelled, p50", self.summary("cancelled_ms"), TARGET_P50_MS),
            ("cancelled to memory free, p50", self.summary("freed_ms"), FREED_TARGET_P50_MS),
        )
        return [at_most(name, part.p50, target, "ms") for name, part, target in parts if part]


@dataclass(slots=True)
class ResourceMonitor:
    """Samples of the fleet's resources in use. `samples`: (time by `time.perf_counter`, resources),
    oldest first.
    """

    api: ApiClient
    samples: list[tuple[float, ResourcesInUse]] = field(
        default_factory=list[tuple[float, ResourcesInUse]]
    )

    def read(self) -> None:
        """Add a sample. Adds none if the gateway cannot be read."""
        try:
            self.samples.append((time.perf_counter(), self.api.resources_in_use()))
        except ApiError:
            return  # if it lasts, `wait` times out

    def wait(
        self, after_s: float, reached: Callable[[ResourcesInUse], bool], failure: str
    ) -> tuple[float, ResourcesInUse]:
        """Return the first sample after `after_s` for which `reached` is True. Another thread must
        call `read` meanwhile. Raises: BenchError with the text `failure` if no such sample comes in
        time.
        """
        deadline_s = time.perf_counter() + TIMEOUT_S
        while time.perf_counter() < deadline_s:
            found = next(
                (
                    sample
                    for sample in tuple(self.samples)
                    if sample[0] > after_s and reached(sample[1])
                ),
                None,
            )
            if found is not None:
                return found
            time.sleep(POLL_S)
        raise BenchError(f"{failure} for {TIMEOUT_S:g} s; is the fleet also used by others?")


def measure_barge_in(
    api: ApiClient, voice: SpokenQuestion, turns: int, step: Callable[[], None]
) -> BargeInResult:
    """Measure `turns` interruptions with the spoken question `voice`, after a warm-up interruption.
    Raises: ApiError, BenchError.
    """
    model = api.model()
    measured: list[BargeIn] = []
    for number in range(turns + 1):
        # A session each, so that no turn has the history of another.
        with api.realtime(model) as session:
            turn = _interrupt(api, session, voice.samples)
        if number:
            measured.append(turn)
        step()
    return BargeInResult(model=model, turns=tuple(measured))


def _interrupt(api: ApiClient, session: RealtimeSession, voice: Samples) -> BargeIn:
    monitor, events = ResourceMonitor(api), EventReader(session)
    session.send(update_audio_input(turn_detection=DETECTION))
    events.wait("session.updated")
    with polling(monitor.read, POLL_S):
        before = monitor.wait(0.0, lambda used: used.tasks == 0, "the fleet was not idle")[1]
        content = [{"type": "input_text", "text": LONG_QUESTION}]
        session.send(
            encode_event(
                "conversation.item.create",
                item={"type": "message", "role": "user", "content": content},
            )
        )
        session.send(encode_event("response.create"))
        events.wait("response.output_audio.delta")
        session.speak(bytes(LISTEN_BYTES), time.perf_counter())
        spoken_s = time.perf_counter()
        session.speak(_from_first_voiced(voice).tobytes(), spoken_s)
        remedy = "; if the voice was not detected as speech, name recordings with --wav"
        detected_s, _ = events.wait("input_audio_buffer.speech_started", remedy)
        cancelled_s, done = events.wait("response.done")
        if done.response.status != "cancelled" or cancelled_s < spoken_s:
            raise BenchError(
                f"the answer to {LONG_QUESTION!r} ended before it was interrupted; a longer one "
                "is needed"
            )
        idle_s, _ = monitor.wait(spoken_s, lambda used: used.tasks == 0, "the stages were not idle")
        memory_s, _ = monitor.wait(
            spoken_s, lambda used: _is_freed(used, before), "the memory was not free"
        )
    detected_ms, cancelled_ms, idle_ms, memory_ms = (
        round((at_s - spoken_s) * 1e3, 1) for at_s in (detected_s, cancelled_s, idle_s, memory_s)
    )
    return BargeIn(
        detected_ms=detected_ms, cancelled_ms=cancelled_ms, idle_ms=idle_ms, memory_ms=memory_ms
    )


def _is_freed(used: ResourcesInUse, before: ResourcesInUse) -> bool:
    return used.tasks == 0 and used.pages <= before.pages and used.slots <= before.slots


def _from_first_voiced(samples: Samples) -> Samples:
    """Return the samples without silence and breath before the first voiced sample."""
    level = np.abs(samples.astype(np.int32))
    return samples[int(np.argmax(level > VOICED * int(level.max(initial=0)))) :]


def _measure(context: Context) -> BargeInResult:
    options, count = context.options, context.options.requests
    with target_fleet(context) as target:
        question = questions_of(context, target.api, 1)[0]
        step = context.steps("interruptions", count + 1)
        return with_background_load(
            options.up, lambda: measure_barge_in(target.api, question, count, step)
        )


MEASUREMENT = Measurement(
    place=142,
    key="barge_in",
    run=_measure,
    option="--barge-in",
    help="measure --requests interruptions over the Realtime WebSocket",
    of_gateway=True,
    about={
        "--barge-in": "speech into --requests answers: from its first voiced sample until the "
        "answer has ended, all stages are idle, and their memory is free"
    },
)
