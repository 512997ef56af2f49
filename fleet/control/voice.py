"""Voice sessions in Redis, taken, written and ended under an epoch: one gateway at a time has each. Knows no conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import redis.asyncio

from fleet.control import keys, scripts
from fleet.control.connect import pairs, run_async, text
from fleet.core.chunk import decode_chunk
from fleet.core.ids import CLIENT, RequestId, StageName, WorkerId
from fleet.graphs import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVoice:
    """`epoch` goes with every write; `fields` are what the last holder wrote."""

    epoch: int
    fields: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstOutputs:
    """Units: microseconds since 1970; `claimed_us` on Redis's clock, `first_us` on that of each stage's machine."""

    claimed_us: int | None
    first_us: Mapping[str, int]


async def hold(client: redis.asyncio.Redis, session: str, holder: WorkerId, keep_s: float, *, new: bool) -> HeldVoice | None:
    call = scripts.hold_voice(session, holder, int(keep_s * 1000), new=new)
    answer = cast("list[object]", await run_async(client, call))
    if not answer:
        return None
    fields = pairs(answer[1])
    own = ("epoch", "holder")
    return HeldVoice(epoch=int(text(answer[0])), fields={name: value for name, value in fields.items() if name not in own})


async def keep(
    client: redis.asyncio.Redis, session: str, epoch: int, keep_s: float, fields: Mapping[str, bytes], gone: Sequence[str]
) -> bool:
    return text(await run_async(client, scripts.keep_voice(session, epoch, int(keep_s * 1000), fields, gone))) == "ok"


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
