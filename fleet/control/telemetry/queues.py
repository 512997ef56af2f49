"""What waits for each role, and the requests that were given up. Knows no worker's inside."""

from collections.abc import Mapping, Sequence
from typing import cast

import redis.asyncio

from fleet.control import keys
from fleet.control.connect import pairs, text
from fleet.control.dead_letters import DeadLetter, letter_of, spec_of
from fleet.control.views import RoleView
from fleet.core.errors import NotFound, UnknownWireVersion
from fleet.core.ids import Epoch, RequestId, RoleName, StageName
from fleet.core.telemetry import DeadLetterView, PendingGrant, Queue

MAX_PENDING = 100
Rates = Mapping[str, Mapping[str, float]]


async def read_queues(
    client: redis.asyncio.Redis, roles: Sequence[RoleView], stages: Mapping[str, StageName], rates: Rates
) -> list[Queue]:
    """`stages`: by role. `rates`: tasks a second by role, under `in` and `out`."""
    pipe = client.pipeline(transaction=False)
    for role in roles:
        pipe.xrange(keys.role(RoleName(role.role)), count=MAX_PENDING)
        pipe.xinfo_groups(keys.role(RoleName(role.role)))
    pipe.time()
    answers = tuple(await pipe.execute(raise_on_error=False))
    *replies, (seconds, micros) = cast("tuple[*tuple[object, ...], tuple[int, int]]", answers)
    now_ms = seconds * 1000 + micros / 1000
    return [
        _queue(role, stages.get(role.role, StageName(role.role)), rates, replies[2 * n], replies[2 * n + 1], now_ms)
        for n, role in enumerate(roles)
    ]


def _queue(role: RoleView, stage: StageName, rates: Rates, entries: object, groups: object, now_ms: float) -> Queue:
    delivered = _delivered(groups)
    found = cast("list[tuple[bytes, object]]", entries) if isinstance(entries, list) else []
    return Queue(
        role=RoleName(role.role),
        stage=stage,
        queue_depth=role.queue_depth,
        lag=role.lag,
        oldest_s=round(role.oldest_s, 3),
        workers=role.workers,
        draining=role.draining,
        standby=role.standby,
        running=role.running,
        capacity=role.capacity,
        in_per_s=round(rates["in"].get(role.role, 0.0), 3),
        out_per_s=round(rates["out"].get(role.role, 0.0), 3),
        pending=tuple(_pending(text(entry), pairs(raw), delivered, now_ms) for entry, raw in found),
    )


def _delivered(groups: object) -> tuple[int, int]:
    """The last entry that some worker has read."""
    told = cast("list[dict[str, object]]", groups) if isinstance(groups, list) else []
    return max((_order(text(group["last-delivered-id"])) for group in told), default=(0, 0))


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)


def _pending(entry: str, fields: Mapping[str, bytes], delivered: tuple[int, int], now_ms: float) -> PendingGrant:
    return PendingGrant(
        request=RequestId(text(fields.get("r"))),
        stage=StageName(text(fields.get("s"))),
        epoch=Epoch(int(text(fields.get("e")) or 0)),
        age_s=round(max(0.0, now_ms - _order(entry)[0]) / 1000, 3),
        alone=fields.get("a") == b"1",
        read=_order(entry) <= delivered,
    )


async def read_letters_async(client: redis.asyncio.Redis) -> list[DeadLetter]:
    """All letters, the newest first."""
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", await client.xrevrange(keys.DEAD))
    return [letter_of(text(entry), fields) for entry, fields in entries]


async def find_letter(client: redis.asyncio.Redis, request: RequestId) -> DeadLetter:
    """Raises: NotFound."""
    for letter in await read_letters_async(client):
        if letter.request == request:
            return letter
    raise NotFound(f"no dead letter {request!r}; GET /v1/fleet/dead-letters lists those there are", param="request_id")


def letter_view(letter: DeadLetter) -> DeadLetterView:
    try:
        spec = spec_of(letter)
    except UnknownWireVersion:
        return DeadLetterView(id=letter.request, stage=letter.stage, why=letter.why, died_us=letter.died_us, readable=False)
    return DeadLetterView(
        id=letter.request,
        stage=letter.stage,
        why=letter.why,
        died_us=letter.died_us,
        kind=spec.kind,
        num_prompt_tokens=len(spec.prompt_ids),
        audio_s=round(sum(clip.num_samples / clip.rate_hz for clip in spec.audio), 3),
    )
