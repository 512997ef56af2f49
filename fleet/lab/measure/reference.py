"""Requests for an implementation that the fleet is compared with (the reference implementation, the
twin or an engine), and its answers.

Each implementation runs in its own process. Knows no model: the requests are the fleet's own, stage
by stage.
"""

from collections.abc import Callable

import msgspec

from fleet.core.request import RequestSpec
from fleet.lab.measure.calls import ProcessSettings, call
from fleet.lab.report.background_load import BackgroundLoad
from fleet.lab.report.stats import Summary, summarise


class ReferenceWork(msgspec.Struct, frozen=True, kw_only=True):
    """Requests for the compared implementation. `messages`: chats from which the requests were
    made. `warm_up`: number of unmeasured runs of the first request.

    `num_threads`: thread counts to try; the reference uses the fastest.
    """

    requests: tuple[RequestSpec, ...]
    messages: tuple[list[dict[str, str]], ...]
    num_threads: tuple[int, ...]
    device: str
    dtype: str
    warm_up: int
    sample_rate_hz: int


class ReferenceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one request. `first_audio_s`: time to first audio, None without audio.

    `same_prompt`: True if the reference's own tokenisation of the chat gave the token ids of the
    request; None if the implementation does not tokenise.
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
    """All answers of the compared implementation, in request order, and its device. `others_cores`:
    background load, measured from the loading of the model on.
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
        """Seconds of audio produced per second."""
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
        """Summarise one field of `AnswerMetrics` over the answers; None if the reference does not
        measure this field.
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
    """Run a function `module:function` in a child process and return its result. `advance` is
    called for each line that the function prints, which stands for one finished request.

    `num_threads`: number of OpenMP threads, which torch reads at import. Raises: BenchError.
    """
    background_load = BackgroundLoad()
    settings = ProcessSettings(num_threads=num_threads)
    result = call(function, *arguments, kind=ReferenceResult, advance=advance, settings=settings)
    return msgspec.structs.replace(result, others_cores=background_load.cores())
