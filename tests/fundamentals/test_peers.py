"""Workers that cannot read each other's tensors, or that have different fleet secrets, cannot serve
one fleet.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import redis
import yaml

from fleet.config import FleetConfig, load_config
from fleet.control import keys, scripts
from fleet.control.connect import run, text
from fleet.core.errors import TransferError, VersionSkew
from fleet.core.ids import RoleName, StageName, WorkerId
from fleet.process.fleet_secret import read_fleet_secret
from fleet.transfer.factory import open_transfer
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import LOCAL, Reach
from fleet.worker.main import build_stage
from fleet.worker.process.peers import PeerAccess
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.worker_process import WorkerProcess
from tests.fundamentals.control_plane import LEASE_US, join
from tests.harness import answer, fake_spec, gateway, ready, settings_of, thread_fleet

MIB = 1024 * 1024
LISTED, NEW, STRANGER = (
    WorkerId("thinker@there:1:a"),
    WorkerId("talker@here:2:b"),
    WorkerId("thinker@evil:3:c"),
)
LOCAL_HERE = {"host": "here", "reach": "host", "place": "here 0"}
LOCAL_THERE = {"host": "there", "reach": "host", "place": "there 0"}
OTHER_USER = {"host": "here", "reach": "host", "place": "here 1000"}
NETWORKED = {"host": "there", "reach": "network", "place": ""}
INLINE = {"host": "there"}
SECRET, OTHER_SECRET = {"key_id": "aaaa"}, {"key_id": "bbbb"}
Fields = dict[str, str | bytes]


@pytest.mark.parametrize(
    ("listed", "new"),
    [
        (LOCAL_THERE, LOCAL_HERE),
        (NETWORKED, LOCAL_HERE),
        (LOCAL_HERE, NETWORKED),
        (OTHER_USER, LOCAL_HERE),
    ],
)
def test_local_only_worker_is_refused_beside_one_of_another_host(
    client: redis.Redis, listed: dict[str, str], new: dict[str, str]
) -> None:
    assert join(client, LISTED, **listed) == ["ok"]
    _, why = join(client, NEW, **new)
    assert (
        f"those of {LISTED} by" in why
        and "set transfer.interface for every worker" in why
        and "\n" not in why
    )
    assert client.exists(keys.worker(NEW)) == 0
    run(client, scripts.fence_worker("", LISTED))
    assert join(client, NEW, **new) == ["ok"], "only live workers count"


@pytest.mark.parametrize(
    ("listed", "new"),
    [
        (LOCAL_HERE, LOCAL_HERE),
        (NETWORKED, {**NETWORKED, "host": "here"}),
        (INLINE, LOCAL_HERE),
        (LOCAL_HERE, INLINE),
    ],
)
def test_workers_with_compatible_reach_are_accepted(
    client: redis.Redis, listed: dict[str, str], new: dict[str, str]
) -> None:
    assert join(client, LISTED, **listed) == ["ok"]
    assert join(client, NEW, **new) == ["ok"]


@pytest.mark.parametrize(
    ("listed", "new", "why"),
    [
        (SECRET, {}, f"it has no fleet secret, {LISTED} has one"),
        ({}, SECRET, f"it has a fleet secret, {LISTED} has none"),
        (SECRET, OTHER_SECRET, f"its fleet secret is not that of {LISTED}"),
    ],
)
def test_worker_with_another_secret_or_none_is_refused(
    client: redis.Redis, listed: dict[str, str], new: dict[str, str], why: str
) -> None:
    assert join(client, LISTED, **listed) == ["ok"]
    assert (
        join(client, NEW, **new)[1]
        == f"{why}; set security.fleet_secret to a file of the same content for every worker"
    )
    gateway_record = scripts.register(WorkerId("gateway@here"), "", LEASE_US, {"kind": "gateway"})
    assert text(run(client, gateway_record)) == "ok", "a gateway reads no tensors"
    run(client, scripts.fence_worker("", LISTED))
    assert join(client, NEW, **new) == ["ok"]


def secret_file(tmp_path: Path, content: str) -> Path:
    path = tmp_path / f"secret-{content[0]}"
    path.touch(mode=0o600)
    path.write_text(content * 32)
    return path


def config_with(secret: Path | None, *overrides: str) -> FleetConfig:
    given = (f"security.fleet_secret={secret}",) if secret else ()
    return load_config(None, ("engine=fake", "device=cpu", *given, *overrides))


def test_worker_process_without_the_secret_of_the_fleet_ends_with_one_line(
    redis_url: str, tmp_path: Path
) -> None:
    signed = config_with(secret_file(tmp_path, "a"))
    with thread_fleet(redis_url, *overrides_of(signed), without="talker"):
        plain = config_with(None, "transfer.kind=redis")
        built = build_stage(plain, StageName("talker"), Path())
        process = WorkerProcess(redis_url, settings_of(plain, RoleName("talker"), built))
        with pytest.raises(
            VersionSkew,
            match=r"talker is refused: it has no fleet secret, .*security\.fleet_secret",
        ) as refused:
            process.run()
    assert "\n" not in refused.value.message


def overrides_of(config: FleetConfig) -> tuple[str, ...]:
    return ("transfer.kind=redis", f"security.fleet_secret={config.security.fleet_secret}")


@pytest.fixture
def transfers() -> Iterator[tuple[NixlTransfer, NixlTransfer]]:
    """A worker's transfer, and one that a stranger opened under its own name."""
    opened = tuple(open_transfer("nixl", worker, MIB, MIB) for worker in (LISTED, STRANGER))
    yield cast("tuple[NixlTransfer, NixlTransfer]", opened)
    for transfer in opened:
        transfer.close()


