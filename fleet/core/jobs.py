"""Kinds of background job and their arguments: names, types and ranges. Runs nothing.

No argument names a path, an address or a configuration: a job always measures the deployment that
runs `fleet jobs`.
"""

import re
import uuid
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleet.core.errors import BadInput

REPORT_FILES = {"report.json": "application/json", "report.png": "image/png"}
"""Files that a job may leave in its folder, with their media types."""
EXAMPLE = '{"kind": "bench", "arguments": {"measure": "scale", "streams": [10, 300]}}'

Measure = Literal["serving", "voice", "barge-in", "scale", "hop", "transfer"]
Streams = Annotated[int, Meta(ge=1, le=1000)]
MEASURE_TAKES: dict[Measure, tuple[str, ...]] = {
    "serving": ("requests", "concurrency", "max_tokens", "frames", "warm_up"),
    "voice": ("requests", "sessions"),
    "barge-in": ("requests",),
    "scale": ("streams", "scale_seconds"),
    "hop": ("hops",),
    "transfer": (),
}
"""Names of the arguments that each measure accepts, besides `check`."""
NO_JOBS = (
    "background jobs need a Redis without cluster mode, since the keys of rq have no "
    "common slot; run `fleet bench` itself"
)
LISTS = ("streams",)
"""Names of the arguments whose values are lists."""


def _serving() -> Measure:
    """Return the default measure. A factory is needed because `omit_defaults` omits plain defaults,
    and the measure must always be shown.
    """
    return "serving"


class BenchArguments(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Arguments of a job of kind `bench`. An argument means the same as the option of `fleet bench`
    with its name.

    `serving`, `voice` and `barge-in` measure the gateway of the deployment. `scale`, `hop` and
    `transfer` measure processes that the job starts beside it, with the deployment's configuration.
    Raises: BadInput for an argument that `measure` does not accept.
    """

    measure: Measure = msgspec.field(default_factory=_serving)
    requests: Annotated[int, Meta(ge=1, le=1000)] = 16
    concurrency: Annotated[int, Meta(ge=1, le=256)] = 8
    max_tokens: Annotated[int, Meta(ge=2, le=4096)] = 24
    frames: Annotated[int, Meta(ge=2, le=4096)] = 60
    warm_up: Annotated[int, Meta(ge=0, le=100)] = 3
    sessions: Annotated[int, Meta(ge=1, le=200)] = 1
    streams: Annotated[tuple[Streams, ...], Meta(min_length=1, max_length=8)] = (10, 300)
    scale_seconds: Annotated[int, Meta(ge=1, le=120)] = 10
    hops: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    check: bool = False

    def __post_init__(self) -> None:
        takes = MEASURE_TAKES[self.measure]
        for name in self.as_json():
            if name not in ("measure", *takes, "check"):
                fitting = [measure for measure, names in MEASURE_TAKES.items() if name in names]
                raise BadInput(
                    f"arguments.{name}: the measure {self.measure} does not take it; leave it "
                    "out, or use measure "
                    f"{' or '.join(fitting)}",
                    param=f"arguments.{name}",
                )

    def as_json(self) -> dict[str, object]:
        """Return the measure, and the arguments that differ from their defaults, as JSON values."""
        return msgspec.to_builtins(self)


class TrainArguments(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Arguments of a job of kind `train`: a training run over the fleet's answers to `samples`
    questions of Pocket's corpus.

    `name`: name of the run, recorded as the source of the version that it trains; the job's name by
    default.
    """

    samples: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    name: Annotated[str, Meta(max_length=80, pattern=r"^[\w .-]*$")] = ""

    def as_json(self) -> dict[str, object]:
        """Return the arguments that differ from their defaults, as JSON values."""
        return msgspec.to_builtins(self)


class BatchArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of a job of kind `batch`, which runs a part of a batch. `batch`: id of a batch that
    `POST /v1/batches` created. A batch has at most one job at a time; the job's id is made from the
    batch's id.
    """

    batch: Annotated[str, Meta(pattern=r"^batch_[0-9a-f]{32}$")]

    def as_json(self) -> dict[str, object]:
        return msgspec.to_builtins(self)

    @property
    def job_id(self) -> str:
        return str(uuid.UUID(self.batch.removeprefix("batch_")))


JobArguments = BenchArguments | TrainArguments | BatchArguments
KINDS: dict[str, type[JobArguments]] = {
    "bench": BenchArguments,
    "train": TrainArguments,
    "batch": BatchArguments,
}


def read_arguments(kind: str, arguments: object) -> JobArguments:
    """Check and return the arguments of a job. `arguments`: JSON object of the client. Raises:
    BadInput naming the argument, the cause and the remedy.
    """
    if kind not in KINDS:
        raise BadInput(
            f"kind: unknown kind of job {kind[:40]!r}; use one of {', '.join(sorted(KINDS))}",
            param="kind",
        )
    if not isinstance(arguments, dict):
        raise BadInput(
            f"arguments: a {kind} job takes an object of named arguments, and no options of a "
            "command line; send for example "
            f"{EXAMPLE}",
            param="arguments",
        )
    try:
        return msgspec.convert(arguments, KINDS[kind])
    except msgspec.ValidationError as error:
        raise _refusal(kind, str(error)) from error


def _refusal(kind: str, message: str) -> BadInput:
    """Return the error for an argument that msgspec refused. `message`: msgspec's text, `CAUSE - at
    `$.NAME``, without the path if the object itself is at fault.
    """
    cause, _, path = message.partition(" - at ")
    unknown = re.search(r"unknown field `(.*)`", cause, re.DOTALL)
    if unknown:
        names = ", ".join(KINDS[kind].__struct_fields__)
        cause = f"a {kind} job takes no argument of this name; leave it out, or use one of {names}"
    name = unknown[1][:40] if unknown else re.sub(r"^[`$.]+|\[.*|`$", "", path)
    if name == "measure":
        cause += f"; use one of {', '.join(MEASURE_TAKES)}"
    where = f"arguments.{name}" if name else "arguments"
    return BadInput(f"{where}: {cause[:1].lower()}{cause[1:]}".replace("`", ""), param=where)
