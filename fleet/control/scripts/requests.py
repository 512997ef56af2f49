"""Calls of the scripts that write whole requests: submission, client attachment, end, retention."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from fleet.config.api_keys import NO_LIMITS, KeyLimits
from fleet.control.scripts.calls import Arg, Call, script
from fleet.core.events import RequestSubmitted, encode_event
from fleet.core.ids import EdgeName, Epoch, RequestId, RoleName, StageName, WorkerId
from fleet.core.request import RequestSpec, encode_request

API_RIGHT, OPERATOR_RIGHT = "api", "operator"
"""Right by which `DELETE /v1/fleet/requests/{id}` may abort a request, whichever gateway holds its
client edges.
"""
RETENTION_S, AUDIO_RETENTION_S = 600, 60
"""Default retention in seconds of a request's keys after its end. Audio, in edge logs and prompts,
is large and retained for less time.
"""


Waits = Literal["", "turn", "soon"]
"""What a refused request waits for: "" for nothing; "turn" for its turn among the waiting clients;
"soon" for its turn and for workers that will soon claim its tasks.
"""


def kind_of(spec: RequestSpec) -> str:
    """Return a request's default kind: "speech" if it has several client edges, else "text"."""
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
    client: str = "",
    waits: Waits = "",
    limits: KeyLimits = NO_LIMITS,
    ordered_by: str | None = None,
) -> Call:
    """Submit a request, with `blob` as the samples of its audio prompt. Refused at `bound` live
    requests, and unless every role in `roles` has a worker, is starting one, or lost its last one
    less than `grace_us` ago.

    `client`: client whose live requests the request is counted among; "" for the fleet's own.
    `waits`: a request that can wait is also refused while it is the turn of other waiting clients
    ("turn", "soon"), and while its roles have enough unclaimed tasks ("soon"). `limits`: limits of
    the request's API key, at which a counted request is refused too. `ordered_by`: name of the
    API key of the operator who ordered a retry, for the journal; None for other requests.

    `stages`, `edges`: stages and edges of its graph that it uses. `first_roles`: role to which each
    stage's task is granted first; by default the stages' own names.
    `retention_s`: seconds for which the request's keys outlive the request. Logs of the edges in
    `audio` outlive it for `AUDIO_RETENTION_S`.
    """
    written = _written(spec, blob, stages, edges, audio, retention_s, first_roles, client)
    quota = (limits.max_requests, limits.audio_s_per_day)
    order = (ordered_by is not None, ordered_by)
    return Call.of(
        "submit", spec.id, gateway, bound, ",".join(roles), grace_us, waits, quota, order, written
    )


def restore(
    spec: RequestSpec,
    blob: bytes | None,
    *,
    epoch: Epoch,
    stages: Sequence[StageName],
    edges: Sequence[EdgeName],
    gateway: WorkerId,
    audio: Sequence[EdgeName] = (),
    retention_s: int = RETENTION_S,
    first_roles: Sequence[RoleName] = (),
    client: str = "",
) -> Call:
    """Write a live request again that Redis has lost; no bound refuses it, since it was admitted
    before. `epoch`: epoch at which the gateway holds the client edges. Otherwise as `submit`.
    """
    written = _written(spec, blob, stages, edges, audio, retention_s, first_roles, client)
    return Call.of("restore", spec.id, gateway, epoch, written)


def _written(
    spec: RequestSpec,
    blob: bytes | None,
    stages: Sequence[StageName],
    edges: Sequence[EdgeName],
    audio: Sequence[EdgeName],
    retention_s: int,
    first_roles: Sequence[RoleName],
    client: str,
) -> list[Arg]:
    """Return a request as `begin_request` in `lua/common` takes it."""
    submitted = RequestSubmitted(request=spec.id, graph=spec.graph, outputs=spec.outputs)
    return [
        encode_request(spec),
        blob or b"",
        ",".join(stages),
        ",".join(edges),
        ",".join(spec.outputs),
        encode_event(submitted),
        spec.session,
        spec.kind or kind_of(spec),
        spec.model,
        ",".join(audio),
        retention_s,
        AUDIO_RETENTION_S,
        ",".join(first_roles or stages),
        client,
        spec.key if spec.is_counted else "",
        spec.prompt_audio_ms,
        spec.audio_hz,
    ]


def admission(
    request: RequestId,
    *,
    bound: int,
    gateway: WorkerId,
    roles: Sequence[RoleName],
    grace_us: int,
    client: str = "",
    waits: Waits = "",
    key: str = "",
    limits: KeyLimits = NO_LIMITS,
) -> Call:
    """Ask whether a request would be admitted now, without submitting it. Answers the refusal that
    `submit` would give, or "ok" with the number of further requests allowed below `bound`. `key`:
    API key towards whose `limits` the request would count; "" for none.
    """
    quota = (key, limits.max_requests, limits.audio_s_per_day)
    return Call.of(
        "admission", bound, request, gateway, ",".join(roles), grace_us, client, waits, quota
    )


