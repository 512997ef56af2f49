"""Accepted requests that Redis has lost come back with their audio, beyond the bound of admission
and at every gateway that reads them; no answer is lost, and none differs.
"""

import asyncio
import random
import shutil
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis

from fleet.config import FleetConfig
from fleet.control import client as gateway_client
from fleet.control import keys
from fleet.control.client import FleetClient
from fleet.control.stream import ClientStream
from fleet.core.errors import BadInput, RedisUnreachable
from fleet.core.ids import CLIENT, EdgeName, Epoch, RequestId, StageName
from fleet.core.request import AudioClip, RequestSpec
from fleet.graphs.qwen3_omni import THINKER
from fleet.stages.base import BuiltStage
from fleet.stages.builders import build_options
from fleet.stages.fake import FakeTask
from tests.control_plane import (
    GATEWAY,
    OTHER_GATEWAY,
    REQUEST,
    SEEN,
    STAGE,
    WORKER,
    Control,
    join,
)
from tests.disturbances import OMNI, config_in_step, restart_empty
from tests.harness import (
    EdgeArrays,
    assert_same,
    build,
    fake_spec_of,
    gateway_at,
    open_processes,
    ready,
)
from tests.support import RedisProcess, await_until, wait_until

BOUND = 8
"""Number of requests of a round, which is `limits.max_requests`."""
FEW_ROUNDS, MANY_ROUNDS = 2, 60
NEWCOMERS = tuple(f"newcomer-{number}" for number in range(BOUND))
"""Requests that hold every place of the fleet after Redis lost its data."""
Lose = Callable[[RedisProcess, Path], None]


def lose_all(server: RedisProcess, _: Path) -> None:
    with redis.Redis.from_url(server.url) as admin, admin.pipeline(transaction=True) as pipe:
        pipe.flushall()
        pipe.sadd(keys.LIVE, *NEWCOMERS)
        pipe.execute()


def restart_on_an_empty_disk(server: RedisProcess, folder: Path) -> None:
    restart_empty(server, folder)
    take_all_places(server)


def restart_on_an_older_disk(server: RedisProcess, folder: Path) -> None:
    server.kill()
    shutil.rmtree(folder)
    shutil.copytree(copy_of(folder), folder)
    server.start()
    take_all_places(server)


def take_all_places(server: RedisProcess) -> None:
    with redis.Redis.from_url(server.url) as admin:
        admin.sadd(keys.LIVE, *NEWCOMERS)


def keep_older_disk(server: RedisProcess, folder: Path) -> None:
    """Copy the data of Redis, for `restart_on_an_older_disk`."""
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("auto-aof-rewrite-percentage", 0)
        wait_until(
            lambda: not admin.info("persistence")["aof_rewrite_in_progress"],
            "the append-only file to be complete",
        )
    shutil.rmtree(copy_of(folder), ignore_errors=True)
    shutil.copytree(folder, copy_of(folder), ignore=shutil.ignore_patterns("*.sock"))


def copy_of(folder: Path) -> Path:
    return folder.with_name("older")


LOSSES: dict[str, Lose] = {
    "flushed": lose_all,
    "empty disk": restart_on_an_empty_disk,
    "older disk": restart_on_an_older_disk,
}


def build_hearing(config: FleetConfig, stage: StageName) -> BuiltStage:
    """Build a stage of the fake engine; the answer depends on the audio of the prompt, without
    which the stage fails.
    """
    plain = build(config, stage)
    if stage != THINKER:
        return plain

    def adapter(spec: RequestSpec, blob: bytes | None) -> FakeTask:
        if blob is None:
            raise BadInput("the audio of the prompt is missing")
        heard = zlib.crc32(blob) % 1000
        heard_spec = msgspec.structs.replace(spec, prompt_ids=(*spec.prompt_ids, heard))
        return FakeTask(heard_spec, build_options(config, stage, Path()))

    return BuiltStage(engine=plain.engine, adapter=adapter)


@dataclass(slots=True)
class AnswerReader:
    """Client of one answer: what it has received, and its stream."""

    spec: RequestSpec
    stream: ClientStream
    parts: dict[EdgeName, list[np.ndarray]] = field(
        default_factory=dict[EdgeName, list[np.ndarray]]
    )

    async def read(self, most: int) -> None:
        """Receive at most `most` chunks; fewer at the end of the answer."""
        async for chunk in self.stream:
            arrays = [np.frombuffer(t.data or b"", t.dtype) for t in chunk.tensors.values()]
            self.parts.setdefault(chunk.edge, []).extend(arrays)
            most -= 1
            if not most:
                return

    async def read_rest(self) -> EdgeArrays:
        async with asyncio.timeout(90):
            await self.read(-1)
        return {edge: np.concatenate(arrays) for edge, arrays in self.parts.items()}

    async def resume(self, client: FleetClient) -> "AnswerReader":
        """Read the answer again at another gateway. A client leaves out what it has."""
        found = await client.requests.resume(self.spec.id)
        assert found is not None, f"{self.spec.id} is unknown at the other gateway"
        return AnswerReader(self.spec, found[1])


