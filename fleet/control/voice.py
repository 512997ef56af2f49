"""Voice sessions in Redis, taken, written and ended under an epoch: one gateway at a time has each. Knows no conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import redis.asyncio

from fleet.config.schema import VoiceConfig
from fleet.control import keys, scripts
from fleet.control.connect import pairs, run_async, text
from fleet.core.chunk import decode_chunk
from fleet.core.errors import SecretInUse
from fleet.core.ids import CLIENT, RequestId, StageName, WorkerId
from fleet.graphs import Graph

OWN_FIELDS = ("epoch", "holder", "owner", "started_us", "away_us")
"""Fields of a session's record that are the scripts' own; the others are what its holder wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVoice:
    """`epoch` is passed with every write; `fields` are what the last holder wrote; `replaced` are sessions of the same owner that
    ended for this one. Units: `age_s` on Redis's clock.
    """

    epoch: int
    age_s: float
    fields: Mapping[str, bytes]
    replaced: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstOutputs:
    """Units: microseconds since 1970; `claimed_us` on Redis's clock, `first_us` on that of each stage's machine."""

    claimed_us: int | None
    first_us: Mapping[str, int]


async def hold(
    client: redis.asyncio.Redis, config: VoiceConfig, session: str, holder: WorkerId, keep_s: float, owner: str, *, new: bool
) -> HeldVoice | None:
    """`owner` names the credential that opened the session: "" for the API key, else a client secret by its hash.

    Raises: SecretInUse.
    """
    bound = config.sessions_per_secret
    call = scripts.hold_voice(session, holder, int(keep_s * 1000), owner, new=new, bound=bound)
    answer = cast("list[object]", await run_async(client, call))
    if len(answer) == 1:
        have = "a session" if bound == 1 else f"{bound} sessions"
        raise SecretInUse(
            f"this client secret has {have} open or in line, as many as it may (voice.sessions_per_secret); continue one with "
            "?session=ID, end one, or make another secret at /v1/realtime/client_secrets"
        )
    if not answer:
        return None
    epoch, age_us, fields, replaced = answer
    return HeldVoice(
        epoch=int(text(epoch)),
        age_s=int(text(age_us)) / 1e6,
        fields={name: value for name, value in pairs(fields).items() if name not in OWN_FIELDS},
        replaced=tuple(text(name) for name in cast("list[object]", replaced)),
    )


async def keep(
    client: redis.asyncio.Redis, session: str, epoch: int, holder: WorkerId, keep_s: float, fields: Mapping[str, bytes],
    gone: Sequence[str],
) -> bool:  # fmt: skip
    """`holder` is written each time: a gateway has another name once its lease has lapsed."""
    call = scripts.keep_voice(session, epoch, int(keep_s * 1000), {**fields, "holder": holder.encode()}, gone)
    return text(await run_async(client, call)) == "ok"


async def was_ended(client: redis.asyncio.Redis, session: str, owner: str) -> bool:
    return text(await client.get(keys.voice_ended(session))) == f"1{owner}"


async def end(client: redis.asyncio.Redis, session: str, epoch: int | None) -> bool:
    return text(await run_async(client, scripts.end_voice(session, epoch))) == "ok"


async def read_views(client: redis.asyncio.Redis) -> dict[str, bytes]:
    """What the holders say of their sessions; the names of those that have ended are forgotten."""
    seconds, micros = await client.time()
    await client.zremrangebyscore(keys.VOICES, "-inf", seconds * 1_000_000 + micros)
    names = [text(name) for name in cast("list[bytes]", await client.zrange(keys.VOICES, 0, -1))]
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.hget(keys.voice(name), "view")
    views = cast("list[bytes | None]", await pipe.execute()) if names else []
    return {name: view for name, view in zip(names, views, strict=True) if view is not None}


async def read_first_outputs(client: redis.asyncio.Redis, graph: Graph, request: RequestId) -> FirstOutputs:
    """Of each stage the first chunk on its edge to the client, or on its first edge where it has none."""
    main = next(stage.name for stage in graph.stages if stage.main)
    told = {stage.name: sorted(graph.edges_from(stage.name), key=lambda edge: edge.target != CLIENT) for stage in graph.stages}
    stages: list[StageName] = [stage for stage, edges in told.items() if edges]
    pipe = client.pipeline(transaction=False)
    pipe.hget(keys.task(request, main), "claimed_us")
    for stage in stages:
        pipe.xrange(keys.edge(request, told[stage][0].name), count=1)
    claimed, *firsts = cast("list[object]", await pipe.execute())
    first_us: dict[str, int] = {}
    for stage, entries in zip(stages, cast("list[list[tuple[bytes, object]]]", firsts), strict=True):
        if entries:
            first_us[stage] = decode_chunk(pairs(entries[0][1])["h"]).made_us
    return FirstOutputs(claimed_us=int(text(claimed)) if claimed else None, first_us=first_us)
