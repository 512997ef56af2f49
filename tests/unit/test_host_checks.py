"""Checks of a host by `fleet doctor`: ports, certificates, disk, checkpoint; each refusal says what
to change.
"""

import os
import re
import socket
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from fleet.cli import host_checks
from fleet.config import load_config
from fleet.config.safety import Finding
from fleet.config.settings import EnvironmentSettings
from tests.certificates import DAY, Authority
from tests.support import call_cli, free_port, set_options


def settings(redis_url: str | None = None) -> EnvironmentSettings:
    return EnvironmentSettings(redis_url=redis_url, config_path=None, api_key=None, port=None)


def check_gateway_certificate(certificate: Path, key: Path) -> Finding:
    config = load_config(None, (f"web.tls_cert={certificate}", f"web.tls_key={key}"))
    (finding,) = host_checks.check_certificates(config, settings())
    return finding


@pytest.mark.parametrize(
    ("days", "verdict", "line"),
    [
        (90, "OK", "valid for (89|90) more days"),
        (5, "WARNING", "expires in [45] days, on .*; renew it"),
        (-2, "REFUSED", "expired on .*; renew it"),
    ],
)
def test_certificate_is_checked_by_the_days_that_it_is_valid(
    days: int, verdict: str, line: str, tmp_path: Path
) -> None:
    finding = check_gateway_certificate(*Authority(tmp_path).issue("web", days * DAY))
    assert finding.verdict == verdict and re.search(line, finding.text)


def test_certificate_with_another_key_is_refused(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path).issue("web", 90 * DAY)
    _, other_key = Authority(tmp_path).issue("other", 90 * DAY)
    finding = check_gateway_certificate(certificate, other_key)
    assert finding.refused and finding.text.startswith(
        f"web.tls_key: {other_key} is not the key of {certificate}"
    )


def test_files_that_are_missing_or_no_certificate_are_refused(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("web", 90 * DAY)
    assert (
        "cannot be read (No such file" in check_gateway_certificate(tmp_path / "none", key).refusal
    )
    assert (
        "cannot be read (No such file"
        in check_gateway_certificate(certificate, tmp_path / "none").refusal
    )
    assert "contains no certificate" in check_gateway_certificate(key, key).refusal


def test_certificates_that_the_redis_address_names_are_checked(tmp_path: Path) -> None:
    authority, _ = Authority(tmp_path).issue("authority", -2 * DAY)
    certificate, key = Authority(tmp_path).issue("client", 90 * DAY)
    url = (
        f"rediss://redis:6379?ssl_ca_certs={authority}&ssl_certfile={certificate}&ssl_keyfile={key}"
    )
    first, second = host_checks.check_certificates(load_config(None, ()), settings(url))
    assert (
        first.refused
        and first.text.startswith("REDIS_URL: ssl_ca_certs: ")
        and "name the file of the new authority" in first.text
    )
    assert (second.subject, second.verdict) == ("Redis client", "OK")


def test_bundle_of_authorities_is_valid_if_one_of_them_is(tmp_path: Path) -> None:
    old, _ = Authority(tmp_path).issue("old", -2 * DAY)
    new, _ = Authority(tmp_path).issue("new", 90 * DAY)
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(old.read_bytes() + new.read_bytes())
    (finding,) = host_checks.check_certificates(
        load_config(None, ()), settings(f"rediss://redis:6379?ssl_ca_certs={bundle}")
    )
    assert finding.verdict == "OK" and re.search("valid for (89|90) more days", finding.text)


def test_encrypted_key_is_checked_with_the_password_of_the_address(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("client", 90 * DAY)
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    form, encryption = (
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    key.write_bytes(plain.private_bytes(serialization.Encoding.PEM, form, encryption))
    url = f"rediss://redis:6379?ssl_certfile={certificate}&ssl_keyfile={key}"
    (finding,) = host_checks.check_certificates(
        load_config(None, ()), settings(f"{url}&ssl_password=secret")
    )
    assert finding.verdict == "OK"
    (finding,) = host_checks.check_certificates(
        load_config(None, ()), settings(f"{url}&ssl_password=other")
    )
    assert finding.refused and str(key) in finding.text


def test_port_that_another_process_has_is_refused_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (finding,) = host_checks.check_ports(load_config(None, (f"web.port={port}",)), settings())
    assert finding.refused and "choose another with --set web.port=PORT; process " in finding.text
    assert f"process {os.getpid()} (" in finding.text
    (finding,) = host_checks.check_ports(
        load_config(None, (f"web.port={free_port()}",)), settings()
    )
    assert finding.verdict == "OK"


def test_disk_that_the_append_only_file_may_fill_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, (f"data_dir={tmp_path}/new/data",))
    for free_mib, verdict in ((100_000, "OK"), (500, "WARNING"), (10, "REFUSED")):
        monkeypatch.setattr(
            host_checks.shutil,
            "disk_usage",
            lambda _, free=free_mib: type("Usage", (), {"free": free * 2**20}),
        )
        (finding,) = host_checks.check_disk(config, settings())
        assert finding.verdict == verdict and f"{free_mib} MiB are free" in finding.text
    assert not (tmp_path / "new").exists()
    assert list(host_checks.check_disk(config, settings("redis://127.0.0.1"))) == [], (
        "it is the disk of another host"
    )


@pytest.mark.parametrize(
    ("checkpoint", "verdict", "line"),
    [
        ("auto", "OK", "checkpoints/pocket$"),
        ("tiny", "OK", "is written to .* at the first start"),
        ("some/name", "REFUSED", "some/name is not in .*; run `fleet models fetch --config FILE`"),
        ("/nowhere", "REFUSED", "no folder /nowhere; set a folder"),
    ],
)
def test_checkpoint_is_looked_for_and_neither_written_nor_downloaded(
    checkpoint: str, verdict: str, line: str, tmp_path: Path
) -> None:
    config = load_config(None, (f"data_dir={tmp_path}/data", f"checkpoint={checkpoint}"))
    (finding,) = host_checks.check_checkpoint(config, settings())
    assert (
        finding.verdict == verdict
        and re.search(line, finding.text)
        and not (tmp_path / "data").exists()
    )


def test_up_refuses_an_expired_certificate_and_warns_of_one_that_expires_soon(
    tmp_path: Path,
) -> None:
    certificate, key = Authority(tmp_path).issue("web", -2 * DAY)
    done = call_cli(
        "up",
        *set_options(f"web.tls_cert={certificate}", f"web.tls_key={key}", "web.port=0"),
        cwd=tmp_path,
    )
    assert done.returncode == 1 and re.fullmatch(
        r"fleet: web\.tls_cert: .* expired on .*; renew it.*\n", done.stderr
    )