def take_turns(
    gateway: WorkerId,
    *,
    bound: int,
    roles: Sequence[RoleName],
    numbers: Mapping[str, int],
    is_all: bool,
) -> Call:
    """Report a gateway's waiting requests, and ask which clients' turn it is. `numbers`: number of
    waiting requests by client, as the change since the last report or, with `is_all`, in total.
    Answers "ok", the number of free places, for each of `roles` how many more tasks its workers
    will soon claim, and the clients; or "unlisted" if a report with `is_all` is needed.
    """
    return Call.of("take_turns", gateway, bound, is_all, ",".join(roles), numbers)


@script
def backlog() -> Call:
    """Read the number of waiting requests, the number of gateways at which requests wait, the
    number of live requests, and the recent rate at which requests end, per 1000 s.
    """
    ...


@script
def abort(request: RequestId, right: str | Epoch, reason: str, by: str = "") -> Call:
    """Close a request as aborted. `right`: epoch at which the caller holds the client edges,
    `API_RIGHT`, or `OPERATOR_RIGHT`; `by` is then the name of the operator's API key, for the
    journal.
    """
    ...


class VoiceHold(NamedTuple):
    """A voice session, and the epoch at which a gateway holds it."""

    session: str
    epoch: int


def attach(
    request: RequestId,
    gateway: WorkerId,
    *,
    held: Epoch | None = None,
    voice: VoiceHold | None = None,
) -> Call:
    """Attach a gateway as the reader of a request's answer. `held`: epoch at which this gateway
    held the client edges before; None takes them from any gateway. `voice`: voice session to which
    the answer belongs. Answers "stale" if another gateway holds the client edges at an epoch above
    `held`, or holds the session.
    """
    return Call.of("attach", gateway, voice or ("", ""), request, held)


def reattach(gateway: WorkerId, held: Mapping[RequestId, Epoch]) -> Call:
    """Attach a gateway as the reader of several requests' answers. `held`: epoch at which this
    gateway held the client edges before, by request; 0 takes them from any gateway.
    """
    held_at = {request: epoch or "" for request, epoch in held.items()}
    return Call.of("attach", gateway, ("", ""), held_at)


@script
def detach(request: RequestId, gateway: WorkerId, epoch: Epoch) -> Call:
    """Detach a gateway from an answer that it no longer reads: another gateway may attach, or the
    conductor aborts the request.
    """
    ...


class EdgePosition(NamedTuple):
    """A gateway's position in a client edge: number of chunks received and acknowledged, and the
    epoch of the edge's producer at the last check.

    `checked` is None if the gateway reads nothing more from the edge.
    """

    edge: EdgeName
    producer: StageName
    received: int
    checked: Epoch | None
    acked: int


class StreamPosition(NamedTuple):
    """A gateway's position in an answer. `epoch`: epoch at which the gateway reads the answer.
    `edges`: at least one position in a client edge.
    """

    request: RequestId
    gateway: WorkerId
    epoch: Epoch
    edges: Sequence[EdgePosition]


def stale_streams(streams: Sequence[StreamPosition]) -> Call:
    """Find the streams that lag behind Redis. Answers the indices of these streams in `streams`;
    writes nothing.
    """
    args: list[Arg] = []
    for stream in streams:
        args += (stream.request, stream.gateway, stream.epoch, len(stream.edges))
        for at in stream.edges:
            checked = "" if at.checked is None else at.checked
            args += (at.edge, at.producer, at.received, checked, at.acked)
    return Call("stale_streams", tuple(args))


@script
def abandon(leader: str, timeout_us: int) -> Call:
    """Abort requests without a gateway for longer than `timeout_us`, in the role of the conductor.
    The answer "more" means that further requests are due.
    """
    ...


@script
def overdue(leader: str, timeout_us: int, grace_us: int | None) -> Call:
    """Decide about grants that were not claimed within `timeout_us`, in the role of the conductor:
    lost grants are repeated, and requests for a role without workers fail. `grace_us`: time for
    which a role may have no worker; None if absent workers were not observed for so long. The
    answer "more" means that further grants are due.
    """
    ...


@script
def restart_waits(leader: str) -> Call:
    """Restart, in the role of the conductor, the measured wait of every unclaimed grant and of
    every request without a gateway, for example after Redis's clock was set.
    """
    ...


@script
def sweep(leader: str, early: int = 0) -> Call:
    """Delete the audio of ended requests whose retention is over, and of at least the `early`
    oldest, even if their retention is not over. The answer "more" means that further requests are
    due.
    """
    ...


@script
def record_playback(request: RequestId, played_samples: int, underruns: int) -> Call: ...


@script
def note_request(request: RequestId, name: str, value: str) -> Call: ...


@script
def claim_export(request: RequestId, gateway: WorkerId) -> Call: ...


def record_metrics(
    gateway: WorkerId,
    counted: Mapping[str, int],
    seen: Mapping[str, int],
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Call:
    """Add the increments `counted` to the current step of the fleet's time series, and overwrite
    the gauges `seen`, which have the same value at all gateways. Refusals are also entered in the
    journal of the fleet, under `gateway`. `refused`: ids of the refused requests and the error's
    message, as `ID,ID|MESSAGE`, by the name of their count in `counted`.
    """
    return Call.of("record_metrics", gateway, len(refused), len(counted), refused, counted, seen)
