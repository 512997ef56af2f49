"""Calls of the scripts that write whole requests: submission, client attachment, end, retention."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleet.control.scripts.calls import Arg, Call, script
from fleet.core.events import RequestSubmitted, encode_event
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.core.request import RequestSpec, encode_request

API_RIGHT = "api"
"""Right of `DELETE /v1/fleet/requests/{id}`: permits an abort regardless of the gateway that holds
the client edges.
"""
RETENTION_S, AUDIO_RETENTION_S = 600, 60
"""Default retention of a request's keys after its end. Audio, in edge logs and prompt, is large and
retained for less time.
"""


def kind_of(spec: RequestSpec) -> str:
    """Return the default kind of a request: speech if it has more than one client edge, else
    text.
    """
    return "speech" if len(spec.outputs) > 1 else "text"


def submit(
    spec: RequestSpec,
    blob: bytes | None,
    *,
    bound: int,
    stages: Sequence[StageName],
    edges: Sequence[EdgeName],
    gateway: WorkerId,
    audio: Sequence[EdgeName] = (),
    roles: Sequence[RoleName] = (),
    grace_us: int = 0,
    retention_s: int = RETENTION_S,
    first_roles: Sequence[RoleName] = (),
) -> Call:
    """Submit a request.

    `first_roles`: the role to which each stage's task is granted; by default the stages' own names.
    `retention_s`: time for which the request's keys outlive it; the logs of the edges `audio`
    outlive it for `AUDIO_RETENTION_S`.
    Refused unless each of `roles` has a worker, lost its last one less than `grace_us` ago, or has
    one starting.
    """
    submitted = RequestSubmitted(request=spec.id, graph=spec.graph, outputs=spec.outputs)
    return Call.of(
        "submit",
        bound,
        spec.id,
        encode_request(spec),
        blob,
        ",".join(stages),
        ",".join(edges),
        ",".join(spec.outputs),
        gateway,
        encode_event(submitted),
        spec.session,
        spec.kind or kind_of(spec),
        spec.model,
        ",".join(audio),
        ",".join(roles),
        grace_us,
        retention_s,
        AUDIO_RETENTION_S,
        ",".join(first_roles or stages),
    )


def admission(
    request: RequestId, *, bound: int, gateway: WorkerId, roles: Sequence[RoleName], grace_us: int
) -> Call:
    """Ask whether a request would be admitted now, without submitting it: the answer is the refusal
    that `submit` would give, or `ok` with the number of live requests still allowed below `bound`.
    """
    return Call.of("admission", bound, request, gateway, ",".join(roles), grace_us)


@script
def end_request(
    leader: str,
    request: RequestId,
    state: str,
    code: str,
    message: str,
    param: str | None,
    *,
    dead_stage: StageName | None = None,
) -> Call:
    """`dead_stage`: the stage whose workers died over the request, which becomes a dead letter."""
    ...


@script
def abort(request: RequestId, right: str | Epoch, reason: str) -> Call: ...


def attach(request: RequestId, gateway: WorkerId, *, held: Epoch | None = None) -> Call:
    """`held`: the epoch at which this gateway held the client edges; refused as stale if another
    holds them at a higher one.
    """
    return Call.of("attach", gateway, request, held)


def reattach(gateway: WorkerId, held: Mapping[RequestId, Epoch]) -> Call:
    """Attach several requests in one call. `held`: the epoch at which this gateway held each; 0
    takes the request from any gateway.
    """
    return Call.of("attach", gateway, {request: epoch or "" for request, epoch in held.items()})


@script
def detach(request: RequestId, gateway: WorkerId, epoch: Epoch) -> Call:
    """Stop reading an answer at a gateway: another gateway may attach, or the conductor aborts the
    request.
    """
    ...


class EdgePosition(NamedTuple):
    """Position of a gateway in a client edge: chunks received and acknowledged, and the epoch at
    which it checked the edge's producer.

    `checked` is None if nothing more is read from the edge.
    """

    edge: EdgeName
    producer: StageName
    received: int
    checked: Epoch | None
    acked: int


class StreamPosition(NamedTuple):
    """Position of a gateway in an answer, and the epoch at which it reads the answer. There is at
    least one edge.
    """

    request: RequestId
    gateway: WorkerId
    epoch: Epoch
    edges: Sequence[EdgePosition]


def stale_streams(streams: Sequence[StreamPosition]) -> Call:
    """Read only: return the indices of the streams for which Redis has something new."""
    args: list[Arg] = []
    for stream in streams:
        args += (stream.request, stream.gateway, stream.epoch, len(stream.edges))
        for at in stream.edges:
            checked = "" if at.checked is None else at.checked
            args += (at.edge, at.producer, at.received, checked, at.acked)
    return Call("stale_streams", tuple(args))


@script
def sweep(leader: str, early: int = 0) -> Call:
    """Delete the audio of ended requests whose retention is over, and of at least the `early`
    oldest. The answer "more" means that others are due.
    """
    ...


@script
def record_playback(request: RequestId, played_samples: int, underruns: int) -> Call: ...


def record_metrics(counted: Mapping[str, int], seen: Mapping[str, int]) -> Call:
    """Add `counted` to the current step of the time series, and overwrite the gauges `seen`, which
    are equal for all gateways.
    """
    return Call.of("record_metrics", len(counted), counted, seen)
