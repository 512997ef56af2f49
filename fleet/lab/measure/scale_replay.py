"""Replay of the Redis calls of many streams, which measures the cost of Redis alone: one process
appends, reads and acknowledges in place of two workers.

A step of all streams is sent in groups, since a worker that serves many streams sends several
chunks in one call. With no engine and one process beside Redis, the chunks per second that Redis
alone would serve follow from its CPU time.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fleet.control import scripts
from fleet.control.connect import connect, run
from fleet.control.notices import ChunkNotice
from fleet.core.chunk import WireTensor, encode_chunk
from fleet.core.ids import Epoch, RequestId, StageName
from fleet.lab.measure.pair import (
    CONSUMER,
    PRODUCER,
    BareRedis,
    RunScript,
    ack_of,
    append_of,
    bare_redis,
    links_of,
    num_commands,
    ok,
    open_requests,
)
from fleet.lab.measure.scale_costs_result import Replay
from fleet.worker.process.redis_link import RedisLink

CODES_BYTES, AUDIO_BYTES = 64, 15_360
"""Sizes in bytes of the tensors of two kinds of chunk: a frame of codes, and 0.32 s of audio as
sent to clients.
"""
GROUP = 4
"""Number of chunks per call, as a worker of 300 streams sends them."""
ACK_STRIDE = 4
Opened = Sequence[tuple[RequestId, Mapping[StageName, Epoch]]]


def measure_replay(streams: int, steps: int, tensor_bytes: int) -> Replay:
    """Append, read and acknowledge `steps` chunks of each stream; return the costs. Raises:
    ConfigError if there is no Redis to start.
    """
    with bare_redis() as server:
        with (
            connect(server.url, one_connection=True) as producer,
            connect(server.url, one_connection=True) as consumer,
        ):
            # its size must only grow meanwhile
            producer.config_set("auto-aof-rewrite-percentage", 0)
            links = links_of(partial(RedisLink, consumer))
            call = partial(run, producer)
            opened = open_requests(call, links, streams)
            return _replay(server, call, producer.info, links, opened, steps, tensor_bytes)


def _replay(
    server: BareRedis,
    call: RunScript,
    info: Callable[[str], Any],
    links: Mapping[StageName, RedisLink],
    opened: Opened,
    steps: int,
    size: int,
) -> Replay:
    cpu_s, logged, commands, payload, received = (
        server.cpu_s(),
        _logged_bytes(info),
        num_commands(info("commandstats")),
        0,
        0,
    )
    tensors = {"data": WireTensor("uint8", (size,), bytes(size))}
    for index in range(steps):
        for first in range(0, len(opened), GROUP):
            group = opened[first : first + GROUP]
            items = [
                append_of(request, epochs[PRODUCER], index, tensors, first_row=index * size)
                for request, epochs in group
            ]
            payload += sum(len(encode_chunk(item.chunk)) for item in items)
            ok(call(scripts.append(items)))
            received += _receive(links, group, index)
    num_chunks = steps * len(opened)
    assert received == num_chunks, f"{received} of {num_chunks} chunks arrived"
    return Replay(
        streams=len(opened),
        chunks=num_chunks,
        tensor_bytes=size,
        payload_bytes=payload / num_chunks,
        redis_us=(server.cpu_s() - cpu_s) / num_chunks * 1e6,
        append_only_bytes=(_logged_bytes(info) - logged) / num_chunks,
        commands=(num_commands(info("commandstats")) - commands) / num_chunks,
    )


def _receive(links: Mapping[StageName, RedisLink], group: Opened, index: int) -> int:
    """Read the arrived chunks as their consumer, and acknowledge every `ACK_STRIDE` chunks; return
    the number of chunks read.
    """
    acks = [
        ack_of(request, epochs[CONSUMER], index)
        for request, epochs in group
        if index and index % ACK_STRIDE == 0
    ]
    turn = links[CONSUMER].exchange([scripts.ack(acks)] if acks else [], free_slots=0, block_ms=0)
    if acks:
        links[PRODUCER].exchange((), free_slots=0, block_ms=0)
    return sum(isinstance(notice, ChunkNotice) for notice in turn.notices)


def _logged_bytes(info: Callable[[str], Any]) -> int:
    """Return the size of the append-only file, including data that Redis has yet to write: Redis
    delays writes for up to 2 s if the disk is busy.
    """
    persistence = info("persistence")
    return int(persistence["aof_current_size"]) + int(persistence["aof_buffer_length"])
