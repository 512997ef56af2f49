"""Traffic of the graph's edges over the whole fleet, and the tasks that wait for credit on them.
Knows no page.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from redis.asyncio import Redis

from fleet.control import keys
from fleet.control.connect import text
from fleet.control.telemetry.series import Step, growth_of
from fleet.core.ids import CLIENT, EdgeName, RequestId
from fleet.graphs import Graph
from fleet.telemetry.counts import SentCounts
from fleet.telemetry.views import EdgeFlow

MAX_REQUESTS = 100
"""Maximum number of live requests, drawn at random, whose parked tasks are counted."""


async def read_parked(client: Redis, graph: Graph) -> Counter[EdgeName]:
    """Return the number of parked tasks that wait for credit, by edge, among the tasks of at most
    `MAX_REQUESTS` live requests.
    """
    live = cast("list[bytes]", await client.srandmember(keys.LIVE, MAX_REQUESTS))
    pipe = client.pipeline(transaction=False)
    for request in live:
        for stage in graph.stages:
            pipe.hget(keys.task(RequestId(text(request)), stage.name), "waits")
    replies = cast("list[bytes | None]", await pipe.execute()) if live else []
    # written by `park`: edge, consumer and needed chunks of each edge
    waits = (wait for reply in replies if reply for wait in text(reply).split(","))
    return Counter(EdgeName(wait.partition("|")[0]) for wait in waits)


def flows_of(
    graph: Graph,
    sent: Mapping[str, SentCounts],
    parked: Mapping[EdgeName, int],
    steps: Sequence[tuple[int, Step]],
) -> tuple[EdgeFlow, ...]:
    """Return the traffic of each edge of an answer. `sent`: totals of the listed workers. `steps`:
    the last minute of the time series.
    """
    chunks, num_bytes = growth_of(steps, "chunks"), growth_of(steps, "bytes")
    ends = {CLIENT, *(stage.name for stage in graph.stages)}
    return tuple(
        EdgeFlow(
            edge=edge.name,
            source=edge.source,
            target=edge.target,
            chunks_per_s=round(chunks.get(edge.name, 0.0), 2),
            bytes_per_s=round(num_bytes.get(edge.name, 0.0), 1),
            num_waiting=sent.get(edge.name, SentCounts()).num_waiting,
            num_parked=parked.get(edge.name, 0),
        )
        for edge in graph.edges
        if edge.source in ends and edge.target in ends
    )
