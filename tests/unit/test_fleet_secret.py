"""The fleet's secret: which files may hold it, and which records its MAC accepts."""

import os
from pathlib import Path

import pytest

from fleet.core.errors import ConfigError
from fleet.core.ids import WorkerId
from fleet.process.fleet_secret import SIGNED, FleetSecret, read_fleet_secret

TEXT = b"0123456789abcdef0123456789abcdef"
WORKER, OTHER = WorkerId("lm@here:1:a"), WorkerId("lm@here:2:b")
RECORD: dict[str, str | bytes] = {
    "role": "lm",
    "transfer": b"\x00metadata",
    "reach": "host",
    "place": "here",
    "running": "0",
}


def written(path: Path, content: bytes = TEXT, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_secret_file_is_read_without_blanks_around_it(tmp_path: Path) -> None:
    record = read_fleet_secret(written(tmp_path / "one", b"\n" + TEXT + b"\n")).signed(
        WORKER, RECORD
    )
    assert read_fleet_secret(written(tmp_path / "two", mode=0o400)).verifies(WORKER, record)


@pytest.mark.parametrize("mode", [0o604, 0o660, 0o620, 0o602, 0o644])
def test_secret_file_that_others_can_open_is_refused_with_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    path = written(tmp_path / "secret", mode=mode)
    with pytest.raises(
        ConfigError, match=rf"security\.fleet_secret: .* {mode:04o}\); run: chmod 600 {path}"
    ):
        read_fleet_secret(path)


def test_secret_file_of_a_group_is_refused_unless_it_is_given_by_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fstat = written(tmp_path / "secret", mode=0o440), os.fstat

    def owned_by(uid: int) -> None:
        monkeypatch.setattr(
            os, "fstat", lambda file: os.stat_result([*fstat(file)[:4], uid, *fstat(file)[5:10]])
        )

    owned_by(1000)
    with pytest.raises(ConfigError, match="is open to other users"):
        read_fleet_secret(path)
    owned_by(0)  # as Kubernetes gives it to a pod with an fsGroup
    read_fleet_secret(path)


def test_secret_of_random_bytes_may_end_with_a_blank(tmp_path: Path) -> None:
    read_fleet_secret(written(tmp_path / "secret", b"\n" + bytes(range(100, 130)) + b" "))


@pytest.mark.parametrize("content", [b"", b"short", b" " * 64, TEXT[:30] + b"\n"])
def test_short_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"security\.fleet_secret: .* holds {len(content.strip())} bytes, and at least 32 ",
    ):
        read_fleet_secret(written(tmp_path / "secret", content))


def test_missing_secret_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.fleet_secret: .*No such file") as refused:
        read_fleet_secret(tmp_path / "none")
    assert refused.value.param == "security.fleet_secret"
    with pytest.raises(ConfigError, match=r"security\.fleet_secret: "):
        read_fleet_secret(tmp_path)


def test_signed_record_is_accepted_with_fields_that_are_not_signed_changed() -> None:
    signed = FleetSecret(TEXT).signed(WORKER, RECORD)
    from_redis = {
        name: value.encode() if isinstance(value, str) else value for name, value in signed.items()
    }
    assert FleetSecret(TEXT).verifies(WORKER, {**from_redis, "running": b"3", "draining": b"1"})


@pytest.mark.parametrize("name", [*SIGNED, "mac"])
def test_record_is_refused_with_any_signed_field_changed_or_missing(name: str) -> None:
    secret = FleetSecret(TEXT)
    whole: dict[str, str | bytes] = {**dict.fromkeys(SIGNED, "x"), **RECORD}
    signed = secret.signed(WORKER, whole)
    assert secret.verifies(WORKER, signed)
    assert not secret.verifies(WORKER, {**signed, name: "other"})
    assert not secret.verifies(WORKER, {key: value for key, value in signed.items() if key != name})


def test_record_is_refused_under_another_worker_id_or_secret_and_across_fields() -> None:
    secret = FleetSecret(TEXT)
    signed = secret.signed(WORKER, RECORD)
    assert not secret.verifies(OTHER, signed)
    assert not FleetSecret(TEXT + b"0").verifies(WORKER, signed)
    assert not secret.verifies(WORKER, {**signed, "reach": "", "place": "hosthere"}), (
        "a value moved into the next field"
    )


def test_secret_is_in_no_record_and_no_representation() -> None:
    secret = FleetSecret(TEXT)
    shown = repr(secret) + repr(secret.signed(WORKER, RECORD)) + secret.key_id
    assert TEXT.decode() not in shown and TEXT.hex() not in shown
    assert FleetSecret(TEXT + b"0").key_id != secret.key_id