def test_forged_tampered_and_replayed_records_are_not_read_from(
    client: redis.Redis,
    tmp_path: Path,
    transfers: tuple[NixlTransfer, NixlTransfer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = read_fleet_secret(secret_file(tmp_path, "a"))
    honest, stranger = transfers
    access = PeerAccess(LOCAL, secret)
    record = access.record(LISTED, "thinker", {"kind": "worker"}, honest)
    assert text(run(client, scripts.register(LISTED, "thinker", LEASE_US, record))) == "ok"
    link = RedisLink(client, NEW, RoleName("talker"), secret)
    assert link.read_peer_metadata(LISTED) == honest.metadata()

    other_key = PeerAccess(LOCAL, read_fleet_secret(secret_file(tmp_path, "b"))).record(
        LISTED, "thinker", {}, stranger
    )
    forgeries: list[tuple[WorkerId, Fields]] = [
        (LISTED, {"transfer": stranger.metadata()}),
        (LISTED, {"place": "elsewhere"}),
        (LISTED, other_key),
        (STRANGER, record),
        (STRANGER, {"role": "thinker", "transfer": stranger.metadata()}),
    ]
    for worker, fields in forgeries:
        client.delete(keys.worker(STRANGER), keys.worker(LISTED))
        for key, value in [
            *((LISTED, item) for item in record.items()),
            *((worker, item) for item in fields.items()),
        ]:
            client.hset(keys.worker(key), *value)
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(TransferError, match=r"not signed with security\.fleet_secret"),
        ):
            link.read_peer_metadata(worker)
    assert len([line for line in caplog.messages if "is not read from" in line]) == 2, (
        "one line for each worker"
    )
    assert link.is_registered(LISTED)
    client.delete(keys.worker(LISTED), keys.worker(STRANGER))
    assert link.read_peer_metadata(LISTED) is None, "a removed record is not reported as forged"


@pytest.mark.usefixtures("pulled")
async def test_fleet_with_a_secret_answers_and_shows_it_nowhere(
    redis_url: str, tmp_path: Path, client: redis.Redis
) -> None:
    path = secret_file(tmp_path, "s")
    with thread_fleet(redis_url, f"security.fleet_secret={path}", transfer="nixl") as fleet:
        async with gateway(fleet) as client_of_fleet:
            await ready(client_of_fleet)
            received = await answer(client_of_fleet, fake_spec(fleet))
            assert all(len(array) for array in received.values())
        # The fleet still runs: a key may be gone when it is read.
        stored = b"".join([client.dump(key) or b"" for key in client.scan_iter()])
        assert b"s" * 32 not in stored
        assert "s" * 32 not in yaml.safe_dump(fleet.config.model_dump(mode="json"))


@pytest.mark.usefixtures("pulled")
async def test_request_with_an_unauthenticated_producer_fails(
    redis_url: str, tmp_path: Path
) -> None:
    path = secret_file(tmp_path, "s")
    overrides = (f"security.fleet_secret={path}", "transfer.deadline_s=0.05")
    stranger = open_transfer("nixl", STRANGER, MIB, MIB)
    with thread_fleet(redis_url, *overrides, transfer="nixl") as fleet:
        for loop in fleet.loops:
            fleet.clients[0].hset(keys.worker(loop.worker), "transfer", stranger.metadata())
        async with gateway(fleet) as client_of_fleet:
            await ready(client_of_fleet)
            with pytest.raises(TransferError, match="not signed"):
                await answer(client_of_fleet, fake_spec(fleet))
    stranger.close()


def test_reach_is_registered(redis_url: str) -> None:
    assert (
        PeerAccess(Reach(("lo",))).record(NEW, "talker", {}, MetadataOnlyTransfer())["reach"]
        == "network"
    )
    assert (
        PeerAccess(LOCAL).record(NEW, "talker", {}, MetadataOnlyTransfer())["place"] == LOCAL.place
    )


class MetadataOnlyTransfer(NixlTransfer):
    """A transfer with metadata only."""

    def __init__(self) -> None:
        pass

    def metadata(self) -> bytes:
        return b"nixlSerDes|"
