"""Registration: a worker joins only if its numerics, transfer and record signature match the listed
workers'; otherwise it ends with one line that names the difference and the remedy.
"""

import logging
import re
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
from fleet.models.causal_lm.tiny import write_tiny_checkpoint
from fleet.process.fleet_secret import read_fleet_secret
from fleet.transfer.factory import open_transfer
from fleet.transfer.nixl import NixlTransfer
from fleet.transfer.reach import LOCAL, Reach
from fleet.worker.main import build_stage
from fleet.worker.process.peers import PeerAccess
from fleet.worker.process.redis_link import RedisLink
from fleet.worker.process.registration import process_fields, register_worker
from fleet.worker.worker_process import WorkerProcess
from tests.control_plane import (
    LEASE_US,
    Control,
    join,
    set_deadline,
)
from tests.harness import answer, fake_spec, gateway, ready, settings_of, thread_fleet

SPLIT = load_config(
    None, ("engine=fake", "device=cpu", "transfer.kind=redis", "stages.thinker.split={}")
)
PREFILL, DECODE = WorkerId("thinker.prefill@there:1:a"), RoleName("thinker.decode")
DTYPE_AND_SIZE = (
    "engine, dtype, numerics and page_size_tokens, .*for all workers of a stage that is split"
)
SPANS = "stages.lm.spans={anchor: 0:1, workers: [2:output]}"
FAST, INVARIANT = (
    load_config(None, ("graph=text", "device=cpu", SPANS, f"numerics={kind}"))
    for kind in ("fast", "invariant")
)
ANCHOR = WorkerId("lm@there:1:a")
VLLM_SPLIT = load_config(
    None, ("stages.thinker.engine=vllm", "device=cpu", "dtype=float32", "stages.thinker.split={}")
)


PAGES = {"dtype": "float32", "page_size_tokens": "16"}
ON_VLLM = {
    "engine": "vllm",
    "tensor_parallel_size": "1",
    "quantization": "none",
    "device_kind": "cpu",
}


@pytest.mark.parametrize(
    ("config", "alike", "field", "listed", "remedy"),
    [
        (SPLIT, PAGES, "dtype", "bfloat16", f"set one {DTYPE_AND_SIZE}"),
        (SPLIT, PAGES, "page_size_tokens", "32", f"set one {DTYPE_AND_SIZE}"),
        (VLLM_SPLIT, ON_VLLM, "engine", "torch", "one section vllm"),
        (VLLM_SPLIT, ON_VLLM, "tensor_parallel_size", "2", "one section vllm"),
        (VLLM_SPLIT, ON_VLLM, "quantization", "fp8", "one section vllm"),
        (VLLM_SPLIT, ON_VLLM, "device_kind", "cuda", "one section vllm"),
    ],
)
def test_half_with_other_settings_than_the_listed_half_does_not_join(
    redis_url: str,
    client: redis.Redis,
    config: FleetConfig,
    alike: dict[str, str],
    field: str,
    listed: str,
    remedy: str,
) -> None:
    assert join(client, PREFILL, stage="thinker", **{**alike, field: listed}) == ["ok"]
    built = build_stage(SPLIT, StageName("thinker"), Path())
    settings = settings_of(config, DECODE, built, dtype="float32", device="cpu")
    worker = WorkerProcess(redis_url, settings)
    why = f"its {field} is {alike[field]}, that of {PREFILL} is {listed}; .* {remedy}"
    with pytest.raises(VersionSkew, match=why):
        worker.run()


def record_of(config: FleetConfig, role: str, **other: str) -> dict[str, str | bytes]:
    return {
        **process_fields(
            config, config.role(role), fingerprint="abc", device="cpu", dtype="float32"
        ),
        **other,
    }


def register(
    client: redis.Redis, config: FleetConfig, worker: str, record: dict[str, str | bytes]
) -> None:
    register_worker(client, config, config.role(worker.partition("@")[0]), WorkerId(worker), record)


