"""Requests for the reference implementation, the twin or an engine, and their answers.

Each runs in a process of its own. Knows no model: the requests are the fleet's own, stage by stage.
"""

from collections.abc import Callable

import msgspec

from fleet.core.request import RequestSpec
from fleet.lab.measure.calls import ProcessSettings, call
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.stats import Summary, summarise


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
        """Summarise one field of `AnswerMetrics`; None for a field that a reference
        does not know.
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


def run_reference(
    function: str,
    *arguments: object,
    advance: Callable[[], None],
    num_threads: int | None = None,
) -> ReferenceResult:
    """Return the result of a function `module:function` in a process of its own; each line that it
    prints is one request done.

    `num_threads`: threads of OpenMP, which it reads when torch is imported. Raises: BenchError.
    """
    background_load = BackgroundLoad()
    settings = ProcessSettings(num_threads=num_threads)
    result = call(function, *arguments, kind=ReferenceResult, advance=advance, settings=settings)
    return msgspec.structs.replace(result, others_cores=background_load.cores())
