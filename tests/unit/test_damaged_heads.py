"""Damaged files of draft heads and trainers, and damaged heads received from other workers: each is
refused by name.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.core.errors import ConfigError, TransferError
from fleet.core.ids import StageName, WorkerId
from fleet.drafts.eagle3.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_head,
    pack_head,
    save_head,
    unpack_head,
)
from fleet.drafts.exchange.follower import HeadFollower, HeadMemory, HeadSettings
from fleet.drafts.figures.head_holders import HeldHead
from fleet.drafts.trainer.state import (
    MANIFEST_FILE,
    MOMENTS_FILE,
    TrainedSamples,
    read_samples,
    restore_trainer,
    save_trainer,
)
from fleet.spans.net.ring import BlockPort, BlockReads
from tests.draft_heads import make_head
from tests.support import wait_until
from tests.unit.test_draft_trainer import greedy_sample, make_trainer

pytestmark = pytest.mark.one_file_in(3, "parts with processes")

FIXTURES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
BYTES = st.binary(min_size=1, max_size=9)


def changed(data: bytes, at: int, put: bytes) -> bytes:
    at %= len(data)
    return data[:at] + put + data[at + len(put) :]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trainer that has trained a head."""
    folder = tmp_path_factory.mktemp("trained") / "state"
    trainer = make_trainer([greedy_sample([1, 2, 3]), greedy_sample([4, 5, 6])])
    trainer.train_window()
    save_trainer(
        trainer, folder, TrainedSamples(contained=("a", "b"), windows=(("a",), ("b",)), first=1)
    )
    return folder


def copied(folder: Path, into: Path) -> Path:
    into.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    return into


@given(at=st.integers(0, 10**6), put=BYTES, name=st.sampled_from([CONFIG_FILE, WEIGHTS_FILE]))
@FIXTURES
def test_damaged_head_is_loaded_as_another_or_refused_by_name(
    tmp_path: Path, at: int, put: bytes, name: str
) -> None:
    """A damaged head file is refused by name or, if a changed value of its description is still
    valid, loaded as another head.
    """
    save_head(make_head(), tmp_path)
    file = tmp_path / name
    file.write_bytes(changed(file.read_bytes(), at, put))
    try:
        load_head(tmp_path)
        unpack_head(pack_head(tmp_path))
    except ConfigError as error:
        assert error.message


@given(at=st.integers(0, 10**6), put=BYTES, cut=st.integers(0, 10**6))
@FIXTURES
def test_damaged_packed_head_is_refused_by_name(
    tmp_path: Path, at: int, put: bytes, cut: int
) -> None:
    save_head(make_head(), tmp_path)
    packed = pack_head(tmp_path)
    for data in (changed(packed, at, put), packed[: cut % len(packed)], put):
        try:
            unpack_head(data)
        except ConfigError as error:
            assert error.message


VALUES = [
    None,
    -1,
    0,
    10**12,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    [],
    {},
    True,
    ["a", 1],
    [[1]],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_description_of_a_head_with_a_wrong_value_is_refused_or_read(
    tmp_path: Path, value: Any
) -> None:
    save_head(make_head(), tmp_path)
    whole = (tmp_path / CONFIG_FILE).read_text()
    for name in ("format", "sha256", "config", *json.loads(whole)["config"]):
        described = json.loads(whole)
        place = described["config"] if name in described["config"] else described
        place[name] = value
        (tmp_path / CONFIG_FILE).write_text(json.dumps(described))
        try:
            load_head(tmp_path)
        except ConfigError as error:
            assert error.message


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_state_of_a_trainer_with_a_wrong_value_is_refused_or_read(
    tmp_path: Path, trained: Path, value: Any
) -> None:
    folder = copied(trained, tmp_path)
    whole = (folder / MANIFEST_FILE).read_text()
    for name in json.loads(whole):
        (folder / MANIFEST_FILE).write_text(json.dumps(json.loads(whole) | {name: value}))
        for read in (
            lambda: read_samples(folder),
            lambda: restore_trainer(make_trainer([]), folder),
        ):
            try:
                read()
            except ConfigError as error:
                assert error.message


@given(
    at=st.integers(0, 10**6),
    put=BYTES,
    name=st.sampled_from([MANIFEST_FILE, MOMENTS_FILE, WEIGHTS_FILE, CONFIG_FILE]),
)
@FIXTURES
def test_damaged_state_of_a_trainer_is_refused_by_name(
    tmp_path: Path, trained: Path, at: int, put: bytes, name: str
) -> None:
    folder = copied(trained, tmp_path)
    (folder / name).write_bytes(changed((folder / name).read_bytes(), at, put))
    try:
        restore_trainer(make_trainer([]), folder)
    except ConfigError as error:
        assert error.message


def test_deeply_nested_description_is_refused(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[" * 10**6)
    with pytest.raises(ConfigError, match="not JSON"):
        load_head(tmp_path)


@given(data=st.binary(max_size=80), name=st.binary(max_size=20))
def test_ring_refuses_damaged_frames_by_name(data: bytes, name: bytes) -> None:
    port = BlockPort(BlockReads(), lambda: False)
    with pytest.raises(TransferError):
        port.load_peer(name, memoryview(data))
    with pytest.raises(TransferError):
        port.read(data)
    with pytest.raises(TransferError, match="that was not written"):
        port.free_first()


class HeldElsewhere:
    """A worker's view of a fleet whose chosen draft-head version is local, or held by another
    worker.

    `size`: size of the version in bytes, as its holder states it.
    """

    def __init__(self, local: bytes | None, size: int = 8) -> None:
        self._local, self._size = local, size
        self.used: list[object] = []

    def chosen_version(self, _: StageName) -> str:
        return "s"

    def read_version(self, sha256: str) -> Any:
        return SimpleNamespace(number=1, sha256=sha256)

    def find_head_holders(self, sha256: str, _: Any) -> dict[WorkerId, HeldHead]:
        return {WorkerId("w"): HeldHead(sha256=sha256, address=1, num_bytes=self._size)}

    def read_local(self, _: str) -> bytes | None:
        return self._local

    def prepare(self, data: bytes, _: str) -> object:
        raise RuntimeError(f"{len(data)} bytes cannot be a head")

    def use(self, head: object, _: object) -> None:
        self.used.append(head)

    def register(self, _: object) -> bool:
        return True

    def read_blocks(self, *_: Any) -> Any:
        raise AssertionError("a read of a damaged size")


def follower_of(held: HeldElsewhere) -> HeadFollower:
    any_held = cast(Any, held)
    memory = HeadMemory(64, any_held)
    settings = HeadSettings(stage=StageName("lm"), holder_roles=(), deadline_s=1.0, floor=0.0)
    return HeadFollower(settings, any_held, memory, any_held, any_held, lambda _: b"")


def test_head_that_cannot_be_loaded_is_given_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    held = HeldElsewhere(b"12345678")
    follower = follower_of(held)

    def is_given_up() -> bool:
        follower.advance(None)
        return "the draft head cannot be loaded: 8 bytes cannot be a head" in caplog.text

    wait_until(is_given_up, "the head to be given up")
    assert held.used == []
    follower.close()


@pytest.mark.parametrize("size", [-1, 0, 65, 10**12])
def test_head_of_a_damaged_size_is_not_read(size: int, caplog: pytest.LogCaptureFixture) -> None:
    follower = follower_of(HeldElsewhere(None, size))
    follower.advance(None)
    assert f"version 1 has {size} bytes, there is room for 64" in caplog.text
    follower.close()
