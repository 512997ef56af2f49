"""Benchmark of a long recording: one hour of speech is written down, first undisturbed, then while
the worker that writes it down is killed.

The recording is assembled from the sentences of a spoken assistant's benchmark in random order.
Memory is what the kernel counts as resident, read each second. Takes no stage names.
"""

import io
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import soundfile
from numpy.typing import NDArray
from rich.console import Group

from fleet.core.ids import WorkerId, place_of
from fleet.lab.client.audio import PCM_RATE_HZ
from fleet.lab.client.client import ApiClient
from fleet.lab.measure.assistant import QUESTIONS, SENTENCES
from fleet.lab.measure.deployment import target_fleet
from fleet.lab.measure.errors import BenchError
from fleet.lab.measure.load import with_background_load
from fleet.lab.measure.measurement import Context, Measurement, argument, whole_number
from fleet.lab.measure.polling import polling
from fleet.lab.measure.speakers import BenchSpeaker, open_speaker
from fleet.lab.measure.word_errors import WordErrors, word_errors
from fleet.lab.report.result import Result
from fleet.lab.report.stats import Ratio, at_least, at_most
from fleet.lab.report.tables import table_of, titled

KILLED_AT = (0.3, 0.7)
"""Shares of the recording's text after which the busiest worker is killed, in the second run."""
PAUSE_S = 0.4
POLL_S = 1.0
RECORDING = "recording.mp3"
SEED = 1
SETTLED = 0.5
"""Share of a run after which memory must hardly grow: the memory at this point is compared with the
memory at the end.
"""
MIB = 1 << 20
TARGET_SPEED, TARGET_GROWTH, TARGET_ERRORS_PERCENT = 8.0, 1.1, 5.0

Samples = NDArray[np.int16]


class ResidentMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory of one process half way through a run and at its end, in MiB. `name`: command
    of the process.
    """

    name: str
    half_way_mib: float
    end_mib: float

    @property
    def growth(self) -> float:
        return self.end_mib / self.half_way_mib


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one transcription of the recording. `pieces`: parts of the transcript in the order
    of arrival. `killed`: ids of the workers killed during this run; empty for the undisturbed run.
    """

    took_s: float
    pieces: tuple[str, ...]
    killed: tuple[str, ...]
    memory: tuple[ResidentMemory, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class RecordingResult(Result, frozen=True, kw_only=True):
    """Results for a recording of `recorded_s` seconds. `runs`: the undisturbed transcription, then
    the one with kills. `errors`: word errors of the undisturbed transcription.
    """

    model: str
    speaker: str
    recorded_s: float
    errors: WordErrors
    runs: tuple[Written, ...]
    others_cores: float | None = None

    def tables(self) -> Iterator[Group]:
        rows = table_of("run", "seconds", "times real time", "pieces", "killed")
        for name, run in zip(("undisturbed", "with kills"), self.runs, strict=True):
            speed = f"{self.recorded_s / run.took_s:.1f}"
            counts = (str(len(run.pieces)), str(len(run.killed)))
            rows.add_row(name, f"{run.took_s:.0f}", speed, *counts)
        title = (
            f"{self.recorded_s / 60:.0f} minutes by {self.speaker}, written down by {self.model}"
        )
        yield titled(title, rows)
        memory = table_of("process", "MiB half way", "at the end")
        for use in self.runs[0].memory:
            memory.add_row(use.name, f"{use.half_way_mib:.0f}", f"{use.end_mib:.0f}")
        yield titled("resident memory of the undisturbed run", memory)

    def targets(self) -> list[Ratio]:
        undisturbed, killed = self.runs
        slowest = min(self.recorded_s / run.took_s for run in self.runs)
        growth = max((use.growth for use in undisturbed.memory), default=1.0)
        return [
            at_least("times real time, the slower run", slowest, TARGET_SPEED, "x"),
            at_least("workers killed", len(killed.killed), len(KILLED_AT), "workers"),
            at_least("equal transcripts", float(undisturbed.text == killed.text), 1, "of 1"),
            at_most("memory, end / half way", growth, TARGET_GROWTH, "x"),
            at_most("word errors", self.errors.percent, TARGET_ERRORS_PERCENT, "%"),
        ]


class Assembled(NamedTuple):
    """A recording: MP3 file, its duration, and what is said in it."""

    file: bytes
    duration_s: float
    said: str


def assemble(speaker: BenchSpeaker, minutes: int, step: Callable[[], None]) -> Assembled:
    """Let the speaker speak each sentence once, and join all of them in random order, again and
    again, until the recording lasts at least `minutes`. `step` is called after each spoken
    sentence.
    """
    spoken: list[tuple[str, Samples]] = []
    for number, text in enumerate((*(text for text, _ in QUESTIONS), *SENTENCES), 1):
        spoken.append((text, speaker.speak(text, f"sentence-{number:02d}.wav")))
        step()
    pause = np.zeros(round(PAUSE_S * PCM_RATE_HZ), np.int16)
    order = random.Random(SEED)
    texts: list[str] = []
    parts: list[Samples] = []
    left = minutes * 60 * PCM_RATE_HZ
    while left > 0:
        for text, samples in order.sample(spoken, len(spoken)):
            texts.append(text)
            parts += [samples, pause]
            left -= len(samples) + len(pause)
    samples = np.concatenate(parts)
    file = io.BytesIO()
    soundfile.write(file, samples, PCM_RATE_HZ, format="MP3")
    return Assembled(file.getvalue(), len(samples) / PCM_RATE_HZ, " ".join(texts))


@dataclass(slots=True)
class MemoryWatch:
    """Readings of the resident memory of all descendants of the process `pid`."""

    pid: int
    readings: list[dict[tuple[int, str], int]] = field(
        default_factory=list[dict[tuple[int, str], int]]
    )

    def read(self) -> None:
        """Add a reading."""
        self.readings.append(dict(self._sizes()))

    def uses(self) -> tuple[ResidentMemory, ...]:
        """Return the memory of each process that lived from half way to the end; () without
        readings.
        """
        if not self.readings:
            return ()
        half, end = self.readings[round((len(self.readings) - 1) * SETTLED)], self.readings[-1]
        return tuple(
            ResidentMemory(name=key[1], half_way_mib=half[key] / MIB, end_mib=end[key] / MIB)
            for key in half.keys() & end.keys()
        )

    def _sizes(self) -> Iterator[tuple[tuple[int, str], int]]:
        for process in psutil.Process(self.pid).children(recursive=True):
            try:
                name, size = _name_of(process.cmdline()), process.memory_info().rss
                yield (process.pid, name), size
            except psutil.NoSuchProcess:
                continue  # it ended meanwhile


def _name_of(command: Sequence[str]) -> str:
    """Return the command without its interpreter and options."""
    words = [word for word in command if not word.startswith("-") and "=" not in word]
    start = words.index("fleet.cli") + 1 if "fleet.cli" in words else 0
    return " ".join(Path(word).name for word in words[start : start + 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRun:
    """Runs with one recording. `pid`: process that started the fleet."""

    api: ApiClient
    model: str
    pid: int
    recording: Assembled

    def write_down(self, step: Callable[[], None], killed_at: Sequence[float]) -> Written:
        """Have the recording transcribed. `killed_at`: shares of the recording's text after which
        the busiest worker is killed; () to kill no worker.
        """
        watch, pieces, killed = MemoryWatch(self.pid), list[str](), list[str]()
        moments = [share * len(self.recording.said) for share in killed_at]
        began_s = time.perf_counter()
        with polling(watch.read, POLL_S):
            for piece in self.api.transcribed_pieces(self.model, self.recording.file, RECORDING):
                pieces.append(piece)
                if moments and sum(map(len, pieces)) > moments[0]:
                    moments.pop(0)
                    killed.append(self._kill_busiest())
        took_s = time.perf_counter() - began_s
        step()
        return Written(
            took_s=took_s, pieces=tuple(pieces), killed=tuple(killed), memory=watch.uses()
        )

    def _kill_busiest(self) -> str:
        workers = [worker for worker in self.api.workers().data if worker.role]
        busiest = max(workers, key=lambda worker: worker.running)
        os.kill(place_of(WorkerId(busiest.id))[1], signal.SIGKILL)
        return busiest.id


def _measure(context: Context) -> RecordingResult:
    options = context.options
    if not options.up:
        raise BenchError("--recording kills workers: give --up, which starts a fleet for it")
    speaker = open_speaker(options.speaker)
    step = context.steps(f"speech of {speaker.name}", len(QUESTIONS) + len(SENTENCES))
    recording = assemble(speaker, options.minutes, step)
    with target_fleet(context) as target:
        assert target.pid is not None, "the fleet was started here"
        model = target.api.model()
        run = RecordingRun(api=target.api, model=model, pid=target.pid, recording=recording)
        step = context.steps(f"{options.minutes} minutes written down", 2)

        def measure() -> RecordingResult:
            undisturbed, killed = (run.write_down(step, killed_at) for killed_at in ((), KILLED_AT))
            return RecordingResult(
                model=model,
                speaker=speaker.name,
                recorded_s=recording.duration_s,
                errors=word_errors([(recording.said, undisturbed.text)]),
                runs=(undisturbed, killed),
            )

        return with_background_load(True, measure)


MEASUREMENT = Measurement(
    place=136,
    key="recording",
    run=_measure,
    option="--recording",
    help="a long recording written down, with kills on the way; needs --up",
    of_gateway=True,
    about={
        "--recording": "an hour of speech (--minutes) in the voice of --speaker, sent as one file "
        "to a fleet that is started for it: how many times faster than real time it is written "
        "down, the resident memory of each process half way and at the end, and whether the "
        "transcript is the same when the busiest worker is killed at 30 % and 70 % of it"
    },
    arguments=(
        argument(
            "--minutes",
            type=whole_number(),
            default=60,
            metavar="N",
            help="for --recording: length of the recording (60)",
        ),
    ),
)