@dataclass(slots=True, kw_only=True)
class LosingFleet:
    """Two gateways of a fleet, and a Redis that loses its data."""

    server: RedisProcess
    folder: Path
    first: FleetClient
    second: FleetClient
    rng: random.Random
    expected: dict[bytes, EdgeArrays] = field(default_factory=dict[bytes, EdgeArrays])

    async def submit(self, blob: bytes) -> AnswerReader:
        clip = AudioClip(offset_samples=0, num_samples=len(blob) // 4, rate_hz=16_000)
        spec = msgspec.structs.replace(
            fake_spec_of(self.first.config), audio=(clip,), reply={"mirror": "1"}, session=""
        )
        return AnswerReader(spec, await self.first.requests.submit(spec, blob))

    async def expect(self, blobs: list[bytes]) -> None:
        """Record the undisturbed answer to each prompt."""
        for blob in blobs:
            self.expected[blob] = await (await self.submit(blob)).read_rest()

    async def run_round(self, lose: Lose) -> None:
        """Answer as many prompts as the bound allows while Redis loses its data. Some clients have
        resumed at the second gateway before, and one resumes there afterwards. An older disk has
        half of the requests, as they were submitted.
        """
        blobs = list(self.expected)
        readers = [await self.submit(blob) for blob in blobs[: BOUND // 2]]
        await asyncio.to_thread(keep_older_disk, self.server, self.folder)
        readers += [await self.submit(blob) for blob in blobs[BOUND // 2 :]]
        assert await self.first.telemetry.num_live() == BOUND
        for reader in readers:
            await reader.read(self.rng.randrange(1, 12))
        for number in range(1, BOUND, 2):
            readers[number] = await readers[number].resume(self.second)
            await readers[number].read(self.rng.randrange(1, 20))
        await asyncio.to_thread(lose, self.server, self.folder)
        readers[0] = await readers[0].resume(self.second)
        received = await asyncio.gather(*(reader.read_rest() for reader in readers))
        for blob, got in zip(blobs, received, strict=True):
            assert_same(got, self.expected[blob])
        await self._end_round()

    async def _end_round(self) -> None:
        def newcomers_leave() -> None:
            with redis.Redis.from_url(self.server.url) as admin:
                admin.srem(keys.LIVE, *NEWCOMERS)

        async def none_live() -> bool:
            return await self.first.telemetry.num_live() == 0

        await asyncio.to_thread(newcomers_leave)
        await await_until(none_live, "every answer to be acknowledged")
        await ready(self.first)


@asynccontextmanager
async def open_bench(server: RedisProcess, folder: Path) -> AsyncIterator[LosingFleet]:
    config = config_in_step(f"limits.max_requests={BOUND}")
    rng = random.Random(5)
    async with (
        open_processes(server.url, config, build_hearing) as (_, first),
        gateway_at(server.url, config) as second,
    ):
        bench = LosingFleet(server=server, folder=folder, first=first, second=second, rng=rng)
        await bench.expect([rng.randbytes(4 * 4000) for _ in range(BOUND)])
        yield bench


async def run_rounds(server: RedisProcess, folder: Path, loss: str, num_rounds: int) -> None:
    async with open_bench(server, folder) as bench:
        for _ in range(num_rounds):
            await bench.run_round(LOSSES[loss])


@pytest.mark.one_in(6, "restored requests")
@pytest.mark.parametrize("loss", LOSSES)
async def test_accepted_requests_survive_the_loss_of_all_data(
    own_redis: RedisProcess, tmp_path: Path, loss: str
) -> None:
    await run_rounds(own_redis, tmp_path / "redis", loss, FEW_ROUNDS)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", LOSSES)
async def test_accepted_requests_survive_many_losses_of_all_data(
    own_redis: RedisProcess, tmp_path: Path, loss: str
) -> None:
    await run_rounds(own_redis, tmp_path / "redis", loss, MANY_ROUNDS)


async def test_request_whose_client_leaves_during_the_loss_is_not_restored_for_good(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    async with open_bench(own_redis, tmp_path / "redis") as bench:
        reader = await bench.submit(next(iter(bench.expected)))
        await reader.read(2)
        await asyncio.to_thread(lose_all, own_redis, tmp_path)
        await reader.stream.abort("the client left")
        await bench._end_round()  # pyright: ignore[reportPrivateUsage]


async def test_resumed_answer_is_not_continued_with_other_rows(
    own_redis: RedisProcess, tmp_path: Path
) -> None:
    """Where recomputed rows may differ, a client that has resumed elsewhere gets an error, although
    the second gateway has sent nothing yet: the client has a part of the answer.
    """
    config = config_in_step("numerics=fast")
    async with (
        open_processes(own_redis.url, config, build_hearing) as (_, first),
        gateway_at(own_redis.url, config) as second,
    ):
        bench = LosingFleet(
            server=own_redis,
            folder=tmp_path / "redis",
            first=first,
            second=second,
            rng=random.Random(5),
        )
        reader = await bench.submit(bytes(64))
        await reader.read(3)
        resumed = await reader.resume(second)
        await asyncio.to_thread(lose_all, own_redis, tmp_path)
        with pytest.raises(RedisUnreachable, match="in mid-answer"):
            await resumed.read_rest()


LOST = RequestId("req-2")


async def test_lost_request_is_restored_as_soon_as_redis_is_back(
    own_redis: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has no chunk yet is restored when Redis is back, however long the gateway's
    poll and the renewal of its lease wait.
    """
    monkeypatch.setattr(gateway_client, "SLOW_POLL_S", 3600.0)
    config = config_in_step("lease.worker_ttl_s=3000")
    with redis.Redis.from_url(own_redis.url) as client:
        assert all(join(client, f"{stage.name}@test:0:a") == ["ok"] for stage in OMNI.stages)
        async with gateway_at(own_redis.url, config) as gateway:
            spec = fake_spec_of(config)
            stream = await gateway.requests.submit(spec, None)
            await asyncio.to_thread(restart_empty, own_redis, tmp_path)

            async def is_there() -> bool:
                return bool(await asyncio.to_thread(client.exists, keys.request(spec.id)))

            await await_until(is_there, "the request to be restored")
            await stream.abort("enough")


def test_restored_request_is_written_as_it_was_submitted(control: Control) -> None:
    """A request is restored at the bound, with its audio, its session, the stored form of its
    answer and the gateway's epoch, and its stages are granted.
    """
    assert control.submit("req-3", bound=1)[0] == "full"
    assert control.restore() == ["ok", str(SEEN)]
    client = control.client
    assert client.get(keys.blob(LOST)) == b"sound"
    assert client.hget(keys.request(LOST), "session") == b"talk"
    task = control.task(CLIENT, LOST)
    assert (task["epoch"], task["owner"], task["state"]) == (str(SEEN), GATEWAY, "running")
    assert control.task(STAGE, LOST)["state"] == "granted" and control.epoch(STAGE, LOST) > SEEN
    assert control.claim(worker=WORKER, request=LOST) == "ok"
    assert client.sismember(keys.LIVE, LOST)


def test_request_is_restored_once_and_only_by_a_listed_gateway(control: Control) -> None:
    assert control.restore(gateway=OTHER_GATEWAY) == ["unlisted"]
    assert not control.client.exists(keys.request(LOST))
    assert [control.restore()[0] for _ in range(2)] == ["ok", "exists"]
    assert control.restore(REQUEST) == ["exists"]


@pytest.mark.parametrize("first_to_restore", ["earlier", "later"])
def test_restored_request_belongs_to_the_gateway_that_attached_last(
    control: Control, first_to_restore: str
) -> None:
    """Redis lost a request together with the notice that it has moved: whichever of both gateways
    restores it, the later one keeps it.
    """
    control.register(OTHER_GATEWAY, "")
    holders = {"earlier": (GATEWAY, SEEN), "later": (OTHER_GATEWAY, Epoch(SEEN + 10))}
    gateway, epoch = holders[first_to_restore]
    assert control.restore(epoch=epoch, gateway=gateway)[0] == "ok"
    answers = {
        name: control.attach(holder, held=held, request=LOST)
        for name, (holder, held) in holders.items()
        if name != first_to_restore
    }
    assert answers == ({"later": "ok"} if first_to_restore == "earlier" else {"earlier": "stale"})
    assert control.task(CLIENT, LOST)["owner"] == OTHER_GATEWAY