@pytest.mark.parametrize("role", ["lm", "lm.span"])
def test_worker_with_other_kernels_is_refused_where_numerics_are_invariant(
    client: redis.Redis, role: str
) -> None:
    """With invariant numerics, a worker with another instruction set or torch build is refused: it
    rounds differently, so that a recovered answer would have other bytes.
    """
    register(client, INVARIANT, ANCHOR, record_of(INVARIANT, "lm", kernels="SSE of torch 1.0"))
    own = re.escape(str(record_of(INVARIANT, role)["kernels"]))
    with pytest.raises(
        VersionSkew,
        match=f"worker {role} is refused: its kernels is {own}, that of {ANCHOR} is SSE of "
        "torch 1.0; with numerics",
    ) as refused:
        register(client, INVARIANT, f"{role}@here:1:b", record_of(INVARIANT, role))
    assert "numerics: fast" in str(refused.value) and "page_size_tokens" not in str(refused.value)
    alike = record_of(INVARIANT, role, kernels="SSE of torch 1.0")
    register(client, INVARIANT, f"{role}@here:1:c", alike)
    assert client.zscore(keys.WORKERS, f"{role}@here:1:c") is not None


def test_worker_with_another_gpu_is_refused_by_its_stage_where_numerics_are_invariant(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = {"cuda:0": "H200", "cuda:1": "L4"}
    monkeypatch.setattr("torch.cuda.get_device_name", gpus.__getitem__)
    config = load_config(None, ("device=cuda", "numerics=invariant"))

    def join_on(role: str, device: str, number: int) -> str:
        fields = process_fields(
            config, config.role(role), fingerprint="abc", device=device, dtype="bfloat16"
        )
        worker = f"{role}@here:1:{number}"
        register(client, config, worker, fields)
        return worker

    first = join_on("talker", "cuda:0", 1)
    join_on("code2wav", "cuda:1", 2)
    with pytest.raises(
        VersionSkew, match=f"its gpu_kernels is L4 with .*, that of {first}.*GPUs of one kind"
    ):
        join_on("talker", "cuda:1", 3)


def test_refused_anchor_ends_with_the_reason(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    built = build_stage(INVARIANT, StageName("lm"), write_tiny_checkpoint(tmp_path))
    # last: its lease lapses
    register(client, INVARIANT, ANCHOR, record_of(INVARIANT, "lm", kernels="SSE of torch 1.0"))
    assert built.route is not None
    settings = settings_of(
        INVARIANT, RoleName("lm"), built, fingerprint="abc", device="cpu", dtype="float32"
    )
    worker = WorkerProcess(redis_url, settings)
    with pytest.raises(
        VersionSkew, match="worker lm is refused: its kernels is .*, that of lm@there"
    ):
        worker.run()


def test_kernels_are_not_compared_where_numerics_are_fast(client: redis.Redis) -> None:
    register(client, FAST, ANCHOR, record_of(FAST, "lm", kernels="SSE of torch 1.0"))
    fields = record_of(FAST, "lm.span")
    assert "kernels" not in fields and "kernels" not in record_of(SPLIT, DECODE)
    register(client, FAST, "lm.span@here:1:b", fields)
    assert client.zscore(keys.WORKERS, "lm.span@here:1:b") is not None


@pytest.mark.parametrize(
    "field", ["dtype", "numerics", "engine", "checkpoint", "package", "protocol"]
)
def test_span_worker_that_computes_otherwise_than_its_anchor_does_not_join(
    client: redis.Redis, field: str
) -> None:
    register(client, FAST, ANCHOR, record_of(FAST, "lm", **{field: "other"}))
    with pytest.raises(
        VersionSkew,
        match=f"its {field} is .*, that of {ANCHOR} is other; run one version and one checkpoint",
    ):
        register(client, FAST, "lm.span@here:1:b", record_of(FAST, "lm.span"))


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
    """A worker's transfer, and a transfer that a stranger opened under its own name."""
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
    assert link.find_unlisted([]) == [] and link.find_unlisted([LISTED, STRANGER]) == [STRANGER]
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
    """A transfer that has only metadata."""

    def __init__(self) -> None:
        pass

    def metadata(self) -> bytes:
        return b"nixlSerDes|"


def check_refusals(
    control: Control, listed: str, role: str, fields: dict[str, str], other: dict[str, str]
) -> None:
    """Check that a worker is refused for each field in which it differs from the worker
    `listed`.
    """
    assert join(control.client, listed, **fields) == ["ok"]
    for field, own_value in other.items():
        answer = join(control.client, f"{role}@{field}", **{**fields, field: own_value})
        why = f"its {field} is {own_value}, that of {listed} is {fields[field]}"
        assert answer == ["skew", why]
    assert control.client.zcard(keys.REFUSED) == len(other)
    assert join(control.client, f"{role}@b", **fields) == ["ok"]


def test_worker_of_another_version_is_refused_with_a_stored_reason(control: Control) -> None:
    fields = {"protocol": "1", "package": "2.0", "checkpoint": "abc"}
    other = {"protocol": "2", "package": "2.1", "checkpoint": "abd"}
    check_refusals(control, "lm@new:1:a", "lm", fields, other)


def test_split_stage_workers_with_different_page_layout_are_refused(control: Control) -> None:
    fields = {"stage": "lm", **PAGES, **ON_VLLM}
    other = {
        "dtype": "bfloat16",
        "page_size_tokens": "32",
        "engine": "torch",
        "tensor_parallel_size": "2",
        "quantization": "fp8",
        "device_kind": "cuda",
    }
    check_refusals(control, "lm.prefill@a", "lm.decode", fields, other)
    other_stage = {**fields, "stage": "voice", "dtype": "bfloat16"}
    assert join(control.client, "voice.decode@c", **other_stage) == ["ok"], "it shares no pages"
    assert join(control.client, "ears@d") == ["ok"]


def test_stored_refusals_are_bounded_in_age_and_number_while_more_come(control: Control) -> None:
    """Stored refusals are bounded in age and number, although a worker that is restarted again and
    again has a new id each time.
    """
    assert join(control.client, "lm@new:1:a", package="2.0") == ["ok"]
    long_ago_us = int(control.client.time()[0] - 3700) * 1_000_000
    control.client.zadd(keys.REFUSED, {"lm@old:1:a its package is 1.0": long_ago_us})
    for number in range(110):
        assert join(control.client, f"lm@new:1:{number}", package="2.1")[0] == "skew"
    entries = cast("list[bytes]", control.client.zrange(keys.REFUSED, 0, -1))
    stored = [text(entry).partition(" ")[0] for entry in entries]
    assert stored == [f"lm@new:1:{number}" for number in range(10, 110)]


def test_lapsed_workers_do_not_refuse_another_version(control: Control) -> None:
    """Workers whose leases have lapsed but that are not fenced yet do not cause a worker of another
    version to be refused.
    """
    assert join(control.client, "lm@dead:1:a", checkpoint="old") == ["ok"]
    assert join(control.client, "lm@next:1:a", checkpoint="new")[0] == "skew", (
        "the first worker may still be alive"
    )
    set_deadline(control.client, "lm@dead:1:a", 1)
    assert join(control.client, "lm@next:1:b", checkpoint="new") == ["ok"]
    assert join(control.client, "lm@next:1:c", checkpoint="old")[0] == "skew", (
        "the live worker decides the version"
    )


def test_checkpoints_are_compared_among_workers_of_a_stage_if_stages_have_their_own(
    client: redis.Redis,
) -> None:
    config = load_config(None, ("graph=cascade", "device=cpu"))
    for worker, checkpoint in (("asr@h:1:a", "1"), ("lm@h:2:b", "2"), ("lm@h:3:c", "2")):
        register(client, config, worker, record_of(config, worker[:-6], checkpoint=checkpoint))
    with pytest.raises(VersionSkew, match="its checkpoint is 3, that of lm@h:"):
        register(client, config, "lm@h:4:d", record_of(config, "lm", checkpoint="3"))
