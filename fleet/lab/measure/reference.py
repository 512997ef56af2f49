"""The reference implementation, or the twin, run in a process of its own.

Both read one work file and write one result file. Knows no model: the requests are the fleet's own,
stage by stage.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec

from fleet.core.request import RequestSpec
from fleet.lab.measure.errors import BenchError
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.stats import Summary, summarise
from fleet.process.parent_death import signalled_with_parent

ResultT = TypeVar("ResultT")
TAIL_LINES = 8
PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Waiting OpenMP threads sleep: next to one busy process, two spinning ones slowed a small model
tenfold (measured).
"""


class ReferenceWork(msgspec.Struct, frozen=True, kw_only=True):
    """The requests to run. `messages`: the chats from which they were made; `warm_up`: unmeasured
    runs of the first request.

    Of several `num_threads` the reference uses the fastest.
    """

    requests: tuple[RequestSpec, ...]
    messages: tuple[list[dict[str, str]], ...]
    num_threads: tuple[int, ...]
    device: str
    dtype: str
    warm_up: int
    sample_rate_hz: int


class ReferenceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request; without audio `first_audio_s` is None.

    `same_prompt`: the reference's own tokenisation of the chat gave the ids of the request.
    """

    seconds: float
    first_audio_s: float | None
    num_samples: int
    sample_rate_hz: int
    answer_ids: tuple[int, ...]
    same_prompt: bool | None = None

    @property
    def audio_s(self) -> float:
        return self.num_samples / self.sample_rate_hz if self.sample_rate_hz else 0.0


class ReferenceResult(msgspec.Struct, frozen=True, kw_only=True):
    """All answers, in the order of the requests, and the device. `others_cores`: background load,
    from the loading on.
    """

    answers: tuple[ReferenceAnswer, ...]
    load_s: float
    num_threads: int
    device: str
    dtype: str
    others_cores: float | None = None

    @property
    def seconds(self) -> float:
        return sum(answer.seconds for answer in self.answers)

    @property
    def throughput(self) -> float:
        """Seconds of audio per second."""
        return sum(answer.audio_s for answer in self.answers) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def device_line(self) -> str:
        return (
            f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}, {self.device}, "
            f"{self.dtype}"
        )

    def summary(self, field: str) -> Summary | None:
        """Summarise one field of `AnswerMetrics`; None for those of which a reference knows
        nothing.
        """
        match field:
            case "first_audio_s":
                return summarise([answer.first_audio_s for answer in self.answers])
            case "last_sample_s" | "total_s":
                return summarise([answer.seconds for answer in self.answers])
            case "rtf":
                return summarise(
                    [
                        answer.seconds / answer.audio_s if answer.audio_s else None
                        for answer in self.answers
                    ]
                )
            case _:
                return None


def run_in_subprocess(
    module: str, options: Sequence[str], work: ReferenceWork, advance: Callable[[], None]
) -> ReferenceResult:
    """Run `python -m MODULE OPTIONS --requests FILE --out FILE`; each line it prints is one request
    done.

    Raises: BenchError with the end of what it wrote to stderr.
    """
    result, others_cores = run_script(
        module, options, msgspec.json.encode(work), ReferenceResult, advance
    )
    return msgspec.structs.replace(result, others_cores=others_cores)


def run_script(
    module: str,
    options: Sequence[str],
    work: bytes,
    answers: type[ResultT],
    advance: Callable[[], None],
) -> tuple[ResultT, float | None]:
    """Run `python -m MODULE OPTIONS --requests FILE --out FILE`, which reads `work`; `advance` is
    called at each line it prints.

    Return its result, JSON of the type `answers`, and the background load. Raises: BenchError with
    the end of its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        work_file, result_file, log = (
            Path(folder, "requests.json"),
            Path(folder, "result.json"),
            Path(folder, "stderr"),
        )
        work_file.write_bytes(work)
        command = [
            sys.executable,
            "-m",
            module,
            *options,
            "--requests",
            str(work_file),
            "--out",
            str(result_file),
        ]
        background_load = BackgroundLoad()
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **PASSIVE_WAIT},
                preexec_fn=signalled_with_parent(signal.SIGKILL),
            )
        with process, ExitStack() as stack:
            # for an interruption; no effect on a process that has ended
            stack.callback(process.terminate)
            assert process.stdout is not None
            for _line in process.stdout:
                advance()
            process.wait()
        if process.returncode != 0 or not result_file.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise BenchError(
                f"{module} ended with status {process.returncode}: {tail or 'it printed nothing'}"
            )
        return msgspec.json.decode(result_file.read_bytes(), type=answers), background_load.cores()
