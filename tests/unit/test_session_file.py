"""Files of saved sessions: a file is complete, or stays as it was before the save; and what the
client of the session service refuses.
"""

from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from safetensors import SafetensorError

from fleet.config import FleetConfig
from fleet.core.errors import BadInput, RedisUnreachable
from fleet.core.ids import StageName
from fleet.core.session_messages import SessionInfo
from fleet.core.session_parts import check_parts
from fleet.worker.sessions import client as session_client
from fleet.worker.sessions.client import SessionClient, SessionFile

INFO = SessionInfo(
    num_rows=2, num_layers=2, layout="float32, 2 heads of 16", checkpoint="c", stage="lm"
)
LAYER = memoryview(bytes(range(256)) * 2)
SESSION = SessionFile(
    info=INFO, parts={"keys": memoryview(bytes(range(16))), "0": LAYER, "1": LAYER}
)


def test_written_session_is_read_again(tmp_path: Path) -> None:
    SESSION.write(tmp_path / "s.safetensors")
    assert SessionFile.read(tmp_path / "s.safetensors") == SESSION
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_session_that_cannot_be_written_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.safetensors"
    file.write_bytes(b"earlier")

    def fill_disk(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(session_client, "save_file", fill_disk)
    with pytest.raises(
        BadInput, match=r"s\.safetensors: cannot be written: No space left on device"
    ):
        SESSION.write(file)
    assert file.read_bytes() == b"earlier" and list(tmp_path.iterdir()) == [file]


def test_session_is_not_written_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        SESSION.write(tmp_path / "missing" / "s.safetensors")


def test_session_without_a_layer_or_keys_is_incomplete() -> None:
    check_parts(INFO, {"keys": 16, "0": 512, "1": 512})
    with pytest.raises(BadInput, match="lacks keys, 0"):
        check_parts(INFO, {"1": 512})


def test_unreachable_redis_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = redis.Redis()

    def refuse(*_: Any) -> None:
        raise RedisConnectionError("refused")

    monkeypatch.setattr(client, "hget", refuse)
    with pytest.raises(RedisUnreachable, match="Redis does not answer"):
        SessionClient(client, FleetConfig(), None).worker_of(StageName("lm"), "s", "name")
